"""Facts about chips, and the flags each platform starts with, every row with its source.

Numbers are dense (no sparsity) and of ONE JAX DEVICE, so they may be multiplied by a device count;
a chip that shows up as two devices has its datasheet halved. Only links, slices and hosts are of whole
chips. Bandwidths are bytes per second in one direction. An unknown chip is None, an unknown number too:
nothing is ever guessed. Nothing here imports jax.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Platform = Literal["tpu", "gpu", "cpu"]

_T, _G, _GIB = 1e12, 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is published about a chip, as one JAX device sees it."""

    name: str
    device_kinds: tuple[str, ...]  # jax.Device.device_kind
    peak_flops_per_s: Mapping[str, float] = dataclasses.field(hash=False)  # by dtype, where published
    hbm_bytes: int  # as sold; what a program may use is less
    hbm_bytes_per_s: float
    source: str
    link: str  # what joins the chips of one slice or node: ICI, NVLink or PCIe
    link_bytes_per_s: float  # of one link of the chip, one direction
    num_links: int  # of the chip; a torus has two for each of its dims
    compiler_hbm_bytes: int | None = None  # above it libtpu 0.0.42.1 refuses a program (measured)
    family: str = ""  # its name in a planner's target ("v5p", "h100"); "" cannot be one
    devices_per_chip: int = 1
    clock_hz: float | None = None  # that turns the compiler's cycles into seconds
    chips_per_host: int = 8  # of one machine: TPU VMs of multi-host slices have 4
    network: str = ""  # what joins slices or nodes: DCN or InfiniBand
    network_bytes_per_s: float | None = None  # the share of one device
    pcie_bytes_per_s: float | None = None  # to the host's memory, the share of one device
    slices: tuple[tuple[int, ...], ...] = ()  # chips along each ICI dim; see `legal_slice` for cubes
    max_slice_chips: int = 0  # of slices built from 4x4x4 cubes; 0: only the ones in `slices`

    @property
    def torus_dims(self) -> int:
        """Dims of the ICI torus: 2 or 3; 0 without one."""
        return self.num_links // 2 if self.link == "ICI" else 0

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device that a program may fill: the compiler's limit where it is known."""
        return self.compiler_hbm_bytes or self.hbm_bytes

    def legal_slice(self, shape: tuple[int, ...]) -> bool:
        """Whether such a slice is sold: the compiler also accepts shapes that do not exist."""
        cubes = all(n % 4 == 0 for n in shape) and list(shape) == sorted(shape)
        fits = len(shape) == 3 and 0 < math.prod(shape) <= self.max_slice_chips
        return shape in self.slices or (cubes and fits)

    def peak(self, dtype: str) -> float | None:
        """Returns the peak FLOP/s of one device for a dtype name, or None if none is published."""
        return self.peak_flops_per_s.get(dtype)


_CACM = "A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 2020; "
_CLOUD = "Google Cloud documentation, "
_BOOK = "; links: How to Scale Your Model, 'How to Think About TPUs'"
_JAX = "; low precision: jax 0.10.2 pallas tpu_info"


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    peaks: dict[str, float],
    gib: float,
    hbm: float,
    links: tuple[int, float],
    usable_gib: float,
    source: str,
    *,
    devices: int = 1,
    ghz: float | None = None,
    dcn: float | None = None,
    pcie: float | None = None,
    **more: Any,
) -> Chip:
    """Returns a TPU row from the chip's TFLOP/s by dtype, GiB, GB/s of memory, and of each link.

    `usable_gib` is of one of its `devices`; `dcn` and `pcie` are GB/s of the chip.
    """
    rates = {dtype: value * _T / devices for dtype, value in peaks.items()}
    return Chip(
        name,
        kinds,
        rates,
        int(gib * _GIB / devices),
        hbm * _G / devices,
        source,
        "ICI",
        links[1] * _G,
        links[0],
        int(usable_gib * _GIB),
        devices_per_chip=devices,
        clock_hz=ghz and ghz * _G,
        chips_per_host=4,
        network="DCN",
        network_bytes_per_s=dcn and dcn * _G / devices,
        pcie_bytes_per_s=pcie and pcie * _G / devices,
        **more,
    )


