"""Trained weights are kept from settings for random ones: data, optimizer, rate."""

from pathlib import Path

import jax
import pytest

from jaxdist.config import ConfigError, files
from jaxdist.trainer import compose, fine_tuning, run_config, source_run, validation
from support.huggingface import SMOLLM, run_convert
from support.weight_sources import parsed

WEIGHTS = f"--config.init.from_huggingface={SMOLLM}"
QUICKSTART = ("--config", "quickstart", WEIGHTS)
SOURCE = "--config.data.source=stdlib"
MUON = "--config.optimizer.name=muon"
RATE = "--config.optimizer.learning_rate=0.01"
LORA = "--config.lora.rank=4"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def faults_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parsed(words)
    return [fault.partition(" ")[0].partition(":")[0] for fault in error.value.faults]


def test_readme_s_old_line_is_refused_with_all_its_faults():
    with pytest.raises(ConfigError) as error:
        parsed(QUICKSTART)
    data, name, rate = error.value.faults
    assert data.startswith(f"init.from_huggingface={SMOLLM}: no data are named")
    assert "--config.data.source=text --config.data.path=" in data
    assert name.startswith("optimizer.name=muon is for random weights")
    assert "Use --config finetune, or add --config.optimizer.name=adamw" in name
    assert "to keep the value, add --config.optimizer.name=muon" in name
    assert rate.startswith("optimizer.learning_rate=0.01 is for random weights")
    assert error.value.exit_code == 78


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ((SOURCE,), ["optimizer.name=muon", "optimizer.learning_rate=0.01"]),
        ((SOURCE, MUON), ["optimizer.learning_rate=0.01"]),
        ((SOURCE, RATE), ["optimizer.name=muon"]),
        ((LORA,), [f"init.from_huggingface={SMOLLM}"]),
        ((SOURCE, RATE, "--config.optimizer.name=adamw"), []),
        ((SOURCE, "--config.optimizer.name=adamw"), ["optimizer.learning_rate=0.01"]),
        ((SOURCE, MUON, "--config.optimizer.learning_rate=9e-4"), []),
        ((SOURCE, LORA), []),
        ((SOURCE, MUON, RATE), []),
    ],
)
def test_each_value_is_accepted_if_its_key_is_set(words, keys):
    if keys:
        assert faults_of(*QUICKSTART, *words) == keys
    else:
        assert parsed([*QUICKSTART, *words]).init.from_huggingface == str(SMOLLM)


def test_a_path_for_the_default_corpus_gets_the_cure_of_the_path():
    words = (*QUICKSTART, "--config.data.path=a.txt", MUON, RATE)
    with pytest.raises(ConfigError, match="is not read by data.source=stdlib: set"):
        validation.validate(parsed(words), jax.devices()[:1])


def test_random_weights_and_commands_that_do_not_train_are_left_alone():
    assert parsed(["--config", "quickstart"]).optimizer.name == "muon"
    run = parsed([*QUICKSTART, SOURCE, MUON, RATE])
    fine_tuning.check(
        compose.with_overrides(run, {"init.from_huggingface": ""}), (), {}
    )


def own_config(*lines: str) -> str:
    body = "\n    ".join(["config = default_config()", *lines, "return config"])
    Path("own.py").write_text(
        f"from jaxdist import default_config\ndef get_config():\n    {body}\n"
    )
    return "own.py"


def test_a_user_s_own_config_counts_as_set_also_where_it_sets_the_default():
    muon = 'config.optimizer.name, config.optimizer.learning_rate = "muon", 0.01'
    file = own_config('config.data.source = "stdlib"', muon)
    assert parsed(["--config", file, WEIGHTS]).data.source == "stdlib"
    file = own_config(muon)
    assert faults_of("--config", file, WEIGHTS) == [f"init.from_huggingface={SMOLLM}"]


def test_a_value_that_the_weights_were_trained_with_is_accepted():
    run = parsed([*QUICKSTART, SOURCE, MUON, RATE])
    with pytest.raises(ConfigError):
        fine_tuning.check(run, (), {})
    trained_with = {
        "data.source": "stdlib",
        "optimizer.name": "muon",
        "optimizer.learning_rate": 0.01,
    }
    fine_tuning.check(run, (), trained_with)
    with pytest.raises(ConfigError, match="learning_rate=0.01 is for random weights"):
        fine_tuning.check(run, (), trained_with | {"optimizer.learning_rate": 1e-3})


