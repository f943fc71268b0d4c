"""The staged form of a model: embed, a stack of equal blocks, head.

Overview. `staged_output` runs a model up to its head: `embedded` embeds a batch, and
`run_blocks` scans over the stack. `head_loss` applies the head, and `as_loss` converts
its result to a `Loss`. Each layer is a function of its parameters (`_as_function`), so
that a wrapper for rematerialisation can be put around it (`Recompute`).

Letters: B rows of a batch, S sequence length, D width of the model, L layers (or
blocks) of a stack.

A staged model can be scanned, rematerialised block by block and pipelined without a
change. It has three parts:

- `embed(batch) -> x`;
- `blocks`, a module whose parameters are stacked (see `stack`). A block is called as
  `block(x, info) -> BlockOutput`;
- `head(x, batch) -> Loss`.

Optional parts:

- `prepare(batch) -> dict` computes values once that every block reads (rotary tables).
- `blocks.layer_pattern` names kinds of layers that repeat over the depth, such as
  ("local", "global"). All kinds have the same parameters. A block reads its kind, a
  Python string, in `info.kind`.
- `LayerGroup`s, if layers of unequal parameters repeat: `blocks` is a stack of them.
- `first_blocks` is a stack of layers that come first. It runs in the same place as the
  embedding, and returns neither aux terms nor stats.
- `head_has_layers = True`, if the head applies layers (`apply_layer`). It is then called
  as `head(x, batch, key, transform)`, with the step's random key and the wrapper of the
  layers' functions.
- `aux_counts(batch)` counts, over a whole batch, what aux terms and metrics of the head
  are divided by: name -> scalar, for those whose count is not that of the loss. The
  count of the loss is then the sum of `weights`. The head multiplies such a term by
  the field `count_per_aux/NAME` of the batch, if it is there (see `protocols.objective`).

A class sets `sums_over_samples = True` if its loss is a sum over samples: each term of
`sum`, `count`, `aux` and `stats` depends on one sample only, and on its random numbers.
Devices may then accumulate a whole step locally and sum once (`mesh.reduce`). Losses
that compare samples (contrastive), means, and losses weighted by a sum over the batch
are no such sums. A subclass that overrides parts of the class does not inherit the
declaration.

Any model may have `metrics(batch)`, named sums for held-out data (see `as_metrics`).
It may have a static `stats_metrics(stats)`, which turns the stats of a step into
metrics: name -> scalar or array.

The class `Config` of a model may have these, which depend on the options only:

- `faults()` yields messages about its options.
- `flops_per_token(sequence_length, convention)` counts forward and backward FLOPs. The
  convention is "causal" or "full". Without it FLOPs are counted in the program.
- `costs(sequence_length)` lists the costs of its ops (`ops.costs`) for `plan`.
- `max_length` is the largest number of tokens in a sequence; None for no limit.
- `tiny(sequence_length)` lists the values that differ in a tiny variant. Without it
  `verify` uses the model as it is.
- `tensor_parallel_dims` names the sizes that the mesh axis `tensor` must divide.
- `layers_on(places)` is the `num_layers` that gives each place of a pipeline one block.
  A place is a chunk of layers on a stage.
- `choices()` lists lines for the start of a run. It is called under the run's mesh.
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
# metrics of a step that a loss must not report under its own `metrics`
STEP_METRICS = frozenset(
    ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "loss_scale")
)


class Loss(NamedTuple):
    """Sums over the batch; the objective is (sum + all aux) / global count.

    For token models, `count` is the sum of the targets' weights. The metric `tokens`
    counts the targets whose weight is above 0. The two differ if weights are fractions.
    """

    sum: jax.Array  # sum of the targets' losses times their weights, in nats
    # sum of the targets' weights, or number of samples; depends on the batch only
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    aux: dict[str, jax.Array] = {}  # further sums with the same divisor
    stats: dict[
        str, jax.Array
    ] = {}  # sums for the model's `update(stats)`, once a step
    # scalar sums that are only reported, as means: divided by `count`, or by a count of
    # their own
    metrics: dict[str, jax.Array] = {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInfo:
    """Values that a block may read in addition to its input."""

    key: jax.Array | None  # the step's random key; None: the model is deterministic
    layer: jax.Array  # int32, global number of the layer
    fields: dict[str, jax.Array]  # integer fields of the batch and those of `prepare`
    # kind of the layer, from `blocks.layer_pattern`
    kind: str = field(default="", metadata={"static": True})


class BlockOutput(NamedTuple):
    """The output of a block; a block may also return x, (x, aux) or (x, aux, stats).

    For a stack of blocks, aux terms are summed over the layers. Stats are stacked in the
    order of the layers, [L, ...], like the parameters and the state of the blocks. So
    `update(stats)` can change the state of each layer. Stats of a stack of
    `LayerGroup`s are [groups, layers of a group that have the stat, ...]. Both are
    summed over microbatches, accumulation, stages and devices, as those of the head
    are.
    """

    x: jax.Array  # [B, S, D]
    aux: dict[str, jax.Array] = {}  # scalar sums, further terms of the objective
    # sums over the samples, of any shape, for `update(stats)`
    stats: dict[str, jax.Array] = {}


def is_staged(model: nnx.Module) -> bool:
    """Checks whether a model has a stack `blocks`, and methods `embed` and `head`."""
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
    """Builds modules with different keys and stacks their parameters.

    Args:
      build: builds one module.
      count: number of modules.
      rngs: random streams; `params` is used.

    Returns:
      A module whose parameters are [count, ...].
    """
    graph = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))[0]
    keys = jax.random.split(rngs.params(), count)
    state = jax.vmap(lambda key: nnx.split(build(nnx.Rngs(params=key)))[1])(keys)
    return nnx.merge(graph, state)


class LayerGroup(nnx.Module):
    """A block of consecutive layers with unequal parameters.

    A stack of groups is scanned like any other. The layers are the attributes
    `layer_0`, `layer_1`, ... They are rematerialised one by one.

    Args:
      layers: the layers in order.
      kinds: `info.kind` of each layer; () for no kinds.
    """

    def __init__(self, layers: Sequence[nnx.Module], kinds: Sequence[str] = ()) -> None:
        self.kinds = tuple(kinds) or ("",) * len(layers)
        for number, layer in enumerate(layers):
            setattr(self, f"layer_{number}", layer)

    def __call__(self, x: jax.Array, info: BlockInfo) -> BlockOutput:
        """Applies the layers one after another."""
        layers = [partial(apply_block, layer) for layer in layers_of(self)]
        return _apply_in_order(layers, x, infos_of(self, info))


def layers_of(block: nnx.Module) -> list[Any]:
    """Lists the layers of a group, or of a stack of groups; else the block itself."""
    if not isinstance(block, LayerGroup):
        return [block]
    return [getattr(block, f"layer_{number}") for number in range(len(block.kinds))]


def infos_of(block: nnx.Module, info: BlockInfo) -> list[BlockInfo]:
    """Lists the infos of a block's layers, from that of the first layer."""
    if not isinstance(block, LayerGroup):
        return [info]
    return [
        replace(info, layer=info.layer + number, kind=kind)
        for number, kind in enumerate(block.kinds)
    ]


