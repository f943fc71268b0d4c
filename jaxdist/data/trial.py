"""Trial of files that are programs (tokenizers) before their use.

The trial runs in a process with limits.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.data.reading import one_line
from jaxdist.storage import atomic
from jaxdist.storage.digest import digest, digest_bytes

# Seconds of processor time for a trial, and again for every 10 MB of the file. Gemma's
# tokenizer has 33 MB.
_SECONDS = 4
_BYTES = 1 << 30  # limit of memory
_TIMEOUT_S = 300  # limit by the clock, for a busy machine


def once(
    kind: str, *, version: str, module: str, content: bytes, cache: Path | None
) -> None:
    """Tries out a file's content by `python -m module`, unless it has passed before.

    Args:
      kind: kind of file, a part of the name under which `cache` remembers it.
      version: version of the package that reads such files.
      module: module to run. It calls `child`.
      content: content of the file.
      cache: folder that remembers what has passed. None runs the trial in any case.

    Raises:
      ConfigError: the trial failed, or took too long.
    """
    if cache is None:
        _run(module, content)
        return
    key = digest(version, digest_bytes(content))[:32]
    passed = cache / f"{kind}-{key}.passed"
    if passed.is_file():
        return
    _run(module, content)
    with contextlib.suppress(OSError):  # the next start repeats the trial
        cache.mkdir(parents=True, exist_ok=True)
        atomic.write_text(passed, "")


def _run(module: str, content: bytes) -> None:
    """Runs a trial in a process, which gets the content as its input.

    Raises:
      ConfigError: the trial failed. The process has printed the reason.
    """
    variables = {
        "OPENBLAS_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "RUST_BACKTRACE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONIOENCODING": "utf-8:replace",
    }
    command = [sys.executable, "-P", "-m", module]
    try:
        done = subprocess.run(
            command,
            input=content,
            capture_output=True,
            env=os.environ | variables,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"it could not be tried out ({one_line(error)})") from error
    if not done.returncode:
        return
    fault = one_line(done.stdout.decode("utf-8", "replace"))
    if done.returncode == -signal.SIGXCPU:
        fault = (
            f"it takes more than {_SECONDS} s for short texts: a pattern almost without "
            "end"
        )
    elif not done.stdout.strip():  # the package has ended the process
        fault = (
            f"trying it out ended with status {done.returncode}: "
            "it needs too much memory, or is damaged"
        )
    raise ConfigError(f"{fault}; use another one")


def child(try_out: Callable[[bytes], None], content: bytes) -> None:
    """Runs `try_out` on a file's content within limits, in the process of a trial.

    If it fails, the fault is printed and the process ends with 1.
    """
    limit_s = _SECONDS + _SECONDS * len(content) // 10_000_000
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    try:
        try_out(content)
    except ConfigError as error:
        print(error)
        raise SystemExit(1) from None
