"""How fields of a Hugging Face config.json and rotary positions, stretched or not, give
each other.

Both spellings are read: rope_parameters of transformers 5, and rope_theta with
rope_scaling, whose kind may be called `type`. The second is written, with `rope_type`.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxdist.interop.config_rules import KINDS, REQUIRED, Rule, Source, Values
from jaxdist.models.transformer import TransformerConfig

_SCALINGS: dict[str, dict[str, str]] = {  # numbers that each has, besides its factor
    "default": {},
    "linear": {},
    "llama3": {
        "rope_low_factor": "low_freq_factor",
        "rope_high_factor": "high_freq_factor",
    },
    "dynamic": {},
    "yarn": {"rope_beta_slow": "beta_slow", "rope_beta_fast": "beta_fast"},
    "longrope": {},
}
_LISTS = {"rope_short_factor": "short_factor", "rope_long_factor": "long_factor"}
_BEFORE = "original_max_position_embeddings"


def rotary(*, partial: bool = False, theta: float = 10_000.0) -> Rule:
    """Returns the rule of one rotary base for all layers.

    Args:
      partial: a share of a head may turn, and longrope alone stretches it (Phi-3).
      theta: the base where no field says it.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        new = source.take("rope_parameters", None)
        old = source.take("rope_scaling", None)
        key = "rope_scaling" if old else "rope_parameters"
        inner = source.inside(key, old or new or {})
        base = inner.number("rope_theta", source.number("rope_theta", theta))
        share = inner.number(
            "partial_rotary_factor", source.number("partial_rotary_factor", 1.0)
        )
        if share != 1 and not partial:
            source.refuse(
                "partial_rotary_factor",
                share,
                "not built for this architecture; required 1.0",
            )
        scaling = _read_scaling(
            inner, source, ("default", "longrope") if partial else tuple(_SCALINGS)
        )
        source.faults += inner.close()
        return {"rope_theta": float(base), "rotary_fraction": float(share)} | scaling

    def write(values: Values) -> dict[str, Any]:
        share = {"partial_rotary_factor": values["rotary_fraction"]} if partial else {}
        return {"rope_theta": values["rope_theta"]} | _write_scaling(values) | share

    return Rule(read, write)


def gemma_rotary() -> Rule:
    """Returns the rule of Gemma 3's two bases; only global layers are stretched."""

    def read(source: Source, values: Values) -> dict[str, Any]:
        both = source.inside(
            "rope_parameters", source.take("rope_parameters", None) or {}
        )
        full, local = (both.inside(name, both.take(name, None) or {}) for name in KINDS)
        full.config |= source.inside(
            "rope_scaling", source.take("rope_scaling", None) or {}
        ).config
        theta = full.number("rope_theta", source.number("rope_theta", 1_000_000.0))
        base = local.number(
            "rope_theta", source.number("rope_local_base_freq", 10_000.0)
        )
        scaling = _read_scaling(full, source, tuple(_SCALINGS))
        if _read_scaling(local, source, tuple(_SCALINGS)):
            local.refuse(
                "rope_type",
                local.config.get("rope_type"),
                "not built; required 'default'",
            )
        source.faults += full.close() + local.close() + both.close()
        has_local = "local" in values["layer_pattern"]
        return {
            "rope_theta": float(theta),
            "rope_theta_local": float(base) if has_local else 0.0,
        } | scaling

    def write(values: Values) -> dict[str, Any]:
        base = values["rope_theta_local"] or values["rope_theta"]
        fields = {"rope_theta": values["rope_theta"], "rope_local_base_freq": base}
        return fields | _write_scaling(values)

    return Rule(read, write)


