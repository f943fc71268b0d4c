"""benchmarks/step/scaling.py: equal work on each count, efficiencies and predictions."""

import importlib
import json
import os
from types import ModuleType

import jax
import pytest

from jaxdist import plan
from jaxdist.config import ConfigError
from jaxdist.planner.formulas import KINDS
from jaxdist.telemetry.flops import hlo_flops
from jaxdist.trainer import exit_code
from support.paths import ROOT
from support.stored_programs import planned

SMALL = "model.num_layers=1 model.d_model=32 model.d_ff=32 model.num_heads=1 model.num_kv_heads=1"
SMALL += " model.head_dim=32 model.vocab_size=512 batch.sequence_length=32 optimizer.name=adamw"
FLAGS = ["--config=quickstart", *(f"--config.{word}" for word in SMALL.split())]
COUNTS = (2, 4, 8)


def written(folder, count: int, alpha_s: float) -> str:
    """Returns the file of hand-made times of all kinds of collectives over `count`
    devices.
    """
    entry = {
        "axis": "data",
        "axis_size": count,
        "link": "memory",
        "residual": 0.1,
        "bytes_per_s": 1e9,
    }
    fits = [
        entry | {"kind": kind, "alpha_s": alpha_s * (i + 1)}
        for i, kind in enumerate(KINDS)
    ]
    file = folder / f"cpu{count}.json"
    file.write_text(
        json.dumps({"calibration": {"hardware": f"cpu:{count}", "fits": fits}})
    )
    return str(file)


