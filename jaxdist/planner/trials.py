"""The search loop of the planner: rank candidates by arithmetic, compile the best.

Four modules use it. Each lists its candidates, ranks them by its criterion, and chooses
the next one to compile from the results so far:

  module       candidates                         criterion
  search       layouts of a run                   the shortest step
  remat_search remat policies of a layout         the shortest step that fits
  fewest       machines of a family, ZeRO stages  the fewest chips
  advice       edits of a config                  the cheapest that fits
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class CompiledCandidate(Protocol):
    """A candidate and whether the compiler says that it fits."""

    @property
    def fits(self) -> bool | None:
        """True if the candidate fits; None if the compiler gave no answer."""


C = TypeVar("C")
T = TypeVar("T", bound=CompiledCandidate)


def compile_in_turn(
    choose: Callable[[Sequence[T]], C | None], compile: Callable[[C], T]
) -> list[T]:
    """Compiles candidates one after the other until none is chosen.

    Args:
      choose: chooses the next candidate from the results so far; None ends the search.
      compile: compiles a candidate.
    """
    results = list[T]()
    candidate = choose(results)
    while candidate is not None:
        results.append(compile(candidate))
        candidate = choose(results)
    return results


def until_one_fits(
    candidates: Iterable[C],
) -> Callable[[Sequence[CompiledCandidate]], C | None]:
    """Makes a `choose` that takes candidates in their order until one fits."""
    remaining = iter(candidates)

    def choose(results: Sequence[CompiledCandidate]) -> C | None:
        if results and results[-1].fits:
            return None
        return next(remaining, None)

    return choose
