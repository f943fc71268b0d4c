"""The text of a plan: verdict, layout, memory, communication, time, advice.

The text is made from the plan's JSON, so people and programs see the same numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxdist.telemetry.units import (
    GIB,
    count_text,
    duration_text,
    gib_text,
    percent_text,
    time_text,
)

Json = Mapping[str, Any]
_VERDICTS = {
    True: ("FITS", "bold green"),
    False: ("DOES NOT FIT", "bold red"),
    None: ("CANNOT TELL", "bold yellow"),
}
_BAR = 24  # width of a full bar in characters
_MOST_ROWS = 14  # most rows of collectives; other collectives are summed
# least width in characters that shows a collective or an edit in one line
_WIDE = 110
_TEXT_WIDTH = 80  # of plan.txt


def _gib(size: float) -> str:
    """Formats bytes for a column in GiB."""
    return f"{size / GIB:.2f}"


def show(plan: Json, console: Console) -> None:
    """Prints the JSON of a plan as text, in the width of the console."""
    for part in _parts(plan, console.width):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Prints lines without markup or line breaks."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_text(plan: Json) -> str:
    """Formats the JSON of a plan as text without color, 80 characters wide."""
    console = Console(width=_TEXT_WIDTH, color_system=None)
    with console.capture() as capture:
        show(plan, console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _parts(plan: Json, width: int) -> Iterator[RenderableType]:
    """Yields the sections of a plan; sections without content are skipped."""
    verdict, style = _VERDICTS[plan["fits"]]
    yield Text.assemble(
        (verdict, style), f" on {plan['target']}: {plan['exit_reason']}"
    )
    yield from _section("layout", _layout(plan))
    yield from _section("memory of a device", _memory(plan["memory"]))
    yield from _section(
        "communication of a step, each device",
        _communication(plan["collectives"], plan["calibration"], width),
    )
    yield from _section("experts", _experts(plan["experts"]))
    yield from _section("attention over a split sequence", _context(plan["context"]))
    yield from _section("pipeline", _pipeline(plan["pipeline"]))
    yield from _section("time of a step", _time(plan))
    yield from _section(
        "before training", _pass_before_training(plan["pass_before_training"])
    )
    yield from _section("checkpoints and failures", _restarts(plan["restarts"]))
    yield from _section("warnings", (Text(f"- {text}") for text in plan["warnings"]))
    yield from _section(
        "what would make it fit, the cheapest first", _advice(plan["advice"], width)
    )


def _section(title: str, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Yields a title and indented parts; nothing without parts."""
    for i, part in enumerate(parts):
        if i == 0:
            yield Text(f"\n{title}", style="bold")
        yield Padding(part, (0, 0, 0, 2))


