"""Whole steps with first dense layers and a pattern behind them: layouts have the
numbers of one device.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, TINY, fresh, spec_of, worst
from support.pipelines import Case as Batch
from support.pipelines import batch_for

pytestmark = pytest.mark.slow

# Five groups of two layers, so that stages hold padding.
MODEL = replace(
    TINY,
    num_layers=11,
    first_dense_layers=1,
    feed_forward_pattern=("dense", "sparse"),
    num_experts=8,
    expert_d_ff=24,
    num_shared_experts=1,
    shared_expert_gate=True,
    dropout=0.1,
    router_z_loss=1e-2,
    num_kv_heads=2,
    layer_pattern=("local", "global"),
    window=4,
    init_std=0.05,
)
# Not Adam, which divides the rounding of tiny gradients by their size.
OPTIMIZER = OptimizerConfig(
    "sgd", learning_rate=0.1, warmup_steps=0, schedule="constant"
)
BATCH = batch_for(Batch(model=MODEL, packed=True))


class Case(NamedTuple):
    sizes: dict[str, int]
    accumulation: int = 1
    remat: RematConfig | str = "none"
    pipeline: PipelineConfig | None = None
    zero: int = 3


CASES = {
    "accumulation, remat": Case(
        {"data": 2, "fsdp": 2, "expert": 2}, accumulation=2, remat="full"
    ),
    "tensor": Case({"fsdp": 2, "expert": 2, "tensor": 2}, remat="dots"),
    "groups of layers": Case(
        {"fsdp": 2, "expert": 2}, remat=RematConfig("full", every=10)
    ),
    "last layers": Case({"fsdp": 2, "tensor": 2}, remat=RematConfig("dots", layers=4)),
    "1f1b": Case(
        {"pipeline": 2, "fsdp": 2, "expert": 2}, pipeline=PipelineConfig(microbatches=4)
    ),
    "edges last, tensor": Case(
        {"pipeline": 2, "expert": 2, "tensor": 2},
        pipeline=PipelineConfig(microbatches=2, edges="last", remat="dots"),
        zero=1,
    ),
    "interleaved": Case(
        {"pipeline": 2, "data": 2},
        accumulation=2,
        pipeline=PipelineConfig("interleaved", microbatches=2, chunks=2),
    ),
}


@lru_cache
def two_steps(name: str | None = None) -> Any:
    """Returns the state and the metrics after two steps, and the gradients of the
    first.
    """
    case = CASES[name] if name else Case({"data": 1})
    spec = spec_of(MODEL)
    rules, mesh = rules_and_mesh(zero=case.zero, **case.sizes)
    rules = replace(
        rules,
        vocab_over_stages=case.pipeline is not None
        and case.pipeline.edges == "sharded",
    )
    staging = None
    if case.pipeline:
        stages = case.sizes["pipeline"]
        staging = Staging(
            case.pipeline, spec.depth, stages, spec.period, spec.block_layers
        )
        assert not list(staging.faults())
    config = StepConfig(
        accumulation=case.accumulation, remat=case.remat, staging=staging
    )
    built = build_train_step(
        spec, OPTIMIZER, build_schedule(OPTIMIZER, 10, 8), mesh, rules, config
    )
    state, batch = fresh(built), jax.device_put(BATCH, built.batch_shardings(BATCH))
    inspect = built.inspect.lower(state, batch).compile(FAST_COMPILE)
    state, _, gradients = inspect(state, batch)
    state, metrics, _ = inspect(state, batch)
    gradients = staging.flat(gradients) if staging else gradients
    return jax.device_get((built.views.flat(state), metrics, gradients))


@pytest.mark.parametrize("name", CASES)
def test_every_layout_has_the_numbers_of_one_device(name):
    one, other = two_steps(), two_steps(name)
    (bias,), (there,) = (
        jax.tree.leaves(state.model_state) for state, *_ in (one, other)
    )
    np.testing.assert_array_equal(there, bias)
    assert bias.shape == (5, 8)
    assert (np.abs(bias).max(-1) > 0).all()
    assert other[1]["loss"] == pytest.approx(one[1]["loss"], rel=1e-6)
    assert worst(other[2], one[2]) < 2e-6
    assert worst(other[0].trainable, one[0].trainable) < 2e-6
    for stat in ("load_entropy/min", "load_max_over_mean/max", "dropped"):
        assert other[1][f"stats/{stat}"] == pytest.approx(
            one[1][f"stats/{stat}"], rel=1e-6
        )
