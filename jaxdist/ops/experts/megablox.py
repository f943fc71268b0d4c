"""Grouped products on TPU: the megablox kernels of jax itself, with tiles that fit VMEM.

Letters: `R` rows, `E` groups, `K`, `N` a kernel's dims.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp

# The package exports a function `gmm`, which hides the module of that name.
_kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

LANES = 128
MAX_TILE = 2048  # of a kernel's dims
# Scoped VMEM is 16 MiB by default on v4, v5e and v5p; the rest is what Mosaic itself needs.
VMEM_BYTES = 12 * 2**20


def row_tile(rows: int, groups: int) -> int:
    """Returns the rows of a tile: 128 to 512, an eighth of a group's even share.

    A tile is visited once for each group in it, so groups of few tiles cost up to a tile each in vain.
    """
    share = max(1, rows // (8 * groups))
    return min(512, max(LANES, 2 ** int(math.log2(share))))


def allocated(rows: int, groups: int) -> int:
    """Returns the rows to allocate, a multiple of the row tile."""
    tile = row_tile(rows, groups)
    return -(-rows // tile) * tile


def _row_tile(rows: int, groups: int) -> int:
    tile = row_tile(rows, groups)
    while rows % tile:  # rows were rounded up for one of this or a larger size
        tile //= 2
    return tile


def _tiles(dim: int) -> list[int]:
    """Returns the multiples of a vector's lanes that divide a dim; if none does, one that does not."""
    divisors = [tile for tile in range(LANES, MAX_TILE + 1, LANES) if dim % tile == 0]
    return divisors or [min(512, -(-dim // LANES) * LANES)]


@functools.lru_cache
def forward_tiling(R: int, K: int, N: int, E: int, itemsize: int) -> tuple[int, int, int]:
    """Returns the tiles (rows, K, N) of x [R, K] times kernels [E, K, N] that move the fewest bytes."""
    tm = _row_tile(R, E)

    def vmem(tk: int, tn: int) -> int:
        blocks = tm * tk + tk * tn + tm * tn
        return 2 * blocks * itemsize + 3 * tm * tn * 4  # sum, mask and what is stored, in float32

    def moved(tk: int, tn: int) -> float:
        # A kernel's whole column stays in VMEM from row tile to row tile.
        kernels = E if tk >= K else R / tm + E
        return R * K * math.ceil(N / tn) + kernels * K * N

    return (tm, *_best(_tiles(K), _tiles(N), vmem, moved))


@functools.lru_cache
def gradient_tiling(R: int, K: int, N: int, E: int, itemsize: int) -> tuple[int, int, int]:
    """Returns the tiles (rows, K, N) of x^T dy by group, x [R, K] and dy [R, N]."""
    tm = _row_tile(R, E)

    def vmem(tk: int, tn: int) -> int:
        operands = tm * (tk + tn)
        return 2 * operands * itemsize + 2 * operands * 4 + 5 * tk * tn * 4  # sum, total and result

    def moved(tk: int, tn: int) -> float:
        return R * (K * math.ceil(N / tn) + N * math.ceil(K / tk))

    return (tm, *_best(_tiles(K), _tiles(N), vmem, moved))


def _best(tiles_k, tiles_n, vmem, moved) -> tuple[int, int]:
    pairs = [(tk, tn) for tk in tiles_k for tn in tiles_n]
    fitting = [pair for pair in pairs if vmem(*pair) <= VMEM_BYTES] or [min(pairs, key=lambda p: vmem(*p))]
    return min(fitting, key=lambda pair: (moved(*pair), -pair[0] * pair[1]))


def matmul(x, kernels, sizes, *, transposed: bool = False, interpret: bool = False) -> jax.Array:
    """Returns each row of x [R, K] times its group's kernel [E, K, N]; transposed: x [R, N] -> [R, K]."""
    E, K, N = kernels.shape
    K, N = (N, K) if transposed else (K, N)
    tiling = forward_tiling(x.shape[0], K, N, E, x.dtype.itemsize)
    return _kernels.gmm(
        x,
        kernels,
        sizes.astype(jnp.int32),
        preferred_element_type=x.dtype,
        tiling=tiling,
        transpose_rhs=transposed,
        interpret=interpret,
    )


def kernel_gradient(x, dy, sizes, total, dtype, *, interpret: bool = False) -> jax.Array:
    """Returns total [E, K, N] + the sums of x^T dy over each group's rows, in dtype."""
    (R, K), N = x.shape, dy.shape[1]
    return _kernels.tgmm(
        x.T,
        dy,
        sizes.astype(jnp.int32),
        preferred_element_type=jnp.dtype(dtype),
        tiling=gradient_tiling(R, K, N, sizes.shape[0], x.dtype.itemsize),
        existing_out=total,
        interpret=interpret,
    )
