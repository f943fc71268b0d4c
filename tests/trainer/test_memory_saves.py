"""Steps in the memory of the hosts: runs resume from them bit for bit, and from the
folder if a copy is bad. In this process; real tiny models.
"""

import functools
import itertools
import json
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist.checkpoint import __main__ as command
from jaxdist.checkpoint import memory_file, memory_store
from jaxdist.checkpoint.folders import CheckpointError, list_steps
from jaxdist.checkpoint.orbax_backend import OrbaxBackend
from jaxdist.config import ConfigError
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.ledger.run_lives import read_lives
from jaxdist.operations.page import status
from jaxdist.step.state import State
from jaxdist.storage import run_format
from jaxdist.storage.digest import digest
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import memory_saves, run_config, training
from jaxdist.trainer.callbacks import Callback, StepView
from jaxdist.trainer.health import Diverged
from jaxdist.trainer.memory_saves import MemorySaves
from support.checkpoints import a_data_file
from support.checkpoints import flip as bit_flip
from support.runs import SMALL_MODEL, losses

slow = functools.partial(pytest.param, marks=pytest.mark.slow)

pytestmark = pytest.mark.usefixtures("shared_steps")

SMALL = {
    **SMALL_MODEL,
    "train.steps": 9,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "batch.global_size": 8,
    "batch.sequence_length": 16,
    "data.validation_tokens": 64,
    "checkpoint.every_steps": 4,
    "checkpoint.asynchronous": False,  # so that what is sealed is certain
    "checkpoint.memory_every_steps": 2,
    "optimizer.warmup_steps": 1,
    "mesh.fsdp": 4,
}


class Crash(Exception):
    """The death of a run; nothing of it may save or tidy up."""


class Wait(Callback):
    """Waits for the running saves after each step, so that none is skipped."""

    may_request = False

    def on_start(self, run):
        self.run = run

    def on_step(self, view: StepView) -> None:
        self.run.store.wait()
        if self.run.store.memory:
            self.run.store.memory.wait()


class CrashAfter(Callback):
    """Ends the run after a step."""

    may_request = False

    def __init__(self, step: int):
        self.step = step

    def on_step(self, view: StepView) -> None:
        if view.step == self.step:
            raise Crash


def config_of(memory: Path | None, **changes) -> run_config.RunConfig:
    config = run_config.default_config()
    settings = SMALL | {"checkpoint.memory_folder": str(memory or "")}
    if memory is None:
        settings["checkpoint.memory_every_steps"] = 0
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    config.update_from_flattened_dict(settings)
    return run_config.from_config(config)


def run(
    folder: Path, memory: Path | None, *callbacks, devices: int = 4, **changes
) -> State:
    result = training.train(
        config_of(memory, **changes),
        folder,
        devices=jax.devices()[:devices],
        callbacks=[Wait(), MemorySaves(), *callbacks],
    )
    return result.state


def crash(folder: Path, memory: Path, after: int, **changes) -> None:
    """Runs until the step after `after` has started; the latest steps are in memory."""
    with pytest.raises(Crash):
        run(folder, memory, CrashAfter(after + 1), **changes)


def files_of(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.glob("jaxdist-*/*"))


def events(folder: Path, name: str) -> list[dict]:
    return [event for event in read_events(folder) if event["event"] == name]


def assert_equal(got: State, want: State) -> None:
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for one, other in leaves:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """Returns the steps of the folder that Orbax has read."""
    found: list[Path] = []
    honest = OrbaxBackend.read

    def read(self, path, abstract):
        found.append(path)
        return honest(self, path, abstract)

    monkeypatch.setattr(OrbaxBackend, "read", read)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> State:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(folder / "run", None)


def test_a_run_resumes_from_memory_bit_for_bit(tmp_path, undisturbed, reads):
    crash(tmp_path / "run", tmp_path / "memory", after=6)
    assert list_steps(tmp_path / "run/checkpoints") == [4]
    assert files_of(tmp_path / "memory") == ["4-0.shards", "6-0.shards"]
    state = run(tmp_path / "run", tmp_path / "memory")
    assert not reads
    assert [event["step"] for event in events(tmp_path / "run", "memory_restore")] == [
        6
    ]
    assert events(tmp_path / "run", "restore")[0]["step"] == 6
    assert_equal(state, undisturbed)
    # the folder has the last step, so memory is free again
    assert list_steps(tmp_path / "run/checkpoints") == [8, 9]
    assert not list((tmp_path / "memory").iterdir())


