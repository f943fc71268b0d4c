"""The agent with small commands in place of training: losses, restarts, sizes, signals,
no orphans.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import ConfigError
from jaxdist.distributed.cluster import ClusterInfo, find_cluster, first_host
from jaxdist.distributed.local_devices import device_environment, visible_gpus
from jaxdist.distributed.stop_signals import stop_signals
from jaxdist.operations.launch import endings, growth
from jaxdist.operations.launch import supervisor as supervisor_module
from jaxdist.operations.launch.endings import describe_exit, lost_process
from jaxdist.operations.launch.run_progress import (
    ProgressReader,
    default_workdir,
    run_folder,
)
from jaxdist.operations.launch.supervisor import Supervisor, SupervisorOptions
from jaxdist.telemetry.metrics import MetricsWriter, read_events
from jaxdist.trainer import elastic

# Each process appends "gang rank size" to the file `starts`, then does what the script
# says.
HEAD = """
import os, signal, sys, time
folder, rank = sys.argv[1], int(os.environ.get("JAXDIST_PROCESS_ID", "0"))
size = int(os.environ.get("JAXDIST_NUM_PROCESSES", "1"))
def gang(): return len({line.split()[2] for line in open(folder + "/starts")})  # 1, 2, ...
with open(folder + "/starts", "a") as starts:
    starts.write(f"{rank} {size} {os.environ.get('JAXDIST_COORDINATOR')} {os.getpid()}\\n")
def write_step(step):
    os.makedirs(folder + "/run", exist_ok=True)
    with open(folder + "/run/metrics.jsonl", "a") as rows: rows.write('{"step": %d, "loss": 1.0}\\n' % step)
def kill_me(): os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch):
    """Delays of a hundredth before restarts without progress."""
    monkeypatch.setattr(endings, "_BACKOFF_S", 0.005)


def script(folder: Path, text: str) -> list[str]:
    command = [sys.executable, "-S", "-c", HEAD + text, str(folder)]
    return [*command, "--workdir", str(folder / "run")]


def supervise(
    folder: Path,
    text: str,
    processes: int = 2,
    agents: ClusterInfo | None = None,
    **options,
):
    """Returns (exit code, what the agent said)."""
    said: list[str] = []
    chosen = SupervisorOptions(script(folder, text), processes, **options)
    supervisor = Supervisor(chosen, agents or ClusterInfo(), say=said.append)
    began = time.monotonic()
    code = supervisor.run()
    assert time.monotonic() - began < 60
    return code, "\n".join(said)


def starts(folder: Path) -> list[list[str]]:
    """Returns [rank, size, coordinator, process id] of every process that began."""
    return [line.split() for line in (folder / "starts").read_text().splitlines()]


def members(group: int) -> list[int]:
    """Returns the processes of a process group; one that has ended but was not
    collected is none.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = entry.read_text().rpartition(") ")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found.append(int(entry.parent.name))
    return found


def wait_until(condition, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


# --- one gang -------------------------------------------------------------------------


def test_every_process_knows_its_place_and_its_lines_bear_its_number(tmp_path, capfd):
    code, said = supervise(
        tmp_path, "print('hello from', rank); sys.stderr.write('no newline')", 3
    )
    assert code == 0
    assert "starting 3 processes" in said
    found = starts(tmp_path)
    assert sorted((rank, size) for rank, size, *_ in found) == [
        ("0", "3"),
        ("1", "3"),
        ("2", "3"),
    ]
    (coordinator,) = {address for *_, address, _ in found}
    assert coordinator.startswith("127.0.0.1:")
    lines = capfd.readouterr().out.splitlines()
    assert {f"[{n}] hello from {n}" for n in range(3)} <= set(lines)
    assert {f"[{n}] no newline" for n in range(3)} <= set(lines)


def test_a_single_process_joins_no_group(tmp_path):
    assert supervise(tmp_path, "", 1)[0] == 0
    assert starts(tmp_path)[0][:3] == ["0", "1", "None"]


@pytest.mark.parametrize("code", [75, 77, 78])
def test_these_exit_codes_pass_through_without_a_restart(tmp_path, code):
    found, _ = supervise(tmp_path, f"sys.exit({code})")
    assert found == code
    assert len(starts(tmp_path)) <= 2


def test_the_others_of_a_lost_process_are_stopped_at_once_with_all_they_started(
    tmp_path,
):
    text = """
import subprocess
if rank == 0:
    subprocess.Popen(["sleep", "100"])  # what a worker process would be
    with open(folder + "/child", "w") as f: f.write("started")
    signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)
