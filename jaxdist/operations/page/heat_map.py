"""Heat maps as SVG text, with cells coloured by their relation to a mean.

All cells of one colour are one path, so maps of thousands of cells stay small. Colours
are CSS classes of the page (`heat-0` and so on), so one drawing suits light and dark
themes. The values are included as JSON for the page's hover script. The drawing and its
legend are complete without that script.
"""

import bisect
import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from jaxdist.operations.page.charts import (
    compact_json,
    label,
    linear_ticks,
    tick_text,
    x_label,
)

# values between the colours 1, 2, ...; colour 0 is for the value 0
EDGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
NAMES = ("none", "< 0.25", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "2", "≥ 4")

# sizes in pixels
_WIDTH = 1160
_LEFT = 58
_RIGHT = 10
_TOP = 6
_BOTTOM = 34
_MAX_CELL = 26.0
_MAX_HEIGHT = 520.0  # all rows together


def heat_map(
    title: str,
    values: Sequence[Sequence[float | None]],
    *,
    rows: str,
    columns: str,
    places: Sequence[float] | None = None,
) -> str:
    """Draws a heat map as one <svg>.

    Args:
      title: text for screen readers.
      values: rows of equal length. Values are relative to a mean and not negative; None
        = no cell.
      rows: name of a row, such as "layer".
      columns: name of a column, such as "expert".
      places: labels of the columns; None = their indices.
    """
    num_columns = len(values[0])
    num_rows = len(values)
    if places is None:
        places = list(range(num_columns))
    cell_w = min(_MAX_CELL, (_WIDTH - _LEFT - _RIGHT) / num_columns)
    cell_h = min(_MAX_CELL, _MAX_HEIGHT / num_rows)
    scale = f"translate({_LEFT} {_TOP}) scale({cell_w:.4g} {cell_h:.4g})"
    shapes = [f'<g transform="{scale}">{_cells(values)}</g>']
    bottom = _TOP + num_rows * cell_h
    for y in _ticks(num_rows, most=bottom / 18):
        middle = _TOP + (y + 0.5) * cell_h
        shapes.append(label("end", _LEFT - 8, middle + 4, y or f"{rows} 0"))
    below = bottom + 16
    shapes.append(label("end", _LEFT - 8, below, columns))
    longest = max(len(tick_text(place, 1)) for place in places)
    for x in _ticks(num_columns, most=num_columns * cell_w / (8 * longest + 14)):
        middle = _LEFT + (x + 0.5) * cell_w
        shapes.append(x_label(middle, below, tick_text(places[x], 1)))
    rounded = [
        [None if value is None else float(f"{value:.3g}") for value in row]
        for row in values
    ]
    names = escape(json.dumps([rows, columns]))
    box = json.dumps([_LEFT, _TOP, cell_w, cell_h])
    return (
        f'<svg class="heat" viewBox="0 0 {_WIDTH} {bottom + _BOTTOM:.0f}" role="img" tabindex="0" '
        f'aria-label="{escape(title)}" data-names="{names}" '
        f'data-box="{box}" data-places="{compact_json(places)}" '
        f'data-values="{compact_json(rounded)}">{"".join(shapes)}<rect class="cross" '
        f'width="{cell_w:.3g}" height="{cell_h:.3g}"/></svg>'
    )


def _cells(values: Sequence[Sequence[float | None]]) -> str:
    """Draws cells of size 1, with a path for each colour."""
    paths: dict[int, str] = defaultdict(str)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                paths[colour(value)] += f"M{x} {y}h1v1h-1z"
    return "".join(f'<path class="heat-{n}" d="{paths[n]}"/>' for n in sorted(paths))


def legend() -> str:
    """Draws the colours, each with its lowest value."""
    swatches = [
        f'<span class="heat-{n}">{escape(name)}</span>' for n, name in enumerate(NAMES)
    ]
    return f'<span class="legend scale">{"".join(swatches)}</span>'


def colour(value: float) -> int:
    """Finds the number of a value's colour: 0 for the value 0, else 1 or more."""
    if value <= 0:
        return 0
    return 1 + bisect.bisect_right(EDGES, value)


def _ticks(count: int, most: float) -> list[int]:
    """Chooses the rows or columns that get a label."""
    if count <= most:
        return list(range(count))
    ticks = linear_ticks(0, count, max(1, int(most)))
    return [int(tick) for tick in ticks if tick == int(tick) < count]
