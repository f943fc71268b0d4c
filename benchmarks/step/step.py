"""Times jaxdist's train step against the hand-written one, in pairs.

    python benchmarks/step/step.py --shape quick --remat dots --out benchmarks/results/quick.json
    python benchmarks/step/step.py --config llama3_8b --batch 64 --mesh fsdp=16,tensor=4

Both sides train the same model from the same parameters on the same synthetic batch in
the same layout. They run in one process, turn by turn; the ratio is the median over the
pairs. It works on CPU, GPU and TPU, on emulated CPU devices (`--devices 8 --mesh
fsdp=8`), and in several processes (under `jaxdist launch` or Slurm).

`--apart` measures one side after the other, each with the whole memory. If the
hand-written step lacks the model or the layout, jaxdist runs alone and the record says
why. `--control` puts the hand-written step on both sides: its ratio is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import jax.numpy as jnp
import measuring
import sides
import turns
from jax.experimental import multihost_utils
from sides import Side
from turns import Measured

from jaxdist.hardware import chips
from jaxdist.trainer import model_flops
from jaxdist.trainer.run_config import RunConfig


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
    found = turns.measure(makers, flags, say)
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
    """Makes a function for each side, jaxdist first, and says why one side is missing."""
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


# --------------------------------------------------------------------------- the record


def summary(
    run: RunConfig, found: Sequence[Measured], flags: argparse.Namespace
) -> dict:
    """Makes the record: the run, the hardware, the times and the ratio."""
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
    """Makes the record of one side; MFU is null if the chip's peak is unknown."""
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
    """Formats the record for people."""
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
