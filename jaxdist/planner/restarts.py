"""What a run's checkpoints weigh, how often to save, what a failure costs: arithmetic
on assumptions.
"""

from dataclasses import dataclass, replace

import numpy as np

from jaxdist.checkpoint.interval import CHIP_HOURS_PER_FAILURE, checkpoint_interval
from jaxdist.parallel.axes import PARAMETER_SHARDS, STATE_AXES
from jaxdist.planner import formulas
from jaxdist.planner.targets import Target
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

# assumed: what one host writes to and reads from storage
HOST_STORAGE_BYTES_PER_S = 1e9
# 18 trays of a rack: NVIDIA GB200 NVL72 datasheet; of others `Target.hosts`
_CHIPS_OF_HOST = {"gb200": 4}


@dataclass(frozen=True)
class Assumptions:
    """What a plan cannot know of a machine."""

    chip_hours_per_failure: float = CHIP_HOURS_PER_FAILURE
    host_storage_bytes_per_s: float = HOST_STORAGE_BYTES_PER_S


@dataclass(frozen=True)
class Restarts:
    """Checkpoints and failures of a run on a target; None where the step's time is not
    known.
    """

    checkpoint_bytes: int
    device_bytes: int  # of it, that one device copies to its host
    blocking_s: float  # that a save stops training for
    write_s: float  # until it is on storage
    mtbf_s: float  # between failures, of all chips together
    # reading the checkpoint, compiling; without the wait for a machine
    restart_s: float
    interval_s: float  # between saves, the best
    # of the wall time at that interval: saves, restarts, work done again
    lost_share: float
    every_steps: int | None = None
    # at the config's own interval; None: it does not save
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
    """Returns checkpoints and failures of a run.

    Args:
      num_bytes: of a checkpoint.
      held_bytes: of it, that one device holds.
      compile_s: that compiling took here; a restart compiles again, or reads the
        compilation cache.
    """
    run = composition.config
    assumed = _configured_failures(run, assumed)
    hosts = _hosts(target)
    rate = assumed.host_storage_bytes_per_s
    # Processes share the writing of what they hold alike (`OrbaxBackend`); one alone
    # writes its first copies.
    device_bytes = num_bytes // target.num_devices if hosts > 1 else held_bytes
    write_s = num_bytes / (hosts * rate)
    to_host = target.chip.pcie_bytes_per_s if target.chip else None
    copy_s = device_bytes / to_host if to_host else 0.0
    save = run.checkpoint
    blocking_s, late_s = (
        (copy_s, write_s) if save.asynchronous else (copy_s + write_s, 0.0)
    )
    mtbf_s = 3600 * assumed.chip_hours_per_failure / target.num_chips
    # Every host reads once what its own devices hold.
    read_s = (
        min(
            num_bytes,
            held_bytes * _parts_of_host(composition, target.num_devices // hosts),
        )
        / rate
    )

    def lost(interval_s: float) -> float:
        # for the save before
        waits_s = min(max(0.0, late_s - interval_s), save.patience_s)
        # Until it is on storage a save is of no use: the work since the one before it
        # is lost.
        again_s = read_s + compile_s + late_s
        return formulas.lost_share(interval_s, blocking_s + waits_s, again_s, mtbf_s)

    # One save after the other, and none more often than its copy can be written.
    interval_s = max(checkpoint_interval(blocking_s, mtbf_s), write_s)
    configured = interval_s if save.interval == "auto" else _configured(run, step_s)
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
    """Returns the assumptions; `checkpoint.chip_hours_per_failure` counts where they
    say the default.
    """
    hours = run.checkpoint.chip_hours_per_failure
    if hours and assumed.chip_hours_per_failure == CHIP_HOURS_PER_FAILURE:
        return replace(assumed, chip_hours_per_failure=hours)
    return assumed


def _hosts(target: Target) -> int:
    """Returns the machines of a target, of which several may share one NVLink
    domain.
    """
    chips = _CHIPS_OF_HOST.get(target.family)
    return -(-target.num_chips // chips) if chips else target.hosts


def _parts_of_host(composition: Composition, devices: int) -> int:
    """Returns how many different shards of the state are on the devices of one host,
    the first.
    """
    sizes = composition.shape.sizes
    zero = composition.config.mesh.zero
    places = np.unravel_index(np.arange(devices), tuple(sizes.values()))
    split = {axis for axis in STATE_AXES if axis not in PARAMETER_SHARDS or zero}
    rows = [row for axis, row in zip(sizes, places, strict=True) if axis in split]
    return len(set(zip(*rows, strict=True)))


def _configured(run: RunConfig, step_s: float | None) -> float | None:
    """Returns the seconds between saves as configured; None where there are none, or no
    step's time.
    """
    save = run.checkpoint
    rules = list[float]()
    if save.every_minutes > 0:
        rules.append(60 * save.every_minutes)
    if save.every_steps and step_s:
        rules.append(save.every_steps * step_s)
    return min(rules, default=None)
