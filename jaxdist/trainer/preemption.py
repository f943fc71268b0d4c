"""The end of a run at a signal: every process stops after the same step and has saved.

A signal to one process is enough. The processes agree through the coordination service,
not through a collective. So the devices never wait, and a step costs one comparison.

Python runs a signal's handler in the main thread, and only between two instructions. If
the main thread is in a compiler or waits for another process, a further thread answers
(`_answer_signals`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # private: no stubs
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
    EXIT_INTERRUPTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    ConfigError,
    exit_code_of,
    installation,
)
from jaxdist.distributed import coordination, initialize, stop_signals
from jaxdist.distributed.cluster import TORCHRUN, count_ray_workers

_LOOK_S = 0.25  # seconds between two looks for a request to stop
_TRY_S = 0.02  # seconds between two looks for the other processes' answers
_END_S = 10  # seconds that Python's orderly exit may take after a failure
# parts of error messages that mean that another process is lost
_LOST = (
    "gloo",
    "nccl",
    "coordination service",
    "coordinationservice",
    "closed by peer",
    "reset by peer",
)


class Interrupted(Exception):
    """A signal ended training early. Everything is saved."""


class Preempted(Interrupted, SystemExit):
    """A signal that was meant for the process ended training early.

    If nobody catches this exception, the process exits with 75.
    """

    code = EXIT_PREEMPTED


class StopSignals:
    """The signals that stop a run. While entered, the run saves before it stops.

    All processes finish the current step and save. A handler of the user is also called,
    even if it is set during the run. A second SIGINT interrupts at once.
    """

    def __init__(self) -> None:
        self.stopping = False  # whether `finish_step` has returned True
        self._heard = False  # whether this process got a signal
        self._interrupted = False  # whether it got a first Ctrl-C
        self._in_handler = False  # whether a handler of the user is being called
        self._warned = False  # whether it has reported a handler set during the run
        self._steps = 0  # calls of `finish_step`
        self._stop_at = math.inf  # the call at which to stop
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._requests = coordination.Board("stop")
        self._answers = coordination.Board("stop-at")
        self._grouped = self._requests.client is not None
        # handlers that these signals had before, by signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        PROCESS.must_leave = self._grouped
        # Compilation times differ by minutes, and a collective waits only half a
        # minute. So the processes meet here before the first step.
        coordination.barrier(timeout_s=3_600)
        if _is_main():
            for number in stop_signals.stop_signals(os.environ):
                self._before[number] = signal.signal(number, self._on_signal)
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
        for number, before in self._before.items():
            handler = self._handler_after(number, before)
            # A handler of C code is None. Python cannot set it again.
            if handler is not None:
                signal.signal(number, handler)
        self._left.set()
        if self._grouped:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                # This answers processes that ask now: this one takes no more steps.
                self._answers.put(self._steps)
            self._thread.join(timeout=1)

    def _handler_after(self, number: int, before: Any) -> Any:
        """Chooses the handler of a signal after the run."""
        run_is_over = self.stopping or not PROCESS.is_script
        if before is not _before_the_run or not run_is_over:
            return before
        # Only output remains, which a signal should not cut off.
        if number == signal.SIGINT:
            return signal.default_int_handler
        return signal.SIG_IGN

    def finish_step(self) -> bool:
        """Counts a step, and tests whether to stop after it.

        Every process calls it once a step, and all get the same result.
        """
        self._restore_handlers()
        with self._lock:
            self._steps += 1
            self.stopping = self._steps >= self._stop_at
        return self.stopping

    def hear(self, number: int) -> None:
        """Requests a stop because this process got a signal. Any thread may call it."""
        PROCESS.must_leave |= number != signal.SIGINT
        self._heard = True
        if not self._grouped:
            self._stop_at = 0

    def _on_signal(self, number: int, frame: Any) -> None:
        """Handles a signal during the run."""
        # A handler of the user may call the handler that it replaced: this one.
        if self._in_handler:
            return
        self.hear(number)
        if number == signal.SIGINT:
            if self._interrupted:
                if PROCESS.is_ours and not PROCESS.is_script:
                    _leave_unsaved()
                raise KeyboardInterrupt
            self._interrupted = True
        self._in_handler = True
        _call_own_handler(self._before.get(number), number, frame)
        self._in_handler = False

    def _restore_handlers(self) -> None:
        """Sets this handler again if the user has set another one since.

        The user's handler will be called, too.
        """
        for number in self._before:
            # signal.getsignal looks a handler up in an enum, which would cost each
            # step 0.1 ms of processor time (benchmarks/step/loop.py)
            current = _signal.getsignal(number)
            if current == self._on_signal:
                continue
            self._before[number] = signal.signal(number, self._on_signal)
            if not self._warned:
                effect = "does not count:"
                if callable(current):
                    effect = "is called, too, but"
                name = signal.Signals(number).name
                print(
                    f"a handler of {name} set during the run {effect} the run still stops",
                    file=sys.stderr,
                )
            self._warned = True

    # --- a thread of every process of a group -----------------------------------------

    def _watch(self) -> None:
        """Reports a signal to the other processes, and agrees on the step to stop at."""
        # Without a coordinator, the run is over.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            # The coordinator answers all processes: at most 256 requests a second.
            look_s = _LOOK_S * max(1, jax.process_count() / 64)
            while not self._left.wait(look_s):
                if self._heard:
                    self._requests.put(True)
                if self._requests.values():
                    self._agree()
                    return

    def _agree(self) -> None:
        """Sets the step to stop at: the first step that no process has passed.

        The lock keeps this process from taking further steps meanwhile.
        """
        with self._lock:
            self._answers.put(self._steps)
            answers: dict[int, int] = {}
            while len(answers) < jax.process_count() and not self._left.wait(_TRY_S):
                answers = self._answers.values()
            if not self._left.is_set():
                self._stop_at = max(answers.values()) + 1


# --- the end of a process -------------------------------------------------------------


@dataclass
class _Process:
    """The facts about this process that decide how it ends."""

    # whether jaxdist may end it: that of a command or a joined script, not a notebook
    is_ours: bool = False
    is_script: bool = False  # whether it is a script, which may make another run
    # whether an uncaught error ends it with the error's exit code
    keeps_codes: bool = False
    # Whether the last stop was meant for the process. If not, it was a Ctrl-C to a
    # process that runs alone, and the script continues.
    must_leave: bool = False
    run: StopSignals | None = None  # the run that handles signals now


PROCESS = _Process()
# handlers that signals had before those of this module, by signal
_own_handlers: dict[int, Any] = {}
_leaving = threading.Lock()  # held by the code that ends the process


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Ends the process of a command in ways that its callers can rely on.

    A signal before the first step ends it at once with 75. Nothing is unsaved then, and
    a compiler or a wait for other processes may take too long. In a group, a failure
    ends it at once: an orderly exit would wait for processes that wait for this one.
    """
    PROCESS.is_ours = True
    try:
        _listen()
    except ConfigError as error:  # the environment's list of signals is invalid
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG) from None
    try:
        yield
    except SystemExit as leaving:
        keep_exit_code()
        _leave_with(leaving.code)
        raise
    except BaseException as error:
        keep_exit_code()
        if jax.distributed.is_initialized():
            _fail(error)
        raise


