"""Agreement of a run's processes by the key-value store of jax's coordination service.

These calls are no collectives: they need no device, and no device waits for them. All
processes make the same calls in the same order, from the main thread. A lone process
never waits. If a process is lost, the others fail as soon as the service hears of it.
The calls hardly limit how long they wait: the watchdog does.
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

# the service's client and address have no public names in jax 0.10 to 0.12
from jax._src import distributed

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    ConfigError,
    exit_code_of,
)
from jaxdist.telemetry import clock

FOREVER_S = 7 * 24 * 3_600  # the watchdog ends a wait that takes too long
_SHOWN_CHARS = 60  # characters of a value that differs
_LINE_CHARS = 500  # characters of an error
_CLOCK_TRIES = 5
# most calls of this module that the body of `raise_on_all` makes
_MOST_CALLS = 1_000

# Numbers of calls. All processes make the same calls in order, so the numbers agree.
_numbers = itertools.count()


class PeerFailed(RuntimeError):
    """Error that another process reported. Nothing is wrong with this process."""

    def __init__(self, message: str, exit_code: int = EXIT_PEER_LOST) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_lead() -> bool:
    """Tests whether this is the first process, which writes the run's files.

    Only the tokenizer's files are written by every process.
    """
    return jax.process_index() == 0


def service_address() -> str:
    """Looks up the address of the service, "host:port"; "" if a process is alone."""
    return distributed.global_state.coordinator_address or ""


def kv_client() -> Any:
    """Finds the client of the coordination service; None for a lone process.

    The client needs no device.
    """
    return distributed.global_state.client


def broadcast(value: Any) -> Any:
    """Sends the first process's JSON value to all processes, and returns it.

    It settles what may differ between processes, such as clocks and files.
    """
    client = kv_client()
    key = f"jaxdist/broadcast/{next(_numbers)}"
    if client is None:
        return value
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        return value
    with clock.timed(clock.WAIT):
        return json.loads(client.blocking_key_value_get(key, 1000 * FOREVER_S))


def barrier(timeout_s: int = FOREVER_S) -> None:
    """Waits until all processes have reached this call.

    Raises:
      jax.errors.JaxRuntimeError: a process was lost, or did not come in time.
    """
    _barrier(next(_numbers), timeout_s)


def _barrier(number: int, timeout_s: int = FOREVER_S) -> None:
    client = kv_client()
    if client is not None:
        with clock.timed(clock.WAIT):
            client.wait_at_barrier(f"jaxdist/barrier/{number}", 1000 * timeout_s)


def gather(value: Any, timeout_s: int = 1_800) -> dict[int, Any]:
    """Waits for all processes, and collects their JSON values on the first one.

    Returns:
      {process: value} on the first process, {} on the others.
    """
    return _exchange("gather", value, timeout_s, only_first=True)


def _exchange(
    name: str, value: Any, timeout_s: int = FOREVER_S, *, only_first: bool = False
) -> dict[int, Any]:
    """Waits for all processes, and collects {process: value}; None is no value."""
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
    """Offset of a process's wall clock from the first process's, and its error."""

    ahead_s: float
    # half a round trip: the true offset is at most so far from `ahead_s`
    within_s: float


def clock_offsets(timeout_s: int = 600) -> dict[int, ClockOffset]:
    """Measures the offsets of the processes' wall clocks.

    The first process asks the others one by one, and takes its own time before and
    after each answer. The quickest of several answers counts.

    Returns:
      {process: offset} of all other processes on the first one, {} on the others.

    Raises:
      jax.errors.JaxRuntimeError: a process was lost, or did not answer in time.
    """
    client = kv_client()
    prefix = f"jaxdist/clocks/{next(_numbers)}"
    timeout_ms = 1000 * timeout_s
    if client is None:
        return {}
    process = jax.process_index()
    if process:
        for attempt in range(_CLOCK_TRIES):
            key = f"{prefix}/{process}/{attempt}"
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
        answers = [ask(f"{prefix}/{other}/{n}") for n in range(_CLOCK_TRIES)]
        offsets[other] = min(answers, key=lambda offset: offset.within_s)
    return offsets


def first_error(error: str) -> str:
    """Finds, on all processes, the error of the first process that has one.

    Args:
      error: this process's error; "" = it has none.

    Returns:
      The error, with the process if it is not the first; "" if no process has one.
    """
    errors: dict[int, str] = _exchange("error", error or None)
    process = min(errors, default=0)
    if process:
        return f"process {process}: {errors[process]}"
    return errors.get(0, "")


def votes(vote: Any) -> list[Any]:
    """Collects, on all processes, the votes in the order of the processes.

    Args:
      vote: this process's JSON value; None = it does not vote.
    """
    return [value for _, value in sorted(_exchange("vote", vote).items())]


def all_equal(facts: Mapping[str, Any]) -> list[str]:
    """Lists, on all processes, the facts that differ; [] if all are equal."""
    texts = gather({key: str(value) for key, value in facts.items()})
    lines: list[str] = broadcast(disagreements(texts))
    if lines:
        # the first process hosts the service: it must not end before all have read it
        barrier()
    return lines


def disagreements(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Describes each process and fact that differs from most processes.

    Args:
      facts: {process: {name: value}}.
    """
    lines = []
    names = sorted({name for of_process in facts.values() for name in of_process})
    for name in names:
        values = {
            process: of_process.get(name, "(none)")
            for process, of_process in sorted(facts.items())
        }
        usual, count = Counter(values.values()).most_common(1)[0]
        lines += [
            f"process {process} differs from {count} of {len(facts)} processes: {name} is "
            f"{value[:_SHOWN_CHARS]}, theirs is {usual[:_SHOWN_CHARS]}; start all with the same"
            for process, value in values.items()
            if value != usual
        ]
    return lines


