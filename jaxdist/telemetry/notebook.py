"""What a run shows in a notebook: one table and one curve, redrawn in place."""

import html
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

REDRAW_EVERY_S = 1.0
_MAX_POINTS = 300  # of a curve; beyond, every second one is left out
_WIDTH = 560  # pixels
_HEIGHT = 150
_ROOM = 6  # around the curve

Pairs = Sequence[tuple[str, str]]


def output_of_cell() -> Any:
    """Finds IPython's `display` function; None outside of a notebook's kernel."""
    ipython = sys.modules.get("IPython")  # whoever runs a kernel has imported it
    if ipython and getattr(ipython.get_ipython(), "kernel", None):
        return ipython.display.display
    return None


class NotebookBlock:
    """A table of the newest values and the loss so far, in the output of one cell."""

    def __init__(
        self, display: Callable[..., Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Args:
        display: IPython's.
        clock: monotonic seconds.
        """
        self._display = display
        self._clock = clock
        self._handle: Any = None
        self._curve: list[tuple[int, float]] = []
        self._evaluations: list[tuple[int, float]] = []
        self._drawn_s = -math.inf

    def add(self, step: int, loss: object, *, evaluation: bool = False) -> None:
        """Notes a loss; what is no finite number leaves a gap."""
        if isinstance(loss, int | float) and math.isfinite(loss):
            points = self._evaluations if evaluation else self._curve
            points.append((step, float(loss)))
            if len(points) > 2 * _MAX_POINTS:
                del points[1:-1:2]

    def draw(self, head: str, pairs: Pairs, *, last: bool = False) -> None:
        """Redraws, once in REDRAW_EVERY_S at most.

        Args:
          last: whether nothing follows; then always.
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
        return f"<div><b>{html.escape(head)}</b>{table}{self._drawing()}</div>"

    def _drawing(self) -> str:
        """Draws the losses so far as a curve, and those on held-out data as dots."""
        if len(self._curve) < 2:
            return ""
        steps, losses = zip(*self._curve, *self._evaluations, strict=True)
        across = _pixels(steps, _WIDTH)
        down = _pixels([-loss for loss in losses], _HEIGHT)
        places = list(zip(across, down, strict=True))
        line = " ".join(f"{x},{y}" for x, y in places[: len(self._curve)])
        dots = "".join(
            f'<circle cx="{x}" cy="{y}" r="3" fill="#d62728"/>'
            for x, y in places[len(self._curve) :]
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
    """Spreads values over a side of the drawing, the lowest first."""
    low = min(values)
    scale = (size - 2 * _ROOM) / (max(values) - low or 1)
    return [round(_ROOM + scale * (value - low), 1) for value in values]
