"""The feed-forward part, the channel of layers of the kind "dense"."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from jaxdist.config.annotations import PositiveInt
from jaxdist.models import layers
from jaxdist.models.parts import BlockConfig, Channel
from jaxdist.ops.costs import Cost, Product
from jaxdist.protocols.model import BlockInfo, BlockOutput


@dataclass(frozen=True)
class FeedForwardConfig(BlockConfig):
    """Options of the feed-forward part."""

    d_ff: PositiveInt = 384  # width inside the feed-forward part
    # activation of the feed-forward part
    activation: Literal["silu", "gelu", "gelu_exact", "relu"] = "silu"
    gated: bool = True  # activation(gate) * up (SwiGLU with silu), or activation(up)


class FeedForward(Channel):
    """Gated (arXiv:2002.05202) or plain feed-forward part.

    Args:
      config: options of the model.
      rngs: random streams for the parameters.
      d_ff: width inside the part; 0 = that of the config.
    """

    Config = FeedForwardConfig

    def __init__(
        self, config: FeedForwardConfig, rngs: nnx.Rngs, d_ff: int = 0
    ) -> None:
        c = config
        width = d_ff or c.d_ff
        inputs = ("d_model", "d_ff")
        self.activation = c.activation
        if c.gated:
            self.gate = layers.normal(rngs, (c.d_model, width), c.init_std, inputs)
        self.up = layers.normal(rngs, (c.d_model, width), c.init_std, inputs)
        self.down = layers.normal(
            rngs, (width, c.d_model), c.output_std, ("d_ff", "d_model")
        )
        if c.bias == "all":
            self.up_bias = layers.normal(rngs, (width,), 0, ("d_ff",))
            self.down_bias = layers.normal(rngs, (c.d_model,), 0, ("d_model",))

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Applies the feed-forward part to each token."""
        return BlockOutput(layers.feed_forward(self, x_BSD, self.activation))

    @staticmethod
    def costs(
        config: FeedForwardConfig, kinds: Sequence[str], sequence_length: int
    ) -> Iterator[Cost]:
        """Yields the cost of the layers' feed-forward parts."""
        yield feed_forward_cost(config, config.d_ff, len(kinds))

    @staticmethod
    def tensor_parallel_dims(config: FeedForwardConfig) -> tuple[str, ...]:
        """Names the width inside the part."""
        return ("d_ff",)

    @staticmethod
    def tiny(config: FeedForwardConfig, sequence_length: int) -> dict[str, Any]:
        """Lists the width of a tiny variant."""
        return {"d_ff": 96}


def feed_forward_cost(config: FeedForwardConfig, hidden: int, layers: int) -> Cost:
    """Computes the cost of feed-forward parts.

    Args:
      config: options of the model.
      hidden: width inside each part.
      layers: number of layers that have the part.
    """
    width = config.d_model
    products = [
        Product(width, hidden, "mlp_up"),
        Product(hidden, width, "mlp_out"),
    ]
    if config.gated:
        products.insert(0, Product(width, hidden, "mlp_gate"))
    return Cost(name="feed-forward", layers=layers, products=tuple(products))
