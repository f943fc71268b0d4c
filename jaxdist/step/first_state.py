"""The state before the first step: its values, and where they are stored."""

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
from jaxdist.step.checkpoint_views import StateStaging
from jaxdist.step.layerwise import Trained
from jaxdist.step.state import OptState, State
from jaxdist.step.step_config import INIT, StepConfig, key_of
from jaxdist.step.update import UpdateRule

# `MODULES/NAME/PATH` names the initial value of a frozen module's parameter.
MODULES = "modules"


def first_state(
    spec: ModelSpec,
    state_staging: StateStaging | None,
    transform: optax.GradientTransformation,
    config: StepConfig,
    values: Mapping[str, jax.Array] | None = None,
) -> State:
    """Makes the state before the first step.

    Args:
      spec: the model with flat blocks.
      state_staging: the pipeline's partition of the layers; None: no pipeline.
      transform: the optimizer.
      config: the step's config, which has the seed and the dtypes.
      values: initial values of parameters by path; the others are random. The path of a
        frozen module's parameter is `modules/NAME/PATH`. A module's parameter without a
        value starts with the policy's value of the same path.
    """
    start = key_of(config.seed, INIT)
    policy_values, module_values = _by_model(spec, values or {})
    trainable, model_state, frozen = spec.init_params(start, policy_values)
    modules = {}
    for name, module in spec.modules.items():
        known = _value_paths(module)
        shared = {path: x for path, x in policy_values.items() if path in known}
        modules[name] = module.init_frozen(
            start, shared | module_values[name], params=config.params
        )
    if state_staging:
        trainable, model_state, frozen = map(
            state_staging.policy.by_stage, (trainable, model_state, frozen)
        )
        modules = state_staging.staged_modules(modules)
    trainable = _as_stored(trainable, config.params)
    frozen = _as_stored(frozen, config.params)
    ema = None
    if config.ema_decay:
        ema = jax.tree.map(lambda x: x.astype(jnp.float32), trainable)
    loss_scale = config.loss_scale.init() if config.loss_scale else None
    return State(
        step=jnp.int32(0),
        trainable=trainable,
        frozen=frozen,
        model_state=model_state,
        opt_state=OptState(
            optimizer=transform.init(trainable),
            skipped=jnp.int32(0),
            loss_scale=loss_scale,
        ),
        ema=ema,
        modules=modules,
    )


def _as_stored(tree: Tree, params_dtype: str) -> Tree:
    """Converts parameters to the dtypes in which a run stores them."""
    return jax.tree.map(lambda x: x.astype(stored_dtype(x, params_dtype)), tree)


def _by_model(
    spec: ModelSpec, values: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """Separates the initial values of the policy from those of each frozen module.

    Without frozen modules, all values are the policy's: a part of it may be called
    `modules`.

    Raises:
      ConfigError: a value belongs to a module or parameter that does not exist.
    """
    policy: dict[str, jax.Array] = {}
    by_module: dict[str, dict[str, jax.Array]] = {name: {} for name in spec.modules}
    unknown = []
    for path, x in values.items():
        if not spec.modules or not path.startswith(f"{MODULES}/"):
            policy[path] = x
            continue
        name, _, inner = path.removeprefix(f"{MODULES}/").partition("/")
        if name in spec.modules and inner in _value_paths(spec.modules[name]):
            by_module[name][inner] = x
        else:
            unknown.append(path)
    if unknown:
        raise ConfigError(
            f"no frozen module has the parameter {', '.join(unknown[:3])}; "
            f"the modules are {', '.join(spec.modules)}"
        )
    return policy, by_module


def _value_paths(module: ModelSpec) -> set[str]:
    """Lists the paths under which a frozen module accepts initial values.

    These are the paths of its parameters and of the nodes above them: an adapter
    accepts the kernel that it adapts under the kernel's own path.
    """
    paths: set[str] = set()
    for path in trees.flatten_names(module.frozen):
        parts = path.split(trees.SEPARATOR)
        paths |= {trees.SEPARATOR.join(parts[:end]) for end in range(1, len(parts) + 1)}
    return paths


# --- where the state is stored --------------------------------------------------------


def state_shardings(
    spec: ModelSpec, abstract: State, mesh: Mesh, rules: Rules, rule: UpdateRule
) -> State:
    """Chooses the sharding of each array of a state.

    Args:
      spec: the model; with a pipeline, its blocks are by stage.
      abstract: shapes of the state.
      mesh: the devices.
      rules: the sharding rules.
      rule: the update, which knows which arrays wait in the host's memory.
    """

    def specs(tree: Tree, names: Tree, spec_of: Callable[..., P]) -> Tree:
        return jax.tree.map(lambda x, dims: spec_of(dims, x.shape), tree, names)

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
    return _with_host_memory(rule, abstract, shardings)


def _with_host_memory(rule: UpdateRule, abstract: State, shardings: State) -> State:
    """Sets the memory kind of arrays that wait in the host's memory."""
    if rule.layerwise is None:
        return shardings
    params, moments, ema = rule.layerwise.waiting(
        Trained(abstract.trainable, abstract.opt_state.optimizer, abstract.ema)
    )

    def move(waits: bool, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if waits else sharding

    trainable = jax.tree.map(move, params, shardings.trainable)
    optimizer = jax.tree.map(move, moments, shardings.opt_state.optimizer)
    average = None if ema is None else jax.tree.map(move, ema, shardings.ema)
    return shardings._replace(
        trainable=trainable,
        opt_state=shardings.opt_state._replace(optimizer=optimizer),
        ema=average,
    )
