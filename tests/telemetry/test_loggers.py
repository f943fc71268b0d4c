"""Loggers: in a thread, over a bounded queue; TensorBoard, W&B and Trackio against what
they write.
"""

import importlib
import json
import math
import os
import threading
import time
from contextlib import closing

import pytest

from jaxdist.config import extras
from jaxdist.telemetry import metrics
from jaxdist.telemetry.loggers import known
from jaxdist.telemetry.loggers.background import BackgroundLogger
from jaxdist.telemetry.loggers.known import Known
from jaxdist.telemetry.loggers.logger import LoggedRun
from support import loggers as examples
from support import wandb_files


def run_in(folder, **changes) -> LoggedRun:
    config = {
        "train.steps": 5,
        "optimizer.name": "adamw",
        "data.path": "",
        "mesh.data": -1,
        "train.loggers": ("x",),
    }
    known = {
        "config": config,
        "info": {"run": "0123abcd", "parameters": 7},
        "first_step": 0,
    }
    return LoggedRun(**({"workdir": folder} | known | changes))


def test_calls_come_in_order_from_one_thread(tmp_path):
    run = run_in(tmp_path)
    reports = []
    background = BackgroundLogger(
        "mine",
        lambda: examples.Recording(run),
        lambda *a, **k: reports.append((a, k)),
        close_s=60,
    )
    for step in (1, 2):
        background.write(step, {"loss": 1.5 * step, "mfu": None})
    background.event("save", 2, seconds=0.5)
    background.close()
    assert [json.loads(line) for line in (tmp_path / "calls.jsonl").open()] == [
        ["made", tmp_path.name, "0123abcd", 0, 5, 7],
        ["write", 1, {"loss": 1.5, "mfu": None}],
        ["write", 2, {"loss": 3.0, "mfu": None}],
        ["event", "save", 2, {"seconds": 0.5}],
        ["close"],
    ]
    assert reports == []
    assert examples.CALLED_BY[-1] == "logger-mine" != threading.current_thread().name


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        ("NotMade", "OSError: no network"),
        ("Raising", "SystemExit: a logger that would"),
    ],
)
def test_a_logger_that_raises_is_reported_once(tmp_path, cls, error):
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        make = getattr(examples, cls)
        writer.attach(
            BackgroundLogger(
                "bad", lambda: make(run_in(tmp_path)), writer.event, close_s=60
            )
        )
        for step in range(1, 9):
            writer.write(step, {"loss": 1.0})
    (event,) = metrics.read_events(tmp_path)
    assert event["event"] == "logger_failed"
    assert event["logger"] == "bad"
    assert event["error"].startswith(error)
    assert len(metrics.read_rows(tmp_path).train) == 8


