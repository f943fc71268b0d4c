"""`python -m jaxdist.verify --config NAME --devices 8`: prove that layouts equal one
device.

Exit code 0: all layouts are equal to one device; 1: one is not; 78: nothing could be
compared.
"""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Sequence

import jax

from jaxdist import interop
from jaxdist.config import ConfigError
from jaxdist.hardware import flags as platform_flags
from jaxdist.parallel.precision import FORMATS, RECIPES
from jaxdist.trainer import cli, exit_code
from jaxdist.verification.comparison import summary
from jaxdist.verification.runner import PRECISIONS, precisions_of, verify_layouts


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    began = time.monotonic()
    flags, config = cli.parse(
        _parser(), arguments, weight_sources=interop.WEIGHT_SOURCES
    )
    devices = _devices(flags.devices)
    of_flag = {"": precisions_of(config), "both": PRECISIONS}
    precisions = of_flag.get(flags.precision, (flags.precision,))
    log = functools.partial(
        print, file=sys.stderr if flags.json else sys.stdout, flush=True
    )
    report = verify_layouts(
        config, devices, precisions=precisions, only=flags.only, log=log
    )
    if flags.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print(summary(report), f"({time.monotonic() - began:.0f} s)")
    return 0 if report.passed else 1


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("verify", __doc__)
    parser.add_argument(
        "--devices", type=int, default=8, help="devices to lay out on (default: 8)"
    )
    parser.add_argument(
        "--precision",
        choices=tuple(dict.fromkeys((*PRECISIONS, "both", *FORMATS, *RECIPES))),
        default="",
        help="default: both float32 and bfloat16 (float16 if the config sets it), "
        "and precision.matmul if the config sets it",
    )
    parser.add_argument(
        "--only", default="", help="just the layouts whose name contains this text"
    )
    parser.add_argument(
        "--json", action="store_true", help="the result as JSON on stdout"
    )
    return parser


def _devices(count: int) -> Sequence[jax.Device]:
    """Finds `count` devices: of the CPU they are made; of accelerators, as many as
    there are.

    Raises:
      ConfigError: fewer than two.
    """
    if count < 2:
        raise ConfigError(
            f"--devices {count}: must be >= 2, there is nothing else to compare"
        )
    platform = platform_flags.detect_platform(os.environ)
    family = platform_flags.detect_family(os.environ)
    os.environ.update(
        platform_flags.flag_environment(platform, os.environ, family=family)
    )
    if platform == "cpu":
        with contextlib.suppress(RuntimeError):  # the backend is running already
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
            # XLA's threads: each collective of each device blocks one, and several may
            # be under way.
            os.environ.setdefault("NPROC", str(4 * count))
    devices = jax.devices()[:count]
    if len(devices) < 2:
        raise ConfigError(
            f"there is one {devices[0].device_kind}, layouts need two devices; "
            f"set JAX_PLATFORMS=cpu to compare on {count} emulated devices"
        )
    if len(devices) < count:
        print(f"--devices {count}: {len(devices)} are there and used", file=sys.stderr)
    return devices


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
