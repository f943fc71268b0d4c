"""The agents of a run, one per node, found in the scheduler's environment variables.

Needs no jax and no network.
"""

import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.config import ConfigError

LOOPBACK = "127.0.0.1"
TORCHRUN = "torchrun"
_FIRST_PORT = 61440  # above Linux's ephemeral ports
_NUM_PORTS = 4096


@dataclass(frozen=True)
class ClusterInfo:
    """Place of this agent among the agents of the run."""

    launcher: str | None = None  # name of the scheduler; None: no scheduler was found
    number: int = 1  # number of agents
    index: int = 0  # index of this agent
    host: str = LOOPBACK  # host of agent 0
    port: int = 0  # port of agent 0; 0: a lone agent chooses a free one

    def __str__(self) -> str:
        return f"agent {self.index} of {self.number}, started by {self.launcher}"


def find_cluster(environ: Mapping[str, str]) -> ClusterInfo:
    """Finds this agent's place among the agents; `ClusterInfo()` if it is alone.

    Raises:
      ConfigError: there are several agents, but the address of the first is unknown; or
        an index is out of range.
    """
    for find in (_from_variables, find_torchrun, *_SCHEDULERS):
        cluster = _in_range(find(environ) or ClusterInfo())
        if cluster.number > 1:
            return cluster
    return ClusterInfo()


def _in_range(cluster: ClusterInfo) -> ClusterInfo:
    if not 0 <= cluster.index < cluster.number:
        raise ConfigError(
            f"{cluster}: its number must be >= 0, and less than how many there are"
        )
    return cluster


def _port(*names: str | None) -> int:
    """Computes a port from the names of a start.

    All agents of a start get the same port. The next start most likely gets another.
    """
    return _FIRST_PORT + zlib.crc32("/".join(map(str, names)).encode()) % _NUM_PORTS


def _from_variables(environ: Mapping[str, str]) -> ClusterInfo | None:
    """Reads the variables that any launcher may set.

    They are JAXDIST_AGENTS, JAXDIST_AGENT and JAXDIST_AGENTS_AT (host:port of agent 0).
    """
    if "JAXDIST_AGENTS" not in environ:
        return None
    try:
        host, _, port = environ["JAXDIST_AGENTS_AT"].rpartition(":")
        return ClusterInfo(
            "its environment",
            number=int(environ["JAXDIST_AGENTS"]),
            index=int(environ["JAXDIST_AGENT"]),
            host=host,
            port=int(port),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"JAXDIST_AGENTS is set, but {error}: set JAXDIST_AGENT=NUMBER, JAXDIST_AGENTS_AT=HOST:PORT too"
        ) from None


def find_torchrun(environ: Mapping[str, str]) -> ClusterInfo | None:
    """Finds the place of a process in torchrun's variables.

    They are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; other launchers set them for
    PyTorch, too. On one machine the processes meet on loopback. torchrun's agent store
    listens on MASTER_PORT; if it does, the processes use a port of their own.

    Returns:
      The place. None if the variables are not set, or if a scheduler started the
      process and its variables agree.

    Raises:
      ConfigError: a variable is missing or no number, or a scheduler has started
        another number of processes.
    """
    number = _number(environ, "WORLD_SIZE")
    # without it the others mean nothing: Kubernetes has a MASTER_PORT, too
    if number is None or number <= 1:
        return None
    index = _number(environ, "RANK")
    port = _number(environ, "MASTER_PORT")
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    scheduled = None if run_id else _scheduled(environ)
    if scheduled is not None:
        if index is None or (scheduled.number, scheduled.index) == (number, index):
            return None
        raise ConfigError(
            f"WORLD_SIZE={number}, RANK={index}, but this is process {scheduled.index} of "
            f"{scheduled.number} of {scheduled.launcher}; unset RANK and WORLD_SIZE, or start "
            f"the processes by torchrun alone"
        )
    missing = [
        name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
    ]
    if missing or index is None or port is None:
        raise ConfigError(
            f"WORLD_SIZE={number}, but {', '.join(missing)} not set; unset it to run alone"
        )
    host = environ["MASTER_ADDR"]
    if _number(environ, "LOCAL_WORLD_SIZE") == number:
        host = LOOPBACK
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = _port(
            "torchrun", run_id, str(port), environ.get("TORCHELASTIC_RESTART_COUNT")
        )
    return _in_range(
        ClusterInfo(TORCHRUN, number=number, index=index, host=host, port=port)
    )


