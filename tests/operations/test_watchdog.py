"""Processes that hang for real: found within their limit, named, with their stacks, and
ended with 76.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxdist.config import EXIT_CONFIG, EXIT_HANG
from jaxdist.config.groups.watchdog import WatchdogConfig
from jaxdist.config.schema import faults
from jaxdist.operations.ledger.run_lives import read_lives
from jaxdist.operations.watch import watchdog, watchdog_process
from jaxdist.operations.watch.watchdog import Watchdog
from jaxdist.telemetry.metrics import read_events, read_rows
from support.runs import command, environment, start_group

LIMIT_S, MOST_S = 1.0, 6.0  # MOST_S: of the issue, from the limit to the end
RUN_LIMIT_S = 1.5  # of a run, whose steps and imports take a while themselves

# What hangs, as Python: each blocks for good, in a function whose name the stacks must
# show.
HANGS = {
    "sleep": "time.sleep(1000)",
    "loop": "while True: pass",
    "read": "os.read(os.pipe()[0], 1)",
    "lock held": (
        "c, m = ctypes.PyDLL(None), ctypes.create_string_buffer(64); "
        "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"
    ),
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)",
}
HEAD = "import ctypes, os, signal, sys, time\n"

# Beats as a run does, without its programs.
SMALL = (
    HEAD
    + """
from pathlib import Path
from jaxdist.config.groups.watchdog import WatchdogConfig
from jaxdist.operations.watch.watchdog import Watchdog
def the_culprit():
    BODY
config = WatchdogConfig(data_s=LIMIT, step_s=LIMIT, compile_s=20 * LIMIT)
with Watchdog(config, Path(sys.argv[1]), enabled=True) as watch:
    for step in range(1, 5):
        watch.at("data", step, done=step - 1, sample=8 * (step - 1))
        watch.at("step", step, done=step - 1, sample=8 * (step - 1))
    (Path(sys.argv[1]) / "began").write_text(str(time.time()))
    watch.at("data", 5, done=4, sample=32)
    the_culprit()
    watch.at("step", 5)
