"""Any flax module trains: its own state, random streams, frozen parts, groups; or it is
refused, with why.
"""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.checkpoint.state_dict import to_canonical
from jaxdist.config import ConfigError, files, schema, trees
from jaxdist.models import registry
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import placement, sharding
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.protocols.model import as_loss
from jaxdist.protocols.model_spec import describe
from jaxdist.step.gradients import build_objective
from jaxdist.step.model_checks import check_model
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from jaxdist.trainer import run_config, validation
from jaxdist.verification import runner
from support import plain_flax_models
from support.models import (
    FAST_COMPILE,
    MIXED,
    ONE,
    Layout,
    batch_of,
    bitwise_equal,
    rules_and_mesh,
    worst,
)
from support.paths import DOCS
from support.plain_flax_models import Counting, Layer, Plain, Staged

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
PLAIN, COUNTING, STAGED = (
    f"{plain_flax_models.__name__}:{name}" for name in ("Plain", "Counting", "Staged")
)
SGD = OptimizerConfig(
    name="sgd",
    learning_rate=0.1,
    warmup_steps=0,
    schedule="constant",
    momentum=0.0,
    weight_decay=0.2,
    clip_norm=0.0,
)
ADAM = OptimizerConfig(learning_rate=0.01, warmup_steps=0, schedule="constant")
BATCH = batch_of()
PARTS = StepConfig(accumulation=4)


def build_of(model, **options):
    return registry.build_function(model, options)


def built_of(spec, layout=ONE, config=None, optimizer=ADAM):
    """Returns the built step of a spec."""
    rules, mesh = rules_and_mesh(layout)
    schedule = (
        build_schedule(optimizer, 10, 8)
        if isinstance(optimizer, OptimizerConfig)
        else None
    )
    return build_train_step(
        spec, optimizer, schedule, mesh, rules, config or StepConfig()
    )


def fast(program, *inputs):
    """Returns the jitted program compiled for these arguments."""
    return program.lower(*inputs).compile(FAST_COMPILE)


def steps(built, count=1, batch=BATCH):
    """Returns (state, metrics, gradients) after each step from a fresh state."""
    with jax.numpy_rank_promotion("allow"):
        state, placed, found = (
            built.init(),
            jax.device_put(batch, built.batch_shardings(batch)),
            [],
        )
        inspect = fast(built.inspect, state, placed)
        for _ in range(count):
            state, metrics, gradients = inspect(state, placed)
            found.append(jax.device_get((built.views.flat(state), metrics, gradients)))
    return found


@lru_cache
def dropping(layout=ONE):
    """Returns two steps of the plain model with dropout."""
    return steps(built_of(describe(build_of(Plain, rate=0.3)), layout), 2)


# --- state and random streams ---------------------------------------------------------


def test_the_plain_model_is_what_the_tests_need():
    spec = describe(build_of(Plain, rate=0.3))
    assert set(trees.flatten_names(spec.model_state)) == {
        "norm/mean",
        "norm/var",
        "slopes",
    }
    assert set(trees.flatten_names(spec.streams)) == {
        "drop/rngs/count",
        "drop/rngs/key",
    }
    assert set(trees.flatten_names(spec.frozen)) == {"table"}
    assert not spec.staged
    assert spec.frozen_count == 1024
    assert spec.parameter_count == spec.trainable_count + 1024
    assert "1,024 frozen" in spec.counts
    source = open(plain_flax_models.__file__).read()
    assert "import jaxdist" not in source
    assert "from jaxdist" not in source


