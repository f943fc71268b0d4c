"""A comparison of a config's layouts with one device, layout by layout.

Each layout trains the same steps on the same data as one device does. Example: `jaxdist
verify --config NAME --devices 8`.

Exit codes: 0 if all layouts equal one device, 1 if one does not, 78 if nothing could be
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
    """Runs the command and returns its exit code."""
    start_s = time.monotonic()
    flags, config = cli.parse(
        _parser(), arguments, weight_sources=interop.WEIGHT_SOURCES
    )
    devices = _devices(flags.devices)
    groups = {"": precisions_of(config), "both": PRECISIONS}
    precisions = groups.get(flags.precision, (flags.precision,))
    stream = sys.stderr if flags.json else sys.stdout
    log = functools.partial(print, file=stream, flush=True)
    report = verify_layouts(
        config, devices, precisions=precisions, only=flags.only, log=log
    )
    if flags.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print(summary(report), f"({time.monotonic() - start_s:.0f} s)")
    return 0 if report.passed else 1


def _parser() -> cli.ConfigParser:
    parser = cli.ConfigParser("verify", __doc__)
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        metavar="N",
        help="number of devices to lay the model out on, at least 2 (default: 8)",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(dict.fromkeys((*PRECISIONS, "both", *FORMATS, *RECIPES))),
        default="",
        help="precision to compare in (default: float32 and bfloat16, or float16 if "
        "the config sets it; also precision.matmul if the config sets it)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="compare only layouts whose name contains this text (default: all)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON on standard output",
    )
    return parser


def _devices(count: int) -> Sequence[jax.Device]:
    """Finds `count` devices to compare on.

    CPU devices are emulated. Accelerators are those of this machine, `count` or fewer.

    Raises:
      ConfigError: there are fewer than two devices.
    """
    if count < 2:
        raise ConfigError(
            f"--devices {count}: must be >= 2, since layouts are compared with one device"
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
            # XLA's threads: each collective blocks one thread per device, and several
            # collectives may be in flight.
            os.environ.setdefault("NPROC", str(4 * count))
    devices = jax.devices()[:count]
    if len(devices) < 2:
        raise ConfigError(
            f"there is one {devices[0].device_kind}, and layouts need two devices. "
            f"Set JAX_PLATFORMS=cpu to compare on {count} emulated devices."
        )
    if len(devices) < count:
        print(
            f"--devices {count}: using {len(devices)}, the devices of this machine",
            file=sys.stderr,
        )
    return devices


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
