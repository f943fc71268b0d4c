"""What the version promise covers, a line each: docs/project/versions.md.

A line is a kind, an item and its details: `key train.steps int >= 1 = 1000`. Two
golden files hold the lines of this version: names, commands, flags, exit codes and
events (`interface.txt`), and what commands and runs write (`written.txt`). Config keys
have one of their own. `released.txt` holds all lines of the last minor release.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxdist
from jaxdist import config as exit_codes
from jaxdist.__main__ import COMMANDS
from jaxdist.evaluation.fitted import Fitted
from jaxdist.evaluation.trained_run import TrainedRun
from jaxdist.planner import document
from jaxdist.planner.dry_run import DryRun
from jaxdist.storage import run_format
from jaxdist.trainer.callbacks import StepView
from support.events import events_in_code
from support.paths import GOLDEN, ROOT

KEYS = "config_keys.txt"
INTERFACE = "interface.txt"
WRITTEN = "written.txt"
RELEASED = "released.txt"

# What a model of your own calls, by module of jaxdist.ops.
OPS = {
    "attention": ("attention",),
    "attention_costs": ("attention_cost",),
    "cached_attention": ("cached_attention",),
    "costs": ("Cost", "Crossing", "Product"),
    "cross_entropy": ("cross_entropy", "cross_entropy_cost", "target_scores"),
    "embedding": ("embed",),
    "experts": ("experts", "experts_cost", "explain", "route"),
    "matmul": ("project", "project_lightly"),
}
# Members of what public functions return or hand to hooks.
RESULTS: dict[type, tuple[str, ...]] = {
    Fitted: (
        "evaluate",
        "folder",
        "generate",
        "metrics",
        "model",
        "save",
        "step",
        "stopped",
    ),
    TrainedRun: (
        "chat",
        "config",
        "evaluate",
        "folder",
        "generate",
        "generate_tokens",
        "logits",
        "model",
        "score",
    ),
    DryRun: (
        "available_bytes",
        "compiled_bytes",
        "fits",
        "needed_bytes",
        "refusal",
        "step_flops",
        "text",
    ),
    StepView: (
        "interrupted",
        "last",
        "log",
        "metrics",
        "progress",
        "request_save",
        "state",
        "step",
        "stop",
        "weights",
    ),
}
# JSON objects whose keys are data: names of arrays, packages, config keys.
_FREE = {
    "arrays",
    "bands",
    "buckets",
    "calibration",
    "components",
    "config",
    "dcn",
    "different",
    "differs",
    "extras",
    "links",
    "mesh",
    "metadata",
    "network",
    "repeat",
    "step_parts",
    "versions",
    "waterfall",
}
_LEVELS = 2


# --- names, commands, codes -----------------------------------------------------------


def interface_lines() -> list[str]:
    """Lists Python names, commands, flags, exit codes, events and requirements."""
    lines = [*_names(), *_ops(), *_results(), *_commands(), *_codes()]
    lines += [f"event {name}" for name in events_in_code()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines.append(f"needs python {project['requires-python']}")
    (jax,) = (need for need in project["dependencies"] if need.startswith("jax>"))
    lines.append(f"needs jax {jax.removeprefix('jax')}")
    extras = project["optional-dependencies"].keys() - {"dev", "interop-test"}
    lines += [f"extra {name}" for name in extras]
    lines.append(f"format files {run_format.FORMAT}")
    return sorted(lines)


def _names() -> Iterator[str]:
    for name in jaxdist.__all__:
        yield from _members(f"jaxdist.{name}", getattr(jaxdist, name))


def _ops() -> Iterator[str]:
    for module, names in OPS.items():
        found = importlib.import_module(f"jaxdist.ops.{module}")
        for name in names:
            yield from _members(f"jaxdist.ops.{module}.{name}", getattr(found, name))


def _results() -> Iterator[str]:
    for result, names in RESULTS.items():
        fields = {field.name for field in dataclasses.fields(result)}
        for name in names:
            place = f"{result.__name__}.{name}"
            member = getattr(result, name, None)
            assert name in fields or member is not None, place
            yield f"name {place}"
            if inspect.isfunction(member):
                yield from _arguments(place, member)


def _members(place: str, value: object) -> Iterator[str]:
    """Lists a name, its arguments, and the methods that a subclass may define.

    Fields of config classes are config keys, which are listed elsewhere.
    """
    yield f"name {place}"
    is_class = inspect.isclass(value)
    is_plain = is_class and not dataclasses.is_dataclass(value)
    if inspect.isfunction(value) or (is_class and ".ops." in place):
        yield from _arguments(place, value)
    if is_plain:
        for name, method in vars(value).items():
            if inspect.isfunction(method) and name[0] != "_":
                yield f"name {place}.{name}"
                yield from _arguments(f"{place}.{name}", method)


def _arguments(place: str, function: Any) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        kind = parameter.kind.description
        default = ""
        if parameter.default is not parameter.empty:
            default = f" = {parameter.default!r}"
        yield f"argument {place}.{parameter.name} {kind}{default}"


def help_of(command: str, *words: str) -> str:
    """Prints a command's help."""
    module = f"jaxdist.{command}"
    if command == "checkpoint":
        module += ".__main__"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*words, "--help"])
    return printed.getvalue()


