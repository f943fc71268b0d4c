"""What a run shows in a notebook: one table and one curve, redrawn in place."""

import html
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

REDRAW_EVERY_S = 1.0
_MAX_POINTS = 300  # of a curve; beyond, every second one is left out
_WIDTH, _HEIGHT, _ROOM = 560, 150, 6  # pixels

Pairs = Sequence[tuple[str, str]]


def output_of_cell() -> Any:
    """Returns IPython's `display` function where this code runs in a notebook's kernel,
    else None.
    """
    ipython = sys.modules.get("IPython")  # whoever runs a kernel has imported it
    shell = ipython.get_ipython() if ipython else None
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    return ipython.display.display


class NotebookBlock:
    """A table of the newest values and the loss so far, in the output of one cell."""

    def __init__(
        self, display: Callable[..., Any], clock: Callable[[], float] = time.monotonic
    ):
        """Args:
        display: IPython's.
        clock: monotonic seconds.
        """
        self._display, self._clock = display, clock
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
        table = f"<table><tr>{names}</tr><tr>{values}</tr></table>" if pairs else ""
        return f"<div><b>{html.escape(head)}</b>{table}{self._drawing()}</div>"

    def _drawing(self) -> str:
        every = self._curve + self._evaluations
        if len(self._curve) < 2:
            return ""
        steps, losses = [step for step, _ in every], [loss for _, loss in every]
        low, high, first, last = min(losses), max(losses), min(steps), max(steps)

        def place(step: int, loss: float) -> tuple[float, float]:
            across, up = (
                (step - first) / max(last - first, 1),
                (loss - low) / ((high - low) or 1),
            )
            inner = _WIDTH - 2 * _ROOM, _HEIGHT - 2 * _ROOM
            return round(_ROOM + across * inner[0], 1), round(
                _ROOM + (1 - up) * inner[1], 1
            )

        line = " ".join("{},{}".format(*place(*point)) for point in self._curve)
        dots = "".join(
            '<circle cx="{}" cy="{}" r="3" fill="#d62728"/>'.format(*place(*point))
            for point in self._evaluations
        )
        label = f"loss {high:.4g} to {low:.4g}, steps {first} to {last}"
        label += "; dots: held-out data" if dots else ""
        return (
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>{dots}</svg>'
            f"<div><small>{label}</small></div>"
        )
