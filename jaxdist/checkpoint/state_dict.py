"""Canonical names of a train state on disk.

A name says what an array is, never how the program holds it: `trainable/blocks/mlp/w`
(attribute path, layers stacked as [num_layers, ...]), `opt_state/mu/blocks/mlp/w`,
`opt_state/count`, `step`. Optimizer states are nested tuples of NamedTuples; their
names come from field names and dict keys alone. Positions in a chain and class names
are left out, so that adding a stateless transform (a clip, a mask) or an optax release
that renames a class leaves a checkpoint readable.

Collision rule: inside one container, members are visited in flatten order; where a
member's first part is taken by an earlier sibling it becomes `part~2`, `part~3`, ...
for that whole subtree. So a chain of adam and a schedule has `mu`, `nu`, `count` (adam)
and `count~2` (schedule).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import tree_util

from jaxdist.checkpoint.files import ArrayInfo, CheckpointError
from jaxdist.config import trees

# Fields of optax's wrappers (partition, masked, inject_hyperparams, apply_if_finite,
# schedule_free) that only hold another state: like a position in a chain, they say
# nothing about the array.
_WRAPPERS = ("inner_state", "inner_states", "base_optimizer_state")
_FOLLOWS = ("opt_state/", "ema/")  # arrays whose shapes follow from the model's
_SHOWN = 3  # arrays named in a summary
_UNNAMED = "value"  # the first part of an array that sits directly in a sequence


class LayoutError(CheckpointError):
    """The arrays of a checkpoint are not those of the state; `faults` has one line for
    each.
    """

    def __init__(self, faults: Sequence[str], differing: Sequence[str] = ()) -> None:
        """Args:
        differing: "NAME: what is there, what is here", in the order of the state.
        """
        self.faults = tuple(faults)
        self.differing = differing
        super().__init__(
            "the checkpoint does not fit this state:\n" + "\n".join(self.faults)
        )

    @property
    def is_of_model(self) -> bool:
        """Whether arrays of the model differ, not of its optimizer alone, whose state
        follows them.
        """
        return any(not line.startswith(_FOLLOWS) for line in self.differing)

    @property
    def summary(self) -> str:
        """The first arrays that differ, on one line."""
        of_model = [line for line in self.differing if not line.startswith(_FOLLOWS)]
        lines = of_model or self.differing or self.faults
        more = f"; and {len(lines) - _SHOWN} more arrays" if len(lines) > _SHOWN else ""
        return f"{'; '.join(lines[:_SHOWN])}{more}"


def to_canonical(state: Any) -> dict[str, Any]:
    """Returns {canonical name: leaf} of a `State`; None and empty parts (ema) give no
    names.

    Leaves may be arrays or abstract arrays.

    Raises:
      ValueError: a key of the state holds "/".
    """
    return dict(zip(_names(state), tree_util.tree_leaves(state), strict=True))


def from_canonical(arrays: Mapping[str, Any], abstract_state: Any) -> Any:
    """Returns a state with the structure of `abstract_state` and the leaves of
    `arrays`.

    Raises:
      LayoutError: names are missing or unexpected, or a shape or dtype differs; all are
        listed.
    """
    check(describe(arrays), abstract_state)
    structure = tree_util.tree_structure(abstract_state)
    return tree_util.tree_unflatten(
        structure, [arrays[name] for name in _names(abstract_state)]
    )


def describe(arrays: Mapping[str, Any]) -> dict[str, ArrayInfo]:
    """Returns shape and dtype of each array, abstract array or Python scalar."""
    typed = {
        name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        for name, leaf in arrays.items()
    }
    return {
        name: ArrayInfo(tuple(np.shape(leaf)), str(leaf.dtype))
        for name, leaf in typed.items()
    }


def check(
    stored: Mapping[str, ArrayInfo], abstract_state: Any, *, partial: bool = False
) -> None:
    """Raise LayoutError unless `stored` has exactly the names, shapes and dtypes of the
    state.

    With `partial` more may be stored than the state has.
    """
    wanted = describe(to_canonical(abstract_state))
    faults = [
        f"missing in the checkpoint: {k} {wanted[k]}" for k in wanted if k not in stored
    ]
    extra = [] if partial else [name for name in stored if name not in wanted]
    faults += [f"unexpected in the checkpoint: {name} {stored[name]}" for name in extra]
    faults += [
        f"different: {name} is {stored[name]} in the checkpoint, {wanted[name]} in this state"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    if faults:
        names = [*(name for name in wanted if stored.get(name) != wanted[name]), *extra]
        shown = [
            (stored.get(name, "nothing"), wanted.get(name, "nothing")) for name in names
        ]
        pairs = zip(names, shown, strict=True)
        raise LayoutError(
            faults,
            [f"{name}: {there} there, {here} here" for name, (there, here) in pairs],
        )


def _names(state: Any) -> list[str]:
    """Returns the canonical names of the leaves, in flatten order."""
    root: dict[Any, Any] = {}
    for path, _ in tree_util.tree_leaves_with_path(state):
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = None
    return [trees.SEPARATOR.join(path) for path in _visit(root)]


def _visit(node: dict[Any, Any] | None) -> list[tuple[str, ...]]:
    """Returns the paths of a node's leaves, in their order; None is a leaf."""
    if node is None:
        return [()]
    taken: set[str] = set()
    paths: list[tuple[str, ...]] = []
    for key, child in node.items():
        prefix = () if _is_silent(key) else (trees.key_name(key),)
        members = [prefix + path or (_UNNAMED,) for path in _visit(child)]
        renamed = {
            part: _free(part, taken)
            for part in dict.fromkeys(path[0] for path in members)
        }
        taken.update(renamed.values())
        paths += [(renamed[path[0]], *path[1:]) for path in members]
    return paths


def _is_silent(key: object) -> bool:
    if isinstance(key, tree_util.GetAttrKey):
        return key.name in _WRAPPERS
    return isinstance(key, tree_util.SequenceKey | tree_util.FlattenedIndexKey)


def _free(part: str, taken: set[str]) -> str:
    numbered = (f"{part}~{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([part], numbered) if name not in taken)


def require_shardings(abstract: Mapping[str, Any]) -> None:
    """Raises TypeError for leaves of an abstract state that say no sharding to be
    restored into.
    """
    bare = [
        name
        for name, leaf in abstract.items()
        if getattr(leaf, "sharding", None) is None
    ]
    if bare:
        raise TypeError(
            f"leaves with a sharding are required; without one: {', '.join(bare)}"
        )
