"""RunConfig: the whole of a run, composed of its components' configs, and the rules between them.

The only place where one component's values are checked against another's. All faults are reported
at once, before anything compiles.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdist import config as configs
from jaxdist import optimizers, remat
from jaxdist.checkpoint import config as checkpoint_config
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import ConfigError, Schema
from jaxdist.data import DataConfig
from jaxdist.mesh import MeshConfig, MeshShape, count_slices, resolve_mesh
from jaxdist.models import registry
from jaxdist.optimizers import OptimizerConfig
from jaxdist.precision import PrecisionConfig
from jaxdist.remat import RematConfig
from jaxdist.sharding import Rules, build_rules, place
from jaxdist.telemetry.profile import ProfileConfig
from jaxdist.training.state import ModelSpec, describe
from jaxdist.training.step import StepConfig, TrainStep, build_train_step


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and how often to look."""

    steps: int = 1000  # optimizer updates, >= 1
    max_minutes: float = 0.0  # minutes of training after which run and decay end; 0 = no end
    log_every: int = 10  # steps between rows of metrics.jsonl, >= 1
    eval_every: int = 0  # steps between evaluations; 0 = never, > 0 also at the end
    ema_decay: float = 0.0  # moving average of the parameters, e.g. 0.999; 0 = none
    tensorboard: bool = False  # also write event files to WORKDIR/tensorboard (extra tensorboard)
    sample_tokens: int = 0  # tokens of sample text written at the end; 0 = no sample
    sample_prompt: str = "\n"  # what the sample goes on from


@dataclass(frozen=True)
class BatchConfig:
    """The global batch: global_size = accumulation x batch shards x sequences per device."""

    global_size: int = 16  # sequences per step, >= 1
    sequence_length: int = 128  # tokens per sequence, >= 1
    accumulation: int = 1  # sequential parts of a step, divides global_size


@dataclass(frozen=True)
class RunConfig:
    """A run, resolved. `model` holds the options of `model.target`'s class."""

    seed: int = 0  # of everything random: init, data order, dropout
    train: TrainConfig = field(default_factory=TrainConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def model_class(self) -> type:
        return registry.find_model(self.model["target"])

    @property
    def model_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.model.items() if name != "target"}

    @property
    def vocab_size(self) -> int | None:
        return self.model.get("vocab_size")


# --- what may change on resume --------------------------------------------------------------------

HARMLESS = (
    "mesh.*",
    "remat.*",
    "checkpoint.*",
    "profile.*",
    "batch.accumulation",
    "train.log_every",
    "train.eval_every",
    "train.max_minutes",
    "train.sample_*",
    "train.tensorboard",
    "data.cache_dir",
    "data.prefetch",
    "data.validation_tokens",
    "model.loss_chunk",
)


def harmless_on_resume(run: RunConfig) -> tuple[str, ...]:
    """Returns the patterns of keys whose change leaves the losses what they are."""
    if optimizers.depends_on_train_steps(run.optimizer):
        return HARMLESS
    return (*HARMLESS, "train.steps")


def run_fingerprint(run: RunConfig) -> str:
    """Returns the hash of all that determines the losses."""
    flat = configs.flatten(configs.to_config_dict(run))
    return configs.fingerprint(flat, ignore=harmless_on_resume(run))


# --- config files and flags -> RunConfig ----------------------------------------------------------


def default_config(target: str = registry.DEFAULT_TARGET) -> ConfigDict:
    """Returns the defaults of a run of the target's model; config files change it and return it."""
    config = configs.to_config_dict(RunConfig())
    with config.unlocked():
        config.model = _model_defaults(target)
    return config


def _model_defaults(target: str) -> dict[str, Any]:
    schema = configs.schema_of(registry.options_class(registry.find_model(target)))
    # An option without a default is left out: setting it is then required.
    known = {p: f.default for p, f in schema.items() if f.default is not configs.MISSING}
    return {"target": target, **known}


def full_schema(target: str) -> Schema:
    """Returns every field of a run of this model, in order."""
    schema = configs.schema_of(RunConfig)
    options = registry.options_class(registry.find_model(target))
    doc = "class, package.module:Class"
    schema["model.target"] = configs.Field("model.target", str, registry.DEFAULT_TARGET, doc)
    return schema | configs.schema_of(options, "model.")


def sized(config: ConfigDict, size: str | None) -> ConfigDict:
    """Returns a shipped config as it is, or for size "tiny" as a CPU minute of the same family.

    Raises:
      ConfigError: another size.
    """
    if size not in (None, "tiny"):
        raise ConfigError(f"--config NAME:{size}: no such size; use NAME or NAME:tiny")
    if size == "tiny":
        grouped = config.model.num_kv_heads < config.model.num_heads
        tiny = _TINY | {"model.num_kv_heads": 2 if grouped else 4}
        with config.ignore_type():
            config.update_from_flattened_dict(tiny)
    return config


