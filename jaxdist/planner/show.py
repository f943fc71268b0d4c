"""The text of a plan: verdict, layout, memory, communication, time, advice.

Drawn from the plan's JSON: what a person sees and what a program reads are the same numbers.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxdist.telemetry.units import GIB, count_text, duration_text, percent_text, time_text

Json = Mapping[str, Any]
_VERDICTS = {
    True: ("FITS", "bold green"),
    False: ("DOES NOT FIT", "bold red"),
    None: ("CANNOT TELL", "bold yellow"),
}
_BAR = 24  # cells
_MOST_ROWS = 14  # of collectives; the rest is summed
_WAYS = {True: "behind compute", False: "in the open"}


def _gib(size: float) -> str:
    """Returns a size for a column in GiB."""
    return f"{size / GIB:.2f}"


def show(plan: Json, console: Console) -> None:
    """Prints the plan; the console decides about colour."""
    for part in _parts(plan):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


def as_text(plan: Json, width: int = 120) -> str:
    """Returns the plan without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(plan, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _parts(plan: Json) -> Iterator[RenderableType]:
    verdict, style = _VERDICTS[plan["fits"]]
    yield Text.assemble((verdict, style), f" on {plan['target']}: {plan['exit_reason']}")
    yield from _section("layout", _layout(plan))
    yield from _section("memory of a device", _memory(plan["memory"]))
    yield from _section("communication of a step, each device", _communication(plan["collectives"]))
    yield from _section("pipeline", _pipeline(plan["pipeline"]))
    yield from _section("time of a step", _time(plan))
    yield from _section("warnings", (Text(f"- {text}") for text in plan["warnings"]))
    yield from _section("what would make it fit, the cheapest first", _advice(plan["advice"]))


def _section(title: str, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    for i, part in enumerate(parts):
        if not i:
            yield Text(f"\n{title}", style="bold")
        yield Padding(part, (0, 0, 0, 2))


def new_table(*columns: str, headed: bool = True) -> Table:
    """Returns an empty table; a column that starts with ">" has its text at the right."""
    table = Table(box=None, show_header=headed, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        side: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name.lstrip(">"), justify=side, no_wrap=right, overflow="fold")
    return table


# --- layout ---------------------------------------------------------------------------------------


def _layout(plan: Json) -> Iterator[RenderableType]:
    """Yields the mesh as nested groups, outermost first, each with the link that it talks over."""
    layout, hardware = plan["layout"], plan["hardware"]
    yield Text(_machines(hardware))
    left = hardware["num_devices"]
    used = [(axis, size) for axis, size in layout["mesh"].items() if size > 1]
    tree = new_table("", ">", "", headed=False)
    for depth, (axis, size) in enumerate(used):
        left //= size
        link, rate = layout["links"][axis]["name"], layout["links"][axis]["bytes_per_s"]
        speed = f"{link}, {rate / 1e9:.0f} GB/s each way" if rate else link
        members = f"{size} x {count_text(left)}" if left > 1 else f"{size} devices"
        tree.add_row(f"{'   ' * depth}└─ {axis} {size}", members, speed)
    if used:
        yield tree
    batch, length = layout["global_size"], layout["sequence_length"]
    remat = f"remat {layout['remat']}" + (f", zero {layout['zero']}" if layout["mesh"]["fsdp"] > 1 else "")
    yield Text(f"{count_text(plan['parameters'])} parameters; {batch} x {length} tokens a step; {remat}")


def _machines(hardware: Json) -> str:
    if hardware["platform"] == "tpu":
        grid = " x ".join(map(str, hardware["shape"]))
        ring = ", ".join(f"dim {i}" for i, wraps in enumerate(hardware["wrap"]) if wraps)
        slices = f"{hardware['num_slices']} slices of " if hardware["num_slices"] > 1 else ""
        rings = f"; rings along {ring}" if ring else "; no rings"
        return f"{slices}{grid} x {hardware['chip']} on {hardware['hosts']} hosts{rings}"
    what = hardware["chip"] or "emulated CPU device"
    return f"{hardware['num_devices']} x {what} on {hardware['hosts']} hosts"


# --- memory ---------------------------------------------------------------------------------------


def _memory(memory: Json) -> Iterator[RenderableType]:
    """Yields our accounting with bars, then the compiler's numbers beside its sum."""
    components, capacity = memory["components"], memory["capacity_bytes"]
    summed = memory["accounted_bytes"]
    table = new_table("by arithmetic, before compiling", ">GiB", ">share", "")
    for name, size in components.items():
        table.add_row(name, _gib(size), percent_text(size / max(summed, 1)), _bar(size / max(summed, 1)))
    table.add_row("together", _gib(summed), "", "")
    yield table
    found = new_table("by the compiler", ">GiB", "")
    if memory["peak_bytes"] is not None:
        off = summed / memory["peak_bytes"] - 1
        found.add_row("peak", _gib(memory["peak_bytes"]), f"our sum is {off:+.1%}")
    for name in ("argument", "temp", "alias", "host"):
        if size := memory[f"{name}_bytes"]:
            found.add_row(_MEANINGS[name][0], _gib(size), _MEANINGS[name][1])
    if capacity is not None:
        found.add_row("may be used", _gib(capacity), "")
    if memory["margin_bytes"] is not None:
        left = memory["margin_bytes"]
        found.add_row("left" if left >= 0 else "missing", _gib(abs(left)), percent_text(abs(left) / capacity))
    if found.row_count:
        yield found


_MEANINGS = {
    "argument": ("arguments", "state and batch"),
    "temp": ("temporaries", "the sum of what is alive at some time; only information"),
    "alias": ("given back", "the donated state"),
    "host": ("host memory", "offloaded"),
}


# --- communication --------------------------------------------------------------------------------


def _communication(collectives: Sequence[Json]) -> Iterator[RenderableType]:
    """Yields what moves, alike ones summed, the longest first."""
    alike: dict[tuple, list[Json]] = {}
    for one in collectives:
        way = _WAYS[one["asynchronous"]]
        alike.setdefault((one["what"], one["kind"], one["axis"], one["link"], way), []).append(one)
    rows = sorted(alike.items(), key=lambda item: -_seconds(item[1]))
    table = new_table("what", "kind", "axis", "link", ">times", ">MB each", ">in the open", "")
    for (what, kind, axis, link, way), ones in rows[:_MOST_ROWS]:
        count = sum(one["count"] for one in ones)
        each = sum(one["bytes"] * one["count"] for one in ones) / max(count, 1) / 1e6
        seconds = _seconds(ones)
        shown = time_text(seconds) if seconds else ""
        table.add_row(what, kind, axis, link or "", str(count), f"{each:.3g}", shown, way)
    if rest := rows[_MOST_ROWS:]:
        seconds = sum(_seconds(ones) for _, ones in rest)
        table.add_row(f"{len(rest)} more", "", "", "", "", "", time_text(seconds) if seconds else "", "")
    if rows:
        yield table


def _seconds(ones: Sequence[Json]) -> float:
    return math.fsum(one["step_s"] or 0.0 for one in ones)


def _pipeline(pipeline: Json) -> Iterator[RenderableType]:
    if pipeline:
        yield Text(
            f"{pipeline['schedule']}: {pipeline['stages']} stages x {pipeline['chunks']} chunks, "
            f"{pipeline['microbatches']} microbatches, {pipeline['ticks']} ticks, "
            f"bubble {percent_text(pipeline['bubble'])}, at most {pipeline['live_inputs']} live inputs"
        )


# --- time -----------------------------------------------------------------------------------------


def _time(plan: Json) -> Iterator[RenderableType]:
    time = plan["time"]
    if time["step_s"] is None:
        yield Text(time["sure"])
        return
    low, high = time["band_s"]
    yield Text(f"{time_text(time['step_s'])}, between {time_text(low)} and {time_text(high)}")
    table = new_table("", ">", ">", "", headed=False)
    for name, seconds in time["waterfall"].items():
        if share := seconds / time["step_s"]:
            table.add_row(name, time_text(seconds), percent_text(share), _bar(share))
    yield table
    shares = {"MFU causal": time["mfu_causal"], "MFU full": time["mfu_full"], "HFU": time["hfu"]}
    known = ", ".join(f"{name} {percent_text(share)}" for name, share in shares.items() if share is not None)
    known = known or "MFU unknown: no peak is published for this dtype"
    yield Text(f"{known}; {count_text(time['tokens_per_s_per_chip'], 4)} tokens/s a chip")
    if time["hidden_s"] or time["uncovered_s"]:
        yield Text(
            f"communication behind compute: {time_text(time['hidden_s'])} covered, "
            f"{time_text(time['uncovered_s'])} more than its window"
        )
    yield from _cost(plan["cost"])
    yield Text(f"how sure: {time['sure']}", style="dim")
    for note in time["notes"]:
        yield Text(f"left out: {note}", style="dim")


def _cost(cost: Json) -> Iterator[RenderableType]:
    if not cost:
        return
    span = duration_text(cost["days"] * 86400) if cost["days"] < 2 else f"{cost['days']:.1f} days"
    line = f"{count_text(cost['tokens'])} tokens: {span}, {count_text(cost['chip_hours'])} chip hours"
    if "money" in cost:
        line += f", {cost['money']:,.0f} of your money, {count_text(cost['tokens_per_money'])} tokens for one"
    yield Text(line)


# --- advice ---------------------------------------------------------------------------------------


def _advice(edits: Sequence[Json]) -> Iterator[RenderableType]:
    table = new_table("set", ">saves GiB", "then", "at the cost of")
    for edit in edits:
        table.add_row(edit["words"], _gib(edit["saves_bytes"]), _outcome(edit), edit["cost_note"])
    if edits:
        yield table


def _outcome(edit: Json) -> str:
    checked, enough = edit["checked"], edit["enough"]
    if checked is not None:
        return "compiled: fits" if checked else "compiled: does not fit"
    return {True: "should fit", False: "not enough alone", None: ""}[enough]


def _bar(share: float) -> Text:
    return Text("█" * round(_BAR * min(share, 1.0)), style="cyan")
