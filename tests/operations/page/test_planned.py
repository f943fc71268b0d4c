"""The plan that lies in a run's folder: used for the parts of a step if it is of the
run, else ignored.
"""

import json
from contextlib import closing

import pytest

from jaxdist.operations.page import html, planned, status, step_parts, summary
from jaxdist.storage import run_format
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer.run_config import keys_outside_step

MESH = {"pipeline": 4, "data": 1, "fsdp": 16, "expert": 1, "context": 1, "tensor": 1}
CONFIG = {
    "train": {"steps": 100, "log_every": 10},
    "batch": {"global_size": 64, "sequence_length": 2048, "accumulation": 2},
    "mesh": {
        "pipeline": 4,
        "data": 1,
        "fsdp": -1,
        "expert": 1,
        "context": 1,
        "tensor": 1,
        "zero": 3,
    },
    "precision": {"compute": "bfloat16"},
    "data": {"path": "/here/corpus"},
}
INFO = {
    "platform": "tpu",
    "device_kind": "TPU v5",
    "num_devices": 64,
    "mesh": MESH,
    "zero": 3,
    "accumulation": 2,
    "topology": {"shape": [4, 4, 4], "slices": 1},
    "source": {"hash": "5d1f0c2b7e8a9f10", "dirty": False},
    "pipeline": {"bubble": 0.3},
}
PLAN = {
    "fits": True,
    "exit_reason": "peak 3 GiB of 95 GiB",
    "target": "v5p:4x4x4",
    "date": "2026-11-23T15:20:00+00:00",
    "source": {"hash": "5d1f0c2b7e8a9f10"},
    "hardware": {
        "platform": "tpu",
        "chip": "TPU v5p",
        "num_devices": 64,
        "num_slices": 1,
        "shape": [4, 4, 4],
    },
    "layout": {"mesh": MESH, "zero": 3, "accumulation": 2},
    "config": CONFIG | {"mesh": CONFIG["mesh"] | {"fsdp": 16}},  # what -1 came to
    planned.OUTSIDE_STEP: keys_outside_step(),
    "time": {
        "sure": "all in the band",
        "step_s": 1.6,
        "band_s": [1.3, 1.8],
        "waterfall": {
            "compute": 0.7,
            "attention": 0.1,
            "recompute": 0.2,
            "bubble": 0.2,
            "exposed communication": 0.4,
        },
    },
}
ROW = {
    "step_time_s": 2.0,
    "data_wait_s": 0.2,
    "mfu": 0.22,
    "mfu_full": 0.25,
    "hfu": 0.3,
    "loss": 5.0,
}
OPS = [
    {
        "op": "all-gather.3",
        "kind": "all-gather",
        "share": 0.5,
        "seconds": 0.8,
        "count": 8,
    }
]


def changed(document, path, value):
    """Returns a copy of a document with the value at a dotted path changed."""
    name, _, rest = path.partition(".")
    return document | {name: changed(document[name], rest, value) if rest else value}


def write_run(folder, *, info=INFO, config=CONFIG, plan=PLAN, row=ROW, ops=()):
    with closing(MetricsWriter(folder)) as writer:
        writer.event("start", 0, devices=64)
        writer.write(10, row)
    for name, document in (("run", info), ("config", config), ("plan", plan)):
        (folder / f"{name}.json").write_text(json.dumps(run_format.marked(document)))
    if ops:
        (folder / "profile").mkdir()
        (folder / "profile" / "top_ops.json").write_text(
            json.dumps(run_format.marked({"ops": ops}))
        )
    return status.read_status(folder).document()