def _apply_in_order(
    layers: Sequence[Callable[[jax.Array, BlockInfo], BlockOutput]],
    x: jax.Array,
    infos: Sequence[BlockInfo],
) -> BlockOutput:
    """Applies layers one after another, sums aux terms and stacks stats.

    The output of a single layer is returned as it is.
    """
    if len(layers) == 1:
        return layers[0](x, infos[0])
    aux: dict[str, jax.Array] = {}
    stats: dict[str, list[jax.Array]] = {}
    for layer, info in zip(layers, infos, strict=True):
        x, layer_aux, layer_stats = layer(x, info)
        for name, term in layer_aux.items():
            aux[name] = aux[name] + term if name in aux else term
        for name, value in layer_stats.items():
            stats.setdefault(name, []).append(value)
    stacked = {name: jnp.stack(values) for name, values in stats.items()}
    return BlockOutput(x, aux, stacked)


Block = Callable[[Any, jax.Array, BlockInfo], BlockOutput]
Transform = Callable[[Block], Block]


def unchanged(block: Block) -> Block:
    """Gives a block back as it is: the default of what may wrap blocks."""
    return block


@dataclass(frozen=True)
class Recompute:
    """Wrappers of the functions of a stack's layers, for rematerialisation."""

    layer: Transform  # wraps the function of a layer
    # wraps the function (parameters, x, number of the first layer) of a group of layers
    group: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run
    every: int = 1  # number of layers in a group
    last: int = 0  # number of final layers that `layer` applies to; 0: all
    # wraps the function of layers before the `last` ones, and of `first_blocks`; unused
    # if `last` is 0
    others: Transform = unchanged

    @classmethod
    def of(cls, transform: "Transform | Recompute") -> "Recompute":
        """Makes a `Recompute` from a wrapper of all layers; keeps a `Recompute`."""
        return transform if isinstance(transform, Recompute) else cls(transform)

    @property
    def before(self) -> Transform:
        """The wrapper of layers that come before the stack, `first_blocks`."""
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
    """Applies a stack of blocks to x by a scan.

    Args:
      blocks: the stack.
      x: input of the first block, [B, S, D].
      key: random key of the step; None: the model is deterministic.
      fields: `BlockInfo.fields` of all blocks.
      transform: wraps the function (parameters of a layer, x, info) -> BlockOutput, for
        rematerialisation. A `Recompute` has several such wrappers.
      first: global number of the first layer, if the stack holds only some of the
        model's layers.
      pattern: kinds of these layers, repeated; (): the pattern of `blocks`.

    Returns:
      x after the last block, sums of aux terms over the layers, and stats [L, ...].
    """
    graphs, states = zip(*map(nnx.split, layers_of(blocks)), strict=True)
    recompute = Recompute.of(transform)
    kinds = pattern or pattern_of(blocks)
    stride = len(graphs)  # layers in a block: 1, or those of a `LayerGroup`

    def run(
        transform: Transform,
        kinds: tuple[str, ...],
        states: Any,
        x: jax.Array,
        first: int | jax.Array,
    ) -> tuple[jax.Array, list[Any]]:
        """Scans over blocks; returns x, and the aux terms and stats of each block."""
        layers = [transform(_as_function(graph)) for graph in graphs]

        def one_block(
            x: jax.Array, number: jax.Array, parameters: Any, kind: str
        ) -> tuple[jax.Array, list[Any]]:
            calls = [
                partial(layer, layer_parameters)
                for layer, layer_parameters in zip(layers, parameters, strict=True)
            ]
            infos = infos_of(blocks, BlockInfo(key, number, fields, kind))
            x, aux, stats = _apply_in_order(calls, x, infos)
            return x, [aux, stats]

        return scan_layers(one_block, x, states, kinds, first=first, stride=stride)

    depth = jax.tree.leaves(states)[0].shape[0]
    last = recompute.last // stride
    # A stack of `LayerGroup`s is grouped even if each group is one of them: otherwise
    # each of its layers would keep an input.
    if recompute.every > 1:
        x, sums = _run_in_groups(
            partial(run, recompute.layer, kinds),
            recompute,
            states,
            x,
            first=first,
            size=recompute.every // stride,
        )
    elif 0 < last < depth:
        num_early = depth - last
        early, late = _split_stack(states, num_early)
        # The kinds of the late blocks start where those of the early blocks end.
        turn = num_early % len(kinds)
        late_kinds = (*kinds[turn:], *kinds[:turn])
        first_late = first + num_early * stride
        x, early_sums = run(recompute.others, kinds, early, x, first)
        x, late_sums = run(recompute.layer, late_kinds, late, x, first_late)
        sums = jax.tree.map(lambda *xs: jnp.concatenate(xs), early_sums, late_sums)
    else:
        x, sums = run(recompute.layer, kinds, states, x, first)
    aux, stats = sums
    return BlockOutput(x, jax.tree.map(lambda terms: terms.sum(0), aux), stats)


