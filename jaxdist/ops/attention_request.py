"""One call of attention, as every backend and every form over several devices takes it.

Letters: `T` keys, else see `attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Options(NamedTuple):
    """What shapes attention besides arrays; hashable, so a static argument."""

    scale: float
    causal: bool
    softcap: float | None
    window: int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """Queries, the keys and values that they attend to, and what shapes it."""

    q: jax.Array  # [B, S, H, N]
    k: jax.Array  # [B, T, K, N]
    v: jax.Array  # [B, T, K, N]
    # [B, T] of the keys: tokens see equal ids only; None: one segment
    segment_ids: jax.Array | None
    options: Options = field(metadata={"static": True})
    # [B, S] of the queries; None: they have the keys' places, and so their ids
    query_ids: jax.Array | None = None
    # int32: the queries have this one of the T / S equal parts of the keys' places;
    # None: they have the places of the keys given
    part: jax.Array | None = None

    @property
    def heads(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries, keys and values."""
        return self.q, self.k, self.v

    @property
    def segments(self) -> tuple[jax.Array, jax.Array] | None:
        """The segment ids of queries and keys; None: one segment."""
        if self.segment_ids is None:
            return None
        of_queries = self.segment_ids if self.query_ids is None else self.query_ids
        return of_queries, self.segment_ids

    def with_heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> "Request":
        """Gives it other queries, keys and values."""
        return replace(self, q=q, k=k, v=v)

    def of_part(
        self,
        part: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
    ) -> "Request":
        """Gives it keys of more places, of which its queries have a part.

        Args:
          segment_ids: of the keys.
        """
        query_ids = None
        if segment_ids is not None:
            size = self.q.shape[1]
            query_ids = jax.lax.dynamic_slice_in_dim(segment_ids, part * size, size, 1)
        return replace(
            self, k=k, v=v, segment_ids=segment_ids, query_ids=query_ids, part=part
        )

    def gradients(self, dq: jax.Array, dk: jax.Array, dv: jax.Array) -> "Request":
        """Makes the gradient of a request, in the dtypes of its arrays."""
        return Request(
            dq.astype(self.q.dtype),
            dk.astype(self.k.dtype),
            dv.astype(self.v.dtype),
            None,
            self.options,
        )


def inner_products(out_BSHN: jax.Array, grad_BSHN: jax.Array) -> jax.Array:
    """Sums result times gradient over each head, [B, S, H] float32.

    It equals the sum of p * dp over all keys, and is S / N times less work.
    """
    return jnp.sum(out_BSHN.astype(jnp.float32) * grad_BSHN.astype(jnp.float32), -1)


class Result(NamedTuple):
    """What the backward pass knows of the attention of some queries to all keys."""

    grad: jax.Array  # [B, S, H, N]
    inner: jax.Array  # [B, S, H] sum over the head of result times gradient
    lse: jax.Array  # [B, S, H] logsumexp of the logits


class Pieces(NamedTuple):
    """Attention of some queries to some keys, as parts of a softmax. No window."""

    # request -> (out [B, S, H, N], logsumexp [B, S, H]), float32
    forward: Callable[[Request], tuple[jax.Array, jax.Array]]
    # (request, result of the whole softmax) -> gradients of q, k and v, float32
    backward: Callable[[Request, Result], tuple[jax.Array, jax.Array, jax.Array]]
