"""Lines that describe a run's step, for the terminal and run.json."""

from functools import partial

from jax.sharding import Mesh

from jaxdist.models import lora as adapters
from jaxdist.models import registry
from jaxdist.parallel import execution, placement, precision
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import has_experts
from jaxdist.step import reduction
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import fine_tuning, product_formats
from jaxdist.trainer.compose import Composition, batch_shapes
from jaxdist.trainer.costs import costs_of, itemsize_of
from jaxdist.trainer.model_flops import (
    active_parameters,
    active_share,
    total_parameters,
)
from jaxdist.trainer.run_config import RunConfig, unread_options


def counts(composition: Composition) -> str:
    """Formats the numbers of parameters: all, trained, active for a token, and frozen."""
    config = composition.config
    spec = composition.spec
    if config.lora.rank:
        text = adapters.summary(
            spec.trainable, spec.frozen, config.lora, config.precision.params
        )
    else:
        text = spec.counts
    active = active_parameters(config, spec)
    if active < total_parameters(config, spec):
        text += f", {active:,} active for a token"
    for line in expert_lines(composition):
        text += f"; {line}"
    if spec.modules:
        text += f"; {spec.module_count:,} in frozen modules ({', '.join(spec.modules)})"
    return text


def expert_lines(composition: Composition) -> list[str]:
    """Warns that all experts count as active, because no cost declares fewer.

    Returns:
      The line; [] if a cost declares fewer, or the model has no experts.
    """
    config = composition.config
    kernels = [
        names
        for _, names in composition.spec.named_parameters().values()
        if has_experts(names)
    ]
    if not any(active_share(config, names) == 1 for names in kernels):
        return []
    return [
        "all experts are counted as active for a token: no op of Config.costs declares "
        "fewer"
    ]


def step_lines(composition: Composition, built: TrainStep) -> list[str]:
    """Describes a step: its batch, options without effect, number formats and more.

    The model adds the lines of its hook `choices`.
    """
    config = composition.config
    choices = registry.model_hook(config.model_config, "choices") or list
    with execution.activate(built.mesh, built.rules):
        chosen: list[str] = choices()
    device = built.mesh.devices.flat[0]
    return [
        batch_arithmetic(composition),
        *unread_options(config),
        *_warnings(composition, built.mesh),
        *reduction_lines(composition),
        *precision.advice(config.precision, device),
        *product_formats.lines(
            config, composition.spec, device, partial(batch_shapes, config, 1)
        ),
        *context_lines(config, built.rules),
        *chosen,
    ]


def _warnings(composition: Composition, mesh: Mesh) -> list[str]:
    """Warns of mesh axes without work or with slow links, and of adapters' rates."""
    texts = [
        *placement.warnings(composition.placements(), composition.rules),
        *placement.slow_axis_warnings(mesh),
        *fine_tuning.warnings(composition.config),
    ]
    return [f"warning: {text}" for text in texts]


def context_lines(config: RunConfig, rules: Rules) -> list[str]:
    """Describes how attention works on sequences that are split over devices.

    Returns:
      The line; [] if sequences are not split.
    """
    if rules.shape.sizes["context"] == 1:
        return []
    for cost in costs_of(config):
        lines = cost.explain(rules, itemsize_of(config))
        if lines:
            return lines
    return []


def reduction_lines(composition: Composition, *, forced: bool = False) -> list[str]:
    """Describes how often a step sums the gradients of its microbatches over replicas.

    Args:
      composition: the run.
      forced: whether to skip the line unless the model rules out the cheaper way.

    Returns:
      The line; [] if there is nothing to sum.
    """
    config = composition.config
    rules = composition.rules
    microbatches = composition.total_microbatches
    chosen = reduction.choose(
        composition.spec, rules, config.mesh.reduce, microbatches=microbatches
    )
    if not chosen.over or (forced and not chosen.why_each):
        return []
    summed = reduction.summed_bytes(
        composition.spec_by_stage, rules, config.precision.reduce
    )
    once_mb = summed / 1e6
    each = f"with each of {microbatches} microbatches, {microbatches * once_mb:.1f} MB"
    if chosen.why_each:
        how = f"{each} a device (once a step: {once_mb:.1f} MB): {chosen.why_each}"
    else:
        how = f"once a step, {once_mb:.1f} MB a device (mesh.reduce=each: {each})"
    return [f"gradients: summed over {chosen.over} {how}"]


def batch_arithmetic(composition: Composition) -> str:
    """Describes the factors of the global batch, in one line."""
    batch = composition.config.batch
    shards = composition.shape.batch_shards
    per_device = batch.global_size // (composition.total_microbatches * shards)
    unit = "samples"
    tokens = ""
    if composition.config.data.is_text:
        total = batch.global_size * batch.sequence_length
        unit = "sequences"
        tokens = f"; x {batch.sequence_length} tokens = {total:,} tokens a step"
    microbatches = ""
    if composition.microbatches > 1:
        microbatches = f"{composition.microbatches} microbatches x "
    return (
        f"batch: {batch.global_size} {unit} a step = {batch.accumulation} accumulation x "
        f"{microbatches}{shards} batch shards x {per_device} per device{tokens}"
    )
