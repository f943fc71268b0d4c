"""Objectives of pairs of answers to one prompt: the chosen one, and the rejected one.

A row of a batch has pairs, whose halves are documents: the chosen half of pair i has the
segment id 2 i - 1, and the rejected half 2 i. The halves' weights are 1 for the tokens of
the answers. So a pair is a part of one sample on every layout.

Letters: S sequence length, P pairs of a row.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.protocols.model import Batch, Loss
from jaxdist.protocols.objective import FrozenModule, Terms, TokenObjective
from jaxdist.protocols.pair_segments import PAIRS_PER_ROW

# field [B, S] of a batch: the reference's log-probabilities of the targets times their
# weights; or for each half their sum at one of its tokens
REFERENCE = "reference"

LossName = Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero"]
# field: the batch has the reference's log-probabilities. base: they are those of the
# policy without its adapters. module: those of the frozen module `reference`.
ReferenceForm = Literal["field", "base", "module"]


class Halves(NamedTuple):
    """Sums over the answers of a row's pairs, each [P]."""

    chosen: jax.Array
    rejected: jax.Array


class Pairs(NamedTuple):
    """The pairs of a row."""

    log_p: Halves  # the policy's log-probability of each answer
    gain: Halves  # the same, less that of the reference
    tokens: Halves  # the weights' sum: number of tokens
    exist: jax.Array  # bool [P]: whether both answers have a token


def have_tokens(tokens: Halves) -> jax.Array:
    """Checks whether both answers of each pair have a token, bool [P]."""
    return (tokens.chosen > 0) & (tokens.rejected > 0)


