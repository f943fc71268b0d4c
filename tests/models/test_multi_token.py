"""Multi-token prediction: its loss and gradients against a plain loop, documents, layouts."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import trees
from jaxdist.config.schema import faults
from jaxdist.models.multi_token import LOSS, MultiTokenConfig, batch_ahead
from jaxdist.models.transformer import Transformer
from jaxdist.protocols.model import BlockInfo
from jaxdist.step.step_config import StepConfig
from support.models import (
    FAST_COMPILE,
    MIXED,
    ONE,
    TINY,
    Layout,
    bitwise_equal,
    init_of,
    model_of,
    run,
    spec_of,
    worst,
)
from support.pipelines import LENGTH, Case, batch_for, build

DEPTH = 2
WEIGHT = 0.5
PLAIN = replace(TINY, num_layers=2, num_kv_heads=2)
AHEAD = replace(PLAIN, multi_token=MultiTokenConfig(DEPTH, WEIGHT))
SPARSE = replace(
    AHEAD,
    num_experts=4,
    first_dense_layers=1,
    num_layers=3,
    balance="bias",
    router_z_loss=1e-2,
)
PACKED = batch_for(Case(packed=True))


def is_ahead(path: str) -> bool:
    """Returns whether a parameter belongs to the modules of further tokens."""
    return path.startswith("multi_token/")


# --- an independent implementation, one place at a time -------------------------------


def plain_norm(x, scale, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def plain_block(values, x, positions, allowed, config):
    """Returns a block's output for one row [S, D], with scores of all pairs."""
    H, K, N = config.num_heads, config.num_kv_heads, config.head_dim
    half = N // 2
    angles = positions[:, None] * config.rope_theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def turned(y):
        a, b = y[..., :half], y[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    normed = plain_norm(x, values["attention_norm/scale"], config.norm_eps)
    q, k, v = (
        jnp.einsum("sd,dhn->shn", normed, values[f"attention/{name}"])
        for name in ("query", "key", "value")
    )
    q, k = turned(q), turned(k)
    k, v = (jnp.repeat(y, H // K, 1) for y in (k, v))
    scores = jnp.einsum("shn,thn->hst", q, k) / np.sqrt(N)
    shares = jax.nn.softmax(jnp.where(allowed, scores, -1e30), -1)
    mixed = jnp.einsum("hst,thn->shn", shares, v)
    x = x + jnp.einsum("shn,hnd->sd", mixed, values["attention/out"])
    normed = plain_norm(x, values["mlp_norm/scale"], config.norm_eps)
    gate = jax.nn.silu(normed @ values["mlp/gate"])
    return x + (gate * (normed @ values["mlp/up"])) @ values["mlp/down"]


def below(values, prefix):
    return {
        path.removeprefix(prefix): x
        for path, x in values.items()
        if path.startswith(prefix)
    }


def nats_of(values, x, targets):
    """Returns the loss of each place [S], unweighted."""
    log_p = jax.nn.log_softmax(x @ values["output"])
    return [-log_p[i, target] for i, target in enumerate(targets)]


def plain_row(values, row, config):
    """Returns (next-token sum, [sums of each depth], [counts of each depth]) of a row."""
    S = len(row["tokens"])
    documents = row["segment_ids"]
    causal = np.tril(np.ones((S, S), bool))
    allowed = jnp.asarray(causal & (documents[:, None] == documents[None, :]))
    positions = jnp.asarray(row["positions"])
    x = values["embedding"][row["tokens"]]
    for layer in range(config.num_layers):
        block = {name: y[layer] for name, y in below(values, "blocks/").items()}
        x = plain_block(block, x, positions, allowed, config)
    normed = plain_norm(x, values["final_norm/scale"], config.norm_eps)
    nats = nats_of(values, normed, row["targets"])
    total = sum(row["weights"][i] * nats[i] for i in range(S))
    sums, counts = [], []
    for depth in range(1, config.multi_token.depth + 1):
        module = below(values, f"multi_token/depth_{depth}/")
        # past the end of the row any token will do: no target is there
        ids = [row["tokens"][min(i + depth, S - 1)] for i in range(S)]
        embedding = plain_norm(
            values["embedding"][np.array(ids)],
            module["embedding_norm/scale"],
            config.norm_eps,
        )
        hidden = plain_norm(x, module["hidden_norm/scale"], config.norm_eps)
        x = jnp.concatenate([embedding, hidden], 1) @ module["projection"]
        x = plain_block(below(module, "block/"), x, positions, allowed, config)
        normed = plain_norm(x, module["final_norm/scale"], config.norm_eps)
        nats = nats_of(values, normed, row["targets"][depth:])
        total_ahead, count = 0.0, 0.0
        for i in range(S - depth):
            if documents[i + depth] != documents[i] or documents[i] == 0:
                continue
            total_ahead += row["weights"][i + depth] * nats[i]
            count += row["weights"][i + depth]
        sums.append(total_ahead)
        counts.append(count)
    return total, sums, counts


def plain_objective(values, batch, config):
    """Returns (the objective of a step, (next-token loss, loss of further tokens))."""
    rows = [
        plain_row(values, {name: x[i] for name, x in batch.items()}, config)
        for i in range(len(batch["tokens"]))
    ]
    nats = sum(total for total, _, _ in rows) / batch["weights"].sum()
    count = sum(sum(counts) for _, _, counts in rows)
    further = sum(sum(sums) for _, sums, _ in rows) / count
    return nats + config.multi_token.weight * further, (nats, further)


def plain_gradients(values) -> tuple[dict[str, Any], Any]:
    """Returns the gradients of the plain objective by path, and its losses."""

    def objective(values):
        return plain_objective(values, ROWS, AHEAD)

    gradients = jax.jit(
        jax.grad(objective, has_aux=True), compiler_options=FAST_COMPILE
    )
    with jax.numpy_rank_promotion("allow"):
        return jax.device_get(gradients(values))


# Rows of which one has weights of 0, and the other padding.
ROWS = {name: x[[1, 3]] for name, x in PACKED.items()}


# --- tests ----------------------------------------------------------------------------


def test_loss_and_gradients_are_those_of_a_plain_loop():
    assert (ROWS["weights"][0] == 0).any()
    assert (ROWS["segment_ids"][1] == 0).any()
    assert ROWS["segment_ids"].max() == 2
    values = trees.flatten_names(init_of(model=AHEAD)().trainable)
    expected, (loss, further) = plain_gradients(values)
    result = run(model=AHEAD, batch=ROWS)
    np.testing.assert_allclose(result.metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(result.metrics[LOSS], further, rtol=1e-6)
    np.testing.assert_allclose(
        result.metrics[f"aux/{LOSS}"], WEIGHT * further, rtol=1e-6
    )
    gradients = trees.flatten_names(result.gradients)
    ahead = [path for path in gradients if is_ahead(path)]
    assert len(ahead) == DEPTH * 13
    assert all(np.abs(gradients[path]).max() > 1e-4 for path in ahead)
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        assert worst(gradient, expected[path]) < 2e-5, path


def test_the_trunk_learns_from_further_tokens():
    # both models start with the same trunk
    plain_state = trees.flatten_names(init_of(model=PLAIN)().trainable)
    state = trees.flatten_names(init_of(model=AHEAD)().trainable)
    assert all(bitwise_equal(state[path], x) for path, x in plain_state.items())
    plain = trees.flatten_names(run(model=PLAIN, batch=ROWS).gradients)
    ahead = trees.flatten_names(run(model=AHEAD, batch=ROWS).gradients)
    assert {path for path in ahead if not is_ahead(path)} == plain.keys()
    changed = {path: worst(ahead[path], plain[path]) for path in plain}
    # the model's own final norm is not on the way to further tokens
    assert changed.pop("final_norm/scale") < 1e-5
    assert min(changed.values()) > 1e-2, changed


def test_a_place_weighs_nothing_if_its_target_is_in_another_document():
    fields = {
        "tokens": jnp.arange(10, 18)[None],
        "targets": jnp.arange(11, 19)[None],
        "positions": jnp.array([[0, 1, 2, 3, 0, 1, 2, 0]]),
        "segment_ids": jnp.array([[1, 1, 1, 1, 2, 2, 2, 0]]),
        "weights": jnp.array([[1, 1, 0, 1, 1, 1, 1, 0.0]]),
    }
    one = batch_ahead(fields, 1)
    assert one["tokens"][0, :7].tolist() == [11, 12, 13, 14, 15, 16, 17]
    assert one["targets"][0, :7].tolist() == [12, 13, 14, 15, 16, 17, 18]
    assert one["weights"][0].tolist() == [1, 0, 1, 0, 1, 1, 0, 0]
    assert batch_ahead(fields, 2)["weights"][0].tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    assert batch_ahead(fields, 3)["weights"][0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    del fields["segment_ids"]  # one document
    assert batch_ahead(fields, 3)["weights"][0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert not batch_ahead(fields, 8)["weights"].any()


def test_no_document_changes_the_loss_of_another():
    spec = spec_of(AHEAD)
    values = spec.arrays_of(model_of(AHEAD))[0]

    @jax.jit
    def gradient_of_table(batch, weights):
        def loss(table):
            model = spec.assemble(values | {"embedding": table}, {}, {})
            return model.loss({**batch, "weights": weights}, None).aux[LOSS]

        return jax.grad(loss)(values["embedding"])

    batch = {name: x[5:6] for name, x in PACKED.items()}
    first = batch["segment_ids"] == 1
    assert 2 < first.sum() < LENGTH
    # tokens of the documents differ, so a row of the table tells the document
    batch["tokens"] = np.where(first, np.arange(LENGTH), 32 + np.arange(LENGTH))
    batch["targets"] = np.where(first, 1 + np.arange(LENGTH), 33 + np.arange(LENGTH))
    gradient = gradient_of_table(batch, first.astype(np.float32))
    assert np.abs(gradient[:2]).max() > 1e-3
    assert not np.asarray(gradient[32:]).any()


def test_depth_zero_has_the_same_parameters_and_program():
    assert TINY.multi_token.depth == 0
    off = replace(TINY, multi_token=MultiTokenConfig(0, WEIGHT))
    model = model_of(off)
    assert not [path for path in spec_of(off).named_parameters() if is_ahead(path)]
    batch = batch_for(Case(model=TINY))
    assert model.aux_counts(batch) == {}
    text = [
        jax.jit(lambda batch, m=m: m.loss(batch, None)).lower(batch).as_text()
        for m in (model, WithPlainHead(model))
    ]
    assert text[0] == text[1]


class WithPlainHead:
    """A model whose head gets neither the step's key nor a wrapper of layers."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        if name == "head_has_layers":
            raise AttributeError(name)
        return getattr(self.model, name)

    def loss(self, batch: Any, key: Any) -> Any:
        return Transformer.loss(self, batch, key)


def test_decoding_ignores_the_modules():
    with_modules = model_of(AHEAD)
    values = spec_of(AHEAD).arrays_of(with_modules)[0]
    trunk = {name: x for name, x in values.items() if name != "multi_token"}
    without = spec_of(PLAIN).assemble(trunk, {}, {})
    prompts = jnp.asarray(PACKED["tokens"][:2, :8])
    logits = [
        model.decode(prompts, model.init_cache(2, 16))[0]
        for model in (with_modules, without)
    ]
    assert bitwise_equal(*jax.device_get(logits))


@pytest.mark.slow
def test_experts_of_the_modules_are_balanced_and_reported():
    result = run(model=SPARSE, batch=batch_for(Case(model=SPARSE, packed=True)))
    metrics = result.metrics
    assert metrics["stats/expert_load"].shape == (3, 4)
    load = metrics["stats/mtp_expert_load"]
    weights = [
        (batch_ahead(batch_for(Case(packed=True)), depth)["weights"] > 0).sum()
        for depth in (1, 2)
    ]
    np.testing.assert_array_equal(
        load.sum(1), SPARSE.experts_per_token * np.array(weights)
    )
    assert metrics["aux/mtp_router_z_loss"] > 0
    for depth in (1, 2):
        state = result.state.model_state["multi_token"][f"depth_{depth}"]
        bias = state["block"]["mlp"]["choice_bias"]
        mean = load[depth - 1].mean()
        signs = np.sign(mean - load[depth - 1])
        assert np.abs(bias).max() > 0
        np.testing.assert_allclose(
            bias, SPARSE.balance_rate * (signs - signs.mean()), rtol=1e-4
        )


@pytest.mark.slow
def test_blocks_are_of_the_last_layers_kind():
    config = replace(
        SPARSE,
        num_layers=4,
        first_dense_layers=0,
        window=4,
        layer_pattern=("global", "local"),
        feed_forward_pattern=("sparse", "dense"),
    )
    module = model_of(config).multi_token.modules[0]
    assert module.block.layer_pattern == ("local",)
    assert type(module.block.mlp).__name__ == "FeedForward"
    batch = batch_for(Case(model=config))
    loss = model_of(config).loss(batch, None)
    assert LOSS in loss.aux
    assert not [name for name in loss.stats if name.startswith("mtp_")]


def test_dropout_and_remat_reach_the_blocks():
    model, batch = model_of(replace(AHEAD, dropout=0.5)), PACKED
    keys: list[Any] = []

    def transform(layer):
        def wrapped(parameters, x, info: BlockInfo):
            keys.append(info.key)
            return layer(parameters, x, info)

        return wrapped

    x = jax.ShapeDtypeStruct((16, LENGTH, PLAIN.d_model), jnp.float32)
    jax.eval_shape(lambda x: model.head(x, batch, jax.random.key(0), transform), x)
    assert len(keys) == DEPTH
    assert all(key is not None for key in keys)
    del keys[:]
    jax.eval_shape(lambda x: model.head(x, batch, None, transform), x)
    assert keys == [None] * DEPTH


def test_options_without_sense_are_faults():
    off = replace(TINY, multi_token=MultiTokenConfig(0, WEIGHT))
    assert any("model.multi_token.weight=0.5 has no effect" in x for x in faults(off))
    scores = replace(AHEAD, head="score")
    assert any("model.head=score does not" in x for x in faults(scores))
    assert not list(faults(AHEAD))
    assert model_of(AHEAD).head_only() == [f"model.multi_token.depth={DEPTH}"]


def test_the_config_declares_what_the_modules_cost():
    S = 16
    plain = PLAIN.flops_per_token(S, "causal")
    ahead = AHEAD.flops_per_token(S, "causal")
    blocks = replace(PLAIN, num_layers=PLAIN.num_layers + DEPTH)
    one_head = 6 * PLAIN.d_model * PLAIN.vocab_size
    projection = 6 * 2 * PLAIN.d_model**2
    expected = blocks.flops_per_token(S, "causal") + DEPTH * (one_head + projection)
    assert ahead > plain
    np.testing.assert_allclose(ahead, expected, rtol=1e-12)


# --- layouts --------------------------------------------------------------------------

MORE = {
    "context 4, fsdp 2": Layout(8, fsdp=2, context=4),
    "zero 1": Layout(4, fsdp=4, zero=1),
    "sequence parallel": Layout(4, data=2, tensor=2, sequence_parallel=True),
}


@lru_cache
def on_one_device(model: Any) -> Any:
    return run(model=model, batch=batch_for(Case(model=model, packed=True)))


def check(result: Any, reference: Any) -> None:
    assert worst(result.gradients, reference.gradients) < 2e-5
    for name in ("loss", LOSS):
        np.testing.assert_allclose(
            result.metrics[name], reference.metrics[name], rtol=1e-5
        )


@pytest.mark.slow
def test_a_mixed_layout_computes_what_one_device_computes():
    batch = batch_for(Case(packed=True))
    check(run(MIXED, AHEAD, batch=batch), on_one_device(AHEAD))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_compute_what_one_device_computes(name):
    batch = batch_for(Case(packed=True))
    check(run(MORE[name], AHEAD, batch=batch), on_one_device(AHEAD))


def pipelined(case: Case) -> Any:
    built = build(case)
    batch = batch_for(case)
    state = built.init()
    placed = jax.device_put(batch, built.batch_shardings(batch))
    return jax.device_get(built.inspect(state, placed))


def pipeline_check(case: Case) -> None:
    one = case._replace(stages=1, data=1, fsdp=1, tensor=1, accumulation=1)
    _, reference, expected = pipelined(one)
    _, metrics, gradients = pipelined(case)
    assert case.staging is not None
    gradients = jax.device_get(jax.jit(case.staging.flat)(gradients))
    assert worst(gradients, expected) < 2e-5
    for name in ("loss", LOSS):
        np.testing.assert_allclose(metrics[name], reference[name], rtol=1e-5)
    if case.model.num_experts:
        np.testing.assert_array_equal(
            metrics["stats/mtp_expert_load"], reference["stats/mtp_expert_load"]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(fsdp=2, data=2, model=AHEAD, packed=True, accumulation=2),
        Case(model=AHEAD, packed=True, edges="last"),
        Case(model=SPARSE, packed=True, fsdp=2),
        Case(model=AHEAD, packed=True, tensor=2, remat="full"),
    ],
)
def test_a_pipeline_computes_what_one_device_computes(case):
    pipeline_check(case)


@pytest.mark.slow
def test_accumulation_divides_by_the_targets_of_the_whole_batch():
    batch = batch_for(Case(packed=True))
    # accumulation steps of unequal numbers of targets
    batch["weights"] = np.where(np.arange(16)[:, None] < 8, batch["weights"], 0)
    batch["weights"][8:, :6] = 1
    halves = [
        batch_ahead(batch, 1)["weights"][rows].sum()
        for rows in (slice(8), slice(8, 16))
    ]
    assert halves[0] > 1.5 * halves[1]
    whole = run(ONE, AHEAD, batch=batch)
    check(run(ONE, AHEAD, StepConfig(accumulation=2), batch=batch), whole)
