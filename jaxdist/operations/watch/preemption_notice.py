"""Listens for a cloud's notice that this machine will be taken back, and has the run
saved before.

A thread asks the machine's metadata server every two seconds; the standard library's
HTTP is enough. A notice does what a signal does: see `preemption`.

Sources: Amazon EC2 User Guide, "Spot Instance interruption notices" (two minutes
before) and IMDSv2; Google Cloud, "Preemptible VM instances" and "Host maintenance
events" (30 s; TPU and GPU machines are terminated); Azure, "Scheduled Events for Linux
VMs" (30 s for Preempt).
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxdist.config.groups.resilience import ResilienceConfig
from jaxdist.storage import untrusted

# environment variable with the metadata server's address, if it is not the usual one
ADDRESS = "JAXDIST_METADATA_AT"
_USUAL = "http://169.254.169.254"  # of all three clouds
_ASK_S = 2.0  # between two questions
_ANSWER_S = 2.0  # at most, for an answer
_MOST_BYTES = 1 << 20  # of an answer
_TOKEN_S = 21_600  # for which a token of EC2 is valid
_TELL_S = 3_600.0  # between two reports of a fault, with an answer between them
_TOKEN = re.compile("[!-~]{1,4096}")  # what can stand in a header
_NAME = re.compile(r"[\w.-]{1,256}")  # of a machine of Azure

Cloud = Literal["aws", "gcp", "azure"]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Turns a redirection into an error. A metadata server sends none, and a token must
    go nowhere else.
    """

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class _Server:
    """The metadata server of this machine, asked without the environment's proxies."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        proxies = urllib.request.ProxyHandler({})
        self._open = urllib.request.build_opener(proxies, _NoRedirection).open

    def ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> str | None:
        """Asks, and returns the answer; None for 404, which means that there is
        nothing.

        Raises:
          OSError: no answer, or an error; the answer is too long, or takes too long.
        """
        request = urllib.request.Request(
            self.address + path, headers=dict(headers), method=method
        )
        try:
            with self._open(request, timeout=_ANSWER_S) as answer:
                return self._read(answer).decode(errors="replace")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP: {error}") from error

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        body = b""
        # the connection's timeout is for each part alone
        until = time.monotonic() + _ANSWER_S
        while True:
            part = answer.read1(_MOST_BYTES)
            if not part:
                return body
            body += part
            if len(body) > _MOST_BYTES:
                raise OSError(f"an answer of more than {_MOST_BYTES:,} bytes")
            if time.monotonic() > until:
                raise TimeoutError("the answer does not end")


class _Cloud:
    """Asks a cloud's metadata server for notices."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    def notice(self) -> str | None:
        """Asks for a notice; None if there is none.

        Raises:
          Exception: no answer, or none that can be read.
        """
        raise NotImplementedError


class _Aws(_Cloud):
    """EC2's spot/instance-action, which does not exist until there is a notice. Asked
    with a token (IMDSv2).
    """

    _token = ""

    def notice(self) -> str | None:
        has_token = bool(self._token)
        try:
            answer = self._action()
        except urllib.error.HTTPError as error:
            self._token = ""
            if error.code != 401 or not has_token:
                raise
            answer = self._action()  # the token had expired
        if answer is None:
            return None
        action = untrusted.parse_json(answer, dict)
        what = untrusted.of_kind(action.get("action"), str, "action")
        return f"{what} at {action.get('time', 'an unknown time')}"

    def _action(self) -> str | None:
        if not self._token:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._server.ask("/latest/api/token", lasts, "PUT")
            if token is not None:
                token = token.strip()
                if not _TOKEN.fullmatch(token):
                    raise OSError(f"no token: {token[:80]!r}")
                self._token = token
        proof = {}  # none for a server that has no IMDSv2
        if self._token:
            proof["X-aws-ec2-metadata-token"] = self._token
        return self._server.ask("/latest/meta-data/spot/instance-action", proof)


