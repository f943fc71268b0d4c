"""Where a run lies by default. Needs no jax."""

import re
from pathlib import Path


def default_workdir(config: str) -> str:
    """Returns `runs/NAME` of a `--config` value, `runs/NAME-ARGUMENT` where it has an
    argument.

    A run's config.json has the name of the run's folder.
    """
    name, _, argument = config.partition(":")
    file = Path(name)
    parts = [
        file.absolute().parent.name if file.name == "config.json" else file.stem,
        re.sub(r"[^\w.]+", "-", argument).strip("-"),
    ]
    return "runs/" + "-".join(filter(None, parts))
