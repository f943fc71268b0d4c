"""The text of a plan: verdict, layout, memory, communication, time, advice.

Drawn from the plan's JSON: what a person sees and what a program reads are the same
numbers.
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
_BAR = 24  # cells
_MOST_ROWS = 14  # of collectives; the rest is summed


def _gib(size: float) -> str:
    """Returns a size for a column in GiB."""
    return f"{size / GIB:.2f}"


def show(plan: Json, console: Console) -> None:
    """Prints the plan; the console decides about colour."""
    for part in _parts(plan):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_text(plan: Json) -> str:
    """Returns the plan without colour."""
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        show(plan, console)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _parts(plan: Json) -> Iterator[RenderableType]:
    verdict, style = _VERDICTS[plan["fits"]]
    yield Text.assemble(
        (verdict, style), f" on {plan['target']}: {plan['exit_reason']}"
    )
    yield from _section("layout", _layout(plan))
    yield from _section("memory of a device", _memory(plan["memory"]))
    yield from _section(
        "communication of a step, each device",
        _communication(plan["collectives"], plan["calibration"]),
    )
    yield from _section("experts", _experts(plan["experts"]))
    yield from _section("attention over a split sequence", _context(plan["context"]))
    yield from _section("pipeline", _pipeline(plan["pipeline"]))
    yield from _section("time of a step", _time(plan))
    yield from _section("checkpoints and failures", _restarts(plan["restarts"]))
    yield from _section("warnings", (Text(f"- {text}") for text in plan["warnings"]))
    yield from _section(
        "what would make it fit, the cheapest first", _advice(plan["advice"])
    )


def _section(title: str, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    for i, part in enumerate(parts):
        if not i:
            yield Text(f"\n{title}", style="bold")
        yield Padding(part, (0, 0, 0, 2))


def new_table(*columns: str, headed: bool = True) -> Table:
    """Returns an empty table; a column that starts with ">" has its text at
    the right.
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
    """Yields the mesh as nested groups, outermost first, each with the link that it
    talks over.
    """
    layout = plan["layout"]
    hardware = plan["hardware"]
    yield Text(_machines(hardware))
    left = hardware["num_devices"]
    tree = new_table("", ">", "", headed=False)
    for depth, (axis, link) in enumerate(layout["links"].items()):
        size = layout["mesh"][axis]
        left //= size
        members = f"{size} x {count_text(left)}" if left > 1 else f"{size} devices"
        tree.add_row(f"{'   ' * depth}└─ {axis} {size}", members, _speed(link))
    if tree.row_count:
        yield tree
    batch = layout["global_size"]
    length = layout["sequence_length"]
    remat = f"remat {layout['remat']}" + (
        f", zero {layout['zero']}" if layout["mesh"]["fsdp"] > 1 else ""
    )
    size = (
        f"{batch} x {length} tokens"
        if layout["unit"] == "tokens"
        else f"{batch} {layout['unit']}"
    )
    counted = f"{count_text(plan['parameters'])} parameters"
    if plan["experts"]:
        counted += f", {count_text(plan['active_parameters'])} active for a token"
    yield Text(f"{counted}; {size} a step; {remat}")


def _speed(link: Json) -> str:
    """Returns a link's name with the measured rate and latency of each kind, or else
    the datasheet's rate.
    """
    name = link["name"]
    rate = link["bytes_per_s"]
    datasheet = f"{rate / 1e9:.0f} GB/s each way" if rate else ""
    if not (measured := link["calibrated"]):
        return ", ".join(filter(None, (name, datasheet)))
    kinds = (
        f"{kind} {time_text(one['alpha_s'])} + {one['bytes_per_s'] / 1e9:.4g} GB/s"
        for kind, one in measured.items()
    )
    text = f"{name}, calibrated: {', '.join(kinds)}"
    if datasheet:
        text += f" (datasheet: {datasheet})"
    return text


def _machines(hardware: Json) -> str:
    if hardware["platform"] == "tpu":
        grid = " x ".join(map(str, hardware["shape"]))
        ring = ", ".join(
            f"dim {i}" for i, wraps in enumerate(hardware["wrap"]) if wraps
        )
        slices = (
            f"{hardware['num_slices']} slices of " if hardware["num_slices"] > 1 else ""
        )
        rings = f"; rings along {ring}" if ring else "; no rings"
        return (
            f"{slices}{grid} x {hardware['chip']} on {hardware['hosts']} hosts{rings}"
        )
    what = hardware["chip"] or "emulated CPU device"
    return f"{hardware['num_devices']} x {what} on {hardware['hosts']} hosts"


