"""Display of a run in a notebook: a table and a curve, redrawn in place."""

import html
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

REDRAW_EVERY_S = 1.0
_MAX_POINTS = 300  # at twice as many points, every second one is dropped
_WIDTH = 560  # pixels
_HEIGHT = 150  # pixels
_MARGIN = 6  # pixels around the curve

Pairs = Sequence[tuple[str, str]]


def output_of_cell() -> Any:
    """Finds IPython's `display` function; None outside of a notebook's kernel."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    if ipython and getattr(ipython.get_ipython(), "kernel", None):
        return ipython.display.display
    return None


class NotebookBlock:
    """Table of the newest values and curve of the loss, in the output of a cell."""

    def __init__(
        self, display: Callable[..., Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Shows nothing yet.

        Args:
          display: IPython's `display` function.
          clock: gives monotonic seconds.
        """
        self._display = display
        self._clock = clock
        self._handle: Any = None
        self._curve: list[tuple[int, float]] = []
        self._evaluations: list[tuple[int, float]] = []
        self._drawn_s = -math.inf  # time of the last drawing

    def add(self, step: int, loss: object, *, evaluation: bool = False) -> None:
        """Adds a point of the curve, unless the loss is no finite number.

        Args:
          step: number of the step.
          loss: its loss.
          evaluation: the loss is one on held-out data.
        """
        if isinstance(loss, int | float) and math.isfinite(loss):
            points = self._evaluations if evaluation else self._curve
            points.append((step, float(loss)))
            if len(points) > 2 * _MAX_POINTS:
                del points[1:-1:2]

    def draw(self, head: str, pairs: Pairs, *, last: bool = False) -> None:
        """Redraws the block, at most once in REDRAW_EVERY_S.

        Args:
          head: first line.
          pairs: (name, value) of the table's columns.
          last: it is the last drawing, which is never skipped.
        """
        if not last and self._clock() < self._drawn_s + REDRAW_EVERY_S:
            return
        self._drawn_s = self._clock()
        text = "  ".join([head, *(f"{name} {value}" for name, value in pairs)])
        bundle = {"text/html": self._page(head, pairs), "text/plain": text}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _page(self, head: str, pairs: Pairs) -> str:
        names = "".join(f"<th>{html.escape(name)}</th>" for name, _ in pairs)
        values = "".join(f"<td>{html.escape(value)}</td>" for _, value in pairs)
        table = f"<table><tr>{names}</tr><tr>{values}</tr></table>"
        return f"<div><b>{html.escape(head)}</b>{table}{self._svg()}</div>"

    def _svg(self) -> str:
        """Draws the training losses as a curve, and those on held-out data as dots."""
        num_training = len(self._curve)
        if num_training < 2:
            return ""
        steps, losses = zip(*self._curve, *self._evaluations, strict=True)
        xs = _pixels(steps, _WIDTH)
        ys = _pixels([-loss for loss in losses], _HEIGHT)
        points = list(zip(xs, ys, strict=True))
        line = " ".join(f"{x},{y}" for x, y in points[:num_training])
        dots = "".join(
            f'<circle cx="{x}" cy="{y}" r="3" fill="#d62728"/>'
            for x, y in points[num_training:]
        )
        label = (
            f"loss {max(losses):.4g} to {min(losses):.4g}, "
            f"steps {min(steps)} to {max(steps)}"
        )
        if dots:
            label += "; dots: held-out data"
        return (
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
            f"{dots}</svg><div><small>{label}</small></div>"
        )


def _pixels(values: Sequence[float], size: int) -> list[float]:
    """Scales values to the pixels of a side; the lowest is at the margin."""
    low = min(values)
    scale = (size - 2 * _MARGIN) / (max(values) - low or 1)
    return [round(_MARGIN + scale * (value - low), 1) for value in values]
