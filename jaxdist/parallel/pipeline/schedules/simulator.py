"""Simulates a schedule: its time, its bubble, the inputs it keeps; and draws it.

Lockstep with uniform flags, as the executor runs: in a tick every stage does what any
stage does, at the pace of the slowest, and a stage without an op computes chunk 0 for
nothing.
"""

import dataclasses
import html
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxdist.parallel.pipeline.schedules.program import Program, compile_schedule
from jaxdist.parallel.pipeline.schedules.table import Schedule

# in order, of a tick
PHASES = ("embed", "forward", "head", "backward", "embed_backward", "hop")


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one microbatch costs, in any one unit of time.

    `forward` and `backward` (with its recomputation): a number, for all chunks of a
    stage together, or [stages, chunks] for each chunk. `embed`, `head`,
    `embed_backward`: of the whole vocabulary on one stage; sharded edges divide it by
    the stages, `last` makes every stage pay all of it, as all wait for the stage that
    has it. `first`: of layers that every stage does where the embedding is, forward;
    backward it is three times as much. `hop`: what of one hop is not hidden.
    """

    forward: ArrayLike = 1.0
    backward: ArrayLike = 2.0
    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    first: float = 0.0
    hop: float = 0.0
    edges: Literal["sharded", "last"] = "sharded"


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """What `simulate` finds."""

    ticks: int
    time: float
    # 1 - work / (stages x time): idle, masked, uneven and repeated work, and hops
    bubble: float
    # at the peak, by stage, in stage inputs (of one chunk each)
    live_inputs: tuple[int, ...]
    phases: np.ndarray  # time, [ticks, PHASES]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Returns time, bubble and peak live inputs of a schedule (forward 1, backward 2).

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
    """Returns costs [stages, chunks] from one of the forms that Costs allows."""
    each = np.asarray(cost, float) / (schedule.chunks if np.ndim(cost) == 0 else 1)
    return np.broadcast_to(each, (schedule.stages, schedule.chunks))


def _phases(
    program: Program, costs: Costs, forward: np.ndarray, backward: np.ndarray
) -> np.ndarray:
    rows = program.rows
    ticks = program.ticks
    stages = program.schedule.stages
    stage = np.arange(stages)
    share = stages if costs.edges == "sharded" else 1
    slowest_f = forward[stage, rows.f_chunk].max(axis=1)
    slowest_b = backward[stage, rows.b_chunk].max(axis=1)
    columns = (  # as PHASES
        ticks.any_embed * (costs.embed / share + costs.first),
        ticks.any_forward * slowest_f,
        ticks.any_head * costs.head / share,
        ticks.any_backward * slowest_b,
        ticks.any_embed_backward * (costs.embed_backward / share + 3 * costs.first),
        (ticks.any_hop * 1.0 + ticks.any_gradient_hop) * costs.hop,
    )
    return np.stack(columns, axis=1)


# A picture
# ----------------------------------------------------------------------------------------

# pixels
_ROW = 24
_LEFT = 64
_TOP = 30
_STYLE = (  # below one class, as styles of an inline SVG hold for the whole page
    ".timeline text{font:11px system-ui,sans-serif;fill:#222}"
    "@media(prefers-color-scheme:dark){.timeline text{fill:#ddd}}"
    ".timeline text.n{fill:#fff;text-anchor:middle}"
    ".timeline .f{fill:#2f6fb7}.timeline .b{fill:#b3572a}.timeline .i{fill:#8882}"
)


def draw_svg(
    schedule: Schedule, costs: Costs | None = None, *, width: int = 960
) -> str:
    """Returns the timeline as one SVG element without outside references.

    A row is a stage, x is time: forwards blue, backwards orange, later chunks paler,
    idle grey.

    Raises:
      ConfigError: an invalid table has no timeline.
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
        long = result.phases[tick, phase] * scale
        left = _LEFT + ends[tick, phase] * scale - long
        label = schedule.labels(tick, stage)[slot]
        chunk = schedule.table[tick, stage, slot] % schedule.chunks
        parts.append(
            _box(
                "fb"[slot],
                left,
                _TOP + _ROW * stage,
                long,
                label,
                1 - 0.15 * (chunk % 5),
            )
        )
    return "".join(parts) + "</svg>\n"


def _box(
    kind: str, x: float, y: float, width: float, label: str, opacity: float
) -> str:
    """Returns a bar, with its label where that fits."""
    faint = f' opacity="{opacity:.2f}"' if opacity < 1 else ""
    bar = (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" '
        f'height="{_ROW - 4}"{faint}/>'
    )
    if width < 7 * len(label):
        return bar
    return bar + f'<text class="n" x="{x + width / 2:.1f}" y="{y + 14}">{label}</text>'
