"""Checks of a model's code, made by tracing it before anything compiles."""

import inspect
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from jaxdist.config import ConfigError, trees
from jaxdist.protocols.model import (
    Batch,
    Loss,
    as_metrics,
    has_metrics,
)
from jaxdist.protocols.model_spec import ModelSpec, Tree
from jaxdist.step.objective_fields import abstract_batch

METRICS = "metrics(self, batch) -> {name: sum, or (sum, count)}; rename it if it has another purpose"


def check_spec(spec: ModelSpec, *, stages: int) -> None:
    """Checks what shows without a batch.

    Args:
      spec: the model with flat blocks.
      stages: stages of the pipeline; 1 = no pipeline.

    Raises:
      ConfigError: the model cannot be trained.
    """
    faults = list(_spec_faults(spec, stages=stages))
    if faults:
        raise ConfigError(faults)


def _spec_faults(spec: ModelSpec, *, stages: int) -> Iterator[str]:
    """Yields the faults of a model that show without a batch.

    Args:
      spec: the model with flat blocks.
      stages: stages of the pipeline; 1 = no pipeline.
    """
    name = spec.model_class.__name__
    yield from spec.objective.faults(spec.abstract_model, spec.staged)
    if has_metrics(spec.model_class):
        metrics: Any = spec.model_class.metrics  # type: ignore[attr-defined]
        try:
            inspect.signature(metrics).bind("self", "batch")
        except TypeError as error:
            yield f"{name}.metrics{inspect.signature(metrics)}: {error}; required: {METRICS}"
    if stages > 1 and spec.streams:
        where = ", ".join(list(trees.flatten_names(spec.streams))[:2])
        yield (
            f"mesh.pipeline={stages}: {name} draws from its own nnx.Rngs ({where}), which all stages "
            f"would draw alike; fold `info.key` with the sample instead, or set mesh.pipeline=1"
        )


def check_model(
    spec: ModelSpec, batch: Mapping[str, Any], *, accumulation: int = 1, stages: int = 1
) -> None:
    """Checks that a model can be trained on such batches.

    A start calls this before it opens the data, and again when it traces the step. The
    model is traced only once.

    Args:
      spec: the model with flat blocks.
      batch: arrays or their shapes, by name.
      accumulation: number of accumulation steps of a batch.
      stages: stages of the pipeline; 1 = no pipeline.

    Raises:
      ConfigError: it cannot, with a line for each reason.
    """
    shapes = frozenset(
        (name, x.shape, jax.numpy.dtype(x.dtype)) for name, x in batch.items()
    )
    case = (shapes, accumulation, stages)
    if case in spec.passed:
        return
    causes = list(_spec_faults(spec, stages=stages))
    if causes:
        raise ConfigError(causes)
    # the method under test, for `_blame`
    method = f"{type(spec.objective).__name__}.prepare(modules, batch)"
    try:
        prepared = abstract_batch(spec, batch)
        method = "embed, blocks and head" if spec.staged else "loss(batch, key)"
        stats, changed = _trace(spec, prepared)
        method = "metrics(batch)"
        _trace_metrics(spec, prepared)
    except ConfigError:
        raise
    except Exception as error:  # a model's code may raise anything
        raise ConfigError(_blame(spec, method, batch, error)) from None
    causes = _state_faults(
        spec, stats=stats, changed=changed, accumulation=accumulation, stages=stages
    )
    if causes:
        raise ConfigError(causes)
    spec.passed.add(case)


