"""What Hugging Face calls the transformer's parameters: one table a family, read in
both directions.

A line says which part of a stored tensor is which of our parameters, with both layouts
in letters (`{}` is the layer, of which ours are a stack; a second one is the expert, of
which each layer of ours has a stack): "attention/query DHN -> HN D" is a matrix of rows
(head, head dim) and columns d_model there, which here is [d_model, head, head dim].
Linear layers are stored (out, in), GPT-2's Conv1D (in, out). Source: the modelling code
of transformers 5.23.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxdist.interop import config_rules as rule
from jaxdist.interop import expert_rules
from jaxdist.interop.rotary_rules import gemma_rotary, rotary

_BLOCKS = "blocks/"  # what paths of our stacks begin with in the tables
Shapes = Mapping[str, tuple[int, ...]]  # of our parameters, by path


@dataclass(frozen=True)
class TensorPart:
    """One of our parameters inside a stored tensor."""

    path: str  # of our parameter
    # of its dims, the first ones, that the tensor's name counts: layer, expert
    stacked: int
    ours: str  # a letter for each of the others
    # for each stored dim the letters that it merges, the slowest first
    theirs: tuple[str, ...]

    def dims(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Returns the size of every letter, from our parameter's shape."""
        return dict(zip(self.ours, shape[self.stacked :], strict=True))

    def is_in(self, shapes: Shapes) -> bool:
        """Checks whether there is such a parameter, with as many dims."""
        return len(shapes.get(self.path, ())) == self.stacked + len(self.ours)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part in its file."""
        dims = self.dims(shape)
        return tuple(
            math.prod(dims[letter] for letter in group) for group in self.theirs
        )


@dataclass(frozen=True)
class Stored:
    """A tensor in a file (for each layer and expert that its name counts): parts put
    together on an axis.
    """

    name: str
    parts: tuple[TensorPart, ...]
    axis: int = 0
    first: int = 0  # layer that our stack begins with
    step: int = 1  # from it to the next one of the stack

    def names(self, ranges: Iterable[tuple[int, int]]) -> dict[tuple[int, ...], str]:
        """Returns its name by (layer, expert), relative to where the ranges of our
        parameter's dims begin.
        """
        counted = [
            range(*ends)
            for ends, _ in zip(ranges, range(self.parts[0].stacked), strict=False)
        ]
        return {
            tuple(
                i - of.start for i, of in zip(at, counted, strict=True)
            ): self.name_of(*at)
            for at in itertools.product(*counted)
        }

    def name_of(self, *at: int) -> str:
        """Returns its name, given the place in the stack (and the expert)."""
        return self.name.format(*(self.first + self.step * i for i in at[:1]), *at[1:])

    def in_stacks(self, shapes: Shapes) -> Iterator["Stored"]:
        """Yields what it is of each of our stacks of layers; of parameters outside
        them, itself.
        """
        if not self.parts[0].stacked:
            if self.parts[0].path in shapes:
                yield self
            return
        for start, (first, step) in _stacks(shapes).items():
            parts = tuple(
                replace(part, path=start + part.path.removeprefix(_BLOCKS))
                for part in self.parts
            )
            if parts[0].is_in(shapes):
                yield replace(self, parts=parts, first=first, step=step)

    def all_names(self, shapes: Shapes) -> list[str]:
        """Returns its name for all layers and experts of parameters with these
        shapes.
        """
        return [*self.names((0, size) for size in shapes[self.parts[0].path]).values()]

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Returns its shape, from those of our parameters."""
        parts = [part.stored_shape(shapes[part.path]) for part in self.parts]
        total = sum(shape[self.axis] for shape in parts)
        return (*parts[0][: self.axis], total, *parts[0][self.axis + 1 :])

    def offset(self, part: TensorPart, shapes: Shapes) -> int:
        """Computes where on the axis a part begins."""
        before = self.parts[: self.parts.index(part)]
        return sum(
            other.stored_shape(shapes[other.path])[self.axis] for other in before
        )


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face: how its config and its tensors map onto ours."""

    model_type: str
    architecture: str
    rules: tuple[rule.Rule, ...]
    tensors: tuple[Stored, ...]
    # beginnings of names that also occur
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: str = r"rotary_emb\.inv_freq$"  # tensors that are no parameters, a regex
    # what folders may have in place of `tensors`, told by the names that only it has
    other_forms: tuple[tuple[Stored, ...], ...] = ()

    def present(self, shapes: Shapes) -> list[Stored]:
        """Returns the tensors of a model that has these parameters of ours, for each
        stack of layers.
        """
        return [part for stored in self.tensors for part in stored.in_stacks(shapes)]

    def form_of(self, names: Collection[str]) -> "Family":
        """Returns the family with the tensors that a folder with these names has."""
        for form in self.other_forms:
            own = "|".join(
                re.escape(stored.name) for stored in {*form} - {*self.tensors}
            )
            if any(re.fullmatch(own.replace(r"\{\}", r"\d+"), name) for name in names):
                return replace(self, tensors=form)
        return self

    def canonical(self, name: str) -> str:
        """Returns the table's name of a stored tensor."""
        for beginning, ours in self.renamed.items():
            match = re.match(beginning, name)
            if match:
                return ours + name[match.end() :]
        return name


