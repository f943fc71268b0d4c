"""Logical names of a model's parameters: its own, flax's, or by rules of the config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxdist.config import suggest
from jaxdist.sharding import FSDP_NAME, PARAMETER_AXES, Names

DIM_NAMES = (*PARAMETER_AXES, FSDP_NAME, "head_dim", "layers", "positions")


@dataclass(frozen=True)
class ShardingConfig:
    """Names for the dims of parameters whose model names none."""

    rules: tuple[tuple[str, str], ...] = ()  # (path regex, "name of each dim, or None"); the first wins


def names_of(model: nnx.Module, *, staged: bool) -> dict[str, Names]:
    """Returns path -> logical names of every parameter, () for none; flax's own annotations are read too.

    A staged model's unnamed blocks get a None a dim but the first, which is that of the stack.
    """
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {(name := "/".join(map(str, path))): _names_of(name, v, staged) for path, v in flat}


def _names_of(path: str, variable: nnx.Variable, staged: bool) -> Names:
    found = variable.get_metadata()
    names = found.get("logical") or found.get("out_sharding") or found.get("sharding_names") or ()
    if not names and staged and path.startswith("blocks/"):
        return (None,) * (variable.get_value().ndim - 1)
    return tuple(name if isinstance(name, str) else None for name in names)


def rename(
    own: Mapping[str, Names], rules: Sequence[tuple[str, str]], parameters: Mapping[str, Any]
) -> tuple[dict[str, Names], list[str]]:
    """Returns path -> names of every parameter (path -> abstract array), and the faults.

    A rule's names stand for a model's own. It names all dims, that of a stack too ("layers").
    """
    parsed = [(p, tuple(None if name == "None" else name for name in text.split())) for p, text in rules]
    found, faults = {}, list(_rule_faults(parsed, parameters))
    for path, x in parameters.items():
        number = _rule_of(path, parsed)
        found[path] = names = own[path] if number is None else parsed[number][1]
        what = f"its {len(x.shape)} dims {tuple(x.shape)}"
        if number is not None and len(names) != len(x.shape):
            rule = f"sharding.rules: {parsed[number][0]!r}"
            faults.append(f"{rule} gives {path} {len(names)} names for {what}; give each one, or None")
        elif len(names) > len(x.shape):
            faults.append(f"{path}: {len(names)} logical names {names} for {what}; give at most one a dim")
    return found, faults


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
