"""Whether a model's loss is a sum over samples, as its class says (`sums_over_samples`,
see `model`).
"""

from collections.abc import Sequence

from flax import nnx

# What makes a loss even where a class has it first, and what a subclass may replace
# without changing it.
_OF_THE_LOSS = ("__init__", "__call__", "loss", "embed", "prepare", "head")
_BESIDE_THE_LOSS = ("Config", "casts_itself", "metrics", "stats_metrics", "update")


def who_sums_over_samples(model_class: type) -> type | None:
    """Returns the class that says of a model that its loss is a sum over samples; None
    if none does.

    The word of a class counts for what it is made of itself: a subclass that replaces a
    method or another attribute, a helper of `head` or the class of its layers, may make
    another loss, so it repeats the word.
    """
    owners = model_class.__mro__
    for place, owner in enumerate(owners):
        if "sums_over_samples" in vars(owner):
            return owner if vars(owner)["sums_over_samples"] else None
        if any(_may_change_loss(name, owners[place + 1 :]) for name in vars(owner)):
            return None
    return None


def sums_over_samples(model: nnx.Module) -> bool:
    """Checks whether the loss of a model is a sum over samples, as a class of it says.

    The word of one of ours counts for models of our layers: with others in their place,
    which may mix samples, a subclass repeats it.
    """
    owner = who_sums_over_samples(type(model))
    if owner is None or not _is_ours(owner):
        return owner is not None
    # A subclass of ours may be anybody's: what it replaces was looked at.
    return all(x is model or _is_ours(type(x)) for _, x in nnx.iter_modules(model))


def _is_ours(part: type) -> bool:
    return part.__module__.startswith("jaxdist.")


def _may_change_loss(name: str, bases: Sequence[type]) -> bool:
    """Checks whether a class that has an attribute of its own may have another loss
    than its bases.
    """
    if name in _OF_THE_LOSS or name in _BESIDE_THE_LOSS:
        return name in _OF_THE_LOSS
    if name.startswith("__") or hasattr(nnx.Module, name):
        return False
    return any(name in vars(base) for base in bases)
