"""Reads HLO text (`compiled.as_text()`): computations, instructions, shapes, calls, trip counts.

A line is split only when it is asked for: the text of a large program has 10^5 lines.
"""

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
        """The result's type, the opcode, the operands, and what follows them."""
        found = _OPCODE.search(self.text)
        if not found:
            return self.text, "", "", ""
        depth, end = 1, found.end()
        while depth:  # up to the parenthesis that closes the operands
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            end += 1
        return self.text[: found.start()], found.group(1), self.text[found.end() : end], self.text[end:]

    @property
    def opcode(self) -> str:
        """ "dot", "fusion", "while", ..."""
        return self._split[1]

    @property
    def shapes(self) -> list[Shape]:
        """The shape of the result; several for a tuple."""
        found = _SHAPE.findall(self._split[0])
        return [tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim) for dims in found]

    @property
    def shape(self) -> Shape:
        """The shape of the result, of its first part if it is a tuple; () for a token."""
        return next(iter(self.shapes), ())

    @property
    def operands(self) -> list[str]:
        """Names of the operands, in order."""
        return re.findall(r"%([\w.\-]+)", self._split[2])

    @property
    def attributes(self) -> str:
        """Everything after the operands: dimension numbers, calls, metadata, backend_config."""
        return self._split[3]

    def value(self, name: str) -> str:
        """Returns the text of an attribute such as dim_labels=bf_io->bf, or "" if absent."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|\{{([^{{}}]*)\}}|([^\s,]+))', self.attributes)
        return next((group for group in found.groups() if group), "") if found else ""

    def dims(self, name: str) -> list[int]:
        """Returns the integers of an attribute such as lhs_contracting_dims={1}; [] if absent."""
        return [int(dim) for dim in self.value(name).split(",") if dim]

    def called(self, *names: str) -> list[str]:
        """Returns the computations named by the given attributes (calls=%f, branches={%a, %b})."""
        return [part.strip(" %") for name in names for part in self.value(name).split(",") if part]


@dataclass(frozen=True)
class Module:
    """A parsed HLO module: instructions of each computation by name, and the entry's name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns how often a `while` runs, or None if that is unknown.

        Source: known_trip_count of its backend_config; TPU programs have none, there the largest
        integer constant of the condition is the limit of the loop that jax made of a scan.
        """
        if found := _TRIPS.search(loop.attributes):
            return int(found.group(1))
        (condition,) = loop.called("condition")
        texts = (instruction.text for instruction in self._reachable(condition))
        return max((int(match.group(1)) for t in texts if (match := _INTEGER.search(t))), default=None)

    def _reachable(self, computation: str) -> Iterator[Instruction]:
        for instruction in self.computations[computation].values():
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
