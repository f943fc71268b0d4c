"""Advice: legal edits that save what they say, and say what they cost."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxdist.config import files, schema
from jaxdist.planner import advice, memory, targets
from jaxdist.trainer import run_config, validation
from support.paths import CONFIGS


def advised(name: str, on: str, *, capacity: int | None = None, **changes):
    config = files.load(name, folders=[CONFIGS])
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    run, target = run_config.from_config(config), targets.parse(on)
    composition = validation.validate_on(run, target.num_devices, with_data=False)
    components = memory.components(composition, target)
    peak = memory.accounted_peak(components)
    found = advice.edits(composition, target, peak, capacity_bytes=capacity)
    return run, target, components, found


def typed(run, override: str):
    """Returns the run with the override as the command line parses it."""
    config = schema.to_config_dict(run)
    words = dict(word.split("=", 1) for word in override.split())
    files.apply_overrides(config, words, run_config.full_schema(run.model["target"]))
    return run_config.from_config(config)


@pytest.fixture(scope="module")
def large():
    return advised("llama3_8b", "v5e:4x4", capacity=int(15.75 * 2**30))


def test_a_run_too_large_gets_at_least_three_edits(large):
    run, target, components, found = large
    assert memory.accounted_peak(components) > 15.75 * 2**30
    assert len([edit for edit in found if edit.override]) >= 3
    assert any(edit.override and edit.enough for edit in found)
    for edit in filter(lambda e: e.override, found):
        edited = typed(run, edit.override)
        composition = validation.validate_on(
            edited, target.num_devices, with_data=False
        )
        smaller = memory.accounted_peak(memory.components(composition, target))
        assert edit.saves_bytes == memory.accounted_peak(components) - smaller > 0
        assert edit.enough == (smaller <= advice.SAFE_SHARE * 15.75 * 2**30)


def test_an_edit_that_changes_the_losses_says_so(large):
    run, _, _, found = large
    changing = [
        e
        for e in found
        if e.override
        and run_config.run_fingerprint(typed(run, e.override))
        != run_config.run_fingerprint(run)
    ]
    assert changing
    assert changing == [e for e in found if "CHANGES THE LOSSES" in e.cost_note]
    same = [e for e in found if e not in changing]
    assert same
    assert all("same losses" in edit.cost_note for edit in same)


def test_the_cheapest_come_first(large):
    words = [edit.words for edit in large[3]]
    assert words[0].startswith("--config.batch.accumulation=")
    assert words[-1] == "--on v5e:4x8"


def test_edits_are_joined_where_none_alone_is_enough(large):
    def keys(edits) -> list[str]:
        """Lists the edits without values, which depend on the capacity."""
        return [edit.words.partition("=")[0] for edit in edits]

    assert any(edit.enough for edit in large[3] if edit.override)
    joined, *found = advised("llama3_8b", "v5e:4x4", capacity=13 * 2**30)[3]
    assert joined.enough
    assert joined.words.count("--config.") > 1
    assert keys(found) == keys(large[3])
    assert not any(e.enough for e in found if e.override)


def test_copies_are_shared_out_first():
    found = advised("llama3_8b", "v5p:4x4x4", **{"mesh.data": 8, "mesh.fsdp": 8})[3]
    assert found[0].words == "--config.mesh.data=1 --config.mesh.fsdp=-1"
    assert found[0].enough is None  # nobody said how much there is


def test_weaker_remat_and_pipelines_have_their_own_edits():
    def words(**changes) -> str:
        return " ".join(
            edit.words for edit in advised("llama3_8b:tiny", "v5e:2x4", **changes)[3]
        )

    found = words(**{"remat.policy": "none", "mesh.fsdp": 8})
    assert "remat.policy=dots" in found
    assert "remat.policy=full" in found
    large = {
        "mesh.pipeline": 2,
        "mesh.fsdp": 4,
        "pipeline.remat": "none",
        "batch.global_size": 256,
    }
    found = words(**large)
    assert "pipeline.microbatches=" in found
    assert "batch.accumulation" not in found
    assert "pipeline.remat=full" in found
    assert "remat.policy=dots" not in found


def test_a_sequence_too_long_for_a_device_is_split_and_a_shared_residual_stream_saves_more():
    long = {"batch.sequence_length": 131_072, "mesh.fsdp": 64}
    found = {edit.words: edit for edit in advised("llama3_8b", "v5p:4x4x4", **long)[3]}
    (split,) = (edit for words, edit in found.items() if "mesh.context=" in words)
    assert "batch.accumulation=" in split.words
    assert split.saves_bytes > 10 * 2**30
    # 4 each
    assert "mesh.context" not in " ".join(
        e.words for e in advised("llama3_8b", "v5e:4x4")[3]
    )
    tensor = {"mesh.fsdp": 16, "mesh.tensor": 4, "remat.policy": "full"}
    first, *_ = advised("llama3_8b", "v5p:4x4x4", **tensor)[3]
    assert first.words == "--config.mesh.sequence_parallel=true"
    assert first.saves_bytes > 0


def test_check_compiles_in_order_until_one_fits(large):
    run, _, _, found = large
    asked = []

    def compile(edited):
        asked.append(edited)
        return SimpleNamespace(fits=len(asked) == 2, peak_bytes=14 * 2**30)

    two = [dataclasses.replace(edit, enough=True) for edit in found]
    checked = advice.check(run, two, compile)
    assert [edit.checked for edit in checked][:3] == [False, True, None]
    assert checked[1].peak_bytes == 14 * 2**30
    assert len(asked) == 2
