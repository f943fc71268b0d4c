"""Copies of checkpoints in the memory of other processes: server, client, sender.

Each process runs a `PeerServer` in front of its `Store`. A `Sender` gives copies to the
processes that `place` chooses, and a `PeerClient` reads them back, in ranges. Requests
name a step and an owner, never a path. `peer_link.py` has the connections: who lacks
the run's token gets no answer, and an altered frame is an error.

The owner of a copy is the process whose part of the state it holds.
"""

import contextlib
import ipaddress
import os
import queue
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, NamedTuple, Protocol, Self

import numpy as np

from jaxdist.checkpoint.peer_link import (
    REQUESTS,
    Inventory,
    Kind,
    Limits,
    Link,
    ListRequest,
    MalformedError,
    PeerError,
    PutRequest,
    ReadRequest,
    Request,
    check_token,
    end,
    format_address,
    format_listing,
    format_request,
    parse_listing,
    parse_request,
    split_address,
)

CLEARTEXT_NOTE = (
    "copies of checkpoints between hosts are authenticated, but not encrypted: "
    "who can read the network between the hosts can read the weights"
)

_PAUSE_S = 0.1  # after a connection that could not be accepted
_CLOSE_S = 1.0  # longest wait for threads at the end
_MAX_OUTCOMES = 64  # outcomes that a sender keeps for `take_outcomes`

# Decides about a copy that a peer offers: (step, owner, bytes) -> a reason to refuse it,
# or "".
Accepts = Callable[[int, int, int], str]


class Store(Protocol):
    """Copies that a process holds. The server calls it from several threads."""

    def inventory(self) -> Inventory:
        """Lists all copies: step -> owner -> bytes."""

    def open_read(self, step: int, owner: int) -> BinaryIO:
        """Opens a copy.

        Raises:
          KeyError: there is no such copy.
        """

    def receive(
        self, step: int, owner: int, size: int
    ) -> AbstractContextManager[BinaryIO]:
        """Opens a file for a new copy; it counts only after an exit without an error."""


# --- which processes hold which copies ------------------------------------------------


def placement_faults(hosts: Sequence[Hashable], copies: int) -> Iterator[str]:
    """Checks if each copy can be on a host of its own, with equally many on a process.

    Args:
      hosts: the host of each process.
      copies: copies of each process's part on other hosts.
    """
    largest = max(Counter(hosts).values(), default=0)
    if (copies + 1) * largest > len(hosts):
        yield (
            f"{copies} copies on other hosts need {copies + 1} hosts with equally many "
            f"processes: there are {len(set(hosts))} hosts, and one of them runs "
            f"{largest} of {len(hosts)} processes. Use fewer copies, or more hosts"
        )


def place(
    hosts: Sequence[Hashable], slices: Sequence[Hashable], copies: int
) -> tuple[tuple[int, ...], ...]:
    """Chooses the processes that hold copies of each process's part.

    The processes form a ring, with those of a host side by side. The k-th copy is a
    fixed number of positions further. So each process holds as many copies as it has,
    and if the numbers are multiples of the largest host's, all are on different hosts.

    Args:
      hosts: the host of each process.
      slices: the slice of each process: hosts that tend to fail together.
      copies: copies of each process's part.

    Returns:
      For each process its `copies` holders. They are on different hosts other than its
      own, and on other slices than its own where slices are of equal size.

    Raises:
      ValueError: there are too few hosts for it.
    """
    for fault in placement_faults(hosts, copies):
        raise ValueError(fault)
    if not (copies and hosts):
        return ((),) * len(hosts)
    rings = [_ring(hosts, slices, alternate) for alternate in (True, False)]
    plans = [(ring, _best_shifts(ring, hosts, slices, copies)) for ring in rings]
    # of two equal ones, the first
    ring, best = min(plans, key=lambda plan: sum(plan[1].values()))
    holders: list[tuple[int, ...]] = [()] * len(hosts)
    for position, process in enumerate(ring):
        holders[process] = tuple(ring[(position + shift) % len(ring)] for shift in best)
    return tuple(holders)


