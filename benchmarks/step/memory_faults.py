"""Puts a run that saves in memory through planned faults, and checks each recovery.

    python benchmarks/step/memory_faults.py plan
    python benchmarks/step/memory_faults.py quiet --folder F --steps 3000
    python benchmarks/step/memory_faults.py run --folder F
    python benchmarks/step/memory_faults.py summary --folder F \
        --out benchmarks/results/memory-faults.json
    python benchmarks/step/memory_faults.py flat --folder F \
        --out benchmarks/results/memory-flat.json

`plan` writes `memory_faults_plan.json`: the mix, drawn with a seed, with the source that
each fault must come back from. `quiet` trains the same run without any fault, and
records the SHA-256 of every step's state. `run` carries out the plan: four processes,
each with a folder of its own, which is a small tmpfs. It continues where it was stopped.

A recovery counts if the restored step and its source are those that were written down,
if the state of every step on every process has the bits of the quiet run, and if the
run has told of exactly the damage that was done.

The step that a restore should find is computed from the files that are left, by code
that shares only the reader of headers with jaxdist.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import numpy as np

from jaxdist.checkpoint import memory_file
from jaxdist.checkpoint.folders import list_steps
from jaxdist.checkpoint.memory_file import BadFile, Header
from jaxdist.checkpoint.peer_link import TOKEN_BYTES, Kind, PeerError, PutRequest
from jaxdist.checkpoint.peers import PeerClient
from jaxdist.telemetry.metrics import read_rows

HERE = Path(__file__).resolve().parent
COMMANDS = ("plan", "quiet", "run", "summary", "flat")
PLAN = HERE / "memory_faults_plan.json"
AGENT = HERE / "memory_faults_agent.py"
HOSTS = 4
SEED = 38
WAIT_S = 240.0  # longest wait for a recovery
TMPFS = "size=4m"  # of each host; a file of this run has some 20 kB
PACE_S = 0.02  # pause of a step, so that there is time to save every second one
OWN, PEER, FOLDER, NONE = "own memory", "peer's memory", "folder", "no restart"

# kind: (count, source that the lost part comes from)
MIX = {
    "kill -9 of one": (14, OWN),
    "kill -9 of all": (12, OWN),
    "SIGSTOP": (10, OWN),
    "a host's folder deleted": (16, PEER),
    "a flipped bit in own files": (16, PEER),
    "a flipped bit in a peer's copies": (12, OWN),
    "a flipped bit in both, newest step": (10, OWN),
    "a flipped bit in both, all steps": (10, FOLDER),
    "kill -9 amid a save": (14, OWN),
    "kill -9 amid a copy": (14, OWN),
    "kill -9 amid a restore": (12, OWN),
    "junk from a stranger": (10, NONE),
    "junk from a peer": (10, OWN),
    "memory full": (10, OWN),
    "two runs in one folder": (10, OWN),
    "SIGTERM": (10, FOLDER),
    "files of a stale branch": (10, OWN),
}
WITH_FOLDER = ("a flipped bit in both, all steps",)
SETTINGS = {
    "train.steps": 100_000,
    "train.max_minutes": 0,
    "train.eval_every": 0,
    "train.log_every": 1,
    "train.sample_tokens": 0,
    "batch.sequence_length": 16,
    "batch.global_size": 4,
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.dropout": 0.1,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 5,
    "mesh.fsdp": HOSTS,
    "checkpoint.every_steps": 0,
    "watchdog.step_s": 6,
    "watchdog.data_s": 6,
}


# --- the plan -------------------------------------------------------------------------


class Fault(NamedTuple):
    """A planned fault."""

    number: int
    kind: str
    source: str  # that the lost part must come back from
    host: int  # that it happens to
    where: float  # from 0 to 1: place of a flipped bit, or of a kill amid an operation
    delay_s: float  # after the run is ready for it
    variant: int  # of kinds that have several
    folder_save: bool  # whether the run saves to the folder before


def draw(seed: int = SEED) -> list[Fault]:
    """Draws the order of the faults and their places."""
    deal = random.Random(seed)
    kinds = [kind for kind, (count, _) in MIX.items() for _ in range(count)]
    deal.shuffle(kinds)
    return [
        Fault(
            number,
            kind,
            MIX[kind][1],
            host=deal.randrange(HOSTS),
            where=round(deal.random(), 6),
            delay_s=round(deal.uniform(0, 0.25), 3),
            variant=deal.randrange(12),
            folder_save=kind in WITH_FOLDER or deal.random() < 0.15,
        )
        for number, kind in enumerate(kinds)
    ]


def write_plan(path: Path) -> None:
    """Writes the plan."""
    faults = draw()
    head = {
        "seed": SEED,
        "faults": len(faults),
        "mix": {kind: {"count": n, "source": s} for kind, (n, s) in MIX.items()},
    }
    text = json.dumps(head, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(fault._asdict())}" for fault in faults)
    path.write_text(f'{text},\n "plan": [\n{rows}\n ]\n}}\n')


def read_plan(path: Path) -> list[Fault]:
    """Reads the plan."""
    return [Fault(**entry) for entry in json.loads(path.read_text())["plan"]]


# --- a run ----------------------------------------------------------------------------


class Late(Exception):
    """Error of a run that has not done something in time."""


class Lines:
    """A growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._read = 0

    def update(self) -> list[dict[str, Any]]:
        """Reads what has come, and returns it."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            new = []
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # torn by a kill
                    new.append(json.loads(line))
            self.rows += new
            return new
        return []


@dataclass
class Found:
    """What a fault and its recovery were."""

    number: int
    kind: str
    planned: str
    host: int
    newest: int = 0  # newest step that was complete in memory
    expected_step: int = 0
    step: int = 0  # that was restored
    source: str = ""
    seconds: float = 0.0  # from the fault to the first step after it
    restore_s: float = 0.0  # from the release of the agent to the restored state
    starts: int = 0
    complete: list[int] = field(default_factory=list)  # steps before the damage
    damaged: list[list[Any]] = field(default_factory=list)  # [host, step, owner]
    reported: list[list[Any]] = field(default_factory=list)  # [step, owner, reason]
    steps_compared: int = 0  # states of steps on processes that were compared
    note: str = ""
    problems: list[str] = field(default_factory=list)
    ok: bool = False
    cycle_s: float = 0.0


class Campaign:
    """A run, its agent, and what is known of both."""

    def __init__(self, folder: Path, name: str, *, processes: int = HOSTS) -> None:
        self.folder = folder / name
        self.memory = folder / "memory"
        self.cache = folder / "xla"
        self.processes = processes
        self.workdir = self.folder / "run"
        self.events = Lines(self.workdir / "events.jsonl")
        self.states = [
            Lines(self.folder / "states" / f"{rank}.jsonl") for rank in range(processes)
        ]
        self.agent: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    # --- the agent --------------------------------------------------------------------

    def start(
        self, *, memory: str, changes: dict[str, Any] | None = None, **variables: str
    ) -> None:
        """Starts the agent."""
        settings = {**SETTINGS, "data.cache_dir": self.folder.parent / "data"}
        settings |= changes or {}
        if self.processes == 1:
            settings["mesh.fsdp"] = 1
        if memory:
            settings["checkpoint.memory_folder"] = memory
            settings["checkpoint.memory_every_steps"] = 2
            settings["checkpoint.memory_peers"] = int(self.processes > 1)
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "OPENBLAS_NUM_THREADS": "1",
            **variables,
        }
        command = [sys.executable, str(AGENT), str(self.folder), str(self.processes)]
        command += ["--config", "quickstart", "--workdir", str(self.workdir), *flags]
        with (self.folder / "log").open("ab") as log:
            self.agent = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log
            )

    def kill_agent(self) -> None:
        """Kills the agent, and its workers with it."""
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
            self.agent = None
        self.wait(lambda: not self.alive(), "the workers ended", 30)

    def pids(self) -> dict[int, int]:
        """Finds {rank: process id} of the newest start."""
        return {
            rank: int((self.folder / "pids" / str(rank)).read_text())
            for rank in range(self.processes)
            if (self.folder / "pids" / str(rank)).exists()
        }

    def alive(self) -> list[int]:
        """Lists the workers of the newest start that still run."""
        return [pid for pid in self.pids().values() if _runs(pid)]

    @property
    def generation(self) -> int:
        """Number of the newest start."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "generation").read_text())
        return 0

    def wait(
        self, is_done: Callable[[], Any], what: str, seconds: float = WAIT_S
    ) -> Any:
        """Waits until something is the case.

        Raises:
          Late: it takes longer, or the agent has ended.
        """
        until = time.monotonic() + seconds
        while not (found := is_done()):
            if time.monotonic() > until:
                raise Late(f"not in {seconds:g} s: {what}")
            if self.agent is not None and self.agent.poll() is not None:
                raise Late(f"the agent ended with {self.agent.returncode}: {what}")
            time.sleep(0.02)
        return found

    def event(self, name: str, since: int) -> list[dict[str, Any]]:
        """Lists the events of a name after the first `since` ones."""
        self.events.update()
        return [row for row in self.events.rows[since:] if row["event"] == name]

    def order(self, point: str, rank: int, **fields: Any) -> None:
        """Orders something from a worker."""
        path = self.folder / "orders" / f"{point}.{rank}"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(fields))
        partial.replace(path)

    def hold(self) -> None:
        """Makes the agent wait before the next start."""
        (self.folder / "hold").touch()

    def release(self) -> None:
        """Lets the agent start the workers."""
        (self.folder / "hold").unlink(missing_ok=True)

    # --- files in memory --------------------------------------------------------------

    def peer(self, rank: int) -> dict[str, Any]:
        """Reads the address and the folder of a worker."""
        known: dict[str, Any] = json.loads(
            (self.folder / "peers" / str(rank)).read_text()
        )
        return known

    @property
    def branch(self) -> str:
        """The name of the run's present history."""
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads((self.workdir / "memory.json").read_text())["branch"])
        return ""

    def scan(self, excluded: set[Path] | None = None) -> Files:
        """Finds all sound files of the present history."""
        found: dict[int, dict[str, dict[int, dict[int, Path]]]] = {}
        branch = self.branch
        for host in range(self.processes):
            store = Path(self.peer(host)["folder"]) if self.processes > 1 else None
            for path in sorted(store.glob("*.shards")) if store else []:
                if path in (excluded or ()):
                    continue
                with contextlib.suppress(OSError, BadFile):
                    with path.open("rb") as file:
                        header = memory_file.read_header(file).header
                    if header.branch == branch:
                        saves = found.setdefault(header.step, {})
                        owners = saves.setdefault(header.agreed, {})
                        owners.setdefault(header.owner, {})[host] = path
        return Files(found, self.processes)


