"""Targets of a plan: which exist, how their devices lie, and what links them."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxdist.config import ConfigError
from jaxdist.hardware import chips
from jaxdist.parallel import mesh
from jaxdist.parallel.axes import AXES
from jaxdist.planner import targets
from support.paths import ROOT

GB = 1e9


@pytest.mark.parametrize(
    ("text", "canonical", "devices", "slices", "hosts", "wrap"),
    [
        ("v5p:4x4x4", "v5p:4x4x4", 64, 1, 16, (True, True, True)),
        ("V5P:4x4x4x2", "v5p:4x4x4x2", 128, 2, 32, (True, True, True)),
        ("v5p:2x2x4", "v5p:2x2x4", 16, 1, 4, (False, False, False)),
        ("v6e:16x16x2", "v6e:16x16x2", 512, 2, 128, (True, True)),
        ("v6e:16x16x1", "v6e:16x16", 256, 1, 64, (True, True)),
        ("v5e:8x16", "v5e:8x16", 128, 1, 32, (False, True)),
        ("v5e:1x1", "v5e:1x1", 1, 1, 1, (False, False)),
        # two devices a chip
        ("ironwood:4x4x8", "tpu7x:4x4x8", 256, 1, 32, (True, True, True)),
        ("v4:12x12x24", "v4:12x12x24", 3456, 1, 864, (True, True, True)),
        ("h100:4x8", "h100:4x8", 32, 1, 4, (False, False)),
        ("h100:8", "h100:1x8", 8, 1, 1, (False, False)),
        ("h200", "h200:1x1", 1, 1, 1, (False, False)),
        ("h100:4x8@200Gbit/s", "h100:4x8@25GB/s", 32, 1, 4, (False, False)),
        ("h100:2x8@EFA-P5", "h100:2x8@efa-p5", 16, 1, 2, (False, False)),
        ("a100-pcie:2x4@1500MB/s", "a100-pcie:2x4@1.5GB/s", 8, 1, 2, (False, False)),
        ("v6e:16x16x2@5GB/s", "v6e:16x16x2@5GB/s", 512, 2, 128, (True, True)),
        ("gb200:2x72", "gb200:2x72", 144, 1, 2, (False, False)),
        ("cpu:8", "cpu:8", 8, 1, 1, (False,)),
    ],
)
def test_a_target_has_its_devices(text, canonical, devices, slices, hosts, wrap):
    target = targets.parse(text)
    assert target.text == canonical
    assert targets.parse(canonical) == target
    assert (target.num_devices, target.num_slices, target.hosts, target.wrap) == (
        devices,
        slices,
        hosts,
        wrap,
    )
    per_chip = target.chip.devices_per_chip if target.chip else 1
    assert target.num_chips * per_chip == devices


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("v5e:32x32", "8x16, 16x16"),  # the compiler takes this one
        ("v5e:16x8", "8x16, 16x16"),
        ("v5e", "8x16, 16x16"),
        ("v5p:1x1x1", "2x2x1, 2x2x2"),
        ("v5p:4x8x4", "ascending multiples of 4"),
        ("v5p:24x24x24", "at most 6144 chips"),
        ("v5p:4x4x4x0", "2x2x1"),
        ("v5p:4x4x4x2x2", "2x2x1"),
        ("v5p:4xx4", "2x2x1"),
        ("h100:2x9", "1 to 8 GPUs"),
        ("h100:1x2x4", "HOSTSxGPUS"),
        ("v5", "v5e|v5p|v6e"),
        ("h300:1x8", "Did you mean h"),
        ("v5e-16", "Did you mean v5e:4x4 (16 chips)?"),  # as Google Cloud names them
        ("v5litepod-16", "Did you mean v5e:4x4 (16 chips)?"),
        ("v5p-8", "Did you mean v5p:2x2x1 (4 chips)?"),  # by cores
        ("v5p-1024", "Did you mean v5p:8x8x8 (512 chips)?"),
        ("v6e:16", "Did you mean v6e:4x4 (16 chips)?"),
        ("8xh100", "Did you mean h100:1x8 (8 chips)?"),
        ("h100x16", "Did you mean h100:2x8 (16 chips)?"),
        ("v5e-17", "v5e|v5p"),
        ("h100:4x8@", "as 25GB/s or 200Gbit/s"),
        ("h100:4x8@0GB/s", "as 25GB/s or 200Gbit/s"),
        ("h100:4x8@1e400GB/s", "as 25GB/s or 200Gbit/s"),
        ("h100:4x8@25gb", "as 25GB/s or 200Gbit/s"),
        ("h100:4x8@gcp-a3-hig", "Did you mean gcp-a3-high?"),
        ("h100-pcie:2x8", "h100-pcie:2x8@25GB/s"),  # sold with no network
        ("gb200:1x73", "1 to 72 GPUs in each NVLink domain"),
        ("cpu:8@25GB/s", "cpu:N"),
        ("cpu", "cpu:N"),
        ("cpu:0", "cpu:N"),
        ("here", "or here"),
        ("", "v4|v5e"),
    ],
)
def test_a_bad_target_lists_the_legal_ones_in_one_line(text, listed):
    with pytest.raises(ConfigError) as error:
        targets.parse(text)
    (line,) = error.value.faults
    assert line.startswith(f"--on={text}: ")
    assert listed in line
    assert "\n" not in line
    assert len(line) < 300


def test_here_is_the_target_of_the_devices():
    def tpus(kind, coords):
        return [
            SimpleNamespace(platform="tpu", device_kind=kind, coords=c) for c in coords
        ]

    square = [(x, y, 0) for x in range(4) for y in range(2)]
    assert targets.parse("here", tpus("TPU v5 lite", square)).text == "v5e:2x4"
    assert targets.parse("here", tpus("TPU v5", square[:4])).text == "v5p:2x2x1"
    gpus = [
        SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=i // 4)
        for i in range(8)
    ]
    assert targets.parse("here", gpus).text == "h200:2x4"
    behind = targets.parse("here@25GB/s", gpus)
    assert (behind.text, behind.chip.network_bytes_per_s) == ("h200:2x4@25GB/s", 25e9)
    assert targets.parse("here", [SimpleNamespace(platform="cpu")] * 3).text == "cpu:3"
    colab = SimpleNamespace(platform="gpu", device_kind="Tesla T4", process_index=0)
    assert targets.parse("here", [colab]).text == "t4:1x1"
    without_family = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100 NVL", process_index=0
    )
    with pytest.raises(ConfigError, match="NVIDIA H100 NVL"):
        targets.parse("here", [without_family])


def shape(target, slices=1, **sizes):
    config = mesh.MeshConfig(**({"data": 1} | sizes), dcn=mesh.DcnConfig(data=slices))
    return mesh.resolve_mesh(config, targets.parse(target).num_devices, slices)


@pytest.mark.parametrize(
    ("target", "layout", "axis", "name", "gigabytes"),
    [
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, "tensor", "ICI", 2 * 90),  # one ring
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, "fsdp", "ICI", 4 * 90),  # two
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, "fsdp+tensor", "ICI", 6 * 90),
        ("v5e:16x16", {"fsdp": 256}, "fsdp", "ICI", 4 * 45),
        # a line: part of a ring
        ("v5e:16x16", {"fsdp": 64, "tensor": 4}, "tensor", "ICI", 45),
        ("v5e:4x4", {"fsdp": 16}, "fsdp", "ICI", 2 * 45),  # no rings
        ("v6e:16x16x2", {"data": 2, "fsdp": 256, "slices": 2}, "data", "DCN", 12.5),
        ("v6e:16x16x2", {"data": 2, "fsdp": 256, "slices": 2}, "fsdp", "ICI", 4 * 90),
        # two devices share a chip's links
        ("tpu7x:2x2x1", {"fsdp": 8}, "fsdp", "ICI", 90),
        ("h100:1x8", {"fsdp": 8}, "fsdp", "NVLink", 450),
        ("h100:4x8", {"data": 4, "fsdp": 8}, "data", "InfiniBand", 50),
        ("h100:4x8", {"data": 4, "fsdp": 8}, "fsdp", "NVLink", 450),
        ("h100:4x8", {"fsdp": 32}, "fsdp", "InfiniBand", 400),  # a node's eight ports
        ("a100:2x8", {"fsdp": 16}, "fsdp", "InfiniBand", 200),
        ("h100:4x8@200Gbit/s", {"data": 4, "fsdp": 8}, "data", "network", 25),
        ("h100:4x8@gcp-a3-high", {"fsdp": 32}, "fsdp", "Ethernet", 100),
        # inside a host
        ("h100:4x8@25GB/s", {"data": 4, "fsdp": 8}, "fsdp", "NVLink", 450),
        ("h100-pcie:1x8", {"fsdp": 8}, "fsdp", "PCIe", 64),
        ("gb200:1x72", {"fsdp": 72}, "fsdp", "NVLink", 900),
        # of one device
        (
            "tpu7x:2x2x1x2@8GB/s",
            {"data": 2, "fsdp": 8, "slices": 2},
            "data",
            "network",
            4,
        ),
        ("cpu:8", {"fsdp": 8}, "fsdp", "memory", math.inf),
        ("v5p:4x4x4", {"fsdp": 64}, "data", "memory", math.inf),  # nobody to talk to
    ],
)
def test_the_link_of_an_axis(target, layout, axis, name, gigabytes):
    link = targets.parse(target).axis_link(shape(target, **layout), axis)
    assert link.name == name
    assert link.bytes_per_s == pytest.approx(gigabytes * GB)


def test_other_sizes_keep_the_network():
    slow = targets.parse("h100:4x8@0.05MB/s")
    assert targets.parse(slow.text) == slow  # as the compiler's process reads it
    assert targets.parse("h100:1x8@efa-p5").with_shape((2, 8)) == "h100:2x8@efa-p5"
    assert targets.parse("v6e:4x4").with_shape((8, 8, 2)) == "v6e:8x8x2"


def test_a_gpus_description_says_what_it_runs():
    for family, chip in chips.FAMILIES.items():
        if not chip.torus_dims:
            text = targets.topology_options(targets.parse(f"{family}:1x1"))[
                "target_config"
            ]
            threads = {"7.5": 1024, "8.6": 1536, "8.9": 1536}
            capability = ".".join(
                re.search(r"major: (\d+) minor: (\d+)", text).groups()
            )
            per_core = threads.get(capability, 2048)
            assert f"threads_per_core_limit: {per_core} " in text
            # XLA knows what the GPU lacks by its capability: bfloat16 before Ampere.
            assert (float(capability) < 8) == (chip.peak("bfloat16") is None)
            for field in (
                "runtime_version",
                "driver_version",
                "compile_time_toolkit_version",
                "dnn_version",
            ):
                assert re.search(
                    rf'\b{field}: "\d+\.\d+\.\d+"', text.partition("platform_name")[0]
                )


def test_numbers_that_a_gpu_has_no_units_for_are_computed_in_float32():
    peak = targets.parse("t4:1x1").matmul_peak
    assert (peak("float16"), peak("bfloat16")) == (65e12, 8.1e12)
    assert targets.parse("a100:1x1").matmul_peak("bfloat16") == 312e12
    assert targets.parse("v5e:1x1").matmul_peak("float32") == 197e12


def test_groups_that_interleave_share_their_links():
    target = targets.parse("v5e:16x16")
    ring = target.group_link(range(16))
    assert ring.bytes_per_s == 90 * GB
    assert target.group_link(range(0, 16, 4)).bytes_per_s == ring.bytes_per_s / 4
    assert target.group_link(range(4)).bytes_per_s == 45 * GB


def test_every_family_can_be_a_target_with_a_network():
    families = {
        "v4",
        "v5e",
        "v5p",
        "v6e",
        "tpu7x",
        "a100",
        "h100",
        "h200",
        "b200",
        "gb200",
    }
    families |= {"a100-pcie", "a100-40gb-pcie", "h100-pcie"}
    families |= {"rtx4090", "l4", "a10g", "t4", "v100", "v100-16gb", "v100-pcie"}
    assert families <= set(chips.FAMILIES)
    for family, chip in chips.FAMILIES.items():
        network = chip.network_bytes_per_s
        assert (
            network is None
            if chip.link == "PCIe"
            else 1e9 < network < chip.link_bytes_per_s
        )
        assert (
            targets.parse(
                f"{family}:{'x'.join(map(str, (chip.slices or [(1, 8)])[0]))}"
            ).chip
            is chip
        )


CHILD = """
import json, os, sys
from jaxdist.parallel import mesh
from jaxdist.planner import targets
found = {}
for text, layout in json.loads(sys.argv[1]):
    target = targets.parse(text)
    real, made_up = targets.devices(target), target.stand_ins()
    tpu = target.platform == "tpu"
    where = lambda d: (d.device_kind, tpu and (*d.coords, d.core_on_chip))
    same = {d.id: where(d) for d in real} == {d.id: where(d) for d in made_up}
    parts = layout.pop("dcn", target.num_slices)
    config = mesh.MeshConfig(**{"data": 1} | layout, dcn=mesh.DcnConfig(data=parts))
    built = mesh.build_mesh(config, real)
    shape = mesh.resolve_mesh(config, len(real), parts)
    ids = [d.id for d in built.devices.flat]
    processes = len({d.process_index for d in real})
    found[text] = [len(real), processes, same, ids == target.arrange(shape).ravel().tolist()]
