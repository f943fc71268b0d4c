"""The split of a layer stack for a pipeline: config, schedule, and views of the stack.

Models and checkpoints have flat blocks, [layers, ...]. A pipeline has them as [chunks,
stages, layers, ...]. Place k = chunk * stages + stage has `layers` consecutive layers,
the first of which is k * layers. The last places are padded with layers of zeros. Row
by row this is the flat order, so a view is a reshape.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError
from jaxdist.config.annotations import NonNegativeInt, PositiveInt, Searched
from jaxdist.parallel import remat
from jaxdist.parallel.pipeline.schedules.program import Program, compile_schedule
from jaxdist.parallel.pipeline.schedules.table import build_schedule
from jaxdist.protocols.model_spec import ModelSpec, Tree

NAMES = ("chunks", "stages", "layers")


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Options of the pipeline over the stages of mesh.pipeline."""

    # gpipe, 1f1b, interleaved (with chunks), or the path of a .json table
    schedule: Annotated[str, Searched()] = "1f1b"
    # microbatches of each accumulation step; 0 = 4 x mesh.pipeline
    microbatches: Annotated[NonNegativeInt, Searched()] = 0
    # groups of layers on a stage (virtual stages); > 1 with interleaved only
    chunks: Annotated[PositiveInt, Searched()] = 1
    # embedding and head: sharded = split over stages, last = whole on each
    edges: Literal["sharded", "last"] = "sharded"
    # gather a stage's fsdp shards once a step, not in each tick; needs more memory
    gather_once: bool = False
    # values that a stage keeps. layers = the inputs of all its layers. none, full, dots,
    # save:NAMES and offload:NAMES = its input alone; layers are recomputed by that policy
    remat: str = "layers"

    def microbatches_for(self, stages: int) -> int:
        """Computes the microbatches of an accumulation step; 1 without a pipeline."""
        if stages == 1:
            return 1
        return self.microbatches or 4 * stages


