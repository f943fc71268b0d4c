"""Draws the timelines of docs/how-to/pipelines.md: `python docs/images/timelines.py` writes
beside itself.

A backward is three forwards long, since it computes its stage again; head and hops are
left out.
"""

from pathlib import Path

from jaxdist.parallel.pipeline.schedules.simulator import Costs, draw_svg
from jaxdist.parallel.pipeline.schedules.table import build_schedule

PICTURES = {
    "gpipe": ("gpipe", 4, 8, 1),
    "1f1b": ("1f1b", 4, 8, 1),
    "interleaved": ("interleaved", 4, 8, 2),
}

if __name__ == "__main__":
    for name, sizes in PICTURES.items():
        drawing = draw_svg(build_schedule(*sizes), Costs(forward=1.0, backward=3.0))
        Path(__file__).with_name(f"{name}.svg").write_text(drawing)
