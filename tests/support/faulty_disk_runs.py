"""Runs `jaxdist train` again and again in this one process, each time with other faults
of the disk.

Reads a JSON line for each run, [faults, arguments], and answers with one: [exit code,
what it printed]. `disk_faults.c` must have been loaded into the process.
"""

import ctypes
import json
import os
import sys
import tempfile
import traceback

from jaxdist import train
from jaxdist.trainer import exit_code

set_faults = ctypes.CDLL(None).set_disk_faults


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        faults, arguments = json.loads(line)
        with tempfile.TemporaryFile() as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            set_faults(os.fsencode(faults))
            try:
                code = exit_code.exit_code(lambda given=arguments: train.main(given))
            except Exception:
                traceback.print_exc()
                code = 1
            set_faults(b"")
            sys.stdout.flush()
            sys.stderr.flush()
            said.seek(0)
            print(
                json.dumps([code, said.read().decode(errors="replace")]),
                file=answers,
                flush=True,
            )


if __name__ == "__main__":
    main()
