"""The run in a workdir, for a plan: its current layout, and its hardware."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.distributed import initialize
from jaxdist.hardware import chips
from jaxdist.parallel.axes import AXES
from jaxdist.planner import targets
from jaxdist.planner.targets import Target
from jaxdist.storage import untrusted
from jaxdist.trainer import reproduce, workdir
from jaxdist.trainer.run_config import RunConfig, from_config
from jaxdist.trainer.run_layout import layout_of_run


def as_it_runs(
    run: RunConfig, config: str, folder: Path | None, on: str | None
) -> tuple[RunConfig, Target]:
    """Finds the layout and the hardware to plan a run with.

    For the run in a workdir, these are the layout and the hardware of its last start.

    Args:
      run: the config.
      config: the name or file of the config.
      folder: the workdir; None if there is none.
      on: the target's text; None for the hardware of the workdir's run, or else this
        machine.
    """
    info: Mapping[str, Any] = {}
    if folder is not None and Path(config) == folder / workdir.CONFIG:
        info = read_info(folder)
    if folder is None or not info:
        return run, _target(on or "here")
    target = _target(on or target_text(folder, info))
    if target.num_devices == info.get("num_devices"):
        run = with_layout(run, folder, info)
    return run, target


def _target(text: str) -> Target:
    """Parses a target; accelerators are opened only for `here`."""
    if text.partition("@")[0].strip().lower() == "here":
        initialize.skip_absent_tpu(os.environ)
        return targets.parse(text, jax.devices())
    leave_accelerators_alone()
    return targets.parse(text)


def leave_accelerators_alone() -> None:
    """Keeps this process from opening this machine's accelerators."""
    jax.config.update("jax_platforms", "cpu")


def read_info(folder: Path) -> dict[str, Any]:
    """Reads the run.json of a folder; {} if there is none.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        return untrusted.read_json(folder / workdir.RUN, dict)
    except FileNotFoundError:
        return {}
    except (OSError, untrusted.Malformed) as error:
        raise ConfigError(
            f"{folder / workdir.RUN}: {untrusted.named(error)}; name the hardware with --on"
        ) from error


def target_text(folder: Path, info: Mapping[str, Any]) -> str:
    """Finds the target that a run.json describes, such as `v5p:4x4x4` or `cpu:8`.

    Args:
      folder: the run's folder, for messages.
      info: the content of run.json.

    Raises:
      ConfigError: it describes no target.
    """
    kind = info.get("device_kind")
    count = info.get("num_devices")
    platform = chips.platform_of(str(info.get("platform")))
    chip = chips.chip_for(kind) if isinstance(kind, str) else None
    fix = "name the hardware with --on"
    if type(count) is not int or not 0 < count < 2**20:
        raise ConfigError(
            f"{folder / workdir.RUN} does not say how many devices the run has; {fix}"
        )
    if platform == "cpu":
        return f"cpu:{count}"
    if chip is None or not chip.family:
        raise ConfigError(
            f"the run is on {kind!s:.60}, for which the planner cannot compile; {fix}"
        )
    if not chip.torus_dims:
        machines = 1
        hosts = info.get(reproduce.HOSTS)
        if isinstance(hosts, list) and hosts:
            machines = len(set(map(str, hosts)))
        if count % machines:
            raise ConfigError(
                f"run.json has {count} devices on {machines} machines, unevenly; {fix}"
            )
        return f"{chip.family}:{machines}x{count // machines}"
    sizes = _slices(info, count // chip.devices_per_chip, fix)
    return f"{chip.family}:{'x'.join(map(str, sizes))}"


def _slices(info: Mapping[str, Any], number: int, fix: str) -> Sequence[int]:
    """Reads the sizes of a run's TPU slices, and their number.

    Args:
      info: the content of run.json.
      number: number of chips of the run.
      fix: the end of the message if the topology is not legal.
    """
    topology = info.get(reproduce.TOPOLOGY)
    sizes: list[Any] = []
    if isinstance(topology, dict) and isinstance(topology.get("shape"), list):
        sizes = [*topology["shape"], topology.get("slices")]
    is_whole = all(type(n) is int and n > 0 for n in sizes)
    if not sizes or not is_whole or math.prod(sizes) != number:
        raise ConfigError(
            f"run.json joins {number} chips as {topology!s:.60}, which is impossible; {fix}"
        )
    return sizes


def with_layout(run: RunConfig, folder: Path, info: Mapping[str, Any]) -> RunConfig:
    """Applies the layout of a run's last start, which an elastic start may have changed.

    If the command line sets another mesh than the run's config, that stays.

    Args:
      run: the config with the command line's overrides.
      folder: the run's folder.
      info: the content of run.json.

    Raises:
      ConfigError: the folder describes no legal layout.
    """
    stored = workdir.read_config(folder, named=run.model["target"], trust_code=None)
    if (stored.mesh, stored.batch.accumulation) != (run.mesh, run.batch.accumulation):
        return run
    flat = schema.flatten(schema.to_config_dict(stored))
    layout = layout_of_run(flat, info)
    overrides: dict[str, object] = {
        f"mesh.{axis}": layout.mesh[axis] for axis in AXES if axis in layout.mesh
    }
    overrides["mesh.zero"] = layout.zero
    overrides["batch.accumulation"] = layout.accumulation
    # from_config checks the values from run.json.
    return from_config(schema.flatten(schema.to_config_dict(run)) | overrides)
