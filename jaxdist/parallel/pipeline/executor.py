"""One executor for every schedule: tables in, loss and gradients out, in one SPMD
program.

It runs in a region that is manual over `pipeline`, and perhaps over axes whose sums the
caller makes; the others stay with the partitioner, so a stage is the same code as the
whole model. Every stage runs the same ops in a tick, predicates depend on the tick
only, and what a stage computes for nobody is masked: no collective can wait for a stage
that took another branch. A stage keeps the inputs of its live microbatches and computes
the rest again. Embedding and head belong to all stages: their vocabulary is split over
`pipeline` (the ops sum over it), so the head is balanced and tied embeddings need no
synchronisation. With `edges_last` they are whole on each stage, and a tick sums nothing
over stages: the first stage's embedding and the last one's head count, and their
gradients are summed once a step. Gradients are those of the unpipelined model; sources:
PipeDream-Flush (arXiv:2006.09503), Megatron-LM (arXiv:2104.04473).

Letters: p stages, v chunks, L layers of a chunk (padded), m microbatches, T ticks.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution
from jaxdist.parallel.pipeline.schedules.program import TickRun
from jaxdist.parallel.pipeline.stage import AXIS, Pipeline, Stage, Tree, where_real
from jaxdist.parallel.pipeline.stage_params import StageParams, edges, own_names
from jaxdist.protocols.model import Batch, Loss, with_block_sums


class Carry(NamedTuple):
    """What lives from tick to tick on a stage."""

    inputs: jax.Array  # [slots + 1, B, S, D] stage inputs; the last slot is trash
    # [slots + 1, L - 1, B, S, D] inputs of a chunk's other layers or groups, if kept
    layers: jax.Array
    # [slots + 1, B, S, D] gradients with respect to stage outputs
    gradients_in: jax.Array
    dx: jax.Array  # [B, S, D] gradient of the last tick's stage input, on its way back
    sums: Tree  # float32 gradient sums, like the trainable tree
    loss: Loss
    block_aux: dict[str, jax.Array]  # sums over this stage's blocks
    block_stats: dict[str, jax.Array]  # sums of each, [v, L, ...]


def pipeline_sums(
    pipeline: Pipeline,
    params: StageParams,
    names: StageParams,
    batch: Batch,
    key: jax.Array | None,
    scale: jax.Array | None = None,
    *,
    backward: bool,
) -> tuple[Tree, Loss]:
    """Returns (gradient sums, loss sums) over a batch whose entries are [m, B, ...].

    Must be traced inside `execution.activate`; in a region over `pipeline`
    (`execution.region`) all arrays are the stage's part, else it makes one.

    Args:
      params: blocks [v, p, L, ...], the rest with its vocabulary split over pipeline.
      names: logical names, like params.
      scale: of the loss where its gradient begins; gradients come out multiplied by it.
      backward: False leaves the backward pass out; the gradients are then None.
    """
    run: Callable[..., tuple[Tree, Loss]] = partial(_run, pipeline, names, backward)
    if AXIS not in execution.current().manual:
        specs = jax.tree.map(
            partial(execution.region_spec, axes=(AXIS,)), params, names
        )
        given = (specs, P(), P(), P())
        summed = (specs.trained if backward else P(), P())
        run = execution.region(run, (AXIS,), in_specs=given, out_specs=summed)
    return run(params, batch, key, scale)


def _run(
    pipeline: Pipeline, names: StageParams, backward: bool, params, batch, key, scale
):
    """Runs all ticks on one stage; arrays are this stage's part."""
    stage = _Ticks(pipeline, params, names, batch, key, backward, scale)
    carry = stage.start()
    rows, ticks = jax.tree.map(
        jnp.asarray, (pipeline.program.rows, pipeline.program.ticks)
    )
    rows = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, stage.index, 1, False), rows
    )
    for run in pipeline.program.runs:
        if not backward and not run.some & {"embed", "forward", "head"}:
            continue
        window = slice(run.start, run.start + run.length)
        part = jax.tree.map(operator.itemgetter(window), (rows, ticks))
        carry = jax.lax.scan(partial(stage.tick, run), carry, part)[0]
    return stage.finish(carry)


