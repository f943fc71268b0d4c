"""Writes the report of a run as it ends."""

from jaxdist.operations.page import experts, html, summary
from jaxdist.trainer import workdir
from jaxdist.trainer.callbacks import Callback, Run, RunEnd


class Report(Callback):
    """Writes `report.html` at the end of a run."""

    lead_only = True

    def on_start(self, run: Run) -> None:
        """Takes the run's folder."""
        self._run = run

    def on_end(self, end: RunEnd) -> None:
        """Writes the page. The run is done and saved: no report is no failure."""
        if not end.is_final:
            return
        folder = self._run.folder
        try:
            shown = summary.read_run(folder)
            for line in experts.closing_lines(shown):
                self._run.note(line)
            workdir.write_text(folder / workdir.REPORT, html.render([shown]))
            self._run.note(f"report: {folder / workdir.REPORT}")
        except Exception as error:
            self._run.note(f"no report: {error}")
