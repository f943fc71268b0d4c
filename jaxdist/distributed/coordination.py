"""How the processes of a run agree, through the key-value store of jax's coordination
service.

Nothing here is a collective: no device is needed, and none waits. All processes make
the same calls of `broadcast`, `gather`, `votes`, `all_equal`, `first_error`,
`raise_on_all` and `barrier` in the same order, from the main thread. A lone process never waits. If a
process is lost, the others fail as soon as the service hears of it; what takes too long
is for the watchdog to say.
"""

import contextlib
import itertools
import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

# the service's client has no public name in jax 0.10 to 0.12
from jax._src import distributed

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    ConfigError,
    exit_code_of,
)
from jaxdist.telemetry import clock

_FOREVER_S = 7 * 24 * 3_600  # the watchdog knows what is too long
_SHOWN_CHARS = 60  # of a value that differs
_LINE_CHARS = 500  # of an error
_CLOCK_TRIES = 5
_MOST_CALLS = 1_000  # of this module, in the body of `raise_on_all`

# the same on all processes: they make the same calls in order
_numbers = itertools.count()


class PeerFailed(RuntimeError):
    """Another process has failed, and says why. Nothing is wrong with this one."""

    def __init__(self, message: str, exit_code: int = EXIT_PEER_LOST) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def kv_client() -> Any:
    """Finds the client of the coordination service; None for a lone process. It needs
    no device.
    """
    return distributed.global_state.client


def broadcast(value: Any) -> Any:
    """Returns the first process's JSON value on all: its clock and files may differ
    from the others'.
    """
    client = kv_client()
    key = f"jaxdist/broadcast/{next(_numbers)}"
    if client is None:
        return value
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        return value
    with clock.timed(clock.WAIT):
        return json.loads(client.blocking_key_value_get(key, 1000 * _FOREVER_S))


def barrier(timeout_s: int = _FOREVER_S) -> None:
    """Waits until all processes have come here.

    Raises:
      jax.errors.JaxRuntimeError: one was lost, or did not come in time.
    """
    _barrier(next(_numbers), timeout_s)


def _barrier(number: int, timeout_s: int = _FOREVER_S) -> None:
    if client := kv_client():
        with clock.timed(clock.WAIT):
            client.wait_at_barrier(f"jaxdist/barrier/{number}", 1000 * timeout_s)


def gather(value: Any, timeout_s: int = 1_800) -> dict[int, Any]:
    """Collects {process: its JSON value} on the first process, {} on the others, once
    all have given one.
    """
    return _exchange("gather", value, timeout_s, only_first=True)


def _exchange(
    name: str, value: Any, timeout_s: int = _FOREVER_S, *, only_first: bool = False
) -> dict[int, Any]:
    """Collects the values of all processes that have one; None is no value."""
    board = Board(name)
    if board.client is None:
        return {} if value is None else {0: value}
    if value is not None:
        board.put(value)
    barrier(timeout_s)
    if only_first and jax.process_index():
        return {}
    return board.values()


class ClockOffset(NamedTuple):
    """How far a process's wall clock is ahead of the first process's, and how exactly
    that is known.
    """

    ahead_s: float
    # half a round trip: the true offset is at most so far from `ahead_s`
    within_s: float


def clock_offsets(timeout_s: int = 600) -> dict[int, ClockOffset]:
    """Measures {process: its clock's offset} of all but the first, for the first
    process; {} on the others.

    The first asks the others one by one and notes its own time before and after each
    answer; of several answers the quickest counts.

    Raises:
      jax.errors.JaxRuntimeError: a process was lost, or did not answer in time.
    """
    client = kv_client()
    place = f"jaxdist/clocks/{next(_numbers)}"
    timeout_ms = 1000 * timeout_s
    if client is None:
        return {}
    process = jax.process_index()
    if process:
        for turn in range(_CLOCK_TRIES):
            key = f"{place}/{process}/{turn}"
            client.blocking_key_value_get(f"{key}/asked", timeout_ms)
            client.key_value_set(f"{key}/answer", repr(time.time()))
        return {}

    def ask(key: str) -> ClockOffset:
        began = time.time()
        client.key_value_set(f"{key}/asked", "")
        answer = float(client.blocking_key_value_get(f"{key}/answer", timeout_ms))
        ended = time.time()
        return ClockOffset(answer - (began + ended) / 2, (ended - began) / 2)

    offsets = {}
    for other in range(1, jax.process_count()):
        answers = [ask(f"{place}/{other}/{turn}") for turn in range(_CLOCK_TRIES)]
        offsets[other] = min(answers, key=lambda offset: offset.within_s)
    return offsets


def first_error(error: str) -> str:
    """Tells all processes the error of the first that has one; "" if none has."""
    errors = _exchange("error", error or None)
    process = min(errors, default=0)
    if process:
        return f"process {process}: {errors[process]}"
    return errors.get(0, "")


def votes(vote: Any) -> list[Any]:
    """Tells all processes the JSON values of those that have one.

    Args:
      vote: this process's; None: it has none.
    """
    return [value for _, value in sorted(_exchange("vote", vote).items())]


