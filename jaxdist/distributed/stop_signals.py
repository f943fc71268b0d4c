"""Signals that ask a run to stop."""

import signal
from collections.abc import Mapping

from jaxdist.config import ConfigError

# no handler may take two; the agent has the third
_DEAF = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
# variable: more signals that ask to stop, e.g. SIGUSR1,SIGUSR2
STOP_SIGNALS = "JAXDIST_STOP_SIGNALS"


def stop_signals(environ: Mapping[str, str]) -> list[signal.Signals]:
    """Lists the signals that ask a run to stop: SIGINT, SIGTERM, SIGHUP and those of
    JAXDIST_STOP_SIGNALS.

    SIGHUP (a closed terminal) only where it is not ignored, as `nohup` has it.

    Raises:
      ConfigError: a name is no signal's, or that of one which cannot ask.
    """
    names = environ.get(STOP_SIGNALS, "").replace(",", " ").split()
    wrong = [
        name for name in names if signal.Signals.__members__.get(name) in (None, *_DEAF)
    ]
    if wrong:
        raise ConfigError(
            f"{STOP_SIGNALS}: {', '.join(wrong)} is no signal that can ask; write e.g. SIGUSR1"
        )
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    usual = [signal.SIGINT, signal.SIGTERM, *([] if deaf else [signal.SIGHUP])]
    return list(dict.fromkeys([*usual, *(signal.Signals[name] for name in names)]))
