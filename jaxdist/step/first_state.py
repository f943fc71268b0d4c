"""The state before the first step, and the random keys of a run."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import trees
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.step.checkpoint_views import StateCut
from jaxdist.step.state import OptState, State
from jaxdist.step.step_config import StepConfig

# what the seed's first fold is for
INIT = 0
STEPS = 1
# `MODULES/NAME/PATH` is the first value of a frozen module's parameter.
MODULES = "modules"


def first_state(
    spec: ModelSpec,
    cut: StateCut | None,
    transform: optax.GradientTransformation,
    config: StepConfig,
    given: Mapping[str, jax.Array] | None = None,
) -> State:
    """Returns the state before the first step.

    Args:
      spec: with flat blocks.
      cut: the pipeline's; None: no pipeline.
      given: {path: value} of parameters that begin with these values. Those of a frozen
        module are called `modules/NAME/PATH`; others of its parameters begin as the
        policy's of the same path.
    """
    given = given or {}
    start = key_of(config.seed, INIT)
    policy = {
        path: x for path, x in given.items() if not path.startswith(f"{MODULES}/")
    }
    trainable, model_state, frozen = spec.init_params(start, policy)
    modules = {}
    for name, module in spec.modules.items():
        prefix = f"{MODULES}/{name}/"
        known = trees.flatten_names(module.frozen)
        values = {path: x for path, x in policy.items() if path in known}
        values |= {
            path.removeprefix(prefix): x
            for path, x in given.items()
            if path.startswith(prefix)
        }
        modules[name] = module.init_frozen(start, values)
    if cut:
        trainable, model_state, frozen = map(
            cut.policy.staged, (trainable, model_state, frozen)
        )
        modules = cut.staged_modules(modules)
    trainable, frozen, modules = (
        jax.tree.map(lambda x: x.astype(stored_dtype(x, config.params)), tree)
        for tree in (trainable, frozen, modules)
    )
    ema = (
        jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
        if config.ema_decay
        else None
    )
    scale = config.loss_scale.init() if config.loss_scale else None
    opt_state = OptState(transform.init(trainable), jnp.int32(0), scale)
    return State(jnp.int32(0), trainable, frozen, model_state, opt_state, ema, modules)


def key_of(seed: int, purpose: int) -> jax.Array:
    """Returns the random key of a run for a purpose, `INIT` or `STEPS`."""
    high, low = divmod(seed, 2**32)
    # without 64-bit types, jax would leave the upper half out
    key = jax.random.key(low)
    return jax.random.fold_in(jax.random.fold_in(key, high) if high else key, purpose)
