"""Rules that convert config.json's fields of DeepSeek; see `config_rules`."""

import math
from collections.abc import Mapping
from typing import Any

from jaxdist.interop import rotary_rules
from jaxdist.interop.config_rules import REQUIRED, Rule, Source, Values
from jaxdist.interop.expert_rules import MAX_EXPERTS

KIND = "latent"  # of layers, and the group of their options
_SCALINGS = ("default", "linear", "llama3", "dynamic", "yarn")

# --- attention ------------------------------------------------------------------------


def sizes(*, query_rank: int) -> Rule:
    """Makes the rule for the sizes of latent attention.

    Args:
      query_rank: default of q_lora_rank; null is 0, queries of one matrix.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        rank = source.take("q_lora_rank", query_rank)
        if rank is not None:
            rank = source.count("q_lora_rank", query_rank)
        group = {
            "query_rank": rank or 0,
            "kv_rank": source.count("kv_lora_rank", 512),
            "nope_dim": source.count("qk_nope_head_dim", 128),
            "rope_dim": source.count("qk_rope_head_dim", 64),
            "value_dim": source.count("v_head_dim", 128),
        }
        _check_implied(source, "head_dim", group["rope_dim"], "qk_rope_head_dim")
        total = group["nope_dim"] + group["rope_dim"]
        _check_implied(
            source, "qk_head_dim", total, "qk_nope_head_dim + qk_rope_head_dim"
        )
        num_heads = values["num_heads"]
        _check_implied(source, "num_key_value_heads", num_heads, "num_attention_heads")
        if source.take("rope_interleave", True) is not True:
            source.refuse(
                "rope_interleave",
                source.config["rope_interleave"],
                "not supported; required True",
            )
        return {"layer_pattern": (KIND,), KIND: group}

    def write(values: Values) -> dict[str, Any]:
        group = values[KIND]
        return {
            "q_lora_rank": group["query_rank"] or None,
            "kv_lora_rank": group["kv_rank"],
            "qk_nope_head_dim": group["nope_dim"],
            "qk_rope_head_dim": group["rope_dim"],
            "v_head_dim": group["value_dim"],
            "num_key_value_heads": values["num_heads"],
        }

    return Rule(read, write)


def _check_implied(source: Source, key: str, implied: int, formula: str) -> None:
    """Checks a field that other fields imply; it may be absent or null."""
    value = source.take(key, None)
    if value is not None and value != implied:
        source.refuse(key, value, f"required {formula} = {implied}")


def rotary() -> Rule:
    """Makes the rule for rotary positions, whose scaling may scale the logits, too.

    With mscale_all_dim of yarn, the logits are multiplied by the square of 0.1
    mscale_all_dim ln(factor) + 1.
    """
    positions = rotary_rules.rotary(kinds=_SCALINGS)

    def read(source: Source, values: Values) -> dict[str, Any]:
        read_values = positions.read(source, values)
        group = values[KIND]
        scale = (group["nope_dim"] + group["rope_dim"]) ** -0.5
        fields = source.config
        parameters: Any = fields.get("rope_scaling") or fields.get("rope_parameters")
        if read_values.get("rope_scaling") == "yarn":
            ratio = parameters.get("mscale_all_dim") or 0
            if type(ratio) in (int, float) and read_values["rope_factor"] > 1:
                scale *= _magnitude(ratio, read_values["rope_factor"]) ** 2
        return read_values | {"attention_scale": scale}

    def write(values: Values) -> dict[str, Any]:
        fields = positions.write(values)
        rope = fields.get("rope_scaling")
        if not rope or rope["rope_type"] != "yarn" or values["rope_factor"] <= 1:
            return fields
        group = values[KIND]
        plain = (group["nope_dim"] + group["rope_dim"]) ** -0.5
        magnitude = math.sqrt(values["attention_scale"] / plain)
        growth = 0.1 * math.log(values["rope_factor"])
        ratio = _rounded((magnitude - 1) / growth)
        if ratio <= 0:
            return fields
        rope["mscale_all_dim"] = ratio
        # Other readers know no attention_factor; they divide these two magnitudes.
        attention_factor = values["rope_attention_factor"]
        mscale = _rounded((attention_factor * magnitude - 1) / growth)
        if attention_factor and mscale > 0:
            del rope["attention_factor"]
            rope["mscale"] = mscale
        return fields

    return Rule(read, write)


def _magnitude(scale: float, factor: float) -> float:
    return 0.1 * scale * math.log(factor) + 1


def _rounded(number: float) -> float:
    """Removes the rounding errors of a number that was written with few digits."""
    short = round(number, 6)
    return short if math.isclose(short, number, rel_tol=1e-9, abs_tol=1e-12) else number


# --- experts --------------------------------------------------------------------------

_V2 = {
    "n_routed_experts": 64,
    "first_k_dense_replace": 0,
    "num_experts_per_tok": REQUIRED,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
}
# values of DeepSeek-V2's topk_method
_GREEDY = "greedy"
_GREEDY_IN_GROUPS = "group_limited_greedy"
_V3 = {
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}


def _read_experts(
    source: Source, values: Values, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads the fields that both versions have, given the defaults of the class."""
    depth = values["num_layers"]

    def count(key: str) -> Any:
        return source.count(key, defaults[key])

    num_experts = count("n_routed_experts")
    if depth * num_experts > MAX_EXPERTS:
        fault = f"at most {MAX_EXPERTS:,} of all layers are supported"
        num_experts = source.refuse("n_routed_experts", num_experts, fault, instead=1)
    first = source.number(
        "first_k_dense_replace", defaults["first_k_dense_replace"], int
    )
    if first >= depth:
        first = source.refuse(
            "first_k_dense_replace",
            first,
            f"required layers with experts among the {depth} layers",
            instead=0,
        )
    frequency = source.count("moe_layer_freq", 1)
    if frequency != 1:
        source.refuse("moe_layer_freq", frequency, "not supported; required 1")
    # losses of training and the layout of a run, which change no logits
    for key in ("aux_loss_alpha", "seq_aux", "ep_size"):
        source.take(key, None)
    return {
        "num_experts": num_experts,
        "first_dense_layers": first,
        "feed_forward_pattern": ("sparse",),
        "experts_per_token": count("num_experts_per_tok"),
        "expert_d_ff": count("moe_intermediate_size"),
        "num_shared_experts": count("n_shared_experts"),
        "route_scale": float(
            source.number("routed_scaling_factor", defaults["routed_scaling_factor"])
        ),
    }


