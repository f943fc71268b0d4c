"""A mixer that is no attention stands in the table, and nothing else knows it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.config.schema import faults
from jaxdist.models import experts, layers
from jaxdist.models.block import Block
from jaxdist.models.cache import LayerCache
from jaxdist.models.channels import CHANNELS, ChannelKind
from jaxdist.models.feed_forward import FeedForward
from jaxdist.models.mixers import MIXERS, MixerKind
from jaxdist.models.parts import Mixer
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.ops.matmul import project
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.protocols.model import (
    BlockInfo,
    BlockOutput,
    apply_block,
    layers_before,
    layers_of,
    shared_fields,
)
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, TINY, model_of, spec_of, worst
from support.packed_documents import packed_row
from support.pipelines import OPTIMIZER, Case, batch_for

MEAN = "mean"
BORDERLESS = "borderless"
COUNTING = "counting"
TOKENS = "mean_tokens"  # a stat: how many tokens a layer saw
RATE = "mean_rate"  # a field that the mixer prepares


class Mean(Mixer):
    """Gives each token the mean of the tokens so far, through a matrix."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.value = layers.normal(
            rngs, (config.d_model, config.d_model), 0.3, ("d_model", None)
        )

    @staticmethod
    def prepare(config: Any, batch: Any, length: int) -> dict[str, jax.Array]:
        return {RATE: 1 / (1 + batch["positions"].astype(jnp.float32))}

    @staticmethod
    def faults(config: TransformerConfig) -> Iterator[str]:
        if MEAN in config.layer_pattern and config.dropout == 0.5:
            yield "model.dropout: half is too much for means"

    @staticmethod
    def tiny(config: Any, sequence_length: int) -> dict[str, Any]:
        return {"init_std": 0.5}

    @staticmethod
    def tensor_parallel_dims(config: Any) -> tuple[str, ...]:
        return ("d_model",)

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        (v,) = project(x_BSD, self.value)
        seen_SS = jnp.tril(jnp.ones((v.shape[1], v.shape[1]), bool))
        ids_BS = info.fields.get("segment_ids")
        if ids_BS is None:
            ids_BS = jnp.zeros(v.shape[:2], jnp.int32)
        seen_BSS = seen_SS[None] & (ids_BS[:, :, None] == ids_BS[:, None, :])
        total = jnp.einsum("bts,bsd->btd", seen_BSS.astype(v.dtype), v)
        return BlockOutput(total * info.fields[RATE][:, :, None])

    def init_cache(self, depth: int, batch_size: int, length: int, dtype: Any) -> Any:
        size = self.value.shape[-1]
        return {"values": jnp.zeros((depth, batch_size, length, 1, size), dtype)}

    def prefill(self, x_BPD: jax.Array, cache: LayerCache, info: BlockInfo):
        (v,) = project(x_BPD, self.value)
        cache = cache.with_prompt({"values": v[:, :, None]})
        return self(x_BPD, info).x, cache

    def decode(self, x_BTD: jax.Array, cache: LayerCache, info: BlockInfo):
        (v,) = project(x_BTD, self.value)
        positions_BT = info.fields["positions"]
        cache = cache.with_tokens({"values": v[:, :, None]}, positions_BT)
        values_BSD = cache.read()["values"][:, :, 0]
        slots = cache.places  # of a cache that devices split
        if slots is None:
            slots = jnp.arange(values_BSD.shape[1])
        seen_BTS = slots[None, None, :] <= positions_BT[:, :, None]
        total = jnp.einsum("bts,bsd->btd", seen_BTS.astype(v.dtype), values_BSD)
        return total * info.fields[RATE][:, :, None], cache


class Borderless(Mean):
    """Gives each token the mean of all tokens so far, of other documents, too."""

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        (v,) = project(x_BSD, self.value)
        return BlockOutput(jnp.cumsum(v, 1) * info.fields[RATE][:, :, None])


