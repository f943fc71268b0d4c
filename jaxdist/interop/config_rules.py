"""How fields of a Hugging Face config.json and the transformer's values give each
other.

A rule reads some fields and gives some values; written backwards, it gives the fields
that it would read those values from (or ones that come near: `hf_config` reads back
what was written and compares). Fields have the older spelling where there are two
(rope_theta and rope_scaling, not rope_parameters): transformers 4 and 5 read that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.models.transformer import TransformerConfig

Values = Mapping[str, Any]  # fields of TransformerConfig
REQUIRED: Any = object()
_MOST_LAYERS = 100_000


class Source:
    """A config.json that notes which fields were read, and what is wrong with them."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self.config = dict(config)
        self.prefix = prefix
        self.faults = list[str]()
        self.read: set[str] = set()

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """Returns a field, or its default where it is absent."""
        self.read.add(key)
        if key not in self.config and default is REQUIRED:
            self.faults.append(
                f"{self.prefix}{key} is missing from config.json, and required"
            )
            return 1  # a number, for the rules that go on with it
        return self.config.get(key, default)

    def number(self, key: str, default: Any = REQUIRED, kind: type = float) -> Any:
        """Returns a field of a kind: bool, int (>= 0) or float (> 0, any number); null
        is the default.
        """
        value = self.take(key, default)
        value = default if value is None and default is not REQUIRED else value
        if value is None and default is None:
            return None
        if kind is bool:
            legal = isinstance(value, bool)
            why = "true or false"
        elif kind is int:
            legal = type(value) is int and value >= 0
            why = "a whole number"
        else:
            legal = type(value) in (int, float) and value >= 0
            why = "a number > 0"
        return value if legal else self.refuse(key, value, f"{why} is required", 1)

    def count(self, key: str, default: int | None) -> Any:
        """Returns a field that is a whole number > 0; null is the default."""
        value = self.number(key, default, int)
        return (
            self.refuse(key, value, "a whole number > 0 is required", 1)
            if value == 0
            else value
        )

    def refuse(self, key: str, value: Any, why: str, instead: Any = None) -> Any:
        """Notes a fault of a field; returns `instead`."""
        self.faults.append(f"{self.prefix}{key}={value!r}: {why}")
        return instead

    def inside(self, key: str, value: Any) -> Source:
        """Returns a nested mapping as a source of its own; what it lacks is its
        reader's to say.
        """
        if not isinstance(value, Mapping):
            value = self.refuse(key, value, "a mapping is required", {})
        return Source(value, f"{self.prefix}{key}.")

    def close(
        self, harmless: Callable[[str, Any], object] = lambda key, value: False
    ) -> list[str]:
        """Returns all faults: those noted, and the fields that nothing has read."""
        return self.faults + [
            f"{self.prefix}{key}={value!r}: this field is not understood"
            for key, value in self.config.items()
            if key not in self.read and value is not None and not harmless(key, value)
        ]


@dataclass(frozen=True)
class Rule:
    """Values from fields, given the values of the rules before; and fields from all
    values.
    """

    read: Callable[[Source, Values], dict[str, Any]]
    write: Callable[[Values], dict[str, Any]] = lambda values: {}


def plain(ours: str, key: str, default: Any = REQUIRED) -> Rule:
    """Returns the rule of a value that is a field as it stands."""
    kind = type(getattr(TransformerConfig(), ours))

    def read(source: Source, _: Values) -> dict[str, Any]:
        value = source.number(key, default, kind)
        # a list of their kinds must fit into memory
        if ours == "num_layers" and value > _MOST_LAYERS:
            value = source.refuse(
                key, value, f"at most {_MOST_LAYERS:,} layers are supported", 1
            )
        return {ours: value}

    return Rule(read, lambda values: {key: values[ours]})


def implied(**ours: Any) -> Rule:
    """Returns the rule of values that the architecture has, and no field says."""
    return Rule(lambda source, _: dict(ours))


