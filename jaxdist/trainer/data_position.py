"""The position in the data that a run takes over from its source.

With `init.data_position`, the first batch of the run is the one that the source of
`init.from_run` would have read next. The batches before it are a window of skipped
batches, so checkpoints keep the position.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxdist.config import ConfigError, redact, schema
from jaxdist.data.dataset import Dataset
from jaxdist.distributed import coordination
from jaxdist.storage.untrusted import Malformed
from jaxdist.trainer import run_metadata, source_run, workdir
from jaxdist.trainer.health import SkippingDataset
from jaxdist.trainer.run_config import RunConfig, document_of


class DataPosition(NamedTuple):
    """The place in the data where a run begins."""

    windows: list[list[int]]  # the batches before it, as one window [0, end)
    reader: Any  # state of a caller's iterator; None = there is none


def check_source(config: RunConfig, dataset: Dataset) -> None:
    """Checks that the source's position has a meaning for a new run.

    Nothing is compiled yet. Every process makes the call.

    Raises:
      ConfigError: the source has read other data or in another order, or was not
        trained. It has a line for each fault. Or the source's file of skipped batches
        is damaged.
      CheckpointError: no checkpoint of the source can be used.
    """
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            source = source_run.locate(config.init.from_run)
            _next_batch(source.metadata, config, dataset)


def position_after(
    metadata: Mapping[str, Any], config: RunConfig, dataset: Dataset
) -> DataPosition:
    """Computes the position of the source after a checkpoint.

    Every process makes the call, and the first process reads the source's workdir.

    Args:
      metadata: metadata of the checkpoint.
      config: the new run's config.
      dataset: the new run's data.

    Raises:
      ConfigError: see `check_source`.
    """
    end = 0
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            end = _next_batch(metadata, config, dataset)
    end = coordination.broadcast(end)
    return DataPosition([[0, end]], metadata.get(run_metadata.READER))


def _next_batch(
    metadata: Mapping[str, Any], config: RunConfig, dataset: Dataset
) -> int:
    """Computes the number of the batch that the source would read after a checkpoint.

    Like the source's own resume, it leaves out what was thrown out after the checkpoint.

    Raises:
      ConfigError: see `check_source`.
    """
    faults = list(_faults(metadata, config, dataset))
    if faults:
        raise ConfigError(
            f"init.data_position: {fault}, or leave init.data_position out"
            for fault in faults
        )
    done = run_metadata.progress_of(metadata).step
    folder = source_run.locate(config.init.from_run).workdir
    if folder is None:
        skipped = metadata.get(run_metadata.SKIPPED, [])
    else:
        skipped = run_metadata.skipped_windows(folder, metadata)
    return SkippingDataset(dataset, skipped).position(done)


def _faults(
    metadata: Mapping[str, Any], config: RunConfig, dataset: Dataset
) -> Iterator[str]:
    """Yields why the position of a checkpoint's run has no meaning for another run."""
    name = config.init.from_run
    if run_metadata.PROGRESS not in metadata:
        yield f"{name} has converted weights and has read no data; name a run"
        return
    try:
        run_metadata.check(metadata)
    except Malformed as error:
        yield f"the metadata of {name} is damaged ({error}); name an earlier step"
        return
    stored = source_run.group_of(metadata, run_metadata.CONFIG)
    there = schema.flatten(redact.redacted(workdir.tupled(stored)))
    here = schema.flatten(document_of(config))
    for key in ("seed", "batch.global_size"):
        if there.get(key) != here[key]:
            yield f"{key}={here[key]}, in {name} {there.get(key)}; set {key}={there.get(key)}"
    known = metadata[run_metadata.FINGERPRINTS][run_metadata.DATA]
    if known != dataset.fingerprint:
        others = [
            f"{key}={here[key]!r} and {there[key]!r}"
            for key in here
            if (key.startswith("data.") or key == "batch.sequence_length")
            and here[key] != there.get(key, here[key])
        ]
        differing = f" ({', '.join(others)})" if others else ""
        yield (
            f"{dataset.name} is other data than {name} has read{differing}; give the same"
        )
