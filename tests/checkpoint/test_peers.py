"""Copies of checkpoints between processes: what honest peers get, and hostile ones do not."""

import contextlib
import gc
import hashlib
import io
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxdist.checkpoint import peer_link
from jaxdist.checkpoint.peer_link import (
    CHUNK_BYTES,
    MAX_ENTRIES,
    MAX_OWNER,
    MAX_SIZE,
    MAX_STEP,
    TOKEN_BYTES,
    Kind,
    Limits,
    Link,
    ListRequest,
    MalformedError,
    PeerError,
    PutRequest,
    ReadRequest,
    RefusedError,
    format_address,
    format_listing,
    format_request,
    parse_header,
    parse_listing,
    parse_request,
    split_address,
)
from jaxdist.checkpoint.peers import (
    PeerClient,
    PeerServer,
    Sender,
    place,
    placement_faults,
)

TOKEN = bytes(range(TOKEN_BYTES))
OTHER_TOKEN = bytes(TOKEN_BYTES)
LOOPBACK = "127.0.0.1"
# for peers that must run into a limit
SHORT = Limits(connect_s=0.5, handshake_s=0.5, idle_s=0.5, total_s=1.0)
# for peers that may run into one, and otherwise must be in time on a loaded machine
MIDDLE = Limits(connect_s=2, handshake_s=2, idle_s=2, total_s=4)
# what the side reads whose connection was ended, also while it sends
ENDED = "ended the connection|[Rr]eset|Broken pipe"
SOON_S = 5.0  # what takes longer has hung, also on a loaded machine


class MemoryStore:
    """Copies in a dict."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, int], bytes] = {}
        self.pieces: list[int] = []  # bytes of each write
        self.calls = 0

    def inventory(self):
        self.calls += 1
        found: dict[int, dict[int, int]] = {}
        for (step, owner), data in self.copies.items():
            found.setdefault(step, {})[owner] = len(data)
        return found

    def open_read(self, step, owner):
        self.calls += 1
        return io.BytesIO(self.copies[step, owner])

    @contextlib.contextmanager
    def receive(self, step, owner, size):
        self.calls += 1
        file = io.BytesIO()
        yield file
        assert len(file.getvalue()) == size
        self.copies[step, owner] = file.getvalue()


def accept_all(step, owner, size) -> str:
    return ""


def serving(store, host=LOOPBACK, token=TOKEN, accepts=accept_all, limits=None):
    return PeerServer(host, token, store, accepts, limits)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def server(store):
    with serving(store) as server:
        yield server


def put(client, address, step, owner, data) -> None:
    with client.connection(address) as connection:
        connection.put(step, owner, io.BytesIO(data), len(data))


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.002)


def dialled(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), timeout=SOON_S)


@contextlib.contextmanager
def linked(address: str, token: bytes = TOKEN) -> Iterator[Link]:
    """Returns a link whose user can send any frame, with a proper tag."""
    with dialled(address) as connection:
        yield Link(connection, address, Limits()).greet(token)


@contextlib.contextmanager
def listening(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Returns the address of a peer that treats each connection as it likes."""
    listener = socket.create_server((LOOPBACK, 0))

    def accept() -> None:
        with contextlib.suppress(OSError, PeerError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError, PeerError):
                    behave(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield format_address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SOON_S)
        assert not thread.is_alive()


