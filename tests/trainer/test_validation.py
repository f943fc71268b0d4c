"""The check of a run before anything compiles."""

import warnings

import jax
import pytest

from jaxdist.config import files
from jaxdist.parallel.execution import Execution
from jaxdist.trainer import run_config, validation
from support.runs import TINY


def test_no_warning_of_a_kernel_that_only_the_check_lacks(monkeypatch):
    # The check traces in float32, which cuDNN's attention does not take, what the step
    # computes in bfloat16.
    monkeypatch.setattr(Execution, "platform", "gpu")
    config = files.load("quickstart", folders=files.packaged_folders())
    with config.ignore_type():
        config.update_from_flattened_dict(TINY | {"precision.compute": "bfloat16"})
    run = run_config.from_config(config)
    composition = validation.validate(run, jax.devices()[:1], with_data=False)
    spec = composition.spec

    def loss(*arrays):
        rows = {
            "inputs": jax.numpy.zeros((2, 16), jax.numpy.int32),
            "positions": jax.numpy.tile(jax.numpy.arange(16), (2, 1)),
            "targets": jax.numpy.zeros((2, 16), jax.numpy.int32),
            "weights": jax.numpy.ones((2, 16)),
        }
        return spec.objective.batch_loss(
            spec.assemble(*arrays), rows, jax.random.key(0)
        )

    with pytest.warns(UserWarning, match="cudnn kernel is not used"):
        jax.eval_shape(loss, spec.trainable, spec.model_state, spec.frozen)
    monkeypatch.setattr(validation, "_passed", set())
    spec.passed.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validation.validate(run, jax.devices()[:1], with_data=False)
    assert spec.passed or validation._passed
