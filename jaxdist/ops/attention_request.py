"""Requests: the arguments of attention, for all backends and forms.

Letters: `T` keys; see `attention` for the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Options(NamedTuple):
    """Options of attention; hashable, so they can be a static argument."""

    scale: float  # factor of the logits
    causal: bool
    softcap: float | None  # None: no cap
    window: int | None  # tokens that a token sees, itself included; None: all


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """Queries, keys, values and options of one call."""

    q: jax.Array  # [B, S, H, N]
    k: jax.Array  # [B, T, K, N]
    v: jax.Array  # [B, T, K, V]; V is N in most models
    # [B, T] documents of the keys; a token sees equal ids only. None: one document
    segment_ids: jax.Array | None
    options: Options = field(metadata={"static": True})
    # [B, S] documents of the queries; None: those of the keys
    query_ids: jax.Array | None = None
    # int32: which of T / S equal parts of the keys' positions the queries have; None:
    # the queries have the positions of the keys
    part: jax.Array | None = None

    @property
    def heads(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        return self.q, self.k, self.v

    @property
    def segments(self) -> tuple[jax.Array, jax.Array] | None:
        """Segment ids of the queries and of the keys; None: one document."""
        if self.segment_ids is None:
            return None
        if self.query_ids is None:
            return self.segment_ids, self.segment_ids
        return self.query_ids, self.segment_ids

    def with_heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> "Request":
        """Replaces the queries, keys and values."""
        return replace(self, q=q, k=k, v=v)

    def of_part(
        self,
        part: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
    ) -> "Request":
        """Replaces the keys by keys of more positions than the queries have.

        Args:
          part: number of the part of these positions that the queries have.
          k: keys [B, T, K, N].
          v: values [B, T, K, V].
          segment_ids: documents of the keys [B, T]; None: one document.
        """
        query_ids = None
        if segment_ids is not None:
            size = self.q.shape[1]
            query_ids = jax.lax.dynamic_slice_in_dim(segment_ids, part * size, size, 1)
        return replace(
            self, k=k, v=v, segment_ids=segment_ids, query_ids=query_ids, part=part
        )

    def gradients(self, dq: jax.Array, dk: jax.Array, dv: jax.Array) -> "Request":
        """Builds the gradient of this request, in the dtypes of its arrays."""
        return Request(
            q=dq.astype(self.q.dtype),
            k=dk.astype(self.k.dtype),
            v=dv.astype(self.v.dtype),
            segment_ids=None,
            options=self.options,
        )


def inner_products(out_BSHN: jax.Array, grad_BSHN: jax.Array) -> jax.Array:
    """Multiplies result and gradient and sums over each head, [B, S, H] float32.

    This equals the sum of p * dp over all keys, with S / N times less work.
    """
    return jnp.sum(out_BSHN.astype(jnp.float32) * grad_BSHN.astype(jnp.float32), -1)


class Result(NamedTuple):
    """Attention of some queries to all keys, as the backward pass needs it."""

    grad: jax.Array  # [B, S, H, V] gradient of the result
    inner: jax.Array  # [B, S, H] result of `inner_products`
    lse: jax.Array  # [B, S, H] logsumexp of the logits


class Pieces(NamedTuple):
    """Functions for some queries and some keys: parts of a softmax, without a window."""

    # request -> (out [B, S, H, V], logsumexp [B, S, H]), float32
    forward: Callable[[Request], tuple[jax.Array, jax.Array]]
    # (request, result of the whole softmax) -> gradients of q, k and v, float32
    backward: Callable[[Request, Result], tuple[jax.Array, jax.Array, jax.Array]]