class Wire:
    """Proxy that records both directions, and flips a bit of one byte."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.flip_sent = -1  # position of the byte in the client's stream
        self.flip_answered = -1  # the same for the server's
        self.sent = b""
        self.answered = b""

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        with listening(self._forward) as address:
            yield address

    def _forward(self, client: socket.socket) -> None:
        self.sent = b""
        self.answered = b""
        with dialled(self._target) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=self._answers, args=(server, client))
            back.start()
            while data := client.recv(1 << 16):
                start = len(self.sent)
                self.sent += data
                server.sendall(flipped(data, self.flip_sent - start))
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                start = len(self.answered)
                self.answered += data
                client.sendall(flipped(data, self.flip_answered - start))
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def flipped(data: bytes, position: int) -> bytes:
    if not 0 <= position < len(data):
        return data
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


# --- honest peers ---------------------------------------------------------------------


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7]
)
def test_a_copy_comes_back_as_it_was(store, host, size):
    data = noise(size)
    client = PeerClient(TOKEN)
    with serving(store, host) as server:
        put(client, server.address, 12, 3, data)
        assert store.copies == {(12, 3): data}
        assert client.inventory(server.address) == {12: {3: size}}
        assert client.read(server.address, 12, 3, 0, size) == data


def test_ranges(server, store):
    data = noise(2 * CHUNK_BYTES + 100)
    store.copies[MAX_STEP, MAX_OWNER] = data
    draw = random.Random(1)
    with PeerClient(TOKEN).connection(server.address) as connection:
        for _ in range(50):
            start = draw.randint(0, len(data))
            length = draw.choice([0, 1, 100, len(data) - start])
            length = min(length, len(data) - start)
            part = connection.read(MAX_STEP, MAX_OWNER, start, length)
            assert part == data[start : start + length]
        buffer = bytearray(len(data))
        half = len(data) // 2
        for start, end in ((0, half), (half, len(data))):
            view = memoryview(buffer)[start:end]
            connection.read_into(MAX_STEP, MAX_OWNER, start, view)
        assert buffer == data


def test_a_refusal_leaves_the_connection_usable(server, store):
    store.copies[1, 0] = b"abc"
    with PeerClient(TOKEN).connection(server.address) as connection:
        with pytest.raises(RefusedError, match="no such copy") as caught:
            connection.read(2, 0, 0, 1)
        assert caught.value.peer == server.address
        with pytest.raises(RefusedError, match="the copy has 3 bytes"):
            connection.read(1, 0, 2, 2)
        assert connection.read(1, 0, 2, 1) == b"c"


def test_the_time_of_a_request_begins_with_it(store):
    limits = Limits(handshake_s=0.5, idle_s=SOON_S, total_s=SOON_S)
    with (
        serving(store, limits=limits) as server,
        PeerClient(TOKEN, limits).connection(server.address) as connection,
    ):
        time.sleep(0.6)
        assert connection.inventory() == {}


def test_copies_that_the_placement_does_not_choose_are_refused(store):
    def accepts(step, owner, size) -> str:
        return "" if owner == 3 and size < 10 else f"owner {owner}: {size} bytes"

    with (
        serving(store, accepts=accepts) as server,
        PeerClient(TOKEN).connection(server.address) as connection,
    ):
        with pytest.raises(RefusedError, match="owner 4: 1 bytes"):
            connection.put(1, 4, io.BytesIO(b"x"), 1)
        with pytest.raises(RefusedError, match="owner 3: 10 bytes"):
            connection.put(1, 3, io.BytesIO(b"x" * 10), 10)
        assert not store.calls
        connection.put(1, 3, io.BytesIO(b"x"), 1)
    assert store.copies == {(1, 3): b"x"}


def test_several_peers_are_served_at_once(server, store):
    data = noise(CHUNK_BYTES)
    store.copies[1, 0] = data
    client = PeerClient(TOKEN)
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(client.connection(server.address)) for _ in range(8)
        ]
        for connection in connections:
            assert connection.read(1, 0, 0, len(data)) == data


def test_writes_are_pieces_of_bounded_size(server, store):
    seen = []

    class File(io.BytesIO):
        def write(self, data):
            seen.append(len(data))
            return super().write(data)

    @contextlib.contextmanager
    def receive(step, owner, size):
        yield File()

    store.receive = receive
    put(PeerClient(TOKEN), server.address, 1, 0, bytes(2 * CHUNK_BYTES + 1))
    assert seen == [CHUNK_BYTES, CHUNK_BYTES, 1]


# --- tokens ---------------------------------------------------------------------------


def test_without_the_token_nothing_is_answered(server, store):
    store.copies[1, 0] = b"secret"
    with pytest.raises(PeerError, match="does not have this run's token"):
        PeerClient(OTHER_TOKEN).inventory(server.address)
    # a client that does not check the server, and guesses its own proof
    with dialled(server.address) as connection:
        connection.sendall(peer_link._HELLO.pack(peer_link._MAGIC, bytes(32)))
        assert len(connection.recv(64, socket.MSG_WAITALL)) == 64
        connection.sendall(bytes(32))
        assert connection.recv(1) == b""
    assert not store.calls
    assert PeerClient(TOKEN).inventory(server.address)


def test_a_listener_without_the_token_learns_a_nonce_alone():
    received = []

    def behave(connection: socket.socket) -> None:
        received.append(connection.recv(48, socket.MSG_WAITALL))
        connection.sendall(noise(64))
        received.append(connection.recv(1))

    with listening(behave) as address:
        with pytest.raises(PeerError, match="does not have this run's token"):
            PeerClient(TOKEN).inventory(address)
        wait_until(lambda: len(received) == 2)
    assert len(received[0]) == 48
    assert received[1] == b""


def test_a_client_does_not_take_its_own_proof_for_a_servers():
    """A reflection: the listener sends back what the client says."""

    def behave(connection: socket.socket) -> None:
        hello = connection.recv(48, socket.MSG_WAITALL)
        connection.sendall(hello[16:] + hello[16:])

    with listening(behave) as address, pytest.raises(PeerError, match="token"):
        PeerClient(TOKEN).inventory(address)


def test_a_server_does_not_take_its_own_proof_for_a_clients(server, store):
    with dialled(server.address) as connection:
        connection.sendall(peer_link._HELLO.pack(peer_link._MAGIC, bytes(32)))
        answer = connection.recv(64, socket.MSG_WAITALL)
        connection.sendall(answer[32:])
        assert connection.recv(1) == b""
    assert not store.calls


def test_the_token_is_never_on_the_wire(server, store):
    wire = Wire(server.address)
    with wire.listening() as address:
        put(PeerClient(TOKEN), address, 1, 0, b"data")
    assert b"data" in wire.sent  # it does record
    for stream in (wire.sent, wire.answered):
        assert not any(TOKEN[at : at + 8] in stream for at in range(TOKEN_BYTES - 7))


def test_two_runs_on_a_machine_do_not_mix(store):
    other = MemoryStore()
    with serving(store) as first, serving(other, token=OTHER_TOKEN) as second:
        for token, address, ours in (
            (TOKEN, first.address, True),
            (TOKEN, second.address, False),
            (OTHER_TOKEN, first.address, False),
            (OTHER_TOKEN, second.address, True),
        ):
            client = PeerClient(token)
            if ours:
                put(client, address, 1, 0, token)
            else:
                with pytest.raises(PeerError, match="token"):
                    put(client, address, 2, 0, token)
    assert store.copies == {(1, 0): TOKEN}
    assert other.copies == {(1, 0): OTHER_TOKEN}


@pytest.mark.parametrize("token", [b"", b"short", bytes(33)])
def test_a_token_has_32_bytes(store, token):
    with pytest.raises(ValueError, match="32 bytes"):
        PeerClient(token)
    with pytest.raises(ValueError, match="32 bytes"):
        serving(store, token=token)


# --- the wire -------------------------------------------------------------------------


def test_a_replayed_session_is_refused(server, store):
    wire = Wire(server.address)
    with wire.listening() as address:
        put(PeerClient(TOKEN), address, 1, 0, b"old")
    assert store.copies.pop((1, 0)) == b"old"
    calls = store.calls
    with dialled(server.address) as connection:
        connection.sendall(wire.sent)
        answer = connection.recv(1 << 16)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1 << 16) == b""
    assert len(answer) == 64
    assert answer != wire.answered[:64]
    assert store.calls == calls
    assert not store.copies


@pytest.mark.parametrize("stream", ["sent", "answered"])
def test_no_byte_of_a_copy_can_be_altered_on_the_wire(store, stream):
    data = b"12345678"
    client = PeerClient(TOKEN, MIDDLE)
    with serving(store, limits=MIDDLE) as server:
        wire = Wire(server.address)
        with wire.listening() as address:
            put(client, address, 1, 0, data)
            length = len(getattr(wire, stream))
            assert length > 100
            assert store.copies == {(1, 0): data}
            for position in range(length):
                store.copies.clear()
                setattr(wire, f"flip_{stream}", position)
                with pytest.raises(PeerError):
                    put(client, address, 1, 0, data)
                if stream == "sent":
                    assert not store.copies, position
                # an altered answer can hide that the copy is stored, nothing else
                assert store.copies in ({}, {(1, 0): data})


def test_no_byte_of_an_answer_can_be_altered_on_the_wire(store):
    store.copies[1, 0] = b"12345678"
    client = PeerClient(TOKEN, MIDDLE)
    with serving(store, limits=MIDDLE) as server:
        wire = Wire(server.address)
        with wire.listening() as address:
            assert client.read(address, 1, 0, 0, 8) == b"12345678"
            for position in range(len(wire.answered)):
                wire.flip_answered = position
                with pytest.raises(PeerError):
                    client.read(address, 1, 0, 0, 8)
            wire.flip_answered = -1
            assert client.read(address, 1, 0, 0, 8) == b"12345678"


def pair() -> tuple[Link, Link, socket.socket, socket.socket]:
    """Returns two linked ends, and their sockets."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        near = dialled(format_address(*listener.getsockname()))
        far, _ = listener.accept()
    left = Link(near, "far", MIDDLE)
    right = Link(far, "near", MIDDLE)
    thread = threading.Thread(target=left.greet, args=(TOKEN,))
    thread.start()
    right.answer(TOKEN)
    thread.join()
    return left, right, near, far


