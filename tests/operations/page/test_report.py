"""The report: one self-contained page, runs overlaid, hostile text, clear errors, no
jax.
"""

import itertools
import json
import math
import re
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser

import pytest

from jaxdist import config, report
from jaxdist.operations.page import charts, heat_map, html, summary
from jaxdist.operations.page.status import as_text, read_status
from jaxdist.storage import run_format
from jaxdist.telemetry import metrics
from support.paths import ROOT

HOSTILE = "</script><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>'\"&"


def make_run(folder, *, steps=60, learning_rate=3e-4, mfu=0.4, name=HOSTILE):
    clock = itertools.count(1_790_000_000).__next__
    with closing(metrics.MetricsWriter(folder, clock=clock)) as w:
        w.event("start", 0, devices=8)
        for step in range(1, steps + 1):
            loss = math.nan if step == 7 else 3.0 + 5.0 / step
            row = {
                "loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": 1.0 / step,
            }
            row |= {
                "tokens_seen": step * 4096,
                "step_time_s": 0.5,
                "tokens_per_s": 8192.0,
                "data_wait_s": 0.0,
            }
            row |= {"mfu_causal": mfu, "mfu_full": mfu, "mfu": mfu, "aux/z_loss": 0.001}
            w.write(step, row)
        w.write(steps, {"eval_loss": 3.25, "eval_tokens": 1000})
        w.event("nonfinite", 7, field=name)
        w.event("stop", steps, reason="train.steps reached")
    options = {"optimizer": {"learning_rate": learning_rate}, "seed": 0, "note": name}
    (folder / "config.json").write_text(json.dumps(run_format.marked(options)))
    info = {
        "versions": {"jax": "0.10.2"},
        "device_kind": "TPU v5p",
        "mesh": {"data": 2, "fsdp": 4, "tensor": 1},
        "parameters": 1234567,
        "mfu_peak": {"dtype": "float8", "flops_per_s": 1978.9e12},
        "sharding": [{"name": name, "spec": "('fsdp', None)", "bytes": 4096}],
    }
    (folder / "run.json").write_text(json.dumps(run_format.marked(info)))
    (folder / "sample.txt").write_text(f"def f(x): return x < 1 and {name}")
    return folder


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that every open tag is closed."""

    VOID = ("meta", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def count(self, tag, **attributes):
        wanted = {
            key.rstrip("_").replace("_", "-"): value
            for key, value in attributes.items()
        }
        return sum(
            name == tag and all(given.get(k) == v for k, v in wanted.items())
            for name, given in self.tags
        )


def read_page(path):
    text = path.read_text()
    return text, Page(text)


def test_the_page_is_self_contained_and_escapes_everything(tmp_path):
    workdir = make_run(tmp_path / "run")
    assert report.main([str(workdir)]) == 0
    text, page = read_page(workdir / "report.html")
    assert page.count("script") == 1, "only our own script"
    for tag in ("img", "link", "iframe", "object", "embed", "base", "form"):
        assert page.count(tag) == 0
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes), (
            tag,
            attributes,
        )
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert "http://example.com" in text, "the hostile text is shown, as text"
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'; script-src 'sha256-" in policy
    assert "prefers-color-scheme: dark" in text


def test_what_the_page_shows(tmp_path):
    workdir = make_run(tmp_path / "run", name="plain")
    assert report.main([str(workdir)]) == 0
    text, page = read_page(workdir / "report.html")
    assert page.count("svg") == 2 * 2 + 6 + 1, (
        "two views of the loss, six fields, one aux"
    )
    labels = [given["aria-label"] for tag, given in page.tags if tag == "svg"]
    assert labels[0].startswith("Loss by step. loss: from 8 to 3.083;")
    assert "evaluation: from 3.25 to 3.25" in labels[0]
    assert "step 7: nan" in text, "a non-finite loss is marked"
    for shown in ("3.0833", "3.2500", "1.23M", "40.0 %", "500 ms", "246k", "TPU v5p"):
        assert shown in text, shown
    for shown in (
        "data 2 × fsdp 4",
        "(&#x27;fsdp&#x27;, None)",
        "4,096",
        "versions.jax",
        "0.10.2",
    ):
        assert shown in text, shown
    assert "stopped: train.steps reached" in text
    assert "nonfinite" in text
    assert "def f(x)" in text
    points = next(
        json.loads(a["data-points"]) for t, a in page.tags if "data-points" in a
    )
    assert points[0] == [1, 8.0]
    assert len(points) == 59


def test_the_best_evaluation_is_of_one_held_out_set(tmp_path):
    """A run whose train.steps was raised evaluates on more targets from there on."""
    workdir = make_run(tmp_path / "run", name="plain")
    with closing(metrics.MetricsWriter(workdir)) as w:
        for step, loss, targets in (
            (70, 2.5, 1000),
            (80, 2.75, 8000),
            (90, 2.625, 8000),
        ):
            w.write(step, {"loss": 2.0})
            w.write(step, {"eval_loss": loss, "eval_tokens": targets})
    run = summary.read_run(workdir)
    figures = summary.figures(run)
    names = ("last evaluation loss", "best evaluation loss", "held-out targets")
    assert [figures[name] for name in names] == ["2.6250", "2.6250", "8k"]
    page = html.render([run])
    assert "run: the held-out set changed" in page
    assert "of the 2 evaluations on the last set, from step 80 on" in page
    # losses of different sets are not joined by a line
    assert "evaluation on 1k targets: from 3.25 to 2.5;" in page
    assert "evaluation on 8k targets: from 2.75 to 2.625" in page
    assert "held-out set changed" not in html.render(
        [summary.read_run(make_run(tmp_path / "b"))]
    )


SHARDING = {
    "parameter": "blocks/query",
    "dims": [2, 32, 4],
    "names": ["d_model", None],
    "stored": "(-,-,tensor)",
    "state": "(fsdp+data,-,tensor)",
    "per_device": [2, 32, 2],
}


def test_sharding_is_written_as_on_the_terminal(tmp_path):
    workdir = make_run(tmp_path)
    info = json.loads((workdir / "run.json").read_text()) | {"sharding": [SHARDING]}
    (workdir / "run.json").write_text(json.dumps(info))
    text = html.render([summary.read_run(workdir)])
    cells = "".join(
        f"<td>{cell}</td>"
        for cell in (
            "blocks/query",
            "2x32x4",
            "d_model,-",
            "(-,-,tensor)",
            "(fsdp+data,-,tensor)",
            "2x32x2",
        )
    )
    assert cells in text
    assert "<th>optimizer state</th><th>per device</th>" in text


# --- small screens


PHONE = 390  # CSS pixels
_OUTSIDE = 2 * 20 + 2 * 16 + 2  # of a drawing: margins, paddings and borders
_DIGIT = 0.6  # width of a digit, relative to the size of the font, at most


def font_size(width):
    """Reads the size of the labels of charts on a screen of this width."""
    css = html._STYLE
    size = 11.5
    for limit, number in re.findall(
        r"@media \(max-width: (\d+)px\) { \.chart text { font-size: (\d+)px", css
    ):
        if width <= int(limit):
            size = float(number)
    return size


def test_a_phone_shows_the_loss_of_the_whole_run(tmp_path):
    text = html.render([summary.read_run(make_run(tmp_path, steps=300))])
    drawings = re.findall(
        r'<svg class="chart (\w+)" viewBox="0 0 (\d+) .*?</svg>', text
    )
    assert drawings == [("broad", "1160"), ("slim", "560")] * 2
    curves = [
        [json.loads(points) for points in re.findall(r'data-points="(.*?)"', drawing)]
        for drawing in re.findall(r'<svg class="chart [bs]\w+".*?</svg>', text)
    ]
    assert curves[0] == curves[1]
    assert curves[1][0][0][0] == 1
    assert curves[1][0][-1][0] == 300
    assert ".broad { display: none; } .slim { display: block; }" in text
    # nothing makes a chart wider than its card
    assert "svg { display: block; width: 100%; height: auto;" in text
    for rule in re.findall(r"([^{}]+){[^{}]*min-width: 720px", html._STYLE):
        assert "chart" not in rule
        assert ".view" not in rule
        assert "svg" not in rule.replace(".map svg", "")
    shown = font_size(PHONE) * (PHONE - _OUTSIDE) / 560
    assert shown > 9, "labels of so many pixels cannot be read"


def test_two_tiles_stand_in_a_row_on_a_phone():
    least, gap = re.search(
        r"minmax\(min\((\d+)px, 50% - 6px\), 1fr\)\); gap: (\d+)px", html._STYLE
    ).groups()
    inside = PHONE - 2 * 20
    assert min(int(least), inside / 2 - 6) * 2 + int(gap) <= inside
    assert min(int(least), inside / 2 - 6) * 3 + 2 * int(gap) > inside


@pytest.mark.parametrize("width", [PHONE, 1240])
@pytest.mark.parametrize(
    ("first", "last"), [(1, 60), (0, 9), (12_500, 20_000), (990_000, 1_310_000)]
)
def test_labels_of_an_axis_do_not_touch(first, last, width):
    """Also those of a run that was restored, whose first tick is a wide number."""
    points = [(first, 0.0), (last, 1.0)]
    chart = charts.chart("x", [charts.Curve("x", "run-0", points)])
    heat = heat_map.heat_map(
        "x", [[1.0, 2.0]] * 3, rows="layer", columns="step", places=[first, last]
    )
    for drawing, size in ((chart, font_size(width)), (heat, 11.5)):
        rows = {}
        for anchor, x, y, text in re.findall(
            r'<text class="(\w+)" x="([\d.]+)" y="([\d.]+)">(.*?)</text>', drawing
        ):
            wide = _DIGIT * size * len(text)
            begin = float(x) - wide * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            rows.setdefault(y, []).append((begin, begin + wide, text))
        below = sorted(rows[max(rows, key=float)])
        assert len(below) >= 2
        for (_, end, text), (begin, _, other) in itertools.pairwise(below):
            assert end + 2 < begin, (text, other)


def test_two_runs_are_overlaid_with_their_differences(tmp_path):
    first = make_run(tmp_path / "a", name="x")
    second = make_run(tmp_path / "b", name="x", learning_rate=6e-4, steps=80)
    assert report.main([str(first), str(second)]) == 0
    assert not (first / "report.html").exists()
    text, page = read_page(first / "report_vs_b.html")
    classes = [given.get("class", "") for tag, given in page.tags if tag == "g"]
    assert any("run-0" in c for c in classes)
    assert any("run-1" in c for c in classes)
    assert "<h1>a vs b</h1>" in text
    assert "Configuration: 1 difference<" in text
    row = "<td>optimizer.learning_rate</td><td class=number>0.0003</td><td class=number>0.0006</td>"
    assert row in text
    assert text.count("Sharding of") == 1, "equal tables are shown once"


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    first, second = make_run(tmp_path / "p" / "run"), make_run(tmp_path / "q" / "run")
    out = tmp_path / "new" / "page.html"
    assert report.main([str(first), str(second), "--out", str(out)]) == 0
    assert "<h1>p/run vs q/run</h1>" in out.read_text()


@pytest.mark.parametrize("count", [5, 18])
def test_any_number_of_runs_is_overlaid(tmp_path, count):
    runs = [
        make_run(
            tmp_path / f"r{i}", name="x", learning_rate=1e-4 * (i + 1), steps=50 + i
        )
        for i in range(count)
    ]
    assert report.main([str(run) for run in runs]) == 0
    text, page = read_page(runs[0] / f"report_vs_{count - 1}_runs.html")
    styles = {
        given["class"].partition(" ")[2].partition(" ")[2]
        for tag, given in page.tags
        if tag == "g"
    }
    assert len(styles) == count, "each run has a colour or dashes of its own"
    assert all(f".run-{i} " in text for i in range(8))
    assert ".dashed" in text
    assert ".dotted" in text
    assert f"<h1>r0 and {count - 1} more runs</h1>" in text
    assert "Configuration: 1 difference<" in text
    figures = text.partition("Key figures</h2>")[2].partition("</table>")[0]
    assert figures.count("<tr>") == count + 1
    assert all(f" r{i}</td>" in figures for i in range(count))
    labels = [given["aria-label"] for tag, given in page.tags if tag == "svg"]
    assert all(f"r{i} loss: from" in labels[0] for i in range(count))


def test_names_have_as_many_parents_as_keep_them_apart(tmp_path):
    runs = [make_run(tmp_path / x / y / "run", steps=2) for x in "ab" for y in "cd"]
    assert report._names([str(run) for run in runs]) == [
        "a/c/run",
        "a/d/run",
        "b/c/run",
        "b/d/run",
    ]


def test_the_peak_that_mfu_is_a_share_of_is_said(tmp_path):
    make_run(tmp_path)
    assert (
        summary.figures(summary.read_run(tmp_path))["peak, in MFU"]
        == "1979 TFLOP/s in float8"
    )
    for unknown in (
        None,
        {"dtype": "float8", "flops_per_s": None},
        {"flops_per_s": math.inf},
        {},
        3,
    ):
        assert summary.mfu_peak({"mfu_peak": unknown}) == ""


def test_the_limit_of_a_step_and_the_published_mfu_are_said(tmp_path):
    info = {
        "device_kind": "NVIDIA H100 80GB HBM3",
        "parameters": 8_030_261_248,
        "active_parameters": 8_030_261_248,
        "mfu_peak": {"dtype": "bfloat16", "flops_per_s": 989.4e12},
    }

    def figures_of(found, lora_rank=0, **changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with closing(metrics.MetricsWriter(folder)) as writer:
            writer.event("start", 0, roofline=found)
        (folder / "run.json").write_text(json.dumps(run_format.marked(info | changes)))
        config = run_format.marked({"lora": {"rank": lora_rank}})
        (folder / "config.json").write_text(json.dumps(config))
        return summary.figures(summary.read_run(folder))

    limit = {"bound": "compute", "intensity": 957.2, "threshold": 295.3}
    figures = figures_of(limit)
    assert figures["limit of a step"] == "compute: 957 FLOPs per byte, threshold 295"
    assert figures["published MFU"].startswith("33 to 49 % on H100 SXM")
    assert "published MFU" not in figures_of(limit, lora_rank=16)
    assert "published MFU" not in figures_of(limit, active_parameters=3e9)
    assert "published MFU" not in figures_of(limit, device_kind="NVIDIA L4")
    for unknown in (None, 3, {}, {"bound": "compute"}, limit | {"bound": "x"}):
        assert "limit of a step" not in figures_of(unknown)


def test_runs_without_a_file_or_without_steps(tmp_path):
    workdir = tmp_path / "run"
    with closing(metrics.MetricsWriter(workdir)) as writer:
        writer.event("start", 0)
    (workdir / "run.json").write_text('{"torn')
    assert report.main([str(workdir)]) == 0
    text, _ = read_page(workdir / "report.html")
    assert "No step was logged yet" in text
    assert ">died: its process ended without a word<" in text
    unknown = make_run(tmp_path / "unknown", mfu=None)
    assert report.main([str(unknown)]) == 0
    assert "MFU: unknown" in (unknown / "report.html").read_text()


def test_user_errors_are_one_line_and_exit_78(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for workdir, reason in (
        (tmp_path / "none", "no such folder"),
        (tmp_path / "empty", "no run"),
    ):
        assert report.main([str(workdir)]) == config.EXIT_CONFIG == 78
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert reason in error
        assert str(workdir) in error
    run = make_run(tmp_path / "run")
    mine = tmp_path / "mine.html"
    mine.write_text("<p>precious</p>")
    assert report.main([str(run), "--out", str(mine)]) == 78
    assert "is no jaxdist report" in capsys.readouterr().err
    assert mine.read_text() == "<p>precious</p>"
    assert report.main([str(run)]) == report.main([str(run)]) == 0, (
        "a report replaces a report"
    )


def test_the_command_runs_without_jax_and_without_rich(tmp_path):
    workdir = make_run(tmp_path / "run")
    program = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'numpy', 'rich'): sys.modules[name] = None\n"
        "import runpy; sys.argv = ['report', sys.argv[1]]\n"
        "runpy.run_module('jaxdist.report', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(workdir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(workdir / "report.html")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.31, 2.74, [2.4, 2.5, 2.6, 2.7]),
        (0, 1e-4, [0, 2e-5, 4e-5, 6e-5, 8e-5, 1e-4]),
        (-3, 7, [-2, 0, 2, 4, 6]),
    ],
)
def test_linear_ticks(low, high, expected):
    assert charts.linear_ticks(low, high) == pytest.approx(expected)


def test_tick_labels():
    texts = [charts.tick_text(v, 0.1) for v in (0.0, 0.1, 1.5)]
    assert texts == ["0", "0.1", "1.5"]
    assert [charts.tick_text(v, 2e5) for v in (2e5, 1.25e6)] == ["200k", "1.25M"]
    assert charts.tick_text(3e-4, 1e-4) == "3e-4"


def test_thinning_keeps_peaks_and_bad_points():
    y = [1.0] * 10_000
    y[4321], y[7777] = 99.0, math.nan
    thin = charts._thinned(charts.Curve("loss", "run-0", list(enumerate(y))))
    assert len(thin.points) <= charts.MAX_POINTS + 4
    steps, values = zip(*thin.points, strict=True)
    assert 99.0 in values
    assert any(map(math.isnan, values))
    assert steps[0] == 0
    assert steps[-1] == 9_999


def test_smoothing_does_not_lag_at_the_start_and_skips_nonfinite():
    y = [10.0 / (1 + index) for index in range(100)] + [math.nan] + [0.1] * 99
    smoothed = charts.smooth(y, 20)
    assert smoothed[:10] == pytest.approx(y[:10])
    assert all(math.isfinite(value) for value in smoothed)
    assert max(abs(a - b) for a, b in zip(smoothed, y, strict=True) if b == b) < 0.05
    assert smoothed[-1] == pytest.approx(0.1)


def test_reading_a_run_tolerates_torn_files(tmp_path):
    workdir = make_run(tmp_path / "run")
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write('{"step": 61, "lo')
    (workdir / "config.json").write_text("{")
    run = summary.read_run(workdir)
    assert len(run.rows.train) == 60
    assert run.config == {}
    assert Page(html.render([run])).count("h1") == 1


def test_the_form_of_attention_over_split_sequences_is_said_with_its_reason(tmp_path):
    workdir = make_run(tmp_path / "run")
    assert "Split sequences" not in html.render([summary.read_run(workdir)])
    line = (
        "context 4: attention by heads: 32 heads divide by 4; heads sends <b>125.8 MB"
    )
    (workdir / "run.json").write_text(
        json.dumps(run_format.marked({"split_sequences": [line, 3]}))
    )
    page = html.render([summary.read_run(workdir)])
    assert "<h2>Split sequences</h2>" in page
    assert line.replace("<", "&lt;").replace(">", "&gt;") in page


def test_a_report_leaves_out_what_has_another_shape_and_says_so(tmp_path):
    workdir = make_run(tmp_path / "run")
    (workdir / "metrics.jsonl").open("a").write(
        '[]\n{"step": null}\n{"loss": 1e999, "step": 61}\n'
    )
    (workdir / "events.jsonl").open("a").write('{"event": "save"}\n')
    info = {
        "mesh": 3,
        "device_kind": "\ud800",
        "sharding": [1, {"name": []}],
        "timeline_svg": {},
    }
    (workdir / "run.json").write_text(json.dumps(run_format.marked(info)))
    (workdir / "config.json").write_text("[" * 100_000)
    (workdir / "profile").mkdir()
    rows = [None, {"op": "dot"}, {"op": "dot", "share": 0.5, "seconds": 1, "count": 2}]
    (workdir / "profile" / "top_ops.json").write_text(
        json.dumps(run_format.marked({"ops": rows}))
    )
    (workdir / "plan.txt").mkdir()
    run = summary.read_run(workdir)
    assert list(run.unreadable) == [
        "metrics.jsonl: 2 lines could not be read",
        "events.jsonl: 1 line could not be read",
        "config.json: nested deeper than 64 levels",
        "run.json: mesh is int",
        "run.json: timeline_svg is dict",
        "profile/top_ops.json: 2 of 3 rows could not be read",
        "plan.txt: no regular file",
    ]
    assert len(run.rows.train) == 61
    assert len(run.events) == 3
    assert len(run.operations) == 1
    page = html.render([run])
    assert page.encode()
    assert all(fault in page for fault in run.unreadable)
    assert Page(page).count("h1") == 1


def test_a_profile_of_another_version_is_named_and_skipped(tmp_path):
    workdir = make_run(tmp_path / "run")
    (workdir / "profile").mkdir()
    row = {"op": "dot", "share": 0.5, "seconds": 1, "count": 2}
    (workdir / "profile" / "top_ops.json").write_text(json.dumps({"ops": [row]}))
    run = summary.read_run(workdir)
    assert not run.operations
    (fault,) = run.unreadable
    assert fault.startswith("profile/top_ops.json was written by another version")


@pytest.mark.parametrize("value", [-5.0, 0.0, 1e308, -1e308, 10**39, math.nan])
def test_a_chart_of_any_number_is_drawn(tmp_path, value):
    row = {"step": 1, "loss": value, "tokens_per_s": value, "step_time_s": value}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    assert Page(html.render([summary.read_run(tmp_path)])).count("svg") >= 1


@pytest.mark.parametrize(
    ("fields", "text", "tone"),
    [
        ({"reason": "finished"}, "finished", "good"),
        ({"reason": "good enough"}, "stopped: good enough", "good"),
        ({"reason": "nonfinite"}, "failed: nonfinite", "bad"),
        ({"reason": "save_failed", "error": "full"}, "failed: save_failed", "bad"),
        ({}, "stopped", "good"),
    ],
)
def test_a_run_that_could_not_go_on_is_not_green(tmp_path, fields, text, tone):
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        writer.event("start", 0)
        writer.event("stop", 3, **fields)
    run = summary.read_run(tmp_path)
    assert summary.state(run) == (text, tone)
    assert f'<span class="badge {tone}">{text}</span>' in html.render([run])
    assert f"\nstate     {text}, " in as_text(read_status(tmp_path).document())
