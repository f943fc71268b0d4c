"""Faults drawn at random, on a run of each axis and feature; each ends as a run without
faults.

`pytest -m chaos -s tests/chaos/test_axes.py` takes about ten minutes on two cores.
CHAOS_SEED=N repeats a campaign, `-k NAME` one case of it. A seed draws which fault
happens in which phase of which step; milliseconds after the phase has begun differ.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxdist.checkpoint.folders import list_steps
from jaxdist.operations.ledger.run_lives import Life, read_lives
from jaxdist.telemetry.metrics import read_rows
from support.chaos_train import Order
from support.launches import (
    apart,
    assert_time_adds_up,
    events,
    leftovers,
    parameters,
    same_bits,
)
from support.paths import ROOT, SUPPORT
from support.runs import SMALL_MODEL, command, environment, every_loss, untimed

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))
FAULTS = 6  # lives of a case that a fault ends
STEPS = 48
FIRST_STEPS = 9  # before the first fault in a step: a checkpoint is sealed by then
LIFE_S = 300  # that a life may take; none does
BAND = 1e-5  # of runs on another mesh, as in docs/evidence/launch.md

SETTINGS = SMALL_MODEL | {
    "train.steps": STEPS,
    "train.eval_every": 6,
    "data.validation_tokens": 1024,
    "model.num_layers": 2,
    "model.dropout": 0.0,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 3,
    "checkpoint.every_steps": 4,
}


@dataclass(frozen=True)
class Case:
    """A run that is put through faults."""

    settings: dict[str, object]
    devices: int
    # the same run on another mesh; empty: the mesh stays
    other_settings: dict[str, object] = field(default_factory=dict)
    other_devices: int = 0
    processes: int = 0  # under `launch`; 0: one process without it
    base: dict[str, object] | None = None  # the run whose weights this one starts from


EXPERTS = {
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.expert_d_ff": 16,
    "model.balance": "sequence",
}
CASES = {
    "expert": Case(
        EXPERTS | {"mesh.expert": 2, "mesh.fsdp": 2},
        devices=4,
        other_settings={"mesh.expert": 1, "mesh.fsdp": 2},
        other_devices=2,
    ),
    "context": Case(
        {"mesh.context": 2, "mesh.fsdp": 2, "context.attention": "ring"},
        devices=4,
        other_settings={"context.attention": "heads"},
        other_devices=4,
    ),
    "pipeline": Case(
        {"mesh.pipeline": 2, "mesh.fsdp": 2, "pipeline.schedule": "1f1b"}
        | {"pipeline.microbatches": 2},
        devices=4,
        other_settings={"mesh.pipeline": 1},
        other_devices=2,
    ),
    "tensor": Case(
        {"mesh.tensor": 2, "mesh.fsdp": 2, "train.ema_decay": 0.9},
        devices=4,
        other_settings={"mesh.tensor": 1, "mesh.fsdp": 1},
        other_devices=1,
    ),
    "offload": Case(
        {"mesh.fsdp": 2, "offload.optimizer": True}
        | {"remat.policy": "offload:block_input"},
        devices=2,
        other_settings={"offload.optimizer": False},
        other_devices=2,
    ),
    "float16": Case(
        # so large a scale that updates are left out, so short an interval that it grows
        {"mesh.fsdp": 2, "precision.compute": "float16"}
        | {"precision.loss_scale": 2.0**26}
        | {"precision.loss_scale_growth_interval": 10},
        devices=2,
    ),
    "lora": Case(
        {"mesh.fsdp": 2, "lora.rank": 2, "lora.targets": ("attention/.*", "mlp/.*")},
        devices=2,
        other_settings={"mesh.fsdp": 1},
        other_devices=1,
        base={"train.steps": 4},
    ),
    "once": Case(
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.reduce": "once"}
        | {"batch.accumulation": 2},
        devices=4,
        other_settings={"mesh.data": 1, "mesh.reduce": "auto"},
        other_devices=2,
    ),
    "launch": Case({"mesh.fsdp": 2}, devices=1, processes=2),
}
NAMES = list(CASES)


class End(NamedTuple):
    """A fault in a process, which ends its life."""

    signal: signal.Signals
    phase: str
    delay_s: float  # the longest after the phase has begun
    codes: tuple[int, ...]  # that may follow (docs/reference/exit-codes-and-events.md)
    signals: int = 1
    full: str = ""  # see `Order`


KILL, TERM, INT, HUP = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)
STARTS = ("compile", "restore")  # phases before the first step
LAST = "end"
# A signal that comes while the run starts ends it at once, with the same code.
ENDS = {
    "kill -9 while compiling": End(KILL, "compile", 0.3, (-9,)),
    "kill -9 in a step": End(KILL, "step", 0.02, (-9,)),
    "SIGTERM in a step": End(TERM, "step", 0.02, (75,)),
    "kill -9 in a save": End(KILL, "save", 0.06, (-9,)),
    "disk full, then a kill": End(KILL, "save", 0, (-9,), full="stays"),
    "kill -9 in an evaluation": End(KILL, "evaluate", 0.03, (-9,)),
    "kill -9 in a restore": End(KILL, "restore", 0.4, (-9,)),
    "SIGINT in an evaluation": End(INT, "evaluate", 0.03, (75,)),
    "kill -9 at the end": End(KILL, LAST, 0.02, (-9,)),
    "SIGTERM in a save": End(TERM, "save", 0.06, (75,)),
    "disk full for a while, then a kill": End(KILL, "save", 0, (-9,), full="passes"),
    "SIGINT in a step": End(INT, "step", 0.02, (75,)),
    # the second one does not wait for the save, if it is not done
    "SIGINT twice in a step": End(INT, "step", 0, (130, 75), signals=2),
    "SIGTERM while compiling": End(TERM, "compile", 0, (75,)),
    "disk full, then SIGTERM": End(TERM, "save", 0, (1,), full="stays"),
    "SIGHUP in a step": End(HUP, "step", 0.02, (75,)),
    "SIGTERM at the end": End(TERM, LAST, 0, (0,)),
}
FLIP, CUT, DELETE = "a byte flipped", "a file cut", "a file deleted"
COPIES_LOST, COPIES_JUNK = "copies lost", "copies damaged, with junk beside"
ALL_LOST, MESH, BASE = "checkpoints lost", "another mesh", "base deleted"
NOTHING = ""
DAMAGES = (
    FLIP,
    NOTHING,
    COPIES_LOST,
    CUT,
    MESH,
    ALL_LOST,
    NOTHING,
    DELETE,
    COPIES_JUNK,
    BASE,
    NOTHING,
)
OF_COPIES = (COPIES_LOST, COPIES_JUNK, ALL_LOST)
OF_CHECKPOINTS = (FLIP, CUT, DELETE)


@dataclass(frozen=True)
class PlannedLife:
    """A life of a run: what ends it, and what happens to its files then."""

    order: Order
    damage: str


@dataclass(frozen=True)
class Plan:
    """All that happens to a run."""

    lives: list[PlannedLife]
    copies: bool  # the run has checkpoint.copy_to
    draw: random.Random  # for the damage


def dealt(deck: list[str], number: int, hand: int) -> list[str]:
    """Returns the cards of a case: all come once before any comes again."""
    return [deck[(number * hand + i) % len(deck)] for i in range(hand)]


def planned(name: str) -> Plan:
    """Returns what the seed draws for a case."""
    case, number = CASES[name], NAMES.index(name)
    draw, decks = random.Random(f"{SEED} {name}"), random.Random(SEED)
    ends = dealt(decks.sample(list(ENDS), len(ENDS)), number, FAULTS)
    damages = dealt(decks.sample(DAMAGES, len(DAMAGES)), number, FAULTS)
    copies = draw.random() < 0.6
    lives = []
    for k, (kind, damage) in enumerate(
        zip(in_order(ends), damages_for(case, damages, copies=copies), strict=True)
    ):
        end = ENDS[kind]
        step = 0 if end.phase in STARTS else FIRST_STEPS + 4 * k + draw.randrange(4)
        order = Order(
            number=k,
            kind=kind,
            rank=draw.randrange(max(1, case.processes)),
            signal=end.signal,
            signals=end.signals,
            phase=end.phase,
            step=0 if end.phase == LAST else step,
            delay_s=draw.choice((0, end.delay_s * draw.random())),
            full=end.full,
        )
        lives.append(PlannedLife(order, damage))
    return Plan(lives, copies, draw)


def in_order(kinds: list[str]) -> list[str]:
    """Returns faults in an order in which each can happen.

    One at the end comes last; a restore needs a checkpoint, which the second life has
    written at the latest.
    """
    last = [kind for kind in kinds if ENDS[kind].phase == LAST]
    others = [kind for kind in kinds if ENDS[kind].phase != LAST]
    others += ["kill -9 in a step"] * len(last[1:])
    starts = [kind for kind in others if ENDS[kind].phase in STARTS]
    running = [kind for kind in others if ENDS[kind].phase not in STARTS]
    compiling = [kind for kind in starts if ENDS[kind].phase == "compile"]
    first = compiling[:1]
    starts = [kind for kind in starts if kind not in first]
    return [*first, running[0], *starts, *running[1:], *last[:1]]


def damages_for(case: Case, damages: list[str], *, copies: bool) -> list[str]:
    """Replaces damage that a case cannot have."""
    chosen: list[str] = []
    for damage in damages:
        needs_copies = damage in OF_COPIES and not copies
        needs_base = damage == BASE and case.base is None
        needs_mesh = damage == MESH and (not case.other_devices or MESH in chosen)
        if needs_copies or needs_base or needs_mesh:
            damage = random.Random(f"{SEED} {len(chosen)}").choice(OF_CHECKPOINTS)
        chosen.append(damage)
    if case.base is not None and BASE not in chosen:
        chosen[-1] = BASE  # no other case can have it
    return chosen


# --- a run and its lives --------------------------------------------------------------


@dataclass
class Campaign:
    """A run that is started again and again with the same command, and its record."""

    name: str
    folder: Path
    plan: Plan
    case: Case
    on_other_mesh: bool = False
    codes: list[int] = field(default_factory=list)  # of the command, in order
    said: list[str] = field(default_factory=list)  # what it printed, in order
    # (step, how many commands had ended), of each damage that the run must tell
    damaged: set[tuple[int, int]] = field(default_factory=set)
    waiting: list[str] = field(default_factory=list)  # damage that finds no checkpoint
    first_other_life: int | None = None  # the first life on the other mesh
    done: list[str] = field(default_factory=list)  # damage that was done, for the log

    @property
    def run(self) -> Path:
        """Returns the workdir."""
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def copies(self) -> Path:
        return self.folder / "copies"

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    def words(self, workdir: Path) -> list[str]:
        """Returns the command, which is the same in each life on the same mesh."""
        settings = SETTINGS | self.case.settings
        settings["data.cache_dir"] = self.folder / "tokens"
        if self.plan.copies and workdir == self.run:
            settings["checkpoint.copy_to"] = f"file://{self.copies}"
        if self.case.base is not None:
            settings["init.from_run"] = self.folder / "base"
        if self.on_other_mesh:
            settings |= self.case.other_settings
        return command(workdir, **settings)

    def start(self, words: list[str], orders: list[Order], retries: int) -> None:
        """Runs the command to its end, with faults."""
        devices = self.case.devices
        if self.on_other_mesh:
            devices = self.case.other_devices
        if self.case.processes:
            launch = [sys.executable, "-m", "jaxdist.launch"]
            launch += ["--processes", str(self.case.processes)]
            launch += ["--devices-per-process", str(devices)]
            words = [*launch, "--max-restarts", str(retries), "--", *words]
        variables = environment(devices) | {
            "CHAOS_ORDERS": json.dumps([dataclasses.asdict(order) for order in orders]),
            "CHAOS_MARKS": str(self.marks),
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        done = subprocess.run(
            words,
            cwd=self.folder / "cwd",
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIFE_S,
        )
        self.codes.append(done.returncode)
        self.said.append(done.stdout)

    def faulty_words(self) -> list[str]:
        """Returns the command of a life with a fault."""
        words = self.words(self.run)
        words[1:3] = [str(SUPPORT / "chaos_train.py")]
        return words

    def fail(self, text: str) -> str:
        """Returns a message with what the last life printed."""
        return f"{text}; exit codes {self.codes}\n{self.said[-1][-4000:]}"

    # --- damage -------------------------------------------------------------------

    def damage(self, kind: str) -> None:
        """Damages files of the run while it is down, or keeps that for later."""
        kinds = [*self.waiting, kind]
        self.waiting = []
        for each in kinds:
            if each and not self._damage(each):
                self.waiting.append(each)

    def _damage(self, kind: str) -> bool:
        """Returns whether there was something to damage."""
        if kind == MESH:
            self.on_other_mesh = True
            self.first_other_life = len(self.codes)
        elif kind == BASE:
            if not list_steps(self.checkpoints):
                return False
            shutil.rmtree(self.folder / "base")
        elif kind in OF_COPIES:
            if not list_steps(self.copies / "checkpoints"):
                return False
            self._damage_copies(kind)
        else:
            steps = list_steps(self.checkpoints)
            if not steps:
                return False
            self._damage_step(kind, steps[-1])
        self.done.append(kind)
        return True

    def _damage_copies(self, kind: str) -> None:
        if kind == COPIES_LOST:
            shutil.rmtree(self.copies)
        elif kind == ALL_LOST:
            shutil.rmtree(self.checkpoints)
        else:
            newest = list_steps(self.copies / "checkpoints")[-1]
            step = self.copies / "checkpoints" / str(newest)
            file = chosen_file(step, self.plan.draw)
            os.truncate(file, file.stat().st_size // 2)
            (step.parent / "junk").mkdir(exist_ok=True)
            (step.parent / "junk" / "7").write_bytes(self.plan.draw.randbytes(99))
            (self.copies / "junk.txt").write_text("junk")

    def _damage_step(self, kind: str, step: int) -> None:
        folder = self.checkpoints / str(step)
        file = chosen_file(folder, self.plan.draw)
        before = file.read_bytes()
        if kind == FLIP:
            after = bytearray(before)
            after[self.plan.draw.randrange(len(after))] ^= (
                1 << self.plan.draw.randrange(8)
            )
            file.write_bytes(after)
        elif kind == CUT:
            file.write_bytes(before[: self.plan.draw.randrange(len(before))])
        else:
            file.unlink()
        assert not file.exists() or file.read_bytes() != before
        self.damaged.add((step, len(self.codes)))
        print(f"  {kind} in step {step}: {file.relative_to(folder)}")
        others = [other for other in list_steps(self.checkpoints) if other != step]
        copied = self.plan.copies and list_steps(self.copies / "checkpoints")
        if not others and not copied:
            self._assert_refused(step, file, before)

    def _assert_refused(self, step: int, file: Path, before: bytes) -> None:
        """Asserts that a run whose steps are all damaged changes nothing; mends it."""
        folder = self.checkpoints / str(step)
        all_before = contents(folder)
        self.start(self.words(self.run), [], 0)
        assert self.codes[-1] == 77, self.fail("the only checkpoint is damaged")
        assert contents(folder) == all_before
        assert f"step {step}" in self.said[-1], self.fail("it does not name the step")
        file.write_bytes(before)


def chosen_file(folder: Path, draw: random.Random) -> Path:
    """Returns a file of a step that is not empty, any as likely as any other."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return draw.choice(sorted(path for path in files if path.stat().st_size))


