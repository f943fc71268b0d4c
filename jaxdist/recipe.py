"""RunConfig: the whole of a run, composed of its components' configs, and the rules between them.

The only place where one component's values are checked against another's. All faults are reported
at once, before anything compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdist import config as configs
from jaxdist.checkpoint import config as checkpoint_config
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import ConfigError, Schema
from jaxdist.data import DataConfig, sample_shapes
from jaxdist.models import lora as adapters
from jaxdist.models import registry
from jaxdist.models.lora import LoraConfig
from jaxdist.optim import config as optim_config
from jaxdist.optim import optimizers, schedules
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel import remat
from jaxdist.parallel.mesh import MeshConfig, MeshShape, count_slices, resolve_mesh
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.parallel.placement import Placement, place
from jaxdist.parallel.precision import PrecisionConfig
from jaxdist.parallel.remat import RematConfig
from jaxdist.parallel.sharding import Rules, build_rules
from jaxdist.protocols.model_spec import ModelSpec, describe, stored_dtype
from jaxdist.protocols.param_names import ShardingConfig
from jaxdist.resilience import health, watchdog
from jaxdist.resilience.health import HealthConfig
from jaxdist.resilience.watchdog import WatchdogConfig
from jaxdist.step.model_checks import examine
from jaxdist.step.train_step import StepConfig, TrainStep, build_train_step
from jaxdist.telemetry.profile import ProfileConfig

Build = Callable[[nnx.Rngs], nnx.Module]


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
class InitConfig:
    """What a run begins with."""

    from_huggingface: str = ""  # folder with config.json and safetensors: its model and weights; "" = random


@dataclass(frozen=True)
class RunConfig:
    """A run, resolved. `model` holds the options of `model.target`'s class."""

    seed: int = 0  # of everything random: init, data order, dropout
    train: TrainConfig = field(default_factory=TrainConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    init: InitConfig = field(default_factory=InitConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
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
    "pipeline.*",
    "checkpoint.*",
    "profile.*",
    "watchdog.*",
    "health.*",
    "batch.accumulation",
    "train.log_every",
    "train.eval_every",
    "train.sample_*",
    "train.tensorboard",
    "data.cache_dir",
    "data.prefetch",
    "data.validation_tokens",
    "model.loss_chunk",
)


def harmless_on_resume(run: RunConfig) -> tuple[str, ...]:
    """Returns the patterns of keys whose change leaves the losses what they are."""
    if schedules.depends_on_train_steps(run.optimizer):
        return HARMLESS
    return (*HARMLESS, "train.steps", "train.max_minutes")


def run_fingerprint(run: RunConfig) -> str:
    """Returns the hash of all that determines the losses."""
    flat = configs.flatten(configs.to_config_dict(run))
    return configs.fingerprint(flat, ignore=harmless_on_resume(run))


# --- config files and flags -> RunConfig ----------------------------------------------------------


def default_config(target: str = registry.DEFAULT_TARGET) -> ConfigDict:
    """Returns the defaults of a run of the target's model; config files change it and return it."""
    config = configs.to_config_dict(RunConfig())
    with config.unlocked():
        config.model = model_defaults(target)
    return config


def model_defaults(target: str) -> dict[str, Any]:
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


# --- validation -----------------------------------------------------------------------------------


def validate(
    run: RunConfig, devices: Sequence[jax.Device], *, with_data: bool = True, build: Build | None = None
) -> tuple[MeshShape, Rules, ModelSpec]:
    """Returns `validate_on` of these devices, and looks at the model's loss where `model.*` makes it."""
    found = validate_on(run, len(devices), _num_slices(run.mesh, devices), with_data=with_data, build=build)
    shape, _, spec = found
    parts, stages = run.batch.accumulation * num_microbatches(run, shape), shape.sizes["pipeline"]
    about = run.model.items(), run.batch, run.data, run.optimizer.frozen, run.lora, run.init
    key = repr((*about, parts, stages))
    if build or key not in _examined:
        batch = batch_shapes(run, run.batch.global_size // parts)
        if faults := examine(spec, batch, accumulation=run.batch.accumulation, stages=stages):
            raise ConfigError(faults)
        if not build:
            _examined.add(key)
    return found


_examined: set[str] = set()  # what was found to be without fault


def validate_on(
    run: RunConfig,
    num_devices: int,
    num_slices: int | None = None,
    *,
    with_data: bool = True,
    build: Build | None = None,
) -> tuple[MeshShape, Rules, ModelSpec]:
    """Returns the resolved mesh, its rules and the model's spec, all checked against each other.

    Args:
      num_slices: of the devices; None where the hardware has none: as many as the mesh asks for.
      with_data: False leaves `data.*` unchecked, for what looks at a run without a corpus.
      build: makes the model from its rngs; default: what `model.*` says.

    Raises:
      ConfigError: every fault of the run, each with its cure.
    """
    faults = list(_faults(run)) + (run.data.faults() if with_data else [])
    shape = None
    try:
        shape = resolve_mesh(run.mesh, num_devices, num_slices or _asked_slices(run.mesh))
    except ConfigError as error:
        faults += error.faults
    unbuildable = registry.option_faults(run.model_class, run.model_options) + list(adapters.faults(run.lora))
    unbuildable += optim_config.faults(run.optimizer)  # patterns, which describe reads
    if shape is None or unbuildable:
        raise ConfigError(faults)
    spec = model_spec(run, build)
    faults += [*_batch_faults(run, shape), *optimizers.group_faults(run.optimizer, spec.named_trainable())]
    rules = build_rules(run.mesh, shape, vocab_over_stages=shares_vocabulary(run, spec))
    misfits = list(_pipeline_faults(run, shape, spec))
    try:
        place(spec.named_parameters(), rules) if misfits else placements(run, spec, rules)
    except ConfigError as error:
        misfits += _merged(error.faults)
    if faults + misfits:
        raise ConfigError(faults + misfits)
    return shape, rules, spec


def shares_vocabulary(run: RunConfig, spec: ModelSpec) -> bool:
    """Returns whether a pipeline's stages split the vocabulary: only `jaxdist.ops` know their part."""
    return run.pipeline.edges == "sharded" and getattr(spec.model_class, "casts_itself", False)


def model_spec(run: RunConfig, build: Build | None = None) -> ModelSpec:
    """Returns the spec of a run's model, with its adapters.

    Raises:
      ConfigError: it cannot be built so.
    """
    build = adapters.adapted(build or registry.build_function(run.model_class, run.model_options), run.lora)
    return describe(build, frozen=run.optimizer.frozen, rules=run.sharding.rules)


def _num_slices(mesh: MeshConfig, devices: Sequence[jax.Device]) -> int:
    """Returns the slices among TPUs; elsewhere there are none, so as many as the mesh asks for."""
    return count_slices(devices) if devices[0].platform == "tpu" else _asked_slices(mesh)


def _asked_slices(mesh: MeshConfig) -> int:
    return math.prod(n for axis, n in vars(mesh.dcn).items() if axis != "force" and n > 1)


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
    if not 0 <= run.train.max_minutes < math.inf or run.train.eval_every < 0:
        yield "train.max_minutes and train.eval_every must be >= 0 (0 = off)"
    yield from _sample_faults(run)
    if not 0 <= run.train.ema_decay < 1:
        yield f"train.ema_decay={run.train.ema_decay}: must be in [0, 1); 0 keeps no average"
    if run.train.tensorboard and find_spec("tensorboardX") is None:
        yield 'train.tensorboard needs tensorboardX: pip install "jaxdist[tensorboard]"'
    if run.profile.start_step < 0 or run.profile.num_steps < 1:
        yield "profile.start_step must be >= 0 (0 = no profile) and profile.num_steps >= 1"
    yield from remat.faults(run.remat)
    yield from optim_config.faults(run.optimizer, run.train.steps)
    yield from adapters.faults(run.lora)
    if run.lora.from_peft and not run.init.from_huggingface:
        yield "lora.from_peft needs the model that it adapts; set init.from_huggingface"
    yield from checkpoint_config.faults(run.checkpoint)
    yield from watchdog.faults(run.watchdog)
    yield from health.faults(run.health)
    yield from registry.option_faults(run.model_class, run.model_options)
    yield from _sequence_faults(run)


def _sample_faults(run: RunConfig) -> Iterator[str]:
    train, rows = run.train, run.model.get("max_positions", 0)
    if train.sample_tokens < 0:
        yield f"train.sample_tokens={train.sample_tokens}: must be >= 0 (0 = no sample)"
    if train.sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt is empty; give the sample something to go on from"
    longest = len(train.sample_prompt.encode()) + train.sample_tokens
    if run.model.get("positions") == "learned" and train.sample_tokens and 0 < rows < longest:
        yield (
            f"train.sample_tokens={train.sample_tokens} and its prompt are longer than the learned "
            f"positions (model.max_positions={rows}); lower it"
        )


def _sequence_faults(run: RunConfig) -> Iterator[str]:
    rows, length = run.model.get("max_positions", 0), run.batch.sequence_length
    if run.model.get("positions") == "learned" and 0 < rows < length:
        yield (
            f"batch.sequence_length={length} is longer than the model's learned positions "
            f"(model.max_positions={rows}); shorten the sequence or raise model.max_positions"
        )


def _pipeline_faults(run: RunConfig, shape: MeshShape, spec: ModelSpec) -> Iterator[str]:
    if shape.sizes["pipeline"] == 1:
        return
    if not spec.staged:
        model = run.model.get("name", run.model["target"])
        yield (
            f"mesh.pipeline={shape.sizes['pipeline']}: {model} has no stages (embed, blocks, head); "
            f"write it so, or set mesh.pipeline=1"
        )
        return
    cut = staging(run, spec, shape)
    assert cut is not None
    yield from cut.faults()


def _batch_faults(run: RunConfig, shape: MeshShape) -> Iterator[str]:
    batch, flow = run.batch, num_microbatches(run, shape)
    unit = batch.accumulation * flow * shape.batch_shards
    if min(unit, batch.global_size) < 1 or batch.global_size % unit == 0:
        return
    below, above = batch.global_size // unit * unit, -(-batch.global_size // unit) * unit
    legal = f"{below} or {above}" if below else f"{above}"
    yield (
        f"batch.global_size={batch.global_size} is not divisible by accumulation {batch.accumulation} x "
        f"{f'microbatches {flow} x ' if flow > 1 else ''}batch shards {shape.batch_shards} "
        f"(data x fsdp x expert) = {unit}; nearest legal sizes: {legal}"
    )


# --- building -------------------------------------------------------------------------------------


def build_step(
    run: RunConfig, spec: ModelSpec, mesh: Mesh, rules: Rules, *,
    optimizer: optax.GradientTransformation | None = None,
) -> TrainStep:  # fmt: skip
    """Returns the train step of a validated run on a mesh: the one that everything uses.

    An `optimizer` that is given stands for that of the config.
    """
    schedule = schedules.build_schedule(run.optimizer, run.train.steps, run.batch.global_size)
    step = StepConfig(
        seed=run.seed,
        accumulation=run.batch.accumulation,
        compute=run.precision.compute,
        params=run.precision.params,
        reduce=run.precision.reduce,
        remat=run.remat.policy,
        ema_decay=run.train.ema_decay,
        staging=staging(run, spec, rules.shape),
    )
    return build_train_step(spec, optimizer or run.optimizer, schedule, mesh, rules, step)


def staging(run: RunConfig, spec: ModelSpec, shape: MeshShape) -> Staging | None:
    """Returns how a pipeline cuts up the model's layers; None without one."""
    if shape.sizes["pipeline"] == 1:
        return None
    return Staging(run.pipeline, spec.depth, shape.sizes["pipeline"], spec.period)


def placements(run: RunConfig, spec: ModelSpec, rules: Rules) -> list[Placement]:
    """Returns where every parameter lies.

    Raises:
      ConfigError: dims that an axis does not divide.
    """
    cut = staging(run, spec, rules.shape)
    parameters = (cut.staged_spec(spec) if cut else spec).named_parameters()
    return place({path: (_as_stored(x, run), names) for path, (x, names) in parameters.items()}, rules)


def _as_stored(x: jax.ShapeDtypeStruct, run: RunConfig) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, stored_dtype(x, run.precision.params))


def batch_shapes(run: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a batch of `size` samples, as the run's dataset makes it."""
    sample = sample_shapes(run.data, run.batch.sequence_length).items()
    return {name: jax.ShapeDtypeStruct((size, *dims), dtype) for name, (dims, dtype) in sample}


def targets_per_sample(run: RunConfig) -> int:
    """Returns how many targets a sample has, which speeds and FLOPs are told by; images have one."""
    return math.prod(sample_shapes(run.data, run.batch.sequence_length).get("weights", ((), ""))[0])


def counts(run: RunConfig, spec: ModelSpec) -> str:
    """Returns how many parameters there are, and how many of them are trained."""
    return adapters.summary(spec.trainable, spec.frozen, run.lora) if run.lora.rank else spec.counts


def num_microbatches(run: RunConfig, shape: MeshShape) -> int:
    """Returns the microbatches of an accumulation step: 4 x stages by default, 1 without a pipeline."""
    stages = shape.sizes["pipeline"]
    return 1 if stages == 1 else run.pipeline.microbatches or 4 * stages


def batch_arithmetic(run: RunConfig, shape: MeshShape) -> str:
    """Returns the one line that says how the global batch is made up."""
    batch, flow = run.batch, num_microbatches(run, shape)
    each = batch.global_size // (batch.accumulation * flow * shape.batch_shards)
    unit, tokens = "samples", ""
    if run.data.is_text:
        total = batch.global_size * batch.sequence_length
        unit, tokens = "sequences", f"; x {batch.sequence_length} tokens = {total:,} tokens a step"
    return (
        f"batch: {batch.global_size} {unit} a step = {batch.accumulation} accumulation x "
        f"{f'{flow} microbatches x ' if flow > 1 else ''}{shape.batch_shards} batch shards x "
        f"{each} per device{tokens}"
    )
