"""Names for the leaves of a pytree ("blocks/mlp/w"), and sizes summed over it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import tree_util

SEPARATOR = "/"


def key_name(key: object) -> str:
    """Names one key of a pytree path: a dict key, a field name or an index.

    Raises:
      ValueError: the name is empty or holds the separator, so that names of leaves
        would be ambiguous.
    """
    name = tree_util.keystr((key,), simple=True)
    if not name or SEPARATOR in name:
        raise ValueError(
            f"the tree key {name!r} cannot be part of a name: "
            f"keys must be non-empty and without {SEPARATOR!r}; "
            "rename the attribute or dict key"
        )
    return name


def join(path: Sequence[object]) -> str:
    """Names the leaf at a pytree path, for example "blocks/mlp/w"."""
    return SEPARATOR.join(key_name(key) for key in path)


def flatten_names(tree: Any) -> dict[str, Any]:
    """Makes {name: leaf} in flatten order. None and empty containers hold no leaves.

    Dict keys, NamedTuple fields and sequence indexes become the parts of a name.

    Raises:
      ValueError: a key holds the separator, or the tree is a single leaf without a
        name.
    """
    leaves, _ = tree_util.tree_flatten_with_path(tree)
    if len(leaves) == 1 and not leaves[0][0]:
        raise ValueError(
            f"got a single {type(tree).__name__}, required a tree whose leaves have names"
        )
    return {join(path): leaf for path, leaf in leaves}


def unflatten_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """Makes nested dicts of {name: leaf}. Indexes become keys of text.

    Raises:
      ValueError: one name is the beginning of another ("a" and "a/b").
    """
    nested: dict[str, Any] = {}
    for name, leaf in names.items():
        *parents, last = name.split(SEPARATOR)
        node = nested
        for depth, parent in enumerate(parents, 1):
            if SEPARATOR.join(parents[:depth]) in names:
                raise ValueError(f"the name {name!r} is below another leaf's name")
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


def tree_bytes(tree: Any) -> int:
    """Adds up the bytes of all leaves. Shapes are global: replicas are not counted."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in tree_util.tree_leaves(tree))
