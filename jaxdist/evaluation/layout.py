"""A trained run on the devices at hand: a mesh and a batch that fit them, the weights alone."""

import contextlib
import dataclasses

import jax

from jaxdist.config import ConfigError
from jaxdist.parallel.mesh import MeshConfig
from jaxdist.parallel.offload import OffloadConfig
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State
from jaxdist.trainer import validation
from jaxdist.trainer.run_config import Build, RunConfig


def fitted(
    config: RunConfig, devices: list[jax.Device], mesh: MeshConfig | None, maker: Build | None = None
) -> tuple[RunConfig, Rules, ModelSpec]:
    """Returns the run's config with a mesh and a batch that fit these devices.

    Raises:
      ConfigError: none does; the faults are those of the last mesh tried.
    """
    first = [config.mesh] if config.mesh.pipeline == 1 else []  # one text at a time fills no pipeline
    meshes = [mesh] if mesh else [*first, MeshConfig(data=1, fsdp=len(devices)), MeshConfig()]
    part = config.batch.global_size // config.batch.accumulation
    rows = -(-part // len(devices)) * len(devices)  # any number of batch shards divides it
    batch = dataclasses.replace(config.batch, global_size=rows, accumulation=1)

    def validated(mesh: MeshConfig) -> tuple[RunConfig, Rules, ModelSpec]:
        fitted = dataclasses.replace(config, mesh=mesh, batch=batch, offload=OffloadConfig())
        _, rules, spec = validation.validate(fitted, devices, with_data=False, build=maker)
        return fitted, rules, spec

    for choice in meshes[:-1]:
        with contextlib.suppress(ConfigError):
            return validated(choice)
    return validated(meshes[-1])


def weights_alone(state: State) -> State:
    """Returns of an abstract state what the forward pass needs, laid out like the parameters."""
    if state.ema is None:
        return state._replace(opt_state=None)
    average = jax.tree.map(
        lambda e, p: jax.ShapeDtypeStruct(e.shape, e.dtype, sharding=p.sharding), state.ema, state.trainable
    )
    return state._replace(trainable=None, opt_state=None, ema=average)
