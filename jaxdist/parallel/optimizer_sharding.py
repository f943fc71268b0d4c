"""Where an optimizer's state lies: each leaf as the parameter that it belongs to."""

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec


def state_specs(
    abstract_opt_state: optax.OptState, abstract_params: optax.Params, param_specs: optax.Params
) -> optax.OptState:
    """Returns a PartitionSpec for each leaf of an optimizer state.

    A leaf whose path ends in a parameter's path belongs to that parameter: with its shape it gets
    its spec, with one dim dropped (Adafactor's v_row, v_col) the spec without that dim. All other
    leaves (counters, coefficients, placeholders) are whole on every device.

    Args:
      abstract_opt_state: `jax.eval_shape(optimizer.init, abstract_params)`, or arrays.
      abstract_params: nested dict.
      param_specs: same structure; with ZeRO 1 or 2 the specs that moments shall have.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    owners = {path: (leaf.shape, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)}

    def spec_of(path: tuple, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        # The longest suffix first: a parameter's path may end in another parameter's path.
        start = next((start for start in range(len(path)) if path[start:] in owners), None)
        if start is None:
            return PartitionSpec()
        shape, spec = owners[path[start:]]
        if leaf.shape == shape:
            return spec
        field = getattr(path[start - 1], "name", "") if start else ""
        if field not in ("v_row", "v_col") or leaf.ndim != len(shape) - 1:
            return PartitionSpec()
        # As in optax's `_factored_dims`: v_row has lost the largest dim, v_col the second largest.
        # Only this tells them apart in square matrices.
        dropped = int(np.argsort(shape)[-1 if field == "v_row" else -2])
        if leaf.shape != shape[:dropped] + shape[dropped + 1 :]:
            return PartitionSpec()
        entries = tuple(spec) + (None,) * (len(shape) - len(spec))
        return PartitionSpec(*entries[:dropped], *entries[dropped + 1 :])

    return jax.tree_util.tree_map_with_path(spec_of, abstract_opt_state)
