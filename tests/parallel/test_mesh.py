"""Mesh sizes, their faults, slices real and emulated, and how a run joins its
processes.
"""

import json
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.distributed import initialize
from jaxdist.parallel import mesh as meshes
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import DcnConfig, MeshConfig, build_mesh, resolve_mesh
from jaxdist.parallel.placement import axes_between_hosts, slow_axis_warnings
from jaxdist.planner import targets


def faults(config: MeshConfig, devices: int = 8, slices: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(config, devices, slices)
    return str(caught.value)


def test_too_few_cpu_devices_get_the_flag_that_emulates_more():
    config = MeshConfig(fsdp=4, tensor=2)
    with pytest.raises(ConfigError) as error:
        resolve_mesh(config, 1, emulates=True)
    assert str(error.value).endswith(
        "or emulate 8 on this CPU: start with "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    )
    for devices, emulates in ((1, False), (12, True)):  # 12: too many, not too few
        with pytest.raises(ConfigError) as error:
            resolve_mesh(config, devices, emulates=emulates)
        assert "XLA_FLAGS" not in str(error.value)


def test_the_rest_goes_to_the_axis_that_is_minus_one():
    assert resolve_mesh(MeshConfig(tensor=2), 8).sizes["data"] == 4
    shape = resolve_mesh(MeshConfig(data=2, fsdp=-1, tensor=2), 8)
    assert shape.sizes == {
        "pipeline": 1,
        "data": 2,
        "fsdp": 2,
        "expert": 1,
        "context": 1,
        "tensor": 2,
    }
    assert (shape.num_devices, shape.batch_shards) == (8, 4)
    assert str(shape) == "data 2 x fsdp 2 x tensor 2"
    assert str(resolve_mesh(MeshConfig(), 1))


def test_two_unknown_sizes_are_refused():
    text = faults(MeshConfig(data=-1, fsdp=-1))
    assert "mesh.data and mesh.fsdp are both -1" in text
    assert "give the other a size" in text


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (MeshConfig(data=1, fsdp=3), "fsdp 3 needs 3 devices, there are 8"),
        (MeshConfig(data=2, fsdp=8), "data 2 x fsdp 8 needs 16 devices, there are 8"),
        (MeshConfig(fsdp=3), "whose product divides 8"),
        (MeshConfig(tensor=0), "mesh.tensor=0: must be >= 1"),
        (MeshConfig(data=-2), "mesh.data=-2: must be >= 1, or -1 once"),
    ],
)
def test_sizes_that_do_not_make_the_devices_are_refused(config, needs):
    assert needs in faults(config)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_without_fsdp_is_refused(zero):
    assert "set mesh.fsdp" in faults(MeshConfig(zero=zero))
    assert resolve_mesh(MeshConfig(fsdp=2, zero=zero), 8).sizes["fsdp"] == 2
    assert "must be 0, 1, 2 or 3" in faults(MeshConfig(zero=4))


def test_all_faults_come_at_once():
    config = MeshConfig(expert=0, context=-2, data=-1, fsdp=-1, dcn=DcnConfig(data=0))
    assert len(faults(config).splitlines()) == 4


@pytest.mark.parametrize("axis", ["context", "expert", "tensor"])
def test_axes_that_talk_in_every_layer_refuse_dcn_unless_forced(axis):
    dcn = {"data": 1, axis: 2}
    text = faults(MeshConfig(**{axis: 2, "dcn": DcnConfig(**dcn)}), 8, 2)
    assert f"mesh.dcn.{axis}=2" in text
    assert "mesh.dcn.force=true" in text
    forced = MeshConfig(**{axis: 2, "dcn": DcnConfig(**dcn, force=True)})
    assert resolve_mesh(forced, 8, 2).dcn[axis] == 2


