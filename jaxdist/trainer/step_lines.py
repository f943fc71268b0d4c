"""What is printed and written of a run's step."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxdist.models import lora as adapters
from jaxdist.models import registry
from jaxdist.ops import context_costs
from jaxdist.parallel import execution, precision
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.placement import Placement, place
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.protocols.param_names import Names
from jaxdist.step import reduction
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import batching, build, product_formats
from jaxdist.trainer.run_config import RunConfig


def placements(run: RunConfig, spec: ModelSpec, rules: Rules) -> list[Placement]:
    """Returns where every parameter lies.

    Raises:
      ConfigError: dims that an axis does not divide.
    """
    cut = build.staging(run, spec, rules.shape)
    parameters = {
        path: (
            jax.ShapeDtypeStruct(x.shape, stored_dtype(x, run.precision.params)),
            names,
        )
        for path, (x, names) in (cut.staged_spec(spec) if cut else spec)
        .named_parameters()
        .items()
    }
    return place(parameters, rules)


def counts(run: RunConfig, spec: ModelSpec) -> str:
    """Returns how many parameters there are, how many of them are trained, and how many
    a token uses.
    """
    text = (
        adapters.summary(spec.trainable, spec.frozen, run.lora)
        if run.lora.rank
        else spec.counts
    )
    active = active_parameters(run, spec)
    return text + f", {active:,} active for a token" * (active < spec.parameter_count)


def active_parameters(run: RunConfig, spec: ModelSpec) -> int:
    """Returns how many parameters a token uses: of experts those that it goes to."""
    return sum(
        round(x.size * active_share(run, names))
        for x, names in spec.named_parameters().values()
    )


def active_share(run: RunConfig, names: Names) -> float:
    """Returns the share of a parameter that a token uses, 1 but for kernels of
    experts.
    """
    experts, chosen = (
        run.model.get(name) for name in ("num_experts", "experts_per_token")
    )
    return chosen / experts if "experts" in names and experts and chosen else 1.0


def step_lines(run: RunConfig, spec: ModelSpec, built: TrainStep) -> list[str]:
    """Returns what a step is made of: its batch, when gradients are summed, and what
    the model chooses.
    """
    choices = registry.model_hook(run.model_config, "choices") or list
    with execution.activate(built.mesh, built.rules):
        chosen: list[str] = choices()
    lines = [
        batch_arithmetic(run, built.rules.shape),
        *reduction_lines(run, spec, built.rules),
    ]
    lines += precision.advice(run.precision, built.mesh.devices.flat[0])
    lines += product_formats.lines(
        run, spec, built.mesh.devices.flat[0], partial(batching.batch_shapes, run, 1)
    )
    return [*lines, *context_lines(run, built.rules), *chosen]


def attention_sizes(run: RunConfig) -> context_costs.Sizes | None:
    """Returns the sizes of a model's attention over whole sequences; None where they
    are not known.
    """
    names = ("num_heads", "num_kv_heads", "head_dim")
    heads, kv_heads, size = (getattr(run.model_config, name, None) for name in names)
    if not (heads and kv_heads and size and run.data.is_text):
        return None
    itemsize = jnp.dtype(run.precision.compute).itemsize
    return context_costs.Sizes(
        run.batch.sequence_length, heads, kv_heads, size, itemsize
    )


def context_lines(run: RunConfig, rules: Rules) -> list[str]:
    """Returns the line that says how attention sees sequences that devices share out;
    none else.
    """
    sizes = attention_sizes(run)
    return context_costs.explain(rules, sizes) if sizes else []


def reduction_lines(
    run: RunConfig, spec: ModelSpec, rules: Rules, *, forced: bool = False
) -> list[str]:
    """Returns the line that says how often a step sums its parts' gradients; none if it
    has one part.

    Args:
      forced: only says it where the model does not allow what would be cheaper.
    """
    parts = run.batch.accumulation * batching.num_microbatches(run, rules.shape)
    chosen = reduction.choose(spec, rules, run.mesh.reduce, parts=parts)
    if not chosen.over or (forced and not chosen.why_each):
        return []
    cut = build.staging(run, spec, rules.shape)
    size = (
        reduction.summed_bytes(
            cut.staged_spec(spec) if cut else spec, rules, run.precision.reduce
        )
        / 1e6
    )
    each, once = (
        f"with each of {parts} parts, {parts * size:.1f} MB",
        f"once a step, {size:.1f} MB",
    )
    how = f"{once} a device (mesh.reduce=each: {each})"
    if chosen.why_each:
        how = f"{each} a device (once a step: {size:.1f} MB): {chosen.why_each}"
    return [f"gradients: summed over {chosen.over} {how}"]


def batch_arithmetic(run: RunConfig, shape: MeshShape) -> str:
    """Returns the one line that says how the global batch is made up."""
    batch, flow = run.batch, batching.num_microbatches(run, shape)
    each = batch.global_size // (batch.accumulation * flow * shape.batch_shards)
    unit, tokens = "samples", ""
    if run.data.is_text:
        total = batch.global_size * batch.sequence_length
        unit, tokens = (
            "sequences",
            f"; x {batch.sequence_length} tokens = {total:,} tokens a step",
        )
    return (
        f"batch: {batch.global_size} {unit} a step = {batch.accumulation} accumulation x "
        f"{f'{flow} microbatches x ' if flow > 1 else ''}{shape.batch_shards} batch shards x "
        f"{each} per device{tokens}"
    )
