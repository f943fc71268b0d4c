"""The two parts of a decoder block: what a mixer and a channel declare.

A mixer moves information between tokens (attention), a channel works on each token
(feed-forward, experts). `mixers.MIXERS` and `channels.CHANNELS` name the classes; the
kinds in a model's patterns are keys of these tables.

Each class has a `Config`, the options that it reads. The options of all parts together
are `TransformerConfig`, which inherits them, so that their keys are flat.

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
    """The kinds of layers of the model that a part is in; `TransformerConfig` has the
    fields.
    """

    layer_pattern: tuple[str, ...]
    feed_forward_pattern: tuple[str, ...]


@dataclass(frozen=True)
class BlockConfig(Patterns):
    """Options that all parts of a block read."""

    num_layers: PositiveInt = 4  # blocks
    d_model: PositiveInt = 128  # width of the residual stream
    # Gemma: scale is 1 + parameter
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    # of each part; OLMo 2: post; Gemma 2, 3: both
    norm_position: Literal["pre", "post", "both"] = "pre"
    norm_eps: PositiveFloat = 1e-5  # added to the mean square
    bias: Literal["none", "qkv", "attention", "all"] = "none"  # Qwen 2: qkv; GPT-2: all
    # dropped of what attention and feed-forward add
    dropout: Annotated[Share, TrainingOnly()] = 0.0
    # of embeddings and kernels
    init_std: Annotated[NonNegativeFloat, TrainingOnly()] = 0.02
    # blocks start as identity: attention and mlp outputs at 0
    zero_init_outputs: Annotated[bool, TrainingOnly()] = False

    @property
    def output_std(self) -> float:
        """The scale of projections into the residual stream (GPT-2: shrunk by depth)."""
        if self.zero_init_outputs:
            return 0.0
        return self.init_std / (2 * self.num_layers) ** 0.5


class Part(nnx.Module):
    """A mixer or a channel; a subclass replaces the declarations that concern it.

    The static methods get the model's config, which has the fields of the part's own.
    Names of aux terms, stats and prepared fields are the part's own: no other part of a
    model has them.
    """

    Config: ClassVar[type[BlockConfig]] = BlockConfig
    # names of the stats that `update` reads; only a part with names has an `update`
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        raise NotImplementedError

    @staticmethod
    def faults(config: Any) -> Iterator[str]:
        """Yields which options do not go together; asked of parts that the model lacks,
        too.
        """
        return iter(())

    @staticmethod
    def tiny(config: Any, sequence_length: int) -> dict[str, Any]:
        """Lists the options that change in a tiny variant, with their values."""
        return {}

    @staticmethod
    def tensor_parallel_dims(config: Any) -> tuple[str, ...]:
        """Names the options that the mesh axis tensor must divide."""
        return ()

    @staticmethod
    def costs(
        config: Any, kinds: Sequence[str], sequence_length: int
    ) -> Iterator[Cost]:
        """Yields what the part needs, see `ops.costs`.

        Args:
          kinds: of the layers that have the part, in their order.
        """
        raise NotImplementedError

    @staticmethod
    def choices(config: Any) -> list[str]:
        """Lists what a run says at its start of the part, under the mesh in force."""
        return []

    @staticmethod
    def prepare(config: Any, batch: Batch, length: int) -> dict[str, jax.Array]:
        """Computes the fields that all layers with this part read in `info.fields`.

        Args:
          batch: its fields, [B, S] each.
          length: of whole sequences, in tokens.
        """
        return {}

    @staticmethod
    def stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Computes metrics from the stats of a step; stats of others stay as they are."""
        return dict(stats)

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Changes the part's state by a step's stats; called of a stack of layers."""
        raise NotImplementedError

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Computes what the part adds to the residual stream, aux terms and stats."""
        raise NotImplementedError


class Mixer(Part):
    """Moves information between the tokens of a sequence."""

    def init_cache(self, depth: int, batch_size: int, length: int, dtype: Any) -> Any:
        """Makes the empty cache of a stack of layers.

        Args:
          depth: layers of the stack, L.
          length: slots, one for each token.

        Returns:
          Arrays laid out over devices: [L, B, S, K, N] with a slot for each token, else
          [L, B, ...].
        """
        raise NotImplementedError

    def prefill(
        self, x_BPD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Computes what the mixer adds for whole prompts, and writes them to an empty
        cache.
        """
        raise NotImplementedError

    def decode(
        self, x_BTD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Computes what the mixer adds for T new tokens, and writes them to the cache.

        Their positions are `info.fields["positions"]`, [B, T].
        """
        raise NotImplementedError


class Channel(Part):
    """Works on each token alone."""