def _commands() -> Iterator[str]:
    for command in COMMANDS:
        yield f"command {command}"
        actions: Sequence[tuple[str, ...]] = [()]
        if command == "checkpoint":
            actions = [("list",), ("inspect",), ("verify",), ("diff",)]
        for action in actions:
            shown = help_of(command, *action)
            flags = re.findall(r"^ {1,4}(?:-\w[^-]*, )?(--[a-z][\w-]*)", shown, re.M)
            assert "--help" in flags, shown
            for flag in sorted({*flags} - {"--help"}):
                yield f"flag {'.'.join((command, *action))}.{flag}"


def _codes() -> Iterator[str]:
    named = {
        code: name.removeprefix("EXIT_").lower()
        for name, code in vars(exit_codes).items()
        if name.startswith("EXIT_")
    }
    named |= {0: "done", 1: "error"}
    named |= {document.DOES_NOT_FIT: "plan_does_not_fit"}
    named |= {document.CANNOT_TELL: "plan_cannot_tell"}
    for code, name in named.items():
        yield f"exit {code} {name}"


# --- what commands and runs write -----------------------------------------------------


def written_lines(folder: Path) -> list[str]:
    """Lists keys of JSON outputs, and files of a run with their fields.

    Trains a small run and plans it, within a minute.

    Args:
      folder: an empty folder.
    """
    from support.runs import train_here  # compiles nothing when only names are asked

    run = folder / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        code = train_here(
            run, train__steps=8, train__eval_every=4, data__validation_tokens=1024
        )
    assert code == 0
    lines = [*_files(run), *_documents(run)]
    small = [
        "--config.batch.sequence_length=16",
        "--config.model.num_layers=1",
        "--config.model.d_model=32",
        "--config.model.d_ff=32",
    ]
    quickstart = ["--config", "quickstart", *small]
    for name, words in {
        "doctor": [],
        "status": [str(run)],
        "runs": [str(folder)],
        "evaluate": ["--workdir", str(run)],
        "checkpoint.list": [str(run)],
        "checkpoint.inspect": [str(run)],
        "checkpoint.verify": [str(run)],
        "checkpoint.diff": [str(run / "checkpoints" / "7")] * 2,
        "verify": [*quickstart, "--only", "fsdp 8, zero 1", "--precision", "float32"],
        "plan": [*quickstart, "--on", "cpu:1"],
    }.items():
        keys = [key.replace(" ", "_") for key in _keys(_output(name, words))]
        lines += [f"json {name}.{key}" for key in keys]
    return sorted(set(lines))


