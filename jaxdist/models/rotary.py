"""Frequencies of rotary positions, and how they are stretched to sequences longer than
those trained on.

RoFormer, arXiv:2104.09864. What the kinds of stretch compute is what `transformers`
computes for the `rope_type` of their name.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config.annotations import NonNegativeFloat, PositiveFloat

# The values of `Stretch` that each kind reads; `factor` all of them.
READ = {
    "linear": (),
    "llama3": ("low_factor", "high_factor", "original_positions"),
    "dynamic": ("original_positions",),
    "yarn": (
        "beta_slow",
        "beta_fast",
        "truncate",
        "attention_factor",
        "original_positions",
    ),
    "longrope": (
        "short_factor",
        "long_factor",
        "attention_factor",
        "original_positions",
    ),
}


@dataclass(frozen=True)
class Stretch:
    """How positions are stretched; the fields are `model.rope_*`."""

    scaling: str = "llama3"
    factor: float = 1.0
    original_positions: int = 8192
    low_factor: float = 1.0
    high_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_factor: float = 0.0
    short_factor: Sequence[float] = ()
    long_factor: Sequence[float] = ()

    @property
    def changes(self) -> bool:
        """Returns whether anything is stretched; the lists of longrope do so whatever
        the factor is.
        """
        return self.factor != 1 or self.scaling == "longrope"

    def faults(self, dims: int, theta: float) -> Iterator[str]:
        """Yields what is wrong with the values for heads of which so many dims turn,
        each with its cure.
        """
        kind = f"model.rope_scaling={self.scaling}"
        if self.scaling not in ("yarn", "longrope"):
            if self.attention_factor:
                yield (
                    f"model.rope_attention_factor={self.attention_factor} does nothing with {kind}; "
                    f"leave it as it is, or set model.rope_scaling to yarn or longrope"
                )
        elif self.attention_factor and not self.changes:
            yield (
                f"model.rope_attention_factor={self.attention_factor}: {kind} does nothing with "
                f"model.rope_factor=1; set how much longer sequences are, or leave both out"
            )
        for name in ("short_factor", "long_factor"):
            there = len(getattr(self, name))
            needed = dims // 2 if self.scaling == "longrope" else 0
            if there != needed:
                cure = (
                    f"{kind} needs {needed}, one for each frequency"
                    if needed
                    else f"{kind} has none"
                )
                yield f"model.rope_{name} has {there} numbers: {cure}"
        if not self.changes:
            return
        if "original_positions" in READ[self.scaling] and self.original_positions < 2:
            yield (
                f"model.rope_original_positions={self.original_positions}: {kind} needs the length of the "
                f"sequences before the stretch, >= 2"
            )
        if self.scaling == "yarn" and (
            theta <= 1 or not 0 < self.beta_slow <= self.beta_fast
        ):
            yield (
                f"model.rope_beta_slow={self.beta_slow}, model.rope_beta_fast={self.beta_fast}, "
                f"model.rope_theta={theta}: {kind} needs 0 < beta_slow <= beta_fast and theta > 1"
            )
        if self.scaling == "dynamic" and (dims < 4 or self.factor < 1):
            yield (
                f"model.rope_factor={self.factor} with {dims} rotary dims: {kind} needs a factor >= 1 and "
                f"4 dims or more"
            )


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
    def stretch(self) -> Stretch:
        """How rotary positions are stretched."""
        names = [field.name for field in fields(Stretch)]
        return Stretch(**{name: getattr(self, f"rope_{name}") for name in names})

    def tiny_stretch(self, sequence_length: int, frequencies: int) -> dict[str, Any]:
        """Lists the options of a tiny variant: an original length that sequences
        exceed, and of longrope's factors evenly spaced ones.
        """
        depends_on_length = self.rope_scaling in ("yarn", "longrope", "dynamic")
        if not depends_on_length or not self.stretch.changes:
            return {}
        values: dict[str, Any] = {
            "rope_original_positions": max(sequence_length // 2, 2)
        }
        for name in ("rope_short_factor", "rope_long_factor"):
            if factors := getattr(self, name):
                step = len(factors) / frequencies
                values[name] = tuple(factors[int(i * step)] for i in range(frequencies))
        return values


class Rotary(NamedTuple):
    """What turns queries and keys."""

    frequencies: jax.Array  # [R/2] in radians per position
    # factor of cos and sin: attention logits are multiplied by its square
    scale: float = 1.0


def rotary_frequencies(
    dims: int, theta: float, length: int = 0, stretch: Stretch = Stretch()
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
    """
    s = stretch
    exponents = jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
    if s.scaling == "dynamic" and s.changes and length > s.original_positions:
        theta *= (s.factor * length / s.original_positions - (s.factor - 1)) ** (
            dims / (dims - 2)
        )
    frequencies = theta**-exponents
    if not s.changes or s.scaling == "dynamic":
        return Rotary(frequencies)
    if s.scaling == "linear":
        return Rotary(frequencies / s.factor)
    if s.scaling == "longrope":
        factors = s.long_factor if length > s.original_positions else s.short_factor
        return Rotary(
            frequencies / jnp.asarray(factors, jnp.float32), _attention_factor(s)
        )
    if s.scaling == "yarn":
        return Rotary(_yarn(frequencies, dims, theta, s), _attention_factor(s))
    turns = s.original_positions * frequencies / (2 * math.pi)
    smooth = jnp.clip((turns - s.low_factor) / (s.high_factor - s.low_factor), 0, 1)
    return Rotary(frequencies * (smooth + (1 - smooth) / s.factor))


def _yarn(frequencies: jax.Array, dims: int, theta: float, s: Stretch) -> jax.Array:
    """Returns frequencies stretched by parts (YaRN, arXiv:2309.00071, section 3.2).

    Those that turn more than beta_fast times within original_positions stay, those that
    turn less than beta_slow times are divided by factor; between them is a ramp, linear
    in the dim's number (in the paper: in the turns), whose ends are rounded outwards
    with `truncate`.
    """

    def dim_of(turns: float) -> float:
        return (
            dims
            * math.log(s.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = dim_of(s.beta_fast)
    high = dim_of(s.beta_slow)
    if s.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    high += 0.001 * (low == high)
    ramp = jnp.clip(
        (jnp.arange(dims // 2, dtype=jnp.float32) - low) / (high - low), 0, 1
    )
    return frequencies * (1 - ramp) + frequencies / s.factor * ramp


def _attention_factor(s: Stretch) -> float:
    """Returns the scale of cos and sin, where none is set that of the papers."""
    if s.attention_factor or s.factor <= 1:
        return s.attention_factor or 1.0
    if s.scaling == "yarn":
        return 0.1 * math.log(s.factor) + 1
    return math.sqrt(1 + math.log(s.factor) / math.log(s.original_positions))
