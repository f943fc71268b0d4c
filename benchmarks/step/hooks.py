"""Times what watching a run costs per step: the loop's calls, without the steps.

    python benchmarks/step/hooks.py --out benchmarks/results/hooks.json

A round is a number of steps. Each step has the watchdog's beats and the ledger's
buckets (`Watchdog.at`, twice) and the step alarm (`StepAlarm.start` and `record`).
Every ten steps a row goes to the exporter. Meanwhile `telemetry.port` is open and read
twice a second, and a thread writes the ledger. Processor time is that of all threads.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import measuring

from jaxdist.config.groups.telemetry import TelemetryConfig
from jaxdist.config.groups.watchdog import WatchdogConfig
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.ledger.run_lives import STEP, WAIT
from jaxdist.operations.metrics.prometheus import RunMetrics, served
from jaxdist.operations.watch.step_alarm import StepAlarm
from jaxdist.operations.watch.watchdog import Watchdog

LIMIT_S = 20e-6
LOG_EVERY = 10  # steps a row, as train.log_every has it
ROW = {
    "loss": 2.5,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "step_time_s": 0.1,
    "mfu": None,
}
ROW |= {f"stats/{n}": 0.5 for n in range(20)}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200, help="steps a round")
    parser.add_argument("--out", help="JSON file")
    flags = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        watched(Path(folder)) as (ledger, watch, view),
    ):
        alarm = StepAlarm(lambda *_, **__: None, lambda _: None)
        numbers = itertools.count(1)

        def beats() -> None:
            for number in itertools.islice(numbers, flags.steps):
                for phase in ("data", "step"):
                    ledger.enter(phase, number - 1)
                    watch.at(phase, number, done=number - 1, sample=8 * number)

        def alarms() -> None:
            for number in itertools.islice(numbers, flags.steps):
                alarm.start(number, data_s=1e-3 * number, devices_s=1e-2 * number)
                alarm.record()

        def rows() -> None:
            for number in itertools.islice(numbers, flags.steps):
                if number % LOG_EVERY == 0:
                    ledger.move(STEP, WAIT, 0.0)
                    view.write(number, ROW)

        calls = {"beats and buckets": beats, "step alarm": alarms, "rows": rows}
        found = measuring.interleaved(
            list(calls.values()), flags.rounds, lambda *_: None
        )
    record = measuring.record_head(sys.argv[1:]) | {
        "steps_per_round": flags.steps,
        "rounds": flags.rounds,
    }
    for clock in ("wall_s", "processor_s"):
        each = {
            name: measuring.quartiles([getattr(t, clock) / flags.steps for t in times])
            for name, times in zip(calls, found, strict=True)
        }
        total = (
            sum(
                statistics.median([getattr(t, clock) for t in times]) for times in found
            )
            / flags.steps
        )
        record[clock] = each | {"together": total}
        parts = ", ".join(f"{name} {1e6 * q['median']:.2f}" for name, q in each.items())
        print(
            f"{clock}: {1e6 * total:.2f} us a step ({parts}); the limit is {1e6 * LIMIT_S:.0f}"
        )
    measuring.write(flags.out, record)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[tuple[Ledger, Watchdog, RunMetrics]]:
    """Yields the watchdog of a run and what serves its metrics, with their threads and
    somebody who asks.
    """
    over = threading.Event()
    with (
        Watchdog(WatchdogConfig(), folder, enabled=True) as watch,
        Ledger() as ledger,
    ):
        ledger.on_start(SimpleNamespace(folder=folder, num_chips=1))
        view = RunMetrics(ledger)
        with served(TelemetryConfig(), view) as port:

            def scrape() -> None:
                while not over.wait(0.5):
                    urllib.request.urlopen(
                        f"http://127.0.0.1:{port}/metrics", timeout=10
                    ).read()

            thread = threading.Thread(target=scrape)
            thread.start()
            time.sleep(1)  # until the process beside it runs
            try:
                yield ledger, watch, view
            finally:
                over.set()
                thread.join()


if __name__ == "__main__":
    main()
