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
    assert f"times as measured on cpu:2: {file}" in shown
    assert "all-gather over fsdp" in shown


@pytest.mark.parametrize(
    ("fits", "hardware", "words"),
    [
        (
            [fit("all-reduce"), fit("all-gather", residual=0.21)],
            "cpu:2",
            "off by more than 20%: all-gather",
        ),
        (
            [fit("all-reduce", bytes_per_s=None)],
            "cpu:2",
            "off by more than 20%: all-reduce",
        ),
        ([fit("all-reduce")], "cpu:4", "measured on cpu:4, the plan is for cpu:2"),
        (
            [fit("all-reduce")],
            "h100:1x2",
            "measured on h100:1x2, the plan is for cpu:2",
        ),
        ([], "cpu:2", "no fit in it is usable"),
        ([fit("all-reduce", alpha_s="soon")], "cpu:2", "alpha_s of a fit"),
        ([fit("broadcast")], "cpu:2", "kinds are"),
        ([{"kind": "all-reduce"}], "cpu:2", "of a fit is"),
    ],
)
def test_what_cannot_calibrate_is_refused_before_anything_compiles(
    fits, hardware, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        answer, "make_plan", lambda *_, **__: pytest.fail("nothing is to be compiled")
    )
    command = [
        *FLAGS,
        "--on=cpu:2",
        f"--calibration={written(tmp_path, fits, hardware)}",
    ]
    with pytest.raises(ConfigError, match=words):
        plan.main(command)
    assert exit_code.exit_code(lambda: plan.main(command)) == 78
    with pytest.raises(ConfigError, match="leave out --search and --fix"):
        plan.main([*command, "--fix"])


def test_a_fit_serves_its_chip_its_network_and_its_size(tmp_path):
    entries = [fit("all-reduce", 1e-5, 1e9, axis="data", axis_size=8, link="NVLink")]
    for hardware, on, held in [
        ("h100:1x8", "h100:4x8@25GB/s", True),
        ("h100:2x8@25GB/s", "h100:4x8@25GB/s", True),
        ("h100:2x8@50GB/s", "h100:4x8@25GB/s", False),
        ("h200:1x8", "h100:1x8", False),
    ]:
        file = written(tmp_path, entries, hardware)
        if held:
            assert len(calibration.load(file, targets.parse(on)).fits) == 1
            continue
        with pytest.raises(ConfigError, match="datasheet rates"):
            calibration.load(file, targets.parse(on))


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


@pytest.mark.parametrize("name", ["v5p_tensor4", "h100_4x8"])
def test_measured_times_are_hidden_by_compute_or_exposed(name, tmp_path):
    """On a TPU and on a GPU, of whose compute a plan knows: sums by hand, and what
    their windows hold.
    """
    before = planned(name)
    behind = [one.asynchronous for one in before.collectives]
    assert any(behind)
    assert before.time.waterfall["exposed communication"] > 0
    groups = dict.fromkeys(
        (o.kind, o.axis, o.group_size, o.link.name) for o in before.collectives
    )

    def measured(line) -> Plan:
        """Returns the plan with each group's (alpha, rate) by its place."""
        lines = [(group, *line(i)) for i, group in enumerate(groups)]
        entries = [
            fit(kind, alpha, rate, axis=axis, axis_size=size, link=link)
            for (kind, axis, size, link), alpha, rate in lines
        ]
        file = written(tmp_path, entries, CASES[name][0])
        return planned(name, calibration.load(file, targets.parse(CASES[name][0])))

    def parts(found: Plan) -> tuple[float, float]:
        """Returns the seconds in the open, and all of those behind compute."""
        seconds = [one.step_s for one in found.collectives]
        together = sum(s for s, hides in zip(seconds, behind, strict=True) if hides)
        return sum(seconds) - together, together

    rates = {group: (1e-5 * (i + 1), 1e9 * (i + 2)) for i, group in enumerate(groups)}
    after = measured(lambda i: list(rates.values())[i])
    for old, new in zip(before.collectives, after.collectives, strict=True):
        alpha, rate = rates[new.kind, new.axis, new.group_size, new.link.name]
        assert (
            new.step_s
            == pytest.approx(new.count * (alpha + new.wire_bytes / rate))
            != old.step_s
        )
    opened, together = parts(after)
    exposed = after.time.waterfall["exposed communication"]
    assert exposed == pytest.approx(opened + together - after.time.hidden_s)
    assert after.time.hidden_s == pytest.approx(
        sum(one.hidden_s for one in after.collectives)
    )
    change = exposed - before.time.waterfall["exposed communication"]
    # compute stays
    assert after.time.step_s - before.time.step_s == pytest.approx(change)

    fast = measured(lambda i: (1e-12, 1e18))
    # one after the other on a link
    for old, new in zip(before.collectives, fast.collectives, strict=True):
        whole = new.step_s if old.hidden_s > 1e-9 else 0.0
        assert new.hidden_s == pytest.approx(whole, abs=1e-3 * new.step_s)
    assert 0 < fast.time.hidden_s < sum(one.step_s for one in fast.collectives)
    slow, slower = (
        measured(lambda i, alpha=alpha: (alpha, 1e18)) for alpha in (1.0, 2.0)
    )
    # all that the windows hold
    assert 0 < slow.time.hidden_s == pytest.approx(slower.time.hidden_s)
    executions = sum(one.count for one in slow.collectives)
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
