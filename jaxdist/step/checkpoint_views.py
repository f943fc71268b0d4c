"""The state in the form of checkpoints: layers flat, with and without a pipeline.

A checkpoint holds flat layers, [layers, ...]. A step with a pipeline holds them by
stage, [chunks, stages, layers of a place, ...], padded. `CheckpointViews` converts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.offload import HOST, to_device
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step.state import NO_OPT_STATE, State


@dataclass(frozen=True)
class StateStaging:
    """A pipeline's partition of all layers of a state: policy and frozen modules."""

    policy: Staging  # layers of the model that is trained
    modules: Mapping[str, Staging]  # layers of the objective's frozen modules, by name

    @classmethod
    def of(cls, staging: Staging | None, spec: ModelSpec) -> StateStaging | None:
        """Extends a partition to the frozen modules.

        Args:
          staging: the partition of the policy's layers; None: no pipeline.
          spec: the model with flat blocks.

        Returns:
          The partition of the state; None without a pipeline.
        """
        if staging is None:
            return None
        modules = {
            name: staging.for_model(module) for name, module in spec.modules.items()
        }
        return cls(staging, modules)

    def by_stage(self, state: State) -> State:
        """Converts a state with flat blocks to blocks by stage."""
        policy: State = self.policy.by_stage(state._replace(modules={}))
        return policy._replace(modules=self.staged_modules(state.modules))

    def flat(self, state: State) -> State:
        """Converts a state with blocks by stage to flat blocks without padding."""
        policy: State = self.policy.flat(state._replace(modules={}))
        modules = {
            name: self.modules[name].flat(tree) for name, tree in state.modules.items()
        }
        return policy._replace(modules=modules)

    def staged_modules(self, modules: Mapping[str, Tree]) -> dict[str, Tree]:
        """Converts frozen modules with flat blocks to blocks by stage."""
        return {
            name: self.modules[name].by_stage(tree) for name, tree in modules.items()
        }


class CheckpointViews(NamedTuple):
    """Conversions between the state of a step and that of a checkpoint.

    Without a pipeline, both are the same.
    """

    # a state, which stays valid -> the state with flat layers
    flat: Callable[[State], State]
    # a state with flat layers, which is donated -> a state
    by_stage: Callable[[State], State]
    # a flat state without optimizer state and average -> a state to evaluate
    weights_by_stage: Callable[[State], State]
    abstract: State  # flat state as ShapeDtypeStructs with shardings


def build_views(
    state_staging: StateStaging | None, abstract: State, shardings: State
) -> CheckpointViews:
    """Builds the conversions of a state.

    Args:
      state_staging: the pipeline's partition of the layers; None: no pipeline.
      abstract: shapes of the state.
      shardings: shardings of the state.
    """
    if state_staging is None:
        return CheckpointViews(
            flat=_same,
            by_stage=_same,
            weights_by_stage=_same,
            abstract=jax.tree.map(with_sharding, abstract, shardings),
        )
    shapes = jax.eval_shape(state_staging.flat, abstract)
    stages = state_staging.policy.stages

    def flat_sharding(
        flat: jax.ShapeDtypeStruct,
        by_stage: jax.ShapeDtypeStruct,
        sharding: NamedSharding,
    ) -> NamedSharding:
        if flat.shape == by_stage.shape:
            return sharding
        layers_axis = "pipeline" if flat.shape[0] % stages == 0 else None
        # An array by stage is [chunks, stages, layers, ...], a flat one [layers, ...]. So
        # `spec[3:]` has the entries of the dims after the layers, which stay as they
        # are. The flat layers are split over the stages if these divide them.
        spec = P(layers_axis, *sharding.spec[3:])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    flat_shardings = jax.tree.map(flat_sharding, shapes, abstract, shardings)
    weight_shardings = shardings._replace(opt_state=NO_OPT_STATE, ema=None)
    return CheckpointViews(
        flat=_compile_conversion(state_staging.flat, flat_shardings, donate=False),
        by_stage=_compile_conversion(state_staging.by_stage, shardings, donate=True),
        weights_by_stage=jax.jit(
            state_staging.by_stage, out_shardings=weight_shardings
        ),
        abstract=jax.tree.map(with_sharding, shapes, flat_shardings),
    )


def _same(state: State) -> State:
    return state


def _compile_conversion(
    convert: Callable[[State], State], shardings: State, *, donate: bool
) -> Callable[[State], State]:
    """Compiles a conversion of a state, between blocks by stage and flat blocks.

    Blocks are [chunks, stages, layers of a place, ...] by stage, and [layers, ...] flat.
    All other arrays keep their shapes. The two states have the same leaves in the same
    order.

    Arrays in the host's memory pass through the device one at a time, each by its own
    program. One program converts all arrays on the device. Each program gets a state
    whose other leaves are None, which jax skips.

    Args:
      convert: the conversion, `StateStaging.flat` or `StateStaging.by_stage`.
      shardings: shardings of the converted state, which may be in the host's memory.
      donate: whether the programs may reuse the buffers of the old state.

    Returns:
      The function from the old state to the converted state.
    """
    leaf_shardings: list[NamedSharding] = jax.tree.leaves(shardings)
    structure = jax.tree.structure(shardings)
    on_host = [i for i, x in enumerate(leaf_shardings) if x.memory_kind == HOST]
    on_device = [i for i in range(len(leaf_shardings)) if i not in on_host]

    def with_leaves(leaves: Sequence[Any], chosen: Sequence[int]) -> State:
        """Makes a state with the chosen leaves, and None in place of the others."""
        kept = [x if i in chosen else None for i, x in enumerate(leaves)]
        state: State = jax.tree.unflatten(structure, kept)
        return state

    def compiled(chosen: Sequence[int]) -> Callable[[State], State]:
        return jax.jit(
            lambda state: convert(jax.tree.map(to_device, state)),
            out_shardings=with_leaves(leaf_shardings, chosen),
            donate_argnums=0 if donate else (),
        )

    if not on_host:
        return compiled(on_device)
    groups = [on_device, *([i] for i in on_host)]
    programs = [(group, compiled(group)) for group in groups]

    def convert_in_groups(state: State) -> State:
        leaves: list[Any] = jax.tree.leaves(state)
        for group, program in programs:
            converted = jax.tree.leaves(program(with_leaves(leaves, group)))
            for i, x in zip(group, converted, strict=True):
                leaves[i] = x
        result: State = jax.tree.unflatten(structure, leaves)
        return result

    return convert_in_groups


def with_sharding(
    x: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    """Adds a sharding to an abstract array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
