"""Load of a run's experts by layer, for the page, the status and the end of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.operations.page.curves import Field, card
from jaxdist.operations.page.heat_map import heat_map, legend
from jaxdist.operations.page.run_files import finite
from jaxdist.operations.page.summary import RunSummary, sizes
from jaxdist.storage import untrusted
from jaxdist.telemetry.metrics import Row
from jaxdist.telemetry.units import count_text

LOAD = "stats/expert_load"  # field of arrays.jsonl, [layers, experts]
# fields with /mean, /min and /max over the layers
FIELDS = (
    Field(
        "stats/load_max_over_mean",
        "Fullest expert",
        "load relative to the mean of its layer",
        unit="×",
    ),
    Field("stats/load_entropy", "Entropy of the load", "1: even"),
    Field(
        "stats/dead_experts",
        "Dead experts",
        "of a layer, chosen by no token of the step",
    ),
    Field(
        "stats/dropped",
        "Dropped",
        "% of choices, by model.capacity_factor",
        factor=100.0,
        unit="%",
    ),
    Field(
        "stats/exchange_rounds",
        "Exchange rounds",
        "1: no device waited for a fuller one",
    ),
)
# prefixes of all fields about experts
_PREFIXES = (*(field.name for field in FIELDS), LOAD, "stats/fullest_layer")
_MAX_STEPS = 200  # most columns of a map; a run writes some 50 steps
_MAX_CELLS = 1 << 16  # most cells of a map; a step writes fewer

# Load of each expert relative to its layer's mean, by layer; a dense layer has None.
Loads = list[list[float] | None]


def is_about_experts(field: str) -> bool:
    """Checks if a field of metrics.jsonl is about experts: other charts skip it."""
    return field.startswith(_PREFIXES)


def heat_maps(run: RunSummary) -> str:
    """Draws the load of all experts at the last step, and of the fullest by step."""
    steps = []
    for row in run.arrays:
        loads = relative_load(row)
        if loads is not None:
            steps.append((row["step"], loads))
    if not steps:
        return ""
    step, loads = steps[-1]
    cards = _last_map(step, loads)
    steps = [item for item in steps if len(item[1]) == len(loads)]
    if len(steps) > 1:
        stride = -(-len(steps) // _MAX_STEPS)
        cards += _map_over_time(steps[::stride])
    return f'<section class="charts" aria-label="Load of experts">{cards}</section>'


def _last_map(step: int, loads: Loads) -> str:
    cells = [
        (load, layer, expert)
        for layer, row in enumerate(loads)
        for expert, load in enumerate(row or ())
    ]
    highest, layer, expert = max(cells)
    num_experts = next(len(row) for row in loads if row is not None)
    label = (
        f"Load of {num_experts} experts in {len(loads)} layers at step {step}, relative to "
        f"the mean. The fullest: expert {expert} of layer {layer}, {highest:.3g} times "
        f"the mean"
    )
    dense: list[float | None] = [None] * num_experts
    values = [row or dense for row in loads]
    drawing = heat_map(label, values, rows="layer", columns="expert")
    remark = f"at step {step:,}, relative to the mean of the layer"
    return _card("Load of each expert", remark, drawing)


def _map_over_time(steps: Sequence[tuple[int, Loads]]) -> str:
    layers = zip(*(loads for _, loads in steps), strict=True)
    fullest = [[max(row) if row else None for row in layer] for layer in layers]
    drawing = heat_map(
        f"Load of the fullest expert in {len(fullest)} layers over {len(steps)} steps",
        fullest,
        rows="layer",
        columns="step",
        places=[step for step, _ in steps],
    )
    remark = "over the steps, relative to the mean"
    return _card("Fullest expert of each layer", remark, drawing)


def _card(title: str, remark: str, drawing: str) -> str:
    scale = f'<span class="push">{legend()}</span>'
    return card(title, remark, scale, f'<div class="map">{drawing}</div>', is_wide=True)


def relative_load(row: Row) -> Loads | None:
    """Computes the loads relative to the mean of each layer.

    Args:
      row: a row of arrays.jsonl.

    Returns:
      The loads; None if the row has none.
    """
    layers = row.get(LOAD)
    if not isinstance(layers, list):
        return None
    if not all(
        isinstance(layer, list) and len(layer) == len(layers[0]) for layer in layers
    ):
        return None
    loads = [load for layer in layers for load in layer]
    if not 0 < len(loads) <= _MAX_CELLS or not any(loads):
        return None
    if not all(untrusted.is_amount(load, 2**53) for load in loads):
        return None
    return [
        [load * len(layer) / sum(layer) for load in layer] if any(layer) else None
        for layer in layers
    ]


def figures(row: Mapping[str, Any]) -> dict[str, float] | None:
    """Reads the figures of the load from a row of metrics.jsonl.

    Returns:
      The figures; None if the model has no experts.
    """
    values = {
        "max_over_mean": finite(row.get("stats/load_max_over_mean/max")),
        "layer": finite(row.get("stats/fullest_layer")),
        "dead": finite(row.get("stats/dead_experts/max")),
        "entropy": finite(row.get("stats/load_entropy/mean")),
        "dropped": finite(row.get("stats/dropped/mean")),
        "rounds": finite(row.get("stats/exchange_rounds/mean")),
    }
    known = {name: value for name, value in values.items() if value is not None}
    if len(known) < len(values):
        return None
    for name in ("layer", "dead"):
        known[name] = int(known[name])
    return known


def closing_lines(run: RunSummary) -> list[str]:
    """Formats the lines about experts that a run prints at its end."""
    lines = []
    load = figures(run.last_row)
    if load:
        lines.append(f"experts: {as_line(load)}")
    return lines + [f"model: {text}" for text in size_text(sizes(run.info))]


def size_text(sizes: Mapping[str, Any]) -> list[str]:
    """Formats the part of a model that a token uses, as a line; [] if it is the whole.

    Args:
      sizes: sizes with the keys of `summary.sizes`.
    """
    total = sizes["parameters"]
    active = sizes["active_parameters"]
    flops = sizes["flops_per_token"]
    if total is None or active is None or active >= total:
        return []
    text = f"{count_text(total)} parameters, {count_text(active)} active for a token"
    if flops is not None:
        text += f"; MFU by {count_text(flops)} FLOPs a token"
    return [text]


def as_line(figures: Mapping[str, float]) -> str:
    """Formats the figures of the load as a line."""
    dropped = "0"
    if figures["dropped"]:
        dropped = f"{100 * figures['dropped']:.2g} %"
    dead = "0"
    if figures["dead"]:
        dead = f"up to {figures['dead']:.0f} of a layer"
    return (
        f"fullest {figures['max_over_mean']:.2f}x the mean (layer "
        f"{figures['layer']:.0f}), {dead} dead, {dropped} dropped, "
        f"{figures['rounds']:.2f} rounds"
    )