def test_dcn_sizes_must_make_the_slices_and_divide_their_axes():
    assert resolve_mesh(MeshConfig(fsdp=4), 8, 2).dcn["data"] == 2
    text = faults(MeshConfig(fsdp=4, dcn=DcnConfig(data=1)), 8, 2)
    assert "mesh.dcn: all 1 needs 1 slices, there are 2" in text
    text = faults(MeshConfig(data=1, fsdp=8), 8, 2)
    assert (
        "mesh.dcn.data=2 does not divide mesh.data=1; make mesh.data a multiple of 2"
        in text
    )
    with pytest.raises(
        ConfigError, match=r"mesh\.dcn\.fsdp=4 does not divide mesh\.fsdp=2"
    ):
        build_mesh(MeshConfig(data=4, fsdp=2, dcn=DcnConfig(data=1, fsdp=4)))


def test_emulated_slices_are_outermost_and_tensor_is_innermost():
    assert jax.device_count() == 8
    config = MeshConfig(data=2, fsdp=2, tensor=2, dcn=DcnConfig(data=1, fsdp=2))
    mesh = build_mesh(config)
    assert tuple(mesh.shape) == meshes.AXES
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    # Slices are devices 0-3 and 4-7, and they lie along fsdp; inside one, data then
    # tensor.
    np.testing.assert_array_equal(ids, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])
    both = MeshConfig(data=4, fsdp=2, dcn=DcnConfig(data=2))
    ids = np.vectorize(lambda device: device.id)(build_mesh(both).devices).reshape(4, 2)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(4, 2))


def test_a_mesh_over_fewer_devices():
    mesh = build_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    assert mesh.size == 2
    assert math.prod(mesh.shape.values()) == 2


REAL_SLICES = """
    import json
    from jax.experimental import topologies
    from jaxdist.parallel.mesh import DcnConfig, MeshConfig, build_mesh, count_slices
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", num_slices=2).devices
    config = MeshConfig(data=2, fsdp=2, tensor=2, dcn=DcnConfig(data=2))
    mesh = build_mesh(config, devices)
    grid = mesh.devices.reshape(2, 2, 2)
    faults = ""
    try:
        build_mesh(MeshConfig(data=1, fsdp=8, dcn=DcnConfig(data=1)), devices)
    except ValueError as error:
        faults = str(error)
    print(json.dumps({
        "slices": count_slices(devices), "platform": devices[0].platform, "faults": faults,
        "of": [[[d.slice_index for d in row] for row in part] for part in grid],
        "near": [[abs(a.coords[0] - b.coords[0]) + abs(a.coords[1] - b.coords[1])
                  for a, b in part] for part in grid],
    }))
"""


def test_real_slices_lie_along_the_dcn_axis():
    pytest.importorskip(
        "libtpu", reason="TPU topologies need libtpu; pip install jax[tpu]"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL_SLICES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["platform"], found["slices"]) == ("tpu", 2)
    assert found["of"] == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    # tensor: neighbours
    assert all(distance == 1 for part in found["near"] for distance in part)
    assert "needs 1 slices, there are 2" in found["faults"]


@pytest.mark.parametrize(
    ("config", "crossing"),
    [
        (MeshConfig(data=2, tensor=8), []),
        (MeshConfig(data=1, tensor=16), ["tensor"]),
        # 4 pairs of one context group lie on each host
        (MeshConfig(data=1, context=8, tensor=2), ["context"]),
        (MeshConfig(data=1, fsdp=2, expert=2, tensor=4), []),
        (MeshConfig(data=1, expert=4, tensor=4), ["expert"]),
        (MeshConfig(data=1, pipeline=2, fsdp=8), []),
    ],
)
def test_axes_that_talk_in_every_layer_between_hosts_of_gpus_are_found(
    config, crossing
):
    devices = [
        SimpleNamespace(
            id=number, platform="gpu", device_kind="H100", slice_index=number // 8
        )
        for number in range(16)
    ]
    shape = resolve_mesh(config, len(devices))
    mesh = SimpleNamespace(
        devices=meshes.arrange(shape, devices), axis_names=AXES, shape=shape.sizes
    )
    assert axes_between_hosts(mesh) == crossing
    warnings = slow_axis_warnings(mesh)
    assert len(warnings) == len(crossing)
    for axis, text in zip(crossing, warnings, strict=True):
        assert text.startswith(f"mesh.{axis}={shape.sizes[axis]} crosses hosts of GPUs")


