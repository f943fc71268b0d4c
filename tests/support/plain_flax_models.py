"""Models as people write them: flax alone, for one device, nothing of ours imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY, WIDTH = 64, 16


def picked(logits, targets):
    """Returns the log probability of each target."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[
        ..., 0
    ]


class Plain(nnx.Module):
    """No names, batch statistics, dropout, a list of layers, a table that is an
    attribute, a frozen one.
    """

    def __init__(
        self,
        hidden: int = 32,
        vocab_size=VOCABULARY,
        rate=0.0,
        act: Callable = nnx.gelu,
        *,
        rngs: nnx.Rngs,
    ):
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (vocab_size, WIDTH)), trainable=False
        )
        self.up = nnx.Linear(WIDTH, hidden, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.blocks = nnx.List(
            [nnx.Linear(hidden, hidden, rngs=rngs) for _ in range(2)]
        )
        self.head = nnx.Linear(hidden, vocab_size, rngs=rngs)
        self.slopes = jnp.linspace(0.5, 1.0, hidden)
        self.activation = act

    def loss(self, batch, key):
        x = self.drop(
            self.activation(self.norm(self.up(self.table[...][batch["tokens"]])))
        )
        for layer in self.blocks:
            x = x + jnp.tanh(layer(x)) * self.slopes[None, None]
        return -picked(self.head(x), batch["targets"]).mean()


class Counting(nnx.Module):
    """Sums in `stats`, told to `update` once a step; a counter; a head of its own
    optimizer group.
    """

    @dataclass(frozen=True)
    class Config:
        """Its options."""

        width: int = WIDTH  # of everything

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(VOCABULARY))
        self.steps = nnx.Variable(jnp.int32(0))

    def loss(self, batch, key):
        # nnx.remat hands all variables back, changed or not.
        logits = nnx.remat(lambda module, x: module(x))(
            self.head, self.table(batch["tokens"])
        )
        logits = logits - 0.1 * jnp.log1p(self.seen[...])[None, None]
        weights = batch["weights"]
        seen = jnp.zeros(VOCABULARY).at[batch["targets"]].add(weights)
        return (
            -(picked(logits, batch["targets"]) * weights).sum(),
            weights.sum(),
            {},
            {"seen": seen},
        )

    def update(self, stats):
        self.seen[...] += stats["seen"]
        self.steps[...] += 1


class Layer(nnx.Module):
    """A block with a state that it reads, and no names."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.gain = nnx.Variable(jnp.ones(()))

    def __call__(self, x, info):
        return x + self.gain[...] * self.down(jnp.tanh(self.up(x)))


class Staged(nnx.Module):
    """Embed, a stack of blocks made by flax's own vmap, head; its blocks' gain grows by
    what was seen.
    """

    layer: type[nnx.Module] = Layer

    def __init__(self, num_layers: int = 4, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCABULARY, WIDTH)))
        make = nnx.vmap(lambda rngs: self.layer(WIDTH, rngs), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=num_layers)(make)(rngs)
        self.output = nnx.Param(
            jax.random.normal(rngs.params(), (WIDTH, VOCABULARY)) / 4
        )
        self.seen = nnx.Variable(jnp.zeros(()))

    def embed(self, batch):
        return self.table[...][batch["tokens"]]

    def head(self, x, batch):
        found = -(
            picked(x @ self.output[...], batch["targets"]) * batch["weights"]
        ).sum()
        return found, batch["weights"].sum(), {}, {"seen": batch["weights"].sum()}

    def update(self, stats):
        self.seen[...] += stats["seen"]
        self.blocks.gain[...] *= 1 + stats["seen"] * 1e-3 * jnp.arange(
            1, 1 + len(self.blocks.gain[...])
        )


class Contrastive(nnx.Module):
    """Every sample's target is told from those of the whole batch: no sum over
    samples.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCABULARY, WIDTH)))

    def loss(self, batch, key):
        left, right = (
            self.table[...][batch[name]].mean(1) for name in ("tokens", "targets")
        )
        return -jnp.diagonal(jax.nn.log_softmax(left @ right.T)).mean()


class WeightedMean(nnx.Module):
    """A mean weighted by sample: what it is divided by comes from the whole batch."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (VOCABULARY, VOCABULARY))
        )

    def loss(self, batch, key):
        each = -picked(self.table[...][batch["tokens"]], batch["targets"]).mean(1)
        weights = 1.0 + batch["sample"]
        return (each * weights).sum() / weights.sum()


class OwnDropout(nnx.Module):
    """Sums over samples, but what is dropped comes from a random stream of its own."""

    sums_over_samples = True

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (VOCABULARY, VOCABULARY))
        )
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def loss(self, batch, key):
        each = -picked(self.drop(self.table[...][batch["tokens"]]), batch["targets"])
        return (each * batch["weights"]).sum(), batch["weights"].sum()
