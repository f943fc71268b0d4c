"""The first arrays of a model: the constructor runs once, the numbers are flax's, and
many equal layers are made in a loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist.config import trees
from jaxdist.protocols.first_arrays import FirstArrays, new_streams
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step
from support.models import ONE, Layout, rules_and_mesh

KEY = 7


class Layers(nnx.Module):
    """Separate linear layers, of which the last draws from a stream of its own."""

    built = 0

    def __init__(self, count: int, width: int = 8, *, rngs: nnx.Rngs):
        type(self).built += 1
        self.layers = nnx.List(
            [nnx.Linear(width, width, rngs=rngs) for _ in range(count)]
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.zeros(()))
        self.last = nnx.Linear(width, 2, rngs=nnx.Rngs(rngs.params()))

    def loss(self, batch, key):
        x = batch["x"]
        for layer in self.layers:
            x = self.dropout(layer(x))
        return (self.last(x) ** 2).mean() * self.scale


def layers(count: int, width: int = 8):
    return lambda rngs: Layers(count, width, rngs=rngs)


def draws(streams: nnx.Rngs) -> list[jax.Array]:
    """Draws in all ways in which modules of flax draw."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def linear(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(2, 3, rngs=rngs)

    found = [jax.random.key_data(streams.params()), streams.uniform((2,))]
    found.append(linear(streams).kernel[...])
    forked = streams.fork()
    found += [jax.random.key_data(forked()), jax.random.key_data(forked.other())]
    found.append(jax.random.key_data(streams()))
    return found


@pytest.mark.parametrize("traced", [False, True])
def test_streams_draw_the_numbers_of_flax(traced):
    key = jax.random.key(KEY)
    found = []
    for make in (new_streams, nnx.Rngs):

        def drawn(key, make=make):
            return draws(make(key))

        found.append((jax.jit(drawn) if traced else drawn)(key))
    ours, theirs = found
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_constructor_runs_once_for_shapes_state_and_program():
    Layers.built = 0
    spec = describe(layers(3))
    jax.eval_shape(lambda: spec.init_params(jax.random.key(0)))
    jax.jit(lambda: spec.init_params(jax.random.key(0)))()
    assert Layers.built == 1


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize(("count", "loops"), [(4, 0), (20, 1)])
def test_equal_layers_are_made_in_a_loop_with_the_numbers_of_flax(
    count, loops, generator
):
    with jax.default_prng_impl(generator):
        check_equal_layers(count, loops)


def check_equal_layers(count, loops):
    first = FirstArrays(layers(count))
    key = jax.random.key(KEY)
    made = nnx.state(first.model(key), nnx.Param)
    with_flax = nnx.state(
        jax.jit(lambda: nnx.state(layers(count)(nnx.Rngs(key))))(), nnx.Param
    )
    ours, theirs = (
        {
            "/".join(map(str, path)): x.get_value()
            for path, x in nnx.to_flat_state(state)
        }
        for state in (made, with_flax)
    )
    assert ours.keys() == theirs.keys()
    kernels = [ours[f"layers/{number}/kernel"] for number in range(count)]
    assert len({x.tobytes() for x in map(np.asarray, kernels)}) == count
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    program = jax.make_jaxpr(lambda key: nnx.state(first.model(key), nnx.Param))(key)
    # one loop folds the keys, and one draws
    assert sum(e.primitive.name == "scan" for e in program.eqns) == 2 * loops


def test_a_layers_draw_adds_no_equation_for_its_count():
    """flax's own stream adds five equations a layer, which jax searches at each draw."""

    def equations(count, streams):
        made = jax.make_jaxpr(lambda key: nnx.state(layers(count)(streams(key))))
        return len(made(jax.random.key(0)).eqns)

    grown = {}
    for streams in (new_streams, nnx.Rngs):
        grown[streams] = equations(12, streams) - equations(11, streams)
    assert grown[new_streams] < grown[nnx.Rngs]


def test_arrays_of_a_loop_are_the_same_on_any_mesh():
    spec = describe(layers(20, width=16))
    found = []
    for layout in (ONE, Layout(8, data=2, fsdp=4)):
        rules, mesh = rules_and_mesh(layout)
        built = build_train_step(spec, optax.sgd(0.1), None, mesh, rules, StepConfig())
        found.append(trees.flatten_names(built.init().trainable))
    one, many = found
    assert not many["layers/0/kernel"].sharding.is_fully_replicated
    for name, value in one.items():
        np.testing.assert_array_equal(value, many[name], err_msg=name)
