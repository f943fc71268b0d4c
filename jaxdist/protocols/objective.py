"""Objectives: the losses that a policy is trained for.

The policy is the model that a run trains. Its objective computes sums (`Loss`) from the
policy's outputs for a batch. It has three parts, so that the head can score in chunks,
a pipeline can split the policy, and gradients can cross devices once a step:

1. `prepare` adds float fields to a batch, computed by frozen modules. It is a separate
   forward program, which runs before the policy's.
2. `token_terms`, a method of the policy, computes values for each target, such as its
   log-probability. An objective may call other methods (`terms_of_policy`).
3. `sample_loss` computes a loss from the terms of one row.

Letters: B samples, S sequence length, k values of a token, D model.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Forms of the methods that compute terms, for messages.
TERM_METHODS = {
    "token_terms": "token_terms(self, x, batch) -> {name: [B, S] or [B, S, k]}",
    "bucket_scores": "bucket_scores(self, x, batch, ids, temperature) -> BucketScores",
    "top_scores": "top_scores(self, x, count, temperature) -> (ids, scores)",
}
# A field [B] of a batch, the same for all rows: number of targets in the whole batch,
# divided by the objective's count. See `TokenObjective.row_losses`.
TARGETS_PER_COUNT = "targets_per_count"
# Prefix of such fields for aux terms with a count of their own: the objective's count in
# the whole batch, divided by that of the term. See `Objective.counts_of_aux`.
COUNT_PER_AUX = "count_per_aux/"
# The same for metrics with a count of their own. See `TokenObjective.metric_counts`.
COUNT_PER_METRIC = "count_per_metric/"
Terms = dict[str, jax.Array]  # name -> float32 [B, S] or [B, S, k]
# A frozen module in `prepare`: computes its terms for a batch (`terms_of_module`).
FrozenModule = Callable[[Batch], Terms]


class Objective(ABC):
    """The base class of objectives.

    Subclasses are frozen dataclasses. So objectives with equal options are equal, and
    models that are trained for them are checked once.

    Attributes:
      sums_over_samples: whether the loss is a sum over samples if the policy's code
        computes such sums (see `jaxdist.protocols.model`). A subclass that overrides
        `batch_loss` or `head_loss` must repeat it.
      counts_targets: whether the count is the sum of the targets' weights. Aux terms of
        blocks (losses of routers) are sums over tokens and need this divisor. A
        subclass with another count must override it.
      term_methods: names of the methods that `terms_of_policy` and `terms_of_module`
        call. The policy and the frozen modules must have them.
    """

    sums_over_samples: ClassVar[bool] = False
    counts_targets: ClassVar[bool] = False
    term_methods: ClassVar[tuple[str, ...]] = ("token_terms",)

    @classmethod
    def adds_up_samples(cls) -> bool:
        """Checks whether a declaration of `sums_over_samples` holds for this class."""
        for owner in cls.__mro__:
            if "sums_over_samples" in vars(owner):
                return bool(vars(owner)["sums_over_samples"])
            if {"batch_loss", "head_loss"} & vars(owner).keys():
                return False
        return False

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the frozen modules that `prepare` calls."""
        return ()

    @property
    def base_module(self) -> str:
        """The name by which `prepare` calls the policy without its adapters; or "".

        It needs no arrays of its own. All trained parameters are 0 there, so each of
        them must belong to an adapter.
        """
        return ""

    @property
    def data_fields(self) -> tuple[str, ...]:
        """The names of float32 fields [B, S] that batches must have, beside the usual."""
        return ()

    @property
    def prepares(self) -> bool:
        """Whether the objective adds fields to batches."""
        return type(self).prepare is not Objective.prepare

    def prepare(self, modules: Mapping[str, FrozenModule], batch: Batch) -> Terms:
        """Computes further fields of a batch. Nothing is differentiated here.

        Args:
          modules: the frozen modules by name.
          batch: fields by name.

        Returns:
          Float fields [B, S] or [B, S, k], with names that the batch does not have.
        """
        return {}

    def terms_of_module(self, module: Any, x: jax.Array, batch: Batch) -> Terms:
        """Computes the terms of a frozen module from its last block's output [B, S, D].

        `prepare` gets them. By default, they are the module's `token_terms`.
        """
        terms: Terms = module.token_terms(x, batch)
        return terms

    def batch_loss(
        self,
        policy: Any,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        """Computes the loss of a whole batch with all layers.

        Args:
          policy: the model.
          batch: fields by name, with those of `prepare`.
          key: random key of the step; None: the model is deterministic.
          transform: wraps the functions of the policy's layers, for rematerialisation.

        Raises:
          ConfigError: blocks return aux terms, but targets cannot be counted.
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
        loss = self.loss_of_output(policy, output.x, batch, key, transform)
        return with_block_sums(loss, output.aux, output.stats)

    def loss_of_output(
        self,
        policy: Any,
        x: jax.Array,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        """Computes the loss from the last block's output, with the head's layers.

        By default it is `head_loss`, which applies no layers. See `batch_loss`.
        """
        return self.head_loss(policy, x, batch)

    def counts_of_aux(self, policy: Any, batch: Batch) -> dict[str, jax.Array]:
        """Counts what aux terms of the loss are divided by, over a whole batch.

        Args:
          policy: the model, perhaps with abstract arrays.
          batch: fields by name.

        Returns:
          A scalar for each term whose count is not the objective's. It depends on the
          fields of the data alone.
        """
        return {}

    def can_count_targets(self, batch: Batch) -> bool:
        """Checks whether sums over tokens can be divided by the count of targets."""
        return self.counts_targets

    @abstractmethod
    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        """Computes the loss from the last block's output [B, S, D]."""

    @abstractmethod
    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        """Yields the reasons why a model cannot be the policy.

        Args:
          policy: the model with abstract arrays.
          staged: whether it has embed, a stack of blocks, and head.
        """


@dataclass(frozen=True)
class NextToken(Objective):
    """The loss of the policy's own `head`, which scores and differentiates in one pass.

    For the transformer it is next-token cross-entropy.
    """

    sums_over_samples: ClassVar[bool] = True
    counts_targets: ClassVar[bool] = True  # the divisor is the count of the head

    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        """Computes the loss with the policy's head."""
        return head_loss(policy, x, batch)

    def loss_of_output(
        self,
        policy: Any,
        x: jax.Array,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        """Computes the loss with the policy's head, and with the head's layers."""
        return head_loss(policy, x, batch, key, transform)

    def counts_of_aux(self, policy: Any, batch: Batch) -> dict[str, jax.Array]:
        """Asks the policy, whose head computes the terms."""
        if not hasattr(policy, "aux_counts"):
            return {}
        counts: dict[str, jax.Array] = policy.aux_counts(batch)
        return counts

    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        """Yields nothing: every staged model has a head."""
        yield from ()


class TokenObjective(Objective):
    """An objective in three parts; subclasses define `sample_loss`, perhaps `prepare`.

    The policy has a method `token_terms(x, batch) -> Terms`, which computes the terms
    of each target from the last block's output. It may have `head_only()`, which lists
    options, such as "model.z_loss=0.1", that only the loss of its `head` reads.
    """

    sums_over_samples: ClassVar[bool] = True

    @abstractmethod
    def sample_loss(self, terms: Terms, sample: Batch) -> Loss:
        """Computes the loss of one sample.

        Sum terms over the sequence before any op that is not linear, because devices
        may split the sequence. The last batch of held-out data may be padded with rows
        whose weights are all 0. Their sum and count must be 0.

        Args:
          terms: the policy's terms, [S] or [S, k] each.
          sample: the row of each field of the batch, prepared fields too.

        Returns:
          A Loss of sums; or a scalar, which counts the sample once. Its `metrics` are
          reported with the loss.
        """

    def terms_of_policy(self, policy: Any, x: jax.Array, batch: Batch) -> Terms:
        """Computes the terms for `sample_loss` from the last block's output [B, S, D].

        By default, they are the policy's `token_terms`.
        """
        terms: Terms = policy.token_terms(x, batch)
        return terms

    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        """Sums the losses of all rows."""
        terms = as_terms(self.terms_of_policy(policy, x, batch), batch)
        losses = self.row_losses(terms, batch)
        total: Loss = jax.tree.map(lambda x: x.sum(0), losses)
        return total

    def row_losses(self, terms: Terms, batch: Batch) -> Loss:
        """Computes the losses of all rows, each [B].

        With the field `TARGETS_PER_COUNT` the rows count targets, and their sums are
        multiplied by it. So the mean of the loss stays the same, and aux terms of
        blocks become means over targets. A field `COUNT_PER_AUX` likewise makes an aux
        term of the objective a mean over the term's own count, and `COUNT_PER_METRIC` a
        metric a mean over its own.
        """
        ratios = {name: x for name, x in batch.items() if _is_ratio(name)}
        samples = {name: x for name, x in batch.items() if name not in ratios}
        losses = jax.vmap(self._as_sums)(terms, samples)
        aux = {
            name: term * ratios.get(COUNT_PER_AUX + name, 1.0)
            for name, term in losses.aux.items()
        }
        metrics = {
            name: x * ratios.get(COUNT_PER_METRIC + name, 1.0)
            for name, x in losses.metrics.items()
        }
        losses = losses._replace(aux=aux, metrics=metrics)
        if TARGETS_PER_COUNT not in batch:
            return losses
        factor = batch[TARGETS_PER_COUNT]
        return losses._replace(
            sum=losses.sum * factor,
            count=batch["weights"].sum(1),
            aux={name: term * factor for name, term in losses.aux.items()},
            metrics={name: x * factor for name, x in losses.metrics.items()},
        )

    def aux_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts what aux terms of `sample_loss` are divided by, over a whole batch.

        See `counts_of_aux`.
        """
        return {}

    def counts_of_aux(self, policy: Any, batch: Batch) -> dict[str, jax.Array]:
        """Counts the terms of `sample_loss`, of which the policy knows nothing."""
        return self.aux_counts(batch)

    def metric_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts what metrics of `sample_loss` are divided by, over a whole batch.

        Returns:
          A scalar for each metric whose count is not the objective's. It depends on the
          fields of the data alone.
        """
        return {}

    def can_count_targets(self, batch: Batch) -> bool:
        """Checks whether the objective counts targets, or the batch has weights."""
        return self.counts_targets or "weights" in batch

    def _as_sums(self, terms: Terms, sample: Batch) -> Loss:
        # Fields of a sample have no batch dim, and a scalar loss counts as one sample.
        batch_of_one = {"sample": jnp.zeros(1)}
        return as_loss(self.sample_loss(terms, sample), batch_of_one)

    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        """Yields missing parts of the policy, and options without effect."""
        name = type(self).__name__
        yield from token_faults(name, type(policy), staged, self.term_methods)
        options = policy.head_only() if hasattr(policy, "head_only") else []
        for option in options:
            yield (
                f"{option} has no effect: it is a term of the loss of the policy's head, "
                f"and {name} computes another loss; leave it out"
            )


@dataclass(frozen=True)
class WholeModel(Objective):
    """The loss that a user's model computes itself, `loss(batch, key)`."""

    sums_over_samples: ClassVar[bool] = True

    def batch_loss(
        self,
        policy: Any,
        batch: Batch,
        key: jax.Array | None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        """Calls the model's `loss`."""
        return as_loss(policy.loss(batch, key), batch)

    def head_loss(self, policy: Any, x: jax.Array, batch: Batch) -> Loss:
        """Raises a TypeError: the model has no head."""
        raise TypeError(f"{type(policy).__name__} has no head of its own")

    def faults(self, policy: Any, staged: bool) -> Iterator[str]:
        """Yields a message if the model has no method `loss` of the right form."""
        yield from _loss_faults(type(policy))


def token_faults(
    user: str, model_class: type, staged: bool, methods: Sequence[str]
) -> Iterator[str]:
    """Yields the reasons why a model cannot compute terms for each target.

    Args:
      user: the objective or module that needs the terms, for the messages.
      model_class: class of the model.
      staged: whether the model has embed, a stack of blocks, and head.
      methods: methods that compute the terms (`Objective.term_methods`).
    """
    name = model_class.__name__
    if not staged:
        yield f"{user}: {name} needs embed, a stack of blocks, and head"
        return
    for method in methods:
        if callable(getattr(model_class, method, None)):
            continue
        required = TERM_METHODS.get(method, f"{method}, which the objective calls")
        yield f"{user}: {name} has no method `{method}`; required: {required}"


def module_terms(objective: Objective, module: Any, batch: Batch) -> Terms:
    """Computes the terms of a frozen module for a batch."""
    x = staged_output(module, batch, None).x
    return as_terms(objective.terms_of_module(module, x, batch), batch)


def as_terms(terms: Mapping[str, Any], batch: Batch) -> Terms:
    """Casts token terms to float32.

    Raises:
      ConfigError: a term is not [B, S] or [B, S, k], or not a float.
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
    """Lists the different shapes of a batch's fields [B, S]; S may differ.

    Raises:
      ConfigError: no field is [B, S].
    """
    shapes = dict.fromkeys(x.shape for x in batch.values() if x.ndim == 2)
    if not shapes:
        raise ConfigError("the batch has no field [B, S], which terms of tokens need")
    return [*shapes]


def _is_ratio(name: str) -> bool:
    """Checks whether a field of a batch is a ratio of counts, not of a sample."""
    prefixes = (COUNT_PER_AUX, COUNT_PER_METRIC)
    return name == TARGETS_PER_COUNT or name.startswith(prefixes)


def _loss_faults(model_class: type) -> Iterator[str]:
    """Yields a message if a model has no method `loss` of the right form."""
    name = model_class.__name__
    loss: Any = getattr(model_class, "loss", None)
    if not callable(loss):
        yield f"{name} has no method `loss`; required: {REQUIRED}"
        return
    try:
        inspect.signature(loss).bind("self", "batch", "key")
    except TypeError as error:
        yield f"{name}.loss{inspect.signature(loss)}: {error}; required: {REQUIRED}"
