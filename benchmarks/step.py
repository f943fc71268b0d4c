"""Times jaxdist's train step against the hand-written one, in pairs.

    python benchmarks/step.py --shape quick --remat dots --out benchmarks/results/quick.json
    python benchmarks/step.py --config llama3_8b --batch 64 --mesh fsdp=16,tensor=4

Both sides train the same model from the same parameters on the same synthetic batch in the same layout,
in one process, turn by turn; the ratio is the median over the pairs. Works on CPU, GPU and TPU, on emulated
CPU devices (`--devices 8 --mesh fsdp=8`) and as one of several processes (under `jaxdist launch` or Slurm).
`--apart` measures one side after the other, each with the whole memory. Where the yardstick has not the
model or the layout, jaxdist runs alone, and the record says why. `--control` puts the hand-written step on
both sides: what the ratio shows then is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import measuring
import numpy as np
import sides
from jax.experimental import multihost_utils
from sides import Side

from jaxdist.hardware import chips
from jaxdist.trainer import model_flops
from jaxdist.trainer.run_config import RunConfig

ROUND_S = 0.5  # a turn is as many steps as fill this time


def main() -> None:
    """Runs the command."""
    flags = sides.parse(_parser(), sys.argv[1:])
    say = print if sides.start(flags) else _silent
    run = sides.read_run(flags)
    name = flags.config or flags.shape
    makers, why = contestants(run, flags)
    if why:
        say(f"jaxdist alone: {why}")
    spec, _ = sides.built(run)
    say(
        f"{name}: {spec.parameter_count:,} parameters, {run.batch.global_size} x {run.batch.sequence_length}"
    )
    found = measure(makers, flags, say)
    record = summary(run, found, flags) | {"alone_because": why or None}
    for line in lines(record):
        say(line)
    measuring.write(flags.out, record)


def _silent(*_: object, **__: object) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sides.add_run_flags(parser)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--sides", choices=("both", "jaxdist", "handwritten"), default="both"
    )
    parser.add_argument("--apart", action="store_true", help="one side after the other")
    parser.add_argument(
        "--control", action="store_true", help="hand-written against itself"
    )
    parser.add_argument("--out", help="JSON file")
    return parser


# ----------------------------------------------------------------------- who takes part


def contestants(
    run: RunConfig, flags: argparse.Namespace
) -> tuple[list[Callable[[], Side]], str]:
    """Returns what makes each side, jaxdist first, and why the hand-written one is not
    among them.
    """
    batch = sides.full_batch(run)
    ours = partial(sides.build_jaxdist, run, batch)
    if flags.sides == "jaxdist" and not flags.control:
        return [ours], ""
    stick = sides.yardstick(run)
    if isinstance(stick, str):
        if flags.control or flags.sides == "handwritten":
            raise sides.ConfigError(stick)
        return [ours], stick
    if flags.control:

        def control() -> Side:
            return dataclasses.replace(
                sides.build_handwritten(stick, batch), name="control"
            )

        return [control, partial(sides.build_handwritten, stick, batch)], ""
    theirs = partial(
        sides.build_handwritten, stick, batch, sides.params_of(run, stick.shape)
    )
    return ([theirs] if flags.sides == "handwritten" else [ours, theirs]), ""


@dataclasses.dataclass
class Measured:
    """One side's numbers; the side itself may be gone."""

    name: str
    times: list[measuring.Timing]
    steps: int  # of a round
    numbers: dict  # of its program and its losses


def measure(
    makers: Sequence[Callable[[], Side]],
    flags: argparse.Namespace,
    say: Callable[..., None],
) -> list[Measured]:
    """Returns each side's numbers: turn by turn, or one side after the other."""
    groups = [[maker] for maker in makers] if flags.apart else [makers]
    out: list[Measured] = []
    for group in groups:  # all by as many steps as the first
        out += measure_together(group, flags.rounds, out[0].steps if out else None, say)
    return out


