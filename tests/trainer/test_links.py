"""Links that lead out of a run's folder: refused before anything is written there."""

import os
import shutil

import pytest

from jaxdist.checkpoint import folders
from jaxdist.config import ConfigError
from jaxdist.trainer import workdir
from support.runs import TINY, overrides, refused, run_of

NAMES = [
    "checkpoints",
    "quarantine",
    "profile",
    "tensorboard",
    ".beats",
    "events.jsonl",
    "metrics.jsonl",
    "arrays.jsonl",
    "sample.txt",
    "report.html",
    "huggingface",
]


def tree_of(folder) -> list[tuple[str, bytes]]:
    return sorted(
        (str(path), path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    )


@pytest.fixture
def outside(tmp_path):
    """A folder elsewhere, which looks like one of checkpoints."""
    folder = tmp_path / "outside"
    (folder / "5").mkdir(parents=True)
    (folder / "5" / folders.MANIFEST).write_text("{}")
    (folder / "7.orbax-checkpoint-tmp").mkdir()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_leads_out_is_refused_and_nothing_changes_there(
    tmp_path, outside, name
):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(outside)
    before = tree_of(outside)
    with pytest.raises(ConfigError, match=f"{name} is a link that leads out") as caught:
        workdir.refuse_links(run, run_of("quickstart"))
    assert len(caught.value.faults) == 1
    is_checkpoints = name == "checkpoints"
    assert (f"set checkpoint.folder={outside}" in str(caught.value)) == is_checkpoints
    assert tree_of(outside) == before
    (run / name).unlink()
    workdir.refuse_links(run, run_of("quickstart"))


@pytest.mark.parametrize(
    "place", ["checkpoints/5", "checkpoints/.fetching", "profile/plugins/profile"]
)
def test_links_within_the_run_s_folders_are_refused_too(tmp_path, outside, place):
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{place} is a link"):
        workdir.refuse_links(tmp_path / "run", run_of("quickstart"))


def test_the_command_refuses_all_links_at_once_and_writes_nothing(
    tmp_path, outside, capsys
):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("quarantine", "profile"):
        (run / name).symlink_to(outside)
    before = tree_of(outside)
    words = ["--workdir", str(run), *overrides(*(f"{k}={v}" for k, v in TINY.items()))]
    lines = refused(capsys, "--config", "quickstart", *words)
    assert len([line for line in lines if "is a link that leads out" in line]) == 2
    assert tree_of(outside) == before
    assert sorted(os.listdir(run)) == ["profile", "quarantine"]


def test_links_that_stay_inside_and_a_linked_workdir_are_fine(tmp_path):
    run = tmp_path / "disk" / "run"
    (run / "checkpoints" / "5").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("5")
    (run / "wandb" / "run-1").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run-1")
    # as wandb links each run to its own log
    (run / "wandb" / "run-1" / "debug-core.log").symlink_to(tmp_path / "core.log")
    (run / "notes").symlink_to(tmp_path)  # no name that a run writes
    (tmp_path / "run").symlink_to(run)
    workdir.refuse_links(tmp_path / "run", run_of("quickstart"))
    config = run_of("quickstart", **{"checkpoint.folder": str(tmp_path / "c")})
    (tmp_path / "c").symlink_to(run / "checkpoints")
    workdir.refuse_links(tmp_path / "run", config)


def test_a_run_goes_on_with_the_folder_that_its_link_led_to(tmp_path):
    folder = tmp_path / "bulk"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(folder)
    folder.mkdir()
    config = run_of("quickstart", **{"checkpoint.folder": str(folder)})
    with pytest.raises(ConfigError):
        workdir.refuse_links(tmp_path / "run", run_of("quickstart"))
    (tmp_path / "run" / "checkpoints").unlink()
    workdir.refuse_links(tmp_path / "run", config)


def test_a_quarantine_or_a_step_that_became_a_link_later_is_left_alone(
    tmp_path, outside
):
    place = tmp_path / "run" / "checkpoints"
    (place / "3").mkdir(parents=True)
    (place / "5").symlink_to(outside / "5")
    (tmp_path / "run" / "quarantine").symlink_to(outside)
    before = tree_of(outside)
    with pytest.raises(OSError, match="a symbolic link"):
        folders.quarantine(place, 3, "damaged")
    with pytest.raises(OSError, match="a symbolic link"):
        folders.remove_step(place, 5)
    assert tree_of(outside) == before
    assert (place / "3").is_dir()
    shutil.rmtree(tmp_path / "run")