def test_hosts_of_cpu_devices_and_tpus_are_no_matter():
    devices = targets.parse("v5e:2x4").stand_ins()
    shape = resolve_mesh(MeshConfig(data=1, tensor=8), len(devices))
    mesh = SimpleNamespace(devices=meshes.arrange(shape, devices), axis_names=AXES)
    assert axes_between_hosts(mesh) == []


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a"}, "Slurm"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        (
            {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "Kubernetes",
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "a multi-host TPU"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_launchers_are_told_apart(environ, launcher, monkeypatch):
    joined = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *given, **_: joined.append(given)
    )
    line = initialize.join_processes(environ)
    assert (line or "").endswith(launcher or "")
    assert (line is None) == (launcher is None)
    assert joined == ([] if launcher is None else [()])


@pytest.mark.parametrize(
    ("environ", "direct"),
    [
        ({}, None),
        ({"http_proxy": "http://proxy:3128"}, "head"),
        ({"grpc_proxy": "", "no_proxy": "localhost,.corp"}, "localhost,.corp,head"),
        (
            {
                "https_proxy": "http://proxy:3128",
                "no_grpc_proxy": "one",
                "no_proxy": "two",
            },
            "one,head",
        ),
        (
            {
                "http_proxy": "http://proxy:3128",
                "TPU_WORKER_HOSTNAMES": "a,b",
                "TPU_WORKER_ID": "1",
            },
            "a",
        ),
    ],
)
def test_processes_join_past_a_proxy(environ, direct, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    environ = dict(environ if "TPU_WORKER_ID" in environ else TORCHRUN | environ)
    assert initialize.join_processes(environ)
    assert environ.get("no_grpc_proxy") == direct


TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        (
            {
                "CUDA_VISIBLE_DEVICES": "0,1,2,3",
                "LOCAL_WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
            },
            [2, 3],
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "6,7", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            [0],
        ),
        # one each already
        (
            {"CUDA_VISIBLE_DEVICES": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            None,
        ),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),  # one process a machine has all
    ],
)
def test_processes_of_torchrun_share_out_the_gpus(environ, gpus, monkeypatch):
    joined = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *given, **how: joined.append((given, how))
    )
    line = initialize.join_processes(TORCHRUN | {"JAX_PLATFORMS": "cuda"} | environ)
    ((given, how),) = joined
    assert line == "process 3 of 4, joined through torchrun"
    assert given == (
        "head:29500",
        4,
        3,
    )
    assert how["local_device_ids"] == gpus
    assert "coordinator_bind_address" not in how  # of several machines


def test_processes_of_torchrun_cannot_share_tpus():
    environ = TORCHRUN | {
        "JAX_PLATFORMS": "tpu",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }
    with pytest.raises(
        ConfigError,
        match="--nproc-per-node=2: one process has all TPUs of a host; give 1",
    ):
        initialize.join_processes(environ)


def test_our_own_launcher_comes_first(monkeypatch):
    joined = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *given, **_: joined.append(given)
    )
    environ = {
        "JAXDIST_COORDINATOR": "localhost:1",
        "JAXDIST_NUM_PROCESSES": "2",
        "JAXDIST_PROCESS_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "OMPI_COMM_WORLD_SIZE": "",  # not even looked at
    }
    assert (
        initialize.join_processes(environ)
        == "process 1 of 2, joined through jaxdist launch"
    )
    assert joined == [("localhost:1", 2, 1)]
