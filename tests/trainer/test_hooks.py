"""Hooks of the training loop: when they are called, what they see, and what they may
ask for. Loggers.
"""

import json
import time

import jax
import numpy as np
import pytest

from jaxdist import library
from jaxdist.checkpoint.folders import list_steps, read_step
from jaxdist.config import ConfigError, trees
from jaxdist.data.dataset import Dataset
from jaxdist.telemetry.loggers import logger
from jaxdist.telemetry.metrics import read_events, read_rows
from jaxdist.trainer import run_config, time_limit, training
from jaxdist.trainer.callbacks import Callback, StepView, every
from support.runs import untimed

pytestmark = pytest.mark.usefixtures("shared_steps")

STEPS = 7
PAUSE_S = 0.5  # of a slow hook; more than a step takes on a loaded machine


def config_of(**changes) -> run_config.RunConfig:
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
        "train.steps": STEPS,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "batch.global_size": 4,
        "batch.sequence_length": 16,
        "checkpoint.every_steps": 0,
        "optimizer.warmup_steps": 1,
    }
    config.update_from_flattened_dict(
        small | {k.replace("__", "."): v for k, v in changes.items()}
    )
    return run_config.from_config(config)


def train(folder, *hooks, **changes):
    config = config_of(**changes)
    callbacks = [*library.run_callbacks(config, folder), *hooks]
    return training.train(
        config, folder, devices=jax.devices()[:1], callbacks=callbacks
    )


@pytest.mark.parametrize(
    ("steps", "at_end", "called"),
    [(3, False, [3, 6]), (3, True, [3, 6, 7]), (7, True, [7]), (0, True, [])],
)
def test_every_calls_at_its_steps_and_at_the_end_once(tmp_path, steps, at_end, called):
    views = []
    train(tmp_path, every(steps, views.append, at_end=at_end))
    assert [view.step for view in views] == called
    rows = {row["step"]: row for row in read_rows(tmp_path).train}
    for view in views:
        assert view.last == (view.step == STEPS)
        assert not view.interrupted
        assert view.metrics["loss"].item() == rows[view.step]["loss"]
        assert (view.progress.step, view.progress.tokens_seen) == (
            view.step,
            view.step * 4 * 16,
        )


def test_a_hook_sees_the_state_of_its_step_and_logs_beside_the_rows(tmp_path):
    def note(view):
        norm = float(
            np.sqrt(
                sum(np.square(x).sum() for x in jax.tree.leaves(view.state.trainable))
            )
        )
        view.log(view.step, {"eval_loss": norm, "step_of_state": int(view.state.step)})

    train(tmp_path, every(2, note))
    rows = read_rows(tmp_path)
    assert [row["step_of_state"] for row in rows.evaluation] == [2, 4, 6]
    assert [row["step"] for row in rows.train] == list(range(1, STEPS + 1))


def test_a_hook_sees_the_weights_by_name_as_checkpoints_hold_them(tmp_path):
    seen = {}

    def look(view):
        seen[view.step] = {path: np.asarray(x) for path, x in view.weights().items()}

    result = train(tmp_path, every(STEPS, look))
    last = trees.flatten_names(result.built.views.flat(result.state).trainable)
    assert seen[STEPS].keys() == last.keys()
    assert "blocks/mlp/up" in last
    assert all(np.array_equal(seen[STEPS][path], x) for path, x in last.items())


def test_what_is_no_hook_is_refused_before_anything_compiles(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"callbacks: <built-in function print> is no callback. .* jaxdist.every",
    ):
        train(tmp_path / "run", print)
    assert not (tmp_path / "run").exists()


def test_a_hook_saves_and_the_run_resumes_there(tmp_path):
    train(
        tmp_path,
        every(3, lambda view: view.request_save()),
        checkpoint__save_at_end=False,
    )
    assert list_steps(tmp_path / "checkpoints") == [3, 6]


def test_a_hook_stops_the_run_which_is_evaluated_saved_and_resumed(tmp_path):
    text = tmp_path / "little.txt"
    text.write_text("a line to hold out, and to train on\n" * 20)
    little = {
        "data__source": "text",
        "data__path": str(text),
        "data__validation_path": str(text),
    }
    changes = little | {"train__eval_every": 100, "optimizer__schedule": "constant"}
    result = train(tmp_path, every(4, lambda view: view.stop("good enough")), **changes)
    assert not result.stopped
    assert int(result.state.step) == 4
    assert [event["event"] for event in read_events(tmp_path)] == [
        "start",
        "evaluate",
        "save",
        "stop",
    ]
    assert read_events(tmp_path)[-1]["reason"] == "good enough"
    assert int(train(tmp_path, **changes).state.step) == STEPS


