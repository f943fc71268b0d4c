"""What the processes of a run tell each other without a collective: what they run, how fast they are.

Through the key-value store of jax's coordination service; the devices know nothing of it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import jax

import jaxdist
from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.storage.digest import digest, digest_file

_WAIT_MS = 1_800_000  # for the slowest process to come so far
_SHOWN_CHARS = 60

_numbers = itertools.count()  # the same on all processes: they ask the same questions in order


def code(model: type) -> dict[str, str]:
    """Returns hashes of this package's and of the model's source, and the versions that matter."""
    root = Path(jaxdist.__file__).parent
    ours = (f"{path.relative_to(root)} {digest_file(path)}" for path in sorted(root.rglob("*.py")))
    source = getattr(sys.modules.get(model.__module__), "__file__", None)
    versions = {f"version of {name}": version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return versions | {
        "source of jaxdist": digest(*ours)[:16],
        f"source of {model.__module__}": digest_file(Path(source))[:16] if source else "(none)",
        "version of Python": ".".join(map(str, sys.version_info[:3])),
    }


def agree(facts: Callable[[], Mapping[str, object]]) -> None:
    """Returns once all processes have said the same; a lone one is not asked.

    Raises:
      ConfigError: on all of them, naming who differs and in what.
    """
    notes = coordination.kv_client()
    if notes is None:
        return
    name, me = f"jaxdist/peers/{next(_numbers)}", jax.process_index()
    notes.key_value_set(f"{name}/{me}", json.dumps({key: str(value) for key, value in facts().items()}))
    notes.wait_at_barrier(f"{name}/told", _WAIT_MS)
    if me == 0:
        told = {int(key.rpartition("/")[2]): json.loads(v) for key, v in notes.key_value_dir_get(f"{name}/")}
        notes.key_value_set(f"{name}-verdict", json.dumps(disagreements(told)))
    if verdict := json.loads(notes.blocking_key_value_get(f"{name}-verdict", _WAIT_MS)):
        raise ConfigError(verdict)


def disagreements(told: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Returns a line for each process and fact that differs from what most processes say."""
    found = []
    for key in sorted({key for facts in told.values() for key in facts}):
        values = {process: facts.get(key, "(none)") for process, facts in sorted(told.items())}
        usual, count = Counter(values.values()).most_common(1)[0]
        found += [
            f"process {process} differs from {count} of {len(told)} processes: {key} is "
            f"{value[:_SHOWN_CHARS]}, theirs is {usual[:_SHOWN_CHARS]}; start all with the same"
            for process, value in values.items()
            if value != usual
        ]
    return found
