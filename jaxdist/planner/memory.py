"""The memory of a step on each device, by arithmetic and abstract traces.

Nothing is compiled or allocated. The peak of a step is at one of three moments: in the
loss, in the backward pass of the last layer, or in the update. Each moment holds the
state and its live values; `components` explains the largest. One block is traced on a
device's shapes, and the activations that its remat policy keeps are read from its vjp.
Padding, fragmentation and the order of instructions are omitted, because only a
compiler knows them. Nothing is fitted but `update_memory.WAITING`.

The gradients of parts are added to one tree of sums in place. A second tree exists with
parameters in bfloat16, and where the loops over layers do not run over the whole stack:
with `remat.layers`, `remat.every`, and layers of several kinds.

Matmuls of a recipe (`precision.matmul`) count as those of the compute dtype. XLA for
CUDA gathers their kernels in the recipe's dtype, but keeps the same float32 copies of
stacks. The codes of activations take as much as the gathers save, or more with many
tokens.

The lifetimes of values were read from buffer assignments of libtpu 0.0.42.1 and of XLA
for CUDA (jax 0.10.2, option xla_dump_to). benchmarks/plan/arithmetic.py compares the
sums with the compilers' peaks.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxdist.hardware.chips import Chip, chip_for, platform_of
from jaxdist.optim import optimizers
from jaxdist.parallel import remat
from jaxdist.parallel.pipeline.partition import Staging
from jaxdist.planner import update_memory
from jaxdist.planner.blocks import Block, sample_tokens, trace
from jaxdist.planner.observed import HOST_BYTES_PER_S, LANES, TABLE, Observed
from jaxdist.planner.state import (
    HOST_PARAMETERS,
    HOST_STATE,
    Components,
    gathers_inside,
    held_state,
    host_state_bytes,
    parameter_bytes,
    shard_size,
)
from jaxdist.planner.targets import Target
from jaxdist.protocols.dim_names import has_experts, in_stack
from jaxdist.protocols.model_spec import stored_dtype
from jaxdist.telemetry.units import GIB
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.costs import costs_of

HOST = "host memory"  # component of offloaded activations, not in a device's peak
# Most by which the arithmetic exceeds a compiler's peak, relative to it. The largest
# excess in benchmarks/results/plan-arithmetic.json is below.
OVERESTIMATE = 0.10


def components(
    composition: Composition,
    target: Target | jax.Device,
    optimizer: optax.GradientTransformation | None = None,
) -> Components:
    """Counts the bytes of a device at the step's peak by component, the largest first.

    Args:
      composition: the run on its mesh.
      target: the hardware; its compiler decides the lifetimes of some values.
      optimizer: the caller's optimizer; default: that of the config.
    """
    platform = platform_of(target.platform)
    chip = _chip(target)
    waits = platform == "tpu" and chip is not None and not chip.sparse_core_collectives
    ordered = waits or composition.shape.sizes["context"] > 1
    state = held_state(composition, platform, optimizer)
    observed = TABLE.get(chip.family if chip else "", Observed())
    step = functools.partial(
        _Step,
        composition,
        platform,
        state,
        holds_expert_gradients=observed.holds_expert_gradients,
    )
    peak = _peak(step(ordered=ordered))
    if platform == "tpu" and chip and accounted_peak(peak) > chip.capacity_bytes:
        peak = _peak(step(ordered=True, pressed=True))
    sizes = [(name, size) for name, size in peak.items() if size]
    sizes.sort(key=lambda item: -item[1])
    return dict(sizes)


def accounted_peak(components: Mapping[str, int]) -> int:
    """Sums the components on the device, without those on the host, in bytes."""
    return sum(
        size
        for name, size in components.items()
        if name not in (HOST, HOST_STATE, HOST_PARAMETERS)
    )


def may_fit(peak_bytes: int, limit_bytes: float) -> bool:
    """Checks whether a run may fit a limit, although the arithmetic may exceed it.

    Args:
      peak_bytes: the peak by arithmetic.
      limit_bytes: bytes that a step may use of a device.
    """
    return peak_bytes <= limit_bytes * (1 + OVERESTIMATE)


def host_rate(chip: Chip | None) -> float:
    """Finds the bytes a second between a device and its host's memory, each way."""
    published = chip.pcie_bytes_per_s if chip else None
    return published or HOST_BYTES_PER_S