def _stacks(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Returns of each stack what its paths begin with: its first layer, and how far the
    next one is.
    """
    first = next(
        (
            shape[0]
            for path, shape in shapes.items()
            if path.startswith("first_blocks/")
        ),
        0,
    )
    places = {
        int(found[1])
        for path in shapes
        if (found := re.match(r"blocks/layer_(\d+)/", path))
    }
    groups = {
        f"{_BLOCKS}layer_{place}/": (first + place, len(places)) for place in places
    }
    return {"first_blocks/": (0, 1)} | (groups or {_BLOCKS: (first, 1)})


def _table(lines: Mapping[str, str | tuple]) -> tuple[Stored, ...]:
    return tuple(_stored(name, line) for name, line in lines.items())


def _stored(name: str, line: str | tuple) -> Stored:
    axis, *parts = (0, line) if isinstance(line, str) else line
    return Stored(name, tuple(_part(name, part) for part in parts), axis)


def _part(name: str, text: str) -> TensorPart:
    path, ours, _, *theirs = text.split()
    stacked = name.count("{}")
    return TensorPart(
        f"{_BLOCKS}{path}" if stacked else path, stacked, ours, tuple(theirs)
    )


# --- tensors --------------------------------------------------------------------------

_EDGES: dict[str, str | tuple] = {
    "model.embed_tokens.weight": "embedding VD -> V D",
    "model.norm.weight": "final_norm/scale D -> D",
    "lm_head.weight": "output DV -> V D",
}
_L = "model.layers.{}."
_ATTENTION: dict[str, str | tuple] = {
    _L + "self_attn.q_proj.weight": "attention/query DHN -> HN D",
    _L + "self_attn.k_proj.weight": "attention/key DKN -> KN D",
    _L + "self_attn.v_proj.weight": "attention/value DKN -> KN D",
    _L + "self_attn.o_proj.weight": "attention/out HND -> D HN",
    _L + "self_attn.q_proj.bias": "attention/query_bias HN -> HN",
    _L + "self_attn.k_proj.bias": "attention/key_bias KN -> KN",
    _L + "self_attn.v_proj.bias": "attention/value_bias KN -> KN",
    _L + "self_attn.o_proj.bias": "attention/out_bias D -> D",
}
_MLP: dict[str, str | tuple] = {
    _L + "mlp.gate_proj.weight": "mlp/gate DF -> F D",
    _L + "mlp.up_proj.weight": "mlp/up DF -> F D",
    _L + "mlp.down_proj.weight": "mlp/down FD -> D F",
}


def _norms(**scales: str) -> dict[str, str]:
    return {
        f"{_L}{theirs}.weight": f"{ours}/scale D -> D"
        for theirs, ours in scales.items()
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


def _qk_norms(query: str, key: str) -> dict[str, str]:
    """Returns the norms of queries and keys, whose scales have these dims."""
    scales = {
        "q": f"query_norm/scale {query} -> {query}",
        "k": f"key_norm/scale {key} -> {key}",
    }
    return {
        f"{_L}self_attn.{name}_norm.weight": f"attention/{line}"
        for name, line in scales.items()
    }


_FUSED: dict[str, str | tuple] = {
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


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str | tuple]:
    """Returns the tensors of a block's router and experts, of which each is stored by
    itself.
    """
    names = (gate, up, down)
    experts = _L + block + ".experts.{}."
    lines = ("mlp/gate DF -> F D", "mlp/up DF -> F D", "mlp/down FD -> D F")
    router: dict[str, str | tuple] = {
        f"{_L}{block}.gate.weight": "mlp/router DE -> E D"
    }
    return router | {
        f"{experts}{name}.weight": line for name, line in zip(names, lines, strict=True)
    }


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
# As in the memory of transformers 5, and in files by
# save_pretrained(save_original_format=False).
_MERGED_EXPERTS: dict[str, str | tuple] = {
    _L + "mlp.gate.weight": "mlp/router DE -> E D",
    _L + "mlp.experts.gate_up_proj": (
        1,
        "mlp/gate EDF -> E F D",
        "mlp/up EDF -> E F D",
    ),
    _L + "mlp.experts.down_proj": "mlp/down EFD -> E D F",
}
_MERGED = _EDGES | _ATTENTION | _PRE_NORMS | _MERGED_EXPERTS
_G = "transformer.h.{}."
_GPT2: dict[str, str | tuple] = {
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
_GEMMA = (
    # The text part of multimodal folders leaves out what is as in the class.
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
        (*_USUAL, _EPS6, _UNTIED, rotary(), rule.layers("all", 4096)),
        LLAMA.tensors,
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
            rule.layers("flag", 4096),
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
            rule.layers("flag", 4096),
        ),
        LLAMA.tensors + _table(_qk_norms("N", "N")),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (*_GEMMA, rotary(), rule.layers("pattern", 4096, 2), rule.caps(50.0, 30.0)),
        _table(_EDGES | _ATTENTION | _MLP | _BOTH_NORMS),
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            *_GEMMA,
            rule.layers("pattern", 4096, 6),
            gemma_rotary(),
            rule.caps(None, None),
            rule.implied(qk_norm="head"),
        ),
        _table(_EDGES | _ATTENTION | _MLP | _BOTH_NORMS | _qk_norms("N", "N")),
        renamed={
            r"language_model\.model\.|model\.language_model\.": "model.",
            r"language_model\.lm": "lm",
        },
        ignored=r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.",
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
        (*_USUAL, _EPS5, _UNTIED, rotary(partial=True), rule.layers("all", None)),
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
            rule.layers("all", None),
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
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
