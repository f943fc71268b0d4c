"""The check of a model traces it for its structure alone."""

import warnings

import jax
import pytest

from jaxdist.models.transformer import Transformer
from jaxdist.parallel.execution import Execution
from jaxdist.protocols.model_spec import describe
from jaxdist.step.model_checks import check_model
from support.models import TINY, batch_of


def test_it_does_not_warn_of_a_kernel_that_only_its_own_trace_lacks(monkeypatch):
    # It traces in float32, which cuDNN's attention does not take, what a step may
    # compute in bfloat16.
    monkeypatch.setattr(Execution, "platform", "gpu")
    spec = describe(lambda rngs: Transformer(TINY, rngs=rngs))
    batch = batch_of(TINY)

    def loss(*arrays):
        model = spec.assemble(*arrays)
        return spec.objective.batch_loss(model, batch, jax.random.key(0))

    with pytest.warns(UserWarning, match="cudnn kernel is not used"):
        jax.eval_shape(loss, spec.trainable, spec.model_state, spec.frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_model(spec, batch)
