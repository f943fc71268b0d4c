"""Copies of steps in a store: a step counts once whole, damage is not fetched, a run
goes on from them.
"""

import errno
import fcntl
import os
import shutil
import threading
import time
from dataclasses import replace

import fsspec
import jax.numpy as jnp
import pytest

from jaxdist import train
from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.operations.copies import copies as module
from jaxdist.operations.copies import step_copies
from jaxdist.operations.copies.copier import Copier
from jaxdist.operations.copies.copies import Copies, Foreign, Unreadable, fetch_newest
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import workdir as workdir_files
from jaxdist.trainer.run_config import RunConfig
from support.runs import TINY, run_of, stopping_after

pytestmark = pytest.mark.usefixtures("shared_steps")

CONFIG = CheckpointConfig(every_steps=1, keep_last=2, asynchronous=False)


def fetch_missing(config, folder, say) -> None:
    """Fetches what the run of a config lacks, as its start does."""
    place = workdir_files.checkpoints_folder(folder, config)
    step_copies.fetch_missing(config.checkpoint, folder, place, say)


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.0,))


@pytest.fixture
def url(tmp_path):
    """A store of its own in memory, so that fsspec's own names and listings
    are used.
    """
    yield (name := f"memory://{tmp_path.name}/run")
    store, root = fsspec.url_to_fs(name)
    if store.exists(root):
        store.rm(root, recursive=True)


def write_step(folder, step: int, *, run: str = "f00d", text: str = "") -> None:
    """A sealed step of plain files: what a store sees of one; Orbax's own come from
    whole runs below.
    """
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
    """Lets a store take so many files, then none: as if the process had been killed
    there.
    """
    done, put = [], copies._fs.put_file

    def put_file(source, target, **options):
        if len(done) >= limit:
            raise ConnectionError("the store is gone")
        put(source, target, **options)
        done.append(target)

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    return done


def test_a_step_counts_in_the_store_only_once_it_is_whole(
    here, tmp_path, url, monkeypatch
):
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
        assert fetch_newest(copies, target)[0] == 1
        assert folders.list_steps(target) == [1]
    copies.copy(here, 2)
    target = tmp_path / "fetched"
    assert fetch_newest(copies, target) == (
        2,
        sum(b for b, _ in integrity.check(here, 2).files.values()),
        {},
    )
    assert integrity.check(target, 2) == integrity.check(here, 2)
    assert not (target / module._FETCHING).exists()


def test_the_manifest_is_the_last_file_in_and_the_first_one_out(here, url, monkeypatch):
    write_step(here, 1)
    copies, order = Copies(url), []
    with monkeypatch.context() as patch:
        order = put_counting(patch, copies, 100)
        copies.copy(here, 1)
    assert len(order) == 5
    assert order[-1].endswith("/1/manifest.json")

    def refuse(*_, **__):
        raise ConnectionError("the store is gone")

    with monkeypatch.context() as patch:
        patch.setattr(copies._fs, "rm", refuse)
        with pytest.raises(ConnectionError):
            copies.remove(1, copies.steps()[1])
    assert len(copies.steps()[1]) == 4
    assert folders.MANIFEST not in copies.steps()[1]


@pytest.mark.parametrize("damage", ["bit", "length", "missing", "manifest"])
def test_damage_in_the_store_is_seen_and_the_older_step_fetched(
    here, tmp_path, url, damage
):
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
    assert step == 1
    assert list(bad) == [2]
    assert name in bad[2]
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
    planted = integrity.Manifest(
        1, manifest.run, manifest.files | {name: (1, "0" * 64)}, {}
    )
    copies._fs.pipe_file(
        copies._path(1, folders.MANIFEST), integrity._text(planted).encode()
    )
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


def test_a_store_that_does_not_answer_ends_a_start_without_steps(
    tmp_path, url, monkeypatch
):
    copies = Copies(url)

    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(copies._fs, "find", refuse)
    with pytest.raises(
        ConfigError,
        match="cannot be read .ConnectionError: no route.*has no sound step",
    ):
        fetch_newest(copies, tmp_path)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("copy_to=/mnt/run", "must be a URL, as s3://bucket/run"),
        (
            "copy_to=nowhere://bucket/run",
            "Protocol not known: nowhere; give e.g. s3://bucket/run",
        ),
    ],
)
def test_a_wrong_url_is_one_line(tmp_path, setting, text):
    arguments = [
        "--config",
        "quickstart",
        "--workdir",
        str(tmp_path),
        f"--config.checkpoint.{setting}",
    ]
    with pytest.raises(ConfigError, match=text):
        train.main(arguments)


