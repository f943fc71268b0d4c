"""Canonical names of the arrays of a train state on disk.

A name says what an array is, never how the program holds it. Examples are
`trainable/blocks/mlp/w` (attribute path, layers stacked as [num_layers, ...]),
`opt_state/optimizer/mu/blocks/mlp/w`, `opt_state/optimizer/count` and `step`.

Optimizer states are nested tuples of NamedTuples. Their names come from field names and
dict keys alone. They contain neither positions in a chain nor class names. A checkpoint
therefore stays readable after a stateless transform (a clip, a mask) is added, or after
an optax release renames a class.

Collisions are resolved inside each container, whose members are visited in flatten
order. If an earlier sibling has the first part of a member's name, the part becomes
`part~2`, `part~3`, ... for the whole subtree. A chain of adam and a schedule has `mu`,
`nu`, `count` (adam) and `count~2` (schedule).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import tree_util

from jaxdist.checkpoint.folders import ArrayInfo, CheckpointError
from jaxdist.config import trees

# Fields of optax's wrappers (partition, masked, inject_hyperparams, apply_if_finite,
# schedule_free) that only hold another state. Names do not contain them, because they
# describe the array as little as a position in a chain.
_WRAPPERS = ("inner_state", "inner_states", "base_optimizer_state")
# Prefixes of arrays whose shapes follow from those of the model.
_FOLLOWS = ("opt_state/", "ema/")
_SHOWN = 3  # arrays that a summary lists
_UNNAMED = "value"  # name of an array that sits directly in a sequence


class LayoutError(CheckpointError):
    """Error of a checkpoint whose arrays are not those of the state.

    `faults` has one line for each array that differs.
    """

    def __init__(self, faults: Sequence[str], differing: Sequence[str] = ()) -> None:
        """Formats the message.

        Args:
          faults: a line for each array that differs.
          differing: "NAME: stored array, array of the state", in the order of the
            state.
        """
        self.faults = tuple(faults)
        self.differing = differing
        super().__init__(
            "the checkpoint does not fit this state:\n" + "\n".join(self.faults)
        )

    @property
    def is_of_model(self) -> bool:
        """Whether arrays of the model differ.

        Otherwise only arrays of the optimizer or of the averages do.
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
    """Makes {canonical name: leaf} of a `State`. None and empty parts have no names.

    Leaves may be arrays or abstract arrays.

    Raises:
      ValueError: a key of the state holds "/".
    """
    return dict(zip(_names(state), tree_util.tree_leaves(state), strict=True))


def from_canonical(arrays: Mapping[str, Any], abstract_state: Any) -> Any:
    """Makes a state with the structure of `abstract_state` and the leaves of `arrays`.

    Raises:
      LayoutError: names are missing or unexpected, or a shape or dtype differs. All are
        listed.
    """
    check(describe(arrays), abstract_state)
    structure = tree_util.tree_structure(abstract_state)
    return tree_util.tree_unflatten(
        structure, [arrays[name] for name in _names(abstract_state)]
    )


def describe(arrays: Mapping[str, Any]) -> dict[str, ArrayInfo]:
    """Describes shape and dtype of each array, abstract array or Python scalar."""
    infos = {}
    for name, leaf in arrays.items():
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        infos[name] = ArrayInfo(tuple(np.shape(array)), str(array.dtype))
    return infos


def check(
    stored: Mapping[str, ArrayInfo], abstract_state: Any, *, partial: bool = False
) -> None:
    """Checks that `stored` has the names, shapes and dtypes of the state.

    Args:
      stored: arrays of a checkpoint by canonical name.
      abstract_state: state to compare with.
      partial: whether more arrays may be stored than the state has.

    Raises:
      LayoutError: the arrays differ. All differences are listed.
    """
    expected = describe(to_canonical(abstract_state))
    missing = [name for name in expected if name not in stored]
    extra = [] if partial else [name for name in stored if name not in expected]
    changed = [
        name for name in expected if name in stored and stored[name] != expected[name]
    ]
    faults = [
        *(f"missing in the checkpoint: {name} {expected[name]}" for name in missing),
        *(f"unexpected in the checkpoint: {name} {stored[name]}" for name in extra),
        *(
            f"different: {name} is {stored[name]} in the checkpoint, {expected[name]} in this state"
            for name in changed
        ),
    ]
    if faults:
        names = [
            name for name in expected if stored.get(name) != expected[name]
        ] + extra
        differing = [
            f"{name}: {stored.get(name, 'nothing')} there, {expected.get(name, 'nothing')} here"
            for name in names
        ]
        raise LayoutError(faults, differing)


def _names(state: Any) -> list[str]:
    """Lists the canonical names of the leaves, in flatten order."""
    root: dict[Any, Any] = {}
    for path, _ in tree_util.tree_leaves_with_path(state):
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = None
    return [trees.SEPARATOR.join(path) for path in _visit(root)]


def _visit(node: dict[Any, Any] | None) -> list[tuple[str, ...]]:
    """Lists the name parts of each leaf below a node, in order; None is a leaf."""
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
    """Tests whether a key is not part of a name."""
    if isinstance(key, tree_util.GetAttrKey):
        return key.name in _WRAPPERS
    return isinstance(key, tree_util.SequenceKey | tree_util.FlattenedIndexKey)


def _free(part: str, taken: set[str]) -> str:
    """Chooses `part`, or the first free one of `part~2`, `part~3`, ..."""
    numbered = (f"{part}~{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([part], numbered) if name not in taken)


def require_shardings(abstract: Mapping[str, Any]) -> None:
    """Checks that all leaves of an abstract state have a sharding to be restored into.

    Raises:
      TypeError: some have none. The error names them.
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
