"""Times what the training loop adds to a step, and what a call costs the host.

    python benchmarks/step/loop.py --rounds 5 --loss-chunk 0 --out benchmarks/results/loop.json

`overhead` is the time per step of `jaxdist.trainer.training.run` (data, metrics,
display; no checkpoints) above the same compiled step in a bare `for` on one resident
batch. The default model is tiny, so almost nothing is hidden behind the device: an
upper bound. `--shape 1b` measures a real step, also as MFU. `above_reading` is the same
above a `for` that also slices each batch from the file and places it, for one process.

`dispatch` is the time until the call of a step returns. It compares jaxdist's step, a
plain `jax.jit` of the same program on flat lists (the same number of leaves), and the
hand-written step, which has fewer leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring
import numpy as np
import sides

from jaxdist import library
from jaxdist.config import ConfigError
from jaxdist.hardware import chips
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer import compose, model_flops, opening
from jaxdist.trainer import run_config as recipe

ROWS_SKIPPED = 3  # the first rows still wait for threads and files


class Stamp(NamedTuple):
    """When a step was seen to be finished."""

    number: int
    wall_s: float
    processor_s: float


def main() -> None:
    """Runs the command."""
    flags = sides.parse(_parser(), sys.argv[1:])
    say = print if sides.start(flags) else _silent
    with contextlib.ExitStack() as stack:
        folder = flags.folder or stack.enter_context(tempfile.TemporaryDirectory())
        if jax.process_count() > 1 and not flags.folder:
            raise ConfigError(
                "--folder is missing: processes of a run need one that they share"
            )
        run = with_files(sides.read_run(flags), Path(folder), flags)
        spec, _ = sides.built(run)
        bare = bare_side(run)
        rounds = []
        for number in range(flags.rounds):
            found = {
                "loop": in_loop(run, Path(folder) / f"run{number}"),
                "bare": in_for(bare, run, itertools.repeat(bare.arguments[0])),
            }
            if jax.process_count() == 1:
                found["reading"] = in_for(bare, run, plain_batches(bare, run))
            rounds.append(found)
            say(f"round {number + 1}/{flags.rounds}: {_text(found)}", flush=True)
        del bare
    record = measuring.record_head(sys.argv[1:]) | {
        "run": {"name": flags.config or flags.shape, "model": dict(run.model)}
        | {"batch": dataclasses.asdict(run.batch), "mesh": dataclasses.asdict(run.mesh)}
        | {"compute": run.precision.compute, "remat": run.remat.policy},
        "log_every": flags.log_every,
        "steps_per_round": flags.steps,
        "rounds": rounds,
        "overhead_s_per_step": overhead(rounds, "bare"),
        "above_reading_s_per_step": overhead(rounds, "reading")
        if "reading" in rounds[0]
        else {},
        "loop_over_bare": measuring.quartiles(
            [r["loop"]["wall_s"] / r["bare"]["wall_s"] for r in rounds]
        ),
        "mfu": mfu(run, spec, rounds),
        "dispatch": dispatch(run, flags.dispatches) if flags.dispatches else None,
    }
    for line in lines(record):
        say(line)
    measuring.write(flags.out, record)


def _silent(*_: object, **__: object) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sides.add_run_flags(parser, default="pico")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps a round")
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between rows of metrics"
    )
    parser.add_argument(
        "--dispatches", type=int, default=300, help="calls of a step to time; 0: none"
    )
    parser.add_argument(
        "--folder",
        help="of the tokens and the runs; must be new (default: a temporary one)",
    )
    parser.add_argument("--out", help="JSON file")
    return parser


def with_files(
    run: recipe.RunConfig, folder: Path, flags: argparse.Namespace
) -> recipe.RunConfig:
    """Returns the run on random tokens from a file, without checkpoints and
    evaluation.
    """
    batch = run.batch
    rows = max(4 * batch.global_size, 2_000_000 // batch.sequence_length) + 1
    tokens = np.random.default_rng(0).integers(
        0, run.vocab_size or 256, rows * batch.sequence_length
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokens.astype(np.uint32).tofile(folder / "tokens.bin")
    overrides = {
        "train.steps": flags.steps,
        "train.log_every": flags.log_every,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "data.source": "bin",
        "data.bin_dtype": "uint32",
        "data.path": str(folder / "tokens.bin"),
        "data.cache_dir": str(folder / "cache"),
        "checkpoint.every_steps": 0,
        "checkpoint.save_at_end": False,
    }
    return compose.with_overrides(run, overrides)


def bare_side(run: recipe.RunConfig) -> sides.Side:
    """Returns the same step, compiled, with one batch that stays on the device."""
    side = sides.build_jaxdist(run, sides.full_batch(run))
    side.advance(min(20, run.train.steps))
    return side


def mfu(
    run: recipe.RunConfig, spec: ModelSpec, rounds: list[dict]
) -> dict[str, dict[str, float]]:
    """Returns {loop, bare: {causal, full}} by the median of the rounds; {} where the
    peak is not known.
    """
    chip = chips.chip_for(jax.devices()[0].device_kind)
    peak = chip.peak(run.precision.peak) if chip else None
    if not peak:
        return {}
    tokens = run.batch.global_size * run.batch.sequence_length / jax.device_count()
    flops = model_flops.model_flops(run, spec)
    walls = {
        side: statistics.median(r[side]["wall_s"] for r in rounds)
        for side in ("loop", "bare")
    }
    return {
        side: {name: tokens * each / wall_s / peak for name, each in flops.items()}
        for side, wall_s in walls.items()
    }


def lines(record: dict) -> list[str]:
    """Returns what a person wants to read of the record."""
    out = [
        f"loop over {side}, {clock}: {1e3 * found['median']:.3f} ms a step "
        f"({1e3 * found['low']:.3f} to {1e3 * found['high']:.3f})"
        for side, key in (
            ("bare for", "overhead_s_per_step"),
            ("for that reads", "above_reading_s_per_step"),
        )
        for clock, found in record[key].items()
    ]
    out.append(f"loop / bare: {record['loop_over_bare']['median']:.4f}")
    for side, found in record["mfu"].items():
        out.append(
            f"{side}: MFU {found['full']:.1%} (full attention), {found['causal']:.1%} (causal)"
        )
    if record["dispatch"]:
        out.append(", ".join(f"{k}: {v:.4g}" for k, v in record["dispatch"].items()))
    return out


def plain_batches(
    side: sides.Side, run: recipe.RunConfig
) -> Iterator[dict[str, jax.Array]]:
    """Yields batches as a plain script reads them: in order, from a memory map.

    Entries that are the same in each batch stay on the device.
    """
    (resident,) = side.arguments
    batch = run.batch
    length = batch.sequence_length
    tokens = np.memmap(run.data.path, np.uint32, "r")
    shardings = {name: resident[name].sharding for name in ("tokens", "targets")}
    size = batch.global_size * length
    for step in range(run.train.steps):
        begin = step % ((len(tokens) - 1) // size) * size
        window = tokens[begin : begin + size + 1].astype(np.int32)
        read = {
            "tokens": window[:-1].reshape(batch.global_size, length),
            "targets": window[1:].reshape(batch.global_size, length),
        }
        yield resident | jax.device_put(read, shardings)


def in_for(
    side: sides.Side,
    run: recipe.RunConfig,
    batches: Iterator[dict[str, jax.Array]],
) -> dict[str, float]:
    """Returns seconds a step of a bare `for` that waits for a step as often as the loop
    writes a row.
    """
    stamps = []
    for number, batch in enumerate(itertools.islice(batches, run.train.steps), 1):
        side.state, side.metrics = side.compiled(side.state, batch)
        if number % run.train.log_every == 0:
            side.metrics["loss"].item()
            stamps.append(Stamp(number, time.perf_counter(), time.process_time()))
    return per_step(stamps)


def in_loop(run: recipe.RunConfig, workdir: Path) -> dict[str, float]:
    """Returns seconds a step of the training loop, from row to row of its metrics."""
    stamps: list[Stamp] = []
    with stamped_rows(stamps), contextlib.redirect_stdout(io.StringIO()):
        library.run(run, workdir)
    return per_step(stamps)


@contextlib.contextmanager
def stamped_rows(stamps: list[Stamp]) -> Iterator[None]:
    """Notes the clocks whenever the loop writes a row of metrics."""

    class Stamped(MetricsWriter):
        def write(self, number, values):
            super().write(number, values)
            stamps.append(Stamp(number, time.perf_counter(), time.process_time()))

    with mock.patch.object(opening, "MetricsWriter", Stamped):
        yield


def per_step(stamps: list[Stamp]) -> dict[str, float]:
    """Returns the median over rows by wall time, and the mean by processor time."""
    used = stamps[min(ROWS_SKIPPED, len(stamps) - 2) :]
    pairs = list(itertools.pairwise(used))
    walls = [(b.wall_s - a.wall_s) / (b.number - a.number) for a, b in pairs]
    first, last = used[0], used[-1]
    processor = (last.processor_s - first.processor_s) / (last.number - first.number)
    return {"wall_s": statistics.median(walls), "processor_s": processor}


def overhead(rounds: list[dict], side: str) -> dict[str, dict[str, float]]:
    """Returns quartiles over rounds of the loop minus a side, seconds a step."""
    return {
        clock: measuring.quartiles([r["loop"][clock] - r[side][clock] for r in rounds])
        for clock in ("wall_s", "processor_s")
    }


def dispatch(run: recipe.RunConfig, count: int) -> dict[str, float]:
    """Returns the median seconds until a call of the jitted step returns, of each, and
    leaves.
    """
    batch, stick = sides.full_batch(run), sides.yardstick(run)
    beside = [] if isinstance(stick, str) else [sides.build_handwritten(stick, batch)]
    called = [*as_called(run, batch), *beside]
    found: dict[str, list[float]] = {side.name: [] for side in called}
    for side in called:
        side.advance(5)
    for _ in range(count):
        for side in called:
            began = time.perf_counter()
            side.state, side.metrics = side.compiled(side.state, *side.arguments)
            found[side.name].append(time.perf_counter() - began)
            jax.block_until_ready((side.state, side.metrics))
    out = {f"{name}_s": statistics.median(times) for name, times in found.items()}
    leaves = {
        f"{s.name}_leaves": len(jax.tree.leaves((s.state, s.arguments))) for s in called
    }
    return out | {"ratio": out["jaxdist_s"] / out["same_leaves_s"]} | leaves


def as_called(run: recipe.RunConfig, host_batch: dict) -> list[sides.Side]:
    """Returns jaxdist's step as its loop calls it, and the same program jitted on flat
    lists.
    """
    _, built = sides.built(run)
    state, structure = jax.tree.flatten(built.init())

    def flat_step(leaves, batch):
        after, metrics = built.step(jax.tree.unflatten(structure, leaves), batch)
        return jax.tree.leaves(after), jax.tree.leaves(metrics)

    batch = jax.device_put(host_batch, built.batch_shardings(host_batch))
    return [
        sides.Side("jaxdist", built.step, built.init(), (batch,), 0.0),
        sides.Side(
            "same_leaves", jax.jit(flat_step, donate_argnums=0), state, (batch,), 0.0
        ),
    ]


def _text(found: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{name} {1e3 * t['wall_s']:.3f} ms a step ({1e3 * t['processor_s']:.3f} cpu)"
        for name, t in found.items()
    )


if __name__ == "__main__":
    raise SystemExit(sides.report_faults(main))
