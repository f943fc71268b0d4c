"""Where a run's wall time went: `ledger.json` of a workdir, and how its lives add up.

A life is one start of the run. It books every moment to the bucket of the phase that it
is in, by one steady clock, so that buckets add up to the life; between two lives the
run was `down`, unless the first of them had `done` all that there was to do. Steps that
a later life did again were `lost`. Buckets are the phases of `resilience.watchdog`, and
what within a phase is another thing: joining the others, compiling, waiting for them, a
caller's hooks.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxdist.config import EXIT_CONFIG, EXIT_PREEMPTED, exit_code_of
from jaxdist.storage import atomic, run_format, untrusted

LEDGER_FILE = "ledger.json"
PUBLISH_S, BEAT_S = 1.0, 10.0  # between two writes of what has changed; of what has not
CLOSE_S = 5.0  # that the end of a run waits for the last write
DOWN, LOST, STEP, OTHER = "down", "lost", "step", "other"
JOIN, COMPILE, WAIT, HOOKS = "join", "compile", "wait", "hooks"  # within a phase

_IN_LOOP = ("data", STEP)  # phases that take turns while a run trains
_MOST_LIVES = 10_000
_MOST_COMPILED = 10_000  # compilations that a later one may turn out to contain


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


class Ledger:
    """Books the time of this life. `enter` costs a microsecond; a thread writes.

    What belongs to no phase of its own (`aside`, `compiled`, `move`) counts in the
    thread that made this.
    """

    goodput: float | None = None  # of all lives, when they were last written

    def __init__(
        self,
        *,
        age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        """Begins the life, in the phase `start`; nothing is written yet.

        Args:
          age_s: seconds ago that it began.
        """
        self._clock, self._wall_clock = clock, wall_clock
        began = wall_clock() - age_s
        self._life, self._entered = Life(began, since=began), clock() - age_s
        # of the life; ends the thread
        self._lock, self._over = threading.Lock(), threading.Event()
        self._writing = threading.Lock()
        self._before: list[Life] = []
        self._withdrawn = False
        self._file: Path | None = None
        self._thread = threading.get_ident()
        self._aside = ""  # the bucket, where it is not the phase's
        # (begin, end) of compilations, none in another
        self._compiled: list[tuple[float, float]] = []

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
                life.first, life.step = min(life.first, done), done

    @contextlib.contextmanager
    def aside(self, bucket: str) -> Iterator[None]:
        """Books what the body takes to a bucket of its own."""
        if threading.get_ident() != self._thread:
            yield
            return
        before = self._turn(bucket)
        try:
            yield
        finally:
            self._turn(before)

    def _turn(self, bucket: str) -> str:
        """Books the time so far; what follows goes to the bucket, or with "" to the
        phase's.
        """
        with self._lock:
            self._book()
            before, self._aside = self._aside, bucket
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
        now, known = self._clock(), self._compiled
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
        now, buckets, bucket = (
            self._clock(),
            self._life.buckets,
            self._aside or self._life.phase,
        )
        buckets[bucket] = buckets.get(bucket, 0.0) + now - self._entered
        self._entered = now

    def lives(self) -> list[Life]:
        """Returns the lives so far, this one as it is now."""
        with self._lock:
            self._book()
            self._life.written = self._wall_clock()
            return [*self._before, Life(**asdict(self._life))]

    @contextlib.contextmanager
    def published(self, folder: Path) -> Iterator[None]:
        """Writes the life to the workdir's ledger, beside those before, from a thread
        until the body ends.
        """
        self._file, self._before = folder / LEDGER_FILE, read_lives(folder)
        # what is there and cannot be read may be months: it is not overwritten
        if not self._before:
            with contextlib.suppress(OSError):
                os.replace(self._file, f"{self._file}.unreadable")
        thread = threading.Thread(target=self._keep, name="ledger", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            code = exit_code_of(error)
            # a class of others has any
            self._life.exit_code = code if type(code) is int and code > 0 else 1
            raise
        finally:
            self._life.ended = True
            self._over.set()
            thread.join(CLOSE_S)  # a disk that hangs holds nobody up

    def end_with(self, exit_code: int) -> None:
        """Says how the life ends, unless an exception ends it."""
        self._life.exit_code = exit_code

    def summary(self) -> str:
        """Returns `goodput_line` of all lives; "" where this one is not written, or
        counts for nothing.
        """
        return (
            "" if self._file is None or self._withdrawn else goodput_line(self.lives())
        )

    def runs_on(self, chips: int) -> None:
        """Says on how many chips, or machines of CPUs, the life runs."""
        self._life.chips = chips

    def withdraw(self) -> None:
        """Takes the life out of the ledger as it ends: the run had been finished, and
        nothing was done.
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
        document = run_format.marked(
            {"lives": [asdict(life) for life in lives[-_MOST_LIVES:]]}
        )
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk: the run goes on
                atomic.write_text(self._file, json.dumps(document) + "\n")


_of_process: list[Ledger] = []  # the last is that of the run that this process is in


