"""The default workdir of a run. This module imports no jax."""

import re
from pathlib import Path


def default_workdir(config: str) -> str:
    """Derives the workdir from the value of --config.

    The value NAME gives runs/NAME, and NAME:ARGUMENT gives runs/NAME-ARGUMENT. For the
    config.json of a run, NAME is the name of its folder.
    """
    file_name, _, argument = config.partition(":")
    file = Path(file_name)
    name = file.stem
    if file.name == "config.json":
        name = file.absolute().parent.name
    suffix = re.sub(r"[^\w.]+", "-", argument).strip("-")
    return "runs/" + "-".join(filter(None, [name, suffix]))
