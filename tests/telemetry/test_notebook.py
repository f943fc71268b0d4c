"""A run in a notebook: one table and one curve that are redrawn, instead of a line a
second.
"""

import math
import re
import sys
from types import SimpleNamespace

import pytest

from jaxdist.telemetry import notebook
from jaxdist.telemetry.display import Display
from jaxdist.telemetry.notebook import NotebookBlock


class Cell:
    """Stands in for IPython: notes what is displayed, and its updates."""

    def __init__(self):
        self.shown, self.handles = [], 0

    def display(self, bundle, *, raw, display_id):
        assert raw
        assert display_id
        self.handles += 1
        self.shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: self.shown.append(bundle))


@pytest.fixture
def cell(monkeypatch):
    made = Cell()
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(
        get_ipython=lambda: shell, display=SimpleNamespace(display=made.display)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return made


def test_rows_redraw_one_block_and_print_no_lines(cell, capsys):
    now = [0.0]
    with Display(total_steps=100, clock=lambda: now[0], unit="samples") as display:
        display.note("mesh: <one>")
        for step in range(1, 101):
            now[0] += 0.1
            display.row(step, {"loss": 5 - step / 50, "tokens_per_s": 1234.0})
            if step % 50 == 0:
                display.evaluation(
                    step, {"eval_loss": 4.0, "eval_a<b": 0.5, "eval_tokens": 9}
                )
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  mesh: <one>", line)
    # once a second, and at the end
    assert cell.handles == 1
    assert 10 <= len(cell.shown) <= 13
    page, text = cell.shown[-1]["text/html"], cell.shown[-1]["text/plain"]
    assert text.startswith("step 100 / 100 (100.0 %)  loss 3.0000")
    assert "ETA" not in text
    assert "<th>samples/s</th>" in page
    assert "<td>1.23k</td>" in page
    assert "eval a&lt;b" in page
    assert len(re.search(r'points="([^"]+)"', page)[1].split()) == 100
    assert page.count("<circle") == 2
    assert 'aria-label="loss 4.98 to 3, steps 1 to 100; dots: held-out data"' in page


def test_it_is_for_a_kernel_alone(cell, monkeypatch):
    assert notebook.output_of_cell() is not None
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    )
    assert notebook.output_of_cell() is None  # a shell in a terminal
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None)
    )
    assert notebook.output_of_cell() is None  # imported by a script
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook.output_of_cell() is None


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    shown = []
    display = Cell()
    block = NotebookBlock(display.display, clock=lambda: 0.0)
    for step in range(1, 5001):
        block.add(step, math.nan if step == 7 else float(step))
    block.draw("", [], last=True)
    shown = re.search(r'points="([^"]+)"', display.shown[0]["text/html"])[1].split()
    assert 200 < len(shown) <= 600
    assert shown[0].startswith("6.0,")
    assert shown[-1] == "554.0,6.0"
