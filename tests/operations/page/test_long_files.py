"""Files of a run that are longer than memory: bounded, with exact totals."""

import itertools
import json
import math
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from jaxdist import report, status
from jaxdist.operations.launch.run_progress import ProgressReader
from jaxdist.operations.page import event_log, row_sample, summary
from jaxdist.operations.page import status as page_status
from jaxdist.operations.page.event_log import EventLog
from jaxdist.operations.page.row_sample import RowSample
from jaxdist.storage import run_format, untrusted
from jaxdist.telemetry import metrics
from jaxdist.trainer import elastic
from support.paths import ROOT

BEGAN = 1_790_000_000
ENVIRON = {elastic.FULL_PROCESSES: "0"}  # of a process of an elastic run
SPIKE = 777  # the step of the highest loss


def write_run(folder: Path, rows: int, events: int) -> Path:
    """Writes a run with a start in each 1,000 events, and the other events spikes."""
    folder.mkdir()
    for name in (run_format.CONFIG, run_format.RUN):
        (folder / name).write_text(json.dumps(run_format.marked({})))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, rows + 1):
            loss = 99.0 if step == SPIKE else 2 + 1 / step
            row = {"step": step, "loss": loss, "tokens_seen": 64 * step}
            row |= {"step_time_s": 0.5, "tokens_per_s": 1e4, "mfu": 0.4}
            file.write(json.dumps(row) + "\n")
            if step % 100 == 0:
                loss = 1.25 if step == 300 else 2.5
                file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")
    with (folder / "events.jsonl").open("w") as file:
        for number in range(events):
            event = {"time": BEGAN + number, "event": "spike", "step": number}
            event |= {"loss": 3.5, "median": 2.5, "first_sample": 8, "last_sample": 15}
            if number % 1000 == 0:
                event |= {"event": "start", "devices": 8}
            file.write(json.dumps(event) + "\n")
    return folder


