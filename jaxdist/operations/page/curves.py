"""Cards with curves: the loss, and other fields of metrics.jsonl."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

from jaxdist.operations.page.charts import Curve, chart, smooth
from jaxdist.operations.page.run_files import finite, number
from jaxdist.operations.page.summary import ALERTS, RunSummary
from jaxdist.telemetry.units import field_text

# colours in page.css; the ninth run has the colour of the first, with dashed lines
_COLOURS = 8
_DASHES = ("", " dashed", " dotted")
_FIGURES = ("mean", "min", "max")  # suffixes of a field with several values
_SMOOTHED_FROM = 40  # points of the shortest curve that is smoothed
# drawings of the loss: page.css shows the one that suits the width of the screen
_LOSS_SIZES = {"broad": (1160, 330), "slim": (560, 300)}
_MARKED = ("restore", "resize", *ALERTS)  # events with a mark in the chart of the loss


class Field(NamedTuple):
    """Field of metrics.jsonl with its presentation in a chart."""

    name: str
    title: str
    remark: str = ""
    factor: float = 1.0  # factor from the file's unit to the shown unit
    unit: str = ""  # shown unit


@dataclass(frozen=True)
class Overlay:
    """Run of a page with its colour."""

    run: RunSummary
    style: str  # CSS classes of the colour and the dashes
    key: str  # HTML that shows the colour; "" for a lone run
    prefix: str  # prefix of the names of its curves; "" for a lone run

    def named(self, figure: str) -> str:
        """Makes the name of this series' curve of a figure."""
        return f"{self.prefix}{figure}"


