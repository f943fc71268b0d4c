"""`plan --workdir RUN`: the run of a folder, with the layout and on the hardware of its
last start.
"""

import dataclasses
import json
import math
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from jaxdist import plan, status
from jaxdist.config import ConfigError, schema
from jaxdist.hardware import chips
from jaxdist.operations.page import step_parts
from jaxdist.planner import run_in_workdir
from jaxdist.telemetry.metrics import MetricsWriter
from jaxdist.trainer import provenance, workdir
from support.runs import run_of, train

needs_libtpu = pytest.mark.skipif(
    not find_spec("libtpu"), reason='pip install -e ".[aot]"'
)
TINY = {
    "model.num_layers": 2,
    "model.d_model": 256,
    "model.d_ff": 256,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 128,
    "model.vocab_size": 512,
    "mesh.data": 1,
    "mesh.fsdp": -1,
    "optimizer.name": "adamw",
    "batch.sequence_length": 128,
    "precision.compute": "bfloat16",
}
CPU = {"platform": "cpu", "device_kind": "cpu", "num_devices": 8}
V5P = {"platform": "tpu", "device_kind": "TPU v5"}
H100 = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "num_devices": 8}


@pytest.mark.parametrize(
    ("info", "target"),
    [
        (CPU, "cpu:8"),
        (H100 | {"hosts": ["a"] * 8}, "h100:1x8"),
        (H100 | {"hosts": ["a", "b"]}, "h100:2x4"),
        (
            V5P | {"num_devices": 256, "topology": {"shape": [4, 4, 16], "slices": 1}},
            "v5p:4x4x16x1",
        ),
        (
            V5P | {"num_devices": 128, "topology": {"shape": [4, 4, 4], "slices": 2}},
            "v5p:4x4x4x2",
        ),
    ],
)
def test_run_json_names_the_hardware(tmp_path, info, target):
    assert run_in_workdir.target_text(tmp_path, info) == target


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "does not say how many devices"),
        (CPU | {"num_devices": True}, "does not say how many devices"),
        (H100 | {"device_kind": "NVIDIA H100 NVL"}, "'NVIDIA H100 NVL'"),
        (V5P | {"num_devices": 256}, "joins 256 chips as None"),
        (H100 | {"hosts": ["a", "b", "c"]}, "on 3 machines, unevenly"),
        (
            V5P | {"num_devices": 64, "topology": {"shape": [4, 4], "slices": 10**9}},
            "which is impossible",
        ),
        (
            V5P | {"num_devices": 64, "topology": {"shape": [[4]], "slices": 1}},
            "which is impossible",
        ),
    ],
)
def test_hardware_that_is_not_known_is_asked_for(tmp_path, info, said):
    with pytest.raises(ConfigError, match="name the hardware with --on") as error:
        run_in_workdir.target_text(tmp_path, info)
    assert said.strip("'") in str(error.value)


def test_run_json_of_tpus_has_their_slices():
    places = [(x, y, z) for x in range(2) for y in range(4) for z in range(4)]
    devices = [
        SimpleNamespace(device_kind="TPU v5p", coords=place, slice_index=s)
        for s in (0, 1)
        for place in places
    ]
    assert chips.slice_shape(chips.FAMILIES["v5p"], devices) == ((2, 4, 4), 2)
    flat = SimpleNamespace(flat=devices)
    assert provenance._topology(flat) == {"topology": {"shape": [2, 4, 4], "slices": 2}}
    cpus = SimpleNamespace(flat=[SimpleNamespace(device_kind="cpu")])
    assert provenance._topology(cpus) == {}


def stand(folder, run, info, *, step=10, row=()):
    """Writes what a run of a config leaves on other hardware than ours."""
    with closing(MetricsWriter(folder)) as writer:
        writer.event("start", 0, devices=info["num_devices"])
        writer.write(step, {"loss": 5.0, "mfu": None} | dict(row))
    source = {"hash": provenance.source_hash(run.model_class)}
    workdir.write_json(folder / "run.json", info | {"source": source})
    workdir.write_json(folder / "config.json", schema.to_config_dict(run).to_dict())


