"""Reads HLO text (`compiled.as_text()`): computations, instructions, shapes, calls,
trip counts.

Also what the compiler writes beside an instruction: the TPU's estimate of its cycles,
the Python stack that asked for it, a collective's devices. A line is split only when it
is asked for: the text of a large program has 10^5 lines.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
# libtpu 0.0.50.1 names the thread
_END = re.compile(r'^\}(, execution_thread="[^"]*")?$')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
# The first word before "(" that follows a space: types hold "(" only after ":" or ")",
# as in f32[8,128]{1,0:T(8,128)}, or at the start of a tuple.
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"^(\d+) (.*)$")
# more is a mark, not an estimate: ops of the SparseCore carry 9.2e18
_NOT_CYCLES = 10**14
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
BRANCHES = ("branch_computations", "true_computation", "false_computation")
_INTEGER = re.compile(r"\b[su](?:32|64)\[\][^=]*\sconstant\((\d+)\)")

_GROUPS = re.compile(
    r"replica_groups=(?:(?P<lists>\{[\d,{}]*\})|(?P<shape>\[[\d,]+\])<=(?P<iota>\[[\d,]+\](?:T\([\d,]+\))?)|"
    r"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<order>[^{]*)\))? \{(?P<axes>[^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_MOVES = (  # what hands on an array as it is, or part of it
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "convert",
    "transpose",
    "reshape",
    "dynamic-slice",
    "slice",
    "slice-start",
    "slice-done",
    "optimization-barrier",
    "async-start",
    "async-done",
    "collective-permute",
)

Shape = tuple[int, ...]


def num_bytes(types: Iterable[tuple[str, Shape]]) -> int:
    """Counts the bytes of arrays of these dtypes and shapes, unpadded."""
    bits = 0
    for dtype, shape in types:
        width = _integers("u8" if dtype == "pred" else dtype) or [0]  # tokens have none
        bits += math.prod(shape) * width[0]
    return -(-bits // 8)


def _first(pattern: re.Pattern, text: str) -> str:
    """Finds the first group of a pattern where it is first found, or ""."""
    match = pattern.search(text)
    return match.group(1) if match else ""


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@dataclass(frozen=True)
class Frame:
    """A line of the Python stack that traced an instruction."""

    function: str  # qualified: "Attention.heads"
    file: str
    line: int


@dataclass(frozen=True)
class LoopRun:
    """A computation that the schedule runs, by itself or for a loop or branch."""

    computation: str
    times: int = 1  # per run of the program; loops of unknown length count once
    loops: tuple[str, ...] = ()  # the names of the `while`s around it, outermost first
    certain: bool = True  # False inside a loop of unknown length


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, split lazily."""

    name: str
    text: str  # what follows "name = "

    @cached_property
    def _split(self) -> tuple[str, str, str, str]:
        """The result's type, the opcode, the operands, and what follows them."""
        match = _OPCODE.search(self.text)
        if not match:
            return self.text, "", "", ""
        depth = 1
        end = match.end()
        while depth:  # up to the parenthesis that closes the operands
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            end += 1
        return (
            self.text[: match.start()],
            match.group(1),
            self.text[match.end() : end],
            self.text[end:],
        )

    @property
    def opcode(self) -> str:
        """ "dot", "fusion", "while", ..."""
        return self._split[1]

    @property
    def types(self) -> list[tuple[str, Shape]]:
        """The dtype and shape of the result; several for a tuple."""
        return [
            (dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
            for dtype, dims in _SHAPE.findall(self._split[0])
        ]

    @property
    def shape(self) -> Shape:
        """The shape of the result, of its first part if it is a tuple; () for
        a token.
        """
        return next((shape for _, shape in self.types), ())

    @property
    def dtype(self) -> str:
        """The dtype of the result, of its first part if it is a tuple."""
        return next((dtype for dtype, _ in self.types), "")

    @property
    def operands(self) -> list[str]:
        """Names of the operands, in order."""
        return re.findall(r"%([\w.\-]+)", self._split[2])

    @property
    def parameter_number(self) -> int:
        """Which parameter of its computation a parameter is."""
        return int(self._split[2].strip(")"))

    @property
    def attributes(self) -> str:
        """Everything after the operands: dimension numbers, calls, metadata,
        backend_config.
        """
        return self._split[3]

    @property
    def cycles(self) -> int:
        """What the TPU compiler thinks it takes; 0 on kernels, collectives and other
        platforms.
        """
        cycles = int(_first(_CYCLES, self.text) or 0)
        return cycles if cycles < _NOT_CYCLES else 0

    @property
    def op_name(self) -> str:
        """The path of JAX transformations and primitives that it came from, or ""."""
        return _first(_OP_NAME, self.text)

    @property
    def group(self) -> tuple[int, ...]:
        """The first group of devices that a collective spans, as ids of the executable;
        () is all.

        Of a permute a sender and its receiver.
        """
        if pairs := _first(_PAIRS, self.attributes):
            return _first_route(pairs)
        match = _GROUPS.search(self.attributes)
        return _first_group(match.group()) if match else ()

    def value(self, name: str) -> str:
        """Reads the text of an attribute such as dim_labels=bf_io->bf, or "" if
        absent.
        """
        match = re.search(
            rf'\b{name}=(?:"([^"]*)"|\{{([^{{}}]*)\}}|([^\s,]+))', self.attributes
        )
        return next((group for group in match.groups() if group), "") if match else ""

    def dims(self, name: str) -> list[int]:
        """Reads the integers of an attribute such as lhs_contracting_dims={1}; [] if
        absent.
        """
        return [int(dim) for dim in self.value(name).split(",") if dim]

    def called(self, *names: str) -> list[str]:
        """Lists the computations named by the given attributes (calls=%f,
        branches={%a, %b}).
        """
        return [
            part.strip(" %")
            for name in names
            for part in self.value(name).split(",")
            if part
        ]


@dataclass(frozen=True)
class Module:
    """A parsed HLO module: instructions of each computation by name, and the entry's
    name.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str
    # by name, of stack frames
    tables: dict[str, dict[int, str]] = field(default_factory=dict)

    def trip_count(self, loop: Instruction) -> int | None:
        """Counts the iterations of a `while`; None if that is unknown.

        Source: known_trip_count of its backend_config; TPU programs have none, there
        the largest integer constant of the condition is the limit of the loop that jax
        made of a scan. One whose first iteration was peeled off starts at 1.
        """
        if trips := _first(_TRIPS, loop.attributes):
            return int(trips)
        (condition,) = loop.called("condition")
        numbers = (
            _first(_INTEGER, instruction.text)
            for instruction in self._reachable(condition)
        )
        limits = [int(number) for number in numbers if number]
        return max(0, max(limits) - self._start(loop, condition)) if limits else None

    def _start(self, loop: Instruction, condition: str) -> int:
        """Finds the number that a loop counts from; 0 if that cannot be seen."""
        around = self.computations[self._callers[loop.called("body")[0]][0]]
        counters = [
            s
            for s in self.computations[condition].values()
            if s.opcode == "get-tuple-element"
        ]
        step = around.get(loop.operands[0])
        if len(counters) == 1 and step is not None and step.opcode == "tuple":
            step = around.get(step.operands[int(counters[0].value("index"))])
            while step is not None and step.opcode in _MOVES:
                step = around.get(step.operands[0])
            if step is not None:
                return int(_first(_INTEGER, step.text) or 0)
        return 0

    def runs(self, run: LoopRun | None = None) -> Iterator[LoopRun]:
        """Yields the computations whose instructions the schedule runs one by one,
        entry (or `run`) first.

        Into loops (not their conditions), calls and the branch of a conditional that
        has the most cycles; not into fusions, whose cost stands at the fusion, and what
        other threads run.
        """
        run = run or LoopRun(self.entry)
        yield run
        for step in self.computations[run.computation].values():
            if step.opcode == "while":
                yield from self.runs(self._body_run(step, run))
            elif step.opcode == "conditional":
                branch = max(step.called(*BRANCHES), key=self.cycles)
                yield from self.runs(replace(run, computation=branch))
            elif step.opcode == "call":
                target = step.called("to_apply")[0]
                yield from self.runs(replace(run, computation=target))

    def _body_run(self, loop: Instruction, around: LoopRun) -> LoopRun:
        trips = self.trip_count(loop)
        return LoopRun(
            loop.called("body")[0],
            times=around.times * (trips or 1),
            loops=(*around.loops, loop.name),
            certain=around.certain and trips is not None,
        )

    def cycles(self, computation: str) -> int:
        """Adds up the estimated cycles of a computation, loops and the dearest branches
        included.
        """
        return sum(
            run.times * step.cycles
            for run in self.runs(LoopRun(computation))
            for step in self.computations[run.computation].values()
        )

    def stack(self, instruction: Instruction) -> list[Frame]:
        """Reads the Python stack that traced it, innermost first; [] if none is
        recorded.
        """
        frames: list[Frame] = []
        frame = int(_first(_FRAME, instruction.text) or 0)
        while row := self.tables.get("StackFrames", {}).get(frame):
            place, parent = _numbers(row)
            file, function, line = _numbers(self.tables["FileLocations"][place])[:3]
            function_name = self.tables["FunctionNames"][function].strip('"')
            file_name = self.tables["FileNames"][file].strip('"')
            frames.append(Frame(function_name, file_name, line))
            frame = parent - 1  # 1 is "none"
        return frames

    @cached_property
    def _callers(self) -> dict[str, tuple[str, Instruction]]:
        """Of each loop's body: the computation around it and the loop."""
        return {
            step.called("body")[0]: (name, step)
            for name, steps in self.computations.items()
            for step in steps.values()
            if " while(" in step.text
        }

    def origin(
        self, computation: str, name: str, depth: int = 64
    ) -> Instruction | None:
        """Finds the parameter of the program that an array is, slices and casts
        apart, or None.
        """
        steps = self.computations[computation]
        step = steps.get(name)
        index = None
        if step is None or depth == 0:
            return None
        if step.opcode == "parameter":
            return step if computation == self.entry else None
        if step.opcode == "get-tuple-element":
            index = int(step.value("index"))
            step = steps[step.operands[0]]
            if step.opcode == "parameter" and computation in self._callers:
                computation, loop = self._callers[computation]
                step = self.computations[computation][loop.operands[0]]
            elif step.opcode == "while":  # what goes round unchanged
                step = steps[step.operands[0]]
            if step.opcode == "tuple":
                return self.origin(computation, step.operands[index], depth - 1)
        return self.origin(computation, self._handed_on(step, index), depth - 1)

    def _handed_on(self, step: Instruction, index: int | None) -> str:
        """Finds the operand that (the index-th part of) a result is, or ""."""
        if step.opcode in _MOVES or 'custom_call_target="ConcatBitcast"' in step.text:
            return next(iter(step.operands), "")
        # a shard into zeros: so all-reduce can gather
        if step.opcode == "dynamic-update-slice":
            return step.operands[1]
        if step.opcode != "fusion":
            return ""
        inside = self.computations[step.called("calls")[0]]
        inner = list(inside.values())[-1]  # the root
        if inner.opcode == "tuple" and index is not None:
            inner = inside[inner.operands[index]]
        coded = inner.dtype.startswith("f8")
        while inner.opcode != "parameter":
            source = self._handed_on(inner, None)
            # by scales, which are spread over it
            if coded and inner.opcode == "multiply":
                factors = [x for x in inner.operands if inside[x].opcode != "broadcast"]
                source = factors[0] if factors else ""
            if source not in inside:
                return ""
            inner = inside[source]
        return step.operands[inner.parameter_number]

    def _reachable(self, computation: str) -> Iterator[Instruction]:
        for instruction in self.computations[computation].values():
            yield instruction
            for name in instruction.called("calls", "to_apply"):
                yield from self._reachable(name)


def uses(
    computation: Mapping[str, Instruction], name: str
) -> Iterator[tuple[str, Instruction]]:
    """Yields what reads an array of a computation, or a bitcast of it, each after the
    name that it reads.
    """
    for step in computation.values():
        if name not in step.operands:
            continue
        if step.opcode == "bitcast":
            yield from uses(computation, step.name)
        else:
            yield name, step


def parse(text: str) -> Module:
    """Reads the module of an HLO text.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = ""
    current = None
    table = None
    last = ""  # the instruction that a line which is none goes on with
    for line in text.splitlines():
        if (
            line[:1] == " "
            and current is not None
            and (match := _INSTRUCTION.match(line))
        ):
            last = match.group(1)
            current[last] = Instruction(last, match.group(2))
        elif _END.match(line):
            current = None
            last = ""
        elif current is not None and last:
            current[last] = Instruction(last, f"{current[last].text} {line}")
        elif table is not None and (match := _ROW.match(line)):
            table[int(match.group(1))] = match.group(2)
        elif line in _TABLES:
            table = tables.setdefault(line, {})
        elif line[:1] not in ("", " ", "}") and (match := _COMPUTATION.match(line)):
            current = computations.setdefault(match.group(2), {})
            entry = match.group(2) if match.group(1) else entry
    if not entry:
        raise ValueError(
            "HLO text has no ENTRY computation; pass the text of compiled.as_text()"
        )
    return Module(computations, entry, tables)


def _numbers(row: str) -> list[int]:
    """Reads the numbers of a row {file_location_id=1 parent_frame_id=1}, in order."""
    return [int(number) for number in re.findall(r"=(\d+)", row)]


@lru_cache(maxsize=4096)
def _first_group(text: str) -> tuple[int, ...]:
    """Reads the first of the groups that replica_groups lists in one of its forms; ()
    for all.
    """
    match = _GROUPS.match(text)
    assert match is not None, text
    if match["lists"]:
        return tuple(_integers(match["lists"].split("}")[0]))
    if match["shape"]:
        _, size = _integers(match["shape"])
        return tuple(map(int, _order(match["iota"])[:size]))
    sizes = {
        axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", match["mesh"])
    }
    order = np.arange(math.prod(sizes.values()))
    if match["order"]:
        order = _order(match["order"])
    # "axis":(before)size is a part of an axis: that many are before it, the rest behind
    chosen = {
        axis: part
        for axis, *part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match["axes"])
    }
    dims: list[int] = []
    for axis, size in sizes.items():
        before, part = chosen.get(axis, (1, 1))
        outer = int(before or 1)
        inner = int(part or size)
        dims += [outer, inner, size // outer // inner]
    grid = order.reshape(dims)[(0, slice(None), 0) * len(sizes)]
    return tuple(map(int, grid.ravel()))


def _order(text: str) -> np.ndarray:
    """Reads the numbers of [16,4]T(1,0) (an iota, transposed) or of a plain list."""
    dims, _, permutation = text.partition("T")
    numbers = _integers(dims)
    if "[" not in dims:
        return np.array(numbers)
    order = _integers(permutation) or range(len(numbers))
    return np.arange(math.prod(numbers)).reshape(numbers).transpose(order).ravel()


@lru_cache(maxsize=4096)
def _first_route(text: str) -> tuple[int, ...]:
    """Finds a device and where it sends to, of {0,4},{4,8}; one pair of different
    devices.
    """
    numbers = _integers(text)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return next((pair for pair in pairs if pair[0] != pair[1]), tuple(numbers[:1]))
