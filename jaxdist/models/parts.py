"""Interfaces of the two parts of a decoder block: the mixer and the channel.

A mixer moves information between tokens (attention). A channel works on each token
alone (feed-forward, experts). `mixers.MIXERS` and `channels.CHANNELS` list the classes.
The kinds in a model's patterns are keys of these tables.

Each class has a `Config`, the options that it reads. `TransformerConfig` inherits the
options of all parts, so that their keys are flat.

Letters: see `layers`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import jax
from flax import nnx

from jaxdist.config.annotations import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Share,
    TrainingOnly,
)
from jaxdist.models.cache import LayerCache
from jaxdist.ops.costs import Cost
from jaxdist.protocols.model import Batch, BlockInfo, BlockOutput


class Patterns:
    """Kinds of the model's layers, which parts read; fields of `TransformerConfig`."""

    layer_pattern: tuple[str, ...]
    feed_forward_pattern: tuple[str, ...]


@dataclass(frozen=True)
class BlockConfig(Patterns):
    """Options that all parts of a block read."""

    num_layers: PositiveInt = 4  # blocks
    d_model: PositiveInt = 128  # width of the residual stream
    # kind of norm; rms_plus_one: the scale is 1 + parameter (Gemma)
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    # norms before each part, after it (OLMo 2), or both (Gemma 2, 3)
    norm_position: Literal["pre", "post", "both"] = "pre"
    norm_eps: PositiveFloat = 1e-5  # added to the mean square
    # projections that have a bias; Qwen 2: qkv; GPT-2: all
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    # share of the outputs of attention and feed-forward that is dropped
    dropout: Annotated[Share, TrainingOnly()] = 0.0
    # standard deviation of initial embeddings and kernels
    init_std: Annotated[NonNegativeFloat, TrainingOnly()] = 0.02
    # output projections start at 0, so that blocks start as the identity
    zero_init_outputs: Annotated[bool, TrainingOnly()] = False

    @property
    def output_std(self) -> float:
        """The initial standard deviation of output projections; depth lowers it."""
        if self.zero_init_outputs:
            return 0.0
        return float(self.init_std / (2 * self.num_layers) ** 0.5)


class Part(nnx.Module):
    """A mixer or a channel; a subclass overrides the declarations that concern it.

    The static methods get the model's config, which has all fields of the part's
    `Config`. Names of aux terms, stats and prepared fields are unique to a part: no
    other part of a model uses them.
    """

    Config: ClassVar[type[BlockConfig]] = BlockConfig
    # names of the stats that `update` reads; () for a part without `update`
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        raise NotImplementedError

    @staticmethod
    def faults(config: Any) -> Iterator[str]:
        """Yields a message for each conflict of options.

        It is called for all parts, even those that the model does not use.
        """
        return iter(())

    @staticmethod
    def tiny(config: Any, sequence_length: int) -> dict[str, Any]:
        """Lists the options that differ in a tiny variant, with their values there."""
        return {}

    @staticmethod
    def tensor_parallel_dims(config: Any) -> tuple[str, ...]:
        """Names the options whose values the mesh axis `tensor` must divide."""
        return ()

    @staticmethod
    def costs(
        config: Any, kinds: Sequence[str], sequence_length: int
    ) -> Iterator[Cost]:
        """Yields the part's costs, see `ops.costs`.

        Args:
          config: options of the model.
          kinds: kinds of the layers that have the part, in order.
          sequence_length: in tokens.
        """
        raise NotImplementedError

    @staticmethod
    def choices(config: Any) -> list[str]:
        """Lists lines about the part for the start of a run, under the active mesh."""
        return []

    @staticmethod
    def prepare(config: Any, batch: Batch, length: int) -> dict[str, jax.Array]:
        """Computes the fields that all layers with this part read in `info.fields`.

        Args:
          config: options of the model.
          batch: fields [B, S].
          length: length of whole sequences, in tokens.
        """
        return {}

    @staticmethod
    def stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Turns the part's stats of a step into metrics; keeps other parts' stats."""
        return dict(stats)

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Updates the part's state from a step's stats; all have a dim of layers."""
        raise NotImplementedError

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Computes the part's addition to the residual stream, aux terms and stats."""
        raise NotImplementedError


class Mixer(Part):
    """A part that moves information between the tokens of a sequence."""

    def init_cache(self, depth: int, batch_size: int, length: int, dtype: Any) -> Any:
        """Creates the empty cache of a stack of layers.

        Args:
          depth: number of layers in the stack, L.
          batch_size: number of sequences, B.
          length: slots of each sequence, one per token, S. A state ignores it.
          dtype: dtype of activations. A state that sums up tokens may be float32.

        Returns:
          Arrays laid out over devices: [L, B, S, K, N] if each token has a slot,
          otherwise a state [L, B, ...]. `inference.decoding` refuses a state, because it
          sets caches back behind padded prompts.
        """
        raise NotImplementedError

    def prefill(
        self, x_BPD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the mixer to whole prompts and writes them to an empty cache."""
        raise NotImplementedError

    def decode(
        self, x_BTD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the mixer to T new tokens and writes them to the cache.

        The positions of the tokens are `info.fields["positions"]`, [B, T].
        """
        raise NotImplementedError


class Channel(Part):
    """A part that works on each token alone."""
