"""Reading the checkpoints of a run that goes on saving: old steps are deleted while
they are read.
"""

import json

import pytest

from jaxdist.checkpoint import __main__ as command
from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from support.checkpoints import (
    abstract_on,
    assert_bitwise,
    make_state,
    mesh_of,
    save_and_wait,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


class LiveRun:
    """A run that has saved step 1 and keeps its last step alone."""

    def __init__(self, folder, **config):
        self.folder, self.mesh = folder, mesh_of(1, 1)
        self.states = {step: make_state(self.mesh, seed=step) for step in range(1, 5)}
        self.store = CheckpointManager(
            folder, CheckpointConfig(**{"keep_last": 1, **config})
        )
        self.step = 0
        self.advance()

    def advance(self) -> None:
        self.step += 1
        assert save_and_wait(
            self.store, self.step, self.states[self.step], saved=self.step
        ).ok

    def abstract(self):
        return abstract_on(self.mesh, self.states[1])


@pytest.fixture
def live(tmp_path):
    run = LiveRun(tmp_path / "checkpoints")
    yield run
    run.store.close()


def test_a_restore_takes_the_newest_of_what_is_there_by_then(live):
    advances = iter([live.advance, live.advance])

    def wanted(info: folders.StepInfo):
        # between the look at a step and the reading of its arrays
        next(advances, lambda: None)()
        return live.abstract()

    with CheckpointManager(live.folder, CheckpointConfig(), mode="read") as reader:
        restored = reader.restore(wanted)
        assert reader.damaged_steps == {}, "a step that was deleted was no bad one"
    assert_bitwise(restored.state, live.states[3])


def test_a_step_that_is_kept_is_not_taken_for_the_newest(tmp_path):
    live = LiveRun(tmp_path / "checkpoints", keep_every=2)
    live.advance()
    live.advance()
    seen = []

    def wanted(info: folders.StepInfo):
        seen.append(folders.list_steps(live.folder))
        if len(seen) == 1:
            live.advance()  # 4; deletes 3, but not 2
        return live.abstract()

    with CheckpointManager(live.folder, CheckpointConfig(), mode="read") as reader:
        restored = reader.restore(wanted)
    live.store.close()
    assert seen == [[2, 3], [2, 4]]
    assert_bitwise(restored.state, live.states[4])


def test_a_run_that_deletes_faster_than_one_reads_is_an_error_that_says_so(live):
    def wanted(info: folders.StepInfo):
        folders.remove_step(live.folder, live.step)
        return live.abstract()

    with (
        CheckpointManager(live.folder, CheckpointConfig(), mode="read") as reader,
        pytest.raises(CheckpointError, match="no usable checkpoint(.|\n)*step 1"),
    ):
        reader.restore(wanted)


def test_steps_are_listed_again_only_after_one_was_deleted(live):
    live.advance()
    (live.folder / "2" / "state").rename(live.folder / "elsewhere")
    assert list(folders.newest_first(live.folder, folders.all_steps)) == [2], (
        "damaged, not deleted"
    )
    (live.folder / "elsewhere").rename(live.folder / "2" / "state")
    steps = folders.newest_first(live.folder)
    assert next(steps) == 2
    live.advance()
    assert list(steps) == [3]


@pytest.mark.parametrize("action", ["inspect", "list", "verify"])
def test_the_command_sees_no_damage_in_what_is_deleted(
    live, action, monkeypatch, capsys
):
    read, advances = integrity.read_manifest, iter([live.advance])

    def raced(path):
        next(advances, lambda: None)()
        return read(path)

    monkeypatch.setattr(integrity, "read_manifest", raced)
    assert command.main([action, str(live.folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    steps = [document] if action == "inspect" else document["steps"]
    assert [(row["step"], "fault" in row) for row in steps] == [(2, False)]


def test_the_newest_metadata_is_that_of_a_step_that_is_there(live, monkeypatch):
    read, advances = folders.read_step, iter([live.advance])

    def raced(folder, step):
        next(advances, lambda: None)()
        return read(folder, step)

    monkeypatch.setattr(folders, "read_step", raced)
    assert integrity.newest_metadata(live.folder, None) == {"saved": 2}
