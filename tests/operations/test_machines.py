"""Several agents without a scheduler, with small commands in place of training: who runs,
what a lost machine costs, and when all end.
"""

import contextlib
import errno
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist import launch
from jaxdist.operations.launch import (
    generations,
    machine_agent,
    reach,
    rendezvous,
    roster,
    run_progress,
    supervisor,
)
from jaxdist.telemetry.metrics import read_events

# Each process adds a step every 50 ms, from where the last start has stopped; the first
# one writes the steps. They end at the step in the file `last`.
WORKER = """
import os, signal, sys, time
folder, rank = sys.argv[1], int(os.environ.get("JAXDIST_PROCESS_ID", "0"))
size = int(os.environ["JAXDIST_NUM_PROCESSES"])
full = os.environ["JAXDIST_FULL_PROCESSES"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
run = folder + "/run"
os.makedirs(run, exist_ok=True)
with open(folder + "/starts", "a") as starts:
    starts.write(f"{rank} {size} {os.environ.get('JAXDIST_COORDINATOR')} {os.getpid()} {full}\\n")
def step():
    if not os.path.exists(run + "/metrics.jsonl"): return 0
    return sum(1 for _ in open(run + "/metrics.jsonl"))
def last(): return int(open(folder + "/last").read())
if rank == 0:
    with open(run + "/events.jsonl", "a") as events: events.write('{"event": "start", "step": 0}\\n')
while step() < last():
    if os.path.exists(folder + "/fail"): sys.exit(int(open(folder + "/fail").read()))
    time.sleep(0.05)
    if rank == 0:
        with open(run + "/metrics.jsonl", "a") as rows: rows.write('{"step": %d, "loss": 1.0}\\n' % (step() + 1))
"""


