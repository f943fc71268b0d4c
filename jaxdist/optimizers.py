"""Optimizers and learning-rate schedules: optax's own parts, steered by what a parameter means.

Every optimizer here is the same chain: a *direction* (one row of `_DIRECTIONS`), decoupled weight
decay on the parameters that should decay, then the learning rate as the last, linear factor. So
weight decay always acts as `learning_rate * weight_decay * parameter`, and an update is linear in
the learning rate. Clipping, skipping of non-finite steps and averaging of parameters belong to the
train step, which sees the whole gradient.

What a parameter means is read from its logical names (`role_of`), not from its rank: parameters
of layers are stacks `[num_layers, ...]`, so a norm scale has rank 2 and a kernel rank 3 or 4.
A stack is always treated as that many separate parameters.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from optax import contrib

from jaxdist.config import ConfigError, suggest, trees

Names = Sequence[str | None]
Schedule = Callable[[ArrayLike], jax.Array]  # updates done so far -> learning rate
OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "muon", "given"]  # given: to jaxdist.fit
ScheduleName = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]
Scaling = Literal["none", "sqrt", "linear"]
MomentumDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated. Steps are optimizer updates, batch sizes are sequences."""

    name: OptimizerName = "adamw"  # adamw, lion, adafactor, sgd or muon
    learning_rate: float = 3e-4  # peak, before batch scaling; > 0
    schedule: ScheduleName = "cosine"  # cosine, linear, wsd, constant or inverse_sqrt
    warmup_steps: int = 100  # steps of linear warm-up, the last one at the peak; >= 0
    decay_steps: int | None = None  # step at which the decay ends; none = train.steps
    decay_fraction: float = 0.2  # wsd: last share of decay_steps, linear decay; 0 < x <= 1
    final_learning_rate: float = 0.0  # fraction of the peak where the decay ends; 0 <= x <= 1
    learning_rate_scaling: Scaling = "none"  # peak * (global_size / reference_batch)^(0, 1/2, 1)
    reference_batch: int = 256  # sequences for which learning_rate was tuned; >= 1
    b1: float = 0.9  # adamw, lion, muon's Adam: first-moment decay; 0 <= x < 1
    b2: float = 0.95  # adamw, lion (0.99 in its paper), muon's Adam: second decay; 0 <= x < 1
    eps: float = 1e-8  # adamw, muon: added to the denominator; > 0
    momentum: float = 0.95  # sgd, muon: Nesterov momentum; 0 <= x < 1
    momentum_dtype: MomentumDtype = "float32"  # first moment; all other state is float32
    weight_decay: float = 0.1  # decoupled, per unit of learning rate, matrices only; >= 0
    decay_embeddings: bool = True  # weight decay also on embedding tables (the head: always)
    other_learning_rate_ratio: float = 0.3  # muon: Adam's learning rate as a multiple; > 0
    muon_update_rms: float = 0.0  # muon: 0 = sqrt(max(1, out/in)); 0.2 = AdamW-like RMS; >= 0
    clip_norm: float = 1.0  # largest global gradient norm (in the train step); 0 = off; >= 0
    frozen: tuple[str, ...] = ()  # regexes of parameters that are not trained, e.g. "^embedding"
    groups: tuple[tuple[str, float, float | None], ...] = ()  # (regex, rate multiple, weight decay); 1st wins
    nonfinite_limit: int = 10  # consecutive non-finite steps skipped before the run stops; >= 0


_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("> 0", lambda x: 0 < x < math.inf, ("learning_rate", "eps", "other_learning_rate_ratio")),
    (">= 1", lambda x: x >= 1, ("decay_steps", "reference_batch")),
    (">= 0", lambda x: x >= 0, ("warmup_steps", "weight_decay", "muon_update_rms")),
    (">= 0", lambda x: x >= 0, ("clip_norm", "nonfinite_limit")),
    ("in [0, 1)", lambda x: 0 <= x < 1, ("b1", "b2", "momentum")),
    ("in (0, 1]", lambda x: 0 < x <= 1, ("decay_fraction",)),
    ("in [0, 1], a fraction of the peak", lambda x: 0 <= x <= 1, ("final_learning_rate",)),
)
_HINTS = get_type_hints(OptimizerConfig)
_CHOICES = {field: get_args(hint) for field, hint in _HINTS.items() if get_origin(hint) is Literal}
_DECAYING = ("cosine", "linear", "wsd")