def transfer_s(bytes_moved: int, chip: Chip | None) -> float:
    """Estimates the seconds to move bytes between a device and its host."""
    return bytes_moved / host_rate(chip)


def moved_bytes(components: Mapping[str, int]) -> int:
    """Counts the bytes of state that a step moves between a device and its host.

    The update moves all of it to the device and back. Parameters come once more, for
    the forward pass.
    """
    parameters = components.get(HOST_PARAMETERS, 0)
    return 2 * host_state_bytes(components) + parameters


def offload_lines(
    components: Mapping[str, int], target: Target | jax.Device
) -> list[str]:
    """Reports in a line what state on the host costs; [] if there is none.

    Args:
      components: bytes by component.
      target: the hardware, whose link to the host counts.
    """
    moved = moved_bytes(components)
    if not moved:
        return []
    on_host = host_state_bytes(components)
    chip = _chip(target)
    return [
        f"offload: each device keeps {on_host / GIB:.2f} GiB of state on its host. Every step moves "
        f"{moved / GIB:.2f} GiB between them, which takes {transfer_s(moved, chip):.2f} s at "
        f"{host_rate(chip) / 1e9:g} GB/s each way; the step's time omits it"
    ]


# cached by content, because a search needs each of them some thousand times
_programs: dict[tuple[str, int, int, int], tuple[int, int]] = {}


def _slots(staging: Staging) -> tuple[int, int]:
    """Counts a stage's slots of inputs and of gradients, without the slots for trash."""
    config = staging.config
    key = config.schedule, staging.stages, staging.microbatches, config.chunks
    # A schedule's file may have changed.
    if key not in _programs or config.schedule.endswith(".json"):
        program = staging.program()
        _programs[key] = program.num_inputs, program.num_gradients
    return _programs[key]


def _chip(target: Target | jax.Device) -> Chip | None:
    """Finds the chip of a target or device; None if the table lacks it."""
    return target.chip if isinstance(target, Target) else chip_for(target.device_kind)


def _peak(step: "_Step") -> Components:
    """Finds the components of the moment with the largest peak."""
    moments = (step.in_loss(), *step.in_backward(), *step.in_update())
    return max(moments, key=accounted_peak)


