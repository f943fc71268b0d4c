"""A release: its script, what it builds, and the images that install it.

The slow tests run `.ci/release`, which installs the wheel in a fresh environment outside
of the clone and trains there; then the RUN lines of the Dockerfiles, each in a fresh
environment. Both install from the package index. Without one the wheel takes its
dependencies from the environment of the tests, and the Dockerfiles are skipped.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from support import promise
from support.paths import ROOT

SCRIPT = ROOT / ".ci" / "release"
IMAGES = ("cpu", "cuda", "tpu")
# The only lines of the Dockerfiles that are executed nowhere: they need root.
NEED_ROOT = (
    "useradd --uid 1000 --create-home jaxdist && install -d -o jaxdist -g jaxdist /runs",
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def dockerfile(image: str) -> Path:
    return ROOT / "deploy" / f"Dockerfile.{image}"


def instructions(image: str) -> Iterator[tuple[str, str]]:
    """Yields (instruction, its words), without comments."""
    for line in dockerfile(image).read_text().splitlines():
        if line and line[0] != "#":
            name, _, words = line.partition(" ")
            yield name, words


@functools.cache
def reaches_an_index() -> bool:
    ask = [sys.executable, "-m", "pip", "index", "versions", "annotated-types"]
    return subprocess.run(ask, capture_output=True).returncode == 0


def environment(**others: str) -> dict[str, str]:
    """Returns this process's, without what says where Python finds modules."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return kept | others


# --- the Dockerfiles, read ------------------------------------------------------------


def test_each_dockerfile_is_read_here():
    found = {path.name for path in (ROOT / "deploy").glob("Dockerfile*")}
    assert found == {dockerfile(image).name for image in IMAGES}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_a_pinned_base_and_no_root(image):
    lines = list(instructions(image))
    names = [name for name, _ in lines]
    assert lines[:2] == [("ARG", lines[0][1]), ("FROM", "${BASE}")]
    base = re.fullmatch(r"BASE=python:(3\.\d+)\.\d+-slim-\w+", lines[0][1])
    assert base, "a bare name with a whole version: no registry, no `latest`"
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    tested = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert base[1] in tested
    user = dict(lines)["USER"]
    assert user not in ("root", "0")
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")
    assert f"useradd --uid 1000 --create-home {user} " in NEED_ROOT[0]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_at_its_head_that_none_was_built(image):
    text = dockerfile(image).read_text()
    head = text[: text.index("ARG")]
    assert "No image was built from this file" in head
    assert f"docker build -f deploy/Dockerfile.{image} -t jaxdist:{image} dist" in head
    runs = [words for name, words in instructions(image) if name == "RUN"]
    assert set(NEED_ROOT) < set(runs)
    assert not any("apt-get" in run for run in runs)


@pytest.mark.parametrize("image", IMAGES)
def test_the_extras_of_an_image_are_declared(image):
    (chosen,) = (
        words.removeprefix("EXTRAS=")
        for name, words in instructions(image)
        if words.startswith("EXTRAS=")
    )
    assert {*chosen.split(",")} <= EXTRAS.keys()
    assert (image in chosen.split(",")) == (image != "cpu")


def test_jobsets_name_an_image_that_has_a_dockerfile():
    for name, image in (("jobset.yaml", "cuda"), ("jobset_tpu.yaml", "tpu")):
        text = (ROOT / "deploy" / name).read_text()
        assert f"image: REGISTRY/jaxdist:{image}\n" in text
        assert f"deploy/{dockerfile(image).name}" in text
        assert "{runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000}" in text


# --- the script, run ------------------------------------------------------------------


def release(*words: object, **others: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, *map(str, words)],
        env=environment(PYTHON=sys.executable, **others),
        capture_output=True,
        text=True,
    )


