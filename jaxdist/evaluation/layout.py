"""A trained run on the devices at hand: a mesh and a batch that fit them, the weights
alone.
"""

import contextlib
import dataclasses
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.parallel import precision as precisions
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.offload import OffloadConfig
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.state import State
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
      mesh: default: the run's own, the stages of a pipeline as fsdp; else all as fsdp;
        else all as data.

    Raises:
      ConfigError: none does, and the faults are those of the last mesh tried; a mesh
        with a pipeline.
    """
    if mesh and mesh.pipeline != 1:  # one text at a time fills none
        raise ConfigError(
            f"mesh.pipeline={mesh.pipeline}: a trained run is used without a pipeline; leave it out, and "
            f"split the weights by fsdp or tensor, long texts by context"
        )
    if mesh is not None:
        meshes = [mesh]
    else:
        own = config.mesh
        if own.pipeline > 1:
            fsdp = own.fsdp * own.pipeline if own.fsdp > 0 else own.fsdp
            own = dataclasses.replace(own, pipeline=1, fsdp=fsdp)
        meshes = [own, MeshConfig(data=1, fsdp=len(devices)), MeshConfig()]
    part = config.batch.global_size // config.batch.accumulation
    # any number of batch shards divides it
    rows = -(-part // len(devices)) * len(devices)
    overrides: dict[str, Any] = {
        "batch.global_size": rows,
        "batch.accumulation": 1,
        # What is trained in 8-bit floats is read in the compute dtype, by any device.
        "precision.matmul": "compute",
        "precision.fp8_small_kernels": False,
        "offload": OffloadConfig(),
        "remat": RematConfig(),
    }
    # On another mesh the heads may not divide; auto is the same where they do.
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

    for choice in meshes[:-1]:
        with contextlib.suppress(ConfigError):
            return validated(choice)
    return validated(meshes[-1])


def weights_alone(state: State, *, modules: bool = True) -> State:
    """Returns of an abstract state what the forward pass needs, laid out like the
    parameters.

    Args:
      modules: False leaves out the frozen modules, which the objective alone reads.
    """
    if not modules:
        state = state._replace(modules={})
    if state.ema is None:
        return state._replace(opt_state=None)
    average = jax.tree.map(
        lambda e, p: jax.ShapeDtypeStruct(e.shape, e.dtype, sharding=p.sharding),
        state.ema,
        state.trainable,
    )
    return state._replace(trainable=None, opt_state=None, ema=average)
