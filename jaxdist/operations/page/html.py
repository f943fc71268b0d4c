"""Self-contained HTML page of a run, or of several runs overlaid.

All text from a workdir is escaped, since anybody may have written it. The page's
content security policy forbids outside resources and all scripts except the page's own.
Needs no jax, and the page needs no network and no other files.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from string import Template

from jaxdist.config import schema
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.page import experts, planned, step_parts
from jaxdist.operations.page.curves import (
    Field,
    Overlay,
    band_card,
    colour_runs,
    field_card,
    loss_card,
    other_cards,
)
from jaxdist.operations.page.event_log import EventLog
from jaxdist.operations.page.summary import (
    ALERTS,
    RunSummary,
    evaluations,
    figures,
    mesh_text,
    state,
)
from jaxdist.operations.page.tables import (
    ABSENT,
    brief,
    side_by_side,
    table,
    text_card,
    titled,
)
from jaxdist.storage.untrusted import visible
from jaxdist.telemetry.units import GIB, duration_text, percent_text
from jaxdist.trainer import reproduce

# stands in a <meta> of the page: a report may replace only a report
GENERATOR = "jaxdist report"
_FILES = resources.files("jaxdist.operations.page")
_PAGE = Template(_FILES.joinpath("page.html").read_text(encoding="utf-8"))
_STYLE = _FILES.joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT = _FILES.joinpath("page.js").read_text(encoding="utf-8")
_MAX_NAMES = 4  # most runs that the title names
_MAX_OPERATIONS = 15  # operations of a profile in the table

# charts below the loss
_FIELDS = (
    Field("step_time_s", "Step time", "ms", 1e3, "ms"),
    Field("mfu_causal", "MFU (causal)", "% of peak", 100.0, "%"),
    Field("hfu", "HFU", "% of peak", 100.0, "%"),
    Field("learning_rate", "Learning rate"),
    Field("grad_norm", "Gradient norm", "before clipping"),
    Field("loss_scale", "Loss scale", "of float16"),
    Field("data_wait_s", "Data wait", "ms per step", 1e3, "ms"),
    Field("device_memory_bytes", "Memory of the fullest device", "GiB", 1 / GIB, "GiB"),
)
# names of columns that differ from the fields of run.json
_SHARDING_COLUMNS = {"state": "optimizer state", "per_device": "per device"}
# fields of run.json with a section of their own
_ELSEWHERE = ("sharding", "timeline_svg", "split_sequences", reproduce.COMMAND)


def render(runs: Sequence[RunSummary]) -> str:
    """Renders the page of one or more runs as an HTML document."""
    overlays = colour_runs(runs)
    title = " vs ".join(run.name for run in runs)
    if len(runs) > _MAX_NAMES:
        title = f"{runs[0].name} and {len(runs) - 1} more runs"
    sections = [
        _figures(overlays),
        _charts(overlays),
        _each(runs, "Generated sample", lambda run: text_card(visible(run.sample))),
        _experts(overlays),
        _each(runs, "Load of experts", experts.heat_maps),
        _each(runs, "Wall time", _wall_time),
        _each(runs, "A step, estimated", _step),
        _events(runs),
        _each(runs, "Pipeline", _pipeline),
        _each(runs, "Split sequences", _split_sequences),
        _each(runs, "Plan", lambda run: text_card(run.plan, wraps=False)),
        _each(runs, "Sharding", _sharding),
        _each(runs, "Profile: longest operations", _operations),
        _config(runs),
        _info(runs),
        _each(runs, "Repeat", _repeat),
    ]
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    page = _PAGE.substitute(
        policy=(
            "default-src 'none'; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'; img-src data:"
        ),
        generator=GENERATOR,
        title=escape(title),
        style=_STYLE,
        headlines="".join(map(_headline, overlays)),
        sections="".join(sections),
        time=_clock(datetime.now(UTC)),
        script=_SCRIPT,
    )
    # JSON and names of files may have surrogates, which UTF-8 cannot encode
    return page.encode(errors="replace").decode()


def _each(
    runs: Sequence[RunSummary], heading: str, body_of: Callable[[RunSummary], str]
) -> str:
    """Draws a section for each run that has one; equal sections are drawn once."""
    names: dict[str, str] = {}
    for run in runs:
        names.setdefault(body_of(run), run.name)
    if len(runs) == 1:
        return "".join(titled(heading, body) for body in names)
    return "".join(titled(f"{heading} of {name}", body) for body, name in names.items())


# --- head and figures -----------------------------------------------------------------


def _headline(overlay: Overlay) -> str:
    run = overlay.run
    outcome, tone = state(run)
    facts = [run.info.get("device_kind"), mesh_text(run)]
    badges = [f'<span class="badge">{escape(fact)}</span>' for fact in facts if fact]
    faults = [f'<p class="soft">{escape(fault)}</p>' for fault in run.unreadable]
    return (
        f'<div class="run">{overlay.key}<code>{escape(str(run.folder))}</code>'
        f'<span class="badge {tone}">{escape(outcome)}</span>{"".join(badges)}</div>'
        f"{''.join(faults)}"
    )


def _figures(overlays: Sequence[Overlay]) -> str:
    """Draws the key figures: tiles for a lone run, a table for several runs."""
    columns = [figures(overlay.run) for overlay in overlays]
    if len(overlays) == 1:
        tiles = "".join(
            f'<div class="tile"><div class="name">{name}</div>'
            f'<div class="value">{value}</div></div>'
            for name, value in columns[0].items()
        )
        return f'<section class="tiles" aria-label="Key figures">{tiles}</section>'
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [
        [overlay.run.name, *(column.get(name, ABSENT) for name in names)]
        for overlay, column in zip(overlays, columns, strict=True)
    ]
    keys = [overlay.key for overlay in overlays]
    return titled("Key figures", table(["run", *names], rows, keys=keys))


# --- curves ---------------------------------------------------------------------------


def _charts(overlays: Sequence[Overlay]) -> str:
    runs = [overlay.run for overlay in overlays]
    if not any(run.rows.train or run.rows.evaluation for run in runs):
        return '<p class="soft">No step was logged yet.</p>'
    unit = "Tokens"
    if all(run.unit == "samples" for run in runs):
        unit = "Samples"
    speed = Field("tokens_per_s", f"{unit} per second", "all devices")
    names = {name for run in runs for row in run.rows.train for name in row}
    others = {
        name for name in names if "/" in name and not experts.is_about_experts(name)
    }
    cards = loss_card(overlays)
    cards += "".join(field_card(overlays, field) for field in (speed, *_FIELDS))
    cards += other_cards(overlays, others)
    section = f'<section class="charts" aria-label="Curves">{cards}</section>'
    section += "".join(map(_held_out_text, runs))
    section += "".join(_sample_text(run) for run in runs if run.is_sampled)
    if not any(run.column("mfu_causal") for run in runs):
        section += (
            '<p class="soft">MFU: unknown, the peak of this device is not in the chip '
            "table.</p>"
        )
    return section


def _held_out_text(run: RunSummary) -> str:
    """Draws a remark about a run whose held-out set changed; "" for others."""
    compared = evaluations(run)
    if len(compared) == len(run.rows.evaluation):
        return ""
    return _remark(
        f"{run.name}: the held-out set changed, as it does if train.steps is raised. The "
        f"best evaluation loss is of the {len(compared):,} evaluations on the last set, "
        f"from step {compared[0]['step']:,} on."
    )


def _sample_text(run: RunSummary) -> str:
    """Draws a remark about a run whose rows are too many."""
    num_kept = len(run.rows.train) + len(run.rows.evaluation)
    return _remark(
        f"{run.name}: {num_kept:,} of {run.num_rows:,} points drawn, peaks of the loss "
        f"among them. Medians are of these points, all other figures of all rows."
    )


def _experts(overlays: Sequence[Overlay]) -> str:
    """Draws charts of the experts' load over the layers."""
    cards = "".join(band_card(overlays, field) for field in experts.FIELDS)
    if not cards:
        return ""
    section = f'<section class="charts" aria-label="Experts">{cards}</section>'
    return titled("Experts", section)


