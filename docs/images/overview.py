"""Draws the first picture of README and Home: a model, eight devices, two equal curves.

`python docs/images/overview.py` writes overview.svg beside itself. The losses are in
data/overview.json, from two runs:

    jaxdist train --config quickstart --workdir one --config.train.steps=120 \
        --config.train.log_every=2
    XLA_FLAGS=--xla_force_host_platform_device_count=8 jaxdist train --config quickstart \
        --workdir eight --config.train.steps=120 --config.train.log_every=2 \
        --config.mesh.data=2 --config.mesh.fsdp=2 --config.mesh.tensor=2
"""

import json
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 900, 300
INK, SOFT, BLUE, ORANGE = "#0f172a", "#64748b", "#2563eb", "#ea580c"
SHADES = ("#dbeafe", "#bfdbfe", "#fed7aa", "#fdba74")
CODE = """\
class Model(nnx.Module):
  def __init__(self, *, rngs):
    self.up = nnx.Param(
      normal(rngs, (D, F)),
      logical=("d_model", "d_ff"))
    ...
  def loss(self, batch, key):
    x = self(batch["tokens"])
    each = cross_entropy(x, batch)
    return each.sum(), each.size"""


def text(x: float, y: float, content: str, more: str = "") -> str:
    """Writes a line of text."""
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(content)}</text>'


def model() -> list[str]:
    """Draws the model's code, and where it comes from."""
    lines = [
        text(20, 30, "A model for one device", 'font-weight="600"'),
        f'<rect x="20" y="44" width="262" height="206" rx="8" fill="#f8fafc" stroke="{SOFT}"/>',
    ]
    for number, line in enumerate(CODE.splitlines()):
        indent = len(line) - len(line.lstrip())
        more = 'font-family="ui-monospace,Menlo,monospace" font-size="12"'
        lines.append(text(32 + 7.2 * indent, 68 + 19 * number, line.lstrip(), more))
    return lines


def devices() -> list[str]:
    """Draws a kernel's parts on a mesh of data 2, fsdp 2 and tensor 2."""
    lines = [text(330, 30, "Its parameters on eight devices", 'font-weight="600"')]
    for replica in range(2):
        top = 62 + 104 * replica
        lines.append(
            text(330, top - 6, f"data {replica}", f'font-size="12" fill="{SOFT}"')
        )
        for row in range(2):
            for column in range(2):
                x, y = 330 + 112 * column, top + 42 * row
                shade = SHADES[2 * column + row]
                lines.append(
                    f'<rect x="{x}" y="{y}" width="106" height="36" rx="6" '
                    f'fill="{shade}" stroke="{SOFT}"/>'
                )
                name = f"fsdp {row}, tensor {column}"
                lines.append(
                    text(x + 53, y + 23, name, 'text-anchor="middle" font-size="12"')
                )
    lines.append(
        text(
            330, 268, "equal colors hold equal numbers", f'font-size="12" fill="{SOFT}"'
        )
    )
    return lines


def curves() -> list[str]:
    """Draws the losses of one device and of eight."""
    data = json.loads((HERE / "data/overview.json").read_text())
    left, right, top, bottom = 640, 880, 52, 236
    last, highest = data["steps"][-1], 6.0

    def path(losses: list[float]) -> str:
        return " ".join(
            f"{left + (right - left) * step / last:.1f},"
            f"{bottom - (bottom - top) * loss / highest:.1f}"
            for step, loss in zip(data["steps"], losses, strict=True)
        )

    gap = max(abs(a - b) for a, b in zip(data["one"], data["eight"], strict=True))
    return [
        text(620, 30, "Equal losses", 'font-weight="600"'),
        f'<path d="M{left},{top} V{bottom} H{right}" fill="none" stroke="{SOFT}"/>',
        f'<polyline points="{path(data["one"])}" fill="none" stroke="{BLUE}" '
        'stroke-width="6" stroke-opacity="0.45"/>',
        f'<polyline points="{path(data["eight"])}" fill="none" stroke="{ORANGE}" '
        'stroke-width="1.8" stroke-dasharray="6 4"/>',
        f'<line x1="720" y1="74" x2="748" y2="74" stroke="{BLUE}" stroke-width="6" '
        'stroke-opacity="0.45"/>',
        text(756, 78, "one device", 'font-size="12"'),
        f'<line x1="720" y1="94" x2="748" y2="94" stroke="{ORANGE}" stroke-width="1.8" '
        'stroke-dasharray="6 4"/>',
        text(756, 98, "eight devices", 'font-size="12"'),
        text(634, top + 4, "6", f'text-anchor="end" font-size="12" fill="{SOFT}"'),
        text(634, bottom, "0", f'text-anchor="end" font-size="12" fill="{SOFT}"'),
        text(
            right,
            252,
            f"step {last}",
            f'text-anchor="end" font-size="12" fill="{SOFT}"',
        ),
        text(
            620, 268, f"largest difference {gap:.0e}", f'font-size="12" fill="{SOFT}"'
        ),
    ]


def draw() -> str:
    """Makes the picture as SVG."""
    arrows = [
        f'<path d="M{x},150 h26 m-7,-5 l7,5 l-7,5" fill="none" stroke="{INK}" stroke-width="1.6"/>'
        for x in (293, 571)
    ]
    body = [*model(), *devices(), *curves(), *arrows]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui,sans-serif" font-size="14" fill="{INK}" role="img">\n'
        "<title>A model for one device, its parameters on eight devices, equal losses</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (HERE / "overview.svg").write_text(draw())
