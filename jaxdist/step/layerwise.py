"""An optimizer update that goes layer by layer, for moments in the host's memory.

If a step moved whole trees between host and device, the compiler would copy all of them
at once, and nothing would be saved. So a loop over the layers copies the moments of a
layer from the host, updates its parameters in place and writes the moments back.
Parameters outside of the layers follow one by one. Vectors (norm scales, biases) stay on
the device: their many small copies would take more time than their bytes are worth.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import trees
from jaxdist.parallel import execution
from jaxdist.parallel.offload import HOST, on_host, to_device, to_host
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import STACKED, STACKS, Names
from jaxdist.protocols.model_spec import Tree

DEVICE = "device"  # the kind of a device's own memory
Leaves = dict[str, Any]  # leaves of a tree by name


class Trained(NamedTuple):
    """The trees that an update changes, or their leaves by name."""

    params: Any
    moments: Any
    ema: Any  # None = the run has no moving average


class Scalars(NamedTuple):
    """The scalars of an update, equal for all parameters."""

    clip_factor: jax.Array  # factor from summed gradients to their clipped mean
    rate: jax.Array  # factor of the updates
    good: jax.Array  # False = the update is skipped


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that are updated together: all vectors, a stack, or one other array."""

    names: dict[str, Names]  # logical names of each parameter, by the parameter's name
    transform: optax.GradientTransformation  # optimizer of these parameters only
    layer_dims: tuple[int, ...] = ()  # dims that count layers
    waits: bool = True  # whether its moments wait in the host's memory

    def place(self, i: jax.Array, sizes: Sequence[int]) -> dict[int, jax.Array]:
        """Finds a layer in the group's stacks.

        Args:
          i: number of the layer.
          sizes: sizes of `layer_dims`.

        Returns:
          The layer's index by stack dim.
        """
        numbers = jnp.unravel_index(i, sizes)
        return dict(zip(self.layer_dims, numbers, strict=True))