@pytest.mark.parametrize("order", [[0, 0], [1, 0], [1]])
def test_frames_cannot_be_repeated_reordered_or_dropped(order):
    left, right, near, far = pair()
    with near, far:
        frames = []
        for kind in (Kind.LIST, Kind.LIST):
            left.send(kind)
            frames.append(far.recv(37, socket.MSG_WAITALL))
        assert frames[0] != frames[1]
        near.sendall(b"".join(frames[index] for index in order))
        with pytest.raises(PeerError, match="altered"):
            for _ in order:
                right.receive({Kind.LIST})


def test_a_frame_cannot_be_sent_back_to_its_sender():
    left, right, near, far = pair()
    with near, far:
        left.send(Kind.LIST)
        far.sendall(far.recv(37, socket.MSG_WAITALL))
        with pytest.raises(PeerError, match="altered"):
            left.receive({Kind.LIST})
        assert right.peer == "near"


def test_a_frame_cannot_become_one_of_another_kind():
    left, right, near, far = pair()
    with near, far:
        left.send(Kind.READY)
        frame = far.recv(37, socket.MSG_WAITALL)
        assert frame[0] == Kind.READY
        near.sendall(bytes([Kind.DONE]) + frame[1:])
        with pytest.raises(PeerError, match="altered"):
            right.receive({Kind.READY, Kind.DONE})


def test_more_data_than_agreed_are_not_received():
    left, right, near, far = pair()
    with near, far:
        left._send_frame(Kind.DATA, b"12345", hashlib.sha256(b"12345").digest())
        with pytest.raises(PeerError, match="more data than was agreed"):
            next(right.receive_data(4))


def test_no_call_begins_after_the_time_of_a_request():
    left, _, near, far = pair()
    with near, far:
        left._limits = Limits(total_s=0)
        left.start_request()
        with pytest.raises(PeerError, match="took too long"):
            left.send(Kind.LIST)


