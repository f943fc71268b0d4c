"""Looks into one tree's programs and checkpoints; `house.py` runs it inside that tree.

    python house_probe.py step OUT.json train --config quickstart --workdir FOLDER
    python house_probe.py weights OUT.json FOLDER
    python house_probe.py answers OUT.json CASES.json

`step` runs a command of the package and records the train step that it compiles: its
instructions without names and metadata, FLOPs, collectives and memory. The step is
found by the name of the function that is jitted, so no module of the package is
imported but the command. `weights` digests the newest checkpoint of a run. `answers`
runs command lines and records their exit codes and messages.

The section "What is known of the package" is the only place that names anything in it.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

# ------------------------------------------------------ what is known of the package

ANSWER_LIMIT_S = 120.0  # of a command line that should be refused at once
TOOK_TOO_LONG = -9
STEP_NAMES = ("step", "train_step")  # names of the function that is jitted


def run_command(name: str, arguments: list[str]) -> int:
    """Runs a command of the package in this process and gives its exit code."""
    module = importlib.import_module(f"jaxdist.{name}")
    return module.main(arguments)


def trained_weights(folder: str) -> Any:
    """Gives the trained parameters of a run's newest checkpoint."""
    import jaxdist  # only this part needs the package itself

    run = jaxdist.load_run(folder, log=lambda line: None)
    for name in ("state", "weights", "params"):
        found = getattr(run, name, None)
        if found is not None:
            return getattr(found, "trainable", found)
    raise SystemExit("the run of jaxdist.load_run has no state: mend trained_weights")


# ------------------------------------------------------------------- the step's record


