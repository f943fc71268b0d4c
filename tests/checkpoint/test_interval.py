"""checkpoint.interval=auto: what it chooses from saves and failures, when it says so,
and a run with it.
"""

import json
import math
import os
import signal
import time

import pytest

from jaxdist import library, train
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import MANIFEST
from jaxdist.checkpoint.interval import (
    FIRST_S,
    SaveInterval,
    checkpoint_interval,
    mean_time_between_failures,
)
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.operations.ledger.run_lives import Life, count_failures, read_lives
from jaxdist.planner.formulas import lost_share
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer.callbacks import StepView, every
from jaxdist.trainer.preemption import Interrupted
from support.launches import events, finish, launched
from support.runs import TINY, run_of

pytestmark = pytest.mark.usefixtures("shared_steps")

AUTO = CheckpointConfig(interval="auto")
HOUR = (3600.0, "test")


def test_what_it_chooses_loses_least_and_follows_the_measure():
    interval = SaveInterval(AUTO)
    assert interval.seconds == FIRST_S
    told = interval.measured(0.5, 3.0, HOUR)
    assert interval.seconds == told["interval_s"] == checkpoint_interval(0.5, 3600)
    # Young's, to first order
    assert interval.seconds == pytest.approx(math.sqrt(2 * 0.5 * 3600), rel=0.01)
    assert told["mtbf_s"] == 3600
    assert told["mtbf_by"] == "test"
    assert told["blocked_s"] == 0.5
    # No other interval loses less; a fifth longer or shorter loses more.
    lost = [
        lost_share(factor * interval.seconds, 0.5, 0.0, 3600)
        for factor in (0.8, 1.0, 1.2)
    ]
    assert lost[1] == min(lost)
    # A slower disk: saves stop training longer, so they come less often. The median
    # takes three of five.
    for _ in range(4):
        interval.measured(8.0, 30.0, HOUR)
    assert interval.seconds == checkpoint_interval(8.0, 3600) > 200


def test_an_interval_is_told_where_it_changes_by_a_fifth():
    interval = SaveInterval(AUTO)
    assert interval.measured(1.0, 1.0, HOUR)
    assert not interval.measured(1.05, 1.0, HOUR)
    assert interval.measured(1.0, 1.0, (100.0, "failures"))["interval_s"] < 20


def test_no_save_begins_before_the_one_before_is_written():
    interval = SaveInterval(AUTO)
    assert interval.measured(0.1, 500.0, (60.0, "x"))["interval_s"] == 500.0


def test_hours_that_choose_nothing_are_refused():
    (fault,) = CheckpointConfig(chip_hours_per_failure=5.0).faults()
    assert "chip_hours_per_failure=5" in fault
    assert "checkpoint.interval=auto" in fault
    assert not list(
        CheckpointConfig(interval="auto", chip_hours_per_failure=5.0).faults()
    )


def test_fixed_intervals_stay():
    interval = SaveInterval(CheckpointConfig(every_minutes=2.0))
    assert interval.measured(8.0, 30.0, HOUR) == {}
    assert interval.seconds == 120
    assert SaveInterval(CheckpointConfig()).seconds == 0


# beside exit codes that a life itself has written
KILLED, GOES_ON, DONE, UNSTARTED = -1, -1, 0, -2


@pytest.mark.parametrize(
    ("ends", "given", "seconds", "by"),
    [
        ([GOES_ON], 100.0, 3600 * 100 / 8, "checkpoint.chip_hours_per_failure"),
        ([GOES_ON], 0.0, 3600 * 50_000 / 8, "a failure in 50,000 chip hours"),
        ([KILLED, DONE, KILLED, GOES_ON], 0.0, 4 * 1000 / 2, "2 failures of this run"),
        ([1, GOES_ON], 0.0, 2 * 1000, "1 failure of this run"),  # an exception
        ([1, 70, 76, 77, GOES_ON], 0.0, 5 * 1000 / 4, "4 failures of this run"),
        (
            [DONE, 75, 78, GOES_ON],
            0.0,
            3600 * 50_000 / 8,
            "a failure in 50,000 chip hours",
        ),
        (
            [UNSTARTED, KILLED, UNSTARTED, GOES_ON],
            0.0,
            2 * 1000,
            "1 failure of this run",
        ),
    ],
)
def test_failures_are_as_configured_or_as_the_run_has_had_them(
    ends, given, seconds, by
):
    def life(end: int) -> Life:
        steps = 0 if end == UNSTARTED else 100
        buckets = {"step": 900.0, "start": 100.0}
        return Life(
            0.0,
            ended=end >= 0,
            exit_code=max(end, 0),
            first=50,
            step=50 + steps,
            buckets=buckets,
        )

    failures, lived_s = count_failures([life(end) for end in ends])
    assert mean_time_between_failures(
        failures, lived_s, chips=8, chip_hours_per_failure=given
    ) == (seconds, by)


