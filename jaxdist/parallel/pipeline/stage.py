"""A stage's part of the model: embedding, layers of a chunk, head, and their gradients.

Letters: p stages, v chunks, L layers of a chunk (padded), m microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.schedules import Program
from jaxdist.parallel.pipeline.stage_params import StageParams, blocks_of, edges_of, gathered, joined, stacked
from jaxdist.protocols.model import (
    Batch,
    Block,
    BlockInfo,
    BlockOutput,
    Loss,
    as_loss,
    pattern_of,
    run_blocks,
    scan_layers,
    shared_fields,
)

AXIS = "pipeline"
Tree = Any


@dataclass(frozen=True)
class Pipeline:
    """A compiled schedule and what it runs."""

    program: Program
    num_layers: int  # of the model, without padding
    assemble: Callable[[Tree, Tree], Any]  # trainable and held tree (blocks of one chunk) -> model
    transform: Callable[[Block], Block]  # rematerialisation inside a stage's recomputation
    keeps_layers: bool = False  # F keeps the inputs of all layers, and B recomputes layer by layer
    gather_once: bool = False  # hold a stage's blocks gathered from fsdp, in the compute dtype
    edges_last: bool = False  # each stage embeds and scores for itself; only the ends' results count

    @property
    def stages(self) -> int:
        return self.program.schedule.stages

    @property
    def chunks(self) -> int:
        return self.program.schedule.chunks


class Stage:
    """What a stage computes of the model, and its gradients."""

    def __init__(self, pipeline, trainable, held, batch, key, names, held_names, backward):
        self.pipeline, self.batch, self.key, self.backward = pipeline, batch, key, backward
        self.names = names
        self.blocks, self.rest = blocks_of(trainable, held), edges_of(trainable, held)
        if pipeline.gather_once:
            self.blocks = jax.tree.map(gathered, self.blocks, blocks_of(names, held_names))
        self.index = jax.lax.axis_index(AXIS)
        self.depth = jax.tree.leaves(self.blocks)[0].shape[2]
        self.keeps_layers = pipeline.keeps_layers and backward

    def model(self, rest: StageParams, blocks: StageParams | None = None):
        """Returns the model with these parameters; blocks are those of one chunk, [L, ...]."""
        blocks = self.chunk(0) if blocks is None else blocks
        return self.pipeline.assemble(*joined(blocks, rest))

    def chunk(self, number) -> StageParams:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, False)[0], self.blocks)

    def microbatch(self, number) -> Batch:
        at = jnp.maximum(number, 0)
        return {n: jax.lax.dynamic_index_in_dim(x, at, 0, False) for n, x in self.batch.items()}

    def embed(self, rest: StageParams, number) -> jax.Array:
        return self.model(rest).embed(self.microbatch(number))

    def head(self, rest: StageParams, y: jax.Array, number) -> Loss:
        batch = self.microbatch(number)
        return as_loss(self.model(rest).head(y, batch), batch)

    def forward(self, blocks: StageParams, x: jax.Array, number, chunk) -> BlockOutput:
        """Returns the stage's chunk applied to x; layers of padding pass it on."""
        return self.layers(blocks, x, self.fields(number), self.first_layer(chunk))

    def fields(self, number) -> dict[str, jax.Array]:
        """Returns what the blocks read of a microbatch."""
        return shared_fields(self.model(self.rest), self.microbatch(number))

    def first_layer(self, chunk):
        """Returns the number of a chunk's first layer."""
        return (chunk * self.pipeline.stages + self.index) * self.depth

    def layers(self, blocks: StageParams, x: jax.Array, fields, first, pattern=()) -> BlockOutput:
        """Returns consecutive layers applied to x; a chunk starts at the start of the pattern."""
        model, last = self.model(self.rest, blocks), self.pipeline.num_layers

        def padded(block: Block) -> Block:
            if last == self.depth * self.pipeline.stages * self.pipeline.chunks:
                return block

            def masked(parameters, x, info: BlockInfo):
                y, *sums = block(parameters, x, info)
                real = info.layer < last
                return BlockOutput(jnp.where(real, y, x), *where_real(real, sums))

            return masked

        return run_blocks(
            model.blocks,
            x,
            self.key,
            fields,
            lambda b: padded(self.pipeline.transform(b)),
            first=first,
            pattern=pattern,
        )

    def forward_keeping(self, blocks: StageParams, x: jax.Array, number, chunk):
        """Returns `forward` and the inputs of all layers but the first, [L - 1, B, S, D]."""
        fields, first = self.fields(number), self.first_layer(chunk)

        def one(x, layer, parameters, kind):
            y, aux, stats = self.layers(stacked(parameters), x, fields, layer, (kind,))
            return y, (x, aux, {name: sums[0] for name, sums in stats.items()})

        pattern = pattern_of(self.model(self.rest, blocks).blocks)
        y, (inputs, aux, stats) = scan_layers(one, x, blocks, pattern, first=first)
        return BlockOutput(y, jax.tree.map(lambda terms: terms.sum(0), aux), stats), inputs[1:]

    def pull(self, blocks: StageParams, x: jax.Array, dy: jax.Array, number, chunk) -> tuple[Tree, jax.Array]:
        """Returns the gradients of a chunk and of its input; all is computed again from x."""

        def apply(trained, x):
            return self.forward(blocks._replace(trained=trained), x, number, chunk)[:2]

        (_, aux), pull = jax.vjp(apply, blocks.trained, x)
        return pull((dy, jax.tree.map(jnp.ones_like, aux)))

    def pull_layers(self, blocks: StageParams, inputs: jax.Array, dy: jax.Array, number, chunk):
        """Returns what `pull` does, from the inputs of all layers.

        Nobody needs the layers' outputs again, so XLA leaves their last products out.
        """
        fields, first = self.fields(number), self.first_layer(chunk)

        def one(dy, layer, item, kind):
            parameters, x = item

            def apply(trained, x):
                part = stacked(parameters._replace(trained=trained))
                return self.layers(part, x, fields, layer, (kind,))[:2]

            (_, aux), pull = jax.vjp(apply, parameters.trained, x)
            dparameters, dx = pull((dy, jax.tree.map(jnp.ones_like, aux)))
            return self.residual(dx), dparameters

        pattern = pattern_of(self.model(self.rest, blocks).blocks)
        dx, dblocks = scan_layers(one, dy, (blocks, inputs), pattern, first=first, reverse=True)
        return dblocks, dx

    @staticmethod
    def residual(x: jax.Array) -> jax.Array:
        lead = (None,) * (x.ndim - 3)
        return execution.shard(x, *lead, "batch", "residual", None)


def where_real(real: jax.Array, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.where(real, x, 0), tree)