def only(key: str, *legal: Any) -> Rule:
    """Returns the rule of a field of which we build some values alone; absent, it has
    the first.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        value = source.take(key, legal[0])
        if value not in legal:
            source.refuse(
                key, value, f"not supported; required {' or '.join(map(repr, legal))}"
            )
        return {}

    return Rule(read, lambda values: {key: legal[0]})


# --- heads, activation, biases, scales ------------------------------------------------


def heads(
    *, kv: int | None = None, head_dim: int | None = None, whole: bool = False
) -> Rule:
    """Returns the rule of key heads and head size; by default num_heads, and
    hidden_size / num_heads.

    Args:
      whole: no other size than the latter is possible.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        num = source.count("num_key_value_heads", kv) or values["num_heads"]
        usual = values["d_model"] // max(values["num_heads"], 1)
        size = source.count("head_dim", head_dim) or usual
        if whole and size != usual:
            why = f"required hidden_size / num_attention_heads = {usual}: norms of all heads are that long"
            source.refuse("head_dim", size, why)
        return {"num_kv_heads": num, "head_dim": size}

    return Rule(
        read,
        lambda v: {"num_key_value_heads": v["num_kv_heads"], "head_dim": v["head_dim"]},
    )


def gpt2_heads() -> Rule:
    """Returns the rule of GPT-2's heads and feed-forward width, which follow from the
    others.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        width = values["d_model"]
        num = values["num_heads"]
        d_ff = source.count("n_inner", None) or 4 * width
        return {"num_kv_heads": num, "head_dim": width // max(num, 1), "d_ff": d_ff}

    return Rule(read, lambda values: {"n_inner": values["d_ff"]})


# Of a function with several names the one that we write comes first.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}


def activation(key: str, default: Any = REQUIRED) -> Rule:
    """Returns the rule of the feed-forward part's activation; GPT-2's files call the
    tanh one gelu_new.
    """
    names = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    names |= {"gelu": "gelu_new"} if default == "gelu_new" else {}

    def read(source: Source, _: Values) -> dict[str, Any]:
        value = source.take(key, default)
        if str(value) not in _ACTIVATIONS:
            source.refuse(key, value, f"not built; there are {', '.join(_ACTIVATIONS)}")
        return {"activation": _ACTIVATIONS.get(str(value), "silu")}

    return Rule(read, lambda values: {key: names[values["activation"]]})


def attention_bias() -> Rule:
    """Returns the rule of Llama's attention_bias: q, k, v and out have one, or none
    has.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        return {
            "bias": "attention"
            if source.number("attention_bias", False, bool)
            else "none"
        }

    return Rule(read, lambda values: {"attention_bias": values["bias"] == "attention"})


def caps(attention: float | None, final: float | None) -> Rule:
    """Returns the rule of Gemma's soft-caps, with their defaults; null is none, as 0 is
    here.
    """
    ours = {
        "attention_softcap": ("attn_logit_softcapping", attention),
        "logit_softcap": ("final_logit_softcapping", final),
    }

    def read(source: Source, _: Values) -> dict[str, Any]:
        return {
            name: 0.0 if source.take(*field) is None else float(source.number(*field))
            for name, field in ours.items()
        }

    return Rule(
        read,
        lambda values: {key: values[name] or None for name, (key, _) in ours.items()},
    )


def gemma_scales() -> Rule:
    """Returns the rule of the factors of Gemma's attention logits and embeddings."""

    def read(source: Source, values: Values) -> dict[str, Any]:
        scalar = source.number("query_pre_attn_scalar", 256) or 1
        return {
            "attention_scale": scalar**-0.5,
            "embedding_scale": float(values["d_model"]) ** 0.5,
        }

    def write(values: Values) -> dict[str, Any]:
        scalar = (
            values["attention_scale"] ** -2
            if values["attention_scale"]
            else values["head_dim"]
        )
        whole = round(scalar)  # the field's type
        return {
            "query_pre_attn_scalar": whole
            if math.isclose(whole, scalar, rel_tol=1e-9)
            else scalar
        }

    return Rule(read, write)


# --- layers ---------------------------------------------------------------------------

