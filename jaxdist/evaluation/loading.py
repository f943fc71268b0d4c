"""A trained run opened from its workdir, on the devices at hand."""

from collections.abc import Callable, Sequence
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
from jaxdist.trainer import user_model, workdir
from jaxdist.trainer.best import best_step
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
    modules: bool = True,
) -> TrainedRun:
    """Loads the run of a workdir with the weights of `step`, or of the newest usable
    checkpoint.

    Of a checkpoint only the weights are read (the moving average, where there is one),
    straight into the shardings of any legal mesh.

    Args:
      folder: the workdir.
      step: "best": the one that checkpoint.keep_best has kept.
      mesh: default: the run's own (a pipeline's stages as fsdp) where it fits the
        devices, else all as fsdp, else all as data. With `context` devices share out
        prompts and the cache.
      devices: default: all.
      log: receives a line per event.
      target: the model.target that the run must have; its code is then trusted.
      trust_code: whether to import the model's module because the run's config names
        it. None: only one of jaxdist's, or one that is imported already.
      model: of a run of `jaxdist.fit`: what was given to it, to make the model again.
      modules: False leaves out the frozen modules of the objective. `evaluate` needs
        them; what writes and scores text does not.

    Raises:
      ConfigError: no run there, a model whose code is not trusted, or a mesh that is
        not legal; weights of another model than the one given.
      CheckpointError: no usable checkpoint.
    """
    folder = Path(folder)
    config = workdir.read_config(folder, named=target, trust_code=trust_code)
    devices = list(jax.devices() if devices is None else devices)
    maker = user_model.maker(config, folder, model, target)
    composition = layout.fitted(config, devices, mesh, maker)
    config = composition.config
    spec = composition.spec
    # What was trained with a transformation of optax needs none here.
    optimizer = optax.identity() if config.optimizer.name == "given" else None
    built = composition.build_step(devices, optimizer=optimizer)
    checkpoints = workdir.checkpoints_folder(folder, config)
    run = workdir.own_identity(folder)
    step = best_step(checkpoints) if step == "best" else step
    with CheckpointManager(
        checkpoints, config.checkpoint, mode="read", run=run
    ) as store:
        try:
            wanted = layout.weights_alone(built.abstract_state, modules=modules)
            restored = store.restore(wanted, step, partial=True).state
        except LayoutError as error:
            raise ConfigError(
                f"model: the run in {folder} has another; {error.summary}"
            ) from error
        for bad, reason in store.bad_steps.items():
            log(f"checkpoint {bad} cannot be used: {reason}")
    state = restored._replace(trainable=restored.model_arrays[0], ema=None)
    log(
        f"{folder}: step {int(state.step)}, {spec.parameter_count:,} parameters, {composition.shape}"
    )
    return TrainedRun(folder, config, spec, built, state, log)
