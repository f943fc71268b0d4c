"""The decoder-only transformer.

Its options cover GPT-2, Llama, Mistral, Qwen, Gemma, Phi and OLMo. It has an embedding,
blocks of a mixer and a channel (see `parts`), and a head. This file names no kind of
part. It is single-device code: dims have logical names, and no mesh axis is mentioned.
Letters: see `layers`.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError
from jaxdist.models import layers
from jaxdist.models.block import Block
from jaxdist.models.cache import Cache, LayerCache
from jaxdist.models.channels import CHANNELS
from jaxdist.models.mixers import MIXERS
from jaxdist.models.multi_token import PREFIX, MultiToken, split_stats
from jaxdist.models.transformer_config import TransformerConfig, all_parts
from jaxdist.ops import cached_attention as cached
from jaxdist.ops.attention_reference import soft_capped
from jaxdist.ops.cross_entropy import (
    BucketScores,
    bucket_scores,
    cross_entropy,
    target_scores,
    top_scores,
)
from jaxdist.ops.embedding import embed
from jaxdist.parallel import execution
from jaxdist.parallel.execution import shard
from jaxdist.protocols.layer_scan import scan_layers
from jaxdist.protocols.model import (
    Batch,
    BlockInfo,
    LayerGroup,
    Loss,
    Recompute,
    Transform,
    embedded,
    infos_of,
    layers_before,
    layers_of,
    pattern_of,
    run_blocks,
    shared_fields,
    stack,
    staged_loss,
    unchanged,
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
        if c.head == "score":
            self.score = layers.normal(
                rngs,
                (c.d_model, 1),
                c.init_std,
                ("d_model", "score"),
                beside_adapters=True,
            )
        elif not c.tie_embeddings:
            self.output = layers.normal(
                rngs, (c.d_model, c.vocab_size), c.init_std, ("d_model", "vocab")
            )
        if c.multi_token.depth:
            self.multi_token = MultiToken(c, rngs)

    @property
    def head_has_layers(self) -> bool:
        """Whether the head applies layers: those of multi-token prediction."""
        return self.config.multi_token.depth > 0

    def loss(self, batch: Batch, key: jax.Array | None) -> Loss:
        """Computes the next-token loss; key None means no dropout."""
        return staged_loss(self, batch, key)

    def update(self, stats: Mapping[str, jax.Array]) -> None:
        """Updates the state of the parts that have stats. It is called once a step."""
        blocks = layers_of(self.blocks)
        layers_seen: Counter[str] = Counter()  # of a group, by the stat that they have
        for block in blocks:
            for part in block.parts:
                values = {name: stats[name] for name in part.stat_names}
                if len(blocks) > 1:  # [groups, layers with the stat, ...]
                    values = {
                        name: x[:, layers_seen[name]] for name, x in values.items()
                    }
                layers_seen.update(part.stat_names)
                if values:
                    part.update(values)
        if self.config.multi_token.depth:
            self.multi_token.update(stats)

    @staticmethod
    def stats_metrics(stats: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Computes the metrics of a step from its stats."""
        of_blocks, of_modules = split_stats(stats)
        for part in all_parts():
            of_blocks = part.stats_metrics(of_blocks)
            of_modules = part.stats_metrics(of_modules)
        return of_blocks | {PREFIX + name: x for name, x in of_modules.items()}

    def prepare(self, batch: Batch) -> dict[str, jax.Array]:
        """Computes the fields that the parts of all blocks read (rotary tables)."""
        return self._prepare(batch, batch["positions"].shape[1])

    def _prepare(self, batch: Batch, length: int) -> dict[str, jax.Array]:
        fields: dict[str, jax.Array] = {}
        for part in self.config.parts:
            fields |= part.prepare(self.config, batch, length)
        return fields

    def embed(self, batch: Batch) -> jax.Array:
        """Embeds tokens, and learned positions if the model has them.

        Returns:
          [B, S, D] in the compute dtype.
        """
        x = embed(self.embedding, batch["tokens"])
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.config.positions == "learned":
            x = x + embed(self.position_embedding, batch["positions"])
        return layers.residual(x)

    def head(
        self,
        x_BSD: jax.Array,
        batch: Batch,
        key: jax.Array | None = None,
        transform: Transform | Recompute = unchanged,
    ) -> Loss:
        """Computes the next-token loss from the last block's output.

        With `model.multi_token.depth` the loss has further terms, see `multi_token`.

        Args:
          x_BSD: last block's output.
          batch: fields by name.
          key: random key of the step; None: the head is deterministic.
          transform: wraps the functions of the head's layers, for rematerialisation.

        Raises:
          ConfigError: the model scores tokens, and does not predict them.
        """
        if not self.writes_text:
            raise ConfigError(
                "model.head=score predicts no tokens, so it has no next-token loss; "
                "set objective.name=reward"
            )
        z_loss = self.config.z_loss
        total, z_sum = cross_entropy(
            shard(self.final_norm(x_BSD), "batch", "sequence", None),
            self._head_kernel,
            batch["targets"],
            batch["weights"],
            z_loss=z_loss,
            **self._head_options,
        )
        aux = {"z_loss": z_sum} if z_loss else {}
        loss = Loss(total, batch["weights"].sum(), aux)
        if not self.config.multi_token.depth:
            return loss
        terms = self.multi_token.terms(
            x_BSD,
            batch,
            key,
            transform,
            embed=self.embed,
            fields_of=partial(shared_fields, self),
            sum_loss=self._sum_loss,
        )
        return terms._replace(sum=loss.sum, count=loss.count, aux=aux | terms.aux)

    def _sum_loss(
        self, normed_BSD: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array
    ) -> jax.Array:
        """Sums the weighted losses of targets, without the z-loss."""
        total, _ = cross_entropy(
            normed_BSD, self._head_kernel, targets_BS, weights_BS, **self._head_options
        )
        return total

    def aux_counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the targets of multi-token prediction, which its loss is divided by."""
        if not self.config.multi_token.depth:
            return {}
        return self.multi_token.target_counts(batch)

    @property
    def _head_kernel(self) -> nnx.Param[jax.Array]:
        return self.embedding if self.config.tie_embeddings else self.output

    @property
    def _head_options(self) -> dict[str, Any]:
        """The head's options for the functions of `ops.cross_entropy`."""
        c = self.config
        return {
            "tied": c.tie_embeddings,
            "softcap": c.logit_softcap,
            "chunk_tokens": c.loss_chunk,
        }

    def token_terms(self, x_BSD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Computes terms of each target from the last block's output.

        Returns:
          Arrays [B, S] in float32. `log_probability` is the target's log-probability.
          `log_normalizer` is the log of the sum of exponentials of all logits. With
          model.head=score there is only `score`, the score of the input.
        """
        if not self.writes_text:
            return {"score": self.logits(x_BSD)[..., 0]}
        log_probability, log_normalizer = target_scores(
            shard(self.final_norm(x_BSD), "batch", "sequence", None),
            self._head_kernel,
            batch["targets"],
            **self._head_options,
        )
        return {"log_probability": log_probability, "log_normalizer": log_normalizer}

    def bucket_scores(
        self, x_BSD: jax.Array, batch: Batch, ids_BSk: jax.Array, temperature: float
    ) -> BucketScores:
        """Computes the scores of targets, and of k tokens and all others at each place.

        Args:
          x_BSD: last block's output.
          batch: fields by name.
          ids_BSk: int32 tokens.
          temperature: divisor of the logits of the k tokens and the others.
        """
        return bucket_scores(
            shard(self.final_norm(x_BSD), "batch", "sequence", None),
            self._head_kernel,
            batch["targets"],
            ids_BSk,
            temperature=temperature,
            **self._head_options,
        )

    def top_scores(
        self, x_BSD: jax.Array, count: int, temperature: float
    ) -> tuple[jax.Array, jax.Array]:
        """Finds the most likely tokens at each place, and their log-probabilities.

        Args:
          x_BSD: last block's output.
          count: number of tokens, k.
          temperature: divisor of the logits.

        Returns:
          int32 tokens [B, S, k]. Float32 log-probabilities [B, S, k + 1]; the last is
          that of all other tokens together.
        """
        return top_scores(
            shard(self.final_norm(x_BSD), "batch", "sequence", None),
            self._head_kernel,
            count,
            temperature=temperature,
            **self._head_options,
        )

    def head_only(self) -> list[str]:
        """Lists the options in use that `head` reads and `token_terms` ignores."""
        options = []
        if self.config.z_loss:
            options.append(f"model.z_loss={self.config.z_loss}")
        depth = self.config.multi_token.depth
        if depth:
            options.append(f"model.multi_token.depth={depth}")
        return options

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Computes float32 logits [B, S, V] from the last block's output.

        With model.head=score these are the scores, [B, S, 1].
        """
        c = self.config
        x = self.final_norm(x_BSD)
        if not self.writes_text:
            scores = jnp.einsum(
                "bsd,do->bso",
                x,
                self.score[...].astype(x.dtype),
                preferred_element_type=jnp.float32,
            )
            return shard(scores, "batch", "sequence", None)
        kernel = self.embedding[...].T if c.tie_embeddings else self.output[...]
        logits = jnp.einsum(
            "bsd,dv->bsv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
        )
        return shard(soft_capped(logits, c.logit_softcap), "batch", "sequence", "vocab")

    def forward(self, batch: Batch) -> jax.Array:
        """Computes float32 logits [B, S, V] of a whole batch; see `logits`."""
        x = embedded(self, batch, None)
        fields = shared_fields(self, batch)
        output = run_blocks(self.blocks, x, None, fields, first=layers_before(self))
        return self.logits(output.x)

    @property
    def writes_text(self) -> bool:
        """Whether the model predicts tokens; with model.head=score it does not."""
        return self.config.head == "language"

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens in a sequence; None means no limit."""
        return self.config.max_length

    def init_cache(self, batch_size: int, length: int) -> Cache:
        """Creates an empty cache for decoding.

        The devices of `context` split its slots if their number divides the length.

        Args:
          batch_size: number of sequences.
          length: slots of each sequence, one per token.
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
        """Writes whole prompts to an empty cache.

        The cache is the same as after `decode` of the prompts, but attention is computed
        as in training: the attention scores between all tokens of a prompt are never in
        memory. If devices split the cache, they split the prompts, too.

        Args:
          tokens_BP: prompts of equal length P.
          cache: an empty cache, see `init_cache`.
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
        """Decodes T new tokens of each sequence and writes them to the cache.

        Returns:
          Float32 logits [B, T, V], and the cache with the new tokens.
        """
        steps = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        batch = {
            "tokens": tokens_BT,
            "positions": cache.length[:, None] + steps[None, :],
        }
        x, cache = self._with_cache("decode", batch, cache)
        return self.logits(x), cache._replace(length=cache.length + tokens_BT.shape[1])

    def _stacks(self) -> dict[str, tuple[Any, int]]:
        """Lists the stacks of blocks in order, by name.

        Returns:
          {name: (blocks, number of the first layer)}.
        """
        first = layers_before(self)
        stacks: dict[str, tuple[Any, int]] = {}
        if first:
            stacks["first_blocks"] = (self.first_blocks, 0)
        stacks["blocks"] = (self.blocks, first)
        return stacks

    def _with_cache(
        self, step: Literal["prefill", "decode"], batch: Batch, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Applies all blocks to a batch and writes its tokens to the cache."""
        slots = len(cache.places)
        places = cache.places if cached.are_shared_out(slots) else None
        # Rotary tables depend on the length of the whole cache, not on that of a batch:
        # all keys in the cache are rotated by one table.
        fields = {**batch, **self._prepare(batch, slots)}
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
    """Applies a stack of blocks in prefill or decode.

    Args:
      step: the method of the mixers.
      blocks: the stack.
      x: its input, [B, T, D].
      arrays: the cache of each layer of a block, [L, B, ...].
      fields: fields of the batch and those that the parts prepared.
      places: see `LayerCache`.
      first: number of the stack's first layer.

    Returns:
      The stack's output [B, T, D], and the arrays with the new tokens.
    """
    graph, state = nnx.split(blocks)
    depth = jax.tree.leaves(state)[0].shape[0]

    def apply_block(
        carry: tuple[jax.Array, list[Any]], number: jax.Array, item: Any, kind: str
    ) -> tuple[tuple[jax.Array, list[Any]], None]:
        x, arrays = carry
        parameters, index = item
        block = nnx.merge(graph, parameters)
        infos = infos_of(block, BlockInfo(None, number, fields, kind))
        new_arrays = []
        for layer, array, info in zip(layers_of(block), arrays, infos, strict=True):
            cache = LayerCache(array, index, places)
            x, cache = layer.with_cache(step, x, cache, info)
            new_arrays.append(cache.arrays)
        return (x, new_arrays), None

    (x, arrays), _ = scan_layers(
        apply_block,
        (x, arrays),
        (state, jnp.arange(depth)),
        pattern_of(blocks),
        first=first,
        stride=len(layers_of(blocks)),
    )
    return x, arrays


def _blocks(
    config: TransformerConfig, numbers: range, *, group: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds a stack of consecutive layers.

    Args:
      config: options of the model.
      numbers: of the layers.
      group: number of layers that repeat as one `LayerGroup` if their parts differ.
      rngs: random streams for the parameters.
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
