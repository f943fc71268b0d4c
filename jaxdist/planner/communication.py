"""The collectives of a compiled step: data, mesh axis, link, and overlap.

They are read from the scheduled HLO text, which has six forms of a collective. It may
be plain, a start and a done, a TPU fusion that several compute fusions of one channel
continue, a chain of permutes, a call on the SparseCore, or, between slices, host
transfers in the program of one slice. Each form becomes one `Collective`.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np

from jaxdist.hardware.chips import NETWORKS, Chip
from jaxdist.ops.experts.exchange import FROM_EXPERTS, TO_EXPERTS
from jaxdist.parallel.axes import BATCH_AXES, CHATTY_AXES, CROSSING_AXES, SEQUENCE_AXES
from jaxdist.parallel.context import MOVED
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner.formulas import KINDS, wire_bytes
from jaxdist.planner.observed import (
    BETWEEN_SLICES,
    EMPTY_START,
    REDUCE_SCATTER,
    REMATERIALISED,
    RENDEZVOUS,
    TABLE,
)
from jaxdist.planner.targets import Link, Target
from jaxdist.telemetry import hlo
from jaxdist.telemetry.units import percent_text, time_text

_OPCODE = re.compile(
    rf"\s({'|'.join(KINDS)}|ragged-all-to-all|collective-broadcast)(-start)?\("
)
_TOKENS = {*BATCH_AXES, *SEQUENCE_AXES}
_EXCHANGED = re.compile("|".join((TO_EXPERTS, FROM_EXPERTS, *MOVED)))
_SLOW = {"DCN", "PCIe", "network", *(network.name for network in NETWORKS.values())}


@dataclass(frozen=True)
class Collective:
    """A collective of a program; bytes are of one execution on one device."""

    kind: str  # one of KINDS
    axis: str  # the mesh axes that it spans, as "data+fsdp" or "part of fsdp"
    group_size: int
    dtype: str
    bytes: int  # payload: an all-gather's result, the operands of other kinds
    count: int  # executions in a step, including those in loops
    asynchronous: bool
    in_loop: bool
    # its data: "gather of blocks/mlp/up", "gradient of blocks/mlp/up", "rows to
    # experts", "activations"
    what: str
    # its place in Python: "FeedForward.__call__ (transformer.py:189)"
    module: str
    # forward, recomputation, backward or update; "?" if the compiler keeps no source
    phase: str
    name: str  # name of the instruction
    computation: str  # computation that schedules it from `begins` to `ends`
    begins: int
    ends: int
    link: Link | None = None  # None without a target, or with one device
    hidden_by: str = ""  # the longest instructions between its start and its done
    # the part of `step_s` that compute between start and done covers (`timing.overlap`)
    hidden_s: float = 0.0

    @property
    def gathers_weights(self) -> bool:
        """True if it gathers weights."""
        return self.what.startswith("gather of ") and "batch/" not in self.what

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends per execution by the bandwidth-optimal algorithm."""
        return wire_bytes(self.kind, self.bytes, self.group_size)

    @property
    def wire_s(self) -> float:
        """Seconds of one execution on otherwise idle links; 0 without a link."""
        return self.link.seconds(self.kind, self.wire_bytes) if self.link else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of all executions in a step, if compute hides none of them."""
        return self.count * self.wire_s

    @property
    def exposed_s(self) -> float:
        """Seconds per step that compute does not hide."""
        return self.step_s - self.hidden_s


def collectives(
    module: hlo.Module,
    shape: MeshShape,
    target: Target | None = None,
    mesh_ids: Sequence[int] | None = None,
) -> list[Collective]:
    """Lists the collectives of a compiled step in the order of its schedule.

    Args:
      module: the program.
      shape: the mesh.
      target: the hardware, which gives links and times; None for neither.
      mesh_ids: ids of the mesh's devices in order (`Compiled.mesh_ids`).
    """
    reader = _Reader(module, shape, target, mesh_ids or range(shape.num_devices))
    spanning = [
        collective
        for run in module.runs()
        for collective in reader.read(run)
        if collective.group_size > 1
    ]
    return [_with_weights(collective, spanning) for collective in spanning]


def summed(
    collectives: Sequence[Collective], moves: Sequence[str]
) -> list[dict[str, Any]]:
    """Sums bytes and seconds of a step's collectives by kind, axis and data, as JSON.

    Args:
      collectives: the collectives.
      moves: scopes of the ops to sum over.
    """
    names = {scope.replace("_", " ") for scope in moves}
    groups: defaultdict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for collective in collectives:
        if collective.what in names:
            key = collective.kind, collective.axis, collective.what
            groups[key].append(collective)
    return [
        {
            "kind": kind,
            "axis": axis,
            "what": what,
            "bytes": sum(c.count * c.bytes for c in group),
            "wire_bytes": math.fsum(c.count * c.wire_bytes for c in group),
            "seconds": math.fsum(c.step_s for c in group) or None,
        }
        for (kind, axis, what), group in groups.items()
    ]


_Types = Sequence[tuple[str, tuple[int, ...]]]  # (dtype, dims) of each array


@dataclass
class _Span:
    """A collective of a schedule while the schedule is read."""

    begins: int  # position of the first instruction in the schedule
    ends: int  # position of the last instruction
    outer: hlo.Instruction  # the instruction in the schedule
    inner: hlo.Instruction  # the collective, which `outer` is or contains
    inner_computation: str  # the computation of `inner`

    def extend(self, position: int, instruction: hlo.Instruction) -> None:
        """Adds an update or the done.

        If an update brings the operands, nothing can move before it.
        """
        self.ends = position
        _, *operands = instruction.operands or [""]
        if operands and not self.outer.operands:
            names = ", ".join(f"%{name}" for name in operands)
            start = EMPTY_START.replace("()", f"({names})")
            text = self.outer.text.replace(EMPTY_START, start, 1)
            self.begins = position
            self.outer = hlo.Instruction(self.outer.name, text)


class _Reader:
    """A reader of the collectives of a module.

    Args:
      module: the program.
      shape: the mesh.
      target: the hardware; None for collectives without links.
      mesh_ids: ids of the mesh's devices in order.
    """

    def __init__(
        self,
        module: hlo.Module,
        shape: MeshShape,
        target: Target | None,
        mesh_ids: Sequence[int],
    ) -> None:
        self.module = module
        self.shape = shape
        self.target = target
        self.mesh_ids = mesh_ids
        # the collectives in each computation
        self.inside = {
            name: [
                instruction
                for instruction in instructions.values()
                if _kind(instruction)
            ]
            for name, instructions in module.computations.items()
        }
        sizes = np.array(tuple(shape.sizes.values()))
        sizes_in_slice = (sizes // tuple(shape.dcn.values()))[:, None]
        # [axes, positions in the mesh]
        self.coordinates = np.indices(tuple(sizes)).reshape(len(sizes), -1)
        first_slice = ~(self.coordinates // sizes_in_slice).any(axis=0)
        between_slices = any(
            BETWEEN_SLICES.search(instruction.text)
            for instructions in self.inside.values()
            for instruction in instructions
        )
        # Positions of the program's devices in the mesh. A program with transfers
        # between slices is that of one slice.
        self.places = np.flatnonzero(first_slice | (not between_slices))
        # positions of devices with the same place in each slice
        self.peers = np.flatnonzero(~(self.coordinates % sizes_in_slice).any(axis=0))

    def read(self, run: hlo.LoopRun) -> Iterator[Collective]:
        """Yields the collectives of a computation in the order of its schedule."""
        schedule = self.module.computations[run.computation]
        spans: dict[object, _Span] = {}
        # by name of an instruction: the key of the span that it belongs to
        keys: dict[str, object] = {}
        for position, instruction in enumerate(schedule.values()):
            if instruction.opcode == "recv":
                rendezvous = RENDEZVOUS.search(instruction.text)
                if rendezvous:
                    keys[instruction.name] = rendezvous[1]
            if instruction.opcode.endswith(("-update", "-done")):
                key = keys.get(next(iter(instruction.operands), ""))
                if key in spans:  # otherwise it ends a callback to the host
                    keys[instruction.name] = key
                    spans[key].extend(position, instruction)
                continue
            for inner, computation in self._collectives_of(
                instruction, run.computation
            ):
                key = _key(instruction, inner)
                keys[instruction.name] = key
                if key not in spans:
                    spans[key] = _Span(
                        position, position, instruction, inner, computation
                    )
                spans[key].ends = position
        for span in spans.values():
            yield self._collective(run, span)

    def _collectives_of(
        self, instruction: hlo.Instruction, computation: str
    ) -> list[tuple[hlo.Instruction, str]]:
        """Lists the collectives that an instruction is or contains.

        Each comes with the name of its computation.
        """
        if _kind(instruction):
            return [(instruction, computation)]
        # Loops and branches are read as runs of their own.
        if instruction.opcode not in ("fusion", "call-start", "async-start"):
            return []
        called = instruction.called("calls", "to_apply", "called_computations")
        return [(inner, name) for name in called for inner in self.inside.get(name, ())]

    def _collective(self, run: hlo.LoopRun, span: _Span) -> Collective:
        """Describes the collective of a span."""
        outer = span.outer
        inner = span.inner
        operands = inner.operands
        if inner.opcode == "send":
            operands = operands[:1]
        computation = self.module.computations[span.inner_computation]
        types = [part for name in operands for part in computation[name].types]
        group = self.places[list(inner.group)] if inner.group else self.places
        if BETWEEN_SLICES.search(inner.text):
            group = self.peers
        kind = _kind(inner)
        axis = self._axis(group, inner)
        payload = hlo.num_bytes(types)
        if kind == "all-gather":
            payload *= len(group)
        if _keeps_shard(outer):
            kind = "reduce-scatter"
        source = self._source(run, outer, inner)
        schedule = self.module.computations[run.computation].values()
        between = islice(schedule, span.begins + 1, span.ends)
        longest = sorted(between, key=lambda instruction: -instruction.cycles)[:2]
        link = None
        if self.target:
            link = self.target.group_link([self.mesh_ids[place] for place in group])
        return Collective(
            kind=kind,
            axis=axis,
            group_size=len(group),
            dtype=max(types, key=lambda part: math.prod(part[1]))[0],
            bytes=payload,
            count=run.times,
            asynchronous=span.ends > span.begins,
            in_loop=bool(run.loops),
            what=self._what(kind, axis, run, outer, types, source),
            module=_python(self.module.stack(source)),
            phase=_phase(source.op_name),
            name=outer.name,
            computation=run.computation,
            begins=span.begins,
            ends=span.ends,
            link=link,
            hidden_by=", ".join(
                _described(instruction) for instruction in longest if instruction.cycles
            ),
        )

    def _source(
        self, run: hlo.LoopRun, outer: hlo.Instruction, inner: hlo.Instruction
    ) -> hlo.Instruction:
        """Finds an instruction with the source of a collective: it, or an operand."""
        if inner.op_name and not outer.op_name:
            return inner
        schedule = self.module.computations[run.computation]
        instruction = outer
        for _ in range(8):
            operand = schedule.get(next(iter(instruction.operands), ""))
            if instruction.op_name or operand is None:
                break
            instruction = operand
        return instruction

    def _axis(self, group: np.ndarray, instruction: hlo.Instruction) -> str:
        """Finds the mesh axes along which a group's members differ."""
        rows = zip(self.shape.sizes, self.coordinates[:, group], strict=True)
        axes = [axis for axis, row in rows if len(set(row)) > 1]
        sizes = self.shape.sizes
        if BETWEEN_SLICES.search(instruction.text):
            sizes = self.shape.dcn
        is_whole = math.prod(sizes[axis] for axis in axes) == len(group)
        if is_whole or _kind(instruction) == "collective-permute":
            return "+".join(axes)
        return "part of " + "+".join(axes)

    def _what(
        self,
        kind: str,
        axis: str,
        run: hlo.LoopRun,
        instruction: hlo.Instruction,
        types: _Types,
        source: hlo.Instruction,
    ) -> str:
        """Names the data of a collective; see `Collective.what`.

        Args:
          kind: its kind.
          axis: the mesh axes that it spans.
          run: the computation that schedules it.
          instruction: the instruction in the schedule.
          types: the types of its operands.
          source: the instruction that has its source.
        """
        exchange = _EXCHANGED.search(source.op_name)
        if exchange:
            return exchange[0].replace("_", " ")
        origins = (
            self.module.origin(run.computation, operand)
            for operand in instruction.operands
        )
        parameters = {_parameter(origin.op_name) for origin in origins if origin}
        if kind not in ("reduce-scatter", "all-to-all") and parameters:
            return f"gather of {', '.join(sorted(parameters))}"
        if hlo.num_bytes(types) <= 4096:
            return "scalars"
        dtype = types[0][0]
        if dtype == "u8":  # codes of 8-bit floats
            return "gather of weights"
        if dtype[0] in "su":
            return "tokens"
        # A sum over parts of the batch, at once or by permutes, is of gradients.
        is_sum = kind in ("reduce-scatter", "all-reduce", "collective-permute")
        if is_sum and {*axis.split("+")} <= _TOKENS:
            return "gradient"
        return "activations"


