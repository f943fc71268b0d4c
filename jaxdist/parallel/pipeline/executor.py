"""The pipeline executor: one SPMD program for every schedule.

It runs in a region that is manual over `pipeline`, and perhaps over axes that the
caller sums over. The other axes stay with the partitioner, so a stage runs the same
code as the whole model.

In a tick every stage runs the same ops. Predicates depend on the tick only, and results
that no stage needs are masked. So no collective can wait for a stage that took another
branch. A stage keeps the inputs of its live microbatches and recomputes everything
else.

Embedding and head belong to all stages: `pipeline` splits their vocabulary, and the ops
sum over it. So the head is balanced, and tied embeddings need no synchronisation. With
`edges_last` each stage has the whole embedding and head, and a tick sums nothing over
stages. Only the embedding of the first stage and the head of the last stage count, and
their gradients are summed once a step.

Gradients are those of the unpipelined model. Sources: PipeDream-Flush
(arXiv:2006.09503), Megatron-LM (arXiv:2104.04473).

Overview. `pipeline_sums` runs the region, and `_run` one stage of it. `_run` loops over
the ticks of the compiled schedule, run by run; `_Ticks.tick` is the body of the loop.
The values that live from tick to tick are a `Carry`. The ops of a tick are:
  E (`_embed`): embeds a microbatch
  F (`_forward`): applies a chunk to its input x, which gives y
  H (`_score`): head and loss on the last stage's y; gradient of y
  B (`_backward`): gradients of a chunk and of its input, dx, from the gradient of y, dy
  EB (`_embed_backward`): gradient of the embedding from the first stage's dx
`schedules.program` defines their order. The edges are all arrays outside the blocks:
embedding, head and final norm.

Letters: p stages, v chunks of a stage, L blocks of a chunk (padded), m microbatches, B
rows of a microbatch, S sequence length, D width of the model. A letter d before a name
is a gradient: dx, dy, dchunk, dedges.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.schedules.program import ScheduleRows, TickRun, Ticks
from jaxdist.parallel.pipeline.stage import PIPELINE, Pipeline, Stage, where_real
from jaxdist.parallel.pipeline.stage_params import (
    StageParams,
    layer_names,
    without_blocks,
)
from jaxdist.protocols.dim_names import Names
from jaxdist.protocols.model import Batch, BlockOutput, Loss, with_block_sums
from jaxdist.protocols.model_spec import Tree

Row: TypeAlias = ScheduleRows[jax.Array]  # the ops of this stage in a tick
Tick: TypeAlias = Ticks[jax.Array]  # the ops of all stages in a tick
Value = TypeVar("Value")


class Carry(NamedTuple):
    """The values of a stage that live from tick to tick."""

    inputs: jax.Array  # [slots + 1, B, S, D] stage inputs; the last slot is trash
    # [slots + 1, L - 1, B, S, D] inputs of a chunk's other blocks or groups of blocks,
    # if they are kept
    layers: jax.Array
    # [slots + 1, B, S, D] gradients with respect to stage outputs
    gradients_in: jax.Array
    # [B, S, D] gradient of the stage input that B has last computed: EB reads it in the
    # same tick, and the stage before receives it in the next one
    dx: jax.Array
    sums: Tree  # float32 gradient sums, like the trainable tree
    loss: Loss
    block_aux: dict[str, jax.Array]  # sums over this stage's blocks
    block_stats: dict[str, jax.Array]  # sums for each block, [v, L, ...]


def pipeline_sums(
    pipeline: Pipeline,
    params: StageParams,
    names: StageParams,
    batch: Batch,
    key: jax.Array | None,
    scale: jax.Array | None = None,
    sums: Tree | None = None,
    *,
    backward: bool,
) -> tuple[Tree, Loss]:
    """Computes gradient sums and loss sums over a batch.

    It must be traced inside `execution.activate`. Inside a region over `pipeline`
    (`execution.region`) all arrays are the stage's shards; otherwise it creates a region.

    Args:
      pipeline: the pipelined computation.
      params: blocks [v, p, L, ...]; the vocabulary of the edges is split over pipeline.
      names: logical names, like params.
      batch: fields [m, B, ...].
      key: random key of the step; None: the model is deterministic.
      scale: factor of the loss where its gradient starts, and so of the gradients.
      sums: float32 gradient sums to add to, like the trainable tree; None: zeros.
      backward: whether to run the backward pass.

    Returns:
      (gradient sums, loss sums). Without the backward pass the former is a scalar 0.
    """
    run: Callable[..., tuple[Tree, Loss]] = partial(_run, pipeline, names, backward)
    if PIPELINE not in execution.current().manual:
        specs = jax.tree.map(
            partial(execution.region_spec, axes=(PIPELINE,)), params, names
        )
        in_specs = (specs, P(), P(), P(), P() if sums is None else specs.trainable)
        out_specs = (specs.trainable if backward else P(), P())
        run = execution.region(run, (PIPELINE,), in_specs=in_specs, out_specs=out_specs)
    return run(params, batch, key, scale, sums)


def _run(
    pipeline: Pipeline,
    names: StageParams,
    backward: bool,
    params: StageParams,
    batch: Batch,
    key: jax.Array | None,
    scale: jax.Array | None,
    sums: Tree | None,
) -> tuple[Tree, Loss]:
    """Runs all ticks on one stage; arrays are this stage's shards."""
    stage = _Ticks(pipeline, params, names, batch, key, backward=backward, scale=scale)
    carry = stage.start(sums)
    rows, ticks = jax.tree.map(
        jnp.asarray, (pipeline.program.rows, pipeline.program.ticks)
    )
    rows = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, stage.index, 1, False), rows
    )
    for run in pipeline.program.runs:
        if not backward and not run.some & {"embed", "forward", "head"}:
            continue
        span = slice(run.start, run.start + run.length)
        items = jax.tree.map(operator.itemgetter(span), (rows, ticks))
        carry = jax.lax.scan(partial(stage.tick, run), carry, items)[0]
    return stage.finish(carry, sums)


