"""The smallest machine: sizes in order, ZeRO stages by arithmetic, what the compiler
refuses is passed.
"""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from jaxdist import plan
from jaxdist.config import ConfigError
from jaxdist.planner import document, fewest, memory, on_target, targets
from jaxdist.planner.plan import plan_by_arithmetic
from support.runs import run_of


def texts(family, count):
    return [
        target.text.partition(":")[2]
        for target, _ in zip(fewest.sizes(family), range(count), strict=False)
    ]


def test_sizes_are_those_that_are_sold():
    assert texts("h100", 6) == ["1x1", "1x2", "1x4", "1x8", "2x8", "4x8"]
    assert texts("h100@25GB/s", 5)[-1] == "2x8@25GB/s"
    # no network is sold with it
    assert texts("h100-pcie", 99) == ["1x1", "1x2", "1x4", "1x8"]
    assert texts("v5p", 9)[4:] == ["4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"]
    assert texts("v5e", 10)[-2:] == ["16x16x2", "16x16x4"]
    assert texts("gb200", 8) == [
        "1x1",
        "1x2",
        "1x4",
        "1x8",
        "1x16",
        "1x32",
        "1x64",
        "1x72",
    ]
    assert texts("trillium", 1) == ["1x1"]  # another name of v6e
    with pytest.raises(ConfigError, match="must be a family of chips"):
        next(fewest.sizes("h9"))
    with pytest.raises(ConfigError, match="^--fewest=h100@0GB/s: behind @"):
        next(fewest.sizes("h100@0GB/s"))


class CompilerThatRefusesTheFirst:
    """Stands for `make_plan`: the first layout does not fit, all later ones do."""

    def __init__(self):
        self.asked = []  # text of the target, mesh.zero

    def __call__(self, run, target, **options):
        self.asked.append((target.text, run.mesh.zero))
        by_arithmetic = plan_by_arithmetic(run, target)
        return replace(by_arithmetic, fits=len(self.asked) > 1, peak_bytes=1)


@pytest.fixture(scope="module")
def smallest_for_8b():
    """Returns the answer for an 8B model on H100s, and what was compiled for it."""
    compiler = CompilerThatRefusesTheFirst()
    values = {"batch.global_size": 8, "batch.sequence_length": 512}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fewest, "make_plan", compiler)
        found = fewest.fewest(run_of("llama3_8b", **values), "h100")
    return found, compiler.asked


def rows_by_size(found):
    by_size = {}
    for row in found.rows:
        by_size.setdefault(row.target.text, []).append(row)
    return by_size


def test_the_first_that_the_compiler_takes_is_the_smallest(smallest_for_8b):
    found, asked = smallest_for_8b
    assert [target for target, _ in asked] == ["h100:1x2", "h100:1x4"]
    assert (found.best.target.text, found.best.run.mesh.zero) == asked[1]
    assert found.exit_code == 0


def test_a_size_that_arithmetic_rules_out_is_not_compiled(smallest_for_8b):
    found, asked = smallest_for_8b
    one_chip = rows_by_size(found)["h100:1x1"]  # 16 bytes x 8B on 80 GB
    assert not any(row.fits for row in one_chip)
    assert "h100:1x1" not in [target for target, _ in asked]


def test_a_size_has_a_row_for_each_zero_stage_that_it_allows(smallest_for_8b):
    by_size = rows_by_size(smallest_for_8b[0])
    assert [row.zero for row in by_size["h100:1x1"]] == [0]
    assert [row.zero for row in by_size["h100:1x4"]] == [0, 1, 2, 3]


def test_higher_zero_stages_hold_less(smallest_for_8b):
    four_chips = rows_by_size(smallest_for_8b[0])["h100:1x4"]
    peak_bytes = {row.zero: row.peak_bytes for row in four_chips}
    assert peak_bytes[3] < peak_bytes[1] < peak_bytes[0]


def test_the_next_larger_size_is_shown_too(smallest_for_8b):
    assert list(rows_by_size(smallest_for_8b[0]))[-1] == "h100:1x8"


def test_the_answer_in_json_has_all_keys_of_its_layout(smallest_for_8b):
    best = smallest_for_8b[0].to_json()["best"]
    assert best["fits"]
    assert any(word.startswith("mesh.fsdp=") for word in best["overrides"])
    assert "batch.accumulation=1" in best["overrides"], "whatever the config says"


def test_a_batch_is_cut_into_all_parts_that_its_shards_allow():
    run = run_of(
        "llama3_8b",
        **{"batch.global_size": 24, "remat.policy": "dots", "batch.accumulation": 8},
    )
    at_once = replace(run, batch=replace(run.batch, accumulation=1))
    whole = plan_by_arithmetic(at_once, targets.parse("h100:1x8"))
    (row,) = (
        row for row in fewest._rows(run, targets.parse("h100:1x8")) if row.zero == 3
    )
    assert memory.accounted_peak(whole.components) > whole.capacity_bytes
    # of 3 samples a device; 2 parts are none
    assert row.fits
    assert row.run.batch.accumulation == 3


