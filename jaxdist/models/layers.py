"""Layers of decoders: normalisation, rotary positions, attention, feed-forward,
dropout.

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
from jaxdist.protocols.model import BlockInfo
from jaxdist.protocols.param_names import Names


def normal(
    rngs: nnx.Rngs, dims: tuple[int, ...], std: float, names: Names
) -> nnx.Param:
    """Returns a float32 parameter ~ N(0, std^2); std 0 gives zeros."""
    value = std * jax.random.normal(rngs.params(), dims) if std else jnp.zeros(dims)
    return nnx.Param(value, logical=names)


class Norm(nnx.Module):
    """Root-mean-square (arXiv:1910.07467) or layer normalisation of the last dims, in
    float32.

    Kind "rms_plus_one" keeps its scale's distance from 1, as Gemma does.
    """

    def __init__(
        self, *dims: int, kind: str, eps: float, names: Names = ("d_model",)
    ) -> None:
        self.kind = kind
        self.eps = eps
        self.rank = len(dims)
        self.scale = nnx.Param(
            jnp.zeros(dims) if kind == "rms_plus_one" else jnp.ones(dims), logical=names
        )
        if kind == "layer":
            self.bias = nnx.Param(jnp.zeros(dims), logical=names)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        axes = tuple(range(-self.rank, 0))
        if self.kind == "layer":
            y = y - y.mean(axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axes, keepdims=True) + self.eps)
        scale = expand_leading(self.scale[...], y)
        y = y * (scale + 1 if self.kind == "rms_plus_one" else scale)
        return (
            y + expand_leading(self.bias[...], y) if self.kind == "layer" else y
        ).astype(x.dtype)


def expand_leading(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the parameter with leading dims of size 1, up to the rank of `like`."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def biased(x: jax.Array, bias: nnx.Param) -> jax.Array:
    """Returns x + bias, added in float32: so the bias's gradient is summed in float32
    too.
    """
    return (x.astype(jnp.float32) + expand_leading(bias[...], x)).astype(x.dtype)


def dropout(
    x: jax.Array,
    rate: float,
    context: BlockInfo,
    site: int,
    dims: Names = ("residual",),
) -> jax.Array:
    """Returns x with a share `rate` of its values dropped and the rest scaled up.

    The mask depends on (step key, layer, site, global sample index) alone, so the same
    values are dropped on any mesh, accumulation or pipeline.

    Args:
      dims: how the dims behind the first are laid out; those beyond are not split.
    """
    if rate == 0 or context.key is None:
        return x
    key = jax.random.fold_in(jax.random.fold_in(context.key, context.layer), site)
    keys = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(
        context.fields["sample"]
    )
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(keys)
    keep = shard(keep, "batch", *dims, *(None,) * (x.ndim - 1 - len(dims)))
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


# --- rotary positions -----------------------------------------------------------------


def rotary_tables(
    positions_BS: jax.Array, frequencies: jax.Array, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns scale * cos and scale * sin [B, S, 1, R/2] in float32 for R/2
    frequencies.
    """
    angles = (
        positions_BS[:, :, None, None].astype(jnp.float32)
        * frequencies[None, None, None, :]
    )
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def rotate(x_BSHN: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns x with the halves of its first R dims rotated (as in Hugging Face's
    Llama, not pairs).

    Tables [B, S, 1, R/2] say how many turn; dims from R on stay.

    TPU tiles are 128 lanes wide: cutting heads of 128 in half and putting them together
    takes 5 % of a step there. A product with a signed permutation, exact in any dtype,
    swaps the halves instead.
    """
    if execution.current().platform == "tpu":
        return _rotate_by_product(x_BSHN, cos, sin)
    R = 2 * cos.shape[-1]
    turning, rest = (
        (x_BSHN, []) if x_BSHN.shape[-1] == R else (x_BSHN[..., :R], [x_BSHN[..., R:]])
    )
    first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    rotated = rotated.astype(x_BSHN.dtype)
    return jnp.concatenate([rotated, *rest], axis=-1) if rest else rotated


@jax.custom_vjp
def _rotate_by_product(x_BSHN: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    N = x_BSHN.shape[-1]
    R = 2 * cos.shape[-1]
    cos, sin = (
        jnp.pad(
            jnp.concatenate([table, table], -1),
            [(0, 0)] * 3 + [(0, N - R)],
            constant_values=still,
        )
        for table, still in ((cos, 1), (sin, 0))
    )
    swapped = jnp.einsum(
        "bshn,nm->bshm",
        x_BSHN,
        _half_turn(N, R, x_BSHN.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=x_BSHN.dtype,
    )
    return (
        x_BSHN.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin
    ).astype(x_BSHN.dtype)


def _half_turn(size: int, turning: int, dtype) -> jax.Array:
    """Returns the matrix [size, size] of (first, second, rest) -> (-second,
    first, 0).
    """
    half = turning // 2
    zero = jnp.zeros((half, half), dtype)
    one = jnp.eye(half, dtype=dtype)
    return jnp.pad(jnp.block([[zero, one], [-one, zero]]), (0, size - turning))


# The transpose of a rotation is the one by minus the angle: exact where autodiff's
# product is not, whose operand would be float32.
_rotate_by_product.defvjp(
    lambda x, cos, sin: (_rotate_by_product(x, cos, sin), (cos, sin)),
    lambda tables, dy: (
        _rotate_by_product(dy, tables[0], -tables[1]),
        *map(jnp.zeros_like, tables),
    ),
)


# --- activations ----------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}


def shard_and_name(x: jax.Array, name: str, *dims: str | None) -> jax.Array:
    """Returns x constrained to its dims' sharding and named for remat policies."""
    return checkpoint_name(shard(x, *dims), name)


def residual(x: jax.Array) -> jax.Array:
    """Returns [B, S, D] constrained as the residual stream is."""
    return shard(x, "batch", "residual", None)


# --- parts of a layer -----------------------------------------------------------------


def project_heads(
    part: Any, x_BSD: jax.Array, kv_heads: str = "kv_heads"
) -> list[jax.Array]:
    """Returns query, key and value [B, S, heads, N] by a part's kernels and, if it has
    them, biases.

    Args:
      kv_heads: logical name of the key's and value's heads.
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
    """Returns the heads' outputs put together, [B, S, D]."""
    (y,) = project(mixed_BSHN, part.out, contract=2)
    y = biased(y, part.out_bias) if hasattr(part, "out_bias") else y
    return shard_and_name(y, "attention_projection", "batch", "residual", None)


def feed_forward(part: Any, x_BSD: jax.Array, activation: str) -> jax.Array:
    """Returns [B, S, D] of a part: gated (arXiv:2002.05202), with biases, if it has the
    parameters.
    """
    kernels = (part.gate, part.up) if hasattr(part, "gate") else (part.up,)
    *gate, up = project(x_BSD, *kernels)
    up = biased(up, part.up_bias) if hasattr(part, "up_bias") else up
    up = shard_and_name(up, "mlp_up", "batch", "sequence", "d_ff")
    gate = [shard_and_name(g, "mlp_gate", "batch", "sequence", "d_ff") for g in gate]
    activate = ACTIVATIONS[activation]
    (y,) = project(activate(gate[0]) * up if gate else activate(up), part.down)
    y = biased(y, part.down_bias) if hasattr(part, "down_bias") else y
    return shard_and_name(y, "mlp_out", "batch", "residual", None)
