"""Times jaxdist's train step against the hand-written one, in pairs.

    python benchmarks/step.py --shape quick --remat dots --out benchmarks/results/quick.json

Both sides train the same model from the same parameters on the same batch, in one process, turn by
turn; the ratio is the median over the pairs. Works on CPU, GPU and TPU, on emulated CPU devices
(`--devices 8 --mesh fsdp=8`) and as one of several processes (under `jaxdist launch` or Slurm).
`--control` puts the hand-written step on both sides: what the ratio shows then is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from functools import partial
from typing import Any

import handwritten
import jax
import jax.numpy as jnp
import measuring
import numpy as np
from handwritten import SHAPES, Options, Shape
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.distributed import initialize
from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.mesh import build_mesh
from jaxdist.trainer import build, validation
from jaxdist.trainer import run_config as recipe

LEARNING_RATE = 1e-3
ROUND_S = 0.5  # a turn is as many steps as fill this time


@dataclasses.dataclass
class Side:
    """One contestant: a compiled step and the state that it moves on."""

    name: str
    compiled: Any
    state: Any
    arguments: tuple
    compile_s: float
    first_loss: float = math.nan
    metrics: Any = None

    def advance(self, steps: int) -> None:
        """Runs steps and waits for the last one."""
        for _ in range(steps):
            self.state, self.metrics = self.compiled(self.state, *self.arguments)
        jax.block_until_ready((self.state, self.metrics))


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    platform, family = platform_flags.detect_platform(os.environ), platform_flags.detect_family(os.environ)
    os.environ.update(platform_flags.flag_environment(platform, os.environ, family=family))
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    initialize.skip_absent_tpu(os.environ)
    say = print if initialize.join_processes() is None or jax.process_index() == 0 else _silent
    shape, options = read_shape(flags), read_options(flags)
    sides = build_sides(shape, options, flags)
    say(f"{flags.shape}: {handwritten.count_parameters(shape):,} parameters, {shape}")
    for side in sides:
        say(f"{side.name}: compiled in {side.compile_s:.1f} s, first loss {side.first_loss:.7f}")
    say(f"mesh {flags.mesh or 'one device'}, {options}")
    inner = steps_per_turn(sides)

    def report(number: int, times: list[measuring.Timing]) -> None:
        cells = (
            f"{side.name} {1e3 * t.wall_s / inner:.1f} ms ({1e3 * t.processor_s / inner:.1f} cpu)"
            for side, t in zip(sides, times, strict=True)
        )
        say(f"round {number + 1}/{flags.rounds}: {', '.join(cells)}", flush=True)

    turns = [partial(side.advance, inner) for side in sides]
    times = measuring.interleaved(turns, flags.rounds, report)
    record = summary(shape, options, flags, sides, times, inner)
    for line in lines(record):
        say(line)
    measuring.write(flags.out, record)


def _silent(*_: object, **__: object) -> None:
    pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="quick")
    parser.add_argument("--batch", type=int, help="sequences a step (default: the shape's)")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (default: the shape's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots")
    parser.add_argument("--clip-norm", type=float, default=1.0, help="0: off")
    parser.add_argument("--loss-chunk", type=int, default=1024, help="tokens at once; 0: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--devices", type=int, help="emulated CPU devices")
    parser.add_argument("--mesh", default="", help="fsdp=8 for both; any other, jaxdist alone")
    parser.add_argument("--control", action="store_true", help="hand-written against itself")
    parser.add_argument("--out", help="JSON file")
    return parser


def read_shape(flags: argparse.Namespace) -> Shape:
    """Returns the named shape with the flags' batch and sequence."""
    given = {"batch": flags.batch, "sequence": flags.sequence}
    changed = {name: value for name, value in given.items() if value}
    return dataclasses.replace(SHAPES[flags.shape], **changed)


def read_options(flags: argparse.Namespace) -> Options:
    """Returns what the hand-written step computes with; on GPUs in bfloat16, cuDNN's attention."""
    fused = jax.devices()[0].platform == "gpu" and flags.dtype == "bfloat16"
    return Options(
        remat=flags.remat,
        dtype=flags.dtype,
        clip_norm=flags.clip_norm,
        loss_chunk=flags.loss_chunk,
        kernel="cudnn" if fused else "tiles",
    )


# -------------------------------------------------------------------------------------- two sides


def run_config(shape: Shape, options: Options, mesh: str = "") -> recipe.RunConfig:
    """Returns the jaxdist run that has the hand-written step's model, batch and mathematics."""
    config = recipe.default_config()
    model = config.model
    for name in ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "vocab_size"):
        model[name] = getattr(shape, name)
    model.head_dim, model.loss_chunk = shape.head_dim, options.loss_chunk
    model.norm_eps, model.rope_theta = handwritten.EPS, handwritten.THETA
    config.batch.global_size, config.batch.sequence_length = shape.batch, shape.sequence
    config.precision.compute, config.remat.policy = options.dtype, options.remat
    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate = "adamw", LEARNING_RATE
    optimizer.schedule, optimizer.warmup_steps = "constant", 0
    optimizer.b1, optimizer.b2, optimizer.eps = handwritten.B1, handwritten.B2, handwritten.ADAM_EPS
    optimizer.weight_decay, optimizer.clip_norm = handwritten.DECAY, options.clip_norm
    for axis, size in read_mesh(mesh).items():
        config.mesh[axis] = size
    return recipe.from_config(config)


