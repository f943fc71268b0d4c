"""How fields of a Hugging Face config.json and the transformer's values for experts
give each other.

See `config_rules`.
"""

from collections.abc import Sequence
from typing import Any

from jaxdist.interop.config_rules import Rule, Source, Values, spread

_COUNTS = ("num_local_experts", "num_experts")  # transformers 5 takes one for the other
_WIDTH = "moe_intermediate_size"
_MOST_EXPERTS = 1_000_000
_LONGEST = 64  # layers of a pattern: a program has each of them


def experts(
    key: str, count: int, chosen: int, *, width: int = 0, normalise: bool = True
) -> Rule:
    """Returns the rule of experts in all layers, with the class's defaults.

    Args:
      key: of their number, as it is written; what else it is called is read as well.
      count: how many there are.
      chosen: how many a token goes to.
      width: inside an expert, in a field of its own; 0: that is the width of the
        feed-forward part.
      normalise: True: weights are always divided by their sum; False: if a field says
        so.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        names = sorted(
            _COUNTS, key=lambda name: (name not in source.config, name != key)
        )
        num = source.count(names[0], count)
        again = source.count(names[1], num)
        if again != num:
            source.refuse(
                names[1], again, f"{names[0]} is {num}; leave out one of them"
            )
        if values["num_layers"] * num > _MOST_EXPERTS:
            num = source.refuse(
                names[0],
                num,
                f"at most {_MOST_EXPERTS:,} of all layers are supported",
                1,
            )
        k = source.count("num_experts_per_tok", chosen)
        always = normalise
        return {
            "num_experts": num,
            "experts_per_token": k,
            "expert_d_ff": source.count(_WIDTH, width) if width else values["d_ff"],
            "normalise_top_k": always or source.number("norm_topk_prob", False, bool),
        }

    def write(values: Values) -> dict[str, Any]:
        fields = {
            key: values["num_experts"],
            "num_experts_per_tok": values["experts_per_token"],
        }
        fields[_WIDTH if width else "intermediate_size"] = values["expert_d_ff"]
        return fields | (
            {} if normalise else {"norm_topk_prob": values["normalise_top_k"]}
        )

    return Rule(read, write)


def dense_layers() -> Rule:
    """Returns the rule of Qwen's layers without experts: some by name, and all but each
    n-th.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        step = source.count("decoder_sparse_step", 1)
        depth = values["num_layers"]
        dense = source.take("mlp_only_layers", None) or []
        if not isinstance(dense, list) or not all(
            type(layer) is int for layer in dense
        ):
            dense = source.refuse(
                "mlp_only_layers", dense, "a list of layers is required", []
            )
        named = {*dense}
        kinds = [
            "dense" if i in named or (i + 1) % step else "sparse" for i in range(depth)
        ]
        first, pattern = pattern_of(kinds)
        if "sparse" not in pattern:
            key = "mlp_only_layers" if dense else "decoder_sparse_step"
            why = f"required layers with experts, in a pattern of {_LONGEST} layers or fewer"
            source.refuse(key, dense or step, why)
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
    """Returns of each layer whether its feed-forward part is dense or sparse."""
    first = values["first_dense_layers"]
    depth = values["num_layers"]
    return ["dense"] * first + spread(values["feed_forward_pattern"], depth - first)


def pattern_of(kinds: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Returns the number of first dense layers, and what repeats behind them; (0, ())
    if that is too long.
    """
    depth = len(kinds)
    leading = [*kinds, "sparse"].index("sparse")
    for period in range(1, min(depth, _LONGEST) + 1):
        start = depth - period
        while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        start += (depth - start) % period
        if start <= leading and start < depth:
            return start, tuple(kinds[start : start + period])
    return 0, ()
