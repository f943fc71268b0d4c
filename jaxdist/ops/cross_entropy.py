"""Next-token cross-entropy from the last hidden states, without ever holding all
logits.

The sequence is scored in chunks. The backward pass of a sum of losses needs the logits
only to make d loss / d logits, so gradients are formed chunk by chunk in the forward
pass, while the logits are there (as in Liger, arXiv:2410.10989): no logit is stored and
none computed twice. The vocabulary may be split over `tensor`; batch shards keep their
own sum of the head's gradient, reduced once at the end. Devices that share out a
sequence share out the vocabulary, too.

Letters: G shards of the tokens, of samples and of sequences (no dim if there is one), R
rows = tokens of a chunk, D model, V vocabulary.
"""

from functools import partial
from typing import NamedTuple

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
from jaxdist.protocols.param_names import Names


class LossOptions(NamedTuple):
    """Static settings of the loss."""

    names: Names  # of the head's dims
    tied: bool  # head is an embedding table [V, D], not a kernel [D, V]
    z_loss: float
    softcap: float
    group: tuple[int, ...]  # (shards of the tokens,); () if there is one
    chunk: int
    parts: int  # devices of a sequence that share out the vocabulary, too; 1: none do
    # manual mesh axis that the vocabulary is split over (pipeline stages)
    axis: str | None


