"""Hardware a plan is made for: `v5p:4x4x4`, `v6e:16x16x2`, `h100:4x8`, `cpu:8`, and its
links.

A TPU target is family:chips along each ICI dim, and one number more for several slices;
a GPU target is family:hosts x GPUs of each; `@25GB/s` or a network's name behind it
says what crosses hosts or slices. Slices come from the table of `hardware`, because the
compiler also makes ones that do not exist. `devices` belongs in a child process.
"""

import functools
import importlib.util
import math
import os
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
from jaxdist.parallel import mesh
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner.gpu_descriptions import gpu_description
from jaxdist.planner.observed import (
    ONE_DEVICE_PER_CHIP,
    SLICE_ID,
    TABLE,
    Observed,
)
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import product_formats, validation
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

# Google Cloud's v5p-8 has 8 TensorCores, which are 4 chips
_NAMED_BY_CORES = ("v4", "v5p")

# ICI links' worth between the two devices of a 7x chip; Google Cloud documentation,
# TPU7x
_DIE_TO_DIE = 6


@dataclass(frozen=True)
class Link:
    """What the members of a group talk over."""

    name: str  # ICI, DCN, NVLink, PCIe, a network's; memory: one device, or a CPU
    # that each device can send while all members do; inf: not modelled
    bytes_per_s: float
    # The share of it that an all-to-all reaches: on a torus its bytes pass other
    # members on their way.
    all_to_all: float = 1.0
    # latency of a collective, where it was measured (`calibration`)
    alpha_s: float = 0.0

    def seconds(self, kind: str, wire_bytes: float) -> float:
        """Returns how long a collective of this kind takes in which each member sends
        so much.
        """
        rate = self.bytes_per_s * (self.all_to_all if kind == "all-to-all" else 1.0)
        return self.alpha_s + wire_bytes / rate


_FREE = Link("memory", math.inf)


