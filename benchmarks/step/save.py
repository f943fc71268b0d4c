"""Times an asynchronous save of jaxdist against plain Orbax, on the same state.

    python benchmarks/step/save.py --rounds 12 --out benchmarks/results/save.json

`blocked` is the time until the call of a save returns. `processor` is the processor
time of all threads until the save is finished, while no step runs. `beside` is the time
of a step beside a running save over that of a step without one. `delay` is how much
longer all steps beside a save take together.

Plain Orbax is `AsyncCheckpointer` with the defaults of its handler for trees. It proves
nothing of what it has written; jaxdist's save ends with the sealed manifest. Both take
turns and write to one folder. Steps are deleted between the measurements.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring
import orbax.checkpoint as ocp
import sides

from jaxdist.checkpoint import state_dict
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import trees
from jaxdist.step.train_step import TrainStep

MEASURES = ("blocked_s", "processor_s", "written_s", "beside", "delay_s")


class Saver(Protocol):
    """One contestant."""

    def save(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Starts a save."""

    def wait(self) -> None:
        """Waits for the save, and checks that it has succeeded."""


class Jaxdist:
    """Saves by jaxdist's manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = CheckpointConfig(every_steps=1, keep_last=1_000_000)
        self._manager = CheckpointManager(folder, config)

    def save(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Starts a save."""
        self._manager.save(step, trees.unflatten_names(arrays), {})

    def wait(self) -> None:
        """Waits for the save, and checks that it has succeeded."""
        self._manager.wait()
        (result,) = self._manager.poll()
        if not result.ok:
            raise RuntimeError(str(result.error))


class Orbax:
    """Saves by Orbax alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Starts a save."""
        tree = ocp.args.PyTreeSave(trees.unflatten_names(arrays))
        self._checkpointer.save(self._folder / str(step), args=tree)

    def wait(self) -> None:
        """Waits for the save, and checks that it has succeeded."""
        self._checkpointer.wait_until_finished()


def main() -> None:
    """Runs the command."""
    flags = sides.parse(_parser(), sys.argv[1:])
    sides.start(flags)
    run = sides.read_run(flags)
    _, built = sides.built(run)
    side = sides.build_jaxdist(run, sides.full_batch(run))
    side.advance(3)
    num_bytes = trees.tree_bytes(_arrays(built, side))
    print(f"{num_bytes / 1e6:.0f} MB, {len(_arrays(built, side))} arrays")
    rounds = []
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        savers = {"jaxdist": Jaxdist, "orbax": Orbax}
        made = {key: new(Path(name) / key) for key, new in savers.items()}
        for number in range(-1, flags.rounds):  # the first one warms up
            order = list(made) if number % 2 == 0 else list(reversed(made))
            found = {
                key: turn(made[key], Path(name) / key, built, side) for key in order
            }
            if number >= 0:
                rounds.append(found)
                print(f"round {number + 1}/{flags.rounds}: {_text(found)}", flush=True)
    record = measuring.record_head(sys.argv[1:]) | {
        "run": {"name": flags.config or flags.shape},
        "bytes": num_bytes,
        "rounds": rounds,
        "sides": {
            key: {
                measure: measuring.quartiles([r[key][measure] for r in rounds])
                for measure in MEASURES
            }
            for key in savers
        },
        "ratio": {
            measure: measuring.quartiles(
                [r["jaxdist"][measure] / r["orbax"][measure] for r in rounds]
            )
            for measure in ("blocked_s", "processor_s", "written_s")
        },
    }
    for line in lines(record):
        print(line)
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sides.add_run_flags(parser, default="std")
    # Short steps show what a save costs them.
    parser.set_defaults(batch=1, sequence=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--folder", help="folder to write to (default: a temporary one)"
    )
    parser.add_argument("--out", help="JSON file")
    return parser


def _arrays(built: TrainStep, side: sides.Side) -> dict[str, jax.Array]:
    """Lists the arrays of the side's state as a checkpoint stores them."""
    return state_dict.to_canonical(built.views.flat(side.state))


def turn(
    saver: Saver, folder: Path, built: TrainStep, side: sides.Side
) -> dict[str, float]:
    """Measures two saves of a contestant: while no step runs, and beside steps."""
    arrays = _arrays(built, side)
    jax.block_until_ready(arrays)
    wall, processor = time.perf_counter(), time.process_time()
    saver.save(1, arrays)
    blocked_s = time.perf_counter() - wall
    saver.wait()
    written_s = time.perf_counter() - wall
    processor_s = time.process_time() - processor
    del arrays  # the steps donate them
    shutil.rmtree(folder / "1")

    alone_s = statistics.median(_timed_step(side) for _ in range(10))
    saver.save(2, _arrays(built, side))
    ended = threading.Event()

    def wait() -> None:
        saver.wait()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    steps = []
    while not ended.is_set():
        steps.append(_timed_step(side))
    waiting.join()
    shutil.rmtree(folder / "2")
    return {
        "blocked_s": blocked_s,
        "processor_s": processor_s,
        "written_s": written_s,
        "step_s": alone_s,
        "steps_beside": len(steps),
        "beside": statistics.fmean(steps) / alone_s,
        "delay_s": sum(steps) - len(steps) * alone_s,
    }


def _timed_step(side: sides.Side) -> float:
    began = time.perf_counter()
    side.advance(1)
    return time.perf_counter() - began


def lines(record: dict) -> list[str]:
    """Formats what a person wants to read of the record."""
    found = record["sides"]
    out = [
        f"{measure}: jaxdist {found['jaxdist'][measure]['median']:.3f}, "
        f"orbax {found['orbax'][measure]['median']:.3f}"
        for measure in MEASURES
    ]
    out += [
        f"{measure}: {ratio['median']:.2f} x Orbax alone "
        f"({ratio['low']:.2f} to {ratio['high']:.2f})"
        for measure, ratio in record["ratio"].items()
    ]
    return out


def _text(found: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{key} blocked {1e3 * x['blocked_s']:.0f} ms, cpu {x['processor_s']:.2f} s, "
        f"written {x['written_s']:.2f} s, beside {x['beside']:.2f} x, "
        f"delay {x['delay_s']:.2f} s"
        for key, x in found.items()
    )


if __name__ == "__main__":
    raise SystemExit(sides.report_faults(main))
