"""How processes agree: a lone one at once, three through the coordination service."""

import ast
import re
import subprocess
import sys

import pytest

from jaxdist.distributed import coordination
from support.runs import environment

AGENT = [
    sys.executable,
    "-m",
    "jaxdist.launch",
    "--processes",
    "3",
    "--devices-per-process",
    "1",
    "--",
]

PROGRAM = """
import jax
from jaxdist.config import ConfigError, exit_code_of
from jaxdist.distributed import coordination, initialize
initialize.join_processes()
me = jax.process_index()
facts = {
    "broadcast": coordination.broadcast({"me": me, "x": 0.1}),
    "gather": coordination.gather(me),
    "no error": coordination.first_error(""),
    "errors of 1 and 2": coordination.first_error(f"bad {me}" if me else ""),
    "errors of all": coordination.first_error(f"bad {me}"),
    "differences": coordination.all_equal({"a": 1}),
}

board = coordination.Board("test")
board.put(me)
board.put(me + 10)
coordination.barrier()
facts["board"] = board.values()

barrier = coordination.FailableBarrier("test")
barrier.begin()
barrier.wait(key="first", timeout_ms=20_000)
facts["failed barrier"] = ""
try:
    if me == 1:
        barrier.fail(OSError("disk full"))
    else:
        barrier.wait(key="second", timeout_ms=20_000)
except RuntimeError as error:
    facts["failed barrier"] = str(error)
barrier.begin()
barrier.wait(key="second", timeout_ms=20_000)

class NoCheckpoint(Exception):
    exit_code = 77

class Unprintable(Exception):
    exit_code = "E17"
    def __str__(self):
        raise TypeError
    def __len__(self):
        return 0

def raised(errors, *, alone=()):
    "Returns type, exit code and text of the error that this process gets, or None."
    found = None
    try:
        with coordination.raise_on_all():
            if me in alone:
                coordination.Board("of one process")
            if me in errors:
                raise errors[me]
    except (Exception, SystemExit) as error:
        text = "" if isinstance(error, Unprintable) else str(error)
        found = type(error).__name__, exit_code_of(error), text
    assert coordination.broadcast(me) == 0, "processes agree after an error, too"
    return found

facts["nothing raised"] = raised({})
facts["config of 0"] = raised({0: ConfigError(["wrong", "also wrong"])})
facts["config of 2"] = raised({2: ConfigError("wrong here")})
two_errors = {1: OSError(28, "No space left"), 2: ValueError("later")}
facts["two errors"] = raised(two_errors, alone=[0, 2])
facts["own exit code"] = raised({0: NoCheckpoint("none\\nat all")})
facts["unprintable"] = raised({1: Unprintable()})
facts["exit"] = raised({1: SystemExit(3)})
print("facts:", facts)
"""


@pytest.fixture(scope="module")
def facts():
    """Returns what each of three processes found."""
    behind_proxy = environment(1) | {"http_proxy": "http://127.0.0.1:9"}  # no server
    done = subprocess.run(
        [*AGENT, sys.executable, "-c", PROGRAM],
        env=behind_proxy,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "facts: " in line)
    assert len(lines) == 3
    return [ast.literal_eval(line.partition("facts: ")[2]) for line in lines]


def of_each(facts, name):
    return [found[name] for found in facts]


def test_a_broadcast_gives_all_the_value_of_the_first(facts):
    assert of_each(facts, "broadcast") == 3 * [{"me": 0, "x": 0.1}]


def test_the_first_process_gathers_the_values_of_all(facts):
    assert of_each(facts, "gather") == [{0: 0, 1: 1, 2: 2}, {}, {}]


def test_all_hear_the_error_of_the_lowest_process_that_has_one(facts):
    assert of_each(facts, "no error") == 3 * [""]
    assert of_each(facts, "errors of 1 and 2") == 3 * ["process 1: bad 1"]
    assert of_each(facts, "errors of all") == 3 * ["bad 0"]


def test_equal_values_differ_in_nothing(facts):
    assert of_each(facts, "differences") == 3 * [[]]


def test_a_board_shows_the_last_value_of_each_process(facts):
    assert of_each(facts, "board") == 3 * [{0: 10, 1: 11, 2: 12}]


def test_who_waits_at_a_barrier_hears_why_another_failed(facts):
    failure = "process 1: disk full"
    assert of_each(facts, "failed barrier") == [failure, "", failure]


def test_without_an_error_nothing_is_raised(facts):
    assert of_each(facts, "nothing raised") == 3 * [None]


def test_a_config_error_of_one_process_is_raised_on_all(facts):
    heard = ("ConfigError", 78, "process 0: wrong")
    raised = ("ConfigError", 78, "wrong\nalso wrong")
    assert of_each(facts, "config of 0") == [raised, heard, heard]
    heard = ("ConfigError", 78, "process 2: wrong here")
    raised = ("ConfigError", 78, "wrong here")
    assert of_each(facts, "config of 2") == [heard, heard, raised]


def test_two_processes_keep_their_errors_and_others_hear_the_first(facts):
    heard, first, second = of_each(facts, "two errors")
    assert first == ("OSError", 1, "[Errno 28] No space left")
    assert second == ("ValueError", 1, "later")
    assert heard[:2] == ("PeerFailed", 70)
    line = r"process 1: OSError: \[Errno 28\] No space left \(<string>:\d+\)"
    assert re.fullmatch(line, heard[2])


@pytest.mark.parametrize(
    ("name", "process", "raised", "heard_code", "heard_text"),
    [
        pytest.param(
            "own exit code",
            0,
            ("NoCheckpoint", 77, "none\nat all"),
            77,
            "process 0: NoCheckpoint: none (",
            id="an exit code of its own is that of all",
        ),
        pytest.param(
            "exit",
            1,
            ("SystemExit", 1, "3"),
            70,
            "process 1: SystemExit: 3 (",
            id="an exit",
        ),
        pytest.param(
            "unprintable",
            1,
            ("Unprintable", 1, ""),
            70,
            "process 1: Unprintable: (its text cannot be had)",
            id="no text and no valid exit code",
        ),
    ],
)
def test_an_error_of_one_process_is_heard_by_the_others(
    name, process, raised, heard_code, heard_text, facts
):
    found = of_each(facts, name)
    assert found.pop(process) == raised
    first, second = found
    assert first == second
    assert first[:2] == ("PeerFailed", heard_code)
    assert first[2].startswith(heard_text)


def test_a_lone_process_agrees_with_itself():
    assert coordination.broadcast([1]) == [1]
    assert coordination.gather(2) == {0: 2}
    assert coordination.first_error("bad") == "bad"
    assert coordination.first_error("") == ""
    assert coordination.all_equal({"a": 1}) == []
    coordination.barrier()
