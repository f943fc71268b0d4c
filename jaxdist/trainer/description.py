"""What run.json says of a run itself, and the model FLOPs that its MFU counts."""

from typing import Any

import jax

from jaxdist.data import Dataset
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, extension, model_flops
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import run_fingerprint
from jaxdist.trainer.step_lines import context_lines


def describe_run(
    composition: Composition,
    built: TrainStep,
    dataset: Dataset,
    schedule: ScheduleSteps,
) -> dict[str, Any]:
    """Describes the run itself for run.json: devices, mesh, fingerprints, sizes,
    shardings.
    """
    run = composition.config
    devices = built.mesh.devices
    # how attention sees sequences that devices share out
    split = context_lines(run, built.rules)
    return {
        "platform": devices.flat[0].platform,
        "device_kind": devices.flat[0].device_kind,
        "num_devices": devices.size,
        "num_processes": jax.process_count(),
        "mesh": dict(built.rules.shape.sizes),
        "zero": run.mesh.zero,
        "accumulation": run.batch.accumulation,
        "fingerprints": {"config": run_fingerprint(run), "data": dataset.fingerprint},
        extension.SCHEDULE_KEY: schedule.to_json(),
        "parameters": composition.spec.parameter_count,
        "active_parameters": model_flops.active_parameters(run, composition.spec),
        "unit": compose.unit(run),
        "flops_per_token": model_flops.model_flops(run, composition.spec),
        "mfu_peak": {
            "dtype": run.precision.peak,
            "flops_per_s": model_flops.mfu_peak(run, devices.flat[0]),
        },
        "sharding": [
            {
                "parameter": placed.path,
                "dims": list(placed.dims),
                "names": list(placed.names),
                "stored": str(placed.stored),
                "state": str(placed.state),
                "per_device": list(placed.shard_dims),
                "bytes": placed.shard_bytes,
                "copies": placed.replicated_bytes,
                "why": placed.why,
            }
            for placed in composition.placements()
        ],
    } | ({"split_sequences": split} if split else {})
