"""Layers of transformers: norms, dropout, rotary positions, projections, feed-forward.

Letters: B batch, S sequence, D model, F feed-forward, H heads, K kv heads, N head size,
L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.matmul import project
from jaxdist.parallel import execution
from jaxdist.parallel.execution import shard
from jaxdist.protocols.dim_names import Names
from jaxdist.protocols.model import BlockInfo


def normal(
    rngs: nnx.Rngs,
    dims: tuple[int, ...],
    std: float,
    names: Names,
    *,
    beside_adapters: bool = False,
) -> nnx.Param[jax.Array]:
    """Creates a float32 parameter ~ N(0, std^2); std 0 gives zeros.

    Args:
      rngs: random streams; `params` is used, unless std is 0.
      dims: shape of the parameter.
      std: standard deviation.
      names: logical names of the dims.
      beside_adapters: whether the parameter itself is trained where others have
        adapters, because no trained model has it.
    """
    value = std * jax.random.normal(rngs.params(), dims) if std else jnp.zeros(dims)
    if beside_adapters:
        return nnx.Param(value, logical=names, beside_adapters=True)
    return nnx.Param(value, logical=names)


class Norm(nnx.Module):
    """Normalisation over the last dims, computed in float32.

    Args:
      *dims: sizes of the last dims.
      kind: "rms" is root-mean-square normalisation (arXiv:1910.07467). "rms_plus_one"
        is the same with a scale of 1 + parameter (Gemma). "layer" is layer
        normalisation, with a bias.
      eps: added to the mean square.
      names: logical names of the dims.
    """

    def __init__(
        self, *dims: int, kind: str, eps: float, names: Names = ("d_model",)
    ) -> None:
        self.kind = kind
        self.eps = eps
        self.rank = len(dims)
        initial = jnp.zeros(dims) if kind == "rms_plus_one" else jnp.ones(dims)
        self.scale = nnx.Param(initial, logical=names)
        if kind == "layer":
            self.bias = nnx.Param(jnp.zeros(dims), logical=names)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x; the result has the dtype of x."""
        y = x.astype(jnp.float32)
        axes = tuple(range(-self.rank, 0))
        if self.kind == "layer":
            y = y - y.mean(axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axes, keepdims=True) + self.eps)
        scale = expand_leading(self.scale[...], y)
        if self.kind == "rms_plus_one":
            scale = scale + 1
        y = y * scale
        if self.kind == "layer":
            y = y + expand_leading(self.bias[...], y)
        return y.astype(x.dtype)


def expand_leading(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Adds leading dims of size 1, up to the rank of `like`."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def biased(x: jax.Array, bias: nnx.Param[jax.Array]) -> jax.Array:
    """Adds a bias in float32, so that its gradient is summed in float32, too."""
    return (x.astype(jnp.float32) + expand_leading(bias[...], x)).astype(x.dtype)


def dropout(
    x: jax.Array,
    rate: float,
    context: BlockInfo,
    site: int,
    dims: Names = ("residual",),
    *,
    copies: int = 1,
) -> jax.Array:
    """Drops a share `rate` of the values of x and scales up the others.

    The mask depends only on (step key, layer, site, global sample index). So the same
    values are dropped with any mesh, accumulation or pipeline.

    Args:
      x: [B, ...].
      rate: share of values to drop.
      context: of the layer; without a key nothing is dropped.
      site: number of this call in the layer.
      dims: logical names of the dims of x after the first; dims without a name are not
        split.
      copies: number of copies of the sequence that the second dim has. The same values
        are dropped in each.
    """
    if rate == 0 or context.key is None:
        return x
    key = jax.random.fold_in(jax.random.fold_in(context.key, context.layer), site)
    samples = context.fields["sample"]
    keys = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(samples)
    shape = (x.shape[1] // copies, *x.shape[2:])
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, shape))(keys)
    if copies > 1:
        keep = jnp.concatenate([keep] * copies, 1)
    unnamed = (None,) * (x.ndim - 1 - len(dims))
    keep = shard(keep, "batch", *dims, *unnamed)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


# --- rotary positions -----------------------------------------------------------------


