"""The one search of the planner: candidates by arithmetic, the best compiled in turn.

Four questions use it. Each lists candidates, ranks them by what it asks for, and
chooses what to compile next by what was compiled before:

  search      layouts of a run                  the shortest step
  fit_remat   remat policies of a layout        the shortest step that fits
  fewest      machines of a family, ZeRO stages the fewest chips
  advice      edits of a config                 the cheapest that fits
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jaxdist.planner.document import Plan
from jaxdist.planner.layouts import Candidate


class Tried(Protocol):
    """A candidate after it was compiled."""

    @property
    def fits(self) -> bool | None:
        """Whether the compiler says that it fits; None: it does not answer."""


C = TypeVar("C")
T = TypeVar("T", bound=Tried)


def compile_in_turn(
    choose: Callable[[Sequence[T]], C | None], compile: Callable[[C], T]
) -> list[T]:
    """Compiles candidates one after the other until none is chosen.

    Args:
      choose: chooses the next candidate by what was tried so far; None ends the search.
      compile: compiles a candidate.
    """
    tried = list[T]()
    candidate = choose(tried)
    while candidate is not None:
        tried.append(compile(candidate))
        candidate = choose(tried)
    return tried


def until_one_fits(candidates: Iterable[C]) -> Callable[[Sequence[Tried]], C | None]:
    """Chooses candidates in their order until one fits."""
    left = iter(candidates)

    def choose(tried: Sequence[Tried]) -> C | None:
        if tried and tried[-1].fits:
            return None
        return next(left, None)

    return choose


@dataclass(frozen=True)
class Compiled:
    """A layout and its plan."""

    layout: Candidate
    plan: Plan

    @property
    def fits(self) -> bool | None:
        return self.plan.fits

    @property
    def seconds(self) -> float:
        """What it is ranked by: the estimated step, or its busiest link if that takes
        longer.

        The estimate of a TPU step takes asynchronous communication for hidden.
        """
        if self.plan.time.step_s is None:
            return self.layout.estimate.step_s
        busy = dict[str, float]()
        for one in self.plan.collectives:
            link = one.link.name if one.link else ""
            busy[link] = busy.get(link, 0.0) + one.step_s
        return max(self.plan.time.step_s, *busy.values(), 0.0)
