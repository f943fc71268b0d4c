"""Optimizers and learning-rate schedules: optax's own parts, steered by what a
parameter means.

Every optimizer here is the same chain: a *direction* (one row of `_DIRECTIONS`),
decoupled weight decay on the parameters that should decay, then the learning rate as
the last, linear factor. So weight decay always acts as `learning_rate * weight_decay *
parameter`, and an update is linear in the learning rate. Clipping, skipping of
non-finite steps and averaging of parameters belong to the train step, which sees the
whole gradient.

What a parameter means is read from its logical names (`role_of`), not from its rank:
parameters of layers are stacks `[num_layers, ...]`, so a norm scale has rank 2 and a
kernel rank 3 or 4. A stack is always treated as that many separate parameters.
"""

import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from jaxdist.config import ConfigError, trees
from jaxdist.config.schema import faults
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.roles import Role, decay_mask, roles
from jaxdist.optim.schedules import Schedule

# those whose updates look at each number by itself
ELEMENTWISE = ("adamw", "lion", "sgd")


def build_optimizer(
    config: OptimizerConfig,
    schedule: Schedule,
    abstract_params: optax.Params,
    logical_names: optax.Params,
) -> optax.GradientTransformation:
    """Returns the gradient transformation; `update` needs the parameters.

    State and updates are float32 whatever the parameters are (except `momentum_dtype`):
    a second moment in bfloat16 would stop moving, because 1 - b2 is below its
    resolution. `optax.apply_updates` then rounds once, into the parameters' dtype.

    Args:
      schedule: from `build_schedule`; called with the number of updates applied so far.
      abstract_params: nested dict of arrays or ShapeDtypeStructs; only paths and shapes
        are read.
      logical_names: nested dict of tuples, the names of the trailing dims.

    Raises:
      ConfigError: a value of `config` is out of range, or a group has no parameter.
    """
    wrong = faults(config, "optimizer.")
    if config.name == "given":
        wrong.append(
            "optimizer.name = given is written by jaxdist.fit; only there an optimizer is given."
        )
    if wrong:
        raise ConfigError(wrong)
    param_roles = roles(abstract_params, logical_names)
    unmatched = group_faults(config, trees.flatten_names(param_roles))
    if unmatched:
        raise ConfigError(unmatched)
    return optimizer_of(config, schedule, param_roles)


