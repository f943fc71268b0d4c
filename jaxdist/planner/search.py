"""The best layout of a run on a target: every legal one by arithmetic, the promising
ones by the compiler.

Arithmetic orders the layouts and rules out what cannot fit; what is called the best was
compiled.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxdist.planner import layouts
from jaxdist.planner.arithmetic import EXPERT
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.document import CANNOT_TELL, DOES_NOT_FIT, FITS, Plan
from jaxdist.planner.layouts import Candidate
from jaxdist.planner.plan import make_plan
from jaxdist.planner.show import new_table, print_lines
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import Compiled, compile_in_turn
from jaxdist.telemetry.units import GIB, gib_text, time_text
from jaxdist.trainer.run_config import RunConfig

TIE = 0.10  # estimates that differ by less do not rank two meshes,
VARIANT_TIE = 0.02  # but they do rank variants of one, which share their errors
# finalists on the mesh axes of the fastest so far, at most; on other axes one
MAX_OF_LEADING_AXES = 2
MAX_FITTING_OF_AXES = 24  # of each set of axes that fit, by arithmetic
# times the fastest that fits: what arithmetic says is slower is not looked at further
MAX_SLOWDOWN = 1.5


@dataclass(frozen=True)
class Ranking:
    """What was found: compiled layouts, the best first, and why the others are not
    among them.
    """

    run: RunConfig
    target: Target
    compiled: Sequence[Compiled]
    # the most promising that were not compiled, and why
    others: Sequence[tuple[Candidate, str]]
    # counts: candidates by what became of them; illegal: reason -> meshes; stopped: why
    # no more compiles; seconds and cpu_seconds of the search.
    summary: Mapping[str, Any]

    @property
    def winner(self) -> Plan | None:
        """The best plan: compiled, and it fits; None if none does."""
        return next((one.plan for one in self.compiled if one.plan.fits), None)

    @property
    def exit_code(self) -> int:
        if self.winner:
            return FITS
        return (
            DOES_NOT_FIT
            if any(one.plan.fits is False for one in self.compiled)
            else CANNOT_TELL
        )

    def to_json(self) -> dict[str, Any]:
        best = self.winner
        return {
            "target": self.target.text,
            "exit_code": self.exit_code,
            "winner": best and best.to_json(),
            "overrides": self.compiled[0].layout.overrides(self.run) if best else [],
            "ranking": [self._compiled_row(one) for one in self.compiled],
            "not_compiled": [self._row(one) | {"why": why} for one, why in self.others],
            **self.summary,
        }

    def _row(self, one: Candidate) -> dict[str, Any]:
        guess = {
            "step_s": one.estimate.step_s,
            "bound_s": one.estimate.bound_s,
            "peak_bytes": one.accounted_bytes,
        }
        return {
            "layout": one.text,
            "overrides": one.overrides(self.run),
            "arithmetic": guess | asdict(one.estimate),
        }

    def _compiled_row(self, one: Compiled) -> dict[str, Any]:
        plan = one.plan
        return self._row(one.layout) | {
            "band_s": plan.time.band_s,
            "waterfall": plan.time.waterfall,
            "mfu_causal": plan.time.mfu_causal,
            "tokens_per_s_per_chip": plan.time.tokens_per_s_per_chip,
            "fits": plan.fits,
            "peak_bytes": plan.peak_bytes,
            "capacity_bytes": plan.capacity_bytes,
            "step_s": one.seconds,
            "why": why_not_best(one, self.compiled[0]),
            "compile_cpu_s": plan.compiled and plan.compiled.cpu_seconds,
        }


def search(
    run: RunConfig,
    target: Target,
    *,
    options: CompileOptions | None = None,
    finalists: int = 5,
    minutes: float = 18.0,
    expert_load: float = 1.0,
    say: Callable[[str], None] = lambda line: None,
) -> Ranking:
    """Returns the run's layouts on a target, ranked.

    Args:
      finalists: compiles at most; with experts one more, so that layouts with and
        without their axis are compared.
      minutes: of wall time; no compile begins that would probably end after them.
      expert_load: see `make_plan`.

    Raises:
      ConfigError: no layout is legal.
      MissingExtra: the target's compiler is not installed.
    """
    began = time.monotonic()
    cpu = _cpu_seconds()
    meshes, illegal = layouts.legal_meshes(run, target)
    candidates = list(layouts.candidates(meshes, target, expert_load))
    fitting, counts = _select_fitting(candidates, target)
    say("; ".join(f"{n} {name}" for name, n in counts.items()))
    finals = _Finals(
        fitting,
        target,
        options or CompileOptions(),
        finalists=finalists,
        ends=began + 60 * minutes,
        expert_load=expert_load,
        say=say,
    )
    done = compile_in_turn(finals.choose, finals.compile)
    other = _other_kind(fitting, done)
    if other and finals.has_time():
        done.append(finals.compile(other))
    ranked = _ranked(done)
    tried = {id(one.layout) for one in ranked}
    others = [
        (one, _why_not_compiled(one, ranked)) for one in fitting if id(one) not in tried
    ]
    summary = {
        "counts": counts,
        "illegal": illegal,
        "stopped": finals.stopped,
        "seconds": time.monotonic() - began,
        "cpu_seconds": _cpu_seconds() - cpu,
    }
    return Ranking(run, target, ranked, others[: 2 * finalists], summary)


def _other_kind(
    fitting: Sequence[Candidate], done: Sequence[Compiled]
) -> Candidate | None:
    """Returns the best layout without experts' axis where only such with it were
    compiled, and vice versa.
    """
    kinds = {EXPERT in one.layout.axes for one in done}
    if len(kinds) != 1:
        return None
    others = (one for one in fitting if (EXPERT in one.axes) not in kinds)
    return next(others, None)


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children that ended."""
    return sum(os.times()[:4])


