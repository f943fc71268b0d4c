"""What the command answers: the plan of a run, the best of a search, or the remat policy
that fits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from jaxdist.config import ConfigError
from jaxdist.parallel.remat import FIT
from jaxdist.planner import calibration, remat_search, search
from jaxdist.planner.document import Plan
from jaxdist.planner.plan import make_plan, plan_by_arithmetic
from jaxdist.planner.show import print_lines
from jaxdist.planner.targets import Target
from jaxdist.trainer.run_config import RunConfig

MOST_CHECKED = 3  # edits that --fix compiles
FIT_FINALISTS = 4  # policies that fit and are compiled for remat.policy=fit
Say = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """A plan, and how it was found."""

    plan: Plan
    exit_code: int
    found_by: Mapping[str, Any] = field(default_factory=dict)  # a section of the JSON
    # prints that section
    show: Callable[[Console], None] = lambda console: None


class Question:
    """What is asked of a run on a target.

    Args:
      search: for the best layout.
      fix: compile the first edits that should make it fit; or find the policy of
        `remat.policy=fit`.
      expert_load: see `plan.make_plan`.
      calibration_file: measured times of collectives; None: those of datasheets.

    Raises:
      ConfigError: the flags do not go together, or the file cannot calibrate.
    """

    def __init__(
        self,
        run: RunConfig,
        target: Target,
        *,
        search: bool = False,
        fix: bool = False,
        expert_load: float = 1.0,
        calibration_file: str | None = None,
    ) -> None:
        if search and target.platform == "cpu":
            raise ConfigError(
                "--search ranks by time, of which a CPU's compiler says nothing; name a TPU or GPU"
            )
        if search and fix:
            raise ConfigError(
                "--fix mends one layout, --search looks for another; give one of them"
            )
        if calibration_file and (search or fix):
            raise ConfigError(
                "--calibration is of one plan's collectives: leave out --search and --fix"
            )
        self.run = run
        self.target = target
        self.search = search
        self.fix = fix
        self.expert_load = expert_load
        self.calibration: calibration.Calibration | None = None
        if calibration_file:
            self.calibration = calibration.load(calibration_file, target)

    def answer(self, *, base: str, say: Say) -> Answer:
        """Answers it.

        Args:
          base: what says which run it is, as on the command line.
          say: gets each stage of the work.
        """
        if self.search:
            return _search(self, base, say)
        if self.fix and self.run.remat.policy == FIT:
            return _fit_remat(self, say)
        plan = make_plan(
            self.run,
            self.target,
            calibration=self.calibration,
            check_edits=MOST_CHECKED if self.fix else 0,
            expert_load=self.expert_load,
            say=say,
        )
        return Answer(plan, plan.exit_code)


def _search(question: Question, base: str, say: Say) -> Answer:
    ranking = search.search(
        question.run, question.target, expert_load=question.expert_load, say=say
    )
    found = ranking.to_json()
    section = {name: value for name, value in found.items() if name != "winner"}
    return Answer(
        plan=_first(ranking),
        exit_code=ranking.exit_code,
        found_by={"search": section},
        show=lambda console: search.show(found, console, base),
    )


def _first(ranking: search.Ranking) -> Plan:
    """Returns the winner's plan; if none fits the nearest's; if none was compiled what
    arithmetic says.
    """
    if ranking.compiled:
        return ranking.compiled[0].plan
    plan = plan_by_arithmetic(ranking.others[0][0].run, ranking.target)
    return replace(plan, exit_reason=f"not compiled: {ranking.summary['stopped']}")


def _fit_remat(question: Question, say: Say) -> Answer:
    fitted = remat_search.fit(
        question.run, question.target, finalists=FIT_FINALISTS, say=say
    )
    return Answer(
        plan=fitted.plan,
        exit_code=fitted.plan.exit_code,
        found_by={"remat_fit": fitted.to_json()},
        show=lambda console: print_lines(console, fitted.lines()),
    )
