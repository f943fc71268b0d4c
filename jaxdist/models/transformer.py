"""One decoder-only transformer whose values give GPT-2, Llama, Mistral, Qwen, Gemma,
Phi and OLMo.

It is an embedding, blocks of mixers and channels (see `parts`), and a head; no kind of
part is known here. Single-device code: dims have logical names, no mesh axis is
mentioned. Letters: see `layers`.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models import layers
from jaxdist.models.block import Block
from jaxdist.models.cache import Cache, LayerCache
from jaxdist.models.channels import CHANNELS
from jaxdist.models.mixers import MIXERS
from jaxdist.models.transformer_config import TransformerConfig, all_parts
from jaxdist.ops import cached_attention as cached
from jaxdist.ops.attention_reference import soft_capped
from jaxdist.ops.cross_entropy import cross_entropy, target_scores
from jaxdist.ops.embedding import embed
from jaxdist.parallel import execution
from jaxdist.parallel.execution import shard
from jaxdist.protocols.layer_scan import scan_layers
from jaxdist.protocols.model import (
    Batch,
    BlockInfo,
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


class Transformer(nnx.Module):
    """A decoder-only language model (staged, see `jaxdist.protocols.model`)."""

    Config = TransformerConfig
    # ops cast kernels to the compute dtype; parameters stay float32
    casts_itself = True
    sums_over_samples = True  # so gradients need to cross `data` only once a step

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.embedding = layers.normal(
            rngs, (c.vocab_size, c.d_model), c.init_std, ("vocab", "d_model")
        )
        if c.positions == "learned":
            dims = (c.max_positions, c.d_model)
            self.position_embedding = layers.normal(
                rngs, dims, c.init_std, ("positions", "d_model")
            )
        first = c.first_dense_layers
        if first:
            self.first_blocks = _blocks(c, range(first), group=first, rngs=rngs)
        self.blocks = _blocks(
            c, range(first, c.num_layers), group=c.group_layers, rngs=rngs
        )
        self.final_norm = layers.Norm(c.d_model, kind=c.norm, eps=c.norm_eps)
        if not c.tie_embeddings:
            self.output = layers.normal(
                rngs, (c.d_model, c.vocab_size), c.init_std, ("d_model", "vocab")
            )

    def loss(self, batch: Batch, key: jax.Array | None) -> Loss:
        """Returns the next-token loss; key None means no dropout."""
        return staged_loss(self, batch, key)

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Changes the state of the parts that have stats, once a step."""
        blocks = layers_of(self.blocks)
        before: Counter[str] = Counter()  # layers of a group that have a stat
        for part in [part for block in blocks for part in block.parts]:
            values = {name: stats[name] for name in part.stat_names}
            if len(blocks) > 1:  # [groups, layers with the stat, ...]
                values = {name: x[:, before[name]] for name, x in values.items()}
            before.update(part.stat_names)
            if values:
                part.update(values)

    @staticmethod
    def stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Computes what a row of metrics says of a step's stats."""
        for part in all_parts():
            stats = part.stats_metrics(stats)
        return dict(stats)

    def prepare(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes what the parts of all blocks read (rotary tables)."""
        return self._prepared(batch, batch["positions"].shape[1])

    def _prepared(self, batch: Batch, length: int) -> dict[str, jax.Array]:
        fields: dict[str, jax.Array] = {}
        for part in self.config.parts:
            fields |= part.prepare(self.config, batch, length)
        return fields

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
        z_loss = self.config.z_loss
        total, z = cross_entropy(
            shard(self.final_norm(x_BSD), "batch", "sequence", None),
            self._head_kernel,
            batch["targets"],
            batch["weights"],
            z_loss=z_loss,
            **self._head_options,
        )
        return Loss(total, batch["weights"].sum(), {"z_loss": z} if z_loss else {})

    @property
    def _head_kernel(self) -> nnx.Param:
        return self.embedding if self.config.tie_embeddings else self.output

    @property
    def _head_options(self) -> dict[str, Any]:
        """What `ops.cross_entropy` does with the head."""
        c = self.config
        return {
            "tied": c.tie_embeddings,
            "softcap": c.logit_softcap,
            "chunk_tokens": c.loss_chunk,
        }

    def token_terms(self, x_BSD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Returns values of each target from the last block's output, [B, S] float32.

        Returns:
          log_probability: of the target. log_normalizer: log of the sum of exponentials
          of all logits.
        """
        log_probability, log_normalizer = target_scores(
            shard(self.final_norm(x_BSD), "batch", "sequence", None),
            self._head_kernel,
            batch["targets"],
            **self._head_options,
        )
        return {"log_probability": log_probability, "log_normalizer": log_normalizer}

    def head_only(self) -> list[str]:
        """Lists the options in force that `head` reads and `token_terms` does not."""
        z_loss = self.config.z_loss
        return [f"model.z_loss={z_loss}"] if z_loss else []

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Returns float32 logits [B, S, V] from the last block's output (for
        generation).
        """
        c = self.config
        x = self.final_norm(x_BSD)
        kernel = self.embedding[...].T if c.tie_embeddings else self.output[...]
        logits = jnp.einsum(
            "bsd,dv->bsv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
        )
        return shard(soft_capped(logits, c.logit_softcap), "batch", "sequence", "vocab")

    def forward(self, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, S, V] of a whole batch."""
        x = embedded(self, batch, None)
        first = layers_before(self)
        return self.logits(
            run_blocks(self.blocks, x, None, shared_fields(self, batch), first=first).x
        )

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence may have; None: no limit."""
        return self.config.max_length

    def init_cache(self, batch_size: int, length: int) -> Cache:
        """Makes an empty cache for `length` tokens of each of `batch_size` sequences.

        Devices of `context` share its slots out if their number divides the length.
        """
        dtype = execution.current().compute_dtype(self.embedding[...].dtype)
        stacks = {}
        for name, (blocks, _) in self._stacks().items():
            depth = jax.tree.leaves(nnx.state(blocks))[0].shape[0]
            stacks[name] = [
                block.attention.init_cache(depth, batch_size, length, dtype)
                for block in layers_of(blocks)
            ]
        lengths = jnp.zeros(batch_size, jnp.int32)
        return Cache(stacks, lengths, cached.init_places(length))

    def prefill(self, tokens_BP: jax.Array, cache: Cache) -> Cache:
        """Writes whole prompts to an empty cache: `decode` of them, computed as in
        training.

        No logits of a prompt's tokens to all others are in memory, and where devices
        share out the cache, each has its own part of a prompt.
        """
        P = tokens_BP.shape[1]
        slots = len(cache.places)
        if cached.are_shared_out(slots):
            tokens_BP = jnp.pad(tokens_BP, [(0, 0), (0, cached.whole_slots(P) - P)])
            places = cached.places_behind(tokens_BP.shape[1], slots)
            cache = cache._replace(places=places)
        positions = jnp.arange(tokens_BP.shape[1], dtype=jnp.int32)
        batch = {
            "tokens": tokens_BP,
            "positions": jnp.broadcast_to(positions, tokens_BP.shape),
        }
        _, cache = self._with_cache("prefill", batch, cache)
        return cache._replace(length=cache.length + P)

    def decode(self, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Computes float32 logits [B, T, V] of T new tokens a row, and writes these to
        the cache.
        """
        steps = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        batch = {
            "tokens": tokens_BT,
            "positions": cache.length[:, None] + steps[None, :],
        }
        x, cache = self._with_cache("decode", batch, cache)
        return self.logits(x), cache._replace(length=cache.length + tokens_BT.shape[1])

    def _stacks(self) -> dict[str, tuple[Any, int]]:
        """Lists the stacks of blocks in order: name -> blocks, number of the first
        layer.
        """
        behind = {"blocks": (self.blocks, layers_before(self))}
        if not layers_before(self):
            return behind
        return {"first_blocks": (self.first_blocks, 0)} | behind

    def _with_cache(
        self, step: Literal["prefill", "decode"], batch: Batch, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Computes the blocks' output for a batch, and writes it to the cache."""
        slots = len(cache.places)
        places = cache.places if cached.are_shared_out(slots) else None
        # Keys in the cache are turned by the same for all its tokens.
        fields = {**batch, **self._prepared(batch, slots)}
        x = self.embed(batch)
        stacks = {}
        for name, (blocks, first) in self._stacks().items():
            x, stacks[name] = _run_with_cache(
                step,
                blocks,
                x,
                cache.stacks[name],
                fields=fields,
                places=places,
                first=first,
            )
        return x, cache._replace(stacks=stacks)


def _run_with_cache(
    step: Literal["prefill", "decode"],
    blocks: nnx.Module,
    x: jax.Array,
    arrays: list[Any],
    *,
    fields: dict[str, jax.Array],
    places: jax.Array | None,
    first: int,
) -> tuple[jax.Array, list[Any]]:
    """Applies a stack of blocks in a decoder's step.

    Args:
      arrays: the caches of the layers of a block, [L, B, ...] each.
      places: see `LayerCache`.
      first: number of the stack's first layer.
    """
    graph, state = nnx.split(blocks)
    depth = jax.tree.leaves(state)[0].shape[0]

    def one_block(carry, layer, item, kind):
        x, arrays = carry
        parameters, number = item
        block = nnx.merge(graph, parameters)
        infos = infos_of(block, BlockInfo(None, layer, fields, kind))
        written = []
        for part, own, info in zip(layers_of(block), arrays, infos, strict=True):
            cache = LayerCache(own, number, places)
            x, cache = part.with_cache(step, x, cache, info)
            written.append(cache.arrays)
        return (x, written), None

    carry, _ = scan_layers(
        one_block,
        (x, arrays),
        (state, jnp.arange(depth)),
        pattern_of(blocks),
        first=first,
        stride=len(layers_of(blocks)),
    )
    return carry


def _blocks(
    config: TransformerConfig, numbers: range, *, group: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Makes the stack of consecutive layers.

    Args:
      group: layers that repeat as one block if their parts differ.
    """
    c = config
    period = len(c.layer_pattern)
    kinds = [c.mixer_kind(numbers.start + n) for n in range(period)]
    parts = {(MIXERS[c.mixer_kind(n)], CHANNELS[c.channel_kind(n)]) for n in numbers}

    def block(layer: int, rngs: nnx.Rngs) -> Block:
        mixer = MIXERS[c.mixer_kind(layer)]
        channel = CHANNELS[c.channel_kind(layer)]
        return Block(c, mixer, channel, rngs, layer_pattern=tuple(kinds))

    def layer_group(rngs: nnx.Rngs) -> LayerGroup:
        blocks = [block(layer, rngs) for layer in numbers[:group]]
        return LayerGroup(blocks, [kinds[n % period] for n in range(group)])

    if len(parts) == 1:
        return stack(partial(block, numbers.start), len(numbers), rngs)
    return stack(layer_group, len(numbers) // group, rngs)
