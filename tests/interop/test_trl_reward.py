"""Reward models against TRL: tokens, scores, and losses while training.

tests/data/trl/reward.json holds what TRL computes; make.py beside it writes it.
"""

import jax
import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="extra `text` is not installed")
pytest.importorskip("jinja2", reason="extra `chat` is not installed")

from jaxdist.evaluation.loading import load_run
from support.rewards import (
    CAUSAL,
    classifier,
    config_of,
    opened,
    rows_file,
    stored,
    train,
    values_of,
)

REWARD = stored("reward.json")


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("reward") / "model", REWARD["score"])


def halves_of(dataset):
    """Returns the inputs of all pairs as (chosen, rejected), in any order."""
    rows = np.arange(dataset.num_train_samples)
    batch = dataset.read("train", rows)
    pairs = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        found = [
            tuple(tokens[segments == segment].tolist())
            for segment in range(1, segments.max() + 1)
        ]
        pairs += zip(found[0::2], found[1::2], strict=True)
    return pairs


@pytest.mark.parametrize("name", ["messages", "text"])
def test_the_inputs_are_all_tokens_of_trl(name, model, tmp_path):
    config = config_of(values_of(model, tmp_path))
    config.data.path = rows_file(tmp_path, name)
    wanted = zip(
        *(map(tuple, REWARD[name][half]["ids"]) for half in ("chosen", "rejected")),
        strict=True,
    )
    assert sorted(halves_of(opened(config))) == sorted(wanted)


def test_losses_of_twenty_steps_are_those_of_trl(model, tmp_path):
    rows = train(values_of(model, tmp_path), tmp_path / "run")
    losses = [row["loss"] for row in rows]
    np.testing.assert_allclose(losses, REWARD["losses"], rtol=1e-5, atol=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(REWARD["gradient_norm"], rel=1e-5)
    for step in (0, 19):
        row = rows[step]
        wanted = REWARD["metrics"][str(step)]
        assert row["rewards/accuracies"] == pytest.approx(wanted["accuracy"])
        assert row["rewards/margins"] == pytest.approx(wanted["margin"], rel=1e-4)
        mean = (row["rewards/chosen"] + row["rewards/rejected"]) / 2
        assert mean == pytest.approx(wanted["mean_reward"], rel=1e-4)
        assert not [name for name in row if name.startswith("logps/")]


@pytest.mark.slow
def test_centered_rewards_are_those_of_trl(model, tmp_path):
    wanted = REWARD["centered"]
    weight = wanted["center_rewards_coefficient"]
    assert abs(wanted["losses"][0] - REWARD["losses"][0]) > 0.1
    values = values_of(model, tmp_path, **{"objective.center_weight": weight})
    rows = train(values, tmp_path / "run")
    losses = [row["loss"] for row in rows]
    np.testing.assert_allclose(losses, wanted["losses"], rtol=1e-5, atol=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-5)


@pytest.mark.slow
def test_the_scores_of_a_run_are_those_of_trl(model, tmp_path):
    values = values_of(model, tmp_path, **{"optimizer.learning_rate": 1e-30})
    train(values | {"train.steps": 1}, tmp_path / "run")
    run = load_run(tmp_path / "run", devices=jax.devices()[:1], log=lambda _: None)
    for half in ("chosen", "rejected"):
        found = REWARD["messages"][half]
        for ids, at, score in zip(
            found["ids"], found["read_at"], found["scores"], strict=True
        ):
            assert at == len(ids) - 1
            with jax.default_matmul_precision("highest"):
                scores = run.logits([ids])
            assert scores.shape == (1, len(ids), 1)
            assert float(scores[0, -1, 0]) == pytest.approx(score, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_language_model_gets_a_random_score_of_the_seed(tmp_path):
    def first(seed):
        values = values_of(CAUSAL, tmp_path)
        values |= {"model.head": "score", "train.steps": 1, "seed": seed}
        return train(values, tmp_path / f"run {seed}{len([*tmp_path.iterdir()])}")[0]

    one, again, other = first(0), first(0), first(1)
    assert one["loss"] == again["loss"]
    assert one["loss"] != other["loss"]
    assert one["loss"] == pytest.approx(np.log(2), abs=0.2)
