"""First states from programs that are compiled as quickly as all others of the default
selection are (conftest.py): at the level of its own, `init` takes twice as long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxdist.step.train_step import TrainStep
from jaxdist.trainer.compose import Composition

_honest = Composition.build_step


def _build_step(
    composition: Composition, devices: Any = None, **options: Any
) -> TrainStep:
    built = _honest(composition, devices, **options)
    init = jax.jit(built.init.__wrapped__, out_shardings=built.shardings)
    return dataclasses.replace(built, init=init)


def install() -> None:
    """Gives the steps of runs in this process such an `init` from now on."""
    Composition.build_step = _build_step
