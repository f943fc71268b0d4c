"""The picture of docs/project/architecture.md, read from the source: order, cycles, lazy
imports, sizes.
"""

import ast
import functools
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdist
from jaxdist.__main__ import COMMANDS
from jaxdist.config import extras
from jaxdist.config.late_imports import LATE_IMPORTS
from support.nodes import count_nodes, nodes_by_room
from support.paths import DATA, GOLDEN, ROOT, SUPPORT, TESTS

PACKAGE = ROOT / "jaxdist"

# A file at the top of the package is a command, a folder is a part; a folder imports
# what stands after it.
ORDER = [
    "commands",
    "planner",
    "verification",
    "operations",
    "evaluation",
    "interop",
    "inference",
    "trainer",
    "models",
    "objectives",
    "step",
    "ops",
    "checkpoint",
    "parallel",
    "optim",
    "data",
    "distributed",
    "protocols",
    "telemetry",
    "hardware",
    "storage",
    "config",
]
MAX_FLOORS = 10  # folders in the longest chain of imports


@functools.cache
def modules() -> dict[str, Path]:
    """Returns `{dotted name below jaxdist: file}`; the package itself is "" and stays
    out.
    """
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and not name.startswith("_configs"):
            found[name] = file
    return found


def folder_of(name: str) -> str:
    """Returns the entry of ORDER that a module belongs to."""
    first = name.partition(".")[0]
    is_command = name.endswith("__main__") or (PACKAGE / f"{first}.py").is_file()
    return "commands" if is_command else first


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Returns (module, name or "") of every import statement, a relative one as (".",
    name).
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." if node.level else node.module or ""
            found += [(module, alias.name) for alias in node.names]
    return found


@functools.cache
def own_imports(name: str) -> set[str]:
    """Returns the modules of ours that a module imports, dotted below jaxdist."""
    found = set()
    for module, item in imports(tree_of(name)):
        assert module != ".", f"{name}: write imports as `from jaxdist import {item}`"
        if module != "jaxdist" and not module.startswith("jaxdist."):
            continue
        below = module.removeprefix("jaxdist").lstrip(".")
        inside = f"{below}.{item}".lstrip(".")
        if inside in modules():
            found.add(inside)
        elif below:
            found.add(below)
        else:
            assert item in ("", "__version__"), (
                f"{name}: import {item} from its own module"
            )
    return found


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@functools.cache
def edges() -> set[tuple[str, str]]:
    """Returns (folder, folder it imports from)."""
    return {
        (folder_of(name), folder_of(target))
        for name in modules()
        for target in own_imports(name)
        if folder_of(name) != folder_of(target)
    }


# The modules that compose core and wings, beside the commands.
ROOTS = {"library"}


def test_only_commands_and_the_library_stand_at_the_top():
    top = {name for name, file in modules().items() if file.parent == PACKAGE}
    assert top == {"__main__", *COMMANDS, *ROOTS} - folders()


def folders() -> set[str]:
    return {
        name.partition(".")[0]
        for name, file in modules().items()
        if file.parent != PACKAGE
    }


def test_the_order_names_each_folder_and_no_other():
    assert len(modules()) > 100
    there = {"commands"} | {folder_of(name) for name in modules()}
    assert there == set(ORDER), f"in one only: {sorted(there ^ set(ORDER))}"


def test_a_folder_imports_only_what_stands_after_it():
    faults = [
        f"{name} ({folder_of(name)}) imports {target} ({folder_of(target)})"
        for name in modules()
        for target in sorted(own_imports(name))
        if ORDER.index(folder_of(target)) < ORDER.index(folder_of(name))
    ]
    assert not faults, "\n".join(faults)


# The core trains. A wing adds to it; commands and the library compose them.
CORE = [
    "config",
    "storage",
    "hardware",
    "distributed",
    "parallel",
    "protocols",
    "models",
    "objectives",
    "ops",
    "step",
    "optim",
    "data",
    "checkpoint",
    "telemetry",
    "trainer",
]
WINGS = {
    "planning": ["planner", "verification"],
    "operations": ["operations"],
    "interop": ["interop", "evaluation", "inference"],
}


@functools.cache
def late_imports_of(name: str) -> set[str]:
    """Returns the modules of LATE_IMPORTS whose names stand in a module as strings."""
    if name == "config.late_imports":
        return set()
    return {
        node.value.removeprefix("jaxdist.")
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Constant) and node.value in LATE_IMPORTS
    }


def test_the_core_imports_no_wing_and_no_wing_another():
    wing_of = {folder: wing for wing, folders in WINGS.items() for folder in folders}
    assert {*CORE, *wing_of, "commands"} == set(ORDER)
    found = [
        f"{name} -> {target}"
        for name in modules()
        if folder_of(name) != "commands"
        for target in sorted(own_imports(name) | late_imports_of(name))
        if folder_of(target) in wing_of
        and wing_of[folder_of(target)] != wing_of.get(folder_of(name))
    ]
    assert not found, "\n".join(["imports across the wall:", *found])