class Counting(Mean):
    """Counts the tokens that it sees, and keeps their number."""

    stat_names = (TOKENS,)

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.float32))

    def update(self, stats: Any) -> None:
        self.seen.set_value(self.seen[...] + stats[TOKENS])

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        tokens = jnp.ones(x_BSD.shape[:2], jnp.float32).sum()
        return BlockOutput(super().__call__(x_BSD, info).x, {}, {TOKENS: tokens})


@pytest.fixture(autouse=True)
def _mean_in_the_table(monkeypatch):
    monkeypatch.setitem(MIXERS, MEAN, Mean)


def config_of(**changes: Any) -> TransformerConfig:
    pattern = (MEAN, MEAN, "global")
    return replace(TINY, num_layers=6, layer_pattern=pattern, **changes)


PLAIN = config_of()
# The first layer stands in a stack of its own, and groups start with the second one.
MIXED = config_of(
    num_experts=4,
    first_dense_layers=3,
    feed_forward_pattern=("dense", "sparse", "sparse"),
)
UNEQUAL_FIRST = replace(MIXED, first_dense_layers=2, num_layers=5)
CASES = {"plain": PLAIN, "mixed": MIXED, "unequal": UNEQUAL_FIRST}


def in_order(model: Transformer) -> list[tuple[str, Any]]:
    """Cuts all layers out of the stacks, each with its kind, by their numbers."""
    found: list[Any] = []
    stacks = [model.blocks]
    if layers_before(model):
        stacks.insert(0, model.first_blocks)
    for stack in stacks:
        graph, state = nnx.split(stack)
        for number in range(jax.tree.leaves(state)[0].shape[0]):
            own = jax.tree.map(lambda x, number=number: x[number], state)
            found += layers_of(nnx.merge(graph, own))
    pattern = model.config.layer_pattern
    return [(pattern[n % len(pattern)], layer) for n, layer in enumerate(found)]


def one_by_one(model: Transformer, batch: Any) -> jax.Array:
    """Computes logits from the layers one after another."""
    x = model.embed(batch)
    fields = shared_fields(model, batch)
    for number, (kind, layer) in enumerate(in_order(model)):
        info = BlockInfo(None, jnp.int32(number), fields, kind)
        x = apply_block(layer, x, info).x
    return model.logits(x)


@lru_cache
def forward_of(name: str) -> np.ndarray:
    model, batch = model_of(CASES[name]), batch_for(Case(model=CASES[name]))
    run = jax.jit(lambda batch: model.forward(batch), compiler_options=FAST_COMPILE)
    return np.asarray(run(batch))


def test_the_tables_hold_the_words_of_the_patterns():
    assert set(get_args(MixerKind)) == set(MIXERS) - {MEAN}
    assert set(get_args(ChannelKind)) == set(CHANNELS)


LENGTHS = (7, 9)  # tokens of two documents in a row


def border_error(kind: str) -> float:
    """Computes how much logits of packed documents differ from those of each alone.

    Args:
      kind: mixer of all layers.
    """
    window = 4 if kind == "local" else 0
    model = model_of(replace(TINY, layer_pattern=(kind,), window=window))
    random = np.random.default_rng(5)
    documents = [random.integers(0, TINY.vocab_size, length) for length in LENGTHS]

    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def logits(*packed: jax.Array) -> jax.Array:
        return model.forward(packed_row(packed))[0]

    alone = jnp.concatenate([logits(document) for document in documents])
    assert alone.dtype == jnp.float32
    return worst(logits(*documents), alone)


@pytest.mark.parametrize("kind", [*MIXERS, MEAN])
def test_a_mixer_mixes_no_tokens_of_packed_documents(kind):
    """A mixer in the table heeds `segment_ids`."""
    assert border_error(kind) < 1e-5


