"""The pages: every file, function and link they name exists; nothing refers to
documents from elsewhere.
"""

import ast
import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist.__main__ import COMMANDS
from jaxdist.data.sources.table import SOURCES
from jaxdist.models import registry
from jaxdist.models.channels import CHANNELS
from jaxdist.models.mixers import MIXERS
from jaxdist.optim.schedule_table import SCHEDULES
from jaxdist.telemetry.loggers import known
from jaxdist.trainer.run_config import full_schema
from support.paths import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("README.md"),
    ]
)
ARCHITECTURE = ROOT / "docs/project/architecture.md"
FOR_CONTRIBUTORS = [
    ARCHITECTURE,
    ROOT / "docs/project/callbacks-and-objectives.md",
    ROOT / "docs/project/recipes-for-changes.md",
]
TEXT = {".py", ".md", ".toml", ".yaml", ".sh", ".ipynb", ".css", ".js", ".txt", ""}
# Notes that people wrote beside the project: a reader of a clone does not have them.
ELSEWHERE = re.compile(
    r"\bDESIGN\b|\bHOUSE\b|\bSTYLE\.md|\bPROSE\.md|\bfacts/\w|\b[Ii]ssues? [0-9]"
)


def files_of_the_project() -> list[Path]:
    folders = (
        "jaxdist",
        "configs",
        "tests",
        "docs",
        "examples",
        "benchmarks",
        "deploy",
        ".ci",
    )
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in TEXT
    ]
    made = ROOT / ".ci" / "env"  # by .ci/run
    kept = [
        f
        for f in files
        if f.is_file() and "__pycache__" not in f.parts and made not in f.parents
    ]
    return [*kept, *ROOT.glob("*.md"), *ROOT.glob("*.toml")]


@functools.cache
def names_in(file: Path) -> set[str]:
    """Returns the functions, classes, "Class.method" and values that a module
    defines.
    """
    found = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(
                    prefix + t.id for t in node.targets if isinstance(t, ast.Name)
                )
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse(file.read_text()).body, "")
    return found


def located(path: str) -> Path | None:
    """Returns the file or folder that a page means: from the root, or below
    jaxdist/.
    """
    return next((p for p in (ROOT / path, ROOT / "jaxdist" / path) if p.exists()), None)


def test_what_the_pages_for_contributors_name_exists():
    quoted = []
    for page in FOR_CONTRIBUTORS:
        found = re.findall(
            r"`([\w./]+\.(?:py|txt|md|toml)|[\w./]+/)(?::([\w., ]+))?`",
            page.read_text(),
        )
        assert len(found) > 10, page
        quoted += found
    assert len(quoted) > 60
    assert sum(bool(names) for _, names in quoted) > 30
    faults = []
    for path, names in quoted:
        file = located(path)
        if file is None:
            faults.append(path)
        else:
            faults += [
                f"{path}:{name}"
                for name in re.split(r", ?", names)
                if name and name not in names_in(file)
            ]
    assert not faults, f"pages in docs/project name what is not there: {faults}"


def test_the_architecture_page_draws_all_folders():
    page = ARCHITECTURE.read_text()
    folders = {
        path.name
        for path in (ROOT / "jaxdist").iterdir()
        if (path / "__init__.py").is_file()
    }
    assert len(folders) > 15
    assert not [name for name in folders if not re.search(rf"^ *{name}/ ", page, re.M)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    links = [
        link
        for link in re.findall(r"\]\(([^)#]+)", text)
        if not re.match(r"https?:", link)
    ]
    links += [
        f"{ROOT}/{path}"
        for path in re.findall(
            r"`((?:docs|tests|benchmarks|jaxdist)/[\w/.]+\.\w+)`", text
        )
    ]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_pages_that_the_code_names_exist():
    """Messages, help and comments send a reader to them."""
    places = [ROOT / "jaxdist", ROOT / "examples", ROOT / "deploy", ROOT / "configs"]
    named = {
        (file.relative_to(ROOT).as_posix(), page)
        for file in files_of_the_project()
        if any(place in file.parents for place in places)
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", file.read_text())
    } - {("jaxdist/hardware/published.py", "docs/reference/models/tiering.md")}
    assert len(named) > 10
    assert not [place for place in named if not (ROOT / place[1]).is_file()]


# page of docs -> the table whose names it explains
EXPLAINED = {
    "how-to/watch-and-log.md": known.LOGGERS,
    "how-to/data-formats.md": SOURCES,
    "how-to/optimizers.md": SCHEDULES,
    "how-to/transformer.md": MIXERS,
    "how-to/experts.md": CHANNELS,
}


@pytest.mark.parametrize("page", EXPLAINED)
def test_each_name_of_a_table_is_on_the_page_that_explains_it(page):
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text())
    words = {word for span in spans for word in re.findall(r"\w+", span)}
    missing = EXPLAINED[page].keys() - words
    assert not missing, f"say in docs/{page} what these are"


GENERATED = runpy.run_path(str(ROOT / "docs/generate.py"))


def test_pages_from_the_code_are_written_anew():
    pages = GENERATED["pages"]()
    keys = pages["reference/config-keys.md"]
    entry = "### train.steps\n\nOptimizer updates\n\n`int >= 1` · default `1000` · may change"
    assert entry in keys
    assert keys.count("may change on resume ·") > 50
    assert pages["reference/commands.md"].count("usage: ") > len(COMMANDS)
    assert "### jaxdist.fit\n" in pages["reference/python-api.md"]
    assert "`h100`" in pages["reference/hardware.md"]
    if sys.version_info >= (3, 13):  # argparse writes flags otherwise there
        del pages["reference/commands.md"]
    old = [n for n, page in pages.items() if (ROOT / "docs" / n).read_text() != page]
    assert not old, "run python docs/generate.py"


def test_each_key_links_to_a_page_that_explains_it():
    explained = GENERATED["pages_of_keys"]()
    keys = full_schema(registry.DEFAULT_TARGET)
    assert len(keys) > 150
    assert not [key for key in keys if key not in explained]


def test_pages_and_messages_install_from_a_clone():
    """No index has the package yet: one module says so, for the day that one has it."""
    files = {*PAGES, *files_of_the_project()} - {Path(__file__)}
    wrong = re.compile(r"pip install.{0,20}jaxdist(\[|\s|\"|@)|URL-OF")
    named = {
        file.name
        for file in files
        if file.is_file() and wrong.search(file.read_text(errors="replace"))
    }
    assert named == {"extras.py", "test_extras.py"}
    assert 'pip install -e ".[text]"' in (ROOT / "README.md").read_text()


def test_each_name_in_the_lists_of_fast_tests_is_one_of_a_test(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    files = {
        file.relative_to(ROOT / "tests").as_posix(): file
        for file in (ROOT / "tests").rglob("test_*.py")
    }
    fast = [name for name in files if name.startswith(conftest.FAST)]
    assert len(fast) > 30
    unused = [
        beginning
        for beginning in conftest.FAST
        if not any(name.startswith(beginning) for name in fast)
    ]
    assert unused == []
    text = "".join(files[name].read_text() for name in fast)
    assert [n for n in conftest.NOT_FAST if f"def {n}(" not in text] == []


@pytest.mark.slow
def test_the_fast_tests_are_most_of_the_unit_tests():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "fast"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    counted = re.search(r"(\d+)(/\d+)? tests collected", done.stdout)
    assert counted, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(counted[1]) > 500


def test_nothing_refers_to_documents_outside_the_project():
    files = [file for file in files_of_the_project() if file != Path(__file__)]
    assert len(files) > 300
    faults = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for file in files
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert not faults, "\n".join(faults)
