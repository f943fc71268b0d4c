"""Times what the training loop adds to a step, and what calling the step costs the host.

    python benchmarks/loop.py --rounds 5 --out benchmarks/results/loop.json

`overhead`: ms a step of `jaxdist.trainer.trainer.run` (data, metrics, display; log_every 10, no checkpoints)
above the same compiled step called in a bare `for` on one resident batch. The model is tiny, so
that next to nothing hides behind the device: an upper bound. `dispatch`: time until the call of a
step returns: jaxdist's; a plain `jax.jit` of the same program on flat lists, so with the same leaves
and nothing of ours around them; and the hand-written step, which has fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import measuring
import numpy as np
from handwritten import SHAPES, Options, Shape, make_batch

import step
from jaxdist.distributed import initialize
from jaxdist.parallel.mesh import build_mesh
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer import build, trainer, validation
from jaxdist.trainer import run_config as recipe

LOG_EVERY = 10
PICO = Shape(1, 16, 48, 2, 1, 64, 16, 8)
ROWS_SKIPPED = 3  # the first rows still wait for threads and files


class Stamp(NamedTuple):
    """When a step was seen to be finished."""

    number: int
    wall_s: float
    processor_s: float


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    initialize.skip_absent_tpu(os.environ)
    shape = PICO if flags.shape == "pico" else SHAPES[flags.shape]
    options = Options(dtype=flags.dtype, loss_chunk=0)
    with tempfile.TemporaryDirectory() as folder:
        run = run_config(shape, options, Path(folder), flags.steps)
        bare = bare_side(run, shape, options)
        rounds = []
        for number in range(flags.rounds):
            found = {"loop": in_loop(run, Path(folder) / f"run{number}"), "bare": in_for(bare, run)}
            rounds.append(found)
            print(f"round {number + 1}/{flags.rounds}: {_text(found)}", flush=True)
    record = measuring.record_head(sys.argv[1:]) | {
        "shape": {"name": flags.shape, **dataclasses.asdict(shape)},
        "options": dataclasses.asdict(options),
        "log_every": LOG_EVERY,
        "steps_per_round": flags.steps,
        "rounds": rounds,
        "overhead_s_per_step": overhead(rounds),
        "dispatch": dispatch(shape, options, flags.dispatches),
    }
    for clock, found in record["overhead_s_per_step"].items():
        print(
            f"loop over bare for, {clock}: {1e3 * found['median']:.3f} ms a step "
            f"({1e3 * found['low']:.3f} to {1e3 * found['high']:.3f})"
        )
    print(", ".join(f"{k}: {v:.4g}" for k, v in record["dispatch"].items()))
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=("pico", *SHAPES), default="pico")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps a round")
    parser.add_argument("--dispatches", type=int, default=300)
    parser.add_argument("--out", help="JSON file")
    return parser


def run_config(shape: Shape, options: Options, folder: Path, steps: int) -> recipe.RunConfig:
    """Returns a run on random tokens from a file, without checkpoints and evaluation."""
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 2_000_000, dtype=np.uint16)
    tokens.tofile(folder / "tokens.bin")
    run = step.run_config(shape, options)
    replace = dataclasses.replace
    return replace(
        run,
        train=replace(run.train, steps=steps, log_every=LOG_EVERY, eval_every=0),
        data=replace(
            run.data, source="bin", path=str(folder / "tokens.bin"), cache_dir=str(folder / "cache")
        ),
        checkpoint=replace(run.checkpoint, every_steps=0, save_at_end=False),
    )


def bare_side(run: recipe.RunConfig, shape: Shape, options: Options) -> step.Side:
    """Returns the same step, compiled, with one batch that stays on the device."""
    batch = step.full_batch(shape)
    side = step.build_jaxdist(run, batch)
    side.advance(20)
    return side


def in_for(side: step.Side, run: recipe.RunConfig) -> dict[str, float]:
    """Returns seconds a step of a bare `for` that waits for every LOG_EVERY-th step."""
    stamps = []
    for number in range(1, run.train.steps + 1):
        side.state, side.metrics = side.compiled(side.state, *side.arguments)
        if number % LOG_EVERY == 0:
            side.metrics["loss"].item()
            stamps.append(Stamp(number, time.perf_counter(), time.process_time()))
    return per_step(stamps)


def in_loop(run: recipe.RunConfig, workdir: Path) -> dict[str, float]:
    """Returns seconds a step of the training loop, from row to row of its metrics."""
    stamps: list[Stamp] = []
    with stamped_rows(stamps), contextlib.redirect_stdout(io.StringIO()):
        trainer.run(run, workdir)
    return per_step(stamps)


@contextlib.contextmanager
def stamped_rows(stamps: list[Stamp]) -> Iterator[None]:
    """Notes the clocks whenever the loop writes a row of metrics."""

    class Stamped(MetricsWriter):
        def write(self, number, values):
            super().write(number, values)
            stamps.append(Stamp(number, time.perf_counter(), time.process_time()))

    with mock.patch.object(trainer, "MetricsWriter", Stamped):
        yield


def per_step(stamps: list[Stamp]) -> dict[str, float]:
    """Returns the median over rows by wall time, and the mean by processor time."""
    used = stamps[ROWS_SKIPPED:]
    pairs = list(zip(used[:-1], used[1:], strict=True))
    walls = [(b.wall_s - a.wall_s) / (b.number - a.number) for a, b in pairs]
    first, last = used[0], used[-1]
    processor = (last.processor_s - first.processor_s) / (last.number - first.number)
    return {"wall_s": statistics.median(walls), "processor_s": processor}


def overhead(rounds: list[dict]) -> dict[str, dict[str, float]]:
    """Returns quartiles over rounds of loop minus bare, seconds a step."""
    return {
        clock: measuring.quartiles([r["loop"][clock] - r["bare"][clock] for r in rounds])
        for clock in ("wall_s", "processor_s")
    }


def dispatch(shape: Shape, options: Options, count: int) -> dict[str, float]:
    """Returns the median seconds until a call of the jitted step returns, of both, and leaves."""
    batch = step.full_batch(shape)
    plain = {name: np.asarray(x) for name, x in make_batch(shape).items()}
    sides = [*as_called(shape, options, batch), step.build_handwritten(shape, options, plain)]
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.advance(5)
    for _ in range(count):
        for side in sides:
            began = time.perf_counter()
            side.state, side.metrics = side.compiled(side.state, *side.arguments)
            found[side.name].append(time.perf_counter() - began)
            jax.block_until_ready((side.state, side.metrics))
    out = {f"{name}_s": statistics.median(times) for name, times in found.items()}
    leaves = {f"{s.name}_leaves": len(jax.tree.leaves((s.state, s.arguments))) for s in sides}
    return out | {"ratio": out["jaxdist_s"] / out["same_leaves_s"]} | leaves


def as_called(shape: Shape, options: Options, host_batch: dict) -> list[step.Side]:
    """Returns jaxdist's step as its loop calls it, and the same program jitted on flat lists."""
    run = step.run_config(shape, options)
    _, rules, spec = validation.validate(run, jax.devices())
    built = build.build_step(run, spec, build_mesh(run.mesh, jax.devices()), rules)
    state, structure = jax.tree.flatten(built.init())

    def flat_step(leaves, batch):
        after, metrics = built.step(jax.tree.unflatten(structure, leaves), batch)
        return jax.tree.leaves(after), jax.tree.leaves(metrics)

    batch = jax.device_put(host_batch, built.batch_shardings(host_batch))
    return [
        step.Side("jaxdist", built.step, built.init(), (batch,), 0.0),
        step.Side("same_leaves", jax.jit(flat_step, donate_argnums=0), state, (batch,), 0.0),
    ]


def _text(found: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{name} {1e3 * t['wall_s']:.3f} ms a step ({1e3 * t['processor_s']:.3f} cpu)"
        for name, t in found.items()
    )


if __name__ == "__main__":
    main()
