"""Saving beside training, restoring anywhere, keeping, and surviving damage."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.checkpoint import (
    fingerprint,
    folders,
    integrity,
    orbax_backend,
    state_dict,
)
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config.schema import faults
from jaxdist.distributed.local_devices import free_port
from jaxdist.storage import run_format
from support.checkpoints import (
    abstract_on,
    assert_bitwise,
    make_state,
    mesh_of,
    names,
    save_and_wait,
    saved,
    shardings_on,
)
from support.paths import ROOT

# When one array cannot be read, Orbax closes its event loop while TensorStore still
# reads others; the complaint is raised whenever the garbage is collected, so in any
# later test.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


# ---- round trips


@pytest.mark.parametrize("tx", ["adamw", "muon"])
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (2, 2), (1, 1)])
def test_restore_is_bitwise_on_any_mesh(tmp_path, tx, shape):
    state = make_state(mesh_of(4, 2), tx=tx, seed=5)
    assert len(state.trainable["blocks"].sharding.device_set) == 8
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert dtypes >= {"float32", "bfloat16", "int32", "uint32"}
    metadata = {"data": {"samples": 320}, "fingerprint": "ab12", "loss": 0.1}
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert save_and_wait(store, 5, state, **metadata).ok
        abstract = abstract_on(mesh_of(*shape), state)
        restored = store.restore(abstract)
    assert restored.metadata == metadata
    assert_bitwise(restored.state, state)
    for got, want in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(abstract), strict=True
    ):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_donating_right_after_save_does_not_reach_the_checkpoint(
    tmp_path, asynchronous
):
    state = make_state(mesh_of(4, 2), seed=1, width=256)
    want = jax.tree.map(lambda x: np.array(x, copy=True), state)

    @partial(
        jax.jit, donate_argnums=0, out_shardings=shardings_on(mesh_of(4, 2), state)
    )
    def update(state):
        return jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state)

    with CheckpointManager(
        tmp_path, CheckpointConfig(asynchronous=asynchronous)
    ) as store:
        store.save(1, state, {})
        # While the writer still reads a CPU buffer in place, the runtime declines to
        # reuse it, so the saved state itself may survive; the states after it are
        # updated in place.
        donated = state = update(state)
        for _ in range(20):
            state = update(state)
        jax.block_until_ready(state)
        assert donated.trainable["blocks"].is_deleted()
        assert_bitwise(store.restore(abstract_on(mesh_of(1, 1), want)).state, want)


def test_state_and_metadata_are_one_unit_readable_without_a_device(tmp_path):
    states = saved(tmp_path, [1])
    info = folders.read_step(tmp_path, 1)
    assert info.metadata == {"data": 1}
    assert info.arrays == state_dict.describe(state_dict.to_canonical(states[1]))
    assert names(tmp_path) == ["1"]


def test_a_step_is_sealed_after_its_last_write(tmp_path, monkeypatch):
    """A step that is sealed too early is seldom wrong, so the order is observed."""
    order = []
    finish, seal = orbax_backend.OrbaxBackend.finish, integrity.seal

    def observed_finish(backend):
        finish(backend)
        order.append("written")

    def observed_seal(*arguments, **options):
        order.append("sealed")
        seal(*arguments, **options)

    monkeypatch.setattr(orbax_backend.OrbaxBackend, "finish", observed_finish)
    monkeypatch.setattr(integrity, "seal", observed_seal)
    saved(tmp_path, [1, 2])
    assert order == ["written", "sealed"] * 2


def test_imports_stay_light():
    code = """
        import sys
        import jaxdist.checkpoint.folders, jaxdist.checkpoint.config, jaxdist.checkpoint.integrity
        assert "jax" not in sys.modules, "jax"
        import jaxdist.checkpoint.state_dict, jaxdist.checkpoint.manager
        assert "jax" in sys.modules
        assert not [name for name in sys.modules if name.startswith("orbax")], "orbax"
        jaxdist.checkpoint.manager.preload()
        assert "orbax.checkpoint" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=True)


