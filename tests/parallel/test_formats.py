"""Number formats: the tables hold all that the config names, and each format says what
it needs.
"""

import typing

import jax
import jax.numpy as jnp
import pytest

from jaxdist.config import schema
from jaxdist.hardware.chips import CHIPS
from jaxdist.ops import matmul
from jaxdist.parallel import precision
from jaxdist.parallel.precision import (
    FORMATS,
    RECIPES,
    UNITS,
    ComputeName,
    PrecisionConfig,
    RecipeName,
)
from jaxdist.trainer import run_config
from jaxdist.verification.comparison import BANDS

PEAKS = {dtype for chip in CHIPS for dtype in chip.peak_flops_per_s}


def test_the_config_s_names_are_those_of_the_tables():
    assert typing.get_args(ComputeName) == tuple(FORMATS)
    assert typing.get_args(RecipeName) == tuple(RECIPES)
    assert tuple(BANDS) == (*FORMATS, *RECIPES)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_a_dtype_with_a_peak(name):
    assert PrecisionConfig(compute=name).format is FORMATS[name]
    assert FORMATS[name].peak in PEAKS
    # A scale is for ranges narrower than float32's.
    narrow = jnp.finfo(FORMATS[name].dtype).maxexp < jnp.finfo(jnp.float32).maxexp
    assert FORMATS[name].scales_loss == narrow


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_a_format_and_units_and_has_code(name):
    recipe = RECIPES[name]
    assert recipe.dtype in FORMATS
    assert recipe.units in UNITS
    assert recipe.peak in PEAKS
    assert type(recipe) in matmul._MULTIPLY
    assert 1 <= recipe.matmuls <= 3
    assert 0 < recipe.units.reached <= 1
    band = FORMATS[recipe.dtype].band
    assert recipe.band.gradient >= band.gradient
    assert recipe.band.update >= band.update
    fits = PrecisionConfig(compute=recipe.dtype, matmul=name)
    assert fits.recipe == recipe
    assert fits.peak == recipe.peak
    assert not [*fits.faults()]
    for other in FORMATS.keys() - {recipe.dtype}:
        (fault,) = PrecisionConfig(compute=other, matmul=name).faults()
        assert f"set precision.compute={recipe.dtype}" in fault


def test_small_kernels_are_taken_where_the_config_says_so():
    (name, *_) = RECIPES
    few, all_kernels = (
        PrecisionConfig(matmul=name, fp8_small_kernels=small).recipe
        for small in (False, True)
    )
    assert few.why_not((), (64, 64), 1) == "64 x 64: too small to gain"
    assert all_kernels.why_not((), (64, 64), 1) == ""
    assert "multiples of 16" in all_kernels.why_not((), (64, 24), 1)


@pytest.mark.parametrize("key", ["compute", "matmul"])
def test_a_word_of_no_table_is_a_fault_and_no_crash(key):
    config = PrecisionConfig(**{key: "float9"})
    faults = schema.faults(config, "precision.")
    assert faults[0].startswith(f"precision.{key}: got 'float9', required one of")
    assert not [*precision.device_faults(config, jax.devices()[0])]


def test_keys_of_the_loss_scale_are_read_by_formats_that_scale_the_loss():
    config = run_config.default_config()
    config.precision.loss_scale = 1024.0
    config.precision.loss_scale_growth_interval = 10
    for name, format in FORMATS.items():
        config.precision.compute = name
        lines = list(run_config.unread_options(run_config.from_config(config)))
        keys = [line.partition("=")[0] for line in lines]
        expected = [
            "precision.loss_scale",
            "precision.loss_scale_growth_interval",
        ]
        assert keys == ([] if format.scales_loss else expected), name
