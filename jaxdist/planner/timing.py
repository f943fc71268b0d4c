"""How long a step takes, read from its compiled program: a band, its parts, and how far
to trust it.

TPU: the compiler's own cycles x loop trips / clock, kernels that it cannot see into by
their FLOPs. GPU: a roofline of every instruction, from datasheet peaks and what single
operations reach of them. Nothing is fitted to published runs; they say how good the
estimate is (`sure`). Not modelled: input, host transfers, stragglers, contention.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from jaxdist.ops.experts.costs import rounds
from jaxdist.parallel.precision import UNITS
from jaxdist.planner import observed
from jaxdist.planner.communication import Collective
from jaxdist.planner.observed import GROUPED_PRODUCT
from jaxdist.planner.targets import Target
from jaxdist.telemetry import hlo
from jaxdist.telemetry.flops import hlo_flops, instruction_flops
from jaxdist.telemetry.units import percent_text

_ROUNDING = 1e-9  # of a sum of seconds: less is no time
WIDENED = 0.05  # the printed band is wider than low to high by this, on both sides


def _seconds(target: Target, kernel: "Kernel", peak: float) -> float:
    """Returns the seconds of one call of a kernel."""
    assert target.chip is not None
    if kernel.bytes:
        return kernel.bytes / target.chip.hbm_bytes_per_s / target.observed.stream
    share = (
        GROUPED_PRODUCT
        if kernel.role == _EXPERTS
        else target.observed.attention_share(kernel.width)
    )
    return kernel.flops / peak / share


_MUCH = 0.05  # of a step, from which on it is said

# FLOPs of a kernel, in forward ones: those are 2 products of S x S x head; dq takes 3,
# dk and dv 4, all three in one kernel 5.
_KERNEL_COST = {"forward": 1.0, "dq": 1.5, "dkv": 2.0, "backward": 2.5}


@dataclass(frozen=True)
class Kernel:
    """Calls of one kernel that the compiler cannot see into."""

    name: str  # of the instruction
    role: str  # of _KERNEL_COST (backward: dq, dk and dv in one), or _EXPERTS
    count: int  # a step
    # of one call on one device; attention's causal, experts' for an even load
    flops: float
    width: int = 0  # of a head of attention
    bytes: int = 0  # that an element-wise one reads and writes
    # FLOPs of one call that the program's own cost estimate says, spare rows' too
    counted: float = 0.0


@dataclass(frozen=True)
class Time:
    """The estimate of a step, in seconds; None where there is nothing to go by
    (CPU).
    """

    sure: str  # how good such estimates were
    step_s: float | None = None  # compute, attention and exposed communication
    # compute, fused backward products as fast as single ones, and attention
    low_s: float | None = None
    high_s: float | None = None  # and all communication in the open
    peak_dtype: str = ""  # whose peak the shares below are of
    # that peak, of one device; None: none is published
    peak_flops_per_s: float | None = None
    mfu_causal: float | None = None  # None too without a peak
    mfu_full: float | None = None
    hfu: float | None = None  # what is computed again counts as work
    tokens_per_s: float | None = None
    tokens_per_s_per_chip: float | None = None
    waterfall: Mapping[str, float] | None = None  # parts of step_s
    hidden_s: float = 0.0  # asynchronous communication that its compute covers
    uncovered_s: float = 0.0  # and that it does not, a part of the exposed
    notes: tuple[str, ...] = ()  # what was left out

    @property
    def band_s(self) -> tuple[float, float] | None:
        """The band to print."""
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s * (1 - WIDENED), self.high_s * (1 + WIDENED)

    def days(self, tokens: float) -> float | None:
        """Returns how long training on so many tokens takes, without pauses."""
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
    """Returns the time of a scheduled program.

    Exposed are synchronous collectives, and of asynchronous ones what compute does not
    cover.

    Args:
      collectives: with links, and what compute hides (`overlap`).
      tokens: of a step, all devices together.
      flops_per_token: model FLOPs by convention, "causal" and "full".
      compute: dtype of matrix products; MFU is a share of its peak, or of that of
        `peak`.
      bubble: idle share of a pipeline's time, which its ticks, loops of the program,
        already contain.
      expert_load: that the program's loops were given (`with_load`).
    """
    rated = target.chip.peak(peak or compute) if target.chip else None
    if not (costs := _costs(module, kernels, target, compute)):
        return Time(f"unknown: no speed is published of {target.text}")
    if not costs[0].compute_s:
        return Time("unknown: this compiler says nothing of its cycles")
    kernels_s = costs[0].kernels_s
    middle = sum(cost.compute_s for cost in costs) / len(costs)
    sync = math.fsum(one.step_s for one in collectives if not one.asynchronous)
    wire = math.fsum(one.step_s for one in collectives if one.asynchronous)
    hidden = math.fsum(one.hidden_s for one in collectives)
    exposed = sync + wire - hidden
    step = middle + sum(kernels_s.values()) + exposed
    executed = hlo_flops(module) + sum(
        kernel.count * (kernel.flops - kernel.counted) for kernel in kernels
    )
    model = {
        kind: flops * tokens / target.num_devices
        for kind, flops in flops_per_token.items()
    }
    again = (
        max(0.0, 1 - model["causal"] / (executed * (1 - bubble))) if executed else 0.0
    )
    between = "; nothing was compared between slices" if target.num_slices > 1 else ""
    return Time(
        sure=target.observed.sure + between,
        step_s=step,
        low_s=costs[0].compute_s - costs[0].doubtful_s + sum(kernels_s.values()),
        high_s=costs[-1].compute_s + sum(kernels_s.values()) + sync + wire,
        peak_dtype=peak or compute,
        peak_flops_per_s=rated,
        mfu_causal=rated and model["causal"] / step / rated,
        mfu_full=rated and model["full"] / step / rated,
        hfu=rated and executed / step / rated,
        tokens_per_s=tokens / step,
        tokens_per_s_per_chip=tokens / step / target.num_chips,
        waterfall=_waterfall(middle, kernels_s, bubble, again)
        | {"exposed communication": exposed},
        hidden_s=hidden,
        uncovered_s=wire - hidden,
        notes=(
            *_notes(module, kernels, collectives, even=rounds(expert_load) == 1),
            *_doubts(costs[0].doubtful_s, step),
        ),
    )


def _waterfall(
    compute: float, kernels_s: Mapping[str, float], bubble: float, again: float
) -> dict[str, float]:
    """Returns the parts of busy time, of which a share is idle and of the rest a share
    done again.
    """
    work = (1 - bubble) * (1 - again)
    busy = compute + sum(kernels_s.values())
    return {
        "compute": compute * work,
        **{name: seconds * work for name, seconds in kernels_s.items()},
        "recompute": busy * (1 - bubble) * again,
        "bubble": busy * bubble,
    }


def _doubts(doubtful_s: float, step_s: float) -> Iterator[str]:
    if doubtful_s > _MUCH * step_s:
        yield (
            f"{doubtful_s / step_s:.0%} of the step is what the compiler counts for fused backward products "
            f"above the rate of single ones: probably too much; the low end leaves it out"
        )


def _notes(
    module: hlo.Module,
    kernels: Sequence[Kernel],
    collectives: Sequence[Collective],
    *,
    even: bool,
) -> Iterator[str]:
    permutes = (o for o in collectives if o.kind == "collective-permute" and o.in_loop)
    if sum(one.axis != "pipeline" for one in permutes) >= observed.WINDOWED_PERMUTES:
        yield "matrix products are windowed, for which the compiler counts far too many cycles"
    runs = list(module.runs())
    if loops := sorted(
        {run.loops[-1] for run in runs if not run.certain} - _even_trips(module).keys()
    ):
        yield f"loops of unknown length were counted once: {', '.join(loops)}"
    experts = any(kernel.role == _EXPERTS for kernel in kernels)
    if even and (experts or _even_trips(module)):
        yield EVEN_LOAD
    called = [
        s
        for run in runs
        for s in module.computations[run.computation].values()
        if observed.KERNEL in s.text
    ]
    if unknown := {step.name for step in called} - {kernel.name for kernel in kernels}:
        yield f"kernels of unknown cost were left out: {', '.join(sorted(unknown))}"


def unit_lines(module: hlo.Module) -> list[str]:
    """Tells how products of other units than the compute dtype's are counted; nothing
    without them.
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

