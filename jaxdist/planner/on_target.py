"""A run on a target: its composition, checked, and its legal meshes."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.parallel.axes import (
    CONTEXT,
    CROSSING_AXES,
    EXPERT,
    REST_AXIS,
    SEARCHED,
    divisors,
)
from jaxdist.parallel.mesh import DcnConfig, MeshConfig, MeshShape
from jaxdist.planner.targets import Target
from jaxdist.protocols.dim_names import EXPERTS, has_experts
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import compose, product_formats, validation
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig

# Settings of a pipeline before `_parts` varies its schedule. Each stage has a stack of
# its own, so settings for the whole stack do not apply.
_STAGED = {
    "pipeline.schedule": "1f1b",
    "pipeline.microbatches": 1,
    "pipeline.chunks": 1,
    "remat.layers": 0,
    "remat.every": 1,
}
MOST_CONTEXT = 64  # most devices that share a sequence
LEAST_TOKENS = 1024  # least tokens of a shared sequence on each device
# links that are too slow for an exchange in every layer, as a chip's network is
SLOW_LINKS = ("DCN", "PCIe", "network")


def validate_for(
    run: RunConfig, target: Target, spec: ModelSpec | None = None
) -> Composition:
    """Composes a run on a target's devices and checks it, without its data.

    Args:
      run: the config.
      target: the hardware.
      spec: the run's model, if it is known.

    Raises:
      ConfigError: the run cannot be laid out on the target, or its chips have no units
        for the run's matmuls.
    """
    faults = list(product_formats.unit_faults(run, target.platform, target.device_kind))
    if faults:  # they exist in every layout
        raise ConfigError(faults)
    slices = target.num_slices if target.platform == "tpu" else None
    return validation.validate_on(
        run, target.num_devices, slices, with_data=False, spec=spec
    )


def legal_meshes(
    run: RunConfig, target: Target
) -> tuple[list[Composition], dict[str, int]]:
    """Composes the run on each legal mesh.

    The sizes of the expert axis are the divisors of the number of experts. The sizes of
    the context axis are divisors of the sequence length up to `MOST_CONTEXT`. Both axes
    stay within fast links.

    Args:
      run: the config.
      target: the hardware.

    Returns:
      The compositions, and the number of illegal meshes for each reason.

    Raises:
      ConfigError: no mesh is legal.
    """
    legal = list[Composition]()
    faults = Counter[str]()
    error = ConfigError("no mesh is legal")
    spec = compose.model_spec(run)
    sizes = {
        EXPERT: divisors(math.gcd(target.num_devices, _expert_count(spec))),
        CONTEXT: context_sizes(run, target.num_devices),
    }
    for mesh in _meshes(run.mesh, target, sizes):
        overrides: dict[str, Any] = {"mesh": mesh, "batch.accumulation": 1}
        if mesh.pipeline > 1:
            overrides |= _STAGED
        tried = compose.with_overrides(run, overrides)
        try:
            composition = validate_for(tried, target, spec)
        except ConfigError as refusal:
            error = refusal
            faults[re.sub(r"\d+", "N", refusal.faults[0].partition("; ")[0])] += 1
            continue
        slow = next(slow_axes(target, composition.shape), None)
        if slow:
            faults[slow] += 1
        else:
            legal.append(composition)
    if not legal:
        raise error
    return legal, dict(faults.most_common())


def _expert_count(spec: ModelSpec) -> int:
    """Counts the experts of a layer; 1 for a model without experts.

    If layers have different numbers of experts, it is their greatest common divisor.
    """
    counts = [
        x.shape[names.index(EXPERTS) - len(names)]
        for x, names in spec.named_parameters().values()
        if has_experts(names)
    ]
    return math.gcd(*counts) or 1


def context_sizes(run: RunConfig, devices: int) -> list[int]:
    """Lists the sizes of the axis `context` to search.

    Data without sequences keeps the run's size.

    Args:
      run: the config.
      devices: number of devices.
    """
    configured = max(run.mesh.context, 1)
    if not run.data.is_text:
        return [configured]
    length = run.batch.sequence_length
    return [
        n
        for n in divisors(math.gcd(devices, length))
        if n in (1, configured) or (n <= MOST_CONTEXT and length // n >= LEAST_TOKENS)
    ]


def slow_axes(target: Target, shape: MeshShape) -> Iterator[str]:
    """Yields a reason for each axis that communicates in every layer over a slow link.

    These are the axes that split experts or sequences.
    """
    network = target.chip.network if target.chip else None
    for axis in (EXPERT, CONTEXT):
        link = target.axis_link(shape, axis)
        if link.name in SLOW_LINKS or link.name == network:
            yield f"mesh.{axis}=N communicates in every layer, over {link.name}"


def _meshes(
    base: MeshConfig, target: Target, sizes_of: Mapping[str, Sequence[int]]
) -> Iterator[MeshConfig]:
    """Yields every mesh.

    Args:
      base: the run's mesh.
      target: the hardware.
      sizes_of: the sizes of some axes; other axes take each divisor of the number of
        devices, and fsdp takes the remaining devices.
    """
    total = target.num_devices
    slices = target.num_slices
    varied = [*(axis for axis in SEARCHED if axis != "fsdp"), *sizes_of]
    for sizes in product(*(sizes_of.get(axis, divisors(total)) for axis in varied)):
        if total % math.prod(sizes):
            continue
        split: dict[str, Any] = dict(zip(varied, sizes, strict=True))
        split["fsdp"] = total // math.prod(sizes)
        for axis in CROSSING_AXES if slices > 1 else (REST_AXIS,):
            if split[axis] % slices:
                continue
            dcn: dict[str, Any] = {}
            if axis != REST_AXIS:
                dcn = {axis: slices, REST_AXIS: 1}
            yield replace(
                base, **split, dcn=DcnConfig(**dcn), zero=3, sequence_parallel=False
            )
