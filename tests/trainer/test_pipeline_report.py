"""What a run says of its pipeline: by arithmetic, in lines, in run.json and in the
report.
"""

import base64
import json
import re
import runpy
import shutil
from pathlib import Path

import jax
import pytest

from jaxdist.operations.page import html, summary
from jaxdist.planner import dry_run
from jaxdist.storage import run_format
from jaxdist.trainer import cli, pipeline_report, validation
from support.paths import DOCS, ROOT


def lines(*arguments: str) -> list[str]:
    return list(pipeline_report.lines(validated(*arguments)))


def validated(*arguments: str):
    words = ["--config=quickstart", "--config.batch.global_size=64", *arguments]
    run = cli.parse(cli.ConfigParser("test", None), words)[1]
    return validation.validate(run, jax.devices(), with_data=False)


def test_without_stages_nothing_is_said():
    assert lines() == []
    assert pipeline_report.describe(validated()) == {}


def test_the_numbers_are_the_table_s():
    first, *rest = lines(
        "--config.mesh.pipeline=4", "--config.pipeline.microbatches=32"
    )
    assert "1f1b, 4 stages, 32 microbatches: 38 ticks" in first  # m + 2 (p - 1)
    assert "at most 7 inputs of 1 sequences a device" in first  # 2 p - 1
    assert rest == [
        "  FLOPs by stage: 25.0%, 25.0%, 25.0%, 25.0%; layers by place: 1, 1, 1, 1"
    ]


def test_the_bubble_without_a_head_is_the_closed_form():
    found = pipeline_report.estimate_pipeline(
        validated("--config.mesh.pipeline=4", "--config.pipeline.microbatches=8")
    )
    assert found.costs.head > 0
    assert found.costs.backward[0][0] == 3 * found.costs.forward[0][0]
    found.costs.__dict__["head"] = 0.0
    bare = pipeline_report.simulate(found.schedule, found.costs)
    assert bare.bubble == pytest.approx(3 / 11)
    # the head has no bubble: all stages share it
    assert found.simulation.bubble < bare.bubble


def test_layers_and_head_are_the_formula_s():
    composition = validated("--config.mesh.pipeline=2")
    run = composition.config
    model = run.model
    layer, head, first = pipeline_report._forward_and_backward(composition, 4)
    assert head == 6 * model["d_model"] * model["vocab_size"]
    assert first == 0
    flops = pipeline_report.policy_flops(run, composition.spec)
    assert 4 * layer + head == flops["causal"]


def test_layers_that_every_stage_does_are_told():
    sizes = {
        "num_experts": 8,
        "num_layers": 9,
        "first_dense_layers": 1,
        "feed_forward_pattern": "dense,sparse",
    }
    flags = [f"--config.model.{name}={value}" for name, value in sizes.items()]
    few = [*flags, "--config.mesh.pipeline=2", "--config.pipeline.microbatches=4"]
    found = pipeline_report.estimate_pipeline(validated(*few))
    costs, parts = (
        found.costs,
        pipeline_report.simulate(found.schedule, found.costs).phases.sum(0),
    )
    assert costs.first > 0
    assert parts[0] == 4 * costs.first
    assert parts[4] == 3 * parts[0]
    said = "\n".join(lines(*few))
    assert "groups of 2 layers by place: 2, 2" in said
    assert "(first_blocks, or those of the head) run on every stage" in said


def test_inputs_of_layers_are_counted():
    two = "--config.mesh.pipeline=2", "--config.pipeline.microbatches=8"
    assert "at most 3 inputs x 2 layers of 2 sequences a device" in lines(*two)[0]
    assert (
        "at most 3 inputs of 2 sequences a device"
        in lines(*two, "--config.pipeline.remat=none")[0]
    )


def test_advice_and_warnings_name_what_to_set():
    uneven = ["--config.mesh.pipeline=4", "--config.model.num_layers=7"]
    text = "\n".join(lines(*uneven, "--config.pipeline.edges=last"))
    assert (
        "warning: stage 0 sets the pace, 13% above the mean of the cut 2, 2, 2, 1"
        in text
    )
    assert "every stage does the whole embedding and head" in text
    # 16 by default
    assert "pipeline.microbatches=32 would have a bubble of 8.6%" in text
    few = lines("--config.mesh.pipeline=2", "--config.pipeline.microbatches=2")
    assert (
        "  pipeline.schedule=interleaved pipeline.chunks=2 would have a bubble of 20.0%"
        in few
    )


