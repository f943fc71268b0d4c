"""Latent attention: the plain definition in numpy, layouts, packing, decoding, costs."""

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import schema
from jaxdist.models import lora
from jaxdist.models.latent_attention import LatentAttention, LatentOptions
from jaxdist.models.rotary import rotary_frequencies
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.ops.attention_backends import BACKENDS
from jaxdist.ops.attention_costs import latent_attention_cost
from jaxdist.parallel import execution
from jaxdist.protocols.model import BlockInfo, apply_block
from jaxdist.protocols.model_spec import describe
from jaxdist.telemetry.flops import jaxpr_flops
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, TINY, model_of, spec_of, worst

# No two sizes are equal, so that a shape says what it is.
SIZES = LatentOptions(query_rank=20, kv_rank=12, nope_dim=8, rope_dim=6, value_dim=10)
LATENT = replace(TINY, layer_pattern=("latent",), latent=SIZES)
YARN = {
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_positions": 8,
    "rope_attention_factor": 1.0,
    "attention_scale": 0.4,
}
CONFIGS: dict[str, TransformerConfig] = {
    "plain query": replace(LATENT, latent=replace(SIZES, query_rank=0)),
    "latent query": LATENT,
    "yarn, biases": replace(LATENT, bias="attention", **YARN),
}
B, S = 4, 16
DOCUMENTS = (7, 9)  # tokens of the documents in each row


@lru_cache
def layer_of(config: TransformerConfig) -> LatentAttention:
    """Builds a layer whose parameters are all random, those of norms and biases, too."""
    layer = LatentAttention(config, nnx.Rngs(0))
    random = np.random.default_rng(1)
    for name, parameter in vars(layer).items():
        if name.endswith("_bias"):
            value = 0.3 * random.standard_normal(parameter[...].shape)
            parameter.set_value(jnp.asarray(value, jnp.float32))
        if name.endswith("_norm"):
            value = 1 + 0.3 * random.standard_normal(parameter.scale[...].shape)
            parameter.scale.set_value(jnp.asarray(value, jnp.float32))
    return layer


def inputs(config: TransformerConfig, *, packed: bool) -> tuple[Any, dict[str, Any]]:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((B, S, config.d_model)), jnp.float32)
    positions = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    fields: dict[str, Any] = {}
    if packed:
        ids = np.repeat(np.arange(1, 3), DOCUMENTS)
        positions = np.tile(np.concatenate([np.arange(n) for n in DOCUMENTS]), (B, 1))
        fields["segment_ids"] = jnp.asarray(np.tile(ids, (B, 1)), jnp.int32)
    batch = {"positions": jnp.asarray(positions, jnp.int32)}
    return x, fields | batch | LatentAttention.prepare(config, batch, S)


