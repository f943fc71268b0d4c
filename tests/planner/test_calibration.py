"""Measured times of collectives: the line through them, the file, and what it changes
in a plan.
"""

import json
import math

import jax
import pytest

from jaxdist import plan
from jaxdist.config import ConfigError
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.planner import answer, calibration, communication, show, targets
from jaxdist.planner.document import Plan
from jaxdist.planner.formulas import KINDS, wire_bytes
from jaxdist.telemetry import hlo
from jaxdist.trainer import exit_code
from support.paths import ROOT
from support.stored_programs import CASES, planned

SMALL = "model.num_layers=1 model.d_model=32 model.d_ff=32 model.num_heads=1 model.num_kv_heads=1"
SMALL += " model.head_dim=32 model.vocab_size=512 batch.sequence_length=32 batch.global_size=4 mesh.data=1"
FLAGS = [
    "--config=quickstart",
    *(
        f"--config.{word}"
        for word in [*SMALL.split(), "mesh.fsdp=2", "optimizer.name=adamw"]
    ),
]
SIZES = [2**10 * 4**i for i in range(7)]


def fit(
    kind: str, alpha_s: float = 1e-3, bytes_per_s: float | None = 1e6, **values
) -> dict:
    entry = {
        "kind": kind,
        "axis": "fsdp",
        "axis_size": 2,
        "link": "memory",
        "residual": 0.1,
    }
    return entry | {"alpha_s": alpha_s, "bytes_per_s": bytes_per_s} | values


def written(folder, fits: list, hardware: str = "cpu:2") -> str:
    file = folder / "calibration.json"
    file.write_text(json.dumps({"calibration": {"hardware": hardware, "fits": fits}}))
    return str(file)


@pytest.mark.parametrize("kind", KINDS)
def test_the_line_finds_latency_and_rate_of_small_and_large(kind):
    sent = [wire_bytes(kind, size, 8) for size in SIZES]
    alpha, rate, residual = calibration.fit_line(
        sent, [3e-5 + bytes_ / 2e9 for bytes_ in sent]
    )
    assert (alpha, rate) == pytest.approx((3e-5, 2e9), rel=1e-6)
    assert residual < 1e-6


def test_neither_part_of_a_line_is_negative():
    alpha, rate, residual = calibration.fit_line(
        [1e3, 1e4, 1e5], [0.5e-6, 10e-6, 110e-6]
    )
    assert alpha == 0
    assert rate == pytest.approx(1e9, rel=0.5)
    assert residual > calibration.MAX_RESIDUAL
    alpha, rate, residual = calibration.fit_line([1e3, 1e4, 1e5], [3e-6, 2e-6, 1e-6])
    assert math.isinf(rate)
    assert 1e-6 < alpha < 3e-6
    assert residual == pytest.approx(1 - alpha / 3e-6)
    flat = calibration.Fit("all-reduce", "data", 2, "memory", alpha, rate, 0.0)
    assert not flat.usable
    assert flat.to_json()["bytes_per_s"] is None


