"""The config of a run, composed of the configs of its components."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

from flax import nnx
from ml_collections import ConfigDict

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.config import assigned, redact, schema
from jaxdist.config.annotations import (
    NamesWeights,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    OutsideStep,
    PositiveInt,
    ReadWith,
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
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.context import ContextConfig
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.offload import OffloadConfig
from jaxdist.parallel.pipeline.partition import PipelineConfig
from jaxdist.parallel.precision import PrecisionConfig
from jaxdist.parallel.remat import RematConfig
from jaxdist.protocols.objective import Objective
from jaxdist.protocols.param_names import ShardingConfig

Build = Callable[[nnx.Rngs], nnx.Module]
Auto = Literal["auto"]
AUTO: Final = "auto"  # value of keys that a run may choose by its data


@dataclass(frozen=True)
class TrainedFor:
    """A function that makes a caller's model, with the objective to train it for."""

    build: Build
    objective: Objective
    modules: Mapping[str, Build]  # make the frozen modules of the objective, by name

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the model."""
        return self.build(rngs)


@dataclass(frozen=True)
class TrainConfig:
    """The length of training, and the intervals of logging and evaluation.

    More steps on resume extend the learning-rate schedule (`optim.schedules.extend`).
    """

    # optimizer updates
    steps: Annotated[PositiveInt, Resume("harmless"), OutsideStep()] = 1000
    # passes over the training data, in place of train.steps; 0 = as train.steps says
    epochs: Annotated[NonNegativeFloat, Resume("harmless"), OutsideStep()] = 0.0
    # minutes after which the run stops, counted from the opened data, with compilation,
    # evaluations, saves, and the time of earlier starts; 0 = no limit
    max_minutes: Annotated[NonNegativeFloat, Resume("harmless"), OutsideStep()] = 0.0
    # steps between rows of metrics.jsonl
    log_every: Annotated[PositiveInt, Resume("harmless"), OutsideStep()] = 10
    # steps between evaluations, with one more at the end; 0 = no evaluation; auto = ten
    # a run if data is held out. An automatic evaluation reads as many targets as
    # steps / 200 train on, at least a batch; data.validation_tokens sets the number.
    eval_every: Annotated[NonNegativeInt | Auto, Resume("harmless"), OutsideStep()] = (
        AUTO
    )
    # evaluations without a better checkpoint.keep_best (default eval_loss) after which
    # the run stops; 0 = no limit
    patience: Annotated[
        NonNegativeInt,
        Resume("harmless"),
        Needs("jaxdist.trainer.best.KeepBest"),
        OutsideStep(),
    ] = 0
    # decay of the moving average of the parameters, e.g. 0.999; 0 = no average
    ema_decay: Share = 0.0
    # tensorboard, wandb, trackio, a logger of another package, or package.module:Class
    loggers: Annotated[
        tuple[str, ...],
        Resume("harmless"),
        Needs("jaxdist.trainer.loggers.Loggers"),
        OutsideStep(),
    ] = ()
    # tokens of sample text written at the end; 0 = no sample; auto = 200 if the model
    # writes text and one process trains it
    sample_tokens: Annotated[
        NonNegativeInt | Auto,
        Resume("harmless"),
        Needs("jaxdist.inference.sample.Sample"),
        OutsideStep(),
    ] = AUTO
    # text that the sample continues; in chats a user's turn that it answers, blank = a
    # question of the data
    sample_prompt: Annotated[str, Resume("harmless"), OutsideStep()] = "\n"

    def faults(self) -> Iterator[str]:
        """Yields combinations of values that are invalid."""
        if self.epochs and self.steps != TrainConfig.steps:
            yield (
                f"train.steps={self.steps} and train.epochs={self.epochs:g}: both say how "
                f"long the run is; leave one of them out"
            )


@dataclass(frozen=True)
class BatchConfig:
    """The global batch, and the parts that a step cuts it into.

    Its size is accumulation x microbatches (1 without a pipeline) x batch shards x
    sequences of a part per device.
    """

    global_size: PositiveInt = 16  # sequences per step
    sequence_length: PositiveInt = 128  # tokens per sequence
    # parts of a batch that a step computes one after another; divides global_size
    accumulation: Annotated[PositiveInt, Resume("harmless"), Searched()] = 1


@dataclass(frozen=True)
class InitConfig:
    """The weights that a run starts from."""

    # folder with config.json and safetensors, for the model and its weights; "" =
    # random
    from_huggingface: Annotated[str, NamesWeights()] = ""
    # FOLDER[@STEP], a workdir or checkpoints, for the model and its weights; "" =
    # random
    from_run: Annotated[str, NamesWeights()] = ""
    # whether from_run also gives the optimizer's state; step and schedule begin at 0
    optimizer: bool = False
    # whether the data begin where from_run stands, and not at 0; needs the same data,
    # seed and batch.global_size
    data_position: bool = False
    # whether a run that names no weights fails
    required: Annotated[bool, Resume("harmless")] = False

    def faults(self) -> Iterator[str]:
        """Yields combinations of values that are invalid."""
        if self.from_run and self.from_huggingface:
            yield (
                f"init.from_run={self.from_run} and init.from_huggingface={self.from_huggingface}: a run "
                f"begins with one set of weights; leave one of them out"
            )
        if self.required and not (self.from_run or self.from_huggingface):
            yield (
                "init.required=true: this config trains weights that exist, and none are named. "
                "Add --config.init.from_huggingface=FOLDER (`hf download OWNER/MODEL "
                "--local-dir FOLDER` makes one), or --config.init.from_run=WORKDIR."
            )
        if self.optimizer and not self.from_run:
            yield "init.optimizer: there is no run to take its state from; set init.from_run"
        if self.data_position and not self.from_run:
            yield "init.data_position: there is no run to take its position from; set init.from_run"


@dataclass(frozen=True)
class RunConfig:
    """The config of a run. `model` holds the options of the class `model.target`."""

    # seed of everything random: initial values, data order, dropout
    seed: Annotated[Seed, OutsideStep()] = 0
    train: TrainConfig = TrainConfig()
    batch: BatchConfig = BatchConfig()
    mesh: Annotated[MeshConfig, Resume("harmless")] = MeshConfig()
    sharding: ShardingConfig = ShardingConfig()
    model: Mapping[str, Any] = field(default_factory=dict)
    init: Annotated[InitConfig, OutsideStep()] = InitConfig()
    precision: PrecisionConfig = PrecisionConfig()
    remat: Annotated[RematConfig, Resume("harmless")] = RematConfig()
    pipeline: Annotated[PipelineConfig, Resume("harmless")] = PipelineConfig()
    context: Annotated[ContextConfig, Resume("harmless")] = ContextConfig()
    offload: Annotated[OffloadConfig, Resume("harmless")] = OffloadConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig()
    checkpoint: Annotated[CheckpointConfig, Resume("harmless"), OutsideStep()] = (
        CheckpointConfig()
    )
    watchdog: Annotated[
        WatchdogConfig,
        Resume("harmless"),
        Needs("jaxdist.operations.watch.watchdog.Watchdog"),
        OutsideStep(),
    ] = WatchdogConfig()
    resilience: Annotated[ResilienceConfig, Resume("harmless"), OutsideStep()] = (
        ResilienceConfig()
    )
    health: Annotated[HealthConfig, Resume("harmless"), OutsideStep()] = HealthConfig()
    profile: Annotated[ProfileConfig, Resume("harmless"), OutsideStep()] = (
        ProfileConfig()
    )
    telemetry: Annotated[TelemetryConfig, Resume("harmless"), OutsideStep()] = (
        TelemetryConfig()
    )

    @property
    def model_class(self) -> type:
        """The class that `model.target` names."""
        return registry.find_model(self.model["target"])

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of the model, without `target`."""
        return {name: value for name, value in self.model.items() if name != "target"}

    @property
    def model_config(self) -> Any:
        """The options as the model's Config; None if the model has none."""
        return registry.model_config(self.model_class, self.model_options)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary's size; None if the model has no such option."""
        return self.model.get("vocab_size")


