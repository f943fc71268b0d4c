"""Weights as generation and scoring read them: in the compute dtype, gathered once.

In training, devices of the mesh axis `context` share parameters, and gather a layer's
kernels when the layer runs. Generation runs all layers for every token and keeps no
optimizer state. So it gathers the shards over `context` once per call, before the first
token, if a device has room for them.
"""

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist.hardware.chips import chip_for
from jaxdist.parallel import precision
from jaxdist.parallel.axes import SEQUENCE_AXES
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import Names
from jaxdist.protocols.model_spec import ModelSpec, Tree

# (trainable, model state, frozen): the arguments of `ModelSpec.assemble`
Weights = tuple[Tree, Tree, Tree]
# largest share of a device's memory for weights, both as stored and as gathered; the
# rest is for the cache and activations
MAX_WEIGHT_SHARE = 0.5


def laid_out(
    spec: ModelSpec, weights: Weights, mesh: Mesh, rules: Rules, compute: str
) -> tuple[Weights, Rules]:
    """Casts the weights, and gathers their shards over `context` if there is room.

    The values equal those of training, where every matmul casts its kernel. Parameters
    that are used in float32, such as scales of norms, are not cast. Call it while a
    program is traced.

    Args:
      spec: the model.
      weights: as stored.
      mesh: the devices.
      rules: the sharding rules by which the weights are stored.
      compute: the compute dtype, "float32" or "bfloat16".

    Returns:
      The weights, and the sharding rules that they follow now.
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
    is_split = any(rules.shape.sizes[axis] > 1 for axis in SEQUENCE_AXES)
    if not is_split or mesh.size == 1:
        return (cast, model_state, frozen), rules
    gathered_rules = dataclasses.replace(
        rules, shards=tuple(a for a in rules.shards if a not in SEQUENCE_AXES)
    )
    stored_bytes = _bytes_per_device(spec, (trainable, frozen), rules)
    gathered_bytes = _bytes_per_device(spec, (cast, frozen), gathered_rules)
    device_kind = mesh.devices.flat[0].device_kind
    if not fits(stored_bytes + gathered_bytes, device_kind):
        return (cast, model_state, frozen), rules

    def gather(x: jax.Array, names: Names) -> jax.Array:
        # The first constraint holds the cast array in its shards. Without it the
        # partitioner may gather the array before the cast, which is twice the bytes.
        for placement in (rules, gathered_rules):
            sharding = NamedSharding(mesh, placement.stored(names, x.shape))
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    cast = jax.tree.map(gather, cast, spec.names)
    frozen = jax.tree.map(gather, frozen, spec.frozen_names)
    return (cast, model_state, frozen), gathered_rules


def fits(num_bytes: int, device_kind: str) -> bool:
    """Checks whether a device has room for weights; an unknown device always has."""
    chip = chip_for(device_kind)
    return chip is None or num_bytes <= MAX_WEIGHT_SHARE * chip.capacity_bytes


def _bytes_per_device(spec: ModelSpec, trees: tuple[Tree, Tree], rules: Rules) -> int:
    """Counts a device's bytes of (trainable, frozen) parameters under some rules."""
    total = 0
    for tree, names_tree in zip(trees, (spec.names, spec.frozen_names), strict=True):
        arrays = jax.tree.leaves(tree)
        all_names = jax.tree.leaves(names_tree, is_leaf=lambda n: isinstance(n, tuple))
        for x, names in zip(arrays, all_names, strict=True):
            shard = rules.shard_dims(rules.stored(names, x.shape), x.shape)
            total += math.prod(shard) * x.dtype.itemsize
    return total
