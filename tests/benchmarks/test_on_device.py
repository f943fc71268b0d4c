"""benchmarks/device/on_device.py: a failed item stops no other; a second call resumes."""

import importlib.util
import os
import signal
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jaxdist.storage import lock
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
    spec = importlib.util.spec_from_file_location(
        "on_device", ROOT / "benchmarks/device/on_device.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_device", module)
    spec.loader.exec_module(module)
    items = [module.Item(name, "", "", "", usual_s=1) for name in CODE]
    monkeypatch.setattr(module, "ITEMS", tuple(items))
    monkeypatch.setattr(
        module.Item,
        "limit_s",
        property(lambda item: 0.5 if item.name == "slow" else 60.0),
    )
    monkeypatch.setattr(
        module,
        "command_of",
        lambda item, tiny, out: [sys.executable, "-c", CODE[item.name]],
    )
    return module


def run(module: ModuleType, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["on_device.py", *arguments])
    return module.main()


def test_a_failure_has_its_reason_and_stops_no_other(on_device, monkeypatch, tmp_path):
    assert run(on_device, monkeypatch, "--out", str(tmp_path)) == 1
    rows = on_device.last_rows(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "done",
        "faulty": "failed",
        "slow": "failed",
        "last": "done",
    }
    assert "RESOURCE_EXHAUSTED: 7 GiB" in rows["faulty"]["reason"]
    assert "took more than" in rows["slow"]["reason"]
    with (tmp_path / on_device.RECORDS).open("a") as file:
        file.write('{"item": "last", "sta')  # as a machine that is taken away leaves it
    before = (tmp_path / on_device.RECORDS).read_text()
    assert run(on_device, monkeypatch, "--out", str(tmp_path)) == 1  # nothing is left
    assert (tmp_path / on_device.RECORDS).read_text() == before
    monkeypatch.setitem(CODE, "faulty", WRITE)
    assert (
        run(
            on_device,
            monkeypatch,
            "--out",
            str(tmp_path),
            "--retry",
            "--items",
            "faulty,good",
        )
        == 0
    )
    # of all, whatever was asked for
    assert (tmp_path / "summary.txt").read_text().count("\n") == len(CODE)
    assert on_device.last_rows(tmp_path)["faulty"]["status"] == "done"


def test_what_the_budget_cuts_short_is_left(on_device, monkeypatch, tmp_path):
    (item,) = (item for item in on_device.ITEMS if item.name == "slow")
    row = on_device.run_item(item, True, tmp_path, 0.2)
    assert row["status"] == "cut"
    assert "all that the budget had left" in row["reason"]
    assert on_device._is_left(item, {"slow": row}, tiny=True)
    # it may take all again
    assert on_device.left_of(on_device.ITEMS, {"slow": row}, True, False)[-1] == item
    failed = {"slow": row | {"status": "failed"}}
    assert not on_device._is_left(item, failed, tiny=True)
    assert on_device._is_left(item, failed, True, True)
    # at full size nothing was tried
    assert on_device._is_left(item, failed, tiny=False)


def test_a_plan_waits_for_what_it_is_compared_with(
    on_device, monkeypatch, tmp_path, capsys
):
    measured, plan = (
        on_device.Item(name, "", "", "", usual_s=1) for name in ("good", "last")
    )
    plan = replace(plan, full="--measured good")
    on_device.measure([plan, measured], True, tmp_path, None, True)
    assert list(on_device.last_rows(tmp_path)) == ["good"]
    assert "last: not begun, it is compared with good" in capsys.readouterr().out
    on_device.measure([plan, measured], True, tmp_path, None, True)
    assert on_device.last_rows(tmp_path)["last"]["status"] == "done"


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_budget_of_no_time_is_refused(
    on_device, monkeypatch, tmp_path, capsys, minutes
):
    arguments = ("--out", str(tmp_path / "new"), "--budget-minutes", minutes)
    assert run(on_device, monkeypatch, *arguments) == on_device.EXIT_CONFIG
    assert "must be above 0" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_two_at_once_and_a_folder_that_is_none_are_refused(
    on_device, monkeypatch, tmp_path, capsys
):
    with lock.exclusive(tmp_path / "lock"):
        assert (
            run(on_device, monkeypatch, "--out", str(tmp_path), "--items", "good")
            == on_device.EXIT_CONFIG
        )
    assert "process" in capsys.readouterr().err
    assert not on_device.last_rows(tmp_path)
    (tmp_path / "file").touch()
    assert (
        run(on_device, monkeypatch, "--out", str(tmp_path / "file"))
        == on_device.EXIT_CONFIG
    )


