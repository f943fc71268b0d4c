"""Times the ways to take the arrays of a save from CPU devices.

    python benchmarks/step/memory_copy.py --gib 1 --rounds 10 \
        --out benchmarks/results/memory-copy.json

A save needs the arrays after the next step has overwritten them. There are three ways:

    host    copy them to memory of the host that is kept, as `memory_tier.py` does
    device  dispatch a copy on the devices
    view    let numpy see the arrays where they are. The runtime then gives the next
            step a copy, because its buffers cannot be donated.

`call` is the time until the arrays are safe or dispatched. `lost` is the time that the
call and the next step take longer than such a step alone. The step is short, and
overwrites the state. No file is written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import jax.numpy as jnp
import measuring
import memory_checkpoint
import numpy as np

from jaxdist.config import trees


def ways(state: dict[str, jax.Array]) -> dict[str, Callable[[Any], Any]]:
    """Makes a function for each way; it takes a state and returns what a save holds."""
    kept = {name: np.ones(array.shape, array.dtype) for name, array in state.items()}
    pool = ThreadPoolExecutor(os.cpu_count())

    def host(state: Any) -> Any:
        sources = [np.asarray(state[name]) for name in kept]
        list(pool.map(np.copyto, kept.values(), sources))
        return kept

    def view(state: Any) -> Any:
        return jax.tree.map(np.asarray, state)

    device = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    return {"host": host, "device": device, "view": view}


def turn(take: Callable[[Any], Any], state: Any) -> tuple[Any, dict[str, float]]:
    """Takes the arrays, and makes a step.

    Returns:
      The state, and the seconds of each measure.
    """
    state, _ = memory_checkpoint.timed_step(state)
    state, alone_s = memory_checkpoint.timed_step(state)
    began = time.perf_counter()
    held = take(state)
    call_s = time.perf_counter() - began
    state, _ = memory_checkpoint.timed_step(state)
    jax.block_until_ready(held)
    lost_s = time.perf_counter() - began - alone_s
    for name, array in state.items():
        if not jnp.array_equal(held[name], -array):
            raise RuntimeError(f"{name} has changed after it was taken")
    return state, {"call_s": call_s, "lost_s": lost_s}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of state")
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", help="JSON file")
    flags = parser.parse_args()
    state = memory_checkpoint.make_state(flags.gib, flags.arrays)
    takes = ways(state)
    rounds = []
    for number in range(-1, flags.rounds):  # the first one warms up
        order = list(takes) if number % 2 == 0 else list(reversed(takes))
        found = {}
        for name in order:
            state, found[name] = turn(takes[name], state)
        if number >= 0:
            rounds.append(found)
    record = measuring.record_head(sys.argv[1:]) | {
        "bytes": trees.tree_bytes(state),
        "arrays": len(state),
        "devices": len(jax.devices()),
        "rounds": rounds,
        "ways": {
            name: {
                measure: measuring.quartiles([each[name][measure] for each in rounds])
                for measure in ("call_s", "lost_s")
            }
            for name in takes
        },
    }
    for name, measures in record["ways"].items():
        for measure, found in measures.items():
            print(
                f"{name}, {measure}: {1e3 * found['median']:.0f} ms "
                f"({1e3 * found['low']:.0f} to {1e3 * found['high']:.0f})"
            )
    measuring.write(flags.out, record)


if __name__ == "__main__":
    main()