def _select_fitting(
    candidates: Sequence[Candidate], target: Target
) -> tuple[list[Candidate], dict]:
    """Returns the candidates that fit by arithmetic, the fastest first, and counts.

    If none does: the two that come nearest.
    """
    most = target.freely_used(target.usable_bytes or math.inf)
    fitting = list[Candidate]()
    larger = late = passed = 0
    kinds = Counter[tuple[str, ...]]()
    possible = sorted(
        (one for one in candidates if one.state_bytes <= most), key=_by_arithmetic
    )
    for place, one in enumerate(possible):
        if fitting and one.estimate.step_s > MAX_SLOWDOWN * fitting[0].estimate.step_s:
            late = len(possible) - place
            break
        if kinds[one.axes] == MAX_FITTING_OF_AXES:
            passed += 1
            continue
        if one.accounted_bytes > most:
            larger += 1
        else:
            kinds[one.axes] += 1
            fitting.append(one)
    counts = {
        "layouts": len(candidates),
        "with too much state": len(candidates) - len(possible),
        "with too many activations": larger,
        f"slower than {MAX_SLOWDOWN} x the fastest": late,
        f"behind {MAX_FITTING_OF_AXES} on the same axes": passed,
        "fit": len(fitting),
    }
    if not fitting:
        least = min(one.state_bytes for one in candidates)
        near = (one for one in candidates if one.state_bytes <= 1.1 * least)
        fitting = sorted(near, key=attrgetter("accounted_bytes"))[:2]
    return fitting, counts


def _by_arithmetic(one: Candidate) -> tuple:
    return one.estimate.step_s, one.complexity, one.state_bytes


class _Finals:
    """Compiles candidates until time, number or hope is used up."""

    def __init__(
        self,
        fitting: Sequence[Candidate],
        target: Target,
        options: CompileOptions,
        *,
        finalists: int,
        ends: float,
        expert_load: float,
        say: Callable[[str], None],
    ) -> None:
        self.fitting = fitting
        self.target = target
        self.options = options
        self.finalists = finalists
        self.ends = ends
        self.expert_load = expert_load
        self.say = say
        self.stopped = ""  # why no more are compiled
        self.longest = 0.0

    def has_time(self) -> bool:
        """Says whether another may be compiled before the end."""
        return time.monotonic() + self.longest < self.ends

    def choose(self, done: Sequence[Compiled]) -> Candidate | None:
        """Chooses the most promising candidate, few of a kind; or sets `stopped`."""
        if len(done) >= self.finalists:
            self.stopped = f"{self.finalists} were compiled"
            return None
        hopeful = self._hopeful(done)
        fits = _fitting(done)
        most_alike = {fits[0].layout.axes: MAX_OF_LEADING_AXES} if fits else {}
        kinds = Counter(one.layout.axes for one in fits)
        fresh = [
            one for one in hopeful if kinds[one.axes] < most_alike.get(one.axes, 1)
        ]
        if not hopeful:
            self.stopped = "nothing else can be faster"
        elif not fresh:
            self.stopped = "each set of axes was tried"
        elif not self.has_time():
            self.stopped = "the time was up"
        else:
            return min(fresh, key=_expected(fits))
        return None

    def _hopeful(self, done: Sequence[Compiled]) -> list[Candidate]:
        """Lists what may be faster than what fits, and is smaller than what does
        not.
        """
        tried = [one.layout for one in done]
        fastest = min((one.seconds for one in done if one.fits), default=math.inf)
        refused = (one.layout.accounted_bytes for one in done if one.fits is False)
        most = min(refused, default=math.inf)
        return [
            one
            for one in self.fitting
            if one not in tried
            and one.estimate.bound_s < fastest
            and one.accounted_bytes < most
        ]

    def compile(self, one: Candidate) -> Compiled:
        """Compiles a candidate, for as long as there is time."""
        began = time.monotonic()
        self.say(
            f"compiling {one.text}: by arithmetic {time_text(one.estimate.step_s)}"
        )
        cap = min(self.options.timeout_s, max(self.ends - began, 60.0))
        options = replace(self.options, timeout_s=cap)
        plan = make_plan(
            one.run, self.target, options=options, expert_load=self.expert_load
        )
        self.longest = max(self.longest, time.monotonic() - began)
        compiled = Compiled(one, plan)
        self.say(f"  {plan.exit_reason}; {time_text(compiled.seconds)}")
        return compiled


