"""Training by several processes: the same numbers as one process with the same devices."""

import socket
import subprocess
from pathlib import Path

import pytest
from test_train import command, environment, losses, train

from jaxdist.telemetry.metrics import read_events

LAYOUT = {"train__steps": 6, "checkpoint__every_steps": 4, "mesh__fsdp": 2, "mesh__tensor": 2}


def train_together(workdir: Path, processes: int, devices_each: int, **changes) -> list[str]:
    """Runs one training in several processes; returns what each of them printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        group = {
            "JAXDIST_COORDINATOR": f"127.0.0.1:{port}",
            "JAXDIST_NUM_PROCESSES": str(processes),
            "JAXDIST_PROCESS_ID": str(rank),
        }
        started.append(
            subprocess.Popen(
                command(workdir, **changes),
                env=environment(devices_each) | group,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(said)[-4000:]
    return said


def test_two_processes_train_as_one_and_go_on_as_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, devices=4, **LAYOUT)
    said = train_together(two, 2, 2, **LAYOUT)
    assert "process 0 of 2" in said[0] and "step 6" in said[0]
    assert "step 6" not in said[1], "only the first process shows the run"
    reference = losses(one)
    assert len(reference) == 6
    for step, loss in losses(two).items():
        assert loss == pytest.approx(reference[step], rel=1e-6), step
    assert [e for e in read_events(two) if e["event"] == "start"][0]["processes"] == 2
    alone = LAYOUT | {"mesh__fsdp": 1, "mesh__tensor": 1}
    assert "finished at step 6" in train(two, devices=1, **alone).stdout
