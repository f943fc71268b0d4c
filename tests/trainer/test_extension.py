"""Runs whose `train.steps` is raised: what was done stays, the rest follows the rule of
the schedule.
"""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.checkpoint.folders import list_steps, read_step
from jaxdist.optim import schedules
from jaxdist.optim.schedule_table import SCHEDULES
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import run_config, training
from jaxdist.trainer.callbacks import every
from jaxdist.trainer.restore import SettledSchedule
from support.runs import final_arrays, losses, run_of, train_and_kill
from support.runs import train as train_process

pytestmark = pytest.mark.usefixtures("shared_steps")


def train(folder, *hooks, devices=1, **changes):
    config = run_config.default_config()
    sizes = {
        "num_layers": 1,
        "d_model": 16,
        "d_ff": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    small = {f"model.{name}": size for name, size in sizes.items()} | {
        "train.log_every": 1,
        "train.eval_every": 0,
        "batch.global_size": 4,
        "batch.sequence_length": 16,
        "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 1,
        "checkpoint.asynchronous": False,
        "optimizer.learning_rate": 0.01,
    }
    config.update_from_flattened_dict(
        small | {k.replace("__", "."): v for k, v in changes.items()}
    )
    run = run_config.from_config(config)
    return training.train(run, folder, devices=jax.devices()[:devices], callbacks=hooks)


def rates(folder):
    return {row["step"]: row["learning_rate"] for row in read_rows(folder).train}


def schedule_of(folder):
    return json.loads((folder / "run.json").read_text())["schedule"]


def same(one, other, step):
    a, b = final_arrays(one, step), final_arrays(other, step)
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


def copied(folder, to, step):
    """Returns a hook that copies the run as a kill -9 after the step would leave it."""
    return every(step, lambda view: view.step == step and shutil.copytree(folder, to))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_checkpoint_where_a_cool_down_begins_is_kept(name):
    config = run_of("quickstart", **{"optimizer.schedule": name, "train.steps": 100})
    steps = schedules.settle(config.optimizer, 100)
    settled = SettledSchedule(steps, back_to=None, newest=0)
    milestones = settled.milestones(SimpleNamespace(config=config))
    kept = {40} if SCHEDULES[name].cools_down else set()
    assert config.optimizer.decay_fraction == 0.6
    assert milestones == kept


@pytest.mark.slow
def test_wsd_goes_back_to_where_its_decay_began(tmp_path, capfd):
    run, killed = tmp_path / "run", tmp_path / "killed"
    wsd = {"optimizer__schedule": "wsd", "optimizer__decay_fraction": 0.5}
    train(run, train__steps=10, **wsd)
    assert list_steps(run / "checkpoints") == [5, 10]
    before = rates(run)
    capfd.readouterr()
    train(run, copied(run, killed, 13), train__steps=20, **wsd)
    said = capfd.readouterr().out
    assert (
        "train.steps raised to 20 at step 5: the rate stays at 0.01, decays from 0.01 after step 10"
        in said
    )
    assert (
        "back to the checkpoint 5, where the decay began: steps 6-10 are done again, "
        "their rows replaced, and their checkpoints moved to quarantine as undone"
        in said
    )
    assert {n: rate for n, rate in rates(run).items() if n <= 5} == {
        n: before[n] for n in range(1, 6)
    }
    assert set(rates(run)) == set(range(1, 21))
    assert len(set(list(rates(run).values())[1:11])) == 1
    assert list_steps(run / "checkpoints") == [10, 20]
    assert list_steps(run / "quarantine") == [10]
    reason = json.loads((run / "quarantine" / "10.json").read_text())["reason"]
    assert reason == (
        "undone, not damaged: train.steps was raised, so the run went back to step 5, "
        "where the decay began"
    )
    (part,) = schedule_of(run)["extensions"]
    assert (part["start"], part["end"]) == (5, 20)
    assert read_step(run / "checkpoints", 20).metadata["schedule"] == schedule_of(run)
    assert max(rates(killed)) == 13
    assert list_steps(killed / "checkpoints") == [10, 12]
    train(killed, train__steps=20, **wsd)
    assert losses(killed) == losses(run)
    assert rates(killed) == rates(run)
    assert same(killed, run, 20)


def test_a_cosine_run_is_extended_where_it_resumes(tmp_path, capfd):
    run, killed = tmp_path / "run", tmp_path / "killed"
    train(run, every(6, lambda view: view.stop("as asked")), train__steps=10)
    rows = (run / "metrics.jsonl").read_bytes()
    # nothing of the extension is saved yet
    train(run, copied(run, killed, 7), train__steps=12)
    assert (run / "metrics.jsonl").read_bytes().startswith(rows)
    assert (
        "train.steps raised to 12 at step 6: the rate decays from "
        in capfd.readouterr().out
    )
    found, (part,) = rates(run), schedule_of(run)["extensions"]
    assert part["start"] == 6
    assert found[7] < found[6]
    assert found[12] > 0
    train(killed, train__steps=12)
    assert losses(killed) == losses(run)
    assert rates(killed) == found
    assert same(killed, run, 12)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_an_extended_run_that_is_killed_goes_on_exactly(tmp_path, schedule):
    options = {"optimizer__schedule": schedule, "train__log_every": 1}
    run, killed, elsewhere = (
        tmp_path / name for name in ("run", "killed", "elsewhere")
    )
    train_process(run, train__steps=30, **options)
    shutil.copytree(run, killed)
    train_process(run, train__steps=60, **options)
    train_and_kill(killed, 40, train__steps=60, **options)
    shutil.copytree(killed, elsewhere)
    train_process(killed, train__steps=60, **options)
    assert losses(killed) == losses(run)
    assert rates(killed) == rates(run)
    assert same(killed, run, 60)
    train_process(elsewhere, devices=4, train__steps=60, mesh__fsdp=2, **options)
    assert rates(elsewhere) == rates(run)
    assert all(
        loss == pytest.approx(losses(run)[n], rel=1e-5)
        for n, loss in losses(elsewhere).items()
    )
