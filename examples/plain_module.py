"""A plain Flax NNX module: layers and a loss, no annotations, nothing of jaxdist.

python examples/plain_module.py            # by itself, on one device (needs scikit-learn)
python -m jaxdist.train --config vit_digits --config.model.target=examples.plain_module:Model
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Model(nnx.Module):
    """A convolutional network that tells digits of 8x8 pixels apart."""

    def __init__(self, width: int = 32, num_classes: int = 10, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.second = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.hidden = nnx.Linear(16 * 2 * width, 4 * width, rngs=rngs)
        self.output = nnx.Linear(4 * width, num_classes, rngs=rngs)

    def __call__(self, image):
        x = nnx.relu(self.second(nnx.relu(self.first(image))))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.output(x)

    def loss(self, batch, key):
        """Returns the mean over the batch; `key` is for what is random, None in
        evaluation.
        """
        logits = self(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()


def main(steps: int = 100) -> list[float]:
    """Trains on one device without jaxdist; returns the losses."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (
        jnp.asarray(digits.images[..., None] / 16, jnp.float32),
        jnp.asarray(digits.target),
    )
    model, losses = Model(rngs=nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, key):
        rows = jax.random.randint(key, (64,), 0, len(images))
        batch = {"image": images[rows], "label": labels[rows]}
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(batch, key))(
            model
        )
        optimizer.update(model, gradients)
        return loss

    for step in range(steps):
        losses.append(float(train_step(model, optimizer, jax.random.key(step))))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss: {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
