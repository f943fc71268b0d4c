"""Full, read-only and slow disks, and damage between two starts: what a run makes of
them.
"""

import contextlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.background import Background
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.telemetry.metrics import MetricsWriter, read_events, read_rows
from jaxdist.trainer import run_config, workdir
from support.checkpoints import (
    a_data_file,
    assert_bitwise,
    flip,
    names,
    save_and_wait,
    straight_fixture,  # noqa: F401  pytest finds them here
)
from support.launches import launched
from support.runs import command, environment, losses, train

MIB = 1 << 20


def mounted(folder: Path, *options: str) -> bool:
    done = subprocess.run(
        ["mount", *options, str(folder)], capture_output=True, check=False
    )
    return done.returncode == 0


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Returns the folder of a disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        pytest.skip("mount of a tmpfs is not permitted here; run as root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def filler(folder: Path, leave: int) -> Path:
    """Fills the disk but for some bytes; returns the file to delete to free it."""
    file = folder / "filler"
    file.write_bytes(b"x" * max(0, shutil.disk_usage(folder).free - leave))
    assert shutil.disk_usage(folder).free <= leave
    return file


def noise(mib: float) -> dict:
    """Returns a state that does not compress."""
    return {"x": jax.random.bits(jax.random.key(0), (int(mib * MIB) // 4,))}


def test_a_save_that_does_not_fit_is_not_begun(small_disk):
    with CheckpointManager(small_disk / "c", CheckpointConfig()) as store:
        assert save_and_wait(store, 1, noise(1)).ok
        full = filler(small_disk, leave=MIB // 2)
        before = shutil.disk_usage(small_disk).free
        failed = save_and_wait(store, 2, noise(1))
        assert not failed.ok
        assert "1,048,576 bytes are needed" in str(failed.error)
        assert shutil.disk_usage(small_disk).free == before
        assert names(small_disk / "c") == ["1"]
        full.unlink()
        assert save_and_wait(store, 2, noise(1)).ok
        assert_bitwise(store.restore(noise(1)).state, noise(1))


@pytest.mark.parametrize("leave", [0, MIB // 2, MIB * 15 // 16])
def test_a_disk_that_fills_during_the_save_loses_that_save_alone(
    small_disk, leave, monkeypatch, capfd
):
    with CheckpointManager(small_disk / "c", CheckpointConfig()) as store:
        assert save_and_wait(store, 1, noise(1)).ok
        full = filler(small_disk, leave=leave)
        # as if another program had taken the room since
        with monkeypatch.context() as patch:
            patch.setattr(
                "shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 40})
            )
            failed = save_and_wait(store, 2, noise(1))
        assert not failed.ok, failed
        assert "No space left" in str(failed.error), failed
        # Writers of other files may go on for a moment: what they leave is deleted
        # before the next save.
        assert set(names(small_disk / "c")) - {"2.orbax-checkpoint-tmp"} == {"1"}
        full.unlink()
        assert save_and_wait(store, 2, noise(1)).ok
        assert names(small_disk / "c") == ["1", "2"]
        assert_bitwise(store.restore(noise(1), 1).state, noise(1))
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_that_becomes_read_only_loses_saves_alone(small_disk):
    with CheckpointManager(small_disk / "c", CheckpointConfig()) as store:
        assert save_and_wait(store, 1, noise(0.5)).ok
        assert mounted(small_disk, "-o", "remount,ro")
        failed = save_and_wait(store, 2, noise(0.5))
        assert not failed.ok
        assert "Read-only" in str(failed.error)
        assert mounted(small_disk, "-o", "remount,rw")
        assert save_and_wait(store, 3, noise(0.5)).ok
    assert names(small_disk / "c") == ["1", "3"]


def test_a_disk_that_does_not_answer_loses_saves_alone(tmp_path, monkeypatch):
    """As a network file system that is away: each look at it waits."""
    answers, before = threading.Event(), shutil.disk_usage
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: answers.wait() and before(folder)
    )
    with CheckpointManager(tmp_path, CheckpointConfig(patience_s=0.1)) as store:
        for step in (1, 2):
            store.save(step, noise(0.1), {})
            (failed,) = store.poll()
            assert not failed.ok
            assert f"{tmp_path}: the look at the disk before step 1 has" in str(
                failed.error
            )
        answers.set()
        assert store.wait()
        assert save_and_wait(store, 3, noise(0.1)).ok
    assert names(tmp_path) == ["3"]


def test_nothing_waits_for_work_that_has_had_its_time(tmp_path):
    background, ends = Background(tmp_path, limit_s=0.2), threading.Event()
    assert background.wait()
    background.begin(ends.wait, "save of step 1")
    assert not background.wait(0.01)
    assert not background.wait()
    began = time.monotonic()
    assert not background.wait()
    assert not background.wait(60)
    assert time.monotonic() - began < 30
    assert background.delay().startswith(
        f"{tmp_path}: the save of step 1 has taken 0 s and has not ended"
    )
    ends.set()
    while not background.wait():
        pass


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(small_disk):
    with CheckpointManager(small_disk / "c", CheckpointConfig()) as store:
        assert save_and_wait(store, 1, noise(0.5)).ok
    assert mounted(small_disk, "-o", "remount,ro")
    with pytest.raises(CheckpointError, match="cannot be written: .*Read-only"):
        CheckpointManager(small_disk / "d", CheckpointConfig())
    with CheckpointManager(small_disk / "c", CheckpointConfig(), mode="read") as store:
        assert_bitwise(store.restore(noise(0.5)).state, noise(0.5))


def test_a_start_on_a_full_disk_says_so_and_leaves_nothing(small_disk):
    folder, run = (
        small_disk / "run",
        run_config.from_config(run_config.default_config()),
    )
    full = filler(small_disk, leave=0)
    with workdir.workdir_lock(folder):
        with pytest.raises(
            ConfigError, match=r"json cannot be written \(No space left.*free the disk"
        ):
            workdir.check_and_write_config(folder, run)
        assert names(folder) == []
        full.unlink()
        workdir.check_and_write_config(folder, run)
    assert workdir.read_config(folder) == run
    (folder / "config.json").write_text('{"seed": ')
    with pytest.raises(
        ConfigError, match="config.json is damaged .* put it back, or delete it"
    ):
        workdir.check_and_write_config(folder, run)


def test_metrics_and_events_wait_for_room(small_disk, capsys):
    writer = MetricsWriter(small_disk)
    writer.event("start", 0)
    full = filler(small_disk, leave=0)
    for step in range(1, 401):  # more than what is left of the file's last page
        writer.write(step, {"loss": 1.0 / step, "note": "x" * 40})
    assert len(read_rows(small_disk).train) < 400
    full.unlink()
    writer.event("stop", 400)
    writer.write(401, {"loss": 0.5})
    writer.close()
    assert [row["step"] for row in read_rows(small_disk).train] == list(range(1, 402))
    assert [event["event"] for event in read_events(small_disk)] == ["start", "stop"]
    said = f"{small_disk}/metrics.jsonl: cannot be written (No space left on device); its lines wait in memory\n"
    assert capsys.readouterr().err == said


def test_lines_that_are_lost_are_said_to_be(small_disk, capsys):
    writer = MetricsWriter(small_disk)
    filler(small_disk, leave=0)
    for step in range(1, 401):
        writer.write(step, {"note": "x" * 40})
    writer.close()
    assert (
        f"metrics.jsonl: its last {400 - len(read_rows(small_disk).train)} "
        in capsys.readouterr().err
    )


# ---- whole runs


def until(process: subprocess.Popen, holds: Callable[[], bool]) -> None:
    while not holds():
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.005)


def saves(workdir: Path) -> list[bool]:
    file = workdir / "events.jsonl"
    return (
        [e["ok"] for e in read_events(workdir) if e["event"] == "save"]
        if file.exists()
        else []
    )


@pytest.mark.slow
def test_a_run_goes_on_when_its_disk_is_full_and_then_read_only(small_disk, tmp_path):
    workdir = tmp_path / "run"
    full = filler(small_disk, leave=MIB // 8)
    settings = {
        "checkpoint__folder": small_disk / "run",
        "train__steps": 4000,
        "checkpoint__every_steps": 50,
        "train__log_every": 10,
    }
    process = subprocess.Popen(
        command(workdir, **settings),
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(process, lambda: saves(workdir).count(False) >= 2)
        full.unlink()
        until(process, lambda: True in saves(workdir))
        assert mounted(small_disk, "-o", "remount,ro")
        until(process, lambda: saves(workdir)[-1] is False)
        assert mounted(small_disk, "-o", "remount,rw")
        until(process, lambda: saves(workdir)[-1] is True)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert "saved; run again" in said
    assert "Traceback" not in said
    assert "failed, training continues: " in said
    assert "are free in" in said
    steps = folders.list_steps(small_disk / "run")
    assert steps
    assert not [name for name in names(small_disk / "run") if not name.isdecimal()]
    rows = [row["step"] for row in read_rows(workdir).train]
    assert rows == sorted({1, *range(10, rows[-1] + 1, 10)})  # no step was lost


@pytest.mark.slow
def test_processes_go_on_when_the_disk_fills_up_under_one_of_them(small_disk, tmp_path):
    """The check for free space passes, the write fails: the other process must not wait
    for it.
    """
    workdir = tmp_path / "run"
    settings = {
        "checkpoint__folder": small_disk / "run",
        "train__steps": 4000,
        "checkpoint__every_steps": 50,
        "train__log_every": 10,
        "mesh__fsdp": 1,
        "watchdog__save_s": 15,
        "watchdog__step_s": 15,
    }
    with launched(workdir, "--processes", "2", devices=1, **settings) as agent:
        until(agent, lambda: True in saves(workdir))
        needed = next(e["bytes"] for e in read_events(workdir) if e["event"] == "save")

        def fails() -> bool:
            # a save that was under way makes room when it is done
            for number in range(100):
                free = shutil.disk_usage(small_disk).free
                if free > needed + 16384:
                    with contextlib.suppress(OSError):
                        (small_disk / f"full-{number}-{free}").write_bytes(
                            b"x" * (free - needed - 8192)
                        )
            return saves(workdir).count(False) >= 3

        until(agent, fails)
        for full in small_disk.glob("full-*"):
            full.unlink()
        known = len(saves(workdir))
        until(agent, lambda: True in saves(workdir)[known:])
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 75
    said = [
        e["error"] for e in read_events(workdir) if e["event"] == "save" and not e["ok"]
    ]
    assert any(
        "No space left" in error or "RESOURCE_EXHAUSTED" in error for error in said
    ), said
    assert not any(e["event"] in ("hang", "peer_lost") for e in read_events(workdir))


@pytest.mark.slow
def test_a_synchronous_run_whose_last_save_fails_does_not_say_done(tmp_path):
    settings = {
        "checkpoint__asynchronous": False,
        "train__steps": 6,
        "checkpoint__every_steps": 0,
    }
    small_files = ["bash", "-c", 'ulimit -f 58; exec "$@"', "-"]  # KiB
    done = subprocess.run(
        [*small_files, *command(tmp_path, **settings)],
        env=environment(1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the last checkpoint could not be written" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert [event["event"] for event in read_events(tmp_path)][-2:] == ["save", "stop"]
    assert names(tmp_path / "checkpoints") == []


@pytest.mark.slow
def test_a_damaged_run_resumes_from_the_right_step_bitwise(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    checkpoints = workdir / "checkpoints"
    flip(a_data_file(checkpoints / "28"), 999)
    shutil.rmtree(checkpoints / "21" / "state")
    done = train(workdir, train__steps=28, optimizer__schedule="constant")
    assert "resumed after step 14" in done.stdout
    bad = {
        e["step"]: e["reason"]
        for e in read_events(workdir)
        if e["event"] == "bad_checkpoint"
    }
    assert bad.keys() == {28, 21}
    assert "has changed since it was sealed" in bad[28]
    assert names(workdir / "quarantine") == ["21", "21.json", "28", "28.json"]
    assert folders.list_steps(checkpoints) == [14, 21, 28]
    again, once = (
        integrity.read_manifest(run / "checkpoints" / "28")
        for run in (workdir, straight)
    )
    assert len(once.fingerprints) > 20
    assert again.fingerprints == once.fingerprints
    assert losses(workdir) == losses(straight)


@pytest.mark.slow
def test_a_run_without_a_good_step_exits_77(straight, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    for step in (14, 21, 28):
        flip(a_data_file(workdir / "checkpoints" / str(step)), 999)
    settings = {"train__steps": 28, "optimizer__schedule": "constant"}
    done = subprocess.run(
        command(workdir, **settings),
        env=environment(1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77, done.stderr[-2000:]
    assert all(f"step {step}: state/" in done.stderr for step in (14, 21, 28))
    bad = [e["step"] for e in read_events(workdir) if e["event"] == "bad_checkpoint"]
    assert bad == [28, 21, 14]
    assert folders.list_steps(workdir / "checkpoints") == [14, 21, 28]


def test_work_that_fails_does_not_end_the_thread(tmp_path, capsys):
    background, found = Background(tmp_path, limit_s=60), []

    def fail():
        found.append(threading.current_thread())
        raise OSError("no disk")

    background.begin(fail, "first")
    assert background.wait()
    background.begin(lambda: found.append(threading.current_thread()), "second")
    assert background.wait()
    assert found[0] is found[1]
    assert "no disk" in capsys.readouterr().err
    background.close()
    assert not found[0].is_alive()
    background.close()
