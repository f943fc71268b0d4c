"""Long campaigns on copies: kill -9 amid them, damage in the store at random, stores
that fail. `-m slow`
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import MANIFEST, CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.operations.copies.copies import Copies, Foreign, fetch_newest
from jaxdist.telemetry.metrics import read_events
from support.paths import ROOT, TESTS
from support.runs import command, environment, last_step, losses, start_group, train

KILLS = 24


def environ() -> dict[str, str]:
    return environment(1) | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(TESTS)))}


def start(workdir: Path, url: str, **changes) -> subprocess.Popen:
    """Starts a run with the stores of `support.bad_stores`."""
    flags = command(workdir, **changes)[3:]
    words = [
        sys.executable,
        "-m",
        "support.bad_stores",
        *flags,
        f"--config.checkpoint.copy_to={url}",
    ]
    out, err = (
        open(workdir.with_name(f"{workdir.name}.{name}"), "a")
        for name in ("out", "err")
    )
    return subprocess.Popen(words, env=environ(), stdout=out, stderr=err, cwd=ROOT)


def halves(place: Path) -> list[int]:
    """Returns the steps of a store that have files and no manifest."""
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return [
        int(name)
        for name in names
        if name.isdecimal() and not (place / name / MANIFEST).exists()
    ]


def check_store(place: Path) -> int:
    """Returns how many steps count in a store; each of them must be whole."""
    whole = [int(p.parent.name) for p in place.glob(f"*/{MANIFEST}")]
    for step in whole:
        try:
            integrity.read_manifest(place / str(step))
        except CheckpointError:  # killed amid the manifest itself: no start takes that
            whole.remove(step)
            continue
        integrity.check(place, step)
    return len(whole)


@pytest.mark.slow
def test_kill_9_amid_copies_leaves_no_incomplete_step_and_the_run_goes_on_bit_for_bit(
    tmp_path,
):
    draw, workdir, store = random.Random(0), tmp_path / "run", tmp_path / "store"
    settings = {
        "train.steps": 6000,
        "checkpoint.every_steps": 10,
        "train.log_every": 10,
    }
    settings |= {"optimizer.schedule": "constant"}  # wsd would keep one step more
    place, amid, fetched, went_on = store / "checkpoints", 0, 0, []
    for life in range(KILLS):
        if life % 3 == 2:  # a new machine: all that is left are the copies
            shutil.rmtree(workdir)
        process = start(workdir, f"slow://{store}", **settings)
        before = len([e for e in events(workdir) if e["event"] == "checkpoint_copied"])
        until = time.monotonic() + 300
        while time.monotonic() < until and process.poll() is None:
            copied = (
                len([e for e in events(workdir) if e["event"] == "checkpoint_copied"])
                > before
            )
            if (copied or not life) and halves(place):
                break
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.5))
        assert process.poll() is None, "the run has ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        amid += bool(halves(place))
        # Of three kept steps, one under way, and what the life before had there.
        assert check_store(place) <= 8, sorted(place.iterdir())
        if life % 3 == 2:
            fetched += 1
            assert [e["event"] for e in events(workdir)].count(
                "checkpoint_fetched"
            ) == 1
        went_on.append(last_step(workdir))
    shutil.rmtree(workdir)
    assert start(workdir, f"slow://{store}", **settings).wait(timeout=900) == 0
    kept = folders.list_steps(workdir / "checkpoints")
    assert folders.list_steps(place) == kept, failures(workdir)
    assert halves(place) == [], failures(workdir)
    # keep_last, and one that was being copied
    assert check_store(place) == len(kept) <= 4
    print(
        f"{KILLS} kills, {amid} amid a copy, {fetched + 1} starts from the store alone, steps {went_on}"
    )
    assert amid >= KILLS // 2
    assert went_on[-1] > went_on[0]
    train(
        whole := tmp_path / "whole",
        **{key.replace(".", "__"): x for key, x in settings.items()},
    )
    sums = [
        integrity.check(folder / "checkpoints", 6000).fingerprints
        for folder in (whole, workdir)
    ]
    assert sums[0] == sums[1]
    again, once = losses(workdir), losses(whole)
    assert again
    assert all(once[step] == again[step] for step in again)


def failures(workdir: Path) -> list[str]:
    return [
        e["error"] for e in events(workdir) if e["event"] == "checkpoint_copy_failed"
    ]


def events(workdir: Path) -> list[dict]:
    return read_events(workdir) if workdir.is_dir() else []


# --- damage in the store --------------------------------------------------------------


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """A store with steps 1 to 4 of one run, and beside it step 3 of another."""
    base = tmp_path_factory.mktemp("copied")
    for name in ("store", "other"):
        folder = base / f"{name}-run" / "checkpoints"
        with CheckpointManager(folder, CheckpointConfig(keep_last=4)) as store:
            for step in (1, 2, 3, 4):
                store.save(
                    step,
                    {"x": jnp.arange(512.0) * step, "step": jnp.int32(step)},
                    {"data": step},
                )
                store.wait()
        for step in (1, 2, 3, 4):
            Copies(f"file://{base / name}").copy(folder, step)
    return base


def a_file(draw, step: Path, *, sized: bool = False) -> Path:
    files = sorted(path for path in step.rglob("*") if path.is_file())
    return draw.choice([path for path in files if path.stat().st_size or not sized])


def flip(draw, step: Path, _: Path) -> str:
    file = a_file(draw, step, sized=True)
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(bytes(content))
    return file.name


def cut(draw, step: Path, _: Path) -> str:
    file = a_file(draw, step, sized=True)
    os.truncate(file, draw.randrange(file.stat().st_size))
    return file.name


def lose(draw, step: Path, _: Path) -> str:
    file = a_file(draw, step)
    file.unlink()
    return file.name


def lengthen(draw, step: Path, _: Path) -> str:
    file = a_file(draw, step)
    file.write_bytes(file.read_bytes() + bytes([draw.randrange(256)]))
    return file.name


def swap(draw, step: Path, _: Path) -> str:
    """The bytes of one file in another's place."""
    file, other = a_file(draw, step, sized=True), a_file(draw, step, sized=True)
    while other.read_bytes() == file.read_bytes():
        other = a_file(draw, step, sized=True)
    shutil.copyfile(other, file)
    return file.name


