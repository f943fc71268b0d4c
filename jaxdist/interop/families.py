"""Hugging Face's names for the transformer's parameters: one table per family.

Import and export read the same table. A line of it says which parameter is a part of
which stored tensor, and gives both layouts in letters. For example `q_proj.weight` is
"attention/query DHN -> HN D". The stored matrix has rows (head, head dim) and columns
d_model; the parameter is [d_model, head, head dim].

`{}` in a tensor's name is the layer, and a second `{}` is the expert. The parameters are
stacks of all layers (and experts), so they have these dims first. Linear layers are
stored (out, in), GPT-2's Conv1D (in, out). Source: the modelling code of transformers
5.23.

`~PATH` at the end of a line is for rotary dims of DeepSeek. The last entries of the
parameter's last dim, as many as the last dim of PATH has, are halves that rotate
together: x0, x1, ..., y0, y1, ... The file has them as pairs: x0, y0, x1, y1, ...
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxdist.interop import config_rules as rule
from jaxdist.interop import expert_rules, latent_rules
from jaxdist.interop.rotary_rules import (
    SCALINGS,
    gemma_rotary,
    ministral_rotary,
    olmo_rotary,
    rotary,
)

CLASSIFIER = "ForSequenceClassification"  # end of the names of architectures
SCORE = "score.weight"  # tensor of such an architecture's head
# end of the paths of model state that folders may hold: biases that choose experts
_CHOICE_BIAS = "/choice_bias"
_BLOCKS = "blocks/"  # first part of the paths of stacked parameters in the tables
Shapes = Mapping[str, tuple[int, ...]]  # shapes of parameters by path
# one line of a table: the part that a tensor holds, or the axis that joins several
# parts and these parts
_Line = str | tuple[int | str, ...]


@dataclass(frozen=True)
class TensorPart:
    """A parameter as it stands inside a stored tensor."""

    path: str  # path of the parameter
    # number of its first dims that the tensor's name counts: layer, expert
    stacked: int
    dims: str  # a letter for each of the parameter's other dims
    # for each dim of the tensor the letters that it merges, the slowest first
    stored_dims: tuple[str, ...]
    # parameter that tells how many of the last dim's last entries the file has as
    # pairs; "" = none are
    paired_like: str = ""
    num_paired: int = 0  # their number, known once the shapes are

    def in_stack(self, start: str, shapes: Shapes) -> "TensorPart":
        """Makes the part for a stack of layers, whose paths begin with `start`."""
        path = start + self.path.removeprefix(_BLOCKS)
        if not self.paired_like:
            return replace(self, path=path)
        like = start + self.paired_like.removeprefix(_BLOCKS)
        return replace(self, path=path, num_paired=shapes.get(like, (0,))[-1])

    def dim_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Finds the size of each letter for a parameter of this shape."""
        return dict(zip(self.dims, shape[self.stacked :], strict=True))

    def places(self, size: int) -> np.ndarray:
        """Lists where the file has each entry of the parameter's last dim.

        Args:
          size: the size of the dim.
        """
        places = np.arange(size)
        first = size - self.num_paired
        pairs = places[first:].reshape(-1, 2)
        return np.concatenate([places[:first], pairs.T.reshape(-1)])

    def in_file_order(self, values: np.ndarray) -> np.ndarray:
        """Puts the entries of the last dim in the order of the file."""
        if not self.num_paired:
            return values
        return values[..., np.argsort(self.places(values.shape[-1]))]

    def is_in(self, shapes: Shapes) -> bool:
        """Checks whether the parameter exists, with as many dims."""
        return len(shapes.get(self.path, ())) == self.stacked + len(self.dims)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Computes the shape of the part in its file, for a parameter of this shape."""
        sizes = self.dim_sizes(shape)
        return tuple(
            math.prod(sizes[letter] for letter in group) for group in self.stored_dims
        )


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, once per layer and expert: parts joined on an axis."""

    name: str
    parts: tuple[TensorPart, ...]
    axis: int = 0
    first: int = 0  # layer that the parameter's stack begins with
    step: int = 1  # distance in layers between two entries of the stack

    def names(self, ranges: Iterable[tuple[int, int]]) -> dict[tuple[int, ...], str]:
        """Lists the tensor's names for a block of the parameter.

        Args:
          ranges: (start, stop) of the block for each dim of the parameter.

        Returns:
          The names by (layer, expert), counted from the start of the block.
        """
        num_counted = self.parts[0].stacked
        counted = [range(*ends) for ends in itertools.islice(ranges, num_counted)]
        names = {}
        for position in itertools.product(*counted):
            offsets = zip(position, counted, strict=True)
            in_block = tuple(index - dim.start for index, dim in offsets)
            names[in_block] = self.name_of(*position)
        return names

    def name_of(self, *position: int) -> str:
        """Formats the tensor's name for (layer in the stack, expert)."""
        if not position:
            return self.name
        layer, *expert = position
        return self.name.format(self.first + self.step * layer, *expert)

    def in_stacks(self, shapes: Shapes) -> Iterator["Stored"]:
        """Yields the tensor for each stack of layers that has its parameter.

        A tensor outside the layers is yielded as it is.
        """
        if not self.parts[0].stacked:
            if self.parts[0].path in shapes:
                yield self
            return
        for start, (first, step) in _stacks(shapes).items():
            parts = tuple(part.in_stack(start, shapes) for part in self.parts)
            if parts[0].is_in(shapes):
                yield replace(self, parts=parts, first=first, step=step)

    @property
    def is_choice_bias(self) -> bool:
        """Whether it holds biases that choose experts: model state, and in float32."""
        return self.parts[0].path.endswith(_CHOICE_BIAS)

    def all_names(self, shapes: Shapes) -> list[str]:
        """Lists the tensor's names for all layers and experts."""
        shape = shapes[self.parts[0].path]
        return list(self.names((0, size) for size in shape).values())

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Computes the tensor's shape, given those of the parameters."""
        parts = [part.stored_shape(shapes[part.path]) for part in self.parts]
        total = sum(shape[self.axis] for shape in parts)
        return (*parts[0][: self.axis], total, *parts[0][self.axis + 1 :])

    def offset(self, part: TensorPart, shapes: Shapes) -> int:
        """Computes where a part begins on the axis that joins the parts."""
        before = self.parts[: self.parts.index(part)]
        return sum(
            other.stored_shape(shapes[other.path])[self.axis] for other in before
        )


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face: rules for its config, a table of its tensors."""

    model_type: str
    architecture: str
    rules: tuple[rule.Rule, ...]
    tensors: tuple[Stored, ...]
    # other beginnings of tensor names (regexes), and the table's beginning for each
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: str = r"rotary_emb\.inv_freq$"  # regex of tensors that are no parameters
    # other tables that a folder may follow; names that only one has identify it
    other_forms: tuple[tuple[Stored, ...], ...] = ()
    # whether transformers has a class for sequence classification, for reward models
    scores: bool = True
    # whether folders may hold layers behind the last one, which predict further tokens;
    # they are not read
    extra_layers: bool = False
    # other values of model_type that are read as this family
    synonyms: tuple[str, ...] = ()

    @property
    def has_choice_bias(self) -> bool:
        """Whether folders hold biases that choose experts (`model.balance=bias`)."""
        return any(stored.is_choice_bias for stored in self.tensors)

    def choice_biases(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the biases that choose experts, if folders hold them.

        Args:
          model_state: of the model, by path.
        """
        if not self.has_choice_bias:
            return {}
        return {
            path: x for path, x in model_state.items() if path.endswith(_CHOICE_BIAS)
        }

    def architecture_for(self, head: str) -> str:
        """Names the class of a model with this `model.head`; "" if there is none."""
        if head == "language":
            return self.architecture
        if not self.scores:
            return ""
        stem = re.sub("ForCausalLM$|LMHeadModel$", "", self.architecture)
        if self.model_type.endswith("_text"):
            stem += "Text"
        return stem + CLASSIFIER

    def present(self, shapes: Shapes) -> list[Stored]:
        """Lists the tensors of a model with these parameters, per stack of layers."""
        return [part for stored in self.tensors for part in stored.in_stacks(shapes)]

    def form_of(self, names: Collection[str]) -> "Family":
        """Chooses the family with the table that a folder with these names follows."""
        for form in self.other_forms:
            pattern = "|".join(
                re.escape(stored.name) for stored in set(form) - set(self.tensors)
            )
            regex = re.compile(pattern.replace(r"\{\}", r"\d+"))
            if any(regex.fullmatch(name) for name in names):
                return replace(self, tensors=form)
        return self

    def canonical(self, name: str) -> str:
        """Finds the table's name for a stored tensor."""
        for beginning, replacement in self.renamed.items():
            match = re.match(beginning, name)
            if match:
                return replacement + name[match.end() :]
        return name


