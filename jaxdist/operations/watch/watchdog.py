"""Ends a process that hangs, with exit code 76, so that the run can restart.

The process beats: it writes which phase it begins, and each phase has a limit. A
process beside it (`watchdog_process`) reads the beats. So an interpreter lock that is
never released, a stopped process and a loop in C are detected too. A process that holds
the lock for ever can set no exit code: a signal kills it (`HANG_SIGNAL`), which
`launch` reports as 76. Only a process of ours (a command) is watched, never a notebook.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jaxdist
from jaxdist.config import EXIT_HANG, ConfigError
from jaxdist.config.groups.watchdog import WatchdogConfig
from jaxdist.config.schema import faults
from jaxdist.distributed.cluster import ClusterInfo, find_cluster
from jaxdist.operations.watch import watchdog_process
from jaxdist.operations.watch.watchdog_process import (
    BEAT,
    BEAT_AT,
    DUMP_SIGNAL,
    ENDING_AT,
    PHASES,
)
from jaxdist.trainer import preemption
from jaxdist.trainer.callbacks import Callback, Run


class Watchdog(Callback):
    """Watches this process while entered. `at` costs some microseconds.

    A root enters it before it joins the process group, with the limits of a config that
    nobody has checked yet; `on_start` brings those of the run.
    """

    keys = ("watchdog",)

    def __init__(
        self, config: WatchdogConfig, folder: Path, *, enabled: bool | None = None
    ) -> None:
        """Args:
        folder: the workdir, for events and for what watchers tell each other.
        enabled: by default whether the process is a command's.
        """
        self._config = config
        self._folder = folder
        if enabled is None:
            enabled = preemption.PROCESS.is_ours
        # a config's faults are reported with those of the whole run
        self._enabled = enabled and not faults(config)
        self._run: Run | None = None
        self._place = ("start", -1)  # phase and step of the last beat
        self._times: deque[float] = deque(maxlen=31)  # seconds between the last steps
        self._last_step = 0.0
        self._memory: Any = None
        self._watcher: subprocess.Popen | None = None

    def __enter__(self) -> Watchdog:
        """Starts the watcher, a process of its own."""
        if not self._enabled:
            return self
        if os.getpid() == 1:
            print(
                "watchdog: no signal from inside a container ends its process 1, should this one hang; "
                "start it by `jaxdist launch`, or with an init process (docker run --init)",
                file=sys.stderr,
            )
        memory = _memory_file()
        dump = _memory_file()
        memory.truncate(mmap.PAGESIZE)
        self._memory = mmap.mmap(memory.fileno(), mmap.PAGESIZE)
        self.at("start", -1)
        faulthandler.register(DUMP_SIGNAL, file=dump, all_threads=True)
        self._files = memory, dump  # open as long as this
        life, self._life = os.pipe()
        files = {
            "life": life,
            "memory": memory.fileno(),
            "dump": dump.fileno(),
            "leave": _exit_pipe(),
        }
        arguments = {
            "pid": os.getpid(),
            "folder": str(self._folder.absolute()),
            **files,
            **_membership(os.environ),
        }
        command = [sys.executable, "-S", "-s", watchdog_process.__file__]
        self._watcher = subprocess.Popen(
            [*command, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(jaxdist.__file__).parent.parent)},
            pass_fds=list(files.values()),
        )
        os.close(life)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the watcher."""
        if self._watcher is not None:
            os.close(self._life)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watcher.wait(timeout=5)
            self._watcher.kill()  # where it has not ended by itself
            self._watcher.wait()
            faulthandler.unregister(DUMP_SIGNAL)

    def on_start(self, run: Run) -> None:
        """Takes the limits of the run's config."""
        self._run = run
        self._config = run.config.watchdog

    def on_phase(self, phase: str, step: int) -> None:
        """Beats: a phase begins. Each batch of an evaluation is a phase of its own."""
        limit_s = None
        if phase == "evaluate" and self._place == (phase, step):
            # the first batch may compile, each other one is data and a step
            config = self._config
            limit_s = 0.0
            if config.data_s > 0 and config.step_s > 0:
                limit_s = config.data_s + config.step_s
        self._beat(phase, step, limit_s)

    def on_progress(self, text: str) -> None:
        """Beats again: work that shows its progress may take its time."""
        phase, step = self._place
        self._beat(phase, max(step, 0))

    def _beat(self, phase: str, step: int, limit_s: float | None = None) -> None:
        if self._run is None:
            self.at(phase, step, limit_s=limit_s)
            return
        first_sample, _ = self._run.samples(max(step, 1))
        done = self._run.progress.step
        self.at(phase, step, done=done, sample=first_sample, limit_s=limit_s)

    def at(
        self,
        phase: str,
        step: int = 0,
        *,
        done: int = 0,
        sample: int = 0,
        limit_s: float | None = None,
    ) -> None:
        """Beats: a phase begins; `PHASES` has the names.

        Args:
          step: that the phase is for; below 0: before this process has all that it
            needs to begin.
          done: updates known to be finished.
          sample: first global sample index of the step's batch.
          limit_s: seconds that the phase may take, instead of its own limit; 0: none.
        """
        if self._memory is None:
            return
        self._place = (phase, step)
        now = time.monotonic()
        if phase == "step":
            if self._last_step:
                self._times.append(now - self._last_step)
            self._last_step = now
        if limit_s is None:
            limit_s = self._limit_s(phase)
        deadline = now + (limit_s or math.inf)
        beat = BEAT.pack(PHASES.index(phase), step, done, sample, now, deadline)
        self._memory[BEAT_AT : BEAT_AT + BEAT.size] = beat
        if self._memory[ENDING_AT]:
            # the watchdog is about to end this process, once it has reported why
            time.sleep(10)
            os._exit(EXIT_HANG)

    def _limit_s(self, phase: str) -> float:
        config = self._config
        if phase in ("evaluate", "end"):
            return config.compile_s
        if phase == "vote":  # as if the others were waited for in the next step
            phase = "step"
        limit = getattr(config, f"{phase}_s")
        if limit and phase in ("data", "step"):
            if not self._times:  # the first step may compile
                return limit + config.compile_s if config.compile_s else 0
            median = sorted(self._times)[len(self._times) // 2]
            limit = max(limit, config.slow_steps * median)
        return limit


def _membership(environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads this process's number, how many there are, and a name of their start, from
    the environment.
    """
    group = environ.get("JAXDIST_COORDINATOR")
    if group:
        return {
            "process": int(environ["JAXDIST_PROCESS_ID"]),
            "processes": int(environ["JAXDIST_NUM_PROCESSES"]),
            "group": group,
        }
    agents = ClusterInfo()  # if unknown: each process has only its own limits
    with contextlib.suppress(ConfigError):
        agents = find_cluster(environ)
    return {
        "process": agents.index,
        "processes": agents.number,
        "group": f"{agents.host}:{agents.port}",
    }


def _memory_file() -> IO[bytes]:
    """Opens a file that another process can share. It is in memory, so that a full disk
    does not matter.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("jaxdist-watchdog"), "r+b")
    return tempfile.TemporaryFile()


def _exit_pipe() -> int:
    """Opens a pipe; a byte in it ends this process with 76, while its interpreter lock
    is free.
    """
    # both stay open: its end of file would be read as a byte
    reader, writer = os.pipe()

    def leave() -> None:
        os.read(reader, 1)
        os._exit(EXIT_HANG)

    threading.Thread(target=leave, name="watchdog", daemon=True).start()
    return writer