def test_another_digest_at_the_end_is_noticed():
    left, right, near, far = pair()
    with near, far:
        hashed = hashlib.sha256(b"data")
        left._send_frame(Kind.DATA, b"data", hashed.digest())
        left.send(Kind.END, bytes(32))
        pieces = right.receive_data(4)
        assert bytes(next(pieces)) == b"data"
        with pytest.raises(PeerError, match="SHA-256"):
            next(pieces)


# --- junk -----------------------------------------------------------------------------


def junk_of(draw: random.Random, valid: bytes) -> bytes:
    """Returns random bytes of a valid text's length, or the text with changed bytes."""
    if draw.random() < 0.5:
        return draw.randbytes(len(valid))
    changed = bytearray(valid)
    for _ in range(draw.randint(0, 3)):
        changed[draw.randrange(len(changed))] = draw.choice([0, 1, 127, 128, 255])
    return bytes(changed)


def test_junk_headers_are_refused_or_within_limits():
    draw = random.Random(2)
    taken = Counter()
    for _ in range(10_000):
        kind = draw.choice(list(Kind))
        allowed = set(draw.sample(list(Kind), 3))
        data = junk_of(draw, struct.pack("!BI", kind, draw.choice([0, 28, 20, 32])))
        try:
            found, length = parse_header(data, allowed)
        except MalformedError:
            taken["refused"] += 1
            continue
        taken[found] += 1
        assert found in allowed
        assert 0 <= length <= CHUNK_BYTES
        assert (found, length) == (data[0], int.from_bytes(data[1:]))
    assert taken.keys() == {"refused", *Kind}


def test_junk_requests_are_refused_or_mean_what_they_say():
    draw = random.Random(3)
    taken = Counter()
    for _ in range(10_000):
        kind = draw.choice([Kind.READ, Kind.PUT])
        request = {
            Kind.READ: ReadRequest(draw.getrandbits(40), 3, 5, 7),
            Kind.PUT: PutRequest(draw.getrandbits(40), 3, 9),
        }[kind]
        payload = junk_of(draw, format_request(request)[1])
        try:
            found = parse_request(kind, payload)
        except MalformedError:
            taken["refused"] += 1
            continue
        taken[type(found)] += 1
        assert format_request(found) == (kind, payload)
        assert found.step <= MAX_STEP
        assert found.owner <= MAX_OWNER
        assert sum(found[2:]) <= MAX_SIZE
    assert min(taken.values()) > 1000
    assert taken.keys() == {"refused", ReadRequest, PutRequest}


def test_junk_listings_are_refused_or_mean_what_they_say():
    draw = random.Random(4)
    refused = 0
    for _ in range(2000):
        listing = {draw.getrandbits(30): {draw.getrandbits(10): draw.getrandbits(30)}}
        payload = junk_of(draw, format_listing(listing))
        try:
            assert format_listing(parse_listing(payload)) == payload
        except MalformedError:
            refused += 1
    assert 100 < refused < 1900


def test_a_listing_names_a_copy_once():
    entry = format_listing({1: {2: 3}})
    with pytest.raises(MalformedError, match="twice"):
        parse_listing(entry + entry)


def test_requests_out_of_range_are_not_sent():
    for request in (
        ReadRequest(-1, 0, 0, 0),
        ReadRequest(MAX_STEP + 1, 0, 0, 0),
        ReadRequest(0, MAX_OWNER + 1, 0, 0),
        ReadRequest(0, 0, MAX_SIZE, 1),
        PutRequest(0, 0, MAX_SIZE + 1),
        PutRequest(0, -1, 0),
    ):
        with pytest.raises(MalformedError):
            format_request(request)
    assert format_request(ListRequest()) == (Kind.LIST, b"")
    with pytest.raises(MalformedError):
        parse_request(Kind.DATA, b"")


def test_a_server_survives_junk(server, store):
    store.copies[1, 0] = b"sound"
    draw = random.Random(5)
    hello = peer_link._HELLO.pack(peer_link._MAGIC, bytes(32))
    for turn in range(300):
        if turn % 3 < 2:  # before the proof
            with dialled(server.address) as connection:
                start = hello if turn % 3 else b""
                with contextlib.suppress(OSError):
                    connection.sendall(start + draw.randbytes(draw.randint(0, 400)))
                    if draw.random() < 0.5:
                        connection.settimeout(0.01)  # it may wait for more junk
                        connection.recv(10)
            continue
        with linked(server.address) as link:  # after it
            payload = draw.randbytes(draw.choice([0, 1, 20, 28, 32, 300]))
            digest = hashlib.sha256(payload).digest()
            with contextlib.suppress(PeerError):
                link._send_frame(draw.randrange(256), payload, digest)
                if draw.random() < 0.5:
                    link._send(draw.randbytes(100))
    assert store.copies == {(1, 0): b"sound"}
    assert PeerClient(TOKEN).read(server.address, 1, 0, 0, 5) == b"sound"
    wait_until(lambda: not server._connections)


@pytest.mark.parametrize("kind", [0, 99, 255, Kind.DATA, Kind.END, Kind.DONE])
def test_an_unknown_request_ends_the_connection(server, store, kind):
    with linked(server.address) as link, pytest.raises(PeerError, match=ENDED):
        link._send_frame(kind, b"", hashlib.sha256(b"").digest())
        link.receive(set(Kind))
    assert not store.calls


