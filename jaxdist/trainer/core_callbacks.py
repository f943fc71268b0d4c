"""The callbacks of the core, in one place for the roots."""

from jaxdist.trainer.best import KeepBest
from jaxdist.trainer.loggers import Loggers
from jaxdist.trainer.profiling import Profile

__all__ = ["KeepBest", "Loggers", "Profile"]
