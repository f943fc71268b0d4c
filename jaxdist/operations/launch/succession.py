"""How a run continues after a generation of machines has ended. Needs no jax."""

import dataclasses
from collections.abc import Mapping

from jaxdist.config import (
    EXIT_CONFIG,
    EXIT_NO_CHECKPOINT,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
)
from jaxdist.operations.launch.endings import (
    NOT_AT_FAULT,
    describe_exit,
    lost_process,
    verdict,
)
from jaxdist.operations.launch.rendezvous import Generation, Order

# Starts that may find the workdir locked by a silent machine. A file server keeps the
# lock of a dead machine for a while (NFS: 90 s).
_LOCKED_STARTS = 12


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is known of a generation once it is over."""

    generation: Generation
    order: Order | None  # order that has ended it
    codes: Mapping[int, int]  # exit codes of processes that ended by themselves
    silent: tuple[str, ...]  # members that have not reported the end
    leaving: tuple[str, ...]  # members that were asked to stop
    unreached: tuple[str, ...]  # members that have not reached process 0
    processes: int  # number of processes of each machine
    step: int  # newest step now
    may_have_stepped: bool  # the generation may have finished steps

    @property
    def progressed(self) -> bool:
        """Tests whether the generation has made new steps."""
        return self.step > self.generation.step

    @property
    def code(self) -> int | None:
        """Exit code of the run; None if a process or machine was lost."""
        is_asked = self.order is not None and self.order.how == "save"
        return verdict(
            self.codes,
            self.processes * len(self.generation.members),
            is_asked=is_asked or bool(self.leaving),
            may_have_stepped=self.may_have_stepped,
        )


@dataclasses.dataclass(frozen=True)
class Loss:
    """The process that ended a generation, or the first process of a lost machine."""

    process: int
    machine: str
    code: int
    cause: str
    is_silent: bool = False  # the whole machine is lost
    is_cut_off: bool = False  # the machine does not reach the others


def find_loss(outcome: Outcome) -> Loss:
    """Finds what was lost."""
    names = [name for name, _ in outcome.generation.members]
    number = lost_process(outcome.codes)
    if outcome.silent:
        machine = outcome.silent[0]
        process = names.index(machine) * outcome.processes
        cause = f"machine {machine} is lost"
        return Loss(process, machine, EXIT_PEER_LOST, cause, is_silent=True)
    is_known = number is not None and outcome.codes[number] not in NOT_AT_FAULT
    if outcome.unreached and not is_known:
        machine = outcome.unreached[0]
        if len(outcome.unreached) == len(names) - 1 > 1:
            machine = names[0]  # nobody reaches it
        process = names.index(machine) * outcome.processes
        cause = f"machine {machine} is cut off from the others"
        return Loss(process, machine, EXIT_PEER_LOST, cause, is_cut_off=True)
    if number is None:
        return Loss(0, names[0], EXIT_PEER_LOST, "not all processes stopped in time")
    machine = names[number // outcome.processes]
    code = outcome.codes[number]
    cause = f"process {number} {describe_exit(code)} on machine {machine}"
    return Loss(number, machine, code, cause)


def after_end(outcome: Outcome) -> Generation | None:
    """Decides how the run continues if nothing was lost.

    Returns:
      The counts of the next generation, or the end of the run. None after a loss or a
      refusal.
    """
    generation = outcome.generation
    code = outcome.code
    if code in (0, EXIT_NO_CHECKPOINT):
        return dataclasses.replace(generation, final=code, why="the run has ended")
    if code != EXIT_PREEMPTED:
        return None
    why = ""
    if outcome.leaving:
        why = f"{', '.join(sorted(outcome.leaving))} left"
    if outcome.order is not None and outcome.order.grow_to:
        why = outcome.order.why
    if why:
        return dataclasses.replace(generation, failures=(), why=why)
    return dataclasses.replace(generation, final=code, why="asked to stop")


def after_refusal(outcome: Outcome, *, least: int, most: int) -> Generation:
    """Decides how the run continues after the exit code 78.

    Machines that have just come are left out. A workdir that a lost machine locks is
    tried again. Before the first step, fewer machines may have a legal mesh.

    Args:
      outcome: the generation that ended with 78.
      least: fewest machines.
      most: most machines.
    """
    generation = outcome.generation
    size = len(generation.members)
    if generation.grown:
        excluded = (*generation.excluded, *generation.grown)
        why = "the machines that came ended with 78: continuing without them"
        return dataclasses.replace(generation, excluded=excluded, why=why)
    if not outcome.may_have_stepped and 0 < generation.silent < _LOCKED_STARTS:
        why = "a lost machine may still lock the workdir"
        return dataclasses.replace(generation, silent=generation.silent + 1, why=why)
    if outcome.step == 0 and least < size < most:
        refused = (*generation.refused, size)
        why = f"{size} machines ended with 78"
        return dataclasses.replace(generation, refused=refused, why=why)
    return dataclasses.replace(generation, final=EXIT_CONFIG, why="refused")


def after_loss(outcome: Outcome, loss: Loss, *, max_restarts: int) -> Generation:
    """Decides whether to start again after a loss.

    A machine that loses a process twice in a row is left out, until progress. So is one
    that is cut off from the others, at once.
    """
    generation = outcome.generation
    failures = generation.failures
    excluded = generation.excluded
    if outcome.progressed:
        failures = ()
        excluded = ()
    failures = (*failures, loss.cause)
    if len(failures) > max_restarts:
        number = len(failures)
        why = f"{number} failures without progress beyond step {outcome.step}: "
        code = loss.code if loss.code > 0 else EXIT_PEER_LOST
        why += "; ".join(failures)
        return dataclasses.replace(generation, final=code, why=why)
    suspect, left_out = _blame(generation, loss)
    return dataclasses.replace(
        generation,
        failures=failures,
        suspect=suspect,
        excluded=(*excluded, *left_out),
        silent=1 if loss.is_silent else 0,
        why=loss.cause,
    )


def _blame(generation: Generation, loss: Loss) -> tuple[str, tuple[str, ...]]:
    """Finds the machine to suspect, and those to leave out from now on.

    A process that ended because of another one is no reason to suspect its machine.

    Returns:
      (token of the suspect or "", tokens of the others).
    """
    token = dict(generation.members)[loss.machine]
    if loss.is_cut_off:
        return "", (token,)
    if loss.is_silent or loss.code in NOT_AT_FAULT:
        return "", ()
    if token == generation.suspect:
        return "", (token,)
    return token, ()
