"""Published facts about chips and networks; each row names its source.

Peaks are dense (without sparsity). Numbers are per JAX device, so they may be
multiplied by a device count: the datasheet of a chip with two devices is halved. Only
links, slices and hosts refer to whole chips. Bandwidths are bytes per second in one
direction. Unknown chips and unknown numbers are None; nothing is guessed. Nothing here
imports jax.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Platform = Literal["tpu", "gpu", "cpu"]

_PLATFORMS: dict[str, Platform] = {
    "tpu": "tpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
}
_T = 1e12
_G = 1e9
_GIB = 2**30


def platform_of(name: str) -> Platform:
    """Maps one of jax's platform names to a platform; unknown names are CPUs.

    For example, "cuda" is "gpu".
    """
    return _PLATFORMS.get(name.lower(), "cpu")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published facts about a chip, per JAX device."""

    name: str
    device_kinds: tuple[str, ...]  # values of jax.Device.device_kind
    # peak FLOP/s by dtype, as far as published
    peak_flops_per_s: Mapping[str, float] = dataclasses.field(hash=False)
    hbm_bytes: int  # memory as sold; a program may use less
    hbm_bytes_per_s: float
    source: str
    link: str  # the link between chips of one slice or host: ICI, NVLink or PCIe
    link_bytes_per_s: float  # bandwidth of one link of the chip, in one direction
    num_links: int  # links of the chip; a torus has two for each of its dims
    # largest program that libtpu 0.0.42.1 accepts (measured)
    compiler_hbm_bytes: int | None = None
    family: str = ""  # name in a planner's target ("v5p", "h100"); "" for none
    devices_per_chip: int = 1
    clock_hz: float | None = None  # clock rate of the compiler's cycles
    chips_per_host: int = 8  # chips of one machine; multi-host TPU slices have 4
    # the network between slices or hosts: DCN, InfiniBand, or another of `NETWORKS`
    network: str = ""
    # one device's share of the network; None if the chip is sold without a network
    network_bytes_per_s: float | None = None
    # one device's share of the bandwidth to the host's memory
    pcie_bytes_per_s: float | None = None
    # shapes of slices: chips along each ICI dim; see `legal_slice` for cubes
    slices: tuple[tuple[int, ...], ...] = ()
    # most chips of a slice built from 4x4x4 cubes; 0: only those in `slices` exist
    max_slice_chips: int = 0
    # PCI device id of Google's chips, as in /sys/bus/pci/devices/*/device
    pci_device_id: str = ""
    # whether SparseCores can run collectives while the TensorCores compute
    sparse_core_collectives: bool = False

    @property
    def torus_dims(self) -> int:
        """Number of dims of the ICI torus: 2 or 3; 0 for chips without ICI."""
        return self.num_links // 2 if self.link == "ICI" else 0

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device that a program may fill: the compiler's limit if known."""
        return self.compiler_hbm_bytes or self.hbm_bytes

    def legal_slice(self, shape: tuple[int, ...]) -> bool:
        """Checks whether a slice of this shape exists.

        The compiler does not check it: it also accepts shapes that do not exist.
        """
        cubes = all(n % 4 == 0 for n in shape) and list(shape) == sorted(shape)
        fits = len(shape) == 3 and 0 < math.prod(shape) <= self.max_slice_chips
        return shape in self.slices or (cubes and fits)

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Finds the ICI dims of a slice that are rings, a bool for each dim.

        A slice of whole 4x4x4 cubes has a ring along every dim. A 2D slice has a ring
        along each dim that spans the pod's 16 chips. Sources: "How to Think About
        TPUs", and MaxText's map of topologies.
        """
        if len(shape) == 3:
            return (all(n % 4 == 0 for n in shape),) * 3
        return tuple(n == 16 for n in shape)

    def peak(self, dtype: str) -> float | None:
        """Looks up the peak FLOP/s of one device for a dtype; None if not published."""
        return self.peak_flops_per_s.get(dtype)

    def with_network(self, network: "Network") -> "Chip":
        """Replaces the network between the chip's slices or hosts."""
        share = network.bytes_per_s / self.devices_per_chip
        return dataclasses.replace(
            self, network=network.name, network_bytes_per_s=share
        )