# --- beside a store of checkpoints ----------------------------------------------------


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
        assert ended(copier) == [(4, "")]
        assert copies.holds(here, 4)
        # What a start finds copied already is not copied again.
        assert ended(Copier(copies, store)) == []


def test_the_copy_of_the_best_step_stays_where_the_step_itself_is_gone(here, url):
    copies = Copies(url)
    for step in (1, 2, 3):
        write_step(here, step)
        copies.copy(here, step)
    for step in (1, 2):
        folders.remove_step(here, step)
    assert list(copies.steps()) == [1, 2, 3]
    with CheckpointManager(here, CONFIG) as store:
        store.best.append(1)
        write_step(here, 4)
        assert ended(Copier(copies, store)) == [(4, "")]
    assert list(copies.steps()) == [1, 3, 4]  # the best, and keep_last=2


def test_a_store_holds_no_more_steps_where_saves_come_faster_than_copies(
    here, url, monkeypatch
):
    copies, most = Copies(url), []
    put, number = copies._fs.put_file, 1
    write_step(here, number)

    def put_file(source, target, **options):
        """Another step is saved, and the oldest deleted, while each step is copied."""
        nonlocal number
        put(source, target, **options)
        if target.endswith(folders.MANIFEST) and number < 12:
            most.append(len(Copies(url).steps()))
            write_step(here, number := number + 1)
            for old in folders.list_steps(here)[:-2]:
                folders.remove_step(here, old)

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    with CheckpointManager(here, CONFIG) as store:
        copier = Copier(copies, store)
        assert [error for _, error in ended(copier)] == [""] * 12
    # keep_last=2, and the one under way
    assert 1 < max(most) <= 3
    assert list(copies.steps()) == [11, 12]


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
        assert copies.holds(here, 1)
        assert copies.holds(here, 2)


def test_a_step_that_is_damaged_here_is_not_copied(here, url):
    write_step(here, 1)
    write_step(here, 2)
    (here / "2/state/d/0").write_text("state/d/0 of X ")
    copies = Copies(url)
    with CheckpointManager(here, CONFIG) as store:
        copier = Copier(copies, store)
        assert ended(copier) == [
            (2, "state/d/0 has changed since it was sealed"),
            (1, ""),
        ]
        copier.wake()
        assert ended(copier) == []  # told once
    assert list(copies.steps()) == [1]


def test_a_put_that_never_returns_costs_its_step_alone_and_is_told(
    here, url, monkeypatch
):
    copies, over, waiting = Copies(url), threading.Event(), threading.Event()
    put = copies._fs.put_file

    def put_file(source, target, **options):
        if "/checkpoints/2/state/d/1" in target:
            waiting.set()
            over.wait(60)
        put(source, target, **options)

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    for step in (1, 2):
        write_step(here, step)
    with CheckpointManager(here, replace(CONFIG, timeout_s=1, keep_last=9)) as store:
        copier = Copier(copies, store)
        assert waiting.wait(10)
        assert store.held == {2}
        stuck, results = copier._threads[0], []
        while not results:
            results = copier.poll()
            time.sleep(0.02)
        # The thread that takes over may have copied step 1 already.
        result, *others = results
        assert result.step == 2
        assert "the store has made no progress for 1 s" in result.error
        copied = [(other.step, other.error) for other in others]
        assert copied + ended(copier) == [(1, "")]
        write_step(here, 3)
        copier.wake()
        assert ended(copier) == [(3, "")]
        over.set()
        stuck.join(10)
        assert not stuck.is_alive()
        assert copier.poll() == []
        copies = Copies(url)
        assert [folders.MANIFEST in names for names in copies.steps().values()] == [
            True,
            False,
            True,
        ]
        # The next start copies it.
        assert ended(Copier(copies, store)) == [(2, "")]
        assert copies.holds(here, 2)


def test_the_end_copies_the_last_step_though_the_one_before_is_stuck(
    here, url, monkeypatch
):
    copies, over, waiting = Copies(url), threading.Event(), threading.Event()
    put = copies._fs.put_file

    def put_file(source, target, **options):
        if "/checkpoints/1/" in target:
            waiting.set()
            over.wait(60)
        put(source, target, **options)

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    write_step(here, 1)
    with CheckpointManager(here, replace(CONFIG, timeout_s=1)) as store:
        copier = Copier(copies, store)
        assert waiting.wait(10)
        write_step(here, 2)
        copier.wake()
        assert copier.finish(30)
        (stuck, last) = copier.poll()
        assert stuck.step == 1
        assert "has made no progress for" in stuck.error
        assert (last.step, last.error) == (2, "")
        over.set()
        copier._threads[0].join(10)