def prepare(folder: Path, name: str) -> Campaign:
    """Makes the folders of a case, and its base."""
    for each in ("home", "tmp", "cwd", "marks"):
        (folder / each).mkdir()
    campaign = Campaign(name, folder, planned(name), CASES[name])
    if campaign.case.base is not None:
        own = dict(campaign.case.settings)
        adapters = [key for key in own if key.startswith("lora.")]
        for key in adapters:
            del own[key]
        settings = SETTINGS | own | campaign.case.base
        settings["data.cache_dir"] = folder / "tokens"
        campaign.start(command(folder / "base", **settings), [], 0)
        assert campaign.codes.pop() == 0, campaign.said[-1]
    return campaign


def endure(campaign: Campaign) -> None:
    """Lets all faults happen, and then the run end."""
    lives = campaign.plan.lives
    k = 0
    while k < len(lives):
        group = together(campaign, lives[k:])
        before = len(events(campaign.run, "peer_lost"))
        campaign.start(
            campaign.faulty_words(),
            [life.order for life in group],
            retries=len(group) if len(group) > 1 else 0,
        )
        for life in group:
            report(campaign, life)
        lost = events(campaign.run, "peer_lost")[before:]
        assert_ended(campaign, group, lost)
        assert not [x for x in leftovers(campaign.run) if x.startswith("process")]
        campaign.damage(group[-1].damage)
        k += len(group)
    campaign.start(campaign.words(campaign.run), [], 0)
    assert campaign.codes[-1] == 0, campaign.fail("the run did not end")
    assert not campaign.waiting, f"not done: {campaign.waiting}"


