"""Line charts as SVG text: readable ticks, linear or log, two runs overlaid. No dependency.

Colours and strokes come from CSS classes of the page (`run-a`, `run-b`), so that one drawing suits
light and dark. Each curve carries its points as JSON, for the hover script of the page; without
the script the picture is complete all the same.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_POINTS = 500  # per curve; a chart is no wider than this many pixels that an eye can tell apart

RunClass = Literal["run-a", "run-b"]
Scale = Literal["linear", "log"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 30


@dataclass(frozen=True)
class Curve:
    """Points of one curve; x ascending. Non-finite y leave a gap and a red tick on the x axis."""

    name: str  # legend and hover text
    run: RunClass
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["line", "raw", "points"] = "line"  # raw: thin and faint, below the others
    hover: bool = True  # carries its values for the hover text and the spoken summary


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step: an event."""

    x: float
    text: str


@dataclass(frozen=True)
class Axis:
    """How the y axis reads."""

    unit: str = ""
    scale: Scale = "linear"
    from_zero: bool = False  # include 0: for speeds, where the length of a bar means something
    robust: bool = False  # ignore the farthest 1 % when choosing the range (a first slow step)


def chart(
    label: str,
    curves: Sequence[Curve],
    axis: Axis | None = None,
    *,
    marks: Sequence[Mark] = (),
    size: tuple[int, int] = (560, 230),
) -> str:
    """Returns one <svg> of the curves; `label` is what a screen reader says."""
    axis = axis or Axis()
    thin = [_thinned(curve) for curve in curves]
    xs = [x for curve in thin for x in curve.x] or [0.0]
    ys = [y for curve in thin for y in curve.y if _drawable(y, axis)] or [0.0]
    frame = _Frame(size, (min(xs), max(xs)), _y_range(ys, axis), axis)
    shapes = [frame.curve(curve) for curve in sorted(thin, key=lambda c: _ORDER[c.style])]
    shown = [mark for mark in marks if frame.x0 <= mark.x <= frame.x1]
    text = html.escape(f"{label}. {_summary(thin, axis)}", quote=True)
    span = json.dumps([frame.x0, frame.x1, frame.y0, frame.y1])
    box = json.dumps([_LEFT, _TOP, size[0] - _RIGHT, size[1] - _BOTTOM])
    return (
        f'<svg class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" tabindex="0" '
        f'aria-label="{text}" data-span="{span}" data-box="{box}" data-scale="{axis.scale}" '
        f'data-unit="{html.escape(axis.unit, quote=True)}">'
        f"{frame.grid()}{''.join(map(frame.mark, shown))}{''.join(shapes)}"
        '<line class="cross" y1="0" y2="0"/></svg>'
    )


