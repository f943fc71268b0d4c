"""`jaxdist status` and `jaxdist runs`: what a run is doing, where its time went, how
runs differ.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from jaxdist import runs, status
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.ledger.ledger import Ledger
from jaxdist.operations.page import html, summary
from jaxdist.operations.page.status import read_status
from jaxdist.storage import lock, run_format
from jaxdist.telemetry import metrics
from support.ledgers import published
from support.paths import ROOT

START = 1_790_000_000.0


class Clock:
    """Seconds that both clocks of a ledger show."""

    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now


def make_run(
    folder,
    *,
    steps=20,
    step_s=2.0,
    stop="finished",
    config=(),
    first=0,
    begin=START,
    total=20,
):
    """Writes the files of a life of a run that was `steps` long; returns the time when
    it ended.
    """
    clock = Clock(begin)
    with closing(metrics.MetricsWriter(folder, clock=clock)) as writer:
        clock.now += 10
        writer.event("start", first, devices=1)
        if first:
            writer.event("restore", first)
        for step in range(first + 1, steps + 1):
            clock.now += step_s
            row = {
                "loss": 5.0 - step / 10,
                "step_time_s": step_s,
                "tokens_per_s": 64.0,
                "mfu": None,
            }
            writer.write(step, row | {"tokens_seen": 128 * step})
        if stop:
            writer.event("stop", steps, reason=stop)
    options = {
        "train.steps": total,
        "train.log_every": 1,
        "checkpoint.every_steps": 8,
    } | dict(config)
    (folder / "config.json").write_text(json.dumps(run_format.marked(options)))
    return clock.now


def printed(capsys, main, *arguments):
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def held_lock(folder):
    """Writes a lock file as a process of this machine does that has ended."""
    (folder / ".lock").write_text(f"process 999999 on {socket.gethostname()}")


# --- the ledger


def test_buckets_are_the_wall_time_through_kills_restarts_and_rollbacks(tmp_path):
    clock = Clock()

    def live(phases, *, ends=True):
        book = Ledger(clock=clock, wall_clock=clock)
        with published(book, tmp_path):
            for phase, done, seconds in phases:
                book.enter(phase, done)
                clock.now += seconds
            book._write()  # what the thread does every second
            killed = (tmp_path / run_lives.LEDGER_FILE).read_bytes()
        if not ends:
            (tmp_path / run_lives.LEDGER_FILE).write_bytes(killed)

    live(
        [
            ("compile", 0, 5),
            ("data", 0, 1),
            ("step", 0, 10),
            ("save", 10, 2),
            ("step", 20, 10),
        ],
        ends=False,
    )
    clock.now += 100  # down
    live(
        [
            ("restore", 0, 3),
            ("data", 10, 1),
            ("step", 20, 20),
            ("restore", 30, 1),
            ("data", 25, 0),
            ("step", 30, 10),
        ]
    )
    account = run_lives.account(run_lives.read_lives(tmp_path))
    assert account.wall_s == pytest.approx(clock.now - START, abs=0.01)
    assert account.buckets["down"] == 100
    # The first life did steps 1 to 20 in 20 s, of which 11 to 20 were done again; the
    # second went back by 5.
    assert account.buckets["lost"] == pytest.approx(10 + 30 * 5 / 25)
    assert account.goodput == pytest.approx((50 - 16) / account.wall_s)
    assert {
        name: account.buckets[name] for name in ("compile", "restore", "save", "data")
    } == {
        "compile": 5,
        "restore": 4,
        "save": 2,
        "data": 2,
    }


def test_a_life_that_did_nothing_is_withdrawn(tmp_path):
    for lives in (0, 1):
        with published(book := Ledger(), tmp_path):
            book.enter("compile")
            book.withdraw()
        assert len(run_lives.read_lives(tmp_path)) == lives
        with published(book := Ledger(), tmp_path):
            book.enter("data", 0)
        assert run_lives.read_lives(tmp_path)[-1].ended


@pytest.mark.parametrize(
    "change",
    [
        "[]",
        "{",
        '{"lives": 3}',
        '{"lives": [3]}',
        '{"lives": [{}]}',
        "NaN",
        "TIME",
        "STEP",
    ],
)
def test_a_ledger_that_is_none_is_left_out(tmp_path, change):
    with published(book := Ledger(), tmp_path):
        book.enter("data", 0)
    file = tmp_path / run_lives.LEDGER_FILE
    document = json.loads(file.read_text())
    document["lives"][0] |= (
        {"began": "x"} if change == "TIME" else {"step": -1} if change == "STEP" else {}
    )
    file.write_text(
        change if change.islower() or change[0] in "[{N" else json.dumps(document)
    )
    assert run_lives.read_lives(tmp_path) == []


# --- states


def test_what_a_run_that_trains_is_doing(tmp_path, capsys):
    make_run(tmp_path, steps=10, stop="")
    with lock.exclusive(tmp_path / ".lock"), published(book := Ledger(), tmp_path):
        book.enter("data", 0)
        book.enter("step", 10)
        book._write()
        code, out = printed(capsys, status.main, tmp_path, "--json")
        _, text = printed(capsys, status.main, tmp_path)
    document = json.loads(out)
    assert code == 0
    assert document["state"] == "running"
    assert document["doing"] == "training"
    assert (document["step"], document["steps"], document["eta_s"]) == (10, 20, 20.0)
    assert document["next_save"] == {"step": 16, "in_s": 12.0}
    assert document["loss"] == 4.0
    assert {"state", "step", "goodput", "ledger"} <= document.keys()
    assert sum(document["ledger"]["buckets"].values()) == pytest.approx(
        document["ledger"]["wall_s"]
    )
    assert {"down", "lost"} <= document["ledger"]["buckets"].keys()
    assert "running: training for" in text
    assert "step      10 of 20, done in 20s" in text
    assert "next save at step 16, in 12s" in text
    assert max(map(len, text.splitlines())) <= 80 + len(str(tmp_path))


def test_a_start_that_has_not_written_yet_is_not_the_life_before(tmp_path):
    """A run was killed an hour ago; a new start holds the lock, and fetches a
    checkpoint, say.
    """
    now = time.time()
    killed = run_lives.Life(
        now - 3700,
        written=now - 3600,
        phase="step",
        since=now - 3690,
        first=0,
        step=9,
        buckets={"step": 100.0},
    )
    (tmp_path / "ledger.json").write_text(
        json.dumps(run_format.marked({"lives": [vars(killed)]}))
    )
    dead = read_status(tmp_path, now=now).document()
    assert dead["state"] == "died"
    assert dead["ledger"]["buckets"]["step"] == 100
    with lock.exclusive(tmp_path / ".lock"):
        document = read_status(tmp_path, now=now).document()
        assert document["state"] == "running"
        assert document["doing"] == "starting"
        assert abs(document["since"] - now) < 60
        assert document["ledger"]["buckets"]["step"] == 100
        # One that goes on has written a moment ago, or was stopped after it had taken
        # the lock.
        for written in (now - 3600, now - 5):
            killed.written = written
            (tmp_path / "ledger.json").write_text(
                json.dumps(run_format.marked({"lives": [vars(killed)]}))
            )
            os.utime(
                tmp_path / ".lock",
                (now - 3700, now - 3700) if written < now - 5 else (now, now),
            )
            goes_on = read_status(tmp_path, now=now).document()
            assert goes_on["doing"] == "training"
            assert goes_on["ledger"]["buckets"]["step"] == pytest.approx(
                100 + now - written
            )


def test_a_killed_run_is_as_far_as_its_last_life(tmp_path):
    """Steps that an earlier life did behind the checkpoint count no more; rows may be
    newer than ledgers.
    """
    ended = make_run(tmp_path, steps=18, stop="")
    life = run_lives.Life(
        ended + 50, written=ended + 60, first=8, step=10, buckets={"step": 2.0}
    )
    (tmp_path / "ledger.json").write_text(
        json.dumps(run_format.marked({"lives": [vars(life)]}))
    )
    assert metrics.read_last_rows(tmp_path).train[-1]["step"] == 18
    assert read_status(tmp_path, now=ended + 99).document()["step"] == 10
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: ended + 61)) as writer:
        writer.write(11, {"loss": 1.0, "step_time_s": 1.0})
    assert read_status(tmp_path, now=ended + 99).document()["step"] == 11


def test_text_of_a_folder_moves_no_cursor(tmp_path, capsys):
    make_run(tmp_path / "run", stop="\x1b[2J", config={"model.target": "\x1b[2J"})
    make_run(tmp_path / "other")
    life = run_lives.Life(1.0, written=2.0, ended=True, buckets={"\x1b[2J": 1.0})
    (tmp_path / "run" / "ledger.json").write_text(
        json.dumps(run_format.marked({"lives": [vars(life)]}))
    )
    texts = [
        printed(capsys, status.main, tmp_path / "run")[1],
        printed(capsys, runs.main, tmp_path)[1],
    ]
    assert all("?[2J" in text and "\x1b" not in text for text in texts)


@pytest.mark.parametrize("time_s", ["1e308", "NaN", '"x"', "null"])
def test_times_that_cannot_be_are_no_end_of_status(tmp_path, capsys, time_s):
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 3, "loss": 1.0, "time": {time_s}}}\n'
    )
    assert metrics.read_last_rows(tmp_path).train
    code, text = printed(capsys, status.main, tmp_path)
    assert code == 0
    assert "step      3" in text


def test_a_ledger_from_the_beginning_of_time_needs_no_rows(tmp_path, capsys):
    life = run_lives.Life(
        0.0, written=2.0, ended=True, first=0, step=7, buckets={"step": 2.0}
    )
    (tmp_path / "ledger.json").write_text(
        json.dumps(run_format.marked({"lives": [vars(life)]}))
    )
    code, text = printed(capsys, status.main, tmp_path)
    assert code == 0
    assert "step      7" in text


def test_the_next_save_is_by_what_this_start_has_chosen(tmp_path):
    ended = make_run(
        tmp_path, steps=10, stop="", config={"checkpoint.interval": "auto"}
    )
    with closing(metrics.MetricsWriter(tmp_path, clock=lambda: ended)) as writer:
        writer.event("save_interval", 10, interval_s=3600.0)
        with lock.exclusive(tmp_path / ".lock"):
            chosen = read_status(tmp_path, now=ended).document()["next_save"]
            writer.event("start", 10)  # which measures its first save after a minute
            anew = read_status(tmp_path, now=ended).document()["next_save"]
    assert chosen["in_s"] == pytest.approx(3580.0)
    assert anew is None


def test_the_last_row_of_a_run_that_was_restarted_tells_of_now(tmp_path):
    ended = make_run(tmp_path, steps=18, stop="")
    make_run(tmp_path, steps=12, first=8, begin=ended, stop="")
    with closing(metrics.MetricsWriter(tmp_path)) as writer:
        writer.write(12, {metrics.EXTENDED: 40})
    rows = metrics.read_last_rows(tmp_path).train
    assert [row["step"] for row in rows] == [*range(1, 9), *range(9, 13)]
    assert rows[-1]["time"] > ended


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        (("stop", {"reason": "finished"}), "finished", None),
        (("stop", {"reason": "good enough"}), "stopped", "good enough"),
        (("stop", {"reason": "data", "error": "x"}), "failed", "data"),
        (("preempted", {}), "preempted", None),
        (("hang", {}), "failed", "hang"),
        (
            ("start_failed", {"error": "seed: 0, now 1"}),
            "failed",
            "before its first step: seed: 0, now 1",
        ),
        (("nonfinite", {}), "died", "its process ended without a word"),
        (None, "died", "its process ended without a word"),
    ],
)
def test_what_became_of_a_run(tmp_path, last, state, reason):
    make_run(tmp_path, steps=3, stop="")
    held_lock(tmp_path)
    if last:
        with closing(
            metrics.MetricsWriter(tmp_path, clock=lambda: START + 30)
        ) as writer:
            writer.event(last[0], 3, **last[1])
    document = read_status(tmp_path).document()
    assert (document["state"], document["reason"]) == (state, reason)
    assert document["doing"] is document["eta_s"] is document["next_save"] is None


@pytest.mark.parametrize(
    ("life", "state", "reason"),
    [
        ({"ended": True, "exit_code": 78}, "failed", "exit code 78"),
        ({"ended": True, "exit_code": 75}, "preempted", "before its first step"),
        ({"ended": False}, "died", "before its first step"),
    ],
)
def test_what_became_of_a_run_that_came_to_no_step(tmp_path, life, state, reason):
    ended = run_lives.Life(START, written=START + 5, **life)
    (tmp_path / "ledger.json").write_text(
        json.dumps(run_format.marked({"lives": [vars(ended)]}))
    )
    document = read_status(tmp_path).document()
    assert document["state"] == state
    assert reason in document["reason"]


def test_a_run_on_another_machine_is_known_by_its_ledger(tmp_path):
    make_run(tmp_path, steps=3, stop="")
    (tmp_path / ".lock").write_text("process 1 on some-other-host")
    clock = Clock()
    with published(book := Ledger(clock=clock, wall_clock=clock), tmp_path):
        book.enter("evaluate", 3)
        book._write()
        assert read_status(tmp_path, now=START + 5).document()["doing"] == "evaluating"
        assert read_status(tmp_path, now=START + 3600).document()["state"] == "died"


def test_a_lock_is_seen_without_taking_it(tmp_path):
    path = tmp_path / ".lock"
    assert lock.is_held(path) is False
    with lock.exclusive(path):
        assert lock.is_held(path) is True
    assert lock.is_held(path) is False, "the file stays, its lock is gone"
    path.write_text("something else")
    assert lock.is_held(path) is None


# --- the commands


@pytest.fixture
def runs_folder(tmp_path):
    """Writes three runs of a sweep and another one, which died."""
    for number in range(3):
        make_run(
            tmp_path / "sweep" / f"r{number}",
            config={"seed": number, "optimizer.name": "adamw"},
        )
    make_run(tmp_path / "other", config={"seed": 0, "new.key": (1, 2)}, stop="")
    return tmp_path


def runs_as_json(folder, capsys):
    code, out = printed(capsys, runs.main, folder, "--json")
    assert code == 0
    return json.loads(out)


def test_runs_below_a_folder_are_found_with_their_states(runs_folder, capsys):
    found = runs_as_json(runs_folder, capsys)["runs"]
    assert [(run["name"], run["state"]) for run in found] == [
        ("other", "died"),
        ("sweep/r0", "finished"),
        ("sweep/r1", "finished"),
        ("sweep/r2", "finished"),
    ]


def test_a_folder_inside_a_run_and_a_link_in_a_circle_are_no_runs(runs_folder, capsys):
    before = runs_as_json(runs_folder, capsys)["runs"]
    inside = runs_folder / "sweep" / "r0" / "checkpoints" / "1"
    inside.mkdir(parents=True)
    (inside / "metrics.jsonl").touch()
    os.symlink(runs_folder, runs_folder / "sweep" / "loop")

    after = runs_as_json(runs_folder, capsys)["runs"]
    assert len(before) == 4
    assert [run["name"] for run in after] == [run["name"] for run in before]


def test_runs_tell_the_keys_in_which_they_differ(runs_folder, capsys):
    document = runs_as_json(runs_folder, capsys)
    assert document["differing_keys"] == ["seed", "new.key", "optimizer.name"], (
        "keys that all have come first"
    )
    (run,) = (run for run in document["runs"] if run["name"] == "sweep/r1")
    assert run["differs"] == {"seed": 1, "optimizer.name": "adamw"}


def test_the_table_of_runs_fits_80_columns(runs_folder, capsys):
    lines = printed(capsys, runs.main, runs_folder)[1].splitlines()
    heading = "run state step loss last eval tokens/s MFU started"
    assert lines[0].split() == heading.split()
    row = ["sweep/r0", "finished", "20/20", "3.0000", "-", "64"]
    assert lines[4].split()[:6] == row
    assert "    seed=0" in lines
    assert max(map(len, lines)) <= 80


def test_the_table_of_runs_has_the_last_evaluations(runs_folder, capsys):
    def evaluate(run, loss, targets):
        with closing(metrics.MetricsWriter(runs_folder / run)) as writer:
            writer.write(20, {"eval_loss": loss, "eval_tokens": targets})

    evaluate("sweep/r0", 3.25, 1000)
    evaluate("sweep/r0", 3.125, 1000)
    evaluate("sweep/r1", 3.5, 1000)
    lines = printed(capsys, runs.main, runs_folder)[1].splitlines()
    end = lines[0].index("last eval") + len("last eval")
    cells = {
        line.split()[0]: line[:end].split()[-1] for line in lines[1:] if line[0] != " "
    }
    assert cells == {
        "other": "-",
        "sweep/r0": "3.1250",
        "sweep/r1": "3.5000",
        "sweep/r2": "-",
    }
    evaluate("sweep/r2", 2.0, 131_072)
    lines = printed(capsys, runs.main, runs_folder)[1].splitlines()
    assert (
        lines[-1]
        == "last eval: losses of held-out sets of different sizes (1k, 131k targets)"
    )
    assert max(map(len, lines)) <= 80


def test_status_runs_and_the_report_show_the_same_times(runs_folder, capsys):
    """Each has the goodput and the time of the ledger, not of a row or an event."""
    folder = runs_folder / "sweep" / "r0"
    life = run_lives.Life(
        START - 60,
        written=START + 63,
        ended=True,
        first=0,
        step=20,
        buckets={"start": 60.0, "step": 63.4},
    )
    ledger = json.dumps(run_format.marked({"lives": [vars(life)]}))
    (folder / "ledger.json").write_text(ledger)
    with closing(metrics.MetricsWriter(folder)) as writer:
        writer.write(20, {"loss": 1.0, "goodput": 0.75})  # before the process ended
    text = printed(capsys, status.main, folder)[1]
    assert "goodput   51.4 % of 2m 03s in 1 start" in text
    page = summary.read_run(folder)
    figures = summary.figures(page)
    assert (figures["goodput"], figures["time since start"]) == ("51.4 %", "2m 03s")
    assert "goodput 51.4 % of 2m 03s: 48.6 % start<" in html.render([page])
    (row,) = (
        run
        for run in runs_as_json(runs_folder, capsys)["runs"]
        if run["name"] == "sweep/r0"
    )
    assert row["goodput"] == page.account.goodput
    assert row["started"] == START - 60
    # the event `start` was written 70 s after the process began
    assert "<td>1m 10s</td><td>start</td>" in html.render([page])


def test_the_time_of_a_run_that_trains_goes_on_in_the_report_too(tmp_path):
    with lock.exclusive(tmp_path / ".lock"):
        now = time.time()
        life = run_lives.Life(
            now - 100, written=now - 2, first=0, step=5, buckets={"step": 98.0}
        )
        (tmp_path / "ledger.json").write_text(
            json.dumps(run_format.marked({"lives": [vars(life)]}))
        )
        (tmp_path / "run.json").write_text(json.dumps(run_format.marked({})))
        run = summary.read_run(tmp_path)
        assert run.account.wall_s == pytest.approx(run.now - now + 100, abs=0.1)
        assert summary.state(run) == ("running", "")


def test_speeds_have_the_unit_of_their_run(runs_folder, capsys):
    samples = json.dumps(run_format.marked({"unit": "samples"}))
    (runs_folder / "other" / "run.json").write_text(samples)

    table = printed(capsys, runs.main, runs_folder)[1].splitlines()
    assert "tokens or samples/s" in table[0]
    shown = printed(capsys, status.main, runs_folder / "other")[1]
    assert ", samples_per_s 64, step" in shown


def test_errors_are_one_line(tmp_path, capsys):
    for main, arguments in (
        (status.main, [tmp_path]),
        (runs.main, [tmp_path / "none"]),
    ):
        assert main([str(argument) for argument in arguments]) == 78
        assert capsys.readouterr().err.count("\n") == 1
    make_run(tmp_path)
    assert status.main([str(tmp_path), "--watch", "0"]) == 78
    assert printed(capsys, runs.main, tmp_path)[1].count(tmp_path.name) == 1, (
        "the folder itself is a run"
    )
    (tmp_path / "empty").mkdir()
    assert "no runs below" in printed(capsys, runs.main, tmp_path / "empty")[1]


def test_watching_ends_with_the_run(tmp_path, capsys):
    make_run(tmp_path)
    code, out = printed(capsys, status.main, tmp_path, "--watch", "--json")
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out)["state"] == "finished"


def test_they_run_without_jax_and_read_the_end_of_long_files(tmp_path):
    make_run(tmp_path, steps=6000, total=6000)
    program = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'numpy', 'rich'): sys.modules[name] = None\n"
        "from jaxdist import runs, status\n"
        "sys.exit(status.main([sys.argv[1], '--json']) or runs.main([sys.argv[1]]))\n"
    )
    assert len(metrics.read_last_rows(tmp_path).train) < 3000
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["step"] == 6000
