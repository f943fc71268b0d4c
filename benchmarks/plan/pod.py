"""Times plans of large pods.

    JAX_PLATFORMS=cpu python benchmarks/plan/pod.py [NAME ...]

It needs libtpu (extra `aot`), but no chip. A size takes one to four minutes. Rows that
the record has are kept; name them to make them again. Each plan starts with an empty
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan-pod.json"
WHAT = (
    "Plans of large pods: seconds and memory of the command on this machine, for one "
    "model with one sequence per chip. Nothing ran on a chip."
)


@dataclass(frozen=True)
class Case:
    """A plan to make, with one sequence per chip."""

    config: str
    target: str
    data: int
    fsdp: int

    @property
    def name(self) -> str:
        return f"{self.config}-{self.target.replace(':', '-')}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of `python -m jaxdist.plan`."""
        return [
            f"--config={self.config}",
            f"--on={self.target}",
            f"--config.mesh.data={self.data}",
            f"--config.mesh.fsdp={self.fsdp}",
            f"--config.batch.global_size={self.data * self.fsdp}",
        ]


SIZES = [
    Case("llama3_70b", "v5p:4x4x4", 1, 64),
    Case("llama3_70b", "v5p:4x8x8", 1, 256),
    Case("llama3_70b", "v5p:4x16x16", 4, 256),
    Case("llama3_70b", "v5p:16x16x16", 16, 256),
    Case("llama3_70b", "v5p:16x16x16x2", 32, 256),
    Case("llama3_70b", "v5p:16x16x16x4", 64, 256),
]


def plan(case: Case) -> dict[str, Any]:
    """Runs the command with an empty cache; returns its costs and its results."""
    command = [sys.executable, "-m", "jaxdist.plan", *case.arguments, "--json"]
    with tempfile.TemporaryDirectory() as home:
        environ = {**os.environ, "HOME": home, "JAX_PLATFORMS": "cpu"}
        load = os.getloadavg()[0]
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    row: dict[str, Any] = {
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(_cpu_s(after) - _cpu_s(before), 1),
        "load": load,  # of the machine when the command started
        "exit_code": done.returncode,
    }
    report = json.loads(done.stdout)
    if not report["compile"]:
        return row | {"why": report["exit_reason"]}
    return row | {
        "compiler_cpu_s": round(report["compile"]["cpu_seconds"], 1),
        "child_peak_bytes": report["compile"]["child_peak_bytes"],
        "peak_bytes": report["memory"]["peak_bytes"],
        "temp_bytes": report["memory"]["temp_bytes"],
        "step_s": report["time"]["step_s"],
        "low_s": report["time"]["low_s"],
        "high_s": report["time"]["high_s"],
    }


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="cases (default: all without a row)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file")
    flags = parser.parse_args()
    record: dict[str, Any] = {"what": WHAT, "sizes": {}}
    if flags.out.exists():
        record = json.loads(flags.out.read_text())
    rows = record["sizes"]
    for case in SIZES:
        if case.name not in flags.names if flags.names else case.name in rows:
            continue
        rows[case.name] = {"arguments": case.arguments, **plan(case)}
        record["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        record["versions"] = _versions()
        flags.out.write_text(json.dumps(record, indent=1) + "\n")
        print(case.name, rows[case.name], flush=True)


def _versions() -> dict[str, str]:
    from jaxdist.planner.compiler import versions

    return versions()


if __name__ == "__main__":
    main()
