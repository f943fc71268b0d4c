"""What a run shows while it runs: a live block on a terminal, steady plain lines elsewhere.

Only this module imports rich. Off a terminal rich's Live prints nothing but its last frame, so
plain lines are printed there instead. The loop only stores numbers here; a thread of rich redraws
`REFRESH_PER_S` times a second, so a step costs about a microsecond.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxdist.telemetry.units import count_text, duration_text, percent_text, time_text

REFRESH_PER_S = 2  # a redraw takes 1-2 ms: under 0.5 % of a core


class Display:
    """Progress, ETA, loss, tokens/s, MFU, step time and data wait of one run; process 0 shows it.

    Use as a context manager; `step` after every update, `row` with every metrics row, `evaluation`
    with every evaluation row, `note` for events and messages.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        title: str = "",
        max_seconds: float | None = None,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = 1.0,
    ) -> None:
        """Shows nothing yet (see `start`).

        Args:
          total_steps: the step at which the run ends.
          first_step: updates finished before this run (the restored step).
          title: shown once, e.g. the config's name.
          max_seconds: wall-clock limit of this run (train.max_minutes), None = none.
          enabled: True on process 0 only; False makes every method do nothing.
          console: rich console, default standard output.
          clock: monotonic seconds.
          line_every_s: off a terminal, at least this long between two metric lines (the first and
            the last are always printed).
        """
        self._total = max(total_steps, 1)
        self._first = first_step
        self._title = title
        self._max_seconds = max_seconds
        self._enabled = enabled
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._line_every_s = line_every_s
        self._status = "starting"
        self._row: Mapping[str, object] = {}
        self._evaluation: Mapping[str, object] = {}
        self._step = first_step
        self._begin = self._mark_time = clock()
        self._mark_step = first_step
        self._step_s: float | None = None  # smoothed seconds per step, for the ETA
        self._last_line_s: float | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def start(self) -> "Display":
        """Starts the live block (terminal) or prints the title (elsewhere)."""
        if not self._enabled:
            return self
        if self._title:
            self._console.print(self._title, style="bold", markup=False, highlight=False)
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=REFRESH_PER_S,
            )
            self._live.start()
            # rich hides the cursor; a run that is killed could not bring it back
            self._console.show_cursor(True)
        return self

    def status(self, text: str) -> None:
        """Shows what the run waits for (compiling, restoring, saving); "" while training."""
        self._status = text

    def step(self, step: int) -> None:
        """Says that `step` updates are finished. Costs about a microsecond."""
        self._step = step
        self._status = ""

    def row(self, step: int, values: Mapping[str, object]) -> None:
        """Shows a metrics row (fields of metrics.jsonl; missing or None ones are left out)."""
        if not self._enabled:
            return
        self.step(step)
        self._row = values
        now = self._clock()
        self._estimate(step, now, values.get("step_time_s"))
        if self._live is None and self._line_due(step, now):
            self._last_line_s = now
            self._print(self._line(values))

    def evaluation(self, step: int, values: Mapping[str, object]) -> None:
        """Shows an evaluation row; always prints a line, so that it stays on the screen."""
        self._evaluation = {"step": step, **values}
        parts = [f"{name} {text}" for name, text in _metrics_text(values)]
        self.note("  ".join([f"step {step}", *parts]))

    def note(self, text: str) -> None:
        """Prints one line (above the live block)."""
        if self._enabled:
            self._print(text)

    def close(self) -> None:
        """Prints the last row if it was held back and ends the live block. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._enabled and self._row and self._last_line_s != self._mark_time:
            self._print(self._line(self._row))
        self._enabled = False

    def __enter__(self) -> "Display":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _estimate(self, step: int, now: float, step_time_s: object) -> None:
        """Updates the smoothed seconds per step from a row, or from the clock without one."""
        steps = step - self._mark_step
        if isinstance(step_time_s, int | float):
            seconds = float(step_time_s)
        elif steps > 0:
            seconds = (now - self._mark_time) / steps
        else:
            return
        # the first window holds compilation: forget it at once, then smooth
        first = self._step_s is None or self._mark_step == self._first
        self._step_s = seconds if first else 0.8 * (self._step_s or 0.0) + 0.2 * seconds
        self._mark_step, self._mark_time = step, now

    def _line_due(self, step: int, now: float) -> bool:
        last = self._last_line_s
        return last is None or now - last >= self._line_every_s or step >= self._total

    def _eta_text(self) -> str:
        left = math.inf
        if self._step_s is not None:
            left = max(0, self._total - self._step) * self._step_s
        if self._max_seconds is not None:
            left = min(left, max(0.0, self._max_seconds - (self._clock() - self._begin)))
        return f"ETA {duration_text(left)}" if left < math.inf else "ETA -"

    def _fraction(self) -> float:
        """Returns how much of the run is done: by steps or by the time limit, the larger."""
        done = self._step / self._total
        if self._max_seconds:
            done = max(done, (self._clock() - self._begin) / self._max_seconds)
        return min(1.0, done)

    def _line(self, values: Mapping[str, object]) -> str:
        head = f"step {self._step}/{self._total} ({100 * self._fraction():.1f} %)"
        parts = [f"{name} {text}" for name, text in _metrics_text(values)]
        return "  ".join([head, *parts, self._eta_text()])

    def _render(self) -> Group:
        """Returns the live block, a progress line and the numbers; rich's thread calls it."""
        progress = Table.grid(padding=(0, 1))
        head = self._spinner if self._status else Text("●", style="green")
        label = self._status or f"step {self._step:,} / {self._total:,}"
        times = f"{duration_text(self._clock() - self._begin)} elapsed · {self._eta_text()}"
        progress.add_row(
            head,
            Text(label),
            ProgressBar(
                total=1.0,
                completed=self._fraction(),
                width=28,
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"{100 * self._fraction():5.1f} %"),
            Text(times, style="dim"),
        )
        numbers = Table.grid(padding=(0, 3))
        shown = _metrics_text(self._row)
        if self._evaluation.get("eval_loss") is not None:
            name, text = _metrics_text(self._evaluation)[0]
            shown.append((name, f"{text} @ {self._evaluation['step']}"))
        numbers.add_row(*(Text(name, style="dim") for name, _ in shown))
        numbers.add_row(*(Text(text, style="bold") for _, text in shown))
        return Group(progress, numbers) if shown else Group(progress)


def _metrics_text(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Returns (label, text with unit) for the fields that a reader follows, in reading order."""
    return [
        (label, show(float(value)))
        for field, label, show in _SHOWN
        if isinstance(value := values.get(field), SupportsFloat)  # None: unknown, left out
    ]


def _loss_text(value: float) -> str:
    return f"{value:.4f}"


_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", _loss_text),
    ("learning_rate", "lr", lambda value: f"{value:.2e}"),
    ("grad_norm", "grad norm", lambda value: f"{value:.3f}"),
    ("tokens_per_s", "tokens/s", count_text),
    ("mfu_causal", "MFU (causal)", percent_text),
    ("step_time_s", "step", time_text),
    ("data_wait_s", "data wait", time_text),
    ("tokens_seen", "tokens", count_text),
    ("eval_loss", "eval loss", _loss_text),
    ("eval_tokens", "eval tokens", count_text),
)