def by_loops(layer: LatentAttention, x: np.ndarray, fields: dict) -> np.ndarray:
    """Computes the layer token by token and head by head, in float64."""
    config = layer.config
    sizes = config.latent
    value = {
        name: np.asarray(parameter[...], np.float64)
        for name, parameter in vars(layer).items()
        if hasattr(parameter, "logical")
    }
    frequencies, factor = rotary_frequencies(
        sizes.rope_dim, config.rope_theta, S, config
    )
    frequencies = np.asarray(frequencies, np.float64)

    def normalised(vector: np.ndarray, norm: Any) -> np.ndarray:
        scale = np.asarray(norm.scale[...], np.float64)
        return vector / np.sqrt(np.mean(vector**2) + 1e-6) * scale

    def turned(vector: np.ndarray, position: int) -> np.ndarray:
        """Rotates pairs (i, i + R / 2) as complex numbers."""
        half = sizes.rope_dim // 2
        pairs = vector[:half] + 1j * vector[half:]
        pairs = pairs * factor * np.exp(1j * position * frequencies)
        return np.concatenate([pairs.real, pairs.imag])

    scale = config.attention_scale or (sizes.nope_dim + sizes.rope_dim) ** -0.5
    out = np.zeros(x.shape)
    for row in range(len(x)):
        ids = fields.get("segment_ids", np.zeros((B, S)))[row]
        keys, values, queries = [], [], []
        for token in range(S):
            at = int(fields["positions"][row, token])
            hidden = x[row, token].astype(np.float64)
            c = hidden @ value["latent_down"] + value.get("latent_down_bias", 0)
            c = normalised(c, layer.latent_norm)
            r = turned(hidden @ value["rope_key"] + value.get("rope_key_bias", 0), at)
            if sizes.query_rank:
                hidden = hidden @ value["query_down"] + value.get("query_down_bias", 0)
                hidden = normalised(hidden, layer.query_down_norm)
            kernel = value["query_up" if sizes.query_rank else "query"]
            head_keys, head_values, head_queries = [], [], []
            for head in range(config.num_heads):
                both = c @ value["latent_up"][:, head]
                head_keys.append(np.concatenate([both[: sizes.nope_dim], r]))
                head_values.append(both[sizes.nope_dim :])
                q = hidden @ kernel[:, head]
                rotated = turned(q[sizes.nope_dim :], at)
                head_queries.append(np.concatenate([q[: sizes.nope_dim], rotated]))
            keys.append(head_keys)
            values.append(head_values)
            queries.append(head_queries)
            for head in range(config.num_heads):
                seen = [t for t in range(token + 1) if ids[t] == ids[token]]
                logits = [scale * queries[token][head] @ keys[t][head] for t in seen]
                weights = np.exp(logits - np.max(logits))
                weights /= weights.sum()
                mixed = sum(
                    w * values[t][head] for w, t in zip(weights, seen, strict=True)
                )
                out[row, token] += mixed @ value["out"][head]
            out[row, token] += value.get("out_bias", 0)
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_is_what_its_definition_says(name, packed):
    layer = layer_of(CONFIGS[name])
    x, fields = inputs(layer.config, packed=packed)
    if "biases" in name:
        assert layer.config.attention_scale != (8 + 6) ** -0.5
        assert float(jnp.abs(layer.rope_key_bias[...]).min()) > 0
    info = BlockInfo(None, jnp.int32(0), fields, "latent")
    out = jax.jit(lambda x: layer(x, info).x, compiler_options=FAST_COMPILE)(x)
    expected = by_loops(layer, np.asarray(x), jax.device_get(fields))
    assert np.abs(expected).max() > 0.1
    assert worst(out, expected) < 1e-5


@pytest.mark.parametrize("name", ["plain query", "yarn, biases"])
def test_decoding_is_the_forward_pass(name):
    model = model_of(CONFIGS[name])
    tokens = np.random.default_rng(2).integers(0, 64, (B, S)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "positions": np.tile(np.arange(S, dtype=np.int32), (B, 1)),
    }
    jit = partial(jax.jit, compiler_options=FAST_COMPILE)
    expected = jit(lambda batch: model.forward(batch))(batch)
    empty = model.init_cache(B, S)
    (arrays,) = empty.stacks["blocks"]
    # one latent and one key a token, for all heads
    assert arrays.latent.shape == (2, B, S, 1, 12)
    assert arrays.rope_key.shape == (2, B, S, 1, 6)
    decode = jit(lambda tokens, cache: model.decode(tokens, cache))
    logits, _ = decode(tokens, empty)
    assert worst(logits, expected) < 1e-5
    cache = jit(lambda tokens, cache: model.prefill(tokens, cache))(
        tokens[:, :10], empty
    )
    logits, _ = decode(tokens[:, 10:], cache)
    assert worst(logits, expected[:, 10:]) < 1e-5


def test_adapters_train_all_kernels_and_decoding_reads_them():
    adapters = lora.LoraConfig(rank=2, alpha=4.0, targets=("attention/.*",))
    spec = describe(lora.adapted(lambda rngs: Transformer(LATENT, rngs=rngs), adapters))
    kernels = {path.split("/")[2] for path in spec.named_trainable()}
    expected = {"query_down", "query_up", "latent_down", "rope_key", "latent_up", "out"}
    assert kernels == expected
    jit = partial(jax.jit, compiler_options=FAST_COMPILE)
    trainable, state, frozen = jit(spec.init_params)(jax.random.key(0))
    tokens = np.random.default_rng(2).integers(0, 64, (B, S)).astype(np.int32)
    positions = np.tile(np.arange(S, dtype=np.int32), (B, 1))

    @jit
    def logits(trainable: Any) -> tuple[jax.Array, jax.Array]:
        model = spec.assemble(trainable, state, frozen)
        whole = model.forward({"tokens": tokens, "positions": positions})
        return whole, model.decode(tokens, model.init_cache(B, S))[0]

    before, _ = logits(trainable)
    whole, decoded = logits(jax.tree.map(lambda x: x + 0.2, trainable))
    assert worst(whole, before) > 0.1
    assert worst(decoded, whole) < 1e-5