# ---- when to save, what to keep


@pytest.mark.parametrize(
    ("fields", "due"),
    [
        ({"every_steps": 3}, [3, 6, 9, 10]),
        ({"every_steps": 0}, [10]),
        ({"every_steps": 4, "save_at_end": False}, [4, 8]),
        ({"every_steps": 0, "every_minutes": 1.0, "save_at_end": False}, [4, 7, 10]),
        ({"every_steps": 6, "every_minutes": 1.0, "save_at_end": False}, [4, 6, 9]),
        ({"every_steps": 5}, [5, 10]),
    ],
)
def test_saves_are_due_by_steps_time_and_at_the_end(tmp_path, fields, due):
    seconds_per_step, last = 20.0, 10
    state = {"x": jnp.ones(2)}
    with CheckpointManager(tmp_path, CheckpointConfig(**fields)) as store:
        found = []
        for step in range(1, last + 1):
            now = 1000.0 + seconds_per_step * step
            if store.decide_save(step, now, last=step == last):
                found.append(step)
                store.save(step, state, {})
                assert not store.decide_save(step, now, last=True)
        store.wait()
        assert [result.step for result in store.poll() if result.ok] == due == found


def test_a_failed_save_is_due_again_at_the_end(tmp_path):
    with CheckpointManager(tmp_path, CheckpointConfig(every_steps=1)) as store:
        assert store.decide_save(2, 0.0)
        finish = store._backend.finish
        store._backend.finish = lambda: (
            finish(),
            (tmp_path / "2" / "state" / "x").write_text(0),
        )
        assert not save_and_wait(store, 2, {"x": jnp.ones(2)}).ok
        assert names(tmp_path) == []
        assert store.decide_save(2, 1.0, last=True)
        store._backend.finish = finish
        assert save_and_wait(store, 2, {"x": jnp.ones(2)}).ok
        assert not store.decide_save(2, 1.0, last=True)


def test_a_run_that_is_stopped_saves_even_if_its_end_would_not(tmp_path):
    config = CheckpointConfig(every_steps=0, save_at_end=False)
    with CheckpointManager(tmp_path, config) as store:
        assert not store.decide_save(2, 0.0, last=True)
        assert store.decide_save(2, 0.0, last=True, required=True)


@pytest.mark.parametrize(
    ("steps", "newest", "keep_last", "keep_every", "doomed"),
    [
        ([1, 2, 3, 4], 4, 2, 0, [1, 2]),
        ([1, 2, 3, 4], 4, 1, 0, [1, 2, 3]),
        ([1, 2, 3, 4], 4, 9, 0, []),
        ([10, 20, 30, 40], 40, 1, 20, [10, 30]),
        ([0, 5, 10], 10, 1, 5, []),
        ([1, 2, 8, 9], 2, 1, 0, [1]),
        ([7], 7, 1, 0, []),
        ([1, 2, 3, 4, 5, 6], 6, 7, 0, []),
        ([4, 3, 2, 1], 4, 2, 2, [1]),
    ],
)
def test_which_steps_expire(steps, newest, keep_last, keep_every, doomed):
    found = folders.expired(
        steps, newest=newest, keep_last=keep_last, keep_every=keep_every
    )
    assert found == doomed


def test_keep_last_and_keep_every_together(tmp_path):
    saved(tmp_path, [2, 4, 5, 6, 8, 9], keep_last=2, keep_every=4)
    assert folders.list_steps(tmp_path) == [4, 8, 9]
    assert names(tmp_path) == ["4", "8", "9"]


def test_a_milestone_is_due_and_kept(tmp_path):
    with CheckpointManager(
        tmp_path, CheckpointConfig(every_steps=4, keep_last=1, asynchronous=False)
    ) as store:
        store.milestones = frozenset({3})
        due = [step for step in range(1, 13) if store.decide_save(step, 0.0)]
        assert due == [3, 4, 8, 12]
        for step in due:
            assert save_and_wait(store, step, {"x": jnp.zeros(2)}).ok
    assert folders.list_steps(tmp_path) == [3, 12]


