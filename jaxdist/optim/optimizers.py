"""Optimizers: chains of optax's parts, which treat parameters by their roles.

Every optimizer here is the same chain: a *direction* (a row of `_DIRECTIONS`),
decoupled weight decay for some parameters, and the learning rate as the last factor. So
weight decay always acts as `learning_rate * weight_decay * parameter`, and an update is
linear in the learning rate. Clipping, skipping of non-finite steps and averaging of
parameters belong to the train step, which has the whole gradient.

The role of a parameter follows from its logical names (`role_of`), not from its rank.
Parameters of layers are stacks `[num_layers, ...]`, so a norm scale has rank 2 and a
kernel rank 3 or 4. A stack always counts as that many separate parameters.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from jaxdist.config import ConfigError, trees
from jaxdist.config.patterns import is_found
from jaxdist.config.schema import faults
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.roles import Role, decay_mask, roles
from jaxdist.optim.schedules import Schedule

# optimizers that update each element independently of all others
ELEMENTWISE = ("adamw", "lion", "sgd")


def build_optimizer(
    config: OptimizerConfig,
    schedule: Schedule,
    abstract_params: optax.Params,
    logical_names: optax.Params,
) -> optax.GradientTransformation:
    """Builds the gradient transformation; its `update` needs the parameters.

    State and updates are float32 for parameters of any dtype, except for
    `momentum_dtype`. A second moment in bfloat16 would stop changing, because 1 - b2 is
    below its resolution. `optax.apply_updates` then rounds once, to the parameters'
    dtype.

    Args:
      config: options of the optimizer.
      schedule: from `build_schedule`; called with the number of updates so far.
      abstract_params: nested dict of arrays or ShapeDtypeStructs; only paths and shapes
        are read.
      logical_names: nested dict of tuples, the names of the trailing dims.

    Raises:
      ConfigError: a value of `config` is out of range, or a group has no parameter.
    """
    config_faults = faults(config, "optimizer.")
    if config.name == "given":
        config_faults.append(
            "optimizer.name = given is written by jaxdist.fit; only there an optimizer is given."
        )
    if config_faults:
        raise ConfigError(config_faults)
    param_roles = roles(abstract_params, logical_names)
    unmatched = group_faults(config, trees.flatten_names(param_roles))
    if unmatched:
        raise ConfigError(unmatched)
    return optimizer_of(config, schedule, param_roles)


def optimizer_of(
    config: OptimizerConfig, schedule: Schedule, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Builds the gradient transformation of parameters with these roles.

    Args:
      config: checked options, see `build_optimizer`.
      schedule: of the learning rate.
      param_roles: nested dict of roles, of all parameters of a model or of some.
    """
    parts = [_DIRECTIONS[config.name](config, param_roles)]
    mask = decay_mask(config, param_roles)
    if config.groups:
        parts.append(_by_group(config, mask))
    elif config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask))
    if config.name == "muon":
        others = jax.tree.map(lambda role: role.kind != "matrix", param_roles)
        parts.append(
            optax.masked(optax.scale(config.other_learning_rate_ratio), others)
        )
    parts.append(optax.scale_by_learning_rate(schedule))
    return _in_float32(optax.chain(*parts))


def _adam(config: OptimizerConfig, _: optax.Params) -> optax.GradientTransformation:
    return optax.scale_by_adam(
        config.b1, config.b2, config.eps, mu_dtype=config.momentum_dtype
    )


def _lion(config: OptimizerConfig, _: optax.Params) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.b1, config.b2, mu_dtype=config.momentum_dtype)


def _sgd(config: OptimizerConfig, _: optax.Params) -> optax.GradientTransformation:
    if config.momentum == 0:
        return optax.identity()
    return optax.trace(
        config.momentum, nesterov=True, accumulator_dtype=config.momentum_dtype
    )


