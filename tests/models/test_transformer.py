"""The transformer's variants: losses, gradients, rotary positions, packed documents."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config.schema import faults
from jaxdist.models.layers import dropout, rotary_tables, rotate
from jaxdist.models.rotary import RotaryConfig, rotary_frequencies
from jaxdist.models.transformer import TransformerConfig
from jaxdist.protocols.model import BlockInfo, is_staged
from support.models import FAST_COMPILE, TINY, batch_of, model_of, worst

VARIANTS = {
    "llama": replace(TINY, num_kv_heads=2),
    "gpt2": replace(
        TINY,
        positions="learned",
        max_positions=16,
        norm="layer",
        activation="gelu",
        gated=False,
        bias="all",
        tie_embeddings=True,
        dropout=0.1,
    ),
    "qwen2": replace(
        TINY, num_kv_heads=2, bias="qkv", tie_embeddings=True, rope_theta=1e6
    ),
    "qwen3": replace(TINY, num_kv_heads=1, qk_norm="head", head_dim=16),
    "gemma-like": replace(TINY, activation="gelu", logit_softcap=5.0, z_loss=1e-2),
}


def built(config: TransformerConfig) -> tuple:
    """Returns (graph, parameters, loss and gradients of a batch with a key)."""
    graph, parameters = nnx.split(model_of(config))

    def objective(parameters, batch, key):
        loss = nnx.merge(graph, parameters).loss(batch, key)
        return loss.sum + sum(loss.aux.values()), loss

    gradient = jax.value_and_grad(objective, has_aux=True)
    return graph, parameters, jax.jit(gradient, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_reach_every_parameter(name):
    config = VARIANTS[name]
    _, parameters, gradient = built(config)
    (_, loss), found = gradient(parameters, batch_of(config), jax.random.key(1))
    mean = float(loss.sum / loss.count)
    assert math.isfinite(mean)
    assert abs(mean - math.log(config.vocab_size)) < 3
    assert float(loss.count) == batch_of(config)["weights"].sum()
    assert set(loss.aux) == ({"z_loss"} if config.z_loss else set())
    leaves = jax.tree_util.tree_leaves_with_path(found)
    assert len(leaves) == len(jax.tree.leaves(parameters)) > 8
    for path, leaf in leaves:
        size = np.abs(np.asarray(leaf)).reshape(leaf.shape[0], -1).max()
        # A key's bias moves all logits of a query alike: softmax does not see it, but
        # for rotation.
        if name == "gpt2" and "key_bias" in jax.tree_util.keystr(path):
            assert size < 1e-4
        else:
            leaf_name = jax.tree_util.keystr(path)
            assert np.isfinite(size), leaf_name
            assert size > 1e-6, leaf_name


@pytest.mark.parametrize("name", ["gpt2", "gemma-like"])
def test_the_loss_is_that_of_the_logits(name):
    config, batch = replace(VARIANTS[name], dropout=0.0), batch_of(TINY)
    model = model_of(config)
    logits = np.asarray(nnx.jit(lambda model: model.forward(batch))(model), np.float64)
    loss = nnx.jit(lambda model: model.loss(batch, None))(model)
    top = logits.max(-1, keepdims=True)
    log_z = (np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top)[..., 0]
    picked = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    expected = (batch["weights"] * (log_z - picked)).sum()
    assert float(loss.sum) == pytest.approx(expected, rel=1e-5)
    if config.z_loss:
        z = config.z_loss * (batch["weights"] * log_z**2).sum()
        assert float(loss.aux["z_loss"]) == pytest.approx(z, rel=1e-5)
        assert np.abs(logits).max() < config.logit_softcap


def test_a_model_is_causal_and_reads_its_positions():
    model = model_of(TINY)
    forward = nnx.jit(lambda model, batch: model.forward(batch))
    batch = batch_of()
    changed = batch | {"tokens": batch["tokens"].copy()}
    changed["tokens"][:, 9] = (changed["tokens"][:, 9] + 1) % TINY.vocab_size
    before, after = (np.asarray(forward(model, b)) for b in (batch, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()
    # Rotary attention sees distances alone, so equal shifts change nothing; unequal
    # ones do.
    shifted = np.asarray(forward(model, batch | {"positions": batch["positions"] + 7}))
    assert worst(shifted, before) < 1e-4
    stretched = np.asarray(
        forward(model, batch | {"positions": 2 * batch["positions"]})
    )
    assert worst(stretched, before) > 1e-3


# --- rotary positions -----------------------------------------------------------------


def llama3_frequencies(
    size: int, theta: float, factor: float, low: float, high: float, length: int
) -> list[float]:
    """Returns angular frequencies as the Llama 3.1 report and its reference code have
    them.
    """
    found = []
    for i in range(size // 2):
        frequency = 1.0 / theta ** (2 * i / size)
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            found.append(frequency)
        elif wavelength > length / low:
            found.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return found


def test_rotary_frequencies_of_llama_3():
    setting = RotaryConfig(
        rope_factor=8.0,
        rope_low_factor=1.0,
        rope_high_factor=4.0,
        rope_original_positions=8192,
    )
    ours = np.asarray(rotary_frequencies(128, 500000.0, config=setting).frequencies)
    expected = np.array(llama3_frequencies(128, 500000.0, 8.0, 1.0, 4.0, 8192))
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    kept, stretched = expected == plain, np.isclose(expected, plain / 8)
    # all three ranges
    assert kept.any()
    assert stretched.any()
    assert (~kept & ~stretched).any()
    np.testing.assert_allclose(ours, expected, rtol=2e-6)
    np.testing.assert_allclose(
        rotary_frequencies(128, 500000.0).frequencies, plain, rtol=2e-6
    )
    linear = rotary_frequencies(
        128, 500000.0, config=RotaryConfig(rope_scaling="linear", rope_factor=8.0)
    ).frequencies
    np.testing.assert_allclose(linear, plain / 8, rtol=2e-6)


@pytest.mark.parametrize("size", [8, 12])
def test_rotation_turns_halves_of_the_first_dims_by_position_times_frequency(size):
    frequencies = np.asarray(rotary_frequencies(8, 100.0).frequencies)
    positions = np.array([[0, 1, 5]], np.int32)
    x = np.random.default_rng(0).normal(size=(1, 3, 2, size)).astype(np.float32)
    cos, sin = rotary_tables(jnp.asarray(positions), jnp.asarray(frequencies))
    ours = np.asarray(rotate(jnp.asarray(x), cos, sin))
    turned = (x[..., :4] + 1j * x[..., 4:8]) * np.exp(
        1j * positions[:, :, None, None] * frequencies[None, None, None]
    )
    expected = np.concatenate([turned.real, turned.imag, x[..., 8:]], -1)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert worst(ours[:, 1:], x[:, 1:]) > 0.1


# --- packing --------------------------------------------------------------------------


def packed_row(documents: list[np.ndarray], segments: list[int]) -> dict:
    """Returns a batch of one row: documents side by side, then padding.

    Args:
      documents: tokens of each; the last is a target only.
      segments: the segment id of each document.
    """
    lengths = [len(document) - 1 for document in documents]

    def side_by_side(parts, dtype=np.int32):
        row = np.zeros((1, 16), dtype)
        row[0, : sum(lengths)] = np.concatenate(parts)
        return row

    return {
        "tokens": side_by_side([document[:-1] for document in documents]),
        "targets": side_by_side([document[1:] for document in documents]),
        "positions": side_by_side([np.arange(length) for length in lengths]),
        "segment_ids": side_by_side([np.repeat(segments, lengths)]),
        "weights": side_by_side([np.ones(sum(lengths))], np.float32),
        "sample": np.zeros(1, np.int32),
    }


class PackedModel(NamedTuple):
    """Two documents, and a model without dropout that scores a batch."""

    score: Callable  # batch -> loss, number of targets, gradients
    documents: list[np.ndarray]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    config = replace(VARIANTS[request.param], dropout=0.0)
    _, parameters, gradient = built(config)

    def score(batch):
        (total, loss), gradients = gradient(parameters, batch, None)
        return float(total), float(loss.count), gradients

    random = np.random.default_rng(3)
    documents = [
        random.integers(0, config.vocab_size, length + 1, dtype=np.int32)
        for length in (5, 7)
    ]
    return PackedModel(score, documents)


def test_packed_documents_have_the_losses_and_gradients_of_each_alone(model):
    packed, count, packed_gradients = model.score(packed_row(model.documents, [1, 2]))
    first, second = (model.score(packed_row([d], [1])) for d in model.documents)

    assert count == 5 + 7
    assert packed == pytest.approx(first[0] + second[0], rel=1e-6)
    expected = jax.tree.map(jnp.add, first[2], second[2])
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert largest > 0
    chex.assert_trees_all_close(packed_gradients, expected, rtol=0, atol=1e-6 * largest)


def test_documents_in_one_segment_see_each_other(model):
    apart, *_ = model.score(packed_row(model.documents, [1, 2]))
    together, *_ = model.score(packed_row(model.documents, [1, 1]))
    assert together != pytest.approx(apart, rel=1e-4)


# --- dropout, faults ------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_follows_the_sample_not_the_place():
    x = jnp.ones((4, 64, 32))

    def masked(samples, layer=0, site=1, key=0):
        fields = {"sample": jnp.asarray(samples, jnp.int32)}
        return np.asarray(
            dropout(x, 0.25, BlockInfo(jax.random.key(key), layer, fields), site)
        )

    first = masked([0, 1, 2, 3])
    assert set(np.unique(first)) == {np.float32(0), np.float32(1 / 0.75)}
    assert first.mean() == pytest.approx(1, abs=0.03)
    np.testing.assert_array_equal(masked([3, 2, 1, 0])[::-1], first)
    for other in (
        masked([4, 5, 6, 7]),
        masked([0, 1, 2, 3], layer=1),
        masked([0, 1, 2, 3], site=2),
    ):
        assert 0.2 < (other != first).mean() < 0.6
    assert dropout(x, 0.25, BlockInfo(None, 0, {}), 1) is x


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 does not divide model.num_heads=4"),
        ({"d_ff": 0}, "model.d_ff: got 0, required int >= 1"),
        ({"head_dim": 7}, "rotary positions need an even size"),
        ({"positions": "learned"}, "model.max_positions: learned positions need"),
        ({"dropout": 1.0}, "model.dropout: got 1.0, required float >= 0 and < 1"),
        (
            {"window": 8},
            "model.window=8: model.layer_pattern=global has no local layers",
        ),
        (
            {"rope_theta_local": 1e4},
            "model.rope_theta_local=10000.0: model.layer_pattern=global has no",
        ),
        (
            {"layer_pattern": ("local",)},
            "model.layer_pattern=local: local layers need model.window",
        ),
        (
            {"layer_pattern": ("local", "all"), "window": 8},
            "required tuple of one of global, local",
        ),
        (
            {
                "layer_pattern": ("nope", "global"),
                "positions": "learned",
                "max_positions": 8,
            },
            "model.layer_pattern=nope,global: nope means attention without rotary",
        ),
        (
            {"rope_query_growth": 0.1, "positions": "learned", "max_positions": 8},
            "model.rope_query_growth=0.1 needs model.positions=rotary",
        ),
        (
            {"rope_query_growth": 0.1, "layer_pattern": ("nope",)},
            "model.layer_pattern=nope has no layers with rotary positions",
        ),
        (
            {"rope_query_growth": 0.1, "rope_original_positions": 1},
            "model.rope_query_growth=0.1 needs the length of the sequences",
        ),
        (
            {"num_experts": 4, "shared_expert_gate": True},
            "model.shared_expert_gate=true: the model has no shared experts",
        ),
        (
            {"shared_expert_gate": True},
            "model.shared_expert_gate=True needs experts",
        ),
        (
            {"layer_pattern": ()},
            "of length >= 1. Meaning: kinds of mixers",
        ),
        (
            {"layer_pattern": ("local",), "window": -1},
            "model.window: got -1, required int >= 0",
        ),
        (
            {"rotary_fraction": 0.0},
            "model.rotary_fraction: got 0.0, required float > 0 and <= 1",
        ),
        (
            {"rotary_fraction": 1.5},
            "model.rotary_fraction: got 1.5, required float > 0 and <= 1",
        ),
        ({"rotary_fraction": 0.4}, "rotary positions need an even size, here 3"),
        (
            {"embedding_scale": 0.0},
            "model.embedding_scale: got 0.0, required float > 0",
        ),
        (
            {"attention_scale": -1.0},
            "model.attention_scale: got -1.0, required float >= 0",
        ),
        (
            {"attention_softcap": math.nan},
            "model.attention_softcap: got nan, required float >= 0, finite",
        ),
    ],
)
def test_impossible_sizes_are_faults(change, text):
    assert faults(TINY, "model.") == []
    (fault,) = faults(replace(TINY, **change), "model.")
    assert text in fault


def test_all_faults_are_told_at_once():
    wrong = replace(
        TINY,
        head_dim=0,
        dropout=2.0,
        rotary_fraction=-1.0,
        window=4,
        rope_theta_local=1.0,
    )
    assert len(faults(wrong, "model.")) == 5


def test_the_model_is_staged_and_starts_as_configured():
    model = model_of(replace(TINY, zero_init_outputs=True))
    assert is_staged(model)
    assert not model.blocks.mlp.down[...].any()
    assert not model.blocks.attention.out[...].any()
    layers = np.asarray(model.blocks.mlp.up[...])
    assert layers.shape == (2, 32, 48)
    assert not np.array_equal(layers[0], layers[1])
    assert layers.std() == pytest.approx(TINY.init_std, rel=0.1)
    down = model_of(TINY).blocks.mlp.down[...]
    # 1 / sqrt(2 * layers)
    assert float(down.std()) == pytest.approx(TINY.init_std / 2, rel=0.1)