@pytest.mark.parametrize("kind", [Kind.LIST, Kind.READ, Kind.PUT])
@pytest.mark.parametrize(
    "path", [b"../../../../etc/passwd", b"/etc/passwd", b"\0", b"..", b"a" * 5000]
)
def test_a_path_is_no_request(server, store, kind, path):
    with linked(server.address) as link, pytest.raises(PeerError, match=ENDED):
        link._send_frame(kind, path, hashlib.sha256(path).digest())
        link.receive(set(Kind))
    assert not store.calls


def test_a_path_in_the_place_of_numbers_is_a_number(server, store):
    payload = (b"../" * 10)[:28]
    opened = []

    def open_read(step, owner):
        opened.append((step, owner))
        raise KeyError(step)

    store.open_read = open_read
    with linked(server.address) as link:
        link.send(Kind.READ, payload)
        with pytest.raises(PeerError):  # offset + length is too large
            link.receive({Kind.END})
    with linked(server.address) as link:
        link.send(Kind.READ, payload[:12] + bytes(16))
        with pytest.raises(RefusedError, match="no such copy"):
            link.receive({Kind.END})
    assert opened == [struct.unpack("!QI", payload[:12])]


def test_more_data_than_agreed_end_the_connection(server, store):
    with linked(server.address) as link:
        link.send(*format_request(PutRequest(1, 0, 4)))
        link.receive({Kind.READY})
        with pytest.raises(PeerError, match=ENDED):
            link._send_frame(Kind.DATA, b"12345", hashlib.sha256(b"12345").digest())
            link.receive({Kind.DONE})
    assert not store.copies


def test_a_copy_may_not_be_larger_than_any_could_be(server, store):
    with linked(server.address) as link:
        link.send(Kind.PUT, struct.pack("!QIQ", 1, 0, MAX_SIZE + 1))
        with pytest.raises(PeerError, match=ENDED):
            link.receive({Kind.READY})
    assert not store.calls


def test_an_inventory_too_long_is_refused(server, store):
    store.copies = {(step, 0): b"" for step in range(MAX_ENTRIES)}
    client = PeerClient(TOKEN)
    assert len(client.inventory(server.address)) == MAX_ENTRIES
    store.copies[MAX_ENTRIES, 0] = b""
    with pytest.raises(RefusedError, match="the store failed"):
        client.inventory(server.address)


def test_a_reason_cannot_steer_a_terminal(store):
    def accepts(step, owner, size) -> str:
        return "\x1b[2J\r\nfine" + "é" * 300

    with serving(store, accepts=accepts) as server:
        with pytest.raises(RefusedError) as caught:
            put(PeerClient(TOKEN), server.address, 1, 0, b"x")
        assert caught.value.reason.startswith("refused: ?[2J??fine")
        assert caught.value.reason.isprintable()
        assert len(caught.value.reason) < 300


# --- peers that hang or leave ---------------------------------------------------------


def hang(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def hang_after_proof(connection: socket.socket) -> None:
    Link(connection, "client", Limits()).answer(TOKEN)
    hang(connection)


def drip(connection: socket.socket) -> None:
    """Sends an endless answer, slowly enough for the limit of the total time alone."""
    link = Link(connection, "client", Limits()).answer(TOKEN)
    link.receive({Kind.READ})
    hashed = hashlib.sha256()
    while True:
        hashed.update(b"x")
        link._send_frame(Kind.DATA, b"x", hashed.digest())
        time.sleep(0.05)


def leave(connection: socket.socket) -> None:
    connection.recv(10)


def leave_in_the_middle(connection: socket.socket) -> None:
    link = Link(connection, "client", Limits()).answer(TOKEN)
    link.receive({Kind.READ})
    link._send_frame(Kind.DATA, b"x", hashlib.sha256(b"x").digest())


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (hang, "did not answer in time"),
        (hang_after_proof, "did not answer in time"),
        (drip, "took too long|did not answer in time"),
        (leave, ENDED),
        (leave_in_the_middle, ENDED),
    ],
)
def test_a_bad_peer_costs_its_time_at_most(behave, reason):
    with listening(behave) as address:
        began = time.monotonic()
        with pytest.raises(PeerError, match=reason) as caught:
            PeerClient(TOKEN, SHORT).read(address, 1, 0, 0, 1000)
        assert time.monotonic() - began < SHORT.handshake_s + SHORT.total_s + 1
        assert caught.value.peer == address


def test_the_total_time_ends_a_wait():
    limits = Limits(idle_s=30, total_s=0.3)
    with listening(hang_after_proof) as address:
        began = time.monotonic()
        with pytest.raises(PeerError, match="did not answer in time"):
            PeerClient(TOKEN, limits).inventory(address)
        assert time.monotonic() - began < SOON_S


def test_nothing_listens():
    with socket.create_server((LOOPBACK, 0)) as listener:
        address = format_address(*listener.getsockname())
    connection = PeerClient(TOKEN).connection(address)
    with pytest.raises(PeerError, match="refused"), connection:
        pass
    assert connection._socket is None


