"""Experts on TPU: grouped matmuls and the gradients of hidden rows.

The matmuls are jax's megablox kernels. The gradients have a Pallas kernel of their own.

Letters: `R` rows, `E` groups (experts), `K`, `N` a kernel's dims, `F` feed-forward.
"""

import functools
import importlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core
from jax.typing import DTypeLike

from jaxdist.ops.experts import feed_forward
from jaxdist.ops.experts.feed_forward import Activation, HiddenGradients
from jaxdist.ops.experts.grouped_matmul import share_of_group
from jaxdist.parallel import execution

# The package exports a function `gmm`, which hides the module of that name.
_kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

LANES = 128
MAX_TILE = 2048  # of a kernel's dims
# VMEM that a kernel may use, of the scoped VMEM that libtpu grants by default: 16 MiB,
# or 32 MiB from Trillium on. Mosaic needs the remainder.
VMEM_BYTES = 12 * 2**20
VMEM_BYTES_FROM_V6 = 26 * 2**20


def _vmem_bytes() -> int:
    mesh = execution.current().mesh
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if re.search(r"TPU ?v?[67]", device.device_kind):
        return VMEM_BYTES_FROM_V6
    return VMEM_BYTES


def row_tile(rows: int, groups: int, vmem: int) -> int:
    """Chooses the rows of a tile: 128 to 1024, up to 1/8 of a group's even share.

    A tile is computed once for each group that has rows in it. So a group wastes up to
    a tile of work.
    """
    most = 512 if vmem == VMEM_BYTES else 1024
    return share_of_group(rows, groups, least=LANES, most=most)


