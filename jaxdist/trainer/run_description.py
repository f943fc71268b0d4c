"""The description of a run in run.json: devices, sizes, fingerprints and shardings."""

from typing import Any

import jax

from jaxdist.data.dataset import Dataset
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.parallel import placement
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, model_flops, run_metadata
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import run_fingerprint


def describe(
    composition: Composition,
    built: TrainStep,
    dataset: Dataset,
    schedule: ScheduleSteps,
) -> dict[str, Any]:
    """Describes devices, mesh, fingerprints, sizes and shardings for run.json."""
    config = composition.config
    devices = built.mesh.devices
    return {
        "platform": devices.flat[0].platform,
        "device_kind": devices.flat[0].device_kind,
        "num_devices": devices.size,
        "num_processes": jax.process_count(),
        "mesh": dict(built.rules.shape.sizes),
        "zero": config.mesh.zero,
        "accumulation": config.batch.accumulation,
        "fingerprints": {
            "config": run_fingerprint(config),
            "data": dataset.fingerprint,
        },
        run_metadata.SCHEDULE: schedule.to_json(),
        "parameters": model_flops.total_parameters(config, composition.spec),
        "active_parameters": model_flops.active_parameters(config, composition.spec),
        "unit": compose.unit(config),
        "flops_per_token": model_flops.model_flops(config, composition.spec),
        "mfu_peak": {
            "dtype": config.precision.peak,
            "flops_per_s": model_flops.mfu_peak(config, devices.flat[0]),
        },
        "sharding": [
            {
                "parameter": placed.path,
                "dims": list(placed.dims),
                "names": list(placed.names),
                "stored": placement.spec_text(placed.stored),
                "state": placement.spec_text(placed.state),
                "per_device": list(placed.shard_dims),
                "bytes": placed.shard_bytes,
                "copies": placed.replicated_bytes,
                "why": placed.why,
            }
            for placed in composition.placements()
        ],
    }