LAYOUTS = {
    "tensor": {"tensor": 2, "fsdp": 2},
    "heads": {"context": 2, "tensor": 2, "attention": "heads"},
    "gather": {"context": 4, "tensor": 2, "attention": "gather"},
    "ring": {"context": 2, "fsdp": 2, "attention": "ring"},
}


@lru_cache
def dropping_layer() -> LatentAttention:
    """Builds a layer with an adapter that drops half of the latents."""
    layer = LatentAttention(LATENT, nnx.Rngs(0))
    shape = lora.shape_of("latent_up", layer.latent_up)
    adapter = lora.LoraConfig(rank=2, dropout=0.5)
    kernel = lora.LoraKernel(layer.latent_up, shape, adapter)
    kernel.add_low_rank(shape, adapter.rank, nnx.Rngs(1))
    kernel.lora_b.set_value(kernel.lora_b[...] + 0.3)
    layer.latent_up = kernel
    return layer


def outcome(
    layout: dict[str, Any] | None, *, dropout: bool = False, key: int = 0
) -> tuple[Any, str]:
    """Computes the output and all gradients of a packed layer on a layout.

    Returns:
      The output, and the gradients of x and of the parameters; and the program's text.
    """
    layer = layer_of(LATENT)
    random_key = None
    if dropout:
        layer = dropping_layer()
        random_key = jax.random.key(key)
    graph, parameters = nnx.split(layer)
    x, fields = inputs(LATENT, packed=True)
    fields = fields | {"sample": jnp.arange(3, 3 + B)}
    weight = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)
    active: Any = {}
    if layout is not None:
        rules, mesh = rules_and_mesh(**layout)
        active = {"mesh": mesh, "rules": rules}

    def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = execution.shard(x, "batch", "sequence", None)
        info = BlockInfo(random_key, jnp.int32(0), fields, "latent")
        out = apply_block(nnx.merge(graph, parameters), x, info).x
        return jnp.sum(out * weight), out

    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(parameters: Any, x: jax.Array) -> Any:
        with execution.activate(**active):
            return jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)

    compiled = run.lower(parameters, x).compile()
    (_, out), gradients = compiled(parameters, x)
    text = compiled.as_text()
    return jax.device_get((out, jax.tree.leaves(gradients))), text


one_device = lru_cache(partial(outcome, None))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_gradients_of_one_device(name):
    found, text = outcome(LAYOUTS[name])
    expected, _ = one_device()
    assert len(expected[1]) == 9  # x, and 8 parameters
    assert worst(found, expected) < 1e-5
    gathered = [
        [int(dim) for dim in dims.split(",")]
        for dims in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
    ]
    # of the whole sequence, without heads: c + 1 devices
    latents = [dims for dims in gathered if dims[:2] == [B, S] or S in dims]
    if name == "gather":
        # The latent and the key of all tokens are sent; keys and values are not.
        assert {dims[-1] for dims in latents} >= {SIZES.kv_rank, SIZES.rope_dim}
        heads = SIZES.nope_dim + SIZES.value_dim, SIZES.value_dim, 8 + 6
        assert not [d for d in gathered if d[-1] in heads and S in d]


def test_devices_that_gather_latents_drop_the_same_inputs_of_adapters():
    expected, _ = outcome(None, dropout=True)
    found, _ = outcome(LAYOUTS["gather"], dropout=True)
    assert worst(found, expected) < 1e-5
    other, _ = outcome(None, dropout=True, key=1)
    assert worst(other, expected) > 0.1


