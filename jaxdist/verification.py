"""Proof that a config's layouts compute what one device computes, by running both.

The config is shrunk to tiny sizes, its variants kept. One device gives the reference: a loss, its
gradients, and the parameters after one update. Every layout does the same step on the same batch,
through the same `build_step` as training, and the differences must stay within bands. The step
does not start from the initial parameters (those are compared bit for bit) but from a random point
near them: there no parameter is zero and no layer is an identity, so every leaf takes part.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import config as configs
from jaxdist import recipe, trees
from jaxdist.config import ConfigError
from jaxdist.mesh import AXES, build_mesh
from jaxdist.precision import PrecisionConfig
from jaxdist.recipe import RunConfig
from jaxdist.training.state import State
from jaxdist.training.step import TrainStep

Log = Callable[[str], None]
Arrays = dict[str, np.ndarray]  # path -> array


@dataclass(frozen=True)
class Bands:
    """The largest errors that still count as equal."""

    loss: float  # |d loss| / |loss|
    gradient: float  # worst leaf's max |d| / max |reference|
    parameter: float  # worst leaf's |d|_2 / |reference|_2 after one update
    update: float  # worst leaf's |d|_2 / |reference - start|_2


# An update by the sign of a gradient that is off by 0.02 of its scale errs in 1 of 150 signs, which
# is 0.16 of its norm. A step left out would be 1, a wrong direction 1.4.
BANDS = {
    "float32": Bands(1e-6, 1e-5, 1e-6, math.inf),
    "bfloat16": Bands(1e-3, 2e-2, 2e-2, 0.25),
}
JITTER = 0.05  # standard deviation of the step away from the initial parameters
NOISE = 1e-5  # a leaf whose gradient is this much below the largest is rounding alone
LARGEST_AS_IS = 5_000_000  # parameters of a model that cannot be shrunk
ACCUMULATION = 4
SIZES = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
ONE_DEVICE = (
    {f"mesh.{axis}": 1 for axis in AXES}
    | {f"mesh.dcn.{axis}": 1 for axis in AXES}
    | {"mesh.zero": 3, "mesh.sequence_parallel": False, "batch.accumulation": 1}
)
# XLA may drop roundings to bfloat16 inside a fusion. Which ones depends on how it fuses, so on the
# layout: alone this makes gradients differ by 2e-2. Here all stay where the program has them.
OPTIONS = {"xla_allow_excess_precision": False}
# On the CPU, LLVM's optimisations are most of the compile time. XLA's program (partitioning,
# collectives, fusions) is the same text without them.
CPU_OPTIONS = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Layout:
    """A layout to prove: what it changes of a one-device run, by config path."""

    name: str
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """How far one layout is from one device."""

    layout: str
    precision: str
    loss_error: float
    grad_error: float
    param_error: float
    update_error: float
    init_equal: bool  # initial parameters, bit for bit
    passed: bool
    worst: str  # the leaf with the largest gradient error


@dataclass(frozen=True)
class Report:
    """What was compared with what."""

    reference: dict[str, Any]  # device, losses by precision, parameters, optimizer
    layouts: tuple[Result, ...]
    skipped: dict[str, str]  # layout -> why it cannot be
    shrunk: tuple[str, ...]  # what was changed of the config
    not_compared: tuple[str, ...]  # leaves whose gradient is rounding alone

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.layouts)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values; errors that are not finite are null."""
        values = asdict(self) | {"passed": self.passed}
        values["bands"] = {name: asdict(bands) for name, bands in BANDS.items()}
        for row in values["layouts"]:
            row |= {k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        return values


# --- a small run of the same kind -----------------------------------------------------------------


def shrink(run: RunConfig, num_devices: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run at tiny sizes, every variant kept, and lines that say what was changed.

    Query and kv heads keep their kind: as many of each, one kv head, or groups (8 and 4). A model
    without the sizes of a transformer is used as it is.

    Raises:
      ConfigError: such a model has more than 5 M parameters.
    """
    old = configs.flatten(configs.to_config_dict(run))
    unit = ACCUMULATION * num_devices
    new = {
        "batch.global_size": unit * -(-16 // unit),
        "batch.sequence_length": min(32, run.batch.sequence_length),
        "optimizer.warmup_steps": 0,  # the first update is then at the peak rate: it can be seen
    }
    if set(SIZES) <= set(run.model):
        new |= _small_model(run.model, num_devices, new["batch.sequence_length"])
    else:
        _refuse_if_large(run)
    changed = {path: value for path, value in new.items() if old[path] != value}
    lines = []
    for group in ("model", "batch", "optimizer"):
        paths = [path for path in changed if path.startswith(group + ".")]
        moves = (f"{p.partition('.')[2]} {old[p]} -> {changed[p]}" for p in paths)
        lines += [f"{group}: {', '.join(moves)}"] if paths else []
    return _with(run, changed), tuple(lines)


def _small_model(model: Mapping[str, Any], num_devices: int, length: int) -> dict[str, Any]:
    heads = math.lcm(8, num_devices)
    kinds = {model["num_heads"]: heads, 1: 1}
    sizes = {
        "num_layers": 2,
        "d_model": math.lcm(64, num_devices),
        "d_ff": math.lcm(96, num_devices),
        "num_heads": heads,
        "num_kv_heads": kinds.get(model["num_kv_heads"], 4),
        "head_dim": 8,
        "vocab_size": math.lcm(128, num_devices),
    }
    if model.get("max_positions"):
        sizes["max_positions"] = length
    if model.get("loss_chunk"):
        sizes["loss_chunk"] = 64  # several chunks on any layout
    return {f"model.{name}": value for name, value in sizes.items()}


def _refuse_if_large(run: RunConfig) -> None:
    one = _with(run, ONE_DEVICE)
    spec = recipe.validate(one, jax.devices()[:1])[2]
    if spec.parameter_count > LARGEST_AS_IS:
        missing = ", ".join(sorted(set(SIZES) - set(run.model)))
        raise ConfigError(
            f"{run.model['target']} has {spec.parameter_count:,} parameters and cannot be shrunk "
            f"(it has no {missing}); verify a config of at most {LARGEST_AS_IS:,} parameters"
        )


def _with(run: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    flat = configs.flatten(configs.to_config_dict(run))
    return recipe.from_config(configs.unflatten(flat | dict(overrides)))


# --- the layouts ----------------------------------------------------------------------------------


def layouts_for(run: RunConfig, num_devices: int) -> list[Layout]:
    """Returns the layouts of so many devices that are proved, the config's own last."""
    n = num_devices
    found = [Layout(f"data {n}", {"mesh.data": n}), Layout(f"fsdp {n}", {"mesh.fsdp": n})]
    found += [
        Layout(f"fsdp {n}, zero {stage}", {"mesh.fsdp": n, "mesh.zero": stage}) for stage in range(3)
    ]
    accumulate = {"mesh.fsdp": n, "batch.accumulation": ACCUMULATION}
    found.append(Layout(f"fsdp {n}, accumulation {ACCUMULATION}", accumulate))
    if n % 2 == 0 and n > 2:
        half = {"mesh.fsdp": n // 2}
        found += [
            Layout(f"tensor 2 x fsdp {n // 2}", half | {"mesh.tensor": 2}),
            Layout(
                f"tensor 2 x fsdp {n // 2}, sequence parallel",
                half | {"mesh.tensor": 2, "mesh.sequence_parallel": True},
            ),
            Layout(f"2 slices x fsdp {n // 2}", half | {"mesh.data": 2, "mesh.dcn.data": 2}),
        ]
    if n % 4 == 0 and n > 4:
        sizes = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": n // 4}
        found.append(Layout(f"data 2 x fsdp 2 x tensor {n // 4}", sizes))
    grouped = {"model.num_kv_heads": 4} if set(SIZES) <= set(run.model) else {}
    found.append(Layout(f"tensor {n}{', 4 kv heads' * bool(grouped)}", {"mesh.tensor": n} | grouped))
    return found + _own(run, n, found)


def _own(run: RunConfig, num_devices: int, others: Sequence[Layout]) -> list[Layout]:
    """Returns the config's own layout, unless one of the others is the same."""
    flat = configs.flatten(configs.to_config_dict(run))
    own = {path: flat[path] for path in ONE_DEVICE}
    own["batch.accumulation"] = min(run.batch.accumulation, ACCUMULATION)
    known = math.prod(own[f"mesh.{axis}"] for axis in AXES if own[f"mesh.{axis}"] > 0)
    own |= {p: num_devices // known for p in ONE_DEVICE if p in _SIZE_PATHS and own[p] == -1}
    own |= {p: 1 for p in ONE_DEVICE if p.startswith("mesh.dcn.") and own[p] == -1}
    full = [ONE_DEVICE | dict(layout.overrides) for layout in others]
    if any(all(other[path] == own[path] for path in own) for other in full):
        return []
    sizes = " x ".join(f"{axis} {own[f'mesh.{axis}']}" for axis in AXES if own[f"mesh.{axis}"] > 1)
    return [Layout(f"the config's own: {sizes or 'one device'}", own)]


_SIZE_PATHS = frozenset(f"mesh.{axis}" for axis in AXES)


# --- the batch and the starting point -------------------------------------------------------------


def synthetic_batch(run: RunConfig) -> dict[str, np.ndarray]:
    """Returns a batch from the seed: [B, S] random tokens, unequal weights, some rows without any.

    With data.packing=documents a row holds two documents and padding, with their segment ids.
    """
    rng = np.random.default_rng(run.seed)
    size, length = run.batch.global_size, run.batch.sequence_length
    dims = (size, length)
    vocab = run.vocab_size or 256
    weights = rng.choice(np.float32([0, 0.5, 1, 2]), dims)
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
        place = batch["positions"]
        batch["segment_ids"] = np.where(place < cut, 1, np.where(place < end, 2, 0)).astype(np.int32)
        batch["weights"] = np.where(place < end, weights, 0)
        batch["positions"] = np.where(place < cut, place, place - cut).astype(np.int32)
    return batch


def moved(parameters: Any, seed: int) -> Any:
    """Returns the tree of arrays with normal noise added to every floating-point leaf, on the host."""
    rng = np.random.default_rng(seed)

    def move(x: np.ndarray) -> np.ndarray:
        noise = JITTER * rng.standard_normal(x.shape)
        return (x + noise).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(move, parameters)


# --- one step of one layout -----------------------------------------------------------------------


class Programs(NamedTuple):
    """The compiled programs of one layout."""

    built: dict[str, TrainStep]  # by precision
    init: dict[str, Any]  # by dtype of the stored parameters
    inspect: dict[str, Any]  # by precision
    params: dict[str, str]  # dtype of the stored parameters, by precision


class Observed(NamedTuple):
    """What one step showed."""

    loss: float
    gradients: Arrays
    start: Arrays  # parameters before the update
    parameters: Arrays  # and after it
    initial: Any  # tree of the initial parameters


_tracing = threading.Lock()  # flax's switches are global to the process


def compile_layout(
    run: RunConfig,
    precisions: Sequence[str],
    devices: Sequence[jax.Device],
    batch: Mapping[str, np.ndarray],
) -> Programs:
    """Returns the compiled init and step of a run on these devices, in each precision.

    Raises:
      ConfigError: the layout cannot be.
    """
    options = OPTIONS | (CPU_OPTIONS if devices[0].platform == "cpu" else {})
    programs = Programs({}, {}, {}, {})
    for precision in precisions:
        # In float32 nothing may be rounded to less; in bfloat16 the config says what is stored.
        stored = "float32" if precision == "float32" else run.precision.params
        this = dataclasses.replace(run, precision=PrecisionConfig(stored, precision))
        with _tracing, jax.default_matmul_precision("highest" if precision == "float32" else None):
            _, rules, spec = recipe.validate(this, devices)
            built = recipe.build_step(this, spec, build_mesh(this.mesh, devices), rules)
            where = built.batch_shardings(batch)
            inputs = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name])
                for name, x in batch.items()
            }
            step = built.inspect.lower(built.abstract_state, inputs)
            start = None if stored in programs.init else built.init.lower()
        programs.built[precision], programs.params[precision] = built, stored
        programs.inspect[precision] = step.compile(compiler_options=options)
        if start is not None:
            programs.init[stored] = start.compile(compiler_options=options)
    return programs


def observe(
    programs: Programs, precision: str, batch: Mapping[str, np.ndarray], seed: int
) -> Observed:
    """Returns what one step from the moved starting point shows."""
    built = programs.built[precision]
    state: State = programs.init[programs.params[precision]]()
    initial = jax.device_get(state.trainable)
    start = moved(initial, seed)
    state = state._replace(trainable=jax.device_put(start, built.shardings.trainable))
    inputs = jax.device_put(dict(batch), built.batch_shardings(batch))
    after, metrics, gradients = programs.inspect[precision](state, inputs)
    loss = float(metrics["loss"])
    return Observed(loss, _host(gradients), _host(start), _host(after.trainable), initial)


def _host(tree: Any) -> Arrays:
    flat = trees.flatten_names(jax.device_get(tree))
    return {name: np.asarray(x, np.float64) for name, x in flat.items()}


# --- comparing ------------------------------------------------------------------------------------


def rounding_alone(gradients: Arrays) -> set[str]:
    """Returns the leaves whose gradient is zero in exact arithmetic, judged from float32 gradients.

    Such is the key bias of a softmax without rotary positions. What is computed for it is noise, so
    neither it nor an update that divides by its size can be the same twice.
    """
    largest = {name: np.abs(g).max(initial=0.0) for name, g in gradients.items()}
    top = max(largest.values())
    return {name for name, size in largest.items() if 0 < size < NOISE * top}


def compare(
    name: str, precision: str, seen: Observed, reference: Observed, excluded: Collection[str]
) -> Result:
    """Returns the errors of a layout against one device; leaves in `excluded` are left out."""
    bands = BANDS[precision]
    gradients, parameters, updates = {}, [], []
    for leaf in [leaf for leaf in reference.gradients if leaf not in excluded]:
        wanted = reference.gradients[leaf]
        gradients[leaf] = _ratio(seen.gradients[leaf] - wanted, wanted, np.inf)
        wanted = reference.parameters[leaf]
        difference = seen.parameters[leaf] - wanted
        parameters.append(_ratio(difference, wanted))
        updates.append(_ratio(difference, wanted - reference.start[leaf]))
    worst = max(gradients, key=lambda leaf: np.nan_to_num(gradients[leaf], nan=np.inf))
    loss = abs(seen.loss - reference.loss) / abs(reference.loss)
    errors = (loss, gradients[worst], _largest(parameters), _largest(updates))
    equal = jax.tree.all(jax.tree.map(np.array_equal, seen.initial, reference.initial))
    # Parameters stored in bfloat16 move by roundings, so only where they end can be compared.
    rounded = any(x.dtype != np.float32 for x in jax.tree.leaves(reference.initial))
    limits = (bands.loss, bands.gradient, bands.parameter, math.inf if rounded else bands.update)
    within = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    return Result(name, precision, *errors, init_equal=equal, passed=within and equal, worst=worst)


def _ratio(difference: np.ndarray, reference: np.ndarray, order: float | None = None) -> float:
    """Returns the norm of the difference over that of the reference; 0 where both are zero."""
    error, size = (float(np.linalg.norm(x.ravel(), order)) for x in (difference, reference))
    return 0.0 if error == 0 else error / size if size else math.inf


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


# --- the whole proof ------------------------------------------------------------------------------


def prove(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    precisions: Sequence[str] = tuple(BANDS),
    only: str = "",
    log: Log = print,
) -> Report:
    """Returns how each layout of these devices compares with one device.

    Args:
      run: a config of any size; it is shrunk.
      precisions: compute dtypes, of "float32" and "bfloat16".
      only: proves just the layouts whose name contains this.
      log: is told the progress, a line each.

    Raises:
      ConfigError: there is nothing to compare, or the config itself cannot be.
    """
    small, shrunk = shrink(run, len(devices))
    wanted = [layout for layout in layouts_for(small, len(devices)) if only in layout.name]
    if not wanted or len(devices) < 2:
        names = "; ".join(layout.name for layout in layouts_for(small, len(devices)))
        raise ConfigError(
            f"no layout to compare with one device ({len(devices)} devices, only={only!r}); "
            f"layouts here: {names}; emulate more devices with JAX_PLATFORMS=cpu and --devices 8"
        )
    for line in shrunk:
        log(f"shrunk {line}")
    log(f"comparing {len(wanted)} layouts of {len(devices)} x {devices[0].device_kind} with one")
    batch = synthetic_batch(small)
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        compiling = _Compiling(pool, small, devices, batch)
        # Leaves to leave out are judged in float32, so that reference is always there.
        both = dict.fromkeys(("float32", *precisions))
        references = {v: compiling.start(dict(v), tuple(both), 1) for v in _variants(wanted)}
        layouts = [compiling.start(x.overrides, precisions, len(devices)) for x in wanted]
        seen = {v: _observe_all(f.result(), batch, small.seed) for v, f in references.items()}
        results, skipped = [], {}
        log(HEADER)
        for layout, programs in zip(wanted, layouts, strict=True):
            try:
                found = _observe_all(programs.result(), batch, small.seed)
            except ConfigError as error:
                skipped[layout.name] = str(error)
                log(f"{layout.name:<{WIDTH}} cannot be: {error}")
                continue
            reference = seen[_variant(layout)]
            excluded = rounding_alone(reference["float32"].gradients)
            for precision in precisions:
                result = compare(
                    layout.name, precision, found[precision], reference[precision], excluded
                )
                results.append(result)
                log(row(result))
    first = next(iter(seen.values()))
    about = {
        "devices": 1,
        "device_kind": devices[0].device_kind,
        "loss": {precision: first[precision].loss for precision in precisions},
        "parameters": sum(x.size for x in first["float32"].parameters.values()),
        "model": dict(small.model),
        "optimizer": small.optimizer.name,
    }
    excluded = rounding_alone(first["float32"].gradients)
    return Report(about, tuple(results), skipped, shrunk, tuple(sorted(excluded)))


@dataclass(frozen=True)
class _Compiling:
    """Starts compiling runs in threads."""

    pool: ThreadPoolExecutor
    run: RunConfig
    devices: Sequence[jax.Device]
    batch: Mapping[str, np.ndarray]

    def start(
        self, overrides: Mapping[str, Any], precisions: Sequence[str], num_devices: int
    ) -> Future[Programs]:
        run = _with(self.run, ONE_DEVICE | dict(overrides))
        devices = self.devices[:num_devices]
        return self.pool.submit(compile_layout, run, precisions, devices, self.batch)


def _variant(layout: Layout) -> tuple[tuple[str, Any], ...]:
    """Returns what a layout changes of the model: it needs a reference of its own."""
    return tuple((p, v) for p, v in layout.overrides.items() if p.startswith("model."))


def _variants(layouts: Sequence[Layout]) -> list[tuple[tuple[str, Any], ...]]:
    return list(dict.fromkeys(map(_variant, layouts)))


def _observe_all(
    programs: Programs, batch: Mapping[str, np.ndarray], seed: int
) -> dict[str, Observed]:
    return {precision: observe(programs, precision, batch, seed) for precision in programs.built}


# --- the table ------------------------------------------------------------------------------------

WIDTH = 40
HEADER = (
    f"{'layout':<{WIDTH}} {'precision':<9} {'loss':>8} {'gradients':>9} {'parameters':>10} {'update':>8}  "
    f"{'init':<9} verdict"
)


def row(result: Result) -> str:
    """Returns one line of the table."""
    verdict = "equal" if result.passed else f"NOT EQUAL, worst gradient: {result.worst}"
    return (
        f"{result.layout:<{WIDTH}} {result.precision:<9} {result.loss_error:8.1e} "
        f"{result.grad_error:9.1e} {result.param_error:10.1e} {result.update_error:8.1e}  "
        f"{'identical' if result.init_equal else 'DIFFERS':<9} {verdict}"
    )


def summary(report: Report) -> str:
    """Returns the lines under the table: what was left out, and the verdict."""
    lines = []
    if report.not_compared:
        names = ", ".join(report.not_compared)
        lines.append(f"not compared, their gradient is zero in exact arithmetic: {names}")
    wrong = [result for result in report.layouts if not result.passed]
    count = len(report.layouts)
    verdict = f"{len(wrong)} of {count} rows are NOT equal to one device"
    lines.append(verdict if wrong else f"all {count} rows equal one device")
    return "\n".join(lines)