def test_damaged_steps_do_not_push_out_the_good_one(tmp_path):
    states = saved(tmp_path, [1, 2, 3])
    for step in (2, 3):
        shutil.rmtree(tmp_path / str(step) / "state" / "d")
    with CheckpointManager(tmp_path, CheckpointConfig(keep_last=2)) as store:
        store.restore(abstract_on(mesh_of(1, 1), states[1]))
        assert set(store.damaged_steps) == {2, 3}
        assert save_and_wait(store, 4, states[1]).ok
    assert folders.list_steps(tmp_path) == [1, 4]
    assert names(folders.quarantine_folder(tmp_path)) == ["2", "2.json", "3", "3.json"]


def test_faults_of_a_config_are_all_named():
    assert faults(CheckpointConfig()) == []
    bad = CheckpointConfig(
        every_steps=-1,
        every_minutes=-1,
        keep_last=0,
        keep_every=-1,
        patience_s=-1,
        timeout_s=0,
    )
    found = [line.split(":")[0] for line in faults(bad, "checkpoint.")]
    wrong = "every_steps every_minutes keep_last keep_every patience_s timeout_s"
    assert found == [f"checkpoint.{name}" for name in wrong.split()]


# ---- what is reported


def test_a_second_save_waits_for_the_first(tmp_path):
    state = make_state(mesh_of(4, 2))
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert save_and_wait(store, 1, state).ok
        gate, finish = threading.Event(), store._backend.finish
        store._backend.finish = lambda: (gate.wait(), finish())
        store.save(2, state, {})
        assert store.poll() == []
        began = time.monotonic()
        threading.Timer(0.05, gate.set).start()
        store.save(3, state, {})
        waited_s = time.monotonic() - began
        assert gate.is_set()
        store.wait()
        second, third = store.poll()
    assert (second.step, second.ok, third.ok) == (2, True, True)
    assert waited_s >= 0.05
    assert third.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert folders.list_steps(tmp_path) == [2, 3]


def test_a_slow_disk_costs_saves_but_does_not_stop_training(tmp_path):
    state = make_state(mesh_of(4, 2))
    with CheckpointManager(
        tmp_path, CheckpointConfig(patience_s=0.05, every_steps=1)
    ) as store:
        gate, finish = threading.Event(), store._backend.finish
        store._backend.finish = lambda: (gate.wait(), finish())
        store.save(2, state, {})
        for step in (3, 4):
            assert store.decide_save(step, 0.0)
            store.save(step, state, {})
            (left_out,) = store.poll()
            assert (left_out.step, left_out.ok) == (step, False)
            assert f"{tmp_path}: the save of step 2 has taken 0 s" in str(
                left_out.error
            )
        threading.Timer(0.2, gate.set).start()
        assert store.decide_save(4, 0.0, last=True)
        store.save(4, state, {}, wait=True)
        store.wait()
        assert [(result.step, result.ok) for result in store.poll()] == [
            (2, True),
            (4, True),
        ]
    assert names(tmp_path) == ["2", "4"]


def test_a_stuck_disk_does_not_hold_the_end_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxdist.checkpoint.manager._GRACE_S", 0.05)
    store = CheckpointManager(tmp_path, CheckpointConfig(timeout_s=1))
    gate = threading.Event()
    store._backend.finish = gate.wait
    store.save(2, {"x": jnp.ones(2)}, {})
    store.save(3, {"x": jnp.ones(2)}, {}, wait=True)
    assert not store.wait()
    assert [(result.step, result.ok) for result in store.poll()] == [(3, False)]
    store.close()
    gate.set()


