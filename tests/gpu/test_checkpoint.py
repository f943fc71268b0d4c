"""A run that moves: from a GPU to a mesh of CPU devices and back, with the same bits
and the same losses.
"""

import shutil
from pathlib import Path

import jax
import pytest

from jaxdist import library
from jaxdist.config import files
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import run_config
from support.gpu import accelerator, cpus
from support.launches import parameters
from support.runs import TINY, losses

pytestmark = pytest.mark.gpu

SAVED, LAST = 4, 8


def train(workdir: Path, devices: list[jax.Device], steps: int, **mesh: int) -> None:
    settings = TINY | {
        "checkpoint.every_steps": SAVED,
        "data.cache_dir": str(workdir.parent / "cache"),
    }
    settings |= {
        "train.steps": steps,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 2,
    }
    config = files.load("quickstart", folders=files.packaged_folders())
    with config.ignore_type():
        config.update_from_flattened_dict(
            settings | {f"mesh.{axis}": size for axis, size in mesh.items()}
        )
    library.run(run_config.from_config(config), workdir, devices=devices)


def test_a_checkpoint_goes_on_elsewhere(tmp_path):
    device, mesh = accelerator(), {"data": 1, "fsdp": 2, "tensor": 2}
    stays, moves = tmp_path / "stays", tmp_path / "moves"
    with jax.default_matmul_precision("highest"):
        train(stays, [device], SAVED)
        shutil.copytree(stays, moves)
        train(stays, [device], LAST)
        train(moves, cpus(4), LAST, **mesh)
        assert device not in cpus(4)
        reference, found = losses(stays), losses(moves)
        assert sorted(reference) == sorted(found) == list(range(1, LAST + 1))
        for step in range(1, LAST + 1):
            assert found[step] == pytest.approx(reference[step], rel=1e-5), step
        assert [
            event["step"] for event in read_events(moves) if event["event"] == "restore"
        ] == [SAVED]
        # And back: what the CPU mesh has saved goes on where it began.
        train(moves, [device], LAST + 2)
    assert losses(moves)[LAST + 2] > 0
    assert parameters(moves, LAST).keys() == parameters(stays, LAST).keys()