def _output(name: str, words: Sequence[str]) -> Any:
    command, _, action = name.partition(".")
    module = f"jaxdist.{command}"
    if command == "checkpoint":
        module += ".__main__"
        words = [action, *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        importlib.import_module(module).main([*words, "--json"])
    return json.loads(printed.getvalue())


def _keys(value: Any, levels: int = _LEVELS) -> Iterator[str]:
    """Yields the paths of a JSON value's keys, `a`, `a.b` and `a[].b`."""
    found: dict[str, None] = {}
    for key, item in value.items():
        found[key] = None
        mark, objects = "", [item]
        if isinstance(item, list):
            mark, objects = "[]", item
        if key in _FREE or levels == 1:
            continue
        for inner in objects:
            if isinstance(inner, dict):
                paths = _keys(inner, levels - 1)
                found |= {f"{key}{mark}.{path}": None for path in paths}
    yield from found


def _files(run: Path) -> Iterator[str]:
    """Yields the files of a run's folder, without Orbax's own and hidden ones."""
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if path.is_file() and "/." not in f"/{name}" and "/8/" not in name:
            yield "file " + re.sub(r"checkpoints/\d+/.*", "checkpoints/STEP", name)
    for name in ("manifest.json", "metadata/metadata", "state"):
        assert (run / "checkpoints" / "8" / name).exists()
        yield f"file checkpoints/STEP/{name}"


def _documents(run: Path) -> Iterator[str]:
    step = run / "checkpoints" / "8"
    for name, path in {
        "run.json": run / "run.json",
        "ledger.json": run / "ledger.json",
        "manifest.json": step / "manifest.json",
        "metadata": step / "metadata" / "metadata",
    }.items():
        for key in json.loads(path.read_text()):
            yield f"field {name}.{key}"
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        kind = "train" if "loss" in row else "evaluation"
        yield from (f"field metrics.jsonl.{kind}.{name}" for name in row)
    for row in (run / "events.jsonl").read_text().splitlines():
        common = {"event", "step", "time"} & json.loads(row).keys()
        yield from (f"field events.jsonl.{name}" for name in common)


# --- one release and the next ---------------------------------------------------------


def version() -> str:
    """Reads the version of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def minor(of: str) -> tuple[int, ...]:
    """Reads the first two numbers of a version."""
    return tuple(map(int, of.split(".")[:2]))


def promised() -> list[str]:
    """Lists what the golden files say of this version."""
    lines = [f"key {line}" for line in _lines(KEYS)]
    return sorted([*lines, *_lines(INTERFACE), *_lines(WRITTEN)])


def _lines(golden: str) -> list[str]:
    text = (GOLDEN / golden).read_text()
    return [" ".join(line.split()) for line in text.splitlines() if line[:1] != "#"]


def released() -> tuple[str, list[str]]:
    """Reads the version of the last minor release, and what it promised."""
    head, *lines = (GOLDEN / RELEASED).read_text().splitlines()
    return head.removeprefix("# "), lines


def released_text() -> str:
    """Writes what this version promises, as the last release."""
    return "\n".join([f"# {version()}", *promised()]) + "\n"


def sections(changelog: str) -> dict[str, str]:
    """Splits a changelog by version, newest first."""
    parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def named_under(section: str, heading: str) -> set[str]:
    """Finds what a changelog's section names in backticks below a heading."""
    below = re.search(rf"^### {heading}\n(.*?)(?=^###? |\Z)", section, re.M | re.S)
    return set(re.findall(r"`([^`]+)`", below[1])) if below else set()


def breaks(
    old: tuple[str, Iterable[str]], new: tuple[str, Iterable[str]], changelog: str
) -> list[str]:
    """Lists what breaks the promise between two releases, a sentence each.

    Args:
      old: version and lines of the last minor release.
      new: version and lines of this one.
      changelog: its text.
    """
    old_version, old_lines = old
    new_version, new_lines = new
    before, now = _by_item(old_lines), _by_item(new_lines)
    gone = [item for item in before if item not in now]
    changed = [item for item in before if now.get(item, before[item]) != before[item]]
    if minor(old_version) == minor(new_version):
        added = [item for item in now if item not in before]
        return [
            f"{kind} {item} {what} in a patch: raise the minor version"
            for what, items in (("went", gone), ("changed", changed), ("came", added))
            for kind, item in items
        ]
    announced, removed, told = set[str](), set[str](), set[str]()
    for release, section in sections(changelog).items():
        if minor(release) == minor(new_version):
            removed |= named_under(section, "Removed")
            told |= named_under(section, "Changed")
        else:
            announced |= named_under(section, "Deprecated")
    found = [
        f"{kind} {item} went, and no earlier minor release names it under Deprecated"
        for kind, item in gone
        if item not in announced
    ]
    found += [
        f"{kind} {item} went: name it under Removed"
        for kind, item in gone
        if item not in removed
    ]
    return found + [
        f"{kind} {item} changed: name it under Changed"
        for kind, item in changed
        if item not in told
    ]


def _by_item(lines: Iterable[str]) -> dict[tuple[str, str], str]:
    """Splits lines into kind, item and details."""
    parts = [[*line.split(" ", 2), ""] for line in lines]
    return {(kind, item): details for kind, item, details, *_ in parts}
