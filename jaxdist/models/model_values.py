"""Comparison of model configs: the values that two equal models must share.

Weights fit a model if these values are equal. Values that only training reads may
differ. Rotary positions may differ if a run continues with longer sequences, and the
head if a reward model begins with a language model.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxdist.config import schema
from jaxdist.config.annotations import TrainingOnly
from jaxdist.models.rotary import RotaryConfig
from jaxdist.models.transformer_config import TransformerConfig

# Default values of the options that belong to no group.
DEFAULTS = {
    name: value
    for name, value in vars(TransformerConfig()).items()
    if not dataclasses.is_dataclass(value)
}
# Default values of the options that belong to a group, by the group's name.
GROUPS: dict[str, Any] = {
    name: value
    for name, value in vars(TransformerConfig()).items()
    if dataclasses.is_dataclass(value)
}
# Names of values that do not change logits.
TRAINING = frozenset(
    name
    for name, field in schema.schema_of(TransformerConfig).items()
    if field.mark(TrainingOnly)
)
# Names of values that a run may change to continue with longer sequences.
POSITIONS = tuple(name for name in vars(RotaryConfig()) if name.startswith("rope_"))
# Those of the stretch: rope_factor, rope_scaling, ...
STRETCH = tuple(name for name in POSITIONS if name != "rope_theta")


def for_logits(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the values that only training reads, and groups of nothing else."""
    return _for_logits(values, "")


def _for_logits(values: Mapping[str, Any], group: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{group}{name}"
        if path in TRAINING:
            continue
        if not isinstance(value, Mapping):
            kept[name] = value
            continue
        inner = _for_logits(value, f"{path}.")
        if inner or not value:
            kept[name] = inner
    return kept


def differing_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Lists the values that differ, up to rounding, among those that both configs have.

    Values without effect are not compared.

    Args:
      ours: values of one model.
      theirs: values of the other model.

    Returns:
      A line for each difference, such as "model.d_model=64, there 32".
    """
    ours = schema.flatten(ours)
    theirs = schema.flatten(theirs)
    compared = ours.keys() & theirs.keys()
    if _all_sparse(ours) and _all_sparse(theirs):
        compared -= {"d_ff"}
    return [
        f"model.{name}={ours[name]!r}, there {theirs[name]!r}"
        for name in compared
        if not _equal(ours[name], theirs[name])
    ]


def gets_new_head(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Checks whether a model that scores begins with the body of a language model.

    Args:
      ours: values of the model.
      theirs: values of the model that the weights belong to.
    """
    return ours.get("head") == "score" and theirs.get("head", "language") == "language"


def without_changes(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """Drops from `theirs` the values that `ours` may change: rotary positions, the head.

    A base or a factor at its default in `ours` was forgotten, not changed. It stays, so
    that it is compared.
    """
    changeable = set(POSITIONS)
    if gets_new_head(ours, theirs):
        changeable.add("head")
    for name in ("rope_theta", "rope_factor"):
        if ours.get(name) == DEFAULTS[name]:
            changeable.remove(name)
    return {name: value for name, value in theirs.items() if name not in changeable}


def _all_sparse(values: Mapping[str, Any]) -> bool:
    first_dense = values.get("first_dense_layers")
    dense = first_dense or "dense" in values.get("feed_forward_pattern", ())
    return bool(values.get("num_experts")) and not dense


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)