def _gpu(
    name: str,
    kinds: tuple[str, ...],
    peaks: dict[str, float],
    gb: float,
    hbm: float,
    link: tuple[str, float],
    source: str,
    *,
    pcie: float | None = None,
    infiniband: float | None = None,
    **more: Any,
) -> Chip:
    """Returns a GPU row from TFLOP/s by dtype, GB, GB/s of memory, one-way GB/s of all links.

    `pcie` and `infiniband` are GB/s of the GPU; a GPU whose link is PCIe has that for its host, too.
    """
    pcie = link[1] if link[0] == "PCIe" else pcie
    rates = {dtype: value * _T for dtype, value in peaks.items()}
    return Chip(
        name,
        kinds,
        rates,
        int(gb * _G),
        hbm * _G,
        source,
        link[0],
        link[1] * _G,
        1,
        network="InfiniBand",
        network_bytes_per_s=infiniband and infiniband * _G,
        pcie_bytes_per_s=pcie and pcie * _G,
        **more,
    )


# Clock: the datasheet's bfloat16 peak over the multiply-adds of its matrix units (v5e 4 x 128 x 128, v4 and
# v5p 8 of them, v6e 4 x 256 x 256, 7x the same in each of its two devices). With it the compiler's cycles of
# single ops (matmuls 8192^3 and 8192x4096x14336, a 3 GiB stream; libtpu 0.0.50.1) are 70 to 98 % of peak.
# DCN: Google Cloud documentation; v5p, v6e and 7x give it per chip (50, 100, 100 Gbit/s), v5e per pod of
# 256 (6.4 Tbit/s); v4: 25 GB/s of a host, as PCIe 15 and 32 (v6e) GB/s of a chip: "How to Think About TPUs".
# Slices: Google Cloud documentation. 3D ones of whole 4x4x4 cubes have ascending dims, multiples of 4.
# NVLink and PCIe are half of the datasheets' bidirectional numbers; PCIe 4.0 x16 is 32, 5.0 x16 64 GB/s.
# InfiniBand: DGX datasheets, one port per GPU: 200 Gbit/s (A100), 400 Gbit/s (H100, H200, B200, GB200).
_SUB_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_IB200: dict[str, Any] = {"pcie": 32, "infiniband": 25}
_IB400: dict[str, Any] = {"pcie": 64, "infiniband": 50}


_HOPPER = {
    "bfloat16": 989.4, "float16": 989.4, "tfloat32": 494.7, "float32": 66.9,
    "float8": 1978.9, "int8": 1978.9,
}  # fmt: skip
_HOPPER_NVL = {
    "bfloat16": 835.5, "float16": 835.5, "tfloat32": 417.5, "float32": 60.0,
    "float8": 1670.5, "int8": 1670.5,
}  # fmt: skip
_AMPERE = {"bfloat16": 312.0, "float16": 312.0, "tfloat32": 156.0, "float32": 19.5, "int8": 624.0}
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper (sparse figures halved)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (sparse figures halved)"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"

