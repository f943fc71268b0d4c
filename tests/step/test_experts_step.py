"""A user's own block with `ops.experts` in whole train steps: every layout has the
numbers of one device.
"""

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.ops.experts import experts, route
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.parallel.remat import RematConfig
from jaxdist.protocols.model import BlockOutput
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, batch_of, fresh, worst

pytestmark = pytest.mark.slow

LAYERS, WIDTH, INNER, EXPERTS, K, VOCABULARY = 4, 16, 32, 8, 2, 64
# Not Adam, which divides the rounding of tiny gradients by their size.
OPTIMIZER = OptimizerConfig(
    "sgd", learning_rate=1.0, warmup_steps=0, schedule="constant"
)
BATCH = batch_of()


def kernel(rngs: nnx.Rngs, dims: tuple, names: tuple) -> nnx.Param:
    return nnx.Param(
        jax.random.normal(rngs.params(), dims) * dims[-2] ** -0.5, logical=names
    )


class Sparse(nnx.Module):
    """A block of a router and experts, nothing else."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = kernel(rngs, (WIDTH, EXPERTS), ("d_model", None))
        self.gate = kernel(
            rngs, (EXPERTS, WIDTH, INNER), ("experts", "d_model", "d_ff")
        )
        self.up = kernel(rngs, (EXPERTS, WIDTH, INNER), ("experts", "d_model", "d_ff"))
        self.down = kernel(
            rngs, (EXPERTS, INNER, WIDTH), ("experts", "d_ff", "d_model")
        )
        self.bias = nnx.Variable(jnp.zeros(EXPERTS, jnp.float32))

    def __call__(self, x, info):
        routing = route(x @ self.router[...], K, bias=self.bias[...])
        kernels = self.gate, self.up, self.down
        out = experts(
            x, routing.ids, routing.weights, *kernels, jax.nn.silu, exchange="rounds"
        )
        return BlockOutput(x + out.x, {}, {"load": out.stats.load})


class Model(nnx.Module):
    sums_over_samples = True

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = kernel(rngs, (VOCABULARY, WIDTH), ("vocab", "d_model"))
        self.blocks = nnx.split_rngs(splits=LAYERS)(
            nnx.vmap(Sparse, in_axes=0, out_axes=0)
        )(rngs)
        self.output = kernel(rngs, (WIDTH, VOCABULARY), ("d_model", "vocab"))
        self.load = nnx.Variable(jnp.zeros((LAYERS, EXPERTS), jnp.float32))

    def embed(self, batch):
        chosen = jax.nn.one_hot(batch["tokens"], VOCABULARY)
        return jnp.tanh(8 * chosen @ self.table[...])

    def head(self, x, batch):
        each = jax.nn.log_softmax(x @ self.output[...]) * jax.nn.one_hot(
            batch["targets"], VOCABULARY
        )
        return -(each.sum(-1) * batch["weights"]).sum(), batch["weights"].sum()

    def update(self, stats):
        load = stats["load"]
        self.blocks.bias[...] += 0.001 * jnp.sign(load.mean(-1, keepdims=True) - load)
        self.load[...] += load


class Case(NamedTuple):
    sizes: dict
    accumulation: int = 1
    remat: RematConfig | str = "none"
    pipeline: PipelineConfig | None = None
    reduce: str = "each"
    zero: int = 3


CASES = {
    "expert": Case({"expert": 8}),
    "accumulation, remat": Case({"expert": 4, "fsdp": 2}, accumulation=2, remat="full"),
    "groups of layers": Case(
        {"fsdp": 2, "expert": 4}, remat=RematConfig("full", every=2)
    ),
    "last layers": Case({"fsdp": 2, "expert": 2}, remat=RematConfig("dots", layers=1)),
    "tensor": Case({"fsdp": 2, "expert": 2, "tensor": 2}),
    "sums once a step": Case(
        {"data": 2, "expert": 2, "tensor": 2}, accumulation=2, reduce="once"
    ),
    "zero 1, sums once": Case(
        {"fsdp": 2, "expert": 2}, accumulation=2, reduce="once", zero=1
    ),
    "1f1b": Case({"pipeline": 2, "expert": 4}, pipeline=PipelineConfig(microbatches=2)),
    "1f1b, fsdp, tensor": Case(
        {"pipeline": 2, "fsdp": 2, "expert": 2},
        remat="full",
        pipeline=PipelineConfig(microbatches=2),
    ),
}


@lru_cache
def two_steps(name: str | None = None):
    """Returns the state and the metrics after two steps, and the gradients of the
    first.
    """
    case = CASES[name] if name else Case({"data": 1})
    rules, mesh = rules_and_mesh(zero=case.zero, **case.sizes)
    # this model's own code looks it up
    rules = dataclasses.replace(rules, vocab_over_stages=False)
    staging = case.pipeline and Staging(case.pipeline, LAYERS, case.sizes["pipeline"])
    config = StepConfig(
        accumulation=case.accumulation,
        remat=case.remat,
        staging=staging,
        reduce_over_replicas=case.reduce,
    )
    spec, schedule = (
        describe(lambda rngs: Model(rngs=rngs)),
        build_schedule(OPTIMIZER, 10, 8),
    )
    built = build_train_step(spec, OPTIMIZER, schedule, mesh, rules, config)
    state, batch = fresh(built), jax.device_put(BATCH, built.batch_shardings(BATCH))
    inspect = built.inspect.lower(state, batch).compile(FAST_COMPILE)
    state, _, gradients = inspect(state, batch)
    state, metrics, _ = inspect(state, batch)
    gradients = staging.flat(gradients) if staging else gradients
    return jax.device_get((built.views.flat(state), metrics, gradients))


@pytest.mark.parametrize("name", CASES)
def test_every_layout_has_the_numbers_of_one_device(name):
    one, other = two_steps(), two_steps(name)
    jax.tree.map(
        np.testing.assert_array_equal, other[0].model_state, one[0].model_state
    )
    assert one[0].model_state["load"].sum() == 2 * LAYERS * K * BATCH["tokens"].size
    assert np.abs(one[0].model_state["blocks"]["bias"]).max() > 0
    assert other[1]["loss"] == pytest.approx(one[1]["loss"], rel=1e-6)
    assert worst(other[2], one[2]) < 2e-6
    assert worst(other[0].trainable, one[0].trainable) < 2e-6
