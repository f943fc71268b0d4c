"""The rules between a run's components: all faults at once, before anything
compiles.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax

from jaxdist.config import ConfigError, is_text, schema
from jaxdist.data import DataConfig
from jaxdist.models import registry
from jaxdist.ops import context_attention
from jaxdist.optim import optimizers
from jaxdist.optim.config import warmup_faults
from jaxdist.parallel import offload, precision
from jaxdist.parallel.mesh import MeshShape, resolve_mesh, slices_of
from jaxdist.parallel.placement import place
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step import reduction
from jaxdist.step.model_checks import check_model
from jaxdist.step.update import offload_obstacle
from jaxdist.trainer import batching, product_formats, step_lines
from jaxdist.trainer import build as run_build
from jaxdist.trainer.run_config import Build, RunConfig

# Keys that do nothing by themselves, or groups of them -> the callback that serves
# them. A run whose config sets one to another value than its default needs the callback.
SERVED_BY = {
    "checkpoint.copy_to": "jaxdist.operations.copies.copying.CheckpointCopies",
    "checkpoint.keep_best": "jaxdist.trainer.best.KeepBest",
    "health.compare_every": "jaxdist.operations.watch.replica_check.ReplicaCheck",
    "profile.start_step": "jaxdist.trainer.profiling.Profile",
    "resilience.preemption_notice": "jaxdist.operations.watch.notices.PreemptionNotices",
    "telemetry.port": "jaxdist.operations.metrics.serving.MetricsServer",
    "train.loggers": "jaxdist.trainer.loggers.Loggers",
    "train.patience": "jaxdist.trainer.best.KeepBest",
    "train.sample_tokens": "jaxdist.inference.sample.Sample",
    "watchdog": "jaxdist.operations.watch.watchdog.Watchdog",
}


def check_served(run: RunConfig, keys: Collection[str]) -> None:
    """Checks that no key of a config is set in vain.

    Args:
      keys: that the run's callbacks serve; a group stands for its keys.

    Raises:
      ConfigError: one line for each key that needs a callback which the run lacks.
    """
    values = schema.flatten(schema.to_config_dict(run))
    defaults = schema.schema_of(RunConfig)
    faults = []
    for served, callback in SERVED_BY.items():
        if served in keys or served.partition(".")[0] in keys:
            continue
        for key, value in values.items():
            is_served = key == served or key.startswith(f"{served}.")
            if is_served and value != defaults[key].default:
                faults.append(
                    f"{key}={value}: nothing in this run does that. The key needs the "
                    f"callback {callback}. Pass it in callbacks=[...], or leave the "
                    f"key out."
                )
    if faults:
        raise ConfigError(faults)


def validate(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    with_data: bool = True,
    build: Build | None = None,
) -> tuple[MeshShape, Rules, ModelSpec]:
    """Returns `validate_on` of these devices, and looks at the model's loss where
    `model.*` makes it.
    """
    slices, faults = (
        slices_of(run.mesh, devices),
        list(offload.device_faults(run.offload, devices[0])),
    )
    faults += precision.device_faults(run.precision, devices[0])
    try:
        checked = shape, _, spec = validate_on(
            run, len(devices), slices, with_data=with_data, build=build
        )
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from None
    faults += product_formats.faults(
        run, spec, devices[0], partial(batching.batch_shapes, run, 1)
    )
    if faults:
        raise ConfigError(faults)
    parts, stages = (
        run.batch.accumulation * batching.num_microbatches(run, shape),
        shape.sizes["pipeline"],
    )
    options = (
        run.model.items(),
        run.batch,
        run.data,
        run.optimizer.frozen,
        run.lora,
        run.init,
    )
    key = repr((*options, parts, stages))
    if build or key not in _examined:
        batch = batching.batch_shapes(run, run.batch.global_size // parts)
        if faults := check_model(
            spec, batch, accumulation=run.batch.accumulation, stages=stages
        ):
            raise ConfigError(faults)
        if not build:
            _examined.add(key)
    return checked


# elements: more than any machine has, few enough to count bytes in 64 bits
LARGEST = 2**48
_OF_64_BITS = ("seed", "data.validation_tokens")
_examined: set[str] = set()  # what was found to be without fault


def validate_on(
    run: RunConfig,
    num_devices: int,
    num_slices: int | None = None,
    *,
    with_data: bool = True,
    build: Build | None = None,
    spec: ModelSpec | None = None,
) -> tuple[MeshShape, Rules, ModelSpec]:
    """Returns the resolved mesh, its rules and the model's spec, all checked against
    each other.

    Args:
      num_slices: of the devices; None where the hardware has none: as many as the mesh
        asks for.
      with_data: False leaves `data.*` unchecked, for what looks at a run without a
        corpus.
      build: makes the model from its rngs; default: what `model.*` says.
      spec: of the run's model, if it is known.

    Raises:
      ConfigError: every fault of the run, each with its cure.
    """
    faults = schema.faults(run if with_data else replace(run, data=DataConfig()))
    unbuildable = registry.option_faults(run.model_class, run.model_options)
    for part in ("lora", "optimizer"):  # their patterns choose parameters
        unbuildable += schema.faults(getattr(run, part), f"{part}.")
    unbuildable += _size_faults(run)
    faults = list(dict.fromkeys([*faults, *unbuildable, *_faults(run)]))
    shape = None
    try:
        shape = resolve_mesh(
            run.mesh, num_devices, num_slices or run.mesh.dcn.num_slices
        )
    except ConfigError as error:
        faults += error.faults
    if shape is None or unbuildable:
        raise ConfigError(faults)
    spec = spec or run_build.model_spec(run, build)
    if spec.parameter_count >= LARGEST:
        raise ConfigError(
            [*faults, f"model: {spec.parameter_count:,} parameters; lower its sizes"]
        )
    faults += [
        *_batch_faults(run, shape),
        *optimizers.group_faults(run.optimizer, spec.named_trainable()),
    ]
    rules = run_build.rules_for(run, spec, shape)
    if run.mesh.reduce == "once" and (why := reduction.obstacle(spec, rules)):
        faults.append(reduction.refusal(why))
    misfits = [*_axis_faults(run, spec, rules)]
    try:
        place(spec.named_parameters(), rules) if misfits else step_lines.placements(
            run, spec, rules
        )
    except ConfigError as error:
        misfits += _merged(error.faults)
    if faults + misfits:
        raise ConfigError(faults + misfits)
    return shape, rules, spec


def _axis_faults(run: RunConfig, spec: ModelSpec, rules: Rules) -> Iterator[str]:
    """Yields which mesh axes the model or the batch is not made for."""
    yield from _pipeline_faults(run, rules.shape, spec)
    yield from _remat_faults(run, rules.shape, spec)
    yield from _expert_faults(rules.shape, spec)
    yield from _context_faults(run, rules)


def _expert_faults(shape: MeshShape, spec: ModelSpec) -> Iterator[str]:
    size = shape.sizes["expert"]
    if size > 1 and not any(
        "experts" in names for _, names in spec.named_parameters().values()
    ):
        yield (
            f"mesh.expert={size}: {spec.model_class.__name__} has no experts (parameters with a dim of that "
            f"name); set mesh.expert=1, and mesh.fsdp or mesh.data to {size} times its size"
        )


def _context_faults(run: RunConfig, rules: Rules) -> Iterator[str]:
    size = rules.shape.sizes["context"]
    if size == 1:
        return
    if not run.data.is_text:
        yield f"mesh.context={size}: data.source={run.data.source} has no sequences; set mesh.context=1"
        return
    heads = getattr(run.model_config, "num_heads", None)
    yield from context_attention.faults(rules, run.batch.sequence_length, heads)


def _merged(faults: Iterable[str]) -> list[str]:
    """Returns the faults `parameter: text`, one for all parameters of the same text."""
    parameters: dict[str, list[str]] = {}
    for fault in faults:
        parameter, _, text = fault.partition(": ")
        parameters.setdefault(text, []).append(parameter)
    return [
        f"{first}{f' and {len(more)} more' if more else ''}: {text}"
        for text, (first, *more) in parameters.items()
    ]


def _faults(run: RunConfig) -> Iterator[str]:
    """Yields which values of different components do not go together, on any
    devices.
    """
    train, length = run.train, run.batch.sequence_length
    longest = getattr(run.model_config, "max_length", None)
    learned = (
        " (learned positions: raise model.max_positions)"
        if "max_positions" in run.model
        else ""
    )
    if run.offload.optimizer and (why := offload_obstacle(run.optimizer)):
        yield why
    if train.sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt is empty; give the sample something to go on from"
    if not is_text(train.sample_prompt):
        yield f"train.sample_prompt={train.sample_prompt!r} is not UTF-8 text; give another"
    prompt = len(train.sample_prompt.encode(errors="replace"))
    if train.sample_tokens and longest and longest < prompt + train.sample_tokens:
        yield (
            f"train.sample_tokens={train.sample_tokens} and its prompt are longer than the model's longest "
            f"sequence, {longest}{learned}; lower it"
        )
    if longest and longest < length:
        yield (
            f"batch.sequence_length={length} exceeds the model's longest sequence, {longest}{learned}; "
            f"shorten the sequence"
        )
    by_evaluations = {
        "checkpoint.keep_best": run.checkpoint.keep_best,
        "train.patience": train.patience,
    }
    if not train.eval_every and any(by_evaluations.values()):
        keys = ", ".join(
            f"{key}={value}" for key, value in by_evaluations.items() if value
        )
        yield f"{keys}: evaluations decide, and train.eval_every=0 makes none; set it"
    yield from warmup_faults(run.optimizer, train.steps)
    if run.lora.from_peft and not run.init.from_huggingface:
        yield "lora.from_peft needs the model that it adapts; set init.from_huggingface"


def _size_faults(run: RunConfig) -> Iterator[str]:
    """Yields what would overflow the integers of jax or of its compiler, which ends the
    process.
    """
    flat = schema.flatten(schema.to_config_dict(run))
    # what its options mean
    foreign = "model." if not run.model["target"].startswith("jaxdist.") else "-"
    counts = {
        p: n
        for p, n in flat.items()
        if type(n) is int and not p.startswith((*_OF_64_BITS, foreign))
    }
    wrong = [path for path, n in counts.items() if abs(n) >= 2**31]
    yield from (
        f"{path}: got {counts[path]}, required less than 2**31 = {2**31}; lower it"
        for path in wrong
    )
    widest = max(
        (path for path in counts if path.startswith("model.")),
        key=counts.__getitem__,
        default=None,
    )
    sizes = ["batch.global_size", "batch.sequence_length", *filter(None, [widest])]
    if not wrong and math.prod(counts[path] for path in sizes) >= LARGEST:
        yield f"{' x '.join(f'{path}={counts[path]}' for path in sizes)}: no array is so large; lower them"


def _pipeline_faults(
    run: RunConfig, shape: MeshShape, spec: ModelSpec
) -> Iterator[str]:
    if shape.sizes["pipeline"] == 1:
        return
    if not spec.staged:
        model = run.model.get("name", run.model["target"])
        yield (
            f"mesh.pipeline={shape.sizes['pipeline']}: {model} has no stages (embed, blocks, head); "
            f"write it so, or set mesh.pipeline=1"
        )
        return
    cut = run_build.staging(run, spec, shape)
    assert cut is not None
    yield from cut.faults()


def _remat_faults(run: RunConfig, shape: MeshShape, spec: ModelSpec) -> Iterator[str]:
    """Yields why the stack's layers cannot be computed again in such parts; of a
    pipeline's see `Staging`.
    """
    own, layers = run.remat, spec.depth * spec.block_layers if spec.staged else 0
    if shape.sizes["pipeline"] > 1:
        return
    if not spec.staged and (own.layers or own.every > 1):
        yield f"remat.layers, remat.every: {spec.model_class.__name__} has no blocks; leave them out"
        return
    if own.layers > layers or own.layers % spec.block_layers:
        each = f", in groups of {spec.block_layers}" if spec.block_layers > 1 else ""
        yield f"remat.layers={own.layers}: the stack has {layers} layers{each}; set it to a part of them"
    yield from own.stack_faults(layers, "the stack", spec.period * spec.block_layers)


def _batch_faults(run: RunConfig, shape: MeshShape) -> Iterator[str]:
    batch, flow = run.batch, batching.num_microbatches(run, shape)
    unit = batch.accumulation * flow * shape.batch_shards
    if min(unit, batch.global_size) < 1 or batch.global_size % unit == 0:
        return
    below, above = (
        batch.global_size // unit * unit,
        -(-batch.global_size // unit) * unit,
    )
    legal = f"{below} or {above}" if below else f"{above}"
    yield (
        f"batch.global_size={batch.global_size} is not divisible by accumulation {batch.accumulation} x "
        f"{f'microbatches {flow} x ' if flow > 1 else ''}batch shards {shape.batch_shards} "
        f"(data x fsdp x expert) = {unit}; nearest legal sizes: {legal}"
    )
