"""Where a run starts: what a checkpoint says of its run is checked before it is
believed.
"""

from typing import Any

import pytest

from jaxdist.checkpoint.folders import CheckpointError, StepInfo, list_steps
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import restore, run_metadata
from jaxdist.trainer.run_metadata import Progress
from support.checkpoints import DAMAGE
from support.runs import SMALL_MODEL, train_here

SOUND = {
    "progress": {"step": 8, "tokens_seen": 1024, "elapsed_s": 1},
    "fingerprints": {"config": "ab", "data": "cd"},
    run_metadata.SKIPPED: [[3, 5]],
}


def checked(**changes: Any) -> str:
    """Returns what is refused of metadata with these changes; "" if nothing is."""
    try:
        assert (
            restore.require_run_metadata("abstract")(StepInfo({}, SOUND | changes))
            == "abstract"
        )
    except CheckpointError as error:
        return str(error)
    return ""


def test_sound_metadata_is_believed():
    assert checked() == "" == checked(progress={"step": 8}, more=[1])
    assert run_metadata.progress_of(SOUND) == Progress(8, 1024, elapsed_s=1)


@pytest.mark.parametrize(
    ("group", "value", "words"),
    [
        ("progress", {"step": 8, "tokens_seen": -1}, "progress.tokens_seen is -1"),
        ("progress", {"step": 8, "tokens_seen": 1.5}, "progress.tokens_seen is 1.5"),
        ("progress", {"step": 8, "elapsed_s": True}, "progress.elapsed_s is True"),
        (
            "progress",
            {"step": 8, "elapsed_s": float("nan")},
            "progress.elapsed_s is nan",
        ),
        ("progress", {"step": 8, "elapsed_s": None}, "progress.elapsed_s is None"),
        ("progress", {"step": 8, "__class__": 1}, "progress.__class__ is 1"),
        ("progress", None, "progress is NoneType"),
        ("fingerprints", {}, "the data's fingerprint is NoneType"),
        ("fingerprints", {"data": ["x"]}, "the data's fingerprint is list"),
        (run_metadata.SKIPPED, {}, "windows is dict"),
        (
            run_metadata.SKIPPED,
            [[3, 5], [5, 3]],
            "[5, 3] is no window [first, end) of batches",
        ),
        (run_metadata.SKIPPED, [[0, 2**80]], "is no window [first, end) of batches"),
    ],
)
def test_what_no_run_wrote_is_refused(group, value, words):
    assert words in checked(**{group: value})


def test_a_damaged_step_has_its_event_before_the_run_goes_on(tmp_path):
    """A start may be killed while it compiles, or find that no step is left."""
    settings = SMALL_MODEL | {
        "train.steps": 4,
        "checkpoint.every_steps": 2,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 1,
    }
    workdir = tmp_path / "run"
    assert train_here(workdir, **settings) == 0
    damage, reason = DAMAGE["a bit of data"]
    damage(workdir / "checkpoints" / "4")
    assert train_here(workdir, **settings | {"train.steps": 2}) == 0
    assert list_steps(workdir / "checkpoints") == [2]
    found = read_events(workdir)
    assert len([event for event in found if event["event"] == "start"]) == 1
    (bad,) = [event for event in found if event["event"] == "bad_checkpoint"]
    assert bad["step"] == 4
    assert reason in bad["reason"]
