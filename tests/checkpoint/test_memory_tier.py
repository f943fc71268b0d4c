"""The memory tier: who saves what, copies of files, the memory of a host, and restores
on other meshes.
"""

import functools
import io
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import (
    folders,
    memory_file,
    memory_list,
    memory_peers,
    memory_store,
    memory_tier,
    state_dict,
)
from jaxdist.checkpoint.folders import ArrayInfo, CheckpointError, NotChecked
from jaxdist.checkpoint.memory_file import BadFile, Box, Header, Piece
from jaxdist.checkpoint.memory_peers import MemoryPeers
from jaxdist.checkpoint.memory_store import MemoryStore
from jaxdist.checkpoint.memory_tier import MemoryTier
from jaxdist.distributed import coordination
from support.checkpoints import abstract_on, assert_bitwise, make_state, mesh_of

RUN = "0123456789abcdef"


def tier_of(folder: Path) -> MemoryTier:
    return MemoryTier(str(folder / "memory"), RUN, folder / "memory.json", 60)


def save(tier: MemoryTier, step: int, state, metadata=None) -> None:
    """Saves as a run does, and waits until the step is complete."""
    decision = tier.decide(
        allowed=True, sealed=0, metadata=metadata or {"x": 1}, interval=0
    )
    assert decision.begins
    tier.save(step, state_dict.to_canonical(state), decision)
    tier.wait()
    (result,) = tier.poll()
    assert (result.step, result.error) == (step, "")


# --- restoring ------------------------------------------------------------------------

SHAPES = [(4, 2), (2, 4), (8, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("after", SHAPES)
def test_a_state_comes_back_on_any_mesh(tmp_path, after):
    state = make_state(mesh_of(4, 2), seed=7)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 7, state)
    tier.close(delete=False)
    again = tier_of(tmp_path)
    again.look()
    abstract = abstract_on(mesh_of(*after), state)
    restored = again.restore(abstract, not_before=0, partial=False)
    assert restored is not None
    assert restored.metadata == {"x": 1}
    assert_bitwise(restored.state, state)
    got, want = jax.tree.leaves(restored.state), jax.tree.leaves(abstract)
    assert all(x.sharding == y.sharding for x, y in zip(got, want, strict=True))
    sizes = [x.nbytes for x in jax.tree.leaves(state)]
    assert again.restored_bytes >= sum(sizes)


def test_the_copy_is_taken_before_the_buffers_are_donated(tmp_path):
    """What is written is the state of the save, though its buffers have gone."""
    state = make_state(mesh_of(4, 2), seed=3)
    before = jax.tree.map(np.array, state)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    decision = tier.decide(allowed=True, sealed=0, metadata={}, interval=0)
    held: list = []
    begin = tier._background.begin
    tier._background.begin = lambda work, name: held.append((work, name))  # type: ignore[method-assign]
    tier.save(3, state_dict.to_canonical(state), decision)
    change = jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)
    overwritten = jax.block_until_ready(change(state))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.trainable))
    begin(*held[0])
    tier.wait()
    again = tier_of(tmp_path)
    again.look()
    abstract = abstract_on(mesh_of(4, 2), overwritten)
    restored = again.restore(abstract, not_before=0, partial=False)
    assert restored is not None
    assert_bitwise(restored.state, before)


def test_metadata_that_training_changes_is_that_of_the_save(tmp_path):
    state = make_state(mesh_of(4, 2), seed=3)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    changing = {"callbacks": {"seen": [1]}}
    decision = tier.decide(allowed=True, sealed=0, metadata=changing, interval=0)
    changing["callbacks"]["seen"].append(2)
    tier.save(3, state_dict.to_canonical(state), decision)
    tier.wait()
    again = tier_of(tmp_path)
    again.look()
    assert again.newest_metadata(0) == {"callbacks": {"seen": [1]}}