# --- warnings -------------------------------------------------------------------------

# bytes below which a collective costs only its latency, which no setting changes
_LARGE = 2**20


def warnings(
    collectives: Sequence[Collective],
    *,
    compute: str,
    forwards_per_backward: float = 1.0,
    log: str = "",
    chip: Chip | None = None,
    step_s: float | None = None,
) -> list[str]:
    """Lists what slows a step down: a sentence each, with its source and its fix.

    Args:
      collectives: the step's collectives, with the time that compute hides
        (`timing.overlap`).
      compute: dtype of matmuls.
      forwards_per_backward: runs of attention's forward kernel per backward kernel
        (`timing.forwards_per_backward`).
      log: the compiler's output.
      chip: the target's chip.
      step_s: the step time.
    """
    large = [collective for collective in collectives if collective.bytes >= _LARGE]
    lines = [*_exposed(large, chip, step_s), *_slow_links(large)]
    gathers = [collective for collective in large if collective.gathers_weights]
    wide = [gather for gather in gathers if gather.dtype == "f32"]
    if wide:
        fix = f"they are used in {compute}: cast them before, as jaxdist.ops.matmul.project does"
        if compute == "float32":
            fix = "precision.compute=bfloat16 halves the bytes"
        lines.append(f"weights are gathered in float32 ({_sources(wide)}); {fix}")
    reduced = [gather for gather in gathers if gather.kind == "all-reduce"]
    if reduced:
        lines.append(
            f"weights are gathered by all-reduce, twice an all-gather's bytes ({_sources(reduced)}); the "
            f"compiler does so if an axis is not a ring: choose a slice with wrapped links"
        )
    copies = Counter(match[1] or "?" for match in REMATERIALISED.finditer(log))
    for name, count in copies.items():
        lines.append(
            f"the partitioner copies an array whole to change its sharding, {count} x at {name} "
            f"(involuntary full rematerialization); name its dims with sharding.shard, as its neighbours are"
        )
    if forwards_per_backward > 1:
        lines.append(
            f"attention's forward kernel runs {forwards_per_backward:.3g} times per layer; remat.policy="
            f"dots, or save: with attention_residuals, keeps what its backward reads"
        )
    return lines


