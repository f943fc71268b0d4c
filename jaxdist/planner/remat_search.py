"""The remat policy that fits a target with the shortest step.

Every policy is weighed by arithmetic (`policies`); the compiler is asked of the best, and
what it says against the arithmetic counts for the next.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.parallel.remat import RematConfig
from jaxdist.planner import layouts
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.document import Plan
from jaxdist.planner.layouts import Candidate
from jaxdist.planner.plan import make_plan
from jaxdist.planner.policies import Policies
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import CompiledLayout, compile_in_turn
from jaxdist.telemetry.units import gib_text, time_text
from jaxdist.trainer.run_config import RunConfig

MOST_REFUSED = 4  # compiles of steps that do not fit

_PLAIN = tuple(map(RematConfig, layouts.REMAT))
Say = Callable[[str], None]


@dataclass(frozen=True)
class Fitted:
    """What `fit` came to."""

    run: RunConfig  # with the policy
    plan: Plan  # compiled
    seconds: float  # by what it was ranked
    # every policy that was compiled, and what came of it
    tried: tuple[tuple[RematConfig, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the policy, as on the command line too, and what was compiled."""
        tried = [{"remat": str(remat), "why": why} for remat, why in self.tried]
        return {
            "overrides": overrides(self.run.remat),
            "step_s": self.seconds,
            "tried": tried,
        }

    def lines(self) -> Iterator[str]:
        """Yields what to say of it."""
        for remat, why in self.tried:
            yield f"compiled: remat {remat}: {why}"
        yield f"remat.policy=fit: {' '.join(overrides(self.run.remat))}"


def fit(
    run: RunConfig,
    target: Target,
    *,
    limit_bytes: int | None = None,
    finalists: int = 1,
    options: CompileOptions | None = None,
    say: Say = lambda line: None,
) -> Fitted:
    """Returns the run with the policy that fits the target with the shortest step.

    Args:
      limit_bytes: what a step may use of a device, where it says so itself; default:
        the planner's.
      finalists: policies compiled that fit; of several the compiler's estimate decides.

    Raises:
      ConfigError: nothing fits, or the layout has no policy to choose.
      MissingExtra: the target's compiler is not installed.
    """
    policies = Policies(run, target, limit_bytes)
    say(
        f"remat.policy=fit: {gib_text(policies.most)} of a {target.text} device may be used"
    )

    tried = list[tuple[RematConfig, str]]()

    def choose(done: Sequence[CompiledLayout]) -> Candidate | None:
        fitting = [layout for layout in done if layout.fits]
        if len(fitting) == finalists or len(done) == MOST_REFUSED + finalists:
            return None
        return _next(policies, done, fitting)

    def compile(candidate: Candidate) -> CompiledLayout:
        say(
            f"compiling remat {candidate.run.remat}: by arithmetic {time_text(candidate.estimate.step_s)}"
        )
        plan = make_plan(candidate.run, target, options=options, say=say)
        compiled = CompiledLayout(candidate, plan)
        why = plan.exit_reason.partition("\n")[0]
        if plan.fits:
            why += f", {time_text(_seconds(compiled))} a step"
        tried.append((candidate.run.remat, why))
        say(f"  {why}")
        if plan.fits is None:
            raise ConfigError(
                f"remat.policy=fit: {plan.exit_reason}; give a policy by hand"
            )
        needed = plan.peak_bytes or 0
        if plan.fits and needed <= policies.hard:
            return compiled
        policies.correct(candidate, needed)
        return replace(compiled, plan=replace(plan, fits=False))

    done = compile_in_turn(choose, compile)
    fitting = [one for one in done if one.fits]
    if not fitting:
        raise ConfigError(_nothing_fits(policies, tried))
    winner = min(fitting, key=lambda one: (_seconds(one), one.plan.peak_bytes or 0))
    return Fitted(winner.candidate.run, winner.plan, _seconds(winner), tuple(tried))


def _next(
    policies: Policies,
    done: Sequence[CompiledLayout],
    fitting: Sequence[CompiledLayout],
) -> Candidate | None:
    """Chooses what to compile: the best of all, then the search's own."""
    tried = [layout.candidate.run.remat for layout in done]
    best = min(map(_seconds, fitting), default=math.inf)
    fresh = (
        layout
        for layout in policies.best()
        if layout.run.remat not in tried and layout.estimate.bound_s < best
    )
    return next((c for c in fresh if not fitting or c.run.remat in _PLAIN), None)


def _seconds(layout: CompiledLayout) -> float:
    """Returns the compiler's estimate, or what offloaded activations take to cross if
    that is longer.
    """
    return max(layout.seconds, layout.candidate.estimate.host)


def _nothing_fits(policies: Policies, tried: list[tuple[RematConfig, str]]) -> str:
    least = policies.least()
    said = f"; the compiler of {tried[-1][0]}: {tried[-1][1]}" if tried else ""
    return (
        f"remat.policy=fit: no policy makes the step fit {gib_text(policies.most)}: by arithmetic remat "
        f"{least.run.remat} takes least, {gib_text(least.accounted_bytes)}{said}; raise mesh.fsdp or "
        f"batch.accumulation, or see what `jaxdist plan` advises for remat.policy=full"
    )


def overrides(found: RematConfig) -> list[str]:
    """Returns a policy as on the command line."""
    plain = RematConfig("")
    return [
        f"--config.remat.{name}={value}"
        for name, value in asdict(found).items()
        if name != "fitted" and value != getattr(plain, name)
    ]