class Machines:
    """Agents of one folder; each stands for a machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen] = {}
        self.last_step(100_000)

    def last_step(self, step: int) -> None:
        (self.folder / "last").write_text(str(step))

    def start(self, name: str, *flags: str, command: str = WORKER) -> subprocess.Popen:
        own = [sys.executable, "-m", "jaxdist.launch", "--agent", name]
        own += ["--address", "127.0.0.1", "--lost-seconds", "2"]
        worker = [sys.executable, "-S", "-c", command, str(self.folder)]
        worker += ["--workdir", str(self.folder / "run")]
        log = open(self.folder / f"{name}.log", "a")
        self.agents[name] = subprocess.Popen(
            [*own, *flags, "--", *worker], stdout=log, stderr=log
        )
        return self.agents[name]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def starts(self) -> list[list[str]]:
        """Returns [rank, size, coordinator, process id, full size] of each process."""
        with contextlib.suppress(FileNotFoundError):
            return [line.split() for line in open(self.folder / "starts")]
        return []

    def sizes(self) -> list[int]:
        """Returns the sizes of the groups that ran."""
        found: list[int] = []
        for _, size, *_ in self.starts():
            if not found or found[-1] != int(size):
                found.append(int(size))
        return found

    def wait_for(self, condition, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not condition():
            texts = {name: self.said(name) for name in self.agents}
            assert time.monotonic() < until, texts
            time.sleep(0.05)

    def codes(self) -> dict[str, int]:
        """Waits for the agents, and returns their exit codes."""
        return {name: agent.wait(40) for name, agent in self.agents.items()}


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path)
    yield machines
    for agent in machines.agents.values():
        agent.kill()
        agent.wait()


FAST = ["--grow-minutes", "0.01", "--settle-seconds", "0.5"]


def lost(machines: Machines) -> list[str]:
    events = read_events(machines.folder / "run")
    return [event["why"] for event in events if event["event"] == "peer_lost"]


def test_two_machines_become_one_and_two_again(machines):
    """The agent that decides is killed with all that it started, and started again."""
    flags = ["--nnodes", "1:2", *FAST]
    for name in ("a", "b"):
        machines.start(name, *flags)
    machines.wait_for(lambda: machines.sizes()[-1:] == [2])
    machines.agents["a"].kill()
    machines.wait_for(lambda: machines.sizes()[-2:] == [2, 1])
    machines.agents["a"].wait()
    machines.start("a", *flags)
    machines.wait_for(lambda: machines.sizes()[-3:] == [2, 1, 2])
    machines.last_step(1)
    assert machines.codes() == {"a": 0, "b": 0}
    assert {full for *_, full in machines.starts()} == {"2"}
    assert lost(machines) == ["machine a is lost"]


@pytest.mark.slow
def test_too_few_machines_wait_for_another(machines):
    for name in ("a", "b"):
        machines.start(name, "--nnodes", "2:2", *FAST)
    machines.wait_for(lambda: len(machines.starts()) == 2)
    machines.agents["b"].kill()
    machines.wait_for(lambda: "waiting: 1 of 2 machines" in machines.said("a"))
    time.sleep(1)
    assert len(machines.starts()) == 2
    machines.start("c", "--nnodes", "2:2", *FAST)
    machines.wait_for(lambda: len(machines.starts()) == 4)
    machines.last_step(1)
    assert [machines.agents[name].wait(40) for name in "ac"] == [0, 0]


def test_a_lost_process_restarts_those_of_all_machines(machines):
    for name in ("a", "b"):
        machines.start(name, "--nnodes", "2", *FAST)
    machines.wait_for(lambda: len(machines.starts()) == 2)
    (pid,) = [pid for rank, _, _, pid, _ in machines.starts() if rank == "1"]
    os.kill(int(pid), signal.SIGKILL)
    machines.wait_for(lambda: len(machines.starts()) == 4)
    machines.last_step(1)
    assert machines.codes() == {"a": 0, "b": 0}
    assert lost(machines) == ["process 1 killed by SIGKILL on machine b"]
    # another port at each start
    assert len({address for _, _, address, *_ in machines.starts()}) == 2


# Once in about thirty runs its processes are "not all stopped in time"; the cause is not
# found.
@pytest.mark.slow
def test_an_agent_that_is_asked_to_stop_leaves_and_the_others_continue(machines):
    for name in ("a", "b"):
        machines.start(name, "--nnodes", "1:2", *FAST)
    machines.wait_for(lambda: machines.sizes()[-1:] == [2])
    machines.agents["a"].terminate()
    assert machines.agents["a"].wait(40) == 75
    machines.wait_for(lambda: machines.sizes()[-2:] == [2, 1])
    assert not lost(machines)
    machines.agents["b"].terminate()
    assert machines.agents["b"].wait(40) == 75


@pytest.mark.parametrize("code", [75, 77, 78, 1])
def test_all_agents_end_with_the_same_code(machines, code):
    """The code of a process that is preempted, refused, or fails again and again."""
    flags = ["--nnodes", "2", "--max-restarts", "1", *FAST]
    for name in ("a", "b"):
        machines.start(name, *flags)
    machines.wait_for(lambda: len(machines.starts()) == 2)
    (machines.folder / "fail").write_text(str(code))
    assert machines.codes() == {"a": code, "b": code}


def test_agents_that_cannot_be_told_apart_or_differ_are_refused(machines):
    machines.start("a", "--nnodes", "1:3", *FAST)
    machines.wait_for(lambda: machines.starts())
    first = machines.agents.pop("a")
    assert machines.start("a", "--nnodes", "1:3").wait(40) == 78
    assert "already runs an agent of this name" in machines.said("a")
    assert machines.start("b", "--nnodes", "1:2").wait(40) == 78
    assert "another command, or other flags" in machines.said("b")
    # the first name is no reason to decide
    assert machines.start("0", "--nnodes", "1:2").wait(40) == 78
    assert first.poll() is None
    assert len(machines.starts()) == 1
    machines.agents = {"a": first}


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--nnodes", "3:2"], "--nnodes 3:2: MIN must be <= MAX"),
        (["--nnodes", "0:2"], "--nnodes 0:2: MIN must be >= 1"),
        (["--nnodes", "two"], "--nnodes two: must be MIN:MAX"),
        (["--nnodes", "1:2000"], "MAX must be <= 1024"),
        (["--nnodes", "1:2", "--agent", "../a"], "--agent '../a': must have"),
        (["--nnodes", "1:2", "--lost-seconds", "0"], "--lost-seconds 0: must be"),
        (["--nnodes", "1:2", "--settle-seconds", "nan"], "--settle-seconds nan"),
        (["--nnodes", "1:2", "--min-processes", "1"], "--min-processes: machines"),
        (["--nnodes", "1:2", "--preflight"], "--preflight: cannot be used"),
        (["--nnodes", "1:2"], "--meet-in FOLDER"),
        (["--nnodes", "1:2", "--meet-in", "/dev/null"], "/dev/null: cannot be used"),
        (
            ["--nnodes", "1:2", "--meet-in", "gs://bucket/x"],
            "--meet-in gs://bucket/x: ",
        ),
        (["--nnodes", "1:2", "--address", "fe80::1"], "--address fe80::1: has a colon"),
        (
            ["--nnodes", "1:2", "--address", "host 1"],
            "--address 'host 1': has whitespace",
        ),
        (["--agent", "a"], "--agent: needs --nnodes MIN:MAX"),
    ],
)
def test_faults_have_one_line_and_exit_code_78(flags, fault, capsys):
    assert launch.main([*flags, "--", "true"]) == 78
    lines = capsys.readouterr().err.splitlines()
    assert any(fault in line for line in lines), lines


def test_a_scheduler_decides_the_machines(monkeypatch, capsys, tmp_path):
    for name, value in (("S", "2"), ("", "0"), ("S_AT", "host:1")):
        monkeypatch.setenv(f"JAXDIST_AGENT{name}", value)
    flags = ["--nnodes", "1:2", "--meet-in", str(tmp_path)]
    assert launch.main([*flags, "--", "true"]) == 78
    assert "has decided the machines already" in capsys.readouterr().err


# --- decisions, with a clock of their own ---------------------------------------------


class Fleet:
    """Agents in one process, with a clock that the test moves."""

    def __init__(
        self,
        folder: Path,
        names: str,
        least: int,
        most: int,
        *,
        max_restarts: int = 3,
        capacity_file: Path | None = None,
    ):
        self.now = 100.0
        self.folder = folder / "agents"
        self.folder.mkdir(exist_ok=True)
        self.run = folder / "run"
        self.said: list[str] = []
        self.least, self.most = least, most
        self.max_restarts, self.capacity_file = max_restarts, capacity_file
        self.views: dict[str, rendezvous.Rendezvous] = {}
        self.leaders: dict[str, generations.Leader] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        """Starts an agent, or starts it again."""
        token = f"{name}{len(self.said)}{self.now}"
        record = rendezvous.Record(name, token, "terms", f"host-{name}", 1000)
        options = roster.MachineOptions(
            self.least, self.most, self.folder, name, "", settle_s=4.0, lost_s=10.0
        )
        view = rendezvous.Rendezvous(
            self.folder, record, lost_s=10.0, clock=lambda: self.now
        )
        self.views[name] = view
        chosen = roster.Roster(
            options,
            view,
            run_progress.ProgressReader(self.run),
            processes=1,
            devices_per_process=1,
            capacity_file=self.capacity_file,
        )
        self.leaders[name] = generations.Leader(
            chosen, max_restarts=self.max_restarts, grow_s=60.0, say=self.said.append
        )

    def pass_time(self, seconds: float) -> None:
        """Lets agents live for some time, each with a turn a second."""
        for _ in range(int(seconds)):
            self.now += 1
            for name, view in self.views.items():
                view.update()
                generation = view.generation
                if generation.final is not None and generation.number > view.joined_at:
                    continue  # the agent has ended
                if view.leads():
                    self.leaders[name].decide()
                else:
                    self.leaders[name].rest()

    def end(self, **codes: int) -> None:
        """Ends the processes of members; they have the exit codes."""
        generation = self.generation
        for place, (name, _) in enumerate(generation.members):
            if name in codes and name in self.views:
                self.views[name].update(
                    generation=generation.number, codes={str(place): codes[name]}
                )

    def train(self, step: int) -> None:
        self.run.mkdir(exist_ok=True)
        with open(self.run / "metrics.jsonl", "a") as rows:
            rows.write(json.dumps({"step": step, "loss": 1.0}) + "\n")

    @property
    def generation(self) -> rendezvous.Generation:
        (view, *others) = self.views.values()
        for other in others:
            assert other.generation == view.generation
        return view.generation

    @property
    def members(self) -> str:
        return "".join(name for name, _ in self.generation.members)


def test_a_generation_begins_once_machines_have_settled(tmp_path):
    fleet = Fleet(tmp_path, "abc", 2, 4)
    fleet.pass_time(4)
    assert fleet.members == ""
    fleet.pass_time(4)
    assert fleet.members == "abc"
    assert (fleet.generation.address, fleet.generation.port) == ("host-a", 1000)


def test_machines_that_come_and_go_do_not_delay_the_start_for_ever(tmp_path):
    fleet = Fleet(tmp_path, "ab", 2, 4)
    for _ in range(9):  # c starts again every 2 s
        assert fleet.members == ""
        fleet.join("c")
        fleet.pass_time(2)
    fleet.pass_time(1)
    assert fleet.members[:2] == "ab"
    assert "machines still come and go after 16 s: starting" in fleet.said


def test_all_machines_begin_at_once(tmp_path):
    fleet = Fleet(tmp_path, "abcde", 2, 4)
    fleet.pass_time(3)
    assert fleet.members == "abcd"  # e is a spare one


def test_a_silent_machine_is_left_behind_and_a_spare_one_takes_its_place(tmp_path):
    fleet = Fleet(tmp_path, "abcd", 2, 3)
    fleet.pass_time(3)
    assert fleet.members == "abc"
    del fleet.views["a"], fleet.leaders["a"]  # the one that decides
    fleet.pass_time(8)
    assert fleet.views["b"].order is None
    fleet.pass_time(4)
    assert fleet.views["b"].order == rendezvous.Order("kill", "machine a is lost")
    fleet.end(b=70, c=70)
    fleet.pass_time(2)
    assert fleet.members == "bcd"
    assert fleet.generation.failures == ("machine a is lost",)


def test_two_agents_that_both_think_that_they_lead_decide_once(tmp_path):
    fleet = Fleet(tmp_path, "ab", 1, 4)
    view, other = fleet.views.values()
    first = rendezvous.Generation(1, members=(view.own.id,))
    view.publish(first)
    other.publish(rendezvous.Generation(1, members=(other.own.id,)))
    assert view.generation == other.generation == first
    view.publish_order(rendezvous.Order("kill", "one"))
    other.publish_order(rendezvous.Order("kill", "two"))
    assert view.order == other.order == rendezvous.Order("kill", "one")
    assert not list(fleet.folder.glob(".*"))


def test_fewer_than_the_least_wait_and_end_with_70(tmp_path):
    fleet = Fleet(tmp_path, "ab", 3, 4)
    fleet.pass_time(590)
    assert fleet.generation.final is None
    fleet.pass_time(20)
    assert fleet.generation.final == 70
    assert fleet.said[0] == "waiting: 1 of 3 machines can run"
    assert fleet.generation.why == "no 3 machines for 600 s"


def test_a_group_grows_after_progress_and_a_while(tmp_path):
    fleet = Fleet(tmp_path, "ab", 2, 4)
    fleet.pass_time(8)
    assert fleet.members == "ab"
    fleet.join("c")
    fleet.pass_time(100)
    assert fleet.views["a"].order is None  # no progress
    fleet.train(5)
    fleet.pass_time(10)
    order = fleet.views["a"].order
    assert order is not None
    assert (order.how, order.grow_to) == ("save", 3)
    fleet.end(a=75, b=75)
    fleet.pass_time(2)
    assert fleet.members == "abc"
    (grew,) = [event for event in read_events(fleet.run) if event["event"] == "grow"]
    assert (grew["processes_before"], grew["processes"], grew["step"]) == (2, 3, 5)
    # the new machine has another installation: the run goes on without it
    fleet.end(a=78, b=78, c=78)
    fleet.pass_time(6)
    assert fleet.members == "ab"
    assert fleet.generation.final is None
    fleet.train(6)
    fleet.pass_time(200)
    assert fleet.views["a"].order is None
    fleet.join("c")  # repaired, and started again
    fleet.pass_time(20)
    assert fleet.views["a"].order is not None


def test_a_machine_that_loses_a_process_twice_is_left_out(tmp_path):
    fleet = Fleet(tmp_path, "abc", 2, 3)
    fleet.pass_time(3)
    for _ in range(2):
        assert fleet.members == "abc"
        fleet.end(b=-9)
        fleet.pass_time(1)
        assert fleet.views["a"].order == rendezvous.Order(
            "kill", "process 1 killed by SIGKILL on machine b"
        )
        fleet.end(a=70, c=70)
        fleet.pass_time(8)
    assert fleet.members == "ac"
    assert len(fleet.generation.failures) == 2
    # with progress, the next loss of another machine tries it again
    fleet.train(9)
    fleet.end(a=1, c=70)
    fleet.pass_time(8)
    assert fleet.members == "abc"
    assert len(fleet.generation.failures) == 1


def test_failures_without_progress_end_the_run(tmp_path):
    fleet = Fleet(tmp_path, "ab", 2, 2, max_restarts=2)
    fleet.pass_time(3)
    for _ in range(3):
        fleet.end(a=1, b=70)
        fleet.pass_time(8)
    assert fleet.generation.final == 1
    assert "3 failures without progress beyond step 0" in fleet.generation.why


def test_a_workdir_that_a_silent_machine_still_locks_is_tried_again(tmp_path):
    fleet = Fleet(tmp_path, "abc", 2, 3)
    fleet.pass_time(3)
    del fleet.views["a"], fleet.leaders["a"]
    fleet.train(3)
    fleet.pass_time(12)
    fleet.end(b=70, c=70)
    fleet.pass_time(8)
    for number in range(2, 5):
        assert (fleet.generation.number, fleet.members) == (number, "bc")
        fleet.end(b=78, c=70)
        fleet.pass_time(12)
    assert fleet.generation.final is None
    fleet.end(b=0, c=0)
    fleet.pass_time(2)
    assert fleet.generation.final == 0


def test_agents_that_were_all_restarted_begin_anew(tmp_path):
    fleet = Fleet(tmp_path, "ab", 2, 2)
    fleet.pass_time(3)
    fleet.end(a=1, b=1)
    fleet.join("a")
    fleet.join("b")
    fleet.pass_time(8)
    assert fleet.generation.number == 2
    assert fleet.generation.failures == ()
    assert fleet.generation.why == "first start"
    # the end of an earlier run does not end a new one
    fleet.end(a=0, b=0)
    fleet.pass_time(2)
    assert fleet.generation.final == 0
    fleet.join("a")
    fleet.join("b")
    fleet.pass_time(8)
    assert (fleet.generation.number, fleet.members) == (4, "ab")


def test_an_agent_with_the_first_name_continues_the_counts(tmp_path):
    """It is started between two generations, and has heard of no other agent yet."""
    fleet = Fleet(tmp_path, "bcd", 1, 4)
    fleet.pass_time(8)
    fleet.end(b=1, c=70, d=70)
    fleet.join("a")
    fleet.views["a"].update()
    assert fleet.views["a"].leads()
    fleet.leaders["a"].decide()
    fleet.pass_time(8)
    assert fleet.members == "bcd"
    assert fleet.generation.failures == (
        "process 0 ended with exit code 1 on machine b",
    )


def test_agents_that_have_all_died_are_no_loss_to_a_new_one(tmp_path):
    fleet = Fleet(tmp_path, "bc", 1, 4)
    fleet.pass_time(8)
    fleet.end(b=1, c=70)
    fleet.views.clear()
    fleet.join("a")
    fleet.pass_time(9)
    assert fleet.generation.number == 1
    fleet.pass_time(8)
    assert (fleet.members, fleet.generation.failures) == ("a", ())


def test_a_member_without_a_record_is_lost_after_a_while(tmp_path):
    fleet = Fleet(tmp_path, "a", 1, 1)
    view = fleet.views["a"]
    fleet.pass_time(10)
    assert not view.is_lost(("b", "token"))
    fleet.pass_time(1)
    assert view.is_lost(("b", "token"))


def test_malformed_files_are_ignored(tmp_path):
    fleet = Fleet(tmp_path, "ab", 2, 2)
    for name in ("agent-x.json", "generation-000007.json", "order-000000.json"):
        (fleet.folder / name).write_text('{"name": ["x"], "number": -1}')
    fleet.pass_time(3)
    assert fleet.members == "ab"


def test_an_empty_file_of_the_next_generation_is_skipped(tmp_path):
    """A power failure may leave one."""
    fleet = Fleet(tmp_path, "ab", 2, 2)
    (fleet.folder / "generation-000001.json").touch()
    fleet.pass_time(9)
    assert fleet.members == ""  # it may be late on a network file system
    fleet.pass_time(4)
    assert (fleet.generation.number, fleet.members) == (2, "ab")
    fleet.end(a=1, b=70)
    fleet.pass_time(2)
    assert fleet.generation.number == 3


def test_a_folder_without_hard_links_is_refused(tmp_path, monkeypatch, capsys):
    def link(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    flags = ["--nnodes", "1:2", "--meet-in", str(tmp_path)]
    assert launch.main([*flags, "--", "true"]) == 78
    assert "a hard link cannot be made" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_capacity_file_bounds_the_machines(tmp_path):
    capacity = tmp_path / "capacity"
    capacity.write_text("2")
    fleet = Fleet(tmp_path, "abcd", 1, 4, capacity_file=capacity)
    fleet.pass_time(8)
    assert fleet.members == "ab"
    fleet.train(1)
    capacity.write_text("4")
    fleet.pass_time(80)
    assert fleet.views["a"].order is not None


def test_a_machine_that_is_cut_off_is_left_out_until_it_is_reached_again(tmp_path):
    """It reads the folder, but does not reach process 0."""
    fleet = Fleet(tmp_path, "abc", 2, 3)
    fleet.pass_time(3)
    fleet.views["c"].update(unreached=1)
    fleet.pass_time(1)
    order = fleet.views["a"].order
    assert order == rendezvous.Order("kill", "machine c does not reach process 0")
    fleet.end(a=70, b=70, c=-6)
    fleet.pass_time(8)
    assert fleet.members == "ab"
    assert fleet.generation.why == "machine c is cut off from the others"
    assert fleet.generation.suspect == ""
    fleet.train(1)
    fleet.pass_time(100)
    assert fleet.views["a"].order is None
    fleet.views["c"].rejoin()
    fleet.pass_time(20)
    order = fleet.views["a"].order
    assert order is not None
    assert order.grow_to == 3


def test_the_machine_that_nobody_reaches_is_left_out(tmp_path):
    fleet = Fleet(tmp_path, "abc", 2, 3)
    fleet.pass_time(3)
    for name in "bc":
        fleet.views[name].update(unreached=1)
    fleet.pass_time(1)
    fleet.end(a=70, b=-6, c=-6)
    fleet.pass_time(8)
    assert fleet.members == "bc"


def test_a_process_that_failed_by_itself_is_named_before_an_unreached_one(tmp_path):
    fleet = Fleet(tmp_path, "abc", 2, 3)
    fleet.pass_time(3)
    fleet.views["c"].update(unreached=1)
    fleet.end(a=70, b=1, c=70)
    fleet.pass_time(8)
    assert fleet.members == "abc"
    assert fleet.generation.why == "process 1 ended with exit code 1 on machine b"


def test_nothing_is_tried_once_a_generation_must_end(lone_agent, monkeypatch):
    agent, _ = lone_agent
    agent._look()
    agent._running = agent._rendezvous.generation.number
    agent._reach = reach.Reach("127.0.0.1", 1)
    tried: list[bool] = []
    monkeypatch.setattr(agent._rendezvous, "is_listening", lambda: True)
    monkeypatch.setattr(
        agent._reach, "attempt", lambda *, listens: tried.append(listens)
    )
    agent._try_reach()
    agent._rendezvous.publish_order(rendezvous.Order("kill", "machine b is lost"))
    agent._try_reach()
    assert tried == [True]


def test_tries_to_reach_process_0_end_after_a_while():
    now = [0.0]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        tries = reach.Reach("127.0.0.1", port, clock=lambda: now[0])
        for _ in range(100):  # for as long as process 0 is not known to listen
            now[0] += 10
            assert not tries.attempt(listens=False)
        assert not tries.is_failing
        assert not tries.attempt(listens=True)
        assert not tries.is_failing  # one try is no proof
        now[0] += 6
        assert not tries.attempt(listens=True)
        assert tries.is_failing
        now[0] += reach.PATIENCE_S + 1
        assert tries.attempt(listens=True)
        assert reach.is_reachable("127.0.0.1", port, listens=False)  # it refuses
        assert not reach.is_reachable("127.0.0.1", port, listens=True)
        server.listen()
        assert reach.is_reachable("127.0.0.1", port, listens=True)
        assert not tries.attempt(listens=True)
        assert tries.succeeded
    assert not reach.is_reachable("no.such.host.invalid", port, listens=False)
    assert not reach.Reach("", 0).attempt(listens=True)


@pytest.fixture
def lone_agent(tmp_path, monkeypatch):
    """An agent with a clock of its own, and the list [seconds] of that clock."""
    now = [0.0]
    monkeypatch.setattr(
        machine_agent,
        "Rendezvous",
        functools.partial(rendezvous.Rendezvous, clock=lambda: now[0]),
    )
    options = supervisor.SupervisorOptions(["true"], processes=1)
    machines = roster.MachineOptions(1, 1, tmp_path / "agents", "a", "127.0.0.1")
    agent = machine_agent.MachineAgent(options, machines, say=lambda _: None)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(agent, "_sleep", sleep)
    return agent, now


def test_a_folder_may_be_away_for_a_while_after_a_long_generation(
    lone_agent, monkeypatch
):
    agent, now = lone_agent
    folder, away = agent.machines.folder, agent.machines.folder.with_name("away")
    generations_run: list[int] = []

    def run(generation):
        generations_run.append(generation.number)
        agent._running = generation.number
        if len(generations_run) == 2:
            agent.stop_requests = 1
            return 75
        now[0] += 5_000
        agent._rendezvous.update()
        folder.rename(away)
        now[0] += 100
        agent._report({0: 1})
        return None

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 5_400 and away.exists():
            away.rename(folder)

    monkeypatch.setattr(agent, "_run_generation", run)
    monkeypatch.setattr(agent, "_sleep", sleep)
    assert agent._take_turns() == 75
    assert generations_run == [1, 2]


def test_an_agent_with_other_flags_does_not_end_a_spare_one(lone_agent):
    agent, now = lone_agent
    own = agent._rendezvous.own
    records = [
        rendezvous.Record("0", "other", "other terms", "host-0", 1000),
        rendezvous.Record("1", "token", own.terms, "host-1", 1000),
    ]
    views = [
        rendezvous.Rendezvous(
            agent.machines.folder, record, lost_s=10.0, clock=lambda: now[0]
        )
        for record in records
    ]
    views[1].publish(rendezvous.Generation(1, members=(records[1].id,)))

    def pass_time() -> None:
        for _ in range(20):
            now[0] += 1
            for view in views:
                view.update()
            agent._rendezvous.update()

    pass_time()
    assert agent._find_fault() == ""
    views.pop()  # no agent with the same flags runs: the first name decides
    pass_time()
    assert "agent 0 has another command" in agent._find_fault()


def test_a_folder_that_stays_away_ends_the_agent(lone_agent):
    agent, now = lone_agent
    agent.machines.folder.rename(agent.machines.folder.with_name("away"))
    assert agent._take_turns() == 70
    assert 600 <= now[0] < 602


def test_a_folder_without_room_is_no_loss(tmp_path, monkeypatch):
    fleet = Fleet(tmp_path, "ab", 2, 2)
    fleet.pass_time(3)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(rendezvous.atomic, "write_text", fail)
        fleet.pass_time(60)
        assert not fleet.views["a"].is_cut_off()
    fleet.pass_time(5)
    assert fleet.views["a"].order is None
    assert fleet.generation.number == 1


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_after_any_faults_the_machines_run_together_again(tmp_path, seed):
    """Agents die, freeze, return, lose processes and lead in any order. All of them then
    run in one generation, or the run has ended.
    """
    chance = random.Random(seed)
    fleet = Fleet(tmp_path, "abcd", 2, 4, max_restarts=1_000)
    running: dict[str, int] = {}

    def live(seconds: int, *, faults: bool) -> None:
        for _ in range(seconds):
            fleet.pass_time(1)
            for name, view in fleet.views.items():
                generation = view.generation
                is_member = view.own.id in generation.members
                is_new = running.get(name, 0) < generation.number
                if is_member and is_new and view.order is None:
                    running[name] = generation.number
                elif is_member and view.own.generation < generation.number:
                    fails = faults and chance.random() < 0.05
                    if view.order is not None or fails:
                        code = -9 if fails else 75
                        codes = {str(generation.index(view.own.id)): code}
                        if is_new or (view.order and view.order.how == "kill"):
                            codes = {}
                        running[name] = generation.number
                        view.update(generation=generation.number, codes=codes)

    step = 0
    frozen: dict[str, tuple] = {}
    for _ in range(25):
        live(chance.randrange(1, 30), faults=True)
        step += 1
        fleet.train(step)
        name = chance.choice("abcd")
        if name in frozen:
            fleet.views[name], fleet.leaders[name] = frozen.pop(name)
        elif name not in fleet.views:
            fleet.join(name)
            running.pop(name, None)
        elif len(fleet.views) > 1:
            gone = (fleet.views.pop(name), fleet.leaders.pop(name))
            if chance.random() < 0.4:
                frozen[name] = gone
    for name in "abcd":  # all agents are started again where they are not there
        if name not in fleet.views:
            fleet.join(name)
            running.pop(name, None)
    live(60, faults=False)
    for _ in range(4):  # it grows, and a loss ends that machines are left out
        step += 1
        fleet.train(step)
        live(120, faults=False)
        if fleet.members != "abcd":
            fleet.end(**{fleet.members[0]: -9})
    assert fleet.generation.final is None
    assert fleet.members == "abcd"
    assert {running[name] for name in "abcd"} == {fleet.generation.number}
