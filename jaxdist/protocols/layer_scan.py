"""A scan over layers whose kinds repeat."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def _in_groups(start: int, stop: int, size: int, x: jax.Array) -> jax.Array:
    """Returns layers `start` to `stop` of [L, ...] as [groups, size, ...]."""
    return x[start:stop].reshape(-1, size, *x.shape[1:])


def scan_layers(
    body: Callable[..., tuple[Any, Any]],
    carry: Any,
    state: Any,
    pattern: tuple[str, ...],
    *,
    first: int | jax.Array = 0,
    stride: int = 1,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Returns the last carry and what the layers gave, stacked: `jax.lax.scan` where
    layers differ.

    A layer's kind is static in the body. So a pattern of several kinds is a scan over
    groups of layers, and one over the group of those beyond whole groups.

    Args:
      body: (carry, layer number, its parameters, its kind) -> (carry, what it gives).
      state: parameters, and what else each layer has, [L, ...].
      first: number of the first layer.
      stride: layers of each item, where it is a group; the body gets the number of the
        first of them.
    """
    depth = jax.tree.leaves(state)[0].shape[0]
    period = len(pattern)
    items = (first + jnp.arange(0, depth * stride, stride), state)
    if period == 1:
        return jax.lax.scan(
            lambda carry, item: body(carry, *item, *pattern),
            carry,
            items,
            reverse=reverse,
        )
    turn = -1 if reverse else 1

    def one_group(carry, items):
        leaves, structure = jax.tree.flatten(items)
        layers = [
            jax.tree.unflatten(structure, each)
            for each in zip(*map(jnp.unstack, leaves), strict=True)
        ]
        outputs = []
        for item, kind in list(zip(layers, pattern, strict=False))[::turn]:
            carry, out = body(carry, *item, kind)
            outputs.append(out)
        return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *outputs[::turn])

    whole = depth - depth % period
    outputs = []
    for start, stop, size in [(0, whole, period), (whole, depth, depth - whole)][
        ::turn
    ]:
        if start < stop:
            part = jax.tree.map(partial(_in_groups, start, stop, size), items)
            carry, out = jax.lax.scan(one_group, carry, part, reverse=reverse)
            outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs[::turn])
