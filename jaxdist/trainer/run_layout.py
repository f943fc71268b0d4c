"""The layout that a run really has, from run.json and events.jsonl; no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.telemetry.metrics import Row


@dataclass(frozen=True)
class Layout:
    """Mesh, ZeRO stage and accumulation of a run's last start.

    A config may leave them open, and an elastic restart may have changed them.
    """

    mesh: Mapping[str, int]  # {} if it is not known
    zero: object
    accumulation: object


def layout_of_run(
    config: Mapping[str, Any], info: Mapping[str, Any], events: Sequence[Row]
) -> Layout:
    """Reads the layout of a run's last start from the files of its folder.

    Args:
      config: config.json, flat.
      info: run.json; those of older versions lack the accumulation, which the last
        `resize` then has.
    """
    mesh = info.get("mesh")
    sizes = (
        mesh
        if isinstance(mesh, dict)
        and all(type(n) is int and n > 0 for n in mesh.values())
        else {}
    )
    resized = [
        e["accumulation"]
        for e in events
        if e["event"] == "resize" and "accumulation" in e
    ]
    own = [*resized[-1:], config.get("batch.accumulation")][0]
    return Layout(
        sizes, info.get("zero", config.get("mesh.zero")), info.get("accumulation", own)
    )