@pytest.fixture
def small_budgets(monkeypatch):
    """Lets short files be too long."""
    monkeypatch.setattr(untrusted, "_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(row_sample, "MAX_BYTES", 1 << 14)
    monkeypatch.setattr(event_log, "_MAX_COST", 1 << 14)


def test_memory_does_not_grow_with_the_files(small_budgets, tmp_path):
    peaks = []
    for size in (1_000, 4_000):
        folder = write_run(tmp_path / str(size), size, size)
        tracemalloc.start()
        summary.read_run(folder)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks.append(peak)
    assert peaks[1] < 1.5 * peaks[0]


def test_a_page_of_many_rows_says_what_it_draws_and_adds_up_all(
    small_budgets, tmp_path
):
    folder = write_run(tmp_path / "run", 5_000, 4_500)
    assert report.main([str(folder)]) == 0
    run = summary.read_run(folder)
    figures = summary.figures(run)
    assert figures["steps"] == "5,000"
    assert figures["tokens seen"] == "320k"
    assert figures["last loss"] == f"{2 + 1 / 5000:.4f}"
    assert figures["best evaluation loss"] == "1.2500"
    # without a ledger, the time since the start is unknown
    assert "time since start" not in figures
    assert run.events.last["time"] - run.events.first["time"] > 4_400
    assert max(run.values("loss")) == 99.0, "a peak is lost"
    page = (folder / "report.html").read_text()
    num_points = len(run.rows.train) + len(run.rows.evaluation)
    assert 50 < num_points < 250
    assert f"run: {num_points:,} of 5,050 points drawn" in page
    num_events = len(run.events.shown)
    assert 10 < num_events < 50
    assert f"{num_events:,} of 4,500 events shown" in page
    assert "4,495 spike, 5 start" in page
    assert page.count("<td>start</td>") == 5, "a rare event is missing"


def test_a_page_of_a_usual_run_says_nothing_of_it(tmp_path):
    folder = write_run(tmp_path / "run", 2_000, 1_000)
    run = summary.read_run(folder)
    assert run.rows == metrics.read_rows(folder)
    assert run.events.shown == metrics.read_events(folder)
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "points drawn" not in page
    assert "events shown" not in page


def test_a_sample_of_rows_is_a_part_of_the_rows_that_count():
    """With a resume that writes its steps again, and a longer schedule."""
    sample = RowSample(lambda row: row["loss"], max_bytes=2_000)
    rows: dict[int, dict] = {}
    steps = [*range(0, 900, 3), *range(450, 1200, 3), *range(600, 700, 3)]
    for number, step in enumerate(steps):
        if number == 320:
            sample.drop_after(500)
            rows = {n: row for n, row in rows.items() if n <= 500}
        loss = math.nan if step == 300 else float(number)
        rows[step] = {"step": step, "loss": loss}
        sample.add(dict(rows[step]), 20)
        kept = sample.rows()
        assert [row["step"] for row in kept] == sorted({row["step"] for row in kept})
        assert kept[-1]["step"] == max(rows)
        assert all(str(rows[row["step"]]) == str(row) for row in kept)
    assert not sample.is_whole
    assert 25 < len(kept) <= 101
    assert any(math.isnan(row["loss"]) for row in kept)
    gaps = [b["step"] - a["step"] for a, b in itertools.pairwise(kept)]
    assert max(gaps) < 80, "the sample is not even"


def test_events_are_counted_and_the_last_of_each_name_is_known(small_budgets):
    log = EventLog()
    for number in range(20_000):
        name = "stop" if number in (5_000, 12_345) else f"n{number % 3}"
        log.add({"event": name, "time": number, "step": None}, 100)
    assert len(log) == 20_000
    assert log.numbers["stop"] == 2
    assert log.numbers.total() == 20_000
    assert (log.first["time"], log.last["time"]) == (0, 19_999)
    assert log.last_of("stop", "absent")["time"] == 12_345
    assert log.last_of("n0", "stop")["time"] == 19_998
    assert log.first_of("n2")["time"] == 2
    assert log.last_of("absent") is None
    times = [event["time"] for event in log.shown]
    assert times == sorted(times)
    assert {5_000, 12_345} < set(times)
    assert 15 < len(times) < 50


def test_events_of_any_name_and_size_take_little(small_budgets):
    log = EventLog()
    tracemalloc.start()
    for number in range(2_000):
        text = str(number) * 10_000
        log.add({"event": str(number), "time": 0, "step": 0, "x": text}, 40_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(log) == 2_000
    assert log.numbers[event_log.OTHER] == 1_900
    assert peak < 8 << 20


def test_a_line_of_any_length_takes_no_memory(tmp_path, capsys):
    folder = write_run(tmp_path / "run", 20, 20)
    for name in ("metrics.jsonl", "events.jsonl", "arrays.jsonl"):
        with (folder / name).open("ab") as file:
            file.truncate(file.tell() + (48 << 20))
            file.seek(0, 2)
            stop = {"time": BEGAN + 60, "event": "stop", "step": 21, "reason": "x"}
            file.write(b"\n" + json.dumps(stop).encode() + b"\n")
    tracemalloc.start()
    run = summary.read_run(folder)
    assert ProgressReader(folder).starts() == 1
    assert elastic.full_devices(ENVIRON, folder, per_process=1) == 8
    assert status.main([str(folder), "--json"]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["starts"]) == ("stopped", 1)
    assert document["since"] == BEGAN + 60
    assert run.unreadable == [
        "metrics.jsonl: 1 line could not be read",
        "events.jsonl: 1 line could not be read",
        "arrays.jsonl: 1 line could not be read",
    ]


def test_status_and_a_resume_look_at_few_lines(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", 1, 30_000)
    parsed = []
    parse = untrusted.parse_json
    monkeypatch.setattr(
        untrusted, "parse_json", lambda *given: parsed.append(given) or parse(*given)
    )
    assert page_status.read_status(folder).document()["starts"] == 30
    num_of_status = len(parsed)
    parsed.clear()
    assert elastic.full_devices(ENVIRON, folder, per_process=1) == 8
    assert len(parsed) == 30
    # those of the last 256 kB, too
    assert num_of_status < 4_000


MEASURE = """
import resource, sys
from jaxdist import report, runs, status
command = {"report": report, "runs": runs, "status": status}[sys.argv[1]]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert command.main(sys.argv[2:]) == 0
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("MB", (after - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "runs", "status"])
def test_200_mb_are_read_within_200_mb(command, tmp_path):
    """As are 3 GB, since memory does not grow with the files."""
    folder = write_run(tmp_path / "run", 700_000, 800_000)
    files = [folder / "metrics.jsonl", folder / "events.jsonl"]
    assert min(file.stat().st_size for file in files) > 75e6
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, command, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    growth_mb = int(done.stdout.split()[-1])
    print(f"{command}: {growth_mb} MB, {time.monotonic() - began:.0f} s")
    assert growth_mb < 200
