"""RunConfig: the config of a run, composed of the configs of its components."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from flax import nnx
from ml_collections import ConfigDict

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import schema
from jaxdist.config.annotations import (
    NamesWeights,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Resume,
    Searched,
    Seed,
    Share,
)
from jaxdist.config.groups import (
    HealthConfig,
    ProfileConfig,
    ResilienceConfig,
    TelemetryConfig,
    WatchdogConfig,
)
from jaxdist.data.config import DataConfig
from jaxdist.models import registry
from jaxdist.models.lora import LoraConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.context import ContextConfig
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.offload import OffloadConfig
from jaxdist.parallel.pipeline.partition import PipelineConfig
from jaxdist.parallel.precision import PrecisionConfig
from jaxdist.parallel.remat import RematConfig
from jaxdist.protocols.param_names import ShardingConfig

Build = Callable[[nnx.Rngs], nnx.Module]


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and how often to look."""

    # on resume, more steps extend the schedule: see `optim.schedules.extend`
    steps: Annotated[PositiveInt, Resume("harmless")] = 1000  # optimizer updates
    # minutes of training after which the run stops; 0 = no end
    max_minutes: Annotated[NonNegativeFloat, Resume("harmless")] = 0.0
    # steps between rows of metrics.jsonl
    log_every: Annotated[PositiveInt, Resume("harmless")] = 10
    # steps between evaluations; 0 = never, > 0 also at the end
    eval_every: Annotated[NonNegativeInt, Resume("harmless")] = 0
    # evaluations no better than the best, by checkpoint.keep_best or eval_loss, that
    # end the run; 0 = any
    patience: Annotated[
        NonNegativeInt, Resume("harmless"), Needs("jaxdist.trainer.best.KeepBest")
    ] = 0
    ema_decay: Share = 0.0  # moving average of the parameters, e.g. 0.999; 0 = none
    # tensorboard, wandb, trackio, another package's, package.module:Class
    loggers: Annotated[
        tuple[str, ...], Resume("harmless"), Needs("jaxdist.trainer.loggers.Loggers")
    ] = ()
    # tokens of sample text written at the end; 0 = no sample
    sample_tokens: Annotated[
        NonNegativeInt, Resume("harmless"), Needs("jaxdist.inference.sample.Sample")
    ] = 0
    # what the sample goes on from
    sample_prompt: Annotated[str, Resume("harmless")] = "\n"


@dataclass(frozen=True)
class BatchConfig:
    """The global batch: accumulation x batch shards x sequences per device."""

    global_size: PositiveInt = 16  # sequences per step
    sequence_length: PositiveInt = 128  # tokens per sequence
    # sequential parts of a step, divides global_size
    accumulation: Annotated[PositiveInt, Resume("harmless"), Searched()] = 1


@dataclass(frozen=True)
class InitConfig:
    """The weights that a run starts from."""

    # folder with config.json and safetensors: its model and weights; "" = random
    from_huggingface: Annotated[str, NamesWeights()] = ""
    # FOLDER[@STEP], a workdir or checkpoints of another run: its model and weights
    from_run: Annotated[str, NamesWeights()] = ""
    # with from_run: also its optimizer's state; step, schedule and data begin at 0
    optimizer: bool = False

    def faults(self) -> Iterator[str]:
        """Yields the faults between the values."""
        if self.from_run and self.from_huggingface:
            yield (
                f"init.from_run={self.from_run} and init.from_huggingface={self.from_huggingface}: a run "
                f"begins with one set of weights; leave one of them out"
            )
        if self.optimizer and not self.from_run:
            yield "init.optimizer: there is no run to take its state from; set init.from_run"


