"""Damage of every kind is seen, set aside with a reason, and never restored."""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import fingerprint, folders, integrity, manager
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.checkpoint.orbax_backend import OrbaxBackend
from jaxdist.storage.digest import digest_file
from support.checkpoints import (
    DAMAGE,
    a_data_file,
    abstract_on,
    assert_bitwise,
    flip,
    make_state,
    mesh_of,
    names,
    save_and_wait,
    saved,
)

# As in test_checkpoint_store: what TensorStore leaves behind when a file is damaged.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

# ---- the fingerprint


def by_numpy(array: np.ndarray) -> str:
    """The fingerprint in other words: the sum over elements of murmur3's finalizer of
    bits ^ place.
    """
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    bits = np.ascontiguousarray(array).reshape(-1).view(kind).astype(np.uint64)
    x = bits ^ (
        (np.arange(bits.size, dtype=np.uint64) * 0x9E3779B1 + 0x85EBCA6B) % 2**32
    )
    x = (x ^ (x >> np.uint64(16))) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> np.uint64(13))) * 0xC2B2AE35 % 2**32
    return f"{int((x ^ (x >> np.uint64(16))).sum()) % 2**32:08x}"


def arrays_of_all_kinds() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    kinds = [
        "float32",
        "bfloat16",
        "float16",
        "int32",
        "uint32",
        "int8",
        "uint8",
        "float8_e4m3fn",
    ]
    arrays = {
        kind: draw.normal(size=(4, 8, 16)).astype(jnp.dtype(kind)) for kind in kinds
    }
    return arrays | {
        "bool": draw.normal(size=(8, 8)) > 0,
        "scalar": np.int32(7),
        "empty": np.zeros((0, 3)),
    }


def test_a_fingerprint_is_the_same_on_any_mesh_and_by_numpy():
    arrays = {name: jnp.asarray(x) for name, x in arrays_of_all_kinds().items()}
    wanted = {name: by_numpy(np.asarray(x)) for name, x in arrays.items()}
    assert len(set(wanted.values())) == len(wanted)
    for shape, spec in [
        ((1, 1), P()),
        ((4, 2), P("fsdp", "tensor")),
        ((2, 4), P(None, "tensor", "fsdp")),
    ]:
        mesh = mesh_of(*shape)
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 3 else P()))
            for name, x in arrays.items()
        }
        assert placed["float32"].sharding.is_fully_replicated == (shape == (1, 1))
        assert fingerprint.of(placed) == wanted


def changed_names(kind: str, array: np.ndarray) -> list[str]:
    """Returns the names whose fingerprints change if one array is replaced."""
    arrays = arrays_of_all_kinds()
    before = fingerprint.of(arrays)
    after = fingerprint.of(arrays | {kind: array})
    return [name for name in before if before[name] != after[name]]


# An empty array has no bits, and a bool uses one bit of its eight.
@pytest.mark.parametrize("kind", sorted({*arrays_of_all_kinds()} - {"empty", "bool"}))
def test_a_flipped_bit_changes_the_fingerprint_of_its_array_alone(kind):
    array = np.asarray(arrays_of_all_kinds()[kind])
    raw = bytearray(array.tobytes())
    byte, bit = divmod(random.Random(kind).randrange(8 * len(raw)), 8)
    raw[byte] ^= 1 << bit
    flipped = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)

    assert changed_names(kind, flipped) == [kind]


@pytest.mark.parametrize("kind", sorted({*arrays_of_all_kinds()} - {"empty", "scalar"}))
def test_two_swapped_elements_change_the_fingerprint_of_their_array(kind):
    array = arrays_of_all_kinds()[kind]
    swapped = array.copy().reshape(-1)
    other = np.flatnonzero(swapped != swapped[0])[0]
    swapped[[0, other]] = swapped[[other, 0]]

    assert changed_names(kind, swapped.reshape(array.shape)) == [kind]


def test_a_state_that_is_not_the_saved_one_is_seen_even_if_the_files_are_sound(
    tmp_path,
):
    states = saved(tmp_path, [1, 2])
    manifest = integrity.read_manifest(tmp_path / "2")
    wrong = manifest.fingerprints | {"trainable/norm": "00000000"}
    integrity.seal(tmp_path, 2, manifest.run, wrong)
    integrity.check(tmp_path, 2, run=manifest.run)
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert_bitwise(
            store.restore(abstract_on(mesh_of(2, 2), states[1])).state, states[1]
        )
        assert store.damaged_steps == {
            2: "not what was saved, by fingerprint: trainable/norm"
        }


