"""Both sides of the comparisons: jaxdist's train step and the hand-written one.

Both come from one `RunConfig`, of a named shape or of a config file with overrides.
They train on one synthetic batch from the same parameters, so no data files are needed.
`yardstick` says whether the hand-written step has the run's model and layout, or why
not.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import handwritten
import handwritten_experts
import jax
import numpy as np
from handwritten import Options, Shape
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, files
from jaxdist.distributed import initialize
from jaxdist.hardware import flags as platform_flags
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.parallel.mesh import resolve_mesh, slices_of
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, validation
from jaxdist.trainer import run_config as recipe

LEARNING_RATE = 1e-3
SHAPES = handwritten.SHAPES | handwritten_experts.SHAPES
_SIZES = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "vocab_size")
_EXPERTS = ("num_experts", "experts_per_token", "balance_rate")
# Of the optimizer: they change no time, and equal ones let the losses be compared.
_OPTIMIZER = {
    "optimizer.learning_rate": LEARNING_RATE,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.b1": handwritten.B1,
    "optimizer.b2": handwritten.B2,
    "optimizer.eps": handwritten.ADAM_EPS,
    "optimizer.weight_decay": handwritten.DECAY,
}


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


class Yardstick(NamedTuple):
    """The settings of the hand-written step that match a run."""

    shape: Shape
    options: Options
    mesh: dict[str, int]  # data, fsdp, tensor


# --------------------------------------------------------------------- the command line


def add_run_flags(parser: argparse.ArgumentParser, default: str = "quick") -> None:
    """Adds the flags that choose a run and change it."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, default=default)
    add(
        "--config",
        help="a config instead of a shape; --config.a.b=value changes either",
    )
    add("--batch", type=int, help="sequences a step (default: the shape's)")
    add("--sequence", type=int, help="tokens of a sequence (default: the shape's)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the compute (default of a shape: float32)",
    )
    add("--remat", help="remat.policy (default of a shape: dots)")
    add("--clip-norm", type=float, help="0: off (default of a shape: 1)")
    add(
        "--loss-chunk",
        type=int,
        help="tokens scored at once, 0: all (default of a shape: 1024)",
    )
    add(
        "--mesh",
        default="",
        help="AXIS=SIZE,..., such as fsdp=8 (default of a shape: data over all)",
    )
    add("--devices", type=int, help="emulated CPU devices")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """Returns the flags, with every `--config.a.b=value` in `overrides`."""
    taken = [word for word in arguments if word.startswith("--config.")]
    flags = parser.parse_args([word for word in arguments if word not in taken])
    pairs = [word.removeprefix("--config.").partition("=") for word in taken]
    flags.overrides = {path: value for path, _, value in pairs}
    return flags


def start(flags: argparse.Namespace) -> bool:
    """Sets flags and devices, joins the processes; returns whether this one prints."""
    platform, family = (
        platform_flags.detect_platform(os.environ),
        platform_flags.detect_family(os.environ),
    )
    os.environ.update(
        platform_flags.flag_environment(platform, os.environ, family=family)
    )
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
        # threads: collectives block one each
        os.environ.setdefault("NPROC", str(4 * flags.devices))
    initialize.skip_absent_tpu(os.environ)
    # alone, no device is touched
    return initialize.join_processes() is None or jax.process_index() == 0


def read_mesh(text: str) -> dict[str, int]:
    """Returns {"fsdp": 8} for "fsdp=8"."""
    return {k: int(v) for k, v in (item.split("=") for item in text.split(",") if item)}


def read_run(flags: argparse.Namespace) -> recipe.RunConfig:
    """Returns the run that the flags choose, with the hand-written step's optimizer.

    Raises:
      ConfigError: no such config or key.
    """
    if flags.config:
        config = files.load(flags.config, folders=files.packaged_folders())
    else:
        config = _config_of(SHAPES[flags.shape], Options())
    given = {
        "batch.global_size": flags.batch,
        "batch.sequence_length": flags.sequence,
        "precision.compute": flags.dtype,
        "remat.policy": flags.remat,
        "optimizer.clip_norm": flags.clip_norm,
        "model.loss_chunk": flags.loss_chunk,
    }
    sizes = {f"mesh.{axis}": size for axis, size in read_mesh(flags.mesh).items()}
    adamw = _OPTIMIZER if config.optimizer.name == "adamw" else {}
    changed = {
        path: str(value)
        for path, value in (given | sizes | adamw).items()
        if value is not None
    }
    files.apply_overrides(
        config, changed | flags.overrides, recipe.full_schema(config.model.target)
    )
    return recipe.from_config(config)


def run_config(shape: Shape, options: Options, mesh: str = "") -> recipe.RunConfig:
    """Makes the jaxdist run with the hand-written step's model, batch and mathematics."""
    config = _config_of(shape, options)
    for axis, size in read_mesh(mesh).items():
        config.mesh[axis] = size
    return recipe.from_config(config)


