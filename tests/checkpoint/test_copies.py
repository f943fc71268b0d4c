"""Copies of steps in a store: a step counts once whole, damage is not fetched, a run goes on from them."""

import shutil
import time

import fsspec
import pytest

from jaxdist import train
from jaxdist.checkpoint import copies as module
from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import manifest as integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.copies import Copier, Copies, fetch_newest
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import workdir as workdir_files
from support.runs import TINY

CONFIG = CheckpointConfig(every_steps=1, keep_last=2, asynchronous=False)


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.0,))


@pytest.fixture
def url(tmp_path):
    """A store of its own in memory, so that fsspec's own names and listings are used."""
    yield (name := f"memory://{tmp_path.name}/run")
    store, root = fsspec.url_to_fs(name)
    if store.exists(root):
        store.rm(root, recursive=True)


def write_step(folder, step: int, *, run: str = "f00d", text: str = "") -> None:
    """A sealed step of plain files: what a store sees of one; Orbax's own come from whole runs below."""
    for name in ("state/d/0", "state/d/1", "metadata/metadata", "_CHECKPOINT_METADATA"):
        file = folder / str(step) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name} of {step} {text}")
    integrity.seal(folder, step, run, {})


@pytest.fixture
def here(tmp_path):
    """A folder of checkpoints with its owner."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    integrity.identity(folder, create=True, own="f00d")
    return folder


def put_counting(monkeypatch, copies: Copies, limit: int) -> list[str]:
    """Lets a store take so many files, then none: as if the process had been killed there."""
    done, put = [], copies._fs.put_file

    def put_file(source, target, **options):
        if len(done) >= limit:
            raise ConnectionError("the store is gone")
        put(source, target, **options)
        done.append(target)

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    return done


def test_a_step_counts_in_the_store_only_once_it_is_whole(here, tmp_path, url, monkeypatch):
    write_step(here, 1)
    write_step(here, 2)
    copies = Copies(url)
    copies.copy(here, 1)
    for limit in range(5):  # four files and the manifest, killed before each of them
        with monkeypatch.context() as patch:
            done = put_counting(patch, copies, limit)
            with pytest.raises(ConnectionError):
                copies.copy(here, 2)
        assert len(done) == limit
        target = tmp_path / f"fetched-{limit}"
        assert fetch_newest(copies, target)[0] == 1 and folders.list_steps(target) == [1]
    copies.copy(here, 2)
    target = tmp_path / "fetched"
    assert fetch_newest(copies, target) == (2, sum(b for b, _ in integrity.check(here, 2).files.values()), {})
    assert integrity.check(target, 2) == integrity.check(here, 2)
    assert not (target / module._FETCHING).exists()


def test_the_manifest_is_the_last_file_in_and_the_first_one_out(here, url, monkeypatch):
    write_step(here, 1)
    copies, order = Copies(url), []
    with monkeypatch.context() as patch:
        order = put_counting(patch, copies, 100)
        copies.copy(here, 1)
    assert len(order) == 5 and order[-1].endswith("/1/manifest.json")

    def refuse(*_, **__):
        raise ConnectionError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(copies._fs, "rm", refuse)
        with pytest.raises(ConnectionError):
            copies.remove(1, copies.steps()[1])
    assert len(copies.steps()[1]) == 4 and folders.MANIFEST not in copies.steps()[1]


@pytest.mark.parametrize("damage", ["bit", "length", "missing", "manifest"])
def test_damage_in_the_store_is_seen_and_the_older_step_fetched(here, tmp_path, url, damage):
    write_step(here, 1)
    write_step(here, 2)
    copies = Copies(url)
    for step in (1, 2):
        copies.copy(here, step)
    name = folders.MANIFEST if damage == "manifest" else "state/d/1"
    path, store = copies._path(2, name), copies._fs
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    if damage == "missing":
        store.rm_file(path)
    else:
        store.pipe_file(path, bytes(content) + (b"x" if damage == "length" else b""))
    step, _, bad = fetch_newest(copies, tmp_path / "fetched")
    assert step == 1 and list(bad) == [2] and name in bad[2]
    assert folders.list_steps(tmp_path / "fetched") == [1]
    store.rm(copies._path(1), recursive=True)
    with pytest.raises(CheckpointError, match="no usable copy in memory://.*step 2: "):
        fetch_newest(copies, tmp_path / "again")


@pytest.mark.parametrize("name", ["../../planted", "/planted", "state/./d"])
def test_a_manifest_cannot_name_files_elsewhere(here, tmp_path, url, name):
    write_step(here, 1)
    copies = Copies(url)
    copies.copy(here, 1)
    manifest = integrity.read_manifest(here / "1")
    planted = integrity.Manifest(1, manifest.run, manifest.files | {name: (1, "0" * 64)}, {})
    copies._fs.pipe_file(copies._path(1, folders.MANIFEST), integrity._text(planted).encode())
    with pytest.raises(CheckpointError, match="is no name of a file in a step"):
        fetch_newest(copies, tmp_path / "fetched")
    assert not list(tmp_path.rglob("planted"))


def test_another_run_s_copies_are_neither_used_nor_replaced(here, tmp_path, url):
    write_step(here, 1)
    copies = Copies(url)
    copies.copy(here, 1)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        fetch_newest(copies, tmp_path / "fetched", run="cafe")
    other = tmp_path / "other"
    other.mkdir()
    integrity.identity(other, create=True, own="cafe")
    write_step(other, 1, run="cafe")
    with pytest.raises(CheckpointError, match="has the copies of another run"):
        copies.copy(other, 1)
    assert copies.holds(here, 1)


def test_a_store_that_does_not_answer_ends_a_start_without_steps(tmp_path, url, monkeypatch):
    copies = Copies(url)

    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(copies._fs, "find", refuse)
    with pytest.raises(ConfigError, match="cannot be read .ConnectionError: no route.*has no sound step"):
        fetch_newest(copies, tmp_path)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("copy_to=/mnt/run", "must be a URL, as s3://bucket/run"),
        ("copy_to=nowhere://bucket/run", "Protocol not known: nowhere; give e.g. s3://bucket/run"),
    ],
)
def test_a_wrong_url_is_one_line(tmp_path, setting, text):
    arguments = ["--config", "quickstart", "--workdir", str(tmp_path), f"--config.checkpoint.{setting}"]
    with pytest.raises(ConfigError, match=text):
        train.main(arguments)


# --- beside a store of checkpoints ----------------------------------------------------------------


def ended(copier: Copier) -> list[tuple[int, str]]:
    assert copier.finish(30)
    return [(result.step, result.error) for result in copier.poll()]


def test_copies_are_kept_as_the_steps_are_and_follow_a_run_that_went_back(here, url):
    copies = Copies(url)
    with CheckpointManager(here, CONFIG) as store:
        for step in (1, 2):
            write_step(here, step)
        copier = Copier(copies, store)
        assert ended(copier) == [(2, ""), (1, "")]  # the newest first
        for step in (3, 4):
            write_step(here, step)
            folders.remove_step(here, step - 2)  # keep_last=2
            copier.wake()
            assert ended(copier) == [(step, "")]
        assert list(copies.steps()) == [3, 4]
        # The run goes back to 3 and saves 4 with another content.
        folders.quarantine(here, 4, "went back")
        time.sleep(0.01)
        write_step(here, 4, text="anew")
        assert not copies.holds(here, 4)
        copier.wake()
        assert ended(copier) == [(4, "")] and copies.holds(here, 4)
        # What a start finds copied already is not copied again.
        assert ended(Copier(copies, store)) == []


def test_a_failing_store_is_told_once_a_step_and_made_up_for(here, url, monkeypatch):
    copies = Copies(url)
    write_step(here, 1)
    with CheckpointManager(here, CONFIG) as store:
        with monkeypatch.context() as patch:
            put_counting(patch, copies, 2)
            copier = Copier(copies, store)
            assert ended(copier) == [(1, "ConnectionError: the store is gone")]
            assert not copies.holds(here, 1)
        write_step(here, 2)
        copier.wake()
        assert ended(copier) == [(2, ""), (1, "")]
        assert copies.holds(here, 1) and copies.holds(here, 2)


def test_a_step_that_is_damaged_here_is_not_copied(here, url):
    write_step(here, 1)
    write_step(here, 2)
    (here / "2/state/d/0").write_text("state/d/0 of X ")
    copies = Copies(url)
    with CheckpointManager(here, CONFIG) as store:
        copier = Copier(copies, store)
        assert ended(copier) == [(2, "state/d/0 has changed since it was sealed"), (1, "")]
        copier.wake()
        assert ended(copier) == []  # told once
    assert list(copies.steps()) == [1]


def test_a_step_stays_for_as_long_as_it_is_copied(here, url):
    for step in (1, 2, 3):
        write_step(here, step)
    with CheckpointManager(here, CONFIG) as store:
        store.held = frozenset({1})
        folders.begin_save(here, 3)
        store._tidy(3, committed=True)
        assert store.steps() == [1, 2, 3]
        store.held = frozenset()
        folders.begin_save(here, 3)
        store._tidy(3, committed=True)
        assert store.steps() == [2, 3]


# --- whole runs -----------------------------------------------------------------------------------


def run(workdir, **changes) -> int:
    steps = {"train.steps": 12, "checkpoint.every_steps": 5, "optimizer.schedule": "constant"}
    settings = TINY | steps | changes
    flags = [f"--config.{key}={str(value).lower()}" for key, value in settings.items()]
    return train.main(["--config", "quickstart", "--workdir", str(workdir), *flags])


def arrays_of(workdir, step: int) -> dict[str, str]:
    return integrity.check(workdir / "checkpoints", step).fingerprints


def events_of(workdir, name: str) -> list[int]:
    return [event["step"] for event in read_events(workdir) if event["event"] == name]


def test_a_run_goes_on_bit_for_bit_from_its_copies(tmp_path, capsys, url):
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert run(whole) == 0
    assert run(workdir, **{"train.steps": 7, "checkpoint.copy_to": url}) == 0
    assert sorted(events_of(workdir, "checkpoint_copied")) == [5, 7]
    shutil.rmtree(workdir / "checkpoints")
    assert run(workdir, **{"checkpoint.copy_to": url}) == 0
    assert events_of(workdir, "checkpoint_fetched") == [7] and events_of(workdir, "restore") == [7]
    assert not events_of(workdir, "checkpoint_copy_failed")
    assert "fetched step 7 from memory://" in capsys.readouterr().out
    assert arrays_of(workdir, 12) == arrays_of(whole, 12)
    assert set(Copies(url).steps()) >= set(folders.list_steps(workdir / "checkpoints"))
    identity = workdir_files.own_identity(workdir)
    shutil.rmtree(workdir)
    assert run(workdir, **{"checkpoint.copy_to": url}) == 0
    assert "is finished at step 12" in capsys.readouterr().out
    assert arrays_of(workdir, 12) == arrays_of(whole, 12) and workdir_files.own_identity(workdir) == identity
