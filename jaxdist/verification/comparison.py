"""How far a step on a layout is from the same step on one device, and how far it may
be.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.parallel.formats.format import Band
from jaxdist.parallel.precision import FORMATS, RECIPES

Arrays = dict[str, np.ndarray]  # path -> array, float64
NOISE = 1e-5  # a leaf whose gradient is this much below the largest is rounding alone


BANDS: dict[str, Band] = {
    format.name: format.band for format in (*FORMATS.values(), *RECIPES.values())
}
# A model may answer to rounding by more than a band: where a ReLU is near zero for a
# frequent input, rounding decides about its gradient. What counts then is the distance
# from float32's gradient: a layout may have this many times that of one device.
OWN_ROUNDING = 1.25


class Observed(NamedTuple):
    """What one step showed."""

    loss: float
    gradients: Arrays
    start: Arrays  # parameters before the update
    parameters: Arrays  # and after it
    initial: Any  # tree of the initial parameters
    state: Arrays = {}  # the model's own, after the update
    load: Any = None  # [L, E] of the experts


@dataclass(frozen=True)
class Result:
    """How far one layout is from one device."""

    layout: str
    precision: str
    loss_error: float
    grad_error: float
    param_error: float
    update_error: float
    init_equal: bool  # initial parameters, bit for bit
    passed: bool
    worst: str  # the leaf with the largest gradient error
    # outside the gradient band, but as near to float32 as one device
    by_rounding: bool = False
    routing: str = ""  # how tokens chose experts, see `cases.Routing`
    # each expert's load and the model's state, bit for bit; required with experts
    load_equal: bool = True


@dataclass(frozen=True)
class Report:
    """What was compared with what."""

    reference: dict[str, Any]  # device, losses by precision, parameters, optimizer
    layouts: tuple[Result, ...]
    skipped: dict[str, str]  # layout -> why it cannot be
    shrunk: tuple[str, ...]  # what was changed of the config
    not_compared: tuple[str, ...]  # leaves whose gradient is rounding alone

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.layouts)

    def to_json(self) -> dict[str, Any]:
        """Makes the report's JSON values; errors that are not finite are null."""
        values = asdict(self) | {"passed": self.passed}
        values["bands"] = {name: asdict(bands) for name, bands in BANDS.items()}
        for result in values["layouts"]:
            for key, value in result.items():
                if isinstance(value, float) and not math.isfinite(value):
                    result[key] = None
        return values


# --- comparing ------------------------------------------------------------------------


def rounding_alone(gradients: Arrays) -> set[str]:
    """Finds the leaves whose gradient is zero in exact arithmetic, judged from float32
    gradients.

    Such is the key bias of a softmax without rotary positions. What is computed for it
    is noise, so neither it nor an update that divides by its size can be the same
    twice.
    """
    largest = {name: np.abs(g).max(initial=0.0) for name, g in gradients.items()}
    top = max(largest.values())
    return {name for name, size in largest.items() if 0 < size < NOISE * top}


def compare(
    name: str,
    precision: str,
    seen: Observed,
    expected: Mapping[str, Observed],
    excluded: Collection[str],
    *,
    routing: str = "",
) -> Result:
    """Compares a layout with one device.

    Args:
      expected: what one device showed, by precision.
      excluded: leaves to leave out.
      routing: of the experts, if there are any: then each expert's load and the model's
        state are equal.
    """
    bands = BANDS[precision]
    reference = expected[precision]
    gradients = {}
    parameters = []
    updates = []
    for leaf, gradient in reference.gradients.items():
        if leaf not in excluded:
            parameter = reference.parameters[leaf]
            difference = seen.parameters[leaf] - parameter
            gradients[leaf] = _ratio(seen.gradients[leaf] - gradient, gradient, np.inf)
            parameters.append(_ratio(difference, parameter))
            updates.append(_ratio(difference, parameter - reference.start[leaf]))
    for leaf, state in reference.state.items():
        parameters.append(_ratio(seen.state[leaf] - state, state))
    worst = max(gradients, key=lambda leaf: np.nan_to_num(gradients[leaf], nan=np.inf))
    initial = reference.initial
    init_equal = jax.tree.all(jax.tree.map(np.array_equal, seen.initial, initial))
    load_equal = not routing or _same_load(seen, reference)
    # Parameters stored in bfloat16 move by roundings, so only where they end can be
    # compared.
    is_rounded = any(x.dtype != np.float32 for x in jax.tree.leaves(initial))
    outside = [leaf for leaf, error in gradients.items() if not error <= bands.gradient]
    by_rounding = False
    if outside and not is_rounded:
        exact = expected["float32"].gradients
        by_rounding = _as_near(seen, reference, exact, outside)
    loss_error = abs(seen.loss - reference.loss) / abs(reference.loss)
    param_error = _largest(parameters)
    update_error = _largest(updates)
    passed = (
        init_equal
        and load_equal
        and loss_error <= bands.loss
        and gradients[worst] <= (math.inf if by_rounding else bands.gradient)
        and param_error <= bands.parameter
        and update_error <= (math.inf if is_rounded else bands.update)
    )
    return Result(
        layout=name,
        precision=precision,
        loss_error=loss_error,
        grad_error=gradients[worst],
        param_error=param_error,
        update_error=update_error,
        init_equal=init_equal,
        passed=passed,
        worst=worst,
        by_rounding=by_rounding,
        routing=routing,
        load_equal=load_equal,
    )


