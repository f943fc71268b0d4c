"""The layout of a run's last start, read from run.json. This module imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The mesh, ZeRO stage and accumulation of a run's last start.

    They may differ from the config: sizes may be open, and an elastic restart may have
    changed them.
    """

    mesh: Mapping[str, int]  # sizes of the mesh axes; {} = unknown
    zero: object
    accumulation: object


def layout_of_run(config: Mapping[str, Any], info: Mapping[str, Any]) -> Layout:
    """Reads the layout of a run's last start.

    Args:
      config: the document of config.json, flat.
      info: the document of run.json.
    """
    sizes: Mapping[str, int] = {}
    mesh = info.get("mesh")
    if isinstance(mesh, dict) and all(type(n) is int and n > 0 for n in mesh.values()):
        sizes = mesh
    return Layout(
        mesh=sizes,
        zero=info.get("zero", config.get("mesh.zero")),
        accumulation=info.get("accumulation", config.get("batch.accumulation")),
    )
