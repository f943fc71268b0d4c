"""Draws the pictures of docs/tutorials and docs/get-started.

`python docs/images/tutorials.py` writes them beside itself, from the numbers of real runs
and plans in data/tutorials.json and in benchmarks/results.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = HERE / "data/tutorials.json"
SEARCH = HERE.parents[1] / "benchmarks/results/plan-search-llama3_8b-h100-1x8.json"

WIDTH = 760
PASTELS = (
    "#f4c7c3",
    "#fbe3b5",
    "#eef0b0",
    "#c9e8c0",
    "#bfe6e0",
    "#c3d9f4",
    "#d3c8f2",
    "#f0c6e6",
)
BLUE, ORANGE, GREEN, GREY, RED = "#2f6fb7", "#b3572a", "#3b8a4f", "#8a8f98", "#c0392b"
STYLE = (
    ".t text{font:13px system-ui,sans-serif;fill:#222}.t .n{fill:#666}"
    ".t .axis{stroke:#999;fill:none}.t .box{stroke:#475569}"
)


def svg(height: float, title: str, parts: Sequence[str]) -> str:
    """Wraps shapes in one SVG element with a title for people who cannot see it."""
    name = escape(title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="t" viewBox="0 0 {WIDTH} '
        f'{height:g}" role="img" aria-label="{name}"><title>{name}</title>'
        f"<style>{STYLE}</style>"
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#ffffff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Draws a line of text."""
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Draws a filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
        f'height="{height:g}" fill="{fill}"/>'
    )


def curves(
    title: str, lines: Sequence[tuple[str, str, str, list]], marks: dict[int, str]
) -> str:
    """Draws losses by step.

    Args:
        title: What is shown.
        lines: For each curve its name, colour, stroke attributes and [step, loss] pairs.
        marks: Steps to mark with a vertical line, with their text.
    """
    left, right, top, bottom = 46, 20, 34, 290
    points = [point for *_, values in lines for point in values]
    last = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def at(step: float, loss: float) -> tuple[float, float]:
        x = left + (WIDTH - left - right) * step / last
        return x, bottom - (bottom - top) * (loss - low) / (high - low)

    parts = [
        text(left, 18, title),
        f'<path class="axis" d="M{left},{top}V{bottom}H{WIDTH - right}"/>',
        text(4, top + 10, f"{high:.1f}"),
        text(4, bottom, f"{low:.1f}"),
        text(4, (top + bottom) / 2, "loss", 'class="n"'),
        text(left, bottom + 18, "0"),
        text(
            WIDTH - right, bottom + 18, f"step {last:,}", 'text-anchor="end" class="n"'
        ),
    ]
    for step, words in marks.items():
        x, _ = at(step, low)
        parts.append(
            f'<path d="M{x:.1f},{top}V{bottom}" stroke="{RED}" '
            f'stroke-dasharray="4 4"/>' + text(x + 6, top + 12, words)
        )
    for row, (name, colour, stroke, values) in enumerate(lines):
        path = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in (at(step, loss) for step, loss in values)
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" {stroke} points="{path}"/>'
        )
        y = top + 40 + 20 * row
        parts.append(bar(WIDTH - 190, y - 9, 22, 8, colour))
        parts.append(text(WIDTH - 160, y, name))
    return svg(bottom + 28, title, parts)


def grid(x: float, y: float, parts: Sequence[Sequence[str]], size: float) -> str:
    """Draws an array that is cut into rows and columns; each part names its devices.

    Args:
        x: Left edge.
        y: Upper edge.
        parts: The devices of each part, by row and column, the first as a digit.
        size: Width and height of the array.
    """
    rows, columns = len(parts), len(parts[0])
    shapes = []
    for i, row in enumerate(parts):
        for j, devices in enumerate(row):
            shapes.append(
                f'<rect class="box" x="{x + j * size / columns:.1f}" '
                f'y="{y + i * size / rows:.1f}" width="{size / columns:.1f}" '
                f'height="{size / rows:.1f}" fill="{PASTELS[int(devices[0])]}"/>'
            )
            shapes.append(
                text(
                    x + (j + 0.5) * size / columns,
                    y + (i + 0.5) * size / rows + 4,
                    devices,
                    'text-anchor="middle" style="fill:#222;font-size:11px"',
                )
            )
    return "".join(shapes)