def rotary_tables(
    positions_BS: jax.Array, frequencies: jax.Array, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Computes scale * cos and scale * sin, [B, S, 1, R/2] in float32.

    Args:
      positions_BS: positions of the tokens.
      frequencies: [R/2], in radians per position.
      scale: factor of both tables.
    """
    angles = (
        positions_BS[:, :, None, None].astype(jnp.float32)
        * frequencies[None, None, None, :]
    )
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def rotate(x_BSHN: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R dims of each head; dims from R on stay as they are.

    Dim i is paired with dim i + R/2, as in Hugging Face's Llama, not with its
    neighbour.

    TPU tiles are 128 lanes wide: splitting heads of 128 in halves and joining them
    takes 5 % of a step there. On TPU a matmul with a signed permutation swaps the
    halves instead. It is exact in any dtype.

    Args:
      x_BSHN: queries or keys.
      cos: table [B, S, 1, R/2], see `rotary_tables`.
      sin: like cos.
    """
    if execution.current().platform == "tpu":
        return _rotate_by_matmul(x_BSHN, cos, sin)
    R = 2 * cos.shape[-1]
    is_whole = x_BSHN.shape[-1] == R
    turning = x_BSHN
    if not is_whole:
        turning = x_BSHN[..., :R]
        unturned = x_BSHN[..., R:]
    first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    rotated = rotated.astype(x_BSHN.dtype)
    if is_whole:
        return rotated
    return jnp.concatenate([rotated, unturned], axis=-1)


@jax.custom_vjp
def _rotate_by_matmul(x_BSHN: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    N = x_BSHN.shape[-1]
    R = 2 * cos.shape[-1]

    def widen(table: jax.Array, constant: int) -> jax.Array:
        """Repeats a table for both halves and pads it with a constant to N dims."""
        both = jnp.concatenate([table, table], -1)
        padding = [(0, 0)] * 3 + [(0, N - R)]
        return jnp.pad(both, padding, constant_values=constant)

    cos = widen(cos, 1)
    sin = widen(sin, 0)
    swapped = jnp.einsum(
        "bshn,nm->bshm",
        x_BSHN,
        _half_turn(N, R, x_BSHN.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=x_BSHN.dtype,
    )
    rotated = x_BSHN.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin
    return rotated.astype(x_BSHN.dtype)


def _half_turn(size: int, turning: int, dtype: jnp.dtype) -> jax.Array:
    """Builds the matrix of (first, second, others) -> (-second, first, 0)."""
    half = turning // 2
    zero = jnp.zeros((half, half), dtype)
    one = jnp.eye(half, dtype=dtype)
    return jnp.pad(jnp.block([[zero, one], [-one, zero]]), (0, size - turning))


def _rotate_forward(
    x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rotate_by_matmul(x, cos, sin), (cos, sin)


def _rotate_backward(
    tables: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates the gradient by minus the angle, the transpose of the rotation.

    This is exact. The matmul of autodiff is not, because its operand would be float32.
    """
    cos, sin = tables
    dx = _rotate_by_matmul(dy, cos, -sin)
    return dx, jnp.zeros_like(cos), jnp.zeros_like(sin)


_rotate_by_matmul.defvjp(_rotate_forward, _rotate_backward)


# --- activations ----------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}


def shard_and_name(x: jax.Array, name: str, *dims: str | None) -> jax.Array:
    """Constrains the sharding of x and names it for remat policies.

    Args:
      x: an activation.
      name: see `jax.ad_checkpoint.checkpoint_name`.
      *dims: logical names of the dims of x.
    """
    named: jax.Array = checkpoint_name(shard(x, *dims), name)
    return named


def residual(x: jax.Array) -> jax.Array:
    """Constrains [B, S, D] to the sharding of the residual stream."""
    return shard(x, "batch", "residual", None)


# --- parts of a layer -----------------------------------------------------------------


def project_heads(
    part: Any, x_BSD: jax.Array, kv_heads: str = "kv_heads"
) -> list[jax.Array]:
    """Computes query, key and value, [B, S, heads, N] each.

    Args:
      part: has the kernels `query`, `key` and `value`, and perhaps their biases.
      x_BSD: input of attention.
      kv_heads: logical name of the heads of key and value.
    """
    heads = project(x_BSD, part.query, part.key, part.value)
    if hasattr(part, "query_bias"):
        biases = (part.query_bias, part.key_bias, part.value_bias)
        heads = tuple(biased(y, bias) for y, bias in zip(heads, biases, strict=True))
    dims = {"query": "heads", "key": kv_heads, "value": kv_heads}
    return [
        shard_and_name(y, name, "batch", "sequence", dim, None)
        for y, (name, dim) in zip(heads, dims.items(), strict=True)
    ]


def merge_heads(part: Any, mixed_BSHN: jax.Array) -> jax.Array:
    """Projects the outputs of all heads to the residual stream, [B, S, D]."""
    (y,) = project(mixed_BSHN, part.out, contract=2)
    if hasattr(part, "out_bias"):
        y = biased(y, part.out_bias)
    return shard_and_name(y, "attention_projection", "batch", "residual", None)


def feed_forward(part: Any, x_BSD: jax.Array, activation: str) -> jax.Array:
    """Applies a feed-forward part; it is gated (arXiv:2002.05202) if it has a `gate`.

    Args:
      part: has the kernels `up`, `down` and perhaps `gate`, and perhaps the biases
        `up_bias` and `down_bias`.
      x_BSD: input.
      activation: key of `ACTIVATIONS`.
    """
    kernels = (part.gate, part.up) if hasattr(part, "gate") else (part.up,)
    *gate, up = project(x_BSD, *kernels)
    if hasattr(part, "up_bias"):
        up = biased(up, part.up_bias)
    up = shard_and_name(up, "mlp_up", "batch", "sequence", "d_ff")
    activate = ACTIVATIONS[activation]
    if gate:
        gated = shard_and_name(gate[0], "mlp_gate", "batch", "sequence", "d_ff")
        hidden = activate(gated) * up
    else:
        hidden = activate(up)
    (y,) = project(hidden, part.down)
    if hasattr(part, "down_bias"):
        y = biased(y, part.down_bias)
    return shard_and_name(y, "mlp_out", "batch", "residual", None)
