"""Rotary positions (RoFormer, arXiv:2104.09864): frequencies, and how they stretch.

A stretch adapts a model to sequences longer than those that it was trained on. Each
kind computes the same as `transformers` does for the `rope_type` of its name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config.annotations import NonNegativeFloat, PositiveFloat

# The options that each kind of stretch reads; all of them read `rope_factor`.
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

    positions: Literal["rotary", "learned"] = "rotary"  # encoding of positions
    # rows of the learned table = longest sequence; unused with rotary
    max_positions: int = 0
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
    # factor by which positions are stretched; local layers with a base of their own
    # are not
    rope_factor: PositiveFloat = 1.0
    # wavelengths that are stretched: long ones (llama3, yarn); all (linear); each by a
    # factor of its own (longrope); all, as the length needs (dynamic)
    rope_scaling: Literal["llama3", "linear", "yarn", "longrope", "dynamic"] = "llama3"
    # llama3: turns within the original length below which a frequency is fully
    # stretched
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0  # llama3: turns above which it is not stretched
    # all but linear, and rope_query_growth: sequence length before the stretch
    rope_original_positions: int = 8192
    # yarn: turns within the original length below which a frequency is fully stretched
    rope_beta_slow: float = 1.0
    rope_beta_fast: float = 32.0  # yarn: turns above which it is not stretched
    # yarn: whether the ends of the ramp are whole dims (gpt-oss: false)
    rope_truncate: bool = True
    # yarn, longrope: factor of cos and sin; 0 = the paper's
    rope_attention_factor: NonNegativeFloat = 0.0
    # longrope: factor of each wavelength in sequences up to the original length
    rope_short_factor: tuple[PositiveFloat, ...] = ()
    # longrope: factor of each wavelength in longer sequences
    rope_long_factor: tuple[PositiveFloat, ...] = ()
    # growth g of rotated queries beyond the original length O: at position p they are
    # multiplied by 1 + g log(1 + floor(p / O)); 0 = none (Ministral 3: 0.1)
    rope_query_growth: NonNegativeFloat = 0.0

    @property
    def stretches(self) -> bool:
        """Whether positions are stretched; longrope's lists need no factor for that."""
        return self.rope_factor != 1 or self.rope_scaling == "longrope"

    @property
    def read_names(self) -> set[str]:
        """The options that have an effect, besides the base of the frequencies."""
        names = set[str]()
        if self.stretches:
            names |= {"rope_factor", "rope_scaling", *READ[self.rope_scaling]}
        if self.rope_query_growth:
            names |= {"rope_query_growth", "rope_original_positions"}
        return names

    def stretch_faults(self, dims: int) -> Iterator[str]:
        """Yields a message for each conflict of the stretch's options, with its fix.

        Args:
          dims: number of rotated dims in a head.
        """
        scaling = self.rope_scaling
        kind = f"model.rope_scaling={scaling}"
        yield from self._attention_factor_faults(kind)
        required = 0
        rule = f"{kind} reads none; leave it empty"
        if scaling == "longrope":
            required = dims // 2
            rule = f"{kind} needs {required}, one for each frequency"
        for name in ("rope_short_factor", "rope_long_factor"):
            count = len(getattr(self, name))
            if count != required:
                yield f"model.{name} has {count} numbers: {rule}"
        original = self.rope_original_positions
        reader = ""
        if self.rope_query_growth:
            reader = f"model.rope_query_growth={self.rope_query_growth}"
        if self.stretches and "rope_original_positions" in READ[scaling]:
            reader = kind
        if reader and original < 2:
            yield (
                f"model.rope_original_positions={original}: {reader} needs the length of the "
                f"sequences before the stretch, >= 2"
            )
        if not self.stretches:
            return
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

    def _attention_factor_faults(self, kind: str) -> Iterator[str]:
        if not self.rope_attention_factor:
            return
        setting = f"model.rope_attention_factor={self.rope_attention_factor}"
        if self.rope_scaling not in ("yarn", "longrope"):
            yield (
                f"{setting} does nothing with {kind}; leave it as it is, or set "
                f"model.rope_scaling to yarn or longrope"
            )
        elif not self.stretches:
            yield (
                f"{setting}: {kind} does nothing with model.rope_factor=1; set how much "
                f"longer sequences are, or leave both out"
            )

    def tiny_stretch(self, sequence_length: int, frequencies: int) -> dict[str, Any]:
        """Lists the stretch's options in a tiny variant.

        Its sequences exceed its original length. The factors of longrope are a
        selection at even distances.

        Args:
          sequence_length: in tokens.
          frequencies: number of frequencies of a head there.
        """
        depends_on_length = self.rope_scaling in ("yarn", "longrope", "dynamic")
        depends_on_length = depends_on_length and self.stretches
        if not depends_on_length and not self.rope_query_growth:
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


