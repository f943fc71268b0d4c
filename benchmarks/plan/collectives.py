"""Times collectives over each mesh axis of a config, as a calibration for `plan`.

    python benchmarks/plan/collectives.py --config llama3_8b --config.mesh.tensor=4 --out calibration.json
    python -m jaxdist.plan --config llama3_8b --on here --calibration calibration.json

A call runs a chain of collectives in one loop. Each waits for the one before, so the
time of a launch cancels out. The result is scaled by 0.5 in between, because a step
reads it as well. All groups of an axis run at once. A line is fitted through the times
of all sizes: latency and bandwidth.

Bandwidths are those of nccl-tests: algbw = payload / time, busbw = bytes that each
device sends / time. The payload is the larger of the two arrays. With several
processes, start the same command in each.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import jax.numpy as jnp
import measuring
import sides
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import interop
from jaxdist.config import ConfigError
from jaxdist.parallel.mesh import MeshShape, build_mesh
from jaxdist.planner import on_target, targets
from jaxdist.planner.calibration import MAX_RESIDUAL, Fit, fit_line
from jaxdist.planner.formulas import KINDS, wire_bytes
from jaxdist.planner.targets import Link, Target
from jaxdist.trainer import cli, exit_code

ROUNDS = 5
SMALLEST, LARGEST, FACTOR = 2**10, 2**28, 4
LEAST_SIZES = 3  # through two a line always passes
ITEM = 4  # bytes of a float32


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags, run = cli.parse(_parser(), arguments, weight_sources=interop.WEIGHT_SOURCES)
    printing = sides.start(flags)
    sizes = sizes_between(flags.smallest, flags.largest)
    target = targets.parse(flags.on, jax.devices())
    if target.num_devices != jax.device_count():
        raise ConfigError(
            f"--on={flags.on}: {target.num_devices} devices, here are {jax.device_count()}"
        )
    shape = on_target.validate_for(run, target).shape
    mesh, rows, fits = build_mesh(run.mesh), [], []
    say = print if printing else lambda *_: None
    say(f"{target.text}, {shape}")
    for axis in measured_axes(shape):
        link = target.axis_link(shape, axis)
        for kind in KINDS:
            found = list(_measured(kind, mesh, axis, sizes, link, say))
            rows += found
            fits.append(_fit(found, link))
            say(_line(fits[-1]))
    measuring.write(flags.out, _record(target, rows, fits))
    return 0


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Returns the payloads to measure, in bytes.

    Raises:
      ConfigError: there are too few for a line.
    """
    least = smallest * FACTOR ** (LEAST_SIZES - 1)
    faults = (
        []
        if smallest >= SMALLEST
        else [f"--smallest={smallest}: must be at least {SMALLEST}"]
    )
    if largest < least:
        faults.append(
            f"--largest={largest}: must be at least {least}, for a line through 3 sizes"
        )
    if faults:
        raise ConfigError(faults)
    return [smallest * FACTOR**i for i in range(20) if smallest * FACTOR**i <= largest]


def measured_axes(shape: MeshShape) -> list[str]:
    """Returns the mesh axes with several devices and, if there are two or more, all of
    them together.
    """
    axes = [axis for axis, size in shape.sizes.items() if size > 1]
    if not axes:
        raise ConfigError(
            "one device has no collectives; give more, or --devices for emulated ones"
        )
    return axes if len(axes) == 1 else [*axes, "+".join(axes)]


