"""Where the time of a step goes, and the verdict: in `status`, on the report."""

import json

import pytest

from jaxdist.operations.ledger import run_lives
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.page import html, status, step_parts, summary
from jaxdist.storage import run_format
from jaxdist.telemetry.metrics import MetricsWriter
from support.ledgers import published

ROW = {
    "step_time_s": 2.0,
    "data_wait_s": 0.2,
    "mfu": 0.22,
    "mfu_full": 0.25,
    "hfu": 0.3,
}
OPS = [
    {"op": "fusion.1", "kind": "fusion", "share": 0.75, "seconds": 3.0, "count": 8},
    {
        "op": "all-gather-done.3",
        "kind": "all-gather-done",
        "share": 0.2,
        "seconds": 0.8,
        "count": 8,
    },
    {
        "op": "reduce-scatter",
        "kind": "reduce-scatter",
        "share": 0.05,
        "seconds": 0.2,
        "count": 8,
    },
]
INFO = {"pipeline": {"bubble": 0.2}}


def test_shares_are_taken_of_what_is_left_and_add_up():
    parts = step_parts.step_parts(ROW, INFO, OPS)
    shares = parts.shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[step_parts.DATA] == pytest.approx(0.1)
    assert shares[step_parts.COMMUNICATION] == pytest.approx(0.9 * 0.25)
    assert shares[step_parts.BUBBLE] == pytest.approx(0.9 * 0.75 * 0.2)
    busy = 0.9 * 0.75 * 0.8
    assert shares[step_parts.AGAIN] == pytest.approx(busy * (1 - 0.25 / 0.3))
    assert shares[step_parts.AT_PEAK] == 0.22
    assert shares[step_parts.COMPUTE] == pytest.approx(busy * 0.25 / 0.3 - 0.22)
    assert parts.verdict().startswith(
        "MFU 22.0 %; the largest part is compute below the peak, 23.0 % of"
    )


@pytest.mark.parametrize(
    ("row", "info", "ops", "said", "cure"),
    [
        ({"data_wait_s": 1.5}, {}, OPS, "waiting for data, 75.0 %", "data.prefetch"),
        (
            {},
            {"pipeline": {"bubble": 0.6}},
            [],
            "bubble, 54.0 %",
            "pipeline.microbatches",
        ),
        ({"hfu": 1.0}, {}, OPS, "recomputation, 50.6 %", "remat.policy"),
        (
            {},
            {},
            [OPS[1] | {"share": 0.7}],
            "exposed communication, 63.0 %",
            "plan --search",
        ),
        ({}, {}, [], "compute below the peak, 53.0 %", "profile.start_step"),
        (
            {},
            {"num_devices": 8},
            [],
            "compute below the peak, with communication, 53.0 %",
            "profile.start_step",
        ),
        (
            {"mfu": None, "mfu_full": None, "hfu": None},
            {},
            OPS,
            "compute, 67.5 %",
            "profile.start_step",
        ),
    ],
)
def test_the_largest_part_has_a_cure(row, info, ops, said, cure):
    verdict = step_parts.step_parts(ROW | row, info, ops).verdict()
    assert f"the largest part is {said} of a step; try " in verdict
    assert cure in verdict
    assert verdict.startswith("MFU unknown" if "mfu" in row else "MFU 22.0 %")


@pytest.mark.parametrize("ops", [[OPS[1] | {"share": 0.7}], []])
def test_emulated_devices_get_no_advice_for_real_ones(ops):
    verdict = step_parts.step_parts(ROW, {"device_kind": "cpu"}, ops).verdict()
    cure = "fewer emulated devices" if ops else "the longest operations"
    assert cure in verdict
    assert "plan --search" not in verdict
    assert "bfloat16" not in verdict


@pytest.mark.parametrize(
    "row", [{}, {"step_time_s": 0}, {"step_time_s": "x"}, {"step_time_s": float("inf")}]
)
def test_without_a_step_there_are_no_parts(row):
    assert step_parts.step_parts(row, INFO, OPS) is None


def test_waits_that_lead_the_row_are_no_more_than_the_step():
    parts = step_parts.step_parts(
        ROW | {"data_wait_s": 1.02 * ROW["step_time_s"]}, {}, []
    )
    assert parts.shares[step_parts.DATA] == 1.0
    assert "waiting for data" in parts.verdict()


def test_what_a_folder_says_that_is_no_number_is_left_out():
    odd = {"data_wait_s": "x", "mfu": "y", "hfu": float("nan"), "mfu_full": -1}
    parts = step_parts.step_parts(
        ROW | odd, {"pipeline": {"bubble": "z"}}, [{"kind": 3, "share": None}]
    )
    assert parts.shares == {"compute": 1.0}


def test_status_and_report_show_both(tmp_path):
    with published(Ledger(), tmp_path):
        writer = MetricsWriter(tmp_path)
        writer.event("start", 0)
        writer.write(1, {"loss": 1.0, "goodput": 0.5} | ROW)
        writer.close()
    (tmp_path / "run.json").write_text(json.dumps(run_format.marked(INFO)))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "top_ops.json").write_text(
        json.dumps(run_format.marked({"ops": OPS}))
    )
    document = status.read_status(tmp_path).document()
    assert sum(document["step_parts"].values()) == pytest.approx(1)
    text = status.as_text(document)
    assert "verdict   MFU 22.0 %; the largest part is" in text
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert "hfu 30.0 %" in text
    page = html.render([summary.read_run(tmp_path)])
    line = run_lives.goodput_line(run_lives.read_lives(tmp_path))
    for part in (
        "Wall time",
        line,
        "A step, estimated",
        "MFU 22.0 %; the largest part",
        "HFU",
    ):
        assert part in page, part