def _memory(memory: Json) -> Iterator[RenderableType]:
    """Yields our accounting with bars, then the compiler's numbers beside its sum."""
    summed = memory["accounted_bytes"]
    peak = memory["peak_bytes"]
    capacity = memory["capacity_bytes"]
    table = new_table("by arithmetic, before compiling", ">GiB", ">share", "")
    for name, size in memory["components"].items():
        table.add_row(
            name,
            _gib(size),
            percent_text(size / max(summed, 1)),
            _bar(size / max(summed, 1)),
        )
    table.add_row("together", _gib(summed), "", "")
    yield table
    left = memory["margin_bytes"] or 0
    rows = (
        ("peak", peak, f"our sum is {summed / peak - 1:+.1%}" if peak else ""),
        ("arguments", memory["argument_bytes"], "state and batch"),
        (
            "temporaries",
            memory["temp_bytes"],
            "the sum of what is alive at some time; only information",
        ),
        ("given back", memory["alias_bytes"], "the donated state"),
        ("host memory", memory["host_bytes"], "offloaded"),
        ("may be used", capacity, ""),
        (
            "left" if left > 0 else "missing",
            abs(left),
            percent_text(abs(left) / (capacity or 1)),
        ),
    )
    table = new_table("by the compiler", ">GiB", "")
    for name, size, note in rows:
        if size:
            table.add_row(name, _gib(size), note)
    if table.row_count:
        yield table


def _communication(
    collectives: Sequence[Json], calibration: Json
) -> Iterator[RenderableType]:
    """Yields what moves, alike ones summed, the longest first; and who measured it."""
    alike: dict[tuple, list[Json]] = {}
    for one in collectives:
        way = "behind compute" if one["asynchronous"] else "in the open"
        alike.setdefault(
            (one["what"], one["kind"], one["axis"], one["link"], way), []
        ).append(one)
    rows = sorted(alike.items(), key=lambda item: -_seconds(item[1]))
    table = new_table(
        "what", "kind", "axis", "link", ">times", ">MB each", ">in the open", ""
    )
    for (what, kind, axis, link, way), ones in rows[:_MOST_ROWS]:
        count = sum(one["count"] for one in ones)
        each = sum(one["bytes"] * one["count"] for one in ones) / max(count, 1) / 1e6
        seconds = _time_of(ones)
        table.add_row(
            what, kind, axis, link or "", str(count), f"{each:.3g}", seconds, way
        )
    if rest := rows[_MOST_ROWS:]:
        seconds = _time_of(one for _, ones in rest for one in ones)
        table.add_row(f"{len(rest)} more", "", "", "", "", "", seconds, "")
    if rows:
        yield table
    if calibration:
        yield Text(
            f"times as measured on {calibration['hardware']}: {calibration['file']}"
        )
        if missing := calibration["not_measured"]:
            yield Text(
                f"not measured, so at datasheet rates without latency: {', '.join(missing)}"
            )


def _experts(experts: Json) -> Iterator[RenderableType]:
    """Yields how rows reach experts, what was assumed, and the bytes of all their
    exchanges in a step.
    """
    if not experts:
        return
    own = f"{experts['experts']} experts, {experts['chosen']} a token"
    if not experts["exchange"]:
        yield Text(f"{own}; each device has the kernels of all, nothing is exchanged")
        return
    yield Text(
        f"{own}, shared out by {experts['parts']} devices; exchanged by {experts['exchange']}"
    )
    yield Text(f"assumed: {experts['assumption']} (--expert-load)")
    yield from _exchanged(experts["exchanged"])


def _context(context: Json) -> Iterator[RenderableType]:
    """Yields which form attention takes and why, who has most to do, and the bytes of a
    step.
    """
    if not context:
        return
    for line in context["why"]:
        yield Text(line)
    if (most := context["busiest"]) > 1:
        yield Text(
            f"the last part sees the most keys: {most:.3g} x the mean of attention's work"
        )
    yield from _exchanged(context["exchanged"])


def _exchanged(exchanged: Sequence[Json]) -> Iterator[RenderableType]:
    table = new_table("what", "kind", "axis", ">sent GB", ">in the open", headed=True)
    for one in exchanged:
        seconds = time_text(one["seconds"]) if one["seconds"] else ""
        table.add_row(
            one["what"],
            one["kind"],
            one["axis"],
            f"{one['wire_bytes'] / 1e9:.3g}",
            seconds,
        )
    if table.row_count:
        yield table


