"""Files for those who come: workflows, hooks, templates, citation, types, and what a
wheel and an sdist hold.
"""

import re
import runpy
import subprocess
import tomllib

import pytest
import yaml
from hatchling.builders.plugin.interface import BuilderInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from support.paths import ROOT

YAML = [
    ".github/workflows/ci.yml",
    ".github/workflows/release.yml",
    ".github/dependabot.yml",
    ".github/ISSUE_TEMPLATE/bug.yml",
    ".github/ISSUE_TEMPLATE/config.yml",
    ".github/ISSUE_TEMPLATE/feature.yml",
    ".pre-commit-config.yaml",
    "CITATION.cff",
]


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", YAML)
def test_yaml_can_be_read(name):
    assert isinstance(read(name), dict)


def test_every_yaml_file_for_contributors_is_read_here():
    found = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob(".github/**/*.yml")
    }
    assert found == {name for name in YAML if name.startswith(".github")}


def test_the_workflow_runs_the_same_check_on_the_oldest_and_a_new_python():
    job = read(".github/workflows/ci.yml")["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run python"]


def test_a_tag_runs_the_check_and_the_release_and_only_then_attaches_files():
    workflow = read(".github/workflows/release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    jobs = workflow["jobs"]
    assert list(jobs) == ["build", "publish"]
    check = read(".github/workflows/ci.yml")["jobs"]["check"]
    pythons = jobs["build"]["strategy"]["matrix"]["python"]
    assert pythons == check["strategy"]["matrix"]["python"]
    assert [step["run"] for step in jobs["build"]["steps"] if "run" in step] == [
        ".ci/run python",
        '.ci/release "$GITHUB_REF_NAME"',
    ]
    assert jobs["publish"]["needs"] == "build"
    names = [step.get("with", {}).get("name") for step in jobs["publish"]["steps"]]
    assert names[0] in [f"dist-{python}" for python in pythons]


def test_only_the_step_that_attaches_files_may_write():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = read(".github/workflows/release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["permissions"] == {"contents": "write"}
    *others, attach = jobs["publish"]["steps"]
    assert attach["env"] == {"GH_TOKEN": "${{ github.token }}"}
    assert attach["run"].startswith('gh release create "$GITHUB_REF_NAME"')
    assert text.count("github.token") == 1
    assert "secrets." not in text
    assert not [step for step in others if "gh " in step.get("run", "")]
    (checkout,) = (
        step
        for step in jobs["build"]["steps"]
        if "actions/checkout" in step.get("uses", "")
    )
    assert checkout["with"]["persist-credentials"] is False


def test_the_files_that_are_attached_are_those_that_the_release_makes():
    attach = read(".github/workflows/release.yml")["jobs"]["publish"]["steps"][-1]
    made = re.findall(r'>"\$dist/([\w.]+)"', (ROOT / ".ci/release").read_text())
    assert sorted(made) == ["NOTES.md", "constraints.txt"]
    named = re.findall(r"dist/(\S+)", attach["run"])
    assert named == ["NOTES.md", "*.whl", "*.tar.gz", "constraints.txt", "SHA256SUMS"]


def test_hooks_run_what_the_check_runs():
    hooks = [
        hook["entry"].split(" --")[0]
        for repository in read(".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]
    ]
    assert hooks == ["ruff check", "ruff format", "mypy"]
    check = (ROOT / ".ci/run").read_text()
    assert all(f'"$bin/{hook.split()[0]}"' in check for hook in hooks)


def test_the_citation_is_of_this_version_and_license():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = read("CITATION.cff")
    assert citation["title"].startswith(f"{project['name']}: ")
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]


def test_the_package_ships_its_types():
    assert (ROOT / "jaxdist/py.typed").is_file()


@pytest.mark.parametrize(
    "name",
    ["CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"],
)
def test_files_that_pages_for_contributors_name_exist(name):
    text = (ROOT / name).read_text()
    paths = re.findall(
        r"`((?:docs|tests|benchmarks|jaxdist|\.ci)/[\w./-]+|\w+\.md|\w+\.toml)`", text
    )
    linked = re.findall(r"\]\(([^)#:]+)[)#]", text)
    assert paths or linked
    assert not [path for path in {*paths, *linked} if not (ROOT / path).exists()]


def test_the_picture_of_the_folders_is_drawn_and_shows_all_of_them():
    drawn = runpy.run_path(str(ROOT / "docs/images/architecture.py"))["draw"]()
    written = (ROOT / "docs/images/architecture.svg").read_text()
    assert written == drawn, "run python docs/images/architecture.py"
    folders = {file.parent.name for file in (ROOT / "jaxdist").glob("*/__init__.py")}
    assert len(folders) > 15
    shown = set(re.findall(r"\w+", re.sub(r"<[^>]*>", " ", drawn)))
    assert folders <= shown


def files_in(builder: type[BuilderInterface]) -> set[str]:
    """Lists the files of a wheel or an sdist, without building it."""
    files = builder(str(ROOT)).recurse_included_files()
    return {file.distribution_path for file in files}


@pytest.mark.parametrize("folder", ["configs", "examples", "deploy"])
def test_a_wheel_holds_the_folders_that_pages_name(folder):
    place = f"jaxdist/_{folder}/"
    held = {
        path.removeprefix(place)
        for path in files_in(WheelBuilder)
        if path.startswith(place)
    }
    expected = {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected
    assert held == expected


def test_an_sdist_holds_all_that_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository: this is an sdist or an archive")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    tracked = set(listing.stdout.split("\0")) - {""}
    assert "tests/test_project_files.py" in tracked
    added_by_every_build = {"pyproject.toml", ".gitignore"}
    assert tracked - added_by_every_build <= files_in(SdistBuilder)