print("done")
"""
)


def run_small(
    folder: Path, body: str, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess:
    code = SMALL.replace("BODY", body).replace("LIMIT", str(limit_s))
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("loop", marks=pytest.mark.slow),
        pytest.param("read", marks=pytest.mark.slow),
        "sleep",
        "lock held",
        "stopped",
    ],
)
def test_a_hang_ends_with_76_and_is_described(tmp_path, kind):
    done = run_small(tmp_path, HANGS[kind])
    after_s = time.time() - float((tmp_path / "began").read_text())
    print(f"{kind}: ended {after_s:.1f} s after the beat (limit {LIMIT_S} s)")
    expected = (
        -watchdog_process.HANG_SIGNAL if kind == "lock held" else EXIT_HANG
    )  # which launch reports as 76
    assert done.returncode == expected, (done.returncode, done.stderr[-2000:])
    (event,) = [e for e in read_events(tmp_path) if e["event"] == "hang"]
    assert event["process"] == 0
    assert event["phase"] == "data"
    assert event["at_step"] == 5
    assert event["step"] == 4
    assert event["sample"] == 32
    assert "the_culprit" in event["stacks"]
    assert "the_culprit" in done.stderr
    assert "hang: process 0 of 1" in done.stderr
    assert "last finished step 4" in done.stderr
    assert event["stopped_by_signal"] == (kind == "stopped")
    assert event["waited_s"] >= LIMIT_S
    assert after_s < LIMIT_S + MOST_S
    assert not (tmp_path / ".beats").exists()


def test_launch_reports_a_process_that_held_the_interpreter_lock_as_76(tmp_path):
    code = SMALL.replace("BODY", HANGS["lock held"]).replace("LIMIT", str(LIMIT_S))
    agent = [sys.executable, "-m", "jaxdist.launch", "--max-restarts", "0", "--"]
    done = subprocess.run(
        [*agent, sys.executable, "-c", code, str(tmp_path)],
        env=environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_HANG, done.stderr[-2000:]
    assert "ended with exit code 76" in done.stderr, done.stderr[-2000:]


def test_a_slow_step_is_no_hang_and_nothing_is_left(tmp_path):
    done = run_small(tmp_path, f"time.sleep({RUN_LIMIT_S / 2})", RUN_LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n", done.stderr
    assert os.listdir(tmp_path) == ["began"]


def test_compiling_for_long_is_no_hang(tmp_path):
    done = run_small(tmp_path, f"watch.at('compile', 5); time.sleep({2 * LIMIT_S})")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "events.jsonl").exists(), done.stderr


def test_a_limit_of_zero_is_none(tmp_path):
    # several times as long as the watcher waits between two looks
    code = SMALL.replace("BODY", "time.sleep(1)").replace("LIMIT", "0")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (tmp_path / "began").exists(), done.stderr
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "done\n"


def test_killing_the_process_ends_its_watcher(tmp_path):
    code = SMALL.replace("BODY", "time.sleep(100)").replace("LIMIT", "60")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(1)
    )
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.01)
    children = (
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    assert len(children) == 1
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while Path(f"/proc/{children[0]}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{children[0]}").exists()


# --- limits ---------------------------------------------------------------------------


def test_limits_go_by_phase_and_grow_with_slow_steps(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    config = WatchdogConfig(
        step_s=10, data_s=5, compile_s=1000, save_s=0, slow_steps=20
    )
    watch = Watchdog(config, tmp_path, enabled=False)
    assert watch._limit_s("step") == 1010  # the first may compile
    watch._memory = bytearray(4096)
    for number in range(1, 8):
        watch.at("step", number)
        now[0] += 3
    # 20 median steps
    assert watch._limit_s("step") == 60
    assert watch._limit_s("data") == 60
    assert watch._limit_s("save") == 0
    assert watch._limit_s("evaluate") == 1000
    watch.at("save", 7)
    beat = watchdog_process.Beat(*watchdog_process.BEAT.unpack_from(watch._memory, 8))
    assert beat.deadline == float("inf")
    wrong = faults(WatchdogConfig(step_s=-1, slow_steps=0.5), "watchdog.")
    assert len(wrong) == 2
    assert "watchdog.step_s: got -1, required float >= 0" in wrong[0]


# --- who is behind --------------------------------------------------------------------


def beats(
    tmp_path, me: int, *, now: float, **others
) -> dict[int, watchdog_process.Beat]:
    """Returns whom the watcher of `me` finds guilty.

    Beats are (phase, step, seconds past the limit); None: it has no file.
    """
    (tmp_path / ".beats").mkdir()
    mine = None
    for name, place in others.items():
        if place is None:
            continue
        number, (phase, step, late) = int(name[1:]), place
        beat = watchdog_process.Beat(
            watchdog_process.PHASES.index(phase),
            step,
            step - 1,
            0,
            now - 100,
            now - late,
        )
        if number == me:
            mine = beat
            continue
        row = beat._asdict() | {
            "deadline": time.time() - late,
            "group": "g",
            "process": number,
        }
        (tmp_path / ".beats" / str(number)).write_text(json.dumps(row))
    told = {
        "pid": 1,
        "folder": str(tmp_path),
        "life": 0,
        "memory": 0,
        "dump": 0,
        "leave": 0,
    }
    found = watchdog_process.WatchdogProcess(
        process=me, processes=len(others), group="g", **told
    )
    return sorted(found._guilty(mine, now))


@pytest.mark.parametrize(
    ("me", "guilty", "places"),
    [
        # behind: it speaks for itself
        (1, [1], {"p0": ("step", 9, 1), "p1": ("data", 6, 1)}),
        (0, [], {"p0": ("step", 9, 1), "p1": ("data", 6, 1)}),  # ahead: lets it
        # ... but not for ever: a frozen machine
        (0, [1], {"p0": ("step", 9, 9), "p1": ("data", 6, 9)}),
        # a slow but legal save
        (0, [], {"p0": ("step", 9, 9), "p1": ("save", 6, -60)}),
        (0, [0], {"p0": ("save", 6, 1), "p1": ("save", 6, 1)}),  # level: each speaks
        (2, [], {"p0": ("step", 9, 5), "p1": ("data", 9, 1), "p2": ("step", 9, 5)}),
        # one that waits for a vote is ahead of one that has not come to it
        (0, [], {"p0": ("vote", 9, 1), "p1": ("step", 9, 1)}),
        (1, [1], {"p0": ("vote", 9, 1), "p1": ("step", 9, 1)}),
        # stuck before the others' first words
        (0, [1], {"p0": ("start", 0, 9), "p1": ("start", -1, 9)}),
        # has not come so far as to beat
        (0, [1], {"p0": ("start", -1, 9), "p1": None}),
        (0, [], {"p0": ("start", -1, 1), "p1": None}),  # ... it may yet
        (0, [1], {"p0": ("start", 0, 9), "p1": None, "p2": ("start", 0, 9)}),
        (0, [], {"p0": ("start", 0, 9), "p1": None, "p2": ("start", 0, -60)}),
        (0, [0], {"p0": ("end", 9, 9), "p1": None}),  # has ended
    ],
)
def test_the_one_behind_is_named(tmp_path, me, guilty, places):
    assert beats(tmp_path, me, now=time.monotonic(), **places) == guilty


def test_beats_of_an_earlier_start_do_not_count(tmp_path):
    now = time.monotonic()
    assert beats(tmp_path, 0, now=now, p0=("step", 9, 9), p1=("data", 6, 9)) == [1]
    path = tmp_path / ".beats" / "1"
    path.write_text(path.read_text().replace('"g"', '"before"'))
    watch = watchdog_process.WatchdogProcess(
        pid=1,
        process=0,
        processes=2,
        folder=str(tmp_path),
        group="g",
        life=0,
        memory=0,
        dump=0,
        leave=0,
    )
    assert sorted(
        watch._guilty(watchdog_process.Beat(4, 9, 8, 0, now - 20, now - 9), now)
    ) == [0]


# --- a stopped process ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "at_step", "is_stopped", "ended"),
    [
        (2, 1, True, True),
        (2, 1, False, False),
        (1, 1, True, False),  # ends no other process
        (2, -1, True, False),  # has not joined the others
    ],
)
def test_one_of_several_that_is_stopped_is_ended_before_its_limit(
    tmp_path, monkeypatch, processes, at_step, is_stopped, ended
):
    monkeypatch.setattr(watchdog_process, "_STOPPED_S", 0.3)
    now = time.monotonic()
    beat = watchdog_process.Beat(1, at_step, 0, 0, now, now + 1000)
    memory = tmp_path / "memory"
    memory.write_bytes(
        bytes(watchdog_process.BEAT_AT) + watchdog_process.BEAT.pack(*beat)
    )
    reader, descriptor = os.pipe()
    writer = os.fdopen(descriptor, "wb")  # its `close` may be called twice
    found = []

    def end(self, beat, now, guilty):
        found.extend(guilty)

    monkeypatch.setattr(watchdog_process.WatchdogProcess, "_end", end)
    # After this time the process has ended, as far as the watcher knows.
    timer = threading.Timer(30 if ended else 1.5, writer.close)
    with subprocess.Popen(["sleep", "1000"]) as child, memory.open("rb") as file:
        monkeypatch.setattr(watchdog_process.os, "getppid", lambda: child.pid)
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
        timer.start()
        watchdog_process.WatchdogProcess(
            pid=child.pid,
            process=0,
            processes=processes,
            folder=str(tmp_path),
            group="g",
            life=reader,
            memory=file.fileno(),
            dump=0,
            leave=0,
        ).run()
        child.kill()
    timer.cancel()
    timer.join()
    writer.close()
    os.close(reader)
    assert found == [0] * ended


@pytest.mark.parametrize(
    ("polls", "seconds"),
    [
        ([(True, 0.5), (True, 0.5)], 1.0),
        ([(True, 0.5), (False, 0.5), (True, 0.5)], 0.5),  # went on between
        ([(True, 0.5), (True, 3600.0)], 0.5),  # the whole machine was suspended
    ],
)
def test_only_the_time_of_one_stop_counts(monkeypatch, polls, seconds):
    watch = watchdog_process.WatchdogProcess(
        pid=1,
        process=0,
        processes=2,
        folder="",
        group="g",
        life=0,
        memory=0,
        dump=0,
        leave=0,
    )
    beat = watchdog_process.Beat(1, 1, 0, 0, 0.0, 1000.0)
    for is_stopped, passed_s in polls:
        monkeypatch.setattr(watch, "_is_stopped", lambda value=is_stopped: value)
        watch._count_stop(beat, passed_s)
    assert watch._stopped_s == seconds


# --- a run ----------------------------------------------------------------------------

AGENT = [
    sys.executable,
    "-m",
    "jaxdist.launch",
    "--processes",
    "2",
    "--devices-per-process",
    "1",
    "--",
]

# Training whose process GUILTY hangs in the read of a batch at the first start. It is
# slow: so each batch is a group of its own, and the loop has those before the batch.
FAULTY = (
    HEAD
    + """
