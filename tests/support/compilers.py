"""Programs that a process of their own compiles ahead of time, for chips that are not
here.
"""

import functools
import json
import os
import subprocess
import sys

from support.paths import ROOT, TESTS

# libtpu holds a machine's one lock otherwise, and asks a server for what it is.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # it can't read ahead-of-time programs back
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


@functools.cache
def compiled_apart(file: str, *arguments: str, timeout: float) -> dict[str, dict]:
    """Returns the rows that a test file prints as a program, a JSON object a line, by
    their `case`.
    """
    paths = filter(None, [str(ROOT), str(TESTS), os.environ.get("PYTHONPATH")])
    environ = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, file, *arguments]
    child = subprocess.run(
        command,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    return {row["case"]: row for row in map(json.loads, lines)}
