"""Times steps of a run that saves in memory at every second step, and of one that does not.

    python benchmarks/step/memory_step.py --rounds 6 \
        --out benchmarks/results/memory-step.json

Each run is a process of `jaxdist.train`, and the two kinds take turns. A step's time is
that between two rows of metrics, so it includes what a save takes from training, in the
loop and beside it. Only the steps after the first ones count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import measuring

SIDES = ("with", "without")
WARM_STEPS = 10  # steps that do not count


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
            found = {}
            for side in order:
                workdir = Path(folder) / f"{side} {number}"
                found[side] = run(flags, workdir, memory if side == "with" else "")
            if number >= 0:
                rounds.append(found)
                text = ", ".join(f"{side} {1e3 * found[side]:.1f} ms" for side in SIDES)
                print(f"round {number + 1}/{flags.rounds}: {text}", flush=True)
    ratio = measuring.quartiles([each["with"] / each["without"] for each in rounds])
    record = measuring.record_head(sys.argv[1:]) | {
        "config": flags.config,
        "batch": flags.batch,
        "steps": flags.steps,
        "rounds": rounds,
        "with_over_without": ratio,
    }
    print(f"{ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})")
    measuring.write(flags.out, record)


def run(flags: argparse.Namespace, workdir: Path, memory: str) -> float:
    """Trains, and returns the median seconds of a step."""
    settings = {
        "train.steps": flags.steps,
        "train.max_minutes": 0,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "batch.global_size": flags.batch,
        "optimizer.schedule": "constant",
        "checkpoint.every_steps": 0,
        "checkpoint.save_at_end": "false",
        "checkpoint.memory_folder": memory,
    }
    if memory:
        settings["checkpoint.memory_every_steps"] = 2
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "jaxdist.train", "--config", flags.config]
    command += ["--workdir", str(workdir)]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"a run failed:\n{done.stdout}{done.stderr}")
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    times = {row["step"]: row["time"] for row in map(json.loads, lines)}
    # pairs of steps, so that each one has a save
    return statistics.median(
        (times[step + 2] - times[step]) / 2
        for step in range(WARM_STEPS, flags.steps - 1, 2)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--folder", help="folder (default: a temporary one)")
    parser.add_argument("--out", help="JSON file")
    return parser


if __name__ == "__main__":
    main()