def keep_exit_code() -> None:
    """Ignores signals that would end the process with 75: its exit code is known."""
    if _is_main():
        stop_signals.keep_exit_code(_before_the_run)


def _leave_with(exit_code: object) -> None:
    """Ends the process for the code of a SystemExit, or returns if Python may end it.

    Python's orderly exit would wait for a compiler, or for processes that wait for this
    one.
    """
    if exit_code == EXIT_PREEMPTED:
        _leave_tidily(EXIT_PREEMPTED)
    failed_in_group = exit_code not in (0, None) and jax.distributed.is_initialized()
    code = exit_code if isinstance(exit_code, int) else 1
    if exit_code == EXIT_NO_CHECKPOINT or failed_in_group:
        _leave(code)
    if isinstance(exit_code, int) and code != 0:
        # A thread that waits for a disk without answer would delay the exit, or crash
        # in it.
        threading.Thread(
            target=_leave_late, args=(code,), name="leave", daemon=True
        ).start()
        _leave_tidily(code)


def join() -> str | None:
    """Joins the processes that `jaxdist launch` or a scheduler has started.

    A script calls it first, before anything asks jax for devices. From then on, an
    uncaught ConfigError exits with 78, and a CheckpointError with 77. In a group, jaxdist
    also ends the process like that of a command. A signal outside of a run ends it with
    75, after the script's handler. A failure or sys.exit(1) ends it at once, without a
    wait for the other processes.

    Returns:
      Lines that describe the group and the platform's flags; None if there are none.

    Raises:
      ConfigError: a scheduler was detected, but its group was not.
    """
    lines = initialize.prepare() if not jax.distributed.is_initialized() else None
    _keep_exit_codes()
    if jax.distributed.is_initialized() and not PROCESS.is_ours:
        PROCESS.is_ours = True
        PROCESS.is_script = True
        _listen()
        sys.exit = _exit
    return lines


