"""Turns of steps: sides are warmed up, then timed in turns or one after the other."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import measuring
import numpy as np
from jax.experimental import multihost_utils
from sides import Side

ROUND_S = 0.5  # a turn is as many steps as fill this time


@dataclasses.dataclass
class Measured:
    """One side's numbers; the side itself may be deleted."""

    name: str
    times: list[measuring.Timing]
    steps: int  # of a round
    numbers: dict  # of its program and its losses


def measure(
    makers: Sequence[Callable[[], Side]],
    flags: argparse.Namespace,
    say: Callable[..., None],
) -> list[Measured]:
    """Measures each side: turn by turn, or one side after the other."""
    groups = [[maker] for maker in makers] if flags.apart else [makers]
    out: list[Measured] = []
    for group in groups:  # all by as many steps as the first
        out += measure_together(group, flags.rounds, out[0].steps if out else None, say)
    return out


def measure_together(
    makers: Sequence[Callable[[], Side]],
    rounds: int,
    steps: int | None,
    say: Callable[..., None],
) -> list[Measured]:
    """Measures sides that take turns, and frees their memory.

    Args:
      makers: make the sides.
      rounds: number of turns of each side.
      steps: steps in a turn; None: as many as fill ROUND_S.
      say: receives a line per round.
    """
    return take_turns([warm(maker(), say) for maker in makers], rounds, steps, say)


def take_turns(
    present: Sequence[Side], rounds: int, steps: int | None, say: Callable[..., None]
) -> list[Measured]:
    """Measures warm sides that take turns; see `measure_together`."""
    inner = steps_per_turn(present) if steps is None else steps
    if steps is not None:
        for side in present:
            # as `steps_per_turn` does: losses are compared after equal numbers of steps
            side.advance(1)

    def report(number: int, times: list[measuring.Timing]) -> None:
        cells = (
            f"{side.name} {1e3 * t.wall_s / inner:.1f} ms ({1e3 * t.processor_s / inner:.1f} cpu)"
            for side, t in zip(present, times, strict=True)
        )
        say(f"round {number + 1}/{rounds}: {', '.join(cells)}", flush=True)

    times = measuring.interleaved(
        [partial(side.advance, inner) for side in present], rounds, report
    )
    return [
        Measured(side.name, found, inner, program_numbers(side))
        for side, found in zip(present, times, strict=True)
    ]


def warm(side: Side, say: Callable[..., None]) -> Side:
    """Runs two steps of a side and returns it."""
    side.advance(1)
    side.first_loss = float(side.metrics["loss"])
    side.advance(1)
    say(
        f"{side.name}: compiled in {side.compile_s:.1f} s, first loss {side.first_loss:.7f}",
        flush=True,
    )
    return side


def steps_per_turn(present: Sequence[Side]) -> int:
    """Chooses the number of steps that fill a turn, equal in all processes."""
    slowest = max(measuring.timed(partial(side.advance, 1)).wall_s for side in present)
    if jax.process_count() > 1:
        slowest = float(multihost_utils.process_allgather(np.float32(slowest)).max())
    return max(1, math.ceil(ROUND_S / slowest))


def program_numbers(side: Side) -> dict:
    """Collects the memory, compile time and losses of a side."""
    memory = side.compiled.memory_analysis()
    sizes = ("argument", "output", "alias", "temp")
    found = {
        f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") if memory else None
        for name in sizes
    }
    here = [d for d in jax.local_devices()[:1] if d.memory_stats()]
    return found | {
        # Of the process so far: what came before this side counts, too.
        "device_peak_bytes": here[0].memory_stats().get("peak_bytes_in_use")
        if here
        else None,
        "compile_s": side.compile_s,
        "first_loss": side.first_loss,
        "last_loss": float(side.metrics["loss"]),
    }
