"""Every collective of a compiled step: what moves, over which mesh axis and link, and
what hides it.

Read from the scheduled HLO text. A collective is spelled in six ways: plain, as start
and done, as a TPU fusion that compute fusions go on with (several, of one channel), as
chains of permutes, as a call on the SparseCore, and between slices as host transfers
(of one slice's program). All come out as one `Collective`.
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
    """One collective of the program; bytes are of one execution on one device."""

    kind: str  # of KINDS
    axis: str  # mesh axes it spans, "data+fsdp"; "part of fsdp"
    group_size: int
    dtype: str
    bytes: int  # payload: the gathered result, what is reduced, exchanged or sent
    count: int  # executions a step, loops multiplied out
    asynchronous: bool
    in_loop: bool
    # "gather of blocks/mlp/up", "gradient of blocks/mlp/up", "rows to experts",
    # "activations"
    what: str
    # the Python that asked for it: "FeedForward.__call__ (transformer.py:189)"
    module: str
    # forward, recomputation, backward, update; "?" where the compiler keeps no source
    phase: str
    name: str  # of the instruction
    computation: str  # whose schedule it is in, from `begins` to `ends`
    begins: int
    ends: int
    link: Link | None = None  # None: no target was given, or one device
    hidden_by: str = ""  # the instructions between start and done that take longest
    # of `step_s`, what compute between start and done covers (`timing.overlap`)
    hidden_s: float = 0.0

    @property
    def gathers_weights(self) -> bool:
        """Whether it makes weights whole."""
        return self.what.startswith("gather of ") and "batch/" not in self.what

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution of the bandwidth-optimal
        algorithm.
        """
        return wire_bytes(self.kind, self.bytes, self.group_size)

    @property
    def wire_s(self) -> float:
        """Seconds of one execution, were nothing else on its links; 0 without
        a link.
        """
        return self.link.seconds(self.kind, self.wire_bytes) if self.link else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of all executions of a step, were they all in the open."""
        return self.count * self.wire_s

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which nothing but this runs."""
        return self.step_s - self.hidden_s


def collectives(
    module: hlo.Module,
    shape: MeshShape,
    target: Target | None = None,
    mesh_ids: Sequence[int] | None = None,
) -> list[Collective]:
    """Returns the collectives of a compiled step in the order of its schedule.

    Args:
      target: gives links, and so times.
      mesh_ids: physical ids of the mesh's devices in order (`Compiled.mesh_ids`).
    """
    reader = _Reader(module, shape, target, mesh_ids or range(shape.num_devices))
    spanning = [
        one for run in module.runs() for one in reader.of_run(run) if one.group_size > 1
    ]
    return [_with_weights(one, spanning) for one in spanning]


