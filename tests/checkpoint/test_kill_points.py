"""A kill between any two system calls of saves and deletions: the older step stays
usable, at every point.
"""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from jaxdist.checkpoint import folders, integrity
from support import syscalls
from support.paths import ROOT

SAVER = """
    import sys
    import jax.numpy as jnp
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.manager import CheckpointManager

    with CheckpointManager(sys.argv[1], CheckpointConfig(keep_last=1)) as store:
        for step in (1, 2, 3):
            store.save(step, {"x": jnp.arange(64.0) + step, "step": jnp.int32(step)}, {"data": step})
            store.wait()
            (saved,) = store.poll()
            assert saved.ok, saved.error
"""


@pytest.mark.skipif(not syscalls.available, reason="needs strace")
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_after_any_system_call_loses_no_step(tmp_path, every):
    """The calls of a real run are done again; after each `every`-th a start looks at
    what is there.
    """
    folder, again = tmp_path / "checkpoints", tmp_path / "again"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    saver = [sys.executable, "-c", textwrap.dedent(SAVER), str(folder)]
    try:
        calls = syscalls.trace(saver, tmp_path / "log", cwd=ROOT, env=environment)
    except subprocess.CalledProcessError:
        pytest.skip("strace may not trace here")
    newest, points = 0, 0
    for _ in syscalls.replay(calls, folder, again):
        points += 1
        if points % every:
            continue
        found = newest_usable(again, tmp_path / "start")
        assert found >= newest, f"call {points}: step {newest} was usable, now {found}"
        newest = found
    assert newest_usable(again, tmp_path / "start") == 3
    assert points > 100, "calls at which the process was killed"
    assert syscalls.same_files(folder, again), (
        "the calls that were done again are not all there were"
    )
    print(f"{points // every} of {points} points, none lost a step")


def newest_usable(folder, start) -> int:
    """Returns the newest step that a start on a copy of the folder finds; all that it
    lists must be sound.
    """
    shutil.rmtree(start, ignore_errors=True)
    shutil.copytree(folder, start)
    identity = integrity.identity(start, create=False)
    folders.remove_leftovers(start)
    for step in (steps := folders.all_steps(start)):
        integrity.check(start, step, run=identity)
    left = {path.name for path in start.iterdir() if path.is_dir()}
    assert left == {str(step) for step in steps}
    return max(steps, default=0)
