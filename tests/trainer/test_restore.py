"""Where a run starts: what a checkpoint says of its run is checked before it is
believed.
"""

from typing import Any

import pytest

from jaxdist.checkpoint.folders import CheckpointError, StepInfo
from jaxdist.trainer import restore, run_metadata
from jaxdist.trainer.run_metadata import Progress

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