def test_threads_in_calls_that_never_return_are_few_and_told(here, url, monkeypatch):
    over, errors = threading.Event(), []
    with monkeypatch.context() as patch:
        patch.setattr(Copies(url)._fs, "cat_file", lambda *_, **__: over.wait(60))
        write_step(here, 1)
        with CheckpointManager(here, replace(CONFIG, timeout_s=0.3)) as store:
            copier = Copier(Copies(url), store)
            for number in (2, 3, 4):
                until = time.monotonic() + 30
                while len(errors) < number - 1 and time.monotonic() < until:
                    errors += [result.error for result in copier.poll()]
                    time.sleep(0.02)
                write_step(here, number)
                copier.wake()
            errors += [result.error for result in copier.poll()]
            assert len(errors) == 4
            assert len(copier._threads) == 3
            assert not copier.finish(30)
            assert all("has made no progress for" in error for error in errors[:3])
            assert errors[3] == "3 calls of the store have not returned"
    over.set()
    for thread in copier._threads:
        thread.join(10)
    copier.wake()
    assert copier.finish(30)
    assert copier.poll()[0].step == 4


def test_half_steps_are_deleted_there_also_while_the_store_is_full(
    here, url, monkeypatch
):
    copies = Copies(url)
    write_step(here, 1)
    copies.copy(here, 1)
    write_step(here, 2)
    with CheckpointManager(here, replace(CONFIG, keep_last=1)) as store:
        with monkeypatch.context() as patch:
            put_counting(patch, copies, 2)
            copier = Copier(copies, store)
            assert [step for step, _ in ended(copier)] == [2]
            assert len(copies.steps()[2]) == 2
            folders.remove_step(here, 2)
            write_step(here, 3)
            copier.wake()
            assert [step for step, _ in ended(copier)] == [3]
            assert list(copies.steps()) == [1]
        copier.wake()
        assert ended(copier) == [(3, "")]


def test_the_copying_thread_starts_no_other(here, url, monkeypatch):
    """Python waits for those of a pool at its end, however long a step takes
    to hash.
    """
    write_step(here, 1)

    def refuse(*_):
        raise AssertionError("a pool")

    with CheckpointManager(here, CONFIG) as store:
        monkeypatch.setattr(integrity, "ThreadPoolExecutor", refuse)
        with pytest.raises(AssertionError, match="a pool"):
            integrity.check(here, 1)
        assert ended(Copier(Copies(url), store)) == [(1, "")]


def test_a_step_stays_for_as_long_as_it_is_copied(here, url):
    for step in (1, 2, 3):
        write_step(here, step)
    with CheckpointManager(here, CONFIG) as store:
        store.held = frozenset({1})
        folders.mark_unfinished(here, 3)
        store._tidy(3, sealed=True)
        assert store.steps() == [1, 2, 3]
        store.held = frozenset()
        folders.mark_unfinished(here, 3)
        store._tidy(3, sealed=True)
        assert store.steps() == [2, 3]


# --- what a start takes ---------------------------------------------------------------


