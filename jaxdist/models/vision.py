"""The vision transformer (ViT, arXiv:2010.11929) for classification, staged like all
our models.

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
    channels: PositiveInt = 1  # of a pixel
    patch_size: PositiveInt = 2  # pixels of a patch's side, divides image_size
    num_classes: PositiveInt = 10  # labels are 0 .. num_classes - 1
    num_layers: PositiveInt = 4  # blocks
    d_model: PositiveInt = 64  # width of the residual stream
    d_ff: PositiveInt = 128  # width inside the feed-forward part
    num_heads: PositiveInt = 8  # attention heads, divides d_model
    # classified: the patches' mean, or a token of its own
    pooling: Literal["mean", "token"] = "mean"
    dropout: Share = 0.0  # dropped of what attention and feed-forward add
    # of the target, which all classes get (arXiv:1512.00567)
    label_smoothing: Share = 0.0
    norm_eps: float = 1e-6  # added to the variance

    def faults(self) -> list[str]:
        """Lists sizes that do not divide each other."""
        sizes = vars(self)
        return [
            f"model.{part}={sizes[part]} does not divide model.{whole}={sizes[whole]}"
            for part, whole in (("patch_size", "image_size"), ("num_heads", "d_model"))
            if min(sizes[part], sizes[whole]) > 0 and sizes[whole] % sizes[part]
        ]


class EncoderBlock(nnx.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)); every patch
    sees all.
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

    def __call__(self, x_BPD: jax.Array, context: BlockInfo) -> tuple[jax.Array, dict]:
        q, k, v = layers.project_heads(
            self, self._entering(self.attention_norm, x_BPD), "heads"
        )
        mixed = layers.merge_heads(self, attention(q, k, v, causal=False))
        x = x_BPD + layers.dropout(mixed, self.dropout, context, 1)
        y = layers.feed_forward(self, self._entering(self.mlp_norm, x), "gelu_exact")
        return layers.residual(x + layers.dropout(y, self.dropout, context, 2)), {}

    @staticmethod
    def _entering(norm: layers.Norm, x_BPD: jax.Array) -> jax.Array:
        return shard(norm(x_BPD), "batch", "sequence", None)


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
        """Returns the cross-entropy over the samples; key None means no dropout."""
        return staged_loss(self, batch, key)

    def embed(self, batch: Batch) -> jax.Array:
        """Returns the patches [B, P, D] in the compute dtype, row by row."""
        c = self.config
        image = batch["image"]
        side = c.image_size // c.patch_size
        p = c.patch_size
        patches = image.reshape(len(image), side, p, side, p, c.channels).swapaxes(2, 3)
        patches = patches.reshape(len(image), side * side, -1)
        (x,) = project(
            patches.astype(execution.current().compute_dtype(self.patch[...].dtype)),
            self.patch,
        )
        x = layers.biased(x, self.patch_bias)
        if c.pooling == "token":
            token = layers.expand_leading(self.class_token[...], x)
            token = jnp.broadcast_to(token, (len(image), 1, c.d_model))
            x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        return layers.residual(layers.biased(x, self.position_embedding))

    def logits(self, x_BPD: jax.Array) -> jax.Array:
        """Returns float32 logits [B, C] from the last block's output."""
        x = self.final_norm(x_BPD)
        pooled = (
            x[:, 0]
            if self.config.pooling == "token"
            else x.astype(jnp.float32).mean(1).astype(x.dtype)
        )
        (logits,) = project(shard(pooled, "batch", None), self.output)
        return logits.astype(jnp.float32) + layers.expand_leading(
            self.output_bias[...], logits
        )

    def head(self, x_BPD: jax.Array, batch: Batch) -> Loss:
        """Returns the loss from the last block's output."""
        c = self.config
        log_p = jax.nn.log_softmax(self.logits(x_BPD))
        target = jax.nn.one_hot(batch["label"], c.num_classes)
        target = target * (1 - c.label_smoothing) + c.label_smoothing / c.num_classes
        return Loss(-(target * log_p).sum(), jnp.float32(len(log_p)))

    def forward(self, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, C] of a whole batch."""
        x = run_blocks(
            self.blocks, self.embed(batch), None, shared_fields(self, batch)
        ).x
        return self.logits(x)