class _Ticks(Stage):
    """The ops of a tick, on one stage."""

    @property
    def edges_last(self) -> bool:
        """Whether each stage embeds and scores for itself, and only the ends'
        results count.
        """
        return self.cut.config.edges == "last"

    def start(self) -> Carry:
        """Returns the carry before the first tick."""
        x = jax.eval_shape(lambda: self.embed(self.rest, 0))
        y = jax.eval_shape(
            lambda: self.forward(self.chunk(0), jnp.zeros(x.shape, x.dtype), 0, 0)
        )
        loss = jax.eval_shape(
            lambda: self.head(self.rest, jnp.zeros(x.shape, x.dtype), 0)
        )
        names = self.names.trained
        blocks = {"blocks": self.blocks.trained} if "blocks" in names else {}
        trainable = blocks | self.rest.trained
        sums = jax.tree.map(_zero_gradient, trainable, names) if self.backward else None

        def slots(count: int, *each: int) -> jax.Array:
            return self.residual(jnp.zeros((count + 1, *each, *x.shape), x.dtype))

        inputs = self.program.num_inputs
        gradients = self.program.num_gradients
        kept = self.cut.kept_inputs
        return Carry(
            slots(inputs),
            slots(inputs, kept - 1) if self.keeps_layers else jnp.zeros(()),
            slots(gradients) if self.backward else jnp.zeros(()),
            jnp.zeros(x.shape, x.dtype) if self.backward else jnp.zeros(()),
            sums,
            jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), loss),
            jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), y.aux),
            jax.tree.map(
                lambda s: jnp.zeros((self.cut.config.chunks, *s.shape)), y.stats
            ),
        )

    def tick(self, run: TickRun, carry: Carry, item) -> tuple[Carry, None]:
        """Returns the carry after one tick, in the order that schedule.program lays
        down.
        """
        row, at = item
        carry, y = self._going_forward(run, carry, row, at)
        if self.backward:
            carry = self._going_back(run, carry, row, at)
        if "hop" in run.some:
            arriving = self._hop(y, +1)
            carry = carry._replace(inputs=_put(carry.inputs, row.rx, arriving))
        return carry, None

    def _going_forward(
        self, run: TickRun, carry: Carry, row, at
    ) -> tuple[Carry, jax.Array]:
        if self.backward and "gradient_hop" in run.some:
            arriving = self._hop(carry.dx, -1)
        if "embed" in run.some:
            x = _cond_if_needed(
                self._prefer_mask("embed", "forward"),
                at.any_embed,
                lambda x: self.residual(self.embed(*self._in_tick(at.e_mb))).astype(
                    x.dtype
                ),
                self._blank(carry),
            )
            carry = carry._replace(inputs=_put(carry.inputs, row.e_x, x))
        y = self._blank(carry)
        if "forward" in run.some:
            chunk, number = _barrier_tick(self.chunk(row.f_chunk), row.f_mb)
            x = carry.inputs[row.f_x]
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
                    lambda t, s: t.at[row.f_chunk].add(s), carry.block_stats, stats
                ),
            )
        if self.backward and "gradient_hop" in run.some:
            carry = carry._replace(
                gradients_in=_put(carry.gradients_in, row.rg, arriving)
            )
        if "head" in run.some:
            carry = _cond_if_needed(
                "head" in run.every,
                at.any_head,
                lambda c: self._score(c, y, row, at),
                carry,
            )
        return carry, y

    def _score(self, carry: Carry, y: jax.Array, row, at) -> Carry:
        """H: all stages score the last stage's output on their part of the vocabulary.

        With `edges_last` each scores its own output, on all of it, and only the last
        one's counts: no stage gets there earlier if the others wait instead.
        """
        last = self.index == self.cut.stages - 1
        if not self.edges_last:
            y = self.residual(
                execution.sum_over(jnp.where(last, y, jnp.zeros_like(y)), AXIS)
            )
        rest, number = _barrier_tick(self.rest, at.h_mb)
        if not self.backward:
            loss = self._mask_edge(last, self.head(rest, y, number))
            return carry._replace(loss=_added(carry.loss, loss))

        def objective(trained, y):
            loss = self.head(rest._replace(trained=trained), y, number)
            total = loss.sum + sum(loss.aux.values())
            return total if self.scale is None else total * self.scale, loss

        (drest, dh), loss = jax.grad(objective, argnums=(0, 1), has_aux=True)(
            rest.trained, y
        )
        return carry._replace(
            loss=_added(carry.loss, self._mask_edge(last, loss)),
            sums=self._add_rest(carry.sums, self._mask_edge(last, drest)),
            gradients_in=_put(carry.gradients_in, row.h_g, self.residual(dh)),
        )

    def _going_back(self, run: TickRun, carry: Carry, row, at) -> Carry:
        if "backward" in run.some:
            x = carry.inputs[row.b_x]
            dy = carry.gradients_in[row.b_g]
            chunk, number = _barrier_tick(self.chunk(row.b_chunk), row.b_mb)
            if self.keeps_layers:
                inputs = jnp.concatenate([x[None], carry.layers[row.b_x]])
                dchunk, dx = self.pull_layers(chunk, inputs, dy, number, row.b_chunk)
            else:
                dchunk, dx = self.pull(chunk, x, dy, number, row.b_chunk)
            carry = carry._replace(
                dx=self.residual(dx), sums=self._add_chunk(carry.sums, dchunk, row)
            )
        if "embed_backward" in run.some:
            always = self._prefer_mask("embed_backward", "backward")
            carry = _cond_if_needed(
                always, at.any_embed_backward, lambda c: self._embed_back(c, at), carry
            )
        return carry

    def _embed_back(self, carry: Carry, at) -> Carry:
        """EB: all stages take the first stage's dx into their part of the table."""
        wanted = (self.index == 0) & (at.eb_mb >= 0)
        dx = jnp.where(wanted, carry.dx, jnp.zeros_like(carry.dx))
        if not self.edges_last:
            dx = execution.sum_over(dx, AXIS)

        rest, number = self._in_tick(at.eb_mb)

        def embed(trained):
            return self.embed(rest._replace(trained=trained), number)

        (drest,) = jax.vjp(embed, rest.trained)[1](self.residual(dx))
        return carry._replace(
            sums=self._add_rest(carry.sums, self._mask_edge(wanted, drest))
        )

    def _mask_edge(self, here: jax.Array, tree: Tree) -> Tree:
        """Masks what an edge gave; with `edges_last` zeros where the stage is not
        `here`.
        """
        if not self.edges_last:
            return tree
        return jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree)

    def _prefer_mask(self, kind: str, pace: str) -> bool:
        """Checks whether most ticks that do `pace` do this too: then no predicate, but
        a mask.

        It is for E and EB, which cost little: a predicate would cost a copy of what it
        may change. Layers behind the embedding cost more.
        """
        if self.has_first_blocks:
            return False
        ticks = self.program.ticks
        return (
            2 * getattr(ticks, f"any_{kind}").sum()
            >= getattr(ticks, f"any_{pace}").sum()
        )

    def _in_tick(self, microbatch: jax.Array) -> tuple[StageParams, jax.Array]:
        """Takes what embeds a microbatch, and its number: see `_barrier_tick`."""
        return (
            _barrier_tick(self.rest, microbatch)
            if self.has_first_blocks
            else (self.rest, microbatch)
        )

    @staticmethod
    def _blank(carry: Carry) -> jax.Array:
        return jnp.zeros(carry.inputs.shape[1:], carry.inputs.dtype)

    def _hop(self, x: jax.Array, by: int) -> jax.Array:
        stages = self.cut.stages
        return self.residual(
            jax.lax.ppermute(x, AXIS, [(s, (s + by) % stages) for s in range(stages)])
        )

    def _add_chunk(self, sums: Tree, dchunk: Tree, row) -> Tree:
        keep = row.b_mb >= 0

        def add(total, gradient, names):
            gradient = jnp.where(keep, gradient.astype(jnp.float32), 0)[None]
            old = jax.lax.dynamic_index_in_dim(total, row.b_chunk, 0, False)
            new = jax.lax.dynamic_update_index_in_dim(
                total, old + gradient, row.b_chunk, 0
            )
            return _scatter(new, names)

        if "blocks" not in sums:  # frozen, all of them
            return sums
        return sums | {
            "blocks": jax.tree.map(
                add, sums["blocks"], dchunk, self.names.trained["blocks"]
            )
        }

    def _add_rest(self, sums: Tree, drest: Tree) -> Tree:
        def add(total, gradient, names):
            return _scatter(total + gradient.astype(jnp.float32), names)

        return sums | jax.tree.map(add, edges(sums), drest, edges(self.names.trained))

    def finish(self, carry: Carry) -> tuple[Tree, Loss]:
        """Returns (gradient sums, loss sums): the blocks' own terms added over
        stages.
        """
        loss = carry.loss
        sums = carry.sums if self.backward else jnp.zeros(())
        if self.edges_last:
            loss = jax.lax.psum(loss, AXIS)
        if self.edges_last and self.backward:
            sums |= jax.tree.map(
                lambda total, names: _scatter(jax.lax.psum(total, AXIS), names),
                edges(sums),
                edges(self.names.trained),
            )
        aux = jax.lax.psum(carry.block_aux, AXIS)
        return sums, with_block_sums(
            loss, aux, jax.tree.map(self._in_layer_order, carry.block_stats)
        )

    def _in_layer_order(self, own: jax.Array) -> jax.Array:
        """Returns the stats of all layers, [num_layers, ...], from this stage's, [v, L,
        ...].
        """
        every = jnp.moveaxis(jax.lax.all_gather(own, AXIS), 0, 1)  # [v, p, L, ...]
        return every.reshape(-1, *own.shape[2:])[: self.cut.num_layers]