def test_batch_statistics_and_dropout_on_a_mesh_are_those_of_one_device():
    one, mesh = dropping(), dropping(MIXED)
    for (state, metrics, gradients), (other, theirs, grads) in zip(
        one, mesh, strict=True
    ):
        assert theirs["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
        assert worst(grads, gradients) < 1e-5
        assert worst(other.model_state, state.model_state) < 1e-6
        assert bitwise_equal(other.frozen, state.frozen)
    assert worst(one[1][0].model_state["norm"], one[0][0].model_state["norm"]) > 1e-3
    assert bitwise_equal(
        one[0][0].model_state["slopes"], np.asarray(jnp.linspace(0.5, 1.0, 32))
    )


def test_batch_statistics_are_those_of_plain_flax():
    spec = describe(build_of(Plain))
    found, built = (
        steps(built_of(spec, optimizer=SGD), 2),
        built_of(spec, optimizer=SGD),
    )
    start = jax.device_get(built.init())
    model = Plain(rngs=nnx.Rngs(0))
    nnx.update(model, nnx.State(start.trainable | {"table": start.frozen["table"]}))
    model.train()
    trained = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("table")))
    decayed = {p for p in trees.flatten_names(start.trainable) if p.endswith("kernel")}
    with jax.numpy_rank_promotion("allow"):
        for state, metrics, _ in found:
            loss, gradients = nnx.value_and_grad(
                lambda m: m.loss(BATCH, None), argnums=nnx.DiffState(0, trained)
            )(model)
            assert metrics["loss"] == pytest.approx(float(loss), rel=1e-6)
            flat = trees.flatten_names(nnx.to_pure_dict(gradients))
            held = trees.flatten_names(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
            full = {p: g + 0.2 * held[p] * (p in decayed) for p, g in flat.items()}
            nnx.update(
                model,
                nnx.State(
                    _like(start.trainable, {p: held[p] - 0.1 * full[p] for p in full})
                ),
            )
            for name in ("mean", "var"):
                mine, theirs = (
                    state.model_state["norm"][name],
                    getattr(model.norm, name)[...],
                )
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
        model.eval()
        total, count, _ = built.evaluate(
            built.init()._replace(**_weights(state)), BATCH
        )
        assert float(total / count) == pytest.approx(
            float(model.loss(BATCH, None)), rel=1e-5
        )
    assert abs(state.model_state["norm"]["var"] - 1).max() > 0.01


def _like(tree, flat):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: flat[trees.join(path)], tree
    )


def _weights(state):
    return {
        name: jax.device_put(getattr(state, name))
        for name in ("trainable", "model_state", "frozen")
    }


def test_random_streams_differ_by_step_and_part_and_are_not_stored():
    spec = describe(build_of(Plain, rate=0.3))
    masks = []
    for key, sample in ((0, 0), (0, 1), (1, 0), (0, 0)):
        own = jax.random.fold_in(jax.random.key(key), sample)
        model = spec.assemble(*spec.init_params(jax.random.key(5)), key=own)
        masks.append(np.asarray(model.drop(jnp.ones((4, 32))) == 0))
    assert 0.1 < masks[0].mean() < 0.5
    assert (masks[0] == masks[3]).all()
    assert not (masks[0] == masks[1]).all()
    assert not (masks[0] == masks[2]).all()
    model = spec.assemble(*spec.init_params(jax.random.key(5)))
    assert not (model.drop(jnp.ones((4, 32))) == 0).any()
    assert model.norm.use_running_average
    names = to_canonical(dropping()[0][0])
    assert {"model_state/norm/mean", "frozen/table"} < set(names)
    assert not [n for n in names if "drop" in n]


def test_resume_is_bitwise_with_batch_statistics_and_random_streams(tmp_path):
    built = built_of(describe(build_of(Plain, rate=0.3)), MIXED)
    placed = jax.device_put(BATCH, built.batch_shardings(BATCH))
    with jax.numpy_rank_promotion("allow"):
        first = built.init()
        step = fast(built.step, first, placed)
        first, _ = step(first, placed)
        with CheckpointManager(tmp_path, CheckpointConfig()) as store:
            store.save(1, first, {}, wait=True)
            store.wait()
            second, metrics = step(first, placed)
            restored = store.restore(built.abstract_state).state
        assert restored.frozen["table"].sharding == built.shardings.frozen["table"]
        again, repeated = step(restored, placed)
    assert float(metrics["loss"]) == float(repeated["loss"])
    assert bitwise_equal(jax.device_get(second), jax.device_get(again))


