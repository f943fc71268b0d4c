"""Ends a run at a signal: every process after the same step, with everything saved.

A signal to one process is enough. The processes agree through the coordination service,
not through a collective: the devices never wait for it, and a step costs one
comparison.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    ConfigError,
    exit_code_of,
)
from jaxdist.distributed import coordination, initialize
from jaxdist.distributed.cluster import TORCHRUN, count_ray_workers
from jaxdist.distributed.stop_signals import stop_signals

# between looks for a request; between looks for the others' answers
_LOOK_S = 0.25
_TRY_S = 0.02
_END_S = 10  # that Python's own end may last after a failure
_LOST = (  # words of errors by which one process hears that another has gone
    "gloo",
    "nccl",
    "coordination service",
    "coordinationservice",
    "closed by peer",
    "reset by peer",
)


class Interrupted(Exception):
    """A signal ended training early; everything is saved."""


class Preempted(Interrupted, SystemExit):
    """The signal was for the process: where nobody catches this, a script ends
    with 75.
    """

    code = EXIT_PREEMPTED


class StopSignals:
    """While entered, signals only ask: the step under way is finished and saved, by all
    processes.

    A user's own handler is called, too, also one that is set meanwhile. A second SIGINT
    interrupts at once.
    """

    def __init__(self) -> None:
        self.stopping = False  # whether `reached` has returned True
        self._heard = False  # of a signal to this process
        self._interrupted = False  # by a first Ctrl-C
        self._asking = False  # a user's own handler is being called
        self._told = False  # that a handler was set during the run
        # calls of `reached`; the one to stop at
        self._steps = 0
        self._stop_at = math.inf
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._requests = coordination.Board("stop")
        self._answers = coordination.Board("stop-at")
        self._grouped = self._requests.client is not None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        PROCESS.must_leave = self._grouped
        # Compilers differ by minutes in their time, a collective waits half of one.
        coordination.barrier(timeout_s=3_600)
        if _is_main():
            for number in stop_signals(os.environ):
                self._before[number] = signal.signal(number, self._ask)
            PROCESS.run = self
            _hear_signals()
        if self._grouped:
            self._thread = threading.Thread(
                target=self._watch, name="stop-signals", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            _leave_if_peer_lost(error)
        if PROCESS.run is self:
            PROCESS.run = None
        for number, handler in self._before.items():
            if handler is _before_the_run and (self.stopping or not PROCESS.is_script):
                # The run is over: its last words are not cut short.
                handler = (
                    signal.default_int_handler
                    if number == signal.SIGINT
                    else signal.SIG_IGN
                )
            if handler is not None:  # None: C code's, which Python cannot put back
                signal.signal(number, handler)
        self._left.set()
        if self._grouped:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                # for one who asks now: we are past our last step
                self._answers.put(self._steps)
            self._thread.join(timeout=1)

    def reached(self) -> bool:
        """Tests whether to stop after this step; each process calls it once a step,
        all get the same.
        """
        self._take_back()
        with self._lock:
            self._steps += 1
            self.stopping = self._steps >= self._stop_at
        return self.stopping

    def hear(self, number: int) -> None:
        """Asks to stop, for a signal to this process; from any thread."""
        PROCESS.must_leave |= number != signal.SIGINT
        self._heard = True
        if not self._grouped:
            self._stop_at = 0

    def _ask(self, number: int, frame: Any) -> None:
        if self._asking:  # by a handler that calls the one it replaced
            return
        self.hear(number)
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self._asking = True
        _call_own_handler(self._before.get(number), number, frame)
        self._asking = False

    def _take_back(self) -> None:
        """Sets this handler again where another one was set since; that is
        called, too.
        """
        for number in self._before:
            theirs = signal.getsignal(number)
            if theirs != self._ask:
                self._before[number] = signal.signal(number, self._ask)
                if not self._told:
                    also = (
                        "is called, too, but" if callable(theirs) else "does not count:"
                    )
                    name = signal.Signals(number).name
                    print(
                        f"a handler of {name} set during the run {also} the run still stops",
                        file=sys.stderr,
                    )
                self._told = True

    # --- a thread of every process of a group -----------------------------------------

    def _watch(self) -> None:
        """Tells the others of a signal to this process; agrees on a step once any
        process had one.
        """
        # no coordinator: the run is over
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            # The coordinator answers them all: at most 256 requests a second.
            look_s = _LOOK_S * max(1, jax.process_count() / 64)
            while not self._left.wait(look_s):
                if self._heard:
                    self._requests.put(True)
                if self._requests.values():
                    self._agree()
                    return

    def _agree(self) -> None:
        """Sets the step to stop at: the first that no process has passed. None moves on
        meanwhile.
        """
        with self._lock:
            self._answers.put(self._steps)
            answers: dict[int, int] = {}
            while len(answers) < jax.process_count() and not self._left.wait(_TRY_S):
                answers = self._answers.values()
            if not self._left.is_set():
                self._stop_at = max(answers.values()) + 1


# --- a process of its own -------------------------------------------------------------


@dataclass
class _Process:
    is_ours: bool = False  # to end: a command's or a joined script's, not a notebook's
    is_script: bool = False  # which may go on after a run, with another
    # whether what nobody catches ends it with the error's exit code
    keeps_codes: bool = False
    # Whether the last stop was for the process: only a Ctrl-C to one alone gives
    # control back.
    must_leave: bool = False
    run: StopSignals | None = None  # that takes signals now


PROCESS = _Process()
_own_handlers: dict[int, Any] = {}  # of signals, as they were before ours
_leaving = threading.Lock()  # held by what ends the process


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Ends a command's process in ways that others can rely on.

    A signal before the first step ends it at once with 75: nothing is unsaved, and a
    compiler or a wait for other processes may take longer than there is time. In a
    group, a failure ends it at once: an orderly end would wait for processes that wait
    for this one.
    """
    PROCESS.is_ours = True
    try:
        _listen()
    except ConfigError as error:  # of the environment's list of signals
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from None
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == EXIT_PREEMPTED:
            _leave_tidily(EXIT_PREEMPTED)
        # Python's own end would wait for a compiler, or for processes that wait for
        # this one.
        failed_in_group = (
            leaving.code not in (0, None) and jax.distributed.is_initialized()
        )
        code = leaving.code if isinstance(leaving.code, int) else 1
        if leaving.code == EXIT_NO_CHECKPOINT or failed_in_group:
            _leave(code)
        if isinstance(leaving.code, int) and code != 0:
            # A thread that waits for a disk without answer would hold up the end, or
            # crash in it.
            threading.Thread(
                target=_leave_late, args=(code,), name="leave", daemon=True
            ).start()
            _leave_tidily(code)
        raise
    except BaseException as error:
        if jax.distributed.is_initialized():
            _fail(error)
        raise


