"""Compiles pipelined steps for TPUs that are not here, and records their memory.

    python benchmarks/pipeline/pipeline_memory.py --out benchmarks/results/tpu-pipeline.json

Cases are those of tests/parallel/pipeline/test_tpu.py: size, schedule, microbatches,
and fields of `pipeline.*`. libtpu compiles each in a process of its own, one after the
other, in minutes each. With --out, cases that the file has are skipped; delete the file
to compile them again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}
CASES = (
    [
        f"large {schedule} {microbatches}"
        for schedule in ("1f1b", "interleaved", "gpipe")
        for microbatches in (8, 32)
    ]
    + [
        "quick gpipe 8",
        "quick gpipe 32",
        "quick 1f1b 8",
        "quick 1f1b 32",
        "quick 1f1b 8 edges=last",
    ]
    + [
        f"large 1f1b 8 {fields}"
        for fields in (
            "remat=none",
            "remat=layers",
            "remat=full",
            "remat=none gather_once=true",
            "remat=layers gather_once=true",
            "edges=last",
        )
    ]
)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--out", type=Path, help="JSON file")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    known = (
        json.loads(flags.out.read_text())
        if flags.out and flags.out.exists()
        else {"cases": {}}
    )
    record = known | measuring.record_head(sys.argv[1:])
    for case in flags.cases:
        if case in record["cases"]:
            continue
        record["cases"][case] = found = compiled(case)
        print(
            f"{case}: temporary {found['temp_bytes']:,} bytes, {found['seconds']:.0f} s",
            flush=True,
        )
        measuring.write(flags.out, record)


def compiled(case: str) -> dict:
    """Returns what the compiler made of a case."""
    start = time.monotonic()
    command = [
        sys.executable,
        str(ROOT / "tests" / "parallel" / "pipeline" / "test_tpu.py"),
        case,
    ]
    child = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{case}: {child.stderr[-4000:]}")
    return json.loads(lines[0]) | {"seconds": time.monotonic() - start}


if __name__ == "__main__":
    main()
