"""The staged form of a model: embed, a stack of equal blocks, head.

A staged model has `embed(batch) -> x`, `blocks` (a module whose parameters are stacked,
made by `stack`; called as `block(x, info) -> BlockOutput`) and `head(x, batch) ->
Loss`. Optional are `prepare(batch) -> dict`, values that every block reads, computed
once (rotary tables), and `blocks.layer_pattern`, names of kinds of layers that repeat
over the depth, ("local", "global") say: all have the same parameters, and a block reads
its own kind, a Python string, in `info.kind`. Layers of unequal parameters that repeat
are a `stack` of `LayerGroup`s; those that come first are a stack `first_blocks`, which
runs where the embedding does and returns neither aux terms nor stats. Written so, a
model can be scanned, rematerialised block by block and pipelined without a change.

A model whose loss is a sum over samples, each term of `sum`, `count`, `aux` and `stats`
made of one sample alone (and of random numbers of its own), says so by
`sums_over_samples = True` in its class: devices may then add up whole steps on their
own, and sum once (`mesh.reduce`). A loss that compares samples (contrastive), that is a
mean, or weighted by a sum over the batch is none. A subclass that replaces some of the
class does not inherit the word.

Any model may have `metrics(batch)`, named sums beside the loss for held-out data: see
`as_metrics`. And a static `stats_metrics(stats)`, what rows of metrics say of a step's
stats: name -> scalar or array.

A model's `Config` may say what follows from its options alone: `faults()`, what is
wrong with them; `flops_per_token(sequence_length, convention)`, forward and backward,
"causal" or "full"; `costs(sequence_length)`, what its ops need (`ops.costs`), which
`plan` reads; `max_length`, the most tokens of a sequence or None;
`tiny(sequence_length)`, the values that change in a tiny variant;
`tensor_parallel_dims`, the names of sizes that the mesh axis tensor must divide;
`layers_on(places)`, the `num_layers` with which each place of a pipeline has one block;
`choices()`, lines that a run begins with, called under its mesh. Without them FLOPs are
counted in the program, no sequence is too long, and `verify` takes the model as it is.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.protocols.layer_scan import scan_layers

Batch = Mapping[str, jax.Array]


class Loss(NamedTuple):
    """Sums over the batch; the objective is (sum + all aux) / global count.

    sum: nats over weighted targets. count: their weight, from the batch alone. aux:
    named sums under the same divisor. stats: named sums, handed once a step to the
    model's `update(stats)`.
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
    # of the layer, from `blocks.layer_pattern`
    kind: str = field(default="", metadata={"static": True})


class BlockOutput(NamedTuple):
    """What a block returns; x alone, (x, aux) and (x, aux, stats) mean the same.

    Of a stack of blocks, aux terms are added over the layers, and stats are stacked in
    the layers' order, [L, ...], as the blocks' parameters and state are: so
    `update(stats)` can change a state of each layer. Those of a stack of `LayerGroup`s
    are [groups, layers of a group that give them, ...]. Both are added over
    microbatches, accumulation, stages and devices, beside those of the head.
    """

    x: jax.Array  # [B, S, D]
    aux: dict[str, jax.Array] = {}  # scalar sums, further terms of the objective
    # sums over this layer's samples, of any shape, for `update(stats)`
    stats: dict[str, jax.Array] = {}


def is_staged(model: nnx.Module) -> bool:
    """Checks whether the model has a stack `blocks`, and methods (not layers) embed
    and head.
    """
    methods = all(
        inspect.isfunction(getattr(type(model), name, None))
        for name in ("embed", "head")
    )
    return methods and _is_stack(getattr(model, "blocks", None))


def _is_stack(blocks: Any) -> bool:
    return isinstance(blocks, nnx.Module) and not isinstance(
        blocks, (nnx.List, nnx.Sequential)
    )


