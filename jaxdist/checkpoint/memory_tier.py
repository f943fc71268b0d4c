"""The memory tier: recent steps in the memory of the hosts, beside those of the folder.

A save copies each process's part of the state to the host while the loop waits. A
thread then writes it to a file of `memory_file.py`. The first process counts the step
once all processes have written theirs. No file holds what another one holds.

A restore agrees on the newest step whose files are all there. It reads the boxes that
its own sharding needs while threads hash the files. Then it compares the fingerprints on
the devices. A file that fails is set aside, and the next older step is tried.

Every process makes the same calls in the same order, if a method does not say otherwise.
"""

import contextlib
import functools
import json
import os
import queue
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxdist.checkpoint import (
    fingerprint,
    memory_file,
    memory_store,
    ranges,
    state_dict,
)
from jaxdist.checkpoint.background import Background
from jaxdist.checkpoint.folders import (
    ArrayInfo,
    CheckpointError,
    NotChecked,
    error_text,
)
from jaxdist.checkpoint.manager import Restored, check_arrays, error_on_all
from jaxdist.checkpoint.memory_file import (
    BadFile,
    Box,
    Header,
    Opened,
    OtherBranch,
    Piece,
)
from jaxdist.checkpoint.memory_peers import MemoryPeers
from jaxdist.checkpoint.memory_store import Branch, MemoryStore
from jaxdist.checkpoint.ranges import StoredArray, StoredPiece
from jaxdist.config import trees
from jaxdist.distributed import coordination
from jaxdist.telemetry import clock

KEEP = 2  # complete steps that stay in memory
FILES = KEEP + 1  # files of a process: the kept steps, and the one that is written
_MOST_COPIERS = 8  # threads that copy arrays to the host
_SMALL_BYTES = 1 << 26  # saves with fewer bytes are copied by one thread
# seconds between two looks at which processes have written, at first and at most
_LOOK_S = 0.01
_MOST_LOOK_S = 0.5
# seconds that the thread of a process may need after the first process has gone on
_LATE_S = 5.0


class MemorySave(NamedTuple):
    """Outcome of one save. On processes other than the first, that of their own file."""

    step: int
    error: str  # why the step does not count; "" = it is complete
    seconds: float  # from the call of `save` until all files were written
    bytes: int  # of all arrays
    blocked_s: float  # seconds that training stood still
    # copies on other hosts that failed since the save before
    failed_copies: list[str]


class BadCopy(NamedTuple):
    """A file that a restore could not use."""

    step: int
    owner: int  # number of the file; -1 = the step as a whole
    place: str  # the host and its folder
    reason: str


class Decision(NamedTuple):
    """What the first process decides before a save."""

    begins: bool  # whether the previous save has ended
    kept: list[int]  # steps that stay in memory
    metadata: dict[str, Any]  # metadata of the step
    sends: bool  # whether all processes send their files to other hosts
    interval: int  # steps until the next save; 0 = as before


@dataclass
class Candidate:
    """A step whose files are all held by some process."""

    header: Header  # that of any of its files
    # {owner: {place: processes}} that hold its file
    holders: dict[int, dict[str, list[int]]]
    is_confirmed: bool = False  # whether its files were hashed

    @property
    def step(self) -> int:
        """The step."""
        return self.header.step

    def processes(self, owner: int) -> list[int]:
        """Lists the processes that hold a file."""
        places = self.holders[owner].values()
        return sorted(process for each in places for process in each)

    @property
    def is_complete(self) -> bool:
        """Whether every file is held."""
        return all(self.holders.get(owner) for owner in range(self.header.owners))


@dataclass
class _Job:
    """A save whose arrays are on the host."""

    header: Header  # without fingerprints
    contents: list[np.ndarray]
    sends: bool  # whether the file goes to other hosts
    sums: jax.Array  # of `fingerprint.start`
    failure: str  # why the arrays were not copied; "" = they were
    kept: list[int]  # older steps that stay
    bytes: int  # of all arrays
    began: float  # monotonic seconds
    blocked_s: float  # seconds that training stood still


@dataclass
class _Inventory:
    """The files of this process's folder, as it tells the others."""

    headers: dict[tuple[int, int], Header] = field(default_factory=dict)
    bad: list[BadCopy] = field(default_factory=list)


@dataclass
class _Known:
    """Files of a step that agree, as the processes have told."""

    owners: int  # number of files that the step has
    # {owner: {place: processes}} that hold its file
    holders: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    processes: set[int] = field(default_factory=set)  # that hold any of them

    @property
    def is_complete(self) -> bool:
        """Whether every file is held."""
        return set(range(self.owners)) <= self.holders.keys()


