"""The staged form of a model: embed, a stack of equal blocks, head.

A staged model has `embed(batch) -> x`, `blocks` (a module whose parameters are stacked, made by
`stack`; called as `block(x, info) -> BlockOutput`) and `head(x, batch) -> Loss`. Optional are
`prepare(batch) -> dict`, values that every block reads, computed once (rotary tables), and
`blocks.layer_pattern`, names of kinds of layers that repeat over the depth, ("local", "global") say:
all have the same parameters, and a block reads its own kind, a Python string, in `info.kind`.
Written so, a model can be scanned, rematerialised block by block and pipelined without a change.

A model whose loss is a sum over samples, each term of `sum`, `count`, `aux` and `stats` made of one
sample alone (and of random numbers of its own), says so by `sums_over_samples = True` in its class:
devices may then add up whole steps on their own, and sum once (`mesh.reduce`). A loss that compares
samples (contrastive), that is a mean, or weighted by a sum over the batch is none. A subclass that
replaces some of the class does not inherit the word.

Any model may have `metrics(batch)`, named sums beside the loss for held-out data: see `as_metrics`.
And a static `stats_metrics(stats)`, what rows of metrics say of a step's stats: name -> scalar or array.

A model's `Config` may say what follows from its options alone: `faults()`, what is wrong with them;
`flops_per_token(sequence_length, convention)`, forward and backward, "causal" or "full"; `max_length`,
the most tokens of a sequence or None; `tiny(sequence_length)`, the values that change in a tiny variant;
`tensor_parallel_dims`, the names of sizes that the mesh axis tensor must divide; `choices()`, lines that a
run begins with, called under its mesh. Without them FLOPs are counted in the program, no sequence is too
long, and `verify` takes the model as it is.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError

Batch = Mapping[str, jax.Array]


class Loss(NamedTuple):
    """Sums over the batch; the objective is (sum + all aux) / global count.

    sum: nats over weighted targets. count: their weight, from the batch alone. aux: named sums
    under the same divisor. stats: named sums, handed once a step to the model's `update(stats)`.
    """

    sum: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    aux: dict[str, jax.Array] = {}
    stats: dict[str, jax.Array] = {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInfo:
    """What a block may read beside its input."""

    key: jax.Array | None  # the step's key; None: deterministic
    layer: jax.Array  # int32, global layer number
    fields: dict[str, jax.Array]  # the batch's integer fields and what `prepare` made
    kind: str = field(default="", metadata={"static": True})  # of the layer, from `blocks.layer_pattern`


class BlockOutput(NamedTuple):
    """What a block returns; x alone, (x, aux) and (x, aux, stats) mean the same.

    Of a stack of blocks, aux terms are added over the layers, and stats are stacked in the layers' order,
    [L, ...], as the blocks' parameters and state are: so `update(stats)` can change a state of each layer.
    Both are added over microbatches, accumulation, stages and devices, beside those of the head.
    """

    x: jax.Array  # [B, S, D]
    aux: dict[str, jax.Array] = {}  # scalar sums, further terms of the objective
    stats: dict[str, jax.Array] = {}  # sums over this layer's samples, of any shape, for `update(stats)`


def is_staged(model: nnx.Module) -> bool:
    """Returns whether the model has a stack `blocks`, and methods (not layers) embed and head."""
    methods = all(inspect.isfunction(getattr(type(model), name, None)) for name in ("embed", "head"))
    blocks = getattr(model, "blocks", None)
    return methods and isinstance(blocks, nnx.Module) and not isinstance(blocks, (nnx.List, nnx.Sequential))


def stack(build: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Returns `count` modules as one, every parameter [count, ...], each with its own key."""
    graph = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))[0]
    keys = jax.random.split(rngs.params(), count)
    state = jax.vmap(lambda key: nnx.split(build(nnx.Rngs(params=key)))[1])(keys)
    return nnx.merge(graph, state)


Block = Callable[[Any, jax.Array, BlockInfo], BlockOutput]


def run_blocks(
    blocks: nnx.Module,
    x: jax.Array,
    key: jax.Array | None,
    fields: dict[str, jax.Array],
    transform: Callable[[Block], Block] = lambda block: block,
    *,
    first: int | jax.Array = 0,
    pattern: tuple[str, ...] = (),
) -> BlockOutput:
    """Returns the stack applied to x by a scan, the sums of the blocks' aux terms, and stats [L, ...].

    Args:
      transform: wraps `block(parameters of one layer, x, info)`, for rematerialisation.
      first: global number of the first layer, where the stack is a part of the model's.
      pattern: kinds of these layers, repeated; (): those of the blocks.
    """
    graph, state = nnx.split(blocks)

    def apply(parameters, x, info):
        block, before = nnx.merge(graph, parameters), _own_state(parameters)
        output = apply_block(block, x, info)
        after = _own_state(nnx.state(block)) if before else {}
        if changed := [path for path, value in before.items() if after[path] is not value]:
            raise ConfigError(
                f"blocks/{changed[0]}: a block changes its own state, which a stack of blocks does not keep; "
                f"return sums in its `stats` and change it in the model's update(self, stats)"
            )
        return output

    block = transform(apply)

    def one_layer(x, layer, parameters, kind):
        x, *sums = block(parameters, x, BlockInfo(key, layer, fields, kind))
        return x, sums

    x, (aux, stats) = scan_layers(one_layer, x, state, pattern or pattern_of(blocks), first=first)
    return BlockOutput(x, jax.tree.map(lambda terms: terms.sum(0), aux), stats)


