"""An optimizer update that goes through the layers one by one, for state in the host's
memory.

A whole tree that a step moves in and out saves nothing: the compiler brings over all of
it at once. So a loop over the layers takes a layer's moments from the host, updates its
parameters in place and writes the moments back where they came from. Parameters that
are no layer's follow, one after another. Vectors (norm scales, biases) stay on the
device: their many small copies would cost more time than they hold bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import trees
from jaxdist.parallel import execution
from jaxdist.parallel.offload import HOST, on_host, to_device, to_host
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import Tree
from jaxdist.protocols.param_names import STACKED, STACKS, Names

Leaves = dict[str, Any]  # of a tree, by name


class Trained(NamedTuple):
    """What an update changes: trees, or their leaves by name."""

    params: Any
    moments: Any
    ema: Any  # None without a moving average


class Scalars(NamedTuple):
    """What all parameters are updated with."""

    scale: jax.Array  # of summed gradients
    rate: jax.Array  # of updates
    good: jax.Array  # False: nothing changes


@dataclass(frozen=True)
class Part:
    """Parameters that are updated together: a stack's, layer by layer, or one that is
    no layer's.
    """

    names: dict[str, Names]  # parameter -> its logical names
    transform: optax.GradientTransformation  # of these parameters alone
    loop: tuple[int, ...] = ()  # dims that count layers
    waits: bool = True  # its moments are in the host's memory


@dataclass(frozen=True)
class LayerwiseUpdate:
    """How parameters, their moments and their moving average change, a part after
    another.
    """

    parts: tuple[Part, ...]
    ema_decay: float
    memory_kind: str = HOST  # where moments wait; "device" to compare with

    def apply(self, before: Trained, gradients: Tree, scalars: Scalars) -> Trained:
        """Returns the trees after an update by summed gradients."""
        leaves = Trained(*map(trees.flatten_names, before))
        slopes = trees.flatten_names(gradients)
        after = Trained(*map(dict, leaves))
        done = Leaves()
        for part in self.parts:
            # One part after another: else the moments of several may be on the device
            # at once.
            own, done = jax.lax.optimization_barrier(
                ({name: slopes[name] for name in part.names}, done)
            )
            after.params.update(done)
            # What is no parameter's (a count) each part reads as it was.
            new = self._update_layers(part, _of_part(part, leaves), own, scalars)
            for tree, changed in zip(after, new, strict=True):
                tree.update(changed)
            done = new.params
        return Trained(*map(_in_structure, before, after))

    def waiting(self, abstract: Trained) -> Trained:
        """Marks the leaves that wait in the host's memory, as trees of bools."""
        shapes = trees.flatten_names(abstract.params)
        held = {name for part in self.parts if part.waits for name in part.names}

        def waits(path, leaf: Any) -> bool:
            owner = _owner(trees.join(path), shapes)
            return (
                self.memory_kind == HOST
                and owner in held
                and leaf.shape == shapes[owner].shape
            )

        moments, ema = (
            jax.tree_util.tree_map_with_path(waits, tree) for tree in abstract[1:]
        )
        return Trained(jax.tree.map(lambda _: False, abstract.params), moments, ema)

    def _update_layers(
        self, part: Part, before: Trained, gradients: Leaves, scalars: Scalars
    ) -> Trained:
        """Returns the leaves of a part after its update."""
        if not part.waits:
            return self._update(part, before, gradients, scalars)
        sizes = [next(iter(before.params.values())).shape[dim] for dim in part.loop]
        # One that is no layer's has a loop, too, of one turn if the step is good: what
        # a loop reads cannot be fetched before it, and otherwise the compiler fetches
        # such moments while layers need the memory.
        turns = math.prod(sizes) if sizes else scalars.good.astype(jnp.int32)

        def body(i: jax.Array, now: Trained) -> Trained:
            at = (
                dict(zip(part.loop, jnp.unravel_index(i, sizes), strict=True))
                if sizes
                else {}
            )

            def layer(name: str, stack: jax.Array, first: jax.Array) -> jax.Array:
                # What is no parameter's (a count) is the same for all layers: it moves
                # once.
                return (
                    to_device(_cut(stack, at)) if _owner(name, before.params) else first
                )

            def written(name: str, stack: jax.Array, new: jax.Array) -> jax.Array:
                return _put(stack, new, at) if _owner(name, before.params) else new

            old = Trained(
                *(_map_named(layer, *pair) for pair in zip(now, before, strict=True))
            )
            own = {name: _cut(x, at) for name, x in gradients.items()}
            new = _put_back(self._update(part, old, own, scalars), now)
            return Trained(
                *(_map_named(written, *pair) for pair in zip(now, new, strict=True))
            )

        return jax.lax.fori_loop(0, turns, body, before)

    def _update(
        self, part: Part, before: Trained, gradients: Leaves, scalars: Scalars
    ) -> Trained:
        """Returns the leaves of a part, or of one layer of it, after its update."""
        scaled = {
            name: _as_state(g * scalars.scale, part.names[name])
            for name, g in gradients.items()
        }
        params = trees.unflatten_names(before.params)
        state = _in_structure(
            jax.eval_shape(part.transform.init, params), before.moments
        )
        updates, state = part.transform.update(
            trees.unflatten_names(scaled), state, params
        )
        new: Leaves = {}
        for name, update in trees.flatten_names(updates).items():
            step = _as_state(update, part.names[name]) * scalars.rate
            new[name] = optax.apply_updates(before.params[name], step)
        ema = {
            name: e + (1 - self.ema_decay) * (new[name] - e)
            for name, e in before.ema.items()
        }
        after = Trained(new, trees.flatten_names(state), ema)
        return jax.tree.map(
            lambda new, old: jnp.where(scalars.good, new, old), after, before
        )


