"""Measures the cost of the probe that names slow chips, links and host memory.

    JAX_PLATFORMS=cpu python benchmarks/step/probe.py --out benchmarks/results/cpu-probe.json

It trains a small model with two processes of one machine and the default settings, and
reads how long each probe took, and how long the loop was paused for probes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import measuring

from jaxdist.telemetry.metrics import read_rows

# Nothing but probes pauses the loop.
SETTINGS = {
    "train.eval_every": 0,
    "train.log_every": 20,
    "train.sample_tokens": 0,
    "train.max_minutes": 0,
    "checkpoint.every_steps": 0,
    "health.compare_every": 0,
    "batch.sequence_length": 32,
    "batch.global_size": 8,
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.d_ff": 64,
    "model.head_dim": 8,
}


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train(folder, flags.steps, flags.processes)
        found = costs(folder)
    print(json.dumps(found, indent=1))
    measuring.write(flags.out, measuring.record_head(sys.argv[1:]) | found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", help="JSON file")
    return parser


def train(folder: Path, steps: int, processes: int) -> None:
    """Trains a run of several processes."""
    launch = [sys.executable, "-m", "jaxdist.launch", "--processes", str(processes)]
    launch += ["--devices-per-process", "1", "--", sys.executable, "-m"]
    launch += ["jaxdist.train", "--config", "quickstart", "--workdir", str(folder)]
    settings = SETTINGS | {"train.steps": steps}
    launch += [f"--config.{key}={value}" for key, value in settings.items()]
    subprocess.run(launch, check=True, stdout=subprocess.DEVNULL)


def costs(folder: Path) -> dict[str, object]:
    """Reads the costs from the files of a run."""
    rows = read_rows(folder).train
    (life,) = json.loads((folder / "ledger.json").read_text())["lives"]
    buckets = life["buckets"]
    paused_s = buckets.get("hooks", 0.0)
    return {
        "steps": rows[-1]["step"],
        "step_s": statistics.median(row["step_time_s"] for row in rows[1:]),
        "probe_s": [row["probe_s"] for row in rows if "probe_s" in row],
        "paused_s": paused_s,
        "share": paused_s / (buckets["step"] + paused_s),
    }


if __name__ == "__main__":
    main()