def stack(
    build: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Returns `count` modules as one, every parameter [count, ...], each with its own
    key.
    """
    graph = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))[0]
    keys = jax.random.split(rngs.params(), count)
    state = jax.vmap(lambda key: nnx.split(build(nnx.Rngs(params=key)))[1])(keys)
    return nnx.merge(graph, state)


class LayerGroup(nnx.Module):
    """Consecutive layers of unequal parameters as one block: a stack of groups is
    scanned as any other.

    The layers, attributes `layer_0`, `layer_1`, ..., are rematerialised one by one.

    Args:
      kinds: what each of them reads in `info.kind`; () for no names.
    """

    def __init__(self, layers: Sequence[nnx.Module], kinds: Sequence[str] = ()) -> None:
        self.kinds = tuple(kinds) or ("",) * len(layers)
        for number, layer in enumerate(layers):
            setattr(self, f"layer_{number}", layer)

    def __call__(self, x: jax.Array, info: BlockInfo) -> BlockOutput:
        return _in_order(
            [partial(apply_block, layer) for layer in layers_of(self)],
            x,
            infos_of(self, info),
        )


def layers_of(block: nnx.Module) -> list[Any]:
    """Returns the layers of a group (or of a stack of groups); another block is one
    layer.
    """
    if not isinstance(block, LayerGroup):
        return [block]
    return [getattr(block, f"layer_{number}") for number in range(len(block.kinds))]


def infos_of(block: nnx.Module, info: BlockInfo) -> list[BlockInfo]:
    """Lists what each layer of a block reads, from what its first one does."""
    if not isinstance(block, LayerGroup):
        return [info]
    return [
        replace(info, layer=info.layer + n, kind=kind)
        for n, kind in enumerate(block.kinds)
    ]


def _in_order(
    layers: Sequence[Callable[..., BlockOutput]],
    x: jax.Array,
    infos: Sequence[BlockInfo],
):
    """Applies a block's layers one after another: aux terms added, stats of
    several stacked.
    """
    if len(layers) == 1:
        return layers[0](x, *infos)
    aux: dict[str, jax.Array] = {}
    stats: dict[str, list[jax.Array]] = {}
    for layer, info in zip(layers, infos, strict=True):
        x, own, sums = layer(x, info)
        aux |= {
            name: aux[name] + term if name in aux else term
            for name, term in own.items()
        }
        stats |= {name: [*stats.get(name, ()), value] for name, value in sums.items()}
    return BlockOutput(
        x, aux, {name: jnp.stack(values) for name, values in stats.items()}
    )


Block = Callable[[Any, jax.Array, BlockInfo], BlockOutput]
Transform = Callable[[Block], Block]


def unchanged(block: Block) -> Block:
    """Wraps a block in nothing."""
    return block


@dataclass(frozen=True)
class Recompute:
    """What of a stack's layers is computed again, where that is more than one wrapper
    of all.
    """

    layer: Transform  # wraps a layer
    # wraps `run(parameters, x, first)` of a group
    group: Callable[[Callable], Callable] = lambda run: run
    every: int = 1  # layers of a group
    last: int = 0  # layers at the end that are wrapped so; 0: all
    # wraps those before them, and `first_blocks`
    others: Transform = unchanged

    @classmethod
    def of(cls, transform: "Transform | Recompute") -> "Recompute":
        return transform if isinstance(transform, Recompute) else cls(transform)

    @property
    def before(self) -> Transform:
        """Wraps layers that come before the stack."""
        return self.others if self.last else self.layer


def run_blocks(
    blocks: nnx.Module,
    x: jax.Array,
    key: jax.Array | None,
    fields: dict[str, jax.Array],
    transform: Transform | Recompute = unchanged,
    *,
    first: int | jax.Array = 0,
    pattern: tuple[str, ...] = (),
) -> BlockOutput:
    """Returns the stack applied to x by a scan, the sums of the blocks' aux terms, and
    stats [L, ...].

    Args:
      transform: wraps `block(parameters of one layer, x, info)`, for rematerialisation;
        or says more.
      first: global number of the first layer, where the stack is a part of the model's.
      pattern: kinds of these layers, repeated; (): those of the blocks.
    """
    graphs, states = zip(*map(nnx.split, layers_of(blocks)), strict=True)
    how = Recompute.of(transform)
    kinds = pattern or pattern_of(blocks)
    stride = len(graphs)

    def run(wrap: Transform, states, x, first, kinds=kinds):
        layers = [wrap(_applied(graph)) for graph in graphs]

        def one_block(x, layer, parameters, kind):
            calls = [
                partial(apply, own)
                for apply, own in zip(layers, parameters, strict=True)
            ]
            x, *sums = _in_order(
                calls, x, infos_of(blocks, BlockInfo(key, layer, fields, kind))
            )
            return x, sums

        return scan_layers(one_block, x, states, kinds, first=first, stride=stride)

    depth = jax.tree.leaves(states)[0].shape[0]
    # of a stack of groups one of them, too, whose layers would keep an input each
    if how.every > 1:
        x, sums = _in_groups(
            partial(run, how.layer), how, states, x, first, how.every // stride
        )
    elif 0 < (last := how.last // stride) < depth:
        cut = depth - last
        # whose gradients are joined
        parts = [jnp.split(leaf, [cut]) for leaf in jax.tree.leaves(states)]
        fore, rear = (
            jax.tree.unflatten(jax.tree.structure(states), part)
            for part in zip(*parts, strict=True)
        )
        turn = cut % len(kinds)
        x, sums = run(how.others, fore, x, first)
        x, more = run(
            how.layer, rear, x, first + cut * stride, (*kinds[turn:], *kinds[:turn])
        )
        sums = jax.tree.map(lambda *own: jnp.concatenate(own), sums, more)
    else:
        x, sums = run(how.layer, states, x, first)
    aux, stats = sums
    return BlockOutput(x, jax.tree.map(lambda terms: terms.sum(0), aux), stats)


def _in_groups(
    run: Callable, how: Recompute, states: Any, x: jax.Array, first, size: int
) -> tuple[Any, Any]:
    """Scans over groups of `size` of a stack's items, each wrapped
    as one.
    """
    groups = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), states)
    apply = how.group(run)

    def one_group(x, layer, parameters, kind):
        return apply(parameters, x, layer)

    x, sums = scan_layers(one_group, x, groups, ("",), first=first, stride=how.every)
    return x, jax.tree.map(lambda own: own.reshape(-1, *own.shape[2:]), sums)


def _applied(graph: Any) -> Block:
    """Returns a layer of this graph as a function of its arrays, too."""

    def apply(parameters, x, info):
        block = nnx.merge(graph, parameters)
        before = _own_state(parameters)
        output = apply_block(block, x, info)
        after = _own_state(nnx.state(block)) if before else {}
        changed = [path for path, value in before.items() if after[path] is not value]
        if changed:
            raise ConfigError(
                f"blocks/{changed[0]}: a block changes its own state, which a stack of blocks does not keep; "
                f"return sums in its `stats` and change it in the model's update(self, stats)"
            )
        return output

    return apply


def apply_block(block: Any, x: jax.Array, info: BlockInfo) -> BlockOutput:
    """Applies a block; its parts whose class has a `block_info` (adapters)
    see that meanwhile.
    """
    parts = [
        part for _, part in nnx.iter_modules(block) if hasattr(type(part), "block_info")
    ]
    for part in parts:
        vars(part)["block_info"] = info  # not by nnx, to which it would be state
    try:
        return as_block_output(block(x, info))
    finally:
        for part in parts:
            del vars(part)["block_info"]


def as_block_output(value: Any) -> BlockOutput:
    """Makes a `BlockOutput` of what a block gave, its stats in float32.

    Raises:
      ConfigError: it is neither x, nor (x, aux), nor (x, aux, stats).
    """
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(parts) <= 3 or not all(
        isinstance(part, Mapping) for part in parts[1:]
    ):
        raise ConfigError(
            f"a block returned {_shapes(value)}; required: x, (x, aux) or (x, aux, stats), with dicts of "
            f"scalar sums for the objective, and of sums for update(self, stats)"
        )
    output = BlockOutput(*parts)
    return output._replace(
        stats={name: jnp.asarray(x, jnp.float32) for name, x in output.stats.items()}
    )


def _own_state(state: nnx.State) -> dict[str, jax.Array]:
    """Returns path -> value of variables that are neither parameters nor random
    streams.
    """
    others = (nnx.Param, nnx.RngState)
    return {
        "/".join(map(str, path)): v.get_value()
        for path, v in nnx.to_flat_state(state)
        if isinstance(v, nnx.Variable) and not isinstance(v, others)
    }


def pattern_of(blocks: Any) -> tuple[str, ...]:
    """Returns the kinds of layers that repeat over a stack's depth; one without a name
    by default.
    """
    return getattr(blocks, "layer_pattern", ("",))


def head_loss(model: Any, x: jax.Array, batch: Batch) -> Loss:
    """Computes the loss of a staged model by its own head."""
    return as_loss(model.head(x, batch), batch)


def staged_loss(
    model: Any,
    batch: Batch,
    key: jax.Array | None,
    transform: Transform | Recompute = unchanged,
) -> Loss:
    """Returns the loss of a staged model by its own head."""
    output = staged_output(model, batch, key, transform)
    loss = head_loss(model, output.x, batch)
    return with_block_sums(loss, output.aux, output.stats)


def staged_output(
    model: Any,
    batch: Batch,
    key: jax.Array | None,
    transform: Transform | Recompute = unchanged,
) -> BlockOutput:
    """Computes what enters the head of a staged model, and the sums of its blocks."""
    fields = shared_fields(model, batch)
    first = layers_before(model)
    x = embedded(model, batch, key, Recompute.of(transform).before)
    return run_blocks(model.blocks, x, key, fields, transform, first=first)


def embedded(
    model: Any,
    batch: Batch,
    key: jax.Array | None,
    transform: Transform = unchanged,
) -> jax.Array:
    """Computes what enters `blocks`: the embedding, and of a model with `first_blocks`
    what these make of it.

    Raises:
      ConfigError: they return aux terms or stats.
    """
    x = model.embed(batch)
    if not layers_before(model):
        return x
    x, aux, stats = run_blocks(
        model.first_blocks, x, key, shared_fields(model, batch), transform
    )
    names = sorted({*aux, *stats})
    if names:
        raise ConfigError(
            f"first_blocks return {', '.join(names)}; layers with aux terms or stats belong in `blocks`"
        )
    return x


def layers_before(model: Any) -> int:
    """Returns the number of layers in `first_blocks`; 0 for a model without them."""
    first: Any = getattr(model, "first_blocks", None)
    if not _is_stack(first):
        return 0
    return jax.tree.leaves(nnx.state(first))[0].shape[0] * len(layers_of(first))


def with_block_sums(
    loss: Loss, aux: dict[str, jax.Array], stats: dict[str, jax.Array]
) -> Loss:
    """Returns the head's loss with the aux terms and stats of the blocks.

    Raises:
      ConfigError: the head has one of the same name.
    """
    for kind, head, blocks in (("aux", loss.aux, aux), ("stats", loss.stats, stats)):
        both = sorted(head.keys() & blocks.keys())
        if both:
            raise ConfigError(
                f"blocks and head both return {kind} called {', '.join(both)}; rename one of them"
            )
    return loss._replace(aux=loss.aux | aux, stats=loss.stats | stats)


def as_loss(value: Any, batch: Batch) -> Loss:
    """Makes a Loss of float32 sums of what a model's `loss` gave.

    Accepted are a Loss, a plain tuple (sum, count[, aux[, stats]]), a dict with these
    names, or a scalar mean over the batch's samples, whose count is then the number of
    samples.

    Raises:
      ConfigError: it is none of them.
    """
    sums = None
    if isinstance(value, Mapping) and {"sum", "count"} <= set(value) <= set(
        Loss._fields
    ):
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


def has_metrics(model_class: type) -> bool:
    """Checks whether a model has a method `metrics` (an attribute of that name is its
    own affair).
    """
    return inspect.isfunction(getattr(model_class, "metrics", None))


def as_metrics(value: Any, count: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Makes of what a model's `metrics(batch)` gave name -> (sum, what to divide it
    by), float32.

    Args:
      value: name -> scalar sum over the batch, divided by the loss's count; or -> (sum,
        count).
      count: of the loss.

    Raises:
      ConfigError: it is something else, or takes a name that an evaluation has already.
    """
    pairs: dict[str, tuple[jax.Array, jax.Array]] = {}
    for name, given in value.items() if isinstance(value, Mapping) else [("", value)]:
        pair = given if isinstance(given, (tuple, list)) else (given, count)
        if (
            not isinstance(value, Mapping)
            or len(pair) != 2
            or not all(map(_is_scalar, pair))
        ):
            raise ConfigError(
                f"metrics(batch) returned {_shapes(value)}; required: a dict of scalar sums, or of pairs "
                f"(sum, count)"
            )
        pairs[str(name)] = (
            jnp.asarray(pair[0], jnp.float32),
            jnp.asarray(pair[1], jnp.float32),
        )
    taken = sorted({"loss", "tokens"} & pairs.keys())
    if taken:
        raise ConfigError(
            f"metrics(batch) returned {', '.join(taken)}, which evaluations have; rename it"
        )
    return pairs


def _has_sums(loss: Loss) -> bool:
    by_name = isinstance(loss.aux, Mapping) and isinstance(loss.stats, Mapping)
    return by_name and all(map(_is_scalar, (loss.sum, loss.count, *loss.aux.values())))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (int, float)) or (hasattr(x, "ndim") and x.ndim == 0)


def _shapes(value: Any) -> str:
    shown = jax.tree.map(
        lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x, value
    )
    return str(shown).replace("'", "")


def shared_fields(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns the batch's integer fields and what the model prepares for all blocks."""
    fields = {n: v for n, v in batch.items() if jnp.issubdtype(v.dtype, jnp.integer)}
    return fields | (model.prepare(batch) if hasattr(model, "prepare") else {})
