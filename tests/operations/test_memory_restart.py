"""Runs of several processes that are killed, and resume from the memory of the host."""

import random
import shutil
import time
from pathlib import Path

import pytest

from jaxdist.checkpoint.folders import list_steps
from support.launches import (
    events,
    finish,
    kill,
    launched,
    leftovers,
    output,
    parameters,
    same_bits,
    wait_for_step,
)
from support.runs import every_loss, losses

STEPS = 14


def settings(memory: Path, **changes) -> dict:
    return {
        "train__steps": STEPS,
        "checkpoint__every_steps": 0,  # only the last step is in the folder
        "optimizer__schedule": "cosine",  # wsd saves where its decay begins
        "checkpoint__memory_folder": str(memory),
        "checkpoint__memory_every_steps": 2,
        **changes,
    }


def wait_for_memory(agent, workdir: Path, step: int) -> None:
    """Waits until a step from this one on is complete in memory."""
    until = time.monotonic() + 200
    while not any(
        save["ok"] and save["step"] >= step for save in events(workdir, "memory_save")
    ):
        assert agent.poll() is None, output(workdir)[-4000:]
        assert time.monotonic() < until, output(workdir)[-4000:]
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_resume_from_memory(tmp_path):
    workdir, memory = tmp_path / "run", tmp_path / "memory"
    with launched(workdir, "--processes", "2", devices=1, **settings(memory)) as agent:
        wait_for_memory(agent, workdir, 6)
        kill(agent, 1, workdir)
        finish(agent, workdir)
    assert [event["process"] for event in events(workdir, "peer_lost")] == [1]
    (restored,) = events(workdir, "memory_restore")
    assert 6 <= restored["step"] < STEPS
    assert events(workdir, "restore")[0]["step"] == restored["step"]
    assert list_steps(workdir / "checkpoints") == [STEPS]
    # steps that both starts have done have the same loss, to the last bit
    repeated = every_loss(workdir)
    assert len(repeated) == STEPS
    assert all(len(values) == 1 for values in repeated.values())
    assert not list(memory.iterdir())
    assert not leftovers(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["delete", "flip"])
