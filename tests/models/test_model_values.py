"""The transformer's values (norms, biases, windows, rotary bases, ...) against a second
model.

That one is written here from the papers' formulas: a loop over layers, dense masks,
plain autodiff.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config.schema import faults
from jaxdist.models.layers import _rotate_by_matmul, rotary_tables, rotate
from jaxdist.models.rotary import rotary_frequencies
from jaxdist.models.transformer import TransformerConfig
from jaxdist.parallel import execution
from jaxdist.parallel.remat import rematerialised
from jaxdist.protocols.layer_scan import scan_layers
from jaxdist.protocols.model import pattern_of, run_blocks, shared_fields
from jaxdist.step.step_config import StepConfig
from support.models import (
    FAST_COMPILE,
    MIXED,
    TINY,
    batch_of,
    model_of,
    run,
    spec_of,
    worst,
)

LENGTH = 16
FAMILIES = {
    "gemma 2": replace(
        TINY,
        num_layers=3,
        num_kv_heads=2,
        norm="rms_plus_one",
        norm_position="both",
        activation="gelu",
        embedding_scale=32**0.5,
        attention_scale=0.2,
        attention_softcap=3.0,
        logit_softcap=5.0,
        layer_pattern=("local", "global"),
        window=5,
        tie_embeddings=True,
    ),
    "gemma 3": replace(
        TINY,
        num_layers=4,
        num_kv_heads=1,
        norm="rms_plus_one",
        norm_position="both",
        qk_norm="head",
        layer_pattern=("local", "local", "global"),
        window=3,
        rope_theta=1e6,
        rope_theta_local=100.0,
        rope_scaling="linear",
        rope_factor=8.0,
    ),
    "olmo 2, with a window and biases": replace(
        TINY,
        num_kv_heads=2,
        norm_position="post",
        qk_norm="projection",
        layer_pattern=("local",),
        window=4,
        bias="attention",
    ),
    "smollm 3, with queries that grow": replace(
        TINY,
        num_layers=4,
        num_kv_heads=2,
        layer_pattern=("nope", "local", "global"),
        window=5,
        rope_theta=100.0,
        rope_query_growth=0.5,
        rope_original_positions=4,
    ),
    "phi": replace(
        TINY,
        norm="layer",
        bias="all",
        gated=False,
        activation="gelu",
        rotary_fraction=0.5,
        head_dim=12,
    ),
}


def slow(name: str):
    return pytest.param(name, marks=pytest.mark.slow)


# --- the second model -----------------------------------------------------------------


def rms(x, scale, axes=(-1,)):
    return x / jnp.sqrt((x * x).mean(axes, keepdims=True) + TINY.norm_eps) * scale


def norm(c: TransformerConfig, w, x):
    if c.norm == "layer":
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / jnp.sqrt(centred.var(-1, keepdims=True) + c.norm_eps) * w["scale"]
            + w["bias"]
        )
    return rms(x, 1 + w["scale"] if c.norm == "rms_plus_one" else w["scale"])


def turned(c: TransformerConfig, x_BSHN, kind: str):
    """Returns x with its first R dims rotated as complex numbers (first half + i second
    half).
    """
    if kind == "nope":
        return x_BSHN
    R = int(c.head_dim * c.rotary_fraction)
    own = kind == "local" and c.rope_theta_local
    speed = (c.rope_theta_local if own else c.rope_theta) ** -(
        np.arange(R // 2) * 2 / R
    )
    speed = speed / (1 if own else c.rope_factor)
    turn = jnp.exp(1j * np.arange(x_BSHN.shape[1])[:, None] * speed)[None, :, None]
    z = (x_BSHN[..., : R // 2] + 1j * x_BSHN[..., R // 2 : R]) * turn
    return jnp.concatenate([z.real, z.imag, x_BSHN[..., R:]], -1)


def attend(c: TransformerConfig, w, x, kind: str):
    q, k, v = (
        jnp.einsum("bsd,dhn->bshn", x, w[name]) for name in ("query", "key", "value")
    )
    if c.bias != "none":
        q, k, v = q + w["query_bias"], k + w["key_bias"], v + w["value_bias"]
    if c.qk_norm != "none":
        axes = {"head": (-1,), "projection": (-2, -1)}[c.qk_norm]
        one = 1 if c.norm == "rms_plus_one" else 0
        q, k = (
            rms(q, one + w["query_norm"]["scale"], axes),
            rms(k, one + w["key_norm"]["scale"], axes),
        )
    q, k = turned(c, q, kind), turned(c, k, kind)
    if kind != "nope":
        lengths = np.arange(x.shape[1]) // c.rope_original_positions
        q = q * (1 + c.rope_query_growth * np.log(1 + lengths))[None, :, None, None]
    k, v = (jnp.repeat(y, c.num_heads // c.num_kv_heads, 2) for y in (k, v))
    logits = jnp.einsum("bshn,bthn->bhst", q, k) * (
        c.attention_scale or 1 / np.sqrt(c.head_dim)
    )
    if c.attention_softcap:
        logits = c.attention_softcap * jnp.tanh(logits / c.attention_softcap)
    back = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None, :]
    seen = (back >= 0) & (back < (c.window if kind == "local" else 10**6))
    share = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
    y = jnp.einsum("bhst,bthn,hnd->bsd", share, v, w["out"])
    return y + (w["out_bias"] if c.bias in ("attention", "all") else 0)


def feed(c: TransformerConfig, w, x):
    activate = {
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    }[c.activation]
    up = x @ w["up"] + (w["up_bias"] if c.bias == "all" else 0)
    y = activate(x @ w["gate"]) * up if c.gated else activate(up)
    return y @ w["down"] + (w["down_bias"] if c.bias == "all" else 0)


@jax.numpy_rank_promotion("allow")
def second_model(c: TransformerConfig, w, tokens):
    """Returns logits [B, S, V] from the parameters as nested dicts."""
    x = w["embedding"][tokens] * c.embedding_scale
    for layer in range(c.num_layers):
        kind = c.layer_pattern[layer % len(c.layer_pattern)]
        own = jax.tree.map(lambda a, layer=layer: a[layer], w["blocks"])
        for name in ("attention", "mlp"):
            y = x if c.norm_position == "post" else norm(c, own[f"{name}_norm"], x)
            y = (
                attend(c, own[name], y, kind)
                if name == "attention"
                else feed(c, own[name], y)
            )
            x = x + (
                y if c.norm_position == "pre" else norm(c, own[f"{name}_post_norm"], y)
            )
    x = norm(c, w["final_norm"], x)
    logits = x @ (w["embedding"].T if c.tie_embeddings else w["output"])
    return (
        c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        if c.logit_softcap
        else logits
    )


def moved(config: TransformerConfig):
    """Returns (graph, parameters) with noise on all, so that no norm or bias is as it
    starts.
    """
    graph, state = nnx.split(model_of(config))
    random = np.random.default_rng(1)
    return graph, jax.tree.map(
        lambda x: np.asarray(x + 0.2 * random.normal(size=x.shape), np.float32), state
    )


# --- the whole model ------------------------------------------------------------------


@lru_cache
def compiled(name: str):
    """Returns (parameters, tokens, logits, their gradients) of our model."""
    config = FAMILIES[name]
    assert faults(config) == []
    graph, state = moved(config)
    batch = batch_of(config, 2, LENGTH)
    weight = (
        np.random.default_rng(2)
        .normal(size=(2, LENGTH, config.vocab_size))
        .astype(np.float32)
    )

    def objective(state):
        logits = nnx.merge(graph, state).forward(batch)
        return (logits * weight).sum(), logits

    gradient = jax.jit(
        jax.value_and_grad(objective, has_aux=True), compiler_options=FAST_COMPILE
    )
    (_, logits), gradients = gradient(state)
    return (
        nnx.to_pure_dict(state),
        batch["tokens"],
        weight,
        logits,
        nnx.to_pure_dict(gradients),
    )


@pytest.mark.parametrize(
    "name", [slow(name) if name == "phi" else name for name in FAMILIES]
)
def test_logits_and_gradients_are_those_of_the_second_model(name):
    config = FAMILIES[name]
    parameters, tokens, weight, logits, gradients = compiled(name)

    def objective(parameters):
        logits = second_model(config, parameters, tokens)
        return (logits * weight).sum(), logits

    gradient = jax.jit(
        jax.value_and_grad(objective, has_aux=True), compiler_options=FAST_COMPILE
    )
    (_, wanted), wanted_gradients = gradient(parameters)
    assert np.asarray(wanted).std() > 0.5
    assert worst(logits, wanted) < 1e-5
    assert jax.tree.structure(gradients) == jax.tree.structure(wanted_gradients)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted_gradients)) > 1e-2
    assert worst(gradients, wanted_gradients) < 1e-5


CHANGES = {
    "attention_scale": ("gemma 2", 0.0),
    "attention_softcap": ("gemma 2", 0.0),
    "window": ("gemma 2", 4),
    "embedding_scale": ("gemma 2", 1.0),
    "rope_theta_local": ("gemma 3", 0.0),
    "rope_factor": ("gemma 3", 1.0),
    "layer_pattern": ("gemma 2", ("global", "local")),
    "rope_query_growth": ("smollm 3, with queries that grow", 0.0),
    "rope_original_positions": ("smollm 3, with queries that grow", 5),
    "nope": (
        "smollm 3, with queries that grow",
        {"layer_pattern": ("global", "local", "global")},
    ),
}


@pytest.mark.parametrize("field", CHANGES)
def test_each_value_without_parameters_changes_the_logits(field):
    """So the agreement above is one about these values, too."""
    name, other = CHANGES[field]
    parameters, tokens, _, logits, _ = compiled(name)
    changes = other if isinstance(other, dict) else {field: other}
    config = replace(FAMILIES[name], **changes)
    assert worst(second_model(config, parameters, tokens), logits) > 1e-3


def test_a_local_layer_sees_its_window_and_a_pattern_its_remainder():
    config = replace(TINY, num_layers=1, layer_pattern=("local",), window=4)
    graph, state = moved(config)
    batch = batch_of(config, 2, LENGTH)
    forward = jax.jit(
        lambda tokens: nnx.merge(graph, state).forward(batch | {"tokens": tokens})
    )
    tokens = batch["tokens"].copy()
    before = np.asarray(forward(tokens))
    tokens[0, 6] = (tokens[0, 6] + 1) % config.vocab_size
    differs = (np.asarray(forward(tokens)) != before).any(-1)[0]
    # itself and the window - 1 tokens after it
    assert np.flatnonzero(differs).tolist() == [6, 7, 8, 9]
    kinds = []
    scan_layers(
        lambda carry, layer, x, kind: (kinds.append(kind) or carry, None),
        0,
        jnp.zeros((5, 1)),
        ("local", "local", "global"),
    )
    assert kinds == ["local", "local", "global", "local", "local"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("depth", [2, 3, 8])
def test_scanned_layers_are_the_loop_whatever_the_pattern(depth, reverse):
    pattern, xs = ("a", "b", "c"), np.random.default_rng(0).normal(size=depth)

    def body(carry, layer, x, kind):
        carry = carry * 0.5 + x * {"a": 1.0, "b": 10.0, "c": 100.0}[kind] + layer
        return carry, {"out": carry, "layer": layer}

    carry, given = jax.jit(
        lambda xs: scan_layers(body, 0.0, xs, pattern, first=7, reverse=reverse)
    )(xs)
    expected, outs = 0.0, np.zeros(depth)
    for layer in range(depth)[:: -1 if reverse else 1]:
        outs[layer] = expected = (
            expected * 0.5 + xs[layer] * 10.0 ** (layer % 3) + 7 + layer
        )
    np.testing.assert_allclose(carry, expected, rtol=1e-6)
    np.testing.assert_allclose(given["out"], outs, rtol=1e-6)
    np.testing.assert_array_equal(given["layer"], 7 + np.arange(depth))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_a_pattern_changes_nothing_about_rematerialisation(policy):
    config = FAMILIES["gemma 2"]
    graph, state = moved(config)
    batch = batch_of(config, 2, LENGTH)

    def total(state, transform):
        model = nnx.merge(graph, state)
        x = model.embed(batch)
        return jnp.sum(
            jnp.sin(
                run_blocks(
                    model.blocks, x, None, shared_fields(model, batch), transform
                )[0]
            )
        )

    seen = []

    def transform(block):
        def counted(parameters, x, context):
            seen.append(context.kind)
            return block(parameters, x, context)

        return rematerialised(counted, policy)

    jaxpr = jax.make_jaxpr(jax.grad(lambda s: total(s, transform)))(state)
    assert set(seen) == {"local", "global"} == set(pattern_of(model_of(config).blocks))
    assert "remat" in str(jaxpr) or "checkpoint" in str(jaxpr)
    ours = jax.jit(
        jax.grad(lambda s: total(s, transform)), compiler_options=FAST_COMPILE
    )(state)
    plain = jax.jit(
        jax.grad(lambda s: total(s, lambda block: block)), compiler_options=FAST_COMPILE
    )(state)
    assert worst(ours, plain) < 1e-5


def test_embeddings_are_scaled_in_their_own_dtype():
    model = model_of(FAMILIES["gemma 2"])
    batch = batch_of(FAMILIES["gemma 2"])
    with execution.activate(compute="bfloat16"):
        found = model.embed(batch)
    scale = jnp.bfloat16(32**0.5)
    assert found.dtype == jnp.bfloat16
    assert float(scale) != np.float32(32**0.5)
    table = np.asarray(model.embedding[...].astype(jnp.bfloat16))
    np.testing.assert_array_equal(
        np.asarray(found), np.asarray(table[batch["tokens"]] * scale)
    )


# --- decoding, layouts ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma 3", slow("gemma 2"), slow("phi")])
def test_decoding_sees_what_the_whole_pass_sees(name):
    config = FAMILIES[name]
    graph, state = moved(config)
    batch = batch_of(config, 2, LENGTH)
    logits = compiled(name)[3]
    assert config.window < LENGTH // 2

    @jax.jit
    def decode(state, tokens):
        model = nnx.merge(graph, state)
        first, cache = model.decode(tokens[:, :7], model.init_cache(2, LENGTH + 3))
        found = [first]
        for i in range(7, 10):
            one, cache = model.decode(tokens[:, i : i + 1], cache)
            found.append(one)
        return jnp.concatenate(found, 1)

    assert worst(decode(state, batch["tokens"]), logits[:, :10]) < 1e-5


SHARDED = {
    "all": replace(
        FAMILIES["gemma 3"],
        num_layers=3,
        num_kv_heads=2,
        layer_pattern=("local", "global"),
        qk_norm="projection",
        attention_softcap=3.0,
    ),
    **{name: replace(config, num_kv_heads=2) for name, config in FAMILIES.items()},
}


@pytest.mark.parametrize("name", ["all", *map(slow, FAMILIES)])
def test_eight_devices_give_the_gradients_of_one(name):
    config = SHARDED[name]
    one = run(model=config, step=StepConfig(remat="none"))
    many = run(MIXED, model=config, step=StepConfig(remat="dots"))
    kernels = many.gradients["blocks"]["attention"]
    assert ("query_norm" in kernels) == (config.qk_norm != "none")
    assert "query" in kernels
    assert many.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-6)
    assert worst(many.gradients, one.gradients) < 1e-5


# --- rotary positions -----------------------------------------------------------------


@pytest.mark.parametrize("turning", [6, 8])
def test_the_product_form_turns_the_same_dims(turning):
    random = np.random.default_rng(0)
    x, dy = random.normal(size=(2, 2, 5, 3, 8)).astype(np.float32)
    positions = jnp.arange(5, dtype=jnp.int32)[None].repeat(2, 0)
    cos, sin = rotary_tables(positions, *rotary_frequencies(turning, 50.0))
    plain, pull = jax.vjp(lambda x: rotate(x, cos, sin), x)
    product, pull_product = jax.vjp(lambda x: _rotate_by_matmul(x, cos, sin), x)
    assert worst(plain[..., :turning], x[..., :turning]) > 0.1
    np.testing.assert_array_equal(plain[..., turning:], x[..., turning:])
    np.testing.assert_allclose(product, plain, atol=1e-6)
    np.testing.assert_allclose(pull_product(dy)[0], pull(dy)[0], atol=1e-6)


# --- the names that checkpoints and conversions rely on -------------------------------


def test_parameters_have_the_promised_paths_and_names():
    def found(**changes):
        named = spec_of(replace(TINY, num_kv_heads=2, **changes)).named_parameters()
        return {path: (x.shape, names) for path, (x, names) in named.items()}

    post = found(norm_position="post", qk_norm="projection", bias="attention")
    assert post["blocks/attention/query_norm/scale"] == (
        (2, 4, 8),
        ("heads", "head_dim"),
    )
    assert post["blocks/attention/key_norm/scale"] == (
        (2, 2, 8),
        ("kv_heads", "head_dim"),
    )
    assert post["blocks/attention/out_bias"][0] == (2, 32)
    assert {"blocks/attention_post_norm/scale", "blocks/mlp_post_norm/scale"} <= set(
        post
    )
    assert not {
        "blocks/attention_norm/scale",
        "blocks/mlp_norm/scale",
        "blocks/mlp/up_bias",
    } & set(post)
    both = found(norm_position="both", qk_norm="head", bias="qkv", norm="rms_plus_one")
    assert both["blocks/attention/query_norm/scale"] == ((2, 8), ("head_dim",))
    names = [
        f"blocks/{part}_{place}norm/scale"
        for part in ("attention", "mlp")
        for place in ("", "post_")
    ]
    assert all(both[name] == ((2, 32), ("d_model",)) for name in names)
    assert "blocks/attention/query_bias" in both
    assert "blocks/attention/out_bias" not in both
    # scale is 1 + it
    assert not model_of(replace(TINY, norm="rms_plus_one")).final_norm.scale[...].any()
