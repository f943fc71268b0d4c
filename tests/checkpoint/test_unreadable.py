"""Checkpoints that should be there and cannot be read: no run begins anew in silence."""

import errno
import os
from pathlib import Path

import pytest

from jaxdist import train
from jaxdist.checkpoint import folders
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.trainer import exit_code
from support.runs import TINY

pytestmark = pytest.mark.usefixtures("shared_steps")

ANEW = "or start a new run with another --workdir"


def code_of(workdir: Path, **changes) -> int:
    settings = TINY | {"train.steps": 6} | changes
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    words = ["--config", "quickstart", "--workdir", str(workdir), *flags]
    return exit_code.exit_code(lambda: train.main(words))


@pytest.mark.parametrize("name", ["checkpoints", "quarantine"])
def test_a_file_in_the_place_of_checkpoints_is_77(tmp_path, capsys, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("")
    assert code_of(tmp_path / "run") == 77
    error = capsys.readouterr().err
    assert f"{name} cannot be read (Not a directory)" in error
    assert ANEW in error
    assert (tmp_path / "run" / name).read_text() == ""
    assert not (tmp_path / "run" / "config.json").exists()


def refusing(monkeypatch, place: Path) -> None:
    """Lets the file system refuse to list a folder: tests may run as root."""
    real = os.listdir

    def listdir(path="."):
        if Path(path) == place:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)


@pytest.mark.parametrize("listed", [folders.list_steps, folders.has_steps])
def test_a_folder_that_is_refused_is_no_empty_one(tmp_path, monkeypatch, listed):
    place = tmp_path / "checkpoints"
    (place / "5").mkdir(parents=True)
    refusing(monkeypatch, place)
    with pytest.raises(CheckpointError, match=f"Permission denied.*{ANEW}"):
        listed(place)
    assert CheckpointError.exit_code == 77


def test_a_step_that_is_refused_counts_as_torn(tmp_path, monkeypatch):
    place = tmp_path / "checkpoints"
    (place / "5").mkdir(parents=True)
    real = Path.is_file

    def is_file(path):
        if path.parent.parent == place / "5":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert folders.list_steps(place) == []
    assert folders.all_steps(place) == [5]
    assert folders.has_steps(place)


def test_a_folder_that_is_not_there_has_no_steps(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "none", tmp_path / "file" / "checkpoints"):
        assert folders.list_steps(place) == []
        assert not folders.has_steps(place)
