"""Measures how a config's train step scales over devices, with a prediction.

    python benchmarks/step/scaling.py --config quickstart --devices 8 --out scaling.json
    python benchmarks/step/scaling.py --config llama3_8b --smallest 4 --apart --calibration links.json

Weak scaling keeps the sequences per device, strong scaling the global batch.
`batch.global_size` is the batch of the smallest count, whose step both modes share.
Counts use the first n devices and take turns. The mesh axis --axis grows, other axes
keep their sizes. Only the step is measured, on one resident batch.

Efficiency is tokens/s/device over that of the smallest count that fits. Emulated CPU
devices share the cores, so it falls as 1 / n there; the processor time of the same work
is printed, too. The prediction is `plan` of the same run on as many devices.
--calibration names files of measured collectives, on a CPU one per number of devices. A
CPU has no published speed. There the step's compute is that of the smallest count,
times the ratio of the two programs' FLOPs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring
import sides
from scaling_rows import (
    EMULATED,
    Expected,
    Key,
    Point,
    devices_text,
    expected_of,
    lines,
    rows_of,
    summary,
)
from turns import Measured, take_turns, warm

from jaxdist import interop
from jaxdist.config import ConfigError
from jaxdist.config.extras import MissingExtra
from jaxdist.distributed import coordination
from jaxdist.parallel.axes import AXES
from jaxdist.planner import calibration, targets
from jaxdist.planner.calibration import Calibration
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.plan import make_plan
from jaxdist.telemetry.units import GIB
from jaxdist.trainer import cli, compose, exit_code, validation
from jaxdist.trainer.run_config import RunConfig

MODES = ("weak", "strong")
_ROOM = CompileOptions(memory_bytes=24 * GIB, timeout_s=1200)  # of a plan's compiler
_CALIBRATE = (
    "python benchmarks/plan/collectives.py --config NAME --devices COUNT --out FILE"
)
_STEP_ALONE = "the step alone, on one resident synthetic batch: no data is waited for"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags, run = cli.parse(_parser(), arguments, weight_sources=interop.WEIGHT_SOURCES)
    files, faults = _read_calibrations(flags.calibration)
    faults += _flag_faults(flags)
    if any(fault.startswith("--devices") for fault in faults):
        raise ConfigError(faults)
    say = print if sides.start(flags) else _silent
    if flags.skip_one_device and jax.device_count() == 1:
        reason = "skipped: one device, which has nothing to scale over"
        say(reason)
        measuring.write(
            flags.out, measuring.record_head(sys.argv[1:]) | {"summary": reason}
        )
        return 0
    points = settled(run, flags, files, faults)
    axis = axis_of(run, flags.axis)
    say(
        f"{axis} over {', '.join(map(str, dict.fromkeys(p.count for p in points)))} devices; {_STEP_ALONE}"
    )
    first = jax.process_index() == 0
    expected = coordination.broadcast(
        _predictions(points, files, flags, say) if first else None
    )
    found, reasons = measure(points, flags, say)
    rows = rows_of(
        points, found, reasons, dict(zip(_keys(points), expected, strict=True))
    )
    for line in lines(rows):
        say(line)
    measuring.write(flags.out, _record(run, axis, flags, files, rows))
    return 0


def _silent(*_: object, **__: object) -> None:
    pass


# --------------------------------------------------------------- what is to be measured


def axis_of(run: RunConfig, name: str | None) -> str:
    """Returns the mesh axis that grows: the named one, else the one that takes the
    devices left over.
    """
    return name or next(
        (axis for axis in AXES if getattr(run.mesh, axis) == -1), "data"
    )


def grown(run: RunConfig, axis: str, count: int) -> RunConfig:
    """Returns the run on so many devices, all in one axis but for what the
    others have.
    """
    sizes = {
        name: 1 if (size := getattr(run.mesh, name)) == -1 else size for name in AXES
    }
    others = math.prod(size for name, size in sizes.items() if name != axis)
    sizes[axis] = count // others
    overrides = {f"mesh.{name}": size for name, size in sizes.items()}
    return compose.with_overrides(run, overrides)


def settled(
    run: RunConfig,
    flags: argparse.Namespace,
    files: Sequence[Calibration],
    faults: list[str],
) -> list[Point]:
    """Returns the points of all modes and counts, in order.

    Raises:
      ConfigError: all that is wrong with flags, counts, calibrations and the run on any
        count.
    """
    counts: list[int] = []
    points: list[Point] = []
    if not any(fault.startswith(("--axis", "--smallest")) for fault in faults):
        counts = _counts(run, axis_of(run, flags.axis), flags, faults)
    devices = sorted(
        jax.devices(), key=lambda device: (device.process_index, device.id)
    )
    for mode in MODES if flags.mode == "both" else (flags.mode,):
        for count in counts:
            larger = count // counts[0] if mode == "weak" else 1
            batch = dataclasses.replace(
                run.batch, global_size=run.batch.global_size * larger
            )
            own = dataclasses.replace(
                grown(run, axis_of(run, flags.axis), count), batch=batch
            )
            points.append(Point(mode, own, tuple(devices[:count])))
    for point in points:
        try:
            validation.validate(point.run, point.devices, with_data=False)
        except ConfigError as error:
            faults += [
                f"{point.mode} on {devices_text(point.count)}: {fault}"
                for fault in error.faults
            ]
    served = [_target_of(point, flags) for point in points]
    for one in files if points else ():
        if not any(
            isinstance(target, targets.Target) and one.serves(target)
            for target in served
        ):
            faults.append(
                f"--calibration {one.file}: measured on {one.hardware}, which no count here is"
            )
    if flags.network and served and isinstance(why := served[-1], str):
        faults.append(f"--network={flags.network}: {why}")
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return points


def _counts(
    run: RunConfig, axis: str, flags: argparse.Namespace, faults: list[str]
) -> list[int]:
    """Returns the numbers of devices, each twice the one before; adds to `faults` why
    there are none.
    """
    fixed = {
        name: size
        for name in AXES
        if (size := getattr(run.mesh, name)) > 1 and name != axis
    }
    others, emulated = math.prod(fixed.values()), jax.devices()[0].platform == "cpu"
    total = jax.device_count() if emulated else flags.devices or jax.device_count()
    whole = jax.local_device_count() if jax.process_count() > 1 else 1
    least = flags.smallest or max(others, whole)
    sizes, before = (
        " x ".join(f"{name} {size}" for name, size in fixed.items()),
        len(faults),
    )
    if least % others or others & (others - 1):
        faults.append(
            f"--axis={axis}: the other axes ({sizes}) take {others} devices, and counts are powers of two "
            f"from {least}: give them sizes whose product divides it"
        )
    if least % whole or whole & (whole - 1):
        faults.append(
            f"--smallest={least}: processes have {whole} devices each, and only whole ones take part; give a "
            f"multiple, with a power of two of devices in each"
        )
    if total > jax.device_count():
        faults.append(
            f"--devices={total}: there are {jax.device_count()}; leave it out for all"
        )
    if 2 * least > total:
        cure = (
            "start with more (--devices on a CPU)"
            if least == max(others, whole)
            else "lower --smallest"
        )
        faults.append(
            f"one count is no scaling: from {devices_text(least)}, and there are {total}; {cure}"
        )
    return (
        []
        if len(faults) > before
        else [least * 2**i for i in range((total // least).bit_length())]
    )


def _flag_faults(flags: argparse.Namespace) -> Iterator[str]:
    for name in ("devices", "smallest"):
        value = getattr(flags, name)
        if value is not None and (value < 1 or value & (value - 1)):
            yield f"--{name}={value}: must be a power of two, as all counts are"
    if flags.axis and flags.axis not in AXES:
        yield f"--axis={flags.axis}: must be an axis of the mesh: {', '.join(AXES)}"
    if flags.rounds < 1:
        yield f"--rounds={flags.rounds}: must be at least 1"


def _read_calibrations(paths: Sequence[str]) -> tuple[list[Calibration], list[str]]:
    """Returns what the files hold, and what is wrong with the others."""
    files, faults = [], []
    for path in paths:
        try:
            files.append(calibration.read(path))
        except ConfigError as error:
            faults += error.faults
    return files, faults


# ----------------------------------------------------------------------- the prediction


def _predictions(
    points: Sequence[Point],
    files: Sequence[Calibration],
    flags: argparse.Namespace,
    say: Callable[..., None],
) -> list[list | str]:
    """Returns what `Expected` is made of for each key of the points, or why there is no
    prediction.
    """
    out: list[list | str] = []
    for point in {one.key: one for one in points}.values():
        say(f"plan of {point.name}", flush=True)
        found = _prediction(point, files, flags)
        out.append(found if isinstance(found, str) else list(found))
    return out


def _prediction(
    point: Point, files: Sequence[Calibration], flags: argparse.Namespace
) -> Expected | str:
    """Returns what `plan` says of a point; why it says nothing."""
    target = _target_of(point, flags)
    if isinstance(target, str):
        return target
    measured = [one for one in files if one.serves(target)]
    if target.platform == "cpu":
        if not measured and (point.count > 1 or not files):
            return f"no --calibration was measured on {target.text}, of which no rate is published: {_CALIBRATE}"
        if jax.process_count() > 1:
            return "it is not known which processes share a machine"
    try:
        plan = make_plan(
            point.run, target, options=_ROOM, calibration=_merged(measured)
        )
    except (ConfigError, MissingExtra) as error:
        return str(error)
    if not plan.compiled or (plan.time.step_s is None and target.chip):
        return f"{plan.exit_reason}; {plan.time.sure}"
    return expected_of(plan)


def _target_of(point: Point, flags: argparse.Namespace) -> targets.Target | str:
    """Returns the target that a point's devices are; of some parts of a machine, why
    they are none.
    """
    try:
        return targets.parse(
            f"here@{flags.network}" if flags.network else "here", point.devices
        )
    except ConfigError as error:
        return str(error)


def _merged(files: Sequence[Calibration]) -> Calibration | None:
    """Returns the fits of all files as those of one."""
    if not files:
        return None
    fits = [fit for one in files for fit in one.fits]
    return Calibration(", ".join(one.file for one in files), files[0].hardware, fits)


# ---------------------------------------------------------------------- the measurement


@dataclasses.dataclass
class _Absent:
    """The side of a process that has none of a point's devices."""

    name: str
    compile_s: float = 0.0
    first_loss: float = math.nan
    metrics: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"loss": math.nan}
    )
    compiled: Any = dataclasses.field(
        default_factory=lambda: jax.jit(lambda: 0).lower().compile()
    )

    def advance(self, steps: int) -> None:
        """Takes no part."""


