"""What the processes of a run tell each other without a collective: what they run, how fast they are.

Through the key-value store of jax's coordination service; the devices know nothing of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxdist
from jaxdist import machine
from jaxdist.config import ConfigError

_WAIT_MS = 1_800_000  # for the slowest process to come so far
_SHOWN_CHARS = 60
_ROWS, _ENOUGH, _ENOUGH_S = 20, 5, 1.0  # of metrics that a pace is measured over; that make an event
_SHARE = 0.2  # of a step that a process is behind the median, to be called a straggler

_numbers = itertools.count()  # the same on all processes: they ask the same questions in order


def code(model: type) -> dict[str, str]:
    """Returns hashes of this package's and of the model's source, and the versions that matter."""
    root = Path(jaxdist.__file__).parent
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    source = getattr(sys.modules.get(model.__module__), "__file__", None)
    versions = {f"version of {name}": version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return versions | {
        "source of jaxdist": _digest((name.encode() + path.read_bytes() for name, path in files.items())),
        f"source of {model.__module__}": _digest([Path(source).read_bytes()] if source else []),
        "version of Python": ".".join(map(str, sys.version_info[:3])),
    }


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def agree(facts: Callable[[], Mapping[str, object]]) -> None:
    """Returns once all processes have said the same; a lone one is not asked.

    Raises:
      ConfigError: on all of them, naming who differs and in what.
    """
    notes = machine.notes()
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


class Pace:
    """Says at each row of metrics which process has held up the others, from their own clocks.

    A process that is late waits less for its devices than those that wait for it. So its time outside
    that wait is what counts: data, host work, an interpreter that was not running. (A slow chip does
    not show: all devices end together.)
    """

    def __init__(self, event: Callable[..., None]) -> None:
        self._event, self._last = event, -1  # the last that lagged
        self._notes, self._name = machine.notes(), f"jaxdist/pace/{next(_numbers)}"
        self._begun = False
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_ROWS)

    def row(self, step: int, *, steps: int, seconds: float, waited_s: float) -> dict[str, Any]:
        """Tells the others; returns fields for the first process's row, {} on others and for a lone one.

        What the others have said may be a row old: nobody waits. One that lags makes an event.

        Args:
          step: the newest of the row.
          steps, seconds: since the row before.
          waited_s: seconds of them that this process waited for its devices.
        """
        if self._notes is None:
            return {}
        if not self._begun:  # the first steps of a program are no measure
            self._begun = True
            return {}
        # Rows come in bursts, when a pause looks at all steps under way: some together tell more.
        self._recent.append((steps, seconds, seconds - waited_s))
        number, time_s, busy_s = (sum(column) for column in zip(*self._recent, strict=True))
        me = jax.process_index()
        try:
            self._notes.key_value_set(f"{self._name}/{me}", json.dumps(busy_s / number), True)
            told = self._notes.key_value_dir_get(f"{self._name}/") if me == 0 else []
        except jax.errors.JaxRuntimeError:
            return {}
        if not told:
            return {}
        found = slowest({int(key.rpartition("/")[2]): json.loads(value) for key, value in told})
        process, excess_s = found["slowest_process"], found["slowest_busy_s"] - found["median_busy_s"]
        lags = len(self._recent) >= _ENOUGH and time_s >= _ENOUGH_S and excess_s > _SHARE * time_s / number
        if lags and process != self._last:
            self._event("straggler", step, process=process, **found)
        self._last = process if lags else -1
        return found


def slowest(busy_s: Mapping[int, float]) -> dict[str, Any]:
    """Returns the process that was busy longest, its seconds per step, and the (lower) median."""
    process = max(busy_s, key=lambda number: busy_s[number])
    median = sorted(busy_s.values())[(len(busy_s) - 1) // 2]
    return {"slowest_process": process, "slowest_busy_s": busy_s[process], "median_busy_s": median}
