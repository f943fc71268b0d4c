"""Buckets of the ledger that are no phases, and the line that says where a run's time
went.
"""

import json
import re
import signal
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxdist.config import ConfigError
from jaxdist.operations.ledger import run_lives
from jaxdist.operations.ledger.ledger import Ledger, process_age_s
from jaxdist.operations.ledger.run_lives import Life
from jaxdist.storage import run_format
from jaxdist.telemetry import clock as core_clock
from support.launches import assert_time_adds_up
from support.ledgers import published
from support.runs import command, environment, last_step, train, train_and_kill

START = 1_790_000_000.0


class Clock:
    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(clock):
    return Ledger(clock=clock, wall_clock=clock)


def buckets(book):
    return book.lives()[-1].buckets


def test_what_is_no_phase_has_a_bucket_of_its_own(book, clock):
    with book.timed(core_clock.JOIN):
        clock.now += 3
    book.enter("step", 1)
    clock.now += 10
    with book.timed(core_clock.HOOKS):
        clock.now += 2
        with core_clock.installed(book), core_clock.timed(core_clock.WAIT):
            clock.now += 4
        book.enter("evaluate", 1)
        clock.now += 1
    clock.now += 5
    assert buckets(book) == {
        "join": 3,
        "start": 0,
        "step": 10,
        "hooks": 3,
        "wait": 4,
        "evaluate": 5,
    }
    with core_clock.timed(core_clock.WAIT):
        clock.now += 1  # no run of this process: nobody is told
    assert "wait" in buckets(book)
    assert buckets(book)["wait"] == 4


def test_another_thread_moves_nothing(book, clock):
    book.enter("step", 1)

    def beside():
        with book.timed(core_clock.HOOKS):
            clock.now += 2
            book.compiled(1.0)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert buckets(book) == {"start": 0, "step": 2}


def test_compilations_within_compilations_count_once(book, clock):
    book.enter("step", 1)
    clock.now += 10
    for seconds in (2, 3):  # two traces
        clock.now += seconds
        book.compiled(seconds)
    clock.now += 5
    book.compiled(11)  # of which the traces were a part
    clock.now += 1
    assert buckets(book) == {"start": 0, "step": 10, "compile": 11}
    book.enter("data", 1)
    clock.now += 1
    book.compiled(50)  # began in another bucket: it takes no more than there is
    assert buckets(book)["data"] == 0
    assert sum(buckets(book).values()) == clock.now - START


def test_a_process_that_began_earlier_started_then(clock):
    book = Ledger(age_s=7.0, clock=clock, wall_clock=clock)
    (life,) = book.lives()
    assert life.began == START - 7
    assert life.buckets == {"start": 7}
    assert 0 < process_age_s() < 24 * 3600


