"""Lives of a run, read from `ledger.json` of its workdir, and their sum.

A life is one start of the run. It books each moment to one bucket, by a steady clock,
so that the buckets add up to the life. Between two lives the run was `down`, unless the
first of them had finished the run. Steps that a later life repeated were `lost`. Needs
no jax.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdist.config import EXIT_CONFIG, EXIT_PREEMPTED
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.clock import STEP, WAIT
from jaxdist.telemetry.units import duration_text, percent_text

LEDGER_FILE = "ledger.json"
BEAT_S = 10.0  # seconds between two writes of an unchanged ledger
DOWN = "down"
LOST = "lost"


@dataclass
class Life:
    """One start of a run."""

    began: float  # seconds since 1970
    written: float = 0.0  # seconds since 1970 of the last write
    ended: bool = False  # its process wrote its end
    # of an ended life: 0 = run done, 75 = saved at a signal, else that of an exception
    exit_code: int = 0
    phase: str = "start"  # the current phase
    since: float = 0.0  # seconds since 1970 when the phase began
    # updates finished before its first step, or the fewest that it rolled back to; None
    # = it has not reached the loop
    first: int | None = None
    step: int = 0  # updates finished
    undone: int = 0  # steps that it finished and rolled back
    # seconds of a steady clock by bucket
    buckets: dict[str, float] = field(default_factory=dict)
    chips: int | None = None  # number of its chips; None: unknown

    @property
    def seconds(self) -> float:
        """The length of the life in seconds."""
        return sum(self.buckets.values())

    @property
    def failed(self) -> bool:
        """Checks if a life that is over failed: by a kill, a hang or an exception.

        A config error is no failure: it says nothing about how often runs fail.
        """
        return not self.ended or self.exit_code not in (0, EXIT_PREEMPTED, EXIT_CONFIG)

    @property
    def done(self) -> bool:
        """Checks if a life that is over finished the run.

        A finished run is not down until somebody extends it.
        """
        return self.ended and self.exit_code == 0

    @property
    def has_trained(self) -> bool:
        """Checks if the life finished a step."""
        return self.first is not None and self.step - self.first + self.undone > 0


def read_lives(folder: Path | str) -> list[Life]:
    """Reads the lives in a workdir's ledger, in order; [] if none can be read."""
    try:
        file = Path(os.fspath(folder)) / LEDGER_FILE
        stored = run_format.unmarked(untrusted.read_json(file, dict), file)
        entries = untrusted.of_kind(stored.get("lives"), list, "lives")
        return [_life(entry) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _life(entry: dict[str, Any]) -> Life:
    """Checks an entry of the ledger and makes its life.

    Raises:
      ValueError, TypeError, KeyError, AttributeError: the entry is malformed.
    """
    life = Life(**{name: entry[name] for name in Life.__dataclass_fields__})
    times = (life.began, life.written, life.since, *life.buckets.values())
    if not all(untrusted.is_amount(time, below=1e12) for time in times):
        raise untrusted.Malformed("a time is no number")
    counts = [life.step, life.undone, life.exit_code]
    if life.first is not None:
        counts.append(life.first)
    if not all(map(untrusted.is_count, counts)):
        raise untrusted.Malformed("a step or an exit code is no number")
    untrusted.of_kind(life.phase, str, "phase")
    if life.chips is not None and not untrusted.is_count(life.chips or -1, 2**31):
        raise untrusted.Malformed("chips are no number")
    return life


@dataclass(frozen=True)
class Account:
    """Sum of all lives of a run."""

    buckets: dict[str, float]  # seconds by bucket

    @property
    def wall_s(self) -> float:
        """The seconds since the first start.

        The time between a run's end and its extension is not included.
        """
        return sum(self.buckets.values())

    def largest(self) -> list[tuple[str, float]]:
        """Lists the buckets that are not empty, the largest first."""
        spent = [item for item in self.buckets.items() if item[1] > 0]
        return sorted(spent, key=lambda item: -item[1])

    @property
    def goodput(self) -> float | None:
        """The share of the wall time in steps that counted.

        None before any time has passed.
        """
        if not self.wall_s:
            return None
        return self.buckets.get(STEP, 0.0) / self.wall_s


def account(lives: Sequence[Life], now: float | None = None) -> Account:
    """Adds up the lives of a run, to the end of the last one.

    Args:
      lives: all lives in order.
      now: seconds since 1970 if the last life continues. The time since it was written
        is added to its phase.
    """
    lost_by_life = lost_s(lives)
    down_s = sum(map(_gap_s, lives, lives[1:]))
    buckets = {DOWN: down_s, LOST: sum(lost_by_life)}
    for life, lost in zip(lives, lost_by_life, strict=True):
        for name, seconds in life.buckets.items():
            buckets[name] = buckets.get(name, 0.0) + seconds
        if lost:
            buckets[STEP] -= lost
    if lives and now is not None:
        last = lives[-1]
        since_s = max(0.0, now - last.written)
        buckets[last.phase] = buckets.get(last.phase, 0.0) + since_s
    return Account(buckets)


def count_failures(lives: Sequence[Life]) -> tuple[int, float]:
    """Counts the failed lives before the last one, and the seconds of all lives.

    Lives that ended before their first step are not counted. No save could have helped
    them, and a start that always fails does not show how often a run fails.
    """
    earlier = [life for life in lives[:-1] if life.has_trained]
    failed = sum(life.failed for life in earlier)
    seconds = sum(life.seconds for life in [*earlier, lives[-1]])
    return failed, seconds


def lost_s(lives: Sequence[Life]) -> list[float]:
    """Computes for each life the seconds of steps that were repeated."""
    return [
        life.buckets.get(STEP, 0.0) * _lost_share(life, later_first)
        for life, later_first in zip(lives, _later_firsts(lives), strict=True)
    ]


def _later_firsts(lives: Sequence[Life]) -> list[float]:
    """Finds for each life the lowest first step of later lives; infinity if none."""
    lowest = math.inf
    firsts = []
    for life in reversed(lives):
        firsts.append(lowest)
        if life.first is not None:
            lowest = min(lowest, life.first)
    return firsts[::-1]


def _gap_s(life: Life, following: Life) -> float:
    """Computes the seconds that a run was down between two lives; 0 if it was done."""
    if life.done:
        return 0.0
    # If the wall clock was set back during the life, its last written time counts.
    return max(
        0.0,
        following.began - life.began - life.seconds,
        following.began - (life.written or math.inf),
    )


def goodput_line(lives: Sequence[Life], total: Account | None = None) -> str:
    """Formats the goodput, the wall time and the largest other buckets.

    Args:
      lives: all lives in order.
      total: their sum; default: that to the end of the last one.

    Returns:
      Such as "goodput 93.1 % of 2h 05m: 3.2 % compile, 2.0 % lost to a restart at step
      600"; "" before any time has passed.
    """
    if total is None:
        total = account(lives)
    if total.goodput is None:
        return ""
    others = [(s, name) for name, s in total.buckets.items() if name != STEP]
    parts = []
    for seconds, name in sorted(others, reverse=True)[:_MAX_BUCKETS]:
        share = seconds / total.wall_s
        if share >= _LEAST_SHARE:
            parts.append(f"{percent_text(share)} {_describe(name, lives)}")
    line = f"goodput {percent_text(total.goodput)} of {duration_text(total.wall_s)}"
    if parts:
        line += f": {', '.join(parts)}"
    return line


_MAX_BUCKETS = 5  # buckets in a line
_LEAST_SHARE = 0.005  # least share of the wall time that is in a line


def _describe(bucket: str, lives: Sequence[Life]) -> str:
    if bucket == WAIT:
        return "waiting for other processes"
    if bucket != LOST:
        return bucket
    restarted_at = [
        first
        for life, first in zip(lives, _later_firsts(lives), strict=True)
        if _lost_share(life, first) and life.undone == 0
    ]
    has_rollbacks = any(life.undone > 0 for life in lives)
    if len(restarted_at) == 1 and not has_rollbacks:
        return f"lost to a restart at step {restarted_at[0]}"
    causes = []
    if restarted_at:
        causes.append(f"{len(restarted_at)} restarts")
    if has_rollbacks:
        causes.append("rollbacks")
    return f"lost to {' and '.join(causes)}"


def _lost_share(life: Life, later_first: float) -> float:
    """Computes the share of a life's steps that were repeated.

    Args:
      life: the life.
      later_first: the lowest step from which a later life resumed.
    """
    if life.first is None:
        return 0.0
    num_finished = life.step - life.first + life.undone
    if not num_finished:
        return 0.0
    last_kept = max(life.first, min(life.step, later_first))
    return (life.step - last_kept + life.undone) / num_finished
