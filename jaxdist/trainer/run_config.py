"""RunConfig: the whole of a run, composed of its components' configs, and the rules
between them.

The only place where one component's values are checked against another's. All faults
are reported at once, before anything compiles.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import schema
from jaxdist.config.annotations import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
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
from jaxdist.data import DataConfig
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

    steps: PositiveInt = 1000  # optimizer updates
    # minutes of training after which the run stops; 0 = no end
    max_minutes: NonNegativeFloat = 0.0
    log_every: PositiveInt = 10  # steps between rows of metrics.jsonl
    # steps between evaluations; 0 = never, > 0 also at the end
    eval_every: NonNegativeInt = 0
    # evaluations no better than the best, by checkpoint.keep_best or eval_loss, that
    # end the run; 0 = any
    patience: NonNegativeInt = 0
    ema_decay: Share = 0.0  # moving average of the parameters, e.g. 0.999; 0 = none
    # tensorboard, wandb, trackio, another package's, package.module:Class
    loggers: tuple[str, ...] = ()
    # tokens of sample text written at the end; 0 = no sample
    sample_tokens: NonNegativeInt = 0
    sample_prompt: str = "\n"  # what the sample goes on from


@dataclass(frozen=True)
class BatchConfig:
    """The global batch: global_size = accumulation x batch shards x sequences per
    device.
    """

    global_size: PositiveInt = 16  # sequences per step
    sequence_length: PositiveInt = 128  # tokens per sequence
    accumulation: PositiveInt = 1  # sequential parts of a step, divides global_size


@dataclass(frozen=True)
class InitConfig:
    """What a run begins with."""

    # folder with config.json and safetensors: its model and weights; "" = random
    from_huggingface: str = ""
    # FOLDER[@STEP], a workdir or checkpoints of another run: its model and weights
    from_run: str = ""
    # with from_run: also its optimizer's state; step, schedule and data begin at 0
    optimizer: bool = False

    def faults(self) -> Iterator[str]:
        """Yields what is wrong between the values, each with its cure."""
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
    train: TrainConfig = field(default_factory=TrainConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    model: Mapping[str, Any] = field(default_factory=dict)
    init: InitConfig = field(default_factory=InitConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

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

HARMLESS = (  # patterns of keys whose change leaves the losses so far what they are
    "mesh.*",
    "remat.*",
    "pipeline.*",
    "context.*",
    "offload.*",
    "checkpoint.*",
    "profile.*",
    "telemetry.*",
    "watchdog.*",
    "resilience.*",
    "health.*",
    "batch.accumulation",
    "train.steps",  # raising it extends the schedule, see `optim.schedules.extend`
    "train.log_every",
    "train.eval_every",
    "train.patience",
    "train.sample_*",
    "train.loggers",
    "train.max_minutes",
    "data.balance",  # of one batch's rows, which keep their sample's randomness
    "data.cache_dir",
    "data.prefetch",
    "data.validation_tokens",
    "model.loss_chunk",
)


def run_fingerprint(run: RunConfig) -> str:
    """Returns the hash of all that determines the losses, but for how long the
    run is.
    """
    return schema.fingerprint(
        schema.flatten(schema.to_config_dict(run)), ignore=HARMLESS
    )


# --- config files and flags -> RunConfig ----------------------------------------------


def default_config(target: str = registry.DEFAULT_TARGET) -> ConfigDict:
    """Returns the defaults of a run of the target's model; config files change it and
    return it.
    """
    config = schema.to_config_dict(RunConfig())
    with config.unlocked():
        config.model = model_defaults(target)
    return config


def model_defaults(target: str) -> dict[str, Any]:
    fields = schema.schema_of(registry.options_class(registry.find_model(target)))
    # An option without a default is left out: setting it is then required.
    known = {p: f.default for p, f in fields.items() if f.default is not schema.MISSING}
    return {"target": target, **known}


def full_schema(target: str) -> schema.Schema:
    """Returns every field of a run of this model, in order."""
    fields = schema.schema_of(RunConfig)
    options = registry.options_class(registry.find_model(target))
    doc = "class, package.module:Class"
    fields["model.target"] = schema.Field(
        "model.target", str, registry.DEFAULT_TARGET, doc
    )
    return fields | schema.schema_of(options, "model.")


def from_config(config: ConfigDict | Mapping) -> RunConfig:
    """Returns the RunConfig that a (possibly edited) ConfigDict describes.

    Raises:
      ConfigError: unknown keys and wrong types, all at once.
    """
    flat = schema.flatten(config)
    target = flat.get("model.target", registry.DEFAULT_TARGET)
    return schema.from_config_dict(
        RunConfig, schema.unflatten(schema.resolve(flat, full_schema(str(target))))
    )
