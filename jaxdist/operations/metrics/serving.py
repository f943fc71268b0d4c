"""Callback that serves the metrics of a run to Prometheus."""

import contextlib

import jax

from jaxdist.config import ConfigError, extras
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.metrics import prometheus
from jaxdist.trainer.callbacks import Callback, Run


class MetricsServer(Callback):
    """Callback that serves `/metrics` at `telemetry.port` of the first process."""

    lead_only = True
    keys = ("telemetry.port", "telemetry.address")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._serving = contextlib.ExitStack()

    def on_start(self, run: Run) -> None:
        """Starts the server, if a port is set.

        If the port is taken at a later start, the run only prints a warning. Nobody may
        be watching such a restart (`launch`).

        Raises:
          ConfigError: at the first start of a run, the server cannot listen at the
          port.
        """
        if not run.config.telemetry.port:
            return
        process = jax.process_index()
        devices = [device for device in run.devices if device.process_index == process]
        chips: prometheus.ChipMetrics = tuple  # yields no metrics
        if devices[0].platform == "tpu":
            with contextlib.suppress(ImportError):  # this libtpu has no metrics
                chips = extras.load("jaxdist.operations.metrics.tpu_metrics").read
        view = prometheus.RunMetrics(self._ledger, devices, chips=chips)
        config = run.config.telemetry
        try:
            port = self._serving.enter_context(prometheus.served(config, view))
        except ConfigError as error:
            if len(self._ledger.lives()) == 1:
                self._ledger.withdraw()  # so that the next start is the first one again
                raise
            run.note(f"warning: no metrics: {error}")
            return
        host = config.address
        if ":" in host:
            host = f"[{host}]"
        run.note(f"metrics: http://{host}:{port}/metrics")
        run.writer.attach(view)

    def __exit__(self, *_: object) -> None:
        """Stops the server."""
        self._serving.close()
