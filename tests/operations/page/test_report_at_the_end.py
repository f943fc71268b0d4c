"""The report of a run that is done: what goes wrong with it is said, and is no
failure.
"""

import json
import time
from types import SimpleNamespace

import pytest

from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.ledger.run_lives import read_lives
from jaxdist.operations.page.report import Report
from jaxdist.storage import run_format
from jaxdist.trainer.callbacks import RunEnd
from support.ledgers import published


@pytest.fixture(name="told")
def told_fixture(tmp_path, capsys):
    """Returns a function that writes the report and gives what was printed."""

    def write() -> str:
        report = Report()
        report.on_start(SimpleNamespace(folder=tmp_path, note=print))
        report.on_end(RunEnd(state=None))
        return " ".join(capsys.readouterr().out.split())

    return write


def test_files_of_another_shape_leave_a_report(tmp_path, told):
    (tmp_path / "events.jsonl").write_text('{"event": "save"}\n[]\n')
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000)
    (tmp_path / "run.json").write_text(
        json.dumps(run_format.marked({"mesh": [], "sharding": 3}))
    )
    assert "report:" in told()
    page = (tmp_path / "report.html").read_text()
    assert "events.jsonl: 2 lines could not be read" in page
    assert "run.json: mesh is list" in page


def test_times_are_those_of_the_ledger_at_the_end(tmp_path):
    """The thread of a ledger writes after seconds: a compilation at the end is missing."""
    (tmp_path / "run.json").write_text(json.dumps(run_format.marked({})))
    with published(book := Ledger(age_s=100.0), tmp_path):
        while not read_lives(tmp_path):
            time.sleep(0.01)
        book.compiled(50.0)
        report = Report(book)
        report.on_start(SimpleNamespace(folder=tmp_path, note=print))
        report.on_end(RunEnd(state=None))
    page = (tmp_path / "report.html").read_text()
    assert "<td>compile</td><td>50s</td>" in page


def test_a_report_that_cannot_be_written_is_said(tmp_path, told):
    (tmp_path / "run.json").write_text(json.dumps(run_format.marked({})))
    (tmp_path / "report.html").mkdir()
    assert "no report:" in told()
