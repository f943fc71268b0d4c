"""Memory of gradients: accumulation steps and pipelines add to one tree in place."""

import jax
import numpy as np
import pytest

from jaxdist.models.transformer import TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.step.step_config import StepConfig
from support.models import (
    FAST_COMPILE,
    ONE,
    Layout,
    batch_of,
    fresh,
    program_of,
    step_of,
    worst,
)
from support.pipelines import Case
from support.pipelines import build as build_pipeline

# Gradients are nearly all of the memory: short sequences, little vocabulary.
WIDE = TransformerConfig(
    vocab_size=64,
    num_layers=8,
    d_model=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    d_ff=512,
)
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=1)
LENGTH = 8
ACCUMULATION = 4


def gradient_bytes() -> int:
    """Returns the bytes of a whole tree of gradients in float32."""
    trainable = step_of(ONE, WIDE).abstract_state.trainable
    return sum(4 * x.size for x in jax.tree.leaves(trainable))


def temp_bytes(accumulation: int, layout: Layout, policy: str) -> int:
    """Returns the temporary bytes of a step on a device, for equal accumulation steps."""
    program = program_of(
        layout,
        WIDE,
        StepConfig(accumulation=accumulation, remat=policy),
        batch=2 * accumulation * layout.devices,
        length=LENGTH,
        optimizer=SGD,
    )
    return program.memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("layout", "policy"),
    [(ONE, "full"), (ONE, "dots"), (Layout(4, data=4), "full")],
    ids=["one device", "dots", "data"],
)
def test_accumulation_holds_one_tree_of_gradients(layout, policy):
    whole = gradient_bytes()
    one = temp_bytes(1, layout, policy)
    assert one > whole
    assert temp_bytes(ACCUMULATION, layout, policy) < one + 0.2 * whole


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_holds_one_tree_of_gradients(accumulation):
    """A half of the whole tree. The compiler for CPUs copies it once, between loops.

    A chunk's gradients of their own, and the loop that stacks them, took 4.4 halves.
    """
    case = Case(2, 4, model=WIDE, accumulation=accumulation)
    built = build_pipeline(case, "full", optimizer=SGD)
    batch = batch_of(WIDE, 8 * accumulation, LENGTH)
    lowered = built.step.lower(built.abstract_state, built.abstract_batch(batch))
    temp = lowered.compile(FAST_COMPILE).memory_analysis().temp_size_in_bytes
    half = gradient_bytes() / 2
    assert half < temp < 2.5 * half


@pytest.mark.slow
def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    """jax could add them in place in bfloat16 only."""
    batch = batch_of(WIDE, 8, LENGTH)
    gradients = []
    for accumulation in (1, ACCUMULATION):
        step = StepConfig(accumulation=accumulation, params="bfloat16")
        built = step_of(ONE, WIDE, step)
        gradients.append(built.inspect(fresh(built), batch)[2])
    dtypes = {x.dtype for x in jax.tree.leaves(gradients[1])}
    assert dtypes == {np.dtype("float32")}
    assert 0 < worst(gradients[1], gradients[0]) < 2**-7
