"""What a device holds of a run's state, before, in and after a step; from shapes
alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.optim import optimizers
from jaxdist.parallel.offload import HOST as OFFLOADED
from jaxdist.parallel.optimizer_sharding import state_specs
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.step.layerwise import Trained
from jaxdist.step.update import build_update_rule
from jaxdist.trainer.compose import Composition, batch_shapes

Components = dict[str, int]
HOST_STATE = "host memory: optimizer state"  # with the moving average
# What a checkpoint holds.
STATE = (
    "parameters",
    "frozen modules",
    "optimizer state",
    "moving average",
    "model state",
    HOST_STATE,
)


def held_state(composition: Composition, platform: str) -> Components:
    """Counts the bytes of the state on a device, by component; the batch goes
    with it.
    """
    run = composition.config
    rules = composition.rules
    spec = composition.staged_spec
    tree = spec.trainable
    moments = _moments(composition, spec)
    rows = [rules.state(names, x.shape) for x, names in spec.named_trainable().values()]
    specs = state_specs(
        moments, tree, jax.tree.unflatten(jax.tree.structure(tree), rows)
    )
    places = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    waiting = _waiting(composition, moments, platform)
    held, on_host = _split(
        _leaf_bytes(rules, jax.tree.leaves(moments), places), waiting.moments
    )
    average = 0
    average_on_host = 0
    if run.train.ema_decay:
        copies = [
            jax.ShapeDtypeStruct(x.shape, "float32") for x in jax.tree.leaves(tree)
        ]
        average, average_on_host = _split(_leaf_bytes(rules, copies, rows), waiting.ema)
    params = run.precision.params
    stored = jnp.dtype(params).itemsize
    frozen = _frozen_bytes(spec, rules, params)
    modules = [_frozen_bytes(module, rules, params) for module in spec.modules.values()]
    return {
        "parameters": parameter_bytes(spec, rules, rules.stored, stored) + frozen,
        "frozen modules": sum(modules),
        "optimizer state": held,
        "moving average": average,
        HOST_STATE: on_host + average_on_host,
        "model state": _whole_bytes(spec.model_state),
        "batch": _whole_bytes(batch_shapes(run)) // rules.shape.batch_shards,
    }


def held_bytes(components: Mapping[str, int]) -> int:
    """Sums the bytes of a checkpoint that a device holds."""
    return sum(components.get(name, 0) for name in STATE)


def checkpoint_bytes(composition: Composition) -> int:
    """Counts the bytes of the whole state, as a checkpoint holds it."""
    run = composition.config
    spec = composition.spec
    params = run.precision.params
    trained = sum(x.size for x in jax.tree.leaves(spec.trainable))
    kept = trained * jnp.dtype(params).itemsize
    kept += _whole_bytes(_moments(composition, spec))
    if run.train.ema_decay:
        kept += 4 * trained
    frozen = (
        x.size * stored_dtype(x, params).itemsize
        for model in (spec, *spec.modules.values())
        for x in jax.tree.leaves(model.frozen)
    )
    return kept + sum(frozen) + _whole_bytes(spec.model_state)


def parameter_bytes(
    spec: ModelSpec, rules: Rules, rule: Callable[..., P], itemsize: int, of: str = ""
) -> int:
    """Counts a device's bytes of all trained parameters whose path starts so, laid out
    by a rule.
    """
    parts = (
        shard_size(rules, rule(names, x.shape), x.shape)
        for path, (x, names) in spec.named_trainable().items()
        if path.startswith(of)
    )
    return itemsize * sum(parts)


def _frozen_bytes(spec: ModelSpec, rules: Rules, params: str) -> int:
    """Counts a device's bytes of frozen parameters as they are stored."""
    return sum(
        shard_size(rules, rules.stored(names, x.shape), x.shape)
        * stored_dtype(x, params).itemsize
        for x, names in spec.named_frozen().values()
    )


def shard_size(rules: Rules, where: P, dims: Sequence[int]) -> int:
    """Counts the elements of an array on a device."""
    return math.prod(rules.shard_dims(where, dims))


# Kept by content: a search asks for each of them some thousand times.
_states: dict[str, Any] = {}


def _moments(composition: Composition, spec: ModelSpec) -> Any:
    """Traces the optimizer's abstract state.

    Args:
      spec: of the run's model, with its layers as they are asked for.
    """
    run = composition.config
    stored = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, run.precision.params), spec.trainable
    )
    shapes = [
        (path, x.shape, names) for path, (x, names) in spec.named_trainable().items()
    ]
    key = repr((run.optimizer, run.precision.params, shapes))
    if key not in _states:
        transform = optimizers.build_optimizer(
            run.optimizer, _rate, spec.trainable, spec.names
        )
        _states[key] = jax.eval_shape(transform.init, stored)
    return _states[key]


def _rate(step: Any) -> jax.Array:
    """Returns a learning rate: which one changes no shape."""
    return jnp.float32(1)


def _waiting(composition: Composition, moments: Any, platform: str) -> Trained:
    """Marks the moments, and the parameters' averages, that wait in the host's
    memory.
    """
    run = composition.config
    spec = composition.staged_spec
    tree = spec.trainable
    state = Trained(tree, moments, tree if run.train.ema_decay else None)
    # a CPU device's memory is the host's
    if not run.offload.optimizer or platform == "cpu":
        return jax.tree.map(lambda _: False, state)
    rule = build_update_rule(
        run.optimizer,
        None,
        composition.spec,
        run.train.ema_decay,
        spec.names,
        OFFLOADED,
    )
    assert rule.layerwise is not None
    return rule.layerwise.waiting(state)


def _leaf_bytes(rules: Rules, leaves: Iterable[Any], places: Iterable[P]) -> list[int]:
    pairs = zip(leaves, places, strict=True)
    return [shard_size(rules, s, x.shape) * x.dtype.itemsize for x, s in pairs]


def _split(sizes: Sequence[int], waiting: Any) -> tuple[int, int]:
    """Sums the bytes on the device, and those that wait on the host."""
    marks = jax.tree.leaves(waiting)
    on_host = sum(size for size, waits in zip(sizes, marks, strict=True) if waits)
    return sum(sizes) - on_host, on_host


def _whole_bytes(tree: Any) -> int:
    """Counts the bytes of a tree of abstract arrays, all of it on one device."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
