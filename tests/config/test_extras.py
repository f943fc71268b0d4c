"""The command that installs an extra: from the clone at hand, from the requirements that
a wheel declares, or by name once an index has the package.
"""

import tomllib
from importlib import metadata

import pytest

from jaxdist.config import extras, installation
from jaxdist.config.late_imports import LATE_IMPORTS, LateImport
from support.paths import ROOT

DECLARED = [
    "jax>=0.10.2",
    "datasets>=4.0; extra == 'hf'",
    "pyarrow>=20.0; extra == 'hf'",
    "jax[tpu]>=0.10.2; (sys_platform == 'linux') and extra == 'aot'",
    "jax[cuda12-local]>=0.10.2; (sys_platform == 'linux') and extra == 'aot-gpu'",
]


def test_an_extra_is_installed_from_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("hf") == f'pip install -e "{ROOT}[hf]"'
    monkeypatch.chdir(ROOT)
    assert extras.install_command("hf") == 'pip install -e ".[hf]"'


def test_a_wheel_installs_what_the_extra_requires(monkeypatch):
    monkeypatch.setattr(installation, "clone", lambda: None)
    monkeypatch.setattr(metadata, "requires", lambda name: DECLARED)
    assert extras.install_command("hf") == "pip install 'datasets>=4.0' 'pyarrow>=20.0'"
    assert extras.install_command("aot") == "pip install 'jax[tpu]>=0.10.2'"
    with pytest.raises(extras.MissingExtra, match=r"with: pip install 'datasets>=4.0'"):
        raise extras._missing("pyarrow", extras.install_package("pyarrow"))


def test_a_copied_package_without_metadata_names_a_clone(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "clone", lambda: None)
    monkeypatch.setattr(metadata, "requires", not_installed)
    assert (
        extras.install_command("hf") == 'pip install -e ".[hf]" in a clone of jaxdist'
    )


def test_an_extra_is_installed_by_name_once_an_index_has_the_package(monkeypatch):
    assert not extras.PUBLISHED
    monkeypatch.setattr(extras, "PUBLISHED", True)
    assert extras.install_command("hf") == 'pip install "jaxdist[hf]"'


def test_each_extra_that_messages_name_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.EXTRAS.values()) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("stray", [False, True])
def test_a_wheel_is_no_clone(tmp_path, monkeypatch, stray):
    """Some packages leave a pyproject.toml in site-packages."""
    package = tmp_path / "jaxdist"
    (package / "_configs").mkdir(parents=True)
    (package / "_examples").mkdir()
    if stray:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "_PACKAGE", package)
    assert installation.clone() is None
    assert installation.shipped_folder("configs") == package / "_configs"
    assert installation.shipped_folder("deploy") is None
    assert installation.shipped_file("deploy/slurm.sh") == "deploy/slurm.sh"
    assert installation.shipped_file("examples/a.py") == str(package / "_examples/a.py")


def test_a_clone_has_the_folders_at_its_top():
    assert installation.clone() == ROOT
    for folder in ("configs", "examples", "deploy"):
        assert installation.shipped_folder(folder) == ROOT / folder


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "no_such_package", "hf")
    with pytest.raises(
        extras.MissingExtra, match=r"no_such_package is not.*pip install .*\[hf\]"
    ):
        extras.require("no_such_package")


def test_a_late_import_without_its_package_names_the_command(tmp_path, monkeypatch):
    (tmp_path / "wrapper_of_missing.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(extras.EXTRAS, "no_such_package", "hf")
    monkeypatch.setitem(
        extras.LATE_IMPORTS,
        "wrapper_of_missing",
        LateImport("optional", "no_such_package", 0),
    )
    with pytest.raises(
        extras.MissingExtra, match=r"no_such_package is not.*pip install .*\[hf\]"
    ):
        extras.load("wrapper_of_missing")


def test_load_imports_what_the_list_names_and_nothing_else():
    slow = [module for module, late in LATE_IMPORTS.items() if late.why == "slow"]
    assert extras.load(slow[0]).__name__ == slow[0]
    for other in ("json", "jaxdist.config.files"):
        with pytest.raises(KeyError):
            extras.load(other)