def _same_load(seen: Observed, reference: Observed) -> bool:
    same = [
        np.array_equal(seen.state[leaf], state)
        for leaf, state in reference.state.items()
    ]
    return all(same) and np.array_equal(seen.load, reference.load)


def _as_near(
    seen: Observed, reference: Observed, exact: Arrays, leaves: Sequence[str]
) -> bool:
    """Checks that leaves' gradients are about as near to float32's as one device's
    are.
    """

    def distance(of: Observed, leaf: str) -> float:
        return float(np.linalg.norm(of.gradients[leaf] - exact[leaf]))

    return all(
        distance(seen, leaf) <= OWN_ROUNDING * distance(reference, leaf)
        for leaf in leaves
    )


def _ratio(
    difference: np.ndarray, reference: np.ndarray, order: float | None = None
) -> float:
    """Divides the norm of the difference by that of the reference; 0 where both are
    zero.
    """
    error = float(np.linalg.norm(difference.ravel(), order))
    size = float(np.linalg.norm(reference.ravel(), order))
    if error == 0:
        return 0.0
    return error / size if size else math.inf


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


# --- the table ------------------------------------------------------------------------

WIDTH = 40
_PRECISION_WIDTH = max(map(len, BANDS))
HEADER = (
    f"{'layout':<{WIDTH}} {'precision':<{_PRECISION_WIDTH}} {'loss':>8} {'gradients':>9} "
    f"{'parameters':>10} {'update':>8}  {'init':<9} verdict"
)


_ROUTED = {
    "given": ", routing held fixed",
    "skewed": ", tokens on a quarter of the experts",
}


def row(result: Result) -> str:
    """Writes one line of the table."""
    verdict = f"NOT EQUAL, worst gradient: {result.worst}"
    if result.passed:
        verdict = "equal *" if result.by_rounding else "equal"
        verdict += _ROUTED.get(result.routing, "")
    if not result.load_equal:
        verdict += "; loads differ"
    init = "identical" if result.init_equal else "DIFFERS"
    return (
        f"{result.layout:<{WIDTH}} {result.precision:<{_PRECISION_WIDTH}} "
        f"{result.loss_error:8.1e} {result.grad_error:9.1e} {result.param_error:10.1e} "
        f"{result.update_error:8.1e}  {init:<9} {verdict}"
    )


def summary(report: Report) -> str:
    """Writes the lines under the table: what was left out, and the verdict."""
    lines = []
    if report.not_compared:
        names = ", ".join(report.not_compared)
        lines.append(
            f"not compared, their gradient is zero in exact arithmetic: {names}"
        )
    if any(result.by_rounding and result.passed for result in report.layouts):
        lines.append(
            "* the model answers to rounding: "
            "its gradients are as near to float32's as one device's"
        )
    if any(result.routing == "given" for result in report.layouts):
        lines.append(
            "routing held fixed: each token's experts are drawn, since rounding to "
            "bfloat16 decides between nearly equal ones; what routers choose is "
            "compared in float32"
        )
    count = len(report.layouts)
    wrong = sum(not result.passed for result in report.layouts)
    if wrong:
        lines.append(f"{wrong} of {count} rows are NOT equal to one device")
    else:
        lines.append(f"all {count} rows equal one device")
    return "\n".join(lines)
