"""The plan of the faults of steps in memory, and the count of what is complete."""

import importlib
import json
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks/step")
    return importlib.import_module


def test_the_plan_is_the_one_that_its_seed_draws(module):
    planned = module("memory_faults_plan")
    plan = planned.read_plan(planned.PLAN)
    assert plan == planned.draw(json.loads(planned.PLAN.read_text())["seed"])
    kinds = [fault.kind for fault in plan]
    assert len(plan) == 200
    assert all(kinds.count(kind) >= 10 for kind in planned.MIX)
    assert {fault.kind: fault.source for fault in plan} == {
        kind: source for kind, (_, source) in planned.MIX.items()
    }
    driver = module("memory_faults_driver")
    assert all(hasattr(driver.Driver, name) for name in driver.FAULTS.values())


def test_a_step_is_complete_if_one_save_of_it_has_all_parts(module):
    a, b = Path("a"), Path("b")
    found = {
        2: {"one save": {0: {0: a, 1: b}, 1: {1: b}}},
        4: {"one save": {0: {0: a}}, "another": {1: {1: b}}},
        6: {"one save": {0: {0: a, 1: b}, 1: {1: b, 0: a}}},
    }
    files = module("memory_faults_run").Files(found, 2)
    assert files.complete() == [2, 6]
    assert files.complete(copies=2) == [6]
    assert files.steps() == [2, 4, 6]
    assert files.of(2, 0) == {0: a, 1: b}