def together(campaign: Campaign, lives: list[PlannedLife]) -> list[PlannedLife]:
    """Returns lives that one command has: `launch` starts again after a kill.

    It goes on to a life that a signal ends, or to the end of the run.
    """
    if not campaign.case.processes or campaign.waiting:
        return lives[:1]
    for k, life in enumerate(lives):
        if life.order.signal != KILL:
            return lives[: k + 1]
        if life.damage:
            return lives[:1]
    return lives


def report(campaign: Campaign, life: PlannedLife) -> None:
    """Prints what happened; asserts that it did."""
    order = life.order
    mark = order.mark(campaign.marks)
    assert mark.exists(), campaign.fail(f"fault {order.number} did not happen: {order}")
    met = json.loads(mark.read_text())
    amid = f", amid {', '.join(met['unfinished'])}" if met["unfinished"] else ""
    where = f"{met['phase']} {met['step']}{amid}, process {order.rank}"
    print(f"  {order.number} {order.kind}: {where}; exit code {campaign.codes[-1]}")
    if not order.delay_s and not order.full:
        assert met["phase"] == order.phase, met
        assert met["step"] >= order.step, met


def assert_ended(
    campaign: Campaign, group: list[PlannedLife], lost: list[dict]
) -> None:
    """Asserts that the command ended as documented, and no earlier than by the fault."""
    code, order = campaign.codes[-1], group[-1].order
    allowed = ENDS[order.kind].codes
    if campaign.case.processes:
        # the agent says which process it lost
        killed = [life.order for life in group if life.order.signal == KILL]
        codes = [event["exit_code"] for event in lost]
        assert codes[: len(killed)] == [-9] * len(killed), campaign.fail(f"{codes}")
        allowed = tuple(70 if each in (-9, 1) else each for each in allowed)
        if len(group) > 1 and order.signal == KILL:
            allowed = (0,)  # it went on to the end
    assert code in allowed, campaign.fail(f"{order.kind}: {code}")


