"""Where the arrays of a state lie: on which devices, and in which memory."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.offload import HOST
from jaxdist.parallel.optimizer_sharding import state_specs
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step.layerwise import Trained
from jaxdist.step.state import State
from jaxdist.step.update import UpdateRule


def state_shardings(
    spec: ModelSpec, abstract: State, mesh: Mesh, rules: Rules, rule: UpdateRule
) -> State:
    """Places each array of a state.

    Args:
      spec: with blocks by stage, where a pipeline cuts them up.
      abstract: the state's shapes.
      rule: says what waits in the host's memory.
    """

    def specs(tree: Tree, names: Tree, rule: Callable[..., P]) -> Tree:
        return jax.tree.map(lambda x, own: rule(own, x.shape), tree, names)

    whole = jax.tree.map(lambda _: P(), abstract)
    moments = specs(spec.trainable, spec.names, rules.state)
    optimizer = state_specs(abstract.opt_state.optimizer, spec.trainable, moments)
    state = whole._replace(
        trainable=specs(spec.trainable, spec.names, rules.stored),
        frozen=specs(spec.frozen, spec.frozen_names, rules.stored),
        model_state=specs(spec.model_state, spec.state_names, rules.computed),
        opt_state=whole.opt_state._replace(optimizer=optimizer),
        ema=None if abstract.ema is None else moments,
        modules={
            name: specs(module.frozen, module.frozen_names, rules.stored)
            for name, module in spec.modules.items()
        },
    )
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s), state, is_leaf=lambda x: isinstance(x, P)
    )
    return _on_host(rule, abstract, shardings)


def _on_host(rule: UpdateRule, abstract: State, shardings: State) -> State:
    """Returns the shardings, those of what waits in the host's memory with its memory
    kind.
    """
    if rule.layerwise is None:
        return shardings
    trees = (abstract.trainable, abstract.opt_state.optimizer, abstract.ema)
    _, moments, ema = rule.layerwise.waiting(Trained(*trees))

    def move(waits: bool, where: NamedSharding) -> NamedSharding:
        return where.with_memory_kind(HOST) if waits else where

    optimizer = jax.tree.map(move, moments, shardings.opt_state.optimizer)
    average = None if ema is None else jax.tree.map(move, ema, shardings.ema)
    return shardings._replace(
        opt_state=shardings.opt_state._replace(optimizer=optimizer), ema=average
    )