_ALL_KEYS = "all_keys"  # scope of kernels whose queries see all keys of the call
# and of those that have them as several arrays
_BLOCKS = re.compile(r"\bkey_blocks_(\d+)/")


def kernels(module: hlo.Module) -> list[Kernel]:
    """Returns the kernels of known cost that a program calls."""
    return [*attention_kernels(module), *expert_kernels(module)]


def attention_kernels(module: hlo.Module) -> list[Kernel]:
    """Returns the attention kernels that a program calls: splash and flash on TPU,
    cuDNN's on GPU.
    """
    kernels = []
    for run in module.runs():
        steps = module.computations[run.computation]
        for step in steps.values():
            if not (role := _role(step)):
                continue
            types = [part for name in step.operands for part in steps[name].types]
            arrays = [
                dims for dtype, dims in types if len(dims) >= 3 and dtype[0] in "bf"
            ]
            if len(arrays) < 2:  # another kernel inside attention
                continue
            query, key, *_ = arrays
            # [B, S, H, N], others [B, H, S, N]
            length = key[-3] if observed.CUDNN_ATTENTION in step.text else key[-2]
            own = query[-3] if observed.CUDNN_ATTENTION in step.text else query[-2]
            blocks = _BLOCKS.search(step.op_name)
            length *= int(blocks[1]) if blocks else 1
            # Of a part of the queries the last device's see the most: all keys but a
            # triangle.
            seen = 1.0 if _ALL_KEYS in step.op_name else 1 - own / length / 2
            forward = 2 * 2 * math.prod(query) * length * seen  # two products
            kernels.append(Kernel(step.name, role, run.times, forward, query[-1]))
    split = any(kernel.role == "dq" for kernel in kernels)
    costs = _KERNEL_COST if split else _KERNEL_COST | {"dkv": _KERNEL_COST["backward"]}
    return [
        replace(kernel, flops=kernel.flops * costs[kernel.role]) for kernel in kernels
    ]


