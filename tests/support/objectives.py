"""Objectives with a frozen reference, and the layouts that they are trained on."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel import mesh as meshes
from jaxdist.parallel import sharding
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.protocols.model import Loss
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.protocols.objective import Objective, TokenObjective
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import TrainStep, build_train_step
from jaxdist.trainer import compose, validation
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig
from support.models import FAST_COMPILE, TINY

B, S = 16, 16
MODEL = replace(TINY, num_layers=4, num_kv_heads=2)
# not as deep as the policy, and another width
REFERENCE = replace(TINY, num_layers=6, d_model=16, loss_chunk=5)
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=1)


@dataclass(frozen=True)
class SumObjective(TokenObjective):
    """Next-token cross-entropy, written as an objective of three parts."""

    counts_targets = True

    def sample_loss(self, terms, sample):
        nats = -terms["log_probability"] * sample["weights"]
        return Loss(nats.sum(), sample["weights"].sum())


@dataclass(frozen=True)
class Preference(TokenObjective):
    """Prefers the first document of a row to the second, against a reference."""

    modules = ("reference",)

    def prepare(self, modules, batch):
        terms = modules["reference"](batch)
        both = jnp.stack([terms["log_probability"], terms["log_normalizer"]], -1)
        return {"reference": terms["log_probability"], "reference_terms": both}

    def sample_loss(self, terms, sample):
        gain = (terms["log_probability"] - sample["reference"]) * sample["weights"]
        first = jnp.where(sample["segment_ids"] == 1, gain, 0).sum()
        second = jnp.where(sample["segment_ids"] == 2, gain, 0).sum()
        loss = jax.nn.softplus(-0.5 * (first - second))
        # sums that hide nothing: of the prepared fields, and of the policy's terms
        aux = {
            "reference": 1e-3 * sample["reference_terms"].sum(),
            "spread": 1e-3 * jnp.square(terms["log_normalizer"]).sum(),
        }
        metrics = {"margin": first - second}
        return Loss(loss, jnp.float32(1), aux, metrics=metrics)


@dataclass(frozen=True)
class AgainstBase(Preference):
    """The same, and the reference is the policy without its adapters."""

    modules = ()
    base_module = "reference"


class Case(NamedTuple):
    """A layout, and how a step cuts up its batch."""

    sizes: tuple[tuple[str, int], ...] = ()
    accumulation: int = 1
    microbatches: int = 4
    attention: Any = "auto"
    reduce: Any = "auto"
    edges: Any = "sharded"
    zero: int = 3
    compute: str = "float32"

    @property
    def devices(self) -> int:
        return int(np.prod([1, *dict(self.sizes).values()]))

    @property
    def staging(self) -> Staging | None:
        stages = dict(self.sizes).get("pipeline", 1)
        config = PipelineConfig(microbatches=self.microbatches, edges=self.edges)
        return Staging(config, MODEL.num_layers, stages) if stages > 1 else None


def case(sizes: dict[str, int] | None = None, **options: Any) -> Case:
    return Case(tuple((sizes or {}).items()), **options)


@lru_cache
def _described(model_class: type, config: TransformerConfig) -> ModelSpec:
    return describe(lambda rngs: model_class(config, rngs=rngs))


def spec_for(
    objective: Objective,
    model: TransformerConfig = MODEL,
    reference: TransformerConfig = REFERENCE,
    model_class: type = Transformer,
) -> ModelSpec:
    """Returns the spec of a policy for an objective."""
    spec = _described(model_class, model)
    frozen = _described(Transformer, reference)
    return spec.trained_for(objective, dict.fromkeys(objective.modules, frozen))


def composition_for(
    run: RunConfig, objective: Objective, devices: int = 8
) -> Composition:
    """Composes a run whose objective has the run's model as its frozen modules."""
    spec = compose.model_spec(run)
    spec = spec.trained_for(objective, dict.fromkeys(objective.modules, spec))
    return validation.validate_on(run, devices, with_data=False, spec=spec)


def build(spec: ModelSpec, on: Case, **options: Any) -> TrainStep:
    """Returns the step of a layout; options are further ones of `StepConfig`."""
    config = meshes.MeshConfig(**dict(on.sizes), zero=on.zero)
    mesh = meshes.build_mesh(config, jax.devices()[: on.devices])
    shape = meshes.resolve_mesh(config, on.devices)
    rules = sharding.build_rules(
        config,
        shape,
        attention=on.attention,
        vocab_over_stages=on.edges == "sharded",
    )
    step = StepConfig(
        accumulation=on.accumulation,
        reduce_over_replicas=on.reduce,
        compute=on.compute,
        staging=on.staging,
        **options,
    )
    return build_train_step(spec, SGD, lambda _: jnp.float32(0.1), mesh, rules, step)


def batch_of_pairs() -> dict[str, np.ndarray]:
    """Returns rows of two documents of unequal lengths, the last of padding."""
    random = np.random.default_rng(0)
    ids = random.integers(0, MODEL.vocab_size, (B, S + 1), dtype=np.int32)
    place = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    cut = np.arange(B, dtype=np.int32)[:, None] % 8 + 4
    segments = np.where(place < cut, 1, np.where(place < S - 2, 2, 0))
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": (segments > 0).astype(np.float32),
        "positions": np.where(place < cut, place, place - cut).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "sample": np.arange(B, dtype=np.int32),
    }


class Result(NamedTuple):
    """What one step gave, as numpy arrays with flat layers."""

    metrics: dict[str, Any]
    gradients: Any
    trainable: Any
    evaluated: Any  # None where it was not asked for


def run(
    spec: ModelSpec,
    on: Case,
    batch: dict[str, np.ndarray],
    *,
    evaluates: bool = True,
    given: dict[str, np.ndarray] | None = None,
) -> Result:
    """Returns what a step from a fresh state does.

    Args:
      spec: the model and its objective.
      on: the layout.
      batch: arrays of numpy.
      evaluates: compiles and runs the evaluation, too.
      given: values of parameters that the state starts with, by path.
    """
    built, cut = build(spec, on), on.staging
    if given is None:
        state = built.init.lower().compile(FAST_COMPILE)()
    else:
        state = built.init(given)
    placed = jax.device_put(batch, built.batch_shardings(batch))
    evaluated = None
    if evaluates:
        evaluate = built.evaluate.lower(state, placed).compile(FAST_COMPILE)
        evaluated = evaluate(state, placed)
    inspect = built.inspect.lower(state, placed).compile(FAST_COMPILE)
    after, metrics, gradients = inspect(state, placed)
    trainable = after.trainable
    if cut:
        gradients = cut.flat(gradients)
        trainable = cut.flat(trainable)
    return Result(*jax.device_get((metrics, gradients, trainable, evaluated)))