def allocated(rows: int, groups: int) -> int:
    """Computes the rows to allocate, a multiple of the row tile."""
    tile = row_tile(rows, groups, _vmem_bytes())
    return -(-rows // tile) * tile


def _row_tiles(rows: int, groups: int, vmem: int) -> list[int]:
    """Lists row tiles that divide the rows, the preferred one first."""
    tile = row_tile(rows, groups, vmem)
    # Rows of other callers than `allocated` may need a smaller tile.
    while rows % tile:
        tile //= 2
    return [size for size in (tile, tile // 2, tile // 4) if size >= LANES] or [tile]


def _tiles(dim: int) -> list[int]:
    """Lists the multiples of `LANES` that divide a dim; if none does, another tile."""
    divisors = [tile for tile in range(LANES, MAX_TILE + 1, LANES) if dim % tile == 0]
    return divisors or [min(512, -(-dim // LANES) * LANES)]


@functools.lru_cache
def forward_tiling(
    R: int, K: int, N: int, E: int, itemsize: int, vmem: int
) -> tuple[int, int, int]:
    """Chooses the tiles of a matmul that move the fewest bytes.

    Args:
      R: rows of x [R, K].
      K: contracted dim.
      N: columns of the kernels [E, K, N].
      E: number of groups.
      itemsize: bytes of an element.
      vmem: VMEM that the kernel may use, in bytes.

    Returns:
      The sizes of a tile in R, K and N.
    """

    def used(tm: int, tk: int, tn: int) -> int:
        blocks = tm * tk + tk * tn + tm * tn
        # The sum, the mask and the stored result are float32.
        return 2 * blocks * itemsize + 3 * tm * tn * 4

    def moved(tm: int, tk: int, tn: int) -> float:
        # If a tile holds whole columns of a kernel, it stays in VMEM from one row tile
        # to the next.
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
    """Chooses the tiles of each group's x^T dy that move the fewest bytes.

    Args:
      R: rows of x [R, K] and dy [R, N].
      K: columns of x.
      N: columns of dy.
      E: number of groups.
      itemsize: bytes of an element.
      vmem: VMEM that the kernel may use, in bytes.
      adds: whether the result is added to a total.

    Returns:
      The sizes of a tile in R, K and N.
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
    tilings: Iterable[tuple[int, int, int]],
    used: Callable[[int, int, int], int],
    moved: Callable[[int, int, int], float],
    vmem: int,
) -> tuple[int, int, int]:
    """Chooses the tiling that fits and moves the least, with the fewest steps."""
    candidates = list(tilings)
    fitting = [tiling for tiling in candidates if used(*tiling) <= vmem]
    if not fitting:
        fitting = [min(candidates, key=lambda tiling: used(*tiling))]
    return min(fitting, key=lambda tiling: (moved(*tiling), -math.prod(tiling)))


def _scope(spare: float) -> AbstractContextManager[None]:
    """Names operations for the planner: rows, relative to those of an even load."""
    return jax.named_scope(f"even_load_rows_x_{spare:g}")


def matmul(
    x: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    spare: float = 1.0,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each row of x with the kernel of its group.

    Args:
      x: [R, K]; transposed: [R, N].
      kernels: [E, K, N].
      sizes: [E] rows of each group.
      transposed: whether the kernels are transposed.
      spare: rows of x, relative to the rows of an even load.
      interpret: whether the kernel is emulated on CPU.

    Returns:
      [R, N]; transposed: [R, K].
    """
    E, K, N = kernels.shape
    if transposed:
        K, N = N, K
    tiling = forward_tiling(
        R=x.shape[0],
        K=K,
        N=N,
        E=E,
        itemsize=x.dtype.itemsize,
        vmem=_vmem_bytes(),
    )
    with _scope(spare):
        y: jax.Array = _kernels.gmm(
            x,
            kernels,
            sizes.astype(jnp.int32),
            preferred_element_type=x.dtype,
            tiling=tiling,
            transpose_rhs=transposed,
            interpret=interpret,
        )
    return y


def kernel_gradient(
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    total: jax.Array | None,
    dtype: DTypeLike,
    *,
    spare: float = 1.0,
    interpret: bool = False,
) -> jax.Array:
    """Adds each group's sum of x^T dy to a total.

    Args:
      x: [R, K].
      dy: [R, N].
      sizes: [E] rows of each group.
      total: [E, K, N]; None: zeros.
      dtype: dtype of the result.
      spare: rows of x, relative to the rows of an even load.
      interpret: whether the kernel is emulated on CPU.

    Returns:
      [E, K, N].
    """
    R, K = x.shape
    (E,) = sizes.shape
    tiling = gradient_tiling(
        R=R,
        K=K,
        N=dy.shape[1],
        E=E,
        itemsize=x.dtype.itemsize,
        vmem=_vmem_bytes(),
        adds=total is not None,
    )
    with _scope(spare):
        gradient: jax.Array = _kernels.tgmm(
            x.T,
            dy,
            sizes.astype(jnp.int32),
            preferred_element_type=jnp.dtype(dtype),
            tiling=tiling,
            existing_out=total,
            interpret=interpret,
        )
    return gradient


# --- hidden rows ----------------------------------------------------------------------

NAME = "experts_hidden_gradients"  # of the kernel; the planner looks for it
MAX_WIDTH = 1024  # columns of a block
ROWS = (256, 128, 64, 32, 16, 8)  # rows of a block, the preferred number first

# Primitives that Mosaic, the compiler of TPU kernels, supports for float32.
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
def _can_compile(activation: Activation) -> bool:
    """Checks whether Mosaic can compile an activation and its gradient."""
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
    """Computes the result of `feed_forward.hidden_gradients` in one kernel.

    The kernel reads each array once and writes over it. XLA makes a loop for each
    result. Each of its loops reads all three arrays and holds up to five, which takes
    as much memory as everything else in a layer.

    Arguments and result are those of `feed_forward.hidden_gradients`, which computes
    arrays and activations that the kernel does not support.
    """
    R, F = dh.shape
    floats = jnp.issubdtype(dh.dtype, jnp.floating)
    rows = next((size for size in ROWS if R % size == 0), 0)
    width = next((size for size in range(MAX_WIDTH, 0, -LANES) if F % size == 0), 0)
    if (
        len(products) != 2
        or not (rows and width and floats)
        or not _can_compile(activation)
    ):
        return feed_forward.hidden_gradients(activation, products, dh, weights)

    def kernel(
        weights: Any,
        gate: Any,
        up: Any,
        dh: Any,
        dgate: Any,
        dup: Any,
        weighted: Any,
        dweights: Any,
    ) -> None:
        wide_gate, wide_up, wide_dh = (
            block[...].astype(jnp.float32) for block in (gate, up, dh)
        )
        h, pull_back = jax.vjp(
            lambda *products: feed_forward.hidden(activation, *products),
            wide_gate,
            wide_up,
        )
        wide_dgate, wide_dup = pull_back(wide_dh * weights[...])
        dgate[...] = wide_dgate.astype(dgate.dtype)
        dup[...] = wide_dup.astype(dup.dtype)
        weighted[...] = (h * weights[...]).astype(weighted.dtype)
        terms = h * wide_dh

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            dweights[...] = jnp.zeros_like(dweights)

        dweights[...] += sum(
            terms[:, lane : lane + LANES] for lane in range(0, width, LANES)
        )

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
