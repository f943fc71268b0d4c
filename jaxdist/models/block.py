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
    """One layer: x + mixer(norm(x)), then x + channel(norm(x)); or norms behind the
    parts, or both.

    The mixer is `attention` and the channel is `mlp` in paths of parameters, whatever
    they compute: configs name these paths.
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
        self.layer_pattern = layer_pattern  # of a stack of these blocks
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
        mixed = self.attention(self._entering("attention", x_BSD), info)
        return self._behind_mixer(x_BSD, mixed, info)

    def with_cache(
        self,
        step: Literal["prefill", "decode"],
        x_BTD: jax.Array,
        cache: LayerCache,
        info: BlockInfo,
    ) -> tuple[jax.Array, LayerCache]:
        """Computes the block's output for a step of a decoder.

        Args:
          step: the mixer's method for it.

        Returns:
          The output [B, T, D], and the cache with the tokens in it.
        """
        entering = self._entering("attention", x_BTD)
        mixed, cache = getattr(self.attention, step)(entering, cache, info)
        return self._behind_mixer(x_BTD, BlockOutput(mixed), info).x, cache

    def _behind_mixer(
        self, x_BSD: jax.Array, mixed: BlockOutput, info: BlockInfo
    ) -> BlockOutput:
        """Computes the block's output from its input and what its mixer gave."""
        x_BSD = self._added("attention", x_BSD, mixed.x, info, site=1)
        output = self.mlp(self._entering("mlp", x_BSD), info)
        x_BSD = self._added("mlp", x_BSD, output.x, info, site=2)
        return BlockOutput(
            layers.residual(x_BSD),
            _joined(mixed.aux, output.aux),
            _joined(mixed.stats, output.stats),
        )

    def _entering(self, part: str, x_BSD: jax.Array) -> jax.Array:
        if self.position != "post":
            x_BSD = getattr(self, f"{part}_norm")(x_BSD)
        return shard(x_BSD, "batch", "sequence", None)

    def _added(
        self, part: str, x_BSD: jax.Array, y_BSD: jax.Array, info: BlockInfo, site: int
    ) -> jax.Array:
        """Adds what a part gave to the residual stream."""
        if self.position != "pre":
            y_BSD = getattr(self, f"{part}_post_norm")(y_BSD)
        return x_BSD + layers.dropout(y_BSD, self.dropout, info, site)


def _joined(
    mixer: dict[str, jax.Array], channel: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Joins the named sums of a block's parts.

    Raises:
      ConfigError: both have one of the same name.
    """
    both = sorted(mixer.keys() & channel.keys())
    if both:
        raise ConfigError(
            f"a block's mixer and its channel both return {', '.join(both)}; rename one"
        )
    return mixer | channel
