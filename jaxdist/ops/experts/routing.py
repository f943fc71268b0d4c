"""Which experts a token goes to, and with which weights: all in float32.

Letters: `E` experts, `k` chosen ones of a token.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The experts that each token goes to."""

    # [..., k] float32, of the chosen experts' outputs; differentiable
    weights: jax.Array
    ids: jax.Array  # [..., k] int32, the experts, the one with the highest score first
    # [..., E] float32, of all experts, without the bias; differentiable
    scores: jax.Array


def route(
    logits: jax.Array,
    k: int,
    *,
    scores: Scores = "softmax",
    bias: jax.Array | None = None,
    normalise: bool = True,
    scale: float = 1.0,
    groups: int = 0,
    top_groups: int = 0,
    given: jax.Array | None = None,
) -> Routing:
    """Returns the k experts with the highest scores of each token, and their weights.

    Nothing here compares tokens, so it may be called on any part of a batch. Equal
    scores choose the expert of the lower number.

    Args:
      logits: [..., E]; they are cast to float32, which a near-tie needs: compute them
        in it.
      scores: "softmax" over the experts (Mixtral), or "sigmoid" of each (DeepSeek-V3,
        arXiv:2412.19437).
      bias: [E] float32, added to the scores for the choice only, never to weights; no
        gradient.
      normalise: the k weights are divided by their sum.
      scale: what weights are multiplied with in the end.
      groups, top_groups: of `groups` equal groups of experts only the `top_groups` are
      open to a token
        whose two highest scores (with the bias) add up to the most; 0: all are.
      given: [..., k] int32, experts that tokens go to whatever their scores; below 0:
        the highest.

    Raises:
      ValueError: numbers that do not fit, or an unknown kind of scores.
    """
    E = logits.shape[-1]
    _check(E, k, scores, groups, top_groups)
    logits = logits.astype(jnp.float32)
    all_scores = (
        jax.nn.softmax(logits, -1) if scores == "softmax" else jax.nn.sigmoid(logits)
    )
    choice = jax.lax.stop_gradient(all_scores)
    if bias is not None:
        bias = jax.lax.stop_gradient(bias).astype(jnp.float32)
        choice = choice + bias.reshape((1,) * (choice.ndim - 1) + (E,))
    if groups and top_groups < groups:
        choice = _in_top_groups(choice, groups, top_groups)
    ids = _top_k(choice, k)
    ids = ids if given is None else jnp.where(given < 0, ids, given)
    # Not by index: the partitioner would gather the scores of all tokens on every
    # device.
    chosen = ids[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, (*ids.shape, E), ids.ndim
    )
    weights = jnp.where(chosen, all_scores[..., None, :], 0).sum(-1)
    if normalise:
        # sigmoids may all be 0
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(weights * scale, ids, all_scores)


def _check(experts: int, k: int, scores: str, groups: int, top_groups: int) -> None:
    if scores not in ("softmax", "sigmoid"):
        raise ValueError(f"route: scores={scores!r}; choose softmax or sigmoid")
    if not 1 <= k <= experts:
        raise ValueError(
            f"route: {k} of {experts} experts; choose 1 to {experts} experts a token"
        )
    if not groups and not top_groups:
        return
    if groups < 1 or experts % groups or experts // groups < 2:
        raise ValueError(
            f"route: {experts} experts in {groups} groups; groups must be equal, of 2 or more"
        )
    if not 1 <= top_groups <= groups or top_groups * (experts // groups) < k:
        raise ValueError(
            f"route: {k} experts a token from {top_groups} of {groups} groups of {experts // groups}; "
            f"top_groups must be at most {groups} and hold {k} experts"
        )


def _in_top_groups(choice: jax.Array, groups: int, top_groups: int) -> jax.Array:
    """Returns the scores with those outside of a token's best groups -inf."""
    grouped = choice.reshape(*choice.shape[:-1], groups, -1)
    first = grouped.max(-1)
    second = _without_top(grouped)[0].max(-1)
    best = _top_k(first + second, top_groups)
    group = jax.lax.broadcasted_iota(jnp.int32, (*best.shape, groups), best.ndim)
    open_ = (best[..., None] == group).any(-2)
    return jnp.where(open_[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _top_k(scores: jax.Array, k: int) -> jax.Array:
    """Returns the places of the k highest of the last dim, [..., k] int32.

    By k maxima, and not `jax.lax.top_k`: reductions stay with their tokens under any
    partitioner.
    """
    places = []
    for _ in range(k):
        scores, place = _without_top(scores)
        places.append(place)
    return jnp.stack(places, -1)


def _without_top(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scores with the highest of the last dim -inf, and its place (the last
    if all are NaN).
    """
    count = scores.shape[-1]
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    highest = jnp.where(scores == scores.max(-1, keepdims=True), place, count - 1).min(
        -1
    )
    return jnp.where(place == highest[..., None], -jnp.inf, scores), highest
