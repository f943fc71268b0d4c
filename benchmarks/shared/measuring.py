"""Paired timing, the machine's matmul rate, and the head of a record."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import jax

ROOT = Path(__file__).resolve().parents[2]


class Timing(NamedTuple):
    """Seconds of one call: wall time, and processor time of all threads."""

    wall_s: float
    processor_s: float


def timed(call: Callable[[], object]) -> Timing:
    """Times a call, which must wait for its result."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return Timing(time.perf_counter() - wall, time.process_time() - processor)


def interleaved(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    report: Callable[[int, list[Timing]], None],
) -> list[list[Timing]]:
    """Times calls in rounds; every other round runs in reverse order.

    Returns:
      The timings of each call, one per round.
    """
    order = list(range(len(calls)))
    out: list[list[Timing]] = [[] for _ in calls]
    for number in range(rounds):
        found = {
            i: timed(calls[i]) for i in (order if number % 2 == 0 else reversed(order))
        }
        for i in order:
            out[i].append(found[i])
        report(number, [found[i] for i in order])
    return out


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Computes {"median", "low", "high"}: the quartiles, or the range of under 4 values."""
    if len(values) < 4:
        return {
            "median": statistics.median(values),
            "low": min(values),
            "high": max(values),
        }
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratios(
    ours: Sequence[Timing], reference: Sequence[Timing]
) -> dict[str, dict[str, float]]:
    """Computes the quartiles of ours / reference over pairs, by wall and processor time."""
    pairs = list(zip(ours, reference, strict=True))
    return {
        "wall": quartiles([a.wall_s / b.wall_s for a, b in pairs]),
        "processor": quartiles([a.processor_s / b.processor_s for a, b in pairs]),
    }


def matmul_rate(dtype: str, *, size: int, repeats: int) -> dict[str, float]:
    """Measures the best FLOP/s of square matmuls, by wall and by processor time."""
    # on a GPU equal numbers are faster
    one = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(lambda a: a @ a)
    multiply(one).block_until_ready()
    times = [timed(lambda: multiply(one).block_until_ready()) for _ in range(repeats)]
    flops = 2.0 * size**3
    return {
        "size": size,
        "flops_per_s": flops / min(t.wall_s for t in times),
        "flops_per_processor_s": flops / min(t.processor_s for t in times),
    }


def record_head(arguments: Sequence[str]) -> dict:
    """Makes the head of a record: command, commit, versions, hardware, load."""
    device = jax.devices()[0]
    modules = ("jax", "jaxlib", "flax", "optax", "numpy", "libtpu")
    return {
        "command": " ".join(["python", _script(), *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("describe", "--always", "--dirty", "--abbrev=12"),
        "python": platform.python_version(),
        "versions": {m: v for m in modules if (v := _version(m))},
        "hardware": {
            "platform": device.platform,
            "device_kind": device.device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            "processor": _processor(),
            "load_average": _load(),
        },
    }


def write(path: str | None, record: dict) -> None:
    """Writes the record as JSON, from the first process only; None writes nothing."""
    if path and jax.process_index() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")


def _script() -> str:
    """Names the running script, from the root of the project if it is inside."""
    script = Path(sys.argv[0]).resolve()
    return str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script)


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def _version(module: str) -> str | None:
    found = sys.modules.get(module)
    return getattr(found, "__version__", None)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {
        k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)
    }
    model = fields.get("model name") or platform.machine()
    if "cpu family" in fields:  # virtual machines hide the name of the processor
        model = f"{model} (family {fields['cpu family']} model {fields['model']})"
    return f"{os.cpu_count()} x {model}"


def _load() -> float | None:
    path = Path("/proc/loadavg")
    return float(path.read_text().split()[0]) if path.exists() else None
