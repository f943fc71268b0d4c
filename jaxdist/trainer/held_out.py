"""The evaluation of a run's model on held-out data, in the run and after it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from jax.sharding import Sharding

from jaxdist.config import ConfigError
from jaxdist.data.config import parts_of
from jaxdist.data.dataset import Dataset
from jaxdist.protocols.model import Batch
from jaxdist.step.evaluation import Evaluation, evaluate
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import batching, compose
from jaxdist.trainer.run_config import AUTO, RunConfig

_AUTO_EVALUATIONS = 10  # evaluations of a run with train.eval_every=auto
_AUTO_STEPS_PER_BATCH = 200  # steps of the run for each held-out batch of an evaluation


class HeldOut(NamedTuple):
    """The scores of a checkpoint on held-out data."""

    step: int  # number of updates
    loss: float  # nats per target; mean over pairs if the run learns from pairs
    tokens: int | float  # sum of the targets' weights; number of pairs of such a run
    perplexity: float | None  # exp(loss); None for a loss of pairs
    # loss in bits per byte of text, comparable across tokenizers; None = unknown
    bits_per_byte: float | None
    # UTF-8 bytes of the held-out text per token; None = unknown
    bytes_per_token: float | None
    # means by name: the model's `metrics`, and "aux/NAME" of its loss
    metrics: dict[str, float] = {}
    # number of sliding windows; None = the data is not cut into sliding windows
    windows: int | None = None
    documents: int | None = None  # number of documents in these windows


def evaluation_interval(config: RunConfig, dataset: Dataset) -> int:
    """Computes the steps between the evaluations of a run; 0 = it makes none.

    Raises:
      ConfigError: the config requires evaluations, and no data is held out.
    """
    train = config.train
    if train.eval_every == 0:
        return 0
    is_auto = train.eval_every == AUTO
    required = not is_auto or config.checkpoint.keep_best or train.patience
    try:
        dataset.num_validation_batches(config.batch.global_size)
    except ConfigError:
        if required:
            raise
        return 0
    if train.eval_every == AUTO:
        return -(-train.steps // _AUTO_EVALUATIONS)
    return train.eval_every


def evaluation_lines(config: RunConfig, dataset: Dataset) -> list[str]:
    """Describes the evaluations of train.eval_every=auto; [] for another value."""
    if config.train.eval_every != AUTO:
        return []
    every = evaluation_interval(config, dataset)
    if every:
        targets = dataset.num_validation_tokens
        return [
            f"evaluation: every {every} steps, on {targets:,} held-out targets "
            f"(train.eval_every=auto)"
        ]
    try:
        dataset.num_validation_batches(config.batch.global_size)
    except ConfigError as error:
        return [f"no evaluation: {error}"]
    return []


def with_auto_limit(config: RunConfig) -> RunConfig:
    """Limits the held-out targets of a run with train.eval_every=auto.

    Ten evaluations of so many targets take about 2 % of the time of all steps, because a
    forward pass is a third of a step; a run of few steps scores one batch each time. A
    data.validation_tokens that is set stays. Where evaluations are compared (keep_best,
    patience), the targets must not depend on train.steps, which may be raised. Pairs
    are all scored: a run may have computed something for each of them before training.
    """
    if config.objective.has_pairs:
        return config
    if config.train.eval_every != AUTO or config.data.validation_tokens:
        return config
    if config.checkpoint.keep_best or config.train.patience:
        return config
    batches = max(1, config.train.steps // _AUTO_STEPS_PER_BATCH)
    targets = compose.targets_per_sample(config) * config.batch.global_size
    _, sources = parts_of(config.data)
    limit = batches * -(-targets // len(sources))
    return compose.with_overrides(config, {"data.validation_tokens": limit})


def score_held_out(
    config: RunConfig,
    built: TrainStep,
    state: State,
    dataset: Dataset,
    *,
    shardings: Mapping[str, Sharding] | None = None,
    on_batch: Callable[[int], None] = lambda number: None,
) -> Evaluation:
    """Evaluates a state on all held-out batches.

    Args:
      config: the run's config.
      built: the run's step.
      state: the state to evaluate.
      dataset: the run's data.
      shardings: shardings of a batch; default: those of `batching.batch_shardings`.
      on_batch: called as each batch starts, with its number from 1.

    Raises:
      ConfigError: no data is held out.
    """

    def reported(batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches, 1):
            on_batch(number)
            yield batch

    shardings = shardings or batching.batch_shardings(config, built)
    with batching.held_out_loader(config, shardings, dataset) as batches:
        return evaluate(built.evaluate, state, reported(batches))


def held_out(
    config: RunConfig,
    built: TrainStep,
    state: State,
    dataset: Dataset,
    watch: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Evaluates a state on all held-out data, and derives further scores.

    Args:
      config: the run's config.
      built: the run's step.
      state: the state to evaluate.
      dataset: the run's data.
      watch: called as each batch starts, with its number (from 1) and the number of
        batches.
    """
    total = dataset.num_validation_batches(config.batch.global_size)

    def on_batch(number: int) -> None:
        if watch:
            watch(number, total)

    result = score_held_out(config, built, state, dataset, on_batch=on_batch)
    per_token = dataset.validation_bytes_per_token
    sliding = dataset.validation_windows
    return HeldOut(
        step=int(state.step),
        loss=result.loss,
        tokens=result.tokens,
        perplexity=None if config.objective.has_pairs else result.perplexity,
        bits_per_byte=None if per_token is None else result.bits_per_byte(per_token),
        bytes_per_token=per_token,
        metrics=result.metrics,
        windows=sliding.windows if sliding else None,
        documents=sliding.documents if sliding else None,
    )