def test_loggers_that_raise_and_sleep_leave_the_run_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "CLOSE_S", 1.0)
    names = ("NotMade", "Raising", "Sleeping", "Recording")
    own = tuple(f"support.loggers:{name}" for name in names)
    evaluates = {"train__eval_every": 4, "data__validation_tokens": 1024}
    train(tmp_path / "without", **evaluates)
    train(tmp_path / "with", **evaluates, train__loggers=(*own, "tensorboard"))
    with_, without = (read_rows(tmp_path / name) for name in ("with", "without"))
    assert untimed(with_) == untimed(without)
    assert len(with_.train) == STEPS
    events = [
        event
        for event in read_events(tmp_path / "with")
        if event["event"] == "logger_failed"
    ]
    failed = [
        event["logger"] for event in events if "not ended within" not in event["error"]
    ]
    assert sorted(failed) == sorted(own[:2])
    assert {*own[:3]} <= {event["logger"] for event in events}
    assert list((tmp_path / "with" / "tensorboard").iterdir())
    calls = [json.loads(line) for line in (tmp_path / "with" / "calls.jsonl").open()]
    assert calls[0][:4:2] == [
        "made",
        json.loads((tmp_path / "with/run.json").read_text())["run"],
    ]
    assert [
        call[1] for call in calls if call[0] == "event" and call[1] != "logger_failed"
    ] == [
        "start",
        "evaluate",
        "evaluate",
        "save",
        "stop",
    ]
    rows = [call[2] for call in calls if call[0] == "write" and "loss" in call[2]]
    assert [row["loss"] for row in rows] == [row["loss"] for row in with_.train]
    assert calls[-1] == ["close"]
    with pytest.raises(ConfigError) as refused:
        train(
            tmp_path / "none",
            train__loggers=("support.loggers:Other", "support.loggers:Third"),
        )
    assert [fault.partition(". ")[0] for fault in refused.value.faults] == [
        f"train.loggers='support.loggers:{name}': support.loggers has no class {name!r}."
        for name in ("Other", "Third")
    ]
    assert not (tmp_path / "none").exists()


def test_the_time_of_hooks_is_not_training_time(tmp_path):
    views = []

    def slow(view):
        time.sleep(PAUSE_S)
        views.append(view)

    train(tmp_path, every(1, slow))
    assert len(views) == STEPS
    of_hooks_s = (STEPS - 1) * PAUSE_S  # they have taken longer
    assert 0 < views[-1].progress.elapsed_s < of_hooks_s
    rows = read_rows(tmp_path).train
    assert sum(row["step_time_s"] for row in rows) < of_hooks_s


class Ages(Callback):
    """Lets the clock of train.max_minutes run, by the seconds of a run's parts."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def on_phase(self, phase: str, step: int) -> None:
        self.now += {"compile": 30, "save": 10}.get(phase, 0)

    def on_step(self, view: StepView) -> None:
        self.now += 2

    def on_evaluate(self, view: StepView, row: dict) -> None:
        self.now += 20


def test_the_time_limit_counts_all_since_the_data_is_open_over_resumes(
    tmp_path, monkeypatch, capsys
):
    clock = Ages()
    monkeypatch.setattr(time_limit, "time", clock)
    text = tmp_path / "little.txt"
    text.write_text("a line to hold out, and to train on\n" * 20)
    changes = {
        "data__source": "text",
        "data__path": str(text),
        "data__validation_path": str(text),
        "train__steps": 80,
        "train__eval_every": 10,
        "train__log_every": 7,
        "checkpoint__every_steps": 10,
    }
    # 30 s of compilation, and 50 s for ten steps with an evaluation and a save
    first = train(tmp_path / "run", clock, train__max_minutes=4, **changes)
    assert first.reason == "the time limit is reached (train.max_minutes=4)"
    assert int(first.state.step) == 45
    # the limit, the last evaluation and save
    assert clock.now == 240 + 30
    capsys.readouterr()
    train(tmp_path / "run", clock, train__max_minutes=4, **changes)
    assert "is finished at step 45" in capsys.readouterr().out
    clock.now = 0.0
    raised = train(tmp_path / "run", clock, train__max_minutes=5, **changes)
    # 260 s before the last save, and 30 s of compilation
    assert int(raised.state.step) == 50


def test_a_resumed_run_counts_tokens_and_time_from_where_it_was(tmp_path, monkeypatch):
    views = []
    read = Dataset.train_batch

    def read_slowly(*arguments):
        time.sleep(0.4)
        return read(*arguments)

    monkeypatch.setattr(Dataset, "train_batch", read_slowly)
    train(tmp_path, every(4, lambda view: view.stop("half of it")))
    monkeypatch.undo()
    saved = read_step(tmp_path / "checkpoints", 4).metadata["progress"]
    assert saved["tokens_seen"] == 4 * 4 * 16
    assert saved["elapsed_s"] > 1.2
    train(tmp_path, every(1, views.append))
    assert [view.step for view in views] == [5, 6, 7]
    first = views[0].progress
    assert first.tokens_seen == 5 * 4 * 16
    assert first.elapsed_s > saved["elapsed_s"]
    assert read_rows(tmp_path).train[-1]["tokens_seen"] == STEPS * 4 * 16