@pytest.mark.parametrize("address", ["", "localhost:80", "1.2.3.4", "[::1]", "::1:80"])
def test_an_address_is_numeric(address):
    """A name would be looked up, without a limit of time."""
    with pytest.raises(PeerError):
        PeerClient(TOKEN).inventory(address)


def test_addresses_are_read_back():
    for host in (LOOPBACK, "::1", "fe80::1"):
        assert split_address(format_address(host, 80)) == (host, 80)


def test_a_copy_whose_sender_leaves_is_not_kept(server, store):
    client = PeerClient(TOKEN)
    with pytest.raises(EOFError), client.connection(server.address) as connection:
        connection.put(1, 0, Shrinking(b"12"), 3)
    wait_until(lambda: not server._connections)
    assert store.calls == 1
    assert not store.copies


def test_a_client_that_hangs_loses_its_place(store):
    limits = Limits(handshake_s=0.2, idle_s=0.2, total_s=5, max_connections=2)
    with serving(store, limits=limits) as server, contextlib.ExitStack() as stack:
        stack.enter_context(dialled(server.address))  # says nothing
        stack.enter_context(linked(server.address))  # asks nothing
        assert PeerClient(TOKEN).inventory(server.address) == {}


def test_a_client_that_drips_loses_its_place(store):
    limits = Limits(handshake_s=0.3, max_connections=1)
    with serving(store, limits=limits) as server, dialled(server.address) as slow:
        wait_until(lambda: server._connections)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in peer_link._MAGIC * 10:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - began < 2
        assert PeerClient(TOKEN).inventory(server.address) == {}


def test_a_client_that_does_not_read_loses_its_place(store):
    store.copies[1, 0] = bytes(64 * CHUNK_BYTES)
    with serving(store, limits=SHORT) as server, linked(server.address) as link:
        link.send(*format_request(ReadRequest(1, 0, 0, 64 * CHUNK_BYTES)))
        wait_until(lambda: store.calls)
        wait_until(lambda: not server._connections)


def test_connections_are_few(store):
    limits = Limits(max_connections=2)
    client = PeerClient(TOKEN)
    with (
        serving(store, limits=limits) as server,
        client.connection(server.address) as first,
    ):
        with client.connection(server.address) as second:
            third = threading.Thread(target=client.inventory, args=[server.address])
            third.start()
            third.join(0.2)
            assert third.is_alive()
            assert len(server._connections) == 2
            assert first.inventory() == second.inventory() == {}
        third.join(SOON_S)
        assert not third.is_alive()
        assert first.inventory() == {}


# --- stores that fail -----------------------------------------------------------------


class Shrinking(io.BytesIO):
    """File that loses its last byte after somebody asked for its size."""

    def seek(self, offset, whence=0):
        return super().seek(offset, whence) + (whence == os.SEEK_END)


