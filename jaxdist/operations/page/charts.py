"""Line charts as SVG text, with readable ticks and overlaid runs.

Colours and strokes come from CSS classes of the page (`run-0`, `dashed`), so one
drawing suits light and dark themes. Each curve has its points as JSON for the page's
hover script. The drawing is complete without that script.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from operator import itemgetter
from typing import Literal

from jaxdist.telemetry.units import count_text

# points of a drawn curve; nobody can see more in the width of a chart
MAX_POINTS = 500

# margins in pixels
_LEFT = 58
_RIGHT = 14
_TOP = 12
_BOTTOM = 30
# from the left end to the first label that has its middle at its tick
_NEAR_LEFT = 30


@dataclass(frozen=True)
class Curve:
    """Curve of a chart.

    A y that is not finite leaves a gap, and a red tick on the x axis.
    """

    name: str  # name in the legend and the hover text
    run: str  # CSS classes: run-0 to run-7, dashed, dotted
    points: Sequence[tuple[float, float]]  # (x, y) with ascending x
    # "raw" is a thin, faint line below the others
    style: Literal["raw", "line", "points"] = "line"


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    bands: Sequence[tuple[Curve, Curve]] = (),
    size: tuple[int, int] = (560, 230),
    style: str = "",
) -> str:
    """Draws curves as one <svg>.

    Args:
      title: text for screen readers.
      curves: the curves.
      unit: unit of the values, for the hover text.
      from_zero: the y axis includes 0 and ignores the extreme 1 % of the values, such
        as a slow first step. It is meant for speeds.
      marks: (step, text) of vertical lines, such as events.
      bands: pairs of `curves` with a filled area between them.
      size: width and height in pixels.
      style: further CSS classes of the <svg>.
    """
    thin = [_thinned(curve) for curve in curves]
    points = [point for curve in thin for point in curve.points]
    steps = [x for x, _ in points] or [0.0]
    values = [y for _, y in points if math.isfinite(y)] or [0.0]
    low, high = _y_range(values, from_zero)
    frame = _Frame(
        right=size[0] - _RIGHT,
        bottom=size[1] - _BOTTOM,
        x0=min(steps),
        x1=max(max(steps), min(steps) + 1),
        y0=low,
        y1=high,
    )
    shapes = [frame.grid()]
    shapes += [
        frame.mark(step, text) for step, text in marks if frame.x0 <= step <= frame.x1
    ]
    shapes += [frame.band(_thinned(lower), _thinned(upper)) for lower, upper in bands]
    # raw curves lie below the others
    shapes += map(frame.curve, sorted(thin, key=lambda curve: curve.style != "raw"))
    description = escape(f"{title}. {_ends(thin, unit)}")
    span = [frame.x0, frame.x1, frame.y0, frame.y1]
    box = [_LEFT, _TOP, frame.right, frame.bottom]
    return (
        f'<svg class="{f"chart {style}".strip()}" viewBox="0 0 {size[0]} {size[1]}" role="img" tabindex="0" '
        f'aria-label="{description}" data-unit="{escape(unit)}" '
        f'data-span="{json.dumps(span)}" data-box="{json.dumps(box)}">'
        f'{"".join(shapes)}<line class="cross" y1="0" y2="0"/></svg>'
    )


def _ends(curves: Sequence[Curve], unit: str) -> str:
    """Describes the first and the last value of each curve."""
    texts = []
    for curve in curves:
        if curve.points:
            first = curve.points[0][1]
            last = curve.points[-1][1]
            texts.append(f"{curve.name}: from {first:.4g} to {last:.4g} {unit}".strip())
    return "; ".join(texts)


def smooth(values: Sequence[float], half_width: int) -> list[float]:
    """Averages the finite values within `half_width` rows of each row.

    Near the start the window narrows to a tenth of the row's index. A loss falls fast
    there, and a wide mean would be above the curve.
    """
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    totals = [0.0, *accumulate(finite)]
    counts = [0, *accumulate(map(math.isfinite, values))]
    means = []
    for index in range(len(values)):
        width = min(half_width, index // 10)
        low = index - width
        high = min(len(values), index + width + 1)
        count = counts[high] - counts[low]
        mean = math.nan
        if count:
            mean = (totals[high] - totals[low]) / count
        means.append(mean)
    return means


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Chooses about `count` round numbers in [low, high], 1, 2 or 5 x 10^k apart."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """Formats the label of a tick.

    Args:
      value: value of the tick.
      step: distance of the ticks, which sets the number of digits.
    """
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return count_text(value, digits=4)
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits}f}"


def label(anchor: str, x: float, y: float, text: object) -> str:
    """Draws a text with its start, middle or end (`anchor`) at x."""
    return f'<text class="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(str(text))}</text>'


def x_label(x: float, y: float, text: str) -> str:
    """Draws the label of a tick of the x axis.

    It has its middle at x. Near the left end it begins there, since the name of the axis
    is beside it.
    """
    anchor = "start" if x < _LEFT + _NEAR_LEFT else "middle"
    return label(anchor, x, y, text)


def compact_json(value: object) -> str:
    """Writes JSON without spaces, for an attribute of a drawing."""
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True)
class _Frame:
    """Plot area, which maps values to pixels and draws axes, marks and curves."""

    right: int  # right edge in pixels
    bottom: int  # bottom edge in pixels
    x0: float  # range of the values
    x1: float
    y0: float
    y1: float

    def px(self, x: float) -> float:
        """Computes the horizontal pixel of a step."""
        return _LEFT + (self.right - _LEFT) * (x - self.x0) / (self.x1 - self.x0)

    def py(self, y: float) -> float:
        """Computes the vertical pixel of a value, at most just outside of the area."""
        share = min(1.02, max(-0.02, (y - self.y0) / (self.y1 - self.y0)))
        return _TOP + (self.bottom - _TOP) * (1 - share)

    def grid(self) -> str:
        """Draws the grid lines with their numbers."""
        parts = [self._horizontal("base", self.bottom)]
        ticks = linear_ticks(self.y0, self.y1)
        for tick in ticks:
            y = self.py(tick)
            parts.append(self._horizontal("grid", y))
            text = tick_text(tick, ticks[1] - ticks[0])
            parts.append(label("end", _LEFT - 8, y + 4, text))
        below = self.bottom + 18
        parts.append(label("end", _LEFT - 8, below, "step"))
        for tick in linear_ticks(self.x0, self.x1, (self.right + _RIGHT) // 110):
            if tick == int(tick):
                parts.append(x_label(self.px(tick), below, tick_text(tick, 1)))
        return "".join(parts)

    def _horizontal(self, style: str, y: float) -> str:
        place = f'x1="{_LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"'
        return f'<line class="{style}" {place}/>'

    def mark(self, step: float, text: str, style: str = "mark", top: int = _TOP) -> str:
        """Draws a vertical line with a tooltip, from the bottom up to `top`."""
        x = f"{self.px(step):.1f}"
        return (
            f'<line class="{style}" x1="{x}" x2="{x}" y1="{top}" y2="{self.bottom}">'
            f"<title>{escape(text)}</title></line>"
        )

    def band(self, low: Curve, high: Curve) -> str:
        """Draws the area between two curves."""
        points = [
            f"{self.px(x):.1f} {self.py(y):.1f}"
            for x, y in (*high.points, *reversed(low.points))
            if math.isfinite(y)
        ]
        if not points:
            return ""
        return f'<path class="band {low.run}" d="M{"L".join(points)}z"/>'

    def curve(self, curve: Curve) -> str:
        """Draws one curve, with its points as JSON for the hover script."""
        path = ""
        dots = ""
        bad = ""
        values = []
        has_dots = curve.style == "points" or len(curve.points) == 1
        pen = "M"  # M moves the pen, at the start and after a gap; L draws
        for x, y in curve.points:
            if not math.isfinite(y):
                pen = "M"
                bad += self.mark(x, f"step {x:g}: {y}", "bad", self.bottom - 8)
                continue
            px = f"{self.px(x):.1f}"
            py = f"{self.py(y):.1f}"
            path += f"{pen}{px} {py}"
            pen = "L"
            values.append([x, float(f"{y:.6g}")])
            if has_dots:
                dots += f'<circle cx="{px}" cy="{py}" r="3.2"/>'
        return (
            f'<g class="curve {curve.style} {curve.run}" data-name="{escape(curve.name)}" '
            f'data-points="{compact_json(values)}"><path d="{path}"/>{dots}{bad}</g>'
        )


def _y_range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """Computes the range of the y axis, with a small margin. It is never empty."""
    ordered = sorted(values)
    low = ordered[0]
    high = ordered[-1]
    if from_zero:
        if len(ordered) >= 20:
            cut = math.ceil(len(ordered) / 100)
            low = ordered[cut]
            high = ordered[-1 - cut]
        return min(0.0, low), max(0.0, high * 1.08) or 1.0
    if low == high == 0:
        return 0.0, 1.0
    margin = 0.04 * (high - low)
    if margin < 1e-9 * abs(high):
        margin = 0.1 * abs(high)
    margin = margin or 1.0
    return low - margin, high + margin


def _thinned(curve: Curve) -> Curve:
    """Thins a curve to about MAX_POINTS points.

    The lowest and highest point of each bucket stay, so peaks remain visible. Points
    that are not finite stay, too, up to MAX_POINTS.
    """
    points = curve.points
    if len(points) <= MAX_POINTS:
        return curve
    nonfinite = [point for point in points if not math.isfinite(point[1])]
    kept = {points[0], points[-1], *nonfinite[:MAX_POINTS]}
    size = math.ceil(2 * len(points) / MAX_POINTS)
    for start in range(0, len(points), size):
        bucket = [
            point for point in points[start : start + size] if math.isfinite(point[1])
        ]
        if bucket:
            kept |= {min(bucket, key=_value), max(bucket, key=_value)}
    return replace(curve, points=sorted(kept))


_value = itemgetter(1)
