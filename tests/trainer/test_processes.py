"""Training by several processes: the same numbers as one process with the same
devices.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist.checkpoint.folders import list_steps
from jaxdist.parallel.mesh import resolve_mesh
from jaxdist.telemetry.metrics import MetricsWriter, read_events
from jaxdist.trainer import elastic, run_config, validation
from jaxdist.trainer.preemption import StopSignals
from support.runs import command, environment, last_step, losses, start_group, train

LAYOUT = {
    "train__steps": 6,
    "checkpoint__every_steps": 4,
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
}


def train_together(
    workdir: Path, processes: int, devices_each: int, **changes
) -> list[str]:
    """Runs one training in several processes; returns what each of them printed."""
    started = start_group(
        command(workdir, **changes), processes, devices_each, stderr=subprocess.STDOUT
    )
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(said)[-4000:]
    return said


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_as_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, devices=4, **LAYOUT)
    said = train_together(two, 2, 2, **LAYOUT)
    assert "process 0 of 2" in said[0]
    assert "step 6" in said[0]
    assert "step 6" not in said[1], "only the first process shows the run"
    reference = losses(one)
    assert len(reference) == 6
    for step, loss in losses(two).items():
        assert loss == pytest.approx(reference[step], rel=1e-6), step
    assert next(e for e in read_events(two) if e["event"] == "start")["processes"] == 2
    alone = LAYOUT | {"mesh__fsdp": 1, "mesh__tensor": 1}
    assert "finished at step 6" in train(two, devices=1, **alone).stdout


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step_when_the_time_is_over(tmp_path):
    changes = {**LAYOUT, "train__steps": 10**6, "train__max_minutes": 0.2}
    changes["checkpoint__every_steps"] = 0
    said = train_together(tmp_path, 2, 2, **changes)
    assert "the time limit is reached (train.max_minutes=0.2)" in said[0]
    (stop,) = [e for e in read_events(tmp_path) if e["event"] == "stop"]
    assert stop["reason"] == "the time limit is reached (train.max_minutes=0.2)"
    assert list_steps(tmp_path / "checkpoints")[-1] == stop["step"]


FAILS = """
import os, runpy, sys
from jaxdist.trainer import batching, workdir
def fail(*_): raise OSError(5, "Input/output error")
if os.environ["JAXDIST_PROCESS_ID"] == os.environ["FAILING"]:
    setattr(batching if os.environ["WHERE"] == "open_data" else workdir, os.environ["WHERE"], fail)
