"""`telemetry.port`: what a scrape finds, by HTTP, and that a real Prometheus
reads it.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import socketserver
import subprocess
import threading
import time
import urllib.error
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
from jaxdist.operations.metrics import scrape_server
from jaxdist.operations.metrics.prometheus import RunMetrics, served
from jaxdist.operations.metrics.serving import MetricsServer
from jaxdist.trainer.callbacks import Run
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig
from support.ledgers import published
from support.paths import ROOT
from support.runs import command, environment, overrides, refused

DASHBOARD = ROOT / "deploy" / "grafana.json"


@pytest.fixture(autouse=True)
def _prompt_end(monkeypatch):
    """Lets servers look for their end every 20 ms, not every 500."""
    honest = socketserver.BaseServer.serve_forever
    monkeypatch.setattr(
        scrape_server.ScrapeServer,
        "serve_forever",
        lambda server: honest(server, poll_interval=0.02),
        raising=False,
    )


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


@pytest.fixture
def port(tmp_path, monkeypatch):
    """Yields the port of a server whose connections end after a second."""
    monkeypatch.setattr(scrape_server, "CONNECTION_S", 1.0)
    book = Ledger()
    with (
        published(book, tmp_path),
        served(TelemetryConfig(), shown(tmp_path, book)) as port,
    ):
        yield port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def has_ended(client: socket.socket) -> bool:
    """Waits until the server ends a connection without an answer."""
    try:
        return client.recv(100) == b""
    except ConnectionError:
        return True


def test_connections_that_send_nothing_or_little_end(port):
    with connected(port) as silent, connected(port) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        dripped = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(400):  # no pause between two bytes is as long as the limit
                slow.sendall(b"x")
                dripped += 1
                time.sleep(0.05)
        assert 1 < dripped < 400, "one byte at a time keeps no connection"
        assert has_ended(silent)
        assert scraped(port)["jaxdist_loss",] == 2.5


def test_a_client_that_never_reads_its_answer_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(scrape_server, "CONNECTION_S", 1.0)
    view = RunMetrics(Ledger())
    for number in range(60_000):  # more than the buffers of both ends hold
        view.event(f"an event with a long name: {number:0100}")
    before = threading.active_count()
    with served(TelemetryConfig(), view) as port, connected(port) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until = time.monotonic() + 60
        while threading.active_count() < before + 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() >= before + 2, "a thread writes the answer"
        while threading.active_count() > before + 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert threading.active_count() == before + 1


def test_more_connections_than_the_limit_are_closed_at_once(port, monkeypatch):
    monkeypatch.setattr(scrape_server, "CONNECTION_S", 600.0)
    held = scrape_server.MAX_CONNECTIONS
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(port)) for _ in range(held + 20)]
        assert all(has_ended(client) for client in clients[held:])
        # The server's ends, beside those of this test. A client sees the end of its
        # connection before the server has closed its file.
        until = time.monotonic() + 20
        files = len(os.listdir("/proc/self/fd")) - before - len(clients)
        while files > held and time.monotonic() < until:
            time.sleep(0.05)
            files = len(os.listdir("/proc/self/fd")) - before - len(clients)
        assert files == held
        clients[0].close()
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                assert scraped(port)["jaxdist_loss",] == 2.5
                break
            time.sleep(0.05)
        else:
            pytest.fail("a place that is free again is not given")


def test_a_full_table_of_files_costs_no_core_and_ends_nothing(port, monkeypatch, capfd):
    tries = []
    accept = socketserver.TCPServer.get_request

    def counted(server):
        tries.append(server)
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(port) as client, contextlib.ExitStack() as stack:
        assert scraped(port)  # the server takes connections in order
        waiting = stack.enter_context(socket.socket())
        waiting.settimeout(20)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        tries.clear()
        waiting.connect(("127.0.0.1", port))  # the kernel takes it, the server cannot
        # a connection that it has taken before is served
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"200 OK" in client.recv(1000)
        time.sleep(1)
        assert 1 <= len(tries) < 30, "the server tries again at once"
        stack.pop_all().close()
    assert scraped(port)["jaxdist_loss",] == 2.5
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_of_a_reader_is_a_500(tmp_path, capfd):
    def chips():
        raise OSError(errno.EMFILE, "Too many open files")

    view = RunMetrics(Ledger(), chips=chips)
    with served(TelemetryConfig(), view) as port:
        with pytest.raises(urllib.error.HTTPError) as answer:
            get(f"http://127.0.0.1:{port}/metrics")
        assert answer.value.code == 500
    assert not capfd.readouterr().err


TEXT = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (f"{TEXT};version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", TEXT),
        (f"{TEXT}; version=1.0.0; q=x", TEXT),
        (f"{TEXT};version=abc", "text/plain"),
        (f"{TEXT};version=1.x.0,text/plain;version=;q", "text/plain"),
        (f"{TEXT};version={'9' * 5000}.0.0", "text/plain"),
        ("text/plain;version=garbage", "text/plain"),
        ("text/html;q=0.9;;;,=,;q=", "text/plain"),
        ("\xff\x00, \x7f", "text/plain"),
        ("", "text/plain"),
    ],
)
def test_any_accept_header_has_an_answer(port, accept, kind, capfd):
    request = f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n"
    status, head, body = answered(port, request.encode("latin-1"))
    assert status == 200
    assert f"content-type: {kind}" in head.lower()
    assert "jaxdist_loss 2.5" in body
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("request_text", "code"),
    [
        (f"GET /metrics HTTP/1.1\r\nAccept: {'x' * 100_000}\r\n\r\n", 431),
        (f"GET /{'x' * 100_000} HTTP/1.1\r\n\r\n", 414),
        ("GET /metrics HTTP/1.1\r\n" + "X: y\r\n" * 2000 + "\r\n", 431),
        ("GET http://[x/ HTTP/1.1\r\n\r\n", 400),
        ("GET /metrics HTTP/x\r\n\r\n", 400),
        (
            "POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + "x" * 100_000,
            405,
        ),
        ("BREW /metrics HTTP/1.1\r\n\r\n", 501),
    ],
)
def test_a_request_that_is_none_has_its_code(port, request_text, code, capfd):
    assert answered(port, request_text.encode())[0] == code
    assert scraped(port)["jaxdist_loss",] == 2.5
    assert not capfd.readouterr().err


def answered(port: int, request: bytes) -> tuple[int, str, str]:
    """Sends a request; returns the answer's code, its head and its body."""
    with connected(port) as client:
        client.sendall(request)
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    head, _, body = answer.decode("latin-1").partition("\r\n\r\n")
    return int(head.split()[1]), head, body


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
