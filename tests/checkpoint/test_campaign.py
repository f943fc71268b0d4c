"""Long campaigns: kill -9 in saves, every damage through whole runs, what a save costs.
`-m slow`
"""

import gc
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.telemetry.metrics import read_events
from support.checkpoints import (
    DAMAGE,
    assert_bitwise,
    names,
    straight_fixture,  # noqa: F401  pytest finds them here
)
from support.paths import ROOT
from support.runs import losses, train

pytestmark = pytest.mark.slow

SAVER = """
    import sys
    import jax, jax.numpy as jnp
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager

    def state(step):
        return {"x": jax.random.bits(jax.random.key(step), (1 << 20,)), "step": jnp.int32(step)}

    with CheckpointManager(sys.argv[1], CheckpointConfig(keep_last=2)) as store:
        step = int(store.restore(state(0)).state["step"]) if store.steps() else 0
        began = step
        while True:
            step += 1
            store.save(step, state(step), {"data": step})
            store.wait()
            (saved,) = store.poll()
            assert saved.ok
            print(began, saved.seconds, flush=True)
"""


def test_kill_9_at_20_random_moments_of_saving(tmp_path):
    draw, seen = random.Random(0), []
    folder = tmp_path / "run" / "checkpoints"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    for _ in range(20):
        saver = [sys.executable, "-c", textwrap.dedent(SAVER), str(folder)]
        process = subprocess.Popen(
            saver, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()  # of the first save, which is slower
        began, seconds = process.stdout.readline().split()
        time.sleep(draw.uniform(0, 2 * float(seconds)))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        left = [name for name in names(folder) if not name.isdecimal()]
        seen.append((int(began), sorted(left)))
        for step in folders.list_steps(folder):
            integrity.check(folder, step)
        target = {"x": jnp.zeros(1 << 20, jnp.uint32), "step": jnp.int32(0)}
        with CheckpointManager(folder, CheckpointConfig()) as store:
            found = store.restore(target)
            assert store.damaged_steps == {}
            assert names(folder) == sorted(map(str, store.steps()))
        step = found.metadata["data"]
        assert step == folders.list_steps(folder)[-1] == int(found.state["step"])
        assert_bitwise(
            found.state["x"], jax.random.bits(jax.random.key(step), (1 << 20,))
        )
    print(seen)
    assert [s for s, _ in seen] == sorted(s for s, _ in seen)  # no start goes back
    assert sum(bool(left) for _, left in seen) >= 5  # it did die in the middle of saves
    assert not (tmp_path / "run" / "quarantine").exists()


WAITING = """
    import sys
    import jax, jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager
    from jaxdist.distributed import initialize

    initialize.join_processes()
    def collective(name):
        raise AssertionError(f"a collective of Orbax: {name}")
    multihost_utils.sync_global_devices = collective
    split = jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
    state = {"x": jax.jit(lambda: jnp.arange(8.0), out_shardings=split)()}
    with CheckpointManager(sys.argv[1], CheckpointConfig()) as store:
        for number in (1, 2):
            store.save(number, state, {"data": number})
            store.wait()
            assert [saved.ok for saved in store.poll()] == [True]
        target = {"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}
        assert store.restore(target).metadata == {"data": 2}
"""


def test_processes_that_save_wait_for_each_other_in_no_collective(tmp_path):
    """In one, those that a failed save leaves behind would be answered by the next
    step's.
    """
    agent = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--max-restarts",
        "0",
        "--processes",
        "2",
    ]
    command = [*agent, "--devices-per-process", "1", "--", sys.executable, "-c"]
    done = subprocess.run(
        [*command, textwrap.dedent(WAITING), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert folders.list_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("damaged", [28, 21], ids=["newest", "second newest"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_each_damage_through_a_whole_run(straight, tmp_path, damage, damaged):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    checkpoints = workdir / "checkpoints"
    if damage == "an older step in its place":
        shutil.rmtree(checkpoints / str(damaged))
        shutil.copytree(checkpoints / "14", checkpoints / str(damaged))
    else:
        DAMAGE[damage][0](checkpoints / str(damaged))
    if damaged == 21:  # so that the damaged one is what the run would use
        shutil.rmtree(checkpoints / "28")
    done = train(workdir, train__steps=28, optimizer__schedule="constant")
    right = 14 if damaged == 21 else 21
    assert f"resumed after step {right}" in done.stdout
    assert [
        e["step"] for e in read_events(workdir) if e["event"] == "bad_checkpoint"
    ] == [damaged]
    assert names(workdir / "quarantine") == [str(damaged), f"{damaged}.json"]
    again, once = (
        integrity.read_manifest(run / "checkpoints" / "28")
        for run in (workdir, straight)
    )
    assert again.fingerprints == once.fingerprints
    assert losses(workdir) == losses(straight)


def rss_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(
        next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[
            1
        ]
    )


COST = """
    import json, sys, time
    import jax, jax.numpy as jnp
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager

    state = {f"x{i}": jax.random.normal(jax.random.key(i), (1 << 26,)) for i in range(4)}
    jax.block_until_ready(state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 1.0001, s), donate_argnums=0)
    with CheckpointManager(sys.argv[1], CheckpointConfig(keep_last=1)) as store:
        store.prepare(state)
        for number in range(1, 8):
            before = time.monotonic()
            store.save(number, state, {})
            blocked, before = time.monotonic() - before, time.monotonic()
            state = jax.block_until_ready(step(state))
            stepped = time.monotonic() - before
            store.wait()
            (saved,) = store.poll()
            assert saved.ok and saved.bytes == 1 << 30, saved
            print(json.dumps([blocked, saved.seconds, stepped]), flush=True)
"""


def test_an_asynchronous_save_of_1_gib_holds_training_for_a_small_part(tmp_path):
    """The one test that looks at times: as a ratio, of medians, both under the same
    load.
    """
    saver = [sys.executable, "-c", textwrap.dedent(COST), str(tmp_path)]
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        saver, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    rows = [eval(line) for line in done.stdout.splitlines()]
    print(*rows, sep="\n")
    assert len(rows) == 7
    assert statistics.median(blocked / seconds for blocked, seconds, _ in rows) <= 0.15


def test_200_saves_leave_no_memory_behind(tmp_path):
    # 16 MiB
    state = {
        f"x{i}": jax.random.normal(jax.random.key(i), (1 << 19,)) for i in range(8)
    }
    sizes = []
    with CheckpointManager(tmp_path, CheckpointConfig(keep_last=1)) as store:
        for number in range(1, 201):
            store.save(number, state, {"data": number})
            store.wait()
            assert all(saved.ok for saved in store.poll())
            if number % 20 == 0:
                gc.collect()
                sizes.append(rss_kib())
    print(sizes)
    assert max(sizes[1:]) <= 1.05 * sizes[1]
    assert names(tmp_path) == ["200"]


def test_500_tiny_saves_cost_no_memory(tmp_path):
    """In a process of its own, with one pool of memory: the median of all slopes between
    two measurements, so that a single jump of the allocator does not count.
    """
    program = [sys.executable, "-m", "support.saves_memory", str(tmp_path), "500"]
    variables = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        program,
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    late = [row for row in rows if row[0] >= 100]
    assert len(late) == 21
    slopes = [
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in itertools.combinations(late, 2)
    ]
    print(rows, statistics.median(slopes))
    assert statistics.median(slopes) <= 1.0, "KiB a save"
    # 24 lists a save, before
    assert late[-1][2] - late[0][2] < 100