def flip_a_bit(step_folder) -> str:
    """Changes the content of a step's largest file, not its size; returns the file's
    name.
    """
    file = max(
        (f for f in (step_folder / "state").rglob("*") if f.is_file()),
        key=lambda f: f.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    return str(file.relative_to(step_folder))


STATE = {"x": jnp.arange(64.0), "step": jnp.int32(0)}


@pytest.fixture
def saved(tmp_path, url):
    """A workdir with sound steps 1 to 3 of a real state, whose copies are in
    the store.
    """
    folder = tmp_path / "run" / "checkpoints"
    with CheckpointManager(folder, replace(CONFIG, keep_last=3)) as store:
        for step in (1, 2, 3):
            store.save(
                step, {"x": STATE["x"] + step, "step": jnp.int32(step)}, {"data": step}
            )
            store.wait()
            assert all(saved.ok for saved in store.poll())
    for step in (1, 2, 3):
        Copies(url).copy(folder, step)
    return folder


def config_with(url: str, **changes) -> RunConfig:
    return run_of("quickstart", **TINY, **{"checkpoint.copy_to": url}, **changes)


def restored(saved, url, lines: list[str], **changes) -> int:
    """Returns the step that a restore goes on from, with the store's help; it must have
    that content.
    """
    config = config_with(url, **changes)
    with CheckpointManager(saved, config.checkpoint) as store:
        store.fetch = step_copies.fetcher(
            config.checkpoint, saved.parent, store, lines.append
        )
        got = store.restore(STATE)
        assert bool((got.state["x"] == STATE["x"] + got.metadata["data"]).all())
        integrity.check(saved, step := got.metadata["data"])
        assert step not in store.damaged_steps
        assert step == int(got.state["step"])
    return step


@pytest.mark.parametrize(
    ("here", "there", "step", "fetched"),
    [
        ((), (), 3, []),  # nothing is asked of a store that is not needed
        ((3,), (), 3, [3]),  # its copy loses less work than the sound 2
        ((1, 2, 3), (), 3, [3]),
        ((1, 2, 3), (3,), 2, [2]),
        ((3,), (3,), 2, []),
        ((1, 2, 3), (2, 3), 1, [1]),
    ],
)
def test_a_damaged_step_has_its_place_taken_by_its_copy(
    saved, url, here, there, step, fetched
):
    names, copies = {n: flip_a_bit(saved / str(n)) for n in here}, Copies(url)
    for n in there:
        path = copies._path(n, "metadata/metadata")
        copies._fs.pipe_file(
            path, copies._fs.cat_file(path).replace(b'"step"', b'"stEp"', 1)
        )
    lines: list[str] = []
    assert restored(saved, url, lines) == step
    assert events_of(saved.parent, "checkpoint_fetched") == fetched
    reasons = [
        (e["step"], e["reason"])
        for e in read_events(saved.parent)
        if e["event"] == "bad_checkpoint"
    ]
    assert [n for n, reason in reasons if "its copy in memory://" in reason] == sorted(
        there, reverse=True
    )
    if fetched:
        assert (step, f"{names[step]} has changed since it was sealed") in reasons
        assert any(f"fetched step {step} from memory://" in line for line in lines)
    else:
        assert not any("fetched" in line for line in lines)
    damaged = {n for n in here if n >= step}
    assert {
        int(path.name) for path in (saved.parent / "quarantine").glob("[0-9]")
    } == damaged
    assert folders.list_steps(saved) == [n for n in (1, 2, 3) if n <= step]


def test_all_damaged_here_and_there_ends_with_all_reasons(saved, url):
    for n in (1, 2, 3):
        flip_a_bit(saved / str(n))
        Copies(url)._fs.pipe_file(Copies(url)._path(n, "metadata/metadata"), b"{}")
    lines: list[str] = []
    with pytest.raises(CheckpointError, match="no usable checkpoint") as caught:
        restored(saved, url, lines)
    assert sorted(caught.value.steps) == folders.list_steps(saved) == [1, 2, 3]
    assert sum("its copy in memory://" in line for line in lines) == 3


def test_only_a_step_s_own_copy_takes_its_place_while_an_older_one_is_sound(saved, url):
    """The run went back, and saved 3 again: the store has the 3 from before."""
    document = integrity.read_manifest(saved / "3")
    integrity.seal(saved, 3, document.run, document.fingerprints | {"y": "0"})
    flip_a_bit(saved / "3")
    assert not Copies(url).holds(saved, 3)
    assert restored(saved, url, []) == 2
    assert not events_of(saved.parent, "checkpoint_fetched")


def test_without_a_sound_step_the_newest_copy_up_to_here_is_fetched(saved, url):
    for n in (1, 2):
        # whose copy it is, nobody can say
        (saved / str(n) / folders.MANIFEST).write_text("{}")
    shutil.move(saved / "3", saved.parent / "elsewhere")
    assert restored(saved, url, []) == 2
    assert events_of(saved.parent, "checkpoint_fetched") == [2]


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_a_store_that_does_not_answer_costs_a_damaged_step_and_no_more(
    saved, url, monkeypatch, how
):
    asked, over = [], threading.Event()

    def cat_file(*_, **__):
        asked.append(how)
        if how == "hangs":
            over.wait(60)
        raise ConnectionError("no route")

    monkeypatch.setattr(Copies(url)._fs, "cat_file", cat_file)
    flip_a_bit(saved / "3")
    flip_a_bit(saved / "2")
    lines: list[str] = []
    assert restored(saved, url, lines, **{"checkpoint.patience_s": 0.3}) == 1
    over.set()
    (line,) = lines  # it is not asked again for 2
    assert "nothing is fetched from memory://" in line
    assert asked
    assert ("TimeoutError: no answer for" if how == "hangs" else "no route") in line


def test_a_download_that_shows_no_sign_is_given_up_and_comes_to_nothing(
    saved, url, monkeypatch
):
    store, over, done = Copies(url)._fs, threading.Event(), threading.Event()
    get_file = store.get_file

    def hanging(source, target, **options):
        get_file(source, target, **options)
        if "/state/" in source:
            over.wait(60)
            done.set()

    monkeypatch.setattr(store, "get_file", hanging)
    flip_a_bit(saved / "3")
    assert restored(saved, url, lines := [], **{"checkpoint.timeout_s": 1}) == 2
    assert "no answer for 1 s" in lines[-1]
    over.set()
    assert done.wait(10)
    for thread in threading.enumerate():
        if thread.name == "fetch of a checkpoint":
            thread.join(10)
    assert folders.list_steps(saved) == [1, 2]
    assert not (saved / module._FETCHING).exists()


def test_a_download_that_was_given_up_does_not_delete_the_next_one(
    saved, url, monkeypatch
):
    """It wakes up while the next one is under way, and cleans up behind itself."""
    store, over = Copies(url)._fs, threading.Event()
    get_file, cleaned = store.get_file, []

    def hanging(source, target, **options):
        get_file(source, target, **options)
        if "/3/state/" in source:
            over.wait(60)
        if "/2/state/" in source and not over.is_set():
            over.set()
            (thread,) = [
                t for t in threading.enumerate() if t.name == "fetch of a checkpoint"
            ][:1]
            thread.join(10)
            cleaned.append(not thread.is_alive())

    monkeypatch.setattr(store, "get_file", hanging)
    config = config_with(url, **{"checkpoint.timeout_s": 1})
    shutil.rmtree(saved / "3")
    fetch_missing(config, saved.parent, (lines := []).append)
    assert "no answer for 1 s" in lines[-1]
    told = len(lines)
    flip_a_bit(saved / "2")
    assert restored(saved, url, []) == 2
    assert cleaned == [True]
    assert len(lines) == told  # a line is a sign of life, here of a start that is over
    assert events_of(saved.parent, "checkpoint_fetched") == [2]
    assert not (saved / module._FETCHING).exists()


@pytest.mark.parametrize("undone", [False, True])
def test_a_start_takes_newer_copies_but_those_the_run_went_back_behind(
    saved, url, undone
):
    if undone:
        folders.quarantine(saved, 3, "the run went back to step 2", undone=True)
    else:
        # an old folder, of a machine that had the run before
        shutil.rmtree(saved / "3")
    lines: list[str] = []
    fetch_missing(config_with(url), saved.parent, lines.append)
    assert folders.list_steps(saved) == ([1, 2] if undone else [1, 2, 3])
    assert events_of(saved.parent, "checkpoint_fetched") == ([] if undone else [3])
    # What it has gone back behind is deleted there with the next copy, and nothing else
    # is.
    with CheckpointManager(saved, CONFIG) as store:
        folders.remove_step(saved, folders.list_steps(saved)[-1])
        copier = Copier(Copies(url), store)
        assert [error for _, error in ended(copier)] == []
        assert (3 in Copies(url).steps()) != undone


@pytest.mark.parametrize("damaged", [(3,), (1, 2, 3)], ids=["one", "all"])
@pytest.mark.parametrize("how", ["cut", "no manifest"])
def test_damage_that_names_and_sizes_show_has_an_event_beside_its_copy(
    saved, url, how, damaged
):
    for step in damaged:
        if how == "cut":
            os.truncate(saved / str(step) / "metadata" / "metadata", 9)
        else:
            (saved / str(step) / folders.MANIFEST).unlink()
    fetch_missing(config_with(url), saved.parent, print)
    assert folders.list_steps(saved)[-1] == 3
    assert events_of(saved.parent, "checkpoint_fetched") == [3]
    (bad,) = [e for e in read_events(saved.parent) if e["event"] == "bad_checkpoint"]
    assert bad["step"] == 3
    named = "metadata/metadata has 9 bytes" if how == "cut" else "manifest.json is"
    assert named in bad["reason"]


def test_a_folder_without_locks_takes_a_copy_only_where_it_has_no_step(
    saved, url, monkeypatch
):
    """Where there is no lock, whose the folder is, is settled later; a live owner has
    steps there.
    """

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    shutil.rmtree(saved / "3")
    fetch_missing(config_with(url), saved.parent, print)
    assert folders.list_steps(saved) == [1, 2]
    shutil.rmtree(saved)
    fetch_missing(config_with(url), saved.parent, print)
    assert folders.list_steps(saved) == [3]


def test_a_silent_store_does_not_hold_up_a_start_that_has_a_step(
    saved, url, monkeypatch
):
    over = threading.Event()
    shutil.rmtree(saved / "3")
    config = config_with(url, **{"checkpoint.patience_s": 0.3})
    with monkeypatch.context() as patch:
        patch.setattr(Copies(url)._fs, "find", lambda *_, **__: over.wait(60) and {})
        fetch_missing(config, saved.parent, (lines := []).append)
    over.set()
    assert len(lines) == 1
    assert "TimeoutError: no answer" in lines[0]


# --- another run's store or folder ----------------------------------------------------


@pytest.fixture
def other(tmp_path):
    """The folder of another run, which is at step 9."""
    folder = tmp_path / "other" / "checkpoints"
    folder.mkdir(parents=True)
    integrity.identity(folder, create=True, own="cafe")
    write_step(folder, 9, run="cafe")
    return folder


def test_a_run_deletes_nothing_in_the_store_of_another(here, other, url):
    """Neither a half, which may be under way, nor what its own rules of
    keeping would.
    """
    copies = Copies(url)
    for step in (1, 2, 3, 4):
        write_step(here, step)
        copies.copy(here, step)
    copies._fs.rm_file(copies._path(4, folders.MANIFEST))
    before = copies.steps()
    with CheckpointManager(other, replace(CONFIG, keep_last=1)) as store:
        copier = Copier(Copies(url), store)
        for _ in range(2):  # the second round finds nothing due but what has failed
            ((step, error),) = ended(copier)
            assert step == 9
            assert "has the copies of another run" in error
            copier.wake()
        ended(copier)
    assert copies.steps() == before


def test_a_file_that_did_not_arrive_is_copied_again(here, url, monkeypatch):
    write_step(here, 1)
    copies, cut = Copies(url), []
    put = copies._fs.put_file

    def put_file(source, target, **options):
        put(source, target, **options)
        if not cut:
            cut.append(copies._fs.pipe_file(target, b""))

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    with CheckpointManager(here, CONFIG) as store:
        copier = Copier(copies, store)
        ((step, error),) = ended(copier)
        assert step == 1
        assert "has 0 bytes in the store" in error
        assert cut
        copier.wake()
        assert ended(copier) == [(1, "")]
        assert copies.holds(here, 1)


def test_a_start_without_a_sound_step_takes_none_that_the_run_went_back_behind(
    saved, url
):
    folders.quarantine(saved, 3, "the run went back to step 2", undone=True)
    for n in (1, 2):
        (saved / str(n) / folders.MANIFEST).write_text("{}")
    assert 3 in Copies(url).steps()
    fetch_missing(config_with(url), saved.parent, print)
    assert events_of(saved.parent, "checkpoint_fetched") == [2]
    assert 3 not in folders.list_steps(saved)


def test_a_folder_is_no_store_of_its_own_copies(tmp_path, saved):
    """Nor by another path, such as a bucket that is mounted: what has the step's place
    would be deleted.
    """
    (link := tmp_path / "link").symlink_to(saved.parent)
    with pytest.raises(ConfigError, match="holds the run's own checkpoints"):
        run(saved.parent, **{"checkpoint.copy_to": f"file://{link}"})
    assert Copies(f"file://{link}").copy(saved, 3) > 0
    assert integrity.check(saved, 3)
    assert folders.list_steps(saved) == [1, 2, 3]


def test_nothing_is_fetched_into_the_folder_of_another_run(saved, other, url):
    (saved.parent / workdir_files.RUN).write_text(
        f'{{"run": "{integrity.read_identity(saved)}"}}'
    )
    shutil.move(other / "9", other / "3")
    integrity.seal(other, 3, "cafe", {})
    before = (other / "3" / folders.MANIFEST).read_bytes()
    config = config_with(url, **{"checkpoint.folder": str(other)})
    fetch_missing(config, saved.parent, print)
    assert (other / "3" / folders.MANIFEST).read_bytes() == before
    assert not folders.quarantine_folder(other).exists()
    with pytest.raises(ConfigError, match="belongs to run cafe"):  # opening it says so
        workdir_files.open_checkpoints(saved.parent, config)


# --- whole runs -----------------------------------------------------------------------


def run(workdir, **changes) -> int:
    steps = {
        "train.steps": 12,
        "checkpoint.every_steps": 5,
        "optimizer.schedule": "constant",
    }
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
    with stopping_after(7):
        assert run(workdir, **{"checkpoint.copy_to": url}) == 0
    assert sorted(events_of(workdir, "checkpoint_copied")) == [5, 7]
    for step in (5, 7):
        flip_a_bit(workdir / "checkpoints" / str(step))
    assert run(workdir, **{"checkpoint.copy_to": url}) == 0
    assert (
        events_of(workdir, "bad_checkpoint")
        == events_of(workdir, "checkpoint_fetched")
        == [7]
    )
    assert events_of(workdir, "restore") == [7]
    assert folders.list_steps(workdir / "quarantine") == [7]
    assert not events_of(workdir, "checkpoint_copy_failed")
    assert "fetched step 7 from memory://" in capsys.readouterr().out
    assert arrays_of(workdir, 12) == arrays_of(whole, 12)
    assert set(Copies(url).steps()) >= set(folders.list_steps(workdir / "checkpoints"))
    identity = workdir_files.own_identity(workdir)
    shutil.rmtree(workdir)
    assert run(workdir, **{"checkpoint.copy_to": url}) == 0
    assert "is finished at step 12" in capsys.readouterr().out
    assert arrays_of(workdir, 12) == arrays_of(whole, 12)
    assert workdir_files.own_identity(workdir) == identity


@pytest.mark.slow
def test_a_start_from_copies_keeps_where_the_decay_began(tmp_path, url, monkeypatch):
    changes = {
        "optimizer.schedule": "wsd",
        "checkpoint.keep_last": 1,
        "checkpoint.every_steps": 2,
    }
    changes |= {"optimizer.decay_fraction": 0.5, "checkpoint.copy_to": url}
    assert run(tmp_path / "run", **changes) == 0
    steps, make = list(Copies(url).steps()), step_copies.copier
    assert len(steps) == 2
    assert steps[-1] == 12
    shutil.rmtree(tmp_path / "run")

    def quick(*given):  # its first round is over before anything else is done
        copier = make(*given)
        assert copier.finish(30)
        return copier

    monkeypatch.setattr(step_copies, "copier", quick)
    assert run(tmp_path / "run", **changes) == 0
    assert folders.list_steps(tmp_path / "run" / "checkpoints") == [12]
    assert list(Copies(url).steps()) == steps


# --- whose a store is -----------------------------------------------------------------


def killed_in_its_first_copy(monkeypatch, workdir, url, puts: int, **changes) -> None:
    """A run whose store takes so many files; then its machine is lost."""
    with monkeypatch.context() as patch:
        put_counting(patch, Copies(url), puts)
        assert run(workdir, **{"checkpoint.copy_to": url, **changes}) == 0
    assert not Copies(url).whole_steps()
    shutil.rmtree(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("puts", [1, 3])
def test_the_same_command_takes_its_half_made_store_again(
    tmp_path, url, monkeypatch, puts
):
    quick = {"train.steps": 3, "optimizer.warmup_steps": 1}
    killed_in_its_first_copy(monkeypatch, tmp_path / "run", url, puts, **quick)
    old = Copies(url)._read_owner().run
    assert old
    assert run(tmp_path / "run", **{"checkpoint.copy_to": url, **quick}) == 0
    assert events_of(tmp_path / "run", "checkpoint_copied") == [3]
    assert not events_of(tmp_path / "run", "checkpoint_copy_failed")
    assert Copies(url).whole_steps() == [3]
    identity = workdir_files.own_identity(tmp_path / "run")
    assert Copies(url)._read_owner().run == identity != old


def test_another_config_does_not_take_a_half_made_store(tmp_path, url, monkeypatch):
    quick = {"train.steps": 3, "optimizer.warmup_steps": 1}
    killed_in_its_first_copy(monkeypatch, tmp_path / "run", url, 3, **quick)
    before = Copies(url)._fs.find(Copies(url)._root)
    with pytest.raises(ConfigError, match="of another run .*none of them whole yet"):
        run(tmp_path / "other", **{"checkpoint.copy_to": url, "seed": 7, **quick})
    assert Copies(url)._fs.find(Copies(url)._root) == before


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (b"0123456789abcdef 01", "its 19 bytes are no identity"),
        (b"\xff\xfe junk", "its 7 bytes are no identity"),
        (b"x" * 100_000, "it has more than 1,024 bytes"),
    ],
    ids=["empty", "truncated", "junk", "huge"],
)
def test_a_damaged_identity_is_made_again_or_named(here, other, url, content, fault):
    copies = Copies(url)
    copies._fs.pipe_file(copies._identity, content)
    if copies._is_own_half(copies._read_owner()):  # a kill leaves such a file
        assert not copies.is_claimed("f00d")
    else:
        with pytest.raises(
            Foreign, match=f"identity is damaged \\({fault}\\).*delete that file, or"
        ):
            copies.is_claimed("f00d")
    # With steps of its own, the store is the run's, and gets a sound identity.
    copies._fs.rm_file(copies._identity)
    write_step(here, 1)
    copies.copy(here, 1)
    copies._fs.pipe_file(copies._identity, content)
    write_step(here, 2)
    again = Copies(url)
    with pytest.raises(Foreign, match="copies of another run .run f00d: 1."):
        again.copy(other, 9)
    again.copy(here, 2)
    assert again._read_owner().run == "f00d"
    assert list(again.steps()) == [1, 2]


