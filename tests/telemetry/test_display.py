"""The display: plain lines off a terminal, a live block on one, silence where it is
disabled.
"""

import io
import re
import time

import pytest
from rich.console import Console

from jaxdist.telemetry.display import Display

ROW = {
    "loss": 3.14159,
    "learning_rate": 3e-4,
    "tokens_per_s": 812345.0,
    "mfu_causal": 0.412,
    "step_time_s": 2.0,
    "data_wait_s": 0.001,
}


class Clock:
    """Monotonic seconds under the test's control."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def plain(**options):
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=False, width=60)
    display = Display(
        console=console,
        clock=clock,
        wall_clock=lambda: 0,
        **{"total_steps": 100, **options},
    )
    return display, file, clock


TIME = time.strftime("%Y-%m-%d %H:%M:%S  ", time.localtime(0))


def lines_of(file):
    """Returns the lines without the time that each begins with."""
    lines = file.getvalue().splitlines()
    assert all(line.startswith(TIME) for line in lines)
    return [line.removeprefix(TIME) for line in lines]


def test_plain_lines_carry_numbers_units_and_eta():
    display, file, _ = plain()
    with display:
        display.note("quickstart [bold]x")
        display.status("compiling")
        display.row(10, ROW)
    title, line = lines_of(file)
    assert title == "quickstart [bold]x", "text from outside is no markup"
    assert line == (
        "step 10/100 (10.0 %)  loss 3.1416  lr 3.00e-04  tokens/s 812k  MFU (causal) 41.2 %  "
        "step 2 s  data wait 1 ms  ETA 3m 00s"
    )


def test_plain_lines_are_rate_limited_but_first_and_last_are_printed():
    display, file, clock = plain()
    with display:
        for step in range(1, 51):
            clock.now += 0.1
            display.step(step)
            display.row(step, ROW)
    steps = [int(line.split("/")[0].split()[1]) for line in lines_of(file)]
    assert steps[0] == 1
    assert steps[-1] == 50
    assert len(steps) <= 7
    assert steps == sorted(set(steps))


def test_missing_and_nonfinite_values_do_not_break_a_line():
    display, file, _ = plain()
    with display:
        display.row(1, {"loss": float("nan"), "mfu_causal": None})
        display.evaluation(1, {"eval_loss": 2.5, "eval_tokens": 2048})
    assert "loss nan" in file.getvalue()
    assert "MFU" not in file.getvalue()
    assert "step 1  eval loss 2.5000  eval tokens 2.05k" in file.getvalue()


def test_time_limit_bounds_the_eta():
    display, file, clock = plain(max_seconds=60.0)
    with display:
        clock.now += 30
        display.row(10, ROW)
    assert "(50.0 %)" in file.getvalue()
    assert "ETA 30s" in file.getvalue()


def test_a_terminal_gets_a_live_block():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Display(total_steps=10, console=console) as display:
        display.status("compiling the train step")
        display.row(10, ROW)
        display.note("saved checkpoints/10")
    text = file.getvalue()
    assert "step 10 / 10" in text
    assert "3.1416" in text
    assert "saved checkpoints/10" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l"), (
        "the cursor must come back"
    )


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_no_number_is_cut_on_a_narrow_terminal(width):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    row = ROW | {"learning_rate": 4.86e-4, "grad_norm": 1.234, "tokens_seen": 2e9}
    with Display(total_steps=100_000, console=console) as display:
        display.row(12_345, row)
        display.evaluation(12_345, {"eval_loss": 3.25})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    for text in (
        "4.86e-04",
        "812k",
        "41.2 %",
        "1.234",
        "3.2500 @ 12345",
        "12,345 /",
        "12.3 %",
        "ETA",
    ):
        assert text in shown, text
    assert "…" not in shown
    assert "..." not in shown
    live = shown[shown.rindex("●") :].splitlines()
    assert max(map(len, live)) <= width


def test_other_processes_show_nothing():
    display, file, _ = plain(enabled=False)
    with display:
        display.row(1, ROW)
        display.evaluation(1, {"eval_loss": 1.0})
        display.note("x")
    assert file.getvalue() == ""
