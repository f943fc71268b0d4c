"""The length of a run in epochs, its evaluations, and what it says at the start."""

import json
from pathlib import Path
from unittest import mock

import jax
import pytest

from jaxdist.config import ConfigError
from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset
from jaxdist.inference import sample
from jaxdist.telemetry.metrics import read_rows
from jaxdist.trainer import compose, held_out, run_config, training, validation
from jaxdist.trainer.callbacks import Callback, Run, RunEnd
from support.runs import SMALL_MODEL

pytestmark = pytest.mark.usefixtures("shared_steps")

SMALL = {
    **SMALL_MODEL,
    "batch.global_size": 4,
    "batch.sequence_length": 16,
    "checkpoint.every_steps": 0,
}


def config_of(folder: Path, **changes) -> run_config.RunConfig:
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat\n" * 100)
    config = run_config.default_config()
    config.update_from_flattened_dict(SMALL)
    config.update_from_flattened_dict(
        {
            "data.source": "text",
            "data.path": str(text),
            "data.cache_dir": str(folder / "cache"),
        }
    )
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return run_config.from_config(config)


class Seen(Callback):
    """Keeps the number of steps that a callback sees at its start."""

    def on_start(self, run: Run) -> None:
        self.steps = run.config.train.steps


def test_a_run_of_epochs_counts_its_steps_evaluates_and_writes_a_sample(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sample, "_AUTO_TOKENS", 4)
    held = str(tmp_path / "held.txt")
    # 2,300 tokens are 144 rows, of which the last needs a token more
    config = config_of(tmp_path, train__epochs=0.5, data__validation_path=held)
    Path(held).write_text("the dog sat on the mat\n" * 90)
    seen = Seen()
    run = tmp_path / "run"
    callbacks = [sample.Sample(), seen]
    training.train(config, run, devices=jax.devices()[:1], callbacks=callbacks)
    said = capsys.readouterr().out
    stored = json.loads((run / "config.json").read_text())["train"]
    assert (stored["steps"], stored["epochs"]) == (18, 0.0)
    assert seen.steps == 18
    assert "epochs: 35.8 steps an epoch, 0.503 epochs planned" in said
    assert "all steps have the same rows" not in said
    # the data are opened twice: to count them, and to train
    lines = [line for line in said.splitlines() if line.startswith("data: ")]
    assert len(lines) == len(set(lines))
    assert sum("training samples of 16 tokens" in line for line in lines) == 1
    assert lines[-1].endswith(" 64 held-out targets")
    rows = read_rows(run)
    assert [row["step"] for row in rows.evaluation] == list(range(2, 19, 2))
    # one batch, not all that is held out
    assert {row["eval_tokens"] for row in rows.evaluation} == {64}
    assert "evaluation: every 2 steps, on 64 held-out targets" in said
    assert len((run / "sample.txt").read_text()) > 1
    assert said.index("compiling the step") < said.index("compiled the step in ")
    assert "if train.steps is raised later, the rate rises again" in said


@pytest.mark.parametrize(
    ("packing", "rows"), [("documents", "4 packed rows"), ("window", "3 rows")]
)
def test_a_run_whose_steps_all_train_on_the_same_rows_is_warned_of(
    tmp_path, capsys, packing, rows
):
    changes = {"data__packing": packing, "train__steps": 1, "train__eval_every": 0}
    config = config_of(tmp_path, **changes)
    (tmp_path / "text.txt").write_text("x" * 60)
    training.train(config, tmp_path / "run", devices=jax.devices()[:1])
    warning = (
        f"warning: the training data are {rows} of 16 tokens, and a step trains on "
        f"batch.global_size=4: all steps have the same rows. Lower batch.global_size or"
    )
    assert warning in capsys.readouterr().out


