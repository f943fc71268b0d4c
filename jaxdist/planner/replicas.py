"""A smaller mesh on which a step's program is the same, for plans of large pods.

Devices along the mesh axis `data` hold the same parameters and run the same program.
Only sums of gradients and scalars know how many there are. So a step for 4,096 chips
may be compiled on 1,024 of them, with as many samples on each device. Sums over the
axis then get the size and the link that they have on the real mesh (`enlarged`).

The other axes keep their sizes, because the shards of parameters depend on them. Within
slices of a multi-slice target `data` stays, too, since the compiler splits sums between
slices over it. GPU programs are compiled as they are: for 16,384 GPUs that takes no
longer than for 8.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.parallel.axes import REST_AXIS, divisors
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner import on_target, targets
from jaxdist.planner.communication import Collective
from jaxdist.planner.targets import Target
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

# Number of devices up to which a step is compiled on its own mesh. Up to there the
# compiler takes as long as for a single host.
MOST_DEVICES = 1024
# bytes of an array whose collectives take no time on any mesh
_SMALL = 4096


class NotTheSame(Exception):
    """The program of a smaller mesh that does not show the program of the real one."""


@dataclass(frozen=True)
class SmallMesh:
    """A run on fewer replicas."""

    run: RunConfig
    target: Target
    shape: MeshShape


# --- choosing the mesh ----------------------------------------------------------------


def smaller(
    composition: Composition, target: Target, most_devices: int = MOST_DEVICES
) -> SmallMesh | None:
    """Finds a smaller mesh whose groups of devices have the same links.

    It is the largest one of at most `most_devices`, or else the smallest above.

    Args:
      composition: the run on its mesh.
      target: the hardware.
      most_devices: the number of devices up to which no smaller mesh is used.

    Returns:
      The mesh, or None if the run must be compiled on its own mesh.
    """
    if target.platform != "tpu" or target.num_devices <= most_devices:
        return None
    for text, data, across in sorted(
        _candidates(target, composition.shape),
        key=lambda candidate: _order(candidate[0], most_devices),
    ):
        small_target = targets.parse(text)
        small = _on(composition, small_target, data, across)
        if small and _have_same_links(target, composition.shape, small):
            return small
    return None


def _order(text: str, most_devices: int) -> tuple[bool, int]:
    """Makes the sort key: those up to `most_devices`, the largest first, come first."""
    devices = targets.parse(text).num_devices
    if devices <= most_devices:
        return False, -devices
    return True, devices


def _candidates(target: Target, shape: MeshShape) -> Iterator[tuple[str, int, int]]:
    """Yields smaller targets: text, size of `data`, and its size across slices.

    At least two replicas stay on each link that the axis crosses.
    """
    data = shape.sizes[REST_AXIS]
    across = shape.dcn[REST_AXIS]
    if target.num_slices > 1:
        others = target.num_slices // across
        for kept in divisors(across)[1:-1]:
            text = target.with_shape((*target.shape, others * kept))
            yield text, data // across * kept, kept
    else:
        yield from _smaller_slices(target, data)


def _smaller_slices(target: Target, data: int) -> Iterator[tuple[str, int, int]]:
    """Yields targets with a smaller slice; see `_candidates`."""
    assert target.chip is not None
    for sizes in itertools.product(*map(divisors, target.shape)):
        ratio = math.prod(target.shape) // math.prod(sizes)
        if ratio == 1 or data % ratio or data == ratio:
            continue
        if not target.chip.legal_slice(sizes):
            continue
        yield target.with_shape(sizes), data // ratio, 1


def _on(
    composition: Composition, target: Target, data: int, across: int
) -> SmallMesh | None:
    """Lays a run out on a smaller target, or returns None if that is impossible."""
    samples = composition.config.batch.global_size * data
    whole = composition.shape.sizes[REST_AXIS]
    if samples % whole:
        return None
    overrides = {
        f"mesh.{REST_AXIS}": data,
        f"mesh.dcn.{REST_AXIS}": across,
        "batch.global_size": samples // whole,
    }
    run = compose.with_overrides(composition.config, overrides)
    try:
        found = on_target.validate_for(run, target, composition.spec)
    except ConfigError:
        return None
    return SmallMesh(run, target, found.shape)


def _have_same_links(target: Target, shape: MeshShape, small: SmallMesh) -> bool:
    """Checks that groups of devices lie alike in the hardware of both meshes.

    Groups along other axes must be equal. Those with `data` may only have more members.
    """
    if small.target.wrap != target.wrap:
        return False
    used = [axis for axis, size in shape.sizes.items() if size > 1]
    full_ids = target.arrange(shape)
    small_ids = small.target.arrange(small.shape)
    for number in range(1, len(used) + 1):
        for axes in itertools.combinations(used, number):
            full = _form(target, full_ids, shape, axes)
            if full != _form(small.target, small_ids, small.shape, axes):
                return False
    return True


def _form(
    target: Target, ids: np.ndarray, shape: MeshShape, axes: Sequence[str]
) -> object:
    """Describes how the first group along some axes lies in the hardware."""
    form = target.group_form(_members(ids, shape, axes))
    if REST_AXIS not in axes:
        return form
    return [(kind, gap) for kind, gap, _ in form]


def _members(ids: np.ndarray, shape: MeshShape, axes: Sequence[str]) -> list[int]:
    """Lists the device ids of the first group along some axes."""
    index = tuple(slice(None) if axis in axes else 0 for axis in shape.sizes)
    members: list[int] = np.ravel(ids[index]).tolist()
    return members


# --- comparing lowered steps ----------------------------------------------------------

# lists of devices, which have another length on each mesh
_DEVICES = re.compile(
    r"(?:replica_groups|source_target_pairs) = dense<[^>]*>|device_ids = \[[^\]]*\]"
)
_FLOAT = re.compile(r"\d+\.\d+(?:[eE][+-]?\d+)?")
_NUMBER = re.compile(r"(\d+)")


def difference(full: str, small: str, ratio: int) -> str:
    """Finds a line that two lowered steps do not have in common; "" if there is none.

    Both must have the same instructions. Numbers must be equal, or `ratio` times as
    large on the full mesh, as the sizes of the global batch are.

    Args:
      full: the text of the step on the full mesh.
      small: the text of the step on the smaller mesh.
      ratio: replicas on the full mesh per replica on the smaller one.
    """
    full_lines = full.splitlines()
    small_lines = small.splitlines()
    if len(full_lines) != len(small_lines):
        return f"{len(full_lines)} and {len(small_lines)} lines"
    for full_line, small_line in zip(full_lines, small_lines, strict=True):
        if full_line != small_line and not _are_alike(full_line, small_line, ratio):
            return full_line.strip()[:200]
    return ""


def _are_alike(full: str, small: str, ratio: int) -> bool:
    """Compares a line of two lowered steps."""
    full_parts = _NUMBER.split(_FLOAT.sub("", _DEVICES.sub("", full)))
    small_parts = _NUMBER.split(_FLOAT.sub("", _DEVICES.sub("", small)))
    if full_parts[::2] != small_parts[::2]:
        return False
    return all(
        # The largest index of a dim is its size less 1.
        a == b or a == ratio * b or a + 1 == ratio * (b + 1)
        for a, b in zip(
            map(int, full_parts[1::2]), map(int, small_parts[1::2]), strict=True
        )
    )


# --- reading the program --------------------------------------------------------------


def enlarged(
    collectives: Sequence[Collective],
    small: SmallMesh,
    shape: MeshShape,
    target: Target,
) -> list[Collective]:
    """Gives the collectives of a smaller mesh the groups of the full mesh.

    Args:
      collectives: the collectives of the program on the smaller mesh.
      small: the smaller mesh.
      shape: the full mesh.
      target: the full hardware.

    Raises:
      NotTheSame: it is unknown what a collective would be on the full mesh.
    """
    ids = target.arrange(shape)
    return [
        _enlarged(collective, small, shape, target, ids)
        if REST_AXIS in _axes(collective)
        else collective
        for collective in collectives
    ]


def _axes(collective: Collective) -> list[str]:
    return collective.axis.removeprefix("part of ").split("+")


def _enlarged(
    collective: Collective,
    small: SmallMesh,
    shape: MeshShape,
    target: Target,
    ids: np.ndarray,
) -> Collective:
    """Gives one collective its group on the full mesh; see `enlarged`."""
    axes = _axes(collective)
    part = _part(collective, small)
    members = _members(_part_ids(ids, shape, part), shape, axes)
    grows = len(members) > collective.group_size
    if grows and collective.kind != "all-reduce" and collective.bytes > _SMALL:
        # The program does not say whether the shards shrink or the whole grows.
        raise NotTheSame(f"{collective.kind} over {collective.axis}")
    link = target.group_link(members) if collective.link else None
    return replace(collective, group_size=len(members), link=link)


# parts of a group: all of it, its members in one slice, or one member of each slice
_ALL = "all"
_WITHIN = "within"
_BETWEEN = "between"


def _sizes(shape: MeshShape, axes: Sequence[str]) -> Mapping[str, int]:
    """Counts the members of each part of a group along some axes."""
    everywhere = math.prod(shape.sizes[axis] for axis in axes)
    slices = math.prod(shape.dcn[axis] for axis in axes)
    return {_ALL: everywhere, _WITHIN: everywhere // slices, _BETWEEN: slices}


def _part(collective: Collective, small: SmallMesh) -> str:
    """Finds which part of a group a collective on the smaller mesh spans.

    Raises:
      NotTheSame: it spans another part, such as neighbours.
    """
    chip = small.target.chip
    assert chip is not None
    sizes = _sizes(small.shape, _axes(collective))
    crosses = collective.link is not None and collective.link.name == chip.network
    possible = (_ALL, _BETWEEN) if crosses else (_ALL, _WITHIN)
    for part in possible:
        if sizes[part] == collective.group_size:
            return part
    raise NotTheSame(f"{collective.kind} over {collective.axis}")


def _part_ids(ids: np.ndarray, shape: MeshShape, part: str) -> np.ndarray:
    """Selects from the device ids of a mesh those of one slice, or one of each slice."""
    if part == _ALL:
        return ids
    index = []
    for axis, size in shape.sizes.items():
        within = size // shape.dcn[axis]
        index.append(slice(0, within) if part == _WITHIN else slice(0, None, within))
    return ids[tuple(index)]