def colour_runs(runs: Sequence[RunSummary]) -> list[Overlay]:
    """Gives each run a colour."""
    coloured = []
    for index, run in enumerate(runs):
        dash = _DASHES[index // _COLOURS % len(_DASHES)]
        style = f"run-{index % _COLOURS}{dash}"
        overlay = Overlay(run, style, key="", prefix="")
        if len(runs) > 1:
            key = f'<span class="key {style}"></span>'
            overlay = Overlay(run, style, key=key, prefix=f"{run.name} ")
        coloured.append(overlay)
    return coloured


def card(
    title: str, remark: str, aside: str, drawing: str, *, is_wide: bool = False
) -> str:
    """Draws a card.

    Args:
      title: title of the card.
      remark: text beside the title.
      aside: HTML at the right of the title.
      drawing: HTML below the title.
      is_wide: the card takes the full width.
    """
    style = "card wide" if is_wide else "card"
    return (
        f'<div class="{style}"><div class="top"><h3>{escape(title)}</h3>'
        f'<span class="soft">{escape(remark)}</span>{aside}</div>{drawing}</div>'
    )


def loss_card(overlays: Sequence[Overlay]) -> str:
    """Draws the losses in two views: all steps, and the last 80 % of them."""
    curves = []
    marks = []
    for overlay in overlays:
        curves += _lines(overlay, overlay.named("loss"), overlay.run.column("loss"))
        curves += _evaluation_curves(overlay)
        for event in overlay.run.events.shown:
            step = number(event.get("step"))
            if event["event"] in _MARKED and step is not None:
                text = overlay.named(f"{event['event']} at step {step:g}")
                marks.append((step, text))
    end = max((curve.points[-1][0] for curve in curves), default=0)
    late = [_after(curve, 0.2 * end) for curve in curves]
    picks = ""
    labels = ""
    views = ""
    for index, (name, view) in enumerate((("all", curves), ("last 80 %", late)), 1):
        checked = " checked" if index == 1 else ""
        picks += (
            f'<input class="pick" type="radio" name="view" id="pick-{index}"{checked}>'
        )
        labels += f'<label for="pick-{index}">{name}</label>'
        drawings = "".join(
            chart("Loss by step", view, marks=marks, size=size, style=style)
            for style, size in _LOSS_SIZES.items()
        )
        views += f'<div class="view view-{index}">{drawings}</div>'
    return (
        f'<div class="card wide">{picks}<div class="top"><h3>Loss</h3>'
        f'<span class="soft">nats per target</span>{_legend(overlays, curves)}'
        f'<span class="push switch">{labels}</span></div>{views}</div>'
    )


def _evaluation_curves(overlay: Overlay) -> list[Curve]:
    """Makes a curve for each held-out set: losses of different sets are not joined."""
    targets = {
        row["step"]: row.get("eval_tokens") for row in overlay.run.rows.evaluation
    }
    points = overlay.run.column("eval_loss")
    sets = [
        (size, list(group))
        for size, group in itertools.groupby(points, lambda point: targets[point[0]])
    ]
    curves = []
    for size, group in sets:
        name = overlay.named("evaluation")
        known_size = finite(size)
        if len(sets) > 1 and known_size is not None:
            name += f" on {field_text('eval_tokens', known_size)} targets"
        curves.append(Curve(name, overlay.style, group, "points"))
    return curves


def _legend(overlays: Sequence[Overlay], curves: Sequence[Curve]) -> str:
    """Draws the names of the curves; with more than two runs, those of the runs."""
    named = [(f"{curve.run} {curve.style}", curve.name) for curve in curves]
    if len(overlays) > 2:
        named = [(f"{overlay.style} line", overlay.run.name) for overlay in overlays]
    return "".join(
        f'<span class="legend"><i class="{style}"></i>{escape(name)}</span>'
        for style, name in named
    )


def field_card(overlays: Sequence[Overlay], field: Field) -> str:
    """Draws a field of the rows; "" if no row has it."""
    curves = []
    last = ""
    for overlay in overlays:
        column = overlay.run.column(field.name)
        curves += _lines(overlay, overlay.run.name, _scaled(column, field.factor))
        if column:
            last += _last(overlay, field_text(field.name, column[-1][1]))
    if not curves:
        return ""
    drawing = chart(
        f"{field.title} by step",
        curves,
        unit=field.unit,
        from_zero="/" not in field.name,
    )
    return card(field.title, field.remark, _lasts(last), drawing)


def band_card(overlays: Sequence[Overlay], field: Field) -> str:
    """Draws a field with /mean, /min and /max (of layers); "" if no run has it."""
    curves = []
    bands = []
    last = ""
    for overlay in overlays:
        columns = [overlay.run.column(f"{field.name}/{name}") for name in _FIGURES]
        if not all(columns):
            continue
        mean, low, high = (_scaled(column, field.factor) for column in columns)
        edges = (
            Curve(overlay.named("min"), overlay.style, low, "raw"),
            Curve(overlay.named("max"), overlay.style, high, "raw"),
        )
        curves += [Curve(overlay.named("mean"), overlay.style, mean), *edges]
        bands.append(edges)
        span = f"{low[-1][1]:.4g} to {high[-1][1]:.4g}"
        last += _last(overlay, f"{mean[-1][1]:.4g} ({span})")
    if not curves:
        return ""
    drawing = chart(f"{field.title} by step", curves, unit=field.unit, bands=bands)
    return card(field.title, field.remark, _lasts(last), drawing)


def other_cards(overlays: Sequence[Overlay], names: set[str]) -> str:
    """Draws all fields of these names; fields with several values come last."""
    singles = set(names)
    several = []
    for base in sorted({name.removesuffix("/mean") for name in names}):
        spread = {f"{base}/{figure}" for figure in _FIGURES}
        if spread <= names:
            several.append(Field(base, base, "mean, least and most"))
            singles -= spread
    cards = [field_card(overlays, Field(name, name)) for name in sorted(singles)]
    cards += [band_card(overlays, field) for field in several]
    return "".join(cards)


def _last(overlay: Overlay, text: str) -> str:
    return f'<span class="last">{overlay.key}{text}</span> '


def _lasts(last: str) -> str:
    return f'<span class="soft push">last {last}</span>'


def _scaled(
    points: Sequence[tuple[float, float]], factor: float
) -> list[tuple[float, float]]:
    return [(step, factor * value) for step, value in points]


def _lines(
    overlay: Overlay, name: str, points: Sequence[tuple[float, float]]
) -> list[Curve]:
    """Makes a curve; many points become a faint curve below a smoothed one."""
    if not points:
        return []
    curve = Curve(name, overlay.style, points)
    if len(points) < _SMOOTHED_FROM:
        return [curve]
    steps, values = zip(*points, strict=True)
    smoothed = zip(steps, smooth(values, max(1, len(points) // 100)), strict=True)
    return [
        replace(curve, style="raw"),
        replace(curve, name=f"{name}, smoothed", points=list(smoothed)),
    ]


def _after(curve: Curve, step: float) -> Curve:
    return replace(curve, points=[point for point in curve.points if point[0] >= step])
