"""The rule table: specs by logical name, faults, the explain table, and what lies
where.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError
from jaxdist.models.lora import LoraConfig, adapted
from jaxdist.models.transformer import Transformer
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import execution, placement, sharding
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig, MeshShape, build_mesh, resolve_mesh
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.models import (
    FAST_COMPILE,
    FSDP,
    MIXED,
    OPTIMIZER,
    TINY,
    Layout,
    batch_of,
    fresh,
    init_of,
    rules_and_mesh,
    run,
    spec_of,
    worst,
)


def rules(zero: int = 3, sequence_parallel: bool = False, **sizes: int) -> Rules:
    return Rules(
        MeshShape(dict.fromkeys(AXES, 1) | sizes, dict.fromkeys(AXES, 1)),
        zero,
        sequence_parallel,
    )


def faults(zero: int = 3, *, model=TINY, **sizes: int) -> str:
    with pytest.raises(ConfigError) as caught:
        placement.place(spec_of(model).named_parameters(), rules(zero, **sizes))
    return str(caught.value)


# --- specs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "dims", "spec"),
    [
        (("d_model", "d_ff"), (4, 32, 48), P(None, "fsdp", "tensor")),
        (("d_ff", "d_model"), (4, 48, 32), P(None, "tensor", "fsdp")),
        (
            ("d_model", "heads", "head_dim"),
            (4, 32, 4, 8),
            P(None, "fsdp", "tensor", None),
        ),
        (
            ("heads", "head_dim", "d_model"),
            (4, 4, 8, 32),
            P(None, "tensor", None, "fsdp"),
        ),
        (("vocab", "d_model"), (64, 32), P("tensor", "fsdp")),
        (("d_model",), (4, 32), P(None, None)),  # a stack of vectors: kept whole
        # a bias is a vector too
        (("heads", "head_dim"), (4, 4, 8), P(None, "tensor", None)),
        # no names: the largest dim that divides
        ((), (3, 40, 64), P(None, None, "fsdp")),
        ((), (7,), P(None)),
    ],
)
def test_stored_specs(names, dims, spec):
    assert rules(fsdp=8, tensor=2).stored(names, dims) == spec


@pytest.mark.parametrize(
    ("zero", "stored", "gradient", "state"),
    [
        (0, False, False, False),
        (1, False, False, True),
        (2, False, True, True),
        (3, True, True, True),
    ],
)
def test_zero_says_what_fsdp_shards(zero, stored, gradient, state):
    table, names, dims = rules(zero, fsdp=4), ("d_model", "d_ff"), (2, 32, 48)
    found = [table.stored, table.gradient, table.state, table.computed]
    split = ["fsdp" in spec(names, dims) for spec in found]
    assert split == [stored, gradient, state, False]


def test_activations_follow_their_names_and_leave_out_what_does_not_divide():
    table = rules(data=2, fsdp=2, tensor=2)
    names = ("batch", "residual", None)
    assert table.activation(names, (8, 16, 32)) == P(("data", "fsdp"), None, None)
    assert table.activation(names, (2, 16, 32)) == P("data", None, None)
    assert table.activation(names, (3, 16, 32)) == P(None, None, None)
    heads = ("batch", "sequence", "heads", None)
    assert table.activation(heads, (8, 16, 4, 8)) == P(
        ("data", "fsdp"), None, "tensor", None
    )
    split = replace(table, sequence_parallel=True).activation(names, (8, 16, 32))
    assert split == P(("data", "fsdp"), "tensor", None)


def test_an_unknown_name_of_an_activation_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="'sequnce'. Did you mean sequence.*batch,"):
        rules(fsdp=2).activation(("batch", "sequnce", None), (4, 8, 16))
    assert rules(fsdp=2).activation(("batch", "head_dim"), (4, 8)) == P("fsdp", None)


def test_shard_does_nothing_outside_a_step_and_constrains_inside():
    x = jnp.ones((8, 4, 2))
    assert execution.shard(x, "batch", "sequence", None) is x
    table, mesh = rules_and_mesh(MIXED)

    @jax.jit
    def inside(x):
        with execution.activate(mesh, table):
            return execution.shard(x, "batch", "sequence", "d_ff")

    assert execution.current() == execution.Execution()
    assert inside(x).sharding.spec == P(("data", "fsdp"), None, "tensor")


def test_more_names_than_dims_is_a_mistake():
    with pytest.raises(ValueError, match="2 logical names"):
        rules(fsdp=2).stored(("d_model", "d_ff"), (4,))


# --- faults ---------------------------------------------------------------------------


def test_a_fault_names_parameter_dim_axis_and_the_nearest_legal_sizes():
    text = faults(tensor=5)
    assert (
        "blocks/mlp/down: dim d_ff=48 is not divisible by mesh.tensor=5; "
        "nearest legal sizes of this dim: 45 or 50; or set mesh.tensor to 1"
        in text.splitlines()
    )
    assert "embedding: dim vocab=64" in text
    assert "output: dim vocab=64" in text


def test_d_model_must_divide_by_fsdp_unless_nothing_is_sharded():
    text = faults(fsdp=3)
    assert "blocks/mlp/up: dim d_model=32 is not divisible by mesh.fsdp=3" in text
    assert "nearest legal sizes of this dim: 30 or 33; or set mesh.fsdp to 1" in text
    assert "norm" not in text  # vectors are kept whole
    assert placement.place(spec_of().named_parameters(), rules(0, fsdp=3))


def test_query_heads_that_tensor_does_not_divide_are_refused():
    text = faults(model=replace(TINY, num_heads=6, num_kv_heads=2), tensor=4)
    assert (
        "query: dim heads=6 is not divisible by mesh.tensor=4; nearest legal sizes of this dim: 4 or 8"
        in text
    )
    assert "kv_heads" not in text  # two are copied, no fault


def test_kv_heads_are_copied_if_tensor_is_a_multiple_and_refused_if_neither_divides():
    few = replace(TINY, num_heads=8, num_kv_heads=2)
    placed = placement.place(spec_of(few).named_parameters(), rules(tensor=4))
    key = next(p for p in placed if p.path == "blocks/attention/key")
    assert key.stored == P(None, None, None, None)
    assert "2 kv heads < tensor 4: copied" in key.why
    assert "2 kv heads < tensor 4: copied" in placement.explain(placed)
    odd = replace(TINY, num_heads=12, num_kv_heads=3)
    text = faults(model=odd, tensor=2)
    assert "key: dim kv_heads=3 is not divisible by mesh.tensor=2" in text
    assert "value: dim kv_heads=3" in text
    assert "query" not in text


def test_building_a_step_raises_all_faults():
    table, mesh = rules_and_mesh(Layout(8, fsdp=4, tensor=2))
    model = spec_of(replace(TINY, d_model=30, d_ff=47))
    with pytest.raises(ConfigError) as caught:
        build_train_step(
            model,
            OPTIMIZER,
            build_schedule(OPTIMIZER, 10, 8),
            mesh,
            table,
            StepConfig(),
        )
    assert "d_model=30" in str(caught.value)
    assert "d_ff=47" in str(caught.value)


# --- the table, and what really lies where --------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_explain_gives_bytes_copies_and_reasons(zero):
    placed = placement.place(spec_of().named_parameters(), rules(zero, data=2, fsdp=4))
    up = next(p for p in placed if p.path == "blocks/mlp/up")
    parts = 4 if zero == 3 else 1
    assert up.shard_bytes == 2 * 32 * 48 * 4 // parts
    assert up.replicated_bytes == up.shard_bytes * 8 - 2 * 32 * 48 * 4
    assert "data 2 replicates" in up.why
    assert (f"zero {zero} keeps parameters whole" in up.why) == (zero < 3)
    table = placement.explain(placed)
    lines = table.splitlines()
    assert len(lines) == len(placed) + 2
    assert "total:" in lines[-1]
    assert (
        f"{sum(p.shard_bytes for p in placed):,} bytes of parameters per device"
        in lines[-1]
    )
    assert "(-,fsdp,-)" in table if zero else "(-,fsdp,-)" not in table


def test_a_parameter_that_cannot_be_split_says_why():
    odd = {"table": (jax.ShapeDtypeStruct((7, 9), jnp.float32), ())}
    (placed,) = placement.place(odd, rules(fsdp=4))
    assert placed.stored == P(None, None)
    assert "no dim divides by fsdp 4" in placed.why


@pytest.mark.parametrize(
    "layout", [MIXED, FSDP._replace(zero=1)], ids=["mixed", "zero1"]
)
def test_the_state_lies_where_the_table_says(layout):
    table, _ = rules_and_mesh(layout)
    state = init_of(layout)()
    placed = {p.path: p for p in placement.place(spec_of().named_parameters(), table)}
    leaves = jax.tree_util.tree_leaves_with_path(state.trainable)
    assert len(leaves) == len(placed)
    assert any("fsdp" in p.state for p in placed.values())
    for path, leaf in leaves:
        expected = placed[jax.tree_util.keystr(path, simple=True, separator="/")]
        shards = leaf.addressable_shards
        assert {shard.data.shape for shard in shards} == {expected.shard_dims}
        held = sum(shard.data.nbytes for shard in shards)
        assert held == leaf.nbytes + expected.replicated_bytes
    moments = jax.tree_util.tree_leaves_with_path(state.opt_state)
    found = 0
    for path, leaf in moments:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        owner = next((p for p in placed.values() if name.endswith("u/" + p.path)), None)
        if owner is not None:
            assert leaf.sharding.is_equivalent_to(
                jax.sharding.NamedSharding(leaf.sharding.mesh, owner.state), leaf.ndim
            )
            found += 1
    assert found == 2 * len(placed)  # mu and nu


def test_init_does_not_depend_on_the_mesh():
    one, other = init_of()().trainable, init_of(MIXED)().trainable
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other)
    )


class Foreign(nnx.Module):
    """A model with flax's own annotations, and a parameter with none."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("d_model", "d_ff"))
        self.annotated = nnx.Linear(16, 24, kernel_init=init, use_bias=False, rngs=rngs)
        self.plain = nnx.Linear(24, 40, rngs=rngs)