def faults(config: OptimizerConfig, train_steps: int | None = None) -> list[str]:
    """Returns one line per illegal value: what was given and what is required; [] if legal.

    Args:
      train_steps: the run's number of updates where known; checks the warm-up against it.
    """
    found = []
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        if value not in choices:
            rule = f"must be one of {', '.join(choices)}.{suggest(str(value), choices)}"
            found.append(f"optimizer.{field} = {value!r}: {rule}")
    for rule, legal, fields in _RANGES:
        for field in fields:
            value = getattr(config, field)
            if value is not None and not legal(value):
                found.append(f"optimizer.{field} = {value}: must be {rule}.")
    found += _pattern_faults(config)
    end = train_steps if config.decay_steps is None else config.decay_steps
    name = "train.steps" if config.decay_steps is None else "optimizer.decay_steps"
    if end is not None and config.warmup_steps > end:
        rule = f"must be <= {name} = {end}; lower it or raise {name}."
        found.append(f"optimizer.warmup_steps = {config.warmup_steps}: {rule}")
    return found


def _pattern_faults(config: OptimizerConfig) -> Iterator[str]:
    for pattern, field in [(p, "frozen") for p in config.frozen] + [(g[0], "groups") for g in config.groups]:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"optimizer.{field}: {pattern!r} is no regular expression ({error})"
    for pattern, rate, decay in config.groups:
        if not (0 <= rate < math.inf and 0 <= (decay or 0) < math.inf):
            yield (
                f"optimizer.groups: ({pattern!r}, {rate}, {decay}): learning-rate multiple and weight decay "
                f"must be >= 0; None leaves the weight decay as it is"
            )


# ---------------------------------------------------------------------------------- schedules


def depends_on_train_steps(config: OptimizerConfig) -> bool:
    """Returns whether a change of `train.steps` would change the learning rate of any step."""
    return config.schedule in _DECAYING and config.decay_steps is None


def peak_learning_rate(config: OptimizerConfig, global_size: int) -> float:
    """Returns the peak learning rate at `global_size` sequences per step.

    `sqrt` suits Adam-like optimizers (https://arxiv.org/abs/2205.10287), `linear` suits SGD
    (https://arxiv.org/abs/1706.02677).
    """
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[config.learning_rate_scaling]
    return config.learning_rate * (global_size / config.reference_batch) ** power


def build_schedule(config: OptimizerConfig, train_steps: int, global_size: int) -> Schedule:
    """Returns a function from the number of updates done to the next update's learning rate.

    It takes a traced or a Python number and returns a float32 scalar. With w warm-up steps and
    the decay ending at T (`decay_steps`, else `train_steps`), update s = 0, 1, ... gets
    peak * min(1, (s + 1) / w) * shape(s), shape being 1 until the decay starts. So neither the
    first update is lost nor the last, s = T - 1: the final value is reached at s = T and kept.
    `cosine` and `linear` decay from w to T; `wsd` is linear over the last `decay_fraction * T`
    steps, but not before w; `inverse_sqrt` is sqrt(w / (s + 1)) and has no end, like `constant`.

    Raises:
      ConfigError: a value is out of range, or the warm-up is longer than the schedule.
    """
    if found := faults(config, train_steps):
        raise ConfigError(found)
    peak = peak_learning_rate(config, global_size)
    warmup = max(config.warmup_steps, 1)
    shape = _decay_shape(config, train_steps)

    def schedule(step: ArrayLike) -> jax.Array:
        done = jnp.asarray(step, jnp.float32)
        return peak * jnp.minimum(1.0, (done + 1) / warmup) * shape(done)

    return schedule


