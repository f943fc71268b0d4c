"""metrics.jsonl and events.jsonl: full precision, torn lines, a killed writer,
throughput.
"""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.operations.page import summary
from jaxdist.telemetry import metrics
from support.paths import ROOT

PACKAGE = ROOT / "jaxdist"
EVENTS = {
    "start",
    "start_failed",
    "memory_save",
    "memory_interval",
    "memory_restore",
    "memory_left",
    "memory_copy_failed",
    "bad_memory_copy",
    "restore",
    "save",
    "evaluate",
    "preempted",
    "peer_lost",
    "hang",
    "bad_checkpoint",
    "nonfinite",
    "resize",
    "grow",
    "stop",
    "spike",
    "spikes_end",
    "drift",
    "straggler",
    "slow_parts",
    "slow_steps",
    "logger_failed",
    "preemption_notice",
    "save_interval",
    "checkpoint_copied",
    "checkpoint_copy_failed",
    "checkpoint_fetched",
}


def test_rows_keep_full_precision_and_valid_json(tmp_path):
    value = 0.1 + 0.2
    third = jnp.float32(1) / 3
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: 12.5)) as writer:
        writer.write(
            1,
            {
                "loss": value,
                "grad_norm": third,
                "tokens_seen": np.int64(7),
                "mfu": None,
            },
        )
        writer.write(2, {"loss": math.nan, "grad_norm": math.inf, "x": -math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(lines[1], parse_constant=refuse)["loss"] == "NaN"
    first, second = metrics.read_rows(tmp_path).train
    head = {"step": 1, "time": 12.5, "loss": value}
    assert first == head | {"grad_norm": float(third), "tokens_seen": 7, "mfu": None}
    assert math.isnan(second["loss"])
    assert second["grad_norm"] == math.inf
    assert second["x"] == -math.inf


def test_last_row_of_a_step_wins_and_evaluation_is_separate(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: 12.5)) as writer:
        for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5)):
            writer.write(step, {"loss": loss})
        writer.write(2, {"eval_loss": 6.0, "eval_tokens": 10})
    rows = metrics.read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows.train] == [
        (1, 5.0),
        (2, 4.5),
        (3, 3.5),
    ]
    assert rows.evaluation == [
        {"step": 2, "time": 12.5, "eval_loss": 6.0, "eval_tokens": 10}
    ]


def test_rows_of_undone_steps_do_not_count(tmp_path):
    """After a rollback, and after a resume with another train.log_every."""
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        for step in (3, 6, 9):
            writer.write(step, {"loss": 9.0})
            writer.write(step, {"eval_loss": 9.0})
        writer.write(5, {"of_a_callback": 1})
        writer.write(4, {"loss": 5.0})
        assert [row["step"] for row in metrics.read_rows(tmp_path).evaluation] == [3]
        writer.write(8, {"of_a_callback": 2})  # written before the row of step 6
        writer.write(6, {"loss": 4.0})
        writer.write(6, {"eval_loss": 4.0})
        writer.write(8, {"loss": 3.0})
    rows = metrics.read_rows(tmp_path)
    assert [(row["step"], row.get("loss")) for row in rows.train] == [
        (3, 9.0),
        (4, 5.0),
        (5, None),
        (6, 4.0),
        (8, 3.0),
    ]
    assert [row["eval_loss"] for row in rows.evaluation] == [9.0, 4.0]
    assert [row["step"] for row in metrics.read_last_rows(tmp_path).train][-1] == 8


def test_rows_of_another_schedule_do_not_count(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        for step in (1, 2, 3, 5):
            writer.write(step, {"loss": 5.0 - step})
            writer.write(step, {"eval_loss": 6.0})
        writer.write(2, {metrics.EXTENDED: 8})
        writer.write(4, {"loss": 0.5})
    rows = metrics.read_rows(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows.train] == [
        (1, 4.0),
        (2, 3.0),
        (4, 0.5),
    ]
    assert [row["step"] for row in rows.evaluation] == [1, 2]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "lo', b'{"step": 2, "loss": 1.0}', b"\x00\xff"]
)
def test_a_torn_last_line_is_repaired_by_a_new_line(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: 12.5)) as writer:
        writer.write(1, {"loss": 2.0})
    path.write_bytes(path.read_bytes() + torn)
    before = path.read_bytes()
    assert not before.endswith(b"\n")
    assert metrics.read_rows(path).train[0] == {"step": 1, "time": 12.5, "loss": 2.0}
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        writer.write(3, {"loss": 0.5})
    after = path.read_bytes()
    assert after.startswith(before + b"\n"), "earlier bytes must stay as they are"
    whole = torn.endswith(b"}")
    assert [row["step"] for row in metrics.read_rows(path).train] == [1, 2, 3][
        :: 1 if whole else 2
    ]


def test_kill_9_tears_no_line_but_the_last(tmp_path):
    """Linux may end a write of a killed process at a page's end, so that the last line
    can be torn.
    """
    program = (
        "import sys; from jaxdist.telemetry.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1])\n"
        "for step in range(1, 10**9): writer.write(step, {'loss': 1 / step, 'text': 'x' * 300})\n"
    )
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 100_000:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    *lines, _ = path.read_bytes().split(b"\n")
    steps = list(range(1, len(lines) + 1))
    assert [json.loads(line)["step"] for line in lines] == steps
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        writer.write(len(steps) + 5, {"loss": 0.5})
    rows = metrics.read_rows(path)
    assert [row["step"] for row in rows.train if "text" in row][: len(steps)] == steps
    assert rows.train[-1]["loss"] == 0.5
    assert rows.unreadable <= 1


