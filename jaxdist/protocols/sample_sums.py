"""Checks of `sums_over_samples`: whether a model's loss is a sum over samples.

See `model` for the declaration.
"""

from collections.abc import Sequence

from flax import nnx

# Attributes that change the loss, even if no base class has them.
_OF_THE_LOSS = ("__init__", "__call__", "loss", "embed", "prepare", "head")
# Attributes that a subclass may override without changing the loss.
_BESIDE_THE_LOSS = ("Config", "casts_itself", "metrics", "stats_metrics", "update")


def who_sums_over_samples(model_class: type) -> type | None:
    """Finds the class whose declaration holds for a model: its loss sums over samples.

    The declaration of a class covers its own code only. A subclass may override a
    method or another attribute, such as a helper of `head` or the class of its layers.
    This can change the loss, so the subclass must repeat the declaration.

    Returns:
      The class; None if no declaration holds.
    """
    owners = model_class.__mro__
    for number, owner in enumerate(owners):
        if "sums_over_samples" in vars(owner):
            return owner if vars(owner)["sums_over_samples"] else None
        bases = owners[number + 1 :]
        if any(_may_change_loss(name, bases) for name in vars(owner)):
            return None
    return None


def sums_over_samples(model: nnx.Module) -> bool:
    """Checks whether a model's loss is declared to be a sum over samples.

    The declaration of a class of jaxdist holds only if all layers are from jaxdist,
    too. Other layers may mix samples, so a subclass must repeat the declaration.
    """
    owner = who_sums_over_samples(type(model))
    if owner is None:
        return False
    if not _is_from_jaxdist(owner):
        return True
    # The model's own class may be from elsewhere: its overrides are checked above.
    parts = [part for _, part in nnx.iter_modules(model) if part is not model]
    return all(_is_from_jaxdist(type(part)) for part in parts)


def _is_from_jaxdist(part: type) -> bool:
    return part.__module__.startswith("jaxdist.")


def _may_change_loss(name: str, bases: Sequence[type]) -> bool:
    """Checks whether a class with this attribute may change the loss of its bases."""
    if name in _OF_THE_LOSS:
        return True
    if name in _BESIDE_THE_LOSS:
        return False
    if name.startswith("__") or hasattr(nnx.Module, name):
        return False
    return any(name in vars(base) for base in bases)