def test_arrays_in_the_memory_of_the_host_come_back_there(tmp_path):
    mesh = mesh_of(4, 1)
    kind = next(
        memory.kind
        for memory in jax.devices()[0].addressable_memories()
        if memory.kind != jax.devices()[0].default_memory().kind
    )
    sharding = NamedSharding(mesh, P("fsdp"), memory_kind=kind)
    value = jnp.arange(64.0).reshape(8, 8)
    arrays = {"moments": jax.device_put(value, sharding)}
    tier = tier_of(tmp_path)
    tier.begin_branch()
    decision = tier.decide(allowed=True, sealed=0, metadata={}, interval=0)
    tier.save(1, arrays, decision)
    tier.wait()
    again = tier_of(tmp_path)
    again.look()
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    restored = again.restore({"moments": leaf}, not_before=0, partial=False)
    assert restored is not None
    assert restored.state["moments"].sharding.memory_kind == kind
    np.testing.assert_array_equal(restored.state["moments"], value)


@pytest.mark.parametrize("is_sound", [True, False])
def test_arrays_that_were_read_before_the_hash_was_known(
    tmp_path, monkeypatch, is_sound
):
    """They are read once, and used only if the hash is right, whatever they hold."""
    state = make_state(mesh_of(4, 2), seed=7)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 7, state)
    again = tier_of(tmp_path)
    again.look()
    has_read = threading.Event()
    reads = []
    read, verify = again._read, again.store.verify

    def reading(*arguments):
        arrays = read(*arguments)
        reads.append(len(arrays))
        has_read.set()
        return arrays

    def hashing(step, owner):
        assert has_read.wait(60)
        verify(step, owner)
        if not is_sound:
            raise BadFile("its content has changed")

    monkeypatch.setattr(again, "_read", reading)
    monkeypatch.setattr(again.store, "verify", hashing)
    abstract = abstract_on(mesh_of(4, 2), state)
    restored = again.restore(abstract, not_before=0, partial=False)
    assert len(reads) == 1
    assert (restored is not None) == is_sound
    assert [copy.reason for copy in again.bad] == (
        [] if is_sound else ["its content has changed"]
    )


def test_a_process_that_cannot_hash_ends_and_keeps_the_files(tmp_path, monkeypatch):
    state = make_state(mesh_of(4, 2), seed=3)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 3, state)
    tier.close(delete=False)
    again = tier_of(tmp_path)
    again.look()

    def fail(*_):
        raise MemoryError("no memory for a buffer")

    with monkeypatch.context() as patch:
        patch.setattr(memory_file, "_hash_block", fail)
        with pytest.raises(NotChecked, match="no memory for a buffer"):
            again.confirm()
        with pytest.raises(NotChecked, match="no memory for a buffer"):
            again.restore(
                abstract_on(mesh_of(4, 2), state), not_before=0, partial=False
            )
    assert not again.bad
    assert again.confirm()


def test_a_host_without_more_threads_hashes_in_one(tmp_path, monkeypatch):
    state = make_state(mesh_of(4, 2), seed=3)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 3, state)

    class NoThreads(ThreadPoolExecutor):
        def submit(self, *_, **__):
            raise RuntimeError("can't start new thread")

    again = tier_of(tmp_path)
    again.look()
    monkeypatch.setattr(memory_file, "ThreadPoolExecutor", NoThreads)
    assert again.confirm()


def test_another_model_is_a_layout_error_and_no_damage(tmp_path):
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 7, make_state(mesh_of(4, 2), seed=7))
    other = make_state(mesh_of(4, 2), seed=7, width=16)
    again = tier_of(tmp_path)
    again.look()
    with pytest.raises(state_dict.LayoutError, match="blocks"):
        again.restore(abstract_on(mesh_of(4, 2), other), not_before=0, partial=False)
    assert not again.bad


