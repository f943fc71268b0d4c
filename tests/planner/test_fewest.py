"""The smallest machine: sizes in order, ZeRO stages by arithmetic, what the compiler refuses is passed."""

from dataclasses import replace

import pytest

from jaxdist.config import ConfigError, files
from jaxdist.planner import fewest
from jaxdist.planner.plan import plan_by_arithmetic
from jaxdist.trainer import run_config
from support.paths import CONFIGS


def run_of(name, **changes):
    config = files.load(name, folders=[CONFIGS])
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    return run_config.from_config(config)


def texts(family, count):
    return [
        target.text.partition(":")[2] for target, _ in zip(fewest.sizes(family), range(count), strict=False)
    ]


def test_sizes_are_those_that_are_sold():
    assert texts("h100", 6) == ["1x1", "1x2", "1x4", "1x8", "2x8", "4x8"]
    assert texts("h100@25GB/s", 5)[-1] == "2x8@25GB/s"
    assert texts("h100-pcie", 99) == ["1x1", "1x2", "1x4", "1x8"]  # no network is sold with it
    assert texts("v5p", 9)[4:] == ["4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"]
    assert texts("v5e", 10)[-2:] == ["16x16x2", "16x16x4"]
    assert texts("gb200", 8) == ["1x1", "1x2", "1x4", "1x8", "1x16", "1x32", "1x64", "1x72"]
    with pytest.raises(ConfigError, match="must be a family of chips"):
        next(fewest.sizes("h9"))


def test_the_first_that_the_compiler_takes_is_the_smallest(monkeypatch):
    asked = []

    def compiled(run, target, **options):  # refuses the first
        asked.append((target.text, run.mesh.zero, run.batch.accumulation))
        return replace(plan_by_arithmetic(run, target), fits=len(asked) > 1, peak_bytes=1)

    monkeypatch.setattr(fewest, "make_plan", compiled)
    found = fewest.fewest(
        run_of("llama3_8b", **{"batch.global_size": 8, "batch.sequence_length": 512}), "h100"
    )
    by_size = {}
    for row in found.rows:
        by_size.setdefault(row.target.text, []).append(row)
    assert [row.zero for row in by_size["h100:1x1"]] == [0]
    assert not any(row.fits for row in by_size["h100:1x1"])  # 16 bytes x 8B on 80 GB
    assert [row.zero for row in by_size["h100:1x4"]] == [0, 1, 2, 3]
    assert found.exit_code == 0 and len(asked) == 2
    assert (found.best.target.text, found.best.run.mesh.zero) == asked[1][:2]
    assert list(by_size)[-1] == "h100:1x8" if found.best.target.text == "h100:1x4" else True
    peaks = {row.zero: row.peak_bytes for row in by_size["h100:1x4"]}
    assert peaks[3] < peaks[1] < peaks[0]
    best = found.to_json()["best"]
    assert best["fits"] and any(word.startswith("mesh.fsdp=") for word in best["overrides"])


def test_a_run_that_is_legal_nowhere_says_why(monkeypatch):
    monkeypatch.setattr(fewest, "MOST_CHIPS", 16)
    with pytest.raises(ConfigError, match="--fewest=h100"):
        fewest.fewest(run_of("llama3_8b", **{"mesh.tensor": 7}), "h100")
