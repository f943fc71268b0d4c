"""Slow steps: a lasting slowdown is named, a single slow step is not."""

import random
import sys

import pytest

from jaxdist.operations.watch import pace as paces
from jaxdist.operations.watch import step_alarm
from jaxdist.operations.watch.step_alarm import StepAlarm, find_cause
from jaxdist.telemetry.metrics import read_events, read_rows
from support.runs import command, start_group


class Loop:
    """A training loop on a clock of its own: three steps under way, parts of a step in
    seconds.
    """

    def __init__(self):
        self.now, self.events, self.notes = 0.0, [], []
        self.data_s = self.devices_s = 0.0
        self.alarm = StepAlarm(self._event, self.notes.append, clock=lambda: self.now)
        # when the devices are done with all before
        self.step, self.pending, self.free_at = 0, [], 0.0

    def _event(self, name, step, **fields):
        self.events.append((name, step, fields))

    def run(self, steps, *, data=0.0, host=0.005, devices=0.1, pause_every=0):
        for _ in range(steps):
            self.step += 1
            self.now += data
            self.data_s += data
            self.now += host
            self.free_at = max(self.now, self.free_at) + devices
            self.pending.append(self.free_at)
            self.alarm.start(self.step, data_s=self.data_s, devices_s=self.devices_s)
            self.drain(3)
            if pause_every and self.step % pause_every == 0:
                self.drain(0)
                self.now += 7.0
                self.alarm.skip(7.0)

    def drain(self, under_way):
        while len(self.pending) > under_way:
            done = self.pending.pop(0)
            self.devices_s += max(0.0, done - self.now)
            self.now = max(self.now, done)
            self.alarm.record()


SLOWDOWNS = {"data": {"data": 0.2}, "host": {"host": 0.2}, "devices": {"devices": 0.2}}


@pytest.mark.parametrize("pause_every", [0, 1, 3, 5, 50])
@pytest.mark.parametrize("phase", SLOWDOWNS)
def test_steps_twice_as_long_are_named_within_30(phase, pause_every):
    loop = Loop()
    loop.run(100, pause_every=pause_every)
    assert not loop.events
    loop.run(30, pause_every=pause_every, **SLOWDOWNS[phase])
    ((name, step, fields),) = loop.events
    assert name == "slow_steps"
    assert 100 < step <= 130
    assert (fields["process"], fields["phase"]) == (0, phase)
    assert fields["usual_step_s"] == pytest.approx(0.1, rel=0.3)
    assert fields["step_s"] == pytest.approx(0.2, rel=0.5)
    assert len(loop.notes) == 1
    assert "ms" in loop.notes[0]
    loop.run(200, pause_every=pause_every, **SLOWDOWNS[phase])
    assert len(loop.events) == 1, "said once"
    loop.run(100, pause_every=pause_every)
    loop.run(30, pause_every=pause_every, **SLOWDOWNS[phase])
    assert len(loop.events) == 2, "said again, as it had ended"


@pytest.mark.parametrize("pause_every", [0, 1, 3, 5])
def test_single_slow_steps_are_no_slowdown(pause_every):
    loop = Loop()
    loop.run(1, devices=90.0)  # it compiles
    for _ in range(30):
        loop.run(19, pause_every=pause_every)
        loop.run(1, devices=3.0, pause_every=pause_every)
        loop.run(19, pause_every=pause_every)
        loop.run(1, data=3.0, pause_every=pause_every)
    assert not loop.events


def test_jitter_and_a_run_that_becomes_faster_are_no_slowdown():
    loop = Loop()
    for number in range(600):
        loop.run(1, devices=0.1 + 0.03 * (number * 7919 % 11) / 10)
    loop.run(300, devices=0.02, host=0.001)
    assert not loop.events


def test_short_pauses_of_the_machine_are_no_slowdown():
    loop = Loop()
    loop.run(200, devices=0.002, host=0.0001)
    loop.run(60, devices=0.005, host=0.0001)  # 0.3 s
    loop.run(200, devices=0.002, host=0.0001)
    assert not loop.events


