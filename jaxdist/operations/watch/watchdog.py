"""Watchdog that ends a hanging process with exit code 76, so that the run can restart.

The process beats at the start of each phase, and each phase has a time limit. A second
process (`watchdog_process`) reads the beats. So it also detects an interpreter lock
that is never released, a stopped process and a loop in C. A process that holds the lock
for ever cannot set its exit code: `HANG_SIGNAL` kills it, and `launch` reports 76. Only
processes of jaxdist's commands are watched, never a notebook.
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
    """Callback that watches this process while it is entered.

    A beat (`at`) costs some microseconds. A command enters the watchdog before it
    joins the process group, with the limits of an unchecked config. `on_start` sets the
    limits of the run.
    """

    keys = ("watchdog",)

    def __init__(
        self, config: WatchdogConfig, folder: Path, *, enabled: bool | None = None
    ) -> None:
        """Takes the limits; watches nothing yet.

        Args:
          config: limits of the phases.
          folder: the workdir, for events and for the files of the watchers.
          enabled: False = nothing is watched; None = a command's process is watched.
        """
        self._config = config
        self._folder = folder
        if enabled is None:
            enabled = preemption.PROCESS.is_ours
        # the run reports the faults of its config, all together
        self._enabled = enabled and not faults(config)
        self._run: Run | None = None
        self._place = ("start", -1)  # phase and step of the last beat
        # seconds of the last steps
        self._step_times: deque[float] = deque(maxlen=31)
        self._last_step = 0.0  # monotonic seconds of its beat; 0: no step yet
        self._memory: Any = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watchdog:
        """Starts the watcher in a process of its own."""
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
        self._files = memory, dump  # keeps both open
        life, self._life = os.pipe()
        descriptors = {
            "life": life,
            "memory": memory.fileno(),
            "dump": dump.fileno(),
            "leave": _exit_pipe(),
        }
        arguments = {
            "pid": os.getpid(),
            "folder": str(self._folder.absolute()),
            **descriptors,
            **_membership(os.environ),
        }
        command = [sys.executable, "-S", "-s", watchdog_process.__file__]
        self._watcher = subprocess.Popen(
            [*command, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(jaxdist.__file__).parent.parent)},
            pass_fds=list(descriptors.values()),
        )
        os.close(life)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the watcher."""
        if self._watcher is not None:
            os.close(self._life)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watcher.wait(timeout=5)
            self._watcher.kill()  # in case it has not ended by itself
            self._watcher.wait()
            faulthandler.unregister(DUMP_SIGNAL)

    def on_start(self, run: Run) -> None:
        """Sets the limits of the run's config."""
        self._run = run
        self._config = run.config.watchdog

    def on_phase(self, phase: str, step: int) -> None:
        """Beats at the start of a phase.

        An evaluation begins a phase for each of its batches.
        """
        limit_s = None
        if phase == "evaluate" and self._place == (phase, step):
            # only the first batch may compile; another one takes data and a step
            config = self._config
            limit_s = 0.0
            if config.data_s > 0 and config.step_s > 0:
                limit_s = config.data_s + config.step_s
        self._beat(phase, step, limit_s)

    def on_progress(self, text: str) -> None:
        """Beats again, so that work with visible progress may take longer."""
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
        """Beats at the start of a phase.

        Args:
          phase: one of `PHASES`.
          step: step of the phase; negative = other processes may not have begun.
          done: number of updates that are known to be finished.
          sample: first global sample index of the step's batch.
          limit_s: seconds that the phase may take; 0 = no limit, None = the limit of
            the config.
        """
        if self._memory is None:
            return
        self._place = (phase, step)
        now = time.monotonic()
        if phase == "step":
            if self._last_step:
                self._step_times.append(now - self._last_step)
            self._last_step = now
        if limit_s is None:
            limit_s = self._limit_s(phase)
        deadline = now + (limit_s or math.inf)
        beat = BEAT.pack(PHASES.index(phase), step, done, sample, now, deadline)
        self._memory[BEAT_AT : BEAT_AT + BEAT.size] = beat
        if self._memory[ENDING_AT]:
            # The watcher ends this process as soon as it has reported the hang.
            time.sleep(10)
            os._exit(EXIT_HANG)

    def _limit_s(self, phase: str) -> float:
        """Computes the seconds that a phase may take; 0 = no limit."""
        config = self._config
        if phase in ("evaluate", "end"):
            return config.compile_s
        if phase == "vote":  # waits for other processes like a step
            phase = "step"
        limit: float = getattr(config, f"{phase}_s")
        if not limit or phase not in ("data", "step"):
            return limit
        if not self._step_times:  # the first step may compile
            return limit + config.compile_s if config.compile_s else 0
        if config.slow_steps * max(self._step_times) <= limit:
            return limit  # the median is no longer; to sort costs each step more
        median = sorted(self._step_times)[len(self._step_times) // 2]
        return max(limit, config.slow_steps * median)


def _membership(environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads the environment's group of processes.

    Returns:
      Arguments of `WatchdogProcess`: the index of this process, the number of
      processes, and a name of their start.
    """
    group = environ.get("JAXDIST_COORDINATOR")
    if group:
        return {
            "process": int(environ["JAXDIST_PROCESS_ID"]),
            "processes": int(environ["JAXDIST_NUM_PROCESSES"]),
            "group": group,
        }
    # if the group is unknown, each process has only its own limits
    agents = ClusterInfo()
    with contextlib.suppress(ConfigError):
        agents = find_cluster(environ)
    return {
        "process": agents.index,
        "processes": agents.number,
        "group": f"{agents.host}:{agents.port}",
    }


def _memory_file() -> IO[bytes]:
    """Opens a file that another process can share.

    It is in memory where the system can do so: a full disk then does no harm.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("jaxdist-watchdog"), "r+b")
    return tempfile.TemporaryFile()


def _exit_pipe() -> int:
    """Opens a pipe whose first byte ends this process with 76.

    A thread reads it, which needs the interpreter lock.
    """
    # both ends stay open: the thread would read a closed pipe at once
    reader, writer = os.pipe()

    def leave() -> None:
        os.read(reader, 1)
        os._exit(EXIT_HANG)

    threading.Thread(target=leave, name="watchdog", daemon=True).start()
    return writer
