"""`remat.policy=fit`: what blocks of a run keep, so that its step fits its devices with
the least recomputation; and what a run that goes on does with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from jaxdist.config import ConfigError
from jaxdist.distributed import coordination
from jaxdist.parallel.remat import FIT, RematConfig
from jaxdist.planner import targets
from jaxdist.planner.policies import Policies
from jaxdist.planner.remat_search import fit, overrides
from jaxdist.planner.targets import validate_for
from jaxdist.telemetry.units import time_text
from jaxdist.trainer import compose, elastic, workdir
from jaxdist.trainer.run_config import RunConfig

Say = Callable[[str], None]


def resolve(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    folder: Path | None = None,
    full_devices: int | None = None,
    say: Say = print,
) -> RunConfig:
    """Returns a run whose policy `fit` is resolved for its devices; each process makes
    the call.

    A run that goes on keeps the policy that it had. On other devices, or in another
    layout, it does so if that still fits by arithmetic; else one is found anew.

    Args:
      folder: of the run; None: it has none.
      full_devices: see `trainer.train`.

    Raises:
      ConfigError: nothing fits, or nothing is known of the devices.
    """
    chosen: RematConfig | None = None
    with coordination.raise_on_all():
        if jax.process_index() == 0:
            refitted = elastic.refit(
                run, devices=len(devices), full_devices=full_devices
            )
            chosen = _resolve(refitted, devices, _before(run, folder), say)
    return replace(
        run, remat=RematConfig(**coordination.broadcast(chosen and asdict(chosen)))
    )


def _before(run: RunConfig, folder: Path | None) -> RematConfig | None:
    """Returns what was resolved for the run before: its own, or that of the run in its
    folder.
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
    run: RunConfig, devices: Sequence[jax.Device], before: RematConfig | None, say: Say
) -> RematConfig:
    try:
        target = targets.parse("here", devices)
    except ConfigError:
        if before:
            return replace(before, fitted="")
        raise ConfigError(
            f"remat.policy=fit: nothing is known of compiling for {devices[0].device_kind}; set remat.policy "
            f"to dots, or to full if that is too large"
        ) from None
    full = compose.with_overrides(run, {"remat": RematConfig("full")})
    shape = validate_for(full, target).shape
    where = f"{target.text}, {shape}, accumulation {run.batch.accumulation}"
    if before:
        plain = replace(before, fitted="")
        own, _, place = before.fitted.partition(" for ")
        if own != str(plain):  # changed by hand since
            return plain
        if place == where:
            say(f"remat: {plain}, as it was resolved for {place}")
            return before
        if Policies(run, target, _limit(devices)).fits(plain):
            say(
                f"remat: {plain}, resolved for {place}, fits {where} by arithmetic: kept"
            )
            return replace(plain, fitted=f"{plain} for {where}")
        say(
            f"remat: {plain}, resolved for {place}, does not fit {where} by arithmetic: resolved anew"
        )
    found = fit(run, target, limit_bytes=_limit(devices), say=say)
    say(
        f"remat.policy=fit: {' '.join(overrides(found.run.remat))} ({time_text(found.seconds)} a step)"
    )
    return replace(found.run.remat, fitted=f"{found.run.remat} for {where}")


def _limit(devices: Sequence[jax.Device]) -> int | None:
    """Returns what a step may use of each device, as the devices say; None where they
    do not.
    """
    local = [
        device for device in devices if device.process_index == jax.process_index()
    ]
    known = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    return min(filter(None, known), default=None)
