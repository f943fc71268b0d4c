"""The logical names of a model's dims: known ones, unknown ones, and where they come from."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.protocols.dim_names import DIM_NAMES
from jaxdist.protocols.model_spec import describe


class Named(nnx.Module):
    """Two kernels with names of the caller's choice."""

    def __init__(self, *names: str | None) -> None:
        self.down = nnx.Param(jnp.zeros((8, 4)), logical=names[::-1])
        self.up = nnx.Param(jnp.zeros((4, 8)), logical=names)


def faults_of(*names: str | None, rules: tuple = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        describe(lambda rngs: Named(*names), rules=rules)
    return error.value.faults


def test_an_unknown_name_of_a_model_is_a_fault_with_the_nearest_and_all_names():
    (fault,) = faults_of("dmodel", "d_ff")
    assert fault == (
        "down and 1 more: no dim is called 'dmodel'. Did you mean d_model? There are: "
        f"{', '.join(DIM_NAMES)}; None is a dim without a name"
    )


def test_all_unknown_names_are_told_at_once():
    first, second = faults_of("hidden", "dff")
    assert "'dff'. Did you mean d_ff?" in first
    assert "'hidden'. There are: vocab, heads," in second


@pytest.mark.parametrize("name", [*DIM_NAMES, None])
def test_known_names_pass(name):
    names = describe(lambda rngs: Named("d_model", name)).named_parameters()["up"][1]
    assert names == ("d_model", name)


def test_a_rule_replaces_unknown_names():
    rules = (("up|down", "None d_ff"),)
    spec = describe(lambda rngs: Named("dmodel", "dff"), rules=rules)
    assert spec.named_parameters()["up"][1] == (None, "d_ff")
    (fault,) = faults_of("dmodel", "d_ff", rules=(("up", "None d_ff"),))
    assert fault.startswith("down: no dim is called 'dmodel'.")


def test_a_rule_with_an_unknown_name_is_told_the_same():
    (fault,) = faults_of("d_model", "d_ff", rules=(("up", "dmodel d_ff"),))
    assert "'up': no dim is called 'dmodel'. Did you mean d_model? There are:" in fault


def test_named_parameters_are_a_copy_and_follow_a_changed_spec():
    spec = describe(lambda rngs: Named("d_model", "d_ff"), frozen=("down",))
    found = spec.named_trainable()
    assert [*found] == ["up"]
    found.clear()
    assert [*spec.named_trainable()] == ["up"]
    assert [*spec.named_frozen()] == ["down"]
    frozen = spec.all_frozen()
    assert not frozen.named_trainable()
    assert [*frozen.named_frozen()] == ["down", "up"]
