"""The events that the package writes, read from its source."""

import ast
import functools

from support.paths import ROOT

# Functions that write an event take its name first; where they hand one on, the name is
# no literal.
EMITTERS = {"event", "_event", "report", "_report"}


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Returns (file below jaxdist, name of the function without its object, call) of
    every call.
    """
    found = []
    for file in sorted((ROOT / "jaxdist").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                found.append(
                    (file.relative_to(ROOT / "jaxdist").as_posix(), name, node)
                )
    return found


def literal(call: ast.Call) -> object:
    return (
        call.args[0].value
        if call.args and isinstance(call.args[0], ast.Constant)
        else None
    )


def events_in_code() -> set[str]:
    """Returns the names of all events that the package writes."""
    names = {literal(call) for _, emits, call in calls() if emits in EMITTERS}
    return {name for name in names if isinstance(name, str)}
