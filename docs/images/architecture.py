"""Draws core, wings and roots for docs/project/architecture.md.

`python docs/images/architecture.py` writes architecture.svg beside itself.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOTS = "train  fit  plan  verify  evaluate  generate  convert  launch  report  runs  status  doctor"
WINGS = {
    "planning": ("planner", "verification"),
    "operations": ("operations",),
    "interop": ("interop", "evaluation", "inference"),
}
# From the top down: a folder imports only folders of rows below it, or of its own row to
# its right.
CORE = (
    (("trainer", "config, loop, callbacks, resume"),),
    (("models", "transformer, vision, LoRA"), ("objectives", "pairs of answers"), ("step", "gradients, update, state")),
    (("ops", "attention, experts, matmul, loss"), ("checkpoint", "manager, manifest, Orbax")),
    (("parallel", "mesh, sharding, pipeline"), ("optim", "optimizers, schedules"), ("data", "sources to batches")),
    (("distributed", "join, agree"), ("protocols", "model, objective, names"), ("telemetry", "rows, FLOPs, clock")),
    (("hardware", "chips, links"), ("storage", "atomic files, locks"), ("config", "errors, schema")),
)  # fmt: skip

WIDTH = 860
MARGIN = 20
GAP = 10
ROW = 46


@dataclass(frozen=True)
class Box:
    """A rectangle, its heading and a line below it."""

    x: float
    y: float
    width: float
    height: float
    heading: str
    text: str = ""
    fill: str = "#ffffff"

    def svg(self) -> str:
        """Returns the box as SVG elements."""
        middle = self.x + self.width / 2
        first = self.y + (self.height / 2 - 3 if self.text else self.height / 2 + 5)
        lines = [
            f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" '
            f'height="{self.height:g}" rx="6" fill="{self.fill}" stroke="#475569"/>',
            f'<text x="{middle:g}" y="{first:g}" text-anchor="middle" '
            f'font-weight="600">{escape(self.heading)}</text>',
        ]
        if self.text:
            lines.append(
                f'<text x="{middle:g}" y="{first + 17:g}" text-anchor="middle" '
                f'font-size="12" fill="#475569">{escape(self.text)}</text>'
            )
        return "\n".join(lines)


def split_row(
    y: float, cells: int, left: float, width: float
) -> list[tuple[float, float]]:
    """Returns position and width of each of some equal cells beside each other."""
    size = (width - GAP * (cells - 1)) / cells
    return [(left + cell * (size + GAP), size) for cell in range(cells)]


def draw() -> str:
    """Returns the picture as SVG."""
    inner = WIDTH - 2 * MARGIN
    boxes = [Box(MARGIN, 20, inner, ROW, "roots", ROOTS, "#fef3c7")]
    notes = [(86, "Only roots put core and wings together.")]
    for (x, width), (wing, rooms) in zip(
        split_row(100, len(WINGS), MARGIN, inner), WINGS.items(), strict=True
    ):
        boxes.append(
            Box(x, 100, width, ROW, f"wing: {wing}", "  ".join(rooms), "#dbeafe")
        )
    notes.append((166, "A wing stands on the core and knows no other wing."))
    top = 180
    height = 30 + len(CORE) * (ROW + GAP)
    core = Box(MARGIN, top, inner, height, "", "", "#f0fdf4")
    y = top + 30
    rows = []
    for row in CORE:
        cells = split_row(y, len(row), MARGIN + GAP, inner - 2 * GAP)
        for (x, width), (room, text) in zip(cells, row, strict=True):
            rows.append(Box(x, y, width, ROW, room, text))
        y += ROW + GAP
    total = top + height + 34
    notes.append(
        (
            total - 12,
            "The core trains, saves and resumes by itself. Folders import downwards.",
        )
    )
    elements = [box.svg() for box in (*boxes, core, *rows)]
    elements.append(
        f'<text x="{WIDTH / 2:g}" y="{top + 20}" text-anchor="middle" font-weight="600">core</text>'
    )
    elements += [
        f'<text x="{WIDTH / 2:g}" y="{y:g}" text-anchor="middle" font-size="12" '
        f'fill="#475569">{escape(text)}</text>'
        for y, text in notes
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:g}" '
        f'font-family="sans-serif" font-size="15">\n'
        f'<rect width="{WIDTH}" height="{total:g}" fill="#ffffff"/>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
