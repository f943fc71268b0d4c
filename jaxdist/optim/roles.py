"""Roles of parameters in an optimizer, from their logical names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any, Literal

import jax
import optax

from jaxdist.optim.config import OptimizerConfig
from jaxdist.protocols.dim_names import OUTPUTS, STACKED, STACKS, Names

# leading dims with these names count separate parameters
_STACK_NAMES = frozenset({"experts", *STACKS})
# dims that form one dim with a head_dim after them
_HEAD_NAMES = frozenset({"heads", "kv_heads"})
_TABLE_NAMES = frozenset({"positions", *OUTPUTS})


@dataclass(frozen=True)
class Role:
    """The role of a parameter in an optimizer.

    Axes are negative, so that they fit with any number of stack dims.
    """

    kind: Literal["matrix", "embedding", "head", "vector"]
    # number of trailing dims that form one parameter, after the stack dims
    dims: int
    reduction: tuple[int, ...] = ()  # matrix: axes of the inputs, which are summed over
    output: tuple[int, ...] = ()  # matrix: axes of the outputs
    # logical names of the dims, with the stack dims of a pipeline; () = none are known
    names: Names = ()


def role_of(path: Sequence[str], shape: Sequence[int], names: Names | None) -> Role:
    """Determines the role of a parameter.

    Its names decide. Leading stack dims and `experts` count separate parameters, and
    heads with head_dim count as one dim.

    - With fewer than two dims left it is a vector (norm scale, bias).
    - With vocab or positions it is an embedding, or a head if its last dim is an output
      of the model: vocab, score.
    - Everything else is a matrix from all other dims to the last one, since kernels are
      stored with inputs first.

    Without names, a parameter in `blocks` has one stack dim, unless `blocks` is a list.
    If its path contains "embed" it is an embedding, otherwise the last two dims are a
    matrix.

    Args:
      path: keys from the root of the parameters.
      shape: with stack dims.
      names: of the trailing dims; None or empty if unknown.
    """
    if names:
        if len(names) > len(shape):
            raise ValueError(
                f"{'/'.join(path)}: logical names {tuple(names)} for shape "
                f"{tuple(shape)}; give at most one name per dim."
            )
        return _role_from_names(
            tuple(dropwhile(lambda name: name in _STACK_NAMES, names))
        )
    in_list = any(key.isdigit() for key in path)
    is_stacked = bool(path) and path[0] in STACKED and not in_list
    rank = len(shape) - is_stacked
    if rank < 2:
        return Role("vector", max(rank, 0))
    if any("embed" in key.lower() for key in path):
        return Role("embedding", rank)
    return Role("matrix", 2, (-2,), (-1,))


def _role_from_names(names: tuple[str | None, ...]) -> Role:
    """Determines the role of a parameter from its names without stack dims."""
    dims = len(names)
    ends_in_heads = dims > 1 and names[-1] == "head_dim" and names[-2] in _HEAD_NAMES
    output = -2 if ends_in_heads else -1
    if dims + output < 1:
        return Role("vector", dims)
    if _TABLE_NAMES & set(names):
        return Role("head" if names[-1] in OUTPUTS else "embedding", dims)
    return Role("matrix", dims, tuple(range(-dims, output)), tuple(range(output, 0)))


def roles(abstract_params: optax.Params, logical_names: optax.Params) -> optax.Params:
    """Determines the roles of all parameters, as a tree.

    Args:
      abstract_params: arrays or their shapes.
      logical_names: a tuple of names, or None, for each parameter.
    """

    def role(path: Any, leaf: jax.Array, names: Names | None) -> Role:
        return role_of([str(key.key) for key in path], leaf.shape, names)

    return jax.tree_util.tree_map_with_path(role, abstract_params, logical_names)


def with_names(param_roles: optax.Params, names: optax.Params) -> optax.Params:
    """Adds the logical names that parameters have in a step to their roles."""
    return jax.tree.map(
        lambda role, dims: replace(role, names=tuple(dims or ())), param_roles, names
    )


def decay_mask(config: OptimizerConfig, param_roles: optax.Params) -> optax.Params:
    """Creates a tree of bools: whether each parameter has weight decay.

    Matrices and the head have it, and embeddings if they are configured so.
    """
    kinds = {"matrix", "head"}
    if config.decay_embeddings:
        kinds.add("embedding")
    return jax.tree.map(lambda role: role.kind in kinds, param_roles)