def _write_experts(values: Values) -> dict[str, Any]:
    return {
        "n_routed_experts": values["num_experts"],
        "first_k_dense_replace": values["first_dense_layers"],
        "num_experts_per_tok": values["experts_per_token"],
        "moe_intermediate_size": values["expert_d_ff"],
        "n_shared_experts": values["num_shared_experts"],
        "routed_scaling_factor": values["route_scale"],
    }


def experts_of_v3() -> Rule:
    """Makes the rule for sigmoid scores with a bias of the choice, in groups."""

    def read(source: Source, values: Values) -> dict[str, Any]:
        _require(source, "scoring_func", "sigmoid")
        _require(source, "topk_method", "noaux_tc")
        groups = source.count("n_group", 8)
        top_groups = source.count("topk_group", 4)
        if groups == top_groups:
            groups = 0
            top_groups = 0
        return _read_experts(source, values, _V3) | {
            "scores": "sigmoid",
            "normalise_top_k": source.number("norm_topk_prob", True, bool),
            "expert_groups": groups,
            "expert_top_groups": top_groups,
        }

    def write(values: Values) -> dict[str, Any]:
        return _write_experts(values) | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": values["expert_groups"] or 1,
            "topk_group": values["expert_top_groups"] or 1,
            "norm_topk_prob": values["normalise_top_k"],
        }

    return Rule(read, write)


def experts_of_v2() -> Rule:
    """Makes the rule for softmax scores without a bias, in groups or not.

    A token chooses from the groups with the best expert (`group_limited_greedy`).
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        _require(source, "scoring_func", "softmax")
        method = source.take("topk_method", _GREEDY)
        if method not in (_GREEDY, _GREEDY_IN_GROUPS):
            source.refuse(
                "topk_method",
                method,
                f"not supported; required {_GREEDY!r} or {_GREEDY_IN_GROUPS!r}",
            )
        groups = source.count("n_group", None)
        top_groups = source.count("topk_group", None)
        if method == _GREEDY_IN_GROUPS and None in (groups, top_groups):
            source.refuse("topk_method", method, "required n_group and topk_group")
        if method != _GREEDY_IN_GROUPS or groups == top_groups:
            groups = 0
            top_groups = 0
        # transformers does not read it, DeepSeek's own code does
        _require(source, "norm_topk_prob", False)
        return _read_experts(source, values, _V2) | {
            "scores": "softmax",
            "normalise_top_k": False,
            "expert_groups": groups,
            "expert_top_groups": top_groups,
        }

    def write(values: Values) -> dict[str, Any]:
        method = _GREEDY
        if values["expert_groups"]:
            method = _GREEDY_IN_GROUPS
        return _write_experts(values) | {
            "scoring_func": "softmax",
            "topk_method": method,
            "n_group": values["expert_groups"] or 1,
            "topk_group": values["expert_top_groups"] or 1,
            "norm_topk_prob": False,
        }

    return Rule(read, write)


def _require(source: Source, key: str, supported: Any) -> None:
    """Checks a field that has one supported value, its default."""
    value = source.take(key, supported)
    if value != supported or type(value) is not type(supported):
        source.refuse(key, value, f"not supported; required {supported!r}")
