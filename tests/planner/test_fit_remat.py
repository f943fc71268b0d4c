"""`remat.policy=fit`: the least recomputation that fits, and what a run that goes on
does with it.
"""

import json
from dataclasses import replace
from functools import cache

import jax
import pytest

from jaxdist import plan, train
from jaxdist.config import ConfigError, schema
from jaxdist.parallel.mesh import resolve_mesh
from jaxdist.parallel.remat import RematConfig
from jaxdist.planner import (
    fit_remat,
    layouts,
    memory,
    policies,
    remat_search,
    targets,
)
from jaxdist.trainer import validation, workdir
from jaxdist.trainer.run_config import RunConfig
from support.runs import overrides, refused, run_of

# So many tokens that saved activations, not weights, make the peak.
SIZES = {
    "batch.global_size": 64,
    "batch.sequence_length": 512,
    "precision.compute": "bfloat16",
}
SIZES |= {"remat.policy": "fit", "mesh.data": 1, "mesh.fsdp": 8}


def asked(**changes) -> RunConfig:
    return run_of("llama3_8b:tiny", **SIZES | changes)


@cache
def bytes_of(on: str, policy: str) -> float:
    whole = policies.Policies(asked(), targets.parse(on), None)
    return whole.accounted(RematConfig(policy)).accounted_bytes


def weigher(on: str, share: float) -> policies.Policies:
    """Returns the policies where a share of what `full` and `none` differ by may be
    used.
    """
    full, none = bytes_of(on, "full"), bytes_of(on, "none")
    limit = int(full + share * (none - full))
    return policies.Policies(asked(), targets.parse(on), limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "on",
    [
        pytest.param("v5e:2x4", marks=pytest.mark.slow),
        "h100:1x8",
        pytest.param("cpu:8", marks=pytest.mark.slow),
    ],
)
def test_the_best_is_no_slower_than_any_policy_of_the_search(on):
    found = weigher(on, 0.2)
    best = found.best()[0]
    assert found.needed(best) <= found.most
    by_hand = [found.accounted(RematConfig(policy)) for policy in layouts.REMAT]
    fits = [
        one
        for one in by_hand
        if one.accounted_bytes <= found.most and one.estimate.host == 0
    ]
    assert fits
    assert len(fits) < len(by_hand)
    assert best.estimate.step_s <= (1 + policies.SAME) * min(
        one.estimate.step_s for one in fits
    )
    components = best.components
    assert on != "cpu:8" or memory.HOST not in components  # a CPU's host is itself


@pytest.mark.slow
def test_of_equal_policies_the_one_of_a_word_comes_first():
    """Else names of one program take the places of those that are compiled."""
    run = run_of("quickstart", **{"remat.policy": "fit", "batch.global_size": 8192})
    found = policies.Policies(run, targets.parse("v6e:2x2"), None)
    dots, twin, *_ = found.best()
    assert twin.run.remat.policy.startswith("save:")
    assert twin.estimate.step_s == dots.estimate.step_s
    assert twin.accounted_bytes == dots.accounted_bytes
    assert dots.run.remat.policy == "dots"