# share of the step below which exposed time gets no line
_LEAST_EXPOSED = 0.005


def _exposed(
    collectives: Sequence[Collective], chip: Chip | None, step_s: float | None
) -> Iterator[str]:
    """Yields a line for each group of collectives whose time is exposed."""
    groups: defaultdict[tuple[str, str, str, bool], list[Collective]] = defaultdict(
        list
    )
    for collective in collectives:
        if collective.link is None or collective.link.name != "memory":
            data = collective.what.split()[0]
            key = collective.kind, collective.axis, data, collective.asynchronous
            groups[key].append(collective)
    for group in groups.values():
        seconds = sum(collective.exposed_s for collective in group)
        is_long = step_s is not None and seconds > _LEAST_EXPOSED * step_s
        stops = any(collective.in_loop for collective in group)
        if is_long or (stops and not group[0].asynchronous):
            yield _exposed_line(group, chip, step_s)


def _exposed_line(
    group: Sequence[Collective], chip: Chip | None, step_s: float | None
) -> str:
    """Formats the exposed time of alike collectives, its reason and its fixes."""
    first = group[0]
    seconds = sum(collective.exposed_s for collective in group)
    exposed = ""
    if seconds:
        exposed = f"{time_text(seconds)} a step"
        if step_s:
            exposed += f" ({percent_text(seconds / step_s)})"
    count = sum(collective.count for collective in group)
    subject = f"{count} {first.kind}"
    if count > 1:
        subject += "s"
    subject += f" over {first.axis}"
    if any(collective.in_loop for collective in group):
        subject += " in a loop"
    if first.asynchronous:
        total = time_text(sum(collective.step_s for collective in group))
        verb = "overlap" if count > 1 else "overlaps"
        state = f"{verb} with compute that is too short: {exposed} of {total} exposed"
    else:
        verb = "are" if count > 1 else "is"
        state = f"{verb} synchronous, so nothing overlaps"
        if exposed:
            state += f": {exposed}"
    parts = [f"{subject} {state} ({_sources(group)})"]
    reason = _reason(group, chip)
    if reason:
        parts.append(reason)
    parts.append(", ".join(_fixes(group, chip)))
    return "; ".join(parts)


