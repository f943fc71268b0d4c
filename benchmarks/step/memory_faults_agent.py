"""Agent of a run for `memory_faults.py`: jaxdist's supervisor, with workers that are forked.

    python benchmarks/step/memory_faults_agent.py FOLDER PROCESSES TRAIN_FLAGS...

The supervisor is that of `jaxdist launch`. It starts each worker as a fork of this
process, which has imported everything, so that a restart skips the imports. The agent
starts the run again after exit code 75, as a scheduler would, unless there is the file
FOLDER/stop.

A worker writes what it restored and the SHA-256 of its part of each step's state to
FOLDER/states/RANK.jsonl. Faults amid an operation come by FOLDER/orders/POINT.RANK, a
JSON file: the next worker that passes there kills itself with SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import jax
import numpy as np

from jaxdist import library, train
from jaxdist.checkpoint import manager, memory_file, state_dict
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.checkpoint.memory_peers import MemoryPeers
from jaxdist.checkpoint.memory_store import MemoryStore
from jaxdist.checkpoint.memory_tier import MemoryTier
from jaxdist.checkpoint.peer_link import Link
from jaxdist.config import EXIT_PREEMPTED
from jaxdist.distributed.cluster import ClusterInfo
from jaxdist.operations.launch.supervisor import Supervisor, SupervisorOptions
from jaxdist.operations.launch.worker_group import WorkerGroup, _die_with_parent
from jaxdist.trainer.callbacks import Callback, Run, StepView
from jaxdist.trainer.exit_code import exit_code
from jaxdist.trainer.preemption import own_process

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
PACE_S = float(os.environ.get("FAULTS_PACE_S", "0"))
STOP_AT = int(os.environ.get("FAULTS_STOP_AT", "0"))  # 0 = the run goes on
# steps between two records of the memory of a worker; 0 = there are none
RSS_EVERY = int(os.environ.get("FAULTS_RSS_EVERY", "0"))
MOST_FILES = 256  # open files that the agent may have


# --- forked workers -------------------------------------------------------------------


class Forked:
    """A forked worker, with the methods of `subprocess.Popen` that a group uses."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Gives the exit code, or None while the worker runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Waits for the end."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the worker, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