def test_a_full_disk_is_reported_and_saving_recovers(tmp_path):
    state = make_state(mesh_of(4, 2), width=128)
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert save_and_wait(store, 1, state).ok
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Python's default: EFBIG
        assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            failed = save_and_wait(store, 2, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not failed.ok
        assert isinstance(failed.error, CheckpointError)
        assert str(failed.error).startswith("step 2 was not saved: ")
        assert "File too large" in str(failed.error)
        assert len(str(failed.error)) < 400 + len(str(tmp_path))
        assert store.steps() == [1]
        assert save_and_wait(store, 3, state).ok
    assert names(tmp_path) == ["1", "3"]


def test_saving_a_step_that_exists_is_an_error_and_changes_nothing(tmp_path):
    states = saved(tmp_path, [1])
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        result = save_and_wait(store, 1, make_state(mesh_of(4, 2), seed=9))
        assert not result.ok
        assert "already exists" in str(result.error)
        assert_bitwise(
            store.restore(abstract_on(mesh_of(1, 1), states[1])).state, states[1]
        )


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        with pytest.raises(TypeError, match="not JSON serializable"):
            store.save(1, {"x": jnp.ones(2)}, {"position": np.int64(3)})
        assert names(tmp_path) == []


def test_a_reader_changes_nothing(tmp_path):
    states = saved(tmp_path, [1])
    running = tmp_path / "2.orbax-checkpoint-tmp"
    running.mkdir()
    with CheckpointManager(tmp_path, CheckpointConfig(), mode="read") as store:
        assert store.steps() == [1]
        assert_bitwise(
            store.restore(abstract_on(mesh_of(1, 1), states[1])).state, states[1]
        )
        with pytest.raises(ValueError, match="opened to read"):
            store.save(2, states[1], {})
    assert running.exists()
    with CheckpointManager(
        tmp_path / "absent", CheckpointConfig(), mode="read"
    ) as store:
        assert store.steps() == []
    assert not (tmp_path / "absent").exists()


# ---- damage


def test_leftovers_are_cleaned_but_only_ours(tmp_path):
    saved(tmp_path, [1])
    ours = ["3.orbax-checkpoint-tmp", "2"]  # 2 is marked as unfinished
    others = [
        "notes",
        "x.orbax-checkpoint-tmp",
        "3.orbax-checkpoint-tmp.bak",
        "4.tmp",
        "5",
    ]
    for name in ours + others:
        (tmp_path / name / "inner").mkdir(parents=True)
    for step in (1, 2, 3):  # 1: it died between the last two files of a save
        folders.mark_unfinished(tmp_path, step)
    assert folders.list_steps(tmp_path) == [1]
    assert folders.all_steps(tmp_path) == [1, 5]
    CheckpointManager(tmp_path, CheckpointConfig()).close()
    assert names(tmp_path) == sorted([*others, "1"])
    assert folders.list_steps(tmp_path) == [1]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "empty folder": lambda step: (shutil.rmtree(step), step.mkdir()),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no metadata": lambda step: shutil.rmtree(step / "metadata"),
    "metadata truncated": lambda step: _truncate(step / "metadata" / "metadata"),
    "metadata of another step": lambda step: (
        step / "metadata" / "metadata"
    ).write_text(json.dumps(run_format.marked({"step": 77, "arrays": {}, "run": {}}))),
    "no data files": lambda step: shutil.rmtree(step / "state" / "d"),
    "manifest truncated": lambda step: _truncate(step / "state" / "manifest.ocdbt"),
    "tree truncated": lambda step: _truncate(step / "state" / "_METADATA"),
    "no array, sealed again": lambda step: _leave_out_and_seal(step, "embed"),
}


