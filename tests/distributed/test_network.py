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


def add_interface(
    root: Path, name: str, *, virtual: bool, state: str = "up", flags: str = "0x1003"
) -> None:
    """As sysfs has it: a link into the devices, virtual ones below devices/virtual;
    numbered.
    """
    home = "devices/virtual/net" if virtual else "devices/pci0000:00/0000:00:03.0/net"
    write(
        root,
        {
            f"sys/{home}/{name}/operstate": f"{state}\n",
            f"sys/{home}/{name}/flags": f"{flags}\n",
        },
    )
    (root / "sys/class/net").mkdir(parents=True, exist_ok=True)
    number = len(list((root / "sys/class/net").iterdir())) + 1
    write(root, {f"sys/{home}/{name}/ifindex": f"{number}\n"})
    (root / "sys/class/net" / name).symlink_to(f"../../{home}/{name}")


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


def add_efa(root: Path, name: str = "rdmap16s27", *, driver: bool = True) -> None:
    pci = "sys/bus/pci/devices/0000:10:1b.0"
    write(root, {f"{pci}/vendor": "0x1d0f\n", f"{pci}/device": "0xefa2\n"})
    if driver:
        add_card(
            root, name, "100 Gb/sec (4X EDR)\n", board="", link_layer="Unspecified\n"
        )
        write(root, {f"sys/class/infiniband/{name}/device/vendor": "0x1d0f\n"})
        write(root, {f"sys/class/infiniband/{name}/device/device": "0xefa2\n"})


def machine(root: Path, gpus: int = 8, cards: int = 0) -> Path:
    """A sound one: one interface, GPUs, InfiniBand cards of 400 Gbit/s."""
    add_interface(root, "lo", virtual=True, state="unknown", flags="0x9")
    add_interface(root, "eth0", virtual=False)
    write(
        root,
        {
            "proc/sys/kernel/hostname": "gpu02\n",
            "etc/hosts": "127.0.0.1 localhost\n10.0.0.2 gpu02\n",
        },
    )
    write(root, {"proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n"})
    for i in range(gpus):
        (root / f"proc/driver/nvidia/gpus/0000:{i:02x}:00.0").mkdir(parents=True)
        write(root, {f"dev/nvidia{i}": "", "dev/nvidiactl": ""})
    for i in range(cards):
        add_card(root, f"mlx5_{i}", "400 Gb/sec (4X NDR)\n")
    return root


def add_plugin(root: Path, folder: str = "opt/amazon/ofi-nccl/lib") -> dict[str, str]:
    write(root, {f"{folder}/libnccl-net.so": "ELF"})
    return {"LD_LIBRARY_PATH": f"/usr/local/cuda/lib64:/{folder}"}


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
    "environ", [{}, SLURM, {"NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_DISABLE": "0"}]
)
@pytest.mark.parametrize(("gpus", "cards"), [(0, 0), (8, 8)])
def test_a_sound_machine_says_nothing(tmp_path, gpus, cards, environ):
    assert checks(machine(tmp_path, gpus, cards), environ) == {}


def test_a_sound_machine_of_aws_says_nothing(tmp_path):
    add_efa(machine(tmp_path))
    assert checks(tmp_path, SLURM | add_plugin(tmp_path)) == {}
    # is not for EFA
    assert (
        checks(tmp_path, SLURM | add_plugin(tmp_path) | {"NCCL_IB_DISABLE": "1"}) == {}
    )


def test_without_gpus_only_limits_and_clock_are_looked_at(tmp_path):
    machine(tmp_path, gpus=0, cards=1)
    environ = {f"NCCL_{name}_DISABLE": "1" for name in ("IB", "P2P", "SHM")}
    environ |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "nope"}
    bad = Limits(256, 256, 65_536, 64 << 20, 64 << 20, KernelClock(False, 16.0))
    assert set(checks(tmp_path, environ, bad)) == {"shm", "open-files", "clock"}
    machine(other := tmp_path / "gpus", gpus=8, cards=1)
    assert len(checks(other, environ, bad)) == 9
    assert set(checks(other, environ | {"JAX_PLATFORMS": "cpu"}, bad)) == {
        "shm",
        "open-files",
        "clock",
    }