def test_a_run_without_any_step_in_the_folder_resumes(tmp_path, undisturbed, reads):
    never = {"checkpoint__every_steps": 0}
    crash(tmp_path / "run", tmp_path / "memory", after=6, **never)
    assert not list_steps(tmp_path / "run/checkpoints")
    state = run(tmp_path / "run", tmp_path / "memory", **never)
    assert not reads
    assert events(tmp_path / "run", "memory_restore")
    assert_equal(state, undisturbed)


def flip(memory: Path, name: str, place: int = -1000) -> None:
    """Flips a bit of the content of a file in memory."""
    (file,) = memory.glob(f"jaxdist-*/{name}")
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


def test_a_flipped_bit_falls_back_to_the_folder(tmp_path, undisturbed, reads):
    """The step before in memory is that of the folder, and it is bad, too."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    flip(memory, "6-0.shards")
    flip(memory, "4-0.shards")
    state = run(folder, memory)
    assert [path.name for path in reads] == ["4"]
    bad = events(folder, "bad_memory_copy")
    assert [event["step"] for event in bad] == [6, 4]
    assert all("changed since it was written" in event["reason"] for event in bad)
    assert not events(folder, "memory_restore")
    assert_equal(state, undisturbed)


def test_a_flipped_bit_falls_back_to_the_step_before(tmp_path, undisturbed, reads):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    flip(memory, "6-0.shards")
    state = run(folder, memory)
    assert not reads
    assert events(folder, "memory_restore")[0]["step"] == 4
    assert_equal(state, undisturbed)


def test_a_bad_copy_without_any_other_step_begins_anew(tmp_path, undisturbed):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    never = {"checkpoint__every_steps": 0, "checkpoint__memory_every_steps": 6}
    crash(folder, memory, after=6, **never)
    flip(memory, "6-0.shards")
    state = run(folder, memory, **never)
    assert events(folder, "bad_memory_copy")
    assert not events(folder, "restore")
    assert_equal(state, undisturbed)


def test_a_folder_that_is_gone_is_told_although_memory_has_a_step(tmp_path):
    crash(tmp_path / "run", tmp_path / "memory", after=6)
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="has saved, but"):
        run(tmp_path / "run", tmp_path / "memory")


def test_a_finished_state_that_only_memory_has_goes_to_the_folder(tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    assert list_steps(folder / "checkpoints") == [4]
    run(folder, memory, train__steps=6)
    assert 6 in list_steps(folder / "checkpoints")
    assert not list(memory.iterdir())


def damage_contents(monkeypatch, step: int) -> None:
    """Changes an array of a step before its file is hashed and written."""
    honest = memory_file.write

    def damaging(file, header, contents):
        contents = [np.array(x) for x in contents]
        if header.step == step:
            contents[-1].reshape(-1).view(np.uint8)[0] ^= 1
        return honest(file, header, contents)

    monkeypatch.setattr(memory_file, "write", damaging)


def test_a_wrong_array_that_is_the_only_step_begins_anew(
    tmp_path, undisturbed, monkeypatch
):
    """The file is sound, so the fault shows only once the arrays are on the devices."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    never = {"checkpoint__every_steps": 0, "checkpoint__memory_every_steps": 6}
    damage_contents(monkeypatch, step=6)
    crash(folder, memory, after=6, **never)
    state = run(folder, memory, **never)
    assert "fingerprint" in events(folder, "bad_memory_copy")[0]["reason"]
    assert not events(folder, "restore")
    assert_equal(state, undisturbed)