def test_a_mixer_that_heeds_no_borders_is_found(monkeypatch):
    monkeypatch.setitem(MIXERS, BORDERLESS, Borderless)
    assert border_error(BORDERLESS) > 0.1


@pytest.mark.parametrize("name", CASES)
def test_scans_give_what_layers_one_after_another_give(name):
    config = CASES[name]
    model, batch = model_of(config), batch_for(Case(model=config))
    kinds = [MEAN, MEAN, "global"] * 2
    for (kind, layer), expected in zip(in_order(model), kinds, strict=False):
        assert kind == expected
        assert type(layer.attention) is MIXERS[kind]
    alone = jax.jit(
        lambda batch: one_by_one(model, batch), compiler_options=FAST_COMPILE
    )
    expected = alone(batch)
    assert worst(forward_of(name), expected) < 1e-5
    # a model with attention alone is another one
    mean = [layer for kind, layer in in_order(model) if kind == MEAN]
    assert all(not hasattr(layer.attention, "query") for layer in mean)


@pytest.mark.parametrize("name", CASES)
def test_cached_logits_are_those_of_the_whole_forward_pass(name):
    config = CASES[name]
    model, tokens = model_of(config), batch_for(Case(model=config))["tokens"][:, :12]
    compiled = {
        step: jax.jit(
            lambda tokens, cache, step=step: getattr(model, step)(tokens, cache),
            compiler_options=FAST_COMPILE,
        )
        for step in ("prefill", "decode")
    }
    whole, cache = compiled["decode"](tokens, model.init_cache(16, 16))
    assert worst(whole, forward_of(name)[:, :12]) < 1e-5
    cache = compiled["prefill"](tokens[:, :10], model.init_cache(16, 16))
    for at in (10, 11):
        logits, cache = compiled["decode"](tokens[:, at : at + 1], cache)
        assert worst(logits[:, 0], forward_of(name)[:, at]) < 1e-5
    np.testing.assert_array_equal(cache.length, 12)


def test_a_mixer_reads_the_places_of_a_cache_that_devices_split():
    model, tokens = model_of(PLAIN), batch_for(Case(model=PLAIN))["tokens"][:, :12]
    rules, mesh = rules_and_mesh(context=2)

    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def decoded(tokens: jax.Array) -> tuple[jax.Array, Any]:
        with execution.activate(mesh, rules, compute="float32"):
            cache = model.prefill(tokens[:, :10], model.init_cache(16, 16))
            return model.decode(tokens[:, 10:], cache)

    logits, cache = decoded(tokens)
    # a device has its half of the prompt, and then its half of the room behind it
    assert cache.places.tolist() == [
        *range(5),
        *range(10, 13),
        *range(5, 10),
        13,
        14,
        15,
    ]
    assert worst(logits, forward_of("plain")[:, 10:12]) < 1e-5


def test_each_part_gets_its_own_stats(monkeypatch):
    monkeypatch.setitem(MIXERS, COUNTING, Counting)
    config = replace(
        config_of(num_experts=4, feed_forward_pattern=("dense", "sparse", "sparse")),
        layer_pattern=(COUNTING, COUNTING, "global"),
    )
    model, batch = model_of(config), batch_for(Case(model=config))
    stats_of = jax.jit(
        lambda batch: model.loss(batch, None).stats, compiler_options=FAST_COMPILE
    )
    stats = stats_of(batch)
    # [groups, layers of a group that give it, ...]
    np.testing.assert_array_equal(stats[TOKENS], np.full((2, 2), 16 * 16))
    assert stats[experts.LOAD].shape == (2, 2, 4)
    metrics = Transformer.stats_metrics(stats)
    assert TOKENS in metrics
    assert metrics[experts.LOAD_METRIC].shape == (6, 4)
    even = jnp.full((2, 2, 4), 128.0)
    uneven = even.at[1, 0].set(jnp.array([512.0, 0, 0, 0]))
    model.update({TOKENS: jnp.array([[3.0, 5.0], [7.0, 9.0]]), experts.LOAD: uneven})
    means = [layer for kind, layer in in_order(model) if kind == COUNTING]
    assert [float(layer.attention.seen[...]) for layer in means] == [3, 5, 7, 9]
    biases = [
        layer.mlp.choice_bias[...]
        for _, layer in in_order(model)
        if hasattr(layer.mlp, "choice_bias")
    ]
    assert [bool(jnp.any(bias)) for bias in biases] == [False, False, True, False]