@dataclasses.dataclass(frozen=True)
class Network:
    """A network between hosts of GPUs, or between slices of TPUs."""

    name: str
    # rate at which one chip sends to other hosts while all chips send
    bytes_per_s: float
    source: str


# Networks by the names that `plan --on h100:4x8@NAME` accepts. Eight GPUs share the
# ports of a host.
NETWORKS: Mapping[str, Network] = {
    "ib50": Network(
        "InfiniBand",
        6.25 * _G,
        "NVIDIA DGX-1 with V100 datasheet: four ports of 100 Gbit/s for eight GPUs",
    ),
    "ib200": Network(
        "InfiniBand",
        25 * _G,
        "NVIDIA DGX A100 datasheet: a 200 Gbit/s port for each GPU",
    ),
    "ib400": Network(
        "InfiniBand",
        50 * _G,
        "NVIDIA DGX H100, H200, B200, GB200 datasheets: 400 Gbit/s",
    ),
    "efa-p4d": Network(
        "EFA", 6.25 * _G, "AWS EC2 P4 instances: 400 Gbit/s a host (p4d, p4de)"
    ),
    "efa-p5": Network(
        "EFA", 50 * _G, "AWS EC2 P5, P6 instances: 3,200 Gbit/s a host (p5*, p6-b200)"
    ),
    "gcp-a3-high": Network(
        "Ethernet", 12.5 * _G, "Google Cloud, GPU network bandwidth: 4 x 200 Gbit/s"
    ),
    "gcp-a3-mega": Network(
        "Ethernet", 25 * _G, "Google Cloud, GPU network bandwidth: 8 x 200 Gbit/s"
    ),
    "gcp-a3-ultra": Network(
        "Ethernet", 50 * _G, "Google Cloud, GPU network bandwidth: 8 x 400 Gbit/s"
    ),
}


_CACM = "A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 2020; "
_CLOUD = "Google Cloud documentation, "
_BOOK = "; links: How to Scale Your Model, 'How to Think About TPUs'"
_JAX = "; low precision: jax 0.10.2 pallas tpu_info"


def _chip(
    name: str,
    kinds: tuple[str, ...],
    tflops: dict[str, float],
    memory_bytes: float,
    memory_rate: float,
    links: tuple[int, str, float],
    source: str,
    *,
    devices: int = 1,
    usable_gib: float | None = None,
    ghz: float | None = None,
    network: float | str | None = None,
    pcie: float | None = None,
    gpus_per_host: int = 8,
    **more: Any,
) -> Chip:
    """Makes a row from the numbers of a datasheet, which are per chip.

    Args:
      name: the chip's name.
      kinds: values of `jax.Device.device_kind`.
      tflops: peak TFLOP/s by dtype.
      memory_bytes: size of the memory.
      memory_rate: GB/s of the memory.
      links: number of links, their kind, and GB/s of each in one direction.
      source: the datasheet.
      devices: JAX devices of the chip.
      usable_gib: memory that the compiler accepts on one device, in GiB.
      ghz: clock rate.
      network: GB/s of DCN, or a name in NETWORKS.
      pcie: GB/s to the host. A chip whose link is PCIe uses that link.
      gpus_per_host: most GPUs of one host.
      **more: other fields of `Chip`.
    """
    num_links, link, link_rate = links
    is_tpu = link == "ICI"
    if link == "PCIe":
        pcie = link_rate
    between_hosts = Network("DCN" if is_tpu else "", 0, source)
    if isinstance(network, str):
        between_hosts = NETWORKS[network]
    elif network is not None:
        between_hosts = Network("DCN", network * _G, source)
    return Chip(
        name=name,
        device_kinds=kinds,
        peak_flops_per_s={dtype: rate * _T / devices for dtype, rate in tflops.items()},
        hbm_bytes=int(memory_bytes / devices),
        hbm_bytes_per_s=memory_rate * _G / devices,
        source=source,
        link=link,
        link_bytes_per_s=link_rate * _G,
        num_links=num_links,
        compiler_hbm_bytes=None if usable_gib is None else int(usable_gib * _GIB),
        devices_per_chip=devices,
        clock_hz=ghz and ghz * _G,
        chips_per_host=4 if is_tpu else gpus_per_host,
        network=between_hosts.name,
        network_bytes_per_s=between_hosts.bytes_per_s / devices or None,
        pcie_bytes_per_s=pcie and pcie * _G / devices,
        **more,
    )