import runpy
from pathlib import Path
from jaxdist.data.dataset import Dataset
folder = Path(sys.argv[sys.argv.index("--workdir") + 1])
honest = Dataset.train_batch
guilty = os.environ["JAXDIST_PROCESS_ID"] == "GUILTY"
again = (folder / "hung").exists()
def the_culprit():
    (folder / "hung").write_text(str(time.time()))
    BODY
def faulty(self, step, *rest):
    if guilty and step == BATCH and not again:
        the_culprit()
    if guilty:
        time.sleep(0.3)
    return honest(self, step, *rest)
Dataset.train_batch = faulty
runpy.run_module("jaxdist.train", run_name="__main__", alter_sys=True)
"""
)


def launch(
    workdir: Path, body: str, *, process: int, batch: int = 5
) -> subprocess.CompletedProcess:
    """Returns what `launch` ended with, for a run that hangs once."""
    code = FAULTY.replace("BODY", body).replace("GUILTY", str(process))
    code = code.replace("BATCH", str(batch))
    limits = {
        "watchdog__data_s": 6,
        "watchdog__step_s": 6,
        "watchdog__save_s": 6,
        "watchdog__compile_s": 300,
    }
    _, _, _, *flags = command(
        workdir, train__steps=24, checkpoint__every_steps=4, **limits
    )
    whole = [*AGENT, sys.executable, "-c", code, *flags]
    return subprocess.run(whole, env=environment(1), capture_output=True, text=True)


def check_run(workdir: Path, done, kind: str, *, process: int, steps=(4, 5, 6)) -> None:
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    events = read_events(workdir)
    hangs = [event for event in events if event["event"] == "hang"]
    assert {event["process"] for event in hangs} == {process}
    hang = hangs[0]
    assert hang["stopped_by_signal"] == (kind == "stopped")
    print(kind, {k: v for k, v in hang.items() if k != "stacks"})
    assert hang["at_step"] in steps
    assert hang["step"] < 6
    assert "the_culprit" in hang["stacks"]
    assert "the_culprit" in done.stdout + done.stderr
    after_s = hang["time"] - float((workdir / "hung").read_text())
    print(f"{kind}: event {after_s:.1f} s after the hang began")
    lost = [event for event in events if event["event"] == "peer_lost"]
    assert [(e["process"], e["exit_code"]) for e in lost] == [(process, EXIT_HANG)]
    rows = read_rows(workdir).train
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert {row["slowest_process"] for row in rows[-3:]} == {process}
    assert {e["process"] for e in events if e["event"] == "straggler"} == {process}
    assert not (workdir / ".beats").exists()


@pytest.mark.slow
def test_a_run_whose_process_hangs_with_the_interpreter_lock_is_begun_again(tmp_path):
    done = launch(tmp_path / "run", HANGS["lock held"], process=1)
    check_run(tmp_path / "run", done, "lock held", process=1)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("kind", HANGS)
def test_every_kind_of_hang_in_a_run(tmp_path, kind, process):
    done = launch(tmp_path / "run", HANGS[kind], process=process)
    check_run(tmp_path / "run", done, kind, process=process)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_stop_in_the_first_step_is_found_before_jax_ends_the_others(
    tmp_path, process
):
    """The limit of that step is 306 s, as it may compile."""
    done = launch(tmp_path / "run", HANGS["stopped"], process=process, batch=0)
    check_run(tmp_path / "run", done, "stopped", process=process, steps=(1,))


SAVING = """
from jaxdist.checkpoint.manager import CheckpointManager
honest_start = CheckpointManager._start
def faulty_start(self, step, *rest):
    if guilty and step == 8 and not again:
        the_culprit()
    return honest_start(self, step, *rest)
