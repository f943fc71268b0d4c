"""Chips, flags, platform detection and optional packages."""

import math
import os
import subprocess
import sys

import pytest

from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags


def test_every_chip_is_complete_sourced_and_found_by_kind():
    assert len(chips.CHIPS) >= 19
    kinds = [kind for chip in chips.CHIPS for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    for chip in chips.CHIPS:
        assert all(chips.chip_for(kind) is chip for kind in chip.device_kinds)
        assert len(chip.source) > 10
        assert "://" not in chip.source
        assert all(1e12 < peak < 2e16 for peak in chip.peak_flops_per_s.values()), (
            chip.name
        )
        assert 7e9 < chip.hbm_bytes < 4e11
        assert 2e11 < chip.hbm_bytes_per_s < 1e13
        assert 1e10 < chip.link_bytes_per_s * chip.num_links < 1e12


@pytest.mark.parametrize(
    "kind", ["", "cpu", "NVIDIA H300", "NVIDIA A100", "TPU v9", "h100"]
)
def test_an_unknown_chip_is_none_and_never_guessed(kind):
    assert chips.chip_for(kind) is None


@pytest.mark.parametrize(
    ("kind", "dtype", "tflops"),
    [
        # dense; 1979 is the sparse figure
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("TPU v6 lite", "bfloat16", 918),
        ("TPU7x", "bfloat16", 1153.5),  # two devices share a chip of 2307
        ("TPU v3", "bfloat16", 61.5),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA A10G", "float8", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("Tesla T4", "float16", 65),
        ("Tesla T4", "bfloat16", None),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("TPU v5", "float32", None),
    ],
)
def test_peaks_are_dense_and_per_device(kind, dtype, tflops):
    chip = chips.chip_for(kind)
    assert chip is not None
    peak = chip.peak(dtype)
    assert peak is None if tflops is None else math.isclose(peak, tflops * 1e12)


def test_the_compiler_never_grants_much_more_memory_than_is_sold():
    tpus = [chip for chip in chips.CHIPS if chip.compiler_hbm_bytes]
    assert len(tpus) == 7
    assert all(0.9 < chip.compiler_hbm_bytes / chip.hbm_bytes < 1.01 for chip in tpus)


def test_a_clock_explains_the_peak_by_whole_matrix_units():
    clocked = [chip for chip in chips.CHIPS if chip.clock_hz]
    assert [chip.family for chip in clocked] == ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    for chip in clocked:
        doublings = math.log2(chip.peak("bfloat16") / chip.clock_hz)
        assert doublings == pytest.approx(round(doublings), abs=0.005), chip.name


@pytest.mark.parametrize(
    ("family", "devices", "gigabits"),
    [
        ("v5e", 256, 6_400),  # Google prints the pod's
        ("v6e", 256, 25_600),
        ("v5p", 1, 50),
        ("tpu7x", 2, 100),  # of the chip, for its two devices
        ("h100", 1, 400),  # 50 GB/s: bits are not bytes
        ("a100", 8, 1_600),
    ],
)
def test_networks_are_bytes_of_one_device(family, devices, gigabits):
    assert chips.FAMILIES[family].network_bytes_per_s * devices * 8 == gigabits * 1e9


@pytest.mark.parametrize(
    ("family", "dims", "one_way_gigabytes"),
    [
        ("v5e", 2, 180),
        ("v5p", 3, 540),
        ("v6e", 2, 360),
        ("h100", 0, 450),
        ("a100", 0, 300),
    ],
)
def test_links_are_one_way(family, dims, one_way_gigabytes):
    chip = chips.FAMILIES[family]
    assert chip.torus_dims == dims
    assert chip.link_bytes_per_s * chip.num_links == one_way_gigabytes * 1e9


def test_a_gpu_on_pcie_reaches_its_host_over_it():
    assert chips.chip_for("NVIDIA L4").pcie_bytes_per_s == 32e9
    assert chips.chip_for("NVIDIA H100 80GB HBM3").pcie_bytes_per_s == 64e9


def test_capacity_is_the_compilers_where_it_is_known():
    assert chips.FAMILIES["v5e"].capacity_bytes == int(15.75 * 2**30)
    assert chips.FAMILIES["h100"].capacity_bytes == 80_000_000_000


def test_flags_are_added_behind_the_users_own():
    flags = platform_flags.flag_environment(
        "gpu", {"XLA_FLAGS": "--xla_dump_to=/tmp/x"}
    )
    assert flags["XLA_FLAGS"] == (
        "--xla_dump_to=/tmp/x --xla_gpu_enable_latency_hiding_scheduler=true"
    )
    assert flags["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"


def test_the_users_values_always_win():
    environ = {
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    }
    assert platform_flags.flag_environment("gpu", environ) == {}
    once = platform_flags.flag_environment("tpu", {})
    assert once
    assert platform_flags.flag_environment("tpu", once) == {}
    assert platform_flags.flag_environment("cpu", {}) == {}


SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload_"


@pytest.mark.parametrize(
    ("family", "offloads"),
    [("v5p", 6), ("v6e", 6), ("v5e", 0), ("v4", 0), ("tpu7x", 0), ("", 0)],
)
def test_collectives_go_to_the_sparse_core_where_a_chip_has_one_that_needs_to_be_told(
    family, offloads
):
    flags = platform_flags.flag_environment("tpu", {}, family=family).get(
        "LIBTPU_INIT_ARGS", ""
    )
    assert flags.count(SPARSE_CORE) == offloads
    assert "xla_tpu_enable_data_parallel_all_reduce_opt=true" in flags
    assert not platform_flags.left_to_the_user(
        "tpu", {"LIBTPU_INIT_ARGS": flags}, family=family
    )


def test_who_sets_one_flag_of_a_group_sets_them_all_and_is_told():
    own = {"LIBTPU_INIT_ARGS": f"--{SPARSE_CORE}all_gather=false"}
    flags = platform_flags.flag_environment("tpu", own, family="v5p")[
        "LIBTPU_INIT_ARGS"
    ]
    assert flags.count("sparse_core") == 1
    assert "xla_sc" not in flags
    assert "data_parallel" in flags
    (line,) = platform_flags.left_to_the_user("tpu", own, family="v5p")
    assert "all_gather" in line
    assert "9 other flags" in line
    assert "xla_sc_disjoint_spmem" in line
    assert not platform_flags.left_to_the_user("tpu", own, family="v5e")


@pytest.mark.parametrize(
    ("environ", "pci", "family"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v5p-128"}, "0x0063", "v5p"),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-16"}, "", "v5e"),
        ({"TPU_ACCELERATOR_TYPE": "of next year-8"}, "0x006f", "v6e"),
        ({}, "0x0062", "v5p"),
        ({}, "0x0076", "tpu7x"),
        ({}, "0x9999", ""),
        ({}, "", ""),
        ({"JAX_PLATFORMS": "cpu"}, "0x0062", ""),
    ],
)
def test_detect_family(environ, pci, family, tmp_path):
    for i, (vendor, device) in enumerate(
        [("0x8086", "0x0063"), ("0x1ae0", pci)][: 1 + bool(pci)]
    ):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "vendor").write_text(vendor + "\n")
        (tmp_path / str(i) / "device").write_text(device + "\n")
    environ = {"JAX_PLATFORMS": "tpu"} | environ
    assert platform_flags.detect_family(environ, pci_devices=tmp_path) == family