def summed(
    collectives: Sequence[Collective], moves: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns, as JSON, the bytes and seconds of a step's collectives, by what moves.

    Args:
      moves: scopes of the ops that send it.
    """
    names = {scope.replace("_", " ") for scope in moves}
    alike: defaultdict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for one in collectives:
        if one.what in names:
            alike[one.kind, one.axis, one.what].append(one)
    return [
        {
            "kind": kind,
            "axis": axis,
            "what": what,
            "bytes": sum(one.count * one.bytes for one in ones),
            "wire_bytes": math.fsum(one.count * one.wire_bytes for one in ones),
            "seconds": math.fsum(one.step_s for one in ones) or None,
        }
        for (kind, axis, what), ones in alike.items()
    ]


@dataclass
class _Span:
    """A collective in its schedule, while that is read."""

    begins: int  # place of the first part
    ends: int  # and of the last
    outer: hlo.Instruction  # that stands there
    inner: hlo.Instruction  # the collective itself
    around: str  # its computation

    def go_on(self, place: int, part: hlo.Instruction) -> None:
        """Takes in an update or the end of it.

        Nothing can move before an update that brings the operands.
        """
        self.ends = place
        _, *operands = part.operands or [""]
        if operands and not self.outer.operands:
            names = ", ".join(f"%{name}" for name in operands)
            start = EMPTY_START.replace("()", f"({names})")
            text = self.outer.text.replace(EMPTY_START, start, 1)
            self.begins = place
            self.outer = hlo.Instruction(self.outer.name, text)


class _Reader:
    """What reading a module's collectives needs to keep at hand."""

    def __init__(
        self, module: hlo.Module, shape: MeshShape, target: Target | None, mesh_ids
    ) -> None:
        self.module = module
        self.shape = shape
        self.target = target
        self.mesh_ids = mesh_ids
        self.inside = {  # computation -> the collectives written in it
            name: [step for step in steps.values() if _kind(step)]
            for name, steps in module.computations.items()
        }
        sizes = np.array(tuple(shape.sizes.values()))
        inner = (sizes // tuple(shape.dcn.values()))[:, None]
        # [axes, places in the mesh]
        self.coordinates = np.indices(tuple(sizes)).reshape(len(sizes), -1)
        first_slice = ~(self.coordinates // inner).any(axis=0)
        between = any(
            BETWEEN_SLICES.search(s.text)
            for steps in self.inside.values()
            for s in steps
        )
        # Where in the mesh the executable's devices are: between slices it is the
        # program of one.
        self.places = np.flatnonzero(first_slice | (not between))
        # alike, one of each slice
        self.peers = np.flatnonzero(~(self.coordinates % inner).any(axis=0))

    def of_run(self, run: hlo.LoopRun) -> Iterator[Collective]:
        steps = self.module.computations[run.computation]
        spans: dict[object, _Span] = {}
        # instruction -> key of the span that it started or went on with
        keys: dict[str, object] = {}
        for place, step in enumerate(steps.values()):
            if step.opcode == "recv" and (match := RENDEZVOUS.search(step.text)):
                keys[step.name] = match.group(1)
            if step.opcode.endswith(("-update", "-done")):
                key = keys.get(next(iter(step.operands), ""))
                if key in spans:  # else it ends a callback to the host
                    keys[step.name] = key
                    spans[key].go_on(place, step)
                continue
            for inner, around in self._collectives_of(step, run.computation):
                key = keys[step.name] = _key(step, inner)
                spans.setdefault(
                    key, _Span(place, place, step, inner, around)
                ).ends = place
        for span in spans.values():
            operands = span.inner.operands[: 1 if span.inner.opcode == "send" else None]
            inside = self.module.computations[span.around]
            types = [part for name in operands for part in inside[name].types]
            yield self._collective(
                run, span.begins, span.ends, span.outer, span.inner, types
            )

    def _collectives_of(
        self, step: hlo.Instruction, around: str
    ) -> list[tuple[hlo.Instruction, str]]:
        """Returns the collectives that an instruction is or holds, each with its
        computation.
        """
        if _kind(step):
            return [(step, around)]
        # loops and branches
        if step.opcode not in ("fusion", "call-start", "async-start"):
            return []
        called = step.called("calls", "to_apply", "called_computations")
        return [(inner, name) for name in called for inner in self.inside.get(name, ())]

    def _collective(
        self, run: hlo.LoopRun, begins: int, ends: int, outer, inner, types
    ) -> Collective:
        group = self.places[list(inner.group)] if inner.group else self.places
        group = self.peers if BETWEEN_SLICES.search(inner.text) else group
        kind = _kind(inner)
        axis = self._axis(group, inner)
        payload = hlo.num_bytes(types) * (len(group) if kind == "all-gather" else 1)
        kind = "reduce-scatter" if _keeps_shard(outer) else kind
        source = self._source(run, outer, inner)
        between = islice(
            self.module.computations[run.computation].values(), begins + 1, ends
        )
        longest = sorted(between, key=lambda step: -step.cycles)[:2]
        return Collective(
            kind=kind,
            axis=axis,
            group_size=len(group),
            dtype=max(types, key=lambda part: math.prod(part[1]))[0],
            bytes=payload,
            count=run.times,
            asynchronous=ends > begins,
            in_loop=bool(run.loops),
            what=self._what(kind, axis, run, outer, types, source),
            module=_python(self.module.stack(source)),
            phase=_phase(source.op_name),
            name=outer.name,
            computation=run.computation,
            begins=begins,
            ends=ends,
            link=self.target.group_link([self.mesh_ids[place] for place in group])
            if self.target
            else None,
            hidden_by=", ".join(_described(step) for step in longest if step.cycles),
        )

    def _source(
        self, run: hlo.LoopRun, outer: hlo.Instruction, inner: hlo.Instruction
    ) -> hlo.Instruction:
        """Returns an instruction that says where a collective comes from: it, or what
        it was made of.
        """
        if inner.op_name and not outer.op_name:
            return inner
        steps = self.module.computations[run.computation]
        step = outer
        for _ in range(8):
            operand = steps.get(next(iter(step.operands), ""))
            if step.op_name or operand is None:
                break
            step = operand
        return step

    def _axis(self, group: np.ndarray, step: hlo.Instruction) -> str:
        """Returns the mesh axes along which a group's members differ."""
        rows = zip(self.shape.sizes, self.coordinates[:, group], strict=True)
        axes = [axis for axis, row in rows if len(set(row)) > 1]
        sizes = self.shape.dcn if BETWEEN_SLICES.search(step.text) else self.shape.sizes
        whole = math.prod(sizes[axis] for axis in axes) == len(group)
        return (
            "" if whole or _kind(step) == "collective-permute" else "part of "
        ) + "+".join(axes)

    def _what(
        self,
        kind: str,
        axis: str,
        run: hlo.LoopRun,
        step,
        types,
        source: hlo.Instruction,
    ) -> str:
        if match := _EXCHANGED.search(source.op_name):
            return match[0].replace("_", " ")
        sources = (
            self.module.origin(run.computation, operand) for operand in step.operands
        )
        origins = {_parameter(source.op_name) for source in sources if source}
        if kind not in ("reduce-scatter", "all-to-all") and origins:
            return f"gather of {', '.join(sorted(origins))}"
        # scalars, or of integers
        if (size := hlo.num_bytes(types)) <= 4096 or types[0][0][0] in "su":
            # codes of 8-bit floats
            large = "gather of weights" if types[0][0] == "u8" else "tokens"
            return "scalars" if size <= 4096 else large
        # What is summed over parts of the batch, at once or by permutes, is the
        # gradient of weights.
        summed = kind in ("reduce-scatter", "all-reduce", "collective-permute")
        return "gradient" if summed and {*axis.split("+")} <= _TOKENS else "activations"


# --- what is wrong --------------------------------------------------------------------

# bytes; below it a collective costs its latency, and no setting changes that
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
    """Returns what slows the step down, a sentence each: where it comes from, and the
    cure.

    Args:
      collectives: with what compute hides of them (`timing.overlap`).
      compute: dtype of matrix products.
      forwards_per_backward: attention forward kernels per backward
        (`timing.forwards_per_backward`).
      log: what the compiler wrote.
      chip: of the target.
      step_s: time of a step.
    """
    large = [one for one in collectives if one.bytes >= _LARGE]
    lines = [*_exposed(large, chip, step_s), *_slow_links(large)]
    if wide := [one for one in large if one.gathers_weights and one.dtype == "f32"]:
        cure = f"they are used in {compute}: cast them before, as jaxdist.ops.matmul.project does"
        cure = (
            "precision.compute=bfloat16 halves the bytes"
            if compute == "float32"
            else cure
        )
        lines.append(f"weights are gathered in float32 ({_places(wide)}); {cure}")
    if reduced := [
        one for one in large if one.kind == "all-reduce" and one.gathers_weights
    ]:
        lines.append(
            f"weights are gathered by all-reduce, twice an all-gather's bytes ({_places(reduced)}); the "
            f"compiler does so where an axis is no ring: choose a slice with wrapped links"
        )
    for name, count in Counter(
        line.group(1) or "?" for line in REMATERIALISED.finditer(log)
    ).items():
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


_WORTH_SAYING = 0.005  # of the step: what is exposed for less time is not worth a line


def _exposed(
    collectives: Sequence[Collective], chip: Chip | None, step_s: float | None
) -> Iterator[str]:
    """Yields a line for each kind of collective that compute does not cover: how long,
    why, the cure.
    """
    groups: defaultdict[tuple[str, str, str, bool], list[Collective]] = defaultdict(
        list
    )
    for one in collectives:
        if one.link is None or one.link.name != "memory":
            groups[one.kind, one.axis, one.what.split()[0], one.asynchronous].append(
                one
            )
    for (kind, axis, _, asynchronous), group in groups.items():
        seconds = sum(one.exposed_s for one in group)
        stops = not asynchronous and any(one.in_loop for one in group)
        if not stops and not (step_s and seconds > _WORTH_SAYING * step_s):
            continue
        count = sum(one.count for one in group)
        place = " in a loop" * any(one.in_loop for one in group)
        share = f" ({percent_text(seconds / step_s)})" if step_s else ""
        spent = f"{time_text(seconds)} a step{share}" if seconds else ""
        if asynchronous:
            whole = time_text(sum(one.step_s for one in group))
            said = f"beside compute that is too short: {spent} of {whole} exposed"
        else:
            are = "are" if count > 1 else "is"
            said = (
                f"{are} synchronous, nothing runs beside{f': {spent}' if spent else ''}"
            )
        why = _why(group, chip)
        cures = _cures(group, chip)
        yield (
            f"{count} {kind}{'s' * (count > 1)} over {axis}{place} {said} ({_places(group)})"
            f"{f'; {why}' if why else ''}; {', '.join(cures)}"
        )


def _why(group: Sequence[Collective], chip: Chip | None) -> str:
    """Returns why a compiler leaves such collectives in the open, where that
    is known.
    """
    first = group[0]
    summed = first.kind == "all-reduce" and first.what.startswith("gradient")
    whole = summed and "fsdp" in first.axis.split("+")
    if chip is None or not chip.torus_dims:
        return ""
    reasons = []
    if whole:
        reasons.append(
            "libtpu sums whole gradients here, twice a reduce-scatter's bytes"
        )
    if not first.asynchronous:
        if chip.sparse_core_collectives:
            reasons.append("the SparseCore did not take them")
        else:
            moved = TABLE[chip.family].beside_compute
            reasons.append(f"a {chip.name} moves {moved} beside compute")
    return ", and ".join(reasons)


def _cures(group: Sequence[Collective], chip: Chip | None) -> Iterator[str]:
    first = group[0]
    what = first.what.split()[0]
    axis = first.axis.removeprefix("part of ")
    if (
        what == "gradient"
        and first.dtype == "f32"
        and chip is not None
        and chip.torus_dims
    ):
        yield "precision.reduce=bfloat16 halves their bytes"
    yield {
        "gather": "more tokens per device or a smaller mesh.fsdp makes them a smaller part",
        "gradient": "more tokens per device or fewer batch.accumulation makes them a smaller part",
    }.get(what, f"a smaller mesh.{axis.split('+')[-1]} sends less")
    if (what, axis) == ("activations", "tensor"):
        yield "mesh.sequence_parallel=true splits the work around them"


def _slow_links(collectives: Sequence[Collective]) -> Iterator[str]:
    groups: defaultdict[tuple[str, str], list[Collective]] = defaultdict(list)
    for one in collectives:
        if (
            one.link is not None
            and one.link.name in _SLOW
            and set(one.axis.split("+")) & set(CHATTY_AXES)
        ):
            groups[one.axis, one.link.name].append(one)
    *others, last = CROSSING_AXES
    for (axis, link), group in groups.items():
        seconds = time_text(sum(one.step_s for one in group))
        yield (
            f"mesh axis {axis} talks in every layer, over {link}: {seconds} a step ({_places(group)}); keep "
            f"it inside what fast links join, and let mesh.{', '.join(others)} or {last} cross the slow ones"
        )


def _places(group: Sequence[Collective]) -> str:
    """Returns what is moved and by which modules, the most expensive first, at most
    three.
    """
    ordered = sorted(group, key=lambda one: -one.count * one.wire_bytes)
    names = dict.fromkeys(
        f"{one.what}{f' in {one.module}' if one.module else ''}" for one in ordered
    )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(list(names)[:3]) + more


# --- how HLO writes things ------------------------------------------------------------


def _kind(step: hlo.Instruction) -> str:
    """Returns the kind, of KINDS, of a collective instruction; "" for others."""
    if match := _OPCODE.search(step.text):
        name = match.group(1)
        return {
            "ragged-all-to-all": "all-to-all",
            "collective-broadcast": "all-gather",
        }.get(name, name)
    if (match := BETWEEN_SLICES.search(step.text)) and step.opcode == "send":
        name = match.group(1).lower().replace("_", "-")
        return name if name in KINDS else "collective-permute"
    return ""


def _key(step: hlo.Instruction, collective: hlo.Instruction) -> object:
    """Returns what the parts of one asynchronous collective have in common.

    Fusions repeat it, and its channel tells; plain collectives may share theirs.
    """
    if match := RENDEZVOUS.search(step.text):
        return match.group(1)
    if step.opcode == "fusion" and not _keeps_shard(step):
        return _kind(collective), collective.value("channel_id")
    return step.name


def _keeps_shard(fusion: hlo.Instruction) -> bool:
    """Returns whether it sums over devices and keeps its own shard: TPU's spelling of
    reduce-scatter.
    """
    return bool(REDUCE_SCATTER.search(fusion.text))


# --- what a person calls it -----------------------------------------------------------


def _parameter(op_name: str) -> str:
    """Returns "blocks/mlp/up" for state.trainable['blocks']['mlp']['up']."""
    parts = re.findall(r"\[\\?'?([^\]\\']*)", op_name)
    root = op_name.split("[")[0].removeprefix("state.")
    return "/".join(parts if root == "trainable" else [root, *parts])


def _with_weights(one: Collective, collectives: Sequence[Collective]) -> Collective:
    """Returns a gradient's collective with the names of the weights of its size that
    its line gathers.
    """
    if one.what != "gradient":
        return one
    gathers = [g for g in collectives if g.module == one.module and g.gathers_weights]
    sizes = {
        g.what.removeprefix("gather of "): g.bytes / _itemsize(g.dtype) for g in gathers
    }
    counts = Counter(sizes.values())
    names = list[str]()
    for name, size in sizes.items():
        ratio = one.bytes / _itemsize(one.dtype) / size
        # Some are padded; some travel together.
        if 1 <= round(ratio) <= counts[size] and abs(ratio / round(ratio) - 1) < 0.2:
            names.append(name)
    return replace(
        one, what=f"gradient of {' or '.join(names)}" if names else "gradient"
    )


def _itemsize(dtype: str) -> float:
    return hlo.num_bytes([(dtype, (8,))]) / 8


def _python(frames: Sequence[hlo.Frame]) -> str:
    """Returns the innermost method of a model on the stack, and the innermost line of a
    model in it.

    Else (a loop, a pipeline) the innermost method of ours, else the innermost function.
    """
    ours = "/jaxdist/", "/site-packages/"
    methods = [f for f in frames if "." in f.function and "<locals>" not in f.function]
    lines = [
        f
        for f in frames
        if "/models/" in f.file or not any(part in f.file for part in ours)
    ]
    method = next(iter([*(f for f in methods if f in lines), *methods, *frames]), None)
    if method is None:
        return ""
    # a function that models share stands in its own file
    line = lines[0] if method in lines else method
    return f"{method.function} ({PurePath(line.file).name}:{line.line})"


def _phase(op_name: str) -> str:
    if "rematted_computation" in op_name:
        return "recomputation"
    if not op_name:
        return "?"
    return (
        "backward"
        if "transpose(" in op_name
        else "forward"
        if "jvp(" in op_name
        else "update"
    )


def _described(step: hlo.Instruction) -> str:
    return f"{step.name} ({step.op_name.rpartition('/')[2] or step.opcode})"
