"""float16 with a loss scale: torch's sequence, and no bit of a gradient
changed by it.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import train as train_command
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import precision
from jaxdist.parallel.precision import PrecisionConfig
from jaxdist.protocols.model_spec import describe
from jaxdist.step import loss_scale
from jaxdist.step.loss_scale import DynamicLossScale, LossScale
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import TrainStep, build_train_step
from jaxdist.telemetry.metrics import read_events, read_rows
from jaxdist.trainer import exit_code
from support import loss_scale_torch, pipelines, runs
from support.models import (
    FAST_COMPILE,
    FSDP,
    MIXED,
    ONE,
    TINY,
    Layout,
    batch_of,
    bitwise_equal,
    fresh,
    rules_and_mesh,
    step_of,
    worst,
)
from support.paths import DATA

pytestmark = pytest.mark.usefixtures("shared_steps")

MODEL = replace(TINY, num_layers=3, z_loss=1e-2)
SPARSE = replace(
    TINY,
    num_experts=4,
    experts_per_token=2,
    expert_d_ff=16,
    balance="sequence",
    router_z_loss=1e-2,
)
SCALER = DynamicLossScale()
HOPELESS = 2.0**100  # in float16 every gradient overflows


def with_scale(state, scale: float):
    """Returns a state whose loss scale is another."""
    scaled = state.opt_state.loss_scale._replace(scale=jnp.float32(scale))
    return state._replace(opt_state=state.opt_state._replace(loss_scale=scaled))


# --- torch's sequence -----------------------------------------------------------------


class Linear(nnx.Module):
    """A loss linear in its weights."""

    def __init__(self, rngs: nnx.Rngs):
        self.weights = nnx.Param(jnp.zeros(loss_scale_torch.WIDTH))

    def loss(self, batch, key):
        weights = self.weights[...]
        y = weights[None] * batch["x"].astype(weights.dtype)
        return y.astype(jnp.float32).sum(), jnp.float32(len(batch["x"]))


def linear_step(case: loss_scale_torch.Case) -> TrainStep:
    rules, mesh = rules_and_mesh(ONE)
    optimizer = OptimizerConfig(
        "sgd",
        learning_rate=loss_scale_torch.RATE,
        warmup_steps=0,
        schedule="constant",
        momentum=0.0,
        weight_decay=0.0,
        clip_norm=case.clip,
    )
    schedule = build_schedule(
        optimizer, loss_scale_torch.STEPS, loss_scale_torch.SAMPLES
    )
    scaler = DynamicLossScale(case.initial, case.interval)
    config = StepConfig(
        accumulation=case.accumulation, compute=case.dtype, loss_scale=scaler
    )
    return build_train_step(describe(Linear), optimizer, schedule, mesh, rules, config)


@pytest.mark.parametrize("name", loss_scale_torch.CASES)
def test_scale_counter_and_skips_are_torchs(name):
    case, table = (
        loss_scale_torch.CASES[name],
        json.loads((DATA / "loss_scale" / "torch.json").read_text()),
    )
    built, rows, skipped = linear_step(case), [], 0
    state = built.init()
    for x in loss_scale_torch.inputs(case):
        before = np.asarray(state.trainable["weights"])
        state, metrics = built.step(state, {"x": x})
        after, weights = (
            jax.device_get(state.opt_state.loss_scale),
            np.asarray(state.trainable["weights"]),
        )
        kind = "skipped" if (weights == before).all() else "good"
        skipped += kind == "skipped"
        rows.append([kind, float(after.scale), int(after.good_steps), skipped])
        # A loss that is not finite is no matter of scale.
        of_loss = kind == "skipped" and not np.isfinite(metrics["loss"])
        assert metrics["skipped"] == of_loss == np.isinf(x).any()
        assert metrics["loss_scale_skips"] == skipped - np.isinf(
            case.spikes.get(9, 0)
        ) * (len(rows) > 9)
    assert rows == table[name]["rows"]
    np.testing.assert_allclose(weights, table[name]["weights"], rtol=1e-5)


def test_at_its_floor_the_scale_stays_and_is_to_blame_no_more():
    low = LossScale(jnp.float32(2 * loss_scale.FLOOR), jnp.int32(1), jnp.int32(5))
    no, loss = jnp.bool(False), jnp.float32(1)
    assert loss_scale.is_cause(low, no, loss)
    assert not loss_scale.is_cause(low, no, jnp.float32(np.nan))
    floor = SCALER.after(low, no, jnp.bool(True))
    assert (floor.scale, floor.good_steps, floor.skips) == (loss_scale.FLOOR, 0, 6)
    assert not loss_scale.is_cause(floor, no, loss)
    assert SCALER.after(floor, no, no).scale == loss_scale.FLOOR
    assert (
        loss_scale.factor(floor, {"weights": np.ones((8, 129))})
        == loss_scale.FLOOR / 2**11
    )


# --- the same numbers -----------------------------------------------------------------

STEPS = {
    "mesh, parts, average": (MIXED, MODEL, {"accumulation": 2, "ema_decay": 0.9}),
    "moments on the host": (FSDP, MODEL, {"moments_in": "pinned_host"}),
    "summed once": (
        Layout(8, data=8),
        MODEL,
        {"accumulation": 2, "reduce_over_replicas": "once"},
    ),
    "experts": (FSDP, SPARSE, {}),
    "context": (Layout(8, fsdp=2, context=4, zero=1), MODEL, {}),
}


def first_and_slow(names: Iterable[str]) -> list[object]:
    """Returns the first, and the others as slow."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


