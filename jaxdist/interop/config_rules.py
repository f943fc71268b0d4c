"""Rules that convert fields of Hugging Face's config.json to model values, and back.

A rule's `read` derives values from some fields. Its `write` makes the fields that give
these values. `write` may be inexact: `hf_config` reads the written fields again and
compares. If a field has two spellings, the older one is written (rope_theta and
rope_scaling, not rope_parameters), because transformers 4 and 5 both read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.models.transformer_config import TransformerConfig

Values = Mapping[str, Any]  # fields of TransformerConfig
REQUIRED: Any = object()  # the default of a field that must be there
_MAX_LAYERS = 100_000


class Source:
    """The fields of a config.json, with those that were read and their faults.

    Args:
      config: the fields.
      prefix: what names of fields begin with in messages, for a nested mapping.
    """

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self.config = dict(config)
        self.prefix = prefix
        self.faults = list[str]()
        self.read: set[str] = set()

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """Takes a field, or its default if it is absent."""
        self.read.add(key)
        if key not in self.config and default is REQUIRED:
            self.faults.append(
                f"{self.prefix}{key} is missing from config.json, and required"
            )
            return (
                1  # a number, so that other rules can be read and report their faults
            )
        return self.config.get(key, default)

    def number(self, key: str, default: Any = REQUIRED, kind: type = float) -> Any:
        """Reads a field of type bool, int or float; null is the default.

        Args:
          key: the field.
          default: its value if it is absent or null.
          kind: bool; int, which is a whole number >= 0; float, which is a number >= 0.
        """
        value = self.take(key, default)
        if value is None and default is not REQUIRED:
            value = default
        if value is None and default is None:
            return None
        if kind is bool:
            is_valid = isinstance(value, bool)
            required = "true or false"
        elif kind is int:
            is_valid = type(value) is int and value >= 0
            required = "a whole number"
        else:
            is_valid = type(value) in (int, float) and value >= 0
            required = "a number > 0"
        if is_valid:
            return value
        return self.refuse(key, value, f"{required} is required", instead=1)

    def count(self, key: str, default: int | None) -> Any:
        """Reads a field that is a whole number > 0; null is the default."""
        value = self.number(key, default, int)
        if value == 0:
            return self.refuse(key, value, "a whole number > 0 is required", instead=1)
        return value

    def refuse(self, key: str, value: Any, fault: str, instead: Any = None) -> Any:
        """Records a fault of a field, and returns `instead`."""
        self.faults.append(f"{self.prefix}{key}={value!r}: {fault}")
        return instead

    def inside(self, key: str, value: Any) -> Source:
        """Makes a source of a nested mapping. The caller collects its faults."""
        if not isinstance(value, Mapping):
            value = self.refuse(key, value, "a mapping is required", instead={})
        return Source(value, f"{self.prefix}{key}.")

    def close(
        self, harmless: Callable[[str, Any], bool] = lambda key, value: False
    ) -> list[str]:
        """Lists all faults: those recorded, and the fields that no rule has read.

        Args:
          harmless: whether an unread field, given its name and value, is no fault.
        """
        faults = list(self.faults)
        for key, value in self.config.items():
            is_unread = key not in self.read and value is not None
            if is_unread and not harmless(key, value):
                faults.append(
                    f"{self.prefix}{key}={value!r}: this field is not understood"
                )
        return faults


@dataclass(frozen=True)
class Rule:
    """A conversion between some fields of config.json and some values of the model.

    `read` derives values from fields, given the values of the rules before it. `write`
    makes fields from all values.
    """

    read: Callable[[Source, Values], dict[str, Any]]
    write: Callable[[Values], dict[str, Any]] = lambda values: {}


def plain(name: str, key: str, default: Any = REQUIRED) -> Rule:
    """Makes the rule for the value `name` that equals the field `key`."""
    kind = type(getattr(TransformerConfig(), name))

    def read(source: Source, _: Values) -> dict[str, Any]:
        value = source.number(key, default, kind)
        # Lists with an entry per layer are made, which must fit into memory.
        if name == "num_layers" and value > _MAX_LAYERS:
            fault = f"at most {_MAX_LAYERS:,} layers are supported"
            value = source.refuse(key, value, fault, instead=1)
        return {name: value}

    return Rule(read, lambda values: {key: values[name]})


def implied(**values: Any) -> Rule:
    """Makes the rule for values that the architecture has without a field for them."""
    return Rule(lambda source, _: dict(values))


def only(key: str, *supported: Any, written: bool = True) -> Rule:
    """Makes the rule for a field with few supported values, the default first.

    Args:
      key: the field.
      *supported: its values.
      written: whether exports have the field; transformers may not know it.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        value = source.take(key, supported[0])
        if value not in supported:
            required = " or ".join(map(repr, supported))
            source.refuse(key, value, f"not supported; required {required}")
        return {}

    if not written:
        return Rule(read)
    return Rule(read, lambda values: {key: supported[0]})


