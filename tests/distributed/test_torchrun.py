"""A run under a real torchrun; `pytest -m torchrun` in an environment that has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.runs import TINY, environment, losses, train

TORCHRUN = Path(sys.executable).with_name("torchrun")

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.skipif(
        not TORCHRUN.exists(),
        reason=f"no torchrun beside {sys.executable}: install torch",
    ),
]


def torchrun(*words: object, **env: str) -> subprocess.CompletedProcess:
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node=2", *map(str, words)]
    environ = environment(1) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd=ROOT, timeout=600
    )


def flags(workdir: Path) -> list[str]:
    values = TINY | {
        "train.steps": 8,
        "model.dropout": 0.0,
        "checkpoint.every_steps": 0,
    }
    settings = [f"--config.{key}={str(value).lower()}" for key, value in values.items()]
    return ["--config", "quickstart", "--workdir", str(workdir), *settings]


def test_two_processes_of_torchrun_train_one_run(tmp_path):
    done = torchrun("-m", "jaxdist.train", *flags(tmp_path / "torchrun"))
    assert done.returncode == 0, done.stderr[-3000:]
    for process in (0, 1):
        assert f"process {process} of 2, joined through torchrun" in done.stdout
    assert "(2 x cpu)" in done.stdout
    alone = {"train__steps": 8, "model__dropout": 0.0, "checkpoint__every_steps": 0}
    train(tmp_path / "alone", devices=2, **alone)
    together = losses(tmp_path / "torchrun")
    assert len(together) == 8
    assert together == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_a_script_that_has_not_joined_is_refused(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import jaxdist\nfrom jaxdist.trainer import run_config\n"
        f"jaxdist.run(run_config.from_config(jaxdist.default_config()), {str(tmp_path / 'run')!r})\n"
    )
    done = torchrun(script)
    assert done.returncode != 0
    assert "one of 2 processes of torchrun, but not joined to the others" in done.stderr
    assert not (tmp_path / "run").exists()
    assert os.listdir(tmp_path) == ["mine.py"]
