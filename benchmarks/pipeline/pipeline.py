"""Times a pipelined train step against the unpipelined one, in pairs.

    python benchmarks/pipeline/pipeline.py --out benchmarks/results/pipeline.json

The layouts are pipeline 4 x fsdp 2 and fsdp 8 on eight emulated CPU devices. The shape
is `quick` (4 layers x 256, 8 x 256 tokens) with every layer rematerialised. Emulated
devices share the machine's cores, and a stage without an op computes for nothing. So
the ratio shows total work, and memory per device, but no overlap. If the bubble were
the only extra work, the ratio would be (m + p - 1) / m of the blocks' time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring
import sides as contestants
import turns
from handwritten import SHAPES, Options, Shape

from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.pipeline.partition import PipelineConfig
from jaxdist.parallel.pipeline.schedules.balance import bubble_fraction
from jaxdist.parallel.pipeline.schedules.table import SCHEDULES
from jaxdist.telemetry.flops import hlo_flops


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    os.environ.update(platform_flags.flag_environment("cpu", os.environ))
    # threads: collectives block one each
    os.environ.setdefault("NPROC", str(4 * flags.devices))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.devices)
    shape = dataclasses.replace(SHAPES[flags.shape], batch=flags.batch)
    options = Options(remat="full", dtype=flags.dtype)
    plan = PipelineConfig(
        flags.schedule, flags.microbatches, flags.chunks, gather_once=flags.gather_once
    )
    ours = f"pipeline={flags.stages},data=1,fsdp={flags.devices // flags.stages}"
    sides = [_side(mesh, shape, options, plan) for mesh in (ours, flags.beside)]
    inner = turns.steps_per_turn(sides)

    def report(number: int, times: list[measuring.Timing]) -> None:
        cells = (
            f"{1e3 * t.wall_s / inner:.0f} ms ({1e3 * t.processor_s / inner:.0f} cpu)"
            for t in times
        )
        print(
            f"round {number + 1}/{flags.rounds}: {' against '.join(cells)}", flush=True
        )

    advances = [partial(side.advance, inner) for side in sides]
    times = measuring.interleaved(advances, flags.rounds, report)
    record = measuring.record_head(sys.argv[1:]) | {
        "shape": {"name": flags.shape, **dataclasses.asdict(shape)},
        "options": dataclasses.asdict(options),
        "pipeline": dataclasses.asdict(plan) | {"stages": flags.stages},
        "bubble": bubble_fraction(flags.stages, flags.microbatches, flags.chunks),
        "steps_per_round": inner,
        "sides": {
            s.name: _numbers(s, t, inner) for s, t in zip(sides, times, strict=True)
        },
        "ratio": measuring.ratios(*times),
        "first_loss_difference": abs(sides[0].first_loss - sides[1].first_loss),
    }
    _print(record)
    measuring.write(flags.out, record)


def _side(
    mesh: str, shape: Shape, options: Options, plan: PipelineConfig
) -> contestants.Side:
    """Returns a contestant, warmed up by two steps."""
    run = dataclasses.replace(
        contestants.run_config(shape, options, mesh), pipeline=plan
    )
    side = contestants.build_jaxdist(run, contestants.full_batch(run))
    side.name = mesh
    side.advance(1)
    side.first_loss = float(side.metrics["loss"])
    side.advance(1)
    print(
        f"{mesh}: compiled in {side.compile_s:.1f} s, first loss {side.first_loss:.7f}",
        flush=True,
    )
    return side


def _print(record: dict) -> None:
    for name, side in record["sides"].items():
        print(
            f"{name}: step {1e3 * side['step_s']['median']:.0f} ms, temporary "
            f"{side['temp_bytes'] / 1e6:.1f} MB, arguments {side['argument_bytes'] / 1e6:.1f} MB"
        )
    print(
        f"ratio by wall {record['ratio']['wall']}, by processor {record['ratio']['processor']}"
    )
    ours, beside = (side["flops_per_device"] for side in record["sides"].values())
    print(f"FLOPs {ours / beside:.3f} x")


def _numbers(side: contestants.Side, times: list[measuring.Timing], inner: int) -> dict:
    memory = side.compiled.memory_analysis()
    return {
        "step_s": measuring.quartiles([t.wall_s / inner for t in times]),
        "processor_s": measuring.quartiles([t.processor_s / inner for t in times]),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "flops_per_device": hlo_flops(side.compiled.as_text()),
        "compile_s": side.compile_s,
        "first_loss": side.first_loss,
        "last_loss": float(side.metrics["loss"]),
        "rounds": [t._asdict() for t in times],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="quick")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument(
        "--gather-once", action="store_true", help="as pipeline.gather_once"
    )
    parser.add_argument(
        "--beside", default="fsdp=8", help="mesh of the unpipelined side"
    )
    parser.add_argument("--devices", type=int, default=8, help="emulated CPU devices")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", help="JSON file")
    return parser


if __name__ == "__main__":
    main()