def _role(step: hlo.Instruction) -> str:
    """Returns what an attention kernel does, "" for other instructions."""
    if observed.CUDNN_ATTENTION in step.text:
        target = step.value("custom_call_target")
        return "backward" if target.endswith(observed.CUDNN_BACKWARD) else "forward"
    where = f"{step.name} {step.op_name}"
    if observed.KERNEL not in step.text or not observed.ATTENTION.search(where):
        return ""
    marks = observed.BACKWARD_MARKS.items()
    return next((role for mark, role in marks if mark in step.name), "forward")


def forwards_per_backward(kernels: Sequence[Kernel]) -> float:
    """Returns how often attention's forward kernel runs for each backward; 1 without
    attention.
    """
    counts = {
        role: sum(k.count for k in kernels if k.role == role) for role in _KERNEL_COST
    }
    backward = counts["dkv"] + counts["backward"]
    return counts["forward"] / backward if backward else 1.0


# --- experts --------------------------------------------------------------------------

_EXPERTS = "experts"
EVEN_LOAD = "experts are counted with an even load"  # a note
# Scopes that the experts' op opens around kernels and loops.
# rows of the arrays, relative to those filled
_SPARE = re.compile(r"\beven_load_rows_x_([\d.]+)/")
_EVEN = re.compile(r"\beven_load_trips_(\d+)/")
# and of those that an even load leaves after so many rounds
_ROUNDS = re.compile(r"\beven_load_trips_([1-9])\b")


def expert_kernels(module: hlo.Module) -> list[Kernel]:
    """Returns the kernels of experts that a program calls, with the work of an even
    load.

    Products are megablox's; what else there is reads and writes its arrays, spare rows
    too. A row tile is visited once for each group that has rows in it: that is up to
    tiles + E - 1 times in all, the length of the kernel's tables, as hardly any group
    ends where a tile does. Spare rows are in none.
    """
    found = []
    for run in module.runs():
        steps = module.computations[run.computation]
        for step in steps.values():
            if observed.KERNEL not in step.text:
                continue
            if not observed.GROUPED.match(step.name):
                continue
            types = [part for name in step.operands for part in steps[name].types]
            if "gmm" not in step.name:
                traffic = hlo.num_bytes([*types, *step.types])
                found.append(Kernel(step.name, _EXPERTS, run.times, 0.0, bytes=traffic))
                continue
            _, visits, *_ = [
                dims[0] for dtype, dims in types if dtype == "s32" and len(dims) == 1
            ]
            (E, K, N), *_ = [
                dims for _, dims in [*types, *step.types] if len(dims) == 3
            ]
            rows = next(
                dims[0] for dtype, dims in types if dtype[0] in "bf" and len(dims) == 2
            )
            tile = rows // (visits - E + 1)
            spare = _SPARE.search(step.op_name)
            filled = rows / float(spare[1]) if spare else rows
            visited = (math.ceil(filled / tile) + E - 1) * tile
            flops = 2.0 * visited * K * N
            counted = instruction_flops(steps, step)
            found.append(Kernel(step.name, _EXPERTS, run.times, flops, counted=counted))
    return found


