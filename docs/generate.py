"""Writes the pages that follow from the code: `python docs/generate.py`.

`pages()` makes each page's text. A test compares it with the committed page.

| page | from |
|---|---|
| reference/config-keys.md | the schema of the config classes |
| reference/commands.md | the `--help` of each command |
| reference/python-api.md | signatures and docstrings, read by griffe |
| reference/hardware.md, its tables | jaxdist/hardware/chips.py |
| those of COPIED | files at the root, and below benchmarks/ |
"""

import contextlib
import functools
import importlib
import inspect
import io
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

import griffe  # noqa: E402

import jaxdist  # noqa: E402
from jaxdist.__main__ import COMMANDS  # noqa: E402
from jaxdist.config import annotations  # noqa: E402
from jaxdist.config.schema import Field  # noqa: E402
from jaxdist.hardware.chips import CHIPS, NETWORKS, Chip  # noqa: E402
from jaxdist.models import registry  # noqa: E402
from jaxdist.trainer.run_config import RunConfig, full_schema  # noqa: E402

MARK = "<!-- Written by `python docs/generate.py` {source}. Do not edit. -->"
# A page that explains a key is looked for here first.
WHERE_KEYS_ARE_EXPLAINED = ("how-to", "explanation", "reference", "tutorials")
CHIPS_BEGIN = "<!-- chips -->"
# A page from outside of docs/ -> its copy below docs/.
COPIED = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/README.md": "evidence/benchmarks.md",
    "benchmarks/device/README.md": "evidence/benchmarks-device.md",
    "benchmarks/plan/README.md": "evidence/benchmarks-plan.md",
    "benchmarks/step/README.md": "evidence/benchmarks-step.md",
}


def pages() -> dict[str, str]:
    """Makes all pages; the keys are their paths below docs/."""
    return {
        "reference/config-keys.md": config_page(),
        "reference/commands.md": commands_page(),
        "reference/python-api.md": api_page(),
        "reference/hardware.md": hardware_page(),
        **{target: copied_page(source) for source, target in COPIED.items()},
    }


# --- config keys ----------------------------------------------------------------------

CONFIG_INTRODUCTION = f"""# Config keys

{MARK.format(source="from the config classes")}

Set a key with `--config.KEY=VALUE`. [Configs and keys](../how-to/configure.md) explains how.
Below each key stand its type and range, its default, and the page that explains it. A key
that "may change on resume" may have another value when a run resumes. If any other key
differs, jaxdist exits with 78.
"""
MODEL = "These are the options of jaxdist's transformer. Other models have their own."


def config_page() -> str:
    """Makes the page of config keys: a section for each group, an entry for each key."""
    explained = pages_of_keys()
    groups: dict[str, list[Field]] = {}
    for path, field in full_schema(registry.DEFAULT_TARGET).items():
        group = path.rpartition(".")[0].partition(".")[0]
        groups.setdefault(group, []).append(field)
    lines = [CONFIG_INTRODUCTION]
    for group, fields in groups.items():
        lines += heading_of(group)
        for field in fields:
            lines += entry_of_key(field, explained)
    return "\n".join(lines)


def heading_of(group: str) -> list[str]:
    """Makes a group's heading, and the first paragraph of its docstring."""
    if not group:
        return ["## Keys without a group", ""]
    if group == "model":
        introduction = MODEL
    else:
        docstring = inspect.getdoc(getattr(RunConfig(), group)) or ""
        introduction = " ".join(docstring.partition("\n\n")[0].split())
    return [f"## {group}", "", introduction, ""]


def entry_of_key(field: Field, explained: dict[str, str]) -> list[str]:
    """Makes the entry of a key: its meaning, then its facts in a line."""
    if not field.doc:
        raise SystemExit(
            f"{field.path} has no meaning: write a comment above its field, or behind it"
        )
    facts = [f"`{annotations.describe(field.type)}`", f"default `{field.default!r}`"]
    if field.may_change_on_resume:
        facts.append("may change on resume")
    page = explained.get(field.path)
    if page:
        facts.append(f"[{title_of(page)}](../{page})")
    meaning = f"{field.doc[0].upper()}{field.doc[1:]}"
    return [f"### {field.path}", "", meaning, "", " · ".join(facts), ""]


@functools.cache
def title_of(page: str) -> str:
    """Reads the title of a page."""
    return (DOCS / page).read_text().partition("\n")[0].removeprefix("# ")


def pages_of_keys() -> dict[str, str]:
    """Finds the page that explains each key: the one that names it most often.

    Returns:
        For each key that a page names, the page's path below docs/.
    """
    counts: dict[str, dict[str, int]] = {}
    for path in hand_written():
        text = (DOCS / path).read_text()
        for key in re.findall(
            r"(?:`|--config\.)([a-z_0-9]+(?:\.[a-z_0-9]+)*)[=`]", text
        ):
            of_key = counts.setdefault(key, {})
            of_key[path] = of_key.get(path, 0) + 1

    def rank(item: tuple[str, int]) -> tuple[int, int, str]:
        path, count = item
        return WHERE_KEYS_ARE_EXPLAINED.index(path.partition("/")[0]), -count, path

    return {key: min(found.items(), key=rank)[0] for key, found in counts.items()}


