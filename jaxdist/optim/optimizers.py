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
from jaxdist.optim.roles import Role, decay_mask, roles, with_names
from jaxdist.optim.schedules import Schedule

# Applies a function to each matrix of a stack with a role. The function keeps the shape.
MapMatrices = Callable[[Callable[[jax.Array], jax.Array], jax.Array, Role], jax.Array]


def all_at_once(
    function: Callable[[jax.Array], jax.Array], stack: jax.Array, role: Role
) -> jax.Array:
    """Applies a function to all matrices of a stack at once."""
    for _ in range(stack.ndim - role.dims):
        function = jax.vmap(function)
    return function(stack)


_ITERATIONS = 5  # of Newton-Schulz, in Muon

# optimizers that update each element independently of all others
ELEMENTWISE = ("adamw", "lion", "sgd")


def build_optimizer(
    config: OptimizerConfig,
    schedule: Schedule,
    abstract_params: optax.Params,
    logical_names: optax.Params,
    step_names: optax.Params | None = None,
    map_matrices: MapMatrices = all_at_once,
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
      step_names: the names as the step holds the parameters, which may be in the stages
        of a pipeline. Default: `logical_names`.
      map_matrices: divides the matrices of stacks among devices, for Muon.

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
    param_roles = with_names(param_roles, step_names or logical_names)
    return optimizer_of(config, schedule, param_roles, map_matrices)


def optimizer_of(
    config: OptimizerConfig,
    schedule: Schedule,
    param_roles: optax.Params,
    map_matrices: MapMatrices = all_at_once,
) -> optax.GradientTransformation:
    """Builds the gradient transformation of parameters with these roles.

    Args:
      config: checked options, see `build_optimizer`.
      schedule: of the learning rate.
      param_roles: nested dict of roles, of all parameters of a model or of some.
      map_matrices: divides the matrices of stacks among devices, for Muon.
    """
    parts = [_DIRECTIONS[config.name](config, param_roles, map_matrices)]
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


def _adam(config: OptimizerConfig, *_: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(
        config.b1, config.b2, config.eps, mu_dtype=config.momentum_dtype
    )


def _lion(config: OptimizerConfig, *_: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.b1, config.b2, mu_dtype=config.momentum_dtype)


def _sgd(config: OptimizerConfig, *_: Any) -> optax.GradientTransformation:
    if config.momentum == 0:
        return optax.identity()
    return optax.trace(
        config.momentum, nesterov=True, accumulator_dtype=config.momentum_dtype
    )


def _adafactor(
    config: OptimizerConfig, param_roles: optax.Params, *_: Any
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
    config: OptimizerConfig, param_roles: optax.Params, map_matrices: MapMatrices
) -> optax.GradientTransformation:
    """Muon for matrices and Adam for other parameters.

    `optax.contrib.muon` is not used, because its Adam has Nesterov momentum and no mask
    of weight decay, and because it would gather sharded matrices on every device. Each
    layer's matrix is orthogonalized separately: singular values are about 0.7 to 1.2
    after five Newton-Schulz steps. Then it is scaled by sqrt(max(1, outputs / inputs)),
    the convention of Keller Jordan (https://kellerjordan.github.io/posts/muon). With
    `muon_update_rms` = r the factor is r * sqrt(max(outputs, inputs)), so that the RMS
    of elements is about r, as in AdamW (https://arxiv.org/abs/2502.16982).
    """

    def scale(role: Role, update: jax.Array) -> jax.Array:
        if role.kind != "matrix":
            return update
        inputs = math.prod(update.shape[axis] for axis in role.reduction)
        outputs = math.prod(update.shape[axis] for axis in role.output)
        rms = config.muon_update_rms
        if rms:
            return update * math.sqrt(rms**2 * max(inputs, outputs))
        return update * math.sqrt(max(1, outputs / inputs))

    labels = jax.tree.map(
        lambda role: "muon" if role.kind == "matrix" else "adam", param_roles
    )
    orthogonal = _orthogonal_momentum(config, param_roles, map_matrices)
    return optax.chain(
        optax.partition({"muon": orthogonal, "adam": _adam(config)}, labels),
        optax.stateless(lambda updates, _: jax.tree.map(scale, param_roles, updates)),
    )


def _orthogonal_momentum(
    config: OptimizerConfig, param_roles: optax.Params, map_matrices: MapMatrices
) -> optax.GradientTransformation:
    """Orthogonalizes the Nesterov momentum of matrices.

    It equals `optax.contrib.scale_by_muon`, and has its state. That transform merges the
    stack dims of a kernel into one, so every device would gather all experts.
    """
    decay = config.momentum
    optax_muon = functools.partial(contrib.scale_by_muon, eps=config.eps)
    # Without momentum, it orthogonalizes what it gets.
    newton_schulz = optax_muon(beta=0.0, nesterov=False)

    def orthogonalize(role: Role, coefficients: Any, param: jax.Array) -> jax.Array:
        """Orthogonalizes one matrix, [*dims of inputs, *dims of outputs]."""
        inputs = math.prod(param.shape[axis] for axis in role.reduction)
        outputs = math.prod(param.shape[axis] for axis in role.output)
        matrix = param.reshape(inputs, outputs)
        state: Any = newton_schulz.init(matrix)
        state = state._replace(ns_coeffs=coefficients)
        orthogonal: Any = newton_schulz.update(matrix, state)[0]
        reshaped: jax.Array = orthogonal.reshape(param.shape)
        return reshaped

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, contrib.MuonState)
        count = optax.safe_increment(state.count)
        momentum = optax.tree.update_moment(updates, state.mu, decay, 1)
        next_momentum = optax.tree.bias_correction(
            momentum, decay, optax.safe_increment(count)
        )
        gradients = optax.tree.bias_correction(updates, decay, count)
        nesterov = jax.tree.map(
            lambda m, g: decay * m + (1 - decay) * g, next_momentum, gradients
        )
        # With coefficients for each iteration, optax loops over them. Unrolled ones
        # take a TPU's compiler several times as long.
        coefficients = jnp.broadcast_to(state.ns_coeffs, (_ITERATIONS, 3))
        orthogonal = jax.tree.map(
            lambda x, role: map_matrices(
                functools.partial(orthogonalize, role, coefficients), x, role
            ),
            nesterov,
            matrices,
        )
        kept = optax.tree.cast(momentum, config.momentum_dtype)
        return orthogonal, contrib.MuonState(count, kept, state.ns_coeffs)

    # `partition` puts a masked node in place of Adam's parameters.
    matrices = jax.tree.map(
        lambda role: role if role.kind == "matrix" else optax.MaskedNode(), param_roles
    )
    init = optax_muon(beta=decay, mu_dtype=config.momentum_dtype).init
    return optax.GradientTransformation(init, update)


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


_DIRECTIONS: dict[str, Callable[..., optax.GradientTransformation]] = {
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
