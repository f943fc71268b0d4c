"""The mix and the order of the faults of `memory_faults.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PLAN = Path(__file__).with_suffix(".json")
HOSTS = 4
SEED = 38
OWN, PEER, FOLDER, NONE = "own memory", "peer's memory", "folder", "no restart"

# kind: (count, source that the lost part comes from)
MIX = {
    "kill -9 of one": (14, OWN),
    "kill -9 of all": (12, OWN),
    "SIGSTOP": (10, OWN),
    "a host's folder deleted": (16, PEER),
    "a flipped bit in own files": (16, PEER),
    "a flipped bit in a peer's copies": (12, OWN),
    "a flipped bit in both, newest step": (10, OWN),
    "a flipped bit in both, all steps": (10, FOLDER),
    "kill -9 amid a save": (14, OWN),
    "kill -9 amid a copy": (14, OWN),
    "kill -9 amid a restore": (12, OWN),
    "junk from a stranger": (10, NONE),
    "junk from a peer": (10, OWN),
    "memory full": (10, OWN),
    "two runs in one folder": (10, OWN),
    "SIGTERM": (10, FOLDER),
    "files of a stale branch": (10, OWN),
}
# faults that are not in the plan: they were added after it was carried out
EXTRA = {
    "two neighbours' folders deleted": (5, FOLDER),
    "two other folders deleted": (5, PEER),
    "a folder deleted while the run trains": (5, OWN),
}
WITH_FOLDER = ("a flipped bit in both, all steps", "two neighbours' folders deleted")


class Fault(NamedTuple):
    """A planned fault."""

    number: int
    kind: str
    source: str  # that the lost part must come back from
    host: int  # that it happens to
    where: float  # from 0 to 1: place of a flipped bit, or of a kill amid an operation
    delay_s: float  # after the run is ready for it
    variant: int  # of kinds that have several
    folder_save: bool  # whether the run saves to the folder before


def draw(
    seed: int = SEED, mix: Mapping[str, tuple[int, str]] | None = None
) -> list[Fault]:
    """Draws the order of the faults and their places."""
    mix = mix or MIX
    deal = random.Random(seed)
    kinds = [kind for kind, (count, _) in mix.items() for _ in range(count)]
    deal.shuffle(kinds)
    return [
        Fault(
            number,
            kind,
            mix[kind][1],
            host=deal.randrange(HOSTS),
            where=round(deal.random(), 6),
            delay_s=round(deal.uniform(0, 0.25), 3),
            variant=deal.randrange(12),
            folder_save=kind in WITH_FOLDER or deal.random() < 0.15,
        )
        for number, kind in enumerate(kinds)
    ]


def write_plan(path: Path) -> None:
    """Writes the plan."""
    faults = draw()
    head = {
        "seed": SEED,
        "faults": len(faults),
        "mix": {kind: {"count": n, "source": s} for kind, (n, s) in MIX.items()},
    }
    text = json.dumps(head, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(fault._asdict())}" for fault in faults)
    path.write_text(f'{text},\n "plan": [\n{rows}\n ]\n}}\n')


def read_plan(path: Path) -> list[Fault]:
    """Reads the plan."""
    return [Fault(**entry) for entry in json.loads(path.read_text())["plan"]]