# --- heads, activation, biases, scales ------------------------------------------------


def heads(
    *, kv: int | None = None, head_dim: int | None = None, whole: bool = False
) -> Rule:
    """Makes the rule for the number of key-value heads, and the size of a head.

    Args:
      kv: default number of key-value heads; None: as many as query heads.
      head_dim: default size of a head; None: hidden_size / num_attention_heads.
      whole: whether the size must be hidden_size / num_attention_heads.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        num_kv_heads = source.count("num_key_value_heads", kv) or values["num_heads"]
        quotient = values["d_model"] // max(values["num_heads"], 1)
        size = source.count("head_dim", head_dim) or quotient
        if whole and size != quotient:
            source.refuse(
                "head_dim",
                size,
                f"required hidden_size / num_attention_heads = {quotient}: "
                "norms of all heads are that long",
            )
        return {"num_kv_heads": num_kv_heads, "head_dim": size}

    def write(values: Values) -> dict[str, Any]:
        return {
            "num_key_value_heads": values["num_kv_heads"],
            "head_dim": values["head_dim"],
        }

    return Rule(read, write)


def gpt2_heads() -> Rule:
    """Makes the rule for GPT-2's heads and feed-forward width."""

    def read(source: Source, values: Values) -> dict[str, Any]:
        d_model = values["d_model"]
        num_heads = values["num_heads"]
        return {
            "num_kv_heads": num_heads,
            "head_dim": d_model // max(num_heads, 1),
            "d_ff": source.count("n_inner", None) or 4 * d_model,
        }

    return Rule(read, lambda values: {"n_inner": values["d_ff"]})


# If a function has several names, the one that is written comes first.
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
    """Makes the rule for the activation of the feed-forward part."""
    names = {function: name for name, function in reversed(_ACTIVATIONS.items())}
    if default == "gelu_new":  # GPT-2's name for the tanh approximation
        names["gelu"] = default

    def read(source: Source, _: Values) -> dict[str, Any]:
        value = source.take(key, default)
        if str(value) not in _ACTIVATIONS:
            source.refuse(key, value, f"not built; there are {', '.join(_ACTIVATIONS)}")
        return {"activation": _ACTIVATIONS.get(str(value), "silu")}

    return Rule(read, lambda values: {key: names[values["activation"]]})


def attention_bias() -> Rule:
    """Makes the rule for Llama's attention_bias, which holds for q, k, v and out."""

    def read(source: Source, _: Values) -> dict[str, Any]:
        has_bias = source.number("attention_bias", False, bool)
        return {"bias": "attention" if has_bias else "none"}

    return Rule(read, lambda values: {"attention_bias": values["bias"] == "attention"})