runpy.run_module("jaxdist.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (1, "open_checkpoints"),
        pytest.param(0, "open_checkpoints", marks=pytest.mark.slow),
        pytest.param(1, "open_data", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_one_process_before_the_first_step_ends_the_others(
    tmp_path, number, where, monkeypatch
):
    """They waited for it at the next agreement, until the coordination service missed
    it.
    """
    monkeypatch.setenv("FAILING", str(number))
    monkeypatch.setenv("WHERE", where)
    train_command = command(tmp_path / "run")
    train_command[1:3] = ["-c", FAILS]
    group = start_group(train_command, 2, 1, stderr=subprocess.STDOUT)
    said = [process.communicate(timeout=60)[0] for process in group]
    codes = [process.returncode for process in group]
    assert codes[number] == 1, said
    assert "OSError: [Errno 5] Input/output error" in said[number]
    told = (
        f"error: process {number}: OSError: [Errno 5] Input/output error (<string>:4)"
    )
    # jax's, as above
    assert told in said[1 - number] or (number == 0 and codes[1] == -signal.SIGABRT), (
        said
    )
    assert codes[1 - number] == 70 or (number == 0 and codes[1] == -signal.SIGABRT), (
        codes,
        said,
    )
    assert not read_events(tmp_path / "run")


@pytest.mark.parametrize(
    "phase", ["start", pytest.param("late", marks=pytest.mark.slow)]
)
def test_a_signal_before_the_first_step_ends_a_process_at_once(tmp_path, phase):
    first, second = start_group(
        command(tmp_path / "run"), 2, 1, stderr=subprocess.STDOUT
    )
    marker = "joined through" if phase == "start" else "data:"
    assert first.stdout is not None
    while marker not in first.stdout.readline():
        assert first.poll() is None
    began = time.monotonic()
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
    codes = [process.wait(60) for process in (first, second)]
    print(codes, time.monotonic() - began)
    # One that has not joined yet ends by the signal; one that has by jax's abort, as
    # the first has gone.
    assert codes[0] == 75, codes
    assert set(codes) <= {75, 70, -signal.SIGTERM, -signal.SIGABRT}, codes


def test_a_users_own_handler_is_called_and_put_back():
    heard = []
    own = signal.signal(signal.SIGTERM, lambda *_: heard.append("user"))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with StopSignals() as stop:
            assert not stop.finish_step()
            os.kill(os.getpid(), signal.SIGTERM)
            # a second kind of signal asks for the same
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.finish_step()
            assert stop.stopping
            assert heard == ["user"]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, own)


def test_a_handler_set_during_the_run_is_called_and_the_run_stops(capsys):
    heard = []
    with StopSignals() as stop:
        mine = lambda *given: (heard.append("user"), ours(*given))  # noqa: E731
        ours = signal.signal(signal.SIGTERM, mine)
        assert not stop.finish_step()
        assert not stop.finish_step()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.finish_step()
        assert heard == ["user"]
    assert (
        capsys.readouterr().err.count(
            "a handler of SIGTERM set during the run is called, too"
        )
        == 1
    )
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is mine


def test_a_signal_between_a_new_handler_and_the_next_step_is_heard():
    with StopSignals() as stop:
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        assert stop.finish_step()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_leaves_does_not_cost_the_steps():
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.finish_step()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.finish_step()
        os.kill(os.getpid(), signal.SIGINT)


CELL = """
import signal
import jaxdist
from pathlib import Path
from jaxdist.trainer import cli
_, config = cli.parse(cli.ConfigParser("test", None), FLAGS)
jaxdist.run(config, Path(WORKDIR))
"""
SHELLS = {
    "python -c": """
CELL = compile(CELL, "cell", "exec")
try:
    exec(CELL, {})
except Exception as error:
    found = error
""",
    "IPython": """
from IPython.core.interactiveshell import InteractiveShell
found = InteractiveShell.instance().run_cell(CELL).error_in_exec
""",
}
AGAIN = """
import signal
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("control is back:", type(found).__name__, found, flush=True)
exec(CELL, {})
"""


PACES = """
import os, signal, time
import jax
from jaxdist.distributed import coordination, initialize
from jaxdist.trainer.preemption import StopSignals
initialize.join_processes()
me = jax.process_index()
steps = 0
with StopSignals() as stop:
    while not stop.finish_step():
        steps += 1
        time.sleep(0.004 * (1 + 3 * me))
        if me == 1 and steps == 20:
            os.kill(os.getpid(), signal.SIGTERM)
    coordination.barrier()  # as a run's last save: nobody leaves before all have heard
print("steps:", me, steps)
"""


def test_processes_stop_at_the_same_step_whatever_their_pace():
    launch = [sys.executable, "-m", "jaxdist.launch", "--processes", "3"]
    script = ["--devices-per-process", "1", "--", sys.executable, "-c", PACES]
    done = subprocess.run(
        [*launch, *script],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.partition("steps: ")[2] for line in done.stdout.splitlines()]
    counts = dict(line.split() for line in said if line)
    assert counts.keys() == {"0", "1", "2"}, done.stdout
    assert len(set(counts.values())) == 1, counts
    assert int(counts["1"]) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell", [pytest.param("python -c", marks=pytest.mark.slow), "IPython"]
)
def test_an_interrupt_in_a_notebook_saves_and_gives_control_back(tmp_path, shell):
    if shell == "IPython":
        pytest.importorskip("IPython")
    workdir = tmp_path / "run"
    settings = {
        "checkpoint__every_steps": 0,
        "checkpoint__save_at_end": False,
        "train__steps": 150,
        "model__dropout": 0.0,  # it compiles in less time
    }
    _, _, _, config, name, _, _, *rest = command(workdir, **settings)
    cell = CELL.replace("FLAGS", repr([config, name, *rest])).replace(
        "WORKDIR", repr(str(workdir))
    )
    code = f"CELL = {cell!r}\n{SHELLS[shell]}{AGAIN}"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(1),
        stdout=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and last_step(workdir) < 10:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    (step,) = [
        event["step"] for event in read_events(workdir) if event["event"] == "preempted"
    ]
    assert (
        f"control is back: Interrupted stopped after step {step}, saved; run again"
        in said
    )
    assert list_steps(workdir / "checkpoints") == [step]
    assert 10 <= step < 150
    assert f"resumed after step {step}" in said
    assert last_step(workdir) == 150


