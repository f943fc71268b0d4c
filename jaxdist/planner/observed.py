"""Observations of chips and their compilers, to renew for other versions.

The first part is a table by chip. The second part describes how these compilers write
programs and messages. The versions are libtpu 0.0.42.1 and 0.0.50.1, and XLA for GPUs
of jax 0.10.2, unless a comment names others. `telemetry.hlo` reads any HLO; only this
file knows the forms of one compiler.

Each value has its source. Matmuls and memory of a GPU, and the steps in `sure`, are
compared with published figures. Other values are what the named compiler reports or
does.
"""

import re
from dataclasses import dataclass

_OURS = "our program by libtpu 0.0.42.1 at published workloads, docs/evidence/plan.md"
_PEERS = "the largest peer's programs by libtpu 0.0.50.1, compute and attention alone, beside published steps"


@dataclass(frozen=True)
class Observed:
    """The shares of a chip's datasheet that steps reach."""

    sure: str = ""  # how good the estimates of steps were
    # Share of the peak that single matmuls reach by the compiler's cycles: the better
    # of 8192^3 and 8192 x 4096 x 14336 (libtpu 0.0.50.1). For some shapes the compiler
    # counts large backward matmuls with fused element-wise work at 2.5 times that time,
    # which contradicts published steps.
    matmul: float = 1.0
    # Share of memory bandwidth that element-wise kernels are assumed to reach: that of
    # a copy of 3 GiB by the compiler's cycles (libtpu 0.0.50.1).
    stream: float = 1.0
    # Share of the peak that attention kernels are assumed to reach with heads of less
    # than 256. Heads of 128 fill half of a matrix unit that is 256 wide.
    attention: float = 0.5
    # The same for larger heads. Published steps of long sequences on v5p allow 0.75 to
    # 0.81 (tpu-recipes, training/v5p/Llama3.1-8B-LongContext, 64k to 4M tokens).
    attention_of_wide_heads: float = 0.5
    # Shares of the datasheet's (matmuls, memory) rates that a program reaches at best
    # and at worst. The cycles of TPU compilers already contain them.
    reached: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    # Share of memory that a step may use. A GPU's compiler never refuses a step, and
    # libraries and fragmentation need the remainder.
    usable: float = 1.0
    # Share of a GPU's memory above which XLA recomputes values by itself; +21 % FLOPs
    # were seen on H100.
    used_freely: float | None = None
    # Number of layers whose offloaded activations are on the device in transfer.
    # Compiled peaks of llama3_8b exceed the arithmetic by 7.4 layers on v6e:4x4
    # (libtpu 0.0.42.1) and by 1.4 layers on h100:1x8 (jax 0.10.2).
    layers_in_flight: int = 8
    # Whether the whole gradients of all kernels of a layer's experts exist until the last
    # one is computed. Otherwise two exist at once.
    # On tpu7x compiled peaks of a sequence a device exceeded the arithmetic of two by a
    # gradient: by 10 to 18 % for Mixtral, Qwen3 with wide experts and DeepSeek-V3
    # (libtpu 0.0.42.1; benchmarks/plan/arithmetic.py, the runs with @gathered).
    holds_expert_gradients: bool = False
    # collectives that overlap with compute without a SparseCore, in words
    overlapping: str = "no gathers or sums"

    def attention_share(self, width: int) -> float:
        """Looks up the share of the peak that attention reaches with a width of heads."""
        return self.attention if width < 256 else self.attention_of_wide_heads


