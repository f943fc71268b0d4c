"""Times a restart after a kill, with recent steps in memory and from the folder alone.

    python benchmarks/step/memory_restart.py --rounds 6 \
        --out benchmarks/results/memory-restart.json

`jaxdist launch` runs two processes. The first one, which writes the metrics, is killed -9
half an interval after a save to the folder. Both sides save to the folder as often. One
also saves in memory, at every second step. The sides take turns, each with a workdir of
its own.

`next` is the time from the kill until the next row of metrics. `back` is the time until
the first row of a step that the run had not done. `repeated` is the number of steps
that are done twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import measuring

SIDES = ("memory", "folder")
MEASURES = ("next_s", "back_s", "repeated")
LIMIT_S = 600.0
POLL_S = 0.004
PROCESSES = 2
SETTLED_S = 0.1  # seconds after which a killed process writes no more
SETTINGS = {
    "train.steps": 1_000_000,
    "train.max_minutes": 0,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "optimizer.schedule": "constant",
    "mesh.fsdp": PROCESSES,
}


class Rows:
    """Steps of the rows that a run writes from now on."""

    def __init__(self, workdir: Path, agent: subprocess.Popen[bytes]) -> None:
        self._path = workdir / "metrics.jsonl"
        self._agent = agent
        self._read = self._path.stat().st_size if self._path.exists() else 0
        self._steps: list[int] = []  # that `next` has not returned

    def next(self) -> int:
        """Waits for the next row."""
        until = time.monotonic() + LIMIT_S
        while not self._steps:
            if self._agent.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self._path} has no new row")
            time.sleep(POLL_S)
            self._look()
        return self._steps.pop(0)

    def written(self) -> list[int]:
        """Returns the rows that are there, without a wait."""
        self._look()
        steps, self._steps = self._steps, []
        return steps

    def _look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        self._steps += [row["step"] for row in rows if "loss" in row]


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    rounds = []
    with (
        tempfile.TemporaryDirectory(dir=flags.folder) as folder,
        tempfile.TemporaryDirectory(dir=flags.memory) as memory,
    ):
        for number in range(-1, flags.rounds):  # the first one fills the compile cache
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            found = {side: turn(side, flags, Path(folder), memory) for side in order}
            if number >= 0:
                rounds.append(found)
                print(f"round {number + 1}/{flags.rounds}: {found}", flush=True)
    record = measuring.record_head(sys.argv[1:]) | {
        "config": flags.config,
        "every_steps": flags.every_steps,
        "rounds": rounds,
        "sides": {
            side: {
                measure: measuring.quartiles([found[side][measure] for found in rounds])
                for measure in MEASURES
            }
            for side in SIDES
        },
    }
    for side, measures in record["sides"].items():
        for measure, found in measures.items():
            print(
                f"{side}, {measure}: {found['median']:.2f} "
                f"({found['low']:.2f} to {found['high']:.2f})"
            )
    measuring.write(flags.out, record)


def turn(
    side: str, flags: argparse.Namespace, folder: Path, memory: str
) -> dict[str, float]:
    """Starts a run, or resumes it, kills a process, and waits for the run to be back."""
    workdir = folder / side
    settings = SETTINGS | {
        "checkpoint.every_steps": flags.every_steps,
        "data.cache_dir": folder / "data",
    }
    if side == "memory":
        settings["checkpoint.memory_folder"] = memory
        settings["checkpoint.memory_every_steps"] = 2
    with launched(flags.config, workdir, settings, folder) as agent:
        rows = Rows(workdir, agent)
        last = rows.next()
        # the first step of the next interval but one, and half an interval more
        kill_at = (last // flags.every_steps + 2) * flags.every_steps
        kill_at += flags.every_steps // 2
        while last < kill_at:
            last = rows.next()
        os.kill(first_process(agent), signal.SIGKILL)
        killed = time.monotonic()
        time.sleep(SETTLED_S)
        last = max([last, *rows.written()])
        step = rows.next()
        next_s = time.monotonic() - killed
        repeated = last + 1 - step
        while step <= last:
            step = rows.next()
        back_s = time.monotonic() - killed
    return {"next_s": next_s, "back_s": back_s, "repeated": repeated}


@contextlib.contextmanager
def launched(
    config: str, workdir: Path, settings: dict[str, object], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields the agent of a run, and ends the run without a save."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    agent_flags = ["--processes", str(PROCESSES), "--devices-per-process", "1"]
    # the end kills what still runs after a second
    agent_flags += ["--grace-seconds", "1"]
    train_flags = ["--config", config, "--workdir", str(workdir)]
    train_flags += [f"--config.{key}={value}" for key, value in settings.items()]
    agent_command = [sys.executable, "-m", "jaxdist.launch", *agent_flags]
    train_command = [sys.executable, "-m", "jaxdist.train", *train_flags]
    with (folder / "log").open("ab") as log:
        agent = subprocess.Popen(
            [*agent_command, "--", *train_command],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait(60)


def first_process(agent: subprocess.Popen[bytes]) -> int:
    """Finds the id of the process that writes the metrics."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    for child in children.split():
        # gone meanwhile
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if b"JAXDIST_PROCESS_ID=0" in variables:
                return int(child)
    raise SystemExit("the run has no first process")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="quickstart")
    parser.add_argument(
        "--every-steps", type=int, default=20, help="steps between saves to the folder"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--folder", help="folder (default: a temporary one)")
    parser.add_argument("--out", help="JSON file")
    return parser


if __name__ == "__main__":
    main()
