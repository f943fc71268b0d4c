"""The step time of a compiled program: a band, its parts, and how reliable it is.

On TPUs, compute time is the compiler's cycle counts times loop trips, divided by the
clock. Pallas kernels, which the compiler cannot see into, are timed by their FLOPs. On
GPUs, each instruction is timed by a roofline: datasheet peaks times the share of them
that single operations reach. Nothing is fitted to published runs; they only tell how
good the estimates are (`Time.sure`). The input pipeline, host transfers, stragglers and
contention are not modelled.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from jaxdist.ops.experts.costs import rounds
from jaxdist.parallel.precision import UNITS
from jaxdist.planner import observed
from jaxdist.planner.communication import Collective
from jaxdist.planner.observed import GROUPED_MATMUL
from jaxdist.planner.targets import Target
from jaxdist.telemetry import hlo, traffic
from jaxdist.telemetry.flops import hlo_flops, instruction_flops
from jaxdist.telemetry.units import percent_text

_ROUNDING = 1e-9  # relative rounding error of a sum of seconds
WIDENED = 0.05  # relative margin of the printed band beyond low_s and high_s
# share of a step above which a doubtful part of the estimate gets a note
_DOUBTFUL_SHARE = 0.05

# FLOPs of an attention kernel relative to the forward kernel, by role. A forward kernel
# has 2 matmuls of S x S x head, dq has 3, dk and dv together have 4, and a kernel that
# computes all three has 5.
_KERNEL_COST = {"forward": 1.0, "dq": 1.5, "dkv": 2.0, "backward": 2.5}


@dataclass(frozen=True)
class Kernel:
    """Calls of one kernel that the compiler cannot see into."""

    name: str  # name of the instruction
    role: str  # a key of _KERNEL_COST, or _EXPERTS
    count: int  # calls per step
    # FLOPs of a call on one device, for causal attention or an even load of experts
    flops: float
    width: int = 0  # size of an attention head
    bytes: int = 0  # memory traffic of a call, for element-wise kernels
    # FLOPs of a call by the program's own cost estimate, which includes spare rows
    counted: float = 0.0


@dataclass(frozen=True)
class Time:
    """The estimated time of a step, in seconds; None if no speed is known (CPU)."""

    sure: str  # how good such estimates were
    step_s: float | None = None  # compute, attention and exposed communication
    # compute and attention only; fused backward matmuls run as fast as single ones
    low_s: float | None = None
    high_s: float | None = None  # compute, attention and all communication
    peak_dtype: str = ""  # dtype whose peak MFU and HFU refer to
    # peak of that dtype on one device; None if none is published
    peak_flops_per_s: float | None = None
    mfu_causal: float | None = None  # MFU with causal attention; None without a peak
    mfu_full: float | None = None  # MFU with full attention
    hfu: float | None = None  # hardware FLOPs utilization; recomputation counts
    tokens_per_s: float | None = None
    tokens_per_s_per_chip: float | None = None
    waterfall: Mapping[str, float] | None = None  # seconds of each part of step_s
    hidden_s: float = 0.0  # asynchronous communication that compute hides
    uncovered_s: float = 0.0  # asynchronous communication that is exposed
    notes: tuple[str, ...] = ()  # parts that the estimate omits, and doubts

    @property
    def band_s(self) -> tuple[float, float] | None:
        """The band to print, in seconds: `low_s` to `high_s` and a margin."""
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s * (1 - WIDENED), self.high_s * (1 + WIDENED)

    def days(self, tokens: float) -> float | None:
        """Computes the days of training on a number of tokens, without pauses."""
        return tokens / self.tokens_per_s / 86400 if self.tokens_per_s else None


def estimate(
    module: hlo.Module,
    collectives: Sequence[Collective],
    kernels: Sequence[Kernel],
    target: Target,
    *,
    tokens: float,
    flops_per_token: Mapping[str, float],
    compute: str = "bfloat16",
    peak: str = "",
    bubble: float = 0.0,
    expert_load: float = 1.0,
) -> Time:
    """Estimates the step time of a scheduled program.

    Synchronous collectives are exposed; asynchronous ones are as far as compute does
    not hide them.

    Args:
      module: the program.
      collectives: its collectives, with links and the time that compute hides
        (`overlap`).
      kernels: its kernels of known cost (`kernels`).
      target: the hardware.
      tokens: tokens per step on all devices together.
      flops_per_token: model FLOPs of a token by convention, "causal" and "full".
      compute: dtype of matmuls.
      peak: dtype whose peak MFU refers to; "" means `compute`.
      bubble: idle share of a pipeline's time. The program's loops contain the idle
        ticks, so this only divides the time into parts.
      expert_load: the load of experts that the program's loops are set to
        (`with_load`).
    """
    rated = target.chip.peak(peak or compute) if target.chip else None
    costs = _costs(module, kernels, target, compute)
    if not costs:
        return Time(f"unknown: no speed is published of {target.text}")
    best = costs[0]
    worst = costs[-1]
    if not best.compute_s:
        return Time("unknown: this compiler reports no cycles")
    kernels_s = sum(best.kernels_s.values())
    compute_s = sum(cost.compute_s for cost in costs) / len(costs)
    synchronous_s = math.fsum(c.step_s for c in collectives if not c.asynchronous)
    asynchronous_s = math.fsum(c.step_s for c in collectives if c.asynchronous)
    hidden_s = math.fsum(c.hidden_s for c in collectives)
    exposed_s = synchronous_s + asynchronous_s - hidden_s
    step_s = compute_s + kernels_s + exposed_s
    executed = hlo_flops(module) + sum(
        kernel.count * (kernel.flops - kernel.counted) for kernel in kernels
    )
    model_flops = {
        kind: flops * tokens / target.num_devices
        for kind, flops in flops_per_token.items()
    }
    recomputed = 0.0
    if executed:
        recomputed = max(0.0, 1 - model_flops["causal"] / (executed * (1 - bubble)))
    sure = target.observed.sure
    if target.num_slices > 1:
        sure += "; nothing was compared between slices"
    parts = _waterfall(
        compute_s, best.kernels_s, bubble=bubble, recomputed_share=recomputed
    )
    return Time(
        sure=sure,
        step_s=step_s,
        low_s=best.compute_s - best.doubtful_s + kernels_s,
        high_s=worst.compute_s + kernels_s + synchronous_s + asynchronous_s,
        peak_dtype=peak or compute,
        peak_flops_per_s=rated,
        mfu_causal=rated and model_flops["causal"] / step_s / rated,
        mfu_full=rated and model_flops["full"] / step_s / rated,
        hfu=rated and executed / step_s / rated,
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_chip=tokens / step_s / target.num_chips,
        waterfall=parts | {"exposed communication": exposed_s},
        hidden_s=hidden_s,
        uncovered_s=asynchronous_s - hidden_s,
        notes=(
            *_notes(module, kernels, collectives, even=rounds(expert_load) == 1),
            *_doubts(best.doubtful_s, step_s),
        ),
    )


def _waterfall(
    compute_s: float,
    kernels_s: Mapping[str, float],
    *,
    bubble: float,
    recomputed_share: float,
) -> dict[str, float]:
    """Splits busy time into its parts.

    Args:
      compute_s: seconds of all instructions but kernels.
      kernels_s: seconds of kernels by part.
      bubble: the share of busy time that a pipeline idles.
      recomputed_share: the share of other busy time that is recomputation.
    """
    work = (1 - bubble) * (1 - recomputed_share)
    busy_s = compute_s + sum(kernels_s.values())
    return {
        "compute": compute_s * work,
        **{name: seconds * work for name, seconds in kernels_s.items()},
        "recompute": busy_s * (1 - bubble) * recomputed_share,
        "bubble": busy_s * bubble,
    }


def _doubts(doubtful_s: float, step_s: float) -> Iterator[str]:
    """Yields a note if doubtful cycles are a large part of a step."""
    if doubtful_s > _DOUBTFUL_SHARE * step_s:
        yield (
            f"{doubtful_s / step_s:.0%} of the step is time that the compiler counts for fused backward matmuls "
            f"above the rate of single ones. This is probably too much, and the low end omits it"
        )


def _notes(
    module: hlo.Module,
    kernels: Sequence[Kernel],
    collectives: Sequence[Collective],
    *,
    even: bool,
) -> Iterator[str]:
    """Yields parts of a program that the estimate misjudges or omits.

    Args:
      module: the program.
      kernels: its kernels of known cost.
      collectives: its collectives.
      even: whether the load of experts is even.
    """
    permutes = [
        collective
        for collective in collectives
        if collective.kind == "collective-permute"
        and collective.in_loop
        and collective.axis != "pipeline"
    ]
    if len(permutes) >= observed.WINDOWED_PERMUTES:
        yield "matmuls are windowed, for which the compiler counts far too many cycles"
    runs = list(module.runs())
    uncertain = {run.loops[-1] for run in runs if not run.certain}
    loops = sorted(uncertain - _even_trips(module).keys())
    if loops:
        yield f"loops of unknown length were counted once: {', '.join(loops)}"
    experts = any(kernel.role == _EXPERTS for kernel in kernels)
    if even and (experts or _even_trips(module)):
        yield EVEN_LOAD
    called = {
        instruction.name
        for run in runs
        for instruction in module.computations[run.computation].values()
        if observed.KERNEL in instruction.text
    }
    unknown = called - {kernel.name for kernel in kernels}
    if unknown:
        yield f"kernels of unknown cost were omitted: {', '.join(sorted(unknown))}"


def unit_lines(module: hlo.Module) -> list[str]:
    """Reports matmuls that run on other units than those of the compute dtype.

    Each line tells the share of such FLOPs, and at which rate they are counted.
    """
    lines = []
    for units in UNITS:
        counted = hlo_flops(module, only=units.in_hlo)
        if counted:
            share = percent_text(counted / hlo_flops(module))
            lines.append(
                f"{share} of the program's FLOPs are in {units.numbers}, {units.counted_at}"
            )
    return lines


# --- attention ------------------------------------------------------------------------

_ALL_KEYS = "all_keys"  # scope of kernels in which each query sees all keys
# scope of kernels that get only one of several blocks of keys as an operand
_BLOCKS = re.compile(r"\bkey_blocks_(\d+)/")


def kernels(module: hlo.Module) -> list[Kernel]:
    """Finds the kernels of known cost that a program calls."""
    return [*attention_kernels(module), *expert_kernels(module)]


def attention_kernels(module: hlo.Module) -> list[Kernel]:
    """Finds the attention kernels that a program calls.

    These are splash and flash attention on TPUs, and cuDNN attention on GPUs.
    """
    kernels = []
    for run in module.runs():
        instructions = module.computations[run.computation]
        for instruction in instructions.values():
            role = _role(instruction)
            if not role:
                continue
            types = [
                part
                for name in instruction.operands
                for part in instructions[name].types
            ]
            arrays = [
                dims for dtype, dims in types if len(dims) >= 3 and dtype[0] in "bf"
            ]
            if len(arrays) < 3:  # another kernel inside attention
                continue
            query, key, value, *_ = arrays
            kernels.append(
                Kernel(
                    name=instruction.name,
                    role=role,
                    count=run.times,
                    flops=_forward_flops(
                        instruction, query=query, key=key, value=value
                    ),
                    width=(query[-1] + value[-1]) // 2,
                )
            )
    costs = dict(_KERNEL_COST)
    if all(kernel.role != "dq" for kernel in kernels):
        costs["dkv"] = _KERNEL_COST["backward"]  # this kernel computes dq as well
    return [
        replace(kernel, flops=kernel.flops * costs[kernel.role]) for kernel in kernels
    ]


def _forward_flops(
    kernel: hlo.Instruction,
    *,
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
) -> float:
    """Counts the FLOPs of causal attention's forward pass on the busiest device.

    With split queries, the last device does the most work: its queries see all keys but
    a triangle.

    Args:
      kernel: an attention kernel.
      query: dims of the queries.
      key: dims of the keys.
      value: dims of the values.
    """
    is_cudnn = observed.CUDNN_ATTENTION in kernel.text
    length_dim = -3 if is_cudnn else -2  # [B, S, H, N], or [B, H, S, N]
    query_length = query[length_dim]
    key_length = key[length_dim]
    blocks = _BLOCKS.search(kernel.op_name)
    if blocks:
        key_length *= int(blocks[1])
    seen = 1 - query_length / key_length / 2
    if _ALL_KEYS in kernel.op_name:
        seen = 1.0
    sizes = query[-1] + value[-1]  # of two matmuls
    return 2 * math.prod(query[:-1]) * sizes * key_length * seen


def _role(instruction: hlo.Instruction) -> str:
    """Finds the role of an attention kernel; "" for other instructions."""
    if observed.CUDNN_ATTENTION in instruction.text:
        target = instruction.value("custom_call_target")
        return "backward" if target.endswith(observed.CUDNN_BACKWARD) else "forward"
    names = f"{instruction.name} {instruction.op_name}"
    if observed.KERNEL not in instruction.text or not observed.ATTENTION.search(names):
        return ""
    for mark, role in observed.BACKWARD_MARKS.items():
        if mark in instruction.name:
            return role
    return "forward"


def forwards_per_backward(kernels: Sequence[Kernel]) -> float:
    """Counts runs of attention's forward kernel per run of the backward kernel.

    It is 2 if attention is recomputed, and 1 for a program without attention.
    """
    counts = {
        role: sum(k.count for k in kernels if k.role == role) for role in _KERNEL_COST
    }
    backward = counts["dkv"] + counts["backward"]
    return counts["forward"] / backward if backward else 1.0


# --- experts --------------------------------------------------------------------------

_EXPERTS = "experts"
EVEN_LOAD = "experts are counted with an even load"  # a note
# Scopes that the op of experts opens around its kernels and loops:
# rows of the arrays relative to the rows that an even load fills,
_SPARE = re.compile(r"\beven_load_rows_x_([\d.]+)/")
# trips of a loop with an even load,
_EVEN = re.compile(r"\beven_load_trips_(\d+)/")
# and the same for loops whose trips `with_load` sets.
_ROUNDS = re.compile(r"\beven_load_trips_([1-9])\b")


def expert_kernels(module: hlo.Module) -> list[Kernel]:
    """Finds the kernels of experts that a program calls, with the work of an even load.

    Grouped matmuls are megablox kernels. The other kernels are element-wise; their
    traffic includes spare rows.
    """
    kernels = []
    for run in module.runs():
        instructions = module.computations[run.computation]
        for instruction in instructions.values():
            if observed.KERNEL not in instruction.text:
                continue
            if not observed.GROUPED.match(instruction.name):
                continue
            kernels.append(_expert_kernel(instructions, instruction, run.times))
    return kernels


def _expert_kernel(
    instructions: Mapping[str, hlo.Instruction], kernel: hlo.Instruction, count: int
) -> Kernel:
    """Counts the work of one kernel of experts.

    A grouped matmul visits a tile of rows once for each group that has rows in it.
    Hardly any group ends where a tile does, so there are up to tiles + E - 1 visits.
    This is the length of the kernel's tables. Spare rows belong to no group.
    """
    types = [part for name in kernel.operands for part in instructions[name].types]
    if "gmm" not in kernel.name:
        traffic = hlo.num_bytes([*types, *kernel.types])
        return Kernel(kernel.name, _EXPERTS, count, flops=0.0, bytes=traffic)
    tables = [dims[0] for dtype, dims in types if dtype == "s32" and len(dims) == 1]
    visits = tables[1]
    stacks = [dims for _, dims in [*types, *kernel.types] if len(dims) == 3]
    E, K, N = stacks[0]
    rows = next(dims[0] for dtype, dims in types if dtype[0] in "bf" and len(dims) == 2)
    tile = rows // (visits - E + 1)
    spare = _SPARE.search(kernel.op_name)
    filled = rows / float(spare[1]) if spare else rows
    visited = (math.ceil(filled / tile) + E - 1) * tile
    return Kernel(
        kernel.name,
        _EXPERTS,
        count,
        flops=2.0 * visited * K * N,
        counted=instruction_flops(instructions, kernel),
    )


def _even_trips(module: hlo.Module) -> dict[str, int]:
    """Reads the trips of loops whose length depends on the load, for an even load."""
    trips = {}
    for instructions in module.computations.values():
        for instruction in instructions.values():
            if instruction.opcode == "while":
                even = _EVEN.search(instruction.op_name)
                if even:
                    trips[instruction.name] = int(even[1])
    return trips


def with_load(module: hlo.Module, load: float) -> hlo.Module:
    """Sets the trips of loops over rounds to those that a load of experts needs.

    Args:
      module: a program.
      load: rows of the busiest pair of devices relative to the mean; see
        `plan.make_plan`.
    """

    def with_trips(instruction: hlo.Instruction) -> hlo.Instruction:
        """Adds the trip count to a loop over rounds."""
        if instruction.opcode != "while":
            return instruction
        even = _ROUNDS.search(instruction.op_name)
        if even is None:
            return instruction
        trips = rounds(load, int(even[1]))
        count = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
        return hlo.Instruction(
            instruction.name, f"{instruction.text}, backend_config={count}"
        )

    computations = {
        name: {
            instruction.name: with_trips(instruction)
            for instruction in instructions.values()
        }
        for name, instructions in module.computations.items()
    }
    return replace(module, computations=computations)


# --- every other instruction ----------------------------------------------------------

_Instructions = Mapping[str, hlo.Instruction]  # of a computation, by name


class _Costs:
    """Seconds of a program's instructions, by compiler cycles or else by a roofline.

    Args:
      module: the program.
      target: the hardware.
      peak: peak FLOP/s of the compute dtype on one device.
      kernels: kernels of known cost.
      reached: the shares of the peak and of memory bandwidth that a GPU reaches.
    """

    def __init__(
        self,
        module: hlo.Module,
        target: Target,
        *,
        peak: float,
        kernels: Sequence[Kernel],
        reached: tuple[float, float],
    ) -> None:
        assert target.chip is not None
        flops_share, bytes_share = reached
        self.module = module
        self.clock_hz = target.chip.clock_hz
        self.flops_per_s = peak * flops_share
        self.bytes_per_s = target.chip.hbm_bytes_per_s * bytes_share
        self.flops_per_s_of = {
            units: (target.chip.peak(units.peak) or peak) * units.reached * flops_share
            for units in UNITS
        }
        # seconds of one call, by kernel
        self.kernels = {k.name: _seconds(target, k, peak) for k in kernels}
        self.kernels_s = self._kernels_s(kernels)
        self.even_trips = _even_trips(module)
        runs = [
            (self._times(run), module.computations[run.computation])
            for run in module.runs()
        ]
        self.compute_s = math.fsum(
            times * self._instruction_s(instructions, instruction)
            for times, instructions in runs
            for instruction in instructions.values()
        )
        self.matmul_flops_per_s = peak * target.observed.matmul
        self.doubtful_s = math.fsum(
            times * self._doubtful_s(instruction)
            for times, instructions in runs
            for instruction in instructions.values()
        )

    def seconds(
        self, computation: _Instructions, instruction: hlo.Instruction
    ) -> float:
        """Times an instruction together with the computations that it calls."""
        if instruction.opcode not in ("while", "conditional", "call"):
            kernel_s = self.kernels.get(instruction.name)
            return kernel_s or self._instruction_s(computation, instruction)
        trips = 1
        if instruction.opcode == "while":
            trips = self.module.trip_count(instruction) or 1
        trips = self.even_trips.get(instruction.name, trips)
        bodies = [
            self.module.computations[name]
            for name in instruction.called("body", "to_apply", *hlo.BRANCHES)
        ]
        return trips * max(
            math.fsum(self.seconds(body, inner) for inner in body.values())
            for body in bodies
        )

    def _kernels_s(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """Sums the seconds per step of attention's kernels, and of experts' if any."""
        experts = [kernel for kernel in kernels if kernel.role == _EXPERTS]
        attention = [kernel for kernel in kernels if kernel.role != _EXPERTS]
        parts = {"attention": attention}
        if experts:
            parts["experts"] = experts
        return {
            part: math.fsum(k.count * self.kernels[k.name] for k in members)
            for part, members in parts.items()
        }

    def _times(self, run: hlo.LoopRun) -> int:
        """Counts the runs of a computation per step with an even load of experts."""
        return run.times * math.prod(self.even_trips.get(loop, 1) for loop in run.loops)

    def _instruction_s(
        self, computation: _Instructions, instruction: hlo.Instruction
    ) -> float:
        """Times an instruction without the computations that it calls, except a fusion.

        The roofline is the longer of its matmuls and its memory traffic.
        """
        if self.clock_hz:
            return instruction.cycles / self.clock_hz
        if instruction.opcode not in traffic.WORKS or instruction.name in self.kernels:
            return 0.0
        fused = ""
        count: Callable[..., float] = partial(
            instruction_flops, computation, instruction
        )
        if instruction.opcode == "fusion":
            fused = instruction.called("calls")[0]
            count = partial(hlo_flops, self.module, fused)
        compute_flops = count()
        matmuls_s = 0.0
        for units, flops_per_s in self.flops_per_s_of.items():
            flops = count(only=units.in_hlo)
            compute_flops -= flops
            matmuls_s += flops / flops_per_s
        matmuls_s += compute_flops / self.flops_per_s
        moved = traffic.instruction_bytes(
            computation, instruction, self.module.computations.get(fused, {})
        )
        return max(matmuls_s, moved / self.bytes_per_s)

    def _doubtful_s(self, instruction: hlo.Instruction) -> float:
        """Times the cycles of a fused backward matmul above those of a single matmul."""
        is_backward = (
            "transpose(" in instruction.op_name
            and "rematted_computation" not in instruction.op_name
        )
        if not self.clock_hz or instruction.opcode != "fusion" or not is_backward:
            return 0.0
        flops = hlo_flops(self.module, instruction.called("calls")[0])
        if not flops:
            return 0.0
        cycles_s = instruction.cycles / self.clock_hz
        return max(0.0, cycles_s - flops / self.matmul_flops_per_s)


def _seconds(target: Target, kernel: Kernel, peak: float) -> float:
    """Times one call of a kernel by its memory traffic, or else by its FLOPs."""
    assert target.chip is not None
    if kernel.bytes:
        return kernel.bytes / target.chip.hbm_bytes_per_s / target.observed.stream
    share = target.observed.attention_share(kernel.width)
    if kernel.role == _EXPERTS:
        share = GROUPED_MATMUL
    return kernel.flops / peak / share


def _costs(
    module: hlo.Module, kernels: Sequence[Kernel], target: Target, compute: str
) -> list[_Costs]:
    """Computes a program's costs at the best and at the worst that a target reaches.

    The list is empty if no speed of the target is published.
    """
    peak = target.matmul_peak(compute)
    if peak is None:
        return []
    return [
        _Costs(module, target, peak=peak, kernels=kernels, reached=reached)
        for reached in target.observed.reached
    ]


def overlap(
    module: hlo.Module,
    collectives: Sequence[Collective],
    kernels: Sequence[Kernel],
    target: Target,
    *,
    compute: str = "bfloat16",
) -> list[Collective]:
    """Adds to each asynchronous collective the time that compute hides (`hidden_s`).

    Compute between a collective's start and its done hides it. A link serves one
    collective at a time, in the order of the schedule. Waiting for a collective is not
    assumed to delay what follows.

    Args:
      module: the program.
      collectives: its collectives, with links.
      kernels: its kernels of known cost.
      target: the hardware.
      compute: dtype of matmuls.
    """
    costs = _costs(module, kernels, target, compute)
    if not costs:
        return [replace(collective, hidden_s=0.0) for collective in collectives]
    hidden_s = [0.0] * len(collectives)
    pending = [
        (i, collective)
        for i, collective in enumerate(collectives)
        if collective.asynchronous
    ]
    pending.sort(key=lambda entry: entry[1].begins)
    for name in dict.fromkeys(collective.computation for _, collective in pending):
        computation = module.computations[name]
        durations = (
            costs[0].seconds(computation, step) for step in computation.values()
        )
        clock = [0.0, *accumulate(durations)]  # [i] = when instruction i starts
        free_at: dict[str, float] = {}  # when each link has served its collectives
        for i, collective in pending:
            if collective.computation != name:
                continue
            link = collective.link.name if collective.link else ""
            starts = max(clock[collective.begins + 1], free_at.get(link, 0.0))
            free_at[link] = starts + collective.wire_s
            late_s = free_at[link] - clock[collective.ends]
            if late_s <= _ROUNDING * collective.wire_s:
                late_s = 0.0
            covered_s = max(0.0, collective.wire_s - late_s)
            hidden_s[i] = collective.count * covered_s
    return [
        replace(collective, hidden_s=seconds)
        for collective, seconds in zip(collectives, hidden_s, strict=True)
    ]