def test_a_wrong_array_with_right_hashes_is_seen_on_the_devices(
    tmp_path, undisturbed, monkeypatch, reads
):
    """The bits changed between the devices and the file."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    damage_contents(monkeypatch, step=6)
    crash(folder, memory, after=6)
    state = run(folder, memory)
    (bad,) = events(folder, "bad_memory_copy")
    assert bad["step"] == 6
    assert "fingerprint" in bad["reason"]
    assert events(folder, "memory_restore")[0]["step"] == 4
    assert_equal(state, undisturbed)


LAYOUTS = [
    {"mesh__fsdp": 1, "mesh__data": 2, "devices": 2},
    slow({"mesh__fsdp": 2, "mesh__tensor": 2}),
    slow({"mesh__fsdp": 8, "devices": 8}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_another_layout_reads_what_it_needs(tmp_path, undisturbed, layout, reads):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    state = run(folder, memory, **layout)
    assert not reads
    assert events(folder, "memory_restore")[0]["step"] == 6
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(undisturbed), strict=True)
    for one, other in leaves:
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), atol=2e-6
        )


STATES = {
    "pipeline": {
        "mesh__pipeline": 2,
        "mesh__fsdp": 2,
        "model__num_layers": 3,  # the stages are padded, the canonical form is not
        "pipeline__microbatches": 2,
    },
    "experts and ema": {"model__num_experts": 4, "train__ema_decay": 0.9},
    "lora": {"lora__rank": 2, "lora__base": "int8"},
    "offload": {"offload__optimizer": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
def test_states_of_all_kinds_come_back_bit_for_bit(tmp_path, kind, reads):
    settings = STATES[kind]
    want = run(tmp_path / "straight", None, **settings)
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6, **settings)
    got = run(folder, memory, **settings)
    assert not reads
    assert events(folder, "memory_restore")[0]["step"] == 6
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got.opt_state)}
    assert (len(kinds) == 2) == (kind == "offload")
    assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_pipeline_and_its_layers_on_one_device_are_one_state(tmp_path, before, reads):
    pipeline = STATES["pipeline"]
    flat = {"mesh__fsdp": 1, "model__num_layers": 3, "devices": 1}
    folder, memory = tmp_path / "run", tmp_path / "memory"
    first, second = (pipeline, flat) if before else (flat, pipeline)
    crash(folder, memory, after=6, **first)
    run(folder, memory, **second)
    assert not reads
    assert events(folder, "memory_restore")[0]["step"] == 6
    run(tmp_path / "straight", None, **second)
    reference = losses(tmp_path / "straight")
    assert reference.keys() == set(range(1, 10))
    assert losses(folder) == pytest.approx(reference, rel=1e-5)


def test_a_rollback_makes_the_steps_in_memory_invalid(tmp_path, monkeypatch):
    """A fault after step 6 goes back to the folder's step 4, and training goes on."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    fault = Diverged("drift", "on order", first=7, last=7, policy="rollback")
    faults = iter([fault])

    class Fault(Callback):
        may_request = False

        def on_step(self, view):
            if view.step == 8:
                branches.append(memory_store.read_branch(folder / run_format.MEMORY))
                for fault in faults:
                    raise fault

    branches: list[memory_store.Branch | None] = []
    run(folder, memory, Fault(), train__steps=12, checkpoint__memory_every_steps=3)
    assert [event["step"] for event in events(folder, "restore")] == [4]
    first, second = branches
    assert first is not None
    assert second is not None
    assert first.name != second.name
    assert (first.sealed, second.sealed) == (4, 4)
    saves = [save["step"] for save in events(folder, "memory_save")]
    assert saves == [3, 6, 6, 9]  # the last step is the folder's alone


def test_steps_in_memory_follow_the_folder_and_each_other(tmp_path):
    """Two complete steps stay, and none that is older than the folder's newest."""
    seen = {}

    class Look(Callback):
        may_request = False

        def on_step(self, view):
            steps = {name.partition("-")[0] for name in files_of(tmp_path / "memory")}
            seen[view.step] = sorted(map(int, steps))

    settings = {"checkpoint__memory_every_steps": 1, "train__steps": 12}
    run(tmp_path / "run", tmp_path / "memory", Look(), **settings)
    # `Look` comes before the save of its step
    assert seen[1] == []
    assert seen[4] == [1, 2, 3]  # the third was complete after the second save
    assert seen[5] == [2, 3, 4]
    # step 4 is sealed, so the save of step 5 drops all before
    assert seen[6] == [4, 5]
    assert seen[7] == [4, 5, 6]
    assert seen[8] == [5, 6, 7]


def test_another_run_in_the_same_memory_is_left_alone(tmp_path, undisturbed):
    memory = tmp_path / "memory"
    crash(tmp_path / "one", memory, after=6)
    before = files_of(memory)
    state = run(tmp_path / "two", memory)
    assert not events(tmp_path / "two", "restore")
    assert files_of(memory) == before
    assert_equal(state, undisturbed)
    # a file of another run, under the name of this one's
    crash(tmp_path / "three", memory, after=6)
    one, three = (
        memory_of(tmp_path / name, memory) / "6-0.shards" for name in ("one", "three")
    )
    assert one != three
    three.write_bytes(one.read_bytes())
    run(tmp_path / "three", memory)
    (bad,) = events(tmp_path / "three", "bad_memory_copy")
    assert "another run" in bad["reason"]


