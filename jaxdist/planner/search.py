"""The search for the best layout of a run on a target.

Arithmetic ranks every legal layout and rules out those that cannot fit. The compiler
checks the most promising ones. The winner is always a compiled layout.
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

from jaxdist.parallel.axes import EXPERT
from jaxdist.planner import layouts, memory, on_target
from jaxdist.planner.compiler import CompileOptions, Say
from jaxdist.planner.document import CANNOT_TELL, DOES_NOT_FIT, FITS, Plan
from jaxdist.planner.layouts import Candidate, CompiledLayout
from jaxdist.planner.plan import make_plan
from jaxdist.planner.show import new_table, print_lines
from jaxdist.planner.targets import Target
from jaxdist.planner.trials import compile_in_turn
from jaxdist.telemetry.units import GIB, gib_text, time_text
from jaxdist.trainer.run_config import RunConfig

TIE = 0.10  # relative difference of step times below which two meshes tie
# the same for two variants of one mesh, whose estimates share their errors
VARIANT_TIE = 0.02
# most compiled layouts on the mesh axes of the fastest so far; other axes get one
MAX_OF_LEADING_AXES = 2
# most layouts on each set of axes that the search keeps, if they fit by arithmetic
MAX_FITTING_OF_AXES = 24
# most layouts that the compiler refuses and that do not count as finalists
MAX_REFUSED = 2
# slowest layout that the search keeps, by arithmetic: a multiple of the fastest
MAX_SLOWDOWN = 1.5
MINUTES = 18.0  # wall time of a search


@dataclass(frozen=True)
class Ranking:
    """The result of a search: compiled layouts, the best first, and some others."""

    run: RunConfig
    target: Target
    compiled: Sequence[CompiledLayout]
    # the most promising layouts that were not compiled, each with the reason
    others: Sequence[tuple[Candidate, str]]
    # "counts" of candidates by outcome, number of meshes by reason that they are
    # "illegal", the reason that compiling "stopped", and the search's "seconds" and
    # "cpu_seconds"
    summary: Mapping[str, Any]

    @property
    def winner(self) -> Plan | None:
        """The best plan that was compiled and fits; None if none does."""
        return next((layout.plan for layout in self.compiled if layout.plan.fits), None)

    @property
    def exit_code(self) -> int:
        """The exit code of `plan --search`."""
        if self.winner:
            return FITS
        if any(layout.plan.fits is False for layout in self.compiled):
            return DOES_NOT_FIT
        return CANNOT_TELL

    def to_json(self) -> dict[str, Any]:
        """Converts the ranking to JSON, with the winner's plan and overrides."""
        best = self.winner
        overrides = self.compiled[0].candidate.overrides(self.run) if best else []
        not_compiled = [
            self._row(candidate) | {"why": why} for candidate, why in self.others
        ]
        return {
            "target": self.target.text,
            "exit_code": self.exit_code,
            "winner": best and best.to_json(),
            "overrides": overrides,
            "ranking": [self._compiled_row(layout) for layout in self.compiled],
            "not_compiled": not_compiled,
            **self.summary,
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        """Converts a candidate with its arithmetic to JSON."""
        estimate = {
            "step_s": candidate.estimate.step_s,
            "bound_s": candidate.estimate.bound_s,
            "peak_bytes": candidate.accounted_bytes,
        }
        return {
            "layout": candidate.text,
            "overrides": candidate.overrides(self.run),
            "arithmetic": estimate | asdict(candidate.estimate),
        }

    def _compiled_row(self, layout: CompiledLayout) -> dict[str, Any]:
        """Converts a compiled layout to JSON."""
        plan = layout.plan
        return self._row(layout.candidate) | {
            "band_s": plan.time.band_s,
            "waterfall": plan.time.waterfall,
            "mfu_causal": plan.time.mfu_causal,
            "tokens_per_s_per_chip": plan.time.tokens_per_s_per_chip,
            "fits": plan.fits,
            "peak_bytes": plan.peak_bytes,
            "capacity_bytes": plan.capacity_bytes,
            "step_s": layout.seconds,
            "why": why_not_best(layout, self.compiled[0]),
            "compile_cpu_s": plan.compiled and plan.compiled.cpu_seconds,
        }


def search(
    run: RunConfig,
    target: Target,
    *,
    options: CompileOptions | None = None,
    finalists: int = 5,
    minutes: float = MINUTES,
    expert_load: float = 1.0,
    say: Say = lambda line: None,
) -> Ranking:
    """Ranks the layouts of a run on a target.

    Args:
      run: the config; the search overrides its layout.
      target: the hardware.
      options: compiler flags and limits.
      finalists: most layouts to compile. A model with experts may get one more, so that
        layouts with and without the expert axis are compared.
      minutes: wall time of the search. No compilation starts that would probably end
        later.
      expert_load: see `make_plan`.
      say: called with each stage of the work as it begins.

    Raises:
      ConfigError: no layout is legal.
      MissingExtra: the target's compiler is not installed.
    """
    began = time.monotonic()
    cpu = _cpu_seconds()
    say("estimating layouts by arithmetic")
    meshes, illegal = on_target.legal_meshes(run, target)
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
    compiled_ids = {id(layout.candidate) for layout in ranked}
    others = [
        (candidate, _why_not_compiled(candidate, ranked))
        for candidate in fitting
        if id(candidate) not in compiled_ids
    ]
    summary = {
        "counts": counts,
        "illegal": illegal,
        "stopped": finals.stopped,
        "seconds": time.monotonic() - began,
        "cpu_seconds": _cpu_seconds() - cpu,
    }
    return Ranking(
        run=run,
        target=target,
        compiled=ranked,
        others=others[: 2 * finalists],
        summary=summary,
    )


def _other_kind(
    fitting: Sequence[Candidate], done: Sequence[CompiledLayout]
) -> Candidate | None:
    """Finds the best layout of the kind that was not compiled.

    A layout's kind is whether it splits experts over devices. None if both kinds were
    compiled, or if no candidate has the other kind.
    """
    kinds = {EXPERT in layout.candidate.axes for layout in done}
    if len(kinds) != 1:
        return None
    for candidate in fitting:
        if (EXPERT in candidate.axes) not in kinds:
            return candidate
    return None


def _cpu_seconds() -> float:
    """Reads the CPU time of this process and of its children that ended."""
    return sum(os.times()[:4])


def _select_fitting(
    candidates: Sequence[Candidate], target: Target
) -> tuple[list[Candidate], dict[str, int]]:
    """Selects the candidates that fit by arithmetic, or that exceed the limit a little.

    The arithmetic may be too high, so the compiler judges the latter.

    Returns:
      The candidates, the fastest first, and the number of candidates by outcome. If
      none fits, the candidates are the two that need least memory.
    """
    most = target.freely_used(target.usable_bytes or math.inf)
    fitting = list[Candidate]()
    nearly = 0
    too_large = 0
    too_slow = 0
    too_many = 0
    kinds = Counter[tuple[str, ...]]()
    possible = sorted(
        (candidate for candidate in candidates if candidate.state_bytes <= most),
        key=_by_arithmetic,
    )
    for place, candidate in enumerate(possible):
        if (
            fitting
            and candidate.estimate.step_s > MAX_SLOWDOWN * fitting[0].estimate.step_s
        ):
            too_slow = len(possible) - place
            break
        if kinds[candidate.axes] == MAX_FITTING_OF_AXES:
            too_many += 1
            continue
        if not memory.may_fit(candidate.accounted_bytes, most):
            too_large += 1
            continue
        nearly += candidate.accounted_bytes > most
        kinds[candidate.axes] += 1
        fitting.append(candidate)
    counts = {
        "layouts": len(candidates),
        "with too much state": len(candidates) - len(possible),
        "with too many activations": too_large,
        f"slower than {MAX_SLOWDOWN} x the fastest": too_slow,
        f"behind {MAX_FITTING_OF_AXES} on the same axes": too_many,
        f"at most {memory.OVERESTIMATE:.0%} too large": nearly,
        "fit": len(fitting) - nearly,
    }
    if not fitting:
        least = min(candidate.state_bytes for candidate in candidates)
        near = (
            candidate
            for candidate in candidates
            if candidate.state_bytes <= 1.1 * least
        )
        fitting = sorted(near, key=attrgetter("accounted_bytes"))[:2]
    return fitting, counts


def _by_arithmetic(candidate: Candidate) -> tuple[float, int, int]:
    """Makes the sort key: the faster, the simpler and the smaller come first."""
    return candidate.estimate.step_s, candidate.complexity, candidate.state_bytes


class _Finals:
    """The compilation of the most promising candidates.

    Args:
      fitting: candidates that may fit by arithmetic, the fastest first.
      target: the hardware.
      options: compiler flags and limits.
      finalists: most layouts to compile.
      ends: `time.monotonic()` at which the search should be over.
      expert_load: see `make_plan`.
      say: called with each stage of the work.
    """

    def __init__(
        self,
        fitting: Sequence[Candidate],
        target: Target,
        options: CompileOptions,
        *,
        finalists: int,
        ends: float,
        expert_load: float,
        say: Say,
    ) -> None:
        self.fitting = fitting
        self.target = target
        self.options = options
        self.finalists = finalists
        self.ends = ends
        self.expert_load = expert_load
        self.say = say
        self.stopped = ""  # the reason that no more candidates are compiled
        self.longest = 0.0  # seconds of the longest compilation so far

    def has_time(self) -> bool:
        """Predicts whether another compilation would end in time."""
        return time.monotonic() + self.longest < self.ends

    def choose(self, done: Sequence[CompiledLayout]) -> Candidate | None:
        """Chooses the next candidate, or sets `stopped` and returns None.

        Few layouts are compiled on the same mesh axes, so that different ones are seen.
        """
        refused = sum(layout.fits is False for layout in done)
        if len(done) - min(refused, MAX_REFUSED) >= self.finalists:
            self.stopped = f"{self.finalists} were compiled"
            return None
        hopeful = self._hopeful(done)
        fits = _fitting(done)
        leading_axes = fits[0].candidate.axes if fits else None
        compiled_on = Counter(layout.candidate.axes for layout in fits)

        def is_new(candidate: Candidate) -> bool:
            """Checks whether few enough layouts on its axes were compiled."""
            most = MAX_OF_LEADING_AXES if candidate.axes == leading_axes else 1
            return compiled_on[candidate.axes] < most

        fresh = [candidate for candidate in hopeful if is_new(candidate)]
        if not hopeful:
            self.stopped = "no other layout can be faster"
        elif not fresh:
            self.stopped = "each set of axes was tried"
        elif not self.has_time():
            self.stopped = "the time was up"
        else:
            return min(fresh, key=_expected(fits))
        return None

    def _hopeful(self, done: Sequence[CompiledLayout]) -> list[Candidate]:
        """Lists candidates that may be the fastest that fits, judged by the results.

        A candidate must be possibly faster than each layout that fits, and smaller than
        each that does not fit.
        """
        tried = [layout.candidate for layout in done]
        fastest = min(
            (layout.seconds for layout in done if layout.fits), default=math.inf
        )
        refused = (
            layout.candidate.accounted_bytes for layout in done if layout.fits is False
        )
        most = min(refused, default=math.inf)
        return [
            candidate
            for candidate in self.fitting
            if candidate not in tried
            and candidate.estimate.bound_s < fastest
            and candidate.accounted_bytes < most
        ]

    def compile(self, candidate: Candidate) -> CompiledLayout:
        """Compiles a candidate within the time that is left, at least a minute."""
        began = time.monotonic()
        self.say(
            f"compiling {candidate.text}: by arithmetic {time_text(candidate.estimate.step_s)}"
        )
        cap = min(self.options.timeout_s, max(self.ends - began, 60.0))
        options = replace(self.options, timeout_s=cap)
        plan = make_plan(
            candidate.run,
            self.target,
            options=options,
            expert_load=self.expert_load,
            say=self.say,
        )
        self.longest = max(self.longest, time.monotonic() - began)
        compiled = CompiledLayout(candidate, plan)
        self.say(f"  {plan.exit_reason}; {time_text(compiled.seconds)}")
        return compiled


def _fitting(done: Sequence[CompiledLayout]) -> list[CompiledLayout]:
    """Lists the layouts that fit, the fastest first."""
    return sorted((layout for layout in done if layout.fits), key=attrgetter("seconds"))


def _expected(fits: Sequence[CompiledLayout]) -> Callable[[Candidate], float]:
    """Makes a function that predicts a candidate's step time from compiled layouts.

    Arithmetic misjudges each remat policy by its own factor. The factor of a policy is
    the smallest ratio of compiled to estimated time among the layouts that have it. A
    policy that was not compiled gets the smallest factor of all.
    """
    factors: dict[str, float] = {}
    for layout in fits:
        policy = layout.candidate.run.remat.policy
        ratio = layout.seconds / layout.candidate.estimate.step_s
        factors[policy] = min(ratio, factors.get(policy, math.inf))
    smallest = min(factors.values(), default=1.0)

    def expected(candidate: Candidate) -> float:
        factor = factors.get(candidate.run.remat.policy, smallest)
        return factor * candidate.estimate.step_s

    return expected


def _ranked(done: Sequence[CompiledLayout]) -> list[CompiledLayout]:
    """Ranks compiled layouts.

    The winner comes first. Then come the layouts that fit by time, those that do not
    fit by size, and those without an answer from the compiler. Among layouts that tie
    with the fastest, the simplest wins. Among equally simple ones, the smallest of
    those that tie as variants wins.
    """
    fits = _fitting(done)
    too_large = [layout for layout in done if not layout.fits]
    too_large.sort(
        key=lambda layout: (layout.fits is None, layout.plan.peak_bytes or 0)
    )
    if fits:
        ties = [
            layout for layout in fits if layout.seconds <= (1 + TIE) * fits[0].seconds
        ]
        least = min(layout.candidate.complexity for layout in ties)
        simple = [layout for layout in ties if layout.candidate.complexity == least]
        equal = [
            layout
            for layout in simple
            if layout.seconds <= (1 + VARIANT_TIE) * simple[0].seconds
        ]
        best = min(equal, key=lambda layout: layout.plan.peak_bytes or 0)
        fits = [best, *(layout for layout in fits if layout is not best)]
    return [*fits, *too_large]


def _is_tie(layout: CompiledLayout, best: CompiledLayout) -> bool:
    """Checks whether the estimates are too close to rank a layout behind the best."""
    same_mesh = layout.candidate.shape == best.candidate.shape
    tolerance = VARIANT_TIE if same_mesh else TIE
    return layout.seconds / best.seconds <= 1 + tolerance


def why_not_best(layout: CompiledLayout, best: CompiledLayout) -> str:
    """Explains in a few words why a layout is not the best."""
    plan = layout.plan
    if plan.fits is None or not best.plan.fits:
        return plan.exit_reason.partition("\n")[0]
    if not plan.fits:
        over = (plan.peak_bytes or 0) - (plan.capacity_bytes or 0)
        return f"does not fit: {gib_text(over)} too much"
    if layout is best:
        return "the best"
    ratio = layout.seconds / best.seconds
    text = f"x {ratio:.2f}"
    best_parts = best.plan.time.waterfall
    if plan.time.waterfall and best_parts:
        differences = {
            name: seconds - best_parts[name]
            for name, seconds in plan.time.waterfall.items()
        }
        extreme = max if ratio >= 1 else min
        name = extreme(differences, key=differences.__getitem__)
        sign = "-" if differences[name] < 0 else "+"
        text += f": {sign}{time_text(abs(differences[name]))} {name}"
    if not _is_tie(layout, best):
        return text
    if layout.candidate.complexity > best.candidate.complexity:
        return f"a tie ({text}), but more to set"
    return f"a tie ({text}), but no smaller"


def _why_not_compiled(candidate: Candidate, ranked: Sequence[CompiledLayout]) -> str:
    """Explains in a few words why a candidate was not compiled."""
    fits = [other.seconds for other in ranked if other.fits]
    if fits and candidate.estimate.bound_s >= min(fits):
        return "cannot be faster"
    same_axes = sum(other.candidate.axes == candidate.axes for other in ranked)
    if same_axes >= MAX_OF_LEADING_AXES:
        return f"{same_axes} on these axes were compiled"
    return "less promising"


def show(
    ranking: Mapping[str, Any], console: Console, base: str = "--config NAME"
) -> None:
    """Prints the JSON of a ranking.

    Args:
      ranking: the result of `Ranking.to_json`.
      console: where to print.
      base: flags that name the config and the overrides that were searched.
    """
    table = new_table("", "layout", ">step", ">peak GiB", ">arithmetic", ">GiB", "why")
    for place, row in enumerate([*ranking["ranking"], *ranking["not_compiled"][:5]], 1):
        compiled = ("-", row["layout"], "", "")
        style = "dim"
        if "fits" in row:  # the layout was compiled
            size = f"{(row['peak_bytes'] or 0) / GIB:.1f}"
            compiled = (str(place), row["layout"], time_text(row["step_s"]), size)
            style = ""
        estimate = row["arithmetic"]
        expected = time_text(estimate["step_s"]), f"{estimate['peak_bytes'] / GIB:.1f}"
        table.add_row(*compiled, *expected, Text(row["why"]), style=style)
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
