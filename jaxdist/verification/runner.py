"""The proof itself: compile every layout in threads, run one step of each, compare."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import jax
import numpy as np

from jaxdist.config import ConfigError, trees
from jaxdist.models import experts
from jaxdist.parallel.precision import (
    RECIPES,
    ComputeName,
    PrecisionConfig,
    RecipeName,
)
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, validation
from jaxdist.trainer.run_config import RunConfig
from jaxdist.verification import cases, comparison
from jaxdist.verification.comparison import Arrays, Observed, Report, Result

Log = Callable[[str], None]
_Variant = tuple[tuple[str, Any], ...]  # what a layout changes of the model
# of a row: a format of `precision.compute`, or a recipe of `precision.matmul`
Precision = ComputeName | RecipeName
PRECISIONS: tuple[ComputeName, ...] = ("float32", "bfloat16")
# XLA may drop roundings to bfloat16 inside a fusion. Which ones depends on how it
# fuses, so on the layout: alone this makes gradients differ by 2e-2. Here all stay
# where the program has them.
OPTIONS = {"xla_allow_excess_precision": False}
# On the CPU, LLVM's optimisations are most of the compile time. XLA's program
# (partitioning, collectives, fusions) is the same text without them.
CPU_OPTIONS = {"xla_backend_optimization_level": 0}
# Layouts compiled before their turn. Programs of the CPU take up to 2,000 memory maps a
# layout, of the 65,530 that Linux gives a process (vm.max_map_count); XLA aborts where
# one more is refused.
AHEAD = 6


# --- one step of one layout -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Program:
    """The compiled programs of one layout in one precision."""

    built: TrainStep
    init: Any
    inspect: Any


_tracing = threading.Lock()  # flax's switches are global to the process


def compile_layout(
    run: RunConfig,
    precisions: Sequence[Precision],
    devices: Sequence[jax.Device],
    batch: Mapping[str, np.ndarray],
) -> dict[str, Program]:
    """Compiles the init and the step of a run on these devices, by precision.

    Raises:
      ConfigError: the layout cannot be.
    """
    options: dict[str, Any] = dict(OPTIONS)
    if devices[0].platform == "cpu":
        options |= CPU_OPTIONS
    programs: dict[str, Program] = {}
    # by dtype of the stored parameters, and if there is a loss scale
    inits: dict[tuple[str, bool], Any] = {}
    for precision in precisions:
        this = compose.with_overrides(run, {"precision": _precision(run, precision)})
        init_key = (this.precision.params, this.precision.format.scales_loss)
        matmuls = "highest" if precision == "float32" else None
        with _tracing, jax.default_matmul_precision(matmuls):
            composition = validation.validate(this, devices)
            if composition.spec.streams and this.batch.accumulation > 1:
                raise ConfigError(
                    "the parts of a step draw otherwise from the model's own nnx.Rngs"
                )
            built = composition.build_step(devices)
            inputs = (built.abstract_state, built.abstract_batch(batch))
            step = built.inspect.lower(*inputs)
            init = None if init_key in inits else built.init.lower()
        if init is not None:
            inits[init_key] = init.compile(compiler_options=options)
        compiled = step.compile(compiler_options=options)
        programs[precision] = Program(built, inits[init_key], compiled)
    return programs


def precisions_of(run: RunConfig) -> tuple[Precision, ...]:
    """Lists the precisions that a run's layouts are compared in."""
    rows: tuple[Precision, ...] = PRECISIONS
    if run.precision.compute not in PRECISIONS:
        rows = ("float32", run.precision.compute)
    if run.precision.matmul != "compute":
        rows += (run.precision.matmul,)
    return rows


def _precision(run: RunConfig, name: Precision) -> PrecisionConfig:
    """Makes the config of a row: in float32 nothing is stored in less, else the run
    says in what.
    """
    if name == "float32":
        return PrecisionConfig("float32", "float32")
    if name not in RECIPES:
        return PrecisionConfig(run.precision.params, cast(ComputeName, name))
    # Of all kernels: at tiny sizes every one is small.
    return PrecisionConfig(
        run.precision.params,
        cast(ComputeName, RECIPES[name].dtype),
        matmul=cast(RecipeName, name),
        fp8_small_kernels=True,
    )


