"""Agent of a node: it starts a run's processes, and restarts all if one is lost.

The other processes cannot continue without the lost one: they wait in a collective for
ever, and cannot save. So they are killed at once. All restart from the newest good
checkpoint, on the slots that are left. If a larger group can run, the agent asks the
processes to save and stop, and restarts more. With several agents, the scheduler
restarts the run; an agent then only ends its own processes.
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

from jaxdist.config import EXIT_CONFIG, EXIT_PEER_LOST, EXIT_PREEMPTED
from jaxdist.distributed.cluster import ClusterInfo
from jaxdist.distributed.local_devices import device_environment, free_port
from jaxdist.distributed.stop_signals import last_handler, stop_signals
from jaxdist.operations.launch.endings import (
    NOT_AT_FAULT,
    UNSTARTED,
    backoff_s,
    describe_exit,
    lost_process,
    verdict,
)
from jaxdist.operations.launch.growth import GrowthTimer, read_capacity
from jaxdist.operations.launch.run_progress import ProgressReader, run_folder
from jaxdist.operations.launch.worker_group import WorkerGroup
from jaxdist.trainer import elastic

# seconds after the end of such a process in which the lost one reports its error
_CAUSE_S = 5.0
_WAIT_S = 600.0  # most seconds to wait for capacity


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """Options of `launch`."""

    command: Sequence[str]
    processes: int  # number of processes of this agent
    # number of emulated CPU devices or of visible GPUs; None: see `device_environment`
    devices_per_process: int | None = None
    min_processes: int | None = None  # fewest processes; None: all are needed
    max_restarts: int = 3  # most restarts in a row without progress
    capacity_file: Path | None = None  # file with the number of processes that can run
    grow_minutes: float = 10.0  # minutes that a group runs before it grows; 0: never
    grace_s: float = 120.0  # seconds between a signal to stop and the kill
    preflight: bool = False  # measure devices first


class Supervisor:
    """Supervisor of one `launch`, until its command has ended for good."""

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
        # slots in use; one may be given up, e.g. for a broken GPU
        self.slots = list(range(options.processes))
        # sizes that the command itself refused
        self._refused: set[int] = set()
        self.stop_requests = 0  # number of signals that asked to stop
        self._interrupts = 0  # SIGINTs among them; the second one ends all at once
        self._failures: list[str] = []  # since the last progress
        self._last_slot: int | None = None  # slot of the last lost process
        may_grow = options.capacity_file is not None and agents.number == 1
        self._growth = GrowthTimer(60 * options.grow_minutes if may_grow else 0.0)
        # size for which the running group was asked to stop; 0: it was not
        self._growing_to = 0
        # size before a growth that has made no progress yet; 0: there is none
        self._grown_from = 0
        # largest size of the next start, after a larger one failed; None: all slots
        self._max_size: int | None = None

    def run(self, *, is_last: bool = True) -> int:
        """Runs the command until it ends for good; returns the exit code of the run.

        Args:
          is_last: this process ends next, so later signals must not change its code.
        """
        with self._listening(is_last):
            while (size := self._await_size()) is not None:
                code = self._run_once(size)
                if code is not None:
                    return code
            return EXIT_PREEMPTED if self.stop_requests else EXIT_PEER_LOST

    # --- one start --------------------------------------------------------------------

    def _run_once(self, size: int) -> int | None:
        """Starts the processes and waits for their end.

        Returns:
          The exit code of the run; None = start again.
        """
        began = time.monotonic()
        newest_before = self.progress.newest()
        starts_before = self.progress.starts()
        workers = self._start(size)
        try:
            self._attend(workers, newest_before)
            early = workers.codes()
        finally:
            workers.kill()
        if self.progress.folder is None:
            # without a workdir, ten minutes count as progress
            progressed = time.monotonic() - began > 600
            may_have_stepped = True
        else:
            progressed = self.progress.newest() > newest_before
            may_have_stepped = progressed or self.progress.starts() > starts_before
        code = self._verdict(early, size, may_have_stepped)
        if progressed and self._grown_from:
            self._grown_from = 0
            self._growth.succeeded()
        if code is None:
            code = self._after_loss(workers, early, progressed)
        elif code == EXIT_PREEMPTED and self._growing_to and not self.stop_requests:
            self._after_growth(size)
            return None
        if code == EXIT_CONFIG and self._fewer_may_do(size):
            return None
        return code

    def _start(self, size: int) -> WorkerGroup:
        """Starts the processes of the first `size` slots, with a new port."""
        options = self.options
        total = size * self.agents.number
        first = size * self.agents.index
        shared = {**os.environ, "PYTHONUNBUFFERED": "1"}
        shared["JAXDIST_NUM_PROCESSES"] = str(total)
        if total > 1:
            shared["JAXDIST_COORDINATOR"] = (
                f"{self.agents.host}:{self.agents.port or free_port()}"
            )
        full = self._full_processes()
        if full is not None:
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
        self._max_size = None
        if size <= self._grown_from:
            self._grown_from = 0
        self._growth.begin()
        return WorkerGroup(
            options.command, environments, first=first, wakeup=self._wakeup
        )

    def _full_processes(self) -> int | None:
        """Counts the processes of a full run.

        Returns:
          The number; 0 = that of the first start; None = the run is not elastic.
        """
        if self.options.min_processes is None:
            return None
        return self.options.processes if self.agents.number == 1 else 0

    def _must_end(self) -> bool:
        """Tests whether the processes are killed now, for a reason outside of them."""
        return False

    def _attend(self, workers: WorkerGroup, newest_before: int) -> None:
        """Waits for the end of the processes.

        It returns when all have ended, when one is lost, or when their time to stop is
        over.

        Args:
          workers: the processes.
          newest_before: the newest step when they started.
        """
        size = len(workers.processes)
        good_codes = {0, EXIT_PREEMPTED}
        stop_deadline = math.inf
        cause_deadline = math.inf
        while time.monotonic() <= stop_deadline and self._interrupts <= 1:
            if self._must_end():
                return
            codes = workers.codes()
            if self.stop_requests and self._growing_to:
                # A signal replaces the agent's own request to stop, and its deadline.
                self._growing_to = 0
                stop_deadline = math.inf
            is_stopping = self.stop_requests or EXIT_PREEMPTED in codes.values()
            if stop_deadline == math.inf and (
                is_stopping or (not codes and self._should_grow(size, newest_before))
            ):
                stop_deadline = time.monotonic() + self.options.grace_s
                good_codes.add(UNSTARTED)
                workers.signal(signal.SIGTERM)
            bad_codes = set(codes.values()) - good_codes
            if bad_codes and cause_deadline == math.inf:
                cause_deadline = time.monotonic() + _CAUSE_S
            is_cause_known = bad_codes - NOT_AT_FAULT.keys() or (
                bad_codes and EXIT_PREEMPTED in codes.values()
            )
            if len(codes) == size or is_cause_known:
                return
            if time.monotonic() >= cause_deadline:
                return
            workers.listen(0.5 if stop_deadline == math.inf else 0.05)

    def _verdict(
        self, early: Mapping[int, int], size: int, may_have_stepped: bool
    ) -> int | None:
        """Decides the exit code of the run, or None if it has lost a process.

        Args:
          early: exit codes of the processes that ended by themselves.
          size: number of all processes.
          may_have_stepped: this start may have finished steps.
        """
        code = verdict(
            early,
            size,
            is_asked=bool(self.stop_requests),
            may_have_stepped=may_have_stepped,
        )
        if code is not None or not self.stop_requests:
            return code
        number = lost_process(early)
        cause = "not all ended in time"
        if number is not None:
            cause = f"process {number} {describe_exit(early[number])}"
        self.say(f"asked to stop, but {cause}: work since the last save is lost")
        return EXIT_PEER_LOST

    # --- after a loss -----------------------------------------------------------------

    def _after_loss(
        self, workers: WorkerGroup, early: Mapping[int, int], progressed: bool
    ) -> int | None:
        """Records a lost process, and waits before the next start.

        Args:
          workers: the processes, which have all ended.
          early: exit codes of the processes that ended by themselves.
          progressed: this start made progress.

        Returns:
          The exit code of the run if it ends now, else None.
        """
        number = lost_process(early)
        codes = workers.codes()  # with those that were killed
        if number is not None:
            cause = f"process {number} {describe_exit(early[number])}"
        elif self._growing_to:
            number = min(codes.keys() - early.keys())
            cause = f"process {number} did not stop in time to grow"
        else:  # one process ended with 75, and others did not end
            self.say("not all processes stopped in time")
            return EXIT_PEER_LOST
        step = self.progress.newest()
        self.say(f"lost {cause} at step {step}; the others are stopped")
        self.progress.event(
            "peer_lost", step, process=number, exit_code=codes[number], why=cause
        )
        if self.agents.number > 1:
            return EXIT_PEER_LOST
        # a loss by growth is the agent's own fault: it counts as no failure
        if self._grown_from:
            self._undo_growth()
            return None
        if self._growing_to:
            self._after_growth(len(codes), saved=False)
            return None
        self._failures = [cause] if progressed else [*self._failures, cause]
        num_failures = len(self._failures)
        lost_slot = self.slots[number]
        if progressed:
            # a slot that was given up may work again
            self.slots = list(range(self.options.processes))
        self._give_up_slot(lost_slot)
        if num_failures > self.options.max_restarts:
            self.say(self._last_report(workers, number, step))
            return early[number] if early[number] > 0 else EXIT_PEER_LOST
        delay = 0.0
        if not progressed:
            delay = backoff_s(num_failures)
        self.say(
            f"restart {num_failures} of {self.options.max_restarts} without progress, in {delay:g} s"
        )
        self._sleep(delay)
        return None

    def _give_up_slot(self, slot: int) -> None:
        """Gives up a slot whose process was lost twice in a row, until progress.

        No slot is given up if all are needed, or if a file has the capacity.
        """
        is_second_loss = slot == self._last_slot
        self._last_slot = None if is_second_loss else slot
        if not is_second_loss or self.options.capacity_file is not None:
            return
        if len(self.slots) > self._least:
            self.slots.remove(slot)
            self.say(
                f"the process of slot {slot} was lost twice in a row: continuing without it"
            )

    def _last_report(self, workers: WorkerGroup, number: int, step: int) -> str:
        failures = "; ".join(
            f"{count} x {cause}" for cause, count in Counter(self._failures).items()
        )
        lines = workers.last_lines[number] or ["(nothing)"]
        output = "\n".join(f"    {line}" for line in lines)
        return (
            f"stopping: {len(self._failures)} failures without progress beyond step {step}, "
            f"--max-restarts {self.options.max_restarts}: {failures}. Process {number} said last:\n{output}"
        )

    # --- growth -----------------------------------------------------------------------

    def _should_grow(self, size: int, newest_before: int) -> bool:
        """Decides if the running group stops because a larger one can run.

        Args:
          size: size of the running group.
          newest_before: the newest step when it started.
        """

        def larger() -> int:
            # the capacity file may be missing, or being written
            with contextlib.suppress(OSError, ValueError):
                legal = self._largest_legal(self._read_capacity())
                if legal > size:
                    return legal
            return 0

        larger_size = self._growth.due(larger)
        # A group must make progress before it stops, or the run might never advance.
        if not larger_size or self.progress.newest() <= newest_before:
            return False
        self.say(
            f"{larger_size} processes can run: the {size} that run are asked to save and to restart as {larger_size}"
        )
        self._growing_to = larger_size
        return True

    def _after_growth(self, size: int, *, saved: bool = True) -> None:
        """Records that a group of `size` processes has stopped to grow.

        Args:
          size: number of processes that have stopped.
          saved: they have saved; if not, no event is written.
        """
        if saved:
            step = self.progress.newest()
            self.progress.event(
                "grow", step, processes_before=size, processes=self._growing_to
            )
        self._grown_from = size
        self._failures = []

    def _undo_growth(self) -> None:
        """Goes back to the size before a growth that was lost without progress."""
        self._growth.failed()
        self._max_size = self._grown_from
        self._grown_from = 0
        wait = f"the next growth is tried after {self._growth.wait_s / 60:g} minutes"
        self.say(
            f"no progress since the growth: back to {self._max_size} processes; {wait}"
        )

    # --- how many ---------------------------------------------------------------------

    def _await_size(self) -> int | None:
        """Waits for enough capacity.

        Returns:
          The number of processes to start; None if there are too few, or if a signal
          came first.
        """
        deadline = time.monotonic() + _WAIT_S
        least = 1 if self.agents.number > 1 else self._least
        reported = None
        while not self.stop_requests:
            capacity = self._capacity()
            size = self._largest_legal(capacity)
            if size >= least:
                if size < capacity:
                    reason = "no legal mesh has them"
                    if capacity in self._refused:
                        reason = "ended with 78"
                    self.say(
                        f"{capacity} processes could run, but {reason}; taking {size}"
                    )
                return size
            if time.monotonic() > deadline:
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
        """Counts the processes that can run now; all slots if that is unknown."""
        slots = len(self.slots)
        limit = self._max_size or slots
        try:
            try:
                return min(self._read_capacity(), limit)
            except ValueError:  # a file that is being written is whole a moment later
                self._sleep(1.0)
                return min(self._read_capacity(), limit)
        except (OSError, ValueError) as error:
            file = self.options.capacity_file
            self.say(
                f"--capacity-file {file}: no whole number there ({error}); taking {min(slots, limit)}"
            )
            return min(slots, limit)

    def _read_capacity(self) -> int:
        """Counts the processes that can run now.

        Raises:
          OSError, ValueError: the capacity file has no whole number.
        """
        file = self.options.capacity_file
        slots = len(self.slots)
        if file is None:
            return slots
        return max(0, min(read_capacity(file), slots))

    def _is_legal(self, size: int) -> bool:
        """Checks if the run's batch and mesh fit on `size` processes.

        The answer is True if it is unknown: before the first start, and for a command
        that is not jaxdist's.
        """
        processes = self.options.processes
        config = self.progress.read_json("config.json")
        if size == processes or self.agents.number > 1 or config is None:
            return True
        per_process = (
            self.options.devices_per_process or self.progress.devices_per_process()
        )
        if per_process is None:
            return True
        fitted = elastic.fit_config(
            config, devices=size * per_process, full_devices=processes * per_process
        )
        return fitted is not None

    def _fewer_may_do(self, size: int) -> bool:
        """Records a size that ended with 78; returns True if a smaller one is tried.

        A smaller size is tried after a growth. It is also tried after a reduced start
        without any step, since the legal sizes are unknown then.
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
    def _listening(self, is_last: bool) -> Iterator[None]:
        """Handles signals until the body ends.

        Signals that ask to stop, and the end of a child, wake `WorkerGroup.listen`.

        Args:
          is_last: no handler is needed afterwards.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        old_handlers = {
            number: signal.signal(number, self._on_signal)
            for number in stop_signals(os.environ)
        }
        old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._wakeup = reader
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_descriptor)
            for number, handler in old_handlers.items():
                if is_last:
                    handler = last_handler(handler)
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _on_signal(self, number: int, _: Any) -> None:
        self.stop_requests += 1
        if number == signal.SIGINT:
            self._interrupts += 1

    def _sleep(self, seconds: float) -> None:
        """Sleeps until the time is over or a signal asks to stop."""
        deadline = time.monotonic() + seconds
        while not self.stop_requests and time.monotonic() < deadline:
            time.sleep(min(0.1, seconds))