while not os.path.exists(folder + "/child"): time.sleep(0.01)
kill_me()
"""
    began = time.monotonic()
    code, said = supervise(tmp_path, text, max_restarts=0)
    assert code == 70
    assert time.monotonic() - began < 20
    assert "lost process 1 killed by SIGKILL" in said
    wait_until(lambda: not any(members(int(pid)) for *_, pid in starts(tmp_path)))


@pytest.mark.parametrize("code", ["70", "-6"])
def test_who_is_at_fault_may_say_so_though_another_ends_first(tmp_path, code, capfd):
    first = "sys.exit(70)" if code == "70" else "os.abort()"
    text = f"if rank == 0: {first}\ntime.sleep(0.5); sys.exit('why')"
    ended, said = supervise(tmp_path, text, max_restarts=0)
    assert ended == 1
    assert "lost process 1 ended with exit code 1" in said
    assert "[1] why" in capfd.readouterr().out


def test_the_end_of_a_process_that_is_not_at_fault_is_a_loss_where_no_other_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor_module, "_CAUSE_S", 0.2)
    code, said = supervise(
        tmp_path, "sys.exit(70) if rank else time.sleep(100)", max_restarts=0
    )
    assert code == 70
    assert "lost process 1 ended with exit code 70" in said


# --- restarts -------------------------------------------------------------------------


def test_a_crash_loop_stops_and_says_why(tmp_path):
    text = "write_step(3); print('cannot open the thing'); sys.exit(1 if rank else 0)"
    code, said = supervise(tmp_path, text, max_restarts=2)
    assert code == 1
    assert said.count("starting 2 processes") == 3
    assert (
        "3 failures without progress beyond step 3, --max-restarts 2: 3 x process 1 ended with"
        in said
    )
    assert "cannot open the thing" in said.splitlines()[-1]
    lost = [e for e in read_events(tmp_path / "run") if e["event"] == "peer_lost"]
    assert len(lost) == 3
    assert lost[0]["process"] == 1
    assert lost[0]["step"] == 3
    assert len({port for _, _, port, _ in starts(tmp_path)}) == 3, (
        "each start has its own port"
    )


def test_a_kill_before_there_is_a_workdir_leaves_its_event(tmp_path):
    code, _ = supervise(tmp_path, "kill_me()", 1, max_restarts=0)
    (lost,) = read_events(tmp_path / "run")
    assert code == 70
    assert (lost["event"], lost["why"]) == (
        "peer_lost",
        "process 0 killed by SIGKILL",
    )


def test_progress_refills_the_budget(tmp_path):
    text = """
if rank == 0: write_step(gang()); time.sleep(100 if gang() < 6 else 0)
while not os.path.exists(folder + "/run/metrics.jsonl"): time.sleep(0.01)
if rank == 1:
    while f'"step": {gang()},' not in open(folder + "/run/metrics.jsonl").read(): time.sleep(0.01)
    if gang() < 6: kill_me()
"""
    code, said = supervise(tmp_path, text, max_restarts=1)
    assert code == 0
    assert said.count("starting") == 6


def test_steps_done_again_are_no_progress(tmp_path):
    text = "write_step(2); write_step(1); kill_me()"
    code, said = supervise(tmp_path, text, 1, max_restarts=2)
    assert code == 70
    assert said.count("starting") == 3


def test_the_capacity_file_is_read_before_each_start(tmp_path):
    capacity = tmp_path / "capacity"
    capacity.write_text("3")
    text = f"""
size_next = {{3: "2", 2: "4"}}
time.sleep(0.1)
if size in size_next:
    if rank == 0:
        open({str(capacity)!r}, "w").write(size_next[size]); write_step(9 - size); kill_me()
    time.sleep(100)
"""
    code, said = supervise(tmp_path, text, 4, min_processes=1, capacity_file=capacity)
    assert code == 0, said
    assert [line for line in said.splitlines() if "starting" in line] == [
        f"starting {n} processes" for n in (3, 2, 4)
    ]


def test_a_capacity_file_that_is_being_written_is_read_again(tmp_path):
    (capacity := tmp_path / "capacity").write_text("1")
    said: list[str] = []
    writer = threading.Timer(0.3, lambda: capacity.write_text("2"))

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("lost"):
            capacity.write_text("")
            writer.start()

    text = "if gang() == 1: write_step(1); kill_me()"
    options = SupervisorOptions(
        script(tmp_path, text), 3, min_processes=1, capacity_file=capacity
    )
    assert Supervisor(options, ClusterInfo(), say=say).run() == 0
    writer.join()
    assert [line for line in said if "starting" in line] == [
        "starting 1 processes",
        "starting 2 processes",
    ]


def test_a_process_lost_twice_in_a_row_is_done_without(tmp_path):
    text = """
time.sleep(0.1)
if rank == 1 and size == 3: kill_me()
if size == 3: time.sleep(100)
"""
    code, said = supervise(tmp_path, text, 3, min_processes=2)
    assert code == 0
    assert "slot 1 was lost twice in a row" in said
    assert said.count("starting 3") == 2
    assert said.count("starting 2") == 1
    (tmp_path / "starts").unlink()
    code, said = supervise(tmp_path, text, 3, max_restarts=2)
    assert code == 70
    assert said.count("starting 3") == 3, "without --min-processes all are needed"


def test_a_slot_that_was_given_up_is_tried_again_after_progress(tmp_path):
    text = """
