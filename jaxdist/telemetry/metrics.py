"""Writers and readers of metrics.jsonl, events.jsonl and arrays.jsonl; throughput.

Each line of these files is one JSON object. Floats keep full precision (repr), so that
two runs can be tested for equality. JSON has no NaN: non-finite floats are written as
the strings "NaN", "Infinity" and "-Infinity". Readers turn exactly these strings back
into floats. A missing value is null.

Each line is appended by one `os.write` with O_APPEND. A kill between two writes leaves
whole lines, and other threads or processes may append to the same file. The last line
may still be torn: by a power loss, a full disk, or a kill within the write (Linux may
end it at a page boundary). The next writer then starts on a new line, and readers skip
lines that are no JSON object.

If the disk refuses lines, they wait in memory until it takes them, and training
continues. Standard error reports this, and how many lines were lost at the end.
"""

import contextlib
import json
import math
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import ConfigError, redact
from jaxdist.storage import untrusted

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
# whole arrays at some steps; metrics.jsonl has only their mean, minimum and maximum
ARRAYS_FILE = "arrays.jsonl"

# bytes that wait in memory while a file cannot be written; older ones are dropped
_MAX_UNWRITTEN = 1 << 26
_LAST_BYTES = 1 << 18  # bytes that `read_last_rows` reads: some hundred rows
# bytes of the longest line that is read; longer ones are no rows
_MAX_LINE_BYTES = 1 << 20
_MAX_ARRAYS_BYTES = 1 << 23  # of arrays.jsonl: some arrays of 65,536 numbers
_END_OF_TIME_S = 253_402_300_800  # the year 10,000, which no calendar shows

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# A row {"step": n, EXTENDED: m} says that the run went back to step n and continued
# with a longer schedule, to step m. Rows that were written earlier for steps after n do
# not count.
EXTENDED = "schedule_extended_to"

Row = dict[str, Any]


