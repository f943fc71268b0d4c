"""A block's stats: one row a layer, equal on every layout, and handed to the model's
update once a step.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import sharding
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.protocols.model import BlockOutput
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.models import FAST_COMPILE, batch_of, fresh, worst

# five layers: stages hold padding
LAYERS, WIDTH, INNER, EXPERTS, VOCABULARY = 5, 16, 32, 4, 64
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=0, schedule="constant")
BATCH = batch_of()


def kernel(rngs: nnx.Rngs, dims: tuple, names: tuple) -> nnx.Param:
    return nnx.Param(
        jax.random.normal(rngs.params(), dims) * dims[0] ** -0.5, logical=names
    )


class Routed(nnx.Module):
    """Counts which of its experts (gates of one product) each token chooses; a bias
    steers that.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.router = kernel(rngs, (WIDTH, EXPERTS), ("d_model", None))
        self.up = kernel(rngs, (WIDTH, INNER), ("d_model", "d_ff"))
        self.down = kernel(rngs, (INNER, WIDTH), ("d_ff", "d_model"))
        self.bias = nnx.Variable(jnp.zeros(EXPERTS))

    def __call__(self, x, info):
        scores = jax.nn.softmax(x @ self.router[...])
        chosen = jax.nn.one_hot(
            jnp.argmax(scores + self.bias[...][None, None], -1), EXPERTS
        )
        gate = (scores * chosen).sum(-1, keepdims=True)
        y = x + gate * (jnp.tanh(x @ self.up[...]) @ self.down[...])
        return BlockOutput(
            y, {"balance": (scores**2).sum() / 100}, {"chosen": chosen.sum((0, 1))}
        )


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.table = kernel(rngs, (VOCABULARY, WIDTH), ("vocab", "d_model"))
        self.blocks = nnx.split_rngs(splits=LAYERS)(
            nnx.vmap(Routed, in_axes=0, out_axes=0)
        )(rngs)
        self.output = kernel(rngs, (WIDTH, VOCABULARY), ("d_model", "vocab"))
        self.chosen, self.seen = (
            nnx.Variable(jnp.zeros((LAYERS, EXPERTS))),
            nnx.Variable(jnp.zeros(())),
        )

    def embed(self, batch):
        return jnp.tanh(4 * self.table[...])[batch["tokens"]]

    def head(self, x, batch):
        each = jax.nn.log_softmax(x @ self.output[...]) * jax.nn.one_hot(
            batch["targets"], VOCABULARY
        )
        weights = batch["weights"]
        return (
            -(each.sum(-1) * weights).sum(),
            weights.sum(),
            {},
            {"seen": weights.sum()},
        )

    def update(self, stats):
        counts = stats["chosen"]
        assert counts.shape == (LAYERS, EXPERTS)
        self.blocks.bias[...] -= 0.01 * jnp.sign(
            counts - counts.mean(-1, keepdims=True)
        )
        self.chosen[...] += counts
        self.seen[...] += stats["seen"]


class Case(NamedTuple):
    mesh: MeshConfig = MeshConfig()
    accumulation: int = 1
    remat: str = "none"
    pipeline: PipelineConfig | None = None


CASES = {
    "remat, accumulation": Case(
        MeshConfig(data=2, tensor=2), accumulation=2, remat="full"
    ),
    "1f1b": Case(
        MeshConfig(data=2, tensor=2, pipeline=2),
        2,
        pipeline=PipelineConfig(microbatches=2),
    ),
    "interleaved": Case(
        MeshConfig(data=2, tensor=2, pipeline=2),
        accumulation=2,
        pipeline=PipelineConfig("interleaved", microbatches=2, chunks=2),
    ),
    "from stage inputs": Case(
        MeshConfig(fsdp=2, pipeline=2),
        pipeline=PipelineConfig(microbatches=4, remat="none", edges="last"),
    ),
}