# --- what must hold -------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_each_axis_ends_as_if_nothing_had_happened(tmp_path, name):
    print(
        f"\nCHAOS_SEED={SEED} python -m pytest -m chaos -s "
        f"'tests/chaos/test_axes.py' -k {name}"
    )
    campaign = prepare(tmp_path, name)
    began = time.time()
    base = contents(tmp_path / "base")
    endure(campaign)
    account = assert_time_adds_up(campaign.run, began=began, ended=time.time())
    on_other_mesh, campaign.on_other_mesh = campaign.on_other_mesh, False
    assert_base_is_kept(campaign, base)
    quiet = tmp_path / "quiet"
    if BASE in campaign.done:
        restore_base(campaign, base)
    campaign.start(campaign.words(quiet), [], 0)
    assert campaign.codes.pop() == 0, campaign.said[-1]

    codes = campaign.codes
    print(f"  exit codes {codes}; damage: {', '.join(campaign.done) or 'none'}")
    spent = {bucket: round(s, 1) for bucket, s in account.buckets.items()}
    print(f"  {time.time() - began:.0f} s: {spent}")
    assert_lives(campaign, read_lives(campaign.run))
    assert_events(campaign)
    assert_rows(campaign, quiet, on_other_mesh=on_other_mesh)
    a, b = parameters(campaign.run, STEPS), parameters(quiet, STEPS)
    if on_other_mesh:
        assert apart(a, b, "trainable/") <= BAND
    else:
        assert same_bits(a, b)
    if campaign.plan.copies:
        assert list_steps(campaign.copies / "checkpoints")[-1] == STEPS
    assert_no_other_file(campaign)
    shutil.rmtree(tmp_path / "xla", ignore_errors=True)


def contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


def assert_base_is_kept(campaign: Campaign, before: dict[Path, bytes]) -> None:
    now = contents(campaign.folder / "base")
    assert now == ({} if BASE in campaign.done else before)


def restore_base(campaign: Campaign, before: dict[Path, bytes]) -> None:
    """Puts the base back, for the run without faults."""
    for path, content in before.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def assert_lives(campaign: Campaign, lives: list[Life]) -> None:
    """Asserts that the ledger has each start with its end, and goes on where it was."""
    expected: list[tuple[int | None, ...]] = []
    for planned_life in campaign.plan.lives:
        order = planned_life.order
        codes: tuple[int | None, ...] = ENDS[order.kind].codes
        if order.signal == KILL:
            codes = (None,)
        elif order.signals > 1 or order.phase in STARTS:
            codes = (None, *codes)  # it ends the process at once
        expected.append(codes)
    found = [life.exit_code if life.ended else None for life in lives]
    assert found.count(77) == campaign.codes.count(77), found
    found = [code for code in found if code != 77]
    # a start of a run that is done leaves no life, if its last checkpoint is whole
    if campaign.plan.lives[-1].order.phase != LAST or len(found) > len(expected):
        expected.append((0,))
    assert len(found) == len(expected), (found, expected)
    for code, allowed in zip(found, expected, strict=True):
        assert code in allowed, (found, expected)
    # what a killed life has written may be some steps old
    reached, is_exact = 0, True
    for life in lives:
        if life.first is not None:
            assert life.first <= reached or not is_exact, lives
            reached, is_exact = life.step, True
        is_exact = is_exact and life.ended
    assert reached == STEPS or not is_exact, lives


