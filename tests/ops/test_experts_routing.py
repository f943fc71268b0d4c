"""The router: which experts a token chooses, and their weights, against formulas of the
families.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.experts import route

B, S, E, K = 2, 9, 16, 4
LOGITS = np.random.default_rng(0).normal(size=(B, S, E)).astype(np.float32)


@pytest.fixture(autouse=True)
def nothing_to_promote():
    with jax.numpy_rank_promotion("allow"):  # the reference formulas are plain
        yield


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_as_mixtral_qwen_and_olmoe(normalise):
    routing = route(LOGITS, K, normalise=normalise)
    weights, ids = jax.lax.top_k(jax.nn.softmax(LOGITS), K)
    weights = weights / weights.sum(-1, keepdims=True) if normalise else weights
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)
    np.testing.assert_allclose(routing.scores, jax.nn.softmax(LOGITS), rtol=1e-6)


def test_sigmoid_with_bias_and_groups_as_deepseek_v3():
    bias = np.random.default_rng(1).normal(size=E).astype(np.float32)
    routing = route(
        LOGITS, K, scores="sigmoid", bias=bias, scale=2.5, groups=4, top_groups=2
    )
    scores = np.asarray(jax.nn.sigmoid(LOGITS))
    ids, weights = np.zeros((B, S, K), int), np.zeros((B, S, K))
    for b, s in np.ndindex(B, S):
        choice = (scores[b, s] + bias).reshape(4, -1)
        best = np.argsort(-np.sort(choice)[:, -2:].sum(-1))[:2]
        closed = [group for group in range(4) if group not in best]
        choice[closed] = -np.inf
        ids[b, s] = np.argsort(-choice.ravel())[:K]
        chosen = scores[b, s, ids[b, s]]  # without the bias
        weights[b, s] = 2.5 * chosen / (chosen.sum() + 1e-20)
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)
    assert (ids != np.asarray(route(LOGITS, K, scores="sigmoid").ids)).any()


@pytest.mark.parametrize("has_bias", [False, True])
def test_softmax_in_groups_as_deepseek_v2(has_bias):
    """A group is as good as its best expert. Weights do not sum to 1."""
    bias = np.random.default_rng(1).normal(size=E).astype(np.float32) / 10
    options = {"groups": 4, "top_groups": 2, "normalise": False, "scale": 16.0}
    if has_bias:
        options["bias"] = bias
    # nearly equal scores, or a group's best expert decides its sum of two
    logits = LOGITS / 3
    routing = route(logits, K, group_experts=1, **options)
    scores = np.asarray(jax.nn.softmax(logits))
    ids = np.zeros((B, S, K), int)
    weights = np.zeros((B, S, K))
    for b, s in np.ndindex(B, S):
        choice = scores[b, s].reshape(4, -1).copy()
        if has_bias:
            choice += bias.reshape(4, -1)
        best = np.argsort(-choice.max(-1))[:2]
        closed = [group for group in range(4) if group not in best]
        choice[closed] = -np.inf
        ids[b, s] = np.argsort(-choice.ravel())[:K]
        weights[b, s] = 16 * scores[b, s, ids[b, s]]
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)
    by_two = route(logits, K, **options)
    assert (ids != np.asarray(by_two.ids)).any(), "two experts rank groups otherwise"
    assert (ids != np.asarray(route(logits, K).ids)).any()


def test_gradients_are_those_of_the_chosen_scores():
    bias, cotangent = (
        jnp.linspace(-1, 1, E),
        np.random.default_rng(2).normal(size=(B, S, K)),
    )

    def ours(logits, bias):
        return jnp.sum(route(logits, K, bias=bias).weights * cotangent)

    def plain(logits):
        ids = jax.lax.top_k(jax.nn.softmax(logits) + bias, K)[1]
        weights = jnp.take_along_axis(jax.nn.softmax(logits), ids, -1)
        return jnp.sum(weights / weights.sum(-1, keepdims=True) * cotangent)

    gradient, of_bias = jax.grad(ours, argnums=(0, 1))(LOGITS, bias)
    expected = jax.grad(plain)(LOGITS)
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(expected).max())
    assert np.abs(expected).max() > 0
    assert np.abs(of_bias).max() == 0


def test_ties_take_the_lower_numbers_and_nan_stays_nan():
    routing = route(jnp.zeros((1, 1, E)), K)
    assert routing.ids.tolist() == [[list(range(K))]]
    routing = route(jnp.full((1, 1, E), jnp.nan), K)
    assert jnp.isnan(routing.weights).all()
    assert (routing.ids < E).all()


def test_bfloat16_logits_are_scored_in_float32():
    routing = route(jnp.asarray(LOGITS, jnp.bfloat16), K)
    assert routing.weights.dtype == routing.scores.dtype == jnp.float32
    assert routing.ids.dtype == jnp.int32


@pytest.mark.parametrize(
    ("k", "options", "match"),
    [
        (17, {}, "17 of 16 experts; choose 1 to 16"),
        (0, {}, "0 of 16 experts"),
        (4, {"scores": "tanh"}, "choose softmax or sigmoid"),
        (
            4,
            {"groups": 5, "top_groups": 1},
            "16 experts in 5 groups; groups must be equal",
        ),
        (4, {"groups": 16, "top_groups": 4}, "of 2 or more"),
        (
            6,
            {"groups": 4, "top_groups": 1},
            "top_groups must be at most 4 and hold 6 experts",
        ),
        (4, {"groups": 4, "top_groups": 0}, "top_groups must be at most 4"),
        (
            4,
            {"groups": 4, "top_groups": 2, "group_experts": 3},
            "group_experts=3; choose 1 or 2",
        ),
    ],
)
def test_numbers_that_do_not_fit(k, options, match):
    with pytest.raises(ValueError, match=match):
        route(LOGITS, k, **options)