# ---- the manifest


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Returns a folder with steps 1, 2 and 3, not to be changed, and their states."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    return folder, saved(folder, [1, 2, 3])


@pytest.fixture
def copy(sound, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(sound[0], folder)
    return folder


def restored_step(folder: Path, states: dict, **options) -> tuple[int, dict[int, str]]:
    """Returns which step a restore takes, having compared its values, and the steps
    passed over.
    """
    with CheckpointManager(folder, CheckpointConfig(), **options) as store:
        found = store.restore(abstract_on(mesh_of(1, 1), states[1]))
        step = found.metadata["data"]
        assert_bitwise(found.state, states[step])
        return step, store.damaged_steps


def test_a_manifest_names_every_file_and_sha256sum_agrees(sound):
    folder, _ = sound
    manifest = integrity.check(folder, 3)
    files = [
        p
        for p in (folder / "3").rglob("*")
        if p.is_file() and p.name != "manifest.json"
    ]
    assert len(files) >= 8
    assert len(manifest.files) == len(files)
    for file in files:
        size, digest = manifest.files[file.relative_to(folder / "3").as_posix()]
        assert (size, digest) == (
            file.stat().st_size,
            hashlib.sha256(file.read_bytes()).hexdigest(),
        )
    assert manifest.fingerprints.keys() == folders.read_step(folder, 3).arrays.keys()


def test_a_seal_is_on_the_disk_before_the_step_counts(tmp_path, monkeypatch):
    step = tmp_path / "1"
    (step / "state").mkdir(parents=True)
    (step / "state" / "0").write_text("content")
    synced = []
    fsync = os.fsync

    def noted_fsync(number):
        synced.append(os.fstat(number).st_ino)
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    integrity.seal(tmp_path, 1, "f00d", {})
    assert integrity.check(tmp_path, 1).run == "f00d"
    manifest = step / folders.MANIFEST
    assert synced == [manifest.stat().st_ino, step.stat().st_ino]


def test_one_flipped_bit_in_any_file_is_seen(sound, copy):
    """Each file of a step in turn, one bit each, through a real restore."""
    _, states = sound
    files = sorted(p for p in (copy / "3").rglob("*") if p.is_file())
    assert len(files) >= 9
    assert copy / "3" / "manifest.json" in files
    draw, silent = random.Random(0), []
    for file in files:
        bit = draw.randrange(8 * file.stat().st_size)
        flip(file, bit)
        step, bad = restored_step(copy, states, mode="read")
        if step != 2 or list(bad) != [3]:
            silent.append((file, bit))
        flip(file, bit)
    assert not silent
    assert restored_step(copy, states, mode="read") == (3, {})


def test_every_byte_of_a_manifest_matters(copy):
    file, draw = copy / "3" / "manifest.json", random.Random(0)
    raw = file.read_bytes()
    assert integrity.read_manifest(copy / "3").step == 3
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(CheckpointError):
            integrity.read_manifest(copy / "3")


@pytest.mark.parametrize(
    "damaged", [(3,), (2,), (3, 2)], ids=["newest", "second newest", "both"]
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_set_aside_and_saved_over(sound, copy, damage, damaged):
    states = sound[1] | {4: sound[1][3]._replace(step=sound[1][3].step + 1)}
    do, said = DAMAGE[damage]
    for step in damaged:
        do(copy / str(step))
    good = max({1, 2, 3} - set(damaged))
    tried = [step for step in damaged if step > good]
    with CheckpointManager(copy, CheckpointConfig(keep_last=9)) as store:
        assert store.mode == "write"
        found = store.restore(abstract_on(mesh_of(1, 1), states[1]))
        assert found.metadata == {"data": good}
        assert_bitwise(found.state, states[good])
        assert list(store.damaged_steps) == tried
        aside = copy.parent / "quarantine"
        for step in tried:
            note = json.loads((aside / f"{step}.json").read_text())
            assert said in note["reason"]
            assert note["reason"] == store.damaged_steps[step]
            assert (aside / str(step)).is_dir()
            assert not (copy / str(step)).exists()
        # The run goes on from there, and comes to these steps again.
        for step in range(good + 1, 5):
            assert save_and_wait(store, step, states[step], data=step).ok
    assert restored_step(copy, states) == (4, {})
    assert names(copy) == ["1", "2", "3", "4"]


def test_a_reader_leaves_damaged_steps_where_they_are(sound, copy):
    do, said = DAMAGE["a missing file"]
    do(copy / "3")
    before = names(copy)
    with CheckpointManager(copy, CheckpointConfig(), mode="read") as store:
        found = store.restore(abstract_on(mesh_of(1, 1), sound[1][1]))
        assert found.metadata == {"data": 2}
        assert said in store.damaged_steps[3]
    assert names(copy) == before
    assert not (copy.parent / "quarantine").exists()


def test_what_one_process_cannot_read_no_process_waits_for(sound, copy, monkeypatch):
    # of 3: files and metadata; of 2: these, and the arrays
    told = iter(["process 1: gone", "", ""])
    seen, read = [], OrbaxBackend.read

    def seeing(self, path, *rest):
        seen.append(path.name)
        return read(self, path, *rest)

    monkeypatch.setattr(
        manager.coordination, "first_error", lambda reason: reason or next(told)
    )
    monkeypatch.setattr(OrbaxBackend, "read", seeing)
    assert restored_step(copy, sound[1]) == (2, {3: "process 1: gone"})
    assert seen == ["2"]
    assert not list(told)


def test_a_damaged_step_below_the_good_one_is_seen_when_it_is_needed(sound, copy):
    flip(a_data_file(copy / "2"), 99)
    assert restored_step(copy, sound[1]) == (3, {})
    shutil.rmtree(copy / "3")
    step, bad = restored_step(copy, sound[1])
    assert step == 1
    assert list(bad) == [2]


def test_if_all_are_bad_all_stay_and_the_run_is_not_taken_for_new(sound, copy):
    for step in (1, 2, 3):
        flip(a_data_file(copy / str(step)), 99)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no usable checkpoint") as caught:
            restored_step(copy, sound[1])
        assert list(caught.value.steps) == [3, 2, 1]
    assert names(copy) == ["1", "2", "3"]
    assert folders.has_steps(copy)
    assert not (copy.parent / "quarantine").exists()


def test_a_run_whose_steps_are_all_in_quarantine_is_not_taken_for_new(sound, copy):
    folders.quarantine(copy, 3, "a test")
    for step in (1, 2):
        shutil.rmtree(copy / str(step))
    assert folders.list_steps(copy) == []
    assert folders.has_steps(copy)
    with pytest.raises(
        CheckpointError, match="quarantine holds steps that were set aside"
    ):
        restored_step(copy, sound[1])


def test_quarantine_keeps_what_it_has(copy):
    for step in (3, 2):
        folders.quarantine(copy, step, f"was {step}")
        shutil.copytree(copy / "1", copy / "3", dirs_exist_ok=True)
    folders.quarantine(copy, 3, "again")
    aside = folders.quarantine_folder(copy)
    assert names(aside) == ["2", "2.json", "3", "3-2", "3-2.json", "3.json"]
    assert json.loads((aside / "3.json").read_text())["reason"] == "was 3"


@pytest.mark.parametrize("moves", [False, True])
def test_a_kill_within_a_quarantine_leaves_the_step_or_its_note(
    copy, monkeypatch, moves
):
    """Otherwise a later start fetches the undone step from the store of copies."""
    manifest = (copy / "3" / folders.MANIFEST).read_bytes()
    move = shutil.move

    def move_and_die(source, target):
        if moves:
            move(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "move", move_and_die)
    with pytest.raises(KeyboardInterrupt):
        folders.quarantine(copy, 3, "went back", undone=True)
    monkeypatch.undo()
    if not moves:  # the next start goes back again
        assert folders.list_steps(copy) == [1, 2, 3]
        assert folders.undone_manifests(copy, 3) == []
        folders.quarantine(copy, 3, "went back", undone=True)
    assert folders.undone_manifests(copy, 3) == [manifest]
    assert names(folders.quarantine_folder(copy)) == ["3", "3.json"]


def test_a_step_is_set_aside_where_a_full_disk_takes_no_note(copy, monkeypatch):
    def write_text(path, text, *, durable):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.atomic, "write_text", write_text)
    with pytest.raises(OSError, match="No space"):
        folders.quarantine(copy, 3, "damaged")
    assert folders.list_steps(copy) == [1, 2]
    assert names(folders.quarantine_folder(copy)) == ["3"]


def test_a_file_at_a_steps_place_is_set_aside_too(sound, copy):
    (copy / "4").write_text("planted")
    with CheckpointManager(copy, CheckpointConfig()) as store:
        assert store.steps() == [1, 2, 3]
        assert save_and_wait(store, 4, sound[1][3], data=4).ok
    assert (copy.parent / "quarantine" / "4").read_text() == "planted"


# ---- whose step it is


def test_a_step_of_another_run_is_foreign(sound, copy, tmp_path):
    states = saved(tmp_path / "other" / "checkpoints", [5])
    shutil.copytree(tmp_path / "other" / "checkpoints" / "5", copy / "5")
    step, bad = restored_step(copy, sound[1], mode="read")
    assert step == 3
    assert "it belongs to another run" in bad[5]
    step, bad = restored_step(copy, sound[1])
    assert step == 3
    assert list(bad) == [5]
    assert (copy.parent / "quarantine" / "5").is_dir()
    # Copied to a folder of its own it is no stranger: a run begins there.
    shutil.copytree(copy.parent / "quarantine" / "5", tmp_path / "new" / "5")
    with CheckpointManager(tmp_path / "new", CheckpointConfig()) as store:
        assert_bitwise(
            store.restore(abstract_on(mesh_of(1, 1), states[5])).state, states[5]
        )
        assert save_and_wait(store, 6, states[5]).ok
    runs = {integrity.read_manifest(tmp_path / "new" / step).run for step in ("5", "6")}
    assert len(runs) == 1


@pytest.mark.parametrize("how", ["gone", "flipped", "empty"])
def test_a_lost_identity_is_that_of_the_steps(sound, copy, how):
    file = copy / integrity.IDENTITY
    known = integrity.identity(copy, create=False)
    assert known
    assert file.read_text().startswith(known)
    {
        "gone": file.unlink,
        "flipped": lambda: flip(file, 9),
        "empty": lambda: file.write_text(""),
    }[how]()
    assert integrity.identity(copy, create=False) == known
    assert restored_step(copy, sound[1]) == (3, {})
    assert file.read_text().startswith(known)


def test_a_lost_identity_is_never_that_of_a_foreign_step(sound, copy, tmp_path):
    own = integrity.identity(copy, create=False)
    saved(tmp_path / "other" / "checkpoints", [5])
    shutil.copytree(tmp_path / "other" / "checkpoints" / "5", copy / "5")
    other = integrity.read_manifest(copy / "5").run
    (copy / integrity.IDENTITY).unlink()
    for mode in ("read", "write"):
        with pytest.raises(
            CheckpointError,
            match=f"run {other}: 5; run {own}: 3, 2, 1. Its file identity",
        ):
            CheckpointManager(copy, CheckpointConfig(), mode=mode)
    assert names(copy) == ["1", "2", "3", "5"]
    # the workdir knows it
    with CheckpointManager(copy, CheckpointConfig(), run=own) as store:
        restored = store.restore(abstract_on(mesh_of(1, 1), sound[1][3]))
        assert restored.metadata == {"data": 3}
        assert list(store.damaged_steps) == [5]
    assert integrity.read_identity(copy) == own
    with pytest.raises(
        CheckpointError, match=f"belongs to run {own}, and this is run {other}"
    ):
        CheckpointManager(copy, CheckpointConfig(), run=other)


# ---- which step it is


def forge(path: Path, step: int) -> None:
    """Seals what is at `path` as `step`, with right hashes throughout."""
    file = path / "metadata" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": step}))
    known = integrity.read_manifest(path)
    (path / integrity.MANIFEST).unlink()
    integrity.seal(path.parent, step, known.run, known.fingerprints)


def test_a_steps_content_under_another_number_is_bad(sound, copy):
    """The seal, the hashes and the fingerprints are right; the step in the state is
    not.
    """
    shutil.copytree(copy / "1", copy / "20")
    forge(copy / "20", 20)
    integrity.check(copy, 20)
    assert folders.read_step(copy, 20).metadata == {"data": 1}
    step, bad = restored_step(copy, sound[1])
    assert step == 3
    assert bad == {20: "its state had made 1 steps, not 20: another step's content"}
    assert (copy.parent / "quarantine" / "20").is_dir()


def test_progress_of_another_step_is_bad(tmp_path):
    state = make_state(mesh_of(4, 2), seed=20)
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert save_and_wait(store, 20, state, progress={"step": 8}).ok
        with pytest.raises(
            CheckpointError,
            match="its run had made 8 steps, not 20: another step's content",
        ):
            store.restore(abstract_on(mesh_of(1, 1), state))


def test_a_forged_pipe_is_not_waited_for(copy):
    """Its size and hash are those of nothing, as its forger says."""
    os.mkfifo(copy / "3" / "state" / "pipe")
    known = integrity.read_manifest(copy / "3")
    files = known.files | {"state/pipe": (0, hashlib.sha256().hexdigest())}
    (copy / "3" / integrity.MANIFEST).write_text(
        integrity._text(dataclasses.replace(known, files=files))
    )
    with pytest.raises(CheckpointError, match="state/pipe has -1 bytes, 0 when sealed"):
        integrity.check(copy, 3)


def test_folders_in_folders_without_end_are_a_fault(copy):
    deep = copy / "3" / "state" / "x" / "/".join("y" * 40)
    deep.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="state/x/y/.* is not part of it"):
        integrity.check(copy, 3)


