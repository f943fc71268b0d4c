"""The dims of a batch's fields, and how a step splits its rows.

A step splits its batch into A accumulation steps (batch.accumulation), which run one
after another. A pipeline splits each accumulation step into M microbatches. Both use
`split`: row r is in accumulation step r % A, and in its microbatch (r // A) % M.
Without a pipeline, an accumulation step is one microbatch.

Example: 16 rows over 2 batch shards, A = 2, M = 2. The loader places the rows 0 to 7
on shard 0, and the rows 8 to 15 on shard 1. No row moves after that:

    accumulation step  microbatch  rows of shard 0  rows of shard 1
    0                  0           0, 4             8, 12
    0                  1           2, 6             10, 14
    1                  0           1, 5             9, 13
    1                  1           3, 7             11, 15

The devices of a batch shard have the same place along the batch axes (`data`, `fsdp` and
`expert`), and hold the same rows.

Letters: B rows, S sequence length, k values of a token.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.protocols.model import Batch


def dim_names(batch: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """Names the dims of each field: "batch", "sequence" or None.

    The second dim of a field [B, S] is the sequence. The second dim of a field
    [B, S, k] is the sequence if the batch has a field [B, S] of the same S.

    Args:
      batch: arrays or their shapes, by name.
    """
    lengths = {x.shape[1] for x in batch.values() if x.ndim == 2}

    def names(x: Any) -> tuple[str | None, ...]:
        has_sequence = x.ndim == 2 or (x.ndim == 3 and x.shape[1] in lengths)
        lead = ("batch", "sequence") if has_sequence else ("batch",)
        return (*lead, *(None,) * (x.ndim - len(lead)))[: x.ndim]

    return {name: names(x) for name, x in batch.items()}


def split_batch(batch: Batch, parts: int) -> dict[str, jax.Array]:
    """Splits each field [B, ...] into [parts, B / parts, ...]; see `split`."""
    names = dim_names(batch)
    return {name: split(x, parts, names[name][1:]) for name, x in batch.items()}


def split(x: jax.Array, parts: int, names: tuple[str | None, ...] = ()) -> jax.Array:
    """Splits [B, ...] into [parts, B / parts, ...].

    Part i has the rows i, i + parts, i + 2 parts and so on. So each device splits the
    rows that it holds, and no row moves to another device.

    Args:
      x: the field.
      parts: number of accumulation steps, or of microbatches in one of them.
      names: names of the dims after the first.
    """
    rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:])
    rows = execution.shard(rows, "batch", None, *names)
    return jnp.moveaxis(rows, 1, 0)


def join_parts(parts: Batch) -> dict[str, jax.Array]:
    """Joins the parts of fields, [parts, B / parts, ...]. Inverts `split_batch`."""
    return {
        name: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])
        for name, x in parts.items()
    }
