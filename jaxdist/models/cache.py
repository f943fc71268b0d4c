"""The cache of a decoder: what its mixers keep of earlier tokens.

Each mixer defines the arrays of its layers (`parts.Mixer.init_cache`). The model stores
them like the layers' parameters: by stack, and by position in a group of layers.
"""

from typing import Any, NamedTuple

import jax

from jaxdist.ops import cached_attention


class Cache(NamedTuple):
    """The caches of all layers.

    Slots at or beyond a row's length are never attended to, and the next tokens
    overwrite them. So prompts of unequal length are padded on the right, and `length`
    is then set to their true lengths.
    """

    # name of a stack -> the mixer's arrays [L, B, ...] for each layer of its blocks
    stacks: dict[str, list[Any]]
    length: jax.Array  # [B] int32: number of filled positions in each row
    places: jax.Array  # [S] int32: position of the token in each slot


class LayerCache(NamedTuple):
    """One layer's view of the arrays of its stack.

    The arrays hold all layers of the stack: a scan that took the arrays of one layer as
    input and output would copy them at each step.
    """

    arrays: Any  # [L, B, ...]; if each token has a slot [L, B, S, K, N]
    layer: jax.Array  # int32: index of this layer in the stack, < L
    # [S] int32: position of the token in each slot if devices split the slots; None:
    # slot i holds token i
    places: jax.Array | None

    def read(self) -> Any:
        """Reads the arrays of this layer, [B, ...]."""
        return jax.tree.map(lambda array: array[self.layer], self.arrays)

    def with_tokens(self, new: Any, positions_BT: jax.Array) -> "LayerCache":
        """Writes T new tokens of this layer.

        Args:
          new: arrays [B, T, K, N], in the structure of `arrays`.
          positions_BT: positions of the tokens.
        """

        def write(array: jax.Array, tokens: jax.Array) -> jax.Array:
            return cached_attention.written(
                array, tokens, self.layer, positions_BT, self.places
            )

        return self._replace(arrays=jax.tree.map(write, self.arrays, new))

    def with_prompt(self, new: Any) -> "LayerCache":
        """Writes whole prompts of P tokens to the first slots of this layer.

        Args:
          new: arrays [B, P, K, N], in the structure of `arrays`.
        """

        def write(array: jax.Array, tokens: jax.Array) -> jax.Array:
            return cached_attention.written_prompt(
                array, tokens, self.layer, split=self.places is not None
            )

        return self._replace(arrays=jax.tree.map(write, self.arrays, new))
