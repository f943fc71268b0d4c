"""Reading compiled programs (HLO) and traced ones: collectives, loops, shapes,
predicates.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as jax_core

from jaxdist.telemetry import hlo


def _inner(equation) -> list[Any]:
    """Returns the jaxprs in an equation's parameters."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, jax_core.ClosedJaxpr):
                one = one.jaxpr
            if isinstance(one, jax_core.Jaxpr):
                found.append(one)
    return found


def scan_sizes(params) -> tuple[int, int]:
    """Returns the numbers of a scan's constants and carried values, in jax before 0.12
    and from it on.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = (
        params["ft_in"].unpack()
        if hasattr(params["ft_in"], "unpack")
        else params["ft_in"]
    )
    return tuple(
        len(jax.tree.leaves(part, is_leaf=lambda x: x is None))
        for part in (constants, carried)
    )


def stage_dependent_predicates(
    jaxpr, varying=frozenset()
) -> tuple[int, int, list[bool]]:
    """Returns (stage numbers read, conditionals, which outputs depend on the stage) of
    a jaxpr.

    Args:
      varying: numbers of the inputs that depend on the stage.

    Raises:
      AssertionError: a predicate of a conditional or a loop depends on the stage.
    """
    depends = {jaxpr.invars[i] for i in varying}
    reads = conditionals = 0

    def found(atom) -> bool:
        return isinstance(atom, jax_core.Var) and atom in depends

    for equation in jaxpr.eqns:
        name, inputs = (
            equation.primitive.name,
            [found(atom) for atom in equation.invars],
        )
        tainted = any(inputs) or name == "axis_index"
        reads += name == "axis_index"
        if name == "cond":
            conditionals += 1
            assert not inputs[0], "a conditional's predicate depends on the stage"
        assert name != "while" or not any(inputs[: equation.params["cond_nconsts"]])
        # a kernel is on one device
        for inner in () if name == "pallas_call" else _inner(equation):
            assert len(inner.invars) <= len(inputs) + 1
            lead = len(inputs) - len(inner.invars)
            marks = {
                i
                for i in range(len(inner.invars))
                if lead + i >= 0 and inputs[lead + i]
            }
            # its inputs that are split over stages are a stage's own
            if name == "shard_map":
                marks |= {
                    i
                    for i, spec in enumerate(equation.params["in_specs"])
                    if "pipeline" in str(spec)
                }
            outs: list[bool] = []
            while True:  # what a loop carries round may bring the stage back in
                r, c, outs = stage_dependent_predicates(inner, frozenset(marks))
                first, carried = (
                    scan_sizes(equation.params) if name == "scan" else (0, 0)
                )
                more = {first + i for i in range(carried) if outs[i]} - marks
                if not more:
                    break
                marks |= more
            reads, conditionals = reads + r, conditionals + c
            tainted = tainted or any(outs)
        # the same on all stages after these
        if tainted and name not in ("psum", "pmax"):
            depends.update(equation.outvars)
    return reads, conditionals, [found(atom) for atom in jaxpr.outvars]


def collectives(
    module: hlo.Module, kinds: tuple[str, ...] = ("all-reduce",)
) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """Returns (computation, kind, dtype, shape) of each array that a
    collective gives.
    """
    found = []
    for name, instructions in module.computations.items():
        for instruction in instructions.values():
            if instruction.opcode.removesuffix("-start") not in kinds:
                continue
            kind = instruction.opcode.removesuffix("-start")
            result = instruction.text[
                : instruction.text.index(f" {instruction.opcode}(")
            ]
            for text in result.strip("()").split("f32[")[1:]:
                found.append((name, kind, "f32", _shape(text)))
            for text in result.strip("()").split("bf16[")[1:]:
                found.append((name, kind, "bf16", _shape(text)))
    return found


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in text[: text.index("]")].split(",") if dim)


def loop_bodies(module: hlo.Module) -> dict[str, int | None]:
    """Returns {name of a while loop's body: how often it runs}."""
    return {
        instruction.called("body")[0]: module.trip_count(instruction)
        for instructions in module.computations.values()
        for instruction in instructions.values()
        if instruction.opcode == "while"
    }


def reachable(module: hlo.Module, computation: str) -> set[str]:
    """Returns the computation and all it calls."""
    names, todo = set(), [computation]
    while todo:
        name = todo.pop()
        if name in names:
            continue
        names.add(name)
        for instruction in module.computations.get(name, {}).values():
            todo += instruction.called(
                "calls", "to_apply", "body", "condition", "branch_computations"
            )
    return names


def buffer_shapes(module: hlo.Module) -> set[tuple[int, ...]]:
    """Returns the shapes of all arrays in the program, those inside fused loops too."""
    return {
        shape
        for instructions in module.computations.values()
        for instruction in instructions.values()
        for _, shape in instruction.types
    }
