"""Checks whether `plan` orders published layouts as they were measured.

    python benchmarks/plan/layout_pairs.py [NAME ...] > benchmarks/results/plan-search-pairs.json

A pair is one model on one kind of chip in two layouts, published by one author in
tokens/s per GPU. The record says how the published program differs from ours (float8,
torch, a pipeline without lockstep).
"""

import json
import sys

from jaxdist.config import files
from jaxdist.planner import targets
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.plan import make_plan
from jaxdist.trainer import run_config

TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
ASYNC = "pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
MPT = "mosaicml/llm-foundry scripts/train/benchmarking/README.md"
SELECTIVE = "remat.policy=save:query,key,value,attention_residuals,attention_projection"
L405B = (
    "model.num_layers=126 model.d_model=16384 model.d_ff=53248 model.num_heads=128 batch.global_size=256 "
    "mesh.pipeline=8 mesh.fsdp=8 mesh.tensor=8 mesh.sequence_parallel=true pipeline.microbatches=8"
)


def mpt(
    layers: int, d_model: int, heads: int, batch: int, accumulation: int, remat: str
) -> str:
    """Returns an MPT model at 2048 tokens, fully sharded."""
    model = {
        "num_layers": layers,
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": d_model // heads,
        "vocab_size": 50368,
        "max_positions": 2048,
    }
    words = ["gpt2_124m", *(f"model.{key}={value}" for key, value in model.items())]
    words += [
        "mesh.data=1",
        "mesh.fsdp=-1",
        f"batch.accumulation={accumulation}",
        f"remat.policy={remat}",
    ]
    return " ".join(
        [*words, "batch.sequence_length=2048", f"batch.global_size={batch}"]
    )


# Name, what differs, then twice: layout, target, config and overrides, published
# tokens/s/GPU, source.
PAIRS = {
    "8b-nodes": (
        "torch",
        (
            (
                "fsdp 8",
                "h100:1x8",
                f"llama3_8b batch.global_size=16 {SELECTIVE}",
                6667,
                TITAN,
            ),
            (
                "fsdp 128",
                "h100:16x8",
                f"llama3_8b batch.global_size=256 {SELECTIVE}",
                6514,
                TITAN,
            ),
        ),
    ),
    "8b-tensor": (
        "torch, half a year between them",
        (
            (
                "fsdp 128",
                "h100:16x8",
                f"llama3_8b batch.global_size=256 {SELECTIVE}",
                6514,
                TITAN,
            ),
            (
                "fsdp 8 x tensor 8",
                "h100:8x8",
                "llama3_8b batch.global_size=96 mesh.fsdp=8 mesh.tensor=8 "
                f"mesh.sequence_parallel=true {SELECTIVE}",
                4378,
                ASYNC,
            ),
        ),
    ),
    "405b-schedule": (
        "theirs float8 with asynchronous tensor; 8 microbatches and 2 chunks assumed",
        (
            ("1f1b", "h100:64x8", f"llama3_70b {L405B}", 100, TITAN),
            (
                "interleaved",
                "h100:64x8",
                f"llama3_70b {L405B} pipeline.schedule=interleaved pipeline.chunks=2",
                128,
                TITAN,
            ),
        ),
    ),
    "30b-parts": (
        "torch, ALiBi",
        (
            (
                "fsdp 8, accumulation 21 of 3",
                "h100:1x8",
                mpt(48, 7168, 64, 504, 21, "full"),
                2002,
                MPT,
            ),
            (
                "fsdp 32, accumulation 3 of 14",
                "h100:4x8",
                mpt(48, 7168, 64, 1344, 3, "full"),
                2308,
                MPT,
            ),
        ),
    ),
    "70b-parts": (
        "torch, ALiBi",
        (
            (
                "fsdp 32, accumulation 16 of 2",
                "h100:4x8",
                mpt(80, 8192, 64, 1024, 16, "full"),
                882,
                MPT,
            ),
            (
                "fsdp 64, accumulation 4 of 8",
                "h100:8x8",
                mpt(80, 8192, 64, 2048, 4, "full"),
                1039,
                MPT,
            ),
        ),
    ),
    "13b-nodes": (
        "torch, ALiBi",
        (
            ("fsdp 8", "h100:1x8", mpt(40, 5120, 40, 16, 1, "none"), 4792, MPT),
            ("fsdp 64", "h100:8x8", mpt(40, 5120, 40, 128, 1, "none"), 4800, MPT),
        ),
    ),
    "3b-nodes": (
        "torch, ALiBi",
        (
            (
                "fsdp 16, accumulation 3 of 10",
                "h100:2x8",
                mpt(32, 2560, 20, 480, 3, "none"),
                24142,
                MPT,
            ),
            (
                "fsdp 64, accumulation 3 of 6",
                "h100:8x8",
                mpt(32, 2560, 20, 1152, 3, "none"),
                22525,
                MPT,
            ),
        ),
    ),
}


def main(names: list[str]) -> None:
    found = {}
    for name in names or PAIRS:
        differs, rows = PAIRS[name]
        planned = [_planned(*row) for row in rows]
        found[name] = {"differs": differs, "layouts": planned} | _order(*planned)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


def _planned(
    layout: str, target: str, words: str, published: float, source: str
) -> dict:
    name, _, words = words.partition(" ")
    values = files.load(name, folders=files.packaged_folders())
    pairs = dict(word.split("=", 1) for word in words.split())
    files.apply_overrides(values, pairs, run_config.full_schema(values.model.target))
    options = CompileOptions(memory_bytes=6 * 2**30)
    plan = make_plan(
        run_config.from_config(values), targets.parse(target), options=options
    )
    time, cpu = plan.time, plan.compiled and plan.compiled.cpu_seconds
    return {
        "layout": layout,
        "target": target,
        "config": name,
        "overrides": words,
        "source": source,
        "published_tokens_per_s": published,
        "tokens_per_s": time.tokens_per_s_per_chip,
        "step_s": time.step_s,
        "band_s": time.band_s,
        "waterfall": time.waterfall,
        "peak_bytes": plan.peak_bytes,
        "verdict": plan.exit_reason,
        "compile_cpu_s": cpu,
    }


def _order(first: dict, second: dict) -> dict:
    """Returns both ratios, second to first, and whether they name the same one the
    faster.
    """
    theirs = second["published_tokens_per_s"] / first["published_tokens_per_s"]
    if not (first["tokens_per_s"] and second["tokens_per_s"]):
        return {"published_ratio": theirs, "predicted_ratio": None, "same_order": None}
    ours = second["tokens_per_s"] / first["tokens_per_s"]
    return {
        "published_ratio": theirs,
        "predicted_ratio": ours,
        "same_order": (ours > 1) == (theirs > 1),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
