"""One self-contained HTML page of a run, or of two runs overlaid. No jax, no network, no files.

Everything read from a workdir is text of unknown origin: all of it is escaped, and the page's own
content security policy forbids every script but ours and every outside resource.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources

from jaxdist import config
from jaxdist.telemetry import metrics
from jaxdist.telemetry.charts import Axis, Curve, Mark, RunClass, Scale, chart, smooth
from jaxdist.telemetry.summary import (
    ALERTS,
    FIGURES,
    Run,
    mesh_text,
    number,
    points,
    state,
)
from jaxdist.telemetry.units import count_text, duration_text

GENERATOR = "jaxdist report"  # in a <meta> of the page, so that a report may replace a report
_FILES = resources.files("jaxdist.telemetry")
_STYLE = _FILES.joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT = _FILES.joinpath("page.js").read_text(encoding="utf-8")
_RUN_CLASSES: tuple[RunClass, ...] = ("run-a", "run-b")


def render(runs: Sequence[Run]) -> str:
    """Returns the page of one or two runs as a single HTML document."""
    title = " vs ".join(run.name for run in runs)
    body = "".join(
        section(runs)
        for section in (_head, _tiles, _charts, _events, _sharding, _ops, _config, _info, _sample)
    )
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="generator" content="{GENERATOR}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)} · jaxdist</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}<footer>Written {made} by {GENERATOR}. Loss is in nats per weighted "
        "target. MFU counts no recomputation.</footer></main>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


# --- sections -------------------------------------------------------------------------------------


def _head(runs: Sequence[Run]) -> str:
    title = " vs ".join(run.name for run in runs)
    lines = []
    for run, style in zip(runs, _RUN_CLASSES, strict=False):
        outcome, tone = state(run)
        device = run.info.get("device_kind") or run.info.get("platform")
        badges = "".join(
            f'<span class="badge">{_text(item)}</span>' for item in (device, mesh_text(run)) if item
        )
        key = f'<span class="key {style}"></span>' if len(runs) > 1 else ""
        lines.append(
            f'<div class="run">{key}<code>{_text(run.folder)}</code>'
            f'<span class="badge {tone}">{_text(outcome)}</span>{badges}</div>'
        )
    return f"<header><h1>{_text(title)}</h1>{''.join(lines)}</header>"


def _tiles(runs: Sequence[Run]) -> str:
    tiles = []
    for name, value_of in FIGURES:
        values = [value_of(run) for run in runs]
        if all(value is None for value in values):
            continue
        texts = [_text("–" if value is None else value) for value in values]
        if len(runs) > 1:
            pairs = zip(texts, _RUN_CLASSES, strict=False)
            texts = [f'<span class="key {style}"></span>{text}' for text, style in pairs]
        shown = "".join(f'<div class="value">{text}</div>' for text in texts)
        tiles.append(f'<div class="tile"><div class="name">{name}</div>{shown}</div>')
    style = "tiles two" if len(runs) > 1 else "tiles"
    return f'<section class="{style}" aria-label="Key figures">{"".join(tiles)}</section>'


def _charts(runs: Sequence[Run]) -> str:
    if not any(run.rows.train or run.rows.evaluation for run in runs):
        return '<p class="soft">No step was logged yet.</p>'
    cards = [_loss_card(runs)]
    cards += [_field_card(runs, *row) for row in _FIELDS]
    extra = {field for run in runs for row in run.rows.train for field in row if "/" in field}
    cards += [_field_card(runs, field, field, "", 1.0, Axis()) for field in sorted(extra)]
    note = ""
    if not any(run.column("mfu_causal") for run in runs):
        note = '<p class="soft">MFU: unknown, the peak of this device is not in the chip table.</p>'
    return f'<section class="charts" aria-label="Curves">{"".join(cards)}</section>{note}'


def _loss_card(runs: Sequence[Run]) -> str:
    curves, legend = [], []
    for run, style in zip(runs, _RUN_CLASSES, strict=False):
        prefix = f"{run.name} " if len(runs) > 1 else ""
        lines = _lines(f"{prefix}loss", style, run.column("loss"))
        curves += [replace(line, hover=True) for line in lines]
        legend += [(style, "faint" if line.style == "raw" else "", line.name) for line in lines]
        x, y = _columns(points(run.rows.evaluation, "eval_loss"))
        if x:
            curves.append(Curve(f"{prefix}evaluation", style, x, y, "points"))
            legend.append((style, "dot", f"{prefix}evaluation"))
    marks = [mark for run in runs for mark in _marks(run, len(runs) > 1)]
    end = max((curve.x[-1] for curve in curves), default=0)
    tail = [_after(curve, 0.2 * end) for curve in curves]
    choices: tuple[tuple[str, list[Curve], Scale], ...] = (
        ("linear", curves, "linear"),
        ("log", curves, "log"),
        ("last 80 %", tail, "linear"),
    )
    picks = views = labels = ""
    for index, (name, chosen, scale) in enumerate(choices, 1):
        checked = " checked" if index == 1 else ""
        picks += f'<input class="pick" type="radio" name="view" id="pick-{index}"{checked}>'
        labels += f'<label for="pick-{index}">{name}</label>'
        drawing = chart("Loss by step", chosen, Axis(scale=scale), marks=marks, size=(1160, 330))
        views += f'<div class="view view-{index}">{drawing}</div>'
    keys = "".join(
        f'<span class="legend"><i class="{style} {kind}"></i>{_text(name)}</span>'
        for style, kind, name in legend
    )
    return (
        f'<div class="card wide">{picks}<div class="top"><h3>Loss</h3>'
        f'<span class="soft">nats per target</span>{keys}'
        f'<span class="push switch">{labels}</span></div>{views}</div>'
    )


def _lines(name: str, style: RunClass, pairs: Sequence[tuple[float, float]]) -> list[Curve]:
    """Returns the curve of the pairs; from 40 points on, a faint one and a smoothed one on it."""
    x, y = _columns(pairs)
    if len(x) < 40:
        return [Curve(name, style, x, y)] if x else []
    smoothed = smooth(y, max(1, len(y) // 100))
    raw = Curve(name, style, x, y, "raw")
    return [raw, Curve(f"{name}, smoothed", style, x, smoothed, hover=False)]


def _after(curve: Curve, step: float) -> Curve:
    first = next((index for index, x in enumerate(curve.x) if x >= step), len(curve.x))
    return replace(curve, x=curve.x[first:], y=curve.y[first:])


def _field_card(
    runs: Sequence[Run], field: str, title: str, unit: str, factor: float, axis: Axis
) -> str:
    curves, last = [], ""
    for run, style in zip(runs, _RUN_CLASSES, strict=False):
        pairs = [(step, value * factor) for step, value in run.column(field)]
        curves += _lines(run.name, style, pairs)
        if pairs:
            key = f'<span class="key {style}"></span>' if len(runs) > 1 else ""
            last += f"{key}{_text(_short(pairs[-1][1]))}"
    if not curves:
        return ""
    unit = f'<span class="soft">{_text(unit)}</span>' if unit else ""
    return (
        f'<div class="card"><div class="top"><h3>{_text(title)}</h3>{unit}'
        f'<span class="soft push">last {last}</span></div>'
        f"{chart(f'{title} by step', curves, axis)}</div>"
    )


def _events(runs: Sequence[Run]) -> str:
    if not any(run.events for run in runs):
        return ""
    rows = []
    for run in runs:
        begin = number(run.events[0].get("time")) if run.events else None
        for event in run.events:
            time = number(event.get("time"))
            details = {k: v for k, v in event.items() if k not in ("time", "event", "step")}
            alert = ' class="alert"' if event["event"] in ALERTS else ""
            cells: list[object] = [_clock(time)]
            cells += ["" if time is None else duration_text(time - (begin or time))]
            cells += [event["event"], "" if event.get("step") is None else event["step"]]
            cells += ["  ".join(f"{key}={_brief(value)}" for key, value in details.items())]
            cells = ([run.name] if len(runs) > 1 else []) + cells
            rows.append(f"<tr{alert}>{_cells(cells, numbers=(len(cells) - 2,))}</tr>")
    head = (["run"] if len(runs) > 1 else []) + ["time (UTC)", "after", "event", "step", "details"]
    return f"<h2>Events</h2>{_table(head, rows, numbers=(len(head) - 2,))}"


def _sharding(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        table = run.info.get("sharding")
        if run is not runs[0] and table == runs[0].info.get("sharding"):
            continue
        rows = [row for row in table if isinstance(row, Mapping)] if isinstance(table, list) else []
        if not rows:
            continue
        head = list(dict.fromkeys(key for row in rows for key in row))
        numeric = [
            index
            for index, key in enumerate(head)
            if all(isinstance(row.get(key, 0), int | float) for row in rows)
        ]
        cells = ([_brief(row.get(key, "")) for key in head] for row in rows)
        lines = [f"<tr>{_cells(values, numeric)}</tr>" for values in cells]
        heading = f"Sharding of {run.name}" if len(runs) > 1 else "Sharding"
        parts.append(f"<h2>{_text(heading)}</h2>{_table(head, lines, numeric)}")
    return "".join(parts)


def _ops(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        ops = [op for op in run.ops if isinstance(op, Mapping)][:15]
        rows = [f"<tr>{_cells(_op_cells(op), numbers=(1, 2, 3))}</tr>" for op in ops]
        if rows:
            heading = f"Profile of {run.name}" if len(runs) > 1 else "Profile: longest operations"
            table = _table(["op", "share", "ms", "count"], rows, numbers=(1, 2, 3))
            parts.append(f"<h2>{_text(heading)}</h2>{table}")
    return "".join(parts)


def _op_cells(op: Mapping[str, object]) -> list[object]:
    share, seconds = number(op.get("share")) or 0.0, number(op.get("seconds")) or 0.0
    return [op.get("op", ""), f"{100 * share:.1f} %", f"{1e3 * seconds:.3f}", op.get("count", "")]


def _config(runs: Sequence[Run]) -> str:
    keys = sorted({key for run in runs for key in run.config})
    if not keys:
        return ""
    head = ["field", *(run.name for run in runs)] if len(runs) > 1 else ["field", "value"]
    values = {key: [_value(run.config.get(key, "–")) for run in runs] for key in keys}
    changed = [key for key in keys if len(set(values[key])) > 1]
    rows = [
        f"<tr{' class=changed' if key in changed else ''}>{_cells([key, *values[key]])}</tr>"
        for key in keys
    ]
    whole = f"<details><summary>All {len(keys)} fields</summary>{_table(head, rows)}</details>"
    if len(runs) == 1:
        return f"<h2>Configuration</h2>{whole}"
    if not changed:
        return f'<h2>Configuration</h2><p class="soft">The configurations are equal.</p>{whole}'
    short = _table(head, [f"<tr>{_cells([key, *values[key]])}</tr>" for key in changed])
    plural = "" if len(changed) == 1 else "s"
    return f"<h2>Configuration: {len(changed)} difference{plural}</h2>{short}{whole}"


def _info(runs: Sequence[Run]) -> str:
    hidden = ("sharding", "sample", "config")
    flat = [
        config.flatten({key: value for key, value in run.info.items() if key not in hidden})
        for run in runs
    ]
    keys = list(dict.fromkeys(key for info in flat for key in info))
    if not keys:
        return ""
    head = ["", *(run.name for run in runs)]
    rows = [
        f"<tr>{_cells([key, *(_value(info.get(key, '–')) for info in flat)])}</tr>" for key in keys
    ]
    return f"<h2>Machine and versions</h2>{_table(head, rows)}"


def _sample(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        if run.sample:
            heading = f"Sample of {run.name}" if len(runs) > 1 else "Generated sample"
            text = f'<div class="card scroll"><pre>{_text(run.sample)}</pre></div>'
            parts.append(f"<h2>{_text(heading)}</h2>{text}")
    return "".join(parts)


# --- pieces ---------------------------------------------------------------------------------------


def _marks(run: Run, named: bool) -> list[Mark]:
    shown = ("restore", "resize", *ALERTS)
    prefix = f"{run.name}: " if named else ""
    return [
        Mark(step, f"{prefix}{event['event']} at step {step:g}")
        for event in run.events
        if event["event"] in shown and (step := number(event.get("step"))) is not None
    ]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _table(head: Sequence[str], rows: Iterable[str], numbers: Sequence[int] = ()) -> str:
    """Returns a scrolling card with a table; `rows` are <tr> elements."""
    cells = "".join(
        f"<th{' class=number' if index in numbers else ''}>{_text(name)}</th>"
        for index, name in enumerate(head)
    )
    body = "".join(rows)
    return (
        '<div class="card scroll" tabindex="0"><table><thead><tr>'
        f"{cells}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(values: Iterable[object], numbers: Sequence[int] = ()) -> str:
    return "".join(
        f"<td{' class=number' if index in numbers else ''}>{_text(_value(value))}</td>"
        for index, value in enumerate(values)
    )


def _value(value: object) -> str:
    """Returns a value as a reader expects it: text as it is, the rest as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(metrics.to_json(value), ensure_ascii=False)


def _brief(value: object) -> str:
    """Returns a value for a table cell: floats with six digits, large integers grouped."""
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _value(value)


def _short(value: float) -> str:
    return f"{value:.4g}" if not 1e4 <= abs(value) < math.inf else count_text(value)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


# Charts below the loss: field of metrics.jsonl, title, unit, factor, axis.
_FIELDS = (
    ("tokens_per_s", "Tokens per second", "all devices", 1.0, Axis(from_zero=True, robust=True)),
    ("step_time_s", "Step time", "ms", 1e3, Axis("ms", from_zero=True, robust=True)),
    ("mfu_causal", "MFU (causal)", "% of peak", 100.0, Axis("%", from_zero=True, robust=True)),
    ("learning_rate", "Learning rate", "", 1.0, Axis(from_zero=True)),
    ("grad_norm", "Gradient norm", "before clipping", 1.0, Axis(robust=True, from_zero=True)),
    ("data_wait_s", "Data wait", "ms per step", 1e3, Axis("ms", from_zero=True, robust=True)),
)