def hand_written() -> Iterator[str]:
    """Yields the paths of the pages that may explain a key."""
    for folder in WHERE_KEYS_ARE_EXPLAINED:
        for path in sorted((DOCS / folder).glob("*.md")):
            if "<!-- Written by" not in path.read_text():
                yield path.relative_to(DOCS).as_posix()


# --- commands -------------------------------------------------------------------------

COMMANDS_INTRODUCTION = f"""# Commands

{MARK.format(source="from the help of each command")}

Each command runs as `python -m jaxdist.NAME` and as `jaxdist NAME`.
[Exit codes](exit-codes-and-events.md) are the same for all of them.
"""


def commands_page() -> str:
    """Makes the page of commands: each one's purpose and its `--help`."""
    lines = [COMMANDS_INTRODUCTION]
    for name, purpose in COMMANDS.items():
        lines += [f"## {name}", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        for arguments in ([], *subcommands(name)):
            lines += ["```text", help_of(name, arguments), "```", ""]
    return "\n".join(lines)


def subcommands(name: str) -> list[list[str]]:
    """Lists the arguments that have a help of their own."""
    if name != "checkpoint":
        return []
    return [["list"], ["inspect"], ["verify"], ["diff"]]


def help_of(name: str, arguments: list[str]) -> str:
    """Prints a command's help, 88 columns wide, as a terminal shows it."""
    module = "checkpoint.__main__" if name == "checkpoint" else name
    command = importlib.import_module(f"jaxdist.{module}")
    written = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "90", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(written),
        contextlib.suppress(SystemExit),
    ):
        command.main([*arguments, "--help"])
    shown = written.getvalue().strip()
    if not shown.startswith(f"usage: jaxdist {name}"):
        raise RuntimeError(f"jaxdist {name} --help printed {shown!r}")
    return shown


# --- Python API -----------------------------------------------------------------------

API_INTRODUCTION = f"""# Python API

{MARK.format(source="from signatures and docstrings")}

These names are public: [versions](../project/versions.md) says how they may change.
[Use it as a library](../how-to/library.md) has examples.
"""


def api_page() -> str:
    """Makes the page of public functions and classes."""
    package = griffe.load(
        "jaxdist", search_paths=[str(ROOT)], docstring_parser="google"
    )
    lines = [API_INTRODUCTION, "## jaxdist", ""]
    for name in jaxdist.__all__:
        if name == "__version__":
            continue
        value = getattr(jaxdist, name)
        module = value.__module__.removeprefix("jaxdist.")
        lines += entry(f"jaxdist.{name}", package[f"{module}.{value.__name__}"])
    lines += ["## jaxdist.ops", "", "Functions of arrays for models of your own.", ""]
    for module, names in promised_ops().items():
        found = importlib.import_module(f"jaxdist.ops.{module}")
        for name in names:
            value = getattr(found, name)
            place = value.__module__.removeprefix("jaxdist.")
            lines += entry(f"jaxdist.ops.{module}.{name}", package[f"{place}.{name}"])
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def promised_ops() -> dict[str, list[str]]:
    """Reads the public names of each module of ops from the page of versions."""
    page = (DOCS / "project" / "versions.md").read_text()
    section = page.partition("### Ops\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", section, re.MULTILINE)
    if not rows:
        raise SystemExit("docs/project/versions.md lists no ops")
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def entry(name: str, found: griffe.Object | griffe.Alias) -> list[str]:
    """Makes the entry of a function or class: its signature and docstring."""
    lines = [f"### {name}", ""]
    if found.is_function:
        lines += ["```text", signature(name, found), "```", ""]
    lines += docstring(found)
    if found.is_class:
        if found.has_labels("dataclass"):
            lines += ["Its fields are explained in [config keys](config-keys.md).", ""]
        for method in found.members.values():
            if method.is_function and not method.name.startswith("_"):
                first = (
                    method.docstring.value.partition("\n\n")[0]
                    if method.docstring
                    else ""
                )
                shown = signature(method.name, method).replace("\n", " ")
                shown = re.sub(r"\(\s*(self,?\s*)?", "(", re.sub(r"\s+", " ", shown))
                shown = shown.replace(", )", ")")
                lines.append(f"- `{shown}`: {' '.join(first.split())}")
        lines.append("")
    return lines


def signature(name: str, found: griffe.Object | griffe.Alias) -> str:
    """Writes a function's signature, a parameter a line if there are several."""
    parameters: list[str] = []
    keyword_only = False
    for parameter in found.parameters:
        kind = parameter.kind
        text = parameter.name
        if kind is griffe.ParameterKind.var_positional:
            text, keyword_only = f"*{text}", True
        elif kind is griffe.ParameterKind.var_keyword:
            text = f"**{text}"
        elif kind is griffe.ParameterKind.keyword_only and not keyword_only:
            parameters.append("*")
            keyword_only = True
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not text.startswith("*"):
            text += f" = {parameter.default}"
        parameters.append(text)
    returns = f" -> {found.returns}" if found.returns is not None else ""
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= 88:
        return line
    return f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){returns}"


