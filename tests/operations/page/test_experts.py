"""Experts in the report and the status: heat maps by their numbers, bands, lines; none
for dense models.
"""

import json
import re
from contextlib import closing

import numpy as np
import pytest

from jaxdist import report, status
from jaxdist.operations.page import experts, heat_map, summary
from jaxdist.storage import run_format
from jaxdist.telemetry import metrics

LAYERS, EXPERTS = 3, 8


def load_at(step: int) -> np.ndarray:
    """Returns a load in which expert 5 of layer 1 gets more and more, and expert 0 of
    layer 2 nothing.
    """
    load = np.full((LAYERS, EXPERTS), 64.0, np.float32)
    load[1, 5] += 8 * step
    load[2, 0] = 0
    return load


def make_run(folder, *, steps=20, arrays=True):
    with closing(metrics.MetricsWriter(folder)) as writer:
        for step in range(1, steps + 1):
            load = load_at(step)
            fullest = load.max(-1) / load.mean(-1)
            figures = {
                "load_max_over_mean": fullest,
                "load_entropy": np.float32([1.0, 0.9, 0.8]),
                "dead_experts": (load == 0).sum(-1),
                "dropped": np.float32([0, 0, 0.03]),
                "exchange_rounds": np.float32([1, 2, 1]),
                "expert_load": load,
            }
            row = {"loss": 2.0, "stats/fullest_layer": int(fullest.argmax())}
            for name, x in figures.items():
                row |= {
                    f"stats/{name}/{f}": float(getattr(x, f)())
                    for f in ("mean", "min", "max")
                }
            writer.write(step, row)
            if arrays and step % 10 == 0:
                writer.write_arrays(
                    step, {f"stats/{name}": x for name, x in figures.items()}
                )
    info = {"parameters": 40_000_000, "active_parameters": 12_000_000}
    (folder / "run.json").write_text(
        json.dumps(
            run_format.marked(
                info | {"flops_per_token": {"causal": 7.5e7, "full": 8e7}}
            )
        )
    )
    return folder


def cells_of(drawing: str) -> dict[int, int]:
    """Returns how many cells a map has of each colour."""
    paths = re.findall(r'<path class="heat-(\d)" d="([^"]*)"', drawing)
    return {int(colour): path.count("M") for colour, path in paths}


def test_a_map_has_the_colour_of_every_expert_in_every_layer(tmp_path):
    assert report.main([str(make_run(tmp_path))]) == 0
    page = (tmp_path / "report.html").read_text()
    last, over_time = re.findall(r'<svg class="heat".*?</svg>', page)
    expected = load_at(20) / load_at(20).mean(-1, keepdims=True)
    values = json.loads(re.search(r'data-values="([^"]*)"', last)[1])
    np.testing.assert_allclose(values, expected, rtol=5e-3)
    counts = np.bincount([heat_map.colour(x) for x in expected.ravel()])
    assert cells_of(last) == {n: count for n, count in enumerate(counts) if count}
    assert cells_of(last)[0] == 1
    assert sum(counts) == LAYERS * EXPERTS
    assert "expert 5 of layer 1, 2.67 times the mean" in last
    values = json.loads(re.search(r'data-values="([^"]*)"', over_time)[1])
    assert len(values) == LAYERS
    assert 'data-places="[10,20]"' in over_time
    assert values[1][0] < values[1][1] == pytest.approx(expected[1].max(), rel=5e-3)
    assert set(re.findall(r"heat-\d", page)) == {
        f"heat-{n}" for n in range(len(heat_map.NAMES))
    }


def test_curves_are_bands_over_the_layers(tmp_path):
    assert report.main([str(make_run(tmp_path))]) == 0
    page = (tmp_path / "report.html").read_text()
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert [field.title for field in experts.FIELDS] == [
        t for t in titles if t in {field.title for field in experts.FIELDS}
    ]
    assert page.count('class="band run-0"') == len(experts.FIELDS)
    assert not [title for title in titles if title.startswith("stats/")]
    for shown in ("active for a token", "12M", "FLOPs of a token, in MFU", "75M"):
        assert shown in page, shown


