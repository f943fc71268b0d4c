"""The proof itself: compile every layout in threads, run one step of each, compare."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist import recipe, trees
from jaxdist.config import ConfigError
from jaxdist.mesh import build_mesh
from jaxdist.precision import PrecisionConfig
from jaxdist.recipe import RunConfig
from jaxdist.training.state import State
from jaxdist.training.step import TrainStep
from jaxdist.verification.comparison import (
    BANDS,
    HEADER,
    WIDTH,
    Arrays,
    Observed,
    Report,
    compare,
    rounding_alone,
    row,
)
from jaxdist.verification.subject import (
    ONE_DEVICE,
    Layout,
    layouts_for,
    moved,
    shrink,
    synthetic_batch,
    with_values,
)

Log = Callable[[str], None]
# XLA may drop roundings to bfloat16 inside a fusion. Which ones depends on how it fuses, so on the
# layout: alone this makes gradients differ by 2e-2. Here all stay where the program has them.
OPTIONS = {"xla_allow_excess_precision": False}
# On the CPU, LLVM's optimisations are most of the compile time. XLA's program (partitioning,
# collectives, fusions) is the same text without them.
CPU_OPTIONS = {"xla_backend_optimization_level": 0}


# --- one step of one layout -----------------------------------------------------------------------


class Programs(NamedTuple):
    """The compiled programs of one layout."""

    built: dict[str, TrainStep]  # by precision
    init: dict[str, Any]  # by dtype of the stored parameters
    inspect: dict[str, Any]  # by precision
    params: dict[str, str]  # dtype of the stored parameters, by precision


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
        run = with_values(self.run, ONE_DEVICE | dict(overrides))
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