def test_a_store_that_lost_its_identity_still_is_the_run_s_whose_steps_it_has(
    here, other, url
):
    write_step(here, 1)
    copies = Copies(url)
    copies.copy(here, 1)
    copies._fs.rm_file(copies._identity)
    with CheckpointManager(other, replace(CONFIG, keep_last=1)) as store:
        ((step, error),) = ended(Copier(Copies(url), store))
    assert step == 9
    assert "has the copies of another run (run f00d: 1)" in error
    assert list(copies.steps()) == [1]


def test_a_run_whose_store_was_taken_meanwhile_seals_nothing_there(
    here, url, monkeypatch
):
    write_step(here, 1)
    copies = Copies(url, lambda config: True)
    put = copies._fs.put_file

    def put_file(source, target, **options):
        put(source, target, **options)
        if target.endswith("state/d/1"):
            copies._fs.pipe_file(copies._identity, integrity.identity_file("cafe"))

    monkeypatch.setattr(copies._fs, "put_file", put_file)
    with pytest.raises(Foreign, match=r"another run \(cafe\)"):
        copies.copy(here, 1)
    assert copies.whole_steps() == []


# --- what cannot be read --------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """The URL of a store on a disk, with a whole step of a run that is lost."""
    lost = tmp_path / "lost"
    lost.mkdir()
    integrity.identity(lost, create=True, own="f00d")
    write_step(lost, 4)
    Copies(name := f"file://{tmp_path}/store").copy(lost, 4)
    return name