def _ring(
    hosts: Sequence[Hashable], slices: Sequence[Hashable], alternate: bool
) -> list[int]:
    """Orders processes by host; neighbouring hosts are of other slices, or of the same.

    Args:
      hosts: the host of each process.
      slices: the slice of each process.
      alternate: whether slices take turns, host by host. Otherwise a slice's hosts stay
        together, which can be better for slices of unequal sizes.
    """
    numbers: dict[Hashable, int] = {}  # of slices
    ranks: dict[Hashable, tuple[int, int]] = {}  # host -> (slice, rank in it)
    sizes: dict[int, int] = {}  # slice -> hosts
    for host, slice_id in zip(hosts, slices, strict=True):
        number = numbers.setdefault(slice_id, len(numbers))
        if host not in ranks:
            ranks[host] = (number, sizes.get(number, 0))
            sizes[number] = sizes.get(number, 0) + 1

    def key(process: int) -> tuple[int, int, int]:
        number, rank = ranks[hosts[process]]
        return (rank, number, process) if alternate else (number, rank, process)

    return sorted(range(len(hosts)), key=key)


def _best_shifts(
    ring: list[int], hosts: Sequence[Hashable], slices: Sequence[Hashable], copies: int
) -> dict[int, int]:
    """Chooses distances on the ring with the fewest holders in the owner's slice.

    Returns:
      `{distance: processes whose holder is in their slice}`, `copies` of them.
    """
    largest = max(Counter(hosts).values())
    names = {name: number for number, name in enumerate(dict.fromkeys(slices))}
    numbers = np.array([names[slices[process]] for process in ring])
    same: dict[int, int] = {}
    for shift in range(largest, len(ring) - largest + 1, largest):
        same[shift] = int(np.sum(numbers == np.roll(numbers, -shift)))
        if list(same.values()).count(0) == copies:
            break
    best = sorted(same, key=lambda shift: (same[shift], shift))[:copies]
    return {shift: same[shift] for shift in best}


# --- the server -----------------------------------------------------------------------