def test_a_skipped_step_leaves_the_state_alone():
    spec = describe(build_of(Counting))
    built = built_of(spec)
    bad = BATCH | {"weights": BATCH["weights"] * np.float32("nan")}
    with jax.numpy_rank_promotion("allow"):
        step = fast(built.step, built.init(), BATCH)
        state, _ = step(built.init(), BATCH)
        before = jax.device_get(state.model_state)
        state, metrics = step(state, bad)
    assert metrics["skipped"] == 1
    assert before["steps"] == 1
    assert before["seen"].sum() == BATCH["weights"].sum()
    assert bitwise_equal(jax.device_get(state.model_state), before)


def test_stats_are_summed_over_parts_and_devices():
    spec = describe(build_of(Counting))
    (one, loss, wanted), (two, *_) = steps(built_of(spec), 2)
    np.testing.assert_array_equal(
        one.model_state["seen"],
        np.bincount(BATCH["targets"].ravel(), BATCH["weights"].ravel(), 64),
    )
    assert two.model_state["steps"] == 2
    ((parts, theirs, gradients),) = steps(
        built_of(spec, Layout(4, data=2, fsdp=2), PARTS)
    )
    assert theirs["loss"] == pytest.approx(loss["loss"], rel=1e-6)
    assert worst(gradients, wanted) < 1e-5
    assert bitwise_equal(parts.model_state, one.model_state)


def test_state_stays_float32_where_products_are_bfloat16():
    built = built_of(describe(build_of(Plain)), config=StepConfig(compute="bfloat16"))
    ((state, metrics, _),) = steps(built)
    (full, reference, _) = dropping()[0]
    assert {x.dtype.name for x in jax.tree.leaves(state.model_state)} == {"float32"}
    assert 0 < worst(state.model_state["norm"], full.model_state["norm"]) < 0.05
    assert 0 < abs(metrics["loss"] - reference["loss"]) < 0.3


@pytest.mark.parametrize("where", ["nowhere", "class", "instance"])
def test_a_model_says_of_itself_or_of_its_class_that_it_casts(where):
    seen = []

    class Casting(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(3))
            if where == "instance":
                self.casts_itself = True

        def loss(self, batch, key):
            seen.append(self.w[...].dtype.name)
            return self.w[...].sum().astype(jnp.float32)

    if where == "class":
        Casting.casts_itself = True
    spec = describe(lambda rngs: Casting(rngs))
    objective = build_objective(spec, compute="bfloat16", remat="none")
    jax.eval_shape(
        objective, spec.trainable, spec.model_state, spec.frozen, BATCH, None
    )
    assert seen == ["bfloat16" if where == "nowhere" else "float32"]


# --- frozen parts and groups ----------------------------------------------------------


def test_frozen_parameters_stay_bitwise_and_have_no_moments():
    spec = describe(build_of(Plain), frozen=("^blocks/1", "head/bias"))
    assert set(trees.flatten_names(spec.frozen)) == {
        "blocks/1/bias",
        "blocks/1/kernel",
        "head/bias",
        "table",
    }
    built = built_of(spec, MIXED)
    start = jax.device_get(built.init())
    (state, _, gradients), _ = steps(built, 2)[-1], None
    assert bitwise_equal(state.frozen, start.frozen)
    moved = jax.tree.map(
        lambda a, b: float(abs(a - b).max()), state.trainable, start.trainable
    )
    assert min(jax.tree.leaves(moved)) > 0
    assert jax.tree.structure(moved) == jax.tree.structure(gradients)
    names = to_canonical(state)
    assert {"frozen/blocks/1/kernel", "opt_state/optimizer/mu/blocks/0/kernel"} < set(
        names
    )
    assert not [
        n
        for n in names
        if n.startswith("opt_state") and ("blocks/1" in n or "table" in n)
    ]
    assert built.shardings.frozen["table"].spec == P("fsdp", None)