def _leave_out_and_seal(step: Path, name: str) -> None:
    """Takes an array out of Orbax's tree, and writes the manifest that goes with it."""
    file, sealed = step / "state" / "_METADATA", integrity.read_manifest(step)
    document = json.loads(file.read_text())
    left = {
        key: value
        for key, value in document["tree_metadata"].items()
        if f"'{name}'" not in key
    }
    assert 0 < len(left) < len(document["tree_metadata"])
    file.write_text(json.dumps(document | {"tree_metadata": left}))
    integrity.seal(step.parent, sealed.step, sealed.run, sealed.fingerprints)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_step_gives_way_to_an_older_one(tmp_path, damage):
    states = saved(tmp_path, [1, 2])
    DAMAGE[damage](tmp_path / "2")
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        restored = store.restore(abstract_on(mesh_of(2, 2), states[1]))
        assert restored.metadata == {"data": 1}
        assert_bitwise(restored.state, states[1])
        assert list(store.damaged_steps) == [2]
        assert len(store.damaged_steps[2]) < 700
        store_reason = store.damaged_steps[2]
        # Training goes on from step 1 and reaches the damaged step again.
        assert save_and_wait(store, 2, states[2], data=2).ok
        aside = folders.quarantine_folder(tmp_path)
        assert names(aside) == ["2", "2.json"]
        assert json.loads((aside / "2.json").read_text())["reason"] == store_reason
        assert_bitwise(
            store.restore(abstract_on(mesh_of(2, 2), states[2])).state, states[2]
        )


def test_folders_without_a_checkpoint_do_not_hide_the_one_that_is(tmp_path):
    states = saved(tmp_path, [12])
    for number in [*range(1000, 1070), 2**31, 99999999999]:
        (tmp_path / str(number)).mkdir()
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert_bitwise(
            store.restore(abstract_on(mesh_of(2, 2), states[12])).state, states[12]
        )
        assert sorted(store.damaged_steps) == list(range(1000, 1070))
        assert store.steps() == [12]
    assert names(tmp_path / "quarantine")[-1] == "1069.json"
    assert (tmp_path / "99999999999").is_dir()


def test_when_no_step_is_usable_each_one_is_named(tmp_path):
    states = saved(tmp_path, [1, 2, 3])
    for step, damage in [
        (1, "no data files"),
        (2, "metadata truncated"),
        (3, "empty folder"),
    ]:
        DAMAGE[damage](tmp_path / str(step))
    with (
        CheckpointManager(tmp_path, CheckpointConfig(), mode="read") as store,
        pytest.raises(CheckpointError, match="no usable checkpoint") as caught,
    ):
        store.restore(abstract_on(mesh_of(1, 1), states[1]))
    assert list(caught.value.steps) == [3, 2, 1]
    assert "manifest.json is missing" in caught.value.steps[3]
    assert "metadata/metadata has" in caught.value.steps[2]
    assert folders.all_steps(tmp_path) == [1, 2, 3]
    assert folders.list_steps(tmp_path) == [1, 2]
    assert all(f"step {step}: " in str(caught.value) for step in (1, 2, 3))


def test_absent_checkpoints_are_said_to_be_absent(tmp_path):
    state = {"x": jnp.ones(2)}
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            store.restore(state)
        assert save_and_wait(store, 4, state).ok
        with pytest.raises(
            CheckpointError, match=r"no checkpoint of step 3 in .*; steps: 4"
        ):
            store.restore(state, step=3)


def test_another_model_is_refused_and_not_replaced_by_an_older_step(tmp_path):
    states = saved(tmp_path, [1, 2])
    abstract = abstract_on(mesh_of(1, 1), states[1])
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        with pytest.raises(state_dict.LayoutError) as caught:
            store.restore(abstract._replace(ema=abstract.trainable, frozen={}))
        assert store.damaged_steps == {}
    assert [line.split(" in the checkpoint: ") for line in caught.value.faults] == [
        ["missing", "ema/blocks float32[2,8,8]"],
        ["missing", "ema/embed bfloat16[16,8]"],
        ["missing", "ema/norm float32[8]"],
        ["unexpected", "frozen/table uint32[8,3]"],
    ]


def test_a_target_without_sharding_is_refused(tmp_path):
    with (
        CheckpointManager(tmp_path, CheckpointConfig()) as store,
        pytest.raises(TypeError, match="without one: x"),
    ):
        store.restore({"x": jax.ShapeDtypeStruct((2,), jnp.float32)})


# ---- processes