def _seconds(collectives: Iterable[Json]) -> float:
    return math.fsum(one["step_s"] or 0.0 for one in collectives)


def _time_of(collectives: Iterable[Json]) -> str:
    return time_text(seconds) if (seconds := _seconds(collectives)) else ""


def _pipeline(pipeline: Json) -> Iterator[RenderableType]:
    if pipeline:
        yield Text(
            f"{pipeline['schedule']}: {pipeline['stages']} stages x {pipeline['chunks']} chunks, "
            f"{pipeline['microbatches']} microbatches, {pipeline['ticks']} ticks, "
            f"bubble {percent_text(pipeline['bubble'])}, at most {pipeline['live_inputs']} live inputs"
        )


def _time(plan: Json) -> Iterator[RenderableType]:
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
        if share := seconds / time["step_s"]:
            table.add_row(name, time_text(seconds), percent_text(share), _bar(share))
    yield table
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
    if known:
        known += f", of {time['peak_flops_per_s'] / 1e12:.4g} TFLOP/s a device ({time['peak_dtype']})"
    known = known or f"MFU unknown: no peak of {time['peak_dtype']} is published"
    unit = plan["layout"]["unit"]
    if plan["experts"]:
        known += " (of active parameters)"
    yield Text(
        f"{known}; {count_text(time['tokens_per_s_per_chip'], 4)} {unit}/s a chip"
    )
    if time["hidden_s"] or time["uncovered_s"]:
        yield Text(
            f"communication behind compute: {time_text(time['hidden_s'])} covered, "
            f"{time_text(time['uncovered_s'])} more than its window"
        )
    if cost := plan["cost"]:
        yield Text(_cost(cost, unit))
    yield Text(f"how sure: {time['sure']}", style="dim")
    for note in time["notes"]:
        yield Text(f"note: {note}", style="dim")


def _restarts(restarts: Json) -> Iterator[RenderableType]:
    """Yields a checkpoint's size, how often to save, and what a failure costs."""
    size = gib_text(restarts["checkpoint_bytes"])
    share = gib_text(restarts["device_bytes"])
    pause = time_text(restarts["blocking_s"])
    written = duration_text(restarts["write_s"])
    yield Text(f"a checkpoint has {size}, {share} of it from a device")
    pause = (
        pause
        if restarts["blocking_s"]
        else "an unknown time (no rate to the host is published)"
    )
    yield Text(f"a save stops training for {pause} and is on storage after {written}")
    if restarts["every_steps"]:
        text = f"best is to save every {duration_text(restarts['interval_s'])} (checkpoint.every_steps="
        text += f"{restarts['every_steps']}): saves and failures take {100 * restarts['lost_share']:.2g} %"
        if (own := restarts["configured_lost_share"]) is not None:
            text += f" of the time, as configured {100 * own:.2g} %"
        yield Text(text)
    again = duration_text(restarts["restart_s"])
    yield Text(
        f"a failure every {_span(restarts['mtbf_s'])} on average; to read and compile again takes {again}"
    )
    assumed = restarts["assumed"]
    hours = count_text(assumed["chip_hours_per_failure"])
    rate = assumed["host_storage_bytes_per_s"] / 1e9
    text = f"assumed: one failure in {hours} chip hours (--chip-hours-per-failure), "
    yield Text(
        f"{text}{rate:g} GB/s between a host and storage (--host-storage)", style="dim"
    )


def _span(seconds: float) -> str:
    return (
        duration_text(seconds) if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"
    )


def _cost(cost: Json, unit: str) -> str:
    line = f"{count_text(cost['tokens'])} {unit}: {_span(cost['days'] * 86400)}, "
    line += f"{count_text(cost['chip_hours'])} chip hours"
    if "money" in cost:
        line += f", {cost['money']:,.0f} of your money, {count_text(cost['tokens_per_money'])} {unit} for one"
    return line


def _advice(edits: Sequence[Json]) -> Iterator[RenderableType]:
    table = new_table("set", ">saves GiB", "then", "at the cost of")
    for edit in edits:
        outcome = {True: "should fit", False: "not enough alone", None: ""}[
            edit["enough"]
        ]
        if edit["checked"] is not None:
            outcome = "compiled: fits" if edit["checked"] else "compiled: does not fit"
        table.add_row(
            edit["words"], _gib(edit["saves_bytes"]), outcome, edit["cost_note"]
        )
    if edits:
        yield table


def _bar(share: float) -> Text:
    return Text("█" * round(_BAR * min(share, 1.0)), style="cyan")
