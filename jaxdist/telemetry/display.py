"""Display of a run: a live block on a terminal or in a notebook, plain lines elsewhere.

Only this module imports rich. Off a terminal, rich's Live would print only its last
frame, so this module prints plain lines there. The loop only stores numbers, which
costs about a microsecond per step; a thread of rich redraws them `REFRESH_PER_S` times
a second.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxdist.config.redact import without_secrets
from jaxdist.telemetry.notebook import NotebookBlock, output_of_cell
from jaxdist.telemetry.units import duration_text, field_text

REFRESH_PER_S = 2  # a redraw takes 1-2 ms: under 0.5 % of a core
_GAP = 3  # characters between two numbers of the live block
_BAR = 16  # characters of the progress bar
_WIDE = 80  # characters of the narrowest terminal that shows the bar
# least seconds between two lines off a terminal; the first and last are always printed
LINE_EVERY_S = 1.0


def print_safe(text: str) -> None:
    """Prints a line, without an error if standard output does not take it.

    Reasons are a full disk, a closed terminal, or characters that it cannot encode. The
    secrets of URLs are hidden.
    """
    text = without_secrets(text)
    with contextlib.suppress(OSError):
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)


def lively(
    say: Callable[[str], None], progress: Callable[[str], None]
) -> Callable[[str], None]:
    """Makes a `say` whose lines also count as progress of long work.

    Args:
      say: prints a line.
      progress: is called with each line before it is printed.
    """

    def say_with_progress(text: str) -> None:
        progress(text)
        say(text)

    return say_with_progress


class Display:
    """Display of a run's progress, ETA and metrics, on process 0.

    It is a context manager. The loop calls `step` after each update, `row` with each
    metrics row, `evaluation` with each evaluation row, and `note` for messages.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        max_seconds: float | None = None,
        unit: str = "tokens",
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Shows nothing yet.

        Args:
          total_steps: the step at which the run ends.
          first_step: the restored step; 0 for a new run.
          max_seconds: wall-clock limit of this start (train.max_minutes), None = none.
          unit: unit that the run counts: "tokens" or "samples".
          enabled: True on process 0 only; False shows nothing.
          console: rich console, default standard output.
          clock: gives monotonic seconds.
          wall_clock: gives seconds since 1970, for the local time of each line.
        """
        self._total = total_steps
        self._unit = unit
        self._step = first_step
        self._max_seconds = max_seconds
        self._block: NotebookBlock | None = None
        if console is None and enabled:
            cell = output_of_cell()
            if cell:
                self._block = NotebookBlock(cell, clock)
        self._console = console or Console(highlight=False, force_jupyter=False)
        self._console.quiet = not enabled
        self._clock = clock
        self._wall_clock = wall_clock
        self._begin = clock()
        self._status = "starting"
        self._row: Mapping[str, object] = {}
        self._evaluation: list[tuple[str, str]] = []
        # begin, values and end of the newest line, if it was not printed
        self._held_back: tuple[str, Mapping[str, object], str] | None = None
        self._line_due = -math.inf  # time from which a line may be printed again
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> "Display":
        if (
            self._block is None
            and self._console.is_terminal
            and not self._console.quiet
        ):
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=REFRESH_PER_S,
            )
            self._live.start()
            # rich hides the cursor; a run that is killed could not bring it back
            self._console.show_cursor(True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()
        elif self._block is not None:
            self._draw(last=True)
        elif self._held_back:
            self.note(self._line(*self._held_back))

    def status(self, text: str) -> None:
        """Shows a status such as "restoring" until the next step."""
        self._status = text

    def step(self, step: int) -> None:
        """Sets the number of finished updates. It costs about a microsecond."""
        self._step = step
        self._status = ""

    def row(self, step: int, values: Mapping[str, object]) -> None:
        """Shows a row of metrics.jsonl; fields that are missing or None are skipped."""
        self.step(step)
        self._row = values
        if self._block is not None:
            self._block.add(step, values.get("loss"))
            self._draw()
        if self._live is not None or self._block is not None:
            return
        head = f"step {step}/{self._total} ({100 * self._fraction():.1f} %)"
        line = head, values, self._eta_text()
        if self._clock() < self._line_due and step < self._total:
            self._held_back = line
            return
        self.note(self._line(*line))
        self._held_back = None
        self._line_due = self._clock() + LINE_EVERY_S

    def _line(self, head: str, values: Mapping[str, object], tail: str) -> str:
        """Formats a row as a line. Most rows of short steps are never printed."""
        parts = [f"{name} {text}" for name, text in self._metrics_text(values)]
        return "  ".join([head, *parts, tail])

    def evaluation(self, step: int, values: Mapping[str, object]) -> None:
        """Shows an evaluation row; outside of notebooks it always prints a line."""
        texts = self._metrics_text(values)
        self._evaluation = [
            (name, f"{text} @ {step}")
            for name, text in texts
            if name != f"eval {self._unit}"
        ]
        if self._block is not None:
            self._block.add(step, values.get("eval_loss"), evaluation=True)
            self._draw()
        else:
            parts = [f"{name} {text}" for name, text in texts]
            self.note("  ".join([f"step {step}", *parts]))

    def _draw(self, *, last: bool = False) -> None:
        """Redraws a notebook's block."""
        head = f"step {self._step:,} / {self._total:,} ({100 * self._fraction():.1f} %)"
        if not last:
            head += f" · {self._eta_text()}"
        assert self._block is not None
        self._block.draw(head, self._shown(), last=last)

    def note(self, text: str) -> None:
        """Prints one line, above the live block if there is one.

        A full disk does not stop the run.
        """
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._wall_clock()))
        with contextlib.suppress(OSError):
            self._console.print(
                f"{now}  {without_secrets(text)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def _eta_text(self) -> str:
        """Formats the time left, by the speed of the last row and the time limit."""
        times_left_s = []
        step_s = self._row.get("step_time_s")
        if isinstance(step_s, float):
            times_left_s.append((self._total - self._step) * step_s)
        if self._max_seconds is not None:
            times_left_s.append(max(0.0, self._max_seconds - self._elapsed_s()))
        left_s = min(times_left_s, default=math.inf)
        return f"ETA {duration_text(left_s)}" if left_s < math.inf else "ETA -"

    def _elapsed_s(self) -> float:
        return self._clock() - self._begin

    def _fraction(self) -> float:
        """Computes the finished share of the run, by steps or by its time limit."""
        done = self._step / self._total
        if self._max_seconds:
            done = max(done, self._elapsed_s() / self._max_seconds)
        return min(1.0, done)

    def _render(self) -> Group:
        """Draws the live block: a progress line and numbers. Rich's thread calls it."""
        done = self._fraction()
        times = f"{duration_text(self._elapsed_s())} elapsed · {self._eta_text()}"
        cells = [
            self._spinner if self._status else Text("●", style="green"),
            Text(self._status or f"step {self._step:,} / {self._total:,}"),
            ProgressBar(1.0, done, width=_BAR, complete_style="cyan"),
            Text(f"{100 * done:5.1f} %"),
            Text(times, style="dim"),
        ]
        if self._console.width < _WIDE:
            del cells[2]
        progress = Table.grid(padding=(0, 1))
        progress.add_row(*cells)
        numbers = [
            Text.assemble((name, "dim"), "\n", (text, "bold"))
            for name, text in self._shown()
        ]
        return Group(progress, Columns(numbers, padding=(0, _GAP)))

    def _shown(self) -> list[tuple[str, str]]:
        return self._metrics_text(self._row) + self._evaluation

    def _metrics_text(self, values: Mapping[str, object]) -> list[tuple[str, str]]:
        """Formats the shown fields as (label, text with unit), in reading order."""
        model_labels = {
            name: name.replace("eval_", "eval ", 1)
            for name in values
            if name.startswith(_MODEL_PREFIXES) and name not in _LABELS
        }
        labels = list(_LABELS.items())
        labels[2:2] = model_labels.items()  # after the losses
        texts = []
        for field, label in labels:
            value = values.get(field)
            if isinstance(value, SupportsFloat):  # None: unknown
                text = field_text(field, float(value))
                texts.append((label.replace("tokens", self._unit), text))
        return texts


_LABELS = {  # labels of fields of a row
    "loss": "loss",
    "eval_loss": "eval loss",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "loss_scale": "loss scale",
    "tokens_per_s": "tokens/s",
    "mfu_causal": "MFU (causal)",
    "step_time_s": "step",
    "data_wait_s": "data wait",
    "tokens_seen": "tokens",
    "eval_tokens": "eval tokens",
}
# prefixes of fields that a model adds to its loss
_MODEL_PREFIXES = ("aux/", "eval_")