KILLED = """
    import os, signal, sys
    import jax, jax.numpy as jnp
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager

    store = CheckpointManager(sys.argv[1], CheckpointConfig())
    store.save(1, {"x": jnp.arange(8.0)}, {"data": 1})
    store.wait()
    assert store.poll()[0].ok
    # Hard to compress, so that the write takes long enough to be hit in the middle.
    big = jax.random.bits(jax.random.key(0), (1 << 24,))
    store.save(2, {"x": big}, {"data": 2})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_mid_save_leaves_the_older_step(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert died.returncode == -signal.SIGKILL, died.stderr
    # It did die in the middle of the save.
    assert names(tmp_path) == ["1", "2.orbax-checkpoint-tmp", "2.unfinished"]
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        assert names(tmp_path) == ["1"]
        restored = store.restore({"x": jnp.zeros(8)})
        assert restored.metadata == {"data": 1}
        assert_bitwise(restored.state, {"x": jnp.arange(8.0)})
        assert save_and_wait(store, 2, restored.state).ok


WORKER = """
    import os, shutil, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager
    from jaxdist.checkpoint import integrity
    from jaxdist.checkpoint.folders import CheckpointError
    from pathlib import Path
    from jax.experimental import multihost_utils

    assert (jax.process_count(), jax.device_count()) == (2, 4)

    def state_on(shape, spec):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("a", "b"))
        shardings = {"w": NamedSharding(mesh, spec), "count": NamedSharding(mesh, P())}
        values = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "count": np.int32(7)}
        return values, {
            name: jax.make_array_from_callback(v.shape, shardings[name], lambda i, v=v: v[i])
            for name, v in values.items()
        }

    config = CheckpointConfig(every_steps=0, every_minutes=1.0, keep_last=2, timeout_s=60)
    values, state = state_on((2, 2), P("a", "b"))
    with CheckpointManager(folder, config) as store:
        # Only process 0's clock says that the minute is over, and at step 10 both agree.
        due = [s for s in range(1, 21) if store.decide_save(s, 9.0 * s * (rank == 0))]
        assert due == [10, 20], due
        for step in (1, 2, 3):
            store.save(step, state, {"data": step})
            store.wait()
            (result,) = store.poll()
            assert result.ok, result.error
        if rank == 0:  # two kinds of damage; both processes must agree on step 2
            os.mkdir(f"{folder}/9")
            for part in ("d", "ocdbt.process_0", "ocdbt.process_1"):
                shutil.rmtree(f"{folder}/3/state/{part}")
        _, target = state_on((1, 4), P("b", None))
        restored = store.restore(target)
        assert restored.metadata == {"data": 2}
        assert list(store.damaged_steps) == [9, 3], store.damaged_steps
        if rank == 0:
            assert sorted(os.listdir(f"{folder}/quarantine")) == ["3", "3.json", "9", "9.json"]
            # A bit of a file that process 1 checks: both processes must pass over the step.
            files = sorted(integrity.read_manifest(Path(folder) / "2").files)
            file = Path(folder) / "2" / files[1]
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        multihost_utils.sync_global_devices("damaged")
        store.damaged_steps.clear()
        try:
            store.restore(target)
        except CheckpointError as error:
            assert list(error.steps) == [2] and "process 1: " in error.steps[2], error
        else:
            raise AssertionError("the damage went unseen")
        store.save(3, state, {"data": 3})
        store.wait()
        assert store.poll()[0].ok
        if rank == 0:
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        for name, array in restored.state.items():
            assert array.sharding == target[name].sharding
            for shard in array.addressable_shards:
                assert np.array_equal(shard.data, values[name][shard.index])
    print("done", rank, flush=True)
