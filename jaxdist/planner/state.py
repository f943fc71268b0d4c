"""The bytes of a run's state on a device and in a checkpoint, from shapes alone."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdist.optim import optimizers
from jaxdist.optim.schedules import rate_of_one
from jaxdist.parallel.offload import HOST as OFFLOADED
from jaxdist.parallel.optimizer_sharding import state_specs
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import STACKS, Names
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.step.batch_parts import dim_names
from jaxdist.step.layerwise import Trained
from jaxdist.step.objective_fields import abstract_batch
from jaxdist.step.update import build_update_rule
from jaxdist.trainer.compose import Composition, batch_shapes

Components = dict[str, int]  # bytes on a device by component
# components that stay in host memory: optimizer state and moving average; parameters
HOST_STATE = "host memory: optimizer state"
HOST_PARAMETERS = "host memory: parameters"
STATE = (  # components that a checkpoint contains
    "parameters",
    "frozen modules",
    "optimizer state",
    "moving average",
    "model state",
    HOST_STATE,
    HOST_PARAMETERS,
)


def held_state(
    composition: Composition,
    platform: str,
    optimizer: optax.GradientTransformation | None = None,
) -> Components:
    """Counts the bytes of the state and the batch on a device, by component.

    Args:
      composition: the run on its mesh.
      platform: tpu, gpu or cpu.
      optimizer: the caller's optimizer; default: that of the config.
    """
    run = composition.config
    rules = composition.rules
    spec = composition.spec_by_stage
    tree = spec.trainable
    moments = _moments(composition, spec, optimizer)
    rows = [rules.state(names, x.shape) for x, names in spec.named_trainable().values()]
    specs = state_specs(
        moments, tree, jax.tree.unflatten(jax.tree.structure(tree), rows)
    )
    places = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    offloaded = _offloaded(composition, moments, platform, optimizer)
    optimizer_bytes, optimizer_on_host = _split(
        _leaf_bytes(rules, jax.tree.leaves(moments), places), offloaded.moments
    )
    average_bytes = 0
    average_on_host = 0
    if run.train.ema_decay:
        copies = [
            jax.ShapeDtypeStruct(x.shape, "float32") for x in jax.tree.leaves(tree)
        ]
        average_bytes, average_on_host = _split(
            _leaf_bytes(rules, copies, rows), offloaded.ema
        )
    params = run.precision.params
    frozen = _frozen_bytes(spec, rules, params)
    modules = [_frozen_bytes(module, rules, params) for module in spec.modules.values()]
    parameters = [jax.ShapeDtypeStruct(x.shape, params) for x in jax.tree.leaves(tree)]
    stored_specs = [
        rules.stored(names, x.shape) for x, names in spec.named_trainable().values()
    ]
    parameter_sizes = _leaf_bytes(rules, parameters, stored_specs)
    parameters_here, parameters_on_host = _split(parameter_sizes, offloaded.params)
    copies_here = parameters_on_host * jnp.dtype(run.precision.compute).itemsize
    return {
        "parameters": parameters_here + frozen,
        "copies of parameters": copies_here // jnp.dtype(params).itemsize,
        "frozen modules": sum(modules),
        "optimizer state": optimizer_bytes,
        "moving average": average_bytes,
        HOST_STATE: optimizer_on_host + average_on_host,
        HOST_PARAMETERS: parameters_on_host,
        "model state": _whole_bytes(spec.model_state),
        "batch": _whole_bytes(batch_shapes(run)) // rules.shape.batch_shards,
        "prepared fields": _prepared_bytes(composition),
    }


def host_state_bytes(components: Mapping[str, int]) -> int:
    """Sums the state that a device keeps on its host."""
    return components.get(HOST_STATE, 0) + components.get(HOST_PARAMETERS, 0)


def held_bytes(components: Mapping[str, int]) -> int:
    """Sums the components that a checkpoint contains."""
    return sum(components.get(name, 0) for name in STATE)


def checkpoint_bytes(composition: Composition) -> int:
    """Counts the bytes of the whole state in a checkpoint."""
    run = composition.config
    spec = composition.spec
    params = run.precision.params
    trained: int = sum(x.size for x in jax.tree.leaves(spec.trainable))
    total = trained * jnp.dtype(params).itemsize
    total += _whole_bytes(_moments(composition, spec))
    if run.train.ema_decay:
        total += 4 * trained
    for model in (spec, *spec.modules.values()):
        for x in jax.tree.leaves(model.frozen):
            total += x.size * stored_dtype(x, params).itemsize
    return total + _whole_bytes(spec.model_state)


def parameter_bytes(
    spec: ModelSpec,
    rules: Rules,
    rule: Callable[..., P],
    itemsize: int,
    prefix: str = "",
) -> int:
    """Counts a device's bytes of trained parameters.

    Args:
      spec: the model.
      rules: the sharding rules of the layout.
      rule: maps a parameter's names and dims to its sharding.
      itemsize: bytes of an element.
      prefix: start of the paths to count; "" counts all.
    """
    sizes = (
        shard_size(rules, rule(names, x.shape), x.shape)
        for path, (x, names) in spec.named_trainable().items()
        if path.startswith(prefix)
    )
    return itemsize * sum(sizes)


def _prepared_bytes(composition: Composition) -> int:
    """Counts a device's bytes of the fields that the objective adds to a batch."""
    spec = composition.spec
    if not spec.objective.prepares:
        return 0
    batch = batch_shapes(composition.config)
    described = [(name, x.shape) for name, x in batch.items()]
    key = repr((spec.objective, composition.config.model, described))
    if key not in _extended:
        _extended[key] = abstract_batch(spec, batch)
    extended = _extended[key]
    names = dim_names(extended)
    rules = composition.rules
    added = {name: x for name, x in extended.items() if name not in batch}
    specs = [rules.activation(names[name], x.shape) for name, x in added.items()]
    return sum(_leaf_bytes(rules, added.values(), specs))


