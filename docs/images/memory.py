"""Draws the memory of docs/explanation/pipeline-executor.md.

`python docs/images/memory.py` writes beside itself.

The numbers are those of benchmarks/results/tpu-pipeline.json; a case that is not there
is left out.
"""

import html
import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu-pipeline.json"
LARGE = {
    "large 1f1b 8": "1f1b, m = 8",
    "large 1f1b 32": "1f1b, m = 32",
    "large interleaved 8": "interleaved, m = 8",
    "large interleaved 32": "interleaved, m = 32",
    "large gpipe 8": "gpipe, m = 8",
    "large gpipe 32": "gpipe, m = 32",
    "large 1f1b 8 remat=none": "1f1b, m = 8, remat=none",
    "large 1f1b 8 remat=full": "1f1b, m = 8, remat=full",
    "large 1f1b 8 gather_once=true": "1f1b, m = 8, gather_once",
    "large 1f1b 8 edges=last": "1f1b, m = 8, edges=last",
}
SMALL = {
    "quick 1f1b 8": "1f1b, m = 8",
    "quick 1f1b 32": "1f1b, m = 32",
    "quick gpipe 8": "gpipe, m = 8",
    "quick gpipe 32": "gpipe, m = 32",
    "quick 1f1b 8 edges=last": "1f1b, m = 8, edges=last",
}
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 760, 190, 90, 22, 26  # pixels
_STYLE = (
    ".memory text{font:12px system-ui,sans-serif;fill:#222}.memory .few{fill:#2f6fb7}"
    ".memory .many{fill:#b3572a}@media(prefers-color-scheme:dark){.memory text{fill:#ddd}}"
)


def bars(title: str, megabytes: dict[str, float], top: int) -> str:
    """Returns SVG shapes from `top` on: a bar for each label, in order; m = 32 in the
    other colour.
    """
    scale = (_WIDTH - _LEFT - _RIGHT) / max(megabytes.values())
    parts = [f'<text x="0" y="{top + 14}">{html.escape(title)}</text>']
    for row, (label, value) in enumerate(megabytes.items()):
        y, long = top + _TOP + _ROW * row, value * scale
        kind = "many" if "m = 32" in label else "few"
        parts.append(f'<text x="0" y="{y + 14}">{html.escape(label)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{long:.1f}" height="{_ROW - 5}"/>'
        )
        parts.append(
            f'<text x="{_LEFT + long + 6:.1f}" y="{y + 14}">{value:,.1f} MB</text>'
        )
    return "".join(parts)


def drawing(cases: dict) -> str:
    """Returns the chart of the cases of a record, by name, as one SVG element."""
    large, small = (
        {
            label: cases[name]["temp_bytes"] / 1e6
            for name, label in rows.items()
            if name in cases
        }
        for rows in (LARGE, SMALL)
    )
    below = _TOP + _ROW * len(large) + 14
    size = f'viewBox="0 0 {_WIDTH} {below + _TOP + _ROW * len(small)}"'
    title = "Temporary memory of a device: "
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="memory" {size} role="img" '
        f'aria-label="{title}"><style>{_STYLE}</style>'
        + bars(f"{title}TPU v5e:4x4, pipeline 4 x fsdp 4, 8 layers x 1024", large, 0)
        + bars(
            "TPU v5e:2x4, pipeline 4 x fsdp 2, 8 layers x 256, 256 tokens", small, below
        )
        + "</svg>\n"
    )


if __name__ == "__main__":
    record = json.loads(RESULTS.read_text())
    Path(__file__).with_name("pipeline_memory.svg").write_text(drawing(record["cases"]))
