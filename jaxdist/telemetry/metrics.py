"""metrics.jsonl, events.jsonl, arrays.jsonl of a workdir: append-only writers, tolerant
readers, throughput.

One JSON object per line. Floats keep full precision (repr), so that equality of two
runs can be tested. JSON has no NaN: non-finite floats are written as the strings "NaN",
"Infinity" and "-Infinity", and the readers turn exactly these back into floats. A
missing value is null.

Every line is one `os.write` on a descriptor opened with O_APPEND: a kill between two
writes leaves whole lines, and other threads or processes may append to the same file.
Should the last line be torn all the same (power loss, a full disk, a kill within the
write, which Linux may end at a page's end), the next writer starts on a new line, and
readers skip what is no JSON object. Lines that a disk refuses are kept in memory and
written once it takes them: training goes on. Standard error says so, and what was lost
if it never did.
"""

import contextlib
import json
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.storage import untrusted

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
# of some steps of a run, what rows have only the mean, least and largest of
ARRAYS_FILE = "arrays.jsonl"

_MAX_UNWRITTEN = 1 << 26  # bytes kept while they cannot be written; of more the last
_LAST_BYTES = 1 << 18  # of a file that is read from its end: some hundred rows
_MAX_FILE_BYTES = 1 << 32  # of a file that is read: ten million rows
_END_OF_TIME_S = 253_402_300_800  # the year 10,000, which no calendar shows

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# A row {"step": n, EXTENDED: m}: from n on the run has another schedule, to m; rows
# after n no longer count.
EXTENDED = "schedule_extended_to"

Row = dict[str, Any]


