"""The state before the first step: its values, and the devices and memory where they
are stored.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, trees
from jaxdist.parallel.offload import HOST
from jaxdist.parallel.optimizer_sharding import state_specs
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec, Tree, stored_dtype
from jaxdist.step.checkpoint_views import StateCut
from jaxdist.step.layerwise import Trained
from jaxdist.step.state import OptState, State
from jaxdist.step.step_config import INIT, StepConfig, key_of
from jaxdist.step.update import UpdateRule

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


# --- where it is stored ---------------------------------------------------------------


def state_shardings(
    spec: ModelSpec, abstract: State, mesh: Mesh, rules: Rules, rule: UpdateRule
) -> State:
    """Places each array of a state.

    Args:
      spec: with blocks by stage, where a pipeline cuts them up.
      abstract: the state's shapes.
      rule: says what waits in the host's memory.
    """

    def specs(tree: Tree, names: Tree, rule: Callable[..., P]) -> Tree:
        return jax.tree.map(lambda x, own: rule(own, x.shape), tree, names)

    whole = jax.tree.map(lambda _: P(), abstract)
    moments = specs(spec.trainable, spec.names, rules.state)
    optimizer = state_specs(abstract.opt_state.optimizer, spec.trainable, moments)
    state = whole._replace(
        trainable=specs(spec.trainable, spec.names, rules.stored),
        frozen=specs(spec.frozen, spec.frozen_names, rules.stored),
        model_state=specs(spec.model_state, spec.state_names, rules.computed),
        opt_state=whole.opt_state._replace(optimizer=optimizer),
        ema=None if abstract.ema is None else moments,
        modules={
            name: specs(module.frozen, module.frozen_names, rules.stored)
            for name, module in spec.modules.items()
        },
    )
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, s), state, is_leaf=lambda x: isinstance(x, P)
    )
    return _on_host(rule, abstract, shardings)


def _on_host(rule: UpdateRule, abstract: State, shardings: State) -> State:
    """Returns the shardings, those of what waits in the host's memory with its memory
    kind.
    """
    if rule.layerwise is None:
        return shardings
    _, moments, ema = rule.layerwise.waiting(
        Trained(abstract.trainable, abstract.opt_state.optimizer, abstract.ema)
    )

    def move(waits: bool, where: NamedSharding) -> NamedSharding:
        return where.with_memory_kind(HOST) if waits else where

    optimizer = jax.tree.map(move, moments, shardings.opt_state.optimizer)
    average = None if ema is None else jax.tree.map(move, ema, shardings.ema)
    return shardings._replace(
        opt_state=shardings.opt_state._replace(optimizer=optimizer), ema=average
    )