def new_table(*columns: str, headed: bool = True) -> Table:
    """Makes an empty table.

    Args:
      *columns: names of the columns; ">" before a name aligns its text to the right.
      headed: whether to show the names.
    """
    table = Table(
        box=None,
        show_header=headed,
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.lstrip(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    return table


def _layout(plan: Json) -> Iterator[RenderableType]:
    """Yields the mesh as nested groups, outermost first, each with its link."""
    layout = plan["layout"]
    hardware = plan["hardware"]
    yield Text(_machines(hardware))
    group = hardware["num_devices"]
    tree = new_table("", ">", "", headed=False)
    for depth, (axis, link) in enumerate(layout["links"].items()):
        size = layout["mesh"][axis]
        group //= size
        members = f"{size} x {count_text(group)}" if group > 1 else f"{size} devices"
        tree.add_row(f"{'   ' * depth}└─ {axis} {size}", members, _speed(link))
    if tree.row_count:
        yield tree
    parameters = f"{count_text(plan['parameters'])} parameters"
    if plan["experts"]:
        parameters += f", {count_text(plan['active_parameters'])} active per token"
    batch = f"{layout['global_size']} {layout['unit']}"
    if layout["unit"] == "tokens":
        batch = f"{layout['global_size']} x {layout['sequence_length']} tokens"
    settings = f"remat {layout['remat']}"
    if layout["mesh"]["fsdp"] > 1:
        settings += f", zero {layout['zero']}"
    yield Text(f"{parameters}; {batch} a step; {settings}")


def _speed(link: Json) -> str:
    """Formats a link with its measured times, or else with the datasheet's rate."""
    name: str = link["name"]
    rate = link["bytes_per_s"]
    datasheet = f"{rate / 1e9:.0f} GB/s each way" if rate else ""
    measured = link["calibrated"]
    if not measured:
        return f"{name}, {datasheet}" if datasheet else name
    kinds = (
        f"{kind} {time_text(fit['alpha_s'])} + {fit['bytes_per_s'] / 1e9:.4g} GB/s"
        for kind, fit in measured.items()
    )
    text = f"{name}, calibrated: {', '.join(kinds)}"
    if datasheet:
        text += f" (datasheet: {datasheet})"
    return text


def _machines(hardware: Json) -> str:
    """Formats the number of chips, slices, hosts and rings."""
    if hardware["platform"] != "tpu":
        device = hardware["chip"] or "emulated CPU device"
        return f"{hardware['num_devices']} x {device} on {hardware['hosts']} hosts"
    grid = " x ".join(map(str, hardware["shape"]))
    text = f"{grid} x {hardware['chip']} on {hardware['hosts']} hosts"
    if hardware["num_slices"] > 1:
        text = f"{hardware['num_slices']} slices of {text}"
    rings = [f"dim {i}" for i, is_ring in enumerate(hardware["wrap"]) if is_ring]
    if rings:
        return f"{text}; rings along {', '.join(rings)}"
    return f"{text}; no rings"


def _memory(memory: Json) -> Iterator[RenderableType]:
    """Yields the components by arithmetic, then the compiler's numbers."""
    accounted = memory["accounted_bytes"]
    peak = memory["peak_bytes"]
    capacity = memory["capacity_bytes"]
    table = new_table("by arithmetic, before compiling", ">GiB", ">share", "")
    for name, size in memory["components"].items():
        share = size / max(accounted, 1)
        table.add_row(name, _gib(size), percent_text(share), _bar(share))
    table.add_row("together", _gib(accounted), "", "")
    yield table
    margin = memory["margin_bytes"] or 0
    difference = f"arithmetic: {accounted / peak - 1:+.1%}" if peak else ""
    margin_share = percent_text(abs(margin) / (capacity or 1))
    rows = (
        ("peak", peak, difference),
        ("arguments", memory["argument_bytes"], "state and batch"),
        ("temporaries", memory["temp_bytes"], "if all were alive at once"),
        ("donated", memory["alias_bytes"], "the state, updated in place"),
        ("host memory", memory["host_bytes"], "offloaded"),
        ("usable", capacity, ""),
        ("free" if margin > 0 else "missing", abs(margin), margin_share),
    )
    table = new_table("by the compiler", ">GiB", "")
    for name, size, note in rows:
        if size:
            table.add_row(name, _gib(size), note)
    if table.row_count:
        yield table


def _communication(
    collectives: Sequence[Json], calibration: Json, width: int
) -> Iterator[RenderableType]:
    """Yields a table of collectives, the longest first, and the source of times."""
    groups: dict[tuple[str, str, str, str, str], list[Json]] = {}
    for collective in collectives:
        overlap = "asynchronous" if collective["asynchronous"] else "synchronous"
        key = (
            collective["what"],
            collective["kind"],
            collective["axis"],
            collective["link"] or "",
            overlap,
        )
        groups.setdefault(key, []).append(collective)
    rows = sorted(groups.items(), key=lambda item: -_seconds(item[1]))
    # "if exposed" is the time if compute hides nothing.
    numbers = (">times", ">MB each", ">if exposed")
    if width < _WIDE:
        table = new_table("what", *numbers)
    else:
        table = new_table("what", "kind", "axis", "link", "", *numbers)
    for (what, kind, axis, link, overlap), group in rows[:_MOST_ROWS]:
        count = sum(collective["count"] for collective in group)
        total = sum(collective["bytes"] * collective["count"] for collective in group)
        megabytes = f"{total / max(count, 1) / 1e6:.3g}"
        texts = [what, kind, axis, link, overlap]
        if width < _WIDE:
            way = f"{kind} over {axis}" if axis else kind
            texts = [f"{what}\n  {', '.join(filter(None, (way, link, overlap)))}"]
        table.add_row(*texts, str(count), megabytes, _time_of(group))
    others = rows[_MOST_ROWS:]
    if others:
        seconds = _time_of(collective for _, group in others for collective in group)
        empty = [""] * (len(table.columns) - 2)
        table.add_row(f"{len(others)} more", *empty, seconds)
    if rows:
        yield table
    if calibration:
        yield Text(
            f"times as measured on {calibration['hardware']}: {calibration['file']}"
        )
        missing = calibration["not_measured"]
        if missing:
            yield Text(
                f"not measured, so at datasheet rates without latency: {', '.join(missing)}"
            )


def _experts(experts: Json) -> Iterator[RenderableType]:
    """Yields the layout of experts, the assumed load, and the exchanges of a step."""
    if not experts:
        return
    numbers = f"{experts['experts']} experts, {experts['chosen']} per token"
    if not experts["exchange"]:
        yield Text(f"{numbers}; each device has all experts, nothing is exchanged")
        return
    yield Text(
        f"{numbers}, split over {experts['parts']} devices; exchanged by {experts['exchange']}"
    )
    yield Text(f"assumed: {experts['assumption']} (--expert-load)")
    yield from _exchanged(experts["exchanged"])


def _context(context: Json) -> Iterator[RenderableType]:
    """Yields the form of attention, the busiest device, and the bytes of a step."""
    if not context:
        return
    for line in context["why"]:
        yield Text(line)
    busiest = context["busiest"]
    if busiest > 1:
        yield Text(
            f"the last part sees the most keys: {busiest:.3g} x the mean of attention's work"
        )
    yield from _exchanged(context["exchanged"])


def _exchanged(exchanged: Sequence[Json]) -> Iterator[RenderableType]:
    """Yields a table of summed collectives."""
    table = new_table("what", "kind", "axis", ">sent GB", ">if exposed")
    for row in exchanged:
        table.add_row(
            row["what"],
            row["kind"],
            row["axis"],
            f"{row['wire_bytes'] / 1e9:.3g}",
            time_text(row["seconds"]) if row["seconds"] else "",
        )
    if table.row_count:
        yield table


def _seconds(collectives: Iterable[Json]) -> float:
    """Sums the seconds of collectives, if compute hides none of them."""
    return math.fsum(collective["step_s"] or 0.0 for collective in collectives)


def _time_of(collectives: Iterable[Json]) -> str:
    """Formats the seconds of collectives; "" if unknown."""
    seconds = _seconds(collectives)
    return time_text(seconds) if seconds else ""


def _pipeline(pipeline: Json) -> Iterator[RenderableType]:
    """Yields the schedule with its bubble, if there is a pipeline."""
    if pipeline:
        yield Text(
            f"{pipeline['schedule']}: {pipeline['stages']} stages x {pipeline['chunks']} chunks, "
            f"{pipeline['microbatches']} microbatches, {pipeline['ticks']} ticks, "
            f"bubble {percent_text(pipeline['bubble'])}, at most {pipeline['live_inputs']} live inputs"
        )


def _time(plan: Json) -> Iterator[RenderableType]:
    """Yields the step time, its parts, MFU, speed, cost, and how good the estimate is."""
    time = plan["time"]
    if time["step_s"] is None:
        yield Text(time["sure"])
        return
    low, high = time["band_s"]
    yield Text(
        f"{time_text(time['step_s'])}, between {time_text(low)} and {time_text(high)}"
    )
    table = new_table("", ">", ">", "", headed=False)
    for name, seconds in time["waterfall"].items():
        share = seconds / time["step_s"]
        if share:
            table.add_row(name, time_text(seconds), percent_text(share), _bar(share))
    yield table
    unit = plan["layout"]["unit"]
    utilization = _utilization(time)
    if plan["experts"]:
        utilization += " (of active parameters)"
    yield Text(
        f"{utilization}; {count_text(time['tokens_per_s_per_chip'], 4)} {unit}/s a chip"
    )
    if time["hidden_s"] or time["uncovered_s"]:
        yield Text(
            f"asynchronous communication: compute hides {time_text(time['hidden_s'])} and leaves "
            f"{time_text(time['uncovered_s'])} exposed"
        )
    if plan["cost"]:
        yield Text(_cost(plan["cost"], unit))
    yield Text(f"how sure: {time['sure']}", style="dim")
    for note in time["notes"]:
        yield Text(f"note: {note}", style="dim")


def _pass_before_training(before: Json) -> Iterator[RenderableType]:
    """Yields a line about the pass over the data before the first step."""
    if not before:
        return
    text = (
        f"the first start computes {', '.join(before['fields'])} of all rows, training "
        f"and held out, in one forward pass; it does so once"
    )
    per_row = before["seconds_per_row"]
    if per_row:
        text += f"; about {time_text(1000 * per_row)} for 1,000 rows"
    yield Text(text)


def _utilization(time: Json) -> str:
    """Formats MFU and HFU with the peak that they refer to."""
    shares = {
        "MFU causal": time["mfu_causal"],
        "MFU full": time["mfu_full"],
        "HFU": time["hfu"],
    }
    known = ", ".join(
        f"{name} {percent_text(share)}"
        for name, share in shares.items()
        if share is not None
    )
    if not known:
        return f"MFU unknown: no peak of {time['peak_dtype']} is published"
    peak = time["peak_flops_per_s"] / 1e12
    return f"{known}, of {peak:.4g} TFLOP/s a device ({time['peak_dtype']})"


def _restarts(restarts: Json) -> Iterator[RenderableType]:
    """Yields a checkpoint's size, the best interval, and the cost of a failure."""
    size = gib_text(restarts["checkpoint_bytes"])
    share = gib_text(restarts["device_bytes"])
    yield Text(f"a checkpoint has {size}; a device copies {share} of it")
    pause = "an unknown time (no rate to the host is published)"
    if restarts["blocking_s"]:
        pause = time_text(restarts["blocking_s"])
    written = duration_text(restarts["write_s"])
    yield Text(f"a save stops training for {pause} and is on storage after {written}")
    if restarts["every_steps"]:
        text = f"best is to save every {duration_text(restarts['interval_s'])} (checkpoint.every_steps="
        text += f"{restarts['every_steps']}): saves and failures take {100 * restarts['lost_share']:.2g} %"
        text += " of the time"
        configured = restarts["configured_lost_share"]
        if configured is not None:
            text += f"; at the configured interval {100 * configured:.2g} %"
        yield Text(text)
    restart = duration_text(restarts["restart_s"])
    yield Text(
        f"a failure every {_span(restarts['mtbf_s'])} on average; a restart reads and compiles for {restart}"
    )
    assumed = restarts["assumed"]
    hours = count_text(assumed["chip_hours_per_failure"])
    rate = assumed["host_storage_bytes_per_s"] / 1e9
    text = f"assumed: one failure in {hours} chip hours (--chip-hours-per-failure), "
    yield Text(
        f"{text}{rate:g} GB/s between a host and storage (--host-storage)", style="dim"
    )


def _span(seconds: float) -> str:
    """Formats a long time; in days from two days on."""
    if seconds < 2 * 86400:
        return duration_text(seconds)
    return f"{seconds / 86400:.1f} days"


def _money_text(amount: float) -> str:
    """Formats a price: "1,234", or "0.22" below 100."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}"


def _cost(cost: Json, unit: str) -> str:
    """Formats the time, the chip hours and the price of the whole training."""
    line = f"{count_text(cost['tokens'])} {unit}: {_span(cost['days'] * 86400)}, "
    line += f"{count_text(cost['chip_hours'])} chip hours"
    if "money" in cost:
        line += f", {_money_text(cost['money'])} of your money, {count_text(cost['tokens_per_money'])} {unit} for one"
    return line


_OUTCOMES = {True: "should fit", False: "not enough alone", None: ""}


def _advice(edits: Sequence[Json], width: int) -> Iterator[RenderableType]:
    """Yields a table of edits."""
    columns = ["set", ">saves GiB", "then"]
    if width >= _WIDE:
        columns.append("at the cost of")
    table = new_table(*columns)
    for edit in edits:
        outcome = _OUTCOMES[edit["enough"]]
        if edit["checked"] is not None:
            outcome = "compiled: fits" if edit["checked"] else "compiled: does not fit"
        texts = [edit["words"], _gib(edit["saves_bytes"]), outcome]
        if width >= _WIDE:
            texts.append(edit["cost_note"])
        else:
            texts[0] += f"\n  at the cost of {edit['cost_note']}"
        table.add_row(*texts)
    if edits:
        yield table


def _bar(share: float) -> Text:
    """Draws a bar; 1 is its full width."""
    return Text("█" * round(_BAR * min(share, 1.0)), style="cyan")
