"""Malformed files through everything that reads them: a value or an error of ours, in 5
s and 1 GiB.

`FUZZ_INPUTS=20000 pytest -m slow -s tests/fuzz` runs so many; FUZZ_SEED changes the
random ones.
"""

import collections
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from support.paths import ROOT, TESTS
from support.runs import environment, train_here

SEED = os.environ.get("FUZZ_SEED", "0")
SLOW_INPUTS = int(os.environ.get("FUZZ_INPUTS", "20000"))
TRICKS, EDITS = 1, 1  # of each reader, by default
OF_DATA = (
    ".bin",
    "megatron index",
    "megatron tokens",
    "npz",
    "jsonl",
    "jsonl.gz",
    "text",
    "packing",
)
OF_DATA += (
    "token cache's meta.json",
    "token cache's table",
    "token cache's tokens",
    "tokenizer.json",
    "patterns of a config",
    "patterns of an adapter",
    "tuple-valued flags",
)
COSTLY = "state"  # which restores a checkpoint for each input
WALL_S = 150  # for an answer: the program itself limits a reader's processor time


@pytest.fixture(scope="module", name="run")
def run_fixture(tmp_path_factory) -> Path:
    """Returns the workdir of a small run with two checkpoints."""
    workdir = tmp_path_factory.mktemp("sound") / "run"
    steps = {"train__steps": 6, "checkpoint__every_steps": 3}
    assert train_here(workdir, **steps, train__sample_tokens=8) == 0
    return workdir


class Readers:
    """The program of `support.untrusted_readers`, started again whenever an input ends
    it.
    """

    def __init__(self, run: Path):
        self._run = run
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "support.untrusted_readers", str(self._run)]
        environ = environment(1) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
        self._log = (self._run.parent / "readers.log").open("w+")
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._log,
        }
        self._process = subprocess.Popen(
            command, env=environ, text=True, bufsize=1, **pipes
        )
        first = self._process.stdout.readline()
        assert first, (self._run.parent / "readers.log").read_text()[-3000:]
        self.tricks: dict[str, int] = json.loads(first)
        self.places = self.tricks.pop("places")

    def ask(self, reader: str, number: int) -> dict:
        """Returns what became of one input."""
        print(reader, number, SEED, sep="\t", file=self._process.stdin, flush=True)
        ready = select.select([self._process.stdout], [], [], WALL_S)[0]
        line = self._process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self.close()
        self._log.seek(0)
        last = self._log.read()[-300:]
        code = self._process.returncode
        self._start()
        return {
            "error": "",
            "seconds": 0,
            "defect": f"ended the process, {code} {last!r}" if ready else "hung",
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def readers(run):
    """The process that reads, for all tests of this file."""
    readers = Readers(run)
    yield readers
    readers.close()


def campaign(readers: Readers, inputs: list[tuple[str, int]]) -> None:
    """Feeds readers their inputs and prints counts; fails with every kind of defect."""
    defects: dict[str, list] = collections.defaultdict(list)
    counts: collections.Counter = collections.Counter()
    slowest = 0.0
    for name, number in inputs:
        answer = readers.ask(name, number)
        counts[name, "defect" if answer["defect"] else answer["error"] or "value"] += 1
        slowest = max(slowest, answer["seconds"])
        if answer["defect"]:
            defects[f"{name}: {answer['defect']}"].append(number)
    print(f"\nseed {SEED}: {len(inputs)} malformed files, the slowest {slowest:.2f} s")
    for name in dict.fromkeys(name for name, _ in inputs):
        print(
            f"  {name}: "
            + ", ".join(
                f"{n} {what}" for (of, what), n in sorted(counts.items()) if of == name
            )
        )
    assert not defects, "\n".join(
        f"{len(n)} x ({name}) first {n[:3]}" for name, n in defects.items()
    )


@pytest.mark.slow
def test_a_malformed_file_gives_a_value_or_an_error_of_ours(readers):
    draw = Random(SEED)
    inputs = []
    for name, known in readers.tricks.items():
        inputs += [
            (name, n) for n in sorted(draw.sample(range(known), min(TRICKS, known)))
        ]
        inputs += [(name, known + n) for n in range(EDITS)]
        inputs += [(name, -1 - n) for n in range(readers.places) if name not in OF_DATA]
    assert len(inputs) > 150
    campaign(readers, inputs)


@pytest.mark.slow
def test_no_malformed_file_of_twenty_thousand_does_more(readers):
    """All tricks, and as many edits as are left."""
    left = max(SLOW_INPUTS - sum(readers.tricks.values()), 0)
    edits = left // (len(readers.tricks) - 1)
    inputs = []
    for name, known in readers.tricks.items():
        first = 0 if name in OF_DATA else -readers.places
        edits_of_name = edits // 10 if name == COSTLY else edits
        inputs += [(name, number) for number in range(first, known + edits_of_name)]
    campaign(readers, inputs)
