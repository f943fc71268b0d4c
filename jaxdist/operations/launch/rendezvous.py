"""The folder in which the agents of several machines meet. Needs no jax.

Each agent rewrites a record of its own every few seconds. An agent whose record stops
changing is lost: a record is compared with its last version, so clocks of machines are
never compared. What one agent decides is a numbered file that can be created once, so
two agents that both think that they lead cannot both decide. All survives the end of
any agent.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxdist.storage import atomic, untrusted

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MAX_BYTES = 1 << 20  # bytes of the largest file
_KEPT = 20  # generations whose files are kept
_BEATS = 5  # heartbeats in the time after which an agent is lost
_MAX_BEAT_S = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a folder without room

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Record:
    """Facts that an agent tells the others."""

    name: str
    token: str  # random text; another one at each start of the agent
    terms: str  # digest of the options that all agents share
    address: str  # host by which other machines reach this one
    port: int  # a free port of this machine
    beat: int = 0  # number of times that the record was written
    leaving: bool = False  # the agent was asked to stop
    left: bool = False  # the agent has ended
    listens: int = 0  # generation whose process 0 listens on this machine
    unreached: int = 0  # generation whose process 0 this machine did not reach
    generation: int = 0  # last generation whose processes have ended here
    # exit codes of the processes of that generation that ended by themselves
    codes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> tuple[str, str]:
        """The name and the token: one start of one agent."""
        return self.name, self.token


@dataclasses.dataclass(frozen=True)
class Generation:
    """Machines that run the command together, or the end of the run.

    A new generation has the counts of the one before it, so that any agent can
    continue to lead.
    """

    number: int = 0
    members: tuple[tuple[str, str], ...] = ()  # ids, in the order of their processes
    address: str = ""  # host of process 0
    port: int = 0  # port of process 0
    final: int | None = None  # exit code of all agents; None: the run continues
    why: str = ""  # reason of its start, or of the run's end
    step: int = 0  # newest step before its start
    starts: int = 0  # starts of the run that began to train, before its start
    failures: tuple[str, ...] = ()  # causes of losses since the last progress
    suspect: str = ""  # token of the agent whose process was lost last
    excluded: tuple[str, ...] = ()  # tokens of agents that are left out until progress
    refused: tuple[int, ...] = ()  # numbers of machines that ended with 78
    grown: tuple[str, ...] = ()  # tokens of members that the one before had not
    silent: int = 0  # starts since a machine fell silent

    def index(self, id_: tuple[str, str]) -> int | None:
        """Finds the place of an agent among the members; None if it is not one."""
        return self.members.index(id_) if id_ in self.members else None


@dataclasses.dataclass(frozen=True)
class Order:
    """Order that ends a generation."""

    how: str  # save, or kill
    why: str
    grow_to: int = 0  # number of machines for which it makes room; 0: none


class Rendezvous:
    """An agent's view of the folder, and its own record there."""

    def __init__(
        self,
        folder: Path,
        record: Record,
        *,
        lost_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the newest generation.

        Args:
          folder: folder that all machines share.
          record: this agent's facts.
          lost_s: seconds without a heartbeat after which an agent is lost.
          clock: gives the seconds of a steady clock.

        Raises:
          OSError: the folder cannot be read.
        """
        self.folder = folder
        self.own = record
        self.lost_s = lost_s
        self.clock = clock
        self.generation = Generation()
        self.order: Order | None = None
        self.records: dict[str, Record] = {}
        # the newest generation's file that is not sound, and since when
        self._unsound: tuple[int, float] = (0, clock())
        # when a record last changed, and whether this agent has seen it change
        self._changed: dict[str, tuple[float, bool]] = {}
        self._next_beat = clock()
        self._last_success = clock()
        # from when the others could be heard: this agent joined, or could write again
        self._heard_since = clock()
        self._read_all()
        self.joined_at = self.generation.number

    # --- this agent's record ----------------------------------------------------------

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(_MAX_BEAT_S, self.lost_s / _BEATS)

    def is_due(self) -> bool:
        """Tests whether it is time for a heartbeat."""
        return self.clock() >= self._next_beat

    def rejoin(self) -> None:
        """Becomes another agent of the same name, as if it were started again."""
        self.own = dataclasses.replace(self.own, token=secrets.token_hex(8))

    def update(self, *, soon: bool = False, **changes: Any) -> None:
        """Writes the own record with changed facts, and reads all files.

        A folder that does not answer for a while is no error. One without room still
        answers: the others can be read. Writing into the folder first makes a network
        file system show what is new in it.

        Args:
          soon: the next heartbeat is due soon, as nothing else is to be done.
          changes: fields of the record, with their values.
        """
        now = self.clock()
        self._next_beat = now + self.beat_s / (4 if soon else 1)
        self.own = dataclasses.replace(self.own, beat=self.own.beat + 1, **changes)
        try:
            text = json.dumps(dataclasses.asdict(self.own))
            atomic.write_text(self._record_path(self.own.name), text)
        except OSError as error:
            self._heard_since = now  # the others may be unable to write, too
            if error.errno not in _FULL:
                return
        with contextlib.suppress(OSError):
            self._read_all()
            self._last_success = now

    def unanswered_s(self) -> float:
        """Computes the seconds since the folder last answered."""
        return self.clock() - self._last_success

    def is_cut_off(self) -> bool:
        """Tests whether the others must count this agent as lost."""
        return self.unanswered_s() > self.lost_s

    # --- the others -------------------------------------------------------------------

    def alive(self) -> list[Record]:
        """Lists the live agents of the same terms, by name. This one is among them.

        An agent counts from its second heartbeat: the record of a dead one stays.
        """
        return [record for record in self._live() if record.terms == self.own.terms]

    def strangers(self) -> list[Record]:
        """Lists the live agents of other terms, by name."""
        return [record for record in self._live() if record.terms != self.own.terms]

    def _live(self) -> list[Record]:
        now = self.clock()
        found = []
        for name, record in sorted(self.records.items()):
            changed, seen = self._changed[name]
            is_own = record.token == self.own.token
            is_fresh = is_own or (seen and now - changed <= self.lost_s)
            if is_fresh and not record.left:
                found.append(record)
        return found

    def is_running_own_terms(self) -> bool:
        """Tests whether a member of the generation has this agent's terms, and lives.

        A member counts until it is known to be lost.
        """
        return any(
            name in self.records
            and self.records[name].terms == self.own.terms
            and not self.is_lost((name, token))
            for name, token in self.generation.members
        )

    def leads(self) -> bool:
        """Tests whether this agent decides: it has the first name of the live ones."""
        alive = self.alive()
        return bool(alive) and alive[0].id == self.own.id

    def is_lost(self, member: tuple[str, str]) -> bool:
        """Tests whether a member has ended, restarted or fallen silent."""
        name, token = member
        record = self.records.get(name)
        if record is not None and (record.token != token or record.left):
            return True
        changed, _ = self._changed.get(name, (self._heard_since, False))
        silent_s = self.clock() - max(changed, self._heard_since)
        return token != self.own.token and silent_s > self.lost_s

    def report(self, member: tuple[str, str]) -> dict[int, int] | None:
        """Finds the exit codes of a member's processes; None if they have not ended."""
        record = self.records.get(member[0])
        if record is None or record.token != member[1]:
            return None
        if record.generation != self.generation.number:
            return None
        return {int(number): code for number, code in record.codes.items()}

    def has_not_reached(self, member: tuple[str, str]) -> bool:
        """Tests whether a member has not reached process 0 of this generation."""
        record = self.records.get(member[0])
        if record is None or record.id != member:
            return False
        return record.unreached == self.generation.number > 0

    def is_listening(self) -> bool:
        """Tests whether process 0 of this generation is known to listen."""
        first = self.records.get(self.generation.members[0][0])
        return first is not None and first.listens == self.generation.number

    # --- decisions --------------------------------------------------------------------

    def next_number(self) -> int:
        """Finds the number of the next generation.

        It follows that of a file that stays unsound, e.g. empty after a power failure.
        Such a file can be neither read nor created again.
        """
        number, since = self._unsound
        is_lasting = self.clock() - since > self.lost_s
        newest = max(self.generation.number, number if is_lasting else 0)
        return newest + 1

    def publish(self, generation: Generation) -> None:
        """Begins a generation, unless another agent has begun one.

        Raises:
          OSError: the file cannot be written.
        """
        path = self._generation_path(generation.number)
        self._create(path, dataclasses.asdict(generation))
        for number in range(
            generation.number - 2 * _KEPT, generation.number - _KEPT + 1
        ):
            for old in (self._generation_path(number), self._order_path(number)):
                with contextlib.suppress(OSError):
                    old.unlink()
        self._read_all()

    def publish_order(self, order: Order) -> None:
        """Ends the current generation, unless another agent has ended it.

        Raises:
          OSError: the file cannot be written.
        """
        path = self._order_path(self.generation.number)
        self._create(path, dataclasses.asdict(order))
        self._read_all()

    def _create(self, path: Path, document: Mapping[str, Any]) -> None:
        """Creates a whole file, if it is absent."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with partial.open("w") as file:
                file.write(json.dumps(document))
                file.flush()
                os.fsync(file.fileno())  # a power failure leaves no empty file
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def check_links(self) -> None:
        """Checks that the folder can have hard links, by which agents decide once.

        Raises:
          OSError: it cannot.
        """
        path = self.folder / f".{self.own.name}.{secrets.token_hex(8)}.partial"
        other = path.with_suffix(".link")
        try:
            path.touch()
            os.link(path, other)
        finally:
            for file in (path, other):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    # --- files ------------------------------------------------------------------------

    def _record_path(self, name: str) -> Path:
        return self.folder / f"agent-{name}.json"

    def _generation_path(self, number: int) -> Path:
        return self.folder / f"generation-{number:06d}.json"

    def _order_path(self, number: int) -> Path:
        return self.folder / f"order-{number:06d}.json"

    def _read_all(self) -> None:
        """Reads what is new.

        Raises:
          OSError: the folder cannot be read.
        """
        names = os.listdir(self.folder)
        for record in self._records(names):
            old = self.records.get(record.name)
            if old is None:
                self._changed[record.name] = (self.clock(), False)
            elif old != record:
                self._changed[record.name] = (self.clock(), True)
            self.records[record.name] = record
        self._read_generation(names)
        if self.order is None:
            self.order = _read(self._order_path(self.generation.number), _parse_order)

    def _read_generation(self, names: list[str]) -> None:
        """Reads the newest generation that is sound, if it is new."""
        matches = [re.fullmatch(r"generation-(\d{6,9})\.json", name) for name in names]
        numbers = [int(match[1]) for match in matches if match]
        for number in sorted(numbers, reverse=True):
            if number <= self.generation.number:
                break
            found = _read(self._generation_path(number), _parse_generation)
            if found is not None and found.number == number:
                self.generation = found
                self.order = None
                break
        highest = max(numbers, default=0)
        if highest <= self.generation.number:
            highest = 0
        if highest != self._unsound[0]:
            self._unsound = (highest, self.clock())

    def _records(self, names: list[str]) -> Iterator[Record]:
        for name in names:
            match = re.fullmatch(r"agent-(.+)\.json", name)
            record = _read(self.folder / name, _parse_record) if match else None
            if match and record and record.name == match[1]:
                yield record


# --- rows of files --------------------------------------------------------------------


def _read(path: Path, parse: Callable[[dict[str, Any]], Row]) -> Row | None:
    """Reads a row from its file; None if it is absent, or is no such row."""
    with contextlib.suppress(OSError, untrusted.Malformed, KeyError):
        return parse(untrusted.read_json(path, dict, max_bytes=_MAX_BYTES))
    return None


def _parse_record(row: dict[str, Any]) -> Record:
    codes = untrusted.of_kind(row["codes"], dict)
    return Record(
        name=untrusted.of_kind(row["name"], str),
        token=untrusted.of_kind(row["token"], str),
        terms=untrusted.of_kind(row["terms"], str),
        address=untrusted.of_kind(row["address"], str),
        port=_count(row["port"]),
        beat=_count(row["beat"]),
        leaving=untrusted.of_kind(row["leaving"], bool),
        left=untrusted.of_kind(row["left"], bool),
        listens=_count(row["listens"]),
        unreached=_count(row["unreached"]),
        generation=_count(row["generation"]),
        codes={
            number: untrusted.of_kind(code, int)
            for number, code in codes.items()
            if re.fullmatch("[0-9]{1,7}", number)
        },
    )


def _parse_generation(row: dict[str, Any]) -> Generation:
    members = []
    for member in untrusted.of_kind(row["members"], list):
        name, token = _texts(member, number=2)
        members.append((name, token))
    return Generation(
        number=_count(row["number"]),
        members=tuple(members),
        address=untrusted.of_kind(row["address"], str),
        port=_count(row["port"]),
        final=None if row["final"] is None else _count(row["final"]),
        why=untrusted.of_kind(row["why"], str),
        step=_count(row["step"]),
        starts=_count(row["starts"]),
        failures=_texts(row["failures"]),
        suspect=untrusted.of_kind(row["suspect"], str),
        excluded=_texts(row["excluded"]),
        refused=tuple(map(_count, untrusted.of_kind(row["refused"], list))),
        grown=_texts(row["grown"]),
        silent=_count(row["silent"]),
    )


def _parse_order(row: dict[str, Any]) -> Order:
    return Order(
        how=untrusted.of_kind(row["how"], str),
        why=untrusted.of_kind(row["why"], str),
        grow_to=_count(row["grow_to"]),
    )


def _count(value: object) -> int:
    if not untrusted.is_count(value):
        raise untrusted.Malformed(f"{value!r:.40} is no count")
    assert isinstance(value, int)
    return value


def _texts(value: object, *, number: int | None = None) -> tuple[str, ...]:
    texts = untrusted.of_kind(value, list)
    if number is not None and len(texts) != number:
        raise untrusted.Malformed(f"{len(texts)} texts; required: {number}")
    return tuple(untrusted.of_kind(text, str) for text in texts)
