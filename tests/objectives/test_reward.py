"""Reward models: the loss by hand, layouts, adapters, other heads, contradictions.

tests/interop/test_trl_reward.py compares them with TRL.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.models import lora
from jaxdist.models.transformer import Transformer
from jaxdist.objectives.config import ObjectiveConfig, objective_faults
from jaxdist.objectives.reward import BradleyTerry, last_inputs
from jaxdist.ops.costs import model_flops
from jaxdist.optim.roles import role_of
from jaxdist.protocols.model_spec import describe
from support.models import worst
from support.objectives import MODEL, B, S, batch_of_pairs, case, run, spec_for

SCORES = replace(MODEL, head="score")
TIED = replace(SCORES, tie_embeddings=True)


def two_pairs_in_a_row():
    """Returns a batch whose rows have two pairs, the last one pair and a half."""
    batch = batch_of_pairs()
    place = np.arange(S)
    segments = np.tile(np.searchsorted([3, 7, 11], place, "right") + 1, (B, 1))
    segments[:, -1] = 0
    weights = (segments > 0).astype(np.float32)
    weights[-1, 11:] = 0
    starts = np.array([0, 3, 7, 11])[np.clip(segments - 1, 0, 3)]
    batch["segment_ids"] = segments.astype(np.int32)
    batch["weights"] = weights
    batch["positions"] = ((place - starts) * (segments > 0)).astype(np.int32)
    return batch


@lru_cache
def values_and_scores(config=SCORES):
    """Returns the values of a model, and its scores of all inputs, [B, S]."""
    spec = describe(lambda rngs: Transformer(config, rngs=rngs))
    random = np.random.default_rng(3)
    values = {
        path: 0.2 * random.standard_normal(x.shape, np.float32)
        for path, (x, _) in spec.named_parameters().items()
    }
    model = Transformer(config, rngs=nnx.Rngs(0))
    for path, value in values.items():
        target = model
        for name in path.split("/"):
            target = getattr(target, name)
        target.set_value(jnp.asarray(value))
    with jax.default_matmul_precision("float32"):
        scores = model.forward(two_pairs_in_a_row())
    assert scores.shape == (B, S, 1)
    assert scores.dtype == jnp.float32
    return values, np.asarray(scores[..., 0], np.float64)


@pytest.mark.parametrize("config", [SCORES, TIED], ids=["untied", "tied"])
def test_the_loss_is_that_of_the_scores_at_the_last_inputs(config):
    values, scores = values_and_scores(config)
    assert "output" not in values
    assert values["score"].shape == (config.d_model, 1)
    found = run(
        spec_for(BradleyTerry(), config),
        case(),
        two_pairs_in_a_row(),
        given=dict(values),
    )
    chosen, rejected = scores[:, [2, 10]], scores[:, [6, 14]]
    exist = np.ones((B, 2), bool)
    exist[-1, 1] = False
    margins = (chosen - rejected)[exist]
    wanted = {
        "loss": np.logaddexp(0, -margins).mean(),
        "rewards/chosen": chosen[exist].mean(),
        "rewards/rejected": rejected[exist].mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).mean(),
    }
    for name, value in wanted.items():
        assert found.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert not [name for name in found.metrics if name.startswith("logps")]
    total, count, _ = found.evaluated
    assert count == 2 * B - 1
    assert total / count == pytest.approx(wanted["loss"], rel=1e-5)


def test_the_last_input_is_found_wherever_it_stands():
    positions = jnp.array([0, 1, 2, 0, 0, 1, 0, 0])
    segments = jnp.array([1, 1, 1, 2, 3, 3, 0, 0])
    wanted = [2, 3, 5]
    assert np.flatnonzero(last_inputs(positions, segments)).tolist() == wanted
    order = np.array([7, 2, 5, 0, 3, 1, 6, 4])
    found = np.flatnonzero(last_inputs(positions[order], segments[order]))
    assert sorted(order[found].tolist()) == wanted


LAYOUTS = {
    "accumulation": case({"data": 2, "fsdp": 2}, accumulation=2),
    "once": case({"data": 2, "tensor": 2}, accumulation=2, reduce="once"),
    "pipeline": case({"pipeline": 2, "fsdp": 2}, accumulation=2),
    "pipeline, edges last": case({"pipeline": 2, "fsdp": 2}, edges="last"),
    "context": case({"context": 4, "fsdp": 2}, attention="ring"),
}


@lru_cache
def on_one_device():
    return run(spec_for(BradleyTerry(0.3), TIED), case(), two_pairs_in_a_row())


@pytest.mark.parametrize(
    "name",
    [
        # by default: context in test_pairs.py, pipelines in tests/protocols
        name if name == "once" else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_every_layout_has_the_loss_of_one_device(name):
    found = run(spec_for(BradleyTerry(0.3), TIED), LAYOUTS[name], two_pairs_in_a_row())
    wanted = on_one_device()
    names = [n for n in wanted.metrics if n.startswith("rewards/")]
    assert len(names) == 4
    for metric in ("loss", "grad_norm", *names):
        assert found.metrics[metric] == pytest.approx(
            float(wanted.metrics[metric]), rel=2e-5, abs=1e-6
        )
    assert np.abs(wanted.gradients["score"]).max() > 0
    assert worst(found.gradients, wanted.gradients) < 1e-4
    np.testing.assert_allclose(found.evaluated[:2], wanted.evaluated[:2], rtol=1e-5)


@pytest.mark.slow
def test_experts_count_all_tokens_of_the_answers():
    config = replace(SCORES, num_experts=4, experts_per_token=2, balance="batch")
    batch = two_pairs_in_a_row()
    found = run(spec_for(BradleyTerry(), config), case(), batch)
    assert found.metrics["tokens"] == (batch["weights"] > 0).sum()
    assert [name for name in found.metrics if name.startswith("aux/")]
    assert np.isfinite(found.metrics["grad_norm"])


# --- adapters -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_score_is_trained_in_full_beside_adapters():
    build = lora.adapted(
        lambda rngs: Transformer(TIED, rngs=rngs), lora.LoraConfig(rank=2)
    )
    spec = describe(build)
    factors = {path for path in spec.named_trainable() if lora.is_factor(path)}
    assert spec.named_trainable().keys() - factors == {"score"}
    assert "blocks/attention/query/lora_a" in factors
    spec = spec.trained_for(BradleyTerry(), {})
    batch = two_pairs_in_a_row()
    wanted = run(spec, case(), batch, evaluates=False)
    assert np.abs(wanted.gradients["score"]).max() > 0
    found = run(spec, LAYOUTS["pipeline"], batch, evaluates=False)
    assert found.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=2e-5)
    assert worst(found.gradients, wanted.gradients) < 1e-4


def test_the_score_is_no_target_of_adapters():
    config = lora.LoraConfig(rank=2, targets=("score",))
    build = lora.adapted(lambda rngs: Transformer(TIED, rngs=rngs), config)
    with pytest.raises(ConfigError, match="score: it is trained in full beside the"):
        describe(build)


# --- the head -------------------------------------------------------------------------


def test_the_kernel_of_the_score_is_a_head_for_optimizers():
    spec = describe(lambda rngs: Transformer(SCORES, rngs=rngs))
    x, names = spec.named_parameters()["score"]
    assert role_of(["score"], x.shape, names).kind == "head"


def test_a_score_costs_less_than_a_head_of_the_vocabulary():
    flops = [model_flops(c.costs(S), "causal") for c in (MODEL, SCORES)]
    assert flops[0] - flops[1] == 6 * MODEL.d_model * (MODEL.vocab_size - 1)


def test_a_reward_model_has_no_next_token_loss():
    model = Transformer(SCORES, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="set objective.name=reward"):
        model.loss(two_pairs_in_a_row(), None)


def test_a_policy_without_scores_is_refused():
    with pytest.raises(ConfigError, match="log_probability.* Set model.head=score"):
        run(spec_for(BradleyTerry()), case(), two_pairs_in_a_row())


@pytest.mark.parametrize(
    ("name", "data", "head", "message"),
    [
        ("reward", "text", "score", "set data.format=preferences"),
        ("reward", "chat", "score", "set data.format=preferences"),
        ("reward", "preferences", "language", "set model.head=score"),
        ("dpo", "preferences", "score", "set objective.name=reward"),
        ("next_token", "text", "score", "set objective.name=reward"),
        ("reward", "preferences", "score", None),
        ("reward", "preferences", None, None),  # a model of the user
    ],
)
def test_objective_data_and_head_must_fit_together(name, data, head, message):
    faults = list(
        objective_faults(
            ObjectiveConfig(name=name), data_format=data, has_adapters=False, head=head
        )
    )
    if message is None:
        assert not faults
    else:
        (fault,) = faults
        assert fault.endswith((message, f"{message}, or model.head=language"))
