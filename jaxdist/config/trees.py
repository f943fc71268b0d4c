"""Names for the leaves of a pytree ("blocks/mlp/w"), and sizes summed over it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import tree_util

SEPARATOR = "/"


def key_name(key: object) -> str:
    """Returns the text of one key of a pytree path: a dict key, a field name or an index.

    Raises:
      ValueError: the text is empty or holds the separator, so that names would be ambiguous.
    """
    match key:
        case tree_util.DictKey(key=inner) | tree_util.FlattenedIndexKey(key=inner):
            name = str(inner)
        case tree_util.GetAttrKey(name=inner):
            name = inner
        case tree_util.SequenceKey(idx=inner):
            name = str(inner)
        case _:
            name = str(key)
    if not name or SEPARATOR in name:
        raise ValueError(
            f"the tree key {name!r} cannot be part of a name: "
            f"keys must be non-empty and without {SEPARATOR!r}; rename the attribute or dict key"
        )
    return name


def join(path: Sequence[object]) -> str:
    """Returns the name of the leaf at a pytree `path`, e.g. "blocks/mlp/w"."""
    return SEPARATOR.join(key_name(key) for key in path)


def flatten_names(tree: Any) -> dict[str, Any]:
    """Returns {name: leaf} in flatten order; None and empty containers hold no leaves.

    Dict keys, NamedTuple fields and sequence indexes become the parts of a name.

    Raises:
      ValueError: a key holds the separator, or the tree is a single leaf without any name.
    """
    leaves, _ = tree_util.tree_flatten_with_path(tree)
    if len(leaves) == 1 and not leaves[0][0]:
        raise ValueError(f"a tree with names is required, a single {type(tree).__name__} was given")
    return {join(path): leaf for path, leaf in leaves}


def unflatten_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from {name: leaf}; indexes stay text, as the names do not tell them.

    Raises:
      ValueError: one name is the beginning of another ("a" beside "a/b").
    """
    nested: dict[str, Any] = {}
    inner: set[int] = {id(nested)}  # the dicts made here; a leaf may itself be a dict
    for name, leaf in names.items():
        *parents, last = name.split(SEPARATOR)
        node = nested
        for part in parents:
            if part not in node:
                node[part] = {}
                inner.add(id(node[part]))
            node = node[part]
            if id(node) not in inner:
                raise ValueError(f"the name {name!r} lies below another leaf's name")
        if last in node:
            raise ValueError(f"the name {name!r} is also the beginning of another leaf's name")
        node[last] = leaf
    return nested


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves, each counted once (global shapes, not per device)."""
    leaves = tree_util.tree_leaves(tree)
    return sum(math.prod(np.shape(leaf)) * _dtype(leaf).itemsize for leaf in leaves)


def _dtype(leaf: Any) -> np.dtype:
    return np.dtype(leaf.dtype) if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
