"""One decoder-only transformer whose values give GPT-2, Llama, Mistral, Qwen, Gemma,
Phi and OLMo.

Single-device code: dims have logical names, no mesh axis is mentioned. Letters: see
`layers`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models import experts, layers
from jaxdist.models.experts import Experts
from jaxdist.models.rotary import rotary_frequencies
from jaxdist.models.transformer_config import TransformerConfig
from jaxdist.ops import cached_attention as cached
from jaxdist.ops.attention import attention
from jaxdist.ops.attention_reference import soft_capped
from jaxdist.ops.cross_entropy import cross_entropy
from jaxdist.ops.embedding import embed
from jaxdist.parallel import execution
from jaxdist.parallel.execution import shard
from jaxdist.protocols.layer_scan import scan_layers
from jaxdist.protocols.model import (
    Batch,
    BlockInfo,
    BlockOutput,
    LayerGroup,
    Loss,
    embedded,
    infos_of,
    layers_before,
    layers_of,
    pattern_of,
    run_blocks,
    shared_fields,
    stack,
    staged_loss,
)


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    What lies at or beyond a row's length is never attended to, and overwritten by the
    next tokens: prompts of unequal length are padded on the right, and `length` is then
    set back.
    """

    keys: jax.Array  # [L, B, S, K, N]
    values: jax.Array  # [L, B, S, K, N]
    length: jax.Array  # [B] int32: filled positions of each row
    # [S] int32: position of a slot's token, where devices share them out
    places: jax.Array | None = None


class Attention(nnx.Module):
    """Grouped-query self-attention (arXiv:2305.13245)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        c, std = config, config.init_std
        heads, kv = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
        self.config = config
        self.query = layers.normal(
            rngs, (c.d_model, *heads), std, ("d_model", "heads", "head_dim")
        )
        self.key = layers.normal(
            rngs, (c.d_model, *kv), std, ("d_model", "kv_heads", "head_dim")
        )
        self.value = layers.normal(
            rngs, (c.d_model, *kv), std, ("d_model", "kv_heads", "head_dim")
        )
        self.out = layers.normal(
            rngs, (*heads, c.d_model), c.output_std, ("heads", "head_dim", "d_model")
        )
        if c.bias != "none":
            self.query_bias = layers.normal(rngs, heads, 0, ("heads", "head_dim"))
            self.key_bias = layers.normal(rngs, kv, 0, ("kv_heads", "head_dim"))
            self.value_bias = layers.normal(rngs, kv, 0, ("kv_heads", "head_dim"))
        if c.bias in ("attention", "all"):
            self.out_bias = layers.normal(rngs, (c.d_model,), 0, ("d_model",))
        if c.qk_norm != "none":
            self.query_norm = _head_norm(c, *heads, "heads")
            self.key_norm = _head_norm(c, *kv, "kv_heads")

    def heads(
        self, x_BSD: jax.Array, context: BlockInfo
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [B, S, H, N] and k, v [B, S, K, N], normalised and rotated."""
        c = self.config
        q, k, v = layers.project_heads(self, x_BSD)
        if c.qk_norm != "none":
            q, k = self.query_norm(q), self.key_norm(k)
        if c.positions == "rotary":
            end = "_local" if context.kind == "local" and c.rope_theta_local else ""
            cos, sin = (
                context.fields[f"rotary_{table}{end}"] for table in ("cos", "sin")
            )
            q, k = (layers.rotate(y, cos, sin) for y in (q, k))
        return q, k, v

    def options(self, context: BlockInfo) -> dict[str, Any]:
        """Returns what shapes this layer's attention: scale, soft cap and window, None
        as usual.
        """
        c = self.config
        window = c.window if context.kind == "local" else None
        return {
            "scale": c.attention_scale or None,
            "softcap": c.attention_softcap or None,
            "window": window,
        }

    def __call__(self, x_BSD: jax.Array, context: BlockInfo) -> jax.Array:
        segment_ids = context.fields.get("segment_ids")
        mixed = attention(
            *self.heads(x_BSD, context),
            segment_ids_BS=segment_ids,
            **self.options(context),
        )
        return layers.merge_heads(self, mixed)


