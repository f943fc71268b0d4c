"""The description of a run before its first step: run.json and lines to print."""

from typing import Any

import jax

from jaxdist.data.dataset import Dataset
from jaxdist.distributed import coordination
from jaxdist.optim.schedules import ScheduleSteps
from jaxdist.parallel import placement
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import (
    batching,
    compose,
    held_out,
    model_flops,
    pipeline_report,
    run_metadata,
    step_lines,
    workdir,
)
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.restore import SettledSchedule
from jaxdist.trainer.run_config import run_fingerprint


def describe(
    run: Run, built: TrainStep, dataset: Dataset, schedule: SettledSchedule
) -> None:
    """Writes run.json and prints a description of the run."""
    composition = run.composition
    devices = built.mesh.devices
    if coordination.is_lead():
        workdir.write_json(
            run.folder / workdir.RUN,
            {
                **run.origin,
                **_description(composition, built, dataset, schedule.steps),
                workdir.IDENTITY_KEY: run.store.run,
                **pipeline_report.describe(composition),
            },
        )
    counts = step_lines.counts(composition)
    run.note(
        f"mesh: {composition.shape} ({devices.size} x {devices.flat[0].device_kind}); {counts}"
    )
    lines = [
        *step_lines.step_lines(composition, built),
        *batching.balancer(composition, dataset).lines(),
        *pipeline_report.lines(composition),
        *_epoch_lines(composition, dataset),
        *held_out.evaluation_lines(composition.config, dataset),
        *schedule.lines(run),
    ]
    for line in lines:
        run.note(line)


def _epoch_lines(composition: Composition, dataset: Dataset) -> list[str]:
    """Describes the steps of an epoch, and the epochs of the run; [] if unknown."""
    samples = dataset.epoch_samples
    if samples is None:
        return []
    size = composition.config.batch.global_size
    steps = composition.config.train.steps
    return [
        f"epochs: {samples / size:,.1f} steps an epoch, {steps * size / samples:,.3g} "
        f"epochs planned"
    ]


def _description(
    composition: Composition,
    built: TrainStep,
    dataset: Dataset,
    schedule: ScheduleSteps,
) -> dict[str, Any]:
    """Describes devices, mesh, fingerprints, sizes and shardings for run.json."""
    config = composition.config
    devices = built.mesh.devices
    description = {
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
        "parameters": composition.spec.parameter_count,
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
    split_sequences = step_lines.context_lines(config, built.rules)
    if split_sequences:
        description["split_sequences"] = split_sequences
    return description