def layouts(losses: dict[str, float]) -> str:
    """Draws a kernel and a batch on 8 devices, for three layouts, with their last loss."""
    columns = (
        ("data 8", "data", [["0 to 7"]], [[str(n)] for n in range(8)]),
        ("fsdp 8", "fsdp", [[str(n)] for n in range(8)], [[str(n)] for n in range(8)]),
        (
            "fsdp 4 x tensor 2",
            "tensor",
            [[str(2 * n), str(2 * n + 1)] for n in range(4)],
            [[f"{2 * n}, {2 * n + 1}"] for n in range(4)],
        ),
    )
    parts = []
    for place, (name, key, kernel, batch) in enumerate(columns):
        x = 20 + 250 * place
        parts.append(text(x, 20, name, 'font-weight="600"'))
        parts.append(text(x, 44, "kernel", 'class="n"'))
        parts.append(text(x + 120, 44, "batch", 'class="n"'))
        parts.append(grid(x, 52, kernel, 100))
        parts.append(grid(x + 120, 52, batch, 100))
        note = {
            "data": "each device: a copy, 1/8 batch",
            "fsdp": "each device: 1/8 and 1/8",
            "tensor": "pairs share 1/4 of the batch",
        }[key]
        parts.append(text(x, 174, note, 'class="n"'))
        parts.append(text(x, 194, f"loss of step 20: {losses[key]:.4f}"))
    parts.append(text(20, 218, "Numbers name devices.", 'class="n"'))
    return svg(
        228, "One kernel and one batch on eight devices, in three layouts", parts
    )


def own_model(parameters: Sequence[tuple[str, list, str]]) -> str:
    """Draws the kernels of the tutorial's module, split over fsdp 4 x tensor 2."""
    parts = [text(20, 20, "A module of your own on fsdp 4 x tensor 2")]
    for place, (name, shape, names) in enumerate(parameters):
        x = 20 + 250 * place
        cut = [[str(n + 2 * i) for i in range(4)] for n in range(2)]  # tensor x fsdp
        if names.startswith("d_model"):
            cut = [[str(2 * n + i) for i in range(2)] for n in range(4)]
        size = " x ".join(str(n) for n in shape)
        parts.append(text(x, 50, name, 'font-weight="600"'))
        parts.append(text(x, 70, f"{size}: {names}", 'class="n"'))
        parts.append(grid(x, 80, cut, 130))
    parts.append(
        text(20, 236, "Numbers name devices: each holds one eighth.", 'class="n"')
    )
    return svg(
        246, "The kernels of a module, one eighth on each of eight devices", parts
    )


def answers(rows: Sequence[Sequence[str]]) -> str:
    """Draws a question with the answers before and after fine-tuning."""
    parts = []
    y = 6
    for question, before, after in rows:
        parts.append(text(10, y + 18, question, 'font-weight="600"'))
        for words, colour, name in ((before, GREY, "before"), (after, GREEN, "after")):
            y += 30
            parts.append(bar(10, y, 5, 22, colour))
            parts.append(text(24, y + 16, name, 'class="n"'))
            parts.append(
                text(84, y + 16, words, 'style="font-family:ui-monospace,monospace"')
            )
        y += 36
    return svg(y + 4, "Answers before and after fine-tuning", parts)