def test_what_lasts_becomes_usual():
    loop = Loop()
    loop.run(100)
    loop.run(900, devices=0.2)
    loop.run(30, devices=0.4)
    assert [round(fields["usual_step_s"], 1) for _, _, fields in loop.events] == [
        0.1,
        0.2,
    ]


@pytest.mark.parametrize(
    ("grown", "process", "phase"),
    [
        ({0: (0.0, 0.01, 0.1), 1: (0.1, 0.0, -0.02)}, 1, "data"),
        ({0: (-0.2, 0.12, 0.1), 1: (0.0, 0.01, 0.1), 2: (0.02, 0.1, 0.0)}, 2, "host"),
        ({0: (0.0, 0.01, 0.1), 1: (0.0, 0.0, 0.1)}, None, "devices"),
        ({0: (0.0, 0.01, 0.1)}, 0, "devices"),
        ({0: (0.0, 0.12, 0.01)}, 0, "host"),
    ],
)
def test_who_is_to_blame(grown, process, phase):
    parts = {
        n: dict(zip(("data", "host", "devices"), each, strict=True))
        for n, each in grown.items()
    }
    assert find_cause(parts, alone=len(parts) == 1) == (process, phase)


def test_the_others_say_what_they_see(monkeypatch):
    class Board:
        client = "a service"

        def put(self, value):
            pass

        def values(self):
            step = loop.step
            seen = {"data": 0.1, "host": 0.0, "devices": -0.05}
            return {
                0: {},
                1: {"step": step, **seen},
                2: {"step": 3, **seen, "host": 9.0},
            }

    class Silent(Board):
        def values(self):
            return {0: {}}

    monkeypatch.setattr(step_alarm.coordination, "Board", lambda name: Board())
    loop = Loop()
    loop.run(100)
    # to process 0, waiting for another's data is waiting for its devices
    loop.run(30, devices=0.2)
    ((_, step, fields),) = loop.events
    assert step <= 130, "2 spoke of another time"
    assert (fields["process"], fields["phase"]) == (1, "data")
    assert "process 1's data" in loop.notes[0]
    monkeypatch.setattr(step_alarm.coordination, "Board", lambda name: Silent())
    loop = Loop()
    loop.run(60)
    loop.run(30, devices=0.2)
    ((_, step, fields),) = loop.events
    assert step <= 90
    assert (fields["process"], fields["phase"]) == (None, "devices")


def test_a_process_says_anew_what_it_sees_while_steps_are_slow(monkeypatch):
    """Behind a stall of another, the first look at slow steps has as much waiting in it
    as slow data.
    """
    said = []

    class Board:
        client = "a service"

        def put(self, value):
            said.append(value)

        def values(self):
            return {}

    monkeypatch.setattr(step_alarm.coordination, "Board", lambda name: Board())
    loop, quiet = Loop(), dict.fromkeys(("data", "host", "devices"), 0.0)
    loop.run(100)
    loop.run(1, devices=4.0)
    loop.run(20, data=0.2)
    causes = [find_cause({0: quiet, 1: grown}, alone=False) for grown in said]
    assert causes[0] == (None, "devices")
    assert causes[-1] == (1, "data")
    assert said[-1]["step"] > 116, "a window behind the stall"
    told = len(said)
    loop.run(100)
    assert len(said) < told + 8, "no more once steps are as usual"


