"""A cache split over `context`: equal to one device, and where its shards are."""

import functools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.inference import decoding, scoring, weights
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.parallel import execution
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.telemetry import hlo
from jaxdist.telemetry.units import GIB
from support.experts import rules_and_mesh
from support.programs import collectives, loop_bodies, reachable

ROOM, NEW = 24, 6
PROMPTS = [
    [5, 9, 30, 2, 7],
    [11],
    [*range(1, 36), *range(1, 36)],
    [3, 3, 8, 1, 40, 41, 42, 43, 44],
]
LENGTHS = np.array([len(prompt) for prompt in PROMPTS], np.int32)
# 70: not divided by 4, 8 and 3, and long enough to be read as training reads it
LONGEST = max(LENGTHS)
LOCAL = TransformerConfig(
    vocab_size=48,
    num_layers=3,
    d_model=16,
    d_ff=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    init_std=0.4,
    window=6,
    layer_pattern=("local", "nope", "global"),
    attention_softcap=8.0,
    rope_theta_local=500.0,
    rope_query_growth=0.5,
    rope_original_positions=16,
)
STRETCHED = replace(
    LOCAL,
    rope_scaling="yarn",
    rope_factor=4.0,
    rope_original_positions=16,
    num_layers=2,
    window=0,
    layer_pattern=("global",),
    rope_theta_local=0.0,
)
LEARNED = TransformerConfig(
    vocab_size=48,
    num_layers=2,
    d_model=16,
    d_ff=32,
    num_heads=6,
    num_kv_heads=6,
    head_dim=8,
    init_std=0.4,
    positions="learned",
    max_positions=101,
    norm="layer",
    gated=False,
    activation="gelu",
    bias="all",
)
EXPERTS = replace(
    STRETCHED, num_experts=4, experts_per_token=2, expert_d_ff=16, first_dense_layers=1
)


@dataclass(frozen=True)
class Case:
    config: TransformerConfig
    axes: dict[str, int]
    shard: tuple[int, int, int]  # rows, slots and kv heads on a device
    rules: dict[str, Any] = field(default_factory=dict)
    # layers, heads and size of a slot on a device, of each array that a mixer other
    # than attention keeps
    others: tuple[tuple[int, int, int], ...] = ()


CASES = {
    "context 4, tensor 2": Case(LOCAL, {"context": 4, "tensor": 2}, (4, 24, 2)),
    "context 8": Case(LOCAL, {"context": 8}, (4, 12, 4)),
    "context 2, data 2, tensor 2, gather": Case(
        LOCAL,
        {"data": 2, "context": 2, "tensor": 2},
        (2, 48, 2),
        {"attention": "gather"},
    ),
    "ring, kv heads copied": Case(
        replace(STRETCHED, num_kv_heads=1),
        {"context": 4, "tensor": 2},
        (4, 24, 1),
        {"attention": "ring"},
    ),
    "context 3, learned positions": Case(LEARNED, {"context": 3}, (4, 34, 6)),
    "experts": Case(EXPERTS, {"expert": 2, "context": 2, "tensor": 2}, (2, 48, 2)),
}
KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
)
QUICK = "context 4, tensor 2"
MARKED = [
    pytest.param(name, marks=() if name == QUICK else pytest.mark.slow)
    for name in CASES
]