def observe(program: Program, batch: Mapping[str, np.ndarray], seed: int) -> Observed:
    """Runs one step from the moved starting point."""
    built = program.built
    fresh: State = program.init()
    # as checkpoints have it: stages and padding are a layout's own
    flat = built.views.flat(fresh)
    initial = jax.device_get(flat.trainable)
    start = cases.moved_parameters(initial, seed)
    moments = cases.moved_moments(jax.device_get(flat.opt_state.optimizer), seed)
    flat = flat._replace(
        trainable=start, opt_state=flat.opt_state._replace(optimizer=moments)
    )
    where = jax.tree.map(lambda x: x.sharding, built.views.abstract)
    state = built.views.staged(jax.device_put(flat, where))
    inputs = jax.device_put(dict(batch), built.batch_shardings(batch))
    after, metrics, gradients = program.inspect(state, inputs)
    summed = built.views.flat(after._replace(trainable=gradients)).trainable
    after = built.views.flat(after)
    load = metrics.get(f"stats/{experts.LOAD_METRIC}")
    return Observed(
        loss=float(metrics["loss"]),
        gradients=_host(summed),
        start=_host(start),
        parameters=_host(after.trainable),
        initial=initial,
        state=_host(after.model_state),
        load=None if load is None else np.asarray(load),
    )


def _host(tree: Any) -> Arrays:
    flat = trees.flatten_names(jax.device_get(tree))
    return {name: np.asarray(x, np.float64) for name, x in flat.items()}


# --- the whole proof ------------------------------------------------------------------


def verify_layouts(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    precisions: Sequence[Precision] = (),
    only: str = "",
    log: Log = print,
) -> Report:
    """Compares each layout of these devices with one device.

    Args:
      run: a config of any size; it is shrunk.
      precisions: dtypes, and recipes of `precision.matmul`; default: `precisions_of`
        the run.
      only: proves just the layouts whose name contains this.
      log: is told the progress, a line each.

    Raises:
      ConfigError: there is nothing to compare, or the config itself cannot be.
    """
    small, shrunk = cases.shrink_config(run, len(devices))
    wanted = _wanted_layouts(small, len(devices), only)
    for line in shrunk:
        log(f"shrunk {line}")
    log(
        f"comparing {len(wanted)} layouts of "
        f"{len(devices)} x {devices[0].device_kind} with one"
    )
    batches = cases.batches(small, _depth(small, wanted))
    some_batch = next(iter(batches.values()))
    precisions = precisions or precisions_of(run)
    # Which leaves to leave out is judged in float32, so that reference is always there.
    with_float32 = tuple(dict.fromkeys(("float32", *precisions)))
    results: list[Result] = []
    skipped: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:

        def start(
            overrides: cases.Overrides,
            precisions: Sequence[Precision],
            devices: Sequence[jax.Device],
        ) -> Future[dict[str, Program]]:
            layout = compose.with_overrides(small, cases.ONE_DEVICE | overrides)
            return pool.submit(compile_layout, layout, precisions, devices, some_batch)

        references = {
            variant: start(dict(variant), with_float32, devices[:1])
            for variant in map(_variant, wanted.values())
        }
        compiling = _ahead(
            lambda name: start(wanted[name], precisions, devices), wanted
        )
        programs_of = {
            variant: future.result() for variant, future in references.items()
        }
        one = _OneDevice(small, batches, programs_of)
        log(comparison.HEADER)
        for name, future in compiling:
            try:
                programs = future.result()
            except ConfigError as error:
                skipped[name] = str(error)
                log(f"{name:<{comparison.WIDTH}} cannot be: {error}")
                continue
            for result in _compare_all(name, wanted[name], programs, one):
                results.append(result)
                log(comparison.row(result))
    if not results:
        raise ConfigError([f"{name} cannot be: {why}" for name, why in skipped.items()])
    first = one.observed(_variant(next(iter(wanted.values()))), next(iter(batches)))
    not_compared = comparison.rounding_alone(first["float32"].gradients)
    return Report(
        reference=_reference(small, devices, first),
        layouts=tuple(results),
        skipped=skipped,
        shrunk=shrunk,
        not_compared=tuple(sorted(not_compared)),
    )