def test_groups_scale_the_rate_and_the_decay():
    groups = (("head/kernel", 0.5, 0.0), ("head", 2.0, 0.3), ("table", 3.0, None))
    built = built_of(
        describe(build_of(Counting)), optimizer=replace(SGD, groups=groups)
    )
    start = jax.device_get(built.init()).trainable
    ((state, _, g),) = steps(built)
    for path, rate, decay in (
        (("head", "kernel"), 0.5, 0.0),
        (("head", "bias"), 2.0, 0.3),
        (("table", "embedding"), 3.0, 0.2),
    ):
        before, after, gradient = (
            tree[path[0]][path[1]] for tree in (start, state.trainable, g)
        )
        wanted = before - 0.1 * rate * (gradient + decay * before)
        assert abs(after - before).max() > 1e-4
        np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-7)


def test_a_transformation_of_optax_is_used_as_it_is():
    mine = optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(0.02, weight_decay=0.3)
    )
    built = built_of(describe(build_of(Counting)), MIXED, optimizer=mine)
    start = jax.device_get(built.init()).trainable
    ((state, metrics, g),) = steps(built)
    updates, _ = mine.update(g, mine.init(start), start)
    assert (
        worst(state.trainable, jax.device_get(optax.apply_updates(start, updates)))
        < 1e-6
    )
    assert "learning_rate" not in metrics
    moments = [
        x
        for x in jax.tree.leaves(built.abstract_state.opt_state.optimizer)
        if x.ndim > 1
    ]
    assert len(moments) == 4
    assert all("fsdp" in x.sharding.spec for x in moments)


# --- stages ---------------------------------------------------------------------------


def staged_steps(pipeline: int, **options):
    frozen = ("blocks/up/kernel", "^output")
    spec = describe(build_of(Staged), frozen=frozen)
    assert spec.staged
    assert spec.depth == 4
    assert spec.names["blocks"]["down"]["bias"] == (None,)
    sizes = (
        MeshConfig(pipeline=pipeline, fsdp=2, data=8 // pipeline // 2)
        if pipeline > 1
        else MeshConfig()
    )
    devices = jax.devices() if pipeline > 1 else jax.devices()[:1]
    rules = sharding.build_rules(sizes, resolve_mesh(sizes, len(devices)))
    cut = (
        Staging(PipelineConfig(microbatches=2, **options), spec.depth, pipeline)
        if pipeline > 1
        else None
    )
    built = build_train_step(
        spec,
        ADAM,
        build_schedule(ADAM, 10, 8),
        build_mesh(sizes, devices),
        rules,
        StepConfig(staging=cut),
    )
    found = steps(built, 2)
    return [
        (state, metrics, cut.flat(g) if cut else g) for state, metrics, g in found
    ], built


def test_frozen_blocks_and_states_of_blocks_go_through_a_pipeline():
    one, _ = staged_steps(1)
    two, built = staged_steps(2, gather_once=True)
    where = built.shardings.frozen["blocks"]["up"]["kernel"].spec
    assert where[1] == "pipeline"
    assert "fsdp" in where
    for (state, metrics, g), (other, theirs, grads) in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
        assert worst(grads, g) < 1e-5
        assert bitwise_equal(other.frozen, state.frozen)
        assert worst(other.model_state, state.model_state) < 1e-6
        assert worst(other.trainable, state.trainable) < 1e-5
    gains = one[1][0].model_state["blocks"]["gain"]
    assert gains.shape == (4,)
    assert len({float(x) for x in gains}) == 4
    assert "up" in one[0][2]["blocks"]
    assert "kernel" not in one[0][2]["blocks"]["up"]


# --- refusals -------------------------------------------------------------------------


def shapes(batch=BATCH):
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def faults_of(model, *, allow=True, **given):
    with jax.numpy_rank_promotion("allow" if allow else "raise"):
        try:
            check_model(describe(build_of(model)), shapes(), **given)
        except ConfigError as error:
            return str(error)
    return ""


def test_what_couples_samples_is_refused_in_parts_and_stages():
    assert faults_of(Plain) == ""
    assert faults_of(Counting, accumulation=4) == ""
    found = faults_of(Plain, accumulation=4)
    for part in (
        "batch.accumulation=4: Plain.loss",
        "(norm/mean, norm/var)",
        "in update(self, stats)",
    ):
        assert part in found

    class Ticking(Counting):
        def loss(self, batch, key):
            self.steps[...] += 1
            return super().loss(batch, key)

    assert faults_of(Ticking) == ""
    assert "(steps)" in faults_of(Ticking, accumulation=2)
    built = built_of(describe(build_of(Ticking)), config=PARTS)
    refused = pytest.raises(ConfigError, match="Ticking.loss changes its state")
    with refused, jax.numpy_rank_promotion("allow"):
        built.step.lower(built.abstract_state, shapes())


def test_stages_refuse_random_streams_and_blocks_that_change_themselves():
    class Dropping(Layer):
        def __init__(self, width, rngs):
            super().__init__(width, rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, info):
            return self.drop(super().__call__(x, info))

    class Growing(Layer):
        def __call__(self, x, info):
            self.gain[...] += 1
            return super().__call__(x, info)

    random, growing = (
        type("Own", (Staged,), {"layer": kind}) for kind in (Dropping, Growing)
    )
    assert faults_of(random) == ""
    assert "nnx.Rngs" in faults_of(random, stages=2)
    spec = describe(build_of(random))
    key = spec.assemble(
        *spec.init_params(jax.random.key(0)), key=jax.random.key(1)
    ).blocks.drop.rngs.key[...]
    # a layer, a stream
    assert key.shape == (4,)
    assert len(set(jax.random.key_data(key)[:, 0].tolist())) == 4
    assert "blocks/gain: a block changes its own state" in faults_of(growing)


class AnyLoss(Counting):
    """A model whose loss each case replaces."""


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda self, batch, key: self.seen[...].sum(), id="scalar mean"),
        pytest.param(lambda self, batch, key: {"sum": 1.0, "count": 2.0}, id="dict"),
    ],
)
def test_a_loss_may_be_a_scalar_mean_or_a_dict_of_sums(loss, monkeypatch):
    monkeypatch.setattr(AnyLoss, "loss", loss)
    assert faults_of(AnyLoss) == ""


