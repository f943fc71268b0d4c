"""The validation of a run's config, which reports all faults before compilation."""

import warnings
from collections.abc import Sequence
from functools import partial

import jax

from jaxdist.config import ConfigError, schema
from jaxdist.data.config import DataConfig
from jaxdist.parallel import offload, precision
from jaxdist.parallel.mesh import can_emulate, resolve_mesh, slices_of
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.protocols.objective import Objective
from jaxdist.step.model_checks import check_model
from jaxdist.trainer import compose, product_formats
from jaxdist.trainer.component_rules import LARGEST, component_faults, model_faults
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.layout_rules import layout_faults
from jaxdist.trainer.run_config import Build, RunConfig

# options and objectives of models that have passed `_check_loss`
_passed: set[tuple[str, Objective]] = set()


def validate(
    config: RunConfig,
    devices: Sequence[jax.Device],
    *,
    with_data: bool = True,
    build: Build | None = None,
) -> Composition:
    """Composes a run on devices and checks it.

    This adds checks of the devices and of the model's loss to those of `validate_on`.

    Args:
      config: the run's config.
      devices: devices of the mesh.
      with_data: whether to check `data.*`.
      build: makes the caller's model; default: the config names the model.

    Raises:
      ConfigError: the config is invalid. It lists all faults, each with its fix.
    """
    faults = [
        *offload.device_faults(config.offload, devices[0]),
        *precision.device_faults(config.precision, devices[0]),
    ]
    try:
        composition = validate_on(
            config,
            len(devices),
            slices_of(config.mesh, devices),
            with_data=with_data,
            build=build,
            emulates=can_emulate(devices),
        )
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from None
    faults += product_formats.faults(
        config, composition.spec, devices[0], partial(compose.batch_shapes, config, 1)
    )
    if faults:
        raise ConfigError(faults)
    _check_loss(composition, from_caller=build is not None)
    return composition


def _check_loss(composition: Composition, *, from_caller: bool) -> None:
    """Checks the model's loss on a part of a batch.

    A model that the config names is checked once in a process.

    Args:
      composition: the run.
      from_caller: whether a caller made the model, so that the config does not tell
        which it is.

    Raises:
      ConfigError: the model cannot be trained in this way.
    """
    config = composition.config
    stages = composition.shape.sizes["pipeline"]
    options = (
        config.model.items(),
        config.batch,
        config.data,
        config.optimizer.frozen,
        config.lora,
        config.init,
        config.objective,
        composition.total_microbatches,
        stages,
    )
    key = (repr(options), composition.spec.objective)
    if key in _passed and not from_caller:
        return
    samples = config.batch.global_size // composition.total_microbatches
    # What an op warns of here, such as a slower kernel for float32, need not hold for
    # the step, which is traced in its own dtypes and warns itself.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_model(
            composition.spec,
            compose.batch_shapes(config, samples),
            accumulation=config.batch.accumulation,
            stages=stages,
        )
    if not from_caller:
        _passed.add(key)


def validate_on(
    config: RunConfig,
    num_devices: int,
    num_slices: int | None = None,
    *,
    with_data: bool = True,
    build: Build | None = None,
    spec: ModelSpec | None = None,
    emulates: bool = False,
) -> Composition:
    """Composes a run on a number of devices and checks that its settings fit together.

    Args:
      config: the run's config.
      num_devices: number of devices of the mesh.
      num_slices: number of slices of the devices; default: the number in `mesh.dcn`.
      with_data: whether to check `data.*`. False suits callers without a corpus.
      build: makes the caller's model; default: the config names the model.
      spec: the model, if it is known.
      emulates: whether the devices are those of a CPU; see `resolve_mesh`.

    Raises:
      ConfigError: the config is invalid. It lists all faults, each with its fix.
    """
    checked = config
    if not with_data:
        checked = compose.with_overrides(config, {"data": DataConfig()})
    without_spec = model_faults(config)
    # Both lists may have the same fault of a config group.
    faults = list(
        dict.fromkeys(
            [*schema.faults(checked), *without_spec, *component_faults(config)]
        )
    )
    shape = None
    try:
        shape = resolve_mesh(
            config.mesh,
            num_devices,
            num_slices or config.mesh.dcn.num_slices,
            emulates=emulates,
        )
    except ConfigError as error:
        faults += error.faults
    if shape is None or without_spec:
        raise ConfigError(faults)
    spec = spec or compose.model_spec(config, build)
    if spec.parameter_count >= LARGEST:
        faults.append(f"model: {spec.parameter_count:,} parameters; lower its sizes")
        raise ConfigError(faults)
    composition = compose.compose(config, shape, spec)
    faults += layout_faults(composition)
    if faults:
        raise ConfigError(faults)
    return composition
