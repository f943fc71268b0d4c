"""Products in 8-bit floats: torchao's bits, the same bits on every layout, one byte on
the wire.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist.ops import fp8
from jaxdist.ops.matmul import project
from jaxdist.parallel import execution
from jaxdist.parallel.formats.format import Recipe
from jaxdist.parallel.precision import PrecisionConfig
from support.models import ONE, Layout, rules_and_mesh
from support.paths import DATA

# Recipes, and torchao's names for them.
RECIPES = {
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_wgrad_bf16": "rowwise_with_gw_hp",
    "fp8_tensorwise": "tensorwise",
}
GOLDEN = DATA / "fp8" / "torchao.npz"  # by support/fp8_torchao.py
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def of_all_kernels(recipe: str) -> Recipe | None:
    """Returns a recipe that takes small kernels, too."""
    return PrecisionConfig(matmul=recipe, fp8_small_kernels=True).recipe


def bits(x: Any) -> np.ndarray:
    return np.asarray(
        jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    )


@each_recipe
def test_equals_torchao_bit_for_bit(recipe):
    with np.load(GOLDEN) as golden:
        stored = {name: golden[name] for name in golden.files}
    arrays = {
        name: jax.lax.bitcast_convert_type(x, jnp.bfloat16)
        for name, x in stored.items()
    }

    @jax.jit
    def products(x, w, dy):
        with execution.activate(recipe=of_all_kernels(recipe)):
            y, pull_back = jax.vjp(lambda x, w: project(x, nnx.Param(w))[0], x, w)
            return {"y": y} | dict(zip(("dx", "dw"), pull_back(dy), strict=True))

    for name, ours in products(*(arrays[name] for name in ("x", "w", "dy"))).items():
        theirs = stored[f"{RECIPES[recipe]}/{name}"]
        assert (bits(ours) == theirs.view(np.uint16)).all(), name
        assert np.abs(np.asarray(ours, np.float32)).max() > 1e-3


B, S, SPLIT = 8, 16, Layout(8, fsdp=4, tensor=2)
# A kernel whose outputs tensor shards share out, and one whose inputs they do.
KERNELS = {
    "up": (("d_model", "d_ff"), (64, 96)),
    "out": (("heads", "head_dim", "d_model"), (8, 16, 64)),
}


def gradients(
    recipe: str, layout: Layout, dtype: Any, draw: Callable[..., np.ndarray]
) -> dict[str, Any]:
    """Returns y, dw and dx of the products with each kernel, in a dtype, on the devices
    of a layout.
    """
    rules, mesh = rules_and_mesh(layout)

    def products(kernels, xs, dys):
        rows = {}
        with execution.activate(mesh, rules, recipe=of_all_kernels(recipe)):
            for name, w in kernels.items():
                y, pull_back = jax.vjp(
                    lambda w, x, name=name: _product(name, w, x), w, xs[name]
                )
                rows[name] = {"y": y} | dict(
                    zip(("dw", "dx"), pull_back(dys[name]), strict=True)
                )
        return rows

    sides: tuple[dict[str, Any], ...] = ({}, {}, {})
    for name, (names, dims) in KERNELS.items():
        contract = len(dims) - 1 if name == "out" else 1
        w = jnp.asarray(draw(*dims), dtype)
        sides[0][name] = jax.device_put(
            w, NamedSharding(mesh, rules.stored(names, dims))
        )
        ends = names[:contract], names[contract:]
        for side, own, sizes in zip(
            sides[1:], ends, (dims[:contract], dims[contract:]), strict=True
        ):
            own = ("batch", "sequence", *(None if n == "d_model" else n for n in own))
            x = jnp.asarray(draw(B, S, *sizes), dtype)
            side[name] = jax.device_put(
                x, NamedSharding(mesh, rules.activation(own, x.shape))
            )
    options = {"xla_allow_excess_precision": False}
    return jax.device_get(jax.jit(products).lower(*sides).compile(options)(*sides))


def _product(name: str, w: jax.Array, x: jax.Array) -> jax.Array:
    (y,) = project(
        x, nnx.Param(w, logical=KERNELS[name][0]), contract=2 if name == "out" else 1
    )
    return y


def of_few_bits(*dims: int) -> np.ndarray:
    """Returns values within a factor of 8, whose products' sums in float32 are exact in
    any order.
    """
    random = np.random.default_rng(sum(dims))
    return (random.uniform(1 / 8, 1, dims) * random.choice([-1, 1], dims)).astype(
        np.float32
    )


def normal(*dims: int) -> np.ndarray:
    return np.random.default_rng(sum(dims)).normal(size=dims).astype(np.float32)


@each_recipe
def test_layouts_have_the_same_bits(recipe):
    # A flipped code would show, and nothing else can.
    one, many = (gradients(recipe, x, jnp.float32, of_few_bits) for x in (ONE, SPLIT))
    # this dw is no fp8
    exact = ("y", "dx") if recipe == "fp8_rowwise_wgrad_bf16" else ("y", "dx", "dw")
    for name, rows in one.items():
        assert all(
            (bits(rows[part]) == bits(many[name][part])).all() for part in exact
        ), name
        assert all(np.abs(x).max() > 1 for x in rows.values())


def test_in_bfloat16_layouts_differ_by_the_sum_over_tensor_shards_alone():
    one, many = (
        gradients("fp8_rowwise", x, jnp.bfloat16, normal)
        for x in (ONE, Layout(8, fsdp=4, tensor=2))
    )
    # their parts cross devices in bfloat16, as without 8-bit floats
    split = {"up": "dx", "out": "y"}
    for name, rows in one.items():
        for part, x in rows.items():
            if part != split[name]:
                assert (bits(x) == bits(many[name][part])).all(), (name, part)


@pytest.mark.slow
@each_recipe
def test_gradients_of_parts_of_a_batch_add_up_to_the_whole_s(recipe):
    x, dy = (jnp.asarray(normal(512, columns), jnp.bfloat16) for columns in (64, 96))

    def gradient(x, dy):
        with execution.activate(recipe=of_all_kernels(recipe)):
            _, pull_back = jax.vjp(
                lambda w: project(x, nnx.Param(w))[0], jnp.asarray(normal(64, 96))
            )
            return np.asarray(pull_back(dy)[0], np.float64)

    whole, parts = gradient(x, dy), sum(gradient(x[i::8], dy[i::8]) for i in range(8))
    assert np.abs(parts - whole).max() < 1e-6 * np.abs(whole).max()
    scales = [
        np.asarray(fp8.quantise([part], [[0]], fp8.E4M3).inverse)
        for part in (x, x[::8])
    ]
    assert (scales[0] != scales[1]).mean() > 0.2  # a part has scales of its own


@pytest.mark.parametrize("value", [np.nan, np.inf])
@each_recipe
def test_what_is_not_finite_is_not_finite_after(recipe, value):
    x, w = normal(4, 32), normal(32, 48)
    x[1, 3] = value
    with execution.activate(recipe=of_all_kernels(recipe)):
        y, pull_back = jax.vjp(
            lambda x, w: project(x, nnx.Param(w))[0], jnp.asarray(x), jnp.asarray(w)
        )
        dx, dw = pull_back(jnp.ones_like(y))
        _, of_bad = pull_back(jnp.asarray(y))
    whole = recipe == "fp8_tensorwise"
    assert not np.isfinite(y[1]).any()
    assert whole or np.isfinite(y[0]).all()
    assert np.isfinite(dx).all()
    assert not np.isfinite(dw[3]).any()
    assert not np.isfinite(of_bad).all()


@each_recipe
def test_zeros_stay_zeros_and_extremes_are_scaled(recipe):
    x, w = normal(4, 32), normal(32, 48)
    x[1], w[:, 5] = 0, 0
    x[2] *= 1e-30
    with execution.activate(recipe=of_all_kernels(recipe)):
        (y,) = project(jnp.asarray(x), nnx.Param(jnp.asarray(w)))
        (large,) = project(jnp.asarray(x * 1e30), nnx.Param(jnp.asarray(w)))
    assert not y[1].any()
    assert not y[:, 5].any()
    assert np.isfinite(y).all()
    assert np.abs(large - x @ w * 1e30).max() < 0.1 * np.abs(large).max()
    if recipe != "fp8_tensorwise":
        assert np.abs(y[2] - x[2] @ w).max() < 0.1 * np.abs(x[2] @ w).max()


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_scales_are_the_largest_powers_of_two_that_fit(dtype):
    largest = float(jnp.finfo(dtype).max)
    amax = np.array(
        [1.0, 1.75, np.nextafter(np.float32(1.75), 2), 3e38, 1e-30, 448, 449, 0.3],
        np.float32,
    )
    (codes,), inverse = fp8.quantise([jnp.asarray(amax)[:, None]], [[1]], dtype)
    scaled = amax.astype(np.float64) / np.asarray(inverse, np.float64)
    assert (scaled <= largest).all()
    assert (2 * scaled > largest).all()
    assert (np.log2(np.asarray(inverse)) % 1 == 0).all()
    assert np.isfinite(np.asarray(codes, np.float32)).all()