def test_parameters_and_products_are_counted():
    spec = spec_of(LATENT)
    block = {
        path.removeprefix("blocks/attention/"): x.shape[1:]
        for path, (x, _) in spec.named_parameters().items()
        if "/attention/" in path
    }
    assert block == {
        "query_down": (32, 20),
        "query_down_norm/scale": (20,),
        "query_up": (20, 4, 14),
        "latent_down": (32, 12),
        "rope_key": (32, 6),
        "latent_norm/scale": (12,),
        "latent_up": (12, 4, 18),
        "out": (4, 10, 32),
    }
    matrices = sum(
        np.prod(shape) for name, shape in block.items() if "norm" not in name
    )
    (cost,) = [c for c in LATENT.costs(S) if c.name == "attention"]
    assert cost.layers == 2
    assert cost.product_flops() == 6 * 2 * matrices
    # one layer's forward pass as its program counts it, with the whole square
    layer = layer_of(LATENT)
    x, fields = inputs(LATENT, packed=False)
    info = BlockInfo(None, jnp.int32(0), fields, "latent")
    program = jax.make_jaxpr(lambda x: layer(x, info).x)(x)
    declared = cost.product_flops() + cost.fused_flops("full")
    assert jaxpr_flops(program.jaxpr) == declared / 3 / 2 * B * S


def test_the_latent_crosses_context_in_place_of_keys_and_values():
    cost = latent_attention_cost(
        width=7168,
        heads=128,
        query_rank=1536,
        kv_rank=512,
        nope_size=128,
        rope_size=64,
        value_size=128,
        length=8192,
    )
    rules, _ = rules_and_mesh(context=8, attention="gather")
    (crossing,) = cost.share(rules, 2).crossings
    assert crossing.forward == 7 * 576 * 2
    rules, _ = rules_and_mesh(context=8, attention="heads")
    (crossing,) = cost.share(rules, 2).crossings
    assert crossing.forward == 7 * 2 * 16 * (192 + 128) * 2
    assert cost.fused_flops("full") == 6 * 128 * (192 + 128) * 8192


FAULTS = {
    "an odd size": (
        replace(LATENT, latent=replace(SIZES, rope_dim=5)),
        "model.latent.rope_dim=5: rotary positions need an even size; change it",
    ),
    "no such layer": (
        replace(LATENT, layer_pattern=("global",)),
        "model.latent: model.layer_pattern=global has no latent layers; set "
        "model.layer_pattern=latent, or leave model.latent as it is",
    ),
    "an option of attention": (
        replace(LATENT, qk_norm="head"),
        "model.qk_norm=head: model.layer_pattern=latent has latent layers, which do not "
        "read it; set model.qk_norm=none",
    ),
    "an option of the other layers": (
        replace(LATENT, layer_pattern=("latent", "global"), rope_query_growth=0.1),
        "model.rope_query_growth=0.1: model.layer_pattern=latent,global has latent "
        "layers, which do not read it; set model.rope_query_growth=0.0",
    ),
    "a stretch of no positions": (
        replace(TINY, layer_pattern=("nope",), rope_factor=4.0),
        "model.rope_factor=4.0: model.layer_pattern=nope has no rotary positions; set "
        "model.rope_factor=1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_conflicts_are_faults(name):
    config, text = FAULTS[name]
    assert not [*schema.faults(LATENT)]
    assert [*schema.faults(config)] == [text]


def test_tiny_variants_are_legal():
    for change in ({}, YARN, {"num_heads": 128, "num_kv_heads": 128}):
        large = TransformerConfig(layer_pattern=("latent",), **change)
        tiny = replace(large, **large.tiny(32))
        assert not [*schema.faults(tiny)]
        assert tiny.latent.kv_rank < large.latent.kv_rank


def test_kernels_are_asked_for_both_head_sizes():
    cudnn = BACKENDS["cudnn"]
    assert cudnn.size_refusal("bfloat16", 4096, (128, 64)) is None
    for sizes in ((192, 128), (128, 192)):
        reason = "head size 192 is not a multiple of 8 up to 128"
        assert cudnn.size_refusal("bfloat16", 4096, sizes) == reason
    assert BACKENDS["splash"].size_refusal("bfloat16", 4096, (192, 128)) is None
