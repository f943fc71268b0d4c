"""Grouped-query self-attention, the mixer of "global", "local" and "nope" layers.

Letters: see `layers`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval
from flax import nnx

from jaxdist.config.annotations import NonNegativeFloat, NonNegativeInt, PositiveInt
from jaxdist.models import layers
from jaxdist.models.cache import LayerCache
from jaxdist.models.parts import BlockConfig, Mixer
from jaxdist.models.rotary import RotaryConfig, query_growth, rotary_frequencies
from jaxdist.ops.attention import attention
from jaxdist.ops.attention_costs import attention_cost
from jaxdist.ops.cached_attention import CACHE_DIMS, cached_attention
from jaxdist.ops.costs import Cost
from jaxdist.parallel.execution import shard
from jaxdist.protocols.model import Batch, BlockInfo, BlockOutput

_KINDS = ("global", "local", "nope")  # of attention in `model.layer_pattern`
_QUERY_GROWTH = "query_growth"  # field of a block's info, [B, S, 1, 1]


@dataclass(frozen=True)
class AttentionConfig(RotaryConfig, BlockConfig):
    """Options of attention."""

    num_heads: PositiveInt = 4  # query heads
    num_kv_heads: PositiveInt = 4  # key and value heads, divides num_heads
    head_dim: PositiveInt = 32  # size of a head, even with rotary positions
    # share of head_dim that is rotated, its first dims; 1 = whole heads (Phi: 0.4)
    rotary_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    # base of the rotary frequencies in local layers (Gemma 3); 0 = rope_theta
    rope_theta_local: NonNegativeFloat = 0.0
    # norm of q and k: of each head (Qwen 3), or of all heads together (projection;
    # OLMo 2)
    qk_norm: Literal["none", "head", "projection"] = "none"
    # factor of the logits, e.g. 256 ** -0.5; 0 = head_dim ** -0.5
    attention_scale: NonNegativeFloat = 0.0
    # logits = cap * tanh(logits / cap); 0 = none (Gemma 2: 50)
    attention_softcap: NonNegativeFloat = 0.0
    # tokens that a token of a local layer sees, itself included; 0 = no local layers
    window: NonNegativeInt = 0

    @property
    def rotary_dims(self) -> int:
        """The number of rotated dims in a head."""
        return round(self.rotary_fraction * self.head_dim)


class KeysValues(NamedTuple):
    """The keys and values of earlier tokens, which attention caches."""

    keys: jax.Array  # [L, B, S, K, N]
    values: jax.Array  # [L, B, S, K, N]


class Attention(Mixer):
    """Grouped-query self-attention (arXiv:2305.13245)."""

    Config = AttentionConfig

    def __init__(self, config: AttentionConfig, rngs: nnx.Rngs) -> None:
        c = self.config = config
        heads = (c.num_heads, c.head_dim)
        kv = (c.num_kv_heads, c.head_dim)
        names = ("heads", "head_dim")
        kv_names = ("kv_heads", "head_dim")
        self.query = layers.normal(
            rngs, (c.d_model, *heads), c.init_std, ("d_model", *names)
        )
        self.key = layers.normal(
            rngs, (c.d_model, *kv), c.init_std, ("d_model", *kv_names)
        )
        self.value = layers.normal(
            rngs, (c.d_model, *kv), c.init_std, ("d_model", *kv_names)
        )
        self.out = layers.normal(
            rngs, (*heads, c.d_model), c.output_std, (*names, "d_model")
        )
        if c.bias != "none":
            self.query_bias = layers.normal(rngs, heads, 0, names)
            self.key_bias = layers.normal(rngs, kv, 0, kv_names)
            self.value_bias = layers.normal(rngs, kv, 0, kv_names)
        if c.bias in ("attention", "all"):
            self.out_bias = layers.normal(rngs, (c.d_model,), 0, ("d_model",))
        if c.qk_norm != "none":
            self.query_norm = _head_norm(c, *heads, "heads")
            self.key_norm = _head_norm(c, *kv, "kv_heads")

    def heads(
        self, x_BSD: jax.Array, info: BlockInfo
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes q [B, S, H, N] and k, v [B, S, K, N], normalised and rotated."""
        c = self.config
        q, k, v = layers.project_heads(self, x_BSD)
        if c.qk_norm != "none":
            q = self.query_norm(q)
            k = self.key_norm(k)
        if c.positions == "rotary" and info.kind != "nope":
            end = "_local" if info.kind == "local" and c.rope_theta_local else ""
            cos = info.fields[f"rotary_cos{end}"]
            sin = info.fields[f"rotary_sin{end}"]
            q = layers.rotate(q, cos, sin)
            k = layers.rotate(k, cos, sin)
            if c.rope_query_growth:
                growth = info.fields[_QUERY_GROWTH]
                q = (q.astype(jnp.float32) * growth).astype(q.dtype)
        return q, k, v

    def options(self, info: BlockInfo) -> dict[str, Any]:
        """Lists scale, soft cap and window of this layer; None is the op's default."""
        c = self.config
        return {
            "scale": c.attention_scale or None,
            "softcap": c.attention_softcap or None,
            "window": c.window if info.kind == "local" else None,
        }

    def __call__(self, x_BSD: jax.Array, info: BlockInfo) -> BlockOutput:
        """Applies causal attention within the segments of each row."""
        q, k, v = self.heads(x_BSD, info)
        segment_ids = info.fields.get("segment_ids")
        mixed = attention(q, k, v, segment_ids_BS=segment_ids, **self.options(info))
        return BlockOutput(layers.merge_heads(self, mixed))

    def init_cache(
        self, depth: int, batch_size: int, length: int, dtype: Any
    ) -> KeysValues:
        """Creates empty keys and values, see `parts.Mixer.init_cache`.

        The devices of `context` split the slots if their number divides the length.
        """
        c = self.config
        dims = (depth, batch_size, length, c.num_kv_heads, c.head_dim)
        keys = shard(jnp.zeros(dims, dtype), *CACHE_DIMS)
        values = shard(jnp.zeros(dims, dtype), *CACHE_DIMS)
        return KeysValues(keys, values)

    def prefill(
        self, x_BPD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Applies attention to whole prompts and writes them to an empty cache."""
        q, k, v = self.heads(x_BPD, info)
        mixed = attention(q, k, v, **self.options(info))
        cache = cache.with_prompt(KeysValues(k, v))
        return layers.merge_heads(self, mixed), cache

    def decode(
        self, x_BTD: jax.Array, cache: LayerCache, info: BlockInfo
    ) -> tuple[jax.Array, LayerCache]:
        """Writes T new tokens to the cache and applies attention to it."""
        q, k, v = self.heads(x_BTD, info)
        positions = info.fields["positions"]
        cache = cache.with_tokens(KeysValues(k, v), positions)
        cached: KeysValues = cache.read()
        mixed = cached_attention(
            q, cached.keys, cached.values, positions, cache.places, **self.options(info)
        )
        return layers.merge_heads(self, mixed), cache

    @staticmethod
    def prepare(
        config: AttentionConfig, batch: Batch, length: int
    ) -> dict[str, jax.Array]:
        """Computes the rotary tables of all layers, and any tables of local layers."""
        c = config
        if c.positions != "rotary":
            return {}
        positions = batch["positions"]
        tables = rotary_frequencies(c.rotary_dims, c.rope_theta, length, c)
        cos, sin = layers.rotary_tables(positions, *tables)
        fields = {"rotary_cos": cos, "rotary_sin": sin}
        if c.rope_theta_local:
            tables = rotary_frequencies(c.rotary_dims, c.rope_theta_local)
            cos, sin = layers.rotary_tables(positions, *tables)
            fields |= {"rotary_cos_local": cos, "rotary_sin_local": sin}
        if c.rope_query_growth:
            fields[_QUERY_GROWTH] = query_growth(positions, c)
        return fields

    @staticmethod
    def costs(
        config: AttentionConfig, kinds: Sequence[str], sequence_length: int
    ) -> Iterator[Cost]:
        """Yields the cost of attention for the layers of each kind."""
        c = config
        for kind, count in Counter(kinds).items():
            yield attention_cost(
                width=c.d_model,
                heads=c.num_heads,
                kv_heads=c.num_kv_heads,
                head_size=c.head_dim,
                length=sequence_length,
                window=c.window if kind == "local" else 0,
                layers=count,
            )

    @staticmethod
    def tensor_parallel_dims(config: AttentionConfig) -> tuple[str, ...]:
        """Names query heads, and kv heads if there are as many.

        Fewer kv heads than query heads are copied, and so is a single one.
        """
        if 1 < config.num_kv_heads == config.num_heads:
            return ("num_heads", "num_kv_heads")
        return ("num_heads",)

    @staticmethod
    def tiny(config: AttentionConfig, sequence_length: int) -> dict[str, Any]:
        """Lists fewer and smaller heads.

        The number of kv heads keeps its kind: as many as query heads (8), one, or
        groups (4).
        """
        c = config
        values: dict[str, Any] = {"num_heads": 8, "head_dim": 8}
        values["num_kv_heads"] = {c.num_heads: 8, 1: 1}.get(c.num_kv_heads, 4)
        if c.window:
            values["window"] = min(c.window, max(sequence_length // 4, 1))
        if c.rotary_fraction < 1:
            values["rotary_fraction"] = 0.5  # an even number of dims
        dims = replace(c, **values).rotary_dims
        return values | c.tiny_stretch(sequence_length, dims // 2)

    @staticmethod
    def faults(config: AttentionConfig) -> Iterator[str]:
        """Yields a message for each conflict of heads, positions and windows.

        In a model without attention layers, other mixers check heads and positions.
        """
        c = config
        if {*_KINDS} & {*c.layer_pattern}:
            yield from _heads_faults(c)
            yield from _rotary_faults(c)
        yield from _window_faults(c)
        yield from _position_faults(c)


def _heads_faults(c: AttentionConfig) -> Iterator[str]:
    if min(c.num_heads, c.num_kv_heads) > 0 and c.num_heads % c.num_kv_heads:
        yield (
            f"model.num_kv_heads={c.num_kv_heads} does not divide "
            f"model.num_heads={c.num_heads}; set it to a divisor"
        )


def _rotary_faults(c: AttentionConfig) -> Iterator[str]:
    if c.positions != "rotary" or not 0 < c.rotary_fraction <= 1:
        return
    if c.rotary_dims >= 2 and c.rotary_dims % 2 == 0:
        yield from c.stretch_faults(c.rotary_dims)
        return
    size = f"model.head_dim={c.head_dim}"
    cure = "change it"
    if c.rotary_fraction < 1:
        size = f"model.rotary_fraction={c.rotary_fraction} of {size}"
        cure = "change either"
    yield (f"{size}: rotary positions need an even size, here {c.rotary_dims}; {cure}")


def _window_faults(c: AttentionConfig) -> Iterator[str]:
    pattern = f"model.layer_pattern={','.join(c.layer_pattern)}"
    if "local" in c.layer_pattern:
        if not c.window:
            yield (
                f"{pattern}: local layers need model.window, the number of tokens that "
                f"a token sees (>= 1)"
            )
        return
    for name in ("window", "rope_theta_local"):
        value = getattr(c, name)
        if value:
            yield (
                f"model.{name}={value}: {pattern} has no local layers; set "
                f"model.layer_pattern (local, or local,global) or model.{name}=0"
            )


def _position_faults(c: AttentionConfig) -> Iterator[str]:
    """Yields a message for each option of rotary positions that a model lacks."""
    if c.positions == "learned" and "nope" in c.layer_pattern:
        yield (
            f"model.layer_pattern={','.join(c.layer_pattern)}: nope means attention "
            f"without rotary positions, and model.positions=learned has none; write "
            f"global"
        )
    if {*c.layer_pattern} == {"nope"}:
        for name, is_set in (
            ("rope_factor", c.stretches),
            ("rotary_fraction", c.rotary_fraction != 1),
        ):
            if is_set:
                yield (
                    f"model.{name}={getattr(c, name)}: model.layer_pattern=nope has no "
                    f"rotary positions; set model.{name}=1"
                )
    if not c.rope_query_growth:
        return
    setting = f"model.rope_query_growth={c.rope_query_growth}"
    if c.positions == "learned":
        yield f"{setting} needs model.positions=rotary; set it to 0"
    if not {"global", "local"} & {*c.layer_pattern}:
        yield (
            f"{setting}: model.layer_pattern={','.join(c.layer_pattern)} has no layers "
            f"with rotary positions; set it to 0"
        )


def _head_norm(
    config: AttentionConfig, heads: int, size: int, name: str
) -> layers.Norm:
    """Creates the norm of queries or keys: of each head, or of all heads together."""
    kind = "rms_plus_one" if config.norm == "rms_plus_one" else "rms"
    if config.qk_norm == "head":
        return layers.Norm(size, kind=kind, eps=config.norm_eps, names=("head_dim",))
    return layers.Norm(
        heads, size, kind=kind, eps=config.norm_eps, names=(name, "head_dim")
    )
