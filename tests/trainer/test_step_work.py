"""What limits a step: the line of a run, and its event."""

import json

import jax
import pytest

from jaxdist.hardware import chips
from jaxdist.trainer import (
    published_mfu,
    run_config,
    step_work,
    training,
    validation,
)
from support.runs import SMALL_MODEL, run_of


def train(folder, steps):
    config = run_config.default_config()
    config.update_from_flattened_dict(
        SMALL_MODEL
        | {
            "train.steps": steps,
            "train.eval_every": 0,
            "train.sample_tokens": 0,
            "batch.global_size": 2,
            "batch.sequence_length": 16,
            "checkpoint.save_at_end": False,
        }
    )
    run = run_config.from_config(config)
    training.train(run, folder, devices=jax.devices()[:1])
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            return event
    raise AssertionError("no start")


def test_a_run_says_what_limits_its_step(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(step_work, "chip_for", lambda kind: chips.FAMILIES["a100"])
    found = train(tmp_path, 1)["roofline"]
    assert found["bound"] == "memory"  # so small a model multiplies little
    assert found["threshold"] == pytest.approx(19.5e12 / 2039e9)
    assert 0 < found["intensity"] < found["threshold"]
    assert found["intensity"] == pytest.approx(found["flops"] / found["bytes"])
    printed = "".join(capfd.readouterr())
    assert "the step is memory-bound: " in printed


def test_on_an_unknown_chip_a_run_says_nothing(tmp_path, capfd):
    assert "roofline" not in train(tmp_path, 1)
    assert "bound" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama3_8b", {}, ["published MFU: 33 to 49 % on H100 SXM, "]),
        ("llama3_8b", {"lora.rank": 4}, []),
        ("mixtral_8x7b", {}, []),
        ("gpt2_124m", {}, []),
    ],
)
def test_published_mfu_is_of_dense_models_of_the_size(name, changes, said, monkeypatch):
    monkeypatch.setattr(published_mfu, "chip_for", lambda kind: chips.FAMILIES["h100"])
    run = run_of(name, **changes)
    composition = validation.validate(run, jax.devices()[:1], with_data=False)
    lines = list(published_mfu.lines(composition, jax.devices()[0]))
    assert len(lines) == len(said)
    for line, begin in zip(lines, said, strict=True):
        assert line.startswith(begin)
