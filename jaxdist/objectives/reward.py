"""The objective of reward models: a score for each answer, higher for the chosen one.

Letters: S sequence length, P pairs of a row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.objectives.pairs import (
    Halves,
    PairObjective,
    Pairs,
    halves,
    have_tokens,
    most_pairs,
)
from jaxdist.protocols.model import Batch
from jaxdist.protocols.objective import Terms

SCORE = "score"  # term [B, S] of the policy: the score of each input


@dataclass(frozen=True)
class BradleyTerry(PairObjective):
    """Trains a reward model on preferences (Bradley-Terry, arXiv:2203.02155).

    The loss of a pair is

        -log sigmoid(c - r) + center_weight (c + r)^2

    with c and r the scores of the chosen and the rejected half. The score of a half is
    read at its last input. Pairs alone do not determine the mean of the scores. The
    second term draws it to 0 (arXiv:2312.09244).

    Attributes:
      center_weight: factor of the second term.
    """

    center_weight: float = 0.0

    def row_pairs(self, terms: Terms, sample: Batch) -> Pairs:
        """Reads the scores of a row's halves; they stand for log-probabilities.

        Args:
          terms: `score` [S] of the inputs.
          sample: the row.

        Raises:
          ConfigError: the policy has no term `score`.
        """
        if SCORE not in terms:
            raise ConfigError(
                f"BradleyTerry reads the term {SCORE!r} of the policy's token_terms, and "
                f"there are {', '.join(terms)}. Set model.head=score, or return it in "
                f"token_terms."
            )
        segment_ids = sample["segment_ids"]
        is_last = last_inputs(sample["positions"], segment_ids)
        scores = halves(jnp.where(is_last, terms[SCORE], 0), segment_ids)
        tokens = halves(sample["weights"], segment_ids)
        return Pairs(scores, scores, tokens, have_tokens(tokens))

    def pair_losses(self, pairs: Pairs) -> jax.Array:
        """Computes the loss of each pair."""
        chosen, rejected = pairs.gain
        losses = jax.nn.softplus(rejected - chosen)
        if not self.center_weight:
            return losses
        return losses + self.center_weight * jnp.square(chosen + rejected)

    def rewards(self, pairs: Pairs) -> Halves:
        """Passes on the scores."""
        return pairs.gain

    def further_metrics(self, pairs: Pairs) -> dict[str, jax.Array]:
        """Lists no metrics: the policy gives no log-probabilities."""
        return {}


def last_inputs(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Finds the last input of each half of a row, bool [S].

    Args:
      positions: position of each input in its half, [S].
      segment_ids: number of the half from 1, [S]; 0 = padding.
    """
    numbers = jnp.arange(1, 2 * most_pairs(len(positions)) + 1)
    belongs = segment_ids[:, None] == numbers[None, :]
    last = jnp.where(belongs, positions[:, None], -1).max(0)
    return (belongs & (positions[:, None] == last[None, :])).any(1)
