"""Runs of `jaxdist train` for tests: as processes, killed, refused; and what they
leave.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist import every, library
from jaxdist import train as train_command
from jaxdist.checkpoint.folders import read_step
from jaxdist.checkpoint.orbax_backend import OrbaxBackend
from jaxdist.config import files
from jaxdist.distributed.local_devices import free_port
from jaxdist.telemetry import device_memory
from jaxdist.telemetry.metrics import MetricRows, read_rows
from jaxdist.trainer import exit_code, run_config
from jaxdist.trainer.run_config import RunConfig
from support.paths import CONFIGS

# the smallest decoder, for runs that must only run
SMALL_MODEL = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
}
TINY = {
    "train.steps": 60,
    "train.max_minutes": 0,
    "train.eval_every": 0,
    "train.log_every": 1,
    # quickstart writes 400, which takes longer than these runs
    "train.sample_tokens": 0,
    "batch.sequence_length": 32,
    "batch.global_size": 8,
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.d_ff": 64,
    "model.head_dim": 8,
    "model.dropout": 0.1,
    "optimizer.warmup_steps": 5,
    "checkpoint.every_steps": 7,
    "checkpoint.keep_last": 3,
}


def run_of(name: str, **changes) -> RunConfig:
    """Returns a shipped config with values changed."""
    config = files.load(name, folders=[CONFIGS])
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    return run_config.from_config(config)


def command(workdir: Path, **changes) -> list[str]:
    settings = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    flags = [f"--config.{key}={_flag_text(value)}" for key, value in settings.items()]
    train = [sys.executable, "-m", "jaxdist.train", "--config", "quickstart"]
    return [*train, "--workdir", str(workdir), *flags]


def _flag_text(value: object) -> str:
    """Writes a value as flags have it: true and false are not Python's."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def environment(devices: int) -> dict[str, str]:
    """Returns that of a process with so many emulated devices, and this one's compiler
    (conftest.py).
    """
    kept = [
        flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag
    ]
    flags = [*kept, f"--xla_force_host_platform_device_count={devices}"]
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


def start_group(
    command: list[str], processes: int, devices_each: int, *, stderr: int | None = None
) -> list[subprocess.Popen]:
    """Starts a command in several processes of one group, as `launch` does."""
    group = {
        "JAXDIST_COORDINATOR": f"127.0.0.1:{free_port()}",
        "JAXDIST_NUM_PROCESSES": str(processes),
    }
    return [
        subprocess.Popen(
            command,
            env=environment(devices_each) | group | {"JAXDIST_PROCESS_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        for rank in range(processes)
    ]


def train(workdir: Path, devices: int = 1, **changes) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command(workdir, **changes),
        env=environment(devices),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def train_here(workdir: Path, **changes) -> int:
    """Trains on all devices of this process, without the seconds that a new one needs.

    Returns:
      The exit code.
    """
    arguments = command(workdir, **changes)[3:]  # without python -m jaxdist.train
    return exit_code.exit_code(lambda: train_command.main(arguments))


@contextlib.contextmanager
def stopping_after(step: int) -> Iterator[None]:
    """Lets runs of this process stop after a step, saved and to be resumed.

    A run that were given fewer steps would have another program: they are a constant of
    it.
    """
    honest = library.run_callbacks

    def run_callbacks(*run: object) -> list:
        stop = every(step, lambda view: view.stop("far enough"))
        return [*honest(*run), stop]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run_callbacks", run_callbacks)
        yield


def train_and_kill(workdir: Path, after_step: int, devices: int = 1, **changes) -> None:
    """Starts a run and kills it -9 as soon as its metrics show the step."""
    process = subprocess.Popen(
        command(workdir, **changes),
        env=environment(devices),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and last_step(workdir) < after_step:
        time.sleep(0.002)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()


def last_step(workdir: Path) -> int:
    metrics = workdir / "metrics.jsonl"
    return (
        max((row["step"] for row in read_rows(metrics).train), default=0)
        if metrics.exists()
        else 0
    )


def losses(workdir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_rows(workdir).train}


TIMES = {
    "time",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "data_wait_s",
    "goodput",
    "hfu",
    *device_memory.FIELDS,
    "slowest_process",
    "slowest_busy_s",
    "median_busy_s",
}


def untimed(rows: MetricRows) -> list[dict]:
    """Returns the rows without what a clock has measured: two equal runs have these
    equal, bit for bit.
    """
    every = [*rows.train, *rows.evaluation]
    return [{name: x for name, x in row.items() if name not in TIMES} for row in every]


def every_loss(workdir: Path) -> dict[int, set[float]]:
    """Returns all losses written for a step: those of steps done twice, too."""
    found: dict[int, set[float]] = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" in row:  # not an evaluation's
            found.setdefault(row["step"], set()).add(row["loss"])
    return found


def final_arrays(
    workdir: Path, step: int = TINY["train.steps"]
) -> dict[str, np.ndarray]:
    folder = workdir / "checkpoints"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=here)
        for name, info in read_step(folder, step).arrays.items()
    }
    backend = OrbaxBackend(timeout_s=60)
    found = backend.read(folder / str(step), abstract)
    backend.close()
    return jax.device_get(found)


def overrides(*settings: str) -> list[str]:
    return [f"--config.{setting}" for setting in settings]


def refused(capsys, *arguments: str) -> list[str]:
    """Returns the faults that `train` prints when it refuses; asserts exit code 78."""
    assert exit_code.exit_code(lambda: train_command.main(list(arguments))) == 78
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]