class RecordedStep:
    """Stands for a jitted function and keeps what it was traced to when it ran."""

    def __init__(self, jitted: Any, found: list[Any]):
        self._jitted = jitted
        self._found = found

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the function; traces it first if it has not run yet."""
        if not self._found:
            self._found.append(self._jitted.trace(*arguments, **keywords))
        return self._jitted(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def record_step(name: str, arguments: list[str]) -> dict[str, Any]:
    """Records the train step that a command runs."""
    found: list[Any] = []
    plain_jit = jax.jit

    def recording_jit(*positional: Any, **options: Any) -> Any:
        jitted = plain_jit(*positional, **options)
        function = positional[0] if positional else None
        if getattr(function, "__name__", "") in STEP_NAMES:
            return RecordedStep(jitted, found)
        return jitted

    jax.jit = recording_jit
    try:
        code = run_command(name, arguments)
    finally:
        jax.jit = plain_jit
    if code:
        raise SystemExit(f"the command ended with {code}")
    if not found:
        raise SystemExit(f"no function called {' or '.join(STEP_NAMES)} ran")
    return step_record(found[0])


def step_record(traced: Any) -> dict[str, Any]:
    """Records a traced step: its jaxpr's FLOPs and its compiled program."""
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    record = program_record(compiled.as_text())
    record["jaxpr_flops"] = jaxpr_flops(traced.jaxpr.jaxpr)
    record["xla_flops"] = compiled.cost_analysis().get("flops")
    record["memory"] = {
        "alias_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    return record


# ------------------------------------------------------------------- FLOPs of a jaxpr


def jaxpr_flops(jaxpr: Any) -> float:
    """Counts the FLOPs of the matrix products of a jaxpr, loops as often as they run.

    A conditional counts as its longest branch, the body of a `while` once. What lies in
    a `shard_map` has the shapes of one device and counts for each of its devices.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        total += equation_flops(equation)
    return total


def equation_flops(equation: Any) -> float:
    """Counts the FLOPs of one equation of a jaxpr."""
    name = equation.primitive.name
    if name == "dot_general":
        return dot_flops(equation)
    if name in ("ragged_dot", "ragged_dot_general"):
        return ragged_flops(equation)
    if name == "conv_general_dilated":
        return convolution_flops(equation)
    inner = [jaxpr_flops(jaxpr) for jaxpr in inner_jaxprs(equation)]
    if not inner:
        return 0.0
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    if name == "shard_map":
        return equation.params["mesh"].size * sum(inner)
    return sum(inner)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation."""
    for value in equation.params.values():
        values = value if isinstance(value, tuple | list) else (value,)
        for each in values:
            if hasattr(each, "jaxpr"):
                yield each.jaxpr
            elif hasattr(each, "eqns"):
                yield each


def dot_flops(equation: Any) -> float:
    """Counts 2 FLOPs for each multiply-add of a matrix product."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    out = equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted)


def ragged_flops(equation: Any) -> float:
    """Counts 2 FLOPs for each multiply-add of a grouped product: every row is once."""
    left = equation.invars[0].aval.shape
    right = equation.invars[1].aval.shape
    out = equation.outvars[0].aval.shape
    if len(out) == len(right):  # the groups are of the contracted dim
        return 2.0 * math.prod(left) * out[-1]
    return 2.0 * math.prod(left) * right[-1]


def convolution_flops(equation: Any) -> float:
    """Counts 2 FLOPs for each product of a kernel's element and an output's."""
    kernel = equation.invars[1].aval.shape
    out = equation.outvars[0].aval.shape
    numbers = equation.params["dimension_numbers"]
    outputs = kernel[numbers.rhs_spec[0]]
    return 2.0 * math.prod(out) * math.prod(kernel) / outputs


# ------------------------------------------------------------------- a compiled program

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
QUOTED = r'"(?:[^"\\]|\\.)*"'
METADATA = re.compile(rf",? *(?:metadata|origin)=\{{(?:[^{{}}\"]|{QUOTED})*\}}")
CHANNEL = re.compile(r",? *channel_id=\d+")
CORES = re.compile(r',?"outer_dimension_partitions":\[[^\]]*\]')
NAME = re.compile(r"%[\w.\-]+")
OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CALLED = re.compile(r"\b(calls|to_apply|body|condition)=(%[\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
TRUE_OR_FALSE = re.compile(r"\b(?:true|false)_computation=(%[\w.\-]+)")


@dataclass
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    result: str  # its type
    text: str  # all after the name, without metadata

    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Gives the element types and shapes of what it makes."""
        return array_types(self.result)

    def bytes(self) -> int:
        """Gives the size of what it makes."""
        sizes = [
            ITEM_BYTES.get(kind, 1) * math.prod(dims) for kind, dims in self.arrays()
        ]
        return sum(sizes)

    def operands(self) -> list[str]:
        """Gives the names of its operands."""
        start = self.text.index(f" {self.opcode}(") + len(self.opcode) + 2
        depth = 1
        end = start
        while depth:
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            end += 1
        return NAME.findall(self.text[start : end - 1])


@dataclass
class Program:
    """The computations of a compiled module."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""


def array_types(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Gives the element types and shapes in a type."""
    found = []
    for kind, dims in ARRAY.findall(text):
        found.append((kind, tuple(int(dim) for dim in dims.split(",") if dim)))
    return found


def read_program(text: str) -> Program:
    """Reads a module's text."""
    program = Program()
    instructions: list[Instruction] | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if instructions is None:
            if stripped.endswith("{") and "->" in stripped:
                name = NAME.search(stripped)
                assert name, stripped
                instructions = program.computations.setdefault(name.group(), [])
                if stripped.startswith("ENTRY"):
                    program.entry = name.group()
        elif stripped == "}":
            instructions = None
        elif " = " in stripped:
            instructions.append(read_instruction(stripped))
    return program


def read_instruction(line: str) -> Instruction:
    """Reads a line of a computation."""
    plain = CORES.sub("", CHANNEL.sub("", METADATA.sub("", line)))
    plain = plain.removeprefix("ROOT ")
    name, _, text = plain.partition(" = ")
    found = OPCODE.search(f" {text}") or OPCODE.search(text)
    assert found, line
    opcode = found.group(1)
    result = text[: text.index(f" {opcode}(")]
    return Instruction(name.strip(), opcode, result, text)


def called_by(instruction: Instruction) -> list[str]:
    """Gives the names of the computations that an instruction calls."""
    names = [name for _, name in CALLED.findall(instruction.text)]
    for branches in BRANCHES.findall(instruction.text):
        names += NAME.findall(branches)
    return names + TRUE_OR_FALSE.findall(instruction.text)


def program_record(text: str) -> dict[str, Any]:
    """Records a program: digest, opcodes, FLOPs and collectives of one device."""
    program = read_program(text)
    digests: dict[str, str] = {}
    opcodes: collections.Counter[str] = collections.Counter()
    for instructions in program.computations.values():
        for instruction in instructions:
            target = TARGET.search(instruction.text)
            label = f"{instruction.opcode} {target.group(1)}" if target else None
            opcodes[label or instruction.opcode] += 1
    counted = Counted()
    count_computation(program, program.entry, 1, counted)
    collectives = {}
    for kind, (times, size) in sorted(counted.collectives.items()):
        collectives[kind] = {"bytes": size, "count": times}
    return {
        "collectives": collectives,
        "digest": computation_digest(program, program.entry, digests),
        "hlo_flops": counted.flops,
        "instructions": sum(opcodes.values()),
        "loops_of_unknown_length": counted.unknown_loops,
        "opcodes": dict(sorted(opcodes.items())),
    }


def computation_digest(program: Program, name: str, digests: dict[str, str]) -> str:
    """Digests a computation and all it calls, whatever their names are.

    The names of its values become numbers in the order of their lines; the name of a
    computation becomes its digest.
    """
    if name in digests:
        return digests[name]
    numbers: dict[str, str] = {}
    lines = []
    for instruction in program.computations[name]:
        called = set(called_by(instruction))

        def renamed(found: re.Match, called: set[str] = called) -> str:
            if found.group() in called:
                return computation_digest(program, found.group(), digests)
            return numbers.setdefault(found.group(), f"%{len(numbers)}")

        lines.append(NAME.sub(renamed, f"{instruction.name} = {instruction.text}"))
    digests[name] = short_digest("\n".join(lines).encode())
    return digests[name]


@dataclass
class Counted:
    """What one device does in a program."""

    flops: float = 0.0
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    unknown_loops: int = 0


def count_computation(program: Program, name: str, times: int, into: Counted) -> None:
    """Counts a computation that runs so many times, and all it calls.

    All branches of a conditional count.
    """
    types = {i.name: i.result for i in program.computations[name]}
    for instruction in program.computations[name]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            count_collective(instruction, kind, times, into)
        elif instruction.opcode == "dot":
            into.flops += times * hlo_dot_flops(instruction, types)
        elif instruction.opcode == "convolution":
            into.flops += times * hlo_convolution_flops(instruction, types)
        repeats = times
        if instruction.opcode == "while":
            trips = TRIPS.search(instruction.text)
            into.unknown_loops += trips is None
            repeats *= int(trips.group(1)) if trips else 1
        for called in called_by(instruction):
            count_computation(program, called, repeats, into)


def count_collective(
    instruction: Instruction, kind: str, times: int, into: Counted
) -> None:
    """Counts a collective under its kind, element type and number of devices."""
    arrays = instruction.arrays()
    size = instruction.bytes()
    if instruction.opcode.endswith("-start") and len(arrays) > 1:
        size //= 2  # what goes in stands beside what comes out
    key = f"{kind} {arrays[0][0]}, {group_text(instruction.text)}"
    count, total = into.collectives.get(key, (0, 0))
    into.collectives[key] = (count + times, total + times * size)


def group_text(text: str) -> str:
    """Says among how many devices a collective is."""
    if found := re.search(r"replica_groups=\[([0-9,]*)\]<=", text):
        return f"groups of {found.group(1).split(',')[-1]}"
    if found := re.search(r"replica_groups=\{\{([0-9,]*)\}", text):
        return f"groups of {len(found.group(1).split(','))}"
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        return f"groups of {mesh_group_size(found.group(1), found.group(2))}"
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        return f"{found.group(1).count('{')} pairs"
    return "all devices"


def mesh_group_size(axes: str, chosen: str) -> int:
    """Gives how many devices lie along axes of a mesh, `'a'=2,'b'=4` and `'b'`.

    A part of an axis is written with its size: `'b':(1)2`.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    product = 1
    for name, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", chosen):
        product *= int(part) if part else sizes[name]
    return product


def hlo_dot_flops(instruction: Instruction, types: dict[str, str]) -> float:
    """Counts 2 FLOPs for each multiply-add of a matrix product."""
    found = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", instruction.text)
    contracted = [int(dim) for dim in found.group(1).split(",") if dim] if found else []
    ((_, left), *_) = array_types(types[instruction.operands()[0]])
    ((_, out), *_) = instruction.arrays()
    return 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted)


def hlo_convolution_flops(instruction: Instruction, types: dict[str, str]) -> float:
    """Counts 2 FLOPs for each product of a kernel's element and an output's."""
    ((_, kernel), *_) = array_types(types[instruction.operands()[1]])
    ((_, out), *_) = instruction.arrays()
    found = re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
    outputs = kernel[found.group(1).index("o")] if found else 1
    return 2.0 * math.prod(out) * math.prod(kernel) / outputs


# ------------------------------------------------------------------- weights


def weights_record(folder: str) -> dict[str, Any]:
    """Digests the parameters of a run's newest checkpoint, whatever their names are."""
    leaves = jax.tree.leaves(trained_weights(folder))
    digests = []
    for leaf in leaves:
        value = np.asarray(leaf)
        head = f"{value.dtype}{list(value.shape)}".encode()
        digests.append(short_digest(head + value.tobytes()))
    return {
        "arrays": len(leaves),
        "digest": short_digest("".join(sorted(digests)).encode()),
    }


def short_digest(data: bytes) -> str:
    """Gives the first half of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:32]


# ------------------------------------------------------------------- command lines


def answers_record(cases_file: str) -> dict[str, Any]:
    """Records what command lines are answered: exit code and standard error.

    Each runs in a process that is forked from this one, which has imported the commands
    already: a tenth of the time of a process of its own.

    Args:
      cases_file: JSON, {case: {"words": [COMMAND, WORD, ...], "folder": FOLDER}}.
    """
    cases = json.loads(Path(cases_file).read_text())
    for name in sorted({case["words"][0] for case in cases.values()}):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"jaxdist.{name}")
    warnings.simplefilter(
        "ignore"
    )  # of forks, and of modules that are imported already
    record = {}
    for name, case in cases.items():
        folder = Path(case["folder"])
        code = answer(case["words"], folder)
        record[name] = {
            "code": code,
            "err": (folder / "stderr.log").read_text(errors="replace"),
        }
    return record


def answer(words: list[str], folder: Path) -> int:
    """Runs a command line in a forked process and gives its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os._exit(answer_here(words, folder))
    began = time.monotonic()
    while time.monotonic() - began < ANSWER_LIMIT_S:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TOOK_TOO_LONG


def answer_here(words: list[str], folder: Path) -> int:
    """Runs a command line in this process, which ends after it."""
    os.chdir(folder)
    for name, number in (("stdout.log", 1), ("stderr.log", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
    sys.argv = list(words)
    code: object = 0
    try:
        runpy.run_module(f"jaxdist.{words[0]}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


# ------------------------------------------------------------------- command


def main(arguments: Sequence[str]) -> None:
    """Runs one of the recordings."""
    kind, out, *rest = arguments
    recorders: dict[str, Callable[[], dict[str, Any]]] = {
        "step": lambda: record_step(rest[0], list(rest[1:])),
        "weights": lambda: weights_record(rest[0]),
        "answers": lambda: answers_record(rest[0]),
    }
    record = recorders[kind]()
    Path(out).write_text(json.dumps(record, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
