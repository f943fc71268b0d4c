"""Whole steps whose devices share out sequences: the numbers of one device, and what
crosses devices.
"""

import dataclasses
from functools import lru_cache

import jax
import numpy as np
import pytest

from jaxdist.parallel.remat import RematConfig
from jaxdist.step.step_config import StepConfig
from support.models import (
    DEEP,
    ONE,
    TINY,
    Layout,
    batch_of,
    fresh,
    program_of,
    step_of,
    worst,
)
from support.programs import collectives

B, S = 8, 128
# Several chunks of the loss in a device's part, whose last one is filled up; local and
# global layers.
MODEL = dataclasses.replace(
    TINY,
    num_kv_heads=2,
    loss_chunk=24,
    z_loss=1e-3,
    dropout=0.1,
    window=5,
    layer_pattern=("local", "global"),
)
LAYOUTS = {
    "context": Layout(8, context=8, attention="gather"),  # more devices than heads
    "mixed": Layout(8, fsdp=2, context=2, tensor=2),
    "zero_1": Layout(8, data=2, fsdp=2, context=2, zero=1),
    "sequence_parallel": Layout(
        8, context=4, tensor=2, sequence_parallel=True, attention="gather"
    ),
}
QUICK = ("mixed",)


def _batch() -> dict:
    batch = batch_of(MODEL, 8, 32)
    ends = np.arange(8)[:, None] + 13  # of the first document
    place = batch["positions"]
    batch["segment_ids"] = np.where(place < ends, 1, np.where(place < 30, 2, 0)).astype(
        np.int32
    )
    batch["positions"] = np.where(place < ends, place, place - ends).astype(np.int32)
    return batch


@lru_cache
def _observed(layout: Layout, accumulation: int = 1, remat: RematConfig | str = "dots"):
    """Returns the loss and the gradients of the first step."""
    built = step_of(layout, MODEL, StepConfig(accumulation=accumulation, remat=remat))
    batch = _batch()
    placed = jax.device_put(batch, built.batch_shardings(batch))
    assert placed["tokens"].addressable_shards[0].data.shape[1] == 32 // layout.context
    _, metrics, gradients = built.inspect(fresh(built), placed)
    return jax.device_get((metrics["loss"], gradients))


def _check(
    layout: Layout, accumulation: int = 1, remat: RematConfig | str = "dots"
) -> None:
    (loss, gradients), (wanted_loss, wanted) = (
        _observed(layout, accumulation, remat),
        _observed(ONE),
    )
    assert abs(loss / wanted_loss - 1) < 1e-6
    assert worst(gradients, wanted) < 2e-6


@pytest.mark.parametrize("name", QUICK)
def test_a_step_equals_one_device(name):
    _check(LAYOUTS[name], accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", [RematConfig("full", every=2), RematConfig("dots", layers=1)], ids=str
)
def test_layers_that_are_computed_again_otherwise(remat):
    _check(LAYOUTS["mixed"], remat=remat)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in QUICK])
def test_steps_equal_one_device(name):
    _check(LAYOUTS[name])


@pytest.mark.parametrize("form", ["heads", "gather"])
def test_what_crosses_devices(form):
    """An all-to-all of heads, or a gather of keys and values; nothing else is gathered
    but weights.
    """
    layout = Layout(8, fsdp=2, context=4, attention=form)
    module = program_of(layout, DEEP, StepConfig(remat="full"), B, S).module
    keys = (B // 2, S, DEEP.num_kv_heads, DEEP.head_dim)
    gathered = [shape for *_, shape in collectives(module, ("all-gather",))]
    swapped = [
        shape
        for *_, shape in collectives(module, ("all-to-all",))
        if shape[-1] == DEEP.head_dim
    ]
    # Forward, and again for the backward pass.
    assert gathered.count(keys) == (4 if form == "gather" else 0)
    assert bool(swapped) == (form == "heads")
    # of the loss, which all have a part of the vocabulary for
    rows = (B // 2, S, DEEP.d_model)
    assert not [shape for shape in gathered if shape not in (keys, rows) and S in shape]
    assert gathered.count(rows) == 1
    part = (B // 2, S // 4, DEEP.num_kv_heads, DEEP.head_dim)
    sums = [shape for *_, shape in collectives(module, ("reduce-scatter",))]
    assert sums.count(part) == (2 if form == "gather" else 0)