@dataclass(frozen=True)
class LayerwiseUpdate:
    """The update of all parameters, their moments and their average, group by group."""

    groups: tuple[UpdateGroup, ...]
    ema_decay: float
    memory_kind: str = HOST  # where moments wait; "device" serves comparisons
    params_kind: str = DEVICE  # where parameters wait between steps

    def apply(self, before: Trained, gradients: Tree, scalars: Scalars) -> Trained:
        """Updates the trees by summed gradients."""
        leaves = Trained(*map(trees.flatten_names, before))
        all_gradients = trees.flatten_names(gradients)
        after = Trained(*map(dict, leaves))
        done = Leaves()
        for group in self.groups:
            # The barrier orders the groups. Without it, the moments of several groups
            # may be on the device at once.
            group_gradients, done = jax.lax.optimization_barrier(
                ({name: all_gradients[name] for name in group.names}, done)
            )
            after.params.update(done)
            # State that belongs to no parameter, such as a count, enters each group
            # with its old value.
            new = self._update_layers(
                group, _of_group(group, leaves), group_gradients, scalars
            )
            for tree, changed in zip(after, new, strict=True):
                tree.update(changed)
            done = new.params
        return Trained(*map(_in_structure, before, after))

    def waiting(self, abstract: Trained) -> Trained:
        """Marks the leaves that wait in the host's memory, as trees of bools."""
        shapes = trees.flatten_names(abstract.params)
        held = {name for group in self.groups if group.waits for name in group.names}

        def waits(path: tuple[Any, ...], leaf: Any) -> bool:
            owner = _owner(trees.join(path), shapes)
            return (
                self.memory_kind == HOST
                and owner in held
                and leaf.shape == shapes[owner].shape
            )

        params = {name: name in held and self.params_kind == HOST for name in shapes}
        return Trained(
            params=_in_structure(abstract.params, params),
            moments=jax.tree_util.tree_map_with_path(waits, abstract.moments),
            ema=jax.tree_util.tree_map_with_path(waits, abstract.ema),
        )

    def fetch(self, params: Tree, compute: str) -> Tree:
        """Copies parameters from the host's memory to the device, layer by layer.

        Layers are cast to the compute dtype on the way, so the device never holds them
        in the dtype in which they are stored. All other parameters keep their dtype:
        the gradient of a table is a long sum. Gradients have the dtype of the copy.

        Args:
          params: the stored parameters. Those on the device stay as they are.
          compute: dtype of matrix products and activations.
        """
        leaves = trees.flatten_names(params)
        for group in self.groups:
            if not group.waits or self.params_kind == DEVICE:
                continue
            stored = {name: leaves[name] for name in group.names}
            if not group.layer_dims:
                leaves |= {name: to_device(x) for name, x in stored.items()}
                continue
            leaves |= _fetch_stack(group, stored, compute)
        return _in_structure(params, leaves)

    def _update_layers(
        self, group: UpdateGroup, before: Trained, gradients: Leaves, scalars: Scalars
    ) -> Trained:
        """Updates the leaves of a group, layer by layer."""
        if not group.waits:
            return self._update(group, before, gradients, scalars)
        stack = next(iter(before.params.values()))
        sizes = [stack.shape[dim] for dim in group.layer_dims]
        # A single parameter also gets a loop, with one turn if the step is good. The
        # compiler cannot move a loop's reads before the loop. Otherwise it would fetch
        # the moments while layers need the memory.
        turns = math.prod(sizes) if sizes else scalars.good.astype(jnp.int32)

        def update_layer(i: jax.Array, now: Trained) -> Trained:
            place = group.place(i, sizes) if sizes else {}

            # State that belongs to no parameter, such as a count, is the same for all
            # layers. It changes once: each layer reads its first value.
            def read(name: str, stack: jax.Array, first: jax.Array) -> jax.Array:
                if not _owner(name, before.params):
                    return first
                return to_device(_cut(stack, place))

            def write(name: str, stack: jax.Array, layer: jax.Array) -> jax.Array:
                if not _owner(name, before.params):
                    return layer
                return _put(stack, layer, place)

            old = Trained(
                *(_map_named(read, *pair) for pair in zip(now, before, strict=True))
            )
            layer_gradients = {name: _cut(x, place) for name, x in gradients.items()}
            new = _put_back(self._update(group, old, layer_gradients, scalars), now)
            return Trained(
                *(_map_named(write, *pair) for pair in zip(now, new, strict=True))
            )

        after: Trained = jax.lax.fori_loop(0, turns, update_layer, before)
        return after

    def _update(
        self, group: UpdateGroup, before: Trained, gradients: Leaves, scalars: Scalars
    ) -> Trained:
        """Updates the leaves of a group, or of one of its layers."""
        scaled = {
            name: _as_state(g * scalars.clip_factor, group.names[name])
            for name, g in gradients.items()
        }
        params = trees.unflatten_names(before.params)
        state = _in_structure(
            jax.eval_shape(group.transform.init, params), before.moments
        )
        updates, state = group.transform.update(
            trees.unflatten_names(scaled), state, params
        )
        new: Leaves = {}
        for name, update in trees.flatten_names(updates).items():
            step = _as_state(update, group.names[name]) * scalars.rate
            new[name] = optax.apply_updates(before.params[name], step)
        ema = {
            name: e + (1 - self.ema_decay) * (new[name] - e)
            for name, e in before.ema.items()
        }
        after = Trained(new, trees.flatten_names(state), ema)
        kept: Trained = jax.tree.map(
            lambda new, old: jnp.where(scalars.good, new, old), after, before
        )
        return kept


def build_groups(
    roles: Tree,
    names: Tree,
    transform_of: Callable[[Tree], optax.GradientTransformation],
) -> tuple[UpdateGroup, ...]:
    """Divides the trained parameters into groups.

    The first group has all vectors. A group for each stack follows, and then a group
    for each other parameter.

    Args:
      roles: role of each parameter.
      names: logical names of each parameter, with those of a pipeline's stack dims.
      transform_of: makes the optimizer of parameters from their roles. It must treat
        each layer and parameter independently.
    """
    by_name = trees.flatten_names(roles)
    leaves = jax.tree_util.tree_leaves_with_path(
        names, is_leaf=lambda x: isinstance(x, tuple)
    )
    names_of = {trees.join(path): dims for path, dims in leaves}
    groups: dict[str, list[str]] = {}
    for name, role in by_name.items():
        top = name.partition(trees.SEPARATOR)[0]
        key = top if top in STACKED else name
        if role.kind == "vector":
            key = ""
        groups.setdefault(key, []).append(name)

    def build_group(key: str, members: list[str]) -> UpdateGroup:
        layer_dims: tuple[int, ...] = ()
        if key in STACKED:
            by_stage = names_of[members[0]][:3] == STACKS[:3]
            layer_dims = (0, 2) if by_stage else (0,)
        member_roles = trees.unflatten_names({name: by_name[name] for name in members})
        return UpdateGroup(
            names={name: names_of[name] for name in members},
            transform=transform_of(member_roles),
            layer_dims=layer_dims,
            waits=key != "",
        )

    order = sorted(groups, key=lambda key: (key != "", key not in STACKED))
    return tuple(build_group(key, groups[key]) for key in order)