def _tensor_cores(
    half: float, tf32: float, single: float, byte: float, **others: float
) -> dict[str, float]:
    """Lists peak TFLOP/s by dtype for a GPU with tensor cores.

    Args:
      half: rate of bfloat16 and float16.
      tf32: rate of tfloat32.
      single: rate of float32 without tensor cores.
      byte: rate of float8 and int8.
      **others: rates of other dtypes, and of those that differ from their size's.
    """
    rates = {"bfloat16": half, "float16": half, "tfloat32": tf32, "float32": single}
    return rates | {"float8": byte, "int8": byte} | others


# Sources of the table.
# Clock: the datasheet's bfloat16 peak divided by the multiply-adds of the matrix units.
#   v5e has 4 x 128 x 128 of them, v4 and v5p 8 x 128 x 128, v6e 4 x 256 x 256, and each
#   of the two devices of 7x has as many as v6e. With this clock, single ops (matmuls
#   8192^3 and 8192x4096x14336, a 3 GiB stream) reach 70 to 98 % of the peak by the
#   compiler's cycles (libtpu 0.0.50.1).
# DCN: Google Cloud documentation. It is given per chip for v5p, v6e and 7x (50, 100 and
#   100 Gbit/s) and per pod of 256 chips for v5e (6.4 Tbit/s). v4 has 25 GB/s per host.
# PCIe of TPUs: 15 GB/s per chip, 32 on v6e. The source of this and of v4's DCN is "How
#   to Think About TPUs".
# Slices: Google Cloud documentation. Slices of whole 4x4x4 cubes have ascending dims
#   that are multiples of 4.
# PCI ids: jax 0.10.2, jax/_src/hardware_utils.py.
# SparseCore: no flag moves collectives of v4 or v5e there, and 7x moves them without a
#   flag (libtpu 0.0.42.1 and 0.0.50.1).
# NVLink and PCIe: half of the datasheets' bidirectional numbers. PCIe 4.0 x16 has 32
#   GB/s, 3.0 x16 (T4, V100) has 16, and 5.0 x16 has 64.
# GB200: 36 or 72 GPUs of a rack share one NVLink domain, which is a "host" here. Each
#   has a quarter of NVLink-C2C's 900 GB/s to CPU memory (two GPUs, two directions).
_SUB_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_IB50: dict[str, Any] = {"pcie": 16, "network": "ib50"}
_IB200: dict[str, Any] = {"pcie": 32, "network": "ib200"}
_IB400: dict[str, Any] = {"pcie": 64, "network": "ib400"}

_HOPPER = _tensor_cores(989.4, 494.7, 66.9, 1978.9)
_HOPPER_NVL = _tensor_cores(835.5, 417.5, 60.0, 1670.5)
_AMPERE = {
    "bfloat16": 312.0,
    "float16": 312.0,
    "tfloat32": 156.0,
    "float32": 19.5,
    "int8": 624.0,
}
_VOLTA = {"float16": 125.0, "float32": 15.7}
_VOLTA_PCIE = {"float16": 112.0, "float32": 14.0}
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper (sparse figures halved)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (sparse figures halved)"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet (no bfloat16 units)"

