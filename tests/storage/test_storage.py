"""Files whole or not at all, locks between processes, digests that caches keep."""

import hashlib
import json
import multiprocessing
import os
import socket
import threading
import time

import pytest

from jaxdist.storage import atomic, lock
from jaxdist.storage import digest as digests
from jaxdist.storage.digest import digest, digest_bytes, digest_file


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole(tmp_path, durable):
    file = tmp_path / "a.json"
    atomic.write_text(file, "old é", durable=durable)
    atomic.write_bytes(file, b"new", durable=durable)
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    file = tmp_path / "a"
    atomic.write_text(file, "old")
    with pytest.raises(ZeroDivisionError), atomic.replacing(file) as partial:
        partial.write_text("half")
        1 / 0  # noqa: B018
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError):
        atomic.write_text(tmp_path / "absent" / "a", "x")


def test_writers_with_one_process_id_do_not_disturb_each_other(tmp_path):
    """Processes in two containers may share a folder, and have equal ids."""
    target = tmp_path / "a"
    with atomic.replacing(target) as one:
        one.write_text("one")
        with atomic.replacing(target) as other:
            other.write_text("other")
        assert target.read_text() == "other"
    assert target.read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_the_remains_of_dead_writers_go_with_the_next_write(tmp_path):
    target = tmp_path / "a"
    old_folder = tmp_path / ".a.host-1-aaaa.partial"
    old_folder.mkdir()
    (old_folder / "tokens.bin").write_text("half")
    old_file = tmp_path / ".a.host-1-bbbb.partial"
    live_folder = tmp_path / ".a.host-2-cccc.partial"
    live_folder.mkdir()
    of_another = tmp_path / ".a.b.host-1-dddd.partial"
    for file in (old_file, live_folder / "tokens.bin", of_another):
        file.write_text("half")
    for path in (old_folder / "tokens.bin", old_folder, old_file, of_another):
        os.utime(path, (0, 0))
    os.utime(live_folder, (0, 0))  # the file in it is still being written
    atomic.write_text(target, "new")
    assert set(tmp_path.iterdir()) == {target, live_folder, of_another}


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    file = tmp_path / "a"
    calls = []
    fsync = os.fsync
    replace = os.replace

    def noted_fsync(number):
        calls.append(("fsync", os.fstat(number).st_ino))
        fsync(number)

    def noted_replace(source, target):
        calls.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    atomic.write_text(file, "old")
    assert [call for call, _ in calls] == ["replace"]  # nothing waits for the disk
    calls.clear()
    atomic.write_text(file, "new", durable=True)
    inode = file.stat().st_ino
    folder = tmp_path.stat().st_ino
    assert calls == [("fsync", inode), ("replace", inode), ("fsync", folder)]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "folder"
    with pytest.raises(OSError), atomic.replacing(target) as partial:
        partial.mkdir()
        (partial / "one").write_text("1")
        raise OSError("disk full")
    assert not list(tmp_path.iterdir())
    with atomic.replacing(target) as partial:
        partial.mkdir()
        (partial / "one").write_text("1")
    assert [path.name for path in target.iterdir()] == ["one"]


def hold(path, held, release):
    with lock.exclusive(path):
        held.set()
        release.wait(30)