def _split_stack(states: Any, num_early: int) -> tuple[Any, Any]:
    """Splits the parameters of a stack after the first `num_early` blocks."""
    leaves, structure = jax.tree.flatten(states)
    # jnp.split, because its gradient is a concatenation
    halves = [jnp.split(leaf, [num_early]) for leaf in leaves]
    early = jax.tree.unflatten(structure, [half[0] for half in halves])
    late = jax.tree.unflatten(structure, [half[1] for half in halves])
    return early, late


def _run_in_groups(
    run: Callable[..., Any],
    recompute: Recompute,
    states: Any,
    x: jax.Array,
    *,
    first: int | jax.Array,
    size: int,
) -> tuple[jax.Array, list[Any]]:
    """Scans over groups of blocks, which are recomputed together.

    Args:
      run: scans over the blocks of a group: (parameters, x, number of the first layer).
      recompute: has the transform of a group.
      states: parameters of all blocks.
      x: [B, S, D].
      first: global number of the first layer.
      size: number of blocks in a group.
    """
    groups = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), states)
    apply = recompute.group(run)

    def one_group(
        x: jax.Array, number: jax.Array, parameters: Any, kind: str
    ) -> tuple[jax.Array, list[Any]]:
        output: tuple[jax.Array, list[Any]] = apply(parameters, x, number)
        return output

    x, sums = scan_layers(
        one_group, x, groups, ("",), first=first, stride=recompute.every
    )
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sums)


