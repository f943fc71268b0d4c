"""The batches of a run: its dataset, and loaders that place batches on devices."""

from collections.abc import Callable, Mapping
from pathlib import Path

from jax.sharding import Sharding

from jaxdist.data import Dataset, open_dataset
from jaxdist.data.balance import Balancer, StepGrid
from jaxdist.data.loader import Loader
from jaxdist.ops import context_attention
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose
from jaxdist.trainer.compose import Composition
from jaxdist.trainer.run_config import RunConfig


def open_data(
    run: RunConfig,
    folder: Path,
    log: Callable[[str], None],
    *,
    stride: int | None = None,
) -> Dataset:
    """Opens the dataset of the run in `folder`.

    Args:
      log: takes a line per event of making its tokens.
      stride: see `open_dataset`.
    """
    return open_dataset(
        run.data,
        sequence_length=run.batch.sequence_length,
        vocab_size=run.vocab_size,
        seed=run.seed,
        folder=folder,
        log=log,
        stride=stride,
    )


def batch_shardings(run: RunConfig, built: TrainStep) -> Mapping[str, Sharding]:
    """Returns the sharding of each entry of the run's batches; may read its files."""
    return built.batch_shardings(compose.batch_shapes(run))


def train_loader(
    composition: Composition,
    shardings: Mapping[str, Sharding],
    dataset: Dataset,
    start: int,
) -> Loader:
    """Loads the global training batches onto the devices, from step `start` on.

    Reads no file anew.
    """
    run = composition.config
    return Loader(
        dataset,
        global_size=run.batch.global_size,
        shardings=shardings,
        start=start,
        prefetch=run.data.prefetch,
        balancer=balancer(composition, dataset),
    )


def held_out_loader(
    run: RunConfig, shardings: Mapping[str, Sharding], dataset: Dataset
) -> Loader:
    """Loads the held-out batches onto the devices; reads no file anew."""
    return Loader(
        dataset,
        global_size=run.batch.global_size,
        shardings=shardings,
        split="validation",
        prefetch=run.data.prefetch,
    )


def balancer(composition: Composition, dataset: Dataset) -> Balancer:
    """Makes what places the rows of a run's batches, and tells how even their attention
    work is.
    """
    run = composition.config
    batch = run.batch
    heads = getattr(run.model_config, "num_heads", None)
    # Attention by heads has equal work in every row on each device: context stays 1.
    context = 1
    zigzag = False
    if heads and run.data.is_text:
        form = context_attention.form_under(
            composition.rules, (1, batch.sequence_length, heads, 1)
        )
        if form.parts > 1:
            context = form.context
        zigzag = form.name == "ring"
    grid = StepGrid(
        batch.accumulation,
        composition.microbatches,
        composition.shape.batch_shards,
        context,
        zigzag,
    )
    balanced = run.data.balance == "attention"
    return Balancer(dataset, batch.global_size, grid, balanced=balanced)