@contextlib.contextmanager
def raise_on_all() -> Iterator[None]:
    """Raises on all processes if the body raises on any.

    So no process waits for one that has left.

    Raises:
      Exception, SystemExit: on the processes whose body raised it.
      ConfigError, PeerFailed: on the others. The message names the first process that
        raised, and has the first line of its error.
    """
    global _numbers
    if kv_client() is None:
        yield
        return
    board = Board("raised")
    number = next(_numbers)
    local_error: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        local_error = error
    errors: dict[int, Any] = {}
    try:
        if local_error is not None:
            line = _first_line(local_error)
            board.put({"exit_code": exit_code_of(local_error), "line": line})
        _barrier(number)
        errors = board.values()
        if errors:
            # Bodies that raised have made fewer calls. A script that continues needs
            # the same numbers on all processes again.
            _numbers = itertools.count(number + _MOST_CALLS)
            barrier()  # see all_equal
    except jax.errors.JaxRuntimeError:  # a process was lost meanwhile
        if local_error is None and not errors:
            raise
    if local_error is not None:
        raise local_error
    if errors:
        first = min(errors)
        raise _peer_error(first, errors[first])


def _first_line(error: BaseException) -> str:
    """Formats the first line of an error.

    It has the type and place of the error, unless the config is wrong.
    """
    try:
        first = str(error).partition("\n")[0]
    except Exception:
        # a user's class may fail at it; the waiting processes must still be told
        first = "(its text cannot be had)"
    if exit_code_of(error) != EXIT_CONFIG:
        frames = traceback.extract_tb(error.__traceback__)
        first = f"{type(error).__name__}: {first}"
        if frames:
            first += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return first[:_LINE_CHARS]


def _peer_error(process: int, error: Mapping[str, Any]) -> Exception:
    text = f"process {process}: {error['line']}"
    code = error["exit_code"]
    if code == EXIT_CONFIG:
        return ConfigError(text)
    if code == EXIT_NO_CHECKPOINT:
        return PeerFailed(text, code)
    return PeerFailed(text)


class Board:
    """Board with one JSON value per process.

    A process may replace its value and read all values at any time, without waiting. A
    lone process must not call `put` or `values`.
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
        """Reads {process: value} of the processes that have one."""
        rows = self.client.key_value_dir_get(self._name)
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in rows}


class FailableBarrier:
    """Barriers for background threads; a process that fails ends the waits of all.

    Barriers come in rounds. Every process begins the same rounds. A lone process must
    not use this class.
    """

    def __init__(self, name: str) -> None:
        self._client = kv_client()
        self._name = f"jaxdist/{name}/{next(_numbers)}"
        self._round = 0

    def begin(self) -> None:
        """Starts a new round, and deletes the keys of the round before the last.

        That round is over on all processes.
        """
        self._round += 1
        if jax.process_index() == 0:
            self._client.key_value_delete(f"{self._name}/{self._round - 2}/")

    def fail(self, error: Exception) -> None:
        """Ends the waits of this round, on all processes, with the error."""
        process = jax.process_index()
        text = f"process {process}: {error}"[:500]
        self._client.key_value_set(
            f"{self._name}/{self._round}/failed/{process}", text, True
        )

    def wait(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes wait for the key.

        The first process waits for each of the others; they wait for the first.

        Args:
          key: name of the barrier within the round.
          timeout_ms: milliseconds to wait at most.

        Raises:
          RuntimeError: another process has failed.
          TimeoutError: a process did not come in time.
        """
        prefix = f"{self._name}/{self._round}/{key}"
        deadline = time.monotonic() + timeout_ms / 1000
        process = jax.process_index()
        if process:
            self._client.key_value_set(f"{prefix}/{process}", "", True)
            self._wait_for(f"{prefix}/all", deadline)
            return
        for other in range(1, jax.process_count()):
            self._wait_for(f"{prefix}/{other}", deadline)
        self._client.key_value_set(f"{prefix}/all", "", True)

    def _wait_for(self, key: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                # 500 ms, then look for a failed process
                self._client.blocking_key_value_get(key, 500)
                return
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            failed = self._client.key_value_dir_get(
                f"{self._name}/{self._round}/failed/"
            )
            if failed:
                raise RuntimeError(failed[0][1])
        raise TimeoutError(f"{key}: not all processes came")
