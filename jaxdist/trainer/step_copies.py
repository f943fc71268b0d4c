"""The copies of a run's checkpoints in a store: fetched at a start that has none, made beside the steps."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.copies import Copier, Copies, fetch_newest
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, extras
from jaxdist.storage import lock
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import workdir
from jaxdist.trainer.run_config import RunConfig

_BESIDE = (workdir.CONFIG, workdir.RUN)


def fetch_missing(config: RunConfig, folder: Path, say: Callable[[str], object]) -> None:
    """Gets the newest sound step from `checkpoint.copy_to` if the run in `folder` has none.

    A step is sound here by its manifest and the names and sizes of its files; the restore hashes them.

    Raises:
      ConfigError: no such store, it does not answer or has only damaged steps; the disk cannot be written.
    """
    if not config.checkpoint.copy_to:
        return
    place = workdir.checkpoints_folder(folder, config)
    own = workdir.own_identity(folder) or manifest.read_identity(place)
    try:
        copies = Copies(config.checkpoint.copy_to)
        if _has_sound_step(place, own):
            return
        place.mkdir(parents=True, exist_ok=True)
        with lock.exclusive(place / folders.LOCK):
            beside = [folder / name for name in _BESIDE]
            step, size, bad = fetch_newest(copies, place, beside, run=own, say=say)
    except lock.Locked:  # opening it says by whom
        return
    except extras.MissingExtra as error:
        raise ConfigError(f"checkpoint.copy_to={config.checkpoint.copy_to}: {error}") from error
    except CheckpointError as error:
        _write_events(folder, copies.url, error.steps)
        raise ConfigError(f"{error}; put a good one there, or begin anew with another copy_to") from error
    except OSError as error:
        raise ConfigError(f"{place} cannot be written ({error}); give a folder that can") from error
    _write_events(folder, copies.url, bad, step, size)
    if step:
        say(f"fetched step {step} from {copies.url} ({gib_text(size)}): there was none in {place}")


def _write_events(folder: Path, url: str, bad: Mapping[int, str], step: int = 0, size: int = 0) -> None:
    with contextlib.closing(MetricsWriter(folder)) as writer:
        for damaged, reason in bad.items():
            writer.event("bad_checkpoint", damaged, reason=f"its copy in {url}: {reason}")
        if step:
            writer.event("checkpoint_fetched", step, source=url, bytes=size)


def _has_sound_step(place: Path, run: str | None) -> bool:
    for step in reversed(folders.list_steps(place)):
        with contextlib.suppress(CheckpointError, OSError):
            return bool(manifest.check(place, step, run=run, contents=False))
    return False


def copier(config: RunConfig, folder: Path, store: CheckpointManager) -> Copier | None:
    """Returns what copies the steps of `store`, on process 0 alone; None where nothing is copied."""
    if not config.checkpoint.copy_to or jax.process_index():
        return None
    return Copier(Copies(config.checkpoint.copy_to), store, [folder / name for name in _BESIDE])