class MetricsWriter:
    """Writer that appends rows to metrics.jsonl and events.jsonl of one workdir.

    A logger has the same `write`, `event` and `close`. The files of this writer are the
    record of the run: resume and `report` read them.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates the workdir and opens both files.

        Args:
          workdir: the folder of the files.
          enabled: False on processes other than the first; all methods then do nothing.
          clock: gives seconds since 1970, for the `time` of rows and events.

        Raises:
          ConfigError: a file cannot be opened.
        """
        self._clock = clock
        self._folder = Path(workdir)
        self._views: list[Any] = []
        self._lock = threading.RLock()  # guards the two dicts below
        self._files: dict[str, int] = {}  # name -> file descriptor
        self._unwritten: dict[str, bytes] = {}
        self._arrays_failed = False  # arrays.jsonl cannot be opened
        if enabled:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in (METRICS_FILE, EVENTS_FILE):
                self._files[name] = _open_append(self._folder / name)

    def attach(self, view: Any) -> None:
        """Adds a writer that gets all later rows and events, too."""
        self._views.append(view)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Appends {"step", "time", **values} to metrics.jsonl.

        Args:
          step: number of the step.
          values: JSON values, or numpy and jax scalars. A jax scalar that is not ready
            makes the call wait for the device.
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
        """Appends {"step", "time", **arrays} to arrays.jsonl.

        Arrays become nested lists of numbers with six digits. The first call opens the
        file, since most models have no such arrays. Attached writers do not get them.

        Args:
          step: number of the step.
          arrays: numpy arrays by name.
        """
        if not self._files or not arrays or self._arrays_failed:
            return
        if ARRAYS_FILE not in self._files:
            try:
                self._files[ARRAYS_FILE] = _open_append(self._folder / ARRAYS_FILE)
            except ConfigError as error:  # the run is under way, and does not need it
                self._arrays_failed = True
                print(error, file=sys.stderr)
                return
        lists = {name: _rounded(array.tolist()) for name, array in arrays.items()}
        self._append(ARRAYS_FILE, {"step": step, "time": self._clock(), **lists})

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Appends {"time", "event", "step", **fields} to events.jsonl.

        The secrets of URLs are hidden: errors of a store's client contain its URL.
        """
        fields = {key: redact.redacted(value) for key, value in fields.items()}
        self._append(
            EVENTS_FILE, {"time": self._clock(), "event": name, "step": step, **fields}
        )
        self.repeat(name, step, **fields)

    def repeat(self, name: str, step: int | None = None, **fields: object) -> None:
        """Passes an event to the attached writers, such as one from before they were.

        The secrets of URLs are hidden, as in `event`.
        """
        fields = {key: redact.redacted(value) for key, value in fields.items()}
        for view in self._views:
            view.event(name, step, **fields)

    def close(self) -> None:
        """Closes the attached writers and all files; later writes do nothing."""
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
        num_lost = self._unwritten.pop(name, b"").count(b"\n")
        if num_lost:
            self._warn(name, f"its last {num_lost} lines are lost")
        try:
            os.close(descriptor)
        except OSError as error:  # a network file system may write only now
            self._warn(name, f"may lack lines ({error.strerror})")

    def _append(self, name: str, row: Mapping[str, object]) -> None:
        if not self._files:
            return
        line = json.dumps(_to_json(row), allow_nan=False) + "\n"
        with self._lock:
            if name in self._files:
                self._append_bytes(name, line.encode())

    def _append_bytes(self, name: str, data: bytes) -> None:
        """Appends waiting bytes and `data`; keeps in memory what is not written."""
        waiting = self._unwritten.pop(name, b"")
        data = waiting + data
        try:
            # one write in practice; a short write only on a full disk or a signal
            while data:
                num_written = os.write(self._files[name], data)
                data = data[num_written:]
        except OSError as error:
            if not waiting:
                self._warn(
                    name,
                    f"cannot be written ({error.strerror}); its lines wait in memory",
                )
            self._unwritten[name] = data[-_MAX_UNWRITTEN:]

    def _warn(self, name: str, problem: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"{self._folder / name}: {problem}", file=sys.stderr)


@dataclass(frozen=True)
class MetricRows:
    """Rows of a metrics.jsonl: the last row of each step."""

    train: list[Row]
    evaluation: list[Row]  # rows with `eval_loss`
    unreadable: int = 0  # number of lines that are no row


def read_rows(path: str | os.PathLike[str]) -> MetricRows:
    """Reads the rows of a metrics.jsonl, sorted by step.

    Lines without a JSON object that has an integer `step` are counted and skipped, such
    as a torn line. A run that goes back (resume or rollback) writes its steps again. A
    training row, which has `loss`, therefore replaces all earlier training and
    evaluation rows from its step on. If the run went back to a step for a longer
    schedule (`EXTENDED`), older rows after that step are skipped, too. Otherwise the
    last row of a step wins, separately for training and evaluation rows.

    Args:
      path: the file, or the workdir that holds it. No file means no rows.
    """
    unreadable = 0
    rows = _LastRows()
    for line in iter_rows(path):
        if line.row is None:
            unreadable += 1
        else:
            rows.add(line.row)
    return MetricRows(
        train=[row for _, row in sorted(rows.train.items())],
        evaluation=[row for _, row in sorted(rows.evaluation.items())],
        unreadable=unreadable,
    )


def read_last_rows(path: str | os.PathLike[str]) -> MetricRows:
    """Reads only the end of a metrics.jsonl: milliseconds, however long the file is.

    The rows are in the order in which they were written: the last one is the newest.
    """
    rows = _LastRows()
    for row in _read_last(path, METRICS_FILE, _is_metrics):
        rows.add(row)
    return MetricRows(list(rows.train.values()), list(rows.evaluation.values()))


class _LastRows:
    """The last row of each step, in the order in which rows were written."""

    def __init__(self) -> None:
        self.train: dict[int, Row] = {}
        self.evaluation: dict[int, Row] = {}
        self._newest = -1  # step of the last training row

    def add(self, row: Row) -> None:
        """Adds a row, which replaces an earlier one of its step."""
        step = row["step"]
        if EXTENDED in row:
            for rows_by_step in (self.train, self.evaluation):
                for later in [n for n in rows_by_step if n > step]:
                    del rows_by_step[later]
            self._newest = min(self._newest, step)
            return
        if is_of_step(row):
            if step <= self._newest:
                self._remove_undone(step)
            self._newest = step
        rows_by_step = self.evaluation if "eval_loss" in row else self.train
        rows_by_step.pop(step, None)
        rows_by_step[step] = row

    def _remove_undone(self, first: int) -> None:
        """Removes the rows of steps that the run does again, from step `first` on."""
        undone = [
            step
            for step, row in self.train.items()
            if step >= first and is_of_step(row)
        ]
        for step in undone:
            del self.train[step]
        for step in [n for n in self.evaluation if n >= first]:
            del self.evaluation[step]


def is_of_step(row: Row) -> bool:
    """Tests whether a row is a training step's, and not a callback's or an evaluation's.

    If the run goes back, its steps write such rows again. Rows of callbacks stay: those
    of the repeated steps may be there already, because the row of a step is written a
    few steps later.
    """
    return "loss" in row


class Line(NamedTuple):
    """Line of a file of rows."""

    row: Row | None  # None: the line is no row
    num_bytes: int


def iter_rows(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Yields the lines of a metrics.jsonl (or of a workdir's), in file order.

    Memory is bounded, however long the file and its lines are.
    """
    return _iter_lines(path, METRICS_FILE, _is_metrics)