def cross_entropy(
    x_BSD: jax.Array,
    head: nnx.Variable,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    tied: bool = False,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sums of -log p(target) and of z_loss * log(Z)^2
    (arXiv:2204.02311).

    Both are float32 scalars. The first carries the gradient of both, so that (first +
    second) has the right value and the right gradient; the second alone has none.
    Weights get no gradient.

    Args:
      head: kernel [D, V], or with `tied` the embedding table [V, D].
      softcap: logits become softcap * tanh(logits / softcap); 0 leaves them.
      chunk_tokens: tokens per batch shard scored at once; 0 for all.
    """
    (x, targets, weights), options = _in_chunks(
        (x_BSD, targets_BS, weights_BS),
        head,
        tied=tied,
        z_loss=z_loss,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    return _cross_entropy(x, head[...], targets, weights, options)


def target_scores(
    x_BSD: jax.Array,
    head: nnx.Variable,
    targets_BS: jax.Array,
    *,
    tied: bool = False,
    softcap: float = 0.0,
    chunk_tokens: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Returns log p(target) and log(Z) of each token, [B, S] float32.

    Unlike a sum of losses, these may enter any function: its gradients with respect to
    them are known only once all tokens are scored. The backward pass therefore computes
    the logits again, chunk by chunk.

    Args:
      head: see `cross_entropy`, as the others are.
    """
    (x, targets), options = _in_chunks(
        (x_BSD, targets_BS),
        head,
        tied=tied,
        z_loss=0.0,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
    )
    scores = _unfolded(_target_scores(x, head[...], targets, options), x_BSD.shape)
    return scores[..., 0], scores[..., 1]


def _in_chunks(
    arrays: tuple[jax.Array, ...],
    head: nnx.Variable,
    *,
    tied: bool,
    z_loss: float,
    softcap: float,
    chunk_tokens: int,
) -> tuple[list[jax.Array], LossOptions]:
    """Returns x, targets and maybe weights, folded and filled up to whole chunks, and
    the static settings.
    """
    x_BSD, *of_tokens = arrays
    dims = x_BSD.shape
    chex.assert_rank([x_BSD, head[...]], [3, 2])
    chex.assert_shape(of_tokens, dims[:2])
    chex.assert_axis_dimension(head[...], 1 if tied else 0, dims[2])
    shards, parts = _shards(dims)
    folded = [_folded(a, shards, parts) for a in arrays]
    group, chunk, extra = _chunking(folded[0].shape, shards * parts, chunk_tokens)
    names = getattr(head, "logical", ())
    axis = execution.current().vocabulary_axis(names)
    vocabulary = head[...].shape[0 if tied else 1]
    split = 1 if axis else _parts_of_vocabulary(vocabulary, parts)
    options = LossOptions(names, tied, z_loss, softcap, group, chunk, split, axis)
    if len(folded) == 3:
        folded[2] = folded[2].astype(jnp.float32)
    if extra:  # the last chunk is filled up with tokens of weight 0
        folded = [jnp.pad(a, [(0, 0), (0, extra), (0, 0)][: a.ndim]) for a in folded]
    return folded, options


def cross_entropy_cost(
    width: int,
    vocabulary: int,
    chunk_tokens: int,
    edits: tuple[tuple[str, str], ...] = (),
) -> Cost:
    """Returns the cost of the loss: of the product with the head.

    Args:
      edits: of the config, that make the chunk smaller, each with what it costs.
    """
    return Cost(
        name="cross-entropy",
        products=(Product(width, vocabulary),),
        in_blocks=False,
        chunk=chunk_tokens,
        edits=edits,
    )


def _shards(dims) -> tuple[int, int]:
    """Returns the shards of [batch, S] over samples, and over sequences."""
    now = execution.current()
    shards = now.rules.shape.batch_shards
    parts = now.axis_size(AXIS)
    if dims[0] % shards:
        return 1, 1
    return shards, parts if dims[1] % parts == 0 else 1


def _folded(x, shards: int, parts: int):
    """Returns [batch, S, ...] as [batch * parts, S / parts, ...], a device's parts of
    its samples together.

    A chunk is then cut from what each device has, and not from the sequences that they
    share out.
    """
    if parts == 1:
        return x
    x = x.reshape(
        shards, x.shape[0] // shards, parts, x.shape[1] // parts, *x.shape[2:]
    ).swapaxes(1, 2)
    x = x.reshape(-1, *x.shape[3:])
    return execution.shard(x, "tokens", *(None,) * (x.ndim - 1))


def _unfolded(x, dims):
    """Returns [batch * parts, S / parts (filled up), k] as [batch, S, k]: the inverse of
    `_folded`.
    """
    shards, parts = _shards(dims)
    x = x[:, : dims[1] // parts]
    if parts > 1:
        x = x.reshape(shards, parts, dims[0] // shards, *x.shape[1:]).swapaxes(1, 2)
        x = x.reshape(*dims[:2], x.shape[-1])
    return execution.shard(x, "batch", "sequence", None)


def _chunking(dims, shards: int, chunk_tokens: int) -> tuple[tuple[int, ...], int, int]:
    """Returns the shards, if there are several, the length of a chunk, and what the
    last one lacks.
    """
    batch = dims[0]
    length = dims[1]
    most = max(1, chunk_tokens * shards // batch) if chunk_tokens else length
    count = -(-length // most)
    chunk = -(-length // count)
    return (shards,) if shards > 1 else (), chunk, count * chunk - length


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(x, kernel, targets, weights, options: LossOptions):
    head = _gathered(kernel, x.dtype, options)

    def add(total, part):
        x_part, targets_part, weights_part = part
        logits, _ = _logits(x_part, head, options)
        loss, z, _ = _score(logits, targets_part, weights_part, options)
        return (total[0] + loss, total[1] + z), None

    return _over_chunks(
        add, (jnp.float32(0), jnp.float32(0)), (x, targets, weights), options
    )[0]


def _forward(x, kernel, targets, weights, options: LossOptions):
    head = _gathered(kernel, x.dtype, options)

    def add(carry, part):
        loss, z, dhead = carry
        x_part, targets_part, weights_part = part
        logits, slope = _logits(x_part, head, options)
        part_loss, part_z, dlogits = _score(logits, targets_part, weights_part, options)
        dx, product = _pull_chunk(x_part, dlogits, slope, head, options)
        return (loss + part_loss, z + part_z, dhead + product), dx

    start = (jnp.float32(0), jnp.float32(0), _zero_head(kernel.shape, options))
    (loss, z, dhead), dx = _over_chunks(add, start, (x, targets, weights), options)
    return (loss, z), _finished(dx, dhead, x, kernel, options)


def _pull_chunk(x, dlogits, slope, head, options: LossOptions):
    """Returns the gradients of a chunk's rows, and of the head by this chunk."""
    dlogits = (dlogits if slope is None else dlogits * slope).astype(x.dtype)
    dx = jnp.einsum(_equation("grv,dv->grd", options), dlogits, head)
    dx = _own_rows(_over_parts(execution.sum_over, dx, options), options)
    product = jnp.einsum(
        _equation("grd,grv->gdv", options),
        x,
        dlogits,
        preferred_element_type=jnp.float32,
    )
    return dx.astype(x.dtype), _head_named(product, options)


def _zero_head(dims, options: LossOptions):
    """Returns the head's gradient before the first chunk."""
    return _head_named(jnp.zeros((*_sums(options), *dims), jnp.float32), options)


def _from_chunks(y, x, options: LossOptions):
    """Lays out rows of `_over_chunks`, [chunks, rows, k], as [batch, S, k]."""
    y = jnp.moveaxis(y.reshape(-1, x.shape[0], options.chunk, y.shape[-1]), 0, 1)
    return y.reshape(*x.shape[:2], y.shape[-1])


def _finished(dx, dhead, x, kernel, options: LossOptions):
    """Returns the gradients of x and of the head from those of all chunks."""
    gradient = _over_batch_shards(dhead, kernel.shape, options)
    dx = _from_chunks(dx, x, options)
    gradient = gradient.astype(kernel.dtype)
    if waits_for_sums() or execution.current().axis_size(AXIS) > 1:
        # Left to the scheduler, the sum over devices comes last: a whole head stays
        # till then. On SparseCores the sum is hidden so, but sequences too long for one
        # device leave no room for it.
        dx, gradient = jax.lax.optimization_barrier((dx, gradient))
    return dx, gradient


def _backward(options, residuals, cotangents):
    dx, dkernel = residuals
    scale = cotangents[0]  # the z term's gradient is inside: see the docstring
    # With a narrow range, a loss scale may be outside where the product is not.
    if jnp.finfo(dx.dtype).maxexp < jnp.finfo(jnp.float32).maxexp:
        return (
            (dx.astype(jnp.float32) * scale).astype(dx.dtype),
            dkernel * scale,
            None,
            None,
        )
    return dx * scale.astype(dx.dtype), dkernel * scale, None, None


_cross_entropy.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _target_scores(x, kernel, targets, options: LossOptions):
    """Returns (log p(target), log(Z)) of each token, [batch, S, 2]."""
    head = _gathered(kernel, x.dtype, options)

    def score(carry, part):
        x_part, targets_part = part
        logits, _ = _logits(x_part, head, options)
        _, _, log_z = _normalizers(logits, options)
        picked, _ = _target_logits(logits, targets_part, options)
        scores = jnp.stack([picked - log_z, log_z], -1)
        return carry, _own_rows(scores, options)

    _, scores = _over_chunks(score, (), (x, targets), options)
    return _from_chunks(scores, x, options)


def _scores_forward(x, kernel, targets, options: LossOptions):
    scores = _target_scores(x, kernel, targets, options)
    return scores, (x, kernel, targets, scores)


def _scores_backward(options: LossOptions, residuals, cotangents):
    x, kernel, targets, scores = residuals
    head = _gathered(kernel, x.dtype, options)

    def add(dhead, part):
        x_part, targets_part, scores_part, slopes = part
        logits, slope = _logits(x_part, head, options)
        _, hit = _target_logits(logits, targets_part, options)
        of_target = slopes[..., :1]
        of_log_z = slopes[..., 1:]
        probability = jnp.exp(logits - scores_part[..., 1:])
        dlogits = probability * (of_log_z - of_target) + jnp.where(hit, of_target, 0)
        dx, product = _pull_chunk(x_part, dlogits, slope, head, options)
        return dhead + product, dx

    start = _zero_head(kernel.shape, options)
    arrays = (x, targets, scores, cotangents)
    dhead, dx = _over_chunks(add, start, arrays, options)
    dx, gradient = _finished(dx, dhead, x, kernel, options)
    return dx, gradient, None


_target_scores.defvjp(_scores_forward, _scores_backward)


def _over_batch_shards(dhead, dims, options: LossOptions):
    """Returns the head's gradient [dims], the sum of what batch shards have: [(G,)
    *dims].
    """
    now = execution.current()
    if options.parts > 1:
        return _in_parts_over_batch_shards(dhead, options)
    if not options.group or now.mesh is None or now.platform != "tpu":
        return execution.scatter(
            dhead.sum(0) if options.group else dhead, options.names
        )
    rows = now.rules.activation(("tokens",), options.group)
    spec = P(*rows, *now.rules.computed(options.names, dims))
    return sum_in_shards(
        lambda own: own[0], (dhead,), (spec,), rows, options.names, dims
    )


def _over_chunks(add, start, arrays, options: LossOptions):
    """Returns `add` folded over chunks [(G,) R, ...] of the arrays [batch, S, ...]."""
    length = arrays[0].shape[1]

    def one(carry, start):
        parts = [
            jax.lax.dynamic_slice_in_dim(a, start, options.chunk, axis=1)
            for a in arrays
        ]
        x, *labels = (
            part.reshape(*options.group, -1, *part.shape[2:]) for part in parts
        )
        return add(carry, [_all_rows(part, options) for part in (_named(x), *labels)])

    if options.chunk == length:
        carry, out = one(start, 0)
        return carry, jax.tree.map(lambda y: y[None], out)
    return jax.lax.scan(one, start, jnp.arange(0, length, options.chunk))


def _logits(x, head, options: LossOptions):
    """Returns float32 logits [(G,) R, V], and their slope under the soft cap (None
    without).
    """
    logits = jnp.einsum(
        _equation("grd,dv->grv", options), x, head, preferred_element_type=jnp.float32
    )
    logits = execution.shard(logits, *_row_names(options), _vocabulary(options))
    if not options.softcap:
        return logits, None
    squashed = jnp.tanh(logits / options.softcap)
    return options.softcap * squashed, 1 - squashed**2


def _score(logits, targets, weights, options: LossOptions):
    """Computes the loss sum, the z sum and d(loss + z) / d logits, all float32."""
    exponentials, total, log_z = _normalizers(logits, options)
    picked, hit = _target_logits(logits, targets, options)
    loss = jnp.sum(weights * (log_z - picked))
    z = jnp.sum(weights * options.z_loss * log_z**2)
    factor = weights * (1 + 2 * options.z_loss * log_z)
    of_targets = jnp.where(hit, weights[..., None], 0)
    return loss, z, exponentials * (factor[..., None] / total) - of_targets


def _normalizers(
    logits: jax.Array, options: LossOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes what makes probabilities of logits, float32.

    Returns:
      Exponentials of the logits, relative to the largest one; their sum [..., 1]; the
      logarithm Z of the sum of the logits' own exponentials [...].
    """
    top = _over_parts(jax.lax.pmax, logits.max(-1, keepdims=True), options)
    exponentials = jnp.exp(logits - top)
    total = exponentials.sum(-1, keepdims=True)
    total = _over_parts(execution.sum_over, total, options)
    return exponentials, total, (jnp.log(total) + top)[..., 0]


def _target_logits(logits, targets, options: LossOptions):
    """Returns the targets' logits, and where in this part of the vocabulary
    they stand.
    """
    if options.axis is not None:
        targets = targets - jax.lax.axis_index(options.axis) * logits.shape[-1]
    hit = targets[..., None] == jax.lax.broadcasted_iota(
        jnp.int32, logits.shape, logits.ndim - 1
    )
    if not execution.current().manual:
        return jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")[
            ..., 0
        ], hit
    # Not by index: XLA's partitioner cannot split a gather in a region that is manual
    # over some axes.
    return _over_parts(
        execution.sum_over, jnp.where(hit, logits, 0).sum(-1), options
    ), hit


def _over_parts(reduce, x, options: LossOptions):
    """Returns x reduced over the stages that share out the vocabulary, if they do."""
    return x if options.axis is None else reduce(x, options.axis)


def _equation(equation: str, options: LossOptions) -> str:
    """Returns the einsum for a head [D, V] or a table [V, D], without G if there is one
    shard.
    """
    equation = equation.replace("dv", "vd") if options.tied else equation
    return equation if options.group else equation.replace("g", "")


def _named(x):
    """Returns rows [(G,) R, D] constrained to their shards."""
    return execution.shard(x, *("tokens", None, None)[-x.ndim :])


def _head_named(dhead, options: LossOptions):
    return execution.shard(dhead, *_row_names(options)[:-1], *_head_dims(options))


def _head_dims(
    options: LossOptions, width: str | None = None
) -> tuple[str | None, ...]:
    """Returns the names of the head's dims as it is computed with."""
    return (
        (_vocabulary(options), width) if options.tied else (width, _vocabulary(options))
    )


def _row_names(options: LossOptions) -> tuple[str | None, ...]:
    """Returns the names of [(G,) R] of a chunk."""
    if options.parts > 1:
        return "batch", None
    return ("tokens", None)[-1 - len(options.group) :]


def _vocabulary(options: LossOptions) -> str:
    return "vocab_of_part" if options.parts > 1 else "vocab"


# --- a vocabulary that the devices of a sequence share out ----------------------------

# Whole on each of them, the head and its gradient in float32 would be the largest
# arrays of a step that has few samples. So they score the rows of all c of them
# together, each by its c-th of the vocabulary: as much work and as many logits. Rows
# cross devices for it, and less of the head does.


def _parts_of_vocabulary(vocabulary: int, parts: int) -> int:
    """Counts how many devices of a sequence share out the vocabulary: all, or one if
    it does not divide.
    """
    return (
        1 if vocabulary % (parts * execution.current().axis_size("tensor")) else parts
    )


def _sums(options: LossOptions) -> tuple[int, ...]:
    """Returns the dim of separate sums of the head's gradient: (G,), or () if there is
    one.
    """
    return (options.group[0] // options.parts,) if options.parts > 1 else options.group


def _gathered(kernel, dtype, options: LossOptions):
    """Returns the head as a chunk is scored with."""
    if options.parts == 1:
        return execution.gather(kernel, options.names, dtype)
    now = execution.current()
    head = now.lay_out(kernel.astype(dtype), Rules.stored, options.names)
    if now.splits_width(options.names, zero=3):
        # One axis after another changes places, or XLA's partitioner would gather all
        # of it.
        head = execution.shard(head, *_head_dims(options, "width_of_part"))
    return execution.shard(head, *_head_dims(options))


def _in_parts_over_batch_shards(dhead, options: LossOptions):
    """Returns the head's gradient, the sum of [G / c, *dims], laid out as gradients
    are.
    """
    now = execution.current()
    dims = dhead.shape[1:]
    width = "width_of_part" if now.splits_width(options.names, zero=2) else None
    own = now.rules.activation(_head_dims(options, width), dims)
    if now.mesh is None or now.platform != "tpu":
        total = now.constrain(dhead.sum(0), own)
    else:
        rows = now.rules.activation(("batch", *_head_dims(options)), dhead.shape)
        axes = sharding.axes_in(rows[0])
        dim = 1 if options.tied else 0
        over = sharding.axes_in(own[dim])

        def local(own_sum):
            total = own_sum[0]
            if over:
                total = jax.lax.psum_scatter(
                    total, over, scatter_dimension=dim, tiled=True
                )
            rest = [axis for axis in axes if axis not in over]
            return jax.lax.psum(total, rest) if rest else total

        total = execution.per_device(local, rows, own)(dhead)
    return execution.scatter(total, options.names)


def _all_rows(part, options: LossOptions):
    """Returns [(G,) R, ...] with the rows of all devices of a sequence on each of them,
    [G / c, c R, ...].
    """
    if options.parts == 1:
        return part
    part = part.reshape(*_sums(options), -1, *part.shape[2:])
    return execution.shard(part, *_row_names(options), *(None,) * (part.ndim - 2))


def _own_rows(x, options: LossOptions):
    """Returns the inverse of `_all_rows`, of parts of a sum over the vocabulary."""
    if options.parts > 1:
        x = execution.shard(x, "batch", "sequence", None)
        x = x.reshape(*options.group, -1, x.shape[2])
    return _named(x)
