"""What keeps experts even is that of the whole batch: for every split, on every device,
without padding.
"""

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxdist.models import experts
from jaxdist.models.transformer import TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, TINY, batch_of, fresh, spec_of, worst

E, K, ROWS, LENGTH = 8, 2, 16, 16
MODEL = dataclasses.replace(
    TINY, num_kv_heads=2, num_experts=E, experts_per_token=K, expert_d_ff=24
)
BALANCES = {
    "bias": dataclasses.replace(MODEL, balance="bias", scores="sigmoid"),
    "sequence": dataclasses.replace(MODEL, balance="sequence", balance_weight=1.0),
    "batch": dataclasses.replace(
        MODEL, balance="batch", balance_weight=1.0, router_z_loss=0.1
    ),
}
OPTIMIZER = OptimizerConfig(
    "sgd", learning_rate=0.1, warmup_steps=0, schedule="constant"
)


class Split(NamedTuple):
    """How a batch is cut up."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    accumulation: int = 1
    zero: int = 3
    reduce: str = "each"


SPLITS = {
    "expert 4 x fsdp 2, accumulation 2": Split(fsdp=2, expert=4, accumulation=2),
    "data 4 x expert 2, accumulation 2, summed once": Split(
        4, 1, 2, accumulation=2, reduce="once", zero=1
    ),
    "accumulation 4": Split(accumulation=4),
    "data 8": Split(data=8),
    "data 2, accumulation 8": Split(data=2, accumulation=8),
    "fsdp 8": Split(fsdp=8),
    "expert 8": Split(expert=8),
    "expert 2, accumulation 4": Split(expert=2, accumulation=4),
    "data 2 x fsdp 2 x expert 2": Split(2, 2, 2),
    "data 2 x fsdp 2 x expert 2, zero 1, accumulation 4": Split(
        2, 2, 2, accumulation=4, zero=1
    ),
}
ONE = Split()


def batch(padding: int = 0) -> dict[str, np.ndarray]:
    """Returns a packed batch: two documents a row and padding, tokens without weight,
    rows of padding alone.

    Args:
      padding: seed of what stands where nothing counts.
    """
    made = batch_of(MODEL, ROWS, LENGTH)
    row, cut = np.arange(LENGTH)[None, :], np.arange(ROWS)[:, None] % 7 + 3
    ids = np.where(row < cut, 1, np.where(row < 13, 2, 0)).astype(np.int32)
    ids[[3, 4, 5, 11]] = 0
    made["segment_ids"] = ids
    made["positions"] = np.where(row < cut, row, row - cut).astype(np.int32)
    made["weights"] = np.where(ids > 0, made["weights"] * (1 + row % 2), 0).astype(
        np.float32
    )
    # the last of a document: no token that counts sees them
    made["weights"][:, 11:] = 0
    idle = (made["weights"] == 0) & ((ids == 0) | (row >= 11))
    noise = np.random.default_rng(padding).integers(
        0, MODEL.vocab_size, (ROWS, LENGTH), np.int32
    )
    made["tokens"] = np.where(idle, noise, made["tokens"])
    return made


class Seen(NamedTuple):
    """What a step shows, on the host; and the state after it, on the devices."""

    metrics: dict[str, Any]
    gradients: Any
    model_state: Any
    after: Any


@lru_cache
def compiled(split: Split, model: TransformerConfig):
    rules, mesh = rules_and_mesh(
        zero=split.zero, data=split.data, fsdp=split.fsdp, expert=split.expert
    )
    config = StepConfig(
        accumulation=split.accumulation, reduce_over_replicas=split.reduce
    )
    schedule = build_schedule(OPTIMIZER, 10, ROWS)
    built = build_train_step(spec_of(model), OPTIMIZER, schedule, mesh, rules, config)
    inputs = built.abstract_batch(batch())
    return built, built.inspect.lower(built.abstract_state, inputs).compile(
        FAST_COMPILE
    )


@lru_cache
def step(split: Split, model: TransformerConfig, padding: int = 0) -> Seen:
    """Returns what a step shows whose state of the balance is not the first one."""
    built, program = compiled(split, model)
    state, inputs = fresh(built), batch(padding)
    moved = jax.tree.map(
        lambda x: (
            np.asarray(x)
            + 0.05 * np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
        ),
        state.model_state,
    )
    state = state._replace(
        model_state=jax.device_put(moved, built.shardings.model_state)
    )
    after, metrics, gradients = program(
        state, jax.device_put(inputs, built.batch_shardings(inputs))
    )
    return Seen(*jax.device_get((metrics, gradients, after.model_state)), after)


def check_split(split: Split, balance: str) -> None:
    one, seen = step(ONE, BALANCES[balance]), step(split, BALANCES[balance])
    for name in (name for name in one.metrics if name.startswith(("loss", "aux/"))):
        assert seen.metrics[name] == pytest.approx(one.metrics[name], rel=1e-6), name
    load = one.metrics[f"stats/{experts.LOAD_METRIC}"]
    np.testing.assert_array_equal(seen.metrics[f"stats/{experts.LOAD_METRIC}"], load)
    assert worst(seen.gradients, one.gradients) < 2e-6
    jax.tree.map(np.testing.assert_array_equal, seen.model_state, one.model_state)
    assert copies_that_differ(seen.after) == []


def copies_that_differ(state: Any) -> list[str]:
    """Returns the leaves of which two devices hold other values for the same part."""
    differ, copies = [], 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            part, held = str(shard.index), np.asarray(shard.data).tobytes()
            copies += part in parts
            if parts.setdefault(part, held) != held:
                differ.append(jax.tree_util.keystr(path))
    assert copies or len(jax.tree.leaves(state)[0].addressable_shards) == 1
    return differ


@pytest.mark.slow
def test_a_split_of_the_batch_changes_nothing():
    check_split(next(iter(SPLITS.values())), "batch")


@pytest.mark.slow
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("name", SPLITS)
def test_no_split_of_the_batch_changes_anything(name, balance):
    check_split(SPLITS[name], balance)


def test_copies_that_differ_are_found():
    mesh = jax.make_mesh((2,), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape, devices = (3,), mesh.devices.ravel()
    for second, expected in ((0.0, []), (1e-45, ["['x']"])):
        parts = [
            jax.device_put(np.full(shape, x, np.float32), d)
            for x, d in zip((0.0, second), devices, strict=True)
        ]
        leaf = jax.make_array_from_single_device_arrays(shape, where, parts)
        assert copies_that_differ({"x": leaf}) == expected


_BATCH_FIRST = [
    "batch",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sequence", "bias")),
]


@pytest.mark.slow
@pytest.mark.parametrize("balance", _BATCH_FIRST[:2])
def test_the_balance_has_a_gradient_of_its_weight(balance):
    """A part of the batch that divided its terms by a count of its own would make it
    too small.
    """
    seen = step(ONE, BALANCES[balance])
    assert 0.8 < seen.metrics["aux/balance"] / MODEL.num_layers < 2
    plain = step(ONE, dataclasses.replace(BALANCES[balance], balance_weight=1e-30))
    routers = [x.gradients["blocks"]["mlp"]["router"] for x in (seen, plain)]
    assert np.linalg.norm(routers[0] - routers[1]) > 0.25 * np.linalg.norm(routers[1])


@pytest.mark.parametrize("balance", _BATCH_FIRST)
def test_padding_and_tokens_without_weight_count_nowhere(balance):
    one, other = step(ONE, BALANCES[balance]), step(ONE, BALANCES[balance], padding=1)
    counted = int((batch()["weights"] > 0).sum())
    load = one.metrics[f"stats/{experts.LOAD_METRIC}"]
    assert 0 < counted < 0.6 * ROWS * LENGTH
    assert (load.sum(-1) == K * counted).all()
    np.testing.assert_array_equal(other.metrics[f"stats/{experts.LOAD_METRIC}"], load)
    assert worst(other.gradients, one.gradients) < 2e-6
    jax.tree.map(np.testing.assert_array_equal, other.model_state, one.model_state)
    for name in (name for name in one.metrics if name.startswith(("loss", "aux/"))):
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-6), name
