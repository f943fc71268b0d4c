"""The memory of devices in rows of metrics, and where a row is shown."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.operations.page import html, status, summary
from jaxdist.telemetry import device_memory
from jaxdist.telemetry.metrics import read_rows

GIB = 2**30


def device(**stats):
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_the_fullest_device_counts():
    devices = [
        device(bytes_in_use=5, peak_bytes_in_use=9, bytes_limit=20),
        device(bytes_in_use=6, peak_bytes_in_use=8, bytes_limit=19),
        device(),
    ]
    assert device_memory.row_fields(devices) == {
        "device_memory_bytes": 6,
        "device_memory_peak_bytes": 9,
        "device_memory_limit_bytes": 19,
    }


def test_what_a_backend_does_not_know_is_left_out():
    def raises():
        raise RuntimeError("no statistics")

    silent = SimpleNamespace(memory_stats=raises)
    assert device_memory.row_fields([silent, device()]) == {}
    assert device_memory.row_fields([device(bytes_in_use=5)]) == {
        "device_memory_bytes": 5
    }
    assert device_memory.row_fields(jax.devices()) == {}  # of a CPU


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)

    def loss(self, batch, key):
        return (self.layer(batch["x"]) ** 2).mean()


def test_a_run_s_memory_is_in_its_rows_status_and_report(tmp_path, monkeypatch):
    stats = {
        "bytes_in_use": 12 * GIB,
        "peak_bytes_in_use": 40 * GIB,
        "bytes_limit": 79 * GIB,
    }
    monkeypatch.setattr(device_memory, "statistics", lambda device: stats)
    workdir = tmp_path / "run"
    jaxdist.fit(
        lambda rngs: Model(rngs),
        optax.sgd(0.1),
        lambda step: {"x": np.ones((8, 2), np.float32)},
        steps=2,
        folder=workdir,
        settings={"train.log_every": 1},
    )
    rows = read_rows(workdir).train
    assert [row["device_memory_bytes"] for row in rows] == [12 * GIB, 12 * GIB]
    text = status.as_text(status.read_status(workdir).document())
    assert "memory    in use 12.00 GiB, peak 40.00 GiB, limit 79.00 GiB" in text
    page = html.render([summary.read_run(workdir)])
    assert "Memory of the fullest device" in page
    assert "40.00 GiB" in page