# --- NCCL's settings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ("NCCL_IB_DISABLE=1", "nccl-ib-disabled"),
        ("NCCL_NET=Socket", "nccl-socket"),
        ("NCCL_P2P_DISABLE=1", "nccl-p2p-disabled"),
        ("NCCL_SHM_DISABLE=1", "nccl-shm-disabled"),
    ],
)
def test_settings_that_turn_a_transport_off(tmp_path, setting, check):
    machine(tmp_path, cards=2)
    name, _, value = setting.partition("=")
    (text,) = [checks(tmp_path, {name: value})[check]]
    assert text.startswith(setting) and f"unset {name}" in text
    write(
        tmp_path,
        {
            "home/me/.nccl.conf": f"# for a test\n{setting}\n",
            "etc/nccl.conf": f"{name}=0\n",
        },
    )
    (said,) = checks(tmp_path, {"HOME": "/home/me"}).items()
    assert said[0] == check and f"{setting} in /home/me/.nccl.conf: " in said[1]
    # the environment wins
    assert checks(tmp_path, {"HOME": "/home/me", name: "0"}) == {}
    assert checks(tmp_path, {name: "no"}) == {}  # for NCCL no number


def test_one_gpu_and_no_card_have_nothing_to_turn_off(tmp_path):
    machine(tmp_path, gpus=1)
    environ = {
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
    }
    assert checks(tmp_path, environ) == {}
    assert set(checks(tmp_path, environ | SLURM)) == {"nccl-socket"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("ens5", "matches no interface"),
        ("=eth", "matches no interface"),
        ("eth1", "eth1 is down"),
        ("eth1,ens5", "eth1 is down"),
        ("lo", "takes loopback"),
        ("^docker0", "takes loopback"),
        ("=eth0,lo", "takes loopback"),
    ],
)
def test_an_interface_that_nccl_cannot_use(tmp_path, value, said):
    add_interface(machine(tmp_path, cards=1), "eth1", virtual=False, state="down")
    text = checks(tmp_path, SLURM | {"NCCL_SOCKET_IFNAME": value})["nccl-interface"]
    assert said in text and text.endswith("reaches the other hosts: eth0")


@pytest.mark.parametrize(
    "value", ["eth", "eth0", "=eth0", "eth1,eth0", "^lo,docker", "^=lo", ""]
)
def test_an_interface_that_nccl_can_use(tmp_path, value):
    add_interface(machine(tmp_path, cards=1), "eth1", virtual=False, state="down")
    assert checks(tmp_path, SLURM | {"NCCL_SOCKET_IFNAME": value}) == {}


def test_no_interface_is_named_among_virtual_ones(tmp_path):
    machine(tmp_path, cards=1)
    for name, state in (("docker0", "up"), ("virbr0", "up"), ("br-5f3e", "down")):
        add_interface(tmp_path, name, virtual=True, state=state)
    add_interface(tmp_path, "bond0", virtual=True)
    (tmp_path / "sys/class/net/bond0/bonding").mkdir()
    add_interface(tmp_path, "vlan7", virtual=True)
    (tmp_path / "sys/class/net/vlan7/lower_eth0").mkdir()
    # NCCL leaves out the first two, the third is down, the others have cards
    assert checks(tmp_path) == {}
    add_interface(tmp_path, "tailscale0", virtual=True, state="unknown")
    assert checks(tmp_path) == {}  # with RDMA processes only meet there, over the first
    write(tmp_path, {"sys/devices/virtual/net/tailscale0/ifindex": "1\n"})
    text = checks(tmp_path)["nccl-interface-unset"]
    assert "may take tailscale0" in text and text.endswith(
        "what joins them: eth0, bond0, vlan7"
    )
    add_interface(tmp_path, "ib0", virtual=False)  # NCCL takes it first
    assert checks(tmp_path) == {}