def test_annotations_of_flax_are_read_and_the_rest_gets_a_default():
    spec = describe(Foreign)
    named = spec.named_parameters()
    assert named["annotated/kernel"][1] == ("d_model", "d_ff")
    assert named["plain/kernel"][1] == ()
    placed = {p.path: p.stored for p in placement.place(named, rules(fsdp=4, tensor=2))}
    assert placed["annotated/kernel"] == P("fsdp", "tensor")
    assert placed["plain/kernel"] == P(None, "fsdp")
    assert placed["plain/bias"] == P(None)


# --- rules: one source of names, for what is stored and for the ops -------------------

RENAMED = {
    "up": (("mlp/up$", "layers d_model None"),),
    "mlp": (
        ("mlp/(gate|up)$", "layers None d_model"),
        ("mlp/down$", "layers None None"),
    ),
    "heads": (("attention/(query|key|value)$", "None d_model None None"),),
    "tables": (("^embedding$", "None d_model"), ("^output$", "d_model None")),
}


def names_that_ops_see(spec):
    flat = nnx.to_flat_state(nnx.state(spec.abstract_model, nnx.Param))
    return {
        "/".join(map(str, path)): getattr(variable, "logical", ())
        for path, variable in flat
    }


def names_stored(spec):
    return {path: names for path, (_, names) in spec.named_parameters().items()}


