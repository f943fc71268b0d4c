"""How the processes of a run agree."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxdist.config import ConfigError

_numbers = itertools.count()  # the same on all processes: they ask the same in order


_FOREVER_MS = 7 * 24 * 3_600_000  # the watchdog knows what is too long


def kv_client() -> Any:
    """Returns the group's key-value store (jax's coordination service), or None for one process.

    It needs no device. Methods: key_value_set(key, value, overwrite), key_value_dir_get(prefix).
    """
    return distributed.global_state.client


@contextlib.contextmanager
def raise_on_all() -> Iterator[None]:
    """Lets the first process refuse for all: its ConfigError ends the others with one, too."""
    fault: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        fault = error
    if broadcast_scalar(fault is not None):
        fault = fault or ConfigError("refused by process 0, which says why")
    if fault is not None:
        raise fault


def broadcast_json(value: Any) -> Any:
    """Returns the first process's JSON value on all of them: its files may be on no other machine."""
    client, note = kv_client(), f"jaxdist/told/{next(_numbers)}"
    if client is None:
        return value
    if jax.process_index() == 0:
        client.key_value_set(note, json.dumps(value))
    return json.loads(client.blocking_key_value_get(note, _FOREVER_MS))


def broadcast_scalar(value: Any) -> Any:
    """Returns the first process's number on all of them: clocks differ, programs must not."""
    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(np.asarray(value)).item()