def _state_faults(
    spec: ModelSpec,
    *,
    stats: list[str],
    changed: list[str],
    accumulation: int,
    stages: int,
) -> list[str]:
    """Lists the faults of a model's stats, and of the variables that it changes.

    Args:
      spec: the model with flat blocks.
      stats: names of the stats that `loss` returns.
      changed: paths of the variables that `loss` changes.
      accumulation: number of accumulation steps of a batch.
      stages: stages of the pipeline; 1 = no pipeline.
    """
    causes = []
    name = spec.model_class.__name__
    if stats and not callable(getattr(spec.model_class, "update", None)):
        causes.append(
            f"{name}.loss returns stats ({', '.join(stats)}), but {name} has no update(self, stats)"
        )
    parameters = [path for path in changed if path in spec.named_parameters()]
    if parameters:
        causes.append(
            f"{name}.loss changes parameters itself ({', '.join(parameters[:3])}); keep such values in an "
            f"nnx.Variable of another type than nnx.Param"
        )
    coupled = [path for path in changed if path not in parameters]
    if coupled and (accumulation > 1 or stages > 1):
        setting = f"batch.accumulation={accumulation}"
        if stages > 1:
            setting = f"mesh.pipeline={stages}"
        causes.append(
            f"{setting}: {name}.loss changes its state ({', '.join(coupled[:3])}) by the samples it sees "
            f"together, so parts of a step would not add up to the whole; set it to 1, or return sums in "
            f"`stats` and change the state in update(self, stats)"
        )
    return causes


def _trace(spec: ModelSpec, batch: Batch) -> tuple[list[str], list[str]]:
    """Traces the loss of a model.

    Returns:
      The names of its stats, and the paths of all variables that it changes.
    """
    stats: list[str] = []

    def run(
        arrays: tuple[Tree, Tree, Tree], batch: Batch, key: jax.Array
    ) -> tuple[Tree, Loss]:
        model = spec.assemble(*arrays, key=key)
        loss = spec.objective.batch_loss(model, batch, key)
        stats.extend(loss.stats)
        return spec.arrays_of(model), loss

    arrays = (spec.trainable, spec.model_state, spec.frozen)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    jaxpr = jax.make_jaxpr(run)(
        arrays, shapes, jax.eval_shape(lambda: jax.random.key(0))
    ).jaxpr
    paths = list(trees.flatten_names(arrays))
    pairs = zip(paths, jaxpr.invars, jaxpr.outvars, strict=False)
    changed = [
        path for path, before, after in pairs if _origin(jaxpr, after) is not before
    ]
    return stats, [path.partition("/")[2] for path in changed]


def _origin(jaxpr: Jaxpr, var: Var | Literal) -> Var | None:
    """Finds the input that an output passes on unchanged, through nested calls.

    Returns:
      The input; None if the output was computed.
    """
    makers = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    while not isinstance(var, Literal) and var in makers:
        eqn, index = makers[var]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is None:
            return None
        inner = getattr(inner, "jaxpr", inner)
        inner_input = _origin(inner, inner.outvars[index])
        if inner_input is None or inner_input not in inner.invars:
            return None
        place = inner.invars.index(inner_input)
        if eqn.primitive.name == "scan":
            consts = eqn.params["num_consts"]
            carried = eqn.params["num_carry"]
            if index < carried:
                is_unchanged = place == consts + index
            else:
                is_unchanged = place >= consts + carried
            if not is_unchanged:
                return None
        elif len(inner.invars) != len(eqn.invars):
            return None
        var = eqn.invars[place]
    return None if isinstance(var, Literal) else var


def _trace_metrics(spec: ModelSpec, batch: Batch) -> None:
    """Traces the model's `metrics`, if it has them.

    Raises:
      ConfigError: they return something else than metrics.
    """

    def run(arrays: tuple[Tree, Tree, Tree], batch: Batch) -> Any:
        return as_metrics(spec.assemble(*arrays).metrics(batch), jax.numpy.float32(1))

    if has_metrics(spec.model_class):
        jax.eval_shape(run, (spec.trainable, spec.model_state, spec.frozen), batch)


def _blame(spec: ModelSpec, method: str, batch: Batch, error: Exception) -> str:
    """Formats an error of a model's code, with its line and the batch."""
    name = spec.model_class.__name__
    fields = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in batch.items())
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, KeyError):
        message = f"the batch has no {message}"
    return f"{name}: {method} failed{where}: {type(error).__name__}: {message}; the batch was {{{fields}}}"
