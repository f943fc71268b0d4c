"""In stages: embed, a stack of equal blocks, head. So it can be scanned, rematerialised and pipelined.

python examples/staged_module.py           # by itself, on one device: it learns its own source
python -m jaxdist.train --config quickstart --config.model.target=examples.staged_module:Model
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def parameter(rngs: nnx.Rngs, dims: tuple, names: tuple, fan_in: int) -> nnx.Param:
    return nnx.Param(
        jax.random.normal(rngs.params(), dims) * fan_in**-0.5, logical=names
    )


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


class Block(nnx.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        size, inner = width // heads, ("heads", "head_dim")
        self.qkv = parameter(
            rngs, (width, 3, heads, size), ("d_model", None, *inner), width
        )
        self.out = parameter(rngs, (heads, size, width), (*inner, "d_model"), width)
        self.up = parameter(rngs, (width, 2 * width), ("d_model", "d_ff"), width)
        self.down = parameter(rngs, (2 * width, width), ("d_ff", "d_model"), 2 * width)

    def __call__(self, x, info):
        q, k, v = jnp.moveaxis(
            jnp.einsum("bsd,dchn->bschn", norm(x), self.qkv[...]), 2, 0
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bshn,hnd->bsd", mixed, self.out[...])
        return x + nnx.gelu(norm(x) @ self.up[...]) @ self.down[...]


class Model(nnx.Module):
    """A small language model of bytes; its blocks are one module with parameters
    [num_layers, ...].
    """

    def __init__(
        self, num_layers: int = 4, width: int = 64, heads: int = 8, *, rngs: nnx.Rngs
    ):
        self.embedding = parameter(rngs, (256, width), ("vocab", "d_model"), width)
        build = nnx.vmap(lambda rngs: Block(width, heads, rngs), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=num_layers)(build)(rngs)
        self.output = parameter(rngs, (width, 256), ("d_model", "vocab"), width)

    def embed(self, batch):
        """Returns what flows through the blocks, [batch, sequence, width]."""
        return self.embedding[batch["tokens"]]

    def head(self, x, batch):
        """Returns the sum over the weighted targets, and their weight."""
        each = optax.softmax_cross_entropy_with_integer_labels(
            norm(x) @ self.output[...], batch["targets"]
        )
        return (each * batch["weights"]).sum(), batch["weights"].sum()

    def loss(self, batch, key):
        """Returns the loss by itself; jaxdist runs the three parts, wherever
        they lie.
        """
        graph, stacked = nnx.split(self.blocks)
        x, _ = jax.lax.scan(
            lambda x, one: (nnx.merge(graph, one)(x, None), None),
            self.embed(batch),
            stacked,
        )
        return self.head(x, batch)


def main(steps: int = 100) -> list[float]:
    """Trains on one device without jaxdist; returns the losses per byte."""
    text = jnp.asarray(list(Path(__file__).read_bytes()), jnp.int32)
    model, losses = Model(rngs=nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, key):
        start = jax.random.randint(key, (16, 1), 0, len(text) - 65)
        rows = text[start + jnp.arange(65)[None]]
        batch = {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": jnp.ones((16, 64)),
        }
        loss, gradients = nnx.value_and_grad(
            lambda model: model.loss(batch, key)[0] / (16 * 64)
        )(model)
        optimizer.update(model, gradients)
        return loss

    for step in range(steps):
        losses.append(float(train_step(model, optimizer, jax.random.key(step))))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss per byte: {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
