"""Tables and texts of a page, as HTML. All text is escaped."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape

_NUMBER = re.compile(r"(-?[\d.,]+(e[-+]\d+)?( %)?|–)?")
ABSENT = "–"


def titled(title: str, body: str) -> str:
    """Puts a heading above a body; "" without a body."""
    if not body:
        return ""
    return f"<h2>{escape(title)}</h2>{body}"


def text_card(text: str, *, wraps: bool = True) -> str:
    """Draws a card with preformatted text; "" without text.

    Args:
      text: the text.
      wraps: long lines are wrapped; if not, they are scrolled, as tables need it.
    """
    if not text:
        return ""
    style = "" if wraps else ' class="lines"'
    return f'<div class="card scroll"><pre{style}>{escape(text)}</pre></div>'


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    keys: Sequence[str] = (),
    row_styles: Sequence[str] = (),
) -> str:
    """Draws a scrolling card with a table; "" without rows.

    Columns of numbers are aligned to the right.

    Args:
      head: names of the columns.
      rows: texts of the cells.
      keys: HTML before the first cell of each row; () = none.
      row_styles: CSS class of each row, "" = none; () = none for all rows.
    """
    if not rows:
        return ""
    styles = []
    for column in zip(*rows, strict=True):
        is_numbers = all(map(_NUMBER.fullmatch, column))
        styles.append(" class=number" if is_numbers else "")
    body = ""
    for index, row in enumerate(rows):
        cells = [escape(text) for text in row]
        if keys:
            cells[0] = f"{keys[index]} {cells[0]}"
        row_class = ""
        if row_styles and row_styles[index]:
            row_class = f" class={row_styles[index]}"
        body += f"<tr{row_class}>{_cells('td', cells, styles)}</tr>"
    names = _cells("th", [escape(name) for name in head], styles)
    return (
        '<div class="card scroll" tabindex="0"><table><thead><tr>'
        f"{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(tag: str, contents: Sequence[str], styles: Sequence[str]) -> str:
    return "".join(
        f"<{tag}{style}>{content}</{tag}>"
        for content, style in zip(contents, styles, strict=True)
    )


def side_by_side(tables: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Lists rows of (key, value in each table), sorted by key."""
    keys = sorted({key for table in tables for key in table})
    return [[key, *(exact(table.get(key, ABSENT)) for table in tables)] for key in keys]


def exact(value: object) -> str:
    """Formats a value without loss: text unchanged, other values as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def brief(value: object) -> str:
    """Formats a value briefly: floats with six digits, integers with separators."""
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if type(value) is int:
        return f"{value:,}"
    return exact(value)
