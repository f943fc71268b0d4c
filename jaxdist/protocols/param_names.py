"""Logical names of parameters, from the model, from flax, or from config rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from flax import nnx

from jaxdist.config import suggest
from jaxdist.config.patterns import is_found, pattern_faults
from jaxdist.protocols.dim_names import (
    DIM_NAMES,
    STACKS,
    Names,
    in_stack,
    unknown_names,
)


@dataclass(frozen=True)
class ShardingConfig:
    """Options that name the dims of parameters whose model has no names."""

    # (path regex, "name or None for each dim"); the first match wins
    rules: tuple[tuple[str, str], ...] = ()

    def faults(self) -> Iterator[str]:
        """Yields a message for each pattern that cannot be used."""
        yield from pattern_faults("sharding.rules", [rule for rule, _ in self.rules])


def name_parameters(
    model: nnx.Module, rules: Sequence[tuple[str, str]], *, staged: bool
) -> tuple[dict[str, Names], list[str]]:
    """Names the dims of all parameters, and writes the names to the parameters.

    The names are those of the first rule that matches the path, otherwise those of the
    model or of flax's annotations. A rule names all dims, also stack dims ("layers").
    The result lacks stack dims, because a layer that reads its parameter sees only the
    others. Parameters without names in stacks of a staged model get None for each dim
    after the first.

    Args:
      model: may be abstract; ops read the names from its parameters.
      rules: (path regex, names of all dims).
      staged: whether the model is staged.

    Returns:
      path -> logical names, () for none; and the faults of rules and names.
    """
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    parameters = {"/".join(map(str, path)): variable for path, variable in flat}
    parsed = [(pattern, _parse_names(text)) for pattern, text in rules]
    names_by_path = {}
    faults = list(_rule_faults(parsed, parameters))
    unknown: dict[str, list[str]] = {}  # paths of parameters by unknown name
    for path, variable in parameters.items():
        names = _model_names(path, variable, staged)
        dims = tuple(variable.get_value().shape)
        number = _rule_number(path, parsed)
        if number is not None:
            pattern, rule_names = parsed[number]
            stack = max(0, len(dims) - len(names)) if names else 0
            fault = _misfit(pattern, rule_names, path, dims=dims, stack=stack)
            if fault:
                faults.append(fault)
            else:
                names = _without_stack(rule_names[stack:])
        elif variable.get_metadata().get("logical"):
            for name in unknown_names(names):
                unknown.setdefault(name, []).append(path)
        if number is None and len(names) > len(dims):
            faults.append(
                f"{path}: {len(names)} logical names {names} for its {len(dims)} dims "
                f"{dims}; give at most one a dim"
            )
        names_by_path[path] = names
        variable.set_metadata(logical=names)
    faults += map(_unknown_fault, unknown, unknown.values())
    return names_by_path, faults


def _unknown_fault(name: str, paths: Sequence[str]) -> str:
    """Formats the fault of a logical name that the model's parameters may not have."""
    others = ""
    if len(paths) > 1:
        others = f" and {len(paths) - 1} more"
    return f"{paths[0]}{others}: {_no_such_dim(name)}; None is a dim without a name"


def _no_such_dim(name: str) -> str:
    hint = suggest(name, DIM_NAMES)
    return f"no dim is called {name!r}.{hint} There are: {', '.join(DIM_NAMES)}"


def _misfit(
    pattern: str,
    rule_names: Names,
    path: str,
    *,
    dims: tuple[int, ...],
    stack: int,
) -> str:
    """Explains why the names of a rule do not fit a parameter; "" if they do.

    Args:
      pattern: pattern of the rule.
      rule_names: names of all dims.
      path: path of the parameter.
      dims: sizes of the parameter's dims.
      stack: number of leading stack dims.
    """
    rule = f"sharding.rules: {pattern!r} gives"
    what = f"its {len(dims)} dims {dims}"
    if len(rule_names) != len(dims):
        return (
            f"{rule} {path} {len(rule_names)} names for {what}; give each one, or None"
        )
    for name in rule_names[:stack]:
        if name not in ("layers", None):
            return (
                f"{rule} a stack dim of {path} {what} the name {name}; call it layers"
            )
    return ""


def _parse_names(text: str) -> Names:
    return tuple(None if name == "None" else name for name in text.split())


def _model_names(path: str, variable: nnx.Variable[Any], staged: bool) -> Names:
    """Reads the names that the model or flax gave, without those of stack dims."""
    metadata = variable.get_metadata()
    names = (
        metadata.get("logical")
        or metadata.get("out_sharding")
        or metadata.get("sharding_names")
        or ()
    )
    if not names and staged and in_stack(path):
        dims: int = variable.get_value().ndim
        return (None,) * (dims - 1)
    return _without_stack(
        tuple(name if isinstance(name, str) else None for name in names)
    )


def _without_stack(names: Names) -> Names:
    return tuple(dropwhile(lambda name: name in STACKS, names))


def _rule_number(path: str, rules: Sequence[tuple[str, Names]]) -> int | None:
    """Finds the number of the first rule that matches a path, if any."""
    for number, (pattern, _) in enumerate(rules):
        if is_found(pattern, path):
            return number
    return None


def _rule_faults(
    rules: Sequence[tuple[str, Names]], paths: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a message for each rule that is never used, and each unknown name."""
    used = {_rule_number(path, rules) for path in paths}
    for number, (pattern, names) in enumerate(rules):
        if number not in used:
            some = ", ".join(list(paths)[:8])
            yield f"sharding.rules: {pattern!r} matches no parameter that earlier rules leave; there are: {some}"
        for name in set(names) - {*DIM_NAMES, None}:
            yield f"sharding.rules: {pattern!r}: {_no_such_dim(str(name))}"
