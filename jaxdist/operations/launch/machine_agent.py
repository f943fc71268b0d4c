"""Agent of one of several machines that no scheduler starts together.

The agents meet in a folder (`rendezvous`). One of them decides who runs (`generations`).
Each agent starts its processes for a generation, and ends them when the generation ends.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping

from jaxdist.config import EXIT_PEER_LOST, EXIT_PREEMPTED, ConfigError
from jaxdist.distributed.cluster import ClusterInfo
from jaxdist.distributed.local_devices import ANY_HOST, free_port
from jaxdist.operations.launch.generations import WAIT_S, Leader
from jaxdist.operations.launch.reach import Reach, is_reachable
from jaxdist.operations.launch.rendezvous import Generation, Record, Rendezvous
from jaxdist.operations.launch.roster import MachineOptions, Roster
from jaxdist.operations.launch.supervisor import Supervisor, SupervisorOptions
from jaxdist.storage import lock

_LOOK_S = 0.25  # seconds between two looks while no process runs


class MachineAgent(Supervisor):
    """Supervisor of this machine's processes, together with other machines' agents."""

    def __init__(
        self,
        options: SupervisorOptions,
        machines: MachineOptions,
        *,
        say: Callable[[str], None],
    ) -> None:
        """Joins the rendezvous.

        Raises:
          ConfigError: the folder cannot be used.
        """
        super().__init__(options, ClusterInfo(), say=say)
        self.machines = machines
        record = Record(
            name=machines.name,
            token=secrets.token_hex(8),
            terms=_terms(options, machines),
            address=machines.address,
            port=free_port(ANY_HOST),
        )
        try:
            machines.folder.mkdir(parents=True, exist_ok=True)
            self._rendezvous = Rendezvous(
                machines.folder, record, lost_s=machines.lost_s
            )
        except OSError as error:
            raise ConfigError(
                f"{machines.folder}: cannot be used ({error.strerror}). The agents of all "
                f"machines meet there. Give a folder that all can write: --meet-in FOLDER."
            ) from error
        self._check_links()
        roster = Roster(
            machines,
            self._rendezvous,
            self.progress,
            processes=options.processes,
            devices_per_process=options.devices_per_process,
            capacity_file=options.capacity_file,
        )
        self._leader = Leader(
            roster,
            max_restarts=options.max_restarts,
            grow_s=60 * options.grow_minutes,
            say=say,
        )
        self._running = 0  # generation of the processes that run, or ran last
        self._reach = Reach("", 0)  # tries to reach its process 0
        self._fault = ""  # reason for which this agent cannot take part

    def _check_links(self) -> None:
        try:
            self._rendezvous.check_links()
        except OSError as error:
            raise ConfigError(
                f"{self.machines.folder}: a hard link cannot be made ({error.strerror}). "
                f"Agents decide by hard links. Give a folder of a local disk or of NFS: "
                f"--meet-in FOLDER."
            ) from error

    def run(self, *, is_last: bool = True) -> int:
        """Takes part in generations until the run ends for good.

        Returns:
          The exit code of the run.

        Raises:
          ConfigError: another agent has this name, or was started otherwise.
        """
        path = self.machines.folder / f"agent-{self.machines.name}.lock"
        try:
            with lock.exclusive(path), self._listening(is_last):
                return self._take_turns()
        except lock.Locked as holder:
            raise ConfigError(
                f"--agent {self.machines.name}: {holder} already runs an agent of this name in "
                f"{self.machines.folder}. Names differ. Give each agent another --agent NAME."
            ) from None

    def _take_turns(self) -> int:
        self.say(
            f"agent {self.machines.name} meets others in {self.machines.folder}, "
            f"{self.machines.least} to {self.machines.most} machines"
        )
        try:
            while self._rendezvous.unanswered_s() <= WAIT_S:
                self._look(soon=True)
                code = self._final_code()
                if code is None and self._takes_part(self._rendezvous.generation):
                    code = self._run_generation(self._rendezvous.generation)
                    if not self.stop_requests:
                        code = None  # that of all machines counts
                if code is not None:
                    return code
                self._sleep(_LOOK_S)
            self.say(f"stopping: {self.machines.folder} does not answer")
            return EXIT_PEER_LOST
        finally:
            self._rendezvous.update(left=True)

    def _final_code(self) -> int | None:
        """Finds the exit code with which this agent ends now; None = it continues.

        Raises:
          ConfigError: this agent cannot take part.
        """
        generation = self._rendezvous.generation
        is_new = generation.number > self._rendezvous.joined_at
        if generation.final is not None and is_new:
            self.say(f"all agents end with {generation.final}: {generation.why}")
            return generation.final
        if self.stop_requests:
            return EXIT_PREEMPTED
        if self._fault:
            raise ConfigError(self._fault)
        return None

    def _takes_part(self, generation: Generation) -> bool:
        """Tests whether this agent starts processes for a generation now."""
        is_member = generation.index(self._rendezvous.own.id) is not None
        if not is_member or generation.number <= self._running:
            return False
        if self._rendezvous.order is None:
            return not self._rendezvous.is_cut_off()
        # It has ended before it began here.
        self._running = generation.number
        self._report({})
        return False

    def _report(self, early: Mapping[int, int]) -> None:
        """Tells the others that the processes of a generation have ended."""
        self._rendezvous.update(
            generation=self._running,
            codes={str(process): code for process, code in early.items()},
            port=free_port(ANY_HOST),
            leaving=self.stop_requests > 0,
            unreached=self._running if self._reach.is_failing else 0,
        )

    def _run_generation(self, generation: Generation) -> int | None:
        """Runs this machine's processes of a generation, and reports their end.

        Returns:
          The exit code of the run, as far as these processes tell it; None = unknown.
        """
        self.agents = self._cluster(generation)
        self._reach = Reach(self.agents.host, self.agents.port)
        names = ", ".join(name for name, _ in generation.members)
        self.say(
            f"generation {generation.number}, {generation.why}: machine "
            f"{self.agents.index} of {self.agents.number} ({names})"
        )
        size = self.options.processes
        self._running = generation.number
        workers = self._start(size)
        try:
            self._attend(workers, generation.step)
            early = workers.codes()
        finally:
            workers.kill()
        self._report(early)
        may_have_stepped = (
            self.progress.folder is None or self.progress.starts() > generation.starts
        )
        return self._verdict(early, size, may_have_stepped)

    def _cluster(self, generation: Generation) -> ClusterInfo:
        """Builds this machine's place in a generation. A lone machine uses loopback."""
        index = generation.index(self._rendezvous.own.id)
        assert index is not None
        if len(generation.members) == 1:
            return ClusterInfo()
        return ClusterInfo(
            "agents",
            number=len(generation.members),
            index=index,
            host=generation.address,
            port=generation.port,
        )

    # --- hooks of the supervisor ------------------------------------------------------

    def _full_processes(self) -> int:
        return self.machines.most * self.options.processes

    def _must_end(self) -> bool:
        """Takes part in the rendezvous; tests whether the processes must be killed."""
        is_leaving = self.stop_requests > 0 and not self._rendezvous.own.leaving
        if self._rendezvous.is_due() or is_leaving:
            self._look()
            self._try_reach()
        if self._rendezvous.is_cut_off():
            self.say(f"{self.machines.folder} does not answer: the processes are ended")
            return True
        order = self._rendezvous.order
        if self._rendezvous.generation.number != self._running:
            self.say(
                "the others continued without this machine: its processes are ended"
            )
            return True
        if order is None or order.how != "kill":
            return False
        self.say(f"{order.why}: the processes are ended")
        return True

    def _should_grow(self, size: int, newest_before: int) -> bool:
        """Tests whether the processes are asked to save and stop."""
        order = self._rendezvous.order
        if order is None or order.how != "save":
            return False
        self.say(f"{order.why}: the processes are asked to save and to stop")
        self._growing_to = order.grow_to
        return True

    def _try_reach(self) -> None:
        """Tries to reach process 0 once; tells the others if it succeeds or fails."""
        is_current = self._rendezvous.generation.number == self._running
        if self._reach.succeeded or not is_current:
            return
        if self._rendezvous.order is not None:
            return  # process 0 may have ended already
        listens = self._rendezvous.is_listening()
        if self._reach.attempt(listens=listens):
            self._rendezvous.update(unreached=self._running)
        elif self._reach.succeeded and self.agents.index == 0:
            self._rendezvous.update(listens=self._running)

    # --- the rendezvous ---------------------------------------------------------------

    def _look(self, *, soon: bool = False) -> None:
        """Sends a heartbeat, reads what is new, and decides if this agent leads."""
        if self._rendezvous.is_due() or self.stop_requests:
            self._rendezvous.update(soon=soon, leaving=self.stop_requests > 0)
        self._rejoin_if_reachable()
        self._fault = self._fault or self._find_fault()
        if self._fault or self._rendezvous.is_cut_off():
            return
        if self._rendezvous.leads():
            try:
                self._leader.decide()
            except OSError as error:
                self.say(f"{self.machines.folder}: {error}")
        else:
            self._leader.rest()

    def _rejoin_if_reachable(self) -> None:
        """Rejoins once this machine, which was cut off, reaches the others again."""
        generation = self._rendezvous.generation
        is_left_out = self._rendezvous.own.token in generation.excluded
        was_cut_off = self._rendezvous.own.unreached > 0
        if not is_left_out or not was_cut_off or generation.final is not None:
            return
        # a lone machine's process 0 listens on loopback alone
        listens = len(generation.members) > 1
        if is_reachable(generation.address, generation.port, listens=listens):
            self._rendezvous.rejoin()
            self._rendezvous.update(unreached=0)

    def _find_fault(self) -> str:
        """Explains why this agent cannot take part; "" if it can."""
        own = self._rendezvous.own
        members = self._rendezvous.generation.members
        if own.id in members or self._rendezvous.is_running_own_terms():
            return ""
        for record in self._rendezvous.strangers():
            if record.id in members or record.name < own.name:
                return (
                    f"agent {record.name} has another command, or other flags, than agent "
                    f"{own.name}. All agents need the same. Start all with the same."
                )
        return ""


def _terms(options: SupervisorOptions, machines: MachineOptions) -> str:
    """Computes a digest of what all agents must have in common."""
    shared = [
        list(options.command),
        options.processes,
        options.devices_per_process,
        machines.least,
        machines.most,
    ]
    return hashlib.sha256(json.dumps(shared).encode()).hexdigest()[:16]