def join() -> str | None:
    """Joins the processes that `jaxdist launch` or a scheduler started; returns lines
    that say so, or None.

    A script calls it first of all, before anything asks jax for devices; alone, it may
    stay. In a group the process is ours from then on, as a command's is: a signal
    outside of a run ends it with 75 (after the script's own handler, if it had set
    one), a failure or sys.exit(1) at once and not after a wait for the others, a
    ConfigError with 78, a CheckpointError with 77.

    Raises:
      ConfigError: a scheduler was detected, but not its group.
    """
    lines = initialize.prepare() if not jax.distributed.is_initialized() else None
    _keep_exit_codes()
    if jax.distributed.is_initialized() and not PROCESS.is_ours:
        PROCESS.is_ours = PROCESS.is_script = True
        _listen()
        sys.exit = _exit
    return lines


def refuse_unjoined() -> None:
    """Raises a ConfigError where each process of `launch`, torchrun or Ray would make
    the run alone.
    """
    if "JAXDIST_NUM_PROCESSES" in os.environ and not PROCESS.is_ours:
        _keep_exit_codes()  # the agent reads them
    if jax.distributed.is_initialized():
        return
    launcher = initialize.detect_launcher(os.environ)
    size = "WORLD_SIZE"
    if launcher in (initialize.LAUNCH, TORCHRUN):
        ours = launcher == initialize.LAUNCH
        number = "JAXDIST_NUM_PROCESSES" if ours else size
        alone = "JAXDIST_COORDINATOR" if ours else size
        raise ConfigError(
            f"one of {os.environ.get(number)} processes of {launcher}, but not joined "
            f"to the others; call jaxdist.join() first of all, or unset {alone} to run alone"
        )
    workers = count_ray_workers()
    if workers > 1:
        raise ConfigError(
            f"one of {workers} workers of Ray Train, which has not joined them: each would make the run "
            f"alone; start `jaxdist launch` in each worker as examples/ray_train.py does, or give "
            f"ScalingConfig(use_tpu=True) or use_gpu=True, or one worker"
        )


