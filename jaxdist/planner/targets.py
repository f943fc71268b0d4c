"""Targets of plans: hardware such as `v5p:4x4x4`, `h100:4x8` or `cpu:8`, with links.

A TPU target is FAMILY:TOPOLOGY, the chips along each ICI dim. One more number, as in
`v6e:16x16x2`, is the number of slices. A GPU target is FAMILY:HOSTSxGPUS. `@25GB/s` or
`@NETWORK` behind it sets the network between hosts or slices. Legal slices come from
the table in `hardware`, because the compiler also accepts shapes that do not exist.
`devices` must be called in a child process.
"""

import functools
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jaxdist.config import ConfigError, extras, suggest
from jaxdist.hardware import chips as hardware
from jaxdist.hardware import host
from jaxdist.parallel import mesh
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner.gpu_descriptions import gpu_description
from jaxdist.planner.observed import (
    ONE_DEVICE_PER_CHIP,
    SLICE_ID,
    TABLE,
    Observed,
)

# Families whose slices Google Cloud names by TensorCores: v5p-8 has 4 chips.
_NAMED_BY_CORES = ("v4", "v5p")

# bandwidth between the two devices of a 7x chip, in ICI links (Google Cloud
# documentation, TPU7x)
_DIE_TO_DIE = 6


@dataclass(frozen=True)
class Link:
    """The link over which the members of a group communicate."""

    # ICI, DCN, NVLink, PCIe, or a network's name; "memory" within a device or a CPU
    name: str
    # rate at which each device can send while all members send; inf: not modelled
    bytes_per_s: float
    # share of the rate that an all-to-all reaches; on a torus its bytes pass through
    # other members
    all_to_all: float = 1.0
    # latency of a collective if it was measured (`calibration`)
    alpha_s: float = 0.0

    def seconds(self, kind: str, wire_bytes: float) -> float:
        """Computes the time of a collective in which each member sends `wire_bytes`."""
        rate = self.bytes_per_s * (self.all_to_all if kind == "all-to-all" else 1.0)
        return self.alpha_s + wire_bytes / rate


_FREE = Link("memory", math.inf)