def optimizer_of(
    config: OptimizerConfig, schedule: Schedule, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Returns the gradient transformation of parameters with these roles, perhaps some
    of a model's.
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
    """`optax.adafactor` without momentum, with the RMS of each layer instead of each
    stack.

    It differs in weight decay too: optax subtracts it unscaled by the learning rate.
    Dims of at least 128 are factored, the two largest of a layer's or an expert's own
    parameter.
    """
    return optax.chain(
        _factored(param_roles),
        _per_layer(optax.clip_by_block_rms(1.0), param_roles),
        _per_layer(optax.scale_by_param_block_rms(), param_roles),
    )


def _factored(param_roles: optax.Params) -> optax.GradientTransformation:
    """Returns `optax.scale_by_factored_rms` that takes no stack (of layers, of experts)
    for a matrix's dim.

    optax takes the two largest dims of a leaf, whatever they are. Only leaves where one
    of them is a stack's are seen part by part, so that all others keep the state that
    they have.
    """
    transform = optax.scale_by_factored_rms()
    axes = optax.FactoredState(None, 0, 0, 0)
    flat_roles: list[Role] = jax.tree.leaves(param_roles)
    tree: Any = jax.tree.structure(param_roles)

    def stacks(role: Role, leaf: jax.Array) -> int:
        """Counts how many leading dims to map over."""
        leading = leaf.ndim - role.dims
        largest = np.argsort(leaf.shape)[-2:]
        mistaken = (
            len(largest) == 2
            and leaf.shape[largest[0]] >= 128
            and min(largest) < leading
        )
        return leading if mistaken else 0

    def init_leaf(role: Role, param: jax.Array) -> optax.FactoredState:
        function = transform.init
        for _ in range(stacks(role, param)):
            function = jax.vmap(function, out_axes=axes)
        return function(param)

    def update_leaf(
        count, role: Role, *values
    ) -> tuple[jax.Array, optax.FactoredState]:
        def function(grad, row, column, whole, param):
            return transform.update(
                grad, optax.FactoredState(count, row, column, whole), param
            )

        for _ in range(stacks(role, values[0])):
            function = jax.vmap(function, out_axes=(0, axes))
        return function(*values)

    def joined(states: Sequence[optax.FactoredState]) -> optax.FactoredState:
        parts = (tree.unflatten(part) for part in list(zip(*states, strict=True))[1:])
        return optax.FactoredState(states[0].count, *parts)

    def init(params):
        return joined(list(map(init_leaf, flat_roles, tree.flatten_up_to(params))))

    def update(updates, state, params):
        leaf = functools.partial(update_leaf, state.count)
        columns = map(
            tree.flatten_up_to, (updates, state.v_row, state.v_col, state.v, params)
        )
        scaled, states = zip(*map(leaf, flat_roles, *columns), strict=True)
        return tree.unflatten(scaled), joined(states)

    return optax.GradientTransformation(init, update)


def _muon(
    config: OptimizerConfig, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest, from the parts of `optax.contrib.muon`.

    That function itself gives its Adam Nesterov momentum and no decay mask. Each
    layer's matrix is orthogonalised by itself (singular values about 0.7 to 1.2 after
    five Newton-Schulz steps) and scaled by sqrt(max(1, outputs / inputs)), Keller
    Jordan's convention (https://kellerjordan.github.io/posts/muon), or, with
    `muon_update_rms` = r, by r * sqrt(max(outputs, inputs)), so that an element's RMS
    is about r as AdamW's is (https://arxiv.org/abs/2502.16982). Sharded matrices are
    left to GSPMD.
    """

    def dimensions(role: Role) -> contrib.MuonDimensionNumbers | optax.MaskedNode:
        if role.kind == "matrix":
            return contrib.MuonDimensionNumbers(role.reduction, role.output)
        return optax.MaskedNode()  # what `partition` puts in Adam's places

    def scale(role: Role, update: jax.Array) -> jax.Array:
        if role.kind != "matrix":
            return update
        inputs = math.prod(update.shape[axis] for axis in role.reduction)
        outputs = math.prod(update.shape[axis] for axis in role.output)
        rms = config.muon_update_rms
        square = rms**2 * max(inputs, outputs) if rms else max(1, outputs / inputs)
        return update * math.sqrt(square)

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
    """Returns `scale_by_muon` as it is computed where devices share out experts.

    It merges all stack dims of a kernel into one, for which every device would gather
    all experts.
    """

    def axis(role: Role) -> int | optax.MaskedNode | None:
        return role.experts if role.kind == "matrix" else optax.MaskedNode()

    axes = jax.tree.map(axis, param_roles)
    if not jax.tree.leaves(axes):
        return orthogonal

    def update(updates, state, params=None):
        places = contrib.MuonState(count=None, mu=axes, ns_coeffs=None)
        by_expert = jax.vmap(
            orthogonal.update, in_axes=(axes, places), out_axes=(axes, places)
        )
        return by_expert(updates, state)

    return optax.GradientTransformation(orthogonal.init, update)


def _by_group(
    config: OptimizerConfig, mask: optax.Params
) -> optax.GradientTransformation:
    """Returns weight decay, then a factor of the learning rate, each as a parameter's
    group has it.
    """

    def leaf(path, update: jax.Array, param: jax.Array, decays: bool) -> jax.Array:
        number = _group_of(config, trees.join(path))
        rate, decay = (1.0, None) if number is None else config.groups[number][1:]
        decay = config.weight_decay * decays if decay is None else decay
        return rate * (update + decay * param)

    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(
            leaf, updates, params, mask
        )
    )


def group_faults(config: OptimizerConfig, paths: Collection[str]) -> list[str]:
    """Returns the groups that have none of the trained parameters with these paths."""
    used = {_group_of(config, path) for path in paths}
    return [
        f"optimizer.groups: {pattern!r} finds no trained parameter that is in no group before it; there are: "
        f"{', '.join(list(paths)[:8])}"
        for number, (pattern, *_) in enumerate(config.groups)
        if number not in used
    ]


def _group_of(config: OptimizerConfig, path: str) -> int | None:
    """Returns the number of a parameter's group, the first that finds it; None: it is
    in none.
    """
    return next(
        (
            n
            for n, (pattern, *_) in enumerate(config.groups)
            if re.search(pattern, path)
        ),
        None,
    )


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
    """Returns a leaf-wise, stateless transform that sees each layer of a stack by
    itself.
    """

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        return transform.update(update, optax.EmptyState(), param)[0]

    def leaf(role: Role, update: jax.Array, param: jax.Array) -> jax.Array:
        function = one
        for _ in range(update.ndim - role.dims):
            function = jax.vmap(function)
        return function(update, param)

    return optax.stateless(
        lambda updates, params: jax.tree.map(leaf, param_roles, updates, params)
    )


def _in_float32(
    transform: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns `transform` fed with float32 gradients and parameters."""
    cast = functools.partial(optax.tree.cast, dtype=jnp.float32)
    return optax.GradientTransformation(
        lambda params: transform.init(cast(params)),
        lambda updates, state, params=None: transform.update(
            cast(updates), state, cast(params)
        ),
    )