class BrokenStore(MemoryStore):
    """Store that fails where it is told to."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def _fail_at(self, place: str) -> None:
        if place == self._place:
            raise OSError(28, "No space left on device", "/secret/path")

    def inventory(self):
        self._fail_at("inventory")
        return super().inventory()

    def open_read(self, step, owner):
        self._fail_at("open")
        return super().open_read(step, owner)

    @contextlib.contextmanager
    def receive(self, step, owner, size):
        self._fail_at("enter")
        with super().receive(step, owner, size) as file:
            store = self

            class File(io.BytesIO):
                def write(self, data):
                    store._fail_at("write")
                    return file.write(data)

            yield File()
            self._fail_at("exit")


@pytest.mark.parametrize("place", ["inventory", "open", "enter", "write", "exit"])
def test_a_store_that_fails_is_told_without_its_paths(place):
    store = BrokenStore(place)
    data = noise(2 * CHUNK_BYTES + 1)
    with (
        serving(store) as server,
        PeerClient(TOKEN).connection(server.address) as connection,
    ):
        with pytest.raises(RefusedError, match="No space left on device") as caught:
            connection.inventory()
            connection.put(1, 0, io.BytesIO(data), len(data))
            connection.read(1, 0, 0, len(data))
        assert "/secret" not in str(caught.value)
        store._place = ""
        store.copies.clear()
        connection.put(1, 0, io.BytesIO(data), len(data))
        assert connection.read(1, 0, 0, len(data)) == data


def test_a_copy_that_shrinks_while_it_is_read_is_told(server, store):
    store.open_read = lambda step, owner: Shrinking(bytes(CHUNK_BYTES))
    with PeerClient(TOKEN).connection(server.address) as connection:
        with pytest.raises(RefusedError, match="the store failed"):
            connection.read(1, 0, 0, CHUNK_BYTES + 1)
        assert connection.read(1, 0, 0, 3) == bytes(3)


def test_two_connections_cannot_write_the_same_copy(server, store):
    client = PeerClient(TOKEN)
    with linked(server.address) as slow:
        slow.send(*format_request(PutRequest(1, 0, 1)))
        slow.receive({Kind.READY})
        with pytest.raises(RefusedError, match="by another connection"):
            put(client, server.address, 1, 0, b"x")
        put(client, server.address, 1, 1, b"y")
    wait_until(lambda: not server._incoming)
    put(client, server.address, 1, 0, b"x")
    assert store.copies == {(1, 0): b"x", (1, 1): b"y"}


# --- the sender -----------------------------------------------------------------------


def opener(data: bytes) -> Callable[[], io.BytesIO]:
    return lambda: io.BytesIO(data)


def test_a_sender_gives_a_copy_to_each_holder(store):
    other = MemoryStore()
    data = noise(CHUNK_BYTES + 5)
    with (
        serving(store) as first,
        serving(other) as second,
        Sender(PeerClient(TOKEN), [first.address, second.address]) as sender,
    ):
        assert sender.offer(7, 2, opener(data), len(data))
        assert sender.wait(SOON_S)
        outcomes = sender.take_outcomes()
    assert store.copies == other.copies == {(7, 2): data}
    assert (sender.sent, sender.skipped, sender.failed) == (2, 0, 0)
    assert [outcome.holder for outcome in outcomes] == [first.address, second.address]
    assert {outcome.reason for outcome in outcomes} == {""}
    assert not sender.take_outcomes()


def test_offers_during_a_copy_are_skipped_and_do_not_wait(server, store):
    go = threading.Event()

    def slow() -> io.BytesIO:
        go.wait(SOON_S)
        return io.BytesIO(b"slow")

    with Sender(PeerClient(TOKEN), [server.address]) as sender:
        assert sender.offer(1, 0, slow, 4)
        began = time.monotonic()
        assert not any(sender.offer(2, 0, opener(b"x"), 1) for _ in range(100))
        assert time.monotonic() - began < 1
        assert not sender.wait(0)
        go.set()
        assert sender.wait(SOON_S)
        assert sender.offer(3, 0, opener(b"x"), 1)
        assert sender.wait(SOON_S)
        assert (sender.sent, sender.skipped, sender.failed) == (2, 100, 0)
    assert store.copies == {(1, 0): b"slow", (3, 0): b"x"}


def test_a_bad_holder_costs_a_sender_its_time_at_most(server, store):
    for behave in (hang, leave, lambda c: c.sendall(noise(200))):
        with (
            listening(behave) as bad,
            Sender(PeerClient(TOKEN, MIDDLE), [bad, server.address]) as sender,
        ):
            began = time.monotonic()
            assert sender.offer(1, 0, opener(b"data"), 4)
            assert sender.wait(SOON_S)
            assert time.monotonic() - began < MIDDLE.handshake_s + 2
            assert (sender.sent, sender.failed) == (1, 1)
            assert [bool(o.reason) for o in sender.take_outcomes()] == [True, False]
        assert store.copies.pop((1, 0)) == b"data"


def test_a_file_that_cannot_be_sent_is_counted(server, store):
    def missing() -> io.BytesIO:
        raise FileNotFoundError("gone")

    with Sender(PeerClient(TOKEN), [server.address]) as sender:
        for open_file in (missing, opener(b"short"), lambda: Shrinking(bytes(99))):
            assert sender.offer(1, 0, open_file, 100)
            assert sender.wait(SOON_S)
        assert sender.failed == 3
        reasons = [outcome.reason for outcome in sender.take_outcomes()]
        assert "gone" in reasons[0]
        assert "the file has 5 bytes, not 100" in reasons[1]
        assert "ends 1 bytes early" in reasons[2]
        assert sender.offer(2, 0, opener(b"x"), 1)
        assert sender.wait(SOON_S)
        assert sender.sent == 1
    assert store.copies == {(2, 0): b"x"}


@pytest.mark.parametrize("behave", [hang, hang_after_proof])
def test_a_sender_closes_in_the_middle_of_a_copy(behave):
    with listening(behave) as address:
        sender = Sender(PeerClient(TOKEN), [address, address])
        assert sender.offer(1, 0, opener(b"data"), 4)
        time.sleep(0.1)
        began = time.monotonic()
        sender.close()
        assert time.monotonic() - began < 1
        assert not sender._thread.is_alive()
        assert sender.failed == 2
        assert not sender.offer(2, 0, opener(b"data"), 4)
        sender.close()


def test_a_sender_closes_while_it_connects():
    """The holder's queue is full, so that the connection is never made."""
    with socket.create_server((LOOPBACK, 0), backlog=0) as full:
        address = format_address(*full.getsockname())
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            sender = Sender(PeerClient(TOKEN), [address])
            assert sender.offer(1, 0, opener(b"data"), 4)
            time.sleep(0.1)
            began = time.monotonic()
            sender.close()
            assert time.monotonic() - began < 1
            assert not sender._thread.is_alive()


# --- the end --------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_nothing_is_left_after_the_end(store):
    gc.collect()  # sockets of other tests
    files = open_files()
    threads = set(threading.enumerate())
    store.copies[1, 0] = bytes(8 * CHUNK_BYTES)
    server = serving(store)
    client = PeerClient(TOKEN)
    with contextlib.ExitStack() as stack:
        stack.enter_context(dialled(server.address))  # unproved
        stack.enter_context(client.connection(server.address))  # idle
        link = stack.enter_context(linked(server.address))
        link.send(*format_request(ReadRequest(1, 0, 0, 8 * CHUNK_BYTES)))
        wait_until(lambda: store.calls == 1 and len(server._connections) == 3)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 1.5
        server.close()
        assert set(threading.enumerate()) == threads
    assert open_files() == files
    with pytest.raises(PeerError, match="refused"):
        client.inventory(server.address)


