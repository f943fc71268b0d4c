"""Multi-head latent attention, the mixer of "latent" layers (DeepSeek-V2, -V3, Kimi).

A token has a small latent. The keys and values of all heads are projections of it, and
beside them there is one rotated key for all heads. Decoding caches the latent and this
key: 576 numbers a token in DeepSeek-V3, instead of 40,960.

Letters: see `layers`; N is the part of a head without positions here, R the rotated part
of queries and keys, V the head size of values, Q the latent of queries, C that of keys
and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config.annotations import NonNegativeInt, PositiveFloat, PositiveInt
from jaxdist.models import layers
from jaxdist.models.attention import Attention, AttentionConfig
from jaxdist.models.cache import LayerCache
from jaxdist.models.parts import Mixer
from jaxdist.models.rotary import rotary_frequencies
from jaxdist.ops.attention import compressed_attention
from jaxdist.ops.attention_backends import explain_sizes
from jaxdist.ops.attention_costs import latent_attention_cost
from jaxdist.ops.cached_attention import CACHE_DIMS, cached_attention
from jaxdist.ops.costs import Cost
from jaxdist.ops.matmul import project
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import Batch, BlockInfo, BlockOutput

KIND = "latent"  # in `model.layer_pattern`
# fields of a layer's info: tables of rotary positions
_COS = "latent_cos"
_SIN = "latent_sin"


@dataclass(frozen=True)
class LatentOptions:
    """Sizes of latent attention; the defaults are those of DeepSeek-V3 but query_rank."""

    # size of the latent of queries; 0 = queries are projected without one
    query_rank: NonNegativeInt = 0
    kv_rank: PositiveInt = 512  # size of the latent of keys and values
    nope_dim: PositiveInt = 128  # dims of a query's and key's head without positions
    rope_dim: PositiveInt = 64  # rotated dims of a query's head, and of the shared key
    value_dim: PositiveInt = 128  # size of a value's head
    norm_eps: PositiveFloat = 1e-6  # added to the mean square of both latents

    @property
    def head_size(self) -> int:
        """The size of a head of queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class LatentConfig(AttentionConfig):
    """Options of latent attention.

    It shares the number of heads, rotary positions, scale and soft cap with attention.
    """

    # sizes of latent layers, which do not read num_kv_heads and head_dim
    latent: LatentOptions = LatentOptions()


class LatentCache(NamedTuple):
    """The latents and rotated keys of earlier tokens."""

    latent: jax.Array  # [L, B, S, 1, C], normalised
    rope_key: jax.Array  # [L, B, S, 1, R], rotated


