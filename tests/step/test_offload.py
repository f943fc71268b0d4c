"""Optimizer state in the host's memory: the same numbers as on the device, layer by
layer.
"""

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist import train as train_command
from jaxdist.checkpoint import fingerprint, state_dict
from jaxdist.models.lora import LoraConfig, adapted
from jaxdist.models.transformer import Transformer
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.parallel.offload import OffloadConfig, device_faults
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.parallel.sharding import build_rules
from jaxdist.planner import targets
from jaxdist.planner.compiler import CompileOptions, compile_run
from jaxdist.protocols.model_spec import describe
from jaxdist.step.state import State
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from jaxdist.step.update import offload_obstacle
from jaxdist.trainer import exit_code, validation
from support import pipelines, runs
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
    step_of,
)

pytestmark = pytest.mark.usefixtures("shared_steps")

STEPS = 5
DEVICE, HOST = "device", "pinned_host"
MODEL = replace(TINY, num_layers=3)


@lru_cache
def first_of(layout: Layout, config: StepConfig, optimizer: OptimizerConfig) -> State:
    """Returns the state before the first step, as numpy arrays."""
    return jax.device_get(init_of(layout, MODEL, config, optimizer)())


def placed(first: State, shardings: State) -> State:
    """Puts a copy on the devices, which a step may overwrite."""
    return jax.device_put(jax.tree.map(np.copy, first), shardings)


def steps_of(
    layout: Layout,
    config: StepConfig,
    optimizer: OptimizerConfig = OPTIMIZER,
    batches=None,
):
    """Returns the state and each step's metrics after some steps, as numpy arrays.

    They begin with the state of a step without `moments_in`, which is made once.
    """
    built = step_of(layout, MODEL, config, optimizer)
    plain = replace(config, moments_in=None, params_in=None)
    first = first_of(layout, plain, optimizer)
    state, rows = placed(first, built.shardings), []
    for batch in batches or [batch_of(MODEL)] * STEPS:
        state, metrics = built.step(
            state, jax.device_put(batch, built.batch_shardings(batch))
        )
        rows.append(jax.device_get(metrics))
    kinds = {
        x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim > 2
    }
    return jax.device_get(state), rows, kinds


def assert_same(one, other) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


CASES = [
    pytest.param(FSDP, {}, {}, id="fsdp", marks=pytest.mark.slow),
    pytest.param(
        FSDP._replace(zero=1),
        {"accumulation": 2},
        {},
        id="zero 1, accumulation",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        MIXED,
        {"ema_decay": 0.9},
        {"momentum_dtype": "bfloat16"},
        id="mixed, average",
        marks=pytest.mark.slow,
    ),
    # AdamW on such a mesh: with adapters, below
    pytest.param(
        MIXED,
        {"ema_decay": 0.9},
        {"name": "muon", "momentum_dtype": "bfloat16"},
        id="muon",
    ),
    pytest.param(Layout(), {}, {"name": "lion"}, id="lion", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "config", "optimizer"), CASES)
def test_host_equals_device_bit_for_bit(layout, config, optimizer):
    optimizer = replace(OPTIMIZER, **optimizer)
    on_host = steps_of(layout, StepConfig(moments_in=HOST, **config), optimizer)
    on_device = steps_of(layout, StepConfig(moments_in=DEVICE, **config), optimizer)
    assert (on_host[2], on_device[2]) == ({HOST}, {DEVICE})
    assert_same(on_host[:2], on_device[:2])
    _whole, rows, _ = steps_of(layout, StepConfig(**config), optimizer)
    losses = [[row["loss"] for row in r] for r in (on_host[1], rows)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        pytest.param(MIXED, {"ema_decay": 0.9}, id="mixed, average"),
        pytest.param(
            FSDP._replace(zero=1),
            {"accumulation": 2},
            id="zero 1, accumulation",
            marks=pytest.mark.slow,
        ),
        pytest.param(Layout(), {}, id="one device", marks=pytest.mark.slow),
    ],
)
def test_parameters_on_the_host_are_those_of_the_device_bit_for_bit(layout, config):
    """In float32, where the copy that a step computes with is no other number."""
    on_host = steps_of(layout, StepConfig(moments_in=HOST, params_in=HOST, **config))
    on_device = steps_of(layout, StepConfig(moments_in=HOST, **config))
    assert_same(on_host[:2], on_device[:2])
    config = StepConfig(moments_in=HOST, params_in=HOST, **config)
    places = jax.tree.leaves(step_of(layout, MODEL, config).shardings.trainable)
    waits = [place.memory_kind == HOST for place in places]
    assert any(waits)
    assert not all(waits)  # vectors stay on the device