@dataclasses.dataclass(frozen=True)
class Staging:
    """The split of a model's layers over stages, and the flow of microbatches."""

    config: PipelineConfig
    num_layers: int  # number of blocks: layers, or groups of `block_layers` layers
    stages: int
    period: int = 1  # blocks after which kinds repeat; a place holds a multiple of it
    block_layers: int = 1  # layers in a block
    # `every` is the number of layers in a group, and `policy` applies within it
    recompute: remat.RematConfig = remat.RematConfig()

    @property
    def microbatches(self) -> int:
        """The number of microbatches of an accumulation step."""
        return self.config.microbatches_for(self.stages)

    @property
    def dims(self) -> tuple[int, int, int]:
        """The leading dims of blocks by stage: [chunks, stages, blocks of each]."""
        chunks = self.config.chunks
        periods = -(-self.num_layers // (self.stages * chunks * self.period))
        return (chunks, self.stages, periods * self.period)

    @property
    def remat(self) -> str:
        """The remat policy of a stage: "layers", or the policy in its recomputation.

        With one layer at a place, `full` is the same as `layers`: both keep one input.
        It needs less memory.
        """
        return "full" if self.dims[2] == 1 else self.config.remat

    @property
    def edge_remat(self) -> str:
        """The remat policy of layers beside the stack, those of embedding and head.

        With `layers` the backward pass computes them again from their inputs.
        """
        return "full" if self.remat == "layers" else self.remat

    @property
    def grouped(self) -> bool:
        """Whether the forward pass keeps the inputs of groups of layers."""
        return self.recompute.every > 1

    @property
    def kept_inputs(self) -> int:
        """The inputs per microbatch that a chunk keeps with remat=layers."""
        return self.dims[2] // max(self.recompute.every // self.block_layers, 1)

    def program(self) -> Program:
        """Compiles the schedule.

        Raises:
          ConfigError: the sizes, or the table of a file, are not legal.
        """
        config = self.config
        schedule = build_schedule(
            config.schedule, self.stages, self.microbatches, config.chunks
        )
        return compile_schedule(schedule, max_runs=3)

    def faults(self) -> Iterator[str]:
        """Yields the faults of the config for this model and mesh, with fixes."""
        config = self.config
        if (
            config.chunks < 1 or config.microbatches < 0
        ):  # the check of ranges reports it
            return
        yield from self._place_faults()
        plain = ("none", "full", "layers", "dots")
        yield from remat.policy_faults(config.remat, "pipeline.remat", plain)
        yield from self._group_faults()
        try:
            self.program()
        except ConfigError as error:
            yield from error.faults

    def _place_faults(self) -> Iterator[str]:
        """Yields a message if some place would have no layers."""
        places = self.stages * self.config.chunks
        sizes = (
            f"mesh.pipeline={self.stages} x pipeline.chunks={self.config.chunks} = "
            f"{places} places"
        )
        if places > self.num_layers:
            unit = "layer"
            units = "layers"
            if self.block_layers > 1:
                unit = "group"
                units = f"groups of {self.block_layers} layers that repeat"
            yield (
                f"{sizes} for {self.num_layers} {units}; lower one of them to at most "
                f"one place a {unit}"
            )
        elif self.period > 1 and (places - 1) * self.dims[2] >= self.num_layers:
            yield (
                f"{sizes} for {self.num_layers} layers whose pattern repeats every "
                f"{self.period}: a place holds whole patterns, here {self.dims[2]} "
                f"layers, so the last would be empty; lower one of them"
            )

    def _group_faults(self) -> Iterator[str]:
        """Yields the faults of options of `remat` under a pipeline."""
        recompute = self.recompute
        group = self.period * self.block_layers
        if recompute.layers:
            yield f"remat.layers={recompute.layers}: stages recompute as pipeline.remat says; leave it at 0"
        if self.grouped and self.config.remat != "layers":
            yield (
                f"remat.every={recompute.every}: pipeline.remat={self.config.remat} keeps a chunk's input alone; "
                f"set pipeline.remat=layers, or remat.every=1"
            )
        yield from recompute.stack_faults(
            self.dims[2] * self.block_layers, "a stage's chunk", group
        )

    def by_stage(self, tree: Tree) -> Tree:
        """Splits the flat blocks of a tree by stage."""
        padding = math.prod(self.dims) - self.num_layers

        def split(x: jax.Array) -> jax.Array:
            padded = x
            if padding:
                padded = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
            return padded.reshape(*self.dims, *x.shape[1:])

        return _map_blocks(split, tree, lambda dims: dims[:1] == (self.num_layers,))

    def flat(self, tree: Tree) -> Tree:
        """Joins the blocks of a tree by stage to flat blocks, and drops padding."""

        def join(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[3:])[: self.num_layers]

        return _map_blocks(join, tree, lambda dims: dims[:3] == self.dims)

    def spec_by_stage(self, spec: ModelSpec) -> ModelSpec:
        """Arranges the blocks of a model, and of its frozen modules, by stage.

        Args:
          spec: the model with flat blocks.
        """
        trees = ("trainable", "frozen", "model_state")
        trees_by_stage = {
            tree: jax.eval_shape(self.by_stage, getattr(spec, tree)) for tree in trees
        }
        names, frozen_names = map(_with_stack, (spec.names, spec.frozen_names))
        modules = {
            name: self.for_model(module).spec_by_stage(module)
            for name, module in spec.modules.items()
        }
        return dataclasses.replace(
            spec,
            **trees_by_stage,
            names=names,
            frozen_names=frozen_names,
            stack=NAMES,
            modules=modules,
        )

    def for_model(self, spec: ModelSpec) -> "Staging":
        """Splits another model by the same pipeline.

        Args:
          spec: the other model with flat blocks.
        """
        return dataclasses.replace(
            self,
            num_layers=spec.depth,
            period=spec.period,
            block_layers=spec.block_layers,
        )


def _with_stack(names: Tree) -> Tree:
    """Adds the names of stack dims to the logical names of blocks."""
    if "blocks" not in names:
        return names
    blocks = jax.tree.map(
        lambda layer_names: (*NAMES, *layer_names),
        names["blocks"],
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return names | {"blocks": blocks}


def _map_blocks(
    function: Callable[[jax.Array], jax.Array],
    tree: Tree,
    fits: Callable[[tuple[int, ...]], bool],
) -> Tree:
    """Applies a function to the leaves of blocks.

    Args:
      function: converts a leaf.
      tree: parameters, or state whose paths contain theirs.
      fits: selects leaves by their shape.
    """

    def apply(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        in_blocks = any(getattr(entry, "key", None) == "blocks" for entry in path)
        return function(x) if in_blocks and fits(x.shape) else x

    return jax.tree_util.tree_map_with_path(apply, tree)
