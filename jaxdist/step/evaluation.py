"""The exact loss over a held-out set: sums and counts are added up, and
divided once.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

# Batches that devices may lag behind the host: enough to keep them busy, few enough to
# fit.
_IN_FLIGHT = 4

Tree = Any
# Loss sum, its count, and name -> (sum, count) of what else is evaluated.
LossSums = tuple[jax.Array, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]
Evaluate = Callable[[Any, Mapping[str, jax.Array]], LossSums]


class Evaluation(NamedTuple):
    """The loss over a whole set."""

    loss: float  # nats per weighted target
    # the targets' weights added up: their number, where each weighs 1
    tokens: int | float
    # means by name: the model's own, and "aux/NAME" of its loss
    metrics: dict[str, float] = {}

    @property
    def row(self) -> dict[str, float]:
        """The fields of an evaluation row of metrics.jsonl."""
        others = {f"eval_{name}": value for name, value in self.metrics.items()}
        return {"eval_loss": self.loss, "eval_tokens": self.tokens, **others}

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Returns the loss as bits per byte of text, which compares across
        tokenizers.
        """
        return self.loss / (math.log(2) * bytes_per_token)


def evaluate(
    evaluate_fn: Evaluate, state: Any, batches: Iterable[Mapping]
) -> Evaluation:
    """Returns the loss over all batches.

    The batches' float32 sums are added in float64 on the host, so their number and
    their sizes don't matter, and a last batch may be filled with rows of weight 0.
    Devices run ahead: a batch's result is read a few batches later.

    Args:
      evaluate_fn: `TrainStep.evaluate`, deterministic.
      batches: device batches; every token once.

    Raises:
      ValueError: no target has a weight.
    """
    sums = list(read_behind(evaluate_fn(state, batch) for batch in batches))
    total, count = (math.fsum(x[i] for x in sums) for i in (0, 1))
    if count == 0:
        raise ValueError(
            "the evaluation set has no target with a weight; give it at least one"
        )
    metrics = {name: _mean(others[name] for *_, others in sums) for name in sums[0][2]}
    return Evaluation(
        total / count, int(count) if count == int(count) else count, metrics
    )


def _mean(sums: Iterable[tuple[float, float]]) -> float:
    """Returns the mean of (sum, count) pairs; NaN where nothing is counted."""
    total, count = map(math.fsum, zip(*sums, strict=True))
    return total / count if count else math.nan


def read_behind(results: Iterable[Tree]) -> Iterator[Tree]:
    """Yields results (trees of arrays) on the host, each once the devices have a few
    more to work on.
    """
    waiting: deque[Tree] = deque()
    for result in results:
        waiting.append(result)
        if len(waiting) > _IN_FLIGHT:
            yield jax.device_get(waiting.popleft())
    yield from map(jax.device_get, waiting)
