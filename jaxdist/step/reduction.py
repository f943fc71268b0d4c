"""The reduction of gradients over replicas: once a step, or with each microbatch.

`batch_parts` says what a microbatch is. By default, the gradients of each microbatch
are summed over replicas. If they are summed once, every replica first adds up the
gradients of its microbatches. That happens in a region that is manual over
the replicas' mesh axes (`gradients.sum_gradients`). The model then sees only its
replica's samples, so its loss must be a sum over samples. Its random numbers must
depend on the samples, not on their place in the batch.
"""

import math
import warnings
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxdist.config import ConfigError, trees
from jaxdist.parallel.sharding import Rules, is_vector
from jaxdist.protocols.dim_names import Names
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.sample_sums import who_sums_over_samples

Reduce = Literal["auto", "each", "once"]


class Reduction(NamedTuple):
    """The mesh axes over which gradients are summed once a step, or why there are none."""

    axes_summed_once: tuple[str, ...]  # () = gradients are summed with each microbatch
    over: str  # such as "data 2 x fsdp 4"; "" = one microbatch or one replica
    why_each: str = (
        ""  # why gradients are summed with each microbatch; "" = they are not
    )


def choose(
    spec: ModelSpec, rules: Rules, setting: Reduce, *, microbatches: int
) -> Reduction:
    """Chooses how often gradients are summed over replicas.

    Args:
      spec: the model.
      rules: the sharding rules.
      setting: value of mesh.reduce.
      microbatches: microbatches of a step's batch, over all accumulation steps.

    Raises:
      ConfigError: the setting is `once`, and the model does not allow it.
    """
    axes = rules.replica_axes
    sizes = rules.shape.sizes
    if not axes or (microbatches == 1 and sizes["pipeline"] == 1):
        return Reduction(axes_summed_once=(), over="")
    over = " x ".join(f"{axis} {sizes[axis]}" for axis in axes)
    why = "mesh.reduce=each" if setting == "each" else obstacle(spec, rules)
    if setting == "auto":
        why = why or _risk(spec, rules)
    if not why:
        return Reduction(axes_summed_once=axes, over=over)
    if setting == "once":
        raise ConfigError(refusal(why))
    return Reduction(axes_summed_once=(), over=over, why_each=why)


def obstacle(spec: ModelSpec, rules: Rules) -> str:
    """Explains why gradients cannot be summed once a step; "" if they can."""
    name = spec.model_class.__name__
    inside = rules.inside(rules.replica_axes)
    if spec.streams:
        where = ", ".join(list(trees.flatten_names(spec.streams))[:2])
        return f"{name} draws from its own nnx.Rngs ({where}), which each replica would draw alike"
    if not spec.sums_over_samples:
        return f"{name} does not say that its loss is a sum over samples (sums_over_samples = True)"
    if not spec.objective.adds_up_samples():
        objective = type(spec.objective).__name__
        return f"{objective} does not say that it is a sum over samples (sums_over_samples = True)"
    if spec.casts_itself or spec.staged:
        return ""
    stored = (
        inside.stored(names, x.shape) for x, names in spec.named_parameters().values()
    )
    if any(any(axes) for axes in stored):
        # XLA aborts on an index into an array that is sharded in a region (see
        # `gradients._gather_edges`). Such a model may index any of its parameters.
        return (
            f"{name} may look up by index what devices split; give it embed, blocks and head, or leave its "
            f"parameters whole (mesh.zero=2, mesh.tensor=1)"
        )
    return ""


def _risk(spec: ModelSpec, rules: Rules) -> str:
    """Explains why XLA might abort in a region that the config has not asked for.

    XLA aborts on an index into a parameter that is sharded over two or more axes of a
    region ("Check failed: partition_group_list"). The models of jaxdist need no index
    (`jaxdist.ops`). A pipeline runs in a region in any case.

    Returns:
      The explanation; "" if there is no such risk.
    """
    if rules.shape.sizes["pipeline"] > 1:
        return ""
    sizes = rules.inside(rules.replica_axes).shape.sizes
    split = [axis for axis, size in sizes.items() if size > 1]
    if len(split) < 2:
        return ""
    owner = who_sums_over_samples(spec.model_class)
    if owner is None or owner.__module__.startswith("jaxdist."):
        return ""
    return (
        f"{spec.model_class.__name__} may look up by index what {' and '.join(split)} split, where XLA would "
        f"end the process; mesh.reduce=once tries it"
    )


def refusal(why: str) -> str:
    """Formats the error of a run that cannot follow `mesh.reduce=once`."""
    return f"mesh.reduce=once: {why}; set mesh.reduce=auto or each"


def axes_for(
    chosen: Reduction, batch: Batch, rules: Rules, setting: Reduce, microbatches: int
) -> tuple[str, ...]:
    """Chooses the axes over which the gradients of a batch are summed once a step.

    Args:
      chosen: the choice for the model.
      batch: the global batch.
      rules: the sharding rules.
      setting: value of mesh.reduce.
      microbatches: microbatches of a step's batch, over all accumulation steps.

    Returns:
      The axes of `chosen`; () if the batch cannot be divided by them.

    Raises:
      ConfigError: the setting is `once`, and the batch cannot be divided.
    """
    unit = microbatches * math.prod(
        rules.shape.sizes[axis] for axis in chosen.axes_summed_once
    )
    uneven = [
        f"{name} {list(x.shape)}"
        for name, x in batch.items()
        if not x.ndim or x.shape[0] % unit
    ]
    if not chosen.axes_summed_once or not uneven:
        return chosen.axes_summed_once
    entries = ", ".join(uneven)
    why = f"{entries} of the batch cannot be divided into {microbatches} microbatches x {chosen.over} = {unit}"
    if setting == "once":
        raise ConfigError(refusal(why))
    warnings.warn(
        f"gradients are summed over {chosen.over} with each microbatch: {why}",
        stacklevel=2,
    )
    return ()


def sent_dtype(names: Names, dims: tuple[int, ...], reduce: str) -> jnp.dtype:
    """Chooses the dtype in which the summed gradient of a parameter crosses devices.

    Gradients of kernels cross in `precision.reduce`. Gradients of tables are long sums
    over few rows, and cross in float32. So do gradients of vectors. The dtypes are the
    same as with a sum after each microbatch.

    Args:
      names: names of the parameter's dims.
      dims: sizes of the parameter's dims.
      reduce: value of precision.reduce.
    """
    kernel = "vocab" not in names and not is_vector(names, dims)
    return jnp.dtype(reduce if kernel else "float32")


def summed_bytes(spec: ModelSpec, rules: Rules, reduce: str) -> int:
    """Counts the bytes of gradients that a device sends to a sum over replicas.

    Args:
      spec: the model; with a pipeline, its blocks are by stage.
      rules: the sharding rules.
      reduce: value of precision.reduce.
    """
    return sum(
        math.prod(rules.shard_dims(rules.gradient(names, x.shape), x.shape))
        * sent_dtype(names, x.shape, reduce).itemsize
        for x, names in spec.named_trainable().values()
    )
