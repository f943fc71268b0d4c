"""Setup before a process touches its devices: flags, compile cache, process group."""

import contextlib
import functools
import os
import platform as system
import re
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import cache_key  # neither has a public name; see where they are used
from jax._src import lib as jax_lib

from jaxdist.config import ConfigError
from jaxdist.distributed.cluster import LOOPBACK, TORCHRUN, find_cluster, find_torchrun
from jaxdist.distributed.coordination import FOREVER_S, kv_client
from jaxdist.distributed.local_devices import visible_gpus
from jaxdist.hardware import flags

LAUNCH = "jaxdist launch"
TIMEOUTS: dict[str, Any] = {
    "heartbeat_timeout_seconds": 60,  # a frozen machine is noticed after this time
    "shutdown_timeout_seconds": 120,  # others wait this long for the first to report
}


def prepare(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Sets the platform's flags and the compile cache, and joins a process group.

    The user's own flags and cache settings win.

    Returns:
      Lines with the flags that were set and the launcher that was found; None if there
      are neither.
    """
    add_threads(environ)
    platform = flags.detect_platform(environ)
    family = flags.detect_family(environ)
    lines = flags.left_to_the_user(platform, environ, family=family)
    changed = flags.flag_environment(platform, environ, family=family)
    environ.update(changed)
    skip_absent_tpu(environ)
    folder = compile_cache_folder(environ)
    if folder:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    lines = [f"flags: {name}={value}" for name, value in changed.items()] + lines
    joined = join_processes(environ)
    if joined:
        lines.append(joined)
    return "\n".join(lines) or None


def skip_absent_tpu(environ: Mapping[str, str]) -> None:
    """Keeps jax from searching for TPUs on a machine without any.

    The search is long and loud. It happens where libtpu is installed for its compiler.
    """
    is_cpu = flags.detect_platform(environ) == "cpu"
    if is_cpu and "JAX_PLATFORMS" not in environ and find_spec("libtpu"):
        jax.config.update("jax_platforms", "cpu")


def add_threads(environ: MutableMapping[str, str]) -> None:
    """Gives emulated CPU devices four threads each, unless the user has set NPROC.

    A collective of XLA's CPU backend holds a thread while it waits for other devices.
    With one thread per device, a device in two collectives at once can starve the
    others for ever.
    """
    match = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", "")
    )
    if match and int(match[1]) > 1:
        environ.setdefault("NPROC", str(4 * int(match[1])))


def compile_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Chooses the folder of compiled programs.

    It is None if the user has set one, or has no home.
    """
    # raised without HOME, for a container's uid that passwd does not know
    with contextlib.suppress(RuntimeError):
        if "JAX_COMPILATION_CACHE_DIR" not in environ:
            return Path.home() / ".cache" / "jaxdist" / "xla"
    return None


def join_processes(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Joins the process group of the launcher, if there is one.

    Launchers are `jaxdist launch` (JAXDIST_COORDINATOR, JAXDIST_NUM_PROCESSES,
    JAXDIST_PROCESS_ID), torchrun, and those that `jax.distributed` knows: Slurm, Open
    MPI, Kubernetes and a multi-host TPU.

    Returns:
      A line with the process and its launcher, or None.

    Raises:
      ConfigError: a launcher was found, but its group was not; or two launchers differ.
    """
    launcher = detect_launcher(environ)
    if launcher is None:
        return None
    # `trainer.preemption` does more; jax's service would take SIGTERM from every other
    # handler.
    jax.config.update("jax_enable_preemption_service", False)
    _bypass_proxies(environ)
    group = _find_group(environ)
    if group:
        address, number, rank = group
        # launch has chosen the devices: under Slurm, jax would choose again among them.
        options = TIMEOUTS | {"cluster_detection_method": "deactivate"}
        if _is_one_machine(environ):
            options["coordinator_bind_address"] = address
            _listen_on_loopback()
            _share_compiled_programs()
        if launcher == TORCHRUN:
            options["local_device_ids"] = _local_gpus(environ)
        jax.distributed.initialize(address, number, rank, **options)
        return f"process {rank} of {number}, joined through {launcher}"
    try:
        jax.distributed.initialize(**TIMEOUTS)
    except ValueError as error:
        raise ConfigError(
            f"{launcher} was detected, but its process group is not known ({error}); start all processes "
            f"through it, or unset its variables to run alone"
        ) from error
    return f"process {jax.process_index()} of {jax.process_count()}, joined through {launcher}"


def _find_group(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Reads the group that `launch` or torchrun has set.

    Returns:
      (address of process 0, number of processes, index of this one), or None.
    """
    address = environ.get("JAXDIST_COORDINATOR")
    if address:
        number = int(environ["JAXDIST_NUM_PROCESSES"])
        return address, number, int(environ["JAXDIST_PROCESS_ID"])
    cluster = find_torchrun(environ)
    if cluster:
        return f"{cluster.host}:{cluster.port}", cluster.number, cluster.index
    return None


def _bypass_proxies(environ: MutableMapping[str, str]) -> None:
    """Lets processes reach the first one's host without the environment's proxies.

    Processes join by gRPC, which would ask the proxy and wait. gRPC reads variables in
    lower case, and no_grpc_proxy before no_proxy.
    """
    if not environ.keys() & {"grpc_proxy", "https_proxy", "http_proxy"}:
        return
    group = _find_group(environ)
    host = LOOPBACK
    # joining the group reports these errors
    with contextlib.suppress(ConfigError, KeyError, ValueError):
        host = group[0].rpartition(":")[0] if group else find_cluster(environ).host
    others = environ.get("no_grpc_proxy", environ.get("no_proxy", ""))
    environ["no_grpc_proxy"] = ",".join(filter(None, (others, host)))


def _local_gpus(environ: Mapping[str, str]) -> list[int] | None:
    """Lists the visible GPUs that belong to this process of torchrun; None = all.

    Raises:
      ConfigError: several processes of a machine would share TPUs.
    """
    local = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    platform = flags.detect_platform(environ)
    if platform == "tpu" and local > 1:
        raise ConfigError(
            f"torchrun --nproc-per-node={local}: one process has all TPUs of a host; give 1"
        )
    if platform != "gpu" or local <= 1:
        return None
    share = len(visible_gpus(environ)) // local
    first = share * int(environ.get("LOCAL_RANK", "0"))
    # fewer GPUs than processes: each process sees only its own already
    return list(range(first, first + share)) or None


def _listen_on_loopback() -> None:
    """Makes CPU collectives listen on loopback instead of the host's address.

    jax 0.10 to 0.12 has no setting for the address: its flag only names gloo or mpi.
    """
    extension: Any = jax_lib._jax  # type: ignore[attr-defined]  # without types
    make = getattr(extension, "make_gloo_tcp_collectives", None)
    if make:
        extension.make_gloo_tcp_collectives = functools.partial(make, hostname=LOOPBACK)


def _share_compiled_programs() -> None:
    """Gives a CPU program the same key in the compile cache on all local processes.

    jax puts each process's devices into the key, and only process 0 writes. All others
    would compile the step at each start (7 to 9 s of CPU for a small model). jax has no
    setting for it.
    """
    hash_devices = cache_key._hash_accelerator_config

    def hash_shared(hash_obj: Any, accelerators: np.ndarray) -> Any:
        if accelerators.flat[0].platform != "cpu":
            return hash_devices(hash_obj, accelerators)
        return hash_obj.update(f"{accelerators.size} x {_instruction_set()}".encode())

    cache_key._hash_accelerator_config = hash_shared


@functools.cache
def _instruction_set() -> str:
    """Describes the instructions of this processor: others may not run its programs."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{system.machine()} {system.processor()}"


@contextlib.contextmanager
def lead_first(program: str) -> Iterator[None]:
    """Lets process 0 compile first on a shared machine.

    The other processes read its cache. So the machine compiles a program once and not
    once per process. All processes enter with the same name. Nobody waits for a name
    that was used already.

    Args:
      program: name of the program that the body compiles.
    """
    client = kv_client()
    settings: Any = jax.config
    is_shared = (
        client is not None
        and _is_one_machine(os.environ)
        and jax.default_backend() == "cpu"
        and settings.jax_enable_compilation_cache
        and settings.jax_compilation_cache_dir
    )
    if is_shared and jax.process_index() > 0:
        client.blocking_key_value_get(f"jaxdist/compiled/{program}", 1000 * FOREVER_S)
    try:
        yield
    finally:
        if is_shared and jax.process_index() == 0:
            client.key_value_set(f"jaxdist/compiled/{program}", "", True)


def _is_one_machine(environ: Mapping[str, str]) -> bool:
    group = _find_group(environ)
    return group is not None and group[0].startswith(LOOPBACK)


def detect_launcher(environ: Mapping[str, str]) -> str | None:
    """Finds the launcher that started this process as one of several, or None.

    Raises:
      ConfigError: some of torchrun's variables are missing, or they contradict a
        scheduler's.
    """
    if "JAXDIST_COORDINATOR" in environ:  # whatever else the environment says
        return LAUNCH
    if find_torchrun(environ):
        return TORCHRUN
    # srun sets the step's variables; a batch script on its own is one process of no
    # group.
    if int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_NODELIST" in environ:
        return "Slurm"
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"} <= environ.keys():
        return "Kubernetes"
    if "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return "a multi-host TPU"
    return None
