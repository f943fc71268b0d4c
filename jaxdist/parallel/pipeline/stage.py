"""A stage's share of the model: edges, the layers of a chunk, and their gradients.

The loss of a microbatch goes through a chain: the op H of a tick (`executor`) calls
`Stage.head`, which assembles the model and calls `Pipeline.score`, which calls the
objective's `loss_of_output` (`step.gradients`), or scores a frozen module (`step.prepare`).

Letters: p stages, v chunks of a stage, L blocks of a chunk (padded), m microbatches, B
rows of a microbatch, S sequence length, D width of the model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.parallel.pipeline.schedules.program import Program
from jaxdist.parallel.pipeline.stage_params import StageParams, gathered
from jaxdist.parallel.remat import rematerialised
from jaxdist.protocols.layer_scan import scan_layers
from jaxdist.protocols.model import (
    Batch,
    Block,
    BlockInfo,
    BlockOutput,
    Loss,
    embedded,
    layers_before,
    layers_of,
    pattern_of,
    run_blocks,
    shared_fields,
)
from jaxdist.protocols.model_spec import Tree

PIPELINE = "pipeline"
Number = jax.Array | int


class Pipeline(NamedTuple):
    """A pipelined computation: layers on stages, schedule, model and loss."""

    staging: Staging  # the layers of each stage
    program: Program  # the compiled schedule
    # builds the model from its arrays; blocks are those of one chunk
    assemble: Callable[[StageParams], Any]
    # (model, output of the last stage, microbatch, its number) -> sums
    score: Callable[[Any, jax.Array, Batch, jax.Array], Loss]


class Stage:
    """The computations of a stage: parts of the model, and their gradients.

    Args:
      pipeline: the pipelined computation.
      params: this stage's shard of the arrays; blocks [v, 1, L, ...].
      names: logical names, like params.
      batch: fields [m, B, ...].
      key: random key of the step; None: the model is deterministic.
      backward: whether gradients are computed.
      scale: factor of the loss where its gradient starts; None: 1.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        params: StageParams,
        names: StageParams,
        batch: Batch,
        key: jax.Array | None,
        *,
        backward: bool,
        scale: jax.Array | None = None,
    ) -> None:
        self.staging, self.program, self.assemble, self.score = pipeline
        self.names = names
        self.batch = batch
        self.key = key
        self.backward = backward
        self.scale = scale
        self.blocks = params.blocks
        self.edges = params.edges
        if self.staging.config.gather_once:
            self.blocks = jax.tree.map(gathered, self.blocks, names.blocks)
        self.index = jax.lax.axis_index(PIPELINE)
        # The forward pass keeps the inputs of all layers, and the backward pass
        # recomputes layer by layer.
        self.keeps_layers = self.staging.remat == "layers" and backward

    def model(self, edges: StageParams, blocks: StageParams | None = None) -> Any:
        """Assembles the model from arrays.

        Args:
          edges: arrays outside the blocks.
          blocks: blocks of one chunk, [L, ...]; None: those of the first chunk.
        """
        return self.assemble(edges.with_blocks(blocks or self.chunk(0)))

    def chunk(self, number: Number) -> StageParams:
        """Selects the blocks of a chunk, [L, ...]."""

        def select(x: jax.Array) -> jax.Array:
            chunk: jax.Array = _select(x, number)[0]
            return chunk

        chunk: StageParams = jax.tree.map(select, self.blocks)
        return chunk

    def microbatch(self, number: Number) -> Batch:
        """Selects a microbatch; the first one for a number below 0."""
        index = jnp.maximum(number, 0)
        return {name: _select(x, index) for name, x in self.batch.items()}

    @property
    def has_first_blocks(self) -> bool:
        """Whether layers run together with the embedding, and so on every stage."""
        return any("first_blocks" in tree for tree in self.edges)

    def embed(self, edges: StageParams, number: Number) -> jax.Array:
        """Computes the input of the blocks for a microbatch.

        Only the inputs of `first_blocks` are kept if B recomputes layer by layer.
        """
        transform = partial(rematerialised, policy=self.staging.edge_remat)
        model = self.model(edges)
        return embedded(model, self.microbatch(number), self.key, transform)

    def head(self, edges: StageParams, y: jax.Array, number: jax.Array) -> Loss:
        """Computes the loss of a microbatch from the last stage's output."""
        return self.score(self.model(edges), y, self.microbatch(number), number)

    def forward(
        self, blocks: StageParams, x: jax.Array, number: Number, chunk: Number
    ) -> BlockOutput:
        """Applies a chunk to x; layers of padding pass x on.

        Args:
          blocks: blocks of the chunk, [L, ...].
          x: input of the chunk.
          number: number of the microbatch.
          chunk: number of the chunk.
        """
        fields, first = self.place(number, chunk)
        return self.layers(blocks, (), x, fields, first)

    def place(
        self, number: Number, chunk: Number
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Computes the blocks' fields for a microbatch, and a chunk's first layer.

        Returns:
          `BlockInfo.fields`, and the global number of the layer.
        """
        model = self.model(self.edges)
        block = (chunk * self.staging.stages + self.index) * self.staging.dims[2]
        first = layers_before(model) + block * len(layers_of(model.blocks))
        return shared_fields(model, self.microbatch(number)), first

    def layers(
        self,
        blocks: StageParams,
        pattern: tuple[str, ...],
        x: jax.Array,
        fields: dict[str, jax.Array],
        first: jax.Array,
    ) -> BlockOutput:
        """Applies consecutive layers to x.

        Args:
          blocks: blocks of these layers, [layers, ...].
          pattern: kinds of these layers; (): from the start of the model's pattern, as a
            chunk has them.
          x: input of the first layer.
          fields: `BlockInfo.fields`.
          first: global number of the first layer.
        """
        model = self.model(self.edges, blocks)
        end = layers_before(model) + self.staging.num_layers * len(
            layers_of(model.blocks)
        )
        has_padding = self.staging.num_layers < math.prod(self.staging.dims)

        def transform(block: Block) -> Block:
            if self.staging.grouped:
                block = rematerialised(block, self.staging.recompute.policy)
            elif self.staging.remat != "layers":
                block = rematerialised(block, self.staging.remat)
            return partial(masked, block) if has_padding else block

        def masked(
            block: Block, parameters: Any, x: jax.Array, info: BlockInfo
        ) -> BlockOutput:
            y, aux, stats = block(parameters, x, info)
            is_real = info.layer < end
            output = jnp.where(is_real, y, x)
            return BlockOutput(output, *where_real(is_real, [aux, stats]))

        return run_blocks(
            model.blocks, x, self.key, fields, transform, first=first, pattern=pattern
        )

    def forward_keeping(
        self, blocks: StageParams, x: jax.Array, number: Number, chunk: Number
    ) -> tuple[BlockOutput, jax.Array]:
        """Computes `forward` and keeps the inputs of all layers, or groups of layers.

        Returns:
          The output, and the inputs of all layers (or groups) but the first, [L - 1, B,
          S, D].
        """
        fields, first = self.place(number, chunk)
        items, kinds, stride = self.groups(blocks)

        def apply_item(
            x: jax.Array, layer: jax.Array, parameters: StageParams, kind: str
        ) -> tuple[jax.Array, Any]:
            blocks, pattern = self.unit(parameters, kind)
            y, aux, stats = self.layers(blocks, pattern, x, fields, layer)
            if not self.staging.grouped:
                stats = {name: sums[0] for name, sums in stats.items()}
            return y, (x, aux, stats)

        y, (inputs, aux, stats) = scan_layers(
            apply_item, x, items, kinds, first=first, stride=stride
        )
        if self.staging.grouped:
            stats = jax.tree.map(lambda sums: sums.reshape(-1, *sums.shape[2:]), stats)
        aux = jax.tree.map(lambda terms: terms.sum(0), aux)
        return BlockOutput(y, aux, stats), inputs[1:]

    def groups(self, blocks: StageParams) -> tuple[StageParams, tuple[str, ...], int]:
        """Splits a chunk into the items that are recomputed at a time.

        Returns:
          The items: blocks, or groups of blocks; their kinds; and the number of layers
          in an item.
        """
        stack = self.model(self.edges, blocks).blocks
        if not self.staging.grouped:
            return blocks, pattern_of(stack), len(layers_of(stack))
        count = self.staging.kept_inputs
        groups = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), blocks)
        return groups, ("",), self.staging.recompute.every

    def unit(
        self, parameters: StageParams, kind: str
    ) -> tuple[StageParams, tuple[str, ...]]:
        """Takes an item of `groups` as a stack of blocks, with its kinds of layers."""
        if self.staging.grouped:
            return parameters, ()
        return jax.tree.map(lambda x: x[None], parameters), (kind,)

    def pull(
        self,
        blocks: StageParams,
        x: jax.Array,
        dy: jax.Array,
        number: Number,
        chunk: Number,
    ) -> tuple[Tree, jax.Array]:
        """Computes the gradients of a chunk; recomputes its forward pass from x.

        Args:
          blocks: blocks of the chunk, [L, ...].
          x: input of the chunk.
          dy: gradient of the chunk's output.
          number: number of the microbatch.
          chunk: number of the chunk.

        Returns:
          Gradients of the trained blocks, and of x.
        """

        def apply(
            trainable: Tree, x: jax.Array
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            output = self.forward(
                blocks._replace(trainable=trainable), x, number, chunk
            )
            return output.x, output.aux

        return self._pull(apply, blocks.trainable, x, dy)

    def pull_layers(
        self,
        blocks: StageParams,
        inputs: jax.Array,
        dy: jax.Array,
        number: Number,
        chunk: Number,
        sums: Tree,
        add: Callable[[Tree, jax.Array, Tree], Tree],
    ) -> tuple[Tree, jax.Array]:
        """Computes the same as `pull`, from the inputs of all layers; adds to sums.

        The layers' outputs are not needed again, so XLA drops their last matmuls.

        Args:
          blocks: blocks of the chunk, [L, ...].
          inputs: inputs of the chunk's layers, or groups of layers, [L, B, S, D].
          dy: gradient of the chunk's output.
          number: number of the microbatch.
          chunk: number of the chunk.
          sums: gradient sums.
          add: (sums, index of a layer or group, its gradients) -> new sums.

        Returns:
          The new sums, and the gradient of the chunk's input.
        """
        fields, first = self.place(number, chunk)
        items, kinds, stride = self.groups(blocks)

        def pull_item(
            carry: tuple[jax.Array, Tree], layer: jax.Array, item: Any, kind: str
        ) -> tuple[tuple[jax.Array, Tree], None]:
            dy, sums = carry
            parameters, x, index = item

            def apply(
                trainable: Tree, x: jax.Array
            ) -> tuple[jax.Array, dict[str, jax.Array]]:
                item = parameters._replace(trainable=trainable)
                blocks, pattern = self.unit(item, kind)
                output = self.layers(blocks, pattern, x, fields, layer)
                return output.x, output.aux

            dparameters, dx = self._pull(apply, parameters.trainable, x, dy)
            return (self.residual(dx), add(sums, index, dparameters)), None

        (dx, sums), _ = scan_layers(
            pull_item,
            (dy, sums),
            (items, inputs, jnp.arange(inputs.shape[0])),
            kinds,
            first=first,
            stride=stride,
            reverse=True,
        )
        return sums, dx

    def _pull(
        self,
        apply: Callable[[Tree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]],
        trainable: Tree,
        x: jax.Array,
        dy: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """Computes the gradients of apply(trained, x) -> (y, aux).

        They are those for dy, and for the sum of all aux terms times the scale.
        """
        (_, aux), pull = jax.vjp(apply, trainable, x)
        if self.scale is None:
            daux = jax.tree.map(jnp.ones_like, aux)
        else:
            daux = jax.tree.map(partial(jnp.full_like, fill_value=self.scale), aux)
        dtrained, dx = pull((dy, daux))
        return dtrained, dx

    @staticmethod
    def residual(x: jax.Array) -> jax.Array:
        """Constrains [..., B, S, D] to the sharding of the residual stream."""
        lead = (None,) * (x.ndim - 3)
        return execution.shard(x, *lead, "batch", "residual", None)


def _select(x: jax.Array, index: Number) -> jax.Array:
    """Selects an element of the first dim."""
    element: jax.Array = jax.lax.dynamic_index_in_dim(x, index, 0, False)
    return element


def where_real(is_real: jax.Array, tree: Tree) -> Tree:
    """Replaces a tree by zeros if it is not real, such as that of a padding layer."""
    return jax.tree.map(lambda x: jnp.where(is_real, x, 0), tree)