def qkv_bias(
    key: str = "attention_bias", *, default: bool, out: str | None = None
) -> Rule:
    """Makes the rule for biases of q, k and v, apart from that of the output.

    Args:
      key: the field for q, k and v.
      default: the class's default of it.
      out: the field for the bias of the output projection, false by default; None:
        there is no such bias.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        has_bias = source.number(key, default, bool)
        if out is None or not source.number(out, False, bool):
            return {"bias": "qkv" if has_bias else "none"}
        if not has_bias:
            source.refuse(out, True, f"not supported with {key}=false")
        return {"bias": "attention"}

    def write(values: Values) -> dict[str, Any]:
        fields = {key: values["bias"] in ("qkv", "attention")}
        if out is not None:
            fields[out] = values["bias"] == "attention"
        return fields

    return Rule(read, write)


def head_norm(key: str) -> Rule:
    """Makes the rule for a flag for norms of query and key heads."""

    def read(source: Source, _: Values) -> dict[str, Any]:
        return {"qk_norm": "head" if source.number(key, False, bool) else "none"}

    return Rule(read, lambda values: {key: values["qk_norm"] == "head"})


def caps(attention: float | None, final: float | None) -> Rule:
    """Makes the rule for Gemma's soft-caps, where null is no cap.

    Args:
      attention: default cap of attention logits.
      final: default cap of the head's logits.
    """
    defaults = {
        "attn_logit_softcapping": attention,
        "final_logit_softcapping": final,
    }

    def cap(source: Source, key: str) -> float:
        if source.take(key, defaults[key]) is None:
            return 0.0
        return float(source.number(key, defaults[key]))

    def read(source: Source, _: Values) -> dict[str, Any]:
        return {
            "attention_softcap": cap(source, "attn_logit_softcapping"),
            "logit_softcap": cap(source, "final_logit_softcapping"),
        }

    def write(values: Values) -> dict[str, Any]:
        return {
            "attn_logit_softcapping": values["attention_softcap"] or None,
            "final_logit_softcapping": values["logit_softcap"] or None,
        }

    return Rule(read, write)


def gemma_scales() -> Rule:
    """Makes the rule for the factors of Gemma's attention logits and embeddings."""

    def read(source: Source, values: Values) -> dict[str, Any]:
        scalar = source.number("query_pre_attn_scalar", 256) or 1
        return {
            "attention_scale": scalar**-0.5,
            "embedding_scale": float(values["d_model"]) ** 0.5,
        }

    def write(values: Values) -> dict[str, Any]:
        scalar = values["head_dim"]
        if values["attention_scale"]:
            scalar = values["attention_scale"] ** -2
        whole = round(scalar)  # the field is a whole number in Gemma's files
        if math.isclose(whole, scalar, rel_tol=1e-9):
            scalar = whole
        return {"query_pre_attn_scalar": scalar}

    return Rule(read, write)


# --- layers ---------------------------------------------------------------------------

KINDS = {"full_attention": "global", "sliding_attention": "local"}
# kind of a layer without rotary positions, by its kind with them
_NOPE_KINDS = {"global": "nope"}


def shortest_period(kinds: Sequence[str]) -> tuple[str, ...]:
    """Finds the shortest pattern whose repetition, cut off, gives all kinds."""
    for size in range(1, len(kinds) + 1):
        pattern = tuple(kinds[:size])
        if spread(pattern, len(kinds)) == list(kinds):
            return pattern
    return ()


def spread(pattern: Sequence[str], depth: int) -> list[str]:
    """Repeats a pattern, to give the kind of each of `depth` layers."""
    return [pattern[i % len(pattern)] for i in range(depth)]


