"""Plans published training steps, and compares them with the published times.

    JAX_PLATFORMS=cpu python benchmarks/plan/peers.py --points 16b-v5e-256,64b-v5p-128

It needs libtpu but no TPU: 1 to 3 CPU minutes per point, 8 or more on v6e. The
planner's cache keeps results. A row replaces that of the same name in
benchmarks/results/plan-points.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from points import POINTS, Point, command, find

from jaxdist.config import ConfigError, files
from jaxdist.planner import targets, timing
from jaxdist.planner.compiler import CompileOptions, versions
from jaxdist.planner.document import Plan
from jaxdist.planner.plan import make_plan
from jaxdist.telemetry import hlo
from jaxdist.trainer import run_config
from jaxdist.trainer.run_config import RunConfig

GIB = 2**30
ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "benchmarks" / "results" / "plan-points.json"


def run_of(point: Point) -> RunConfig:
    """Returns the run of a point."""
    config = files.load(point.config, folders=[CONFIGS])
    texts = {name: str(value) for name, value in point.overrides.items()}
    files.apply_overrides(config, texts, run_config.full_schema(config.model.target))
    return run_config.from_config(config)


def plan_of(point: Point) -> Plan:
    """Returns our program's plan at a point, compiled with the flags it was published
    with.
    """
    options = CompileOptions(
        flags=tuple(point.flags.items()), memory_bytes=6 * GIB, timeout_s=4 * 3600
    )
    return make_plan(
        run_of(point), targets.parse(point.target), options=options, say=print
    )


def row(point: Point, plan: Plan) -> dict[str, Any]:
    """Returns a point's row of the table: ours, the peer's, what was published, and the
    command.
    """
    found: dict[str, Any] = {
        "point": point.name,
        "target": point.target,
        "fits": plan.fits,
    }
    found |= {
        "command": command(point),
        "published": _published(point),
        "peer": dataclasses.asdict(point.peer),
    }
    done, time = plan.compiled, plan.time
    if done is None or time.step_s is None:
        return found | {"ours": None, "why": plan.exit_reason}
    ours = {"low_s": time.low_s, "mid_s": time.step_s, "high_s": time.high_s}
    memory = {"peak_gib": done.peak_bytes / GIB, "host_gib": done.host_temp_bytes / GIB}
    # As the peer's middle was made: without what compute leaves uncovered of
    # asynchronous collectives.
    alike = {"mid_as_the_peers_s": time.step_s - time.uncovered_s}
    found["ours"] = {
        name: round(value, 3) for name, value in (ours | alike | memory).items()
    }
    found["ours"] |= _facts(plan)
    found["ours_over_peer"] = _ratios(point, found["ours"])
    if point.published_s:
        found["against_published"] = _against(point.published_s, ours)
    found["versions"], found["compile_cpu_s"] = versions(), round(done.cpu_seconds, 1)
    return found


def _published(point: Point) -> dict[str, Any]:
    return {"step_s": point.published_s, "as": point.published, "source": point.source}


def _facts(plan: Plan) -> dict[str, Any]:
    """Returns what stands behind the times."""
    module = hlo.parse(plan.compiled.hlo)  # type: ignore[union-attr]
    kernels = timing.attention_kernels(module)
    layers = plan.run.model["num_layers"]
    calls = {
        role: sum(k.count for k in kernels if k.role == role) / layers
        for role in {k.role for k in kernels}
    }
    sync = sum(one.step_s for one in plan.collectives if not one.asynchronous)
    asynchronous = sum(one.step_s for one in plan.collectives if one.asynchronous)
    others = module_cycles(module) - module_cycles(module, products=True)
    outside = (
        others / plan.target.chip.clock_hz
        + plan.time.waterfall["exposed communication"]
    )  # type: ignore
    return {
        "attention_kernels_per_layer": calls,
        "not_matrix_products": round(outside / plan.time.step_s, 4),  # type: ignore[operator]
        "uncovered_s": round(plan.time.uncovered_s, 3),
        "synchronous_communication_s": round(sync, 3),
        "asynchronous_communication_s": round(asynchronous, 3),
        "mfu_full": round(plan.time.mfu_full or 0, 4),
        "mfu_causal": round(plan.time.mfu_causal or 0, 4),
    }


def module_cycles(module: hlo.Module, *, products: bool = False) -> int:
    """Returns the compiler's cycles of a step; `products`: of instructions that hold a
    matrix product.

    Kernels have none; attention's are products, which both programs must do.
    """

    def holds_product(step: hlo.Instruction) -> bool:
        inside = [
            s
            for name in step.called("calls")
            for s in module.computations[name].values()
        ]
        return any(
            s.opcode in ("dot", "convolution") or holds_product(s) for s in inside
        )

    return sum(
        run.times * step.cycles
        for run in module.runs()
        for step in module.computations[run.computation].values()
        if not products or step.opcode in ("dot", "convolution") or holds_product(step)
    )


def _ratios(point: Point, ours: dict[str, Any]) -> dict[str, float]:
    """Returns ours over the peer's: as it was estimated, and with attention charged as
    ours is.
    """
    return {
        "mid": round(ours["mid_as_the_peers_s"] / point.peer.mid_s, 3),
        "mid_charged_alike": round(
            ours["mid_as_the_peers_s"] / (point.peer.mid_s + point.peer.recharged_s), 3
        ),
        "all_uncovered_ours_none_of_the_peers": round(
            ours["mid_s"] / point.peer.mid_s, 3
        ),
    } | _memory_ratio(point, ours)


def _memory_ratio(point: Point, ours: dict[str, Any]) -> dict[str, float]:
    """Returns our peak over the peer's; nothing where it offloads: of its peak the host
    holds a part.
    """
    return (
        {}
        if ours["host_gib"]
        else {"peak": round(ours["peak_gib"] / point.peer.peak_gib, 3)}
    )


def _against(published_s: float, ours: dict[str, float]) -> dict[str, Any]:
    low, high = (
        ours["low_s"] * (1 - timing.WIDENED),
        ours["high_s"] * (1 + timing.WIDENED),
    )
    errors = {name: round(value / published_s - 1, 3) for name, value in ours.items()}
    return {
        "errors": errors,
        "band_holds": low <= published_s <= high,
        "high_over_low": round(ours["high_s"] / ours["low_s"], 3),
    }


def keep(new: dict[str, Any], path: Path = RESULTS) -> None:
    """Writes a row, in place of an older one of the same point, in the order of the
    points.
    """
    rows = (
        {old["point"]: old for old in json.loads(path.read_text())["rows"]}
        if path.exists()
        else {}
    )
    rows[new["point"]] = new
    ordered = [rows[point.name] for point in POINTS if point.name in rows]
    path.write_text(
        json.dumps({"summary": summary(ordered), "rows": ordered}, indent=1) + "\n"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many published values the bands hold, and where we are at or below
    the peer.
    """
    judged = [found for r in rows if (found := r.get("against_published"))]
    ours = [r for r in rows if r.get("ours_over_peer")]
    return {
        "published_points": len(judged),
        "bands_that_hold": sum(found["band_holds"] for found in judged),
        "widest_high_over_low": max(
            (found["high_over_low"] for found in judged), default=None
        ),
        "time_at_or_below_peer": [
            r["point"] for r in ours if r["ours_over_peer"]["mid_charged_alike"] <= 1
        ],
        "memory_at_or_below_peer": [
            r["point"] for r in ours if r["ours_over_peer"].get("peak", 2) <= 1
        ],
    }


def main() -> None:
    """Plans the points and prints a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--points",
        default=",".join(p.name for p in POINTS),
        help="names (default: all)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    flags = parser.parse_args()
    for name in flags.points.split(","):
        point = find(name)
        try:
            found = row(point, plan_of(point))
        except ConfigError as error:
            raise SystemExit(str(error)) from error
        keep(found, flags.out)
        print(
            json.dumps(
                {
                    key: found.get(key)
                    for key in ("point", "ours", "ours_over_peer", "why")
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
