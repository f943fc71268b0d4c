"""Program that saves a tiny state many times, and prints what memory it has then.

`python -m support.saves_memory FOLDER SAVES`; each 20 saves a line of JSON: saves, KiB of
resident memory after a trim, Python objects.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import jax

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager

_EVERY = 20


def main() -> None:
    """Saves, and prints a line for each 20 saves."""
    libc = ctypes.CDLL("libc.so.6")
    page_kib = 4
    state = {f"x{i}": jax.random.normal(jax.random.key(i), (16,)) for i in range(8)}
    config = CheckpointConfig(keep_last=1)
    with CheckpointManager(sys.argv[1], config) as store:
        for number in range(1, int(sys.argv[2]) + 1):
            store.save(number, state, {"data": number})
            store.wait()
            assert all(saved.ok for saved in store.poll())
            if number % _EVERY:
                continue
            gc.collect()
            libc.malloc_trim(0)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            row = [number, pages * page_kib, len(gc.get_objects())]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