class _Gcp(_Cloud):
    """Compute Engine's and TPU VMs' `preempted` and `maintenance-event`; a live
    migration is no notice.
    """

    def notice(self) -> str | None:
        if self._ask("preempted") == "TRUE":
            return "preempted"
        event = self._ask("maintenance-event")
        if event.startswith("TERMINATE"):
            return event
        return None

    def _ask(self, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        return (self._server.ask(path, {"Metadata-Flavor": "Google"}) or "").strip()


class _Azure(_Cloud):
    """Azure's Scheduled Events that end this machine, or start it anew."""

    _ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
    _name = ""

    def notice(self) -> str | None:
        if not self._name:  # events go to all machines of a set
            name = self._ask("instance/compute/name?api-version=2021-02-01&format=text")
            name = name.strip()
            if not _NAME.fullmatch(name):
                raise OSError(
                    f"no name of this machine, which events are for: {name[:80]!r}"
                )
            self._name = name.casefold()
        answer = self._ask("scheduledevents?api-version=2020-07-01")
        events = untrusted.parse_json(answer or "{}", dict).get("Events", [])
        for event in untrusted.of_kind(events, list, "Events"):
            if isinstance(event, dict) and self._is_meant(event):
                start = event.get("NotBefore") or "now"
                return f"{event['EventType']} not before {start}"
        return None

    def _ask(self, path: str) -> str:
        return self._server.ask(f"/metadata/{path}", {"Metadata": "true"}) or ""

    def _is_meant(self, event: Mapping[str, Any]) -> bool:
        """Checks whether an event ends this machine."""
        if event.get("EventType") not in self._ENDS:
            return False
        machines = event.get("Resources") or []
        if not isinstance(machines, list):
            return False
        return not machines or self._name in {str(x).casefold() for x in machines}


_CLOUDS: Mapping[str, type[_Cloud]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def detect_cloud(firmware: Path = Path("/sys/class/dmi/id")) -> Cloud | None:
    """Reads from the firmware whose machine this is; None: no known cloud's."""

    def read(name: str) -> str:
        try:
            return (firmware / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (read("sys_vendor"), read("board_vendor"), read("bios_vendor")):
        return "aws"
    if (
        read("sys_vendor") == "Google"
        or read("product_name") == "Google Compute Engine"
    ):
        return "gcp"
    # of every machine of Azure
    if read("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":
        return "azure"
    return None


@contextlib.contextmanager
def heard(
    config: ResilienceConfig,
    stop: Callable[[str], None],
    *,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    environ: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """Listens while entered. At a notice it calls `stop` once, from a thread, with the
    notice's text.

    Each process asks for its own machine. A server that does not answer is asked again,
    and reported once; if it has answered since, again an hour later.
    """
    chosen = config.preemption_notice
    cloud = detect_cloud() if chosen == "auto" else chosen
    if cloud is None:
        say(
            "resilience.preemption_notice=auto: this machine's firmware names no cloud; nothing is asked"
        )
    if cloud in (None, "none"):
        yield
        return
    server = _Server(environ.get(ADDRESS, _USUAL))
    source = _CLOUDS[cloud](server)
    name = f"{cloud} ({server.address})"
    over = threading.Event()

    def listen() -> None:
        tell_at = 0.0  # monotonic seconds; from then on a fault is reported
        while not over.is_set():
            try:
                notice = source.notice()
                if notice and not over.is_set():  # an answer may come after the run
                    text = untrusted.printable(f"notice of {name}: {notice[:200]}")
                    return stop(text)
                tell_at = min(tell_at, time.monotonic() + _TELL_S)
            except Exception as error:  # what a server may send has no end
                if time.monotonic() >= tell_at:
                    text = untrusted.printable(str(error))[:300]
                    say(
                        f"resilience.preemption_notice: no answer from {name}: {text}; it is asked again"
                    )
                    tell_at = math.inf
            over.wait(_ASK_S)
        return None

    threading.Thread(target=listen, name="preemption-notice", daemon=True).start()
    try:
        yield
    finally:
        over.set()
