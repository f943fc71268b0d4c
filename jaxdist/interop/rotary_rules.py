"""Rules that convert config.json's fields about rotary positions; see `config_rules`.

Two spellings are read: rope_parameters of transformers 5, and rope_theta with
rope_scaling. The second one is written. The kind of scaling may be called `type` or
`rope_type`; `rope_type` is written.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxdist.interop.config_rules import KINDS, REQUIRED, Rule, Source, Values
from jaxdist.models.transformer_config import TransformerConfig

# for each kind of scaling its numbers besides the factor: model value -> field
SCALINGS: dict[str, dict[str, str]] = {
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
_ORIGINAL_POSITIONS = "original_max_position_embeddings"


def rotary(
    *,
    partial: bool = False,
    theta: float = 10_000.0,
    fraction: float = 1.0,
    kinds: Sequence[str] = (),
) -> Rule:
    """Makes the rule for one rotary base in all layers.

    Args:
      partial: whether only a fraction of a head may rotate.
      theta: the base if no field has it.
      fraction: the rotated fraction if no field has it.
      kinds: supported kinds of scaling; empty: all, or with `partial` longrope only
        (Phi-3).
    """
    kinds = kinds or (("default", "longrope") if partial else tuple(SCALINGS))
    default_fraction = fraction

    def read(source: Source, _: Values) -> dict[str, Any]:
        parameters = source.take("rope_parameters", None)
        scaling = source.take("rope_scaling", None)
        if scaling:
            rope = source.inside("rope_scaling", scaling)
        else:
            rope = source.inside("rope_parameters", parameters or {})
        base = rope.number("rope_theta", source.number("rope_theta", theta))
        fraction = rope.number(
            "partial_rotary_factor",
            source.number("partial_rotary_factor", default_fraction),
        )
        if fraction != 1 and not partial:
            source.refuse(
                "partial_rotary_factor",
                fraction,
                "not built for this architecture; required 1.0",
            )
        values = _read_scaling(rope, source, kinds)
        source.faults += rope.close()
        values["rope_theta"] = float(base)
        values["rotary_fraction"] = float(fraction)
        return values

    def write(values: Values) -> dict[str, Any]:
        fields = {"rope_theta": values["rope_theta"]} | _write_scaling(values)
        if partial:
            fields["partial_rotary_factor"] = values["rotary_fraction"]
        return fields

    return Rule(read, write)


def gemma_rotary() -> Rule:
    """Makes the rule for Gemma 3's two bases; only global layers may be scaled."""

    def read(source: Source, values: Values) -> dict[str, Any]:
        parameters, full, local = _of_kinds(source)
        theta = full.number("rope_theta", source.number("rope_theta", 1_000_000.0))
        local_theta = local.number(
            "rope_theta", source.number("rope_local_base_freq", 10_000.0)
        )
        scaling_values = _read_global_scaling(source, parameters, full, local)
        has_local = "local" in values["layer_pattern"]
        return {
            "rope_theta": float(theta),
            "rope_theta_local": float(local_theta) if has_local else 0.0,
        } | scaling_values

    def write(values: Values) -> dict[str, Any]:
        local_theta = values["rope_theta_local"] or values["rope_theta"]
        return {
            "rope_theta": values["rope_theta"],
            "rope_local_base_freq": local_theta,
        } | _write_scaling(values)

    return Rule(read, write)


