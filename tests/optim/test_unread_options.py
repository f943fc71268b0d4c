"""Options that only some optimizers or schedules read: the marks say what is so."""

from dataclasses import replace
from functools import lru_cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import schema
from jaxdist.config.annotations import ReadWith
from jaxdist.optim.config import OptimizerConfig, OptimizerName, ScheduleName
from jaxdist.optim.optimizers import build_optimizer
from jaxdist.optim.schedules import build_schedule
from jaxdist.trainer import run_config

# a value of each marked key that differs from its default
OTHER = {
    "decay_fraction": 0.5,
    "final_learning_rate": 0.3,
    "reference_batch": 64,
    "b1": 0.5,
    "b2": 0.7,
    "eps": 0.1,
    "momentum": 0.5,
    "momentum_dtype": "bfloat16",
    "other_learning_rate_ratio": 2.0,
    "muon_update_rms": 0.4,
}
# of fit's own optimizer jaxdist builds nothing, so it has no choice below
NAMED = {name for name in get_args(OptimizerName) if name != "given"}
RULES = {
    name: [rule for rule in field.all_marks(ReadWith) if set(rule.values) != NAMED]
    for name, field in schema.schema_of(OptimizerConfig).items()
}
CHOICES = {
    "optimizer.name": sorted(NAMED),
    "optimizer.schedule": get_args(ScheduleName),
    "optimizer.learning_rate_scaling": ("none", "sqrt", "linear"),
}
NAMES = {"w": ("d_model", "d_ff"), "scale": ("d_model",)}


def test_each_marked_option_is_tried():
    assert OTHER.keys() == {name for name, rules in RULES.items() if rules}


@lru_cache
def updates_of(config: OptimizerConfig) -> list[np.ndarray]:
    """Computes the second update of a matrix and a vector, and the state after it."""
    random = np.random.default_rng(0)
    shapes = {"w": (8, 4), "scale": (8,)}
    params = {name: random.normal(size=shape) for name, shape in shapes.items()}
    optimizer = build_optimizer(config, optax.constant_schedule(0.1), params, NAMES)
    state = optimizer.init(params)
    for _ in range(2):
        gradients = {name: random.normal(size=shape) for name, shape in shapes.items()}
        updates, state = optimizer.update(gradients, state, params)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves((updates, state))]


@lru_cache
def rates_of(config: OptimizerConfig) -> list[np.ndarray]:
    """Computes the learning rates of a run of 20 steps."""
    schedule = build_schedule(config, train_steps=20, global_size=32)
    return [np.asarray(schedule(jnp.arange(20)))]


@pytest.mark.parametrize("name", OTHER)
def test_an_option_has_an_effect_where_its_mark_says_so_and_nowhere_else(name):
    (rule,) = RULES[name]
    assert set(rule.values) < set(CHOICES[rule.key])
    compute = updates_of if rule.key == "optimizer.name" else rates_of
    for choice in CHOICES[rule.key]:
        usual = OptimizerConfig(**{rule.key.partition(".")[2]: choice})
        other = replace(usual, **{name: OTHER[name]})
        same = all(map(np.array_equal, compute(usual), compute(other)))
        assert same == (choice not in rule.values), choice


def test_options_that_nothing_reads_are_named_with_what_reads_them():
    config = run_config.default_config()
    assert list(run_config.unread_options(run_config.from_config(config))) == []
    config.optimizer.name = "sgd"
    config.optimizer.schedule = "constant"
    config.optimizer.b2 = 0.99
    config.optimizer.momentum = 0.5
    config.optimizer.decay_fraction = 0.5
    assert list(run_config.unread_options(run_config.from_config(config))) == [
        "optimizer.decay_fraction=0.5 has no effect: optimizer.schedule=constant does "
        "not read it, only wsd. If you set it, leave it out, or change "
        "optimizer.schedule.",
        "optimizer.b2=0.99 has no effect: optimizer.name=sgd does not read it, only "
        "adamw, lion, muon. If you set it, leave it out, or change optimizer.name.",
    ]


GIVEN = {
    "learning_rate": 0.1,
    "learning_rate_scaling": "sqrt",
    "reference_batch": 64,
    "decay_steps": 5,
    "decay_embeddings": False,
    "groups": (("scale", 2.0, None),),
}


@pytest.mark.parametrize("name", GIVEN)
def test_options_that_fits_own_optimizer_does_not_read_are_named(name):
    """The optimizer was passed to `jaxdist.fit`, and the option in its `settings`."""
    config = run_config.default_config()
    config.optimizer.learning_rate_scaling = "sqrt"  # or nothing reads reference_batch
    config.optimizer[name] = GIVEN[name]
    key = f"optimizer.{name}="
    lines = list(run_config.unread_options(run_config.from_config(config)))
    assert not [line for line in lines if line.startswith(key)]
    config.optimizer.name = "given"
    lines = list(run_config.unread_options(run_config.from_config(config)))
    (line,) = [line for line in lines if line.startswith(key)]
    assert "optimizer.name=given does not read it, only adamw, lion" in line