@pytest.mark.slow
def test_a_preempted_script_ends_with_75(tmp_path):
    workdir = tmp_path / "run"
    _, _, _, config, name, _, _, *rest = command(workdir, train__steps=100_000)
    cell = CELL.replace("FLAGS", repr([config, name, *rest])).replace(
        "WORKDIR", repr(str(workdir))
    )
    process = subprocess.Popen([sys.executable, "-c", cell], env=environment(1))
    while process.poll() is None and last_step(workdir) < 10:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    assert list_steps(workdir / "checkpoints")[-1] == last_step(workdir)


# --- another number of devices --------------------------------------------------------


def elastic_run(**settings):
    config = run_config.default_config()
    config.update_from_flattened_dict({"batch.global_size": 24} | settings)
    return run_config.from_config(config)


def test_fewer_devices_share_out_experts_evenly():
    run = elastic_run(
        **{"model.num_experts": 8, "mesh.expert": 4, "mesh.fsdp": 2, "mesh.zero": 1}
    )
    found = {n: elastic.refit(run, devices=n, full_devices=8) for n in (4, 3, 6, 1)}
    sizes = {
        n: (r.mesh.data, r.mesh.fsdp, r.mesh.expert, r.mesh.zero)
        for n, r in found.items()
    }
    assert sizes == {4: (1, 1, 4, 1), 3: (3, 1, 1, 3), 6: (3, 1, 2, 1), 1: (1, 1, 1, 3)}
    for devices, smaller in found.items():
        validation.validate_on(smaller, devices)  # a legal config
    assert {
        run_config.run_fingerprint(smaller) for smaller in (run, *found.values())
    } == {run_config.run_fingerprint(run)}


def test_an_elastic_run_is_refitted_and_any_other_is_left_alone():
    run = elastic_run(**{"mesh.fsdp": 4, "mesh.zero": 2})
    assert elastic.refit(run, devices=3, full_devices=None) is run
    assert elastic.refit(run, devices=8, full_devices=8) is run
    smaller = elastic.refit(run, devices=4, full_devices=8)
    assert (smaller.mesh.data, smaller.mesh.fsdp, smaller.mesh.zero) == (1, 4, 2)
    assert smaller.batch.accumulation == 2
    assert smaller.batch.global_size == 24
    three = elastic.refit(run, devices=3, full_devices=8)
    assert (
        three.mesh.data,
        three.mesh.fsdp,
        three.mesh.zero,
        three.batch.accumulation,
    ) == (3, 1, 3, 4)
    for found, devices in ((smaller, 4), (three, 3)):
        assert resolve_mesh(found.mesh, devices).batch_shards == devices
    assert run_config.run_fingerprint(smaller) == run_config.run_fingerprint(run)
    # 24 is no multiple of 7: refused later
    assert elastic.refit(run, devices=7, full_devices=8) is run
    nothing = elastic_run(**{"batch.global_size": 0})
    # refused later, too
    assert elastic.refit(nothing, devices=4, full_devices=8) is nothing


def test_what_an_elastic_run_was_written_for(tmp_path):
    assert elastic.full_devices({}, tmp_path, per_process=2) is None
    assert (
        elastic.full_devices({elastic.FULL_PROCESSES: "4"}, tmp_path, per_process=2)
        == 8
    )
    by_scheduler = {elastic.FULL_PROCESSES: "0"}
    # the first start
    assert elastic.full_devices(by_scheduler, tmp_path, per_process=2) is None
    assert elastic.resized(tmp_path, elastic_run(), 16) is None
    writer = MetricsWriter(tmp_path)
    for devices in (16, 8):
        writer.event("start", 0, devices=devices, processes=1)
    writer.close()
    assert elastic.full_devices(by_scheduler, tmp_path, per_process=2) == 16
    assert elastic.resized(tmp_path, elastic_run(), 8) is None
    found = elastic.resized(tmp_path, elastic_run(**{"mesh.fsdp": 2}), 4)
    assert found == {
        "devices_before": 8,
        "devices": 4,
        "mesh": {"data": -1, "fsdp": 2},
        "accumulation": 1,
    }