def test_a_tag_of_another_version_is_refused(tmp_path):
    done = release("v9.9.9", tmp_path / "dist")
    assert done.returncode == 1
    assert f"error: the tag is v9.9.9, and pyproject.toml says {promise.version()}" in (
        done.stderr
    )
    assert not (tmp_path / "dist").exists()


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Returns the folder of a release that was built and tried."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    others = {}
    if not reaches_an_index():
        others["TRIAL_PACKAGES"] = sysconfig.get_path("purelib")
    done = release("", folder, **others)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder.parent / "said").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_a_release_has_its_files(dist):
    version = promise.version()
    wheel, sdist = f"jaxdist-{version}-py3-none-any.whl", f"jaxdist-{version}.tar.gz"
    names = {wheel, sdist, "constraints.txt", "SHA256SUMS", "NOTES.md"}
    assert {path.name for path in dist.iterdir()} == names
    sums = dict(
        reversed(line.split())
        for line in (dist / "SHA256SUMS").read_text().splitlines()
    )
    assert sums.keys() == names - {"SHA256SUMS", "NOTES.md"}
    for name, digest in sums.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    section = promise.sections((ROOT / "CHANGELOG.md").read_text())[version]
    assert (dist / "NOTES.md").read_text().strip() == section.strip()
    metadata = zipfile.ZipFile(dist / wheel).read(
        f"jaxdist-{version}.dist-info/METADATA"
    )
    assert f"\nVersion: {version}\n" in metadata.decode()
    pins = (dist / "constraints.txt").read_text().splitlines()
    assert len(pins) > 50
    assert all(
        re.match(r"[\w.-]+(\[[\w,-]+\])?==[\w.]+( ;.*)? ?$", pin) for pin in pins
    )


@pytest.mark.slow
def test_the_wheel_trains_outside_of_the_clone(dist):
    said = (dist.parent / "said").read_text()
    assert str(ROOT) not in said.partition("== the wheel in a fresh environment")[2]
    assert re.search(r"step 6/6 .* loss \d", said)
    assert re.search(r"step 8/8 .* loss \d", said), "the second command resumes"
    assert "report: runs/example/report.html" in said
    assert "\ndef " in said  # generate begins with its prompt
    collected = re.search(r"(\d+)(/\d+)? tests? (collected|selected)", said)
    assert collected
    assert int(collected[1]) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_the_lines_of_a_dockerfile_run(image, dist, tmp_path):
    """Root's lines aside: NEED_ROOT. The folder and the environment are emulated."""
    if not reaches_an_index():
        pytest.skip("no package index: nothing to install from")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "base"], check=True)
    here, variables, ran = tmp_path, {}, []
    for name, words in instructions(image):
        if name in ("ARG", "ENV"):
            variables |= dict(pair.split("=", 1) for pair in words.split())
        elif name == "WORKDIR":
            here = tmp_path / words.strip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *patterns, target = words.split()
            for pattern in patterns:
                (copied,) = dist.glob(pattern)
                (here / target / copied.name).write_bytes(copied.read_bytes())
        elif name == "RUN" and words not in NEED_ROOT:
            said = in_image(["/bin/sh", "-c", words], tmp_path, here, variables)
            ran.append(words)
        elif name == "CMD":
            said = in_image(json.loads(words), tmp_path, here, variables)
            assert said.startswith("usage: jaxdist COMMAND")
        else:
            assert name in ("FROM", "USER", "RUN"), name
    assert len(ran) == 2
    site = tmp_path / "base" / "lib" / f"python3.{sys.version_info.minor}"
    plugins = {"cuda": "jax_cuda13_plugin", "tpu": "libtpu"}
    for other, package in plugins.items():
        assert (site / "site-packages" / package).exists() == (other == image)
    shutil.rmtree(tmp_path / "base")  # gigabytes of GPU libraries


def in_image(
    command: list[str], root: Path, folder: Path, variables: Mapping[str, str]
) -> str:
    """Runs a command of a Dockerfile, and returns what it printed."""
    path = f"{root / 'base' / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(**{**variables, "PATH": path, "HOME": str(root)}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
