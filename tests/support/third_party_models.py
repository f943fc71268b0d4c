"""Models as their authors would write them, for one device: nothing of jaxdist is
imported here.

A convolutional network with batch normalisation, an MLP-Mixer (arXiv:2105.01601), an
encoder with a masked-token loss (BERT, arXiv:1810.04805) and a recurrent network with a
GRU (arXiv:1406.1078).
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class ConvNet(nnx.Module):
    """Convolutions, each normalised over the batch; running statistics for
    evaluation.
    """

    def __init__(self, width: int = 16, num_classes: int = 10, *, rngs: nnx.Rngs):
        self.convolutions = nnx.List(
            [
                nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs),
                nnx.Conv(
                    width, 2 * width, (3, 3), strides=2, use_bias=False, rngs=rngs
                ),
            ]
        )
        self.norms = nnx.List(
            [
                nnx.BatchNorm(width, momentum=0.9, rngs=rngs),
                nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs),
            ]
        )
        self.output = nnx.Linear(2 * width, num_classes, rngs=rngs)

    def __call__(self, image, train):
        x = image
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x), use_running_average=not train))
        return self.output(x.mean((1, 2)))

    def loss(self, batch, key):
        logits = self(batch["image"], train=key is not None)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()


class MixerLayer(nnx.Module):
    """Mixes patches, then channels."""

    def __init__(self, patches, width, *, rngs):
        self.patch_norm = nnx.LayerNorm(width, rngs=rngs)
        self.patch_in = nnx.Linear(patches, 2 * patches, rngs=rngs)
        self.patch_out = nnx.Linear(2 * patches, patches, rngs=rngs)
        self.channel_norm = nnx.LayerNorm(width, rngs=rngs)
        self.channel_in = nnx.Linear(width, 2 * width, rngs=rngs)
        self.channel_out = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        y = self.patch_norm(x).swapaxes(1, 2)
        x = x + self.patch_out(nnx.gelu(self.patch_in(y))).swapaxes(1, 2)
        return x + self.channel_out(nnx.gelu(self.channel_in(self.channel_norm(x))))


class Mixer(nnx.Module):
    """An MLP-Mixer for small square images."""

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 2,
        width: int = 32,
        depth: int = 2,
        num_classes: int = 10,
        *,
        rngs: nnx.Rngs,
    ):
        self.stem = nnx.Conv(
            1, width, (patch_size, patch_size), strides=patch_size, rngs=rngs
        )
        patches = (image_size // patch_size) ** 2
        self.layers = nnx.List(
            [MixerLayer(patches, width, rngs=rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.output = nnx.Linear(width, num_classes, rngs=rngs)

    def loss(self, batch, key):
        x = self.stem(batch["image"])
        x = x.reshape(len(x), -1, x.shape[-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x).mean(1))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"]
        ).mean()


class EncoderLayer(nnx.Module):
    """Bidirectional attention and a feed-forward part, normalised after each, as BERT
    does.
    """

    def __init__(self, width, heads, *, rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):
        x = self.attention_norm(x + self.attention(x))
        return self.norm(x + self.down(nnx.gelu(self.up(x))))


class MaskedEncoder(nnx.Module):
    """Learns to restore masked tokens; which ones are masked is drawn from the key, for
    each sample.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        width: int = 32,
        heads: int = 4,
        depth: int = 2,
        max_positions: int = 64,
        masked_share: float = 0.15,
        *,
        rngs: nnx.Rngs,
    ):
        self.vocab_size, self.masked_share = vocab_size, masked_share
        # the last is the mask
        self.tokens = nnx.Embed(vocab_size + 1, width, rngs=rngs)
        self.places = nnx.Embed(max_positions, width, rngs=rngs)
        self.layers = nnx.List(
            [EncoderLayer(width, heads, rngs=rngs) for _ in range(depth)]
        )
        self.output = nnx.Linear(width, vocab_size, rngs=rngs)

    def masked(self, batch, key):
        """Returns which tokens are masked, [B, S] bool: the same number in
        each sample.
        """
        key = jax.random.key(0) if key is None else key
        length = batch["tokens"].shape[1]
        count = max(1, round(self.masked_share * length))

        def of_sample(sample):
            return (
                jax.random.permutation(jax.random.fold_in(key, sample), length) < count
            )

        return jax.vmap(of_sample)(batch["sample"])

    def loss(self, batch, key):
        tokens, mask = batch["tokens"], self.masked(batch, key)
        x = self.tokens(jnp.where(mask, self.vocab_size, tokens)) + self.places(
            batch["positions"]
        )
        for layer in self.layers:
            x = layer(x)
        each = optax.softmax_cross_entropy_with_integer_labels(self.output(x), tokens)
        return (each * mask).sum(), mask.sum()


class Recurrent(nnx.Module):
    """A GRU that predicts the next token."""

    def __init__(self, vocab_size: int = 256, width: int = 32, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocab_size, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs), rngs=rngs)
        self.output = nnx.Linear(width, vocab_size, rngs=rngs)

    def loss(self, batch, key):
        logits = self.output(self.rnn(self.tokens(batch["tokens"])))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (each * batch["weights"]).sum(), batch["weights"].sum()