@pytest.mark.slow
def test_a_plan_takes_the_times_of_the_file(tmp_path, monkeypatch, capsys):
    """Each kind has its own latency and rate; the sums are made by hand from counts and
    bytes.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = {
        kind: (1e-4 * (i + 1), 1e6 * (i + 3))
        for i, kind in enumerate(KINDS)
        if kind != "all-gather"
    }
    file = written(tmp_path, [fit(kind, *line) for kind, line in lines.items()])
    command = [*FLAGS, "--on=cpu:2", f"--workdir={tmp_path / 'w'}", "--json"]
    assert plan.main(command) == plan.main([*command, f"--calibration={file}"]) == 0
    decoder, text = json.JSONDecoder(), capsys.readouterr().out
    before, end = decoder.raw_decode(text)
    after, _ = decoder.raw_decode(text[end:].lstrip())
    assert before["calibration"] == {}
    assert not any(one["step_s"] for one in before["collectives"])
    assert len(after["collectives"]) == len(before["collectives"])
    by_hand = 0.0
    for one in after["collectives"]:
        if one["kind"] == "all-gather":  # not measured
            assert one["step_s"] is None
            continue
        alpha, rate = lines[one["kind"]]
        factor = {
            "all-reduce": 1.0,
            "reduce-scatter": 0.5,
            "all-to-all": 0.5,
            "collective-permute": 1.0,
        }
        by_hand += one["count"] * (alpha + factor[one["kind"]] * one["bytes"] / rate)
    assert by_hand > 1e-4
    assert sum(one["step_s"] or 0 for one in after["collectives"]) == pytest.approx(
        by_hand, rel=1e-9
    )
    assert sum(one["exposed_s"] or 0 for one in after["collectives"]) == pytest.approx(
        by_hand, rel=1e-9
    )
    named = after["calibration"]
    assert (named["file"], named["hardware"]) == (file, "cpu:2")
    assert named["not_measured"] == ["all-gather over fsdp (2 devices)"]
    shown = (tmp_path / "w" / "plan.txt").read_text()
    named = f"times as measured on cpu:2: {file}"
    assert "".join(named.split()) in "".join(shown.split())  # lines of 80
    assert "all-gather over fsdp" in shown


@pytest.fixture
def nothing_compiles(monkeypatch):
    def make_plan(*_, **__):
        pytest.fail("a compile was started")

    monkeypatch.setattr(answer, "make_plan", make_plan)


@pytest.mark.parametrize(
    ("fits", "fault"),
    [
        pytest.param(
            [fit("all-reduce"), fit("all-gather", residual=0.21)],
            "off by more than 20%: all-gather",
            id="a line far from its points",
        ),
        pytest.param(
            [fit("all-reduce", bytes_per_s=None)],
            "off by more than 20%: all-reduce",
            id="no rate",
        ),
        pytest.param([], "no fit in it is usable", id="no fit"),
        pytest.param(
            [fit("all-reduce", alpha_s="soon")], "alpha_s of a fit", id="a word as time"
        ),
        pytest.param([fit("broadcast")], "kinds are", id="unknown collective"),
        pytest.param([{"kind": "all-reduce"}], "of a fit is", id="missing fields"),
    ],
)
def test_a_file_without_usable_times_is_refused_before_anything_compiles(
    fits, fault, tmp_path, nothing_compiles
):
    file = written(tmp_path, fits)
    command = [*FLAGS, "--on=cpu:2", f"--calibration={file}"]
    with pytest.raises(ConfigError, match=fault):
        plan.main(command)
    assert exit_code.exit_code(lambda: plan.main(command)) == 78


@pytest.mark.parametrize("hardware", ["cpu:4", "h100:1x2"])
def test_times_of_other_hardware_are_refused_before_anything_compiles(
    hardware, tmp_path, nothing_compiles
):
    file = written(tmp_path, [fit("all-reduce")], hardware)
    command = [*FLAGS, "--on=cpu:2", f"--calibration={file}"]
    fault = f"measured on {hardware}, the plan is for cpu:2"
    with pytest.raises(ConfigError, match=fault):
        plan.main(command)
    assert exit_code.exit_code(lambda: plan.main(command)) == 78


def test_a_search_takes_no_measured_times(tmp_path, nothing_compiles):
    file = written(tmp_path, [fit("all-reduce")])
    command = [*FLAGS, "--on=cpu:2", f"--calibration={file}", "--fix"]
    with pytest.raises(ConfigError, match="leave out --search and --fix"):
        plan.main(command)


NVLINK_FIT = fit("all-reduce", 1e-5, 1e9, axis="data", axis_size=8, link="NVLink")


@pytest.mark.parametrize("measured_on", ["h100:1x8", "h100:2x8@25GB/s"])
def test_a_fit_serves_a_larger_machine_of_the_same_chip_and_network(
    measured_on, tmp_path
):
    file = written(tmp_path, [NVLINK_FIT], measured_on)
    held = calibration.load(file, targets.parse("h100:4x8@25GB/s"))
    assert len(held.fits) == 1


@pytest.mark.parametrize(
    ("measured_on", "planned_on"),
    [
        pytest.param("h100:2x8@50GB/s", "h100:4x8@25GB/s", id="another network"),
        pytest.param("h200:1x8", "h100:1x8", id="another chip"),
    ],
)
def test_a_fit_of_another_network_or_chip_is_refused(measured_on, planned_on, tmp_path):
    file = written(tmp_path, [NVLINK_FIT], measured_on)
    with pytest.raises(ConfigError, match="datasheet rates"):
        calibration.load(file, targets.parse(planned_on))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_holds_one_collective_of_its_kind_and_payload(kind, monkeypatch):
    """Read from the compiled loop, as plan reads a step: the compiler has made nothing
    smaller of it.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/plan"))
    import collectives

    config, payload = MeshConfig(data=2, fsdp=4), 4096
    shape, mesh = resolve_mesh(config, 8), build_mesh(config, jax.devices()[:8])
    assert collectives.measured_axes(shape) == ["data", "fsdp", "data+fsdp"]
    for axis, n in ("fsdp", 4), ("data+fsdp", 8):
        own = payload // 4 // (n if kind == "all-gather" else 1)
        run = collectives.chain(kind, mesh, tuple(axis.split("+")))
        compiled = run.lower(3, jax.ShapeDtypeStruct((8 * own,), "float32")).compile()
        (found,) = communication.collectives(hlo.parse(compiled.as_text()), shape)
        assert (found.kind, found.bytes, found.in_loop) == (kind, payload, True)
        # of which the text names a sender and its receiver
        if kind != "collective-permute":
            assert (found.axis, found.group_size) == (axis, n)