@pytest.fixture
def kept_handlers():
    """Restores the handlers of signals that the program replaces."""
    kept = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("kept_handlers")
def test_ended_by_a_signal_it_ends_its_item(on_device, monkeypatch, tmp_path):
    code = f"import os, signal, time; print(os.getpid(), flush=True); os.kill({os.getpid()}, signal.SIGTERM)"
    monkeypatch.setitem(CODE, "slow", f"{code}; time.sleep(60)")
    monkeypatch.setattr(on_device.Item, "limit_s", 60.0)
    with pytest.raises(SystemExit) as ended:
        run(on_device, monkeypatch, "--out", str(tmp_path), "--items", "slow")
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "logs" / "slow.log").read_text()), 0)


@pytest.mark.usefixtures("kept_handlers")
def test_a_signal_during_an_items_start_ends_the_item(on_device, monkeypatch, tmp_path):
    """The signal arrives before `Popen` returns."""
    children = []

    def start(*arguments, **options):
        children.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return children[0]

    popen = on_device.subprocess.Popen
    monkeypatch.setitem(CODE, "slow", "import time; time.sleep(60)")
    monkeypatch.setattr(on_device.Item, "limit_s", 60.0)
    monkeypatch.setattr(on_device.subprocess, "Popen", start)
    with pytest.raises(SystemExit) as ended:
        run(on_device, monkeypatch, "--out", str(tmp_path), "--items", "slow")
    assert ended.value.code == 128 + signal.SIGTERM
    assert children[0].returncode == -signal.SIGKILL


def test_missing_packages_are_named_with_their_cure(on_device, monkeypatch, capsys):
    def version(name: str) -> str:
        if name == "ml-collections":
            raise PackageNotFoundError(name)
        return "0.1" if name == "flax" else "9999.0"  # versions may be years

    monkeypatch.setattr(on_device.importlib.metadata, "version", version)
    monkeypatch.setattr(on_device, "_importable", lambda module: False)
    assert run(on_device, monkeypatch, "--out", "unused") == on_device.EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: flax 0.1 is older than 0.12.8: pip install 'flax>=0.12.8'",
        "error: ml-collections is not installed: pip install 'ml-collections>=1.1.0'",
    ]


def test_the_commands_of_all_items_are_ones_that_their_scripts_take(monkeypatch):
    for folder in ("shared", "step", "device"):
        monkeypatch.syspath_prepend(ROOT / "benchmarks" / folder)
    module = importlib.import_module("on_device")
    sides = importlib.import_module("sides")
    names = [item.name for item in module.ITEMS]
    assert len(names) == len(set(names)) > 15
    for item in module.ITEMS:
        script = importlib.import_module(Path(item.script).stem)
        for tiny in (False, True):
            words = module.command_of(item, tiny, "out")[2:]
            sides.parse(
                script._parser(), [*words, "--out", "record.json"]
            )  # ends the test at an unknown flag
        assert names.index(item.measured or names[0]) <= names.index(item.name)


def test_memory_of_a_side_that_shared_the_device_is_its_programs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks/device")
    items = importlib.import_module("device_items")
    sizes = {
        "argument_bytes": 10,
        "temp_bytes": 5,
        "output_bytes": 10,
        "alias_bytes": 9,
    }
    side = sizes | {"device_peak_bytes": 40, "alone": False}
    assert items.taken_bytes(side) == 16
    assert items.taken_bytes(side | {"alone": True}) == 40
    assert items.taken_bytes(sizes | {"device_peak_bytes": None, "alone": True}) == 16


def test_results_of_timed_calls_are_let_go(monkeypatch):
    """Else the copy of 4 GiB would need hundreds of them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/device")
    items, alive, most = importlib.import_module("device_items"), set(), []

    class Result:
        def __init__(self) -> None:
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    def timed(call):
        call()
        return SimpleNamespace(wall_s=1e-4)

    monkeypatch.setattr(items.measuring, "timed", timed)
    items._seconds(Result, at_least_s=1e-3)
    assert len(most) == 1 + 1 + 5 * 10
    assert max(most) <= 2
