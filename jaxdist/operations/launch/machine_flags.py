"""Flags of `launch` for several machines that no scheduler starts."""

import argparse
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.operations.launch.rendezvous import NAME
from jaxdist.operations.launch.roster import MachineOptions
from jaxdist.operations.launch.run_progress import run_folder

_FLAGS = {
    "meet_in": "--meet-in",
    "agent": "--agent",
    "address": "--address",
    "settle_s": "--settle-seconds",
    "lost_s": "--lost-seconds",
}
_TIMES = {"settle_s": MachineOptions.settle_s, "lost_s": MachineOptions.lost_s}
_MOST = 1024  # machines
_FOLDER = "agents"  # in the workdir
# An address without a machine (RFC 5737). No packet is sent to it.
_ELSEWHERE = ("192.0.2.1", 9)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser."""
    add = parser.add_argument_group("several machines without a scheduler").add_argument
    add(
        "--nnodes",
        metavar="MIN:MAX",
        help="machines that run together, each with an agent of this same command; "
        "MIN is the fewest to train with",
    )
    add(
        "--meet-in",
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="folder that all machines share, in which agents meet (default: "
        f"WORKDIR/{_FOLDER})",
    )
    add(
        "--agent",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="name of this agent, another on each machine (default: the host's name)",
    )
    add(
        "--address",
        default=argparse.SUPPRESS,
        metavar="HOST",
        help="host name or IP by which the other machines reach this one (default: the "
        "address from which it reaches other networks)",
    )
    add(
        "--settle-seconds",
        dest="settle_s",
        type=float,
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="seconds to wait for more than MIN machines before the first start "
        f"(default {MachineOptions.settle_s:g})",
    )
    add(
        "--lost-seconds",
        dest="lost_s",
        type=float,
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="seconds without a heartbeat after which a machine is lost "
        f"(default {MachineOptions.lost_s:g})",
    )


def take_options(
    flags: argparse.Namespace, command: Sequence[str], faults: list[str]
) -> MachineOptions | None:
    """Removes the flags of several machines from all flags.

    Args:
      flags: the parsed flags; loses those of this module.
      command: command of the processes.
      faults: list to which everything wrong with the flags is added.

    Returns:
      The options; None without --nnodes, and if something is wrong.
    """
    given = {name: flags.__dict__.pop(name) for name in _FLAGS if name in flags}
    text = flags.__dict__.pop("nnodes")
    if text is None:
        faults += [f"{_FLAGS[name]}: needs --nnodes MIN:MAX" for name in given]
        return None
    place = given.get("meet_in")
    folder = _default_folder(command) if place is None else Path(place)
    address = given.get("address")
    name = given.get("agent", socket.gethostname())
    times = {key: given.get(key, default) for key, default in _TIMES.items()}
    faults += [
        *_number_faults(text),
        *_place_faults(folder, place, name),
        *_address_faults(address),
        *_time_faults(**times),
        *_other_faults(flags),
    ]
    if faults or folder is None:
        return None
    least, _, most = text.rpartition(":")
    return MachineOptions(
        least=int(least or most),
        most=int(most),
        folder=folder,
        name=name,
        address=address or _own_address(),
        **times,
    )


def _place_faults(folder: Path | None, place: str | None, name: str) -> Iterator[str]:
    """Yields what is wrong with the folder, as it was given, and the name."""
    if folder is None:
        yield (
            "--nnodes: agents meet in a folder that all machines share, and the command "
            "names none. Give --workdir FOLDER in the command, or --meet-in FOLDER."
        )
    if place is not None and "://" in place:
        yield (
            f"--meet-in {place}: agents cannot meet in an object store. They need file "
            "locks and hard links. Give a folder of a file system that all machines share."
        )
    if not NAME.fullmatch(name):
        yield (
            f"--agent {name!r}: must have 1 to 64 letters, digits, and . _ - after the first"
        )


def _address_faults(address: str | None) -> Iterator[str]:
    """Yields what is wrong with the address."""
    if address is None:
        return
    if ":" in address:
        yield (
            f"--address {address}: has a colon. The agents add the port, and cannot add it "
            "to an IPv6 address. Give a host name or an IPv4 address, without a port."
        )
    if re.search(r"\s", address):
        yield (
            f"--address {address!r}: has whitespace. Give one host name or IPv4 address."
        )


def _time_faults(settle_s: float, lost_s: float) -> Iterator[str]:
    """Yields what is wrong with the times."""
    if not 0 <= settle_s < float("inf"):
        yield f"--settle-seconds {settle_s:g}: must be a finite number >= 0"
    if not 1 <= lost_s < float("inf"):
        yield f"--lost-seconds {lost_s:g}: must be a finite number >= 1"


def _other_faults(flags: argparse.Namespace) -> Iterator[str]:
    """Yields the flags of one machine that several machines cannot have."""
    if flags.min_processes is not None:
        yield "--min-processes: machines come and go whole with --nnodes. Leave it out."
    if flags.preflight:
        yield (
            "--preflight: cannot be used with --nnodes. Measure each machine alone, "
            "without --nnodes."
        )


def _number_faults(text: str) -> Iterator[str]:
    """Yields what is wrong with the numbers of machines."""
    match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text)
    if match is None:
        yield f"--nnodes {text}: must be MIN:MAX, such as 2:4, or one number"
        return
    most = int(match[2])
    least = int(match[1] or most)
    if least < 1:
        yield f"--nnodes {text}: MIN must be >= 1"
    if least > most:
        yield f"--nnodes {text}: MIN must be <= MAX"
    if most > _MOST:
        yield f"--nnodes {text}: MAX must be <= {_MOST}; use a scheduler for more"


def _default_folder(command: Sequence[str]) -> Path | None:
    workdir = run_folder(command)
    return workdir / _FOLDER if workdir is not None else None


def _own_address() -> str:
    """Finds the address from which this machine reaches other networks.

    It is the host's name if there is no such address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            address: str = probe.getsockname()[0]
            return address
        except OSError:
            return socket.gethostname()