def _config_of(shape: Shape, options: Options) -> Any:
    config = recipe.default_config()
    model = config.model
    for name in _SIZES:
        model[name] = getattr(shape, name)
    model.head_dim, model.loss_chunk = shape.head_dim, options.loss_chunk
    model.norm_eps, model.rope_theta = shape.eps, shape.theta
    if isinstance(shape, handwritten_experts.Shape):
        for name in _EXPERTS:
            model[name] = getattr(shape, name)
    config.batch.global_size, config.batch.sequence_length = shape.batch, shape.sequence
    config.precision.compute, config.remat.policy = options.dtype, options.remat
    config.optimizer.name, config.optimizer.clip_norm = "adamw", options.clip_norm
    with config.ignore_type():
        config.update_from_flattened_dict(_OPTIMIZER)
    return config


# ---------------------------------------------------------------------------- the batch


def full_batch(run: recipe.RunConfig) -> dict[str, np.ndarray]:
    """Returns a synthetic batch with every field that the run's loader would give.

    Tokens, targets and weights are those of `handwritten.random_batch`; documents are
    whole rows.
    """
    size = run.batch.global_size
    known: dict[str, Any] = {"sample": np.arange(size, dtype=np.int32)}
    if run.data.is_text:
        tokens = handwritten.random_batch(
            size, run.batch.sequence_length, run.vocab_size or 256
        )
        known |= {name: np.asarray(x) for name, x in tokens.items()}
        row = np.arange(run.batch.sequence_length, dtype=np.int32)
        known["positions"] = np.broadcast_to(row, known["tokens"].shape)
    shapes = compose.batch_shapes(run, size)
    random = np.random.default_rng(0)

    def made(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(x.dtype, np.floating):
            return random.standard_normal(x.shape, np.float32).astype(x.dtype)
        return np.ones(x.shape, x.dtype)

    return {
        name: known[name] if name in known else made(x) for name, x in shapes.items()
    }


def _placed(
    batch: Mapping[str, np.ndarray], shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Puts the global batch, which every process holds whole, on the devices."""

    def place(x: np.ndarray, sharding) -> jax.Array:
        return jax.make_array_from_callback(
            np.shape(x), sharding, lambda index: np.asarray(x)[index]
        )

    return {name: place(x, shardings[name]) for name, x in batch.items()}


# ------------------------------------------------------------------------------ jaxdist


def built(
    run: recipe.RunConfig, devices: Sequence[jax.Device] | None = None
) -> tuple[ModelSpec, TrainStep]:
    """Returns the spec and the train step of a run on these devices (default: all of
    this machine).

    Raises:
      ConfigError: the run does not fit them; its data is not looked at.
    """
    devices = jax.devices() if devices is None else devices
    composition = validation.validate(run, devices, with_data=False)
    return composition.spec, composition.build_step(devices)


def build_jaxdist(
    run: recipe.RunConfig,
    host_batch: Mapping[str, np.ndarray],
    devices: Sequence[jax.Device] | None = None,
) -> Side:
    """Builds jaxdist's side at its own initial parameters; default: on all devices."""
    _, step = built(run, devices)
    batch = _placed(host_batch, step.batch_shardings(host_batch))
    return compiled("jaxdist", step.step, step.init(), (batch,))


def compiled(name: str, step: Any, state: Any, arguments: tuple) -> Side:
    """Returns a side, compiled."""
    began = time.monotonic()
    program = step.lower(state, *arguments).compile()
    return Side(name, program, state, arguments, time.monotonic() - began)


# --------------------------------------------------------------------- the hand-written


def yardstick(run: recipe.RunConfig) -> Yardstick | str:
    """Returns the hand-written step of a run, or why it has none."""
    if run.model_class is not Transformer:
        return f"the yardstick is a decoder, not {run.model['target']}"
    usual, c = TransformerConfig(), run.model
    free = {
        *_SIZES,
        "target",
        "head_dim",
        "rope_theta",
        "norm_eps",
        "init_std",
        "loss_chunk",
        "window",
    }
    has_experts = c["num_experts"] > 0
    free |= {*_EXPERTS, "expert_d_ff"} if has_experts else set()
    odd = [
        name
        for name, value in c.items()
        if name not in free and value != getattr(usual, name, value)
    ]
    shape = resolve_mesh(
        run.mesh, jax.device_count(), slices_of(run.mesh, jax.devices()) or 1
    )
    sizes = {axis: shape.sizes[axis] for axis in ("data", "fsdp", "tensor")}
    unlike = {
        "model." + ", model.".join(odd): odd,
        "model.head_dim": c["head_dim"] * c["num_heads"] != c["d_model"],
        "optimizer.name": run.optimizer.name != "adamw",
        "batch.accumulation": run.batch.accumulation > 1,
        "data.packing": run.data.packing == "documents",
        "mesh": math.prod(sizes.values()) != shape.num_devices
        or run.mesh.sequence_parallel,
        "model.num_experts on several devices or on an accelerator": has_experts
        and (shape.num_devices > 1 or jax.devices()[0].platform != "cpu"),
        "model.num_experts in bfloat16": has_experts
        and run.precision.compute != "float32",
        "mesh.zero": sizes["fsdp"] > 1 and run.mesh.zero != 3,
        "mesh.tensor": c["num_kv_heads"] % sizes["tensor"],
        "remat.policy": run.remat.policy not in ("none", "dots", "full"),
        "precision": (run.precision.params, run.precision.reduce)
        != ("float32", "float32"),
        "lora.rank": run.lora.rank,
    }
    if reasons := [key for key, differs in unlike.items() if differs]:
        return f"the yardstick has not this run's {', '.join(reasons)}"
    known = {name: c[name] for name in _SIZES}
    sequence, batch = run.batch.sequence_length, run.batch.global_size
    more = {
        "sequence": sequence,
        "batch": batch,
        "theta": c["rope_theta"],
        "eps": c["norm_eps"],
    }
    if has_experts:
        known["d_ff"] = c["expert_d_ff"] or c["d_ff"]
        routed = {name: c[name] for name in _EXPERTS}
        return Yardstick(
            handwritten_experts.Shape(**known, **more, **routed), _options(run), sizes
        )
    return Yardstick(Shape(**known, **more), _options(run), sizes)


def _options(run: recipe.RunConfig) -> Options:
    kernels = {
        "tpu": "splash",
        "gpu": "cudnn" if run.precision.compute == "bfloat16" else "tiles",
    }
    return Options(
        remat=run.remat.policy,
        dtype=run.precision.compute,
        clip_norm=run.optimizer.clip_norm,
        loss_chunk=run.model["loss_chunk"],
        kernel=kernels.get(jax.devices()[0].platform, "tiles"),
    )


def build_handwritten(
    stick: Yardstick,
    host_batch: Mapping[str, np.ndarray],
    params: Callable[[Any], dict] | None = None,
) -> Side:
    """Returns the hand-written side.

    Args:
      params: makes its parameters, in their shardings; default: its own initial ones.
    """
    shape, options, sizes = stick
    mesh = None
    if jax.device_count() > 1:
        mesh = Mesh(mesh_utils.create_device_mesh(tuple(sizes.values())), tuple(sizes))
    module = _module(shape)
    step = module.build_step(shape, options, mesh)
    shardings = handwritten.state_shardings(shape, mesh) if mesh else None
    given = params(shardings.params if shardings else None) if params else None
    state = jax.jit(partial(module.init, shape, 0), out_shardings=shardings)()
    if given is not None:
        state = state._replace(params=given)
    known = {name: host_batch[name] for name in ("tokens", "targets", "weights")}
    inputs = known | {"rate": np.float32(LEARNING_RATE)}
    if mesh:
        specs = dict.fromkeys(known, P(handwritten.BATCH)) | {"rate": P()}
        placed = _placed(
            inputs, {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        )
    else:
        placed = jax.device_put(inputs)
    rate = placed.pop("rate")
    return compiled("handwritten", step, state, (placed, rate))


def _module(shape: Shape) -> Any:
    return (
        handwritten_experts
        if isinstance(shape, handwritten_experts.Shape)
        else handwritten
    )


def params_of(run: recipe.RunConfig, shape: Shape) -> Callable[[Any], dict]:
    """Returns what makes jaxdist's initial parameters in the hand-written layout and
    shardings.

    They are made anew, so that no state of jaxdist's need be there.
    """

    def params(shardings: Any) -> dict:
        _, step = built(run)
        convert = partial(handwritten_params, shape=shape)
        return jax.jit(convert, out_shardings=shardings)(step.init().trainable)

    return params


def handwritten_params(trainable: Any, shape: Shape) -> dict:
    """Converts jaxdist's parameters to the hand-written layout, with joined heads."""
    ours = {name: _flat(value) for name, value in trainable.items() if name != "blocks"}
    blocks = trainable["blocks"]
    joined = blocks["attention"] | blocks["mlp"]
    norms = {name: _flat(blocks[name]) for name in ("attention_norm", "mlp_norm")}
    module = _module(shape)
    like = jax.eval_shape(lambda: module.init_params(shape, 0))
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


def report_faults(main: Callable[[], None]) -> int:
    """Runs a benchmark; returns 78 after printing the faults of its config."""
    try:
        main()
    except ConfigError as error:
        for fault in error.faults:
            print(f"error: {fault}", flush=True)
        return 78
    return 0
