"""What the page, and the status, say of a run's experts: how even their load is, layer
by layer.
"""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from jaxdist.operations.page.heat_map import heat_map, legend
from jaxdist.operations.page.summary import RunSummary, number, sizes
from jaxdist.telemetry.metrics import Row
from jaxdist.telemetry.units import count_text

LOAD = "stats/expert_load"  # of rows of arrays.jsonl, [L, E]
# Field of metrics.jsonl with /mean, /min and /max of the layers, title, remark, factor,
# unit.
FIELDS = (
    (
        "stats/load_max_over_mean",
        "Fullest expert",
        "load relative to the mean of its layer",
        1.0,
        "×",
    ),
    ("stats/load_entropy", "Entropy of the load", "1: even", 1.0, ""),
    (
        "stats/dead_experts",
        "Dead experts",
        "of a layer, chosen by no token of the step",
        1.0,
        "",
    ),
    ("stats/dropped", "Dropped", "% of choices, by model.capacity_factor", 100.0, "%"),
    (
        "stats/exchange_rounds",
        "Exchange rounds",
        "1: no device waited for a fuller one",
        1.0,
        "",
    ),
)
NOT_CHARTED = (LOAD, "stats/fullest_layer")


_MOST_STEPS = 200  # of a map; a run writes some 50
_MOST_CELLS = 1 << 16  # more than a step writes


def is_of_experts(field: str) -> bool:
    """Returns whether a field of metrics.jsonl has its place in the charts of experts,
    or in none.
    """
    return any(
        field.startswith(name) for name in (*(row[0] for row in FIELDS), *NOT_CHARTED)
    )


def heat_maps(run: RunSummary) -> str:
    """Returns the load of all experts in the last step that was kept, and of the
    fullest ones over time.
    """
    steps = [
        (row["step"], shares)
        for row in run.arrays
        if (shares := relative_load(row)) is not None
    ]
    steps = [item for item in steps if len(item[1]) == len(steps[-1][1])]
    if not steps:
        return ""
    step, last = steps[-1]
    steps = steps[:: -(-len(steps) // _MOST_STEPS)]
    cells = [
        (x, layer, expert)
        for layer, row in enumerate(last)
        for expert, x in enumerate(row or ())
    ]
    most, layer, expert = max(cells)
    wide, high = len(cells) // sum(row is not None for row in last), len(last)
    label = f"Load of {wide} experts in {high} layers at step {step}, relative to the mean. "
    label += f"The fullest: expert {expert} of layer {layer}, {most:.3g} times the mean"
    remark = f"at step {step:,}, relative to the mean of the layer"
    drawing = heat_map(
        label, [row or [None] * wide for row in last], rows="layer", columns="expert"
    )
    cards = _card("Load of each expert", remark, drawing)
    if len(steps) > 1:
        rows = [
            [max(row) if (row := shares[y]) else None for _, shares in steps]
            for y in range(high)
        ]
        label = f"Load of the fullest expert in {high} layers over {len(steps)} steps"
        drawing = heat_map(
            label,
            rows,
            rows="layer",
            columns="step",
            places=[step for step, _ in steps],
        )
        cards += _card(
            "Fullest expert of each layer",
            "over the steps, relative to the mean",
            drawing,
        )
    return f'<section class="charts" aria-label="Load of experts">{cards}</section>'


def _card(title: str, remark: str, drawing: str) -> str:
    return (
        f'<div class="card wide"><div class="top"><h3>{escape(title)}</h3>'
        f'<span class="soft">{escape(remark)}</span><span class="push">{legend()}</span></div>'
        f"{drawing}</div>"
    )


def relative_load(row: Row) -> list[list[float] | None] | None:
    """Returns each layer's load relative to its mean, from a row of arrays.jsonl; None
    if it has none.

    A layer without any load is None: it is dense.
    """
    layers = row.get(LOAD)
    if not isinstance(layers, list) or not all(
        isinstance(layer, list) for layer in layers
    ):
        return None
    if (
        not 0 < sum(map(len, layers)) <= _MOST_CELLS
        or len({len(layer) for layer in layers}) != 1
    ):
        return None
    numbers = [number(x) for layer in layers for x in layer]
    loads = [x for x in numbers if x is not None and 0 <= x < 2**53]
    if len(loads) < len(numbers) or not any(loads):
        return None
    wide = len(layers[0])
    rows = [loads[i : i + wide] for i in range(0, len(loads), wide)]
    return [[x * wide / sum(row) for x in row] if any(row) else None for row in rows]


def figures(row: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns how even the load of a row of metrics.jsonl is; None where there are no
    experts.
    """
    fields = {
        "max_over_mean": "stats/load_max_over_mean/max",
        "layer": "stats/fullest_layer",
        "dead": "stats/dead_experts/max",
        "entropy": "stats/load_entropy/mean",
        "dropped": "stats/dropped/mean",
        "rounds": "stats/exchange_rounds/mean",
    }
    values = {name: number(row.get(field)) for name, field in fields.items()}
    known = {
        name: x for name, x in values.items() if x is not None and math.isfinite(x)
    }
    if len(known) < len(fields):
        return None
    return known | {name: int(known[name]) for name in ("layer", "dead")}


def closing_lines(run: RunSummary) -> list[str]:
    """Returns what is said of a run's experts at its end."""
    known = [said for row in run.rows.train[-1:] if (said := figures(row))]
    return [f"experts: {as_line(said)}" for said in known] + [
        f"model: {t}" for t in size_text(sizes(run.info))
    ]


def size_text(of: Mapping[str, float | None]) -> list[str]:
    """Returns how much of a model a token uses (`summary.sizes`); [] where that is all
    of it.
    """
    total, active, flops = (
        of[name] for name in ("parameters", "active_parameters", "flops_per_token")
    )
    if total is None or active is None or active >= total:
        return []
    by = f"; MFU by {count_text(flops)} FLOPs a token" if flops is not None else ""
    return [
        f"{count_text(total)} parameters, {count_text(active)} active for a token{by}"
    ]


def as_line(of: Mapping[str, float]) -> str:
    """Returns the figures in words."""
    dropped = f"{100 * of['dropped']:.2g} %" if of["dropped"] else "0"
    dead = f"up to {of['dead']:.0f} of a layer" if of["dead"] else "0"
    return (
        f"fullest {of['max_over_mean']:.2f}x the mean (layer {of['layer']:.0f}), {dead} dead, "
        f"{dropped} dropped, {of['rounds']:.2f} rounds"
    )