time.sleep(0.1)
if rank == 1 and size == 3 and gang() < 3: kill_me()
if rank == 0 and gang() == 3: write_step(9); kill_me()
if gang() < 4: time.sleep(100)
"""
    code, said = supervise(tmp_path, text, 3, min_processes=2)
    assert code == 0
    begun = [line for line in said.splitlines() if "starting" in line]
    assert begun == [f"starting {n} processes" for n in (3, 3, 2, 3)]


def test_too_little_capacity_waits(tmp_path):
    capacity = tmp_path / "capacity"
    capacity.write_text("1")
    said: list[str] = []
    options = SupervisorOptions(script(tmp_path, ""), 2, capacity_file=capacity)

    def say(line: str) -> None:
        said.append(line)
        if "waiting" in line:
            capacity.write_text("2")

    assert Supervisor(options, ClusterInfo(), say=say).run() == 0
    assert said[0].startswith("waiting: 1 processes could run")
    assert "2 are needed" in said[0]


CONFIG_OF_8 = (
    '{"mesh": {"data": -1, "fsdp": 1, "tensor": 1, "pipeline": 1, "expert": 1, "context": 1, "dcn": {}},'
    ' "batch": {"global_size": 8, "accumulation": 1}, "pipeline": {"microbatches": 0}}'
)


def test_only_sizes_with_a_legal_mesh_are_started(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(CONFIG_OF_8)
    capacity = tmp_path / "capacity"
    capacity.write_text("3")
    options = {"min_processes": 1, "capacity_file": capacity, "devices_per_process": 2}
    code, said = supervise(tmp_path, "", 4, **options)
    assert code == 0
    assert "3 processes could run, but no legal mesh has them; taking 2" in said
    assert {size for _, size, *_ in starts(tmp_path)} == {"2"}


def first_start(folder: Path, text: str, **options):
    """Returns (exit code, what was said, sizes in their order) of a start with capacity
    3 of 4.
    """
    folder.mkdir()
    (capacity := folder / "capacity").write_text("3")
    code, said = supervise(folder, text, 4, capacity_file=capacity, **options)
    return code, said, list(dict.fromkeys(size for _, size, *_ in starts(folder)))


def test_a_first_start_that_is_refused_is_tried_with_fewer(tmp_path):
    refuses = "sys.exit(78 if size == 3 else 0)"
    code, said, sizes = first_start(tmp_path / "fewer", refuses, min_processes=1)
    assert (code, sizes) == (0, ["3", "2"])
    assert "3 processes could run, but ended with 78; taking 2" in said
    code, _, sizes = first_start(tmp_path / "least", refuses, min_processes=3)
    assert (code, sizes) == (78, ["3"])
    code, _, sizes = first_start(tmp_path / "none", "sys.exit(78)", min_processes=1)
    assert (code, sizes) == (78, ["3", "2", "1"])
    code, _, sizes = first_start(
        tmp_path / "begun", "write_step(1); sys.exit(78)", min_processes=1
    )
    assert (code, sizes) == (78, ["3"]), "after a step config.json tells what is legal"


# --- growth while it runs -------------------------------------------------------------

# Of three processes one can run at first, and all once it has made a step; then SIGTERM
# does what END says.
GROWS = """
if size == 1 and gang() == 1:
    def stop(*_): END
    signal.signal(signal.SIGTERM, stop)
    open(folder + "/capacity", "w").write("3")
    write_step(1)
    for _ in range(200): print("a word wakes the agent"); time.sleep(0.1)
