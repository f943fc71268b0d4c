"""Objectives of pairs: losses by hand, layouts, references.

tests/interop/test_trl_preferences.py compares them with TRL.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.models import lora
from jaxdist.models.transformer import Transformer
from jaxdist.objectives.pairs import (
    PAIRS_PER_ROW,
    DirectPreference,
    OddsRatio,
    SimplePreference,
    halves,
    most_pairs,
)
from jaxdist.protocols.model_spec import describe
from support.models import worst
from support.objectives import MODEL, B, S, batch_of_pairs, case, run, spec_for

ROBUST = {"loss": "robust", "label_smoothing": 0.2}
# options of DPO, and the loss of a pair whose margin is 0
AT_ZERO = [
    ({"loss": "sigmoid"}, math.log(2)),
    (ROBUST, math.log(2)),
    ({"loss": "hinge"}, 1.0),
    ({"loss": "ipo", "beta": 0.5}, 1.0),
    ({"loss": "sigmoid_norm"}, math.log(2)),
    ({"loss": "apo_zero"}, 1.0),
]


def two_pairs_in_a_row():
    """Returns a batch whose rows have two pairs, the last one pair and a half."""
    batch = batch_of_pairs()
    place = np.arange(S)
    segments = np.tile(np.searchsorted([3, 7, 11], place, "right") + 1, (B, 1))
    segments[:, -1] = 0
    weights = (segments > 0).astype(np.float32)
    weights[:, [0, 3, 7, 11]] = 0  # prompts
    weights[-1, 11:] = 0
    starts = np.array([0, 3, 7, 11])[np.clip(segments - 1, 0, 3)]
    batch["segment_ids"] = segments.astype(np.int32)
    batch["weights"] = weights
    batch["positions"] = ((place - starts) * (segments > 0)).astype(np.int32)
    return batch


def by_hand(objective, log_p, reference, batch):
    """Computes the loss with loops over pairs, in numpy."""
    losses = []
    nats = []
    for row in range(B):
        for pair in range(2):
            sums = []
            for half in (0, 1):
                mask = batch["segment_ids"][row] == 2 * pair + 1 + half
                weights = batch["weights"][row] * mask
                gain = ((log_p - reference)[row] * weights).sum()
                sums.append((gain, (log_p[row] * weights).sum(), weights.sum()))
                if half == 0:
                    nats += [*-log_p[row][weights > 0]]
            (c, log_c, n_c), (r, log_r, n_r) = sums
            if n_c == 0 or n_r == 0:
                continue
            losses.append(one_loss(objective, c, r, log_c / n_c, log_r / n_r, n_c, n_r))
    loss = np.mean(losses)
    if getattr(objective, "sft_weight", 0):
        loss += objective.sft_weight * np.mean(nats)
    if isinstance(objective, OddsRatio):
        loss += -log_p[batch["segment_ids"] % 2 == 1].mean()
    return loss


def kl_by_hand(log_p, reference, batch):
    """Computes the mean log-ratio of the answers' tokens with a loop over tokens."""
    ratios = []
    for row, place in np.argwhere(batch["weights"] > 0):
        pair = (batch["segment_ids"][row, place] + 1) // 2
        other_half = {2 * pair - 1, 2 * pair} - {batch["segment_ids"][row, place]}
        in_other = batch["segment_ids"][row] == other_half.pop()
        if (batch["weights"][row] * in_other).any():
            ratios.append(log_p[row, place] - reference[row, place])
    assert len(ratios) < (batch["weights"] > 0).sum()  # a half without the other
    return np.mean(ratios)


def one_loss(objective, c, r, mean_c, mean_r, n_c, n_r):
    softplus = lambda x: np.logaddexp(0, x)  # noqa: E731
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    beta = objective.beta
    if isinstance(objective, OddsRatio):
        odds = [x - np.log(1 - np.exp(x)) for x in (mean_c, mean_r)]
        return beta * softplus(odds[1] - odds[0])
    if isinstance(objective, SimplePreference):
        return softplus(objective.margin - beta * (mean_c - mean_r))
    z = beta * (c - r)
    a = c / n_c - r / n_r
    e = objective.label_smoothing
    return {
        "sigmoid": softplus(-z),
        "robust": ((1 - e) * softplus(-z) - e * softplus(z)) / (1 - 2 * e),
        "hinge": max(0, 1 - z),
        "ipo": (a - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": softplus(-beta * a),
        "apo_zero": 1 - sigmoid(beta * c) + sigmoid(beta * r),
    }[objective.loss]


def log_p_of(model, batch):
    log_p = jax.nn.log_softmax(model.forward(batch))
    return np.asarray(
        jnp.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0], np.float64
    )


