"""The values of the one transformer: which model it is, and what is wrong with a choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxdist.telemetry.flops import Convention, transformer_flops_per_token

SIZES = ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
Kind = Literal["global", "local"]  # of layer: it sees all tokens before, or the last `window` of them


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
    rotary_fraction: float = 1.0  # share of head_dim that turns, its first dims, (0, 1] (Phi: 0.4)
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_theta_local: float = 0.0  # base in local layers (Gemma 3); 0 = rope_theta
    rope_factor: float = 1.0  # stretch of the positions, but in local layers with their own base; 1 = none
    rope_scaling: Literal["llama3", "linear"] = "llama3"  # what it stretches: long wavelengths, or all
    rope_low_factor: float = 1.0  # llama3: turns within the original length below which all is stretched
    rope_high_factor: float = 4.0  # llama3: turns above which nothing is
    rope_original_positions: int = 8192  # llama3: sequence length before the stretch
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"  # Gemma: scale is 1 + parameter
    norm_position: Literal["pre", "post", "both"] = "pre"  # of each part; OLMo 2: post; Gemma 2, 3: both
    norm_eps: float = 1e-5  # added to the mean square
    activation: Literal["silu", "gelu", "gelu_exact", "relu"] = "silu"  # of the feed-forward part
    gated: bool = True  # activation(gate) * up (SwiGLU with silu), or activation(up)
    bias: Literal["none", "qkv", "attention", "all"] = "none"  # Qwen 2: qkv; GPT-2: all
    qk_norm: Literal["none", "head", "projection"] = "none"  # of q and k; Qwen 3: head; OLMo 2: projection
    attention_scale: float = 0.0  # factor of the logits, e.g. 256 ** -0.5; 0 = head_dim ** -0.5
    attention_softcap: float = 0.0  # attention logits = cap * tanh(logits / cap); 0 = none (Gemma 2: 50)
    layer_pattern: tuple[Kind, ...] = ("global",)  # repeated over the depth, e.g. local,global (Gemma 2)
    window: int = 0  # tokens that a local layer sees, its own included; 0 = no local layers
    embedding_scale: float = 1.0  # factor of the embeddings, rounded to their dtype (Gemma: sqrt d_model)
    tie_embeddings: bool = False  # the head is the embedding table
    dropout: float = 0.0  # share dropped of what attention and feed-forward add, [0, 1)
    z_loss: float = 0.0  # weight of log(Z)^2, e.g. 1e-4
    logit_softcap: float = 0.0  # logits = cap * tanh(logits / cap); 0 = none
    loss_chunk: int = 1024  # tokens per device scored at once; 0 = all
    init_std: float = 0.02  # of embeddings and kernels
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
        sizes: dict[str, Any] = {
            "num_layers": 2 * len(pattern),  # whole patterns on two stages
            "d_model": 64,
            "d_ff": 96,
            "num_heads": 8,
            "num_kv_heads": {self.num_heads: 8, 1: 1}.get(self.num_kv_heads, 4),
            "head_dim": 8,
            "vocab_size": 128,
        }
        if self.max_positions:
            sizes["max_positions"] = sequence_length
        if self.loss_chunk:
            sizes["loss_chunk"] = 64  # several chunks on any layout
        if self.window:
            sizes |= {"layer_pattern": pattern, "window": min(self.window, max(sequence_length // 4, 1))}
        if self.rotary_fraction < 1:
            sizes["rotary_fraction"] = 0.5  # an even number of dims
        return sizes

    def faults(self) -> list[str]:
        """Returns what is wrong with the values, each with its cure."""
        return [*self._size_faults(), *self._range_faults(), *self._rotary_faults(), *self._layer_faults()]

    def _size_faults(self) -> Iterator[str]:
        wrong = [name for name in SIZES if getattr(self, name) < 1]
        yield from (f"model.{name}={getattr(self, name)}: must be >= 1" for name in wrong)
        if not wrong and self.num_heads % self.num_kv_heads:
            yield (
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}; set it to a divisor"
            )
        if self.positions == "learned" and self.max_positions < 1:
            yield "model.max_positions: learned positions need the longest sequence, >= 1"

    def _range_faults(self) -> Iterator[str]:
        if not 0 <= self.dropout < 1:
            yield f"model.dropout={self.dropout}: must be in [0, 1)"
        for name in (
            "z_loss",
            "logit_softcap",
            "loss_chunk",
            "init_std",
            "attention_scale",
            "attention_softcap",
            "rope_theta_local",
            "window",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"model.{name}={getattr(self, name)}: must be >= 0"
        for name in ("rope_theta", "rope_factor", "norm_eps", "embedding_scale"):
            if not 0 < getattr(self, name) < math.inf:
                yield f"model.{name}={getattr(self, name)}: must be > 0"

    def _rotary_faults(self) -> Iterator[str]:
        if self.positions != "rotary":
            return
        if not 0 < self.rotary_fraction <= 1:
            yield f"model.rotary_fraction={self.rotary_fraction}: must be in (0, 1]; 1 turns whole heads"
        elif self.rotary_dims % 2 or self.rotary_dims < 2:
            share = f"model.rotary_fraction={self.rotary_fraction} of " if self.rotary_fraction < 1 else ""
            yield (
                f"{share}model.head_dim={self.head_dim}: rotary positions need an even size, "
                f"here {self.rotary_dims}; change {'either' if share else 'it'}"
            )

    def _layer_faults(self) -> Iterator[str]:
        given = f"model.layer_pattern={','.join(self.layer_pattern)}"
        if not self.layer_pattern or set(self.layer_pattern) - set(get_args(Kind)):
            empty = " is empty" * (not self.layer_pattern)
            yield f"{given}{empty}: its entries must be global or local, at least one"
        elif "local" in self.layer_pattern and not self.window:
            yield f"{given}: local layers need model.window, the tokens that they see (>= 1)"
        elif "local" not in self.layer_pattern:
            for name in ("window", "rope_theta_local"):
                if getattr(self, name):
                    yield (
                        f"model.{name}={getattr(self, name)}: {given} has no local layers; set "
                        f"model.layer_pattern (local, or local,global) or model.{name}=0"
                    )