def whole_window(window: int | None) -> Rule:
    """Makes the rule for a window of every layer; null is none (Mistral, Phi-3).

    Args:
      window: the class's default window in tokens.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        size = source.take("sliding_window", window)
        if size is None:
            return _NO_WINDOW
        return _windowed(source, size, ["local"] * values["num_layers"])

    def write(values: Values) -> dict[str, Any]:
        has_local = "local" in values["layer_pattern"]
        return {"sliding_window": values["window"] if has_local else None}

    return Rule(read, write)


def flagged_window(window: int) -> Rule:
    """Makes the rule for a window of the last layers, with a flag for it (Qwen).

    With use_sliding_window, layers from max_window_layers on have the window.
    layer_types overrides both.

    Args:
      window: the class's default window in tokens.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        depth = values["num_layers"]
        size = source.take("sliding_window", window)
        first = source.number("max_window_layers", 28, int)
        if not source.number("use_sliding_window", False, bool):
            first = depth
        kinds = ["global" if i < first else "local" for i in range(depth)]
        return _windowed(source, size, _listed_kinds(source, kinds))

    def write(values: Values) -> dict[str, Any]:
        kinds = spread(values["layer_pattern"], values["num_layers"])
        has_local = "local" in values["layer_pattern"]
        return {
            "sliding_window": values["window"] if has_local else window,
            "layer_types": _types_of(kinds),
            "use_sliding_window": has_local,
            "max_window_layers": kinds.index("local") if has_local else len(kinds),
        }

    return Rule(read, write)


def periodic_window(window: int, period: int) -> Rule:
    """Makes the rule for a window of all layers but each `period`-th (Gemma).

    layer_types overrides the period.

    Args:
      window: the class's default window in tokens.
      period: the class's default period.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        size = source.take("sliding_window", window)
        every = source.count("sliding_window_pattern", period)
        every = source.count("_sliding_window_pattern", every)
        kinds = [
            "local" if (i + 1) % every else "global"
            for i in range(values["num_layers"])
        ]
        return _windowed(source, size, _listed_kinds(source, kinds))

    def write(values: Values) -> dict[str, Any]:
        pattern = values["layer_pattern"]
        fields = {
            "sliding_window": values["window"] if "local" in pattern else window,
            "layer_types": _types_of(spread(pattern, values["num_layers"])),
        }
        # Gemma 3 in transformers below 4.53 reads this field and not layer_types.
        every = len(pattern)
        is_regular = pattern == ("local",) * (every - 1) + ("global",)
        if is_regular and period == 6:
            fields["sliding_window_pattern"] = every
        return fields

    return Rule(read, write)


_NO_WINDOW: dict[str, Any] = {"window": 0, "layer_pattern": ("global",)}


def _listed_kinds(source: Source, kinds: list[str]) -> list[str]:
    """Reads layer_types, the kind of each layer; `kinds` if it is absent or invalid."""
    names = source.take("layer_types", None)
    if names is None:
        return kinds
    has_all_layers = isinstance(names, list) and len(names) == len(kinds)
    if not has_all_layers or not set(map(str, names)) <= set(KINDS):
        required = f"required one of {', '.join(KINDS)} for each of {len(kinds)} layers"
        source.refuse("layer_types", names, required)
        return kinds
    return [KINDS[name] for name in names]


def _types_of(kinds: Sequence[str]) -> list[str]:
    """Makes layer_types of the kinds of all layers."""
    types = {"local": "sliding_attention"}
    return [types.get(kind, "full_attention") for kind in kinds]


def _windowed(source: Source, size: Any, kinds: list[str]) -> dict[str, Any]:
    """Makes the values of a window of the local layers, after a check of its size."""
    if "local" not in kinds:
        return _NO_WINDOW
    if not isinstance(size, int) or size < 1:
        source.refuse(
            "sliding_window", size, "there are sliding layers, so it must be >= 1"
        )
    return {"window": size, "layer_pattern": shortest_period(kinds)}


def switched_window(window: int) -> Rule:
    """Makes the rule for Qwen3-MoE's window.

    With use_sliding_window all layers have the window.

    Args:
      window: the class's default window in tokens.
    """

    def read(source: Source, _: Values) -> dict[str, Any]:
        used = source.number("use_sliding_window", False, bool)
        size = source.take("sliding_window", window)
        first = source.number("max_window_layers", 0, int)
        if not used or size is None:
            return _NO_WINDOW
        if first:
            source.refuse(
                "max_window_layers",
                first,
                "versions of transformers differ in it; required 0",
            )
        if type(size) is not int or size < 1:
            fault = "a whole number > 0 is required"
            size = source.refuse("sliding_window", size, fault, instead=1)
        return {"window": size, "layer_pattern": ("local",)}

    def write(values: Values) -> dict[str, Any]:
        pattern = set(values["layer_pattern"])
        size = values["window"]
        return {
            "use_sliding_window": pattern == {"local"},
            "sliding_window": size or None,
        }

    return Rule(read, write)


def listed_window(window: int) -> Rule:
    """Makes the rule for a window of the layers that layer_types lists (Qwen2-MoE).

    Args:
      window: the class's default window in tokens.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        used = source.number("use_sliding_window", False, bool)
        size = source.take("sliding_window", window)
        source.number("max_window_layers", 28, int)
        kinds = _listed_kinds(source, ["global"] * values["num_layers"])
        if used and source.config.get("layer_types") is None:
            source.refuse(
                "use_sliding_window",
                used,
                "versions of transformers differ in the layers with a window; list them "
                "in layer_types",
            )
        if not used and "local" in kinds:
            fault = "sliding layers need use_sliding_window=true"
            source.refuse("layer_types", source.config["layer_types"], fault)
        return _windowed(source, size, kinds)

    def write(values: Values) -> dict[str, Any]:
        pattern = values["layer_pattern"]
        if "local" not in pattern:
            return {"use_sliding_window": False}
        return {
            "use_sliding_window": True,
            "sliding_window": values["window"],
            "layer_types": _types_of(spread(pattern, values["num_layers"])),
        }

    return Rule(read, write)