@lru_cache
def model_and_log_p():
    """Returns the values of a model, and its log-probabilities of the pairs."""
    spec = describe(lambda rngs: Transformer(MODEL, rngs=rngs))
    random = np.random.default_rng(3)
    values = {
        path: 0.2 * random.standard_normal(x.shape, np.float32)
        for path, (x, _) in spec.named_parameters().items()
    }
    model = Transformer(MODEL, rngs=nnx.Rngs(0))
    for path, value in values.items():
        target = model
        for name in path.split("/"):
            target = getattr(target, name)
        target.set_value(jnp.asarray(value))
    with jax.default_matmul_precision("float32"):
        return values, log_p_of(model, two_pairs_in_a_row())


@pytest.mark.parametrize(
    "objective",
    [
        *(DirectPreference(**{"beta": 0.3, **options}) for options, _ in AT_ZERO),
        DirectPreference(beta=0.3, sft_weight=0.5),
        OddsRatio(beta=0.3),
        SimplePreference(beta=2.0, margin=0.4),
    ],
    ids=str,
)
def test_losses_are_those_of_a_loop_over_pairs(objective):
    values, log_p = model_and_log_p()
    batch = two_pairs_in_a_row()
    reference = np.random.default_rng(0).normal(-3, 1, (B, S)).astype(np.float32)
    batch["reference"] = reference * batch["weights"]
    found = run(spec_for(objective), case(), batch, given=dict(values), evaluates=True)
    wanted = by_hand(objective, log_p, reference, batch)
    assert found.metrics["loss"] + found.metrics.get("aux/sft", 0) == pytest.approx(
        wanted, rel=2e-5
    )
    total, count, others = found.evaluated
    assert count == 2 * B - 1
    assert ("kl" in others) == isinstance(objective, DirectPreference)
    if "kl" in others:
        kl = kl_by_hand(log_p, reference, batch)
        assert abs(kl) > 0.01
        assert found.metrics["kl"] == pytest.approx(kl, rel=2e-5)
        evaluated, tokens = others["kl"]
        assert evaluated / tokens == pytest.approx(kl, rel=2e-5)
    if "aux/sft" in others:
        nats, tokens = others["aux/sft"]
        assert nats / tokens == pytest.approx(found.metrics["aux/sft"], rel=1e-5)
    assert total / count == pytest.approx(found.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("reference", ["module", "base"])
@pytest.mark.parametrize(("options", "wanted"), AT_ZERO, ids=str)
def test_the_first_loss_is_that_of_a_margin_of_zero(options, wanted, reference):
    objective = DirectPreference(**options, reference=reference)
    model = describe(
        lora.adapted(
            lambda rngs: Transformer(MODEL, rngs=rngs),
            lora.LoraConfig(rank=2 if reference == "base" else 0, targets=("query",)),
        )
    )
    modules = {"reference": model} if reference == "module" else {}
    found = run(
        model.trained_for(objective, modules),
        case(),
        two_pairs_in_a_row(),
        evaluates=False,
    )
    assert found.metrics["loss"] == pytest.approx(wanted, abs=1e-6)
    # two programs compute the log-probabilities, so only rounding differs
    assert found.metrics["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert found.metrics["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["module", "base"])
@pytest.mark.parametrize(("options", "wanted"), AT_ZERO, ids=str)
def test_the_first_loss_in_bfloat16(options, wanted, reference):
    """The band is that of a step in bfloat16: two programs round apart."""
    model = describe(
        lora.adapted(
            lambda rngs: Transformer(MODEL, rngs=rngs),
            lora.LoraConfig(rank=2 if reference == "base" else 0, targets=("query",)),
        )
    )
    objective = DirectPreference(**options, reference=reference)
    found = run(
        model.trained_for(
            objective, {"reference": model} if reference == "module" else {}
        ),
        case(compute="bfloat16"),
        two_pairs_in_a_row(),
        evaluates=False,
    )
    assert found.metrics["loss"] == pytest.approx(wanted, rel=1e-2)


@dataclass(frozen=True)
class Linear(DirectPreference):
    """The first-order term of the sigmoid loss at a margin of 0."""

    def pair_losses(self, pairs):
        return -0.5 * self.beta * (pairs.gain.chosen - pairs.gain.rejected)


def test_the_first_gradient_is_its_closed_form():
    """-log sigmoid(z) has the slope -1/2 at 0."""
    found, wanted = (
        run(
            spec_for(objective(beta=0.3, reference="module"), MODEL, MODEL),
            case(),
            two_pairs_in_a_row(),
            evaluates=False,
        )
        for objective in (DirectPreference, Linear)
    )
    assert float(wanted.metrics["grad_norm"]) > 1e-3
    assert worst(found.gradients, wanted.gradients) < 1e-5


LAYOUTS = {
    "accumulation": case({"data": 2, "fsdp": 2}, accumulation=2),
    "once": case({"data": 2, "tensor": 2}, accumulation=2, reduce="once"),
    "pipeline": case({"pipeline": 2, "fsdp": 2}, accumulation=2),
    "context": case({"context": 4, "fsdp": 2}, attention="ring"),
}


@lru_cache
def on_one_device():
    return run(spec_for(_with_all()), case(), two_pairs_in_a_row())


def _with_all():
    return DirectPreference(reference="module", sft_weight=0.5)


@pytest.mark.parametrize(
    "name",
    [
        # a pipeline by default: tests/protocols/test_objective.py, once: test_reward.py
        name if name == "context" else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_every_layout_has_the_loss_of_one_device(name):
    found = run(spec_for(_with_all()), LAYOUTS[name], two_pairs_in_a_row())
    wanted = on_one_device()
    names = [
        n for n in wanted.metrics if n.startswith(("rewards/", "logps/", "aux/", "kl"))
    ]
    assert len(names) == 8
    assert abs(wanted.metrics["kl"]) > 1e-3
    for metric in ("loss", "grad_norm", *names):
        assert found.metrics[metric] == pytest.approx(
            float(wanted.metrics[metric]), rel=2e-5, abs=1e-6
        )
    assert worst(found.gradients, wanted.gradients) < 1e-4
    np.testing.assert_allclose(found.evaluated[:2], wanted.evaluated[:2], rtol=1e-5)


def test_swapped_halves_have_the_opposite_margin():
    batch = two_pairs_in_a_row()
    swapped = dict(batch)
    ids = batch["segment_ids"]
    swapped["segment_ids"] = np.where(ids > 0, ids + np.where(ids % 2, 1, -1), 0)
    objective = DirectPreference(reference="module")
    found, mirrored = (
        run(spec_for(objective), case(), some, evaluates=False)
        for some in (batch, swapped)
    )
    margin = float(found.metrics["rewards/margins"])
    assert abs(margin) > 1e-3
    assert mirrored.metrics["rewards/margins"] == pytest.approx(-margin, rel=1e-4)


def test_a_row_has_at_most_so_many_pairs():
    assert most_pairs(4096) == PAIRS_PER_ROW
    assert most_pairs(32) == 16
    ids = jnp.arange(8) // 2 + 1
    sums = halves(jnp.ones(8), ids)
    assert sums.chosen.tolist() == [2, 2, 0, 0]
    assert sums.rejected.tolist() == [2, 2, 0, 0]


@dataclass(frozen=True)
class Misnamed(DirectPreference):
    """Reports a metric under a name that a step has."""

    def sample_loss(self, terms, sample):
        loss = super().sample_loss(terms, sample)
        return loss._replace(metrics={"grad_norm": loss.sum})


def test_a_metric_of_a_step_is_not_replaced():
    with pytest.raises(ConfigError, match="metrics called grad_norm, which a step has"):
        run(spec_for(Misnamed(reference="module")), case(), two_pairs_in_a_row())