class MemoryTier:
    """The steps of a run in memory. It is a `manager.MemoryTier`."""

    def __init__(
        self,
        folder: str,
        run: str,
        branch_file: Path,
        timeout_s: int,
        copies: int = 0,
    ) -> None:
        """Opens the folder on this host. Communicates.

        Args:
          folder: checkpoint.memory_folder, which other runs may share.
          run: identity of the run.
          branch_file: file of the workdir that names the run's present history, see
            `memory_store.Branch`. Only the first process reads and writes it.
          timeout_s: seconds that a save may take before it counts as failed.
          copies: number of other hosts that get a copy of each file.

        Raises:
          CheckpointError: the folder cannot be used, or there are too few hosts.
        """
        self._folder = folder
        self._branch_file = branch_file
        self._timeout_s = timeout_s
        # the present history; only the first process has it
        self._branch: Branch | None = None
        if jax.process_index() == 0:
            self._branch = memory_store.read_branch(branch_file)
        name = coordination.broadcast(self._branch.name if self._branch else "")
        with error_on_all(CheckpointError):
            place = memory_store.expand(folder)
            self.store = MemoryStore(place, run=run, branch=name)
            self.store.open()
        # files on other hosts; None = they have none
        self.peers = MemoryPeers(self.store, copies) if copies else None
        # files that restores could not use; equal on all processes
        self.bad: list[BadCopy] = []
        self.restored: Candidate | None = None  # the step that was restored
        self.restored_bytes = 0  # bytes that this process has read for it
        # steps that are complete, ascending. Only those of the first process count.
        self.complete: list[int] = []
        # the newest step whose files are all on other hosts, too; 0 = none. Only that
        # of the first process counts.
        self.copied = 0
        self._sent = 0  # the step that processes send; 0 = none
        self._candidates: list[Candidate] = []  # newest first
        self._background = Background(self.store.folder, timeout_s)
        self._board = coordination.Board("memory")
        # for the values of `_from_first`: their keys, and how many there were
        self._prefix = f"jaxdist/memory/{coordination.broadcast(secrets.token_hex(8))}"
        self._values = 0
        self._results = queue.SimpleQueue[MemorySave]()
        self._share = _Share()
        self._staging: np.ndarray | None = None
        threads = min(_MOST_COPIERS, os.cpu_count() or 1)
        self._copiers = ThreadPoolExecutor(threads, "copy-memory")

    # --- Finding steps ----------------------------------------------------------------

    def look(self) -> None:
        """Agrees with all processes on the steps that are complete."""
        with error_on_all(Exception):  # otherwise the others wait for this process
            place = self.store.place
            inventory = self._look_here(place)
        votes = coordination.votes(
            {
                "process": jax.process_index(),
                "place": place,
                "bad": inventory.bad,
                "files": [
                    [step, owner, header.owners, header.agreed]
                    for (step, owner), header in inventory.headers.items()
                ],
            }
        )
        for vote in votes:
            # processes of one host may have found the same file
            found = [BadCopy(*entry) for entry in vote["bad"]]
            self.bad += [copy for copy in found if copy not in self.bad]
        known = _known_steps(votes)
        for key in sorted(known, reverse=True):
            if known[key].is_complete:
                header = self._header_of(key, inventory, known[key].processes)
                self._candidates.append(Candidate(header, known[key].holders))
        counts = Counter(step for step, _ in known)
        complete = {candidate.step for candidate in self._candidates}
        self.bad += [
            BadCopy(step, -1, "all hosts", "its parts are not of one save")
            for step, count in counts.items()
            if count > 1 and step not in complete
        ]

    def _look_here(self, place: str) -> _Inventory:
        """Reads the headers of this host's files, and sets bad ones aside."""
        found = _Inventory()
        if not self.store.branch:
            return found
        for step, owners in self.store.inventory().items():
            for owner in owners:
                try:
                    opened = self.store.read_header(step, owner)
                except (KeyError, OtherBranch):
                    continue  # deleted meanwhile, or by `begin_branch` later
                except BadFile as error:
                    self.store.set_aside(step, owner)
                    found.bad.append(BadCopy(step, owner, place, str(error)))
                    continue
                found.headers[step, owner] = opened.header
        return found

    def _header_of(
        self, key: tuple[int, str], inventory: _Inventory, holding: set[int]
    ) -> Header:
        """Gets a header of a step, from another process if this one has none."""
        mine = [
            header
            for header in inventory.headers.values()
            if (header.step, header.agreed) == key
        ]
        if len(holding) == jax.process_count():
            return mine[0]
        vote = None
        if jax.process_index() == min(holding):
            vote = {**mine[0].to_json(), "pieces": []}
        (document,) = coordination.votes(vote)
        return Header.from_json(document)

    def newest_metadata(self, not_before: int) -> dict[str, Any]:
        """Finds the metadata of the newest step that is not older than `not_before`.

        It is {} if there is none. This communicates with no process.
        """
        for candidate in self._candidates:
            if candidate.step >= not_before:
                return dict(candidate.header.metadata)
        return {}

    def confirm(self) -> bool:
        """Hashes the files of the newest step, and drops it if one is bad, and so on.

        Returns:
          Whether a step is left.
        """
        while self._candidates:
            candidate = self._candidates[0]
            with _hashing():
                bad = self._hash_files(candidate)
            with contextlib.suppress(BadFile):
                self._confirm(candidate, bad)
                return True
            self._candidates.pop(0)
        return False

    def _hash_files(self, candidate: Candidate) -> list[BadCopy]:
        """Hashes a step's files on this host, and sets bad ones aside.

        The processes of a host split the work. This communicates with no process.

        Returns:
          The bad ones that this process has found.
        """
        bad: list[BadCopy] = []
        if candidate.is_confirmed:
            return bad
        step = candidate.step
        place = self.store.place
        for number, owner in enumerate(sorted(candidate.holders)):
            processes = candidate.holders[owner].get(place, [])
            if not processes:
                continue
            if processes[number % len(processes)] != jax.process_index():
                continue
            try:
                self.store.verify(step, owner)
            except (BadFile, KeyError) as error:
                self.store.set_aside(step, owner)
                bad.append(BadCopy(step, owner, place, error_text(error)))
        return bad

    def _confirm(self, candidate: Candidate, bad: list[BadCopy]) -> list[BadCopy]:
        """Agrees with all processes on a step's bad files, and returns them all.

        Args:
          candidate: the step.
          bad: the files that this process has found to be bad.

        Raises:
          BadFile: a file is bad, and no other process holds it.
        """
        votes = coordination.votes(bad or None)
        found = [BadCopy(*entry) for vote in votes for entry in vote]
        self.bad += found
        for copy in found:
            candidate.holders[copy.owner].pop(copy.place, None)
        if not candidate.is_complete:
            raise BadFile(f"step {candidate.step}: {found[0].reason}")
        candidate.is_confirmed = True
        return found

    # --- Restoring --------------------------------------------------------------------

    def restore(
        self, abstract_state: Any, *, not_before: int, partial: bool
    ) -> Restored | None:
        """Restores the newest sound step; None = there is none.

        Args:
          abstract_state: tree of leaves with shape, dtype and sharding, or a function
            that makes it from the description of a step.
          not_before: steps before this one do not count.
          partial: whether the state may lack some of the stored arrays.

        Raises:
          LayoutError: the step holds another model or optimizer.
          NotChecked: a process could not hash the files, which may be sound.
        """
        for candidate in list(self._candidates):
            if candidate.step < not_before:
                break
            try:
                restored = self._restore(candidate, abstract_state, partial=partial)
            except (state_dict.LayoutError, NotChecked):
                raise
            except CheckpointError as error:
                self._give_up(candidate, str(error))
                self._candidates.remove(candidate)
                continue
            self.restored = candidate
            self.complete = sorted(
                other.step for other in self._candidates if other.step <= candidate.step
            )[-KEEP:]
            return restored
        return None

    def _restore(
        self, candidate: Candidate, abstract_state: Any, *, partial: bool
    ) -> Restored:
        """Restores a step. Its state is used only if all its files are sound.

        Raises:
          CheckpointError: the step cannot be restored. All processes raise it.
        """
        info = candidate.header.info
        if callable(abstract_state):
            abstract_state = abstract_state(info)
        state_dict.check(info.arrays, abstract_state, partial=partial)
        abstract = state_dict.to_canonical(abstract_state)
        with _hashing():
            place = self.store.place
            bad, arrays = self._hash_and_read(candidate, abstract)
        if any(copy.place == place for copy in self._confirm(candidate, bad)):
            arrays = None  # they may come from a bad file
        if self.peers is not None:
            self._fetch(self.peers, candidate, abstract)
        with error_on_all(Exception):
            if arrays is None:
                arrays = self._read(candidate, abstract)
            state = state_dict.from_canonical(arrays, abstract_state)
        check_arrays(candidate.step, arrays, candidate.header.fingerprints)
        return Restored(state, info.metadata)

    def _hash_and_read(
        self, candidate: Candidate, abstract: Mapping[str, Any]
    ) -> tuple[list[BadCopy], dict[str, jax.Array] | None]:
        """Reads a step's arrays while threads hash its files.

        Returns:
          The result of `_hash_files`, and the arrays. They are None if they could not
          be read: a file is bad, or is on other hosts only.
        """
        arrays = None
        with ThreadPoolExecutor(1, "hash") as pool:
            hashing = pool.submit(self._hash_files, candidate)
            # If the cause persists, the second read raises the error.
            with contextlib.suppress(CheckpointError, OSError, KeyError):
                arrays = self._read(candidate, abstract)
            return hashing.result(), arrays

    def _give_up(self, candidate: Candidate, reason: str) -> None:
        """Sets this host's files of a step aside."""
        step = candidate.step
        if not any(copy.step == step for copy in self.bad):
            self.bad.append(BadCopy(step, -1, "all hosts", reason))
        for owner in self._files_here(candidate):
            self.store.set_aside(step, owner)

    def _files_here(self, candidate: Candidate) -> dict[int, Opened]:
        """Opens this host's files of a step by owner; not those of other saves of it."""
        found = {}
        for owner in self.store.inventory().get(candidate.step, {}):
            with contextlib.suppress(KeyError, BadFile):
                opened = self.store.read_header(candidate.step, owner)
                if opened.header.agreed == candidate.header.agreed:
                    found[owner] = opened
        return found

    def _fetch(
        self, peers: MemoryPeers, candidate: Candidate, abstract: Mapping[str, Any]
    ) -> None:
        """Gets the files that this host needs and lacks from other hosts.

        Raises:
          CheckpointError: a file was not received. All processes raise it.
        """
        step = candidate.step
        lacks = True
        with error_on_all(Exception):
            here = self._files_here(candidate)
            stored = self._stored(candidate, here)
            with contextlib.suppress(ranges.Missing):
                _needed_owners(stored, abstract)
                lacks = False
        if not any(coordination.votes(lacks)):
            return
        self._exchange_pieces(candidate, stored)
        with error_on_all(Exception):
            needed = _needed_owners(stored, abstract) if lacks else set()
            for owner in sorted(needed - here.keys()):
                peers.fetch(step, owner, candidate.processes(owner))

    def _exchange_pieces(
        self, candidate: Candidate, stored: Mapping[str, StoredArray]
    ) -> None:
        """Adds the pieces of all files. The first holder of each tells the others."""
        told = []
        with error_on_all(Exception):
            for owner, opened in self._files_here(candidate).items():
                if jax.process_index() == min(candidate.processes(owner)):
                    told.append([owner, opened.header.to_json()["pieces"]])
        for vote in coordination.votes(told):
            for owner, pieces in vote:
                for name, start, stop in pieces:
                    box = Box(tuple(start), tuple(stop))
                    stored[name].add(StoredPiece(owner, box, offset=0))

    def _stored(
        self, candidate: Candidate, files: Mapping[int, Opened]
    ) -> dict[str, StoredArray]:
        """Lists the arrays of a step with the pieces in some files, by owner."""
        stored = {
            name: StoredArray(name, info)
            for name, info in candidate.header.arrays.items()
        }
        for owner, opened in files.items():
            for piece, offset in opened.pieces():
                stored[piece.name].add(StoredPiece(owner, piece.box, offset))
        return stored

    def _read(
        self, candidate: Candidate, abstract: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """Reads arrays into their shardings, one after another.

        Raises:
          CheckpointError: a part of an array is in none of this host's files.
          OSError: a file cannot be read.
        """
        owners = self._files_here(candidate)
        self.restored_bytes = 0
        arrays: dict[str, jax.Array] = {}
        before: jax.Array | None = None
        with contextlib.ExitStack() as stack:
            files = {
                owner: stack.enter_context(self.store.open_read(candidate.step, owner))
                for owner in owners
            }
            stored = self._stored(candidate, owners)
            _needed_owners(stored, abstract)
            for name, leaf in abstract.items():
                array = self._read_array(stored[name], leaf.sharding, files)
                # An array goes to the devices while the next one is read. Otherwise
                # all arrays would be in the host's memory at once.
                if before is not None:
                    before.block_until_ready()
                before = arrays[name] = array
        jax.block_until_ready(arrays)
        return arrays

    def _read_array(
        self, stored: StoredArray, sharding: Sharding, files: Mapping[int, BinaryIO]
    ) -> jax.Array:
        """Reads an array, and starts to place it on the devices."""
        shape = stored.info.shape
        shards = []
        for box, here in _boxes_here(sharding, shape).items():
            host = np.empty(box.shape, np.dtype(stored.info.dtype))
            self.restored_bytes += ranges.fill(host, ranges.plan(stored, box), files)
            for device in here:
                target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                # A device in this host's memory must not train in a buffer of numpy.
                shards.append(jax.device_put(host, target, may_alias=False))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    # --- Saving -----------------------------------------------------------------------

    def leave_branch(self) -> None:
        """Makes all steps invalid, because the run goes back to an older one.

        Only the first process calls it. `begin_branch` follows on all processes.
        """
        self._branch = None
        self._branch_file.unlink(missing_ok=True)

    def begin_branch(self, sealed: int = 0) -> None:
        """Begins a new history, and deletes the steps of others.

        A run does so if it has not restored a step in memory.

        Args:
          sealed: the newest sealed step of the folder; 0 = none.

        Raises:
          CheckpointError: the branch cannot be written.
        """
        self._background.wait()
        name = coordination.broadcast(secrets.token_hex(8))
        with error_on_all(OSError):
            if jax.process_index() == 0:
                self._branch = Branch(
                    run=self.store.run,
                    name=name,
                    folder=self._folder,
                    sealed=sealed,
                    began=time.time(),
                )
                self._branch.write(self._branch_file)
        self.store.branch = name
        self.restored = None
        self.complete = []
        self.copied = 0
        self._candidates = []
        self.store.keep(lambda step: False)

    def continue_branch(self, sealed: int = 0) -> None:
        """Deletes the steps that are not those of the restored history.

        Args:
          sealed: the newest sealed step of the folder; 0 = none.
        """
        self.store.keep(self.complete.__contains__)
        self.record_sealed(sealed)

    def record_sealed(self, step: int) -> None:
        """Writes the newest sealed step of the folder beside the branch.

        A start compares it with the folder, see `memory_saves`. Only the first process
        writes. This communicates with no process.
        """
        if self._branch is None:
            return
        self._branch = self._branch._replace(sealed=step, folder=self._folder)
        # A full disk must not end the run. The step before stays in the file then.
        with contextlib.suppress(OSError):
            self._branch.write(self._branch_file)

    def decide(
        self, *, allowed: bool, sealed: int, metadata: Mapping[str, Any], interval: int
    ) -> Decision:
        """Decides whether a save can begin; process 0 decides for all.

        Args:
          allowed: whether the run can wait for a save.
          sealed: the newest sealed step of the folder. Older ones are not needed.
          metadata: metadata of the step.
          interval: steps until the next save; 0 = as before.
        """
        begins = self._background.wait(0) and allowed
        if begins and jax.process_index() == 0:
            self._look_at_copies()
        decision = Decision(
            begins=begins,
            kept=self._kept([step for step in self.complete if step >= sealed]),
            metadata=dict(metadata) if begins else {},
            sends=not self._sent,
            interval=interval,
        )
        return Decision(*self._from_first(decision))

    def _look_at_copies(self) -> None:
        """Looks whether all processes have sent their files of a step.

        They send the files of the same steps. If each chose its own, a slow network
        could leave no step of which other hosts have all files.
        """
        if self.peers is None or not self._sent:
            return
        is_copied = self.peers.outcome(self._sent)
        if is_copied is None:
            return
        if is_copied:
            self.copied = self._sent
        self._sent = 0

    def _kept(self, complete: list[int]) -> list[int]:
        """Chooses the steps that stay beside the one that is written.

        If the network is slow, the step that other hosts have is not among the newest.
        """
        needed = {*complete[-1:], self.copied, self._sent}
        kept = [step for step in complete if step in needed]
        return kept if len(kept) >= KEEP else complete[-KEEP:]

    def _from_first(self, value: Any) -> Any:
        """Sends the first process's JSON value to all, as `coordination.broadcast`.

        The service would keep each value for ever, and metadata is large. So a value is
        deleted at the call after the next: all processes have read it by then.
        """
        client = coordination.kv_client()
        self._values += 1
        key = f"{self._prefix}/{self._values}"
        if jax.process_index() == 0:
            text = json.dumps(value)
            if client is not None:
                client.key_value_set(key, text)
                client.key_value_delete(f"{self._prefix}/{self._values - 2}")
        else:
            with clock.timed(clock.WAIT):
                text = client.blocking_key_value_get(key, 1000 * coordination.FOREVER_S)
        # The first process reads its own text, too: the value may have parts that
        # training changes before a thread writes them.
        return json.loads(text)

    def save(self, step: int, arrays: Mapping[str, Any], decision: Decision) -> None:
        """Copies arrays to the host, and starts to write them.

        The method returns once the arrays are copied. They may be donated after that.

        Args:
          step: finished updates.
          arrays: {canonical name: array}.
          decision: that of `decide`, which has let the save begin.
        """
        began = time.monotonic()
        # The first process has the answers of all, or has given up to wait for them. So
        # the thread of this process is about to end, or hangs.
        hangs = not self._background.wait(_LATE_S)
        self.complete = decision.kept
        if decision.sends and self.peers is not None:
            self._sent = step
        if self.peers is not None:
            self.peers.oldest = min([*decision.kept, step])
        infos = state_dict.describe(arrays)
        pieces = self._share.of(arrays)
        contents: list[np.ndarray] = []
        failure = "the previous save of this process has not ended" if hangs else ""
        try:
            if not hangs:  # the thread still reads the memory that is copied into
                contents = self._copy(arrays, infos, pieces)
        except Exception as error:  # training continues
            failure = error_text(error)
        header = Header(
            run=self.store.run,
            branch=self.store.branch,
            step=step,
            owner=jax.process_index(),
            owners=jax.process_count(),
            arrays=infos,
            metadata=decision.metadata,
            fingerprints={},
            pieces=tuple(pieces),
        )
        # It communicates, so it is started even if the copy has failed.
        sums = fingerprint.start(arrays)
        job = _Job(
            header=header,
            contents=contents,
            sends=decision.sends,
            sums=sums,
            failure=failure,
            kept=decision.kept,
            bytes=trees.tree_bytes(arrays),
            began=began,
            blocked_s=time.monotonic() - began,
        )
        if hangs:
            if decision.sends:
                self._offer(step, is_written=False)
            self._tell(job, failure, [])
            return
        self._background.begin(
            functools.partial(self._finish, job), f"save of step {step} in memory"
        )

    def _copy(
        self,
        arrays: Mapping[str, Any],
        infos: Mapping[str, ArrayInfo],
        pieces: Sequence[Piece],
    ) -> list[np.ndarray]:
        """Copies pieces to the host. All transfers start before the first one ends."""
        shards = [_shard(arrays[piece.name], piece.box) for piece in pieces]
        for shard in shards:
            if isinstance(shard, jax.Array):
                shard.copy_to_host_async()
        staging = self._staging_for(arrays, infos, pieces)
        if staging is None:
            return [np.asarray(shard) for shard in shards]
        places = _places_in(staging, infos, pieces)
        sources = [np.asarray(shard) for shard in shards]
        if staging.nbytes < _SMALL_BYTES:
            list(map(np.copyto, places, sources))
        else:  # one thread alone does not use all the bandwidth of the memory
            list(self._copiers.map(np.copyto, places, sources))
        return places

    def prepare(self, abstract_arrays: Mapping[str, Any]) -> None:
        """Touches the memory that saves copy into, so that the first one is not slow.

        It communicates with no process.
        """
        infos = state_dict.describe(abstract_arrays)
        pieces = self._share.of(abstract_arrays)
        staging = self._staging_for(abstract_arrays, infos, pieces)
        if staging is not None:
            staging.fill(0)

    def _staging_for(
        self,
        arrays: Mapping[str, Any],
        infos: Mapping[str, ArrayInfo],
        pieces: Sequence[Piece],
    ) -> np.ndarray | None:
        """Makes the memory that saves copy into; None = numpy's copies are enough.

        They are not if numpy sees a device's own buffer, which the next step overwrites.
        On CPU, jax would keep that buffer and let the step write to new memory. But that
        costs the step seven times as much as this copy (docs/project/decisions.md).
        """
        if not any(_is_in_host_memory(leaf) for leaf in arrays.values()):
            return None
        total = memory_file.payload_bytes(infos, pieces)
        if self._staging is None or self._staging.nbytes < total:
            self._staging = np.empty(total, np.uint8)
        return self._staging

    def _finish(self, job: _Job) -> None:
        """Writes this process's file, and waits for the others on the first process."""
        step = job.header.step
        error = job.failure
        try:
            # To free memory takes a while, so training does not wait for it.
            self.store.keep(job.kept.__contains__)
            if not error:
                self._write(job)
        except Exception as failure:  # training continues
            error = error_text(failure)
        if job.sends:
            self._offer(step, is_written=not error)
        job.contents.clear()  # on an accelerator, this frees the host's memory
        failed_copies = self.peers.take_failures() if self.peers else []
        self._tell(job, error, failed_copies)

    def _tell(self, job: _Job, error: str, failed_copies: list[str]) -> None:
        """Tells the outcome of a save to the other processes, and to `poll`."""
        step = job.header.step
        try:
            errors, failed_copies = self._exchange(step, error, failed_copies)
        except Exception as failure:  # the service has gone
            errors = [error_text(failure)]
        if not errors:
            self.complete = [*self.complete, step]
        self._results.put(
            MemorySave(
                step=step,
                error=errors[0] if errors else "",
                seconds=time.monotonic() - job.began,
                bytes=job.bytes,
                blocked_s=job.blocked_s,
                failed_copies=failed_copies,
            )
        )

    def _offer(self, step: int, *, is_written: bool) -> None:
        """Starts to send this process's file to other hosts."""
        if self.peers is None:
            return
        owner = jax.process_index()
        size = 0
        if is_written:
            size = self.store.inventory().get(step, {}).get(owner, 0)
        self.peers.offer(step, owner, size)

    def _write(self, job: _Job) -> None:
        """Writes this process's file.

        Raises:
          CheckpointError: there is no room for it.
          OSError: it cannot be written.
        """
        fingerprints = fingerprint.finish(list(job.header.arrays), job.sums)
        header = Header(**{**vars(job.header), "fingerprints": fingerprints})
        needed = memory_file.payload_bytes(header.arrays, header.pieces)
        self.store.make()
        shortage = memory_store.shortage(self.store.folder, needed)
        if shortage:
            raise CheckpointError(shortage)
        with self.store.write(header.step, header.owner) as file:
            memory_file.write(file, header, job.contents)

    def _exchange(
        self, step: int, error: str, failed_copies: list[str]
    ) -> tuple[list[str], list[str]]:
        """Tells the others how this process's file and copies went.

        Returns:
          Errors and failed copies: on the first process those of all, once all have
          answered; on the others their own.
        """
        process = jax.process_index()
        own = [error] if error else [], failed_copies
        if self._board.client is None:
            return own
        self._board.put([step, error, failed_copies])
        if process:
            return own
        answers = self._answers(step)
        errors = [
            f"process {other}: {text}" if other else text
            for other, (_, text, _) in sorted(answers.items())
            if text
        ]
        return errors, [copy for _, _, each in answers.values() for copy in each]

    def _answers(self, step: int) -> dict[int, tuple[int, str, list[str]]]:
        """Waits for the answers of all processes: step, error, failed copies."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = _LOOK_S
        while True:
            answers: dict[int, Any] = self._board.values()
            late = [
                other
                for other in range(jax.process_count())
                if answers.get(other, [-1])[0] != step
            ]
            if not late:
                return answers
            if time.monotonic() > deadline:
                raise CheckpointError(f"process {late[0]} has not written its part")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_LOOK_S)

    def poll(self) -> list[MemorySave]:
        """Collects the saves that ended since the last call. Communicates with nobody."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def require_room(
        self, abstract_arrays: Mapping[str, Any], *, copies: int, staged: int
    ) -> str:
        """Checks that the memory of every host holds the tier.

        Args:
          abstract_arrays: arrays of the state by canonical name, with shardings.
          copies: number of hosts that hold each file.
          staged: copies of the arrays that running saves hold beside the files.

        Returns:
          Why this host's memory does not; "" if it does.
        """
        infos = state_dict.describe(abstract_arrays)
        pieces = self._share.of(abstract_arrays)
        mine = memory_file.payload_bytes(infos, pieces)
        place = self.store.place
        here = [
            count
            for other, count in coordination.votes([place, mine])
            if other == place
        ]
        return memory_store.room_fault(
            self.store,
            sum(here),
            processes=len(here),
            files=FILES * copies,
            staged=staged,
        )

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the running save.

        Args:
          seconds: longest wait; None = until the save has taken its time limit.
        """
        self._background.wait(seconds)

    def close(self, *, delete: bool, seconds: float | None = None) -> None:
        """Waits for the running save, and may delete the folder.

        Args:
          delete: whether to delete it.
          seconds: longest wait; None = until the save has taken its time limit. A save
            that takes longer is given up: its thread ends with the process.
        """
        if self._background.wait(seconds):
            self._background.close()
        self._copiers.shutdown()
        if self.peers is not None:
            self.peers.close()
        if delete:
            self.store.remove()
            if jax.process_index() == 0:
                self.leave_branch()


@contextlib.contextmanager
def _hashing() -> Iterator[None]:
    """Turns an error on any process into `NotChecked` on all."""
    try:
        with error_on_all(Exception):
            yield
    except CheckpointError as error:
        raise NotChecked(f"files in memory could not be checked: {error}") from error


def _known_steps(votes: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], _Known]:
    """Groups files by step and by what they have in common, `Header.agreed`."""
    known: dict[tuple[int, str], _Known] = {}
    for vote in votes:
        for step, owner, owners, agreed in vote["files"]:
            files = known.setdefault((step, agreed), _Known(owners))
            places = files.holders.setdefault(owner, {})
            places.setdefault(vote["place"], []).append(vote["process"])
            files.processes.add(vote["process"])
    return known


class _Share:
    """The pieces that this process saves. They are computed once for a sharding."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, ...]] = []
        self._pieces: list[Piece] = []

    def of(self, arrays: Mapping[str, Any]) -> list[Piece]:
        """Lists the pieces of this process."""
        key = [
            (name, np.shape(leaf), str(leaf.dtype), getattr(leaf, "sharding", None))
            for name, leaf in sorted(arrays.items())
        ]
        if key != self._known:
            self._pieces = share_out(arrays)[jax.process_index()]
            self._known = key
        return self._pieces


