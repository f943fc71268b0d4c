"""Sharding of an optimizer's state: each leaf like the parameter it belongs to."""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey


def state_specs(
    abstract_opt_state: optax.OptState,
    abstract_params: optax.Params,
    param_specs: optax.Params,
) -> optax.OptState:
    """Computes a PartitionSpec for each leaf of an optimizer state.

    A leaf whose path ends in a parameter's path belongs to that parameter. If it has
    the parameter's shape, it gets its spec. If it lacks one dim (Adafactor's v_row and
    v_col), it gets the spec without that dim. All other leaves (counters, coefficients,
    placeholders) are whole on every device.

    Args:
      abstract_opt_state: `jax.eval_shape(optimizer.init, abstract_params)`, or arrays.
      abstract_params: nested dict.
      param_specs: PartitionSpecs in the same structure. With ZeRO 1 or 2 they are the
        specs of the moments.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    state_shapes = {
        path: x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(abstract_opt_state)
    }
    whole = PartitionSpec()
    owners = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def spec_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        # The longest suffix first: a parameter's path may end in another parameter's
        # path.
        starts = range(len(path))
        start = next((i for i in starts if path[i:] in owners), None)
        if start is None:
            return whole
        shape: tuple[int, ...]
        spec: PartitionSpec
        shape, spec = owners[path[start:]]
        if leaf.shape == shape:
            return spec
        field = getattr(path[start - 1], "name", "") if start else ""
        if field not in ("v_row", "v_col") or leaf.ndim != len(shape) - 1:
            return whole
        # v_row lacks the largest dim that is no stack dim, v_col the second largest. Of
        # equal dims it is the last one. In a square matrix both have the same shape, so
        # v_col lacks another dim than v_row.
        row_path = (*path[: start - 1], GetAttrKey("v_row"), *path[start:])
        missing = _missing_dim(shape, state_shapes[row_path])
        if field == "v_col":
            missing = _missing_dim(shape, leaf.shape, other_than=missing)
        if missing is None:
            return whole
        entries = tuple(spec) + (None,) * (len(shape) - len(spec))
        return PartitionSpec(*entries[:missing], *entries[missing + 1 :])

    return jax.tree_util.tree_map_with_path(spec_of, abstract_opt_state)


def _missing_dim(
    shape: tuple[int, ...],
    shape_without: tuple[int, ...],
    other_than: int | None = None,
) -> int | None:
    """Finds the last dim of `shape` that is missing in `shape_without`, if any.

    Args:
      shape: of a parameter.
      shape_without: of its state, which lacks a dim.
      other_than: a dim that is not an answer.
    """
    for dim in reversed(range(len(shape))):
        without = shape[:dim] + shape[dim + 1 :]
        if dim != other_than and without == shape_without:
            return dim
    return None