def measure_together(
    makers: Sequence[Callable[[], Side]],
    rounds: int,
    steps: int | None,
    say: Callable[..., None],
) -> list[Measured]:
    """Returns the numbers of sides that take turns; none of their memory stays in use.

    Args:
      steps: of a turn; None: as many as fill ROUND_S.
    """
    return take_turns([warm(maker(), say) for maker in makers], rounds, steps, say)


def take_turns(
    present: Sequence[Side], rounds: int, steps: int | None, say: Callable[..., None]
) -> list[Measured]:
    """Returns the numbers of warm sides that take turns; see `measure_together`."""
    inner = steps_per_turn(present) if steps is None else steps
    if steps is not None:
        for side in present:
            # as `steps_per_turn` does: losses are compared after equal numbers of steps
            side.advance(1)

    def report(number: int, times: list[measuring.Timing]) -> None:
        cells = (
            f"{side.name} {1e3 * t.wall_s / inner:.1f} ms ({1e3 * t.processor_s / inner:.1f} cpu)"
            for side, t in zip(present, times, strict=True)
        )
        say(f"round {number + 1}/{rounds}: {', '.join(cells)}", flush=True)

    times = measuring.interleaved(
        [partial(side.advance, inner) for side in present], rounds, report
    )
    return [
        Measured(side.name, found, inner, program_numbers(side))
        for side, found in zip(present, times, strict=True)
    ]


def warm(side: Side, say: Callable[..., None]) -> Side:
    """Returns the side after two steps."""
    side.advance(1)
    side.first_loss = float(side.metrics["loss"])
    side.advance(1)
    say(
        f"{side.name}: compiled in {side.compile_s:.1f} s, first loss {side.first_loss:.7f}",
        flush=True,
    )
    return side


def steps_per_turn(present: Sequence[Side]) -> int:
    """Returns how many steps fill a turn; the same number in all processes."""
    slowest = max(measuring.timed(partial(side.advance, 1)).wall_s for side in present)
    if jax.process_count() > 1:
        slowest = float(multihost_utils.process_allgather(np.float32(slowest)).max())
    return max(1, math.ceil(ROUND_S / slowest))


# --------------------------------------------------------------------------- the record


def program_numbers(side: Side) -> dict:
    """Returns what a side's program and its state say."""
    memory = side.compiled.memory_analysis()
    sizes = ("argument", "output", "alias", "temp")
    found = {
        f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") if memory else None
        for name in sizes
    }
    here = [d for d in jax.local_devices()[:1] if d.memory_stats()]
    return found | {
        # Of the process so far: what came before this side counts, too.
        "device_peak_bytes": here[0].memory_stats().get("peak_bytes_in_use")
        if here
        else None,
        "compile_s": side.compile_s,
        "first_loss": side.first_loss,
        "last_loss": float(side.metrics["loss"]),
    }


def summary(
    run: RunConfig, found: Sequence[Measured], flags: argparse.Namespace
) -> dict:
    """Returns the record: what ran, on what, how fast, and the ratio."""
    spec, _ = sides.built(run)
    tokens, rate = (
        run.batch.global_size * run.batch.sequence_length,
        machine_rate(run.precision.compute),
    )
    flops = {
        name: tokens * each for name, each in model_flops.model_flops(run, spec).items()
    }
    first, last = found[0].numbers, found[-1].numbers
    return measuring.record_head(sys.argv[1:]) | {
        "run": {"name": flags.config or flags.shape, "model": dict(run.model)}
        | {"batch": dataclasses.asdict(run.batch), "mesh": dataclasses.asdict(run.mesh)}
        | {"compute": run.precision.compute, "remat": run.remat.policy},
        "parameters": spec.parameter_count,
        "model_flops_per_step": flops,
        "model_flops_convention": "6 per weight and token; attention in full, or half of it (causal)",
        "matmul": rate,
        "rounds": flags.rounds,
        "apart": flags.apart,
        "sides": {
            one.name: side_record(one, flops, tokens, run.precision.compute, rate)
            for one in found
        },
        "ratio": measuring.ratios(found[0].times, found[1].times)
        if len(found) == 2
        else None,
        "first_loss_difference": abs(first["first_loss"] - last["first_loss"]),
        "last_loss_difference": abs(first["last_loss"] - last["last_loss"]),
    }


