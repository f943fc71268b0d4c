"""A decoder block: a mixer and a channel, each with its norms, on a residual stream.

Letters: see `layers`.
"""

from functools import partial
from typing import Literal

import jax
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.models import layers
from jaxdist.models.cache import LayerCache
from jaxdist.models.parts import BlockConfig, Channel, Mixer
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import BlockInfo, BlockOutput


class Block(nnx.Module):
    """A layer: x + mixer(norm(x)), then x + channel(norm(x)).

    Norms stand before the parts, after them, or both (`model.norm_position`). In paths
    of parameters the mixer is called `attention` and the channel `mlp`, whatever their
    classes are, because configs name these paths.

    Args:
      config: options of the model.
      mixer: class of the mixer.
      channel: class of the channel.
      rngs: random streams for the parameters.
      layer_pattern: kinds of layers that repeat over a stack of these blocks.
    """

    def __init__(
        self,
        config: BlockConfig,
        mixer: type[Mixer],
        channel: type[Channel],
        rngs: nnx.Rngs,
        *,
        layer_pattern: tuple[str, ...],
    ) -> None:
        c = config
        self.layer_pattern = layer_pattern
        self.dropout = c.dropout
        self.position = c.norm_position
        norm = partial(layers.Norm, c.d_model, kind=c.norm, eps=c.norm_eps)
        if c.norm_position != "post":
            self.attention_norm = norm()
            self.mlp_norm = norm()
        if c.norm_position != "pre":
            self.attention_post_norm = norm()
            self.mlp_post_norm = norm()
        self.attention = mixer(c, rngs)
        self.mlp = channel(c, rngs)

    @property
    def parts(self) -> tuple[Mixer, Channel]:
        """The mixer and the channel."""
        return self.attention, self.mlp

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Computes the block's output [B, S, D], aux terms and stats."""
        mixed = self.attention(self._part_input("attention", x_BSD), info)
        return self._after_mixer(x_BSD, mixed, info)

    def with_cache(
        self,
        step: Literal["prefill", "decode"],
        x_BTD: jax.Array,
        cache: LayerCache,
        info: BlockInfo,
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the block in prefill or decode.

        Args:
          step: the method of the mixer.
          x_BTD: the block's input.
          cache: of this layer.
          info: of this layer.

        Returns:
          The output [B, T, D], and the cache with the new tokens.
        """
        x = self._part_input("attention", x_BTD)
        mixed, cache = getattr(self.attention, step)(x, cache, info)
        return self._after_mixer(x_BTD, BlockOutput(mixed), info).x, cache

    def _after_mixer(
        self, x_BSD: jax.Array, mixed: BlockOutput, info: BlockInfo
    ) -> BlockOutput:
        """Computes the block's output from its input and its mixer's output."""
        x_BSD = self._add("attention", x_BSD, mixed.x, info, site=1)
        output = self.mlp(self._part_input("mlp", x_BSD), info)
        x_BSD = self._add("mlp", x_BSD, output.x, info, site=2)
        return BlockOutput(
            layers.residual(x_BSD),
            _join(mixed.aux, output.aux),
            _join(mixed.stats, output.stats),
        )

    def _part_input(self, part: str, x_BSD: jax.Array) -> jax.Array:
        if self.position != "post":
            x_BSD = getattr(self, f"{part}_norm")(x_BSD)
        return shard(x_BSD, "batch", "sequence", None)

    def _add(
        self, part: str, x_BSD: jax.Array, y_BSD: jax.Array, info: BlockInfo, site: int
    ) -> jax.Array:
        """Adds a part's output to the residual stream."""
        if self.position != "pre":
            y_BSD = getattr(self, f"{part}_post_norm")(y_BSD)
        return x_BSD + layers.dropout(y_BSD, self.dropout, info, site)


def _join(
    mixer: dict[str, jax.Array], channel: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Joins the named sums of a block's parts.

    Raises:
      ConfigError: the same name is in both.
    """
    both = sorted(mixer.keys() & channel.keys())
    if both:
        raise ConfigError(
            f"a block's mixer and its channel both return {', '.join(both)}; rename one"
        )
    return mixer | channel
