"""A run that each release leaves for later ones to resume: tests/data/released/MINOR.

`python tests/support/goldens.py --release` makes it with the code of the release: four of
eight steps, saved, and the losses of the other four.
"""

import contextlib
import json
import random
import shutil
import tempfile
from pathlib import Path

from jaxdist.checkpoint import integrity
from support.paths import DATA
from support.runs import SMALL_MODEL, losses, stopping_after, train_here

FOLDER = DATA / "released"
LOSSES = "losses.json"
TEXT = "text.txt"
CACHE = "cache"
STOP, STEPS = 4, 8


def make(minor: str) -> None:
    """Makes the run of this version in FOLDER, in place of an older one's."""
    folder = FOLDER / minor
    shutil.rmtree(FOLDER, ignore_errors=True)
    folder.mkdir(parents=True)
    draw = random.Random(0)
    words = ["def", "return", "for", "in", "yield", "if", "not", "None", "(", ")"]
    text = " ".join(draw.choice(words) for _ in range(3000))
    (folder / TEXT).write_text(text + "\n")
    with stopping_after(STOP):
        assert train(folder) == 0
    run = folder / "run"
    for name in ("report.html", ".lock", "checkpoints/.lock"):
        (run / name).unlink()
    described = run / "run.json"
    document = json.loads(described.read_text())
    # of the machine that made it, and of no use to others
    for key in ("command", "environment", "hosts", "source"):
        document.pop(key, None)
    described.write_text(json.dumps(document, indent=1) + "\n")
    without_paths(run / "checkpoints")
    shutil.rmtree(folder / CACHE)
    with tempfile.TemporaryDirectory() as elsewhere:
        again = shutil.copytree(folder, Path(elsewhere) / minor)
        assert train(again) == 0
        ahead = {n: loss for n, loss in losses(again / "run").items() if n > STOP}
    (folder / LOSSES).write_text(json.dumps(ahead, indent=1) + "\n")


def without_paths(checkpoints: Path) -> None:
    """Removes this machine's paths, which Orbax writes, and seals the step again."""
    step = checkpoints / str(STOP)
    manifest = integrity.read_manifest(step)
    for file in step.rglob("commit_success.txt"):
        file.write_text("Checkpoint commit was successful\n")
    integrity.seal(checkpoints, STOP, manifest.run, manifest.fingerprints)


def train(folder: Path) -> int:
    """Trains the run of a folder here, or resumes it; returns the exit code."""
    changes = {key.replace(".", "__"): value for key, value in SMALL_MODEL.items()}
    # a path of the config: a run resumes with the same one only
    with contextlib.chdir(folder):
        return train_here(
            Path("run"),
            **changes,
            train__steps=STEPS,
            batch__sequence_length=16,
            data__source="text",
            data__path=TEXT,
            data__cache_dir=CACHE,
            checkpoint__every_steps=STOP,
            checkpoint__compress=True,
        )
