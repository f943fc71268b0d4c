"""One self-contained HTML page of a run, or of several runs overlaid. No jax, no
network, no files.

Everything read from a workdir is text of unknown origin: all of it is escaped, and the
page's own content security policy forbids every script but ours and every outside
resource.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib import resources

from jaxdist.config import schema
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page import experts, planned
from jaxdist.operations.page.charts import Curve, chart, smooth
from jaxdist.operations.page.step_parts import step_parts
from jaxdist.operations.page.summary import (
    ALERTS,
    RunSummary,
    figures,
    mesh_text,
    number,
    state,
)
from jaxdist.telemetry.units import duration_text
from jaxdist.trainer import reproduce

# in a <meta> of the page, so that a report may replace a report
GENERATOR = "jaxdist report"
_FILES = resources.files("jaxdist.operations.page")
_STYLE = _FILES.joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT = _FILES.joinpath("page.js").read_text(encoding="utf-8")
_MOST_NAMED = 4  # runs in the title
_COLOURS = 8  # that page.css has; the ninth run has the first one's again, dashed

# charts below the loss: field of metrics.jsonl, title, remark, factor, unit
_FIELDS = (
    ("tokens_per_s", "Tokens per second", "all devices", 1.0, ""),
    ("step_time_s", "Step time", "ms", 1e3, "ms"),
    ("mfu_causal", "MFU (causal)", "% of peak", 100.0, "%"),
    ("hfu", "HFU", "% of peak", 100.0, "%"),
    ("learning_rate", "Learning rate", "", 1.0, ""),
    ("grad_norm", "Gradient norm", "before clipping", 1.0, ""),
    ("loss_scale", "Loss scale", "of float16", 1.0, ""),
    ("data_wait_s", "Data wait", "ms per step", 1e3, "ms"),
)


def render(runs: Sequence[RunSummary]) -> str:
    """Returns the page of any number of runs as a single HTML document."""
    names = " vs ".join(run.name for run in runs)
    title = escape(
        names
        if len(runs) <= _MOST_NAMED
        else f"{runs[0].name} and {len(runs) - 1} more runs"
    )
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    body = (
        f"<header><h1>{title}</h1>{''.join(map(_headline, runs, _keys(runs)))}</header>"
        f"{_figures(runs)}{_charts(runs)}{_experts(runs)}"
        f"{_each(runs, 'Wall time', _wall_time)}{_each(runs, 'A step, estimated', _step)}"
        f"{_events(runs)}{_each(runs, 'Pipeline', _pipeline)}"
        f"{_each(runs, 'Split sequences', _split_sequences)}"
        f"{_each(runs, 'Plan', lambda run: _text(run.plan))}"
        f"{_each(runs, 'Sharding', _sharding)}"
        f"{_each(runs, 'Profile: longest operations', _ops)}{_config(runs)}{_info(runs)}"
        f"{_each(runs, 'Repeat', _repeat)}"
        f"{_each(runs, 'Generated sample', lambda run: _text(run.sample))}"
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="generator" content="{GENERATOR}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · jaxdist</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}<footer>Written {_clock(datetime.now(UTC))} UTC by {GENERATOR}. Loss is "
        "in nats per weighted target. MFU counts no recomputation, and of experts those that a token uses; "
        "HFU counts what the program computes."
        "</footer></main>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )
    # JSON and names of files may hold what is no character
    return page.encode(errors="replace").decode()


# --- head and figures -----------------------------------------------------------------


def _keys(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the coloured key of each run; empty for a single one."""
    if len(runs) == 1:
        return [""]
    return [f'<span class="key {style}"></span>' for style in _styles(runs)]


