"""What was seen of chips and their compilers: one table, to renew for another version.

The first part is by chip, the second how the compilers of these versions write programs
and messages (libtpu 0.0.42.1 and 0.0.50.1, XLA for GPUs of jax 0.10.2, where no other is
named). `telemetry.hlo` reads any HLO; only this file knows what one compiler puts in it.

Each value has its source. Products and memory of a GPU, and the steps in `sure`, are
compared with published figures; the rest is what the named compiler says or does.
"""

import re
from dataclasses import dataclass

_OURS = "our program by libtpu 0.0.42.1 at published workloads, docs/plan.md"
_PEERS = "the largest peer's programs by libtpu 0.0.50.1, compute and attention alone, beside published steps"


@dataclass(frozen=True)
class Observed:
    """What steps reach of a chip's datasheet."""

    sure: str = ""  # how good estimates of steps were
    # Share of peak that single products reach by the compiler's own cycles: the better
    # of 8192^3 and 8192 x 4096 x 14336 (libtpu 0.0.50.1). For some shapes it counts
    # large backward products with element-wise work fused into them at 2.5 times that,
    # which published steps leave no room for.
    product: float = 1.0
    # Share of memory bandwidth that element-wise kernels are assumed to reach: that of
    # a copy of 3 GiB by the compiler's own cycles (libtpu 0.0.50.1).
    stream: float = 1.0
    # Share of peak that attention kernels are assumed to reach with heads of less than
    # 256: matrix units 256 wide are half filled by heads of 128.
    attention: float = 0.5
    # And with larger ones: published steps of long sequences on v5p leave 0.75 to 0.81
    # (tpu-recipes, training/v5p/Llama3.1-8B-LongContext, 64k to 4M tokens).
    attention_of_wide_heads: float = 0.5
    # (products, memory): shares of the datasheet that a program reaches at best, and
    # at worst. The cycles of TPU compilers have them already.
    reached: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    # Share of memory that a step may use: a GPU's compiler never refuses a step, and
    # libraries and fragments need the rest.
    usable: float = 1.0
    # Share of a GPU's memory above which XLA computes values again, +21 % FLOPs seen on
    # H100.
    used_freely: float | None = None
    # Layers whose offloaded activations are on the device on their way: compiled peaks
    # of llama3_8b beyond the arithmetic, 7.4 layers on v6e:4x4 (libtpu 0.0.42.1) and
    # 1.4 on h100:1x8 (jax 0.10.2).
    layers_in_flight: int = 8
    # The collectives that run beside compute without a SparseCore.
    beside_compute: str = "no gathers or sums"

    def attention_share(self, width: int) -> float:
        """Returns the share of peak that attention kernels reach; `width`: of a
        head.
        """
        return self.attention if width < 256 else self.attention_of_wide_heads


# By family of TPUs, and of platforms.
TABLE = {
    "v4": Observed(
        sure=f"{_PEERS} on v4: -12 and -20 %; the step will rather be slower than this band",
        product=0.97,
        stream=0.77,
    ),
    "v5e": Observed(
        sure=f"{_OURS}: the middle was off by -1, +1 and +17 % on three v5e points, all in the band",
        product=0.98,
        stream=0.81,
        beside_compute="only some gathers",
    ),
    "v5p": Observed(
        sure=f"{_OURS}: the middle was off by +2 to +11 % on four v5p points, all in the band",
        product=0.90,
        stream=0.72,
        attention_of_wide_heads=0.8,
    ),
    "v6e": Observed(
        sure=f"{_PEERS} on v6e: +7 and -22 %, where attention reaches a quarter of peak as assumed here",
        product=0.92,
        stream=0.86,
        attention=0.25,
    ),
    "tpu7x": Observed(
        sure="no published step was compared on this chip, and its clock is a guess",
        product=0.85,
        stream=0.85,
        attention=0.25,
    ),
    # Of products: bfloat16 on H100 reaches 783 TFLOP/s at 4096^3 and 632 at 2048^3, of
    # 989 (OpenXLA, xla/service/gpu/model/matmul_interpolator_data.h); the shares of
    # memory bandwidth are assumed.
    "gpu": Observed(
        sure="a roofline of what jax-cuda12-plugin 0.10.2 compiles, without launches: 26 % faster than the "
        "published step compared (torch, slower H100s)",
        reached=((0.79, 0.92), (0.64, 0.75)),
        usable=0.92,
        used_freely=0.8,
        layers_in_flight=2,
    ),
    "cpu": Observed(layers_in_flight=0),
}
# Share of peak that products of rows with their group's kernel are assumed to reach in
# a Pallas kernel.
GROUPED_PRODUCT = 0.8
# Share of compute that is taken to hide transfers to the host; all of it is optimistic.
HIDES_TRANSFERS = 0.5
# Assumed between a device and its host's memory, each way: PCIe 4 x8, 5 x4.
HOST_BYTES_PER_S = 16e9