def read_mesh(text: str) -> dict[str, int]:
    """Returns {"fsdp": 8} for "fsdp=8"."""
    return {k: int(v) for k, v in (item.split("=") for item in text.split(",") if item)}


def full_batch(shape: Shape) -> dict[str, np.ndarray]:
    """Returns the batch with every field that jaxdist's loader would give."""
    batch = {name: np.asarray(x) for name, x in handwritten.make_batch(shape).items()}
    row = np.arange(shape.sequence, dtype=np.int32)
    return batch | {
        "positions": np.broadcast_to(row, batch["tokens"].shape),
        "sample": np.arange(shape.batch, dtype=np.int32),
    }


def build_jaxdist(run: recipe.RunConfig, host_batch: dict[str, np.ndarray]) -> Side:
    """Returns jaxdist's side, at its own initial parameters."""
    _, rules, spec = validation.validate(run, jax.devices())
    built = build.build_step(run, spec, build_mesh(run.mesh, jax.devices()), rules)
    batch = _placed(host_batch, built.batch_shardings(host_batch))
    state = built.init()
    return _compiled("jaxdist", built.step, state, (batch,))


def build_handwritten(
    shape: Shape, options: Options, host_batch: dict[str, np.ndarray], params: Any = None
) -> Side:
    """Returns the hand-written side, at the given parameters (its own layout) or at its own."""
    several = jax.device_count() > 1
    mesh = Mesh(np.array(jax.devices()), ("fsdp",)) if several else None
    step = handwritten.build_step(shape, options, mesh)
    shardings = handwritten.state_shardings(shape, mesh) if mesh else None
    state = jax.jit(lambda: handwritten.init(shape, 0), out_shardings=shardings)()
    if params is not None:
        state = state._replace(params=params(shardings and shardings.params))
    rate = np.float32(LEARNING_RATE)
    if mesh:
        rows = {name: NamedSharding(mesh, P("fsdp")) for name in host_batch}
        batch, rate = _placed(host_batch, rows), jax.device_put(rate, NamedSharding(mesh, P()))
    else:
        batch, rate = jax.device_put(host_batch), jax.device_put(rate)
    return _compiled("handwritten", step, state, (batch, rate))