@dataclass(frozen=True)
class Target:
    """The devices to plan for, with the links between them."""

    text: str  # canonical text, such as v5p:4x4x4 or h100:4x8@25GB/s
    platform: hardware.Platform
    chip: hardware.Chip | None  # None on CPU
    num_devices: int  # JAX devices
    num_chips: int
    num_slices: int  # groups of chips joined by ICI; 1 on GPU and CPU
    hosts: int
    # chips along each ICI dim of a slice; (hosts, GPUs per host) on GPU
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]  # whether each ICI dim is a ring

    @property
    def family(self) -> str:
        """The chip's family as in `text`; "cpu" without a chip."""
        return self.chip.family if self.chip else "cpu"

    def with_shape(self, sizes: Sequence[int]) -> str:
        """Formats a target of the same chip and network with another shape."""
        _, at, network = self.text.partition("@")
        return f"{self.family}:{_by(sizes)}{at}{network}"

    @property
    def device_kind(self) -> str:
        """The devices' kind by jax's name."""
        return self.chip.device_kinds[0] if self.chip else "cpu"

    @property
    def observed(self) -> Observed:
        """Observations of the chip and its compiler."""
        return TABLE["gpu" if self.platform == "gpu" else self.family]

    @property
    def usable_bytes(self) -> int | None:
        """The bytes that a step may use on a device; None if unknown.

        It is the compiler's limit on TPUs, and a share of the memory on GPUs. Emulated
        CPU devices share this machine's memory equally.
        """
        if self.platform == "cpu":
            return host.memory_bytes() // self.num_devices
        if self.chip is None:
            return None
        return int(self.chip.capacity_bytes * self.observed.usable)

    def freely_used(self, most: float) -> float:
        """Finds the bytes below which XLA recomputes nothing by itself; at most `most`.

        Args:
          most: bytes that a step may use on a device.
        """
        share = self.observed.used_freely
        if share is None or self.chip is None:
            return most
        return min(most, share * self.chip.hbm_bytes)

    def matmul_peak(self, dtype: str) -> float | None:
        """Looks up the peak FLOP/s of matmuls; None if none is published."""
        if self.chip is None:
            return None
        # TPU matrix units round float32 to bfloat16. XLA computes what a GPU has no units
        # for, such as bfloat16 on a T4, in float32.
        instead = "float32" if self.platform == "gpu" else "bfloat16"
        return self.chip.peak(dtype) or self.chip.peak(instead)

    @property
    def compiler(self) -> str:
        """The platform as XLA's compilers call it."""
        return "cuda" if self.platform == "gpu" else self.platform

    def axis_link(self, mesh_shape: MeshShape, axis: str) -> Link:
        """Finds the link of the slowest group of a mesh axis, or of several axes.

        Args:
          mesh_shape: the mesh.
          axis: the axis, or several as in "data+fsdp".
        """
        return _axis_link(
            self, axis, tuple(mesh_shape.sizes.items()), tuple(mesh_shape.dcn.items())
        )

    def arrange(self, mesh_shape: MeshShape) -> np.ndarray:
        """Arranges device ids on a mesh as `build_mesh` does.

        Returns:
          The `jax.Device.id` at each mesh position, [sizes of the axes].
        """
        device_ids = np.vectorize(lambda device: device.id)
        arranged: np.ndarray = device_ids(mesh.arrange(mesh_shape, self.stand_ins()))
        return arranged

    def stand_ins(self) -> list[Any]:
        """Makes objects with the attributes of devices that `mesh_utils` reads."""
        return list(_stand_ins(self))

    def group_link(self, device_ids: Sequence[int]) -> Link:
        """Finds the link of a replica group.

        In a group that spans slices or hosts, each member carries its part of the
        traffic between them.

        Args:
          device_ids: the `jax.Device.id` of each member.
        """
        if self.chip is None or len(set(device_ids)) < 2:
            return _FREE
        speed = self.chip.link_bytes_per_s
        devices_per_place = self.shape[1]  # GPUs of a host
        if self.platform != "gpu":
            speed *= self._ici_links(device_ids, self.chip.devices_per_chip)
            devices_per_place = SLICE_ID
        members = Counter(
            i // devices_per_place for i in device_ids
        )  # by host or slice
        if len(members) == 1:
            all_to_all = 1.0
            if self.platform != "gpu":
                all_to_all = self._all_to_all(device_ids)
            return Link(self.chip.link, speed, all_to_all)
        network = min(members.values()) * (self.chip.network_bytes_per_s or math.inf)
        return Link(self.chip.network, min(speed, network))

    def _ici_links(self, device_ids: Sequence[int], per_chip: int) -> float:
        """Counts the links over which a device of a group can send in its slice.

        There are two along a ring and one along a line. Members at a distance of `gap`
        leave room for `gap` such groups, which share the links.
        """
        links = sum(
            (2 if is_ring else 1) / gap
            for _, is_ring, gap in self._ici_dims(device_ids)
        )
        return links / per_chip or _DIE_TO_DIE

    def _ici_dims(self, device_ids: Sequence[int]) -> Iterator[tuple[int, bool, int]]:
        """Yields (members, whether they form a ring, their distance) of a group's dims.

        Dims with a single member are skipped.
        """
        per_chip = self.num_devices // self.num_chips
        coords = np.array(
            [_coords(i % SLICE_ID // per_chip, self.shape) for i in device_ids]
        )
        for dim, length in enumerate(self.shape):
            members = np.unique(coords[:, dim])
            if len(members) > 1:
                gap = int(np.diff(members).min())
                is_ring = self.wrap[dim] and len(members) * gap == length
                yield len(members), is_ring, gap

    def _all_to_all(self, device_ids: Sequence[int]) -> float:
        """Computes the share of the links' rate that an all-to-all reaches, at most 1.

        A byte crosses n / 4 links of a ring of n members on average, and
        (n^2 - 1) / 3n links of a line. The dim with the most crossings per link takes
        longest (Austin et al. 2025, How to Scale Your Model: rings).
        """
        dims = list(self._ici_dims(device_ids))
        if not dims:
            return 1.0
        others = 1 - 1 / len(device_ids)
        hops = []  # crossings per link of each dim
        links = 0.0
        for n, is_ring, gap in dims:
            if is_ring:
                hops.append(n / 4 * gap / 2)
            else:
                hops.append((n - 1 / n) / 3 * gap / 1)
            links += (2 if is_ring else 1) / gap
        return min(1.0, others / links / max(hops))


@functools.lru_cache(maxsize=4)
def _stand_ins(target: Target) -> tuple[Any, ...]:
    """Makes `Target.stand_ins`; a search asks for them for each of its meshes."""
    per_chip = target.num_devices // target.num_chips
    per_slice = target.num_devices // target.num_slices
    return tuple(
        SimpleNamespace(
            id=local if target.num_slices == 1 else (index + 1) * SLICE_ID + local,
            platform=target.platform,
            device_kind=target.device_kind,
            coords=(*_coords(local // per_chip, target.shape), 0)[:3],
            core_on_chip=local % per_chip,
            slice_index=index,
        )
        for index, local in np.ndindex(target.num_slices, per_slice)
    )


def _coords(chip: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Finds the coordinates of a chip in its slice; libtpu counts the first dim first."""
    return tuple(int(n) for n in np.unravel_index(chip, tuple(shape), order="F"))


_Sizes = tuple[tuple[str, int], ...]  # mesh sizes by axis, hashable


@functools.lru_cache(maxsize=1024)
def _axis_link(target: Target, axis: str, sizes: _Sizes, dcn: _Sizes) -> Link:
    """Computes `Target.axis_link` for a mesh as hashable arguments."""
    others = [i for i, (name, _) in enumerate(sizes) if name not in axis.split("+")]
    if math.prod(size for _, size in sizes) == math.prod(sizes[i][1] for i in others):
        return _FREE  # groups of one device
    ids = np.moveaxis(_arranged(target, sizes, dcn), others, range(len(others)))
    groups = ids.reshape(math.prod(ids.shape[: len(others)]), -1)
    links = map(target.group_link, groups[_differing(target, groups)].tolist())
    return min(links, key=lambda link: link.bytes_per_s)


@functools.lru_cache(maxsize=1024)
def _arranged(target: Target, sizes: _Sizes, dcn: _Sizes) -> np.ndarray:
    """Computes `Target.arrange` for a mesh as hashable arguments."""
    return target.arrange(MeshShape(dict(sizes), dict(dcn)))


def _differing(target: Target, groups: np.ndarray) -> np.ndarray:
    """Finds groups that are no translations of each other in the hardware.

    Translations have the same link, and a pod has thousands of them.

    Args:
      target: the hardware.
      groups: device ids, [groups, members].

    Returns:
      The indices of the first group of each kind, in ascending order.
    """
    if target.chip is None:
        return np.array([0])
    if target.platform == "gpu":
        places = [groups // target.shape[1]]  # hosts
    else:
        chips = groups % SLICE_ID // (target.num_devices // target.num_chips)
        coords = np.unravel_index(chips, target.shape, order="F")
        places = [groups // SLICE_ID, *coords]
    relative = np.concatenate([place - place[:, :1] for place in places], axis=1)
    _, first = np.unique(relative, axis=0, return_index=True)
    return np.sort(first)


# --- parsing --------------------------------------------------------------------------


def parse(text: str, here: Sequence[jax.Device] = ()) -> Target:
    """Parses the text of a target.

    Args:
      text: such as `v5p:4x4x4`, `h100:4x8@25GB/s`, `cpu:8` or `here`.
      here: this machine's devices, for the targets `here` and `here@25GB/s`.

    Raises:
      ConfigError: there is no such hardware; the message lists the legal targets.
    """
    place, at, network = text.strip().partition("@")
    if place.strip().lower() == "here" and here:
        text = _describe(here) + at + network
    devices_text, _, network = text.strip().partition("@")
    devices_text = devices_text.strip().lower()
    family, _, sizes = devices_text.partition(":")
    family = hardware.FAMILY_ALIASES.get(family, family)
    shape: tuple[int, ...] = ()
    if sizes:
        shape = tuple(int(n) if n.isdecimal() else 0 for n in sizes.split("x"))
    is_cpu = family == "cpu" and len(shape) == 1 and "@" not in text
    if is_cpu and 1 <= shape[0] <= _MOST_CPU_DEVICES:
        return _cpu(shape[0])
    chip = hardware.FAMILIES.get(family)
    if chip is None:
        meant = _did_you_mean(devices_text) or suggest(family, hardware.FAMILIES)
        raise ConfigError(f"--on={text}: must be {legal_targets()}.{meant}")
    target = _tpu(chip, shape) if chip.torus_dims else _gpu(chip, shape)
    if target is None:
        raise ConfigError(
            f"--on={text}: {family} must be {legal_shapes(chip)}.{_did_you_mean(devices_text)}"
        )
    if "@" in text:
        return _with_network(target, network.strip(), text)
    if target.hosts > 1 and target.platform == "gpu" and not chip.network_bytes_per_s:
        fix = f"add it: {target.text}@25GB/s, or a name: {_network_names()}"
        raise ConfigError(
            f"--on={text}: hosts of {family} are sold with no network of their own; {fix}"
        )
    return target


def _with_network(target: Target, network: str, text: str) -> Target:
    """Replaces the network between a target's hosts or slices.

    Args:
      target: the target.
      network: a network's name, or the rate at which each chip sends.
      text: the whole text, for messages.
    """
    assert target.chip is not None
    known = hardware.NETWORKS.get(network.lower())
    if known:
        network = network.lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([MGT])(B|b|bit)/s", network)
    if known is None and match:
        number, prefix, unit = match.groups()
        rate = float(number) * {"M": 1e6, "G": 1e9, "T": 1e12}[prefix]
        if unit != "B":
            rate /= 8
        known = hardware.Network("network", rate, "the command line")
        network = f"{rate / 1e9:.6g}GB/s"
    if known is None or not 0 < known.bytes_per_s < math.inf:
        legal = f"the rate at which each chip sends to other hosts, as 25GB/s or 200Gbit/s, or one of {_network_names()}"
        raise ConfigError(
            f"--on={text}: behind @ must be {legal}.{suggest(network, hardware.NETWORKS)}"
        )
    return replace(
        target,
        text=f"{target.text}@{network}",
        chip=target.chip.with_network(known),
    )


def _network_names() -> str:
    return ", ".join(hardware.NETWORKS)


_FAMILY_AND_NUMBER = re.compile(
    r"(?P<number_first>\d{1,5})[x*](?P<family_last>\w+)"
    r"|(?P<family_first>\w+?)(?P<by>[-x*:])(?P<number_last>\d{1,5})"
)


def _did_you_mean(text: str) -> str:
    """Suggests a target for a family with a number of chips, such as v5e-16 or 8xh100.

    Returns:
      " Did you mean X?", or "".
    """
    match = _FAMILY_AND_NUMBER.fullmatch(text)
    if not match:
        return ""
    family = match["family_last"] or match["family_first"]
    number = int(match["number_first"] or match["number_last"])
    chip = hardware.FAMILIES.get(hardware.FAMILY_ALIASES.get(family, family))
    if chip is None or number < 1:
        return ""
    shapes: list[tuple[int, ...]] = []
    if chip.torus_dims:
        if match["by"] == "-" and chip.family in _NAMED_BY_CORES:
            number //= 2
        shapes += [s for s in slices_of(chip, number) if chip.legal_slice(s)]
    else:
        gpus = min(number, chip.chips_per_host)
        if number % gpus == 0:
            shapes.append((number // gpus, gpus))
    if not shapes:
        return ""
    return f" Did you mean {chip.family}:{_by(shapes[0])} ({number} chips)?"


def slices_of(chip: hardware.Chip, number: int) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of slices with a number of chips.

    Slices of the chip's table come first, then slices of 4x4x4 cubes, the most even
    first.
    """
    yield from (shape for shape in chip.slices if math.prod(shape) == number)
    sides = [side for side in range(4, number // 16 + 1, 4) if number % side == 0]
    cubes = [
        (a, b, c)
        for a in sides
        for b in sides
        for c in sides
        if a <= b <= c and a * b * c == number
    ]
    yield from sorted(cubes, key=lambda shape: shape[-1])


def legal_targets() -> str:
    """Formats the legal forms of a target on one line."""
    tpus = "|".join(f for f, chip in hardware.FAMILIES.items() if chip.torus_dims)
    sockets = [f for f, chip in hardware.FAMILIES.items() if not chip.torus_dims]
    pcie = {f.removesuffix("-pcie") for f in sockets if f.endswith("-pcie")}
    gpus = "|".join(
        f"{f}[-pcie]" if f in pcie else f for f in sockets if not f.endswith("-pcie")
    )
    tpus += ":TOPOLOGY[xSLICES] such as v6e:16x16x2"
    return (
        f"{tpus}, {gpus}:HOSTSxGPUS[@NETWORK] such as h100:4x8@25GB/s, cpu:N, or here"
    )


def legal_shapes(chip: hardware.Chip) -> str:
    """Formats the legal shapes of a chip's targets on one line."""
    if not chip.torus_dims:
        place = "host, such as 4x8"
        if chip.chips_per_host > 8:
            place = "NVLink domain (one rack), such as 2x72"
        return f"HOSTSxGPUS with 1 to {chip.chips_per_host} GPUs in each {place}"
    shapes = ", ".join(map(_by, chip.slices))
    if chip.max_slice_chips:
        shapes += f", or ascending multiples of 4 (4x4x4, 4x4x8, 4x8x8 ...) of at most {chip.max_slice_chips} chips"
    return f"{shapes}; one number more is the number of slices"


def _by(shape: Sequence[int]) -> str:
    """Formats a shape as in 4x4x8."""
    return "x".join(map(str, shape))


_MOST_CPU_DEVICES = 4096


def _cpu(devices: int) -> Target:
    return Target(
        text=f"cpu:{devices}",
        platform="cpu",
        chip=None,
        num_devices=devices,
        num_chips=devices,
        num_slices=1,
        hosts=1,
        shape=(devices,),
        wrap=(False,),
    )


def _tpu(chip: hardware.Chip, shape: tuple[int, ...]) -> Target | None:
    """Makes a TPU target; None if there is no such shape."""
    rank = chip.torus_dims
    slices = 1
    if len(shape) == rank + 1:
        *dims, slices = shape
        shape = tuple(dims)
    if slices < 1 or not chip.legal_slice(shape):
        return None
    chips = slices * math.prod(shape)
    text = f"{chip.family}:{_by(shape)}"
    if slices > 1:
        text += f"x{slices}"
    return Target(
        text=text,
        platform="tpu",
        chip=chip,
        num_devices=chips * chip.devices_per_chip,
        num_chips=chips,
        num_slices=slices,
        hosts=slices * -(-math.prod(shape) // chip.chips_per_host),
        shape=shape,
        wrap=chip.wraps(shape),
    )


def _gpu(chip: hardware.Chip, shape: tuple[int, ...]) -> Target | None:
    """Makes a GPU target; None if there is no such shape.

    Missing sizes are 1: `h100` is one GPU, and `h100:8` is one host.
    """
    shape = (1, 1, *shape)[-max(len(shape), 2) :]
    if len(shape) != 2 or shape[0] < 1 or not 1 <= shape[1] <= chip.chips_per_host:
        return None
    gpus = math.prod(shape)
    return Target(
        text=f"{chip.family}:{_by(shape)}",
        platform="gpu",
        chip=chip,
        num_devices=gpus,
        num_chips=gpus,
        num_slices=1,
        hosts=shape[0],
        shape=shape,
        wrap=(False, False),
    )


def _describe(devices: Sequence[jax.Device]) -> str:
    """Formats real devices as the text of a target."""
    if devices[0].platform == "cpu":
        return f"cpu:{len(devices)}"
    kind = devices[0].device_kind
    chip = hardware.chip_for(kind)
    if chip is None or not chip.family:
        raise ConfigError(
            f"--on=here: the planner cannot compile for {kind}; use {legal_targets()}"
        )
    if not chip.torus_dims:
        hosts = len({device.process_index for device in devices})
        return f"{chip.family}:{hosts}x{len(devices) // hosts}"
    shape, slices = hardware.slice_shape(chip, devices)
    return f"{chip.family}:{_by(shape)}x{slices}"


def devices(target: Target) -> list[jax.Device]:
    """Makes the target's devices, which can compile but not run; CPU devices are real.

    JAX_PLATFORMS=cpu must be set before jax is imported, because otherwise the CUDA
    plugin looks for a GPU.

    Raises:
      MissingExtra: the platform's compiler is not installed.
    """
    if target.platform == "cpu":
        return jax.devices("cpu")[: target.num_devices]
    if target.platform == "tpu":
        extras.require("libtpu")
    elif importlib.util.find_spec("jax_cuda13_plugin") is None:
        extras.require("jax_cuda12_plugin")
    return list(
        topologies.get_topology_desc(
            platform=target.compiler, **topology_options(target)
        ).devices
    )


def topology_options(target: Target) -> dict[str, Any]:
    """Collects the options that describe a target to its compiler."""
    if target.chip is None:
        return {}
    if target.platform == "tpu":
        name = f"{target.chip.family}:{_by(target.shape)}"
        options: dict[str, Any] = {
            "topology_name": name,
            "wrap": (*target.wrap, False)[:3],
        }
        if target.num_slices > 1:
            options["num_slices"] = target.num_slices
        config = ONE_DEVICE_PER_CHIP.get(target.chip.family)
        if config:
            options["chip_config_name"] = config
        if math.prod(target.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        return options
    layout = f"1x{_by(target.shape)}"  # partitions x hosts x GPUs
    return {"topology": layout, "target_config": gpu_description(target.chip)}