def _reason(group: Sequence[Collective], chip: Chip | None) -> str:
    """Explains why a TPU's compiler exposes such collectives; "" if unknown."""
    if chip is None or not chip.torus_dims:
        return ""
    first = group[0]
    sums_gradients = first.kind == "all-reduce" and first.what.startswith("gradient")
    reasons = []
    if sums_gradients and "fsdp" in first.axis.split("+"):
        reasons.append(
            "libtpu sums whole gradients here, twice a reduce-scatter's bytes"
        )
    if not first.asynchronous:
        if chip.sparse_core_collectives:
            reasons.append("the SparseCore did not take them")
        else:
            moved = TABLE[chip.family].overlapping
            reasons.append(f"on a {chip.name}, {moved} overlap with compute")
    return ", and ".join(reasons)


def _fixes(group: Sequence[Collective], chip: Chip | None) -> Iterator[str]:
    """Yields changes of the config that shorten such collectives."""
    first = group[0]
    data = first.what.split()[0]
    axis = first.axis.removeprefix("part of ")
    is_tpu = chip is not None and chip.torus_dims
    if data == "gradient" and first.dtype == "f32" and is_tpu:
        yield "precision.reduce=bfloat16 halves their bytes"
    if data == "gather":
        yield "more tokens per device or a smaller mesh.fsdp makes them a smaller part"
    elif data == "gradient":
        yield "more tokens per device or fewer batch.accumulation makes them a smaller part"
    else:
        yield f"a smaller mesh.{axis.split('+')[-1]} sends less"
    if (data, axis) == ("activations", "tensor"):
        yield "mesh.sequence_parallel=true splits the work around them"