def another_step(draw, step: Path, _: Path) -> str:
    other = step.with_name(str(int(step.name) % 4 + 1))
    shutil.rmtree(step)
    shutil.copytree(other, step)
    return "step"


def another_run(draw, step: Path, base: Path) -> str:
    shutil.rmtree(step)
    shutil.copytree(base / "other" / "checkpoints" / step.name, step)
    return "run"


def another_run_s_manifest(draw, step: Path, base: Path) -> str:
    shutil.copyfile(
        base / "other" / "checkpoints" / step.name / MANIFEST, step / MANIFEST
    )
    return "manifest"


DAMAGES = [
    flip,
    cut,
    lose,
    lengthen,
    swap,
    another_step,
    another_run,
    another_run_s_manifest,
]


@pytest.mark.slow
def test_each_of_160_damages_in_the_store_is_detected_and_an_older_step_fetched(
    copied, tmp_path
):
    draw, run = (
        random.Random(1),
        integrity.read_identity(copied / "store-run" / "checkpoints"),
    )
    sound = {n: (copied / "store/checkpoints" / str(n)) for n in (1, 2, 3, 4)}
    count = 0
    for number in range(20 * len(DAMAGES)):
        store, target = tmp_path / f"store-{number}", tmp_path / f"fetched-{number}"
        shutil.copytree(copied / "store", store)
        damaged = draw.choice([(4,), (4, 3), (4, 3, 2)])
        kind = DAMAGES[number % len(DAMAGES)]
        # `another_step` copies a step that is sound or older
        for step in sorted(damaged):
            place, before = store / "checkpoints" / str(step), content(sound[step])
            what = kind(draw, place, copied)
            assert content(place) != before, (
                f"{kind.__name__} of {what} has changed nothing"
            )
            count += 1
        step, _, bad = fetch_newest(Copies(f"file://{store}"), target, run=run)
        lost = {
            n
            for n in damaged
            if not (store / "checkpoints" / str(n) / MANIFEST).exists()
        }
        right = 4 - len(damaged)
        case = (kind.__name__, damaged, bad)
        assert step == right, case
        assert set(bad) == set(damaged) - lost, case
        assert content(target / str(step)) == content(sound[step])
        assert [path.name for path in target.iterdir()] == [str(step)]
        shutil.rmtree(store)
        shutil.rmtree(target)
    print(f"{count} damages, all detected")
    assert count >= 160


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- stores that fail -----------------------------------------------------------------