def test_a_refused_start_does_not_store_the_length_of_other_data(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    texts.joinpath("a.txt").write_text("what is read here " * 40)
    config = config_of(
        tmp_path, train__epochs=0.1, train__eval_every=0, data__path=str(texts)
    )
    run = tmp_path / "run"
    training.train(config, run, devices=jax.devices()[:1])
    before = (run / "config.json").read_text()
    steps = json.loads(before)["train"]["steps"]
    texts.joinpath("b.txt").write_text("what comes on top " * 400)
    with pytest.raises(ConfigError, match="data has changed|data have changed"):
        training.train(config, run, devices=jax.devices()[:1])
    stored = json.loads((run / "config.json").read_text())["train"]
    assert stored["steps"] in (steps, run_config.TrainConfig.steps)
    texts.joinpath("b.txt").unlink()
    training.train(config, run, devices=jax.devices()[:1])
    assert (run / "config.json").read_text() == before
    assert read_rows(run).train[-1]["step"] <= steps


def test_evaluations_that_are_compared_do_not_depend_on_the_steps(tmp_path):
    limited = held_out.with_auto_limit(config_of(tmp_path))
    assert limited.data.validation_tokens > 0
    for key, value in (("checkpoint__keep_best", "eval_loss"), ("train__patience", 3)):
        config = config_of(tmp_path, **{key: value})
        assert held_out.with_auto_limit(config) == config


def test_steps_and_epochs_exclude_each_other(tmp_path):
    config = config_of(tmp_path, train__epochs=2.0, train__steps=7)
    with pytest.raises(
        ConfigError, match=r"train.steps=7 and train.epochs=2: both say"
    ):
        training.train(config, tmp_path / "run")


def test_a_mixture_has_no_epoch(tmp_path):
    entry = f"1:text:{tmp_path / 'text.txt'}"
    mixture = {"source": "mixture", "path": "", "mixture": (entry, entry)}
    config = config_of(
        tmp_path, train__epochs=1.0, **{f"data__{k}": v for k, v in mixture.items()}
    )
    with pytest.raises(ConfigError, match="has no epoch, .* set train.steps"):
        training.train(config, tmp_path / "run", devices=jax.devices()[:1])


class HeldOut(Dataset):
    """A dataset of which only the number of held-out batches is known."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def num_validation_batches(self, global_size: int) -> int:
        if not self.batches:
            raise ConfigError("nothing is held out")
        return self.batches


@pytest.mark.parametrize(
    ("steps", "every"), [(1700, 170), (1705, 171), (15, 2), (3, 1), (1, 1)]
)
def test_auto_evaluates_ten_times_a_run_at_most(tmp_path, steps, every):
    config = config_of(tmp_path, train__steps=steps)
    assert held_out.evaluation_interval(config, HeldOut(3)) == every
    assert len({*range(every, steps + 1, every), steps}) <= 10


def test_auto_evaluates_nothing_that_is_not_held_out(tmp_path):
    config = config_of(tmp_path)
    assert held_out.evaluation_interval(config, HeldOut(0)) == 0
    assert held_out.evaluation_lines(config, HeldOut(0)) == [
        "no evaluation: nothing is held out"
    ]
    for key, value in (("train.eval_every", 5), ("train.patience", 2)):
        required = compose.with_overrides(config, {key: value})
        with pytest.raises(ConfigError, match="nothing is held out"):
            held_out.evaluation_interval(required, HeldOut(0))
    never = compose.with_overrides(config, {"train.eval_every": 0})
    assert held_out.evaluation_interval(never, HeldOut(3)) == 0


def test_auto_evaluates_a_share_of_a_large_held_out_set(tmp_path):
    config = config_of(tmp_path, train__steps=2000)
    limited = held_out.with_auto_limit(config)
    # ten batches of 4 x 16 targets
    assert limited.data.validation_tokens == 640
    for changes in ({"data.validation_tokens": 7}, {"train.eval_every": 100}):
        chosen = compose.with_overrides(config, changes)
        assert held_out.with_auto_limit(chosen) == chosen
    short = compose.with_overrides(config, {"train.steps": 10})
    assert held_out.with_auto_limit(short).data.validation_tokens == 64
    assert config.data == DataConfig(
        source="text", path=config.data.path, cache_dir=config.data.cache_dir
    )


@pytest.mark.parametrize(("tokens", "fails"), [("auto", False), (7, True)])
def test_an_automatic_sample_that_fails_does_not_fail_the_run(
    tmp_path, monkeypatch, tokens, fails
):
    def no_memory(*arguments, **options):
        raise MemoryError("no memory\nat all")

    notes = []
    run = mock.MagicMock()
    run.note = notes.append
    run.config = config_of(tmp_path, train__sample_tokens=tokens)
    run.spec.abstract_model.max_length = None
    run.dataset.tokenizer.encode.return_value = [1]
    monkeypatch.setattr(sample, "text_generator", lambda *_, **__: no_memory)
    callback = sample.Sample()
    callback.on_start(run)
    if fails:
        with pytest.raises(MemoryError):
            callback.on_end(RunEnd(state=None))
    else:
        callback.on_end(RunEnd(state=None))
        assert notes == ["no sample: MemoryError: no memory"]


def test_an_automatic_sample_fits_the_model(monkeypatch):
    monkeypatch.setattr(sample, "longest_text", lambda spec: 100)
    assert sample._length_of_sample("auto", 1, None) == 99
    assert sample._length_of_sample("auto", 0, None) == 0
    assert sample._length_of_sample("auto", 100, None) == 0
    assert sample._length_of_sample(7, 0, None) == 7
    monkeypatch.setattr(sample, "longest_text", lambda spec: None)
    assert sample._length_of_sample("auto", 1, None) == 200


def test_a_plan_of_epochs_takes_a_warm_up_of_any_length(tmp_path):
    warm = {"optimizer__warmup_steps": 5000, "train__steps": 1000}
    with pytest.raises(ConfigError, match="warmup_steps"):
        validation.validate_on(config_of(tmp_path, **warm), 1)
    epochs = config_of(tmp_path, **warm, train__epochs=100.0)
    validation.validate_on(epochs, 1).build_step(jax.devices()[:1])
