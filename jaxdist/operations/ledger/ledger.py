"""Ledger of a run: it books the wall time of this start in `ledger.json`.

Each phase of `operations.watch.watchdog` has a bucket. So has some work within phases:
joining other processes, compiling, waiting for them, callbacks.
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

PUBLISH_S = 1.0  # seconds between two writes of a changed ledger
CLOSE_S = 5.0  # seconds that the end of a run waits for the last write

_IN_LOOP = ("data", STEP)  # phases that alternate while a run trains
_MAX_LIVES = 10_000
_MAX_COMPILED = 10_000  # compilations that a later one may turn out to contain
# prefix of jax's events for the times of tracing, lowering and compiling
_COMPILE_EVENTS = "/jax/core/compile/"


class Ledger(Clock, Callback):
    """Clock that books the time of this life, and a callback that writes the ledger.

    `enter` costs a microsecond, since a thread writes. `timed`, `compiled` and `move`
    book time that has no phase of its own. `timed` and `compiled` have an effect only
    in the thread that made the ledger. Only the first process writes the file.
    """

    # goodput of all lives when they were last written; None: nothing was written yet
    goodput: float | None = None

    def __init__(
        self,
        *,
        age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Begins the life in the phase `start`; writes nothing yet.

        Args:
          age_s: seconds since the life began.
          clock: gives the seconds of a steady clock.
          wall_clock: gives seconds since 1970.
        """
        self._clock = clock
        self._wall_clock = wall_clock
        began = wall_clock() - age_s
        self._life = Life(began, since=began)
        self._entered = clock() - age_s
        self._lock = threading.Lock()  # guards the life
        self._is_over = threading.Event()  # ends the writer
        self._write_lock = threading.Lock()
        self._earlier: list[Life] = []
        self._is_withdrawn = False
        self._file: Path | None = None
        self._run: Run | None = None
        self._writer: threading.Thread | None = None
        self._thread = threading.get_ident()
        self._bucket = ""  # the current bucket; "": that of the phase
        # (begin, end) of compilations; none lies within another
        self._compiled: list[tuple[float, float]] = []
        self._resources = contextlib.ExitStack()

    # --- as a callback ----------------------------------------------------------------

    def __enter__(self) -> "Ledger":
        """Becomes the clock of this process, and books what jax compiles."""
        self._resources.enter_context(installed(self))
        self._resources.enter_context(self._listening_to_compilers())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes the end of the life."""
        self._resources.close()
        self._close(error)

    def on_start(self, run: Run) -> None:
        """Opens the ledger of the run, and adds this life to the earlier ones."""
        self._run = run
        if jax.process_index() == 0:
            self._life.chips = run.num_chips
            self._open(run.folder)

    def on_phase(self, phase: str, step: int) -> None:
        """Begins the bucket of the phase.

        A vote has no bucket here: the time that a process waits for others is booked to
        `clock.WAIT`.
        """
        if phase == "vote":
            return
        self.enter(phase, self._run.progress.step if self._run else 0)

    def on_row(self, row: RowView) -> None:
        """Adds the goodput of all lives."""
        if self.goodput is not None:
            row.values["goodput"] = self.goodput

    def on_end(self, end: RunEnd) -> None:
        """Sets how the life ends, prints the goodput, and closes the ledger."""
        if end.stopped:
            self.end_with(EXIT_PREEMPTED)
        if not end.has_trained and end.error is None:
            self.withdraw()
        line = self.summary()
        if line and self._run is not None:
            self._run.note(line)
        self._close(end.error)

    def on_fault(self, error: Exception) -> None:
        """Writes the end of the life, unless the run rolls back."""
        if not isinstance(error, Diverged):
            self._close(error)

    # --- as a clock -------------------------------------------------------------------

    @contextlib.contextmanager
    def timed(self, bucket: str) -> Iterator[None]:
        """Books the time of the body to a bucket."""
        if threading.get_ident() != self._thread:
            yield
            return
        previous = self._switch(bucket)
        try:
            yield
        finally:
            self._switch(previous)

    def failures(self) -> tuple[int, float]:
        """Counts the failed lives before this one, and the seconds of all lives."""
        return count_failures(self.lives())

    @contextlib.contextmanager
    def _listening_to_compilers(self) -> Iterator[None]:
        """Books the compilations of this thread. It costs steps nothing."""

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
        """The number of finished updates."""
        return self._life.step

    def enter(self, phase: str, done: int = 0) -> None:
        """Ends the current phase and begins the next one.

        Args:
          phase: the next phase.
          done: number of finished updates; 0 = unknown, except in the loop's phases.
        """
        with self._lock:
            self._book()
            life = self._life
            is_in_loop = phase in _IN_LOOP and life.phase in _IN_LOOP
            if phase != life.phase and not is_in_loop:
                life.since = self._wall_clock()
            life.phase = phase
            if phase in _IN_LOOP and life.first is None:
                life.first = life.step = done
            if life.first is not None and (done or phase in _IN_LOOP):
                # A rollback may go behind this life's first step. The steps before it
                # belong to another life.
                life.undone += max(0, life.step - max(done, life.first))
                life.first = min(life.first, done)
                life.step = done

    def _switch(self, bucket: str) -> str:
        """Switches to a bucket ("" = that of the phase); returns the previous one."""
        with self._lock:
            self._book()
            previous = self._bucket
            self._bucket = bucket
        return previous

    def compiled(self, seconds: float) -> None:
        """Moves the last seconds to `compile`.

        They were spent on tracing, lowering or compiling. A compilation may contain
        others that were booked already. Their time counts once.
        """
        if threading.get_ident() != self._thread:
            # Another thread compiles beside this one. If this thread waits for it, the
            # phase is `compile` already.
            return
        now = self._clock()
        known = self._compiled
        begin = now - seconds
        while known and known[-1][0] >= begin:
            inner_begin, inner_end = known.pop()
            seconds -= inner_end - inner_begin
        known.append((begin, now))
        del known[:-_MAX_COMPILED]
        with self._lock:
            self._book()
            self._move(self._bucket or self._life.phase, COMPILE, seconds)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves seconds from one bucket to another, at most all that it has."""
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
        """Books the time since the last call to the current bucket."""
        now = self._clock()
        buckets = self._life.buckets
        bucket = self._bucket or self._life.phase
        buckets[bucket] = buckets.get(bucket, 0.0) + now - self._entered
        self._entered = now

    def lives(self) -> list[Life]:
        """Copies all lives so far; the last one is this life."""
        with self._lock:
            self._book()
            self._life.written = self._wall_clock()
            return [*self._earlier, Life(**asdict(self._life))]

    def _open(self, folder: Path) -> None:
        """Reads the earlier lives, and starts the thread that writes this one."""
        self._file = folder / LEDGER_FILE
        self._earlier = read_lives(folder)
        if not self._earlier:
            # an unreadable ledger may hold months: it is not overwritten
            with contextlib.suppress(OSError):
                os.replace(self._file, f"{self._file}.unreadable")
        self._writer = threading.Thread(
            target=self._keep_writing, name="ledger", daemon=True
        )
        self._writer.start()

    def _close(self, error: BaseException | None) -> None:
        """Writes the life for the last time; later calls do nothing."""
        if self._writer is None:
            return
        if error is not None:
            code = exit_code_of(error)
            # a user's class may have any value as its code
            self._life.exit_code = code if type(code) is int and code > 0 else 1
        self._life.ended = True
        self._is_over.set()
        self._writer.join(CLOSE_S)  # a disk that hangs must not delay the end for ever
        self._writer = None

    def end_with(self, exit_code: int) -> None:
        """Sets the exit code of the life, unless an exception ends it."""
        self._life.exit_code = exit_code

    def summary(self) -> str:
        """Formats the goodput of all lives; "" if this one is not in the ledger."""
        if self._file is None or self._is_withdrawn:
            return ""
        return goodput_line(self.lives())

    def withdraw(self) -> None:
        """Removes the life from the ledger at its end.

        A life is withdrawn if the run was finished already, so that it did nothing.
        """
        self._is_withdrawn = True

    def publish(self) -> None:
        """Writes the ledger now, for what reads it; the thread may write later."""
        if self._writer is not None:
            self._write()

    def _keep_writing(self) -> None:
        """Writes the ledger until the life is over."""
        written: tuple[str, int, float] | None = None
        while not self._is_over.is_set():
            life = self._life
            state = (life.phase, life.step, self._wall_clock() // BEAT_S)
            if state != written:
                self._write()
                written = state
            self._is_over.wait(PUBLISH_S)
        if not self._is_withdrawn:
            self._write()
        elif self._earlier:
            self._write_lives(self._earlier)
        elif self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()

    def _write(self) -> None:
        with self._write_lock:
            lives = self.lives()
            self.goodput = account(lives).goodput
            self._write_lives(lives)

    def _write_lives(self, lives: Sequence[Life]) -> None:
        stored = [asdict(life) for life in lives[-_MAX_LIVES:]]
        document = run_format.marked({"lives": stored})
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the run
                atomic.write_text(self._file, json.dumps(document) + "\n")


def command_age_s() -> float:
    """Measures the seconds since a command's process began; 0 in a user's process."""
    process = preemption.PROCESS
    if not process.is_ours or process.is_script:
        return 0.0
    return process_age_s()


def process_age_s() -> float:
    """Measures the seconds since this process began, to 0.01 s; 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field `starttime`
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        return 0.0
    return max(0.0, age_s)