@dataclass(frozen=True)
class RunConfig:
    """A run, resolved. `model` holds the options of `model.target`'s class."""

    seed: Seed = 0  # of everything random: init, data order, dropout
    train: TrainConfig = TrainConfig()
    batch: BatchConfig = BatchConfig()
    mesh: Annotated[MeshConfig, Resume("harmless")] = MeshConfig()
    sharding: ShardingConfig = ShardingConfig()
    model: Mapping[str, Any] = field(default_factory=dict)
    init: InitConfig = InitConfig()
    precision: PrecisionConfig = PrecisionConfig()
    remat: Annotated[RematConfig, Resume("harmless")] = RematConfig()
    pipeline: Annotated[PipelineConfig, Resume("harmless")] = PipelineConfig()
    context: Annotated[ContextConfig, Resume("harmless")] = ContextConfig()
    offload: Annotated[OffloadConfig, Resume("harmless")] = OffloadConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    checkpoint: Annotated[CheckpointConfig, Resume("harmless")] = CheckpointConfig()
    watchdog: Annotated[
        WatchdogConfig,
        Resume("harmless"),
        Needs("jaxdist.operations.watch.watchdog.Watchdog"),
    ] = WatchdogConfig()
    resilience: Annotated[ResilienceConfig, Resume("harmless")] = ResilienceConfig()
    health: Annotated[HealthConfig, Resume("harmless")] = HealthConfig()
    profile: Annotated[ProfileConfig, Resume("harmless")] = ProfileConfig()
    telemetry: Annotated[TelemetryConfig, Resume("harmless")] = TelemetryConfig()

    @property
    def model_class(self) -> type:
        return registry.find_model(self.model["target"])

    @property
    def model_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.model.items() if name != "target"}

    @property
    def model_config(self) -> Any:
        """The options as the model's Config, with its hooks; None if it has none."""
        return registry.model_config(self.model_class, self.model_options)

    @property
    def vocab_size(self) -> int | None:
        return self.model.get("vocab_size")


# --- what may change on resume --------------------------------------------------------


def keys_that_may_change(run: RunConfig) -> set[str]:
    """Lists the keys that a run may resume with other values of."""
    fields = full_schema(run.model.get("target", registry.DEFAULT_TARGET))
    return {path for path, field in fields.items() if field.may_change_on_resume}


def run_fingerprint(run: RunConfig) -> str:
    """Hashes the values that determine a run's losses.

    Values that may change on resume are left out, such as the number of steps.
    """
    values = schema.flatten(schema.to_config_dict(run))
    for path in keys_that_may_change(run):
        values.pop(path, None)
    return schema.fingerprint(values)


# --- config files and flags -> RunConfig ----------------------------------------------


def default_config(target: str = registry.DEFAULT_TARGET) -> ConfigDict:
    """Makes the default config of a run with the target's model, for config files."""
    config = schema.to_config_dict(RunConfig())
    with config.unlocked():
        config.model = model_defaults(target)
    return config


def model_defaults(target: str) -> dict[str, Any]:
    """Makes the group `model` of the target's defaults.

    Options without a default are left out: a run must set them.
    """
    values: dict[str, Any] = {}
    options = registry.options_class(registry.find_model(target))
    for name, option in schema.schema_of(options).items():
        if option.default is not schema.MISSING:
            values[name] = option.default
    return {"target": target, **schema.unflatten(values)}


def full_schema(target: str) -> schema.Schema:
    """Lists every key of a run of the target's model, in order."""
    target_key = schema.Field(
        path="model.target",
        type=str,
        default=registry.DEFAULT_TARGET,
        meaning="class, package.module:Class",
    )
    options = registry.options_class(registry.find_model(target))
    return {
        **schema.schema_of(RunConfig),
        target_key.path: target_key,
        **schema.schema_of(options, "model."),
    }


def from_config(config: ConfigDict | Mapping) -> RunConfig:
    """Makes the RunConfig of a config.

    Raises:
      ConfigError: unknown keys and wrong types, all at once.
    """
    flat = schema.flatten(config)
    target = str(flat.get("model.target", registry.DEFAULT_TARGET))
    values = schema.resolve(flat, full_schema(target))
    return schema.from_config_dict(RunConfig, schema.unflatten(values))