# fmt: off
CHIPS: tuple[Chip, ...] = (
    _chip("TPU v2", ("TPU v2",), {"bfloat16": 46}, 16 * _GIB, 700, (4, "ICI", 62),
          _CACM + "496 Gbit/s per link and direction", devices=2, usable_gib=7.48),
    _chip("TPU v3", ("TPU v3",), {"bfloat16": 123}, 32 * _GIB, 900, (4, "ICI", 82),
          _CACM + "656 Gbit/s per link and direction", devices=2, usable_gib=15.48),
    _chip("TPU v4", ("TPU v4",), {"bfloat16": 275, "int8": 275}, 32 * _GIB, 1228, (6, "ICI", 45),
          _CLOUD + "TPU v4 (megacore: one device)" + _BOOK, family="v4", usable_gib=30.75, ghz=1.05,
          network=6.25, pcie=15, slices=_SUB_CUBES, max_slice_chips=4096, pci_device_id="0x005e"),
    _chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), {"bfloat16": 197, "int8": 393}, 16 * _GIB, 819,
          (4, "ICI", 45), _CLOUD + "TPU v5e" + _BOOK, family="v5e", usable_gib=15.75, ghz=1.5,
          network=3.125, pcie=15, slices=_FLAT, pci_device_id="0x0063"),
    _chip("TPU v5p", ("TPU v5", "TPU v5p"), {"bfloat16": 459, "int8": 918}, 95 * _GIB, 2765,
          (6, "ICI", 90), _CLOUD + "TPU v5p" + _BOOK + _JAX, family="v5p", usable_gib=95.74, ghz=1.75,
          network=6.25, pcie=15, slices=_SUB_CUBES, max_slice_chips=6144, pci_device_id="0x0062",
          sparse_core_collectives=True),
    _chip("TPU v6e", ("TPU v6 lite", "TPU v6e"), {"bfloat16": 918, "int8": 1836, "float8": 918},
          32 * _GIB, 1640, (4, "ICI", 90), _CLOUD + "TPU v6e" + _BOOK, family="v6e", usable_gib=31.25,
          ghz=1.75, network=12.5, pcie=32, slices=_FLAT, pci_device_id="0x006f",
          sparse_core_collectives=True),
    _chip("TPU 7x", ("TPU7x",), {"bfloat16": 2307, "float8": 4614}, 192 * _GIB, 7380, (6, "ICI", 90),
          _CLOUD + "TPU7x (Ironwood)" + _BOOK, family="tpu7x", devices=2, usable_gib=94.75, ghz=2.2,
          network=12.5, slices=((1, 1, 1), *_SUB_CUBES), max_slice_chips=9216, pci_device_id="0x0076",
          sparse_core_collectives=True),
    _chip("A100 40GB", ("NVIDIA A100-SXM4-40GB",), _AMPERE, 40 * _G, 1555, (1, "NVLink", 300), _A100,
          family="a100-40gb", **_IB200),
    _chip("A100 40GB PCIe", ("NVIDIA A100-PCIE-40GB",), _AMPERE, 40 * _G, 1555, (1, "PCIe", 32), _A100,
          family="a100-40gb-pcie"),
    _chip("A100 80GB", ("NVIDIA A100-SXM4-80GB",), _AMPERE, 80 * _G, 2039, (1, "NVLink", 300), _A100,
          family="a100", **_IB200),
    _chip("A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), _AMPERE, 80 * _G, 1935, (1, "PCIe", 32), _A100,
          family="a100-pcie"),
    _chip("H100 SXM", ("NVIDIA H100 80GB HBM3",), _HOPPER, 80 * _G, 3350, (1, "NVLink", 450), _H100,
          family="h100", **_IB400),
    _chip("H100 PCIe", ("NVIDIA H100 PCIe",), _tensor_cores(756, 378, 51, 1513), 80 * _G, 2000,
          (1, "PCIe", 64), _H100, family="h100-pcie"),
    _chip("H100 NVL", ("NVIDIA H100 NVL",), _HOPPER_NVL, 94 * _G, 3900, (1, "NVLink", 300), _H100, pcie=64),
    _chip("H200", ("NVIDIA H200",), _HOPPER, 141 * _G, 4800, (1, "NVLink", 450), _H200,
          family="h200", **_IB400),
    _chip("H200 NVL", ("NVIDIA H200 NVL",), _HOPPER_NVL, 141 * _G, 4800, (1, "NVLink", 450), _H200, pcie=64),
    _chip("B200", ("NVIDIA B200",), _tensor_cores(2250, 1125, 75, 4500, float4=9000), 180 * _G, 8000,
          (1, "NVLink", 900),
          "NVIDIA DGX B200 datasheet and Blackwell architecture brief (sparse figures halved)",
          family="b200", **_IB400),
    _chip("GB200", ("NVIDIA GB200",), _tensor_cores(2500, 1250, 80, 5000, float4=10000), 186 * _G, 8000,
          (1, "NVLink", 900), "NVIDIA GB200 NVL72 datasheet, per GPU (sparse figures halved)",
          family="gb200", network="ib400", pcie=225, gpus_per_host=72),
    _chip("RTX 4090", ("NVIDIA GeForce RTX 4090",), _tensor_cores(165.2, 82.6, 82.6, 330.3, int8=660.6),
          24 * _G, 1008, (1, "PCIe", 32), "NVIDIA Ada GPU architecture whitepaper, float32 accumulation",
          family="rtx4090"),
    _chip("L4", ("NVIDIA L4",), _tensor_cores(121, 60, 30.3, 242.5), 24 * _G, 300, (1, "PCIe", 32),
          "NVIDIA L4 Tensor Core GPU datasheet (sparse figures halved)", family="l4"),
    _chip("A10G", ("NVIDIA A10G",),
          {"bfloat16": 70, "float16": 70, "tfloat32": 35, "float32": 35, "int8": 140}, 24 * _G, 600,
          (1, "PCIe", 32), "NVIDIA A10G datasheet of AWS (without sparse figures)", family="a10g"),
    _chip("T4", ("Tesla T4", "NVIDIA T4"), {"float16": 65, "float32": 8.1, "int8": 130}, 16 * _G, 320,
          (1, "PCIe", 16), "NVIDIA T4 Tensor Core GPU datasheet (no bfloat16 units)", family="t4"),
    _chip("V100 16GB", ("Tesla V100-SXM2-16GB",), _VOLTA, 16 * _G, 900, (1, "NVLink", 150), _V100,
          family="v100-16gb", **_IB50),
    _chip("V100 32GB", ("Tesla V100-SXM2-32GB",), _VOLTA, 32 * _G, 900, (1, "NVLink", 150), _V100,
          family="v100", **_IB50),
    _chip("V100 16GB PCIe", ("Tesla V100-PCIE-16GB",), _VOLTA_PCIE, 16 * _G, 900, (1, "PCIe", 16), _V100,
          family="v100-16gb-pcie"),
    _chip("V100 32GB PCIe", ("Tesla V100-PCIE-32GB",), _VOLTA_PCIE, 32 * _G, 900, (1, "PCIe", 16), _V100,
          family="v100-pcie"),
)
# fmt: on

