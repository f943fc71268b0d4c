"""Loads a trained run from its workdir onto devices."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import optax

from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.checkpoint.state_dict import LayoutError
from jaxdist.config import ConfigError
from jaxdist.evaluation import layout
from jaxdist.evaluation.trained_run import TrainedRun
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.protocols.objective import Objective
from jaxdist.trainer import user_model, workdir
from jaxdist.trainer.best import best_step
from jaxdist.trainer.model_flops import total_parameters
from jaxdist.trainer.user_model import Model


def load_run(
    folder: Path | str,
    *,
    step: int | Literal["best"] | None = None,
    mesh: MeshConfig | None = None,
    devices: Sequence[jax.Device] | None = None,
    log: Callable[[str], None] = print,
    target: str | None = None,
    trust_code: bool | None = None,
    model: Model | None = None,
    objective: Objective | None = None,
    modules: bool | Mapping[str, Model] = True,
) -> TrainedRun:
    """Loads the run of a workdir with the weights of one checkpoint.

    Only the weights are read: the moving average, if the run keeps one. They are read
    directly into the shardings of the mesh.

    Args:
      folder: the workdir.
      step: step of the checkpoint; "best": the one that checkpoint.keep_best has kept;
        None: the newest usable one.
      mesh: the mesh to use. None: the run's own mesh if it fits the devices (with
        pipeline stages as fsdp), otherwise all devices as fsdp, otherwise all as data.
        Devices of the axis `context` split prompts and the cache.
      devices: the devices to use; None: all.
      log: receives a line per event.
      target: the model.target that the run must have; its code is then trusted.
      trust_code: whether to import the model's module because the run's config names
        it. None: only if the module is part of jaxdist or already imported.
      model: for a run of `jaxdist.fit`: the model that `fit` was called with.
      objective: for a run of `jaxdist.fit`: the objective that `fit` was called with.
        Only `evaluate` needs it.
      modules: whether to load the frozen modules of the objective. `evaluate` needs
        them; generating and scoring text does not. With `objective`: the modules that
        `fit` was called with.

    Raises:
      ConfigError: there is no run, the model's code is not trusted, the mesh is
        invalid, or the weights are those of another model.
      CheckpointError: there is no usable checkpoint.
    """
    folder = Path(folder)
    config = workdir.read_config(folder, named=target, trust_code=trust_code)
    devices = list(jax.devices() if devices is None else devices)
    maker = user_model.maker(config, folder, model, target)
    if objective is None and isinstance(modules, Mapping):
        raise ConfigError(
            f"modules: {', '.join(modules)} would not be read without an objective; give objective=, too"
        )
    if objective is not None:
        given = modules if isinstance(modules, Mapping) else {}
        maker = user_model.maker_for(config, maker, objective, given)
    composition = layout.fitted(config, devices, mesh, maker)
    config = composition.config
    spec = composition.spec
    # The optimizer that was passed to `fit` is absent, and nothing is trained here.
    optimizer = optax.identity() if config.optimizer.name == "given" else None
    built = composition.build_step(devices, optimizer=optimizer)
    checkpoints = workdir.checkpoints_folder(folder, config)
    run = workdir.own_identity(folder)
    step = best_step(checkpoints) if step == "best" else step
    with CheckpointManager(
        checkpoints, config.checkpoint, mode="read", run=run
    ) as store:
        try:
            weights = layout.weights_alone(built.abstract_state, modules=bool(modules))
            restored = store.restore(weights, step, partial=True).state
        except LayoutError as error:
            raise ConfigError(
                f"model: the run in {folder} has another; {error.summary}"
            ) from error
        for bad_step, reason in store.damaged_steps.items():
            log(f"checkpoint {bad_step} cannot be used: {reason}")
    state = restored._replace(trainable=restored.model_arrays[0], ema=None)
    log(
        f"{folder}: step {int(state.step)}, {total_parameters(config, spec):,} parameters, {composition.shape}"
    )
    return TrainedRun(
        folder=folder, config=config, spec=spec, built=built, state=state, log=log
    )
