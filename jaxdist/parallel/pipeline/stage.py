"""A stage's part of the model: embedding, layers of a chunk, head, and their gradients.

Letters: p stages, v chunks, L layers of a chunk (padded), m microbatches.
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
from jaxdist.parallel.pipeline.stage_params import StageParams, Tree, gathered
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

AXIS = "pipeline"


class Pipeline(NamedTuple):
    """How layers lie on stages, the compiled schedule, what makes a stage's parameters
    a model, and what scores the last stage's output.
    """

    cut: Staging
    program: Program
    assemble: Callable[[StageParams], Any]  # blocks are those of one chunk
    # (model, x, microbatch, its number) -> sums
    score: Callable[[Any, jax.Array, Batch, jax.Array], Loss]


class Stage:
    """What a stage computes of the model, and its gradients."""

    def __init__(
        self,
        pipeline: Pipeline,
        params: StageParams,
        names: StageParams,
        batch,
        key,
        backward,
        scale=None,
    ) -> None:
        self.cut, self.program, self.assemble, self.score = pipeline
        self.names = names
        self.batch = batch
        self.key = key
        self.backward = backward
        self.scale = scale
        self.blocks = params.blocks
        self.rest = params.edges
        if self.cut.config.gather_once:
            self.blocks = jax.tree.map(gathered, self.blocks, names.blocks)
        self.index = jax.lax.axis_index(AXIS)
        # F keeps the inputs of all layers, and B recomputes layer by layer.
        self.keeps_layers = self.cut.remat == "layers" and backward

    def model(self, rest: StageParams, blocks: StageParams | None = None):
        """Returns the model with these parameters; blocks are those of one chunk, [L,
        ...].
        """
        return self.assemble(rest.with_blocks(blocks or self.chunk(0)))

    def chunk(self, number) -> StageParams:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, False)[0], self.blocks
        )

    def microbatch(self, number) -> Batch:
        at = jnp.maximum(number, 0)
        return {
            n: jax.lax.dynamic_index_in_dim(x, at, 0, False)
            for n, x in self.batch.items()
        }

    @property
    def has_first_blocks(self) -> bool:
        """Whether layers run where the embedding does, and so on every
        stage.
        """
        return any("first_blocks" in tree for tree in self.rest)

    def embed(self, rest: StageParams, number) -> jax.Array:
        """Computes what enters the stack; of layers before it, their inputs alone are
        kept.
        """

        def transform(block: Block) -> Block:
            return rematerialised(
                block, "full" if self.cut.remat == "layers" else self.cut.remat
            )

        return embedded(self.model(rest), self.microbatch(number), self.key, transform)

    def head(self, rest: StageParams, y: jax.Array, number) -> Loss:
        return self.score(self.model(rest), y, self.microbatch(number), number)

    def forward(self, blocks: StageParams, x: jax.Array, number, chunk) -> BlockOutput:
        """Returns the stage's chunk applied to x; layers of padding pass it on."""
        return self.layers(blocks, (), x, *self.place(number, chunk))

    def place(self, number, chunk) -> tuple[dict[str, jax.Array], jax.Array]:
        """Gathers what the blocks read of a microbatch, and the number of a chunk's
        first layer.
        """
        model = self.model(self.rest)
        block = (chunk * self.cut.stages + self.index) * self.cut.dims[2]
        first = layers_before(model) + block * len(layers_of(model.blocks))
        return shared_fields(model, self.microbatch(number)), first

    def layers(
        self, blocks: StageParams, pattern, x: jax.Array, fields, first
    ) -> BlockOutput:
        """Returns consecutive layers applied to x; a chunk starts at the start of the
        pattern.
        """
        model = self.model(self.rest, blocks)
        end = layers_before(model) + self.cut.num_layers * len(layers_of(model.blocks))

        def transform(block: Block) -> Block:
            if self.cut.remat != "layers" or self.cut.grouped:
                inner = (
                    self.cut.recompute.policy if self.cut.grouped else self.cut.remat
                )
                block = rematerialised(block, inner)

            def masked(parameters, x, info: BlockInfo):
                y, *sums = block(parameters, x, info)
                real = info.layer < end
                return BlockOutput(jnp.where(real, y, x), *where_real(real, sums))

            return masked if self.cut.num_layers < math.prod(self.cut.dims) else block

        return run_blocks(
            model.blocks, x, self.key, fields, transform, first=first, pattern=pattern
        )

    def forward_keeping(self, blocks: StageParams, x: jax.Array, number, chunk):
        """Returns `forward` and the inputs of all layers (or groups) but the first, [L
        - 1, B, S, D].
        """
        fields, first = self.place(number, chunk)
        items, kinds, stride = self.groups(blocks)

        def one(x, layer, parameters, kind):
            y, aux, stats = self.layers(*self.unit(parameters, kind), x, fields, layer)
            if not self.cut.grouped:
                stats = {name: sums[0] for name, sums in stats.items()}
            return y, (x, aux, stats)

        y, (inputs, aux, stats) = scan_layers(
            one, x, items, kinds, first=first, stride=stride
        )
        if self.cut.grouped:
            stats = jax.tree.map(lambda sums: sums.reshape(-1, *sums.shape[2:]), stats)
        return BlockOutput(
            y, jax.tree.map(lambda terms: terms.sum(0), aux), stats
        ), inputs[1:]

    def groups(self, blocks: StageParams) -> tuple[StageParams, tuple[str, ...], int]:
        """Stacks what is computed again at a time; also its kinds and how many
        layers it has.
        """
        stack = self.model(self.rest, blocks).blocks
        if not self.cut.grouped:
            return blocks, pattern_of(stack), len(layers_of(stack))
        groups = self.cut.kept_inputs
        return (
            jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), blocks),
            ("",),
            self.cut.recompute.every,
        )

    def unit(
        self, parameters: StageParams, kind: str
    ) -> tuple[StageParams, tuple[str, ...]]:
        """Returns one of `groups` as a stack of blocks, and the kinds of its layers."""
        return (parameters, ()) if self.cut.grouped else (_stacked(parameters), (kind,))

    def pull(
        self, blocks: StageParams, x: jax.Array, dy: jax.Array, number, chunk
    ) -> tuple[Tree, jax.Array]:
        """Returns the gradients of a chunk and of its input; all is computed again from
        x.
        """

        def apply(trained, x):
            return self.forward(blocks._replace(trained=trained), x, number, chunk)[:2]

        return self._pull(apply, blocks.trained, x, dy)

    def pull_layers(
        self, blocks: StageParams, inputs: jax.Array, dy: jax.Array, number, chunk
    ):
        """Computes what `pull` does, from the inputs of all layers.

        Nobody needs the layers' outputs again, so XLA leaves their last products out.
        """
        fields, first = self.place(number, chunk)
        items, kinds, stride = self.groups(blocks)

        def one(dy, layer, item, kind):
            parameters, x = item

            def apply(trained, x):
                part = self.unit(parameters._replace(trained=trained), kind)
                return self.layers(*part, x, fields, layer)[:2]

            dparameters, dx = self._pull(apply, parameters.trained, x, dy)
            return self.residual(dx), dparameters

        dx, dblocks = scan_layers(
            one, dy, (items, inputs), kinds, first=first, stride=stride, reverse=True
        )
        if self.cut.grouped:
            dblocks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), dblocks)
        return dblocks, dx

    def _pull(
        self, apply: Callable, trained: Tree, x: jax.Array, dy: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Returns the gradients of apply(trained, x) -> (y, aux) for dy, and for all of
        aux.
        """
        (_, aux), pull = jax.vjp(apply, trained, x)
        begin = (
            jnp.ones_like
            if self.scale is None
            else partial(jnp.full_like, fill_value=self.scale)
        )
        return pull((dy, jax.tree.map(begin, aux)))

    @staticmethod
    def residual(x: jax.Array) -> jax.Array:
        lead = (None,) * (x.ndim - 3)
        return execution.shard(x, *lead, "batch", "residual", None)


def _stacked(layer: StageParams) -> StageParams:
    """Returns a layer's arrays as a stack of one."""
    return jax.tree.map(lambda x: x[None], layer)


def where_real(real: jax.Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.where(real, x, 0), tree)
