"""Runs under a real Ray; `pytest -m ray` in an environment that has it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.runs import TINY, environment, losses, train

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="no Ray: pip install 'ray[train]'",
    ),
]
CHANGES = {"train.steps": 8, "model.dropout": 0.0, "checkpoint.every_steps": 0}


def python(*words: object) -> subprocess.CompletedProcess:
    """Runs Python with a Ray of its own, and one CPU device a process."""
    alone = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    alone |= {"PYTHONPATH": str(ROOT), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}
    command, environ = [sys.executable, *map(str, words)], environment(1) | alone
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd=ROOT, timeout=900
    )


def flags(workdir: Path) -> list[str]:
    settings = [
        f"--config.{key}={str(value).lower()}"
        for key, value in (TINY | CHANGES).items()
    ]
    return ["--config", "quickstart", "--workdir", str(workdir), *settings]


def test_two_workers_of_ray_train_one_run(tmp_path):
    done = python(
        "examples/ray_train.py",
        "--workers",
        2,
        "--failures",
        0,
        "--",
        *flags(tmp_path / "ray"),
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert "agent 0 of 2" in text
    assert "agent 1 of 2" in text
    assert "(2 x cpu)" in text
    train(
        tmp_path / "alone",
        devices=2,
        **{key.replace(".", "__"): value for key, value in CHANGES.items()},
    )
    together = losses(tmp_path / "ray")
    assert len(together) == 8
    assert together == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


SILENT = """
import sys
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

def work(settings):
    import jaxdist
    from jaxdist.trainer import run_config
    from ray.train import get_context
    folder = settings["folder"] + str(get_context().get_world_rank())
    jaxdist.run(run_config.from_config(jaxdist.default_config()), folder)

JaxTrainer(
    work,
    train_loop_config={"folder": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=0)),
).fit()
"""


def test_two_workers_that_nobody_joined_are_refused(tmp_path):
    (script := tmp_path / "silent.py").write_text(SILENT)
    done = python(script, tmp_path / "run")
    assert done.returncode != 0
    assert (
        "one of 2 workers of Ray Train, which has not joined them"
        in done.stdout + done.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["silent.py"]
