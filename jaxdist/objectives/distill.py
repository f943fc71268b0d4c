"""Distillation: the policy learns the distributions of a teacher, a frozen module.

The teacher's distribution at a target is that of its most likely tokens, and of one
bucket for all others. It enters the batch as two float fields.

Letters: B samples, S sequence length, k tokens of a distribution, D model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxdist.protocols.model import Batch, Loss
from jaxdist.protocols.objective import FrozenModule, Terms, TokenObjective

TEACHER = "teacher"  # name of the frozen module
# fields of a batch: the teacher's most likely tokens [B, S, k], and log-probabilities
# of these tokens and of all others [B, S, k + 1]
IDS = "teacher_ids"
BUCKETS = "teacher_buckets"

# Fields are float32, which has all whole numbers up to this one.
LARGEST_VOCABULARY = 2**24


@dataclass(frozen=True)
class Distillation(TokenObjective):
    """Knowledge distillation (arXiv:1503.02531) from a frozen teacher.

    The loss of a target is

        alpha T^2 KL(teacher || student) + (1 - alpha) cross-entropy

    with the temperature T on the logits of both models for the divergence only. The
    loss of a batch is the mean over targets by their weights.

    Attributes:
      alpha: share of the divergence, from 0 to 1.
      temperature: T.
      top_k: number of tokens of a distribution; all other tokens are one bucket. With
        the size of the vocabulary, the divergence is exact. A smaller number gives a
        lower bound of it.
    """

    alpha: float = 0.5
    temperature: float = 1.0
    top_k: int = 64

    # the count of `sample_loss` is the sum of the targets' weights
    counts_targets: ClassVar[bool] = True
    term_methods: ClassVar[tuple[str, ...]] = (
        "token_terms",
        "bucket_scores",
        "top_scores",
    )

    @property
    def modules(self) -> tuple[str, ...]:
        """The frozen teacher."""
        return (TEACHER,)

    def prepare(self, modules: Mapping[str, FrozenModule], batch: Batch) -> Terms:
        """Computes the teacher's distributions."""
        return modules[TEACHER](batch)

    def terms_of_module(self, module: Any, x: jax.Array, batch: Batch) -> Terms:
        """Computes the teacher's distributions from its last block's output [B, S, D].

        Returns:
          IDS [B, S, k] and BUCKETS [B, S, k + 1] in float32.
        """
        ids, buckets = module.top_scores(x, self.top_k, self.temperature)
        return {IDS: ids.astype(jnp.float32), BUCKETS: buckets}

    def terms_of_policy(self, policy: Any, x: jax.Array, batch: Batch) -> Terms:
        """Computes the student's scores from its last block's output [B, S, D].

        Returns:
          `log_probability` [B, S] of the targets, and `buckets` [B, S, k + 1]: the
          log-probabilities of the teacher's tokens and of all others.
        """
        ids = batch[IDS].astype(jnp.int32)
        scores = policy.bucket_scores(x, batch, ids, self.temperature)
        return {
            "log_probability": scores.log_probability_BS,
            "buckets": scores.buckets_BSk,
        }

    def sample_loss(self, terms: Terms, sample: Batch) -> Loss:
        """Sums the losses of a row's targets, and the terms of the loss."""
        weights = sample["weights"]
        kl = (divergence(sample[BUCKETS], terms["buckets"]) * weights).sum()
        nats = -(terms["log_probability"] * weights).sum()
        loss = self.alpha * self.temperature**2 * kl + (1 - self.alpha) * nats
        metrics = {"kl": kl, "cross_entropy": nats}
        return Loss(loss, weights.sum(), metrics=metrics)


def divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Computes the divergence KL(p || q) of distributions.

    Each bucket adds p (log p - log q) + q - p, of which none is negative. The sum of
    q - p is 0, but this form keeps digits if the distributions are nearly equal.

    Args:
      log_p: log-probabilities [..., k].
      log_q: log-probabilities [..., k].
    """
    p = jnp.exp(log_p)
    excess = log_q - log_p
    is_close = jnp.abs(excess) < 1
    near = jnp.where(is_close, excess, 0.0)
    terms = jnp.where(
        is_close,
        p * (jnp.expm1(near) - near),
        jnp.exp(log_q) - p - p * excess,
    )
    return terms.sum(-1)


def distill_faults(
    top_k: int, student_vocabulary: int | None, teacher_vocabulary: int | None
) -> Iterator[str]:
    """Yields contradictions between the vocabularies of a student and its teacher.

    Args:
      top_k: tokens of a distribution.
      student_vocabulary: size of the student's vocabulary; None: the model has none.
      teacher_vocabulary: size of the teacher's vocabulary; None: unknown or none.
    """
    size = student_vocabulary
    if size is None:
        yield (
            "objective.name=distill compares distributions over a vocabulary, and the "
            "model has no vocab_size; set objective.name=next_token"
        )
        return
    if teacher_vocabulary not in (None, size):
        yield (
            f"model.vocab_size={size}, and the teacher's is {teacher_vocabulary}: the "
            f"distributions need one vocabulary; set objective.teacher to a model with "
            f"the run's tokenizer, or model.vocab_size={teacher_vocabulary}"
        )
    if size > LARGEST_VOCABULARY:
        yield (
            f"model.vocab_size={size} exceeds {LARGEST_VOCABULARY}, the most that "
            f"objective.name=distill supports; use a smaller vocabulary"
        )
    if top_k > size:
        yield (
            f"objective.top_k={top_k} exceeds the vocabulary: model.vocab_size={size}; "
            f"lower objective.top_k"
        )
