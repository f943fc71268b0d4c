"""The answer of `plan`: a run's plan, the best layout, or the remat policy that fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from jaxdist.config import ConfigError
from jaxdist.parallel.remat import FIT
from jaxdist.planner import calibration, remat_search, search
from jaxdist.planner.compiler import CompileOptions, Say
from jaxdist.planner.document import Plan
from jaxdist.planner.plan import make_plan, plan_by_arithmetic
from jaxdist.planner.show import print_lines
from jaxdist.planner.targets import Target
from jaxdist.trainer.run_config import RunConfig

MOST_CHECKED = 3  # most edits that --fix compiles
FIT_FINALISTS = 4  # fitting policies that remat.policy=fit compiles


@dataclass(frozen=True)
class Answer:
    """A plan, and the search that found it."""

    plan: Plan
    exit_code: int
    found_by: Mapping[str, Any] = field(default_factory=dict)  # a section of the JSON
    # prints the section
    show: Callable[[Console], None] = lambda console: None


class Question:
    """A request for a plan, with the flags of the command.

    Args:
      run: the config.
      target: the hardware.
      search: whether to search for the best layout.
      fix: whether to compile the first edits that should make the run fit, or to find
        the policy of `remat.policy=fit`.
      expert_load: see `plan.make_plan`.
      calibration_file: a file of measured times of collectives; None for datasheet
        rates.
      limit_minutes: most minutes of a compilation, and of a search; None for the
        defaults.

    Raises:
      ConfigError: the flags exclude each other, or the file cannot be used.
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
        limit_minutes: float | None = None,
    ) -> None:
        if search and target.platform == "cpu":
            raise ConfigError(
                "--search ranks by time, which is unknown for CPUs; name a TPU or GPU"
            )
        if search and fix:
            raise ConfigError(
                "--fix edits one layout, --search looks for another; give one of them"
            )
        if calibration_file and (search or fix):
            raise ConfigError(
                "--calibration applies to the collectives of one plan: leave out --search and --fix"
            )
        self.run = run
        self.target = target
        self.search = search
        self.fix = fix
        self.expert_load = expert_load
        self.options = compile_options(limit_minutes)
        self.limit_minutes = limit_minutes
        self.calibration: calibration.Calibration | None = None
        if calibration_file:
            self.calibration = calibration.load(calibration_file, target)

    def answer(self, *, base: str, say: Say) -> Answer:
        """Makes the plan, the search or the fit.

        Args:
          base: flags that name the config and its overrides, for output.
          say: called with each stage of the work.
        """
        if self.search:
            return _search(self, base, say)
        if self.fix and self.run.remat.policy == FIT:
            return _fit_remat(self, say)
        plan = make_plan(
            self.run,
            self.target,
            options=self.options,
            calibration=self.calibration,
            check_edits=MOST_CHECKED if self.fix else 0,
            expert_load=self.expert_load,
            say=say,
        )
        return Answer(plan, plan.exit_code)


def compile_options(limit_minutes: float | None) -> CompileOptions:
    """Makes the compile options of the command's flags; see `Question`."""
    if limit_minutes is None:
        return CompileOptions()
    return CompileOptions(timeout_s=60 * limit_minutes)


def _search(question: Question, base: str, say: Say) -> Answer:
    """Searches for the best layout of a question's run."""
    ranking = search.search(
        question.run,
        question.target,
        options=question.options,
        minutes=question.limit_minutes or search.MINUTES,
        expert_load=question.expert_load,
        say=say,
    )
    report = ranking.to_json()
    section = {name: value for name, value in report.items() if name != "winner"}
    return Answer(
        plan=_first_plan(ranking),
        exit_code=ranking.exit_code,
        found_by={"search": section},
        show=lambda console: search.show(report, console, base),
    )


def _first_plan(ranking: search.Ranking) -> Plan:
    """Finds the plan of the first layout, by arithmetic if none was compiled."""
    if ranking.compiled:
        return ranking.compiled[0].plan
    plan = plan_by_arithmetic(ranking.others[0][0].run, ranking.target)
    return replace(plan, exit_reason=f"not compiled: {ranking.summary['stopped']}")


def _fit_remat(question: Question, say: Say) -> Answer:
    """Searches for the remat policy that fits a question's run."""
    fitted = remat_search.fit(
        question.run,
        question.target,
        finalists=FIT_FINALISTS,
        options=question.options,
        say=say,
    )
    return Answer(
        plan=fitted.plan,
        exit_code=fitted.plan.exit_code,
        found_by={"remat_fit": fitted.to_json()},
        show=lambda console: print_lines(console, fitted.lines()),
    )