def all_equal(facts: Mapping[str, Any]) -> list[str]:
    """Lists, on all processes, each fact in which one differs; [] if all say the
    same.
    """
    texts = gather({key: str(value) for key, value in facts.items()})
    lines = broadcast(disagreements(texts))
    if lines:
        # the first process, which is the service, must not end before all have heard
        barrier()
    return lines


def disagreements(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Lists each process and fact that differs from what most processes say."""
    lines = []
    for key in sorted({key for each in facts.values() for key in each}):
        values = {
            process: each.get(key, "(none)") for process, each in sorted(facts.items())
        }
        usual, count = Counter(values.values()).most_common(1)[0]
        lines += [
            f"process {process} differs from {count} of {len(facts)} processes: {key} is "
            f"{value[:_SHOWN_CHARS]}, theirs is {usual[:_SHOWN_CHARS]}; start all with the same"
            for process, value in values.items()
            if value != usual
        ]
    return lines


@contextlib.contextmanager
def raise_on_all() -> Iterator[None]:
    """Raises on all processes where the body raises on any, so that none waits for one
    that has gone.

    Raises:
      Exception, SystemExit: where the body raised it.
      ConfigError, PeerFailed: elsewhere; they name the first such process and the first
      line of its error.
    """
    global _numbers
    if kv_client() is None:
        yield
        return
    board = Board("raised")
    number = next(_numbers)
    own: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        own = error
    errors: dict[int, Any] = {}
    try:
        if own is not None:
            board.put({"exit_code": exit_code_of(own), "line": _line(own)})
        _barrier(number)
        if errors := board.values():
            # Bodies that raised have made fewer calls; a script that goes on needs the
            # same numbers again.
            _numbers = itertools.count(number + _MOST_CALLS)
            barrier()  # see all_equal
    except jax.errors.JaxRuntimeError:  # a process was lost meanwhile
        if own is None and not errors:
            raise
    if own is not None:
        raise own
    if errors:
        raise _of_peer(min(errors), errors[min(errors)])


def _line(error: BaseException) -> str:
    """Takes the first line of an error, with its type and place, unless it is the
    user's.
    """
    try:
        first = str(error).partition("\n")[0]
    except Exception:
        # of a user's class; those who wait are to hear of it all the same
        first = "(its text cannot be had)"
    if exit_code_of(error) != EXIT_CONFIG:
        frames = traceback.extract_tb(error.__traceback__)
        first = f"{type(error).__name__}: {first}"
        if frames:
            first += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return first[:_LINE_CHARS]


def _of_peer(process: int, error: Mapping[str, Any]) -> Exception:
    text = f"process {process}: {error['line']}"
    code = error["exit_code"]
    if code == EXIT_CONFIG:
        return ConfigError(text)
    if code == EXIT_NO_CHECKPOINT:
        return PeerFailed(text, code)
    return PeerFailed(text)


class Board:
    """One JSON value a process, to replace and to read at any time; nobody waits. Not
    for a lone process.
    """

    def __init__(self, name: str) -> None:
        self.client = kv_client()
        self._name = f"jaxdist/{name}/{next(_numbers)}/"

    def put(self, value: Any) -> None:
        """Replaces this process's value."""
        self.client.key_value_set(
            f"{self._name}{jax.process_index()}", json.dumps(value), True
        )

    def values(self) -> dict[int, Any]:
        """Collects {process: value} of those that have one."""
        rows = self.client.key_value_dir_get(self._name)
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in rows}


class FailableBarrier:
    """Barriers of a thread in the background, in rounds; a process that fails ends the
    wait of all.

    Every process makes the same ones. Not for a lone process.
    """

    def __init__(self, name: str) -> None:
        self._client = kv_client()
        self._name = f"jaxdist/{name}/{next(_numbers)}"
        self._round = 0

    def begin(self) -> None:
        """Starts a new round; the one before the last is over for all."""
        self._round += 1
        if jax.process_index() == 0:
            self._client.key_value_delete(f"{self._name}/{self._round - 2}/")

    def fail(self, error: Exception) -> None:
        """Ends the waits of this round with the error, in all processes."""
        process = jax.process_index()
        text = f"process {process}: {error}"[:500]
        self._client.key_value_set(
            f"{self._name}/{self._round}/failed/{process}", text, True
        )

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes wait for the key: the first for each, the others
        for it.

        Raises:
          RuntimeError: another process has failed. TimeoutError: one did not come in
            time.
        """
        place = f"{self._name}/{self._round}/{key}"
        deadline = time.monotonic() + timeout_ms / 1000
        if process := jax.process_index():
            self._client.key_value_set(f"{place}/{process}", "", True)
            self._wait_for(f"{place}/all", deadline)
            return
        for number in range(1, jax.process_count()):
            self._wait_for(f"{place}/{number}", deadline)
        self._client.key_value_set(f"{place}/all", "", True)

    def _wait_for(self, key: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                # ms; then a look whether one has failed
                self._client.blocking_key_value_get(key, 500)
                return
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if failed := self._client.key_value_dir_get(
                f"{self._name}/{self._round}/failed/"
            ):
                raise RuntimeError(failed[0][1])
        raise TimeoutError(f"{key}: not all processes came")
