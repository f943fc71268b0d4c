"""The vision transformer (ViT, arXiv:2010.11929) for classification, a staged model.

Letters: B batch, P patches (and the class token, if there is one), D model, F
feed-forward, H heads, N head size, C classes.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.annotations import PositiveInt, Share
from jaxdist.models import layers
from jaxdist.ops.attention import attention
from jaxdist.ops.matmul import project
from jaxdist.parallel import execution
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import (
    Batch,
    BlockInfo,
    Loss,
    run_blocks,
    shared_fields,
    stack,
    staged_loss,
)


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and variants; the defaults suit 8x8 digits."""

    image_size: PositiveInt = 8  # pixels of a side; images are square
    channels: PositiveInt = 1  # channels of a pixel
    patch_size: PositiveInt = 2  # pixels of a patch's side, divides image_size
    num_classes: PositiveInt = 10  # labels are 0 .. num_classes - 1
    num_layers: PositiveInt = 4  # blocks
    d_model: PositiveInt = 64  # width of the residual stream
    d_ff: PositiveInt = 128  # width inside the feed-forward part
    num_heads: PositiveInt = 8  # attention heads, divides d_model
    # input of the classifier: the mean of the patches, or a class token
    pooling: Literal["mean", "token"] = "mean"
    # share of the outputs of attention and feed-forward that is dropped
    dropout: Share = 0.0
    # share of the target that is spread over all classes (arXiv:1512.00567)
    label_smoothing: Share = 0.0
    norm_eps: float = 1e-6  # added to the variance

    def faults(self) -> list[str]:
        """Lists a message for each pair of sizes that do not divide."""
        sizes = vars(self)
        return [
            f"model.{part}={sizes[part]} does not divide model.{whole}={sizes[whole]}"
            for part, whole in (("patch_size", "image_size"), ("num_heads", "d_model"))
            if min(sizes[part], sizes[whole]) > 0 and sizes[whole] % sizes[part]
        ]


class EncoderBlock(nnx.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Every patch attends to all patches.
    """

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs) -> None:
        D = config.d_model
        F = config.d_ff
        heads = (config.num_heads, config.d_model // config.num_heads)
        self.dropout = config.dropout
        std = D**-0.5
        inner = ("heads", "head_dim")
        self.attention_norm = layers.Norm(D, kind="layer", eps=config.norm_eps)
        self.query, self.key, self.value = (
            layers.normal(rngs, (D, *heads), std, ("d_model", *inner)) for _ in range(3)
        )
        biases = (layers.normal(rngs, heads, 0, inner) for _ in range(3))
        self.query_bias, self.key_bias, self.value_bias = biases
        self.out = layers.normal(rngs, (*heads, D), std, (*inner, "d_model"))
        self.out_bias = layers.normal(rngs, (D,), 0, ("d_model",))
        self.mlp_norm = layers.Norm(D, kind="layer", eps=config.norm_eps)
        self.up = layers.normal(rngs, (D, F), std, ("d_model", "d_ff"))
        self.up_bias = layers.normal(rngs, (F,), 0, ("d_ff",))
        self.down = layers.normal(rngs, (F, D), F**-0.5, ("d_ff", "d_model"))
        self.down_bias = layers.normal(rngs, (D,), 0, ("d_model",))

    def __call__(self, x_BPD: jax.Array, info: BlockInfo) -> jax.Array:
        """Computes the block's output, [B, P, D]."""
        normed = shard(self.attention_norm(x_BPD), "batch", "sequence", None)
        q, k, v = layers.project_heads(self, normed, "heads")
        mixed = layers.merge_heads(self, attention(q, k, v, causal=False))
        x = x_BPD + layers.dropout(mixed, self.dropout, info, 1)
        normed = shard(self.mlp_norm(x), "batch", "sequence", None)
        y = layers.feed_forward(self, normed, "gelu_exact")
        return layers.residual(x + layers.dropout(y, self.dropout, info, 2))


class VisionTransformer(nnx.Module):
    """A classifier of batches {"image" [B, height, width, channel], "label" [B]}."""

    Config = VisionConfig
    # ops cast kernels to the compute dtype; parameters stay float32
    casts_itself = True
    sums_over_samples = True  # so gradients need to cross `data` only once a step

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        pixels = c.patch_size**2 * c.channels
        token = c.pooling == "token"
        count = (c.image_size // c.patch_size) ** 2 + token
        self.patch = layers.normal(
            rngs, (pixels, c.d_model), pixels**-0.5, (None, "d_model")
        )
        self.patch_bias = layers.normal(rngs, (c.d_model,), 0, ("d_model",))
        self.position_embedding = layers.normal(
            rngs, (count, c.d_model), 0.02, ("positions", "d_model")
        )
        if token:
            self.class_token = layers.normal(rngs, (c.d_model,), 0.02, ("d_model",))
        self.blocks = stack(lambda rngs: EncoderBlock(c, rngs), c.num_layers, rngs)
        self.final_norm = layers.Norm(c.d_model, kind="layer", eps=c.norm_eps)
        self.output = layers.normal(
            rngs, (c.d_model, c.num_classes), 0.0, ("d_model", None)
        )
        self.output_bias = layers.normal(rngs, (c.num_classes,), 0, (None,))

    def loss(self, batch: Batch, key: jax.Array | None) -> Loss:
        """Computes the cross-entropy over the samples; key None means no dropout."""
        return staged_loss(self, batch, key)

    def embed(self, batch: Batch) -> jax.Array:
        """Embeds the patches of each image, row by row.

        Returns:
          [B, P, D] in the compute dtype.
        """
        c = self.config
        image = batch["image"]
        side = c.image_size // c.patch_size
        p = c.patch_size
        patches = image.reshape(len(image), side, p, side, p, c.channels).swapaxes(2, 3)
        patches = patches.reshape(len(image), side * side, -1)
        dtype = execution.current().compute_dtype(self.patch[...].dtype)
        (x,) = project(patches.astype(dtype), self.patch)
        x = layers.biased(x, self.patch_bias)
        if c.pooling == "token":
            token = layers.expand_leading(self.class_token[...], x)
            token = jnp.broadcast_to(token, (len(image), 1, c.d_model))
            x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        return layers.residual(layers.biased(x, self.position_embedding))

    def logits(self, x_BPD: jax.Array) -> jax.Array:
        """Computes float32 logits [B, C] from the last block's output."""
        x = self.final_norm(x_BPD)
        if self.config.pooling == "token":
            pooled = x[:, 0]
        else:
            pooled = x.astype(jnp.float32).mean(1).astype(x.dtype)
        (logits,) = project(shard(pooled, "batch", None), self.output)
        wide = logits.astype(jnp.float32)
        return wide + layers.expand_leading(self.output_bias[...], logits)

    def head(self, x_BPD: jax.Array, batch: Batch) -> Loss:
        """Computes the loss from the last block's output."""
        c = self.config
        log_p = jax.nn.log_softmax(self.logits(x_BPD))
        target = jax.nn.one_hot(batch["label"], c.num_classes)
        target = target * (1 - c.label_smoothing) + c.label_smoothing / c.num_classes
        return Loss(-(target * log_p).sum(), jnp.float32(len(log_p)))

    def forward(self, batch: Batch) -> jax.Array:
        """Computes float32 logits [B, C] of a whole batch."""
        fields = shared_fields(self, batch)
        output = run_blocks(self.blocks, self.embed(batch), None, fields)
        return self.logits(output.x)