def rows_of(run, on):
    return {row.zero: row for row in fewest._rows(run, targets.parse(on))}


def test_a_sequence_that_no_device_holds_is_split():
    long = {
        "batch.global_size": 4,
        "batch.sequence_length": 131_072,
        "batch.accumulation": 1,
    }
    found = rows_of(run_of("llama3_8b", **long), "v5p:2x2x4")
    assert found[3].fits
    assert found[3].run.mesh.context == 4
    assert "mesh.context=4" in found[3].overrides()
    longer = long | {"batch.sequence_length": 1_048_576, "batch.global_size": 64}
    assert rows_of(run_of("llama3_8b", **longer), "v5p:4x4x4")[3].run.mesh.context > 1
    short = rows_of(run_of("llama3_8b"), "v5p:4x4x4")[3]
    assert short.fits
    assert short.run.mesh.context == 1
    assert "context" not in " ".join(short.overrides())


def test_machines_for_a_model_with_experts(monkeypatch):
    asked = []

    def compiled(run, target, **options):
        asked.append(
            (target.text, dict(on_target.validate_for(run, target).shape.sizes))
        )
        return replace(plan_by_arithmetic(run, target), fits=True, peak_bytes=1)

    monkeypatch.setattr(fewest, "make_plan", compiled)
    run = run_of("mixtral_8x7b", **{"mesh.expert": 4, "batch.global_size": 64})
    found = fewest.fewest(run, "h100")
    # fewer than the devices of the axis
    assert set(found.illegal) == {"h100:1x1", "h100:1x2"}
    assert found.best
    assert {sizes["expert"] for _, sizes in asked} == {4}
    peaks = {row.target.text: row.peak_bytes for row in found.rows if row.zero == 3}
    # 47 B x 12 bytes over 80 GB each
    assert list(peaks) == ["h100:1x4", "h100:1x8", "h100:2x8", "h100:4x8"]
    assert found.best.target.text == "h100:2x8"
    assert sorted(peaks.values(), reverse=True) == [*peaks.values()]


def test_refusals_of_one_size_leave_the_next_to_be_asked(monkeypatch, capsys):
    asked = []

    def compiled(run, target, **options):
        asked.append(target.text)
        return replace(plan_by_arithmetic(run, target), fits=False, peak_bytes=1)

    monkeypatch.setattr(fewest, "make_plan", compiled)
    assert (
        plan.main(["--config=quickstart", "--fewest=h100", "--json"])
        == document.CANNOT_TELL
    )
    assert list(dict.fromkeys(asked)) == ["h100:1x1", "h100:1x2", "h100:1x4"]
    assert all(asked.count(size) <= 2 for size in asked)
    found = json.loads(capsys.readouterr().out)
    assert found["best"] is None
    assert found["rows"][-1]["target"] == "h100:1x8"
    fewest.show(found, Console(width=120))
    shown = capsys.readouterr().out
    assert "no size is known to fit" in shown
    assert "fits by arithmetic" in shown


@pytest.mark.parametrize(
    "more", [["--on=h100"], ["--tokens=1e9"], ["--search"], ["--workdir=w"]]
)
def test_what_says_nothing_of_a_size_is_refused(more):
    with pytest.raises(ConfigError, match="--fewest chooses the machine"):
        plan.main(["--config=quickstart", "--fewest=h100", *more])
    with pytest.raises(ConfigError, match="must be a family"):
        plan.main(["--config=quickstart", "--fewest="])


def test_a_run_that_is_legal_nowhere_says_why(monkeypatch):
    monkeypatch.setattr(fewest, "MOST_CHIPS", 16)
    with pytest.raises(ConfigError, match="--fewest=h100"):
        fewest.fewest(run_of("llama3_8b", **{"mesh.tensor": 7}), "h100")


def test_a_size_that_is_a_little_too_small_by_arithmetic_is_compiled():
    def row(peak_bytes: int) -> fewest.Row:
        return fewest.Row(
            run=run_of("quickstart"),
            target=targets.parse("h100:1x1"),
            zero=0,
            peak_bytes=peak_bytes,
            state_bytes=1,
            capacity_bytes=1000,
        )

    nearest, far = row(1090), row(1110)
    assert fewest._to_compile([far, nearest]) == [nearest]
    assert fewest._to_compile([far]) == []
    assert fewest._to_compile([nearest, row(900)]) == [row(900)]
