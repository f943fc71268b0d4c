"""Frequencies of rotary positions, and how they are stretched to sequences longer than
those trained on.

RoFormer, arXiv:2104.09864. What the kinds of stretch compute is what `transformers`
computes for the `rope_type` of their name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config.annotations import NonNegativeFloat, PositiveFloat

# The options that each kind of stretch reads; `rope_factor` all of them.
READ = {
    "linear": (),
    "llama3": ("rope_low_factor", "rope_high_factor", "rope_original_positions"),
    "dynamic": ("rope_original_positions",),
    "yarn": (
        "rope_beta_slow",
        "rope_beta_fast",
        "rope_truncate",
        "rope_attention_factor",
        "rope_original_positions",
    ),
    "longrope": (
        "rope_short_factor",
        "rope_long_factor",
        "rope_attention_factor",
        "rope_original_positions",
    ),
}


@dataclass(frozen=True)
class RotaryConfig:
    """Options of positions."""

    positions: Literal["rotary", "learned"] = "rotary"  # how a token knows its place
    # rows of the learned table = longest sequence; unused with rotary
    max_positions: int = 0
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
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

    @property
    def stretches(self) -> bool:
        """Whether anything is stretched; the lists of longrope do so whatever the
        factor is.
        """
        return self.rope_factor != 1 or self.rope_scaling == "longrope"

    def stretch_faults(self, dims: int) -> Iterator[str]:
        """Yields what is wrong with the stretch of heads of which so many dims turn,
        each with its cure.
        """
        scaling = self.rope_scaling
        kind = f"model.rope_scaling={scaling}"
        if scaling not in ("yarn", "longrope"):
            if self.rope_attention_factor:
                yield (
                    f"model.rope_attention_factor={self.rope_attention_factor} does nothing with {kind}; "
                    f"leave it as it is, or set model.rope_scaling to yarn or longrope"
                )
        elif self.rope_attention_factor and not self.stretches:
            yield (
                f"model.rope_attention_factor={self.rope_attention_factor}: {kind} does nothing with "
                f"model.rope_factor=1; set how much longer sequences are, or leave both out"
            )
        needed = 0
        cure = f"{kind} has none"
        if scaling == "longrope":
            needed = dims // 2
            cure = f"{kind} needs {needed}, one for each frequency"
        for name in ("rope_short_factor", "rope_long_factor"):
            there = len(getattr(self, name))
            if there != needed:
                yield f"model.{name} has {there} numbers: {cure}"
        if not self.stretches:
            return
        before = self.rope_original_positions
        if "rope_original_positions" in READ[scaling] and before < 2:
            yield (
                f"model.rope_original_positions={before}: {kind} needs the length of the "
                f"sequences before the stretch, >= 2"
            )
        slow = self.rope_beta_slow
        fast = self.rope_beta_fast
        theta = self.rope_theta
        if scaling == "yarn" and (theta <= 1 or not 0 < slow <= fast):
            yield (
                f"model.rope_beta_slow={slow}, model.rope_beta_fast={fast}, "
                f"model.rope_theta={theta}: {kind} needs 0 < beta_slow <= beta_fast and theta > 1"
            )
        if scaling == "dynamic" and (dims < 4 or self.rope_factor < 1):
            yield (
                f"model.rope_factor={self.rope_factor} with {dims} rotary dims: {kind} needs a factor >= 1 and "
                f"4 dims or more"
            )

    def tiny_stretch(self, sequence_length: int, frequencies: int) -> dict[str, Any]:
        """Lists the options of a tiny variant: an original length that sequences
        exceed, and of longrope's factors evenly spaced ones.
        """
        depends_on_length = self.rope_scaling in ("yarn", "longrope", "dynamic")
        if not depends_on_length or not self.stretches:
            return {}
        values: dict[str, Any] = {
            "rope_original_positions": max(sequence_length // 2, 2)
        }
        for name in ("rope_short_factor", "rope_long_factor"):
            factors = getattr(self, name)
            if factors:
                step = len(factors) / frequencies
                values[name] = tuple(factors[int(i * step)] for i in range(frequencies))
        return values


class Rotary(NamedTuple):
    """What turns queries and keys."""

    frequencies: jax.Array  # [R/2] in radians per position
    # factor of cos and sin: attention logits are multiplied by its square
    scale: float = 1.0


def rotary_frequencies(
    dims: int, theta: float, length: int = 0, config: RotaryConfig = RotaryConfig()
) -> Rotary:
    """Returns the frequencies of R = `dims` rotary dims, base `theta`, and the scale of
    their tables.

    linear: all are divided by factor (arXiv:2306.15595). llama3: those of wavelengths
    beyond original_positions / low_factor are, those under original_positions /
    high_factor stay, the ones between are interpolated (Llama 3.1, arXiv:2407.21783).
    yarn: see `_yarn`. longrope: frequency i is divided by long_factor[i] in sequences
    longer than original_positions, else by short_factor[i] (arXiv:2402.13753). dynamic:
    the base grows with the length of longer ones ("NTK-aware" scaling made dynamic:
    arXiv:2309.00071, appendix B).

    Args:
      length: of the sequences, in tokens: a program has one. Only longrope and dynamic
        depend on it.
      config: how they are stretched, by default not at all.
    """
    c = config
    exponents = jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
    if (
        c.rope_scaling == "dynamic"
        and c.stretches
        and length > c.rope_original_positions
    ):
        theta *= (
            c.rope_factor * length / c.rope_original_positions - (c.rope_factor - 1)
        ) ** (dims / (dims - 2))
    frequencies = theta**-exponents
    if not c.stretches or c.rope_scaling == "dynamic":
        return Rotary(frequencies)
    if c.rope_scaling == "linear":
        return Rotary(frequencies / c.rope_factor)
    if c.rope_scaling == "longrope":
        factors = (
            c.rope_long_factor
            if length > c.rope_original_positions
            else c.rope_short_factor
        )
        return Rotary(
            frequencies / jnp.asarray(factors, jnp.float32), _attention_factor(c)
        )
    if c.rope_scaling == "yarn":
        return Rotary(_yarn(frequencies, dims, theta, c), _attention_factor(c))
    turns = c.rope_original_positions * frequencies / (2 * math.pi)
    smooth = jnp.clip(
        (turns - c.rope_low_factor) / (c.rope_high_factor - c.rope_low_factor), 0, 1
    )
    return Rotary(frequencies * (smooth + (1 - smooth) / c.rope_factor))


def _yarn(
    frequencies: jax.Array, dims: int, theta: float, c: RotaryConfig
) -> jax.Array:
    """Returns frequencies stretched by parts (YaRN, arXiv:2309.00071, section 3.2).

    Those that turn more than beta_fast times within original_positions stay, those that
    turn less than beta_slow times are divided by factor; between them is a ramp, linear
    in the dim's number (in the paper: in the turns), whose ends are rounded outwards
    with `truncate`.
    """

    def dim_of(turns: float) -> float:
        return (
            dims
            * math.log(c.rope_original_positions / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = dim_of(c.rope_beta_fast)
    high = dim_of(c.rope_beta_slow)
    if c.rope_truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = jnp.clip(
        (jnp.arange(dims // 2, dtype=jnp.float32) - low) / (high - low), 0, 1
    )
    return frequencies * (1 - ramp) + frequencies / c.rope_factor * ramp


def _attention_factor(c: RotaryConfig) -> float:
    """Returns the scale of cos and sin, where none is set that of the papers."""
    if c.rope_attention_factor or c.rope_factor <= 1:
        return c.rope_attention_factor or 1.0
    if c.rope_scaling == "yarn":
        return 0.1 * math.log(c.rope_factor) + 1
    return math.sqrt(1 + math.log(c.rope_factor) / math.log(c.rope_original_positions))
