"""What a step holds on each device, by arithmetic and abstract traces: nothing is
compiled or allocated.

A step's peak lies in one of three moments: the loss, the backward pass of the last
layer, the update. Each holds the state and what is alive then; `components` explains
the largest. Activations are jax's own: one block is traced on a device's shapes, and
what its remat policy keeps is read off its vjp. What only a compiler knows (padding,
fragmentation, order) is left out, and nothing is fitted.

Matmuls of a recipe (`precision.matmul`) count as those of the compute dtype. XLA for
CUDA gathers their kernels in the recipe's bytes, but keeps the same copies of whole
stacks, in float32, and codes of activations take as much as the gathers save, or more
with many tokens: Llama 3.1 8B on 8 H100 with fp8_rowwise takes 46.34 GiB, not 45.15,
and 24.80, not 24.89, in 8 parts (jax 0.10.2).

That values live so long was read from the buffer assignments of libtpu 0.0.42.1 and of
XLA for CUDA (jax 0.10.2, option xla_dump_to).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxdist.hardware.chips import Chip, chip_for, platform_of
from jaxdist.optim import optimizers
from jaxdist.parallel import remat
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.planner.blocks import Block, sample_tokens, trace
from jaxdist.planner.observed import HOST_BYTES_PER_S, LANES
from jaxdist.planner.state import (
    HOST_STATE,
    Components,
    held_state,
    parameter_bytes,
    shard_size,
)
from jaxdist.planner.targets import Target
from jaxdist.protocols.param_names import has_experts
from jaxdist.telemetry.units import GIB
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of

HOST = "host memory"  # offloaded activations: not on the device, so not in its peak


def components(composition: Composition, target: Target | jax.Device) -> Components:
    """Counts bytes per device at the step's peak, by component, the largest first.

    Args:
      target: the device or target whose compiler's habits count.
    """
    platform = platform_of(target.platform)
    chip = _chip(target)
    waits = platform == "tpu" and chip is not None and not chip.sparse_core_collectives
    ordered = waits or composition.shape.sizes["context"] > 1
    peak = _peak(_Step(composition, platform, ordered=ordered))
    if platform == "tpu" and chip and accounted_peak(peak) > chip.capacity_bytes:
        peak = _peak(_Step(composition, "tpu", ordered=True, pressed=True))
    return dict(
        sorted(
            ((n, size) for n, size in peak.items() if size), key=lambda item: -item[1]
        )
    )


def accounted_peak(components: Mapping[str, int]) -> int:
    """Returns the bytes on the device that the components sum to."""
    return sum(
        size for name, size in components.items() if name not in (HOST, HOST_STATE)
    )


def transfer_s(bytes_on_host: int) -> float:
    """Estimates the seconds in which state crosses from the host to its device and
    back, nothing hidden.
    """
    return 2 * bytes_on_host / HOST_BYTES_PER_S


def offload_lines(components: Mapping[str, int]) -> list[str]:
    """Tells, in one line, what an optimizer's state on the host costs; in none without
    one.
    """
    waiting = components.get(HOST_STATE, 0)
    if not waiting:
        return []
    return [
        f"offload.optimizer: {waiting / GIB:.2f} GiB a device wait on the host and cross to it and back "
        f"every step: {transfer_s(waiting):.2f} s at {HOST_BYTES_PER_S / 1e9:g} GB/s, which the step's time "
        f"leaves out"
    ]


# Kept by content: a search asks for each of them some thousand times.
_programs: dict[tuple[str, int, int, int], tuple[int, int]] = {}


def _slots(cut: Staging) -> tuple[int, int]:
    """Returns the slots of inputs and of gradients that a stage has, but for trash."""
    config = cut.config
    key = config.schedule, cut.stages, cut.microbatches, config.chunks
    # a file may have changed
    if key not in _programs or config.schedule.endswith(".json"):
        program = cut.program()
        _programs[key] = program.num_inputs, program.num_gradients
    return _programs[key]


def _chip(target: Target | jax.Device) -> Chip | None:
    """Returns what is known of a device; None of one that is not in the table."""
    return target.chip if isinstance(target, Target) else chip_for(target.device_kind)


def _peak(step: "_Step") -> Components:
    return max(
        (step.in_loss(), *step.in_backward(), step.in_update()), key=accounted_peak
    )


class _Step:
    """The sizes of a run's step on one device.

    Args:
      ordered: the head's gradient is reduced before the layers' backward passes: by our
        barrier on TPUs whose compute waits for sums (`ops.dense_matmul.waits_for_sums`), and
        wherever sequences are split.
      pressed: of a program that is too large otherwise. A TPU's compiler then orders it
        anew, for size: the head as above, and attention's logsumexp is taken out of its
        lanes before the feed-forward's values are there.
    """

    def __init__(
        self,
        composition: Composition,
        platform: str,
        *,
        ordered: bool = False,
        pressed: bool = False,
    ) -> None:
        run = self.run = composition.config
        rules = self.rules = composition.rules
        spec = self.flat = composition.spec
        self.platform = platform
        self.ordered = ordered
        self.pressed = pressed
        self.cut = composition.staging
        self.spec = composition.staged_spec
        self.parameters = self.spec.named_trainable()
        self.compute = jnp.dtype(run.precision.compute).itemsize
        self.stored = jnp.dtype(run.precision.params).itemsize
        parts = composition.parts * rules.shape.batch_shards
        sequences = max(run.batch.global_size // parts, 1)
        self.policy = run.remat.policy if self.cut is None else self.cut.remat
        inner = "full" if self.policy == "layers" else self.policy
        if self.cut and self.cut.grouped:
            inner = run.remat.policy
        self.block = trace(composition, inner, platform)
        self.full = self.block
        if run.remat.every > 1:
            self.full = trace(composition, "full", platform)
        self.last = run.remat.layers // max(spec.block_layers, 1) if spec.staged else 0
        self.rest = None
        if 0 < self.last < spec.depth:
            self.rest = trace(composition, run.remat.others, platform)
        self.tokens = sequences * sample_tokens(composition)
        self.times = self.tokens // self.block.tokens
        self.x = self.times * self.block.x
        self.x_kept = self.x // (
            rules.shape.sizes["tensor"] if rules.sequence_parallel else 1
        )
        self.costs = costs_of(run)
        shares = [cost.share(rules, self.compute) for cost in self.costs]
        # of other devices, in a layer
        self.keys = sequences * max((share.held for share in shares), default=0)
        self.state = held_state(composition, platform)

    # --- moments ----------------------------------------------------------------------

    def in_update(self) -> Components:
        """State and gradients; new values take the place of old ones, leaf by leaf."""
        return self.state | {"gradients": self._sum(self.rules.gradient, 4)}

    def in_loss(self) -> Components:
        """A chunk of logits, their gradients, and the head, on top of what the layers
        kept.
        """
        chunks = [cost.chunk for cost in self.costs if cost.chunk]
        chunk = min([*chunks, self.tokens])
        vocabulary = self._head(vocabulary=True)
        return self._around_backward(self._kept()) | {
            "gathered weights": self._head() * self.compute + self._gathered_once(),
            # float32, and their gradient
            "logits": chunk * vocabulary * (4 + self.compute),
            # The last output and its gradient, and those of a chunk of all who share
            # out the vocabulary.
            "working set": 2 * self.x
            + (self._vocabulary_parts() > 1) * 2 * self._rows(chunk),
        }

    def in_backward(self) -> Iterator[Components]:
        """Yields what the last layer's backward pass holds, when nothing that layers
        kept is free yet.

        Its weights are gathered and its forward values there again. The first weight's
        gradient, whole until it is reduced over devices, takes the place of a forward
        value. GPU reduces a layer's gradients together: all of them are there when half
        of the forward values are gone. The head's is reduced after the layers, unless
        they are `ordered`. Experts have moments of their own, in which the values of
        what comes before them are there, too.
        """
        yield from self._in_backward_of(
            self.block, self._in_layers(self._kept()), self.policy
        )
        if self.rest:  # of the layers before the last ones, whose values are gone
            sizes = self._in_layers(
                self._kept_by(
                    self.rest, self.spec.depth - self.last, self.run.remat.others
                )
            )
            yield from self._in_backward_of(self.rest, sizes, self.run.remat.others)

    def _in_backward_of(
        self, block: Block, sizes: Components, policy: str
    ) -> Iterator[Components]:
        sizes["keys of other devices"] = self.keys * (policy != "none")
        if block.call:
            moments = block.call.moments(
                self.rules, self.tokens, self.compute, self.platform
            )
            for moment in moments:
                work = (
                    sizes["working set"]
                    + self.times * (block.working - block.largest)
                    + moment.rows
                )
                more = {
                    "gathered weights": self._gathered_once() or moment.gathered,
                    "working set": work,
                }
                more["unreduced gradients"] = (
                    sizes["unreduced gradients"] + moment.gradients
                )
                yield sizes | more
            return
        gathered = self._gathered_once() or sum(block.weights) * self.compute
        # With sequence parallelism a part's input is gathered, beside what it is
        # gathered of.
        work = self.times * block.working + self.x * (self.x_kept < self.x)
        unreduced = max(
            4 * max(block.weights, default=0) - self.times * block.largest, 0
        )
        if self.pressed:
            # one gradient over its value: none and two of them were seen
            work -= self.times * block.largest
        elif self.platform == "tpu":
            work += self.times * block.logsumexps * LANES * 4
        elif gathered + work < 4 * sum(block.weights) + work // 2:
            # a little later there is more
            gathered = 0
            work = work // 2
            unreduced = 4 * sum(block.weights)
        sizes["unreduced gradients"] += unreduced
        sizes["working set"] += work
        yield sizes | {"gathered weights": gathered}

    def _narrow_state(self) -> int:
        """Returns the bytes by which experts' kernels and their state are padded in
        copies on TPU.

        Where a shard's rows are half as wide as the lanes, libtpu lays it out by
        columns, and the layers' gradients by rows; it copies the state before their
        loop. Narrower ones it leaves as they are, and updates by element are made by
        columns (`update.narrow_kernels`).
        """
        if (
            self.platform != "tpu"
            or self.rules.zero < 3
            or self.run.optimizer.name in optimizers.ELEMENTWISE
        ):
            return 0
        share = self.state["optimizer state"] / max(self._sum(self.rules.state, 1), 1)
        shards = [
            self.rules.shard_dims(self.rules.stored(names, x.shape), x.shape)
            for x, names in self.parameters.values()
            if has_experts(names)
        ]
        narrow = (math.prod(dims) for dims in shards if dims[-1] * 2 == LANES)
        return int(sum(narrow) * (self.stored + share))

    def _in_layers(self, kept: Components) -> Components:
        """What is alive in every layer's backward pass; the working set is that of a
        pipeline alone.
        """
        sizes = self._around_backward(kept) | {"working set": 0}
        if self.ordered:
            # but reduced, unless it is added to earlier parts'
            sizes["unreduced gradients"] = 0
            sizes["gradients"] += 4 * self._head_shard() * (not sizes["gradients"])
        layer_gradients = self._sum(self.rules.gradient, 4, "blocks")
        if self.cut:
            sizes["unreduced gradients"] = 0  # a tick reduces the head's for itself
            layer_gradients //= self.cut.config.chunks
            # With layers a chunk's inputs, taken from their slots.
            each = self.times * sum(size for _, size in self.block.kept)
            inputs = self.cut.kept_inputs * self.x_kept
            sizes["working set"] = (
                inputs if self.policy == "layers" else self.cut.dims[2] * each
            )
        sizes["gradients"] += layer_gradients
        if (every := self.run.remat.every) > 1:  # whose loop has stacks of its own
            share = every / max(self.flat.depth * self.flat.block_layers, 1)
            sizes["saved in a group"] = self._in_group()
            sizes["gradients"] += int(share * layer_gradients)
            sizes["weights as computed"] += int(share * sizes["weights as computed"])
        return sizes

    def _around_backward(self, kept: Components) -> Components:
        """What is alive from the loss to the end of the backward pass."""
        several = self.run.batch.accumulation > 1 or self.cut
        cast = self.compute != self.stored
        sizes = self.state | kept
        # of earlier parts
        sizes["gradients"] = self._sum(self.rules.gradient, 4) if several else 0
        sizes["unreduced gradients"] = 4 * self._head(trained=True)
        # Casts (TPU) and copies in the order of gathers (GPU) of whole stacks leave the
        # loops.
        sizes["weights as computed"] = (
            self._sum(self.rules.stored, self.compute, "blocks") if cast else 0
        )
        sizes["state, padded"] = self._narrow_state()
        return sizes

    def _kept(self) -> Components:
        """What layers keep from forward to backward; with a pipeline, slots of live
        microbatches.
        """
        if self.cut:
            each = self.cut.kept_inputs if self.policy == "layers" else 1
            inputs, gradients = _slots(self.cut)
            slots = (inputs + 1) * each + gradients + 1
            return {"pipeline slots": slots * self.x_kept}
        depth = self.spec.depth
        if self.run.remat.every > 1:
            order = tuple(one for one in self.full.kept if one[0] != remat.INPUT)
            groups = depth * self.spec.block_layers // self.run.remat.every
            kept = self._kept_by(replace(self.full, kept=order), depth, "full")
            return kept | {
                f"saved: {remat.INPUT}": groups * self.x_kept * bool(self.full.kept)
            }
        if self.rest is None:
            return self._kept_by(self.block, depth, self.policy)
        before = self._kept_by(self.rest, depth - self.last, self.run.remat.others)
        return dict(
            Counter(before) + Counter(self._kept_by(self.block, self.last, self.policy))
        )

    def _kept_by(self, block: Block, count: int, policy: str) -> Components:
        """What so many blocks keep under a policy."""
        offloaded = remat.named_in(policy)["offload"]
        kept = Counter[str]()
        for name, size in block.kept:
            split = name in remat.RESIDUAL_STREAM and self.rules.sequence_parallel
            shards = self.rules.shape.sizes["tensor"] if split else 1
            kept[HOST if name in offloaded else f"saved: {name}"] += (
                size * count * self.times // shards
            )
        if policy == "none":
            kept["saved: keys of other devices"] = self.keys * count
        return dict(kept)

    def _in_group(self) -> int:
        """What the layers of a group keep while its backward pass runs."""
        count = self.run.remat.every // self.spec.block_layers
        kept = self._kept_by(self.block, count, self.run.remat.policy)
        return sum(kept.values()) - kept.get(HOST, 0)

    # --- parameters -------------------------------------------------------------------

    def _sum(self, rule, itemsize: int, of: str = "") -> int:
        return parameter_bytes(self.spec, self.rules, rule, itemsize, of)

    def _head(self, *, vocabulary: bool = False, trained: bool = False) -> int:
        """Returns the elements of the (trained) output head, gathered from fsdp; or of
        its vocabulary.
        """
        if not (table := self._head_table(trained)):
            return 0
        dims, names = table
        local = self.rules.shard_dims(self.rules.computed(names, dims), dims)
        return (
            local[names.index("vocab")]
            if vocabulary
            else math.prod(local) // self._vocabulary_parts()
        )

    def _vocabulary_parts(self) -> int:
        """Returns how many devices of a sequence share out the head in the loss
        (`ops.cross_entropy`).
        """
        parts = self.rules.shape.sizes["context"]
        table = self._head_table(trained=False)
        if not table or (self.cut and self.rules.vocab_over_stages):
            return 1
        vocabulary = table[0][table[1].index("vocab")]
        return 1 if vocabulary % (parts * self.rules.shape.sizes["tensor"]) else parts

    def _rows(self, chunk: int) -> int:
        """Returns the bytes of a chunk's rows of all devices that share out a
        sequence.
        """
        return self.x * chunk // self.tokens * self.rules.shape.sizes["context"]

    def _head_shard(self) -> int:
        """Returns the elements of the trained output head's reduced gradient."""
        table = self._head_table(trained=True)
        return (
            shard_size(self.rules, self.rules.gradient(table[1], table[0]), table[0])
            if table
            else 0
        )

    def _head_table(
        self, trained: bool
    ) -> tuple[Sequence[int], tuple[str | None, ...]] | None:
        """Returns (dims, names) of the output head; None without one."""
        named = self.parameters if trained else self.spec.named_parameters()
        tables = [(x.shape, names) for x, names in named.values() if "vocab" in names]
        return tables[-1] if tables else None  # with tied embeddings there is one

    def _gathered_once(self) -> int:
        once = self.cut is not None and self.cut.config.gather_once
        return self._sum(self.rules.computed, self.compute, "blocks") if once else 0
