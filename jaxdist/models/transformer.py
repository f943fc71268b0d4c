"""One decoder-only transformer whose values give GPT-2, Llama 2/3 and Qwen-style models.

Single-device code: dims have logical names, no mesh axis is mentioned. Letters: see `layers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import precision
from jaxdist.models.layers import (
    ACTIVATIONS,
    Norm,
    biased,
    dropout,
    named,
    normal,
    residual,
    rotary_frequencies,
    rotary_tables,
    rotate,
)
from jaxdist.models.staged import (
    Batch,
    Context,
    Loss,
    run_blocks,
    shared_fields,
    stack,
    staged_loss,
)
from jaxdist.ops.attention import attention, cached_attention
from jaxdist.ops.cross_entropy import cross_entropy
from jaxdist.ops.embedding import embed
from jaxdist.ops.projection import project
from jaxdist.sharding import shard


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants; the defaults are Llama's."""

    vocab_size: int = 256  # tokens, >= 2
    num_layers: int = 4  # blocks, >= 1
    d_model: int = 128  # width of the residual stream
    d_ff: int = 384  # width inside the feed-forward part
    num_heads: int = 4  # query heads
    num_kv_heads: int = 4  # key and value heads, divides num_heads
    head_dim: int = 32  # size of a head, even with rotary positions
    positions: Literal["rotary", "learned"] = "rotary"  # how a token knows its place
    max_positions: int = 0  # rows of the learned table = longest sequence; unused with rotary
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_factor: float = 1.0  # Llama-3 stretch of long wavelengths; 1 = none
    rope_low_factor: float = 1.0  # turns within the original length below which all is stretched
    rope_high_factor: float = 4.0  # turns above which nothing is
    rope_original_positions: int = 8192  # sequence length before the stretch
    norm: Literal["rms", "layer"] = "rms"  # normalisation
    norm_eps: float = 1e-5  # added to the mean square
    activation: Literal["silu", "gelu", "gelu_exact", "relu"] = "silu"  # of the feed-forward part
    gated: bool = True  # activation(gate) * up (SwiGLU with silu), or activation(up)
    bias: Literal["none", "qkv", "all"] = "none"  # Qwen 2: qkv; GPT-2: all
    qk_norm: bool = False  # normalise each query and key head (Qwen 3)
    tie_embeddings: bool = False  # the head is the embedding table
    dropout: float = 0.0  # share dropped of what attention and feed-forward add, [0, 1)
    z_loss: float = 0.0  # weight of log(Z)^2, e.g. 1e-4
    logit_softcap: float = 0.0  # logits = cap * tanh(logits / cap); 0 = none
    loss_chunk: int = 1024  # tokens per device scored at once; 0 = all
    init_std: float = 0.02  # of embeddings and kernels
    zero_init_outputs: bool = False  # blocks start as identity: attention and mlp outputs at 0

    def faults(self) -> list[str]:
        """Returns what is wrong with the values, each with its cure."""
        sizes = (
            "vocab_size",
            "num_layers",
            "d_model",
            "d_ff",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        found = [
            f"model.{name}={getattr(self, name)}: must be >= 1" for name in sizes if getattr(self, name) < 1
        ]
        if not found and self.num_heads % self.num_kv_heads:
            found.append(
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}; set it to a divisor"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            found.append(f"model.head_dim={self.head_dim}: rotary positions need an even size")
        if self.positions == "learned" and self.max_positions < 1:
            found.append("model.max_positions: learned positions need the longest sequence, >= 1")
        if not 0 <= self.dropout < 1:
            found.append(f"model.dropout={self.dropout}: must be in [0, 1)")
        for name in ("z_loss", "logit_softcap", "loss_chunk", "init_std"):
            if not 0 <= getattr(self, name) < math.inf:
                found.append(f"model.{name}={getattr(self, name)}: must be >= 0")
        for name in ("rope_theta", "rope_factor", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(f"model.{name}={getattr(self, name)}: must be > 0")
        return found


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    What lies at or beyond a row's length is never attended to, and overwritten by the next tokens:
    prompts of unequal length are padded on the right, and `length` is then set back.
    """

    keys: jax.Array  # [L, B, S, K, N]
    values: jax.Array  # [L, B, S, K, N]
    length: jax.Array  # [B] int32: filled positions of each row


class Attention(nnx.Module):
    """Grouped-query self-attention (arXiv:2305.13245)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        c, std = config, config.init_std
        heads, kv = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
        self.qk_norm, self.rotary = c.qk_norm, c.positions == "rotary"
        self.query = normal(rngs, (c.d_model, *heads), std, ("d_model", "heads", "head_dim"))
        self.key = normal(rngs, (c.d_model, *kv), std, ("d_model", "kv_heads", "head_dim"))
        self.value = normal(rngs, (c.d_model, *kv), std, ("d_model", "kv_heads", "head_dim"))
        self.out = normal(rngs, (*heads, c.d_model), _output_std(c), ("heads", "head_dim", "d_model"))
        self.qkv_bias, self.out_bias_on = c.bias != "none", c.bias == "all"
        if self.qkv_bias:
            self.query_bias = nnx.Param(jnp.zeros(heads), logical=("heads", "head_dim"))
            self.key_bias = nnx.Param(jnp.zeros(kv), logical=("kv_heads", "head_dim"))
            self.value_bias = nnx.Param(jnp.zeros(kv), logical=("kv_heads", "head_dim"))
        if self.out_bias_on:
            self.out_bias = nnx.Param(jnp.zeros(c.d_model), logical=("d_model",))
        if c.qk_norm:
            self.query_norm = Norm(c.head_dim, kind="rms", eps=c.norm_eps, name="head_dim")
            self.key_norm = Norm(c.head_dim, kind="rms", eps=c.norm_eps, name="head_dim")

    def heads(self, x_BSD: jax.Array, fields: dict) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [B, S, H, N] and k, v [B, S, K, N], normalised and rotated."""
        q, k, v = project(x_BSD, self.query, self.key, self.value)
        if self.qkv_bias:
            q, k, v = (
                biased(y, bias)
                for y, bias in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias))
            )
        q = named(q, "query", "batch", "sequence", "heads", None)
        k = named(k, "key", "batch", "sequence", "kv_heads", None)
        v = named(v, "value", "batch", "sequence", "kv_heads", None)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary:
            q, k = (rotate(y, fields["rotary_cos"], fields["rotary_sin"]) for y in (q, k))
        return q, k, v

    def merge(self, mixed_BSHN: jax.Array) -> jax.Array:
        """Returns the heads' outputs put together, [B, S, D]."""
        (y,) = project(mixed_BSHN, self.out, contract=2)
        y = biased(y, self.out_bias) if self.out_bias_on else y
        return named(y, "attention_projection", "batch", "residual", None)

    def __call__(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        q, k, v = self.heads(x_BSD, context.fields)
        return self.merge(attention(q, k, v, segment_ids_BS=context.fields.get("segment_ids")))


class FeedForward(nnx.Module):
    """Gated (arXiv:2002.05202) or plain feed-forward part."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        c, std = config, config.init_std
        self.activation, self.gated, self.bias = c.activation, c.gated, c.bias == "all"
        if c.gated:
            self.gate = normal(rngs, (c.d_model, c.d_ff), std, ("d_model", "d_ff"))
        self.up = normal(rngs, (c.d_model, c.d_ff), std, ("d_model", "d_ff"))
        self.down = normal(rngs, (c.d_ff, c.d_model), _output_std(c), ("d_ff", "d_model"))
        if self.bias:
            self.up_bias = nnx.Param(jnp.zeros(c.d_ff), logical=("d_ff",))
            self.down_bias = nnx.Param(jnp.zeros(c.d_model), logical=("d_model",))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        kernels = (self.gate, self.up) if self.gated else (self.up,)
        *gate, up = project(x_BSD, *kernels)
        up = biased(up, self.up_bias) if self.bias else up
        up = named(up, "mlp_up", "batch", "sequence", "d_ff")
        gate = [named(g, "mlp_gate", "batch", "sequence", "d_ff") for g in gate]
        activate = ACTIVATIONS[self.activation]
        (y,) = project(activate(gate[0]) * up if gate else activate(up), self.down)
        y = biased(y, self.down_bias) if self.bias else y
        return named(y, "mlp_out", "batch", "residual", None)


class Block(nnx.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = Norm(config.d_model, kind=config.norm, eps=config.norm_eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config.d_model, kind=config.norm, eps=config.norm_eps)
        self.mlp = FeedForward(config, rngs)

    def __call__(self, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict]:
        mixed = self.attention(self._entering(self.attention_norm(x_BSD)), context)
        return self.feed_forward(x_BSD + dropout(mixed, self.dropout, context, 1), context), {}

    def feed_forward(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        y = self.mlp(self._entering(self.mlp_norm(x_BSD)))
        return residual(x_BSD + dropout(y, self.dropout, context, 2))

    def _entering(self, x_BSD: jax.Array) -> jax.Array:
        return shard(x_BSD, "batch", "sequence", None)

    def decode(self, x_BTD: jax.Array, cache: Cache, context: Context):
        """Returns the output for T new tokens, and the cache with this layer's part of them."""
        q, k, v = self.attention.heads(self.attention_norm(x_BTD), context.fields)
        positions = context.fields["positions"]
        keys = _written(cache.keys, k, context.layer, positions)
        values = _written(cache.values, v, context.layer, positions)
        mixed = cached_attention(q, keys[context.layer], values[context.layer], positions)
        x_BTD = self.feed_forward(x_BTD + self.attention.merge(mixed), context)
        return x_BTD, cache._replace(keys=keys, values=values)


class Transformer(nnx.Module):
    """A decoder-only language model (staged, see `jaxdist.models.staged`)."""

    Config = TransformerConfig
    casts_itself = True  # ops cast kernels to the compute dtype; parameters stay float32

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.embedding = normal(rngs, (c.vocab_size, c.d_model), c.init_std, ("vocab", "d_model"))
        if c.positions == "learned":
            dims = (c.max_positions, c.d_model)
            self.position_embedding = normal(rngs, dims, c.init_std, ("positions", "d_model"))
        self.blocks = stack(lambda rngs: Block(c, rngs), c.num_layers, rngs)
        self.final_norm = Norm(c.d_model, kind=c.norm, eps=c.norm_eps)
        if not c.tie_embeddings:
            self.output = normal(rngs, (c.d_model, c.vocab_size), c.init_std, ("d_model", "vocab"))

    def loss(self, batch: Batch, key: jax.Array | None) -> Loss:
        """Returns the next-token loss; key None means no dropout."""
        return staged_loss(self, batch, key)

    def prepare(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the rotary tables, which every block reads."""
        c = self.config
        if c.positions != "rotary":
            return {}
        frequencies = rotary_frequencies(
            c.head_dim,
            c.rope_theta,
            factor=c.rope_factor,
            low=c.rope_low_factor,
            high=c.rope_high_factor,
            original=c.rope_original_positions,
        )
        cos, sin = rotary_tables(batch["positions"], frequencies)
        return {"rotary_cos": cos, "rotary_sin": sin}

    def embed(self, batch: Batch) -> jax.Array:
        """Returns [B, S, D] in the compute dtype."""
        x = embed(self.embedding, batch["tokens"])
        if self.config.positions == "learned":
            x = x + embed(self.position_embedding, batch["positions"])
        return residual(x)

    def head(self, x_BSD: jax.Array, batch: Batch) -> Loss:
        """Returns the loss from the last block's output."""
        c, x = self.config, self.final_norm(x_BSD)
        total, z = cross_entropy(
            shard(x, "batch", "sequence", None),
            self.embedding if c.tie_embeddings else self.output,
            batch["targets"],
            batch["weights"],
            tied=c.tie_embeddings,
            z_loss=c.z_loss,
            softcap=c.logit_softcap,
            chunk_tokens=c.loss_chunk,
        )
        return Loss(total, batch["weights"].sum(), {"z_loss": z} if c.z_loss else {})

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Returns float32 logits [B, S, V] from the last block's output (for generation)."""
        c, x = self.config, self.final_norm(x_BSD)
        kernel = self.embedding[...].T if c.tie_embeddings else self.output[...]
        logits = jnp.einsum("bsd,dv->bsv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        if c.logit_softcap:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return shard(logits, "batch", "sequence", "vocab")

    def forward(self, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, S, V] of a whole batch."""
        x, _ = run_blocks(self.blocks, self.embed(batch), None, shared_fields(self, batch))
        return self.logits(x)

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence may have; None: no limit."""
        return self.config.max_positions if self.config.positions == "learned" else None

    def init_cache(self, batch_size: int, length: int) -> Cache:
        """Returns an empty cache for `length` tokens of each of `batch_size` sequences."""
        c = self.config
        dims = (c.num_layers, batch_size, length, c.num_kv_heads, c.head_dim)
        dtype = precision.compute_dtype(self.embedding[...].dtype)
        keys, values = (
            shard(jnp.zeros(dims, dtype), None, "batch", None, "kv_heads", None) for _ in range(2)
        )
        return Cache(keys, values, jnp.zeros(batch_size, jnp.int32))

    def decode(self, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns float32 logits [B, T, V] of T new tokens a row, and the cache with them."""
        steps = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        batch = {"tokens": tokens_BT, "positions": cache.length[:, None] + steps[None, :]}
        fields = shared_fields(self, batch)
        graph, state = nnx.split(self.blocks)

        def one_layer(carry, item):
            layer, parameters = item
            block: Any = nnx.merge(graph, parameters)
            return block.decode(*carry, Context(None, layer, fields)), None

        layers = (jnp.arange(self.config.num_layers), state)
        (x, cache), _ = jax.lax.scan(one_layer, (self.embed(batch), cache), layers)
        return self.logits(x), cache._replace(length=cache.length + tokens_BT.shape[1])


# Written out, since `.at[layer, rows, positions]` would gather the rows of all devices: here every
# row of the cache takes its own row of the tokens.
_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)


def _written(cached_LBSKN, new_BTKN, layer, positions_BT):
    """Returns the cache with T new tokens of one layer at their positions.

    In place: a cache that went through the scan as its input and output would be copied each step.
    """
    where_BT2 = jnp.stack([jnp.full_like(positions_BT, layer), positions_BT], axis=-1)
    new = new_BTKN.astype(cached_LBSKN.dtype)
    return jax.lax.scatter(cached_LBSKN, where_BT2, new, _ROW_BY_ROW, unique_indices=True)


def _output_std(config: TransformerConfig) -> float:
    """Returns the scale of projections into the residual stream (GPT-2: shrunk by depth)."""
    return 0.0 if config.zero_init_outputs else config.init_std / (2 * config.num_layers) ** 0.5
