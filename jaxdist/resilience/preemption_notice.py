"""Hears a cloud's notice that this machine will be taken back, and has the run saved before.

A thread asks the machine's metadata server every two seconds; the standard library's HTTP is enough. What a
notice then does is what a signal does: see `preemption`.

Sources: Amazon EC2 User Guide, "Spot Instance interruption notices" (two minutes before) and IMDSv2; Google
Cloud, "Preemptible VM instances" and "Host maintenance events" (30 s; TPU and GPU machines are terminated);
Azure, "Scheduled Events for Linux VMs" (30 s for Preempt).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ADDRESS = "JAXDIST_METADATA_AT"  # variable: where the metadata server is, if not at the usual place
_USUAL = "http://169.254.169.254"  # of all three
_ASK_S, _ANSWER_S = 2.0, 2.0  # between two questions; that one may take
_MOST_BYTES = 1 << 20  # of an answer
_TOKEN_S = 21_600  # that a token of EC2 may be used

Cloud = Literal["aws", "gcp", "azure"]


@dataclass(frozen=True)
class ResilienceConfig:
    """Fields of `resilience.*`."""

    # what cloud's word that it takes a machine back is listened for; auto: that of the machine's firmware
    preemption_notice: Literal["none", "auto", "aws", "gcp", "azure"] = "none"


class _Server:
    """The metadata server of this machine; proxies of the environment are not asked."""

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Returns the answer; None for 404, which says that there is nothing.

        Raises:
          OSError: there is no answer, or another error.
        """
        request = urllib.request.Request(self.address + path, headers=dict(headers), method=method)
        try:
            with self._open(request, timeout=_ANSWER_S) as answer:
                return answer.read(_MOST_BYTES).decode(errors="replace")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP: {error}") from error


class _Aws:
    """EC2's spot/instance-action, which does not exist until there is a notice. With a token (IMDSv2)."""

    def __init__(self, server: _Server):
        self._server, self._token = server, ""

    def notice(self) -> str | None:
        if not self._token:
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._server.ask("/latest/api/token", lasts, "PUT") or ""
        proof = {"X-aws-ec2-metadata-token": self._token}
        try:
            said = self._server.ask("/latest/meta-data/spot/instance-action", proof)
        except urllib.error.HTTPError:
            self._token = ""  # it has run out
            raise
        if said is None:
            return None
        action = _object(said)
        return f"{action.get('action', 'terminate')} at {action.get('time', 'an unknown time')}"


class _Gcp:
    """Compute Engine's and TPU VMs' `preempted` and `maintenance-event`; a live migration is no notice."""

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
            self._name = (self._server.ask(text, true) or "").strip()
        said = self._server.ask("/metadata/scheduledevents?api-version=2020-07-01", true)
        events = _object(said or "{}").get("Events")
        for event in events if isinstance(events, list) else []:
            kind, meant = event.get("EventType"), event.get("Resources") or []
            if kind in self._ENDS and (not self._name or not meant or self._name in meant):
                return f"{kind} not before {event.get('NotBefore') or 'now'}"
        return None


_CLOUDS: Mapping[str, Callable[[_Server], _Aws | _Gcp | _Azure]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}


def _object(text: str) -> dict:
    """Returns a JSON object; raises OSError if it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise OSError(f"no JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise OSError(f"no JSON object: {text[:80]!r}")
    return value


def detect_cloud(firmware: Path = Path("/sys/class/dmi/id")) -> Cloud | None:
    """Returns whose machine this is, as its firmware says; None: no cloud's that is known here."""

    def read(name: str) -> str:
        try:
            return (firmware / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (read("sys_vendor"), read("board_vendor"), read("bios_vendor")):
        return "aws"
    if read("sys_vendor") == "Google" or read("product_name") == "Google Compute Engine":
        return "gcp"
    if read("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":  # of every machine of Azure
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
    """Listens while entered; at a notice calls `stop` once, from a thread, with what was said.

    Each process asks for its own machine. A server that does not answer is asked again, and told of once.
    """
    chosen = config.preemption_notice
    cloud = detect_cloud() if chosen == "auto" else chosen
    if cloud is None:
        say("resilience.preemption_notice=auto: this machine's firmware names no cloud; nothing is asked")
    if cloud in (None, "none"):
        yield
        return
    server, over = _Server(environ.get(ADDRESS, _USUAL)), threading.Event()
    arguments = (_CLOUDS[cloud](server), f"{cloud} ({server.address})", stop, say, over)
    thread = threading.Thread(target=_listen, args=arguments, name="preemption-notice", daemon=True)
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
    told = False
    while not over.is_set():
        try:
            if (notice := source.notice()) and not over.is_set():  # an answer may come after the run
                return stop(f"notice of {name}: {notice[:200]}")
        except (OSError, ValueError, AttributeError, TypeError) as error:  # the last two: of another shape
            if not told:
                say(f"resilience.preemption_notice: no answer from {name}: {error}; it is asked again")
            told = True
        over.wait(_ASK_S)