class PeerServer:
    """Server of a process's copies for the other processes of its run."""

    def __init__(
        self,
        host: str,
        token: bytes,
        store: Store,
        accepts: Accepts,
        limits: Limits | None = None,
    ) -> None:
        """Listens on a free port of an interface, and starts to serve.

        Args:
          host: address of the interface. The loopback address if all processes are on
            this machine.
          token: TOKEN_BYTES random bytes that all processes of the run have.
          store: the copies.
          accepts: decides which copies peers may store here.
          limits: what a peer can cost.

        Raises:
          OSError: nothing can listen there.
          ValueError: the token has another length, or the address is that of all
            interfaces: other networks would reach the server, and peers need one.
        """
        check_token(token)
        self._token = token
        self._store = store
        self._accepts = accepts
        self._limits = limits or Limits()
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards the three that follow
        self._is_closing = False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._incoming: set[tuple[int, int]] = set()  # copies that are being stored
        self._listener = _listen(host, self._limits.max_connections)
        self.address = format_address(*self._listener.getsockname()[:2])
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(
            target=self._accept_all, name="peers", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections and threads.

        A thread that waits for the store ends when the store answers; nothing waits for
        it longer than a second.
        """
        if os.getpid() != self._process:  # a forked process: the server is its parent's
            return
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._waker.send(b"x")
        self._thread.join()
        with self._changed:
            connections = dict(self._connections)
        for connection in connections:
            end(connection)
        deadline = time.monotonic() + _CLOSE_S
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wake.close()
        self._waker.close()

    def _accept_all(self) -> None:
        """Accepts connections until the server closes."""
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while self._wait_for_room():
                selector.select()
                if not self._is_closing:
                    self._accept()
            end(self._listener)

    def _wait_for_room(self) -> bool:
        """Waits until a connection more may be served; False if the server closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closing
                    or len(self._connections) < self._limits.max_connections
                )
            )
            return not self._is_closing

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:
            # The process has no file left, and the connection stays in the queue. The
            # pause keeps a core free for training.
            time.sleep(_PAUSE_S)
            return
        peer = format_address(*address[:2])
        thread = threading.Thread(
            target=self._serve, args=(connection, peer), name="peer", daemon=True
        )
        with self._changed:
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # the process may have no thread more
            self._forget(connection)
            connection.close()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Answers the requests of a connection until it ends."""
        try:
            # A peer that leaves or sends junk is no event of this process: it loses its
            # connection, and nothing else.
            with connection, contextlib.suppress(PeerError, OSError):
                link = Link(connection, peer, self._limits).answer(self._token)
                while not self._is_closing:
                    link.start_request()
                    self._answer(link, _receive_request(link))
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._changed:
            del self._connections[connection]
            self._changed.notify_all()

    def _answer(self, link: Link, request: Request) -> None:
        try:
            match request:
                case ReadRequest():
                    self._read(link, request)
                case PutRequest():
                    self._put(link, request)
                case _:
                    link.send(Kind.LISTING, format_listing(self._store.inventory()))
        except PeerError:
            raise
        except Exception as error:  # of the store; the text could name a path
            reason = getattr(error, "strerror", None) or type(error).__name__
            link.refuse(f"the store failed: {reason}")

    def _read(self, link: Link, request: ReadRequest) -> None:
        try:
            copy = self._store.open_read(request.step, request.owner)
        except KeyError:
            link.refuse("there is no such copy")
            return
        with copy as file:
            size = file.seek(0, os.SEEK_END)
            if request.offset + request.length > size:
                link.refuse(f"the copy has {size} bytes")
                return
            file.seek(request.offset)
            link.send_data(file, request.length)

    def _put(self, link: Link, request: PutRequest) -> None:
        with self._reserve(request) as reason:
            if not reason:
                reason = self._accepts(*request)
            if reason:
                link.refuse(reason)
                return
            self._store_copy(link, request)
        link.send(Kind.DONE)

    @contextlib.contextmanager
    def _reserve(self, request: PutRequest) -> Iterator[str]:
        """Holds the place of a copy, so that no two peers write it at once.

        Yields:
          Why the place cannot be had, or "".
        """
        place = (request.step, request.owner)
        with self._changed:
            is_taken = place in self._incoming
            self._incoming.add(place)
        if is_taken:
            yield "the same copy is being sent by another connection"
            return
        try:
            yield ""
        finally:
            with self._changed:
                self._incoming.remove(place)

    def _store_copy(self, link: Link, request: PutRequest) -> None:
        """Receives the data of a copy.

        If the store fails, the rest of the data is still received: the peer then reads
        the reason, and not a broken connection.
        """
        pieces = link.receive_data(request.size)
        is_ready = False
        try:
            with self._store.receive(*request) as file:
                link.send(Kind.READY)
                is_ready = True
                for piece in pieces:
                    file.write(piece)
        except PeerError:
            raise
        except Exception:
            if is_ready:
                deque(pieces, maxlen=0)
            raise


def _listen(host: str, queue_length: int) -> socket.socket:
    if not host:
        raise ValueError("no interface is given: give the address of one")
    infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = infos[0]
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ValueError(f"{host!r} is no interface: give its address")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(queue_length)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _receive_request(link: Link) -> Request:
    kind, payload = link.receive(REQUESTS)
    try:
        return parse_request(kind, payload)
    except MalformedError as error:
        raise PeerError(link.peer, str(error)) from None


# --- the client -----------------------------------------------------------------------


class PeerConnection:
    """A connection to a peer's server, for a block of `with` and one thread."""

    def __init__(self, address: str, token: bytes, limits: Limits) -> None:
        """Prepares a connection; the block opens it."""
        self._address = address
        self._token = token
        self._limits = limits
        self._lock = threading.Lock()  # guards the next two
        self._is_aborted = False
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        """Opens the connection.

        Raises:
          PeerError: nothing answers there, or without the run's token.
        """
        try:
            self._connect()
            self._link = self._greet()
        except OSError as error:
            self._close()
            reason = error.strerror or "did not answer in time"
            raise PeerError(self._address, reason) from None
        except ValueError as error:  # the address is malformed
            raise PeerError(self._address, str(error)) from None
        except PeerError:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def abort(self) -> None:
        """Ends the connection from another thread: its calls raise PeerError."""
        with self._lock:
            self._is_aborted = True
            if self._socket is not None:
                end(self._socket)

    def inventory(self) -> Inventory:
        """Lists the peer's copies: step -> owner -> bytes.

        Raises:
          PeerError: the peer refuses it or fails.
        """
        self._request(ListRequest())
        _, payload = self._link.receive({Kind.LISTING})
        try:
            return parse_listing(payload)
        except MalformedError as error:
            raise PeerError(self._address, str(error)) from None

    def read(self, step: int, owner: int, offset: int, length: int) -> bytearray:
        """Reads a range of a copy.

        Args:
          step: step of the copy.
          owner: process whose part it is.
          offset: bytes from the copy's start.
          length: number of bytes.

        Raises:
          RefusedError: the peer has no such copy or range.
          PeerError: the peer fails.
          ValueError: a number is negative or too large. Nothing was sent.
        """
        data = bytearray(length)
        self.read_into(step, owner, offset, memoryview(data))
        return data

    def read_into(self, step: int, owner: int, offset: int, buffer: memoryview) -> None:
        """Reads a range of a copy into a buffer of bytes, as long as the range.

        After an error, the buffer's content is undefined.

        Raises:
          RefusedError: the peer has no such copy or range.
          PeerError: the peer fails.
        """
        self._request(ReadRequest(step, owner, offset, len(buffer)))
        for _ in self._link.receive_data(len(buffer), buffer):
            pass

    def put(self, step: int, owner: int, file: BinaryIO, size: int) -> None:
        """Gives a copy to the peer, and waits until it is stored.

        Args:
          step: step of the copy.
          owner: process whose part it is.
          file: the copy, from its start to its end.
          size: its bytes.

        Raises:
          RefusedError: the peer does not want the copy, or cannot store it.
          PeerError: the peer fails.
          ValueError: the file has another size. Nothing was sent.
          EOFError: the file has become shorter. The connection cannot be used further.
          OSError: the file cannot be read. The connection cannot be used further.
        """
        found = file.seek(0, os.SEEK_END)
        if found != size:
            raise ValueError(f"the file has {found} bytes, not {size}")
        file.seek(0)
        self._request(PutRequest(step, owner, size))
        self._link.receive({Kind.READY})
        self._link.send_data(file, size)
        self._link.receive({Kind.DONE})

    def _request(self, request: Request) -> None:
        self._link.start_request()
        self._link.send(*format_request(request))

    def _connect(self) -> None:
        host, port = split_address(self._address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        with self._lock:
            self._socket = connection
            if self._is_aborted:
                raise PeerError(self._address, "the connection was given up")
        connection.settimeout(self._limits.connect_s)
        connection.connect((host, port))

    def _greet(self) -> Link:
        assert self._socket is not None
        return Link(self._socket, self._address, self._limits).greet(self._token)

    def _close(self) -> None:
        with self._lock:
            if self._socket is not None:
                end(self._socket)
                self._socket.close()
                self._socket = None


class PeerClient:
    """Reader of other processes' copies. Nothing is tried twice."""

    def __init__(self, token: bytes, limits: Limits | None = None) -> None:
        """Prepares a client; nothing is connected yet.

        Args:
          token: TOKEN_BYTES random bytes that all processes of the run have.
          limits: what a peer can cost.

        Raises:
          ValueError: the token has another length.
        """
        check_token(token)
        self._token = token
        self._limits = limits or Limits()

    def connection(self, address: str) -> PeerConnection:
        """Prepares a connection for several requests.

        Args:
          address: `PeerServer.address` of the peer.
        """
        return PeerConnection(address, self._token, self._limits)

    def inventory(self, address: str) -> Inventory:
        """Lists a peer's copies, as `PeerConnection.inventory`."""
        with self.connection(address) as connection:
            return connection.inventory()

    def read(
        self, address: str, step: int, owner: int, offset: int, length: int
    ) -> bytearray:
        """Reads a range of a peer's copy, as `PeerConnection.read`."""
        with self.connection(address) as connection:
            return connection.read(step, owner, offset, length)


# --- the sender -----------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a copy."""

    step: int
    owner: int
    holder: str  # address of the peer
    size: int  # bytes
    seconds: float
    reason: str  # why it failed, or ""


class Sender:
    """Thread that gives copies to their holders while training goes on.

    Attributes:
      sent: copies that holders have stored.
      skipped: offers that came while a former one was being sent.
      failed: copies that did not reach their holder.
    """

    def __init__(
        self,
        client: PeerClient,
        holders: Sequence[str],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
          client: client with the run's token.
          holders: addresses of the peers that hold this process's copies.
          on_idle: called in the thread after each copy. It raises no error.
        """
        self.sent = 0
        self.skipped = 0
        self.failed = 0
        self._client = client
        self._holders = tuple(holders)
        self._on_idle = on_idle
        self._lock = threading.Lock()  # guards what follows, and the counts
        self._is_closed = False
        self._connection: PeerConnection | None = None
        self._outcomes = deque[Outcome](maxlen=_MAX_OUTCOMES)
        self._idle = threading.Event()
        self._idle.set()
        self._work = queue.SimpleQueue[Callable[[], None] | None]()  # None: the end
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(
        self, step: int, owner: int, open_file: Callable[[], BinaryIO], size: int
    ) -> bool:
        """Starts to send a copy, and returns at once.

        Args:
          step: step of the copy.
          owner: process whose part it is.
          open_file: opens the copy, once for each holder, in the sender's thread.
          size: bytes of the copy.

        Returns:
          False if the copy is skipped, because a former one is still being sent.
        """
        with self._lock:
            if self._is_closed or not self._idle.is_set():
                self.skipped += 1
                return False
            self._idle.clear()
        self._work.put(lambda: self._send_to_all(step, owner, open_file, size))
        return True

    def take_outcomes(self) -> list[Outcome]:
        """Takes the outcomes of copies since the last call, the oldest first."""
        with self._lock:
            outcomes = list(self._outcomes)
            self._outcomes.clear()
        return outcomes

    def wait(self, seconds: float) -> bool:
        """Waits until nothing is being sent; False if that takes longer."""
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Gives up a copy that is being sent, and ends the thread."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.abort()
        self._work.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            finally:
                self._idle.set()
                self._on_idle()

    def _send_to_all(
        self, step: int, owner: int, open_file: Callable[[], BinaryIO], size: int
    ) -> None:
        for holder in self._holders:
            began = time.monotonic()
            try:
                self._send(holder, step, owner, open_file, size)
                reason = ""
            except PeerError as error:
                reason = error.reason
            except Exception as error:  # of the file; the thread must not end
                reason = f"the copy cannot be read: {type(error).__name__}: {error}"
            seconds = time.monotonic() - began
            with self._lock:
                self.sent += not reason
                self.failed += bool(reason)
                self._outcomes.append(
                    Outcome(step, owner, holder, size, seconds, reason)
                )

    def _send(
        self,
        holder: str,
        step: int,
        owner: int,
        open_file: Callable[[], BinaryIO],
        size: int,
    ) -> None:
        connection = self._client.connection(holder)
        with self._lock:
            if self._is_closed:
                raise PeerError(holder, "the sender is closed")
            self._connection = connection
        try:
            with open_file() as file, connection:
                connection.put(step, owner, file, size)
        finally:
            with self._lock:
                self._connection = None