def _read_scaling(rope: Source, config: Source, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the values of a rope mapping's type and factors; lengths may stand
    outside, in `config`.
    """
    kind = rope.take("rope_type", rope.take("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3
    if str(kind) not in kinds:
        rope.read |= rope.config.keys()  # what else belongs to it need not be told
        return rope.refuse(
            "rope_type", kind, f"not built; there are {', '.join(kinds)}", {}
        )
    if kind == "default":
        return {}
    values: dict[str, Any] = {"rope_scaling": kind}
    if kind == "dynamic":
        values["rope_original_positions"] = config.count(
            "max_position_embeddings", REQUIRED
        )
    elif kind != "linear":
        values["rope_original_positions"] = _original_positions(rope, config)
    by_length = kind in ("yarn", "longrope") and rope.take("factor", None) is None
    if by_length:
        longest = config.count("max_position_embeddings", REQUIRED)
        values["rope_factor"] = longest / values["rope_original_positions"]
    else:
        values["rope_factor"] = rope.number("factor")
    defaults = TransformerConfig() if kind == "yarn" else None
    for ours, key in _SCALINGS[kind].items():
        values[ours] = rope.number(key, getattr(defaults, ours, REQUIRED)) or getattr(
            defaults, ours, 0
        )
    if kind == "longrope":
        values |= {ours: _numbers(rope, key) for ours, key in _LISTS.items()}
    if kind == "yarn":
        values["rope_truncate"] = rope.number("truncate", True, bool)
    if kind in ("yarn", "longrope"):
        values["rope_attention_factor"] = _read_attention_factor(
            rope, kind, values["rope_factor"]
        )
    return values


def _original_positions(rope: Source, config: Source) -> int:
    """Returns the length before the stretch; one outside the mapping comes first, as in
    transformers 5.
    """
    inner = rope.count(_BEFORE, None)
    return (
        config.count(_BEFORE, None)
        or inner
        or config.count("max_position_embeddings", REQUIRED)
    )


def _read_attention_factor(rope: Source, kind: str, factor: float) -> float:
    """Returns the factor of cos and sin, 0 for the paper's; yarn's may be given by two
    scales of it.
    """
    given = rope.number("attention_factor", None)
    if given == 0:
        rope.refuse("attention_factor", given, "a number > 0 is required")
    keys = ("mscale", "mscale_all_dim") if kind == "yarn" else ()
    scales = [rope.number(key, None) or 0 for key in keys]
    if given is not None or not scales or not all(scales):
        return float(given or 0)
    ours, all_dims = (0.1 * scale * math.log(max(factor, 1)) + 1 for scale in scales)
    return ours / all_dims if factor > 1 else 0.0


def _numbers(rope: Source, key: str) -> tuple[float, ...]:
    """Returns a list of numbers; how many there must be is the transformer's to say."""
    found = rope.take(key)
    if not isinstance(found, list) or not all(
        type(x) in (int, float) and x > 0 for x in found
    ):
        return rope.refuse(key, found, "a list of numbers > 0 is required", ())
    return tuple(map(float, found))


def _write_scaling(values: Values) -> dict[str, Any]:
    """Returns rope_scaling, None where nothing is stretched, and the lengths that
    belong to it.

    longrope's stand outside the mapping, too, and their ratio is its factor: that is
    what Phi-3's class and versions of transformers before 5 read.
    """
    kind, factor, before = (
        values[f"rope_{name}"] for name in ("scaling", "factor", "original_positions")
    )
    if factor == 1 and kind != "longrope":
        return {"rope_scaling": None}
    rope = {"rope_type": kind, "factor": factor} | {
        key: values[x] for x, key in _SCALINGS[kind].items()
    }
    fields: dict[str, Any] = {"rope_scaling": rope}
    if kind == "dynamic":
        return fields | {"max_position_embeddings": before}
    if kind != "linear":
        rope[_BEFORE] = before
    if kind == "longrope":
        rope |= {key: list(values[ours]) for ours, key in _LISTS.items()}
        fields |= {_BEFORE: before, "max_position_embeddings": round(factor * before)}
    if kind == "yarn" and not values["rope_truncate"]:
        rope["truncate"] = False
    if kind in ("yarn", "longrope") and values["rope_attention_factor"]:
        rope["attention_factor"] = values["rope_attention_factor"]
    return fields
