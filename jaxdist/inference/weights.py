"""Weights as programs of many tokens read them: in the compute dtype, gathered once
where a device has room.

In training devices of the mesh axis `context` share out parameters and their state, and
gather a layer's kernels when it has its turn. Here each token has all layers' turns,
and there is no state: the kernels' shards over `context` are gathered once a call,
before the first token.
"""

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist.hardware.chips import chip_for
from jaxdist.parallel import precision
from jaxdist.parallel.axes import SEQUENCE_AXES
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec, Tree

# (trainable, model state, frozen): the arguments of `ModelSpec.assemble`
Weights = tuple[Tree, Tree, Tree]
# of a device's memory for weights, as stored and gathered; the rest is for cache and
# activations
MOST = 0.5


def laid_out(
    spec: ModelSpec, weights: Weights, mesh: Mesh, rules: Rules, compute: str
) -> tuple[Weights, Rules]:
    """Returns the weights as tokens read them, and the rules by which they lie.

    The values are those of training, where every product casts its kernel; what float32
    parts read (the norms' scales) stays as it is. Call it while a program is traced.

    Args:
      rules: by which the weights are stored.
    """
    trainable, model_state, frozen = weights
    if not spec.casts_itself:
        cast, frozen = precision.cast((trainable, frozen), compute)
    else:
        cast = jax.tree.map(
            lambda x, names: precision.cast(x, compute) if len(names) > 1 else x,
            trainable,
            spec.names,
        )
    kept = dataclasses.replace(
        rules, shards=tuple(a for a in rules.shards if a not in SEQUENCE_AXES)
    )
    if all(rules.shape.sizes[axis] == 1 for axis in SEQUENCE_AXES) or mesh.size == 1:
        return (cast, model_state, frozen), rules
    resident = _bytes(spec, (trainable, frozen), rules)
    needed = resident + _bytes(spec, (cast, frozen), kept)
    if not fits(needed, mesh.devices.flat[0].device_kind):
        return (cast, model_state, frozen), rules

    def gathered(x: jax.Array, names) -> jax.Array:
        # Held to its shards first, or the partitioner might gather what is not cast
        # yet: twice the bytes.
        for one in (rules, kept):
            place = NamedSharding(mesh, one.stored(names, x.shape))
            x = jax.lax.with_sharding_constraint(x, place)
        return x

    cast, frozen = (
        jax.tree.map(gathered, tree, names)
        for tree, names in ((cast, spec.names), (frozen, spec.frozen_names))
    )
    return (cast, model_state, frozen), kept


def fits(size: int, device_kind: str) -> bool:
    """Checks whether a device has room for so many bytes of weights; one that is not
    known has.
    """
    chip = chip_for(device_kind)
    return chip is None or size <= MOST * chip.capacity_bytes


def _bytes(spec: ModelSpec, trees: tuple[Tree, Tree], rules: Rules) -> int:
    """Returns a device's bytes of (trainable, frozen) parameters that lie by some
    rules.
    """
    sizes = (
        math.prod(rules.shard_dims(rules.stored(names, x.shape), x.shape))
        * x.dtype.itemsize
        for tree, all_names in zip(trees, (spec.names, spec.frozen_names), strict=True)
        for x, names in zip(
            jax.tree.leaves(tree),
            jax.tree.leaves(all_names, is_leaf=lambda n: isinstance(n, tuple)),
            strict=True,
        )
    )
    return sum(sizes)
