"""Notices of clouds, by servers that answer as theirs do; and a run that is saved in
time.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxdist.config import ConfigError
from jaxdist.config.groups.resilience import ResilienceConfig
from jaxdist.distributed.local_devices import free_port
from jaxdist.operations.watch import preemption_notice
from jaxdist.operations.watch.preemption_notice import (
    ADDRESS,
    detect_cloud,
    listen_for_notices,
)
from jaxdist.telemetry.metrics import read_events
from support.runs import command, environment, last_step, run_of

TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"
ON_EC2 = {"action": "terminate", "time": "2026-11-23T10:00:00Z"}


class MetadataServer:
    """One of all three clouds: `answers` has what it says now by path; None is 404."""

    def __init__(self):
        self.answers: dict[str, object] = {
            PREEMPTED: "FALSE",
            MAINTENANCE: "NONE",
            NAME: "vm-7",
            EVENTS: {"DocumentIncarnation": 1, "Events": []},
        }
        self.asked: list[str] = []
        self.token, self.refuses_put = "token-1", 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                outer.asked.append(path)
                code = outer.refusal(path, self.headers)
                answer = outer.answers.get(path)
                if callable(answer):
                    return answer(self)
                code = code or (404 if answer is None else 200)
                text = answer if isinstance(answer, str) else json.dumps(answer)
                self.reply(code, text if code == 200 else "")
                return None

            def do_PUT(self):
                outer.asked.append(self.path)
                lasts = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
                if callable(answer := outer.answers.get(self.path)):
                    return answer(self)
                if outer.refuses_put:
                    return self.reply(outer.refuses_put, "")
                self.reply(200 if self.path == TOKEN and lasts else 403, outer.token)
                return None

            def reply(self, code, text):
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, args=(0.02,), daemon=True
        ).start()

    def refusal(self, path, headers) -> int:
        """Returns the code for a question without what its cloud wants to see,
        else 0.
        """
        if path.startswith("/latest/"):
            return 0 if headers.get("X-aws-ec2-metadata-token") == self.token else 401
        if path.startswith("/computeMetadata/"):
            return 0 if headers.get("Metadata-Flavor") == "Google" else 403
        return 0 if headers.get("Metadata") == "true" else 400


@pytest.fixture
def cloud(monkeypatch):
    monkeypatch.setattr(preemption_notice, "_POLL_S", 0.02)
    server = MetadataServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


@contextlib.contextmanager
def listening(chosen, address):
    """Yields (notices, lines said) of a listener, which grow."""
    notices, said = [], []
    with listen_for_notices(
        ResilienceConfig(chosen),
        notices.append,
        say=said.append,
        environ={ADDRESS: address},
    ):
        yield notices, said


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    assert condition()


def event(kind, *machines):
    return {
        "Events": [
            {"EventType": kind, "Resources": list(machines), "NotBefore": "10:00"}
        ]
    }


@pytest.mark.parametrize(
    ("chosen", "path", "before", "answer", "words"),
    [
        ("aws", ACTION, None, ON_EC2, "terminate at 2026-11-23T10:00:00Z"),
        ("gcp", PREEMPTED, "FALSE", "TRUE\n", "preempted"),
        (
            "gcp",
            MAINTENANCE,
            "MIGRATE_ON_HOST_MAINTENANCE",
            "TERMINATE_ON_HOST_MAINTENANCE",
            "TERMINATE_ON",
        ),
        (
            "azure",
            EVENTS,
            event("Freeze", "vm-7"),
            event("Preempt", "vm-7"),
            "Preempt not before 10:00",
        ),
        (
            "azure",
            EVENTS,
            event("Preempt", "vm-8"),
            event("Terminate", "vm-8", "vm-7"),
            "Terminate",
        ),
    ],
)
def test_a_notice_is_heard_once_and_what_is_none_is_not(
    cloud, chosen, path, before, answer, words
):
    cloud.answers[path] = before
    with listening(chosen, cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(path) >= 3)
        assert notices == []
        assert said == []
        cloud.answers[path] = answer
        wait_for(lambda: notices)
        time.sleep(0.1)
    assert len(notices) == 1
    assert words in notices[0]
    assert notices[0].startswith(f"notice of {chosen} ({cloud.address}): ")


def test_an_answer_after_the_run_stops_nothing(cloud):
    asked, answer, reply = threading.Event(), threading.Event(), cloud.refusal

    def late(path, headers):
        asked.set()
        answer.wait(10)
        return reply(path, headers)

    cloud.refusal, cloud.answers[PREEMPTED] = late, "TRUE"
    with listening("gcp", cloud.address) as (notices, _):
        assert asked.wait(10)
        began = time.monotonic()
    assert time.monotonic() - began < 0.5  # nor does the end of the run wait for it
    answer.set()
    threads = [
        thread for thread in threading.enumerate() if thread.name == "preemption-notice"
    ]
    for thread in threads:
        thread.join(10)
    assert threads
    assert notices == []


def test_a_token_of_ec2_is_kept_and_renewed(cloud):
    with listening("aws", cloud.address) as (notices, _):
        wait_for(lambda: cloud.asked.count(ACTION) >= 4)
        assert cloud.asked.count(TOKEN) == 1
        cloud.token = "token-2"  # the first has run out
        wait_for(lambda: cloud.asked.count(TOKEN) == 2)
        cloud.answers[ACTION] = ON_EC2
        wait_for(lambda: notices)


@pytest.mark.parametrize(
    "answer", ["no JSON", "[]", {"Events": [3]}, {"Events": {"EventType": "Preempt"}}]
)
def test_an_answer_of_another_shape_is_no_notice_and_told_of_at_most_once(
    cloud, answer
):
    cloud.answers[EVENTS] = answer
    with listening("azure", cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(EVENTS) >= 4)
        assert notices == []
        assert len(said) <= 1
        cloud.answers[EVENTS] = event("Reboot")  # of no machine in particular
        wait_for(lambda: notices)


@pytest.mark.parametrize(
    ("chosen", "path", "answer"),
    [
        ("aws", TOKEN, "t"),
        ("aws", ACTION, ON_EC2),
        ("gcp", PREEMPTED, "TRUE"),
        ("azure", EVENTS, event("Preempt")),
    ],
)
def test_a_redirection_is_followed_nowhere(cloud, chosen, path, answer):
    """Who can redirect would otherwise get the token, or stop the run."""
    elsewhere = MetadataServer()
    elsewhere.answers[path], elsewhere.refusal = answer, lambda path, headers: 0

    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", elsewhere.address + path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    cloud.answers[path] = redirect
    with listening(chosen, cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(path) >= 3)
        assert notices == []
        assert elsewhere.asked == []
        assert "302" in said[0]
    elsewhere.server.shutdown()


def test_no_proxy_of_the_environment_is_asked(cloud, monkeypatch):
    proxy = MetadataServer()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.address)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert urllib.request.getproxies()["http"] == proxy.address
    with listening("aws", cloud.address) as (notices, said):
        cloud.answers[ACTION] = ON_EC2
        wait_for(lambda: notices)
    assert said == proxy.asked == []
    proxy.server.shutdown()


@pytest.mark.parametrize(
    "token", ["<html>\n<body>no metadata here", "two words", "", "x" * 100_000]
)
def test_what_is_no_token_is_not_kept(cloud, token):
    cloud.token = token
    with listening("aws", cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(TOKEN) >= 3)
        assert notices == []
        assert len(said) == 1
        cloud.token, cloud.answers[ACTION] = "token-2", ON_EC2
        wait_for(lambda: notices)


def test_a_token_that_has_run_out_is_renewed_without_a_word(cloud):
    with listening("aws", cloud.address) as (_, said):
        wait_for(lambda: ACTION in cloud.asked)
        cloud.token = "token-2"
        wait_for(lambda: cloud.asked.count(TOKEN) == 2)
        asked = len(cloud.asked)
        wait_for(lambda: len(cloud.asked) >= asked + 3)
    assert said == []
    assert cloud.asked.count(TOKEN) == 2


def test_a_server_of_the_first_version_is_asked_without_a_token(cloud):
    cloud.refuses_put, proofs = 404, []

    def refusal(path, headers):
        proofs.append(headers.get("X-aws-ec2-metadata-token"))
        return 0

    cloud.refusal, cloud.answers[ACTION] = refusal, ON_EC2
    with listening("aws", cloud.address) as (notices, _):
        wait_for(lambda: notices)
    assert proofs == [None]


@pytest.mark.parametrize(
    "answer",
    ["{}", '{"error": "none"}', '{"action": 7}', "null", "[" * 200_000, "\x00"],
)
def test_json_without_an_action_stops_no_run_on_ec2(cloud, answer):
    cloud.answers[ACTION] = answer
    with listening("aws", cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(ACTION) >= 3)
        assert notices == []
        assert len(said) == 1
        cloud.answers[ACTION] = ON_EC2
        wait_for(lambda: notices)


def test_machines_of_azure_are_told_apart_by_their_whole_name(cloud):
    text = {"EventType": "Preempt", "Resources": "vm-70,vm-7"}  # no list
    for answer in (
        {"Events": [text]},
        event("Preempt", "vm-70"),
        event("Preempt", "VM-8"),
    ):
        cloud.answers[EVENTS] = answer
        with listening("azure", cloud.address) as (notices, _):
            asked = cloud.asked.count(EVENTS)
            wait_for(lambda asked=asked: cloud.asked.count(EVENTS) >= asked + 3)
            assert notices == []
    cloud.answers[EVENTS] = {
        "Events": [3, None, text, *event("Preempt", "VM-7")["Events"]]
    }
    # upper and lower case are one to Azure
    with listening("azure", cloud.address) as (notices, _):
        wait_for(lambda: notices)


@pytest.mark.parametrize("name", [None, "", "<html>an error</html>", "a b"])
def test_without_its_name_a_machine_of_azure_takes_no_other_s_event(cloud, name):
    cloud.answers |= {NAME: name, EVENTS: event("Preempt", "vm-8")}
    with listening("azure", cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(NAME) >= 3)
        assert notices == []
        assert len(said) == 1
        assert "name" in said[0]
        cloud.answers |= {NAME: "vm-7", EVENTS: event("Preempt", "vm-7")}
        wait_for(lambda: notices)


def drip(handler):
    """Sends a byte a moment, for as long as anybody listens."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(2_000):
            handler.wfile.write(b"F")
            time.sleep(0.01)


