"""The ledger of a run: books where the wall time of this start goes, in `ledger.json`.

Buckets are the phases of `operations.watch.watchdog`, and what within a phase is
another thing: joining the others, compiling, waiting for them, callbacks.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import jax

from jaxdist.config import EXIT_PREEMPTED, exit_code_of
from jaxdist.operations.ledger.run_lives import (
    BEAT_S,
    LEDGER_FILE,
    Life,
    account,
    count_failures,
    goodput_line,
    read_lives,
)
from jaxdist.storage import atomic, run_format
from jaxdist.telemetry.clock import COMPILE, STEP, Clock, installed
from jaxdist.trainer import preemption
from jaxdist.trainer.callbacks import Callback, RowView, Run, RunEnd
from jaxdist.trainer.health import Diverged

PUBLISH_S = 1.0  # between two writes of what has changed
CLOSE_S = 5.0  # that the end of a run waits for the last write

_IN_LOOP = ("data", STEP)  # phases that take turns while a run trains
_MOST_LIVES = 10_000
_MOST_COMPILED = 10_000  # compilations that a later one may turn out to contain
# events of jax that say how long tracing, lowering and compiling took
_COMPILE_EVENTS = "/jax/core/compile/"


class Ledger(Clock, Callback):
    """Books the time of this life. `enter` costs a microsecond; a thread writes.

    `timed`, `compiled` and `move` book time that has no phase of its own. They count
    in the thread that made the ledger only. The first process alone writes the file.
    """

    goodput: float | None = None  # of all lives, when they were last written

    def __init__(
        self,
        *,
        age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Begins the life, in the phase `start`; nothing is written yet.

        Args:
          age_s: seconds ago that it began.
          clock: steady seconds.
          wall_clock: seconds since 1970.
        """
        self._clock = clock
        self._wall_clock = wall_clock
        began = wall_clock() - age_s
        self._life = Life(began, since=began)
        self._entered = clock() - age_s
        self._lock = threading.Lock()  # of the life
        self._over = threading.Event()  # ends the thread
        self._writing = threading.Lock()
        self._before: list[Life] = []
        self._withdrawn = False
        self._file: Path | None = None
        self._run: Run | None = None
        self._writer: threading.Thread | None = None
        self._thread = threading.get_ident()
        self._aside = ""  # the bucket, where it is not the phase's
        # (begin, end) of compilations, none in another
        self._compiled: list[tuple[float, float]] = []
        self._process = contextlib.ExitStack()

    # --- as a callback ----------------------------------------------------------------

    def __enter__(self) -> "Ledger":
        """Becomes the clock of this process, and books what jax compiles."""
        self._process.enter_context(installed(self))
        self._process.enter_context(self._listening_to_compilers())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes how the life has ended."""
        self._process.close()
        self._close(error)

    def on_start(self, run: Run) -> None:
        """Writes the life to the ledger of the run, beside those before."""
        self._run = run
        if jax.process_index() == 0:
            self._life.chips = run.num_chips
            self._open(run.folder)

    def on_phase(self, phase: str, step: int) -> None:
        """Closes the bucket of the phase before.

        A vote is no phase here: the time that a process waits for others is booked to
        a bucket of its own (`clock.WAIT`).
        """
        if phase == "vote":
            return
        self.enter(phase, self._run.progress.step if self._run else 0)

    def on_row(self, row: RowView) -> None:
        """Adds the goodput of all lives."""
        if self.goodput is not None:
            row.values["goodput"] = self.goodput

    def on_end(self, end: RunEnd) -> None:
        """Says how the life ends, and prints the goodput."""
        if end.stopped:
            self.end_with(EXIT_PREEMPTED)
        if not end.has_trained and end.error is None:
            self.withdraw()
        line = self.summary()
        if line and self._run is not None:
            self._run.note(line)
        self._close(end.error)

    def on_fault(self, error: Exception) -> None:
        """Writes how the life has ended, unless the run goes back."""
        if not isinstance(error, Diverged):
            self._close(error)

    # --- as a clock -------------------------------------------------------------------

    @contextlib.contextmanager
    def timed(self, bucket: str) -> Iterator[None]:
        """Books the time of the body to a bucket of its own."""
        if threading.get_ident() != self._thread:
            yield
            return
        before = self._turn(bucket)
        try:
            yield
        finally:
            self._turn(before)

    def failures(self) -> tuple[int, float]:
        """Counts the failed lives before this one, and the seconds of all lives."""
        return count_failures(self.lives())

    @contextlib.contextmanager
    def _listening_to_compilers(self) -> Iterator[None]:
        """Books the compilations of this thread; costs steps nothing."""

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event.startswith(_COMPILE_EVENTS):
                self.compiled(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    # --- the book ---------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates finished."""
        return self._life.step

    def enter(self, phase: str, done: int = 0) -> None:
        """Closes the bucket of the phase before.

        Args:
          done: updates finished; 0 means nothing but in the phases of the loop.
        """
        with self._lock:
            self._book()
            life = self._life
            if phase != life.phase and not {phase, life.phase} <= set(_IN_LOOP):
                life.since = self._wall_clock()
            life.phase = phase
            if phase in _IN_LOOP and life.first is None:
                life.first = life.step = done
            if life.first is not None and (done or phase in _IN_LOOP):
                # A rollback may go behind this life's first step: what lies before was
                # another life's.
                life.undone += max(0, life.step - max(done, life.first))
                life.first = min(life.first, done)
                life.step = done

    def _turn(self, bucket: str) -> str:
        """Books the time so far; what follows goes to the bucket, or with "" to the
        phase's.
        """
        with self._lock:
            self._book()
            before = self._aside
            self._aside = bucket
        return before

    def compiled(self, seconds: float) -> None:
        """Books the last seconds to `compile`: they were spent on tracing, lowering or
        compiling.

        One compilation may contain others that were told before; their time counts
        once.
        """
        if threading.get_ident() != self._thread:
            # beside the work of this thread, which may wait for it in the phase
            # `compile`
            return
        now = self._clock()
        known = self._compiled
        begin = now - seconds
        while known and known[-1][0] >= begin:
            first, last = known.pop()
            seconds -= last - first
        known.append((begin, now))
        del known[:-_MOST_COMPILED]
        with self._lock:
            self._book()
            self._move(self._aside or self._life.phase, COMPILE, seconds)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Books so many seconds of a bucket, or all that it has, to another: it turned
        out what they were.
        """
        with self._lock:
            self._book()
            self._move(source, target, seconds)

    def _move(self, source: str, target: str, seconds: float) -> None:
        buckets = self._life.buckets
        seconds = min(seconds, buckets.get(source, 0.0))
        if source != target and seconds > 0:
            buckets[source] -= seconds
            buckets[target] = buckets.get(target, 0.0) + seconds

    def _book(self) -> None:
        now = self._clock()
        buckets = self._life.buckets
        bucket = self._aside or self._life.phase
        buckets[bucket] = buckets.get(bucket, 0.0) + now - self._entered
        self._entered = now

    def lives(self) -> list[Life]:
        """Returns the lives so far, this one as it is now."""
        with self._lock:
            self._book()
            self._life.written = self._wall_clock()
            return [*self._before, Life(**asdict(self._life))]

    def _open(self, folder: Path) -> None:
        """Begins to write the life, from a thread."""
        self._file = folder / LEDGER_FILE
        self._before = read_lives(folder)
        if not self._before:
            # what is there and cannot be read may be months: it is not overwritten
            with contextlib.suppress(OSError):
                os.replace(self._file, f"{self._file}.unreadable")
        self._writer = threading.Thread(target=self._keep, name="ledger", daemon=True)
        self._writer.start()

    def _close(self, error: BaseException | None) -> None:
        """Writes the life for the last time, once."""
        if self._writer is None:
            return
        if error is not None:
            code = exit_code_of(error)
            # a class of others has any
            self._life.exit_code = code if type(code) is int and code > 0 else 1
        self._life.ended = True
        self._over.set()
        self._writer.join(CLOSE_S)  # a disk that hangs holds nobody up
        self._writer = None

    def end_with(self, exit_code: int) -> None:
        """Sets the exit code of the life, unless an exception ends it."""
        self._life.exit_code = exit_code

    def summary(self) -> str:
        """Formats the goodput of all lives; "" if this one is not written, or
        withdrawn.
        """
        if self._file is None or self._withdrawn:
            return ""
        return goodput_line(self.lives())

    def withdraw(self) -> None:
        """Removes the life from the ledger as it ends: the run had been finished
        before, and nothing was done.
        """
        self._withdrawn = True

    def _keep(self) -> None:
        shown: tuple = ()
        while not self._over.is_set():
            life = self._life
            state = (life.phase, life.step, self._wall_clock() // BEAT_S)
            if state != shown:
                self._write()
                shown = state
            self._over.wait(PUBLISH_S)
        if not self._withdrawn:
            self._write()
        elif self._before:
            self._put(self._before)
        elif self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()

    def _write(self) -> None:
        with self._writing:
            lives = self.lives()
            self.goodput = account(lives).goodput
            self._put(lives)

    def _put(self, lives: Sequence[Life]) -> None:
        stored = [asdict(life) for life in lives[-_MOST_LIVES:]]
        document = run_format.marked({"lives": stored})
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk: the run goes on
                atomic.write_text(self._file, json.dumps(document) + "\n")


def command_age_s() -> float:
    """Measures the seconds since this process began; 0 if it is no command's own."""
    process = preemption.PROCESS
    if not process.is_ours or process.is_script:
        return 0.0
    return process_age_s()


def process_age_s() -> float:
    """Measures the seconds since this process began, to a hundredth; 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        return 0.0
    return max(0.0, age_s)
