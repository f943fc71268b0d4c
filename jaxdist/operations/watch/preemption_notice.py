"""Notices of a cloud that it will take this machine back.

A thread asks the machine's metadata server every two seconds, by the standard library's
HTTP client. A notice stops the run like a signal does (`trainer.preemption`).

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
_DEFAULT_ADDRESS = "http://169.254.169.254"  # the same for all three clouds
_POLL_S = 2.0  # seconds between two requests
_TIMEOUT_S = 2.0  # most seconds that an answer may take
_MAX_BYTES = 1 << 20  # most bytes of an answer
_TOKEN_S = 21_600  # seconds for which a token of EC2 is valid
# least seconds between two reports of a fault; the server must have answered between
_REPORT_S = 3_600.0
_TOKEN = re.compile("[!-~]{1,4096}")  # a value that may stand in a header
_NAME = re.compile(r"[\w.-]{1,256}")  # the name of a machine of Azure

Cloud = Literal["aws", "gcp", "azure"]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Handler that turns a redirection into an error.

    A metadata server sends none, and a token must go to no other server.
    """

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class _Server:
    """Client of this machine's metadata server; it ignores the user's proxies."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        proxies = urllib.request.ProxyHandler({})
        self._open = urllib.request.build_opener(proxies, _NoRedirection).open

    def ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> str | None:
        """Sends a request and returns the answer; None for the status 404.

        Args:
          path: path of the URL.
          headers: HTTP headers.
          method: HTTP method.

        Raises:
          OSError: there is no answer, or an error; or the answer is too long or too
            slow.
        """
        request = urllib.request.Request(
            self.address + path, headers=dict(headers), method=method
        )
        try:
            with self._open(request, timeout=_TIMEOUT_S) as answer:
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
        # the connection's own timeout holds for each part of the answer
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            part = answer.read1(_MAX_BYTES)
            if not part:
                return body
            body += part
            if len(body) > _MAX_BYTES:
                raise OSError(f"an answer of more than {_MAX_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError("the answer does not end")


class _Cloud:
    """Source of a cloud's notices for this machine."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    def notice(self) -> str | None:
        """Asks for a notice; None if there is none.

        Raises:
          Exception: there is no answer, or it cannot be parsed.
        """
        raise NotImplementedError


class _Aws(_Cloud):
    """Notices of EC2: spot/instance-action, which exists only once there is a notice.

    It is asked for with a token (IMDSv2).
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
        notice = untrusted.parse_json(answer, dict)
        action = untrusted.of_kind(notice.get("action"), str, "action")
        return f"{action} at {notice.get('time', 'an unknown time')}"

    def _action(self) -> str | None:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._server.ask("/latest/api/token", lifetime, "PUT")
            if token is not None:
                token = token.strip()
                if not _TOKEN.fullmatch(token):
                    raise OSError(f"no token: {token[:80]!r}")
                self._token = token
        headers = {}  # a server without IMDSv2 needs none
        if self._token:
            headers["X-aws-ec2-metadata-token"] = self._token
        return self._server.ask("/latest/meta-data/spot/instance-action", headers)


class _Gcp(_Cloud):
    """Notices of Compute Engine and TPU VMs: `preempted` and `maintenance-event`.

    A live migration is no notice.
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
    """Notices of Azure: Scheduled Events that end or restart this machine."""

    _ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
    _name = ""

    def notice(self) -> str | None:
        if not self._name:  # all machines of a set get the events of each
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
        """Checks if an event ends this machine."""
        if event.get("EventType") not in self._ENDS:
            return False
        machines = event.get("Resources") or []
        if not isinstance(machines, list):
            return False
        names = {str(machine).casefold() for machine in machines}
        return not names or self._name in names


_CLOUDS: Mapping[str, type[_Cloud]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def detect_cloud(firmware: Path = Path("/sys/class/dmi/id")) -> Cloud | None:
    """Finds the cloud that this machine's firmware names; None = no known cloud."""

    def read(name: str) -> str:
        try:
            return (firmware / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (read("sys_vendor"), read("board_vendor"), read("bios_vendor")):
        return "aws"
    if read("sys_vendor") == "Google":
        return "gcp"
    if read("product_name") == "Google Compute Engine":
        return "gcp"
    # every machine of Azure has this tag
    if read("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":
        return "azure"
    return None


@contextlib.contextmanager
def listen_for_notices(
    config: ResilienceConfig,
    stop: Callable[[str], None],
    *,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    environ: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """Asks for notices until the body ends.

    A server that does not answer is asked again. The fault is reported once. It is
    reported again after an hour if the server has answered meanwhile.

    Args:
      config: its `preemption_notice` names the cloud.
      stop: is called once, in a thread, with the text of a notice.
      say: prints a line.
      environ: JAXDIST_METADATA_AT is the address of the metadata server.
    """
    setting = config.preemption_notice
    cloud = detect_cloud() if setting == "auto" else setting
    if cloud is None:
        say(
            "resilience.preemption_notice=auto: this machine's firmware names no cloud; nothing is asked"
        )
    if cloud in (None, "none"):
        yield
        return
    server = _Server(environ.get(ADDRESS, _DEFAULT_ADDRESS))
    source = _CLOUDS[cloud](server)
    name = f"{cloud} ({server.address})"
    is_over = threading.Event()

    def poll() -> None:
        report_at = 0.0  # monotonic seconds from which on a fault is reported
        while not is_over.is_set():
            try:
                notice = source.notice()
                if notice and not is_over.is_set():  # the run may end during a request
                    stop(untrusted.printable(f"notice of {name}: {notice[:200]}"))
                    return
                report_at = min(report_at, time.monotonic() + _REPORT_S)
            except Exception as error:  # a server may send anything
                if time.monotonic() >= report_at:
                    text = untrusted.printable(str(error))[:300]
                    say(
                        f"resilience.preemption_notice: no answer from {name}: {text}; it is asked again"
                    )
                    report_at = math.inf
            is_over.wait(_POLL_S)

    threading.Thread(target=poll, name="preemption-notice", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
