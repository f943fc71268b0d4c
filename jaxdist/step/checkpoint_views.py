"""The state as checkpoints have it: layers flat, whatever the pipeline."""

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
from jaxdist.step.state import State


@dataclass(frozen=True)
class StateCut:
    """How a pipeline cuts up the layers of a state's models."""

    policy: Staging
    modules: Mapping[str, Staging]  # of frozen modules, by name

    @classmethod
    def of(cls, staging: Staging | None, spec: ModelSpec) -> StateCut | None:
        """Returns the cut of a policy and its frozen modules; None: no pipeline.

        Args:
          spec: with flat blocks.
        """
        if staging is None:
            return None
        modules = {
            name: staging.for_model(module) for name, module in spec.modules.items()
        }
        return cls(staging, modules)

    def staged(self, state: State) -> State:
        """Returns a flat state with its blocks by stage."""
        policy = self.policy.staged(state._replace(modules={}))
        return policy._replace(modules=self.staged_modules(state.modules))

    def flat(self, state: State) -> State:
        """Returns a state with its blocks flat, padding left out."""
        policy = self.policy.flat(state._replace(modules={}))
        modules = {
            name: self.modules[name].flat(tree) for name, tree in state.modules.items()
        }
        return policy._replace(modules=modules)

    def staged_modules(self, modules: Mapping[str, Tree]) -> dict[str, Tree]:
        """Returns flat arrays of frozen modules with their blocks by stage."""
        return {name: self.modules[name].staged(tree) for name, tree in modules.items()}


class CheckpointViews(NamedTuple):
    """The state as checkpoints have it, layers flat; without a pipeline the state
    itself.
    """

    flat: Any  # State -> State
    staged: Any  # flat State -> State; its buffers are taken
    # flat State without optimizer state and average -> State, to evaluate
    staged_weights: Any
    abstract: State  # flat, ShapeDtypeStructs with their shardings


def build_views(
    cut: StateCut | None, abstract: State, shardings: Any
) -> CheckpointViews:
    """Builds the views of a state that a pipeline cuts up.

    Args:
      cut: the pipeline's; None: no pipeline.
      abstract: the state's shapes.
      shardings: of the state.
    """
    if cut is None:
        return CheckpointViews(
            flat=_same,
            staged=_same,
            staged_weights=_same,
            abstract=jax.tree.map(with_sharding, abstract, shardings),
        )
    shapes = jax.eval_shape(cut.flat, abstract)
    stages = cut.policy.stages

    def flat_sharding(
        flat: jax.ShapeDtypeStruct, leaf: jax.ShapeDtypeStruct, where: NamedSharding
    ):
        if flat.shape == leaf.shape:
            return where
        whole_stages = flat.shape[0] % stages == 0
        spec = P("pipeline" if whole_stages else None, *where.spec[3:])
        return NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)

    flat = jax.tree.map(flat_sharding, shapes, abstract, shardings)
    of_weights = shardings._replace(opt_state=None, ema=None)
    return CheckpointViews(
        flat=_view(cut.flat, flat, donate=False),
        staged=_view(cut.staged, shardings, donate=True),
        staged_weights=jax.jit(cut.staged, out_shardings=of_weights),
        abstract=jax.tree.map(with_sharding, shapes, flat),
    )


def _same(state: State) -> State:
    return state


def _view(
    view: Callable[[Tree], Tree], shardings: State, *, donate: bool
) -> Callable[[State], State]:
    """Returns the compiled view; what waits in the host's memory passes the device one
    array at a time.
    """
    places: list[NamedSharding] = jax.tree.leaves(shardings)
    structure: Any = jax.tree.structure(shardings)
    waiting = [i for i, where in enumerate(places) if where.memory_kind == HOST]
    others = [i for i in range(len(places)) if i not in waiting]

    def some(leaves: Sequence[Any], chosen: Sequence[int]) -> State:
        return structure.unflatten(
            [x if i in chosen else None for i, x in enumerate(leaves)]
        )

    def compiled(chosen: Sequence[int]) -> Callable[[State], State]:
        return jax.jit(
            lambda part: view(jax.tree.map(to_device, part)),
            out_shardings=some(places, chosen),
            donate_argnums=0 if donate else (),
        )

    if not waiting:
        return compiled(others)
    programs = [
        (chosen, compiled(chosen)) for chosen in (others, *([i] for i in waiting))
    ]

    def viewed(state: State) -> State:
        leaves: list[Any] = jax.tree.leaves(state)
        for chosen, program in programs:
            done = jax.tree.leaves(program(some(leaves, chosen)))
            for i, x in zip(chosen, done, strict=True):
                leaves[i] = x
        return structure.unflatten(leaves)

    return viewed


def with_sharding(
    x: jax.ShapeDtypeStruct, where: NamedSharding
) -> jax.ShapeDtypeStruct:
    """Returns an abstract array with a sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
