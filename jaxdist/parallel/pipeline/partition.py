"""The layer stack cut up for a pipeline: its config, its schedule, and views of the
stack.

Models and checkpoints have their blocks flat, [layers, ...]. A pipeline holds them as
[chunks, stages, layers, ...]: place k = chunk * stages + stage has the layers from k *
layers on, the last places filled up with layers of zeros. Row by row this is the flat
order, so a view is a reshape.
"""

import dataclasses
import math
from collections.abc import Iterator
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
    """How microbatches flow through the stages of mesh.pipeline."""

    # gpipe, 1f1b, interleaved (with chunks), or the path of a .json table
    schedule: Annotated[str, Searched()] = "1f1b"
    # parts of each accumulation step; 0 = 4 x mesh.pipeline
    microbatches: Annotated[NonNegativeInt, Searched()] = 0
    # groups of layers on a stage (virtual stages); > 1 with interleaved only
    chunks: Annotated[PositiveInt, Searched()] = 1
    # embedding and head: sharded = split over stages, last = whole on each
    edges: Literal["sharded", "last"] = "sharded"
    # gather a stage's fsdp shards once a step, not in each tick (memory!)
    gather_once: bool = False
    # F keeps layer inputs; else that of the stage, and B's remat.policy
    remat: str = "layers"

    def microbatches_for(self, stages: int) -> int:
        """Returns the microbatches of an accumulation step; 1 without a pipeline."""
        if stages == 1:
            return 1
        return self.microbatches or 4 * stages


@dataclasses.dataclass(frozen=True)
class Staging:
    """How a model's layers lie on stages, and what flows through them."""

    config: PipelineConfig
    num_layers: int  # blocks: layers, or groups of `block_layers` layers
    stages: int
    period: int = 1  # layers after which their kinds repeat; a place holds a multiple
    block_layers: int = 1
    # `every`, and the policy within such a group
    recompute: remat.RematConfig = remat.RematConfig()

    @property
    def microbatches(self) -> int:
        return self.config.microbatches_for(self.stages)

    @property
    def dims(self) -> tuple[int, int, int]:
        """[chunks, stages, layers of each]."""
        groups = -(-self.num_layers // (self.stages * self.config.chunks * self.period))
        return (self.config.chunks, self.stages, groups * self.period)

    @property
    def remat(self) -> str:
        """Returns what B recomputes from: "layers", or the policy inside a stage's
        recomputation.

        With one layer a place `full` is `layers`: nothing is computed twice, and it
        takes less.
        """
        return "full" if self.dims[2] == 1 else self.config.remat

    @property
    def grouped(self) -> bool:
        """Returns whether F keeps the inputs of groups of layers."""
        return self.recompute.every > 1

    @property
    def kept_inputs(self) -> int:
        """Returns the inputs that a chunk keeps of a microbatch where F keeps those of
        layers.
        """
        return self.dims[2] // max(self.recompute.every // self.block_layers, 1)

    def program(self) -> Program:
        """Returns the compiled schedule.

        Raises:
          ConfigError: the sizes or the table of a file are not legal.
        """
        config = self.config
        schedule = build_schedule(
            config.schedule, self.stages, self.microbatches, config.chunks
        )
        return compile_schedule(schedule, max_runs=3)

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the config for this model and mesh, each with its
        cure.
        """
        config, places = self.config, self.stages * self.config.chunks
        if config.chunks < 1 or config.microbatches < 0:  # their ranges say so
            return
        if places > self.num_layers:
            group = (
                f"groups of {self.block_layers} layers that repeat"
                if self.block_layers > 1
                else "layers"
            )
            yield (
                f"mesh.pipeline={self.stages} x pipeline.chunks={config.chunks} = {places} places for "
                f"{self.num_layers} {group}; lower one of them to at most one place a {group[:5]}"
            )
        elif self.period > 1 and (places - 1) * self.dims[2] >= self.num_layers:
            yield (
                f"mesh.pipeline={self.stages} x pipeline.chunks={config.chunks} = {places} places for "
                f"{self.num_layers} layers whose pattern repeats every {self.period}: a place holds "
                f"whole patterns, here {self.dims[2]} layers, so the last would be empty; lower one of them"
            )
        plain = ("none", "full", "layers", "dots")
        yield from remat.policy_faults(config.remat, "pipeline.remat", plain)
        yield from self._group_faults()
        try:
            self.program()
        except ConfigError as error:
            yield from error.faults

    def _group_faults(self) -> Iterator[str]:
        own, group = self.recompute, self.period * self.block_layers
        if own.layers:
            yield f"remat.layers={own.layers}: stages recompute as pipeline.remat says; leave it at 0"
        if self.grouped and self.config.remat != "layers":
            yield (
                f"remat.every={own.every}: pipeline.remat={self.config.remat} keeps a chunk's input alone; "
                f"set pipeline.remat=layers, or remat.every=1"
            )
        yield from own.stack_faults(
            self.dims[2] * self.block_layers, "a stage's chunk", group
        )

    def staged(self, tree: Tree) -> Tree:
        """Returns a tree with its flat block leaves by stage."""
        extra = math.prod(self.dims) - self.num_layers

        def cut(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)) if extra else x
            return padded.reshape(*self.dims, *x.shape[1:])

        return _map_blocks(cut, tree, lambda dims: dims[:1] == (self.num_layers,))

    def flat(self, tree: Tree) -> Tree:
        """Returns a tree with its staged block leaves flat, padding left out."""

        def join(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[3:])[: self.num_layers]

        return _map_blocks(join, tree, lambda dims: dims[:3] == self.dims)

    def staged_spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of the model, and of frozen modules, with blocks by
        stage.
        """
        trees = ("trainable", "frozen", "model_state")
        cut = {tree: jax.eval_shape(self.staged, getattr(spec, tree)) for tree in trees}
        names, frozen_names = map(_with_stack, (spec.names, spec.frozen_names))
        modules = {
            name: self.for_model(module).staged_spec(module)
            for name, module in spec.modules.items()
        }
        return dataclasses.replace(
            spec,
            **cut,
            names=names,
            frozen_names=frozen_names,
            stack=NAMES,
            modules=modules,
        )

    def for_model(self, spec: ModelSpec) -> "Staging":
        """Returns how the same pipeline cuts up another model.

        Args:
          spec: of the other model, with flat blocks.
        """
        return dataclasses.replace(
            self,
            num_layers=spec.depth,
            period=spec.period,
            block_layers=spec.block_layers,
        )


def _with_stack(names: Tree) -> Tree:
    """Returns logical names with those of stack dims before a block's own."""
    if "blocks" not in names:
        return names
    blocks = jax.tree.map(
        lambda own: (*NAMES, *own),
        names["blocks"],
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return names | {"blocks": blocks}


def _map_blocks(function, tree: Tree, fits) -> Tree:
    """Returns the tree with `function` applied to leaves below a key `blocks` whose
    dims fit.
    """

    def leaf(path: tuple[Any, ...], x):
        inside = any(getattr(entry, "key", None) == "blocks" for entry in path)
        return function(x) if inside and fits(x.shape) else x

    return jax.tree_util.tree_map_with_path(leaf, tree)