Dataset.train_batch, CheckpointManager._start = honest, faulty_start
runpy."""


@pytest.mark.slow
def test_of_processes_that_are_level_the_one_that_does_not_wait_is_told_apart(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        sys.modules[__name__], "FAULTY", FAULTY.replace("\nrunpy.", SAVING)
    )
    done = launch(tmp_path / "run", HANGS["lock held"], process=1)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    events = read_events(tmp_path / "run")
    hangs = {e["process"]: e for e in events if e["event"] == "hang"}
    assert hangs[1]["phase"] == "save"
    assert hangs[1]["at_step"] == 8
    assert not hangs[1]["waits_for_others"]
    assert "the_culprit" in hangs[1]["stacks"]
    assert 0 not in hangs or hangs[0]["waits_for_others"]
    lost = [event for event in events if event["event"] == "peer_lost"]
    assert [(e["process"], e["exit_code"]) for e in lost] == [(1, EXIT_HANG)]


# Training whose process 1, or the lone one, never finds its devices at the first start.
EARLY = (
    HEAD
    + """
import runpy, jax
from pathlib import Path
mark = Path(sys.argv[sys.argv.index("--workdir") + 1] + ".hung")
def the_culprit():
    mark.touch()
    time.sleep(1000)
if os.environ.get("JAXDIST_PROCESS_ID", "1") == "1" and not mark.exists():
    jax.local_device_count = the_culprit
