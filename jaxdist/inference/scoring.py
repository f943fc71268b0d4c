"""Log-probabilities of the tokens of texts under a model, computed in fixed shapes.

The model needs `init_cache` and `decode`, as in `jaxdist.inference.decoding`. A text is
read in parts against the cache, so the logits of a whole text are never in memory.

Shapes: B rows, W width, T tokens of a part, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.inference.decoding import bucket, padded, placed
from jaxdist.inference.weights import Weights, laid_out
from jaxdist.parallel import execution
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.evaluation import read_behind

_PART = 128  # tokens per row whose logits are in memory at once


class ScoreWindow(NamedTuple):
    """Consecutive tokens of a text that go through the model at once."""

    tokens: np.ndarray  # [2 .. W + 1] int32
    # number of leading tokens that are read but not scored, at least 1
    known: int


class Score(NamedTuple):
    """The log-probabilities of the scored tokens of a window."""

    log_probabilities: np.ndarray  # [scored] float32, nats
    likeliest: np.ndarray  # [scored] bool: whether no other token was as probable


Scorer = Callable[..., list[Score]]


def windows(
    context: np.ndarray,
    continuation: np.ndarray,
    longest: int,
    stride: int | None = None,
) -> list[ScoreWindow]:
    """Cuts a text into windows that score each token of `continuation` once.

    A window is as long as the text and `longest` allow, so a token is scored after as
    many earlier tokens as fit. Earlier ones are cut off on the left.

    Args:
      context: [at least 1] token ids that are read but not scored.
      continuation: token ids to score.
      longest: largest number of inputs of a window.
      stride: windows begin at multiples of it, and all but the first score at most
        `stride` tokens. With a context of one token these are the windows of
        `jaxdist.data.sliding`. None: a window scores as many tokens as it holds.
    """
    tokens = np.concatenate([context, continuation]).astype(np.int32)
    windows = []
    first_scored = len(context)
    max_scored = longest
    alignment = stride or 1
    while first_scored < len(tokens):
        end = min(first_scored + max_scored, len(tokens))
        begin = -(-max(0, end - 1 - longest) // alignment) * alignment
        windows.append(ScoreWindow(tokens[begin:end], first_scored - begin))
        first_scored = end
        max_scored = stride or longest
    return windows


def build_scorer(
    spec: ModelSpec, mesh: Mesh, rules: Rules, *, rows: int, compute: str = "float32"
) -> Scorer:
    """Builds `score(weights, windows, *, longest, watch=None) -> list[Score]`.

    Scores are in the order of the windows. The program compiles once for each width,
    which is a power of two or `longest`. Rows are split over the batch axes.

    Args:
      spec: the model.
      mesh: the devices.
      rules: the sharding rules by which weights are stored.
      rows: windows in a batch, a multiple of the number of batch shards.
      compute: the compute dtype.
    """

    def run(
        weights: Weights, inputs_BW: jax.Array, targets_BW: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        weights, weight_rules = laid_out(spec, weights, mesh, rules, compute)
        with execution.activate(mesh, weight_rules, compute=compute):
            return _score(spec.assemble(*weights), inputs_BW, targets_BW)

    replicated = NamedSharding(mesh, P())
    compiled = jax.jit(run, out_shardings=replicated)

    def score(
        weights: Weights,
        windows: Sequence[ScoreWindow],
        *,
        longest: int,
        watch: Callable[[int, int], None] | None = None,
    ) -> list[Score]:
        widths = [min(bucket(len(window.tokens) - 1), longest) for window in windows]
        batches = _batches(widths, rows)

        def results() -> Iterator[tuple[jax.Array, jax.Array]]:
            for number, batch in enumerate(batches, 1):
                tokens = [windows[i].tokens for i in batch]
                width = widths[batch[0]]
                inputs_BW = padded([row[:-1] for row in tokens], rows, width)
                targets_BW = padded([row[1:] for row in tokens], rows, width)
                yield compiled(weights, *placed((inputs_BW, targets_BW), mesh, rules))
                if watch:
                    watch(number, len(batches))

        scores: dict[int, Score] = {}
        for batch, (log_probabilities, likeliest) in zip(
            batches, read_behind(results()), strict=True
        ):
            for row, i in enumerate(batch):
                scored = slice(windows[i].known - 1, len(windows[i].tokens) - 1)
                scores[i] = Score(
                    log_probabilities[row, scored], likeliest[row, scored]
                )
        return [scores[i] for i in range(len(windows))]

    return score


def _score(
    model: Any, inputs_BW: jax.Array, targets_BW: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores the targets against the inputs, a part of the width at a time.

    Returns:
      The targets' log-probabilities [B, W] float32, and whether each target is the
      likeliest token [B, W] bool.
    """
    rows, width = inputs_BW.shape
    size = math.gcd(width, _PART)

    def parts(x_BW: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_BW.reshape(rows, width // size, size), 1, 0)

    def score_part(
        cache: Any, tokens: tuple[jax.Array, jax.Array]
    ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        inputs_BT, targets_BT = tokens
        logits_BTV, cache = model.decode(inputs_BT, cache)
        # A masked sum keeps the shards of the vocabulary in place; a look-up would
        # gather them.
        ids_V = jnp.arange(logits_BTV.shape[-1], dtype=jnp.int32)
        target_logits_BT = jnp.where(
            ids_V[None, None] == targets_BT[..., None], logits_BTV, 0
        ).sum(-1)
        likeliest_BT = jnp.argmax(logits_BTV, -1) == targets_BT
        return cache, (
            target_logits_BT - jax.nn.logsumexp(logits_BTV, axis=-1),
            likeliest_BT,
        )

    _, scores = jax.lax.scan(
        score_part, model.init_cache(rows, width), (parts(inputs_BW), parts(targets_BW))
    )
    log_probabilities_BW, likeliest_BW = (
        jnp.moveaxis(x, 0, 1).reshape(rows, width) for x in scores
    )
    return log_probabilities_BW, likeliest_BW


def _batches(widths: Sequence[int], rows: int) -> list[list[int]]:
    """Groups windows of equal width into batches of at most `rows`, widest first.

    Returns:
      The positions of each batch's windows in `widths`.
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    batches = []
    for _, group in itertools.groupby(order, key=lambda i: widths[i]):
        positions = list(group)
        batches += [positions[i : i + rows] for i in range(0, len(positions), rows)]
    return batches
