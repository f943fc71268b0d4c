"""The promise of docs/project/versions.md, clause by clause."""

import ast
import json
import re
import shutil
import tomllib

import pytest
import yaml

import jaxdist
from jaxdist import load_run
from jaxdist.checkpoint import __main__ as checkpoint
from jaxdist.storage import run_format
from support import promise, released_run
from support.paths import DOCS, GOLDEN, ROOT
from support.runs import losses

PAGE = DOCS / "project" / "versions.md"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the tables below a heading of the page, without heads."""
    section = re.split(r"\n##+ ", PAGE.read_text().partition(f"# {heading}\n")[2])[0]
    lines = [line for line in section.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[2:]


# --- the version ----------------------------------------------------------------------


def test_one_version():
    version = promise.version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert jaxdist.__version__ == version
    assert citation["version"] == version
    assert next(iter(promise.sections(CHANGELOG))) == version


def test_the_changelog_is_short():
    newest = next(iter(promise.sections(CHANGELOG).values()))
    assert len(newest.encode()) <= 4096


# --- what is promised -----------------------------------------------------------------


def test_commands_and_runs_write_what_is_promised(tmp_path):
    found = promise.written_lines(tmp_path)
    assert {"json status.state", "json plan.fits", "file run.json"} <= set(found)
    assert (GOLDEN / promise.WRITTEN).read_text().splitlines() == found, (
        "run python tests/support/goldens.py, and read the difference"
    )


def test_the_page_lists_the_promised_ops():
    shown = {
        row[0].strip("`"): tuple(re.findall(r"`(\w+)`", row[1])) for row in rows("Ops")
    }
    assert shown == promise.OPS


def test_promised_members_of_results_are_documented():
    pages = "\n".join(page.read_text() for page in (DOCS / "how-to").glob("*.md"))
    for result, names in promise.RESULTS.items():
        missing = [name for name in names if not re.search(rf"[.`]{name}\b", pages)]
        assert not missing, result.__name__


def test_the_page_names_the_golden_files():
    shown = set(re.findall(r"`(\w+\.txt)`", PAGE.read_text()))
    assert shown == {promise.KEYS, promise.INTERFACE, promise.WRITTEN}


# --- between two releases -------------------------------------------------------------


def test_the_released_promise_is_of_this_minor_or_an_earlier_one():
    version, lines = promise.released()
    assert promise.minor(version) <= promise.minor(promise.version())
    assert version.endswith(".0"), "written by the first release of a minor version"
    assert len(lines) > 500
    assert {line.split()[0] for line in lines} == {
        *("argument", "command", "event", "exit", "extra", "field", "file", "flag"),
        *("format", "json", "key", "name", "needs"),
    }


def test_this_version_keeps_the_released_promise():
    found = promise.breaks(
        promise.released(), (promise.version(), promise.promised()), CHANGELOG
    )
    assert not found, (
        "\n".join(found) + "\nIf this version is not released yet and is a new minor "
        "one: python tests/support/goldens.py --release"
    )


OLD = [
    "name jaxdist.fit",
    "argument jaxdist.fit.seed keyword-only = 0",
    "exit 75 preempted",
    "key train.steps int >= 1 = 1000 (may change on resume)",
    "needs jax >=0.10.2",
]
LOG = """# Changelog

## 0.3.0

### Removed

- `jaxdist.fit.seed`: set `seed` in `settings`.

### Changed

- `train.steps` is 500 by default.

## 0.2.1

### Fixed

- A fault.

## 0.2.0

### Deprecated