READERS_OF_RUNS = {"commands", "planner", "verification", "evaluation", "trainer"}


def test_what_is_below_the_trainer_takes_the_smallest_config_it_needs():
    """Only these know a whole RunConfig; other parts are given the component's own, or
    values.
    """
    users = {name for name in modules() if "trainer.run_config" in own_imports(name)}
    users |= {
        name for name, file in modules().items() if "RunConfig" in file.read_text()
    }
    assert len(users) > 10
    faults = {name for name in users if folder_of(name) not in READERS_OF_RUNS}
    assert not faults, sorted(faults)


def test_the_house_is_low():
    below = {
        folder: {there for here, there in edges() if here == folder} for folder in ORDER
    }

    def floors(folder: str) -> int:
        return 1 + max(map(floors, below[folder]), default=0)

    assert 3 < floors("commands") <= MAX_FLOORS


def test_a_room_that_grows_says_so():
    """Sizes are nodes of syntax, so that nothing is gained by packing code."""
    written = json.loads((GOLDEN / "nodes.json").read_text())
    rooms = nodes_by_room(PACKAGE)
    assert rooms.keys() == written.keys()
    assert sum(rooms.values()) > 100_000
    grown = {
        room: f"{written[room]} -> {nodes}"
        for room, nodes in rooms.items()
        if nodes > written[room]
    }
    assert not grown, (
        f"{grown}: run python tests/support/goldens.py, and say in the commit what the "
        "nodes are for"
    )


def test_nodes_are_those_of_the_code_alone():
    plain = count_nodes(ast.parse("x = f(1)"))
    assert plain == 6  # module, assignment, two names, call, constant
    assert count_nodes(ast.parse('"""Text."""\nx = f(\n    1\n)  # reason')) == plain
    assert count_nodes(ast.parse("x, y = f(1), 2")) > plain


def test_no_import_cycles():
    graph = {name: own_imports(name) - {name} for name in modules()}
    assert sum(map(len, graph.values())) > 10
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' > '.join(reversed(error.args[1]))}")


def test_no_import_of_jaxdist_inside_a_function():
    faults = [
        f"{name}.{function.name} imports {module}"
        for name in modules()
        for function in functions(tree_of(name))
        for module, _ in imports(function)
        if module.partition(".")[0] in ("jaxdist", ".")
    ]
    assert not faults, "\n".join(faults)


# What may import a module by its name, and which one that is.
IMPORTERS_BY_NAME = {
    "__init__": "the module of an export",
    "__main__": "the module of a command",
    "config.extras": "a module of LATE_IMPORTS",
    "config.files": "the config file that --config names",
    "data.sources.stdlib": "a module of Python",
    "models.registry": "the module that model.target names",
    "ops.experts.tpu": "a module of jax that a function hides",
}
CALLS_BY_NAME = {"import_module", "__import__", "run_module", "run_path", "exec_module"}


def test_modules_are_imported_by_name_in_these_places_alone():
    trees = {name: tree_of(name) for name in modules()}
    trees["__init__"] = ast.parse((PACKAGE / "__init__.py").read_text())
    users = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in CALLS_BY_NAME
    }
    assert users == IMPORTERS_BY_NAME.keys()


SLOW_MS = 20  # that a module adds to a start at least, to be imported late for it


@pytest.mark.parametrize("module", LATE_IMPORTS)
def test_a_late_import_has_a_reason(module):
    late = LATE_IMPORTS[module]
    name = module.removeprefix("jaxdist.")
    assert name in modules()
    users = [user for user in modules() if name in late_imports_of(user)]
    assert users, "nobody loads it: remove its row"
    if late.why == "optional":
        packages = {used.partition(".")[0] for used, _ in imports(tree_of(name))}
        assert late.package in packages & extras.EXTRAS.keys()
        importers = [user for user in modules() if name in own_imports(user)]
        assert not importers, "it is imported without a check of its package"
    else:
        assert late.package not in extras.EXTRAS
        assert late.milliseconds >= SLOW_MS