def machine_rate(dtype: str) -> dict[str, float]:
    """Returns the matmul rate of one device, at a size that fills it."""
    on_cpu = jax.devices()[0].platform == "cpu"
    return measuring.matmul_rate(dtype, size=2048 if on_cpu else 8192, repeats=10)


def side_record(
    one: Measured, flops: Mapping[str, float], tokens: int, dtype: str, rate: dict
) -> dict:
    """Returns one contestant's numbers; MFU is null where the chip's peak is
    not known.
    """
    wall = measuring.quartiles([t.wall_s / one.steps for t in one.times])
    processor = measuring.quartiles([t.processor_s / one.steps for t in one.times])
    device, count = jax.devices()[0], jax.device_count()
    chip = chips.chip_for(device.device_kind)
    peak = chip.peak(dtype) if chip else None
    causal, step_s = flops["causal"], wall["median"]
    # Emulated devices share the machine; a matmul on one of them had the whole of it.
    shares = 1 if device.platform == "cpu" else count
    mfu = {
        f"mfu_{name}": n / step_s / count / peak if peak else None
        for name, n in flops.items()
    }
    return {
        "step_s": wall,
        "processor_s": processor,
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_per_device": tokens / step_s / count,
        "model_flops_per_s": causal / step_s,
        **mfu,
        "mfu_causal_of_processes": per_process(mfu["mfu_causal"]) if peak else None,
        "share_of_matmul_rate": causal / step_s / shares / rate["flops_per_s"],
        "share_of_matmul_rate_by_processor_time": (
            causal / processor["median"] / rate["flops_per_processor_s"]
            if device.platform == "cpu" and jax.process_count() == 1
            else None
        ),
        **one.numbers,
        "steps_per_round": one.steps,
        "rounds": [
            {"wall_s": t.wall_s, "processor_s": t.processor_s} for t in one.times
        ],
    }


def per_process(value: float) -> list[float]:
    """Returns every process's value."""
    if jax.process_count() == 1:
        return [value]
    return multihost_utils.process_allgather(jnp.float32(value)).reshape(-1).tolist()


def lines(record: dict) -> list[str]:
    """Returns what a person wants to read of the record."""
    rate = record["matmul"]
    out = [
        f"matmul {rate['size']}^3: {rate['flops_per_s'] / 1e9:,.1f} GFLOP/s on one device"
    ]
    for name, side in record["sides"].items():
        full, causal = side["mfu_full"], side["mfu_causal"]
        mfu = (
            "unknown"
            if full is None
            else f"{full:.1%} (full attention), {causal:.1%} (causal)"
        )
        out.append(
            f"{name}: {1e3 * side['step_s']['median']:.1f} ms a step "
            f"({1e3 * side['step_s']['low']:.1f} to {1e3 * side['step_s']['high']:.1f}), "
            f"{1e3 * side['processor_s']['median']:.1f} ms of processor, "
            f"{side['tokens_per_s']:,.0f} tokens/s, "
            f"MFU {mfu}, {side['share_of_matmul_rate']:.1%} of the matmul rate, "
            f"{(side['temp_bytes'] or 0) / 2**20:,.0f} MiB temporary"
        )
    for clock, found in (record["ratio"] or {}).items():
        spread = f"{found['low']:.3f} to {found['high']:.3f}"
        out.append(f"ratio by {clock} time: {found['median']:.3f} ({spread})")
    if len(record["sides"]) > 1:
        out.append(
            f"losses differ by {record['first_loss_difference']:.1e} at first, "
            f"{record['last_loss_difference']:.1e} at last"
        )
    return out


if __name__ == "__main__":
    raise SystemExit(sides.report_faults(main))
