"""Parser of HLO text (`compiled.as_text()`).

It reads computations, instructions, shapes, calls and trip counts. It also reads the
compiler's notes on an instruction: the TPU's estimate of its cycles, the Python stack
that traced it, and the devices of a collective. A line is split only when its parts are
read: the text of a large program has 10^5 lines.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
# libtpu 0.0.50.1 adds the name of the thread
_END = re.compile(r'^\}(, execution_thread="[^"]*")?$')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
# The first word before "(" that follows a space: types hold "(" only after ":" or ")",
# as in f32[8,128]{1,0:T(8,128)}, or at the start of a tuple.
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
# the same with the layout; S(1) in it is the vector memory of a TPU's core
_PLACED = re.compile(r"\b[a-z]\w*\[[\d,<=]*\](?:\{[^{}]*\})?")
_ON_CORE = "S(1)"
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"^(\d+) (.*)$")
# a larger number is no estimate: ops of the SparseCore have 9.2e18
_NOT_CYCLES = 10**14
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
BRANCHES = ("branch_computations", "true_computation", "false_computation")
_INTEGER = re.compile(r"\b[su](?:32|64)\[\][^=]*\sconstant\((\d+)\)")

_GROUPS = re.compile(
    r"replica_groups=(?:(?P<lists>\{[\d,{}]*\})|(?P<shape>\[[\d,]+\])<=(?P<iota>\[[\d,]+\](?:T\([\d,]+\))?)|"
    r"mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<order>[^{]*)\))? \{(?P<axes>[^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_MOVES = (  # opcodes whose result is their operand, or a part of it
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
        width = _integers("u8" if dtype == "pred" else dtype) or [0]  # token: 0 bits
        bits += math.prod(shape) * width[0]
    return -(-bits // 8)


def _first(pattern: re.Pattern[str], text: str) -> str:
    """Finds the first group of a pattern's first match, or ""."""
    match = pattern.search(text)
    return match.group(1) if match else ""


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@dataclass(frozen=True)
class Frame:
    """Line of the Python stack that traced an instruction."""

    function: str  # qualified name: "Attention.heads"
    file: str
    line: int


@dataclass(frozen=True)
class LoopRun:
    """Computation that the schedule runs: the entry, a loop's body or a branch."""

    computation: str
    times: int = 1  # runs per run of the program; a loop of unknown length counts once
    loops: tuple[str, ...] = ()  # names of the loops around it, outermost first
    certain: bool = True  # False inside a loop of unknown length


