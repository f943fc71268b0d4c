"""The exact held-out loss: no mean of means, any batch size, any mesh, devices kept
busy.
"""

import functools
import math

import jax
import numpy as np
import pytest

from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import sharding
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.protocols.model_spec import describe
from jaxdist.step import evaluation
from jaxdist.step.evaluation import evaluate
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step

ROWS, LENGTH = 11, 8
MODEL = TransformerConfig(
    vocab_size=16,
    num_layers=1,
    d_model=8,
    d_ff=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    init_std=0.5,
)


def held_out() -> dict[str, np.ndarray]:
    """Returns all rows; they differ much in how many targets count."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, MODEL.vocab_size, (ROWS, LENGTH + 1), np.int32)
    weights = np.arange(LENGTH)[None, :] < random.integers(1, LENGTH + 1, (ROWS, 1))
    assert weights.sum() not in (0, ROWS * LENGTH)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights.astype(np.float32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "sample": np.arange(ROWS, dtype=np.int32),
    }


@functools.cache
def step_on(**axes: int):
    """Returns the built step and its first state on a mesh."""
    config = MeshConfig(**(axes or {"data": 1}))
    mesh = build_mesh(config, jax.devices()[: math.prod(axes.values())])
    rules = sharding.build_rules(config, resolve_mesh(config, mesh.size))
    spec = describe(lambda rngs: Transformer(MODEL, rngs=rngs))
    optimizer = OptimizerConfig()
    schedule = build_schedule(optimizer, 1000, 4)
    built = build_train_step(spec, optimizer, schedule, mesh, rules, StepConfig())
    return built, built.init()


def batches(built, size: int):
    """Yields the rows in batches, the last one filled with rows of weight 0."""
    rows = held_out()
    for start in range(0, ROWS, size):
        part = {name: values[start : start + size] for name, values in rows.items()}
        short = size - len(part["tokens"])
        part = {
            n: np.pad(v, [(0, short)] + [(0, 0)] * (v.ndim - 1))
            for n, v in part.items()
        }
        yield jax.device_put(part, built.batch_shardings(part))


def test_batch_size_and_mesh_do_not_matter():
    one, mesh = step_on(), step_on(data=2, fsdp=2, tensor=2)
    sums = [row_sums(*one, row) for row in range(ROWS)]
    total, count = np.sum(sums, axis=0)
    means = np.mean([s / c for s, c in sums])
    assert abs(means - total / count) > 1e-3  # a mean of means would be seen
    for (built, state), size in ((one, 3), (one, 11), (mesh, 4)):
        found = evaluate(built.evaluate, state, batches(built, size))
        assert found.loss == pytest.approx(total / count, rel=1e-6)
        assert found.tokens == held_out()["weights"].sum()
        assert isinstance(found.tokens, int)


def row_sums(built, state, row: int) -> tuple[float, float]:
    batch = {name: values[row : row + 1] for name, values in held_out().items()}
    total, count, _ = built.evaluate(state, batch)
    return float(total), float(count)


def test_sums_are_added_in_double_precision():
    # In float32 the small sums would vanish beside the first.
    sums = [(np.float32(2**25), np.float32(2**24))] + [
        (np.float32(1), np.float32(1))
    ] * 1001
    found = evaluate(lambda _, batch: (*batch, {}), None, sums)
    assert np.float32(2**24) + np.float32(1) == np.float32(2**24)
    assert found.tokens == 2**24 + 1001
    assert found.loss == (2**25 + 1001) / (2**24 + 1001)


def test_results_are_read_a_few_batches_late(monkeypatch):
    log = []
    monkeypatch.setattr(
        evaluation.jax, "device_get", lambda sums: log.append("read") or sums
    )

    def evaluate_fn(_, batch):
        log.append("given")
        return 2.0 * batch, 1.0 * batch, {}

    found = evaluate(evaluate_fn, None, [1.0] * 9)
    assert found[:2] == (2.0, 9)
    assert log[:6] == ["given"] * 5 + ["read"]
    assert log.count("read") == log.count("given") == 9


def test_fractional_weights_and_units():
    found = evaluate(lambda *_: (3.0, 2.5, {}), None, [None])
    assert found[:2] == (1.2, 2.5)
    assert found.perplexity == pytest.approx(math.exp(1.2))
    assert found.bits_per_byte(4.0) == pytest.approx(1.2 / math.log(2) / 4)
    assert evaluate(lambda *_: (1e6, 1.0, {}), None, [None]).perplexity == math.inf


@pytest.mark.parametrize("sums", [[], [(0.0, 0.0, {})]])
def test_nothing_to_score_is_an_error(sums):
    with pytest.raises(ValueError, match="no target with a weight"):
        evaluate(lambda _, batch: batch, None, sums)