def smooth(values: Sequence[float], half_width: int) -> list[float]:
    """Returns the mean of the finite values within `half_width` rows of each row.

    Near the start the window narrows to a tenth of the row's index: a loss falls fast there, and a
    wide mean (or an exponential one, which lags) would lie above the curve.
    """
    totals, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        totals.append(totals[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for index in range(len(values)):
        width = min(half_width, index // 10)
        low, high = index - width, min(len(values), index + width + 1)
        count = counts[high] - counts[low]
        means.append((totals[high] - totals[low]) / count if count else math.nan)
    return means


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round numbers (1, 2, 5 x 10^k apart) within [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns ticks for a log axis: powers of ten, with 2 and 5 over few decades; linear if < 1."""
    decades = math.log10(high / low)
    if decades < 0.7:
        return [tick for tick in linear_ticks(low, high) if tick > 0]
    steps = (1, 2, 5) if decades < 3 else (1,)
    stride = max(1, math.ceil(decades / 7))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**power for power in powers if power % stride == 0 for m in steps]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def tick_text(value: float, step: float) -> str:
    """Returns a short label; `step` is the distance of the ticks and sets the digits."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e4 or size < 1e-3:
        for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.4g}{suffix}"
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 3
    return f"{value:.{min(digits, 6)}f}"


_ORDER = {"raw": 0, "line": 1, "points": 2}  # drawing order: the last is on top


class _Frame:
    """The plot area: maps values to pixels and draws axes, marks and curves."""

    def __init__(
        self,
        size: tuple[int, int],
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        axis: Axis,
    ) -> None:
        self.width, self.height = size
        self.x0, self.x1 = x_range if x_range[1] > x_range[0] else (x_range[0], x_range[0] + 1)
        self.y0, self.y1 = y_range
        self.axis = axis

    def px(self, x: float) -> float:
        """Returns the horizontal pixel of a step."""
        inner = self.width - _LEFT - _RIGHT
        return _LEFT + inner * (x - self.x0) / (self.x1 - self.x0)

    def py(self, y: float) -> float:
        """Returns the vertical pixel of a value; values beyond the range stay just outside it."""
        place = math.log if self.axis.scale == "log" else float
        share = (place(y) - place(self.y0)) / (place(self.y1) - place(self.y0))
        inner = self.height - _TOP - _BOTTOM
        return _TOP + inner * (1 - min(1.02, max(-0.02, share)))

    def grid(self) -> str:
        """Returns the grid lines with their numbers."""
        parts = []
        log = self.axis.scale == "log"
        ticks = log_ticks(self.y0, self.y1) if log else linear_ticks(self.y0, self.y1)
        for tick in ticks:
            y = self.py(tick)
            label = tick_text(tick, tick if log else _step(ticks))
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" {_ys(y)}/>')
            parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{label}</text>')
        bottom = self.height - _BOTTOM
        ticks = linear_ticks(self.x0, self.x1, 10 if self.width > 800 else 5)
        for tick in [tick for tick in ticks if tick == int(tick)]:
            place = f'x="{self.px(tick):.1f}" y="{bottom + 18}"'
            parts.append(f'<text class="tick middle" {place}>{tick_text(tick, 1)}</text>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{bottom + 18}">step</text>')
        parts.append(f'<line class="base" x1="{_LEFT}" x2="{self.width - _RIGHT}" {_ys(bottom)}/>')
        return "".join(parts)

    def mark(self, mark: Mark) -> str:
        """Returns a dashed vertical line with a tooltip."""
        x = self.px(mark.x)
        return (
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" '
            f'y2="{self.height - _BOTTOM}"><title>{html.escape(mark.text)}</title></line>'
        )

    def curve(self, curve: Curve) -> str:
        """Returns one curve with its points as JSON for the hover script."""
        points = [
            (self.px(x), self.py(y)) if _drawable(y, self.axis) else None
            for x, y in zip(curve.x, curve.y, strict=True)
        ]
        values = _values(curve, self.axis) if curve.hover else ""
        bad = "".join(self._bad(x, y) for x, y in zip(curve.x, curve.y, strict=True))
        name = html.escape(curve.name, quote=True)
        head = f'<g class="curve {curve.style} {curve.run}" data-name="{name}"{values}>'
        if curve.style == "points":
            dots = (f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3.2"/>' for p in points if p)
            return f"{head}{_path(points)}{''.join(dots)}{bad}</g>"
        alone = (p for p in points if p and len(points) == 1)
        dots = (f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3"/>' for p in alone)
        return f"{head}{_path(points)}{''.join(dots)}{bad}</g>"

    def _bad(self, x: float, y: float) -> str:
        if math.isfinite(y):
            return ""
        bottom = self.height - _BOTTOM
        place = f'x1="{self.px(x):.1f}" x2="{self.px(x):.1f}" y1="{bottom - 8}" y2="{bottom}"'
        return f'<line class="bad" {place}><title>step {x:g}: {y}</title></line>'


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Returns a <path> through the points, broken where a point is None."""
    commands = []
    pen = "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        commands.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return f'<path d="{"".join(commands)}"/>'


def _values(curve: Curve, axis: Axis) -> str:
    points = [
        [x, float(f"{y:.6g}")] for x, y in zip(curve.x, curve.y, strict=True) if _drawable(y, axis)
    ]
    return f' data-points="{html.escape(json.dumps(points, separators=(",", ":")), quote=True)}"'


def _ys(y: float) -> str:
    return f'y1="{y:.1f}" y2="{y:.1f}"'


def _step(ticks: Sequence[float]) -> float:
    return ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) / 100 if ticks else 1.0


def _drawable(y: float, axis: Axis) -> bool:
    return math.isfinite(y) and (axis.scale == "linear" or y > 0)


def _y_range(ys: Sequence[float], axis: Axis) -> tuple[float, float]:
    """Returns the range of the y axis with a little room; never empty."""
    ordered = sorted(ys)
    low, high = ordered[0], ordered[-1]
    if axis.robust and len(ordered) >= 20:
        cut = max(1, len(ordered) // 100)
        low, high = ordered[cut], ordered[-1 - cut]
    if axis.scale == "log":
        low, high = (low, high) if high > low * 1.001 else (low / 1.5, high * 1.5)
        room = (high / low) ** 0.04
        return low / room, high * room
    if axis.from_zero and low >= 0:
        return 0.0, high * 1.08 or 1.0
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-30):
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    room = 0.04 * (high - low)
    return low - room, high + room


def _thinned(curve: Curve) -> Curve:
    """Returns at most about MAX_POINTS points: the lowest and highest of each bucket, and all bad.

    Peaks stay visible, unlike with every n-th point.
    """
    count = len(curve.x)
    if count <= MAX_POINTS:
        return curve
    keep = {0, count - 1}
    keep.update([i for i, y in enumerate(curve.y) if not math.isfinite(y)][:MAX_POINTS])
    buckets = MAX_POINTS // 2
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [i for i in indices if math.isfinite(curve.y[i])]
        if finite:
            keep.add(min(finite, key=lambda i: curve.y[i]))
            keep.add(max(finite, key=lambda i: curve.y[i]))
    order = sorted(keep)
    x, y = [curve.x[i] for i in order], [curve.y[i] for i in order]
    return replace(curve, x=x, y=y)


def _summary(curves: Sequence[Curve], axis: Axis) -> str:
    """Returns the curves in words: first, lowest, highest and last value of each."""
    sentences = []
    for curve in curves:
        finite = [y for y in curve.y if math.isfinite(y)]
        if finite and curve.hover:
            sentences.append(
                f"{curve.name}: {len(finite)} points, from {finite[0]:.4g} to {finite[-1]:.4g}, "
                f"lowest {min(finite):.4g}, highest {max(finite):.4g} {axis.unit}".strip()
            )
    return "; ".join(sentences) or "no data"