def test_a_scalar_loss_is_the_mean_over_the_samples_of_the_batch():
    loss = as_loss(1.5, BATCH)
    samples = len(BATCH["tokens"])
    assert loss.count == samples
    assert loss.sum == 1.5 * samples


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        pytest.param(
            lambda self, batch, key: self.table(batch["tokens"]),
            "returned float32[8, 16, 16]",
            id="an array",
        ),
        pytest.param(
            lambda self, batch, key: (self.seen[...].sum(), {"accuracy": 1.0}),
            "accuracy: 1.0",
            id="loss and aux, as has_aux has them",
        ),
        pytest.param(lambda self, batch, key: None, "returned None", id="None"),
        pytest.param(
            lambda self, batch, key: {"loss": 1.0}, "loss: 1.0", id="a dict without sum"
        ),
        pytest.param(
            lambda self, batch, key: (batch["weights"], batch["weights"]),
            "float32[8, 16]",
            id="arrays in place of sums",
        ),
        pytest.param(
            lambda self, batch: 0.0,
            "too many positional arguments; required: loss(self, batch, key)",
            id="no argument for the key",
        ),
        pytest.param(
            lambda self, batch, key: batch["image"].mean(),
            "the batch has no 'image'; the batch was {",
            id="a field that the batch lacks",
        ),
        pytest.param(
            lambda self, x, y: (x @ y).mean(), "TypeError", id="arrays as arguments"
        ),
        pytest.param(
            lambda self, batch, key: _mean_after_adding_1(self.head.bias),
            "changes parameters itself (head/bias)",
            id="a parameter is changed",
        ),
    ],
)
def test_a_loss_in_any_other_form_is_refused_and_shown(loss, fault, monkeypatch):
    monkeypatch.setattr(AnyLoss, "loss", loss)
    assert fault in faults_of(AnyLoss)