def _placed(batch: dict[str, np.ndarray], shardings: dict) -> dict[str, jax.Array]:
    """Returns the global batch, which every process holds whole, cut up over the devices."""

    def place(x: np.ndarray, sharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return {name: place(x, shardings[name]) for name, x in batch.items()}


def _compiled(name: str, step: Any, state: Any, arguments: tuple) -> Side:
    began = time.monotonic()
    compiled = step.lower(state, *arguments).compile()
    return Side(name, compiled, state, arguments, time.monotonic() - began)


def handwritten_params(trainable: Any, shape: Shape) -> dict:
    """Returns jaxdist's parameters in the hand-written layout: the same numbers, heads joined."""
    ours = {name: _flat(value) for name, value in trainable.items() if name != "blocks"}
    blocks = trainable["blocks"]
    joined = blocks["attention"] | blocks["mlp"]
    norms = {name: _flat(blocks[name]) for name in ("attention_norm", "mlp_norm")}
    like = jax.eval_shape(lambda: handwritten.init_params(shape, 0))
    given = {
        "embedding": ours["embedding"],
        "blocks": joined | norms,
        "norm": ours["final_norm"],
        "head": ours["output"],
    }
    return jax.tree.map(lambda x, y: x.reshape(y.shape), given, like)


def _flat(value: Any) -> jax.Array:
    """Returns the only array of a module."""
    (leaf,) = jax.tree.leaves(value)
    return leaf


def build_sides(shape: Shape, options: Options, flags: argparse.Namespace) -> list[Side]:
    """Returns the contestants, jaxdist first, each warmed up by two steps."""
    full = full_batch(shape)
    batch = {name: full[name] for name in ("tokens", "targets", "weights")}
    if flags.control:
        sides = [build_handwritten(shape, options, batch) for _ in range(2)]
        sides[0].name = "control"
    else:
        ours = build_jaxdist(run_config(shape, options, flags.mesh), full)
        sides = [ours]
        if read_mesh(flags.mesh) in ({}, {"fsdp": jax.device_count()}):

            def params(shardings):
                convert = partial(handwritten_params, shape=shape)
                return jax.jit(convert, out_shardings=shardings)(ours.state.trainable)

            sides.append(build_handwritten(shape, options, batch, params))
    for side in sides:
        side.advance(1)
        side.first_loss = float(side.metrics["loss"])
        side.advance(1)
    return sides


def steps_per_turn(sides: list[Side]) -> int:
    """Returns how many steps fill a turn; the same number in all processes."""
    slowest = max(measuring.timed(partial(side.advance, 1)).wall_s for side in sides)
    if jax.process_count() > 1:
        slowest = float(multihost_utils.process_allgather(np.float32(slowest)).max())
    return max(1, math.ceil(ROUND_S / slowest))


# -------------------------------------------------------------------------------------- the record


def summary(shape, options, flags, sides, times, inner: int) -> dict:
    """Returns the record: what ran, on what, how fast, and the ratio."""
    rate = machine_rate(options.dtype)
    return measuring.record_head(sys.argv[1:]) | {
        "shape": {"name": flags.shape, **dataclasses.asdict(shape)},
        "options": dataclasses.asdict(options) | {"mesh": flags.mesh or None},
        "parameters": handwritten.count_parameters(shape),
        "model_flops_per_step": handwritten.model_flops(shape),
        "model_flops_convention": "6 N T + 6 L S D T: causal attention at half, no recomputation",
        "matmul": rate,
        "rounds": flags.rounds,
        "steps_per_round": inner,
        "sides": {
            side.name: side_record(side, shape, options.dtype, found, inner, rate)
            for side, found in zip(sides, times, strict=True)
        },
        "ratio": measuring.ratios(times[0], times[1]) if len(sides) == 2 else None,
        "first_loss_difference": abs(sides[0].first_loss - sides[-1].first_loss),
        "last_loss_difference": abs(float(sides[0].metrics["loss"]) - float(sides[-1].metrics["loss"])),
    }


def machine_rate(dtype: str) -> dict[str, float]:
    """Returns the matmul rate of one device, at a size that fills it."""
    on_cpu = jax.devices()[0].platform == "cpu"
    return measuring.matmul_rate(dtype, size=2048 if on_cpu else 8192, repeats=10)


def side_record(side: Side, shape: Shape, dtype: str, times, inner: int, rate: dict) -> dict:
    """Returns one contestant's numbers; MFU is null where the chip's peak is not known."""
    wall = measuring.quartiles([t.wall_s / inner for t in times])
    processor = measuring.quartiles([t.processor_s / inner for t in times])
    flops, tokens = handwritten.model_flops(shape), shape.batch * shape.sequence
    device = jax.devices()[0]
    chip = chips.chip_for(device.device_kind)
    peak = chip.peak(dtype) if chip else None
    mine = flops / wall["median"] / jax.device_count()
    memory = side.compiled.memory_analysis()
    # Emulated devices share the machine; a matmul on one of them had the whole of it.
    shares = 1 if device.platform == "cpu" else jax.device_count()
    return {
        "step_s": wall,
        "processor_s": processor,
        "tokens_per_s": tokens / wall["median"],
        "tokens_per_s_per_device": tokens / wall["median"] / jax.device_count(),
        "model_flops_per_s": flops / wall["median"],
        "mfu_causal": mine / peak if peak else None,
        "mfu_causal_of_processes": per_process(mine / peak) if peak else None,
        "share_of_matmul_rate": flops / wall["median"] / shares / rate["flops_per_s"],
        "share_of_matmul_rate_by_processor_time": (
            flops / processor["median"] / rate["flops_per_processor_s"]
            if device.platform == "cpu" and jax.process_count() == 1
            else None
        ),
        "compile_s": side.compile_s,
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
        "first_loss": side.first_loss,
        "last_loss": float(side.metrics["loss"]),
        "rounds": [{"wall_s": t.wall_s, "processor_s": t.processor_s} for t in times],
    }


def per_process(value: float) -> list[float]:
    """Returns every process's value."""
    if jax.process_count() == 1:
        return [value]
    return multihost_utils.process_allgather(jnp.float32(value)).reshape(-1).tolist()


def lines(record: dict) -> list[str]:
    """Returns what a person wants to read of the record."""
    rate = record["matmul"]
    out = [f"matmul {rate['size']}^3: {rate['flops_per_s'] / 1e9:,.1f} GFLOP/s on one device"]
    for name, side in record["sides"].items():
        mfu = side["mfu_causal"]
        out.append(
            f"{name}: {1e3 * side['step_s']['median']:.1f} ms a step "
            f"({1e3 * side['step_s']['low']:.1f} to {1e3 * side['step_s']['high']:.1f}), "
            f"{1e3 * side['processor_s']['median']:.1f} ms of processor, "
            f"{side['tokens_per_s']:,.0f} tokens/s, "
            f"MFU {'unknown' if mfu is None else f'{mfu:.1%}'}, "
            f"{side['share_of_matmul_rate']:.1%} of the matmul rate, "
            f"{(side['temp_bytes'] or 0) / 2**20:,.0f} MiB temporary"
        )
    for clock, found in (record["ratio"] or {}).items():
        spread = f"{found['low']:.3f} to {found['high']:.3f}"
        out.append(f"ratio by {clock} time: {found['median']:.3f} ({spread})")
    out.append(
        f"losses differ by {record['first_loss_difference']:.1e} at first, "
        f"{record['last_loss_difference']:.1e} at last"
    )
    return out


if __name__ == "__main__":
    main()