print(json.dumps(found))
"""


def in_child(cases):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-c", CHILD, json.dumps(cases)]
    child = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr[-3000:]
    for text, found in json.loads(child.stdout).items():
        target = targets.parse(text)
        assert found == [target.num_devices, target.hosts, True, True], text


def test_libtpu_makes_each_tpu_target_and_numbers_it_as_we_do():
    pytest.importorskip(
        "libtpu", reason="ahead-of-time TPU compiles need libtpu: pip install jax[tpu]"
    )
    in_child(
        [
            ("v4:4x4x4", {"fsdp": 64}),
            ("v4:2x2x1", {"tensor": 4}),
            ("v5e:1x1", {}),
            ("v5e:2x4", {"fsdp": 8}),
            ("v5e:8x16", {"fsdp": 128}),
            ("v5e:16x16", {"data": 16, "fsdp": 16}),
            ("v5e:8x8", {"fsdp": 32, "tensor": 2}),
            ("v5p:2x2x1", {"fsdp": 4}),
            ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}),
            ("v5p:4x8x8", {"fsdp": 256}),
            ("v6e:16x16", {"fsdp": 256}),
            ("v6e:16x16x2", {"data": 2, "fsdp": 256}),
            ("tpu7x:1x1x1", {"fsdp": 2}),
            ("tpu7x:4x4x4", {"fsdp": 128}),
            ("tpu7x:2x2x1x2", {"data": 2, "fsdp": 8}),
        ]
    )


needs_cuda_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="ahead-of-time GPU compiles need a CUDA plugin: pip install jax-cuda12-plugin jax-cuda12-pjrt",
)

FLOAT8 = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxdist.planner import targets
mesh = Mesh(np.array(targets.devices(targets.parse("h100:1x1"))), ("x",))
a = jax.ShapeDtypeStruct((512, 512), jax.numpy.float8_e4m3fn, sharding=NamedSharding(mesh, P()))
product = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ()))).astype("bfloat16"))
lowered = product.trace(a, a).lower(lowering_platforms=("cuda",))
print(lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text())
"""


