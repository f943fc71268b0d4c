"""Adapters of experts: an A and a B for each, added to its frozen kernel in the shards
that it lies in.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import ConfigError, trees
from jaxdist.models import layers, lora
from jaxdist.models.experts import WEIGHTS
from jaxdist.models.lora import LoraConfig, LoraKernel
from jaxdist.models.transformer import Transformer
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.protocols.model import BlockInfo
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, TINY, batch_of, worst

E, D, F, RANK, SCALE = 8, 64, 48, 3, 2.0
MOE = replace(
    TINY,
    d_model=D,
    num_kv_heads=2,
    num_experts=E,
    expert_d_ff=F,
    balance="none",
    init_std=0.05,
)
LORA = LoraConfig(
    rank=RANK, alpha=SCALE * RANK, targets=("mlp/(gate|up|down)", "query")
)
NAMES = ("gate", "up", "down")
SGD = OptimizerConfig(
    name="sgd", learning_rate=0.1, warmup_steps=0, momentum=0.0, weight_decay=0.0
)


@lru_cache
def spec_with(config: LoraConfig = LORA) -> ModelSpec:
    return describe(lora.adapted(lambda rngs: Transformer(MOE, rngs=rngs), config))


@lru_cache
def start(config: LoraConfig = LORA):
    """Returns trainable and frozen parameters on the host, with B not 0: then A has
    gradients too.
    """
    trainable, _, frozen = jax.jit(
        spec_with(config).init_params, compiler_options=FAST_COMPILE
    )(jax.random.key(0))
    random = np.random.default_rng(1)

    def filled(path, x):
        return (
            random.normal(0, 0.1, x.shape).astype(x.dtype)
            if trees.join(path).endswith("_b")
            else x
        )

    return jax.device_get((jax.tree_util.tree_map_with_path(filled, trainable), frozen))


def part_with(config: LoraConfig = LORA):
    """Returns the feed-forward part of the first layer."""
    trainable, frozen = start(config)
    graph, state = nnx.split(spec_with(config).assemble(trainable, {}, frozen).blocks)
    return nnx.merge(graph, jax.tree.map(lambda x: x[0], state)).mlp


def dense(part, kernels, x):
    """Returns what all experts on all tokens give, weighted by the router's choice."""
    scores = jax.nn.softmax(x @ part.router[...])
    chosen = jax.nn.one_hot(jax.lax.top_k(scores, MOE.experts_per_token)[1], E).sum(-2)
    weights = scores * chosen / (scores * chosen).sum(-1, keepdims=True)
    gate, up = (jnp.einsum("bsd,edf->bsef", x, kernels[name]) for name in NAMES[:2])
    hidden = layers.ACTIVATIONS[MOE.activation](gate) * up
    return jnp.einsum("bsef,efd,bse->bsd", hidden, kernels["down"], weights)


def test_gradients_are_those_of_all_experts_with_their_kernels_written_out():
    part = part_with()
    x = np.random.default_rng(5).normal(size=(4, 12, D)).astype(np.float32)
    info = BlockInfo(None, jnp.int32(0), {WEIGHTS: np.ones((4, 12), np.float32)})
    factors = {
        n: (getattr(part, n).lora_a[...], getattr(part, n).lora_b[...]) for n in NAMES
    }
    assert factors["up"][0].shape == (E, D, RANK)
    assert factors["down"][1].shape == (
        E,
        RANK,
        D,
    )

    graph, state = nnx.split(part)

    def ours(factors, x):
        own = nnx.merge(graph, jax.tree.map(jnp.asarray, state), copy=True)
        for name, (a, b) in factors.items():
            getattr(own, name).lora_a.set_value(a)
            getattr(own, name).lora_b.set_value(b)
        return jnp.sum(own(x, info).x ** 2)

    def reference(factors, x):
        kernels = {
            name: getattr(part, name).base[...]
            + SCALE * jnp.einsum("edr,erf->edf", a, b)
            for name, (a, b) in factors.items()
        }
        return jnp.sum(dense(part, kernels, x) ** 2)

    (value, own), (expected, wanted) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)), compiler_options=FAST_COMPILE)(
            factors, x
        )
        for f in (ours, reference)
    )
    assert abs(value - expected) < 1e-6 * abs(expected)
    assert worst(own, wanted) < 2e-6
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted))


