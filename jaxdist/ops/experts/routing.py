"""Router of a mixture of experts: the experts of each token and their weights.

All arithmetic is in float32. Letters: `E` experts, `k` experts of a token.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """Experts and weights of each token."""

    # [..., k] float32 weights of the chosen experts' outputs; differentiable
    weights: jax.Array
    ids: jax.Array  # [..., k] int32 chosen experts, the highest score first
    # [..., E] float32 scores of all experts, without the bias; differentiable
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
    group_experts: int = 2,
    given: jax.Array | None = None,
) -> Routing:
    """Chooses the k experts with the highest scores for each token.

    Tokens are not compared with one another, so any part of a batch may be routed
    alone. Among equal scores, the expert of the lower number is chosen.

    Args:
      logits: [..., E]. They are cast to float32. Compute them in float32, or near-ties
        are lost.
      k: number of experts of a token.
      scores: "softmax" over the experts (Mixtral), or "sigmoid" of each expert
        (DeepSeek-V3, arXiv:2412.19437).
      bias: [E] float32, added to the scores for the choice only, never to the weights.
        It has no gradient.
      normalise: whether the k weights are divided by their sum.
      scale: factor of the final weights.
      groups: number of equal groups that the experts are divided into; 0: no groups.
      top_groups: number of groups that a token may choose from, the best ones.
      group_experts: number of experts of a group, those with the highest scores (with
        the bias), whose sum ranks the group. DeepSeek-V2: 1. DeepSeek-V3: 2.
      given: [..., k] int32, experts that replace the chosen ones. An entry below 0
        keeps the chosen expert.

    Raises:
      ValueError: the numbers do not fit, or the kind of scores is unknown.
    """
    E = logits.shape[-1]
    _check(experts=E, k=k, scores=scores, groups=groups, top_groups=top_groups)
    if group_experts not in (1, 2):
        raise ValueError(f"route: group_experts={group_experts}; choose 1 or 2")
    logits = logits.astype(jnp.float32)
    if scores == "softmax":
        all_scores = jax.nn.softmax(logits, -1)
    else:
        all_scores = jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(all_scores)
    if bias is not None:
        bias = jax.lax.stop_gradient(bias).astype(jnp.float32)
        choice = choice + bias.reshape((1,) * (choice.ndim - 1) + (E,))
    if groups and top_groups < groups:
        choice = _in_top_groups(choice, groups, top_groups, group_experts)
    ids = _top_k(choice, k)
    if given is not None:
        ids = jnp.where(given < 0, ids, given)
    # A comparison, because with an index the partitioner gathers the scores of all
    # tokens on every device.
    chosen = ids[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, (*ids.shape, E), ids.ndim
    )
    weights = jnp.where(chosen, all_scores[..., None, :], 0).sum(-1)
    if normalise:
        # 1e-20, because all sigmoids may be 0
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(weights * scale, ids, all_scores)


def _check(*, experts: int, k: int, scores: str, groups: int, top_groups: int) -> None:
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


def _in_top_groups(
    choice: jax.Array, groups: int, top_groups: int, group_experts: int
) -> jax.Array:
    """Sets the scores outside of a token's best groups to -inf."""
    grouped = choice.reshape(*choice.shape[:-1], groups, -1)
    rank = grouped.max(-1)
    if group_experts == 2:
        rank = rank + _without_top(grouped)[0].max(-1)
    best = _top_k(rank, top_groups)
    group = jax.lax.broadcasted_iota(jnp.int32, (*best.shape, groups), best.ndim)
    is_best = (best[..., None] == group).any(-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _top_k(scores: jax.Array, k: int) -> jax.Array:
    """Finds the indices of the k highest scores of the last dim, [..., k] int32.

    It takes k maxima instead of `jax.lax.top_k`: any partitioner leaves reductions with
    their tokens.
    """
    indices = []
    for _ in range(k):
        scores, index = _without_top(scores)
        indices.append(index)
    return jnp.stack(indices, -1)


def _without_top(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sets the highest score of the last dim to -inf.

    Returns:
      The scores, and the index of the highest one (the last index if all are NaN).
    """
    count = scores.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    is_highest = scores == scores.max(-1, keepdims=True)
    highest = jnp.where(is_highest, index, count - 1).min(-1)
    return jnp.where(index == highest[..., None], -jnp.inf, scores), highest
