"""The command that installs an extra: from the clone at hand, or by name once an index
has the package.
"""

import pytest

from jaxdist.config import extras
from jaxdist.config.late_imports import LATE_IMPORTS, LateImport
from support.paths import ROOT


def test_an_extra_is_installed_from_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("hf") == f'pip install -e "{ROOT}[hf]"'
    monkeypatch.chdir(ROOT)
    assert extras.install_command("hf") == 'pip install -e ".[hf]"'
    monkeypatch.setattr(extras, "_CLONE", tmp_path)  # installed otherwise
    assert (
        extras.install_command("hf") == 'pip install -e ".[hf]" in a clone of jaxdist'
    )
    monkeypatch.setattr(extras, "PUBLISHED", True)
    assert extras.install_command("hf") == 'pip install "jaxdist[hf]"'


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
