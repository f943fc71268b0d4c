"""Heat maps as SVG text: a cell for each row and column, coloured in steps by its
relation to the mean.

Cells of one colour are one path, and colours are CSS classes of the page (`heat-0` and
on), so that maps of thousands of cells stay small, and one drawing suits light and
dark. Values are there as JSON for the page's script, which tells those under the
pointer; without it the picture and its legend are complete.
"""

import bisect
import html
import json
from collections.abc import Sequence

from jaxdist.operations.page.charts import linear_ticks, tick_text

# of the colours; 0 has one of its own
EDGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
NAMES = ("none", "< 0.25", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "2", "≥ 4")

_WIDTH, _LEFT, _TOP, _BOTTOM = 1160, 58, 6, 34
_LARGEST, _HEIGHT = 26.0, 520.0  # of a cell, and of all rows together


def heat_map(
    label: str,
    values: Sequence[Sequence[float | None]],
    *,
    rows: str,
    columns: str,
    places: Sequence[float] | None = None,
) -> str:
    """Returns one <svg>.

    Args:
      label: what a screen reader says.
      values: rows of equal length, each value relative to a mean, 0 or more; None:
        there is none, no cell.
      rows, columns: what one is called: "layer", "expert".
      places: what columns stand for; None: their numbers, from 0 on.
    """
    wide, high = len(values[0]), len(values)
    places = list(range(wide)) if places is None else places
    cell_w = min(_LARGEST, (_WIDTH - _LEFT - 10) / wide)
    cell_h = min(_LARGEST, _HEIGHT / high)
    cells: dict[int, str] = {}
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is None:
                continue
            corner = f"M{_LEFT + x * cell_w:.4g} {_TOP + y * cell_h:.4g}"
            cells[colour(value)] = (
                cells.get(colour(value), "") + f"{corner}h{cell_w:.3g}v{cell_h:.3g}H"
            )
            cells[colour(value)] += f"{_LEFT + x * cell_w:.4g}z"
    paths = "".join(f'<path class="heat-{n}" d="{cells[n]}"/>' for n in sorted(cells))
    bottom = _TOP + high * cell_h
    marks = ""
    for y in _ticks(high, most=bottom / 18):
        place = f'x="{_LEFT - 8}" y="{_TOP + (y + 0.5) * cell_h:.1f}" dy="4"'
        marks += (
            f'<text class="end" {place}>{y if y else f"{html.escape(rows)} 0"}</text>'
        )
    longest = max(len(tick_text(place, 1)) for place in places)
    for x in _ticks(wide, most=wide * cell_w / (8 * longest + 14)):
        place = f'x="{_LEFT + (x + 0.5) * cell_w:.1f}" y="{bottom + 16:.1f}"'
        marks += f'<text class="middle" {place}>{tick_text(places[x], 1)}</text>'
    marks += f'<text class="end" x="{_LEFT - 8}" y="{bottom + 16:.1f}">{html.escape(columns)}</text>'
    shown = [
        [None if value is None else float(f"{value:.3g}") for value in row]
        for row in values
    ]
    return (
        f'<svg class="heat" viewBox="0 0 {_WIDTH} {bottom + _BOTTOM:.0f}" role="img" tabindex="0" '
        f'aria-label="{html.escape(label)}" data-names="{html.escape(json.dumps([rows, columns]))}" '
        f'data-box="{json.dumps([_LEFT, _TOP, cell_w, cell_h])}" data-places="{_json(places)}" '
        f'data-values="{_json(shown)}">{paths}{marks}<rect class="cross" width="{cell_w:.3g}" '
        f'height="{cell_h:.3g}"/></svg>'
    )


def legend() -> str:
    """Returns the colours with the values from which on they are taken."""
    swatches = (
        f'<span class="heat-{n}">{html.escape(name)}</span>'
        for n, name in enumerate(NAMES)
    )
    return f'<span class="legend scale">{"".join(swatches)}</span>'


def colour(value: float) -> int:
    """Returns the number of a value's colour: 0 for 0, else 1 and on."""
    return 0 if value <= 0 else 1 + bisect.bisect_right(EDGES, value)


def _ticks(count: int, most: float) -> list[int]:
    """Returns which of so many rows or columns are named."""
    if count <= most:
        return list(range(count))
    return [
        int(tick)
        for tick in linear_ticks(0, count, max(1, int(most)))
        if tick == int(tick) < count
    ]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
