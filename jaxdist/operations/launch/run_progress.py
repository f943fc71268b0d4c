"""Workdir and progress of a run, read for its supervisor. Needs no jax."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.storage.untrusted import Malformed, is_count, read_json
from jaxdist.telemetry import metrics
from jaxdist.trainer.default_workdir import default_workdir

_STEP = re.compile("[0-9]{1,9}")  # the name of a checkpoint's folder


def run_folder(command: Sequence[str]) -> Path | None:
    """Finds the local workdir that a train command names, or None."""
    flags: dict[str, str] = {}
    for item, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = item.partition("=")
        if name in ("--workdir", "--config"):
            flags[name] = value if equals else following
    folder = flags.get("--workdir")
    if not folder and "--config" in flags:
        folder = default_workdir(flags["--config"])
    if not folder or "://" in folder:
        return None
    return Path(folder)


class ProgressReader:
    """Reader of a run's progress in the files of its workdir."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._newest = 0

    def newest(self) -> int:
        """Finds the highest step that was ever seen, logged or saved."""
        if self.folder is None:
            return 0
        rows = metrics.read_last_rows(self.folder)
        steps = [row["step"] for row in rows.train + rows.evaluation]
        with contextlib.suppress(OSError):
            for manifest in (self.folder / "checkpoints").glob("*/manifest.json"):
                if _STEP.fullmatch(manifest.parent.name):
                    steps.append(int(manifest.parent.name))
        self._newest = max(self._newest, *steps, 0)
        return self._newest

    def starts(self) -> int:
        """Counts the starts of the run that began to train."""
        if self.folder is None:
            return 0
        starts = metrics.iter_events(self.folder, ["start"])
        return sum(line.row is not None for line in starts)

    def event(self, name: str, step: int, **fields: object) -> None:
        """Appends an event; creates the workdir if the run has not done so."""
        if self.folder is not None:
            with (
                contextlib.suppress(OSError, ConfigError),
                contextlib.closing(metrics.MetricsWriter(self.folder)) as writer,
            ):
                writer.event(name, step, **fields)

    def devices_per_process(self) -> int | None:
        """Counts the devices of each process of the last start; None if unknown."""
        run = self.read_json("run.json") or {}
        devices = run.get("num_devices")
        processes = run.get("num_processes")
        if not is_count(devices) or not is_count(processes) or not processes:
            return None
        return devices // processes or None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Reads the JSON object in a file of the workdir; None if it is unreadable."""
        if self.folder is not None:
            with contextlib.suppress(FileNotFoundError, Malformed):
                return read_json(self.folder / name, dict)
        return None
