"""The command `doctor` on a CPU: its sections, and faults of versions."""

import json
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from jaxdist import doctor
from jaxdist.config import extras
from jaxdist.hardware import chips
from jaxdist.planner import compiler

TOGETHER = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "libtpu": None,
    "jax-cuda13-plugin": None,
    "jax-cuda12-plugin": None,
}


def test_json_on_a_bare_cpu(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"]["platform"] == "cpu"
    assert report["devices"]["count"] == 8
    assert report["devices"]["launcher"] == "none: one process"
    assert report["chip"] is None
    assert "mfu will be null" in report["mfu"]
    assert report["versions"]["jax"] == jax.__version__
    assert not report["versions"]["faults"]
    assert set(report["extras"]) == set(extras.EXTRAS)
    assert all(place["free_bytes"] > 0 for place in report["disk"].values())
    assert report["host"]["memory_bytes"] > 2**28
    assert all(set(fault) == {"check", "fault", "cure"} for fault in report["network"])


def test_text_has_every_section(capsys):
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for section in [
        "devices",
        "versions",
        "chip",
        "host",
        "disk",
        "network",
        "extras",
        "flags",
        "mfu",
    ]:
        assert f"\n{section}\n  " in "\n" + text
    assert "  count: 8\n" in text
    assert "flags\n  none" in text
    assert "GiB, writable True" in text


@pytest.mark.parametrize("devices", ["", "fail"])
def test_text_has_no_null(monkeypatch, devices):
    if devices:
        monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=RuntimeError))
    for environ in ({}, {"JAX_PLATFORMS": "tpu"}, {"JAX_PLATFORMS": "cuda"}):
        text = doctor.as_text(doctor.examine(environ))
        assert "None" not in text
        assert "chip\n  not in the table of chips: its rates" in text


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
def test_a_chip_is_shown_without_null(chip):
    device = SimpleNamespace(memory_stats=dict)
    text = doctor.as_text({"chip": doctor._chip(chip, device)})
    assert chip.name in text
    assert "None" not in text


def test_devices_that_do_not_start_are_said_and_not_a_crash(monkeypatch):
    def broken():
        raise AssertionError("no backend\nat all")

    monkeypatch.setattr(jax, "devices", broken)
    report = doctor.examine({"JAX_PLATFORMS": "cuda"})
    assert report["devices"]["trouble"] == "AssertionError: no backend at all"
    assert "trouble: AssertionError" in doctor.as_text(report)
    flags = {flag["setting"]: flag for flag in report["flags"]}
    assert flags
    assert all(flag["set_by_train"] for flag in flags.values())


def test_a_gpu_without_bfloat16_is_advised_float16(monkeypatch):
    t4 = SimpleNamespace(
        platform="gpu", device_kind="Tesla T4", id=0, memory_stats=dict
    )
    monkeypatch.setattr(jax, "devices", lambda: [t4])
    text = doctor.as_text(doctor.examine({}))
    assert "advice: Tesla T4 has no units for bfloat16" in text
    assert "precision.compute=float16" in text


def test_flags_of_the_user_stay():
    environ = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    flags = {
        flag["setting"]: flag["set_by_train"]
        for flag in doctor.examine(environ)["flags"]
    }
    assert not flags.pop("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert all(flags.values())


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({}, None),
        ({"jaxlib": "0.10.1"}, "pip install jaxlib==0.10.2"),
        ({"jax-cuda13-plugin": "0.9.0"}, "pip install jax-cuda13-plugin==0.10.2"),
        ({"jax-cuda12-plugin": "0.10.2"}, None),
        ({"libtpu": "0.0.1"}, 'pip install "jax[tpu]==0.10.2"'),
    ],
)
def test_versions_that_do_not_belong_together(change, cure, monkeypatch):
    tested = ["libtpu==0.0.42.* ; extra == 'tpu'"]
    monkeypatch.setattr(metadata, "requires", lambda _: tested)
    faults = compiler.version_faults(TOGETHER | change)
    assert len(faults) == (cure is not None)
    assert cure is None or cure in faults[0]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("libtpu==0.0.42.*; extra == 'tpu'", "0.0.42"),
        ("libtpu (==0.0.17.1) ; extra == 'tpu'", "0.0.17.1"),
        ("numpy>=2.0", None),
    ],
)
def test_the_libtpu_that_jax_asks_for(line, version):
    assert compiler.required_libtpu([line]) == version


def test_this_jax_s_own_requirement_is_understood():
    assert compiler.required_libtpu(metadata.requires("jax")) is not None


def test_chips_are_told_with_their_source():
    chip = chips.chip_for("TPU v5 lite")
    assert "197 TFLOP/s" in doctor.mfu_meaning("TPU v5 lite", chip)
    text = doctor.as_text({"chip": doctor._chip(chip, jax.devices()[0])})
    assert "bfloat16 197 TFLOP/s" in text
    assert "usable_hbm_bytes: 15.75 GiB" in text
    assert "link_bytes_per_s: 45 GB/s" in text
    assert f"source: {chip.source}" in text
    h100 = doctor.mfu_meaning(
        "NVIDIA H100 80GB HBM3", chips.chip_for("NVIDIA H100 80GB HBM3")
    )
    assert (
        "989.4 TFLOP/s in bfloat16 (1978.9 where precision.matmul is in 8-bit floats)"
        in h100
    )
    v100 = chips.chip_for("Tesla V100-SXM2-16GB")
    assert "no published bfloat16 peak" in doctor.mfu_meaning(
        "Tesla V100-SXM2-16GB", v100
    )
