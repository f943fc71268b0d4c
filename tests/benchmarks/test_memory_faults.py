"""The plan of the faults of steps in memory, and the count of what is complete."""

import importlib
import json
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.fixture(scope="module")
def faults():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks/step")
        yield importlib.import_module("memory_faults")


def test_the_plan_is_the_one_that_its_seed_draws(faults):
    plan = faults.read_plan(faults.PLAN)
    assert plan == faults.draw(json.loads(faults.PLAN.read_text())["seed"])
    kinds = [fault.kind for fault in plan]
    assert len(plan) == 200
    assert all(kinds.count(kind) >= 10 for kind in faults.MIX)
    assert {fault.kind: fault.source for fault in plan} == {
        kind: source for kind, (_, source) in faults.MIX.items()
    }
    assert all(hasattr(faults.Driver, name) for name in faults.FAULTS.values())


def test_a_step_is_complete_if_one_save_of_it_has_all_parts(faults):
    a, b = Path("a"), Path("b")
    found = {
        2: {"one save": {0: {0: a, 1: b}, 1: {1: b}}},
        4: {"one save": {0: {0: a}}, "another": {1: {1: b}}},
        6: {"one save": {0: {0: a, 1: b}, 1: {1: b, 0: a}}},
    }
    files = faults.Files(found, 2)
    assert files.complete() == [2, 6]
    assert files.complete(copies=2) == [6]
    assert files.steps() == [2, 4, 6]
    assert files.of(2, 0) == {0: a, 1: b}