def flood(handler):
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(64):
            handler.wfile.write(b" " * (1 << 20))


def garble(handler):
    handler.wfile.write(b"\xff\xfe no HTTP \x1b[2J\r\n\r\n")


def fail(handler):
    handler.send_response(500, "no\x1b[2J")
    handler.end_headers()


@pytest.mark.parametrize("answer", [drip, flood, garble, fail])
def test_after_an_answer_that_never_ends_or_is_none_the_server_is_asked_again(
    cloud, monkeypatch, answer
):
    monkeypatch.setattr(preemption_notice, "_TIMEOUT_S", 0.3)
    cloud.answers[PREEMPTED] = answer
    with listening("gcp", cloud.address) as (notices, said):
        wait_for(lambda: cloud.asked.count(PREEMPTED) >= 2)
        assert notices == []
        assert len(said) == 1
        assert "\x1b" not in said[0]
        cloud.answers[PREEMPTED] = "TRUE"
        wait_for(lambda: notices)


def test_a_server_that_has_answered_and_is_gone_is_told_of_again(cloud, monkeypatch):
    monkeypatch.setattr(preemption_notice, "_REPORT_S", 0.0)
    with listening("gcp", cloud.address) as (_, said):
        for times in (1, 2):
            asked = cloud.asked.count(MAINTENANCE)
            wait_for(lambda asked=asked: cloud.asked.count(MAINTENANCE) >= asked + 2)
            cloud.answers[PREEMPTED] = fail
            wait_for(lambda times=times: len(said) >= times)
            asked = cloud.asked.count(PREEMPTED)
            wait_for(lambda asked=asked: cloud.asked.count(PREEMPTED) >= asked + 3)
            assert len(said) == times
            cloud.answers[PREEMPTED] = "FALSE"


