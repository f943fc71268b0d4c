"""The committed record of the arithmetic's errors: no run dropped, and none stale.

The record is made by benchmarks/plan/arithmetic.py. Here nothing is compiled.
"""

import importlib
import json
import re
import sys

import pytest

from jaxdist.planner import memory
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks/plan"))
script = importlib.import_module("arithmetic")
sys.path.pop(0)

RECORD = json.loads(script.RESULTS.read_text())
ROWS = RECORD["rows"]
# Runs whose arithmetic is too low by more than the band, as docs/evidence/plan.md says.
OUTSIDE = ("7b-zero2-16", "7b-v5p-zero2-accumulation")


def test_no_run_of_the_list_is_dropped():
    assert len(script.RUNS) >= 40
    assert [*ROWS] == [run.name for run in script.RUNS]
    for run in script.RUNS:
        assert ROWS[run.name]["command"] == run.command
        assert ROWS[run.name]["compiler_bytes"] > 0, run.name


def test_the_list_has_ordinary_runs_of_all_kinds():
    words = " ".join(run.command for run in script.RUNS)
    kinds = [f"mesh.zero={stage}" for stage in (1, 2)]
    kinds += ["accumulation=4", "lora.rank", "offload.optimizer=true", "remat.policy"]
    kinds += ["mesh.pipeline", "mesh.tensor", "mesh.context", "mesh.expert"]
    kinds += ["params=bfloat16", "--on a100", "--on h100", "--on v5e", "--on v5p"]
    assert [kind for kind in kinds if kind not in words] == []


@pytest.mark.parametrize("name", [run.name for run in script.RUNS])
def test_a_run_is_as_close_as_the_docs_say(name):
    row = ROWS[name]
    assert script.is_within(row) != (name in OUTSIDE), script.error_of(row)
    # A search compiles layouts that exceed a limit by less than this.
    small = row["arithmetic_bytes"] - row["compiler_bytes"] < script.SMALL_ERROR
    assert script.error_of(row) < memory.OVERESTIMATE or small


@pytest.mark.parametrize("run", script.RUNS, ids=lambda run: run.name)
def test_the_recorded_arithmetic_is_todays(run):
    if "lora.base" in run.command:
        pytest.importorskip("qwix")
    found = script.components_of(run)
    assert found == pytest.approx(ROWS[run.name]["components"], rel=0.001)
    total = memory.accounted_peak(found)
    assert total == pytest.approx(ROWS[run.name]["arithmetic_bytes"], rel=0.001)


def test_the_docs_have_the_counts_of_the_record():
    text = (ROOT / "docs/evidence/plan.md").read_text()
    (words,) = re.findall(r"Of (\d+) runs, (\d+) are within 10 %", text)
    within = [
        name for name, row in ROWS.items() if abs(script.error_of(row)) <= script.BAND
    ]
    assert [int(word) for word in words] == [len(ROWS), len(within)]
    for name in set(ROWS) - set(within):
        assert f"`{name}`" in text
