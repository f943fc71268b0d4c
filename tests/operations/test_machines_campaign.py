"""Training by several agents without a scheduler, each at an address of its own: machines
are killed and return, and the run ends as an uninterrupted one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxdist.checkpoint.folders import list_steps
from support.launches import (
    apart,
    assert_fed_once,
    events,
    kill,
    launched,
    leftovers,
    output,
    parameters,
    start,
    wait_for_step,
)
from support.runs import last_step, losses

STEPS = 60
SETTINGS = {"devices": 1, "batch__global_size": 12, "mesh__fsdp": 1}
SETTINGS |= {"train__steps": STEPS}
NAMES = "abcd"
PACE_S = "1"  # seconds of a step, so that the test comes in time


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run by four processes of one machine."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    with launched(workdir, "--processes", "4", **SETTINGS) as agent:
        assert agent.wait(300) == 0, output(workdir)[-4000:]
    return workdir


class Machines:
    """Agents of a run; agent a is at 127.0.0.2, b at 127.0.0.3, ..."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.agents: dict[str, subprocess.Popen] = {}

    def start(self, names: str) -> None:
        # all agents have the processes of a start in common
        recorded = {"FAULTY_PACE_S": PACE_S, "FAULTY_AGENT": "all"}
        for name in names:
            address = f"127.0.0.{NAMES.index(name) + 2}"
            flags = ["--nnodes", "2:4", "--agent", name, "--address", address]
            flags += ["--lost-seconds", "6", "--settle-seconds", "20"]
            flags += ["--grow-minutes", "0.05"]
            self.agents[name] = start(
                self.workdir, *flags, recorded=recorded, **SETTINGS
            )

    def kill(self, names: str) -> float:
        """Kills agents -9, with all that they started; returns the time."""
        for name in names:
            self.agents[name].kill()
        for name in names:
            self.agents[name].wait()
        return time.monotonic()

    def wait_for_start(self, number: int, sizes: list[int]) -> None:
        """Waits until the run has begun so many times, at these sizes."""
        until = time.monotonic() + 240
        while len(self.sizes()) < number:
            assert time.monotonic() < until, output(self.workdir)[-6000:]
            time.sleep(0.05)
        assert self.sizes() == sizes

    def sizes(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [begun["processes"] for begun in events(self.workdir, "start")]
        return []

    def wait_for_step(self, name: str, step: int) -> None:
        wait_for_step(self.agents[name], self.workdir, step)

    def finish(self) -> None:
        codes = {name: agent.wait(400) for name, agent in self.agents.items()}
        assert codes == dict.fromkeys(codes, 0), output(self.workdir)[-6000:]


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path / "run")
    yield machines
    for agent in machines.agents.values():
        agent.kill()
        agent.wait()


def check_same(workdir: Path, straight: Path) -> None:
    """Asserts that a run has done the work of an uninterrupted one."""
    assert losses(workdir) == pytest.approx(losses(straight), rel=1e-5)
    distance = apart(
        parameters(workdir, STEPS), parameters(straight, STEPS), "trainable/"
    )
    print(f"parameters are {distance:.2g} apart")
    assert distance <= 1e-5
    assert_fed_once(workdir, STEPS, 12)
    assert not leftovers(workdir)


@pytest.mark.slow
def test_4_machines_become_2_and_4_again(machines, straight):
    machines.start(NAMES)
    machines.wait_for_step("a", 7)
    saved = list_steps(machines.workdir / "checkpoints")[-1]
    newest, began = last_step(machines.workdir), machines.kill("cd")
    machines.wait_for_start(2, [4, 2])
    machines.wait_for_step("a", newest + 1)
    print(
        f"kill -9 of 2 machines to the first new step: {time.monotonic() - began:.1f} s"
    )
    machines.start("cd")
    began = time.monotonic()
    machines.wait_for_start(3, [4, 2, 4])
    print(f"return of 2 machines to the start of 4: {time.monotonic() - began:.1f} s")
    machines.finish()
    restored = [event["step"] for event in events(machines.workdir, "restore")]
    (grew,) = events(machines.workdir, "grow")
    assert restored[0] >= saved
    assert restored[1] == grew["step"]  # nothing was lost by growing
    assert (grew["processes_before"], grew["processes"]) == (2, 4)
    assert len(events(machines.workdir, "peer_lost")) == 1
    check_same(machines.workdir, straight)


