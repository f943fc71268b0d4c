"""Logical names of a model's parameters: its own, flax's, or by rules of the config."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from flax import nnx

from jaxdist.config import suggest

Names = tuple[str | None, ...]


# Dims split by an axis that computes on its shard. d_model is what fsdp prefers to store in shards.
PARAMETER_AXES = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "d_ff": "tensor",
    "experts": "expert",
}


STACKS = ("chunks", "stages", "layers", "")  # names of stack dims; "" where a model names none


FSDP_NAME = "d_model"


DIM_NAMES = (*PARAMETER_AXES, FSDP_NAME, "head_dim", "layers", "positions")


@dataclass(frozen=True)
class ShardingConfig:
    """Names for the dims of parameters whose model names none."""

    rules: tuple[tuple[str, str], ...] = ()  # (path regex, "name of each dim, or None"); the first wins


def names_of(model: nnx.Module, *, staged: bool) -> dict[str, Names]:
    """Returns path -> logical names of every parameter, () for none; flax's own annotations are read too.

    A staged model's unnamed blocks get a None a dim but the first, which is that of the stack. Stack
    dims are left out, as a layer that reads the parameter sees its own dims.
    """
    return {path: _names_of(path, variable, staged) for path, variable in _parameters(model)}


def set_names(model: nnx.Module, names: Mapping[str, Names]) -> None:
    """Makes these the names that ops read, too: the metadata `logical` of every parameter."""
    for path, variable in _parameters(model):
        if variable.get_metadata().get("logical", ()) != names[path]:
            variable.set_metadata(logical=names[path])


def _parameters(model: nnx.Module) -> list[tuple[str, nnx.Variable]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [("/".join(map(str, path)), variable) for path, variable in flat]


def _names_of(path: str, variable: nnx.Variable, staged: bool) -> Names:
    metadata = variable.get_metadata()
    names = metadata.get("logical") or metadata.get("out_sharding") or metadata.get("sharding_names") or ()
    if not names and staged and path.startswith("blocks/"):
        return (None,) * (variable.get_value().ndim - 1)
    return _own(tuple(name if isinstance(name, str) else None for name in names))


def _own(names: Names) -> Names:
    return tuple(dropwhile(lambda name: name in STACKS, names))


def rename(
    own: Mapping[str, Names], rules: Sequence[tuple[str, str]], parameters: Mapping[str, Any]
) -> tuple[dict[str, Names], list[str]]:
    """Returns path -> names of every parameter (path -> abstract array), and the faults.

    A rule's names stand for a model's own. It names all dims, that of a stack too ("layers"), which is
    left out of what is returned.
    """
    parsed = [(p, tuple(None if name == "None" else name for name in text.split())) for p, text in rules]
    names_of, faults = {}, list(_rule_faults(parsed, parameters))
    for path, x in parameters.items():
        names_of[path] = own[path]
        number, what = _rule_of(path, parsed), f"its {len(x.shape)} dims {tuple(x.shape)}"
        if number is None:
            if len(own[path]) > len(x.shape):
                given = f"{len(own[path])} logical names {own[path]} for {what}"
                faults.append(f"{path}: {given}; give at most one a dim")
            continue
        rule, names = f"sharding.rules: {parsed[number][0]!r}", parsed[number][1]
        stack = max(0, len(x.shape) - len(own[path])) if own[path] else 0
        if len(names) != len(x.shape):
            faults.append(f"{rule} gives {path} {len(names)} names for {what}; give each one, or None")
        elif split := set(names[:stack]) - {"layers", None}:
            faults.append(f"{rule} gives a stack dim of {path} {what} the name {split.pop()}; call it layers")
        else:
            names_of[path] = _own(names[stack:])
    return names_of, faults


def _rule_of(path: str, rules: Sequence[tuple[str, Names]]) -> int | None:
    return next((number for number, (pattern, _) in enumerate(rules) if re.search(pattern, path)), None)


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