class FeedForward(nnx.Module):
    """Gated (arXiv:2002.05202) or plain feed-forward part."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, d_ff: int = 0):
        c, std, d_ff = config, config.init_std, d_ff or config.d_ff
        self.activation = c.activation
        if c.gated:
            self.gate = layers.normal(rngs, (c.d_model, d_ff), std, ("d_model", "d_ff"))
        self.up = layers.normal(rngs, (c.d_model, d_ff), std, ("d_model", "d_ff"))
        self.down = layers.normal(
            rngs, (d_ff, c.d_model), c.output_std, ("d_ff", "d_model")
        )
        if c.bias == "all":
            self.up_bias = layers.normal(rngs, (d_ff,), 0, ("d_ff",))
            self.down_bias = layers.normal(rngs, (c.d_model,), 0, ("d_model",))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return layers.feed_forward(self, x_BSD, self.activation)


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); or norms behind the
    parts, or both.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        c, norm = (
            config,
            partial(layers.Norm, config.d_model, kind=config.norm, eps=config.norm_eps),
        )
        self.dropout, self.position, self.layer_pattern = (
            c.dropout,
            c.norm_position,
            c.layer_pattern,
        )
        if c.norm_position != "post":
            self.attention_norm, self.mlp_norm = norm(), norm()
        if c.norm_position != "pre":
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        self.attention = Attention(config, rngs)
        self.mlp = _feed_forward(config, rngs)

    def __call__(self, x_BSD: jax.Array, context: BlockInfo) -> BlockOutput:
        mixed = self.attention(self._entering("attention", x_BSD), context)
        return self._rest(x_BSD, mixed, context)

    def _rest(
        self, x_BSD: jax.Array, mixed_BSD: jax.Array, context: BlockInfo
    ) -> BlockOutput:
        """Returns the layer's output from what its attention gave."""
        x_BSD = x_BSD + layers.dropout(
            self._leaving("attention", mixed_BSD), self.dropout, context, 1
        )
        entering = self._entering("mlp", x_BSD)
        mlp = self.mlp
        y, *sums = (
            mlp(entering, context)
            if isinstance(mlp, Experts)
            else BlockOutput(mlp(entering))
        )
        x_BSD = x_BSD + layers.dropout(
            self._leaving("mlp", y), self.dropout, context, 2
        )
        return BlockOutput(layers.residual(x_BSD), *sums)

    def _entering(self, part: str, x_BSD: jax.Array) -> jax.Array:
        x_BSD = (
            x_BSD if self.position == "post" else getattr(self, f"{part}_norm")(x_BSD)
        )
        return shard(x_BSD, "batch", "sequence", None)

    def _leaving(self, part: str, y_BSD: jax.Array) -> jax.Array:
        return (
            y_BSD
            if self.position == "pre"
            else getattr(self, f"{part}_post_norm")(y_BSD)
        )

    def decode(self, x_BTD: jax.Array, cache: Cache, context: BlockInfo):
        """Returns the output for T new tokens, and the cache with this layer's part of
        them.
        """
        q, k, v = self.attention.heads(self._entering("attention", x_BTD), context)
        positions = context.fields["positions"]
        keys = cached.written(cache.keys, k, context.layer, positions, cache.places)
        values = cached.written(cache.values, v, context.layer, positions, cache.places)
        own, options = (
            (keys[context.layer], values[context.layer]),
            self.attention.options(context),
        )
        mixed = cached.cached_attention(q, *own, positions, cache.places, **options)
        x_BTD = self._rest(x_BTD, layers.merge_heads(self.attention, mixed), context).x
        return x_BTD, cache._replace(keys=keys, values=values)

    def prefill(self, x_BPD: jax.Array, cache: Cache, context: BlockInfo):
        """Returns the output for whole prompts, and the empty cache with this layer's
        part of them.
        """
        q, *new = self.attention.heads(self._entering("attention", x_BPD), context)
        mixed = attention(q, *new, **self.attention.options(context))
        split = cache.places is not None
        keys, values = (
            cached.written_prompt(old, x, context.layer, split=split)
            for old, x in zip(cache[:2], new, strict=True)
        )
        x_BPD = self._rest(x_BPD, layers.merge_heads(self.attention, mixed), context).x
        return x_BPD, cache._replace(keys=keys, values=values)


