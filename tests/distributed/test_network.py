"""Faults of a machine's network, each on a tree of files as such a machine has them."""

import json
import os
import random
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdist import doctor
from jaxdist.distributed.network import CHECKS, network_faults
from jaxdist.hardware.network import KernelClock, Limits, kernel_clock, read_limits
from support.paths import DOCS

GIB = 2**30
SOUND = Limits(65_536, 1_048_576, None, 64 * GIB, 60 * GIB, KernelClock(True, 0.02))
SLURM = {"SLURM_STEP_NODELIST": "gpu[01-04]", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}
ACTIVE = {
    "state": "4: ACTIVE\n",
    "phys_state": "5: LinkUp\n",
    "link_layer": "InfiniBand\n",
}
MELLANOX = "0x15b3\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (file := root / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def add_card(
    root: Path, name: str, rate: str, board: str = "MT_0000000838", **port: str
) -> None:
    at = f"sys/class/infiniband/{name}"
    files = {
        f"{at}/ports/1/{key}": value
        for key, value in (ACTIVE | {"rate": rate} | port).items()
    }
    files |= {f"{at}/device/vendor": MELLANOX, f"{at}/device/device": "0x1021\n"}
    write(root, files | ({f"{at}/board_id": f"{board}\n"} if board else {}))
    number = len(list((root / "sys/class/infiniband").iterdir())) - 1
    write(root, {f"dev/infiniband/uverbs{number}": ""})


def add_efa(root: Path, name: str = "rdmap16s27") -> None:
    add_card(root, name, "100 Gb/sec (4X EDR)\n", board="", link_layer="Unspecified\n")
    write(root, {f"sys/class/infiniband/{name}/device/vendor": "0x1d0f\n"})


def machine(root: Path, gpus: int = 8, cards: int = 0) -> Path:
    """A sound one: GPUs, InfiniBand cards of 400 Gbit/s."""
    write(root, {"proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n"})
    for i in range(gpus):
        (root / f"proc/driver/nvidia/gpus/0000:{i:02x}:00.0").mkdir(parents=True)
        write(root, {f"dev/nvidia{i}": "", "dev/nvidiactl": ""})
    for i in range(cards):
        add_card(root, f"mlx5_{i}", "400 Gb/sec (4X NDR)\n")
    return root


def checks(
    root: Path, environ: dict[str, str] | None = None, limits: Limits = SOUND
) -> dict[str, str]:
    """Returns {check: fault and cure}."""
    faults = network_faults(root, environ or {}, limits)
    assert all(fault.check in CHECKS and fault.fault and fault.cure for fault in faults)
    assert len({fault.check for fault in faults}) == len(faults)
    return {fault.check: f"{fault.fault}; {fault.cure}" for fault in faults}


# --- sound machines say nothing -------------------------------------------------------


