"""Files whole or not at all, locks between processes, digests that caches keep."""

import hashlib
import multiprocessing

import pytest

from jaxdist.storage import atomic, lock
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
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError):
        atomic.write_text(tmp_path / "absent" / "a", "x")


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
    with pytest.raises(lock.Locked, match=f"process {other.pid} on "), lock.exclusive(tmp_path / "lock"):
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
    assert digest(1, "two") == digest_bytes(b"1\x00two") == digest_file(tmp_path / "a") == expected