def test_events_carry_the_clock(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: 12.5)) as writer:
        writer.event("save", 3, seconds=0.5, path=Path("checkpoints/3"))
        writer.event("start")
    assert metrics.read_events(tmp_path) == [
        {
            "time": 12.5,
            "event": "save",
            "step": 3,
            "seconds": 0.5,
            "path": "checkpoints/3",
        },
        {"time": 12.5, "event": "start", "step": None},
    ]


OTHER_LINES = [
    "[]",
    "1",
    "null",
    "{",
    "[" * 100_000,
    '{"step": "3"}',
    '{"step": -1}',
    '{"step": true}',
    "{}",
]


def test_rows_of_another_shape_are_left_out_and_counted(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*OTHER_LINES, '{"step": 3, "loss": 1.5}', "", "x"])
    )
    assert metrics.read_rows(tmp_path) == metrics.MetricRows(
        [{"step": 3, "loss": 1.5}], [], len(OTHER_LINES) + 1
    )
    event = {"time": 5, "event": "save", "step": None}
    wrong = [
        {**event, **change}
        for change in ({"time": None}, {"time": 1e20}, {"event": 1}, {"step": 0.5})
    ]
    wrong += [
        {key: value for key, value in event.items() if key != lost} for lost in event
    ]
    lines = [
        *OTHER_LINES,
        json.dumps(event),
        *map(json.dumps, wrong),
        '{"time": "NaN", "event": "", "step": 1}',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    found = [line.row for line in metrics.iter_events(tmp_path)]
    assert found.count(None) == len(lines) - 1
    assert metrics.read_events(tmp_path) == [event]


def test_arrays_are_kept_whole_until_a_run_goes_back(tmp_path):
    load = np.float32([[3, 0], [1.5, 1 / 3]])
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: 12.5)) as writer:
        writer.write_arrays(1, {})
        assert not (tmp_path / "arrays.jsonl").exists()
        for step in (1, 20, 40, 60, 30):
            writer.write_arrays(step, {"stats/load": load + step})
    with (tmp_path / "arrays.jsonl").open("a") as file:
        file.write("torn")
    rows, unreadable = summary.read_arrays(tmp_path)
    assert [row["step"] for row in rows] == [1, 20, 30]
    assert unreadable == 1
    assert rows[0] == {"step": 1, "time": 12.5, "stats/load": [[4, 1], [2.5, 1.33333]]}
    assert '"stats/load": [[4, 1],' in (tmp_path / "arrays.jsonl").read_text()


def test_arrays_that_cannot_be_written_do_not_stop_a_run(tmp_path, capsys):
    (tmp_path / "arrays.jsonl").symlink_to(tmp_path / "elsewhere")
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            writer.write_arrays(step, {"x": np.ones(2)})
        writer.write(2, {"loss": 1.0})
    assert capsys.readouterr().err.count("cannot be written") == 1
    assert len(metrics.read_rows(tmp_path).train) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_no_file_has_no_rows(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    os.mkfifo(tmp_path / "events.jsonl")
    assert metrics.read_rows(tmp_path) == metrics.MetricRows([], [], 1)
    assert [line.row for line in metrics.iter_events(tmp_path)] == [None]
    assert metrics.read_events(tmp_path) == []


def test_a_link_in_a_circle_has_no_rows(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("metrics.jsonl")
    assert metrics.read_last_rows(tmp_path) == metrics.MetricRows([], [])
    assert metrics.read_rows(tmp_path) == metrics.MetricRows([], [], 1)


def test_a_disabled_writer_touches_nothing(tmp_path):
    with closing(metrics.MetricsWriter(tmp_path / "run", enabled=False)) as writer:
        writer.write(1, {"loss": 1.0})
        writer.event("start")
    assert list(tmp_path.iterdir()) == []
    assert metrics.read_rows(tmp_path) == metrics.MetricRows([], [])


def test_every_event_of_the_package_is_in_the_contract():
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'event\(\s*"(\w+)"', path.read_text())
    }
    assert {"start", "save", "stop", "spike"} <= used
    assert used <= EVENTS, f"not in the contract: {sorted(used - EVENTS)}"


def test_throughput_fields():
    speed = metrics.Throughput(
        num_devices=4,
        peak_flops_per_s=1e12,
        causal_flops_per_token=1e9,
        full_flops_per_token=2e9,
    )
    assert speed.fields(seconds=2.0, steps=4, tokens=1000) == {
        "step_time_s": 0.5,
        "tokens_per_s": 500.0,
        "tokens_per_s_per_device": 125.0,
        "mfu_causal": 500 * 1e9 / 4e12,
        "mfu_full": 500 * 2e9 / 4e12,
        "mfu": 500 * 1e9 / 4e12,
        "hfu": None,
    }
    counted = dataclasses.replace(speed, step_flops=8e11)
    assert counted.fields(seconds=2.0, steps=4, tokens=1000)["hfu"] == pytest.approx(
        4 * 8e11 / 2.0 / 4e12
    )
    unknown = dataclasses.replace(speed, peak_flops_per_s=None)
    fields = unknown.fields(seconds=2.0, steps=4, tokens=1000)
    assert fields["tokens_per_s"] == 500.0
    assert (
        fields["mfu"]
        is fields["mfu_causal"]
        is fields["mfu_full"]
        is fields["hfu"]
        is None
    )