class LatentAttention(Mixer):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1)."""

    Config = LatentConfig

    def __init__(self, config: LatentConfig, rngs: nnx.Rngs) -> None:
        c = self.config = config
        sizes = c.latent
        H = c.num_heads
        normal = partial(layers.normal, rngs)
        std = c.init_std
        heads = ("heads", "head_dim")
        query = (H, sizes.head_size)
        if sizes.query_rank:
            down = (c.d_model, sizes.query_rank)
            self.query_down = normal(down, std, ("d_model", "latent"))
            self.query_down_norm = _norm(c, sizes.query_rank)
            self.query_up = normal((sizes.query_rank, *query), std, ("latent", *heads))
        else:
            self.query = normal((c.d_model, *query), std, ("d_model", *heads))
        self.latent_down = normal(
            (c.d_model, sizes.kv_rank), std, ("d_model", "latent")
        )
        self.rope_key = normal((c.d_model, sizes.rope_dim), std, ("d_model", None))
        self.latent_norm = _norm(c, sizes.kv_rank)
        expanded = (H, sizes.nope_dim + sizes.value_dim)
        self.latent_up = normal((sizes.kv_rank, *expanded), std, ("latent", *heads))
        self.out = normal(
            (H, sizes.value_dim, c.d_model), c.output_std, (*heads, "d_model")
        )
        if c.bias != "none":
            if sizes.query_rank:
                self.query_down_bias = normal((sizes.query_rank,), 0, ("latent",))
            self.latent_down_bias = normal((sizes.kv_rank,), 0, ("latent",))
            self.rope_key_bias = normal((sizes.rope_dim,), 0, (None,))
        if c.bias in ("attention", "all"):
            self.out_bias = normal((c.d_model,), 0, ("d_model",))

    def project_down(
        self, x_BSD: jax.Array, info: BlockInfo
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes queries [B, S, H, N + R], latents [B, S, C] and rope keys [B, S, R].

        The latents are normalised. The last R dims of queries, and the rope keys, are
        rotated.
        """
        has_rank = bool(self.config.latent.query_rank)
        name = "query_down" if has_rank else "query"
        names = (name, "latent_down", "rope_key")
        query, latent, rope_key = project(x_BSD, *(getattr(self, n) for n in names))
        if has_rank:
            query = _named(self._biased(query, "query_down"), "query_down")
            (query,) = project(self.query_down_norm(query), self.query_up)
        latent = _named(self._biased(latent, "latent_down"), "latent")
        rope_key = _named(self._biased(rope_key, "rope_key"), "latent")
        q = layers.shard_and_name(query, "query", "batch", "sequence", "heads", None)
        return (
            self._rotated(q, info),
            self.latent_norm(latent),
            self._rotated(rope_key[:, :, None], info)[:, :, 0],
        )

    def _biased(self, x: jax.Array, name: str) -> jax.Array:
        """Adds the bias of a projection, if it has one."""
        bias = getattr(self, f"{name}_bias", None)
        return x if bias is None else layers.biased(x, bias)

    def _rotated(self, x_BSHN: jax.Array, info: BlockInfo) -> jax.Array:
        """Rotates the last R dims of heads, if positions are rotary."""
        if self.config.positions != "rotary":
            return x_BSHN
        R = self.config.latent.rope_dim
        turned = layers.rotate(x_BSHN[..., -R:], info.fields[_COS], info.fields[_SIN])
        if x_BSHN.shape[-1] == R:
            return turned
        return jnp.concatenate([x_BSHN[..., :-R], turned], axis=-1)

    def expand(
        self, latent_BSC: jax.Array, rope_key_BSR: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Computes keys [B, S, H, N + R] and values [B, S, H, V] of all heads."""
        (both,) = project(latent_BSC, self.latent_up)
        both = shard(both, "batch", "sequence", "heads", None)
        key, value = jnp.split(both, [self.config.latent.nope_dim], axis=-1)
        shape = (*key.shape[:3], rope_key_BSR.shape[-1])
        rope_key = jnp.broadcast_to(rope_key_BSR[:, :, None], shape)
        key = jnp.concatenate([key, rope_key], axis=-1)
        dims = ("batch", "sequence", "heads", None)
        return (
            layers.shard_and_name(key, "key", *dims),
            layers.shard_and_name(value, "value", *dims),
        )

    @property
    def options(self) -> dict[str, Any]:
        """Scale and soft cap; None is the op's default."""
        c = self.config
        return {
            "scale": c.attention_scale or None,
            "softcap": c.attention_softcap or None,
        }

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Applies causal attention within the segments of each row."""
        q, *compressed = self.project_down(x_BSD, info)
        return BlockOutput(self._attend(q, compressed, info))

    def _attend(
        self, q: jax.Array, compressed: Sequence[jax.Array], info: BlockInfo
    ) -> jax.Array:
        """Attends to whole sequences and projects to the residual stream."""
        mixed = compressed_attention(
            q,
            compressed,
            self.expand,
            segment_ids_BS=info.fields.get("segment_ids"),
            **self.options,
        )
        return layers.merge_heads(self, mixed)

    def init_cache(
        self, depth: int, batch_size: int, length: int, dtype: Any
    ) -> LatentCache:
        """Creates empty latents and keys, see `parts.Mixer.init_cache`."""
        sizes = self.config.latent
        lead = (depth, batch_size, length, 1)
        return LatentCache(
            shard(jnp.zeros((*lead, sizes.kv_rank), dtype), *CACHE_DIMS),
            shard(jnp.zeros((*lead, sizes.rope_dim), dtype), *CACHE_DIMS),
        )

    def prefill(
        self, x_BPD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Applies attention to whole prompts and writes them to an empty cache."""
        q, *compressed = self.project_down(x_BPD, info)
        cache = cache.with_prompt(_slots(compressed))
        return self._attend(q, compressed, info), cache

    def decode(
        self, x_BTD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Writes T new tokens to the cache and applies attention to it.

        Keys and values are not expanded. q_h . (W_h c) = (W_h^T q_h) . c, so queries
        are projected to the latent, and their results from it.
        """
        q, *compressed = self.project_down(x_BTD, info)
        positions = info.fields["positions"]
        cache = cache.with_tokens(_slots(compressed), positions)
        cached: LatentCache = cache.read()
        N = self.config.latent.nope_dim
        up_CHN = self.latent_up[...].astype(q.dtype)
        q_latent = jnp.einsum("bthn,chn->bthc", q[..., :N], up_CHN[..., :N])
        options = self.options
        options["scale"] = options["scale"] or q.shape[-1] ** -0.5
        mixed_BTHC = cached_attention(
            jnp.concatenate([q_latent, q[..., N:]], axis=-1),
            jnp.concatenate(cached, axis=-1),
            cached.latent,
            positions,
            cache.places,
            **options,
        )
        mixed = jnp.einsum("bthc,chv->bthv", mixed_BTHC, up_CHN[..., N:])
        return layers.merge_heads(self, mixed), cache

    @staticmethod
    def prepare(
        config: LatentConfig, batch: Batch, length: int
    ) -> dict[str, jax.Array]:
        """Computes the rotary tables of all latent layers."""
        c = config
        if c.positions != "rotary":
            return {}
        tables = rotary_frequencies(c.latent.rope_dim, c.rope_theta, length, c)
        cos, sin = layers.rotary_tables(batch["positions"], *tables)
        return {_COS: cos, _SIN: sin}

    @staticmethod
    def costs(
        config: LatentConfig, kinds: Sequence[str], sequence_length: int
    ) -> Iterator[Cost]:
        """Yields the cost of latent attention."""
        sizes = config.latent
        yield latent_attention_cost(
            width=config.d_model,
            heads=config.num_heads,
            query_rank=sizes.query_rank,
            kv_rank=sizes.kv_rank,
            nope_size=sizes.nope_dim,
            rope_size=sizes.rope_dim,
            value_size=sizes.value_dim,
            length=sequence_length,
            layers=len(kinds),
        )

    @staticmethod
    def choices(config: LatentConfig) -> list[str]:
        """Lists how GPUs compute the two head sizes."""
        line = explain_sizes((config.latent.head_size, config.latent.value_dim))
        return [line] if line else []

    @staticmethod
    def tensor_parallel_dims(config: LatentConfig) -> tuple[str, ...]:
        """Names the heads."""
        return ("num_heads",)

    @staticmethod
    def tiny(config: LatentConfig, sequence_length: int) -> dict[str, Any]:
        """Lists fewer and smaller heads; values keep a size of their own."""
        c = config
        values = Attention.tiny(c, sequence_length)
        sizes = c.latent
        head = sizes.nope_dim
        small = replace(
            sizes,
            query_rank=24 if sizes.query_rank else 0,
            kv_rank=16,
            nope_dim=16,
            rope_dim=8,
            value_dim={head: 16, sizes.head_size: 24}.get(sizes.value_dim, 8),
        )
        stretch = c.tiny_stretch(sequence_length, small.rope_dim // 2)
        return values | stretch | {"latent": small}

    @staticmethod
    def faults(config: LatentConfig) -> Iterator[str]:
        """Yields a message for each conflict of sizes and positions."""
        c = config
        sizes = c.latent
        pattern = f"model.layer_pattern={','.join(c.layer_pattern)}"
        if KIND not in c.layer_pattern:
            if sizes != LatentOptions():
                yield (
                    f"model.latent: {pattern} has no latent layers; set "
                    f"model.layer_pattern=latent, or leave model.latent as it is"
                )
            return
        if c.positions == "rotary":
            if sizes.rope_dim % 2:
                yield (
                    f"model.latent.rope_dim={sizes.rope_dim}: rotary positions need an "
                    f"even size; change it"
                )
            else:
                yield from c.stretch_faults(sizes.rope_dim)
        yield from _unused_faults(c, pattern)


def _unused_faults(c: LatentConfig, pattern: str) -> Iterator[str]:
    """Yields a message for each option of attention that latent layers do not read."""
    defaults = {"qk_norm": "none", "rotary_fraction": 1.0, "rope_query_growth": 0.0}
    for name, default in defaults.items():
        value = getattr(c, name)
        if value != default:
            yield (
                f"model.{name}={value}: {pattern} has latent layers, which do not read "
                f"it; set model.{name}={default}"
            )


def _norm(config: LatentConfig, size: int) -> layers.Norm:
    """Creates the norm of a latent."""
    kind = "rms_plus_one" if config.norm == "rms_plus_one" else "rms"
    return layers.Norm(size, kind=kind, eps=config.latent.norm_eps, names=("latent",))


def _named(x_BSC: jax.Array, name: str) -> jax.Array:
    """Names an activation without heads, which each device of `tensor` has whole."""
    return layers.shard_and_name(x_BSC, name, "batch", "sequence", None)


def _slots(compressed: Sequence[jax.Array]) -> LatentCache:
    """Gives latents [B, T, C] and keys [B, T, R] the dim of heads of a cache."""
    return LatentCache(*(x[:, :, None] for x in compressed))
