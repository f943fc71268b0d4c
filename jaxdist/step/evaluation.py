"""The exact loss over a held-out set: all sums divided once by all counts."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax

from jaxdist.protocols.model import Batch
from jaxdist.protocols.model_spec import Tree
from jaxdist.step.state import State

# batches that are queued on the devices: enough to keep them busy, few enough to fit
_IN_FLIGHT = 4

# (sum of losses, its count, {name: (sum, count)} of the other figures)
LossSums = tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]
Evaluate = Callable[[State, Batch], LossSums]


class Evaluation(NamedTuple):
    """The loss over a whole set."""

    loss: float  # nats per weighted target
    tokens: int | float  # sum of the targets' weights
    # means by name: those of the model, and "aux/NAME" of its loss
    metrics: dict[str, float] = {}

    @property
    def row(self) -> dict[str, float]:
        """The fields of an evaluation row of metrics.jsonl."""
        others = {f"eval_{name}": value for name, value in self.metrics.items()}
        return {"eval_loss": self.loss, "eval_tokens": self.tokens, **others}

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinity if that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Converts the loss to bits per byte, which is comparable across tokenizers."""
        return self.loss / (math.log(2) * bytes_per_token)


def evaluate(
    evaluate_fn: Evaluate, state: State, batches: Iterable[Batch]
) -> Evaluation:
    """Computes the loss over all batches.

    The host adds the batches' float32 sums in float64. So the result does not depend on
    their number or sizes, and rows of weight 0 may fill the last batch.

    Args:
      evaluate_fn: the function `TrainStep.evaluate`.
      state: the state to evaluate.
      batches: batches on the devices, which have every token once.

    Raises:
      ValueError: no target has a weight.
    """
    sums = list(read_behind(evaluate_fn(state, batch) for batch in batches))
    total = math.fsum(loss for loss, _, _ in sums)
    count = math.fsum(count for _, count, _ in sums)
    if count == 0:
        raise ValueError(
            "the evaluation set has no target with a weight; give it at least one"
        )
    metrics = {name: _mean(others[name] for *_, others in sums) for name in sums[0][2]}
    tokens = int(count) if count == int(count) else count
    return Evaluation(loss=total / count, tokens=tokens, metrics=metrics)


def _mean(sums: Iterable[tuple[float, float]]) -> float:
    """Computes the mean of (sum, count) pairs; NaN if the counts are 0."""
    total, count = map(math.fsum, zip(*sums, strict=True))
    return total / count if count else math.nan


def read_behind(results: Iterable[Tree]) -> Iterator[Tree]:
    """Copies results to the host and yields them.

    A result is read only after the devices have a few more results to compute.

    Args:
      results: trees of arrays that the devices compute.
    """
    waiting: deque[Tree] = deque()
    for result in results:
        waiting.append(result)
        if len(waiting) > _IN_FLIGHT:
            yield jax.device_get(waiting.popleft())
    yield from map(jax.device_get, waiting)
