"""What run.json says of a run itself, and the model FLOPs that its MFU counts."""

from typing import Any

import jax

from jaxdist.data import Dataset
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import extension, model_flops
from jaxdist.trainer.batching import unit
from jaxdist.trainer.run_config import (
    RunConfig,
    run_fingerprint,
)
from jaxdist.trainer.step_lines import (
    active_parameters,
    context_lines,
    placements,
)


def describe_run(
    run: RunConfig,
    spec: ModelSpec,
    built: TrainStep,
    dataset: Dataset,
    schedule: ScheduleSteps,
) -> dict[str, Any]:
    """Returns what run.json says of the run itself: devices, mesh, fingerprints, sizes,
    shardings.
    """
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
        "parameters": spec.parameter_count,
        "active_parameters": active_parameters(run, spec),
        "unit": unit(run),
        "flops_per_token": model_flops.model_flops(run, spec),
        "mfu_peak": {
            "dtype": run.precision.peak,
            "flops_per_s": model_flops._mfu_peak(run, devices.flat[0]),
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
            for placed in placements(run, spec, built.rules)
        ],
    } | ({"split_sequences": split} if split else {})
