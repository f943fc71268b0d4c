"""Held-out data of a trained run: its own documents, other files, or arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset
from jaxdist.data.sources.table import SOURCES, guess_source
from jaxdist.data.user_batches import open_held_out
from jaxdist.trainer import batching, compose, reference
from jaxdist.trainer.run_config import RunConfig


def open_set(
    config: RunConfig,
    folder: Path,
    log: Callable[[str], None],
    data: Mapping[str, Any] | str | None = None,
    *,
    validation_tokens: int | None = None,
    stride: int | None = None,
) -> Dataset:
    """Opens the held-out set of the run in `folder`, or other data in its place.

    Args:
      config: the run's config.
      folder: the run's workdir.
      log: receives a line per event.
      data: {entry: [N, ...]} to score; or files, as `data.path` has them; None: the
        run's held-out set.
      validation_tokens: number of targets to score, 0 = all; None:
        data.validation_tokens, or all of other files.
      stride: tokens by which windows over a document move; None: documents are packed
        as in training.

    Raises:
      ConfigError: nothing is held out, the data are of another kind than the model was
        trained on, or the stride is invalid.
    """
    if isinstance(data, str):
        config = on_files(config, data)
        data = None
    if stride is not None:
        check_stride(config, stride, data)
        if not SOURCES[config.data.source].has_documents:
            log(
                f"stride: token files (data.source={config.data.source}) do not tell "
                "documents apart; windows move over whole files"
            )
    if data is not None:
        return open_held_out(data, like=config.data.path, size=config.batch.global_size)
    if SOURCES[config.data.source].from_caller:
        raise ConfigError(
            "the run's data were given to jaxdist.fit; give some here: "
            "evaluate(dict(x=..., ...)), or --data FILE.npz"
        )
    if validation_tokens is not None:
        config = compose.with_overrides(
            config, {"data.validation_tokens": validation_tokens}
        )
    dataset = batching.open_data(config, folder, log, stride=stride)
    reference.attach_stored(config, folder, dataset)
    return dataset


def on_files(config: RunConfig, files: str) -> RunConfig:
    """Replaces the data of a run by files, all of which are held out.

    Args:
      config: the run's config.
      files: paths, as `data.path` has them. Their endings choose the source. All other
        keys of `data.*`, such as the format and the tokenizer, are those of the run.

    Raises:
      ConfigError: the run has data of another kind, or needs numbers that are known for
        its own data only.
    """
    data = config.data
    if not data.is_text or SOURCES[data.source].from_caller:
        raise ConfigError(
            f"data {files}: the run was trained on data.source={data.source}, not on "
            f"documents; give arrays, as a file .npz"
        )
    if reference.needed(config):
        raise ConfigError(
            f"data {files}: the run compares answers with log-probabilities of its first "
            f"weights, which are known for its own pairs only; leave the files out"
        )
    files_alone: DataConfig = dataclasses.replace(
        data,
        source=guess_source(files),
        path=files,
        mixture=(),
        validation_path=files,
        validation_tokens=0,
    )
    faults = files_alone.faults()
    if faults:
        raise ConfigError(f"data {files}: {fault}" for fault in faults)
    return dataclasses.replace(config, data=files_alone)


def check_stride(
    config: RunConfig, stride: int, data: Mapping[str, Any] | None = None
) -> None:
    """Raises ConfigError if windows cannot move over the held-out data by `stride`."""
    if data is not None or not config.data.is_text:
        kind = "arrays"
        if data is None:
            kind = f"data.source={config.data.source}"
        raise ConfigError(
            f"stride={stride}: windows slide over documents of tokens, "
            f"and {kind} have none; leave it out"
        )
    check_range(stride, config.batch.sequence_length, "the run's batch.sequence_length")


def check_range(stride: int | None, longest: int, meaning: str) -> None:
    """Raises ConfigError if windows cannot move by `stride` tokens.

    Args:
      stride: tokens by which a window moves; None is valid.
      longest: longest window in tokens.
      meaning: words of the message for `longest`.
    """
    if stride is not None and not 1 <= stride <= longest:
        raise ConfigError(f"stride={stride}: required 1 to {longest}, {meaning}")
