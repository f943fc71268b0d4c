"""Compares the arithmetic of memory with the compilers' peaks, on a list of runs.

    JAX_PLATFORMS=cpu python benchmarks/plan/arithmetic.py [NAME ...]

It needs the compilers (extras `aot` and `aot-gpu`), but no chip: 10 s a run on GPUs,
2 minutes on TPUs. A run that the record has is not compiled again, but its arithmetic
is done again. With `--no-compile` nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from arithmetic_runs import RUNS, Run

from jaxdist.config import files
from jaxdist.planner import memory, targets
from jaxdist.planner.compiler import (
    CannotTell,
    CompileOptions,
    DoesNotFit,
    compile_run,
    versions,
)
from jaxdist.planner.on_target import validate_for
from jaxdist.trainer import run_config
from jaxdist.trainer.run_config import RunConfig

GIB = 2**30
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan-arithmetic.json"
WHAT = (
    "Memory of a step by arithmetic and by the compilers, in bytes per device. "
    "before_bytes: the arithmetic at commit 702ef344, of runs with @gathered at 074ec23a. "
    "Nothing ran on a chip."
)
BAND = 0.10  # largest relative error
# Largest error of small runs, in bytes. XLA splits their matmuls into parts to fill a
# GPU, and the partial results take a few MiB.
SMALL_ERROR = 16 * 2**20

Row = Mapping[str, Any]


def config_of(run: Run) -> RunConfig:
    """Makes the config of a run."""
    values = files.load(run.config, folders=[ROOT / "configs"])
    texts = dict(word.split("=", 1) for word in run.overrides)
    files.apply_overrides(values, texts, run_config.full_schema(values.model.target))
    return run_config.from_config(values)


def components_of(run: Run) -> dict[str, int]:
    """Counts a run's memory by arithmetic: bytes by component."""
    target = targets.parse(run.target)
    return memory.components(validate_for(config_of(run), target), target)


def compiled_bytes(run: Run) -> dict[str, Any]:
    """Compiles a run and finds the peak in bytes, or why there is none."""
    options = CompileOptions(memory_bytes=6 * GIB)
    try:
        done = compile_run(config_of(run), targets.parse(run.target), options)
    except DoesNotFit as refusal:
        needed, capacity = refusal.args
        return {"compiler_bytes": needed, "refused_at_bytes": capacity}
    except CannotTell as failure:
        return {"compiler_bytes": None, "why": str(failure)}
    return {"compiler_bytes": done.peak_bytes}


def error_of(row: Row, key: str = "arithmetic_bytes") -> float | None:
    """Computes the relative error of the arithmetic; None without a compiler's peak."""
    if not row["compiler_bytes"] or key not in row:
        return None
    error: float = row[key] / row["compiler_bytes"] - 1
    return error


def is_within(row: Row, key: str = "arithmetic_bytes") -> bool:
    """Checks whether the arithmetic of a row is as good as the docs say."""
    error = error_of(row, key)
    if error is None:
        return False
    return abs(error) <= BAND or abs(row[key] - row["compiler_bytes"]) <= SMALL_ERROR


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="runs (default: all)")
    parser.add_argument("--again", action="store_true", help="compile known runs again")
    parser.add_argument("--no-compile", action="store_true", help="compile no run")
    parser.add_argument(
        "--before",
        action="store_true",
        help="keep this arithmetic in the record, to compare later ones with it",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    flags = parser.parse_args()
    record: dict[str, Any] = {"what": WHAT, "rows": {}}
    if flags.out.exists():
        record = json.loads(flags.out.read_text())
    for run in RUNS:
        if not flags.names or run.name in flags.names:
            _record(run, record, flags)
    print(summary(record["rows"]))


def _record(run: Run, record: dict[str, Any], flags: argparse.Namespace) -> None:
    """Puts a run's row into the record, writes the record, and prints the row."""
    rows = record["rows"]
    compiles = flags.again or run.name not in rows
    if compiles and flags.no_compile:
        return
    row = rows.setdefault(run.name, {})
    row["command"] = run.command
    row["components"] = components_of(run)
    row["arithmetic_bytes"] = memory.accounted_peak(row["components"])
    if flags.before:
        row["before_bytes"] = row["arithmetic_bytes"]
    if compiles:
        row |= compiled_bytes(run)
        record["versions"] = versions()
        record["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    record["rows"] = {one.name: rows[one.name] for one in RUNS if one.name in rows}
    flags.out.write_text(json.dumps(record, indent=1) + "\n")
    print(_line(run.name, row), flush=True)


def _line(name: str, row: Row) -> str:
    """Formats a row of the table."""
    found = row["arithmetic_bytes"] / GIB
    error = error_of(row)
    if error is None:
        return f"{name:28} {found:8.3f} GiB, no answer: {row.get('why')}"
    compiled = row["compiler_bytes"] / GIB
    text = f"{name:28} {found:8.3f} GiB of {compiled:8.3f}: {error:+7.1%}"
    before = error_of(row, "before_bytes")
    return text if before is None else f"{text} (before {before:+.1%})"


def summary(rows: Mapping[str, Row]) -> str:
    """Counts the rows within the band, and finds the extremes."""
    lines = []
    for key in ("before_bytes", "arithmetic_bytes"):
        errors = [error_of(row, key) for row in rows.values()]
        known = [error for error in errors if error is not None]
        if known:
            within = sum(abs(error) <= BAND for error in known)
            lines.append(
                f"{key}: {within} of {len(errors)} within {BAND:.0%}, "
                f"from {min(known):+.1%} to {max(known):+.1%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