def assert_scale_changes_nothing(
    plain: TrainStep, scaled: TrainStep, batch, *, update: bool = True
) -> None:
    """Compares one step without a scale and with some scales in every bit.

    Args:
      update: also what is made of the gradients, where the two programs add up their
        norm in one order.
    """
    placed = jax.device_put(batch, plain.batch_shardings(batch))
    inspect = [
        built.inspect.lower(built.abstract_state, placed).compile(FAST_COMPILE)
        for built in (plain, scaled)
    ]
    first = fresh(scaled)
    state, metrics, gradients = jax.device_get(inspect[0](fresh(plain), placed))
    for power in (-20, 0, 16, 40):
        start = with_scale(first, 2.0**power)
        after, figures, found = jax.device_get(inspect[1](start, placed))
        assert figures.pop("loss_scale") == 2.0**power
        assert figures.pop("loss_scale_skips") == 0
        assert bitwise_equal(found, gradients), power
        plainly = after._replace(opt_state=after.opt_state._replace(loss_scale=None))
        if not update:  # then of the program with a scale itself: the same for each
            state, metrics, update = plainly, figures, True
        assert bitwise_equal(figures, metrics), power
        assert bitwise_equal(plainly, state), power
        assert after.opt_state.loss_scale == (2.0**power, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_and_slow(STEPS))