def _adafactor(
    _: OptimizerConfig, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Adafactor without momentum.

    Two things differ from `optax.adafactor`. The RMS is that of a layer, not of a stack,
    and weight decay is scaled by the learning rate. The two largest dims of a layer's or
    an expert's parameter are factored if they are at least 128.
    """
    return optax.chain(
        _factored(param_roles),
        _per_layer(optax.clip_by_block_rms(1.0), param_roles),
        _per_layer(optax.scale_by_param_block_rms(), param_roles),
    )


def _factored(param_roles: optax.Params) -> optax.GradientTransformation:
    """Wraps `optax.scale_by_factored_rms` so that it never factors a stack dim.

    optax factors the two largest dims of a leaf. If one of them is a stack dim (of
    layers or experts), the transform is mapped over the stack. Other leaves are passed
    whole, so that their state has the form that optax gives it.
    """
    transform = optax.scale_by_factored_rms()
    axes = optax.FactoredState(None, 0, 0, 0)
    flat_roles: list[Role] = jax.tree.leaves(param_roles)
    tree: Any = jax.tree.structure(param_roles)

    def mapped_dims(role: Role, leaf: jax.Array) -> int:
        """Counts the leading dims of a leaf to map over."""
        stack_dims = leaf.ndim - role.dims
        largest = np.argsort(leaf.shape)[-2:]
        if len(largest) < 2 or leaf.shape[largest[0]] < 128:
            return 0  # optax does not factor this leaf
        return stack_dims if min(largest) < stack_dims else 0

    def init_leaf(role: Role, param: jax.Array) -> optax.FactoredState:
        function: Callable[..., Any] = transform.init
        for _ in range(mapped_dims(role, param)):
            function = jax.vmap(function, out_axes=axes)
        state: optax.FactoredState = function(param)
        return state

    def update_leaf(
        count: jax.Array,
        role: Role,
        gradient: jax.Array,
        row: jax.Array,
        column: jax.Array,
        whole: jax.Array,
        param: jax.Array,
    ) -> tuple[jax.Array, optax.FactoredState]:
        def update_part(
            gradient: jax.Array,
            row: jax.Array,
            column: jax.Array,
            whole: jax.Array,
            param: jax.Array,
        ) -> Any:
            state = optax.FactoredState(count, row, column, whole)
            return transform.update(gradient, state, param)

        function = update_part
        for _ in range(mapped_dims(role, gradient)):
            function = jax.vmap(function, out_axes=(0, axes))
        scaled, state = function(gradient, row, column, whole, param)
        return scaled, state

    def join(states: Sequence[optax.FactoredState]) -> optax.FactoredState:
        return optax.FactoredState(
            count=states[0].count,
            v_row=tree.unflatten([state.v_row for state in states]),
            v_col=tree.unflatten([state.v_col for state in states]),
            v=tree.unflatten([state.v for state in states]),
        )

    def init(params: optax.Params) -> optax.FactoredState:
        return join(list(map(init_leaf, flat_roles, tree.flatten_up_to(params))))

    def update(
        updates: optax.Updates,
        state: optax.FactoredState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.FactoredState]:
        leaf = functools.partial(update_leaf, state.count)
        columns = map(
            tree.flatten_up_to, (updates, state.v_row, state.v_col, state.v, params)
        )
        scaled, states = zip(*map(leaf, flat_roles, *columns), strict=True)
        return tree.unflatten(scaled), join(states)

    return optax.GradientTransformation(init, update)


def _muon(
    config: OptimizerConfig, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Muon for matrices and Adam for other parameters, from parts of optax.contrib.

    `optax.contrib.muon` is not used, because its Adam has Nesterov momentum and no mask
    of weight decay. Each layer's matrix is orthogonalised separately: singular values
    are about 0.7 to 1.2 after five Newton-Schulz steps. Then it is scaled by
    sqrt(max(1, outputs / inputs)), the convention of Keller Jordan
    (https://kellerjordan.github.io/posts/muon). With `muon_update_rms` = r the factor is
    r * sqrt(max(outputs, inputs)), so that the RMS of elements is about r, as in AdamW
    (https://arxiv.org/abs/2502.16982). GSPMD handles sharded matrices.
    """

    def dimensions(role: Role) -> contrib.MuonDimensionNumbers | optax.MaskedNode:
        if role.kind == "matrix":
            return contrib.MuonDimensionNumbers(role.reduction, role.output)
        return optax.MaskedNode()  # `partition` puts it in place of Adam's parameters

    def scale(role: Role, update: jax.Array) -> jax.Array:
        if role.kind != "matrix":
            return update
        inputs = math.prod(update.shape[axis] for axis in role.reduction)
        outputs = math.prod(update.shape[axis] for axis in role.output)
        rms = config.muon_update_rms
        if rms:
            return update * math.sqrt(rms**2 * max(inputs, outputs))
        return update * math.sqrt(max(1, outputs / inputs))

    orthogonal = contrib.scale_by_muon(
        beta=config.momentum,
        eps=config.eps,
        mu_dtype=config.momentum_dtype,
        weight_dimension_numbers=jax.tree.map(dimensions, param_roles),
    )
    labels = jax.tree.map(
        lambda role: "muon" if role.kind == "matrix" else "adam", param_roles
    )
    orthogonal = _expert_by_expert(orthogonal, param_roles)
    return optax.chain(
        optax.partition(
            {"muon": orthogonal, "adam": _adam(config, param_roles)}, labels
        ),
        optax.stateless(lambda updates, _: jax.tree.map(scale, param_roles, updates)),
    )


def _expert_by_expert(
    orthogonal: optax.GradientTransformation, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Maps `scale_by_muon` over the experts of each kernel.

    Without this it would merge all stack dims of a kernel into one. Every device would
    gather all experts for that.
    """

    def axis(role: Role) -> int | optax.MaskedNode | None:
        return role.experts if role.kind == "matrix" else optax.MaskedNode()

    axes = jax.tree.map(axis, param_roles)
    if not jax.tree.leaves(axes):
        return orthogonal

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        state_axes = contrib.MuonState(count=None, mu=axes, ns_coeffs=None)
        by_expert = jax.vmap(
            orthogonal.update, in_axes=(axes, state_axes), out_axes=(axes, state_axes)
        )
        scaled, new_state = by_expert(updates, state)
        return scaled, new_state

    return optax.GradientTransformation(orthogonal.init, update)


def _by_group(
    config: OptimizerConfig, mask: optax.Params
) -> optax.GradientTransformation:
    """Adds weight decay and scales updates, by the group of each parameter.

    Args:
      config: has the groups.
      mask: whether each parameter has weight decay by default.
    """

    def update_leaf(
        path: Any, update: jax.Array, param: jax.Array, decays: bool
    ) -> jax.Array:
        rate = 1.0
        decay = None
        number = _group_of(config, trees.join(path))
        if number is not None:
            _, rate, decay = config.groups[number]
        if decay is None:
            decay = config.weight_decay * decays
        return rate * (update + decay * param)

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return jax.tree_util.tree_map_with_path(update_leaf, updates, params, mask)

    return optax.stateless(update)


def group_faults(config: OptimizerConfig, paths: Collection[str]) -> list[str]:
    """Lists a message for each group that has no parameter.

    Args:
      config: has the groups.
      paths: of the trained parameters.
    """
    used = {_group_of(config, path) for path in paths}
    return [
        f"optimizer.groups: {pattern!r} finds no trained parameter that is in no group before it; there are: "
        f"{', '.join(list(paths)[:8])}"
        for number, (pattern, *_) in enumerate(config.groups)
        if number not in used
    ]


def _group_of(config: OptimizerConfig, path: str) -> int | None:
    """Finds the number of a parameter's group, the first that matches, if any."""
    for number, (pattern, *_) in enumerate(config.groups):
        if is_found(pattern, path):
            return number
    return None


_DIRECTIONS: dict[
    str, Callable[[OptimizerConfig, optax.Params], optax.GradientTransformation]
] = {
    "adamw": _adam,
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "muon": _muon,
}


def _per_layer(
    transform: optax.GradientTransformation, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Maps a leaf-wise, stateless transform over the layers of each stack."""

    def update_layer(update: jax.Array, param: jax.Array) -> jax.Array:
        updated: Any = transform.update(update, optax.EmptyState(), param)[0]
        layer: jax.Array = updated
        return layer

    def update_leaf(role: Role, update: jax.Array, param: jax.Array) -> jax.Array:
        function = update_layer
        for _ in range(update.ndim - role.dims):
            function = jax.vmap(function)
        return function(update, param)

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return jax.tree.map(update_leaf, param_roles, updates, params)

    return optax.stateless(update)


def _in_float32(
    transform: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Casts gradients and parameters to float32 for a transform."""
    cast = functools.partial(optax.tree.cast, dtype=jnp.float32)

    def init(params: optax.Params) -> optax.OptState:
        return transform.init(cast(params))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        scaled, new_state = transform.update(cast(updates), state, cast(params))
        return scaled, new_state

    return optax.GradientTransformation(init, update)
