"""Rules by which the first of several agents begins and ends generations.

A generation is a set of machines that runs the command together. It ends with the first
lost process or machine, and when a machine leaves or more can run. Needs no jax.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
)
from jaxdist.operations.launch.endings import describe_exit, lost_process, verdict
from jaxdist.operations.launch.growth import GrowthTimer, read_capacity
from jaxdist.operations.launch.rendezvous import Generation, Order, Record, Rendezvous
from jaxdist.operations.launch.run_progress import ProgressReader
from jaxdist.trainer import elastic

WAIT_S = 600.0  # most seconds to wait for enough machines
_SETTLE_AFTER_LOSS_S = 5.0
_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
# Starts that may find the workdir locked by a silent machine, and seconds between them.
# A file server keeps the lock of a dead machine for a while (NFS: 90 s).
_LOCKED_STARTS = 12
_LOCKED_S = 10.0


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Options of `launch` for several machines."""

    least: int  # fewest machines
    most: int  # most machines: those of a full run
    folder: Path  # folder in which the agents meet
    name: str  # name of this machine's agent
    address: str  # host by which other machines reach this one
    settle_s: float = 30.0  # seconds to wait for more machines before the first start
    lost_s: float = 15.0  # seconds without a heartbeat after which an agent is lost


class Leader:
    """Decisions of an agent while it leads."""

    def __init__(
        self,
        machines: MachineOptions,
        rendezvous: Rendezvous,
        progress: ProgressReader,
        *,
        processes: int,
        devices_per_process: int | None,
        max_restarts: int,
        grow_s: float,
        capacity_file: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._machines = machines
        self._rendezvous = rendezvous
        self._progress = progress
        self._processes = processes
        self._devices_per_process = devices_per_process
        self._max_restarts = max_restarts
        self._capacity_file = capacity_file
        self._say = say
        self._growth = GrowthTimer(
            grow_s, steady_s=machines.settle_s, clock=rendezvous.clock
        )
        self._timed = 0  # generation for which the timer runs
        self._waiting_since = rendezvous.clock()
        self._settled: tuple[tuple[str, ...], float] = ((), rendezvous.clock())
        self._said = ""
        # counts of the generation after the last one, once that is over
        self._continued: Generation | None = None

    def decide(self) -> None:
        """Begins or ends a generation if it is time.

        Raises:
          OSError: the decision cannot be written.
        """
        generation = self._rendezvous.generation
        is_running = generation.final is None and generation.members
        if is_running and not self._is_over(generation):
            self._waiting_since = self._rendezvous.clock()
            self._watch(generation)
            return
        if self._continued is None or self._continued.number != generation.number:
            if is_running and not self._is_of_earlier_agents(generation):
                self._continued = self._after(generation)
            else:
                silent = 1 if is_running else 0
                self._continued = Generation(
                    generation.number, why="first start", silent=silent
                )
        if self._continued.final is not None:
            self._finish(self._continued)
        else:
            self._begin(self._continued)

    def _is_of_earlier_agents(self, generation: Generation) -> bool:
        """Tests whether all agents of a generation have ended before this one began."""
        alive = {record.id for record in self._rendezvous.alive()}
        is_old = generation.number <= self._rendezvous.joined_at
        return is_old and not alive & set(generation.members)

    def rest(self) -> None:
        """Notes that another agent leads, so that a later lead waits anew."""
        self._waiting_since = self._rendezvous.clock()
        self._settled = ((), self._waiting_since)

    # --- a running generation ---------------------------------------------------------

    def _is_over(self, generation: Generation) -> bool:
        """Tests whether no member runs processes of the generation."""
        return all(
            self._rendezvous.report(member) is not None
            or self._rendezvous.is_lost(member)
            for member in generation.members
        )

    def _watch(self, generation: Generation) -> None:
        """Ends a generation that has lost a member, or for which there is more room."""
        if self._rendezvous.order is not None:
            return
        for member in generation.members:
            codes = self._rendezvous.report(member)
            if codes is None and self._rendezvous.is_lost(member):
                self._end(Order("kill", f"machine {member[0]} is lost"))
                return
            failed = lost_process(codes or {})
            if failed is not None and codes is not None:
                why = f"process {failed} {describe_exit(codes[failed])}"
                self._end(Order("kill", f"{why} on machine {member[0]}"))
                return
            if codes is not None and EXIT_PREEMPTED in codes.values():
                self._end(Order("save", f"machine {member[0]} was asked to stop"))
                return
        if self._timed != generation.number:
            self._timed = generation.number
            self._growth.begin()
        larger = self._growth.due(lambda: self._room(generation))
        if larger and self._progress.newest() > generation.step:
            why = f"{larger} machines can run in place of {len(generation.members)}"
            self._end(Order("save", why, grow_to=larger))

    def _room(self, generation: Generation) -> int:
        """Finds a larger number of machines that can run, or 0."""
        number = len(self._candidates(generation))
        if number <= len(generation.members):
            return 0
        return number

    def _end(self, order: Order) -> None:
        self._rendezvous.publish_order(order)

    # --- between two generations ------------------------------------------------------

    def _after(self, generation: Generation) -> Generation:
        """Decides how the run continues after a generation.

        Returns:
          The counts of the next generation, without members; or the end of the run.
        """
        codes: dict[int, int] = {}
        for member in generation.members:
            codes |= self._rendezvous.report(member) or {}
        silent = [
            name
            for name, token in generation.members
            if self._rendezvous.report((name, token)) is None
        ]
        step = self._progress.newest()
        progressed = step > generation.step
        has_workdir = self._progress.folder is not None
        may_have_stepped = (
            progressed or not has_workdir or self._progress.starts() > generation.starts
        )
        leaving = [
            record.name
            for record in self._rendezvous.records.values()
            if record.id in generation.members and (record.leaving or record.left)
        ]
        order = self._rendezvous.order
        code = verdict(
            codes,
            self._processes * len(generation.members),
            is_asked=bool(leaving) or (order is not None and order.how == "save"),
            may_have_stepped=may_have_stepped,
        )
        if code == EXIT_CONFIG:
            return self._after_refusal(generation, may_have_stepped=may_have_stepped)
        if code in (0, EXIT_NO_CHECKPOINT):
            return dataclasses.replace(generation, final=code, why="the run has ended")
        if code == EXIT_PREEMPTED and order is not None and order.grow_to:
            self._progress.event(
                "grow",
                step,
                processes_before=self._processes * len(generation.members),
                processes=self._processes * order.grow_to,
            )
            return dataclasses.replace(generation, failures=(), why=order.why)
        if code == EXIT_PREEMPTED and leaving:
            why = f"{', '.join(sorted(leaving))} left"
            return dataclasses.replace(generation, failures=(), why=why)
        if code == EXIT_PREEMPTED:
            return dataclasses.replace(generation, final=code, why="asked to stop")
        return self._after_loss(generation, codes, silent, step, progressed=progressed)

    def _after_refusal(
        self, generation: Generation, *, may_have_stepped: bool
    ) -> Generation:
        """Decides how to continue after the exit code 78."""
        size = len(generation.members)
        if generation.grown:
            excluded = (*generation.excluded, *generation.grown)
            why = "ended with 78 since machines came: continuing without them"
            self._say(why)
            return dataclasses.replace(generation, excluded=excluded, why=why)
        if not may_have_stepped and 0 < generation.silent < _LOCKED_STARTS:
            return dataclasses.replace(
                generation,
                silent=generation.silent + 1,
                why="a lost machine may still lock the workdir",
            )
        is_new = self._progress.newest() == 0
        if is_new and self._machines.least < size < self._machines.most:
            refused = (*generation.refused, size)
            why = f"{size} machines ended with 78"
            return dataclasses.replace(generation, refused=refused, why=why)
        return dataclasses.replace(generation, final=EXIT_CONFIG, why="refused")

    def _after_loss(
        self,
        generation: Generation,
        codes: Mapping[int, int],
        silent: list[str],
        step: int,
        *,
        progressed: bool,
    ) -> Generation:
        """Records a loss, and decides whether to start again."""
        number = lost_process(codes)
        if silent:
            machine = silent[0]
            place = [name for name, _ in generation.members].index(machine)
            number = place * self._processes
            code = EXIT_PEER_LOST
            cause = f"machine {machine} is lost"
        elif number is not None:
            machine, _ = generation.members[number // self._processes]
            code = codes[number]
            cause = f"process {number} {describe_exit(code)} on machine {machine}"
        else:
            number = 0
            machine, _ = generation.members[0]
            code = EXIT_PEER_LOST
            cause = "not all processes stopped in time"
        self._say(f"step {step}: {cause}")
        self._progress.event(
            "peer_lost", step, process=number, exit_code=code, why=cause
        )
        failures = (cause,) if progressed else (*generation.failures, cause)
        suspect = "" if silent else dict(generation.members)[machine]
        excluded = () if progressed else generation.excluded
        if suspect and suspect == generation.suspect:
            excluded = (*excluded, suspect)
            suspect = ""
            self._say(f"machine {machine} lost a process twice in a row: left out")
        if len(failures) > self._max_restarts:
            why = f"{len(failures)} failures without progress beyond step {step}: "
            return dataclasses.replace(
                generation,
                final=code if code > 0 else EXIT_PEER_LOST,
                why=why + "; ".join(failures),
            )
        return dataclasses.replace(
            generation,
            failures=failures,
            suspect=suspect,
            excluded=excluded,
            silent=1 if silent else 0,
            why=cause,
        )

    def _finish(self, end: Generation) -> None:
        self._rendezvous.publish(
            dataclasses.replace(end, number=end.number + 1, members=())
        )

    def _begin(self, previous: Generation) -> None:
        """Begins the next generation once enough machines have settled.

        Args:
          previous: the counts of the next generation, and the members of the last one.
        """
        now = self._rendezvous.clock()
        members = self._candidates(previous)
        ids = tuple(record.token for record in self._eligible(previous))
        if ids != self._settled[0]:
            self._settled = (ids, now)
        if len(members) < self._machines.least:
            if now - self._waiting_since > WAIT_S:
                why = f"no {self._machines.least} machines for {WAIT_S:.0f} s"
                self._finish(
                    dataclasses.replace(previous, final=EXIT_PEER_LOST, why=why)
                )
                return
            self._say_once(
                f"waiting: {len(members)} of {self._machines.least} machines can run"
            )
            return
        if now - self._settled[1] < self._delay_s(previous, members):
            return
        lead = members[0]
        old_tokens = {token for _, token in previous.members}
        newcomers = {record.token for record in members} - old_tokens
        has_trained = old_tokens and self._progress.newest() > 0
        self._rendezvous.publish(
            dataclasses.replace(
                previous,
                number=previous.number + 1,
                members=tuple(record.id for record in members),
                address=lead.address,
                port=lead.port,
                step=self._progress.newest(),
                starts=self._progress.starts(),
                grown=tuple(sorted(newcomers)) if has_trained else (),
            )
        )
        self._said = ""

    def _delay_s(self, previous: Generation, members: list[Record]) -> float:
        """Computes the seconds for which the machines must be the same."""
        delay_s = 0.0
        if previous.failures and len(previous.failures) > 1:
            doubled = _BACKOFF_S * 2 ** (len(previous.failures) - 2)
            delay_s = min(doubled, _MAX_BACKOFF_S)
        if previous.silent > 1:
            delay_s = _LOCKED_S
        is_full = len(members) == self._machines.most
        if (
            is_full
            or {record.id for record in members} >= set(previous.members) != set()
        ):
            return delay_s
        settle_s = self._machines.settle_s
        if previous.members:
            settle_s = min(settle_s, _SETTLE_AFTER_LOSS_S)
        return max(delay_s, settle_s)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    # --- which machines ---------------------------------------------------------------

    def _eligible(self, generation: Generation) -> list[Record]:
        """Lists the agents that can run processes; those left out come last."""
        alive = [record for record in self._rendezvous.alive() if not record.leaving]
        return sorted(alive, key=lambda r: (r.token in generation.excluded, r.name))

    def _candidates(self, generation: Generation) -> list[Record]:
        """Chooses as many machines as can run on a legal mesh.

        Machines that are left out take part only if there are too few others.
        """
        eligible = self._eligible(generation)
        sound = [r for r in eligible if r.token not in generation.excluded]
        if len(sound) >= self._machines.least:
            eligible = sound
        number = min(len(eligible), self._machines.most)
        if self._capacity_file is not None:
            # the file may be missing, or being written
            with contextlib.suppress(OSError, ValueError):
                number = min(number, read_capacity(self._capacity_file))
        for size in range(number, 0, -1):
            if size not in generation.refused and self._is_legal(size):
                return sorted(eligible[:size], key=lambda record: record.name)
        return []

    def _is_legal(self, size: int) -> bool:
        """Checks if the run's batch and mesh fit on so many machines.

        The answer is True if it is unknown; see `Supervisor`.
        """
        most = self._machines.most
        config = self._progress.read_json("config.json")
        per_process = self._devices_per_process or self._progress.devices_per_process()
        if size == most or config is None or per_process is None:
            return True
        per_machine = self._processes * per_process
        fitted = elastic.fit_config(
            config, devices=size * per_machine, full_devices=most * per_machine
        )
        return fitted is not None
