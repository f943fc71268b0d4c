"""`compose`: a config varied by key, and a run taken apart without effects."""

from dataclasses import dataclass, field

import jax
import optax
import pytest

from jaxdist.config import ConfigError
from jaxdist.parallel.mesh import resolve_mesh
from jaxdist.parallel.offload import HOST
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.layerwise import DEVICE
from jaxdist.trainer import compose, validation
from support.objectives import SumObjective
from support.runs import run_of


def test_overrides_change_what_they_name_and_nothing_else():
    run = run_of("quickstart")
    changed = compose.with_overrides(
        run,
        {
            "mesh.fsdp": 4,
            "mesh.dcn.data": 2,
            "model.num_layers": 3,
            "remat": RematConfig("full"),
            "seed": 7,
        },
    )
    assert changed.mesh.fsdp == 4
    assert changed.mesh.dcn.data == 2
    assert changed.model == {**run.model, "num_layers": 3}
    assert changed.remat == RematConfig("full")
    assert changed.seed == 7
    back = {
        "mesh": run.mesh,
        "model.num_layers": run.model["num_layers"],
        "remat": run.remat,
        "seed": run.seed,
    }
    assert compose.with_overrides(changed, back) == run
    assert compose.with_overrides(run, {}) is run


def test_an_override_of_a_model_s_group_keeps_the_rest_of_the_group():
    run = run_of("quickstart")
    options = {**run.model, "group": {"rank": 4, "scale": 1.0}}
    run = compose.with_overrides(run, {"model": options})
    changed = compose.with_overrides(run, {"model.group.rank": 8})
    assert changed.model["group"] == {"rank": 8, "scale": 1.0}
    assert run.model["group"]["rank"] == 4


@pytest.mark.parametrize(
    "key",
    [
        "mesh.fdsp",
        "meshes.fsdp",
        "mesh.fsdp.size",
        "model.layers",
        "model.group.rank",
        "model.num_layers.size",
    ],
)
def test_an_override_of_no_key_is_an_error(key):
    with pytest.raises((AttributeError, TypeError)):
        compose.with_overrides(run_of("quickstart"), {key: 2})


@pytest.mark.parametrize(
    ("changes", "microbatches", "parts"),
    [
        ({"batch.accumulation": 2}, 1, 2),
        ({"mesh.pipeline": 2}, 8, 8),
        (
            {
                "mesh.pipeline": 2,
                "pipeline.microbatches": 4,
                "batch.accumulation": 2,
                "batch.global_size": 32,
            },
            4,
            8,
        ),
    ],
)
def test_a_composition_tells_the_parts_of_a_step_as_it_is_built(
    changes, microbatches, parts
):
    run = run_of("quickstart", **{"batch.global_size": 32} | changes)
    composition = validation.validate(run, jax.devices(), with_data=False)
    assert composition.microbatches == microbatches
    assert composition.total_microbatches == parts
    built = composition.build_step(jax.devices())
    assert built.rules is composition.rules
    staged = composition.spec_by_stage.trainable
    abstract = built.abstract_state.trainable
    assert jax.tree.map(lambda x: x.shape, staged) == jax.tree.map(
        lambda x: x.shape, abstract
    )


def test_a_composition_that_is_not_checked_is_the_checked_one():
    run = run_of("quickstart", **{"mesh.fsdp": 4, "mesh.data": 2})
    checked = validation.validate_on(run, 8, with_data=False)
    shape = resolve_mesh(run.mesh, 8)
    made = compose.compose(run, shape, compose.model_spec(run))
    assert made.shape == checked.shape
    assert made.placements() == checked.placements()


def test_a_loss_scale_is_float16_s():
    assert compose_of("float16").loss_scale is not None
    assert compose_of("bfloat16").loss_scale is None


def compose_of(compute: str) -> compose.Composition:
    run = run_of("quickstart", **{"precision.compute": compute})
    shape = resolve_mesh(run.mesh, 8)
    return compose.compose(run, shape, compose.model_spec(run))


@dataclass(frozen=True)
class Reading(SumObjective):
    """Reads a field of a batch; all of them have one text."""

    name: str = field(repr=False)

    def sample_loss(self, terms, sample):
        assert sample[self.name] is not None
        return super().sample_loss(terms, sample)


def test_a_model_is_checked_for_each_objective(monkeypatch):
    """Also where their texts are equal, as those of two objects at one address are."""
    run = run_of("llama3_8b:tiny")
    plain = compose.model_spec(run)

    def validate(objective):
        spec = plain.trained_for(objective, {})
        monkeypatch.setattr(compose, "model_spec", lambda run, build=None: spec)
        validation.validate(run, jax.devices()[:1], with_data=False)

    assert repr(Reading("weights")) == repr(Reading("answers"))
    validate(Reading("weights"))
    with pytest.raises(ConfigError, match="the batch has no 'answers'"):
        validate(Reading("answers"))


@pytest.mark.parametrize(
    ("changes", "memory"),
    [
        ({"mesh.zero": 1}, None),
        ({"mesh.zero": 2}, DEVICE),
        ({"mesh.zero": 3}, None),
        ({"mesh.zero": 2, "optimizer.name": "muon"}, DEVICE),
        ({"mesh.zero": 2, "optimizer.name": "adafactor"}, None),
        ({"mesh.zero": 2, "offload.optimizer": True}, HOST),
    ],
)
def test_the_update_goes_layer_by_layer_at_zero_2(changes, memory):
    config = run_of("quickstart", **{"mesh.fsdp": 8, "mesh.data": 1, **changes})
    composition = validation.validate_on(config, 8, with_data=False)
    assert composition.moments_in() == memory
    if memory == DEVICE:
        # an optimizer that the caller gives may not treat layers one by one
        assert composition.moments_in(optax.sgd(0.1)) is None
