"""A real Slurm, one node, started for the test: jobs are stopped, requeued, and end
finished.

Needs root and Debian's `slurm-wlm` and `munge`. Run with `-m slow`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launches import SETTINGS, events
from support.paths import ROOT
from support.runs import command, environment, every_loss, last_step, losses

DAEMONS = ("munged", "slurmctld", "slurmd")
PYTHON = Path(sys.executable).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0 or not all(map(shutil.which, DAEMONS)),
        reason="needs root, slurm-wlm and munge",
    ),
]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
KillWait=60
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path):
        self.folder = folder
        self.environ = environment(1) | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{PYTHON}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, cwd=self.folder
        )
        assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        # fails for a job that ended minutes ago
        shown = self("scontrol", "show", "job", "-o", job)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait(self, job: str, condition, seconds: float = 400) -> None:
        until, ended = time.monotonic() + seconds, 0
        while not condition():
            state = self.state(job)
            ended = ended + 1 if state in ("CANCELLED", "FAILED", "NODE_FAIL") else 0
            # it may come back
            assert ended < 150, state + self.said(job)
            assert time.monotonic() < until, state + self.said(job)
            if state == "PENDING":  # a requeued job waits for two minutes otherwise
                with contextlib.suppress(AssertionError):
                    self("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.2)

    def said(self, job: str) -> str:
        return "".join(
            path.read_text()[-3000:] for path in self.folder.glob(f"*-{job}.log")
        )


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Yields a cluster of one node. Its folder is short: a socket's path is, and munged
    is picky.
    """
    folder = Path(f"/run/jaxdist-slurm-{os.getpid()}")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, folder=folder, ports=free_ports(2))
    )
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    files = {
        name: f"{folder}/munge.{name}"
        for name in ("socket", "key", "pid", "log", "seed")
    }
    flags = [
        f"--{'key' if n == 'key' else n}{'' if n == 'socket' else '-file'}={p}"
        for n, p in files.items()
    ]
    cluster = Slurm(folder)
    running = []
    try:
        for words in (
            ["munged", "--foreground", "--force", *flags],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            log = open(folder / f"{words[0]}.out", "w")
            running.append(
                subprocess.Popen(words, env=cluster.environ, stdout=log, stderr=log)
            )
            time.sleep(1)
        until = time.monotonic() + 30
        while "idle" not in cluster("sinfo", "-h", "-o", "%T"):
            assert time.monotonic() < until, (
                cluster("sinfo", "-R") + (folder / "slurmd.out").read_text()
            )
            time.sleep(0.5)
        yield cluster
    finally:
        for daemon in reversed(running):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)


def arguments(workdir: Path, **changes) -> list[str]:
    # without `python -m jaxdist.train`
    return command(workdir, **(SETTINGS | changes))[3:]


def test_a_stopped_and_requeued_job_ends_finished(slurm, tmp_path):
    workdir, straight = tmp_path / "run", tmp_path / "straight"
    slurm.environ |= environment(2) | {
        "PROCESSES": "2",
        "SLURM_CONF": slurm.environ["SLURM_CONF"],
        "PATH": slurm.environ["PATH"],
    }
    script = ["sbatch", "--parsable", "--nodes=1", str(ROOT / "deploy" / "slurm.sh")]
    job = slurm(*script, *arguments(workdir, train__steps=120)).strip()
    slurm.wait(job, lambda: last_step(workdir) >= 5)
    # what --signal=B:USR1@180 does at its time
    slurm("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job, lambda: len(events(workdir, "preempted")) == 1)
    first = last_step(workdir)
    slurm.wait(job, lambda: last_step(workdir) >= first + 5)
    # what a preemption by a job of higher priority does
    slurm("scontrol", "requeue", job)
    slurm.wait(job, lambda: len(events(workdir, "preempted")) == 2)
    slurm.wait(job, lambda: slurm.state(job) == "COMPLETED")
    assert "Restarts=2" in slurm("scontrol", "show", "job", job)
    assert len(events(workdir, "start")) == 3
    assert last_step(workdir) == 120
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    job = slurm(*script, *arguments(straight, train__steps=120)).strip()
    slurm.wait(job, lambda: slurm.state(job) == "COMPLETED")
    assert losses(workdir) == losses(straight)


def test_two_agents_are_one_run_and_an_agent_that_loses_a_process_ends_it(
    slurm, tmp_path
):
    workdir = tmp_path / "run"
    words = [
        "srun",
        "-n",
        "2",
        "--kill-on-bad-exit=1",
        "python",
        "-m",
        "jaxdist.launch",
        "--",
    ]
    with open(tmp_path / "said", "w") as said:
        step = [*words, *command(workdir, **SETTINGS)]
        agents = subprocess.Popen(
            step, env=slurm.environ, stdout=said, stderr=said, cwd=slurm.folder
        )
        while last_step(workdir) < 5:
            assert agents.poll() is None, (tmp_path / "said").read_text()[-3000:]
            time.sleep(0.05)
        os.kill(trainers(workdir)[1], signal.SIGKILL)
        # srun ends the other agents at the first that fails, and reports the highest
        # code.
        assert agents.wait(60) in (70, 137, 143), (tmp_path / "said").read_text()[
            -3000:
        ]
    assert not trainers(workdir)
    (begun,) = events(workdir, "start")
    assert begun["processes"] == 2
    assert "agent 1 of 2, started by Slurm" in (tmp_path / "said").read_text()
    assert events(workdir, "peer_lost")


def trainers(workdir: Path) -> list[int]:
    """Returns the train processes of a workdir, their agents not."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().decode().split("\0")
            if words[1:3] == ["-m", "jaxdist.train"] and str(workdir) in words:
                found.append(int(entry.parent.name))
    return found