@pytest.mark.slow
def test_a_bfloat16_copy_of_parameters_rounds_gradients_and_nothing_else():
    """Losses are equal at the first step. The gradient of a kernel is rounded once."""
    rows = [
        steps_of(FSDP, StepConfig(compute="bfloat16", moments_in=HOST, params_in=kind))
        for kind in (HOST, None)
    ]
    (ours, *_), (theirs, *_) = (row[1] for row in rows)
    assert ours["loss"] == theirs["loss"]
    assert ours["grad_norm"] != theirs["grad_norm"]
    np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=2**-8)
    losses = [[row["loss"] for row in result[1]] for result in rows]
    np.testing.assert_allclose(*losses, rtol=2e-3)


def test_evaluation_reads_parameters_on_the_host():
    batch = batch_of(MODEL)
    built = step_of(FSDP, MODEL, StepConfig(moments_in=HOST, params_in=HOST))
    plain = step_of(FSDP, MODEL, StepConfig())
    placed_batch = jax.device_put(batch, built.batch_shardings(batch))
    state = fresh(built)
    found = built.evaluate(state, placed_batch)[0]
    assert float(found) == float(plain.evaluate(fresh(plain), placed_batch)[0])
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.model_arrays)} == {
        DEVICE
    }


def test_a_step_that_is_not_finite_changes_nothing_but_the_clock():
    config = StepConfig(moments_in=HOST, ema_decay=0.9)
    built = step_of(FSDP, MODEL, config)
    good = batch_of(MODEL)
    bad = good | {"weights": np.full_like(good["weights"], np.inf)}
    before, _, _ = steps_of(FSDP, config, batches=[good])
    after, rows, _ = steps_of(FSDP, config, batches=[good, bad])
    assert not np.isfinite(rows[1]["loss"])
    assert rows[1]["skipped"] == 1
    assert_same(after.opt_state.optimizer, before.opt_state.optimizer)
    assert_same((after.trainable, after.ema), (before.trainable, before.ema))
    assert after.step == 2
    assert {
        leaf.sharding.memory_kind for leaf in jax.tree.leaves(fresh(built).ema)
    } == {DEVICE, HOST}


def test_evaluation_and_fingerprints_read_an_average_on_the_host():
    built, batch = (
        step_of(FSDP, MODEL, StepConfig(moments_in=HOST, ema_decay=0.9)),
        batch_of(MODEL),
    )
    plain = step_of(FSDP, MODEL, StepConfig(ema_decay=0.9))
    state, other, placed = (
        fresh(built),
        fresh(plain),
        jax.device_put(batch, built.batch_shardings(batch)),
    )
    assert float(built.evaluate(state, placed)[0]) == float(
        plain.evaluate(other, placed)[0]
    )
    sums = [fingerprint.of(state_dict.to_canonical(s)) for s in (state, other)]
    assert sums[0] == sums[1]
    assert len(set(sums[0].values())) > 10
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.model_arrays)} == {
        DEVICE
    }


@pytest.mark.slow
def test_stages_of_a_pipeline_update_their_layers_and_save_them_flat():
    case = pipelines.Case(
        stages=2,
        chunks=2,
        schedule="interleaved",
        fsdp=2,
        model=replace(TINY, num_layers=7),
    )
    batch = pipelines.batch_for(case)

    alone = case._replace(stages=1, fsdp=1, chunks=1, schedule="1f1b")
    first = pipelines.build(alone).init.lower().compile(FAST_COMPILE)()
    first = jax.device_get(first)

    def flat_after_steps(
        case: pipelines.Case, moments_in: str | None, params_in: str | None = None
    ) -> tuple[State, State]:
        built = pipelines.build(case, moments_in=moments_in, params_in=params_in)
        where = jax.tree.map(lambda x: x.sharding, built.views.abstract)
        state = built.views.by_stage(placed(first, where))
        for _ in range(3):
            state, _ = built.step(
                state, jax.device_put(batch, built.batch_shardings(batch))
            )
        flat = built.views.flat(state)
        back = built.views.by_stage(jax.tree.map(jnp.copy, flat))
        assert_same(jax.device_get(back), jax.device_get(state))
        return flat, back

    flat, back = flat_after_steps(case, HOST)
    for state in (flat, back):
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.size > 1000]
        assert {x.sharding.memory_kind for x in moments} == {HOST}
    on_device, _ = flat_after_steps(case, DEVICE)
    assert_same(jax.device_get(flat), jax.device_get(on_device))
    whole, back = flat_after_steps(case, HOST, HOST)
    assert_same(jax.device_get(whole), jax.device_get(on_device))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(back.trainable)}
    assert kinds == {DEVICE, HOST}
    one, _ = flat_after_steps(alone, None)
    for a, b in zip(
        jax.tree.leaves(flat.trainable), jax.tree.leaves(one.trainable), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MeshConfig(data=2, fsdp=2, tensor=2), id="mesh"),
        pytest.param(
            MeshConfig(pipeline=2, data=2, fsdp=2),
            id="pipeline",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_adapters_update_the_same_on_both_sides(config):
    spec = describe(
        adapted(lambda rngs: Transformer(MODEL, rngs=rngs), LoraConfig(rank=4))
    )
    cut = (
        Staging(PipelineConfig(microbatches=2), spec.depth, 2)
        if config.pipeline > 1
        else None
    )
    rules, schedule = (
        build_rules(config, resolve_mesh(config, 8)),
        build_schedule(OPTIMIZER, 1000, 8),
    )
    batch, states, first = batch_of(MODEL), [], None
    for kind in (HOST, DEVICE):
        step = StepConfig(moments_in=kind, staging=cut)
        built = build_train_step(
            spec, OPTIMIZER, schedule, build_mesh(config), rules, step
        )
        first = jax.device_get(fresh(built)) if first is None else first
        state = placed(first, built.shardings)
        for _ in range(STEPS):
            state, _ = built.step(
                state, jax.device_put(batch, built.batch_shardings(batch))
            )
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 2]
        assert {x.sharding.memory_kind for x in moments} == {kind}
        assert moments
        assert all(
            jnp.any(jax.device_put(x, x.sharding.with_memory_kind(DEVICE)))
            for x in moments
        )
        states.append(jax.device_get(state))
    assert_same(*states)


