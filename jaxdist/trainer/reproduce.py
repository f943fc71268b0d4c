"""The command that repeats a run, made from its run.json. This module imports no jax.

A run.json is untrusted. So the command has only known variables, all words are quoted,
and code outside of jaxdist is named behind a `#`.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import annotations, redact
from jaxdist.storage import untrusted

# keys of run.json
SOURCE = "source"
COMMAND = "command"
ENVIRONMENT = "environment"
HOSTS = "hosts"
# for TPUs: {"shape": chips along each ICI dim of a slice, "slices": their number}
TOPOLOGY = "topology"

_OURS = "jaxdist."  # models of this package are trusted
_RECORDED = re.compile(
    r"(XLA_FLAGS|LIBTPU_INIT_ARGS|NPROC|(JAX|JAXDIST|XLA|NCCL|TPU|LIBTPU)_[A-Z0-9_]+)"
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
_SECRET_FLAG = re.compile(
    r"(.*[-_.])?(token|secret|password|passwd|passphrase|credentials?|apikey|(api|access|private|secret|auth)[-_]key)",
    re.IGNORECASE,
)
# Variables that identify a process of a start, or that jax sets. Another start has
# other values.
_OF_A_PROCESS = re.compile(
    "JAXDIST_(COORDINATOR|NUM_PROCESSES|PROCESS_ID|FULL_PROCESSES|AGENT.*)"
    "|TPU_(WORKER|PROCESS|VISIBLE|CHIPS|LIBRARY_PATH|SKIP_MDS|ML_PLATFORM).*"
)


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Selects the variables that change a run's results or speed, without secrets."""
    names = sorted(
        name
        for name in environ
        if _RECORDED.fullmatch(name) and not _SECRET.search(name)
    )
    return {name: redact.without_secrets(environ[name]) for name in names}


def without_secrets(words: Sequence[str]) -> list[str]:
    """Hides the values of flags with names of secrets, and the secrets of URLs.

    Args:
      words: the words of a command.
    """
    shown = []
    follows_secret = False  # whether the previous word is such a flag without a value
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = bool(_SECRET_FLAG.fullmatch(name.lstrip("-")))
        shown_word = word
        if follows_secret and not word.startswith("-"):
            shown_word = redact.HIDDEN
        elif is_secret and equals:
            shown_word = f"{name}={redact.HIDDEN}"
        shown.append(redact.without_secrets(shown_word))
        follows_secret = is_secret and not equals and name.startswith("-")
    return shown


def repeat(
    folder: Path, info: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Makes the command that repeats a run in another workdir.

    Args:
      folder: the workdir.
      info: the document of run.json.
      config: the document of config.json, flat.

    Returns:
      The command, and the source that it needs: `commit`, `dirty` and `source`. None if
      run.json has no command.
    """
    stored = _fields(info, COMMAND)
    source = _fields(info, SOURCE)
    words = stored.get("argv")
    if not words or words != _texts(words):
        return None
    change_folder = _change_folder(stored.get("folder"))
    notes = []
    if stored.get("trains"):
        words = _train(folder.absolute() if change_folder else folder, config)
        notes.append(_trust(config))
    processes = info.get("num_processes")
    if type(processes) is int and processes > 1:
        machines = max(1, len(set(_texts(info.get(HOSTS)))))
        per_machine = str(max(1, processes // machines))
        words = ["jaxdist", "launch", "--processes", per_machine, "--", *words]
        if machines > 1:
            notes.insert(0, f"on each of {machines} machines, under a scheduler")
    variables = _assignments(_fields(info, ENVIRONMENT))
    command = " ".join([*change_folder, *variables, shlex.join(words)])
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
    """Selects the texts in a list; [] if the value is no list."""
    if not isinstance(value, list | tuple):
        return []
    return [item for item in value if isinstance(item, str)]


def _hex(value: object, pattern: str) -> str | None:
    """Checks that a value is a hexadecimal text of some pattern; None if it is not."""
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return value
    return None


def _change_folder(started: object) -> list[str]:
    """Lists the words that change to the folder where a run was started.

    The paths of the command are relative to it. The list is empty if it is the current
    folder.
    """
    if not isinstance(started, str) or not started or started == os.path.abspath(""):
        return []
    return ["cd", shlex.quote(started), "&&"]


def _train(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Lists the words of a command that trains the run in another workdir."""
    workdir = folder if folder.name not in ("", "..") else folder.resolve()
    words = ["python", "-m", "jaxdist.train", "--config", str(folder / "config.json")]
    words += ["--workdir", f"{workdir}-again"]
    checkpoints = config.get("checkpoint.folder")
    if isinstance(checkpoints, str) and checkpoints:
        words.append(f"--config.checkpoint.folder={checkpoints.rstrip('/')}-again")
    return words


def _trust(config: Mapping[str, Any]) -> str:
    """Formats the flags that the user must add to trust code outside of jaxdist."""
    flags = []
    target = config.get("model.target")
    if isinstance(target, str) and not target.startswith(_OURS):
        flags.append(f"--config.model.target={target}")
    loggers = _texts(config.get("train.loggers"))
    if any(":" in name for name in loggers):
        text = annotations.flag_text(tuple(loggers))
        flags.append(f"--config.train.loggers={text}")
    return f"if you trust this code, add {shlex.join(flags)}" if flags else ""


def _assignments(environment: Mapping[str, Any]) -> list[str]:
    """Formats the variables that another start needs, as NAME=value.

    Args:
      environment: the variables in run.json.
    """
    variables = recorded(
        {name: value for name, value in environment.items() if isinstance(value, str)}
    )
    return [
        f"{name}={shlex.quote(value)}"
        for name, value in variables.items()
        if not _OF_A_PROCESS.fullmatch(name)
    ]


def as_lines(repeat: Mapping[str, Any] | None) -> list[str]:
    """Formats the result of `repeat`: the command, and the source that it needs."""
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
