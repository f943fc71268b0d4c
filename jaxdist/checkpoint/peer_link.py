"""Authenticated connections between processes of a run, and the frames on them.

Both sides have the run's token, and prove it to each other with fresh nonces; the token
itself is never sent. Each connection derives a key for each direction, and each frame
has a tag. So nobody without the token can open a connection, or insert, alter, repeat
or reorder a frame. Frames are not encrypted: who reads the network reads the content.

A frame is a header (kind, length), the payload, and the tag:

    HMAC-SHA-256(key, number of the frame, kind, length, SHA-256 of the content)

The content of a DATA frame is all data of the transfer so far. One pass of SHA-256 then
serves the tags and the digest at the end. Hashing limits the speed of a copy, and
SHA-256 is the fastest hash here on processors that have instructions for it.

All lengths are limited before anything is received. A frame's payload is handed on only
after its tag was checked.
"""

import contextlib
import enum
import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Self

TOKEN_BYTES = 32
CHUNK_BYTES = 1 << 20  # the longest payload of a DATA frame
MAX_ENTRIES = 4096  # copies in a listing
MAX_REASON_BYTES = 256  # of a refusal
MAX_SIZE = 1 << 44  # bytes of a copy
MAX_STEP = (1 << 63) - 1
MAX_OWNER = (1 << 31) - 1

_MAGIC = b"jaxdist peers 1\n"  # protocol and version
_NONCE_BYTES = 32
_DIGEST_BYTES = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"!{len(_MAGIC)}s{_NONCE_BYTES}s")
_HEADER = struct.Struct("!BI")  # kind, bytes of the payload
_TAGGED = struct.Struct(f"!QBI{_DIGEST_BYTES}s")  # what a tag covers
_READ = struct.Struct("!QIQQ")  # step, owner, offset, length
_PUT = struct.Struct("!QIQ")  # step, owner, size
_ENTRY = struct.Struct("!QIQ")  # step, owner, size


class PeerError(Exception):
    """A peer failed, refused a request, or sent something invalid.

    Attributes:
      peer: the address of the peer.
      reason: what happened.
    """

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer}: {reason}")
        self.peer = peer
        self.reason = reason


class RefusedError(PeerError):
    """A peer refused a request. The connection can be used further."""


class MalformedError(ValueError):
    """Bytes that are no header, request or listing."""


@dataclass(frozen=True)
class Limits:
    """Seconds and numbers that a peer can cost at most."""

    connect_s: float = 5.0  # seconds until a connection is open
    handshake_s: float = 10.0  # seconds until both sides have proved the token
    idle_s: float = 30.0  # seconds without a byte
    total_s: float = 600.0  # seconds of a request with its answer
    max_connections: int = 32  # served at once; further ones wait in the system's queue


class Kind(enum.IntEnum):
    """Kinds of frames."""

    LIST = 1
    READ = 2
    PUT = 3
    LISTING = 4  # answer to LIST
    READY = 5  # the data of a PUT may follow
    DATA = 6
    END = 7  # SHA-256 of all data of a transfer
    DONE = 8  # a PUT is stored
    REFUSED = 9


REQUESTS = frozenset({Kind.LIST, Kind.READ, Kind.PUT})

# the lengths that a payload may have
_LENGTHS = {
    Kind.LIST: range(1),
    Kind.READ: range(_READ.size, _READ.size + 1),
    Kind.PUT: range(_PUT.size, _PUT.size + 1),
    Kind.LISTING: range(0, MAX_ENTRIES * _ENTRY.size + 1, _ENTRY.size),
    Kind.READY: range(1),
    Kind.DATA: range(1, CHUNK_BYTES + 1),
    Kind.END: range(_DIGEST_BYTES, _DIGEST_BYTES + 1),
    Kind.DONE: range(1),
    Kind.REFUSED: range(MAX_REASON_BYTES + 1),
}


# --- what bytes mean ------------------------------------------------------------------


class ListRequest(NamedTuple):
    """Request for the list of all copies."""


class ReadRequest(NamedTuple):
    """Request for a range of a copy."""

    step: int
    owner: int
    offset: int  # bytes from the start of the copy
    length: int  # bytes


