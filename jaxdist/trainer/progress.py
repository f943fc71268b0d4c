"""How far a run has come."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxdist.storage.untrusted import Malformed, of_kind


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0  # updates finished
    tokens_seen: int = 0  # targets with weight > 0
    elapsed_s: float = 0.0  # training time, over all restarts

    def go_to(self, other: "Progress") -> None:
        """Takes the step and tokens of an earlier checkpoint; time goes on."""
        self.step = other.step
        self.tokens_seen = other.tokens_seen


def progress_of(metadata: Mapping[str, Any]) -> Progress:
    """Reads how far the run of a checkpoint had come.

    Raises:
      Malformed: the metadata is not that of a run in training.
    """
    stored = of_kind(metadata.get("progress"), dict, "progress")
    kinds = {item.name: {int, type(item.default)} for item in fields(Progress)}
    for name, value in stored.items():
        if type(value) not in kinds.get(name, ()) or not 0 <= value < math.inf:
            raise Malformed(f"progress.{name:.40} is {value!r:.40}")
    return Progress(**stored)
