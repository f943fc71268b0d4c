"""The update of experts' kernels whose last dim devices share out in parts smaller than
a TPU's vector.
"""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.experts.mixture import DOWN_NAMES, INPUT_NAMES
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.optimizers import build_optimizer
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import execution
from jaxdist.planner import targets
from jaxdist.protocols.model import Loss
from jaxdist.step import update
from jaxdist.step.state import OptState, State, Sums
from support.experts import rules_and_mesh
from support.models import worst

NAMES = {"mlp": {"up": INPUT_NAMES, "down": DOWN_NAMES}, "norm": ("d_model",)}
# stacks of 3 layers
SHAPES = {"mlp": {"up": (3, 4, 16, 24), "down": (3, 4, 24, 16)}, "norm": (3, 16)}


def after_update(name: str):
    """Returns state and metrics after one update, and the state before."""
    random = np.random.default_rng(5)
    draw = partial(
        jax.tree.map,
        lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )
    parameters, gradients = draw(), draw()
    config = OptimizerConfig(name=name, learning_rate=0.1, warmup_steps=1)
    transform = build_optimizer(config, lambda _: jnp.float32(1), parameters, NAMES)
    rule = update.UpdateRule(
        transform, build_schedule(config, 10, 8), 1.0, 0.75, NAMES, elementwise=True
    )
    average = jax.tree.map(lambda x: x + 1, parameters)
    moments = OptState(transform.init(parameters), jnp.int32(0))
    state = State(jnp.int32(1), parameters, {}, {}, moments, average)
    one = jnp.float32(1)
    sums = Sums(gradients, Loss(one, one), {})
    return (*rule.apply(state, sums, {"weights": jnp.ones((2, 4))}), state)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_kernels_updated_with_their_last_dims_swapped_are_the_same(name, monkeypatch):
    rules, mesh = rules_and_mesh(fsdp=4, expert=2)
    with execution.activate(mesh, rules):
        plain, metrics, start = after_update(name)
        flags = {"mlp": {"up": False, "down": True}, "norm": False}
        monkeypatch.setattr(update, "narrow_kernels", lambda parameters, names: flags)
        swapped, own_metrics, _ = after_update(name)
    assert jax.tree.map(jnp.shape, swapped) == jax.tree.map(jnp.shape, plain)
    swapped, plain, metrics, own_metrics = jax.device_get(
        (swapped, plain, metrics, own_metrics)
    )
    assert worst(plain.trainable, start.trainable) > 1e-3
    assert worst(plain.ema, start.ema) > 1e-4
    assert own_metrics["grad_norm"] == pytest.approx(
        metrics["grad_norm"], rel=1e-6
    )  # summed in another order
    assert worst(swapped, plain) < 1e-6


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="a TPU's mesh needs libtpu: jaxdist[aot]",
)
@pytest.mark.parametrize(
    ("sizes", "narrow"),
    [
        ({"fsdp": 64}, True),
        ({"fsdp": 8, "expert": 8}, False),
        ({"fsdp": 32, "data": 2}, False),
    ],
)
def test_only_kernels_whose_last_dim_is_split_below_a_vector_are_swapped(sizes, narrow):
    names = NAMES["mlp"] | {"dense": ("d_ff", "d_model")}
    shapes = {
        "up": (2, 8, 4096, 14_336),
        "down": (2, 8, 14_336, 4096),
        "dense": (2, 14_336, 4096),
    }
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    rules, mesh = rules_and_mesh(targets.devices(targets.parse("v5p:4x4x4")), **sizes)
    with execution.activate(mesh, rules):
        assert update.narrow_kernels(arrays, names) == {
            "up": False,
            "down": narrow,
            "dense": False,
        }
    rules, mesh = rules_and_mesh(fsdp=8)
    with execution.activate(mesh, rules):  # no other platform has lanes to fill
        assert not any(update.narrow_kernels(arrays, names).values())