def share_out(arrays: Mapping[str, Any]) -> dict[int, list[Piece]]:
    """Assigns each part of the arrays to one of the processes that hold it.

    The largest parts come first, each to the process with the fewest bytes so far. So
    the processes save about as much if the arrays are replicated.

    Args:
      arrays: {name: array or abstract array, with a sharding}. Arrays without one are
        those of the first process.

    Returns:
      {process: its pieces}, equal on all processes.
    """
    parts = sorted(_parts(arrays), key=lambda part: (-part[0], part[1]))
    loads: Counter[int] = Counter()
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for count, piece, holders in parts:
        process = min(holders, key=lambda number: (loads[number], number))
        loads[process] += count
        pieces[process].append(piece)
    return defaultdict(list, {number: sorted(each) for number, each in pieces.items()})


def _parts(arrays: Mapping[str, Any]) -> Iterator[tuple[int, Piece, set[int]]]:
    """Yields the bytes of each part of the arrays, and the processes that hold it."""
    for name, leaf in arrays.items():
        for box, processes in _holders(leaf, tuple(np.shape(leaf))).items():
            yield leaf.dtype.itemsize * box.size, Piece(name, box), processes


def _holders(leaf: Any, shape: tuple[int, ...]) -> dict[Box, set[int]]:
    """Finds the processes that hold each part of an array."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return {Box((0,) * len(shape), shape): {0}}
    found: dict[Box, set[int]] = defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        found[box_of(index, shape)].add(device.process_index)
    return found


def _boxes_here(
    sharding: Sharding, shape: tuple[int, ...]
) -> dict[Box, list[jax.Device]]:
    """Finds the parts of an array that this process holds, each with its devices."""
    devices: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None  # this process's devices
        devices.setdefault(box_of(index, shape), []).append(device)
    return devices


def _needed_owners(
    stored: Mapping[str, StoredArray], abstract: Mapping[str, Any]
) -> set[int]:
    """Finds the files that hold what this process needs.

    Raises:
      CheckpointError: the files do not hold all of it.
    """
    return {
        read.owner
        for name, leaf in abstract.items()
        for box in _boxes_here(leaf.sharding, stored[name].info.shape)
        for read in ranges.plan(stored[name], box)
    }


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """Makes the box of an index of jax."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))


def _shard(leaf: Any, box: Box) -> Any:
    """Finds the part of an array that is a box, on any device of this process."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    for shard in leaf.addressable_shards:
        if box_of(shard.index, leaf.shape) == box:
            return shard.data
    raise AssertionError(f"no device of this process holds {box}")


def _places_in(
    memory: np.ndarray, infos: Mapping[str, ArrayInfo], pieces: Iterable[Piece]
) -> list[np.ndarray]:
    """Views memory as arrays for pieces, one after another."""
    places = []
    first = 0
    for piece in pieces:
        info = infos[piece.name]
        raw = memory[first : first + memory_file.itemsize(info) * piece.box.size]
        places.append(raw.view(info.dtype).reshape(piece.box.shape))
        first += memory_file.payload_bytes(infos, [piece])
    return places


def _is_in_host_memory(leaf: Any) -> bool:
    """Tests whether an array, or an abstract one, is in the memory of hosts."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return False
    platform = next(iter(sharding.device_set)).platform
    return platform == "cpu" or (sharding.memory_kind or "").endswith("host")