def test_without_a_profile_the_planned_shares_are_those_of_the_measured_step(tmp_path):
    document = write_run(tmp_path)
    shares = document["step_parts"]
    assert sum(shares.values()) == pytest.approx(1)
    # measured; a plan knows of no data
    assert shares[step_parts.DATA] == pytest.approx(0.1)
    assert shares[step_parts.COMMUNICATION] == pytest.approx(0.9 * 0.4 / 1.6)
    assert shares[step_parts.BUBBLE] == pytest.approx(0.9 * 0.2 / 1.6)
    busy = 0.9 * (1.6 - 0.4 - 0.2) / 1.6
    assert shares[step_parts.AGAIN] == pytest.approx(busy * (1 - 0.25 / 0.3))
    assert shares[step_parts.AT_PEAK] == 0.22
    plan = document["plan"]
    assert plan["used"]
    assert plan["reason"] is None
    assert plan["measured_to_planned"] == pytest.approx(2.0 / 1.6)
    assert (plan["step_s"], plan["low_s"], plan["high_s"]) == (1.6, 1.3, 1.8)
    said = "estimated by plan for v5p:4x4x4 on 2026-11-23"
    assert said in document["step_parts_source"]
    assert document["verdict"].endswith("the step takes 1.25 x what plan expects")
    text = " ".join(status.as_text(document).split())
    assert (
        f"plan a step of 1.6 s (1.3 s to 1.8 s), {said}; it takes 1.25 x that" in text
    )
    page = html.render([summary.read_run(tmp_path)])
    assert page.count(said) == 2
    assert "1.25 x what plan expects" in page


def test_a_profile_wins_for_what_it_measures(tmp_path):
    document = write_run(tmp_path, ops=OPS)
    shares = document["step_parts"]
    assert shares[step_parts.COMMUNICATION] == pytest.approx(0.9 * 0.5)
    # of the schedule
    assert shares[step_parts.BUBBLE] == pytest.approx(0.9 * 0.5 * 0.3)
    assert "profiled steps" in document["step_parts_source"]
    assert document["plan"]["measured_to_planned"] == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "layout.mesh",
            MESH | {"pipeline": 1, "fsdp": 64},
            "planned with fsdp 64, the run has fsdp 16 x pip",
        ),
        ("layout.zero", 1, "mesh.zero: planned with 1, the run has 3"),
        ("layout.accumulation", 4, "batch.accumulation: planned with 4, the run has 2"),
        (
            "config.batch.global_size",
            32,
            "batch.global_size: planned with 32, the run has 64",
        ),
        (
            "config.precision.compute",
            "float32",
            "precision.compute: planned with float32, the run has bf",
        ),
        (
            "config.remat",
            {"policy": "full"},
            "remat.policy: planned with full, the run has (absent)",
        ),
        (
            "hardware.num_devices",
            32,
            "the number of devices: planned with 32, the run has 64",
        ),
        (
            "hardware.chip",
            "TPU v5e",
            "the device: planned with TPU v5e, the run has TPU v5",
        ),
        (
            "hardware.shape",
            [4, 2, 8],
            "slices: planned with [[4, 2, 8], 1], the run has [[4, 4, 4], 1]",
        ),
        (
            "source.hash",
            "0000000000000000",
            "source of jaxdist and the model: planned with 0000000000000000",
        ),
        ("source", {}, "source of jaxdist and the model: planned with None"),
        ("format", "jaxdist-0", "was written by another version of jaxdist"),
        ("time.step_s", None, "it says nothing of the time (all in the band)"),
        ("time.step_s", 16.0, "its times are no parts of a step"),
        ("time.step_s", float("nan"), "its times are no parts of a step"),
        ("time.step_s", "1", "its times are no parts of a step"),
        ("time.band_s", [1], "its times are no parts of a step"),
        (
            "time.waterfall",
            {"bubble": -1.0, "compute": 2.6},
            "its times are no parts of a step",
        ),
        ("time.waterfall", [], "its times are no parts of a step"),
        ("layout", 3, "planned with one device"),
    ],
)
def test_a_plan_of_another_step_is_ignored(tmp_path, path, value, said):
    document = write_run(tmp_path, plan=changed(PLAN, path, value))
    assert not document["plan"]["used"]
    assert said.replace("has bf", "has bfloat16") in document["plan"]["reason"], (
        document["plan"]["reason"]
    )
    # of the schedule
    assert document["step_parts"][step_parts.BUBBLE] == pytest.approx(0.9 * 0.3)
    assert step_parts.COMMUNICATION not in document["step_parts"]
    assert "what plan expects" not in document["verdict"]
    command = f"try jaxdist plan --workdir {tmp_path}, which separates them, or "
    largest = max(document["step_parts"], key=document["step_parts"].get)
    assert (command in document["verdict"]) == (largest == step_parts.COMPUTE)
    assert "plan.json is not used: " in " ".join(status.as_text(document).split())
    assert "plan.json is not used: " in html.render([summary.read_run(tmp_path)])