def _even_trips(module: hlo.Module) -> dict[str, int]:
    """Returns how often loops go round whose length depends on the load of experts, if
    that is even.
    """
    loops = (
        s
        for steps in module.computations.values()
        for s in steps.values()
        if s.opcode == "while"
    )
    marked = ((loop.name, _EVEN.search(loop.op_name)) for loop in loops)
    return {name: int(mark[1]) for name, mark in marked if mark}


def with_load(module: hlo.Module, load: float) -> hlo.Module:
    """Returns a program whose loops of rounds go round as often as a load of experts
    needs.
    """

    def with_trips(step: hlo.Instruction) -> hlo.Instruction:
        even = _ROUNDS.search(step.op_name) if step.opcode == "while" else None
        if even is None:
            return step
        trips = rounds(load, int(even[1]))
        count = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
        return hlo.Instruction(step.name, f"{step.text}, backend_config={count}")

    computations = {
        name: {step.name: with_trips(step) for step in steps.values()}
        for name, steps in module.computations.items()
    }
    return replace(module, computations=computations)


# --- every other instruction ----------------------------------------------------------

_SLICES = ("dynamic-slice", "slice", "gather", "dynamic-update-slice")
_WORKS = (
    "fusion",
    "dot",
    "convolution",
    "custom-call",
    "copy",
    "transpose",
    "reduce",
    "sort",
    "scatter",
    "gather",
    "concatenate",
    "dynamic-slice",
    "dynamic-update-slice",
    "convert",
    "broadcast",
    "select",
    "add",
)