def test_in_float32_a_scale_changes_no_bit(name):
    layout, model, config = STEPS[name]
    plain = step_of(layout, model, StepConfig(**config))
    scaled = step_of(layout, model, StepConfig(**config, loss_scale=SCALER))
    assert_scale_changes_nothing(
        plain, scaled, batch_of(model, 16), update=name != "context"
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layers", "full"])
def test_in_float32_a_scale_changes_no_bit_of_a_pipeline(remat):
    model = replace(SPARSE, num_layers=4, z_loss=1e-2)
    case = pipelines.Case(stages=2, data=2, remat=remat, model=model)
    plain, scaled = (
        pipelines.build(case, loss_scale=scaler) for scaler in (None, SCALER)
    )
    assert_scale_changes_nothing(plain, scaled, pipelines.batch_for(case))


# --- in float16 -----------------------------------------------------------------------

HALF = StepConfig(compute="float16", loss_scale=SCALER, ema_decay=0.9)
LAYOUTS = {
    "host": lambda: step_of(FSDP, MODEL, replace(HALF, moments_in="pinned_host")),
    "pipeline": lambda: pipelines.build(
        pipelines.Case(stages=2, fsdp=2, tensor=2, compute="float16"), loss_scale=SCALER
    ),
    "mesh": lambda: step_of(MIXED, MODEL, replace(HALF, accumulation=2)),
    "experts": lambda: step_of(FSDP, SPARSE, HALF),
}


@pytest.mark.parametrize("name", first_and_slow(LAYOUTS))
def test_an_overflow_leaves_the_update_out_and_the_next_one_is_made(name):
    built, batch = LAYOUTS[name](), pipelines.batch_for(pipelines.Case())
    placed = jax.device_put(batch, built.batch_shardings(batch))
    first = fresh(built)
    before = jax.tree.map(np.array, first)  # the step takes the arrays themselves
    state, metrics = built.step(with_scale(first, HOPELESS), placed)
    after = jax.device_get(state)
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert (metrics["skipped"], metrics["loss_scale"], metrics["loss_scale_skips"]) == (
        0,
        HOPELESS,
        1,
    )
    for part in ("trainable", "model_state", "ema"):
        assert bitwise_equal(getattr(after, part), getattr(before, part))
    assert bitwise_equal(after.opt_state.optimizer, before.opt_state.optimizer)
    assert (after.step, after.opt_state.skipped) == (1, 0)
    assert after.opt_state.loss_scale == (HOPELESS / 2, 0, 1)
    state, metrics = built.step(with_scale(state, 2.0**10), placed)
    assert np.isfinite(metrics["grad_norm"])
    assert state.opt_state.loss_scale.good_steps == 1
    assert worst(jax.device_get(state.trainable), before.trainable) > 1e-4


@pytest.mark.parametrize(
    "config",
    # without a scale: tests/step/test_train_step.py
    [pytest.param(StepConfig(), marks=pytest.mark.slow), HALF],
    ids=["float32", "float16"],
)
def test_a_batch_without_targets_is_no_matter_of_scale(config):
    built, batch = step_of(ONE, MODEL, config), batch_of(MODEL)
    state, metrics = built.step(
        fresh(built), batch | {"weights": np.zeros_like(batch["weights"])}
    )
    assert (metrics["skipped"], state.opt_state.skipped) == (1, 1)
    if config.loss_scale:
        assert state.opt_state.loss_scale == (precision.LOSS_SCALE, 1, 0)


def test_a_run_skips_resumes_bit_for_bit_and_tells_of_no_fault(tmp_path, capsys):
    changes = {
        "precision.compute": "float16",
        "precision.loss_scale": 2.0**40,
        "checkpoint.every_steps": 18,
        "precision.loss_scale_growth_interval": 3,
        "optimizer.nonfinite_limit": 3,
        "train.steps": 30,
    }

    def run(name: str) -> list[dict]:
        arguments = runs.command(tmp_path / name, **changes)[3:]
        assert exit_code.exit_code(lambda: train_command.main(arguments)) == 0, (
            capsys.readouterr().err
        )
        return runs.untimed(read_rows(tmp_path / name))

    whole = run("whole")
    with runs.stopping_after(18):
        assert len(run("parts")) == 18
    assert run("parts") == whole
    assert len(whole) == 30
    skips = whole[-1]["loss_scale_skips"]
    assert 10 < skips < 25
    assert whole[skips]["loss_scale"] < 2.0**30
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert {row["event"] for row in read_events(tmp_path / "whole")} >= {"stop"}
    assert "nonfinite" not in {row["event"] for row in read_events(tmp_path / "whole")}


# --- where ----------------------------------------------------------------------------


def device(platform: str, kind: str, capability: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        platform=platform, device_kind=kind, compute_capability=capability
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("TPU v5 lite", "1.02 times"),
        ("TPU v6 lite", "1.14 times"),
        ("TPU v4", "no loss scale; set"),
    ],
)
def test_tpus_refuse_float16_and_name_bfloat16(kind, text):
    half = PrecisionConfig(compute="float16")
    (fault,) = precision.device_faults(half, device("tpu", kind))
    assert text in fault
    assert fault.endswith("set precision.compute=bfloat16")
    assert not [*precision.device_faults(half, device("gpu", "Tesla T4"))]
    assert not [*precision.device_faults(PrecisionConfig(), device("tpu", kind))]


@pytest.mark.parametrize(
    ("of", "lacks"),
    [
        (device("gpu", "Tesla T4"), True),
        (device("cuda", "Tesla V100-SXM2-16GB"), True),
        (device("gpu", "NVIDIA GeForce RTX 2080 Ti", "7.5"), True),
        (device("gpu", "NVIDIA GeForce RTX 3090", "8.6"), False),
        (device("gpu", "NVIDIA H100 80GB HBM3", "9.0"), False),
        (device("rocm", "AMD Instinct MI300X", "gfx942"), False),
        (device("cpu", "cpu"), False),
    ],
)
def test_gpus_without_bfloat16_are_advised_float16(of, lacks):
    others = PrecisionConfig(), PrecisionConfig(compute="float16")
    lines = [*precision.advice(PrecisionConfig(compute="bfloat16"), of)]
    assert len(lines) == lacks
    assert all("set precision.compute=float16" in line for line in lines)
    assert not [line for config in others for line in precision.advice(config, of)]


@pytest.mark.parametrize("given", [3.0, 65535.0, 2.0**-25])
def test_a_scale_that_is_no_power_of_two_is_refused(given, capsys):
    faults = runs.refused(
        capsys,
        "--config",
        "quickstart",
        *runs.overrides(f"precision.loss_scale={given}"),
    )
    assert any("a power of two from 2^-24 to 2^127" in fault for fault in faults)
