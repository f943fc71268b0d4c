"""project, embed and cross_entropy: equal to plain formulas and their autodiff, on any
mesh.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.ops.cross_entropy import (
    LEAST,
    bucket_scores,
    cross_entropy,
    target_scores,
    top_scores,
)
from jaxdist.ops.dense_matmul import sum_in_shards
from jaxdist.ops.embedding import embed
from jaxdist.ops.matmul import project
from jaxdist.parallel import execution
from jaxdist.telemetry import hlo
from support.models import MIXED, ONE, Layout, rules_and_mesh, worst
from support.programs import buffer_shapes, collectives

B, S, D, F, V = 8, 12, 16, 24, 40
LAYOUTS = {
    "one": ONE,
    "mixed": MIXED,
    "fsdp": Layout(8, fsdp=8),
    "tensor": Layout(8, tensor=8),
    "zero2": Layout(8, fsdp=4, tensor=2, zero=2),
    "sequence": Layout(8, fsdp=2, tensor=4, sequence_parallel=True),
}
pytestmark = pytest.mark.usefixtures("nothing_to_promote")


@pytest.fixture
def nothing_to_promote():
    with jax.numpy_rank_promotion("allow"):  # the reference formulas are plain
        yield


@lru_cache
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    dims = {
        "x": (B, S, D),
        "gate": (D, F),
        "up": (D, F),
        "down": (F, D),
        "query": (D, 8, 4),
        "out": (8, 4, D),
        "table": (V, D),
        "head": (D, V),
    }
    found = {
        name: random.normal(size=size).astype(np.float32) for name, size in dims.items()
    }
    found["indices"] = random.integers(0, V, (B, S), dtype=np.int32)
    found["weights"] = (random.random((B, S)) < 0.7).astype(np.float32)
    found["weights"][2] = 0.5
    return found


NAMES = {
    "gate": ("d_model", "d_ff"),
    "up": ("d_model", "d_ff"),
    "down": ("d_ff", "d_model"),
    "query": ("d_model", "heads", "head_dim"),
    "out": ("heads", "head_dim", "d_model"),
    "table": ("vocab", "d_model"),
    "head": ("d_model", "vocab"),
}


def on_mesh(function, layout: Layout):
    """Returns the jitted function of (parameters, x), and it lowered with placed
    arguments.
    """
    rules, mesh = rules_and_mesh(layout)

    def inside(parameters, *inputs):
        with execution.activate(mesh, rules):
            named = {
                n: nnx.Param(value, logical=NAMES[n]) for n, value in parameters.items()
            }
            return function(named, *inputs)

    def placed(parameters, *inputs):
        specs = {n: rules.stored(NAMES[n], v.shape) for n, v in parameters.items()}
        where = {n: jax.sharding.NamedSharding(mesh, spec) for n, spec in specs.items()}
        rows = [("batch", "sequence", None)[: x.ndim] for x in inputs]
        return jax.device_put(parameters, where), *(
            jax.device_put(
                x, jax.sharding.NamedSharding(mesh, rules.activation(names, x.shape))
            )
            for x, names in zip(inputs, rows, strict=True)
        )

    return jax.jit(inside), placed


def compare(
    ours, reference, layout: Layout, parameters: list[str], *inputs, limit=2e-6
) -> None:
    """Asserts that values and gradients for parameters and x agree with the plain
    formula's.
    """
    values = {name: arrays()[name] for name in parameters}
    plain = jax.jit(jax.value_and_grad(reference, argnums=(0, 1), has_aux=True))
    expected = jax.device_get(plain(values, *inputs))
    step, placed = on_mesh(lambda p, *rest: _value_and_grad(ours, p, *rest), layout)
    found = jax.device_get(step(*placed(values, *inputs)))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected[1]))
    assert worst(found, expected) < limit


def _value_and_grad(function, parameters, x, *rest):
    def scalar(values, x):
        named = {n: nnx.Param(v, logical=NAMES[n]) for n, v in values.items()}
        return function(named, x, *rest)

    values = {name: parameter[...] for name, parameter in parameters.items()}
    return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(values, x)


# --- project --------------------------------------------------------------------------


def _projected(p, x):
    gate, up = project(x, p["gate"], p["up"])
    (q,) = project(x, p["query"])
    (y,) = project(jnp.sin(q), p["out"], contract=2)
    (z,) = project(jnp.tanh(gate) * up, p["down"])
    return (z * x).sum() + (y * x).sum(), (gate, up, q, y, z)


def _projected_plainly(p, x):
    gate, up = x @ p["gate"], x @ p["up"]
    q = jnp.einsum("bsd,dhn->bshn", x, p["query"])
    y = jnp.einsum("bshn,hnd->bsd", jnp.sin(q), p["out"])
    z = (jnp.tanh(gate) * up) @ p["down"]
    return (z * x).sum() + (y * x).sum(), (gate, up, q, y, z)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_project_equals_einsum_and_its_gradients(layout, platform, monkeypatch):
    # run what is written for a TPU
    monkeypatch.setattr(execution.Execution, "platform", platform)
    kernels = ["gate", "up", "query", "out", "down"]
    compare(_projected, _projected_plainly, layout, kernels, arrays()["x"])


@pytest.mark.parametrize("names", [("d_model", None), (None, "d_model")])
def test_a_matrix_scattered_by_tiles_is_the_same(names, monkeypatch):
    monkeypatch.setattr(execution.Execution, "sparse_core_collectives", True)
    monkeypatch.setattr(execution.Execution, "platform", "tpu")
    rules, mesh = rules_and_mesh(LAYOUTS["fsdp"])
    dims = (128, 256) if names[0] else (256, 128)
    parts = np.random.default_rng(0).normal(size=(8, *dims)).astype(np.float32)

    def summed(parts):
        with execution.activate(mesh, rules):
            rows = rules.activation(("batch",), (8,))
            spec = jax.sharding.PartitionSpec(*rows, None, None)
            return sum_in_shards(
                lambda own: own[0], (parts,), (spec,), rows, names, dims
            )

    traced = jax.jit(summed).trace(parts)
    assert "reduce_scatter" in str(traced.jaxpr)
    assert f"f32[{128 * 256 // 128},128]" in str(traced.jaxpr)
    np.testing.assert_allclose(
        traced.lower().compile()(parts), parts.sum(0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("sparse_core", [False, True])
def test_sums_over_devices_hold_compute_back_only_where_they_cannot_run_beside_it(
    sparse_core, monkeypatch
):
    monkeypatch.setattr(execution.Execution, "platform", "tpu")
    monkeypatch.setattr(execution.Execution, "sparse_core_collectives", sparse_core)

    def loss(p, x, targets, weights):
        y, _ = _projected(p, x)
        return y + cross_entropy(x, p["head"], targets, weights)[0]

    def gradients(p, *inputs):
        return _value_and_grad(lambda *given: (loss(*given), ()), p, *inputs)

    step, placed = on_mesh(gradients, LAYOUTS["fsdp"])
    values = {
        name: arrays()[name] for name in ("gate", "up", "query", "out", "down", "head")
    }
    inputs = arrays()["x"], arrays()["indices"], arrays()["weights"]
    barriers = str(step.trace(*placed(values, *inputs)).jaxpr).count(
        "optimization_barrier"
    )
    assert barriers == (0 if sparse_core else 6)


def test_projects_gradients_are_float32_whatever_the_activations():
    kernel, x = jnp.asarray(arrays()["up"]), jnp.asarray(arrays()["x"], jnp.bfloat16)

    def loss(kernel, x):
        (y,) = project(x, nnx.Param(kernel, logical=NAMES["up"]))
        assert y.dtype == jnp.bfloat16
        return y.astype(jnp.float32).sum()

    dkernel, dx = jax.grad(loss, argnums=(0, 1))(kernel, x)
    assert (dkernel.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)
    exact = np.broadcast_to(
        np.asarray(x, np.float64).sum((0, 1))[:, None], kernel.shape
    )
    # A sum of 96 bfloat16 values, exact in float32 but not in bfloat16 (8 bits).
    assert np.abs(exact).max() > 1
    assert worst(dkernel, exact) < 1e-6
    with execution.activate(reduce="bfloat16"):
        rounded = jax.grad(loss)(kernel, x)
    assert rounded.dtype == jnp.float32
    assert 1e-4 < worst(rounded, exact) < 1e-2


# --- embed ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_embed_equals_indexing_and_its_gradient(layout):
    indices = arrays()["indices"].copy()
    indices[:, ::2] = 3  # a frequent token: its gradient is a long sum

    def ours(p, x, indices):
        rows = embed(p["table"], indices)
        return (jnp.sin(rows) * x + x * x).sum(), rows

    def plain(p, x, indices):
        rows = p["table"][indices]
        return (jnp.sin(rows) * x + x * x).sum(), rows

    compare(ours, plain, layout, ["table"], arrays()["x"], indices)


def test_embeds_gradient_adds_up_in_float32():
    indices = np.zeros((4, 1024), np.int32)

    def loss(table):
        with execution.activate(compute="bfloat16"):
            rows = embed(nnx.Param(table, logical=NAMES["table"]), indices)
        assert rows.dtype == jnp.bfloat16
        return rows.astype(jnp.float32).sum()

    gradient = jax.grad(loss)(arrays()["table"])
    assert gradient.dtype == jnp.float32
    # In bfloat16 the sum of ones stops at 256.
    np.testing.assert_array_equal(gradient[0], np.full(D, 4096, np.float32))


def test_embed_moves_rows_not_the_table():
    vocab, values = 4096, {"table": np.zeros((4096, D), np.float32)}

    def rows(p, indices):
        return execution.shard(embed(p["table"], indices), "batch", "sequence", None)

    step, placed = on_mesh(rows, LAYOUTS["fsdp"])
    module = hlo.parse(
        step.lower(*placed(values, arrays()["indices"])).compile().as_text()
    )
    gathered = collectives(module, ("all-gather", "all-to-all", "all-reduce"))
    assert any(kind == "all-to-all" for _, kind, _, _ in gathered)
    assert all(vocab not in shape for _, _, _, shape in gathered)


# --- cross_entropy --------------------------------------------------------------------

# Devices that share out a sequence do so with the vocabulary, if it divides.
SPLIT = {
    "split": Layout(8, fsdp=2, context=2, tensor=2),
    "split_4": Layout(8, fsdp=2, context=4),
    "split_zero1": Layout(8, data=2, fsdp=2, context=2, zero=1),
    "indivisible": Layout(3, context=3),
}
VARIANTS = {
    "plain": {},
    "chunks": {"chunk_tokens": 3},
    "z_loss": {"z_loss": 0.1, "chunk_tokens": 4},
    "softcap": {"softcap": 2.0},
    "tied": {"tied": True, "z_loss": 0.05, "softcap": 3.0, "chunk_tokens": 2},
}


def _score(head_name, options):
    def ours(p, x, targets, weights):
        loss, z = cross_entropy(x, p[head_name], targets, weights, **options)
        return loss + z, (loss, z)

    def plain(p, x, targets, weights):
        head = p[head_name].T if options.get("tied") else p[head_name]
        logits = x @ head
        if cap := options.get("softcap"):
            logits = cap * jnp.tanh(logits / cap)
        log_z = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        loss = (weights * (log_z - picked)).sum()
        z = options.get("z_loss", 0) * (weights * log_z**2).sum()
        return loss + z, (loss, z)

    return ours, plain


@pytest.mark.parametrize(
    ("layout", "variant"),
    [("one", v) for v in VARIANTS]
    + [(name, v) for name in ("mixed", "tensor") for v in ("plain", "tied")]
    + [("fsdp", "chunks"), ("sequence", "tied"), ("zero2", "z_loss")]
    + [
        ("split", "tied"),
        ("split_4", "z_loss"),
        ("split_zero1", "softcap"),
        ("indivisible", "chunks"),
    ],
)
def test_cross_entropy_equals_autodiff_of_the_formula(layout, variant):
    options = VARIANTS[variant]
    head = "table" if options.get("tied") else "head"
    inputs = (arrays()["x"], arrays()["indices"], arrays()["weights"])
    compare(
        *_score(head, options), (LAYOUTS | SPLIT)[layout], [head], *inputs, limit=3e-6
    )


@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        ("mixed", "tied"),
        ("fsdp", "chunks"),
        ("sequence", "plain"),
        ("zero2", "z_loss"),
        ("split", "tied"),
        ("split_4", "plain"),
        ("split_zero1", "chunks"),
    ],
)
def test_cross_entropy_as_written_for_a_tpu(layout, variant, monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", "tpu")
    test_cross_entropy_equals_autodiff_of_the_formula(layout, variant)


def _curved(log_probability, log_normalizer, weights):
    """Returns a loss that is linear in neither: a sum of a row first, then more."""
    rows = (weights * log_probability).sum(1) / 4
    return jnp.tanh(rows).sum() + 0.1 * (weights * log_normalizer**2).sum()


def _score_targets(head_name, options):
    options = {name: x for name, x in options.items() if name != "z_loss"}

    def ours(p, x, targets, weights):
        scores = target_scores(x, p[head_name], targets, **options)
        return _curved(*scores, weights), scores

    def plain(p, x, targets, weights):
        head = p[head_name].T if options.get("tied") else p[head_name]
        logits = x @ head
        if cap := options.get("softcap"):
            logits = cap * jnp.tanh(logits / cap)
        log_z = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return _curved(picked - log_z, log_z, weights), (picked - log_z, log_z)

    return ours, plain


@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        ("one", "chunks"),
        ("one", "tied"),
        ("mixed", "tied"),
        ("fsdp", "chunks"),
        ("split", "tied"),
        ("split_4", "chunks"),
        ("indivisible", "chunks"),
    ],
)
def test_scores_of_targets_equal_the_formula(layout, variant):
    options = VARIANTS[variant]
    head = "table" if options.get("tied") else "head"
    inputs = (arrays()["x"], arrays()["indices"], arrays()["weights"])
    score = _score_targets(head, options)
    compare(*score, (LAYOUTS | SPLIT)[layout], [head], *inputs, limit=3e-6)


@pytest.mark.parametrize(("layout", "variant"), [("mixed", "tied"), ("split", "tied")])
def test_scores_of_targets_as_written_for_a_tpu(layout, variant, monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", "tpu")
    test_scores_of_targets_equal_the_formula(layout, variant)


K = 7


def _logits_by_formula(p, x, head_name, options):
    head = p[head_name].T if options.get("tied") else p[head_name]
    logits = x @ head
    cap = options.get("softcap")
    return cap * jnp.tanh(logits / cap) if cap else logits


def _score_buckets(head_name, temperature, options):
    options = {name: x for name, x in options.items() if name != "z_loss"}

    def loss_of(log_p, log_z, buckets, weights):
        spread = (weights[..., None] * jnp.tanh(buckets / 4) ** 2).sum()
        return _curved(log_p, log_z, weights) + 0.3 * spread

    def ours(p, x, targets, weights, ids):
        scores = bucket_scores(
            x, p[head_name], targets, ids, temperature=temperature, **options
        )
        return loss_of(*scores, weights), tuple(scores)

    def plain(p, x, targets, weights, ids):
        logits = _logits_by_formula(p, x, head_name, options)
        log_p = jax.nn.log_softmax(logits)
        of_target = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        warm = jax.nn.log_softmax(logits / temperature)
        listed = (ids[..., None] == jnp.arange(V)).any(-2)
        rest = jax.nn.logsumexp(jnp.where(listed, -jnp.inf, warm), -1, keepdims=True)
        of_ids = jnp.take_along_axis(warm, ids, -1)
        buckets = jnp.concatenate([of_ids, rest], -1)
        log_z = jax.nn.logsumexp(logits, -1)
        return loss_of(of_target, log_z, buckets, weights), (of_target, log_z, buckets)

    return ours, plain


OF_BUCKETS = [
    ("one", "chunks"),
    ("one", "softcap"),
    ("mixed", "tied"),
    ("tensor", "chunks"),
    ("split", "tied"),
    ("split_4", "chunks"),
    ("indivisible", "chunks"),
]


@pytest.mark.parametrize(("layout", "variant"), OF_BUCKETS)
def test_scores_of_buckets_equal_the_formula(layout, variant):
    options = VARIANTS[variant]
    head = "table" if options.get("tied") else "head"
    ids = np.argsort(np.random.default_rng(2).random((B, S, V)), -1)[..., :K]
    inputs = (arrays()["x"], arrays()["indices"], arrays()["weights"])
    compare(
        *_score_buckets(head, 1.0 if variant == "tied" else 2.5, options),
        (LAYOUTS | SPLIT)[layout],
        [head],
        *inputs,
        ids.astype(np.int32),
        limit=3e-6,
    )


@pytest.mark.parametrize(("layout", "variant"), [("mixed", "tied"), ("split", "tied")])
def test_scores_of_buckets_as_written_for_a_tpu(layout, variant, monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", "tpu")
    test_scores_of_buckets_equal_the_formula(layout, variant)


@pytest.mark.parametrize("count", [K, V])
@pytest.mark.parametrize(("layout", "variant"), OF_BUCKETS)
def test_the_most_likely_tokens_are_those_of_a_sort(layout, variant, count):
    options = {n: x for n, x in VARIANTS[variant].items() if n != "z_loss"}
    head = "table" if options.get("tied") else "head"
    step, placed = on_mesh(
        lambda p, x: top_scores(x, p[head], count, temperature=2.5, **options),
        (LAYOUTS | SPLIT)[layout],
    )
    x = arrays()["x"]
    ids, scores = jax.device_get(step(*placed({head: arrays()[head]}, x)))
    logits = _logits_by_formula({head: arrays()[head]}, x, head, options)
    log_p = np.asarray(jax.nn.log_softmax(logits / 2.5), np.float64)
    order = np.argsort(-log_p, -1, kind="stable")
    np.testing.assert_array_equal(ids, order[..., :count])
    log_p = np.take_along_axis(log_p, order, -1)
    np.testing.assert_allclose(scores[..., :-1], log_p[..., :count], atol=1e-5)
    if count < V:
        rest = np.log(np.exp(log_p[..., count:]).sum(-1))
        np.testing.assert_allclose(scores[..., -1], rest, atol=1e-5)
    else:
        np.testing.assert_allclose(scores[..., -1], LEAST, rtol=1e-6)


@pytest.mark.parametrize("layout", ["tensor", "split"])
def test_no_device_has_all_logits_of_the_most_likely_tokens(layout):
    def loss(p, x):
        ids, scores = top_scores(x, p["head"], 3, chunk_tokens=3)
        own = bucket_scores(x, p["head"], ids[..., 0], ids, chunk_tokens=3)
        return (jnp.exp(scores) * (scores - own.buckets_BSk)).sum(), ()

    step, placed = on_mesh(
        lambda *inputs: _value_and_grad(loss, *inputs), (LAYOUTS | SPLIT)[layout]
    )
    inputs = placed({"head": arrays()["head"]}, arrays()["x"])
    text = step.lower(*inputs).compile().as_text()
    moved = [shape for *_, shape in collectives(hlo.parse(text), ("all-gather",))]
    assert all(V not in shape for shape in moved), moved


def test_on_a_tpu_the_heads_gradient_crosses_devices_in_shards(monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", "tpu")

    def gradient(p, x, targets, weights):
        return _value_and_grad(
            lambda p, *given: (cross_entropy(given[0], p["head"], *given[1:])[0], ()),
            p,
            x,
            targets,
            weights,
        )

    step, placed = on_mesh(gradient, LAYOUTS["fsdp"])
    inputs = arrays()["x"], arrays()["indices"], arrays()["weights"]
    compiled = step.lower(*placed({"head": arrays()["head"]}, *inputs)).compile()
    sums = collectives(hlo.parse(compiled.as_text()), ("all-reduce", "reduce-scatter"))
    large = [
        (kind, shape) for _, kind, _, shape in sums if np.prod(shape) >= D * V // 8
    ]
    assert large == [("reduce-scatter", (D // 8, V))]


def test_the_devices_of_a_sequence_share_out_the_head(monkeypatch):
    monkeypatch.setattr(execution.Execution, "platform", "tpu")

    def gradient(p, x, targets, weights):
        def ours(p, x, *rest):
            return cross_entropy(x, p["head"], *rest, chunk_tokens=6)[0], ()

        return _value_and_grad(ours, p, x, targets, weights)

    step, placed = on_mesh(gradient, SPLIT["split_4"])
    inputs = arrays()["x"], arrays()["indices"], arrays()["weights"]
    compiled = step.lower(*placed({"head": arrays()["head"]}, *inputs)).compile()
    module = hlo.parse(compiled.as_text())
    whole = {shape for shape in buffer_shapes(module) if np.prod(shape) >= D * V}
    assert not whole, "of the head and its gradient a device has a quarter"
    kinds = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")
    moved = [
        (kind, shape)
        for _, kind, _, shape in collectives(module, kinds)
        if np.prod(shape) >= 32
    ]
    # its gradient, of the samples' shards
    assert ("reduce-scatter", (D // 2, V // 4)) in moved
    assert ("all-gather", (D, V // 4)) in moved


def test_chunks_change_nothing():
    x, targets, weights = arrays()["x"], arrays()["indices"], arrays()["weights"]
    head = nnx.Param(arrays()["head"])

    def scored(chunk):
        return jax.value_and_grad(
            lambda x: cross_entropy(x, head, targets, weights, chunk_tokens=chunk)[0]
        )(x)

    whole = scored(0)
    for chunk in (1, 5 * B, 1000):  # 5 positions do not divide the sequence: 4 do
        assert worst(scored(chunk), whole) < 1e-6


def test_a_bfloat16_table_may_be_the_head_as_well():
    """Its gradients as an embedding and as a head are added, so their dtypes are equal."""
    table = jax.random.normal(jax.random.key(0), (16, 8), jnp.bfloat16)
    ids = jnp.arange(6).reshape(1, 6)

    def loss(table: jax.Array) -> jax.Array:
        x = embed(nnx.Param(table), ids)
        head = nnx.Param(table.T)
        total, _ = cross_entropy(x, head, ids, jnp.ones(ids.shape))
        return 3 * total

    gradient = jax.grad(loss)(table)
    assert gradient.dtype == jnp.bfloat16
    assert bool(jnp.isfinite(gradient).all())


def test_the_gradient_scales_with_its_cotangent_and_weights_have_none():
    x, targets, weights = arrays()["x"], arrays()["indices"], arrays()["weights"]
    head = nnx.Param(arrays()["head"])

    def loss(x, scale):
        total, z = cross_entropy(x, head, targets, weights, z_loss=0.1)
        return scale * (total + z)

    once, thrice = jax.grad(loss)(x, 1.0), jax.grad(loss)(x, 3.0)
    assert worst(thrice, 3 * once) < 1e-6
    silent = jax.grad(lambda x: cross_entropy(x, head, targets, 0 * weights)[0])(x)
    assert not silent.any()
    assert once.any()


@pytest.mark.parametrize("layout", ["one", "mixed"])
def test_logits_of_all_tokens_never_exist(layout):
    length, vocab = 64, 512

    def gradient(chunk):
        def loss(p, x, targets, weights):
            def ours(p, x, *rest):
                return cross_entropy(x, p["head"], *rest, chunk_tokens=chunk)[0], ()

            return _value_and_grad(ours, p, x, targets, weights)

        step, placed = on_mesh(loss, LAYOUTS[layout])
        inputs = np.ones((B, length, D), np.float32), np.zeros((B, length), np.int32)
        arguments = placed(
            {"head": np.ones((D, vocab), np.float32)}, *inputs, inputs[0][..., 0]
        )
        module = hlo.parse(step.lower(*arguments).compile().as_text())
        return max(int(np.prod(shape)) for shape in buffer_shapes(module) if shape)

    batch, width = (B, vocab) if layout == "one" else (B // 4, vocab // 2)
    everything = batch * length * width  # on one device
    assert gradient(0) == everything  # the check can see them
    assert gradient(16) < everything / 3
