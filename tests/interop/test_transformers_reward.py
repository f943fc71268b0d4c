"""Reward models against transformers: each side reads what the other one wrote.

Needs the extra interop-test. tests/interop/test_reward_folders.py reads and writes
folders without transformers.
"""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxdist import interop  # noqa: E402
from jaxdist.config import trees  # noqa: E402
from jaxdist.evaluation.loading import load_run  # noqa: E402
from support.huggingface import loaded, logits_of, run_convert  # noqa: E402
from support.rewards import CAUSAL, stored, train, values_of  # noqa: E402
from support.transformers_folders import BIGGER, LENGTH, NAMES, make  # noqa: E402

Classifier = transformers.AutoModelForSequenceClassification
PAD = 0


def build(name):
    """Returns a random model for sequence classification."""
    config = make.configs(**BIGGER)[name]
    config.pad_token_id = PAD
    config.num_labels = 1
    torch.manual_seed(2)
    model = Classifier.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25 if parameter.ndim > 1 else 0.5)
    return model


def texts(model):
    """Returns two rows of ids, the second one padded, and the last place of each."""
    ids = np.random.default_rng(1).integers(1, model.config.vocab_size, (2, LENGTH))
    ids[1, 13:] = PAD
    return ids, np.array([LENGTH - 1, 12])


def scores_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits[:, 0].numpy()


@pytest.mark.parametrize("name", [x for x in NAMES if x != "olmoe"])
def test_a_reward_model_comes_in_and_goes_out(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "theirs")
    ids, last = texts(model)
    wanted = scores_of(model, ids)
    spec, parameters = loaded(tmp_path / "theirs")
    found = logits_of(spec, parameters, {}, ids)
    assert found.shape == (2, LENGTH, 1)
    found = found[np.arange(2), last, 0]
    assert np.abs(found - wanted).max() <= 1e-5
    assert np.abs(wanted).max() > 0.1

    config = interop.read_config(tmp_path / "theirs")
    family, fields = interop.fields_of(interop.derive(config)[1], config)
    flat = {path: np.asarray(x) for path, x in trees.flatten_names(parameters).items()}
    interop.export(
        tmp_path / "ours",
        family,
        fields,
        {path: x.shape for path, x in flat.items()},
        flat.__getitem__,
        dtype="float32",
        max_shard_bytes=20_000,
    )
    again, info = Classifier.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32
    )
    assert {key: list(value) for key, value in info.items() if value} == {}, info
    assert type(again) is type(model)
    assert again.config.num_labels == 1
    assert np.abs(scores_of(again.eval(), ids) - wanted).max() <= 1e-6


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "adapters"])
def test_a_run_scores_as_transformers_does(rank, tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    values = values_of(CAUSAL, tmp_path, **{"model.head": "score", "lora.rank": rank})
    train(values | {"train.steps": 5}, tmp_path / "run")
    run = load_run(tmp_path / "run", devices=jax.devices()[:1], log=lambda _: None)
    texts = stored("reward.json")["messages"]["chosen"]["ids"]
    with jax.default_matmul_precision("highest"):
        ours = np.array([run.logits([ids])[0, -1, 0] for ids in texts])
    ids = np.full((len(texts), max(map(len, texts))), run.tokenizer.end_of_document)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    run_convert(tmp_path / "run", tmp_path / "hf", "huggingface")
    model = Classifier.from_pretrained(tmp_path / "hf").eval()
    assert model.config.pad_token_id == run.tokenizer.end_of_document
    assert np.abs(scores_of(model, ids) - ours).max() <= 1e-5
    if rank:
        peft = pytest.importorskip("peft")
        run_convert(tmp_path / "run", tmp_path / "peft", "huggingface", "--adapters")
        base = Classifier.from_pretrained(CAUSAL, num_labels=1)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        assert np.abs(scores_of(adapted, ids) - ours).max() <= 1e-5
