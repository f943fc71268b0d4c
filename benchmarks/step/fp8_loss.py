"""Compares the loss of a small model with 8-bit matmuls with float32 and bfloat16.

    python benchmarks/step/fp8_loss.py --learning-rate 0.0003 --out benchmarks/results/cpu-fp8-loss.json

A decoder of 4 layers x 128 reads bytes of Python for 150 steps of AdamW, from the same
seed and batches each time. The result is the root mean square distance of the loss from
float32's over the last 50 steps, in nats. Compare each distance with that of bfloat16,
because the effect of any rounding grows with the learning rate. At 0.003 the loss jumps
when the warmup ends, and any rounding decides how it continues. CPUs emulate 8-bit
floats: losses equal those of a GPU except for the order of sums, times do not.
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
from jaxdist.trainer import batching, run_config, validation
from jaxdist.trainer.run_config import RunConfig

STEPS, LAST = 150, 50
# Of the config `quickstart` with another optimizer: 1 M parameters.
RUN = {
    "train.steps": STEPS,
    "batch.global_size": 8,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 20,
    "optimizer.schedule": "cosine",
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"compute": "bfloat16"},
    **{
        recipe: {"compute": "bfloat16", "matmul": recipe, "fp8_small_kernels": True}
        for recipe in ("fp8_rowwise", "fp8_rowwise_wgrad_bf16", "fp8_tensorwise")
    },
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--learning-rate", type=float, default=0.001, help="of AdamW, at its highest"
    )
    parser.add_argument("--out", help="JSON file")
    flags = parser.parse_args()
    settings = RUN | {"optimizer.learning_rate": flags.learning_rate}
    config = files.load("quickstart", folders=files.packaged_folders())
    config.update_from_flattened_dict(settings)
    run, start = run_config.from_config(config), None
    with tempfile.TemporaryDirectory() as folder:
        dataset = batching.open_data(run, Path(folder), print)
        losses = {}
        for name, precision in PRECISIONS.items():
            this = dataclasses.replace(run, precision=PrecisionConfig(**precision))
            losses[name], start = train(this, dataset, start)
    rows = {name: distances(of, losses["float32"]) for name, of in losses.items()}
    for name, row in rows.items():
        print(
            f"{name:<24} rms {row['rms']:.5f}  final {row['final']:.4f} ({row['final_difference']:+.4f})"
        )
    record = measuring.record_head(sys.argv[1:]) | {
        "steps": STEPS,
        "last": LAST,
        "run": settings,
    }
    measuring.write(
        flags.out, record | {"precisions": PRECISIONS, "rows": rows, "losses": losses}
    )


def train(
    run: RunConfig, dataset: Dataset, start: object
) -> tuple[list[float], object]:
    """Returns the loss of each step from a starting point, and that: of the seed if
    there is none yet.
    """
    device = jax.devices()[:1]
    composition = validation.validate(run, device)
    built = composition.build_step(device)
    start = jax.device_get(built.init()) if start is None else start
    state, losses = jax.device_put(start, built.shardings), []
    for step in range(STEPS):
        state, metrics = built.step(
            state, dataset.train_batch(step, run.batch.global_size)
        )
        losses.append(float(metrics["loss"]))
    return losses, start


def distances(losses: list[float], reference: list[float]) -> dict[str, float]:
    """Returns how far losses are from the reference's, in nats."""
    apart = np.subtract(losses[-LAST:], reference[-LAST:])
    final = float(np.mean(losses[-LAST:]))
    return {
        "rms": float(np.sqrt(np.mean(apart**2))),
        "final": final,  # mean of the last steps
        "final_difference": float(apart.mean()),
        "last_step_difference": float(apart[-1]),
    }


if __name__ == "__main__":
    main()
