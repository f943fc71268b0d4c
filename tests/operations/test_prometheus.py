"""`telemetry.port`: what a scrape finds, by HTTP, and that a real Prometheus
reads it.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxdist.config import ConfigError
from jaxdist.config.groups.telemetry import TelemetryConfig
from jaxdist.distributed.local_devices import free_port
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.metrics.prometheus import RunMetrics, served
from jaxdist.operations.metrics.serving import MetricsServer
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig
from support.ledgers import published
from support.paths import ROOT
from support.runs import command, environment, overrides, refused

DASHBOARD = ROOT / "deploy" / "grafana.json"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Returns {(name, values of labels ...): value} of a scrape."""
    families = text_string_to_metric_families(get(f"http://127.0.0.1:{port}/metrics"))
    return {
        (s.name, *s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


def shown(tmp_path, book: Ledger) -> RunMetrics:
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 9}

    def raises():
        raise RuntimeError("UNIMPLEMENTED")

    devices = [
        SimpleNamespace(id=n, memory_stats=lambda n=n: stats if n else None)
        for n in (0, 3)
    ]
    devices.append(SimpleNamespace(id=4, memory_stats=raises))
    view = RunMetrics(
        book, devices, chips=lambda: [("jaxdist_tpu_throttle", "how much", [0.0, 2.0])]
    )
    view.write(
        10,
        {
            "loss": 2.5,
            "tokens_seen": 640,
            "mfu": None,
            "step_time_s": 0.25,
            "text": "x",
        },
    )
    view.write(10, {"eval_loss": 2.25})
    for ok in (True, False):
        view.event("save", 10, ok=ok)
    view.event("slow_steps", 11, process=0)
    return view


def test_a_scrape_finds_the_run_as_it_is(tmp_path):
    book = Ledger()
    with (
        published(book, tmp_path),
        served(TelemetryConfig(), shown(tmp_path, book)) as port,
    ):
        book.enter("data", 0)
        book.enter("step", 12)
        before = time.time()
        found = scraped(port)
        with pytest.raises(OSError):  # loopback alone
            socket.create_connection(
                (socket.gethostbyname(socket.gethostname()), port), 1
            ).close()
            if socket.gethostbyname(socket.gethostname()).startswith("127."):
                raise OSError("this machine has no other address")
    assert found["jaxdist_steps_total",] == 12
    assert found["jaxdist_tokens_total",] == 640
    assert found["jaxdist_loss",] == 2.5
    assert found["jaxdist_eval_loss",] == 2.25
    assert found["jaxdist_step_seconds",] == 0.25
    assert ("jaxdist_mfu_ratio",) not in found
    assert found["jaxdist_events_total", "save"] == 2
    assert found["jaxdist_events_total", "slow_steps"] == 1
    assert found["jaxdist_checkpoint_last_success_timestamp_seconds",] == pytest.approx(
        before, abs=60
    )
    wall_s = sum(
        value for name, value in found.items() if name[0] == "jaxdist_wall_seconds"
    )
    assert wall_s == pytest.approx(before - book.lives()[0].began, abs=2)
    assert found["jaxdist_device_memory_used_bytes", "3"] == 5
    assert ("jaxdist_device_memory_used_bytes", "0") not in found, "a CPU knows none"
    assert found["jaxdist_tpu_throttle", "1"] == 2
    with pytest.raises(OSError):
        get(f"http://127.0.0.1:{port}/metrics")  # it ends with the run


def run_of(config: RunConfig, folder: Path) -> Run:
    """Returns a run as callbacks see it at its start."""
    return Run(
        composition=Composition(config, rules=None, spec=None),
        folder=folder,
        devices=jax.devices(),
        note=print,
        say=print,
        request_stop=print,
    )


def test_a_port_in_use_is_one_line_before_anything_compiles(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(
                ConfigError,
                match=f"telemetry.port={port}: nothing can listen at 127.0.0.1",
            ),
            served(TelemetryConfig(port=port), RunMetrics(Ledger())),
        ):
            pass
        config = RunConfig(telemetry=TelemetryConfig(port=port))
        for start in ("refused", "refused again", "trains", "goes on"):
            book = Ledger()
            server = MetricsServer(book)
            run = run_of(config, tmp_path)
            with published(book, tmp_path), server:
                if start == "trains":
                    continue
                if start != "goes on":
                    with pytest.raises(ConfigError, match="nothing can listen"):
                        server.on_start(run)
                else:  # nobody looks at a restart: it goes on
                    server.on_start(run)
                    assert (
                        "warning: no metrics: telemetry.port" in capsys.readouterr().out
                    )
    flags = [
        "--config",
        "quickstart",
        "--workdir",
        str(tmp_path),
        "--config.telemetry.port=70000",
    ]
    (fault,) = refused(capsys, *flags, *overrides("train.steps=1"))
    assert "telemetry.port" in fault
    assert "65535" in fault


def test_the_dashboard_asks_for_what_there_is(tmp_path):
    book, source = Ledger(), (ROOT / "jaxdist/operations/metrics").glob("*.py")
    text = "".join(file.read_text() for file in source)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = " ".join(
        target["expr"] for panel in panels for target in panel.get("targets", ())
    )
    names = set(asked.replace("(", " ").replace("[", " ").replace("{", " ").split())
    names = {word.rstrip("),]}") for word in names if word.startswith("jaxdist_")}
    assert len(panels) > 6
    assert len(names) > 10
    assert not [
        name for name in names if f'"{name.removesuffix("_total")}"' not in text
    ], names
    assert book.lives()


PROMETHEUS = shutil.which("prometheus")


@pytest.mark.prometheus
@pytest.mark.skipif(
    PROMETHEUS is None,
    reason="there is no program prometheus here (Debian: prometheus)",
)
def test_a_real_prometheus_reads_a_live_run(tmp_path):
    ours, its = free_port(), free_port()
    scrape = {
        "job_name": "jaxdist",
        "static_configs": [{"targets": [f"127.0.0.1:{ours}"]}],
    }
    whole = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(whole))  # JSON is YAML
    server = [PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = command(tmp_path / "run", train__steps=100_000, telemetry__port=ours)
    programs = [
        subprocess.Popen(
            [*server, f"--web.listen-address=127.0.0.1:{its}"], cwd=tmp_path, **quiet
        ),
        subprocess.Popen(run, env=environment(1), **quiet),
    ]

    def ask(query: str) -> list:
        address = f"http://127.0.0.1:{its}/api/v1/query?query={query}"
        try:
            return json.loads(get(address))["data"]["result"]
        except OSError:
            return []

    try:
        until = time.monotonic() + 540
        while not (steps := ask("jaxdist_steps_total>5")) or not ask("jaxdist_loss"):
            assert all(program.poll() is None for program in programs)
            assert time.monotonic() < until
            time.sleep(0.5)
        (up,), (goodput,) = ask("up"), ask("jaxdist_goodput_ratio")
        buckets = {
            row["metric"]["bucket"]: float(row["value"][1])
            for row in ask("jaxdist_wall_seconds")
        }
    finally:
        for program in programs:
            program.terminate()
            program.wait(60)
    assert up["value"][1] == "1"
    assert 0 < float(goodput["value"][1]) < 1
    assert buckets["compile"] > 0
    assert buckets["step"] > 0
    print({"up": up, "steps": steps, "goodput": goodput, "buckets": buckets}, sep="\n")