KINDS = {"full_attention": "global", "sliding_attention": "local"}


def shortest_period(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern that, repeated and cut off, gives the kinds of all
    layers.
    """
    periods = (tuple(kinds[:size]) for size in range(1, len(kinds) + 1))
    return next(
        (period for period in periods if spread(period, len(kinds)) == list(kinds)), ()
    )


def spread(pattern: Sequence[str], depth: int) -> list[str]:
    """Returns the kind of each layer."""
    return [pattern[i % len(pattern)] for i in range(depth)]


def layers(form: str, window: int | None, period: int = 0) -> Rule:
    """Returns the rule of sliding windows, with the class's default window.

    Args:
      form: "all": every layer has the window, unless it is null (Mistral, Phi-3);
        "flag": of use_sliding_window, from max_window_layers on (Qwen); "pattern": all
        but each `period`-th (Gemma).
    """

    def kinds(source: Source, depth: int) -> list[str]:
        if form == "all":
            return ["local"] * depth
        if form == "flag":
            first = source.number("max_window_layers", 28, int)
            first = first if source.number("use_sliding_window", False, bool) else depth
            computed = ["global" if i < first else "local" for i in range(depth)]
        else:
            every = source.count("sliding_window_pattern", period)
            every = source.count("_sliding_window_pattern", every)
            computed = ["local" if (i + 1) % every else "global" for i in range(depth)]
        names = source.take("layer_types", None)
        if names is None:
            return computed
        if (
            not isinstance(names, list)
            or len(names) != depth
            or not set(map(str, names)) <= set(KINDS)
        ):
            why = f"required one of {', '.join(KINDS)} for each of {depth} layers"
            return source.refuse("layer_types", names, why, computed)
        return [KINDS[name] for name in names]

    def read(source: Source, values: Values) -> dict[str, Any]:
        size = source.take("sliding_window", window)
        of_layers = kinds(source, values["num_layers"])
        if "local" not in of_layers or (size is None and form == "all"):
            return {"window": 0, "layer_pattern": ("global",)}
        if not isinstance(size, int) or size < 1:
            source.refuse(
                "sliding_window", size, "there are sliding layers, so it must be >= 1"
            )
        return {"window": size, "layer_pattern": shortest_period(of_layers)}

    def write(values: Values) -> dict[str, Any]:
        pattern = values["layer_pattern"]
        depth = values["num_layers"]
        of_layers = spread(pattern, depth)
        some = "local" in pattern
        if form == "all":
            return {"sliding_window": values["window"] if some else None}
        types = [
            "sliding_attention" if kind == "local" else "full_attention"
            for kind in of_layers
        ]
        fields = {
            "sliding_window": values["window"] if some else window,
            "layer_types": types,
        }
        if form == "flag":
            first = of_layers.index("local") if some else depth
            return fields | {"use_sliding_window": some, "max_window_layers": first}
        every = len(pattern)  # transformers before 4.53 knows this field alone
        regular = pattern == ("local",) * (every - 1) + ("global",)
        return fields | (
            {"sliding_window_pattern": every} if regular and period == 6 else {}
        )

    return Rule(read, write)


def switched_window(window: int) -> Rule:
    """Returns the rule of Qwen3-MoE's window: with use_sliding_window all layers have
    it.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        used = source.number("use_sliding_window", False, bool)
        size = source.take("sliding_window", window)
        first = source.number("max_window_layers", 0, int)
        if not used or size is None:
            return {"window": 0, "layer_pattern": ("global",)}
        if first:
            source.refuse(
                "max_window_layers",
                first,
                "versions of transformers differ in it; required 0",
            )
        if type(size) is not int or size < 1:
            size = source.refuse(
                "sliding_window", size, "a whole number > 0 is required", 1
            )
        return {"window": size, "layer_pattern": ("local",)}

    def write(values: Values) -> dict[str, Any]:
        pattern = set(values["layer_pattern"])
        size = values["window"]
        return {
            "use_sliding_window": pattern == {"local"},
            "sliding_window": size or None,
        }

    return Rule(read, write)