def measure(
    points: Sequence[Point], flags: argparse.Namespace, say: Callable[..., None]
) -> tuple[dict[Key, Measured], dict[Key, str]]:
    """Returns the numbers of each key of the points, and why others have none."""
    unique = {point.key: point for point in points}
    groups = [[key] for key in unique] if flags.apart else [list(unique)]
    found: dict[Key, Measured] = {}
    reasons: dict[Key, str] = {}
    for keys in groups:  # all by as many steps as the first
        steps = next(iter(found.values())).steps if found else None
        own, why = _together([unique[key] for key in keys], flags, steps, say)
        found, reasons = found | own, reasons | why
        gc.collect()  # arrays of the sides, before the next ones need their memory
    if not found:
        raise ConfigError(
            [f"{key[0]} devices: {reason}" for key, reason in reasons.items()]
        )
    return found, reasons


def _together(
    points: Sequence[Point],
    flags: argparse.Namespace,
    steps: int | None,
    say: Callable[..., None],
):
    """Returns the numbers of points that take turns, by key, and why others
    have none.
    """
    present: dict[Key, Any] = {}
    reasons: dict[Key, str] = {}
    for point in points:
        side = _side(point, flags.apart, say)
        if isinstance(side, str):
            reasons[point.key] = side
        else:
            present[point.key] = side
    turns = (
        take_turns(list(present.values()), flags.rounds, steps, say) if present else []
    )
    return dict(zip(present, turns, strict=True)), reasons