_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.device_kinds}
FAMILIES: Mapping[str, Chip] = {chip.family: chip for chip in CHIPS if chip.family}
# other names of families: Google Cloud's accelerator types, and product names
FAMILY_ALIASES = {
    "v5litepod": "v5e",
    "trillium": "v6e",
    "ironwood": "tpu7x",
    "v7x": "tpu7x",
}


def chip_for(device_kind: str) -> Chip | None:
    """Finds the chip of a `jax.Device.device_kind`; None if the table lacks it."""
    return _BY_KIND.get(device_kind)


def count_chips(device_kind: str, devices: int) -> int:
    """Counts the chips of JAX devices; a device of an unknown kind counts as a chip."""
    chip = chip_for(device_kind)
    return -(-devices // chip.devices_per_chip) if chip else devices


def slice_shape(chip: Chip, devices: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Finds the shape of slices from their TPU devices.

    Returns:
      The chips along each ICI dim of a slice, and the number of slices.
    """
    coords_by_dim = zip(*(device.coords for device in devices), strict=True)
    sizes = sorted(max(coords) - min(coords) + 1 for coords in coords_by_dim)
    shape = sizes[3 - chip.torus_dims :]
    if chip.torus_dims == 3 and shape == [1, 2, 2]:
        shape.reverse()  # the only slice whose dims are not in ascending order
    slices = {getattr(device, "slice_index", 0) for device in devices}
    return tuple(int(n) for n in shape), len(slices)