def test_at_first_nothing_changes_and_frozen_kernels_have_no_state():
    spec, plain = spec_with(), describe(lambda rngs: Transformer(MOE, rngs=rngs))
    trainable, _, frozen = spec.init_params(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, batch_of(MOE))
    losses = [
        jax.jit(
            lambda t, f, s=s: s.assemble(t, {}, f).loss(batch, None).sum,
            compiler_options=FAST_COMPILE,
        )(t, f)
        for s, t, f in (
            (spec, trainable, frozen),
            (plain, plain.init_params(jax.random.key(0))[0], {}),
        )
    ]
    assert losses[0] == losses[1]
    assert set(spec.named_trainable()) == {
        f"blocks/{kernel}/lora_{x}"
        for kernel in ("attention/query", *(f"mlp/{n}" for n in NAMES))
        for x in "ab"
    }
    assert spec.named_frozen()["blocks/mlp/gate/base"][1] == (
        "experts",
        "d_model",
        "d_ff",
    )
    a, b = (spec.named_trainable()[f"blocks/mlp/down/lora_{x}"] for x in "ab")
    assert a[0].shape == (2, E, F, RANK)
    assert a[1] == ("experts", "d_ff", None)
    assert b[0].shape == (2, E, RANK, D)
    assert b[1] == ("experts", None, "d_model")
    rules, mesh = rules_and_mesh(data=1)
    built = build_train_step(
        spec, OptimizerConfig(), build_schedule(SGD, 10, 8), mesh, rules, StepConfig()
    )
    moments = [x for x in jax.tree.leaves(built.abstract_state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * spec.trainable_count


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_quantised_base_is_restored_and_added_to(base):
    pytest.importorskip("qwix", reason="extra lora")
    config = replace(LORA, base=base)
    part, frozen = part_with(config), start(config)[1]
    plain = {name: start()[1]["blocks"]["mlp"][name]["base"][0] for name in NAMES}
    for name in NAMES:
        kernel: LoraKernel = getattr(part, name)
        codes = spec_with(config).named_frozen()[f"blocks/mlp/{name}/codes"]
        scales = spec_with(config).named_frozen()[f"blocks/mlp/{name}/scales"]
        assert codes[0].dtype.itemsize == 1
        assert codes[1][0] == scales[1][0] == "experts"
        assert len(codes[1]) == codes[0].ndim - 1
        assert len(scales[1]) == scales[0].ndim - 1
        weights = codes[0].size * (2 if base == "nf4" else 1)
        assert weights == 2 * E * D * F
        low_rank = np.einsum("edr,erf->edf", kernel.lora_a[...], kernel.lora_b[...])
        restored = np.asarray(kernel[...]) - SCALE * low_rank
        assert 0 < worst(restored, plain[name]) < (0.01 if base == "int8" else 0.15)
    assert trees.tree_bytes(frozen["blocks"]["mlp"]) < 0.4 * 4 * 2 * 3 * E * D * F


def test_merged_experts_go_out_as_kernels():
    spec, (trained, frozen) = spec_with(), start()
    arrays = trees.flatten_names(trained) | trees.flatten_names(frozen)
    shapes, read = lora.unadapted(
        spec.abstract_model, {n: x.shape for n, x in arrays.items()}, arrays.get
    )
    assert shapes["blocks/mlp/up"] == (2, E, D, F)
    assert not [path for path in shapes if "lora" in path]
    base, a, b = (
        arrays[f"blocks/mlp/up/{part}"] for part in ("base", "lora_a", "lora_b")
    )
    assert (
        worst(read("blocks/mlp/up"), base + SCALE * np.einsum("ledr,lerf->ledf", a, b))
        < 1e-6
    )


def test_layers_before_and_between_have_adapters_too():
    model = replace(
        MOE,
        num_layers=3,
        first_dense_layers=1,
        feed_forward_pattern=("dense", "sparse"),
    )
    config = replace(LORA, targets=("mlp/up", "query"))
    spec = describe(lora.adapted(lambda rngs: Transformer(model, rngs=rngs), config))
    dims = {
        path: x.shape
        for path, (x, _) in spec.named_trainable().items()
        if path.endswith("up/lora_a")
    }
    stacks = ("first_blocks", "blocks/layer_0", "blocks/layer_1")
    assert dims == dict(
        zip(
            (f"{s}/mlp/up/lora_a" for s in stacks),
            [(1, D, RANK)] * 2 + [(1, E, D, RANK)],
            strict=True,
        )
    )
    # in stacks, so the same on every layout
    dropping = replace(LORA, targets=("query",), dropout=0.1)
    assert describe(
        lora.adapted(lambda rngs: Transformer(model, rngs=rngs), dropping)
    ).trainable_count


def test_what_cannot_be_is_said():
    def build(rngs):
        return Transformer(MOE, rngs=rngs)

    with pytest.raises(
        ConfigError,
        match="is of experts.*set lora.dropout=0, or name other lora.targets",
    ):
        describe(lora.adapted(build, replace(LORA, dropout=0.1)))
    other = describe(
        lora.adapted(build, replace(LORA, dropout=0.1, targets=("query", "router")))
    )
    assert {"blocks/mlp/gate", "blocks/mlp/router/base"} <= other.named_frozen().keys()


@lru_cache
def one_step(base: str, **sizes: int):
    """Returns the metrics, mean gradients and parameters of a step from `start`, and
    the program's text.
    """
    config = replace(LORA, base=base)
    rules, mesh = rules_and_mesh(**sizes)
    step = StepConfig(remat="dots")
    built = build_train_step(
        spec_with(config), SGD, build_schedule(SGD, 10, 8), mesh, rules, step
    )
    abstract = built.views.abstract
    given = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        start(config),
        tuple(abstract[1:3]),
    )
    given = trees.flatten_names(given[0]) | trees.flatten_names(given[1])
    state = built.init.lower(given).compile(FAST_COMPILE)(given)
    batch = jax.device_put(batch_of(MOE), built.batch_shardings(batch_of(MOE)))
    inspect = built.inspect.lower(state, batch).compile(FAST_COMPILE)
    after, metrics, gradients = inspect(state, batch)
    return *jax.device_get((metrics, gradients, after.trainable)), inspect.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("base", ["none", "int8", "nf4"])
def test_devices_that_share_out_experts_have_the_numbers_of_one(base):
    if base != "none":
        pytest.importorskip("qwix", reason="extra lora")
    one, other = one_step(base, data=1), one_step(base, fsdp=2, expert=2, tensor=2)
    assert other[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
    assert worst(other[1], one[1]) < 2e-6
    assert worst(other[2], one[2]) < 2e-6
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one[1]))
    # No device ever has the kernels of all experts, nor those of its own in all their
    # parts but d_model.
    for dims in (
        f"{E},{D},{F}",
        f"{E},{F},{D}",
        f"{E // 2},{D},{F}",
        f"{E // 2},{F},{D}",
    ):
        assert f"[{dims}]" not in other[3]
        assert f"[2,{dims}]" not in other[3]
    assert f"[{E},{D},{F}]" in one[3]
