"""The whole train step of a model with experts does the work of those that its tokens
chose, and no other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.models import experts
from jaxdist.models.transformer import TransformerConfig
from jaxdist.ops import experts as ops
from jaxdist.ops.experts import grouped_matmul
from jaxdist.telemetry import flops, hlo
from support.models import FAST_COMPILE, batch_of, fresh, spec_of
from support.pipelines import Case, build

E, K, SAMPLES, LENGTH = 8, 2, 128, 32
MODEL = TransformerConfig(
    vocab_size=256,
    num_layers=2,
    d_model=128,
    d_ff=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    num_experts=E,
    experts_per_token=K,
)


@pytest.mark.slow
def test_a_step_on_a_cpu_does_the_work_of_the_active_experts(monkeypatch):
    built, batch = (
        build(Case(stages=1, model=MODEL), remat="dots"),
        batch_of(MODEL, SAMPLES, LENGTH),
    )
    batch["weights"][:] = 1  # so that the load counts every token
    text = built.step.lower(fresh(built), batch).compile(FAST_COMPILE).as_text()
    # The loops over an expert's blocks go round as often as its load needs, here that
    # of the first step.
    assert (
        grouped_matmul.block_rows(SAMPLES * LENGTH * K, E) == grouped_matmul.MAX_BLOCK
    )
    spec = spec_of(MODEL)
    model = spec.assemble(*spec.init_params(jax.random.key(0)))
    load = np.asarray(jax.jit(lambda: model.loss(batch, None).stats[experts.LOAD])())
    assert load.shape == (2, E)
    assert (load.sum(-1) == SAMPLES * LENGTH * K).all()
    blocks = np.ceil(load / grouped_matmul.MAX_BLOCK).mean()
    known, unknown = hlo.Module.trip_count, set()

    def trip_count(module: hlo.Module, loop: hlo.Instruction) -> float:
        if (trips := known(module, loop)) is not None:
            return trips
        unknown.update(loop.called("body"))
        return blocks

    monkeypatch.setattr(hlo.Module, "trip_count", trip_count)
    done = flops.hlo_flops(text)
    active = SAMPLES * LENGTH * MODEL.flops_per_token(LENGTH, "causal")
    # products of rows: three forward, six gradients; none is computed again
    assert len(unknown) == 9
    # More than the formula: rows up to a whole block, and attention, which at this
    # length sees all keys.
    assert active < done < 1.05 * active, done / active


@pytest.mark.parametrize("gated", [True, False])
def test_model_flops_that_are_counted_have_the_products_of_all_choices(gated):
    ids, up, down = (
        jnp.zeros((4, 64, K), jnp.int32),
        jnp.ones((E, 32, 48)),
        jnp.ones((E, 48, 32)),
    )
    ids = ids.at[..., 1].set(1)  # no even load, which does not matter
    gate, valid = (up if gated else None), jnp.ones((4, 64), bool)

    def forward(x):
        weights = jnp.ones(ids.shape)
        return ops.experts(
            x,
            ids,
            weights,
            gate,
            up,
            down,
            jax.nn.silu,
            valid_BS=valid,
            counted_BS=valid,
        ).x

    jaxpr = jax.make_jaxpr(jax.jit(forward))(jnp.ones((4, 64, 32)))
    assert flops.jaxpr_flops(jaxpr) == 2 * ids.size * 32 * 48 * (2 + gated)
