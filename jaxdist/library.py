"""The library: `fit` trains a caller's own model, optimizer and batches; `run` a config.

With the commands the only place that puts core and wings together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from jaxdist import interop
from jaxdist.data.user_batches import Batches, open_user_batches
from jaxdist.evaluation.fitted import Fitted
from jaxdist.inference.sample import Sample
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
from jaxdist.step.state import State
from jaxdist.trainer import trainer, user_model
from jaxdist.trainer.best import KeepBest
from jaxdist.trainer.callbacks import Callback
from jaxdist.trainer.loggers import Loggers
from jaxdist.trainer.profiling import Profile
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.user_model import Model, UserInputs


def run_callbacks(
    config: RunConfig,
    folder: Path,
    entered: tuple[Ledger, Watchdog] | None = None,
) -> list[Callback]:
    """Lists what a run does beside training, in the order of the calls.

    Args:
      config: of the run.
      folder: its workdir.
      entered: what observes a whole process, if the caller has entered it before it
        joined other processes. It is left out of the list then.
    """
    ledger = entered[0] if entered else Ledger()
    process: list[Callback] = []
    if not entered:
        process = [ledger, Watchdog(config.watchdog, folder)]
    return [
        *process,
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
    entered: tuple[Ledger, Watchdog] | None = None,
    **options: Any,
) -> State:
    """Trains the run of a config to the end, and returns its last state.

    Args:
      config: of the run, see `jaxdist.default_config`.
      folder: the workdir; if it holds the run, training resumes.
      callbacks: further ones beside those of `run_callbacks`.
      entered: see `run_callbacks`.
      **options: as `trainer.train`: title, devices, full_devices.

    Raises:
      ConfigError: the config is illegal; nothing was compiled.
      TrainingStopped: losses stayed non-finite.
      Interrupted: a signal ended it early.
    """
    folder = Path(folder)
    return trainer.run(
        config,
        folder,
        callbacks=[*run_callbacks(config, folder, entered), *callbacks],
        process_callbacks=entered or (),
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
    config = user_model.config_of_fit(
        {
            "seed": seed,
            "train.steps": steps,
            "batch.global_size": size,
            "data.path": dataset.samples,
            "model.name": user_model.name_of(model, build),
            **user_model.optimizer_values(optimizer),
            **user_model.mesh_values(mesh),
        },
        settings or {},
        evaluates=validation is not None,
        saves=bool(folder),
    )
    transform = None if isinstance(optimizer, OptimizerConfig) else optimizer
    temporary = None
    if not folder:
        temporary = tempfile.TemporaryDirectory(prefix="jaxdist-")
        folder = temporary.name
    workdir = Path(folder)
    outcome = trainer.train(
        config,
        workdir,
        title=workdir.name,
        devices=devices,
        inputs=UserInputs(build, dataset, transform, initial),
        callbacks=[*run_callbacks(config, workdir), *hooks],
    )
    return Fitted.of(outcome, dataset, workdir, temporary)