# ---- a save that dies


def test_a_save_that_dies_before_its_seal_never_counts(sound, copy):
    """All places between Orbax's commit and the last file: what is there then, and what
    a start does.
    """
    folders.mark_unfinished(copy, 4)
    shutil.copytree(copy / "3", copy / "4")
    (copy / "4" / "manifest.json").rename(copy / "4" / f".manifest.json.{os.getpid()}")
    assert folders.list_steps(copy) == [1, 2, 3] == folders.all_steps(copy)
    assert restored_step(copy, sound[1], mode="read") == (3, {})
    assert names(copy) == ["1", "2", "3", "4", "4.unfinished"]
    assert restored_step(copy, sound[1]) == (3, {})
    assert names(copy) == ["1", "2", "3"]
    assert not (copy.parent / "quarantine").exists()


def test_a_first_save_that_dies_leaves_a_run_that_may_begin(tmp_path):
    folders.mark_unfinished(tmp_path, 4)
    (tmp_path / "4" / "state").mkdir(parents=True)
    assert not folders.has_steps(tmp_path)
    CheckpointManager(tmp_path, CheckpointConfig()).close()
    assert names(tmp_path) == []


def test_a_deletion_that_dies_is_finished(sound, copy, monkeypatch):
    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_remove_tree", die)
        with pytest.raises(KeyboardInterrupt):
            folders.remove_step(copy, 1)
    assert names(copy) == ["1", "1.unfinished", "2", "3"]
    assert folders.list_steps(copy) == [2, 3]
    assert restored_step(copy, sound[1]) == (3, {})
    assert names(copy) == ["2", "3"]