def test_a_step_older_than_the_folders_newest_is_not_restored(tmp_path):
    state = make_state(mesh_of(4, 2), seed=7)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 7, state)
    again = tier_of(tmp_path)
    again.look()
    abstract = abstract_on(mesh_of(4, 2), state)
    assert again.newest_metadata(7) == {"x": 1}
    assert again.newest_metadata(8) == {}
    assert again.restore(abstract, not_before=8, partial=False) is None
    assert again.restore(abstract, not_before=7, partial=False) is not None


def test_a_process_whose_thread_hangs_says_so_and_keeps_its_memory(
    tmp_path, monkeypatch
):
    """The first process has given up to wait for it, and begins the next save.

    The thread still writes the step before, so its copy must not change.
    """
    monkeypatch.setattr(memory_tier, "_LATE_S", 0.1)
    tier = tier_of(tmp_path)
    tier.begin_branch()
    released = threading.Event()
    honest = memory_file.write

    def hanging(file, header, contents):
        assert released.wait(60)
        return honest(file, header, contents)

    monkeypatch.setattr(memory_file, "write", hanging)
    state = make_state(mesh_of(4, 2), seed=7)
    decision = tier.decide(allowed=True, sealed=0, metadata={}, interval=0)
    tier.save(7, state_dict.to_canonical(state), decision)
    assert not tier.decide(allowed=True, sealed=0, metadata={}, interval=0).begins
    other = make_state(mesh_of(4, 2), seed=8)
    tier.save(8, state_dict.to_canonical(other), decision)
    (late,) = tier.poll()
    assert late.step == 8
    assert late.error == "the previous save of this process has not ended"
    released.set()
    tier.wait()
    (result,) = tier.poll()
    assert (result.step, result.error) == (7, "")
    assert list(tier.store.inventory()) == [7]
    again = tier_of(tmp_path)
    again.look()
    abstract = abstract_on(mesh_of(4, 2), state)
    restored = again.restore(abstract, not_before=0, partial=False)
    assert restored is not None
    assert_bitwise(restored.state, state)


def test_a_new_branch_leaves_no_step(tmp_path):
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 7, make_state(mesh_of(4, 2), seed=7))
    tier.begin_branch()
    assert not tier.store.inventory()


def test_a_branch_that_was_left_has_no_step_even_if_its_files_stay(tmp_path):
    tier = tier_of(tmp_path)
    tier.begin_branch()
    save(tier, 7, make_state(mesh_of(4, 2), seed=7))
    tier.leave_branch()
    again = tier_of(tmp_path)
    again.look()
    assert again.store.inventory()
    assert not again.confirm()
    assert not again.bad


# --- who saves what -------------------------------------------------------------------


class Device:
    """A device of a process."""

    def __init__(self, process: int):
        self.process_index = process


class Devices:
    """A sharding of devices on several processes, of which this machine has none."""

    def __init__(self, boxes: dict[int, list[Box]]):
        """Takes {process: the box of each of its devices}."""
        self._boxes = boxes

    def devices_indices_map(self, shape):
        return {
            Device(process): tuple(map(slice, *box))
            for process, boxes in self._boxes.items()
            for box in boxes
        }


def leaf(shape, boxes):
    return SimpleNamespace(
        shape=shape, dtype=np.dtype(np.float32), sharding=Devices(boxes)
    )


def test_each_part_is_saved_once_and_the_work_is_even():
    halves = [Box((0, 0), (4, 6)), Box((4, 0), (8, 6))]
    everywhere = {process: [Box((0,), (100,))] for process in range(4)}
    arrays = {f"replicated/{n}": leaf((100,), everywhere) for n in range(8)}
    # two processes have each half, on two devices
    arrays["split"] = leaf((8, 6), {p: [halves[p % 2]] * 2 for p in range(4)})
    pieces = memory_tier.share_out(arrays)
    count = Counter(piece for each in pieces.values() for piece in each)
    assert set(count.values()) == {1}
    assert {piece.box for piece in count if piece.name == "split"} == set(halves)
    assert sum(piece.name != "split" for piece in count) == 8
    for process, each in pieces.items():
        for piece in each:
            assert piece.name != "split" or piece.box == halves[process % 2]
        assert sum(piece.name != "split" for piece in each) == 2