@pytest.mark.parametrize(
    "offload", [True, pytest.param(False, id="switched", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_bit_for_bit_and_across_the_switch(tmp_path, capsys, offload):
    changes = {
        "mesh.fsdp": 8,
        "mesh.data": 1,
        "train.ema_decay": 0.9,
        "checkpoint.every_steps": 6,
        "train.steps": 12,
    }

    def run(name: str, offload: bool) -> dict[int, float]:
        given = changes | {"offload.optimizer": offload}
        arguments = runs.command(tmp_path / name, **given)[3:]
        assert exit_code.exit_code(lambda: train_command.main(arguments)) == 0, (
            capsys.readouterr().err
        )
        return runs.losses(tmp_path / name)

    whole = run("whole", offload=True)
    assert len(whole) == 12
    with runs.stopping_after(6):
        assert len(run("parts", offload=True)) == 6
    resumed = run("parts", offload=offload)
    if offload:
        assert resumed == whole
    else:
        np.testing.assert_allclose(
            list(resumed.values()), list(whole.values()), rtol=1e-6
        )


@pytest.mark.slow
def test_a_tpu_holds_eight_bytes_a_parameter_less(tmp_path):
    changes = {
        "mesh.fsdp": 16,
        "mesh.data": 1,
        "batch.global_size": 16,
        "batch.sequence_length": 1024,
    }
    changes |= {
        "model.d_model": 1024,
        "model.d_ff": 2816,
        "model.num_layers": 8,
        "model.vocab_size": 32_000,
    }
    compiled = {}
    for offload in (False, True):
        run = runs.run_of("llama3_8b", **changes, **{"offload.optimizer": offload})
        compiled[offload] = compile_run(
            run, targets.parse("v5e:4x4"), CompileOptions(cache=tmp_path)
        )
    whole, moved = compiled[False], compiled[True]
    spec = validation.validate_on(run, 16, with_data=False).spec
    parameters = spec.parameter_count
    saved = whole.argument_bytes - moved.argument_bytes
    assert saved == pytest.approx(8 * parameters / 16, rel=0.01)
    # Nothing of it is fetched while layers need the memory.
    assert moved.temp_bytes <= 1.01 * whole.temp_bytes
    assert moved.peak_bytes <= whole.peak_bytes - 0.97 * saved
    assert moved.host_argument_bytes == pytest.approx(8 * parameters / 16, rel=0.01)
    assert (moved.host_temp_bytes, whole.host_argument_bytes) == (0, 0)


def test_optimizers_that_gain_nothing_or_are_unknown_are_refused(capsys):
    settings = (
        "offload.optimizer=true",
        "optimizer.name=adafactor",
        "optimizer.b1=2",
        "train.steps=5",
    )
    faults = runs.refused(capsys, "--config", "quickstart", *runs.overrides(*settings))
    assert len(faults) == 2
    assert "adafactor keeps a row and a column of each matrix" in "".join(faults)
    assert "does not know whether it treats each parameter by itself" in str(
        offload_obstacle(optax.adam(1e-3))
    )
    device = SimpleNamespace(
        platform="x",
        device_kind="y",
        addressable_memories=lambda: [SimpleNamespace(kind="device")],
    )
    (fault,) = device_faults(OffloadConfig(optimizer=True), device)
    assert (
        "x devices (y) have no memory of kind pinned_host, only device; leave it off"
        in fault
    )