def test_edges_that_every_stage_does_whole_have_their_cost_said():
    cost = r"every stage does the whole embedding and head, which lengthens the step by (\d+\.\d)%"
    sizes = ["--config.mesh.pipeline=4", "--config.mesh.dcn.pipeline=2"]
    whole = re.search(cost, lines(*sizes, "--config.pipeline.edges=last")[2])
    assert whole
    assert float(whole[1]) > 1
    across = f"each tick sums over slices; with pipeline.edges=last none does, for {whole[1]}% more work"
    assert across in lines(*sizes)[2]
    assert not any("slices" in line for line in lines(sizes[0]))


def test_places_are_filled_as_the_executor_fills_them():
    found = pipeline_report.estimate_pipeline(
        validated("--config.mesh.pipeline=4", "--config.model.num_layers=9")
    )
    assert found.balance.cut == (3, 3, 3, 0)  # not 3, 2, 2, 2
    assert "9 layers divide by 1, 3, 9" in found.balance.warning()


@pytest.mark.parametrize(
    ("stages_", "remat", "cost"),
    [(2, "full", 4), (4, "full", 3), (2, "layers", 3), (2, "none", 3)],
)
def test_the_backward_counts_its_recomputation(stages_, remat, cost):
    """With a layer a stage, full recomputation is what a stage does anyway."""
    words = [f"--config.mesh.pipeline={stages_}", f"--config.pipeline.remat={remat}"]
    costs = pipeline_report.estimate_pipeline(validated(*words)).costs
    assert costs.backward[0][0] == cost * costs.forward[0][0]


def test_a_dry_run_says_it():
    run = validated("--config.mesh.pipeline=2", "--config.model.num_layers=2").config
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "compile_step", lambda *_: None)
        patch.setattr(dry_run, "_compiled_sizes", lambda _: None)
        patch.setattr(dry_run, "_step_flops", lambda *_: None)
        dry_run.dry_run(run, jax.devices(), said.append)
    assert any(line.startswith("pipeline: 1f1b, 2 stages") for line in said)


# --- the report -----------------------------------------------------------------------


def page(folder: Path, about: dict) -> str:
    (folder / "run.json").write_text(json.dumps(run_format.marked(about)))
    return html.render([summary.read_run(folder)])


def test_the_report_shows_the_timeline(tmp_path):
    about = pipeline_report.describe(
        validated("--config.mesh.pipeline=4", "--config.pipeline.microbatches=8")
    )
    assert about["pipeline"] | {"bubble": 0} == {
        "schedule": "1f1b",
        "stages": 4,
        "microbatches": 8,
        "chunks": 1,
        "ticks": 14,
        "bubble": 0,
        "live_inputs": 7,
    }
    (image,) = re.findall(r"base64,([\w+/=]+)\"", page(tmp_path, about))
    drawing = base64.b64decode(image).decode()
    assert drawing == about["timeline_svg"]
    assert drawing.count('<rect class="f"') == 4 * 8 == drawing.count('<rect class="b"')


@pytest.mark.parametrize(
    "drawing", [None, 3, [], "</script><script>alert(1)</script>\"'\ud800"]
)
def test_a_hostile_timeline_stays_inside_its_image(tmp_path, drawing):
    text = page(tmp_path, {"timeline_svg": drawing})
    assert "alert(1)" not in text
    assert ("<img alt" in text) == isinstance(drawing, str)


def test_a_very_long_timeline_is_not_drawn():
    many = [
        "--config.mesh.pipeline=4",
        "--config.pipeline.microbatches=1024",
        "--config.mesh.data=2",
    ]
    about = pipeline_report.describe(
        validated("--config.batch.global_size=2048", *many)
    )
    assert about["pipeline"]["microbatches"] == 1024
    assert "timeline_svg" not in about


def test_the_pictures_of_the_docs_are_drawn_by_their_command(tmp_path):
    folder = DOCS / "images"
    script = shutil.copy(folder / "timelines.py", tmp_path)
    runpy.run_path(script, run_name="__main__")
    drawn = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    assert len(drawn) == 3
    assert drawn == {name: (folder / name).read_text() for name in drawn}


def test_the_chart_of_memory_is_drawn_from_its_results():
    folder = ROOT
    script = runpy.run_path(str(folder / "docs" / "images" / "memory.py"))
    record = json.loads(
        (folder / "benchmarks" / "results" / "tpu-pipeline.json").read_text()
    )
    needed = {f"large {name} {m}" for name in ("1f1b", "interleaved") for m in (8, 32)}
    assert needed | {"quick gpipe 8", "quick gpipe 32"} <= set(record["cases"])
    drawn = script["drawing"](record["cases"])
    assert drawn == (folder / "docs" / "images" / "pipeline_memory.svg").read_text()
    assert drawn.count("<rect") == len(
        (script["LARGE"] | script["SMALL"]).keys() & record["cases"].keys()
    )