def nope_layers(period: int) -> Rule:
    """Makes the rule for layers without rotary positions (SmolLM3).

    no_rope_layers has a 0 for each of them, and 1 for others. Without the list, each
    no_rope_layer_interval-th layer is one. layer_types tells the layers with a window.

    Args:
      period: the class's default interval.
    """

    def read(source: Source, values: Values) -> dict[str, Any]:
        depth = values["num_layers"]
        every = source.count("no_rope_layer_interval", period)
        rotates = [(i + 1) % every > 0 for i in range(depth)]
        listed = source.take("no_rope_layers", None)
        if listed is not None:
            rotates = _listed_flags(source, "no_rope_layers", listed, depth)
        used = source.number("use_sliding_window", False, bool)
        size = source.take("sliding_window", None)
        kinds = ["global"] * depth
        if used and size is not None:  # as in transformers: layers without positions
            kinds = ["global" if rotary else "local" for rotary in rotates]
        kinds = _listed_kinds(source, kinds)
        if "local" in kinds and not used:
            fault = "sliding layers need use_sliding_window=true"
            source.refuse("layer_types", source.config["layer_types"], fault)
        windowed = _windowed(source, size, kinds)
        for layer, rotary in enumerate(rotates):
            if not rotary and kinds[layer] == "local":
                source.refuse(
                    "use_sliding_window",
                    used,
                    f"layer {layer} has neither rotary positions nor full attention, "
                    "which is not built; list the kinds of layers in layer_types",
                )
                return windowed
            if not rotary:
                kinds[layer] = _NOPE_KINDS[kinds[layer]]
        return windowed | {"layer_pattern": shortest_period(kinds)}

    def write(values: Values) -> dict[str, Any]:
        kinds = spread(values["layer_pattern"], values["num_layers"])
        has_local = "local" in kinds
        return {
            "no_rope_layers": [int(kind != "nope") for kind in kinds],
            "layer_types": _types_of(kinds),
            "use_sliding_window": has_local,
            "sliding_window": values["window"] if has_local else None,
        }

    return Rule(read, write)


def _listed_flags(source: Source, key: str, listed: Any, depth: int) -> list[bool]:
    """Reads a list with a 0 or 1 for each layer; all are 1 if it is invalid."""
    is_valid = isinstance(listed, list) and len(listed) == depth
    if not is_valid or not all(type(flag) in (int, bool) for flag in listed):
        fault = f"required 0 or 1 for each of {depth} layers"
        source.refuse(key, listed, fault)
        return [True] * depth
    return [bool(flag) for flag in listed]
