"""Logical names of a model's parameters: its own, flax's, or by rules of the config."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from flax import nnx

from jaxdist.config import suggest

Names = tuple[str | None, ...]

EXPERTS = "experts"  # a dim of kernels that experts have one each of

# Dims split by an axis that computes on its shard. d_model is what fsdp prefers to
# store in shards.
PARAMETER_AXES = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "d_ff": "tensor",
    EXPERTS: "expert",
}

# names of stack dims; "" where a model names none
STACKS = ("chunks", "stages", "layers", "")

# modules of a staged model whose parameters have a stack dim
STACKED = ("first_blocks", "blocks")

FSDP_NAME = "d_model"

DIM_NAMES = (*PARAMETER_AXES, FSDP_NAME, "head_dim", "layers", "positions")


def has_experts(names: Names) -> bool:
    """Checks whether a parameter has a dim of experts."""
    return EXPERTS in names


@dataclass(frozen=True)
class ShardingConfig:
    """Names for the dims of parameters whose model names none."""

    # (path regex, "name of each dim, or None"); the first wins
    rules: tuple[tuple[str, str], ...] = ()


def name_parameters(
    model: nnx.Module, rules: Sequence[tuple[str, str]], *, staged: bool
) -> tuple[dict[str, Names], list[str]]:
    """Returns path -> logical names of every parameter, () for none, and the faults;
    ops read them, too.

    The names are those of the first rule (path regex, names) that finds the path, else
    the model's own or flax's annotations. A rule names all dims, that of a stack too
    ("layers"). Stack dims are left out of what is returned, as a layer that reads the
    parameter sees its own dims. A staged model's unnamed blocks get a None a dim but
    the first.
    """
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    parameters = {"/".join(map(str, path)): variable for path, variable in flat}
    parsed = [
        (p, tuple(None if name == "None" else name for name in text.split()))
        for p, text in rules
    ]
    names_of = {}
    faults = list(_rule_faults(parsed, parameters))
    for path, variable in parameters.items():
        names = _model_names(path, variable, staged)
        dims = variable.get_value().shape
        number = _rule_of(path, parsed)
        what = f"its {len(dims)} dims {tuple(dims)}"
        if number is not None:
            pattern, ruled = parsed[number]
            stack = max(0, len(dims) - len(names)) if names else 0
            rule = f"sharding.rules: {pattern!r} gives"
            if len(ruled) != len(dims):
                faults.append(
                    f"{rule} {path} {len(ruled)} names for {what}; give each one, or None"
                )
            elif split := set(ruled[:stack]) - {"layers", None}:
                faults.append(
                    f"{rule} a stack dim of {path} {what} the name {split.pop()}; call it layers"
                )
            else:
                names = _without_stack(ruled[stack:])
        elif len(names) > len(dims):
            faults.append(
                f"{path}: {len(names)} logical names {names} for {what}; give at most one a dim"
            )
        names_of[path] = names
        variable.set_metadata(logical=names)
    return names_of, faults


def in_stack(path: str) -> bool:
    """Checks whether a path, "blocks/mlp/up", is one of a staged model's stacks."""
    return path.partition("/")[0] in STACKED


def _model_names(path: str, variable: nnx.Variable, staged: bool) -> Names:
    metadata = variable.get_metadata()
    names = (
        metadata.get("logical")
        or metadata.get("out_sharding")
        or metadata.get("sharding_names")
        or ()
    )
    if not names and staged and in_stack(path):
        return (None,) * (variable.get_value().ndim - 1)
    return _without_stack(
        tuple(name if isinstance(name, str) else None for name in names)
    )


def _without_stack(names: Names) -> Names:
    return tuple(dropwhile(lambda name: name in STACKS, names))


def _rule_of(path: str, rules: Sequence[tuple[str, Names]]) -> int | None:
    return next(
        (
            number
            for number, (pattern, _) in enumerate(rules)
            if re.search(pattern, path)
        ),
        None,
    )


def _rule_faults(rules: Sequence[tuple[str, Names]], paths: Mapping[str, Any]):
    used = {_rule_of(path, rules) for path in paths}
    for number, (pattern, names) in enumerate(rules):
        if number not in used:
            some = ", ".join(list(paths)[:8])
            yield f"sharding.rules: {pattern!r} finds no parameter not found before it; there are: {some}"
        for name in set(names) - {*DIM_NAMES, None}:
            hint = suggest(str(name), DIM_NAMES)
            known = ", ".join(DIM_NAMES)
            yield f"sharding.rules: {pattern!r}: no dim is called {name!r}.{hint} There are: {known}"