def test_a_real_sharding_is_shared_out_whole():
    state = make_state(mesh_of(4, 2))
    arrays = state_dict.to_canonical(state)
    (pieces,) = memory_tier.share_out(arrays).values()
    for name, array in arrays.items():
        held = np.zeros(array.shape, int)
        for piece in pieces:
            if piece.name == name:
                index = (*map(slice, *piece.box), ...)
                held[index] += 1
        assert (held == 1).all(), name


# --- copies on other hosts ------------------------------------------------------------


class Peers:
    """Copies that arrive when a test says so. It stands for `MemoryPeers`."""

    def __init__(self):
        self.offers: list[int] = []
        self.outcomes: dict[int, bool] = {}
        self.oldest = 0

    def offer(self, step: int, owner: int, size: int) -> None:
        assert size > 0
        self.offers.append(step)

    def outcome(self, step: int) -> bool | None:
        return self.outcomes.get(step)

    def take_failures(self) -> list[str]:
        return []


def test_a_step_that_other_hosts_have_stays_until_they_have_a_newer_one(tmp_path):
    """The network needs three steps for a copy, and the copy of step 4 fails."""
    tier = tier_of(tmp_path)
    tier.begin_branch()
    peers = Peers()
    tier.peers = peers  # type: ignore[assignment]
    state = make_state(mesh_of(4, 2), seed=7)
    kept = {}
    for step in range(1, 14):
        if step in (4, 7, 10):
            peers.outcomes[step - 3] = step != 7
        save(tier, step, state)
        kept[step] = sorted(tier.store.inventory())
    assert peers.offers == [1, 4, 7, 10]
    assert tier.copied == 7
    assert kept[3] == [1, 2, 3]  # 1 is sent
    assert kept[5] == [1, 4, 5]  # 1 is copied, 4 is sent
    assert kept[6] == [1, 4, 5, 6]
    assert kept[9] == [1, 7, 8, 9]  # 4 was not stored everywhere
    assert kept[13] == [7, 10, 12, 13]
    assert peers.oldest == 7


def test_a_step_is_copied_once_all_processes_have_stored_all_its_files(monkeypatch):
    told: dict[int, list] = {}
    peers = object.__new__(MemoryPeers)
    peers._peers = [SimpleNamespace(process=number) for number in (0, 1)]  # type: ignore[misc]
    peers._board = SimpleNamespace(values=lambda: told)  # type: ignore[assignment]
    told[0] = [4, True]
    assert peers.outcome(4) is None
    told[1] = [2, True]
    assert peers.outcome(4) is None
    told[1] = [4, True]
    assert peers.outcome(4) is True
    told[1] = [4, False]
    assert peers.outcome(4) is False


# --- addresses of hosts ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "others", "got"),
    [
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        ("10.0.0.2", ["127.0.0.1", "10.0.0.2"], "10.0.0.2"),
        # the host of the service, whose name is 127.0.1.1 in its /etc/hosts
        ("127.0.1.1", ["127.0.1.1", "10.0.0.2"], "toward 10.0.0.2"),
        ("::1", ["::1", "fd00::2"], "toward fd00::2"),
        ("", ["127.0.0.1", ""], ""),
    ],
)
def test_a_host_offers_an_address_that_the_others_reach(monkeypatch, mine, others, got):
    monkeypatch.setattr(coordination, "service_address", lambda: "lead:4000")
    monkeypatch.setattr(coordination, "votes", lambda vote: others)
    monkeypatch.setattr(
        memory_peers,
        "_address_toward",
        lambda host: mine if host == "lead" else f"toward {host}",
    )
    assert memory_peers._interface() == got


def test_the_address_on_the_way_to_this_host_is_that_of_the_loopback_interface():
    assert memory_peers._address_toward("127.0.0.1") == "127.0.0.1"
    assert memory_peers._address_toward("no such host.") == ""


