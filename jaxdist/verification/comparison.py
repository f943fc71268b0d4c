"""Comparison of a step on a layout with the same step on one device."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.parallel.formats.format import Band
from jaxdist.parallel.precision import FORMATS, RECIPES

Arrays = dict[str, np.ndarray]  # path -> array, float64
# ratio to the largest gradient below which a leaf's gradient is only rounding noise
NOISE = 1e-5


# largest differences that rounding explains, by precision
BANDS: dict[str, Band] = {
    format.name: format.band for format in (*FORMATS.values(), *RECIPES.values())
}
# A model may amplify rounding beyond a band: if a ReLU is near zero for a frequent
# input, rounding decides its gradient. Then the distance from the float32 gradient
# decides: a layout's may be this many times as large as that of one device.
ROUNDING_FACTOR = 1.25
# The distance of a leaf with few numbers is a small sample of rounding errors: two
# devices that round independently differ in it. The logarithm of the ratio of two such
# distances has a standard deviation of 1 / sqrt(n) for n errors. A single leaf may be
# farther away by this many of them; all leaves together may not.
SAMPLING_DEVIATIONS = 3.0


class Observed(NamedTuple):
    """The results of one step."""

    loss: float
    gradients: Arrays
    start: Arrays  # parameters before the update
    parameters: Arrays  # parameters after the update
    initial: Any  # tree of the initial parameters
    state: Arrays = {}  # the model's state after the update
    load: Any = None  # [L, E] load of the experts


@dataclass(frozen=True)
class Result:
    """The differences between one layout and one device."""

    layout: str
    precision: str
    loss_error: float
    grad_error: float
    param_error: float
    update_error: float
    init_equal: bool  # whether initial parameters are equal, bit for bit
    passed: bool
    worst: str  # the leaf with the largest gradient error
    # whether gradients outside the band are as near to float32 as those of one device
    by_rounding: bool = False
    routing: str = ""  # how tokens chose experts; see `cases.Routing`
    # whether each expert's load and the model's state are equal, bit for bit; a model
    # with experts must have it
    load_equal: bool = True


@dataclass(frozen=True)
class Report:
    """The comparison of all layouts with one device."""

    reference: dict[str, Any]  # device, losses by precision, parameters, optimizer
    layouts: tuple[Result, ...]
    skipped: dict[str, str]  # illegal layouts, with the reason
    shrunk: tuple[str, ...]  # changes that made the config small
    not_compared: tuple[str, ...]  # leaves whose gradient is only rounding noise

    @property
    def passed(self) -> bool:
        """True if all layouts passed."""
        return all(result.passed for result in self.layouts)

    def __str__(self) -> str:
        """Formats the table, and the lines under it."""
        return "\n".join([HEADER, *map(row, self.layouts), summary(self)])

    def to_json(self) -> dict[str, Any]:
        """Converts the report to JSON values; errors that are not finite are null."""
        values = asdict(self) | {"passed": self.passed}
        values["bands"] = {name: asdict(bands) for name, bands in BANDS.items()}
        for result in values["layouts"]:
            for key, value in result.items():
                if isinstance(value, float) and not math.isfinite(value):
                    result[key] = None
        return values


# --- comparing ------------------------------------------------------------------------


def rounding_alone(gradients: Arrays) -> set[str]:
    """Finds the leaves whose gradient is zero in exact arithmetic.

    An example is the key bias of a softmax without rotary positions. Its computed
    gradient is rounding noise, so neither the gradient nor an update that divides by
    its size can be compared.

    Args:
      gradients: float32 gradients by path.
    """
    largest = {name: np.abs(g).max(initial=0.0) for name, g in gradients.items()}
    top = max(largest.values())
    return {name for name, size in largest.items() if 0 < size < NOISE * top}


def compare(
    name: str,
    precision: str,
    observed: Observed,
    expected: Mapping[str, Observed],
    excluded: Collection[str],
    *,
    routing: str = "",
) -> Result:
    """Compares a step on a layout with the step on one device.

    Args:
      name: the layout.
      precision: the precision of the step.
      observed: the results on the layout.
      expected: the results on one device, by precision.
      excluded: leaves that are not compared.
      routing: how tokens chose experts; "" without experts. With experts, each expert's
        load and the model's state must be equal.
    """
    bands = BANDS[precision]
    reference = expected[precision]
    gradients = {}
    parameters = []
    updates = []
    for leaf, gradient in reference.gradients.items():
        if leaf not in excluded:
            parameter = reference.parameters[leaf]
            difference = observed.parameters[leaf] - parameter
            gradients[leaf] = _ratio(
                observed.gradients[leaf] - gradient, gradient, np.inf
            )
            parameters.append(_ratio(difference, parameter))
            updates.append(_ratio(difference, parameter - reference.start[leaf]))
    for leaf, state in reference.state.items():
        parameters.append(_ratio(observed.state[leaf] - state, state))
    worst = max(gradients, key=lambda leaf: np.nan_to_num(gradients[leaf], nan=np.inf))
    initial = reference.initial
    init_equal = jax.tree.all(jax.tree.map(np.array_equal, observed.initial, initial))
    load_equal = not routing or _same_load(observed, reference)
    # The update of parameters stored in bfloat16 is rounded, so only the parameters
    # after it can be compared.
    is_rounded = any(x.dtype != np.float32 for x in jax.tree.leaves(initial))
    outside = [leaf for leaf, error in gradients.items() if not error <= bands.gradient]
    by_rounding = False
    if outside and not is_rounded:
        exact = expected["float32"].gradients
        by_rounding = _as_near(
            observed, reference, exact, outside=outside, compared=gradients.keys()
        )
    loss_error = abs(observed.loss - reference.loss) / abs(reference.loss)
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


def _same_load(observed: Observed, reference: Observed) -> bool:
    """Checks that experts' loads and the model's state are equal, bit for bit."""
    same = [
        np.array_equal(observed.state[leaf], state)
        for leaf, state in reference.state.items()
    ]
    return all(same) and np.array_equal(observed.load, reference.load)


def _as_near(
    observed: Observed,
    reference: Observed,
    exact: Arrays,
    *,
    outside: Sequence[str],
    compared: Collection[str],
) -> bool:
    """Checks that a layout's gradients are about as near to float32 as one device's.

    All compared leaves together may be `ROUNDING_FACTOR` times as far, each number
    counted alike and each leaf relative to its size. A leaf outside the band may be
    farther by what a sample of its size explains.

    Args:
      observed: the results on the layout.
      reference: the results on one device in the same precision.
      exact: float32 gradients of one device.
      outside: the leaves that are outside the band.
      compared: all leaves that are compared.
    """

    def distance(step: Observed, leaf: str) -> float:
        return float(np.linalg.norm(step.gradients[leaf] - exact[leaf]))

    def total(step: Observed) -> float:
        squares = 0.0
        for leaf in compared:
            size = float(np.linalg.norm(exact[leaf]))
            if size:
                squares += exact[leaf].size * (distance(step, leaf) / size) ** 2
        return squares

    def limit(leaf: str) -> float:
        deviation = 1 / math.sqrt(exact[leaf].size)
        return ROUNDING_FACTOR * math.exp(SAMPLING_DEVIATIONS * deviation)

    together = total(observed) <= ROUNDING_FACTOR**2 * total(reference)
    return together and all(
        distance(observed, leaf) <= limit(leaf) * distance(reference, leaf)
        for leaf in outside
    )


def _ratio(
    difference: np.ndarray, reference: np.ndarray, order: float | None = None
) -> float:
    """Divides the norm of a difference by that of the reference; 0 if both are zero."""
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
    """Formats one line of the table."""
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
    """Formats the lines under the table: remarks, and the verdict."""
    lines = []
    if report.not_compared:
        names = ", ".join(report.not_compared)
        lines.append(
            f"not compared, because their gradient is zero in exact arithmetic: {names}"
        )
    if any(result.by_rounding and result.passed for result in report.layouts):
        lines.append(
            "* the model amplifies rounding: "
            "the layout's gradients are as near to float32's as one device's"
        )
    if any(result.routing == "given" for result in report.layouts):
        lines.append(
            "routing held fixed: each token's experts are drawn from the seed, because "
            "rounding to bfloat16 decides between nearly equal ones; the routers' "
            "choices are compared in float32"
        )
    count = len(report.layouts)
    wrong = sum(not result.passed for result in report.layouts)
    if wrong:
        lines.append(f"{wrong} of {count} rows are NOT equal to one device")
    else:
        lines.append(f"all {count} rows equal one device")
    return "\n".join(lines)
