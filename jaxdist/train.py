"""`python -m jaxdist.train --config NAME`: train, or go on where the workdir's run stopped."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import jax

from jaxdist import command_line, dry_run, loop, machine
from jaxdist.checkpoint.folder import EXIT_NO_CHECKPOINT, CheckpointError
from jaxdist.checkpoint.layout import LayoutError
from jaxdist.config import ConfigError
from jaxdist.data import SourceError

EXIT_PREEMPTED = 75


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags, config = command_line.parse(_parser(), arguments)
    if joined := machine.prepare():
        print(joined)
    if flags.dry_run:
        if emulated := dry_run.missing_devices(config.mesh, os.environ):
            jax.config.update("jax_num_cpu_devices", emulated)
        dry_run.dry_run(config, jax.devices())
        return 0
    try:
        loop.run(config, Path(flags.workdir or default_workdir(flags.config)), title=flags.config)
    except loop.Interrupted as interrupted:
        print(interrupted)
        return EXIT_PREEMPTED
    except LayoutError as error:
        raise ConfigError(error.faults) from error
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NO_CHECKPOINT
    except (loop.TrainingStopped, SourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def default_workdir(config: str) -> str:
    """Returns `runs/NAME` of a `--config` value, `runs/NAME-ARGUMENT` where it has an argument."""
    name, _, argument = config.partition(":")
    words = [Path(name).stem, re.sub(r"[^\w.]+", "-", argument).strip("-")]
    return "runs/" + "-".join(filter(None, words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxdist train", description=__doc__, add_help=False)
    parser.add_argument("--workdir", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="batch, shardings, memory; no run")
    parser.add_argument("-h", "--help", action="store_true", help="with --config: all its fields")
    return parser


if __name__ == "__main__":
    command_line.main_with_config_errors(main)
