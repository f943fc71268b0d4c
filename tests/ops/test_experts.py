"""Mixtures of experts on one device: equal to all experts on all tokens, with the work
of the chosen ones.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.experts import experts, route
from jaxdist.ops.experts import grouped_matmul as grouped
from jaxdist.telemetry import flops, hlo
from support.models import worst

B, S, D, F, E, K = 4, 24, 16, 20, 8, 2
TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def nothing_to_promote():
    with jax.numpy_rank_promotion("allow"):  # the reference formulas are plain
        yield


@lru_cache
def arrays(skewed: bool = False) -> tuple:
    """Returns x, the router's logits and the kernels; skewed: all choose among a
    quarter of the experts.
    """
    random = np.random.default_rng(3)
    x, logits = random.normal(size=(B, S, D)), random.normal(size=(B, S, E))
    if skewed:
        logits[..., E // 4 :] -= 50
    gate, up = random.normal(size=(2, E, D, F)) * D**-0.5
    down = random.normal(size=(E, F, D)) * F**-0.5
    return tuple(a.astype(np.float32) for a in (x, logits, gate, up, down))


def dense(x, ids, weights, gate, up, down, keep=1.0):
    """Returns the mixture from all experts' outputs of all tokens; `keep` [B, S, k]."""
    share = (jax.nn.one_hot(ids, E) * (weights * keep)[..., None]).sum(2)
    h = jnp.einsum("bsd,edf->bsef", x, up)
    h = (
        jax.nn.silu(h)
        if gate is None
        else jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * h
    )
    return jnp.einsum("bsef,efd,bse->bsd", h, down, share)


def value_and_grads(function, x, logits, *kernels, **options):
    """Returns the output (and what is beside it) and the gradients of x, logits and
    kernels.
    """
    cotangent = np.random.default_rng(4).normal(size=x.shape).astype(np.float32)

    def scalar(x, logits, kernels):
        routing = route(logits, K)
        out = function(x, routing.ids, routing.weights, *kernels, **options)
        return jnp.sum((out if isinstance(out, jax.Array) else out.x) * cotangent), out

    run = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))
    (_, out), gradients = run(x, logits, kernels)
    return jax.device_get((out, gradients))


ours = partial(experts, activation=jax.nn.silu)