def test_an_elastic_run_is_planned_with_the_layout_that_runs(tmp_path):
    run = run_of("quickstart", **(TINY | {"mesh.data": 2, "mesh.fsdp": 4}))
    mesh = {"pipeline": 1, "data": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
    info = CPU | {"num_devices": 4, "mesh": mesh, "zero": 3, "accumulation": 2}
    stand(tmp_path, run, info)
    found = run_in_workdir.with_layout(run, tmp_path, info)
    assert (found.mesh.data, found.mesh.fsdp, found.batch.accumulation) == (1, 4, 2)
    assert dataclasses.replace(found, mesh=run.mesh, batch=run.batch) == run
    asked = dataclasses.replace(
        run, mesh=dataclasses.replace(run.mesh, data=1, tensor=2)
    )
    assert run_in_workdir.with_layout(asked, tmp_path, info) == asked  # what if?
    with pytest.raises(ConfigError, match="accumulation"):
        run_in_workdir.with_layout(run, tmp_path, info | {"accumulation": "2"})


def test_a_damaged_run_json_is_named(tmp_path):
    assert run_in_workdir.read_info(tmp_path) == {}
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(ConfigError, match="run.json: .* --on"):
        run_in_workdir.read_info(tmp_path)


@pytest.mark.slow
@needs_libtpu
def test_a_run_on_a_tpu_is_held_against_its_plan(tmp_path, monkeypatch, capsys):
    """A real compile for the chips that run.json names; the run itself is only its
    files.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    folder, run = tmp_path / "run", run_of("quickstart", **TINY)
    mesh = {"pipeline": 1, "data": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
    info = {
        "platform": "tpu",
        "device_kind": "TPU v5 lite",
        "num_devices": 4,
        "mesh": mesh,
        "zero": 3,
        "accumulation": 1,
        "topology": {"shape": [2, 2], "slices": 1},
    }
    stand(folder, run, info, row={"step_time_s": 2e-3, "data_wait_s": 1e-3})
    assert plan.main(["--workdir", str(folder), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "plan.json").read_text()) == made
    assert made["target"] == "v5e:2x2"
    waterfall, step_s = made["time"]["waterfall"], made["time"]["step_s"]
    exposed = waterfall[step_parts.COMMUNICATION] / step_s
    assert exposed > 0
    assert math.fsum(waterfall.values()) == pytest.approx(step_s)
    assert status.main([str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["used"], document["plan"]
    assert document["step_parts"][step_parts.DATA] == pytest.approx(0.5)
    assert document["step_parts"][step_parts.COMMUNICATION] == pytest.approx(
        0.5 * exposed
    )
    assert math.fsum(document["step_parts"].values()) == pytest.approx(1)
    assert document["plan"]["measured_to_planned"] == pytest.approx(2e-3 / step_s)
    # Another batch is another plan, of which the next start's status makes no use.
    workdir.write_json(
        folder / "run.json", info | {"source": made["source"], "accumulation": 2}
    )
    assert status.main([str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "plan.json is not used: batch.accumulation: planned with 1, the run has 2"
        in said
    )


@pytest.mark.slow
def test_a_real_run_is_planned_as_it_ran(tmp_path, capsys):
    folder = tmp_path / "run"
    train(
        folder, 4, mesh__fsdp=2, mesh__pipeline=2, batch__global_size=16, train__steps=6
    )
    assert plan.main(["--workdir", str(folder), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["target"] == "cpu:4"
    assert made["layout"]["mesh"]["fsdp"] == 2
    assert plan.main(["--workdir", str(folder), "--on", "cpu:4", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    differing = ("date", "compile")
    assert {n: x for n, x in again.items() if n not in differing} == {
        n: x for n, x in made.items() if n not in differing
    }
    assert status.main([str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["reason"].startswith(
        "it says nothing of the time (unknown: no speed is published"
    )
    assert document["step_parts"][step_parts.BUBBLE] > 0
    assert math.fsum(document["step_parts"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_a_run_that_was_refitted_to_fewer_devices_is_planned_as_it_is_now(
    tmp_path, monkeypatch, capsys
):
    """Real starts on four devices and on two, as `launch --min-processes`
    makes them.
    """
    folder = tmp_path / "run"
    options = {
        "mesh__data": 2,
        "mesh__fsdp": 2,
        "checkpoint__every_steps": 3,
        "precision__compute": "float32",
    }
    monkeypatch.setenv("JAXDIST_FULL_PROCESSES", "0")
    train(folder, 4, train__steps=6, **options)
    train(folder, 2, train__steps=9, **options)
    monkeypatch.delenv("JAXDIST_FULL_PROCESSES")
    info = json.loads((folder / "run.json").read_text())
    assert info["num_devices"] == 2
    assert info["accumulation"] > 1
    assert plan.main(["--workdir", str(folder), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["target"] == "cpu:2"
    assert made["layout"]["mesh"] == info["mesh"]
    assert made["layout"]["accumulation"] == info["accumulation"]
    assert status.main([str(folder), "--json"]) == 0
    reason = json.loads(capsys.readouterr().out)["plan"]["reason"]
    assert reason.startswith("it says nothing of the time")  # nothing else differs
    assert (
        plan.main(["--workdir", str(folder), "--config.batch.global_size=16", "--json"])
        == 0
    )
    assert status.main([str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "batch.global_size: planned with 16, the run has 8" in said