class Layout:
    """A model on a mesh."""

    def __init__(self, config: TransformerConfig, **options: Any):
        self.config, (self.rules, self.mesh) = config, rules_and_mesh(**options)
        self.spec: ModelSpec = describe(lambda rngs: Transformer(config, rngs=rngs))
        trainable, *others = jax.jit(lambda: self.spec.init_params(jax.random.key(1)))()
        places = [
            jax.NamedSharding(self.mesh, self.rules.stored(names, leaf.shape))
            for leaf, names in self.spec.named_parameters().values()
        ]
        trainable = jax.device_put(
            trainable, jax.tree.unflatten(jax.tree.structure(trainable), places)
        )
        self.weights = (trainable, *others)

    def jit(self, function, **options):
        """Compiles function(model, ...) as a program of (weights, ...)."""

        def run(weights, *arguments):
            with execution.activate(self.mesh, self.rules, compute="float32"):
                return function(self.spec.assemble(*weights), *arguments)

        return jax.jit(run, **options)

    def forced(self, slots: int):
        """Returns logits [B, NEW, V] after the prompts, fed their argmax, and the cache."""

        def run(model, tokens_BP):
            cache = model.prefill(tokens_BP, model.init_cache(len(PROMPTS), slots))
            last_B = jnp.take_along_axis(tokens_BP, LENGTHS[:, None] - 1, 1)[:, 0]

            def one(carry, _):
                logits, cache = model.decode(carry[0][:, None], carry[1])
                return (jnp.argmax(logits[:, 0], -1).astype(jnp.int32), cache), logits[
                    :, 0
                ]

            start = last_B, cache._replace(length=LENGTHS - 1)
            (_, cache), logits = jax.lax.scan(one, start, length=NEW)
            return logits.swapaxes(0, 1), cache

        tokens = decoding.padded([np.array(p) for p in PROMPTS], len(PROMPTS), LONGEST)
        return self.jit(run)(self.weights, tokens)

    def generate(self):
        generate = decoding.TokenGenerator(self.spec, self.mesh, self.rules)
        found = generate(
            self.weights,
            PROMPTS,
            max_tokens=ROOM,
            sampling=SamplingConfig(temperature=0.0),
        )
        return [generation.tokens.tolist() for generation in found]


@functools.cache
def alone(config: TransformerConfig):
    """Returns the logits [B, NEW, V] of one device, and its greedy tokens."""
    one = Layout(config)
    tokens = one.generate()
    texts = [[*prompt, *new] for prompt, new in zip(PROMPTS, tokens, strict=True)]
    rows = decoding.padded(
        [np.array(text) for text in texts], len(texts), LONGEST + ROOM
    )
    batch = {
        "tokens": rows,
        "positions": np.tile(np.arange(rows.shape[1], dtype=np.int32), (len(rows), 1)),
    }
    logits = one.jit(lambda model, batch: model.forward(batch))(one.weights, batch)
    at = LENGTHS[:, None] - 1 + np.arange(NEW)
    return np.take_along_axis(np.asarray(logits), at[:, :, None], 1), tokens


@pytest.mark.parametrize("name", MARKED)
def test_logits_and_tokens_are_those_of_one_device(name):
    case = CASES[name]
    assert jax.device_count() == 8
    layout = Layout(case.config, **case.axes, **case.rules)
    rows, slots, heads = case.shard
    logits, cache = layout.forced(slots * case.axes["context"])
    layers = case.config.num_layers - sum(depth for depth, *_ in case.others)
    held = Counter()  # layers by the part of a layer's array on a device
    for x in jax.tree.leaves(cache.stacks):
        depth, *part = x.addressable_shards[0].data.shape
        held[tuple(part)] += depth
    attention = (rows, slots, heads, 8)
    expected_parts = Counter({attention: 2 * layers})  # keys and values
    for depth, *slot in case.others:
        expected_parts[rows, slots, *slot] += depth
    assert held == expected_parts
    assert cache.places.sharding.spec == jax.P("context")
    expected, tokens = alone(case.config)
    assert expected.std() > 0.5  # sharp enough that a wrong mask or position would show
    np.testing.assert_allclose(
        logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )
    assert layout.generate() == tokens
    assert len({tuple(row) for row in tokens}) == len(PROMPTS)


