"""metrics.jsonl and events.jsonl of a workdir: append-only writers, tolerant readers, throughput.

One JSON object per line. Floats keep full precision (repr), so that equality of two runs can be
tested. JSON has no NaN: non-finite floats are written as the strings "NaN", "Infinity" and
"-Infinity", and `read_rows` turns exactly these back into floats. A missing value is null.

Every line is one `os.write` on a descriptor opened with O_APPEND: a kill between two writes
leaves whole lines, and other threads or processes may append to the same file. Should a line be
torn all the same (power loss, full disk), the next writer starts on a new line, and readers skip
what is no JSON object.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"

# The events of the contract (DESIGN section 5); a test reads the package for names outside it.
EVENTS = (
    "start",
    "restore",
    "save",
    "evaluate",
    "preempted",
    "peer_lost",
    "hang",
    "bad_checkpoint",
    "nonfinite",
    "resize",
    "stop",
)

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Row = dict[str, object]


class MetricsWriter:
    """Appends rows to metrics.jsonl and events.jsonl of one workdir.

    Differs from `telemetry.tensorboard.TensorBoardWriter` (same `write`, `event`, `close`) in that
    its files are the record of the run: resume and `report` read them.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates the workdir and opens both files; with enabled=False (process > 0) does nothing.

        Args:
          workdir: folder of the run.
          enabled: True on the one process that writes.
          clock: seconds since 1970, for the `time` of events.
        Raises:
          OSError: the folder cannot be created or written.
        """
        self._clock = clock
        self._metrics: int | None = None
        self._events: int | None = None
        if enabled:
            folder = Path(workdir)
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = _open_append(folder / METRICS_FILE)
            self._events = _open_append(folder / EVENTS_FILE)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Appends {"step": step, **values} to metrics.jsonl.

        Values are numbers, None, strings, or scalars with `.item()` (numpy, jax: that waits for
        the device, so hand over values that are ready).
        """
        if self._metrics is not None:
            _append(self._metrics, {"step": step, **values})

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Appends {"time", "event", "step", **fields} to events.jsonl; `name` is one of EVENTS."""
        if self._events is not None:
            row = {"time": self._clock(), "event": name, "step": step}
            _append(self._events, {**row, **{k: v for k, v in fields.items() if k not in row}})

    def close(self) -> None:
        """Closes both files; later writes do nothing. May be called twice."""
        for descriptor in (self._metrics, self._events):
            if descriptor is not None:
                os.close(descriptor)
        self._metrics = self._events = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Writers:
    """Several writers with the interface of MetricsWriter, as one."""

    def __init__(self, *writers: Any) -> None:
        self._writers = writers

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Writes a row to each."""
        for writer in self._writers:
            writer.write(step, values)

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Writes an event to each."""
        for writer in self._writers:
            writer.event(name, step, **fields)

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()


def to_json(value: object) -> object:
    """Returns `value` as what JSON can hold: see the module's head for floats; tuples are lists."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    for convert in ("tolist", "item"):  # numpy and jax arrays and scalars, without importing either
        if hasattr(value, convert):
            return to_json(getattr(value, convert)())
    return str(value)


@dataclass(frozen=True)
class Rows:
    """The rows of a metrics.jsonl, each sorted by step, the last row of each step only."""

    train: list[Row]
    evaluation: list[Row]  # rows with `eval_loss`


def read_rows(path: str | os.PathLike[str]) -> Rows:
    """Returns the rows of a metrics.jsonl (or of the one in a workdir); empty if there is none.

    Lines that hold no JSON object with an integer `step` are skipped (a torn line). After a resume
    steps repeat: the last row of a step wins, separately for training and evaluation rows.
    """
    train: dict[int, Row] = {}
    evaluation: dict[int, Row] = {}
    for row in _read_objects(_file_in(path, METRICS_FILE)):
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            target = evaluation if "eval_loss" in row else train
            target[step] = row
    return Rows([train[s] for s in sorted(train)], [evaluation[s] for s in sorted(evaluation)])


def read_events(path: str | os.PathLike[str]) -> list[Row]:
    """Returns the events of an events.jsonl (or of the one in a workdir), in file order."""
    return [row for row in _read_objects(_file_in(path, EVENTS_FILE)) if "event" in row]


@dataclass(frozen=True)
class Throughput:
    """Speed of a run, from a window of steps: turns (seconds, steps, tokens) into metrics fields.

    MFU = model FLOPs / (time x peak), without recomputation; attention counted causally
    (`mfu_causal`, also `mfu`) and in full (`mfu_full`). Fields that need an unknown number are
    None, never guessed.
    """

    num_devices: int
    peak_flops_per_s: float | None = None  # of one device, in the compute dtype; None: unknown
    causal_flops_per_token: float | None = None  # forward and backward
    full_flops_per_token: float | None = None  # forward and backward

    def fields(self, *, seconds: float, steps: int, tokens: float) -> dict[str, float | None]:
        """Returns step_time_s, tokens_per_s, tokens_per_s_per_device, mfu_causal, mfu_full, mfu.

        Args:
          seconds: wall time of the window, > 0 (else every field is None).
          steps: updates in the window, >= 1.
          tokens: tokens of the window, all devices together. The caller chooses the convention;
            with padded batches, counting weighted tokens gives the lower, honest MFU.
        """
        if seconds <= 0 or steps < 1:
            return dict.fromkeys(_SPEED_FIELDS)
        rate = tokens / seconds
        causal = self._mfu(rate, self.causal_flops_per_token)
        full = self._mfu(rate, self.full_flops_per_token)
        values = (seconds / steps, rate, rate / self.num_devices, causal, full, causal)
        return dict(zip(_SPEED_FIELDS, values, strict=True))

    def _mfu(self, tokens_per_s: float, flops_per_token: float | None) -> float | None:
        if not self.peak_flops_per_s or flops_per_token is None:
            return None
        return tokens_per_s * flops_per_token / (self.peak_flops_per_s * self.num_devices)


_SPEED_FIELDS = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu_causal",
    "mfu_full",
    "mfu",
)


def _open_append(path: Path) -> int:
    """Returns a descriptor at the end of `path`; a torn last line gets its newline first."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def _append(descriptor: int, row: Mapping[str, object]) -> None:
    data = (json.dumps(to_json(row), allow_nan=False) + "\n").encode()
    while data:  # one write in practice; a short write only on a full disk or a signal
        data = data[os.write(descriptor, data) :]


def _file_in(path: str | os.PathLike[str], name: str) -> Path:
    path = Path(path)
    return path / name if path.is_dir() else path


def _read_objects(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    with open(path, "rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # torn line, also undecodable bytes
                continue
            if isinstance(row, dict):
                yield {key: _restore(value) for key, value in row.items()}


def _restore(value: object) -> object:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value
