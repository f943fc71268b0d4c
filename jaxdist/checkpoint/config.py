"""Settings of checkpoints: when to save them, and which to keep."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from jaxdist.config.annotations import (
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from jaxdist.config.redact import without_secrets


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Fields of `checkpoint.*`.

    A save is due when the step rule or the time rule asks for it.
    """

    every_steps: NonNegativeInt = 500  # steps between saves; 0 = no saves by step count
    every_minutes: NonNegativeFloat = 0.0  # minutes between saves; 0 = no saves by time
    # rule for the time between saves. fixed = by every_steps and every_minutes; auto =
    # the time that loses least, from the cost of saves and the rate of failures
    interval: Literal["fixed", "auto"] = "fixed"
    # chip hours between two failures, for interval=auto; 0 = measured from the starts
    # of this run, and 50,000 until one start has failed
    chip_hours_per_failure: NonNegativeFloat = 0.0
    # number of newest checkpoints to keep
    keep_last: PositiveInt = 2
    # steps; checkpoints at multiples of it are kept forever; 0 = none
    keep_every: NonNegativeInt = 0
    # metric of evaluation rows whose best checkpoint is kept: NAME (smaller is better,
    # e.g. eval_loss) or NAME:max (larger is better); "" = none
    keep_best: Annotated[str, Needs("jaxdist.trainer.best.KeepBest")] = ""
    save_at_end: bool = True  # whether to save after the last step, too
    # whether to write in the background while training continues
    asynchronous: bool = True
    # whether arrays are compressed (zstd): 8 to 22 % fewer bytes for twice the
    # processor time of a save
    compress: bool = False
    # seconds to wait for the previous save; after that, the next save is skipped
    patience_s: NonNegativeFloat = 30.0
    # seconds that one save may take before it counts as failed
    timeout_s: PositiveInt = 600
    # folder of the checkpoints, a path or gs://...; "" = `checkpoints` in the workdir
    folder: str = ""
    # URL of a store for copies of finished steps, e.g. s3://bucket/run; a restore
    # fetches damaged and lost steps from it; "" = no copies
    copy_to: Annotated[
        str, Needs("jaxdist.operations.copies.copying.CheckpointCopies")
    ] = ""
    # seconds that the end of a run waits for unfinished copies
    copy_wait_s: NonNegativeFloat = 120.0
    # folder in the memory of each host for recent steps, such as /dev/shm; ~ and
    # variables of the environment, such as $USER, are replaced; "" = no steps in memory
    memory_folder: Annotated[str, Needs("jaxdist.trainer.memory_saves.MemorySaves")] = (
        ""
    )
    # steps between saves in memory; 0 = the interval that loses least time, from the
    # cost of saves and the rate of failures
    memory_every_steps: NonNegativeInt = 0
    # number of other hosts that get a copy of each file in memory; 0 = none
    memory_peers: NonNegativeInt = 0

    @property
    def saves(self) -> bool:
        """Whether any rule asks for saves.

        A run that is stopped early saves in any case.
        """
        return bool(
            self.interval == "auto"
            or self.every_steps
            or self.every_minutes
            or self.keep_best
            or self.save_at_end
        )

    def is_due(self, step: int, *, last: bool) -> bool:
        """Tests whether the rules other than the clock ask for a save after `step`.

        Args:
          step: finished updates.
          last: whether training ends after this step.
        """
        by_steps = (
            self.interval == "fixed"
            and self.every_steps > 0
            and step % self.every_steps == 0
        )
        return by_steps or (last and self.save_at_end)

    def faults(self) -> Iterator[str]:
        """Yields an error for each field whose value is invalid or has no effect."""
        if self.keep_best and not re.fullmatch(
            r"eval_[^:\s]+(:max|:min)?", self.keep_best
        ):
            yield (
                f"checkpoint.keep_best={self.keep_best}: required a field of evaluation rows, such as eval_loss. "
                f"Add :max if larger is better, as in eval_accuracy:max."
            )
        in_memory = bool(self.memory_folder) and not self.memory_every_steps
        chooses = self.interval == "auto" or in_memory
        if self.chip_hours_per_failure and not chooses:
            yield (
                f"checkpoint.chip_hours_per_failure={self.chip_hours_per_failure:g} has no effect: "
                f"checkpoint.interval is fixed. Set checkpoint.interval=auto, or remove this key."
            )
        yield from self._memory_faults()
        if "://" in self.folder and not self.folder.startswith("gs://"):
            yield f"checkpoint.folder={self.folder}: must be a path or gs://..."
        copy_to = without_secrets(self.copy_to)
        if self.copy_to and "://" not in self.copy_to:
            yield f"checkpoint.copy_to={copy_to}: must be a URL, as s3://bucket/run or file:///mnt/run"
        if self.copy_to and "://" in self.folder:
            yield (
                f"checkpoint.copy_to={copy_to}: checkpoint.folder={self.folder} is in a store already. "
                f"Leave one of the two empty."
            )

    def _memory_faults(self) -> Iterator[str]:
        """Yields an error for each field of the memory tier that has no effect."""
        if "://" in self.memory_folder:
            yield (
                f"checkpoint.memory_folder={self.memory_folder}: must be a path on each host. Give one in "
                f"memory, as /dev/shm."
            )
        if self.memory_every_steps and not self.memory_folder:
            yield (
                f"checkpoint.memory_every_steps={self.memory_every_steps} has no effect: there is no folder "
                f"in memory. Set checkpoint.memory_folder, as /dev/shm, or remove this key."
            )
        if self.memory_peers and not self.memory_folder:
            yield (
                f"checkpoint.memory_peers={self.memory_peers} has no effect: there is no folder in memory. "
                f"Set checkpoint.memory_folder, as /dev/shm, or remove this key."
            )
