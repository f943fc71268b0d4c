"""The lives of a run in `ledger.json` of its workdir, and how they add up.

A life is one start of the run. It books every moment to the bucket of the phase that it
is in, by one steady clock, so that buckets add up to the life; between two lives the
run was `down`, unless the first of them had `done` all that there was to do. Steps that
a later life did again were `lost`. Needs no jax.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxdist.config import EXIT_CONFIG, EXIT_PREEMPTED
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry.clock import STEP, WAIT

LEDGER_FILE = "ledger.json"
BEAT_S = 10.0  # between two writes of what has not changed
DOWN = "down"
LOST = "lost"


@dataclass
class Life:
    """One start of a run. Times are seconds since 1970, the rest is seconds of a steady
    clock.
    """

    began: float
    written: float = 0.0  # when this was written
    ended: bool = False  # and could say so
    # then: 0 done, 75 saved at a signal, else that of the exception that ended it
    exit_code: int = 0
    phase: str = "start"  # what it does then
    since: float = 0.0
    # updates finished before its first step, or as many as it went back to
    first: int | None = None
    step: int = 0  # updates finished
    undone: int = 0  # steps that it did, and went back behind
    buckets: dict[str, float] = field(default_factory=dict)
    chips: int | None = None  # it ran on; None: not known

    @property
    def seconds(self) -> float:
        return sum(self.buckets.values())

    @property
    def failed(self) -> bool:
        """Whether a life that is over lost what it had not saved: by a kill, a hang, an
        exception.

        A fault of the config is none: it says nothing of how often runs fail.
        """
        return not self.ended or self.exit_code not in (0, EXIT_PREEMPTED, EXIT_CONFIG)

    @property
    def done(self) -> bool:
        """Whether a life that is over left nothing to do: until somebody extends the
        run it is not down.
        """
        return self.ended and self.exit_code == 0

    @property
    def has_trained(self) -> bool:
        """Whether it has finished a step."""
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


def _life(entry: dict) -> Life:
    """Reads a life. If it is malformed, it raises an error that `read_lives` catches."""
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
    """All lives of a run together: {bucket: seconds}, which add up to `wall_s`.

    `wall_s` is the time since the first start. The time between a run's end and its
    extension is not in it.
    """

    buckets: dict[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.buckets.values())

    def largest(self) -> list[tuple[str, float]]:
        """Lists the buckets that have any time, the largest first."""
        spent = [item for item in self.buckets.items() if item[1] > 0]
        return sorted(spent, key=lambda item: -item[1])

    @property
    def goodput(self) -> float | None:
        """The share of the wall time in steps that counted; None before any time has
        passed.
        """
        if not self.wall_s:
            return None
        return self.buckets.get(STEP, 0.0) / self.wall_s


def account(lives: Sequence[Life], now: float | None = None) -> Account:
    """Adds up the lives of a run, to the end of the last one.

    Args:
      now: seconds since 1970 if the last life goes on; the time since it was written is
        added to its phase.
    """
    lost = lost_s(lives)
    down_s = sum(map(_gap_s, lives, lives[1:]))
    buckets = {DOWN: down_s, LOST: sum(lost)}
    for life, wasted in zip(lives, lost, strict=True):
        for name, seconds in life.buckets.items():
            buckets[name] = buckets.get(name, 0.0) + seconds
        if wasted:
            buckets[STEP] -= wasted
    if lives and now is not None:
        last = lives[-1]
        since_s = max(0.0, now - last.written)
        buckets[last.phase] = buckets.get(last.phase, 0.0) + since_s
    return Account(buckets)


def count_failures(lives: Sequence[Life]) -> tuple[int, float]:
    """Counts the failed lives before the last one, and the seconds of all lives.

    Lives that ended before their first step count for neither: no save could have
    helped them, and a start that always fails says nothing of how often a run does.
    """
    before = [life for life in lives[:-1] if life.has_trained]
    failed = sum(life.failed for life in before)
    seconds = sum(life.seconds for life in [*before, lives[-1]])
    return failed, seconds


def lost_s(lives: Sequence[Life]) -> list[float]:
    """Computes the seconds of each life's steps that were done again."""
    return [
        life.buckets.get(STEP, 0.0) * _lost_share(life, later_first)
        for life, later_first in zip(lives, _later_firsts(lives), strict=True)
    ]


def _later_firsts(lives: Sequence[Life]) -> list[float]:
    """Finds for each life the lowest step from which a later one resumed; infinite if
    none did.
    """
    lowest = math.inf
    found = []
    for life in reversed(lives):
        found.append(lowest)
        if life.first is not None:
            lowest = min(lowest, life.first)
    return found[::-1]


def _gap_s(life: Life, following: Life) -> float:
    """Computes the seconds that a run was down between two lives; 0 once it was
    done.
    """
    if life.done:
        return 0.0
    # If the wall clock was set back during the life, its last time counts.
    return max(
        0.0,
        following.began - life.began - life.seconds,
        following.began - (life.written or math.inf),
    )


def goodput_line(lives: Sequence[Life]) -> str:
    """Formats goodput, and where the rest of the time went; "" before any time has
    passed.

    "goodput 93 %: 3 % compile, 2 % lost to a restart at step 600"
    """
    found = account(lives)
    if found.goodput is None:
        return ""
    rest = [(s, name) for name, s in found.buckets.items() if name != STEP]
    parts = []
    for seconds, name in sorted(rest, reverse=True)[:_SPOKEN]:
        percent = _whole_percent(seconds / found.wall_s)
        if not percent.startswith("0 "):
            parts.append(f"{percent} {_spoken(name, lives)}")
    line = f"goodput {_whole_percent(found.goodput)}"
    if parts:
        line += f": {', '.join(parts)}"
    return line


_SPOKEN = 5  # buckets in a line


def _whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _spoken(name: str, lives: Sequence[Life]) -> str:
    if name == WAIT:
        return "waiting for other processes"
    if name != LOST:
        return name
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
    """Computes the share of a life's steps that were done again.

    Args:
      later_first: the lowest step from which a later life resumed.
    """
    if life.first is None:
        return 0.0
    done = life.step - life.first + life.undone
    kept = max(life.first, min(life.step, later_first))
    if not done:
        return 0.0
    return (life.step - kept + life.undone) / done