- `jaxdist.fit.seed`
"""


def broken(*, to: str, without: str = "", also: str = "", log: str = LOG) -> list[str]:
    new = [line for line in OLD if not without or without not in line]
    return promise.breaks(("0.2.0", OLD), (to, [*new, *([also] if also else [])]), log)


@pytest.mark.parametrize("to", ["0.2.1", "0.3.0", "1.0.0"])
def test_nothing_breaks_if_nothing_changes(to):
    assert broken(to=to) == []


SEED = "jaxdist.fit.seed"
LONGER = "key train.steps int >= 1 = 500 (may change on resume)"
NEWER = "needs jax >=0.12"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # a patch
        ({"to": "0.2.1", "without": SEED}, "argument jaxdist.fit.seed went in a patch"),
        ({"to": "0.2.1", "also": "exit 79 new"}, "exit 79 came in a patch"),
        (
            {"to": "0.2.1", "without": "key train.steps", "also": LONGER},
            "key train.steps changed in a patch",
        ),
        (
            {"to": "0.2.1", "without": "needs jax", "also": NEWER},
            "needs jax changed in a patch",
        ),
        # a minor release
        (
            {"to": "0.3.0", "without": "exit 75"},
            "exit 75 went, and no earlier minor release names it under Deprecated",
        ),
        ({"to": "0.3.0", "without": "exit 75"}, "exit 75 went: name it under Removed"),
        (
            {"to": "0.3.0", "without": "needs jax", "also": NEWER},
            "needs jax changed: name it under Changed",
        ),
        (
            # announced by the release that removes it: too late
            {"to": "0.2.5", "without": SEED, "log": LOG.replace("0.3.0", "0.2.5")},
            "argument jaxdist.fit.seed went in a patch",
        ),
        (
            {"to": "0.3.0", "without": SEED, "log": LOG.replace("Deprecated", "Added")},
            "no earlier minor release names it",
        ),
    ],
)
def test_what_breaks_the_promise(change, said):
    assert any(said in sentence for sentence in broken(**change))


def test_a_minor_release_may_add_change_what_it_names_and_remove_what_was_deprecated():
    assert broken(to="0.3.0", also="exit 79 new") == []
    assert broken(to="0.3.0", without="key train.steps", also=LONGER) == []
    assert broken(to="0.3.0", without=SEED) == []


# --- a run of the released version ----------------------------------------------------


@pytest.fixture
def released(tmp_path):
    """Returns a copy of the run that the last minor release left."""
    version, _ = promise.released()
    name = ".".join(map(str, promise.minor(version)))
    assert {path.name for path in released_run.FOLDER.iterdir()} == {name}, (
        "one run: that of the last minor release"
    )
    return shutil.copytree(released_run.FOLDER / name, tmp_path / name)


def test_a_run_of_the_released_version_resumes(released):
    version, lines = promise.released()
    if f"format files {run_format.FORMAT}" not in lines:
        assert promise.minor(version) < promise.minor(promise.version())
        pytest.skip("a new minor version with another format: test_other_version.py")
    expected = json.loads((released / released_run.LOSSES).read_text())
    assert sorted(map(int, expected)) == [5, 6, 7, 8]
    assert not losses(released / "run").keys() & {5, 6, 7, 8}
    assert released_run.train(released) == 0
    found = losses(released / "run")
    assert found[5] < found[1] - 0.05, "it begins where the run was"
    for step, loss in expected.items():
        assert found[int(step)] == pytest.approx(loss, rel=1e-4)


def test_a_run_of_the_released_version_is_read(released, capsys):
    if f"format files {run_format.FORMAT}" not in promise.released()[1]:
        pytest.skip("a new minor version with another format: test_other_version.py")
    assert checkpoint.main(["verify", str(released / "run")]) == 0
    run = load_run(released / "run", log=lambda line: None)
    assert run.config.train.steps == released_run.STEPS
    ((sample,),) = run.generate(["def"], max_tokens=2)
    assert sample.text.startswith("def")


# --- the page -------------------------------------------------------------------------


def test_the_page_names_the_versions_that_ci_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floor = project["requires-python"].removeprefix(">=")
    (jax,) = (need for need in project["dependencies"] if need.startswith("jax>="))
    assert (
        f"needs Python {floor} and jax {jax.removeprefix('jax>=')}" in PAGE.read_text()
    )
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    pythons = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    lock = (ROOT / "requirements.lock").read_text()
    pins = re.findall(
        r"^jax==(\S+) ; python_full_version (<|>=) '([\d.]+)'", lock, re.M
    )
    assert len(pins) == 2

    def locked(python: str) -> str:
        minor = int(python.split(".")[1])
        (version,) = (
            version
            for version, side, border in pins
            if (side == "<") == (minor < int(border.split(".")[1]))
        )
        return version

    assert rows("Python and jax") == [[python, locked(python)] for python in pythons]


def test_each_clause_has_a_test_that_exists():
    clauses = rows("Tests of each clause")
    assert len(clauses) >= 10
    for _, named in clauses:
        file, _, name = named.strip("`").partition(":")
        module = ast.parse((ROOT / file).read_text())
        names = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        assert name in names, named