@lru_cache
def two_steps(case: Case = Case()):  # noqa: B008 (frozen)
    """Returns the state, the metrics and the evaluation after two steps, and the first
    step's gradients.
    """
    sizes = case.mesh.data * case.mesh.fsdp * case.mesh.tensor * case.mesh.pipeline
    devices = abs(sizes)
    mesh, shape = (
        build_mesh(case.mesh, jax.devices()[:devices]),
        resolve_mesh(case.mesh, devices),
    )
    rules = sharding.build_rules(case.mesh, shape, vocab_over_stages=False)
    staging = case.pipeline and Staging(case.pipeline, LAYERS, case.mesh.pipeline)
    config = StepConfig(
        accumulation=case.accumulation, remat=case.remat, staging=staging
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
    evaluation = built.evaluate.lower(state, batch).compile(FAST_COMPILE)(state, batch)
    gradients = staging.flat(gradients) if staging else gradients
    return jax.device_get((built.views.flat(state), metrics, evaluation, gradients))


def test_each_layer_has_its_own_row():
    state, metrics, *_ = two_steps()
    chosen, targets = state.model_state["chosen"], BATCH["tokens"].size
    assert (chosen.sum(-1) == 2 * targets).all()
    assert len(np.unique(chosen, axis=0)) == LAYERS
    assert np.abs(state.model_state["blocks"]["bias"]).max() == pytest.approx(0.02)
    assert state.model_state["seen"] == 2 * BATCH["weights"].sum()
    assert metrics["aux/balance"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "remat, accumulation",
        # `interleaved` is the same with two chunks
        pytest.param("1f1b", marks=pytest.mark.slow),
        "interleaved",
        pytest.param("from stage inputs", marks=pytest.mark.slow),
    ],
)
def test_the_counts_of_every_layout_are_those_of_one_device(name):
    one, other = two_steps(), two_steps(CASES[name])
    jax.tree.map(
        np.testing.assert_array_equal, other[0].model_state, one[0].model_state
    )
    assert other[1]["loss"] == pytest.approx(one[1]["loss"], rel=1e-6)
    assert other[1]["aux/balance"] == pytest.approx(one[1]["aux/balance"], rel=1e-6)
    (*sums, aux), (*expected, expected_aux) = other[2], one[2]
    assert [float(x) for x in sums] == pytest.approx(
        [float(x) for x in expected], rel=1e-6
    )
    assert aux.keys() == expected_aux.keys() == {"aux/balance"}
    for term, ratio in aux.items():
        assert [float(x) for x in ratio] == pytest.approx(
            [float(x) for x in expected_aux[term]], rel=1e-6
        )
    assert worst(other[3], one[3]) < 1e-5


def step_of(model: type[nnx.Module]):
    built = build_train_step(
        describe(lambda rngs: model(rngs=rngs)),
        OPTIMIZER,
        build_schedule(OPTIMIZER, 10, 8),
        build_mesh(MeshConfig(), jax.devices()[:1]),
        sharding.build_rules(MeshConfig(), resolve_mesh(MeshConfig(), 1)),
        StepConfig(),
    )
    return built.step.lower(built.abstract_state, BATCH)


def test_blocks_and_head_may_not_use_one_name():
    class Both(Model):
        def head(self, x, batch):
            return (*super().head(x, batch)[:3], {"chosen": jnp.zeros(())})

    with pytest.raises(
        ConfigError, match="blocks and head both return stats called chosen; rename"
    ):
        step_of(Both)


def test_what_a_block_may_return(monkeypatch):
    step = Routed.__call__
    forms = {
        1: lambda x: x,
        2: lambda x: (x, {"balance": jnp.zeros(())}),
        4: lambda x: (x, {}, {}, {}),
    }
    for form in forms.values():
        monkeypatch.setattr(
            Routed,
            "__call__",
            lambda self, x, info, form=form: form(step(self, x, info).x),
        )
        monkeypatch.setattr(Model, "update", lambda self, stats: None)
        if form is not forms[4]:
            assert step_of(Model)
            continue
        with pytest.raises(
            ConfigError, match=r"a block returned .*required: x, \(x, aux\) or"
        ):
            step_of(Model)