WORDS = {
    "hanging": "has waited 1 s",
    "denied": "Access Denied",
    "expired": "token has expired",
    "full": "No space left",
    "lossy": "in the store,",
}
SHORT = {"checkpoint.copy_wait_s": 1, "checkpoint.patience_s": 1, "train.steps": 20}


def fetched_step(folder: Path) -> int:
    """Fetches from a store without whole steps; returns the step, which must be 0.

    A store that only the lost run has claimed is refused to a run of no known config.
    """
    try:
        return fetch_newest(Copies(f"file://{folder / 'store'}"), folder / "fetched")[0]
    except Foreign as error:
        assert "none of them whole yet" in str(error)
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORDS)
def test_a_store_that_fails_neither_ends_nor_changes_a_run(tmp_path, kind):
    changes = SHORT | {"checkpoint.copy_wait_s": 1 if kind == "hanging" else 120}
    assert (
        start(tmp_path / "run", f"{kind}://{tmp_path / 'store'}", **changes).wait(
            timeout=300
        )
        == 0
    )
    all_events, failed = events(tmp_path / "run"), failures(tmp_path / "run")
    assert any(WORDS[kind] in error for error in failed), failed
    assert not [e for e in all_events if e["event"] == "checkpoint_copied"]
    assert all(e["ok"] for e in all_events if e["event"] == "save")
    assert sorted(losses(tmp_path / "run")) == list(range(1, 21))
    assert not list((tmp_path / "store").glob(f"checkpoints/*/{MANIFEST}"))
    assert fetched_step(tmp_path) == 0


@pytest.mark.slow
def test_a_put_that_hangs_holds_up_no_stop_signal(tmp_path):
    workdir = tmp_path / "run"
    changes = SHORT | {"train.steps": 1_000_000, "checkpoint.every_steps": 5}
    process = start(workdir, f"hanging://{tmp_path / 'store'}", **changes)
    until = time.monotonic() + 300
    # it goes on while the first put hangs, that of the store's identity
    while last_step(workdir) < 50 and time.monotonic() < until:
        time.sleep(0.01)
    assert last_step(workdir) >= 50
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    assert "is not copied to hanging://" in (tmp_path / "run.out").read_text()
    by_name = {event["event"]: event for event in events(workdir)}
    saved, failed = by_name["save"], by_name["checkpoint_copy_failed"]
    assert saved["ok"]
    assert saved["step"] == by_name["preempted"]["step"]
    assert "has waited 1 s" in failed["error"]
    print(
        f"{failed['time'] - by_name['preempted']['time']:.1f} s from the event preempted to the last word"
    )


# --- several processes ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("there", ["sound", "gone"])
def test_two_processes_go_on_from_the_same_copy_or_end_together(tmp_path, there):
    workdir, store = tmp_path / "run", tmp_path / "store"
    settings = {
        "train.steps": 20,
        "checkpoint.copy_to": f"file://{store}",
        "mesh.data": 2,
    }
    settings |= {"optimizer.schedule": "constant"}

    def group(**changes) -> tuple[list[int], str]:
        runs = start_group(
            command(workdir, **settings | changes), 2, 1, stderr=subprocess.STDOUT
        )
        outputs = [run.communicate(timeout=300)[0] for run in runs]
        return [run.returncode for run in runs], "".join(outputs)

    codes, output = group(**{"train.steps": 14})
    assert codes == [0, 0], output[-3000:]
    assert folders.list_steps(workdir / "checkpoints") == [7, 14]
    for step in (7, 14):
        file = max(
            (workdir / "checkpoints" / str(step) / "state").rglob("*"),
            key=lambda f: f.stat().st_size,
        )
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    if there == "gone":
        shutil.rmtree(store)
    codes, output = group()
    if there == "gone":
        assert 77 in codes, (codes, output[-3000:])
        assert set(codes) <= {70, 77}, (codes, output[-3000:])
        assert "no usable checkpoint" in output
        return
    assert codes == [0, 0], output[-3000:]
    named = [(e["event"], e["step"]) for e in events(workdir)]
    assert ("bad_checkpoint", 14) in named
    assert ("checkpoint_fetched", 14) in named
    assert named.count(("restore", 14)) == 1
    assert folders.list_steps(workdir / "checkpoints")[-1] == 20
