"""Eight real runs, two of them killed, as `runs`, `status` and `report` show them."""

import json
import subprocess
import sys
import time

import pytest

from jaxdist import report, runs, status
from jaxdist.operations.ledger import run_lives
from support.paths import ROOT, TESTS
from support.runs import environment

pytestmark = pytest.mark.usefixtures("shared_steps")

TRAIN = """
import os, signal, sys, time
from pathlib import Path
from jaxdist import library
from jaxdist.trainer import run_config
from jaxdist.trainer.callbacks import every

folder, seed, killed_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sizes = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
small = {f"model.{name}": size for name, size in sizes.items()} | {
    "seed": seed, "data.validation_tokens": 1024, "train.steps": 30, "train.log_every": 1,
    "train.eval_every": 10, "train.sample_tokens": 0, "batch.global_size": 4, "batch.sequence_length": 16,
    "checkpoint.every_steps": 8, "optimizer.warmup_steps": 1,
}
config = run_config.default_config()
config.update_from_flattened_dict(small)

def kill(view):
    time.sleep(1.5)  # until the ledger has been written
    os.kill(os.getpid(), signal.SIGKILL)

library.run(run_config.from_config(config), folder, callbacks=[every(killed_at, kill)])
"""


def train(folder, seed, killed_at=0):
    command = [sys.executable, "-c", TRAIN, str(folder), str(seed), str(killed_at)]
    settings = environment(1) | {"PYTHONPATH": f"{ROOT}:{TESTS}"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert done.returncode == (-9 if killed_at else 0), done.stderr[-2000:]


@pytest.mark.slow
def test_eight_runs_two_of_them_killed(tmp_path, capsys):
    for number in range(8):
        train(tmp_path / f"r{number}", number, killed_at=21 if number in (2, 5) else 0)
    capsys.readouterr()
    assert runs.main([str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["state"] for row in rows] == [
        "died" if number in (2, 5) else "finished" for number in range(8)
    ]
    assert [row["step"] for row in rows] == [
        21 if number in (2, 5) else 30 for number in range(8)
    ]
    assert [row["differs"] for row in rows] == [{"seed": number} for number in range(8)]
    for row in rows:
        assert 0 < row["goodput"] < 1
        assert sum(row["ledger"]["buckets"].values()) == pytest.approx(
            row["ledger"]["wall_s"]
        )
    assert report.main([str(tmp_path / f"r{number}") for number in range(8)]) == 0
    capsys.readouterr()

    time.sleep(3)
    train(tmp_path / "r2", 2)  # goes on
    lives = run_lives.read_lives(tmp_path / "r2")
    assert [life.first for life in lives] == [0, 16]
    assert [life.ended for life in lives] == [False, True]
    assert status.main([str(tmp_path / "r2"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    buckets, wall_s = document["ledger"]["buckets"], document["ledger"]["wall_s"]
    assert document["state"] == "finished"
    assert document["starts"] == 2
    assert sum(buckets.values()) == pytest.approx(wall_s)
    assert wall_s == pytest.approx(lives[-1].written - lives[0].began, abs=0.01)
    assert buckets["down"] > 3
    assert buckets["lost"] > 0
    assert buckets["compile"] > 0
    assert buckets["save"] > 0
