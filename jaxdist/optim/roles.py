"""What a parameter is to an optimizer, read from its logical names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Literal

import jax
import optax

from jaxdist.optim.config import OptimizerConfig
from jaxdist.protocols.param_names import STACKED, STACKS, Names

_STACK_NAMES = frozenset({"experts", *STACKS})  # leading: that many separate parameters
# joined with a following head_dim to one dim
_HEAD_NAMES = frozenset({"heads", "kv_heads"})
_TABLE_NAMES = frozenset({"vocab", "positions"})


@dataclass(frozen=True)
class Role:
    """What a parameter is to an optimizer; axes are negative, so that any stack dims
    fit.
    """

    kind: Literal["matrix", "embedding", "head", "vector"]
    # trailing dims that form one parameter; the dims before them are stack dims
    dims: int
    reduction: tuple[int, ...] = ()  # matrix: axes that are summed over, the inputs
    output: tuple[int, ...] = ()  # matrix: the other axes
    experts: int | None = None  # the stack axis of experts, which devices may share out


def role_of(path: Sequence[str], shape: Sequence[int], names: Names | None) -> Role:
    """Returns the role of one parameter.

    Names decide. Leading dims without a name, and `experts`, count separate parameters;
    heads and head_dim count as one dim. With fewer than two dims left it is a vector
    (norm scale, bias); vocab or positions make an embedding, or a head if vocab comes
    last; anything else is a matrix from all dims but the last to the last (kernels are
    stored inputs first). Without names, a parameter under `blocks`, if that is no list,
    has one stack dim, a path with "embed" is an embedding, and the last two dims are
    the matrix.

    Args:
      path: keys from the root of the parameters.
      shape: with stack dims.
      names: of the trailing dims; None or empty if unknown.
    """
    if names:
        if len(names) > len(shape):
            given = f"{'/'.join(path)}: logical names {tuple(names)} for shape {tuple(shape)}"
            raise ValueError(f"{given}; give at most one name per dim.")
        role = _role_from_names(
            tuple(dropwhile(lambda name: name in _STACK_NAMES, names))
        )
        stacks = names[: len(names) - role.dims]
        return (
            replace(role, experts=-role.dims - 1)
            if stacks[-1:] == ("experts",)
            else role
        )
    stacked = (
        bool(path) and path[0] in STACKED and not any(key.isdigit() for key in path)
    )
    rank = len(shape) - stacked
    if rank < 2:
        return Role("vector", max(rank, 0))
    if any("embed" in key.lower() for key in path):
        return Role("embedding", rank)
    return Role("matrix", 2, (-2,), (-1,))


def _role_from_names(names: tuple[str | None, ...]) -> Role:
    """Returns the role of a parameter with these names, those of stack dims
    left out.
    """
    dims = len(names)
    joined = dims > 1 and names[-1] == "head_dim" and names[-2] in _HEAD_NAMES
    output = -2 if joined else -1
    if dims + output < 1:
        return Role("vector", dims)
    if _TABLE_NAMES & set(names):
        return Role("head" if names[-1] == "vocab" else "embedding", dims)
    return Role("matrix", dims, tuple(range(-dims, output)), tuple(range(output, 0)))


def roles(abstract_params: optax.Params, logical_names: optax.Params) -> optax.Params:
    """Returns the tree of `Role`s. `logical_names` has a tuple (or None) for each
    parameter.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, names: role_of(
            [str(key.key) for key in path], leaf.shape, names
        ),
        abstract_params,
        logical_names,
    )


def decay_mask(config: OptimizerConfig, param_roles: optax.Params) -> optax.Params:
    """Returns a tree of bools: True for matrices, the head and, if configured,
    embeddings.
    """
    kinds = {"matrix", "head"} | ({"embedding"} if config.decay_embeddings else set())
    return jax.tree.map(lambda role: role.kind in kinds, param_roles)