def _mean_after_adding_1(parameter):
    parameter[...] += 1
    return parameter[...].mean()


def test_stats_without_update_and_no_loss_at_all_are_refused(monkeypatch):
    monkeypatch.setattr(Counting, "update", None)
    assert "returns stats (seen), but Counting has no update(self, stats)" in faults_of(
        Counting
    )
    monkeypatch.delattr(Counting, "loss")
    assert (
        "Counting has no method `loss`; required: loss(self, batch, key)"
        in faults_of(Counting)
    )


def test_an_update_that_changes_parameters_is_refused(monkeypatch):
    monkeypatch.setattr(
        Counting, "update", lambda self, stats: _mean_after_adding_1(self.head.bias)
    )
    built = built_of(describe(build_of(Counting)))
    refused = pytest.raises(ConfigError, match="Counting.update changes parameters")
    with refused, jax.numpy_rank_promotion("allow"):
        built.step.lower(built.abstract_state, shapes())


# --- through the config ---------------------------------------------------------------


def validated(target, devices=8, **values):
    given = {path.replace("__", "."): value for path, value in values.items()}
    flat = schema.flatten(run_config.default_config(target)) | given
    run = run_config.from_config(schema.unflatten(flat))
    with jax.numpy_rank_promotion("allow"):
        return validation.validate(run, jax.devices()[:devices], with_data=False)


def test_options_are_the_parameters_of_init_or_the_fields_of_config():
    defaults = run_config.model_defaults(PLAIN)
    assert defaults == {"target": PLAIN, "hidden": 32, "vocab_size": 64, "rate": 0.0}
    assert run_config.model_defaults(COUNTING) == {"target": COUNTING, "width": 16}
    spec = validated(PLAIN, model__hidden=64, mesh__fsdp=8).spec
    assert spec.trainable["up"]["kernel"].shape == (16, 64)
    with pytest.raises(ConfigError, match="model.hidden: got 'x', required int"):
        validated(PLAIN, model__hidden="x")

    class Unsaid(nnx.Module):
        def __init__(self, width, *, rngs):
            pass

    with pytest.raises(ConfigError, match="Unsaid.__init__: width has no annotation"):
        registry.options_class(Unsaid)


def test_names_by_rule_by_flax_and_by_default_and_the_table_says_so():
    rules = (("up/kernel", "d_model d_ff"), ("blocks/0/kernel", "d_ff d_model"))
    composition = validated(
        PLAIN, mesh__fsdp=2, mesh__tensor=2, mesh__data=2, sharding__rules=rules
    )
    placed = {p.path: p for p in composition.placements()}
    assert placed["up/kernel"].stored == P("fsdp", "tensor")
    assert placed["blocks/0/kernel"].stored == P("tensor", "fsdp")
    assert placed["head/kernel"].stored == P(None, "fsdp")
    assert (
        "no names: fsdp takes the largest dim that divides" in placed["head/kernel"].why
    )
    assert "no names" not in placed["up/kernel"].why + placed["head/bias"].why
    text = placement.explain(list(placed.values()))
    assert next(line for line in text.splitlines() if "no names" in line).startswith(
        "blocks/1/kernel"
    )