class PutRequest(NamedTuple):
    """Request to store a copy."""

    step: int
    owner: int
    size: int  # bytes


Request = ListRequest | ReadRequest | PutRequest
Inventory = dict[int, dict[int, int]]  # step -> owner -> bytes


def parse_header(data: bytes, allowed: Collection[Kind]) -> tuple[Kind, int]:
    """Reads a frame's header.

    Args:
      data: the bytes of the header.
      allowed: the kinds that may come now.

    Returns:
      The kind, and the bytes of the payload.

    Raises:
      MalformedError: the kind may not come now, or cannot have this length.
    """
    number, length = _HEADER.unpack(data)
    if number not in allowed:
        raise MalformedError(f"sent a frame of kind {number}, which may not come here")
    kind = Kind(number)
    if length not in _LENGTHS[kind]:
        raise MalformedError(f"sent a {kind.name} frame of {length} bytes")
    return kind, length


def parse_request(kind: Kind, payload: bytes) -> Request:
    """Reads a request.

    Raises:
      MalformedError: a number is too large.
    """
    if kind is Kind.LIST:
        return ListRequest()
    if kind is Kind.READ:
        read = ReadRequest(*_READ.unpack(payload))
        _check_copy(read.step, read.owner, read.offset + read.length)
        return read
    if kind is Kind.PUT:
        put = PutRequest(*_PUT.unpack(payload))
        _check_copy(*put)
        return put
    raise MalformedError(f"sent a {kind.name} frame as a request")


def format_request(request: Request) -> tuple[Kind, bytes]:
    """Writes a request.

    Raises:
      MalformedError: a number is negative or too large.
    """
    if isinstance(request, ListRequest):
        return Kind.LIST, b""
    if min(request) < 0:
        raise MalformedError(f"{request} has a negative number")
    if isinstance(request, ReadRequest):
        _check_copy(request.step, request.owner, request.offset + request.length)
        return Kind.READ, _READ.pack(*request)
    _check_copy(*request)
    return Kind.PUT, _PUT.pack(*request)


def parse_listing(payload: bytes) -> Inventory:
    """Reads a list of copies.

    Raises:
      MalformedError: a number is too large, or a copy is listed twice.
    """
    inventory: Inventory = {}
    for step, owner, size in _ENTRY.iter_unpack(payload):
        _check_copy(step, owner, size)
        owners = inventory.setdefault(step, {})
        if owner in owners:
            raise MalformedError(f"lists step {step} of owner {owner} twice")
        owners[owner] = size
    return inventory


def format_listing(inventory: Inventory) -> bytes:
    """Writes a list of copies.

    Raises:
      MalformedError: there are more than MAX_ENTRIES copies, or a number is too large.
    """
    entries = [
        (step, owner, size)
        for step, owners in inventory.items()
        for owner, size in owners.items()
    ]
    if len(entries) > MAX_ENTRIES:
        raise MalformedError(f"has {len(entries)} copies, more than {MAX_ENTRIES}")
    for entry in entries:
        _check_copy(*entry)
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def _check_copy(step: int, owner: int, end: int) -> None:
    if step > MAX_STEP or owner > MAX_OWNER or end > MAX_SIZE:
        raise MalformedError(f"step {step}, owner {owner} or byte {end} is too large")


def _printable(text: str) -> str:
    """Replaces characters that could write elsewhere in a terminal or a log."""
    return "".join(char if char.isprintable() else "?" for char in text)


# --- addresses ------------------------------------------------------------------------


