"""When to save a checkpoint and which to keep."""

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


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Fields of `checkpoint.*`; a save is due when the step rule or the time rule says
    so.
    """

    every_steps: NonNegativeInt = 500  # steps between saves; 0 = no saves by step count
    every_minutes: NonNegativeFloat = 0.0  # minutes between saves; 0 = no saves by time
    # auto: as often as loses least, by what saves take and the failures so far; every_*
    # do not count
    interval: Literal["fixed", "auto"] = "fixed"
    # of interval=auto; 0 = as this run's starts say, and 50,000 until one has failed
    chip_hours_per_failure: NonNegativeFloat = 0.0
    # newest checkpoints kept, so that a run can always resume
    keep_last: PositiveInt = 2
    # steps; checkpoints at its multiples are kept for ever; 0 = none
    keep_every: NonNegativeInt = 0
    # NAME, or NAME:max, of an evaluation row: the best checkpoint is kept; e.g.
    # eval_loss; "" = none
    keep_best: Annotated[str, Needs("jaxdist.trainer.best.KeepBest")] = ""
    save_at_end: bool = True  # also save after the last step
    asynchronous: bool = True  # write in the background while training goes on
    # seconds to wait for the save before, then this one is left out
    patience_s: NonNegativeFloat = 30.0
    # seconds that one save may take before it counts as failed
    timeout_s: PositiveInt = 600
    # where checkpoints go, a path or gs://...; empty = `checkpoints` in the workdir
    folder: str = ""
    # a store that finished steps are copied to, as s3://bucket/run, and fetched from
    # where none is left here
    copy_to: Annotated[
        str, Needs("jaxdist.operations.copies.copying.CheckpointCopies")
    ] = ""
    # seconds that a run's end waits for the copies
    copy_wait_s: NonNegativeFloat = 120.0

    @property
    def saves(self) -> bool:
        """Whether any rule asks for saves; a run that is stopped early saves
        all the same.
        """
        auto = self.interval == "auto"
        return bool(
            auto
            or self.every_steps
            or self.every_minutes
            or self.keep_best
            or self.save_at_end
        )

    def is_due(self, step: int, *, last: bool) -> bool:
        """Tests whether a rule asks for a save after this step; the clock's is not
        looked at.
        """
        by_steps = (
            self.interval == "fixed"
            and self.every_steps > 0
            and step % self.every_steps == 0
        )
        return by_steps or (last and self.save_at_end)

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the folder, or with the figure that chooses the
        best.
        """
        if self.keep_best and not re.fullmatch(
            r"eval_[^:\s]+(:max|:min)?", self.keep_best
        ):
            yield (
                f"checkpoint.keep_best={self.keep_best}: required a field of evaluation rows, as eval_loss, "
                f"or with :max where more is better, as eval_accuracy:max"
            )
        if self.chip_hours_per_failure and self.interval == "fixed":
            yield (
                f"checkpoint.chip_hours_per_failure={self.chip_hours_per_failure:g} chooses the interval of "
                f"saves with checkpoint.interval=auto; set that, or 0 hours"
            )
        if "://" in self.folder and not self.folder.startswith("gs://"):
            yield f"checkpoint.folder={self.folder}: must be a path or gs://..."
        if self.copy_to and "://" not in self.copy_to:
            yield f"checkpoint.copy_to={self.copy_to}: must be a URL, as s3://bucket/run or file:///mnt/run"
        if self.copy_to and "://" in self.folder:
            yield (
                f"checkpoint.copy_to={self.copy_to}: checkpoint.folder={self.folder} is in a store already; "
                f"leave one of the two empty"
            )