def apply_block(block: Any, x: jax.Array, info: BlockInfo) -> BlockOutput:
    """Returns what a block gives; its parts whose class has a `block_info` (adapters) see that meanwhile."""
    parts = [part for _, part in nnx.iter_modules(block) if hasattr(type(part), "block_info")]
    for part in parts:
        vars(part)["block_info"] = info  # not by nnx, to which it would be state
    try:
        return as_block_output(block(x, info))
    finally:
        for part in parts:
            del vars(part)["block_info"]


def as_block_output(value: Any) -> BlockOutput:
    """Returns what a block gave, its stats in float32.

    Raises:
      ConfigError: it is neither x, nor (x, aux), nor (x, aux, stats).
    """
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(parts) <= 3 or not all(isinstance(part, Mapping) for part in parts[1:]):
        raise ConfigError(
            f"a block returned {_shapes(value)}; required: x, (x, aux) or (x, aux, stats), with dicts of "
            f"scalar sums for the objective, and of sums for update(self, stats)"
        )
    output = BlockOutput(*parts)
    return output._replace(stats={name: jnp.asarray(x, jnp.float32) for name, x in output.stats.items()})


def _own_state(state: nnx.State) -> dict[str, jax.Array]:
    """Returns path -> value of variables that are neither parameters nor random streams."""
    others = (nnx.Param, nnx.RngState)
    return {
        "/".join(map(str, path)): v.get_value()
        for path, v in nnx.to_flat_state(state)
        if isinstance(v, nnx.Variable) and not isinstance(v, others)
    }


def pattern_of(blocks: Any) -> tuple[str, ...]:
    """Returns the kinds of layers that repeat over a stack's depth; one without a name by default."""
    return getattr(blocks, "layer_pattern", ("",))


