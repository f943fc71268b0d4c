"""Small models, batches and compiled steps that tests share; a program is built once a
session.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import mesh as meshes
from jaxdist.parallel import sharding
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.step.state import State
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import TrainStep, build_train_step
from jaxdist.telemetry import hlo

TINY = TransformerConfig(
    vocab_size=64,
    num_layers=2,
    d_model=32,
    d_ff=48,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    init_std=0.2,
)
# Large enough that saved activations, not the loss or the gradients, make the peak. No
# two dims and no product of two are equal, so that a shape in a program says what it
# is.
DEEP = TransformerConfig(
    vocab_size=72,
    num_layers=6,
    d_model=64,
    d_ff=176,
    num_heads=8,
    num_kv_heads=4,
    head_dim=12,
)
# The shape `quick` of benchmarks/step/step.py.
QUICK = TransformerConfig(
    vocab_size=4096,
    num_layers=4,
    d_model=256,
    d_ff=688,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)
# same HLO and buffers, worse machine code
FAST_COMPILE = {"xla_backend_optimization_level": 0}
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=1)


class Layout(NamedTuple):
    """A mesh over the first devices."""

    devices: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: int = 3
    sequence_parallel: bool = False
    context: int = 1
    attention: str = "auto"


ONE = Layout()
FSDP = Layout(8, fsdp=8)
MIXED = Layout(8, data=2, fsdp=2, tensor=2)


def rules_and_mesh(layout: Layout) -> tuple[sharding.Rules, jax.sharding.Mesh]:
    """Returns the rule table and the mesh of a layout."""
    config = meshes.MeshConfig(
        data=layout.data,
        fsdp=layout.fsdp,
        tensor=layout.tensor,
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        context=layout.context,
    )
    mesh = meshes.build_mesh(config, jax.devices()[: layout.devices])
    shape = meshes.resolve_mesh(config, layout.devices)
    return sharding.build_rules(config, shape, attention=layout.attention), mesh


@lru_cache
def spec_of(model: TransformerConfig = TINY) -> ModelSpec:
    """Returns the spec of a transformer."""
    return describe(lambda rngs: Transformer(model, rngs=rngs))


@lru_cache
def step_of(
    layout: Layout = ONE,
    model: TransformerConfig = TINY,
    step: StepConfig = StepConfig(),  # noqa: B008 (frozen)
    optimizer: OptimizerConfig = OPTIMIZER,
) -> TrainStep:
    """Returns the built step; its programs compile when they are first called."""
    rules, mesh = rules_and_mesh(layout)
    schedule = build_schedule(optimizer, 1000, 8)
    return build_train_step(spec_of(model), optimizer, schedule, mesh, rules, step)


def batch_of(
    model: TransformerConfig = TINY, batch: int = 8, length: int = 16
) -> dict[str, Any]:
    """Returns a numpy batch whose samples have unequal weights (one has none from its
    third on).
    """
    random = np.random.default_rng(0)
    tokens = random.integers(0, model.vocab_size, (batch, length + 1), dtype=np.int32)
    weights = np.ones((batch, length), np.float32)
    weights[1, 2:] = 0
    positions = np.broadcast_to(
        np.arange(length, dtype=np.int32)[None], (batch, length)
    )
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights,
        "positions": np.ascontiguousarray(positions),
        "sample": np.arange(batch, dtype=np.int32),
    }


class Program(NamedTuple):
    """A compiled train step (for analysis: its machine code is not optimised)."""

    compiled: Any
    module: hlo.Module
    memory: Any
    step: TrainStep


@lru_cache
def program_of(
    layout: Layout = ONE,
    model: TransformerConfig = TINY,
    step: StepConfig = StepConfig(),  # noqa: B008 (frozen)
    batch: int = 8,
    length: int = 16,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Program:
    """Returns the compiled train step, its HLO and its memory per device."""
    built = step_of(layout, model, step, optimizer)
    example = batch_of(model, batch, length)
    compiled = built.step.lower(
        built.abstract_state, built.abstract_batch(example)
    ).compile(FAST_COMPILE)
    return Program(
        compiled, hlo.parse(compiled.as_text()), compiled.memory_analysis(), built
    )


@lru_cache
def init_of(
    layout: Layout = ONE,
    model: TransformerConfig = TINY,
    step: StepConfig = StepConfig(),  # noqa: B008 (frozen)
    optimizer: OptimizerConfig = OPTIMIZER,
) -> Any:
    """Returns the compiled `() -> State`."""
    return step_of(layout, model, step, optimizer).init.lower().compile(FAST_COMPILE)


def fresh(built: TrainStep) -> State:
    """Returns the state before the first step, as `built.init()` does, whose program
    takes twice as long to compile.
    """
    return built.init.lower().compile(FAST_COMPILE)()


class Result(NamedTuple):
    """What one step gave, as numpy arrays."""

    state: State
    metrics: dict[str, Any]
    gradients: Any


def run(
    layout: Layout = ONE,
    model: TransformerConfig = TINY,
    step: StepConfig = StepConfig(),  # noqa: B008 (frozen)
    optimizer: OptimizerConfig = OPTIMIZER,
    batch: dict[str, Any] | None = None,
) -> Result:
    """Returns state, metrics and mean gradients after one step from a fresh state."""
    built = step_of(layout, model, step, optimizer)
    state = init_of(layout, model, step, optimizer)()
    given = batch_of(model) if batch is None else batch
    placed = jax.device_put(given, built.batch_shardings(given))
    inspect = built.inspect.lower(state, placed).compile(FAST_COMPILE)
    return Result(*jax.device_get(inspect(state, placed)))


def worst(ours: Any, reference: Any) -> float:
    """Returns max over leaves of max|difference| / max|reference|."""
    errors = jax.tree.map(
        lambda a, b: float(
            np.abs(np.asarray(a, np.float64) - b).max() / (np.abs(b).max() or 1)
        ),
        ours,
        reference,
    )
    return max(jax.tree.leaves(errors))


def bitwise_equal(one: Any, other: Any) -> bool:
    """Returns whether two trees have the same bits."""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@lru_cache
def model_of(config: TransformerConfig) -> Transformer:
    """Returns a fresh model (made in one program, which is faster than array
    by array).
    """
    spec = spec_of(config)
    build = jax.jit(
        lambda: spec.init_params(jax.random.key(0)), compiler_options=FAST_COMPILE
    )
    return spec.assemble(*build())
