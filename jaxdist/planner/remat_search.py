"""The search for the remat policy that fits a target with the shortest step.

Arithmetic ranks all policies (`policies`). The compiler checks the best ones; if it
needs more memory than the arithmetic says, the arithmetic is corrected.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.parallel.remat import RematConfig
from jaxdist.planner import layouts
from jaxdist.planner.compiler import CompileOptions, Say
from jaxdist.planner.document import Plan
from jaxdist.planner.layouts import Candidate, CompiledLayout
from jaxdist.planner.plan import make_plan
from jaxdist.planner.policies import Policies
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import compile_in_turn
from jaxdist.telemetry.units import gib_text, time_text
from jaxdist.trainer.run_config import RunConfig

MOST_REFUSED = 4  # most compilations of steps that do not fit

_PLAIN = tuple(map(RematConfig, layouts.REMAT))


@dataclass(frozen=True)
class Fitted:
    """The result of `fit`."""

    run: RunConfig  # the config with the policy
    plan: Plan  # its compiled plan
    seconds: float  # the step time that the policy was ranked by
    # each policy that was compiled, and the outcome
    tried: tuple[tuple[RematConfig, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON: policy as overrides, step time, all compiled policies."""
        tried = [{"remat": str(remat), "why": why} for remat, why in self.tried]
        return {
            "overrides": overrides(self.run.remat),
            "step_s": self.seconds,
            "tried": tried,
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines to print."""
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
    """Finds the policy that fits a target with the shortest step.

    Args:
      run: the config.
      target: the hardware.
      limit_bytes: bytes that a step may use of a device, if the device reports them;
        default: the planner's limit.
      finalists: number of fitting policies to compile; the compiler's estimate decides
        between them.
      options: compiler flags and limits.
      say: called with each stage of the work.

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
        """Chooses the next policy until enough fit or too many do not."""
        fitting = [layout for layout in done if layout.fits]
        if len(fitting) == finalists or len(done) == MOST_REFUSED + finalists:
            return None
        return _next(policies, done, fitting)

    def compile(candidate: Candidate) -> CompiledLayout:
        """Compiles a policy, and corrects the arithmetic if it does not fit."""
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
                f"remat.policy=fit: {plan.exit_reason}; set a policy by hand"
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
    """Chooses the next policy to compile.

    It is the best by arithmetic until one fits, and then the best of the policies that
    a search of layouts uses. If none fits by arithmetic, it is the smallest one, if the
    arithmetic may be too high.
    """
    tried = [layout.candidate.run.remat for layout in done]
    fastest = min(map(_seconds, fitting), default=math.inf)
    for candidate in policies.best():
        policy = candidate.run.remat
        if policy in tried or candidate.estimate.bound_s >= fastest:
            continue
        if not fitting or policy in _PLAIN:
            return candidate
    least = policies.least()
    return least if not done and policies.may_fit(least) else None


def _seconds(layout: CompiledLayout) -> float:
    """Estimates the step time: the compiler's, or that of offloading if it is longer."""
    return max(layout.seconds, layout.candidate.estimate.host)


def _nothing_fits(policies: Policies, tried: list[tuple[RematConfig, str]]) -> str:
    """Formats the error if no policy fits."""
    least = policies.least()
    compiled = ""
    if tried:
        policy, outcome = tried[-1]
        compiled = f"; the compiler's answer for {policy}: {outcome}"
    return (
        f"remat.policy=fit: no policy makes the step fit {gib_text(policies.most)}: by arithmetic remat "
        f"{least.run.remat} takes least, {gib_text(least.accounted_bytes)}{compiled}; raise mesh.fsdp or "
        f"batch.accumulation, or see what `jaxdist plan` advises for remat.policy=full"
    )


def overrides(policy: RematConfig) -> list[str]:
    """Formats a policy as flags of the command line."""
    default = RematConfig("")
    return [
        f"--config.remat.{name}={value}"
        for name, value in asdict(policy).items()
        if name != "fitted" and value != getattr(default, name)
    ]
