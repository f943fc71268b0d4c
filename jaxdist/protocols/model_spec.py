"""Specs of models: shapes, logical names and roles of arrays that do not exist yet."""

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError, trees
from jaxdist.config.patterns import is_found, pattern_faults
from jaxdist.protocols import param_names
from jaxdist.protocols.dim_names import STACKED, Names
from jaxdist.protocols.first_arrays import Build, FirstArrays
from jaxdist.protocols.model import is_staged, layers_of, pattern_of
from jaxdist.protocols.objective import NextToken, Objective, WholeModel, token_faults
from jaxdist.protocols.sample_sums import sums_over_samples

Tree = Any  # nested dicts of arrays


@dataclass(frozen=True)
class ModelSpec:
    """A model without its arrays: its graph, their shapes, and their logical names."""

    first_arrays: FirstArrays  # makes the arrays of a new model
    graph: nnx.GraphDef[Any]
    trainable: Tree  # tree of ShapeDtypeStructs
    model_state: Tree
    # tuples of logical names, like `trainable`; stack dims are named only in `stack`
    names: Tree
    frozen: Tree = dataclasses.field(default_factory=dict)
    frozen_names: Tree = dataclasses.field(default_factory=dict)
    # keys and counts of the model's nnx.Rngs
    streams: Tree = dataclasses.field(default_factory=dict)
    model_class: type = nnx.Module
    patterns: tuple[str, ...] = ()  # regexes of the paths of frozen parameters
    staged: bool = False  # whether it has embed, a stack of blocks, and head
    # whether its ops cast kernels to the compute dtype, as those of `jaxdist.ops` do
    casts_itself: bool = False
    # whether its class declares that its loss is a sum over samples
    sums_over_samples: bool = False
    # names of the blocks' stack dims, if a pipeline has split them
    stack: Names = ()
    objective: Objective = NextToken()  # the objective that the model is trained for
    # The frozen modules that the objective prepares batches with, by name. All their
    # arrays are in their `frozen`.
    modules: Mapping[str, "ModelSpec"] = dataclasses.field(default_factory=dict)
    # Batches (shapes, parts) that checks of the model passed with: each is traced once.
    passed: set[Any] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def assemble(
        self,
        trainable: Tree,
        model_state: Tree,
        frozen: Tree | None = None,
        *,
        key: jax.Array | None = None,
    ) -> Any:
        """Assembles the model from its arrays.

        Args:
          trainable: arrays in the structure of `self.trainable`.
          model_state: arrays in the structure of `self.model_state`.
          frozen: arrays in the structure of `self.frozen`.
          key: seed of the model's random streams. With a key the model is in training
            mode. With None it is in evaluation mode, and the seed is a constant.
        """
        parts = [trainable, model_state, frozen or {}]
        if self.streams:
            parts.append(_reseed(self.streams, key))
        model: Any = nnx.merge(self.graph, *map(nnx.State, parts))
        if key is None:
            nnx.Module.eval(model)
        else:
            nnx.Module.train(model)
        return model

    def init_params(
        self, key: jax.Array, given: Mapping[str, jax.Array] | None = None
    ) -> tuple[Tree, Tree, Tree]:
        """Initialises the arrays of the model.

        Args:
          key: seed of the parameters.
          given: {path: value} of parameters that start with these values. A module in
            place of a parameter takes its value by a method `set_kernel`.

        Returns:
          (trainable, model state, frozen).
        """
        with nnx.use_eager_sharding(False):
            model = self.first_arrays.model(key)
            for path, value in (given or {}).items():
                names = path.split(trees.SEPARATOR)
                target: Any = functools.reduce(getattr, names, model)
                if hasattr(target, "set_kernel"):
                    target.set_kernel(value)
                else:
                    target.set_value(value)
            parts = _split(model, self.patterns)
        return parts.trainable, parts.model_state, parts.frozen

    def trained_for(
        self, objective: Objective, modules: Mapping[str, "ModelSpec"]
    ) -> "ModelSpec":
        """Makes the spec of this model as the policy of an objective.

        Args:
          objective: the objective that the model is trained for.
          modules: specs of the frozen modules, by the objective's names.

        Raises:
          ConfigError: a module is missing, unknown, or has no token terms; or the
            objective is not hashable.
        """
        name = type(objective).__name__
        faults = []
        for module in sorted({*objective.modules} ^ modules.keys()):
            fault = "missing" if module in objective.modules else "unknown"
            faults.append(f"{name}: frozen module {module!r} is {fault}")
        for module, spec in modules.items():
            user = f"frozen module {module!r}"
            faults += token_faults(
                user, spec.model_class, spec.staged, objective.term_methods
            )
        if objective.base_module and not jax.tree.leaves(self.frozen):
            faults.append(
                f"{name}: {objective.base_module!r} is the model without its adapters, "
                f"and it has none; set lora.rank, or give a frozen module"
            )
        try:
            hash(objective)
        except TypeError as error:
            faults.append(f"{name}: {error}; make it a frozen dataclass")
        if faults:
            raise ConfigError(faults)
        frozen = {module: spec.all_frozen() for module, spec in modules.items()}
        return dataclasses.replace(
            self, objective=objective, modules=frozen, passed=set()
        )

    def all_frozen(self) -> "ModelSpec":
        """Makes the spec of this model with all its arrays frozen."""
        return dataclasses.replace(
            self,
            trainable={},
            model_state={},
            frozen=_merge(self.trainable, self.model_state, self.frozen),
            names={},
            frozen_names=_merge_names(
                self.names, self._state_as_parameters, self.frozen_names
            ),
        )

    @property
    def _state_as_parameters(self) -> Tree:
        """The names of the model state in the form of parameters: no stack dims."""

        def name(path: Any, leaf: Any) -> Names:
            is_stacked = self.staged and path[0].key in STACKED
            dims: int = leaf.ndim - is_stacked
            return (None,) * dims

        return jax.tree_util.tree_map_with_path(name, self.model_state)

    def init_frozen(
        self,
        key: jax.Array,
        given: Mapping[str, jax.Array] | None = None,
        *,
        params: str = "float32",
    ) -> Tree:
        """Initialises all arrays of the model as one tree.

        Args:
          key: see `init_params`.
          given: see `init_params`.
          params: dtype of stored parameters; model state keeps its dtype.
        """
        trainable, model_state, frozen = self.init_params(key, given)
        stored = jax.tree.map(
            lambda x: x.astype(stored_dtype(x, params)), (trainable, frozen)
        )
        return _merge(*stored, model_state)

    def state_of(self, model: nnx.Module) -> Tree:
        """Reads the model state of an assembled model, after it was used.

        Raises:
          ConfigError: a state has another shape than in this spec.
        """
        by_path = trees.flatten_names(_split(model, self.patterns).model_state)

        def read(path: Any, before: jax.ShapeDtypeStruct) -> Any:
            name = trees.join(path)
            after = by_path.get(name)
            if after is None or after.shape != before.shape:
                shape = "nothing" if after is None else after.shape
                raise ConfigError(
                    f"{name}: the model changed this state from {before.shape} to {shape}"
                )
            return after.astype(before.dtype)

        return jax.tree_util.tree_map_with_path(read, self.model_state)

    def arrays_of(self, model: nnx.Module) -> tuple[Tree, Tree, Tree]:
        """Reads (trainable, model state, frozen) from an assembled model."""
        parts = _split(model, self.patterns)
        return parts.trainable, self.state_of(model), parts.frozen

    def named_parameters(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Lists all parameters: path -> (abstract array, logical names)."""
        return self.named_trainable() | self.named_frozen()

    def all_parameters(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Lists `named_parameters`, and those of frozen modules."""
        parameters = self.named_parameters()
        for name, module in self.modules.items():
            for path, parameter in module.named_frozen().items():
                parameters[f"modules/{name}/{path}"] = parameter
        return parameters

    def named_trainable(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Lists trained parameters: path -> (abstract array, logical names)."""
        return dict(self._trainable_by_path)

    @functools.cached_property
    def _trainable_by_path(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        return _with_names(self.trainable, self.names)

    def named_frozen(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Lists frozen parameters: path -> (abstract array, logical names)."""
        return dict(self._frozen_by_path)

    @functools.cached_property
    def _frozen_by_path(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        return _with_names(self.frozen, self.frozen_names)

    @property
    def state_names(self) -> Tree:
        """The names of the model state: only stack dims of a pipeline have names."""

        def name(path: Any, leaf: Any) -> Names:
            lead = self.stack if path[0].key == "blocks" else ()
            return (*lead, *(None,) * (leaf.ndim - len(lead)))

        return jax.tree_util.tree_map_with_path(name, self.model_state)

    @property
    def depth(self) -> int:
        """The number of blocks of a staged model with flat blocks; 0 for others."""
        if not self.staged:
            return 0
        blocks = [tree.get("blocks", {}) for tree in (self.trainable, self.frozen)]
        depth: int = jax.tree.leaves(blocks)[0].shape[0]
        return depth

    @property
    def abstract_model(self) -> Any:
        """The model with abstract arrays."""
        return self.assemble(self.trainable, self.model_state, self.frozen)

    @functools.cached_property
    def period(self) -> int:
        """The number of blocks after which kinds repeat (see `protocols.model`)."""
        return len(pattern_of(getattr(self.abstract_model, "blocks", None)))

    @functools.cached_property
    def block_layers(self) -> int:
        """The number of layers in a block; more than 1 in a `LayerGroup`."""
        return len(layers_of(self.abstract_model.blocks)) if self.staged else 1

    @property
    def parameter_count(self) -> int:
        """The number of the policy's parameters, trained or frozen."""
        return self.trainable_count + self.frozen_count

    @property
    def trainable_count(self) -> int:
        """The number of the policy's trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.trainable))

    @property
    def frozen_count(self) -> int:
        """The number of the policy's frozen parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.frozen))

    @property
    def module_count(self) -> int:
        """The number of elements in frozen modules, which are not the policy's."""
        return sum(module.frozen_count for module in self.modules.values())

    @property
    def counts(self) -> str:
        """A text such as "1,000 parameters", with those trained if some are frozen."""
        text = f"{self.parameter_count:,} parameters"
        if self.frozen_count:
            text += f", {self.trainable_count:,} trained"
            text += f" and {self.frozen_count:,} frozen"
        return text


def describe(
    build: Build,
    *,
    frozen: Sequence[str] = (),
    rules: Sequence[tuple[str, str]] = (),
) -> ModelSpec:
    """Describes the model that `build(rngs)` builds, without allocating arrays.

    Frozen parameters are those whose path matches a regex of `frozen`,
    `nnx.Param(..., trainable=False)`, and integers. Variables other than `nnx.Param`
    and random streams are model state.

    Args:
      build: builds the model.
      frozen: regexes (as by `re.search`) of paths such as "blocks/attention/query".
      rules: (path regex, names of the dims), see `param_names.name_parameters`.

    Raises:
      ConfigError: the model cannot be built, a regex is invalid or matches no parameter,
        no parameter is left to train, or names do not fit.
    """
    faults = [
        *pattern_faults("optimizer.frozen", frozen),
        *pattern_faults("sharding.rules", [pattern for pattern, _ in rules]),
    ]
    if faults:
        raise ConfigError(faults)
    first_arrays = _trace(build)
    model = first_arrays.abstract_model()
    staged = is_staged(model)
    names, misfits = param_names.name_parameters(model, rules, staged=staged)
    faults = [
        f"optimizer.frozen: {pattern!r} finds no parameter; there are: {', '.join(list(names)[:8])}"
        for pattern in frozen
        if not any(is_found(pattern, path) for path in names)
    ]
    parts = _split(model, frozen)
    if not jax.tree.leaves(parts.trainable):
        faults.append("optimizer.frozen leaves no parameter to train")
    if faults or misfits:
        raise ConfigError([*faults, *misfits])

    def names_of(tree: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: names[trees.join(path)], tree
        )

    return ModelSpec(
        first_arrays,
        names=names_of(parts.trainable),
        frozen_names=names_of(parts.frozen),
        model_class=type(model),
        patterns=tuple(frozen),
        staged=staged,
        objective=NextToken() if staged else WholeModel(),
        casts_itself=getattr(model, "casts_itself", False),
        sums_over_samples=sums_over_samples(model),
        **parts._asdict(),
    )


def _trace(build: Build) -> FirstArrays:
    """Traces the model's constructor.

    Raises:
      ConfigError: the model cannot be built.
    """
    try:
        return FirstArrays(build)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model: cannot be built with these options: {error}"
        ) from error


def stored_dtype(x: jax.ShapeDtypeStruct, params: str) -> jnp.dtype:
    """Computes the dtype that a parameter is stored in.

    It is `params`; quantised parameters and integers keep their dtype.
    """
    is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    return jnp.dtype(params) if is_wide else x.dtype


def as_stored(tree: Any, params: str) -> Any:
    """Gives abstract parameters the dtypes that they are stored in."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, stored_dtype(x, params)), tree
    )


class _Parts(NamedTuple):
    """A model's graph, and its arrays by their role in training."""

    graph: nnx.GraphDef[Any]
    trainable: Tree
    frozen: Tree
    streams: Tree
    model_state: Tree


def _split(model: nnx.Module, frozen: Sequence[str]) -> _Parts:
    """Splits a model's arrays by their role in training.

    Args:
      model: may be abstract.
      frozen: regexes of the paths of frozen parameters.
    """

    def is_frozen(path: Any, leaf: Any) -> bool:
        if not isinstance(leaf, nnx.Param):
            return False
        if leaf.get_metadata().get("trainable") is False:
            return True
        if not jnp.issubdtype(leaf.get_value().dtype, jnp.floating):
            return True
        name = "/".join(map(str, path))
        return any(is_found(pattern, name) for pattern in frozen)

    graph, *states = nnx.split(model, is_frozen, nnx.Param, nnx.RngState, ...)
    parts = [nnx.to_pure_dict(state) for state in states]
    return _Parts(
        graph,
        frozen=parts[0],
        trainable=parts[1],
        streams=parts[2],
        model_state=parts[3],
    )


def _merge(*parts: Tree) -> Tree:
    """Merges trees without common leaves."""
    leaves: dict[str, Any] = {}
    for part in parts:
        leaves |= trees.flatten_names(part)
    return trees.unflatten_names(leaves)


def _merge_names(*parts: Tree) -> Tree:
    """Merges trees of logical names without common leaves."""
    leaves: dict[str, Names] = {}
    for part in parts:
        named = jax.tree_util.tree_leaves_with_path(
            part, is_leaf=lambda x: isinstance(x, tuple)
        )
        leaves |= {trees.join(path): names for path, names in named}
    return trees.unflatten_names(leaves)


def _reseed(streams: Tree, key: jax.Array | None) -> Tree:
    """Restarts the model's random streams, each from the key and its path.

    Args:
      streams: keys and counts of the streams.
      key: None for a constant.
    """
    root = jax.random.key(0) if key is None else key

    def restart(path: Any, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)  # a count
        stream = jax.random.fold_in(root, zlib.crc32(trees.join(path).encode()))
        return jax.random.split(stream, leaf.shape) if leaf.shape else stream

    return jax.tree_util.tree_map_with_path(restart, streams)


def _with_names(tree: Tree, names: Tree) -> dict[str, tuple[Any, Names]]:
    """Joins arrays and logical names, by path."""
    leaves = trees.flatten_names(tree)
    all_names = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    pairs = zip(leaves.values(), all_names, strict=True)
    return dict(zip(leaves, pairs, strict=True))