@dataclass(frozen=True)
class Target:
    """Devices to plan for, with the links between them."""

    text: str  # canonical, such as v5p:4x4x4 or h100:4x8@25GB/s
    platform: hardware.Platform
    chip: hardware.Chip | None  # None on CPU
    num_devices: int  # of JAX
    num_chips: int
    num_slices: int  # groups of chips joined by ICI; 1 on GPU and CPU
    hosts: int
    # chips along each ICI dim of a slice; (hosts, GPUs of each) on GPU
    shape: tuple[int, ...]
    wrap: tuple[bool, ...]  # whether each ICI dim is a ring

    @property
    def family(self) -> str:
        """The chip's family as in `text`; "cpu" without a chip."""
        return self.chip.family if self.chip else "cpu"

    def with_shape(self, sizes: Sequence[int]) -> str:
        """Returns the text of a target of this chip and network with other sizes."""
        _, at, network = self.text.partition("@")
        return f"{self.family}:{_by(sizes)}{at}{network}"

    @property
    def device_kind(self) -> str:
        """Names the devices as jax does."""
        return self.chip.device_kinds[0] if self.chip else "cpu"

    @property
    def observed(self) -> Observed:
        """What was seen of the chip and its compiler."""
        return TABLE["gpu" if self.platform == "gpu" else self.family]

    @property
    def usable_bytes(self) -> int | None:
        """The bytes that a step may use on a device; None where that is not known.

        A TPU compiler's own limit; of a GPU's memory a share; of this machine's memory
        for emulated CPU devices an equal part each.
        """
        if self.platform == "cpu":
            pages = os.sysconf("SC_PHYS_PAGES")
            return pages * os.sysconf("SC_PAGE_SIZE") // self.num_devices
        if self.chip is None:
            return None
        return int(self.chip.capacity_bytes * self.observed.usable)

    def freely_used(self, most: float) -> float:
        """Returns the bytes of a device below which XLA computes nothing again, at most
        `most`.
        """
        share = self.observed.used_freely
        if share is None or self.chip is None:
            return most
        return min(most, share * self.chip.hbm_bytes)

    def products_peak(self, dtype: str) -> float | None:
        """Returns the FLOP/s that products can reach; None where none is published."""
        if self.chip is None:
            return None
        # TPU matrix units round float32 to bfloat16.
        return self.chip.peak(dtype) or self.chip.peak("bfloat16")

    @property
    def compiler(self) -> str:
        """The platform as XLA's compilers call it."""
        return "cuda" if self.platform == "gpu" else self.platform

    def axis_link(self, mesh_shape: MeshShape, axis: str) -> Link:
        """Returns the link of a mesh axis, or of several as in "data+fsdp": its slowest
        group's.
        """
        return _axis_link(
            self, axis, tuple(mesh_shape.sizes.items()), tuple(mesh_shape.dcn.items())
        )

    def arrange(self, mesh_shape: MeshShape) -> np.ndarray:
        """Returns the `jax.Device.id` at each mesh position, [sizes of the axes], like
        `build_mesh`.
        """
        return np.vectorize(lambda device: device.id)(
            mesh.arrange(mesh_shape, self.stand_ins())
        )

    def stand_ins(self) -> list[Any]:
        """Returns objects that look to `mesh_utils` like the target's devices."""
        per_chip = self.num_devices // self.num_chips
        places = np.ndindex(self.num_slices, self.num_devices // self.num_slices)
        return [
            SimpleNamespace(
                id=local if self.num_slices == 1 else (index + 1) * SLICE_ID + local,
                platform=self.platform,
                device_kind=self.device_kind,
                coords=(*_coords(local // per_chip, self.shape), 0)[:3],
                core_on_chip=local % per_chip,
                slice_index=index,
            )
            for index, local in places
        ]

    def group_link(self, device_ids: Sequence[int]) -> Link:
        """Returns the link of a replica group, given by `jax.Device.id`.

        Members in the same slice or node share its network: each carries its part of
        what crosses.
        """
        if self.chip is None or len(set(device_ids)) < 2:
            return _FREE
        gpu = self.platform == "gpu"
        speed = self.chip.link_bytes_per_s * (
            1 if gpu else self._ici_links(device_ids, self.chip.devices_per_chip)
        )
        places = Counter(i // (self.shape[1] if gpu else SLICE_ID) for i in device_ids)
        if len(places) == 1:
            return Link(
                self.chip.link, speed, 1.0 if gpu else self._all_to_all(device_ids)
            )
        share = min(places.values()) * (self.chip.network_bytes_per_s or math.inf)
        return Link(self.chip.network, min(speed, share))

    def _ici_links(self, device_ids: Sequence[int], per_chip: int) -> float:
        """Returns how many links a device can send over in its slice: two along a ring,
        one along a line.

        Members that lie `gap` apart leave room for `gap` such groups, which share the
        links.
        """
        links = sum(
            (2 if ring else 1) / gap for _, ring, gap in self._ici_dims(device_ids)
        )
        return links / per_chip or _DIE_TO_DIE

    def _ici_dims(self, device_ids: Sequence[int]) -> Iterator[tuple[int, bool, int]]:
        """Yields (members, whether they close a ring, how far they lie apart) of each
        dim of a group.
        """
        per_chip = self.num_devices // self.num_chips
        coords = np.array(
            [_coords(i % SLICE_ID // per_chip, self.shape) for i in device_ids]
        )
        for dim, length in enumerate(self.shape):
            places = np.unique(coords[:, dim])
            if len(places) > 1:
                gap = int(np.diff(places).min())
                yield len(places), self.wrap[dim] and len(places) * gap == length, gap

    def _all_to_all(self, device_ids: Sequence[int]) -> float:
        """Returns the share of the links' rate that an all-to-all of a group reaches,
        at most 1.

        A byte crosses n / 4 links of a ring of n on average, (n^2 - 1) / 3n of a line,
        so the dim with the most of them a link takes longest (Austin et al. 2025, How
        to Scale Your Model: rings).
        """
        dims = list(self._ici_dims(device_ids))
        others = 1 - 1 / len(device_ids)
        if not dims:
            return 1.0
        hops = (
            (n / 4 if ring else (n - 1 / n) / 3) * gap / (2 if ring else 1)
            for n, ring, gap in dims
        )
        links = sum((2 if ring else 1) / gap for _, ring, gap in dims)
        return min(1.0, others / links / max(hops))


def _coords(chip: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns where a chip lies in its slice: libtpu numbers them along the first dim
    first.
    """
    return tuple(int(n) for n in np.unravel_index(chip, tuple(shape), order="F"))


@functools.lru_cache(maxsize=1024)
def _axis_link(target: Target, axis: str, sizes: tuple, dcn: tuple) -> Link:
    """Returns `Target.axis_link` of a mesh given by the items of its sizes: what can be
    a key.
    """
    others = [i for i, (name, _) in enumerate(sizes) if name not in axis.split("+")]
    ids = np.moveaxis(
        target.arrange(MeshShape(dict(sizes), dict(dcn))), others, range(len(others))
    )
    groups = ids.reshape(math.prod(ids.shape[: len(others)]), -1).tolist()
    return min(map(target.group_link, groups), key=lambda link: link.bytes_per_s)


def validate_for(
    run: RunConfig, target: Target, spec: ModelSpec | None = None
) -> Composition:
    """Composes a run on a target's devices and checks it, without its data.

    Args:
      spec: of the run's model, if it is known.

    Raises:
      ConfigError: the run cannot be laid out on the target, or its chips have no units
        for what it multiplies.
    """
    faults = list(product_formats.unit_faults(run, target.platform, target.device_kind))
    if faults:  # in every layout
        raise ConfigError(faults)
    slices = target.num_slices if target.platform == "tpu" else None
    return validation.validate_on(
        run, target.num_devices, slices, with_data=False, spec=spec
    )


# --- Parsing --------------------------------------------------------------------------


def parse(text: str, here: Sequence[jax.Device] = ()) -> Target:
    """Returns the target of a text; `here`: this machine's devices, for the targets
    `here` and `here@25GB/s`.

    Raises:
      ConfigError: no such hardware; its one line lists what is legal.
    """
    place, at, behind = text.strip().partition("@")
    if place.strip().lower() == "here" and here:
        text = _describe(here) + at + behind
    asked, _, network = text.strip().partition("@")
    family, _, sizes = asked.strip().lower().partition(":")
    family = hardware.FAMILY_ALIASES.get(family, family)
    shape = (
        tuple(int(n) if n.isdecimal() else 0 for n in sizes.split("x")) if sizes else ()
    )
    if (
        family == "cpu"
        and len(shape) == 1
        and 1 <= shape[0] <= 4096
        and "@" not in text
    ):
        return Target(
            f"cpu:{shape[0]}", "cpu", None, shape[0], shape[0], 1, 1, shape, (False,)
        )
    chip = hardware.FAMILIES.get(family)
    if chip is None:
        meant = _meant(asked.strip().lower()) or suggest(family, hardware.FAMILIES)
        raise ConfigError(f"--on={text}: must be {legal_targets()}.{meant}")
    target = _tpu(chip, shape) if chip.torus_dims else _gpu(chip, shape)
    if target is None:
        raise ConfigError(
            f"--on={text}: {family} must be {legal_shapes(chip)}.{_meant(asked.strip().lower())}"
        )
    if "@" in text:
        return _behind(target, network.strip(), text)
    if target.hosts > 1 and target.platform == "gpu" and not chip.network_bytes_per_s:
        cure = f"add it: {target.text}@25GB/s, or a name: {_network_names()}"
        raise ConfigError(
            f"--on={text}: hosts of {family} are sold with no network of their own; {cure}"
        )
    return target


def _behind(target: Target, network: str, text: str) -> Target:
    """Returns a target with another network between its hosts or slices: a name, or a
    rate of each chip.
    """
    assert target.chip is not None
    known = hardware.NETWORKS.get(network.lower())
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([MGT])(B|b|bit)/s", network)
    if known is None and match:
        rate = (
            float(match[1])
            * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
            / (1 if match[3] == "B" else 8)
        )
        known = hardware.Network("network", rate, "the command line")
        network = f"{rate / 1e9:.6g}GB/s"
    if known is None or not 0 < known.bytes_per_s < math.inf:
        legal = f"what each chip sends to other hosts, as 25GB/s or 200Gbit/s, or one of {_network_names()}"
        raise ConfigError(
            f"--on={text}: behind @ must be {legal}.{suggest(network, hardware.NETWORKS)}"
        )
    text = f"{target.text}@{network.lower() if network.lower() in hardware.NETWORKS else network}"
    return replace(target, text=text, chip=target.chip.with_network(known))


def _network_names() -> str:
    return ", ".join(hardware.NETWORKS)


def _meant(text: str) -> str:
    """Returns " Did you mean X?" for a family with a number of chips: v5e-16, v5e:16,
    8xh100, h100x8.
    """
    match = re.fullmatch(
        r"(?P<n>\d{1,5})[x*](?P<family>\w+)|(?P<of>\w+?)(?P<by>[-x*:])(?P<number>\d{1,5})",
        text,
    )
    if not match:
        return ""
    family = match["family"] or match["of"]
    number = int(match["n"] or match["number"])
    chip = hardware.FAMILIES.get(hardware.FAMILY_ALIASES.get(family, family))
    if chip is None or number < 1:
        return ""
    if chip.torus_dims:
        number //= 2 if match["by"] == "-" and chip.family in _NAMED_BY_CORES else 1
        shapes = [shape for shape in slices_of(chip, number) if chip.legal_slice(shape)]
    else:
        each = min(number, chip.chips_per_host)
        shapes = [(number // each, each)] if number % each == 0 else []
    return (
        f" Did you mean {chip.family}:{_by(shapes[0])} ({number} chips)?"
        if shapes
        else ""
    )


def slices_of(chip: hardware.Chip, number: int) -> Iterator[tuple[int, ...]]:
    """Yields shapes of a number of chips: those of the table, then cubes of 4x4x4, the
    most even first.
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
    """Returns the forms of a target on one line."""
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
    """Returns the shapes that exist of a chip on one line."""
    if not chip.torus_dims:
        where = (
            "host, such as 4x8"
            if chip.chips_per_host <= 8
            else "NVLink domain (one rack), such as 2x72"
        )
        return f"HOSTSxGPUS with 1 to {chip.chips_per_host} GPUs in each {where}"
    shapes = ", ".join(map(_by, chip.slices))
    if most := chip.max_slice_chips:
        shapes += f", or ascending multiples of 4 (4x4x4, 4x4x8, 4x8x8 ...) of at most {most} chips"
    return f"{shapes}; one number more is the number of slices"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _tpu(chip: hardware.Chip, shape: tuple[int, ...]) -> Target | None:
    rank = chip.torus_dims
    slices = 1
    if len(shape) == rank + 1:
        *dims, slices = shape
        shape = tuple(dims)
    if slices < 1 or not chip.legal_slice(shape):
        return None
    chips = slices * math.prod(shape)
    hosts = slices * -(-math.prod(shape) // chip.chips_per_host)
    text = f"{chip.family}:{_by(shape)}" + (f"x{slices}" if slices > 1 else "")
    devices = chips * chip.devices_per_chip
    return Target(
        text, "tpu", chip, devices, chips, slices, hosts, shape, chip.wraps(shape)
    )


def _gpu(chip: hardware.Chip, shape: tuple[int, ...]) -> Target | None:
    # `h100` is one GPU, `h100:8` one host
    shape = (1, 1, *shape)[-max(len(shape), 2) :]
    if len(shape) != 2 or shape[0] < 1 or not 1 <= shape[1] <= chip.chips_per_host:
        return None
    n = math.prod(shape)
    return Target(
        f"{chip.family}:{_by(shape)}",
        "gpu",
        chip,
        n,
        n,
        1,
        shape[0],
        shape,
        (False, False),
    )


def _describe(devices: Sequence[jax.Device]) -> str:
    """Returns the target text of real devices."""
    if devices[0].platform == "cpu":
        return f"cpu:{len(devices)}"
    kind = devices[0].device_kind
    chip = hardware.chip_for(kind)
    if chip is None or not chip.family:
        raise ConfigError(
            f"--on=here: nothing is known of compiling for {kind}; use {legal_targets()}"
        )
    if not chip.torus_dims:
        hosts = len({device.process_index for device in devices})
        return f"{chip.family}:{hosts}x{len(devices) // hosts}"
    shape, slices = hardware.slice_shape(chip, devices)
    return f"{chip.family}:{_by(shape)}x{slices}"


def devices(target: Target) -> list[jax.Device]:
    """Returns the target's devices, which compile but cannot run; on CPU, real ones.

    JAX_PLATFORMS=cpu must be set before jax is imported: else the CUDA plugin looks for
    a GPU.

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
    """Returns what a compiler is told of the target."""
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
        if config := ONE_DEVICE_PER_CHIP.get(target.chip.family):
            options["chip_config_name"] = config
        if math.prod(target.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        return options
    layout = f"1x{_by(target.shape)}"  # partitions x hosts x GPUs
    return {"topology": layout, "target_config": gpu_description(target.chip)}