# --- tables ---------------------------------------------------------------------------


def _events(runs: Sequence[RunSummary]) -> str:
    rows = []
    styles = []
    remarks = ""
    for run in runs:
        shown = run.events.shown
        began = _began(run)
        if len(shown) < len(run.events):
            remarks += _remark(
                f"{run.name}: {len(shown):,} of {len(run.events):,} events shown; "
                f"all of them: {_numbers_text(run.events)}."
            )
        for event in shown:
            clock = _clock(datetime.fromtimestamp(event["time"], UTC))
            passed = duration_text(event["time"] - began)
            step = "" if event["step"] is None else str(event["step"])
            details = "  ".join(
                f"{name}={brief(value)}"
                for name, value in event.items()
                if name not in ("time", "event", "step")
            )
            row = [clock, passed, event["event"], step, details]
            if len(runs) > 1:
                row.insert(0, run.name)
            rows.append(row)
            styles.append("alert" if event["event"] in ALERTS else "")
    head = ["time (UTC)", "after", "event", "step", "details"]
    if len(runs) > 1:
        head.insert(0, "run")
    return titled("Events", remarks + table(head, rows, row_styles=styles))


def _began(run: RunSummary) -> float:
    """Finds the time from which the events of a run are counted, since 1970."""
    if run.started is not None:
        return run.started
    if run.events.first is None:
        return 0.0
    first_time: float = run.events.first["time"]
    return first_time