def refuse_unjoined() -> None:
    """Checks that a process of a launcher has joined the others.

    Raises:
      ConfigError: it has not, so each process of `launch`, torchrun or Ray would train
        the run alone.
    """
    if "JAXDIST_NUM_PROCESSES" in os.environ and not PROCESS.is_ours:
        _keep_exit_codes()  # the agent of `launch` reads them
    if jax.distributed.is_initialized():
        return
    launcher = initialize.detect_launcher(os.environ)
    if launcher in (initialize.LAUNCH, TORCHRUN):
        size_variable = "WORLD_SIZE"
        alone_variable = "WORLD_SIZE"
        if launcher == initialize.LAUNCH:
            size_variable = "JAXDIST_NUM_PROCESSES"
            alone_variable = "JAXDIST_COORDINATOR"
        raise ConfigError(
            f"one of {os.environ.get(size_variable)} processes of {launcher}, but not joined "
            f"to the others; call jaxdist.join() first of all, or unset {alone_variable} to run alone"
        )
    workers = count_ray_workers()
    if workers > 1:
        example = installation.shipped_file("examples/ray_train.py")
        raise ConfigError(
            f"one of {workers} workers of Ray Train, which has not joined them: each would make the run "
            f"alone; start `jaxdist launch` in each worker as {example} does, or give "
            f"ScalingConfig(use_tpu=True) or use_gpu=True, or one worker"
        )


def _keep_exit_codes() -> None:
    """Makes an uncaught error end the script with the error's exit code.

    A process of a group ends at once.
    """
    if PROCESS.keeps_codes:
        return
    PROCESS.keeps_codes = True
    show = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        # Neither an error of another thread nor one in a shell ends the process.
        ends_process = _is_main() and not hasattr(sys, "ps1")
        if ends_process:
            keep_exit_code()
        if _is_main() and jax.distributed.is_initialized():
            _fail(error)
        show(kind, error, trace)
        if not ends_process:
            return
        code = exit_code_of(error)
        if code != 1:
            _leave_tidily(code)

    sys.excepthook = end


class _Exit(SystemExit):
    """A SystemExit that ends the process at once if nobody catches it.

    Python's orderly exit would wait for the other processes, which may wait for this
    one. Python deletes an uncaught exception when it has left all frames of the script.
    """

    def __del__(self) -> None:
        if self.code not in (0, None) and _is_main() and sys._getframe().f_back is None:
            if not isinstance(self.code, int):
                print(self.code, file=sys.stderr)
            _leave(self.code if isinstance(self.code, int) else 1)