def _zero_gradient(leaf: jax.Array, names) -> jax.Array:
    return _scatter(jnp.zeros(leaf.shape, jnp.float32), names)


def _scatter(gradient: jax.Array, names) -> jax.Array:
    return execution.scatter(gradient, own_names(names))


def _added(total: Loss, new: Loss) -> Loss:
    return jax.tree.map(lambda t, n: t + n.astype(jnp.float32), total, new)


def _barrier_tick(parameters: Tree, microbatch: jax.Array) -> tuple[Tree, jax.Array]:
    """Returns both; what is made of the parameters may not be taken out of the loop
    over ticks.

    Else XLA does so with the gathers of fsdp shards wherever a stage has one chunk. It
    then holds all that is gathered, once a loop, and on CPU gathers beside the loop,
    whose own collectives may find no thread left to meet on: a deadlock.
    """
    return jax.lax.optimization_barrier((parameters, microbatch))


def _put(buffer: jax.Array, slot, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(
        buffer, value.astype(buffer.dtype), slot, 0
    )


def _cond_if_needed(always: bool, wanted, function, carry):
    """Returns function(carry), where `wanted`, which is the same on all stages."""
    return (
        function(carry)
        if always
        else jax.lax.cond(wanted, function, lambda c: c, carry)
    )