class Files:
    """Files in memory: step, save, owner, host."""

    def __init__(
        self, found: dict[int, dict[str, dict[int, dict[int, Path]]]], processes: int
    ) -> None:
        self._found = found
        self._all = set(range(processes))

    def complete(self, copies: int = 1) -> list[int]:
        """Lists the steps of which each part is on so many hosts."""
        return sorted(
            step
            for step, saves in self._found.items()
            if any(
                owners.keys() >= self._all
                and all(len(hosts) >= copies for hosts in owners.values())
                for owners in saves.values()
            )
        )

    def of(self, step: int, owner: int) -> dict[int, Path]:
        """Finds the files of a part: {host: path}."""
        return {
            host: path
            for owners in self._found.get(step, {}).values()
            for host, path in owners.get(owner, {}).items()
        }

    def steps(self) -> list[int]:
        """Lists all steps, complete or not."""
        return sorted(self._found)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False


# --- faults ---------------------------------------------------------------------------


class Driver:
    """Carries out a plan."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.run = Campaign(folder, "campaign")
        self.other = Campaign(folder, "other", processes=1)
        # for each process, the hash of each step that it has seen
        self.truth = read_states(self.run.folder)
        self.damaged: set[Path] = set()
        self.resumed_at = 0  # step at which the run has resumed last
        self.saved_at = 0  # newest step in the folder that was asked for
        self.checked = 0  # events that were looked at
        self.stash: dict[int, list[tuple[str, bytes]]] = {}  # files of an old history
        self.stash_branch = ""
        self.record = folder / "record.jsonl"

    # --- one fault --------------------------------------------------------------------

    def do(self, fault: Fault) -> Found:
        """Brings a fault, and checks the recovery."""
        found = Found(fault.number, fault.kind, fault.source, fault.host)
        began = time.monotonic()
        try:
            self.ready(fault)
            self.damaged = set()
            self.run.events.update()
            self.checked = len(self.run.events.rows)
            getattr(self, FAULTS[fault.kind])(fault, found)
            self.check(fault, found)
        except Late as late:
            found.problems.append(str(late))
        except Exception as error:
            found.problems.append(f"{type(error).__name__}: {error}")
        found.ok = not found.problems
        found.cycle_s = round(time.monotonic() - began, 2)
        return found

    def ready(self, fault: Fault) -> None:
        """Waits until two steps are complete in memory, with their copies."""
        if fault.folder_save:
            self.run.events.update()
            since = len(self.run.events.rows)
            self.run.order("folder", 0)
            (saved, *_) = self.run.wait(
                lambda: self.run.event("save", since), "a save to the folder"
            )
            self.saved_at = saved["step"]
        first = max(self.resumed_at, self.saved_at)

        def is_ready() -> bool:
            with contextlib.suppress(OSError, ValueError, KeyError):
                steps = self.run.scan().complete(copies=2)
                return len([step for step in steps if step > first]) >= 2
            return False

        self.run.wait(is_ready, "two steps with their copies in memory")
        time.sleep(fault.delay_s)

    def strike(self, ranks: list[int], found: Found) -> None:
        """Kills workers -9 and waits until all have ended. The agent then waits."""
        self.run.hold()
        self.began = time.monotonic()
        pids = self.run.pids()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
        self.ended()

    def ended(self) -> None:
        """Waits until no worker runs."""
        self.run.wait(lambda: not self.run.alive(), "all workers ended", 60)

    def predict(self, found: Found) -> None:
        """Computes the step that the next start must restore."""
        complete = self.run.scan(self.damaged).complete()
        folder = max(list_steps(self.run.workdir / "checkpoints"), default=-1)
        newest = max(complete, default=-1)
        found.newest = max(found.newest, newest)
        found.expected_step = newest if newest >= folder else folder
        found.note += f"memory {complete}, folder {folder}. "

    def resume(self, fault: Fault, found: Found, starts: int = 1) -> None:
        """Releases the agent and reads what the next start restores."""
        run = self.run
        generation = run.generation + starts
        run.release()
        released = time.time()

        def restored() -> list[dict[str, Any]]:
            rows = []
            for lines in run.states:
                lines.update()
                rows += [
                    row
                    for row in lines.rows
                    if row["kind"] == "restored" and row["generation"] >= generation
                ][-1:]
            newest = {row["generation"] for row in rows}
            return rows if len(rows) == HOSTS and len(newest) == 1 else []

        rows = run.wait(restored, "a restored state")
        found.restore_s = round(max(row["time"] for row in rows) - released, 3)
        found.starts = rows[0]["generation"] - generation + starts
        if found.starts != starts:
            found.problems.append(f"{found.starts} starts, not {starts}")
        steps = {row["step"] for row in rows}
        sources = {row["source"] for row in rows}
        if len(steps) != 1 or len(sources) != 1:
            found.problems.append(f"processes differ: {steps}, {sources}")
        found.step = rows[0]["step"]
        found.source = FOLDER
        if sources == {"memory"}:
            fetched = [row["fetched"] for row in rows]
            own = [
                rank
                for rank, files in enumerate(fetched)
                if [found.step, rank] in files
            ]
            found.source = PEER if own else OWN
            if own and own != [fault.host]:
                found.problems.append(
                    f"hosts {own} lacked their part, not {fault.host}"
                )
        for rank, row in enumerate(rows):
            self.compare(found, rank, row)

        # the newest start may have written a line of a step before
        def has_stepped() -> bool:
            for lines in run.states:
                lines.update()
            return any(
                row["kind"] == "step" and row["generation"] == rows[0]["generation"]
                for row in run.states[0].rows[-50:]
            )

        run.wait(has_stepped, "a step")
        found.seconds = round(time.monotonic() - self.began, 3)
        self.resumed_at = found.step

    def compare(self, found: Found, rank: int, row: dict[str, Any]) -> None:
        """Compares the hash of a state with the first one of that step.

        `summary` compares all of them with the quiet run.
        """
        true = self.truth[rank].setdefault(row["step"], row["sha"])
        found.steps_compared += 1
        if true != row["sha"]:
            found.problems.append(
                f"{row['kind']} {row['step']} on process {rank} has other bits"
            )

    def check(self, fault: Fault, found: Found) -> None:
        """Checks step, source, states and events."""
        if found.source != fault.source:
            found.problems.append(f"source {found.source}, planned {fault.source}")
        if fault.source != NONE and found.step != found.expected_step:
            found.problems.append(
                f"step {found.step} restored, {found.expected_step} expected"
            )
        for rank, lines in enumerate(self.run.states):
            lines.update()
            for row in lines.rows:
                if row["kind"] == "step":
                    self.compare(found, rank, row)
            lines.rows.clear()
        del found.problems[20:]
        damaged = {(host, step, owner) for host, step, owner in found.damaged}
        for event in self.run.event("bad_memory_copy", self.checked):
            found.reported.append([event["step"], event["owner"], event["reason"][:80]])
            if (event["step"], event["owner"]) not in {d[1:] for d in damaged}:
                found.problems.append(f"told of damage that nobody did: {event}"[:200])
        told = {(step, owner) for step, owner, _ in found.reported}
        for host, step, owner in damaged:
            # of others, nobody reads more than the header
            is_read = step in found.complete and step >= found.step
            if is_read and (step, owner) not in told:
                found.problems.append(f"no event of {host}, {step}, {owner}")

    # --- kinds ------------------------------------------------------------------------

    def kill_one(self, fault: Fault, found: Found) -> None:
        self.strike([fault.host], found)
        self.predict(found)
        self.resume(fault, found)

    def kill_all(self, fault: Fault, found: Found) -> None:
        if fault.variant % 2:
            self.run.hold()
            self.began = time.monotonic()
            self.run.kill_agent()
            found.note += "with the agent. "
            self.predict(found)
            self.launch()
        else:
            self.strike(list(range(HOSTS)), found)
            self.predict(found)
        self.resume(fault, found)

    def stop(self, fault: Fault, found: Found) -> None:
        self.run.hold()
        self.began = time.monotonic()
        os.kill(self.run.pids()[fault.host], signal.SIGSTOP)
        self.ended()
        self.predict(found)
        self.resume(fault, found)
        codes = self.run.event("peer_lost", self.checked)
        found.note += f"{codes[-1]['why'] if codes else 'no event'}. "

    def delete(self, fault: Fault, found: Found) -> None:
        self.strike([fault.host], found)
        self.run.scan().complete()
        shutil.rmtree(Path(self.run.peer(fault.host)["folder"]))
        self.predict(found)
        self.resume(fault, found)

    def flip(self, fault: Fault, found: Found, which: Callable[[Files], Any]) -> None:
        self.strike([fault.host], found)
        files = self.run.scan()
        found.complete = files.complete()
        found.newest = max(found.complete, default=0)
        for number, (host, step, path) in enumerate(which(files)):
            data = bytearray(path.read_bytes())
            bit = int((fault.where + 0.381966 * number) % 1 * 8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            self.damaged.add(path)
            found.damaged.append([host, step, fault.host])
        self.predict(found)
        self.resume(fault, found)

    def flip_own(self, fault: Fault, found: Found) -> None:
        host = fault.host
        self.flip(
            fault,
            found,
            lambda files: [
                (host, step, path)
                for step in files.steps()
                for place, path in files.of(step, host).items()
                if place == host
            ],
        )

    def flip_peer(self, fault: Fault, found: Found) -> None:
        host = fault.host
        self.flip(
            fault,
            found,
            lambda files: [
                (place, step, path)
                for step in files.steps()
                for place, path in files.of(step, host).items()
                if place != host
            ],
        )

    def flip_newest(self, fault: Fault, found: Found) -> None:
        self.flip(
            fault,
            found,
            lambda files: [
                (place, step, path)
                for step in files.steps()
                if step >= files.complete()[-1]
                for place, path in files.of(step, fault.host).items()
            ],
        )

    def flip_all(self, fault: Fault, found: Found) -> None:
        self.flip(
            fault,
            found,
            lambda files: [
                (place, step, path)
                for step in files.steps()
                for place, path in files.of(step, fault.host).items()
            ],
        )

    def amid(self, point: str, fault: Fault, found: Found, **order: Any) -> None:
        """Lets a worker die amid an operation of a running run."""
        mark = self.run.folder / "marks" / point
        mark.unlink(missing_ok=True)
        self.run.hold()
        self.began = time.monotonic()
        self.run.order(point, fault.host, **order)
        self.run.wait(mark.exists, f"a kill amid {point}", 60)
        self.began = time.monotonic()
        self.ended()
        self.predict(found)
        self.resume(fault, found)
        found.note += f"amid {point}. "

    def kill_in_save(self, fault: Fault, found: Found) -> None:
        self.amid("save", fault, found, fraction=fault.where)

    def kill_in_copy(self, fault: Fault, found: Found) -> None:
        point = ("send", "receive")[fault.variant % 2]
        self.amid(point, fault, found, fraction=fault.where)

    def kill_in_restore(self, fault: Fault, found: Found) -> None:
        point = ("look", "confirm", "read", "fetch", "read", "read")[fault.variant % 6]
        mark = self.run.folder / "marks" / point
        mark.unlink(missing_ok=True)
        self.strike([(fault.host + fault.variant) % HOSTS], found)
        self.predict(found)
        after = int(fault.where * 20) if point == "read" else 0
        self.run.order(point, fault.host, after=after)
        self.run.release()
        self.run.wait(mark.exists, f"a kill amid {point}")
        self.ended()
        self.resume(fault, found)
        found.note += f"amid {point}. "

    def junk_stranger(self, fault: Fault, found: Found) -> None:
        self.began = time.monotonic()
        generation = self.run.generation
        deal = random.Random(fault.number)
        opened = []
        outcomes: Counter[str] = Counter()
        for rank in range(HOSTS):
            address = self.run.peer(rank)["address"]
            host, port = address.rsplit(":", 1)
            for data in (
                deal.randbytes(1 << 16),
                b"jaxdist peers 1\n" + deal.randbytes(32) + b"\xff" * 4096,
                b"\x02\xff\xff\xff\xff" * 64,
                b"GET / HTTP/1.1\r\n\r\n",
                b"",
            ):
                peer = socket.create_connection((host, int(port)), timeout=5)
                opened.append(peer)
                with contextlib.suppress(OSError):
                    peer.sendall(data)
            wrong = PeerClient(deal.randbytes(TOKEN_BYTES))
            try:
                wrong.inventory(address)
                found.problems.append("a wrong token was taken")
            except PeerError as error:
                outcomes[error.reason] += 1
        found.note += f"wrong token: {dict(outcomes)}. "
        steps = self.run.scan().complete(copies=2)
        newest = max(steps)
        self.run.wait(
            lambda: max(self.run.scan().complete(copies=2), default=0) >= newest + 4,
            "two more steps with copies",
        )
        for peer in opened:
            peer.close()
        found.seconds = round(time.monotonic() - self.began, 3)
        found.newest = found.step = newest
        if self.run.generation == generation:
            found.source = NONE

    def junk_peer(self, fault: Fault, found: Found) -> None:
        self.junk(fault, found)
        self.kill_one(fault, found)

    def junk(self, fault: Fault, found: Found) -> None:
        """Sends junk with the run's own token."""
        deal = random.Random(fault.number)
        own = self.run.peer(fault.host)
        client = PeerClient(bytes.fromhex(own["token"]))
        outcomes: Counter[str] = Counter()
        files = self.run.scan()
        step = max(files.complete())
        path = next(iter(files.of(step, fault.host).values()))
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[int(fault.where * len(good))] ^= 4
        target = self.run.peer((fault.host + 2) % HOSTS)["address"]

        def put(number: int, owner: int, data: bytes, size: int | None = None) -> None:
            try:
                with client.connection(target) as connection:
                    connection._request(PutRequest(number, owner, size or len(data)))
                    connection._link.receive({Kind.READY})
                    connection._link.send_data(io.BytesIO(data), len(data))
                    connection._link.receive({Kind.DONE})
                found.problems.append(f"junk was stored: {number}, {owner}")
            except PeerError as error:
                outcomes[error.reason] += 1

        put(step + 2, fault.host, deal.randbytes(20_000))
        put(step + 2, fault.host, bytes(flipped))
        put(step + 1000, fault.host, good)
        put(step, (fault.host + 1) % HOSTS, good)
        put(step, fault.host, bytes(flipped))
        put(step, fault.host, good, size=1 << 40)
        put(step, fault.host, _header_of_other_run(good))
        for kind, payload in ((Kind.DATA, b"x" * 100), (Kind.READ, b"\xff" * 28)):
            with (
                contextlib.suppress(PeerError),
                client.connection(target) as connection,
            ):
                connection._link._send(bytes([kind]) + b"\xff\xff\xff\xff" + payload)
                connection._link.receive({Kind.DONE})
        found.note += f"refused: {dict(outcomes)}. "

    def full(self, fault: Fault, found: Found) -> None:
        folder = self.run.memory / str(fault.host)
        since = len(self.run.events.rows)
        filler = folder / "filler"

        def fill() -> None:
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                for size in (65536, 4096):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(b"x" * size)

        def has_failed() -> bool:
            fill()  # what the run deletes makes room again
            failed = [e for e in self.run.event("memory_save", since) if not e["ok"]]
            return any("skipped" not in event["error"] for event in failed)

        try:
            fill()
            self.run.wait(has_failed, "a failed save in memory", 60)
            failed = [e for e in self.run.event("memory_save", since) if not e["ok"]]
            found.note += f"{failed[-1]['error'][:90]}. "
            step = failed[-1]["step"]
            self.run.wait(
                lambda: self.run.event("memory_save", since)[-1]["step"] >= step + 4,
                "training goes on",
                60,
            )
            self.strike([fault.host], found)
        finally:
            filler.unlink(missing_ok=True)
        self.predict(found)
        self.resume(fault, found)

    def two_runs(self, fault: Fault, found: Found) -> None:
        other = self.other
        shared = self.run.memory / str(fault.host)
        other.events.update()
        since = len(other.events.rows)
        other.start(memory=str(shared), FAULTS_PACE_S=str(PACE_S))
        try:
            other.wait(
                lambda: (
                    len([e for e in other.event("memory_save", since) if e["ok"]]) > 2
                ),
                "the other run saves",
            )
            os.kill(other.pids()[0], signal.SIGKILL)
            self.strike([fault.host], found)
            self.predict(found)
            places = [path.name for path in shared.glob("jaxdist-*")]
            self.resume(fault, found)
            other.wait(
                lambda: (
                    other.event("memory_restore", since)
                    and len(other.event("start", since)) > 1
                ),
                "the other run resumes from memory",
            )
            back = other.event("memory_restore", since)[-1]["step"]
            other.wait(
                lambda: any(
                    event["step"] > back and event["ok"]
                    for event in other.event("memory_save", since)[-2:]
                ),
                "the other run goes on",
            )
        finally:
            other.kill_agent()
        found.note += f"{len(places)} folders; the other run resumed at {back}. "
        if other.event("bad_memory_copy", since):
            found.problems.append("the other run told of damage")
        losses = defaultdict(set)
        for line in (other.workdir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                losses[row["step"]].add(row.get("loss"))
        if any(len(values) > 1 for values in losses.values()):
            found.problems.append("the other run has two losses of a step")

    def terminate(self, fault: Fault, found: Found) -> None:
        self.keep_stash()
        self.run.hold()
        self.began = time.monotonic()
        to_agent = fault.variant % 2
        assert self.run.agent is not None
        pid = self.run.agent.pid if to_agent else self.run.pids()[fault.host]
        os.kill(pid, signal.SIGTERM)
        self.ended()
        found.note += "to the agent. " if to_agent else "to a process. "
        self.predict(found)
        self.resume(fault, found)

    def keep_stash(self) -> None:
        """Keeps the files of the present history, which ends next."""
        self.stash_branch = self.run.branch
        for host in range(HOSTS):
            folder = Path(self.run.peer(host)["folder"])
            self.stash[host] = [
                (path.name, path.read_bytes()) for path in folder.glob("*.shards")
            ]

    def stale(self, fault: Fault, found: Found) -> None:
        """Brings files of a history that the run has left: newer, whole, by all ways."""
        own = self.run.peer(fault.host)
        files = self.run.scan()
        step = max(files.complete())
        branch = self.stash_branch or "0123456789abcdef"
        forged = {}
        for owner in range(HOSTS):
            path = next(iter(files.of(step, owner).values()))
            forged[owner] = _stale(path.read_bytes(), branch, step + 100)
        # a process that still runs offers its file to others
        client = PeerClient(bytes.fromhex(own["token"]))
        outcomes: Counter[str] = Counter()
        for rank in range(HOSTS):
            try:
                with client.connection(self.run.peer(rank)["address"]) as connection:
                    data = forged[fault.host]
                    connection.put(step + 100, fault.host, io.BytesIO(data), len(data))
                found.problems.append("a stale copy was stored")
            except PeerError as error:
                outcomes[error.reason] += 1
        found.note += f"offers: {dict(outcomes)}. "
        self.strike([fault.host], found)
        # and its files are on all hosts when the run starts
        for host in range(HOSTS):
            folder = Path(self.run.peer(host)["folder"])
            for name, data in self.stash.get(host, []):
                if not (folder / name).exists():
                    (folder / name).write_bytes(data)
            (folder / f"{step + 100}-{host}.shards").write_bytes(forged[host])
        found.note += f"stash of {sum(map(len, self.stash.values()))} files. "
        self.predict(found)
        self.resume(fault, found)

    # --- the campaign -----------------------------------------------------------------

    def launch(self) -> None:
        """Starts the agent of the run."""
        memory = f"{self.run.memory}/$JAXDIST_PROCESS_ID"
        self.run.start(memory=memory, FAULTS_PACE_S=str(PACE_S))

    def go(self, plan: list[Fault], budget_s: float, *, again: bool) -> None:
        """Carries out what is left of the plan."""
        began = time.monotonic()
        done = {row["number"]: row["ok"] for row in _rows(self.record)}
        if again:
            done = {number: ok for number, ok in done.items() if ok}
        left = [fault for fault in plan if fault.number not in done]
        print(f"{len(done)} faults done, {len(left)} left", flush=True)
        failures = 0
        with mounts(self.run.memory):
            self.run.release()
            for path in (self.run.folder / "orders").glob("*"):
                path.unlink()
            for lines in self.run.states:
                lines.update()
                lines.rows.clear()
            self.launch()
            try:
                self.first()
                for fault in left:
                    if time.monotonic() - began > budget_s:
                        print("out of time", flush=True)
                        break
                    found = self.do(fault)
                    with self.record.open("a") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
                    print(_line(found), flush=True)
                    if found.ok:
                        failures = 0
                        continue
                    failures += 1
                    if failures == 3:
                        print("three failures in a row", flush=True)
                        break
                    self.restart()
            finally:
                self.run.kill_agent()

    def first(self) -> None:
        """Waits until the run has begun to step."""
        run = self.run

        def has_stepped() -> bool:
            run.states[0].update()
            rows = [row for row in run.states[0].rows if row["kind"] == "step"]
            if rows:
                self.resumed_at = rows[0]["step"] - 1
            return bool(rows)

        run.wait(has_stepped, "a first step")
        self.saved_at = max(list_steps(run.workdir / "checkpoints"), default=0)

    def restart(self) -> None:
        """Starts the agent again after a fault that was not recovered."""
        self.run.release()
        for path in (self.run.folder / "orders").glob("*"):
            path.unlink()
        self.run.kill_agent()
        for lines in self.run.states:
            lines.update()
            lines.rows.clear()
        self.launch()
        self.first()


FAULTS = dict(
    zip(
        MIX,
        (
            "kill_one",
            "kill_all",
            "stop",
            "delete",
            "flip_own",
            "flip_peer",
            "flip_newest",
            "flip_all",
            "kill_in_save",
            "kill_in_copy",
            "kill_in_restore",
            "junk_stranger",
            "junk_peer",
            "full",
            "two_runs",
            "terminate",
            "stale",
        ),
        strict=True,
    )
)


def _rewritten(data: bytes, **changes: Any) -> bytes:
    """Writes a file again with another header and other numbers; it is sound in itself."""
    source = io.BytesIO(data)
    opened = memory_file.read_header(source)
    contents = []
    for piece, offset in opened.pieces():
        info = opened.header.arrays[piece.name]
        count = opened.header.piece_bytes(piece)
        raw = np.frombuffer(data[offset : offset + count], np.dtype(info.dtype))
        contents.append(raw[::-1].reshape(piece.box.shape))
    header: Header = replace(opened.header, **changes)
    target = io.BytesIO()
    memory_file.write(target, header, contents)
    return target.getvalue()


def _header_of_other_run(data: bytes) -> bytes:
    return _rewritten(data, run="another run")


def _stale(data: bytes, branch: str, step: int) -> bytes:
    return _rewritten(data, branch=branch, step=step)


@contextlib.contextmanager
def mounts(memory: Path) -> Iterator[None]:
    """Gives each host a small file system in memory."""
    for host in range(HOSTS):
        folder = memory / str(host)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(folder):
            mount = ["mount", "-t", "tmpfs", "-o", TMPFS, "tmpfs", str(folder)]
            subprocess.run(mount, check=True)
    try:
        yield
    finally:
        for host in range(HOSTS):
            subprocess.run(["umount", "-l", str(memory / str(host))], check=False)


def read_states(folder: Path) -> list[dict[int, str]]:
    """Reads the hashes of a run: for each process {step: hash}.

    Raises:
      ValueError: a step has two hashes.
    """
    found: list[dict[int, str]] = []
    for rank in range(HOSTS):
        states: dict[int, str] = {}
        for row in _rows(folder / "states" / f"{rank}.jsonl"):
            if (
                "sha" in row
                and states.setdefault(row["step"], row["sha"]) != row["sha"]
            ):
                raise ValueError(f"step {row['step']} of process {rank} has two states")
        found.append(states)
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # torn by a kill
            found.append(json.loads(line))
    return found


def _line(found: Found) -> str:
    return (
        f"{time.strftime('%H:%M:%S')} {found.number:3} {'ok  ' if found.ok else 'FAIL'} "
        f"{found.cycle_s:5.1f} s  {found.kind}, host {found.host}: {found.source} "
        f"{found.step} (newest {found.newest}) in {found.seconds:.1f} s; {found.note}"
        f"{'; '.join(found.problems)}"
    )


def quiet(folder: Path, steps: int) -> None:
    """Trains without faults up to a step, and continues if it has fewer."""
    run = Campaign(folder, "quiet")
    run.start(memory="", FAULTS_STOP_AT=str(steps))
    assert run.agent is not None
    code = run.agent.wait()
    states = read_states(run.folder)
    print(f"exit code {code}, {[max(each) for each in states]} steps")
    assert all(max(each) == steps for each in states)


def flat(folder: Path, saves: int, out: Path | None) -> None:
    """Records the memory of the workers over so many saves in memory, and without."""
    import measuring

    sides: dict[str, Any] = {}
    for side, memory in (("memory", folder / "flat-tier"), ("control", None)):
        run = Campaign(folder, f"flat-{side}")
        run.start(
            memory=f"{memory}/$JAXDIST_PROCESS_ID" if memory else "",
            # the first comparison, at step 1000, compiles a program of 65 MB
            changes={"health.compare_every": 0},
            FAULTS_PACE_S=str(PACE_S),
            FAULTS_RSS_EVERY="40",
            FAULTS_STOP_AT=str(2 * saves + 2),
        )
        assert run.agent is not None
        code = run.agent.wait()
        rows = [
            {
                row["step"] // 2: row["kib"]
                for row in _rows(lines.path)
                if row["kind"] == "memory"
            }
            for lines in run.states
        ]
        good = [event["ok"] for event in run.event("memory_save", 0)]
        sides[side] = {
            "exit_code": code,
            "saves": sum(good),
            "saves_that_were_skipped": len(good) - sum(good),
            "copies_that_failed": len(run.event("memory_copy_failed", 0)),
            "resident_kib": rows,  # of each process: {steps / 2: KiB}
            "growth_from_100": [
                round(mine[max(mine)] / mine[100] - 1, 4) for mine in rows
            ],
            "kib_per_save_from_100": [
                round((mine[max(mine)] - mine[100]) / (max(mine) - 100), 2)
                for mine in rows
            ],
        }
        shown = {k: v for k, v in sides[side].items() if k != "resident_kib"}
        print(side, shown, flush=True)
    record = measuring.record_head(sys.argv[1:]) | {"processes": HOSTS, **sides}
    measuring.write(str(out) if out else None, record)


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    if flags.command == "plan":
        write_plan(PLAN)
    elif flags.command == "quiet":
        quiet(flags.folder, flags.steps)
    elif flags.command == "flat":
        flat(flags.folder, flags.saves, flags.out)
    elif flags.command == "run":
        plan = read_plan(PLAN)
        if flags.pilot:
            kinds: Counter[str] = Counter()
            first = []
            for fault in plan:
                kinds[fault.kind] += 1
                if kinds[fault.kind] <= flags.pilot:
                    first.append(fault)
            plan = first
        if flags.only:
            plan = [fault for fault in plan if flags.only in fault.kind]
        Driver(flags.folder).go(plan, flags.budget_s, again=flags.again)
    else:
        summary(flags.folder, flags.out)


def summary(folder: Path, out: Path | None) -> None:
    """Summarizes the record of a campaign."""
    import measuring

    tries = _rows(folder / "record.jsonl")
    rows = list({row["number"]: row for row in tries}.values())  # the last tries
    kinds: dict[str, Any] = {}
    for kind, (count, source) in MIX.items():
        mine = [row for row in rows if row["kind"] == kind]
        good = [row for row in mine if row["ok"]]
        kinds[kind] = {
            "planned": count,
            "source": source,
            "done": len(mine),
            "recovered": len(good),
            "seconds": measuring.quartiles([row["seconds"] for row in good])
            if good
            else None,
        }
    losses = _compare_losses(folder)
    states = _compare_states(folder)
    record = measuring.record_head(sys.argv[1:]) | {
        "seed": SEED,
        "processes": HOSTS,
        "settings": SETTINGS,
        "faults": len(rows),
        "recovered": sum(row["ok"] for row in rows),
        "states_compared": states[0],
        "states_that_differ": states[1],
        "losses_compared": losses[0],
        "losses_that_differ": losses[1],
        "steps": max((row["step"] for row in rows), default=0),
        "kinds": kinds,
        "tries_that_failed": [row for row in tries if not row["ok"]],
        "record": rows,
    }
    print(json.dumps({k: v for k, v in record.items() if k != "record"}, indent=1))
    measuring.write(str(out) if out else None, record)


def _compare_states(folder: Path) -> tuple[int, int]:
    """Compares all states with those of the quiet run: their number, and that differ."""
    true = read_states(folder / "quiet")
    count = differ = 0
    for rank, states in enumerate(true):
        for row in _rows(folder / "campaign/states" / f"{rank}.jsonl"):
            count += 1
            differ += row["sha"] != states.get(row["step"])
    return count, differ


def _compare_losses(folder: Path) -> tuple[int, int]:
    """Compares the losses of both runs: number of rows, and of those that differ."""
    true = {row["step"]: row["loss"] for row in read_rows(folder / "quiet/run").train}
    count = differ = 0
    path = folder / "campaign/run/metrics.jsonl"
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if "loss" in row:
                count += 1
                differ += row["loss"] != true.get(row["step"])
    return count, differ


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/memory-faults"))
    parser.add_argument("--steps", type=int, default=3000, help="steps of `quiet`")
    parser.add_argument("--saves", type=int, default=500, help="saves of `flat`")
    parser.add_argument("--pilot", type=int, default=0, help="faults of each kind")
    parser.add_argument("--only", default="", help="kinds that contain this text")
    parser.add_argument(
        "--again", action="store_true", help="repeat the faults that failed"
    )
    parser.add_argument("--budget-s", type=float, default=1e9, help="seconds")
    parser.add_argument("--out", type=Path, help="JSON file of `summary`")
    return parser


if __name__ == "__main__":
    main()
