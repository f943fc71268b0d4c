"""Checkpoints and failures of a run: sizes, save interval and lost time.

The arithmetic rests on assumptions about the machine.
"""

from dataclasses import dataclass, replace

import numpy as np

from jaxdist.checkpoint.interval import CHIP_HOURS_PER_FAILURE, checkpoint_interval
from jaxdist.parallel.axes import PARAMETER_SHARDS, STATE_AXES
from jaxdist.planner import formulas
from jaxdist.planner.targets import Target
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

# assumed rate at which one host writes to storage and reads from it
HOST_STORAGE_BYTES_PER_S = 1e9
# Chips of a machine where several machines share one NVLink domain: a rack of GB200 has
# 18 trays (NVIDIA GB200 NVL72 datasheet).
_CHIPS_OF_HOST = {"gb200": 4}


@dataclass(frozen=True)
class Assumptions:
    """Facts about a machine that a plan must assume."""

    chip_hours_per_failure: float = CHIP_HOURS_PER_FAILURE
    host_storage_bytes_per_s: float = HOST_STORAGE_BYTES_PER_S


@dataclass(frozen=True)
class Restarts:
    """The checkpoints and failures of a run on a target."""

    checkpoint_bytes: int
    device_bytes: int  # part of a checkpoint that one device copies to its host
    blocking_s: float  # time that a save stops training
    write_s: float  # time that a host needs to write its part to storage
    mtbf_s: float  # mean time between failures of all chips together
    # time to read the checkpoint and to compile, without waiting for a machine
    restart_s: float
    interval_s: float  # best time between saves
    # share of wall time lost to saves, restarts and repeated work at that interval
    lost_share: float
    # steps between saves; None if the step time is unknown
    every_steps: int | None = None
    # lost share at the configured interval; None if it is unknown, or never saves
    configured_lost_share: float | None = None
    assumed: Assumptions = Assumptions()


def estimate(
    composition: Composition,
    target: Target,
    num_bytes: int,
    held_bytes: int,
    *,
    assumed: Assumptions,
    step_s: float | None,
    compile_s: float,
) -> Restarts:
    """Estimates the checkpoints and failures of a run.

    Args:
      composition: the run on its mesh.
      target: the hardware.
      num_bytes: bytes of a checkpoint.
      held_bytes: bytes of a checkpoint that one device holds.
      assumed: facts about the machine.
      step_s: the step time; None if unknown.
      compile_s: time to compile here; a restart compiles again.
    """
    run = composition.config
    assumed = _configured_failures(run, assumed)
    hosts = _hosts(target)
    rate = assumed.host_storage_bytes_per_s
    # Several processes share the writing of replicated state (`OrbaxBackend`); a single
    # process writes its first copies.
    device_bytes = num_bytes // target.num_devices if hosts > 1 else held_bytes
    write_s = num_bytes / (hosts * rate)
    to_host = target.chip.pcie_bytes_per_s if target.chip else None
    copy_s = device_bytes / to_host if to_host else 0.0
    save = run.checkpoint
    if save.asynchronous:
        blocking_s = copy_s
        late_s = write_s
    else:
        blocking_s = copy_s + write_s
        late_s = 0.0
    mtbf_s = 3600 * assumed.chip_hours_per_failure / target.num_chips
    # Each host reads the state of its devices once.
    shards = _shards_of_host(composition, target.num_devices // hosts)
    read_s = min(num_bytes, held_bytes * shards) / rate

    def lost(interval_s: float) -> float:
        """Estimates the share of wall time lost with an interval."""
        # A save waits until the previous one is written.
        waits_s = min(max(0.0, late_s - interval_s), save.patience_s)
        # A save is useless until it is written: work since the previous one is lost.
        again_s = read_s + compile_s + late_s
        return formulas.lost_share(
            interval_s=interval_s,
            save_s=blocking_s + waits_s,
            restart_s=again_s,
            mtbf_s=mtbf_s,
        )

    # Saves do not overlap, so the interval is at least the time of a write.
    interval_s = max(checkpoint_interval(blocking_s, mtbf_s), write_s)
    configured: float | None = interval_s
    if save.interval != "auto":
        configured = _configured_interval(run, step_s)
    return Restarts(
        checkpoint_bytes=num_bytes,
        device_bytes=device_bytes,
        blocking_s=blocking_s,
        write_s=write_s,
        mtbf_s=mtbf_s,
        restart_s=read_s + compile_s,
        interval_s=interval_s,
        lost_share=lost(interval_s),
        every_steps=max(1, round(interval_s / step_s)) if step_s else None,
        configured_lost_share=lost(configured) if configured else None,
        assumed=assumed,
    )


def _configured_failures(run: RunConfig, assumed: Assumptions) -> Assumptions:
    """Replaces the default failure rate by `checkpoint.chip_hours_per_failure`."""
    hours = run.checkpoint.chip_hours_per_failure
    if hours and assumed.chip_hours_per_failure == CHIP_HOURS_PER_FAILURE:
        return replace(assumed, chip_hours_per_failure=hours)
    return assumed


def _hosts(target: Target) -> int:
    """Counts the machines of a target; several may share one NVLink domain."""
    chips = _CHIPS_OF_HOST.get(target.family)
    return -(-target.num_chips // chips) if chips else target.hosts


def _shards_of_host(composition: Composition, devices: int) -> int:
    """Counts the different shards of the state on the devices of the first host."""
    sizes = composition.shape.sizes
    zero = composition.config.mesh.zero
    coordinates = np.unravel_index(np.arange(devices), tuple(sizes.values()))
    split = {axis for axis in STATE_AXES if axis not in PARAMETER_SHARDS or zero}
    rows = [row for axis, row in zip(sizes, coordinates, strict=True) if axis in split]
    return len(set(zip(*rows, strict=True)))


def _configured_interval(run: RunConfig, step_s: float | None) -> float | None:
    """Computes the configured seconds between saves; None if unknown or never."""
    save = run.checkpoint
    intervals = list[float]()
    if save.every_minutes > 0:
        intervals.append(60 * save.every_minutes)
    if save.every_steps and step_s:
        intervals.append(save.every_steps * step_s)
    return min(intervals, default=None)
