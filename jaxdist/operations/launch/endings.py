"""Exit codes of the processes of one start, and what they mean for the run."""

import signal
from collections.abc import Mapping

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
)

_FINAL = {EXIT_NO_CHECKPOINT, EXIT_CONFIG}  # a new start would end in the same way
# Exit codes of processes that end because another was lost, and their rank: a process
# with rank 1 may have been lost itself, one with rank 2 was not.
NOT_AT_FAULT = {-signal.SIGABRT: 1, EXIT_PEER_LOST: 2}
_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
UNSTARTED = -signal.SIGTERM  # ended by SIGTERM before its handler was set


def verdict(
    early: Mapping[int, int], size: int, *, is_asked: bool, may_have_stepped: bool
) -> int | None:
    """Decides the exit code of the run.

    Args:
      early: exit codes of the processes that ended by themselves.
      size: number of all processes.
      is_asked: the processes were asked to stop.
      may_have_stepped: this start may have finished steps.

    Returns:
      The code; None if a process was lost, or if one that was asked to stop has not
      saved.
    """
    endings = set(early.values())
    final = endings & _FINAL
    if final:
        return min(final)
    if endings == {0} and len(early) == size:
        return 0
    # A process that ends with 75 knows that all is saved. Processes that still run may
    # then fail because it has left.
    is_preempted = EXIT_PREEMPTED in endings
    collateral = endings & NOT_AT_FAULT.keys()
    is_orderly = endings - collateral <= {0, EXIT_PREEMPTED, UNSTARTED}
    is_saved = is_orderly and (is_preempted if collateral else len(early) == size)
    if (is_preempted or is_asked) and (is_saved or not may_have_stepped):
        return EXIT_PREEMPTED
    return None


def backoff_s(failures: int) -> float:
    """Computes the seconds before a restart.

    Args:
      failures: number of failures in a row without progress, >= 1.
    """
    return min(_BACKOFF_S * 2.0 ** (failures - 1), _MAX_BACKOFF_S)


def lost_process(codes: Mapping[int, int]) -> int | None:
    """Finds the process that was lost, or None.

    A process that may have failed because of another is chosen last.
    """
    lost = {n: code for n, code in codes.items() if code not in (0, EXIT_PREEMPTED)}
    return min(lost, key=lambda n: (NOT_AT_FAULT.get(lost[n], 0), n), default=None)


def describe_exit(code: int) -> str:
    """Describes an exit code: `killed by SIGKILL`, `ended with exit code 1`."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
