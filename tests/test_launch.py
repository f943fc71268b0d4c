"""Runs under `launch`: several real processes that are killed, preempted and resized, and end the same."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_train import TINY, command, environment, every_loss, last_step, losses

from jaxdist import launch, train
from jaxdist.checkpoint.folder import list_steps
from jaxdist.resilience import progress
from jaxdist.resilience.scheduler import find_agents
from jaxdist.telemetry.metrics import read_events

STEPS = 50
SETTINGS = {
    "train__steps": STEPS, "optimizer__name": "adamw", "checkpoint__every_steps": 5, "mesh__fsdp": 2,
    "train__sample_tokens": 0, "optimizer__learning_rate": 1e-3,
}  # fmt: skip


def start(workdir: Path, *flags: str, devices: int = 2, **changes) -> subprocess.Popen:
    own = [sys.executable, "-m", "jaxdist.launch", "--devices-per-process", str(devices), *flags, "--"]
    output = open(workdir.parent / f"{workdir.name}.log", "a")  # a pipe that nobody reads would fill up
    return subprocess.Popen(
        [*own, *command(workdir, **(SETTINGS | changes))], env=environment(1), stdout=output, stderr=output
    )


def output(workdir: Path) -> str:
    return (workdir.parent / f"{workdir.name}.log").read_text()


@contextlib.contextmanager
def launched(workdir: Path, *flags: str, **changes) -> Iterator[subprocess.Popen]:
    """Yields the agent of a run; in the end it is gone, with all that it started."""
    agent = start(workdir, *flags, **changes)
    try:
        yield agent
    finally:
        agent.terminate()
        try:
            agent.wait(60)
        except subprocess.TimeoutExpired:
            agent.kill()


def finish(agent: subprocess.Popen, workdir: Path, code: int = 0) -> None:
    assert agent.wait(300) == code, output(workdir)[-4000:]


def wait_for_step(agent: subprocess.Popen, workdir: Path, step: int, since: int = 0) -> None:
    """Waits until the metrics show the step, after `since` bytes of them."""
    until = time.monotonic() + 200
    while not any(row >= step for row in steps_after(workdir, since)):
        assert agent.poll() is None and time.monotonic() < until, output(workdir)[-4000:]
        time.sleep(0.005)


def steps_after(workdir: Path, since: int) -> list[int]:
    metrics = workdir / "metrics.jsonl"
    if not metrics.exists():
        return []
    lines = metrics.read_bytes()[since:].splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith(b"\n")]


def processes(agent: subprocess.Popen) -> dict[int, int]:
    """Returns {process number: process id} of what the agent has started."""
    found = {}
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        known = dict(v.decode().partition("=")[::2] for v in variables)
        if "PYTHONUNBUFFERED" in known:  # not the guard
            found[int(known.get("JAXDIST_PROCESS_ID", "0"))] = int(child)
    return found


def kill(agent: subprocess.Popen, number: int, workdir: Path) -> int:
    """Kills a process -9; returns the size of the metrics then."""
    size = (workdir / "metrics.jsonl").stat().st_size
    os.kill(processes(agent)[number], signal.SIGKILL)
    return size


def events(workdir: Path, name: str) -> list[dict]:
    return [event for event in read_events(workdir) if event["event"] == name]


def listening(pid: int) -> list[str]:
    """Returns the addresses on which a process listens, in hexadecimal as /proc has them."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(link))
    rows = [row.split() for kind in ("tcp", "tcp6") for row in open(f"/proc/{pid}/net/{kind}")]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run by two processes."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    with launched(workdir, "--processes", "2") as agent:
        wait_for_step(agent, workdir, 1)
        listeners = [where for pid in processes(agent).values() for where in listening(pid)]
        finish(agent, workdir)
    loopback = ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1, and as an IPv6 address
    assert listeners and set(listeners) <= set(loopback), listeners
    return workdir


def test_launch_trains_with_several_processes(straight):
    assert len(losses(straight)) == STEPS
    (begun,) = events(straight, "start")
    assert (begun["processes"], begun["devices"]) == (2, 4)
    said = output(straight)
    assert "[0] process 0 of 2, joined through jaxdist launch" in said
    assert "[1] process 1 of 2, joined through jaxdist launch" in said
    assert "[1] step" not in said


