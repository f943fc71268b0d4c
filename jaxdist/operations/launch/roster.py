"""Choice of the machines that run together. Needs no jax."""

import contextlib
import dataclasses
from pathlib import Path

from jaxdist.operations.launch.growth import read_capacity
from jaxdist.operations.launch.rendezvous import Generation, Record, Rendezvous
from jaxdist.operations.launch.run_progress import ProgressReader
from jaxdist.trainer import elastic


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """Options of `launch` for several machines."""

    least: int  # fewest machines
    most: int  # most machines: those of a full run
    folder: Path  # folder in which the agents meet
    name: str  # name of this machine's agent
    address: str  # host by which other machines reach this one
    settle_s: float = 30.0  # seconds to wait for more machines before the first start
    lost_s: float = 15.0  # seconds without a heartbeat after which an agent is lost


@dataclasses.dataclass(frozen=True)
class Roster:
    """Machines that can run, and those of them that run next."""

    machines: MachineOptions
    rendezvous: Rendezvous
    progress: ProgressReader
    processes: int  # number of processes of each machine
    devices_per_process: int | None  # None: see `device_environment`
    capacity_file: Path | None  # file with the number of machines that may run

    def eligible(self, generation: Generation) -> list[Record]:
        """Lists the agents that can run processes; those left out come last."""
        alive = [record for record in self.rendezvous.alive() if not record.leaving]
        return sorted(alive, key=lambda r: (r.token in generation.excluded, r.name))

    def choose(self, generation: Generation) -> list[Record]:
        """Chooses as many machines as can run on a legal mesh.

        Machines that are left out take part only if there are too few others.

        Args:
          generation: the last generation, with the counts of the next one.
        """
        eligible = self.eligible(generation)
        sound = [r for r in eligible if r.token not in generation.excluded]
        if len(sound) >= self.machines.least:
            eligible = sound
        number = min(len(eligible), self.machines.most)
        if self.capacity_file is not None:
            # the file may be missing, or being written
            with contextlib.suppress(OSError, ValueError):
                number = min(number, read_capacity(self.capacity_file))
        for size in range(number, 0, -1):
            if size not in generation.refused and self._is_legal(size):
                return sorted(eligible[:size], key=lambda record: record.name)
        return []

    def _is_legal(self, size: int) -> bool:
        """Checks if the run's batch and mesh fit on so many machines.

        The answer is True if it is unknown: before the first start, and for a command
        that is not jaxdist's.
        """
        most = self.machines.most
        config = self.progress.read_json("config.json")
        per_process = self.devices_per_process or self.progress.devices_per_process()
        if size == most or config is None or per_process is None:
            return True
        per_machine = self.processes * per_process
        fitted = elastic.fit_config(
            config, devices=size * per_machine, full_devices=most * per_machine
        )
        return fitted is not None