# --- copies of files ------------------------------------------------------------------


def store_of(folder: Path, branch: str = "b", run: str = RUN) -> MemoryStore:
    store = MemoryStore(folder, run=run, branch=branch)
    store.open()
    return store


def file_of(**changes) -> bytes:
    header = Header(
        **{
            "run": RUN,
            "branch": "b",
            "step": 5,
            "owner": 1,
            "owners": 2,
            "arrays": {"w": ArrayInfo((4,), "float32")},
            "metadata": {},
            "fingerprints": {},
            "pieces": (Piece("w", Box((0,), (4,))),),
            **changes,
        }
    )
    file = io.BytesIO()
    memory_file.write(file, header, [np.arange(4, dtype=np.float32)])
    return file.getvalue()


def test_a_copy_that_is_received_is_a_file_like_any_other(tmp_path):
    store = store_of(tmp_path)
    data = file_of()
    with store.receive(5, 1, len(data)) as file:
        file.write(data[:50])
        file.write(data[50:])
        assert not store.inventory()
    assert store.inventory() == {5: {1: len(data)}}
    with store.open_read(5, 1) as file:
        assert file.read() == data
    store.verify(5, 1)
    with pytest.raises(KeyError):
        store.open_read(5, 0)


@pytest.mark.parametrize("agree", [True, False])
def test_parts_of_different_saves_are_no_step(tmp_path, agree):
    tier = tier_of(tmp_path)
    tier.begin_branch()
    branch = tier.store.branch
    for owner in (0, 1):
        other = {} if agree else {"metadata": {"x": owner}}
        data = file_of(branch=branch, owner=owner, **other)
        with tier.store.receive(5, owner, len(data)) as file:
            file.write(data)
    again = tier_of(tmp_path)
    again.look()
    assert again.confirm() == agree
    reasons = [copy.reason for copy in again.bad]
    assert reasons == ([] if agree else ["its parts are not of one save"])


def test_a_step_lacks_a_part_until_all_processes_have_written(tmp_path):
    tier = tier_of(tmp_path)
    tier.begin_branch()
    data = file_of(branch=tier.store.branch)
    with tier.store.receive(5, 1, len(data)) as file:
        file.write(data)
    again = tier_of(tmp_path)
    again.look()
    assert not again.confirm()
    assert not again.bad


FLIPPED = bytearray(file_of())
FLIPPED[-40] ^= 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"junk" * 100, "begin"),
        (b"", "begin"),
        (bytes(FLIPPED), "content has changed"),
        (file_of(run="another"), "another run"),
        (file_of(branch="c"), "history"),
        (file_of(step=6), "step 6"),
        (file_of(owner=0), "part 0"),
    ],
)
def test_a_copy_that_is_not_what_was_announced_leaves_nothing(tmp_path, data, words):
    store = store_of(tmp_path)
    with pytest.raises(BadFile, match=words), store.receive(5, 1, len(data)) as file:
        file.write(data)
    assert not list(store.folder.iterdir())


@pytest.mark.parametrize("count", [0, 1, 100, -1])
def test_a_copy_that_ends_early_leaves_nothing(tmp_path, count):
    store = store_of(tmp_path)
    data = file_of()
    with (
        pytest.raises(BadFile, match="announced"),
        store.receive(5, 1, len(data)) as file,
    ):
        file.write(data[:count])
    assert not list(store.folder.iterdir())


def test_an_error_of_the_sender_leaves_nothing_and_what_was_there(tmp_path):
    store = store_of(tmp_path)
    data = file_of()
    with store.receive(5, 1, len(data)) as file:
        file.write(data)
    with pytest.raises(ConnectionError), store.receive(5, 1, len(data)) as file:
        file.write(data[:10])
        raise ConnectionError
    assert [path.name for path in store.folder.iterdir()] == ["5-1.shards"]
    store.verify(5, 1)