runpy.run_module("jaxdist.train", run_name="__main__", alter_sys=True)
"""
)


def early(workdir: Path, *agent: str, **changes) -> subprocess.CompletedProcess:
    _, _, _, *flags = command(workdir, train__steps=6, **changes)
    whole = [*agent, sys.executable, "-c", EARLY, *flags]
    return subprocess.run(
        whole, env=environment(1), capture_output=True, text=True, timeout=180
    )


def test_a_process_that_never_finds_its_devices_ends_with_76(tmp_path):
    done = early(tmp_path / "run", watchdog__start_s=RUN_LIMIT_S)
    assert done.returncode == EXIT_HANG, (done.returncode, done.stderr[-2000:])
    (event,) = read_events(tmp_path / "run")
    assert event["event"] == "hang"
    assert event["phase"] == "start"
    assert "the_culprit" in event["stacks"]
    assert event["at_step"] == 0
    assert event["waited_s"] >= RUN_LIMIT_S
    assert not event["waits_for_others"]


LOOKS_FOR_WATCHER = (
    HEAD
    + """
import runpy, jax
from pathlib import Path
def commands():
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [Path(f"/proc/{n}/cmdline").read_bytes() for n in children.split()]
def look():
    for _ in range(100):  # a process just begun has no command line yet
        if any(b"watchdog_process" in command for command in commands()):
            os._exit(42)
        time.sleep(0.05)
    os._exit(43)
jax.local_device_count = look
runpy.run_module("jaxdist.train", run_name="__main__", alter_sys=True)
"""
)


def test_the_watch_begins_before_devices_are_found(tmp_path):
    _, _, _, *flags = command(tmp_path / "run", train__steps=6)
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_FOR_WATCHER, *flags],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode in (42, 43), done.stderr[-2000:]  # devices were looked for
    assert done.returncode == 42


@pytest.mark.slow
def test_the_watch_leaves_no_folder_where_the_config_is_refused(tmp_path):
    (tmp_path / "run.hung").touch()
    done = early(tmp_path / "run", *AGENT, batch__global_size=7)
    assert done.returncode == EXIT_CONFIG, done.stdout[-2000:]
    assert "global_size" in done.stdout, done.stdout[-2000:]
    done = early(tmp_path / "run", watchdog__start_s=-1)  # nor does it end it first
    assert done.returncode == EXIT_CONFIG, done.stderr[-2000:]
    assert "watchdog.start_s: got -1" in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_of_a_run_whose_process_never_finds_its_devices_that_is_named_and_it_begins_again(
    tmp_path,
):
    done = early(tmp_path / "run", *AGENT, watchdog__start_s=15)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    events = read_events(tmp_path / "run")
    (hang,) = [event for event in events if event["event"] == "hang"]
    assert (hang["process"], hang["phase"]) == (1, "start")
    assert "the_culprit" in hang["stacks"]
    lost = [event for event in events if event["event"] == "peer_lost"]
    assert [(e["process"], e["exit_code"]) for e in lost] == [(1, EXIT_HANG)]
    assert [row["step"] for row in read_rows(tmp_path / "run").train] == list(
        range(1, 7)
    )


# The command with a callback more, or with a start of its own, in place of AROUND.
COMMAND = (
    HEAD
    + """