@contextlib.contextmanager
def of_process(ledger: Ledger) -> Iterator[None]:
    """Makes it the ledger that `waiting` books to."""
    _of_process.append(ledger)
    try:
        yield
    finally:
        _of_process.remove(ledger)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Books the body as waiting for other processes, in the ledger of this process's
    run if it has one.
    """
    with _of_process[-1].aside(WAIT) if _of_process else contextlib.nullcontext():
        yield


def process_age_s() -> float:
    """Returns how long ago this process began, to a hundredth of a second; 0 where that
    is not known.
    """
    try:
        # field starttime
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf(
            "SC_CLK_TCK"
        )
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        return 0.0
    return max(0.0, age_s)


# --- reading --------------------------------------------------------------------------


def read_lives(folder: Path | str) -> list[Life]:
    """Returns the lives in a workdir's ledger, in order; [] where there is none that
    can be read.
    """
    try:
        file = Path(os.fspath(folder)) / LEDGER_FILE
        stored = run_format.unmarked(untrusted.read_json(file, dict), file)
        return [
            _life(entry)
            for entry in untrusted.of_kind(stored.get("lives"), list, "lives")
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _life(entry: dict) -> Life:
    """Returns a life as it was written; raises what `read_lives` catches if it is
    another thing.
    """
    life = Life(**{name: entry[name] for name in Life.__dataclass_fields__})
    numbers = (life.began, life.written, life.since, *life.buckets.values())
    if not all(map(is_time, numbers)):
        raise untrusted.Malformed("a time is no number")
    counts = (
        life.step,
        life.undone,
        life.exit_code,
        0 if life.first is None else life.first,
    )
    if not all(type(n) is int and 0 <= n < 2**53 for n in counts) or not isinstance(
        life.phase, str
    ):
        raise untrusted.Malformed("a step or an exit code is no number")
    if life.chips is not None and not (
        type(life.chips) is int and 0 < life.chips < 2**31
    ):
        raise untrusted.Malformed("chips are no number")
    return life


def is_time(value: object) -> bool:
    """Returns whether a value of a file is a time, or seconds."""
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]


@dataclass(frozen=True)
class Account:
    """All lives of a run together: {bucket: seconds}, which add up to `wall_s`.

    That is the time since the first start, without what passed between a run's end and
    its extension.
    """

    buckets: dict[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.buckets.values())

    @property
    def goodput(self) -> float | None:
        """The share of the wall time in steps that counted; None before any time has
        passed.
        """
        return self.buckets.get(STEP, 0.0) / self.wall_s if self.wall_s else None


def account(lives: Sequence[Life], now: float | None = None) -> Account:
    """Returns the account of a run's lives, to the end of the last one.

    Args:
      now: seconds since 1970, if the last life goes on: what it does since it was
        written is added.
    """
    lost = lost_s(lives)
    buckets: dict[str, float] = {
        DOWN: sum(map(_gap_s, lives, lives[1:])),
        LOST: sum(lost),
    }
    for life, wasted in zip(lives, lost, strict=True):
        for name, seconds in life.buckets.items():
            buckets[name] = buckets.get(name, 0.0) + seconds
        if wasted:
            buckets[STEP] -= wasted
    if lives and now is not None:
        last = lives[-1]
        buckets[last.phase] = buckets.get(last.phase, 0.0) + max(
            0.0, now - last.written
        )
    return Account(buckets)


def lost_s(lives: Sequence[Life]) -> list[float]:
    """Returns the seconds of each life's steps that were done again."""
    shares = map(_lost_share, lives, _later_firsts(lives))
    return [
        life.buckets.get(STEP, 0.0) * share
        for life, share in zip(lives, shares, strict=True)
    ]


def _later_firsts(lives: Sequence[Life]) -> list[float]:
    """Returns for each life the lowest step from which a later one went on; infinite if
    none did.
    """
    lowest, found = math.inf, []
    for life in reversed(lives):
        found.append(lowest)
        lowest = min(lowest, math.inf if life.first is None else life.first)
    return found[::-1]


def _gap_s(life: Life, following: Life) -> float:
    """Returns how long a run was down between two lives: not at all once it
    was done.
    """
    if life.done:
        return 0.0
    # A clock on the wall that was set back during the life: what it showed last counts.
    return max(
        0.0,
        following.began - life.began - life.seconds,
        following.began - (life.written or math.inf),
    )


def goodput_line(lives: Sequence[Life]) -> str:
    """Returns one line: goodput, and where the rest of the time went; "" before any
    time has passed.

    "goodput 93 %: 3 % compile, 2 % lost to a restart at step 600"
    """
    found = account(lives)
    if found.goodput is None:
        return ""
    rest = sorted(
        ((s, name) for name, s in found.buckets.items() if name != STEP), reverse=True
    )
    parts = [
        f"{_whole_percent(seconds / found.wall_s)} {_spoken(name, lives)}"
        for seconds, name in rest
    ]
    shown = ", ".join(part for part in parts[:_SPOKEN] if not part.startswith("0 "))
    return f"goodput {_whole_percent(found.goodput)}{f': {shown}' if shown else ''}"


_SPOKEN = 5  # buckets in a line


def _whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _spoken(name: str, lives: Sequence[Life]) -> str:
    if name == WAIT:
        return "waiting for other processes"
    if name != LOST:
        return name
    pairs = zip(lives, _later_firsts(lives), strict=True)
    back = [
        first for life, first in pairs if _lost_share(life, first) and life.undone == 0
    ]
    undone = sum(life.undone > 0 for life in lives)
    if len(back) == 1 and not undone:
        return f"lost to a restart at step {back[0]}"
    causes = [f"{len(back)} restarts"] * bool(back) + ["rollbacks"] * bool(undone)
    return f"lost to {' and '.join(causes)}"


def _lost_share(life: Life, later_first: float) -> float:
    """Returns the share of a life's steps that were done again.

    Args:
      later_first: the lowest step from which a later life went on.
    """
    if life.first is None:
        return 0.0
    done = life.step - life.first + life.undone
    kept = max(life.first, min(life.step, later_first))
    return (life.step - kept + life.undone) / done if done else 0.0