_TINY: dict[str, Any] = {
    "train.steps": 200,
    "train.eval_every": 0,
    "batch.global_size": 16,
    "batch.sequence_length": 128,
    "precision.compute": "float32",
    "remat.policy": "dots",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 20,
    "data.source": "stdlib",
    "model.vocab_size": 256,
    "model.num_layers": 4,
    "model.d_model": 128,
    "model.d_ff": 384,
    "model.num_heads": 4,
    "model.head_dim": 32,
}


def from_config(config: ConfigDict | Mapping) -> RunConfig:
    """Returns the RunConfig that a (possibly edited) ConfigDict describes.

    Raises:
      ConfigError: unknown keys and wrong types, all at once.
    """
    flat = configs.flatten(config)
    target = flat.get("model.target", registry.DEFAULT_TARGET)
    return configs.from_config_dict(
        RunConfig, configs.unflatten(configs.resolve(flat, full_schema(str(target))))
    )


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> tuple[argparse.Namespace, RunConfig]:
    """Returns a command's own flags and the RunConfig of `--config NAME --config.a.b=value ...`.

    With `--config` and `--help`, lists every field with type, default and meaning.

    Raises:
      ConfigError: everything wrong with the config, at once.
    """
    parser.add_argument("--config", help="packaged name or path, with optional :argument")
    argv = list(sys.argv[1:] if arguments is None else arguments)
    overrides, rest, faults = _take_overrides(argv)
    asks_help = "--help" in rest or "-h" in rest
    flags, unknown = _own_flags(parser, [a for a in rest if a not in ("--help", "-h")])
    if asks_help:
        parser.print_help()
    if flags.config is None:
        if asks_help:
            raise SystemExit(0)
        raise ConfigError("--config is missing: name one, e.g. --config quickstart")
    config = _retarget(configs.load(flags.config, folders=configs.packaged_folders()), overrides)
    schema = full_schema(_target(config))
    if asks_help:
        print("\n" + configs.help_text(config, schema))
        raise SystemExit(0)
    try:
        configs.apply_overrides(config, overrides, schema)
    except ConfigError as error:
        faults += error.faults
    if faults or unknown:
        raise ConfigError(unknown + faults)
    return flags, from_config(config)