SLOW_FROM, STEPS = 60, 100
PROGRAM = """
import os, runpy, time
from jaxdist.data.dataset import Dataset
honest, number = Dataset.train_batch, os.environ["JAXDIST_PROCESS_ID"]

def faulty(self, step, *rest):
    time.sleep(3.0 if (number, step) == ("0", 45) else 0.6 if number == "1" and step >= SLOW_FROM else 0.3)
    return honest(self, step, *rest)

Dataset.train_batch = faulty
runpy.run_module("jaxdist.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_process_whose_data_is_slow_is_named_by_the_first(tmp_path):
    """Two real processes; a single slow step of the other is none, rows are too far
    apart to tell.
    """
    settings = {
        "train__log_every": 1000,
        "train__steps": STEPS,
        "checkpoint__every_steps": 0,
    }
    _, _, _, *flags = command(tmp_path, **settings)
    code = PROGRAM.replace("SLOW_FROM", str(SLOW_FROM))
    group = start_group([sys.executable, "-c", code, *flags], 2, 1)
    outputs = [process.communicate(timeout=570)[0] for process in group]
    assert [process.returncode for process in group] == [0, 0], outputs
    events = [
        event for event in read_events(tmp_path) if event["event"] == "slow_steps"
    ]
    print(events, *read_rows(tmp_path).train[-1:], sep="\n")
    assert [(event["process"], event["phase"]) for event in events] == [(1, "data")]
    assert SLOW_FROM < events[0]["step"] <= SLOW_FROM + 30
    assert events[0]["step_s"] > 1.5 * events[0]["usual_step_s"] > 0.1
    assert "process 1's data" in outputs[0]


def test_what_a_straggler_takes_of_the_others_is_waiting(monkeypatch):
    class Board:
        client = "a service"

        def __init__(self, busy_s):
            self.busy_s = busy_s

        def put(self, value):
            self.busy_s[0] = value

        def values(self):
            return self.busy_s

    busy_s, events = {1: 0.18, 2: 0.03}, []
    monkeypatch.setattr(paces.coordination, "Board", lambda name: Board(busy_s))
    pace = paces.Pace(
        lambda name, step, **fields: events.append((name, fields["process"]))
    )
    held = []
    for row in range(8):
        pace.row(10 * row, steps=10, seconds=2.0, waited_s=1.8)
        held.append(pace.held_s)
    # Of 0.2 s a step this process works 0.02, the slowest 0.18: it is judged from the
    # sixth row on.
    assert held == [0.0] * 5 + [pytest.approx(1.6)] * 3
    assert events == [("straggler", 1)]
    busy_s[1] = 0.03
    pace.row(90, steps=10, seconds=2.0, waited_s=1.8)
    assert pace.held_s == 0.0


class Thorough(StepAlarm):
    """An alarm that computes the usual pace at each sample."""

    def _sample(self, step):
        current = self._parts()
        usual = self._usual()
        if self._slow_since is None:
            is_long = sum(self._started.recent) >= step_alarm._MIN_WINDOW_S
            if usual and is_long and current.step > step_alarm._SLOW * usual.step:
                self._slow_since = step
                self._report_by = (
                    step if self._is_alone() else step + step_alarm._ANSWER
                )
            else:
                self._samples.append(current)
        elif usual and current.step < step_alarm._USUAL * usual.step:
            self._slow_since = None
        elif step - self._slow_since >= step_alarm._KEPT:
            self._samples.clear()
            self._slow_since = None
        if self._slow_since is not None and usual:
            self._post(step, current, usual)
        if self._report_by is not None and usual:
            self._report_cause(step, current, usual)


class SilentBoard:
    """The board of several processes, of which the others post nothing."""

    client = object()

    def put(self, post):
        pass

    def values(self):
        return {}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_alarms_are_those_of_all_medians(seed, alone):
    """Steps of random lengths, around the shortest window that can have a slowdown."""
    quick, thorough = Loop(), Loop()
    thorough.alarm = Thorough(
        thorough._event, thorough.notes.append, clock=lambda: thorough.now
    )
    if not alone:
        quick.alarm._board = thorough.alarm._board = SilentBoard()
    draw = random.Random(seed)
    for _ in range(40):
        slow = {
            part: draw.choice([0.001, 0.005, 0.02, 0.08])
            for part in ("data", "host", "devices")
        }
        steps = draw.randrange(1, 200)
        pause_every = draw.choice([0, 0, 7])
        for loop in (quick, thorough):
            loop.run(steps, pause_every=pause_every, **slow)
    assert quick.events == thorough.events
    assert quick.events
    assert quick.alarm._samples == thorough.alarm._samples