def _fitting(done: Sequence[Compiled]) -> list[Compiled]:
    """Lists what fits, the fastest first."""
    return sorted((one for one in done if one.fits), key=attrgetter("seconds"))


def _expected(fits: Sequence[Compiled]) -> Callable[[Candidate], float]:
    """Corrects estimates of steps by what the compiler said of their remat policies.

    What a policy really costs shows on the best layout that has it.
    """
    cost: dict[str, float] = {}
    for one in fits:
        policy = one.layout.run.remat.policy
        ratio = one.seconds / one.layout.estimate.step_s
        cost[policy] = min(ratio, cost.get(policy, math.inf))
    usual = min(cost.values(), default=1.0)
    return lambda one: cost.get(one.run.remat.policy, usual) * one.estimate.step_s


def _ranked(done: Sequence[Compiled]) -> list[Compiled]:
    """Returns the winner, what fits by time, what does not by size, then what nobody
    can tell.

    Among ties the one with least to set wins; among its like the fastest, or the
    smallest of equals.
    """
    fits = _fitting(done)
    rest = [one for one in done if not one.fits]
    rest.sort(key=lambda one: (one.fits is None, one.plan.peak_bytes or 0))
    if fits:
        ties = [one for one in fits if one.seconds <= (1 + TIE) * fits[0].seconds]
        least = min(one.layout.complexity for one in ties)
        simple = [one for one in ties if one.layout.complexity == least]
        equal = [
            one
            for one in simple
            if one.seconds <= (1 + VARIANT_TIE) * simple[0].seconds
        ]
        best = min(equal, key=lambda one: one.plan.peak_bytes or 0)
        fits = [best, *(one for one in fits if one is not best)]
    return [*fits, *rest]


def _is_tie(one: Compiled, best: Compiled) -> bool:
    alike = one.layout.shape == best.layout.shape
    return one.seconds / best.seconds <= 1 + (VARIANT_TIE if alike else TIE)


def why_not_best(one: Compiled, best: Compiled) -> str:
    """Says why it is not the best."""
    plan = one.plan
    if plan.fits is None or not best.plan.fits:
        return plan.exit_reason.partition("\n")[0]
    if not plan.fits:
        over = (plan.peak_bytes or 0) - (plan.capacity_bytes or 0)
        return f"does not fit: {gib_text(over)} too much"
    if one is best:
        return "the best"
    ratio = one.seconds / best.seconds
    text = f"x {ratio:.2f}"
    parts = best.plan.time.waterfall
    if plan.time.waterfall and parts:
        more = {name: s - parts[name] for name, s in plan.time.waterfall.items()}
        name = (max if ratio >= 1 else min)(more, key=more.__getitem__)
        sign = "-" if more[name] < 0 else "+"
        text += f": {sign}{time_text(abs(more[name]))} {name}"
    if not _is_tie(one, best):
        return text
    simpler = one.layout.complexity > best.layout.complexity
    return f"a tie ({text}), but {'more to set' if simpler else 'no smaller'}"


def _why_not_compiled(one: Candidate, ranked: Sequence[Compiled]) -> str:
    fits = [other.seconds for other in ranked if other.fits]
    if fits and one.estimate.bound_s >= min(fits):
        return "cannot be faster"
    alike = sum(other.layout.axes == one.axes for other in ranked)
    if alike >= MAX_OF_LEADING_AXES:
        return f"{alike} on these axes were compiled"
    return "less promising"


def show(
    ranking: Mapping[str, Any], console: Console, base: str = "--config NAME"
) -> None:
    """Prints a ranking's JSON; `base` is what was searched: the config and its
    overrides.
    """
    table = new_table("", "layout", ">step", ">peak GiB", ">arithmetic", ">GiB", "why")
    for place, row in enumerate([*ranking["ranking"], *ranking["not_compiled"][:5]], 1):
        guess = row["arithmetic"]
        measured = ("-", row["layout"], "", "")
        style = "dim"
        if "fits" in row:  # compiled
            size = f"{(row['peak_bytes'] or 0) / GIB:.1f}"
            measured = (str(place), row["layout"], time_text(row["step_s"]), size)
            style = ""
        expected = time_text(guess["step_s"]), f"{guess['peak_bytes'] / GIB:.1f}"
        table.add_row(*measured, *expected, Text(row["why"]), style=style)
    console.print(table, highlight=False)
    if ranking["winner"]:
        words = (f"--config.{word}" for word in ranking["overrides"])
        verdict = " ".join(["python -m jaxdist.train", base, *words])
    elif ranking["exit_code"] == CANNOT_TELL:
        verdict = "CANNOT TELL"
    else:
        verdict = "NO LAYOUT FITS; the first is nearest"
    lines = [
        "; ".join(f"{n} {name}" for name, n in ranking["counts"].items()),
        f"compiled until {ranking['stopped']}",
        *(
            f"not legal, {n} meshes: {reason}"
            for reason, n in ranking["illegal"].items()
        ),
        verdict,
    ]
    print_lines(console, lines)
