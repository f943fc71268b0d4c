"""The workdir of a run, as its supervisor sees it: where it is, how far it has come. No
jax.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.storage.untrusted import Malformed, open_regular, read_json
from jaxdist.telemetry.metrics import EVENTS_FILE, METRICS_FILE, MetricsWriter
from jaxdist.trainer.default_workdir import default_workdir

_STEP = re.compile("[0-9]{1,9}")  # a folder of a checkpoint: longer names are not ours


def run_folder(command: Sequence[str]) -> Path | None:
    """Returns the workdir that a train command names; None if none can be seen here."""
    flags: dict[str, str] = {}
    for item, after in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = item.partition("=")
        if name in ("--workdir", "--config"):
            flags[name] = value if equals else after
    folder = flags.get("--workdir") or (
        "--config" in flags and default_workdir(flags["--config"])
    )
    return Path(folder) if folder and "://" not in folder else None


class ProgressReader:
    """How far the run of a workdir has come, read from its files."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._newest = 0

    def newest(self) -> int:
        """Returns the newest step ever seen, logged or saved; steps done again do not
        count.
        """
        if self.folder is None:
            return 0
        steps = [self._newest]
        with (
            contextlib.suppress(OSError, Malformed),
            open_regular(self.folder / METRICS_FILE) as file,
        ):
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
            steps += map(
                int, re.findall(rb'^{"step": (\d{1,9})[,}]', file.read(), re.M)
            )
        with contextlib.suppress(OSError):
            names = [
                path.parent.name
                for path in (self.folder / "checkpoints").glob("*/manifest.json")
            ]
            steps += [int(name) for name in names if _STEP.fullmatch(name)]
        self._newest = max(steps)
        return self._newest

    def starts(self) -> int:
        """Returns how often the run has begun to train."""
        if self.folder is not None:
            with (
                contextlib.suppress(OSError, Malformed),
                open_regular(self.folder / EVENTS_FILE) as file,
            ):
                return sum(b'"event": "start"' in line for line in file)
        return 0

    def event(self, name: str, step: int, **fields: object) -> None:
        """Appends an event; makes the workdir, should the run have had no time to."""
        if self.folder is not None:
            with contextlib.suppress(OSError, ConfigError):
                with contextlib.closing(MetricsWriter(self.folder)) as writer:
                    writer.event(name, step, **fields)

    def devices_per_process(self) -> int | None:
        """Returns what the last start had, or None."""
        run = self.read_json("run.json") or {}
        devices, processes = run.get("num_devices"), run.get("num_processes")
        if (
            isinstance(devices, int)
            and isinstance(processes, int)
            and 0 < processes <= devices
        ):
            return devices // processes
        return None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Returns the object in a file of the workdir, or None if there is none that
        can be read.
        """
        with contextlib.suppress(FileNotFoundError, Malformed):
            return (
                read_json(self.folder / name, dict) if self.folder is not None else None
            )
        return None
