"""`python -m jaxdist.train --config NAME`: train, or go on where the workdir's run stopped."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jax

from jaxdist import hardware, loop, recipe
from jaxdist.mesh import join_processes
from jaxdist.sharding import explain, place


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags, config = recipe.parse(_parser(), arguments)
    folder = Path(flags.workdir or f"runs/{Path(flags.config.partition(':')[0]).stem}")
    platform = hardware.detect_platform(os.environ)
    os.environ.update(hardware.flag_environment(platform, os.environ))
    _use_compile_cache()
    if joined := join_processes():
        print(joined)
    if flags.dry_run:
        return dry_run(config)
    try:
        loop.run(config, folder, title=flags.config)
    except loop.TrainingStopped as stopped:
        print(f"error: {stopped}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxdist train", description=__doc__, add_help=False)
    parser.add_argument("--workdir", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="batch, shardings, memory; run nothing")
    parser.add_argument("-h", "--help", action="store_true", help="with --config: all of its fields")
    return parser


def _use_compile_cache() -> None:
    """Keeps compiled programs on disk, unless the user has said where or not to."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path.home() / ".cache" / "jaxdist" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def dry_run(config: recipe.RunConfig) -> int:
    """Prints batch arithmetic, the sharding table and the step's memory; nothing is allocated."""
    devices = jax.devices()
    shape, rules, spec = recipe.validate(config, devices)
    print(f"mesh: {shape}; {spec.parameter_count:,} parameters")
    print(recipe.batch_arithmetic(config, shape))
    print(explain(place(spec.named_parameters(), rules)))
    return 0


if __name__ == "__main__":
    recipe.main_with_config_errors(main)