def test_preempted_killed_and_shrunk_a_run_ends_the_same(straight, tmp_path):
    workdir, capacity = tmp_path / "run", tmp_path / "capacity"
    capacity.write_text("2")
    flags = ["--processes", "2", "--min-processes", "1", "--capacity-file", str(capacity)]
    with launched(workdir, *flags) as agent:
        wait_for_step(agent, workdir, 4)
        os.kill(processes(agent)[1], signal.SIGTERM)  # one of them, and not the first
        finish(agent, workdir, 75)
    (preempted,) = events(workdir, "preempted")
    assert 4 <= preempted["step"] < STEPS and not events(workdir, "peer_lost")
    assert list_steps(workdir / "checkpoints")[-1] == preempted["step"] == last_step(workdir)

    with launched(workdir, *flags) as agent:
        wait_for_step(agent, workdir, preempted["step"] + 6)
        since = kill(agent, 0, workdir)
        wait_for_step(agent, workdir, preempted["step"] + 8, since)
        same = every_loss(workdir)
        capacity.write_text("1")
        kill(agent, 1, workdir)
        finish(agent, workdir)
    lost = [(event["process"], event["why"]) for event in events(workdir, "peer_lost")]
    assert lost == [(0, "process 0 killed by SIGKILL"), (1, "process 1 killed by SIGKILL")]
    assert len(events(workdir, "restore")) == 3
    assert [begun["processes"] for begun in events(workdir, "start")] == [2, 2, 2, 1]
    reference = losses(straight)
    assert len(same) > 10 and all(values == {reference[step]} for step, values in same.items())

    (resized,) = events(workdir, "resize")
    assert (resized["devices_before"], resized["devices"], resized["accumulation"]) == (4, 2, 2)
    assert json.loads((workdir / "config.json").read_text())["batch"]["accumulation"] == 1
    assert losses(workdir) == pytest.approx(reference, rel=1e-5) and len(reference) == STEPS


FOUR = {"devices": 1, "batch__global_size": 12, "mesh__fsdp": 1, "train__steps": 160}