@pytest.mark.slow
def test_lost_process_lost_leader_and_too_few_machines(machines, straight):
    machines.start(NAMES)
    machines.wait_for_step("a", 6)
    kill(machines.agents["c"], 2, machines.workdir)
    machines.wait_for_start(2, [4, 4])
    machines.wait_for_step("a", 12)
    machines.kill("a")  # decides, and has process 0
    machines.wait_for_start(3, [4, 4, 3])
    machines.wait_for_step("b", last_step(machines.workdir) + 1)
    machines.kill("bc")
    until = time.monotonic() + 120
    while output(machines.workdir).count("waiting: 1 of 2 machines") < 1:
        assert time.monotonic() < until, output(machines.workdir)[-6000:]
        time.sleep(0.1)
    time.sleep(5)
    assert len(machines.sizes()) == 3
    machines.start("abc")
    machines.wait_for_start(4, [4, 4, 3, 4])
    machines.finish()
    lost = [event["why"] for event in events(machines.workdir, "peer_lost")]
    assert lost == [
        "process 2 killed by SIGKILL on machine c",
        "machine a is lost",
        "machine b is lost",
    ]
    check_same(machines.workdir, straight)


@pytest.mark.slow
def test_a_machine_that_is_asked_to_stop_leaves_and_loses_no_step(machines, straight):
    machines.start("ab")
    machines.start("cd")
    machines.wait_for_step("a", 6)
    machines.agents["d"].terminate()
    assert machines.agents.pop("d").wait(120) == 75
    machines.wait_for_start(2, [4, 3])
    (preempted,) = events(machines.workdir, "preempted")
    (restored,) = events(machines.workdir, "restore")
    assert restored["step"] == preempted["step"]
    machines.wait_for_step("a", restored["step"] + 2)
    # a frozen agent: the others continue, and it comes back by itself
    os.kill(machines.agents["c"].pid, signal.SIGSTOP)
    machines.wait_for_start(3, [4, 3, 2])
    os.kill(machines.agents["c"].pid, signal.SIGCONT)
    machines.finish()
    assert machines.sizes()[:4] == [4, 3, 2, 3]
    assert "the others continued without this machine" in output(machines.workdir)
    check_same(machines.workdir, straight)


# --- machines with a network of their own ---------------------------------------------


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def networks():
    """Makes three network namespaces, each with a host name; yields their names."""
    names = [f"jxm{number}" for number in (1, 2, 3)]
    addresses = {name: f"10.77.0.{n}" for n, name in enumerate(names, 1)}
    hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
    folders = [Path("/etc/netns") / name for name in names]
    try:
        ip("link", "add", "jxbridge", "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and network namespaces: {error}")
    try:
        ip("link", "set", "jxbridge", "up")
        for name, folder in zip(names, folders, strict=True):
            ip("netns", "add", name)
            ip(*f"link add v{name} type veth peer name eth0 netns {name}".split())
            ip(*f"link set v{name} master jxbridge up".split())
            ip(*f"-n {name} addr add {addresses[name]}/24 dev eth0".split())
            ip(*f"-n {name} link set eth0 up".split())
            ip(*f"-n {name} link set lo up".split())
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        yield names
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
        ip("link", "del", "jxbridge")


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_named_and_returns(networks, straight, tmp_path):
    """Its agent reads the folder all the time."""
    machines = Machines(tmp_path / "run")
    recorded = {"FAULTY_PACE_S": PACE_S, "FAULTY_AGENT": "all"}
    flags = ["--nnodes", "2:3", "--settle-seconds", "20", "--grow-minutes", "0.05"]
    for name in networks:
        # no --agent and no --address: the host's name is both
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        inside += [f'hostname {name}; exec "$@"', "-"]
        machines.agents[name] = start(
            machines.workdir, *flags, prefix=inside, recorded=recorded, **SETTINGS
        )
    first, _, last = networks
    try:
        machines.wait_for_step(first, 8)
        ip("link", "set", f"v{last}", "down")
        began = time.monotonic()
        machines.wait_for_start(2, [3, 2])
        print(f"cut to the start of 2: {time.monotonic() - began:.0f} s")
        lost = [event["why"] for event in events(machines.workdir, "peer_lost")]
        assert lost[-1] == f"machine {last} is cut off from the others"
        ip("link", "set", f"v{last}", "up")
        machines.wait_for_start(3, [3, 2, 3])
        machines.finish()
    finally:
        for agent in machines.agents.values():
            agent.kill()
            agent.wait()
    check_same(machines.workdir, straight)