def test_over_tcp_nccl_sends_over_all_interfaces(tmp_path):
    add_interface(machine(tmp_path), "veth5f", virtual=True)
    assert "may take veth5f" in checks(tmp_path, SLURM)["nccl-interface-unset"]


def test_the_way_out_of_a_pod_is_virtual_and_reaches_others(tmp_path):
    machine(tmp_path, cards=1)
    (tmp_path / "sys/class/net/eth0").rename(tmp_path / "sys/class/net/eth1")
    add_interface(tmp_path, "eth0", virtual=True)
    write(tmp_path, {"sys/devices/virtual/net/eth0/ifindex": "1\n"})
    assert "nccl-interface-unset" in checks(tmp_path, SLURM)
    route = "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    write(tmp_path, {"proc/net/route": f"Iface\tDestination\tGateway\tFlags\n{route}"})
    assert checks(tmp_path, SLURM) == {}


def test_a_pod_has_virtual_interfaces_alone(tmp_path):
    machine(tmp_path, cards=1)
    (tmp_path / "sys/class/net/eth0").unlink()
    add_interface(tmp_path, "eth0", virtual=True)
    add_interface(tmp_path, "net1", virtual=True)
    assert checks(tmp_path, SLURM) == {}


# --- cards, drivers, plugins ----------------------------------------------------------


