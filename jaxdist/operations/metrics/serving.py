"""Serves the metrics of a run to Prometheus while it trains."""

import contextlib

import jax

from jaxdist.config import ConfigError, extras
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.metrics import prometheus
from jaxdist.trainer.callbacks import Callback, Run


class MetricsServer(Callback):
    """Serves `/metrics` at `telemetry.port` of the first process, if it is set."""

    lead_only = True
    keys = ("telemetry.port", "telemetry.address")

    def __init__(self, ledger: Ledger) -> None:
        """Args:
        ledger: of the run; its times are metrics.
        """
        self._ledger = ledger
        self._serving = contextlib.ExitStack()

    def on_start(self, run: Run) -> None:
        """Begins to listen.

        A run that goes on without anybody looking (`launch`) is not lost for a port
        that another has taken.

        Raises:
          ConfigError: at a run's first start: nothing can listen there.
        """
        if not run.config.telemetry.port:
            return
        process = jax.process_index()
        devices = [item for item in run.devices if item.process_index == process]
        chips: prometheus.ChipMetrics = tuple  # none
        if devices[0].platform == "tpu":
            with contextlib.suppress(ImportError):  # a libtpu without that module
                chips = extras.load("jaxdist.operations.metrics.tpu_metrics").read
        view = prometheus.RunMetrics(self._ledger, devices, chips=chips)
        config = run.config.telemetry
        try:
            port = self._serving.enter_context(prometheus.served(config, view))
        except ConfigError as error:
            if len(self._ledger.lives()) == 1:
                self._ledger.withdraw()  # or the next start would not be the first
                raise
            run.note(f"warning: no metrics: {error}")
            return
        host = config.address
        if ":" in host:
            host = f"[{host}]"
        run.note(f"metrics: http://{host}:{port}/metrics")
        run.writer.attach(view)

    def __exit__(self, *_: object) -> None:
        """Stops listening."""
        self._serving.close()
