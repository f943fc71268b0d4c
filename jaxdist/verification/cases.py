"""Cases for verification: a tiny config, its layouts, its batch and initial state."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import ConfigError, schema
from jaxdist.data import DataConfig, Dataset, open_dataset
from jaxdist.models import experts, registry
from jaxdist.parallel.axes import AXES, BATCH_AXES, SEARCHED
from jaxdist.parallel.context import ContextConfig
from jaxdist.parallel.pipeline.partition import PipelineConfig
from jaxdist.protocols.dim_names import FSDP_NAME
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import compose, validation
from jaxdist.trainer.run_config import Build, RunConfig
from jaxdist.trainer.teacher_model import as_text, teacher_config

JITTER = 0.05  # standard deviation of the noise added to initial parameters
MOMENT = 1e-3  # mean of the initial optimizer moments
LARGEST_AS_IS = 5_000_000  # most parameters of a model that cannot be shrunk
ACCUMULATION = 4  # parts of a step in layouts with accumulation

Overrides = dict[str, Any]  # a layout's changes of a one-device run, by config path


def _defaults(cls: type, group: str) -> Overrides:
    """Reads the default values of a config group, by path."""
    fields = schema.schema_of(cls, group).values()
    return {field.path: field.default for field in fields}


ONE_DEVICE: Overrides = {
    **{f"mesh.{axis}": 1 for axis in AXES},
    **{f"mesh.dcn.{axis}": 1 for axis in AXES},
    "mesh.zero": 3,
    "mesh.sequence_parallel": False,
    "batch.accumulation": 1,
    **_defaults(ContextConfig, "context."),
    **_defaults(PipelineConfig, "pipeline."),
}

# How tokens choose experts. "": the model has none. "chosen": routers choose. "given":
# the choice is drawn from the seed. "skewed": as "given", but from a quarter of them.
Routing = Literal["", "chosen", "given", "skewed"]


# --- a small run of the same kind -----------------------------------------------------


def shrink_config(
    run: RunConfig, num_devices: int, build: Build | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Makes a run tiny and keeps all its variants.

    A model whose Config has no `tiny` keeps its size.

    Args:
      run: a config of any size.
      num_devices: number of devices that layouts split the model over.
      build: makes the caller's model; default: the config names the model.

    Returns:
      The run, and a line for each group of changes.

    Raises:
      ConfigError: the model cannot be shrunk and has more than 5 M parameters.
    """
    old = schema.flatten(schema.to_config_dict(run))
    unit = ACCUMULATION * num_devices
    length = run.batch.sequence_length
    new: Overrides = {
        "batch.global_size": unit * -(-16 // unit),
        "batch.sequence_length": length,
        # so that the first update has the peak learning rate and is not tiny
        "optimizer.warmup_steps": 0,
        # these two refer to the whole stack of layers, which a pipeline splits
        "remat.layers": 0,
        "remat.every": 1,
    }
    # The sequence may be too short for a sample of text, and none is written.
    run = compose.with_overrides(run, {"train.sample_tokens": 0})
    if run.data.is_text:
        length = min(32, length)
        new["batch.sequence_length"] = length
        # Batches are synthetic, so most of the data does not matter. An objective may
        # need a format, which only some sources have.
        data = DataConfig(packing=run.data.packing)
        if run.objective.has_pairs:
            data = run.data
        run = compose.with_overrides(run, {"data": data})
    new |= _tiny_model(run, length, num_devices, build)
    changed = {path: value for path, value in new.items() if old[path] != value}
    lines = _change_lines(old, changed)
    run = compose.with_overrides(run, changed)
    if run.objective.name == "distill":
        run, more = _with_tiny_teacher(run, length, num_devices)
        lines += more
    return run, lines


def _with_tiny_teacher(
    run: RunConfig, length: int, num_devices: int
) -> tuple[RunConfig, tuple[str, ...]]:
    """Shrinks the teacher of a run; without one, it is a model like the run's.

    Its depth gives each place of all pipelines a layer.

    Args:
      run: the config with a shrunk model.
      length: the shrunk sequence length.
      num_devices: a divisor of the dims that layouts split.

    Returns:
      The run, and the lines of changes.
    """
    teacher = run
    if run.objective.teacher_model:
        teacher = teacher_config(run)
    old = schema.flatten(schema.to_config_dict(teacher))
    new = _tiny_model(teacher, length, num_devices, None)
    new |= {"model.vocab_size": run.vocab_size}
    shrunk = compose.with_overrides(teacher, new)
    if "num_layers" in shrunk.model:
        mesh = run.mesh.pipeline * run.pipeline.chunks
        places = math.lcm(8, mesh) if mesh > 0 else 8
        depth = {"model.num_layers": _layers_on(shrunk, places)}
        new |= depth
        shrunk = compose.with_overrides(shrunk, depth)
    top_k = min(run.objective.top_k, run.vocab_size or 1)
    run = compose.with_overrides(
        run,
        {
            "objective.teacher_model": as_text(shrunk.model),
            "objective.top_k": top_k,
        },
    )
    changed = {path: x for path, x in new.items() if old[path] != x}
    lines = (line.replace("model:", "teacher:") for line in _change_lines(old, changed))
    return run, tuple(lines)


def _tiny_model(
    run: RunConfig, length: int, num_devices: int, build: Build | None
) -> Overrides:
    """Shrinks a model; {} for one whose Config has no `tiny`.

    Args:
      run: the config.
      length: the shrunk sequence length.
      num_devices: a divisor of the dims that layouts split.
      build: makes the caller's model; default: the config names the model.

    Raises:
      ConfigError: the model cannot be shrunk and has more than 5 M parameters.
    """
    config = run.model_config
    tiny = registry.model_hook(config, "tiny")
    if not tiny:
        _refuse_if_large(run, build)
        return {}
    split = (*getattr(config, "tensor_parallel_dims", ()), FSDP_NAME, "num_experts")
    overrides: Overrides = {}
    for name, size in schema.flatten(schema.to_config_dict(tiny(length))).items():
        if name in split:
            size = math.lcm(size, num_devices)
        overrides[f"model.{name}"] = size
    return overrides


def _change_lines(old: Overrides, changed: Overrides) -> tuple[str, ...]:
    """Formats changes of a config, a line for each group."""
    # the order of the lines
    changes: dict[str, list[str]] = {"model": [], "batch": [], "optimizer": []}
    for path, value in changed.items():
        group, _, name = path.partition(".")
        changes.setdefault(group, []).append(f"{name} {old[path]} -> {value}")
    return tuple(
        f"{group}: {', '.join(texts)}" for group, texts in changes.items() if texts
    )


def _refuse_if_large(run: RunConfig, build: Build | None) -> None:
    """Refuses a model that is too large to be verified as it is."""
    on_one_device = compose.with_overrides(run, ONE_DEVICE)
    spec = validation.validate(
        on_one_device, jax.devices()[:1], with_data=build is None, build=build
    ).spec
    if spec.parameter_count > LARGEST_AS_IS:
        name = run.model["target"]
        why = "(its Config has no tiny())"
        if build is not None:
            name = spec.model_class.__name__
            why = "by jaxdist"
        raise ConfigError(
            f"{name} has {spec.parameter_count:,} parameters and cannot be shrunk "
            f"{why}; verify a model of at most {LARGEST_AS_IS:,} parameters"
        )


# --- the layouts ----------------------------------------------------------------------


def layouts_for(
    run: RunConfig, num_devices: int, given: ModelSpec | None = None
) -> dict[str, Overrides]:
    """Lists the layouts to verify by name; the config's own layout comes last.

    Args:
      run: the shrunk config.
      num_devices: number of devices of each layout.
      given: the caller's model; default: the config names the model.
    """
    n = num_devices
    has_experts = bool(run.model.get("num_experts"))
    staged = "num_layers" in run.model and all(
        hasattr(run.model_class, name) for name in ("embed", "head")
    )
    if given is not None:
        staged = given.staged
    layouts = _dense_layouts(n)
    if staged:
        layouts |= _pipeline_layouts(run, n)
    if run.data.is_text:
        layouts |= _context_layouts(n, staged, experts=has_experts)
    if hasattr(run.model_config, "tiny") and "num_kv_heads" in run.model:
        layouts |= _case(", 4 kv heads", {"model.num_kv_heads": 4}, tensor=n)
    else:
        layouts |= _case(tensor=n)
    if has_experts:
        layouts |= _expert_layouts(n, staged)
    return layouts | _own_layout(run, n, layouts)


def _dense_layouts(n: int) -> dict[str, Overrides]:
    """Lists the layouts that every model can have on `n` devices."""
    layouts: dict[str, Overrides] = {}
    for axis in SEARCHED:
        if axis in BATCH_AXES:
            layouts[f"{axis} {n}"] = {f"mesh.{axis}": n}
    for stage in range(3):
        layouts |= _case(f", zero {stage}", {"mesh.zero": stage}, fsdp=n)
    layouts |= _in_parts(fsdp=n)
    if n % 2 == 0 and n > 2:
        layouts |= _case(tensor=2, fsdp=n // 2)
        by_sequence: Overrides = {"mesh.sequence_parallel": True}
        layouts |= _case(", sequence parallel", by_sequence, tensor=2, fsdp=n // 2)
        slices = {"mesh.data": 2, "mesh.dcn.data": 2, "mesh.fsdp": n // 2}
        layouts[f"2 slices x fsdp {n // 2}"] = slices
        layouts |= _in_parts(data=n)
        for stage in (3, 2, 1, 0):
            layouts |= _in_parts({"mesh.zero": stage}, data=2, fsdp=n // 2)
    if n % 4 == 0 and n > 4:
        layouts |= _case(data=2, fsdp=2, tensor=n // 4)
    return layouts


def _pipeline_layouts(run: RunConfig, n: int) -> dict[str, Overrides]:
    """Lists the layouts that split layers over devices."""
    layouts: dict[str, Overrides] = {}
    if n % 2 == 0:
        layouts |= _case(pipeline=2, data=n // 2)
    if n % 4 == 0:
        chunks: Overrides = {"pipeline.schedule": "interleaved", "pipeline.chunks": 2}
        if "num_layers" in run.model:  # the caller's model keeps its layers
            chunks["model.num_layers"] = _layers_on(run, 8)
        layouts |= _case(", 2 chunks", chunks, pipeline=4, data=n // 4)
        layouts |= _case(pipeline=2, fsdp=n // 4, tensor=2)
    if n % 4 == 0 and n > 4:
        for stage in (3, 2, 1, 0):
            changes = {"mesh.zero": stage, "pipeline.microbatches": 2}
            layouts |= _in_parts(changes, pipeline=2, data=2, fsdp=n // 4)
    return layouts


def _context_layouts(n: int, staged: bool, *, experts: bool) -> dict[str, Overrides]:
    """Lists the layouts that split sequences over devices."""
    layouts = _case(context=n)
    for form in ("gather", "ring"):
        layouts |= _case(f", {form}", {"context.attention": form}, context=n)
    if n % 4 == 0 and n > 4:
        layouts |= _case(fsdp=n // 4, context=2, tensor=2)
        if staged and experts:
            layouts |= _case(pipeline=2, expert=n // 4, context=2)
        elif staged:
            layouts |= _case(pipeline=2, data=n // 4, context=2)
    return layouts


def _expert_layouts(n: int, staged: bool) -> dict[str, Overrides]:
    """Lists the layouts that split experts over devices."""
    layouts = _case(expert=n)
    if n % 2 == 0 and n > 2:
        for stage in (3, 2, 1):
            zero = {"mesh.zero": stage}
            layouts |= _case(_zero_note(stage), zero, fsdp=2, expert=n // 2)
        layouts |= _in_parts(data=2, expert=n // 2)
        if staged:
            layouts |= _case(pipeline=2, expert=n // 2)
    if n % 4 == 0 and n > 4:
        layouts |= _case(fsdp=n // 4, expert=2, tensor=2)
    return layouts


def _case(
    note: str = "", more: Overrides | None = None, **sizes: int
) -> dict[str, Overrides]:
    """Makes a layout and its name.

    Args:
      note: text after the mesh axes in the name.
      more: overrides besides the mesh axes.
      **sizes: the mesh axes.
    """
    name = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    mesh = {f"mesh.{axis}": size for axis, size in sizes.items()}
    return {name + note: mesh | (more or {})}


def _in_parts(more: Overrides | None = None, **sizes: int) -> dict[str, Overrides]:
    """Makes a layout that accumulates gradients over several parts of a step."""
    more = {"batch.accumulation": ACCUMULATION} | (more or {})
    note = f", accumulation {ACCUMULATION}{_zero_note(more.get('mesh.zero', 3))}"
    return _case(note, more, **sizes)


def _zero_note(stage: int) -> str:
    return f", zero {stage}" if stage < 3 else ""


def _own_layout(
    run: RunConfig, num_devices: int, others: Mapping[str, Overrides]
) -> dict[str, Overrides]:
    """Makes the config's own layout and its name; {} if another layout is the same."""
    flat = schema.flatten(schema.to_config_dict(run))
    values = {path: flat[path] for path in ONE_DEVICE}
    values["batch.accumulation"] = min(run.batch.accumulation, ACCUMULATION)
    sizes = {axis: values[f"mesh.{axis}"] for axis in AXES}
    known = math.prod(size for size in sizes.values() if size > 0)
    for axis, size in sizes.items():
        if size == -1:
            sizes[axis] = values[f"mesh.{axis}"] = num_devices // known
        if values[f"mesh.dcn.{axis}"] == -1:
            values[f"mesh.dcn.{axis}"] = 1
    values |= _small_pipeline(run, values)
    if any(values.items() <= (ONE_DEVICE | other).items() for other in others.values()):
        return {}
    axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    words = [" x ".join(axes) or "one device"]
    for path in _NAMED:
        if values[path] != ONE_DEVICE[path]:
            name = path.partition(".")[2].replace("_", " ")
            words.append(f"{name} {values[path]}")
    return {f"the config's own: {', '.join(words)}": values}


_NAMED = (  # keys in the name of a config's own layout, besides the mesh axes
    "pipeline.schedule",
    "pipeline.chunks",
    "pipeline.edges",
    "mesh.zero",
    "mesh.sequence_parallel",
    "context.attention",
    "batch.accumulation",
)


def _small_pipeline(run: RunConfig, layout: Overrides) -> Overrides:
    """Shrinks a layout's pipeline to one microbatch per stage and one layer per chunk.

    A schedule from a file needs its own number of microbatches.
    """
    stages = layout["mesh.pipeline"]
    if stages == 1:
        return _defaults(PipelineConfig, "pipeline.")
    overrides: Overrides = {"pipeline.microbatches": stages}
    if layout["pipeline.schedule"].endswith(".json"):
        overrides["pipeline.microbatches"] = layout["pipeline.microbatches"]
    if "num_layers" in run.model:
        chunks = stages * layout["pipeline.chunks"]
        overrides["model.num_layers"] = _layers_on(run, chunks)
    return overrides


def _layers_on(run: RunConfig, chunks: int) -> int:
    """Counts the layers of a model that has one block on each chunk of a pipeline."""
    layers_on = registry.model_hook(run.model_config, "layers_on")
    return layers_on(chunks) if layers_on else chunks


# --- the batch and the initial state --------------------------------------------------


def synthetic_batch(
    run: RunConfig, given: Dataset | None = None
) -> dict[str, np.ndarray]:
    """Makes a batch of random tokens, [B, S], from the seed.

    Weights are unequal, and some rows have none. With data.packing=documents a row
    holds two documents and padding, with segment ids. If samples are not text, the
    batch is the first samples of the data, because only the data knows their format.

    Args:
      run: the shrunk config.
      given: the caller's data; default: those of the config.
    """
    if given is not None:
        return _first_samples(given, run.batch.global_size)
    if not run.data.is_text:
        dataset = open_dataset(
            run.data, sequence_length=0, seed=run.seed, log=lambda _: None
        )
        return dataset.train_batch(0, run.batch.global_size)
    rng = np.random.default_rng(run.seed)
    size = run.batch.global_size
    length = run.batch.sequence_length
    dims = (size, length)
    vocab = run.vocab_size or 256
    weights = rng.choice(np.array([0, 0.5, 1, 2], np.float32), dims)
    weights[:: max(size // 4, 2)] = 0
    batch = {
        "tokens": rng.integers(0, vocab, dims, np.int32),
        "targets": rng.integers(0, vocab, dims, np.int32),
        "weights": weights,
        "positions": np.tile(np.arange(length, dtype=np.int32), (size, 1)),
        "sample": np.arange(size, dtype=np.int32),
    }
    if run.data.packing == "documents":
        cut = rng.integers(1, length - 1, (size, 1))
        end = rng.integers(cut + 1, length)
        index = batch["positions"]
        segments = np.where(index < cut, 1, 2) * (index < end)
        positions = np.where(index < cut, index, index - cut)
        batch["segment_ids"] = segments.astype(np.int32)
        batch["weights"] = np.where(index < end, weights, 0)
        batch["positions"] = positions.astype(np.int32)
    for name, x in compose.batch_shapes(run).items():
        if name not in batch:  # a field that the objective needs
            batch[name] = rng.normal(size=x.shape).astype(x.dtype)
    return batch


def _first_samples(dataset: Dataset, count: int) -> dict[str, np.ndarray]:
    """Reads the first samples of a caller's data, again if a batch has too few."""
    batch = dataset.train_batch(0, count)
    return {name: x[np.arange(count) % len(x)] for name, x in batch.items()}


def routings(run: RunConfig, precision: str, layout: Overrides) -> tuple[Routing, ...]:
    """Lists the routings to compare a layout in, each in a row of the table.

    Only float32 rows let routers choose. In lower precisions rounding decides between
    nearly equal experts, and one token's choice changes an expert's gradient much.
    Layouts that split experts are also compared with an uneven load.
    """
    if not run.model.get("num_experts"):
        return ("",)
    even: Routing = "chosen" if precision == "float32" else "given"
    if layout.get("mesh.expert", 1) > 1:
        return (even, "skewed")
    return (even,)


def batches(
    run: RunConfig, num_layers: int, given: Dataset | None = None
) -> dict[Routing, dict[str, np.ndarray]]:
    """Makes the batch of each routing.

    Args:
      run: the shrunk config.
      num_layers: number of layers of the deepest layout.
      given: the caller's data; default: those of the config.
    """
    batch = synthetic_batch(run, given)
    E = run.model.get("num_experts")
    if not E:
        return {"": batch}
    k = run.model["experts_per_token"]
    rng = np.random.default_rng(run.seed + 2)
    dims = (run.batch.global_size, run.batch.sequence_length, num_layers)
    all_ids = np.broadcast_to(np.arange(E, dtype=np.int32), (*dims, E))
    order = rng.permuted(all_ids, axis=-1)
    quarter = order[order < max(E // 4, k)].reshape(*dims, -1)
    ids: dict[Routing, np.ndarray] = {
        "chosen": np.full((*dims, k), -1, np.int32),
        "given": order[..., :k],
        "skewed": quarter[..., :k],
    }
    return {
        routing: batch | {experts.GIVEN_IDS: expert_ids}
        for routing, expert_ids in ids.items()
    }


def moved_parameters(parameters: Any, seed: int) -> Any:
    """Adds normal noise to every floating-point leaf of host arrays.

    With noise no parameter is zero and no layer is an identity, so every leaf
    influences the step.
    """
    rng = np.random.default_rng(seed)
    return _moved(parameters, lambda dims: JITTER * rng.standard_normal(dims))


def moved_moments(moments: Any, seed: int) -> Any:
    """Adds about 1e-3 to the moments of a fresh optimizer state (host arrays).

    Zero moments would turn rounding errors into whole updates: the first update of Adam
    and Lion is then the sign of the gradient, and Muon's divides by the gradient's
    smallest singular values. Zeros would also hide a moment in the wrong place.
    """
    rng = np.random.default_rng(seed + 1)
    return _moved(moments, lambda dims: MOMENT * rng.uniform(0.5, 1.5, dims))


def _moved(tree: Any, noise: Callable[[tuple[int, ...]], np.ndarray]) -> Any:
    """Adds noise to the floating-point leaves of a tree of host arrays."""

    def move(x: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        moved: np.ndarray = (x + noise(x.shape)).astype(x.dtype)
        return moved

    return jax.tree.map(move, tree)