def _fork(
    self: WorkerGroup,
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Replaces `WorkerGroup._start`."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _become_worker(parent, writer, command, environment)
    os.close(writer)
    process = Forked(pid, os.fdopen(reader, "rb", buffering=0))
    self.processes[number] = process  # type: ignore[assignment]
    assert self._guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        self._guard.stdin.write(b"%d\n" % pid)
    os.set_blocking(reader, False)
    self._selector.register(process.stdout, 1, number)
    _write(FOLDER / "pids" / str(number), str(pid))


def _become_worker(
    parent: int, output: int, command: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, MOST_FILES)
        # they remember what the agent's output was
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["jaxdist.train", *command[3:]]
        with own_process():
            code = exit_code(train.main)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _start(
    honest: Callable[[Supervisor, int], WorkerGroup], self: Supervisor, size: int
) -> WorkerGroup:
    """Replaces `Supervisor._start`: waits while the campaign damages files."""
    while (FOLDER / "hold").exists():
        time.sleep(0.005)
    generation = FOLDER / "generation"
    _write(generation, str(int(generation.read_text()) + 1))
    return honest(self, size)


# --- what a worker records ------------------------------------------------------------


def _rank() -> int:
    return int(os.environ.get("JAXDIST_PROCESS_ID", "0"))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _record(**fields: Any) -> None:
    generation = int((FOLDER / "generation").read_text())
    row = {"time": time.time(), "generation": generation, **fields}
    path = FOLDER / "states" / f"{_rank()}.jsonl"
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(descriptor, (json.dumps(row) + "\n").encode())
    os.close(descriptor)


def _hash(arrays: Mapping[str, Any]) -> str:
    """Hashes this process's part of a state."""
    hashed = hashlib.sha256()
    for name, leaf in sorted(arrays.items()):
        hashed.update(f"{name} {np.shape(leaf)} {leaf.dtype}".encode())
        if isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                hashed.update(str(shard.index).encode())
                hashed.update(np.ascontiguousarray(shard.data).tobytes())
        else:
            hashed.update(np.ascontiguousarray(leaf).tobytes())
    return hashed.hexdigest()


def _resident_kib() -> int:
    """Measures the resident memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


class Witness(Callback):
    """Callback that records the hash of each step's state."""

    steps = 1

    def on_start(self, run: Run) -> None:
        """Keeps the run."""
        self._run = run

    def on_step(self, view: StepView) -> None:
        """Records the state, and passes the campaign's wishes on."""
        flat = self._run.built.views.flat(view.state)
        _record(kind="step", step=view.step, sha=_hash(state_dict.to_canonical(flat)))
        if RSS_EVERY and view.step % RSS_EVERY == 0:
            kib = _resident_kib()
            _record(
                kind="memory",
                step=view.step,
                kib=kib,
                objects=len(gc.get_objects()),
            )
        if _rank() == 0 and _take("folder") is not None:
            view.request_save()
        if view.step == STOP_AT:
            view.stop("the campaign has as many steps")
        time.sleep(PACE_S)


def _restore(honest: Any, self: CheckpointManager, *given: Any, **options: Any) -> Any:
    """Records what a restore gave, and from where."""
    FETCHED.clear()
    restored = honest(self, *given, **options)
    candidate = self.memory.restored if self.memory is not None else None  # type: ignore[attr-defined]
    _record(
        kind="restored",
        source="folder" if candidate is None else "memory",
        step=self.last_sealed if candidate is None else candidate.step,
        fetched=list(FETCHED),
        sha=_hash(state_dict.to_canonical(restored.state)),
    )
    return restored


FETCHED: list[list[int]] = []  # [step, owner] of files that came from another host


# --- faults amid an operation ---------------------------------------------------------


def _take(point: str) -> dict[str, Any] | None:
    """Takes the order for a point of this worker, if there is one."""
    path = FOLDER / "orders" / f"{point}.{_rank()}"
    if not path.exists():
        return None
    order: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return order


def _die(point: str) -> NoReturn:
    _write(FOLDER / "marks" / point, str(_rank()))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    os._exit(1)


class _Fatal:
    """A file whose writer dies after so many bytes."""

    def __init__(self, file: Any, point: str, left: int) -> None:
        self._file = file
        self._point = point
        self._left = left

    def write(self, data: Any) -> int:
        view = memoryview(data)[: self._left]
        self._left -= len(view)
        self._file.write(view)
        if not self._left:
            self._file.flush()
            _die(self._point)
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _install() -> None:
    """Puts records and faults where a run passes."""
    callbacks = library.run_callbacks
    library.run_callbacks = lambda *run, **options: [
        *callbacks(*run, **options),
        Witness(),
    ]
    CheckpointManager.restore = functools.partialmethod(  # type: ignore[assignment]
        _bound(_restore), CheckpointManager.restore
    )
    write = memory_file.write

    def fatal_write(file: Any, header: memory_file.Header, contents: Any) -> int:
        order = _take("save")
        if order is not None:
            size = memory_file.payload_bytes(header.arrays, header.pieces)
            file = _Fatal(file, "save", max(1, int(order["fraction"] * size)))
        return write(file, header, contents)

    memory_file.write = fatal_write
    receive = MemoryStore.receive

    @contextlib.contextmanager
    def fatal_receive(
        self: MemoryStore, step: int, owner: int, size: int
    ) -> Iterator[Any]:
        with receive(self, step, owner, size) as file:
            order = _take("receive")
            if order is not None:
                left = max(1, int(order["fraction"] * size))
                file = _Fatal(file, "receive", left)  # type: ignore[assignment]
            yield file

    MemoryStore.receive = fatal_receive  # type: ignore[method-assign]
    send_data = Link.send_data

    def fatal_send(self: Link, file: Any, size: int) -> None:
        order = _take("send")
        if order is not None:
            # a part of a frame, and then nothing
            self._send(b"\3" + size.to_bytes(4, "big"))
            self._send(file.read(max(1, int(order["fraction"] * size))))
            _die("send")
        send_data(self, file, size)

    Link.send_data = fatal_send  # type: ignore[method-assign]
    for name, point in (
        ("look", "look"),
        ("_confirm", "confirm"),
        ("_read_array", "read"),
    ):
        _kill_within(name, point)
    fetch = MemoryPeers._fetch

    def recorded_fetch(self: MemoryPeers, step: int, owner: int, address: str) -> None:
        if _take("fetch") is not None:
            _die("fetch")
        fetch(self, step, owner, address)
        FETCHED.append([step, owner])

    MemoryPeers._fetch = recorded_fetch  # type: ignore[method-assign]
    begin = MemoryPeers.__init__

    def recorded_begin(self: MemoryPeers, store: MemoryStore, copies: int) -> None:
        begin(self, store, copies)
        known = {
            "generation": int((FOLDER / "generation").read_text()),
            "token": self._client._token.hex(),
            "address": self._peers[_rank()].address,
            "folder": str(store.folder),
            "run": store.run,
        }
        _write(FOLDER / "peers" / str(_rank()), json.dumps(known))

    MemoryPeers.__init__ = recorded_begin  # type: ignore[method-assign]


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function (honest, self, ...) the order of arguments of a partial method."""
    return lambda self, honest, *given, **options: function(
        honest, self, *given, **options
    )


def _kill_within(name: str, point: str) -> None:
    """Lets a method of the tier die at its start, or after some calls of it."""
    honest = getattr(MemoryTier, name)
    calls = 0

    def fatal(self: MemoryTier, *given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        path = FOLDER / "orders" / f"{point}.{_rank()}"
        if path.exists() and calls > json.loads(path.read_text()).get("after", 0):
            path.unlink()
            _die(point)
        return honest(self, *given, **options)

    setattr(MemoryTier, name, fatal)


def main() -> int:
    """Runs the agent."""
    processes = int(sys.argv[2])
    for name in ("orders", "marks", "pids", "peers", "states"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "generation").exists():
        _write(FOLDER / "generation", "0")
    manager.preload()
    _install()
    WorkerGroup._start = _fork  # type: ignore[method-assign]
    Supervisor._start = functools.partialmethod(  # type: ignore[assignment]
        _bound(_start), Supervisor._start
    )
    command = [sys.executable, "-m", "jaxdist.train", *sys.argv[3:]]
    options = SupervisorOptions(command, processes, 1, max_restarts=40, grace_s=60)
    agents = ClusterInfo()
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1
    tasks = len(os.listdir("/proc/self/task"))
    print(f"agent: {tasks} threads", flush=True)

    def say(text: str) -> None:
        print(f"agent {time.time():.3f}: {text}", flush=True)

    while True:
        code = Supervisor(options, agents, say=say).run(is_last=False)
        say(f"exit code {code}")
        if code != EXIT_PREEMPTED or (FOLDER / "stop").exists():
            return code


if __name__ == "__main__":
    raise SystemExit(main())
