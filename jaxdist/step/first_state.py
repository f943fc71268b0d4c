"""The state before the first step, and the random keys of a run."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import ConfigError, trees
from jaxdist.protocols.model_spec import ModelSpec, stored_dtype
from jaxdist.step.checkpoint_views import StateCut
from jaxdist.step.state import OptState, State
from jaxdist.step.step_config import StepConfig

INIT, STEPS = 0, 1  # what the seed's first fold is for
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
    start = key_of(config.seed, INIT)
    policy, of_modules = _by_model(spec, given or {})
    trainable, model_state, frozen = spec.init_params(start, policy)
    modules = {}
    for name, module in spec.modules.items():
        known = _places(module)
        values = {path: x for path, x in policy.items() if path in known}
        modules[name] = module.init_frozen(
            start, values | of_modules[name], params=config.params
        )
    if cut:
        trainable, model_state, frozen = map(
            cut.policy.staged, (trainable, model_state, frozen)
        )
        modules = cut.staged_modules(modules)
    trainable, frozen = (
        jax.tree.map(lambda x: x.astype(stored_dtype(x, config.params)), tree)
        for tree in (trainable, frozen)
    )
    ema = (
        jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
        if config.ema_decay
        else None
    )
    scale = config.loss_scale.init() if config.loss_scale else None
    opt_state = OptState(transform.init(trainable), jnp.int32(0), scale)
    return State(jnp.int32(0), trainable, frozen, model_state, opt_state, ema, modules)


def _by_model(
    spec: ModelSpec, given: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """Separates the first values of the policy from those of each frozen module.

    Without frozen modules all are the policy's: a model may call a part `modules`.

    Raises:
      ConfigError: a value is for a module, or a parameter of one, that there is not.
    """
    policy: dict[str, jax.Array] = {}
    of_modules: dict[str, dict[str, jax.Array]] = {name: {} for name in spec.modules}
    unknown = []
    for path, x in given.items():
        if not spec.modules or not path.startswith(f"{MODULES}/"):
            policy[path] = x
            continue
        name, _, inner = path.removeprefix(f"{MODULES}/").partition("/")
        if name in spec.modules and inner in _places(spec.modules[name]):
            of_modules[name][inner] = x
        else:
            unknown.append(path)
    if unknown:
        raise ConfigError(
            f"no frozen module has the parameter {', '.join(unknown[:3])}; "
            f"the modules are {', '.join(spec.modules)}"
        )
    return policy, of_modules


def _places(module: ModelSpec) -> set[str]:
    """Lists the paths that a frozen module's values may be given by.

    These are its parameters, and what holds some: an adapter takes the kernel that it
    adapts by the kernel's own path.
    """
    places: set[str] = set()
    for path in trees.flatten_names(module.frozen):
        parts = path.split(trees.SEPARATOR)
        places |= {
            trees.SEPARATOR.join(parts[:end]) for end in range(1, len(parts) + 1)
        }
    return places


def key_of(seed: int, purpose: int) -> jax.Array:
    """Returns the random key of a run for a purpose, `INIT` or `STEPS`."""
    high, low = divmod(seed, 2**32)
    # without 64-bit types, jax would leave the upper half out
    key = jax.random.key(low)
    return jax.random.fold_in(jax.random.fold_in(key, high) if high else key, purpose)
