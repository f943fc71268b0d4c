"""Signals that ask a run to stop."""

import signal
from collections.abc import Mapping

from jaxdist.config import ConfigError

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
