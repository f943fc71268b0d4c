"""The agent of a node: starts a run's processes, and restarts all of them when one is
lost.

The others cannot continue without the lost one: they wait in a collective for ever, and
cannot save. So they are killed at once, and all restart from the newest good
checkpoint, on the slots that are left. A group that could be larger is asked to save
and stop, and restarts larger. With several agents the scheduler restarts; an agent then
only ends its own processes.
"""

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
)
from jaxdist.distributed.cluster import ClusterInfo
from jaxdist.distributed.local_devices import device_environment, free_port
from jaxdist.distributed.stop_signals import stop_signals
from jaxdist.operations.launch.growth import GrowthTimer
from jaxdist.operations.launch.run_progress import ProgressReader, run_folder
from jaxdist.operations.launch.worker_group import WorkerGroup
from jaxdist.storage import untrusted
from jaxdist.trainer import elastic

_FINAL = {EXIT_NO_CHECKPOINT, EXIT_CONFIG}  # a new start would end in the same way
# Exit codes of processes that may have ended, and that did end, because another was
# lost.
_NOT_AT_FAULT = {-signal.SIGABRT: 1, EXIT_PEER_LOST: 2}
# after the end of such a process, for the one at fault to say why it ends
_CAUSE_S = 5.0
_UNSTARTED = -signal.SIGTERM  # asked to stop before it could listen
_BACKOFF_S = 0.5
_MOST_BACKOFF_S = 30.0
_WAIT_S = 600.0  # for enough capacity
_MOST_BYTES = 4096  # of a capacity file


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """The options of `launch`."""

    command: Sequence[str]
    processes: int  # of this agent
    devices_per_process: int | None = None  # CPU: emulated; GPU: of the visible ones
    min_processes: int | None = None  # None: all or none
    max_restarts: int = 3  # in a row without progress
    capacity_file: Path | None = None
    # that a group runs before it stops to grow; 0: it does not
    grow_minutes: float = 10.0
    grace_s: float = 120.0  # between a signal and the end of all that still runs
    preflight: bool = False  # whether to measure devices first