def test_a_logger_that_sleeps_fills_its_queue_and_is_left_behind(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        asleep = BackgroundLogger(
            "slow", lambda: examples.Sleeping(None), writer.event, room=3, close_s=0.05
        )
        writer.attach(asleep)
        began = time.monotonic()
        for step in range(1, 101):
            writer.write(step, {"loss": 1.0})
        assert time.monotonic() - began < 5
    (event,) = metrics.read_events(tmp_path)
    assert event["event"] == "logger_failed"
    assert "3 calls wait for it" in event["error"]
    assert len(metrics.read_rows(tmp_path).train) == 100


def test_a_logger_that_does_not_end_is_waited_for_only_so_long(tmp_path):
    reports = []
    background = BackgroundLogger(
        "slow",
        lambda: examples.Sleeping(None),
        lambda *a, **k: reports.append((a, k)),
        close_s=0.05,
    )
    background.write(4, {"loss": 1.0})
    background.close()
    ((arguments, fields),) = reports
    assert arguments == ("logger_failed", 4)
    assert "not ended within 0.05 s" in fields["error"]


def test_views_get_numbers_not_arrays(tmp_path):
    np = pytest.importorskip("numpy")
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        writer.attach(examples.Recording(run_in(tmp_path)))
        writer.write(1, {"loss": np.float32(0.5), "count": np.int64(3), "mfu": None})
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").open()]
    assert calls[1] == ["write", 1, {"loss": 0.5, "count": 3, "mfu": None}]


def test_an_event_from_before_the_loggers_is_repeated_to_them_alone(tmp_path):
    reason = "a copy in https://user:secret@host/run is damaged"
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        writer.event("bad_checkpoint", 4, reason=reason)
        writer.attach(examples.Recording(run_in(tmp_path)))
        writer.repeat("bad_checkpoint", 4, reason=reason)
    (event,) = metrics.read_events(tmp_path)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").open()]
    assert ["event", "bad_checkpoint", 4, {"reason": event["reason"]}] in calls, calls
    assert "secret" not in str(calls)


def test_names_are_checked_without_executing_anything(monkeypatch):
    assert list(known.faults(["tensorboard", "no.such.module:Class"])) == []
    (fault,) = known.faults(["tensorbord"])
    assert fault.startswith(
        "train.loggers=tensorbord: no such logger; Did you mean tensorboard?"
    )
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    (fault,) = known.faults(["wandb"])
    command = extras.install_command("wandb")
    assert fault == (
        f"train.loggers=wandb: the package wandb is not installed. "
        f"Install it with: {command}"
    )


def test_a_package_adds_a_logger_by_an_entry_point(tmp_path, monkeypatch):
    package = tmp_path / "acme-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"
    )
    (package / "entry_points.txt").write_text(
        "[jaxdist.loggers]\nacme = support.loggers:Recording\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    known._entry_points.cache_clear()
    assert list(known.faults(["acme"])) == []
    assert known.find_known("acme") is examples.Recording
    known._entry_points.cache_clear()


def test_a_logger_of_jaxdist_needs_no_package_or_one_without_an_extra(monkeypatch):
    monkeypatch.setitem(known.LOGGERS, "plain", Known(lambda: examples.Recording))
    monkeypatch.setitem(known.LOGGERS, "other", Known(print, package="no_such_package"))
    (fault,) = known.faults(["plain", "other"])
    assert fault == (
        "train.loggers=other: the package no_such_package is not installed. "
        "Install it with: pip install no_such_package"
    )
    assert known.find_known("plain") is examples.Recording


# --- against what the packages write


def losses_of_tensorboard(folder):
    files = sorted((folder / "tensorboard").iterdir())
    return [(step, value) for name, step, value in points(files) if name == "loss"]


def losses_of_wandb(folder):
    runs = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    rows = [row for run in runs for row in wandb_files.history(run)]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def losses_of_trackio(folder):
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs("jaxdist", f"{folder.name}-0123abcd")
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


# how to read the losses that a logger of jaxdist has written: (step, loss), in order
READERS = {
    "tensorboard": losses_of_tensorboard,
    "trackio": losses_of_trackio,
    "wandb": losses_of_wandb,
}


def test_each_logger_of_jaxdist_is_read():
    assert READERS.keys() == known.LOGGERS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_logger_has_the_last_row_of_each_step(name, tmp_path, monkeypatch):
    """A run of 4 steps, resumed from step 2, in the thread that calls loggers."""
    if list(known.faults([name])):
        pytest.skip(f"the package of {name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    make = known.find_known(name)
    reports = []
    for first_step, factor in ((0, 1.0), (2, 0.5)):
        run = run_in(tmp_path, first_step=first_step)
        background = BackgroundLogger(
            name,
            lambda run=run: make(run),
            lambda *a, **k: reports.append((a, k)),
            close_s=60,
        )
        background.event("start", first_step, devices=8)
        for step in range(first_step + 1, first_step + 5):
            background.write(
                step,
                {"loss": factor * step, "mfu": None, "z": math.nan, "unit": "tokens"},
            )
        background.close()
    assert reports == []
    last = {1: 1.0, 2: 2.0, 3: 1.5, 4: 2.0, 5: 2.5, 6: 3.0}
    assert dict(READERS[name](tmp_path)) == pytest.approx(last)


def written(cls, run, first=1):
    """Has a logger of the package write what a run writes."""
    it = cls(run)
    it.event("start", run.first_step, devices=8)
    for step in range(first, first + 3):
        it.write(step, {"loss": 8.0 / step, "mfu": None, "data_wait_s": 0.0})
    it.write(
        first + 2, {"eval_loss": math.nan, "grad_norm": math.inf, "slowest_process": 1}
    )
    it.close()


def test_tensorboard_has_scalars_config_and_hyperparameters(tmp_path):
    module = pytest.importorskip(
        "jaxdist.telemetry.loggers.tensorboard", reason="needs tensorboardX"
    )
    written(module.TensorBoardLogger, run_in(tmp_path))
    data = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    for text in (
        b"loss",
        b"eval_loss",
        b"events/start",
        b"devices=8",
        b"_hparams_/experiment",
        b"optimizer.name",
    ):
        assert text in data, text
    assert b"mfu" not in data
    points = scalars(tmp_path / "tensorboard")
    assert [(step, value) for name, step, value in points if name == "loss"] == [
        (1, 8.0),
        (2, 4.0),
        (3, 8 / 3),
    ]


def scalars(folder):
    found = points(folder.iterdir())
    return [(name, step, pytest.approx(value)) for name, step, value in found]


def points(files):
    """Reads the points of TensorBoard's files: (name, step, value), in order."""
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    found = []
    for path in files:
        data = path.read_bytes()
        at = 0
        while at < len(data):  # length, its checksum, the record, its checksum
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += size + 16
    return found


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_has_the_history_of_a_run_and_of_its_resume(
    tmp_path, monkeypatch
):
    module = pytest.importorskip(
        "jaxdist.telemetry.loggers.wandb", reason="needs wandb: jaxdist[wandb]"
    )
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    written(module.WandbLogger, run_in(tmp_path))
    written(module.WandbLogger, run_in(tmp_path, first_step=2), first=3)
    first, second = sorted(
        (tmp_path / "wandb").glob("offline-run-*/run-0123abcd.wandb")
    )
    rows, config = wandb_files.history(first), wandb_files.config(first)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
        (1, 8.0),
        (2, 4.0),
        (3, 8 / 3),
    ]
    assert rows[0]["event/start"] == "devices=8"
    assert not any("mfu" in row for row in rows)
    assert math.isnan(rows[-1]["eval_loss"])
    assert rows[-1]["grad_norm"] == math.inf
    assert config["optimizer.name"] == "adamw"
    assert config["run"] == {"parameters": 7}
    again = wandb_files.history(second)
    assert [row["step"] for row in again if "loss" in row] == [3, 4, 5], (
        "steps that go back are kept"
    )


@pytest.mark.filterwarnings("ignore")
def test_trackio_has_the_history_of_a_run_and_of_its_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    module = pytest.importorskip(
        "jaxdist.telemetry.loggers.trackio", reason="needs trackio: jaxdist[trackio]"
    )
    written(module.TrackioLogger, run_in(tmp_path))
    written(module.TrackioLogger, run_in(tmp_path, first_step=2), first=3)
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    (name,) = storage.get_runs("jaxdist")
    rows = storage.get_logs("jaxdist", f"{tmp_path.name}-0123abcd")
    assert name == f"{tmp_path.name}-0123abcd"
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row][:3] == [
        (1, 8.0),
        (2, 4.0),
        (3, 8 / 3),
    ]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 3, 4, 5]
    assert [row["event/start"] for row in rows if "event/start" in row] == [
        "devices=8"
    ] * 2
