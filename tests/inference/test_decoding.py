"""Generation: the cache against whole forward passes, sampling, batches, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults
from jaxdist.inference import decoding
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.models.attention import Attention
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.parallel import sharding
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.protocols.model_spec import ModelSpec, describe

PROMPTS = ([5, 9, 30, 2, 7], [11], [3, 3, 8, 1, 40, 41, 42, 43, 44])
GREEDY = SamplingConfig(temperature=0.0)
BASE = {
    "vocab_size": 48,
    "num_layers": 2,
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 4,
    "head_dim": 8,
    "init_std": 0.4,
}
VARIANTS = {
    "rotary, grouped heads, qk norm": {"num_kv_heads": 2, "qk_norm": "head"},
    "learned, tied, biases": {
        "positions": "learned",
        "max_positions": 40,
        "norm": "layer",
        "gated": False,
        "activation": "gelu",
        "bias": "all",
        "tie_embeddings": True,
        "logit_softcap": 5.0,
    },
}


@functools.cache
def model_of(variant: str):
    """Returns the spec and the arrays of a tiny model with sharp logits."""
    config = TransformerConfig(**BASE, **VARIANTS[variant])
    assert not faults(config)
    spec = describe(lambda rngs: Transformer(config, rngs=rngs))
    return spec, *jax.jit(lambda: spec.init_params(jax.random.key(1)))()


@functools.cache
def generator(variant: str, **axes: int):
    """Returns the generator of a variant on a mesh, given only prompts and keywords."""
    config = MeshConfig(**(axes or {"data": 1}))
    mesh = build_mesh(config, jax.devices()[: np.prod(list(axes.values()), dtype=int)])
    rules = sharding.build_rules(config, resolve_mesh(config, mesh.size))
    spec, trainable, *others = model_of(variant)
    places = [
        jax.NamedSharding(mesh, rules.stored(names, leaf.shape))
        for leaf, names in spec.named_parameters().values()
    ]
    trainable = jax.device_put(
        trainable, jax.tree.unflatten(jax.tree.structure(trainable), places)
    )
    if mesh.size > 1:
        assert any(
            not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(trainable)
        )
    generate = decoding.TokenGenerator(spec, mesh, rules)
    return functools.partial(generate, (trainable, *others))


def forward(variant: str, tokens) -> np.ndarray:
    """Returns the logits [B, S, V] of the whole forward pass."""
    tokens = np.asarray(tokens, np.int32)
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    return np.asarray(_forward(variant)({"tokens": tokens, "positions": positions}))


@functools.cache
def _forward(variant: str):
    spec, *arrays = model_of(variant)
    return functools.partial(
        jax.jit(lambda arrays, b: spec.assemble(*arrays).forward(b)), arrays
    )


def naive_greedy(variant: str, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        padded = text + [0] * (32 - len(text))
        text.append(int(forward(variant, [padded])[0, len(text) - 1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_the_whole_forward_pass(variant):
    spec, *arrays = model_of(variant)
    tokens = np.random.default_rng(0).integers(0, 48, (3, 12))
    expected = forward(variant, tokens)
    assert expected.std() > 0.3  # sharp enough that a wrong mask or position would show

    @jax.jit
    def decode(arrays, tokens, length_B):
        model = spec.assemble(*arrays)
        filled, cache = model.decode(tokens, model.init_cache(3, 20))
        last = jnp.take_along_axis(tokens, length_B[:, None], axis=1)
        return filled, *model.decode(last, cache._replace(length=length_B))

    # rows end at different places: the rest is padding
    length_B = np.array([11, 4, 7], np.int32)
    filled, one, cache = decode(arrays, tokens, length_B)
    np.testing.assert_allclose(filled, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        one[:, 0], expected[range(3), length_B], atol=1e-5, rtol=1e-5
    )
    np.testing.assert_array_equal(cache.length, length_B + 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_generation_is_the_argmax_loop(variant):
    found = generator(variant)(PROMPTS, max_tokens=7, sampling=GREEDY)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        assert generation.tokens.tolist() == naive_greedy(variant, prompt, 7)
        assert not generation.ended
    assert len({tuple(g.tokens) for g in found}) == 3


def test_a_mixer_that_keeps_a_state_is_refused(monkeypatch):
    """The state would hold the padding of the shorter prompt."""

    def init_state(self, depth, batch_size, length, dtype):
        return jnp.zeros((depth, batch_size, 32, 8, 8), dtype)

    variant = "rotary, grouped heads, qk norm"
    generate = generator(variant)
    assert len(generate(PROMPTS, max_tokens=2, sampling=GREEDY)) == len(PROMPTS)
    monkeypatch.setattr(Attention, "init_cache", init_state)
    fresh = generator.__wrapped__(variant)  # the cached one has compiled already
    with pytest.raises(ConfigError, match="in place of a slot for each token"):
        fresh(PROMPTS, max_tokens=2, sampling=GREEDY)


def test_the_end_token_ends_a_row_alone():
    variant = next(iter(VARIANTS))
    whole = generator(variant)(PROMPTS, max_tokens=7, sampling=GREEDY)
    end = int(whole[0].tokens[3])
    sampling = SamplingConfig(temperature=0.0, end_tokens=(47, end))
    found = generator(variant)(PROMPTS, max_tokens=7, sampling=sampling)
    for before, after in zip(whole, found, strict=True):
        text = before.tokens.tolist()
        assert after.ended == (end in text)
        assert after.tokens.tolist() == (
            text[: text.index(end)] if after.ended else text
        )


def test_meshes_and_batches_change_no_token():
    variant = next(iter(VARIANTS))
    samplings = (GREEDY, SamplingConfig(temperature=0.8, top_k=20, top_p=0.95))
    for sampling in samplings:
        options = {"max_tokens": 7, "sampling": sampling, "seed": 3}
        one = generator(variant)(PROMPTS, **options)
        many = generator(variant, data=2, fsdp=2, tensor=2)(PROMPTS, **options)
        split = generator(variant, fsdp=2, context=2)(PROMPTS, **options)
        alone = generator(variant)(PROMPTS[2:], samples=[2], **options)
        for a, b in zip([*one, *one, one[2]], [*many, *split, *alone], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
    other = generator(variant)(PROMPTS, max_tokens=7, sampling=sampling, seed=4)
    assert any(
        a.tokens.tolist() != b.tokens.tolist() for a, b in zip(one, other, strict=True)
    )


def test_sizes_in_one_bucket_share_a_program():
    variant = next(iter(VARIANTS))
    spec, *arrays = model_of(variant)
    traced = []

    class Counting(ModelSpec):
        def assemble(self, trainable, *others):
            traced.append(isinstance(jax.tree.leaves(trainable)[0], jax.core.Tracer))
            return spec.assemble(trainable, *others)

    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    rules = sharding.build_rules(MeshConfig(), resolve_mesh(MeshConfig(), mesh.size))
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    generate = decoding.TokenGenerator(Counting(**fields), mesh, rules)
    sizes = ((PROMPTS[:1], 3, 0), (PROMPTS[2:], 9, 5))
    found = [
        generate(arrays, prompts, max_tokens=n, sampling=GREEDY, seed=seed)[0].tokens
        for prompts, n, seed in sizes
    ]
    assert [tokens.size for tokens in found] == [3, 9]
    once = sum(traced)
    assert once > 0
    generate(arrays, PROMPTS[1:2], max_tokens=16, sampling=GREEDY)
    assert sum(traced) == once


LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_k": 2}, [4, 3, 0, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"top_p": 0.69}, [4, 3, 0, 0, 0]),
        ({"top_p": 0.75}, [0.4, 0.3, 0.15, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        # 0.7 of the 0.85 that top_k leaves
        ({"top_k": 3, "top_p": 0.8}, [4, 3, 0, 0, 0]),
    ],
)
def test_only_the_allowed_tokens_keep_their_shares(options, expected):
    sampling, order = SamplingConfig(**options), [2, 0, 4, 1, 3]  # logits come unsorted
    assert not faults(sampling)
    logits = jnp.tile(jnp.float32(LOGITS), (2, 1))[:, order]
    found = jax.nn.softmax(decoding.restrict(logits, sampling))[1]
    np.testing.assert_allclose(
        found, np.array(expected)[order] / np.sum(expected), rtol=1e-5
    )


def test_draws_follow_the_distribution():
    draws = 4000
    sampling = SamplingConfig(temperature=0.5, top_k=4)
    logits = jnp.tile(jnp.float32(LOGITS), (draws, 1))
    tokens = jax.jit(decoding.choose, static_argnums=2)(
        logits, jax.random.split(jax.random.key(0), draws), sampling
    )
    # squares: temperature 1/2
    expected = np.array([0.16, 0.09, 0.0225, 0.01, 0]) / 0.2825
    shares = np.bincount(tokens, minlength=5) / draws
    assert shares[4] == 0
    np.testing.assert_allclose(shares, expected, atol=4 * np.sqrt(0.25 / draws))


def test_faults_are_told_at_once():
    generate = generator("learned, tied, biases")
    with pytest.raises(ConfigError) as error:
        generate([[1] * 39, []], max_tokens=2, sampling=SamplingConfig(-1.0, -1, 0.0))
    assert len(error.value.faults) == 5
    assert "longest sequence of 40" in str(error.value)
    assert generate([], max_tokens=1) == []
    # the last place of the table
    assert generate([[1] * 39], max_tokens=1)[0].tokens.size == 1