def _take_overrides(argv: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the --config.a.b=value overrides (or --config.a.b value), the rest, and faults."""
    overrides, rest, faults = {}, [], []
    items = deque(argv)
    while items:
        if not (item := items.popleft()).startswith("--config."):
            rest.append(item)
            continue
        path, equals, value = item.removeprefix("--config.").partition("=")
        if equals:
            overrides[path] = value
        elif items and not items[0].startswith("--"):
            overrides[path] = items.popleft()
        else:
            faults.append(f"{path}: has no value; write --config.{path}=VALUE")
    return overrides, rest, faults


def _own_flags(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns a command's own flags, and a fault for each argument that is none."""
    parser.exit_on_error = False  # its exit code would be 2
    try:
        flags, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --help lists the flags") from None
    names = ["--" + name.replace("_", "-") for name in vars(flags)]
    return flags, [
        f"{item}: no such flag;{configs.suggest(item.partition('=')[0], names)} --help lists them"
        for item in unknown
    ]


def _target(config: ConfigDict) -> str:
    return configs.flatten(config).get("model.target", registry.DEFAULT_TARGET)


def _retarget(config: ConfigDict, overrides: Mapping[str, str]) -> ConfigDict:
    """Returns the config with the model's fields of an overridden target, which is read first."""
    target = overrides.get("model.target", _target(config))
    if target != _target(config):
        with config.unlocked():
            config.model = _model_defaults(target)
    return config


# --- validation -----------------------------------------------------------------------------------


def validate(
    run: RunConfig, devices: Sequence[jax.Device], *, with_data: bool = True
) -> tuple[MeshShape, Rules, ModelSpec]:
    """Returns the resolved mesh, its rules and the model's spec, all checked against each other.

    Args:
      with_data: False leaves `data.*` unchecked, for what looks at a run without a corpus.

    Raises:
      ConfigError: every fault of the run, each with its cure.
    """
    faults = list(_faults(run)) + (run.data.faults() if with_data else [])
    shape = None
    try:
        shape = resolve_mesh(run.mesh, len(devices), _num_slices(run.mesh, devices))
        faults += _batch_faults(run.batch, shape)
    except ConfigError as error:
        faults += error.faults
    if shape is None or registry.option_faults(run.model_class, run.model_options):
        raise ConfigError(faults)
    spec = describe(registry.build_function(run.model_class, run.model_options))
    rules = build_rules(run.mesh, shape)
    try:
        place(spec.named_parameters(), rules)
    except ConfigError as error:
        faults += _merged(error.faults)
    if faults:
        raise ConfigError(faults)
    return shape, rules, spec


def _num_slices(mesh: MeshConfig, devices: Sequence[jax.Device]) -> int:
    """Returns the slices among the devices; on emulated ones, as many as the mesh asks for."""
    found = 1 if devices[0].platform == "cpu" else count_slices(devices)
    asked = [n for axis, n in vars(mesh.dcn).items() if axis != "force" and n > 1]
    return found if found > 1 else math.prod(asked)


def _merged(faults: Iterable[str]) -> list[str]:
    """Returns the faults `parameter: text`, one for all parameters of the same text."""
    parameters: dict[str, list[str]] = {}
    for fault in faults:
        parameter, _, text = fault.partition(": ")
        parameters.setdefault(text, []).append(parameter)
    return [
        f"{first}{f' and {len(more)} more' if more else ''}: {text}"
        for text, (first, *more) in parameters.items()
    ]


def _faults(run: RunConfig) -> Iterator[str]:
    """Yields what is wrong without knowing any devices."""
    positive = [("train.steps", run.train.steps), ("train.log_every", run.train.log_every)]
    positive += [(f"batch.{name}", size) for name, size in vars(run.batch).items()]
    yield from (f"{name}={value}: must be >= 1" for name, value in positive if value < 1)
    if run.train.max_minutes < 0 or run.train.eval_every < 0:
        yield "train.max_minutes and train.eval_every must be >= 0 (0 = off)"
    if not 0 <= run.train.ema_decay < 1:
        yield f"train.ema_decay={run.train.ema_decay}: must be in [0, 1); 0 keeps no average"
    if run.train.tensorboard and find_spec("tensorboardX") is None:
        yield 'train.tensorboard needs tensorboardX: pip install "jaxdist[tensorboard]"'
    if run.profile.start_step < 0 or run.profile.num_steps < 1:
        yield "profile.start_step must be >= 0 (0 = no profile) and profile.num_steps >= 1"
    yield from remat.faults(run.remat)
    yield from optimizers.faults(run.optimizer, run.train.steps)
    yield from checkpoint_config.faults(run.checkpoint)
    yield from registry.option_faults(run.model_class, run.model_options)
    yield from _sequence_faults(run)


def _sequence_faults(run: RunConfig) -> Iterator[str]:
    rows, length = run.model.get("max_positions", 0), run.batch.sequence_length
    if run.model.get("positions") == "learned" and 0 < rows < length:
        yield (
            f"batch.sequence_length={length} is longer than the model's learned positions "
            f"(model.max_positions={rows}); shorten the sequence or raise model.max_positions"
        )


def _batch_faults(batch: BatchConfig, shape: MeshShape) -> Iterator[str]:
    unit = batch.accumulation * shape.batch_shards
    if min(unit, batch.global_size) < 1 or batch.global_size % unit == 0:
        return
    below, above = batch.global_size // unit * unit, -(-batch.global_size // unit) * unit
    legal = f"{below} or {above}" if below else f"{above}"
    yield (
        f"batch.global_size={batch.global_size} is not divisible by accumulation "
        f"{batch.accumulation} x batch shards {shape.batch_shards} (data x fsdp x expert) = "
        f"{unit}; nearest legal sizes: {legal}"
    )


# --- building -------------------------------------------------------------------------------------


def build_step(run: RunConfig, spec: ModelSpec, mesh: Mesh, rules: Rules) -> TrainStep:
    """Returns the train step of a validated run on a mesh: the one that everything uses."""
    schedule = optimizers.build_schedule(run.optimizer, run.train.steps, run.batch.global_size)
    step = StepConfig(
        seed=run.seed,
        accumulation=run.batch.accumulation,
        compute=run.precision.compute,
        params=run.precision.params,
        remat=run.remat.policy,
        ema_decay=run.train.ema_decay,
    )
    return build_train_step(spec, run.optimizer, schedule, mesh, rules, step)


def text_batch(run: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a batch of `size` sequences, as text datasets make it."""
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32", "positions": "int32"}
    if run.data.packing == "documents":
        dtypes["segment_ids"] = "int32"
    dims = (size, run.batch.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(dims, dtype) for name, dtype in dtypes.items()}
    return batch | {"sample": jax.ShapeDtypeStruct((size,), "int32")}


def batch_arithmetic(run: RunConfig, shape: MeshShape) -> str:
    """Returns the one line that says how the global batch is made up."""
    batch = run.batch
    each = batch.global_size // (batch.accumulation * shape.batch_shards)
    return (
        f"batch: {batch.global_size} sequences a step = {batch.accumulation} accumulation x "
        f"{shape.batch_shards} batch shards x {each} per device; "
        f"x {batch.sequence_length} tokens = "
        f"{batch.global_size * batch.sequence_length:,} tokens a step"
    )


def main_with_config_errors(main: Callable[[], int]) -> None:
    """Runs a command's main and exits: with its code, or 78 and one line per fault."""
    try:
        raise SystemExit(main())
    except ConfigError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        raise SystemExit(configs.EXIT_CONFIG) from None
