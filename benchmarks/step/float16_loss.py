"""Compares the loss of `quickstart` in float16, with a loss scale, with float32.

    JAX_PLATFORMS=cpu python benchmarks/step/float16_loss.py --out benchmarks/results/cpu-float16-loss.json

Both runs start with the same parameters and read the same batches for 300 steps, to the
end of the schedule. The record has each step's loss, the mean of the last 50 steps, the
loss on held-out data, and the loss scales with their first steps. CPUs emulate float16:
losses equal those of a GPU except for the order of sums, times do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring
import numpy as np

from jaxdist.config import files
from jaxdist.data import Dataset
from jaxdist.parallel.precision import PrecisionConfig
from jaxdist.step.evaluation import evaluate
from jaxdist.trainer import batching, run_config, validation
from jaxdist.trainer.run_config import RunConfig

LAST = 50


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--steps", type=int, default=300)
    flags = parser.parse_args()
    config = files.load("quickstart", folders=files.packaged_folders())
    config.train.steps = flags.steps
    run, rows = run_config.from_config(config), {}
    with tempfile.TemporaryDirectory() as folder:
        dataset = batching.open_data(run, Path(folder), print)
        for compute in ("float32", "float16"):
            this = dataclasses.replace(run, precision=PrecisionConfig(compute=compute))
            rows[compute] = train(this, dataset)
    difference = {
        name: rows["float16"][name] - rows["float32"][name]
        for name in ("last", "held_out")
    }
    print(
        "float16 - float32, nats:",
        {name: round(value, 5) for name, value in difference.items()},
    )
    head = measuring.record_head(sys.argv[1:])
    measuring.write(
        flags.out, head | {"steps": flags.steps, "difference": difference, "rows": rows}
    )


def train(run: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Returns what a run shows: its losses, and its loss scales if it has them."""
    device = jax.devices()[:1]
    composition = validation.validate(run, device)
    built = composition.build_step(device)
    state, losses, scales, skips = built.init(), [], [], 0
    for step in range(run.train.steps):
        state, metrics = built.step(
            state, dataset.train_batch(step, run.batch.global_size)
        )
        losses.append(float(metrics["loss"]))
        if "loss_scale" in metrics:
            skips, scale = (
                int(metrics["loss_scale_skips"]),
                float(metrics["loss_scale"]),
            )
            scales += (
                [(step + 1, scale)] if not scales or scale != scales[-1][1] else []
            )
        if (step + 1) % LAST == 0:
            print(
                f"{run.precision.compute} step {step + 1}: {np.mean(losses[-LAST:]):.4f}",
                flush=True,
            )
    with batching.held_out_loader(
        run, batching.batch_shardings(run, built), dataset
    ) as batches:
        held_out = evaluate(built.evaluate, state, batches)
    row = {
        "last": float(np.mean(losses[-LAST:])),
        "held_out": held_out.loss,
        "losses": losses,
    }
    return row | ({"loss_scales": scales, "skips": skips} if scales else {})


if __name__ == "__main__":
    main()