class StoredPlan:
    """The plan of a compiled program, whose compute it knows, with any measured times.

    A group is a kind of collective on an axis of a size and a link: it has a line of its
    own.
    """

    def __init__(self, name, folder):
        self._name, self._folder = name, folder
        self.by_datasheet = planned(name)
        self.groups = list(
            dict.fromkeys(self.group_of(c) for c in self.by_datasheet.collectives)
        )

    def group_of(self, collective):
        return (
            collective.kind,
            collective.axis,
            collective.group_size,
            collective.link.name,
        )

    def with_times(self, lines: dict) -> Plan:
        """Plans with lines: group -> (seconds of latency, bytes a second)."""
        hardware = CASES[self._name][0]
        fits = [
            fit(kind, latency_s, rate, axis=axis, axis_size=size, link=link)
            for (kind, axis, size, link), (latency_s, rate) in lines.items()
        ]
        file = written(self._folder, fits, hardware)
        return planned(self._name, calibration.load(file, targets.parse(hardware)))

    def with_one_line(self, latency_s: float, rate: float = 1e18) -> Plan:
        return self.with_times(dict.fromkeys(self.groups, (latency_s, rate)))


@pytest.fixture(params=["v5p_tensor4", "h100_4x8"])
def stored(request, tmp_path):
    """Stands for a TPU and for a GPU; some of their collectives are asynchronous."""
    stored = StoredPlan(request.param, tmp_path)
    assert any(c.asynchronous for c in stored.by_datasheet.collectives)
    assert exposed_s(stored.by_datasheet) > 0
    return stored


def exposed_s(plan: Plan) -> float:
    return plan.time.waterfall["exposed communication"]


def a_line_of_its_own_for_each(groups):
    return {
        group: (1e-5 * (place + 1), 1e9 * (place + 2))
        for place, group in enumerate(groups)
    }


def test_a_measured_collective_takes_its_groups_latency_and_rate(stored):
    lines = a_line_of_its_own_for_each(stored.groups)
    measured = stored.with_times(lines)

    datasheet = stored.by_datasheet.collectives
    for old, new in zip(datasheet, measured.collectives, strict=True):
        latency_s, rate = lines[stored.group_of(new)]
        by_hand = new.count * (latency_s + new.wire_bytes / rate)
        assert new.step_s == pytest.approx(by_hand)
        assert new.step_s != old.step_s


def test_measured_time_is_either_hidden_or_exposed_and_compute_stays(stored):
    datasheet = stored.by_datasheet
    measured = stored.with_times(a_line_of_its_own_for_each(stored.groups))

    communication_s = sum(c.step_s for c in measured.collectives)
    assert exposed_s(measured) + measured.time.hidden_s == pytest.approx(
        communication_s
    )
    assert measured.time.hidden_s == pytest.approx(
        sum(c.hidden_s for c in measured.collectives)
    )
    more_exposed = exposed_s(measured) - exposed_s(datasheet)
    assert more_exposed != pytest.approx(0)
    assert measured.time.step_s - datasheet.time.step_s == pytest.approx(more_exposed)


def test_collectives_of_no_time_are_hidden_whole_where_any_was_hidden(stored):
    fast = stored.with_one_line(1e-12)

    assert 0 < fast.time.hidden_s < sum(c.step_s for c in fast.collectives)
    datasheet = stored.by_datasheet.collectives
    for old, new in zip(datasheet, fast.collectives, strict=True):
        is_hidden = old.hidden_s > 1e-9
        expected_s = new.step_s if is_hidden else 0.0
        assert new.hidden_s == pytest.approx(expected_s, abs=1e-3 * new.step_s)


def test_compute_hides_only_what_it_lasts(stored):
    """A second more for each collective lengthens the step by as many seconds."""
    slow, slower = stored.with_one_line(1.0), stored.with_one_line(2.0)

    assert slow.time.hidden_s > 0
    assert slow.time.hidden_s == pytest.approx(slower.time.hidden_s)
    executions = sum(c.count for c in slow.collectives)
    assert slower.time.step_s - slow.time.step_s == pytest.approx(executions)


def test_links_are_shown_as_calibrated_beside_their_datasheets(tmp_path):
    entries = [
        fit("all-gather", 2e-5, 3e9, axis_size=4, link="InfiniBand", axis="fsdp")
    ]
    entries += [
        fit("all-reduce", 1e-5, 7e10, axis_size=4, link="NVLink", axis="tensor")
    ]
    held = calibration.load(
        written(tmp_path, entries, "h100:4x8"), targets.parse("h100:4x8")
    )
    before, after = (planned("h100_4x8", one).to_json() for one in (None, held))
    links = {axis: dict(link) for axis, link in after["layout"]["links"].items()}
    own = {axis: link.pop("calibrated") for axis, link in links.items()}
    assert own["fsdp"] == {"all-gather": {"bytes_per_s": 3e9, "alpha_s": 2e-5}}
    assert own["data"] == {}
    assert own["tensor"] == {"all-reduce": {"bytes_per_s": 7e10, "alpha_s": 1e-5}}
    for axis, link in before["layout"]["links"].items():
        assert link == links[axis] | {"calibrated": {}}  # the datasheet's
    assert "calibrated" not in show.as_text(before)
    words = " ".join(show.as_text(after).split())
    assert (
        "NVLink, calibrated: all-reduce 0.01 ms + 70 GB/s (datasheet: 450 GB/s each way)"
        in words
    )
    assert (
        "InfiniBand, calibrated: all-gather 0.02 ms + 3 GB/s (datasheet: 100 GB/s each way)"
        in words
    )