class _Ticks(Stage):
    """The ops of a tick, on one stage."""

    @property
    def edges_last(self) -> bool:
        """Whether each stage has the whole edges, and only the end stages count."""
        return self.staging.config.edges == "last"

    def start(self, sums: Tree | None) -> Carry:
        """Creates the carry before the first tick; `sums` are added to in place."""
        x = jax.eval_shape(lambda: self.embed(self.edges, 0))
        y = jax.eval_shape(
            lambda: self.forward(self.chunk(0), jnp.zeros(x.shape, x.dtype), 0, 0)
        )
        loss = jax.eval_shape(
            lambda: self.head(self.edges, jnp.zeros(x.shape, x.dtype), jnp.int32(0))
        )
        sums = self._first_sums(sums) if self.backward else None

        def slots(count: int, *dims: int) -> jax.Array:
            return self.residual(jnp.zeros((count + 1, *dims, *x.shape), x.dtype))

        inputs = self.program.num_inputs
        gradients = self.program.num_gradients
        kept = self.staging.kept_inputs
        return Carry(
            inputs=slots(inputs),
            layers=slots(inputs, kept - 1) if self.keeps_layers else jnp.zeros(()),
            gradients_in=slots(gradients) if self.backward else jnp.zeros(()),
            dx=jnp.zeros(x.shape, x.dtype) if self.backward else jnp.zeros(()),
            sums=sums,
            loss=jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), loss),
            block_aux=jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), y.aux),
            block_stats=jax.tree.map(
                lambda s: jnp.zeros((self.staging.config.chunks, *s.shape)), y.stats
            ),
        )

    def _first_sums(self, sums: Tree | None) -> Tree:
        """Chooses the gradient sums before the first tick: those given, or zeros.

        With `edges_last`, `finish` sums edges over stages, so they begin with zeros.
        """
        names = self.names.trainable
        blocks = {"blocks": self.blocks.trainable} if "blocks" in names else {}
        trainable = blocks | self.edges.trainable
        zeros: Tree = jax.tree.map(_zero_gradient, trainable, names)
        if sums is None:
            return zeros
        return sums | without_blocks(zeros) if self.edges_last else sums

    def tick(
        self, run: TickRun, carry: Carry, item: tuple[Row, Tick]
    ) -> tuple[Carry, None]:
        """Runs the ops of a tick, in the order that `schedules.program` defines."""
        row, at = item  # ops of this stage, and ops of all stages
        carry, y = self._forward_ops(run, carry, row, at)
        if self.backward:
            carry = self._backward_ops(run, carry, row, at)
        if "hop" in run.some:
            arriving = self._hop(y, +1)
            carry = carry._replace(inputs=_put(carry.inputs, row.rx, arriving))
        return carry, None

    def _forward_ops(
        self, run: TickRun, carry: Carry, row: Row, at: Tick
    ) -> tuple[Carry, jax.Array]:
        """Runs the gradient hop, E, F and H.

        Returns:
          The carry, and the output of F; zeros without F.
        """
        if self.backward and "gradient_hop" in run.some:
            arriving = self._hop(carry.dx, -1)
        if "embed" in run.some:
            carry = self._embed(carry, row, at)
        y = self._blank(carry)
        if "forward" in run.some:
            carry, y = self._forward(carry, row)
        if self.backward and "gradient_hop" in run.some:
            carry = carry._replace(
                gradients_in=_put(carry.gradients_in, row.rg, arriving)
            )
        if "head" in run.some:
            carry = _cond_unless(
                "head" in run.every,
                at.any_head,
                lambda carry: self._score(carry, y, row, at),
                carry,
            )
        return carry, y

    def _embed(self, carry: Carry, row: Row, at: Tick) -> Carry:
        """E: all stages embed a microbatch; the first one keeps it."""

        def embed(x: jax.Array) -> jax.Array:
            edges, number = self._edges_in_tick(at.e_mb)
            return self.residual(self.embed(edges, number)).astype(x.dtype)

        x = _cond_unless(
            self._prefer_mask("embed", "forward"),
            at.any_embed,
            embed,
            self._blank(carry),
        )
        return carry._replace(inputs=_put(carry.inputs, row.e_x, x))

    def _forward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        """F: applies a chunk to its input."""
        chunk, number = _barrier_tick(self.chunk(row.f_chunk), row.f_mb)
        x = carry.inputs[row.f_x]
        output: BlockOutput
        if self.keeps_layers:
            output, inputs = self.forward_keeping(chunk, x, number, row.f_chunk)
            carry = carry._replace(layers=_put(carry.layers, row.f_x, inputs))
        else:
            output = self.forward(chunk, x, number, row.f_chunk)
        y, aux, stats = output
        aux, stats = where_real(row.f_mb >= 0, (aux, stats))
        carry = carry._replace(
            block_aux=jax.tree.map(jnp.add, carry.block_aux, aux),
            block_stats=jax.tree.map(
                lambda total, new: total.at[row.f_chunk].add(new),
                carry.block_stats,
                stats,
            ),
        )
        return carry, y

    def _score(self, carry: Carry, y: jax.Array, row: Row, at: Tick) -> Carry:
        """H: all stages score the last stage's output on their share of the vocabulary.

        With `edges_last` each stage scores its output on the whole vocabulary, and only
        that of the last stage counts. The tick would take as long if the other stages
        waited.
        """
        is_last = self.index == self.staging.stages - 1
        if not self.edges_last:
            y = self.residual(
                execution.sum_over(jnp.where(is_last, y, jnp.zeros_like(y)), PIPELINE)
            )
        edges, number = _barrier_tick(self.edges, at.h_mb)
        if not self.backward:
            loss = self._mask_edge(is_last, self.head(edges, y, number))
            return carry._replace(loss=_add_loss(carry.loss, loss))

        def objective(trainable: Tree, y: jax.Array) -> tuple[jax.Array, Loss]:
            loss = self.head(edges._replace(trainable=trainable), y, number)
            total = loss.sum + sum(loss.aux.values())
            if self.scale is not None:
                total = total * self.scale
            return total, loss

        gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
        (dedges, dy), loss = gradient(edges.trainable, y)
        return carry._replace(
            loss=_add_loss(carry.loss, self._mask_edge(is_last, loss)),
            sums=self._add_edges(carry.sums, self._mask_edge(is_last, dedges)),
            gradients_in=_put(carry.gradients_in, row.h_g, self.residual(dy)),
        )

    def _backward_ops(self, run: TickRun, carry: Carry, row: Row, at: Tick) -> Carry:
        """Runs B and EB."""
        if "backward" in run.some:
            carry = self._backward(carry, row)
        if "embed_backward" in run.some:
            carry = _cond_unless(
                self._prefer_mask("embed_backward", "backward"),
                at.any_embed_backward,
                lambda carry: self._embed_backward(carry, at),
                carry,
            )
        return carry

    def _backward(self, carry: Carry, row: Row) -> Carry:
        """B: computes the gradients of a chunk and of its input."""
        x = carry.inputs[row.b_x]
        dy = carry.gradients_in[row.b_g]
        chunk, number = _barrier_tick(self.chunk(row.b_chunk), row.b_mb)
        if self.keeps_layers:
            inputs = jnp.concatenate([x[None], carry.layers[row.b_x]])
            sums, dx = self._add_layers(carry.sums, chunk, inputs, dy, row, number)
        else:
            dchunk, dx = self.pull(chunk, x, dy, number, row.b_chunk)
            sums = self._add_chunk(carry.sums, dchunk, row)
        return carry._replace(dx=self.residual(dx), sums=sums)

    def _embed_backward(self, carry: Carry, at: Tick) -> Carry:
        """EB: all stages add the first stage's dx to their share of the table."""
        is_wanted = (self.index == 0) & (at.eb_mb >= 0)
        dx = jnp.where(is_wanted, carry.dx, jnp.zeros_like(carry.dx))
        if not self.edges_last:
            dx = execution.sum_over(dx, PIPELINE)

        edges, number = self._edges_in_tick(at.eb_mb)

        def embed(trainable: Tree) -> jax.Array:
            return self.embed(edges._replace(trainable=trainable), number)

        (dedges,) = jax.vjp(embed, edges.trainable)[1](self.residual(dx))
        return carry._replace(
            sums=self._add_edges(carry.sums, self._mask_edge(is_wanted, dedges))
        )

    def _mask_edge(self, counts: jax.Array, tree: Tree) -> Tree:
        """Masks the results of an edge; `edges_last` needs zeros if none `counts`."""
        if not self.edges_last:
            return tree
        return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), tree)

    def _prefer_mask(self, op: str, pace: str) -> bool:
        """Checks whether to run E or EB in every tick and mask it, without predicate.

        A predicate would copy the arrays that the op may change. E and EB are cheap, so
        a mask is better if at least half of the ticks that run `pace` run them. Layers
        of `first_blocks` are not cheap.
        """
        if self.has_first_blocks:
            return False
        ticks = self.program.ticks
        count = getattr(ticks, f"any_{op}").sum()
        return bool(2 * count >= getattr(ticks, f"any_{pace}").sum())

    def _edges_in_tick(self, microbatch: jax.Array) -> tuple[StageParams, jax.Array]:
        """Chooses the edges and the number of a microbatch, for E and EB.

        See `_barrier_tick`; only layers of `first_blocks` need it.
        """
        if self.has_first_blocks:
            return _barrier_tick(self.edges, microbatch)
        return self.edges, microbatch

    @staticmethod
    def _blank(carry: Carry) -> jax.Array:
        return jnp.zeros(carry.inputs.shape[1:], carry.inputs.dtype)

    def _hop(self, x: jax.Array, by: int) -> jax.Array:
        """Sends x to the stage that is `by` places further on the ring."""
        stages = self.staging.stages
        ring = [(stage, (stage + by) % stages) for stage in range(stages)]
        return self.residual(jax.lax.ppermute(x, PIPELINE, ring))

    def _add_chunk(self, sums: Tree, dchunk: Tree, row: Row) -> Tree:
        """Adds the gradients of a chunk to the sums."""
        is_real = row.b_mb >= 0

        def add(total: jax.Array, gradient: jax.Array, names: Names) -> jax.Array:
            gradient = jnp.where(is_real, gradient.astype(jnp.float32), 0)[None]
            old = jax.lax.dynamic_index_in_dim(total, row.b_chunk, 0, False)
            new = jax.lax.dynamic_update_index_in_dim(
                total, old + gradient, row.b_chunk, 0
            )
            return _scatter(new, names)

        if "blocks" not in sums:  # all blocks are frozen
            return sums
        names = self.names.trainable["blocks"]
        return sums | {"blocks": jax.tree.map(add, sums["blocks"], dchunk, names)}

    def _add_layers(
        self,
        sums: Tree,
        chunk: StageParams,
        inputs: jax.Array,
        dy: jax.Array,
        row: Row,
        number: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """Adds the gradients of a chunk to the sums, layer by layer and in place.

        Args:
          sums: gradient sums.
          chunk: blocks of the chunk.
          inputs: inputs of the chunk's layers, or groups of layers.
          dy: gradient of the chunk's output.
          row: the ops of this stage in the tick.
          number: number of the microbatch.

        Returns:
          The new sums, and the gradient of the chunk's input.
        """
        if "blocks" not in sums:  # all blocks are frozen
            _, dx = self.pull_layers(
                chunk, inputs, dy, number, row.b_chunk, {}, lambda sums, *_: sums
            )
            return sums, dx
        names = self.names.trainable["blocks"]
        count = inputs.shape[0]
        by_item = jax.tree.map(
            lambda x: x.reshape(*x.shape[:2], count, -1, *x.shape[3:]), sums["blocks"]
        )

        def add(totals: Tree, position: jax.Array, gradients: Tree) -> Tree:
            real = where_real(row.b_mb >= 0, gradients)
            add_item = partial(_add_item, chunk=row.b_chunk, position=position)
            return jax.tree.map(add_item, totals, real, names)

        by_item, dx = self.pull_layers(
            chunk, inputs, dy, number, row.b_chunk, by_item, add
        )
        blocks = jax.tree.map(
            lambda new, old, names: _scatter(new.reshape(old.shape), names),
            by_item,
            sums["blocks"],
            names,
        )
        return sums | {"blocks": blocks}, dx

    def _add_edges(self, sums: Tree, dedges: Tree) -> Tree:
        """Adds the gradients of the edges to the sums."""

        def add(total: jax.Array, gradient: jax.Array, names: Names) -> jax.Array:
            return _scatter(total + gradient.astype(jnp.float32), names)

        names = without_blocks(self.names.trainable)
        return sums | jax.tree.map(add, without_blocks(sums), dedges, names)

    def finish(self, carry: Carry, before: Tree | None) -> tuple[Tree, Loss]:
        """Computes (gradient sums, loss sums) from the carry of the last tick.

        Args:
          carry: the carry.
          before: gradient sums that the first tick began with; None: zeros.
        """
        loss = carry.loss
        sums = carry.sums if self.backward else jnp.zeros(())
        if self.edges_last:
            loss = _sum_over_stages(loss)
        if self.edges_last and self.backward:
            sums |= jax.tree.map(
                lambda total, names: _scatter(_sum_over_stages(total), names),
                without_blocks(sums),
                without_blocks(self.names.trainable),
            )
            if before is not None:
                edges = without_blocks(sums)
                sums |= jax.tree.map(jnp.add, without_blocks(before), edges)
        aux = _sum_over_stages(carry.block_aux)
        stats = jax.tree.map(self._in_layer_order, carry.block_stats)
        return sums, with_block_sums(loss, aux, stats)

    def _in_layer_order(self, stats: jax.Array) -> jax.Array:
        """Gathers stats [v, L, ...] of all stages in the order of layers.

        Returns:
          Stats [num_layers, ...] without padding.
        """
        # [v, p, L, ...]
        gathered = jnp.moveaxis(jax.lax.all_gather(stats, PIPELINE), 0, 1)
        return gathered.reshape(-1, *stats.shape[2:])[: self.staging.num_layers]


def _sum_over_stages(tree: Value) -> Value:
    total: Value = jax.lax.psum(tree, PIPELINE)
    return total


def _zero_gradient(leaf: jax.Array, names: Names) -> jax.Array:
    return _scatter(jnp.zeros(leaf.shape, jnp.float32), names)


def _scatter(gradient: jax.Array, names: Names) -> jax.Array:
    return execution.scatter(gradient, layer_names(names))


def _add_item(
    total: jax.Array,
    gradient: jax.Array,
    names: Names,
    *,
    chunk: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Adds the gradient of one layer, or group of layers, to a sum in place.

    Args:
      total: sum [v, 1, items, layers of an item, ...].
      gradient: gradient [...] of a layer, or [layers of an item, ...] of a group.
      names: logical names of the sum.
      chunk: number of the chunk.
      position: index of the item in its chunk.
    """
    item = _scatter(gradient.astype(jnp.float32), names)
    item = item.reshape(1, 1, 1, *total.shape[3:])
    start = (chunk, jnp.int32(0), position, *[jnp.int32(0)] * (total.ndim - 3))
    old = jax.lax.dynamic_slice(total, start, item.shape)
    return jax.lax.dynamic_update_slice(total, old + item, start)


def _add_loss(total: Loss, new: Loss) -> Loss:
    added: Loss = jax.tree.map(lambda t, n: t + n.astype(jnp.float32), total, new)
    return added


def _barrier_tick(parameters: Tree, microbatch: jax.Array) -> tuple[Tree, jax.Array]:
    """Keeps XLA from moving ops on the parameters out of the loop over ticks.

    Without this, it moves the gathers of fsdp shards if a stage has one chunk. Then all
    gathered parameters are in memory, once per loop. On CPU these gathers run at the
    same time as the loop, whose collectives may find no free thread: a deadlock.
    """
    barred: tuple[Tree, jax.Array] = jax.lax.optimization_barrier(
        (parameters, microbatch)
    )
    return barred


def _put(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """Writes a value into a slot of a buffer."""
    updated: jax.Array = jax.lax.dynamic_update_index_in_dim(
        buffer, value.astype(buffer.dtype), slot, 0
    )
    return updated


def _cond_unless(
    always: bool,
    predicate: jax.Array,
    function: Callable[[Value], Value],
    carry: Value,
) -> Value:
    """Applies a function to the carry if the predicate holds; else keeps the carry.

    Args:
      always: run the function without a predicate.
      predicate: condition of the op, the same on all stages.
      function: runs an op.
      carry: argument of the function.
    """
    if always:
        return function(carry)
    result: Value = jax.lax.cond(predicate, function, lambda carry: carry, carry)
    return result
