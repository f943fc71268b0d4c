"""`launch --preflight`: what it compares with which row of the hardware table, and what
it says.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import launch
from jaxdist.config import EXIT_HANG
from jaxdist.distributed.coordination import ClockOffset
from jaxdist.hardware import chips
from jaxdist.operations.launch import preflight
from jaxdist.operations.launch.preflight import Reduced, Row
from jaxdist.planner import targets
from jaxdist.telemetry import hlo

H100, V5P, T4 = (
    chips.chip_for(kind) for kind in ("NVIDIA H100 80GB HBM3", "TPU v5p", "Tesla T4")
)


def gpus(hosts: int, each: int, processes_of_host: int = 1) -> list[SimpleNamespace]:
    """Returns stand-ins for the GPUs of hosts, as jax describes them: a host is a
    slice.
    """
    share = each // processes_of_host
    return [
        SimpleNamespace(
            id=i, platform="gpu", slice_index=i // each, process_index=i // share
        )
        for i in range(hosts * each)
    ]


def of_target(text: str) -> list[SimpleNamespace]:
    """Returns stand-ins for the TPUs of a target: four chips a process, `slice_index`
    only with several.
    """
    target = targets.parse(text)
    devices = target.stand_ins()
    for number, device in enumerate(devices):
        device.process_index = number // (4 * target.chip.devices_per_chip)
        if target.num_slices == 1:
            device.slice_index = None
    return devices


# --- which devices reduce, against which row ------------------------------------------


@pytest.mark.parametrize("processes", [1, 4])
def test_two_hosts_of_gpus_are_held_against_nvlink_and_infiniband(processes):
    inside, between = preflight.spans(gpus(2, 8, processes), H100)
    assert inside.where == "inside each host"
    assert inside.row == Row("H100 SXM", "NVLink", 450e9)
    assert [[d.id for d in group] for group in inside.groups] == [
        [*range(8)],
        [*range(8, 16)],
    ]
    assert between.where == "between 2 hosts"
    assert between.row == Row("H100 SXM", "InfiniBand", 50e9)
    assert [[d.id for d in group] for group in between.groups] == [
        [i, i + 8] for i in range(8)
    ]


def test_one_gpu_a_host_has_no_inside_and_one_device_nothing_at_all():
    (between,) = preflight.spans(gpus(4, 1), H100)
    assert between.where == "between 4 hosts"
    assert len(between.groups) == 1
    assert preflight.spans(gpus(1, 1), H100) == []


@pytest.mark.parametrize(
    ("target", "links"),
    [
        ("v5p:4x4x4", 6),
        ("v5p:2x2x1", 2),
        ("v5p:2x2x4", 3),
        ("v5e:4x4", 2),
        ("v5e:16x16", 4),
        ("v5e:8x16", 3),
        ("tpu7x:2x2x1", 1),
        ("tpu7x:4x4x4", 3),
    ],
)
def test_a_slice_has_two_links_along_a_ring_and_one_along_a_line(target, links):
    chip = targets.parse(target).chip
    (inside,) = preflight.spans(of_target(target), chip)
    assert inside.where == "inside the slice"
    assert len(inside.groups) == 1
    assert inside.row == Row(chip.name, "ICI", links * chip.link_bytes_per_s)
    ids = [device.id for device in inside.groups[0]]
    # what `plan` takes for such a group
    planned = targets.parse(target).group_link(ids)
    assert planned.name == "ICI"
    assert planned.bytes_per_s == inside.row.rate


def test_two_slices_are_held_against_ici_and_dcn():
    inside, between = preflight.spans(of_target("v5p:4x4x4x2"), V5P)
    assert inside.row == Row("TPU v5p", "ICI", 540e9)
    assert len(inside.groups) == 2
    assert between.where == "between 2 slices"
    assert between.row == Row("TPU v5p", "DCN", 6.25e9)
    assert len(between.groups) == 64
    assert {d.slice_index for d in between.groups[0]} == {
        0,
        1,
    }


def test_hosts_of_different_sizes_and_cards_without_a_network_have_no_row():
    (whole,) = preflight.spans([*gpus(1, 8), *gpus(2, 4)[4:]], H100)
    assert whole.row is None
    assert len(whole.groups[0]) == 12
    inside, between = preflight.spans(gpus(2, 4), T4)
    assert inside.row == Row("T4", "PCIe", 16e9)
    assert between.row is None


def test_cpus_are_grouped_by_process_and_have_no_row():
    cpus = [
        SimpleNamespace(id=i, platform="cpu", slice_index=0, process_index=i // 2)
        for i in range(4)
    ]
    inside, between = preflight.spans(cpus, None)
    assert inside.where == "inside each process"
    assert between.where == "between 2 processes"
    assert inside.row is None
    assert between.row is None
    assert [[d.id for d in group] for group in between.groups] == [[0, 2], [1, 3]]


# --- what is said ---------------------------------------------------------------------


def test_healthy_rates_are_printed_beside_the_table_and_nothing_is_slow():
    rates = {0: {"0": 650e12, "1": 640e12}, 1: {"2": 660e12, "3": 655e12}}
    table, slow = preflight.device_lines(
        rates, "h100, bfloat16 8192^3", H100, "bfloat16"
    )
    assert table[0] == "preflight: h100, bfloat16 8192^3, median 652 TFLOP/s"
    assert not slow
    assert (
        table[1]
        == "  process 0 device 0: 650 TFLOP/s, 66% of the 989 TFLOP/s of the table's matmul"
    )
    reduced = Reduced(
        "inside each host", {0: 350e9, 1: 360e9}, Row("H100 SXM", "NVLink", 450e9)
    )
    lines = [
        "  all-reduce inside each host: 350 GB/s a device, 78% of the 450 GB/s of the table's NVLink"
    ]
    assert preflight.reduce_lines(reduced) == (lines, [])


def test_a_slow_device_is_named_beside_the_others_and_the_table():
    rates = {0: {"0": 650e12, "1": 640e12}, 1: {"2": 660e12, "3": 300e12}}
    _, (slow,) = preflight.device_lines(rates, "what", H100, "bfloat16")
    below = "3.3 x below the 989 TFLOP/s of the table's matmul row (H100 SXM)"
    assert slow.startswith(
        f"slow: process 1 device 3: 300 TFLOP/s, {below}, 47% of the median: check `nvidia-smi"
    )
    rates[1]["3"] = 510e12  # above half of the table, but not beside its neighbours
    _, (slow,) = preflight.device_lines(rates, "what", H100, "bfloat16")
    assert (
        "510 TFLOP/s, 52% of the 989 TFLOP/s of the table's matmul, 79% of the median: check"
        in slow
    )


def test_where_all_are_slow_one_line_says_so():
    rates = {p: {str(d): 153e12 for d in range(4 * p, 4 * p + 4)} for p in range(16)}
    table, (slow,) = preflight.device_lines(rates, "what", V5P, "bfloat16")
    assert len(table) == 65
    assert "153 TFLOP/s, 3.0 x below the 459 TFLOP/s of the table's matmul row" in slow
    assert "(TPU v5p): check other programs on it" in slow


def test_without_a_row_devices_are_compared_with_each_other_alone():
    table, slow = preflight.device_lines(
        {0: {"0": 2e11, "1": 1e11}}, "cpu", None, "float32"
    )
    assert "no row" in table[1]
    assert table[2] == "  process 0 device 0: 0.2 TFLOP/s"
    assert slow == ["slow: process 0 device 1: 0.1 TFLOP/s, 67% of the median"]
    # emulated devices share their cores
    reduced = Reduced("inside each process", {0: 1e9, 1: 9e9}, None)
    assert preflight.reduce_lines(reduced) == (
        ["  all-reduce inside each process: 1 GB/s a device"],
        [],
    )


@pytest.mark.parametrize(
    ("row", "rate", "factor", "check"),
    [
        (
            Row("H100 SXM", "InfiniBand", 50e9),
            2.5e9,
            "20.0 x below the 50 GB/s of the table's InfiniBand row",
            "NCCL_DEBUG=INFO",
        ),
        (
            Row("H100 SXM", "NVLink", 450e9),
            50e9,
            "9.0 x below the 450 GB/s of the table's NVLink row",
            "nvidia-smi nvlink",
        ),
        (
            Row("TPU v5p", "ICI", 540e9),
            180e9,
            "3.0 x below the 540 GB/s of the table's ICI row",
            "health",
        ),
        (
            Row("TPU v5p", "DCN", 6.25e9),
            1e9,
            "6.2 x below the 6.25 GB/s of the table's DCN row",
            "MTU",
        ),
    ],
)
def test_a_slow_all_reduce_says_by_how_much_and_what_to_check(row, rate, factor, check):
    (line,), (slow,) = preflight.reduce_lines(
        Reduced("there", {0: rate, 1: 1.1 * rate}, row)
    )
    assert f"{factor} ({row.chip}): check " in slow
    assert check in slow.partition(": check ")[2]
    assert f"% of the {row.rate / 1e9:.3g} GB/s of the table's {row.link}" in line
    healthy = Reduced("there", {0: 0.7 * row.rate, 1: 0.7 * row.rate}, row)
    assert not preflight.reduce_lines(healthy)[1]


def test_networks_on_which_a_rate_is_healthy_are_named():
    row = Row("H100 SXM", "InfiniBand", 50e9)
    _, (slow,) = preflight.reduce_lines(Reduced("between 2 hosts", {0: 10e9}, row))
    assert slow.endswith("it would be healthy on ib50, efa-p4d, gcp-a3-high")
    _, (slow,) = preflight.reduce_lines(Reduced("between 2 hosts", {0: 1e9}, row))
    assert "would be" not in slow


def test_the_host_whose_all_reduce_is_slow_is_named():
    row = Row("H100 SXM", "NVLink", 450e9)
    _, (slow,) = preflight.reduce_lines(
        Reduced("inside each host", {0: 800e9, 1: 790e9, 2: 300e9}, row)
    )
    assert (
        "300 GB/s a device, 67% of the 450 GB/s of the table's NVLink, 38% of the median, in process 2"
        in slow
    )


def test_over_pcie_hosts_are_compared_with_each_other_alone():
    row = Row("L4", "PCIe", 32e9)
    lines = [
        "  all-reduce inside each host: 8 GB/s a device, 25% of the 32 GB/s of the table's PCIe"
    ]
    assert preflight.reduce_lines(
        Reduced("inside each host", {0: 8e9, 1: 9e9}, row)
    ) == (lines, [])
    _, (slow,) = preflight.reduce_lines(
        Reduced("inside each host", {0: 8e9, 1: 8e9, 2: 2e9}, row)
    )
    assert "25% of the median, in process 2: check `nvidia-smi topo" in slow


def test_clocks_that_are_certainly_too_far_apart_are_named():
    clocks = {
        1: ClockOffset(0.2, 0.001),
        2: ClockOffset(-61.5, 0.002),
        3: ClockOffset(2.0, 1.5),
    }
    (line,), (wrong,) = preflight.clock_lines(clocks, {p: f"host{p}" for p in range(4)})
    assert line == "  clocks: at most 61.5 s from process 0's (known to 0.002 s)"
    assert wrong.startswith(
        "clock: process 2 on host2 is 61.5 s behind process 0 on host0: "
    )
    assert "chrony" in wrong
    assert preflight.clock_lines({}, {0: "alone"}) == ([], [])


# --- measured -------------------------------------------------------------------------


def test_rates_of_real_devices():
    assert len(jax.devices()) == 8
    assert preflight.matmul_rate(jax.devices()[0], 64, jnp.dtype("float32")) > 0
    for groups in ([jax.devices()], [jax.devices()[:4], jax.devices()[4:]]):
        assert preflight.all_reduce_rate(groups, 1 << 12) > 0


def test_the_measured_program_is_a_loop_of_all_reduces_of_each_group_alone(monkeypatch):
    programs = []

    def spy(run):
        values = inspect.getclosurevars(run).nonlocals
        programs.append(values["reduces"].lower(values["ones"]).compile().as_text())
        np.testing.assert_array_equal(run(), values["ones"])  # the mean of ones
        return 1.0

    monkeypatch.setattr(preflight, "_best_s", spy)
    rate = preflight.all_reduce_rate([jax.devices()[:4], jax.devices()[4:]], 1 << 12)
    assert rate == 2 * 3 / 4 * (1 << 12) * preflight._REDUCES
    assert reduces(*programs) == [("all-reduce", preflight._REDUCES, (0, 1, 2, 3))]


def reduces(text: str) -> list[tuple[str, int, tuple[int, ...]]]:
    """Returns (what, how often, the first group) of what a program sends; () is all."""
    module = hlo.parse(text)
    return [
        (step.opcode, run.times, step.group)
        for run in module.runs()
        for step in module.computations[run.computation].values()
        if step.opcode
        in ("all-reduce", "all-reduce-start", "reduce-scatter", "all-gather", "send")
    ]


# In a child: libtpu writes to fd 2 and reads its environment at import.
COMPILE = """
import json
from jaxdist.planner import targets
from jaxdist.operations.launch import preflight
for text in ("v5p:2x2x1", "v5p:2x2x1x2"):
    target = targets.parse(text)
    for span in preflight.spans(targets.devices(target), target.chip):
        program, array = preflight.reduces_of(span.groups, 1 << 20)
        print(json.dumps([text, span.where, program.lower(array).compile().as_text()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("libtpu") is None,
    reason="ahead-of-time TPU compiles need libtpu: jaxdist[aot]",
)
def test_on_tpus_the_measured_program_reduces_over_ici_and_over_dcn():
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    alone, inside, between = (text for _, _, text in rows)
    assert [row[:2] for row in rows] == [
        ["v5p:2x2x1", "inside the slice"],
        ["v5p:2x2x1x2", "inside each slice"],
        ["v5p:2x2x1x2", "between 2 slices"],
    ]
    for text in (alone, inside):
        assert reduces(text) == [("all-reduce", preflight._REDUCES, (0, 1, 2, 3))]
    assert reduces(between) == [("send", preflight._REDUCES, ())]
    assert '_xla_megascale_reduce_operation="SUM"' in between
    assert "megascale" not in alone + inside


# Process 1's clock runs ahead. The patch comes first: jaxdist takes the function when
# it is imported.
AHEAD = """
import os, sys, time
real, ahead_s = time.time, 60.0 * (os.environ["JAXDIST_PROCESS_ID"] == "1")
time.time = lambda: real() + ahead_s
from jaxdist.operations.launch import preflight
sys.exit(preflight.main())
"""


@pytest.mark.slow
def test_two_processes_measure_inside_and_between_and_whose_clock_is_ahead(
    monkeypatch, capfd
):
    assert launch._PREFLIGHT[1:] == ["-m", preflight.__name__]
    monkeypatch.setattr(launch, "_PREFLIGHT", [sys.executable, "-c", AHEAD])
    flags = [
        "--processes",
        "2",
        "--devices-per-process",
        "2",
        "--preflight",
        "--",
        "echo",
        "trained",
    ]
    assert launch.main(flags) == 0
    out = capfd.readouterr().out
    lines = [
        line.removeprefix("[0] ")
        for line in out.splitlines()
        if line.startswith("[0] ")
    ]
    said = lines[
        next(i for i, line in enumerate(lines) if line.startswith("preflight: cpu")) :
    ]
    assert (
        len(
            [
                line
                for line in said
                if re.match(r"  process [01] device \d+: [\d.]+ TFLOP/s", line)
            ]
        )
        == 4
    )
    for where in ("inside each process", "between 2 processes"):
        assert [
            line
            for line in said
            if re.match(rf"  all-reduce {where}: [\d.e+-]+ GB/s a device$", line)
        ]
    (clock,) = [line for line in said if line.startswith("clock: ")]
    ahead_s = re.match(
        r"clock: process 1 on \S+ is ([\d.]+) s ahead of process 0 on ", clock
    )
    assert ahead_s
    assert 50 < float(ahead_s[1]) < 70
    assert "[0] trained" in out
    assert "[1] trained" in out


def test_clocks_of_one_machine_are_together(capfd):
    flags = [
        "--processes",
        "2",
        "--devices-per-process",
        "1",
        "--preflight",
        "--",
        "true",
    ]
    assert launch.main(flags) == 0
    out = capfd.readouterr().out
    assert "all-reduce between 2 processes: " in out
    assert "inside" not in out
    assert "] clock: " not in out
    assert "  clocks: at most " in out


# Process 1 does not come to the first all-reduce between processes.
ABSENT = """
import os, sys, time
from jaxdist.operations.launch import preflight
preflight._TIMEOUT_S = 20
if os.environ["JAXDIST_PROCESS_ID"] == "1":
    preflight.all_reduce_rate = lambda *_: time.sleep(300)
sys.exit(preflight.main())
"""


@pytest.mark.slow
def test_an_all_reduce_that_hangs_is_named_and_nothing_starts(monkeypatch, capfd):
    monkeypatch.setattr(launch, "_PREFLIGHT", [sys.executable, "-c", ABSENT])
    flags = [
        "--processes",
        "2",
        "--devices-per-process",
        "1",
        "--preflight",
        "--",
        "echo",
        "trained",
    ]
    assert launch.main(flags) != 0
    out, err = capfd.readouterr()
    assert (
        "hang: the all-reduce between 2 processes has not ended after 20 s, process "
        in out + err
    )
    assert "trained" not in out


def test_what_hangs_ends_with_76():
    hangs = "import time\nfrom jaxdist.operations.launch import preflight\npreflight._TIMEOUT_S = 0.5\n"
    hangs += "with preflight.hang_limit('a matmul'):\n    time.sleep(0)\ntime.sleep(1)\nprint('in time')\n"
    hangs += (
        "with preflight.hang_limit('the all-reduce', 'NVLink'):\n    time.sleep(100)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == EXIT_HANG
    assert done.stdout == "in time\n"
    assert (
        "hang: the all-reduce has not ended after 0.5 s, process 0 on " in done.stderr
    )
    assert "check `nvidia-smi nvlink --status`" in done.stderr
