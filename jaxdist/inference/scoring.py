"""How probable given texts are to a model: log-probabilities, token by token, in fixed
shapes.

The model gives what `jaxdist.inference.decoding` asks of it. A text is read in parts
against the cache, so logits of a whole one are never in memory.

Shapes: B rows, W width, V vocabulary.
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

_PART = 128  # tokens a row whose logits are in memory at once


class ScoreWindow(NamedTuple):
    """Consecutive tokens of a text that go through the model at once."""

    tokens: np.ndarray  # [2 .. W + 1] int32
    # the first so many are only read; the others are scored, each from all before it
    known: int


class Score(NamedTuple):
    """What a model gives a text's tokens."""

    log_probabilities: np.ndarray  # [scored] float32, nats
    likeliest: np.ndarray  # [scored] bool: whether no other token was as probable


Scorer = Callable[..., list[Score]]


def windows(
    context: np.ndarray,
    continuation: np.ndarray,
    longest: int,
    stride: int | None = None,
) -> list[ScoreWindow]:
    """Returns windows of at most `longest` inputs that score each token of
    `continuation` once.

    Each is as long as the text allows, so a token is given as much as can be of what is
    before it: what does not fit is cut off on the left. `context` has at least one
    token.

    Args:
      stride: windows begin at multiples of it, and all but the first score at most so
        many tokens: those of `jaxdist.data.sliding`, where `context` is one token.
        Default: as many as a window holds.
    """
    tokens = np.concatenate([context, continuation]).astype(np.int32)
    windows = []
    first = len(context)
    most = longest
    while first < len(tokens):
        end = min(first + most, len(tokens))
        move = stride or 1
        begin = -(-max(0, end - 1 - longest) // move) * move
        windows.append(ScoreWindow(tokens[begin:end], first - begin))
        first = end
        most = stride or longest
    return windows


def build_scorer(
    spec: ModelSpec, mesh: Mesh, rules: Rules, *, rows: int, compute: str = "float32"
) -> Scorer:
    """Returns `score(weights, windows, *, longest, watch=None) -> list of Score`, in
    the windows' order.

    It compiles once for each width, a power of two or
    `longest`; rows are split over the batch axes.

    Args:
      rows: windows at once; the batch shards divide it.
    """

    def run(weights, inputs_BW, targets_BW):
        weights, by = laid_out(spec, weights, mesh, rules, compute)
        with execution.activate(mesh, by, compute=compute):
            return _score(spec.assemble(*weights), inputs_BW, targets_BW)

    compiled = jax.jit(run, out_shardings=NamedSharding(mesh, P()))

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
                inputs_BW, targets_BW = (
                    padded([row[part] for row in tokens], rows, width)
                    for part in (slice(-1), slice(1, None))
                )
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
    """Returns the targets' log-probabilities [B, W] float32, and whether each is the
    likeliest.
    """
    rows, width = inputs_BW.shape
    size = math.gcd(width, _PART)

    def parts(x_BW: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_BW.reshape(rows, width // size, size), 1, 0)

    def score_part(cache: Any, tokens: tuple[jax.Array, jax.Array]):
        inputs_BT, targets_BT = tokens
        logits_BTV, cache = model.decode(inputs_BT, cache)
        # A sum over the vocabulary, not a look-up in it: its shards stay where they
        # are.
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
    probabilities, likeliest = (
        jnp.moveaxis(x, 0, 1).reshape(rows, width) for x in scores
    )
    return probabilities, likeliest


def _batches(widths: Sequence[int], rows: int) -> list[list[int]]:
    """Returns numbers of at most `rows` windows of equal width each, the
    widest first.
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    groups = [
        list(group) for _, group in itertools.groupby(order, key=lambda i: widths[i])
    ]
    return [group[i : i + rows] for group in groups for i in range(0, len(group), rows)]
