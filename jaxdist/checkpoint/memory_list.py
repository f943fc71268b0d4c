"""Steps in the memory of this host, as `jaxdist checkpoint list` shows them.

It needs numpy, but neither jax nor a device.
"""

import contextlib
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import memory_store
from jaxdist.checkpoint.folders import CheckpointError


def rows(file: Path, folder: Path) -> list[dict[str, Any]]:
    """Describes the steps that a restart on this host would see, ascending.

    Args:
      file: `memory.json` of the workdir.
      folder: folder of the checkpoints.
    """
    branch = memory_store.read_branch(file)
    if branch is None or branch.is_set_back(folder):
        return []
    try:
        place = memory_store.expand(branch.folder)
    except CheckpointError as error:
        return [{"folder": branch.folder, "fault": str(error)}]
    store = memory_store.MemoryStore(place, run=branch.run, branch=branch.name)
    steps = [
        _step(store, step, sizes) for step, sizes in sorted(store.inventory().items())
    ]
    return [row for row in steps if row]


def _step(
    store: memory_store.MemoryStore, step: int, sizes: dict[int, int]
) -> dict[str, Any]:
    """Describes a step by its files with a sound header; {} if there is none."""
    num_owners = 0
    sound = {}
    for owner, size in sizes.items():
        # deleted meanwhile, damaged, or of a history that the run has left
        with contextlib.suppress(KeyError, CheckpointError):
            num_owners = store.read_header(step, owner).header.owners
            sound[owner] = size
    if not sound:
        return {}
    return {
        "step": step,
        "bytes": sum(sound.values()),
        "parts": f"{len(sound)} of {num_owners}",
        "complete": len(sound) == num_owners,
        "folder": str(store.folder),
    }