def iter_arrays(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Yields the lines of an arrays.jsonl (or of a workdir's), in file order.

    A run that goes back writes its steps again. A row therefore replaces all earlier
    rows from its step on.
    """
    return _iter_lines(path, ARRAYS_FILE, _is_metrics, max_bytes=_MAX_ARRAYS_BYTES)


def iter_events(
    path: str | os.PathLike[str], names: Sequence[str] = ()
) -> Iterator[Line]:
    """Yields the lines of an events.jsonl (or of a workdir's), in file order.

    An event has `time`, `event` and `step`.

    Args:
      path: the file, or the workdir that holds it.
      names: names of the events to read; () = all. Other events are skipped, most of
        them without a look at their JSON.
    """
    if not names:
        return _iter_lines(path, EVENTS_FILE, _is_event)
    pattern = re.compile(rb'"event":\s*"(%s)"' % "|".join(names).encode())
    return _iter_lines(
        path,
        EVENTS_FILE,
        lambda row: _is_event(row) and row["event"] in names,
        is_wanted=pattern.search,
    )


def read_events(path: str | os.PathLike[str]) -> list[Row]:
    """Reads the events of an events.jsonl (or of a workdir's), in file order.

    All are held in memory; `iter_events` holds one.
    """
    return [line.row for line in iter_events(path) if line.row is not None]


def read_last_events(path: str | os.PathLike[str]) -> list[Row]:
    """Reads only the end of an events.jsonl, in file order."""
    return _read_last(path, EVENTS_FILE, _is_event)


def _is_metrics(row: Row) -> bool:
    return untrusted.is_count(row.get("step"))


def _is_event(row: Row) -> bool:
    step = row.get("step", "")
    return (
        untrusted.is_amount(row.get("time"), _END_OF_TIME_S)
        and isinstance(row.get("event"), str)
        and (step is None or untrusted.is_count(step))
    )


@dataclass(frozen=True)
class Throughput:
    """Speed of a run over a window of steps.

    MFU = model FLOPs / (time x peak), without recomputation. `mfu_causal` (also `mfu`)
    counts attention causally, `mfu_full` counts it in full. HFU counts all matmuls of
    the step's program: recomputation, too, and attention in full.

    MFU counts the FLOPs of targets with weight > 0: padding and prompts are no useful
    work. HFU counts them, because the devices compute them. Both count attention over
    the whole sequence. Packed documents see fewer keys (`AttentionCost.fused_flops`).
    """

    num_devices: int
    # peak of one device at `PrecisionConfig.peak`; None: unknown, no MFU and no HFU
    peak_flops_per_s: float | None
    causal_flops_per_token: float  # forward and backward
    full_flops_per_token: float  # forward and backward
    # FLOPs of a step's program on all devices together; None: unknown, no HFU
    step_flops: float | None = None

    def fields(
        self, *, seconds: float, steps: int, tokens: float
    ) -> dict[str, float | None]:
        """Computes the fields of a metrics row about speed.

        Args:
          seconds: wall time of the window, > 0.
          steps: updates in the window, >= 1.
          tokens: tokens of the window, all devices together. The caller chooses the
            convention. With padded batches, counting weighted tokens gives the lower,
            honest MFU.

        Returns:
          step_time_s, tokens_per_s, tokens_per_s_per_device, mfu_causal, mfu_full, mfu
          and hfu. A utilization is None if it is unknown.
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
    """Converts a value to JSON's types; non-finite floats become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # an array of numpy or jax; imports neither
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
    """Opens a file for appending and returns its descriptor.

    A torn last line is ended by a newline.

    Raises:
      ConfigError: the file cannot be opened, or it is a link or a pipe. A link may lead
        to a file of another run.
    """
    safe_flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    open_flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | safe_flags
    try:
        descriptor = os.open(path, open_flags, 0o644)
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


def _iter_lines(
    path: str | os.PathLike[str],
    name: str,
    is_row: Callable[[Row], bool],
    *,
    max_bytes: int = _MAX_LINE_BYTES,
    is_wanted: Callable[[bytes], object] | None = None,
) -> Iterator[Line]:
    """Yields the lines of a file; blank ones are skipped.

    Args:
      path: the file, or the folder that holds it.
      name: name of the file in a folder.
      is_row: accepts the JSON object of a line.
      max_bytes: bytes of the longest line that is read.
      is_wanted: searches a text for a wanted line; lines without one are skipped.
        Default: all lines are parsed.
    """
    try:
        with untrusted.open_regular(_file_of(path, name)) as file:
            for line in untrusted.bounded_lines(file, max_bytes, is_wanted):
                if line is None:
                    yield Line(None, max_bytes)
                elif (is_wanted is None or is_wanted(line)) and line.strip():
                    yield Line(_parse(line, is_row), len(line))
    except FileNotFoundError:
        return
    except (OSError, untrusted.Malformed):
        yield Line(None, 0)


def _parse(line: bytes, is_row: Callable[[Row], bool]) -> Row | None:
    """Parses a line; None if it is no row, such as a torn line."""
    try:
        row: Row = untrusted.parse_json(line, dict)
    except untrusted.Malformed:
        return None
    if b'NaN"' in line or b'Infinity"' in line:
        for key, value in row.items():
            if isinstance(value, str):
                row[key] = _NONFINITE.get(value, value)
    return row if is_row(row) else None


def _read_last(
    path: str | os.PathLike[str], name: str, is_row: Callable[[Row], bool]
) -> list[Row]:
    """Reads the rows within the last bytes of a file; [] if it cannot be read."""
    try:
        content = _read_end(_file_of(path, name), _LAST_BYTES)
    except (OSError, untrusted.Malformed):
        return []
    rows = [_parse(line, is_row) for line in content.split(b"\n")]
    return [row for row in rows if row is not None]


def _file_of(path: str | os.PathLike[str], name: str) -> Path:
    """Finds the file of this name in a folder; a path that is no folder is the file."""
    path = Path(path)
    return path / name if path.is_dir() else path


def _read_end(path: Path, max_bytes: int) -> bytes:
    """Reads the whole lines within the last `max_bytes` of a file."""
    with untrusted.open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        content = file.read(max_bytes)
    if size > max_bytes:
        _, _, content = content.partition(b"\n")
    return content
