"""The check of a run before anything compiles."""

import warnings

import jax
import pytest

from jaxdist.config import files
from jaxdist.parallel.execution import Execution
from jaxdist.step.objective_fields import abstract_batch
from jaxdist.trainer import compose, run_config, validation
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

    rows = abstract_batch(spec, compose.batch_shapes(run, 2))

    def loss(arrays, rows):
        model = spec.assemble(*arrays)
        return spec.objective.batch_loss(model, rows, jax.random.key(0))

    arrays = (spec.trainable, spec.model_state, spec.frozen)
    with pytest.warns(UserWarning, match="cudnn kernel is not used"):
        jax.eval_shape(loss, arrays, rows)
    monkeypatch.setattr(validation, "_passed", set())
    spec.passed.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validation.validate(run, jax.devices()[:1], with_data=False)
    assert spec.passed or validation._passed
