"""The library: `fit` trains a model of the caller's, and `run` trains a config.

Only this module and the commands put core and wings together: the folders that train,
and those that plan, verify, operate and exchange models (docs/project/architecture.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from jaxdist.config import ConfigError, extras
from jaxdist.data.user_batches import Batches, open_user_batches
from jaxdist.evaluation.fitted import Fitted
from jaxdist.inference.sample import Sample
from jaxdist.interop.initial_weights import WEIGHT_SOURCES
from jaxdist.operations.callbacks import (
    CheckpointCopies,
    Ledger,
    MetricsServer,
    PreemptionNotices,
    Probe,
    ReplicaCheck,
    Report,
    SlowSteps,
    Stragglers,
    Watchdog,
)
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.protocols.objective import Objective
from jaxdist.step.state import State
from jaxdist.telemetry.display import print_safe
from jaxdist.trainer import (
    opening,
    preemption,
    teacher_weights,
    training,
    user_model,
    validation,
)
from jaxdist.trainer.best import KeepBest
from jaxdist.trainer.callbacks import Callback
from jaxdist.trainer.compose import UserInputs
from jaxdist.trainer.loggers import Loggers
from jaxdist.trainer.memory_saves import MemorySaves
from jaxdist.trainer.profiling import Profile
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.user_model import Model
from jaxdist.verification.comparison import summary
from jaxdist.verification.runner import verify_layouts


def run_callbacks(
    config: RunConfig,
    folder: Path,
    entered: tuple[Ledger, Watchdog] | None = None,
) -> list[Callback]:
    """Lists the callbacks of a run, in the order in which they are called.

    Args:
      config: the run's config.
      folder: the run's workdir.
      entered: the ledger and the watchdog, if the caller has entered them. The list
        then skips both. Default: the list begins with new ones.
    """
    observers: list[Callback] = []
    if entered:
        ledger, _ = entered
    else:
        ledger = Ledger()
        observers = [ledger, Watchdog(config.watchdog, folder)]
    return [
        *observers,
        MetricsServer(ledger),
        Loggers(),
        PreemptionNotices(),
        Stragglers(),
        SlowSteps(),
        ReplicaCheck(),
        Probe(),
        Profile(),
        KeepBest(),
        CheckpointCopies(),
        MemorySaves(),
        Report(ledger),
        Sample(),
    ]


def run(
    config: RunConfig,
    folder: Path | str,
    *,
    callbacks: Sequence[Callback] = (),
    entered: tuple[Ledger, Watchdog] | None = None,
    title: str = "",
    devices: Sequence[jax.Device] | None = None,
    full_devices: int | None = None,
) -> State:
    """Trains the run of a config to the end and returns its last state.

    Args:
      config: the run's config; see `jaxdist.default_config`.
      folder: the workdir. If it holds the run, training resumes.
      callbacks: callbacks in addition to those of `run_callbacks`.
      entered: the ledger and the watchdog that the caller has entered; see
        `run_callbacks`.
      title: first line of the display; "" = none.
      devices: devices to train on; default: all.
      full_devices: number of devices that the config of an elastic run was written for;
        see `training.train`. Default: the run is not elastic.

    Raises:
      ConfigError: the config is invalid; nothing was compiled.
      TrainingStopped: losses stayed non-finite.
      Interrupted: a signal ended the run early.
    """
    folder = Path(folder)
    config = teacher_weights.completed(config, folder, WEIGHT_SOURCES)
    return training.run(
        config,
        folder,
        callbacks=[*run_callbacks(config, folder, entered), *callbacks],
        process_callbacks=entered or (),
        weight_sources=WEIGHT_SOURCES,
        title=title,
        devices=devices,
        full_devices=full_devices,
    )


def fit(
    model: Model,
    optimizer: optax.GradientTransformation | OptimizerConfig,
    batches: Batches,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    mesh: Mapping[str, int] | MeshConfig | None = None,
    folder: Path | str | None = None,
    batch_size: int | None = None,
    validation: Mapping[str, Any] | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    devices: Sequence[jax.Device] | None = None,
    hooks: Sequence[Callback] = (),
    objective: Objective | None = None,
    modules: Mapping[str, Model] | None = None,
    verify: bool | str = False,
    dry_run: bool = False,
) -> Fitted | Any:  # Any stands for DryRun: callers that train need not tell them apart
    """Trains a model and returns it. If `folder` holds a run, training resumes.

    The run has all callbacks of the command `train`. The ledger begins with this call.
    The watchdog watches a process only after `jaxdist.join()`.

    Args:
      model: an nnx module, which is not changed; or a function that makes one from an
        nnx.Rngs. See docs/how-to/own-model.md.
      optimizer: a transformation of optax, used unchanged; or a jaxdist config, whose
        schedule ends at the last step.
      batches: {entry: array of [N, ...]}, which jaxdist shuffles; or a function from
        the step (from 0) to a global batch. It may also be an iterable of global
        batches. A resumed run skips those of its batches that it has trained on.
      steps: updates in total, including those before a resume.
      epochs: passes over `batches`, in place of `steps`, if they are arrays; the last
        may be a part.
      mesh: sizes of mesh axes, such as dict(fsdp=4, tensor=2). The axis `data` takes
        the remaining devices. Default: all devices are `data`.
      folder: folder for checkpoints, metrics and events. Default: a temporary folder
        without checkpoints.
      batch_size: samples of a global batch if `batches` are arrays; default 32.
      validation: {entry: array of [N, ...]}, evaluated ten times a run; see the setting
        "train.eval_every".
      seed: seed of everything random: initial values, the order of data, dropout.
      settings: other keys of the config, such as {"precision.compute": "bfloat16"}; see
        docs/how-to/configure.md.
      devices: devices to train on; default: all.
      hooks: additional callbacks, such as [jaxdist.every(100, function)]; see
        docs/how-to/library.md.
      objective: the loss in place of the model's own, such as one that compares the
        model with a frozen reference; see docs/how-to/recipes.md.
      modules: the frozen modules of the objective by name, each in the forms of
        `model`. A function makes one with the seed's random values: those that the
        model starts with, if it is the model's own function.
      verify: whether to compare a step of the model on each layout of these devices
        with one device before training, as the command `verify` does. A text selects
        the layouts whose names contain it, such as "fsdp 8".
      dry_run: whether to return the report of `train --dry-run`, a
        planner.dry_run.DryRun, in place of training. It reads the first batch and
        compiles the step. Nothing is written.

    Raises:
      ConfigError: the arguments are invalid. It lists all faults, each with its fix, and
        nothing was compiled. Or `verify` found a layout that differs.
      TrainingStopped: losses stayed non-finite.
      Preempted: a signal other than a Ctrl-C to one process stopped the run. A script
        that does not catch it exits with 75.
    """
    build, own_values = user_model.builder(model)
    build, initial = user_model.with_objective(
        build, own_values, objective, modules or {}
    )
    dataset, size = open_user_batches(
        batches, size=batch_size, validation=validation, seed=seed
    )
    config = user_model.config_of_fit(
        {
            "seed": seed,
            **user_model.length_values(steps, epochs, dataset),
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
    inputs = UserInputs(
        build=build, dataset=dataset, optimizer=transform, initial=initial
    )
    if verify is not False or dry_run:
        preemption.refuse_unjoined()
        all_devices = jax.devices() if devices is None else devices
        if folder:
            opening.check_workdir(Path(folder), config)
        if verify is not False:
            _verify(config, all_devices, inputs, "" if verify is True else verify)
        if dry_run:
            planner = extras.load("jaxdist.planner.dry_run")
            return planner.dry_run(config, all_devices, lambda line: None, inputs)
    temporary = None
    if not folder:
        temporary = tempfile.TemporaryDirectory(prefix="jaxdist-")
        folder = temporary.name
    workdir = Path(folder)
    outcome = training.train(
        config,
        workdir,
        title=workdir.name,
        devices=devices,
        inputs=inputs,
        callbacks=[*run_callbacks(config, workdir), *hooks],
    )
    return Fitted.of(outcome, dataset, workdir, temporary)


def _verify(
    config: RunConfig,
    devices: Sequence[jax.Device],
    inputs: UserInputs,
    only: str,
) -> None:
    """Compares one step of the caller's model on each layout with one device.

    Args:
      config: the run's config.
      devices: the devices to lay the model out on.
      inputs: the caller's model, data and optimizer.
      only: a part of the names of the layouts to compare; "" = all.

    Raises:
      ConfigError: the config is invalid, nothing can be compared, or a layout differs.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"verify: there are {jax.process_count()} processes, and it compares layouts "
            f"in one. Verify the model in one process, then train without verify."
        )
    if len(devices) < 2:
        raise ConfigError(
            "verify: there is one device, and layouts need two. Verify the model on "
            "emulated devices: JAX_PLATFORMS=cpu, and "
            "jax.config.update('jax_num_cpu_devices', 8) before any other use of jax."
        )
    validation.validate(config, devices, with_data=False, build=inputs.build)
    report = verify_layouts(config, devices, only=only, log=print_safe, given=inputs)
    if not report.passed:
        raise ConfigError(
            f"verify: the model's loss depends on the layout, or its gradients do; see "
            f"docs/how-to/own-model.md. Nothing was trained.\n{report}"
        )
    print_safe(summary(report))
