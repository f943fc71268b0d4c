"""The check of a whole run: all faults at once, before anything compiles."""

from collections.abc import Sequence
from functools import partial

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.data.config import DataConfig
from jaxdist.parallel import offload, precision
from jaxdist.parallel.mesh import resolve_mesh, slices_of
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.objective import Objective
from jaxdist.step.model_checks import check_model
from jaxdist.trainer import compose, product_formats
from jaxdist.trainer.component_rules import LARGEST, component_faults, model_faults
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.layout_rules import layout_faults
from jaxdist.trainer.run_config import Build, RunConfig

# Models that were found to be without fault: their options, and what they are trained
# for.
_examined: set[tuple[str, Objective]] = set()


def validate(
    run: RunConfig,
    devices: Sequence[jax.Device],
    *,
    with_data: bool = True,
    build: Build | None = None,
) -> Composition:
    """Composes a run on these devices and checks it.

    As `validate_on`; and the devices, and the model's loss where `model.*` makes it.

    Raises:
      ConfigError: every fault of the run, each with its cure.
    """
    faults = [
        *offload.device_faults(run.offload, devices[0]),
        *precision.device_faults(run.precision, devices[0]),
    ]
    try:
        composition = validate_on(
            run,
            len(devices),
            slices_of(run.mesh, devices),
            with_data=with_data,
            build=build,
        )
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from None
    faults += product_formats.faults(
        run, composition.spec, devices[0], partial(compose.batch_shapes, run, 1)
    )
    if faults:
        raise ConfigError(faults)
    _check_loss(composition, is_given=build is not None)
    return composition


def _check_loss(composition: Composition, *, is_given: bool) -> None:
    """Checks the model's loss on a part of a batch; once for a model of `model.*`.

    Args:
      composition: the run.
      is_given: a caller has given the model, so the config does not tell which it is.
    """
    run = composition.config
    stages = composition.shape.sizes["pipeline"]
    options = (
        run.model.items(),
        run.batch,
        run.data,
        run.optimizer.frozen,
        run.lora,
        run.init,
        composition.parts,
        stages,
    )
    key = (repr(options), composition.spec.objective)
    if key in _examined and not is_given:
        return
    faults = check_model(
        composition.spec,
        compose.batch_shapes(run, run.batch.global_size // composition.parts),
        accumulation=run.batch.accumulation,
        stages=stages,
    )
    if faults:
        raise ConfigError(faults)
    if not is_given:
        _examined.add(key)


def validate_on(
    run: RunConfig,
    num_devices: int,
    num_slices: int | None = None,
    *,
    with_data: bool = True,
    build: Build | None = None,
    spec: ModelSpec | None = None,
) -> Composition:
    """Composes a run on a number of devices, and checks its parts against each other.

    Args:
      run: the config.
      num_devices: of the mesh.
      num_slices: of the devices; None where the hardware has none: as many as the mesh
        asks for.
      with_data: False leaves `data.*` unchecked, for what looks at a run without a
        corpus.
      build: makes the model from its rngs; default: what `model.*` says.
      spec: of the run's model, if it is known.

    Raises:
      ConfigError: every fault of the run, each with its cure.
    """
    checked = run
    if not with_data:
        checked = compose.with_overrides(run, {"data": DataConfig()})
    without_spec = model_faults(run)
    # a fault of a part is in both lists
    faults = list(
        dict.fromkeys([*schema.faults(checked), *without_spec, *component_faults(run)])
    )
    shape = None
    try:
        shape = resolve_mesh(
            run.mesh, num_devices, num_slices or run.mesh.dcn.num_slices
        )
    except ConfigError as error:
        faults += error.faults
    if shape is None or without_spec:
        raise ConfigError(faults)
    spec = spec or compose.model_spec(run, build)
    if spec.parameter_count >= LARGEST:
        faults.append(f"model: {spec.parameter_count:,} parameters; lower its sizes")
        raise ConfigError(faults)
    composition = compose.compose(run, shape, spec)
    faults += layout_faults(composition)
    if faults:
        raise ConfigError(faults)
    return composition