def _styles(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the CSS classes of each run: its colour, and how its lines are dashed."""
    dashes = ["", " dashed", " dotted"]
    return [
        f"run-{i % _COLOURS}{dashes[i // _COLOURS % len(dashes)]}"
        for i in range(len(runs))
    ]


def _headline(run: RunSummary, key: str) -> str:
    outcome, tone = state(run)
    facts = filter(None, (run.info.get("device_kind"), mesh_text(run)))
    badges = "".join(f'<span class="badge">{escape(fact)}</span>' for fact in facts)
    faults = "".join(f'<p class="soft">{escape(fault)}</p>' for fault in run.unreadable)
    return (
        f'<div class="run">{key}<code>{escape(str(run.folder))}</code>'
        f'<span class="badge {tone}">{escape(outcome)}</span>{badges}</div>{faults}'
    )


def _figures(runs: Sequence[RunSummary]) -> str:
    """Returns the key figures: as tiles, or of more than two runs as a table with a row
    for each.
    """
    columns = [figures(run) for run in runs]
    if len(runs) > 2:
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [
            [run.name, *(column.get(name, "–") for name in names)]
            for run, column in zip(runs, columns, strict=True)
        ]
        return _titled("Key figures", _table(["run", *names], rows, keys=_keys(runs)))
    tiles = ""
    for name in dict.fromkeys(name for column in columns for name in column):
        pairs = zip(_keys(runs), columns, strict=True)
        values = (
            f'<div class="value">{key}{column.get(name, "–")}</div>'
            for key, column in pairs
        )
        tiles += (
            f'<div class="tile"><div class="name">{name}</div>{"".join(values)}</div>'
        )
    style = "tiles two" if len(runs) > 1 else "tiles"
    return f'<section class="{style}" aria-label="Key figures">{tiles}</section>'


# --- curves ---------------------------------------------------------------------------


def _charts(runs: Sequence[RunSummary]) -> str:
    if not any(run.rows.train or run.rows.evaluation for run in runs):
        return '<p class="soft">No step was logged yet.</p>'
    extra = {
        field for run in runs for row in run.rows.train for field in row if "/" in field
    }
    extra = {field for field in extra if not experts.is_of_experts(field)}
    several = {
        name
        for name in (field.removesuffix("/mean") for field in extra)
        if _spread(name) <= extra
    }
    extra -= {field for name in several for field in _spread(name)}
    counted = "Samples" if all(run.unit == "samples" for run in runs) else "Tokens"
    known_rows = [
        (row[0], row[1].replace("Tokens", counted), *row[2:]) for row in _FIELDS
    ]
    rows = [*known_rows, *((field, field, "", 1.0, "") for field in sorted(extra))]
    cards = _loss_card(runs) + "".join(_field_card(runs, *row) for row in rows)
    cards += "".join(
        _band_card(runs, name, name, "mean, least and most", 1.0, "")
        for name in sorted(several)
    )
    note = '<p class="soft">MFU: unknown, the peak of this device is not in the chip table.</p>'
    known = any(run.column("mfu_causal") for run in runs)
    return f'<section class="charts" aria-label="Curves">{cards}</section>{"" if known else note}'


def _experts(runs: Sequence[RunSummary]) -> str:
    """Returns how even the load of experts is: curves of the layers, and maps of each
    run.
    """
    cards = "".join(_band_card(runs, *row) for row in experts.FIELDS)
    charts = (
        f'<section class="charts" aria-label="Experts">{cards}</section>'
        if cards
        else ""
    )
    return _titled("Experts", charts) + _each(
        runs, "Load of experts", experts.heat_maps
    )


def _spread(name: str) -> set[str]:
    return {f"{name}/{figure}" for figure in ("mean", "min", "max")}


def _loss_card(runs: Sequence[RunSummary]) -> str:
    curves, marks = [], []
    for run, style in zip(runs, _styles(runs), strict=True):
        prefix = f"{run.name} " if len(runs) > 1 else ""
        curves += _lines(f"{prefix}loss", style, run.column("loss"))
        if evaluated := run.column("eval_loss"):
            x, y = zip(*evaluated, strict=True)
            curves.append(Curve(f"{prefix}evaluation", style, x, y, "points"))
        for event in run.events:
            step = number(event.get("step"))
            if event["event"] in ("restore", "resize", *ALERTS) and step is not None:
                marks.append((step, f"{prefix}{event['event']} at step {step:g}"))
    end = max((curve.x[-1] for curve in curves), default=0)
    choices = {
        "all": curves,
        "last 80 %": [_after(curve, 0.2 * end) for curve in curves],
    }
    picks = views = labels = ""
    for index, (name, shown) in enumerate(choices.items(), 1):
        checked = " checked" if index == 1 else ""
        picks += (
            f'<input class="pick" type="radio" name="view" id="pick-{index}"{checked}>'
        )
        labels += f'<label for="pick-{index}">{name}</label>'
        drawing = chart("Loss by step", shown, marks=marks, size=(1160, 330))
        views += f'<div class="view view-{index}">{drawing}</div>'
    named = {(curve.run, curve.style): curve.name for curve in curves}
    if len(runs) > 2:  # a name a run says enough
        named = {
            (style, "line"): run.name
            for run, style in zip(runs, _styles(runs), strict=True)
        }
    keys = "".join(
        f'<span class="legend"><i class="{style} {line}"></i>{escape(name)}</span>'
        for (style, line), name in named.items()
    )
    return (
        f'<div class="card wide">{picks}<div class="top"><h3>Loss</h3>'
        f'<span class="soft">nats per target</span>{keys}'
        f'<span class="push switch">{labels}</span></div>{views}</div>'
    )


def _lines(name: str, style: str, pairs: Sequence[tuple[float, float]]) -> list[Curve]:
    """Returns the curve of the pairs; from 40 points on, a faint one and a smoothed one
    on it.
    """
    if not pairs:
        return []
    x, y = zip(*pairs, strict=True)
    if len(x) < 40:
        return [Curve(name, style, x, y)]
    smoothed = smooth(y, max(1, len(y) // 100))
    return [
        Curve(name, style, x, y, "raw"),
        Curve(f"{name}, smoothed", style, x, smoothed),
    ]


def _after(curve: Curve, step: float) -> Curve:
    first = sum(x < step for x in curve.x)
    return replace(curve, x=curve.x[first:], y=curve.y[first:])


def _field_card(
    runs: Sequence[RunSummary],
    field: str,
    title: str,
    remark: str,
    factor: float,
    unit: str,
) -> str:
    curves, last = [], ""
    for run, style, key in zip(runs, _styles(runs), _keys(runs), strict=True):
        pairs = [(step, value * factor) for step, value in run.column(field)]
        curves += _lines(run.name, style, pairs)
        last += (
            f'<span class="last">{key}{_brief(pairs[-1][1])}</span> ' if pairs else ""
        )
    if not curves:
        return ""
    return (
        f'<div class="card"><div class="top"><h3>{escape(title)}</h3><span class="soft">{remark}</span>'
        f'<span class="soft push">last {last}</span></div>'
        f"{chart(f'{title} by step', curves, unit=unit, from_zero='/' not in field)}</div>"
    )


def _band_card(
    runs: Sequence[RunSummary],
    field: str,
    title: str,
    remark: str,
    factor: float,
    unit: str,
) -> str:
    """Returns the chart of a field with /mean, /min and /max: of layers, say."""
    curves, bands, last = [], [], ""
    for run, style, key in zip(runs, _styles(runs), _keys(runs), strict=True):
        prefix = f"{run.name} " if len(runs) > 1 else ""
        columns = {
            figure: run.column(f"{field}/{figure}") for figure in ("mean", "min", "max")
        }
        if not all(columns.values()):
            continue
        of_run = {
            figure: Curve(
                f"{prefix}{figure}",
                style,
                [x for x, _ in pairs],
                [factor * y for _, y in pairs],
            )
            for figure, pairs in columns.items()
        }
        edges = replace(of_run["min"], style="raw"), replace(of_run["max"], style="raw")
        curves += [of_run["mean"], *edges]
        bands.append(edges)
        ends = [f"{of_run[figure].y[-1]:.4g}" for figure in ("mean", "min", "max")]
        last += f'<span class="last">{key}{ends[0]} ({ends[1]} to {ends[2]})</span> '
    if not curves:
        return ""
    return (
        f'<div class="card"><div class="top"><h3>{escape(title)}</h3><span class="soft">{remark}</span>'
        f'<span class="soft push">last {last}</span></div>'
        f"{chart(f'{title} by step', curves, unit=unit, bands=bands)}</div>"
    )


# --- tables ---------------------------------------------------------------------------


def _each(
    runs: Sequence[RunSummary], heading: str, body_of: Callable[[RunSummary], str]
) -> str:
    """Returns a section per run that has one; two equal ones are shown once."""
    # of equals, the first run's name
    bodies = {body_of(run): run.name for run in reversed(runs)}
    return "".join(
        _titled(f"{heading} of {name}" if len(runs) > 1 else heading, body)
        for body, name in reversed(bodies.items())
    )


def _events(runs: Sequence[RunSummary]) -> str:
    rows = []
    for run in runs:
        for event in run.events:
            values = dict(event)
            time, name, step = (
                values.pop("time"),
                values.pop("event"),
                values.pop("step"),
            )
            details = "  ".join(
                f"{key}={_brief(value)}" for key, value in values.items()
            )
            after = duration_text(time - run.events[0]["time"])
            clock = _clock(datetime.fromtimestamp(time, UTC))
            rows.append(
                [
                    run.name,
                    clock,
                    after,
                    name,
                    "" if step is None else str(step),
                    details,
                ]
            )
    head = ["run", "time (UTC)", "after", "event", "step", "details"]
    alerts = {index for index, row in enumerate(rows) if row[3] in ALERTS}
    if len(runs) == 1:
        head, rows = head[1:], [row[1:] for row in rows]
    return _titled("Events", _table(head, rows, alert=alerts))


def _wall_time(run: RunSummary) -> str:
    """Returns what the wall time of all starts went to; nothing of a run without a
    ledger.
    """
    spent = run_lives.account(run.lives)
    if not spent.wall_s:
        return ""
    named = sorted(spent.buckets.items(), key=lambda item: -item[1])
    rows = [
        [name, duration_text(s), f"{100 * s / spent.wall_s:.1f} %"]
        for name, s in named
        if s > 0
    ]
    line = f'<p class="soft">{escape(run_lives.goodput_line(run.lives))}</p>'
    return line + _table(["spent on", "time", "share"], rows)


def _step(run: RunSummary) -> str:
    """Returns the parts of a step, and what to look at first."""
    row = run.rows.train[-1] if run.rows.train else {}
    plan = planned.read_plan(run.folder, run.config, run.info, run.events, row)
    parts = step_parts(row, run.info, run.ops, plan)
    if parts is None:
        return ""
    lines = [
        f"{parts.verdict(planned.command(run.folder, run.info))} ({parts.source})."
    ]
    if plan is not None:
        lines.append(f"{planned.as_line(plan.document(parts.measured_to_planned))}.")
    said = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines)
    return said + _table(
        ["part", "share"], [[n, f"{100 * s:.1f} %"] for n, s in parts.shares.items()]
    )


def _sharding(run: RunSummary) -> str:
    rows = [row for row in run.info.get("sharding", []) if isinstance(row, dict)]
    head = list(dict.fromkeys(key for row in rows for key in row))
    return _table(head, [[_brief(row.get(key, "")) for key in head] for row in rows])


def _pipeline(run: RunSummary) -> str:
    """Returns run.json's timeline as an image: whatever it holds, in there no script
    can run.
    """
    drawing = run.info.get("timeline_svg")
    if not isinstance(drawing, str):
        return ""
    data = base64.b64encode(drawing.encode(errors="replace")).decode()
    return f'<div class="card scroll"><img alt="timeline" src="data:image/svg+xml;base64,{data}"></div>'


def _split_sequences(run: RunSummary) -> str:
    """Returns how attention is computed over sequences that devices share out,
    and why.
    """
    return _text("\n".join(map(_brief, run.info.get("split_sequences", []))))


def _ops(run: RunSummary) -> str:
    head = ["op", "share", "ms", "count"]
    shown = ((op["op"], op["share"], op["seconds"], op["count"]) for op in run.ops[:15])
    return _table(
        head,
        [
            [op, f"{100 * s:.1f} %", f"{1e3 * t:.3f}", _brief(n)]
            for op, s, t, n in shown
        ],
    )


def _repeat(run: RunSummary) -> str:
    return _text(
        "\n".join(
            reproduce.as_lines(reproduce.repeat(run.folder, run.info, run.config))
        )
    )


def _text(text: str) -> str:
    return f'<div class="card scroll"><pre>{escape(text)}</pre></div>' if text else ""


def _config(runs: Sequence[RunSummary]) -> str:
    rows = _side_by_side([run.config for run in runs])
    different = [row for row in rows if len(set(row[1:])) > 1]
    head, title = ["field", "value"], "Configuration"
    if len(runs) > 1:
        head = ["field", *(run.name for run in runs)]
        title += f": {len(different)} difference{'' if len(different) == 1 else 's'}"
    changed = {index for index, row in enumerate(rows) if row in different}
    whole = f"<summary>All {len(rows)} fields</summary>{_table(head, rows, changed=changed)}"
    return _titled(title, f"{_table(head, different)}<details>{whole}</details>")


def _info(runs: Sequence[RunSummary]) -> str:
    elsewhere = ("sharding", "timeline_svg", "split_sequences", reproduce.COMMAND)
    infos = [
        {key: run.info[key] for key in run.info if key not in elsewhere} for run in runs
    ]
    rows = _side_by_side([schema.flatten(info) for info in infos])
    return _titled(
        "Machine and versions", _table(["", *(run.name for run in runs)], rows)
    )


def _side_by_side(tables: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Returns rows of (key, its value in each table); "–" where one has none."""
    keys = sorted({key for table in tables for key in table})
    return [[key, *(_exact(table.get(key, "–")) for table in tables)] for key in keys]


# --- pieces ---------------------------------------------------------------------------


def _titled(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


_NUMBER = re.compile(r"(-?[\d.,]+(e[-+]\d+)?( %)?|–)?")


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    keys: Sequence[str] = (),
    **marked: Collection[int],
) -> str:
    """Returns a scrolling card with a table; columns of numbers only are set to the
    right.

    `marked` gives the indices of rows that get a CSS class. Without rows there is no
    table.

    Args:
      keys: HTML that stands before the first cell of each row.
    """
    if not rows:
        return ""
    columns = zip(*rows, strict=True)
    styles = [
        " class=number" if all(map(_NUMBER.fullmatch, c)) else "" for c in columns
    ]
    names = (
        f"<th{style}>{escape(name)}</th>"
        for name, style in zip(head, styles, strict=True)
    )
    body = ""
    for index, row in enumerate(rows):
        css = "".join(
            f" class={name}" for name, indices in marked.items() if index in indices
        )
        cells = (
            f"<td{style}>{escape(text)}</td>"
            for text, style in zip(row, styles, strict=True)
        )
        line = "".join(cells)
        if keys:
            line = line.replace(">", f">{keys[index]} ", 1)
        body += f"<tr{css}>{line}</tr>"
    return (
        '<div class="card scroll" tabindex="0"><table><thead><tr>'
        f"{''.join(names)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _exact(value: object) -> str:
    """Returns text as it is, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _brief(value: object) -> str:
    """Returns a value for people: floats with six digits, large integers grouped."""
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else _exact(value)


def _clock(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
