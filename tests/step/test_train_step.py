"""The train step: the same on every mesh and in any number of parts, safe, donated."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.protocols.model import Loss, as_loss
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.models import (
    MIXED,
    ONE,
    OPTIMIZER,
    TINY,
    Layout,
    batch_of,
    bitwise_equal,
    fresh,
    init_of,
    program_of,
    rules_and_mesh,
    run,
    step_of,
    worst,
)

DROPPING = replace(TINY, dropout=0.2, tie_embeddings=True, z_loss=1e-3)
# Plain SGD: an update is the clipped gradient itself, where Adam would hide its scale.
SGD = OptimizerConfig(
    name="sgd",
    learning_rate=0.1,
    warmup_steps=0,
    momentum=0.0,
    weight_decay=0.0,
    clip_norm=0.05,
)
WAYS = {
    "mesh": (MIXED, 1),
    "parts": (ONE, 4),
    "both": (Layout(8, fsdp=2, tensor=4, sequence_parallel=True), 4),
}


def dropping(layout: Layout = ONE, accumulation: int = 1):
    return run(layout, DROPPING, StepConfig(accumulation=accumulation), SGD)


@pytest.fixture(scope="module")
def reference():
    return dropping()


def test_the_reference_drops_clips_and_has_unequal_parts(reference):
    built = step_of(ONE, DROPPING, StepConfig(), SGD)
    batch = batch_of(DROPPING)
    start = init_of(ONE, DROPPING, StepConfig(), SGD)()
    total, count, _ = built.evaluate(start, batch)
    assert abs(float(total / count) - reference.metrics["loss"]) > 1e-3  # dropout is on
    assert reference.metrics["grad_norm"] > 2 * SGD.clip_norm
    assert len({batch["weights"][part::4].sum() for part in range(4)}) > 1
    moved = jax.tree.map(
        np.subtract, reference.state.trainable, jax.device_get(start.trainable)
    )
    length = np.sqrt(
        sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(moved))
    )
    assert length == pytest.approx(SGD.learning_rate * SGD.clip_norm, rel=1e-3)
    assert reference.metrics["tokens"] == batch["weights"].sum()


@pytest.mark.parametrize("way", WAYS)
def test_meshes_and_parts_change_nothing(way, reference):
    found = dropping(*WAYS[way])
    for name in ("loss", "grad_norm", "aux/z_loss"):
        assert found.metrics[name] == pytest.approx(reference.metrics[name], rel=2e-6)
    assert worst(found.gradients, reference.gradients) < 1e-5
    assert worst(found.state.trainable, reference.state.trainable) < 1e-6


def test_terms_beside_the_loss_have_its_divisor():
    model = replace(TINY, z_loss=1e-3)
    start = init_of(ONE, model, StepConfig(), SGD)()
    built = step_of(ONE, model, StepConfig(), SGD)
    _, count, others = built.evaluate(start, batch_of(model))
    total, _ = others["aux/z_loss"]
    assert count > 1
    assert total > 0
    found = run(ONE, model, StepConfig(), SGD).metrics["aux/z_loss"]
    assert found == pytest.approx(float(total / count), rel=1e-6)


def test_what_is_dropped_follows_the_step():
    built = step_of(ONE, DROPPING, StepConfig(), SGD)
    start = init_of(ONE, DROPPING, StepConfig(), SGD)()
    losses = []
    for step in (0, 0, 1):
        state = start._replace(step=jnp.int32(step))
        _, metrics, _ = built.inspect(state, batch_of(DROPPING))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]
    assert abs(losses[2] - losses[0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)]
)
def test_optimizers_that_see_whole_matrices_work_on_shards(name):
    # adafactor factors dims from 128 on
    model = replace(TINY, num_layers=1, d_model=128, d_ff=160)
    optimizer = OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=1)
    one, other = (
        run(place, model, StepConfig(), optimizer) for place in (ONE, WAYS["both"][0])
    )
    start = jax.device_get(init_of(ONE, model, StepConfig(), optimizer)().trainable)
    assert worst(one.state.trainable, start) > 1e-3
    if name == "adafactor":
        shapes = {leaf.shape for leaf in jax.tree.leaves(one.state.opt_state)}
        assert {(1, 128), (1, 160)} <= shapes
    change, expected = (
        jax.tree.map(np.subtract, r.state.trainable, start) for r in (other, one)
    )
    assert worst(change, expected) < 1e-2  # bfloat16-like iterations amplify rounding
    assert worst(other.state.trainable, one.state.trainable) < 1e-4


def test_a_step_with_nonfinite_gradients_changes_nothing_but_counts():
    step, batch = program_of().compiled, batch_of()
    bad = batch | {"weights": batch["weights"].copy()}
    bad["weights"][0, 0] = np.nan
    state, _ = step(init_of()(), batch)
    before = jax.device_get(state)
    for skipped in (1, 2):
        state, metrics = step(state, bad)
        after = jax.device_get(state)
        assert not np.isfinite(metrics["loss"])
        assert metrics["skipped"] == skipped
        for part in ("trainable", "frozen", "model_state", "ema"):
            assert bitwise_equal(getattr(after, part), getattr(before, part))
        assert bitwise_equal(after.opt_state.optimizer, before.opt_state.optimizer)
        assert after.opt_state.skipped == skipped
        assert after.step == before.step + skipped
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["loss"])
    assert worst(jax.device_get(state.trainable), before.trainable) > 1e-5


def test_the_state_is_donated_and_the_step_repeats_bitwise():
    step, batch = program_of().compiled, batch_of()
    ends = []
    for _ in range(2):
        first = init_of()()
        second, _ = step(first, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.trainable))
        assert all(
            leaf.is_deleted() for leaf in jax.tree.leaves(first.opt_state.optimizer)
        )
        ends.append(jax.device_get(step(second, batch)))
    assert bitwise_equal(*ends)
    assert int(ends[0][0].step) == 2


def test_the_moving_average_follows_the_parameters_and_is_evaluated():
    config, batch = StepConfig(ema_decay=0.75), batch_of()
    step = program_of(ONE, TINY, config, optimizer=SGD).compiled
    state = init_of(ONE, TINY, config, SGD)()
    average = jax.device_get(state.trainable)
    assert bitwise_equal(jax.device_get(state.ema), average)
    for _ in range(3):
        state, _ = step(state, batch)
        average = jax.tree.map(
            lambda e, p: 0.75 * e + 0.25 * p, average, jax.device_get(state.trainable)
        )
    assert worst(jax.device_get(state.ema), average) < 1e-6
    assert worst(jax.device_get(state.trainable), average) > 1e-5
    built = step_of(ONE, TINY, config, SGD)
    total, *_ = built.evaluate(state, batch)
    swapped, *_ = built.evaluate(
        state._replace(ema=jax.tree.map(jnp.copy, state.trainable)), batch
    )
    assert abs(float(total) - float(swapped)) > 1e-4


def test_training_learns():
    step, batch = program_of().compiled, batch_of()
    state, losses = init_of()(), []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


# --- models of others -----------------------------------------------------------------


class Foreign(nnx.Module):
    """No blocks, no logical names, a scalar mean loss; it imports nothing of ours."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (64, 16)))
        self.head = nnx.Linear(16, 64, rngs=rngs)

    def loss(self, batch, key):
        logits = self.head(jnp.tanh(self.table[...][batch["tokens"]]))
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], -1
        )
        return -picked.mean()


