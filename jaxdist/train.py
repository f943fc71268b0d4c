"""Trains the run of a config, or resumes the run that the workdir holds."""

from jaxdist.distributed import stop_signals

if __name__ == "__main__":
    stop_signals.leave_at_signals()  # the imports below take seconds

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    # Imports leave little garbage, and collecting it takes a tenth of the start.
    gc.disable()

import jax

from jaxdist import interop, library
from jaxdist.config import EXIT_PREEMPTED, ConfigError, extras
from jaxdist.config.redact import without_secrets
from jaxdist.data import SourceError
from jaxdist.distributed import coordination, initialize
from jaxdist.operations.callbacks import Ledger, Watchdog, command_age_s
from jaxdist.parallel.remat import FIT
from jaxdist.telemetry import clock
from jaxdist.telemetry.display import lively, print_safe
from jaxdist.trainer import cli, elastic, exit_code
from jaxdist.trainer.loop import TrainingStopped
from jaxdist.trainer.preemption import Interrupted, own_process
from jaxdist.trainer.run_config import RunConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    flags, config = cli.parse(
        _parser(), arguments, weight_sources=interop.WEIGHT_SOURCES
    )
    if flags.dry_run:
        _dry_run(config)
        return 0
    folder = cli.workdir_of(flags)
    ledger = Ledger(age_s=command_age_s())
    watchdog = Watchdog(config.watchdog, folder)
    try:
        # The watchdog starts first: joining processes and finding devices may hang.
        with ledger, watchdog:
            with clock.timed(clock.JOIN):
                _join()
                devices = jax.local_device_count()
            full_devices = coordination.broadcast(
                elastic.full_devices(os.environ, folder, per_process=devices)
            )
            config = _resolve_remat(
                config,
                say=lively(print_safe, watchdog.on_progress),
                folder=folder,
                full_devices=full_devices,
            )
            library.run(
                config,
                folder,
                entered=(ledger, watchdog),
                title=flags.config,
                full_devices=full_devices,
            )
    except Interrupted as interrupted:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(interrupted)
        return EXIT_PREEMPTED
    except (TrainingStopped, SourceError) as error:
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        planner = extras.load("jaxdist.planner.plan")
        explanation = planner.explain_shortage(config, jax.devices(), str(error))
        print(f"error: {explanation}", file=sys.stderr)
        return 1
    return 0


def _dry_run(config: RunConfig) -> None:
    """Prints the batch, shardings and memory of a run; nothing runs."""
    # A run that trains does not import the planner.
    dry_run = extras.load("jaxdist.planner.dry_run")
    _join()
    emulated = dry_run.missing_devices(config.mesh, os.environ)
    if emulated:
        jax.config.update("jax_num_cpu_devices", emulated)
    report = dry_run.dry_run(_resolve_remat(config), jax.devices())
    if report.refusal:
        raise ConfigError(report.refusal)


def _resolve_remat(
    config: RunConfig, say: Callable[[str], None] = print_safe, **options: Any
) -> RunConfig:
    """Replaces `remat.policy=fit` by a policy that fits the devices.

    A run that resumes keeps its policy while that fits. Other policies stay.
    """
    if config.remat.policy != FIT and not config.remat.fitted:
        return config
    fit_remat = extras.load("jaxdist.planner.fit_remat")
    resolved: RunConfig = fit_remat.resolve(config, jax.devices(), say=say, **options)
    return resolved


def _join() -> None:
    """Sets the platform's flags, joins the process group and prints both."""
    lines = initialize.prepare()
    if lines:
        print(lines)


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("train", __doc__)
    parser.add_argument("--workdir", help="folder of the run (default: runs/NAME)")
    parser.add_argument(
        "--dry-run", action="store_true", help="batch, shardings, memory; no run"
    )
    return parser


if __name__ == "__main__":
    gc.freeze()  # imported objects stay, so the collector skips them
    # The step's trace makes many objects and little garbage. With Python 3.11's default
    # (700) collections take 60 to 80 ms of a warm start. The number holds for the whole run.
    gc.set_threshold(10_000)
    gc.enable()
    with own_process():
        raise SystemExit(exit_code.exit_code(main))