def count_ray_workers() -> int:
    """Counts the workers of this process's Ray Train group; 1 outside of Ray Train.

    Imports nothing: a worker has loaded `ray.train` already.
    """
    try:
        return int(sys.modules["ray.train"].get_context().get_world_size())
    except Exception:
        # No Ray, or no worker of Ray Train. Each version of Ray raises another error.
        return 1


def _number(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ[name]) if environ.get(name) else None
    except ValueError:
        raise ConfigError(
            f"{name}={environ[name]}: must be a whole number, as torchrun sets it"
        ) from None


def _scheduled(environ: Mapping[str, str]) -> ClusterInfo | None:
    """Finds this process's place among several that a scheduler started, or None."""
    for find in _SCHEDULERS:
        cluster = find(environ)
        if cluster and cluster.number > 1:
            return cluster
    return None


def _slurm(environ: Mapping[str, str]) -> ClusterInfo | None:
    # the process of a batch script itself is in no step
    if "SLURM_STEP_NODELIST" not in environ:
        return None
    start = map(environ.get, ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return ClusterInfo(
        "Slurm",
        number=int(environ["SLURM_NTASKS"]),
        index=int(environ["SLURM_PROCID"]),
        host=first_host(environ["SLURM_STEP_NODELIST"]),
        port=_port(*start),
    )


def first_host(nodes: str) -> str:
    """Finds the first host of a Slurm list: `gpu[017-020,33],login` gives gpu017."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(filter(None, match.groups())) if match else nodes


def _open_mpi(environ: Mapping[str, str]) -> ClusterInfo | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    number = int(environ["OMPI_COMM_WORLD_SIZE"])
    host = LOOPBACK
    start = map(
        environ.get,
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid"),
    )
    if number > int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")):
        match = re.search(r"tcp://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
        if match:
            host = match[1]
        elif number > 1:
            raise ConfigError(
                "mpirun does not tell where process 0 is (Open MPI 5): give each agent "
                "-x JAXDIST_AGENTS_AT=HOST:PORT -x JAXDIST_AGENTS=N, and JAXDIST_AGENT=$OMPI_COMM_WORLD_RANK"
            )
    return ClusterInfo(
        "Open MPI",
        number=number,
        index=int(environ["OMPI_COMM_WORLD_RANK"]),
        host=host,
        port=_port(*start),
    )


def _kubernetes(environ: Mapping[str, str]) -> ClusterInfo | None:
    """Reads the variables of an Indexed Job of a JobSet.

    deploy/jobset.yaml sets the names through the downward API.
    """
    jobset = environ.get("JOBSET_NAME")
    job = environ.get("REPLICATED_JOB_NAME")
    if "JOB_COMPLETION_INDEX" not in environ or jobset is None or job is None:
        return None
    if "JAXDIST_NUM_PODS" not in environ:
        raise ConfigError(
            "JAXDIST_NUM_PODS is not set: write the job's parallelism into the environment"
        )
    return ClusterInfo(
        "Kubernetes",
        number=int(environ["JAXDIST_NUM_PODS"]),
        index=int(environ["JOB_COMPLETION_INDEX"]),
        # job 0, pod 0, of the JobSet's headless service
        host=f"{jobset}-{job}-0-0.{jobset}",
        port=_port(jobset, job, environ.get("JOBSET_RESTART_ATTEMPT")),
    )


def _tpu(environ: Mapping[str, str]) -> ClusterInfo | None:
    """Reads the variables that list the hosts of one TPU slice."""
    hosts = list(filter(None, environ.get("TPU_WORKER_HOSTNAMES", "").split(",")))
    if "TPU_WORKER_ID" not in environ or not hosts:
        return None
    return ClusterInfo(
        "a multi-host TPU",
        number=len(hosts),
        index=int(environ["TPU_WORKER_ID"]),
        host=hosts[0],
        port=_port(*hosts),
    )


_SCHEDULERS = (_slurm, _open_mpi, _kubernetes, _tpu)
