"""Files of the memory tier on other hosts.

After each save a process gives its file to processes on other hosts, in a thread. A
host that has lost its memory gets the files that it needs from there. Every file that
arrives is verified before it counts (`MemoryStore.receive`).
"""

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from jaxdist.checkpoint import memory_store
from jaxdist.checkpoint.folders import CheckpointError, error_text
from jaxdist.checkpoint.memory_store import MemoryStore
from jaxdist.checkpoint.peer_link import TOKEN_BYTES, PeerError
from jaxdist.checkpoint.peers import (
    PeerClient,
    PeerServer,
    Sender,
    place,
    placement_faults,
)
from jaxdist.distributed import coordination
from jaxdist.distributed.cluster import LOOPBACK

_RANGE_BYTES = 1 << 24  # bytes of a file that are asked for at once


class _Peer(NamedTuple):
    """A process, as it tells the others."""

    process: int
    address: str  # of its server; "" = it has none
    host: str  # name of the folder, which the processes of a host share
    slice_index: int
    error: str  # why it has no server


class MemoryPeers:
    """Server, sender and client of this process. All processes of a run have them."""

    def __init__(self, store: MemoryStore, copies: int) -> None:
        """Starts to serve, and agrees on who holds whose copies. Communicates.

        Args:
          store: files of this host.
          copies: number of other hosts that get a copy of each file.

        Raises:
          CheckpointError: there are too few hosts, or a process cannot serve. All
            processes raise it.
        """
        self.oldest = 0  # copies of steps before this one are refused
        self._store = store
        token = bytes.fromhex(coordination.broadcast(secrets.token_hex(TOKEN_BYTES)))
        self._stack = contextlib.ExitStack()
        me = self._serve(token)
        self._peers = [_Peer(*vote) for vote in coordination.votes(me)]
        hosts = [peer.host for peer in self._peers]
        faults = [
            f"process {peer.process}: {peer.error}"
            for peer in self._peers
            if peer.error
        ]
        faults += placement_faults(hosts, copies)
        if faults:
            self._stack.close()
            raise CheckpointError(f"checkpoint.memory_peers={copies}: {faults[0]}.")
        slices = [peer.slice_index for peer in self._peers]
        holders = place(hosts, slices, copies)[jax.process_index()]
        self._client = PeerClient(token)
        addresses = [self._peers[number].address for number in holders]
        # what became of the last step that each process has sent: step, whether stored
        self._board = coordination.Board("copies")
        self._step = 0  # the step that is sent, or was sent last
        self._failed_before = 0  # copies that had failed before this step
        self._sender = self._stack.enter_context(
            Sender(self._client, addresses, self._tell)
        )

    @property
    def is_on_one_machine(self) -> bool:
        """Whether no copy leaves this machine."""
        return all(peer.address.startswith(LOOPBACK) for peer in self._peers)

    def _serve(self, token: bytes) -> _Peer:
        address = error = ""
        interface = _interface()
        try:
            if not interface:
                raise OSError("this host has no way to the first process")
            server = PeerServer(interface, token, self._store, self._accepts)
            address = self._stack.enter_context(server).address
        except Exception as failure:  # the others wait for this process
            error = error_text(failure)
        return _Peer(
            process=jax.process_index(),
            address=address,
            host=self._store.place,
            slice_index=getattr(jax.local_devices()[0], "slice_index", 0) or 0,
            error=error,
        )

    def _accepts(self, step: int, owner: int, size: int) -> str:
        """Explains why a copy is not wanted; "" if it is."""
        if step < self.oldest:
            return f"step {step} is older than step {self.oldest}"
        return memory_store.shortage(self._store.folder, size)

    def offer(self, step: int, owner: int, size: int) -> None:
        """Starts to send a file of this host.

        Args:
          step: step of the file. All processes have sent the one before.
          owner: its owner.
          size: its bytes; 0 = it was not written, so it is not sent.
        """
        self._step = step
        self._failed_before = self._sender.failed
        has_begun = size > 0 and self._sender.offer(
            step, owner, lambda: self._store.open_read(step, owner), size
        )
        if not has_begun:
            self._tell(is_stored=False)

    def _tell(self, *, is_stored: bool | None = None) -> None:
        """Tells the first process that this one no longer sends the step."""
        if is_stored is None:
            is_stored = self._sender.failed == self._failed_before
        with contextlib.suppress(Exception):  # the service has gone, the run ends
            self._board.put([self._step, is_stored])

    def outcome(self, step: int) -> bool | None:
        """Tests whether all copies of a step are stored; None = some are being sent.

        A step counts as a whole: a restore needs the files of all owners.
        """
        told = self._board.values()
        outcomes = [told.get(peer.process, [0, False]) for peer in self._peers]
        if any(told_step != step for told_step, _ in outcomes):
            return None
        return all(is_stored for _, is_stored in outcomes)

    def take_failures(self) -> list[str]:
        """Describes the copies that were not stored since the last call."""
        return [
            f"step {copy.step}, part {copy.owner}, at {copy.holder}: {copy.reason}"
            for copy in self._sender.take_outcomes()
            if copy.reason
        ]

    def fetch(self, step: int, owner: int, processes: Iterable[int]) -> None:
        """Gets a file from any of the processes that hold it.

        Raises:
          CheckpointError: none of them has given it.
        """
        faults = []
        addresses = {peer.process: peer.address for peer in self._peers}
        for process in processes:
            try:
                self._fetch(step, owner, addresses[process])
                return
            except (PeerError, CheckpointError, OSError, KeyError) as error:
                faults.append(f"process {process}: {error_text(error)}")
        raise CheckpointError(
            f"part {owner} of step {step} was not received; {'; '.join(faults)}"
        )

    def _fetch(self, step: int, owner: int, address: str) -> None:
        with self._client.connection(address) as connection:
            size = connection.inventory()[step][owner]
            with self._store.receive(step, owner, size) as file:
                buffer = memoryview(bytearray(min(size, _RANGE_BYTES)))
                for first, count in _ranges(size):
                    connection.read_into(step, owner, first, buffer[:count])
                    file.write(buffer[:count])

    def close(self) -> None:
        """Gives up what is being sent, and ends the server."""
        self._stack.close()


def _ranges(size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size, _RANGE_BYTES):
        yield first, min(_RANGE_BYTES, size - first)


def _interface() -> str:
    """Finds this host's address on the way to the others; "" = there is none.

    Every process makes the call.
    """
    service = coordination.service_address() or f"{LOOPBACK}:9"
    mine = _address_toward(service.rpartition(":")[0].strip("[]"))
    remote = [
        address
        for address in coordination.votes(mine)
        if address and not _is_loopback(address)
    ]
    # On the host of the service, its name may mean the loopback address. Debian writes
    # so into /etc/hosts. Others cannot reach that.
    if remote and mine and _is_loopback(mine):
        return _address_toward(remote[0])
    return mine


def _address_toward(host: str) -> str:
    """Finds this host's address on the way to another one; "" = there is no way."""
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