@dataclass(frozen=True)
class Instruction:
    """Line of a computation, split lazily."""

    name: str
    text: str  # text after "name = "

    @cached_property
    def _split(self) -> tuple[str, str, str, str]:
        """Splits the text into the result's type, opcode, operands and attributes."""
        match = _OPCODE.search(self.text)
        if not match:
            return self.text, "", "", ""
        depth = 1
        end = match.end()
        while depth:  # until the parenthesis that closes the operands
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
        """The opcode, such as "dot", "fusion" or "while"."""
        return self._split[1]

    @property
    def types(self) -> list[tuple[str, Shape]]:
        """The dtype and shape of the result; several for a tuple."""
        return [
            (dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
            for dtype, dims in _SHAPE.findall(self._split[0])
        ]

    @property
    def stored_bytes(self) -> int:
        """The bytes of the result in the device's memory.

        Arrays in the vector memory of a TPU's core do not count.
        """
        text = self._split[0]
        if _ON_CORE not in text:
            return num_bytes(self.types)
        kept = [part for part in _PLACED.findall(text) if _ON_CORE not in part]
        return num_bytes(Instruction("", " ".join(kept)).types)

    @property
    def shape(self) -> Shape:
        """The shape of the result; () for a token.

        For a tuple it is the shape of the first part.
        """
        return next((shape for _, shape in self.types), ())

    @property
    def dtype(self) -> str:
        """The dtype of the result; for a tuple that of the first part."""
        return next((dtype for dtype, _ in self.types), "")

    @property
    def operands(self) -> list[str]:
        """The names of the operands in order."""
        return re.findall(r"%([\w.\-]+)", self._split[2])

    @property
    def parameter_number(self) -> int:
        """The index of a parameter in its computation."""
        return int(self._split[2].strip(")"))

    @property
    def attributes(self) -> str:
        """The text after the operands.

        It holds dimension numbers, calls, metadata and backend_config.
        """
        return self._split[3]

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of the cycles.

        It is 0 for kernels and collectives, and on other platforms.
        """
        cycles = int(_first(_CYCLES, self.text) or 0)
        return cycles if cycles < _NOT_CYCLES else 0

    @property
    def op_name(self) -> str:
        """The path of JAX transformations and primitives, or ""."""
        return _first(_OP_NAME, self.text)

    @property
    def group(self) -> tuple[int, ...]:
        """The first group of devices that a collective spans; () = all.

        Devices are ids of the executable. For a permute, they are a sender and its
        receiver.
        """
        pairs = _first(_PAIRS, self.attributes)
        if pairs:
            return _first_route(pairs)
        match = _GROUPS.search(self.attributes)
        return _first_group(match.group()) if match else ()

    def value(self, name: str) -> str:
        """Reads the text of an attribute such as dim_labels=bf_io->bf; "" if absent."""
        match = re.search(
            rf'\b{name}=(?:"([^"]*)"|\{{([^{{}}]*)\}}|([^\s,]+))', self.attributes
        )
        if match is None:
            return ""
        return next((group for group in match.groups() if group), "")

    def dims(self, name: str) -> list[int]:
        """Reads the integers of an attribute such as lhs_contracting_dims={1}."""
        return [int(dim) for dim in self.value(name).split(",") if dim]

    def called(self, *names: str) -> list[str]:
        """Lists the computations in attributes such as calls=%f, branches={%a, %b}."""
        return [
            part.strip(" %")
            for name in names
            for part in self.value(name).split(",")
            if part
        ]


@dataclass(frozen=True)
class Module:
    """Parsed HLO module."""

    computations: dict[str, dict[str, Instruction]]  # instructions by name
    entry: str  # name of the entry computation
    # rows of the tables of stack frames, by name and id
    tables: dict[str, dict[int, str]] = field(default_factory=dict)

    def trip_count(self, loop: Instruction) -> int | None:
        """Counts the iterations of a `while`; None = unknown.

        The count is known_trip_count of its backend_config. TPU programs have none: the
        limit of a loop that jax made of a scan is the largest integer constant of its
        condition. A loop whose first iteration was peeled off starts at 1.
        """
        trips = _first(_TRIPS, loop.attributes)
        if trips:
            return int(trips)
        (condition,) = loop.called("condition")
        numbers = (
            _first(_INTEGER, instruction.text)
            for instruction in self._reachable(condition)
        )
        limits = [int(number) for number in numbers if number]
        if not limits:
            return None
        return max(0, max(limits) - self._start(loop, condition))

    def _start(self, loop: Instruction, condition: str) -> int:
        """Finds the first value of a loop's counter; 0 if it is unknown."""
        caller, _ = self._callers[loop.called("body")[0]]
        instructions = self.computations[caller]
        counters = [
            instruction
            for instruction in self.computations[condition].values()
            if instruction.opcode == "get-tuple-element"
        ]
        carry = instructions.get(loop.operands[0])
        if len(counters) != 1 or carry is None or carry.opcode != "tuple":
            return 0
        source = instructions.get(carry.operands[int(counters[0].value("index"))])
        while source is not None and source.opcode in _MOVES:
            source = instructions.get(source.operands[0])
        if source is None:
            return 0
        return int(_first(_INTEGER, source.text) or 0)

    def runs(self, run: LoopRun | None = None) -> Iterator[LoopRun]:
        """Yields the computations whose instructions the schedule runs one by one.

        They are the entry, loops (not their conditions), calls, and the branch of a
        conditional with the most cycles. They are not fusions, whose cost is that of
        the fusion instruction, and computations that other threads run.

        Args:
          run: the first computation; None = the entry.
        """
        run = run or LoopRun(self.entry)
        yield run
        for instruction in self.computations[run.computation].values():
            if instruction.opcode == "while":
                yield from self.runs(self._body_run(instruction, run))
            elif instruction.opcode == "conditional":
                branch = max(instruction.called(*BRANCHES), key=self.cycles)
                yield from self.runs(replace(run, computation=branch))
            elif instruction.opcode == "call":
                target = instruction.called("to_apply")[0]
                yield from self.runs(replace(run, computation=target))

    def _body_run(self, loop: Instruction, outer: LoopRun) -> LoopRun:
        trips = self.trip_count(loop)
        return LoopRun(
            loop.called("body")[0],
            times=outer.times * (trips or 1),
            loops=(*outer.loops, loop.name),
            certain=outer.certain and trips is not None,
        )

    def cycles(self, computation: str) -> int:
        """Adds up the estimated cycles of a computation and of what it runs."""
        return sum(
            run.times * instruction.cycles
            for run in self.runs(LoopRun(computation))
            for instruction in self.computations[run.computation].values()
        )

    def stack(self, instruction: Instruction) -> list[Frame]:
        """Reads the Python stack that traced an instruction, innermost frame first."""
        frames: list[Frame] = []
        frame = int(_first(_FRAME, instruction.text) or 0)
        while row := self.tables.get("StackFrames", {}).get(frame):
            location, parent = _numbers(row)
            file, function, line = _numbers(self.tables["FileLocations"][location])[:3]
            function_name = self.tables["FunctionNames"][function].strip('"')
            file_name = self.tables["FileNames"][file].strip('"')
            frames.append(Frame(function_name, file_name, line))
            frame = parent - 1  # a parent of 1 means none
        return frames

    @cached_property
    def _callers(self) -> dict[str, tuple[str, Instruction]]:
        """Finds for each loop's body the computation around the loop, and the loop."""
        return {
            instruction.called("body")[0]: (name, instruction)
            for name, instructions in self.computations.items()
            for instruction in instructions.values()
            if " while(" in instruction.text
        }

    def origin(
        self, computation: str, name: str, depth: int = 64
    ) -> Instruction | None:
        """Finds the parameter of the program that an array comes from, or None.

        The array may be the parameter itself, or a slice or cast of it.

        Args:
          computation: name of the array's computation.
          name: name of the array.
          depth: number of instructions to follow at most.
        """
        instructions = self.computations[computation]
        source = instructions.get(name)
        index = None
        if source is None or depth == 0:
            return None
        if source.opcode == "parameter":
            return source if computation == self.entry else None
        if source.opcode == "get-tuple-element":
            index = int(source.value("index"))
            source = instructions[source.operands[0]]
            if source.opcode == "parameter" and computation in self._callers:
                computation, loop = self._callers[computation]
                source = self.computations[computation][loop.operands[0]]
            elif source.opcode == "while":  # a part of the carry that does not change
                source = instructions[source.operands[0]]
            if source.opcode == "tuple":
                return self.origin(computation, source.operands[index], depth - 1)
        return self.origin(computation, self._moved(source, index), depth - 1)

    def _moved(self, instruction: Instruction, index: int | None) -> str:
        """Finds the operand that an instruction only moves, slices or casts.

        Args:
          instruction: the instruction.
          index: index in its result, if that is a tuple.

        Returns:
          Name of the operand, or "".
        """
        is_concat = 'custom_call_target="ConcatBitcast"' in instruction.text
        if instruction.opcode in _MOVES or is_concat:
            return next(iter(instruction.operands), "")
        # writes a shard into zeros, so that an all-reduce gathers
        if instruction.opcode == "dynamic-update-slice":
            return instruction.operands[1]
        if instruction.opcode != "fusion":
            return ""
        inside = self.computations[instruction.called("calls")[0]]
        inner = list(inside.values())[-1]  # the root
        if inner.opcode == "tuple" and index is not None:
            inner = inside[inner.operands[index]]
        is_fp8 = inner.dtype.startswith("f8")
        while inner.opcode != "parameter":
            source = self._moved(inner, None)
            # a cast to fp8 multiplies by scales, which are broadcast
            if is_fp8 and inner.opcode == "multiply":
                factors = [x for x in inner.operands if inside[x].opcode != "broadcast"]
                source = factors[0] if factors else ""
            if source not in inside:
                return ""
            inner = inside[source]
        return instruction.operands[inner.parameter_number]

    def _reachable(self, computation: str) -> Iterator[Instruction]:
        for instruction in self.computations[computation].values():
            yield instruction
            for name in instruction.called("calls", "to_apply"):
                yield from self._reachable(name)


def uses(
    computation: Mapping[str, Instruction], name: str
) -> Iterator[tuple[str, Instruction]]:
    """Yields the readers of an array, or of a bitcast of it.

    Args:
      computation: the instructions of the array's computation, by name.
      name: name of the array.

    Yields:
      (name of the array or bitcast, the instruction that reads it).
    """
    for instruction in computation.values():
        if name not in instruction.operands:
            continue
        if instruction.opcode == "bitcast":
            yield from uses(computation, instruction.name)
        else:
            yield name, instruction


def parse(text: str) -> Module:
    """Parses the text of an HLO module.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = ""
    current = None  # instructions of the current computation
    table = None  # the current table
    last = ""  # name of the last instruction; it may continue on the next line
    for line in text.splitlines():
        is_indented = line[:1] == " "
        if is_indented and current is not None and (match := _INSTRUCTION.match(line)):
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
    """Reads the first group of replica_groups in any form; () = all devices."""
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
    # "axis":(outer)size is a part of an axis, with so many outer parts before it
    chosen = {
        axis: (outer_text, part_text)
        for axis, outer_text, part_text in re.findall(
            r"'([^']*)'(?::\((\d+)\)(\d+))?", match["axes"]
        )
    }
    dims: list[int] = []
    for axis, size in sizes.items():
        outer_text, part_text = chosen.get(axis, (1, 1))
        outer = int(outer_text or 1)
        part = int(part_text or size)
        dims += [outer, part, size // outer // part]
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
    """Finds the first pair of different devices in {0,4},{4,8}: sender and receiver."""
    numbers = _integers(text)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return next((pair for pair in pairs if pair[0] != pair[1]), tuple(numbers[:1]))