def test_other_stats_of_several_numbers_are_one_chart(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            figures = {
                f"stats/width/{f}": v
                for f, v in (("mean", 2.0), ("min", 1.0), ("max", 3.0))
            }
            writer.write(step, {"loss": 1.0, "stats/alone/mean": 1.0} | figures)
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert {"stats/width", "stats/alone/mean"} <= set(
        re.findall(r"<h3>(.*?)</h3>", page)
    )
    assert "stats/width/min" not in page
    assert "Experts" not in page
    assert 'class="heat"' not in page


def test_dense_layers_have_no_cells(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            writer.write_arrays(
                step, {experts.LOAD: load_at(step) * np.float32([[0], [1], [1]])}
            )
    drawing = experts.heat_maps(summary.read_run(tmp_path))
    last, over_time = drawing.split("Fullest expert of each layer")
    assert sum(cells_of(last).values()) == 2 * EXPERTS
    assert cells_of(last)[0] == 1
    assert sum(cells_of(over_time).values()) == 2 * 2
    assert "[[null,null]," in over_time
    assert f"Load of {EXPERTS} experts in {LAYERS} layers" in last


@pytest.mark.parametrize(
    "load",
    [
        None,
        3,
        [],
        [[]],
        [[1], [1, 2]],
        [["a"]],
        [[-1.0, 2.0]],
        [[1e300]],
        [1, 2],
        [[None]],
        [[0, 0]],
    ],
)
def test_a_load_that_is_none_is_left_out(tmp_path, load):
    make_run(tmp_path, arrays=False)
    (tmp_path / "arrays.jsonl").write_text(
        json.dumps({"step": 1, "time": 1, experts.LOAD: load}) + "\n"
    )
    assert experts.heat_maps(summary.read_run(tmp_path)) == ""
    assert report.main([str(tmp_path)]) == 0


def test_maps_of_many_experts_stay_small():
    values = np.random.default_rng(0).gamma(2, 0.5, (94, 128)).tolist()
    drawing = heat_map.heat_map("load", values, rows="layer", columns="expert")
    assert len(drawing) < 600_000
    assert sum(cells_of(drawing).values()) == 94 * 128
    assert len(re.findall("<text", drawing)) < 60  # not every layer and expert is named


def test_the_status_is_one_line(tmp_path, capsys):
    make_run(tmp_path)
    assert status.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    said = "experts   fullest 2.67x the mean (layer 1), up to 1 of a layer dead, 1 % dropped, 1.33 rounds"
    assert said in text
    assert (
        "model     40M parameters, 12M active for a token; MFU by 75M FLOPs a token"
        in text
    )
    assert status.main([str(tmp_path), "--json"]) == 0
    of = json.loads(capsys.readouterr().out)["experts"]
    assert of["layer"] == 1
    assert of["dead"] == 1
    assert of["max_over_mean"] == pytest.approx(2.6667, rel=1e-3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1, "loss": 2.0}\n')
    (tmp_path / "run.json").write_text(
        json.dumps(run_format.marked({"parameters": 5, "active_parameters": 5}))
    )
    assert status.main([str(tmp_path)]) == 0
    assert not {"experts", "model "} & set(
        re.findall(r"^\w+ ?", capsys.readouterr().out, re.M)
    )
    (tmp_path / "run.json").write_text(
        '{"format": "jaxdist-1", "parameters": 1e999, "active_parameters": 5, '
        '"flops_per_token": []}'
    )
    row = json.dumps(
        {"step": 2, "time": 1}
        | {f"stats/{name}/mean": 1.0 for name in ("dropped", "load_entropy")}
    )
    (tmp_path / "metrics.jsonl").write_text(row.replace("1.0", "1e999") + "\n")
    assert status.main([str(tmp_path)]) == 0
    assert status.main([str(tmp_path), "--json"]) == 0
