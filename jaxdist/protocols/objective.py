"""What a policy is trained for.

The policy is the model that a run trains. Its objective turns what the policy computes
for a batch into sums (`Loss`). It has three parts, so that the head can score in
chunks, a pipeline can cut up the policy, and gradients can cross devices once a step:

1. `prepare` adds float fields to a batch: what frozen modules say of its tokens. It is
   a forward program of its own, which runs before the policy's.
2. `token_terms`, a method of the policy, gives values for each target: its
   log-probability, for example.
3. `sample_loss` makes a loss of the terms of one row.

Letters: B samples, S sequence length, k values of a token, D model.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.protocols.model import (
    Batch,
    Loss,
    Recompute,
    Transform,
    as_loss,
    head_loss,
    staged_output,
    unchanged,
    with_block_sums,
)

REQUIRED = (
    "loss(self, batch, key) -> a scalar mean, (sum, count), or (sum, count, aux, stats)"
)
# A field [B] of a batch, the same for all rows: targets for each unit of the objective's
# count in the whole batch. See `TokenObjective.row_losses`.
TARGETS_PER_COUNT = "targets_per_count"
Terms = dict[str, jax.Array]  # float32 [B, S] or [B, S, k] by name
# A frozen module as `prepare` sees it: gives its `token_terms` for a batch.
FrozenModule = Callable[[Batch], Terms]


class Objective(ABC):
    """The base of all objectives.

    Subclasses are frozen dataclasses: objectives of equal options are equal, and models
    trained for them are checked once.

    Attributes:
      modules: names of the frozen modules that `prepare` calls.
      sums_over_samples: whether the loss is a sum of terms of one sample each, if that
        of the policy's own code is (see `jaxdist.protocols.model`). A subclass that
        replaces how the loss of a batch is made says it again.
      counts_targets: whether the count is the sum of the targets' weights, by which aux
        terms of blocks (losses of routers) are divided: they are sums over tokens. A
        subclass that counts otherwise says it again.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    sums_over_samples: ClassVar[bool] = False
    counts_targets: ClassVar[bool] = False

    @classmethod
    def adds_up_samples(cls) -> bool:
        """Checks whether a class says `sums_over_samples` of the code that it has."""
        for owner in cls.__mro__:
            if "sums_over_samples" in vars(owner):
                return bool(vars(owner)["sums_over_samples"])
            if {"batch_loss", "head_loss"} & vars(owner).keys():
                return False
        return False

    @property
    def prepares(self) -> bool:
        """Whether batches get further fields."""
        return type(self).prepare is not Objective.prepare

    def prepare(self, modules: Mapping[str, FrozenModule], batch: Batch) -> Terms:
        """Computes further fields of a batch. Nothing is differentiated here.

        Args:
          modules: the frozen modules by name.

        Returns:
          float fields [B, S] or [B, S, k], by names that the batch does not have.
        """
        return {}

    def batch_loss(
        self,
        policy: Any,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        """Computes the loss of a whole batch with all layers.

        Args:
          key: the step's; None: deterministic.
          transform: wraps the policy's blocks, for rematerialisation.

        Raises:
          ConfigError: blocks return aux terms, and targets cannot be counted.
        """
        output = staged_output(policy, batch, key, transform)
        if output.aux and not self.can_count_targets(batch):
            name = type(self).__name__
            raise ConfigError(
                f"blocks of {type(policy).__name__} return aux terms ("
                f"{', '.join(sorted(output.aux))}): {name} divides them by its count, "
                f"but sums over tokens need the count of targets; turn these terms "
                f"off, or set counts_targets = True in {name} if its count is "
                f"the sum of `weights`"
            )
        loss = self.head_loss(policy, output.x, batch)
        return with_block_sums(loss, output.aux, output.stats)

    def can_count_targets(self, batch: Batch) -> bool:
        """Checks whether sums over tokens can be divided by the count of targets."""
        return self.counts_targets

    @abstractmethod
    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        """Computes the loss from the last block's output [B, S, D]."""

    @abstractmethod
    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        """Yields why a model cannot be the policy.

        Args:
          policy: the model with abstract arrays.
          staged: it has embed, a stack of blocks, and head.
        """


@dataclass(frozen=True)
class NextToken(Objective):
    """The loss of the policy's own `head`, which scores and differentiates at once.

    For the transformer that is next-token cross-entropy.
    """

    sums_over_samples: ClassVar[bool] = True
    counts_targets: ClassVar[bool] = True  # or what the model's head counts with them

    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        return head_loss(policy, x, batch)

    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        yield from ()


class TokenObjective(Objective):
    """An objective in three parts. Subclasses write `sample_loss`, and maybe `prepare`.

    The policy has a method `token_terms(x, batch) -> Terms`: what its head gives for
    each target, from the last block's output. It may have `head_only()`, options of it
    such as "model.z_loss=0.1" that only the loss of its `head` reads.
    """

    sums_over_samples: ClassVar[bool] = True

    @abstractmethod
    def sample_loss(self, terms: Terms, sample: Batch) -> Loss:
        """Computes the loss of one sample.

        Sum terms over the sequence before anything that is not linear: devices may
        share out the sequence. Where held-out rows are no whole batch, the last is
        filled up with rows whose weights are all 0: their sum and count must be 0.

        Args:
          terms: of the policy, each [S] or [S, k].
          sample: the row of each field of the batch, prepared ones too.

        Returns:
          A Loss of sums; or a scalar, which counts the sample once.
        """

    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        terms = as_terms(policy.token_terms(x, batch), batch)
        losses = self.row_losses(terms, batch)
        return jax.tree.map(lambda each: each.sum(0), losses)

    def row_losses(self, terms: Terms, batch: Batch) -> Loss:
        """Computes the losses of all rows, each [B].

        With the field `TARGETS_PER_COUNT` they count targets, and their sums are larger
        by as much: the mean is the same, and aux terms of blocks are means over targets.
        """
        sample = {name: x for name, x in batch.items() if name != TARGETS_PER_COUNT}
        losses = jax.vmap(self._as_sums)(terms, sample)
        if TARGETS_PER_COUNT not in batch:
            return losses
        factor = batch[TARGETS_PER_COUNT]
        return losses._replace(
            sum=losses.sum * factor,
            count=batch["weights"].sum(1),
            aux={name: own * factor for name, own in losses.aux.items()},
        )

    def can_count_targets(self, batch: Batch) -> bool:
        return self.counts_targets or "weights" in batch

    def _as_sums(self, terms: Terms, sample: Batch) -> Loss:
        # Fields of a sample have no dim of samples: a scalar loss is that of one.
        one_sample = {"sample": jnp.zeros(1)}
        return as_loss(self.sample_loss(terms, sample), one_sample)

    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        name = type(self).__name__
        yield from token_faults(name, type(policy), staged)
        options = policy.head_only() if hasattr(policy, "head_only") else []
        for option in options:
            yield (
                f"{option} has no effect: it is a term of the loss of the policy's head, "
                f"and {name} computes another loss; leave it out"
            )


@dataclass(frozen=True)
class WholeModel(Objective):
    """The loss that a model of a user computes by itself, `loss(batch, key)`."""

    sums_over_samples: ClassVar[bool] = True

    def batch_loss(
        self,
        policy: Any,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        return as_loss(policy.loss(batch, key), batch)

    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        raise TypeError(f"{type(policy).__name__} has no head of its own")

    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        yield from _loss_faults(type(policy))


def token_faults(user: str, model_class: type, staged: bool) -> Iterator[str]:
    """Yields why a model cannot give values for each target.

    Args:
      user: who asks for them.
    """
    name = model_class.__name__
    if not staged:
        yield f"{user}: {name} needs embed, a stack of blocks, and head"
    elif not callable(getattr(model_class, "token_terms", None)):
        yield (
            f"{user}: {name} has no method `token_terms`; required: "
            f"token_terms(self, x, batch) -> {{name: [B, S] or [B, S, k]}}"
        )


def module_terms(module: Any, batch: Batch) -> Terms:
    """Computes what the head of a frozen module gives for each target of a batch."""
    x = staged_output(module, batch, None).x
    return as_terms(module.token_terms(x, batch), batch)


def as_terms(terms: Mapping[str, Any], batch: Batch) -> Terms:
    """Returns terms as float32.

    Raises:
      ConfigError: one is not [B, S] or [B, S, k], or no float.
    """
    known = token_dims(batch)
    allowed = [f"{[*dims]} or {[*dims, 'k']}" for dims in known]
    required = f"required float {' or '.join(allowed)}"
    faults = [
        f"{name} {x.dtype}{list(x.shape)}: {required}"
        for name, x in terms.items()
        if x.shape[:2] not in known
        or x.ndim > 3
        or not jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if faults:
        raise ConfigError(faults)
    return {name: x.astype(jnp.float32) for name, x in terms.items()}


def token_dims(batch: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Lists the dims of a batch's fields [B, S], each once: there may be several S.

    Raises:
      ConfigError: no field is [B, S].
    """
    found = dict.fromkeys(x.shape for x in batch.values() if x.ndim == 2)
    if not found:
        raise ConfigError("the batch has no field [B, S], which terms of tokens need")
    return [*found]


def _loss_faults(model_class: type) -> Iterator[str]:
    name = model_class.__name__
    loss: Any = getattr(model_class, "loss", None)
    if not callable(loss):
        yield f"{name} has no method `loss`; required: {REQUIRED}"
        return
    try:
        inspect.signature(loss).bind("self", "batch", "key")
    except TypeError as error:
        yield f"{name}.loss{inspect.signature(loss)}: {error}; required: {REQUIRED}"