def test_a_model_of_someone_else_trains_on_a_mesh():
    spec = describe(Foreign)
    assert all(names == () for _, names in spec.named_parameters().values())
    found, batch = [], batch_of()
    with jax.numpy_rank_promotion("allow"):
        for layout in (ONE, MIXED._replace(tensor=1, fsdp=4)):
            rules, mesh = rules_and_mesh(layout)
            schedule = build_schedule(OPTIMIZER, 10, 8)
            built = build_train_step(
                spec, OPTIMIZER, schedule, mesh, rules, StepConfig()
            )
            placed = jax.device_put(batch, built.batch_shardings(batch))
            found.append(jax.device_get(built.inspect(fresh(built), placed)))
    assert found[0][1]["loss"] == pytest.approx(found[1][1]["loss"], rel=1e-6)
    assert worst(found[1][2], found[0][2]) < 1e-5


def test_losses_in_every_accepted_form():
    batch = {"tokens": jnp.zeros((4, 2), jnp.int32)}
    mean = as_loss(jnp.float32(2.0), batch)
    assert (float(mean.sum), float(mean.count)) == (8.0, 4.0)
    pair = as_loss((jnp.float32(6), jnp.int32(3)), batch)
    assert (float(pair.sum), float(pair.count), pair.aux) == (6.0, 3.0, {})
    full = as_loss(Loss(1.0, 2.0, {"balance": 3.0}, {"load": 4.0}), batch)
    assert full.aux["balance"].dtype == jnp.float32
    assert float(full.stats["load"]) == 4.0


def test_a_step_is_traced_once_for_its_compilation_and_all_its_calls():
    built = step_of(MIXED)
    chex.clear_trace_counter()
    once = chex.assert_max_traces(built.step.__wrapped__, n=1)
    step = jax.jit(once, donate_argnums=0, out_shardings=(built.shardings, None))
    batch = batch_of()
    step.lower(built.abstract_state, built.abstract_batch(batch)).compile()
    state, placed = fresh(built), jax.device_put(batch, built.batch_shardings(batch))
    for _ in range(3):
        state, metrics = step(state, placed)
    assert state.step == 3
    assert metrics["loss"] > 0
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step.lower(state, batch_of(batch=4))


def test_a_step_that_is_traced_more_often_than_allowed_raises():
    built = step_of(step=StepConfig(max_traces=1))
    for _ in range(2):
        built.step.lower(built.abstract_state, batch_of())  # one trace serves both
    with pytest.raises(RuntimeError, match="traced more than 1 times"):
        built.step.lower(built.abstract_state, batch_of(length=8))