def _exit(code: Any = None, /) -> NoReturn:
    """Replaces sys.exit in a joined script."""
    raise _Exit(code)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _fail(error: BaseException) -> NoReturn:
    """Ends a process of a group for an uncaught error."""
    _leave_if_peer_lost(error)
    traceback.print_exception(error)
    _leave(exit_code_of(error))


def _leave_if_peer_lost(error: BaseException) -> None:
    """Ends a process of a group if an error means that another process is lost."""
    text = str(error).lower()
    # Running out of memory is a fault of this process, even if NCCL reports it.
    out_of_memory = "resource_exhausted" in text
    lost = any(phrase in text for phrase in _LOST) and not out_of_memory
    if lost and PROCESS.is_ours and jax.distributed.is_initialized():
        print(
            f"another process was lost: {str(error).splitlines()[0][:300]}",
            file=sys.stderr,
        )
        _leave(EXIT_PEER_LOST)


def _leave_tidily(code: int) -> NoReturn:
    """Ends the process after threads and exit functions, as Python does.

    It skips Python's finalization, which takes seconds.
    """
    try:
        # Python's exit begins with these two calls.
        threading._shutdown()  # type: ignore[attr-defined]  # private, so not in stubs
        atexit._run_exitfuncs()
    finally:
        _leave(code)


def _leave_unsaved() -> NoReturn:
    """Ends a command at its second Ctrl-C.

    An exception would end it only after saves that still run, and a third Ctrl-C would
    interrupt the clean-up with a traceback. What is on the disk stays sound, as after a
    kill.
    """
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, b"interrupted again: work since the last save is lost\n")
    _leave(EXIT_INTERRUPTED)


def _leave_late(code: int) -> NoReturn:
    time.sleep(_END_S)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Flushes the output and ends the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


def _listen() -> None:
    """Sets the handlers of signals for the time outside of a run."""
    for number in stop_signals.stop_signals(os.environ):
        before = signal.signal(number, _before_the_run)
        _own_handlers[number] = stop_signals.replaced_handler(number, before)
    _hear_signals()


def _hear_signals() -> None:
    """Starts the thread that gets each signal through a pipe, whatever its handler.

    It starts none if the process already has a pipe for signals.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return
    threading.Thread(
        target=_answer_signals, args=(reader,), name="signals", daemon=True
    ).start()


def _before_the_run(number: int, frame: Any) -> None:
    """Handles a signal outside of a run: it ends the process."""
    # The lock is never released: only one thread ends the process.
    if not _leaving.acquire(blocking=False):
        return
    _call_own_handler(_own_handlers.get(number), number, frame)
    # The signal may have interrupted a print, which cannot be entered again.
    os.write(1, b"asked to stop: nothing is unsaved\n")
    _leave(EXIT_PREEMPTED)


def _call_own_handler(handler: Any, number: int, frame: Any) -> None:
    """Calls a handler of the user, if there is one.

    An error in it does not keep the run from saving.
    """
    if handler is _before_the_run:
        handler = _own_handlers.get(number)
    if not callable(handler) or handler is signal.default_int_handler:
        return
    try:
        handler(number, frame)
    except SystemExit:
        pass  # the run saves and then exits anyway
    except BaseException as error:
        traceback.print_exception(error)


def _answer_signals(reader: int) -> None:
    """Answers signals that the main thread cannot answer in time.

    Outside of a run, it ends the process. In a run, it requests a stop, whatever handler
    the signal has.

    Args:
      reader: the end of the pipe from which to read the numbers of signals.
    """
    numbers = stop_signals.stop_signals(os.environ)
    while data := os.read(reader, 256):
        run = PROCESS.run
        # A main thread that runs Python code has called the handler by then.
        time.sleep(0.2)
        for number in set(data):
            if signal.getsignal(number) is _before_the_run:
                _before_the_run(number, None)
            elif run and run is PROCESS.run and number in numbers:
                run.hear(number)