# --- TPU programs ---------------------------------------------------------------------

# Elements of a vector register's row: narrower rows are padded, and kernels write a
# logsumexp to all of them.
LANES = 128
# With several slices device i of slice s has the id (s + 1) * 100,000 + i.
SLICE_ID = 100_000
# One device per chip; without it v4 has two.
ONE_DEVICE_PER_CHIP = {"v4": "megacore"}
# Between slices: host transfers, each with what it does and its two ends' common name.
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
# A fusion that sums over devices and keeps its own shard.
REDUCE_SCATTER = re.compile("calls=%?(all-)?reduce-scatter|ReduceScatter")
# A call on the SparseCore that starts without operands; its update brings them
# (0.0.50.1).
EMPTY_START = "-start()"
# A Pallas kernel, into which the compiler cannot see.
KERNEL = 'custom_call_target="tpu_custom_call"'
# Splash and flash attention, by name or scope; what of the backward pass a kernel does,
# by a mark in its name (the first that is there; none is the forward pass).
ATTENTION = re.compile("splash|flash|attention")
BACKWARD_MARKS = {"dkv": "dkv", "dq": "dq", "bwd": "backward", "backward": "backward"}
# Products of experts (megablox), and the element-wise kernel between them.
GROUPED = re.compile(r"t?gmm\b|experts_hidden_gradients\b")
# Permutes in loops, pipelines apart, from which on products are windowed: the compiler
# counts far too many cycles for them. Fewer are edges that neighbours exchange.
WINDOWED_PERMUTES = 8
# The option that switches windows off, as these cycles would double a step.
WINDOWED_EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
# A refusal for size. 0.12 of jax puts "E1000: CompileTimeHbmOom:" before it.
OUT_OF_MEMORY = re.compile(
    r"Ran out of memory on HBM.*?\(([\d.]+)([KMGT]?)\).*?HBM \(([\d.]+)([KMGT]?)\)",
    re.S,
)

# --- GPU programs ---------------------------------------------------------------------

CUDNN_ATTENTION = "__cudnn$fmha"
CUDNN_BACKWARD = "Backward"  # how its backward call's target ends

# --- what compilers say ---------------------------------------------------------------

# The partitioner's complaint, with the op where it knows one.
REMATERIALISED = re.compile(
    r"[Ii]nvoluntary full rematerialization.*?(?:op_name=\"([^\"]*)\"|$)", re.M
)
# What libtpu and the CUDA plugin say on every machine without a device.
NOISE = re.compile(
    r"^(Failed to find host bounds|WARNING: (Logging before|All log messages)|=== Source Location|"
    r"learning/\w+/tfrc|[ ^~]+$|-{20}|For simplicity, JAX has|"
    r"[EWI]0000 .*(worker hostname|cudart_stub|computation_placer|factory))"
)


def refuses(message: str, flag: str) -> bool:
    """Returns whether a compiler's error is that it does not take a flag (here, or at
    all).
    """
    fusion = "Continuation fusion" in message and "async_collective_fusion" in flag
    return f"option: '{flag}'" in message or fusion
