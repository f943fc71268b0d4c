"""Watcher process of each process of a run: it detects, reports and ends a hang.

The watcher shares no interpreter lock with the process that it watches. It needs
neither jax nor site-packages. Among several processes, only one that is behind the
others can
hang: those ahead wait for it in a collective, and its own limit counts. Watchers
exchange beats in small files, `WORKDIR/.beats/PROCESS`.
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
from typing import Any, NamedTuple, get_args

from jaxdist.telemetry.clock import Phase
from jaxdist.telemetry.metrics import MetricsWriter

DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 1  # no library uses it
# kills a process that cannot set its exit code; launch reports 76
HANG_SIGNAL = DUMP_SIGNAL - 1
PHASES: tuple[str, ...] = get_args(Phase)
# offsets in the memory that the process shares with its watcher
ENDING_AT = 0  # one byte: 1 = the watcher is ending the process
BEAT_AT = 8
BEAT = struct.Struct("=qqqqdd")  # the fields of a Beat

_POLL_S = 0.25
# least seconds between two writes of a beat file; more with many processes
_PUBLISH_S = 1.0
_GRACE_S = 3.0  # seconds in which the watcher of a process behind reports it
# Names in the stack of a process that waits for others outside a step: in a collective,
# while it joins, or for their devices.
_WAITS = (
    "multihost",
    "/distributed.py",
    "xla_bridge.py",
    "consistency.py",
    "coordination.py",
)
# file in the stack of a process that waits for a step's result, from its own devices or
# from other processes
_RESULT = "jax/_src/array.py"
# seconds in which processes at the same place report, before one's end ends the others
_LEVEL_S = 1.0
_DUMP_S = 1.5  # most seconds that the dump of the stacks may take
_WORK_S = 1.0  # most seconds to wait for work on the disk or a terminal
_LEAVE_S = 1.0  # most seconds in which the process ends by itself
# seconds between two polls that show that the watcher, or the machine, was suspended
_ASLEEP_S = 2.0
# most seconds that a signal may stop one of several processes: its heartbeats stop, too,
# so jax ends the others within a minute, and one of those would count as lost
_STOPPED_S = 20.0


class Beat(NamedTuple):
    """Place of a process in the run, and the time that it may stay there.

    Times are seconds of the monotonic clock.
    """

    phase: int  # index in PHASES
    at_step: int  # its step; negative: other processes may not have begun
    done: int  # number of updates that are known to be finished
    sample: int  # first global sample index of the step's batch
    since: float
    deadline: float

    @property
    def place(self) -> tuple[int, int]:
        """A key that orders processes by their progress."""
        return self.at_step, self.phase


# stands for a process that has not sent a beat
_ABSENT = Beat(phase=0, at_step=-2, done=0, sample=0, since=0.0, deadline=0.0)


def _read(memory: int) -> Beat:
    return Beat(*BEAT.unpack(os.pread(memory, BEAT.size, BEAT_AT)))


@dataclass
class WatchdogProcess:
    """Watcher of one process, until that process ends or is ended."""

    pid: int  # pid of the process; it is the parent of the watcher
    process: int  # its index in the run
    processes: int  # number of processes of the run
    folder: str  # the workdir
    group: str  # name that only the processes of this start share
    life: int  # descriptor of a pipe that closes when the process ends
    memory: int  # descriptor of the file with its beat
    dump: int  # descriptor of the file that gets its stacks at DUMP_SIGNAL
    # descriptor of a pipe: a byte ends the process with 76, unless it holds the
    # interpreter lock
    leave: int

    _published_s = 0.0  # monotonic seconds of the last write for the other watchers
    _published_row = b""
    _allowance_s = 0.0  # seconds since the last beat in which the watcher was suspended
    _stopped_s = 0.0  # seconds for which a signal has stopped the process
    _disk: threading.Thread | None = None  # thread of the last work on the workdir

    @property
    def _beats(self) -> Path:
        return Path(self.folder) / ".beats"

    @property
    def _peers(self) -> set[int]:
        return set(range(self.processes)) - {self.process}

    def run(self) -> None:
        """Watches until the process has ended."""
        last_poll = time.monotonic()
        guilty: dict[int, Beat] = {}
        while not self._ended(_POLL_S):
            now = time.monotonic()
            passed_s = now - last_poll
            if passed_s > _ASLEEP_S:
                self._allowance_s += passed_s
            last_poll = now
            beat = _read(self.memory)
            self._count_stop(beat, passed_s)
            if beat.since > now - _POLL_S:
                self._allowance_s = 0.0
            self._publish(beat, now)
            is_late = now >= beat.deadline + self._allowance_s
            if not is_late and self._stopped_s < _STOPPED_S:
                continue
            previous = guilty
            guilty = self._guilty(beat, now)
            # A hang counts if two polls agree: a beat file that is read while its owner
            # writes it may be empty.
            is_confirmed = guilty and guilty.keys() == previous.keys()
            if is_confirmed and _read(self.memory) == beat:
                self._end(beat, now, guilty)
                return
        self._tidy()

    def _count_stop(self, beat: Beat, passed_s: float) -> None:
        """Counts the seconds of a stop that other processes would not survive.

        Args:
          beat: beat of the process.
          passed_s: seconds since the last poll.
        """
        has_joined = self.processes > 1 and beat.at_step >= 0
        if not has_joined or not self._is_stopped():
            self._stopped_s = 0.0
        elif passed_s <= _ASLEEP_S:
            self._stopped_s += passed_s

    def _ended(self, seconds: float) -> bool:
        """Waits until the process has ended, or for some seconds."""
        readable, _, _ = select.select([self.life], [], [], seconds)
        return bool(readable) or os.getppid() != self.pid

    def _tidy(self) -> None:
        """Removes this process's file, and those of a start with more processes."""
        with contextlib.suppress(OSError):
            for path in self._beats.iterdir():
                if int(path.name) not in self._peers:
                    path.unlink()
            self._beats.rmdir()  # succeeds for the last process

    # --- the other processes ----------------------------------------------------------

    def _publish(self, beat: Beat, now: float) -> None:
        """Writes the beat for the other watchers, once a second if it has changed."""
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
        # A config error may still end the run. Then no workdir should be left, so early
        # beats create none.
        is_early = beat.at_step < 0 and now < (beat.since + beat.deadline) / 2
        self._try_on_disk(lambda: self._write_beat(data, may_create=not is_early))
        self._published_s = now

    def _write_beat(self, data: bytes, may_create: bool) -> None:
        """Writes this process's beat file.

        Args:
          data: content of the file.
          may_create: creates the workdir if there is none.
        """
        if data == self._published_row:
            return
        if not may_create and not self._beats.parent.is_dir():
            return
        self._beats.mkdir(parents=True, exist_ok=True)
        # Written in place and closed: other nodes then read the new content on NFS.
        descriptor = os.open(
            self._beats / str(self.process), os.O_WRONLY | os.O_CREAT, 0o644
        )
        with open(descriptor, "wb") as file:
            file.write(data)
        self._published_row = data

    def _others(self) -> dict[int, Beat]:
        """Reads the other processes' beats, with deadlines in seconds since 1970.

        The result is empty while the workdir's file system does not answer. Each
        process then has only its own limits.
        """
        beats: dict[int, Beat] = {}
        if not self._try_on_disk(lambda: self._read_others(beats)):
            return {}
        return dict(beats)

    def _read_others(self, beats: dict[int, Beat]) -> None:
        for number in self._peers:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                row = json.loads((self._beats / str(number)).read_bytes())
                if row["group"] == self.group:
                    beats[number] = Beat(*(row[field] for field in Beat._fields))

    def _guilty(self, beat: Beat, now: float) -> dict[int, Beat]:
        """Finds the processes that hang: this one, or those that it waits for.

        Args:
          beat: beat of this process, which is past its deadline.
          now: monotonic seconds.

        Returns:
          {process: beat}; empty while the processes may still go on.
        """
        if self._is_stopped():
            # Others may be behind because of it: the first process serves their votes.
            return {self.process: beat}
        others = self._others()
        wall = time.time()
        if any(o.place <= beat.place and wall < o.deadline for o in others.values()):
            return {}
        behind = {n: o for n, o in others.items() if o.place < beat.place}
        # No process advances before all have begun. A process that is missing later has
        # ended.
        if PHASES[beat.phase] == "start":
            behind |= dict.fromkeys(self._peers - others.keys(), _ABSENT)
        if not behind:
            return {self.process: beat}
        wall_limit = max(o.deadline for o in behind.values()) + _GRACE_S
        if wall > wall_limit and now > beat.deadline + _GRACE_S:
            return behind
        return {}

    # --- the end ----------------------------------------------------------------------

    def _end(self, beat: Beat, now: float, guilty: dict[int, Beat]) -> None:
        """Reports the hang, and ends the process."""
        # a process that wakes up now must not continue
        os.pwrite(self.memory, b"\1", ENDING_AT)
        is_stopped = self._is_stopped()
        if is_stopped:
            os.kill(self.pid, signal.SIGCONT)  # so that it writes its stacks
        stacks = self._stacks()
        main_stack = stacks.rpartition("\n\n")[2]  # the main thread's comes last
        waits = self.processes > 1 and any(name in main_stack for name in _WAITS)
        is_level = any(other.place == beat.place for other in self._others().values())
        waits_for_result = is_level and _RESULT in main_stack
        if not is_stopped and (waits or waits_for_result):
            # Lets the guilty process report and end first. It takes _LEAVE_S longer if
            # it holds the interpreter lock.
            time.sleep(3 * _LEVEL_S + _LEAVE_S)
        details = {
            "waited_s": round(now - beat.since, 1),
            "stopped_by_signal": is_stopped,
            "waits_for_others": waits,
            "stacks": stacks,
        }
        self._report(guilty, details)
        if is_level:
            time.sleep(_LEVEL_S)
        with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
            os.write(self.leave, b"\1")
        # It may not end by itself: it holds the interpreter lock, or hangs in its exit.
        for number in (HANG_SIGNAL, signal.SIGKILL):
            if self._ended(_LEAVE_S):
                return
            os.kill(self.pid, number)

    def _report(self, guilty: dict[int, Beat], details: dict[str, Any]) -> None:
        """Writes an event and a text for each process that hangs.

        Args:
          guilty: {process: beat}.
          details: more fields of this process.
        """
        reports: list[tuple[int, dict[str, Any]]] = []
        for process, beat in sorted(guilty.items()):
            fields: dict[str, Any] = {
                "phase": PHASES[beat.phase],
                "at_step": max(beat.at_step, 0),
                "sample": beat.sample,
                "process": process,
                "reported_by": self.process,
            }
            if process == self.process:
                fields |= details
            reports.append((beat.done, fields))
        self._try_on_disk(lambda: self._write_events(reports))
        for done, fields in reports:
            text = _text(fields["process"], self.processes, fields, done)
            line = f"{text.rstrip()}\n".encode(errors="backslashreplace")
            _start_thread(functools.partial(os.write, 2, line)).join(_WORK_S)

    def _try_on_disk(self, work: Callable[[], object]) -> bool:
        """Does work on the workdir in a thread, unless the file system is stuck.

        Returns:
          True if the work has ended.
        """
        if self._disk is not None and self._disk.is_alive():
            return False
        self._disk = _start_thread(work)
        self._disk.join(_WORK_S)
        return not self._disk.is_alive()

    def _write_events(self, reports: list[tuple[int, dict[str, Any]]]) -> None:
        with contextlib.closing(MetricsWriter(Path(self.folder))) as events:
            for done, fields in reports:
                events.event("hang", done, **fields)

    def _is_stopped(self) -> bool:
        """Checks if a signal has stopped the process."""
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
        deadline = time.monotonic() + _DUMP_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            previous_size = size
            size = os.fstat(self.dump).st_size
            if size and size == previous_size:
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


def _start_thread(work: Callable[[], object]) -> threading.Thread:
    """Starts work that may wait for a terminal or a file system."""

    def try_work() -> None:
        with contextlib.suppress(Exception):  # no error may end the watcher
            work()

    thread = threading.Thread(target=try_work, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        # these are meant for the process; the watcher ends with it
        signal.signal(number, signal.SIG_IGN)
    WatchdogProcess(**json.loads(sys.argv[1])).run()