def format_address(host: str, port: int) -> str:
    """Formats an address: `10.0.0.1:4000`, `[fd00::1]:4000`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Splits an address into its numeric host and its port.

    Raises:
      ValueError: the host is no IPv4 or IPv6 address, or the port no number.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    else:
        ipaddress.IPv4Address(host)
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{address} has no port from 1 to 65535")
    return host, int(port)


# --- a connection ---------------------------------------------------------------------


def check_token(token: bytes) -> None:
    """Checks the length of a token.

    Raises:
      ValueError: the token does not have TOKEN_BYTES bytes.
    """
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"the token of a run has {TOKEN_BYTES} bytes")


class Link:
    """A connection on which both sides have proved that they have the run's token."""

    def __init__(self, connection: socket.socket, peer: str, limits: Limits) -> None:
        """Takes over an open connection. `greet` or `answer` must come next.

        Args:
          connection: an open connection.
          peer: the address of the other side, for errors.
          limits: seconds that the other side may take.
        """
        self._socket = connection
        self._limits = limits
        self.peer = peer
        self._deadline = time.monotonic() + limits.handshake_s
        self._send_key = b""
        self._receive_key = b""
        self._num_sent = 0
        self._num_received = 0
        # small frames are not held back to be sent together
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self, token: bytes) -> Self:
        """Proves the token as the side that has opened the connection.

        The other side proves it first: a listener without the token gets a nonce alone.

        Raises:
          PeerError: the other side has another token, or failed.
        """
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        self._send(_HELLO.pack(_MAGIC, own_nonce))
        answer = self._receive(_NONCE_BYTES + _DIGEST_BYTES)
        nonces = own_nonce + answer[:_NONCE_BYTES]
        self._check_proof(answer[_NONCE_BYTES:], token, b"server", nonces)
        self._send(_derive(token, b"client", nonces))
        self._send_key = _derive(token, b"client to server", nonces)
        self._receive_key = _derive(token, b"server to client", nonces)
        return self

    def answer(self, token: bytes) -> Self:
        """Proves the token as the side that has accepted the connection.

        Raises:
          PeerError: the other side has another token or protocol, or failed.
        """
        magic, nonce = _HELLO.unpack(self._receive(_HELLO.size))
        if magic != _MAGIC:
            raise self._error("has another protocol or version")
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = nonce + own_nonce
        self._send(own_nonce + _derive(token, b"server", nonces))
        proof = self._receive(_DIGEST_BYTES)
        self._check_proof(proof, token, b"client", nonces)
        self._send_key = _derive(token, b"server to client", nonces)
        self._receive_key = _derive(token, b"client to server", nonces)
        return self

    def start_request(self) -> None:
        """Starts the time that a request and its answer may take together."""
        self._deadline = time.monotonic() + self._limits.total_s

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame other than DATA.

        Raises:
          PeerError: the connection has ended, or a limit of time was reached.
        """
        self._send_frame(kind, payload, hashlib.sha256(payload).digest())

    def refuse(self, reason: str) -> None:
        """Tells the other side that its request is refused.

        Raises:
          PeerError: as `send`.
        """
        self.send(Kind.REFUSED, reason.encode("utf-8", "replace")[:MAX_REASON_BYTES])

    def receive(self, allowed: Collection[Kind]) -> tuple[Kind, bytes]:
        """Receives a frame other than DATA.

        Args:
          allowed: the kinds that may come now, beside a refusal.

        Raises:
          RefusedError: the other side refuses the request.
          PeerError: the connection has ended, a limit of time was reached, the frame may
            not come here, or somebody has altered it.
        """
        kind, length = self._receive_header({*allowed, Kind.REFUSED})
        return kind, self._receive_payload(kind, length)

    def send_data(self, file: BinaryIO, size: int) -> None:
        """Sends the next bytes of a file as DATA frames, and their digest.

        Args:
          file: file at the position of the first byte.
          size: number of bytes.

        Raises:
          PeerError: as `send`.
          EOFError: the file has fewer bytes.
          OSError: the file cannot be read.
        """
        hashed = hashlib.sha256()
        left = size
        while left:
            piece = file.read(min(left, CHUNK_BYTES))
            if not piece:
                raise EOFError(f"the file ends {left} bytes early")
            hashed.update(piece)
            self._send_frame(Kind.DATA, piece, hashed.digest())
            left -= len(piece)
        self.send(Kind.END, hashed.digest())

    def receive_data(
        self, size: int, into: memoryview | None = None
    ) -> Iterator[memoryview]:
        """Receives DATA frames and their digest.

        Args:
          size: number of bytes that must come.
          into: buffer of `size` bytes for them. Without it, a piece is valid until the
            next one is asked for.

        Yields:
          Pieces of the data, each after its tag was checked. The last one comes before
          the digest is checked: nothing counts until the iterator has ended.

        Raises:
          RefusedError: the other side cannot send the rest.
          PeerError: as `receive`.
        """
        hashed = hashlib.sha256()
        buffer = memoryview(bytearray(min(size, CHUNK_BYTES))) if into is None else into
        start = 0
        while start < size:
            kind, length = self._receive_header({Kind.DATA, Kind.REFUSED})
            if kind is Kind.REFUSED:
                self._receive_payload(kind, length)
            if length > size - start:
                raise self._error("sent more data than was agreed")
            first = 0 if into is None else start
            piece = buffer[first : first + length]
            self._receive_into(piece)
            hashed.update(piece)
            self._check_tag(kind, length, hashed.digest())
            start += length
            yield piece
        _, digest = self.receive({Kind.END})
        if not hmac.compare_digest(digest, hashed.digest()):
            raise self._error("sent data that do not have their SHA-256")

    def _check_proof(
        self, proof: bytes, token: bytes, side: bytes, nonces: bytes
    ) -> None:
        if not hmac.compare_digest(proof, _derive(token, side, nonces)):
            raise self._error("does not have this run's token")

    def _receive_payload(self, kind: Kind, length: int) -> bytes:
        """Receives the rest of a frame other than DATA, and raises a refusal."""
        payload = self._receive(length)
        self._check_tag(kind, length, hashlib.sha256(payload).digest())
        if kind is Kind.REFUSED:
            reason = _printable(payload.decode("utf-8", "replace"))
            raise RefusedError(self.peer, f"refused: {reason}")
        return payload

    def _send_frame(
        self, kind: Kind, payload: bytes | memoryview, content: bytes
    ) -> None:
        tag = _tag(self._send_key, self._num_sent, kind, len(payload), content)
        self._num_sent += 1
        self._send(_HEADER.pack(kind, len(payload)))
        if payload:
            self._send(payload)
        self._send(tag)

    def _receive_header(self, allowed: Collection[Kind]) -> tuple[Kind, int]:
        try:
            return parse_header(self._receive(_HEADER.size), allowed)
        except MalformedError as error:
            raise self._error(str(error)) from None

    def _check_tag(self, kind: Kind, length: int, content: bytes) -> None:
        expected = _tag(self._receive_key, self._num_received, kind, length, content)
        self._num_received += 1
        if not hmac.compare_digest(self._receive(_DIGEST_BYTES), expected):
            raise self._error("sent a frame that was altered on its way")

    def _send(self, data: bytes | memoryview) -> None:
        with self._in_time():
            self._socket.sendall(data)

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, buffer: memoryview) -> None:
        start = 0
        while start < len(buffer):
            with self._in_time():
                count = self._socket.recv_into(buffer[start:])
            if not count:
                raise self._error("ended the connection")
            start += count

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Limits the time of a call of the socket, and names the peer in its errors."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._error("took too long")
        try:
            self._socket.settimeout(min(left_s, self._limits.idle_s))
            yield
        except TimeoutError:
            raise self._error("did not answer in time") from None
        except OSError as error:
            raise self._error(error.strerror or type(error).__name__) from None

    def _error(self, reason: str) -> PeerError:
        return PeerError(self.peer, reason)


def end(connection: socket.socket) -> None:
    """Ends a connection: the thread that uses it returns from its call, and closes it.

    A socket that another thread closes could be taken for a new one with its number.
    """
    with contextlib.suppress(OSError):  # it is not connected
        connection.shutdown(socket.SHUT_RDWR)


def _derive(token: bytes, purpose: bytes, nonces: bytes) -> bytes:
    """Derives a proof or a key of a connection; no two purposes have the same."""
    return hmac.digest(token, _MAGIC + nonces + purpose, "sha256")


def _tag(key: bytes, number: int, kind: Kind, length: int, content: bytes) -> bytes:
    return hmac.digest(key, _TAGGED.pack(number, kind, length, content), "sha256")
