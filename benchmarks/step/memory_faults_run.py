"""The run of `memory_faults.py`: its agent, its files, and what its workers record."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memory_faults_plan import HOSTS

from jaxdist.checkpoint import memory_file
from jaxdist.checkpoint.memory_file import BadFile

AGENT = Path(__file__).resolve().with_name("memory_faults_agent.py")
WAIT_S = 240.0  # longest wait for a recovery
SETTINGS = {
    "train.steps": 100_000,
    "train.max_minutes": 0,
    "train.eval_every": 0,
    "train.log_every": 1,
    "train.sample_tokens": 0,
    "batch.sequence_length": 16,
    "batch.global_size": 4,
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.dropout": 0.1,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 5,
    "mesh.fsdp": HOSTS,
    "checkpoint.every_steps": 0,
    "watchdog.step_s": 6,
    "watchdog.data_s": 6,
}


class Late(Exception):
    """Error of a run that has not done something in time."""


class Lines:
    """A growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._read = 0

    def update(self) -> list[dict[str, Any]]:
        """Reads what has come, and returns it."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            new = []
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # torn by a kill
                    new.append(json.loads(line))
            self.rows += new
            return new
        return []


class Campaign:
    """A run, its agent, and what is known of both."""

    def __init__(self, folder: Path, name: str, *, processes: int = HOSTS) -> None:
        self.folder = folder / name
        self.memory = folder / "memory"
        self.cache = folder / "xla"
        self.processes = processes
        self.workdir = self.folder / "run"
        self.events = Lines(self.workdir / "events.jsonl")
        self.states = [
            Lines(self.folder / "states" / f"{rank}.jsonl") for rank in range(processes)
        ]
        self.agent: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    # --- the agent --------------------------------------------------------------------

    def start(
        self, *, memory: str, changes: dict[str, Any] | None = None, **variables: str
    ) -> None:
        """Starts the agent."""
        settings = {**SETTINGS, "data.cache_dir": self.folder.parent / "data"}
        settings |= changes or {}
        if self.processes == 1:
            settings["mesh.fsdp"] = 1
        if memory:
            settings["checkpoint.memory_folder"] = memory
            settings["checkpoint.memory_every_steps"] = 2
            settings["checkpoint.memory_peers"] = int(self.processes > 1)
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "OPENBLAS_NUM_THREADS": "1",
            **variables,
        }
        command = [sys.executable, str(AGENT), str(self.folder), str(self.processes)]
        command += ["--config", "quickstart", "--workdir", str(self.workdir), *flags]
        with (self.folder / "log").open("ab") as log:
            self.agent = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log
            )

    def kill_agent(self) -> None:
        """Kills the agent, and its workers with it."""
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
            self.agent = None
        self.wait(lambda: not self.alive(), "the workers ended", 30)

    def pids(self) -> dict[int, int]:
        """Finds {rank: process id} of the newest start."""
        return {
            rank: int((self.folder / "pids" / str(rank)).read_text())
            for rank in range(self.processes)
            if (self.folder / "pids" / str(rank)).exists()
        }

    def alive(self) -> list[int]:
        """Lists the workers of the newest start that still run."""
        return [pid for pid in self.pids().values() if _runs(pid)]

    @property
    def generation(self) -> int:
        """Number of the newest start."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "generation").read_text())
        return 0

    def wait(
        self, is_done: Callable[[], Any], what: str, seconds: float = WAIT_S
    ) -> Any:
        """Waits until something is the case.

        Raises:
          Late: it takes longer, or the agent has ended.
        """
        until = time.monotonic() + seconds
        while not (found := is_done()):
            if time.monotonic() > until:
                raise Late(f"not in {seconds:g} s: {what}")
            if self.agent is not None and self.agent.poll() is not None:
                raise Late(f"the agent ended with {self.agent.returncode}: {what}")
            time.sleep(0.02)
        return found

    def event(self, name: str, since: int) -> list[dict[str, Any]]:
        """Lists the events of a name after the first `since` ones."""
        self.events.update()
        return [row for row in self.events.rows[since:] if row["event"] == name]

    def order(self, point: str, rank: int, **fields: Any) -> None:
        """Orders something from a worker."""
        path = self.folder / "orders" / f"{point}.{rank}"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(fields))
        partial.replace(path)

    def hold(self) -> None:
        """Makes the agent wait before the next start."""
        (self.folder / "hold").touch()

    def release(self) -> None:
        """Lets the agent start the workers."""
        (self.folder / "hold").unlink(missing_ok=True)

    # --- files in memory --------------------------------------------------------------

    def peer(self, rank: int) -> dict[str, Any]:
        """Reads the address and the folder of a worker."""
        known: dict[str, Any] = json.loads(
            (self.folder / "peers" / str(rank)).read_text()
        )
        return known

    @property
    def branch(self) -> str:
        """The name of the run's present history."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = json.loads((self.workdir / "memory.json").read_text())
            return str(document["name"])
        return ""

    def scan(self, excluded: set[Path] | None = None) -> Files:
        """Finds all sound files of the present history."""
        found: dict[int, dict[str, dict[int, dict[int, Path]]]] = {}
        branch = self.branch
        for host in range(self.processes):
            store = Path(self.peer(host)["folder"]) if self.processes > 1 else None
            for path in sorted(store.glob("*.shards")) if store else []:
                if path in (excluded or ()):
                    continue
                with contextlib.suppress(OSError, BadFile):
                    with path.open("rb") as file:
                        header = memory_file.read_header(file).header
                    if header.branch == branch:
                        saves = found.setdefault(header.step, {})
                        owners = saves.setdefault(header.agreed, {})
                        owners.setdefault(header.owner, {})[host] = path
        return Files(found, self.processes)


class Files:
    """Files in memory: step, save, owner, host."""

    def __init__(
        self, found: dict[int, dict[str, dict[int, dict[int, Path]]]], processes: int
    ) -> None:
        self._found = found
        self._all = set(range(processes))

    def complete(self, copies: int = 1) -> list[int]:
        """Lists the steps of which each part is on so many hosts."""
        return sorted(
            step
            for step, saves in self._found.items()
            if any(
                owners.keys() >= self._all
                and all(len(hosts) >= copies for hosts in owners.values())
                for owners in saves.values()
            )
        )

    def of(self, step: int, owner: int) -> dict[int, Path]:
        """Finds the files of a part: {host: path}."""
        return {
            host: path
            for owners in self._found.get(step, {}).values()
            for host, path in owners.get(owner, {}).items()
        }

    def steps(self) -> list[int]:
        """Lists all steps, complete or not."""
        return sorted(self._found)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False


def read_states(folder: Path) -> list[dict[int, str]]:
    """Reads the hashes of a run: for each process {step: hash}.

    Raises:
      ValueError: a step has two hashes.
    """
    found: list[dict[int, str]] = []
    for rank in range(HOSTS):
        states: dict[int, str] = {}
        for row in rows_of(folder / "states" / f"{rank}.jsonl"):
            if (
                "sha" in row
                and states.setdefault(row["step"], row["sha"]) != row["sha"]
            ):
                raise ValueError(f"step {row['step']} of process {rank} has two states")
        found.append(states)
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # torn by a kill
            found.append(json.loads(line))
    return found
