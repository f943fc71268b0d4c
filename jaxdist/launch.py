"""Starts the processes of a run, restarts them after a failure, and stops them.

The command supervises all processes of one machine. Under Slurm, Kubernetes or mpirun,
start it once per node. It needs no jax. Example: `jaxdist launch --processes 2 -- jaxdist
train --config NAME`.
"""

from jaxdist.distributed import stop_signals

if __name__ == "__main__":
    stop_signals.leave_at_signals()  # before the other imports

import argparse
import contextlib
import dataclasses
import errno
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.config import EXIT_CONFIG, EXIT_PEER_LOST, ConfigError, command_line
from jaxdist.distributed.cluster import ClusterInfo, find_cluster
from jaxdist.distributed.local_devices import device_environment
from jaxdist.operations.launch import machine_flags
from jaxdist.operations.launch.machine_agent import MachineAgent
from jaxdist.operations.launch.roster import MachineOptions
from jaxdist.operations.launch.supervisor import Supervisor, SupervisorOptions

_PREFLIGHT = [sys.executable, "-m", "jaxdist.operations.launch.preflight"]
_MINIMA = {
    "processes": 1,
    "devices_per_process": 1,
    "min_processes": 1,
    "max_restarts": 0,
}
_MAX_PER_CORE = 32  # processes; a group of more would hardly train
_OWN_FILES = 32  # open files of the agent beside the pipe of each process
# faults of the machine, which may be gone at the next start
_TRANSIENT_ERRORS = {
    errno.EAGAIN,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      The run's exit code; 78 if it cannot start; 70 if a restart may help.
    """
    try:
        options, machines = _options(list(sys.argv[1:] if argv is None else argv))
        agents = _find_agents(options, machines)
        # Raises ConfigError for missing devices before anything starts.
        for slot in range(options.processes):
            device_environment(
                os.environ, slot, options.processes, options.devices_per_process
            )
        if machines:
            return MachineAgent(options, machines, say=_print).run()
        if options.preflight:
            preflight = dataclasses.replace(options, command=_PREFLIGHT, max_restarts=0)
            code = Supervisor(preflight, agents, say=_print).run(is_last=False)
            if code:
                return code
        return Supervisor(options, agents, say=_print).run()
    except (ConfigError, OSError) as error:
        stop_signals.keep_exit_code()
        command_line.print_faults(error)
        if getattr(error, "errno", None) in _TRANSIENT_ERRORS:
            return EXIT_PEER_LOST
        return EXIT_CONFIG


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"launch: {text}", file=sys.stderr, flush=True)


def _find_agents(
    options: SupervisorOptions, machines: MachineOptions | None
) -> ClusterInfo:
    """Finds this agent's place among those that a scheduler started.

    Raises:
      ConfigError: there are several, and a flag is for agents without a scheduler.
    """
    agents = find_cluster(os.environ)
    if agents.number == 1:
        return agents
    _print(str(agents))
    if machines:
        raise ConfigError(
            f"--nnodes: {agents.launcher} has decided the machines already. "
            f"Leave out --nnodes."
        )
    if options.capacity_file:
        raise ConfigError(
            "--capacity-file: the scheduler decides the number of agents. "
            "Leave out --capacity-file."
        )
    return agents


def _options(argv: list[str]) -> tuple[SupervisorOptions, MachineOptions | None]:
    """Parses the flags, and the command after `--`.

    Returns:
      The options, and those of several machines; None = one machine.

    Raises:
      ConfigError: lists everything wrong with them.
    """
    end = len(argv)
    if "--" in argv:
        end = argv.index("--")
    command = argv[end + 1 :]
    flags = _parser().parse_args(argv[:end])
    faults = list(_flag_faults(flags))
    if not command:
        faults.append(
            "no command: write `-- python -m jaxdist.train --config NAME` after the flags"
        )
    machines = machine_flags.take_options(flags, command, faults)
    if faults:
        raise ConfigError(faults)
    return SupervisorOptions(command, **vars(flags)), machines


def _flag_faults(flags: argparse.Namespace) -> Iterator[str]:
    """Yields what is wrong with the flags of one machine."""
    for name, minimum in _MINIMA.items():
        value = getattr(flags, name)
        if value is not None and value < minimum:
            yield f"--{name.replace('_', '-')} {value}: must be >= {minimum}"
    yield from _size_faults(flags.processes)
    if flags.min_processes is not None and flags.min_processes > flags.processes:
        yield (
            f"--min-processes {flags.min_processes}: must be <= --processes {flags.processes}"
        )
    if not 0 <= flags.grace_s < float("inf"):
        yield f"--grace-seconds {flags.grace_s:g}: must be a finite number >= 0"
    minutes = getattr(flags, "grow_minutes", 0.0)
    if not 0 <= minutes < float("inf"):
        yield f"--grow-minutes {minutes:g}: must be a finite number >= 0"
    if "grow_minutes" in flags and flags.capacity_file is None and not flags.nnodes:
        yield (
            f"--grow-minutes {minutes:g}: needs --capacity-file or --nnodes, without which it has no effect"
        )


def _size_faults(processes: int) -> Iterator[str]:
    """Yields why this machine cannot run so many processes."""
    cores = os.cpu_count() or 1
    limit = _MAX_PER_CORE * cores
    if processes > limit:
        yield (
            f"--processes {processes}: must be <= {limit}, {_MAX_PER_CORE} for each of "
            f"this machine's {cores} cores"
        )
        return
    num_files = processes + _OWN_FILES
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files > max_files:
        yield (
            f"--processes {processes}: needs {num_files} open files, and the limit is "
            f"{max_files}. Raise it (ulimit -n {num_files}), or start fewer"
        )


def _parser() -> argparse.ArgumentParser:
    usage = "jaxdist launch [flags] -- COMMAND ..."
    parser = command_line.Parser(
        prog="jaxdist launch", description=__doc__, usage=usage
    )
    add = parser.add_argument
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes to start on this machine (default 1)",
    )
    add(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="GPUs for each process; on CPU, devices that each process emulates "
        "(default: GPUs are divided evenly; CPU devices as the environment says)",
    )
    add(
        "--min-processes",
        type=int,
        metavar="M",
        help="fewest processes to continue with if some are lost (default: N)",
    )
    add(
        "--max-restarts",
        type=int,
        default=3,
        metavar="R",
        help="restarts in a row without progress before giving up (default 3)",
    )
    add(
        "--capacity-file",
        type=Path,
        metavar="PATH",
        help="file with the number of processes that can run; read at each start, and "
        "while fewer than N run (default: N can run). With --nnodes: of machines",
    )
    add(
        "--grow-minutes",
        type=float,
        default=argparse.SUPPRESS,
        metavar="MINUTES",
        help="minutes to run reduced before saving and restarting with more processes "
        "(default 10; 0 = never)",
    )
    add(
        "--grace-seconds",
        dest="grace_s",
        type=float,
        default=120,
        metavar="SECONDS",
        help="seconds to save after a signal before processes are killed (default 120)",
    )
    add(
        "--preflight",
        action="store_true",
        help="first measure the devices and an all-reduce, and name slow devices",
    )
    machine_flags.add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(command_line.quiet_pipe(main))
