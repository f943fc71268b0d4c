"""Names of leaves and sizes."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxdist.config import trees


class Pair(NamedTuple):
    left: Any
    right: Any


TREE = {
    "blocks": {"mlp": {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float16)}},
    "pair": Pair(left=np.int32(4), right=(np.arange(2), None)),
    "layers": {0: np.ones(1, np.int8), 10: np.ones(1, np.int8), 2: np.ones(1, np.int8)},
    "empty": {},
}
NAMES = [
    "blocks/mlp/b",
    "blocks/mlp/w",
    "layers/0",
    "layers/2",
    "layers/10",
    "pair/left",
    "pair/right/0",
]


def test_names_follow_flatten_order():
    assert list(trees.flatten_names(TREE)) == NAMES


def test_names_hold_the_leaves_themselves():
    names = trees.flatten_names(TREE)
    assert names["blocks/mlp/w"] is TREE["blocks"]["mlp"]["w"]
    assert list(map(id, names.values())) == list(map(id, jax.tree.leaves(TREE)))


@pytest.mark.parametrize("tree", [{}, None, {"a": None, "b": ()}])
def test_trees_without_leaves_have_no_names(tree):
    assert trees.flatten_names(tree) == {}


@pytest.mark.parametrize("key", ["a/b", ""])
def test_ambiguous_keys_are_refused(key):
    with pytest.raises(ValueError, match=f"tree key {key!r}"):
        trees.flatten_names({key: 1})


def test_a_bare_leaf_has_no_name():
    with pytest.raises(ValueError, match="got a single int, required a tree"):
        trees.flatten_names(3)


def test_unflatten_makes_nested_dicts():
    nested = trees.unflatten_names(trees.flatten_names(TREE))
    assert nested["blocks"]["mlp"]["w"] is TREE["blocks"]["mlp"]["w"]
    assert nested["pair"]["right"]["0"] is TREE["pair"].right[0]
    assert list(nested["layers"]) == ["0", "2", "10"]
    assert trees.flatten_names(nested).keys() == set(NAMES)


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c")])
def test_a_name_below_another_is_refused(names):
    with pytest.raises(ValueError, match="another leaf's name"):
        trees.unflatten_names(dict.fromkeys(names, 1))


def test_unflatten_does_not_look_into_leaves():
    with pytest.raises(ValueError, match="below another"):
        trees.unflatten_names({"a": {"leaf": 1}, "a/b": 2})


def test_sizes_count_each_leaf_once():
    assert trees.tree_bytes(TREE) == 6 * 4 + 3 * 2 + 3 + 4 + 2 * 8
    abstract = jax.ShapeDtypeStruct((3, 5), "bfloat16")
    assert trees.tree_bytes({"a": abstract}) == 30
    assert trees.tree_bytes([]) == 0
