"""A model before its arrays exist: shapes, logical names, what is trained and what is
frozen.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError, trees
from jaxdist.protocols import param_names
from jaxdist.protocols.model import is_staged, layers_of, pattern_of
from jaxdist.protocols.objective import NextToken, Objective, WholeModel, token_faults
from jaxdist.protocols.param_names import Names
from jaxdist.protocols.sample_sums import sums_over_samples

Tree = Any  # nested dicts of arrays


@dataclass(frozen=True)
class ModelSpec:
    """A model without its arrays: its graph, their shapes, and their logical names."""

    build: Callable[[nnx.Rngs], nnx.Module]
    graph: nnx.GraphDef
    trainable: Tree  # of ShapeDtypeStruct
    model_state: Tree
    # like trainable, of tuples of logical names; those of stack dims only if `stack`
    # has them
    names: Tree
    frozen: Tree = dataclasses.field(default_factory=dict)
    frozen_names: Tree = dataclasses.field(default_factory=dict)
    # keys and counts of the model's own nnx.Rngs
    streams: Tree = dataclasses.field(default_factory=dict)
    model_class: type = nnx.Module
    patterns: tuple[str, ...] = ()  # of the paths of frozen parameters
    staged: bool = False  # the model has embed, a stack of blocks, and head
    # its ops cast kernels to the compute dtype, as those of `jaxdist.ops` do
    casts_itself: bool = False
    # its loss is a sum over samples, as the model's class says
    sums_over_samples: bool = False
    # names of the blocks' stack dims, where a pipeline has cut them up
    stack: Names = ()
    objective: Objective = NextToken()  # what the model is trained for
    # The frozen modules that the objective prepares batches with, by name. All their
    # arrays are in `frozen`.
    modules: Mapping[str, "ModelSpec"] = dataclasses.field(default_factory=dict)
    # The batches (shapes, parts) that the model was looked at with, and nothing found:
    # each is traced once.
    passed: set[Any] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def assemble(
        self,
        trainable: Tree,
        model_state: Tree,
        frozen: Tree | None = None,
        *,
        key: jax.Array | None = None,
    ) -> Any:
        """Returns the model with these arrays in it: in training mode with a key, else
        to evaluate.

        Args:
          key: what the model's own random streams start from; None: a constant.
        """
        parts = [trainable, model_state, frozen or {}]
        parts += [_reseeded(self.streams, key)] if self.streams else []
        model = nnx.merge(self.graph, *map(nnx.State, parts))
        (nnx.Module.eval if key is None else nnx.Module.train)(model)
        return model

    def init_params(
        self, key: jax.Array, given: Mapping[str, jax.Array] | None = None
    ) -> tuple[Tree, Tree, Tree]:
        """Returns (trainable, model state, frozen) of a newly initialised model.

        Args:
          given: {path: value} of parameters that begin with these values; what stands
            in the place of a parameter takes its value by a method `set_kernel`.
        """
        with nnx.use_eager_sharding(False):
            model = _built(self.build, nnx.Rngs(key))
            for path, value in (given or {}).items():
                place: Any = functools.reduce(
                    getattr, path.split(trees.SEPARATOR), model
                )
                place.set_kernel(value) if hasattr(
                    place, "set_kernel"
                ) else place.set_value(value)
            parts = _split(model, self.patterns)
        return parts.trainable, parts.model_state, parts.frozen

    def trained_for(
        self, objective: Objective, modules: Mapping[str, "ModelSpec"]
    ) -> "ModelSpec":
        """Returns the spec of this model as the policy of an objective.

        Args:
          modules: the frozen modules by the names that the objective calls them.

        Raises:
          ConfigError: a module is missing, unknown, or gives no terms of tokens; the
            objective cannot be compared.
        """
        name = type(objective).__name__
        faults = [
            f"{name}: frozen module {module!r} is "
            + ("missing" if module in objective.modules else "unknown")
            for module in sorted({*objective.modules} ^ modules.keys())
        ]
        for module, spec in modules.items():
            user = f"frozen module {module!r}"
            faults += token_faults(user, spec.model_class, spec.staged)
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
        """Returns the spec of this model with all its arrays frozen."""
        return dataclasses.replace(
            self,
            trainable={},
            model_state={},
            frozen=_merged(self.trainable, self.model_state, self.frozen),
            names={},
            frozen_names=_merged_names(
                self.names, self._state_as_parameters, self.frozen_names
            ),
        )

    @property
    def _state_as_parameters(self) -> Tree:
        """The names of the model state as parameters have theirs: without stack dims."""

        def name(path, leaf) -> Names:
            stacked = self.staged and path[0].key in param_names.STACKED
            return (None,) * (leaf.ndim - stacked)

        return jax.tree_util.tree_map_with_path(name, self.model_state)

    def init_frozen(
        self,
        key: jax.Array,
        given: Mapping[str, jax.Array] | None = None,
        *,
        params: str = "float32",
    ) -> Tree:
        """Returns all arrays of a newly initialised model, see `init_params`.

        Args:
          params: dtype that parameters are stored in; model state keeps its own.
        """
        trainable, model_state, frozen = self.init_params(key, given)
        stored = jax.tree.map(
            lambda x: x.astype(stored_dtype(x, params)), (trainable, frozen)
        )
        return _merged(*stored, model_state)

    def state_of(self, model: nnx.Module) -> Tree:
        """Returns the model state that a model, assembled and then used, has come to.

        Raises:
          ConfigError: it has another shape than before.
        """
        by_path = trees.flatten_names(_split(model, self.patterns).model_state)

        def kept(path, before):
            name = trees.join(path)
            after = by_path.get(name)
            if after is None or after.shape != before.shape:
                now = "nothing" if after is None else after.shape
                raise ConfigError(
                    f"{name}: the model changed this state from {before.shape} to {now}"
                )
            return after.astype(before.dtype)

        return jax.tree_util.tree_map_with_path(kept, self.model_state)

    def arrays_of(self, model: nnx.Module) -> tuple[Tree, Tree, Tree]:
        """Returns (trainable, model state, frozen) as a model holds them."""
        parts = _split(model, self.patterns)
        return parts.trainable, self.state_of(model), parts.frozen

    def named_parameters(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Returns path -> (abstract array, logical names), of what is trained and of
        what is frozen.
        """
        return self.named_trainable() | self.named_frozen()

    def all_parameters(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Returns path -> (abstract array, logical names), of frozen modules too."""
        found = self.named_parameters()
        for name, module in self.modules.items():
            for path, parameter in module.named_frozen().items():
                found[f"modules/{name}/{path}"] = parameter
        return found

    def named_trainable(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Returns path -> (abstract array, logical names) of what is trained."""
        return _named(self.trainable, self.names)

    def named_frozen(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Names]]:
        """Returns path -> (abstract array, logical names) of what is frozen."""
        return _named(self.frozen, self.frozen_names)

    @property
    def state_names(self) -> Tree:
        """Returns the names of the model state: of stack dims alone, where a pipeline
        cuts them up.
        """

        def name(path, leaf) -> Names:
            lead = self.stack if path[0].key == "blocks" else ()
            return (*lead, *(None,) * (leaf.ndim - len(lead)))

        return jax.tree_util.tree_map_with_path(name, self.model_state)

    @property
    def depth(self) -> int:
        """Returns the number of blocks of a staged model, flat; 0 for another."""
        parts = [tree.get("blocks", {}) for tree in (self.trainable, self.frozen)]
        return jax.tree.leaves(parts)[0].shape[0] if self.staged else 0

    @property
    def abstract_model(self) -> Any:
        """Returns the model with abstract arrays."""
        return self.assemble(self.trainable, self.model_state, self.frozen)

    @property
    def period(self) -> int:
        """Returns the number of blocks after which their kinds repeat (see
        `protocols.model`).
        """
        return len(pattern_of(getattr(self.abstract_model, "blocks", None)))

    @property
    def block_layers(self) -> int:
        """Returns the number of layers in each block of a staged model, more than 1 in
        a `LayerGroup`.
        """
        return len(layers_of(self.abstract_model.blocks)) if self.staged else 1

    @property
    def parameter_count(self) -> int:
        """Counts the parameters of the policy, trained or not."""
        return self.trainable_count + self.frozen_count

    @property
    def trainable_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.trainable))

    @property
    def frozen_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.frozen))

    @property
    def module_count(self) -> int:
        """Counts the numbers that frozen modules hold, which are not the policy's."""
        return sum(module.frozen_count for module in self.modules.values())

    @property
    def counts(self) -> str:
        """Returns "1,000 parameters", or how many of them are trained."""
        text = f"{self.parameter_count:,} parameters"
        if self.frozen_count:
            text += f", {self.trainable_count:,} trained"
            text += f" and {self.frozen_count:,} frozen"
        return text


