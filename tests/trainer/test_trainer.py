"""Real runs as processes: they learn, die by kill -9, go on exactly, and change
machines.
"""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from jaxdist.checkpoint.folders import list_steps, read_step
from jaxdist.telemetry.metrics import read_events, read_rows
from support.runs import (
    command,
    environment,
    every_loss,
    final_arrays,
    last_step,
    losses,
    train,
    train_and_kill,
    train_here,
)

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="session")
def straight(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("straight") / "run"
    train(workdir, train__sample_tokens=8)
    return workdir


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The workdir of a run that was killed amid its steps, not to be changed."""
    workdir = tmp_path_factory.mktemp("killed") / "run"
    train_and_kill(workdir, 30)
    assert last_step(workdir) >= 30
    return workdir


def test_a_run_learns_and_writes_what_it_promises(straight):
    rows = read_rows(straight).train
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["tokens_seen"] == 60 * 8 * 32
    assert {"step_time_s", "tokens_per_s", "mfu", "data_wait_s", "grad_norm"} <= rows[
        0
    ].keys()
    assert rows[0]["mfu"] is None  # a CPU's peak is unknown, and not guessed
    # 24: where the decay begins
    assert list_steps(straight / "checkpoints") == [24, 49, 56, 60]
    assert read_step(straight / "checkpoints", 60).metadata["progress"]["step"] == 60
    events = [event["event"] for event in read_events(straight)]
    assert events[0] == "start"
    assert events[-1] == "stop"
    assert events.count("save") == 10
    run = json.loads((straight / "run.json").read_text())
    assert (straight / "sample.txt").stat().st_size > 8
    assert run["parameters"] > 10_000
    assert run["flops_per_token"]["causal"] > 0
    assert run["mfu_peak"] == {"dtype": "float32", "flops_per_s": None}


def test_kill_9_and_the_same_command_give_the_same_run_bitwise(
    straight, killed, tmp_path
):
    workdir = tmp_path / "again"
    shutil.copytree(killed, workdir)
    done = train(workdir)
    assert "resumed after step" in done.stdout
    assert len(every_loss(workdir)) == 60
    assert sum(event["event"] == "restore" for event in read_events(workdir)) >= 1
    assert all(len(values) == 1 for values in every_loss(workdir).values())
    assert losses(workdir) == losses(straight)
    assert same_state(workdir, straight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh__data": 4, "batch__accumulation": 2},
        {"mesh__data": 2, "mesh__fsdp": 2, "mesh__zero": 1, "batch__accumulation": 2},
        {"mesh__pipeline": 2, "mesh__data": 2, "pipeline__microbatches": 4},
    ],
    ids=["data", "zero 1", "pipeline"],
)
def test_a_resume_is_bitwise_where_gradients_are_summed_once_a_step(layout, tmp_path):
    layout |= {"devices": 4}
    done = train(tmp_path / "straight", **layout)
    assert re.search(r"gradients: summed over [^,(]* once a step,", done.stdout)
    train_and_kill(tmp_path / "killed", 40, **layout)
    assert "resumed after step" in train(tmp_path / "killed", **layout).stdout
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert same_state(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(straight, killed, tmp_path):
    workdir = tmp_path / "moved"
    shutil.copytree(killed, workdir)
    layout = {
        "mesh__fsdp": 2,
        "mesh__tensor": 2,
        "mesh__data": 2,
        "batch__accumulation": 2,
    }
    train(workdir, devices=8, train__sample_tokens=8, **layout)
    assert (workdir / "sample.txt").stat().st_size > 8
    run = json.loads((workdir / "run.json").read_text())
    assert run["mesh"]["tensor"] == 2
    assert run["num_devices"] == 8
    reference = losses(straight)
    for step, loss in losses(workdir).items():
        assert loss == pytest.approx(reference[step], rel=1e-5), step


def same_state(one: Path, other: Path) -> bool:
    a, b = final_arrays(one), final_arrays(other)
    assert a.keys() == b.keys()
    assert len(a) > 20
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_a_finished_run_says_so_and_how_to_go_on(straight, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    assert train_here(straight) == 0
    shown = capsys.readouterr().out
    assert "finished at step 60" in shown
    assert "train.steps" in shown
    assert (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_an_interrupt_saves_and_the_same_command_goes_on(straight, tmp_path):
    workdir = tmp_path / "interrupted"
    process = subprocess.Popen(
        command(
            workdir,
            checkpoint__every_steps=0,
            checkpoint__save_at_end=False,
            train__eval_every=1000,
        ),
        env=environment(1),
        stdout=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and last_step(workdir) < 20:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 75
    assert "saved; run again to resume" in said
    (saved,) = list_steps(workdir / "checkpoints")
    assert 20 <= saved < 60
    names = [e["event"] for e in read_events(workdir)]
    # there may be no time for it
    assert names[-1] == "preempted"
    assert "evaluate" not in names
    train(workdir, checkpoint__every_steps=0)
    assert losses(workdir) == losses(straight)
    assert same_state(workdir, straight)


def test_without_a_usable_checkpoint_a_run_does_not_begin_anew(
    straight, tmp_path, capsys
):
    workdir = tmp_path / "torn"
    shutil.copytree(straight, workdir)
    for step in list_steps(workdir / "checkpoints"):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "state")
    before = (workdir / "metrics.jsonl").read_bytes()

    assert train_here(workdir) == 77
    assert "no usable checkpoint" in capsys.readouterr().err
    shutil.rmtree(workdir / "checkpoints")  # or a disk that is not mounted
    assert train_here(workdir) == 77
    assert "is it mounted?" in capsys.readouterr().err
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_log_on_a_full_disk_does_not_stop_a_run(tmp_path):
    with open("/dev/full", "w") as full:
        changes = {
            "train__steps": 5,
            "model__num_layers": 1,
            "model__dropout": 0.0,  # it compiles in less time
            "checkpoint__every_steps": 0,
        }
        done = subprocess.run(
            command(tmp_path, **changes),
            env=environment(1),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert last_step(tmp_path) == 5


def test_changed_data_is_refused_on_resume(tmp_path, capsys):
    text = tmp_path / "corpus"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"document {number} says hello. " * 40)
    data = {
        "data__source": "text",
        "data__path": str(text),
        "data__cache_dir": str(tmp_path / "cache"),
        "train__steps": 6,
        "checkpoint__every_steps": 2,
        "optimizer__schedule": "constant",
    }
    assert train_here(tmp_path / "run", **data) == 0
    (text / "3.txt").write_text("something else " * 60)
    longer = data | {"train__steps": 8}
    assert train_here(tmp_path / "run", **longer) == 78
    assert "the data has changed" in capsys.readouterr().err
