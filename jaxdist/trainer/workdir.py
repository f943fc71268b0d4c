"""The folder of a run: its lock, its config, and what may change on resume."""

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jaxdist
from jaxdist.checkpoint.files import CheckpointError, as_path, has_steps
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, is_text, schema
from jaxdist.data import Dataset
from jaxdist.hardware import chips
from jaxdist.models import lora, registry
from jaxdist.optim.roles import role_of
from jaxdist.parallel import execution
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.gradients import build_objective
from jaxdist.step.train_step import TrainStep
from jaxdist.storage import atomic, lock
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.telemetry.metrics import Throughput
from jaxdist.trainer import config_json
from jaxdist.trainer.build import batch_shapes, placements, targets_per_sample
from jaxdist.trainer.run_config import RunConfig, harmless_on_resume, run_fingerprint

CONFIG, RUN, LOCK = "config.json", "run.json", ".lock"
SAMPLE, REPORT = "sample.txt", "report.html"
CHECKPOINTS = "checkpoints"
CONFIG_KEY = "config"  # in a checkpoint's metadata: the run's whole config


def checkpoints_folder(folder: Path, config: RunConfig) -> Path:
    """Returns where the checkpoints of the run in `folder` are.

    Raises:
      ConfigError: the name cannot be a folder of checkpoints.
    """
    chosen = config.checkpoint.folder
    if fault := name_fault(chosen or folder):
        raise ConfigError(fault)
    return as_path(chosen) if chosen else folder / CHECKPOINTS


def name_fault(folder: Path | str) -> str:
    """Returns what is wrong with the name of a folder for checkpoints; "" if nothing is."""
    whole = str(folder) if "://" in str(folder) else os.path.abspath(folder)
    if is_text(whole):
        return ""
    return f"{whole!r}: not UTF-8, so that the checkpoint library cannot write there; give another folder"


def open_checkpoints(folder: Path, config: RunConfig) -> CheckpointManager:
    """Returns the store of the run in `folder`, to write.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        return CheckpointManager(checkpoints_folder(folder, config), config.checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"{error}; give a --workdir or checkpoint.folder that can") from error


@contextlib.contextmanager
def workdir_lock(folder: Path) -> Iterator[None]:
    """Creates the folder and holds its lock: one live run per workdir.

    Raises:
      ConfigError: it cannot be written, or another process holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.exclusive(folder / LOCK))
        except lock.Locked as holder:
            raise ConfigError(
                f"--workdir {folder}: in use by {holder}; stop it or give another --workdir"
            ) from None
        except OSError as error:
            links = [path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()]
            why = f"{links[0]} is a symbolic link to nowhere" if links else error.strerror
            raise ConfigError(
                f"--workdir {folder}: cannot be written ({why}); give a folder that can"
            ) from error
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        atomic.write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free the disk, or give another --workdir"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def check_resume_config(folder: Path, run: RunConfig) -> None:
    """Writes config.json; for a run that goes on, refuses changes that would alter its losses.

    Raises:
      ConfigError: one line per such change.
    """
    new, faults = schema.to_config_dict(run), []
    if (folder / CONFIG).exists():
        old = read_config(folder, named=run.model["target"], trust_code=None)
        checkpoints = checkpoints_folder(folder, run)
        if has_steps(checkpoints):
            faults = [
                f"{change.path}: the run in {folder} has {change.old!r}, now {change.new!r}; "
                f"put it back, or start a new run with another --workdir"
                for change in schema.diff(schema.to_config_dict(old), new)
                if not any(fnmatch(change.path, pattern) for pattern in harmless_on_resume(run))
            ]
        elif has_steps(before := checkpoints_folder(folder, old)):
            faults = [
                f"checkpoint.folder: the run in {folder} has its checkpoints in {before}, and {checkpoints} "
                f"has none; put it back, copy them, or start a new run with another --workdir"
            ]
    if faults:
        raise ConfigError(faults)
    write_json(folder / CONFIG, new.to_dict())


def stored_config(run: RunConfig) -> dict[str, Any]:
    """Returns what a checkpoint's metadata says of its run's config: all of it, as config.json does."""
    return {CONFIG_KEY: schema.to_config_dict(run).to_dict()}