def _slow_links(collectives: Sequence[Collective]) -> Iterator[str]:
    """Yields a line for each axis that communicates in every layer over slow links."""
    groups: defaultdict[tuple[str, str], list[Collective]] = defaultdict(list)
    for collective in collectives:
        if (
            collective.link is not None
            and collective.link.name in _SLOW
            and set(collective.axis.split("+")) & set(CHATTY_AXES)
        ):
            groups[collective.axis, collective.link.name].append(collective)
    *others, last = CROSSING_AXES
    for (axis, link), group in groups.items():
        seconds = time_text(sum(collective.step_s for collective in group))
        yield (
            f"mesh axis {axis} communicates in every layer, over {link}: {seconds} a step ({_sources(group)}); keep "
            f"it within fast links, and let mesh.{', '.join(others)} or {last} cross the slow ones"
        )


def _sources(group: Sequence[Collective]) -> str:
    """Lists data and modules of at most three collectives, the most expensive first."""
    ordered = sorted(group, key=lambda c: -c.count * c.wire_bytes)
    names: dict[str, None] = {}
    for collective in ordered:
        name = collective.what
        if collective.module:
            name += f" in {collective.module}"
        names[name] = None
    text = ", ".join(list(names)[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


# --- forms of HLO ---------------------------------------------------------------------

_KIND_OF = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


def _kind(instruction: hlo.Instruction) -> str:
    """Finds the kind (of KINDS) of a collective; "" for other instructions."""
    match = _OPCODE.search(instruction.text)
    if match:
        return _KIND_OF.get(match[1], match[1])
    match = BETWEEN_SLICES.search(instruction.text)
    if match and instruction.opcode == "send":
        name = match[1].lower().replace("_", "-")
        return name if name in KINDS else "collective-permute"
    return ""


def _key(instruction: hlo.Instruction, collective: hlo.Instruction) -> object:
    """Makes a key that all instructions of one asynchronous collective share.

    Fusions of one collective repeat its channel. Plain collectives may share theirs
    with others, so their key is the name.
    """
    rendezvous = RENDEZVOUS.search(instruction.text)
    if rendezvous:
        return rendezvous[1]
    if instruction.opcode == "fusion" and not _keeps_shard(instruction):
        return _kind(collective), collective.value("channel_id")
    return instruction.name


def _keeps_shard(fusion: hlo.Instruction) -> bool:
    """Checks whether a fusion is a reduce-scatter in the form of TPUs.

    Such a fusion sums over devices and keeps its own shard.
    """
    return bool(REDUCE_SCATTER.search(fusion.text))


# --- names for people -----------------------------------------------------------------


def _parameter(op_name: str) -> str:
    """Formats state.trainable['blocks']['mlp']['up'] as "blocks/mlp/up"."""
    parts = re.findall(r"\[\\?'?([^\]\\']*)", op_name)
    root = op_name.split("[")[0].removeprefix("state.")
    return "/".join(parts if root == "trainable" else [root, *parts])


def _with_weights(
    gradient: Collective, collectives: Sequence[Collective]
) -> Collective:
    """Names the weights of a gradient's collective.

    These are the weights of its size that the same line of Python gathers.
    """
    if gradient.what != "gradient":
        return gradient
    gathers = [
        g for g in collectives if g.module == gradient.module and g.gathers_weights
    ]
    sizes = {
        g.what.removeprefix("gather of "): g.bytes / _itemsize(g.dtype) for g in gathers
    }
    counts = Counter(sizes.values())
    names = list[str]()
    for name, size in sizes.items():
        ratio = gradient.bytes / _itemsize(gradient.dtype) / size
        # Some gradients are padded; some are sent together.
        if 1 <= round(ratio) <= counts[size] and abs(ratio / round(ratio) - 1) < 0.2:
            names.append(name)
    if not names:
        return gradient
    return replace(gradient, what=f"gradient of {' or '.join(names)}")


def _itemsize(dtype: str) -> float:
    """Computes the bytes of an element, which is a fraction for 4-bit dtypes."""
    return hlo.num_bytes([(dtype, (8,))]) / 8


def _python(frames: Sequence[hlo.Frame]) -> str:
    """Formats the innermost method of a model on a stack, and its innermost line.

    Without a model on the stack (in a loop or a pipeline), it is the innermost method,
    or else the innermost function.
    """
    methods = [f for f in frames if "." in f.function and "<locals>" not in f.function]
    in_models = [frame for frame in frames if _is_model(frame.file)]
    model_methods = [method for method in methods if method in in_models]
    method = next(iter([*model_methods, *methods, *frames]), None)
    if method is None:
        return ""
    # The innermost line may be in a function that the model's methods share.
    line = in_models[0] if method in in_models else method
    return f"{method.function} ({PurePath(line.file).name}:{line.line})"


def _is_model(file: str) -> bool:
    """Checks whether a file is one of jaxdist's models or a user's."""
    if "/models/" in file:
        return True
    return "/jaxdist/" not in file and "/site-packages/" not in file


def _phase(op_name: str) -> str:
    """Finds the phase of a step that an op belongs to; see `Collective.phase`."""
    if "rematted_computation" in op_name:
        return "recomputation"
    if not op_name:
        return "?"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update"


def _described(instruction: hlo.Instruction) -> str:
    """Formats an instruction as its name and the last part of its source."""
    return f"{instruction.name} ({instruction.op_name.rpartition('/')[2] or instruction.opcode})"
