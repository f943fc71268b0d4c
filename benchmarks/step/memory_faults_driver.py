"""The faults of `memory_faults.py`, and the checks of each recovery."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from memory_faults_plan import EXTRA, FOLDER, HOSTS, MIX, NONE, OWN, PEER, Fault
from memory_faults_run import Campaign, Files, Late, read_states, rows_of

from jaxdist.checkpoint import memory_file
from jaxdist.checkpoint.folders import list_steps
from jaxdist.checkpoint.memory_file import Header
from jaxdist.checkpoint.peer_link import TOKEN_BYTES, Kind, PeerError, PutRequest
from jaxdist.checkpoint.peers import PeerClient

TMPFS = "size=4m"  # of each host; a file of this run has some 20 kB
PACE_S = 0.02  # pause of a step, so that there is time to save every second one


@dataclass
class Found:
    """What a fault and its recovery were."""

    number: int
    kind: str
    planned: str
    host: int
    newest: int = 0  # newest step that was complete in memory
    expected_step: int = 0
    step: int = 0  # that was restored
    source: str = ""
    seconds: float = 0.0  # from the fault to the first step after it
    restore_s: float = 0.0  # from the release of the agent to the restored state
    starts: int = 0
    complete: list[int] = field(default_factory=list)  # steps before the damage
    damaged: list[list[Any]] = field(default_factory=list)  # [host, step, owner]
    reported: list[list[Any]] = field(default_factory=list)  # [step, owner, reason]
    steps_compared: int = 0  # states of steps on processes that were compared
    note: str = ""
    problems: list[str] = field(default_factory=list)
    ok: bool = False
    cycle_s: float = 0.0


class Driver:
    """Carries out a plan."""

    def __init__(self, folder: Path, record: str) -> None:
        self.run = Campaign(folder, "campaign")
        self.other = Campaign(folder, "other", processes=1)
        # for each process, the hash of each step that it has seen
        self.truth = read_states(self.run.folder)
        self.damaged: set[Path] = set()
        self.resumed_at = 0  # step at which the run has resumed last
        self.saved_at = 0  # newest step in the folder that was asked for
        self.checked = 0  # events that were looked at
        self.stash: dict[int, list[tuple[str, bytes]]] = {}  # files of an old history
        self.stash_branch = ""
        self.record = folder / record
        self.lost: set[int] = set()  # hosts that may lack their part

    # --- one fault --------------------------------------------------------------------

    def do(self, fault: Fault) -> Found:
        """Brings a fault, and checks the recovery."""
        found = Found(fault.number, fault.kind, fault.source, fault.host)
        began = time.monotonic()
        try:
            self.ready(fault)
            self.damaged = set()
            self.lost = {fault.host}
            self.run.events.update()
            self.checked = len(self.run.events.rows)
            getattr(self, FAULTS[fault.kind])(fault, found)
            self.check(fault, found)
        except Late as late:
            found.problems.append(str(late))
        except Exception as error:
            found.problems.append(f"{type(error).__name__}: {error}")
        found.ok = not found.problems
        found.cycle_s = round(time.monotonic() - began, 2)
        return found

    def ready(self, fault: Fault) -> None:
        """Waits until two steps are complete in memory, with their copies."""
        if fault.folder_save:
            self.run.events.update()
            since = len(self.run.events.rows)
            self.run.order("folder", 0)
            (saved, *_) = self.run.wait(
                lambda: self.run.event("save", since), "a save to the folder"
            )
            self.saved_at = saved["step"]
        first = max(self.resumed_at, self.saved_at)

        def is_ready() -> bool:
            with contextlib.suppress(OSError, ValueError, KeyError):
                steps = self.run.scan().complete(copies=2)
                return len([step for step in steps if step > first]) >= 2
            return False

        self.run.wait(is_ready, "two steps with their copies in memory")
        time.sleep(fault.delay_s)

    def strike(self, ranks: list[int]) -> None:
        """Kills workers -9 and waits until all have ended. The agent then waits."""
        self.run.hold()
        self.began = time.monotonic()
        pids = self.run.pids()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
        self.ended()

    def ended(self) -> None:
        """Waits until no worker runs."""
        self.run.wait(lambda: not self.run.alive(), "all workers ended", 60)

    def predict(self, found: Found) -> None:
        """Computes the step that the next start must restore."""
        complete = self.run.scan(self.damaged).complete()
        folder = max(list_steps(self.run.workdir / "checkpoints"), default=-1)
        newest = max(complete, default=-1)
        found.newest = max(found.newest, newest)
        found.expected_step = newest if newest >= folder else folder
        found.note += f"memory {complete}, folder {folder}. "

    def resume(self, fault: Fault, found: Found, starts: int = 1) -> None:
        """Releases the agent and reads what the next start restores."""
        run = self.run
        generation = run.generation + starts
        run.release()
        released = time.time()

        def restored() -> list[dict[str, Any]]:
            rows = []
            for lines in run.states:
                lines.update()
                rows += [
                    row
                    for row in lines.rows
                    if row["kind"] == "restored" and row["generation"] >= generation
                ][-1:]
            newest = {row["generation"] for row in rows}
            return rows if len(rows) == HOSTS and len(newest) == 1 else []

        rows = run.wait(restored, "a restored state")
        found.restore_s = round(max(row["time"] for row in rows) - released, 3)
        found.starts = rows[0]["generation"] - generation + starts
        if found.starts != starts:
            found.problems.append(f"{found.starts} starts, not {starts}")
        steps = {row["step"] for row in rows}
        sources = {row["source"] for row in rows}
        if len(steps) != 1 or len(sources) != 1:
            found.problems.append(f"processes differ: {steps}, {sources}")
        found.step = rows[0]["step"]
        found.source = FOLDER
        if sources == {"memory"}:
            fetched = [row["fetched"] for row in rows]
            own = [
                rank
                for rank, files in enumerate(fetched)
                if [found.step, rank] in files
            ]
            found.source = PEER if own else OWN
            if own and set(own) != self.lost:
                found.problems.append(f"hosts {own} lacked their part, not {self.lost}")
        for rank, row in enumerate(rows):
            self.compare(found, rank, row)

        # the newest start may have written a line of a step before
        def has_stepped() -> bool:
            for lines in run.states:
                lines.update()
            return any(
                row["kind"] == "step" and row["generation"] == rows[0]["generation"]
                for row in run.states[0].rows[-50:]
            )

        run.wait(has_stepped, "a step")
        found.seconds = round(time.monotonic() - self.began, 3)
        self.resumed_at = found.step

    def compare(self, found: Found, rank: int, row: dict[str, Any]) -> None:
        """Compares the hash of a state with the first one of that step.

        `summary` compares all of them with the quiet run.
        """
        true = self.truth[rank].setdefault(row["step"], row["sha"])
        found.steps_compared += 1
        if true != row["sha"]:
            found.problems.append(
                f"{row['kind']} {row['step']} on process {rank} has other bits"
            )

    def check(self, fault: Fault, found: Found) -> None:
        """Checks step, source, states and events."""
        if found.source != fault.source:
            found.problems.append(f"source {found.source}, planned {fault.source}")
        if fault.source != NONE and found.step != found.expected_step:
            found.problems.append(
                f"step {found.step} restored, {found.expected_step} expected"
            )
        for rank, lines in enumerate(self.run.states):
            lines.update()
            for row in lines.rows:
                if row["kind"] == "step":
                    self.compare(found, rank, row)
            lines.rows.clear()
        del found.problems[20:]
        damaged = {(host, step, owner) for host, step, owner in found.damaged}
        for event in self.run.event("bad_memory_copy", self.checked):
            found.reported.append([event["step"], event["owner"], event["reason"][:80]])
            if (event["step"], event["owner"]) not in {d[1:] for d in damaged}:
                found.problems.append(f"told of damage that nobody did: {event}"[:200])
        told = {(step, owner) for step, owner, _ in found.reported}
        for host, step, owner in damaged:
            # of others, nobody reads more than the header
            is_read = step in found.complete and step >= found.step
            if is_read and (step, owner) not in told:
                found.problems.append(f"no event of {host}, {step}, {owner}")

    # --- kinds ------------------------------------------------------------------------

    def kill_one(self, fault: Fault, found: Found) -> None:
        self.strike([fault.host])
        self.predict(found)
        self.resume(fault, found)

    def kill_all(self, fault: Fault, found: Found) -> None:
        if fault.variant % 2:
            self.run.hold()
            self.began = time.monotonic()
            self.run.kill_agent()
            found.note += "with the agent. "
            self.predict(found)
            self.launch()
        else:
            self.strike(list(range(HOSTS)))
            self.predict(found)
        self.resume(fault, found)

    def stop(self, fault: Fault, found: Found) -> None:
        self.run.hold()
        self.began = time.monotonic()
        os.kill(self.run.pids()[fault.host], signal.SIGSTOP)
        self.ended()
        self.predict(found)
        self.resume(fault, found)
        codes = self.run.event("peer_lost", self.checked)
        found.note += f"{codes[-1]['why'] if codes else 'no event'}. "

    def delete(self, fault: Fault, found: Found) -> None:
        self.strike([fault.host])
        shutil.rmtree(Path(self.run.peer(fault.host)["folder"]))
        self.predict(found)
        self.resume(fault, found)

    def delete_two(self, fault: Fault, found: Found) -> None:
        apart = 1 if fault.source == FOLDER else 2  # a host's copies are on the next
        self.lost = {fault.host, (fault.host + apart) % HOSTS}
        self.strike([fault.host])
        for host in self.lost:
            shutil.rmtree(Path(self.run.peer(host)["folder"]))
        self.predict(found)
        self.resume(fault, found)

    def delete_live(self, fault: Fault, found: Found) -> None:
        newest = max(self.run.scan().steps())
        shutil.rmtree(Path(self.run.peer(fault.host)["folder"]))
        self.run.wait(
            lambda: len([n for n in self.run.scan().complete(2) if n > newest]) > 1,
            "two steps with copies after the folder was deleted",
            60,
        )
        self.kill_one(fault, found)

    def flip(self, fault: Fault, found: Found, which: Callable[[Files], Any]) -> None:
        self.strike([fault.host])
        files = self.run.scan()
        found.complete = files.complete()
        found.newest = max(found.complete, default=0)
        for number, (host, step, path) in enumerate(which(files)):
            data = bytearray(path.read_bytes())
            bit = int((fault.where + 0.381966 * number) % 1 * 8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            self.damaged.add(path)
            found.damaged.append([host, step, fault.host])
        self.predict(found)
        self.resume(fault, found)

    def flip_own(self, fault: Fault, found: Found) -> None:
        host = fault.host
        self.flip(
            fault,
            found,
            lambda files: [
                (host, step, path)
                for step in files.steps()
                for place, path in files.of(step, host).items()
                if place == host
            ],
        )

    def flip_peer(self, fault: Fault, found: Found) -> None:
        host = fault.host
        self.flip(
            fault,
            found,
            lambda files: [
                (place, step, path)
                for step in files.steps()
                for place, path in files.of(step, host).items()
                if place != host
            ],
        )

    def flip_newest(self, fault: Fault, found: Found) -> None:
        self.flip(
            fault,
            found,
            lambda files: [
                (place, step, path)
                for step in files.steps()
                if step >= files.complete()[-1]
                for place, path in files.of(step, fault.host).items()
            ],
        )

    def flip_all(self, fault: Fault, found: Found) -> None:
        self.flip(
            fault,
            found,
            lambda files: [
                (place, step, path)
                for step in files.steps()
                for place, path in files.of(step, fault.host).items()
            ],
        )

    def amid(self, point: str, fault: Fault, found: Found, **order: Any) -> None:
        """Lets a worker die amid an operation of a running run."""
        mark = self.run.folder / "marks" / point
        mark.unlink(missing_ok=True)
        self.run.hold()
        self.began = time.monotonic()
        self.run.order(point, fault.host, **order)
        self.run.wait(mark.exists, f"a kill amid {point}", 60)
        self.began = time.monotonic()
        self.ended()
        self.predict(found)
        self.resume(fault, found)
        found.note += f"amid {point}. "

    def kill_in_save(self, fault: Fault, found: Found) -> None:
        self.amid("save", fault, found, fraction=fault.where)

    def kill_in_copy(self, fault: Fault, found: Found) -> None:
        point = ("send", "receive")[fault.variant % 2]
        self.amid(point, fault, found, fraction=fault.where)

    def kill_in_restore(self, fault: Fault, found: Found) -> None:
        point = ("look", "confirm", "read", "fetch", "read", "read")[fault.variant % 6]
        mark = self.run.folder / "marks" / point
        mark.unlink(missing_ok=True)
        self.strike([(fault.host + fault.variant) % HOSTS])
        self.predict(found)
        after = int(fault.where * 20) if point == "read" else 0
        self.run.order(point, fault.host, after=after)
        self.run.release()
        self.run.wait(mark.exists, f"a kill amid {point}")
        self.ended()
        self.resume(fault, found)
        found.note += f"amid {point}. "

    def junk_stranger(self, fault: Fault, found: Found) -> None:
        self.began = time.monotonic()
        generation = self.run.generation
        deal = random.Random(fault.number)
        opened = []
        outcomes: Counter[str] = Counter()
        for rank in range(HOSTS):
            address = self.run.peer(rank)["address"]
            host, port = address.rsplit(":", 1)
            for data in (
                deal.randbytes(1 << 16),
                b"jaxdist peers 1\n" + deal.randbytes(32) + b"\xff" * 4096,
                b"\x02\xff\xff\xff\xff" * 64,
                b"GET / HTTP/1.1\r\n\r\n",
                b"",
            ):
                peer = socket.create_connection((host, int(port)), timeout=5)
                opened.append(peer)
                with contextlib.suppress(OSError):
                    peer.sendall(data)
            wrong = PeerClient(deal.randbytes(TOKEN_BYTES))
            try:
                wrong.inventory(address)
                found.problems.append("a wrong token was taken")
            except PeerError as error:
                outcomes[error.reason] += 1
        found.note += f"wrong token: {dict(outcomes)}. "
        steps = self.run.scan().complete(copies=2)
        newest = max(steps)
        self.run.wait(
            lambda: max(self.run.scan().complete(copies=2), default=0) >= newest + 4,
            "two more steps with copies",
        )
        for peer in opened:
            peer.close()
        found.seconds = round(time.monotonic() - self.began, 3)
        found.newest = found.step = newest
        if self.run.generation == generation:
            found.source = NONE

    def junk_peer(self, fault: Fault, found: Found) -> None:
        self.junk(fault, found)
        self.kill_one(fault, found)

    def junk(self, fault: Fault, found: Found) -> None:
        """Sends junk with the run's own token."""
        deal = random.Random(fault.number)
        own = self.run.peer(fault.host)
        client = PeerClient(bytes.fromhex(own["token"]))
        outcomes: Counter[str] = Counter()
        files = self.run.scan()
        step = max(files.complete())
        path = next(iter(files.of(step, fault.host).values()))
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[int(fault.where * len(good))] ^= 4
        target = self.run.peer((fault.host + 2) % HOSTS)["address"]

        def put(number: int, owner: int, data: bytes, size: int | None = None) -> None:
            try:
                with client.connection(target) as connection:
                    connection._request(PutRequest(number, owner, size or len(data)))
                    connection._link.receive({Kind.READY})
                    connection._link.send_data(io.BytesIO(data), len(data))
                    connection._link.receive({Kind.DONE})
                found.problems.append(f"junk was stored: {number}, {owner}")
            except PeerError as error:
                outcomes[error.reason] += 1

        put(step + 2, fault.host, deal.randbytes(20_000))
        put(step + 2, fault.host, bytes(flipped))
        put(step + 1000, fault.host, good)
        put(step, (fault.host + 1) % HOSTS, good)
        put(step, fault.host, bytes(flipped))
        put(step, fault.host, good, size=1 << 40)
        put(step, fault.host, _header_of_other_run(good))
        for kind, payload in ((Kind.DATA, b"x" * 100), (Kind.READ, b"\xff" * 28)):
            with (
                contextlib.suppress(PeerError),
                client.connection(target) as connection,
            ):
                connection._link._send(bytes([kind]) + b"\xff\xff\xff\xff" + payload)
                connection._link.receive({Kind.DONE})
        found.note += f"refused: {dict(outcomes)}. "

    def full(self, fault: Fault, found: Found) -> None:
        folder = self.run.memory / str(fault.host)
        since = len(self.run.events.rows)
        filler = folder / "filler"

        def fill() -> None:
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                for size in (65536, 4096):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(b"x" * size)

        def has_failed() -> bool:
            fill()  # what the run deletes makes room again
            failed = [e for e in self.run.event("memory_save", since) if not e["ok"]]
            return any("skipped" not in event["error"] for event in failed)

        try:
            fill()
            self.run.wait(has_failed, "a failed save in memory", 60)
            failed = [e for e in self.run.event("memory_save", since) if not e["ok"]]
            found.note += f"{failed[-1]['error'][:90]}. "
            step = failed[-1]["step"]
            self.run.wait(
                lambda: self.run.event("memory_save", since)[-1]["step"] >= step + 4,
                "training goes on",
                60,
            )
            self.strike([fault.host])
        finally:
            filler.unlink(missing_ok=True)
        self.predict(found)
        self.resume(fault, found)

    def two_runs(self, fault: Fault, found: Found) -> None:
        other = self.other
        shared = self.run.memory / str(fault.host)
        other.events.update()
        since = len(other.events.rows)
        other.start(memory=str(shared), FAULTS_PACE_S=str(PACE_S))
        try:
            other.wait(
                lambda: (
                    len([e for e in other.event("memory_save", since) if e["ok"]]) > 2
                ),
                "the other run saves",
            )
            os.kill(other.pids()[0], signal.SIGKILL)
            self.strike([fault.host])
            self.predict(found)
            places = [path.name for path in shared.glob("jaxdist-*")]
            self.resume(fault, found)
            other.wait(
                lambda: (
                    other.event("memory_restore", since)
                    and len(other.event("start", since)) > 1
                ),
                "the other run resumes from memory",
            )
            back = other.event("memory_restore", since)[-1]["step"]
            other.wait(
                lambda: any(
                    event["step"] > back and event["ok"]
                    for event in other.event("memory_save", since)[-2:]
                ),
                "the other run goes on",
            )
        finally:
            other.kill_agent()
        found.note += f"{len(places)} folders; the other run resumed at {back}. "
        if other.event("bad_memory_copy", since):
            found.problems.append("the other run told of damage")
        losses = defaultdict(set)
        for line in (other.workdir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                losses[row["step"]].add(row.get("loss"))
        if any(len(values) > 1 for values in losses.values()):
            found.problems.append("the other run has two losses of a step")

    def terminate(self, fault: Fault, found: Found) -> None:
        self.keep_stash()
        self.run.hold()
        self.began = time.monotonic()
        to_agent = fault.variant % 2
        assert self.run.agent is not None
        pid = self.run.agent.pid if to_agent else self.run.pids()[fault.host]
        os.kill(pid, signal.SIGTERM)
        self.ended()
        found.note += "to the agent. " if to_agent else "to a process. "
        self.predict(found)
        self.resume(fault, found)

    def keep_stash(self) -> None:
        """Keeps the files of the present history, which ends next."""
        self.stash_branch = self.run.branch
        for host in range(HOSTS):
            folder = Path(self.run.peer(host)["folder"])
            self.stash[host] = [
                (path.name, path.read_bytes()) for path in folder.glob("*.shards")
            ]

    def stale(self, fault: Fault, found: Found) -> None:
        """Brings files of a history that the run has left: newer, whole, by all ways."""
        own = self.run.peer(fault.host)
        files = self.run.scan()
        step = max(files.complete())
        branch = self.stash_branch or "0123456789abcdef"
        forged = {}
        for owner in range(HOSTS):
            path = next(iter(files.of(step, owner).values()))
            forged[owner] = _stale(path.read_bytes(), branch, step + 100)
        # a process that still runs offers its file to others
        client = PeerClient(bytes.fromhex(own["token"]))
        outcomes: Counter[str] = Counter()
        for rank in range(HOSTS):
            try:
                with client.connection(self.run.peer(rank)["address"]) as connection:
                    data = forged[fault.host]
                    connection.put(step + 100, fault.host, io.BytesIO(data), len(data))
                found.problems.append("a stale copy was stored")
            except PeerError as error:
                outcomes[error.reason] += 1
        found.note += f"offers: {dict(outcomes)}. "
        self.strike([fault.host])
        # and its files are on all hosts when the run starts
        for host in range(HOSTS):
            folder = Path(self.run.peer(host)["folder"])
            for name, data in self.stash.get(host, []):
                if not (folder / name).exists():
                    (folder / name).write_bytes(data)
            (folder / f"{step + 100}-{host}.shards").write_bytes(forged[host])
        found.note += f"stash of {sum(map(len, self.stash.values()))} files. "
        self.predict(found)
        self.resume(fault, found)

    # --- the campaign -----------------------------------------------------------------

    def launch(self) -> None:
        """Starts the agent of the run."""
        memory = f"{self.run.memory}/$JAXDIST_PROCESS_ID"
        self.run.start(memory=memory, FAULTS_PACE_S=str(PACE_S))

    def go(self, plan: list[Fault], budget_s: float, *, again: bool) -> None:
        """Carries out what is left of the plan."""
        began = time.monotonic()
        done = {row["number"]: row["ok"] for row in rows_of(self.record)}
        if again:
            done = {number: ok for number, ok in done.items() if ok}
        left = [fault for fault in plan if fault.number not in done]
        print(f"{len(done)} faults done, {len(left)} left", flush=True)
        failures = 0
        with mounts(self.run.memory):
            self.run.release()
            for path in (self.run.folder / "orders").glob("*"):
                path.unlink()
            for lines in self.run.states:
                lines.update()
                lines.rows.clear()
            self.launch()
            try:
                self.first()
                for fault in left:
                    if time.monotonic() - began > budget_s:
                        print("out of time", flush=True)
                        break
                    found = self.do(fault)
                    with self.record.open("a") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
                    print(_line(found), flush=True)
                    if found.ok:
                        failures = 0
                        continue
                    failures += 1
                    if failures == 3:
                        print("three failures in a row", flush=True)
                        break
                    self.restart()
            finally:
                self.run.kill_agent()

    def first(self) -> None:
        """Waits until the run has begun to step."""
        run = self.run

        def has_stepped() -> bool:
            run.states[0].update()
            rows = [row for row in run.states[0].rows if row["kind"] == "step"]
            if rows:
                self.resumed_at = rows[0]["step"] - 1
            return bool(rows)

        run.wait(has_stepped, "a first step")
        self.saved_at = max(list_steps(run.workdir / "checkpoints"), default=0)

    def restart(self) -> None:
        """Starts the agent again after a fault that was not recovered."""
        self.run.release()
        for path in (self.run.folder / "orders").glob("*"):
            path.unlink()
        self.run.kill_agent()
        for lines in self.run.states:
            lines.update()
            lines.rows.clear()
        self.launch()
        self.first()


FAULTS = dict(
    zip(
        [*MIX, *EXTRA],
        (
            "kill_one",
            "kill_all",
            "stop",
            "delete",
            "flip_own",
            "flip_peer",
            "flip_newest",
            "flip_all",
            "kill_in_save",
            "kill_in_copy",
            "kill_in_restore",
            "junk_stranger",
            "junk_peer",
            "full",
            "two_runs",
            "terminate",
            "stale",
            "delete_two",
            "delete_two",
            "delete_live",
        ),
        strict=True,
    )
)


def _rewritten(data: bytes, **changes: Any) -> bytes:
    """Writes a file again with another header and other numbers; it is sound in itself."""
    source = io.BytesIO(data)
    opened = memory_file.read_header(source)
    contents = []
    for piece, offset in opened.pieces():
        info = opened.header.arrays[piece.name]
        count = opened.header.piece_bytes(piece)
        raw = np.frombuffer(data[offset : offset + count], np.dtype(info.dtype))
        contents.append(raw[::-1].reshape(piece.box.shape))
    header: Header = replace(opened.header, **changes)
    target = io.BytesIO()
    memory_file.write(target, header, contents)
    return target.getvalue()


def _header_of_other_run(data: bytes) -> bytes:
    return _rewritten(data, run="another run")


def _stale(data: bytes, branch: str, step: int) -> bytes:
    return _rewritten(data, branch=branch, step=step)


@contextlib.contextmanager
def mounts(memory: Path) -> Iterator[None]:
    """Gives each host a small file system in memory."""
    for host in range(HOSTS):
        folder = memory / str(host)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(folder):
            mount = ["mount", "-t", "tmpfs", "-o", TMPFS, "tmpfs", str(folder)]
            subprocess.run(mount, check=True)
    try:
        yield
    finally:
        for host in range(HOSTS):
            subprocess.run(["umount", "-l", str(memory / str(host))], check=False)


def _line(found: Found) -> str:
    return (
        f"{time.strftime('%H:%M:%S')} {found.number:3} {'ok  ' if found.ok else 'FAIL'} "
        f"{found.cycle_s:5.1f} s  {found.kind}, host {found.host}: {found.source} "
        f"{found.step} (newest {found.newest}) in {found.seconds:.1f} s; {found.note}"
        f"{'; '.join(found.problems)}"
    )
