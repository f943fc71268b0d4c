"""What a trained run is scored on: its own held-out documents, cut as asked for, or a
caller's arrays.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.data import Dataset
from jaxdist.data.sources.table import SOURCES
from jaxdist.data.user_batches import open_held_out
from jaxdist.trainer import batching, compose
from jaxdist.trainer.run_config import RunConfig


def open_set(
    config: RunConfig,
    folder: Path,
    log: Callable[[str], None],
    data: Mapping[str, Any] | None = None,
    *,
    validation_tokens: int | None = None,
    stride: int | None = None,
) -> Dataset:
    """Returns the held-out set of the run in `folder`, or arrays; see
    `TrainedRun.evaluate`.

    Raises:
      ConfigError: nothing is held out; data of another kind than the model was trained
        on; a stride that is none.
    """
    if stride is not None:
        check_stride(config, stride, data)
        if not SOURCES[config.data.source].has_documents:
            log(
                f"stride: token files (data.source={config.data.source}) do not tell "
                "documents apart; windows slide over files"
            )
    if data is not None:
        return open_held_out(data, like=config.data.path, size=config.batch.global_size)
    if SOURCES[config.data.source].from_caller:
        raise ConfigError(
            "the run's data were given to jaxdist.fit; give some here: evaluate(dict(x=..., ...)), or "
            "--data FILE.npz"
        )
    if validation_tokens is not None:
        config = compose.with_overrides(
            config, {"data.validation_tokens": validation_tokens}
        )
    return batching.open_data(config, folder, log, stride=stride)


def check_stride(
    config: RunConfig, stride: int, data: Mapping[str, Any] | None = None
) -> None:
    """Raises ConfigError if held-out data cannot be scored in windows that move by so
    many tokens.
    """
    if data is not None or not config.data.is_text:
        raise ConfigError(
            f"stride={stride}: windows slide over documents of tokens, and "
            f"{'arrays' if data is not None else f'data.source={config.data.source}'} have none; leave it out"
        )
    check_range(stride, config.batch.sequence_length, "the run's batch.sequence_length")


def check_range(stride: int | None, longest: int, meaning: str) -> None:
    """Raises ConfigError if windows of `longest` tokens, `meaning`, cannot move by so
    many.
    """
    if stride is not None and not 1 <= stride <= longest:
        raise ConfigError(f"stride={stride}: required 1 to {longest}, {meaning}")
