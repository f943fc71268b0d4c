"""The library: `fit` trains a caller's own model, optimizer and batches; `run` a config.

With the commands the only place that puts core and wings together.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from jaxdist import interop
from jaxdist.config import ConfigError, schema
from jaxdist.data import Dataset
from jaxdist.data.user_batches import (
    Batches,
    UserDataset,
    open_held_out,
    open_user_batches,
)
from jaxdist.inference.decoding import Generation, SamplingConfig, text_generator
from jaxdist.inference.sample import Sample
from jaxdist.models import registry
from jaxdist.operations.callbacks import (
    CheckpointCopies,
    Ledger,
    MetricsServer,
    PreemptionNotices,
    ReplicaCheck,
    Report,
    SlowSteps,
    Stragglers,
    Watchdog,
)
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.protocols.model_spec import describe
from jaxdist.step.state import State
from jaxdist.telemetry.display import print_safe
from jaxdist.telemetry.metrics import MetricRows, read_rows
from jaxdist.trainer import (
    initial_weights,
    preemption,
    run_config,
    save_weights,
    trainer,
    user_model,
)
from jaxdist.trainer.callbacks import Callback, TrainResult
from jaxdist.trainer.core_callbacks import KeepBest, Loggers, Profile
from jaxdist.trainer.held_out import HeldOut, held_out
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.user_model import Model, UserInputs


def run_callbacks(config: RunConfig, folder: Path) -> list[Callback]:
    """Lists what a run of the library does beside training, in the order of the calls.

    Args:
      config: of the run.
      folder: its workdir.
    """
    ledger = Ledger()
    return [
        ledger,
        Watchdog(config.watchdog, folder),
        MetricsServer(ledger),
        Loggers(),
        PreemptionNotices(),
        Stragglers(),
        SlowSteps(),
        ReplicaCheck(),
        Profile(),
        KeepBest(),
        CheckpointCopies(),
        Report(),
        Sample(),
    ]


def run(
    config: RunConfig,
    folder: Path | str,
    *,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> State:
    """Trains the run of a config to the end, and returns its last state.

    Args:
      config: of the run, see `jaxdist.default_config`.
      folder: the workdir; if it holds the run, training resumes.
      callbacks: further ones beside those of `run_callbacks`.
      **options: as `trainer.train`: title, devices, full_devices.

    Raises:
      ConfigError: the config is illegal; nothing was compiled.
      TrainingStopped: losses stayed non-finite.
      Interrupted: a signal ended it early.
    """
    folder = Path(folder)
    everyone = [*run_callbacks(config, folder), *callbacks]
    return trainer.run(
        config,
        folder,
        callbacks=everyone,
        weight_sources=interop.WEIGHT_SOURCES,
        **options,
    )


def fit(
    model: Model,
    optimizer: optax.GradientTransformation | OptimizerConfig,
    batches: Batches,
    *,
    steps: int,
    mesh: Mapping[str, int] | MeshConfig | None = None,
    folder: Path | str | None = None,
    batch_size: int | None = None,
    validation: Mapping[str, Any] | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    devices: Sequence[jax.Device] | None = None,
    hooks: Sequence[Callback] = (),
) -> Fitted:
    """Trains a model and returns it. If `folder` holds a run, training resumes.

    The run has all callbacks of the command `train`. Two of them depend on who owns the
    process: the ledger begins with this call, and the watchdog watches only a process
    that `jaxdist.join()` has made a process of the run.

    Args:
      model: an nnx module, which stays as it is, or what makes one of its rngs; see
        docs/your-own-model.md.
      optimizer: of optax, used as it is; or our config, whose schedule ends with
        `steps`.
      batches: {entry: [N, ...]}, in an order that is ours; or a function from the step,
        from 0, to a global batch; or an iterable of global batches, of which a resumed
        run passes over those it has had.
      steps: updates in all, those before a resume included.
      mesh: sizes of axes, dict(fsdp=4, tensor=2); the devices left over (default: of
        all) are `data`.
      folder: of checkpoints, metrics and events. None: a temporary one, without
        checkpoints.
      batch_size: samples of a global batch, where `batches` are arrays; default 32.
      validation: {entry: [N, ...]}, scored ten times a run; see settings
        "train.eval_every".
      seed: of everything random: the model's first values, the order, dropout.
      settings: any other key of the config, {"precision.compute": "bfloat16"}; see
        docs/configuration.md.
      hooks: further callbacks, [jaxdist.every(100, look)]; see docs/library.md.

    Raises:
      ConfigError: what cannot be, before anything compiles: all faults, each with its
        cure.
      TrainingStopped: losses stayed non-finite.
      Preempted: a signal stopped it, not a Ctrl-C to one process; uncaught, a
        script ends with 75.
    """
    build, initial = user_model.builder(model)
    dataset, size = open_user_batches(
        batches, size=batch_size, validation=validation, seed=seed
    )
    temporary = None if folder else tempfile.TemporaryDirectory(prefix="jaxdist-")
    made = type(model) if isinstance(model, nnx.Module) else describe(build).model_class
    workdir = Path(temporary.name if temporary else folder)  # type: ignore[arg-type]
    arguments = {
        "seed": seed,
        "train.steps": steps,
        "batch.global_size": size,
        "data.path": dataset.samples,
        "model.name": f"{made.__module__}.{made.__qualname__}",
        "optimizer": _optimizer_values(optimizer),
        "mesh": schema.to_config_dict(mesh)
        if isinstance(mesh, MeshConfig)
        else mesh or {},
    }
    config = _config(
        schema.flatten(arguments), settings or {}, validation is not None, not temporary
    )
    transform = None if isinstance(optimizer, OptimizerConfig) else optimizer
    inputs = UserInputs(build, dataset, transform, initial)
    outcome = trainer.train(
        config,
        workdir,
        title=workdir.name,
        devices=devices,
        inputs=inputs,
        callbacks=[*run_callbacks(config, workdir), *hooks],
    )
    return _fitted(outcome, dataset, workdir, temporary)


def _fitted(
    outcome: TrainResult, dataset: UserDataset, workdir: Path, temporary: Any
) -> Fitted:
    """Returns the trained model, its layers flat; raises Preempted if a signal asked
    the process to end.
    """
    if outcome.stopped and preemption.PROCESS.must_leave:
        raise preemption.Preempted(outcome.stopped)
    state, of = (
        outcome.built.views.flat(outcome.state),
        outcome.composition.config.train.steps,
    )
    trained = state._replace(trainable=state.model_arrays[0], opt_state=None, ema=None)
    step, stopped = int(state.step), ""
    if outcome.stopped:
        onward = "without a folder the next call begins anew"
        onward = (
            onward
            if temporary
            else f"saved in {workdir}: the same call of fit goes on from there"
        )
        stopped = f"stopped after step {step} of {of} by an interrupt; {onward}"
        if jax.process_index() == 0:
            print_safe(stopped)
    elif outcome.reason:
        stopped = f"stopped after step {step} of {of}: {outcome.reason}"
    return Fitted(
        workdir,
        step,
        stopped,
        dataclasses.replace(outcome, state=trained),
        dataset,
        temporary,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """What `fit` has come to."""

    folder: Path
    step: int  # updates finished
    stopped: str  # why it ended early, and how to go on; "" if it did not
    # its state holds flat layers, weights or their average, and no optimizer's
    outcome: TrainResult
    dataset: UserDataset
    _temporary: Any  # removes the folder with the last reference to this

    @functools.cached_property
    def metrics(self) -> MetricRows:
        """What metrics.jsonl has: `train` and `evaluation`, rows of one step each."""
        return read_rows(self.folder)

    @functools.cached_property
    def model(self) -> Any:
        """The module with its trained weights (their average, if one is kept), in
        evaluation mode.
        """
        return self.outcome.composition.spec.assemble(*self.outcome.state.model_arrays)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
    ) -> list[Generation]:
        """Returns the tokens that follow each prompt, for a model with `init_cache` and
        `decode`.

        Raises:
          ConfigError: it has none; as `decoding.TokenGenerator`.
        """
        outcome, sampling = self.outcome, sampling or SamplingConfig()
        compute = outcome.composition.config.precision.compute
        generate = text_generator(
            outcome.composition.spec, outcome.built, compute=compute
        )
        if generate is None:
            name = outcome.composition.spec.model_class.__name__
            raise ConfigError(f"{name} has no init_cache and decode; use `model`")
        weights = outcome.state.model_arrays
        return generate(
            weights, prompts, max_tokens=max_tokens, sampling=sampling, seed=seed
        )

    def evaluate(self, data: Mapping[str, Any] | None = None) -> HeldOut:
        """Returns the loss over held-out arrays, and the model's own metrics, as
        `jaxdist evaluate` does.

        Args:
          data: {entry: [N, ...]}; default: the `validation` that was given to `fit`.

        Raises:
          ConfigError: there is none; it holds something else than the batches, or no
            whole batch.
        """
        config, built, state = (
            self.outcome.composition.config,
            self.outcome.built,
            self.outcome.state,
        )
        dataset: Dataset = self.dataset
        if data is None and not dataset.num_validation_tokens:
            raise ConfigError(
                "evaluate: nothing is held out; give it arrays, or fit its `validation`"
            )
        if data is not None:
            dataset = open_held_out(
                data, like=config.data.path, size=config.batch.global_size
            )
        return held_out(config, built, built.views.staged_weights(state), dataset)

    def save(self, folder: Path | str) -> Path:
        """Writes the trained weights as a workdir of their own, and returns it.

        `load_run(folder, model=...)` and `init.from_run` read it. It has no optimizer's
        state: what goes on with training is the folder that was given to `fit`.

        Raises:
          ConfigError: something is there already.
        """
        return save_weights.save(
            self.outcome.composition.config, self.outcome.state, Path(folder)
        )

    def __repr__(self) -> str:
        losses = [row["loss"] for row in self.metrics.train]
        last = f", loss {losses[-1]:.4f}" if losses else ""
        step = f"step {self.step}"
        if self.stopped:
            step = (
                f"stopped after {step} of {self.outcome.composition.config.train.steps}"
            )
        return f"Fitted({step}{last}, {self.outcome.composition.spec.counts}, {str(self.folder)!r})"


def _optimizer_values(optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, OptimizerConfig):
        return vars(optimizer)
    if not (
        callable(getattr(optimizer, "init", None))
        and callable(getattr(optimizer, "update", None))
    ):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}; required a transformation of optax, e.g. "
            f"optax.adamw(3e-4), or jaxdist.OptimizerConfig(...)"
        )
    # The rate, its schedule and all else are the transformation's own.
    return {
        "name": "given",
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
    }


def _config(
    arguments: dict[str, Any], settings: Mapping[str, Any], evaluates: bool, saves: bool
) -> RunConfig:
    """Returns the run's config: the settings over what is usual, and what the arguments
    say.

    Raises:
      ConfigError: a setting that an argument makes, unknown keys, wrong types.
    """
    # Other formats than jaxdist's checkpoints are those of its own transformer.
    own_format = {source.key for source in initial_weights.CORE_SOURCES}
    foreign = [
        key
        for key in initial_weights.weight_keys()
        if settings.get(key) and key not in own_format
    ]
    if foreign:
        raise ConfigError(
            f"settings: {key} reads weights into jaxdist's own transformer. fit trains the model that you "
            f"give. Run jaxdist train, or load the weights into your model before fit."
            for key in foreign
        )
    arguments = {
        "data.source": "given",
        "model.target": registry.USER_TARGET,
    } | arguments
    free = ("optimizer.frozen", "optimizer.groups", "optimizer.nonfinite_limit")
    if taken := [key for key in settings if key in arguments and key not in free]:
        raise ConfigError(
            [
                f"settings: {key} is what an argument of fit says; leave it out"
                for key in taken
            ]
        )
    eval_every = max(arguments["train.steps"] // 10, 1) if evaluates else 0
    defaults: dict[str, Any] = {"train.eval_every": eval_every}
    if not saves:
        defaults |= {"checkpoint.every_steps": 0, "checkpoint.save_at_end": False}
    values = schema.flatten(run_config.default_config(registry.USER_TARGET))
    return run_config.from_config(
        schema.unflatten(values | defaults | arguments | dict(settings))
    )
