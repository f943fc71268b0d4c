"""A model made of the arrays of the state, in the compute dtype of the step."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import execution, precision
from jaxdist.parallel.pipeline.stage_params import StageParams
from jaxdist.protocols.dim_names import STACKED
from jaxdist.protocols.model_spec import ModelSpec, Tree


def names_of(spec: ModelSpec) -> StageParams:
    """Reads the logical names of a model's arrays."""
    return StageParams(spec.names, spec.frozen_names, spec.state_names)


def build_assemble(
    spec: ModelSpec, compute: str, key: jax.Array | None
) -> Callable[[StageParams], Any]:
    """Builds the function that makes a model from the arrays of a stage.

    Args:
      spec: the model with blocks by stage.
      compute: dtype of matrix products and activations.
      key: key of the model's random streams; see `ModelSpec.assemble`.
    """

    def assemble(params: StageParams) -> Any:
        trainable = params.trainable
        frozen = params.frozen
        if not spec.casts_itself:
            trainable = gather_edges(trainable)
            frozen = gather_edges(frozen)
        return assemble_model(
            spec, compute, trainable, params.model_state, frozen, key=key
        )

    return assemble


def gather_edges(tree: Tree) -> Tree:
    """Gathers the parameters outside of the blocks, within a manual region.

    XLA's partitioner aborts on an index into a table that is sharded in such a region
    ("Check failed: partition_group_list", spmd_partitioner_util.cc). The embeddings of
    `jaxdist.ops` need no index, so models built of them are not gathered.
    """
    now = execution.current()
    whole = P()
    return {
        name: subtree
        if name in STACKED
        else jax.tree.map(lambda x: now.constrain(x, whole), subtree)
        for name, subtree in tree.items()
    }


def assemble_model(
    spec: ModelSpec,
    compute: str,
    trainable: Tree,
    model_state: Tree,
    frozen: Tree,
    *,
    key: jax.Array | None,
) -> Any:
    """Makes the model from its arrays, with its parameters in the compute dtype.

    The model's state keeps its dtype, and so do parameters that the model casts itself.
    """
    if not spec.casts_itself:
        trainable, frozen = precision.cast((trainable, frozen), compute)
    return spec.assemble(trainable, model_state, frozen, key=key)
