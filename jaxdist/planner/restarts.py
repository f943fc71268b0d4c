"""What a run's checkpoints weigh, how often to save, what a failure costs: arithmetic on assumptions."""

import functools
import math
from dataclasses import dataclass

from jaxdist.parallel.axes import STATE_AXES
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner import formulas
from jaxdist.planner.targets import Target
from jaxdist.trainer.run_config import RunConfig

# 419 unexpected interruptions of 16,384 H100 in 54 days: "The Llama 3 Herd of Models", 2024, section 3.3.4.
CHIP_HOURS_PER_FAILURE = 50_000.0
HOST_STORAGE_BYTES_PER_S = 1e9  # assumed: what one host writes to and reads from storage


@dataclass(frozen=True)
class Assumptions:
    """What a plan cannot know of a machine."""

    chip_hours_per_failure: float = CHIP_HOURS_PER_FAILURE
    host_storage_bytes_per_s: float = HOST_STORAGE_BYTES_PER_S


@dataclass(frozen=True)
class Restarts:
    """Checkpoints and failures of a run on a target; None where the step's time is not known."""

    checkpoint_bytes: int
    device_bytes: int  # of it, that one device copies to its host
    blocking_s: float  # that a save stops training for
    write_s: float  # until it is on storage
    mtbf_s: float  # between failures, of all chips together
    restart_s: float  # reading the checkpoint, compiling; without the wait for a machine
    interval_s: float  # between saves, the best
    lost_share: float  # of the wall time at that interval: saves, restarts, work done again
    every_steps: int | None = None
    configured_lost_share: float | None = None  # at the config's own interval; None: it does not save
    assumed: Assumptions = Assumptions()


def estimate(
    run: RunConfig,
    shape: MeshShape,
    target: Target,
    num_bytes: int,
    *,
    assumed: Assumptions,
    step_s: float | None,
    compile_s: float,
) -> Restarts:
    """Returns checkpoints and failures of a run.

    Args:
      num_bytes: of a checkpoint.
      compile_s: that compiling took here; a restart compiles again, or reads the compilation cache.
    """
    axes = [axis for axis in STATE_AXES if axis != "fsdp" or run.mesh.zero]
    shards = math.prod(shape.sizes[axis] for axis in axes)
    device_bytes = num_bytes // shards
    writers = max(1, target.hosts * shards // target.num_devices)  # hosts that hold the first replica
    write_s = num_bytes / (writers * assumed.host_storage_bytes_per_s)
    to_host = target.chip.pcie_bytes_per_s if target.chip else None
    copy_s = device_bytes / to_host if to_host else 0.0
    blocking_s = copy_s if run.checkpoint.asynchronous else copy_s + write_s
    mtbf_s = 3600 * assumed.chip_hours_per_failure / target.num_chips
    # Every host reads the shards of its own devices.
    restart_s = num_bytes / shards * target.num_devices / target.hosts / assumed.host_storage_bytes_per_s
    restart_s += compile_s
    # One save after the other, and none more often than its copy can be written.
    interval_s = max(formulas.checkpoint_interval(blocking_s, mtbf_s), write_s)
    configured = _configured(run, step_s)
    lost = functools.partial(formulas.lost_share, save_s=blocking_s, restart_s=restart_s, mtbf_s=mtbf_s)
    return Restarts(
        checkpoint_bytes=num_bytes,
        device_bytes=device_bytes,
        blocking_s=blocking_s,
        write_s=write_s,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        interval_s=interval_s,
        lost_share=lost(interval_s),
        every_steps=max(1, round(interval_s / step_s)) if step_s else None,
        configured_lost_share=lost(configured) if configured else None,
        assumed=assumed,
    )


def _configured(run: RunConfig, step_s: float | None) -> float | None:
    """Returns the seconds between saves as configured; None where there are none, or no step's time."""
    save = run.checkpoint
    rules = [60 * save.every_minutes] * (save.every_minutes > 0)
    rules += [save.every_steps * step_s] if save.every_steps and step_s else []
    return min(rules, default=None)
