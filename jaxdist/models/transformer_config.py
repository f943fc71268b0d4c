"""The values of the one transformer: which model it is, and what is wrong with a
choice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len

from jaxdist.config.annotations import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from jaxdist.models.rotary import Stretch
from jaxdist.ops.experts import explain
from jaxdist.telemetry.flops import Convention, transformer_flops_per_token

SIZES = (
    "vocab_size",
    "num_layers",
    "d_model",
    "d_ff",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
# of layer: it sees all tokens before, or the last `window` of them
Kind = Literal["global", "local"]
# of layer: its feed-forward part is one of width d_ff, or experts
Part = Literal["dense", "sparse"]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants; the defaults are Llama's."""

    vocab_size: PositiveInt = 256  # tokens
    num_layers: PositiveInt = 4  # blocks
    d_model: PositiveInt = 128  # width of the residual stream
    d_ff: PositiveInt = 384  # width inside the feed-forward part
    num_heads: PositiveInt = 4  # query heads
    num_kv_heads: PositiveInt = 4  # key and value heads, divides num_heads
    head_dim: PositiveInt = 32  # size of a head, even with rotary positions
    positions: Literal["rotary", "learned"] = "rotary"  # how a token knows its place
    # rows of the learned table = longest sequence; unused with rotary
    max_positions: int = 0
    # share of head_dim that turns, its first dims; 1 = whole heads (Phi: 0.4)
    rotary_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
    # base in local layers (Gemma 3); 0 = rope_theta
    rope_theta_local: NonNegativeFloat = 0.0
    # stretch of positions, but in local layers with their own base
    rope_factor: PositiveFloat = 1.0
    # what it stretches: long wavelengths (llama3, yarn), all, each by its own
    # (longrope), all as needed
    rope_scaling: Literal["llama3", "linear", "yarn", "longrope", "dynamic"] = "llama3"
    # llama3: turns within the original length below which all is stretched
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0  # llama3: turns above which nothing is
    # not linear: sequence length before the stretch
    rope_original_positions: int = 8192
    # yarn: turns within the original length below which all is stretched
    rope_beta_slow: float = 1.0
    rope_beta_fast: float = 32.0  # yarn: turns above which nothing is
    # yarn: the bounds between are whole dims (gpt-oss: false)
    rope_truncate: bool = True
    # yarn, longrope: of cos and sin; 0 = the paper's
    rope_attention_factor: NonNegativeFloat = 0.0
    # longrope: of each wavelength, up to that length
    rope_short_factor: tuple[PositiveFloat, ...] = ()
    # longrope: of each wavelength, in longer sequences
    rope_long_factor: tuple[PositiveFloat, ...] = ()
    # Gemma: scale is 1 + parameter
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    # of each part; OLMo 2: post; Gemma 2, 3: both
    norm_position: Literal["pre", "post", "both"] = "pre"
    norm_eps: PositiveFloat = 1e-5  # added to the mean square
    # of the feed-forward part
    activation: Literal["silu", "gelu", "gelu_exact", "relu"] = "silu"
    gated: bool = True  # activation(gate) * up (SwiGLU with silu), or activation(up)
    bias: Literal["none", "qkv", "attention", "all"] = "none"  # Qwen 2: qkv; GPT-2: all
    # of q and k; Qwen 3: head; OLMo 2: projection
    qk_norm: Literal["none", "head", "projection"] = "none"
    # factor of the logits, e.g. 256 ** -0.5; 0 = head_dim ** -0.5
    attention_scale: NonNegativeFloat = 0.0
    # logits = cap * tanh(logits / cap); 0 = none (Gemma 2: 50)
    attention_softcap: NonNegativeFloat = 0.0
    # repeated over the depth, e.g. local,global (Gemma 2)
    layer_pattern: Annotated[tuple[Kind, ...], Len(1)] = ("global",)
    # tokens that a local layer sees, its own included; 0 = no local layers
    window: NonNegativeInt = 0
    # of the embeddings, rounded to their dtype (Gemma: sqrt d_model)
    embedding_scale: PositiveFloat = 1.0
    tie_embeddings: bool = False  # the head is the embedding table
    dropout: Share = 0.0  # dropped of what attention and feed-forward add
    z_loss: NonNegativeFloat = 0.0  # weight of log(Z)^2, e.g. 1e-4
    logit_softcap: NonNegativeFloat = 0.0  # logits = cap * tanh(logits / cap); 0 = none
    loss_chunk: NonNegativeInt = 1024  # tokens per device scored at once; 0 = all
    init_std: NonNegativeFloat = 0.02  # of embeddings and kernels
    # blocks start as identity: attention and mlp outputs at 0
    zero_init_outputs: bool = False
    num_experts: NonNegativeInt = 0  # of every sparse feed-forward part; 0 = dense
    # layers before those with experts (DeepSeek-V3: 3)
    first_dense_layers: NonNegativeInt = 0
    # repeated over the layers behind them, e.g. dense,sparse (Qwen's
    # decoder_sparse_step 2)
    feed_forward_pattern: Annotated[tuple[Part, ...], Len(1)] = ("sparse",)
    experts_per_token: PositiveInt = 2  # how many of them a token goes to
    expert_d_ff: NonNegativeInt = 0  # width inside an expert; 0 = d_ff
    num_shared_experts: NonNegativeInt = 0  # experts besides, that all tokens go to
    # of the router's logits; DeepSeek-V3: sigmoid
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = True  # a token's weights are divided by their sum
    route_scale: PositiveFloat = 1.0  # factor of the weights
    expert_groups: NonNegativeInt = 0  # equal groups of experts; 0 = none
    # how many of them are open to a token, the best ones
    expert_top_groups: NonNegativeInt = 0
    # what keeps their load even: a bias of the choice, moved after each step
    # (DeepSeek-V3); a loss of each sequence; a loss of the batch, by the load of the
    # step before
    balance: Literal["none", "bias", "sequence", "batch"] = "bias"
    balance_rate: PositiveFloat = 1e-3  # by which a step moves a bias
    # of the losses, each layer's; sequence in DeepSeek-V3: 1e-4
    balance_weight: PositiveFloat = 1e-2
    # weight of log(Z)^2 of the router's logits, e.g. 1e-3
    router_z_loss: NonNegativeFloat = 0.0
    # in training an expert takes so many times its even share of a sequence, and drops
    # the rest; 0 = all
    capacity_factor: NonNegativeFloat = 0.0

    @property
    def rotary_dims(self) -> int:
        """Returns how many dims of a head turn."""
        return round(self.rotary_fraction * self.head_dim)

    @property
    def stretch(self) -> Stretch:
        """Returns how rotary positions are stretched."""
        return Stretch(
            **{
                field.name: getattr(self, f"rope_{field.name}")
                for field in fields(Stretch)
            }
        )

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence may have; None: no limit."""
        return self.max_positions if self.positions == "learned" else None

    @property
    def tensor_parallel_dims(self) -> tuple[str, ...]:
        """The sizes that the mesh axis tensor must divide; fewer kv heads are
        copied.
        """
        kv = ("num_kv_heads",) * (1 < self.num_kv_heads == self.num_heads)
        return (
            "num_heads",
            *kv,
            "d_ff",
            *("expert_d_ff",) * (self.expert_d_ff > 0),
            "vocab_size",
        )

    @property
    def output_std(self) -> float:
        """Returns the scale of projections into the residual stream (GPT-2: shrunk by
        depth).
        """
        return (
            0.0
            if self.zero_init_outputs
            else self.init_std / (2 * self.num_layers) ** 0.5
        )

    @property
    def group_layers(self) -> int:
        """Returns how many layers repeat as one block: 1 unless their feed-forward
        parts differ.
        """
        if set(self.feed_forward_pattern) == {"sparse"}:
            return 1
        return math.lcm(len(self.feed_forward_pattern), len(self.layer_pattern))

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Returns the numbers of the layers with experts: stats have a row for each."""
        parts, first = self.feed_forward_pattern, self.first_dense_layers
        layers = range(first, self.num_layers) if self.num_experts else ()
        return tuple(
            layer for layer in layers if parts[(layer - first) % len(parts)] == "sparse"
        )

    def layers_on(self, places: int) -> int:
        """Returns the number of layers with which each place of a pipeline has one of
        every kind.
        """
        return self.first_dense_layers + places * math.lcm(
            self.group_layers, len(self.layer_pattern)
        )

    @property
    def expert_width(self) -> int:
        """Returns the width inside an expert."""
        return self.expert_d_ff or self.d_ff

    @property
    def active_d_ff(self) -> int:
        """Returns the feed-forward width that a token passes, of all its experts
        together.
        """
        if not self.num_experts:
            return self.d_ff
        return (self.experts_per_token + self.num_shared_experts) * self.expert_width

    def flops_per_token(self, sequence_length: int, convention: Convention) -> float:
        """Returns model FLOPs per token, forward and backward, by
        `transformer_flops_per_token`.

        Of experts those count that a token goes to.
        """
        names = (*SIZES, "gated", "layer_pattern", "window", "num_experts")
        sizes = {name: getattr(self, name) for name in names} | {
            "d_ff": self.active_d_ff
        }
        if self.num_experts:
            sizes |= {
                "dense_layers": self.num_layers - len(self.sparse_layers),
                "dense_d_ff": self.d_ff,
            }
        return transformer_flops_per_token(
            **sizes, sequence_length=sequence_length, convention=convention
        )

    def choices(self) -> list[str]:
        """Returns which kernels experts use on the mesh in force, and how they exchange
        tokens, and why.
        """
        return (
            explain(self.num_experts, self.experts_per_token)
            if self.num_experts
            else []
        )

    def tiny(self, sequence_length: int) -> dict[str, Any]:
        """Returns the values that change in a tiny variant with every choice kept.

        Query and kv heads keep their kind: as many of each, one kv head, or groups (8
        and 4).
        """
        sizes = dict[str, Any](
            d_model=64, d_ff=96, num_heads=8, head_dim=8, vocab_size=128
        )
        sizes["num_kv_heads"] = {self.num_heads: 8, 1: 1}.get(self.num_kv_heads, 4)
        if self.max_positions:
            sizes["max_positions"] = sequence_length
        if self.loss_chunk:
            sizes["loss_chunk"] = 64  # several chunks on any layout
        if self.window:
            sizes["window"] = min(self.window, max(sequence_length // 4, 1))
        if self.rotary_fraction < 1:
            sizes["rotary_fraction"] = 0.5  # an even number of dims
        sizes |= self._tiny_stretch(
            sequence_length, replace(self, **sizes).rotary_dims // 2
        )
        sizes |= self._tiny_experts() if self.num_experts else {}
        # each kind of layer once
        sizes["layer_pattern"] = tuple(dict.fromkeys(self.layer_pattern))
        # whole patterns on two stages
        return sizes | {"num_layers": replace(self, **sizes).layers_on(2)}

    def _tiny_stretch(self, sequence_length: int, frequencies: int) -> dict[str, Any]:
        """Returns an original length that sequences exceed, and of longrope's factors
        evenly spaced ones.
        """
        if (
            self.rope_scaling not in ("yarn", "longrope", "dynamic")
            or not self.stretch.changes
        ):
            return {}
        values: dict[str, Any] = {
            "rope_original_positions": max(sequence_length // 2, 2)
        }
        for name in ("rope_short_factor", "rope_long_factor"):
            if factors := getattr(self, name):
                step = len(factors) / frequencies
                values[name] = tuple(factors[int(i * step)] for i in range(frequencies))
        return values

    def _tiny_experts(self) -> dict[str, Any]:
        """Returns eight experts or fewer: one, two or all of them a token, in groups if
        there are any.
        """
        E = min(self.num_experts, 8)
        k = (
            E
            if self.experts_per_token == self.num_experts
            else min(self.experts_per_token, 2, E)
        )
        sizes: dict[str, Any] = {"num_experts": E, "experts_per_token": k}
        sizes["first_dense_layers"] = min(self.first_dense_layers, 1)
        sizes["feed_forward_pattern"] = tuple(dict.fromkeys(self.feed_forward_pattern))
        if self.expert_d_ff:
            sizes["expert_d_ff"] = 48
        if self.num_shared_experts:
            sizes["num_shared_experts"] = min(self.num_shared_experts, 2)
        if self.expert_groups:
            E = sizes["num_experts"] = 8 if k < E else E
            groups = (
                4
                if self.expert_groups >= 4 and k <= 2
                else 2
                if self.expert_groups > 1
                else 1
            )
            all_open = self.expert_top_groups == self.expert_groups
            sizes["expert_groups"] = groups
            sizes["expert_top_groups"] = (
                groups if all_open else min(self.expert_top_groups, groups - 1)
            )
        return sizes

    def faults(self) -> Iterator[str]:
        """Yields which values do not go together, each with its cure."""
        if (
            min(self.num_heads, self.num_kv_heads) > 0
            and self.num_heads % self.num_kv_heads
        ):
            yield (
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}; set it to a divisor"
            )
        if self.positions == "learned" and self.max_positions < 1:
            yield "model.max_positions: learned positions need the longest sequence, >= 1"
        turns = self.positions == "rotary" and 0 < self.rotary_fraction <= 1
        if turns and (self.rotary_dims % 2 or self.rotary_dims < 2):
            share = (
                f"model.rotary_fraction={self.rotary_fraction} of "
                if self.rotary_fraction < 1
                else ""
            )
            yield (
                f"{share}model.head_dim={self.head_dim}: rotary positions need an even size, "
                f"here {self.rotary_dims}; change {'either' if share else 'it'}"
            )
        elif turns:
            yield from self.stretch.faults(self.rotary_dims, self.rope_theta)
        pattern = f"model.layer_pattern={','.join(self.layer_pattern)}"
        if "local" in self.layer_pattern and not self.window:
            yield f"{pattern}: local layers need model.window, the tokens that they see (>= 1)"
        elif "local" not in self.layer_pattern:
            for name in ("window", "rope_theta_local"):
                if getattr(self, name):
                    yield (
                        f"model.{name}={getattr(self, name)}: {pattern} has no local layers; set "
                        f"model.layer_pattern (local, or local,global) or model.{name}=0"
                    )
        yield from self._expert_faults()

    def _expert_faults(self) -> Iterator[str]:
        E, k = self.num_experts, self.experts_per_token
        unused = [*EXPERT_FIELDS] if not E else [*self._unused_balance()]
        changed = [n for n in unused if getattr(self, n) != getattr(type(self), n)]
        if changed and not E:
            yield (
                f"model.{changed[0]}={getattr(self, changed[0])} needs experts, and model.num_experts=0 is a "
                f"dense model; set model.num_experts, or leave model.{changed[0]} as it is"
            )
        elif changed:
            yield (
                f"model.{changed[0]}={getattr(self, changed[0])} does nothing with model.balance="
                f"{self.balance}; leave it as it is, or set model.balance"
            )
        if not E:
            return
        if k > E:
            yield f"model.experts_per_token={k} of model.num_experts={E}; set it to at most {E}"
        if self.bias == "all":
            yield "model.bias=all: experts have no biases; set model.bias to none, qkv or attention"
        yield from self._stack_faults()
        groups, top = self.expert_groups, self.expert_top_groups
        if not groups and not top:
            return
        if not groups or E % groups or E // groups < 2:
            yield (
                f"model.expert_groups={groups} for model.num_experts={E}: groups are equal, of two experts "
                f"or more; set a divisor of {E} up to {E // 2}, or expert_groups and expert_top_groups to 0"
            )
        elif not 1 <= top <= groups or top * (E // groups) < k:
            yield (
                f"model.expert_top_groups={top}: {k} experts a token from groups of {E // groups}; set it "
                f"between {-(-k // (E // groups))} and model.expert_groups={groups}"
            )

    def _stack_faults(self) -> Iterator[str]:
        L, first = self.num_layers, self.first_dense_layers
        pattern = f"model.feed_forward_pattern={','.join(self.feed_forward_pattern)}"
        if first >= L:
            yield (
                f"model.first_dense_layers={first} of model.num_layers={L} leaves no layer with experts; set "
                f"it to at most {L - 1}, or model.num_experts=0"
            )
        elif "sparse" not in self.feed_forward_pattern:
            yield f"{pattern} has no layer with experts; add sparse to it, or set model.num_experts=0"
        elif rest := (L - first) % self.group_layers:
            more = " with model.layer_pattern" * (
                self.group_layers > len(self.feed_forward_pattern)
            )
            behind = f" behind model.first_dense_layers={first}" * (first > 0)
            yield (
                f"{pattern}{more} repeats every {self.group_layers} layers, which do not divide the "
                f"{L - first} layers{behind}; set model.num_layers={L - rest + self.group_layers}"
            )

    def _unused_balance(self) -> Iterator[str]:
        if self.balance != "bias":
            yield "balance_rate"
        if self.balance not in ("sequence", "batch"):
            yield "balance_weight"


EXPERT_FIELDS = (  # that a dense model leaves as they are
    "first_dense_layers",
    "feed_forward_pattern",
    "experts_per_token",
    "expert_d_ff",
    "num_shared_experts",
    "scores",
    "normalise_top_k",
    "route_scale",
    "expert_groups",
    "expert_top_groups",
    "balance",
    "balance_rate",
    "balance_weight",
    "router_z_loss",
    "capacity_factor",
)
