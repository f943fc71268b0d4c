"""Values of a model's config: which of them two models must share to compute the same.

Weights fit a model if these values are equal. What only training reads may differ, and
so may rotary positions where a run continues with longer sequences.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxdist.config import schema
from jaxdist.config.annotations import TrainingOnly
from jaxdist.models.rotary import RotaryConfig
from jaxdist.models.transformer_config import TransformerConfig

# Options that stand in no group.
DEFAULTS = {
    name: value
    for name, value in vars(TransformerConfig()).items()
    if not dataclasses.is_dataclass(value)
}
# Values that change no logits.
TRAINING = frozenset(
    name
    for name, field in schema.schema_of(TransformerConfig).items()
    if field.mark(TrainingOnly)
)
# Values that a run may change to continue with longer sequences.
POSITIONS = tuple(name for name in vars(RotaryConfig()) if name.startswith("rope_"))
# rope_factor, rope_scaling, ...
STRETCH = tuple(name for name in POSITIONS if name != "rope_theta")


def for_logits(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the values that only training reads."""
    return {name: value for name, value in values.items() if name not in TRAINING}


def differing_values(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Lists the values that both have and that differ, up to rounding.

    Values without effect are not compared.

    Returns:
      A line for each, "model.d_model=64, there 32".
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


def without_stretch(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """Drops from theirs the rotary positions that ours may have changed.

    A base or a factor that ours leaves at the default was forgotten, not changed: it
    stays, and is compared.
    """
    forgotten = {
        name
        for name in ("rope_theta", "rope_factor")
        if ours.get(name) == DEFAULTS[name]
    }
    return {
        name: value
        for name, value in theirs.items()
        if name not in POSITIONS or name in forgotten
    }


def _all_sparse(values: Mapping[str, Any]) -> bool:
    first_dense = values.get("first_dense_layers")
    dense = first_dense or "dense" in values.get("feed_forward_pattern", ())
    return bool(values.get("num_experts")) and not dense


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b
