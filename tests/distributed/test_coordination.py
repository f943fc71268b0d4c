"""How processes agree: a lone one at once, three through the coordination service."""

import subprocess
import sys

from jaxdist.distributed import coordination
from support.runs import environment

AGENT = [sys.executable, "-m", "jaxdist.launch", "--processes", "3", "--devices-per-process", "1", "--"]

THREE = """
import jax
from jaxdist.config import ConfigError
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
try:
    with coordination.raise_on_all():
        if me == 0:
            raise ConfigError("wrong")
except ConfigError as error:
    facts += [str(error)]
print("facts:", facts)
"""


def test_three_processes_agree():
    done = subprocess.run(
        [*AGENT, sys.executable, "-c", THREE], env=environment(1), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "facts: " in line)
    facts = [eval(line.partition("facts: ")[2]) for line in lines]
    common = ["", "process 1: bad 1", "bad 0", [], {0: 10, 1: 11, 2: 12}]
    told = "refused by process 0, which says why"
    assert facts == [
        [{"me": 0, "x": 0.1}, {0: 0, 1: 1, 2: 2}, *common, "process 1: disk full", "wrong"],
        [{"me": 0, "x": 0.1}, True, *common, told],
        [{"me": 0, "x": 0.1}, True, *common, "process 1: disk full", told],
    ]


def test_a_lone_process_agrees_with_itself():
    assert coordination.broadcast([1]) == [1] and coordination.gather(2) == {0: 2}
    assert coordination.first_error("bad") == "bad" and coordination.first_error("") == ""
    assert coordination.all_equal({"a": 1}) == []
    coordination.barrier()