def test_converted_weights_were_trained_with_nothing_that_is_known():
    assert run_convert(SMOLLM, Path("work"), "jaxdist") == 0
    assert source_run.locate("work").trained_with == {}
    weights = "--config.init.from_run=work"
    assert faults_of("--config", "quickstart", weights) == [
        weights.removeprefix("--config."),
        "optimizer.name=muon",
        "optimizer.learning_rate=0.01",
    ]


# --- the packaged config --------------------------------------------------------------


def test_finetune_asks_for_a_model_and_for_data_at_once():
    with pytest.raises(ConfigError) as error:
        parsed(["--config", "finetune"])
    model, data = error.value.faults
    assert "Add --config.init.from_huggingface=FOLDER" in model
    assert "--config.init.from_run=WORKDIR" in model
    assert "--config.data.source=text --config.data.path=" in data
    (data,) = faults_of("--config", "finetune", WEIGHTS)
    assert data == f"init.from_huggingface={SMOLLM}"
    run = run_config.from_config(run_config.default_config())
    required = compose.with_overrides(run, {"init.required": True})
    with pytest.raises(ConfigError, match="init.required=true: .* none are named"):
        validation.validate(required, jax.devices()[:1])


@pytest.mark.parametrize(
    ("config", "rank", "rate"), [("finetune", 0, 2e-5), ("finetune:lora", 16, 1e-4)]
)
def test_finetune_passes_with_a_model_and_data(config, rank, rate):
    Path("notes.txt").write_text("the cat in thin hats then thinks of the inn " * 60)
    words = ["--config", config, WEIGHTS, "--config.batch.sequence_length=16"]
    words += ["--config.data.source=text", "--config.data.path=notes.txt"]
    run = parsed(words)
    assert (run.optimizer.name, run.optimizer.schedule) == ("adamw", "cosine")
    assert (run.lora.rank, run.optimizer.learning_rate) == (rank, rate)
    validation.validate(run, jax.devices()[:1])
    assert list(fine_tuning.warnings(run)) == []


def test_finetune_has_no_other_method():
    with pytest.raises(ConfigError, match="finetune:full: no such method; use"):
        parsed(["--config", "finetune:full", WEIGHTS])


# --- adapters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "warned"), [(1e-3, "high"), (9e-4, ""), (5e-5, ""), (2e-5, "low")]
)
def test_a_high_or_low_rate_for_adapters_is_warned_of(rate, warned):
    words = [*QUICKSTART, SOURCE, LORA, f"--config.optimizer.learning_rate={rate}"]
    run = parsed(words)
    lines = list(fine_tuning.warnings(run))
    assert len(lines) == bool(warned)
    if warned:
        text = (
            f"optimizer.learning_rate={rate:g} is {warned} for adapters (lora.rank=4)"
        )
        assert lines[0].startswith(text)
    without = compose.with_overrides(run, {"lora.rank": 0})
    assert list(fine_tuning.warnings(without)) == []


def test_no_shipped_config_is_warned_of():
    folders = files.packaged_folders()
    names = [*files.packaged_configs(folders), "finetune:lora"]
    for name in names:
        run = run_config.from_config(files.load(name, folders=folders))
        assert list(fine_tuning.warnings(run)) == [], name
    assert "sft_lora" in names


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, False),
        ({"batch.global_size": 64}, True),
        ({"batch.sequence_length": 512}, True),
        # the same tokens in longer sequences
        ({"batch.global_size": 4, "batch.sequence_length": 512}, False),
        ({"batch.global_size": 64, "optimizer.learning_rate": 2e-3}, False),
    ],
)
def test_another_batch_with_the_rate_of_the_source_is_told(changes, said):
    trained_with = {
        "batch.global_size": 16,
        "batch.sequence_length": 128,
        "optimizer.learning_rate": 1e-3,
    }
    run = compose.with_overrides(
        parsed(["--config", "quickstart"]), trained_with | changes
    )
    lines = list(fine_tuning.batch_warnings(run, trained_with))
    assert len(lines) == said
    assert list(fine_tuning.batch_warnings(run, {})) == []
    for damaged in ({"batch.global_size": "x"}, {"batch.global_size": 0}):
        assert not list(fine_tuning.batch_warnings(run, trained_with | damaged))
    if changes == {"batch.global_size": 64}:
        assert lines == [
            "the global batch changed from 16 x 128 to 64 x 128 tokens, the learning "
            "rate did not (0.001). With AdamW it usually changes with the square root "
            "of the batch: optimizer.learning_rate=0.002"
        ]