@pytest.mark.parametrize(
    ("platform", "family"), [("tpu", ""), ("tpu", "v5p"), ("gpu", ""), ("cpu", "")]
)
def test_the_flag_table_gives_a_reason_and_a_source(platform, family):
    text = platform_flags.flag_table(platform, family)
    for flag in platform_flags.flags_for(platform, family):
        assert flag.name in text
        assert flag.why in text
        assert flag.source in text


def start_jax(flags: str) -> subprocess.CompletedProcess:
    code = (
        f"import os; os.environ.update(JAX_PLATFORMS='cpu', XLA_FLAGS={flags!r});"
        "import jax; jax.devices(); jax.numpy.zeros(1)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )


def test_jaxlib_knows_the_gpu_flags():
    # an unknown one would abort
    assert start_jax("--xla_gpu_no_such_flag=1").returncode != 0
    assert (
        start_jax(platform_flags.flag_environment("gpu", {})["XLA_FLAGS"]).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "topology"),
    [("v5p", "v5p:2x2x1"), ("v6e", "v6e:2x2"), ("v5e", "v5e:2x2")],
)
def test_libtpu_starts_with_the_flags_of_a_family(family, topology):
    pytest.importorskip(
        "libtpu", reason='needs the TPU compiler: pip install -e ".[aot]"'
    )
    code = (
        "from jax.experimental import topologies as t;"
        f"print(t.get_topology_desc(platform='tpu', topology_name={topology!r}).devices[0].device_kind)"
    )
    alone = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    flags = platform_flags.flag_environment("tpu", {}, family=family)

    def started(flags):
        environ = os.environ | alone | flags
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )

    assert chips.chip_for(started(flags).stdout.strip()).family == family
    unknown = {
        "LIBTPU_INIT_ARGS": flags["LIBTPU_INIT_ARGS"] + " --xla_tpu_no_such_flag=true"
    }
    assert started(unknown).returncode != 0  # so the test above can fail


@pytest.mark.parametrize(
    ("environ", "files", "platform"),
    [
        ({"JAX_PLATFORMS": "cpu"}, {"/dev/nvidia0"}, "cpu"),
        ({"JAX_PLATFORMS": "cuda,cpu"}, set(), "gpu"),
        ({"JAX_PLATFORMS": "tpu"}, set(), "tpu"),
        ({"JAX_PLATFORMS": ""}, {"/dev/nvidia0"}, "gpu"),
        ({}, {"/dev/accel0"}, "tpu"),
        ({}, {"/dev/vfio/0"}, "tpu"),
        ({}, {"/dev/vfio"}, "cpu"),
        ({}, set(), "cpu"),
    ],
)
def test_detect_platform(environ, files, platform):
    assert (
        platform_flags.detect_platform(environ, exists=files.__contains__) == platform
    )
