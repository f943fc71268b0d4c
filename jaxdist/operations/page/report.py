"""Callback that writes the report of a run at its end."""

from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.page import experts, html, summary
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run, RunEnd


class Report(Callback):
    """Callback that writes `report.html` at the end of a run."""

    lead_only = True

    def __init__(self, ledger: Ledger | None = None) -> None:
        """Stores the ledger of the run, whose times the page shows; None = it has none."""
        self._ledger = ledger

    def on_start(self, run: Run) -> None:
        """Stores the run."""
        self._run = run

    def on_end(self, end: RunEnd) -> None:
        """Writes the page. A failure is only printed: the run is done and saved."""
        if not end.is_final:
            return
        folder = self._run.folder
        try:
            if self._ledger is not None:
                self._ledger.publish()
            run = summary.read_run(folder)
            for line in experts.closing_lines(run):
                self._run.note(line)
            workdir.write_text(folder / workdir.REPORT, html.render([run]))
            self._run.note(f"report: {folder / workdir.REPORT}")
        except Exception as error:
            self._run.note(f"no report: {error}")
