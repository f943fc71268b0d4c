"""The score of a run's model on held-out data, in the run and after it."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jax.sharding import Sharding

from jaxdist.data import Dataset
from jaxdist.step.evaluation import Evaluation, evaluate
from jaxdist.step.state import State
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import batching
from jaxdist.trainer.run_config import RunConfig


class HeldOut(NamedTuple):
    """How well a checkpoint predicts held-out data."""

    step: int  # updates finished
    loss: float  # nats per target
    tokens: int | float  # targets scored
    perplexity: float  # exp(loss)
    # comparable across tokenizers; None: the text's bytes are unknown
    bits_per_byte: float | None
    # UTF-8 bytes a token stands for, in the held-out text
    bytes_per_token: float | None
    # means by name: the model's own `metrics`, and "aux/NAME" of its loss
    metrics: dict[str, float] = {}
    windows: int | None = None  # sliding ones; None: the set is not cut so
    documents: int | None = None  # that these windows are of


def score_held_out(
    config: RunConfig,
    built: TrainStep,
    state: State,
    dataset: Dataset,
    *,
    shardings: Mapping[str, Sharding] | None = None,
    over: Callable[[Iterable], Iterable] = iter,
) -> Evaluation:
    """Returns the sums of `TrainStep.evaluate` over all held-out batches, divided once.

    Args:
      shardings: of a batch, where they are known; default: `batching.batch_shardings`.
      over: wraps the batches, to tell somebody of each.

    Raises:
      ConfigError: nothing is held out.
    """
    shardings = shardings or batching.batch_shardings(config, built)
    with batching.held_out_loader(config, shardings, dataset) as batches:
        return evaluate(built.evaluate, state, over(batches))


def held_out(
    config: RunConfig,
    built: TrainStep,
    state: State,
    dataset: Dataset,
    watch: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Returns `score_held_out` with what follows from it.

    Args:
      watch: told of every batch: batches begun, batches in all.
    """
    total = dataset.num_validation_batches(config.batch.global_size)

    def over(batches: Iterable) -> Iterable:
        for number, batch in enumerate(batches, 1):
            if watch:
                watch(number, total)
            yield batch

    result = score_held_out(config, built, state, dataset, over=over)
    per_token = dataset.validation_bytes_per_token
    sliding = dataset.validation_windows
    return HeldOut(
        step=int(state.step),
        loss=result.loss,
        tokens=result.tokens,
        perplexity=result.perplexity,
        bits_per_byte=None if per_token is None else result.bits_per_byte(per_token),
        bytes_per_token=per_token,
        metrics=result.metrics,
        windows=sliding.windows if sliding else None,
        documents=sliding.documents if sliding else None,
    )