@pytest.mark.slow
def test_more_memory_means_less_recomputation():
    steps = [
        weigher("cpu:8", share).best()[0].estimate.compute for share in (0.02, 0.3, 1.0)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_what_the_compiler_needs_more_is_taken_off():
    found = weigher("v5e:2x4", 0.3)
    first = found.best()[0]
    found.correct(first, found.hard + 1000)
    second = found.best()[0]
    assert found.needed(second) < found.needed(first) <= found.hard


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"mesh.pipeline": 2, "mesh.fsdp": 4},
            "stages of a pipeline recompute as pipeline.remat says",
        ),
        ({"mesh.fsdp": 3}, "mesh: "),
    ],
)
def test_what_has_no_policy_is_refused(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        fit_remat.fit(asked(**changes), targets.parse("cpu:8"))


def test_what_fits_with_no_policy_is_refused_before_a_compile():
    with pytest.raises(
        ConfigError, match="no policy makes the step fit .* takes least"
    ) as refusal:
        fit_remat.fit(asked(), targets.parse("v5e:2x4"), limit_bytes=2**20)
    assert "raise mesh.fsdp or batch.accumulation" in refusal.value.faults[0]


def test_elsewhere_it_is_refused_with_the_cure(capsys):
    with pytest.raises(
        ConfigError, match="`jaxdist train` and `jaxdist plan --fix` resolve it"
    ):
        validation.validate(asked(), jax.devices(), with_data=False)
    words = [f"--config.{key}={value}" for key, value in SIZES.items()]
    with pytest.raises(ConfigError, match="plan --fix"):
        plan.main(["--config", "llama3_8b:tiny", "--on", "cpu:8", *words])


# --- a run that goes on ---------------------------------------------------------------

STORED = RematConfig("save:mlp_up", layers=2)


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of a run whose policy was resolved for the devices here."""
    where = f"cpu:8, {resolve_mesh(asked().mesh, 8)}, accumulation 1"
    stored = replace(asked(), remat=replace(STORED, fitted=f"{STORED} for {where}"))
    workdir.write_json(
        tmp_path / workdir.CONFIG, schema.to_config_dict(stored).to_dict()
    )
    return tmp_path


def resolved(folder, said, **changes) -> RematConfig:
    return fit_remat.resolve(
        asked(**changes), jax.devices(), folder=folder, say=said.append
    ).remat


def test_a_run_that_goes_on_keeps_its_policy(folder, monkeypatch):
    monkeypatch.setattr(fit_remat, "fit", None)  # nothing is looked for
    said: list[str] = []
    found = resolved(folder, said)
    assert replace(found, fitted="") == STORED
    assert "as it was resolved for cpu:8" in said[0]
    # From the folder alone, without a config that says `fit`.
    stored = workdir.read_config(folder)
    assert (
        fit_remat.resolve(stored, jax.devices(), folder=folder, say=said.append)
        == stored
    )


def test_on_another_mesh_it_keeps_what_fits(folder, monkeypatch):
    monkeypatch.setattr(fit_remat, "fit", None)
    said: list[str] = []
    found = resolved(folder, said, **{"mesh.data": 2, "mesh.fsdp": 4})
    assert replace(found, fitted="") == STORED
    assert "by arithmetic: kept" in said[0]
    assert "data 2 x fsdp 4" in found.fitted


def test_on_another_mesh_it_is_found_anew_where_it_does_not_fit(folder, monkeypatch):
    monkeypatch.setattr(fit_remat, "_limit", lambda devices: 2**20)
    said: list[str] = []
    with pytest.raises(ConfigError, match="no policy makes the step fit"):
        resolved(folder, said, **{"mesh.data": 2, "mesh.fsdp": 4})
    assert "does not fit" in said[0]
    assert "resolved again" in said[0]


def test_a_policy_by_hand_is_left_alone(folder):
    stored = workdir.read_config(folder)
    by_hand = replace(stored, remat=replace(stored.remat, policy="dots"))
    assert fit_remat.resolve(
        by_hand, jax.devices(), folder=folder
    ).remat == RematConfig("dots", layers=2)


@pytest.mark.slow
def test_train_resolves_it_once(tmp_path, capsys):
    settings = {
        "data.source": "stdlib",
        "train.steps": 2,
        "train.log_every": 1,
        "optimizer.warmup_steps": 1,
        "batch.global_size": 16,
    }
    words = overrides(*(f"{key}={value}" for key, value in (SIZES | settings).items()))
    arguments = ["--config", "llama3_8b:tiny", "--workdir", str(tmp_path), *words]
    assert train.main(arguments) == 0
    stored = json.loads((tmp_path / workdir.CONFIG).read_text())["remat"]
    # all fits, and this is the usual name of what saves each product of matrices
    assert stored["policy"] == "dots"
    assert stored["layers"] == 0
    assert stored["fitted"].startswith(f"{stored['policy']} for cpu:8, fsdp 8")
    assert (
        f"remat.policy=fit: --config.remat.policy={stored['policy']}"
        in capsys.readouterr().out
    )
    assert train.main([*arguments, "--config.train.steps=3"]) == 0
    assert (
        f"remat: {stored['policy']}, as it was resolved for cpu:8"
        in capsys.readouterr().out
    )
    assert json.loads((tmp_path / workdir.CONFIG).read_text())["remat"] == stored
    staged = overrides("mesh.fsdp=4", "mesh.pipeline=2", "pipeline.microbatches=2")
    (fault,) = refused(capsys, *arguments, *staged)
    assert "stages of a pipeline recompute" in fault


@pytest.mark.parametrize("may_fit", [True, False])
def test_the_smallest_policy_is_compiled_if_the_arithmetic_may_be_too_high(may_fit):
    least = object()

    class Full:
        """Policies of which none fits by arithmetic."""

        def best(self) -> list[object]:
            return []

        def least(self) -> object:
            return least

        def may_fit(self, candidate: object) -> bool:
            return may_fit

    assert remat_search._next(Full(), [], []) is (least if may_fit else None)