def document_of(config: RunConfig) -> dict[str, Any]:
    """Makes the document of a config, without the secrets of its URLs.

    This is what is stored, logged and compared. A start that needs a URL with a secret
    takes it from the command line.
    """
    document = redact.redacted(schema.to_config_dict(config).to_dict())
    assert isinstance(document, dict)
    return document


def values_of(config: RunConfig) -> dict[str, Any]:
    """Lists the values of a config by key, without the secrets of its URLs."""
    return schema.flatten(document_of(config))


# --- what may change on resume --------------------------------------------------------


def keys_that_may_change(config: RunConfig) -> set[str]:
    """Lists the keys whose values may change when a run resumes."""
    fields = full_schema(config.model.get("target", registry.DEFAULT_TARGET))
    return {path for path, field in fields.items() if field.may_change_on_resume}


def run_fingerprint(config: RunConfig) -> str:
    """Hashes the values that determine a run's losses.

    The hash skips values that may change on resume, such as the number of steps.
    """
    values = values_of(config)
    for path in keys_that_may_change(config):
        values.pop(path, None)
    return schema.fingerprint(values)


def keys_outside_step() -> list[str]:
    """Lists the keys that change neither a step's program nor its speed."""
    keys = schema.schema_of(RunConfig)
    return [path for path, key in keys.items() if key.mark(OutsideStep)]