@pytest.mark.parametrize(
    "environ", [{}, SLURM, {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0"}]
)
@pytest.mark.parametrize(("gpus", "cards"), [(0, 0), (8, 8)])
def test_a_sound_machine_says_nothing(tmp_path, gpus, cards, environ):
    assert checks(machine(tmp_path, gpus, cards), environ) == {}


def test_a_sound_machine_of_aws_says_nothing(tmp_path):
    add_efa(machine(tmp_path))
    assert checks(tmp_path, SLURM) == {}
    # is not for EFA
    assert checks(tmp_path, SLURM | {"NCCL_IB_DISABLE": "1"}) == {}


def test_without_gpus_only_limits_and_clock_are_looked_at(tmp_path):
    machine(tmp_path / "cpus", gpus=0, cards=1)
    machine(tmp_path / "gpus", gpus=8, cards=1)
    environ = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    bad = Limits(256, 256, 65_536, 64 << 20, 64 << 20, KernelClock(False, 16.0))
    of_all = {"shm", "open-files", "clock"}
    assert set(checks(tmp_path / "cpus", environ, bad)) == of_all
    assert set(checks(tmp_path / "gpus", environ, bad)) == set(CHECKS)
    on_cpus = environ | {"JAX_PLATFORMS": "cpu"}
    assert set(checks(tmp_path / "gpus", on_cpus, bad)) == of_all


# --- NCCL's settings ------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["NCCL_IB_DISABLE=1", "NCCL_NET=Socket"])
def test_settings_that_make_nccl_fall_back_to_sockets(tmp_path, setting):
    machine(tmp_path, cards=2)
    name, _, value = setting.partition("=")
    text = checks(tmp_path, {name: value})["nccl-socket"]
    assert text.startswith(setting)
    assert text.endswith(f"unset {name}")
    assert "mlx5_0, mlx5_1 are here" in text
    write(
        tmp_path,
        {
            "home/me/.nccl.conf": f"# for a test\n{setting}\n",
            "etc/nccl.conf": f"{name}=0\n",
        },
    )
    found = checks(tmp_path, {"HOME": "/home/me"})
    assert found.keys() == {"nccl-socket"}
    assert f"{setting} in /home/me/.nccl.conf: " in found["nccl-socket"]
    # the environment wins
    assert checks(tmp_path, {"HOME": "/home/me", name: "0"}) == {}
    assert checks(tmp_path, {name: "no"}) == {}  # for NCCL no number


def test_a_lone_machine_without_cards_has_nothing_to_turn_off(tmp_path):
    machine(tmp_path, gpus=1)
    environ = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    assert checks(tmp_path, environ) == {}
    assert set(checks(tmp_path, environ | SLURM)) == {"nccl-socket"}


@pytest.mark.parametrize(
    "environ",
    [
        SLURM | {"SLURM_STEP_NODELIST": "gpu02", "SLURM_STEP_NUM_NODES": "1"},
        {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "4",
            "RANK": "1",
            "MASTER_ADDR": "gpu02",
            "MASTER_PORT": "1",
        },
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "1",
        },
    ],
)
def test_several_processes_of_one_machine_need_no_network(tmp_path, environ):
    machine(tmp_path)
    environ = environ | {"NCCL_NET": "Socket"}
    limits = replace(SOUND, open_files=1024)
    assert checks(tmp_path, environ, limits) == {}
    several = environ | SLURM | {"SLURM_STEP_NUM_NODES": "4"}
    assert set(checks(tmp_path, several, limits)) == {"nccl-socket", "open-files"}


# --- limits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "size", "free", "said"),
    [
        (8, 64 << 20, 64 << 20, "64 MiB, 64 MiB free: NCCL needs 1 GiB"),
        (8, 8 * GIB, 100 << 20, "8.00 GiB, 100 MiB free"),
        (8, GIB, GIB, None),
        (1, 64 << 20, 64 << 20, "data workers"),
        (0, 64 << 20, 1 << 20, "data workers"),
        (0, 512 << 20, 1 << 20, None),
    ],
)
def test_shared_memory(tmp_path, gpus, size, free, said):
    found = checks(
        machine(tmp_path, gpus),
        limits=replace(SOUND, shm_bytes=size, shm_free_bytes=free),
    )
    assert (said is None) == (not found)
    assert (said or "") in found.get("shm", "")


@pytest.mark.parametrize(
    ("gpus", "soft", "hard", "said"),
    [
        (8, 1024, 1_048_576, "`ulimit -n 65536`"),
        (8, 1024, 4096, "`ulimit -n 4096`"),
        (8, 1024, None, "`ulimit -n 65536`"),
        (8, 1024, 1024, "ask root"),
        (8, 4096, 4096, None),
        (0, 1024, 4096, None),
        (0, 256, 4096, "256 files"),
    ],
)
def test_open_files(tmp_path, gpus, soft, hard, said):
    limits = replace(SOUND, open_files=soft, open_files_hard=hard)
    found = checks(machine(tmp_path / "cards", gpus, cards=gpus), limits=limits)
    assert (said is None) == (not found)
    assert (said or "") in found.get("open-files", "")
    alone = checks(machine(tmp_path / "alone", gpus), limits=limits)
    assert (soft < 1024) == ("open-files" in alone)


@pytest.mark.parametrize(("processes", "enough"), [("100", True), ("101", False)])
def test_open_files_of_many_processes_without_gpus(tmp_path, processes, enough):
    machine(tmp_path, gpus=0)
    found = checks(
        tmp_path, SLURM | {"SLURM_NTASKS": processes}, replace(SOUND, open_files=1024)
    )
    assert (found == {}) == enough
    assert ("needs 4096" in found.get("open-files", "")) == (not enough)


def test_memory_that_cannot_be_locked(tmp_path):
    limits = replace(SOUND, locked_bytes=8 << 20)
    assert (
        checks(
            machine(tmp_path / "an eighth", cards=1),
            limits=replace(SOUND, locked_bytes=32 * GIB),
        )
        == {}
    )
    assert (
        "may lock 8 MiB"
        in checks(machine(tmp_path, cards=1), limits=limits)["locked-memory"]
    )
    # root, outside a container
    write(tmp_path, {"proc/self/status": "CapEff:\t0000003fffffffff\n"})
    assert checks(tmp_path, limits=limits) == {}
    assert checks(machine(tmp_path / "no cards"), limits=limits) == {}