def _decay_shape(config: OptimizerConfig, train_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the factor in [0, 1] that follows the warm-up, as a function of updates done."""
    if config.schedule == "constant":
        return jnp.ones_like
    if config.schedule == "inverse_sqrt":
        warmup = max(config.warmup_steps, 1)
        return lambda done: jnp.sqrt(warmup / jnp.maximum(done + 1, warmup))
    end = train_steps if config.decay_steps is None else config.decay_steps
    start = float(config.warmup_steps)
    if config.schedule == "wsd":
        start = max(start, end - config.decay_fraction * end)
    length = max(end - start, 1e-6)  # a warm-up that fills the schedule leaves no decay
    final = config.final_learning_rate

    def shape(done: jax.Array) -> jax.Array:
        progress = jnp.clip((done - start) / length, 0.0, 1.0)
        if config.schedule == "cosine":
            progress = 0.5 * (1 - jnp.cos(jnp.pi * progress))
        return 1 - (1 - final) * progress

    return shape


# -------------------------------------------------------------------------------------- roles

_STACK_NAMES = frozenset({"experts", "layers"})  # leading: that many separate parameters
_HEAD_NAMES = frozenset({"heads", "kv_heads"})  # joined with a following head_dim to one dim
_TABLE_NAMES = frozenset({"vocab", "positions"})


@dataclass(frozen=True)
class Role:
    """What a parameter is to an optimizer; axes are negative, so that any stack dims fit."""

    kind: Literal["matrix", "embedding", "head", "vector"]
    dims: int  # trailing dims that form one parameter; the dims before them are stack dims
    reduction: tuple[int, ...] = ()  # matrix: axes that are summed over, the inputs
    output: tuple[int, ...] = ()  # matrix: the other axes


def role_of(path: Sequence[str], shape: Sequence[int], names: Names | None) -> Role:
    """Returns the role of one parameter.

    Names decide. Leading dims without a name, and `experts`, count separate parameters; heads and
    head_dim count as one dim. With fewer than two dims left it is a vector (norm scale, bias);
    vocab or positions make an embedding, or a head if vocab comes last; anything else is a
    matrix from all dims but the last to the last (kernels are stored inputs first). Without
    names, a parameter under `blocks`, if that is no list, has one stack dim, a path with "embed" is
    an embedding, and the last two dims are the matrix.

    Args:
      path: keys from the root of the parameters.
      shape: with stack dims.
      names: of the trailing dims; None or empty if unknown.
    """
    if names:
        if len(names) > len(shape):
            given = f"{'/'.join(path)}: logical names {tuple(names)} for shape {tuple(shape)}"
            raise ValueError(f"{given}; give at most one name per dim.")
        return _role_from_names(tuple(names))
    stacked = bool(path) and path[0] == "blocks" and not any(key.isdigit() for key in path)
    rank = len(shape) - stacked
    if rank < 2:
        return Role("vector", max(rank, 0))
    if any("embed" in key.lower() for key in path):
        return Role("embedding", rank)
    return Role("matrix", 2, (-2,), (-1,))


def _role_from_names(names: tuple[str | None, ...]) -> Role:
    leading = 0
    while leading < len(names) and names[leading] in _STACK_NAMES:
        leading += 1
    dims = len(names) - leading
    groups: list[list[int]] = []
    for axis in range(-dims, 0):
        if groups and names[axis] == "head_dim" and names[axis - 1] in _HEAD_NAMES:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) < 2:
        return Role("vector", dims)
    if _TABLE_NAMES & set(names):
        return Role("head" if names[-1] == "vocab" else "embedding", dims)
    reduction = tuple(axis for group in groups[:-1] for axis in group)
    return Role("matrix", dims, reduction, tuple(groups[-1]))


def roles(abstract_params: optax.Params, logical_names: optax.Params) -> optax.Params:
    """Returns the tree of `Role`s. `logical_names` has a tuple (or None) for each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, names: role_of([str(key.key) for key in path], leaf.shape, names),
        abstract_params,
        logical_names,
    )


def decay_mask(config: OptimizerConfig, param_roles: optax.Params) -> optax.Params:
    """Returns a tree of bools: True for matrices, the head and, if configured, embeddings."""
    kinds = {"matrix", "head"} | ({"embedding"} if config.decay_embeddings else set())
    return jax.tree.map(lambda role: role.kind in kinds, param_roles)


# --------------------------------------------------------------------------------- optimizers


def build_optimizer(
    config: OptimizerConfig,
    schedule: Schedule,
    abstract_params: optax.Params,
    logical_names: optax.Params,
) -> optax.GradientTransformation:
    """Returns the gradient transformation; `update` needs the parameters.

    State and updates are float32 whatever the parameters are (except `momentum_dtype`): a second
    moment in bfloat16 would stop moving, because 1 - b2 is below its resolution.
    `optax.apply_updates` then rounds once, into the parameters' dtype.

    Args:
      schedule: from `build_schedule`; called with the number of updates applied so far.
      abstract_params: nested dict of arrays or ShapeDtypeStructs; only paths and shapes are read.
      logical_names: nested dict of tuples, the names of the trailing dims.

    Raises:
      ConfigError: a value of `config` is out of range, or a group has no parameter.
    """
    found = faults(config)
    if config.name == "given":
        found.append("optimizer.name = given is written by jaxdist.fit; only there an optimizer is given.")
    if found:
        raise ConfigError(found)
    param_roles = roles(abstract_params, logical_names)
    parts = [_DIRECTIONS[config.name](config, param_roles)]
    mask = decay_mask(config, param_roles)
    if config.groups:
        parts.append(_by_group(config, mask))
    elif config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask))
    if config.name == "muon":
        others = jax.tree.map(lambda role: role.kind != "matrix", param_roles)
        parts.append(optax.masked(optax.scale(config.other_learning_rate_ratio), others))
    parts.append(optax.scale_by_learning_rate(schedule))
    return _in_float32(optax.chain(*parts))


