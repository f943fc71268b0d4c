"""Experts on TPU: grouped products by the megablox kernels of jax, and a kernel for the
gradients of hidden rows.

Letters: `R` rows, `E` groups (experts), `K`, `N` a kernel's dims, `F` feed-forward.
"""

import functools
import importlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core

from jaxdist.ops.experts import feed_forward
from jaxdist.ops.experts.feed_forward import Activation, HiddenGradients
from jaxdist.parallel import execution

# The package exports a function `gmm`, which hides the module of that name.
_kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

LANES = 128
MAX_TILE = 2048  # of a kernel's dims
# What a kernel may take of the 16 MiB of scoped VMEM that libtpu grants by default, or
# of the 32 MiB from Trillium on; the rest is what Mosaic itself needs.
VMEM_BYTES = 12 * 2**20
VMEM_BYTES_FROM_V6 = 26 * 2**20


def _vmem_bytes() -> int:
    mesh = execution.current().mesh
    kind = (
        mesh.devices.flat[0].device_kind
        if mesh is not None
        else jax.devices()[0].device_kind
    )
    return VMEM_BYTES_FROM_V6 if re.search(r"TPU ?v?[67]", kind) else VMEM_BYTES


def row_tile(rows: int, groups: int, vmem: int) -> int:
    """Returns the rows of a tile: 128 to 1024, an eighth of a group's even share.

    A tile is visited once for each group in it, so groups of few tiles cost up to a
    tile each in vain.
    """
    share = max(1, rows // (8 * groups))
    most = 512 if vmem == VMEM_BYTES else 1024
    return min(most, max(LANES, 2 ** int(math.log2(share))))


def allocated(rows: int, groups: int) -> int:
    """Returns the rows to allocate, a multiple of the row tile."""
    tile = row_tile(rows, groups, _vmem_bytes())
    return -(-rows // tile) * tile


def _row_tiles(rows: int, groups: int, vmem: int) -> list[int]:
    """Returns tiles that divide the rows, the one to prefer first."""
    tile = row_tile(rows, groups, vmem)
    # rows were rounded up for a tile of this size or the next larger one
    while rows % tile:
        tile //= 2
    return [size for size in (tile, tile // 2, tile // 4) if size >= LANES] or [tile]


def _tiles(dim: int) -> list[int]:
    """Returns the multiples of a vector's lanes that divide a dim; if none does, one
    that does not.
    """
    divisors = [tile for tile in range(LANES, MAX_TILE + 1, LANES) if dim % tile == 0]
    return divisors or [min(512, -(-dim // LANES) * LANES)]


@functools.lru_cache
def forward_tiling(
    R: int, K: int, N: int, E: int, itemsize: int, vmem: int
) -> tuple[int, int, int]:
    """Returns the tiles (rows, K, N) of x [R, K] times kernels [E, K, N] that move the
    fewest bytes.
    """

    def used(tm: int, tk: int, tn: int) -> int:
        blocks = tm * tk + tk * tn + tm * tn
        # sum, mask and what is stored, in float32
        return 2 * blocks * itemsize + 3 * tm * tn * 4

    def moved(tm: int, tk: int, tn: int) -> float:
        # A whole column of a kernel stays in VMEM from one row tile to the next.
        kernels = E if tk >= K else R / tm + E
        return R * K * math.ceil(N / tn) + kernels * K * N

    return _best(
        itertools.product(_row_tiles(R, E, vmem), _tiles(K), _tiles(N)),
        used,
        moved,
        vmem,
    )


@functools.lru_cache
def gradient_tiling(
    R: int, K: int, N: int, E: int, itemsize: int, vmem: int, adds: bool = False
) -> tuple[int, int, int]:
    """Returns the tiles (rows, K, N) of x^T dy by group, x [R, K] and dy [R, N]; adds:
    to a total.
    """

    def used(tm: int, tk: int, tn: int) -> int:
        operands = tm * (tk + tn)
        return 2 * operands * itemsize + 2 * operands * 4 + (3 + 2 * adds) * tk * tn * 4

    def moved(tm: int, tk: int, tn: int) -> float:
        return R * (K * math.ceil(N / tn) + N * math.ceil(K / tk))

    return _best(
        itertools.product(_row_tiles(R, E, vmem), _tiles(K), _tiles(N)),
        used,
        moved,
        vmem,
    )


def _best(
    tilings: Iterable[tuple[int, int, int]], used, moved, vmem: int
) -> tuple[int, int, int]:
    """Returns the tiling that moves least of those that fit, of the fewest steps."""
    every = list(tilings)
    fitting = [tiling for tiling in every if used(*tiling) <= vmem] or [
        min(every, key=lambda t: used(*t))
    ]
    return min(fitting, key=lambda tiling: (moved(*tiling), -math.prod(tiling)))


def _scope(spare: float):
    """Tells the planner how many times the rows that an even load fills there are."""
    return jax.named_scope(f"even_load_rows_x_{spare:g}")


def matmul(
    x,
    kernels,
    sizes,
    *,
    transposed: bool = False,
    spare: float = 1.0,
    interpret: bool = False,
) -> jax.Array:
    """Returns each row of x [R, K] times its group's kernel [E, K, N]; transposed: x
    [R, N] -> [R, K].
    """
    E, K, N = kernels.shape
    K, N = (N, K) if transposed else (K, N)
    with _scope(spare):
        return _kernels.gmm(
            x,
            kernels,
            sizes.astype(jnp.int32),
            preferred_element_type=x.dtype,
            tiling=forward_tiling(x.shape[0], K, N, E, x.dtype.itemsize, _vmem_bytes()),
            transpose_rhs=transposed,
            interpret=interpret,
        )


def kernel_gradient(
    x, dy, sizes, total, dtype, *, spare: float = 1.0, interpret: bool = False
) -> jax.Array:
    """Returns total [E, K, N] + the sums of x^T dy over each group's rows, in dtype."""
    R, K = x.shape
    (E,) = sizes.shape
    tiling = gradient_tiling(
        R, K, dy.shape[1], E, x.dtype.itemsize, _vmem_bytes(), total is not None
    )
    with _scope(spare):
        return _kernels.tgmm(
            x.T,
            dy,
            sizes.astype(jnp.int32),
            preferred_element_type=jnp.dtype(dtype),
            tiling=tiling,
            existing_out=total,
            interpret=interpret,
        )


# --- hidden rows ----------------------------------------------------------------------

NAME = "experts_hidden_gradients"  # of the kernel, which the planner looks for
MAX_WIDTH = 1024
ROWS = (256, 128, 64, 32, 16, 8)

# Primitives that the TPU's kernel compiler has for float32.
_ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "convert_element_type",
        "copy",
        "copy_p",
        "custom_jvp_call",
        "div",
        "exp",
        "exp2",
        "ge",
        "gt",
        "integer_pow",
        "jit",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "neg",
        "pjit",
        "select_n",
        "sign",
        "square",
        "sub",
        "tanh",
        "broadcast_in_dim",
    ]
)


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
                yield from _primitives(getattr(value, "jaxpr", value))


@functools.lru_cache
def _in_kernel(activation: Activation) -> bool:
    """Checks whether the kernel compiler has all that an activation and its gradient
    are made of.
    """
    rows = jnp.zeros((8, LANES), jnp.float32)
    traced = jax.make_jaxpr(lambda x, dy: jax.vjp(activation, x)[1](dy))(rows, rows)
    return not traced.consts and _ELEMENTWISE.issuperset(_primitives(traced.jaxpr))


def hidden_gradients(
    activation: Activation,
    products: Sequence[jax.Array],
    dh: jax.Array,
    weights: jax.Array,
    *,
    interpret: bool = False,
) -> HiddenGradients:
    """Computes what `feed_forward.hidden_gradients` does, in one kernel.

    It reads each array once and writes over it. XLA makes a loop for each result, which
    reads all three arrays and holds up to five; this is as much memory as the rest of a
    layer takes.
    """
    R, F = dh.shape
    floats = jnp.issubdtype(dh.dtype, jnp.floating)
    rows = next((size for size in ROWS if R % size == 0), 0)
    width = next((size for size in range(MAX_WIDTH, 0, -LANES) if F % size == 0), 0)
    if (
        len(products) != 2
        or not (rows and width and floats)
        or not _in_kernel(activation)
    ):
        return feed_forward.hidden_gradients(activation, products, dh, weights)

    def kernel(weights, gate, up, dh, dgate, dup, weighted, dweights) -> None:
        gate_, up_, dh_ = (a[...].astype(jnp.float32) for a in (gate, up, dh))
        h, of_products = jax.vjp(
            lambda *products: feed_forward.hidden(activation, *products), gate_, up_
        )
        dgate_, dup_ = of_products(dh_ * weights[...])
        dgate[...] = dgate_.astype(dgate.dtype)
        dup[...] = dup_.astype(dup.dtype)
        weighted[...] = (h * weights[...]).astype(weighted.dtype)
        own = h * dh_

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            dweights[...] = jnp.zeros_like(dweights)

        dweights[...] += sum(own[:, at : at + LANES] for at in range(0, width, LANES))

    block = pl.BlockSpec((rows, width), lambda i, j: (i, j))
    like = jax.ShapeDtypeStruct(dh.shape, dh.dtype)
    *dproducts, weighted, dweights = pl.pallas_call(
        kernel,
        grid=(R // rows, F // width),
        in_specs=[pl.BlockSpec((rows, 1), lambda i, j: (i, 0)), block, block, block],
        out_specs=[
            block,
            block,
            block,
            pl.BlockSpec((rows, LANES), lambda i, j: (i, 0)),
        ],
        out_shape=[like, like, like, jax.ShapeDtypeStruct((R, LANES), jnp.float32)],
        input_output_aliases={1: 0, 2: 1, 3: 2},
        name=NAME,
        interpret=interpret,
    )(weights[:, None], *products, dh)
    return HiddenGradients(tuple(dproducts), weighted, dweights.sum(-1))
