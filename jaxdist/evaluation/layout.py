"""The layout of a trained run on other devices: mesh, batch, and abstract weights."""

import contextlib
import dataclasses
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.parallel import precision as precisions
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.offload import OffloadConfig
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.state import NO_OPT_STATE, State
from jaxdist.trainer import compose, validation
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import Build, RunConfig


def fitted(
    config: RunConfig,
    devices: list[jax.Device],
    mesh: MeshConfig | None,
    maker: Build | None = None,
) -> Composition:
    """Composes the run with a mesh and a batch that fit these devices.

    Args:
      config: the run's config.
      devices: the devices to use, all of them.
      mesh: the mesh to use. None: the first that is valid of the run's own mesh (with
        pipeline stages as fsdp), all devices as fsdp, and all devices as data.
      maker: makes the user's model; None: the model that the config names.

    Raises:
      ConfigError: no mesh is valid (the message is about the last one tried), or `mesh`
        has a pipeline.
    """
    if mesh and mesh.pipeline != 1:  # one text at a time does not fill a pipeline
        raise ConfigError(
            f"mesh.pipeline={mesh.pipeline}: a trained run is used without a pipeline; leave it out, and "
            f"split the weights by fsdp or tensor, long texts by context"
        )
    candidates = [mesh] if mesh else _default_meshes(config.mesh, len(devices))
    microbatch = config.batch.global_size // config.batch.accumulation
    # a multiple of the number of devices, so that any number of batch shards divides it
    rows = -(-microbatch // len(devices)) * len(devices)
    overrides: dict[str, Any] = {
        "batch.global_size": rows,
        "batch.accumulation": 1,
        # Models trained with 8-bit matmuls are used in the compute dtype, which needs
        # no 8-bit units.
        "precision.matmul": "compute",
        "precision.fp8_small_kernels": False,
        "offload": OffloadConfig(),
        "remat": RematConfig(),
    }
    # "heads" fails where the mesh does not divide the heads; "auto" equals it
    # elsewhere.
    if config.context.attention == "heads":
        overrides["context.attention"] = "auto"
    config = compose.with_overrides(config, overrides)
    if any(precisions.device_faults(config.precision, devices[0])):
        config = compose.with_overrides(config, {"precision.compute": "bfloat16"})

    def validated(mesh: MeshConfig) -> Composition:
        return validation.validate(
            compose.with_overrides(config, {"mesh": mesh}),
            devices,
            with_data=False,
            build=maker,
        )

    for candidate in candidates[:-1]:
        with contextlib.suppress(ConfigError):
            return validated(candidate)
    return validated(candidates[-1])


def _default_meshes(mesh: MeshConfig, num_devices: int) -> list[MeshConfig]:
    """Lists the meshes to try for a run that was trained on `mesh`."""
    unpipelined = mesh
    if mesh.pipeline > 1:
        fsdp = mesh.fsdp
        if fsdp > 0:
            fsdp *= mesh.pipeline
        unpipelined = dataclasses.replace(mesh, pipeline=1, fsdp=fsdp)
    return [unpipelined, MeshConfig(data=1, fsdp=num_devices), MeshConfig()]


def weights_alone(state: State, *, modules: bool = True) -> State:
    """Selects what the forward pass needs of an abstract state.

    A moving average gets the sharding of the parameters that it stands for.

    Args:
      state: of abstract arrays.
      modules: whether to keep the frozen modules, which only the objective reads.
    """
    if not modules:
        state = state._replace(modules={})
    if state.ema is None:
        return state._replace(opt_state=NO_OPT_STATE)
    average = jax.tree.map(
        lambda average, parameter: jax.ShapeDtypeStruct(
            average.shape, average.dtype, sharding=parameter.sharding
        ),
        state.ema,
        state.trainable,
    )
    return state._replace(trainable=None, opt_state=NO_OPT_STATE, ema=average)
