"""What a run writes and prints before its first step: run.json and its first lines."""

from jaxdist.data.dataset import Dataset
from jaxdist.distributed import coordination
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import (
    batching,
    held_out,
    pipeline_report,
    published_mfu,
    run_description,
    step_lines,
    workdir,
)
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.restore import SettledSchedule


def describe(
    run: Run, built: TrainStep, dataset: Dataset, schedule: SettledSchedule
) -> None:
    """Writes run.json and prints a description of the run."""
    composition = run.composition
    devices = built.mesh.devices
    if coordination.is_lead():
        description = {
            **run.origin,
            **run_description.describe(composition, built, dataset, schedule.steps),
            workdir.IDENTITY_KEY: run.store.run,
            **pipeline_report.describe(composition),
        }
        split_sequences = step_lines.context_lines(composition.config, built.rules)
        if split_sequences:
            description["split_sequences"] = split_sequences
        workdir.write_json(run.folder / workdir.RUN, description)
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
        *published_mfu.lines(composition, devices.flat[0]),
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
    lines = [
        f"epochs: {samples / size:,.1f} steps an epoch, {steps * size / samples:,.3g} "
        f"epochs planned"
    ]
    data = composition.config.data
    if data.is_text and samples <= size:
        length = composition.config.batch.sequence_length
        kind = "packed rows" if data.packing == "documents" else "rows"
        lines.append(
            f"warning: the training data are {samples} {kind} of {length} tokens, and a "
            f"step trains on batch.global_size={size}: all steps have the same rows. "
            f"Lower batch.global_size or batch.sequence_length, or add data."
        )
    return lines
