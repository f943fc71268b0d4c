"""The values of the one transformer: which model it is, and what is wrong with a choice."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len

from jaxdist.config.annotations import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share
from jaxdist.telemetry.flops import Convention, transformer_flops_per_token

SIZES = ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
Kind = Literal["global", "local"]  # of layer: it sees all tokens before, or the last `window` of them


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
    max_positions: int = 0  # rows of the learned table = longest sequence; unused with rotary
    # share of head_dim that turns, its first dims; 1 = whole heads (Phi: 0.4)
    rotary_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
    rope_theta_local: NonNegativeFloat = 0.0  # base in local layers (Gemma 3); 0 = rope_theta
    rope_factor: PositiveFloat = 1.0  # stretch of positions, but in local layers with their own base
    rope_scaling: Literal["llama3", "linear"] = "llama3"  # what it stretches: long wavelengths, or all
    rope_low_factor: float = 1.0  # llama3: turns within the original length below which all is stretched
    rope_high_factor: float = 4.0  # llama3: turns above which nothing is
    rope_original_positions: int = 8192  # llama3: sequence length before the stretch
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"  # Gemma: scale is 1 + parameter
    norm_position: Literal["pre", "post", "both"] = "pre"  # of each part; OLMo 2: post; Gemma 2, 3: both
    norm_eps: PositiveFloat = 1e-5  # added to the mean square
    activation: Literal["silu", "gelu", "gelu_exact", "relu"] = "silu"  # of the feed-forward part
    gated: bool = True  # activation(gate) * up (SwiGLU with silu), or activation(up)
    bias: Literal["none", "qkv", "attention", "all"] = "none"  # Qwen 2: qkv; GPT-2: all
    qk_norm: Literal["none", "head", "projection"] = "none"  # of q and k; Qwen 3: head; OLMo 2: projection
    attention_scale: NonNegativeFloat = 0.0  # factor of the logits, e.g. 256 ** -0.5; 0 = head_dim ** -0.5
    attention_softcap: NonNegativeFloat = 0.0  # logits = cap * tanh(logits / cap); 0 = none (Gemma 2: 50)
    # repeated over the depth, e.g. local,global (Gemma 2)
    layer_pattern: Annotated[tuple[Kind, ...], Len(1)] = ("global",)
    window: NonNegativeInt = 0  # tokens that a local layer sees, its own included; 0 = no local layers
    embedding_scale: PositiveFloat = 1.0  # of the embeddings, rounded to their dtype (Gemma: sqrt d_model)
    tie_embeddings: bool = False  # the head is the embedding table
    dropout: Share = 0.0  # dropped of what attention and feed-forward add
    z_loss: NonNegativeFloat = 0.0  # weight of log(Z)^2, e.g. 1e-4
    logit_softcap: NonNegativeFloat = 0.0  # logits = cap * tanh(logits / cap); 0 = none
    loss_chunk: NonNegativeInt = 1024  # tokens per device scored at once; 0 = all
    init_std: NonNegativeFloat = 0.02  # of embeddings and kernels
    zero_init_outputs: bool = False  # blocks start as identity: attention and mlp outputs at 0

    @property
    def rotary_dims(self) -> int:
        """Returns how many dims of a head turn."""
        return round(self.rotary_fraction * self.head_dim)

    @property
    def max_length(self) -> int | None:
        """The most tokens that a sequence may have; None: no limit."""
        return self.max_positions if self.positions == "learned" else None

    @property
    def tensor_parallel_dims(self) -> tuple[str, ...]:
        """The sizes that the mesh axis tensor must divide; fewer kv heads are copied."""
        kv = ("num_kv_heads",) * (1 < self.num_kv_heads == self.num_heads)
        return ("num_heads", *kv, "d_ff", "vocab_size")

    def flops_per_token(self, sequence_length: int, convention: Convention) -> float:
        """Returns model FLOPs per token, forward and backward, by `transformer_flops_per_token`."""
        sizes = {name: getattr(self, name) for name in (*SIZES, "gated", "layer_pattern", "window")}
        return transformer_flops_per_token(**sizes, sequence_length=sequence_length, convention=convention)

    def tiny(self, sequence_length: int) -> dict[str, Any]:
        """Returns the values that change in a tiny variant with every choice kept.

        Query and kv heads keep their kind: as many of each, one kv head, or groups (8 and 4).
        """
        pattern = tuple(dict.fromkeys(self.layer_pattern))  # each kind of layer once
        layers = 2 * len(pattern)  # whole patterns on two stages
        sizes = dict[str, Any](
            num_layers=layers, d_model=64, d_ff=96, num_heads=8, head_dim=8, vocab_size=128
        )
        sizes["num_kv_heads"] = {self.num_heads: 8, 1: 1}.get(self.num_kv_heads, 4)
        if self.max_positions:
            sizes["max_positions"] = sequence_length
        if self.loss_chunk:
            sizes["loss_chunk"] = 64  # several chunks on any layout
        if self.window:
            sizes |= {"layer_pattern": pattern, "window": min(self.window, max(sequence_length // 4, 1))}
        if self.rotary_fraction < 1:
            sizes["rotary_fraction"] = 0.5  # an even number of dims
        return sizes

    def faults(self) -> Iterator[str]:
        """Yields which values do not go together, each with its cure."""
        if min(self.num_heads, self.num_kv_heads) > 0 and self.num_heads % self.num_kv_heads:
            yield (
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}; set it to a divisor"
            )
        if self.positions == "learned" and self.max_positions < 1:
            yield "model.max_positions: learned positions need the longest sequence, >= 1"
        turns = self.positions == "rotary" and 0 < self.rotary_fraction <= 1
        if turns and (self.rotary_dims % 2 or self.rotary_dims < 2):
            share = f"model.rotary_fraction={self.rotary_fraction} of " if self.rotary_fraction < 1 else ""
            yield (
                f"{share}model.head_dim={self.head_dim}: rotary positions need an even size, "
                f"here {self.rotary_dims}; change {'either' if share else 'it'}"
            )
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