def _ahead(
    start: Callable[[str], Future], names: Iterable[str]
) -> Iterator[tuple[str, Future]]:
    """Starts a few, and gives each name with its future; whenever one is taken, another
    starts.
    """
    rest = iter(names)
    started = deque((name, start(name)) for name in islice(rest, AHEAD))

    def in_turn() -> Iterator[tuple[str, Future]]:
        while started:
            yield started.popleft()
            started.extend((name, start(name)) for name in islice(rest, 1))

    return in_turn()


def _wanted_layouts(
    run: RunConfig, num_devices: int, only: str
) -> dict[str, cases.Overrides]:
    known = cases.layouts_for(run, num_devices)
    wanted = {name: overrides for name, overrides in known.items() if only in name}
    if not wanted or num_devices < 2:
        raise ConfigError(
            f"no layout to compare with one device ({num_devices} devices, "
            f"only={only!r}); layouts here: {'; '.join(known)}; "
            "emulate more devices with JAX_PLATFORMS=cpu and --devices 8"
        )
    return wanted


def _depth(run: RunConfig, layouts: Mapping[str, cases.Overrides]) -> int:
    """Counts the layers of the deepest layout."""
    num_layers = run.model.get("num_layers", 0)
    changed = [layout.get("model.num_layers", 0) for layout in layouts.values()]
    return max(num_layers, *changed)


@dataclass
class _OneDevice:
    """What one device shows, by variant of the model and by routing; each step is run
    once.
    """

    run: RunConfig
    batches: Mapping[cases.Routing, Mapping[str, np.ndarray]]
    programs: Mapping[_Variant, Mapping[str, Program]]
    _seen: dict[tuple[_Variant, cases.Routing], dict[str, Observed]] = field(
        default_factory=dict
    )

    def observed(
        self, variant: _Variant, routing: cases.Routing
    ) -> dict[str, Observed]:
        """Gives what a step shows, by precision."""
        if (variant, routing) not in self._seen:
            batch = self.batches[routing]
            self._seen[variant, routing] = {
                name: observe(program, batch, self.run.seed)
                for name, program in self.programs[variant].items()
            }
        return self._seen[variant, routing]


def _compare_all(
    name: str, layout: cases.Overrides, programs: Mapping[str, Program], one: _OneDevice
) -> Iterator[Result]:
    """Yields how a layout compares in each precision and routing."""
    for precision, program in programs.items():
        for routing in cases.routings(one.run, precision, layout):
            expected = one.observed(_variant(layout), routing)
            excluded = comparison.rounding_alone(expected["float32"].gradients)
            seen = observe(program, one.batches[routing], one.run.seed)
            yield comparison.compare(
                name, precision, seen, expected, excluded, routing=routing
            )


def _reference(
    run: RunConfig, devices: Sequence[jax.Device], seen: Mapping[str, Observed]
) -> dict[str, Any]:
    """Describes the reference in JSON values."""
    return {
        "devices": 1,
        "device_kind": devices[0].device_kind,
        "model": dict(run.model),
        "optimizer": run.optimizer.name,
        "parameters": sum(x.size for x in seen["float32"].parameters.values()),
        "loss": {precision: observed.loss for precision, observed in seen.items()},
        "jax": jax.__version__,
    }


def _variant(overrides: cases.Overrides) -> _Variant:
    """Finds what a layout changes of the model: it needs a reference of its own."""
    return tuple(
        (path, value) for path, value in overrides.items() if path.startswith("model.")
    )