@pytest.mark.parametrize(
    "path", ["config.train.steps", "config.train.log_every", "config.data.path"]
)
def test_keys_that_change_no_step_may_differ(tmp_path, path):
    assert changed(PLAN, path, 7) != PLAN
    assert write_run(tmp_path, plan=changed(PLAN, path, 7))["plan"]["used"]


@pytest.mark.parametrize("keys", [None, 3, "train.steps", [["train.steps"], 3]])
def test_without_a_list_of_such_keys_every_key_counts(tmp_path, keys):
    plan = changed(PLAN, "config.train.steps", 7) | {planned.OUTSIDE_STEP: keys}
    reason = write_run(tmp_path, plan=plan)["plan"]["reason"]
    assert reason == "train.steps: planned with 7, the run has 100"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 100, '{"date": 1, "source": [], "layout": {"mesh": []}}'],
)
def test_a_file_that_is_no_plan_is_named(tmp_path, text):
    write_run(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    document = status.read_status(tmp_path).document()
    assert not document["plan"]["used"]
    assert document["plan"]["reason"]
    assert "is not used" in status.as_text(document)


def test_without_plan_and_profile_the_verdict_names_the_command(tmp_path):
    write_run(tmp_path, info=INFO | {"pipeline": {}})
    (tmp_path / "plan.json").unlink()
    document = status.read_status(tmp_path).document()
    assert document["plan"] is None
    said = "compute below the peak, with communication"
    assert (
        f"{said}, 53.0 % of a step; try jaxdist plan --workdir {tmp_path}, which"
        in document["verdict"]
    )
    (tmp_path / "run.json").write_text(
        json.dumps(run_format.marked(INFO | {"pipeline": {}, "device_kind": "cpu"}))
    )
    assert (
        "jaxdist plan --workdir"
        not in status.read_status(tmp_path).document()["verdict"]
    )


def test_a_row_of_an_earlier_start_is_not_held_against_the_plan_of_this_one(tmp_path):
    assert write_run(tmp_path)["plan"]["used"]
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.event("start", 10, devices=64)
    document = status.read_status(tmp_path).document()
    assert document["plan"]["reason"] == "the last row is of an earlier start"
    assert "what plan expects" not in document["verdict"]


def test_the_first_row_is_not_held_against_the_plan(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.event("start", 0)
        writer.write(1, ROW)
    for name, document in (("run", INFO), ("config", CONFIG), ("plan", PLAN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run_format.marked(document)))
    document = status.read_status(tmp_path).document()
    assert document["plan"]["used"]
    assert document["plan"]["measured_to_planned"] is None
    assert "it takes" not in status.as_text(document)


def test_hostile_plans_are_answered_at_once_and_briefly(tmp_path):
    for name, plan, said in (
        (
            "tiny",
            PLAN
            | {
                "time": {
                    "step_s": 5e-324,
                    "band_s": [5e-324] * 2,
                    "waterfall": {"x": 5e-324},
                }
            },
            "no parts",
        ),
        ("long", PLAN | {"config": {"k" * 10**6: 1}}, f"{'k' * 60}: planned with 1"),
        (
            "large",
            PLAN | {"config": {f"k{n}": "x" * 40 for n in range(100_000)}},
            "more than",
        ),
    ):
        document = write_run(tmp_path / name, plan=plan)
        assert said in document["plan"]["reason"]
        assert len(document["plan"]["reason"]) < 1000
        json.dumps(document, allow_nan=False)


def test_a_part_that_rounding_makes_more_than_the_step_is_all_of_it(tmp_path):
    waterfall = {"exposed communication": 1.6004}
    document = write_run(tmp_path, plan=changed(PLAN, "time.waterfall", waterfall))
    shares = document["step_parts"]
    assert shares[step_parts.COMMUNICATION] == pytest.approx(0.9)
    assert sum(shares.values()) == pytest.approx(1)