def scan_layers(
    body: Callable[..., tuple[Any, Any]],
    carry: Any,
    state: Any,
    pattern: tuple[str, ...],
    *,
    first: int | jax.Array = 0,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Returns the last carry and what the layers gave, stacked: `jax.lax.scan` where layers differ.

    A layer's kind is static in the body. So a pattern of several kinds is a scan over groups of
    layers, and one over the group of those beyond whole groups.

    Args:
      body: (carry, layer number, its parameters, its kind) -> (carry, what it gives).
      state: parameters, and what else each layer has, [L, ...].
      first: number of the first layer.
    """
    depth, period = jax.tree.leaves(state)[0].shape[0], len(pattern)
    items = (first + jnp.arange(depth), state)
    if period == 1:
        return jax.lax.scan(lambda carry, item: body(carry, *item, *pattern), carry, items, reverse=reverse)
    turn = -1 if reverse else 1

    def one_group(carry, items):
        leaves, structure = jax.tree.flatten(items)
        layers = [jax.tree.unflatten(structure, each) for each in zip(*map(jnp.unstack, leaves), strict=True)]
        outputs = []
        for item, kind in list(zip(layers, pattern, strict=False))[::turn]:
            carry, out = body(carry, *item, kind)
            outputs.append(out)
        return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *outputs[::turn])

    whole, outputs = depth - depth % period, []
    for start, stop, size in [(0, whole, period), (whole, depth, depth - whole)][::turn]:
        if start < stop:
            part = jax.tree.map(lambda x: x[start:stop].reshape(-1, size, *x.shape[1:]), items)  # noqa: B023
            carry, out = jax.lax.scan(one_group, carry, part, reverse=reverse)
            outputs.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs[::turn])


def staged_loss(
    model: Any, batch: Batch, key: jax.Array | None, transform: Callable[[Block], Block] = lambda block: block
) -> Loss:
    """Returns the loss of a staged model."""
    fields = shared_fields(model, batch)
    output = run_blocks(model.blocks, model.embed(batch), key, fields, transform)
    return with_block_sums(as_loss(model.head(output.x, batch), batch), output.aux, output.stats)


def with_block_sums(loss: Loss, aux: dict[str, jax.Array], stats: dict[str, jax.Array]) -> Loss:
    """Returns the head's loss with the aux terms and stats of the blocks.

    Raises:
      ConfigError: the head has one of the same name.
    """
    for kind, head, blocks in (("aux", loss.aux, aux), ("stats", loss.stats, stats)):
        if both := sorted(head.keys() & blocks.keys()):
            raise ConfigError(
                f"blocks and head both return {kind} called {', '.join(both)}; rename one of them"
            )
    return loss._replace(aux=loss.aux | aux, stats=loss.stats | stats)


def as_loss(value: Any, batch: Batch) -> Loss:
    """Returns what a model's `loss` gave as a Loss of float32 sums.

    Accepted are a Loss, a plain tuple (sum, count[, aux[, stats]]), a dict with these names, or a
    scalar mean over the batch's samples, whose count is then the number of samples.

    Raises:
      ConfigError: it is none of them.
    """
    sums = None
    if isinstance(value, Mapping) and {"sum", "count"} <= set(value) <= set(Loss._fields):
        sums = Loss(**value)
    elif isinstance(value, (tuple, list)) and 2 <= len(value) <= 4:
        sums = Loss(*value)
    elif _is_scalar(value):
        samples = next(iter(batch.values())).shape[0]
        sums = Loss(jnp.float32(value) * samples, jnp.float32(samples))
    if sums is None or not _has_sums(sums):
        raise ConfigError(
            f"loss (or head) returned {_shapes(value)}; required: a scalar mean, or a tuple "
            f"(sum, count[, aux[, stats]]): the scalar sum, how many it sums, a dict of further scalar sums "
            f"of the objective, and one of sums for update(self, stats)"
        )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), sums)


# What makes a loss even where a class has it first, and what a subclass may replace without changing it.
_OF_THE_LOSS = ("__init__", "__call__", "loss", "embed", "prepare", "head")
_BESIDE_THE_LOSS = ("Config", "casts_itself", "metrics", "stats_metrics", "update")


def who_sums_over_samples(model_class: type) -> type | None:
    """Returns the class that says of a model that its loss is a sum over samples; None if none does.

    The word of a class counts for what it is made of itself: a subclass that replaces a method or another
    attribute, a helper of `head` or the class of its layers, may make another loss, so it repeats the word.
    """
    owners = model_class.__mro__
    for place, owner in enumerate(owners):
        if "sums_over_samples" in vars(owner):
            return owner if vars(owner)["sums_over_samples"] else None
        if any(_may_change_loss(name, owners[place + 1 :]) for name in vars(owner)):
            return None
    return None


def sums_over_samples(model: nnx.Module) -> bool:
    """Returns whether the loss of a model is a sum over samples, as a class of it says.

    The word of one of ours counts for models of our layers: with others in their place, which may mix
    samples, a subclass repeats it.
    """
    owner = who_sums_over_samples(type(model))
    if owner is None or not _is_ours(owner):
        return owner is not None
    # A subclass of ours may be anybody's: what it replaces was looked at.
    return all(x is model or _is_ours(type(x)) for _, x in nnx.iter_modules(model))


def _is_ours(part: type) -> bool:
    return part.__module__.startswith("jaxdist.")


def _may_change_loss(name: str, bases: Sequence[type]) -> bool:
    """Returns whether a class that has an attribute of its own may have another loss than its bases."""
    if name in _OF_THE_LOSS or name in _BESIDE_THE_LOSS:
        return name in _OF_THE_LOSS
    if name.startswith("__") or hasattr(nnx.Module, name):
        return False
    return any(name in vars(base) for base in bases)


def has_metrics(model_class: type) -> bool:
    """Returns whether a model has a method `metrics` (an attribute of that name is its own affair)."""
    return inspect.isfunction(getattr(model_class, "metrics", None))


def as_metrics(value: Any, count: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns what a model's `metrics(batch)` gave as name -> (sum, what to divide it by), float32.

    Args:
      value: name -> scalar sum over the batch, divided by the loss's count; or -> (sum, count).
      count: of the loss.

    Raises:
      ConfigError: it is something else, or takes a name that an evaluation has already.
    """
    pairs: dict[str, tuple[jax.Array, jax.Array]] = {}
    for name, given in value.items() if isinstance(value, Mapping) else [("", value)]:
        pair = given if isinstance(given, (tuple, list)) else (given, count)
        if not isinstance(value, Mapping) or len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise ConfigError(
                f"metrics(batch) returned {_shapes(value)}; required: a dict of scalar sums, or of pairs "
                f"(sum, count)"
            )
        pairs[str(name)] = jnp.asarray(pair[0], jnp.float32), jnp.asarray(pair[1], jnp.float32)
    if taken := sorted({"loss", "tokens"} & pairs.keys()):
        raise ConfigError(f"metrics(batch) returned {', '.join(taken)}, which evaluations have; rename it")
    return pairs


def _has_sums(loss: Loss) -> bool:
    by_name = isinstance(loss.aux, Mapping) and isinstance(loss.stats, Mapping)
    return by_name and all(map(_is_scalar, (loss.sum, loss.count, *loss.aux.values())))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (int, float)) or (hasattr(x, "ndim") and x.ndim == 0)


def _shapes(value: Any) -> str:
    shown = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x, value)
    return str(shown).replace("'", "")


def shared_fields(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns the batch's integer fields and what the model prepares for all blocks."""
    fields = {n: v for n, v in batch.items() if jnp.issubdtype(v.dtype, jnp.integer)}
    return fields | (model.prepare(batch) if hasattr(model, "prepare") else {})
