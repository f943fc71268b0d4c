"""How processes agree: a lone one at once, three through the coordination service."""

import re
import subprocess
import sys

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

THREE = """
import jax
from jaxdist.config import ConfigError, exit_code_of
from jaxdist.distributed import coordination, initialize
initialize.join_processes()
me = jax.process_index()
facts = [
    coordination.broadcast({"me": me, "x": 0.1}),
    coordination.gather(me) if me == 0 else coordination.gather(me) == {},
    coordination.first_error(""),
    coordination.first_error(f"bad {me}" if me else ""),
    coordination.first_error(f"bad {me}"),
    coordination.all_equal({"a": 1}),
]
board = coordination.Board("test")
board.put(me)
board.put(me + 10)
coordination.barrier()
facts += [board.values()]
shared = coordination.FailableBarrier("test")
shared.begin()
shared.wait(key="first", timeout_ms=20_000)
try:
    if me == 1:
        shared.fail(OSError("disk full"))
    else:
        shared.wait(key="second", timeout_ms=20_000)
except RuntimeError as error:
    facts += [str(error)]
shared.begin()
shared.wait(key="second", timeout_ms=20_000)
class NoCheckpoint(Exception):
    exit_code = 77
class Odd(Exception):
    exit_code = "E17"
    def __str__(self):
        raise TypeError
    def __len__(self):
        return 0
def raised(errors, *, alone=()):
    "Returns the kind, exit code and text of what this process gets, and a value that all still agree on."
    try:
        with coordination.raise_on_all():
            if me in alone:
                coordination.Board("of one process")
            if me in errors:
                raise errors[me]
        got = None
    except (Exception, SystemExit) as error:
        got = type(error).__name__, exit_code_of(error), "" if isinstance(error, Odd) else str(error)
    return got, coordination.broadcast(me)
facts += [
    raised({}),
    raised({0: ConfigError(["wrong", "also wrong"])}),
    raised({2: ConfigError("wrong here")}),
    raised({1: OSError(28, "No space left"), 2: ValueError("later")}, alone=[0, 2]),
    raised({0: NoCheckpoint("none\\nat all")}),
    raised({1: Odd()}),
    raised({1: SystemExit(3)}),
]
print("facts:", facts)
"""


def test_three_processes_agree():
    # where nobody listens
    behind_proxy = environment(1) | {"http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [*AGENT, sys.executable, "-c", THREE],
        env=behind_proxy,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "facts: " in line)
    facts = [eval(line.partition("facts: ")[2]) for line in lines]
    common = ["", "process 1: bad 1", "bad 0", [], {0: 10, 1: 11, 2: 12}]
    fail = "process 1: disk full"
    assert [found[:-7] for found in facts] == [
        [{"me": 0, "x": 0.1}, {0: 0, 1: 1, 2: 2}, *common, fail],
        [{"me": 0, "x": 0.1}, True, *common],
        [{"me": 0, "x": 0.1}, True, *common, fail],
    ]
    assert {value for found in facts for _, value in found[-7:]} == {0}
    none, fault, elsewhere, error, stored, odd, left = zip(
        *([got for got, _ in found[-7:]] for found in facts), strict=True
    )
    assert none == (None, None, None)
    told = ("ConfigError", 78, "process 0: wrong")
    assert fault == (("ConfigError", 78, "wrong\nalso wrong"), told, told)
    told = ("ConfigError", 78, "process 2: wrong here")
    assert elsewhere == (told, told, ("ConfigError", 78, "wrong here"))
    assert error[0][:2] == ("PeerFailed", 70)
    assert error[2] == ("ValueError", 1, "later")
    line = r"process 1: OSError: \[Errno 28\] No space left \(<string>:\d+\)"
    assert re.fullmatch(line, error[0][2])
    assert error[1] == (
        "OSError",
        1,
        "[Errno 28] No space left",
    )
    assert stored[0] == ("NoCheckpoint", 77, "none\nat all")
    assert stored[1] == stored[2]
    assert stored[1][:2] == ("PeerFailed", 77)
    assert stored[1][2].startswith("process 0: NoCheckpoint: none (")
    assert left[1] == ("SystemExit", 1, "3")
    assert left[0] == left[2]
    assert left[0][2].startswith("process 1: SystemExit: 3 (")
    assert odd[1] == ("Odd", 1, "")
    assert odd[0] == odd[2]
    assert odd[0][:2] == ("PeerFailed", 70)
    assert odd[0][2].startswith("process 1: Odd: (its text cannot be had)")


def test_a_lone_process_agrees_with_itself():
    assert coordination.broadcast([1]) == [1]
    assert coordination.gather(2) == {0: 2}
    assert coordination.first_error("bad") == "bad"
    assert coordination.first_error("") == ""
    assert coordination.all_equal({"a": 1}) == []
    coordination.barrier()
