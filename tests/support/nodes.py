"""The size of the package, in nodes of Python's syntax tree.

Nodes are names, calls, constants and statements, those inside f-strings too. Docstrings,
comments, layout and line length count nothing, so that nobody packs code to stay small.
"""

import ast
from collections import Counter
from pathlib import Path

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# They come with every name, operation or import, and differ between interpreters.
_NOT_COUNTED = (
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.FormattedValue,
    ast.alias,
)


def count_nodes(tree: ast.AST) -> int:
    """Counts the nodes of a syntax tree, without its docstrings."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            statement = node.body[0]
            docstrings |= {statement, statement.value}
    return sum(
        not isinstance(node, _NOT_COUNTED) and node not in docstrings
        for node in ast.walk(tree)
    )


def nodes_by_room(package: Path) -> dict[str, int]:
    """Counts the nodes of each folder of a package; files at its top are "commands"."""
    rooms: Counter[str] = Counter()
    for file in sorted(package.rglob("*.py")):
        folders = file.relative_to(package).parts[:-1]
        if folders and folders[0].startswith("_"):  # of a wheel, such as _configs
            continue
        room = folders[0] if folders else "commands"
        rooms[room] += count_nodes(ast.parse(file.read_text()))
    return dict(rooms)
