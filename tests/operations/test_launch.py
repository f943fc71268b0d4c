"""Runs under `launch`: several real processes that are killed, preempted and resized,
and end the same.
"""

import contextlib
import errno
import json
import os
import pwd
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist import launch
from jaxdist.checkpoint.folders import list_steps
from jaxdist.distributed import initialize
from jaxdist.operations.launch import growth, run_progress, supervisor
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import cli
from support.launches import (
    STEPS,
    apart,
    assert_fed_once,
    assert_time_adds_up,
    ended,
    events,
    finish,
    kill,
    launched,
    leftovers,
    listeners,
    listening,
    output,
    parameters,
    processes,
    same_bits,
    start,
    wait_for_step,
)
from support.runs import TINY, command, environment, every_loss, last_step, losses

SHORT = 24  # steps of the runs that are started by default


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run by two processes."""
    return straight_run_of_two(tmp_path_factory, SHORT)


@pytest.fixture(scope="module")
def long_straight(tmp_path_factory) -> Path:
    """Returns that of a run that is long enough to be ended several times."""
    return straight_run_of_two(tmp_path_factory, STEPS)


def straight_run_of_two(tmp_path_factory, steps: int) -> Path:
    workdir = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(workdir.parent / "cache"))
        patch.setenv("JAX_DEBUG_LOG_MODULES", "jax._src.compiler")
        # with no level set, jax's own handler prints nothing
        patch.setenv("JAX_LOGGING_LEVEL", "WARNING")
        agent = start(workdir, "--processes", "2", train__steps=steps)
    with ended(agent):
        wait_for_step(agent, workdir, 1)
        heard = [
            where
            for pid in processes(agent).values()
            for where in listening(pid).values()
        ]
        finish(agent, workdir)
    # 127.0.0.1, and as an IPv6 address
    loopback = ("0100007F", "0000000000000000FFFF00000100007F")
    assert heard, "the agent listens"
    assert set(heard) <= set(loopback)
    return workdir


def test_launch_trains_with_several_processes(straight):
    assert len(losses(straight)) == SHORT
    (begun,) = events(straight, "start")
    assert (begun["processes"], begun["devices"]) == (2, 4)
    said = output(straight)
    assert "[0] process 0 of 2, joined through jaxdist launch" in said
    assert "[1] process 1 of 2, joined through jaxdist launch" in said
    assert "[1] step" not in said


def test_processes_of_one_machine_compile_a_step_once(straight):
    """From an empty cache; jax's own key has each process's devices in it, so that only
    one ever reads.
    """
    said = [line for line in output(straight).splitlines() if "'jit_step'" in line]
    assert any(line.startswith("[0]") and "MISS" in line for line in said)
    assert any(line.startswith("[1]") and "cache hit" in line for line in said)
    assert not any(line.startswith("[1]") and "MISS" in line for line in said)


def test_killed_and_shrunk_a_run_ends_the_same(straight, tmp_path, monkeypatch):
    # the same step
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(straight.parent / "cache"))
    workdir, capacity = tmp_path / "run", tmp_path / "capacity"
    capacity.write_text("2")
    flags = ["--min-processes", "1", "--capacity-file", str(capacity)]
    short = {"train__steps": SHORT}
    with launched(workdir, "--processes", "2", *flags, **short) as agent:
        wait_for_step(agent, workdir, 8)
        same = every_loss(workdir)
        capacity.write_text("1")
        kill(agent, 1, workdir)
        finish(agent, workdir)
    lost = [(event["process"], event["why"]) for event in events(workdir, "peer_lost")]
    assert lost == [(1, "process 1 killed by SIGKILL")]
    assert [begun["processes"] for begun in events(workdir, "start")] == [2, 1]
    reference = losses(straight)
    assert len(same) >= 8
    assert all(values == {reference[step]} for step, values in same.items())
    check_shrunk(workdir, reference)
    assert len(reference) == SHORT


def check_shrunk(workdir: Path, reference: dict[int, float]) -> None:
    """Asserts that a run on half of the devices has done the same work."""
    (resized,) = events(workdir, "resize")
    assert (resized["devices_before"], resized["devices"], resized["accumulation"]) == (
        4,
        2,
        2,
    )
    assert (
        json.loads((workdir / "config.json").read_text())["batch"]["accumulation"] == 1
    )
    assert losses(workdir) == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow
def test_preempted_killed_and_shrunk_a_run_ends_the_same(
    long_straight, tmp_path, monkeypatch
):
    straight = long_straight
    # the same step
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(straight.parent / "cache"))
    workdir, capacity = tmp_path / "run", tmp_path / "capacity"
    capacity.write_text("2")
    flags = [
        "--processes",
        "2",
        "--min-processes",
        "1",
        "--capacity-file",
        str(capacity),
    ]
    with launched(workdir, *flags) as agent:
        wait_for_step(agent, workdir, 4)
        os.kill(processes(agent)[1], signal.SIGTERM)  # one of them, and not the first
        finish(agent, workdir, 75)
    (preempted,) = events(workdir, "preempted")
    assert 4 <= preempted["step"] < STEPS
    assert not events(workdir, "peer_lost")
    assert (
        list_steps(workdir / "checkpoints")[-1]
        == preempted["step"]
        == last_step(workdir)
    )

    with launched(workdir, *flags) as agent:
        wait_for_step(agent, workdir, preempted["step"] + 6)
        since = kill(agent, 0, workdir)
        wait_for_step(agent, workdir, preempted["step"] + 8, since)
        same = every_loss(workdir)
        capacity.write_text("1")
        kill(agent, 1, workdir)
        finish(agent, workdir)
    lost = [(event["process"], event["why"]) for event in events(workdir, "peer_lost")]
    assert lost == [
        (0, "process 0 killed by SIGKILL"),
        (1, "process 1 killed by SIGKILL"),
    ]
    assert len(events(workdir, "restore")) == 3
    assert [begun["processes"] for begun in events(workdir, "start")] == [2, 2, 2, 1]
    reference = losses(straight)
    assert len(same) > 10
    assert all(values == {reference[step]} for step, values in same.items())
    check_shrunk(workdir, reference)
    assert len(reference) == STEPS


@pytest.mark.slow
def test_processes_that_see_different_checkpoint_folders_do_not_start(tmp_path):
    """Each would save its part where the others never look: nothing could be
    restored.
    """
    apart_ = 'mkdir -p $JAXDIST_PROCESS_ID; cd $JAXDIST_PROCESS_ID; exec "$@"'
    own = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--processes",
        "2",
        "--devices-per-process",
        "1",
        "--",
    ]
    done = subprocess.run(
        [*own, "bash", "-c", apart_, "-", *command(Path("run"), mesh__fsdp=2)],
        cwd=tmp_path,
        env=environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 78, done.stdout[-2000:]
    assert "process 1 differs" in done.stdout
    assert "all need the same folder" in done.stdout


@pytest.mark.slow
def test_two_processes_pass_over_folders_that_are_no_steps(long_straight, tmp_path):
    straight = long_straight
    workdir = shutil.copytree(straight, tmp_path / "run")
    checkpoints = workdir / "checkpoints"
    shutil.rmtree(checkpoints / str(STEPS))
    for number in [*range(1000, 1070), 99999999999]:
        (checkpoints / str(number)).mkdir()
    with launched(workdir, "--processes", "2") as agent:
        finish(agent, workdir)
    assert [event["step"] for event in events(workdir, "restore")] == [STEPS - 5]
    assert same_bits(parameters(workdir, STEPS), parameters(straight, STEPS))


@pytest.mark.parametrize("number", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_stop_whose_save_fails_says_what_is_lost(tmp_path, number):
    """No row tells of the steps since the last checkpoint."""
    # bytes of a file
    workdir, limit = tmp_path / "run", (30 << 10, resource.RLIM_INFINITY)
    endless = {
        "train__steps": 100_000,
        "train__log_every": 10_000,
        "checkpoint__every_steps": 0,
        "model__dropout": 0.0,  # it compiles in less time
    }
    with launched(
        workdir,
        "--processes",
        number,
        **(endless | {"checkpoint__every_minutes": 0.015}),
    ) as agent:
        while not (saved := list_steps(workdir / "checkpoints")):
            assert agent.poll() is None
            time.sleep(0.05)
        for pid in processes(agent).values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        time.sleep(0.4)
        agent.send_signal(signal.SIGTERM)
        finish(agent, workdir, 70)
    (stop,) = events(workdir, "stop")
    saved = list_steps(workdir / "checkpoints")
    lost = f"the run resumes at step {saved[-1]}, steps {saved[-1] + 1}-{stop['step']} are lost: "
    said = output(workdir)
    assert stop["reason"] == "save_failed"
    assert lost in stop["error"]
    assert not events(workdir, "preempted")
    assert said.count(
        f"error: the last checkpoint could not be written; {lost}"
    ) == int(number)
    assert "asked to stop, but process" in said
    assert "Traceback" not in said
    assert f"checkpoint {stop['step']} failed: " in said


FOUR = {"devices": 1, "batch__global_size": 12, "mesh__fsdp": 1}
LONG = FOUR | {"train__steps": 160}


def straight_run_of_four(workdir: Path, **settings) -> Path:
    """Returns the workdir of an uninterrupted run by four processes."""
    with launched(workdir, "--processes", "4", **settings) as agent:
        finish(agent, workdir)
    return workdir


@pytest.mark.slow
def test_4_to_3_to_1_to_4_processes(tmp_path):
    """60 steps: in float32 any two sizes drift apart later, and in float64 they do not
    (docs/evidence/launch.md).
    """
    sixty = FOUR | {"train__steps": 60}
    straight = straight_run_of_four(tmp_path / "straight", **sixty)
    workdir, capacity = tmp_path / "run", tmp_path / "capacity"
    capacity.write_text("4")
    elastic = [
        "--processes",
        "4",
        "--min-processes",
        "1",
        "--capacity-file",
        str(capacity),
    ]
    waited = []
    with launched(workdir, *elastic, recorded={}, **sixty) as agent:
        for step, size in ((8, 3), (20, 1), (32, 4)):
            wait_for_step(agent, workdir, step)
            capacity.write_text(str(size))
            newest, since, began = (
                last_step(workdir),
                kill(agent, 0, workdir),
                time.monotonic(),
            )
            wait_for_step(agent, workdir, newest, since)
            waited.append(time.monotonic() - began)
        finish(agent, workdir)
    print(f"kill to first new step: {waited} s")
    assert [begun["processes"] for begun in events(workdir, "start")] == [4, 3, 1, 4]
    assert [event["accumulation"] for event in events(workdir, "resize")] == [2, 4, 1]
    assert losses(workdir) == pytest.approx(losses(straight), rel=1e-5)
    resized, whole = parameters(workdir, 60), parameters(straight, 60)
    print(
        f"moments are up to {apart(resized, whole):.2g} apart, in relative L2 distance"
    )
    assert 0 < apart(resized, whole, "trainable/") <= 1e-5
    assert_fed_once(workdir, 60, 12)
    assert not leftovers(workdir)


@pytest.mark.slow
def test_a_shrunk_group_grows_back_while_it_runs(tmp_path):
    """4 processes, 2 after a kill -9, and 4 again once the capacity file has said so
    for long enough.
    """
    sixty = FOUR | {"train__steps": 60}
    straight = straight_run_of_four(tmp_path / "straight", **sixty)
    workdir, capacity, began = tmp_path / "run", tmp_path / "capacity", time.time()
    capacity.write_text("4")
    flags = [
        "--processes",
        "4",
        "--min-processes",
        "1",
        "--max-restarts",
        "1",
        "--grow-minutes",
        "0.05",
    ]

    def flap(times: int) -> None:
        for size in ("4", "2") * times:
            capacity.write_text(size)
            time.sleep(growth.LOOK_S + 1)  # each is seen

    paced = {"FAULTY_PACE_S": "1"}
    with launched(
        workdir, *flags, "--capacity-file", str(capacity), recorded=paced, **sixty
    ) as agent:
        wait_for_step(agent, workdir, 6)
        capacity.write_text("2")
        newest, since = last_step(workdir), kill(agent, 3, workdir)
        wait_for_step(agent, workdir, newest + 1, since)
        flap(2)
        assert "are asked to save" not in output(workdir)
        assert last_step(workdir) < 40
        capacity.write_text("4")
        back = time.time()
        while len(events(workdir, "start")) < 3:
            assert agent.poll() is None, output(workdir)[-4000:]
            time.sleep(0.01)
        flap(1)
        finish(agent, workdir)
    (grew,) = events(workdir, "grow")
    assert (grew["processes_before"], grew["processes"]) == (2, 4)
    assert [begun["processes"] for begun in events(workdir, "start")] == [4, 2, 4]
    assert [event["accumulation"] for event in events(workdir, "resize")] == [2, 1]
    assert len(events(workdir, "peer_lost")) == 1
    ((saved, at),) = [
        (event["step"], event["time"]) for event in events(workdir, "preempted")
    ]
    (first,) = [
        row["time"] for row in read_rows(workdir).train if row["step"] == saved + 1
    ]
    print(
        f"from room to the request and save {at - back:.1f} s, to the first step of 4 {first - back:.1f} s"
    )
    spent = assert_time_adds_up(workdir, began=began, ended=time.time())
    print({name: round(seconds, 2) for name, seconds in spent.buckets.items()})
    assert losses(workdir) == pytest.approx(losses(straight), rel=1e-5)
    distance = apart(parameters(workdir, 60), parameters(straight, 60), "trainable/")
    print(f"parameters are {distance:.2g} apart")
    assert 0 < distance <= 1e-5
    assert_fed_once(workdir, 60, 12)
    assert not leftovers(workdir)


@pytest.mark.slow
def test_a_stop_during_a_growth_saves_and_ends_with_75(tmp_path):
    workdir, capacity = tmp_path / "run", tmp_path / "capacity"
    capacity.write_text("1")
    flags = [
        "--processes",
        "2",
        "--min-processes",
        "1",
        "--capacity-file",
        str(capacity),
    ]
    paced, long = {"FAULTY_PACE_S": "1"}, FOUR | {"train__steps": 100}
    with launched(
        workdir, *flags, "--grow-minutes", "0.01", recorded=paced, **long
    ) as agent:
        wait_for_step(agent, workdir, 2)
        capacity.write_text("2")
        while "are asked to save" not in output(workdir):
            assert agent.poll() is None
            time.sleep(0.01)
        signal_agent(agent, workdir)
        finish(agent, workdir, 75)
    assert [begun["processes"] for begun in events(workdir, "start")] == [1]
    (stopped,) = events(workdir, "preempted")
    assert (
        list_steps(workdir / "checkpoints")[-1]
        == stopped["step"]
        == last_step(workdir)
        >= 2
    )
    assert not events(workdir, "grow")
    assert not leftovers(workdir)


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
def test_whoever_is_told_to_stop_all_save_the_same_step(tmp_path):
    straight, workdir = (
        straight_run_of_four(tmp_path / "straight", **LONG),
        tmp_path / "run",
    )
    saved, waited = [], {}

    def stopped(agent: subprocess.Popen, way) -> None:
        way(agent, workdir)
        began = time.monotonic()
        finish(agent, workdir, 75)
        waited[way.__name__] = time.monotonic() - began

    for way in WAYS:
        with launched(workdir, "--processes", "4", **LONG) as agent:
            wait_for_step(agent, workdir, (saved or [0])[-1] + 3)
            stopped(agent, way)
        saved.append(events(workdir, "preempted")[-1]["step"])
        assert (
            list_steps(workdir / "checkpoints")[-1] == saved[-1] == last_step(workdir)
        )
    with launched(workdir, "--processes", "4", **LONG) as agent:  # while it restores
        logged = output(workdir).count("mesh: ")
        while output(workdir).count("mesh: ") == logged:
            assert agent.poll() is None
        stopped(agent, signal_agent)
        assert last_step(workdir) == saved[-1]
    with launched(workdir, "--processes", "4", **LONG) as agent:
        finish(agent, workdir)
    print(f"saved at {saved}, seconds until the end: {waited}")
    assert len(events(workdir, "preempted")) == len(WAYS)
    assert saved == sorted(set(saved))
    assert losses(workdir) == losses(straight)
    assert same_bits(parameters(workdir, 160), parameters(straight, 160))
    assert all(len(values) == 1 for values in every_loss(workdir).values())


def kill_20_times(
    agent: subprocess.Popen,
    workdir: Path,
    draw: random.Random,
    number: int,
    *,
    after_s: float = 2.0,
    resize=None,
) -> tuple[list[tuple[int, int]], dict[str, str]]:
    """Kills any of the processes, a quarter of the times at any moment of a start.

    Args:
      number: processes of the first start; `resize()` gives those of the next.
      after_s: at most so long after a start's first step; with `resize`, after its
        first checkpoint.

    Returns:
      (step, process) of each kill, and all that listened.
    """
    kills, since, saved, heard = [], 0, [], {}
    while len(kills) < 20 and agent.poll() is None:
        # else wherever it is: starting, restoring, in its first step
        if draw.random() < 0.75:
            wait_for_step(agent, workdir, 1, since)
            while (
                resize
                and list_steps(workdir / "checkpoints")[-1:] <= saved
                and agent.poll() is None
            ):
                time.sleep(0.005)
        time.sleep(draw.uniform(0, after_s))
        if len(found := processes(agent)) == number:
            for pid in found.values():
                heard |= listening(pid)
            kills.append((last_step(workdir), rank := draw.randrange(number)))
            since = (
                metrics.stat().st_size
                if (metrics := workdir / "metrics.jsonl").exists()
                else 0
            )
            saved = list_steps(workdir / "checkpoints")[-1:]
            number = resize() if resize else number
            os.kill(found[rank], signal.SIGKILL)
            time.sleep(0.3)  # until the agent has noticed
    return kills, heard


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 4])
def test_20_random_kills(tmp_path, number):
    """The same 12 sequences a step, whatever the processes."""
    straight, workdir = tmp_path / "straight", tmp_path / "run"
    size = FOUR | {"train__steps": 300}
    draw = random.Random(seed := random.randrange(10**6))
    flags = ["--processes", str(number), "--max-restarts", "20"]
    with launched(straight, *flags, **size) as agent:
        finish(agent, straight)
    with launched(workdir, *flags, recorded={}, **size) as agent:
        kills, heard = kill_20_times(agent, workdir, draw, number)
        finish(agent, workdir)
    print(
        f"seed {seed}; killed at (step, process): {kills}; {len(heard)} ports were listened on"
    )
    assert len(events(workdir, "peer_lost")) > 10
    assert len(heard) > 10
    assert not leftovers(workdir)
    assert not heard.keys() & listeners().keys()
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    assert losses(workdir) == losses(straight)
    assert same_bits(parameters(workdir, 300), parameters(straight, 300))
    assert_fed_once(workdir, 300, 12)


@pytest.mark.slow
def test_20_random_kills_each_with_another_size(tmp_path):
    """In 60 steps, of which each life adds a few."""
    straight, workdir, capacity = (
        tmp_path / "straight",
        tmp_path / "run",
        tmp_path / "capacity",
    )
    size = FOUR | {"train__steps": 60, "checkpoint__every_steps": 1}
    draw, sizes = random.Random(seed := random.randrange(10**6)), [4]

    def resize() -> int:
        sizes.append(draw.choice([n for n in (1, 2, 3, 4) if n != sizes[-1]]))
        capacity.write_text(str(sizes[-1]))
        return sizes[-1]

    with launched(straight, "--processes", "4", **size) as agent:
        finish(agent, straight)
    capacity.write_text("4")
    flags = ["--processes", "4", "--min-processes", "1", "--max-restarts", "20"]
    with launched(
        workdir, *flags, "--capacity-file", str(capacity), recorded={}, **size
    ) as agent:
        kills, heard = kill_20_times(
            agent, workdir, draw, 4, after_s=0.02, resize=resize
        )
        finish(agent, workdir)
    distance = apart(parameters(workdir, 60), parameters(straight, 60), "trainable/")
    print(
        f"seed {seed}; killed at (step, process): {kills}; sizes {sizes}; {distance:.2g} apart"
    )
    assert len(events(workdir, "peer_lost")) > 10
    assert len(events(workdir, "resize")) > 8
    assert not leftovers(workdir)
    assert not heard.keys() & listeners().keys()
    assert losses(workdir) == pytest.approx(losses(straight), rel=1e-5)
    assert distance <= 1e-5
    assert_fed_once(workdir, 60, 12)


# --- the command ----------------------------------------------------------------------


def test_faults_have_one_line_and_exit_code_78(capsys, tmp_path):
    assert launch.main(["--processes", "0", "--max-restarts", "-1"]) == 78
    faults = capsys.readouterr().err.splitlines()
    assert len(faults) == 3
    assert all(fault.startswith("error: ") for fault in faults)
    assert faults[0] == "error: --processes 0: must be >= 1"
    assert "no command" in faults[2]
    assert launch.main(["--processs", "2", "--", "true"]) == 78
    assert launch.main(["--", "/no/such/command"]) == 78
    assert "/no/such/command" in capsys.readouterr().err
    assert launch.main(["--", str(tmp_path)]) == 78
    assert "Permission denied" in capsys.readouterr().err
    assert launch.main(["--", "/etc/passwd/x"]) == 78
    assert "Not a directory" in capsys.readouterr().err
    (bare := tmp_path / "script").write_text("echo no interpreter is named")
    bare.chmod(0o755)
    assert launch.main(["--", str(bare)]) == 78
    assert "Exec format error" in capsys.readouterr().err
    for wrong in ("nan", "inf", "-1"):
        assert launch.main([f"--grace-seconds={wrong}", "--", "true"]) == 78
        assert (
            f"--grace-seconds {wrong}: must be a finite number >= 0"
            in capsys.readouterr().err
        )
        assert launch.main([f"--grow-minutes={wrong}", "--", "true"]) == 78
        said = capsys.readouterr().err
        assert f"--grow-minutes {wrong}: must be a finite number >= 0" in said
        assert f"--grow-minutes {wrong}: needs --capacity-file" in said


def test_more_processes_than_the_machine_can_run_are_refused(monkeypatch, capsys):
    assert launch.main(["--processes", "100000", "--", "true"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --processes 100000: must be <= ")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 4096))
    assert launch.main(["--processes", "20", "--", "true"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs 52 open files, and the limit is 40" in line


def test_a_machine_that_has_no_room_for_a_process_ends_with_70(monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert launch.main(["--", "true"]) == 70
    assert capsys.readouterr().err.endswith("Resource temporarily unavailable\n")


def test_preflight_goes_on_with_fewer_too(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(supervisor, "_WAIT_S", 0.1)
    monkeypatch.setattr(launch, "_PREFLIGHT", ["echo", "measured"])
    (capacity := tmp_path / "capacity").write_text("1")
    flags = [
        "--processes",
        "2",
        "--capacity-file",
        str(capacity),
        "--preflight",
        "--",
        "echo",
        "trained",
    ]
    assert launch.main(["--min-processes", "1", *flags]) == 0
    assert capfd.readouterr().out.splitlines() == ["[0] measured", "[0] trained"]
    assert launch.main(flags) == 70
    assert not capfd.readouterr().out


def test_without_a_home_compiled_programs_are_not_kept(monkeypatch):
    assert initialize.compile_cache_folder({}) is not None
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as for a container's user
    assert initialize.compile_cache_folder({}) is None


def test_train_and_launch_agree_on_the_default_workdir():
    assert cli.default_workdir is run_progress.default_workdir
    assert TINY["train.steps"]
    assert run_progress.run_folder(command(Path("a"))) == Path("a")