@pytest.fixture(scope="module")
def straight_of_four(tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run by four processes."""
    workdir = tmp_path_factory.mktemp("four") / "run"
    with launched(workdir, "--processes", "4", **FOUR) as agent:
        finish(agent, workdir)
    return workdir


@pytest.mark.slow
def test_4_to_3_to_1_to_4_processes(straight_of_four, tmp_path):
    workdir, capacity = tmp_path / "run", tmp_path / "capacity"
    capacity.write_text("4")
    elastic = ["--processes", "4", "--min-processes", "1", "--capacity-file", str(capacity)]
    waited = []
    with launched(workdir, *elastic, **FOUR) as agent:
        for step, size in ((20, 3), (50, 1), (80, 4)):
            wait_for_step(agent, workdir, step)
            capacity.write_text(str(size))
            newest, since, began = last_step(workdir), kill(agent, 0, workdir), time.monotonic()
            wait_for_step(agent, workdir, newest, since)
            waited.append(time.monotonic() - began)
        finish(agent, workdir)
    print(f"kill to first new step: {waited} s")
    assert [begun["processes"] for begun in events(workdir, "start")] == [4, 3, 1, 4]
    assert [event["accumulation"] for event in events(workdir, "resize")] == [2, 4, 1]
    assert losses(workdir) == pytest.approx(losses(straight_of_four), rel=1e-5)


def signal_agent(agent: subprocess.Popen, _: Path) -> None:
    agent.send_signal(signal.SIGTERM)


def signal_one(agent: subprocess.Popen, _: Path) -> None:
    os.kill(processes(agent)[2], signal.SIGTERM)


def signal_twice(agent: subprocess.Popen, workdir: Path) -> None:
    signal_agent(agent, workdir)
    time.sleep(0.3)
    signal_agent(agent, workdir)
    for process in processes(agent).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def signal_in_save(agent: subprocess.Popen, workdir: Path) -> None:
    while not list((workdir / "checkpoints").glob("*tmp*")):
        assert agent.poll() is None
    signal_one(agent, workdir)


WAYS = [signal_one, signal_agent, signal_twice, signal_in_save]


@pytest.mark.slow
def test_whoever_is_told_to_stop_all_save_the_same_step(straight_of_four, tmp_path):
    workdir, saved, waited = tmp_path / "run", [], {}

    def stopped(agent: subprocess.Popen, way) -> None:
        way(agent, workdir)
        began = time.monotonic()
        finish(agent, workdir, 75)
        waited[way.__name__] = time.monotonic() - began

    for way in WAYS:
        with launched(workdir, "--processes", "4", **FOUR) as agent:
            wait_for_step(agent, workdir, (saved or [0])[-1] + 3)
            stopped(agent, way)
        saved.append(events(workdir, "preempted")[-1]["step"])
        assert list_steps(workdir / "checkpoints")[-1] == saved[-1] == last_step(workdir)
    with launched(workdir, "--processes", "4", **FOUR) as agent:  # while it restores
        logged = output(workdir).count("mesh: ")
        while output(workdir).count("mesh: ") == logged:
            assert agent.poll() is None
        stopped(agent, signal_agent)
        assert last_step(workdir) == saved[-1]
    with launched(workdir, "--processes", "4", **FOUR) as agent:
        finish(agent, workdir)
    print(f"saved at {saved}, seconds until the end: {waited}")
    assert len(events(workdir, "preempted")) == len(WAYS) and saved == sorted(set(saved))
    assert losses(workdir) == losses(straight_of_four)
    assert all(len(values) == 1 for values in every_loss(workdir).values())


@pytest.mark.slow
def test_20_random_kills(tmp_path):
    straight, workdir, longer = tmp_path / "straight", tmp_path / "run", {"train__steps": 300}
    draw = random.Random(seed := random.randrange(10**6))
    with launched(straight, "--processes", "2", **longer) as agent:
        finish(agent, straight)
    kills, since = [], 0
    with launched(workdir, "--processes", "2", "--max-restarts", "20", **longer) as agent:
        while len(kills) < 20 and agent.poll() is None:
            if draw.random() < 0.75:  # else wherever it is: starting, restoring, in its first step
                wait_for_step(agent, workdir, 1, since)
            time.sleep(draw.uniform(0, 2))
            if len(found := processes(agent)) == 2:
                kills.append((last_step(workdir), number := draw.randrange(2)))
                since = metrics.stat().st_size if (metrics := workdir / "metrics.jsonl").exists() else 0
                os.kill(found[number], signal.SIGKILL)
                time.sleep(0.3)  # until the agent has noticed
        finish(agent, workdir)
    print(f"seed {seed}; killed at (step, process): {kills}")
    assert len(events(workdir, "peer_lost")) > 10
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    assert losses(workdir) == losses(straight)
    assert not list((workdir / "checkpoints").glob("*tmp*"))


# --- the command ----------------------------------------------------------------------------------


def test_faults_have_one_line_and_exit_code_78(capsys):
    assert launch.main(["--processes", "0", "--max-restarts", "-1"]) == 78
    faults = capsys.readouterr().err.splitlines()
    assert len(faults) == 3 and all(fault.startswith("error: ") for fault in faults)
    assert faults[0] == "error: --processes 0: must be >= 1" and "no command" in faults[2]
    assert launch.main(["--processs", "2", "--", "true"]) == 78
    assert launch.main(["--", "/no/such/command"]) == 78
    assert "/no/such/command" in capsys.readouterr().err


def test_train_and_launch_agree_on_the_default_workdir():
    assert train.default_workdir is progress.default_workdir
    assert TINY["train.steps"] and progress.run_folder(command(Path("a"))) == Path("a")


# --- templates ------------------------------------------------------------------------------------

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def test_the_jobset_starts_an_agent_that_finds_its_place():
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    for rule in jobset["spec"]["failurePolicy"]["rules"]:  # as the resource's schema has it
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [77, 78]
    assert rule["onExitCodes"]["containerName"] == container["name"] and pod["restartPolicy"] == "Never"
    options = launch._options(container["command"][3:] + container["args"])
    assert options.processes == 1 and options.grace_s < pod["terminationGracePeriodSeconds"]
    assert progress.run_folder(options.command) == Path("/runs/quickstart")
    labels = {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": workers["name"],
        "jobset.sigs.k8s.io/restart-attempt": "0",
    }
    environ = {"JOB_COMPLETION_INDEX": "2"}  # Kubernetes sets it in Indexed jobs
    for variable in container["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        environ[variable["name"]] = variable.get("value") or labels[field.split("'")[1]]
    found = find_agents(environ)
    assert (found.number, found.index) == (job["parallelism"], 2)
    assert found.host == "jaxdist-workers-0-0.jaxdist"


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_vm.sh"])
def test_the_scripts_are_whole(name):
    checked = subprocess.run(["bash", "-n", DEPLOY / name], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert os.access(DEPLOY / name, os.X_OK)


FAKES = {
    "srun": 'echo "srun $*" >> said; sleep 100 & echo $! > pid; wait $!; exit $(cat code)',
    "scancel": 'echo "scancel $*" >> said; kill $(cat pid)',
    "scontrol": 'echo "scontrol $*" >> said',
}


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (70, True), (137, True), (0, False), (78, False)])
def test_the_slurm_script_requeues_what_a_new_start_may_cure(tmp_path, code, requeued):
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "code").write_text(str(code))
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen([DEPLOY / "slurm.sh", "--config", "x"], cwd=tmp_path, env=environ)
    until = time.monotonic() + 20
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1 does before the time is up
    assert job.wait(20) == (0 if requeued else code)
    said = (tmp_path / "said").read_text()
    assert "jaxdist.launch --processes 1 -- python -m jaxdist.train --config x" in said
    assert "scancel --signal=TERM 7.0" in said and ("scontrol requeue 7" in said) == requeued


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
def test_agents_under_a_real_mpirun():
    agents = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "jaxdist.launch",
    ]

    def run(text: str) -> subprocess.CompletedProcess:
        command = [*agents, "--processes", "2", "--", "/bin/sh", "-c", text]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run("echo $JAXDIST_PROCESS_ID of $JAXDIST_NUM_PROCESSES at $JAXDIST_COORDINATOR")
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(":") for line in sorted(done.stdout.splitlines())]
    assert [line[0] for line in lines] == [f"[{n}] {n} of 4 at 127.0.0.1" for n in range(4)]
    assert len({port for *_, port in lines}) == 1
    assert run("[ $JAXDIST_PROCESS_ID = 3 ] && exit 5; sleep 30").returncode == 70


TPU_FAKES = {
    "gcloud": 'bash -c "${@: -1}"',
    "curl": """case "$*" in
*agent-worker-number) echo 1 ;;
*worker-network-endpoints) echo "a:8470:10.0.0.7,b:8470:10.0.0.8" ;;
esac""",
    "python3": 'echo "$JAXDIST_AGENT $JAXDIST_AGENTS $JAXDIST_AGENTS_AT $*" >> said\n'
    "[ $(wc -l < said) = 3 ] && exit 75; exit 70",
    "sleep": "",
}


def test_the_tpu_script_tells_each_agent_its_place_and_starts_again_after_a_loss(tmp_path):
    for name, text in TPU_FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [DEPLOY / "tpu_vm.sh", "slice", "zone", "--config", "a b"]
    assert subprocess.run(command, cwd=tmp_path, env=environ).returncode == 75
    said = (tmp_path / "said").read_text().splitlines()
    place = "1 2 10.0.0.7:61440 "
    assert said == [place + "-m jaxdist.launch -- python3 -m jaxdist.train --config a b"] * 3
    given = dict(zip(("JAXDIST_AGENT", "JAXDIST_AGENTS", "JAXDIST_AGENTS_AT"), place.split(), strict=True))
    assert find_agents(given).host == "10.0.0.7"
