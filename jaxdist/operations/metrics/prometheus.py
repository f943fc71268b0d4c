"""Metrics of a run for Prometheus, at `/metrics` of process 0.

They cost steps nothing. Rows and events arrive as they do for a logger; other values
are read at a scrape.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxdist.config import ConfigError
from jaxdist.config.groups.telemetry import TelemetryConfig
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.ledger.run_lives import account
from jaxdist.operations.metrics.scrape_server import ScrapeServer
from jaxdist.telemetry import device_memory

# Field of a row -> the gauge's name and help.
_GAUGES = {
    "loss": ("jaxdist_loss", "Data loss of the last row, nats per weighted target."),
    "eval_loss": ("jaxdist_eval_loss", "Loss of the last evaluation."),
    "grad_norm": (
        "jaxdist_gradient_norm",
        "Norm of the gradients of the last row, before clipping.",
    ),
    "learning_rate": ("jaxdist_learning_rate", "Learning rate of the last row."),
    "step_time_s": (
        "jaxdist_step_seconds",
        "Seconds of a step, mean over the steps of the last row.",
    ),
    "data_wait_s": (
        "jaxdist_data_wait_seconds",
        "Seconds of them that process 0 waited for its batch.",
    ),
    "tokens_per_s": (
        "jaxdist_tokens_per_second",
        "Tokens per second, all devices together.",
    ),
    "mfu": (
        "jaxdist_mfu_ratio",
        "Model FLOPs over the peak, attention counted causally.",
    ),
    "hfu": (
        "jaxdist_hfu_ratio",
        "FLOPs of the program over the peak, recomputation included.",
    ),
}
# Key of a device's `memory_stats` -> the gauge's name and help.
_MEMORY = {
    "bytes_in_use": ("jaxdist_device_memory_used_bytes", "Bytes of the device in use."),
    "peak_bytes_in_use": (
        "jaxdist_device_memory_peak_bytes",
        "Most bytes that were in use at a time.",
    ),
    "bytes_limit": (
        "jaxdist_device_memory_limit_bytes",
        "Bytes that a program may use.",
    ),
}

# Yields (name, help, a value for each chip).
ChipMetrics = Callable[[], Iterable[tuple[str, str, list[float]]]]


class RunMetrics(Collector):
    """Collector of a run's metrics.

    It receives rows and events like a logger. At each scrape it reads the ledger and
    the devices.
    """

    def __init__(
        self,
        ledger: Ledger,
        devices: Sequence[Any] = (),
        *,
        chips: ChipMetrics = lambda: (),
    ) -> None:
        """Collects nothing yet.

        Args:
          ledger: ledger of the run.
          devices: jax devices of this process.
          chips: reads more metrics of its chips.
        """
        self._ledger = ledger
        self._devices = devices
        self._chips = chips
        self._row: dict[str, float] = {}
        self._events: Counter[str] = Counter()
        self._saved_s: float | None = None  # seconds since 1970 of the last good save
        self._lock = threading.Lock()  # guards the three fields above

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Stores the numbers of a row of metrics.jsonl."""
        numbers = {
            name: float(x) for name, x in values.items() if isinstance(x, int | float)
        }
        with self._lock:
            self._row |= numbers

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        """Counts an event of events.jsonl."""
        with self._lock:
            self._events[name] += 1
            if name == "save" and fields.get("ok"):
                self._saved_s = time.time()

    def close(self) -> None:
        """Does nothing: the last numbers stay until the run ends."""

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their current values."""
        with self._lock:
            row = dict(self._row)
            events = dict(self._events)
            saved_s = self._saved_s
        yield CounterMetricFamily(
            "jaxdist_steps", "Updates finished.", value=self._ledger.step
        )
        if "tokens_seen" in row:
            text = "Targets with a weight that were trained on."
            yield CounterMetricFamily("jaxdist_tokens", text, value=row["tokens_seen"])
        for field, (name, text) in _GAUGES.items():
            if field in row:
                yield GaugeMetricFamily(name, text, value=row[field])
        if saved_s is not None:
            yield GaugeMetricFamily(
                "jaxdist_checkpoint_last_success_timestamp_seconds",
                "When the last save had succeeded, seconds since 1970.",
                value=saved_s,
            )
        counted = CounterMetricFamily(
            "jaxdist_events", "Events since this start of the run.", labels=["event"]
        )
        for name, count in events.items():
            counted.add_metric([name], count)
        yield counted
        yield from self._time()
        yield from self._memory()
        for name, text, values in self._chips():
            yield _labelled(name, text, "chip", dict(enumerate(values)))

    def _time(self) -> Iterator[Metric]:
        spent = account(self._ledger.lives())
        # These are gauges: time may move from one bucket to another, and a counter must
        # not fall.
        text = "Wall time since the first start of the run, by what it was spent on."
        yield _labelled("jaxdist_wall_seconds", text, "bucket", spent.buckets)
        if spent.goodput is not None:
            text = "Share of the wall time in steps that counted."
            yield GaugeMetricFamily("jaxdist_goodput_ratio", text, value=spent.goodput)

    def _memory(self) -> Iterator[Metric]:
        stats: dict[int, Mapping[str, int]] = {}
        for device in self._devices:
            stats[device.id] = device_memory.statistics(device)
        for key, (name, text) in _MEMORY.items():
            values = {
                device: of_device[key]
                for device, of_device in stats.items()
                if key in of_device
            }
            if values:
                yield _labelled(name, text, "device", values)


def _labelled(
    name: str, text: str, label: str, values: Mapping[Any, float]
) -> GaugeMetricFamily:
    """Makes a gauge from {value of its label: value}."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([str(label_value)], value)
    return family


@contextlib.contextmanager
def served(config: TelemetryConfig, metrics: RunMetrics) -> Iterator[int]:
    """Serves the metrics until the body ends; yields the port.

    Raises:
      ConfigError: the server cannot listen at the port.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server = ScrapeServer(config.address, config.port, registry)
    except OSError as error:
        raise ConfigError(
            f"telemetry.port={config.port}: nothing can listen at {config.address}:{config.port} "
            f"({error.strerror or error}); give another port or telemetry.address, or 0 for none"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