def test_the_config_asks_the_parts():
    assert PLAIN.tensor_parallel_dims[:1] == ("num_heads",)
    assert "d_model" in PLAIN.tensor_parallel_dims
    assert "d_model" not in TINY.tensor_parallel_dims
    tiny = replace(PLAIN, **PLAIN.tiny(16))
    assert tiny.init_std == 0.5
    assert tiny.layer_pattern == (MEAN, "global")
    assert tiny.num_layers == 4
    found = [text for text in faults(replace(PLAIN, dropout=0.5)) if "means" in text]
    assert found == ["model.dropout: half is too much for means"]
    assert not [text for text in faults(replace(TINY, dropout=0.5)) if "means" in text]


def test_attention_judges_the_heads_of_attention_layers_alone():
    config = replace(
        TINY, layer_pattern=(MEAN,), num_heads=6, num_kv_heads=4, head_dim=3
    )
    assert not [*config.faults()]
    assert not [*replace(config, **config.tiny(32)).faults()]
    with_attention = replace(config, layer_pattern=(MEAN, "global"))
    assert len([*with_attention.faults()]) == 2
    (fault,) = replace(config, window=8).faults()
    assert "has no local layers" in fault


def test_layers_that_leave_a_group_unfilled_are_a_fault():
    (text,) = [
        text for text in faults(replace(PLAIN, num_layers=7)) if "repeats" in text
    ]
    assert text == (
        "model.layer_pattern=mean,mean,global repeats every 3 layers, which do not "
        "divide the 7 layers; set model.num_layers=9"
    )


class Named(FeedForward):
    """A channel that gives a sum of the mixer's name."""

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        return BlockOutput(x_BSD, {}, {TOKENS: jnp.float32(1)})


def test_two_parts_of_a_block_cannot_give_sums_of_one_name():
    block = Block(TINY, Counting, Named, nnx.Rngs(0), layer_pattern=(COUNTING,))
    info = BlockInfo(None, jnp.int32(0), {RATE: jnp.ones((2, 3))})
    with pytest.raises(ConfigError, match=f"both return {TOKENS}; rename one"):
        block(jnp.ones((2, 3, TINY.d_model)), info)


@pytest.mark.slow
def test_a_pipeline_gives_the_losses_of_one_device():
    model = replace(PLAIN, num_layers=12, init_std=0.05)

    def losses(stages: int, **axes: int) -> list[float]:
        spec, batch = spec_of(model), batch_for(Case(model=model, packed=True))
        rules, mesh = rules_and_mesh(pipeline=stages, **axes)
        rules = replace(rules, vocab_over_stages=stages > 1)
        cut = None
        if stages > 1:
            config = PipelineConfig(microbatches=4)
            cut = Staging(config, spec.depth, stages, spec.period, spec.block_layers)
        rate = build_schedule(OPTIMIZER, 10, 8)
        step = StepConfig(staging=cut)
        built = build_train_step(spec, OPTIMIZER, rate, mesh, rules, step)
        placed = jax.device_put(batch, built.batch_shardings(batch))
        state = built.init()
        found = []
        for _ in range(3):
            state, metrics = built.step(state, placed)
            found.append(float(metrics["loss"]))
        return found

    one = losses(1, data=1)
    split = losses(2, fsdp=2)
    assert one[2] < one[0]
    np.testing.assert_allclose(split, one, rtol=1e-6)