def test_a_server_that_is_not_there_is_told_of_once(monkeypatch):
    monkeypatch.setattr(preemption_notice, "_POLL_S", 0.02)
    address = f"http://127.0.0.1:{free_port()}"
    with listening("aws", address) as (notices, said):
        wait_for(lambda: said)
        time.sleep(0.2)
    assert notices == []
    assert len(said) == 1
    assert f"no answer from aws ({address})" in said[0]


def test_nothing_is_asked_unless_the_config_says_so(cloud, tmp_path):
    with listening("none", cloud.address) as (notices, said):
        time.sleep(0.1)
    assert cloud.asked == notices == said == []
    assert ResilienceConfig().preemption_notice == "none"
    with pytest.raises(ConfigError, match="resilience.preemption_notice"):
        run_of("quickstart", **{"resilience.preemption_notice": "ibm"})


@pytest.mark.parametrize(
    ("firmware", "found"),
    [
        ({}, None),
        ({"sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation"}, None),  # Hyper-V at home
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
    ],
)
def test_a_cloud_is_known_by_its_firmware(tmp_path, firmware, found):
    for name, text in firmware.items():
        (tmp_path / name).write_text(text)
    assert detect_cloud(tmp_path) == found


def test_auto_says_where_there_is_no_cloud(monkeypatch):
    monkeypatch.setattr(preemption_notice, "detect_cloud", lambda: None)
    with listening("auto", "http://127.0.0.1:1") as (_, said):
        pass
    (line,) = said
    assert line.endswith(
        "notice=auto: this machine's firmware names no cloud; nothing is asked"
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_is_saved_within_ten_seconds_of_a_notice(tmp_path, processes):
    server = MetadataServer()
    launch = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--processes",
        str(processes),
        "--",
    ]
    changes = {
        "resilience.preemption_notice": "aws",
        "checkpoint.every_steps": 0,
        "train.steps": 1_000_000,
    }
    environ = environment(1) | {ADDRESS: server.address}
    run = subprocess.Popen(
        [*launch, *command(tmp_path, **changes)], env=environ, stdout=subprocess.PIPE
    )
    wait_for(lambda: last_step(tmp_path) >= 20 and server.asked.count(ACTION) >= 2, 600)
    server.answers[ACTION] = ON_EC2
    began = time.time()
    assert run.wait(timeout=120) == 75
    events = {event["event"]: event for event in read_events(tmp_path)}
    saved = events["save"]
    print(
        f"notice to event {events['preemption_notice']['time'] - began:.2f} s,", end=" "
    )
    print(
        f"to saved {saved['time'] - began:.2f} s, to the end {time.time() - began:.2f} s"
    )
    assert saved["ok"]
    assert saved["time"] - began <= 10
    assert "terminate at" in events["preemption_notice"]["notice"]
    assert events["preempted"]["step"] == saved["step"] >= 20
    assert (tmp_path / "checkpoints" / str(saved["step"]) / "manifest.json").exists()
