"""The command that repeats a run, from its run.json. No jax.

What it says is text of a run's folder, maybe somebody else's: only known variables are
in it, all is quoted, and code that is not jaxdist's is named behind a `#`.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.storage import untrusted

# in run.json
SOURCE = "source"
COMMAND = "command"
ENVIRONMENT = "environment"
HOSTS = "hosts"
# of TPUs: {"shape": chips along each ICI dim of a slice, "slices": number}
TOPOLOGY = "topology"

_OURS = "jaxdist."  # of these packages, a model or logger needs no word of trust
_RECORDED = re.compile(
    r"(XLA_FLAGS|LIBTPU_INIT_ARGS|NPROC|(JAX|JAXDIST|XLA|NCCL|TPU|LIBTPU)_[A-Z0-9_]+)"
)
_HIDDEN = "***"
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
_SECRET_FLAG = re.compile(
    r"(.*[-_.])?(token|secret|password|passwd|passphrase|credentials?|apikey|(api|access|private|secret|auth)[-_]key)",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # and password, in a URL
# Which process of which start this was, and what jax sets by itself: another start has
# its own.
_OF_A_PROCESS = re.compile(
    "JAXDIST_(COORDINATOR|NUM_PROCESSES|PROCESS_ID|FULL_PROCESSES|AGENT.*)"
    "|TPU_(WORKER|PROCESS|VISIBLE|CHIPS|LIBRARY_PATH|SKIP_MDS|ML_PLATFORM).*"
)


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change what a run computes or how fast, by name; no
    secrets.
    """
    names = sorted(
        name
        for name in environ
        if _RECORDED.fullmatch(name) and not _SECRET.search(name)
    )
    return {name: _USER.sub(_HIDDEN, environ[name]) for name in names}


def without_secrets(words: Sequence[str]) -> list[str]:
    """Returns a command without the values of flags that are named like secrets, and
    users in URLs.
    """
    shown = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = bool(_SECRET_FLAG.fullmatch(name.lstrip("-")))
        if is_value and not word.startswith("-"):
            word = _HIDDEN
        elif is_secret and equals:
            word = f"{name}={_HIDDEN}"
        is_value = is_secret and not equals and name.startswith("-")
        shown.append(_USER.sub(_HIDDEN, word))
    return shown


def repeat(
    folder: Path, info: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the command that repeats a run into another workdir, and of which source;
    None if not known.

    Args:
      info: run.json.
      config: flat.
    """
    stored = _fields(info, COMMAND)
    source = _fields(info, SOURCE)
    words = stored.get("argv")
    if not words or words != _texts(words):
        return None
    there = _elsewhere(stored.get("folder"))
    notes = []
    if stored.get("trains"):
        words = _train(folder.absolute() if there else folder, config)
        notes.append(_trust(config))
    processes = info.get("num_processes")
    if type(processes) is int and processes > 1:
        machines = max(1, len(set(_texts(info.get(HOSTS)))))
        each = str(max(1, processes // machines))
        words = ["jaxdist", "launch", "--processes", each, "--", *words]
        if machines > 1:
            notes.insert(0, f"on each of {machines} machines, under a scheduler")
    command = " ".join(
        [*there, *_assignments(_fields(info, ENVIRONMENT)), shlex.join(words)]
    )
    note = "; ".join(filter(None, notes))
    if note:
        command += f"  # {note}"
    return {
        "command": untrusted.printable(command),
        "commit": _hex(source.get("commit"), "[0-9a-f]{7,64}"),
        "dirty": source.get("dirty") is True,
        "source": _hex(source.get("hash"), "[0-9a-f]{8,64}"),
    }


def _fields(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = info.get(name)
    return value if isinstance(value, dict) else {}


def _texts(value: object) -> list[str]:
    """Lists the texts in a list; [] if it is none."""
    if not isinstance(value, list | tuple):
        return []
    return [item for item in value if isinstance(item, str)]


def _hex(value: object, pattern: str) -> str | None:
    """Returns a hexadecimal text; None if it is none."""
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return value
    return None


def _elsewhere(started: object) -> list[str]:
    """Returns the words that go to the folder where a run was started, to which paths
    relate; [] if here.
    """
    if not isinstance(started, str) or not started or started == os.path.abspath(""):
        return []
    return ["cd", shlex.quote(started), "&&"]


def _train(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Lists the words of the command that trains into another workdir."""
    place = folder if folder.name not in ("", "..") else folder.resolve()
    words = ["python", "-m", "jaxdist.train", "--config", str(folder / "config.json")]
    words += ["--workdir", f"{place}-again"]
    where = config.get("checkpoint.folder")
    if isinstance(where, str) and where:
        words.append(f"--config.checkpoint.folder={where.rstrip('/')}-again")
    return words


def _trust(config: Mapping[str, Any]) -> str:
    """Formats what has to be named on the command line, since it is code of
    somebody's.
    """
    flags = []
    target = config.get("model.target")
    if isinstance(target, str) and not target.startswith(_OURS):
        flags.append(f"--config.model.target={target}")
    loggers = _texts(config.get("train.loggers"))
    if any(":" in name for name in loggers):
        flags.append(f"--config.train.loggers={','.join(loggers)}")
    return f"if you trust this code, add {shlex.join(flags)}" if flags else ""


def _assignments(known: Mapping[str, Any]) -> list[str]:
    """Returns NAME=value of the variables that another start needs, too."""
    variables = recorded(
        {name: value for name, value in known.items() if isinstance(value, str)}
    )
    return [
        f"{name}={shlex.quote(x)}"
        for name, x in variables.items()
        if not _OF_A_PROCESS.fullmatch(name)
    ]


def as_lines(repeat: Mapping[str, Any] | None) -> list[str]:
    """Returns the command, and what it needs, for people."""
    if repeat is None:
        return []
    facts = []
    if repeat["commit"]:
        facts.append(f"commit {repeat['commit'][:12]}")
    if repeat["dirty"]:
        facts.append("with changes that were not committed")
    if repeat["source"]:
        facts.append(f"source {repeat['source']}")
    lines = [repeat["command"]]
    if facts:
        lines.append(f"of {', '.join(facts)}")
    return lines