def most_pairs(length: int) -> int:
    """Computes the largest number of pairs that a row of `length` targets has."""
    return max(1, min(PAIRS_PER_ROW, length // 2))


def halves(values: jax.Array, segment_ids: jax.Array) -> Halves:
    """Sums values [S] over the halves of a row's pairs."""
    numbers = jnp.arange(1, 2 * most_pairs(len(values)) + 1)
    belongs = segment_ids[:, None] == numbers[None, :]
    sums = jnp.where(belongs, values[:, None], 0).sum(0)
    return Halves(sums[0::2], sums[1::2])


def pairs_of(terms: Terms, sample: Batch) -> Pairs:
    """Sums the log-probabilities of a row over the answers of its pairs.

    Args:
      terms: `log_probability` [S] of the targets.
      sample: the row, perhaps with the field REFERENCE.
    """
    segment_ids = sample["segment_ids"]
    weights = sample["weights"]
    log_p = halves(terms["log_probability"] * weights, segment_ids)
    tokens = halves(weights, segment_ids)
    gain = log_p
    if REFERENCE in sample:
        reference = halves(sample[REFERENCE], segment_ids)
        gain = Halves(*(x - y for x, y in zip(log_p, reference, strict=True)))
    return Pairs(log_p, gain, tokens, have_tokens(tokens))


def per_token(sums: Halves, tokens: Halves) -> Halves:
    """Divides sums over answers by their numbers of tokens."""
    return Halves(
        *(x / jnp.maximum(count, 1) for x, count in zip(sums, tokens, strict=True))
    )


class PairObjective(TokenObjective):
    """The base of objectives of pairs: the mean over all pairs of a batch."""

    # rows are added up by `TokenObjective`, and no pair is in two rows
    sums_over_samples: ClassVar[bool] = True

    @abstractmethod
    def pair_losses(self, pairs: Pairs) -> jax.Array:
        """Computes the loss of each pair of a row, [P]; any value if it has none."""

    @abstractmethod
    def rewards(self, pairs: Pairs) -> Halves:
        """Computes the rewards of both answers that metrics report, [P] each."""

    def log_probabilities(self, pairs: Pairs) -> Halves:
        """Computes the log-probabilities of both answers that metrics report, [P]."""
        return pairs.log_p

    def sample_loss(self, terms: Terms, sample: Batch) -> Loss:
        """Sums the losses of a row's pairs, and what metrics report of them."""
        pairs = self.row_pairs(terms, sample)

        def total(values: jax.Array) -> jax.Array:
            return jnp.where(pairs.exist, values, 0).sum()

        rewards = self.rewards(pairs)
        margins = rewards.chosen - rewards.rejected
        metrics = {
            "rewards/chosen": total(rewards.chosen),
            "rewards/rejected": total(rewards.rejected),
            "rewards/margins": total(margins),
            "rewards/accuracies": total((margins > 0).astype(jnp.float32)),
        }
        for name, values in self.further_metrics(pairs).items():
            metrics[name] = total(values)
        return Loss(
            total(self.pair_losses(pairs)),
            pairs.exist.sum().astype(jnp.float32),
            aux=self.aux_terms(terms, sample),
            metrics=metrics,
        )

    def row_pairs(self, terms: Terms, sample: Batch) -> Pairs:
        """Sums what the policy gives a row's pairs."""
        return pairs_of(terms, sample)

    def further_metrics(self, pairs: Pairs) -> dict[str, jax.Array]:
        """Computes metrics of each pair beside the rewards, [P] each."""
        log_p = self.log_probabilities(pairs)
        return {"logps/chosen": log_p.chosen, "logps/rejected": log_p.rejected}

    def aux_terms(self, terms: Terms, sample: Batch) -> dict[str, jax.Array]:
        """Computes further terms of a row, sums over the targets of `aux_targets`."""
        return {}


@dataclass(frozen=True)
class DirectPreference(PairObjective):
    """Direct preference optimization (DPO, arXiv:2305.18290) against a reference.

    With c and r the gains of the chosen and the rejected answer, which are their
    log-probabilities less those of the reference, the loss of a pair is, by name:

        sigmoid       -log sigmoid(beta (c - r))
        robust        the same for labels of which a share is wrong (arXiv:2403.00409)
        hinge         max(0, 1 - beta (c - r))  (arXiv:2305.10425)
        ipo           (a - 1 / (2 beta))^2, a the difference of the gains per token
                      (arXiv:2310.12036)
        sigmoid_norm  -log sigmoid(beta a)
        apo_zero      1 - sigmoid(beta c) + sigmoid(beta r)  (arXiv:2408.06266)

    Attributes:
      loss: its name.
      beta: strength of the pull towards the reference.
      label_smoothing: share of wrong labels that `robust` assumes, below 0.5.
      sft_weight: factor of the mean cross-entropy of the chosen answers' tokens, a term
        of its own (RPO, arXiv:2404.19733).
      reference: where the reference's log-probabilities come from.
    """

    loss: LossName = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    reference: ReferenceForm = "field"

    @property
    def modules(self) -> tuple[str, ...]:
        """The frozen reference, if it is a module."""
        return (REFERENCE,) if self.reference == "module" else ()

    @property
    def base_module(self) -> str:
        """The policy without its adapters, if it is the reference."""
        return REFERENCE if self.reference == "base" else ""

    @property
    def prepares(self) -> bool:
        """Whether a module computes the reference's log-probabilities in the step."""
        return self.reference != "field"

    @property
    def data_fields(self) -> tuple[str, ...]:
        """The field of the reference, if the data has it."""
        return (REFERENCE,) if self.reference == "field" else ()

    def prepare(self, modules: Mapping[str, FrozenModule], batch: Batch) -> Terms:
        """Computes the reference's log-probabilities times the weights."""
        log_p = modules[REFERENCE](batch)["log_probability"]
        return {REFERENCE: log_p * batch["weights"]}

    def pair_losses(self, pairs: Pairs) -> jax.Array:
        """Computes the loss of each pair."""
        return _LOSSES[self.loss](self, pairs)

    def rewards(self, pairs: Pairs) -> Halves:
        """Computes the implicit rewards: the gains times beta."""
        return Halves(*(self.beta * gain for gain in pairs.gain))

    def further_metrics(self, pairs: Pairs) -> dict[str, jax.Array]:
        """Adds `kl`: the mean gain of a token, over all answers of a batch.

        It is the estimator k1 of KL(policy || reference). The tokens are those of the
        data, not samples of the policy, so it may be negative. Estimators that cannot,
        such as k3, need the reference's log-probability of each token, and the
        reference may be known for whole answers only.
        """
        kl = pairs.gain.chosen + pairs.gain.rejected
        return {**super().further_metrics(pairs), "kl": kl}

    def metric_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the tokens of both answers of all pairs, which `kl` is divided by."""
        tokens = jax.vmap(halves)(batch["weights"], batch["segment_ids"])
        both = tokens.chosen + tokens.rejected
        return {"kl": jnp.where(have_tokens(tokens), both, 0).sum()}

    def aux_terms(self, terms: Terms, sample: Batch) -> dict[str, jax.Array]:
        """Computes the cross-entropy of the chosen answers, if it has a factor."""
        if not self.sft_weight:
            return {}
        weights = _chosen_weights(sample)
        nats = -(terms["log_probability"] * weights).sum()
        return {"sft": self.sft_weight * nats}

    def aux_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the tokens of the chosen answers, which the term `sft` is divided by."""
        if not self.sft_weight:
            return {}
        return {"sft": _chosen_weights(batch).sum()}


def _chosen_weights(batch: Batch) -> jax.Array:
    """Sets the weights of all targets to 0 that are in no chosen answer."""
    in_chosen = batch["segment_ids"] % 2 == 1
    return jnp.where(in_chosen, batch["weights"], 0)


def _margin(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    return objective.beta * (pairs.gain.chosen - pairs.gain.rejected)


def _margin_per_token(pairs: Pairs) -> jax.Array:
    gain = per_token(pairs.gain, pairs.tokens)
    return gain.chosen - gain.rejected


def _sigmoid(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    return jax.nn.softplus(-_margin(objective, pairs))


def _robust(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    margin = _margin(objective, pairs)
    share = objective.label_smoothing
    right = (1 - share) * jax.nn.softplus(-margin)
    wrong = share * jax.nn.softplus(margin)
    return (right - wrong) / (1 - 2 * share)


def _hinge(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    return jax.nn.relu(1 - _margin(objective, pairs))


def _ipo(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    return jnp.square(_margin_per_token(pairs) - 1 / (2 * objective.beta))


def _sigmoid_norm(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    return jax.nn.softplus(-objective.beta * _margin_per_token(pairs))


def _apo_zero(objective: DirectPreference, pairs: Pairs) -> jax.Array:
    chosen = jax.nn.sigmoid(objective.beta * pairs.gain.chosen)
    rejected = jax.nn.sigmoid(objective.beta * pairs.gain.rejected)
    return 1 - chosen + rejected


_LOSSES: dict[str, Callable[[DirectPreference, Pairs], jax.Array]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "apo_zero": _apo_zero,
}


@dataclass(frozen=True)
class OddsRatio(PairObjective):
    """Odds-ratio preference optimization (ORPO, arXiv:2403.07691), without a reference.

    The loss of a pair is -beta log sigmoid(log odds of the chosen answer less those of
    the rejected one), of the mean log-probabilities of their tokens. The term `sft` is
    the mean cross-entropy of the chosen halves' tokens, those of the prompt included.

    Attributes:
      beta: factor of the odds ratio.
    """

    beta: float = 0.1

    def pair_losses(self, pairs: Pairs) -> jax.Array:
        """Computes the odds-ratio term of each pair."""
        log_odds = [x - _log1m_exp(x) for x in self.log_probabilities(pairs)]
        return self.beta * jax.nn.softplus(log_odds[1] - log_odds[0])

    def rewards(self, pairs: Pairs) -> Halves:
        """Computes the mean log-probabilities times beta."""
        return Halves(*(self.beta * x for x in self.log_probabilities(pairs)))

    def log_probabilities(self, pairs: Pairs) -> Halves:
        """Computes the mean log-probabilities of the answers' tokens."""
        return per_token(pairs.log_p, pairs.tokens)

    def aux_terms(self, terms: Terms, sample: Batch) -> dict[str, jax.Array]:
        """Computes the cross-entropy of the chosen halves."""
        nats = -jnp.where(_in_chosen_half(sample), terms["log_probability"], 0).sum()
        return {"sft": nats}

    def aux_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the tokens of the chosen halves."""
        return {"sft": _in_chosen_half(batch).sum().astype(jnp.float32)}


def _in_chosen_half(batch: Batch) -> jax.Array:
    return batch["segment_ids"] % 2 == 1


def _log1m_exp(x: jax.Array) -> jax.Array:
    """Computes log(1 - exp(x)) for x < 0, with a finite gradient near 0."""
    x = jnp.minimum(x, -1e-6)
    return jnp.log(-jnp.expm1(x))


@dataclass(frozen=True)
class SimplePreference(PairObjective):
    """Simple preference optimization (SimPO, arXiv:2405.14734), without a reference.

    The loss of a pair is -log sigmoid(beta a - margin), with a the difference of the
    mean log-probabilities of the answers' tokens.

    Attributes:
      beta: factor of the difference.
      margin: the least difference of the rewards that counts as right, gamma.
    """

    beta: float = 2.0
    margin: float = 0.5

    def pair_losses(self, pairs: Pairs) -> jax.Array:
        """Computes the loss of each pair."""
        rewards = self.rewards(pairs)
        return jax.nn.softplus(self.margin - (rewards.chosen - rewards.rejected))

    def rewards(self, pairs: Pairs) -> Halves:
        """Computes the mean log-probabilities times beta."""
        return Halves(*(self.beta * x for x in self.log_probabilities(pairs)))

    def log_probabilities(self, pairs: Pairs) -> Halves:
        """Computes the mean log-probabilities of the answers' tokens."""
        return per_token(pairs.log_p, pairs.tokens)
