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
    if (
        not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) for word in words)
    ):
        return None
    commit = source.get("commit")
    digest = source.get("hash")
    processes = info.get("num_processes")
    there = _elsewhere(stored.get("folder"))
    notes = []
    if stored.get("trains"):
        words = _train(folder.absolute() if there else folder, config)
        notes = [_trust(config)]
    if type(processes) is int and processes > 1:
        words, machines = _launch(words, info, processes)
        notes.insert(0, machines)
    note = "; ".join(filter(None, notes))
    command = " ".join(
        [*there, *_assignments(_fields(info, ENVIRONMENT)), shlex.join(words)]
    )
    command += f"  # {note}" if note else ""
    return {
        "command": untrusted.printable(command),
        "commit": commit
        if isinstance(commit, str) and re.fullmatch("[0-9a-f]{7,64}", commit)
        else None,
        "dirty": source.get("dirty") is True,
        "source": digest
        if isinstance(digest, str) and re.fullmatch("[0-9a-f]{8,64}", digest)
        else None,
    }


def _fields(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = info.get(name)
    return value if isinstance(value, dict) else {}


def _elsewhere(started: object) -> list[str]:
    """Returns the words that go to the folder where a run was started, to which paths
    relate; [] if here.
    """
    if not isinstance(started, str) or not started or started == os.path.abspath(""):
        return []
    return ["cd", shlex.quote(started), "&&"]


def _train(folder: Path, config: Mapping[str, Any]) -> list[str]:
    place = folder if folder.name not in ("", "..") else folder.resolve()
    again = ["--workdir", f"{place}-again"]
    own = [
        "python",
        "-m",
        "jaxdist.train",
        "--config",
        str(folder / "config.json"),
        *again,
    ]
    where = config.get("checkpoint.folder")
    return (
        [*own, f"--config.checkpoint.folder={where.rstrip('/')}-again"]
        if isinstance(where, str) and where
        else own
    )


def _trust(config: Mapping[str, Any]) -> str:
    """Formats what has to be named on the command line, since it is code of
    somebody's.
    """
    target = config.get("model.target")
    named = config.get("train.loggers")
    flags = [f"--config.model.target={target}"] * (
        isinstance(target, str) and not target.startswith(_OURS)
    )
    loggers = (
        [name for name in named if isinstance(name, str)]
        if isinstance(named, list | tuple)
        else []
    )
    if any(":" in name for name in loggers):
        flags.append(f"--config.train.loggers={','.join(loggers)}")
    return f"if you trust this code, add {shlex.join(flags)}" if flags else ""


def _launch(
    words: list[str], info: Mapping[str, Any], processes: int
) -> tuple[list[str], str]:
    """Returns the command that starts a group's processes, and on how many machines."""
    stored = info.get(HOSTS)
    hosts = (
        [host for host in stored if isinstance(host, str)]
        if isinstance(stored, list)
        else []
    )
    machines = max(1, len(set(hosts)))
    each = [
        "jaxdist",
        "launch",
        "--processes",
        str(max(1, processes // machines)),
        "--",
        *words,
    ]
    return (
        each,
        f"on each of {machines} machines, under a scheduler" if machines > 1 else "",
    )


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
    commit = repeat["commit"]
    digest = repeat["source"]
    facts = [f"commit {commit[:12]}"] if commit else []
    facts += ["with changes that were not committed"] if repeat["dirty"] else []
    facts += [f"source {digest}"] if digest else []
    return [repeat["command"], *([f"of {', '.join(facts)}"] if facts else [])]