def test_failed_connections_leave_no_socket(server):
    client = PeerClient(OTHER_TOKEN)
    connections = [client.connection(server.address) for _ in range(20)]
    PeerClient(TOKEN).inventory(server.address)  # the server has opened all it needs
    wait_until(lambda: not server._connections)
    files = open_files()
    for connection in connections:
        with pytest.raises(PeerError), connection:
            pass
    wait_until(lambda: not server._connections)
    assert open_files() == files


def test_a_server_ends_while_its_store_hangs(store):
    go = threading.Event()

    def open_read(step, owner):
        go.wait(SOON_S)
        raise KeyError(step)

    store.open_read = open_read
    server = serving(store)
    with linked(server.address) as link:
        link.send(*format_request(ReadRequest(1, 0, 0, 1)))
        time.sleep(0.1)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 2
        go.set()
        wait_until(lambda: not server._connections)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "0:0::0"])
def test_a_server_does_not_listen_on_all_interfaces(store, host):
    with pytest.raises(ValueError, match="interface"):
        serving(store, host)


def test_a_server_needs_an_address_of_this_machine(store):
    with pytest.raises(OSError, match="assign"):
        serving(store, "192.0.2.1")


FORKS = """
import os, sys, time
from jaxdist.checkpoint.peers import PeerClient, PeerError, PeerServer

class Store:
    def inventory(self):
        return {5: {6: 7}}

token = bytes(32)
server = PeerServer("127.0.0.1", token, Store(), lambda *copy: "")
client = PeerClient(token)
with client.connection(server.address) as connection:
    assert connection.inventory() == {5: {6: 7}}
    child = os.fork()
    if not child:
        server.close()
        time.sleep(60)
    time.sleep(0.2)
    assert connection.inventory() == client.inventory(server.address)
server.close()
try:
    client.inventory(server.address)
except PeerError as error:
    print(error.reason)
os.kill(child, 9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_ends_nor_holds_the_server():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout


# --- placement ------------------------------------------------------------------------


def assert_sound(hosts, slices, copies, holders) -> None:
    assert len(holders) == len(hosts)
    for process, chosen in enumerate(holders):
        assert len(chosen) == copies
        assert len({hosts[process], *(hosts[q] for q in chosen)}) == copies + 1
    held = Counter(q for chosen in holders for q in chosen)
    assert set(held.values()) == ({copies} if copies else set())


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
@pytest.mark.parametrize("hosts_per_slice", [1, 2, 3, 5])
@pytest.mark.parametrize("per_host", [1, 2, 8])
def test_copies_are_on_other_hosts_and_slices(num_slices, hosts_per_slice, per_host):
    num_hosts = num_slices * hosts_per_slice
    hosts = [host for host in range(num_hosts) for _ in range(per_host)]
    slices = [host // hosts_per_slice for host in hosts]
    order = random.Random(6).sample(range(len(hosts)), len(hosts))
    for processes in (range(len(hosts)), order):  # ids need not follow hosts
        own_hosts = [f"host {hosts[p]}" for p in processes]
        own_slices = [slices[p] for p in processes]
        for copies in range(4):
            if copies >= num_hosts:
                assert list(placement_faults(own_hosts, copies))
                with pytest.raises(ValueError, match="copies on other hosts need"):
                    place(own_hosts, own_slices, copies)
                continue
            holders = place(own_hosts, own_slices, copies)
            assert_sound(own_hosts, own_slices, copies, holders)
            assert holders == place(own_hosts, own_slices, copies)
            elsewhere = (num_slices - 1) * hosts_per_slice  # hosts of other slices
            for process, chosen in enumerate(holders):
                there = [own_slices[q] != own_slices[process] for q in chosen]
                assert all(there[:elsewhere])


@hypothesis.given(
    sizes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=8
    ),
    copies=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_any_shape_is_placed_evenly_or_refused(sizes, copies, seed):
    hosts = [host for host, (count, _) in enumerate(sizes) for _ in range(count)]
    random.Random(seed).shuffle(hosts)
    slices = [sizes[host][1] for host in hosts]
    largest = max(count for count, _ in sizes)
    # its processes' copies and their own parts fill as many processes on all hosts
    if (copies + 1) * largest > len(hosts):
        with pytest.raises(ValueError):
            place(hosts, slices, copies)
    else:
        assert_sound(hosts, slices, copies, place(hosts, slices, copies))


def test_no_processes_have_no_holders():
    assert place([], [], 1) == ()


def test_a_slice_of_another_size_is_left_where_that_can_be():
    hosts = list(range(6))
    for slices in ("AAABBC", "AABC", "ABCA", "AABBC"):
        own_hosts = hosts[: len(slices)]
        (holders,) = zip(*place(own_hosts, slices, 1), strict=True)
        assert all(slices[p] != slices[q] for p, q in enumerate(holders)), slices


def test_a_pod_is_placed_quickly():
    hosts = list(range(8192))
    slices = [host // 1000 for host in hosts]
    began = time.process_time()
    holders = place(hosts, slices, 2)
    assert time.process_time() - began < 5
    assert_sound(hosts, slices, 2, holders)