def query_growth(positions_BS: jax.Array, config: RotaryConfig) -> jax.Array:
    """Computes the factor of queries at each position, [B, S, 1, 1] in float32.

    It makes attention to many tokens as sharp as to few (Llama 4's temperature). It is
    1 up to the original length.
    """
    lengths = positions_BS // config.rope_original_positions
    growth = config.rope_query_growth * jnp.log1p(lengths.astype(jnp.float32))
    return 1 + growth[:, :, None, None]


class Rotary(NamedTuple):
    """The rotation of queries and keys."""

    frequencies: jax.Array  # [R/2] in radians per position
    # factor of cos and sin; it multiplies attention logits by its square
    scale: float = 1.0


def rotary_frequencies(
    dims: int, theta: float, length: int = 0, config: RotaryConfig = RotaryConfig()
) -> Rotary:
    """Computes the frequencies of rotary positions and the scale of their tables.

    The kinds of `rope_scaling` stretch them so (names without `rope_`):

    - linear: all frequencies are divided by factor (arXiv:2306.15595).
    - llama3: wavelengths above original_positions / low_factor are stretched, those
      below original_positions / high_factor are not, those between are interpolated
      (Llama 3.1, arXiv:2407.21783).
    - yarn: see `_yarn`.
    - longrope: frequency i is divided by long_factor[i] if the sequences are longer
      than original_positions, otherwise by short_factor[i] (arXiv:2402.13753).
    - dynamic: the base grows with the length of sequences above original_positions
      (dynamic "NTK-aware" scaling, arXiv:2309.00071, appendix B).

    Args:
      dims: number of rotated dims R of a head.
      theta: base of the frequencies.
      length: length of the sequences, in tokens. A program has one length. Only longrope
        and dynamic depend on it.
      config: options of the stretch; the default is no stretch.
    """
    c = config
    is_longer = length > c.rope_original_positions
    exponents = jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
    if c.rope_scaling == "dynamic" and c.stretches and is_longer:
        stretch = c.rope_factor * length / c.rope_original_positions
        theta *= (stretch - (c.rope_factor - 1)) ** (dims / (dims - 2))
    frequencies = theta**-exponents
    if not c.stretches or c.rope_scaling == "dynamic":
        return Rotary(frequencies)
    if c.rope_scaling == "linear":
        return Rotary(frequencies / c.rope_factor)
    if c.rope_scaling == "longrope":
        factors = c.rope_long_factor if is_longer else c.rope_short_factor
        stretched = frequencies / jnp.asarray(factors, jnp.float32)
        return Rotary(stretched, _attention_factor(c))
    if c.rope_scaling == "yarn":
        return Rotary(_yarn(frequencies, dims, theta, c), _attention_factor(c))
    turns = c.rope_original_positions * frequencies / (2 * math.pi)
    kept = jnp.clip(
        (turns - c.rope_low_factor) / (c.rope_high_factor - c.rope_low_factor), 0, 1
    )
    return Rotary(frequencies * (kept + (1 - kept) / c.rope_factor))


def _yarn(
    frequencies: jax.Array, dims: int, theta: float, c: RotaryConfig
) -> jax.Array:
    """Stretches frequencies by parts (YaRN, arXiv:2309.00071, section 3.2).

    Frequencies of more than beta_fast turns within original_positions stay as they are.
    Those of fewer than beta_slow turns are divided by factor. Between them is a ramp,
    linear in the dim's number (in the paper: in the turns). With `truncate` the ends of
    the ramp are rounded outwards.
    """

    def dim_with(turns: float) -> float:
        """Computes the dim, a fraction, that makes this number of turns."""
        wavelength = c.rope_original_positions / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(theta))

    low = dim_with(c.rope_beta_fast)
    high = dim_with(c.rope_beta_slow)
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
    """Computes the scale of cos and sin; by default that of the papers."""
    if c.rope_attention_factor:
        return c.rope_attention_factor
    if c.rope_factor <= 1:
        return 1.0
    if c.rope_scaling == "yarn":
        return 0.1 * math.log(c.rope_factor) + 1
    return math.sqrt(1 + math.log(c.rope_factor) / math.log(c.rope_original_positions))
