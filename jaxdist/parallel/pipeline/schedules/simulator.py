"""Simulation of schedules: time, bubble and live inputs; and their drawing.

The simulation runs in lockstep like the executor. In a tick every stage runs the ops
that any stage needs, at the pace of the slowest. A stage that needs no op computes chunk
0, and its result is masked.
"""

import dataclasses
import html
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxdist.parallel.pipeline.schedules.program import Program, compile_schedule
from jaxdist.parallel.pipeline.schedules.table import Schedule

# phases of a tick, in order
PHASES = ("embed", "forward", "head", "backward", "embed_backward", "hop")


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a microbatch, in any unit of time.

    The costs of edges (`embed`, `head`, `embed_backward`) are those of the whole
    vocabulary on one stage. Sharded edges divide them by the number of stages. With
    `last` every stage takes the whole time, because all wait for the stage that counts.
    """

    # forward pass of all chunks of a stage, or of each chunk [stages, chunks]
    forward: ArrayLike = 1.0
    backward: ArrayLike = 2.0  # like `forward`, with recomputation
    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    # forward pass of `first_blocks`, which every stage runs; the backward pass costs
    # three times as much
    first: float = 0.0
    hop: float = 0.0  # part of a hop that compute does not hide
    edges: Literal["sharded", "last"] = "sharded"


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """The result of `simulate`."""

    ticks: int
    time: float
    # 1 - work / (stages x time): idle, masked, uneven and repeated work, and hops
    bubble: float
    # inputs of chunks on each stage at the peak
    live_inputs: tuple[int, ...]
    phases: np.ndarray  # time, [ticks, PHASES]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulates a schedule.

    Args:
      schedule: the schedule, whose table is checked.
      costs: None: forward 1, backward 2.

    Raises:
      ConfigError: the table is not valid.
    """
    program = compile_schedule(schedule)
    costs = costs or Costs()
    forward = _by_chunk(costs.forward, schedule)
    backward = _by_chunk(costs.backward, schedule)
    phases = _phases(program, costs, forward, backward)
    edges = costs.embed + costs.head + costs.embed_backward + 4 * costs.first
    work = schedule.microbatches * (forward.sum() + backward.sum() + edges)
    time = float(phases.sum())
    bubble = 1 - float(work) / (schedule.stages * time)
    return Simulation(len(phases), time, bubble, program.live_inputs, phases)


def _by_chunk(cost: ArrayLike, schedule: Schedule) -> np.ndarray:
    """Converts costs to [stages, chunks] from one of the forms of `Costs`."""
    costs = np.asarray(cost, float)
    if costs.ndim == 0:
        costs = costs / schedule.chunks
    return np.broadcast_to(costs, (schedule.stages, schedule.chunks))


def _phases(
    program: Program, costs: Costs, forward: np.ndarray, backward: np.ndarray
) -> np.ndarray:
    """Computes the time of each phase in each tick, [ticks, PHASES].

    Args:
      program: the compiled schedule.
      costs: costs of edges and hops.
      forward: costs of the chunks' forward passes, [stages, chunks].
      backward: costs of the chunks' backward passes, [stages, chunks].
    """
    rows = program.rows
    ticks = program.ticks
    stages = program.schedule.stages
    stage = np.arange(stages)
    share = stages if costs.edges == "sharded" else 1
    slowest_f = forward[stage, rows.f_chunk].max(axis=1)
    slowest_b = backward[stage, rows.b_chunk].max(axis=1)
    columns = (  # in the order of PHASES
        ticks.any_embed * (costs.embed / share + costs.first),
        ticks.any_forward * slowest_f,
        ticks.any_head * costs.head / share,
        ticks.any_backward * slowest_b,
        ticks.any_embed_backward * (costs.embed_backward / share + 3 * costs.first),
        (ticks.any_hop * 1.0 + ticks.any_gradient_hop) * costs.hop,
    )
    return np.stack(columns, axis=1)


# --- Drawing --------------------------------------------------------------------------

# pixels
_ROW = 24
_LEFT = 64
_TOP = 30
_STYLE = (  # scoped to one class, because styles of an inline SVG hold for the page
    ".timeline text{font:11px system-ui,sans-serif;fill:#222}"
    "@media(prefers-color-scheme:dark){.timeline text{fill:#ddd}}"
    ".timeline text.n{fill:#fff;text-anchor:middle}"
    ".timeline .f{fill:#2f6fb7}.timeline .b{fill:#b3572a}.timeline .i{fill:#8882}"
)


def draw_svg(
    schedule: Schedule, costs: Costs | None = None, *, width: int = 960
) -> str:
    """Draws the timeline as an SVG element without external references.

    A row is a stage, and x is time. Forwards are blue, backwards orange, later chunks
    paler, and idle time grey.

    Args:
      schedule: the schedule, whose table is checked.
      costs: see `simulate`.
      width: width of the drawing in pixels.

    Raises:
      ConfigError: the table is not valid.
    """
    result = simulate(schedule, costs)
    ends = result.phases.cumsum().reshape(result.phases.shape)
    scale = (width - _LEFT) / result.time
    chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    title = html.escape(
        f"{schedule.name or 'schedule'}: {schedule.stages} stages, {schedule.microbatches} "
        f"microbatches{chunks} · {result.ticks} ticks, bubble {result.bubble:.1%}, "
        f"live inputs {max(result.live_inputs)}"
    )
    height = _TOP + _ROW * schedule.stages
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}"><title>{title}</title><style>{_STYLE}</style>'
        f'<text x="0" y="14">{title}</text>'
    ]
    for stage in range(schedule.stages):
        y = _TOP + _ROW * stage
        parts.append(f'<text x="0" y="{y + 14}">stage {stage}</text>')
        parts.append(
            f'<rect class="i" x="{_LEFT}" y="{y}" width="{width - _LEFT}" height="{_ROW - 4}"/>'
        )
    for tick, stage, slot in np.argwhere(schedule.table >= 0).tolist():
        phase = PHASES.index("backward" if slot else "forward")
        bar_width = result.phases[tick, phase] * scale
        chunk = schedule.table[tick, stage, slot] % schedule.chunks
        bar = _bar(
            css_class="fb"[slot],
            x=_LEFT + ends[tick, phase] * scale - bar_width,
            y=_TOP + _ROW * stage,
            width=bar_width,
            label=schedule.labels(tick, stage)[slot],
            opacity=1 - 0.15 * (chunk % 5),
        )
        parts.append(bar)
    return "".join(parts) + "</svg>\n"


def _bar(
    *, css_class: str, x: float, y: float, width: float, label: str, opacity: float
) -> str:
    """Draws a bar, with its label if that fits."""
    faint = f' opacity="{opacity:.2f}"' if opacity < 1 else ""
    bar = (
        f'<rect class="{css_class}" x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" '
        f'height="{_ROW - 4}"{faint}/>'
    )
    if width < 7 * len(label):
        return bar
    return bar + f'<text class="n" x="{x + width / 2:.1f}" y="{y + 14}">{label}</text>'
