"""What a decoder remembers of the tokens so far.

Each mixer defines the arrays of its layers (`parts.Mixer.init_cache`). The model keeps
them by stack and place in a group of layers, as it keeps the layers' parameters.
"""

from typing import Any, NamedTuple

import jax

from jaxdist.ops import cached_attention


class Cache(NamedTuple):
    """The caches of all layers.

    What lies at or beyond a row's length is never attended to, and overwritten by the
    next tokens: prompts of unequal length are padded on the right, and `length` is then
    set back.
    """

    # name of a stack -> of each layer of its blocks the mixer's arrays [L, B, ...]
    stacks: dict[str, list[Any]]
    length: jax.Array  # [B] int32: filled positions of each row
    places: jax.Array  # [S] int32: position of a slot's token


class LayerCache(NamedTuple):
    """The arrays of a stack of layers, of which one reads and writes its own part.

    The arrays are whole, since a scan that took a layer's part as its input and output
    would copy it at each step.
    """

    arrays: Any  # [L, B, ...]; with a slot for each token [L, B, S, K, N]
    layer: jax.Array  # int32: this layer's number among the L
    # [S] int32: position of a slot's token where devices share out the slots; None:
    # slot i holds token i
    places: jax.Array | None

    def own(self) -> Any:
        """Reads the layer's own arrays, [B, ...]."""
        return jax.tree.map(lambda array: array[self.layer], self.arrays)

    def with_tokens(self, new: Any, positions_BT: jax.Array) -> "LayerCache":
        """Writes T new tokens.

        Args:
          new: arrays [B, T, K, N], as the layer has arrays [B, S, K, N].
        """

        def write(array: jax.Array, tokens: jax.Array) -> jax.Array:
            return cached_attention.written(
                array, tokens, self.layer, positions_BT, self.places
            )

        return self._replace(arrays=jax.tree.map(write, self.arrays, new))

    def with_prompt(self, new: Any) -> "LayerCache":
        """Writes whole prompts of P tokens to the first slots.

        Args:
          new: arrays [B, P, K, N].
        """

        def write(array: jax.Array, tokens: jax.Array) -> jax.Array:
            return cached_attention.written_prompt(
                array, tokens, self.layer, split=self.places is not None
            )

        return self._replace(arrays=jax.tree.map(write, self.arrays, new))