@pytest.mark.parametrize("skewed", [False, True])
def test_values_and_gradients_are_those_of_all_experts_on_all_tokens(skewed):
    x, logits, *kernels = arrays(skewed)
    expected, expected_gradients = value_and_grads(dense, x, logits, *kernels)
    out, gradients = value_and_grads(ours, x, logits, *kernels)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected_gradients))
    assert worst(out.x, expected) < TOLERANCE
    assert worst(gradients, expected_gradients) < TOLERANCE
    load = np.bincount(np.asarray(route(logits, K).ids).ravel(), minlength=E)
    np.testing.assert_array_equal(out.stats.load, load)
    assert load.sum() == B * S * K
    assert (load[E // 4 :].sum() == 0) == skewed
    assert out.stats.dropped == 0


def test_without_a_gate():
    x, logits, _, up, down = arrays()
    expected = value_and_grads(
        lambda *args: dense(*args[:3], None, *args[3:]), x, logits, up, down
    )
    out, gradients = value_and_grads(
        lambda *args: ours(*args[:3], None, *args[3:]), x, logits, up, down
    )
    assert worst((out.x, gradients), expected) < TOLERANCE


@pytest.mark.parametrize("skewed", [False, True])
def test_capacity_keeps_the_first_choices_of_each_sequence(skewed):
    x, logits, *kernels = arrays(skewed)
    ids, factor = np.asarray(route(logits, K).ids), 1.25
    limit, keep = int(np.ceil(factor * S * K / E)), np.zeros((B, S, K), np.float32)
    for b in range(B):
        taken = np.zeros(E, int)
        for s, j in np.ndindex(S, K):
            keep[b, s, j] = taken[ids[b, s, j]] < limit
            taken[ids[b, s, j]] += 1
    assert 0 < keep.mean() < 1
    expected = value_and_grads(partial(dense, keep=keep), x, logits, *kernels)
    out, gradients = value_and_grads(ours, x, logits, *kernels, capacity_factor=factor)
    assert worst((out.x, gradients), expected) < TOLERANCE
    assert out.stats.dropped == (1 - keep).sum()
    np.testing.assert_array_equal(out.stats.load, np.bincount(ids.ravel(), minlength=E))


def test_tokens_left_out_take_no_part():
    x, logits, *kernels = arrays()
    valid = np.arange(S)[None] < np.array([S, 5, 17, 0])[:, None]
    expected = value_and_grads(
        partial(dense, keep=valid[..., None]), x, logits, *kernels
    )
    out, gradients = value_and_grads(ours, x, logits, *kernels, valid_BS=valid)
    assert worst((out.x, gradients), expected) < TOLERANCE
    assert np.abs(out.x[~valid]).max() == 0
    assert np.abs(gradients[0][~valid]).max() == 0
    assert out.stats.load.sum() == valid.sum() * K


def test_tokens_that_do_not_count_are_computed_and_never_dropped():
    x, logits, *kernels = arrays(skewed=True)
    counted = np.zeros((B, S), bool)
    counted[:, 1::8] = True
    plain, _ = value_and_grads(ours, x, logits, *kernels)
    out, _ = value_and_grads(
        ours, x, logits, *kernels, counted_BS=counted, capacity_factor=1.0
    )
    assert plain.stats.dropped == out.stats.dropped == 0  # as they take no places
    np.testing.assert_array_equal(out.x, plain.x)
    assert out.stats.load.sum() == counted.sum() * K
    tight, _ = value_and_grads(
        ours, x, logits, *kernels, counted_BS=counted, capacity_factor=0.25
    )
    assert 0 < tight.stats.dropped <= counted.sum() * K
    np.testing.assert_array_equal(tight.x[~counted], plain.x[~counted])


# --- grouped products -----------------------------------------------------------------

SIZES = {
    "even": [32] * 6,
    "skewed": [0, 130, 0, 1, 0, 61],
    "one": [0, 0, 0, 0, 192, 0],
    "spare rows": [3, 40, 9, 0, 20, 7],
    "none": [0] * 6,
}


def interpreted() -> grouped.Backend:
    """Returns the TPU's kernels, run on CPU: there, what they do not write is NaN."""
    from jaxdist.ops.experts import tpu

    products = (
        partial(product, interpret=True)
        for product in (tpu.matmul, tpu.kernel_gradient)
    )
    hidden_rows = partial(tpu.hidden_gradients, interpret=True)
    options = {"turns_down": True, "hidden_gradients": hidden_rows}
    return grouped.Backend(
        "megablox", "interpreted", tpu.allocated, *products, **options
    )


@lru_cache
def products(backend: str):
    """Returns the backend with its jitted products."""
    chosen = interpreted() if backend == "tpu" else grouped.BACKENDS[backend]
    matmul = jax.jit(chosen.matmul, static_argnames="transposed")
    return chosen, matmul, jax.jit(chosen.kernel_gradient, static_argnums=4)


@pytest.mark.parametrize(
    "backend", ["cpu", "gpu", pytest.param("tpu", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_meets_its_own_groups_kernel(backend, sizes):
    chosen, matmul, gradient = products(backend)
    random, G, total = np.random.default_rng(0), len(sizes), sum(sizes)
    rows = chosen.allocated(192, G)
    x, dy = random.normal(size=(rows, 12)), random.normal(size=(rows, 20))
    kernels, before = random.normal(size=(2, G, 12, 20))
    x, dy, kernels, before = (a.astype(np.float32) for a in (x, dy, kernels, before))
    group, sizes = np.repeat(np.arange(G), sizes), np.array(sizes, np.int32)
    forward = np.einsum("rk,rkn->rn", x[:total], kernels[group])
    backward = np.einsum("rn,rkn->rk", dy[:total], kernels[group])
    summed = before.copy()
    np.add.at(summed, group, x[:total, :, None] * dy[:total, None, :])
    assert total == 0 or worst(matmul(x, kernels, sizes)[:total], forward) < TOLERANCE
    assert (
        total == 0
        or worst(matmul(dy, kernels, sizes, transposed=True)[:total], backward)
        < TOLERANCE
    )
    assert worst(gradient(x, dy, sizes, before, jnp.float32), summed) < TOLERANCE
    assert worst(gradient(x, dy, sizes, None, jnp.float32), summed - before) < TOLERANCE


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.relu])
def test_the_kernel_of_hidden_rows_gives_what_autodiff_does(activation):
    from jaxdist.ops.experts import feed_forward, tpu

    random = np.random.default_rng(0)
    gate, up, dh = random.normal(size=(3, 48, 256)).astype(np.float32)
    weights = random.normal(size=48).astype(np.float32)
    arguments = activation, (gate, up), dh, weights
    run = jax.make_jaxpr(partial(tpu.hidden_gradients, activation, interpret=True))(
        (gate, up), dh, weights
    )
    assert "pallas_call" in str(run)
    assert (
        worst(
            tpu.hidden_gradients(*arguments, interpret=True),
            feed_forward.hidden_gradients(*arguments),
        )
        < TOLERANCE
    )
    strange = partial(tpu.hidden_gradients, lambda x: jnp.sort(x, -1), interpret=True)
    assert "pallas_call" not in str(jax.make_jaxpr(strange)((gate, up), dh, weights))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_no_load_makes_more_than_about_twice_the_work_on_a_gpu(sizes):
    share = grouped.share_rows(192, len(sizes))
    further = int(grouped.further_shares(np.array(sizes), share).sum())
    together = max(1, len(sizes) // 4)
    assert (further > 0) == (max(sizes) > share)
    assert (len(sizes) + -(-further // together) * together) * share <= 2.5 * 192 + len(
        sizes
    ) * 16


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_the_products_of_other_platforms_make_the_same_mixture(backend, monkeypatch):
    """With tokens left out, so that there are spare rows: nothing of them reaches a
    result.
    """
    x, logits, *kernels = arrays()
    valid = np.arange(S)[None] < np.array([S, 5, 17, 0])[:, None]
    expected, expected_gradients = value_and_grads(
        ours, x, logits, *kernels, valid_BS=valid
    )
    monkeypatch.setitem(grouped.BACKENDS, "cpu", products(backend)[0])
    out, gradients = value_and_grads(ours, x, logits, *kernels, valid_BS=valid)
    assert worst((out.x, gradients), (expected.x, expected_gradients)) < TOLERANCE


def test_the_program_on_cpu_does_the_work_of_the_chosen_experts():
    tokens, width, inner, count = 1024, 32, 48, 16
    x, kernel = jnp.ones((1, tokens, width)), jnp.ones((count, width, inner))
    # an even load, in whole blocks
    ids = jnp.arange(2 * tokens).reshape(1, tokens, 2) % count

    def loss(x, weights, gate, up, down):
        return jnp.sum(experts(x, ids, weights, gate, up, down, jax.nn.silu).x ** 2)

    arguments = x, jnp.ones((1, tokens, 2)), kernel, kernel, kernel.swapaxes(1, 2)
    program = (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*arguments).compile()
    )
    module = hlo.parse(program.as_text())
    assert "ragged-dot" not in program.as_text()
    # Loops over the blocks of an expert run as often as it has blocks: their bodies are
    # counted by hand.
    share, rows = (
        2 * tokens // count,
        grouped.BACKENDS["cpu"].allocated(2 * tokens, count),
    )
    block = grouped.block_rows(rows - grouped.MAX_BLOCK, count)
    assert share % (2 * block) == 0
    work = products = 0
    for instructions in module.computations.values():
        for step in instructions.values():
            amount = flops.instruction_flops(instructions, step)
            if not amount:
                continue
            products += 1
            own = amount / (2 * width * inner)  # rows of this product
            assert own in (block, 2 * block)
            work += amount * count * share / own
    active = 2 * 2 * tokens * width * inner
    # three forward, six gradients; gate and up again, unless XLA keeps them
    assert products in (9, 11)
    assert work == pytest.approx(products * active, rel=0.05)
