"""Stacks of unequal layers: first dense ones, and patterns of dense and sparse ones,
scanned.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config.schema import faults
from jaxdist.models import experts
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.optim.roles import role_of
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.protocols.model import BlockInfo, apply_block, layers_of, shared_fields
from jaxdist.telemetry.flops import jaxpr_flops
from support.models import FAST_COMPILE, TINY, model_of, spec_of, worst
from support.pipelines import Case, batch_for

E = 8
MOE = replace(
    TINY, num_kv_heads=2, num_experts=E, expert_d_ff=24, router_z_loss=1e-2, dropout=0.1
)
# Both keys, and two kinds of attention, whose pattern starts before the groups do.
BOTH = replace(
    MOE,
    num_layers=5,
    first_dense_layers=1,
    feed_forward_pattern=("dense", "sparse"),
    layer_pattern=("local", "global"),
    window=4,
    balance="sequence",
    balance_weight=0.5,
)
PATTERN = replace(MOE, num_layers=6, feed_forward_pattern=("sparse", "dense", "sparse"))
FIRST = replace(
    MOE, num_layers=4, first_dense_layers=2, layer_pattern=("local", "global"), window=4
)
VARIANTS = {"both": BOTH, "pattern": PATTERN, "first": FIRST}


def in_order(model: Transformer) -> list:
    """Returns all layers of a model by their numbers, cut out of its stacks."""
    layers = []
    for stack in [getattr(model, "first_blocks", None), model.blocks]:
        graph, state = nnx.split(stack)
        for number in range(jax.tree.leaves(state)[0].shape[0] if stack else 0):
            block = nnx.merge(
                graph, jax.tree.map(lambda x, number=number: x[number], state)
            )
            layers += layers_of(block)
    return layers


def unrolled(model: Transformer, batch, key):
    """Returns the loss, aux terms and loads of the layers one after another."""
    c, x, fields = model.config, model.embed(batch), shared_fields(model, batch)
    layers, total, loads = in_order(model), {}, []
    assert len(layers) == c.num_layers
    for number, layer in enumerate(layers):
        kind = c.layer_pattern[number % len(c.layer_pattern)]
        x, aux, stats = apply_block(
            layer, x, BlockInfo(key, jnp.int32(number), fields, kind)
        )
        total |= {name: total.get(name, 0) + term for name, term in aux.items()}
        loads += [(number, stats[experts.LOAD])] if stats else []
    loss = model.head(x, batch)
    return loss.sum + sum(total.values()), loads


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["both", pytest.param("pattern", marks=pytest.mark.slow)]
)
def test_scans_give_what_layers_one_after_another_give(name):
    config = VARIANTS[name]
    model, batch = model_of(config), batch_for(Case(model=config, packed=True))
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    key = jax.random.key(3)

    def scanned(parameters):
        loss = nnx.merge(graph, parameters, rest).loss(batch, key)
        return loss.sum + sum(loss.aux.values()), loss.stats

    def one_by_one(parameters):
        value, loads = unrolled(nnx.merge(graph, parameters, rest), batch, key)
        return value, loads

    (value, stats), gradients = jax.jit(
        jax.value_and_grad(scanned, has_aux=True), compiler_options=FAST_COMPILE
    )(parameters)
    (expected, loads), wanted = jax.jit(
        jax.value_and_grad(one_by_one, has_aux=True), compiler_options=FAST_COMPILE
    )(parameters)
    assert abs(value - expected) < 1e-6 * abs(expected)
    assert worst(gradients, wanted) < 2e-6
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted))
    # a row of stats for each
    assert tuple(number for number, _ in loads) == config.sparse_layers
    np.testing.assert_array_equal(
        stats[experts.LOAD].reshape(-1, E), [load for _, load in loads]
    )
    figures = Transformer.stats_metrics(stats)
    assert figures["load_entropy"].shape == (len(loads),)
    of_all = np.zeros((config.num_layers, E))
    of_all[list(config.sparse_layers)] = [load for _, load in loads]
    np.testing.assert_array_equal(figures["expert_load"], of_all)
    assert figures["fullest_layer"] == of_all.max(-1).argmax()


def test_each_sparse_layer_of_a_group_moves_its_own_bias():
    model = model_of(replace(PATTERN, dropout=0.0))
    load = np.full((2, 2, E), 4, np.float32)
    # of the second group its first sparse layer: number 3
    load[1, 0] = [8, 0, *[4] * 6]
    model.update({experts.LOAD: load, experts.DROPS: load[..., 0]})
    biases = [
        layer.mlp.choice_bias[...]
        for layer in in_order(model)
        if hasattr(layer.mlp, "choice_bias")
    ]
    assert [bool(np.any(bias)) for bias in biases] == [False, False, True, False]
    assert PATTERN.sparse_layers == (0, 2, 3, 5)


def test_cached_logits_are_those_of_the_whole_forward_pass():
    model, batch = model_of(BOTH), batch_for(Case(model=BOTH))
    forward = nnx.jit(lambda model, batch: model.forward(batch))(model, batch)
    cache = model.init_cache(16, 16)
    decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    parts = []
    for part in np.split(batch["tokens"][:, :12], [9, 10, 11], 1):
        logits, cache = decode(model, jnp.asarray(part), cache)
        parts.append(logits)
    depths = {
        name: [layer.keys.shape[0] for layer in layers]
        for name, layers in cache.stacks.items()
    }
    assert depths == {"first_blocks": [1], "blocks": [2, 2]}
    assert worst(np.concatenate(parts, 1), forward[:, :12]) < 1e-5


def test_a_program_does_not_grow_with_the_depth():
    def lines(config: TransformerConfig) -> int:
        spec, batch = spec_of(config), batch_for(Case(model=config))

        def loss(trainable, state):
            return spec.assemble(trainable, state).loss(batch, None).sum

        lowered = jax.jit(jax.grad(loss)).lower(spec.trainable, spec.model_state)
        return len(lowered.as_text().splitlines())

    model, deeper = (
        replace(BOTH, num_layers=a, first_dense_layers=b) for a, b in ((11, 5), (23, 9))
    )
    assert not faults(deeper)
    assert lines(deeper) == lines(model)


def test_names_and_roles():
    plain = spec_of(replace(MOE, num_layers=4)).named_parameters()
    first = spec_of(FIRST).named_parameters()
    assert {path for path in first if not path.startswith("first_blocks/")} == set(
        plain
    )
    assert first["blocks/mlp/up"][0].shape == (2, E, 32, 24)
    assert first["first_blocks/mlp/up"] == (
        jax.ShapeDtypeStruct((2, 32, 48), np.float32),
        ("d_model", "d_ff"),
    )
    groups = spec_of(PATTERN).named_parameters()
    for path, dims in {
        "layer_0/mlp/up": (2, E, 32, 24),
        "layer_1/mlp/up": (2, 32, 48),
    }.items():
        x, names = groups[f"blocks/{path}"]
        role = role_of(("blocks", *path.split("/")), x.shape, names)
        assert x.shape == dims
        assert (role.kind, role.dims, role.reduction) == (
            "matrix",
            2,
            (-2,),
        )
    assert spec_of(PATTERN).depth == 2
    assert spec_of(PATTERN).block_layers == 3
    assert spec_of(FIRST).depth == 2
    assert spec_of(FIRST).block_layers == 1


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_are_those_of_each_layers_own_part(name):
    config = replace(VARIANTS[name], loss_chunk=0, layer_pattern=("global",), window=0)
    sparse = len(config.sparse_layers)
    dense_part, experts_part = 3 * 32 * 48, 3 * 32 * 2 * 24 + 32 * E
    all_dense = replace(TINY, num_kv_heads=2, num_layers=config.num_layers)
    difference = config.flops_per_token(16, "full") - all_dense.flops_per_token(
        16, "full"
    )
    assert difference == 6 * sparse * (experts_part - dense_part)
    model, batch = model_of(config), batch_for(Case(model=config))
    traced = (
        3
        * jaxpr_flops(jax.make_jaxpr(lambda: model.loss(batch, None).sum)())
        / batch["tokens"].size
    )
    # Blocks of rows are padded, at these sizes by up to as much again.
    assert traced < config.flops_per_token(16, "full") + 6 * sparse * experts_part


@pytest.mark.parametrize("name", VARIANTS)
def test_a_tiny_variant_keeps_the_stacks(name):
    large = replace(
        VARIANTS[name],
        d_model=4096,
        num_layers=60 + VARIANTS[name].first_dense_layers,
        num_experts=64,
    )
    tiny = replace(large, **large.tiny(32))
    assert not faults(large)
    assert not faults(tiny)
    assert bool(tiny.first_dense_layers) == bool(large.first_dense_layers)
    assert set(tiny.feed_forward_pattern) == set(large.feed_forward_pattern)
    assert set(tiny.layer_pattern) == set(large.layer_pattern)
    assert tiny.num_layers == tiny.layers_on(2) <= 5


DENSE = {"num_experts": 0, "expert_d_ff": 0, "router_z_loss": 0.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            DENSE | {"first_dense_layers": 1},
            "model.first_dense_layers=1 needs experts, and model.num_experts=0 is a dense model",
        ),
        (
            DENSE | {"feed_forward_pattern": ("sparse", "dense")},
            "model.feed_forward_pattern=('sparse', 'dense') needs experts",
        ),
        (
            {"first_dense_layers": 4},
            "leaves no layer with experts; set it to at most 3",
        ),
        (
            {"feed_forward_pattern": ("dense",)},
            "model.feed_forward_pattern=dense has no layer with experts",
        ),
        (
            {"feed_forward_pattern": ("dense", "sparse", "sparse")},
            "repeats every 3 layers, which do not divide the 4 layers; set model.num_layers=6",
        ),
        (
            {"feed_forward_pattern": ("dense", "sparse"), "first_dense_layers": 1},
            "repeats every 2 layers, which do not divide the 3 layers after model.first_dense_layers=1; "
            "set model.num_layers=5",
        ),
        (
            {
                "feed_forward_pattern": ("dense", "sparse"),
                "layer_pattern": ("global",) * 3,
            },
            "model.feed_forward_pattern=dense,sparse with model.layer_pattern repeats every 6 layers",
        ),
        ({"feed_forward_pattern": ("sparse", "other")}, "model.feed_forward_pattern"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(changes, said):
    base = replace(MOE, num_layers=4)
    assert not faults(base)
    (fault,) = faults(replace(base, **changes), "model.")
    assert said in fault
    assert "\n" not in fault


def test_a_pipeline_has_a_group_a_place_or_says_so():
    spec = spec_of(PATTERN)
    two = Staging(PipelineConfig(), spec.depth, 2, spec.period, spec.block_layers)
    assert not list(two.faults())
    (fault,) = replace(two, stages=4).faults()
    assert (
        "4 places for 2 groups of 3 layers that repeat; lower one of them to at most one place a group"
        in fault
    )