class MetricsWriter:
    """Appends rows to metrics.jsonl and events.jsonl of one workdir.

    Differs from a logger (same `write`, `event`, `close`) in that its files are the
    record of the run: resume and `report` read them.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates the workdir and opens both files; with enabled=False (process > 0)
        does nothing.

        `clock` gives seconds since 1970, for the `time` of rows and events.

        Raises:
          ConfigError: they cannot be opened.
        """
        self._clock = clock
        self._folder = Path(workdir)
        self._views: list[Any] = []
        self._lock = threading.RLock()  # of the files
        self._files: dict[str, int] = {}
        self._unwritten: dict[str, bytes] = {}
        self._refused = False  # arrays.jsonl cannot be opened
        if enabled:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files = {
                n: _open_append(self._folder / n) for n in (METRICS_FILE, EVENTS_FILE)
            }

    def attach(self, view: Any) -> None:
        """Hands every row and event from here on to another writer with this interface,
        too.
        """
        self._views.append(view)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Appends {"step": step, "time": seconds since 1970, **values} to
        metrics.jsonl.

        Values are what JSON holds, or numpy and jax scalars (these wait for the device,
        so hand over values that are ready).
        """
        self._append(METRICS_FILE, {"step": step, "time": self._clock(), **values})
        if self._views:
            values = {
                name: x.tolist() if hasattr(x, "tolist") else x
                for name, x in values.items()
            }
        for view in self._views:
            view.write(step, values)

    def write_arrays(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Appends {"step", "time", **arrays} to arrays.jsonl, numpy arrays as nested
        lists of six digits.

        The file is opened by the first call: most models have none. Views are told
        nothing.
        """
        if not self._files or not arrays or self._refused:
            return None
        if ARRAYS_FILE not in self._files:
            try:
                self._files[ARRAYS_FILE] = _open_append(self._folder / ARRAYS_FILE)
            except ConfigError as error:  # the run is under way, and needs it not
                self._refused = True
                return print(error, file=sys.stderr)
        lists = {name: _rounded(x.tolist()) for name, x in arrays.items()}
        self._append(ARRAYS_FILE, {"step": step, "time": self._clock(), **lists})
        return None

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Appends {"time", "event", "step", **fields} to events.jsonl."""
        self._append(
            EVENTS_FILE, {"time": self._clock(), "event": name, "step": step, **fields}
        )
        for view in self._views:
            view.event(name, step, **fields)

    def close(self) -> None:
        """Closes the views and both files; later writes do nothing."""
        for view in self._views:
            view.close()
        self._views = []
        with self._lock:
            for name, descriptor in self._files.items():
                self._close(name, descriptor)
            self._files = {}

    def _close(self, name: str, descriptor: int) -> None:
        if name in self._unwritten:
            self._append_bytes(name, b"")
        lines = self._unwritten.pop(name, b"").count(b"\n")
        if lines:
            self._say(name, f"its last {lines} lines are lost")
        try:
            os.close(descriptor)
        except OSError as error:  # of a network file system, which writes only now
            self._say(name, f"may lack lines ({error.strerror})")

    def _append(self, name: str, row: Mapping[str, object]) -> None:
        if not self._files:
            return
        line = json.dumps(_to_json(row), allow_nan=False) + "\n"
        with self._lock:
            if name in self._files:
                self._append_bytes(name, line.encode())

    def _append_bytes(self, name: str, data: bytes) -> None:
        """Appends what could not be written before, and `data`; what of it cannot be
        written is kept.
        """
        before = self._unwritten.pop(name, b"")
        data = before + data
        try:
            # one write in practice; a short write only on a full disk or a signal
            while data:
                data = data[os.write(self._files[name], data) :]
        except OSError as error:
            if not before:
                self._say(
                    name,
                    f"cannot be written ({error.strerror}); its lines wait in memory",
                )
            self._unwritten[name] = data[-_MAX_UNWRITTEN:]

    def _say(self, name: str, what: str) -> None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            print(f"{self._folder / name}: {what}", file=sys.stderr)


@dataclass(frozen=True)
class MetricRows:
    """The rows of a metrics.jsonl, each sorted by step, the last row of each
    step only.
    """

    train: list[Row]
    evaluation: list[Row]  # rows with `eval_loss`
    unreadable: int = 0  # lines that are no such row


def read_rows(path: str | os.PathLike[str]) -> MetricRows:
    """Reads the rows of a metrics.jsonl (or of the one in a workdir); empty if there
    is none.

    Lines that hold no JSON object with an integer `step` are skipped (a torn line) and
    counted. After a resume steps repeat: the last row of a step wins, separately for
    training and evaluation rows. Rows after a step that the run went back to for
    another schedule (`EXTENDED`) are left out.
    """
    rows, unreadable = _read_lines(Path(path), METRICS_FILE, _is_metrics)
    train, evaluation = _last_of_steps(rows)
    return MetricRows(
        [row for _, row in sorted(train.items())],
        [row for _, row in sorted(evaluation.items())],
        unreadable,
    )


def read_last_rows(path: str | os.PathLike[str]) -> MetricRows:
    """Reads the end of a metrics.jsonl alone, in milliseconds however long it is.

    The rows are in the order in which they were written, so that the last tells of now.
    """
    rows, _ = _read_lines(Path(path), METRICS_FILE, _is_metrics, last=_LAST_BYTES)
    train, evaluation = _last_of_steps(rows)
    return MetricRows(list(train.values()), list(evaluation.values()))


def read_arrays(path: str | os.PathLike[str]) -> tuple[list[Row], int]:
    """Reads the rows of an arrays.jsonl (or of the one in a workdir) by step, and how
    many cannot be read.

    A run that goes back writes its steps again: of the rows before, those from that
    step on are dropped.
    """
    rows, unreadable = _read_lines(Path(path), ARRAYS_FILE, _is_metrics)
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept, unreadable


def _last_of_steps(rows: list[Row]) -> tuple[dict[int, Row], dict[int, Row]]:
    """Keeps the last row of each step that counts, in file order: those of training,
    of evaluations.
    """
    train: dict[int, Row] = {}
    evaluation: dict[int, Row] = {}
    for row in rows:
        step = row["step"]
        if EXTENDED in row:
            for part in (train, evaluation):
                for later in [n for n in part if n > step]:
                    del part[later]
            continue
        part = evaluation if "eval_loss" in row else train
        part.pop(step, None)
        part[step] = row
    return train, evaluation


def _is_metrics(row: Row) -> bool:
    return untrusted.is_count(row.get("step"))


def read_events(path: str | os.PathLike[str]) -> list[Row]:
    """Reads the events of an events.jsonl (or of the one in a workdir), in file
    order.
    """
    return scan_events(path)[0]


def scan_events(path: str | os.PathLike[str]) -> tuple[list[Row], int]:
    """Reads as `read_events`, and counts the lines that are no event with `time`,
    `event` and `step`.
    """
    return _read_lines(Path(path), EVENTS_FILE, _is_event)


def _is_event(row: Row) -> bool:
    step = row.get("step", "")
    return (
        untrusted.is_amount(row.get("time"), _END_OF_TIME_S)
        and isinstance(row.get("event"), str)
        and (step is None or untrusted.is_count(step))
    )


@dataclass(frozen=True)
class Throughput:
    """Speed of a run, from a window of steps: turns (seconds, steps, tokens) into
    metrics fields.

    MFU = model FLOPs / (time x peak), without recomputation; attention counted causally
    (`mfu_causal`, also `mfu`) and in full (`mfu_full`). HFU counts the matrix products
    of the step's program, what it computes again and attention in full. None where the
    peak is unknown.
    """

    num_devices: int
    # of one device, of `PrecisionConfig.peak`; None: unknown
    peak_flops_per_s: float | None
    causal_flops_per_token: float  # forward and backward
    full_flops_per_token: float  # forward and backward
    # of the program of a step, all devices together; None: unknown
    step_flops: float | None = None

    def fields(
        self, *, seconds: float, steps: int, tokens: float
    ) -> dict[str, float | None]:
        """Computes step_time_s, tokens_per_s, tokens_per_s_per_device, mfu_causal,
        mfu_full, mfu, hfu.

        Args:
          seconds: wall time of the window, > 0.
          steps: updates in the window, >= 1.
          tokens: tokens of the window, all devices together. The caller chooses the
            convention; with padded batches, counting weighted tokens gives the lower,
            honest MFU.
        """
        rate = tokens / seconds / self.num_devices
        causal = full = hfu = None
        if self.peak_flops_per_s is not None:
            causal = rate * self.causal_flops_per_token / self.peak_flops_per_s
            full = rate * self.full_flops_per_token / self.peak_flops_per_s
            if self.step_flops is not None:
                executed = self.step_flops * steps / seconds / self.num_devices
                hfu = executed / self.peak_flops_per_s
        return {
            "step_time_s": seconds / steps,
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": rate,
            "mfu_causal": causal,
            "mfu_full": full,
            "mfu": causal,
            "hfu": hfu,
        }


def _to_json(value: object) -> object:
    """Converts a value to what JSON can hold: see the module's head for floats; tuples
    are lists.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # of numpy and jax, without importing either
        return _to_json(value.tolist())
    return str(value)