def _keep_exit_codes() -> None:
    """Ends a script for an error that nobody caught with the error's exit code; one of
    a group at once.
    """
    if PROCESS.keeps_codes:
        return
    PROCESS.keeps_codes = True
    show = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not _is_main():  # of a library's thread: it ends nothing
            show(kind, error, trace)
        elif jax.distributed.is_initialized():
            _fail(error)
        else:
            show(kind, error, trace)
            code = exit_code_of(error)
            # no shell's
            if code != 1 and not hasattr(sys, "ps1"):
                _leave_tidily(code)

    sys.excepthook = end


class _Exit(SystemExit):
    """A SystemExit that ends the process at once when it has left the script: nobody
    has caught it.

    Python's own end would wait for the other processes, which may wait for this one.
    """

    def __del__(self) -> None:
        if self.code not in (0, None) and _is_main() and sys._getframe().f_back is None:
            if not isinstance(self.code, int):
                print(self.code, file=sys.stderr)
            _leave(self.code if isinstance(self.code, int) else 1)


def _exit(code: Any = None, /) -> NoReturn:
    """Takes the place of sys.exit in a joined script."""
    raise _Exit(code)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _fail(error: BaseException) -> None:
    """Ends a process of a group for what nobody caught."""
    _leave_if_peer_lost(error)
    traceback.print_exception(error)
    _leave(exit_code_of(error))


def _leave_if_peer_lost(error: BaseException) -> None:
    text = str(error).lower()
    out_of_memory = "resource_exhausted" in text  # NCCL's, too: a fault of this process
    lost = any(phrase in text for phrase in _LOST) and not out_of_memory
    if lost and PROCESS.is_ours and jax.distributed.is_initialized():
        print(
            f"another process was lost: {str(error).splitlines()[0][:300]}",
            file=sys.stderr,
        )
        _leave(EXIT_PEER_LOST)


def _leave_tidily(code: int) -> None:
    """Ends the process as Python would, but for taking itself apart: that lasts for
    seconds.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # these two are how Python's own end begins
        atexit._run_exitfuncs()
    finally:
        _leave(code)


def _leave_late(code: int) -> None:
    time.sleep(_END_S)
    _leave(code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


def _listen() -> None:
    for number in stop_signals(os.environ):
        _own_handlers[number] = signal.signal(number, _before_the_run)
    _hear_signals()


def _hear_signals() -> None:
    """Starts the thread that hears of each signal, whatever its handler; not where
    another already does.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        os.close(reader)
        os.close(writer)
        return
    threading.Thread(
        target=_answer_signals, args=(reader,), name="signals", daemon=True
    ).start()


def _before_the_run(number: int, frame: Any) -> None:
    """A signal's handler where StopSignals has none: ends the process."""
    if _leaving.acquire(blocking=False):  # else it is being answered
        _call_own_handler(_own_handlers.get(number), number, frame)
        # print may be what was interrupted
        os.write(1, b"asked to stop: nothing is unsaved\n")
        _leave(EXIT_PREEMPTED)


def _call_own_handler(handler: Any, number: int, frame: Any) -> None:
    """Calls a script's own handler, if it has one; what that raises does not keep the
    run from saving.
    """
    if handler is _before_the_run:
        handler = _own_handlers.get(number)
    if callable(handler) and handler is not signal.default_int_handler:
        try:
            handler(number, frame)
        except SystemExit:  # what the run does next
            pass
        except BaseException as error:
            traceback.print_exception(error)


def _answer_signals(reader: int) -> None:
    """Ends the process for a signal that the main thread, outside Python, cannot answer
    in time.

    In a run it asks to stop, whatever handler the signal has by now.
    """
    numbers = stop_signals(os.environ)
    while data := os.read(reader, 256):
        run = PROCESS.run
        # a main thread that has not seen the signal by then is busy outside Python
        time.sleep(0.2)
        for number in set(data):
            if signal.getsignal(number) is _before_the_run:
                _before_the_run(number, None)
            elif run and run is PROCESS.run and number in numbers:
                run.hear(number)
