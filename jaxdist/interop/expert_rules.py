"""Rules that convert config.json's fields about experts; see `config_rules`."""

from collections.abc import Sequence
from typing import Any

from jaxdist.interop.config_rules import Rule, Source, Values, spread

_COUNTS = ("num_local_experts", "num_experts")  # synonyms in transformers 5
_WIDTH = "moe_intermediate_size"
MAX_EXPERTS = 1_000_000  # of all layers together
_MAX_PERIOD = 64  # layers of a pattern; a program holds each of them


def experts(
    key: str, count: int, chosen: int, *, width: int = 0, normalise: bool = True
) -> Rule:
    """Makes the rule for experts in all layers.

    Args:
      key: the field with the number of experts that is written. Its synonym is read,
        too.
      count: default number of experts.
      chosen: default number of experts per token.
      width: default d_ff of an expert, which has a field of its own; 0: it is that of
        the feed-forward part.
      normalise: whether the weights of a token's experts are always divided by their
        sum; False: a field decides.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        main_key, synonym = sorted(
            _COUNTS, key=lambda name: (name not in source.config, name != key)
        )
        num_experts = source.count(main_key, count)
        repeated = source.count(synonym, num_experts)
        if repeated != num_experts:
            source.refuse(
                synonym, repeated, f"{main_key} is {num_experts}; leave out one of them"
            )
        if values["num_layers"] * num_experts > MAX_EXPERTS:
            fault = f"at most {MAX_EXPERTS:,} of all layers are supported"
            num_experts = source.refuse(main_key, num_experts, fault, instead=1)
        return {
            "num_experts": num_experts,
            "experts_per_token": source.count("num_experts_per_tok", chosen),
            "expert_d_ff": source.count(_WIDTH, width) if width else values["d_ff"],
            "normalise_top_k": normalise
            or source.number("norm_topk_prob", False, bool),
        }

    def write(values: Values) -> dict[str, Any]:
        fields = {
            key: values["num_experts"],
            "num_experts_per_tok": values["experts_per_token"],
            _WIDTH if width else "intermediate_size": values["expert_d_ff"],
        }
        if not normalise:
            fields["norm_topk_prob"] = values["normalise_top_k"]
        return fields

    return Rule(read, write)


def dense_layers() -> Rule:
    """Makes the rule for Qwen's layers without experts.

    mlp_only_layers lists some. With decoder_sparse_step = n, layers other than each n-th
    are dense, too.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        step = source.count("decoder_sparse_step", 1)
        depth = values["num_layers"]
        listed = source.take("mlp_only_layers", None) or []
        is_list = isinstance(listed, list)
        if not is_list or not all(type(layer) is int for layer in listed):
            fault = "a list of layers is required"
            listed = source.refuse("mlp_only_layers", listed, fault, instead=[])
        dense = set(listed)
        kinds = [
            "dense" if i in dense or (i + 1) % step else "sparse" for i in range(depth)
        ]
        first, pattern = pattern_of(kinds)
        if "sparse" not in pattern:
            source.refuse(
                "mlp_only_layers" if listed else "decoder_sparse_step",
                listed or step,
                f"required layers with experts, in a pattern of {_MAX_PERIOD} layers or fewer",
            )
            first = 0
            pattern = ("sparse",)
        return {"first_dense_layers": first, "feed_forward_pattern": pattern}

    def write(values: Values) -> dict[str, Any]:
        dense = [
            layer for layer, kind in enumerate(kinds_of(values)) if kind == "dense"
        ]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return Rule(read, write)


def kinds_of(values: Values) -> list[str]:
    """Lists for each layer whether its feed-forward part is "dense" or "sparse"."""
    first = values["first_dense_layers"]
    depth = values["num_layers"]
    return ["dense"] * first + spread(values["feed_forward_pattern"], depth - first)


def pattern_of(kinds: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Finds the number of first dense layers, and the pattern that repeats after them.

    Returns:
      The number and the shortest pattern; (0, ()) if that has more than 64 layers.
    """
    depth = len(kinds)
    num_leading_dense = [*kinds, "sparse"].index("sparse")
    for period in range(1, min(depth, _MAX_PERIOD) + 1):
        start = depth - period
        while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        start += (depth - start) % period
        if start <= num_leading_dense and start < depth:
            return start, tuple(kinds[start : start + period])
    return 0, ()


def gated_shared_experts(key: str, width: int) -> Rule:
    """Makes the rule for shared experts with a gate, after that for experts (Qwen2-MoE).

    Args:
      key: the field with the width of all shared experts together.
      width: the class's default width.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        total = source.count(key, width)
        own = values["expert_d_ff"]
        if total % own:
            fault = f"a multiple of {_WIDTH}={own} is required"
            total = source.refuse(key, total, fault, instead=own)
        return {"num_shared_experts": total // own, "shared_expert_gate": True}

    def write(values: Values) -> dict[str, Any]:
        return {key: values["num_shared_experts"] * values["expert_d_ff"]}

    return Rule(read, write)


def biased_experts(
    count: int, chosen: int, *, width: int, shared: int, dense: int
) -> Rule:
    """Makes the rule for experts that sigmoid scores and biases choose (GLM-4.5).

    Args:
      count: the class's default number of experts.
      chosen: its default number of experts per token.
      width: its default d_ff of an expert.
      shared: its default number of shared experts.
      dense: its default number of first dense layers.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        num_experts = source.count("n_routed_experts", count)
        if values["num_layers"] * num_experts > MAX_EXPERTS:
            fault = f"at most {MAX_EXPERTS:,} of all layers are supported"
            num_experts = source.refuse("n_routed_experts", num_experts, fault, 1)
        groups = source.count("n_group", 1)
        top_groups = source.count("topk_group", 1)
        if groups == 1:  # none
            groups = 0
            top_groups = 0
        return {
            "num_experts": num_experts,
            "experts_per_token": source.count("num_experts_per_tok", chosen),
            "expert_d_ff": source.count(_WIDTH, width),
            "num_shared_experts": source.count("n_shared_experts", shared),
            "first_dense_layers": source.number("first_k_dense_replace", dense, int),
            "normalise_top_k": source.number("norm_topk_prob", True, bool),
            "route_scale": float(source.number("routed_scaling_factor", 1.0)),
            "expert_groups": groups,
            "expert_top_groups": top_groups,
            "scores": "sigmoid",
        }

    def write(values: Values) -> dict[str, Any]:
        return {
            "n_routed_experts": values["num_experts"],
            "num_experts_per_tok": values["experts_per_token"],
            _WIDTH: values["expert_d_ff"],
            "n_shared_experts": values["num_shared_experts"],
            "first_k_dense_replace": values["first_dense_layers"],
            "norm_topk_prob": values["normalise_top_k"],
            "routed_scaling_factor": values["route_scale"],
            "n_group": values["expert_groups"] or 1,
            "topk_group": values["expert_top_groups"] or 1,
        }

    return Rule(read, write)


def extra_layers(key: str, *synonyms: str) -> Rule:
    """Makes the rule for layers that predict further tokens; exports have none.

    Args:
      key: the field with their number.
      *synonyms: other names of the field.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        for name in (key, *synonyms):
            source.number(name, 0, int)
        return {}

    return Rule(read, lambda values: {key: 0})