def wait_until(condition, seconds: float = 20) -> None:
    """Waits until the condition holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
def test_each_end_of_a_run_counts_as_what_it_is(tmp_path, monkeypatch, capsys):
    """A real run: ended by an exception, by an interrupt, by a signal for which it
    saves, and to its end.
    """
    monkeypatch.setattr("jaxdist.checkpoint.interval.FIRST_S", 0.01)
    ends = {5: RuntimeError("no such file"), 10: KeyboardInterrupt(), 15: None}

    def end(view: StepView) -> None:
        if view.step == 3:  # the first life measures a save before it ends
            wait_until(lambda: list(tmp_path.glob(f"**/{MANIFEST}")))
        if error := ends.pop(view.step, None):
            raise error
        if view.step == 15:
            os.kill(os.getpid(), signal.SIGTERM)

    options = {"config": None, "callbacks": [every(1, end)]}
    changes = TINY | {"checkpoint.interval": "auto", "train.steps": 20}
    options["config"] = run_of("quickstart", **changes)
    for error in (RuntimeError, KeyboardInterrupt, Interrupted):
        with pytest.raises(error):
            library.run(folder=tmp_path, **options)
    library.run(folder=tmp_path, **options)
    lives = read_lives(tmp_path)
    assert not ends
    assert all(life.ended for life in lives)
    assert [life.exit_code for life in lives] == [1, 1, 75, 0]
    assert [life.failed for life in lives] == [True, True, False, False]
    chosen = [
        event for event in read_events(tmp_path) if event["event"] == "save_interval"
    ]
    said = {event["mtbf_by"] for event in chosen}
    assert {
        "a failure in 50,000 chip hours",
        "1 failure of this run",
        "2 failures of this run",
    } == said
    assert min(event["mtbf_s"] for event in chosen) < 600
    assert "2 failures of this run" in capsys.readouterr().out


@pytest.mark.slow
def test_exceptions_of_either_of_two_processes_are_failures(tmp_path):
    """Under launch: the first process writes that it failed, the other's exception ends
    it without a word.
    """
    orders = {
        "FAULTY_ORDERS": json.dumps([["an exception", 0, 12], ["an exception", 1, 24]])
    }
    auto = {"checkpoint__interval": "auto", "train__steps": 40}
    workdir = tmp_path / "run"
    with launched(
        workdir, "--processes", "2", devices=1, recorded=orders, **auto
    ) as agent:
        finish(agent, workdir)
    lost = [
        (event["process"], event["exit_code"]) for event in events(workdir, "peer_lost")
    ]
    lives = read_lives(workdir)
    assert lost == [(0, 1), (1, 1)]
    assert [(life.ended, life.exit_code) for life in lives] == [
        (True, 1),
        (False, 0),
        (True, 0),
    ]
    failures, lived_s = count_failures(lives)
    mtbf_s, source = mean_time_between_failures(
        failures, lived_s, chips=2, chip_hours_per_failure=0.0
    )
    assert source == "2 failures of this run"
    assert mtbf_s == sum(life.seconds for life in lives) / 2


def test_saves_are_due_by_the_clock_and_not_by_steps(tmp_path):
    with CheckpointManager(tmp_path, AUTO) as store:
        assert not store.decide_save(500, 0.0)  # every_steps is 500 by default
        assert not store.decide_save(501, FIRST_S - 1)
        assert store.decide_save(502, FIRST_S)
        store.interval.measured(0.5, 1.0, (100.0, "x"))
        assert store.interval.seconds == checkpoint_interval(0.5, 100.0) < 12
        assert store.decide_save(503, 12.0)


def test_a_run_measures_its_saves_and_says_what_it_chose(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxdist.checkpoint.interval.FIRST_S", 0.01)
    changes = {
        "checkpoint.interval": "auto",
        "checkpoint.chip_hours_per_failure": 0.5,
        "train.steps": 40,
    }
    flags = [
        f"--config.{key}={str(value).lower()}"
        for key, value in (TINY | changes).items()
    ]
    assert (
        train.main(["--config", "quickstart", "--workdir", str(tmp_path), *flags]) == 0
    )
    events = read_events(tmp_path)
    chosen = [event for event in events if event["event"] == "save_interval"]
    saves = [event["step"] for event in events if event["event"] == "save"]
    assert chosen
    assert chosen[0]["step"] == saves[0]
    assert saves[0] not in range(0, 40, 7)
    for one in chosen:
        assert one["mtbf_s"] == 1800.0
        assert 0 < one["blocked_s"] <= one["written_s"] + 0.5
        best = max(checkpoint_interval(one["blocked_s"], 1800.0), one["written_s"], 1.0)
        assert math.isclose(one["interval_s"], best)
    assert "saving every " in capsys.readouterr().out
