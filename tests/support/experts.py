"""Meshes with the axes `expert` and `context`, by their sizes."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh

from jaxdist.parallel import mesh as meshes
from jaxdist.parallel import sharding
from jaxdist.parallel.axes import AXES


def rules_and_mesh(
    devices=None, *, zero: int = 3, attention="auto", **sizes: int
) -> tuple[sharding.Rules, Mesh]:
    """Returns the rule table and the mesh of the axes' sizes over the first devices."""
    shape = meshes.MeshShape(
        {axis: sizes.get(axis, 1) for axis in AXES}, dict.fromkeys(AXES, 1)
    )
    devices = list(devices or jax.devices())[: math.prod(sizes.values())]
    mesh = Mesh(
        meshes.arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )
    return sharding.Rules(shape, zero, attention=attention), mesh