"""


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(growth, "LOOK_S", 0.05)
    monkeypatch.setattr(growth, "STEADY_S", 0.2)


def grown(folder: Path, text: str, capacity: str = "1", **options):
    """Returns (exit code, what was said, sizes in their order) of a run that may grow
    at once.
    """
    (folder / "capacity").write_text(capacity)
    chosen = {
        "min_processes": 1,
        "max_restarts": 0,
        "grow_minutes": 1e-6,
        "grace_s": 1.0,
    } | options
    code, said = supervise(folder, text, 3, capacity_file=folder / "capacity", **chosen)
    return (
        code,
        said,
        [int(n) for n in re.findall(r"^starting (\d) processes", said, re.M)],
    )


def written(folder: Path, name: str) -> list[dict]:
    return [event for event in read_events(folder / "run") if event["event"] == name]


def test_a_group_that_can_be_larger_saves_and_starts_again(tmp_path, at_once):
    code, said, sizes = grown(tmp_path, GROWS.replace("END", "sys.exit(75)"))
    assert (code, sizes) == (
        0,
        [1, 3],
    )
    assert "3 processes can run: the 1 that run are asked to save" in said
    (grew,) = written(tmp_path, "grow")
    assert (grew["step"], grew["processes_before"], grew["processes"]) == (1, 1, 3)
    assert not written(tmp_path, "peer_lost")


def test_a_run_that_ends_while_it_is_asked_to_grow_is_done(tmp_path, at_once):
    code, said, sizes = grown(tmp_path, GROWS.replace("END", "sys.exit(0)"))
    assert (code, sizes) == (0, [1])
    assert "are asked to save" in said
    assert not read_events(tmp_path / "run")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("sys.exit(1)", "process 0 ended with exit code 1"),
        ("None", "process 0 did not stop in time to grow"),
        ("kill_me()", "process 0 killed by SIGKILL"),
    ],
)
def test_a_growth_whose_save_fails_is_a_loss_and_starts_larger(
    tmp_path, at_once, end, why
):
    code, said, sizes = grown(tmp_path, GROWS.replace("END", end))
    assert (code, sizes) == (0, [1, 3])
    assert f"lost {why} at step 1" in said
    assert [event["why"] for event in written(tmp_path, "peer_lost")] == [why]
    assert not written(tmp_path, "grow")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(75)", 75), ("sys.exit(1)", 70)])
def test_a_stop_from_outside_during_a_growth_ends_the_run(tmp_path, at_once, end, code):
    again = f"(signal.signal(signal.SIGTERM, lambda *_: {end}), os.kill(os.getppid(), signal.SIGTERM))"
    found, said, sizes = grown(tmp_path, GROWS.replace("END", again))
    assert (found, sizes) == (code, [1])
    assert "are asked to save" in said
    assert not written(tmp_path, "grow")


@pytest.mark.parametrize("end", ["kill_me()", "sys.exit(1)", "sys.exit(78)"])
def test_a_growth_that_makes_no_progress_is_undone(tmp_path, at_once, end):
    """The run is no worse off than without it: --max-restarts 0 would end it at the
    first loss.
    """
    text = GROWS.replace("END", "sys.exit(75)") + f"\nif size == 3: {end}"
    code, said, sizes = grown(tmp_path, text)
    assert (code, sizes) == (
        0,
        [1, 3, 1],
    )
    assert "no progress since the growth: back to 1 processes" in said


def test_a_growth_that_fails_later_is_a_loss_like_any_other(tmp_path, at_once):
    text = (
        GROWS.replace("END", "sys.exit(75)")
        + "\nif size == 3 and gang() == 2: write_step(2); kill_me()"
    )
    (ended := tmp_path / "ended").mkdir()
    assert grown(ended, text)[0] == 70, "--max-restarts 0"
    code, said, sizes = grown(tmp_path, text, max_restarts=1)
    assert (code, sizes) == (0, [1, 3, 3])
    assert "back to" not in said


NO_GROWTH = {
    "no step": (GROWS.replace("write_step(1)", "None"), "1", {}),
    "off": (GROWS, "1", {"grow_minutes": 0.0}),
    "too early": (GROWS, "1", {"grow_minutes": 1.0}),
    "no file any more": (
        GROWS.replace('open(folder + "/capacity", "w").write("3")', ""),
        "1",
        {},
    ),
    "no number": (GROWS.replace('write("3")', 'write("many")'), "1", {}),
    "fewer": (GROWS.replace('write("3")', 'write("0")'), "1", {}),
}


@pytest.mark.parametrize("why", NO_GROWTH)
def test_a_group_stays_as_it_is(tmp_path, at_once, why):
    text, capacity, options = NO_GROWTH[why]
    if why == "no file any more":
        text = text.replace(
            "write_step(1)", 'os.remove(folder + "/capacity"); write_step(1)'
        )
    text = text.replace("range(200)", "range(5)").replace("END", "sys.exit(75)")
    code, said, sizes = grown(tmp_path, text, capacity, **options)
    assert (code, sizes) == (0, [1])
    assert "are asked" not in said


@pytest.mark.parametrize(("first", "sizes"), [("2", [2]), ("1", [1, 2, 4])])
def test_a_group_grows_to_sizes_with_a_legal_mesh(tmp_path, at_once, first, sizes):
    """Three could run, then four."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(CONFIG_OF_8)
    (capacity := tmp_path / "capacity").write_text(first)
    text = """
def stop(*_): sys.exit(75)
signal.signal(signal.SIGTERM, stop)
if rank == 0: open(folder + "/capacity", "w").write("3" if gang() == 1 else "4"); write_step(gang())
for _ in range(15 if size < 4 else 0): print("a word"); time.sleep(0.1)
"""
    options = {"min_processes": 1, "devices_per_process": 2, "grow_minutes": 1e-6}
    code, said = supervise(tmp_path, text, 4, capacity_file=capacity, **options)
    assert code == 0, said
    found = re.findall(r"^starting (\d) processes", said, re.M)
    assert [int(size) for size in found] == list(sizes), said


