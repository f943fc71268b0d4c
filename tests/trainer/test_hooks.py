"""Hooks of the training loop: when they are called, what they see, and what they may ask for."""

import jax
import numpy as np
import pytest

from jaxdist.checkpoint.files import list_steps
from jaxdist.telemetry.metrics import read_events, read_rows
from jaxdist.trainer import run_config, trainer
from jaxdist.trainer.hooks import every

STEPS = 7


def config_of(**changes) -> run_config.RunConfig:
    config = run_config.default_config()
    sizes = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    small = {f"model.{name}": size for name, size in sizes.items()} | {
        "train.steps": STEPS,
        "train.log_every": 1,
        "batch.global_size": 4,
        "batch.sequence_length": 16,
        "checkpoint.every_steps": 0,
        "optimizer.warmup_steps": 1,
    }
    config.update_from_flattened_dict(small | {k.replace("__", "."): v for k, v in changes.items()})
    return run_config.from_config(config)


def train(folder, *hooks, **changes):
    return trainer.train(config_of(**changes), folder, devices=jax.devices()[:1], hooks=hooks)


@pytest.mark.parametrize(
    ("steps", "at_end", "called"), [(3, False, [3, 6]), (3, True, [3, 6, 7]), (7, True, [7]), (0, True, [])]
)
def test_every_calls_at_its_steps_and_at_the_end_once(tmp_path, steps, at_end, called):
    views = []
    train(tmp_path, every(steps, views.append, at_end=at_end))
    assert [view.step for view in views] == called
    rows = {row["step"]: row for row in read_rows(tmp_path).train}
    for view in views:
        assert view.last == (view.step == STEPS) and not view.interrupted
        assert view.metrics["loss"].item() == rows[view.step]["loss"]
        assert (view.progress.step, view.progress.tokens_seen) == (view.step, view.step * 4 * 16)


def test_a_hook_sees_the_state_of_its_step_and_logs_beside_the_rows(tmp_path):
    def note(view):
        norm = float(np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(view.state.trainable))))
        view.log(view.step, {"eval_loss": norm, "step_of_state": int(view.state.step)})

    train(tmp_path, every(2, note))
    rows = read_rows(tmp_path)
    assert [row["step_of_state"] for row in rows.evaluation] == [2, 4, 6]
    assert [row["step"] for row in rows.train] == list(range(1, STEPS + 1))


def test_a_hook_saves_and_the_run_resumes_there(tmp_path):
    train(tmp_path, every(3, lambda view: view.save()), checkpoint__save_at_end=False)
    assert list_steps(tmp_path / "checkpoints") == [3, 6]


def test_a_hook_stops_the_run_which_is_evaluated_saved_and_resumed(tmp_path):
    text = tmp_path / "little.txt"
    text.write_text("a line to hold out, and to train on\n" * 20)
    little = {"data__source": "text", "data__path": str(text), "data__validation_path": str(text)}
    changes = little | {"train__eval_every": 100, "optimizer__schedule": "constant"}
    result = train(tmp_path, every(4, lambda view: view.stop("good enough")), **changes)
    assert not result.stopped and int(result.state.step) == 4
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "evaluate", "save", "stop"]
    assert read_events(tmp_path)[-1]["reason"] == "good enough"
    assert int(train(tmp_path, **changes).state.step) == STEPS
