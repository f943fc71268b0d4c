"""Rules between a run's model, its batch and the axes of its mesh."""

from collections.abc import Iterable, Iterator

from jaxdist.config import ConfigError
from jaxdist.ops import context_attention
from jaxdist.optim import optimizers
from jaxdist.parallel.placement import place
from jaxdist.step import reduction
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of, module_costs


def layout_faults(composition: Composition) -> list[str]:
    """Lists the faults of a run's layout, each with its fix."""
    config = composition.config
    spec = composition.spec
    rules = composition.rules
    faults = [
        *_batch_faults(composition),
        *optimizers.group_faults(config.optimizer, spec.named_trainable()),
    ]
    if config.mesh.reduce == "once":
        obstacle = reduction.obstacle(spec, rules)
        if obstacle:
            faults.append(reduction.refusal(obstacle))
    # Several layers, or an op and the batch, may have the same fault.
    axis_faults = list(dict.fromkeys(_axis_faults(composition)))
    faults += axis_faults
    try:
        if axis_faults:
            # The model may have no stages, so this places it without a pipeline.
            place(spec.all_parameters(), rules)
        else:
            composition.placements()
    except ConfigError as error:
        faults += _merged(error.faults)
    return faults


def _batch_faults(composition: Composition) -> Iterator[str]:
    batch = composition.config.batch
    shards = composition.shape.batch_shards
    unit = composition.total_microbatches * shards
    if min(unit, batch.global_size) < 1 or batch.global_size % unit == 0:
        return
    below = batch.global_size // unit * unit
    above = below + unit
    legal = f"{below} or {above}" if below else f"{above}"
    microbatches = ""
    fix = ""
    if composition.microbatches > 1:
        fix = "; or lower pipeline.microbatches"
        microbatches = f"pipeline.microbatches {composition.microbatches} x "
    yield (
        f"batch.global_size={batch.global_size} is not divisible by batch.accumulation {batch.accumulation} x "
        f"{microbatches}batch shards {shards} "
        f"(data x fsdp x expert) = {unit}; nearest legal sizes: {legal}{fix}"
    )


def _axis_faults(composition: Composition) -> Iterator[str]:
    """Yields the mesh axes that the model or the batch does not support."""
    yield from _pipeline_faults(composition)
    yield from _remat_faults(composition)
    yield from _expert_faults(composition)
    yield from _context_faults(composition)
    yield from _cost_faults(composition)


def _pipeline_faults(composition: Composition) -> Iterator[str]:
    cut = composition.staging
    if cut is None:
        return
    if composition.spec.staged:
        own = list(cut.faults())
        yield from own
        for name, module in composition.spec.modules.items():
            for fault in cut.for_model(module).faults():
                if fault not in own:
                    yield f"frozen module {name}: {fault}"
        return
    model = composition.config.model
    name = model.get("name", model["target"])
    yield (
        f"mesh.pipeline={cut.stages}: {name} has no stages (embed, blocks, head); "
        f"write it so, or set mesh.pipeline=1"
    )


def _remat_faults(composition: Composition) -> Iterator[str]:
    """Yields faults of remat.layers and remat.every."""
    if composition.staging is not None:
        return  # `Staging.faults` has those of a pipeline
    remat = composition.config.remat
    spec = composition.spec
    layers = 0
    if spec.staged:
        layers = spec.depth * spec.block_layers
    elif remat.layers or remat.every > 1:
        yield f"remat.layers, remat.every: {spec.model_class.__name__} has no blocks; leave them out"
        return
    if remat.layers > layers or remat.layers % spec.block_layers:
        groups = ""
        if spec.block_layers > 1:
            groups = f", in groups of {spec.block_layers}"
        yield f"remat.layers={remat.layers}: the stack has {layers} layers{groups}; set it to a part of them"
    yield from remat.stack_faults(layers, "the stack", spec.period * spec.block_layers)


def _expert_faults(composition: Composition) -> Iterator[str]:
    size = composition.shape.sizes["expert"]
    spec = composition.spec
    parameters = spec.named_parameters().values()
    if size > 1 and not any("experts" in names for _, names in parameters):
        yield (
            f"mesh.expert={size}: {spec.model_class.__name__} has no experts (parameters with a dim of that "
            f"name); set mesh.expert=1, and mesh.fsdp or mesh.data to {size} times its size"
        )


def _context_faults(composition: Composition) -> Iterator[str]:
    config = composition.config
    size = composition.shape.sizes["context"]
    if size == 1:
        return
    if not config.data.is_text:
        yield f"mesh.context={size}: data.source={config.data.source} has no sequences; set mesh.context=1"
        return
    yield from context_attention.length_faults(
        composition.rules, config.batch.sequence_length
    )


def _cost_faults(composition: Composition) -> Iterator[str]:
    """Yields what the ops of the model and of frozen modules do not support."""
    config = composition.config
    if composition.shape.sizes["context"] > 1 and not config.data.is_text:
        return  # `_context_faults` has it; ops would speak of sequences
    try:
        costs = costs_of(config)
        for module in composition.spec.modules.values():
            costs += module_costs(config, module)
    except ConfigError:
        return  # The file of the samples is missing: what opens it reports that.
    for cost in costs:
        yield from cost.faults(composition.rules)


def _merged(faults: Iterable[str]) -> list[str]:
    """Merges faults `parameter: text` that have the same text into one."""
    parameters: dict[str, list[str]] = {}
    for fault in faults:
        parameter, _, text = fault.partition(": ")
        parameters.setdefault(text, []).append(parameter)
    merged = []
    for text, (first, *more) in parameters.items():
        others = f" and {len(more)} more" if more else ""
        merged.append(f"{first}{others}: {text}")
    return merged