@pytest.mark.slow
def test_a_copy_of_a_workdir_leaves_the_memory_of_the_first_one(tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    before = files_of(memory)
    shutil.copytree(folder, tmp_path / "copy")
    run(tmp_path / "copy", memory)
    assert events(tmp_path / "copy", "restore")[0]["step"] == 4
    assert files_of(memory) == before


def memory_of(folder: Path, memory: Path) -> Path:
    """Returns the folder in memory of the run in a workdir."""
    name = (folder / "checkpoints/identity").read_text().split()[0]
    identity = digest(name, folder)
    return memory_store.MemoryStore(memory, run=identity, branch="").folder


@pytest.mark.slow
def test_steps_of_a_history_that_was_left_do_not_count(tmp_path):
    """Without memory.json the run has left the history of the files."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    (folder / run_format.MEMORY).unlink()
    run(folder, memory)
    assert not events(folder, "memory_restore")
    assert not events(folder, "bad_memory_copy")
    assert events(folder, "restore")[0]["step"] == 4


def test_steps_in_memory_do_not_outlive_a_start_without_them(tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=6)
    with pytest.raises(Crash):
        run(folder, None, CrashAfter(5))
    assert events(folder, "restore")[-1]["step"] == 4
    run(folder, memory)
    assert not events(folder, "memory_restore")
    assert events(folder, "restore")[-1]["step"] == 4


def test_copies_without_another_host_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="memory_peers=1: .* need 2 hosts"):
        run(tmp_path / "run", tmp_path / "memory", checkpoint__memory_peers=1)


def test_a_full_memory_at_the_start_is_refused_with_the_arithmetic(
    tmp_path, monkeypatch
):
    room = memory_store.Room(1000, "MemAvailable of the machine")
    monkeypatch.setattr(memory_store, "free_memory", lambda: room)
    monkeypatch.setattr(memory_store, "is_in_memory", lambda folder: True)
    with pytest.raises(
        ConfigError, match=r"4 copies need [\d,]+ .*, and 1,000 are free"
    ):
        run(tmp_path / "run", tmp_path / "memory")
    # a save to the folder that runs beside it holds a copy, too
    with pytest.raises(ConfigError, match="5 copies need"):
        run(tmp_path / "two", tmp_path / "memory", checkpoint__asynchronous=True)


def test_a_full_memory_while_training_skips_the_save(
    tmp_path, monkeypatch, undisturbed
):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    room = itertools.chain([10**9], itertools.repeat(10))
    monkeypatch.setattr(
        memory_store, "room_of", lambda folder: memory_store.Room(next(room), "test")
    )
    state = run(folder, memory)
    saves = events(folder, "memory_save")
    assert [save["ok"] for save in saves] == [True, False, False]
    assert "with a margin of 10%, 10 are free (test)" in saves[1]["error"]
    assert_equal(state, undisturbed)


class DeleteAfter(Callback):
    """Deletes the memory of the host after a step."""

    may_request = False

    def __init__(self, memory: Path, step: int):
        self.memory = memory
        self.step = step

    def on_step(self, view: StepView) -> None:
        if view.step == self.step:
            shutil.rmtree(self.memory)


def test_a_folder_that_is_deleted_during_the_run_is_made_again(tmp_path, reads):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    with pytest.raises(Crash):
        run(folder, memory, DeleteAfter(memory, 5), CrashAfter(9))
    assert all(save["ok"] for save in events(folder, "memory_save"))
    run(folder, memory)
    assert events(folder, "memory_restore")[0]["step"] == 8
    assert not events(folder, "bad_memory_copy")
    assert not reads


def test_failed_saves_come_later_each_time_until_one_succeeds(
    tmp_path, monkeypatch, capsys
):
    """After a failure at step 1, the waits are 2, 4, 8, 16 and 16 steps."""
    honest = memory_file.write
    tried = []

    def failing(file, header, contents):
        tried.append(header.step)
        if header.step < 40:
            raise OSError(28, "No space left on device")
        return honest(file, header, contents)

    monkeypatch.setattr(memory_file, "write", failing)
    settings = {
        "train__steps": 52,
        "checkpoint__memory_every_steps": 1,
        "checkpoint__every_steps": 0,
    }
    run(tmp_path / "run", tmp_path / "memory", **settings)
    assert tried == [1, 3, 7, 15, 31, 47, 48, 49, 50, 51]
    saves = events(tmp_path / "run", "memory_save")
    assert [(save["step"], save["ok"]) for save in saves] == [
        (step, step > 40) for step in tried
    ]
    assert capsys.readouterr().out.count("training continues") == 1


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_folder_that_was_set_back_by_hand_takes_memory_along(
    tmp_path, by_hand, capsys
):
    """Without the deletion the run resumes from the newer step in memory."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    steps = {"train__steps": 12}
    crash(folder, memory, after=10, **steps)
    assert list_steps(folder / "checkpoints") == [4, 8]
    assert files_of(memory) == ["10-0.shards", "8-0.shards"]
    if by_hand:
        shutil.rmtree(folder / "checkpoints/8")
        assert command.main(["list", str(folder)]) == 0
        assert "memory none" in capsys.readouterr().out
    run(folder, memory, **steps)
    (restored,) = events(folder, "restore")
    assert restored["step"] == (4 if by_hand else 10)
    assert bool(events(folder, "memory_restore")) == (not by_hand)
    assert [event["step"] for event in events(folder, "memory_left")] == [8] * by_hand
    assert ("step 8 was removed from" in capsys.readouterr().out) == by_hand


@pytest.mark.parametrize("twice", [slow(False), True])
def test_a_damaged_newest_step_gives_way_to_an_older_one_in_memory(
    tmp_path, undisturbed, twice
):
    """Its removal to quarantine does not count as a folder that was set back."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    thirds = {"checkpoint__memory_every_steps": 3}
    crash(folder, memory, after=8, **thirds)
    assert list_steps(folder / "checkpoints") == [4, 8]
    assert files_of(memory) == ["6-0.shards"]
    bit_flip(a_data_file(folder / "checkpoints/8"), 99)
    if twice:
        with pytest.raises(Crash):
            run(folder, memory, CrashAfter(7), **thirds)
        assert list_steps(folder / "checkpoints") == [4]
        assert (folder / "quarantine/8").is_dir()
    state = run(folder, memory, **thirds)
    assert [event["step"] for event in events(folder, "bad_checkpoint")] == [8]
    restored = [event["step"] for event in events(folder, "memory_restore")]
    assert restored == [6, 6] if twice else [6]
    assert not events(folder, "memory_left")
    assert_equal(state, undisturbed)


@pytest.mark.slow
def test_without_memory_a_damaged_newest_step_costs_the_steps_to_the_one_before(
    tmp_path,
):
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        run(folder, None, CrashAfter(9))
    bit_flip(a_data_file(folder / "checkpoints/8"), 99)
    run(folder, None)
    assert [event["step"] for event in events(folder, "restore")] == [4]


def test_the_end_of_a_run_does_not_wait_for_a_save_that_hangs(tmp_path, monkeypatch):
    """The folder has the last step. Otherwise the run would wait for ten minutes."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    released = threading.Event()
    honest = memory_file.write
    hung = []

    def hanging(file, header, contents):
        hung.append(header.step)
        released.wait(60)
        return honest(file, header, contents)

    monkeypatch.setattr(memory_file, "write", hanging)
    monkeypatch.setattr(memory_saves, "_LAST_WAIT_S", 0.2)
    try:
        training.train(
            config_of(memory),
            folder,
            devices=jax.devices()[:4],
            callbacks=[MemorySaves()],
        )
        assert not released.is_set()
        assert hung == [2]
        skipped = events(folder, "memory_save")
        assert [save["step"] for save in skipped] == [4, 6, 8]
        assert list_steps(folder / "checkpoints")[-1] == 9
    finally:
        released.set()


def test_the_ledger_the_status_and_the_list_know_of_memory(tmp_path, capsys):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    settings = {
        "train__steps": 13,
        "checkpoint__every_steps": 0,
        "checkpoint__memory_every_steps": 3,
    }
    with Ledger() as ledger, pytest.raises(Crash):
        run(folder, memory, ledger, CrashAfter(10), **settings)
    (life,) = read_lives(folder)
    assert life.buckets["memory"] > 0
    # the crash came before the event of step 9
    (*_, save) = events(folder, "memory_save")
    document = status.read_status(folder, now=save["time"] + 90).document()
    assert document["memory_step"] == {"step": 6, "age_s": 90, "resumed_at": None}
    assert "in memory step 6, 1m 30s old\n" in status.as_text(document)
    assert listed(folder, capsys) == [
        {"step": step, "parts": "1 of 1", "complete": True} for step in (3, 6, 9)
    ]
    with Ledger() as ledger, pytest.raises(Crash):
        run(folder, memory, ledger, CrashAfter(11), **settings)
    document = status.read_status(folder).document()
    assert document["memory_step"]["step"] == 9
    assert document["memory_step"]["resumed_at"] == 9
    assert "the run resumed from memory at step 9" in status.as_text(document)
    flip(memory, "9-0.shards", place=100)
    assert [row["step"] for row in listed(folder, capsys)] == [6]
    run(folder, memory, **settings)
    assert listed(folder, capsys) == []
    assert status.read_status(folder).document()["memory_step"] is None


def listed(folder: Path, capsys) -> list[dict]:
    """Returns what `checkpoint list` says of memory, without bytes and folder."""
    capsys.readouterr()
    assert command.main(["list", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["memory"]
    for row in rows:
        file = Path(row.pop("folder")) / f"{row['step']}-0.shards"
        assert row.pop("bytes") == file.stat().st_size
    return rows


def test_a_save_that_is_cut_short_leaves_nothing(tmp_path, monkeypatch, reads):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    honest = memory_file.write

    def dying(file, header, contents):
        if header.step == 6:
            file.write(b"JAXDIST1 begin")
            file.flush()
            raise SystemExit("killed")
        return honest(file, header, contents)

    monkeypatch.setattr(memory_file, "write", dying)
    crash(folder, memory, after=6)
    assert files_of(memory) == ["4-0.shards"]
    run(folder, memory)
    assert not events(folder, "bad_memory_copy")
    assert events(folder, "memory_restore")[0]["step"] == 4


@pytest.mark.slow
def test_the_interval_follows_from_the_cost_of_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_saves, "FIRST_STEPS", 3)
    steps = {"train__steps": 40, "checkpoint__memory_every_steps": 0}
    chosen = []
    honest = MemorySaves._next_interval

    def next_interval(self):
        chosen.append(honest(self))
        return chosen[-1]

    monkeypatch.setattr(MemorySaves, "_next_interval", next_interval)
    # a failure each few seconds
    rate = {"checkpoint__chip_hours_per_failure": 2e-4}
    run(tmp_path / "run", tmp_path / "memory", **steps, **rate)
    (first, *_) = events(tmp_path / "run", "memory_interval")
    assert first["mtbf_by"] == "checkpoint.chip_hours_per_failure"
    saves = [save["step"] for save in events(tmp_path / "run", "memory_save")]
    assert saves[0] == 3
    assert chosen[0] == 0
    assert any(chosen[1:])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_folder": "gs://bucket/x"}, "must be a path"),
        ({"memory_folder": "", "memory_every_steps": 5}, "has no effect"),
        ({"memory_folder": "", "memory_peers": 1}, "has no effect"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    config = config_of(
        Path("/dev/shm"),
        **{f"checkpoint__{key}": value for key, value in settings.items()},
    )
    assert any(words in fault for fault in config.checkpoint.faults())


def test_a_home_and_variables_are_replaced_and_one_that_is_not_set_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HERE", str(tmp_path))
    assert memory_store.expand("$HERE/x") == tmp_path / "x"
    assert memory_store.expand("${HERE}/x") == tmp_path / "x"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert memory_store.expand("~/x") == tmp_path / "x"
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        run(tmp_path / "run", Path("$NOWHERE/x"))


def test_a_restart_that_finds_too_little_memory_trains_without_it(
    tmp_path, monkeypatch, undisturbed, capsys
):
    """A first start is refused, see above."""
    folder, memory = tmp_path / "run", tmp_path / "memory"
    crash(folder, memory, after=7)
    room = memory_store.Room(1000, "test")
    monkeypatch.setattr(memory_store, "free_memory", lambda: room)
    capsys.readouterr()
    state = run(folder, memory)
    assert "no step is saved in memory until the next start" in capsys.readouterr().out
    (restored,) = events(folder, "restore")
    assert restored["step"] == 6
    (*_, save) = events(folder, "memory_save")
    assert (save["step"], save["ok"]) == (6, False)
    assert "1,000 are free" in save["error"]
    assert not files_of(memory)
    assert_equal(state, undisturbed)