def _numbers_text(events: EventLog) -> str:
    """Formats the numbers of events by name, the most frequent first."""
    return ", ".join(
        f"{count:,} {name}" for name, count in events.numbers.most_common()
    )


def _wall_time(run: RunSummary) -> str:
    """Draws the wall time of all starts by bucket; "" without a ledger."""
    account = run.account
    if not account.wall_s:
        return ""
    rows = [
        [name, duration_text(seconds), percent_text(seconds / account.wall_s)]
        for name, seconds in account.largest()
    ]
    line = _remark(run_lives.goodput_line(run.lives, account))
    return line + table(["spent on", "time", "share"], rows)


def _step(run: RunSummary) -> str:
    """Draws the parts of a step, with a verdict."""
    parts, plan = step_parts.of_run(run)
    if parts is None:
        return ""
    verdict = parts.verdict(planned.command(run.folder, run.info))
    remarks = _remark(f"{verdict} ({parts.source}).")
    if plan is not None:
        line = planned.as_line(plan.document(parts.measured_to_planned))
        remarks += _remark(f"{line}.")
    rows = [[name, percent_text(share)] for name, share in parts.shares.items()]
    return remarks + table(["part", "share"], rows)


def _remark(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _sharding(run: RunSummary) -> str:
    rows = [row for row in run.info.get("sharding", []) if isinstance(row, dict)]
    head = list(dict.fromkeys(key for row in rows for key in row))
    names = [_SHARDING_COLUMNS.get(key, key) for key in head]
    return table(
        names, [[_dims_text(row.get(key, "")) for key in head] for row in rows]
    )


def _dims_text(value: object) -> str:
    """Formats dims as "2x32" and their names as "d_model,heads", as a dry run does."""
    if not isinstance(value, list):
        return brief(value)
    if all(type(item) is int for item in value):
        return "x".join(map(str, value))
    return ",".join("-" if item is None else brief(item) for item in value)


def _pipeline(run: RunSummary) -> str:
    """Draws the timeline of run.json as an image, in which no script can run."""
    drawing = run.info.get("timeline_svg")
    if drawing is None:
        return ""
    data = base64.b64encode(drawing.encode(errors="replace")).decode()
    return f'<div class="card scroll"><img alt="timeline" src="data:image/svg+xml;base64,{data}"></div>'


def _split_sequences(run: RunSummary) -> str:
    """Draws the lines about attention over split sequences."""
    return text_card("\n".join(map(brief, run.info.get("split_sequences", []))))


def _operations(run: RunSummary) -> str:
    rows = [
        [
            operation["op"],
            percent_text(operation["share"]),
            f"{1e3 * operation['seconds']:.3f}",
            brief(operation["count"]),
        ]
        for operation in run.operations[:_MAX_OPERATIONS]
    ]
    return table(["op", "share", "ms", "count"], rows)


def _repeat(run: RunSummary) -> str:
    document = reproduce.repeat(run.folder, run.info, run.config)
    return text_card("\n".join(reproduce.as_lines(document)))


def _config(runs: Sequence[RunSummary]) -> str:
    rows = side_by_side([run.config for run in runs])
    styles = ["changed" if len(set(row[1:])) > 1 else "" for row in rows]
    different = [row for row, style in zip(rows, styles, strict=True) if style]
    title = "Configuration"
    head = ["field", "value"]
    if len(runs) > 1:
        head = ["field", *(run.name for run in runs)]
        count = f"{len(different)} differences"
        if len(different) == 1:
            count = "1 difference"
        title = f"Configuration: {count}"
    whole = table(head, rows, row_styles=styles)
    summary = f"<summary>All {len(rows)} fields</summary>"
    details = f"<details>{summary}{whole}</details>"
    return titled(title, table(head, different) + details)


def _info(runs: Sequence[RunSummary]) -> str:
    infos = [
        {key: value for key, value in run.info.items() if key not in _ELSEWHERE}
        for run in runs
    ]
    rows = side_by_side([schema.flatten(info) for info in infos])
    head = ["", *(run.name for run in runs)]
    return titled("Machine and versions", table(head, rows))


def _clock(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