@pytest.fixture
def scaling(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/step"))
    return importlib.import_module("scaling")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder without kept plans; what the command sets in the environment is
    undone.
    """
    for name in set(os.environ) | {"XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC"}:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def medians(row, clock: str = "wall_s") -> float:
    values = sorted(one[clock] / row["steps_per_round"] for one in row["rounds"])
    assert len(values) == 1
    return values[0]


@pytest.mark.slow
def test_rows_are_of_the_same_work_and_bear_out_efficiency_and_prediction(
    scaling, home, capsys
):
    files = {count: written(home, count, 1e-6 * count) for count in (2, 8)}
    record = home / "record.json"
    words = [
        *FLAGS,
        "--config.batch.global_size=8",
        "--smallest=2",
        "--rounds=1",
        f"--out={record}",
    ]
    assert (
        scaling.main([*words, *(f"--calibration={file}" for file in files.values())])
        == 0
    )
    rows = json.loads(record.read_text())["rows"]
    by = {(row["mode"], row["devices"]): row for row in rows}
    assert list(by) == [
        (mode, count) for mode in ("weak", "strong") for count in COUNTS
    ]
    for (mode, count), row in by.items():
        base = by[mode, 2]
        assert (row["fits"], row["layout"], row["mesh"]["data"]) == (
            True,
            f"data {count}",
            count,
        )
        assert row["global_batch"] == (4 * count if mode == "weak" else 8)
        assert row["tokens_per_step"] == 32 * row["global_batch"]
        assert row["sequences_per_device"] == row["global_batch"] / count
        per_device = row["tokens_per_step"] / medians(row) / count
        assert row["tokens_per_s_per_device"] == pytest.approx(per_device)
        ratio = row["tokens_per_s_per_device"] / base["tokens_per_s_per_device"]
        assert row["efficiency"] == pytest.approx(ratio)
        work = [
            medians(one, "processor_s") / one["tokens_per_step"] for one in (base, row)
        ]
        assert row["emulated"]["processor_efficiency"] == pytest.approx(
            work[0] / work[1], rel=1e-4
        )
    losses = [by["strong", count]["first_loss"] for count in COUNTS]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    # one step, measured once
    assert by["weak", 2]["rounds"] == by["strong", 2]["rounds"]
    for mode in ("weak", "strong"):
        base, row = by[mode, 2], by[mode, 8]
        assert base["predicted"] is by[mode, 4]["predicted"] is None
        assert "cpu:4" in by[mode, 4]["not_predicted"]
        assert "predicted from" in base["not_predicted"]
        told, own, least = row["predicted"], row["planned"], base["planned"]
        more = own["program_flops"] / least["program_flops"]
        assert more == pytest.approx(4.0 if mode == "weak" else 1.0, rel=0.05)
        compute = (medians(base) - least["exposed_communication_s"]) * more
        assert told["step_s"] == pytest.approx(compute + own["exposed_communication_s"])
        same_work = row["tokens_per_step"] / base["tokens_per_step"] / more
        assert told["processor_efficiency"] == pytest.approx(same_work)
        rate = row["tokens_per_step"] / told["step_s"] / 8
        assert told["efficiency"] == pytest.approx(
            rate / base["tokens_per_s_per_device"]
        )
        assert told["measured_over_predicted"] == pytest.approx(
            medians(row) / told["step_s"]
        )
    shown = capsys.readouterr().out
    assert "emulated: CPU devices share the cores" in shown
    assert "emulated: strong   8" in shown
    check_against_plan(by["weak", 8], files[8], capsys)


def check_against_plan(row, file, capsys) -> None:
    """Holds a prediction against what `plan`, called by itself, says of the
    same run.
    """
    command = [
        *FLAGS,
        f"--config.batch.global_size={row['global_batch']}",
        "--json",
        "--on=cpu:8",
    ]
    assert plan.main([*command, f"--calibration={file}"]) == 0
    collectives = json.loads(capsys.readouterr().out)["collectives"]
    exposed = sum(one["exposed_s"] for one in collectives)
    assert exposed > 8e-6
    assert row["planned"]["exposed_communication_s"] == pytest.approx(
        exposed, rel=1e-12
    )


def parsed(scaling, *words: str):
    """Returns the flags and the run of a command line."""
    return scaling.cli.parse(scaling._parser(), [*FLAGS, *words])


def test_what_cannot_be_scaled_is_refused_before_anything_is_built(
    scaling, home, monkeypatch
):
    monkeypatch.setattr(
        scaling, "measure", lambda *_: pytest.fail("nothing is to be built")
    )
    monkeypatch.setattr(
        scaling, "make_plan", lambda *_, **__: pytest.fail("nothing is to be compiled")
    )
    other = written(home, 16, 1e-6)
    for words, faults in {
        "--devices=6 --axis=rows --rounds=0 --calibration=none.json": [
            "--calibration none.json",
            "--devices=6: must be a power of two",
            "--axis=rows: must be an axis of the mesh: pipeline, data",
            "--rounds=0: must be at least 1",
        ],
        f"--rounds=0 --network=25GB/s --config.batch.global_size=4 --calibration={other}": [
            "--network=25GB/s: --on=cpu:8@25GB/s: must be",
            "--rounds=0",
            "strong on 8 devices: batch.global_size=4 is not divisible",
            "measured on cpu:16, which no count here is",
        ],
        "--config.mesh.tensor=3": [
            "--axis=data: the other axes (tensor 3) take 3 devices"
        ],
        "--smallest=8": [
            "one count is no scaling: from 8 devices, and there are 8; lower --smallest"
        ],
        "--smallest=2 --config.mesh.tensor=4": [
            "--axis=data: the other axes (tensor 4) take 4 devices"
        ],
        "--axis=tensor --config.mesh.pipeline=2 --mode=weak": [
            "mesh.tensor",
            "mesh.pipeline=2",
        ],
    }.items():
        with pytest.raises(ConfigError) as error:
            scaling.main([*FLAGS, *words.split()])
        text = "\n".join(error.value.faults)
        assert all(fault in text for fault in faults), text
        assert (
            exit_code.exit_code(
                lambda words=words: scaling.main([*FLAGS, *words.split()])
            )
            == 78
        )


def test_one_axis_grows_and_the_others_stay(scaling):
    flags, run = parsed(
        scaling,
        "--axis=fsdp",
        "--config.mesh.pipeline=1",
        "--config.mesh.context=2",
        "--config.model.num_heads=2",
        "--config.batch.global_size=4",
    )
    points = scaling.settled(run, flags, [], [])
    sizes = [
        (p.mode, p.count, p.run.mesh.data, p.run.mesh.fsdp, p.run.mesh.context)
        for p in points
    ]
    counts = [(2, 1, 1, 2), (4, 1, 2, 2), (8, 1, 4, 2)]
    assert sizes == [(mode, *values) for mode in scaling.MODES for values in counts]
    assert [p.run.batch.global_size for p in points] == [4, 8, 16, 4, 4, 4]
    assert all([d.id for d in p.devices] == list(range(p.count)) for p in points)
    assert scaling.axis_of(run, None) == "data"
    # nothing takes the rest
    assert scaling.axis_of(scaling.grown(run, "fsdp", 8), None) == "data"


def test_a_count_that_does_not_fit_is_a_row_with_its_reason(scaling, monkeypatch):
    """The compiler's and the allocator's word for it; any other error ends the
    benchmark.
    """
    flags, run = parsed(
        scaling, "--smallest=4", "--mode=weak", "--config.batch.global_size=4"
    )
    points = scaling.settled(run, flags, [], [])
    rows = importlib.import_module("scaling_rows")

    def build(*_):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(scaling.sides, "build_jaxdist", build)
    error = "RESOURCE_EXHAUSTED: 7 GiB\nmore"
    reason = scaling._side(points[0], False, print)
    assert (
        reason
        == "does not fit: RESOURCE_EXHAUSTED: 7 GiB; --apart gives each count the whole memory"
    )
    assert (
        scaling._side(points[0], True, print)
        == "does not fit: RESOURCE_EXHAUSTED: 7 GiB"
    )
    error = "INTERNAL: other"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        scaling._side(points[0], False, print)
    timing = importlib.import_module("measuring").Timing(wall_s=2.0, processor_s=3.0)
    found = {points[1].key: rows.Measured("", [timing, timing], 2, {})}
    reasons = {points[0].key: reason}
    table = rows.rows_of(
        points, found, reasons, {point.key: "unknown" for point in points}
    )
    assert [row["fits"] for row in table] == [False, True]
    assert table[0]["reason"] == reason
    assert (table[1]["efficiency"], table[1]["step_s"]["median"]) == (1.0, 1.0)
    assert "does not fit" in "\n".join(rows.lines(table))


def test_where_plan_knows_the_compute_its_own_seconds_are_the_prediction(scaling):
    """As of GPUs and TPUs: also of the smallest count, and nothing measured is part of
    it.
    """
    flags, run = parsed(
        scaling, "--smallest=4", "--mode=strong", "--config.batch.global_size=8"
    )
    points = scaling.settled(run, flags, [], [])
    rows, measuring = (
        importlib.import_module("scaling_rows"),
        importlib.import_module("measuring"),
    )
    found, expected = {}, {}
    for point, wall_s, step_s in zip(points, (2.0, 1.25), (1.8, 1.0), strict=True):
        found[point.key] = rows.Measured("", [measuring.Timing(wall_s, 1.0)], 1, {})
        expected[point.key] = list(rows.Expected(step_s, 1e9, 0.25, 0.5, 0.125, 0.1))
    least, most = rows.rows_of(points, found, {}, expected)
    assert (least["efficiency"], most["efficiency"]) == pytest.approx(
        (1.0, 2.0 / 1.25 / 2)
    )
    assert least["predicted"]["efficiency"] == 1.0
    told = most["predicted"]
    assert (told["step_s"], told["efficiency"]) == pytest.approx((1.0, 1.8 / 1.0 / 2))
    assert told["measured_over_predicted"] == pytest.approx(1.25)
    assert told["efficiency_over_predicted"] == pytest.approx(0.8 / 0.9)
    names = (
        "exposed_communication_s",
        "hidden_communication_s",
        "bubble_s",
        "bubble_share",
    )
    assert [most["planned"][name] for name in names] == [0.25, 0.5, 0.125, 0.1]
    expected[points[0].key] = "these devices are no slice"
    least, most = rows.rows_of(points, found, {}, expected)
    assert (least["predicted"], least["not_predicted"]) == (
        None,
        "these devices are no slice",
    )
    assert most["predicted"]["efficiency"] is None
    assert most["predicted"]["step_s"] == 1.0
    assert "unknown" in "\n".join(rows.lines([least, most]))


@pytest.mark.parametrize("name", ["v5p_tensor4", "h100_4x8"])
def test_a_prediction_has_the_parts_of_the_plans_waterfall(scaling, name):
    found = planned(name)
    told, time = importlib.import_module("scaling_rows").expected_of(found), found.time
    assert (
        0
        < told.exposed_communication_s
        == pytest.approx(time.waterfall["exposed communication"])
    )
    assert 0 < told.hidden_communication_s == pytest.approx(time.hidden_s)
    assert (told.step_s, told.bubble_s) == (time.step_s, time.waterfall["bubble"])
    assert (
        told.program_flops
        == found.target.num_devices * hlo_flops(found.compiled.hlo)
        > 0
    )