def step_of(
    kind: str, axes: tuple[str, ...], n: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns one link of a chain, for `shard_map`: a device's array to one of the same
    shape.

    An all-gather's is its own part; others' are the payload. Barriers keep the compiler
    from taking a part of a result for less work than the whole.
    """

    def gather(x: jax.Array) -> jax.Array:
        whole = jax.lax.optimization_barrier(jax.lax.all_gather(x, axes, tiled=True))
        return 0.5 * whole[-x.size :]

    def scatter(x: jax.Array) -> jax.Array:
        part = jax.lax.optimization_barrier(jax.lax.psum_scatter(x, axes, tiled=True))
        return jax.lax.dynamic_update_slice(x, 0.5 * part, (0,))

    ring = [(i, (i + 1) % n) for i in range(n)]
    return {
        "all-gather": gather,
        "reduce-scatter": scatter,
        "all-reduce": lambda x: 0.5 * jax.lax.psum(x, axes),
        "all-to-all": lambda x: 0.5 * jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
        "collective-permute": lambda x: 0.5 * jax.lax.ppermute(x, axes, ring),
    }[kind]


def chain(
    kind: str, mesh: Mesh, axes: tuple[str, ...]
) -> Callable[[int, jax.Array], jax.Array]:
    """Returns the jitted chain: its length and an array with an equal part on each
    device to the same.
    """
    n = _devices_of(mesh, axes)
    step, everywhere = step_of(kind, axes, n), P(mesh.axis_names)

    def links(k: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, k, lambda _, x: step(x), x)

    mapped = jax.shard_map(
        links,
        mesh=mesh,
        in_specs=(P(), everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=1)


def _devices_of(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _measured(
    kind: str,
    mesh: Mesh,
    axis: str,
    sizes: Sequence[int],
    link: Link,
    say: Callable[[str], Any],
) -> Iterator[dict[str, Any]]:
    """Yields a row for each size, and says it."""
    axes = tuple(axis.split("+"))
    n, run = _devices_of(mesh, axes), chain(kind, mesh, axes)
    rate = link.bytes_per_s * (link.all_to_all if kind == "all-to-all" else 1.0)
    known = rate < math.inf
    say(
        f"\n{kind} over {axis} ({n} devices, {link.name}, {f'{rate / 1e9:.4g} GB/s' if known else 'no rate'})"
    )
    say("       bytes      best us    median us  algbw GB/s  busbw GB/s  of link")
    # numbers, of which n are the payload
    parts = {size: max(1, size // ITEM // n) for size in sizes}
    own = {
        size: part if kind == "all-gather" else part * n for size, part in parts.items()
    }
    times = _times(run, mesh, own)
    for size, part in parts.items():
        payload, best = part * n * ITEM, min(times[size])
        sent, middle = wire_bytes(kind, payload, n), statistics.median(times[size])
        row = {
            "kind": kind,
            "axis": axis,
            "axis_size": n,
            "link": link.name,
            "payload": payload,
        }
        row |= {
            "wire_bytes": sent,
            "chain": chain_length(size),
            "best_s": best,
            "median_s": middle,
        }
        row |= {
            "algbw": payload / best,
            "busbw": sent / best,
            "link_bytes_per_s": rate if known else None,
        }
        row["ratio"] = row["busbw"] / rate if known else None
        ratio = f"{row['ratio']:8.2f}" if known else f"{'-':>8}"
        say(
            f"{payload:12d} {1e6 * best:12.1f} {1e6 * middle:12.1f} {row['algbw'] / 1e9:11.4g} "
            f"{row['busbw'] / 1e9:11.4g} {ratio}"
        )
        yield row


def chain_length(size: int) -> int:
    """Returns how many collectives of a payload follow each other; the same in each
    process.
    """
    return max(4, min(256, 2**24 // size))


def _times(
    run: Callable[[int, jax.Array], jax.Array], mesh: Mesh, own: Mapping[int, int]
) -> dict[int, list[float]]:
    """Returns the seconds of a collective of each size, a value a round; sizes take
    turns.

    Args:
      own: numbers that a device's array has, by size.
    """
    # Of zeros: halved ones would end in denormal numbers, which processors take long
    # for.
    spread = NamedSharding(mesh, P(mesh.axis_names))
    arrays = {
        size: run(
            chain_length(size),
            jax.jit(partial(jnp.zeros, n * mesh.size), out_shardings=spread)(),
        )
        for size, n in own.items()
    }
    times: dict[int, list[float]] = {size: [] for size in own}
    for _ in range(ROUNDS):
        for size, array in arrays.items():
            jax.block_until_ready(array)
            began = time.perf_counter()
            arrays[size] = jax.block_until_ready(run(chain_length(size), array))
            times[size].append((time.perf_counter() - began) / chain_length(size))
    return times


def _fit(rows: Sequence[Mapping[str, Any]], link: Link) -> Fit:
    """Returns the line through the best times of one kind over one axis."""
    first = rows[0]
    line = fit_line(
        [row["wire_bytes"] for row in rows], [row["best_s"] for row in rows]
    )
    return Fit(first["kind"], first["axis"], first["axis_size"], link.name, *line)


def _line(fit: Fit) -> str:
    rate = f"{fit.bytes_per_s / 1e9:.4g} GB/s"
    text = f"{1e6 * fit.alpha_s:.1f} us + bytes sent / {rate}; at worst off by {fit.residual:.0%}"
    return (
        text
        if fit.usable
        else f"{text}: refused for calibration, which allows {MAX_RESIDUAL:.0%}"
    )


def _record(target: Target, rows: list, fits: Sequence[Fit]) -> dict[str, Any]:
    """Returns the file: what was measured, and the part that `plan --calibration`
    reads.
    """
    return measuring.record_head(sys.argv[1:]) | {
        "calibration": {
            "hardware": target.text,
            "fits": [fit.to_json() for fit in fits if fit.usable],
            "refused": [fit.to_json() for fit in fits if not fit.usable],
        },
        "rows": rows,
    }


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("collectives", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--on",
        default="here",
        help="this machine; hosts of GPUs need their network's name",
    )
    parser.add_argument("--devices", type=int, help="emulated CPU devices")
    usual = "bytes of the smallest (%(default)d): a line fits the sizes of a step better than all"
    parser.add_argument("--smallest", type=int, default=SMALLEST, help=usual)
    parser.add_argument(
        "--largest",
        type=int,
        default=LARGEST,
        help="bytes of the largest (%(default)d)",
    )
    parser.add_argument("--out", help="JSON file, also the calibration file of plan")
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