def _side(point: Point, apart: bool, say: Callable[..., None]) -> Any:
    """Returns a point's side, warm; why not, if its memory is too small."""
    reason = ""
    side: sides.Side | _Absent = _Absent(point.name)
    if any(device.process_index == jax.process_index() for device in point.devices):
        try:
            made = sides.build_jaxdist(
                point.run, sides.full_batch(point.run), point.devices
            )
            side = warm(dataclasses.replace(made, name=point.name), say)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            cure = "" if apart else "; --apart gives each count the whole memory"
            reason = f"does not fit: {str(error).splitlines()[0]}{cure}"
    # the first process has devices of all counts
    reason = coordination.broadcast(reason)
    if reason:
        say(f"{point.name}: {reason}")
    return reason or side


# --------------------------------------------------------------------------- the record


def _keys(points: Sequence[Point]) -> list[Key]:
    return list(dict.fromkeys(point.key for point in points))


def _record(
    run: RunConfig,
    axis: str,
    flags: argparse.Namespace,
    files: Sequence[Calibration],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    on_cpu = jax.devices()[0].platform == "cpu"
    return measuring.record_head(sys.argv[1:]) | {
        "run": {
            "name": flags.config,
            "model": dict(run.model),
            "batch": dataclasses.asdict(run.batch),
        }
        | {
            "compute": run.precision.compute,
            "remat": str(run.remat),
            "optimizer": run.optimizer.name,
        },
        "axis": axis,
        "batch_of": "batch.global_size is that of the smallest count, in both modes",
        "unit": compose.unit(run),
        "measured": _STEP_ALONE,
        "emulated": EMULATED if on_cpu else None,
        "apart": flags.apart,
        "calibration": [
            {
                "file": one.file,
                "hardware": one.hardware,
                "fits": [fit.to_json() for fit in one.fits],
            }
            for one in files
        ],
        "rows": rows,
        "summary": "; ".join(summary(rows)),
    }


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("scaling", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--devices",
        type=int,
        help="the most devices, a power of two; on a CPU so many are emulated, in each process",
    )
    add(
        "--smallest",
        type=int,
        help="the fewest devices (default: what the other axes of the mesh take)",
    )
    add("--axis", help="mesh axis that grows (default: the one that is -1, or data)")
    add("--mode", choices=("both", *MODES), default="both")
    add(
        "--rounds",
        type=int,
        default=12,
        help="of turns, each half a second of steps (%(default)d)",
    )
    add(
        "--apart",
        action="store_true",
        help="one count after the other, each with the whole memory",
    )
    add(
        "--calibration",
        action="append",
        default=[],
        metavar="FILE",
        help="of plan; may be repeated",
    )
    add(
        "--network",
        help="between hosts or slices, as behind @ in plan --on: 25GB/s, efa-p5",
    )
    add(
        "--skip-one-device",
        action="store_true",
        help="write that nothing can scale instead of refusing it",
    )
    add("--out", help="JSON file")
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