# fmt: off
CHIPS: tuple[Chip, ...] = (
    _tpu("TPU v2", ("TPU v2",), {"bfloat16": 46}, 16, 700, (4, 62), 7.48,
         _CACM + "496 Gbit/s per link and direction", devices=2),
    _tpu("TPU v3", ("TPU v3",), {"bfloat16": 123}, 32, 900, (4, 82), 15.48,
         _CACM + "656 Gbit/s per link and direction", devices=2),
    _tpu("TPU v4", ("TPU v4",), {"bfloat16": 275, "int8": 275}, 32, 1228, (6, 45), 30.75,
         _CLOUD + "TPU v4 (megacore: one device)" + _BOOK, family="v4", ghz=1.05, dcn=6.25, pcie=15,
         slices=_SUB_CUBES, max_slice_chips=4096),
    _tpu("TPU v5e", ("TPU v5 lite", "TPU v5e"), {"bfloat16": 197, "int8": 393}, 16, 819, (4, 45),
         15.75, _CLOUD + "TPU v5e" + _BOOK, family="v5e", ghz=1.5, dcn=3.125, pcie=15, slices=_FLAT),
    _tpu("TPU v5p", ("TPU v5", "TPU v5p"), {"bfloat16": 459, "int8": 918}, 95, 2765, (6, 90), 95.74,
         _CLOUD + "TPU v5p" + _BOOK + _JAX, family="v5p", ghz=1.75, dcn=6.25, pcie=15,
         slices=_SUB_CUBES, max_slice_chips=6144),
    _tpu("TPU v6e", ("TPU v6 lite", "TPU v6e"), {"bfloat16": 918, "int8": 1836, "float8": 918},
         32, 1640, (4, 90), 31.25, _CLOUD + "TPU v6e" + _BOOK, family="v6e", ghz=1.75, dcn=12.5,
         pcie=32, slices=_FLAT),
    _tpu("TPU 7x", ("TPU7x",), {"bfloat16": 2307, "float8": 4614}, 192, 7380, (6, 90), 94.75,
         _CLOUD + "TPU7x (Ironwood)" + _BOOK, devices=2, family="tpu7x", ghz=2.2, dcn=12.5,
         slices=((1, 1, 1), *_SUB_CUBES), max_slice_chips=9216),
    _gpu("A100 40GB", ("NVIDIA A100-SXM4-40GB",), _AMPERE, 40, 1555, ("NVLink", 300), _A100,
         family="a100-40gb", **_IB200),
    _gpu("A100 40GB PCIe", ("NVIDIA A100-PCIE-40GB",), _AMPERE, 40, 1555, ("PCIe", 32), _A100),
    _gpu("A100 80GB", ("NVIDIA A100-SXM4-80GB",), _AMPERE, 80, 2039, ("NVLink", 300), _A100,
         family="a100", **_IB200),
    _gpu("A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), _AMPERE, 80, 1935, ("PCIe", 32), _A100),
    _gpu("H100 SXM", ("NVIDIA H100 80GB HBM3",), _HOPPER, 80, 3350, ("NVLink", 450), _H100,
         family="h100", **_IB400),
    _gpu("H100 PCIe", ("NVIDIA H100 PCIe",),
         {"bfloat16": 756, "float16": 756, "tfloat32": 378, "float32": 51,
          "float8": 1513, "int8": 1513}, 80, 2000, ("PCIe", 64), _H100),
    _gpu("H100 NVL", ("NVIDIA H100 NVL",), _HOPPER_NVL, 94, 3900, ("NVLink", 300), _H100, pcie=64),
    _gpu("H200", ("NVIDIA H200",), _HOPPER, 141, 4800, ("NVLink", 450), _H200,
         family="h200", **_IB400),
    _gpu("H200 NVL", ("NVIDIA H200 NVL",), _HOPPER_NVL, 141, 4800, ("NVLink", 450), _H200, pcie=64),
    _gpu("B200", ("NVIDIA B200",),
         {"bfloat16": 2250, "float16": 2250, "tfloat32": 1125, "float32": 75,
          "float8": 4500, "int8": 4500, "float4": 9000}, 180, 8000, ("NVLink", 900),
         "NVIDIA DGX B200 datasheet and Blackwell architecture brief (sparse figures halved)",
         family="b200", **_IB400),
    _gpu("GB200", ("NVIDIA GB200",),
         {"bfloat16": 2500, "float16": 2500, "tfloat32": 1250, "float32": 80,
          "float8": 5000, "int8": 5000, "float4": 10000}, 186, 8000, ("NVLink", 900),
         "NVIDIA GB200 NVL72 datasheet, per GPU (sparse figures halved)", infiniband=50,
         chips_per_host=72),
    _gpu("RTX 4090", ("NVIDIA GeForce RTX 4090",),
         {"bfloat16": 165.2, "float16": 165.2, "tfloat32": 82.6, "float32": 82.6,
          "float8": 330.3, "int8": 660.6}, 24, 1008, ("PCIe", 32),
         "NVIDIA Ada GPU architecture whitepaper, float32 accumulation"),
    _gpu("L4", ("NVIDIA L4",),
         {"bfloat16": 121, "float16": 121, "tfloat32": 60, "float32": 30.3,
          "float8": 242.5, "int8": 242.5}, 24, 300, ("PCIe", 32),
         "NVIDIA L4 Tensor Core GPU datasheet (sparse figures halved)"),
    _gpu("T4", ("Tesla T4", "NVIDIA T4"), {"float16": 65, "float32": 8.1, "int8": 130}, 16, 320,
         ("PCIe", 16), "NVIDIA T4 Tensor Core GPU datasheet (no bfloat16 units)"),
    _gpu("V100 16GB", ("Tesla V100-SXM2-16GB",), {"float16": 125, "float32": 15.7}, 16, 900,
         ("NVLink", 150), _V100 + " (no bfloat16 units)", pcie=16),
    _gpu("V100 32GB", ("Tesla V100-SXM2-32GB",), {"float16": 125, "float32": 15.7}, 32, 900,
         ("NVLink", 150), _V100 + " (no bfloat16 units)", pcie=16),
    _gpu("V100 16GB PCIe", ("Tesla V100-PCIE-16GB",), {"float16": 112, "float32": 14}, 16, 900,
         ("PCIe", 16), _V100 + " (no bfloat16 units)"),
    _gpu("V100 32GB PCIe", ("Tesla V100-PCIE-32GB",), {"float16": 112, "float32": 14}, 32, 900,
         ("PCIe", 16), _V100 + " (no bfloat16 units)"),
)
# fmt: on

_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.device_kinds}
FAMILIES: Mapping[str, Chip] = {chip.family: chip for chip in CHIPS if chip.family}


def chip_for(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, or None when it is not in the table."""
    return _BY_KIND.get(device_kind)