def test_a_file_in_the_place_of_the_store_s_steps_begins_no_new_run(tmp_path, disk):
    shutil.rmtree(tmp_path / "store" / "checkpoints")
    (tmp_path / "store" / "checkpoints").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot be read .*--config.checkpoint.copy_to=$"
    ) as caught:
        run(tmp_path / "run", **{"checkpoint.copy_to": disk})
    assert caught.value.exit_code == 77
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("")
    with pytest.raises(Unreadable, match="Not a directory"):
        fetch_newest(Copies(disk), tmp_path / "fetched")


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/4"])
def test_a_folder_of_the_store_that_is_refused_begins_no_new_run(
    tmp_path, disk, monkeypatch, part
):
    """Of a half-listed store an older step would be taken, or none."""
    copies = Copies(disk)
    listed = copies._fs.ls

    def ls(path, **options):
        if path.endswith(part):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path, **options)

    monkeypatch.setattr(copies._fs, "ls", ls)
    with pytest.raises(Unreadable, match="cannot be read .PermissionError"):
        fetch_newest(copies, tmp_path / "fetched")
    monkeypatch.undo()
    assert fetch_newest(copies, tmp_path / "fetched")[0] == 4


def test_a_step_of_another_config_is_refused_before_its_arrays_are_fetched(
    tmp_path, url, monkeypatch
):
    steps = {"train.steps": 3, "optimizer.warmup_steps": 1, "checkpoint.copy_to": url}
    assert run(tmp_path / "run", **steps) == 0
    fetched, get = [], Copies(url)._fs.get_file

    def get_file(source, target, **options):
        fetched.append(source.partition("/checkpoints/3/")[2])
        get(source, target, **options)

    monkeypatch.setattr(Copies(url)._fs, "get_file", get_file)
    with pytest.raises(ConfigError, match=r"seed: the run in memory://.* has 0, now 7"):
        run(tmp_path / "other", **steps, seed=7)
    assert fetched == ["manifest.json", "metadata/metadata"]
    left = {path.name for path in (tmp_path / "other" / "checkpoints").iterdir()}
    assert left <= {folders.LOCK}
