"""Real commands on folders with a malformed file: an exit code that says so, and no
traceback.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from jaxdist.checkpoint import integrity
from jaxdist.storage import run_format
from support import mutations, runs
from support.mutations import BYTES, JSON, LINES, TENSORS
from support.paths import DATA, ROOT

SEED = os.environ.get("FUZZ_SEED", "0")
CODES = (0, 1, 77, 78)
FORMATS = {".json": JSON, ".jsonl": LINES, ".safetensors": TENSORS, "metadata": JSON}
LIMIT_S = 300  # with imports and compiling, on a machine with other work

# which may be extended
SETTINGS = {"checkpoint__every_steps": 3, "optimizer__schedule": "constant"}
RUN_FILES = ("config.json", "run.json", "events.jsonl", "metrics.jsonl")
STEP_FILES = (
    "checkpoints/6/manifest.json",
    "checkpoints/6/metadata/metadata",
    "checkpoints/identity",
)
READ = {
    "report": ["{run}"],
    "checkpoint list": ["{run}"],
    "checkpoint verify": ["{run}"],
}
READ |= {
    "checkpoint inspect": ["{run}"],
    "checkpoint diff": ["{run}/checkpoints/3", "{run}/checkpoints/6"],
}
USE = {
    "generate": ["--workdir", "{run}", "--prompt", "def", "--max-tokens", "4"],
    "evaluate": ["--workdir", "{run}", "--json"],
    "convert": ["--from", "{run}", "--to", "{new}", "--format", "huggingface"],
}
IMPORT = {"convert": ["--from", "{model}", "--to", "{new}", "--format", "jaxdist"]}
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")

CASES = [("report", file) for file in (*RUN_FILES, "profile/top_ops.json")]
CASES += [
    (command, file)
    for command in READ
    if command != "report"
    for file in (*STEP_FILES, "config.json")
]
CASES += [
    (command, file)
    for command in USE
    for file in ("config.json", *STEP_FILES, "tokenizer.json")
]
CASES += [("convert", f"model/{file}") for file in MODEL_FILES]
CASES += [("train", file) for file in (*RUN_FILES, *STEP_FILES, "skipped.json")]
USUAL = [
    ("report", "run.json"),
    ("report", "events.jsonl"),
    ("checkpoint list", "config.json"),
]
USUAL += [("checkpoint inspect", STEP_FILES[1]), ("checkpoint verify", STEP_FILES[0])]
USUAL += [
    ("generate", "config.json"),
    ("convert", "model/config.json"),
]


@pytest.fixture(scope="module", name="sound")
def sound_fixture(tmp_path_factory) -> Path:
    """Returns a folder with a small run, all its files there may be, and a model of
    others.
    """
    folder = tmp_path_factory.mktemp("sound")
    runs.train(folder / "run", **SETTINGS, train__steps=6)
    (folder / "run" / "skipped.json").write_text(
        json.dumps(run_format.marked({"windows": [[3, 5]]}))
    )
    (folder / "run" / "profile").mkdir()
    (folder / "run" / "profile" / "top_ops.json").write_text(
        json.dumps(
            run_format.marked(
                {"ops": [{"op": "dot", "share": 1, "seconds": 2, "count": 3}]}
            )
        )
    )
    model = shutil.copytree(DATA / "huggingface" / "smollm", folder / "model")
    shutil.copy(model / "tokenizer.json", folder / "run")
    return folder


def malform(file: Path, seed: str) -> None:
    """Writes a trick or a random edit, and what a forger of checkpoints would write
    after it.
    """
    draw, sound = Random(seed), file.read_bytes()
    format_ = FORMATS.get(file.suffix or file.name, BYTES)
    number = draw.randrange(2 * len(mutations.tricks_of(format_, sound)))
    file.write_bytes(mutations.malformed(format_, sound, number, seed))
    if file.name == "metadata" and draw.random() < 0.7:
        step = file.parent.parent
        before = integrity.read_manifest(step)
        integrity.seal(step.parent, before.step, before.run, before.fingerprints)


def run_on(sound: Path, work: Path, command: str, file: str, seed: str) -> None:
    """Runs a command where a file of its folder is malformed."""
    run = shutil.copytree(sound / "run", work / "run")
    model = shutil.copytree(sound / "model", work / "model")
    malform(work / file if file.startswith("model/") else run / file, seed)
    if command == "train":
        words = runs.command(run, **SETTINGS, train__steps=8)
    else:
        table = IMPORT if file.startswith("model/") else READ | USE
        names = {"run": run, "model": model, "new": work / "new"}
        options = [word.format(**names) for word in table[command]]
        words = [sys.executable, "-m", "jaxdist", *command.split(), *options]
    done = subprocess.run(
        words,
        env=runs.environment(1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
    )
    said = f"{command} with {file}, seed {seed}: exit code {done.returncode}\n{done.stderr[-1500:]}"
    assert done.returncode in CODES, said
    assert "Traceback" not in done.stderr, said
    # on standard output
    shown = done.returncode == 1 and command in ("checkpoint verify", "checkpoint diff")
    assert done.returncode == 0 or shown or done.stderr.strip(), said
    # of a run there is always a report
    assert command != "report" or done.returncode == 0, said


@pytest.mark.parametrize(("command", "file"), USUAL)
def test_a_command_says_what_is_wrong_with_a_file(sound, tmp_path, command, file):
    run_on(sound, tmp_path, command, file, f"{SEED}/{command}/{file}")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "file"), CASES)
def test_every_command_says_what_is_wrong_with_any_file(sound, tmp_path, command, file):
    for number in range(2):
        run_on(
            sound,
            tmp_path / str(number),
            command,
            file,
            f"{SEED}/{number}/{command}/{file}",
        )


def test_the_cases_are_many():
    assert len(CASES) > 40
    assert set(USUAL) <= set(CASES)