def _as_function(graph: Any) -> Block:
    """Makes a function of the parameters from a layer's graph.

    The function raises a ConfigError if the layer changes its state.
    """

    def apply(parameters: Any, x: jax.Array, info: BlockInfo) -> BlockOutput:
        block = nnx.merge(graph, parameters)
        before = _model_state(parameters)
        output = apply_block(block, x, info)
        after = _model_state(nnx.state(block)) if before else {}
        changed = [path for path, value in before.items() if after[path] is not value]
        if changed:
            raise ConfigError(
                f"blocks/{changed[0]}: a block changes its own state, which a stack of blocks does not keep; "
                f"return sums in its `stats` and change it in the model's update(self, stats)"
            )
        return output

    return apply


def apply_layer(
    layer: nnx.Module,
    x: jax.Array,
    info: BlockInfo,
    transform: Transform | Recompute = unchanged,
) -> BlockOutput:
    """Applies a layer that is in no stack, such as one of the head.

    Args:
      layer: the layer, whose parameters have no stack dim.
      x: input of the layer, [B, S, D].
      info: values that the layer reads.
      transform: wraps the layer's function, see `run_blocks`.
    """
    graph, parameters = nnx.split(layer)
    return Recompute.of(transform).layer(_as_function(graph))(parameters, x, info)


def apply_block(block: Any, x: jax.Array, info: BlockInfo) -> BlockOutput:
    """Applies a block.

    Modules inside it whose class has an attribute `block_info` (adapters) find the info
    there, and the length of x in `block_length`.
    """
    readers = [
        module
        for _, module in nnx.iter_modules(block)
        if hasattr(type(module), "block_info")
    ]
    for module in readers:
        # not by nnx, to which it would be state
        vars(module)["block_info"] = info
        vars(module)["block_length"] = x.shape[1]
    try:
        return as_block_output(block(x, info))
    finally:
        for module in readers:
            del vars(module)["block_info"]
            del vars(module)["block_length"]


def as_block_output(value: Any) -> BlockOutput:
    """Converts the return value of a block to a `BlockOutput` with stats in float32.

    Raises:
      ConfigError: it is neither x, nor (x, aux), nor (x, aux, stats).
    """
    parts = value if isinstance(value, (tuple, list)) else (value,)
    has_dicts = all(isinstance(part, Mapping) for part in parts[1:])
    if not 1 <= len(parts) <= 3 or not has_dicts:
        raise ConfigError(
            f"a block returned {_shapes(value)}; required: x, (x, aux) or (x, aux, stats), with dicts of "
            f"scalar sums for the objective, and of sums for update(self, stats)"
        )
    output = BlockOutput(*parts)
    stats = {name: jnp.asarray(x, jnp.float32) for name, x in output.stats.items()}
    return output._replace(stats=stats)


def _model_state(state: Any) -> dict[str, jax.Array]:
    """Selects variables that are neither parameters nor random streams, by path."""
    others = (nnx.Param, nnx.RngState)
    return {
        "/".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable, nnx.Variable) and not isinstance(variable, others)
    }


def pattern_of(blocks: Any) -> tuple[str, ...]:
    """Lists the kinds that repeat over a stack's depth; by default one, ""."""
    pattern: tuple[str, ...] = getattr(blocks, "layer_pattern", ("",))
    return pattern


def head_loss(
    model: Any,
    x: jax.Array,
    batch: Batch,
    key: jax.Array | None = None,
    transform: Transform | Recompute = unchanged,
) -> Loss:
    """Computes the loss of a staged model by its own head.

    Args:
      model: the staged model.
      x: output of the last block, [B, S, D].
      batch: fields by name.
      key: random key of the step, for layers of the head; None: they are deterministic.
      transform: wraps the functions of the head's layers, for rematerialisation.
    """
    if getattr(model, "head_has_layers", False):
        return as_loss(model.head(x, batch, key, transform), batch)
    return as_loss(model.head(x, batch), batch)


def staged_loss(
    model: Any,
    batch: Batch,
    key: jax.Array | None,
    transform: Transform | Recompute = unchanged,
) -> Loss:
    """Computes the loss of a staged model by its own head.

    Args:
      model: the staged model.
      batch: fields by name.
      key: random key of the step; None: the model is deterministic.
      transform: wraps the function of a layer, for rematerialisation; see
        `run_blocks`.
    """
    output = staged_output(model, batch, key, transform)
    loss = head_loss(model, output.x, batch, key, transform)
    return with_block_sums(loss, output.aux, output.stats)


