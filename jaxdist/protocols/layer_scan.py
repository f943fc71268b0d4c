"""A scan over layers of several kinds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def _in_groups(start: int, stop: int, size: int, x: jax.Array) -> jax.Array:
    """Cuts layers `start` to `stop` of [L, ...] into [groups, size, ...]."""
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
    """Scans over layers like `jax.lax.scan`; the kind of a layer is static in the body.

    With a pattern of several kinds, a step of the scan is a group of layers, one of
    each kind. Layers beyond whole groups are one group in a second scan.

    Args:
      body: (carry, number of the layer, its item of `state`, its kind) -> (carry,
        output).
      carry: initial carry.
      state: parameters of the layers, and further arrays, [L, ...].
      pattern: kinds of layers, repeated over the depth.
      first: number of the first layer.
      stride: number of layers in an item, if that is a group. The body gets the number
        of the group's first layer.
      reverse: start with the last layer.

    Returns:
      The last carry, and the outputs of the layers, stacked in their order.
    """
    depth = jax.tree.leaves(state)[0].shape[0]
    period = len(pattern)
    items = (first + jnp.arange(0, depth * stride, stride), state)
    if period == 1:
        (kind,) = pattern

        def apply_layer(carry: Any, item: Any) -> tuple[Any, Any]:
            return body(carry, *item, kind)

        return jax.lax.scan(apply_layer, carry, items, reverse=reverse)
    order = -1 if reverse else 1

    def apply_group(carry: Any, items: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(items)
        layers = [
            jax.tree.unflatten(structure, layer)
            for layer in zip(*map(jnp.unstack, leaves), strict=True)
        ]
        outputs = []
        # the last group may have fewer layers than the pattern has kinds
        for item, kind in list(zip(layers, pattern, strict=False))[::order]:
            carry, output = body(carry, *item, kind)
            outputs.append(output)
        return carry, jax.tree.map(lambda *xs: jnp.stack(xs), *outputs[::order])

    whole = depth - depth % period
    spans = [(0, whole, period), (whole, depth, depth - whole)]
    outputs = []
    for start, stop, size in spans[::order]:
        if start == stop:
            continue
        groups = jax.tree.map(partial(_in_groups, start, stop, size), items)
        carry, output = jax.lax.scan(apply_group, carry, groups, reverse=reverse)
        outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output))
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs), *outputs[::order])
