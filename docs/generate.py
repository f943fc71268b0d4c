"""Writes docs/reference/config-keys.md, the reference of all config keys, from their schema.

`python docs/generate.py` from the project's root. A test compares the page with what
this writes.
"""

import inspect
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxdist.config import annotations  # noqa: E402
from jaxdist.config.schema import Field  # noqa: E402
from jaxdist.models import registry  # noqa: E402
from jaxdist.trainer.run_config import RunConfig, full_schema  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "config-keys.md"
INTRODUCTION = """# Config keys

<!-- Written by `python docs/generate.py` from the config classes. Do not edit. -->

Set a key with `--config.KEY=VALUE`. [Configuration](../how-to/configure.md) explains how.
A key with "yes" in the column *resume* may have another value when a run resumes. A
change of any other key is refused.
"""
TABLE_HEAD = [
    "| key | type | default | meaning | resume |",
    "|---|---|---|---|---|",
]
MODEL = "These are the options of jaxdist's transformer. Other models have their own."


def config_page() -> str:
    """Makes the page: a section for each group, with a row for each key."""
    groups: dict[str, list[Field]] = {}
    for path, field in full_schema(registry.DEFAULT_TARGET).items():
        group = path.rpartition(".")[0].partition(".")[0]
        groups.setdefault(group, []).append(field)
    lines = [INTRODUCTION]
    for group, fields in groups.items():
        lines += [*heading_of(group), *TABLE_HEAD]
        lines += [row_of(field) for field in fields]
        lines.append("")
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


def row_of(field: Field) -> str:
    """Makes the row of a key."""
    if not field.doc:
        raise SystemExit(
            f"{field.path} has no meaning: write a comment above its field, or behind it"
        )
    cells = [
        f"`{field.path}`",
        annotations.describe(field.type),
        f"`{field.default!r}`",
        field.doc,
        "yes" if field.may_change_on_resume else "",
    ]
    row = " | ".join(cell.replace("|", "\\|") for cell in cells)
    return f"| {row} |"


if __name__ == "__main__":
    PAGE.write_text(config_page())
