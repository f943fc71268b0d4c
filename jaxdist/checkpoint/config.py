"""When to save a checkpoint and which to keep."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Fields of `checkpoint.*`; a save is due when the step rule or the time rule says so."""

    every_steps: int = 500  # steps between saves, >= 0; 0 = no saves by step count
    every_minutes: float = 0.0  # minutes between saves, >= 0; 0 = no saves by time
    keep_last: int = 2  # newest checkpoints kept, >= 1
    keep_every: int = 0  # steps; checkpoints at its multiples are kept for ever; 0 = none
    save_at_end: bool = True  # also save after the last step
    asynchronous: bool = True  # write in the background while training goes on
    patience_s: float = 30.0  # seconds to wait for the save before, then this one is left out, >= 0
    timeout_s: int = 600  # seconds that one save may take before it counts as failed, > 0
    folder: str = ""  # where checkpoints go, a path or gs://...; empty = `checkpoints` in the workdir


def faults(config: CheckpointConfig) -> list[str]:
    """Returns what is wrong with the values, one line each; empty if nothing."""
    rules = [
        ("every_steps", config.every_steps >= 0, "a whole number >= 0 (0 = never)"),
        ("every_minutes", config.every_minutes >= 0, "minutes >= 0 (0 = never)"),
        ("keep_last", config.keep_last >= 1, "at least 1, so that a run can always resume"),
        ("keep_every", config.keep_every >= 0, "a whole number of steps >= 0 (0 = none)"),
        ("patience_s", config.patience_s >= 0, "seconds >= 0"),
        ("folder", "://" not in config.folder or config.folder.startswith("gs://"), "a path or gs://..."),
        ("timeout_s", config.timeout_s > 0, "seconds > 0"),
    ]
    return [
        f"checkpoint.{name}={getattr(config, name)}: must be {required}"
        for name, holds, required in rules
        if not holds
    ]