from jaxdist import every, library, train
from jaxdist.distributed import initialize
from jaxdist.trainer import exit_code
from jaxdist.trainer.preemption import own_process
AROUND
with own_process():
    raise SystemExit(exit_code.exit_code(train.main))
"""
)

HOOKED = """
def the_culprit(view):
    if view.step == 6:
        time.sleep(1000)
callbacks_of_train = library.run_callbacks
def run_callbacks(*run):
    return [*callbacks_of_train(*run), every(3, the_culprit)]
library.run_callbacks = run_callbacks
"""


def test_a_hook_that_hangs_is_found_and_the_ledger_has_the_life(tmp_path):
    limits = {
        "watchdog__data_s": RUN_LIMIT_S,
        "watchdog__step_s": RUN_LIMIT_S,
        "watchdog__slow_steps": 1,
        "model__dropout": 0.0,  # it compiles in less time
    }
    _, _, _, *flags = command(tmp_path / "run", train__steps=12, **limits)
    code = COMMAND.replace("AROUND", HOOKED)
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == EXIT_HANG, (done.returncode, done.stderr[-2000:])
    (event,) = [e for e in read_events(tmp_path / "run") if e["event"] == "hang"]
    assert (event["phase"], event["at_step"]) == ("step", 6)
    assert "the_culprit" in event["stacks"]
    assert "paused_step" in event["stacks"]
    (life,) = read_lives(tmp_path / "run")
    assert life.failed
    assert not life.ended
    assert (life.phase, life.first) == ("step", 0)
    assert life.step >= 3
    assert life.buckets["hooks"] > 0  # where the time of a hook is booked


NEVER_JOINS = """
def the_culprit():
    time.sleep(1000)
if os.environ["JAXDIST_PROCESS_ID"] == "1":
    initialize.prepare = the_culprit
"""


@pytest.mark.slow
def test_a_process_that_never_joins_is_found_and_so_is_the_one_that_waits(tmp_path):
    """The watchdog watches from the first line of the command, before there is a group."""
    _, _, _, *flags = command(tmp_path / "run", watchdog__start_s=3.5)
    code = COMMAND.replace("AROUND", NEVER_JOINS)
    group = start_group(
        [sys.executable, "-c", code, *flags], 2, 1, stderr=subprocess.STDOUT
    )
    output = [process.communicate(timeout=180)[0] for process in group]
    assert [process.returncode for process in group] == [EXIT_HANG] * 2, output
    hangs = {event["process"]: event for event in read_events(tmp_path / "run")}
    assert {event["event"] for event in hangs.values()} == {"hang"}
    assert "the_culprit" in hangs[1]["stacks"]
    assert not hangs[1]["waits_for_others"]
    # the other may have ended before it was itself reported
    assert 0 not in hangs or hangs[0]["waits_for_others"]
    assert all(event["phase"] == "start" for event in hangs.values())


# --- peers ----------------------------------------------------------------------------

JOIN = """
import os, sys
import jax
from jaxdist.config import ConfigError
from jaxdist.distributed import consistency, initialize
initialize.join_processes()
consistency.agree(lambda: {"data": "the same"})
try:
    consistency.agree(lambda: {"data": "other" if jax.process_index() == 2 else "usual", "same": 1})
except ConfigError as error:
    print("refused:", error)
"""


def test_a_peer_that_differs_is_named_by_all_without_a_collective(tmp_path):
    agent = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--processes",
        "3",
        "--devices-per-process",
        "1",
        "--",
    ]
    done = subprocess.run(
        [*agent, sys.executable, "-c", JOIN],
        env=environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    refused = [
        line.split("refused: ")[1]
        for line in done.stdout.splitlines()
        if "refused: " in line
    ]
    wanted = "process 2 differs from 2 of 3 processes: data is other, theirs is usual; start all with the same"
    assert refused == [wanted] * 3


def test_the_limit_of_a_step_is_that_of_the_median(tmp_path):
    draw = random.Random(0)
    for slow_steps in (1, 3, 20):
        config = WatchdogConfig(step_s=10, slow_steps=slow_steps)
        watch = Watchdog(config, tmp_path, enabled=False)
        for _ in range(300):
            watch._step_times.append(draw.choice([0.01, 0.4, 0.6, 3.0, 9.0, 40.0]))
            median = sorted(watch._step_times)[len(watch._step_times) // 2]
            assert watch._limit_s("step") == max(10, slow_steps * median)