def olmo_rotary() -> Rule:
    """Makes the rule for OLMo 3: one base, and only global layers may be scaled.

    transformers 5 has mappings for each kind of layer in rope_parameters. Version 4 has
    rope_theta and rope_scaling. Both are written, because version 5 forgets rope_theta
    in local layers.
    """
    theta = 500_000.0

    def read(source: Source, values: Values) -> dict[str, Any]:
        parameters, full, local = _of_kinds(source)
        has_local = "local" in values["layer_pattern"]
        whole = source.number("rope_theta", theta)
        base = full.number("rope_theta", whole)
        local_base = local.number("rope_theta", theta)
        if has_local and whole != theta and "rope_theta" not in local.config:
            source.refuse(
                "rope_theta",
                whole,
                "versions of transformers differ in local layers; write a base for each "
                "kind of layer in rope_parameters",
            )
        scaling_values = _read_global_scaling(source, parameters, full, local)
        return {
            "rope_theta": float(base),
            "rope_theta_local": float(local_base) if has_local else 0.0,
        } | scaling_values

    def write(values: Values) -> dict[str, Any]:
        fields = {"rope_theta": values["rope_theta"]} | _write_scaling(values)
        full = {"rope_type": "default"} | (fields["rope_scaling"] or {})
        local_theta = values["rope_theta_local"] or values["rope_theta"]
        fields["rope_parameters"] = {
            "full_attention": full | {"rope_theta": values["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
        return fields

    return Rule(read, write)


def _of_kinds(source: Source) -> tuple[Source, Source, Source]:
    """Reads rope_parameters, and its mappings for global and for local layers.

    rope_scaling of transformers 4 is that of global layers.
    """
    parameters = source.inside(
        "rope_parameters", source.take("rope_parameters", None) or {}
    )
    full, local = (
        parameters.inside(name, parameters.take(name, None) or {}) for name in KINDS
    )
    scaling = source.inside("rope_scaling", source.take("rope_scaling", None) or {})
    full.config |= scaling.config
    return parameters, full, local


def _read_global_scaling(
    source: Source, parameters: Source, full: Source, local: Source
) -> dict[str, Any]:
    """Reads the scaling of global layers; that of local layers is refused."""
    kinds = tuple(SCALINGS)
    values = _read_scaling(full, source, kinds)
    if _read_scaling(local, source, kinds):
        local.refuse(
            "rope_type", local.config.get("rope_type"), "not built; required 'default'"
        )
    source.faults += full.close() + local.close() + parameters.close()
    return values


def ministral_rotary() -> Rule:
    """Makes the rule for Ministral 3, whose queries grow with the position.

    It has rope_parameters only. Without them the class has the values of the published
    models.
    """
    growth_key = "llama_4_scaling_beta"
    published = {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        _ORIGINAL_POSITIONS: 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        growth_key: 0.1,
    }

    def read(source: Source, _: Values) -> dict[str, Any]:
        parameters = source.take("rope_parameters", None)
        if parameters is None:
            parameters = published
        rope = source.inside("rope_parameters", parameters)
        rope.read.add("max_position_embeddings")  # a copy of the field outside
        values = _read_scaling(rope, source, tuple(SCALINGS))
        growth = rope.number(growth_key)
        values["rope_query_growth"] = float(growth)
        values["rope_original_positions"] = rope.count(_ORIGINAL_POSITIONS, REQUIRED)
        values["rope_theta"] = float(rope.number("rope_theta", 10_000.0))
        source.faults += rope.close()
        return values

    def write(values: Values) -> dict[str, Any]:
        fields = _write_scaling(values)
        rope = {"rope_type": "default"} | (fields.pop("rope_scaling") or {})
        rope |= {
            "rope_theta": values["rope_theta"],
            _ORIGINAL_POSITIONS: values["rope_original_positions"],
            growth_key: values["rope_query_growth"],
        }
        return fields | {"rope_parameters": rope}

    return Rule(read, write)


def _read_scaling(rope: Source, config: Source, kinds: Sequence[str]) -> dict[str, Any]:
    """Reads the kind of scaling and its numbers.

    Args:
      rope: the rope mapping.
      config: the whole config.json, which may hold lengths.
      kinds: the supported kinds of scaling.

    Returns:
      The model's values for the scaling; {} if there is none.
    """
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind == "su":  # the name of longrope in the first Phi-3
        kind = "longrope"
    if str(kind) not in kinds:
        # One fault is enough: the other fields of this kind are not reported.
        rope.read |= rope.config.keys()
        rope.refuse("rope_type", kind, f"not built; there are {', '.join(kinds)}")
        return {}
    if kind == "default":
        return {}
    values: dict[str, Any] = {"rope_scaling": kind}
    if kind == "dynamic":
        values["rope_original_positions"] = config.count(
            "max_position_embeddings", REQUIRED
        )
    elif kind != "linear":
        values["rope_original_positions"] = _original_positions(rope, config)
    if kind in ("yarn", "longrope") and rope.take("factor", None) is None:
        longest = config.count("max_position_embeddings", REQUIRED)
        values["rope_factor"] = longest / values["rope_original_positions"]
    else:
        values["rope_factor"] = rope.number("factor")
    defaults = TransformerConfig()
    for name, key in SCALINGS[kind].items():
        if kind == "yarn":
            default = getattr(defaults, name)
            values[name] = rope.number(key, default) or default
        else:
            values[name] = rope.number(key)
    if kind == "longrope":
        values |= {name: _numbers(rope, key) for name, key in _LISTS.items()}
    if kind == "yarn":
        values["rope_truncate"] = rope.number("truncate", True, bool)
    if kind in ("yarn", "longrope"):
        values["rope_attention_factor"] = _read_attention_factor(
            rope, kind, values["rope_factor"]
        )
    return values


def _original_positions(rope: Source, config: Source) -> int:
    """Reads the longest sequence before scaling, in tokens.

    As in transformers 5, a field outside the rope mapping comes first.
    """
    inner = rope.count(_ORIGINAL_POSITIONS, None)
    outer = config.count(_ORIGINAL_POSITIONS, None)
    positions: int = outer or inner or config.count("max_position_embeddings", REQUIRED)
    return positions


def _read_attention_factor(rope: Source, kind: str, factor: float) -> float:
    """Reads the factor of cos and sin; 0 stands for the paper's formula.

    yarn's factor may be given as the quotient of two scales, mscale and mscale_all_dim.
    """
    attention_factor = rope.number("attention_factor", None)
    if attention_factor == 0:
        rope.refuse("attention_factor", attention_factor, "a number > 0 is required")
    scales = []
    if kind == "yarn":
        scales = [rope.number(key, None) for key in ("mscale", "mscale_all_dim")]
    if attention_factor is not None or not scales or not all(scales):
        return float(attention_factor or 0)
    if factor <= 1:
        return 0.0
    numerator, denominator = (0.1 * scale * math.log(factor) + 1 for scale in scales)
    return float(numerator / denominator)


def _numbers(rope: Source, key: str) -> tuple[float, ...]:
    """Reads a list of numbers > 0; TransformerConfig checks its length."""
    numbers = rope.take(key)
    is_list = isinstance(numbers, list)
    if not is_list or not all(type(x) in (int, float) and x > 0 for x in numbers):
        rope.refuse(key, numbers, "a list of numbers > 0 is required")
        return ()
    return tuple(map(float, numbers))


def _write_scaling(values: Values) -> dict[str, Any]:
    """Makes rope_scaling (None without scaling), and the lengths that belong to it.

    longrope's lengths also stand outside the mapping, and their quotient is its factor.
    Phi-3's class and transformers below 5 read them there.
    """
    kind = values["rope_scaling"]
    factor = values["rope_factor"]
    original_positions = values["rope_original_positions"]
    if factor == 1 and kind != "longrope":
        return {"rope_scaling": None}
    rope = {"rope_type": kind, "factor": factor}
    rope |= {key: values[name] for name, key in SCALINGS[kind].items()}
    fields: dict[str, Any] = {"rope_scaling": rope}
    if kind == "dynamic":
        return fields | {"max_position_embeddings": original_positions}
    if kind != "linear":
        rope[_ORIGINAL_POSITIONS] = original_positions
    if kind == "longrope":
        rope |= {key: list(values[name]) for name, key in _LISTS.items()}
        fields[_ORIGINAL_POSITIONS] = original_positions
        fields["max_position_embeddings"] = round(factor * original_positions)
    if kind == "yarn" and not values["rope_truncate"]:
        rope["truncate"] = False
    if kind in ("yarn", "longrope") and values["rope_attention_factor"]:
        rope["attention_factor"] = values["rope_attention_factor"]
    return fields
