"""Times a save in memory against a save in the folder, and the restore of each.

    python benchmarks/step/memory_checkpoint.py --gib 1 --rounds 8 --orbax \
        --out benchmarks/results/memory-checkpoint.json

`blocked` is the time until the call of a save returns. `lost` is the time that a save and
the next step take longer than such a step alone. The step is short, and overwrites the
state. It may have to copy what the save has left in place. `written` is the time until the
step counts: all files are written and hashed. `restore` is the time until all arrays
are on the devices and their fingerprints are compared. The first save of each side
warms it up and is not counted.

Older steps in memory are deleted when a save begins, so that one file is held.

`--orbax` adds Orbax's peer-to-peer manager, which also saves in memory here. It hashes
nothing. Its program, `orbax.checkpoint.experimental.emergency.p2p`, has one replica.

All sides save the same arrays, in alternating turns. The state is random numbers in
arrays of equal size, split over the devices. `XLA_FLAGS` decides how many CPU devices
there are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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

MEASURES = ("blocked_s", "lost_s", "written_s", "restore_s")
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
        decision = tier.decide(allowed=True, sealed=step, metadata={}, interval=0)
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


@contextlib.contextmanager
def orbax_side(memory: Path, state: dict[str, jax.Array]) -> Iterator[Side]:
    """Yields saves of Orbax's peer-to-peer manager in memory."""
    # a module that is experimental must not stop the other sides
    from orbax.checkpoint import args as orbax_args
    from orbax.checkpoint import checkpoint_utils
    from orbax.checkpoint.experimental.emergency.p2p import (
        args,
        checkpoint_manager,
        options,
    )

    (mesh,) = {array.sharding.mesh for array in state.values()}
    manager = checkpoint_manager.CheckpointManager(
        mesh,
        abstract_of(state),
        memory,
        options=options.CheckpointManagerOptions(
            local=options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=1),
            replica_axis_index=mesh.axis_names.index("replica"),
        ),
    )

    def save(step: int, state: Any) -> float:
        began = time.perf_counter()
        manager.save(step, args.Composite(state=orbax_args.PyTreeSave(state)))
        return time.perf_counter() - began

    def restore(step: int, abstract: Any) -> Any:
        item = orbax_args.PyTreeRestore(
            abstract, checkpoint_utils.construct_restore_args(abstract)
        )
        return manager.restore(step, args.Composite(state=item)).state

    try:
        yield Side(save, manager.wait_until_finished, restore)
    finally:
        manager.close()


def abstract_of(state: Any) -> Any:
    """Describes arrays by shape, type and sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def make_state(gib: float, arrays: int) -> dict[str, jax.Array]:
    """Makes arrays of random numbers, split over all devices."""
    devices = np.array(jax.devices()).reshape(1, -1)  # Orbax asks for replicas
    sharding = NamedSharding(Mesh(devices, ("replica", "fsdp")), P("fsdp"))
    rows = round(gib * 2**30 / 4 / arrays / 1024 / devices.size) * devices.size
    make = jax.jit(
        lambda key: jax.random.normal(key, (rows, 1024), jnp.float32),
        out_shardings=sharding,
    )
    keys = jax.random.split(jax.random.key(0), arrays)
    return {f"array_{number:03d}": make(key) for number, key in enumerate(keys)}


@functools.partial(jax.jit, donate_argnums=0)
def negate(state: Any) -> Any:
    """Changes the state in its place. A second call changes it back."""
    return jax.tree.map(jnp.negative, state)


def timed_step(state: Any) -> tuple[Any, float]:
    """Makes a step, and returns the state and the seconds."""
    began = time.perf_counter()
    state = jax.block_until_ready(negate(state))
    return state, time.perf_counter() - began


def turn(side: Side, step: int, state: Any) -> tuple[Any, dict[str, float]]:
    """Saves a step, trains one more, and restores the saved one.

    Returns:
      The state, and the seconds of each measure.
    """
    abstract = abstract_of(state)
    state, _ = timed_step(state)
    state, alone_s = timed_step(state)
    began = time.perf_counter()
    blocked_s = side.save(step, state)
    state, _ = timed_step(state)
    lost_s = time.perf_counter() - began - alone_s
    side.wait()
    written_s = time.perf_counter() - began
    began = time.perf_counter()
    restored = jax.block_until_ready(side.restore(step, abstract))
    restore_s = time.perf_counter() - began
    for name, array in state.items():
        if not jnp.array_equal(restored[name], -array):
            raise RuntimeError(f"{name} did not come back")
    return state, {
        "blocked_s": blocked_s,
        "lost_s": lost_s,
        "written_s": written_s,
        "restore_s": restore_s,
    }


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    memory = Path(tempfile.mkdtemp(dir=flags.memory))
    folder = Path(tempfile.mkdtemp(dir=flags.folder))
    state = make_state(flags.gib, flags.arrays)
    record = measuring.record_head(sys.argv[1:]) | {
        "bytes": trees.tree_bytes(state),
        "arrays": len(state),
        "devices": len(jax.devices()),
    }
    rounds = []
    try:
        with contextlib.ExitStack() as stack:
            sides = {
                "memory": stack.enter_context(memory_side(memory, folder)),
                "folder": stack.enter_context(folder_side(folder / "checkpoints")),
            }
            if flags.orbax:
                (memory / "orbax").mkdir()
                side = orbax_side(memory / "orbax", state)
                sides["orbax"] = stack.enter_context(side)
            for number in range(-1, flags.rounds):  # the first one warms up
                order = list(sides) if number % 2 == 0 else list(reversed(sides))
                found = {}
                for name in order:
                    state, found[name] = turn(sides[name], number + 2, state)
                if number >= 0:
                    rounds.append(found)
                    text = _text(found)
                    print(f"round {number + 1}/{flags.rounds}: {text}", flush=True)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    record["rounds"] = rounds
    record["sides"] = {
        name: {
            measure: measuring.quartiles([found[name][measure] for found in rounds])
            for measure in MEASURES
        }
        for name in sides
    }
    record["memory_over"] = {
        other: {
            measure: measuring.quartiles(
                [found["memory"][measure] / found[other][measure] for found in rounds]
            )
            for measure in MEASURES
        }
        for other in sides
        if other != "memory"
    }
    for other, ratios in record["memory_over"].items():
        for measure, ratio in ratios.items():
            print(
                f"{measure}: in memory {ratio['median']:.2f} x {other} "
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
    parser.add_argument(
        "--orbax", action="store_true", help="also time Orbax's peer-to-peer manager"
    )
    parser.add_argument("--out", help="JSON file")
    return parser


def _text(found: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{key} {1e3 * x:.0f} ms" for key, x in times.items())
        for name, times in found.items()
    )


if __name__ == "__main__":
    main()
