"""The batches of a run: its data, their shapes, how they lie on devices, loaders."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from jaxdist.data import Dataset, open_dataset, sample_shapes
from jaxdist.data.balance import Balancer, StepGrid
from jaxdist.data.loader import Loader
from jaxdist.ops import context_attention
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.sharding import Rules
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer.run_config import RunConfig


def open_data(
    run: RunConfig,
    folder: Path,
    log: Callable[[str], None],
    *,
    stride: int | None = None,
) -> Dataset:
    """Returns the dataset of the run in `folder`; `log` takes a line per event of
    making its tokens.

    Args:
      stride: see `open_dataset`.
    """
    length, vocab_size, seed = run.batch.sequence_length, run.vocab_size, run.seed
    options: dict[str, Any] = {
        "sequence_length": length,
        "vocab_size": vocab_size,
        "seed": seed,
    }
    return open_dataset(run.data, **options, folder=folder, log=log, stride=stride)


def batch_shardings(run: RunConfig, built: TrainStep) -> Mapping[str, Sharding]:
    """Returns the sharding of each entry of the run's batches; reads the data's files,
    as `batch_shapes`.
    """
    return built.batch_shardings(batch_shapes(run, run.batch.global_size))


def train_loader(
    run: RunConfig,
    rules: Rules,
    shardings: Mapping[str, Sharding],
    dataset: Dataset,
    start: int,
) -> Loader:
    """Returns the global training batches on the devices, from step `start` on; reads
    no file anew.
    """
    size, prefetch, even = (
        run.batch.global_size,
        run.data.prefetch,
        balancer(run, rules, dataset),
    )
    return Loader(
        dataset,
        global_size=size,
        shardings=shardings,
        start=start,
        prefetch=prefetch,
        balancer=even,
    )


def held_out_loader(
    run: RunConfig, shardings: Mapping[str, Sharding], dataset: Dataset
) -> Loader:
    """Returns the held-out batches on the devices; reads no file anew."""
    size, prefetch = run.batch.global_size, run.data.prefetch
    return Loader(
        dataset,
        global_size=size,
        shardings=shardings,
        split="validation",
        prefetch=prefetch,
    )


def balancer(run: RunConfig, rules: Rules, dataset: Dataset) -> Balancer:
    """Returns what says where the rows of a run's batches go, and how even their
    attention work is.
    """
    batch, heads = run.batch, getattr(run.model_config, "num_heads", None)
    # of attention by heads too: its devices have equal work in every row
    context, zigzag = 1, False
    if heads and run.data.is_text:
        form = context_attention.form_under(rules, (1, batch.sequence_length, heads, 1))
        context, zigzag = form.context if form.parts > 1 else 1, form.name == "ring"
    flow = num_microbatches(run, rules.shape)
    grid = StepGrid(batch.accumulation, flow, rules.shape.batch_shards, context, zigzag)
    return Balancer(
        dataset, batch.global_size, grid, balanced=run.data.balance == "attention"
    )


def batch_shapes(run: RunConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a batch of `size` samples, as the run's dataset
    makes it.
    """
    sample = sample_shapes(run.data, run.batch.sequence_length).items()
    return {
        name: jax.ShapeDtypeStruct((size, *dims), dtype)
        for name, (dims, dtype) in sample
    }


def targets_per_sample(run: RunConfig) -> int:
    """Returns how many targets a sample has, which speeds and FLOPs are told by; images
    have one.
    """
    return math.prod(
        sample_shapes(run.data, run.batch.sequence_length).get("weights", ((), ""))[0]
    )


def unit(run: RunConfig) -> str:
    """Returns what a run counts: "tokens", or "samples" where a sample has no targets
    of its own.
    """
    dims, _ = sample_shapes(run.data, run.batch.sequence_length).get(
        "weights", ((), "")
    )
    return "tokens" if dims else "samples"


def num_microbatches(run: RunConfig, shape: MeshShape) -> int:
    """Returns the microbatches of an accumulation step: 4 x stages by default, 1
    without a pipeline.
    """
    stages = shape.sizes["pipeline"]
    return 1 if stages == 1 else run.pipeline.microbatches or 4 * stages
