"""The probe between steps: a slow chip, host link or host memory is named, noise is not."""

from typing import ClassVar

import jax
import pytest

from jaxdist.operations.page import status
from jaxdist.operations.watch import probe
from jaxdist.operations.watch.probe import Bench, Judge, Probe, SlowPart, compare_parts
from jaxdist.telemetry.metrics import read_events, read_rows
from support.paths import SUPPORT
from support.runs import command, start_group


def posts(step: int, **slow: float):
    """Returns the posts of four processes with two devices each.

    Args:
      slow: times the usual time of a part of process 3; of its device 7.
    """
    found = {}
    for process in range(4):
        seconds = {
            "chip": {str(2 * process + n): 1e-3 for n in range(2)},
            "link": {str(2 * process + n): 2e-3 for n in range(2)},
            "memory": {"": 3e-3},
        }
        found[process] = {"step": step, "host": f"h{process}", "seconds": seconds}
    for part, times in slow.items():
        device = "" if part == "memory" else "7"
        found[3]["seconds"][part][device] *= times
    return found


class Told:
    def __init__(self):
        self.events, self.notes = [], []
        self.judge = Judge(self._event, self.notes.append)

    def _event(self, name, step, **fields):
        self.events.append((name, step, [part["text"] for part in fields["parts"]]))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            "chip",
            "process 3 (host h3), device 7: chip 4.1 times slower than the median",
        ),
        (
            "link",
            "process 3 (host h3), device 7: host link 4.1 times slower than the median",
        ),
        ("memory", "process 3 (host h3): host memory 4.1 times slower than the median"),
    ],
)
def test_a_slow_part_is_named_after_two_probes_and_until_it_recovers(part, text):
    told = Told()
    fields = told.judge.compare(10, posts(10, **{part: 4.1}))
    assert fields == pytest.approx(
        {"probe_chip": 1, "probe_link": 1, "probe_memory": 1} | {f"probe_{part}": 4.1}
    )
    told.judge.compare(15, posts(10, **{part: 4.1}))  # the same probe again
    assert not told.events
    for step in (20, 30):
        told.judge.compare(step, posts(step, **{part: 4.1}))
    assert told.events == [("slow_parts", 20, [text])]
    assert told.notes == [f"step 20: {text}"]
    told.judge.compare(40, posts(40))
    assert told.events[1:] == [("slow_parts", 40, [])]
    assert told.notes[1:] == ["step 40: no chip, link or memory is slow any more"]


def test_noise_is_not_named():
    told = Told()
    for step in range(0, 100, 20):
        told.judge.compare(step, posts(step, chip=9.0))  # slow in every second probe
        told.judge.compare(step + 10, posts(step + 10, chip=1.4, link=1.9))
    assert not told.events


def test_of_two_processes_the_slower_one_is_named():
    two = {
        process: post for process, post in posts(1, memory=3.0).items() if process > 1
    }
    slow = [item for item in compare_parts(two) if item.times > 2]
    assert slow == [SlowPart(3, "h3", "", "memory", pytest.approx(3.0))]


def test_a_kind_with_one_part_is_compared_with_nothing():
    (post,) = [post for process, post in posts(1).items() if process == 0]
    assert {item.part for item in compare_parts({0: post})} == {"chip", "link"}


def test_the_work_is_timed_on_each_device():
    bench = Bench(jax.devices()[:2])
    bench.prepare()
    seconds = bench.measure()
    names = {str(device.id) for device in jax.devices()[:2]}
    assert seconds["chip"].keys() == names
    assert seconds["memory"].keys() == {""}
    assert seconds["link"] == {}  # CPU devices have none
    assert all(0 < s < 10 for part in seconds.values() for s in part.values())


def test_probes_take_less_than_a_thousandth_of_the_time(monkeypatch):
    """They are left out until a thousand times the last one's duration has passed."""
    now = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    class SlowBench:
        calls = 0

        def prepare(self):
            pass

        def measure(self):
            self.calls += 1
            now[0] += 0.05
            return {"chip": {}, "link": {}, "memory": {}}

    callback = Probe()
    callback.steps = 1
    callback._next_s = 0.0
    callback._bench = bench = SlowBench()
    callback._post = lambda post: None
    monkeypatch.setattr(probe, "time", Clock)

    class View:
        step = 1
        last = interrupted = False

    for _ in range(100_000):
        now[0] += 0.01
        callback.on_step(View())
    assert bench.calls == pytest.approx(1_000 / 50, abs=2)
    assert 0.05 * bench.calls < 1e-3 * now[0] + 0.05


def test_devices_without_room_are_not_probed_again():
    class FullBench:
        calls = 0

        def prepare(self):
            pass

        def measure(self):
            self.calls += 1
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 8 MiB")

    class Noted:
        notes: ClassVar[list[str]] = []

        def note(self, text):
            self.notes.append(text)

    class View:
        step = 10
        last = interrupted = False

    callback = Probe()
    callback.steps = 10
    callback._next_s = 0.0
    callback._run = Noted()
    callback._bench = FullBench()
    for _ in range(3):
        callback.on_step(View())
    assert callback._bench.calls == 1
    assert Noted.notes == ["step 10: no probe: RESOURCE_EXHAUSTED: 8 MiB"]


def test_emulated_devices_of_a_process_are_one():
    assert probe.distinct_devices(jax.devices()) == jax.devices()[:1]


@pytest.mark.slow
def test_a_run_names_the_process_whose_host_memory_is_slow(tmp_path):
    """The second process measures many times the time of its host memory."""
    folder = tmp_path / "run"
    train = command(folder, train__steps=12, health__probe_every=3)
    train[1:3] = [str(SUPPORT / "slow_probe.py")]
    group = start_group(train, 2, 1)
    assert [process.wait(120) for process in group] == [0, 0]
    rows = read_rows(folder).train
    probed = [row for row in rows if "probe_memory" in row]
    assert [row["step"] for row in probed] == [4, 7, 10]
    assert all(row["probe_memory"] > 2 and row["probe_s"] > 0 for row in probed)
    events = [e for e in read_events(folder) if e["event"] == "slow_parts"]
    assert events[0]["step"] == 7
    (part,) = [part for part in events[0]["parts"] if part["part"] == "memory"]
    assert (part["process"], part["device"]) == (1, "")
    document = status.read_status(folder).document()
    assert part["text"].partition(": ")[0] in document["slow_parts"][-1]
    assert "slow      process 1 (host " in status.as_text(document)
