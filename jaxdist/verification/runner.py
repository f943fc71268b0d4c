"""The verification run: compile each layout in threads, run one step, compare."""

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
from jaxdist.trainer import compose, initial_weights, validation
from jaxdist.trainer.compose import UserInputs
from jaxdist.trainer.run_config import RunConfig
from jaxdist.verification import cases, comparison
from jaxdist.verification.comparison import Arrays, Observed, Report, Result

Log = Callable[[str], None]
_Variant = tuple[tuple[str, Any], ...]  # a layout's overrides of the model
# a format of `precision.compute`, or a recipe of `precision.matmul`
Precision = ComputeName | RecipeName
PRECISIONS: tuple[ComputeName, ...] = ("float32", "bfloat16")
# XLA may drop roundings to bfloat16 inside a fusion. It fuses differently in each
# layout, which alone makes gradients differ by 2e-2. This option keeps all roundings.
OPTIONS = {"xla_allow_excess_precision": False}
# On the CPU, LLVM's optimizations take most of the compile time. XLA's program
# (partitioning, collectives, fusions) is the same text without them.
CPU_OPTIONS = {"xla_backend_optimization_level": 0}
# Number of layouts that are compiled before their turn. CPU programs take up to 2,000
# memory maps per layout, and Linux allows a process 65,530 (vm.max_map_count); XLA
# aborts if Linux refuses one.
AHEAD = 6


# --- one step of one layout -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Program:
    """The compiled programs of one layout in one precision."""

    built: TrainStep
    init: Any
    inspect: Any
    # the caller's initial values by path; None = those of the model
    initial: Mapping[str, np.ndarray] | None = None

    def first_state(self) -> State:
        """Makes the state before the step."""
        state: State = self.init(*_arguments_of_init(self.built, self.initial))
        return state


def _arguments_of_init(
    built: TrainStep, initial: Mapping[str, np.ndarray] | None
) -> list[Any]:
    """Lists the arguments of a layout's init: the initial values, if there are any."""
    return [initial_weights.on_devices(initial, built)] if initial else []


_Compiling = Future[dict[str, Program]]  # a layout's programs, by precision

_FROM_CONFIG = UserInputs()  # the config has the model, the data and the optimizer
_tracing = threading.Lock()  # flax's switches are global to the process


def compile_layout(
    run: RunConfig,
    precisions: Sequence[Precision],
    devices: Sequence[jax.Device],
    batch: Mapping[str, np.ndarray],
    given: UserInputs = _FROM_CONFIG,
) -> dict[str, Program]:
    """Compiles the init and the step of a layout in each precision.

    Args:
      run: the config with the layout.
      precisions: the precisions.
      devices: the devices of the layout.
      batch: a batch, for its shapes.
      given: the caller's model, data and optimizer, in place of those of the config.

    Raises:
      ConfigError: the layout is illegal.
    """
    options: dict[str, Any] = dict(OPTIONS)
    if devices[0].platform == "cpu":
        options |= CPU_OPTIONS
    programs: dict[str, Program] = {}
    # by dtype of the stored parameters and whether there is a loss scale
    inits: dict[tuple[str, bool], Any] = {}
    for precision in precisions:
        config = compose.with_overrides(run, {"precision": _precision(run, precision)})
        init_key = (config.precision.params, config.precision.format.scales_loss)
        matmuls = "highest" if precision == "float32" else None
        with _tracing, jax.default_matmul_precision(matmuls):
            composition = validation.validate(
                config, devices, with_data=given.dataset is None, build=given.build
            )
            if composition.spec.streams and config.batch.accumulation > 1:
                raise ConfigError(
                    "with accumulation, the model's own nnx.Rngs draw other numbers than in one part"
                )
            built = composition.build_step(devices, optimizer=given.optimizer)
            inputs = (built.abstract_state, built.abstract_batch(batch))
            step = built.inspect.lower(*inputs)
            init = None
            if init_key not in inits:
                init = built.init.lower(*_arguments_of_init(built, given.initial))
        if init is not None:
            inits[init_key] = init.compile(compiler_options=options)
        compiled = step.compile(compiler_options=options)
        programs[precision] = Program(built, inits[init_key], compiled, given.initial)
    return programs


def precisions_of(run: RunConfig) -> tuple[Precision, ...]:
    """Lists the precisions in which a run's layouts are compared by default."""
    rows: tuple[Precision, ...] = PRECISIONS
    if run.precision.compute not in PRECISIONS:
        rows = ("float32", run.precision.compute)
    if run.precision.matmul != "compute":
        rows += (run.precision.matmul,)
    return rows


