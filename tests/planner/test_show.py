"""The text of a plan: it has the width of the console, and loses nothing for it."""

import dataclasses
import json
import sys

import pytest
from rich.console import Console

from jaxdist import plan
from jaxdist.planner import document, fewest, show, targets
from jaxdist.planner.answer import Answer, Question
from jaxdist.planner.plan import plan_by_arithmetic
from jaxdist.planner.timing import Time
from jaxdist.telemetry.units import time_text
from support.runs import run_of

WAYS = ("all-gather", "reduce-scatter", "all-to-all")
COLLECTIVES = [
    {
        "what": f"{what} of blocks/{path}",
        "kind": kind,
        "axis": axis,
        "link": link,
        "count": 64,
        "bytes": 2.35e8,
        "step_s": 0.0626,
        "asynchronous": kind != "all-to-all",
    }
    for kind, what in zip(WAYS, ("gather", "gradient", "exchange"), strict=True)
    for path, axis, link in (
        ("attention/query", "fsdp", "ICI"),
        ("mlp/experts/gate or blocks/mlp/experts/up", "data+fsdp", "DCN"),
        ("mlp/down", "", None),
    )
]
ADVICE = [
    {
        "words": "batch.accumulation=4 pipeline.microbatches=16 remat.policy=full",
        "saves_bytes": 2.5e10,
        "enough": True,
        "checked": True,
        "cost_note": "a forward pass more: about 33 % of the step's FLOPs",
    }
]


@pytest.fixture(name="planned", scope="module")
def planned_fixture():
    """Makes a plan by arithmetic, with collectives and advice in its JSON."""
    target = targets.parse("v5p:2x2x1")
    made = plan_by_arithmetic(run_of("llama3_8b"), target)
    return made, made.to_json() | {"collectives": COLLECTIVES, "advice": ADVICE}


def text_of(report, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        show.show(report, console)
    return capture.get()


@pytest.mark.parametrize(("reference", "has_pass"), [("auto", True), ("module", False)])
def test_a_plan_tells_of_the_pass_before_training(reference, has_pass):
    run = run_of(
        "llama3_8b:tiny",
        **{
            "objective.name": "dpo",
            "objective.reference": reference,
            "data.source": "jsonl",
            "data.path": "pairs.jsonl",
            "data.format": "preferences",
            "data.packing": "documents",
        },
    )
    made = plan_by_arithmetic(run, targets.parse("cpu:8"))
    assert ("before training" in text_of(made.to_json(), 100)) == has_pass
    step_s = 0.3
    timed = dataclasses.replace(made, time=Time("test", step_s=step_s))
    found = timed.to_json()["pass_before_training"]
    if not has_pass:
        assert found == {}
        return
    rows = run.batch.global_size
    assert found == {
        "fields": ["reference"],
        "seconds_per_row": pytest.approx(step_s / 3 / rows),
    }
    (line,) = show._pass_before_training(found)
    assert "in one forward pass; it does so once; about" in line.plain
    assert f"{time_text(1000 * step_s / 3 / rows)} for 1,000 rows" in line.plain


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_plan_fits_the_console_and_no_word_is_cut(planned, width):
    _, report = planned
    text = text_of(report, width)
    headings = (report["target"], "cheapest first")
    for line in text.splitlines():
        assert len(line) <= width or any(heading in line for heading in headings)
    words = [word.strip(",") for word in text.split()]
    for collective in COLLECTIVES:
        assert words.count(collective["what"].split()[-1]) >= 1
    for kind in WAYS:
        assert words.count(kind) == 3
    assert sum(word.startswith(("asynchronous", "synchronous")) for word in words) >= 9
    for word in ADVICE[0]["words"].split():
        assert word in words
    assert "…" not in text


def test_wide_and_narrow_text_have_the_same_numbers(planned):
    _, report = planned
    words = [
        sorted(word.strip(",") for word in text_of(report, width).split())
        for width in (80, 200)
    ]
    narrow, wide = (set(some) for some in words)
    # columns with a heading are named in the cells of narrow text
    assert wide - narrow <= {"kind", "axis", "link"}
    assert narrow - wide <= {"over"}


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("80", 80), ("132", 132)])
def test_a_piped_plan_is_as_wide_as_columns_says(
    planned, monkeypatch, capsys, columns, width
):
    made, report = planned
    monkeypatch.setattr(Question, "answer", lambda *_, **__: Answer(made, 0))
    monkeypatch.setattr(document.Plan, "to_json", lambda self: report)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        monkeypatch.setattr(stream, "fileno", lambda: -1, raising=False)
    assert plan.main(["--config=llama3_8b", "--on=v5p:2x2x1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (line for line in lines if ">" not in line and "MB each" in line)
    assert len(heading) == width
    assert ("link" in heading) == (width > 110)
    tables = [line for line in lines if line.startswith("  ")]
    assert max(map(len, tables)) == width


def test_the_smallest_machine_is_found_in_80_columns():
    row = {
        "target": "h100:128x8@25GB/s",
        "chips": 1024,
        "zero": 3,
        "accumulation": 16,
        "arithmetic_bytes": 7e10,
        "compiled_bytes": 0,
        "fits": True,
    }
    found = {"rows": [row], "illegal": {}, "best": None}
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        fewest.show(json.loads(json.dumps(found)), console)
    text = capture.get()
    table = text.splitlines()[:4]
    assert all(len(line) <= 80 for line in table)
    words = " ".join(table).split()
    for word in ("h100:128x8@25GB/s", "1024", "accumulation", "65.2", "arithmetic"):
        assert word in words