def test_a_lock_names_its_holder_and_is_free_after_it(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    held, release, waited = spawn.Event(), spawn.Event(), []
    other = spawn.Process(target=hold, args=(tmp_path / "lock", held, release))
    other.start()
    assert held.wait(30)
    with (
        pytest.raises(lock.Locked, match=f"process {other.pid} on "),
        lock.exclusive(tmp_path / "lock"),
    ):
        pytest.fail("two hold it")

    def before_wait():
        waited.append(True)
        release.set()

    with lock.exclusive(tmp_path / "lock", before_wait=before_wait):
        assert waited
    other.join(30)
    with lock.exclusive(tmp_path / "lock"):
        assert other.exitcode == 0


def test_digests_are_those_of_sha256sum(tmp_path):
    (tmp_path / "a").write_bytes(b"1\x00two")
    expected = hashlib.sha256(b"1\x00two").hexdigest()
    assert (
        digest(1, "two")
        == digest_bytes(b"1\x00two")
        == digest_file(tmp_path / "a")
        == expected
    )


def test_a_lock_file_that_is_replaced_is_no_longer_held(tmp_path):
    path = tmp_path / "lock"
    with lock.exclusive(path) as is_held:
        assert is_held()
        path.unlink()
        assert is_held()  # nobody has taken it
        with lock.exclusive(path) as held_by_another:
            assert held_by_another()
            assert not is_held()


@pytest.mark.parametrize("place", ["a link", "a pipe", "a folder"])
def test_what_stands_in_a_lock_s_place_is_refused_and_not_touched(tmp_path, place):
    path, other = tmp_path / "lock", tmp_path / "other"
    other.write_text("of somebody else")
    made = {"a link": lambda: path.symlink_to(other), "a pipe": lambda: os.mkfifo(path)}
    made.get(place, path.mkdir)()
    with pytest.raises(OSError, match="remove it|Is a directory"), lock.exclusive(path):
        pass
    assert other.read_text() == "of somebody else"


@pytest.fixture(name="hurried")
def hurried_fixture(monkeypatch):
    for name, seconds in {
        "RENEW_S": 0.05,
        "TAKEOVER_S": 0.6,
        "_SETTLE_S": 0.05,
    }.items():
        monkeypatch.setattr(lock, name, seconds)


def take(path, run, *, resumes=False):
    with lock.lease(path, run, resumes=resumes) as is_held:
        return is_held()


def test_a_lease_is_renewed_and_ends_with_its_owner(tmp_path, hurried):
    path = tmp_path / "owner.json"
    with lock.lease(path, "a", resumes=False) as is_held:
        begun = json.loads(path.read_text())
        assert begun.keys() == {"format", "run", "host", "pid", "start", "time"}
        assert begun["pid"] == os.getpid()
        time.sleep(0.8)  # longer than it lasts by itself
        assert is_held()
        assert json.loads(path.read_text())["time"] > begun["time"] + 0.5
        with pytest.raises(
            lock.Locked,
            match=r"process \d+ on .* \(run a\); if that has ended, wait \d+ s",
        ):
            take(path, "b")
    assert not path.exists()
    assert take(path, "b")


@pytest.mark.parametrize(
    ("run", "host", "age_s", "free"),
    [
        ("a", "here", 0, True),
        ("a", "there", 0, True),
        ("b", "there", 0, False),
        ("b", "there", 1, True),
    ],
)
def test_a_lease_of_the_dead_is_taken_over(tmp_path, hurried, run, host, age_s, free):
    """By its own run once it is not renewed, by another after its time."""
    ended = multiprocessing.get_context("spawn").Process(target=str)
    ended.start()
    ended.join()
    left = {
        "run": "a",
        "pid": ended.pid,
        "host": socket.gethostname() if host == "here" else host,
    }
    now = time.time()
    path = tmp_path / "owner.json"
    path.write_text(json.dumps(left | {"start": now, "time": now - age_s}))
    if free:
        assert take(path, run, resumes=True)
    else:
        with pytest.raises(lock.Locked, match=f"process {ended.pid} on there"):
            take(path, run, resumes=True)


@pytest.mark.parametrize("ahead_s", [-1000, 1000])
def test_a_clock_that_is_wrong_takes_no_lease_from_a_live_owner(
    tmp_path, hurried, monkeypatch, ahead_s
):
    path, now = tmp_path / "owner.json", time.time
    monkeypatch.setattr(lock, "RENEW_S", 0.4)  # a busy machine may be late
    with lock.lease(path, "a", resumes=False) as is_held:
        # of the owner: a step in its life
        monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
        time.sleep(0.8)
        monkeypatch.setattr(
            time,
            "time",
            lambda: now() + ahead_s * (threading.current_thread().name == "lease"),
        )
        assert abs(json.loads(path.read_text())["time"] - now() - ahead_s) < 10
        with pytest.raises(lock.Locked, match="run a"):
            take(path, "b")
        assert is_held()
    assert take(path, "b")


def test_a_record_that_cannot_be_read_is_not_taken_for_none(tmp_path, hurried):
    (tmp_path / "owner.json").symlink_to("owner.json")
    with pytest.raises(OSError, match="symbolic links"):
        take(tmp_path / "owner.json", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["owner.json"]


NO_TIME = '{"run": "a", "host": "b", "pid": 1, "start": 1, "time": NaN}'


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"pid": "x"}', "[" * 99_999, NO_TIME]
)
def test_a_record_that_is_none_holds_nobody_up(tmp_path, hurried, text):
    (tmp_path / "owner.json").write_text(text)
    assert take(tmp_path / "owner.json", "a", resumes=True)


def test_a_lease_that_was_taken_over_is_not_held(tmp_path, hurried):
    path = tmp_path / "owner.json"
    with lock.lease(path, "a", resumes=False) as is_held:
        path.write_text(path.read_text().replace('"a"', '"b"'))
        time.sleep(0.2)
        assert not is_held()
    assert path.exists()  # the other's


def test_a_file_is_hashed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_PIECE_BYTES", 7)
    for size in (0, 1, 7, 8, 14, 100):
        content = bytes(range(size))
        (tmp_path / "file").write_bytes(content)
        assert digest_file(tmp_path / "file") == digest_bytes(content)
