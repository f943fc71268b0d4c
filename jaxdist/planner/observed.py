"""What was seen of chips and their compilers: one table, to renew for another version.

Each value has its source. Products and memory of a GPU, and the steps in `sure`, are
compared with published figures; the rest is what the named compiler says or does.
"""

from dataclasses import dataclass

from jaxdist.planner.targets import Target

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
    layers_in_flight: int = 0


# By family of TPUs, and of platforms.
TABLE = {
    "v4": Observed(
        sure=f"{_PEERS} on v4: -12 and -20 %; the step will rather be slower than this band",
        product=0.97,
        stream=0.77,
        layers_in_flight=8,
    ),
    "v5e": Observed(
        sure=f"{_OURS}: the middle was off by -1, +1 and +17 % on three v5e points, all in the band",
        product=0.98,
        stream=0.81,
        layers_in_flight=8,
    ),
    "v5p": Observed(
        sure=f"{_OURS}: the middle was off by +2 to +11 % on four v5p points, all in the band",
        product=0.90,
        stream=0.72,
        attention_of_wide_heads=0.8,
        layers_in_flight=8,
    ),
    "v6e": Observed(
        sure=f"{_PEERS} on v6e: +7 and -22 %, where attention reaches a quarter of peak as assumed here",
        product=0.92,
        stream=0.86,
        attention=0.25,
        layers_in_flight=8,
    ),
    "tpu7x": Observed(
        sure="no published step was compared on this chip, and its clock is a guess",
        product=0.85,
        stream=0.85,
        attention=0.25,
        layers_in_flight=8,
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
    "cpu": Observed(),
}
# Share of peak that products of rows with their group's kernel are assumed to reach in
# a Pallas kernel.
GROUPED_PRODUCT = 0.8
# Share of compute that is taken to hide transfers to the host; all of it is optimistic.
HIDES_TRANSFERS = 0.5
# Assumed between a device and its host's memory, each way: PCIe 4 x8, 5 x4.
HOST_BYTES_PER_S = 16e9


def observed(target: Target) -> Observed:
    """Returns what was seen of a target."""
    return TABLE["gpu" if target.platform == "gpu" else target.family]


def attention_share(target: Target, width: int) -> float:
    """Returns the share of peak that attention kernels reach; `width`: of a head."""
    seen = observed(target)
    return seen.attention if width < 256 else seen.attention_of_wide_heads


def freely_used(target: Target, most: float) -> float:
    """Returns the bytes of a device below which XLA computes nothing again, at most
    `most`.
    """
    share = observed(target).used_freely
    if share is None or target.chip is None:
        return most
    return min(most, share * target.chip.hbm_bytes)
