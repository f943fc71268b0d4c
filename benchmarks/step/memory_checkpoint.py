"""Times a save in memory against a save in the folder, and the restore of each.

    python benchmarks/step/memory_checkpoint.py --gib 1 --rounds 8 \
        --out benchmarks/results/memory-checkpoint.json

`blocked` is the time until the call of a save returns. `written` is the time until the
step counts: all files are written and hashed. `restore` is the time until all arrays
are on the devices and their fingerprints are compared. The first save of each side
warms it up and is not counted.

Both sides save the same arrays, in alternating turns. The state is random numbers in
arrays of equal size, split over the devices. `XLA_FLAGS` decides how many CPU devices
there are.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import state_dict
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.checkpoint.memory_tier import MemoryTier
from jaxdist.config import trees

MEASURES = ("blocked_s", "written_s", "restore_s")
RUN = "0123456789abcdef"
TIMEOUT_S = 600


class Side(NamedTuple):
    """One contestant."""

    save: Callable[[int, Any], float]  # starts a save, and returns the seconds
    wait: Callable[[], None]  # waits until the step counts
    # restores the step into the shardings of an abstract state
    restore: Callable[[int, Any], Any]


@contextlib.contextmanager
def folder_side(folder: Path) -> Iterator[Side]:
    """Yields saves in a folder."""
    config = CheckpointConfig(every_steps=1, keep_last=1, timeout_s=TIMEOUT_S)
    with CheckpointManager(folder, config) as manager:

        def save(step: int, state: Any) -> float:
            began = time.perf_counter()
            manager.save(step, state, {})
            return time.perf_counter() - began

        def wait() -> None:
            manager.wait()
            (result,) = manager.poll()
            if not result.ok:
                raise RuntimeError(str(result.error))

        def restore(step: int, abstract: Any) -> Any:
            return manager.restore(abstract, step).state

        yield Side(save, wait, restore)


@contextlib.contextmanager
def memory_side(memory: Path, folder: Path) -> Iterator[Side]:
    """Yields saves in memory."""
    branch_file = folder / "memory.json"
    tier = MemoryTier(str(memory), RUN, branch_file, TIMEOUT_S)
    tier.begin_branch()

    def save(step: int, state: Any) -> float:
        began = time.perf_counter()
        decision = tier.decide(allowed=True, sealed=0, metadata={}, interval=0)
        if not decision.begins:
            raise RuntimeError("the save before has not ended")
        tier.save(step, state_dict.to_canonical(state), decision)
        return time.perf_counter() - began

    def wait() -> None:
        tier.wait()
        (result,) = tier.poll()
        if result.error:
            raise RuntimeError(result.error)

    def restore(step: int, abstract: Any) -> Any:
        reader = MemoryTier(str(memory), RUN, branch_file, TIMEOUT_S)
        reader.look()
        restored = reader.restore(abstract, not_before=step, partial=False)
        if restored is None:
            raise RuntimeError(str(reader.bad))
        return restored.state

    try:
        yield Side(save, wait, restore)
    finally:
        tier.close(delete=True)


def make_state(gib: float, arrays: int) -> dict[str, jax.Array]:
    """Makes arrays of random numbers, split over all devices."""
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, ("fsdp",)), P("fsdp"))
    rows = round(gib * 2**30 / 4 / arrays / 1024 / len(devices)) * len(devices)
    make = jax.jit(
        lambda key: jax.random.normal(key, (rows, 1024), jnp.float32),
        out_shardings=sharding,
    )
    keys = jax.random.split(jax.random.key(0), arrays)
    return {f"array_{number:03d}": make(key) for number, key in enumerate(keys)}


def turn(side: Side, step: int, state: Any) -> dict[str, float]:
    """Saves a step and restores it."""
    jax.block_until_ready(state)
    began = time.perf_counter()
    blocked_s = side.save(step, state)
    side.wait()
    written_s = time.perf_counter() - began
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    began = time.perf_counter()
    restored = jax.block_until_ready(side.restore(step, abstract))
    restore_s = time.perf_counter() - began
    for name, array in state.items():
        if not jnp.array_equal(restored[name], array):
            raise RuntimeError(f"{name} did not come back")
    return {"blocked_s": blocked_s, "written_s": written_s, "restore_s": restore_s}


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    memory = Path(tempfile.mkdtemp(dir=flags.memory))
    folder = Path(tempfile.mkdtemp(dir=flags.folder))
    state = make_state(flags.gib, flags.arrays)
    rounds = []
    try:
        with (
            memory_side(memory, folder) as in_memory,
            folder_side(folder / "checkpoints") as in_folder,
        ):
            sides = {"memory": in_memory, "folder": in_folder}
            for number in range(-1, flags.rounds):  # the first one warms up
                order = list(sides) if number % 2 == 0 else list(reversed(sides))
                found = {name: turn(sides[name], number + 2, state) for name in order}
                if number >= 0:
                    rounds.append(found)
                    print(f"round {number + 1}/{flags.rounds}: {_text(found)}")
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    record = measuring.record_head(sys.argv[1:]) | {
        "bytes": trees.tree_bytes(state),
        "arrays": len(state),
        "devices": len(jax.devices()),
        "rounds": rounds,
        "sides": {
            name: {
                measure: measuring.quartiles([found[name][measure] for found in rounds])
                for measure in MEASURES
            }
            for name in sides
        },
        "ratio": {
            measure: measuring.quartiles(
                [x["memory"][measure] / x["folder"][measure] for x in rounds]
            )
            for measure in MEASURES
        },
    }
    for measure, ratio in record["ratio"].items():
        print(
            f"{measure}: in memory {ratio['median']:.2f} x the folder "
            f"({ratio['low']:.2f} to {ratio['high']:.2f})"
        )
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of state")
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--folder", help="folder (default: a temporary one)")
    parser.add_argument("--out", help="JSON file")
    return parser


def _text(found: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{key} {1e3 * x:.0f} ms" for key, x in times.items())
        for name, times in found.items()
    )


if __name__ == "__main__":
    main()