def _fetch_stack(group: UpdateGroup, stored: Leaves, compute: str) -> Leaves:
    """Copies the stacks of a group to the device, cast to the compute dtype."""
    stack = next(iter(stored.values()))
    sizes = [stack.shape[dim] for dim in group.layer_dims]

    def fetched_dtype(x: jax.Array) -> jnp.dtype:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.dtype(compute) if is_float else x.dtype

    def fetch_layer(i: jax.Array, now: Leaves) -> Leaves:
        place = group.place(i, sizes)

        def fetch(name: str, stack: jax.Array, whole: jax.Array) -> jax.Array:
            layer = to_device(_cut(whole, place)).astype(stack.dtype)
            return _put(stack, layer, place)

        return _map_named(fetch, now, stored)

    empty = {
        name: execution.current().lay_out(
            jnp.zeros(x.shape, fetched_dtype(x)), Rules.stored, group.names[name]
        )
        for name, x in stored.items()
    }
    fetched: Leaves = jax.lax.fori_loop(0, math.prod(sizes), fetch_layer, empty)
    return fetched


def _of_group(group: UpdateGroup, leaves: Trained) -> Trained:
    """Selects the leaves that a group reads and changes."""
    params = {name: leaves.params[name] for name in group.names}
    state = jax.eval_shape(group.transform.init, trees.unflatten_names(params))
    return Trained(
        params=params,
        moments={name: leaves.moments[name] for name in trees.flatten_names(state)},
        ema={name: leaves.ema[name] for name in params if name in leaves.ema},
    )


def _owner(name: str, params: Leaves) -> str | None:
    """Finds the parameter that a leaf of the optimizer's state belongs to.

    The leaf's name ends with the parameter's name.
    """
    keys = name.split(trees.SEPARATOR)
    ends = (trees.SEPARATOR.join(keys[start:]) for start in range(len(keys)))
    return next((end for end in ends if end in params), None)


def _in_structure(tree: Tree, leaves: Leaves) -> Tree:
    """Puts leaves by name into the structure of a tree."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in trees.flatten_names(tree)]
    )


def _map_named(
    function: Callable[[str, jax.Array, jax.Array], jax.Array],
    leaves: Leaves,
    others: Leaves,
) -> Leaves:
    return {name: function(name, x, others[name]) for name, x in leaves.items()}


def _cut(x: jax.Array, place: dict[int, jax.Array]) -> jax.Array:
    """Cuts one layer out of a stack; the stack dims stay, with size 1.

    Args:
      x: the stack.
      place: index of the layer by stack dim.
    """
    for dim, i in place.items():
        x = jax.lax.dynamic_slice_in_dim(x, i, 1, dim)
    return x


def _put(x: jax.Array, layer: jax.Array, place: dict[int, jax.Array]) -> jax.Array:
    """Replaces one layer of a stack."""
    starts = [place.get(dim, 0) for dim in range(x.ndim)]
    return jax.lax.dynamic_update_slice(x, layer, starts)


def _put_back(after: Trained, before: Trained) -> Trained:
    """Moves new arrays to the host's memory if the old ones are there."""
    moved: Trained = jax.tree.map(
        lambda new, old: to_host(new) if on_host(old) else new, after, before
    )
    return moved


def _as_state(x: jax.Array, names: Names) -> jax.Array:
    """Gives an array the sharding of the optimizer's state."""
    sharded: jax.Array = execution.current().lay_out(x, Rules.state, names)
    return sharded