def ruled(which, layout=Layout(4, data=2, tensor=2)):  # noqa: B008 (immutable)
    """Returns the spec under rules, once it is sure that they change what is stored."""
    rules = sum(RENAMED.values(), ()) if which == "all" else RENAMED[which]
    spec = describe(lambda rngs: Transformer(TINY, rngs=rngs), rules=rules)
    table, _ = rules_and_mesh(layout)
    before, after = (
        {p.path: p.stored for p in placement.place(s.named_parameters(), table)}
        for s in (spec_of(), spec)
    )
    assert before != after
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    ["all", *(pytest.param(one, marks=pytest.mark.slow) for one in RENAMED)],
)
def test_a_rule_renames_for_the_op_what_it_renames_for_storage(which, monkeypatch):
    layout, asked = Layout(4, data=2, tensor=2), set()
    spec = ruled(which, layout)
    assert names_that_ops_see(spec) == names_stored(spec)

    def spy(plain, x, names, *others):
        if len(names) == x.ndim > 1:  # an op's: of one layer's kernel or of a table
            asked.add((names, x.shape))
        return plain(x, names, *others)

    monkeypatch.setattr(execution, "gather", partial(spy, execution.gather))
    monkeypatch.setattr(execution, "scatter", partial(spy, execution.scatter))
    table, mesh = rules_and_mesh(layout)
    built = build_train_step(
        spec, OPTIMIZER, build_schedule(OPTIMIZER, 1000, 8), mesh, table, StepConfig()
    )
    state, batch = (
        fresh(built),
        jax.device_put(batch_of(), built.batch_shardings(batch_of())),
    )
    program = built.inspect.lower(state, batch)
    own = {
        (names, x.shape[-len(names) :]) for x, names in spec.named_parameters().values()
    }
    assert asked == {(names, dims) for names, dims in own if len(dims) > 1}
    _, metrics, gradients = jax.device_get(program.compile(FAST_COMPILE)(state, batch))
    one = run()
    assert metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-6)
    assert worst(gradients, one.gradients) < 1e-5


