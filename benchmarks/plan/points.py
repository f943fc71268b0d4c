"""Published training steps on TPU slices, with estimates of the peer's program.

A point has the run (a shipped config and overrides), the target, the compiler flags of
the publication, and its step time. `peer` is MaxText (snapshot of 2026-08-22), compiled
unchanged for that target by jax 0.12.0.1 and libtpu 0.0.50.1.

The estimators differ in attention's backward kernels. The peer's charged 2.5 forward
passes, for one kernel or two, at half the peak. `jaxdist.planner.timing` charges two
kernels 3.5, and on v6e a quarter of the peak. `recharged_s` is what that adds to the
peer's three numbers. Both charge grouped matmuls 0.8 of the peak. At long sequences
both charge attention alike: 3.5 and 2.5, and 0.8 of the peak with heads of 256 on v5p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAXTEXT = "AI-Hypercomputer/maxtext "
_RECIPES = "AI-Hypercomputer/tpu-recipes training/trillium/"
_V5E_README = _MAXTEXT + "configs/tpu/v5e/README.md"
_V5P_README = _MAXTEXT + "configs/tpu/v5p/README.md"
_TIERS = _MAXTEXT + "docs/reference/models/tiering.md"
_LONG = "AI-Hypercomputer/tpu-recipes training/v5p/Llama3.1-8B-LongContext"

# MaxText's LIBTPU_INIT_ARGS. Left out: async_collective_fusion on v5p and v6e, which
# libtpu 0.0.50.1 refuses.
_DATA_PARALLEL = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
_OVERLAP = {
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
_V5E = (
    _DATA_PARALLEL
    | _OVERLAP
    | {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    }
)
_V5P = (
    _DATA_PARALLEL
    | _OVERLAP
    | {
        "xla_tpu_megacore_fusion_allow_ags": False,
        "xla_enable_async_collective_permute": True,
        "xla_tpu_enable_ag_backward_pipelining": True,
    }
)
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": 98304}
_REDUCE_SCATTER_LAYOUT = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
}


@dataclass(frozen=True)
class Peer:
    """The peer's program by the same compiler: seconds of a step, and GiB of memory at
    its peak.
    """

    low_s: float  # compute and attention
    mid_s: float  # and synchronous collectives
    high_s: float  # and all others, all of them exposed
    peak_gib: float
    # to be added to each, for attention charged as ours is; see above
    recharged_s: float


@dataclass(frozen=True)
class Point:
    """One published step."""

    name: str
    config: str  # of configs/
    target: str
    overrides: Mapping[str, Any]
    flags: Mapping[str, Any]
    published_s: float | None  # seconds of a step
    published: str  # what is printed there
    source: str
    peer: Peer


def _point(
    name: str,
    config: str,
    target: str,
    batch: tuple[int, int],
    mesh: tuple[int, int],
    remat: str,
    **more: Any,
) -> Point:
    """Returns a point from its global batch (sequences, tokens) and mesh (fsdp,
    tensor).
    """
    model = more.pop("model", {})
    overrides = {
        "batch.global_size": batch[0],
        "batch.sequence_length": batch[1],
        "mesh.data": 1,
        "mesh.fsdp": mesh[0],
        "mesh.tensor": mesh[1],
        "remat.policy": remat,
        # the peer splits the residual stream over tensor, too
        "mesh.sequence_parallel": mesh[1] > 1,
        "precision.reduce": "bfloat16",  # as the peer does
    }
    return Point(name, config, target, overrides | model, **more)


def _scaled(layers: int, d_model: int, d_ff: int, heads: int) -> dict[str, int]:
    """Returns the sizes of a `global_parameter_scale` model (get_individual_scales of
    MaxText's pyconfig).
    """
    sizes = {"num_layers": layers, "d_model": d_model, "d_ff": d_ff}
    sizes |= {"num_heads": heads, "num_kv_heads": heads}
    return {f"model.{name}": size for name, size in sizes.items()}


def _split(context: int, form: str = "auto") -> dict[str, Any]:
    """Returns the overrides of Llama 3.1 over sequences that so many devices
    share out.
    """
    return {
        "mesh.context": context,
        "context.attention": form,
        "model.rope_factor": 8.0,
    }


_32B, _64B, _128B = (
    _scaled(32, 8192, 28_672, 64),
    _scaled(64, 8192, 28_672, 64),
    _scaled(64, 8192, 57_344, 128),
)
_OUTPUTS = "query,key,value,attention_projection"
_OFFLOADED = f"offload:block_input,{_OUTPUTS}"
# what the peer's `minimal` keeps that a backward pass reads
_MINIMAL = f"save:{_OUTPUTS},mlp_gate,mlp_up"

POINTS: tuple[Point, ...] = (
    _point(
        "16b-v5e-256",
        "dense_16b",
        "v5e:16x16",
        (1536, 2048),
        (256, 1),
        "full",
        flags=_V5E,
        published_s=10.27,
        published="61.10 % MFU (full attention)",
        source=_V5E_README,
        peer=Peer(10.76, 11.14, 11.46, 8.643, 0.13),
    ),
    _point(
        "32b-v5e-256",
        "dense_16b",
        "v5e:16x16",
        (1024, 2048),
        (256, 1),
        "full",
        flags=_V5E,
        model=_32B,
        published_s=12.12,
        published="66.86 % MFU (full attention)",
        source=_V5E_README,
        peer=Peer(14.70, 15.46, 16.10, 10.4, 0.09),
    ),
    _point(
        "64b-v5e-256",
        "dense_16b",
        "v5e:16x16",
        (512, 2048),
        (256, 1),
        "full",
        flags=_V5E,
        model=_64B,
        published_s=13.47,
        published="59.90 % MFU (full attention)",
        source=_V5E_README,
        peer=Peer(13.61, 15.14, 16.38, 12.4, 0.09),
    ),
    _point(
        "llama2-7b-v5e-256",
        "llama2_7b",
        "v5e:16x16",
        (1024, 2048),
        (256, 1),
        "save:query,key,value",
        flags=_V5E,
        published_s=None,
        published="no step time found",
        source=_MAXTEXT + "configs/tpu/v5e/llama2_7b.sh",
        peer=Peer(2.98, 3.14, 3.28, 10.0, 0.05),
    ),
    _point(
        "llama2-70b-v5p-512",
        "llama2_70b",
        "v5p:4x8x8",
        (1024, 4096),
        (256, 1),
        f"save:{_OUTPUTS},mlp_out",
        flags=_V5P,
        published_s=23.68,
        published="692 tokens/s/chip",
        source=_TIERS,
        peer=Peer(24.04, 25.06, 25.06, 76.1, 0.38),
    ),
    _point(
        "32b-v5p-128",
        "dense_16b",
        "v5p:4x4x4",
        (384, 2048),
        (16, 4),
        _MINIMAL,
        flags=_V5P,
        model=_32B,
        published_s=7.30,
        published="71.47 % MFU (full attention)",
        source=_V5P_README,
        peer=Peer(6.74, 7.78, 8.43, 87.2, 0.06),
    ),
    _point(
        "64b-v5p-128",
        "dense_16b",
        "v5p:4x4x4",
        (192, 2048),
        (16, 4),
        _MINIMAL,
        flags=_V5P,
        model=_64B,
        published_s=7.39,
        published="70.31 % MFU (full attention)",
        source=_V5P_README,
        peer=Peer(7.54, 9.70, 9.70, 90.9, 0.06),
    ),
    _point(
        "128b-v5p-256",
        "dense_16b",
        "v5p:4x4x8",
        (128, 2048),
        (16, 8),
        _MINIMAL,
        flags=_V5P,
        model=_128B,
        published_s=5.03,
        published="68.68 % MFU (full attention)",
        source=_V5P_README,
        peer=Peer(4.61, 6.12, 6.12, 62.6, 0.04),
    ),
    _point(
        "llama3.1-8b-v6e-256",
        "llama3_8b",
        "v6e:16x16",
        (1024, 8192),
        (256, 1),
        _OFFLOADED,
        model={"model.rope_factor": 8.0},
        flags=_VMEM | _DATA_PARALLEL | _OVERLAP | _REDUCE_SCATTER_LAYOUT,
        published_s=4.546,
        published="4.546 s, 7207 tokens/s/chip",
        source=_RECIPES + "Llama3.1-8B-MaxText/v6e-256",
        peer=Peer(4.18, 4.26, 4.34, 28.4, 0.69),
    ),
    _point(
        "llama3.1-8b-v6e-256-one-forward",
        "llama3_8b",
        "v6e:16x16",
        (1024, 8192),
        (256, 1),
        "offload:block_input,query,key,value,attention_residuals",
        model={"model.rope_factor": 8.0},
        flags=_VMEM | _DATA_PARALLEL | _OVERLAP | _REDUCE_SCATTER_LAYOUT,
        published_s=None,
        published="as above; attention's residuals, not its projection: as many bytes",
        source=_RECIPES + "Llama3.1-8B-MaxText/v6e-256",
        peer=Peer(4.18, 4.26, 4.34, 28.4, 0.69),
    ),
    _point(
        "llama2-70b-v6e-256",
        "llama2_70b",
        "v6e:16x16",
        (768, 4096),
        (256, 1),
        "offload:query,key,value",
        flags=_VMEM,
        published_s=13.58,
        published="905 tokens/s/chip, at batch 2; scaled to its listed 3",
        source=_RECIPES + "Llama2-70B-MaxText",
        peer=Peer(10.01, 10.78, 11.53, 25.4, 0.65),
    ),
    _point(
        "mixtral-8x7b-v5p-128",
        "mixtral_8x7b",
        "v5p:4x4x4",
        (768, 4096),
        (64, 1),
        "full",
        flags=_V5P,
        published_s=None,
        published="no step time found; peer: dropless, float32 weights",
        source=_TIERS,
        peer=Peer(19.0, 19.7, 19.7, 41.6, 0.23),
    ),
    _point(
        "mixtral-8x7b-v5p-128-expert",
        "mixtral_8x7b",
        "v5p:4x4x4",
        (768, 4096),
        (8, 1),
        "full",
        flags=_V5P,
        model={"mesh.expert": 8},
        published_s=None,
        published="no step time found; peer: dropless, fsdp 64",
        source=_TIERS,
        peer=Peer(19.0, 19.7, 19.7, 41.6, 0.23),
    ),
    _point(
        "mixtral-8x7b-v6e-256",
        "mixtral_8x7b",
        "v6e:16x16",
        (3072, 4096),
        (256, 1),
        _OFFLOADED,
        flags=_VMEM | _DATA_PARALLEL | _OVERLAP | _REDUCE_SCATTER_LAYOUT,
        published_s=None,
        published="13.48 s (later 12.61) with capacity 1.25; ours drops nothing",
        source=_RECIPES + "Mixtral-8x7B-MaxText",
        peer=Peer(13.7, 15.0, 15.0, 31.2, 0.52),
    ),
    _point(
        "qwen3-30b-a3b-v5p-128",
        "qwen3_30b_a3b",
        "v5p:4x4x4",
        (256, 4096),
        (64, 1),
        "full",
        flags=_V5P,
        published_s=None,
        published="no step time found; peer: dropless, fsdp 64",
        source=_TIERS,
        peer=Peer(3.3, 3.7, 3.7, 19.1, 0.11),
    ),
    _point(
        "qwen3-30b-a3b-v5p-128-expert",
        "qwen3_30b_a3b",
        "v5p:4x4x4",
        (256, 4096),
        (16, 1),
        "full",
        flags=_V5P,
        model={"mesh.expert": 4},
        published_s=None,
        published="no step time found; peer: dropless, fsdp 16, expert 4",
        source=_TIERS,
        peer=Peer(7.4, 7.6, 8.2, 25.4, 0.11),
    ),
    _point(
        "llama3.1-8b-32k-v5p-128",
        "llama3_8b",
        "v5p:4x4x4",
        (32, 32_768),
        (16, 1),
        "save:attention_residuals",
        model=_split(4),
        flags=_V5P,
        published_s=None,
        published="no step time found; peer: all-gather, full remat",
        source=_LONG,
        peer=Peer(6.4, 6.7, 6.7, 14.5, 0.0),
    ),
    _point(
        "llama3.1-8b-128k-v5p-128",
        "llama3_8b",
        "v5p:4x4x4",
        (4, 131_072),
        (4, 1),
        "save:attention_residuals",
        model=_split(16),
        flags=_V5P,
        published_s=None,
        published="no step time found; peer: all-gather, full remat",
        source=_LONG,
        peer=Peer(8.6, 8.9, 8.9, 8.6, 0.0),
    ),
    _point(
        "llama3.1-8b-64k-v5p-128",
        "llama3_8b",
        "v5p:4x4x4",
        (32, 65_536),
        (16, 1),
        "save:attention_residuals",
        flags=_V5P,
        model=_split(4)
        | {"model.num_heads": 16, "model.num_kv_heads": 4, "model.head_dim": 256},
        published_s=10.25,
        published="10.25 s, 3197 tokens/s/chip; heads of 256; peer: ring",
        source=_LONG,
        peer=Peer(10.5, 10.6, 11.1, 34.2, 0.0),
    ),
    _point(
        "llama3.1-8b-64k-v5p-128-ring",
        "llama3_8b",
        "v5p:4x4x4",
        (32, 65_536),
        (16, 1),
        "save:attention_residuals",
        flags=_V5P,
        model=_split(4, "ring")
        | {"model.num_heads": 16, "model.num_kv_heads": 4, "model.head_dim": 256},
        published_s=10.25,
        published="10.25 s, 3197 tokens/s/chip; heads of 256; peer: ring",
        source=_LONG,
        peer=Peer(10.5, 10.6, 11.1, 34.2, 0.0),
    ),
)


def find(name: str) -> Point:
    """Returns the point of a name.

    Raises:
      KeyError: there is none.
    """
    found = {point.name: point for point in POINTS}
    if name not in found:
        raise KeyError(f"no point {name!r}; points: {', '.join(found)}")
    return found[name]


def command(point: Point) -> str:
    """Returns the shell command that plans our program at this point."""
    flags = " ".join(
        f"--{name}={str(value).lower()}" for name, value in point.flags.items()
    )
    overrides = " ".join(
        f"--config.{name}={value}" for name, value in point.overrides.items()
    )
    plan = f"python -m jaxdist.plan --config {point.config} --on {point.target}"
    return f"LIBTPU_INIT_ARGS='{flags}' {plan} {overrides}"