def memory_bars(record: dict) -> str:
    """Draws the peaks of a search's layouts against the memory of a GPU."""
    rows = record["ranking"]
    limit = rows[0]["capacity_bytes"] / 2**30
    left, scale = 350, (WIDTH - 350 - 50) / 80
    parts = [text(0, 18, "Peak memory of a GPU: llama3_8b on h100:1x8")]
    for place, row in enumerate(rows):
        y = 34 + 30 * place
        gib = row["peak_bytes"] / 2**30
        name = row["layout"].replace(
            "save:attention_residuals+offload:block_input,query,key,value,"
            "attention_projection",
            "offload",
        )
        parts.append(text(0, y + 15, name.replace(", remat ", ", ")))
        parts.append(bar(left, y, gib * scale, 20, BLUE if row["fits"] else RED))
        step = f"{row['step_s']:.2f} s" if row["fits"] else "does not fit"
        words = f"{gib:.1f} GiB, {step}"
        parts.append(text(left + 8, y + 15, words, 'style="fill:#fff"'))
    bottom = 34 + 30 * len(rows)
    x = left + limit * scale
    parts.append(
        f'<path d="M{x:.1f},28V{bottom}" stroke="{RED}" stroke-width="2" '
        f'stroke-dasharray="5 4"/>'
        + text(x, bottom + 18, f"limit {limit:.1f} GiB", 'text-anchor="middle"')
    )
    return svg(bottom + 28, "Peak memory of six layouts against the limit", parts)


PARTS = (
    ("compute", BLUE),
    ("attention", GREEN),
    ("recompute", ORANGE),
    ("bubble", GREY),
    ("exposed communication", RED),
)


def step_time(plans: Sequence[tuple[str, dict, float]]) -> str:
    """Draws planned steps as sums of their parts, with MFU."""
    left = 210
    scale = (WIDTH - left - 130) / max(sum(parts.values()) for _, parts, _ in plans)
    shapes = [text(0, 18, "Where the time of a planned step goes, in seconds")]
    for place, (name, seconds, mfu) in enumerate(plans):
        y = 36 + 44 * place
        shapes.append(text(0, y + 18, name))
        x = left
        for part, colour in PARTS:
            long = seconds.get(part, 0) * scale
            if long:
                shapes.append(bar(x, y, long, 28, colour))
                x += long
        total = sum(seconds.values())
        shapes.append(text(x + 8, y + 18, f"{total:.2f} s, MFU {100 * mfu:.0f} %"))
    y = 36 + 44 * len(plans) + 8
    x = 0
    for part, colour in PARTS:
        shapes.append(bar(x, y, 14, 14, colour))
        shapes.append(text(x + 20, y + 12, part))
        x += 60 + 8 * len(part)
    return svg(y + 26, "Planned step times as sums of their parts", shapes)


def draw_all() -> dict[str, str]:
    """Makes all pictures; the keys are their names."""
    runs = json.loads(RUNS.read_text())
    whole, killed, again = (
        runs["survives"][key] for key in ("whole", "killed", "again")
    )
    return {
        "first_model": curves(
            "quickstart: training loss in nats per byte",
            [
                ("training", BLUE, 'stroke-width="1.5"', runs["first_model"]["train"]),
                (
                    "held out",
                    ORANGE,
                    'stroke-width="3"',
                    runs["first_model"]["held_out"],
                ),
            ],
            {runs["first_model"]["stopped_at"]: "stopped, resumed"},
        ),
        "own_model": own_model(runs["own_model"]),
        "layouts": layouts(runs["layouts"]),
        "answers": answers(runs["answers"]),
        "survives": curves(
            "The same losses with and without a kill",
            [
                ("never killed", GREY, 'stroke-width="7" opacity="0.4"', whole),
                ("until the kill", BLUE, 'stroke-width="2"', killed),
                ("after the restart", ORANGE, 'stroke-width="2"', again),
            ],
            {runs["survives"]["killed_at"]: "kill -9"},
        ),
        "choose_layout": memory_bars(json.loads(SEARCH.read_text())),
        "mfu": step_time(runs["mfu"]),
    }


if __name__ == "__main__":
    for name, picture in draw_all().items():
        (HERE / f"{name}.svg").write_text(picture)
