"""Canonical names: stable, free of framework internals, and invertible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxdist.checkpoint import state_dict
from jaxdist.step.state import State

PARAMS = {
    "blocks": {"mlp": {"w": jnp.ones((2, 4, 4))}, "norm": {"scale": jnp.ones((2, 4))}},
    "embed": {"w": jnp.ones((8, 4))},
}
SCHEDULE = optax.linear_schedule(1e-3, 0.0, 10)
MUON_DIMS = {
    "blocks": {"mlp": {"w": MuonDimensionNumbers(1, 2)}, "norm": {"scale": None}},
    "embed": {"w": None},
}
OPTIMIZERS = {
    "adamw": optax.adamw(SCHEDULE),
    "muon": optax.contrib.muon(SCHEDULE, muon_weight_dimension_numbers=MUON_DIMS),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "two adams": optax.chain(optax.scale_by_adam(), optax.scale_by_adam()),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-3),
    "finite": optax.apply_if_finite(optax.adamw(1e-3), 10),
    "masked": optax.masked(optax.adamw(SCHEDULE), {"blocks": True, "embed": False}),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "sm3": optax.sm3(1e-2),
    "adafactor": optax.adafactor(1e-3),
    "sgd": optax.sgd(1e-3),
}


def make_state(
    tx: optax.GradientTransformation, params: Any = PARAMS, **parts: Any
) -> State:
    rest = {"frozen": {}, "model_state": {}, "ema": None} | parts
    return State(step=jnp.int32(3), trainable=params, opt_state=tx.init(params), **rest)


def opt_names(name: str) -> list[str]:
    names = state_dict.to_canonical(make_state(OPTIMIZERS[name]))
    prefix = "opt_state/"
    return [n.removeprefix(prefix) for n in names if n.startswith(prefix)]


# Golden: changing one of these names makes existing checkpoints unreadable (count
# run_format.FORMAT upwards).
def test_names_of_adamw_are_stable():
    assert list(state_dict.to_canonical(make_state(OPTIMIZERS["adamw"]))) == [
        "step",
        "trainable/blocks/mlp/w",
        "trainable/blocks/norm/scale",
        "trainable/embed/w",
        "opt_state/count",
        "opt_state/mu/blocks/mlp/w",
        "opt_state/mu/blocks/norm/scale",
        "opt_state/mu/embed/w",
        "opt_state/nu/blocks/mlp/w",
        "opt_state/nu/blocks/norm/scale",
        "opt_state/nu/embed/w",
        "opt_state/count~2",
    ]


def test_names_of_muon_are_stable():
    assert opt_names("muon") == [
        "adam/count",
        "adam/mu/blocks/norm/scale",
        "adam/mu/embed/w",
        "adam/nu/blocks/norm/scale",
        "adam/nu/embed/w",
        "adam/count~2",
        "muon/count",
        "muon/mu/blocks/mlp/w",
        "muon/ns_coeffs",
        "muon/count~2",
    ]


def test_a_collision_renames_whole_subtrees():
    first = [
        "count",
        *(f"{m}/{p}" for m in ("mu", "nu") for p in state_dict.to_canonical(PARAMS)),
    ]
    second = [n.replace("/", "~2/", 1) if "/" in n else f"{n}~2" for n in first]
    assert opt_names("two adams") == first + second


@pytest.mark.parametrize("wrapper", ["clipped"])
def test_stateless_wrappers_do_not_change_names(wrapper):
    assert jax.tree.structure(OPTIMIZERS[wrapper].init(PARAMS)) != jax.tree.structure(
        OPTIMIZERS["adamw"].init(PARAMS)
    )
    assert opt_names(wrapper) == opt_names("adamw")


def test_a_mask_only_leaves_names_out():
    assert opt_names("masked") == [n for n in opt_names("adamw") if "embed" not in n]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_round_trip_through_names(optimizer):
    state = make_state(
        OPTIMIZERS[optimizer], ema=PARAMS, model_state={"bn": {"mean": jnp.ones(2)}}
    )
    leaves, structure = jax.tree.flatten(state)
    numbered = structure.unflatten(
        [np.full(x.shape, i, x.dtype) for i, x in enumerate(leaves)]
    )
    names = state_dict.to_canonical(numbered)
    assert len(names) == len(leaves)
    assert not [n for n in names if "inner_state" in n or "State" in n]
    back = state_dict.from_canonical(
        dict(sorted(names.items())), jax.eval_shape(lambda: state)
    )
    assert jax.tree.structure(back) == structure
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(numbered), strict=True):
        assert got is want


@pytest.mark.parametrize("absent", [None, {}])
def test_absent_parts_have_no_names_and_come_back_as_they_were(absent):
    state = make_state(OPTIMIZERS["sgd"], ema=absent)
    names = state_dict.to_canonical(state)
    assert not [
        n for n in names if n.startswith(("ema", "frozen", "model_state", "opt_state"))
    ]
    assert state_dict.from_canonical(names, state).ema == absent
    with_ema = state_dict.to_canonical(make_state(OPTIMIZERS["sgd"], ema=PARAMS))
    assert set(with_ema) - set(names) == {
        f"ema/{n}" for n in state_dict.to_canonical(PARAMS)
    }


def test_everything_that_does_not_fit_is_listed_at_once():
    state = make_state(OPTIMIZERS["sgd"])
    arrays = state_dict.to_canonical(state)
    del arrays["trainable/embed/w"]
    arrays["ema/embed/w"] = jnp.ones((8, 4))
    arrays["trainable/blocks/mlp/w"] = jnp.ones((3, 4, 4))
    arrays["step"] = jnp.float32(3)
    with pytest.raises(state_dict.LayoutError) as caught:
        state_dict.from_canonical(arrays, state)
    assert caught.value.faults == (
        "missing in the checkpoint: trainable/embed/w float32[8,4]",
        "unexpected in the checkpoint: ema/embed/w float32[8,4]",
        "different: step is float32[] in the checkpoint, int32[] in this state",
        "different: trainable/blocks/mlp/w is float32[3,4,4] in the checkpoint, float32[2,4,4] in this state",
    )
    assert all(fault in str(caught.value) for fault in caught.value.faults)


def test_keys_with_the_separator_are_refused():
    with pytest.raises(ValueError, match="tree key 'a/b'"):
        state_dict.to_canonical(make_state(OPTIMIZERS["sgd"], {"a/b": jnp.ones(2)}))
