"""The command that installs an extra: from the clone at hand, or by name once an index
has the package.
"""

import pytest

from jaxdist.config import extras
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
    for look in (extras.load, extras.require):
        with pytest.raises(
            extras.MissingExtra, match=r"no_such_package is not.*pip install .*\[hf\]"
        ):
            look("no_such_package")
