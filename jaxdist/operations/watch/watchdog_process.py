"""The process beside each process of a run. It sees when the process hangs, reports
where, and ends it.

It shares no interpreter lock with the process it watches, and needs neither jax nor
site-packages. Among several processes, only one that is behind the others can hang:
those ahead wait for it in a collective, and its own limit counts. The watchers know of
each other through small files, `WORKDIR/.beats/PROCESS`.
"""

import contextlib
import functools
import json
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.telemetry.metrics import MetricsWriter

DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 1  # no library uses it
# kills a process that can no longer set its exit code; launch reports 76
HANG_SIGNAL = DUMP_SIGNAL - 1
# as they come in a step
PHASES = (
    "start",
    "restore",
    "compile",
    "data",
    "step",
    "evaluate",
    "vote",
    "save",
    "end",
)
ENDING_AT = 0  # offsets in the memory shared with the process
BEAT_AT = 8
BEAT = struct.Struct("=qqqqdd")  # a Beat

_POLL_S = 0.25
_PUBLISH_S = 1.0  # between writes of a beat file, at least; more with many processes
_GRACE_S = 3.0  # for the watcher of a process that is behind to speak for it
# In the stack of a process that waits for others outside a step: a collective, joining,
# their devices.
_WAITS = (
    "multihost",
    "/distributed.py",
    "xla_bridge.py",
    "consistency.py",
    "coordination.py",
)
# of a process that waits for a step's result: its own devices, or the others
_RESULT = "jax/_src/array.py"
# for those that are level to speak, before the end of this one ends them
_LEVEL_S = 1.0
_DUMP_S = 1.5  # at most, for the stacks
_PART_S = 1.0  # at most, for work on the disk or a terminal
_LEAVE_S = 1.0  # at most, for the process to leave by itself
_ASLEEP_S = 2.0  # a look so late says that this watcher, or the machine, was suspended


class Beat(NamedTuple):
    """Where a process is, and how long it may stay there. Seconds are of the monotonic
    clock.
    """

    phase: int  # of PHASES
    at_step: int  # the step it works on; below 0: others may not have begun
    done: int  # updates known to be finished
    sample: int  # first global sample index of the step's batch
    since: float
    deadline: float

    @property
    def place(self) -> tuple[int, int]:
        """How far it is, to compare processes."""
        return self.at_step, self.phase


# of a process that has not come so far as to beat
_ABSENT = Beat(0, -2, 0, 0, 0.0, 0.0)


def _read(memory: int) -> Beat:
    return Beat(*BEAT.unpack(os.pread(memory, BEAT.size, BEAT_AT)))