def _adam(config: OptimizerConfig, _: optax.Params) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.momentum_dtype)


def _lion(config: OptimizerConfig, _: optax.Params) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.b1, config.b2, mu_dtype=config.momentum_dtype)


def _sgd(config: OptimizerConfig, _: optax.Params) -> optax.GradientTransformation:
    if config.momentum == 0:
        return optax.identity()
    return optax.trace(config.momentum, nesterov=True, accumulator_dtype=config.momentum_dtype)


def _adafactor(_: OptimizerConfig, param_roles: optax.Params) -> optax.GradientTransformation:
    """`optax.adafactor` without momentum, with the RMS of each layer instead of each stack.

    It differs in weight decay too: optax subtracts it unscaled by the learning rate. Dims of at
    least 128 are factored, the two largest of a leaf; a stack of fewer layers is never one.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        _per_layer(optax.clip_by_block_rms(1.0), param_roles),
        _per_layer(optax.scale_by_param_block_rms(), param_roles),
    )


def _muon(config: OptimizerConfig, param_roles: optax.Params) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest, from the parts of `optax.contrib.muon`.

    That function itself gives its Adam Nesterov momentum and no decay mask. Each layer's matrix
    is orthogonalised by itself (singular values about 0.7 to 1.2 after five Newton-Schulz steps)
    and scaled by sqrt(max(1, outputs / inputs)), Keller Jordan's convention
    (https://kellerjordan.github.io/posts/muon), or, with `muon_update_rms` = r, by
    r * sqrt(max(outputs, inputs)), so that an element's RMS is about r as AdamW's is
    (https://arxiv.org/abs/2502.16982). Sharded matrices are left to GSPMD.
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
    labels = jax.tree.map(lambda role: "muon" if role.kind == "matrix" else "adam", param_roles)
    return optax.chain(
        optax.partition({"muon": orthogonal, "adam": _adam(config, param_roles)}, labels),
        optax.stateless(lambda updates, _: jax.tree.map(scale, param_roles, updates)),
    )


def _by_group(config: OptimizerConfig, mask: optax.Params) -> optax.GradientTransformation:
    """Returns weight decay, then a factor of the learning rate, each as a parameter's group has it."""
    paths = trees.flatten_names(mask)
    if found := group_faults(config, paths):
        raise ConfigError(found)
    group = _groups_of(config, paths)

    def leaf(path, update: jax.Array, param: jax.Array, decays: bool) -> jax.Array:
        number = group.get(trees.join(path))
        rate, decay = (1.0, None) if number is None else config.groups[number][1:]
        decay = config.weight_decay * decays if decay is None else decay
        return rate * (update + decay * param)

    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(leaf, updates, params, mask)
    )


def group_faults(config: OptimizerConfig, paths: Collection[str]) -> list[str]:
    """Returns the groups that have none of the trained parameters with these paths."""
    found = _groups_of(config, paths).values()
    return [
        f"optimizer.groups: {pattern!r} finds no trained parameter that is in no group before it; there are: "
        f"{', '.join(list(paths)[:8])}"
        for number, (pattern, *_) in enumerate(config.groups) if number not in found
    ]  # fmt: skip


def _groups_of(config: OptimizerConfig, paths: Collection[str]) -> dict[str, int]:
    """Returns path -> number of its group, for parameters that are in one: the first that finds them."""
    rules = list(enumerate(config.groups))
    matches = {path: [n for n, (pattern, *_) in rules if re.search(pattern, path)] for path in paths}
    return {path: numbers[0] for path, numbers in matches.items() if numbers}


_Direction = Callable[[OptimizerConfig, optax.Params], optax.GradientTransformation]
_DIRECTIONS: dict[str, _Direction] = {
    "adamw": _adam,
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "muon": _muon,
}


def _per_layer(
    transform: optax.GradientTransformation, param_roles: optax.Params
) -> optax.GradientTransformation:
    """Returns a leaf-wise, stateless transform that sees each layer of a stack by itself."""

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        return transform.update(update, optax.EmptyState(), param)[0]

    def leaf(role: Role, update: jax.Array, param: jax.Array) -> jax.Array:
        function = one
        for _ in range(update.ndim - role.dims):
            function = jax.vmap(function)
        return function(update, param)

    return optax.stateless(lambda updates, params: jax.tree.map(leaf, param_roles, updates, params))


def _in_float32(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `transform` fed with float32 gradients and parameters."""

    def cast(tree: optax.Params) -> optax.Params:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: optax.Params) -> optax.OptState:
        return transform.init(cast(params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return transform.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(init, update)