class _Step:
    """The sizes of a run's step on one device.

    Args:
      composition: the run on its mesh.
      platform: tpu, gpu or cpu.
      state: bytes of the state and the batch, by component.
      holds_expert_gradients: see `Observed`.
      ordered: whether the head's gradient is reduced before the layers' backward
        passes. A barrier orders it so on TPUs whose compute waits for sums
        (`ops.dense_matmul.waits_for_sums`), and with split sequences.
      pressed: whether the program would otherwise be too large. A TPU's compiler then
        orders it for size: the head as above, and attention's logsumexp leaves its
        padded lanes before the values of the feed-forward exist.
    """

    def __init__(
        self,
        composition: Composition,
        platform: str,
        state: Components,
        *,
        holds_expert_gradients: bool,
        ordered: bool = False,
        pressed: bool = False,
    ) -> None:
        run = composition.config
        rules = composition.rules
        spec = composition.spec
        self.run = run
        self.rules = rules
        self.flat_spec = spec
        self.platform = platform
        self.holds_expert_gradients = holds_expert_gradients
        self.ordered = ordered
        self.pressed = pressed
        self.staging = composition.staging
        self.spec = composition.spec_by_stage
        self.parameters = self.spec.named_trainable()
        self.compute_itemsize = jnp.dtype(run.precision.compute).itemsize
        # Of the parameters that a device holds. Those that wait on the host are copied
        # to the device in the compute dtype.
        self.copies_parameters = bool(state.get(HOST_PARAMETERS))
        # layers on a device if the update goes layer by layer; 0 = all at once
        self.layers_updated_in_turn = 0
        if composition.moments_in() is not None:
            stages = self.staging.stages if self.staging else 1
            self.layers_updated_in_turn = max(spec.depth // stages, 1)
        self.stored_itemsize = jnp.dtype(run.precision.params).itemsize
        if self.copies_parameters:
            self.stored_itemsize = self.compute_itemsize
        parts = composition.total_microbatches * rules.shape.batch_shards
        sequences = max(run.batch.global_size // parts, 1)
        self.policy = run.remat.policy if self.staging is None else self.staging.remat
        block_policy = "full" if self.policy == "layers" else self.policy
        if self.staging and self.staging.grouped:
            block_policy = run.remat.policy
        self.block = trace(composition, block_policy, platform)
        self.full_block = self.block
        if run.remat.every > 1:
            self.full_block = trace(composition, "full", platform)
        # blocks at the end that follow the policy; 0 if all do
        self.last_layers = 0
        if spec.staged:
            self.last_layers = run.remat.layers // max(spec.block_layers, 1)
        self.earlier_block = None
        if 0 < self.last_layers < spec.depth:
            self.earlier_block = trace(composition, run.remat.others, platform)
        self.tokens = sequences * sample_tokens(composition)
        # the sizes of a block are per `block.tokens`
        self.scale = self.tokens // self.block.tokens
        self.input_bytes = self.scale * self.block.x
        self.kept_input_bytes = self.input_bytes
        if rules.sequence_parallel:
            self.kept_input_bytes //= rules.shape.sizes["tensor"]
        self.costs = costs_of(run)
        shares = [cost.share(rules, self.compute_itemsize) for cost in self.costs]
        self.score_bytes = self._score_bytes(sequences) if platform == "gpu" else 0
        # keys and values of other devices in one layer
        keys = max((share.held for share in shares), default=0)
        self.remote_keys_bytes = sequences * keys
        self.state = state

    @property
    def adds_in_parts(self) -> bool:
        """Whether the gradients of parts of the batch are summed."""
        return self.run.batch.accumulation > 1 or self.staging is not None

    @property
    def splits_stacks(self) -> bool:
        """Whether the loops over layers read slices of the stacks.

        They do if some layers have another remat policy, or are of another kind.
        """
        return self.earlier_block is not None or self.flat_spec.period > 1

    @property
    def adds_in_place(self) -> bool:
        """Whether a layer's gradients are added to the sums (`step.gradients`).

        Then no second tree exists. jax does so in the loop over a whole stack.
        """
        if self.staging:
            return self.policy == "layers"
        if not self.adds_in_parts or self.stored_itemsize != 4:
            return False
        return self.run.remat.every == 1 and not self.splits_stacks

    def _score_bytes(self, sequences: int) -> int:
        """Counts the bytes of attention scores and their gradients in one layer."""
        dtype = self.run.precision.compute
        scores = [
            cost.score_bytes(self.rules, dtype, self.platform) for cost in self.costs
        ]
        traced = 2 * self.scale * self.block.scores
        return sequences * max(scores, default=0) + traced

    # --- moments ----------------------------------------------------------------------

    def in_update(self) -> Iterator[Components]:
        """Counts the moments of the update: its start and its end.

        All gradients exist at the start. New values then replace old ones leaf by leaf.
        """
        itemsize = 4 if self.adds_in_parts else self.stored_itemsize
        yield self.state | {"gradients": self._sum(self.rules.gradient, itemsize)}
        if self.copies_parameters:  # the update goes layer by layer
            return
        gathered = update_memory.gathered_bytes(
            self.spec,
            self.rules,
            self.stored_itemsize,
            self.platform,
            layers=self.layers_updated_in_turn,
        )
        orthogonalized = 0
        if self.platform == "gpu":
            orthogonalized = update_memory.orthogonalized_bytes(
                self.spec, self.rules, self.run
            )
        yield self.state | {
            "gradients": self._sum(self.rules.state, 4),
            "gathered parameters": gathered,
            "orthogonalized kernels": orthogonalized,
        }

    def in_loss(self) -> Components:
        """Counts a chunk of logits with gradients, the head, and the layers' values."""
        chunks = [cost.chunk for cost in self.costs if cost.chunk]
        chunk = min([*chunks, self.tokens])
        vocabulary = self._head(vocabulary=True)
        # the last output and its gradient
        working_set = 2 * self.input_bytes
        if self._vocabulary_parts() > 1:
            # those of a chunk on all devices that share the vocabulary
            working_set += 2 * self._rows(chunk)
        return self._around_backward(self._kept()) | {
            "gathered weights": self._gathered_head() + self._gathered_once(),
            # logits in float32, and their gradient
            "logits": chunk * vocabulary * (4 + self.compute_itemsize),
            "working set": working_set,
        }

    def in_backward(self) -> Iterator[Components]:
        """Counts the moments of the last layer's backward pass, which may be largest.

        Nothing that layers kept is free yet. The layer's weights are gathered, and its
        forward values exist again. The gradient of the first weight is whole until it is
        reduced over devices, and takes the place of a forward value. GPUs reduce a
        layer's gradients together: all of them exist when half of the forward values
        are free. The head's gradient is reduced after the layers, unless `ordered`.
        Layers with experts have moments of their own, in which the values before the
        experts exist as well.
        """
        yield from self._in_backward_of(
            self.block, self._in_layers(self._kept()), self.policy
        )
        if self.earlier_block:
            # The values of the last layers are free when earlier layers begin.
            policy = self.run.remat.others
            count = self.spec.depth - self.last_layers
            kept = self._kept_by(self.earlier_block, count, policy)
            sizes = self._in_layers(kept)
            yield from self._in_backward_of(self.earlier_block, sizes, policy)

    def _in_backward_of(
        self, block: Block, sizes: Components, policy: str
    ) -> Iterator[Components]:
        """Counts the moments of one block's backward pass.

        Args:
          block: the block.
          sizes: values that are alive in every layer's backward pass; updated.
          policy: the block's remat policy.
        """
        sizes["keys of other devices"] = 0
        if policy != "none":
            sizes["keys of other devices"] = self.remote_keys_bytes
        if block.call:
            moments = block.call.moments(
                self.rules,
                self.tokens,
                self.compute_itemsize,
                self.platform,
                holds_gradients=self.holds_expert_gradients,
            )
            before_experts = self.scale * (block.working - block.largest)
            for moment in moments:
                yield sizes | {
                    "gathered weights": self._gathered_once() or moment.gathered,
                    "working set": sizes["working set"] + before_experts + moment.rows,
                    "unreduced gradients": sizes["unreduced gradients"]
                    + moment.gradients,
                }
            return
        gathered = self._gathered_once() or sum(block.weights) * self.compute_itemsize
        work = self.scale * block.working + self.score_bytes
        if self.kept_input_bytes < self.input_bytes:
            # With sequence parallelism, a part's input exists gathered as well.
            work += self.input_bytes
        unreduced = max(
            4 * max(block.trained, default=0) - self.scale * block.largest, 0
        )
        if self.pressed:
            # One gradient takes the place of its value; programs with none and with
            # two of them were seen.
            work -= self.scale * block.largest
        elif self.platform == "tpu":
            work += self.scale * block.logsumexps * LANES * 4
        elif gathered + work < self._layer_gradients(block) + work // 2:
            # The moment in which all gradients exist is larger.
            gathered = 0
            work = work // 2
            unreduced = self._layer_gradients(block)
        sizes["unreduced gradients"] += unreduced
        sizes["working set"] += work
        yield sizes | {"gathered weights": gathered}

    def _layer_gradients(self, block: Block) -> int:
        """Counts the float32 gradients of a layer, and the part of the sums they join."""
        size = 4 * sum(block.trained)
        if self.adds_in_place and self.rules.zero < 2:
            return 2 * size
        return size

    def _narrow_state(self) -> int:
        """Counts padded copies of experts' kernels and their state on TPU, in bytes.

        If a shard's rows are half as wide as the lanes, libtpu copies the state before
        the loop of layers: it lays the state out by columns, but the layers' gradients
        by rows. Narrower shards need no copy. Element-wise optimizers update by columns
        (`update.narrow_kernels`).
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
        return int(sum(narrow) * (self.stored_itemsize + share))

    def _in_layers(self, kept: Components) -> Components:
        """Counts the values that are alive in every layer's backward pass.

        The working set contains only a pipeline's values; the layer's own are added
        later.

        Args:
          kept: values that layers keep from the forward pass.
        """
        sizes = self._around_backward(kept) | {"working set": 0}
        if self.ordered:
            # The head's gradient is reduced, unless it is added to that of other parts.
            sizes["unreduced gradients"] = 0
            if not sizes["gradients"]:
                sizes["gradients"] = 4 * self._head_shard()
        layer_gradients = self._sum(self.rules.gradient, self.stored_itemsize, "blocks")
        if self.staging:
            # those of a chunk
            layer_gradients //= self.staging.config.chunks
            if self.policy == "layers":
                # a chunk's inputs, taken from their slots
                inputs = self.staging.kept_inputs * self.kept_input_bytes
                sizes["working set"] = inputs
            else:
                block_bytes = self.scale * sum(size for _, size in self.block.kept)
                sizes["working set"] = self.staging.dims[2] * block_bytes
        if not self.adds_in_place:
            sizes["gradients"] += layer_gradients
        every = self.run.remat.every
        if every > 1:  # the loop over a group has stacks of its own
            share = every / max(self.flat_spec.depth * self.flat_spec.block_layers, 1)
            sizes["saved in a group"] = self._in_group()
            sizes["gradients"] += int(share * layer_gradients)
            sizes["weights as computed"] += int(share * self._copied_stacks())
        return sizes

    def _around_backward(self, kept: Components) -> Components:
        """Counts values alive from the loss to the end of the backward pass.

        Args:
          kept: values that layers keep from the forward pass.
        """
        sizes = self.state | kept
        # the sum of gradients of earlier parts
        sizes["gradients"] = 0
        if self.adds_in_parts:
            sizes["gradients"] = self._sum(self.rules.gradient, 4)
        sizes["unreduced gradients"] = 4 * self._head(trained=True)
        sizes["weights as computed"] = self._stack_copies()
        if self.splits_stacks and self.platform == "gpu":
            sizes["weights as computed"] += self._copied_stacks()
        sizes["state, padded"] = self._narrow_state()
        return sizes

    def _copied_stacks(self) -> int:
        """Counts copies of the stacks for loops over some of the layers, in bytes."""
        if self.platform != "gpu":
            return self._stack_copies()
        return self._sum(self.rules.stored, self.stored_itemsize, "blocks")

    def _stack_copies(self) -> int:
        """Counts copies of whole stacks of kernels that XLA makes before the loops.

        TPUs cast all stacks to the compute dtype. GPUs keep the stored dtype, and
        transpose the stacks whose shards are not rows of a layer's kernel: a gather
        puts one shard behind the other. Copies of parameters on the host are made in
        that order.
        """
        if self.copies_parameters:
            return 0
        if self.platform != "gpu":
            if self.compute_itemsize == self.stored_itemsize:
                return 0
            return self._sum(self.rules.stored, self.compute_itemsize, "blocks")
        params = self.run.precision.params
        return sum(
            shard_size(self.rules, self.rules.stored(names, x.shape), x.shape)
            * stored_dtype(x, params).itemsize
            for path, (x, names) in self.spec.named_parameters().items()
            if in_stack(path) and gathers_inside(self.rules, names, x.shape)
        )

    def _kept(self) -> Components:
        """Counts values that layers keep from the forward to the backward pass.

        With a pipeline, these are the slots of live microbatches.
        """
        if self.staging:
            per_slot = self.staging.kept_inputs if self.policy == "layers" else 1
            inputs, gradients = _slots(self.staging)
            slots = (inputs + 1) * per_slot + gradients + 1
            return {"pipeline slots": slots * self.kept_input_bytes}
        depth = self.spec.depth
        if self.run.remat.every > 1:
            others = tuple(
                (name, size)
                for name, size in self.full_block.kept
                if name != remat.INPUT
            )
            kept = self._kept_by(replace(self.full_block, kept=others), depth, "full")
            inputs = 0
            if self.full_block.kept:
                groups = depth * self.spec.block_layers // self.run.remat.every
                inputs = groups * self.kept_input_bytes
            return kept | {f"saved: {remat.INPUT}": inputs}
        if self.earlier_block is None:
            return self._kept_by(self.block, depth, self.policy)
        earlier = self._kept_by(
            self.earlier_block, depth - self.last_layers, self.run.remat.others
        )
        last = self._kept_by(self.block, self.last_layers, self.policy)
        return dict(Counter(earlier) + Counter(last))

    def _kept_by(self, block: Block, count: int, policy: str) -> Components:
        """Counts the values that a number of blocks keep under a policy."""
        offloaded = remat.named_in(policy)["offload"]
        kept = Counter[str]()
        for name, size in block.kept:
            split = name in remat.RESIDUAL_STREAM and self.rules.sequence_parallel
            shards = self.rules.shape.sizes["tensor"] if split else 1
            component = HOST if name in offloaded else f"saved: {name}"
            kept[component] += size * count * self.scale // shards
        if policy == "none":
            kept["saved: keys of other devices"] = self.remote_keys_bytes * count
        return dict(kept)

    def _in_group(self) -> int:
        """Counts the values that a group's layers keep during its backward pass."""
        count = self.run.remat.every // self.spec.block_layers
        kept = self._kept_by(self.block, count, self.run.remat.policy)
        return sum(kept.values()) - kept.get(HOST, 0)

    # --- parameters -------------------------------------------------------------------

    def _sum(self, rule: Callable[..., P], itemsize: int, prefix: str = "") -> int:
        """Counts the bytes of trained parameters laid out by a rule, by path prefix."""
        return parameter_bytes(self.spec, self.rules, rule, itemsize, prefix)

    def _head(self, *, vocabulary: bool = False, trained: bool = False) -> int:
        """Counts the elements of the output head after it is gathered from fsdp.

        Args:
          vocabulary: whether to return the size of its vocabulary dim instead.
          trained: whether to count the head only if it is trained.
        """
        table = self._head_table(trained)
        if table is None:
            return 0
        dims, names = table
        local = self.rules.shard_dims(self.rules.computed(names, dims), dims)
        if vocabulary:
            return local[names.index("vocab")]
        return math.prod(local) // self._vocabulary_parts()

    def _gathered_head(self) -> int:
        """Counts the bytes of the output head as the loss reads it.

        A GPU reads a head that is stored whole in the compute dtype from its place.
        """
        table = self._head_table(trained=False)
        if table is None:
            return 0
        dims, names = table
        whole = self.rules.stored(names, dims) == self.rules.computed(names, dims)
        same = self.stored_itemsize == self.compute_itemsize
        if self.platform == "gpu" and whole and same:
            return 0
        return self._head() * self.compute_itemsize

    def _vocabulary_parts(self) -> int:
        """Counts the devices that split the head in the loss (`ops.cross_entropy`).

        These are the devices that share a sequence, if the vocabulary divides evenly.
        """
        parts = self.rules.shape.sizes["context"]
        table = self._head_table(trained=False)
        if table is None or (self.staging and self.rules.vocab_over_stages):
            return 1
        dims, names = table
        vocabulary = dims[names.index("vocab")]
        return 1 if vocabulary % (parts * self.rules.shape.sizes["tensor"]) else parts

    def _rows(self, chunk: int) -> int:
        """Counts the bytes of a chunk's rows on all devices that share a sequence."""
        rows = self.input_bytes * chunk // self.tokens
        return rows * self.rules.shape.sizes["context"]

    def _head_shard(self) -> int:
        """Counts the elements of the trained output head's reduced gradient."""
        table = self._head_table(trained=True)
        if table is None:
            return 0
        dims, names = table
        return shard_size(self.rules, self.rules.gradient(names, dims), dims)

    def _head_table(
        self, trained: bool
    ) -> tuple[Sequence[int], tuple[str | None, ...]] | None:
        """Finds the dims of the output head and their names; None without a head."""
        named = self.parameters if trained else self.spec.named_parameters()
        tables = [(x.shape, names) for x, names in named.values() if "vocab" in names]
        return tables[-1] if tables else None  # tied embeddings are the head as well

    def _gathered_once(self) -> int:
        """Counts the weights of all blocks if a step gathers them once; 0 otherwise."""
        if self.staging is None or not self.staging.config.gather_once:
            return 0
        return self._sum(self.rules.computed, self.compute_itemsize, "blocks")
