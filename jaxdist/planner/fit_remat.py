"""`remat.policy=fit`: the policy with least recomputation that fits a run's devices.

A resumed run keeps its policy if that still fits.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.parallel.remat import FIT, RematConfig
from jaxdist.planner import targets
from jaxdist.planner.compiler import Say
from jaxdist.planner.on_target import validate_for
from jaxdist.planner.policies import Policies
from jaxdist.planner.remat_search import fit, overrides
from jaxdist.telemetry.units import time_text
from jaxdist.trainer import compose, elastic, workdir
from jaxdist.trainer.run_config import RunConfig


def resolve(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    folder: Path | None = None,
    full_devices: int | None = None,
    say: Say = print,
) -> RunConfig:
    """Resolves the policy `fit` of a run for its devices.

    Every process must call it. A resumed run keeps its policy. On other devices or in
    another layout, it keeps the policy if that fits by arithmetic; otherwise a new one
    is found.

    Args:
      run: the config.
      devices: the devices of the run.
      folder: the run's folder; None if it has none.
      full_devices: see `training.train`.
      say: called with each stage of the work.

    Raises:
      ConfigError: nothing fits, or the planner does not know the devices.
    """
    chosen: RematConfig | None = None
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            refitted = elastic.refit(
                run, devices=len(devices), full_devices=full_devices
            )
            previous = _previous_policy(run, folder)
            chosen = _resolve(refitted, devices, previous, say)
    values = coordination.broadcast(chosen and asdict(chosen))
    return replace(run, remat=RematConfig(**values))


def _previous_policy(run: RunConfig, folder: Path | None) -> RematConfig | None:
    """Finds the resolved policy of the run or of the run in its folder; None if none.

    A policy that is not `fit` was resolved, or set by hand.
    """
    if run.remat.policy != FIT:
        return run.remat
    if folder is None or not (folder / workdir.CONFIG).is_file():
        return None
    stored = workdir.read_config(
        folder, named=run.model["target"], trust_code=None
    ).remat
    return stored if stored.fitted else None


def _resolve(
    run: RunConfig,
    devices: Sequence[jax.Device],
    previous: RematConfig | None,
    say: Say,
) -> RematConfig:
    """Chooses the policy of a run: the previous one if it fits, or else a new one.

    The field `fitted` of the result records the policy and the layout that it was
    resolved for.
    """
    try:
        target = targets.parse("here", devices)
    except ConfigError:
        if previous:
            return replace(previous, fitted="")
        raise ConfigError(
            f"remat.policy=fit: the planner cannot compile for {devices[0].device_kind}; set remat.policy "
            f"to dots, or to full if that is too large"
        ) from None
    full = compose.with_overrides(run, {"remat": RematConfig("full")})
    shape = validate_for(full, target).shape
    layout = f"{target.text}, {shape}, accumulation {run.batch.accumulation}"
    if previous:
        policy = replace(previous, fitted="")
        fitted_policy, _, fitted_layout = previous.fitted.partition(" for ")
        if fitted_policy != str(policy):  # it was changed by hand
            return policy
        if fitted_layout == layout:
            say(f"remat: {policy}, as it was resolved for {fitted_layout}")
            return previous
        if Policies(run, target, _limit(devices)).fits(policy):
            say(
                f"remat: {policy}, resolved for {fitted_layout}, fits {layout} by arithmetic: kept"
            )
            return replace(policy, fitted=f"{policy} for {layout}")
        say(
            f"remat: {policy}, resolved for {fitted_layout}, does not fit {layout} by arithmetic: resolved again"
        )
    found = fit(run, target, limit_bytes=_limit(devices), say=say)
    say(
        f"remat.policy=fit: {' '.join(overrides(found.run.remat))} ({time_text(found.seconds)} a step)"
    )
    return replace(found.run.remat, fitted=f"{found.run.remat} for {layout}")


def _limit(devices: Sequence[jax.Device]) -> int | None:
    """Reads the smallest memory limit of this process's devices; None if unknown."""
    limits = []
    for device in devices:
        if device.process_index == jax.process_index():
            limits.append((device.memory_stats() or {}).get("bytes_limit"))
    return min(filter(None, limits), default=None)
