"""Line charts as SVG text: readable ticks, runs overlaid. No dependency.

Colours and strokes come from CSS classes of the page (`run-0`, `dashed`), so that one
drawing suits light and dark. Each curve carries its points as JSON, for the hover
script of the page; without the script the picture is complete all the same.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from jaxdist.telemetry.units import count_text

# per curve; a chart is no wider than this many pixels that an eye can tell apart
MAX_POINTS = 500

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 30


@dataclass(frozen=True)
class Curve:
    """Points of one curve; x ascending. Non-finite y leave a gap and a red tick on the
    x axis.
    """

    name: str  # legend and hover text
    run: str  # CSS classes: run-0 to run-7, dashed, dotted
    x: Sequence[float]
    y: Sequence[float]
    # raw: thin and faint, below the others
    style: Literal["raw", "line", "points"] = "line"


def chart(
    label: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    bands: Sequence[tuple[Curve, Curve]] = (),
    size: tuple[int, int] = (560, 230),
) -> str:
    """Returns one <svg> of the curves.

    Args:
      label: what a screen reader says.
      unit: of the values, for the hover text.
      from_zero: the y axis includes 0 and ignores the farthest 1 % of the values (a
        slow first step): for speeds, where height means something.
      marks: (step, text) of vertical lines: events.
      bands: (lower, upper) curves, of those above, with the area between them filled.
      size: width and height in pixels.
    """
    thin = [_thinned(curve) for curve in curves]
    xs = [x for curve in thin for x in curve.x] or [0.0]
    ys = [y for curve in thin for y in curve.y if math.isfinite(y)] or [0.0]
    frame = _Frame(size, min(xs), max(max(xs), min(xs) + 1), *_y_range(ys, from_zero))
    shapes = [frame.band(*map(_thinned, pair)) for pair in bands]
    shapes += [
        frame.curve(curve) for curve in sorted(thin, key=lambda c: c.style != "raw")
    ]
    lines = [
        frame.mark(step, text) for step, text in marks if frame.x0 <= step <= frame.x1
    ]
    ends = "; ".join(
        f"{c.name}: from {c.y[0]:.4g} to {c.y[-1]:.4g} {unit}".strip()
        for c in thin
        if c.y
    )
    return (
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" tabindex="0" '
        f'aria-label="{html.escape(f"{label}. {ends}")}" data-unit="{html.escape(unit)}" '
        f'data-span="{json.dumps([frame.x0, frame.x1, frame.y0, frame.y1])}" '
        f'data-box="{json.dumps([_LEFT, _TOP, size[0] - _RIGHT, size[1] - _BOTTOM])}">'
        f'{frame.grid()}{"".join(lines)}{"".join(shapes)}<line class="cross" y1="0" y2="0"/></svg>'
    )


def smooth(values: Sequence[float], half_width: int) -> list[float]:
    """Returns the mean of the finite values within `half_width` rows of each row.

    Near the start the window narrows to a tenth of the row's index: a loss falls fast
    there, and a wide mean (or an exponential one, which lags) would lie above the
    curve.
    """
    totals = [
        0.0,
        *accumulate(value if math.isfinite(value) else 0.0 for value in values),
    ]
    counts = [0, *accumulate(map(math.isfinite, values))]
    means = []
    for index in range(len(values)):
        width = min(half_width, index // 10)
        low, high = index - width, min(len(values), index + width + 1)
        count = counts[high] - counts[low]
        means.append((totals[high] - totals[low]) / count if count else math.nan)
    return means


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round numbers (1, 2, 5 x 10^k apart) within [low, high], about `count` of
    them.
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """Returns a short label; `step` is the distance of the ticks and sets the
    digits.
    """
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return count_text(value, digits=4)
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


@dataclass(frozen=True)
class _Frame:
    """The plot area: maps values to pixels and draws axes, marks and curves."""

    size: tuple[int, int]
    x0: float
    x1: float
    y0: float
    y1: float

    def px(self, x: float) -> float:
        """Returns the horizontal pixel of a step."""
        return _LEFT + (self.size[0] - _LEFT - _RIGHT) * (x - self.x0) / (
            self.x1 - self.x0
        )

    def py(self, y: float) -> float:
        """Returns the vertical pixel of a value; values beyond the range stay just
        outside it.
        """
        share = min(1.02, max(-0.02, (y - self.y0) / (self.y1 - self.y0)))
        return _TOP + (self.size[1] - _TOP - _BOTTOM) * (1 - share)

    def grid(self) -> str:
        """Returns the grid lines with their numbers."""
        right, bottom = self.size[0] - _RIGHT, self.size[1] - _BOTTOM
        ticks = linear_ticks(self.y0, self.y1)
        parts = [
            f'<line class="base" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        ]
        for tick in ticks:
            y, label = f"{self.py(tick):.1f}", tick_text(tick, ticks[1] - ticks[0])
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
            )
            parts.append(
                f'<text class="tick end" x="{_LEFT - 8}" y="{y}" dy="4">{label}</text>'
            )
        parts.append(
            f'<text class="tick end" x="{_LEFT - 8}" y="{bottom + 18}">step</text>'
        )
        for tick in linear_ticks(self.x0, self.x1, self.size[0] // 110):
            if tick == int(tick):
                place = f'x="{self.px(tick):.1f}" y="{bottom + 18}"'
                parts.append(
                    f'<text class="tick middle" {place}>{tick_text(tick, 1)}</text>'
                )
        return "".join(parts)

    def mark(self, step: float, text: str, style: str = "mark", top: int = _TOP) -> str:
        """Returns a vertical line with a tooltip, from the bottom of the plot up to
        `top`.
        """
        place = f'x1="{self.px(step):.1f}" x2="{self.px(step):.1f}"'
        span = f'y1="{top}" y2="{self.size[1] - _BOTTOM}"'
        return f'<line class="{style}" {place} {span}><title>{html.escape(text)}</title></line>'

    def band(self, low: Curve, high: Curve) -> str:
        """Returns the area between two curves."""
        points = [
            *zip(high.x, high.y, strict=True),
            *reversed([*zip(low.x, low.y, strict=True)]),
        ]
        path = "L".join(
            f"{self.px(x):.1f} {self.py(y):.1f}" for x, y in points if math.isfinite(y)
        )
        return f'<path class="band {low.run}" d="M{path}z"/>' if path else ""

    def curve(self, curve: Curve) -> str:
        """Returns one curve with its points as JSON for the hover script."""
        path, dots, bad, values = "", "", "", []
        pen = "M"  # lifted at the start and behind a gap
        for x, y in zip(curve.x, curve.y, strict=True):
            if not math.isfinite(y):
                pen = "M"
                bad += self.mark(
                    x, f"step {x:g}: {y}", "bad", self.size[1] - _BOTTOM - 8
                )
                continue
            px, py = f"{self.px(x):.1f}", f"{self.py(y):.1f}"
            path += f"{pen}{px} {py}"
            pen = "L"
            values.append([x, float(f"{y:.6g}")])
            if curve.style == "points" or len(curve.x) == 1:
                dots += f'<circle cx="{px}" cy="{py}" r="3.2"/>'
        return (
            f'<g class="curve {curve.style} {curve.run}" data-name="{html.escape(curve.name)}" '
            f'data-points="{json.dumps(values, separators=(",", ":"))}">'
            f'<path d="{path}"/>{dots}{bad}</g>'
        )


def _y_range(ys: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """Returns the range of the y axis with a little room; never empty."""
    ordered = sorted(ys)
    if from_zero:
        cut = -(-len(ordered) // 100) if len(ordered) >= 20 else 0
        return min(0.0, ordered[cut]), max(0.0, ordered[-1 - cut] * 1.08) or 1.0
    low, high = ordered[0], ordered[-1]
    if low == high == 0:
        return 0.0, 1.0
    room = 0.04 * (high - low)
    if room < 1e-9 * abs(high):
        room = 0.1 * abs(high)
    return low - (room or 1.0), high + (room or 1.0)


def _thinned(curve: Curve) -> Curve:
    """Returns at most about MAX_POINTS points: the lowest and highest of each bucket,
    and all bad.

    Peaks stay visible, unlike with every n-th point.
    """
    count, buckets = len(curve.x), MAX_POINTS // 2
    if count <= MAX_POINTS:
        return curve
    bad = [i for i, y in enumerate(curve.y) if not math.isfinite(y)]
    keep = {0, count - 1, *bad[:MAX_POINTS]}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        if finite := [i for i in indices if math.isfinite(curve.y[i])]:
            keep |= {
                min(finite, key=curve.y.__getitem__),
                max(finite, key=curve.y.__getitem__),
            }
    order = sorted(keep)
    return replace(curve, x=[curve.x[i] for i in order], y=[curve.y[i] for i in order])
