"""How the fields of a batch are named and cut into parts.

Letters: B samples, S sequence length, k values of a token.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.protocols.model import Batch


def dim_names(batch: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """Names the dims of each field: samples, sequence, others None.

    The second dim of a field [B, S] is the sequence. So is that of a field [B, S, k],
    where the batch has a field [B, S] of the same S.

    Args:
      batch: arrays, or their shapes.
    """
    lengths = {x.shape[1] for x in batch.values() if x.ndim == 2}

    def names(x: Any) -> tuple[str | None, ...]:
        of_tokens = x.ndim == 2 or (x.ndim == 3 and x.shape[1] in lengths)
        lead = ("batch", "sequence") if of_tokens else ("batch",)
        return (*lead, *(None,) * (x.ndim - len(lead)))[: x.ndim]

    return {name: names(x) for name, x in batch.items()}


def split_batch(batch: Batch, parts: int) -> dict[str, jax.Array]:
    """Cuts each field [B, ...] into [parts, B / parts, ...], see `split`."""
    names = dim_names(batch)
    return {name: split(x, parts, names[name][1:]) for name, x in batch.items()}


def split(x: jax.Array, parts: int, names: tuple[str | None, ...] = ()) -> jax.Array:
    """Cuts [B, ...] into [parts, B / parts, ...].

    Part i takes every parts-th sample, from i on: each batch shard then cuts up its own
    samples, and none has to move to another device.

    Args:
      names: of the dims after the first.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])
    rows = execution.shard(rows, "batch", None, *names)
    return jnp.moveaxis(rows, 1, 0)


def join_parts(parts: Batch) -> dict[str, jax.Array]:
    """Puts fields [parts, B / parts, ...] together again: the inverse of
    `split_batch`.
    """
    return {
        name: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])
        for name, x in parts.items()
    }