class GroupWithTimer:
    """A growth timer on a clock of the test, asked twice a second."""

    def __init__(self, minimum_s: float):
        self.now = 0.0
        self.larger_size = 4  # what there is room for; 0: for no more than now
        self.looks: list[float] = []
        self.timer = growth.GrowthTimer(minimum_s, clock=lambda: self.now)

    def _look(self) -> int:
        self.looks.append(self.now)
        return self.larger_size

    def run_for(self, seconds: int) -> list[float]:
        """Returns the times at which the timer said that growing was due."""
        due = []
        for _ in range(2 * seconds):
            self.now += 0.5
            if self.timer.due(self._look):
                due.append(self.now)
        return due


def test_nobody_looks_for_capacity_before_the_minimum_time():
    group = GroupWithTimer(minimum_s=600.0)
    assert not group.run_for(599)
    assert not group.looks
    assert group.run_for(30), "room has been there all the time"


def test_growth_is_due_once_capacity_has_lasted():
    group = GroupWithTimer(minimum_s=600.0)
    first, *_ = group.run_for(630)
    assert 600 + growth.STEADY_S <= first <= 600 + growth.STEADY_S + growth.LOOK_S
    assert len(group.looks) <= 30 / growth.LOOK_S + 1


def test_capacity_that_comes_and_goes_is_not_grown_into():
    group = GroupWithTimer(minimum_s=600.0)
    assert not group.run_for(600)
    group.looks.clear()

    for group.larger_size in (4, 0, 0) * 20:
        assert not group.run_for(int(growth.LOOK_S))

    assert len(group.looks) >= 60
    group.larger_size = 4
    assert group.run_for(30)


def test_a_restart_begins_the_minimum_time_again():
    group = GroupWithTimer(minimum_s=600.0)
    assert group.run_for(630)
    group.timer.begin()
    assert not group.run_for(600)
    assert group.run_for(30)


def test_each_failed_growth_doubles_the_time_until_one_succeeds():
    group = GroupWithTimer(minimum_s=600.0)
    group.timer.failed()
    group.timer.failed()
    group.timer.begin()
    assert group.timer.wait_s == 2400
    assert not group.run_for(2400)
    assert group.run_for(30)

    group.timer.succeeded()
    group.timer.begin()
    assert group.timer.wait_s == 600
    assert not group.run_for(600)
    assert group.run_for(30)


def test_a_minimum_of_0_never_grows():
    group = GroupWithTimer(minimum_s=0.0)
    assert not group.run_for(10_000)
    assert not group.looks


# --- several agents -------------------------------------------------------------------


def test_an_agent_of_several_leaves_restarts_to_the_scheduler(tmp_path):
    agents = ClusterInfo("Slurm", 3, 1, "node7", 61500)
    text = """
while rank == 2 and len(open(folder + "/starts").readlines()) < 2: time.sleep(0.01)
if rank != 2: time.sleep(60)
kill_me()
"""
    code, said = supervise(tmp_path, text, agents=agents)
    assert code == 70
    assert "starting 2 processes of 6" in said
    found = starts(tmp_path)
    assert sorted(rank for rank, *_ in found) == ["2", "3"]
    assert {(size, address) for _, size, address, _ in found} == {("6", "node7:61500")}


SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "gpu[017-020]",
    "SLURM_JOB_ID": "7",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "3",
    "JOBSET_NAME": "run",
    "REPLICATED_JOB_NAME": "workers",
    "JAXDIST_NUM_PODS": "4",
}
GIVEN = {"JAXDIST_AGENTS": "2", "JAXDIST_AGENT": "1", "JAXDIST_AGENTS_AT": "head:7000"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
}
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (SLURM, ("Slurm", 4, 2, "gpu017")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (None, 1, 0, "127.0.0.1")),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
            (None, 1, 0, "127.0.0.1"),
        ),
        (OPEN_MPI, ("Open MPI", 4, 1, "10.96.0.1")),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            ("Open MPI", 4, 1, "127.0.0.1"),
        ),
        (KUBERNETES, ("Kubernetes", 4, 3, "run-workers-0-0.run")),
        (TPU, ("a multi-host TPU", 2, 1, "t0")),
        (GIVEN | SLURM, ("its environment", 2, 1, "head")),
        (TORCHRUN, ("torchrun", 4, 3, "head")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, ("torchrun", 4, 3, "127.0.0.1")),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, (None, 1, 0, "127.0.0.1")),
        (GIVEN | TORCHRUN, ("its environment", 2, 1, "head")),
        # srun torchrun: the inner one
        (SLURM | TORCHRUN | AGENT_STORE, ("torchrun", 4, 3, "head")),
        # a script's exports
        (SLURM | {"WORLD_SIZE": "8", "MASTER_ADDR": "head"}, ("Slurm", 4, 2, "gpu017")),
        ({}, (None, 1, 0, "127.0.0.1")),
    ],
)
def test_a_scheduler_is_detected(environ, place):
    found = find_cluster(environ)
    assert (found.launcher, found.number, found.index, found.host) == place
    assert (found.port == 0) == (found.number == 1)
    assert find_cluster(environ) == found
    # all agents of a start agree on the port; the next start has another
    if place[0] == "Slurm":
        assert find_cluster(environ | {"SLURM_PROCID": "3"}).port == found.port
        assert find_cluster(environ | {"SLURM_RESTART_COUNT": "1"}).port != found.port


