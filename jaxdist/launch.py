"""`python -m jaxdist.launch --processes N -- COMMAND`: starts and supervises a run's
processes.

On a machine of its own, or as the agent of a node under Slurm, Kubernetes or mpirun.
Needs no jax.
"""

import argparse
import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist import config
from jaxdist.config import ConfigError
from jaxdist.distributed.cluster import find_cluster
from jaxdist.distributed.local_devices import device_environment
from jaxdist.operations.launch.supervisor import Supervisor, SupervisorOptions

_PREFLIGHT = [sys.executable, "-m", "jaxdist.operations.launch.preflight"]
_LEAST = {
    "processes": 1,
    "devices_per_process": 1,
    "min_processes": 1,
    "max_restarts": 0,
}
# faults of the machine, which may pass
_OF_MACHINE = {
    errno.EAGAIN,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns the exit code of the run, 78 if it cannot start, 70 if the machine's fault may
    pass.
    """
    try:
        options = _options(list(sys.argv[1:] if argv is None else argv))
        agents = find_cluster(os.environ)
        if agents.number > 1:
            _say(str(agents))
            if options.capacity_file:
                raise ConfigError(
                    "--capacity-file: with several agents the scheduler says how many there are"
                )
        # fails on devices that are not there, before anything starts
        for slot in range(options.processes):
            device_environment(
                os.environ, slot, options.processes, options.devices_per_process
            )
        if options.preflight:
            preflight = dataclasses.replace(options, command=_PREFLIGHT, max_restarts=0)
            code = Supervisor(preflight, agents, say=_say).run()
            if code:
                return code
        return Supervisor(options, agents, say=_say).run()
    except (ConfigError, OSError) as error:
        for fault in getattr(error, "faults", (str(error),)):
            print(f"error: {fault}", file=sys.stderr)
        if getattr(error, "errno", None) in _OF_MACHINE:
            return config.EXIT_PEER_LOST
        return config.EXIT_CONFIG


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"launch: {text}", file=sys.stderr, flush=True)


def _options(argv: list[str]) -> SupervisorOptions:
    """Parses the flags, and the command after `--`.

    Raises:
      ConfigError: lists all that is wrong with them.
    """
    end = len(argv)
    if "--" in argv:
        end = argv.index("--")
    command = argv[end + 1 :]
    flags = _parser().parse_args(argv[:end])
    faults = []
    for name, least in _LEAST.items():
        value = getattr(flags, name)
        if value is not None and value < least:
            faults.append(f"--{name.replace('_', '-')} {value}: must be >= {least}")
    if flags.min_processes is not None and flags.min_processes > flags.processes:
        faults.append(
            f"--min-processes {flags.min_processes}: must be <= --processes {flags.processes}"
        )
    if not 0 <= flags.grace_s < float("inf"):
        faults.append(
            f"--grace-seconds {flags.grace_s:g}: must be a finite number >= 0"
        )
    minutes = getattr(flags, "grow_minutes", 0.0)
    if not 0 <= minutes < float("inf"):
        faults.append(f"--grow-minutes {minutes:g}: must be a finite number >= 0")
    if "grow_minutes" in flags and flags.capacity_file is None:
        faults.append(
            f"--grow-minutes {minutes:g}: needs --capacity-file, which says that more can run"
        )
    if not command:
        faults.append(
            "no command: write `-- python -m jaxdist.train --config NAME` after the flags"
        )
    if faults:
        raise ConfigError(faults)
    return SupervisorOptions(command, **vars(flags))


def _parser() -> argparse.ArgumentParser:
    usage = "jaxdist launch [flags] -- COMMAND ..."
    parser = config.Parser(prog="jaxdist launch", description=__doc__, usage=usage)
    add = parser.add_argument
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine (default 1)",
    )
    add(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="CPU: emulate so many; GPU: each gets so many",
    )
    add(
        "--min-processes",
        type=int,
        metavar="M",
        help="least to go on with if some are lost (default: all)",
    )
    add(
        "--max-restarts",
        type=int,
        default=3,
        metavar="R",
        help="in a row without progress (default 3)",
    )
    add(
        "--capacity-file",
        type=Path,
        metavar="PATH",
        help="file with how many can run; read at starts, while fewer do",
    )
    grow_help = "so long fewer run before they save and start again as more (default 10; 0: not)"
    add(
        "--grow-minutes",
        type=float,
        default=argparse.SUPPRESS,
        metavar="N",
        help=grow_help,
    )
    grace_help = (
        "time to save after a signal, before what still runs is killed (default 120)"
    )
    add(
        "--grace-seconds",
        dest="grace_s",
        type=float,
        default=120,
        metavar="S",
        help=grace_help,
    )
    add(
        "--preflight",
        action="store_true",
        help="first measure devices and all-reduce; name what is slow",
    )
    return parser


if __name__ == "__main__":
    sys.exit(config.quiet_pipe(main))
