"""Where an optimizer's state lies: each leaf as the parameter that it belongs to."""

import jax
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey


def state_specs(
    abstract_opt_state: optax.OptState,
    abstract_params: optax.Params,
    param_specs: optax.Params,
) -> optax.OptState:
    """Returns a PartitionSpec for each leaf of an optimizer state.

    A leaf whose path ends in a parameter's path belongs to that parameter: with its
    shape it gets its spec, with one dim dropped (Adafactor's v_row, v_col) the spec
    without that dim. All other leaves (counters, coefficients, placeholders) are whole
    on every device.

    Args:
      abstract_opt_state: `jax.eval_shape(optimizer.init, abstract_params)`, or arrays.
      abstract_params: nested dict.
      param_specs: same structure; with ZeRO 1 or 2 the specs that moments shall have.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    state_shapes = {
        path: x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(abstract_opt_state)
    }
    owners = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def spec_of(path: tuple, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        # The longest suffix first: a parameter's path may end in another parameter's
        # path.
        start = next(
            (start for start in range(len(path)) if path[start:] in owners), None
        )
        if start is None:
            return PartitionSpec()
        shape, spec = owners[path[start:]]
        if leaf.shape == shape:
            return spec
        field = getattr(path[start - 1], "name", "") if start else ""
        if field not in ("v_row", "v_col") or leaf.ndim != len(shape) - 1:
            return PartitionSpec()
        # v_row has lost the largest dim that is no stack's, v_col the second largest;
        # of equal ones the last. What it lost is what makes their shapes those of the
        # parameter; `row` tells square matrices' apart.
        row_path = tuple(
            GetAttrKey("v_row") if i == start - 1 else key for i, key in enumerate(path)
        )
        row = _last_lost(shape, state_shapes[row_path])
        dropped = row if field == "v_row" else _last_lost(shape, leaf.shape, but=row)
        if dropped is None:
            return PartitionSpec()
        entries = tuple(spec) + (None,) * (len(shape) - len(spec))
        return PartitionSpec(*entries[:dropped], *entries[dropped + 1 :])

    return jax.tree_util.tree_map_with_path(spec_of, abstract_opt_state)


def _last_lost(
    shape: tuple[int, ...], left: tuple[int, ...], but: int | None = None
) -> int | None:
    """Returns the last dim of `shape`, `but` left out, without which it is `left`;
    None: there is none.
    """
    dims = (dim for dim in reversed(range(len(shape))) if dim != but)
    return next((dim for dim in dims if shape[:dim] + shape[dim + 1 :] == left), None)
