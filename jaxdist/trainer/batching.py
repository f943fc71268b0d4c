"""The batches of a run: its dataset, and loaders that place batches on devices."""

from collections.abc import Callable, Mapping
from pathlib import Path

from jax.sharding import Sharding

from jaxdist.data.balance import Balancer, StepGrid
from jaxdist.data.dataset import Dataset
from jaxdist.data.loader import Loader
from jaxdist.data.opening import open_dataset
from jaxdist.ops import context_attention
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig


def open_data(
    config: RunConfig,
    folder: Path,
    log: Callable[[str], None],
    *,
    stride: int | None = None,
    summary: bool = True,
) -> Dataset:
    """Opens the dataset of a run.

    Args:
      config: the run's config.
      folder: the workdir.
      log: receives lines about the progress of tokenization.
      stride: targets between sliding windows; see `open_dataset`.
      summary: whether to log the size of the dataset.
    """
    return open_dataset(
        config.data,
        sequence_length=config.batch.sequence_length,
        vocab_size=config.vocab_size,
        seed=config.seed,
        folder=folder,
        log=log,
        stride=stride,
        summary=summary,
        scored=config.objective.reads_scores,
    )


def batch_shardings(config: RunConfig, built: TrainStep) -> Mapping[str, Sharding]:
    """Chooses the sharding of each entry of a batch. This may read files of the data."""
    return built.batch_shardings(compose.batch_shapes(config))


def train_loader(
    composition: Composition,
    shardings: Mapping[str, Sharding],
    dataset: Dataset,
    start: int,
) -> Loader:
    """Makes the loader of training batches, which starts at step `start`.

    It reads no files of the data.
    """
    config = composition.config
    return Loader(
        dataset,
        global_size=config.batch.global_size,
        shardings=shardings,
        start=start,
        prefetch=config.data.prefetch,
        balancer=balancer(composition, dataset),
    )


def held_out_loader(
    config: RunConfig, shardings: Mapping[str, Sharding], dataset: Dataset
) -> Loader:
    """Makes the loader of held-out batches. It reads no files of the data."""
    return Loader(
        dataset,
        global_size=config.batch.global_size,
        shardings=shardings,
        split="validation",
        prefetch=config.data.prefetch,
    )


def balancer(composition: Composition, dataset: Dataset) -> Balancer:
    """Makes the balancer of a run, which measures how even the work of its devices is.

    With `data.balance=attention` it also permutes the rows of each batch.
    """
    config = composition.config
    batch = config.batch
    heads = getattr(config.model_config, "num_heads", None)
    # Attention that is split by heads works equally on all devices of `context`, so
    # these count as one.
    context = 1
    zigzag = False
    if heads and config.data.is_text:
        form = context_attention.form_under(
            composition.rules, (1, batch.sequence_length, heads, 1)
        )
        if form.parts > 1:
            context = form.context
        zigzag = form.name == "ring"
    grid = StepGrid(
        accumulation=batch.accumulation,
        microbatches=composition.microbatches,
        batch_shards=composition.shape.batch_shards,
        context=context,
        zigzag=zigzag,
    )
    balanced = config.data.balance == "attention"
    return Balancer(dataset, batch.global_size, grid, balanced=balanced)
