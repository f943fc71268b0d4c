"""The pipeline equals one device: loss, gradients, update and evaluation of every
schedule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxdist.models.transformer import TransformerConfig
from jaxdist.parallel.pipeline.schedules import table as schedules
from support.models import FAST_COMPILE, worst
from support.pipelines import LENGTH, MODEL, SEVEN, Case, batch_for, build

# A place holds whole patterns: of two stages the last has one layer of padding.
LOCAL = replace(
    SEVEN,
    layer_pattern=("local", "nope"),
    window=5,
    rope_theta_local=100.0,
    rope_query_growth=0.5,
    rope_original_positions=4,
)
# With weights that large (0.2), bfloat16 noise grows tenfold on its way through eight
# layers.
CALM = replace(MODEL, init_std=0.05)
TIED = {"tie_embeddings": True}


class Result(NamedTuple):
    """What one step gave, as numpy arrays with flat layers."""

    loss: float
    z_loss: float
    gradients: Any
    trainable: Any
    evaluated: tuple[float, float]


def one_device(case: Case) -> Case:
    return Case(stages=1, model=case.model, packed=case.packed, compute=case.compute)


@lru_cache
def fresh_state(model: TransformerConfig):
    """Returns the state on one device before the first step, as numpy arrays."""
    built = build(Case(stages=1, model=model))
    return jax.device_get(built.init.lower().compile(FAST_COMPILE)())


def run(case: Case) -> Result:
    """Returns what a step from the same fresh state does; checks the gradients'
    shardings.
    """
    built, cut = build(case), case.staging
    state = fresh_state(case.model)
    state = jax.device_put(cut.by_stage(state) if cut else state, built.shardings)
    batch = batch_for(case)
    batch = jax.device_put(batch, built.batch_shardings(batch))
    evaluated = built.evaluate.lower(state, batch).compile(FAST_COMPILE)(state, batch)
    inspect = built.inspect.lower(state, batch).compile(FAST_COMPILE)
    after, metrics, gradients = inspect(state, batch)
    # With ZeRO 2 parameters are whole and gradients in shards, as the parameters of
    # ZeRO 3 are.
    wanted = (
        build(case._replace(zero=3)) if case.zero == 2 else built
    ).shardings.trainable
    assert all(
        g.sharding.is_equivalent_to(where, g.ndim)
        for g, where in _pairs(gradients, wanted)
    )
    gradients, trainable = (
        cut.flat(t) if cut else t for t in (gradients, after.trainable)
    )
    return Result(
        *(float(metrics[name]) for name in ("loss", "aux/z_loss")),
        jax.device_get(gradients),
        jax.device_get(trainable),
        tuple(map(float, evaluated[:2])),
    )


def _pairs(one, other):
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


reference = lru_cache(run)


def moved(one, other) -> float:
    """Returns max over leaves of |difference| / |reference|, Euclidean."""
    return max(
        float(
            np.linalg.norm((a - np.float64(b)).ravel())
            / np.linalg.norm(np.float64(b).ravel())
        )
        for a, b in _pairs(one, other)
    )


class Errors(NamedTuple):
    """How far a pipeline is from one device, relative."""

    loss: float
    evaluation: float
    gradient: float
    parameter: float


def errors(case: Case) -> Errors:
    found, wanted = run(case), reference(one_device(case))
    assert wanted.z_loss > 0
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(wanted.gradients))
    # the step does something
    assert moved(wanted.trainable, fresh_state(case.model).trainable) > 1e-3
    assert found.evaluated[1] == wanted.evaluated[1] > 0
    return Errors(
        max(abs(found.loss / wanted.loss - 1), abs(found.z_loss / wanted.z_loss - 1)),
        abs(found.evaluated[0] / wanted.evaluated[0] - 1),
        worst(found.gradients, wanted.gradients),
        moved(found.trainable, wanted.trainable),
    )


FLOAT32, BFLOAT16 = Errors(1e-6, 1e-6, 1e-5, 1e-6), Errors(1e-3, 1e-3, 2e-2, 2e-2)


def check(case: Case) -> None:
    assert case.devices <= len(jax.devices())
    bands = BFLOAT16 if case.compute == "bfloat16" else FLOAT32
    found = errors(case)
    print(f"\n{found}")
    assert all(error <= band for error, band in zip(found, bands, strict=True)), found


# The default suite: every mechanism at least once, several in a case, since a case
# compiles four programs.
FEW = {
    "interleaved": Case(4, 4, 2, "interleaved"),
    "tied, packed, tensor, zero 2, accumulation": Case(
        2,
        2,
        fsdp=2,
        tensor=2,
        zero=2,
        packed=True,
        accumulation=2,
        model=replace(MODEL, **TIED),
    ),
}

MANY = (
    {
        "last edges, tied, dropout": Case(
            2,
            4,
            fsdp=2,
            tensor=2,
            edges="last",
            model=replace(MODEL, dropout=0.1, **TIED),
        ),
        "uneven groups of layers": Case(2, 4, fsdp=2, every=2, model=LOCAL),
    }
    | {
        f"{p} stages, {m} microbatches, {v} chunks": Case(
            p, m, v, "interleaved" if v > 1 else "1f1b"
        )
        for p in (2, 4)
        for m in (4, 8, 16)
        for v in (1, 2)
    }
    | {
        "interleaved, fsdp and tensor": Case(2, 4, 2, "interleaved", fsdp=2, tensor=2),
        "tied, fsdp and tensor": Case(
            2, 4, fsdp=2, tensor=2, model=replace(MODEL, **TIED)
        ),
        "with fsdp and tensor": Case(2, 4, fsdp=2, tensor=2),
        "uneven, tied, dropout": Case(4, 4, model=replace(SEVEN, dropout=0.1, **TIED)),
        "packed, zero 2, accumulation": Case(
            2, 2, fsdp=2, zero=2, packed=True, accumulation=2
        ),
        "last edges, tied, fsdp and tensor": Case(
            2, 4, fsdp=2, tensor=2, edges="last", model=replace(MODEL, **TIED)
        ),
        "groups of layers, dropout": Case(
            2, 4, fsdp=2, every=2, model=replace(LOCAL, dropout=0.1)
        ),
        "data": Case(4, 8, data=2),
        "zero 1": Case(2, 4, fsdp=2, zero=1),
        "zero 2": Case(2, 4, fsdp=2, zero=2),
        "zero 3": Case(4, 4, fsdp=2, zero=3),
        "two stages": Case(),
        "accumulation": Case(2, 2, accumulation=2),
        "packed, zero 2": Case(2, 4, fsdp=2, zero=2, packed=True),
        "local and global": Case(2, 4, model=LOCAL),
        "seven layers": Case(4, 8, model=SEVEN),
        "seven layers, interleaved": Case(2, 4, 2, "interleaved", model=SEVEN),
        "local and global, fsdp and tensor": Case(
            2, 4, 2, "interleaved", fsdp=2, tensor=2, model=LOCAL
        ),
        "local and global, from stage inputs": Case(
            2, 4, 2, "interleaved", remat="none", model=LOCAL
        ),
        "tied": Case(4, 4, model=replace(MODEL, **TIED)),
        # Without biases: that of keys has no gradient but noise, where positions are
        # learned.
        "learned positions": Case(
            4, 4, model=replace(MODEL, positions="learned", max_positions=LENGTH)
        ),
        "dropout": Case(4, 8, model=replace(MODEL, dropout=0.1)),
        "dropout, data, accumulation": Case(
            2,
            2,
            2,
            "interleaved",
            data=2,
            accumulation=2,
            model=replace(MODEL, dropout=0.1),
        ),
        "packed": Case(4, 8, packed=True),
        "packed, interleaved": Case(2, 4, 2, "interleaved", packed=True),
        "last edges": Case(4, 8, edges="last", model=replace(MODEL, dropout=0.1)),
        "last edges, interleaved, packed": Case(
            2, 4, 2, "interleaved", edges="last", packed=True
        ),
        "last edges, zero 2, accumulation": Case(
            2, 4, edges="last", fsdp=2, zero=2, accumulation=2
        ),
        "last edges, bfloat16": Case(
            2, 4, edges="last", fsdp=2, compute="bfloat16", model=CALM
        ),
        "gathered once": Case(2, 4, fsdp=2, tensor=2, gather_once=True),
        "from stage inputs": Case(
            2, 4, remat="none", model=replace(SEVEN, dropout=0.1)
        ),
        "from stage inputs, interleaved, fsdp": Case(
            2, 4, 2, "interleaved", fsdp=2, remat="none"
        ),
        "gpipe": Case(4, 8, schedule="gpipe"),
        "gpipe, from stage inputs": Case(4, 8, schedule="gpipe", remat="none"),
        "rematerialised layers": Case(2, 4, remat="full"),
        "groups of layers, padding": Case(2, 4, every=4, model=SEVEN),
        "groups of layers, interleaved, tensor": Case(
            2, 4, 2, "interleaved", tensor=2, every=2
        ),
        "bfloat16": Case(4, 8, compute="bfloat16", model=CALM),
        "bfloat16, fsdp and tensor": Case(
            2, 4, fsdp=2, tensor=2, compute="bfloat16", model=CALM
        ),
    }
)


@pytest.mark.parametrize("name", FEW)
def test_a_pipeline_equals_one_device(name):
    check(FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_every_pipeline_equals_one_device(name):
    check(MANY[name])


@pytest.mark.slow
def test_a_schedule_from_a_file_equals_one_device(tmp_path: Path):
    path = tmp_path / "mine.json"
    table = schedules.build_schedule("1f1b", 2, 4, 1)
    schedules.write_schedule(table, path)
    check(Case(2, 4, schedule=str(path)))
