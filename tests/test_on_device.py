"""benchmarks/on_device.py: what fails is recorded and stops nothing, and the next call does what is left."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest

from support.paths import ROOT

WRITE = "import json, sys; json.dump({'summary': 'written'}, open(sys.argv[-1], 'w'))"
CODE = {  # of the items' processes
    "good": WRITE,
    "faulty": "print('noise'); raise MemoryError('RESOURCE_EXHAUSTED: 7 GiB')",
    "slow": "import time; time.sleep(60)",
    "last": WRITE,
}


@pytest.fixture
def on_device(monkeypatch) -> ModuleType:
    """Yields the script, its items replaced by CODE."""
    spec = importlib.util.spec_from_file_location("on_device", ROOT / "benchmarks/on_device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_device", module)
    spec.loader.exec_module(module)
    items = [module.Item(name, "", "", "", usual_s=1) for name in CODE]
    monkeypatch.setattr(module, "ITEMS", tuple(items))
    monkeypatch.setattr(module.Item, "limit_s", property(lambda item: 0.5 if item.name == "slow" else 60.0))
    monkeypatch.setattr(module, "command_of", lambda item, tiny, out: [sys.executable, "-c", CODE[item.name]])
    return module


def run(module: ModuleType, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["on_device.py", *arguments])
    return module.main()


def test_a_failure_has_its_reason_and_stops_no_other(on_device, monkeypatch, tmp_path):
    assert run(on_device, monkeypatch, "--out", str(tmp_path)) == 1
    rows = on_device.last_rows(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "done", "faulty": "failed", "slow": "failed", "last": "done",
    }  # fmt: skip
    assert "RESOURCE_EXHAUSTED: 7 GiB" in rows["faulty"]["reason"]
    assert "took more than" in rows["slow"]["reason"]
    with (tmp_path / on_device.RECORDS).open("a") as file:
        file.write('{"item": "last", "sta')  # as a machine that is taken away leaves it
    before = (tmp_path / on_device.RECORDS).read_text()
    assert run(on_device, monkeypatch, "--out", str(tmp_path)) == 1  # nothing is left
    assert (tmp_path / on_device.RECORDS).read_text() == before
    monkeypatch.setitem(CODE, "faulty", WRITE)
    assert run(on_device, monkeypatch, "--out", str(tmp_path), "--retry", "--items", "faulty,good") == 0
    assert on_device.last_rows(tmp_path)["faulty"]["status"] == "done"


def test_what_the_budget_cuts_short_is_left(on_device, monkeypatch, tmp_path):
    (item,) = (item for item in on_device.ITEMS if item.name == "slow")
    row = on_device.run_item(item, True, tmp_path, 0.2)
    assert row["status"] == "cut" and "all that the budget had left" in row["reason"]
    assert on_device._is_left(item, {"slow": row}, retry=False)
    assert not on_device._is_left(item, {"slow": row | {"status": "failed"}}, retry=False)


def test_missing_packages_are_named_with_their_cure(on_device, monkeypatch, capsys):
    def version(name: str) -> str:
        if name == "ml-collections":
            raise PackageNotFoundError(name)
        return "0.1" if name == "flax" else "99.0"

    monkeypatch.setattr(on_device.importlib.metadata, "version", version)
    monkeypatch.setattr(on_device, "_importable", lambda module: False)
    assert run(on_device, monkeypatch, "--out", "unused") == on_device.EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: flax 0.1 is older than 0.12.8: pip install 'flax>=0.12.8'",
        "error: ml-collections is not installed: pip install 'ml-collections>=1.1.0'",
    ]


def test_the_commands_of_all_items_are_ones_that_their_scripts_take():
    spec = importlib.util.spec_from_file_location("plain_on_device", ROOT / "benchmarks/on_device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_on_device"] = module
    spec.loader.exec_module(module)
    names = [item.name for item in module.ITEMS]
    assert len(names) == len(set(names)) > 15
    for item in module.ITEMS:
        assert (ROOT / "benchmarks" / item.script).is_file()
        words = module.command_of(item, False, "out")
        measured = words[words.index("--measured") + 1] if "--measured" in words else names[0]
        assert names.index(measured) <= names.index(item.name)