@pytest.mark.parametrize(
    "which",
    ["all", *(pytest.param(one, marks=pytest.mark.slow) for one in ("up", "tables"))],
)
def test_rules_hold_in_a_pipeline(which):
    spec, sizes = ruled(which), MeshConfig(pipeline=2, tensor=2, data=2)
    cut = Staging(PipelineConfig(microbatches=2), spec.depth, 2)
    table = sharding.build_rules(sizes, resolve_mesh(sizes, 8))
    schedule = build_schedule(OPTIMIZER, 1000, 8)
    built = build_train_step(
        spec, OPTIMIZER, schedule, build_mesh(sizes), table, StepConfig(staging=cut)
    )
    state, batch = (
        fresh(built),
        jax.device_put(batch_of(), built.batch_shardings(batch_of())),
    )
    inspect = built.inspect.lower(state, batch).compile(FAST_COMPILE)
    _, metrics, gradients = jax.device_get(inspect(state, batch))
    one = run()
    assert metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-6)
    assert worst(cut.flat(gradients), one.gradients) < 1e-5


def test_adapters_and_annotations_of_flax_take_their_names_from_the_same_rules():
    build = adapted(lambda rngs: Transformer(TINY, rngs=rngs), LoraConfig(rank=2))
    spec = describe(build, rules=(("mlp/up/(base|lora_b)$", "layers None None"),))
    assert names_that_ops_see(spec) == names_stored(spec)
    up = spec.abstract_model.blocks.mlp.up
    assert up.logical == up.base.logical == up.lora_b.logical == (None, None)
    assert spec.abstract_model.blocks.mlp.gate.logical == ("d_model", "d_ff")
    for rule in ((), (("annotated", "d_ff d_model"), ("plain/kernel", "None d_ff"))):
        spec = describe(Foreign, rules=rule)
        assert names_that_ops_see(spec) == names_stored(spec)


def test_a_stack_dim_has_no_other_name():
    with pytest.raises(
        ConfigError,
        match="a stack dim of blocks/mlp/up .* the name d_ff; call it layers",
    ):
        describe(
            lambda rngs: Transformer(TINY, rngs=rngs),
            rules=(("mlp/up$", "d_ff d_model None"),),
        )


def test_nothing_is_allocated_to_describe_a_model():
    huge = replace(TINY, num_layers=100, d_model=2**14, d_ff=2**16, vocab_size=2**17)
    spec = describe(lambda rngs: Transformer(huge, rngs=rngs))
    assert spec.parameter_count > 3e11
    assert math.prod(jax.tree.leaves(spec.trainable)[0].shape) > 0
