"""Rules by which the first of several agents begins and ends generations.

A generation is a set of machines that runs the command together. It ends with the first
lost process or machine, and when a machine leaves or more can run. Needs no jax.
"""

import dataclasses
from collections.abc import Callable

from jaxdist.config import EXIT_CONFIG, EXIT_PEER_LOST, EXIT_PREEMPTED
from jaxdist.operations.launch import succession
from jaxdist.operations.launch.endings import backoff_s, describe_exit, lost_process
from jaxdist.operations.launch.growth import GrowthTimer
from jaxdist.operations.launch.rendezvous import Generation, Order, Record
from jaxdist.operations.launch.roster import Roster

WAIT_S = 600.0  # most seconds to wait for enough machines
_SETTLE_AFTER_LOSS_S = 5.0
_MOST_DELAYS = 4  # times the wait to settle, after which the machines may still change
_LOCKED_S = 10.0  # seconds between starts while the workdir may be locked


class Leader:
    """Decisions of an agent while it leads."""

    def __init__(
        self,
        roster: Roster,
        *,
        max_restarts: int,
        grow_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Decides nothing yet.

        Args:
          roster: chooses the machines.
          max_restarts: most restarts in a row without progress.
          grow_s: seconds that a generation runs before it grows; 0 = never.
          say: prints a line.
        """
        self._roster = roster
        self._machines = roster.machines
        self._rendezvous = roster.rendezvous
        self._progress = roster.progress
        self._max_restarts = max_restarts
        self._say = say
        self._growth = GrowthTimer(
            grow_s, steady_s=self._machines.settle_s, clock=self._rendezvous.clock
        )
        self._timed = 0  # generation for which the timer runs
        self._said = ""
        # counts of the generation after the last one, once that is over
        self._continued: Generation | None = None
        self.rest()

    def rest(self) -> None:
        """Notes that another agent leads, so that a later lead waits anew."""
        self._waiting_since = self._rendezvous.clock()
        self._settled: tuple[tuple[str, ...], float] = ((), self._waiting_since)
        self._enough_since: float | None = None  # since when MIN machines can run

    def decide(self) -> None:
        """Begins or ends a generation if it is time.

        Raises:
          OSError: the decision cannot be written.
        """
        generation = self._rendezvous.generation
        is_running = generation.final is None and bool(generation.members)
        if is_running and not self._is_over(generation):
            self._waiting_since = self._rendezvous.clock()
            self._watch(generation)
            return
        if self._continued is None or self._continued.number != generation.number:
            is_old = generation.number <= self._rendezvous.joined_at
            if is_running and is_old and not self._is_known(generation):
                return
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
        is_old = generation.number <= self._rendezvous.joined_at
        return is_old and all(map(self._rendezvous.is_lost, generation.members))

    def _is_known(self, generation: Generation) -> bool:
        """Tests whether a member is known to live, or all are known to be lost."""
        alive = {record.id for record in self._rendezvous.alive()}
        is_any_alive = not alive.isdisjoint(generation.members)
        return is_any_alive or all(map(self._rendezvous.is_lost, generation.members))

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
            order = self._find_end(member)
            if order is not None:
                self._rendezvous.publish_order(order)
                return
        if self._timed != generation.number:
            self._timed = generation.number
            self._growth.begin()
        larger = self._growth.due(lambda: self._room(generation))
        if larger and self._progress.newest() > generation.step:
            why = f"{larger} machines can run in place of {len(generation.members)}"
            self._rendezvous.publish_order(Order("save", why, grow_to=larger))

    def _find_end(self, member: tuple[str, str]) -> Order | None:
        """Finds the order that must follow from a member's state; None = none."""
        name, _ = member
        if self._rendezvous.has_not_reached(member):
            return Order("kill", f"machine {name} does not reach process 0")
        codes = self._rendezvous.report(member)
        if codes is None:
            if self._rendezvous.is_lost(member):
                return Order("kill", f"machine {name} is lost")
            return None
        failed = lost_process(codes)
        if failed is not None:
            why = f"process {failed} {describe_exit(codes[failed])}"
            return Order("kill", f"{why} on machine {name}")
        if EXIT_PREEMPTED in codes.values():
            return Order("save", f"machine {name} was asked to stop")
        return None

    def _room(self, generation: Generation) -> int:
        """Finds a larger number of machines that can run, or 0."""
        number = len(self._roster.choose(generation))
        return number if number > len(generation.members) else 0

    # --- between two generations ------------------------------------------------------

    def _after(self, generation: Generation) -> Generation:
        """Decides how the run continues after a generation, and records it.

        Returns:
          The counts of the next generation; or the end of the run.
        """
        outcome = self._outcome(generation)
        following = succession.after_end(outcome)
        if outcome.code == EXIT_CONFIG:
            following = succession.after_refusal(
                outcome, least=self._machines.least, most=self._machines.most
            )
        if following is None:
            loss = succession.find_loss(outcome)
            self._say(f"step {outcome.step}: {loss.cause}")
            self._progress.event(
                "peer_lost",
                outcome.step,
                process=loss.process,
                exit_code=loss.code,
                why=loss.cause,
            )
            following = succession.after_loss(
                outcome, loss, max_restarts=self._max_restarts
            )
        elif outcome.order is not None and outcome.order.grow_to:
            self._progress.event(
                "grow",
                outcome.step,
                processes_before=self._roster.processes * len(generation.members),
                processes=self._roster.processes * outcome.order.grow_to,
            )
        for name, token in generation.members:
            if token in following.excluded and token not in generation.excluded:
                self._say(f"machine {name} is not used")
        return following

    def _outcome(self, generation: Generation) -> succession.Outcome:
        """Collects what is known of a generation that is over."""
        reports = {id_: self._rendezvous.report(id_) for id_ in generation.members}
        codes: dict[int, int] = {}
        for report in reports.values():
            codes |= report or {}
        members = [
            record
            for record in self._rendezvous.records.values()
            if record.id in generation.members
        ]
        step = self._progress.newest()
        may_have_stepped = (
            step > generation.step
            or self._progress.folder is None
            or self._progress.starts() > generation.starts
        )
        return succession.Outcome(
            generation=generation,
            order=self._rendezvous.order,
            codes=codes,
            silent=tuple(id_[0] for id_, report in reports.items() if report is None),
            leaving=tuple(r.name for r in members if r.leaving or r.left),
            unreached=tuple(
                name
                for name, token in generation.members
                if self._rendezvous.has_not_reached((name, token))
            ),
            processes=self._roster.processes,
            step=step,
            may_have_stepped=may_have_stepped,
        )

    def _finish(self, end: Generation) -> None:
        self._rendezvous.publish(
            dataclasses.replace(end, number=self._rendezvous.next_number(), members=())
        )

    def _begin(self, previous: Generation) -> None:
        """Begins the next generation once enough machines have settled.

        Args:
          previous: the counts of the next generation, and the members of the last one.
        """
        now = self._rendezvous.clock()
        members = self._roster.choose(previous)
        tokens = tuple(record.token for record in self._roster.eligible(previous))
        if tokens != self._settled[0]:
            self._settled = (tokens, now)
        least = self._machines.least
        if len(members) >= least:
            if self._has_settled(self._delay_s(previous, members)):
                self._publish(previous, members)
            return
        self._enough_since = None
        if now - self._waiting_since > WAIT_S:
            why = f"no {least} machines for {WAIT_S:.0f} s"
            self._finish(dataclasses.replace(previous, final=EXIT_PEER_LOST, why=why))
        else:
            text = f"waiting: {len(members)} of {least} machines can run"
            if len(tokens) >= least:
                text += (
                    f"; {len(tokens)} are here, and no legal mesh has enough of them"
                )
            self._say_once(text)

    def _has_settled(self, delay_s: float) -> bool:
        """Tests whether enough machines were the same for a while.

        Machines that come and go do not delay the start without limit.
        """
        now = self._rendezvous.clock()
        if self._enough_since is None:
            self._enough_since = now
        if now - self._settled[1] >= delay_s:
            return True
        waited_s = now - self._enough_since
        if waited_s < _MOST_DELAYS * max(delay_s, self._machines.settle_s):
            return False
        self._say(f"machines still come and go after {waited_s:.0f} s: starting")
        return True

    def _publish(self, previous: Generation, members: list[Record]) -> None:
        old_tokens = {token for _, token in previous.members}
        grown: tuple[str, ...] = ()
        step = self._progress.newest()
        if old_tokens and step > 0:
            new = {record.token for record in members} - old_tokens
            grown = tuple(sorted(new))
        self._rendezvous.publish(
            dataclasses.replace(
                previous,
                number=self._rendezvous.next_number(),
                members=tuple(record.id for record in members),
                address=members[0].address,
                port=members[0].port,
                step=step,
                starts=self._progress.starts(),
                grown=grown,
            )
        )
        self._said = ""
        self._enough_since = None

    def _delay_s(self, previous: Generation, members: list[Record]) -> float:
        """Computes the seconds for which the machines must be the same."""
        delay_s = 0.0
        if len(previous.failures) > 1:
            delay_s = backoff_s(len(previous.failures) - 1)
        if previous.silent > 1:
            delay_s = _LOCKED_S
        ids = {record.id for record in members}
        is_full = len(members) == self._machines.most
        if is_full or (previous.members and ids >= set(previous.members)):
            return delay_s
        settle_s = self._machines.settle_s
        if previous.members:
            settle_s = min(settle_s, _SETTLE_AFTER_LOSS_S)
        return max(delay_s, settle_s)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)