def assert_events(campaign: Campaign) -> None:
    """Asserts that the run has told of all damage, and of what it fetched."""
    bad = Counter(event["step"] for event in events(campaign.run, "bad_checkpoint"))
    damaged = Counter(step for step, _ in campaign.damaged)
    assert damaged <= bad, (damaged, bad)
    fetched = events(campaign.run, "checkpoint_fetched")
    assert len(fetched) >= campaign.done.count(ALL_LOST)
    for life in campaign.plan.lives:
        if life.order.full != "passes":
            continue
        mark = json.loads(life.order.mark(campaign.marks).read_text())
        saves = events(campaign.run, "save")
        failed = [event["step"] for event in saves if not event["ok"]]
        assert mark["full_at"] in failed, (mark, failed)


def assert_rows(campaign: Campaign, quiet: Path, *, on_other_mesh: bool) -> None:
    """Asserts that metrics have each step once, with the loss of a quiet run."""
    found, expected = read_rows(campaign.run), read_rows(quiet)
    steps = [row["step"] for row in found.train]
    assert steps == list(range(1, STEPS + 1))
    evaluated = [row["step"] for row in found.evaluation]
    assert evaluated == [row["step"] for row in expected.evaluation]
    if campaign.name == "float16":
        skips = [row["loss_scale_skips"] for row in expected.train]
        scales = {row["loss_scale"] for row in expected.train}
        assert skips[-1] > 0
        assert len(scales) > 2
    if not on_other_mesh:
        assert untimed(found) == untimed(expected)
        assert all(len(losses) == 1 for losses in every_loss(campaign.run).values())
        return
    lives = read_lives(campaign.run)[campaign.first_other_life :]
    # no step is on the other mesh if the run was at its end before
    same = min((life.first for life in lives if life.first is not None), default=STEPS)
    for one, other in zip(found.train, expected.train, strict=True):
        if one["step"] <= same:
            assert one["loss"] == other["loss"], one
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=BAND)


def assert_no_other_file(campaign: Campaign) -> None:
    """Asserts that nothing was written but where the command says so."""
    # A kill amid a write leaves the part of one file, which a write after an hour removes.
    left = [Path(file) for file in leftovers(campaign.run)]
    kills = [life for life in campaign.plan.lives if "kill -9" in life.order.kind]
    assert len(left) <= len(kills), left
    assert {file.suffix for file in left} <= {".partial"}, left
    folder = campaign.folder
    for each in ("home", "cwd"):
        assert not list((folder / each).iterdir()), each
    known = {"home", "tmp", "cwd", "marks", "run", "quiet", "tokens", "xla"}
    if campaign.plan.copies:
        known.add("copies")
    if campaign.case.base is not None:
        known.add("base")
    assert {path.name for path in folder.iterdir()} == known
    assert not list((folder / "tmp").iterdir())


def test_a_seed_draws_the_same_faults_again():
    for name in NAMES:
        first, second = planned(name), planned(name)
        assert (first.lives, first.copies) == (second.lives, second.copies)


def test_a_campaign_has_every_kind_of_fault():
    plans = [planned(name) for name in NAMES]
    ends = {life.order.kind for plan in plans for life in plan.lives}
    assert ends >= ENDS.keys() - {"kill -9 at the end", "SIGTERM at the end"}
    damages = {life.damage for plan in plans for life in plan.lives}
    assert damages >= {MESH, BASE, *OF_CHECKPOINTS}
