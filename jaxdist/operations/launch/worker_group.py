"""Processes of one start, which begin and end together. Needs no thread and no jax."""

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from jaxdist.config import EXIT_HANG
from jaxdist.operations.watch.watchdog_process import HANG_SIGNAL

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
# A shell that reads process groups from a pipe, and kills them when the pipe closes. It
# closes when the agent dies.
_GUARD = 'p=; while read g; do p="$p -$g"; done; [ -z "$p" ] || kill -9 $p'


def _die_with_parent(parent: int) -> None:
    """Makes the kernel kill this child when the agent dies, even by kill -9.

    It runs in the child.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class WorkerGroup:
    """Processes of one start, each in a process group of its own."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        first: int,
        wakeup: int,
    ) -> None:
        """Starts the processes.

        Args:
          command: command of each process.
          environments: variables of each process.
          first: number of the first process.
          wakeup: a descriptor; `listen` returns once it can be read.

        Raises:
          OSError: the command cannot be started. No process runs then.
        """
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.last_lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=15))
        self._partial: dict[int, bytes] = defaultdict(bytes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            bufsize=0,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            for number, environment in enumerate(environments, first):
                self._start(number, command, environment)
        except BaseException:
            self.kill()
            raise

    def _start(
        self, number: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_die_with_parent, os.getpid()),
        )
        assert process.stdout is not None
        assert self._guard.stdin is not None
        self.processes[number] = process
        # without the guard, the kernel still kills the process
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(b"%d\n" % process.pid)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, number)

    def listen(self, timeout_s: float) -> None:
        """Prints output of the processes, until some came, a wake-up or the timeout."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                os.read(key.fd, 4096)
            else:
                self._print_output(key.data, key.fd)

    def _print_output(self, number: int, descriptor: int) -> bool:
        """Reads output and prints its whole lines; True means that more may follow."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._partial[number] = (self._partial[number] + data).split(b"\n")
        if not data:
            self._selector.unregister(descriptor)
        for line in lines:
            self._print_line(number, line)
        return bool(data)

    def _print_line(self, number: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.last_lines[number].append(text)
        # a full disk or a closed terminal must not end the run
        with contextlib.suppress(OSError):
            print(f"[{number}] {text}", flush=True)

    def codes(self) -> dict[int, int]:
        """Collects {process: exit code} of the processes that have ended.

        A code is -N for signal N, and 76 for a hang.
        """
        codes = {}
        for number, process in self.processes.items():
            code = process.poll()
            if code == -HANG_SIGNAL:
                code = EXIT_HANG
            if code is not None:
                codes[number] = code
        return codes

    def signal(self, number: int) -> None:
        """Sends a signal to the processes that still run, but not to their children."""
        for process in self.processes.values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kills the processes and their children, and prints their remaining output."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self._guard.kill()
        for key in list(self._selector.get_map().values()):
            while key.data is not None and self._print_output(key.data, key.fd):
                pass
        for number, partial in self._partial.items():
            if partial:
                self._print_line(number, partial)
        self._selector.close()
        for process in (self._guard, *self.processes.values()):
            with process:  # closes its pipe, and waits for it
                pass