# by family of TPUs, or by platform
TABLE = {
    "v4": Observed(
        sure=f"{_PEERS} on v4: -12 and -20 %; the step will rather be slower than this band",
        matmul=0.97,
        stream=0.77,
    ),
    "v5e": Observed(
        sure=f"{_OURS}: the middle was off by -1, +1 and +17 % on three v5e points, all in the band",
        matmul=0.98,
        stream=0.81,
        overlapping="only some gathers",
    ),
    "v5p": Observed(
        sure=f"{_OURS}: the middle was off by +2 to +11 % on four v5p points, all in the band",
        matmul=0.90,
        stream=0.72,
        attention_of_wide_heads=0.8,
    ),
    "v6e": Observed(
        sure=f"{_PEERS} on v6e: +7 and -22 %, where attention reaches a quarter of peak as assumed here",
        matmul=0.92,
        stream=0.86,
        attention=0.25,
    ),
    "tpu7x": Observed(
        sure="no published step was compared on this chip, and its clock is a guess",
        matmul=0.85,
        stream=0.85,
        attention=0.25,
        holds_expert_gradients=True,
    ),
    # Matmuls: bfloat16 on H100 reaches 783 of 989 TFLOP/s at 4096^3, and 632 at 2048^3
    # (OpenXLA, xla/service/gpu/model/matmul_interpolator_data.h). The shares of memory
    # bandwidth are assumed.
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
# share of the peak that Pallas kernels of grouped matmuls are assumed to reach
GROUPED_MATMUL = 0.8
# share of compute that is assumed to hide transfers to the host; 1 is optimistic
HIDES_TRANSFERS = 0.5
# assumed rate between a device and its host's memory, each way: PCIe 4 x8, or 5 x4
HOST_BYTES_PER_S = 16e9

# --- TPU programs ---------------------------------------------------------------------

# Elements of a row of a vector register. Narrower rows are padded, and kernels write a
# logsumexp to all elements of a row.
LANES = 128
# With several slices, device i of slice s has the id (s + 1) * 100,000 + i.
SLICE_ID = 100_000
# configuration with one device per chip; without it v4 has two
ONE_DEVICE_PER_CHIP = {"v4": "megacore"}
# Host transfers between slices: the kind, and the name that both ends share.
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
# a fusion that sums over devices and keeps its own shard
REDUCE_SCATTER = re.compile("calls=%?(all-)?reduce-scatter|ReduceScatter")
# a call on the SparseCore that starts without operands; its update brings them
# (0.0.50.1)
EMPTY_START = "-start()"
# a Pallas kernel, which the compiler cannot see into
KERNEL = 'custom_call_target="tpu_custom_call"'
# Splash and flash attention, by name or scope. The first of the marks in a kernel's
# name gives its role in the backward pass; without a mark it is a forward kernel.
ATTENTION = re.compile("splash|flash|attention")
BACKWARD_MARKS = {"dkv": "dkv", "dq": "dq", "bwd": "backward", "backward": "backward"}
# grouped matmuls of experts (megablox), and the element-wise kernel between them
GROUPED = re.compile(r"t?gmm\b|experts_hidden_gradients\b")
# Number of permutes in loops, without pipelines, that shows windowed matmuls: the
# compiler counts far too many cycles for them. Fewer permutes are exchanged edges.
WINDOWED_PERMUTES = 8
# the option that switches windowed matmuls off; their cycles would double a step
WINDOWED_EINSUM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
# a refusal because of size; jax 0.12 puts "E1000: CompileTimeHbmOom:" before it
OUT_OF_MEMORY = re.compile(
    r"Ran out of memory on HBM.*?\(([\d.]+)([KMGT]?)\).*?HBM \(([\d.]+)([KMGT]?)\)",
    re.S,
)

# --- GPU programs ---------------------------------------------------------------------

# an error about an assembler that does not know the GPU; CUDA 13 dropped Volta
OLD_PTXAS = "ptxas too old"
PTXAS_FIX = (
    " This ptxas has no code for the GPU: CUDA 13 has none for V100s. Install that of "
    "CUDA 12 beside jax: pip install nvidia-cuda-nvcc-cu12"
)
CUDNN_ATTENTION = "__cudnn$fmha"
CUDNN_BACKWARD = "Backward"  # the end of a backward call's target

# --- messages of compilers ------------------------------------------------------------

# the partitioner's warning, with the op if it knows one
REMATERIALISED = re.compile(
    r"[Ii]nvoluntary full rematerialization.*?(?:op_name=\"([^\"]*)\"|$)", re.M
)
# messages of libtpu and the CUDA plugin on every machine without a device
NOISE = re.compile(
    r"^(Failed to find host bounds|WARNING: (Logging before|All log messages)|=== Source Location|"
    r"learning/\w+/tfrc|[ ^~]+$|-{20}|For simplicity, JAX has|"
    r"[EWI]0000 .*(worker hostname|cudart_stub|computation_placer|factory))"
)


def refuses(message: str, flag: str) -> bool:
    """Checks whether a compiler's error is the refusal of a flag.

    The compiler may not know the flag, or not support it on this chip.
    """
    refuses_fusion = (
        "Continuation fusion" in message and "async_collective_fusion" in flag
    )
    return f"option: '{flag}'" in message or refuses_fusion