def test_the_rules_of_the_docs_are_read():
    page = (DOCS / "reference/mesh-axes.md").read_text()
    config = run_config.default_config(STAGED)
    exec(page.split("```python")[1].split("```")[0], {"config": config})
    found = validated(STAGED, **schema.flatten(config), mesh__fsdp=4, mesh__tensor=2)
    stored = {
        path: found.rules.stored(names, x.shape)
        for path, (x, names) in found.spec.named_parameters().items()
    }
    assert stored["blocks/up/kernel"] == P(None, "fsdp", "tensor")
    assert stored["blocks/down/kernel"] == P(None, "tensor", "fsdp")
    assert stored["output"] == P(None, "fsdp")
    assert stored["blocks/up/bias"] == P(None, None)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ((("nowhere", "d_ff"),), "'nowhere' matches no parameter"),
        ((("(", "d_ff"),), "sharding.rules: '(' is no regular expression"),
        (((r"(u)\1", "d_ff"),), r"sharding.rules: '(u)\\1' has a reference"),
        (
            (("up/kernel", "d_ff"),),
            "'up/kernel' gives up/kernel 1 names for its 2 dims (16, 32)",
        ),
        (
            (("up/kernel", "d_model d_fff"),),
            "no dim is called 'd_fff'. Did you mean d_ff?",
        ),
        (
            (("kernel", "d_model d_ff"), ("up/kernel", "d_ff d_model")),
            "'up/kernel' matches no parameter",
        ),
    ],
)
def test_rules_that_cannot_be_are_faults(rules, expected):
    with pytest.raises(ConfigError) as error:
        describe(build_of(Plain), rules=rules)
    assert expected in str(error.value)


def test_patterns_that_find_nothing_are_faults_and_frozen_is_in_the_fingerprint():
    with pytest.raises(ConfigError) as error:
        validated(PLAIN, optimizer__frozen=("nowhere",))
    assert (
        "optimizer.frozen: 'nowhere' finds no parameter; there are: blocks/0/bias"
        in str(error.value)
    )
    with pytest.raises(ConfigError) as error:
        validated(
            PLAIN,
            optimizer__groups=(("^table", 2.0, None), ("(", -1.0, 0.0)),
            sharding__rules=((")", "d_ff"),),
        )
    assert "sharding.rules: ')' is no regular expression" in str(error.value)
    assert "'(' is no regular expression" in str(error.value)
    assert "float >= 0" in str(error.value)
    with pytest.raises(ConfigError, match="'.table' finds no trained parameter"):
        validated(PLAIN, optimizer__groups=(("^table", 2.0, None),))
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        validated(PLAIN, optimizer__frozen=("",))
    runs = [
        validated(PLAIN, optimizer__frozen=frozen).config for frozen in ((), ("head",))
    ]
    assert run_config.run_fingerprint(runs[0]) != run_config.run_fingerprint(runs[1])


@pytest.mark.slow
def test_verify_proves_a_plain_class_and_says_what_it_cannot():
    run = validated(PLAIN, model__rate=0.2).config
    with jax.numpy_rank_promotion("allow"):
        prove = partial(
            runner.verify_layouts,
            run,
            jax.devices(),
            precisions=("float32",),
            log=lambda _: None,
        )
        report = prove(only="data 2 x fsdp 2 x tensor 2")
        assert report.passed
        assert len(report.layouts) == 1
        with pytest.raises(ConfigError, match="Plain.loss changes its state"):
            prove(only="accumulation")


GROUPED = """
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxdist.config.annotations import PositiveInt


@dataclass(frozen=True)
class Inner:
    size: PositiveInt = 2  # of the vector
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    width: PositiveInt = 3
    inner: Inner = Inner(size=4)


class Grouped(nnx.Module):
    Config = Outer

    def __init__(self, config: Outer, *, rngs: nnx.Rngs):
        self.vector = nnx.Param(jnp.ones(config.inner.size))
"""


def test_options_of_a_group_are_keys_below_it(tmp_path):
    file = tmp_path / "grouped.py"
    file.write_text(GROUPED)
    target = f"{file}:Grouped"
    config = run_config.default_config(target)
    assert config.model.to_dict() == {
        "target": target,
        "width": 3,
        "inner": {"size": 4, "rate": 0.5},
    }
    files.apply_overrides(
        config, {"model.inner.size": "7"}, run_config.full_schema(target)
    )
    run = run_config.from_config(config)
    assert run.model_config.inner.size == 7
    build = registry.build_function(run.model_class, run.model_options)
    assert build(nnx.Rngs(0)).vector.shape == (7,)
    wrong = {"width": 3, "inner": {"size": 0, "rate": 0.5}}
    (fault,) = registry.option_faults(run.model_class, wrong)
    assert fault.startswith("model.inner.size: got 0, required int >= 1")
