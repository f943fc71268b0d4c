"""Hears a cloud's notice that this machine will be taken back, and has the run saved
before.

A thread asks the machine's metadata server every two seconds; the standard library's
HTTP is enough. What a notice then does is what a signal does: see `preemption`.

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

# variable: where the metadata server is, if not at the usual place
ADDRESS = "JAXDIST_METADATA_AT"
_USUAL = "http://169.254.169.254"  # of all three
_ASK_S, _ANSWER_S = 2.0, 2.0  # between two questions; that one may take
_MOST_BYTES = 1 << 20  # of an answer
_TOKEN_S = 21_600  # that a token of EC2 may be used
_TELL_S = 3_600.0  # after a fault was told of, and an answer
_TOKEN = re.compile("[!-~]{1,4096}")  # what can stand in a header
_NAME = re.compile(r"[\w.-]{1,256}")  # of a machine of Azure

Cloud = Literal["aws", "gcp", "azure"]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Makes an error of what points elsewhere: a metadata server does not, and a token
    goes nowhere else.
    """

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class _Server:
    """The metadata server of this machine; proxies of the environment are not asked."""

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        proxies = urllib.request.ProxyHandler({})
        self._open = urllib.request.build_opener(proxies, _NoRedirection).open

    def ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> str | None:
        """Returns the answer; None for 404, which says that there is nothing.

        Raises:
          OSError: there is no answer, or another error; it is too long, or takes too
            long.
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
        # that of the connection is for each part alone
        body, until = b"", time.monotonic() + _ANSWER_S
        while part := answer.read1(_MOST_BYTES):
            body += part
            if len(body) > _MOST_BYTES:
                raise OSError(f"an answer of more than {_MOST_BYTES:,} bytes")
            if time.monotonic() > until:
                raise TimeoutError("the answer does not end")
        return body


class _Aws:
    """EC2's spot/instance-action, which does not exist until there is a notice. With a
    token (IMDSv2).
    """

    def __init__(self, server: _Server):
        self._server, self._token = server, ""

    def notice(self) -> str | None:
        has_token = bool(self._token)
        try:
            said = self._action()
        except urllib.error.HTTPError as error:
            self._token = ""
            if error.code != 401 or not has_token:
                raise
            said = self._action()  # the token had run out
        if said is None:
            return None
        action = untrusted.parse_json(said, dict)
        what = untrusted.of_kind(action.get("action"), str, "action")
        return f"{what} at {action.get('time', 'an unknown time')}"

    def _action(self) -> str | None:
        if not self._token:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token = self._server.ask("/latest/api/token", lasts, "PUT")
            if token is not None and not _TOKEN.fullmatch(token := token.strip()):
                raise OSError(f"no token: {token[:80]!r}")
            self._token = token or ""
        # Without one where the server has no second version.
        proof = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        return self._server.ask("/latest/meta-data/spot/instance-action", proof)


class _Gcp:
    """Compute Engine's and TPU VMs' `preempted` and `maintenance-event`; a live
    migration is no notice.
    """

    def __init__(self, server: _Server):
        self._server = server

    def notice(self) -> str | None:
        flavour, place = {"Metadata-Flavor": "Google"}, "/computeMetadata/v1/instance/"
        if (self._server.ask(f"{place}preempted", flavour) or "").strip() == "TRUE":
            return "preempted"
        event = (self._server.ask(f"{place}maintenance-event", flavour) or "").strip()
        return event if event.startswith("TERMINATE") else None


class _Azure:
    """Azure's Scheduled Events that end this machine, or start it anew."""

    _ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")

    def __init__(self, server: _Server):
        self._server, self._name = server, ""

    def notice(self) -> str | None:
        true = {"Metadata": "true"}
        if not self._name:  # events are told to all machines of a set
            text = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            name = (self._server.ask(text, true) or "").strip()
            if not _NAME.fullmatch(name):
                raise OSError(
                    f"no name of this machine, which events are for: {name[:80]!r}"
                )
            self._name = name.casefold()
        said = self._server.ask(
            "/metadata/scheduledevents?api-version=2020-07-01", true
        )
        events = untrusted.parse_json(said or "{}", dict).get("Events", [])
        for event in untrusted.of_kind(events, list, "Events"):
            if (
                isinstance(event, dict)
                and event.get("EventType") in self._ENDS
                and self._is_meant(event)
            ):
                return (
                    f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
                )
        return None

    def _is_meant(self, event: Mapping[str, Any]) -> bool:
        meant = event.get("Resources") or []
        return isinstance(meant, list) and (
            not meant or self._name in {str(x).casefold() for x in meant}
        )


_CLOUDS: Mapping[str, Callable[[_Server], _Aws | _Gcp | _Azure]] = {
    "aws": _Aws,
    "gcp": _Gcp,
    "azure": _Azure,
}


def detect_cloud(firmware: Path = Path("/sys/class/dmi/id")) -> Cloud | None:
    """Returns whose machine this is, as its firmware says; None: no cloud's that is
    known here.
    """

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
    """Listens while entered; at a notice calls `stop` once, from a thread, with what
    was said.

    Each process asks for its own machine. A server that does not answer is asked again,
    and told of once; if it has answered since, again an hour later.
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
    server, over = _Server(environ.get(ADDRESS, _USUAL)), threading.Event()
    arguments = (_CLOUDS[cloud](server), f"{cloud} ({server.address})", stop, say, over)
    thread = threading.Thread(
        target=_listen, args=arguments, name="preemption-notice", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()


def _listen(
    source: _Aws | _Gcp | _Azure,
    name: str,
    stop: Callable[[str], None],
    say: Callable[[str], None],
    over: threading.Event,
) -> None:
    tell_at = 0.0  # monotonic seconds; from then on the next fault is told of
    while not over.is_set():
        try:
            # an answer may come after the run
            if (notice := source.notice()) and not over.is_set():
                return stop(untrusted.printable(f"notice of {name}: {notice[:200]}"))
            tell_at = min(tell_at, time.monotonic() + _TELL_S)
        except Exception as error:  # what a server may send has no end
            if time.monotonic() >= tell_at:
                text = untrusted.printable(str(error))[:300]
                say(
                    f"resilience.preemption_notice: no answer from {name}: {text}; it is asked again"
                )
                tell_at = math.inf
        over.wait(_ASK_S)
