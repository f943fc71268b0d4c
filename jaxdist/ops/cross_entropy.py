"""Next-token cross-entropy of hidden states, without holding all logits.

The sequence is scored in chunks. The forward pass of a sum of losses computes the
gradients of each chunk while its logits exist (as in Liger, arXiv:2410.10989). So no
logit is stored and none is computed twice. `tensor` may split the vocabulary. Batch
shards keep their own sums of the head's gradient, which are reduced once at the end.
Devices that split a sequence split the vocabulary, too.

Distillation compares distributions by the most likely tokens of one of them, and one
bucket for all other tokens: see `top_scores` and `bucket_scores`.

Letters: `G` shards of the tokens, over samples and sequences (no dim if there is one),
`R` rows: tokens of a chunk, `D` model, `V` vocabulary, `k` tokens of a distribution.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.ops.costs import Cost, Product
from jaxdist.ops.dense_matmul import sum_in_shards, waits_for_sums
from jaxdist.parallel import execution, sharding
from jaxdist.parallel.context import AXIS
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import Names

# Least log-probability of a bucket. The probability of an empty bucket is 1e-38.
LEAST = -87.0

Carry = TypeVar("Carry")  # of a loop over chunks


class LossOptions(NamedTuple):
    """Static options of the loss."""

    names: Names  # logical names of the head's dims
    tied: bool  # whether the head is an embedding table [V, D]; False: a kernel [D, V]
    z_loss: float
    softcap: float  # 0 = no cap
    group: tuple[int, ...]  # (G,); () for one shard
    chunk: int  # tokens of a sequence in a chunk
    parts: int  # devices of a sequence that split the vocabulary; 1 = not split
    # manual mesh axis that splits the vocabulary (pipeline stages); None = none
    axis: str | None


def cross_entropy(
    x_BSD: jax.Array,
    head: nnx.Variable[jax.Array],
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    tied: bool = False,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Computes the weighted sums of -log p(target) and of z_loss * log(Z)^2.

    The second term is from arXiv:2204.02311. Both sums are float32 scalars. The first
    carries the gradient of both, and the second has no gradient. So (first + second)
    has the right value and the right gradient. Weights get no gradient.

    Args:
      x_BSD: last hidden states.
      head: kernel [D, V], or with `tied` the embedding table [V, D].
      targets_BS: int32 target tokens.
      weights_BS: weights of the tokens in the sums.
      tied: whether the head is an embedding table.
      z_loss: factor of the second sum.
      softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
      chunk_tokens: tokens of a batch shard that are scored at a time; 0: all.
    """
    (x, targets, weights), options = _in_chunks(
        (x_BSD, targets_BS, weights_BS.astype(jnp.float32)),
        head,
        tied=tied,
        z_loss=z_loss,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    return _cross_entropy(x, head[...], targets, weights, options)


def target_scores(
    x_BSD: jax.Array,
    head: nnx.Variable[jax.Array],
    targets_BS: jax.Array,
    *,
    tied: bool = False,
    softcap: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Computes log p(target) and log(Z) of each token, [B, S] float32.

    Any function may follow, unlike for a sum of losses. Its gradients by the scores are
    known only after all tokens are scored. So the backward pass computes the logits
    again, chunk by chunk.

    Args:
      x_BSD: last hidden states.
      head: kernel [D, V], or with `tied` the embedding table [V, D].
      targets_BS: int32 target tokens.
      tied: whether the head is an embedding table.
      softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
      chunk_tokens: tokens of a batch shard that are scored at a time; 0: all.
    """
    (x, targets), options = _in_chunks(
        (x_BSD, targets_BS),
        head,
        tied=tied,
        z_loss=0.0,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    scores = _unfold(_target_scores(x, head[...], targets, options), x_BSD.shape)
    return scores[..., 0], scores[..., 1]


class BucketScores(NamedTuple):
    """Log-probabilities of some tokens, and of a bucket for all others, in float32."""

    log_probability_BS: jax.Array  # of the target
    log_normalizer_BS: jax.Array  # log(Z)
    # of k tokens and of the bucket, at a temperature, [B, S, k + 1]
    buckets_BSk: jax.Array


def bucket_scores(
    x_BSD: jax.Array,
    head: nnx.Variable[jax.Array],
    targets_BS: jax.Array,
    ids_BSk: jax.Array,
    *,
    temperature: float = 1.0,
    tied: bool = False,
    softcap: float = 0.0,
    chunk_tokens: int = 1024,
) -> BucketScores:
    """Computes the scores of targets and, at a temperature, of k tokens and the others.

    Any function may follow, as for `target_scores`. A bucket without tokens has the
    log-probability `LEAST`.

    Args:
      x_BSD: last hidden states.
      head: kernel [D, V], or with `tied` the embedding table [V, D].
      targets_BS: int32 target tokens.
      ids_BSk: int32 tokens, which differ from each other at each place.
      temperature: divisor of the logits, after their cap, for the buckets.
      tied: whether the head is an embedding table.
      softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
      chunk_tokens: tokens of a batch shard that are scored at a time; 0: all.
    """
    (x, targets, ids), options = _in_chunks(
        (x_BSD, targets_BS, ids_BSk),
        head,
        tied=tied,
        z_loss=0.0,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    scores, _ = _bucket_scores(x, head[...], targets, ids, options, temperature)
    scores = _unfold(scores, x_BSD.shape)
    return BucketScores(scores[..., 0], scores[..., 1], scores[..., 2:])


def top_scores(
    x_BSD: jax.Array,
    head: nnx.Variable[jax.Array],
    count: int,
    *,
    temperature: float = 1.0,
    tied: bool = False,
    softcap: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Finds the most likely tokens at each place. Nothing is differentiated.

    Args:
      x_BSD: last hidden states.
      head: kernel [D, V], or with `tied` the embedding table [V, D].
      count: number of tokens, k, at most V.
      temperature: divisor of the logits, after their cap.
      tied: whether the head is an embedding table.
      softcap: logits become softcap * tanh(logits / softcap); 0: no cap.
      chunk_tokens: tokens of a batch shard that are scored at a time; 0: all.

    Returns:
      int32 tokens [B, S, k], the most likely first. Float32 log-probabilities of these
      tokens and of a bucket for all others [B, S, k + 1], see `bucket_scores`.
    """
    (x,), options = _in_chunks(
        (x_BSD,),
        head,
        tied=tied,
        z_loss=0.0,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    gathered = _gather_head(head[...], x.dtype, options)

    def score(
        carry: tuple[()], chunk: Sequence[jax.Array]
    ) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
        logits, _ = _logits(chunk[0], gathered, options)
        logits = logits / temperature
        top, ids = _top_logits(logits, count, options)
        exponentials, total, log_z = _normalizers(logits, options)
        rest = _log_rest(exponentials, total, ids, options)
        scores = jnp.concatenate([top - log_z[..., None], rest[..., None]], -1)
        return carry, (_own_rows(ids, options), _own_rows(scores, options))

    _, (ids, scores) = _over_chunks(score, (), (x,), options)
    ids, scores = (
        _unfold(_from_chunks(y, x, options), x_BSD.shape) for y in (ids, scores)
    )
    return ids, scores


def _in_chunks(
    arrays: tuple[jax.Array, ...],
    head: nnx.Variable[jax.Array],
    *,
    tied: bool,
    z_loss: float,
    softcap: float,
    chunk_tokens: int,
) -> tuple[list[jax.Array], LossOptions]:
    """Folds the arrays and pads them to whole chunks.

    Args:
      arrays: hidden states, and arrays [B, S] or [B, S, k] of their tokens.
      head: head of the model.
      tied: whether the head is an embedding table.
      z_loss: factor of the z loss.
      softcap: cap of the logits; 0: no cap.
      chunk_tokens: tokens of a batch shard that are scored at a time; 0: all.

    Returns:
      The arrays, and the static options.
    """
    x_BSD, *token_arrays = arrays
    dims = x_BSD.shape
    chex.assert_rank([x_BSD, head[...]], [3, 2])
    chex.assert_equal_shape_prefix([x_BSD, *token_arrays], 2)
    chex.assert_axis_dimension(head[...], 1 if tied else 0, dims[2])
    shards, parts = _shards(dims)
    folded = [_fold(array, shards, parts) for array in arrays]
    group, chunk, padding = _chunking(folded[0].shape, shards * parts, chunk_tokens)
    names = getattr(head, "logical", ())
    axis = execution.current().vocabulary_axis(names)
    vocabulary = head[...].shape[0 if tied else 1]
    options = LossOptions(
        names=names,
        tied=tied,
        z_loss=z_loss,
        softcap=softcap,
        group=group,
        chunk=chunk,
        parts=1 if axis else _parts_of_vocabulary(vocabulary, parts),
        axis=axis,
    )
    if padding:  # the last chunk is padded with tokens of weight 0
        widths = [(0, 0), (0, padding), (0, 0)]
        folded = [jnp.pad(array, widths[: array.ndim]) for array in folded]
    return folded, options


def cross_entropy_cost(
    width: int,
    vocabulary: int,
    chunk_tokens: int,
    edits: tuple[tuple[str, str], ...] = (),
) -> Cost:
    """Computes the cost of the loss: the matmul with the head.

    Args:
      width: width of the model.
      vocabulary: number of tokens in the vocabulary.
      chunk_tokens: tokens of a device that are scored at a time; 0: all.
      edits: overrides of the config that make the chunk smaller, each with its
        drawback.
    """
    return Cost(
        name="cross-entropy",
        products=(Product(width, vocabulary),),
        in_blocks=False,
        chunk=chunk_tokens,
        edits=edits,
    )


def _shards(dims: Sequence[int]) -> tuple[int, int]:
    """Counts the shards of [batch, S] over samples, and over sequences."""
    now = execution.current()
    shards = now.rules.shape.batch_shards
    parts = now.axis_size(AXIS)
    if dims[0] % shards:
        return 1, 1
    return shards, parts if dims[1] % parts == 0 else 1


def _fold(x: jax.Array, shards: int, parts: int) -> jax.Array:
    """Reshapes [batch, S, ...] to [batch * parts, S / parts, ...].

    The rows of a device are its parts of its samples. So a chunk contains rows of every
    device, instead of a range of positions that few devices have.
    """
    if parts == 1:
        return x
    x = x.reshape(
        shards, x.shape[0] // shards, parts, x.shape[1] // parts, *x.shape[2:]
    ).swapaxes(1, 2)
    x = x.reshape(-1, *x.shape[3:])
    return execution.shard(x, "tokens", *(None,) * (x.ndim - 1))


def _unfold(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Undoes `_fold` and the padding: the result is [batch, S, k]."""
    shards, parts = _shards(dims)
    x = x[:, : dims[1] // parts]
    if parts > 1:
        x = x.reshape(shards, parts, dims[0] // shards, *x.shape[1:]).swapaxes(1, 2)
        x = x.reshape(*dims[:2], x.shape[-1])
    return execution.shard(x, "batch", "sequence", None)


def _chunking(
    dims: Sequence[int], shards: int, chunk_tokens: int
) -> tuple[tuple[int, ...], int, int]:
    """Divides folded sequences into chunks of equal length.

    Returns:
      (shards,), or () for one shard; the length of a chunk; and the padding of the last
      chunk.
    """
    batch = dims[0]
    length = dims[1]
    most = max(1, chunk_tokens * shards // batch) if chunk_tokens else length
    count = -(-length // most)
    chunk = -(-length // count)
    return (shards,) if shards > 1 else (), chunk, count * chunk - length


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: LossOptions,
) -> tuple[jax.Array, jax.Array]:
    head = _gather_head(kernel, x.dtype, options)

    def add(
        total: tuple[jax.Array, jax.Array], chunk: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, targets, weights = chunk
        logits, _ = _logits(x, head, options)
        loss, z, _ = _score(logits, targets, weights, options)
        return (total[0] + loss, total[1] + z), None

    start = (jnp.float32(0), jnp.float32(0))
    total, _ = _over_chunks(add, start, (x, targets, weights), options)
    return total


def _forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    options: LossOptions,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Computes the sums, and as residuals the gradients of x and of the head."""
    head = _gather_head(kernel, x.dtype, options)

    def add(
        carry: tuple[jax.Array, jax.Array, jax.Array], chunk: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        loss, z, dhead = carry
        x, targets, weights = chunk
        logits, slope = _logits(x, head, options)
        chunk_loss, chunk_z, dlogits = _score(logits, targets, weights, options)
        dx, chunk_dhead = _pull_back(x, dlogits, slope, head, options)
        return (loss + chunk_loss, z + chunk_z, dhead + chunk_dhead), dx

    start = (jnp.float32(0), jnp.float32(0), _zero_head(kernel.shape, options))
    (loss, z, dhead), dx = _over_chunks(add, start, (x, targets, weights), options)
    return (loss, z), _finish_gradients(dx, dhead, x, kernel, options)


def _pull_back(
    x: jax.Array,
    dlogits: jax.Array,
    slope: jax.Array | None,
    head: jax.Array,
    options: LossOptions,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of a chunk's rows, and the chunk's part of the head's.

    Args:
      x: rows of the chunk.
      dlogits: gradient of the capped logits.
      slope: derivative of the soft cap; None: no cap.
      head: head, gathered.
      options: options of the loss.
    """
    if slope is not None:
        dlogits = dlogits * slope
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum(_equation("grv,dv->grd", options), dlogits, head)
    dx = _own_rows(_reduce_parts(execution.sum_over, dx, options), options)
    dhead = jnp.einsum(
        _equation("grd,grv->gdv", options),
        x,
        dlogits,
        preferred_element_type=jnp.float32,
    )
    return dx.astype(x.dtype), _shard_head(dhead, options)


def _zero_head(dims: Sequence[int], options: LossOptions) -> jax.Array:
    """Creates zeros for the sums of the head's gradient."""
    return _shard_head(jnp.zeros((*_sums(options), *dims), jnp.float32), options)


def _from_chunks(y: jax.Array, x: jax.Array, options: LossOptions) -> jax.Array:
    """Reshapes the rows of all chunks [chunks, rows, k] to [batch, S, k], like x."""
    y = jnp.moveaxis(y.reshape(-1, x.shape[0], options.chunk, y.shape[-1]), 0, 1)
    return y.reshape(*x.shape[:2], y.shape[-1])


def _finish_gradients(
    dx: jax.Array,
    dhead: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    options: LossOptions,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of x and of the head from those of all chunks."""
    gradient = _sum_batch_shards(dhead, kernel.shape, options)
    dx = _from_chunks(dx, x, options)
    gradient = gradient.astype(kernel.dtype)
    if waits_for_sums() or execution.current().axis_size(AXIS) > 1:
        # Without the barrier the scheduler puts the sum over devices last, and a whole
        # head stays in memory until then. SparseCores hide the sum this way, but
        # sequences that are too long for one device leave no memory for it.
        barrier: tuple[jax.Array, jax.Array] = jax.lax.optimization_barrier(
            (dx, gradient)
        )
        return barrier
    return dx, gradient


def _backward(
    options: LossOptions,
    residuals: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    dx, dkernel = residuals
    scale = cotangents[0]  # the residuals contain the z term: see `cross_entropy`
    # float32 times bfloat16 is float32, but the head's gradient has the head's dtype
    dkernel = (dkernel * scale).astype(dkernel.dtype)
    if jnp.finfo(dx.dtype).maxexp < jnp.finfo(jnp.float32).maxexp:
        # A loss scale may exceed the range of this dtype, even if the scaled gradient
        # does not.
        scaled = (dx.astype(jnp.float32) * scale).astype(dx.dtype)
        return scaled, dkernel, None, None
    return dx * scale.astype(dx.dtype), dkernel, None, None


_cross_entropy.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _target_scores(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, options: LossOptions
) -> jax.Array:
    """Computes (log p(target), log(Z)) of each token, [batch, S, 2]."""
    head = _gather_head(kernel, x.dtype, options)

    def score(
        carry: tuple[()], chunk: Sequence[jax.Array]
    ) -> tuple[tuple[()], jax.Array]:
        x, targets = chunk
        logits, _ = _logits(x, head, options)
        _, _, log_z = _normalizers(logits, options)
        target_logits, _ = _target_logits(logits, targets, options)
        scores = jnp.stack([target_logits - log_z, log_z], -1)
        return carry, _own_rows(scores, options)

    _, scores = _over_chunks(score, (), (x, targets), options)
    return _from_chunks(scores, x, options)


# x, the head's kernel, targets, scores
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _scores_forward(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, options: LossOptions
) -> tuple[jax.Array, _Residuals]:
    scores = _target_scores(x, kernel, targets, options)
    return scores, (x, kernel, targets, scores)


def _scores_backward(
    options: LossOptions, residuals: _Residuals, cotangents: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, targets, scores = residuals
    head = _gather_head(kernel, x.dtype, options)

    def add(
        dhead: jax.Array, chunk: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        x, targets, scores, dscores = chunk
        logits, slope = _logits(x, head, options)
        dlogits = _target_gradient(logits, targets, scores[..., 1:], dscores, options)
        dx, chunk_dhead = _pull_back(x, dlogits, slope, head, options)
        return dhead + chunk_dhead, dx

    start = _zero_head(kernel.shape, options)
    arrays = (x, targets, scores, cotangents)
    dhead, dx = _over_chunks(add, start, arrays, options)
    dx, gradient = _finish_gradients(dx, dhead, x, kernel, options)
    return dx, gradient, None


_target_scores.defvjp(_scores_forward, _scores_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _bucket_scores(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    ids: jax.Array,
    options: LossOptions,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Computes the scores of buckets.

    Returns:
      Log p(target), log(Z), and the log-probabilities of k tokens and of the others at
      the temperature, [batch, S, k + 3]. Log(Z) at the temperature, [batch, S, 1],
      which must not be differentiated.
    """
    head = _gather_head(kernel, x.dtype, options)

    def score(
        carry: tuple[()], chunk: Sequence[jax.Array]
    ) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
        x, targets, ids = chunk
        logits, _ = _logits(x, head, options)
        exponentials, total, log_z = _normalizers(logits, options)
        target_logits, _ = _target_logits(logits, targets, options)
        scores = [(target_logits - log_z)[..., None], log_z[..., None]]
        if temperature != 1:
            logits = logits / temperature
            exponentials, total, log_z = _normalizers(logits, options)
        scores.append(_pick(logits, ids, options) - log_z[..., None])
        scores.append(_log_rest(exponentials, total, ids, options)[..., None])
        joined = jnp.concatenate(scores, -1)
        return carry, (_own_rows(joined, options), _own_rows(log_z[..., None], options))

    _, (scores, log_z) = _over_chunks(score, (), (x, targets, ids), options)
    return _from_chunks(scores, x, options), _from_chunks(log_z, x, options)


# x, the head's kernel, targets, ids, scores, log(Z) at the temperature
_BucketResiduals = tuple[
    jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array
]


def _buckets_forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    ids: jax.Array,
    options: LossOptions,
    temperature: float,
) -> tuple[tuple[jax.Array, jax.Array], _BucketResiduals]:
    scores, log_z = _bucket_scores(x, kernel, targets, ids, options, temperature)
    return (scores, log_z), (x, kernel, targets, ids, scores, log_z)


def _buckets_backward(
    options: LossOptions,
    temperature: float,
    residuals: _BucketResiduals,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    x, kernel, targets, ids, scores, log_z = residuals
    head = _gather_head(kernel, x.dtype, options)

    def add(
        dhead: jax.Array, chunk: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        x, targets, ids, scores, log_z, dscores = chunk
        logits, slope = _logits(x, head, options)
        dlogits = _target_gradient(
            logits, targets, scores[..., 1:2], dscores[..., :2], options
        )
        dlogits += _bucket_gradient(
            logits / temperature,
            ids,
            (scores[..., -1:], log_z),
            dscores[..., 2:],
            options,
        ) / jnp.float32(temperature)
        dx, chunk_dhead = _pull_back(x, dlogits, slope, head, options)
        return dhead + chunk_dhead, dx

    start = _zero_head(kernel.shape, options)
    arrays = (x, targets, ids, scores, log_z, cotangents[0])
    dhead, dx = _over_chunks(add, start, arrays, options)
    dx, gradient = _finish_gradients(dx, dhead, x, kernel, options)
    return dx, gradient, None, None


_bucket_scores.defvjp(_buckets_forward, _buckets_backward)


def _target_gradient(
    logits: jax.Array,
    targets: jax.Array,
    log_z: jax.Array,
    dscores: jax.Array,
    options: LossOptions,
) -> jax.Array:
    """Computes the gradient of the logits from those of log p(target) and log(Z)."""
    _, is_target = _target_logits(logits, targets, options)
    dlog_p = dscores[..., :1]
    dlog_z = dscores[..., 1:]
    probability = jnp.exp(logits - log_z)
    return probability * (dlog_z - dlog_p) + jnp.where(is_target, dlog_p, 0)


def _bucket_gradient(
    logits: jax.Array,
    ids: jax.Array,
    log_scores: tuple[jax.Array, jax.Array],
    dscores: jax.Array,
    options: LossOptions,
) -> jax.Array:
    """Computes the gradient of logits, divided by the temperature, from the buckets'.

    Args:
      logits: logits at the temperature, [(G,) R, V].
      ids: tokens [(G,) R, k].
      log_scores: log-probability of the last bucket, and log(Z), [(G,) R, 1] each.
      dscores: gradients of the buckets' log-probabilities, [(G,) R, k + 1].
      options: options of the loss.
    """
    log_rest, log_z = log_scores
    log_p = logits - log_z
    dlogits = -jnp.exp(log_p) * dscores.sum(-1, keepdims=True)
    in_rest = ~_are_listed(logits, ids, options)
    share_of_rest = jnp.exp(jnp.where(in_rest, log_p - log_rest, -jnp.inf))
    dlogits += share_of_rest * dscores[..., -1:]
    return dlogits + _put(logits, ids, dscores[..., :-1], options)


def _sum_batch_shards(
    dhead: jax.Array, dims: Sequence[int], options: LossOptions
) -> jax.Array:
    """Sums the head's gradient [(G,) *dims] over batch shards."""
    now = execution.current()
    if options.parts > 1:
        return _sum_batch_shards_in_parts(dhead, options)
    if not options.group or now.mesh is None or now.platform != "tpu":
        return execution.scatter(
            dhead.sum(0) if options.group else dhead, options.names
        )
    rows = now.rules.activation(("tokens",), options.group)
    spec = P(*rows, *now.rules.computed(options.names, dims))
    return sum_in_shards(
        lambda own_sum: own_sum[0],
        arrays=(dhead,),
        specs=(spec,),
        rows=rows,
        names=options.names,
        dims=dims,
    )


def _over_chunks(
    add: Callable[[Carry, Sequence[jax.Array]], tuple[Carry, Any]],
    start: Carry,
    arrays: Sequence[jax.Array],
    options: LossOptions,
) -> tuple[Carry, Any]:
    """Folds `add` over the chunks [(G,) R, ...] of arrays [batch, S, ...].

    Returns:
      The last carry, and the other results of `add`, stacked.
    """
    length = arrays[0].shape[1]

    def add_chunk(carry: Carry, first: jax.Array | int) -> tuple[Carry, Any]:
        parts = [
            jax.lax.dynamic_slice_in_dim(array, first, options.chunk, axis=1)
            for array in arrays
        ]
        x, *others = (
            part.reshape(*options.group, -1, *part.shape[2:]) for part in parts
        )
        rows = (_shard_rows(x), *others)
        return add(carry, [_all_rows(part, options) for part in rows])

    if options.chunk == length:
        carry, out = add_chunk(start, 0)
        return carry, jax.tree.map(lambda y: y[None], out)
    carry, out = jax.lax.scan(add_chunk, start, jnp.arange(0, length, options.chunk))
    return carry, out


def _logits(
    x: jax.Array, head: jax.Array, options: LossOptions
) -> tuple[jax.Array, jax.Array | None]:
    """Computes float32 logits [(G,) R, V], and the derivative of the soft cap.

    The derivative is None if there is no cap.
    """
    logits = jnp.einsum(
        _equation("grd,dv->grv", options), x, head, preferred_element_type=jnp.float32
    )
    logits = execution.shard(logits, *_row_names(options), _vocabulary(options))
    if not options.softcap:
        return logits, None
    squashed = jnp.tanh(logits / options.softcap)
    return options.softcap * squashed, 1 - squashed**2


def _score(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, options: LossOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the loss sum, the z sum and d(loss + z) / d logits, all float32."""
    exponentials, total, log_z = _normalizers(logits, options)
    target_logits, is_target = _target_logits(logits, targets, options)
    loss = jnp.sum(weights * (log_z - target_logits))
    z = jnp.sum(weights * options.z_loss * log_z**2)
    factor = weights * (1 + 2 * options.z_loss * log_z)
    of_targets = jnp.where(is_target, weights[..., None], 0)
    return loss, z, exponentials * (factor[..., None] / total) - of_targets


def _normalizers(
    logits: jax.Array, options: LossOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the terms of the softmax, in float32.

    Returns:
      The exponentials of the logits, relative to the largest logit; their sum [..., 1];
      and log(Z) [...], where Z is the sum of exp(logits).
    """
    top = _reduce_parts(jax.lax.pmax, logits.max(-1, keepdims=True), options)
    exponentials = jnp.exp(logits - top)
    total = exponentials.sum(-1, keepdims=True)
    total = _reduce_parts(execution.sum_over, total, options)
    return exponentials, total, (jnp.log(total) + top)[..., 0]


def _target_logits(
    logits: jax.Array, targets: jax.Array, options: LossOptions
) -> tuple[jax.Array, jax.Array]:
    """Selects the targets' logits, and marks them in this part of the vocabulary."""
    if options.axis is not None:
        targets = targets - jax.lax.axis_index(options.axis) * logits.shape[-1]
    is_target = targets[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, logits.shape, logits.ndim - 1
    )
    if not execution.current().manual:
        selected = jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")
        return selected[..., 0], is_target
    # A masked sum, because XLA's partitioner cannot split a gather in a region that is
    # manual over some axes.
    selected = jnp.where(is_target, logits, 0).sum(-1)
    return _reduce_parts(execution.sum_over, selected, options), is_target


# --- some tokens of the vocabulary ----------------------------------------------------

# Each device handles the tokens of its own part of the vocabulary. XLA's partitioner
# would gather the logits for a top-k, and aborts on some look-ups along a dim that it
# splits.


def _log_rest(
    exponentials: jax.Array, total: jax.Array, ids: jax.Array, options: LossOptions
) -> jax.Array:
    """Computes the log-probability [(G,) R] of all tokens that are not listed.

    It is a sum of its own. One minus the sum of the others would lose a small rest.

    Args:
      exponentials: see `_normalizers`, as `total`.
      total: sum of the exponentials.
      ids: listed tokens [(G,) R, k].
      options: options of the loss.
    """
    is_listed = _are_listed(exponentials, ids, options)
    rest = jnp.where(is_listed, 0, exponentials).sum(-1)
    rest = _reduce_parts(execution.sum_over, rest, options)
    return jnp.log(jnp.maximum(rest / total[..., 0], jnp.exp(LEAST)))


def _are_listed(logits: jax.Array, ids: jax.Array, options: LossOptions) -> jax.Array:
    """Marks the listed tokens in this part of the vocabulary, bool [(G,) R, V]."""
    return _put(logits, ids, jnp.ones(ids.shape, jnp.float32), options) > 0


def _pick(logits: jax.Array, ids: jax.Array, options: LossOptions) -> jax.Array:
    """Selects the logits of tokens [(G,) R, k]."""
    split = _split_vocabulary(logits, options)

    def pick_locally(logits: jax.Array, ids: jax.Array) -> jax.Array:
        local, is_own = split.own_ids(ids, logits.shape[-1])
        picked = jnp.take_along_axis(logits, local, -1, mode="clip")
        picked = jnp.where(is_own, picked, 0)
        return jax.lax.psum(picked, split.axes) if split.axes else picked

    ids = _in_stage(ids, logits, options)
    run = execution.per_device(pick_locally, (split.logits, split.rows), split.rows)
    return _reduce_parts(execution.sum_over, run(logits, ids), options)


def _put(
    logits: jax.Array, ids: jax.Array, values: jax.Array, options: LossOptions
) -> jax.Array:
    """Writes values [(G,) R, k] of tokens to zeros in the shape of the logits."""
    split = _split_vocabulary(logits, options)

    def put_locally(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        local, is_own = split.own_ids(ids, logits.shape[-1])
        vocabulary = logits.shape[-1]
        rows = jnp.arange(ids.size // ids.shape[-1])[:, None]
        places = jnp.where(is_own, local, vocabulary).reshape(len(rows), -1)
        written = jnp.zeros((len(rows), vocabulary), values.dtype)
        added = values.reshape(places.shape)
        return written.at[rows, places].add(added, mode="drop").reshape(logits.shape)

    specs = (split.logits, split.rows, split.rows)
    run = execution.per_device(put_locally, specs, split.logits)
    written: jax.Array = run(logits, _in_stage(ids, logits, options), values)
    return written


def _top_logits(
    logits: jax.Array, count: int, options: LossOptions
) -> tuple[jax.Array, jax.Array]:
    """Finds the largest logits and their tokens, [(G,) R, k] each.

    Each device finds those of its own part; the largest of them are selected. Of equal
    logits the first token is selected.
    """
    split = _split_vocabulary(logits, options)

    def find(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        top, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
        if not split.axes:
            return top, ids
        ids = ids + jax.lax.axis_index(split.axes) * logits.shape[-1]
        return _largest(top, ids, split.axes, count)

    run = execution.per_device(find, (split.logits,), (split.rows, split.rows))
    top, ids = run(logits)
    if options.axis is None:
        return top, ids
    ids = ids + jax.lax.axis_index(options.axis) * logits.shape[-1]
    parts = [
        jax.lax.all_gather(x, options.axis, axis=x.ndim - 1, tiled=True)
        for x in (top, ids)
    ]
    select = execution.per_device(
        partial(_select, count=count),
        (split.rows, split.rows),
        (split.rows, split.rows),
    )
    selected: tuple[jax.Array, jax.Array] = select(*parts)
    return selected


def _largest(
    top: jax.Array, ids: jax.Array, axes: Sequence[str], count: int
) -> tuple[jax.Array, jax.Array]:
    """Selects the largest of the logits that the devices of some axes have found."""
    gathered = [
        jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) for x in (top, ids)
    ]
    return _select(*gathered, count=count)


def _select(
    top: jax.Array, ids: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array]:
    """Selects the largest logits and their tokens."""
    top, places = jax.lax.top_k(top, min(count, top.shape[-1]))
    return top, jnp.take_along_axis(ids, places, -1)


def _in_stage(ids: jax.Array, logits: jax.Array, options: LossOptions) -> jax.Array:
    """Counts tokens from the first one of this stage's part of the vocabulary."""
    if options.axis is None:
        return ids
    return ids - jax.lax.axis_index(options.axis) * logits.shape[-1]


class _SplitVocabulary(NamedTuple):
    """The partition of logits [(G,) R, V] over devices."""

    logits: P
    rows: P  # of arrays [(G,) R, k] of the same tokens
    axes: tuple[str, ...]  # mesh axes that split the vocabulary

    def own_ids(self, ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Counts tokens from the first one of a device, and marks its own ones."""
        if self.axes:
            ids = ids - jax.lax.axis_index(self.axes) * size
        return ids, (ids >= 0) & (ids < size)


def _split_vocabulary(logits: jax.Array, options: LossOptions) -> _SplitVocabulary:
    names = (*_row_names(options), _vocabulary(options))
    spec = execution.current().rules.activation(names, logits.shape)
    *rows, vocabulary = spec
    return _SplitVocabulary(spec, P(*rows, None), sharding.axes_in(vocabulary))


def _reduce_parts(
    reduce: Callable[[jax.Array, str], jax.Array], x: jax.Array, options: LossOptions
) -> jax.Array:
    """Reduces x over the pipeline stages, if they split the vocabulary."""
    return x if options.axis is None else reduce(x, options.axis)


def _equation(equation: str, options: LossOptions) -> str:
    """Adapts an einsum for a head [D, V] to a table [V, D], and to one shard."""
    if options.tied:
        equation = equation.replace("dv", "vd")
    return equation if options.group else equation.replace("g", "")


def _shard_rows(x: jax.Array) -> jax.Array:
    """Constrains rows [(G,) R, D] to their shards."""
    return execution.shard(x, *("tokens", None, None)[-x.ndim :])


def _shard_head(dhead: jax.Array, options: LossOptions) -> jax.Array:
    """Constrains sums of the head's gradient to their shards."""
    return execution.shard(dhead, *_row_names(options)[:-1], *_head_dims(options))


def _head_dims(
    options: LossOptions, width: str | None = None
) -> tuple[str | None, ...]:
    """Names the dims of the gathered head."""
    if options.tied:
        return _vocabulary(options), width
    return width, _vocabulary(options)


def _row_names(options: LossOptions) -> tuple[str | None, ...]:
    """Names the dims [(G,) R] of a chunk."""
    if options.parts > 1:
        return "batch", None
    return ("tokens", None)[-1 - len(options.group) :]


def _vocabulary(options: LossOptions) -> str:
    return "vocab_of_part" if options.parts > 1 else "vocab"


# --- a vocabulary that is split by the devices of a sequence --------------------------

# On every device, a whole head and its float32 gradient would be the largest arrays of
# a step with few samples. So the c devices of a sequence score the rows of all of them
# together, each device with its c-th of the vocabulary. The work and the number of
# logits are the same. The rows cross devices, and less of the head does.


def _parts_of_vocabulary(vocabulary: int, parts: int) -> int:
    """Counts the devices of a sequence that split the vocabulary.

    These are all of them, or one if the vocabulary does not divide.
    """
    shards = parts * execution.current().axis_size("tensor")
    return 1 if vocabulary % shards else parts


def _sums(options: LossOptions) -> tuple[int, ...]:
    """Finds the leading dims of the head's gradient; () if there is one sum of it.

    Several sums are kept apart: the dim is their number.
    """
    return (options.group[0] // options.parts,) if options.parts > 1 else options.group


def _gather_head(
    kernel: jax.Array, dtype: jnp.dtype, options: LossOptions
) -> jax.Array:
    """Gathers the head, in the dtype and layout in which a chunk is scored."""
    if options.parts == 1:
        return execution.gather(kernel, options.names, dtype)
    now = execution.current()
    head = now.lay_out(kernel.astype(dtype), Rules.stored, options.names)
    if now.splits_width(options.names, zero=3):
        # The axes are moved one after another; otherwise XLA's partitioner gathers the
        # whole head.
        head = execution.shard(head, *_head_dims(options, "width_of_part"))
    return execution.shard(head, *_head_dims(options))


def _sum_batch_shards_in_parts(dhead: jax.Array, options: LossOptions) -> jax.Array:
    """Sums the head's gradient [G / c, *dims] over batch shards, if c parts split it."""
    now = execution.current()
    dims = dhead.shape[1:]
    width = "width_of_part" if now.splits_width(options.names, zero=2) else None
    summed = now.rules.activation(_head_dims(options, width), dims)
    if now.mesh is None or now.platform != "tpu":
        total = now.constrain(dhead.sum(0), summed)
        return execution.scatter(total, options.names)
    rows = now.rules.activation(("batch", *_head_dims(options)), dhead.shape)
    axes = sharding.axes_in(rows[0])
    dim = 1 if options.tied else 0
    scatter_axes = sharding.axes_in(summed[dim])

    def sum_locally(own_sum: jax.Array) -> jax.Array:
        total = own_sum[0]
        if scatter_axes:
            total = jax.lax.psum_scatter(
                total, scatter_axes, scatter_dimension=dim, tiled=True
            )
        other_axes = [axis for axis in axes if axis not in scatter_axes]
        if not other_axes:
            return total
        reduced: jax.Array = jax.lax.psum(total, other_axes)
        return reduced

    total = execution.per_device(sum_locally, rows, summed)(dhead)
    return execution.scatter(total, options.names)


def _all_rows(part: jax.Array, options: LossOptions) -> jax.Array:
    """Gathers the rows of a sequence's devices: [(G,) R, ...] to [G / c, c R, ...]."""
    if options.parts == 1:
        return part
    part = part.reshape(*_sums(options), -1, *part.shape[2:])
    return execution.shard(part, *_row_names(options), *(None,) * (part.ndim - 2))


def _own_rows(x: jax.Array, options: LossOptions) -> jax.Array:
    """Undoes `_all_rows`, for parts of a sum over the vocabulary."""
    if options.parts > 1:
        x = execution.shard(x, "batch", "sequence", None)
        x = x.reshape(*options.group, -1, x.shape[2])
    return _shard_rows(x)
