"""The precision policy: what is stored, what is computed in, and the one place for casts.

Masters, optimizer state, gradients and (by default) reductions are float32. Matrix products run in
`precision.compute`. `ops` reads the compute dtype here, so a model's activations take it at the
embedding and keep it: every product casts its kernel to its activations' dtype, norms, softmax and
losses work in float32. Models that don't use `ops` get their parameters cast by `cast`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

FloatName = Literal["float32", "bfloat16"]
_compute: contextvars.ContextVar[jnp.dtype | None] = contextvars.ContextVar("compute", default=None)
_reduce: contextvars.ContextVar[str] = contextvars.ContextVar("reduce", default="float32")


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of storage and of computation."""

    params: FloatName = "float32"  # stored parameters; bfloat16 halves them and loses small updates
    compute: FloatName = "float32"  # matrix products and activations
    reduce: FloatName = "float32"  # kernels' gradients between devices; bfloat16 halves bytes and rounds


@contextlib.contextmanager
def computing_in(dtype: str | jnp.dtype) -> Iterator[None]:
    """Sets the compute dtype for what is traced inside."""
    token = _compute.set(jnp.dtype(dtype))
    try:
        yield
    finally:
        _compute.reset(token)


def compute_dtype(default: jnp.dtype) -> jnp.dtype:
    """Returns the compute dtype in force, or the default (a parameter's own) outside a step."""
    return _compute.get() or jnp.dtype(default)


@contextlib.contextmanager
def reducing_in(dtype: str) -> Iterator[None]:
    """Sets the dtype in which kernels' gradients leave their product and cross devices."""
    token = _reduce.set(dtype)
    try:
        yield
    finally:
        _reduce.reset(token)


def reduce_dtype() -> jnp.dtype:
    """Returns the dtype of `reducing_in`, float32 outside."""
    return jnp.dtype(_reduce.get())


def cast(tree, dtype: str | jnp.dtype):
    """Returns the tree with its floating-point leaves in `dtype`; integers stay."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