"""


def test_two_processes_save_and_restore_and_one_reads_it(tmp_path):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(WORKER),
        str(tmp_path),
        str(free_port()),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, **pipes)
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=90)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    assert folders.list_steps(tmp_path) == [2, 3]
    target = {"w": jnp.zeros((8, 8)), "count": jnp.int32(0)}
    with CheckpointManager(tmp_path, CheckpointConfig(), mode="read") as store:
        restored = store.restore(target)
    assert restored.metadata == {"data": 3}
    want = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "count": np.int32(7)}
    assert_bitwise(restored.state, want)


# ---- what training waits for


def spy(monkeypatch, owner, name, calls):
    """Notes each call of a function as it begins and as it returns."""
    called = getattr(owner, name)

    def noted(*arguments, **options):
        calls.append(f"{name} begins")
        result = called(*arguments, **options)
        calls.append(f"{name} returns")
        return result

    monkeypatch.setattr(owner, name, noted)


def test_nothing_is_hashed_before_orbax_has_copied_the_arrays(tmp_path, monkeypatch):
    calls = []
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        spy(monkeypatch, store._backend, "start", calls)
        before = fingerprint.start
        monkeypatch.setattr(
            fingerprint, "start", lambda arrays: calls.append("sums") or before(arrays)
        )
        spy(monkeypatch, integrity, "seal", calls)
        store.save(1, make_state(mesh_of(4, 2)), {})
        assert store.wait()
        assert store.poll()[0].ok
    assert calls == [
        "start begins",
        "start returns",
        "sums",
        "seal begins",
        "seal returns",
    ]


def test_sums_start_even_where_orbax_fails(tmp_path, monkeypatch):
    """They communicate, and other processes may not have failed."""
    state = make_state(mesh_of(4, 2))
    calls = []
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:
        before = fingerprint.start
        monkeypatch.setattr(
            fingerprint, "start", lambda arrays: calls.append("sums") or before(arrays)
        )

        def fail(*_):
            raise OSError("no disk")

        monkeypatch.setattr(store._backend, "start", fail)
        store.save(1, state, {})
        (failed,) = store.poll()
    assert not failed.ok
    assert "no disk" in str(failed.error)
    assert calls == ["sums"]


def test_a_save_whose_sums_fail_leaves_nothing_behind(tmp_path, monkeypatch):
    state = make_state(mesh_of(4, 2))
    with CheckpointManager(tmp_path, CheckpointConfig()) as store:

        def fail(arrays):
            raise RuntimeError("no memory on the device")

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "start", fail)
            store.save(1, state, {})
            (failed,) = store.poll()
            assert "no memory on the device" in str(failed.error)
        assert names(tmp_path) == []
        assert save_and_wait(store, 2, state).ok
    assert names(tmp_path) == ["2"]


@pytest.mark.parametrize(
    ("asynchronous", "wait", "beside"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_only_a_save_beside_training_has_a_low_priority(
    tmp_path, monkeypatch, asynchronous, wait, beside
):
    found = []
    seal = integrity.seal
    monkeypatch.setattr(
        integrity,
        "seal",
        lambda *a, **options: found.append(options["beside"]) or seal(*a, **options),
    )
    config = CheckpointConfig(asynchronous=asynchronous)
    with CheckpointManager(tmp_path, config) as store:
        store.save(1, make_state(mesh_of(4, 2)), {}, wait=wait)
        assert store.wait()
    assert found == [beside]


@pytest.mark.parametrize("reader_compresses", [False, True])
def test_steps_that_are_compressed_and_others_can_be_read(tmp_path, reader_compresses):
    state = jax.tree.map(jnp.zeros_like, make_state(mesh_of(4, 2), width=512))
    sizes = {}
    for compress in (True, False):
        folder = tmp_path / str(compress)
        with CheckpointManager(folder, CheckpointConfig(compress=compress)) as store:
            assert save_and_wait(store, 0, state).ok
        files = [file for file in folder.rglob("*") if file.is_file()]
        sizes[compress] = sum(file.stat().st_size for file in files)
        config = CheckpointConfig(compress=reader_compresses)
        with CheckpointManager(folder, config) as store:
            restored = store.restore(abstract_on(mesh_of(2, 4), state))
        assert_bitwise(restored.state, state)
    assert sizes[True] < sizes[False] / 2