def test_a_host_that_has_lost_its_memory_gets_its_part_from_another(tmp_path, damage):
    """Each process has a folder of its own, as on a host of its own."""
    workdir, memory = tmp_path / "run", tmp_path / "memory"
    own = {
        "checkpoint__memory_folder": f"{memory}/$JAXDIST_PROCESS_ID",
        "checkpoint__memory_peers": 1,
        "train__steps": 40,
    }
    with launched(
        workdir, "--processes", "2", devices=1, **settings(memory, **own)
    ) as agent:
        wait_for_memory(agent, workdir, 8)
        kill(agent, 1, workdir)
        if damage == "delete":
            shutil.rmtree(memory / "1")
        else:
            for file in (memory / "1").glob("*/*.shards"):
                data = bytearray(file.read_bytes())
                data[-1000] ^= 1
                file.write_bytes(data)
        finish(agent, workdir)
    (restored,) = events(workdir, "memory_restore")
    assert restored["step"] >= 4
    bad = events(workdir, "bad_memory_copy")
    assert bool(bad) == (damage == "flip")
    assert all(event["place"] == bad[0]["place"] for event in bad)
    assert not events(workdir, "memory_copy_failed")
    assert max(save["copied"] for save in events(workdir, "memory_save")) > 30
    assert list_steps(workdir / "checkpoints") == [40]
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    assert not list(memory.glob("*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_12_random_kills_end_as_an_undisturbed_run(tmp_path, asynchronous):
    straight, workdir = tmp_path / "straight", tmp_path / "run"
    memory = tmp_path / "memory"
    own = {
        "train__steps": 400,
        "checkpoint__memory_every_steps": 1,
        "checkpoint__every_steps": 50,
        "checkpoint__asynchronous": asynchronous,
    }
    flags = ["--processes", "2", "--max-restarts", "20"]
    with launched(straight, *flags, devices=1, **settings(memory, **own)) as agent:
        finish(agent, straight)
    draw = random.Random(seed := random.randrange(10**6))
    killed = []
    with launched(workdir, *flags, devices=1, **settings(memory, **own)) as agent:
        since = 0
        while len(killed) < 12 and agent.poll() is None:
            wait_for_step(agent, workdir, 1, since)
            if draw.random() < 0.75:
                done = len(events(workdir, "memory_save"))
                while agent.poll() is None:
                    if len(events(workdir, "memory_save")) > done:
                        break
                    time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
            if agent.poll() is not None:
                break
            number = draw.randrange(2)
            since = kill(agent, number, workdir)
            killed.append(number)
            time.sleep(0.3)  # until the agent has noticed
        finish(agent, workdir)
    restored = [event["step"] for event in events(workdir, "memory_restore")]
    print(f"seed {seed}: killed {killed}, restored {restored}")
    assert len(events(workdir, "peer_lost")) > 5
    assert len(restored) > 5
    assert not events(workdir, "bad_memory_copy")
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    assert losses(workdir) == losses(straight)
    assert same_bits(parameters(workdir, 400), parameters(straight, 400))
    assert not leftovers(workdir)


@pytest.mark.slow
def test_a_shrunk_group_reads_the_parts_of_the_lost_one_from_memory(tmp_path):
    workdir, memory = tmp_path / "run", tmp_path / "memory"
    capacity = tmp_path / "capacity"
    capacity.write_text("2")
    flags = ["--processes", "2", "--min-processes", "1"]
    flags += ["--capacity-file", str(capacity)]
    with launched(workdir, *flags, **settings(memory)) as agent:
        wait_for_memory(agent, workdir, 6)
        before = losses(workdir)
        capacity.write_text("1")
        kill(agent, 1, workdir)
        finish(agent, workdir)
    assert [begun["processes"] for begun in events(workdir, "start")] == [2, 1]
    (restored,) = events(workdir, "memory_restore")
    assert restored["step"] >= 6
    assert list_steps(workdir / "checkpoints") == [STEPS]
    assert_near(workdir, before)


def assert_near(workdir: Path, before: dict[int, float]) -> None:
    """Asserts that steps that were done twice have the same loss up to rounding."""
    assert before
    for step, values in every_loss(workdir).items():
        for value in values:
            assert value == pytest.approx(before.get(step, value), rel=1e-5)


@pytest.mark.slow
def test_a_lost_host_leaves_its_part_to_fewer_hosts(tmp_path):
    """Three hosts become two, which have all parts of the third by its copy."""
    workdir, memory = tmp_path / "run", tmp_path / "memory"
    capacity = tmp_path / "capacity"
    capacity.write_text("3")
    flags = ["--processes", "3", "--min-processes", "2"]
    flags += ["--capacity-file", str(capacity)]
    own = {
        "checkpoint__memory_folder": f"{memory}/$JAXDIST_PROCESS_ID",
        "checkpoint__memory_peers": 1,
        "batch__global_size": 12,
        "mesh__fsdp": 1,
        "train__steps": 30,
    }
    with launched(workdir, *flags, devices=1, **settings(memory, **own)) as agent:
        wait_for_memory(agent, workdir, 8)
        before = losses(workdir)
        capacity.write_text("2")
        kill(agent, 2, workdir)
        shutil.rmtree(memory / "2")
        finish(agent, workdir)
    assert [begun["processes"] for begun in events(workdir, "start")] == [3, 2]
    (restored,) = events(workdir, "memory_restore")
    assert restored["step"] >= 4
    assert list_steps(workdir / "checkpoints") == [30]
    assert_near(workdir, before)


@pytest.mark.slow
def test_4_processes_become_3_and_4_again_with_nothing_in_the_folder(tmp_path):
    """Another mesh reads the parts of the one before, though a host is lost each time."""
    straight, workdir = tmp_path / "straight", tmp_path / "run"
    memory, capacity = tmp_path / "memory", tmp_path / "capacity"
    flags = ["--processes", "4", "--min-processes", "3"]
    flags += ["--capacity-file", str(capacity)]
    own = {
        "checkpoint__memory_folder": f"{memory}/$JAXDIST_PROCESS_ID",
        "checkpoint__memory_peers": 1,
        "batch__global_size": 12,
        "mesh__fsdp": 4,
        "train__steps": 60,
        "devices": 1,
    }
    capacity.write_text("4")
    with launched(straight, *flags, **settings(tmp_path / "other", **own)) as agent:
        finish(agent, straight)
    pace = {"FAULTY_PACE_S": "0.1"}
    with launched(workdir, *flags, recorded=pace, **settings(memory, **own)) as agent:
        for step, processes, lost in ((20, "3", 1), (40, "4", 2)):
            wait_for_memory(agent, workdir, step)
            capacity.write_text(processes)
            kill(agent, lost, workdir)
            shutil.rmtree(memory / str(lost))
            assert not list_steps(workdir / "checkpoints")
        finish(agent, workdir)
    assert [begun["processes"] for begun in events(workdir, "start")] == [4, 3, 4]
    resized = [event["mesh"] for event in events(workdir, "resize")]
    print(f"meshes {resized}")
    first, second = [event["step"] for event in events(workdir, "memory_restore")]
    print(f"restored {first} and {second}")
    assert 16 <= first < 40 <= second + 4 < 64
    restores = [event["step"] for event in events(workdir, "restore")]
    assert restores == [first, second]
    assert list_steps(workdir / "checkpoints") == [60]
    true = losses(straight)
    assert_near(workdir, true)
    found = losses(workdir)
    assert found.keys() == true.keys()
    furthest = max(abs(found[step] / true[step] - 1) for step in true)
    print(f"losses differ by {furthest:.2g} at most")
    assert not leftovers(workdir)