def build_parts(
    roles: Tree,
    names: Tree,
    transform_of: Callable[[Tree], optax.GradientTransformation],
) -> tuple[Part, ...]:
    """Returns the parts of trained parameters: all vectors, each stack's others, then
    each other one.

    Args:
      names: logical names; those of a pipeline's stack dims with them.
      transform_of: the optimizer of parameters with these roles, the same for each
        layer and parameter.
    """
    by_name = trees.flatten_names(roles)
    leaves = jax.tree_util.tree_leaves_with_path(
        names, is_leaf=lambda x: isinstance(x, tuple)
    )
    named = {trees.join(path): own for path, own in leaves}
    groups: dict[str, list[str]] = {}
    for name, role in by_name.items():
        top = name.partition(trees.SEPARATOR)[0]
        group = top if top in STACKED else name
        if role.kind == "vector":
            group = ""
        groups.setdefault(group, []).append(name)

    def part(group: str, members: list[str]) -> Part:
        own = {name: named[name] for name in members}
        stack = (0, 2) if own[members[0]][:3] == STACKS[:3] else (0,)
        transform = transform_of(
            trees.unflatten_names({name: by_name[name] for name in members})
        )
        return Part(
            own, transform, stack if group in STACKED else (), waits=group != ""
        )

    order = sorted(groups, key=lambda group: (group != "", group not in STACKED))
    return tuple(part(group, groups[group]) for group in order)


def _of_part(part: Part, leaves: Trained) -> Trained:
    """Returns the leaves that a part reads and changes."""
    params = {name: leaves.params[name] for name in part.names}
    state = jax.eval_shape(part.transform.init, trees.unflatten_names(params))
    moments = {name: leaves.moments[name] for name in trees.flatten_names(state)}
    return Trained(
        params,
        moments,
        {name: leaves.ema[name] for name in params if name in leaves.ema},
    )


def _owner(name: str, params: Leaves) -> str | None:
    """Returns the parameter that a leaf of the optimizer's state belongs to: its name
    ends in that one's.
    """
    keys = name.split(trees.SEPARATOR)
    ends = (trees.SEPARATOR.join(keys[start:]) for start in range(len(keys)))
    return next((end for end in ends if end in params), None)


def _in_structure(tree: Tree, leaves: Leaves) -> Tree:
    """Returns the leaves by name in a tree's structure."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in trees.flatten_names(tree)]
    )


def _map_named(
    function: Callable[..., jax.Array], leaves: Leaves, others: Leaves
) -> Leaves:
    return {name: function(name, x, others[name]) for name, x in leaves.items()}


def _cut(x: jax.Array, at: dict[int, jax.Array]) -> jax.Array:
    """Returns one layer of a stack, its stack dims kept."""
    for dim, i in at.items():
        x = jax.lax.dynamic_slice_in_dim(x, i, 1, dim)
    return x


def _put(x: jax.Array, layer: jax.Array, at: dict[int, jax.Array]) -> jax.Array:
    """Returns a stack with one layer replaced."""
    return jax.lax.dynamic_update_slice(
        x, layer, [at.get(dim, 0) for dim in range(x.ndim)]
    )


def _put_back(after: Trained, before: Trained) -> Trained:
    """Moves what was computed on the device to the memory where it was before."""
    return jax.tree.map(
        lambda new, old: to_host(new) if on_host(old) else new, after, before
    )


def _as_state(x: jax.Array, names: Names) -> jax.Array:
    """Returns x laid out as optimizer state: each shard updates its own part."""
    return execution.current().lay_out(x, Rules.state, names)