def test_a_copy_larger_than_the_room_is_refused(tmp_path):
    store = store_of(tmp_path)
    with pytest.raises(OSError, match="are free"), store.receive(5, 1, 1 << 60):
        pytest.fail("the body must not run")
    assert not list(store.folder.iterdir())


def test_a_folder_of_another_kind_or_user_is_refused(tmp_path, monkeypatch):
    store = MemoryStore(tmp_path, run=RUN, branch="b")
    (tmp_path / "elsewhere").mkdir()
    store.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="belongs to another user, or is no"):
        store.open()
    store.folder.unlink()
    store.open()
    assert store.folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        store.open()


def test_names_that_are_no_files_of_steps_are_no_files(tmp_path):
    store = store_of(tmp_path)
    for name in ("05-1.shards", "5-1.shards.x", "5.shards", "-5-1.shards", "x"):
        (store.folder / name).write_bytes(b"x")
    (store.folder / ".5-1.aa.partial").write_bytes(b"x")
    (store.folder / "99999999999-0.shards").write_bytes(b"x")
    assert not store.inventory()
    store.open()
    assert not list(store.folder.glob("*.partial"))


# --- memory ---------------------------------------------------------------------------

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    """Makes a folder with the files of a machine, {path: text}."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PLAIN = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"}
GROUP = "sys/fs/cgroup/pods/one"
CONTAINER = PLAIN | {
    "proc/self/cgroup": "0::/pods/one\n",
    f"{GROUP}/memory.max": f"{4 * GIB}\n",
    f"{GROUP}/memory.current": f"{3 * GIB}\n",
    f"{GROUP}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
}
OLD = "sys/fs/cgroup/memory"
OLD_CONTAINER = PLAIN | {
    "proc/self/cgroup": "5:cpu,cpuacct:/x\n3:memory:/\n",
    f"{OLD}/memory.limit_in_bytes": f"{5 * GIB}\n",
    f"{OLD}/memory.usage_in_bytes": f"{4 * GIB}\n",
    f"{OLD}/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "free", "source"),
    [
        (PLAIN, 8 * GIB, "machine"),
        (CONTAINER, 2 * GIB, "memory.max"),
        (CONTAINER | {f"{GROUP}/memory.max": "max\n"}, 8 * GIB, "machine"),
        # the limit of the group above
        (
            CONTAINER
            | {
                "sys/fs/cgroup/pods/memory.max": str(GIB),
                "sys/fs/cgroup/pods/memory.current": "0",
            },
            GIB,
            "memory.max",
        ),
        (OLD_CONTAINER, GIB, "memory.limit_in_bytes"),
    ],
)
def test_free_memory_is_that_of_the_tightest_limit(tmp_path, files, free, source):
    room = memory_store.free_memory(machine(tmp_path, files))
    assert room is not None
    assert room.bytes == free
    assert source in room.source


def test_memory_that_nothing_tells_is_unknown(tmp_path):
    assert memory_store.free_memory(tmp_path) is None


def test_a_file_system_in_memory_is_known_by_its_mount(tmp_path):
    mounts = (
        "overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw 0 0\n"
        "shm /dev/shm tmpfs rw 0 0\n/dev/x /dev/shm/disk ext4 rw 0 0\n"
    )
    root = machine(tmp_path, {"proc/mounts": mounts})
    is_in_memory = functools.partial(memory_store.is_in_memory, root=root)
    assert is_in_memory(Path("/dev/shm/run"))
    assert not is_in_memory(Path("/dev/shm/disk/run"))
    assert not is_in_memory(Path("/mnt"))


@pytest.mark.parametrize(
    ("free", "in_memory", "fault"),
    [
        (440, True, ""),
        (439, True, "4 copies need 440 with a margin of 10%, and 439 are free"),
        (110, False, ""),
        (109, False, "1 copies need 110 with a margin of 10%, and 109 are free"),
    ],
)
def test_the_arithmetic_of_a_host(tmp_path, monkeypatch, free, in_memory, fault):
    store = store_of(tmp_path)
    monkeypatch.setattr(
        memory_store, "free_memory", lambda: memory_store.Room(free, "test")
    )
    monkeypatch.setattr(memory_store, "is_in_memory", lambda folder: in_memory)
    found = memory_store.room_fault(store, 100, processes=2, files=3, staged=1)
    assert fault in found
    assert bool(fault) == bool(found)


# --- the branch in the workdir --------------------------------------------------------

BRANCH = memory_store.Branch(
    run=RUN, name="b", folder="/dev/shm", sealed=8, began=1_000.0
)


def sealed_step(folder: Path, step: int) -> None:
    path = folder / str(step)
    (path / folders.STATE_ITEM).mkdir(parents=True)
    for name in (folders.METADATA_FILE, folders.MANIFEST):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}")


@pytest.mark.parametrize(
    ("steps", "quarantine", "is_set_back"),
    [
        ([4, 8], {}, False),
        ([4, 8, 12], {}, False),  # sealed before a kill, and not yet written down
        ([4], {}, True),
        ([4], {8: False}, False),
        ([4], {8: True}, True),  # undone earlier, then done again, then deleted
        ([4], {4: False}, True),
        ([], {}, False),  # the folder is lost
    ],
)
def test_a_folder_is_set_back_if_its_newest_step_was_deleted(
    tmp_path, steps, quarantine, is_set_back
):
    folder = tmp_path / "checkpoints"
    for step, undone in quarantine.items():
        sealed_step(folder, step)
        folders.quarantine(folder, step, "a reason", undone=undone)
    for step in steps:
        sealed_step(folder, step)
    assert BRANCH.is_set_back(folder) == is_set_back


def test_a_torn_newest_step_is_not_a_folder_that_was_set_back(tmp_path):
    sealed_step(tmp_path, 4)
    (tmp_path / "8").mkdir()
    assert folders.list_steps(tmp_path) == [4]
    assert not BRANCH.is_set_back(tmp_path)


def test_a_branch_is_read_as_it_was_written_and_nothing_else_is_one(tmp_path):
    file = tmp_path / "memory.json"
    assert memory_store.read_branch(file) is None
    BRANCH.write(file)
    assert memory_store.read_branch(file) == BRANCH
    for change in (
        {"sealed": -1},
        {"began": "now"},
        {"name": 3},
        {"more": 1},
        {"format": "jaxdist-0"},
    ):
        document = {**json.loads(file.read_text()), **change}
        (tmp_path / "other.json").write_text(json.dumps(document))
        assert memory_store.read_branch(tmp_path / "other.json") is None
    (tmp_path / "other.json").write_text("{")
    assert memory_store.read_branch(tmp_path / "other.json") is None


def test_the_list_has_the_parts_of_this_host_and_names_a_missing_variable(tmp_path):
    sealed_step(tmp_path / "checkpoints", 8)
    file = tmp_path / "memory.json"
    branch = BRANCH._replace(folder=str(tmp_path / "memory"))
    branch.write(file)
    store = MemoryStore(tmp_path / "memory", run=RUN, branch="b")
    store.open()
    for step, owner, name in ((9, 0, "b"), (10, 0, "b"), (10, 1, "b"), (11, 0, "left")):
        store.branch = name
        data = file_of(step=step, owner=owner, branch=name)
        with store.receive(step, owner, len(data)) as copy:
            copy.write(data)
    rows = memory_list.rows(file, tmp_path / "checkpoints")
    assert [(row["step"], row["parts"], row["complete"]) for row in rows] == [
        (9, "1 of 2", False),
        (10, "2 of 2", True),
    ]
    branch._replace(folder="$NO_SUCH_VARIABLE/x").write(file)
    (row,) = memory_list.rows(file, tmp_path / "checkpoints")
    assert "NO_SUCH_VARIABLE is not set" in row["fault"]