@pytest.mark.parametrize(
    ("clock", "said"),
    [
        (KernelClock(False, 16.0), "no time service"),
        (KernelClock(True, 4.2), "4.2 s off"),
        (KernelClock(True, 0.5), None),
        (None, None),
    ],
)
def test_a_clock_that_nothing_keeps(tmp_path, clock, said):
    found = checks(tmp_path, limits=replace(SOUND, clock=clock))
    assert (said is None) == (not found)
    assert (said or "") in found.get("clock", "")


# --- odd trees ------------------------------------------------------------------------


def garbage(chance: random.Random) -> bytes:
    pieces = [
        b"",
        b"\0",
        b"\xff\xfe",
        b"4: ACTIVE",
        b"-1",
        b"99999999999 Gb/sec",
        b"0x",
        b"0x" + b"f" * 99,
        b"=",
    ]
    pieces += [
        b"\n",
        b"NCCL_NET=Socket",
        b"CapEff:\t",
        b"1e999 Gb/sec",
        b"\x1b[31m",
        bytes(chance.randbytes(40)),
    ]
    return b"".join(chance.choices(pieces, k=chance.randrange(6)))


@pytest.mark.parametrize("seed", range(40))
def test_no_tree_and_no_environment_raises(tmp_path, seed):
    chance = random.Random(seed)
    machine(tmp_path, gpus=chance.randrange(3), cards=2)
    add_efa(tmp_path)
    environ = dict(SLURM)
    files = [
        path
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]
    assert len(files) > 20
    for file in chance.sample(files, 12):
        match chance.randrange(5):
            case 0:
                file.write_bytes(garbage(chance))
            case 1:
                file.unlink()
            case 2:
                file.unlink()
                file.mkdir()
            case 3:
                file.unlink()
                file.symlink_to(file.name)  # to itself
            case 4:
                file.unlink()
                os.mkfifo(file)
    names = [
        *environ,
        "NCCL_NET",
        "NCCL_IB_DISABLE",
        "NCCL_CONF_FILE",
        "HOME",
        "http_proxy",
        "no_proxy",
    ]
    names += [
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "TPU_WORKER_HOSTNAMES",
        "TPU_WORKER_ID",
        "JAXDIST_AGENTS",
    ]
    for name in chance.sample(names, 6):
        environ[name] = chance.choice(
            ["", ",", "^", "=", "/", "\0", "::1", "a,b", "-1", "http://[", "9" * 5000]
        )
        environ[name] += "".join(
            chance.choices(string.printable, k=chance.randrange(4))
        )
    limits = Limits(
        *(chance.choice([None, 0, -1, 2**63]) for _ in range(5)),
        KernelClock(True, float("nan")),
    )
    for fault in network_faults(tmp_path, environ, limits):
        assert fault.check in CHECKS
        assert fault.fault
        assert fault.cure
    empty = tmp_path / "nothing"
    assert network_faults(empty, {}, SOUND) == []
    assert network_faults(files[0], {}, SOUND) == []


# --- this machine, the command, the docs ----------------------------------------------


def test_this_machine():
    limits = read_limits()
    assert limits.open_files
    assert limits.open_files > 0
    assert limits.shm_bytes
    assert limits.shm_bytes > 0
    assert limits.shm_free_bytes <= limits.shm_bytes
    clock = kernel_clock()
    assert clock is None or 0 <= clock.max_error_s < 3600
    json.dumps(
        [
            fault._asdict()
            for fault in network_faults(Path("/"), dict(os.environ), limits)
        ]
    )


def test_the_doctor_prints_faults(tmp_path):
    machine(tmp_path, cards=1)
    (tmp_path / "dev/shm").mkdir(parents=True)
    environ = {"NCCL_NET": "Socket"}
    report = doctor.examine(environ, tmp_path)
    found = {
        fault["check"]: fault for fault in json.loads(json.dumps(report))["network"]
    }
    assert "nccl-socket" in found
    section = doctor.as_text(report).partition("\nnetwork\n")[2]
    assert "  nccl-socket: NCCL_NET=Socket: NCCL sends over TCP" in section
    assert "; fix: unset NCCL_NET\n" in section
    assert doctor.as_text({"network": []}) == "network\n  none"


def test_each_check_is_in_the_docs():
    page = (DOCS / "how-to/preflight.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \|",
        page.partition("## Network\n")[2].partition("\n## ")[0],
        re.M,
    )
    assert rows == list(CHECKS)
    assert len(rows) == 5