@pytest.mark.parametrize(
    "changed",
    [{"JAXDIST_AGENT": "5"}, {"JAXDIST_AGENT": "-1"}, {"JAXDIST_AGENTS": "0"}],
)
def test_an_agent_is_one_of_those_there_are(changed):
    with pytest.raises(
        ConfigError, match="started by its environment: its number must be >= 0"
    ):
        find_cluster(GIVEN | changed)


def test_variables_of_torchrun_that_say_what_the_scheduler_says_change_nothing():
    assert find_cluster(SLURM | TORCHRUN | {"RANK": "2"}) == find_cluster(SLURM)


def test_torchruns_own_port_is_left_to_it():
    assert find_cluster(TORCHRUN).port == 29500
    # a service "master" of Kubernetes has such a variable
    for one in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        assert find_cluster(one | {"MASTER_PORT": "tcp://10.0.0.3:80"}) == ClusterInfo()
    environ = TORCHRUN | AGENT_STORE
    port = find_cluster(environ).port
    assert port >= 61440
    assert port == find_cluster(environ | {"RANK": "0"}).port
    assert find_cluster(environ | {"TORCHELASTIC_RESTART_COUNT": "1"}).port != port


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        (
            TORCHRUN | {"RANK": "4"},
            "agent 4 of 4, started by torchrun: its number must be >= 0",
        ),
        (TORCHRUN | {"RANK": "one"}, "RANK=one: must be a whole number"),
        (
            TORCHRUN | {"MASTER_ADDR": ""},
            "WORLD_SIZE=4, but MASTER_ADDR not set; unset it to run alone",
        ),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2, but RANK, MASTER_ADDR, MASTER_PORT not set",
        ),
        (
            SLURM | TORCHRUN,
            "WORLD_SIZE=4, RANK=3, but this is process 2 of 4 of Slurm; unset RANK and WORLD",
        ),
        (TPU | TORCHRUN, "but this is process 1 of 2 of a multi-host TPU"),
    ],
)
def test_torchruns_variables_that_cannot_be_are_refused(environ, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)):
        find_cluster(environ)


def test_first_host_of_a_slurm_list():
    lists = {
        "a": "a",
        "a,b": "a",
        "gpu[017-020,33],b": "gpu017",
        "n[3,5]": "n3",
        "r[1-2]-x": "r1-x",
    }
    assert {given: first_host(given) for given in lists} == lists


# --- signals --------------------------------------------------------------------------

SAVES = """
def save(*_): time.sleep(0.2); open(folder + f"/saved{rank}", "w").close(); sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(folder + f"/ready{rank}", "w").close()
time.sleep(100)
"""


