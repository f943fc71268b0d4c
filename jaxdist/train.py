"""`python -m jaxdist.train --config NAME`: train, or resume the run of the workdir."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import EXIT_PREEMPTED, extras
from jaxdist.data import SourceError
from jaxdist.distributed import coordination, initialize
from jaxdist.operations.launch.run_progress import default_workdir
from jaxdist.operations.ledger.ledger import JOIN
from jaxdist.operations.watch.watchdog import Watchdog
from jaxdist.parallel.remat import FIT
from jaxdist.telemetry.display import print_safe
from jaxdist.trainer import cli, elastic, trainer
from jaxdist.trainer.preemption import own_process
from jaxdist.trainer.run_config import RunConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags, config = cli.parse(_parser(), arguments)
    if flags.dry_run:
        dry_run = extras.load("jaxdist.planner.dry_run")
        _prepare()
        if emulated := dry_run.missing_devices(config.mesh, os.environ):
            jax.config.update("jax_num_cpu_devices", emulated)
        dry_run.dry_run(_resolved(config), jax.devices())
        return 0
    folder = Path(flags.workdir or default_workdir(flags.config))
    try:
        # joining, and finding devices, may hang
        with Watchdog(config.watchdog, folder) as watch:
            with watch.ledger.aside(JOIN):
                _prepare()
                count = jax.local_device_count()
            full = coordination.broadcast(
                elastic.full_devices(os.environ, folder, per_process=count)
            )
            config = _resolved(
                config, watch.lively(print_safe), folder=folder, full_devices=full
            )
            trainer.run(
                config, folder, title=flags.config, full_devices=full, watch=watch
            )
    except trainer.Interrupted as interrupted:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            print(interrupted)
        return EXIT_PREEMPTED
    except (trainer.TrainingStopped, SourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        planner = extras.load("jaxdist.planner.plan")
        print(
            f"error: {planner.explain_shortage(config, jax.devices(), str(error))}",
            file=sys.stderr,
        )
        return 1
    return 0


def _resolved(
    config: RunConfig, say: Callable[[str], None] = print_safe, **options: Any
) -> RunConfig:
    """Returns the run with its `remat.policy=fit` resolved, or as it was resolved
    before.
    """
    if config.remat.policy != FIT and not config.remat.fitted:
        return config
    fit_remat = extras.load("jaxdist.planner.fit_remat")
    return fit_remat.resolve(config, jax.devices(), say=say, **options)


def _prepare() -> None:
    if joined := initialize.prepare():
        print(joined)


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("train", __doc__)
    parser.add_argument("--workdir", help="folder of the run (default: runs/NAME)")
    parser.add_argument(
        "--dry-run", action="store_true", help="batch, shardings, memory; no run"
    )
    return parser


if __name__ == "__main__":
    with own_process():
        raise SystemExit(cli.exit_code(main))
