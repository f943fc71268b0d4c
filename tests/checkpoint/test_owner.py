"""One run per folder of checkpoints: whose steps these are, and who writes there."""

import json
import shutil
import subprocess
import sys

import pytest

from jaxdist import train
from jaxdist.checkpoint import folders, integrity
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import exit_code, workdir
from support.runs import TINY, overrides, refused

pytestmark = pytest.mark.usefixtures("shared_steps")

SETTINGS = TINY | {
    "train.steps": 2,
    "optimizer.schedule": "constant",
    "model.num_layers": 1,
}
SETTINGS |= {"optimizer.warmup_steps": 0}
HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.truncate(0)
lock.write("process 7 on elsewhere")
lock.flush()
print("held", flush=True)
input()
"""


def arguments(folder, checkpoints="", **changes) -> list[str]:
    settings = SETTINGS | {"checkpoint.folder": checkpoints}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    chosen = [
        f"{key}={str(value).lower()}"
        for key, value in settings.items()
        if key != "checkpoint.folder"
    ]
    chosen += [f"checkpoint.folder={checkpoints}"] if checkpoints else []
    return ["--config", "quickstart", "--workdir", str(folder), *overrides(*chosen)]


@pytest.fixture(scope="module", name="made")
def made_fixture(tmp_path_factory):
    """Returns a folder with the workdir `a` of two steps, whose checkpoints are in
    `shared`.
    """
    root = tmp_path_factory.mktemp("made")
    assert train.main(arguments(root / "a", root / "shared")) == 0
    assert folders.list_steps(root / "shared") == [2]
    return root


@pytest.fixture(name="root")
def root_fixture(made, tmp_path):
    shutil.copytree(made, tmp_path / "root")
    return tmp_path / "root"


def test_another_run_does_not_go_on_from_a_folder(root, capsys):
    other = {"seed": 1, "optimizer__learning_rate": 0.5, "train__steps": 3}
    faults = refused(capsys, *arguments(root / "b", root / "shared", **other))
    rate, seed = sorted(faults)
    assert rate.startswith("optimizer.learning_rate: the run in ")
    assert "now 0.5; put it back" in rate
    place = root / "shared"
    assert seed.startswith(
        f"seed: the run in {place} has 0, now 1; put it back, or branch with "
    )
    assert f"init.from_run={place}@2 in another --workdir" in seed
    assert folders.list_steps(root / "shared") == [2]
    assert not (root / "quarantine").exists()


def test_the_same_run_goes_on_without_its_workdir(root):
    shutil.rmtree(root / "a")
    assert train.main(arguments(root / "b", root / "shared", train__steps=3)) == 0
    assert [e["step"] for e in read_events(root / "b") if e["event"] == "restore"] == [
        2
    ]
    assert folders.list_steps(root / "shared") == [2, 3]


def test_without_config_json_the_checkpoint_says_what_the_run_was(root, capsys):
    (root / "a" / "config.json").unlink()
    changed = arguments(root / "a", root / "shared", optimizer__learning_rate=0.5)
    (fault,) = refused(capsys, *changed)
    assert fault.startswith("optimizer.learning_rate: the run in ")
    assert "now 0.5; put it back" in fault
    assert not (root / "a" / "config.json").exists()
    assert train.main(arguments(root / "a", root / "shared")) == 0


def test_metadata_that_no_run_wrote_is_one_line(root, capsys):
    """Sealed with right hashes: what it says of the run is not believed for that."""
    shared = root / "shared"
    file = shared / "2" / "metadata" / "metadata"
    document = json.loads(file.read_text())
    document["run"]["progress"]["elapsed_s"] = "long"
    file.write_text(json.dumps(document))
    known = integrity.read_manifest(shared / "2")
    integrity.seal(shared, 2, known.run, known.fingerprints)
    capsys.readouterr()
    assert (
        exit_code.exit_code(
            lambda: train.main(arguments(root / "a", shared, train__steps=3))
        )
        == 77
    )
    error = capsys.readouterr().err
    assert (
        "step 2: its metadata is not that of a run in training: progress.elapsed_s is 'long'"
        in error
    )
    assert folders.list_steps(shared) == [2]


def test_a_live_owner_is_named(root, capsys):
    command = [sys.executable, "-c", HOLD, str(root / "shared" / folders.LOCK)]
    with subprocess.Popen(
        command, stdin=-1, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        (fault,) = refused(capsys, *arguments(root / "b", root / "shared"))
        holder.communicate("\n")
    assert f"{root / 'shared'}: in use by process 7 on elsewhere; stop it" in fault
    assert train.main(arguments(root / "b", root / "shared")) == 0


def test_a_workdir_of_another_run_does_not_take_the_folder(root, capsys):
    assert train.main(arguments(root / "b")) == 0
    shutil.rmtree(root / "b" / "checkpoints")
    (fault,) = refused(capsys, *arguments(root / "b", root / "shared"))
    assert "belongs to run " in fault
    assert "and this is run " in fault


def test_a_run_that_loses_its_folder_ends(root, capsys, monkeypatch):
    """Another process replaces the lock, or takes the lease over: this one saves no
    more.
    """
    saver = workdir.CheckpointManager.save

    def robbed(store, step, *rest, **options):
        lock = store.folder / folders.LOCK
        lock.rename(lock.with_name("old"))
        lock.write_text("another")
        return saver(store, step, *rest, **options)

    monkeypatch.setattr(workdir.CheckpointManager, "save", robbed)
    assert train.main(arguments(root / "a", root / "shared", train__steps=9)) == 1
    assert "another process has taken it over" in capsys.readouterr().err
    assert read_events(root / "a")[-1]["reason"] == "owner"
    assert folders.list_steps(root / "shared") == [2]