def _rounded(values: Any) -> Any:
    """Rounds the numbers of nested lists to six digits; whole ones become integers."""
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    if not isinstance(values, float) or not math.isfinite(values):
        return values
    if values.is_integer() and abs(values) < 2**53:
        return int(values)
    return float(f"{values:.6g}")


def _open_append(path: Path) -> int:
    """Opens a descriptor at the end of `path`; a torn last line gets its newline
    first.

    Raises:
      ConfigError: it cannot be opened; or it is a link, to what may be no file of this
        run, or a pipe.
    """
    try:
        safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | safe, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); remove it, or free the disk"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is no regular file; remove it")
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def _read_lines(
    path: Path, name: str, is_row: Callable[[Row], bool], *, last: int = 0
) -> tuple[list[Row], int]:
    """Reads the objects of a file's lines that are such rows, and the number of other
    lines.

    Args:
      last: read only so many bytes, from the end.
    """
    if path.is_dir():
        path = path / name
    try:
        if last:
            content = _end_of(path, last)
        else:
            content = untrusted.read_bytes(path, max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return [], 0
    except (OSError, untrusted.Malformed):
        return [], 1
    lines = [line for line in content.splitlines() if line.strip()]
    rows: list[Row] = []
    for line in lines:
        # a torn line, also undecodable bytes
        with contextlib.suppress(untrusted.Malformed):
            row = untrusted.parse_json(line, dict)
            for key, value in row.items():
                if isinstance(value, str):
                    row[key] = _NONFINITE.get(value, value)
            if is_row(row):
                rows.append(row)
    return rows, len(lines) - len(rows)


def _end_of(path: Path, most: int) -> bytes:
    """Reads the last lines of a file, of at most so many bytes."""
    with untrusted.open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        content = file.read(most)
    if size > most:
        _, _, content = content.partition(b"\n")
    return content