def unread_options(config: RunConfig) -> Iterator[str]:
    """Yields why options that are set have no effect: conditions that do not hold.

    A line names one option and one condition (`ReadWith`). The option may come from a
    packaged config whose other options the user has changed, which needs no fix.
    """
    for path, key in schema.schema_of(RunConfig).items():
        value = attrgetter(path)(config)
        if value == key.default:
            continue
        for condition in key.all_marks(ReadWith):
            chosen = attrgetter(condition.key)(config)
            if chosen not in condition.values:
                yield (
                    f"{path}={value} has no effect: {condition.key}={chosen} does not "
                    f"read it, only {', '.join(condition.values)}. If you set it, leave "
                    f"it out, or change {condition.key}."
                )


# --- config files and flags -> RunConfig ----------------------------------------------


def default_config(target: str = registry.DEFAULT_TARGET) -> ConfigDict:
    """Makes the default config of a run that trains a model, for config files.

    It records the keys that a config file assigns; see `config.assigned`.

    Args:
      target: the model's class, package.module:Class.
    """
    values = schema.to_config_dict(RunConfig()).to_dict()
    return assigned.RecordingConfig(values | {"model": model_defaults(target)}).lock()


def model_defaults(target: str) -> dict[str, Any]:
    """Makes the config group `model` from the defaults of the target's options.

    It skips options without a default, which a run must set.
    """
    values: dict[str, Any] = {}
    options = registry.options_class(registry.find_model(target))
    for name, option in schema.schema_of(options).items():
        if option.default is not schema.MISSING:
            values[name] = option.default
    return {"target": target, **schema.unflatten(values)}


def full_schema(target: str) -> schema.Schema:
    """Lists every key of a run that trains the target's model."""
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


def from_config(config: ConfigDict | Mapping[str, Any]) -> RunConfig:
    """Converts a nested config to a RunConfig.

    Raises:
      ConfigError: keys are unknown or values have the wrong type. It lists all of them.
    """
    flat = schema.flatten(config)
    target = str(flat.get("model.target", registry.DEFAULT_TARGET))
    values = schema.resolve(flat, full_schema(target))
    return schema.from_config_dict(RunConfig, schema.unflatten(values))