def test_a_fingerprint_in_slices_is_the_same(monkeypatch):
    """As it is computed where the only device is a CPU."""
    arrays = {name: jnp.asarray(x) for name, x in arrays_of_all_kinds().items()}
    arrays["odd"] = jnp.arange(7 * 9, dtype=jnp.float32).reshape(7, 9)
    sliced = []
    in_slices = fingerprint._sum_in_slices
    monkeypatch.setattr(
        fingerprint,
        "_sum_in_slices",
        lambda bits: sliced.append(bits.shape) or in_slices(bits),
    )
    monkeypatch.setattr(fingerprint, "_has_one_cpu", lambda: True)
    for name, array in arrays.items():
        found = int(jax.jit(lambda x: fingerprint.array_sum(x))(array))
        assert f"{found:08x}" == by_numpy(np.asarray(array)), name
    assert len(sliced) == len(arrays) - 2  # without `scalar` and `odd`


@pytest.mark.skipif(sys.platform != "linux", reason="no priorities of threads")
@pytest.mark.parametrize(("beside", "added"), [(False, 0), (True, 10)])
def test_hashing_beside_training_takes_idle_cores(tmp_path, monkeypatch, beside, added):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "file").write_bytes(b"content")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = []

    def noted(path):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return digest_file(path)

    monkeypatch.setattr(integrity, "digest_file", noted)
    integrity.seal(tmp_path, 1, "run", {}, beside=beside)
    assert found == [added or own]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert integrity.check(tmp_path, 1).step == 1