def test_what_jax_compiles_in_a_step_is_no_step():
    book = Ledger()
    book.enter("step", 1)

    @jax.jit
    def program(x):
        for _ in range(30):
            x = jnp.sin(x) @ x
        return x

    # by jax, of its compiler alone: the bucket has tracing and lowering besides
    said = []

    def listen(event, duration_secs, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            said.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with book:
            began = time.monotonic()
            program(jnp.ones((8, 8))).block_until_ready()
            took_s = time.monotonic() - began
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    found = buckets(book)
    assert said, "something was compiled"
    assert sum(said) < found["compile"] <= took_s
    program(jnp.ones((9, 9))).block_until_ready()
    assert buckets(book)["compile"] == found["compile"], "nobody listens any more"


def life(first, last, *, began, undone=0, **seconds):
    return Life(
        began, first=first, step=last, undone=undone, buckets=seconds, ended=True
    )


def test_the_line_says_where_the_time_went():
    assert run_lives.goodput_line([]) == ""
    one = life(0, 620, began=0.0, step=62.0, compile=3.0)
    two = life(600, 900, began=65.0, step=30.0, compile=3.0, restore=0.4, save=1.6)
    assert run_lives.goodput_line([one]) == "goodput 95.4 % of 1m 05s: 4.6 % compile"
    assert (
        run_lives.goodput_line([one, two])
        == "goodput 90.0 % of 1m 40s: 6.0 % compile, 2.0 % lost to a restart at step 600, "
        "1.6 % save"
    )
    three = life(800, 900, began=100.0, step=10.0)
    assert "lost to 2 restarts" in run_lives.goodput_line([one, two, three])
    back = life(0, 100, began=0.0, undone=50, step=15.0, wait=5.0)
    assert (
        run_lives.goodput_line([back])
        == "goodput 50.0 % of 20s: 25.0 % waiting for other processes, "
        "25.0 % lost to rollbacks"
    )


def test_a_rollback_behind_a_lifes_first_step(book, clock):
    book.enter("data", 100)
    for done in (150, 60):
        if done == 60:
            book.enter("restore", 150)
            book.enter("data", 50)
        book.enter("step", done)
        clock.now += 50 if done == 150 else 10
        book.enter("data", done)
    (now,) = book.lives()
    assert (now.first, now.step, now.undone) == (50, 60, 50)
    spent = run_lives.account([life(0, 100, began=0.0, step=100.0), now]).buckets
    assert spent["lost"] == pytest.approx(50 + 50)
    assert spent["step"] == pytest.approx(50 + 10)


def test_a_rows_goodput_is_that_of_the_last_write(book, clock, tmp_path):
    assert book.goodput is None
    assert book.summary() == ""
    with published(book, tmp_path):
        book.enter("step", 0)
        clock.now += 3
        book.enter("save", 3)
        clock.now += 1
        book._write()
        assert book.goodput == pytest.approx(0.75)
    assert book.summary() == "goodput 75.0 % of 4s: 25.0 % save"


def test_a_life_says_how_it_ended(tmp_path):
    for code in (75, 0):
        with published(book := Ledger(), tmp_path):
            book.end_with(code)
    for error in (ValueError(), ConfigError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), published(book := Ledger(), tmp_path):
            book.end_with(75)
            raise error
    lives = run_lives.read_lives(tmp_path)
    assert [life.exit_code for life in lives] == [75, 0, 1, 78, 1]
    assert all(life.ended for life in lives)
    assert [life.failed for life in lives] == [False, False, True, False, True]
    stored = json.loads((file := tmp_path / run_lives.LEDGER_FILE).read_text())
    stored["lives"][0]["exit_code"] = "x"
    file.write_text(json.dumps(stored))
    assert run_lives.read_lives(tmp_path) == []


@pytest.mark.slow
def test_buckets_are_the_wall_time_through_kill_9(tmp_path):
    """Real processes, killed in steps, amid saves and in compiling."""
    began = time.time()
    # Steps take a tenth of a second, since the ledger is written once a second: a life must
    # have written steps after its last checkpoint, or nothing is known to be lost.
    options = {
        "train__eval_every": 25,
        "train__steps": 60,
        "checkpoint__every_steps": 20,
        "batch__global_size": 32,
        "batch__sequence_length": 256,
    }
    for step in (18, 38):
        train_and_kill(tmp_path, step, **options)
        time.sleep(0.7)
    log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    starting = subprocess.Popen(command(tmp_path, **options), env=environment(1), **log)
    while len(run_lives.read_lives(tmp_path)) < 3:
        assert starting.poll() is None
        time.sleep(0.05)
    starting.kill()
    starting.wait()
    done = train(tmp_path, **options)
    found = assert_time_adds_up(tmp_path, began=began, ended=time.time())
    lives = run_lives.read_lives(tmp_path)
    print(
        {name: round(seconds, 3) for name, seconds in found.buckets.items()},
        found.wall_s,
    )
    print(done.stdout.splitlines()[-1])
    assert len(lives) == 4
    assert [life.ended for life in lives] == [
        False,
        False,
        False,
        True,
    ]
    assert found.buckets["down"] > 1.4
    assert found.buckets["lost"] > 0
    assert found.buckets["compile"] > 0
    assert {"restore", "evaluate", "save", "join", "end"} <= found.buckets.keys()
    assert re.search(r"goodput [\d.]+ % of (\d+m )?\d+s: [\d.]+ % ", done.stdout)


def test_the_time_after_a_finished_life_is_no_part_of_the_run():
    one = life(0, 60, began=0.0, step=60.0, end=1.0)
    two = life(60, 90, began=1000.0, step=30.0, restore=2.0)
    killed = life(90, 95, began=1032.0, step=5.0)
    last = life(90, 120, began=1100.0, step=30.0)
    killed.ended = False
    found = run_lives.account([one, two, killed, last])
    assert found.buckets["down"] == pytest.approx(1100 - 1037)  # after the kill alone
    assert found.wall_s == pytest.approx(61 + 32 + 5 + 63 + 30)
    assert found.buckets["lost"] == 5
    for code in (75, 1, 70):  # preempted, failed: it was to go on
        one.exit_code = code
        assert run_lives.account([one, two, killed, last]).buckets[
            "down"
        ] == pytest.approx(939 + 63)


@pytest.mark.parametrize("chips", [0, -1, 1.5, True, "8", 10**30])
def test_chips_that_are_no_number_make_no_ledger(tmp_path, chips):
    entry = vars(life(0, 60, began=0.0, step=60.0))
    (tmp_path / run_lives.LEDGER_FILE).write_text(
        json.dumps(run_format.marked({"lives": [entry | {"chips": chips}]}))
    )
    assert run_lives.read_lives(tmp_path) == []
    (tmp_path / run_lives.LEDGER_FILE).write_text(
        json.dumps(run_format.marked({"lives": [entry | {"chips": 8}]}))
    )
    assert run_lives.read_lives(tmp_path)[0].chips == 8


def test_a_rollback_to_step_0_undoes_all(book, clock):
    book.enter("data", 0)
    for done in range(1, 31):
        book.enter("step", done)
        clock.now += 1
    book.enter("restore", 30)
    book.enter("data", 0)  # and steps under way are not known to be finished
    book.enter("step", 0)
    clock.now += 1
    book.enter("step", 1)
    (now,) = book.lives()
    assert (now.first, now.step, now.undone) == (0, 1, 30)


def test_a_clock_that_is_set_back_takes_nothing_from_the_account():
    """An NTP step between two lives, and within one: its steady clock goes on."""
    one = life(0, 10, began=5000.0, step=10.0)
    one.written, one.ended = 5010.0, False
    two = life(10, 20, began=4000.0, step=10.0)
    two.written, two.ended = 2010.0, False  # 2,000 s less while it ran
    three = life(20, 30, began=2070.0, step=10.0)
    three.written = 2080.0
    found = run_lives.account([one, two, three])
    assert found.buckets == {"down": 60.0, "lost": 0.0, "step": 30.0}


@pytest.mark.parametrize(
    "text", ["{", '{"lives": []}', '{"format": "jaxdist-1", "lives": [{"began": 1}]}']
)
def test_a_ledger_that_cannot_be_read_is_put_aside_not_overwritten(tmp_path, text):
    (file := tmp_path / run_lives.LEDGER_FILE).write_text(text)
    with published(book := Ledger(), tmp_path):
        book.enter("data", 0)
    assert len(run_lives.read_lives(tmp_path)) == 1
    assert (aside := tmp_path / f"{file.name}.unreadable").read_text() == text
    with published(Ledger(), tmp_path):
        pass
    assert len(run_lives.read_lives(tmp_path)) == 2
    assert aside.read_text() == text


def test_what_is_lost_is_by_the_lowest_step_from_which_any_later_life_went_on():
    lives = [
        life(0, 100, began=0.0, step=100.0),
        life(100, 200, began=100.0, step=100.0),
    ]
    lives += [
        life(None, 0, began=200.0, start=1.0),
        life(150, 160, began=201.0, step=10.0),
    ]
    assert run_lives.lost_s(lives) == [0, 50, 0, 0]
    lives += [life(90, 95, began=211.0, step=5.0)]  # a checkpoint between was damaged
    assert run_lives.lost_s(lives) == [10, 100, 0, 10, 0]
    # of a damaged folder: no day's work
    many = [life(0, 1, began=float(i), step=1.0) for i in range(30_000)]
    assert sum(run_lives.lost_s(many)) == 29_999
    assert run_lives.account(many).buckets["step"] == 1
    assert "29999 restarts" in run_lives.goodput_line(many)


def test_lives_of_no_steps_or_no_time_lose_nothing():
    empty = Life(10.0, written=10.0, ended=True, buckets={"start": 0.0})
    assert run_lives.account([empty]).goodput is None
    assert run_lives.goodput_line([empty]) == ""
    killed = Life(70.0, written=75.0, buckets={"start": 5.0})  # before its first step
    before = life(0, 50, began=0.0, step=50.0)
    before.ended = False
    lives = [before, killed, life(40, 50, began=80.0, step=10.0)]
    found = run_lives.account([*lives, empty])
    assert found.buckets["lost"] == pytest.approx(10)
    assert found.buckets["step"] == pytest.approx(50)
    assert found.buckets["down"] == pytest.approx(20 + 5)
    # more lost than was done, says a damaged file
    odd = life(40, 10, began=0.0, undone=3, step=8.0)
    assert run_lives.account([odd, life(0, 1, began=8.0)]).buckets["lost"] <= 8.0


@pytest.mark.slow
def test_a_run_that_was_extended_was_not_down(tmp_path):
    """Real processes: finished, extended, preempted, and finished again."""
    train(tmp_path, train__steps=6)
    time.sleep(1.5)
    assert train(tmp_path, train__steps=6).returncode == 0  # finished: nothing to do
    log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = {"train__steps": 4000}
    process = subprocess.Popen(command(tmp_path, **options), env=environment(1), **log)
    while last_step(tmp_path) < 12:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    time.sleep(1.5)
    train(tmp_path, train__steps=last_step(tmp_path) + 3)
    lives = run_lives.read_lives(tmp_path)
    assert [life.done for life in lives] == [True, False, True]
    assert [life.chips for life in lives] == [1] * 3
    assert all(life.ended for life in lives)
    idle_s = lives[1].began - lives[0].written
    found = run_lives.account(lives)
    assert idle_s > 1.5
    assert (
        1.5
        < found.buckets["down"]
        == pytest.approx(lives[2].began - lives[1].written, abs=0.05)
    )
    assert found.wall_s == pytest.approx(
        lives[2].written - lives[0].began - idle_s, abs=0.05
    )