@dataclass
class WatchdogProcess:
    """Watches one process until that ends or is ended."""

    pid: int  # of the process, which has this one as its child
    process: int  # its number in the run
    processes: int
    folder: str  # the workdir
    group: str  # the same for all processes that run together, and no others
    life: int  # a pipe that closes when the process ends
    memory: int  # a file: its beat
    dump: int  # a file: its stacks, after DUMP_SIGNAL
    # a pipe; a byte in it ends the process with 76, unless it holds the interpreter
    # lock
    leave: int

    _published_s = 0.0  # when its beat was last written for the others
    _published_row = b""
    _allowance_s = 0.0  # in which nobody could look
    _disk: threading.Thread | None = None  # the last work on the workdir

    @property
    def _beats(self) -> Path:
        return Path(self.folder) / ".beats"

    @property
    def _peers(self) -> set[int]:
        return set(range(self.processes)) - {self.process}

    def run(self) -> None:
        """Watches until the process has ended."""
        looked = time.monotonic()
        guilty: dict[int, Beat] = {}
        while not self._ended(_POLL_S):
            now = time.monotonic()
            if now - looked > _ASLEEP_S:
                self._allowance_s += now - looked
            looked = now
            beat = _read(self.memory)
            if beat.since > now - _POLL_S:
                self._allowance_s = 0.0
            self._publish(beat, now)
            if now < beat.deadline + self._allowance_s:
                continue
            before = guilty
            guilty = self._guilty(beat, now)
            # Seen twice, as what is read of others while they write it may be nothing.
            if guilty and guilty.keys() == before.keys() and _read(self.memory) == beat:
                self._end(beat, now, guilty)
                return
        self._tidy()

    def _ended(self, seconds: float) -> bool:
        readable, _, _ = select.select([self.life], [], [], seconds)
        return bool(readable) or os.getppid() != self.pid

    def _tidy(self) -> None:
        """Removes this process's file, and those of a start with more processes."""
        with contextlib.suppress(OSError):
            for path in self._beats.iterdir():
                if int(path.name) not in self._peers:
                    path.unlink()
            self._beats.rmdir()  # by the last

    # --- the others -------------------------------------------------------------------

    def _publish(self, beat: Beat, now: float) -> None:
        """Writes where this process is for the other watchers, once a second if it has
        moved.
        """
        if self.processes == 1:
            return
        if now - self._published_s < _PUBLISH_S + self.processes / 64:
            return
        deadline = time.time() + beat.deadline + self._allowance_s - now
        row = {
            **beat._asdict(),
            "deadline": round(deadline, 1),
            "group": self.group,
            "process": self.process,
        }
        data = json.dumps(row).ljust(400).encode()
        # Early on the config may be refused yet, which leaves no folder.
        early = beat.at_step < 0 and now < (beat.since + beat.deadline) / 2
        self._ask_disk(lambda: self._write_beat(data, make=not early))
        self._published_s = now

    def _write_beat(self, data: bytes, make: bool) -> None:
        """Args: make: whether to make the workdir, where there is none."""
        if data == self._published_row or not (make or self._beats.parent.is_dir()):
            return
        self._beats.mkdir(parents=True, exist_ok=True)
        # In place, and closed: what another node then opens is new even on NFS.
        file_number = os.open(
            self._beats / str(self.process), os.O_WRONLY | os.O_CREAT, 0o644
        )
        with open(file_number, "wb") as file:
            file.write(data)
        self._published_row = data

    def _others(self) -> dict[int, Beat]:
        """Reads the other processes' beats; a deadline is in seconds since 1970.

        None are known while the workdir's file system does not answer. Each process
        then has only its own limits.
        """
        beats: dict[int, Beat] = {}
        if not self._ask_disk(lambda: self._read_others(beats)):
            return {}
        return dict(beats)

    def _read_others(self, beats: dict[int, Beat]) -> None:
        for number in self._peers:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                row = json.loads((self._beats / str(number)).read_bytes())
                if row["group"] == self.group:
                    beats[number] = Beat(*(row[field] for field in Beat._fields))

    def _guilty(self, beat: Beat, now: float) -> dict[int, Beat]:
        """Finds who hangs, this process or those that it waits for; {} while there is
        still hope.
        """
        if self._is_stopped():
            # Others may be behind for its sake: the first process serves their votes.
            return {self.process: beat}
        others = self._others()
        wall = time.time()
        if any(o.place <= beat.place and wall < o.deadline for o in others.values()):
            return {}
        behind = {n: o for n, o in others.items() if o.place < beat.place}
        # none advances before all have begun; who is gone later has ended
        if PHASES[beat.phase] == "start":
            behind |= dict.fromkeys(self._peers - others.keys(), _ABSENT)
        if not behind:
            return {self.process: beat}
        late = max(o.deadline for o in behind.values()) + _GRACE_S
        if wall > late and now > beat.deadline + _GRACE_S:
            return behind
        return {}

    # --- the end ----------------------------------------------------------------------

    def _end(self, beat: Beat, now: float, guilty: dict[int, Beat]) -> None:
        os.pwrite(self.memory, b"\1", ENDING_AT)  # should it wake up: it is too late
        stopped = self._is_stopped()
        if stopped:
            os.kill(self.pid, signal.SIGCONT)  # so that it writes its stacks
        stacks = self._stacks()
        main = stacks.rpartition("\n\n")[2]  # thread: written last
        waits = self.processes > 1 and any(name in main for name in _WAITS)
        level = any(other.place == beat.place for other in self._others().values())
        patient = not stopped and (waits or (level and _RESULT in main))
        if patient:
            # The guilty process reports, and ends, first; _LEAVE_S later if it holds
            # the interpreter lock.
            time.sleep(3 * _LEVEL_S + _LEAVE_S)
        own = {
            "waited_s": round(now - beat.since, 1),
            "stopped_by_signal": stopped,
            "waits_for_others": waits,
            "stacks": stacks,
        }
        self._report(guilty, own)
        if level:
            time.sleep(_LEVEL_S)
        with contextlib.suppress(BrokenPipeError):  # it has ended since
            os.write(self.leave, b"\1")
        # the interpreter lock is held, or it leaves in vain
        for number in (HANG_SIGNAL, signal.SIGKILL):
            if self._ended(_LEAVE_S):
                return
            os.kill(self.pid, number)

    def _report(self, guilty: dict[int, Beat], own: dict[str, Any]) -> None:
        """Writes an event and a text for each process that hangs.

        Args:
          own: further fields of this one.
        """
        reports: list[tuple[int, dict[str, Any]]] = []
        for number, where in sorted(guilty.items()):
            fields: dict[str, Any] = {
                "phase": PHASES[where.phase],
                "at_step": max(where.at_step, 0),
                "sample": where.sample,
                "process": number,
                "reported_by": self.process,
            }
            if number == self.process:
                fields |= own
            reports.append((where.done, fields))
        self._ask_disk(lambda: self._write_events(reports))
        for done, fields in reports:
            text = _text(fields["process"], self.processes, fields, done)
            line = f"{text.rstrip()}\n".encode(errors="backslashreplace")
            _started(functools.partial(os.write, 2, line)).join(_PART_S)

    def _ask_disk(self, work: Callable[[], object]) -> bool:
        """Does work on the workdir, unless its file system is stuck; returns True if
        the work has ended.
        """
        if self._disk is not None and self._disk.is_alive():
            return False
        self._disk = _started(work)
        self._disk.join(_PART_S)
        return not self._disk.is_alive()

    def _write_events(self, reports: list[tuple[int, dict[str, Any]]]) -> None:
        with contextlib.closing(MetricsWriter(Path(self.folder))) as events:
            for done, fields in reports:
                events.event("hang", done, **fields)

    def _is_stopped(self) -> bool:
        """Checks whether a signal has stopped the process."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        state, *_ = status.rpartition(")")[2].split()
        return state == "T"

    def _stacks(self) -> str:
        """Dumps the stacks of all threads of the process."""
        os.kill(self.pid, DUMP_SIGNAL)
        size = 0
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            time.sleep(0.1)
            before = size
            size = os.fstat(self.dump).st_size
            if size and size == before:
                break
        return os.pread(self.dump, size, 0).decode(errors="replace")


def _text(process: int, processes: int, fields: dict[str, Any], done: int) -> str:
    waited = "not heard of any more"
    if "waited_s" in fields:
        waited = f"no progress for {fields['waited_s']:g} s"
    cause = ""
    if fields.get("stopped_by_signal"):
        cause += "; a signal had stopped it"
    if fields.get("waits_for_others"):
        cause += "; it waits for the others"
    return (
        f"hang: process {process} of {processes}, {waited} in phase {fields['phase']} of step "
        f"{fields['at_step']} (last finished step {done}, data from sample {fields['sample']}){cause}\n"
        f"{fields.get('stacks', '')}"
    )


def _started(work: Callable[[], object]) -> threading.Thread:
    """Starts work that a terminal or a file system may keep waiting."""

    def try_it() -> None:
        with contextlib.suppress(Exception):  # none ends this process
            work()

    worker = threading.Thread(target=try_it, daemon=True)
    worker.start()
    return worker


if __name__ == "__main__":
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        # such are for the process, whose end ends this one
        signal.signal(number, signal.SIG_IGN)
    WatchdogProcess(**json.loads(sys.argv[1])).run()
