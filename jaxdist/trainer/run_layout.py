"""The layout that a run really has, from run.json; no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Mesh, ZeRO stage and accumulation of a run's last start.

    A config may leave them open, and an elastic restart may have changed them.
    """

    mesh: Mapping[str, int]  # {} if it is not known
    zero: object
    accumulation: object


def layout_of_run(config: Mapping[str, Any], info: Mapping[str, Any]) -> Layout:
    """Reads the layout of a run's last start from the files of its folder.

    Args:
      config: config.json, flat.
      info: run.json.
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