def _frozen_bytes(spec: ModelSpec, rules: Rules, params: str) -> int:
    """Counts a device's bytes of frozen parameters in their stored dtype."""
    return sum(
        shard_size(rules, rules.stored(names, x.shape), x.shape)
        * stored_dtype(x, params).itemsize
        for x, names in spec.named_frozen().values()
    )


def shard_size(rules: Rules, sharding: P, dims: Sequence[int]) -> int:
    """Counts the elements of an array on a device."""
    return math.prod(rules.shard_dims(sharding, dims))


def gathers_inside(rules: Rules, names: Names, dims: Sequence[int]) -> bool:
    """Checks whether devices share a dim that is not the first of a layer's kernel.

    Args:
      rules: the sharding rules of the layout.
      names: logical names of the parameter's dims.
      dims: its sizes, with those of the stack.
    """
    stored = rules.shard_dims(rules.stored(names, dims), dims)
    computed = rules.shard_dims(rules.computed(names, dims), dims)
    stack = len(dims) - sum(name not in STACKS for name in names)
    split = [i for i, size in enumerate(computed) if stored[i] < size]
    return any(size > 1 for i in split for size in computed[stack:i])


# cached by content, because a search needs each of them some thousand times
_states: dict[str, Any] = {}
_extended: dict[str, dict[str, Any]] = {}  # batches with prepared fields


def _moments(
    composition: Composition,
    spec: ModelSpec,
    optimizer: optax.GradientTransformation | None = None,
) -> Any:
    """Traces the optimizer's abstract state.

    Args:
      composition: the run on its mesh.
      spec: the model, with its layers either in one stack or in stages.
      optimizer: the caller's optimizer; default: that of the config.
    """
    run = composition.config
    stored = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, run.precision.params), spec.trainable
    )
    if optimizer is not None:
        return jax.eval_shape(optimizer.init, stored)
    shapes = [
        (path, x.shape, names) for path, (x, names) in spec.named_trainable().items()
    ]
    key = repr((run.optimizer, run.precision.params, shapes))
    if key not in _states:
        transform = optimizers.build_optimizer(
            run.optimizer, rate_of_one, spec.trainable, spec.names
        )
        _states[key] = jax.eval_shape(transform.init, stored)
    return _states[key]


def _offloaded(
    composition: Composition,
    moments: Any,
    platform: str,
    optimizer: optax.GradientTransformation | None,
) -> Trained:
    """Marks with True the moments and averages that stay in host memory."""
    run = composition.config
    spec = composition.spec_by_stage
    tree = spec.trainable
    state = Trained(tree, moments, tree if run.train.ema_decay else None)
    # A CPU device's memory is the host's.
    if not run.offload.optimizer or platform == "cpu":
        none: Trained = jax.tree.map(lambda _: False, state)
        return none
    rule = build_update_rule(
        optimizer or run.optimizer,
        None,
        composition.spec,
        run.train.ema_decay,
        spec.names,
        moments_in=OFFLOADED,
        params_in=OFFLOADED if run.offload.parameters else None,
    )
    assert rule.layerwise is not None
    return rule.layerwise.waiting(state)


def _leaf_bytes(
    rules: Rules, leaves: Iterable[Any], shardings: Iterable[P]
) -> list[int]:
    """Counts a device's bytes of each array."""
    return [
        shard_size(rules, sharding, x.shape) * x.dtype.itemsize
        for x, sharding in zip(leaves, shardings, strict=True)
    ]


def _split(sizes: Sequence[int], offloaded: Any) -> tuple[int, int]:
    """Sums the bytes on the device, and the bytes that are offloaded to the host."""
    marks = jax.tree.leaves(offloaded)
    on_host = sum(size for size, is_off in zip(sizes, marks, strict=True) if is_off)
    return sum(sizes) - on_host, on_host


def _whole_bytes(tree: Any) -> int:
    """Counts the bytes of a tree of abstract arrays on a device that holds them all."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