@needs_cuda_plugin
def test_8_bit_products_are_compiled_as_such():
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    child = subprocess.run(
        [sys.executable, "-c", FLOAT8], env=environ, capture_output=True, text=True
    )
    assert "__cublas$lt$matmul$f8" in child.stdout, child.stderr[-3000:]


@needs_cuda_plugin
def test_the_cuda_plugin_makes_each_gpu_target():
    in_child(
        [
            (f"{family}:2x4", {"data": 2, "fsdp": 4})
            for family in ("a100-40gb", "a100", "b200")
        ]
    )
    in_child(
        [
            (f"{family}:1x4", {"fsdp": 4})
            for family in ("a100-40gb-pcie", "a100-pcie", "h100-pcie")
        ]
    )
    in_child([("gb200:1x72", {"fsdp": 72})])
    in_child(
        [
            (f"{family}:1x4", {"fsdp": 4})
            for family in ("rtx4090", "l4", "a10g", "t4", "v100", "v100-16gb-pcie")
        ]
    )
    in_child([("h100:4x8", {"data": 8, "fsdp": 4, "dcn": 4}), ("h200:1x1", {})])


def test_emulated_devices_are_arranged_as_the_mesh_does():
    config = mesh.MeshConfig(data=4, fsdp=2, dcn=mesh.DcnConfig(data=2))
    ids = [device.id for device in mesh.build_mesh(config).devices.flat]
    layout = mesh.resolve_mesh(config, 8, 2)
    assert ids == targets.parse("cpu:8").arrange(layout).ravel().tolist()


@pytest.mark.parametrize(
    ("target", "axes"),
    [
        ("v5p:4x4x8", {"data": 8, "fsdp": 4, "context": 2, "tensor": 2}),
        ("v4:4x4x4", {"data": 2, "fsdp": 32}),
        ("v6e:4x8x2", {"data": 4, "fsdp": 16}),
        ("tpu7x:4x4x4", {"data": 8, "fsdp": 16}),
        ("h100:4x6", {"data": 6, "fsdp": 4}),
        ("cpu:8", {"data": 2, "fsdp": 4}),
    ],
)
def test_the_link_of_an_axis_is_that_of_its_slowest_group(target, axes):
    target = targets.parse(target)
    sizes = dict.fromkeys(AXES, 1) | axes
    slices = dict.fromkeys(AXES, 1) | {"data": target.num_slices}
    shape = mesh.MeshShape(sizes, slices)
    ids = target.arrange(shape)
    for number, (axis, size) in enumerate(shape.sizes.items()):
        groups = [
            group.tolist() for group in ids.swapaxes(number, -1).reshape(-1, size)
        ]
        slowest = min(map(target.group_link, groups), key=lambda x: x.bytes_per_s)
        assert target.axis_link(shape, axis) == slowest