def test_train_starts_without_late_imports():
    reached: set[str] = set()
    waiting = ["train"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += own_imports(name) & modules().keys()
    assert len(reached) > 100
    late = {module.removeprefix("jaxdist.") for module in LATE_IMPORTS}
    assert not reached & late


def test_an_optional_package_is_imported_by_one_module_at_its_top():
    wrapped = 0
    imported = {
        name: {module.partition(".")[0] for module, _ in imports(tree_of(name))}
        for name in modules()
    }
    for package in extras.EXTRAS:
        users = [name for name in modules() if package in imported[name]]
        assert len(users) <= 1, f"{package} is imported by {users}: wrap it once"
        wrapped += len(users)
        for name in users:
            assert f"jaxdist.{name}" in LATE_IMPORTS, f"{name} is no late import"
            inner = [i for f in functions(tree_of(name)) for i in imports(f)]
            assert not any(
                module.partition(".")[0] == package for module, _ in inner
            ), name
    assert wrapped, "no optional package is imported anywhere"


def test_one_hidden_context():
    calls = [
        f"{name}:{node.lineno}"
        for name in modules()
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("ContextVar", "local")
    ]
    assert [call.partition(":")[0] for call in calls] == ["parallel.execution"], calls


def test_no_drawers():
    names = {part for name in modules() for part in name.split(".")}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_import_jaxdist_is_free():
    heavy = [
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax",
        "grain",
        "rich",
        "numpy",
        "tensorboardX",
        "datasets",
        "transformers",
    ]
    done = run_python(
        "import os, sys; before = dict(os.environ); import jaxdist; dir(jaxdist);"
        "assert dict(os.environ) == before; print(*sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "jaxdist" in loaded
    assert not loaded & set(heavy)
    assert not {name for name in loaded if name.startswith("jaxdist.")}


@pytest.mark.parametrize("name", sorted(jaxdist._EXPORTS))
def test_exports_resolve(name):
    module = jaxdist._EXPORTS[name].removeprefix("jaxdist.")
    assert module in modules(), f"{name}: there is no jaxdist.{module}"
    assert getattr(jaxdist, name).__name__ == name
    # a name never hides a module
    assert name not in {m.partition(".")[0] for m in modules()}


def test_an_unknown_export_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = jaxdist.nope


WITHOUT_JAX = [
    "launch",
    "report",
    "checkpoint.__main__",
    "config",
    "hardware",
    "parallel.axes",
    "trainer.elastic",
    "distributed.cluster",
    "distributed.local_devices",
    "storage.atomic",
    "storage.digest",
    "storage.lock",
]


@pytest.mark.parametrize("name", sorted(WITHOUT_JAX))
def test_these_run_without_jax(name):
    code = "import sys; sys.modules['jax'] = None; import importlib; "
    done = run_python(code + f"importlib.import_module('jaxdist.{name}')")
    assert done.returncode == 0, done.stderr


def test_every_command_is_listed_and_exists():
    built = {
        name.removesuffix(".__main__")
        for name in modules()
        if folder_of(name) == "commands"
    }
    assert set(COMMANDS) == built - {"__main__", *ROOTS}
    assert len(COMMANDS) > 8


def test_the_command_lists_suggests_and_dispatches():
    def jaxdist_command(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "jaxdist", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )

    listed = jaxdist_command()
    assert listed.returncode == 0
    assert "doctor" in listed.stdout
    assert jaxdist_command("--version").stdout.strip() == jaxdist.__version__
    wrong = jaxdist_command("trian")
    assert wrong.returncode == 78
    assert "Did you mean train?" in wrong.stderr


# --- the tests themselves -------------------------------------------------------------


@functools.cache
def modules_of_tests() -> list[Path]:
    """Returns all modules of the tests; tests/data is data, with the programs that made
    it.
    """
    return [file for file in sorted(TESTS.rglob("*.py")) if DATA not in file.parents]


def imported_tests(source: str) -> list[str]:
    """Returns the imports in a source that reach into tests/ elsewhere than in
    support.
    """
    own = {
        ".".join(file.relative_to(TESTS).with_suffix("").parts)
        for file in modules_of_tests()
    }
    own |= {file.stem for file in modules_of_tests() if SUPPORT not in file.parents}
    found = []
    for module, item in imports(ast.parse(source)):
        if module.partition(".")[0] == "support":
            path = TESTS / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), (
                f"there is no {module}"
            )
        elif (
            module.partition(".")[0] in ("", "tests")
            or {module, f"{module}.{item}"} & own
        ):
            found.append(f"{module} {item}".strip())
    return found


def test_what_tests_share_is_in_support():
    test_files = [file for file in modules_of_tests() if SUPPORT not in file.parents]
    other = [
        f.name
        for f in test_files
        if not f.name.startswith("test_") and f.name != "conftest.py"
    ]
    assert len(test_files) > 50
    assert not other, f"move to tests/support: {other}"
    hidden = [
        f.name
        for f in SUPPORT.rglob("*.py")
        if f.name.startswith(("test_", "conftest"))
    ]
    assert not hidden, f"move out of tests/support: {hidden}"


def test_no_module_of_the_tests_imports_a_test_module():
    faults = {file: imported_tests(file.read_text()) for file in modules_of_tests()}
    lines = [
        f"{file.relative_to(TESTS)}: {found}" for file, found in faults.items() if found
    ]
    assert not lines, "\n".join(["share it in tests/support:", *lines])


@pytest.mark.parametrize(
    "source",
    [
        "from test_architecture import imports",
        "import test_architecture",
        "import conftest",
        "from tests.test_architecture import imports",
        "from tests.support.paths import ROOT",
        "from tests import test_architecture",
        "from . import test_architecture",
        "from chaos.test_chaos import KINDS",
        "from chaos import test_chaos",
        "def function():\n    from test_architecture import imports",
    ],
)
def test_an_import_of_a_test_module_would_be_found(source):
    assert imported_tests(source)
    assert not imported_tests(
        "from support.paths import ROOT\nfrom support import models\nimport pytest"
    )