def check_data(metadata: Mapping[str, Any], dataset: Dataset) -> None:
    """Raises ConfigError if the run was trained on other data: its position means nothing here."""
    known = metadata["fingerprints"]["data"]
    if known != dataset.fingerprint:
        raise ConfigError(
            f"the data has changed: the run has read {known}, {dataset.name} is {dataset.fingerprint} now; "
            f"put the corpus and its settings back, or start anew with another --workdir"
        )


def read_config(folder: Path, *, named: str | None = None, trust_code: bool | None = False) -> RunConfig:
    """Returns the config that a run was started with.

    Args: as `registry.check_stored_target`.

    Raises:
      ConfigError: the folder holds no run, what is no config, or a model whose code is not trusted.
    """
    stored = config_json.read(folder / CONFIG)
    return config_json.resolve(stored, folder, named=named, trust_code=trust_code)


# --- run.json -------------------------------------------------------------------------------------


def describe_run(run: RunConfig, spec: ModelSpec, built: TrainStep, dataset: Dataset) -> dict[str, Any]:
    """Returns what run.json says: versions, devices, mesh, fingerprints, sizes, shardings."""
    devices = built.mesh.devices
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
        | {"jaxdist": jaxdist.__version__, "python": platform.python_version()},
        "platform": devices.flat[0].platform,
        "device_kind": devices.flat[0].device_kind,
        "num_devices": devices.size,
        "num_processes": jax.process_count(),
        "mesh": dict(built.rules.shape.sizes),
        "fingerprints": {"config": run_fingerprint(run), "data": dataset.fingerprint},
        "parameters": spec.parameter_count,
        "flops_per_token": model_flops(run, spec),
        "sharding": [
            {
                "parameter": placed.path,
                "dims": list(placed.dims),
                "names": list(placed.names),
                "stored": str(placed.stored),
                "state": str(placed.state),
                "per_device": list(placed.shard_dims),
                "bytes": placed.shard_bytes,
                "copies": placed.replicated_bytes,
                "why": placed.why,
            }
            for placed in placements(run, spec, built.rules)
        ],
    }


def model_flops(run: RunConfig, spec: ModelSpec) -> dict[str, float]:
    """Returns model FLOPs per target (forward and backward) by both attention conventions.

    By the formula of the model's Config, where it has one; a frozen kernel has no gradient of its own, so
    it takes two thirds. Another model's are counted from its forward program, times three; there both
    conventions are what the program does, and all counts as trained.
    """
    length = targets_per_sample(run)
    if formula := registry.model_hook(run.model_config, "flops_per_token"):
        less = _frozen_flops(run, spec)
        return {convention: formula(length, convention) - less for convention in ("causal", "full")}
    batch = batch_shapes(run, 1)
    objective = build_objective(spec, compute=run.precision.compute, remat="none")
    forward = jax.make_jaxpr(lambda t, m, f, b: objective(t, m, f, b, None)[0])
    with execution.activate(compute=run.precision.compute):
        program = forward(spec.trainable, spec.model_state, spec.frozen, batch)
    counted = 3 * jaxpr_flops(program) / length
    return {"causal": counted, "full": counted}


def _frozen_flops(run: RunConfig, spec: ModelSpec) -> float:
    """Returns the FLOPs per token of gradients that frozen kernels don't have, less what adapters take."""
    less = 0.0
    for path, count in lora.weights(spec.frozen, run.lora).items():
        x, names = spec.named_frozen()[path]
        kind = role_of(path.split("/"), x.shape, names).kind
        tied = bool(run.model.get("tie_embeddings"))
        scores = kind == "embedding" and names[:1] == ("vocab",) and tied
        less += 2 * count * (kind in ("matrix", "head") or scores)
    return less - 6 * spec.trainable_count * bool(run.lora.rank)


def throughput(run: RunConfig, spec: ModelSpec, mesh: Mesh) -> Throughput:
    """Returns the meter that turns times into tokens/s and MFU; MFU is None on unknown chips."""
    chip = chips.chip_for(mesh.devices.flat[0].device_kind)
    flops = model_flops(run, spec)
    return Throughput(
        num_devices=mesh.devices.size,
        peak_flops_per_s=chip.peak(run.precision.compute) if chip else None,
        causal_flops_per_token=flops["causal"],
        full_flops_per_token=flops["full"],
    )
