"""HTTP server for scrapes, which bounds what its clients can take from a run.

A client may connect and send nothing, or one byte at a time. Each connection holds a
file of the training process, and without files the run cannot save. So connections are
few, and each of them ends after a few seconds.
"""

import contextlib
import errno
import re
import socket
import threading
import time
import urllib.parse
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

MAX_CONNECTIONS = 16  # open connections; more are closed at once
# seconds from the accept of a connection to its end: Prometheus waits 10 s by default
CONNECTION_S = 10.0
_PAUSE_S = 0.1  # after a connection that could not be accepted
_MAX_UNREAD = 1 << 20  # bytes of a refused request that are read and dropped
_VERSION = re.compile(r"\d{1,3}(\.\d{1,3}){1,2}")  # of an exposition format


class ScrapeServer(ThreadingHTTPServer):
    """Server of a registry's metrics, with a thread for each connection."""

    request_queue_size = 128  # connections that wait to be accepted

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        """Listens at an address.

        Raises:
          OSError: nothing can listen there.
        """
        # the first family of the address: IPv4 or IPv6
        infos = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = infos[0][0]
        self._lock = threading.Lock()  # guards the dict
        # open connection -> time.monotonic() at which it ends
        self._deadlines: dict[Any, float] = {}
        super().__init__((address, port), _Handler.factory(registry))

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection.

        Raises:
          OSError: it cannot be accepted, e.g. because the process has no file left.
        """
        try:
            return super().get_request()
        except OSError as error:
            if error.errno != errno.ECONNABORTED:
                # It stays in the queue, so that the server would try again at once and
                # for ever. The pause keeps a core free for the run.
                time.sleep(_PAUSE_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Decides if a connection is served. If not, it is closed."""
        with self._lock:
            if len(self._deadlines) >= MAX_CONNECTIONS:
                return False
            self._deadlines[request] = time.monotonic() + CONNECTION_S
        return True

    def service_actions(self) -> None:
        """Ends connections whose time is over. The server calls it twice a second."""
        now = time.monotonic()
        with self._lock:
            overdue = [
                request
                for request, deadline in self._deadlines.items()
                if deadline <= now
            ]
            for request in overdue:
                _end(request)

    def close_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._deadlines.pop(request, None)
            super().close_request(request)

    def server_close(self) -> None:
        """Stops to listen, and ends all connections."""
        super().server_close()
        with self._lock:
            for request in self._deadlines:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client that leaves is no event of the run."""


def _end(request: Any) -> None:
    """Ends a connection; the thread that reads or writes it returns from its call."""
    with contextlib.suppress(OSError):  # the client has ended it
        request.shutdown(socket.SHUT_RDWR)


class _Handler(MetricsHandler):
    """Handler of one request."""

    # of a request that names none; an answer in HTTP/0.9 would have no code
    default_request_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Answers with the metrics, in the format that the client accepts."""
        accepted = _well_formed(self.headers.get_all("Accept", []))
        del self.headers["Accept"]
        if accepted:
            self.headers["Accept"] = accepted
        try:
            urllib.parse.urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        try:
            super().do_GET()
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:  # of the system, or of a library that asks devices
            self.send_error(500, f"{type(error).__name__} while metrics were read")

    def do_POST(self) -> None:
        """Refuses the method; others that are not here are answered with 501."""
        self.send_error(405)

    do_HEAD = do_POST

    def send_error(self, *args: Any, **keywords: Any) -> None:
        """Refuses a request.

        What the client still sends is read and dropped: unread bytes would reset the
        connection, and the client would lose the answer.
        """
        super().send_error(*args, **keywords)
        self.connection.shutdown(socket.SHUT_WR)
        num_dropped = 0
        while num_dropped < _MAX_UNREAD:
            data = self.connection.recv(1 << 16)
            if not data:
                return
            num_dropped += len(data)


def _well_formed(headers: list[str]) -> str:
    """Formats the media types of Accept headers that name a proper version.

    prometheus_client compares versions without a check. Weights are ignored: it takes
    the first format that it knows.

    Args:
      headers: the values of the Accept headers.

    Returns:
      The value of one header; "" if there is none.
    """
    well_formed = []
    for media_type in ",".join(headers).split(","):
        versions = [
            value
            for name, _, value in map(_parameter, media_type.split(";")[1:])
            if name == "version"
        ]
        if all(_VERSION.fullmatch(version) for version in versions):
            well_formed.append(media_type)
    return ",".join(well_formed)


def _parameter(text: str) -> tuple[str, str, str]:
    """Splits a parameter of a media type: (name, "=", value)."""
    return text.strip().partition("=")