def _stacks(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Finds the model's stacks of layers.

    Returns:
      For the beginning of each stack's paths: its first layer, and the distance to the
      next one.
    """
    depths = (
        shape[0] for path, shape in shapes.items() if path.startswith("first_blocks/")
    )
    num_first = next(depths, 0)
    stacks = {"first_blocks/": (0, 1)}
    matches = [re.match(r"blocks/layer_(\d+)/", path) for path in shapes]
    places = {int(match[1]) for match in matches if match}
    for place in places:
        stacks[f"{_BLOCKS}layer_{place}/"] = (num_first + place, len(places))
    if not places:
        stacks[_BLOCKS] = (num_first, 1)
    return stacks


def _table(lines: Mapping[str, _Line]) -> tuple[Stored, ...]:
    return tuple(_stored(name, line) for name, line in lines.items())


def _stored(name: str, line: _Line) -> Stored:
    if isinstance(line, str):
        return Stored(name, (_part(name, line),))
    axis, *parts = line
    return Stored(name, tuple(_part(name, str(part)) for part in parts), int(axis))


def _part(name: str, text: str) -> TensorPart:
    text, _, paired_like = text.partition(" ~")
    path, dims, _, *stored_dims = text.split()
    stacked = name.count("{}")
    if stacked:
        path = _BLOCKS + path
    if paired_like:
        paired_like = _BLOCKS + paired_like
    return TensorPart(path, stacked, dims, tuple(stored_dims), paired_like)


# --- tensors --------------------------------------------------------------------------

_EDGES: dict[str, _Line] = {
    "model.embed_tokens.weight": "embedding VD -> V D",
    "model.norm.weight": "final_norm/scale D -> D",
    "lm_head.weight": "output DV -> V D",
    SCORE: "score DO -> O D",
}
_L = "model.layers.{}."
_ATTENTION: dict[str, _Line] = {
    _L + "self_attn.q_proj.weight": "attention/query DHN -> HN D",
    _L + "self_attn.k_proj.weight": "attention/key DKN -> KN D",
    _L + "self_attn.v_proj.weight": "attention/value DKN -> KN D",
    _L + "self_attn.o_proj.weight": "attention/out HND -> D HN",
    _L + "self_attn.q_proj.bias": "attention/query_bias HN -> HN",
    _L + "self_attn.k_proj.bias": "attention/key_bias KN -> KN",
    _L + "self_attn.v_proj.bias": "attention/value_bias KN -> KN",
    _L + "self_attn.o_proj.bias": "attention/out_bias D -> D",
}
_MLP: dict[str, _Line] = {
    _L + "mlp.gate_proj.weight": "mlp/gate DF -> F D",
    _L + "mlp.up_proj.weight": "mlp/up DF -> F D",
    _L + "mlp.down_proj.weight": "mlp/down FD -> D F",
}


def _norms(**scales: str) -> dict[str, _Line]:
    return {
        f"{_L}{stored}.weight": f"{norm}/scale D -> D"
        for stored, norm in scales.items()
    }


_PRE_NORMS = _norms(
    input_layernorm="attention_norm", post_attention_layernorm="mlp_norm"
)
_POST_NORMS = _norms(
    post_attention_layernorm="attention_post_norm",
    post_feedforward_layernorm="mlp_post_norm",
)
_BOTH_NORMS = (
    _norms(input_layernorm="attention_norm", pre_feedforward_layernorm="mlp_norm")
    | _POST_NORMS
)


def _qk_norms(query: str, key: str) -> dict[str, _Line]:
    """Makes the lines for norms of queries and keys, with scales of these dims."""
    scales = {
        "q": f"query_norm/scale {query} -> {query}",
        "k": f"key_norm/scale {key} -> {key}",
    }
    return {
        f"{_L}self_attn.{name}_norm.weight": f"attention/{line}"
        for name, line in scales.items()
    }


_FUSED: dict[str, _Line] = {
    _L + "self_attn.qkv_proj.weight": (
        0,
        "attention/query DHN -> HN D",
        "attention/key DKN -> KN D",
        "attention/value DKN -> KN D",
    ),
    _L + "self_attn.o_proj.weight": "attention/out HND -> D HN",
    _L + "mlp.gate_up_proj.weight": (0, "mlp/gate DF -> F D", "mlp/up DF -> F D"),
    _L + "mlp.down_proj.weight": "mlp/down FD -> D F",
}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, _Line]:
    """Makes the lines for a block's router and its experts, a tensor per expert."""
    names = (gate, up, down)
    experts = _L + block + ".experts.{}."
    lines = ("mlp/gate DF -> F D", "mlp/up DF -> F D", "mlp/down FD -> D F")
    router: dict[str, _Line] = {f"{_L}{block}.gate.weight": "mlp/router DE -> E D"}
    return router | {
        f"{experts}{name}.weight": line for name, line in zip(names, lines, strict=True)
    }


_SHARED_EXPERTS: dict[str, _Line] = {  # with a gate
    _L + "mlp.shared_expert.gate_proj.weight": "mlp/shared/gate DF -> F D",
    _L + "mlp.shared_expert.up_proj.weight": "mlp/shared/up DF -> F D",
    _L + "mlp.shared_expert.down_proj.weight": "mlp/shared/down FD -> D F",
    _L + "mlp.shared_expert_gate.weight": "mlp/shared_gate DO -> O D",
}
_PLAIN_SHARED_EXPERTS: dict[str, _Line] = {
    _L + "mlp.shared_experts.gate_proj.weight": "mlp/shared/gate DF -> F D",
    _L + "mlp.shared_experts.up_proj.weight": "mlp/shared/up DF -> F D",
    _L + "mlp.shared_experts.down_proj.weight": "mlp/shared/down FD -> D F",
}
_CHOICE_BIASES: dict[str, _Line] = {
    _L + "mlp.gate.e_score_correction_bias": "mlp/choice_bias E -> E",
}
_GLM4_MOE = _MLP | _qk_norms("N", "N") | _PLAIN_SHARED_EXPERTS | _CHOICE_BIASES
_MIXTRAL = (
    _EDGES | _ATTENTION | _PRE_NORMS | _experts("block_sparse_moe", "w1", "w3", "w2")
)
_SPARSE = (
    _EDGES
    | _ATTENTION
    | _PRE_NORMS
    | _experts("mlp", "gate_proj", "up_proj", "down_proj")
)
_QWEN3_MOE = _MLP | _qk_norms("N", "N")  # some layers may be dense
# Experts merged into one tensor, as save_pretrained(save_original_format=False) of
# transformers 5 writes them.
_MERGED_EXPERTS: dict[str, _Line] = {
    _L + "mlp.gate.weight": "mlp/router DE -> E D",
    _L + "mlp.experts.gate_up_proj": (
        1,
        "mlp/gate EDF -> E F D",
        "mlp/up EDF -> E F D",
    ),
    _L + "mlp.experts.down_proj": "mlp/down EFD -> E D F",
}
_MERGED = _EDGES | _ATTENTION | _PRE_NORMS | _MERGED_EXPERTS
_ROTATED = " ~attention/rope_key"
_LATENT: dict[str, _Line] = {
    _L + "self_attn.q_proj.weight": "attention/query DHN -> HN D" + _ROTATED,
    _L + "self_attn.q_a_proj.weight": "attention/query_down DQ -> Q D",
    _L + "self_attn.q_a_layernorm.weight": "attention/query_down_norm/scale Q -> Q",
    _L + "self_attn.q_b_proj.weight": "attention/query_up QHN -> HN Q" + _ROTATED,
    _L + "self_attn.kv_a_proj_with_mqa.weight": (
        0,
        "attention/latent_down DC -> C D",
        "attention/rope_key DR -> R D" + _ROTATED,
    ),
    _L + "self_attn.kv_a_layernorm.weight": "attention/latent_norm/scale C -> C",
    _L + "self_attn.kv_b_proj.weight": "attention/latent_up CHX -> HX C",
    _L + "self_attn.o_proj.weight": "attention/out HVD -> D HV",
}
_DEEPSEEK2_OTHERS = _EDGES | _LATENT | _PRE_NORMS | _MLP | _PLAIN_SHARED_EXPERTS
_DEEPSEEK3_OTHERS = _DEEPSEEK2_OTHERS | _CHOICE_BIASES
_ROUTED = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_G = "transformer.h.{}."
_GPT2: dict[str, _Line] = {
    "transformer.wte.weight": "embedding VD -> V D",
    "transformer.wpe.weight": "position_embedding PD -> P D",
    _G + "ln_1.weight": "attention_norm/scale D -> D",
    _G + "ln_1.bias": "attention_norm/bias D -> D",
    _G + "attn.c_attn.weight": (
        1,
        "attention/query DHN -> D HN",
        "attention/key DKN -> D KN",
        "attention/value DKN -> D KN",
    ),
    _G + "attn.c_attn.bias": (
        0,
        "attention/query_bias HN -> HN",
        "attention/key_bias KN -> KN",
        "attention/value_bias KN -> KN",
    ),
    _G + "attn.c_proj.weight": "attention/out HND -> HN D",
    _G + "attn.c_proj.bias": "attention/out_bias D -> D",
    _G + "ln_2.weight": "mlp_norm/scale D -> D",
    _G + "ln_2.bias": "mlp_norm/bias D -> D",
    _G + "mlp.c_fc.weight": "mlp/up DF -> D F",
    _G + "mlp.c_fc.bias": "mlp/up_bias F -> F",
    _G + "mlp.c_proj.weight": "mlp/down FD -> F D",
    _G + "mlp.c_proj.bias": "mlp/down_bias D -> D",
    "transformer.ln_f.weight": "final_norm/scale D -> D",
    "transformer.ln_f.bias": "final_norm/bias D -> D",
    "lm_head.weight": "output DV -> V D",
    SCORE: "score DO -> O D",
}

# --- families -------------------------------------------------------------------------

_SIZES = (
    rule.plain("vocab_size", "vocab_size"),
    rule.plain("num_layers", "num_hidden_layers"),
    rule.plain("d_model", "hidden_size"),
    rule.plain("d_ff", "intermediate_size"),
    rule.plain("num_heads", "num_attention_heads"),
)
_UNTIED, _TIED = (
    rule.plain("tie_embeddings", "tie_word_embeddings", tied) for tied in (False, True)
)
_EPS5, _EPS6 = (rule.plain("norm_eps", "rms_norm_eps", eps) for eps in (1e-5, 1e-6))
_USUAL = (*_SIZES, rule.heads(), rule.activation("hidden_act"))
# Names of the text model's tensors in multimodal folders, and the other tensors there.
_TEXT_MODEL = {
    r"language_model\.model\.|model\.language_model\.": "model.",
    r"language_model\.lm": "lm",
}
_NO_TEXT_MODEL = (
    r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\."
)
_GEMMA = (
    # The text part of a multimodal folder omits fields with the class's defaults.
    rule.plain("vocab_size", "vocab_size", 262_208),
    rule.plain("num_layers", "num_hidden_layers", 26),
    rule.plain("d_model", "hidden_size", 2304),
    rule.plain("d_ff", "intermediate_size", 9216),
    rule.plain("num_heads", "num_attention_heads", 8),
    rule.heads(kv=4, head_dim=256),
    rule.activation("hidden_activation", "gelu_pytorch_tanh"),
    rule.only("hidden_act", "gelu_pytorch_tanh"),
    _EPS6,
    _TIED,
    rule.gemma_scales(),
    rule.attention_bias(),
    rule.only("use_bidirectional_attention", False, None),
    rule.implied(norm="rms_plus_one", norm_position="both"),
)
_DEEPSEEK = (
    *_SIZES,
    rule.activation("hidden_act", "silu"),
    _EPS6,
    _UNTIED,
    rule.only("attention_bias", False),
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *_USUAL,
        _EPS6,
        _UNTIED,
        rotary(),
        rule.attention_bias(),
        rule.only("mlp_bias", False),
    ),
    _table(_EDGES | _ATTENTION | _MLP | _PRE_NORMS),
)
_FAMILIES = (
    LLAMA,
    Family(
        "mistral",
        "MistralForCausalLM",
        (*_USUAL, _EPS6, _UNTIED, rotary(), rule.whole_window(4096)),
        LLAMA.tensors,
        renamed=_TEXT_MODEL,
        ignored=_NO_TEXT_MODEL,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        (
            *_USUAL,
            _EPS6,
            _UNTIED,
            rotary(),
            rule.implied(bias="qkv"),
            rule.flagged_window(4096),
        ),
        LLAMA.tensors,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (
            *_SIZES,
            rule.heads(head_dim=128),
            rule.activation("hidden_act"),
            _EPS6,
            _UNTIED,
            rotary(),
            rule.attention_bias(),
            rule.implied(qk_norm="head"),
            rule.flagged_window(4096),
        ),
        LLAMA.tensors + _table(_qk_norms("N", "N")),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (*_GEMMA, rotary(), rule.periodic_window(4096, 2), rule.caps(50.0, 30.0)),
        _table(_EDGES | _ATTENTION | _MLP | _BOTH_NORMS),
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            *_GEMMA,
            rule.periodic_window(4096, 6),
            gemma_rotary(),
            rule.caps(None, None),
            rule.implied(qk_norm="head"),
        ),
        _table(_EDGES | _ATTENTION | _MLP | _BOTH_NORMS | _qk_norms("N", "N")),
        renamed=_TEXT_MODEL,
        ignored=_NO_TEXT_MODEL,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            rule.plain("vocab_size", "vocab_size"),
            rule.plain("num_layers", "n_layer"),
            rule.plain("d_model", "n_embd"),
            rule.plain("num_heads", "n_head"),
            rule.gpt2_heads(),
            rule.plain("max_positions", "n_positions", 1024),
            _TIED,
            rule.plain("norm_eps", "layer_norm_epsilon", 1e-5),
            rule.activation("activation_function", "gelu_new"),
            rule.implied(norm="layer", positions="learned", gated=False, bias="all"),
            rule.only("scale_attn_weights", True),
            rule.only("scale_attn_by_inverse_layer_idx", False),
            rule.only("add_cross_attention", False),
        ),
        _table(_GPT2),
        renamed={r"(?=(h\.|wte\.|wpe\.|ln_f\.))": "transformer."},
        ignored=r"\.attn\.(masked_)?bias$",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        (
            *_USUAL,
            _EPS5,
            _UNTIED,
            rotary(partial=True),
            rule.whole_window(None),
            # fields of Phi-4 mini that the class of transformers does not know
            rule.only("attention_bias", False, written=False),
            rule.only("mlp_bias", False, written=False),
            rule.only("lm_head_bias", False, written=False),
            rule.only("full_attn_mod", 1, written=False),
            rule.only("interpolate_factor", 1, written=False),
        ),
        _table(_EDGES | _FUSED | _PRE_NORMS),
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        (
            *_USUAL,
            _EPS5,
            _UNTIED,
            rotary(),
            rule.attention_bias(),
            rule.implied(norm_position="post", qk_norm="projection"),
        ),
        _table(_EDGES | _ATTENTION | _MLP | _POST_NORMS | _qk_norms("HN", "KN")),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=8),
            rule.activation("hidden_act", "silu"),
            _EPS5,
            _UNTIED,
            rotary(theta=1e6),
            rule.whole_window(None),
            expert_rules.experts("num_local_experts", 8, 2),
        ),
        _table(_MIXTRAL),
        other_forms=(_table(_MERGED),),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=4),
            rule.activation("hidden_act", "silu"),
            _EPS6,
            _UNTIED,
            rotary(),
            rule.attention_bias(),
            rule.implied(qk_norm="head"),
            rule.switched_window(4096),
            expert_rules.experts("num_experts", 128, 8, width=768, normalise=False),
            expert_rules.dense_layers(),
        ),
        _table(_SPARSE | _QWEN3_MOE),
        other_forms=(_table(_MERGED | _QWEN3_MOE),),
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        (
            *_SIZES,
            rule.heads(whole=True),
            rule.activation("hidden_act", "silu"),
            _EPS5,
            _UNTIED,
            rotary(),
            rule.attention_bias(),
            rule.implied(qk_norm="projection"),
            rule.only("clip_qkv", None),
            expert_rules.experts("num_experts", 64, 8, normalise=False),
        ),
        _table(_SPARSE | _qk_norms("HN", "KN")),
        other_forms=(_table(_MERGED | _qk_norms("HN", "KN")),),
        scores=False,
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        (
            *_USUAL,
            _EPS5,
            _UNTIED,
            rule.periodic_window(4096, 4),
            olmo_rotary(),
            rule.attention_bias(),
            rule.implied(norm_position="post", qk_norm="projection"),
        ),
        _table(_EDGES | _ATTENTION | _MLP | _POST_NORMS | _qk_norms("HN", "KN")),
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=4),
            rule.activation("hidden_act", "silu"),
            _EPS6,
            _TIED,
            rotary(theta=2e6),
            rule.attention_bias(),
            rule.only("mlp_bias", False),
            rule.nope_layers(4),
        ),
        LLAMA.tensors,
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=8, head_dim=128),
            rule.activation("hidden_act", "silu"),
            _EPS6,
            _UNTIED,
            rotary(),
            rule.qkv_bias(default=True, out="attention_out_bias"),
            rule.only("mlp_bias", False),
        ),
        LLAMA.tensors,
    ),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=8, head_dim=128),
            rule.activation("hidden_act", "silu"),
            _EPS5,
            _UNTIED,
            ministral_rotary(),
            rule.whole_window(None),
        ),
        LLAMA.tensors,
        renamed=_TEXT_MODEL,
        ignored=_NO_TEXT_MODEL,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=16),
            rule.activation("hidden_act", "silu"),
            _EPS6,
            _UNTIED,
            rotary(),
            rule.qkv_bias("qkv_bias", default=True),
            rule.listed_window(4096),
            expert_rules.experts("num_experts", 60, 4, width=1408, normalise=False),
            expert_rules.gated_shared_experts("shared_expert_intermediate_size", 5632),
            expert_rules.dense_layers(),
        ),
        _table(_SPARSE | _MLP | _SHARED_EXPERTS),
        other_forms=(_table(_MERGED | _MLP | _SHARED_EXPERTS),),
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            *_SIZES,
            rule.heads(kv=8),
            rule.activation("hidden_act", "silu"),
            _EPS5,
            _UNTIED,
            rotary(partial=True, fraction=0.5, kinds=tuple(SCALINGS)),
            rule.qkv_bias(default=False),
            rule.head_norm("use_qk_norm"),
            expert_rules.biased_experts(128, 8, width=1408, shared=1, dense=1),
            expert_rules.extra_layers("num_nextn_predict_layers", "num_mtp_layers"),
        ),
        _table(_SPARSE | _GLM4_MOE),
        other_forms=(_table(_MERGED | _GLM4_MOE),),
        scores=False,
        extra_layers=True,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (
            *_DEEPSEEK,
            latent_rules.sizes(query_rank=1536),
            latent_rules.rotary(),
            latent_rules.experts_of_v3(),
            expert_rules.extra_layers("num_nextn_predict_layers", "num_mtp_layers"),
        ),
        _table(_DEEPSEEK3_OTHERS | _ROUTED),
        other_forms=(_table(_DEEPSEEK3_OTHERS | _MERGED_EXPERTS),),
        extra_layers=True,
        synonyms=("kimi_k2",),
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (
            *_DEEPSEEK,
            rule.only("mlp_bias", False),
            latent_rules.sizes(query_rank=1536),
            latent_rules.rotary(),
            latent_rules.experts_of_v2(),
        ),
        _table(_DEEPSEEK2_OTHERS | _ROUTED),
        other_forms=(_table(_DEEPSEEK2_OTHERS | _MERGED_EXPERTS),),
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}


def family_of(model_type: Any) -> Family | None:
    """Finds the family of a config.json's model_type; None if it is not known."""
    for family in _FAMILIES:
        if model_type in (family.model_type, *family.synonyms):
            return family
    return None
