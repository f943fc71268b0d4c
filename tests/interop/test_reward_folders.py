"""Reward models as Hugging Face folders, read and written without transformers.

tests/interop/test_transformers_reward.py compares scores with transformers.
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("tokenizers", reason="extra `text` is not installed")
pytest.importorskip("jinja2", reason="extra `chat` is not installed")

from jaxdist import interop, library
from jaxdist.config import ConfigError
from jaxdist.evaluation.loading import load_run
from jaxdist.interop import peft
from jaxdist.interop.families import FAMILIES
from jaxdist.models.lora import LoraConfig
from jaxdist.trainer import run_config
from support.huggingface import FOLDERS, run_convert
from support.rewards import CAUSAL, WEIGHTS, classifier, config_of, train, values_of

SCORE = np.random.default_rng(0).normal(0, 0.2, 32).round(3).tolist()
IDS = np.random.default_rng(1).integers(0, 300, (2, 16))


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory):
    """Returns a folder with a model for sequence classification, and runs on it."""
    folder = tmp_path_factory.mktemp("reward")
    classifier(folder / "model", SCORE)
    train(values_of(folder / "model", folder, **{"train.steps": 2}), folder / "run")
    adapted = {"model.head": "score", "lora.rank": 2, "train.steps": 2}
    train(values_of(CAUSAL, folder, **adapted), folder / "adapted")
    return folder


def scores_of(workdir):
    run = load_run(workdir, devices=jax.devices()[:1], log=lambda _: None)
    with jax.default_matmul_precision("highest"):
        return np.asarray(run.logits(IDS))


def fields_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("run", marks=pytest.mark.slow), "adapted"]
)
def test_a_run_goes_out_and_comes_back(name, folder, tmp_path):
    out, back = tmp_path / "out", tmp_path / "back"
    run_convert(folder / name, out, "huggingface")
    fields = fields_of(out)
    assert fields["architectures"] == ["LlamaForSequenceClassification"]
    assert fields["num_labels"] == 1
    assert fields["id2label"] == {"0": "LABEL_0"}
    assert fields["pad_token_id"] == 301  # that of the model it began with
    tensors = load_file(out / WEIGHTS)
    assert tensors["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in tensors
    run_convert(out, back, "jaxdist")
    config = fields_of(back)
    assert config["objective"]["name"] == "reward"
    assert config["model"]["head"] == "score"
    np.testing.assert_allclose(
        scores_of(back), scores_of(folder / name), rtol=1e-5, atol=1e-5
    )
    values = values_of(out, tmp_path, **{"train.steps": 1})
    assert np.isfinite(train(values, tmp_path / "more")[0]["loss"])


def test_the_stored_head_is_read(folder, tmp_path):
    run_convert(folder / "model", tmp_path / "back", "jaxdist")
    run_convert(tmp_path / "back", tmp_path / "out", "huggingface")
    wanted = load_file(folder / "model" / WEIGHTS)
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x)


def test_adapters_go_out_with_the_whole_score(folder, tmp_path):
    run_convert(folder / "adapted", tmp_path / "peft", "huggingface", "--adapters")
    fields = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert fields["task_type"] == "SEQ_CLS"
    assert fields["modules_to_save"] == ["score"]
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    run_convert(folder / "adapted", tmp_path / "out", "huggingface")
    merged = load_file(tmp_path / "out" / WEIGHTS)
    np.testing.assert_array_equal(
        tensors["base_model.model.score.weight"], merged["score.weight"]
    )


@pytest.mark.slow
def test_adapters_come_back_with_the_score(folder, tmp_path):
    run_convert(folder / "adapted", tmp_path / "peft", "huggingface", "--adapters")
    adapted = {"model.head": "score", "lora.rank": 2, "train.steps": 1}
    adapted |= {"optimizer.learning_rate": 1e-30}  # too small to change a weight
    adapted |= {"lora.from_peft": str(tmp_path / "peft")}
    train(values_of(CAUSAL, tmp_path, **adapted), tmp_path / "run")
    found = scores_of(tmp_path / "run")
    wanted = scores_of(folder / "adapted")
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    # adapters of a reward model need a reward model
    dpo = adapted | {"objective.name": "simpo", "model.head": "language"}
    told = refusal(values_of(CAUSAL, tmp_path, **dpo), tmp_path / "dpo")
    assert "score was trained in full, and the run does not train it" in told


@pytest.mark.parametrize(
    ("shape", "modules", "message"),
    [
        ((2, 32), ["score"], r"score.weight has shape (2, 32); (1, 32) is required"),
        (None, ["classifier", "score"], "there is no tensor score.weight"),
        ((1, 32), "score", "modules_to_save='score': a list is required"),
        ((1, 32), None, "the tensor score.weight is not understood"),
    ],
)
def test_a_score_in_full_that_does_not_fit_is_refused(
    shape, modules, message, tmp_path
):
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": modules}
    tensors = {} if shape is None else {"score.weight": np.ones(shape, np.float32)}
    (tmp_path / peft.CONFIG).write_text(json.dumps(fields))
    save_file(tensors, tmp_path / peft.WEIGHTS)
    with pytest.raises(ConfigError) as caught:
        peft.read(
            tmp_path, FAMILIES["llama"], LoraConfig(rank=2, alpha=2), {"score": (32, 1)}
        )
    (fault,) = caught.value.faults
    assert message in fault


@pytest.mark.slow
def test_padding_is_chosen_that_ends_no_text(folder, tmp_path):
    model = classifier(tmp_path / "model", SCORE, pad_token_id=None)
    values = values_of(model, tmp_path, **{"train.steps": 1})
    train(values, tmp_path / "run")
    run_convert(tmp_path / "run", tmp_path / "out", "huggingface")
    assert fields_of(tmp_path / "out")["pad_token_id"] == 0


def refusal(values, tmp_path):
    with pytest.raises(ConfigError) as caught:
        train(values, tmp_path / "run")
    return str(caught.value)


def test_a_score_of_several_labels_is_refused(tmp_path):
    labels = {"0": "bad", "1": "good"}
    model = classifier(tmp_path / "model", SCORE, id2label=labels)
    told = refusal(values_of(model, tmp_path), tmp_path)
    assert "num_labels=2: not supported; a reward model has 1" in told


def test_a_score_that_is_missing_or_of_another_shape_is_refused(tmp_path):
    model = classifier(tmp_path / "model", SCORE)
    tensors = load_file(model / WEIGHTS)
    save_file(
        tensors | {"score.weight": np.zeros((2, 32), np.float32)}, model / WEIGHTS
    )
    told = refusal(values_of(model, tmp_path), tmp_path)
    assert "score.weight has shape (2, 32), config.json makes it (1, 32)" in told
    del tensors["score.weight"]
    save_file(tensors, model / WEIGHTS)
    assert "missing tensors: score.weight" in refusal(
        values_of(model, tmp_path), tmp_path
    )


def test_a_reward_model_becomes_no_language_model(folder, tmp_path):
    values = values_of(folder / "model", tmp_path, **{"model.head": "language"})
    told = refusal(values, tmp_path)
    assert "model.head='language', there 'score'" in told


def test_a_language_model_needs_the_key_of_the_head(tmp_path):
    told = refusal(values_of(CAUSAL, tmp_path), tmp_path)
    assert "set model.head=score" in told


@pytest.mark.slow
def test_a_reward_model_begins_with_a_run(folder, tmp_path):
    """With a run of a language model the score is random, with a reward model read."""
    body = values_of(CAUSAL, tmp_path, **{"train.steps": 1})
    body |= {"objective.name": "simpo", "objective.beta": 2.0}
    config = config_of(body)
    config.batch.global_size = 1
    run = run_config.from_config(config)
    library.run(run, tmp_path / "body", devices=jax.devices()[:1])
    values = values_of("", tmp_path, **{"train.steps": 1, "model.head": "score"})
    first = {
        name: train(values | {"init.from_run": str(place)}, tmp_path / name)[0]["loss"]
        for name, place in (("a", tmp_path / "body"), ("b", folder / "run"))
    }
    assert first["a"] == pytest.approx(np.log(2), abs=0.2)
    assert first["b"] != pytest.approx(first["a"], abs=1e-3)
    without = values | {"init.from_run": str(tmp_path / "body")}
    del without["model.head"]
    assert "set model.head=score" in refusal(without, tmp_path)


def test_a_family_without_such_a_class_is_refused():
    _, olmoe = interop.derive(interop.read_config(FOLDERS / "olmoe"))
    with pytest.raises(ConfigError, match="no class of olmoe for sequence"):
        interop.fields_of({**olmoe, "head": "score"})
    assert FAMILIES["olmoe"].architecture_for("score") == ""
    names = [family.architecture_for("score") for family in FAMILIES.values()]
    assert "Gemma3TextForSequenceClassification" in names
    assert "GPT2ForSequenceClassification" in names


def test_a_reward_model_writes_no_text(folder):
    run = load_run(folder / "run", devices=jax.devices()[:1], log=lambda _: None)
    for call in (
        lambda: run.generate(["what"]),
        lambda: run.score([("what", "is")]),
        lambda: run.chat([[{"role": "user", "content": "what"}]]),
    ):
        with pytest.raises(ConfigError, match="is a reward model"):
            call()
    assert not (folder / "run/sample.txt").exists()


def test_ids_are_checked_against_the_vocabulary(folder):
    run = load_run(folder / "run", devices=jax.devices()[:1], log=lambda _: None)
    with pytest.raises(ConfigError, match="307 at .* is outside of 0 to 306"):
        run.logits([[1, 307]])