def docstring(found: griffe.Object | griffe.Alias) -> list[str]:
    """Makes Markdown of a docstring: its text, then arguments, result and errors."""
    if not found.docstring:
        raise SystemExit(f"{found.path} is public and has no docstring")
    lines: list[str] = []
    for section in found.docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.text:
            lines += [code_fenced(section.value), ""]
        elif section.kind is griffe.DocstringSectionKind.parameters:
            lines += ["**Arguments**", ""]
            lines += [f"- `{item.name}`: {one_line(item)}" for item in section.value]
            lines.append("")
        elif section.kind is griffe.DocstringSectionKind.returns:
            lines += ["**Returns** " + " ".join(one_line(i) for i in section.value), ""]
        elif section.kind is griffe.DocstringSectionKind.raises:
            lines += ["**Raises**", ""]
            lines += [
                f"- `{item.annotation}`: {one_line(item)}" for item in section.value
            ]
            lines.append("")
        elif section.kind is griffe.DocstringSectionKind.examples:
            code = "\n".join(text for _, text in section.value)
            lines += ["```text", code.strip(), "```", ""]
        else:
            lines += [f"**{section.title or section.kind.value.title()}**", ""]
            lines += [str(getattr(section.value, "description", section.value)), ""]
    return lines


def one_line(item: griffe.DocstringElement) -> str:
    """Joins the lines of an item's description."""
    return " ".join(item.description.split())


def code_fenced(text: str) -> str:
    """Puts fences around the indented code of a docstring."""
    out: list[str] = []
    fenced = False
    lines = text.splitlines()
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not fenced and not (out and out[-1].strip()):
            out.append("```text")
            fenced = True
        following = next((later for later in lines[number:] if later.strip()), "")
        if (
            fenced
            and not indented
            and (line.strip() or not following.startswith("    "))
        ):
            out.append("```")
            fenced = False
        out.append(line[4:] if fenced else line)
    return "\n".join([*out, "```"] if fenced else out)


# --- hardware -------------------------------------------------------------------------


def hardware_page() -> str:
    """Keeps the page's hand-written part and writes the tables behind its mark."""
    path = DOCS / "reference" / "hardware.md"
    kept, mark, _ = path.read_text().partition(CHIPS_BEGIN)
    if not mark:
        raise SystemExit(f"docs/reference/hardware.md has no line {CHIPS_BEGIN}")
    return f"{kept}{CHIPS_BEGIN}\n\n{chips_table()}\n"


def chips_table() -> str:
    """Makes the tables of chips and networks, with the source of each row."""
    lines = [
        "Numbers are per JAX device and in one direction. Peaks are dense. An empty cell is a",
        "number that nobody published. The tables come from `jaxdist/hardware/chips.py`.",
        "",
        "| chip | `--on` | peak TFLOP/s | memory GiB, GB/s | links | network, host GB/s |",
        "|---|---|---|---|---|---|",
        *[chip_row(chip) for chip in CHIPS],
        "",
        "| network | GB/s of a chip | source |",
        "|---|---|---|",
    ]
    for name, network in NETWORKS.items():
        rate = f"{network.bytes_per_s / 1e9:g}"
        lines.append(
            table_row([f"`{name}`", f"{network.name}, {rate}", network.source])
        )
    lines += ["", "Sources:", ""]
    lines += [f"- {chip.name}: {chip.source}" for chip in CHIPS]
    return "\n".join(lines)


def chip_row(chip: Chip) -> str:
    """Makes the row of a chip."""
    peaks = [f"{name} {peak / 1e12:g}" for name, peak in chip.peak_flops_per_s.items()]
    memory = f"{chip.hbm_bytes / 2**30:.1f}, {chip.hbm_bytes_per_s / 1e9:g}"
    links = f"{chip.num_links} x {chip.link}, {chip.link_bytes_per_s / 1e9:g} GB/s"
    outside = [
        f"{rate / 1e9:g} {what}"
        for what, rate in (
            (chip.network, chip.network_bytes_per_s),
            ("host", chip.pcie_bytes_per_s),
        )
        if rate
    ]
    target = f"`{chip.family}`" if chip.family else ""
    return table_row(
        [chip.name, target, ", ".join(peaks), memory, links, ", ".join(outside)]
    )


# --- pages from outside of docs/ ------------------------------------------------------


def copied_page(source: str) -> str:
    """Copies a page from outside of docs/; its links lead where they led.

    A link to a file that is no page of the site becomes the file's path.
    """
    target = posixpath.dirname(f"docs/{COPIED[source]}")

    def link(found: re.Match[str]) -> str:
        text, place, anchor = found[1], found[2], found[3] or ""
        if re.match(r"\w+:", place):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), place))
        if path in COPIED:
            path = f"docs/{COPIED[path]}"
        if not path.startswith("docs/"):
            return f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(path, target)}{anchor})"

    text = (ROOT / source).read_text()
    text = re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", link, text)
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{MARK.format(source=f'from {source}')}\n{rest}"


def table_row(cells: list[str]) -> str:
    """Writes a row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    for name, page in pages().items():
        (DOCS / name).write_text(page)