class _Costs:
    """Seconds of a program's instructions: the compiler's cycles, or a roofline where
    it gives none.
    """

    def __init__(
        self,
        module: hlo.Module,
        target: Target,
        peak: float,
        kernels,
        reached: tuple[float, float],
    ) -> None:
        assert target.chip is not None
        self.module = module
        self.clock_hz = target.chip.clock_hz
        self.flops_per_s = peak * reached[0]
        self.bytes_per_s = target.chip.hbm_bytes_per_s * reached[1]
        self.flops_per_s_of = {
            units: (target.chip.peak(units.peak) or peak) * units.reached * reached[0]
            for units in UNITS
        }
        self.kernels = {k.name: _seconds(target, k, peak) for k in kernels}
        parts = {
            k.name: "experts" if k.role == _EXPERTS else "attention" for k in kernels
        }
        self.kernels_s = {
            part: math.fsum(
                k.count * self.kernels[k.name] for k in kernels if parts[k.name] == part
            )
            for part in ("attention", *({"experts"} & set(parts.values())))
        }
        self.even_trips = _even_trips(module)
        runs = [
            (self._times(run), module.computations[run.computation])
            for run in module.runs()
        ]
        self.compute_s = math.fsum(
            n * self._own(steps, s) for n, steps in runs for s in steps.values()
        )
        self.product_flops_per_s = peak * target.observed.product
        self.doubtful_s = math.fsum(
            n * self._doubtful(s) for n, steps in runs for s in steps.values()
        )

    def seconds(
        self, inside: Mapping[str, hlo.Instruction], step: hlo.Instruction
    ) -> float:
        """Returns the seconds of an instruction with all it runs."""
        if step.opcode not in ("while", "conditional", "call"):
            return self.kernels.get(step.name) or self._own(inside, step)
        trips = (self.module.trip_count(step) or 1) if step.opcode == "while" else 1
        trips = self.even_trips.get(step.name, trips)
        bodies = [
            self.module.computations[n]
            for n in step.called("body", "to_apply", *hlo.BRANCHES)
        ]
        return trips * max(
            math.fsum(self.seconds(steps, s) for s in steps.values())
            for steps in bodies
        )

    def _times(self, run: hlo.LoopRun) -> int:
        """Returns how often a computation runs with an even load of experts."""
        return run.times * math.prod(self.even_trips.get(loop, 1) for loop in run.loops)

    def _own(
        self, inside: Mapping[str, hlo.Instruction], step: hlo.Instruction
    ) -> float:
        if self.clock_hz:
            return step.cycles / self.clock_hz
        if step.opcode not in _WORKS or step.name in self.kernels:
            return 0.0
        fused = step.called("calls")[0] if step.opcode == "fusion" else ""
        count = (
            partial(hlo_flops, self.module, fused)
            if fused
            else partial(instruction_flops, inside, step)
        )
        rest = count()
        products_s = 0.0
        for units, flops_per_s in self.flops_per_s_of.items():
            flops = count(only=units.in_hlo)
            rest -= flops
            products_s += flops / flops_per_s
        products_s += rest / self.flops_per_s
        traffic = self._traffic(inside, step, self.module.computations.get(fused, {}))
        return max(products_s, traffic / self.bytes_per_s)

    def _doubtful(self, step: hlo.Instruction) -> float:
        """Returns by how much a fused backward product's cycles are above what single
        products reach.
        """
        backward = (
            "transpose(" in step.op_name and "rematted_computation" not in step.op_name
        )
        if not self.clock_hz or step.opcode != "fusion" or not backward:
            return 0.0
        flops = hlo_flops(self.module, step.called("calls")[0])
        return (
            max(0.0, step.cycles / self.clock_hz - flops / self.product_flops_per_s)
            if flops
            else 0.0
        )

    def _traffic(
        self, inside, step: hlo.Instruction, fused: Mapping[str, hlo.Instruction]
    ) -> int:
        """Returns the bytes that an instruction reads and writes; of stacked arrays
        only their slice.
        """
        reads = [hlo.num_bytes(inside[name].types) for name in step.operands]
        writes = hlo.num_bytes(step.types)
        for inner in fused.values():
            uses = (
                list(hlo.uses(fused, inner.name)) if inner.opcode == "parameter" else []
            )
            if uses and all(
                use.opcode in _SLICES and use.operands[0] == name for name, use in uses
            ):
                kept = [use for _, use in uses if use.opcode != "dynamic-update-slice"]
                reads[inner.parameter_number] = sum(
                    hlo.num_bytes(use.types) for use in kept
                )
            elif inner.opcode == "dynamic-update-slice":  # written in place
                writes -= hlo.num_bytes(inner.types) - hlo.num_bytes(
                    fused[inner.operands[1]].types
                )
        return max(writes, 0) + sum(reads)


def _costs(
    module: hlo.Module, kernels: Sequence[Kernel], target: Target, compute: str
) -> list[_Costs]:
    """Returns a program's costs, at the best and at the worst that a target reaches; []
    without a speed.
    """
    if (peak := target.products_peak(compute)) is None:
        return []
    return [
        _Costs(module, target, peak, kernels, reached)
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
    """Returns the collectives with the seconds of a step that compute between start and
    done hides.

    One at a time on a link, in the order of the schedule; waiting delays nothing after
    it.

    Args:
      collectives: with links.
      compute: dtype of matrix products.
    """
    hidden = [0.0] * len(collectives)
    costs = _costs(module, kernels, target, compute)
    pending = [
        (i, one) for i, one in enumerate(collectives) if one.asynchronous and costs
    ]
    pending.sort(key=lambda entry: entry[1].begins)
    for name in dict.fromkeys(one.computation for _, one in pending):
        inside = module.computations[name]
        clock = [
            0.0,
            *accumulate(costs[0].seconds(inside, step) for step in inside.values()),
        ]
        free: dict[str, float] = {}
        for i, one in (entry for entry in pending if entry[1].computation == name):
            link = one.link.name if one.link else ""
            free[link] = max(clock[one.begins + 1], free.get(link, 0.0)) + one.wire_s
            late = free[link] - clock[one.ends]
            hidden[i] = one.count * max(
                0.0, one.wire_s - (late if late > _ROUNDING * one.wire_s else 0.0)
            )
    return [
        replace(one, hidden_s=seconds)
        for one, seconds in zip(collectives, hidden, strict=True)
    ]
