"""Plans layouts on TPU slices, and prints how much communication compute does not hide.

    JAX_PLATFORMS=cpu python benchmarks/plan/overlap.py --layouts v5p-64,v5e-256

It needs libtpu but no TPU: 1 to 3 CPU minutes per layout, 8 or more on v6e. The
planner's cache keeps results. A row replaces that of the same layout and version in
benchmarks/results/tpu-overlap.json. Models have 4 of their 32 layers, except in
`-whole`. Layers are a loop, so each hides the same; the head's share is larger than in
the whole model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxdist.config import files
from jaxdist.planner import targets
from jaxdist.planner.compiler import CompileOptions, versions
from jaxdist.planner.document import Plan
from jaxdist.planner.plan import make_plan
from jaxdist.storage import atomic
from jaxdist.trainer import run_config

GIB = 2**30
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "tpu-overlap.json"


@dataclass(frozen=True)
class Layout:
    """A run of llama3_8b on a slice."""

    target: str
    overrides: Mapping[str, Any]
    # of libtpu, switched on beside those that a run starts with
    flags: tuple[str, ...] = ()


def _layout(
    target: str, sequences: int, layers: int = 4, length: int = 8192, **mesh: Any
) -> Layout:
    overrides = {
        "model.num_layers": layers,
        "batch.global_size": sequences,
        "batch.sequence_length": length,
        **{f"mesh.{name}": value for name, value in mesh.items()},
    }
    return Layout(target, overrides)


def _in_bfloat16(layout: Layout) -> Layout:
    return replace(
        layout, overrides={**layout.overrides, "precision.reduce": "bfloat16"}
    )


# v5e has no SparseCore; its compiler can run parts of a collective inside a matrix
# product.
_FUSION = "xla_tpu_enable_async_collective_fusion"
_FUSED = (
    _FUSION,
    f"{_FUSION}_fuse_all_gather",
    f"{_FUSION}_multiple_steps",
    f"{_FUSION}_fuse_all_reduce",
    "xla_enable_async_all_reduce",
)


def _fused(layout: Layout) -> Layout:
    return replace(layout, flags=_FUSED)


_V5E, _V5E_WHOLE = (
    _layout("v5e:16x16", 256, layers=layers, length=4096) for layers in (4, 32)
)

LAYOUTS = {
    "v5p-64": _layout("v5p:4x4x4", 64),
    "v5p-64-whole": _layout("v5p:4x4x4", 64, layers=32),
    "v5p-512": _layout("v5p:8x8x8", 512),
    "v6e-256": _layout("v6e:16x16", 256),
    "v5e-256": _V5E,
    "v5e-256-bfloat16": _in_bfloat16(_V5E),
    "v5e-256-fused": _fused(_V5E),
    "v5e-256-bfloat16-fused": _fused(_in_bfloat16(_V5E)),
    "v5e-256-whole": _V5E_WHOLE,
    "v5e-256-whole-bfloat16-fused": _fused(_in_bfloat16(_V5E_WHOLE)),
    "v5p-64-two-slices": _layout("v5p:4x4x4x2", 128, data=2),
    "v5p-64-tensor-4": _layout(
        "v5p:4x4x4", 64, fsdp=16, tensor=4, sequence_parallel=True
    ),
}


def command(layout: Layout) -> str:
    """Returns the shell command that plans a layout."""
    words = " ".join(
        f"--config.{name}={value}" for name, value in layout.overrides.items()
    )
    flags = " ".join(f"--{name}=true" for name in layout.flags)
    environment = f'LIBTPU_INIT_ARGS="{flags}" ' if flags else ""
    return f"{environment}python -m jaxdist.plan --config llama3_8b --on {layout.target} {words}"


def plan_of(layout: Layout, options: CompileOptions) -> Plan:
    """Returns the plan of a layout, with the flags that a run starts with."""
    config = files.load("llama3_8b", folders=[ROOT / "configs"])
    texts = {name: str(value) for name, value in layout.overrides.items()}
    files.apply_overrides(config, texts, run_config.full_schema(config.model.target))
    run = run_config.from_config(config)
    return make_plan(run, targets.parse(layout.target), options=options, say=print)


def row(name: str, layout: Layout, plan: Plan, version: str) -> dict[str, Any]:
    """Returns a row of the table; times in ms, memory in GiB."""
    found = {
        "layout": name,
        "version": version,
        "target": layout.target,
        "command": command(layout),
    }
    done, time = plan.compiled, plan.time
    if done is None or time.step_s is None:
        return found | {"why": plan.exit_reason}
    exposed = math.fsum(one.exposed_s for one in plan.collectives)
    longest = sorted(plan.collectives, key=lambda one: -one.exposed_s)[:3]
    return found | {
        "step_ms": round(1e3 * time.step_s, 1),
        "exposed_ms": round(1e3 * exposed, 1),
        "exposed_share": round(exposed / time.step_s, 4),
        "covered_ms": round(1e3 * time.hidden_s, 1),
        "peak_gib": round(done.peak_bytes / GIB, 2),
        "temp_gib": round(done.temp_bytes / GIB, 2),
        "longest_exposed": [
            f"{one.kind} {one.dtype} {one.what} over {one.axis}: {1e3 * one.exposed_s:.1f} of "
            f"{1e3 * one.step_s:.1f} ms"
            for one in longest
        ],
        "compile_cpu_s": round(done.cpu_seconds),
        "versions": {
            package: v
            for package, v in versions().items()
            if package in ("jax", "libtpu")
        },
    }


def keep(new: dict[str, Any], path: Path = RESULTS) -> None:
    """Writes a row, in place of an older one of the same layout, version and libtpu."""

    def key(row: dict[str, Any]) -> tuple:
        return (
            list(LAYOUTS).index(row["layout"]),
            row["version"],
            str(row.get("versions")),
        )

    rows = json.loads(path.read_text()) if path.exists() else []
    kept = {key(old): old for old in rows} | {key(new): new}
    lines = ",\n".join(json.dumps(kept[at]) for at in sorted(kept))
    atomic.write_bytes(path, f"[\n{lines}\n]\n".encode())


def main() -> None:
    """Plans the layouts and prints a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--layouts", default=",".join(LAYOUTS), help="names (default: all)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    flags = parser.parse_args()
    version = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for name in flags.layouts.split(","):
        layout = LAYOUTS[name]
        switched_on = tuple((flag, True) for flag in layout.flags)
        options = CompileOptions(
            flags=switched_on, memory_bytes=6 * GIB, timeout_s=4 * 3600
        )
        found = row(name, layout, plan_of(layout, options), version)
        keep(found, flags.out)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
