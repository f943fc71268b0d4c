"""How often gradients cross the axes that copy parameters: once a step, or with each
part of it.

With accumulation or a pipeline a step has parts. Summed with each, gradients cross
`data` as often as there are parts; summed once, every device adds up its own parts
first, in a region that is manual over those axes (`gradients.sum_gradients`). There a
model sees its replica's samples of a part alone, so its loss must be a sum over
samples, and its random numbers must come from the samples' own.
"""

import math
import warnings
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxdist.config import ConfigError, trees
from jaxdist.parallel.sharding import Rules, is_vector
from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.param_names import Names
from jaxdist.protocols.sample_sums import who_sums_over_samples

Reduce = Literal["auto", "each", "once"]


class Reduction(NamedTuple):
    """Which axes gradients are summed over once a step, and why."""

    once: tuple[str, ...]  # mesh axes; () = over all of them with each part
    over: str  # "data 2 x fsdp 4"; "" where nothing is summed in parts
    why_each: str = ""


def choose(spec: ModelSpec, rules: Rules, setting: Reduce, *, parts: int) -> Reduction:
    """Chooses how gradients are summed in a step of so many parts (accumulation x
    microbatches).

    Raises:
      ConfigError: `once` is set, and the model does not allow it.
    """
    axes = rules.replica_axes
    sizes = rules.shape.sizes
    if not axes or (parts == 1 and sizes["pipeline"] == 1):
        return Reduction((), "")
    over = " x ".join(f"{axis} {sizes[axis]}" for axis in axes)
    why = "mesh.reduce=each" if setting == "each" else obstacle(spec, rules)
    if setting == "auto":
        why = why or _risk(spec, rules)
    if why and setting == "once":
        raise ConfigError(refusal(why))
    return Reduction((), over, why) if why else Reduction(axes, over)


def obstacle(spec: ModelSpec, rules: Rules) -> str:
    """Explains why a model's parts may not be added up by replica; "" if they may."""
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
    stored = (
        inside.stored(names, x.shape) for x, names in spec.named_parameters().values()
    )
    if not (spec.casts_itself or spec.staged) and any(any(where) for where in stored):
        # XLA aborts on an index into what is split in a region (see `gradients`), and
        # all may be indexed.
        return (
            f"{name} may look up by index what devices split; give it embed, blocks and head, or leave its "
            f"parameters whole (mesh.zero=2, mesh.tensor=1)"
        )
    return ""


def _risk(spec: ModelSpec, rules: Rules) -> str:
    """Explains why a model might end the process in a region that its author has not
    asked for; or "".

    XLA aborts on an index into a parameter that devices split there ("Check failed:
    partition_group_list"), where two more axes are in use. Ours look up without an
    index (`jaxdist.ops`); a pipeline's stages are a region anyway.
    """
    owner = who_sums_over_samples(spec.model_class)
    pipelined = rules.shape.sizes["pipeline"] > 1
    split = [
        axis
        for axis, size in rules.inside(rules.replica_axes).shape.sizes.items()
        if size > 1
    ]
    if (
        pipelined
        or len(split) < 2
        or owner is None
        or owner.__module__.startswith("jaxdist.")
    ):
        return ""
    return (
        f"{spec.model_class.__name__} may look up by index what {' and '.join(split)} split, where XLA would "
        f"end the process; mesh.reduce=once tries it"
    )


def refusal(why: str) -> str:
    """Formats what is wrong with `mesh.reduce=once` where gradients cannot be summed
    so.
    """
    return f"mesh.reduce=once: {why}; set mesh.reduce=auto or each"


def axes_for(
    chosen: Reduction, batch: Batch, rules: Rules, setting: Reduce, parts: int
) -> tuple[str, ...]:
    """Returns the axes over which a batch's gradients are summed once a step.

    Raises:
      ConfigError: `once` is set, and the batch has not as many samples for each replica
        and part.
    """
    unit = parts * math.prod(rules.shape.sizes[axis] for axis in chosen.once)
    uneven = [
        f"{name} {list(x.shape)}"
        for name, x in batch.items()
        if not x.ndim or x.shape[0] % unit
    ]
    if not chosen.once or not uneven:
        return chosen.once
    entries = ", ".join(uneven)
    why = f"{entries} of the batch cannot be divided into {parts} parts x {chosen.over} = {unit}"
    if setting == "once":
        raise ConfigError(refusal(why))
    warnings.warn(
        f"gradients are summed over {chosen.over} with each part: {why}", stacklevel=2
    )
    return ()


def sent_dtype(names: Names, dims: tuple[int, ...], reduce: str) -> jnp.dtype:
    """Returns the dtype in which a parameter's gradient, once it is added up, crosses
    devices.

    What kernels' products give crosses in `precision.reduce`; tables, whose gradients
    are long sums of few rows, and vectors in float32: as they do where each part is
    summed.
    """
    kernel = "vocab" not in names and not is_vector(names, dims)
    return jnp.dtype(reduce if kernel else "float32")


def summed_bytes(spec: ModelSpec, rules: Rules, reduce: str) -> int:
    """Returns the bytes of gradients that a device takes to one sum over replicas.

    Args:
      spec: with its blocks by stage, where a pipeline cuts them up.
    """
    return sum(
        math.prod(rules.shard_dims(rules.gradient(names, x.shape), x.shape))
        * sent_dtype(names, x.shape, reduce).itemsize
        for x, names in spec.named_trainable().values()
    )
