"""Signals that ask a run to stop."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.config import EXIT_PREEMPTED, ConfigError

# no handler may take the first two; the agent needs the third for its processes
_RESERVED = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
# variable that names more signals, e.g. SIGUSR1,SIGUSR2
STOP_SIGNALS = "JAXDIST_STOP_SIGNALS"


def stop_signals(environ: Mapping[str, str]) -> list[signal.Signals]:
    """Lists the signals that ask a run to stop.

    They are SIGINT, SIGTERM, SIGHUP (a closed terminal) and the signals of
    JAXDIST_STOP_SIGNALS. SIGHUP is not among them if it is ignored, as under `nohup`.

    Raises:
      ConfigError: a name is not that of a signal, or that of a reserved one.
    """
    names = environ.get(STOP_SIGNALS, "").replace(",", " ").split()
    unusable = (None, *_RESERVED)
    wrong = [name for name in names if signal.Signals.__members__.get(name) in unusable]
    if wrong:
        raise ConfigError(
            f"{STOP_SIGNALS}: {', '.join(wrong)} cannot ask a run to stop; name another signal, e.g. SIGUSR1"
        )
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    signals += [signal.Signals[name] for name in names]
    return list(dict.fromkeys(signals))


# handlers that `leave_at_signals` has replaced, by signal
_replaced: dict[int, Any] = {}


def leave_at_signals() -> None:
    """Lets signals end this command with 75 until it sets handlers of its own.

    A command calls it before its slow imports. Nothing is unsaved then, and without a
    handler a signal would end the process like a failure.
    """
    with contextlib.suppress(ConfigError):  # an invalid list is reported later
        for number in stop_signals(os.environ):
            _replaced[number] = signal.signal(number, _leave)


def _leave(number: int, frame: Any) -> None:
    """Handles a signal before the command is ready: it ends the process."""
    with contextlib.suppress(OSError):
        os.write(1, b"asked to stop: nothing is unsaved\n")
    os._exit(EXIT_PREEMPTED)


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end the process at once while the body runs.

    Python's own handler waits for the program that the devices run, perhaps for
    minutes. A handler that the caller has set is kept.
    """
    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_exit_code(ending: Any = _leave) -> None:
    """Ignores signals from now on, as the exit code of this process is known.

    A signal during the exit would otherwise replace the code by 75, which makes a
    scheduler start the command again.

    Args:
      ending: the handler that ends the process with 75. Signals with another handler
        keep it.
    """
    for number in signal.valid_signals():
        if signal.getsignal(number) is ending:
            signal.signal(number, signal.SIG_IGN)


def replaced_handler(number: int, handler: Any) -> Any:
    """Finds the handler that a signal had before `leave_at_signals`.

    Args:
      number: the signal.
      handler: its handler now; any other than that of `leave_at_signals` is returned.
    """
    return _replaced.get(number) if handler is _leave else handler


def last_handler(handler: Any) -> Any:
    """Chooses the handler for the end of a command, whose exit code is known.

    Args:
      handler: the handler that the command has replaced. The one of `leave_at_signals`
        would end the process with another code, so signals are ignored instead.
    """
    return signal.SIG_IGN if handler is _leave else handler