def _precision(run: RunConfig, name: Precision) -> PrecisionConfig:
    """Makes the precision config of a row.

    The float32 row also stores parameters in float32. Other rows store them as the run
    does.
    """
    if name == "float32":
        return PrecisionConfig("float32", "float32")
    if name not in RECIPES:
        return PrecisionConfig(run.precision.params, cast(ComputeName, name))
    # The recipe must apply to small kernels, because at tiny sizes all are small.
    return PrecisionConfig(
        run.precision.params,
        cast(ComputeName, RECIPES[name].dtype),
        matmul=cast(RecipeName, name),
        fp8_small_kernels=True,
    )


def observe(program: Program, batch: Mapping[str, np.ndarray], seed: int) -> Observed:
    """Runs one step from an initial state with noise added to it.

    Args:
      program: the layout's programs.
      batch: the batch on the host.
      seed: the seed of the noise.
    """
    built = program.built
    fresh = program.first_state()
    # The flat view, which checkpoints use, has neither stages nor padding: it has the
    # same shapes in every layout.
    flat = built.views.flat(fresh)
    initial = jax.device_get(flat.trainable)
    start = cases.moved_parameters(initial, seed)
    moments = cases.moved_moments(jax.device_get(flat.opt_state.optimizer), seed)
    flat = flat._replace(
        trainable=start, opt_state=flat.opt_state._replace(optimizer=moments)
    )
    shardings = jax.tree.map(lambda x: x.sharding, built.views.abstract)
    state = built.views.by_stage(jax.device_put(flat, shardings))
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
    """Copies a tree of arrays to the host in float64, by path."""
    flat = trees.flatten_names(jax.device_get(tree))
    return {name: np.asarray(x, np.float64) for name, x in flat.items()}


# --- all layouts ----------------------------------------------------------------------


def verify_layouts(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    precisions: Sequence[Precision] = (),
    only: str = "",
    log: Log = print,
    given: UserInputs = _FROM_CONFIG,
) -> Report:
    """Compares one step of each layout of these devices with one device.

    Args:
      run: a config of any size; it is shrunk. A caller's model keeps its size.
      devices: the devices to lay the run out on.
      precisions: dtypes of compute and recipes of `precision.matmul`; default:
        `precisions_of(run)`.
      only: a part of a layout's name; other layouts are skipped.
      log: called with each line of the output.
      given: the caller's model, data and optimizer, in place of those of the config.

    Raises:
      ConfigError: there is nothing to compare, or the config itself is illegal.
    """
    small, shrunk = cases.shrink_config(run, len(devices), given.build)
    layouts = _select_layouts(small, len(devices), only, given)
    for line in shrunk:
        log(f"shrunk {line}")
    log(
        f"comparing {len(layouts)} layouts of "
        f"{len(devices)} x {devices[0].device_kind} with one"
    )
    batches = cases.batches(small, _depth(small, layouts), given.dataset)
    some_batch = next(iter(batches.values()))
    precisions = precisions or precisions_of(run)
    # The float32 reference tells which leaves cannot be compared, so it always runs.
    with_float32 = tuple(dict.fromkeys(("float32", *precisions)))
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:

        def start(
            overrides: cases.Overrides,
            precisions: Sequence[Precision],
            devices: Sequence[jax.Device],
        ) -> _Compiling:
            """Starts compiling a layout in a thread."""
            layout = compose.with_overrides(small, cases.ONE_DEVICE | overrides)
            return pool.submit(
                compile_layout, layout, precisions, devices, some_batch, given
            )

        references = {
            variant: start(dict(variant), with_float32, devices[:1])
            for variant in map(_variant, layouts.values())
        }
        compiling = _compile_ahead(
            lambda name: start(layouts[name], precisions, devices), layouts
        )
        reference_programs = {
            variant: future.result() for variant, future in references.items()
        }
        one_device = _OneDevice(small, batches, reference_programs)
        log(comparison.HEADER)
        results, skipped = _compare_layouts(compiling, layouts, one_device, log)
    if not results:
        raise ConfigError(
            [f"{name} is illegal: {why}" for name, why in skipped.items()]
        )
    first_variant = _variant(next(iter(layouts.values())))
    first = one_device.observed(first_variant, next(iter(batches)))
    not_compared = comparison.rounding_alone(first["float32"].gradients)
    return Report(
        reference=_reference(small, devices, first),
        layouts=tuple(results),
        skipped=skipped,
        shrunk=shrunk,
        not_compared=tuple(sorted(not_compared)),
    )


def _compile_ahead(
    start: Callable[[str], _Compiling], names: Iterable[str]
) -> Iterator[tuple[str, _Compiling]]:
    """Starts compiling `AHEAD` layouts at once, and one more for each that is taken.

    Args:
      start: starts to compile a layout.
      names: the layouts.

    Returns:
      An iterator over (name, future). Some layouts are started by the call itself.
    """
    remaining = iter(names)
    started = deque((name, start(name)) for name in islice(remaining, AHEAD))

    def in_turn() -> Iterator[tuple[str, _Compiling]]:
        while started:
            yield started.popleft()
            started.extend((name, start(name)) for name in islice(remaining, 1))

    return in_turn()