def test_several_hosts_without_rdma(tmp_path):
    machine(tmp_path)
    assert checks(tmp_path, SLURM) == {}  # a network of Ethernet alone
    write(tmp_path, {"sys/bus/pci/devices/0000:5e:00.0/class": "0x020000\n"})
    write(tmp_path, {"sys/bus/pci/devices/0000:5e:00.0/vendor": MELLANOX})
    assert checks(tmp_path) == {}  # a lone one needs none
    assert (
        "cards (0000:5e:00.0) have no driver" in checks(tmp_path, SLURM)["rdma-missing"]
    )
    assert checks(tmp_path, SLURM | add_plugin(tmp_path, "usr/local/tcpx/lib64")) == {}


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
    write(tmp_path, {"sys/bus/pci/devices/0000:5e:00.0/class": "0x020700\n"})
    # as docs/launch.md has it for one
    environ = environ | {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    limits = replace(SOUND, open_files=1024)
    assert checks(tmp_path, environ, limits) == {}
    assert (
        len(checks(tmp_path, environ | SLURM | {"SLURM_STEP_NUM_NODES": "4"}, limits))
        == 4
    )


def test_a_container_that_was_not_given_the_cards(tmp_path):
    machine(tmp_path, cards=1)
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert "--device=/dev/infiniband" in checks(tmp_path)["rdma-container"]


def test_efa_without_its_driver(tmp_path):
    add_efa(machine(tmp_path), driver=False)
    (said,) = checks(tmp_path).items()
    assert said[0] == "efa-driver" and "0000:10:1b.0" in said[1]


@pytest.mark.parametrize("name", ["efa_0", "rdmap16s27"])
def test_efa_without_its_plugin(tmp_path, name):
    add_efa(machine(tmp_path), name)
    (said,) = checks(tmp_path).items()
    assert said[0] == "nccl-plugin" and "install aws-ofi-nccl" in said[1]
    environ = add_plugin(tmp_path)  # there, but the loader is not told
    path = f"LD_LIBRARY_PATH={environ['LD_LIBRARY_PATH'].rpartition(':')[2]}:$LD_LIBRARY_PATH"
    assert path in checks(tmp_path)["nccl-plugin"] and checks(tmp_path, environ) == {}
    (tmp_path / "etc/ld.so.cache").write_bytes(
        b"ld.so-1.7.0\0\xff/opt/amazon/ofi-nccl/lib/libnccl-net.so\0"
    )
    assert checks(tmp_path) == {}
    said = checks(tmp_path, {"NCCL_NET_PLUGIN": "gib"})["nccl-plugin"]
    assert "does not find NCCL_NET_PLUGIN=gib" in said
    assert (
        checks(tmp_path, {"NCCL_NET_PLUGIN": "/opt/amazon/ofi-nccl/lib/libnccl-net.so"})
        == {}
    )
    write(tmp_path, {"usr/lib/libnccl-net-ofi.so": "ELF"})
    assert checks(tmp_path, {"NCCL_NET_PLUGIN": "ofi"}) == {}


def test_the_plugin_of_efa_is_of_no_use_without_efa(tmp_path):
    add_plugin(machine(tmp_path))  # as images of AWS have it
    assert checks(tmp_path, SLURM) == {}


def test_a_plugin_of_google_cloud_that_the_loader_does_not_find(tmp_path):
    machine(tmp_path, cards=1)
    environ = add_plugin(tmp_path, "usr/local/gib/lib64")
    assert "lies in /usr/local/gib/lib64" in checks(tmp_path)["nccl-plugin"]
    assert checks(tmp_path, environ) == {}


def test_ports_that_are_not_active(tmp_path):
    machine(tmp_path, cards=2)
    down = {"state": "1: DOWN\n", "phys_state": "2: Polling\n"}
    add_card(tmp_path, "mlx5_2", "10 Gb/sec (4X SDR)\n", **down)
    add_card(tmp_path, "mlx5_3", "400 Gb/sec (4X NDR)\n", state="2: INIT\n")
    add_card(
        tmp_path,
        "mlx5_4",
        "10 Gb/sec (4X SDR)\n",
        "MT_42",
        link_layer="Ethernet\n",
        **down,
    )  # not in use
    # the second port of a card whose first is active
    at = "sys/class/infiniband/mlx5_1/ports/2"
    write(tmp_path, {f"{at}/{name}": text for name, text in down.items()})
    # one whose second port is a device of its own
    pci = tmp_path / "sys/devices/pci0000:5d/0000:5e:00"
    pci.parent.mkdir(parents=True)
    for name, function, state in (("mlx5_6", 0, {}), ("mlx5_7", 1, down)):
        add_card(tmp_path, name, "200 Gb/sec (4X HDR)\n", "MT_43", **state)
        device = tmp_path / f"sys/class/infiniband/{name}/device"
        device.symlink_to(device.rename(f"{pci}.{function}"))
    (said,) = checks(tmp_path).items()
    text = "not active: mlx5_2 port 1 is 1: DOWN (2: Polling), mlx5_3 port 1 is 2: INIT (5: LinkUp); "
    assert said[0] == "ib-port" and text in said[1]


def test_cards_of_a_lone_machine_need_no_cable(tmp_path):
    machine(tmp_path)
    for i in range(8):
        add_card(
            tmp_path,
            f"mlx5_{i}",
            "10 Gb/sec (4X SDR)\n",
            state="1: DOWN\n",
            phys_state="2: Polling\n",
        )
    add_card(
        tmp_path, "mlx5_8", "100 Gb/sec (4X EDR)\n", "MT_42", link_layer="Ethernet\n"
    )
    assert checks(tmp_path) == {}
    assert set(checks(tmp_path, SLURM)) == {"ib-port"}


def test_a_roce_port_is_in_use_where_its_like_are(tmp_path):
    machine(tmp_path)
    roce = {"link_layer": "Ethernet\n"}
    add_card(tmp_path, "rocep0", "400 Gb/sec (4X NDR)\n", **roce)
    add_card(
        tmp_path,
        "rocep1",
        "40 Gb/sec (4X QDR)\n",
        state="1: DOWN\n",
        phys_state="3: Disabled\n",
        **roce,
    )
    assert set(checks(tmp_path)) == {"ib-port"}


def test_a_port_that_is_slower_than_its_like(tmp_path):
    machine(tmp_path, cards=3)
    # for storage
    add_card(tmp_path, "mlx5_8", "200 Gb/sec (4X HDR)\n", board="MT_0000000359")
    assert checks(tmp_path) == {}
    add_card(tmp_path, "mlx5_9", "200 Gb/sec (2X NDR)\n")
    (said,) = checks(tmp_path).items()
    assert said[0] == "ib-rate" and "mlx5_9 port 1 has 200 of 400 Gbit/s" in said[1]


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
    assert (said is None) == (not found) and (said or "") in found.get("shm", "")


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
    assert (said is None) == (not found) and (said or "") in found.get("open-files", "")
    alone = checks(machine(tmp_path / "alone", gpus), limits=limits)
    assert (soft < 1024) == ("open-files" in alone)


@pytest.mark.parametrize(("processes", "enough"), [("100", True), ("101", False)])
def test_open_files_of_many_processes_without_gpus(tmp_path, processes, enough):
    machine(tmp_path, gpus=0)
    found = checks(
        tmp_path, SLURM | {"SLURM_NTASKS": processes}, replace(SOUND, open_files=1024)
    )
    assert (found == {}) == enough and (
        "needs 4096" in found.get("open-files", "")
    ) == (not enough)


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
    assert (said is None) == (not found) and (said or "") in found.get("clock", "")


# --- joining --------------------------------------------------------------------------


def test_a_name_that_is_loopback_matters_to_one_of_several_without_gpus(tmp_path):
    machine(tmp_path, gpus=0)
    hosts = {"etc/hosts": "127.0.0.1 localhost # gpu02\n127.0.1.1\tgpu02.local gpu02\n"}
    write(tmp_path, hosts)
    assert checks(tmp_path) == {}
    assert (
        "gpu02, this machine, is 127.0.1.1"
        in checks(tmp_path, SLURM)["hostname-loopback"]
    )
    write(machine(tmp_path / "gpus"), hosts)  # NCCL goes by interfaces
    assert "hostname-loopback" not in checks(tmp_path / "gpus", SLURM)
    tpus = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
    assert checks(tmp_path, tpus) == {}


def test_agents_that_meet_at_loopback(tmp_path):
    environ = {
        "JAXDIST_AGENTS": "2",
        "JAXDIST_AGENT": "1",
        "JAXDIST_AGENTS_AT": "127.0.1.1:4000",
    }
    assert (
        "2 agents meet at 127.0.1.1"
        in checks(tmp_path, environ)["coordinator-loopback"]
    )
    assert checks(tmp_path, environ | {"JAXDIST_AGENTS_AT": "node0:4000"}) == {}


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
    environ = SLURM | add_plugin(tmp_path)
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
        "NCCL_SOCKET_IFNAME",
        "NCCL_NET_PLUGIN",
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
        assert fault.check in CHECKS and fault.fault and fault.cure
    empty = tmp_path / "nothing"
    assert (
        network_faults(empty, {}, SOUND) == []
        and network_faults(files[0], {}, SOUND) == []
    )


# --- this machine, the command, the docs ----------------------------------------------


def test_this_machine():
    limits = read_limits()
    assert (
        limits.open_files
        and limits.open_files > 0
        and limits.shm_bytes
        and limits.shm_bytes > 0
    )
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
    add_efa(machine(tmp_path))
    (tmp_path / "dev/shm").mkdir()
    environ = {"NCCL_P2P_DISABLE": "1"}
    report = doctor.examine(environ, tmp_path)
    found = {
        fault["check"]: fault for fault in json.loads(json.dumps(report))["network"]
    }
    assert {"nccl-p2p-disabled", "nccl-plugin"} <= set(found)
    section = doctor.as_text(report).partition("\nnetwork\n")[2]
    assert (
        "  nccl-p2p-disabled: NCCL_P2P_DISABLE=1: the 8 GPUs do not use NVLink"
        in section
    )
    assert "; cure: unset NCCL_P2P_DISABLE\n" in section
    assert doctor.as_text({"network": []}) == "network\n  none"


def test_each_check_is_in_the_docs():
    page = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \|",
        page.partition("## Network\n")[2].partition("\n## ")[0],
        re.M,
    )
    assert rows == list(CHECKS) and len(rows) > 15