class Supervisor:
    """One `launch`, until its command has ended for good."""

    def __init__(
        self,
        options: SupervisorOptions,
        agents: ClusterInfo,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.options = options
        self.agents = agents
        self.say = say
        self._least = options.min_processes or options.processes
        self.progress = ProgressReader(run_folder(options.command))
        # those not given up, e.g. for a broken GPU
        self.slots = list(range(options.processes))
        # sizes of which the command itself said that they cannot be
        self._refused: set[int] = set()
        # signals so far; SIGINTs among them: the second ends all
        self.stop_requests = 0
        self._interrupts = 0
        self._failures: list[str] = []  # since the last progress
        self._last_slot: int | None = None  # which was lost last
        may_grow = options.capacity_file is not None and agents.number == 1
        self._growth = GrowthTimer(60 * options.grow_minutes if may_grow else 0.0)
        # the size for which the group that runs was asked to stop; 0: it was not
        self._growing_to = 0
        # the size before a growth that has made no progress yet; 0: there is none
        self._grown_from = 0
        # size of the next start, where a larger one has just failed
        self._most: int | None = None

    def run(self) -> int:
        """Runs the command until it ends for good; returns the exit code of the run."""
        with self._listening():
            while (size := self._await_size()) is not None:
                began = time.monotonic()
                before = self.progress.newest()
                starts = self.progress.starts()
                workers = self._start(size)
                try:
                    self._attend(workers, before)
                    early = workers.codes()
                finally:
                    workers.kill()
                if self.progress.folder is None:
                    # no workdir can tell: ten minutes count as progress
                    moved = time.monotonic() - began > 600
                    stepped = True
                else:
                    moved = self.progress.newest() > before
                    stepped = moved or self.progress.starts() > starts
                code = self._verdict(early, size, stepped)
                if moved and self._grown_from:
                    self._grown_from = 0
                    self._growth.succeeded()
                if code is None:
                    code = self._after_loss(workers, early, moved)
                elif (
                    code == EXIT_PREEMPTED
                    and self._growing_to
                    and not self.stop_requests
                ):
                    self._after_growth(size)
                    continue
                if code == EXIT_CONFIG and self._fewer_may_do(size):
                    continue
                if code is not None:
                    return code
            return EXIT_PREEMPTED if self.stop_requests else EXIT_PEER_LOST

    # --- one start --------------------------------------------------------------------

    def _start(self, size: int) -> WorkerGroup:
        """Starts the processes of the first `size` slots, with a port that no start had
        before.
        """
        options = self.options
        total = size * self.agents.number
        first = size * self.agents.index
        shared = {**os.environ, "PYTHONUNBUFFERED": "1"}
        shared["JAXDIST_NUM_PROCESSES"] = str(total)
        if total > 1:
            shared["JAXDIST_COORDINATOR"] = (
                f"{self.agents.host}:{self.agents.port or free_port()}"
            )
        if options.min_processes is not None:
            full = options.processes if self.agents.number == 1 else 0
            shared[elastic.FULL_PROCESSES] = str(full)
        environments = []
        for rank, slot in enumerate(self.slots[:size], first):
            environment = dict(shared)
            if total > 1:
                environment["JAXDIST_PROCESS_ID"] = str(rank)
            environment |= device_environment(
                os.environ, slot, options.processes, options.devices_per_process
            )
            environments.append(environment)
        text = f"starting {size} processes"
        if total > size:
            text += f" of {total}"
        self.say(text)
        self._growing_to = 0
        self._most = None
        if size <= self._grown_from:
            self._grown_from = 0
        self._growth.begin()
        return WorkerGroup(
            options.command, environments, first=first, wakeup=self._wakeup
        )

    def _attend(self, workers: WorkerGroup, before: int) -> None:
        """Waits until the processes have ended, have lost a process, or have had their
        time to stop.

        Args:
          before: the newest step when they started.
        """
        size = len(workers.processes)
        fine = {0, EXIT_PREEMPTED}
        deadline = math.inf
        until = math.inf
        while time.monotonic() <= deadline and self._interrupts <= 1:
            codes = workers.codes()
            # who asks from outside gives a time of his own
            if self.stop_requests and self._growing_to:
                self._growing_to = 0
                deadline = math.inf
            is_stopping = self.stop_requests or EXIT_PREEMPTED in codes.values()
            if deadline == math.inf and (
                is_stopping or (not codes and self._should_grow(size, before))
            ):
                deadline = time.monotonic() + self.options.grace_s
                fine.add(_UNSTARTED)
                workers.signal(signal.SIGTERM)
            bad = set(codes.values()) - fine
            if bad and until == math.inf:
                until = time.monotonic() + _CAUSE_S
            at_fault = bad - _NOT_AT_FAULT.keys() or (
                bad and EXIT_PREEMPTED in codes.values()
            )
            if len(codes) == size or at_fault or time.monotonic() >= until:
                return
            workers.listen(0.5 if deadline == math.inf else 0.05)

    def _verdict(
        self, early: Mapping[int, int], size: int, stepped: bool
    ) -> int | None:
        """Decides the exit code of the run, or None if it has lost a process.

        Args:
          early: codes of those of the `size` processes that ended by themselves.
          stepped: whether there may be steps since this start.
        """
        endings = set(early.values())
        final = endings & _FINAL
        if final:
            return min(final)
        if endings == {0} and len(early) == size:
            return 0
        # One that ends with 75 says that all is saved; those that it leaves may hear of
        # its end first.
        preempted = EXIT_PREEMPTED in endings
        left = endings & _NOT_AT_FAULT.keys()
        orderly = endings - left <= {0, EXIT_PREEMPTED, _UNSTARTED}
        saved = orderly and (preempted if left else len(early) == size)
        if (preempted or self.stop_requests) and (saved or not stepped):
            return EXIT_PREEMPTED
        if not self.stop_requests:
            return None
        number = lost_process(early)
        why = "not all ended in time"
        if number is not None:
            why = f"process {number} {describe_exit(early[number])}"
        self.say(f"asked to stop, but {why}: what was not saved before is lost")
        return EXIT_PEER_LOST

    # --- after a loss -----------------------------------------------------------------

    def _after_loss(
        self, workers: WorkerGroup, early: Mapping[int, int], moved: bool
    ) -> int | None:
        """Records a lost process; returns the exit code of the run if it ends here,
        else waits a little.
        """
        number = lost_process(early)
        codes = workers.codes()  # those that were killed, too
        if number is not None:
            why = f"process {number} {describe_exit(early[number])}"
        elif self._growing_to:
            number = min(codes.keys() - early.keys())
            why = f"process {number} did not stop in time to grow"
        else:  # 75 from one, and no end of the others
            self.say("not all processes stopped in time")
            return EXIT_PEER_LOST
        step = self.progress.newest()
        self.say(f"lost {why} at step {step}; the others are stopped")
        self.progress.event(
            "peer_lost", step, process=number, exit_code=codes[number], why=why
        )
        if self.agents.number > 1:
            return EXIT_PEER_LOST
        # the agent's own doing: it does not count
        if self._grown_from or self._growing_to:
            if self._grown_from:
                self._undo_growth()
            else:
                self._after_growth(len(codes), saved=False)
            return None
        self._failures = [why] if moved else [*self._failures, why]
        failures = len(self._failures)
        lost = self.slots[number]
        if moved:
            # what failed then may be well by now
            self.slots = list(range(self.options.processes))
        self._give_up_slot(lost)
        if failures > self.options.max_restarts:
            self.say(self._last_report(workers, number, step))
            return early[number] if early[number] > 0 else EXIT_PEER_LOST
        delay = 0.0 if moved else min(_BACKOFF_S * 2 ** (failures - 1), _MOST_BACKOFF_S)
        self.say(
            f"restart {failures} of {self.options.max_restarts} without progress, in {delay:g} s"
        )
        self._sleep(delay)
        return None

    def _give_up_slot(self, slot: int) -> None:
        """Leaves out a slot whose process was lost twice in a row, where fewer will do,
        until progress.
        """
        twice = slot == self._last_slot
        self._last_slot = None if twice else slot
        if (
            twice
            and self.options.capacity_file is None
            and len(self.slots) > self._least
        ):
            self.slots.remove(slot)
            self.say(
                f"the process of slot {slot} was lost twice in a row: going on without it"
            )

    def _last_report(self, workers: WorkerGroup, number: int, step: int) -> str:
        failures = "; ".join(
            f"{count} x {why}" for why, count in Counter(self._failures).items()
        )
        lines = workers.last_lines[number] or ["(nothing)"]
        output = "\n".join(f"    {line}" for line in lines)
        return (
            f"stopping: {len(self._failures)} failures without progress beyond step {step}, "
            f"--max-restarts {self.options.max_restarts}: {failures}. Process {number} said last:\n{output}"
        )

    # --- growth -----------------------------------------------------------------------

    def _should_grow(self, size: int, before: int) -> bool:
        """Decides whether the group that runs stops because a larger one can run; says
        so.
        """

        def larger() -> int:
            # gone, or being written: no room that is known of
            with contextlib.suppress(OSError, ValueError):
                found = self._largest_legal(self._read_capacity())
                if found > size:
                    return found
            return 0

        found = self._growth.due(larger)
        # Without progress the start would have been for nothing; were all starts, the
        # run would never advance.
        if not found or self.progress.newest() <= before:
            return False
        self.say(
            f"{found} processes can run: the {size} that run are asked to save, and start again as {found}"
        )
        self._growing_to = found
        return True

    def _after_growth(self, size: int, *, saved: bool = True) -> None:
        """Records that a group of that size has stopped, to grow; without an event
        where it has not saved.
        """
        if saved:
            step = self.progress.newest()
            self.progress.event(
                "grow", step, processes_before=size, processes=self._growing_to
            )
        self._grown_from = size
        self._failures = []

    def _undo_growth(self) -> None:
        """Has the size that ran before start next: a larger one was lost before it made
        progress.
        """
        self._growth.failed()
        self._most = self._grown_from
        self._grown_from = 0
        wait = f"the next growth is tried after {self._growth.wait_s / 60:g} minutes"
        self.say(
            f"no progress since the growth: back to {self._most} processes; {wait}"
        )

    # --- how many ---------------------------------------------------------------------

    def _await_size(self) -> int | None:
        """Waits for enough capacity; returns the number of processes to start. None if
        there are too few, or a signal came first.
        """
        until = time.monotonic() + _WAIT_S
        reported = None
        while not self.stop_requests:
            capacity = self._capacity()
            size = self._largest_legal(capacity)
            if size >= (1 if self.agents.number > 1 else self._least):
                if size < capacity:
                    why = "no legal mesh has them"
                    if capacity in self._refused:
                        why = "ended with 78"
                    self.say(
                        f"{capacity} processes could run, but {why}; taking {size}"
                    )
                return size
            if time.monotonic() > until:
                self.say(f"stopping: no {self._least} processes for {_WAIT_S:.0f} s")
                return None
            if reported != capacity:
                reported = capacity
                could = f"{capacity} processes could run, {size} on a legal mesh"
                self.say(f"waiting: {could}, {self._least} are needed")
            self._sleep(1.0)
        return None

    def _largest_legal(self, capacity: int) -> int:
        for size in range(capacity, 0, -1):
            if size not in self._refused and self._is_legal(size):
                return size
        return 0

    def _capacity(self) -> int:
        slots = len(self.slots)
        most = self._most or slots
        try:
            try:
                return min(self._read_capacity(), most)
            except ValueError:  # a moment later one that was being written is whole
                self._sleep(1.0)
                return min(self._read_capacity(), most)
        except (OSError, ValueError) as error:
            file = self.options.capacity_file
            self.say(
                f"--capacity-file {file}: no whole number there ({error}); taking {min(slots, most)}"
            )
            return min(slots, most)

    def _read_capacity(self) -> int:
        """Counts the processes that can run now.

        Raises:
          OSError, ValueError: the capacity file has no whole number.
        """
        file = self.options.capacity_file
        slots = len(self.slots)
        if file is None:
            return slots
        capacity = int(untrusted.read_bytes(file, max_bytes=_MOST_BYTES))
        return max(0, min(capacity, slots))

    def _is_legal(self, size: int) -> bool:
        """Checks whether the run's batch and mesh can be laid out on `size` processes.

        True if unknown: before the first start, or for a command that is not ours.
        """
        processes = self.options.processes
        config = self.progress.read_json("config.json")
        if size == processes or self.agents.number > 1 or config is None:
            return True
        each = self.options.devices_per_process or self.progress.devices_per_process()
        if each is None:
            return True
        fitted = elastic.fit_config(
            config, devices=size * each, full_devices=processes * each
        )
        return fitted is not None

    def _fewer_may_do(self, size: int) -> bool:
        """Records a size that ended with 78; returns True if a smaller one is tried.

        A smaller one is tried after a growth, and after a reduced start before the
        first step, when no file tells yet which sizes are legal.
        """
        self._refused.add(size)
        if self._grown_from:
            self._undo_growth()
            return True
        return (
            self._least < size < self.options.processes and self.progress.newest() == 0
        )

    # --- signals ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Handles the signals that ask to stop; they, and the end of a child, wake
        `listen`.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = {
            number: signal.signal(number, self._ask)
            for number in stop_signals(os.environ)
        }
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._wakeup = reader
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _ask(self, number: int, _: Any) -> None:
        self.stop_requests += 1
        self._interrupts += number == signal.SIGINT

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.stop_requests and time.monotonic() < until:
            time.sleep(min(0.1, seconds))


def lost_process(codes: Mapping[int, int]) -> int | None:
    """Finds the process that was lost: if possible one that did not end because of
    another.
    """
    lost = {n: code for n, code in codes.items() if code not in (0, EXIT_PREEMPTED)}
    return min(lost, key=lambda n: (_NOT_AT_FAULT.get(lost[n], 0), n), default=None)


def describe_exit(code: int) -> str:
    """Describes an exit code: `killed by SIGKILL`, `ended with exit code 1`."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"