def launched(folder: Path, text: str, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxdist.launch", "--processes", "2", *flags, "--"]
    agent = subprocess.Popen(
        [*command, *script(folder, text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(
        lambda: (
            agent.poll() is not None
            or all((folder / f"ready{n}").exists() for n in (0, 1))
        )
    )
    assert agent.poll() is None, agent.communicate()[0]
    return agent


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
)
def test_a_signal_to_the_agent_reaches_all_and_75_passes_through(
    tmp_path, number, monkeypatch
):
    monkeypatch.setenv("JAXDIST_STOP_SIGNALS", "SIGUSR1")
    agent = launched(tmp_path, SAVES)
    agent.send_signal(number)
    assert agent.wait(20) == 75
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_a_preempted_process_stops_the_others_in_order(tmp_path):
    agent = launched(tmp_path, SAVES)
    os.kill(int(starts(tmp_path)[0][-1]), signal.SIGTERM)
    assert agent.wait(20) == 75
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_who_does_not_stop_in_time_is_killed(tmp_path):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SAVES.splitlines()[
        -2
    ].replace("SAVES", "")
    agent = launched(
        tmp_path,
        f"write_step(rank)\n{deaf}\nwrite_step(5)\ntime.sleep(100)",
        "--grace-seconds",
        "0.5",
    )
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 70  # steps were done that nobody saved
    assert not any(members(int(pid)) for *_, pid in starts(tmp_path))


BEGUN = """
def stop(*_): END
signal.signal(signal.SIGTERM, stop)
os.makedirs(folder + "/run", exist_ok=True)
with open(folder + "/run/events.jsonl", "a") as rows: rows.write('{"time": 1.0, "event": "start", "step": 50}\\n')
open(folder + f"/ready{rank}", "w").close()
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(1)", 70),
        ("sys.exit(1 if rank else 75)", 70),
        ("kill_me()", 70),
        (
            "(time.sleep(0.5), os.abort()) if rank else sys.exit(75)",
            75,
        ),  # the others may hear of its end first
    ],
)
def test_75_only_where_all_is_saved(tmp_path, end, code):
    """No row tells of the steps since the last checkpoint, as with a large
    train.log_every.
    """
    agent = launched(tmp_path, BEGUN.replace("END", end))
    agent.send_signal(signal.SIGTERM)
    said = agent.communicate(timeout=20)[0].decode()
    assert agent.returncode == code, said
    assert ("asked to stop, but process" in said) == (code == 70), said


def test_kill_9_of_the_agent_leaves_no_orphan(tmp_path):
    text = "import subprocess; subprocess.Popen(['sleep', '100'])\n" + SAVES
    agent = launched(tmp_path, text)
    pids = [int(pid) for *_, pid in starts(tmp_path)]
    assert all(len(members(pid)) == 2 for pid in pids)
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(map(members, pids)))


def test_stop_signals_are_checked(monkeypatch):
    given, closed = {"JAXDIST_STOP_SIGNALS": "SIGUSR1,SIGTERM"}, signal.SIGHUP
    assert stop_signals(given) == [
        signal.SIGINT,
        signal.SIGTERM,
        closed,
        signal.SIGUSR1,
    ]
    before = signal.signal(closed, signal.SIG_IGN)  # as nohup has it
    try:
        assert stop_signals({}) == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(closed, before)
    with pytest.raises(ValueError, match="SIGFOO cannot ask a run to stop"):
        stop_signals({"JAXDIST_STOP_SIGNALS": "SIGFOO"})
    for name in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD"):
        with pytest.raises(ConfigError, match=f"{name} cannot ask a run to stop"):
            stop_signals({"JAXDIST_STOP_SIGNALS": f"SIGUSR1 {name}"})


# --- arithmetic -----------------------------------------------------------------------

AXES = ("pipeline", "tensor", "context", "expert", "fsdp", "data")
SIZES = st.sampled_from([1, 1, 2, 3, 4])


def parts_of_a_batch(layout: elastic.ElasticLayout, microbatches: int) -> int:
    """Counts the parts whose rows a device handles at once: one by one in time
    (accumulation, microbatches), side by side on shards.
    """
    shards = layout.axes["data"] * layout.axes["fsdp"] * layout.axes["expert"]
    parts = layout.accumulation * shards
    stages = layout.axes["pipeline"]
    if stages > 1:
        parts *= microbatches or 4 * stages
    return parts


class Refit(NamedTuple):
    """A layout, and the one that is found for another count of devices."""

    before: elastic.ElasticLayout
    after: elastic.ElasticLayout | None
    devices: int
    global_size: int
    microbatches: int

    def rows_of_a_part(self, layout: elastic.ElasticLayout) -> float:
        return self.global_size / parts_of_a_batch(layout, self.microbatches)


@st.composite
def refits(draw):
    sizes = draw(st.tuples(*[SIZES] * len(AXES)))
    before = elastic.ElasticLayout(
        dict(zip(AXES, sizes, strict=True)), accumulation=draw(st.integers(1, 4))
    )
    rows_of_a_part = draw(st.integers(1, 6))
    microbatches = draw(st.integers(0, 4))
    devices = draw(st.integers(1, 48))
    global_size = parts_of_a_batch(before, microbatches) * rows_of_a_part
    after = elastic.fit(
        before,
        devices=devices,
        global_size=global_size,
        microbatches=microbatches,
        dcn={},
    )
    return Refit(before, after, devices, global_size, microbatches)


@given(refits())
def test_a_layout_of_the_same_size_is_kept(refit):
    same = elastic.fit(
        refit.before,
        devices=full_size(refit.before),
        global_size=refit.global_size,
        microbatches=refit.microbatches,
        dcn={},
    )
    assert same == refit.before


@given(refits())
def test_a_refitted_layout_uses_all_devices_and_shrinks_axes_by_whole_factors(refit):
    if refit.after is None:
        return
    assert full_size(refit.after) == refit.devices
    for axis in set(AXES) - {"data"}:
        assert refit.before.axes[axis] % refit.after.axes[axis] == 0


@given(refits())
def test_a_refitted_layout_keeps_the_batch_and_a_devices_share(refit):
    if refit.after is None:
        return
    rows = refit.rows_of_a_part(refit.after)
    assert rows.is_integer()
    assert rows <= refit.rows_of_a_part(refit.before)


@given(refits())
def test_a_refitted_layout_accumulates_no_more_than_it_must(refit):
    if refit.after is None or refit.devices == full_size(refit.before):
        return
    for accumulation in range(1, refit.after.accumulation):
        fewer = dataclasses.replace(refit.after, accumulation=accumulation)
        rows = refit.rows_of_a_part(fewer)
        assert not rows.is_integer() or rows > refit.rows_of_a_part(refit.before)


def full_size(layout: elastic.ElasticLayout) -> int:
    size = 1
    for part in layout.axes.values():
        size *= part
    return size


def test_a_refit_prefers_model_shards_and_says_when_nothing_fits():
    def fit(devices: int, global_size: int = 48, **axes: int) -> tuple | None:
        full = elastic.ElasticLayout(dict.fromkeys(AXES, 1) | axes, 1)
        found = elastic.fit(
            full, devices=devices, global_size=global_size, microbatches=0, dcn={}
        )
        return found and (
            {a: n for a, n in found.axes.items() if n > 1},
            found.accumulation,
        )

    # 12 of 48 each, then 16: too many at a time
    assert fit(3, data=4) == ({"data": 3}, 2)
    assert fit(1, data=4) == ({}, 4)
    assert fit(4, data=2, fsdp=2, tensor=2) == ({"fsdp": 2, "tensor": 2}, 2)
    assert fit(2, fsdp=4) == ({"fsdp": 2}, 2)
    assert fit(3, fsdp=4) == ({"data": 3}, 2)
    assert fit(2, tensor=2, fsdp=2) == ({"tensor": 2}, 2)
    assert fit(4, fsdp=2, expert=4) == ({"expert": 4}, 2)
    assert fit(6, expert=8) == ({"data": 3, "expert": 2}, 2)
    assert fit(3, expert=8) == ({"data": 3}, 4)
    assert fit(3, global_size=8, data=4) is None
    assert fit(8, data=4) == ({"data": 8}, 1)  # more than it was written for


def test_the_lost_process_is_named_and_its_end_described():
    assert lost_process({0: 70, 1: -9, 2: -6}) == 1
    assert lost_process({0: 70, 2: -6}) == 2
    assert lost_process({0: 70, 2: 70}) == 0
    assert lost_process({0: 75, 1: 0}) is None
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(1) == "ended with exit code 1"


def test_progress_reads_the_newest_step(tmp_path):
    progress = ProgressReader(tmp_path)
    assert progress.newest() == 0
    assert ProgressReader(None).newest() == 0
    with_metrics = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        with_metrics.write(step, {"loss": float("nan")})
    assert progress.newest() == 3
    for name in ("12", "13.orbax-checkpoint-tmp", "99999999999"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints" / "14").mkdir()  # which nothing was ever saved in
    assert progress.newest() == 12
    with_metrics.write(4, {"loss": 1.0})
    with_metrics.close()
    assert progress.newest() == 12


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        '{"num_devices": "8"}',
        '{"num_devices": 8, "num_processes": 0}',
    ],
)
def test_files_of_another_shape_say_nothing_of_progress(tmp_path, text):
    for name in ("run.json", "config.json", "metrics.jsonl"):
        (tmp_path / name).write_text(text)
    progress = ProgressReader(tmp_path)
    assert progress.newest() == 0
    assert progress.devices_per_process() is None
    config = progress.read_json("config.json")
    assert (
        config is None or elastic.fit_config(config, devices=2, full_devices=4) is None
    )
    (tmp_path / "run.json").write_text('{"num_devices": 8, "num_processes": 2}')
    assert progress.devices_per_process() == 4


def test_the_workdir_of_a_command():
    assert run_folder(["python", "-m", "jaxdist.train", "--workdir", "a/b"]) == Path(
        "a/b"
    )
    assert run_folder(["train", "--config=x.py:n=2", "--workdir=c"]) == Path("c")
    assert run_folder(["train", "--config", "gpt2:tiny"]) == Path(
        default_workdir("gpt2:tiny")
    )
    assert run_folder(["sleep", "1"]) is None
    assert run_folder(["train", "--workdir", "gs://bucket/run"]) is None


def test_devices_are_shared_out(tmp_path):
    cpu = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8",
    }
    flags = device_environment(cpu, 1, 2, 4)["XLA_FLAGS"].split()
    assert flags == ["--a=1", "--xla_force_host_platform_device_count=4"]
    assert device_environment(cpu, 0, 2, None) == {}
    gpu = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [device_environment(gpu, s, 2, None) for s in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert device_environment(gpu, 1, 2, 1) == {"CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(ValueError, match="need 6 GPUs, there are 4"):
        device_environment(gpu, 0, 2, 3)
    with pytest.raises(ValueError, match="one process has all TPUs"):
        device_environment({"JAX_PLATFORMS": "tpu"}, 0, 2, None)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