def describe(
    build: Callable[[nnx.Rngs], nnx.Module],
    *,
    frozen: Sequence[str] = (),
    rules: Sequence[tuple[str, str]] = (),
) -> ModelSpec:
    """Returns the spec of the model that `build(rngs)` makes; nothing is allocated.

    Frozen are parameters whose path a regex of `frozen` finds, `nnx.Param(...,
    trainable=False)`, and integers. Whatever is no `nnx.Param` is model state, but for
    random streams.

    Args:
      frozen: regexes (`re.search`) of paths such as "blocks/attention/query".
      rules: (path regex, names of the dims): see `param_names.name_parameters`.

    Raises:
      ConfigError: it cannot be made of these options; a regex finds nothing, or all;
        names don't fit.
    """
    model = _abstract_model(build)
    staged = is_staged(model)
    names, misfits = param_names.name_parameters(model, rules, staged=staged)
    faults = [
        f"optimizer.frozen: {pattern!r} finds no parameter; there are: {', '.join(list(names)[:8])}"
        for pattern in frozen
        if not any(re.search(pattern, path) for path in names)
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
        build,
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


def _abstract_model(build: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    """Returns the model with abstract arrays; raises ConfigError if it cannot
    be built.
    """
    with nnx.use_eager_sharding(False):
        try:
            return nnx.eval_shape(lambda: _built(build, nnx.Rngs(0)))
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"model: cannot be built with these options: {error}"
            ) from error


def stored_dtype(x: jax.ShapeDtypeStruct, params: str) -> jnp.dtype:
    """Returns the dtype that a parameter is stored in: `params`, or its own if
    quantised (or an integer).
    """
    wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    return jnp.dtype(params) if wide else x.dtype


class _Parts(NamedTuple):
    graph: nnx.GraphDef
    trainable: Tree
    frozen: Tree
    streams: Tree
    model_state: Tree


def _built(build: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    # flax takes arrays that are made while it traces for static, unless their type is
    # registered.
    nnx.register_data_type(type(jnp.zeros(())))
    return build(rngs)


def _split(model: nnx.Module, frozen: Sequence[str]) -> _Parts:
    """Returns a model's arrays by what training does with them."""

    def is_frozen(path, leaf) -> bool:
        if not isinstance(leaf, nnx.Param):
            return False
        marked = leaf.get_metadata().get("trainable") is False
        marked |= not jnp.issubdtype(leaf.get_value().dtype, jnp.floating)
        return marked or any(
            re.search(pattern, "/".join(map(str, path))) for pattern in frozen
        )

    graph, *states = nnx.split(model, is_frozen, nnx.Param, nnx.RngState, ...)
    held, trainable, streams, rest = map(nnx.to_pure_dict, states)
    return _Parts(graph, trainable, held, streams, rest)


def _merged(*parts: Tree) -> Tree:
    """Returns trees without common leaves as one."""
    leaves: dict[str, Any] = {}
    for part in parts:
        leaves |= trees.flatten_names(part)
    return trees.unflatten_names(leaves)


def _merged_names(*parts: Tree) -> Tree:
    """Returns trees of logical names as one."""
    leaves: dict[str, Names] = {}
    for part in parts:
        named = jax.tree_util.tree_leaves_with_path(
            part, is_leaf=lambda x: isinstance(x, tuple)
        )
        leaves |= {trees.join(path): names for path, names in named}
    return trees.unflatten_names(leaves)


def _reseeded(streams: Tree, key: jax.Array | None) -> Tree:
    """Returns the model's random streams begun anew, each from the key and its own
    path.
    """
    start = jax.random.key(0) if key is None else key

    def begin(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(start, zlib.crc32(trees.join(path).encode()))
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    return jax.tree_util.tree_map_with_path(begin, streams)


def _named(tree: Tree, names: Tree) -> dict[str, tuple[Any, Names]]:
    known = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    return {
        path: (x, own)
        for (path, x), own in zip(trees.flatten_names(tree).items(), known, strict=True)
    }