class Transformer(nnx.Module):
    """A decoder-only language model (staged, see `jaxdist.protocols.model`)."""

    Config = TransformerConfig
    # ops cast kernels to the compute dtype; parameters stay float32
    casts_itself = True
    sums_over_samples = True  # so gradients need to cross `data` only once a step

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.embedding = layers.normal(
            rngs, (c.vocab_size, c.d_model), c.init_std, ("vocab", "d_model")
        )
        if c.positions == "learned":
            dims = (c.max_positions, c.d_model)
            self.position_embedding = layers.normal(
                rngs, dims, c.init_std, ("positions", "d_model")
            )
        if c.first_dense_layers:
            dense = replace(c, num_experts=0)
            self.first_blocks = stack(
                lambda rngs: Block(dense, rngs), c.first_dense_layers, rngs
            )
        groups = (c.num_layers - c.first_dense_layers) // c.group_layers
        self.blocks = stack(partial(_repeating, c), groups, rngs)
        self.final_norm = layers.Norm(c.d_model, kind=c.norm, eps=c.norm_eps)
        if not c.tie_embeddings:
            self.output = layers.normal(
                rngs, (c.d_model, c.vocab_size), c.init_std, ("d_model", "vocab")
            )

    def loss(self, batch: Batch, key: jax.Array | None) -> Loss:
        """Returns the next-token loss; key None means no dropout."""
        return staged_loss(self, batch, key)

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Changes what keeps the load of experts even, once a step."""
        parts = [
            layer.mlp
            for layer in layers_of(self.blocks)
            if isinstance(layer.mlp, Experts)
        ]
        # of a group's layers each has its own place in the stats
        for place, part in enumerate(parts):
            several = self.config.group_layers > 1
            part.update(
                {name: x[:, place] for name, x in stats.items()} if several else stats
            )

    @staticmethod
    def stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Returns what a row of metrics says of a step's stats."""
        return experts.metrics(stats)

    def prepare(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the rotary tables, and the weights of tokens if experts
        count them.
        """
        c = self.config
        counted = c.num_experts > 0 and "weights" in batch
        tables = self._rotary(batch["positions"]) if c.positions == "rotary" else {}
        return tables | ({experts.WEIGHTS: batch["weights"]} if counted else {})

    def _rotary(self, positions_BS: jax.Array, length: int = 0) -> dict[str, jax.Array]:
        """Returns the tables of positions in sequences of `length` tokens, by default
        of all these.
        """
        c, length = self.config, length or positions_BS.shape[1]

        def tables(end: str, *args) -> dict[str, jax.Array]:
            cos, sin = layers.rotary_tables(
                positions_BS, *rotary_frequencies(c.rotary_dims, *args)
            )
            return {f"rotary_cos{end}": cos, f"rotary_sin{end}": sin}

        fields = tables("", c.rope_theta, length, c.stretch)
        return fields | (
            tables("_local", c.rope_theta_local) if c.rope_theta_local else {}
        )

    def embed(self, batch: Batch) -> jax.Array:
        """Returns [B, S, D] in the compute dtype."""
        x = embed(self.embedding, batch["tokens"])
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.config.positions == "learned":
            x = x + embed(self.position_embedding, batch["positions"])
        return layers.residual(x)

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
        """Returns float32 logits [B, S, V] from the last block's output (for
        generation).
        """
        c, x = self.config, self.final_norm(x_BSD)
        kernel = self.embedding[...].T if c.tie_embeddings else self.output[...]
        logits = jnp.einsum(
            "bsd,dv->bsv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
        )
        return shard(soft_capped(logits, c.logit_softcap), "batch", "sequence", "vocab")

    def forward(self, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, S, V] of a whole batch."""
        x, first = embedded(self, batch, None), layers_before(self)
        return self.logits(
            run_blocks(self.blocks, x, None, shared_fields(self, batch), first=first).x
        )

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence may have; None: no limit."""
        return self.config.max_length

    def init_cache(self, batch_size: int, length: int) -> Cache:
        """Returns an empty cache for `length` tokens of each of `batch_size` sequences.

        Devices of `context` share its slots out if their number divides the length.
        """
        c = self.config
        dims = (c.num_layers, batch_size, length, c.num_kv_heads, c.head_dim)
        dtype = execution.current().compute_dtype(self.embedding[...].dtype)
        keys, values = (
            shard(jnp.zeros(dims, dtype), *cached.CACHE_DIMS) for _ in range(2)
        )
        return Cache(
            keys, values, jnp.zeros(batch_size, jnp.int32), cached.init_places(length)
        )

    def prefill(self, tokens_BP: jax.Array, cache: Cache) -> Cache:
        """Returns an empty cache with whole prompts in it: `decode` of them, computed
        as in training.

        No logits of a prompt's tokens to all others are in memory, and where devices
        share out the cache, each has its own part of a prompt.
        """
        P = tokens_BP.shape[1]
        if cache.places is not None:
            tokens_BP = jnp.pad(tokens_BP, [(0, 0), (0, cached.whole_slots(P) - P)])
            cache = cache._replace(
                places=cached.places_behind(tokens_BP.shape[1], len(cache.places))
            )
        positions = jnp.broadcast_to(
            jnp.arange(tokens_BP.shape[1], dtype=jnp.int32), tokens_BP.shape
        )
        _, cache = self._cached(
            "prefill", {"tokens": tokens_BP, "positions": positions}, cache
        )
        return cache._replace(length=cache.length + P)

    def decode(self, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns float32 logits [B, T, V] of T new tokens a row, and the cache with
        them.
        """
        steps = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        batch = {
            "tokens": tokens_BT,
            "positions": cache.length[:, None] + steps[None, :],
        }
        x, cache = self._cached("decode", batch, cache)
        return self.logits(x), cache._replace(length=cache.length + tokens_BT.shape[1])

    def _cached(
        self, method: str, batch: Batch, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Returns the blocks' output for a batch, and the cache with it, by a method of
        `Block`.
        """
        fields = shared_fields(self, batch)
        # keys in the cache are turned: by the same for all its tokens
        if self.config.positions == "rotary":
            fields |= self._rotary(batch["positions"], cache.keys.shape[2])
        x, first = self.embed(batch), layers_before(self)
        if first:
            x, cache = _through(method, self.first_blocks, x, cache, fields, 0)
        return _through(method, self.blocks, x, cache, fields, first)


def _through(
    method: str, blocks: nnx.Module, x: jax.Array, cache: Cache, fields, first: int
):
    """Returns the output of a stack by a method of its layers, and the cache with their
    parts.
    """
    graph, state = nnx.split(blocks)

    def one_block(carry, layer, parameters, kind):
        block = nnx.merge(graph, parameters)
        infos = infos_of(block, BlockInfo(None, layer, fields, kind))
        for part, info in zip(layers_of(block), infos, strict=True):
            carry = getattr(part, method)(*carry, info)
        return carry, None

    kinds, stride = pattern_of(blocks), len(layers_of(blocks))
    return scan_layers(one_block, (x, cache), state, kinds, first=first, stride=stride)[
        0
    ]


def _repeating(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Returns what repeats behind the first dense layers: a block, or a group of
    unequal ones.
    """
    c, kinds, parts = config, config.layer_pattern, config.feed_forward_pattern
    start = c.first_dense_layers % len(kinds)
    kinds = kinds[start:] + kinds[:start]
    if c.group_layers == 1:
        return Block(replace(c, layer_pattern=kinds), rngs)
    configs, numbers = (
        {"sparse": c, "dense": replace(c, num_experts=0)},
        range(c.group_layers),
    )
    layers = [Block(configs[parts[n % len(parts)]], rngs) for n in numbers]
    return LayerGroup(layers, [kinds[n % len(kinds)] for n in numbers])


def _feed_forward(config: TransformerConfig, rngs: nnx.Rngs) -> FeedForward | Experts:
    c, shared = config, None
    if not c.num_experts:
        return FeedForward(c, rngs)
    if c.num_shared_experts:  # several are one of their width together
        shared = FeedForward(c, rngs, c.num_shared_experts * c.expert_width)
    return Experts(c, rngs, shared)


def _head_norm(
    config: TransformerConfig, heads: int, size: int, name: str
) -> layers.Norm:
    """Returns the norm of queries or keys: of each head, or of all heads at once."""
    kind = "rms_plus_one" if config.norm == "rms_plus_one" else "rms"
    if config.qk_norm == "head":
        return layers.Norm(size, kind=kind, eps=config.norm_eps, names=("head_dim",))
    return layers.Norm(
        heads, size, kind=kind, eps=config.norm_eps, names=(name, "head_dim")
    )