def staged_output(
    model: Any,
    batch: Batch,
    key: jax.Array | None,
    transform: Transform | Recompute = unchanged,
) -> BlockOutput:
    """Computes the input of a staged model's head, and the sums of its blocks."""
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
    """Computes the input of `blocks`: the embedding, followed by any `first_blocks`.

    Args:
      model: a staged model.
      batch: fields by name.
      key: random key of the step; None: the model is deterministic.
      transform: wraps the function of a layer in `first_blocks`, for
        rematerialisation.

    Raises:
      ConfigError: `first_blocks` return aux terms or stats.
    """
    x: jax.Array = model.embed(batch)
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
    """Counts the layers in `first_blocks`; 0 for a model without them."""
    first: Any = getattr(model, "first_blocks", None)
    if not _is_stack(first):
        return 0
    depth: int = jax.tree.leaves(nnx.state(first))[0].shape[0]
    return depth * len(layers_of(first))


def with_block_sums(
    loss: Loss, aux: dict[str, jax.Array], stats: dict[str, jax.Array]
) -> Loss:
    """Adds the aux terms and stats of the blocks to the loss of the head.

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
    """Converts the return value of a model's `loss` to a Loss of float32 sums.

    Args:
      value: a Loss, a tuple (sum, count[, aux[, stats[, metrics]]]), or a dict with
        these names. A scalar is a mean over the samples: its count is the number of
        samples.
      batch: the batch that the loss was computed for.

    Raises:
      ConfigError: it is none of them.
    """
    sums = None
    if isinstance(value, Mapping):
        if {"sum", "count"} <= set(value) <= set(Loss._fields):
            sums = Loss(**value)
    elif isinstance(value, (tuple, list)) and 2 <= len(value) <= len(Loss._fields):
        sums = Loss(*value)
    elif _is_scalar(value):
        samples = next(iter(batch.values())).shape[0]
        sums = Loss(jnp.float32(value) * samples, jnp.float32(samples))
    if sums is None or not _has_sums(sums):
        raise ConfigError(
            f"loss (or head) returned {_shapes(value)}; required: a scalar mean, or a tuple "
            f"(sum, count[, aux[, stats[, metrics]]]): the scalar sum, how many it sums, a dict of further "
            f"scalar sums of the objective, one of sums for update(self, stats), and one of scalar sums "
            f"that are only reported"
        )
    taken = [
        name
        for name in sums.metrics
        if name in STEP_METRICS or name.startswith(("aux/", "stats/"))
    ]
    if taken:
        raise ConfigError(
            f"the loss reports metrics called {', '.join(taken)}, which a step has; rename "
            f"them"
        )
    loss: Loss = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), sums)
    return loss


def has_metrics(model_class: type) -> bool:
    """Checks whether a model has a method `metrics`; other attributes do not count."""
    return inspect.isfunction(getattr(model_class, "metrics", None))


def as_metrics(value: Any, count: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Converts the return value of a model's `metrics(batch)` to float32 pairs.

    Args:
      value: name -> scalar sum over the batch, or (sum, count). A sum without a count
        is divided by the count of the loss.
      count: count of the batch's loss.

    Returns:
      name -> (sum, count).

    Raises:
      ConfigError: it is something else, or has a name that evaluations use.
    """
    if not isinstance(value, Mapping):
        raise _metrics_error(value)
    pairs: dict[str, tuple[jax.Array, jax.Array]] = {}
    for name, metric in value.items():
        pair = metric if isinstance(metric, (tuple, list)) else (metric, count)
        if len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise _metrics_error(value)
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


def _metrics_error(value: Any) -> ConfigError:
    return ConfigError(
        f"metrics(batch) returned {_shapes(value)}; required: a dict of scalar sums, or of pairs "
        f"(sum, count)"
    )


def _has_sums(loss: Loss) -> bool:
    if not all(isinstance(x, Mapping) for x in (loss.aux, loss.stats, loss.metrics)):
        return False
    scalars = (loss.sum, loss.count, *loss.aux.values(), *loss.metrics.values())
    return all(map(_is_scalar, scalars))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (int, float)) or (hasattr(x, "ndim") and x.ndim == 0)


def _shapes(value: Any) -> str:
    shown = jax.tree.map(
        lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x, value
    )
    return str(shown).replace("'", "")


def shared_fields(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """Collects the batch's integer fields and those that the model prepares."""
    fields = {
        name: value
        for name, value in batch.items()
        if jnp.issubdtype(value.dtype, jnp.integer)
    }
    if hasattr(model, "prepare"):
        fields |= model.prepare(batch)
    return fields
