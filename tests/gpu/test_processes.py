"""Processes on a GPU: a device that hangs is ended by the watchdog, a preempted run
goes on bit for bit.
"""

import json
import signal
import time

import pytest

from jaxdist.config import EXIT_HANG, EXIT_PREEMPTED
from jaxdist.telemetry.metrics import read_events
from support.gpu import IS_GPU, run_python, start_train
from support.launches import parameters, same_bits
from support.runs import last_step, losses

pytestmark = pytest.mark.gpu

RUN = {
    "checkpoint__every_steps": 100_000,
    "optimizer__schedule": "constant",
    "optimizer__warmup_steps": 2,
}

# A step that never ends: the device waits for a call to the host, and the host for the
# device.
HANG = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxdist.config.groups.watchdog import WatchdogConfig
from jaxdist.operations.watch.watchdog import Watchdog

def the_culprit(x):
    if float(np.asarray(x)[0]) == 3.0:
        time.sleep(1000)
    return np.asarray(x)

@jax.jit
def step(x):
    x = jax.pure_callback(the_culprit, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return x + 1

x = jnp.zeros(8)
x = step(x).block_until_ready()
with Watchdog(WatchdogConfig(data_s=4, step_s=4, compile_s=60), Path(sys.argv[1]), enabled=True) as watch:
    for number in range(1, 8):
        watch.at("data", number, done=number - 1, sample=0)
        watch.at("step", number, done=number - 1, sample=0)
        x = step(x)
        x.block_until_ready()
print("done")
"""


def test_a_device_that_hangs_ends_with_76_and_is_described(tmp_path):
    done = run_python(HANG, str(tmp_path))
    assert done.returncode == EXIT_HANG, done.stderr[-2000:]
    assert "done" not in done.stdout
    (event,) = [e for e in read_events(tmp_path) if e["event"] == "hang"]
    assert event["phase"] == "step"
    assert event["at_step"] == 3
    assert "the_culprit" in event["stacks"]


def finished(workdir, code: int = 0, **changes) -> None:
    process = start_train(workdir, **(RUN | changes))
    log = workdir.parent / f"{workdir.name}.log"
    assert process.wait(400) == code, log.read_text()[-3000:]


def test_a_preempted_run_goes_on_bit_for_bit(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    process = start_train(cut, **(RUN | {"train__steps": 100_000}))
    until = time.monotonic() + 300
    while last_step(cut) < 3:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == EXIT_PREEMPTED
    (event,) = [e for e in read_events(cut) if e["event"] == "preempted"]
    assert (cut / "checkpoints" / str(event["step"])).is_dir()
    assert json.loads((cut / "run.json").read_text())["platform"] == (
        "gpu" if IS_GPU else "cpu"
    )
    steps = event["step"] + 4
    finished(cut, train__steps=steps)
    finished(whole, train__steps=steps)
    assert len(losses(whole)) == steps
    assert losses(cut) == losses(whole)
    assert same_bits(parameters(cut, steps), parameters(whole, steps))
