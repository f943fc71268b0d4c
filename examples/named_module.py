"""The dims of its parameters named: tensor parallelism then knows what to split.

python examples/named_module.py            # by itself, on one device: it learns its own source
python -m jaxdist.train --config quickstart --config.model.target=examples.named_module:Model
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Model(nnx.Module):
    """Predicts each byte from the ones before it, by a window and two layers."""

    def __init__(
        self,
        width: int = 32,
        hidden: int = 256,
        window: int = 8,
        dropout: float = 0.1,
        *,
        rngs: nnx.Rngs,
    ):
        def parameter(*dims: int, names: tuple, fan_in: int) -> nnx.Param:
            return nnx.Param(
                jax.random.normal(rngs.params(), dims) * fan_in**-0.5, logical=names
            )

        self.window, self.dropout = window, dropout
        self.embedding = parameter(256, width, names=("vocab", "d_model"), fan_in=width)
        self.up = parameter(
            window,
            width,
            hidden,
            names=(None, "d_model", "d_ff"),
            fan_in=window * width,
        )
        self.down = parameter(hidden, width, names=("d_ff", "d_model"), fan_in=hidden)
        self.output = parameter(width, 256, names=("d_model", "vocab"), fan_in=width)

    def loss(self, batch, key):
        """Returns the sum over the weighted targets, and their weight: unequal parts
        stay exact.
        """
        x = self.embedding[batch["tokens"]]
        ago = [
            jnp.pad(x, ((0, 0), (n, 0), (0, 0)))[:, : x.shape[1]]
            for n in range(self.window)
        ]
        hidden = nnx.relu(jnp.einsum("nbsd,ndf->bsf", jnp.stack(ago), self.up[...]))
        # a mask per sample, by its global number: the same on any layout
        if key is not None:
            keys = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(
                batch["sample"]
            )
            kept = jax.vmap(
                lambda k: jax.random.bernoulli(k, 1 - self.dropout, hidden.shape[1:])
            )(keys)
            hidden = jnp.where(kept, hidden / (1 - self.dropout), 0)
        logits = (x + hidden @ self.down[...]) @ self.output[...]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (each * batch["weights"]).sum(), batch["weights"].sum()


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
        batch["sample"] = jnp.arange(16)
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