def _select_layouts(
    run: RunConfig, num_devices: int, only: str, given: UserInputs
) -> dict[str, cases.Overrides]:
    """Selects the layouts whose name contains `only`, or is it with axes in another order.

    Raises:
      ConfigError: there are none, or there is only one device.
    """
    spec = None
    if given.build is not None:
        spec = compose.model_spec(run, given.build)
    known = cases.layouts_for(run, num_devices, spec)
    if num_devices < 2:
        raise ConfigError(
            "there is one device, and layouts need two: set JAX_PLATFORMS=cpu, and "
            "`verify` emulates them"
        )
    selected = {
        name: overrides
        for name, overrides in known.items()
        if only in name or _in_one_order(only) == _in_one_order(name)
    }
    if not selected:
        raise ConfigError(
            f"no layout of {num_devices} devices has {only!r} in its name; "
            f"layouts here: {'; '.join(known)}"
        )
    return selected


def _in_one_order(name: str) -> str:
    """Sorts the axes in the name of a layout: "fsdp 4 x tensor 2, zero 1"."""
    axes, comma, note = name.partition(", ")
    return " x ".join(sorted(axes.split(" x "))) + comma + note


def _depth(run: RunConfig, layouts: Mapping[str, cases.Overrides]) -> int:
    """Counts the layers of the deepest layout."""
    num_layers: int = run.model.get("num_layers", 0)
    depths = [num_layers]
    depths += [layout.get("model.num_layers", 0) for layout in layouts.values()]
    return max(depths)


@dataclass
class _OneDevice:
    """The reference: steps on one device, by variant of the model and by routing.

    Each step runs once, when it is first needed.
    """

    run: RunConfig
    batches: Mapping[cases.Routing, Mapping[str, np.ndarray]]
    programs: Mapping[_Variant, Mapping[str, Program]]
    _observed: dict[tuple[_Variant, cases.Routing], dict[str, Observed]] = field(
        default_factory=dict
    )

    def observed(
        self, variant: _Variant, routing: cases.Routing
    ) -> dict[str, Observed]:
        """Computes the results of a step, by precision."""
        if (variant, routing) not in self._observed:
            batch = self.batches[routing]
            self._observed[variant, routing] = {
                name: observe(program, batch, self.run.seed)
                for name, program in self.programs[variant].items()
            }
        return self._observed[variant, routing]


def _compare_layouts(
    compiling: Iterator[tuple[str, _Compiling]],
    layouts: Mapping[str, cases.Overrides],
    one_device: _OneDevice,
    log: Log,
) -> tuple[list[Result], dict[str, str]]:
    """Compares layouts with one device as soon as each is compiled.

    Returns:
      The results, and the illegal layouts with their reasons.
    """
    results: list[Result] = []
    skipped: dict[str, str] = {}
    for name, future in compiling:
        try:
            programs = future.result()
        except ConfigError as error:
            skipped[name] = str(error)
            log(f"{name:<{comparison.WIDTH}} is illegal: {error}")
            continue
        for result in _compare(name, layouts[name], programs, one_device):
            results.append(result)
            log(comparison.row(result))
    return results, skipped


def _compare(
    name: str,
    layout: cases.Overrides,
    programs: Mapping[str, Program],
    one_device: _OneDevice,
) -> Iterator[Result]:
    """Yields the comparison of a layout in each precision and routing."""
    for precision, program in programs.items():
        for routing in cases.routings(one_device.run, precision, layout):
            expected = one_device.observed(_variant(layout), routing)
            excluded = comparison.rounding_alone(expected["float32"].gradients)
            batch = one_device.batches[routing]
            observed = observe(program, batch, one_device.run.seed)
            yield comparison.compare(
                name, precision, observed, expected, excluded, routing=routing
            )


def _reference(
    run: RunConfig, devices: Sequence[jax.Device], observed: Mapping[str, Observed]
) -> dict[str, Any]:
    """Describes the reference in JSON values.

    Args:
      run: the shrunk config.
      devices: the devices.
      observed: results of a step on one device, by precision.
    """
    return {
        "devices": 1,
        "device_kind": devices[0].device_kind,
        "model": dict(run.model),
        "optimizer": run.optimizer.name,
        "parameters": sum(x.size for x in observed["float32"].parameters.values()),
        "loss": {precision: step.loss for precision, step in observed.items()},
        "jax": jax.__version__,
    }


def _variant(overrides: cases.Overrides) -> _Variant:
    """Selects a layout's overrides of the model, which need a reference of their own."""
    return tuple(
        (path, value) for path, value in overrides.items() if path.startswith("model.")
    )