def step(slots: int, **axes: int):
    """Compiles a step of one new token; returns it and a device's weight bytes."""
    layout = Layout(LOCAL, **axes)
    cache = layout.jit(lambda model: model.init_cache(len(PROMPTS), slots))(
        layout.weights
    )
    tokens = np.zeros((len(PROMPTS), 1), np.int32)
    decode = layout.jit(
        lambda model, tokens, cache: model.decode(tokens, cache), donate_argnums=2
    )
    held = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(layout.weights)
    )
    return decode.lower(layout.weights, tokens, cache).compile(), held


def test_a_step_moves_sums_of_its_tokens_alone_and_holds_a_part_of_the_cache():
    slots, (B, H, N) = 2048, (len(PROMPTS), LOCAL.num_heads, LOCAL.head_dim)
    whole = 2 * LOCAL.num_layers * B * slots * LOCAL.num_kv_heads * N * 4
    held, temp = {}, {}
    for size in (1, 8):
        # weights are whole: what is left is the cache's
        program, own = step(slots, context=size, zero=0)
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes > 0.99 * whole / size  # written in place
        held[size] = memory.argument_size_in_bytes - own
        # XLA's CPU backend copies a layer's part
        temp[size] = memory.temp_size_in_bytes
        moved = collectives(hlo.parse(program.as_text()), KINDS)
        assert bool(moved) == (size > 1)
    assert {kind for _, kind, *_ in moved} == {"all-reduce"}
    assert {math.prod(shape) for *_, shape in moved} == {
        B * H,
        B * H * N,
    }  # of the logits' peaks and sums, of v
    assert held[8] == pytest.approx(held[1] / 8, rel=0.01)
    assert temp[8] < temp[1] / 6


def gathered_by(layout: Layout) -> tuple[int, set[str]]:
    """Counts gathers outside of the program's loops; lists collectives inside of them."""
    generate = decoding.TokenGenerator(layout.spec, layout.mesh, layout.rules)
    rows = (
        np.zeros((4, 16), np.int32),
        np.ones(4, np.int32),
        np.arange(4, dtype=np.int32),
    )
    sizes = {"room": 16, "capacity": 32, "sampling": SamplingConfig(temperature=0.0)}
    program = generate._run.lower(
        layout.weights, *rows, np.int32(4), np.int32(16), np.uint32(0), **sizes
    )
    module = hlo.parse(program.compile().as_text())
    looped = set().union(*(reachable(module, body) for body in loop_bodies(module)))
    moved = collectives(module, KINDS)
    once = sum(kind == "all-gather" for name, kind, *_ in moved if name not in looped)
    return once, {kind for name, kind, *_ in moved if name in looped}


@pytest.mark.slow
def test_weights_are_gathered_once_before_the_first_token_where_there_is_room(
    monkeypatch,
):
    layout = Layout(LOCAL, context=8)
    once, looped = gathered_by(layout)
    # a layer's kernels and the embeddings; sums over the cache
    assert once >= 7
    assert looped == {"all-reduce"}
    tokens = layout.generate()
    monkeypatch.setattr(weights, "fits", lambda size, kind: False)
    once, looped = gathered_by(layout)
    assert "all-gather" in looped
    assert layout.generate() == tokens == alone(LOCAL)[1]


def test_a_device_has_room_where_half_of_its_memory_holds_the_weights():
    assert weights.fits(7 * GIB, "TPU v5 lite")
    assert not weights.fits(8 * GIB, "TPU v5 lite")
    assert weights.fits(2**50, jax.devices()[0].device_kind)  # not known


def test_scores_are_those_of_one_device():
    tokens = np.random.default_rng(0).integers(0, 48, 150)
    found = []
    for axes in ({}, {"context": 4, "tensor": 2}):
        layout = Layout(STRETCHED, **axes)
        score = scoring.build_scorer(layout.spec, layout.mesh, layout.rules, rows=2)
        windows = scoring.windows(tokens[:1], tokens[1:], 64)
        found.append(score(layout.weights, windows, longest=64))
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(
            many.log_probabilities, one.log_probabilities, rtol=1e-5, atol=1e-5
        )
