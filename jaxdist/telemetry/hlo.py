"""Reads HLO text (`compiled.as_text()`): computations, instructions, shapes, calls, trip counts.

A line is split only when it is asked for: the text of a large program has 10^5 lines. Both ways of
printing operands are read (`dot(%a, %b)` and `dot(f32[4,8]{1,0} %a, f32[8,2]{1,0} %b)`).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
# The first word before "(" that follows a space: types hold "(" only after ":" or ")", as in
# f32[8,128]{1,0:T(8,128)}, or at the start of a tuple.
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b[a-z]\w*\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"\b[su](?:32|64)\[\][^=]*\sconstant\((\d+)\)")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, split lazily."""

    name: str
    text: str  # what follows "name = "

    @cached_property
    def _split(self) -> tuple[str, str, str, str]:
        found = _OPCODE.search(self.text)
        if not found:
            return self.text, "", "", ""
        end = _closing(self.text, found.end() - 1)
        inside, rest = self.text[found.end() : end], self.text[end + 1 :]
        return self.text[: found.start()], found.group(1), inside, rest

    @property
    def opcode(self) -> str:
        """ "dot", "fusion", "while", ..."""
        return self._split[1]

    @property
    def shapes(self) -> list[Shape]:
        """The shape of the result; several for a tuple."""
        return _shapes(self._split[0])

    @property
    def operands(self) -> list[str]:
        """Names of the operands, in order."""
        inside = self._split[2]
        if "%" in inside:
            return _OPERAND.findall(inside)
        return [part.split()[-1] for part in inside.split(",") if part.strip()]

    @property
    def attributes(self) -> str:
        """Everything after the operands: dimension numbers, calls, metadata, backend_config."""
        return self._split[3]

    def dims(self, name: str) -> list[int]:
        """Returns the integers of an attribute such as lhs_contracting_dims={1}; [] if absent."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return [int(dim) for dim in found.group(1).split(",") if dim] if found else []

    def value(self, name: str) -> str:
        """Returns the text of an attribute such as dim_labels=bf_io->bf, or "" if absent."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|\{{([^{{}}]*)\}}|([^\s,]+))', self.attributes)
        return next((group for group in found.groups() if group is not None), "") if found else ""

    def backend_config(self) -> dict:
        """Returns the JSON object of backend_config, {} if it is absent or no object."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        try:
            config, _ = json.JSONDecoder().raw_decode(self.attributes, start + 15)
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    def called(self, *names: str) -> list[str]:
        """Returns the computations named by the given attributes (calls=%f, branches={%a, %b})."""
        found: list[str] = []
        for name in names:
            pattern = rf"\b{name}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})"
            for one, many in re.findall(pattern, self.attributes):
                found += [one] if one else [part.strip().lstrip("%") for part in many.split(",")]
        return found


@dataclass(frozen=True)
class Module:
    """A parsed HLO module: instructions of each computation by name, and the entry's name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def operand_shapes(self, computation: str, instruction: Instruction) -> list[Shape]:
        """Returns the shape of each operand; () for one that this computation does not define."""
        inside = self.computations[computation]
        shapes = [inside[name].shapes if name in inside else [] for name in instruction.operands]
        return [shape[0] if shape else () for shape in shapes]

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns how often a `while` runs, or None if that is unknown.

        Source: known_trip_count of its backend_config; TPU programs have none, there the largest
        integer constant of the condition is the limit of the loop that jax made of a scan.
        """
        found = _TRIPS.search(loop.attributes)
        if found:
            return int(found.group(1))
        constants = [
            int(match.group(1))
            for name in loop.called("condition")
            for instruction in self._reachable(name)
            if (match := _INTEGER.search(instruction.text))
        ]
        return max(constants, default=None)

    def _reachable(self, computation: str) -> Iterator[Instruction]:
        for instruction in self.computations.get(computation, {}).values():
            yield instruction
            for name in instruction.called("calls", "to_apply"):
                yield from self._reachable(name)


def parse(text: str) -> Module:
    """Returns the module of an HLO text.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}"):
            found = _COMPUTATION.match(line)
            current = computations.setdefault(found.group(2), {}) if found else None
            entry = found.group(2) if found and found.group(1) else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current[found.group(1)] = Instruction(found.group(1), found.group(2))
    if not entry:
        raise ValueError("HLO text has no ENTRY computation; pass the text of compiled.as_text()")
    return Module(computations, entry)


def _shapes(text: str) -> list[Shape]:
    return [
        tuple(int(dim.lstrip("<=")) for dim in match.group(1).split(",") if dim)
        for match in _SHAPE.finditer(text)
    ]


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
