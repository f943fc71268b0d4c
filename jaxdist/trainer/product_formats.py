"""The matrix products of a run that use the number format of `precision.matmul`.

Such a format is called a recipe. For each parameter, this module finds whether its
products use the recipe, and why not.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from jaxdist.hardware.chips import chip_for, platform_of
from jaxdist.optim.roles import Role, role_of
from jaxdist.parallel.formats.format import Recipe
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.forward_program import forward_program
from jaxdist.telemetry.flops import jaxpr_flops
from jaxdist.trainer.run_config import RunConfig

_T = 1e12
# returns the shapes of a batch of one sample
Sample = Callable[[], Mapping[str, jax.ShapeDtypeStruct]]


def table(recipe: Recipe, spec: ModelSpec) -> dict[str, str]:
    """Explains why products with a parameter do not use the recipe, by path.

    The explanation is "" if they do. Parameters without products are not listed.
    """
    rows = {}
    for path, (x, names) in spec.named_parameters().items():
        role = role_of(path.split("/"), x.shape, names)
        if role.kind == "vector":
            continue
        if jnp.issubdtype(x.dtype, jnp.floating):
            rows[path] = _why_not(recipe, x.shape, tuple(names or ()), role)
        else:
            rows[path] = "kept in fewer bits, computed with in bfloat16"
    return rows


def _why_not(
    recipe: Recipe,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    role: Role,
) -> str:
    if role.kind == "embedding":
        return "rows of a table are looked up"
    if "experts" in names:
        return "matmuls of experts are grouped"
    names_of_kernel = names[-role.dims :] if names else ()
    inputs = role.dims - len(role.output)
    return recipe.why_not(names_of_kernel, shape[-role.dims :], inputs)


def parameters(config: RunConfig, spec: ModelSpec) -> int:
    """Counts the parameters whose products use the run's recipe."""
    recipe = config.precision.recipe
    if recipe is None:
        return 0
    named = spec.named_parameters()
    paths = [path for path, why in table(recipe, spec).items() if not why]
    return sum(named[path][0].size for path in paths)


def lines(
    config: RunConfig, spec: ModelSpec, device: jax.Device, sample: Sample
) -> list[str]:
    """Describes the recipe at a run's start: its share of products, and the peak of MFU.

    Args:
      config: the run's config.
      spec: the model.
      device: one of the devices.
      sample: returns the shapes of a batch of one sample.
    """
    recipe = config.precision.recipe
    if recipe is None:
        return []
    by_reason = defaultdict(list)
    for path, why in table(recipe, spec).items():
        by_reason[why].append(path)
    with_recipe = by_reason.pop("", [])
    text = (
        f"precision.matmul={recipe.name}: {share(config, spec, sample):.0%} of the forward matmuls' "
        f"FLOPs in {recipe.units.numbers} ({', '.join(with_recipe)})"
    )
    if by_reason:
        reasons = [f"{', '.join(paths)}: {why}" for why, paths in by_reason.items()]
        text += f"; not {'; '.join(reasons)}"
    return [text, _speed(recipe, device)]


def _speed(recipe: Recipe, device: jax.Device) -> str:
    """Describes the speed of a recipe on a device, and the peak that MFU refers to."""
    numbers = recipe.units.numbers
    if platform_of(device.platform) == "cpu":
        return f"{numbers} are emulated on CPUs, and slower than {recipe.dtype}: for tests alone"
    chip = chip_for(device.device_kind)
    peak = chip.peak(recipe.peak) if chip else None
    peak_of_dtype = chip.peak(recipe.dtype) if chip else None
    if not (peak and peak_of_dtype):
        return f"of {device.device_kind} no peak of {numbers} is known: it may be slower, and mfu is null"
    return (
        f"mfu: of {peak / _T:g} TFLOP/s a device, the peak of {numbers} "
        f"({recipe.dtype}'s is {peak_of_dtype / _T:g})"
    )


def share(config: RunConfig, spec: ModelSpec, sample: Sample) -> float:
    """Computes the share of the forward program's FLOPs that use the run's recipe."""
    recipe = config.precision.recipe
    if recipe is None:
        return 0.0
    program = forward_program(
        spec, sample(), compute=config.precision.compute, recipe=recipe
    )
    total = jaxpr_flops(program)
    if not total:
        return 0.0
    return jaxpr_flops(program, only=recipe.units.in_jaxpr) / total


def unit_faults(config: RunConfig, platform: str, device_kind: str) -> Iterator[str]:
    """Yields a fault if a device has no fast units for the run's recipe.

    Args:
      config: the run's config.
      platform: the value of `jax.Device.platform`.
      device_kind: the value of `jax.Device.device_kind`.
    """
    recipe = config.precision.recipe
    if recipe is None:
        return
    why = recipe.units.why_not(platform, device_kind)
    if why:
        yield f"precision.matmul={recipe.name}: {why}; set precision.matmul=compute"


def faults(
    config: RunConfig, spec: ModelSpec, device: jax.Device, sample: Sample
) -> Iterator[str]:
    """Yields a fault if the run's recipe gains nothing on a device or for a model."""
    recipe = config.precision.recipe
    if recipe is None:
        return
    slower = list(unit_faults(config, device.platform, device.device_kind))
    if slower:
        yield from slower
        return
    if share(config, spec, sample):
        return
    reasons = sorted(set(table(recipe, spec).values()) - {""})
    why = "; ".join(reasons) or "it multiplies otherwise"
    yield (
        f"precision.matmul={recipe.name}: no product of {spec.model_class.__name__} is in {recipe.units.numbers} ({why}); "
        f"those with large kernels are, by jaxdist.ops.matmul.project; set precision.matmul=compute"
        f"{_small_kernels_fix(recipe, spec)}"
    )


def _small_kernels_fix(recipe: Recipe, spec: ModelSpec) -> str:
    """Names the key that applies the recipe to small kernels, too.

    The result is "" if the key would change nothing.
    """
    all_sizes = dataclasses.replace(recipe, takes_small=True)
    if all(table(all_sizes, spec).values()):
        return ""
    return ", or precision.fp8_small_kernels=true to try it without a gain"
