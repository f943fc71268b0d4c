"""One built step for all runs of a module whose configs are equal where steps read them:
it is traced and compiled once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxdist.config import schema
from jaxdist.protocols.objective import NextToken
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import keys_outside_step

# a plan need not know them: they are constants of the programs
IN_PROGRAMS = {"seed", "train.steps", "train.epochs"}


def key_of(composition: Composition, devices: Any, **options: Any) -> str | None:
    """Returns what a built step depends on; None where it is of a user's own parts."""
    spec = composition.spec
    ours = spec.model_class.__module__.startswith("jaxdist.")
    if not ours or type(spec.objective) is not NextToken or spec.modules:
        return None
    if options.get("optimizer") is not None:
        return None
    config = schema.flatten(schema.to_config_dict(composition.config))
    outside = set(keys_outside_step()) - IN_PROGRAMS
    read = {key: value for key, value in config.items() if key not in outside}
    ids = [device.id for device in devices or jax.devices()]
    arrays = jax.tree.leaves((spec.trainable, spec.frozen, spec.model_state))
    # a caller's function may make another model of the same class
    model = [repr(spec.graph), [(x.shape, str(x.dtype)) for x in arrays]]
    return json.dumps([model, read, ids, repr(sorted(options.items()))], default=str)


@contextlib.contextmanager
def shared_steps() -> Iterator[None]:
    """Lets runs of equal configs have the same step within the block."""
    honest = Composition.build_step
    built: dict[str, TrainStep] = {}

    def build_step(
        composition: Composition, devices: Any = None, **options: Any
    ) -> TrainStep:
        key = key_of(composition, devices, **options)
        if key is None:
            return honest(composition, devices, **options)
        if key not in built:
            built[key] = honest(composition, devices, **options)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composition, "build_step", build_step)
        yield
