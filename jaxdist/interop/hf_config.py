"""config.json of Hugging Face <-> the transformer's values, with every field accounted
for.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, schema, suggest
from jaxdist.interop.config_rules import Source, shortest_period, spread
from jaxdist.interop.expert_rules import kinds_of, pattern_of
from jaxdist.interop.families import FAMILIES, LLAMA, Family
from jaxdist.models import rotary
from jaxdist.models.model_values import DEFAULTS, STRETCH, TRAINING, differing_values
from jaxdist.models.transformer_config import TransformerConfig
from jaxdist.storage.untrusted import Malformed, read_json

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Values that no field of a config.json holds. How the load of experts is kept even is
# one that a run has to continue with, though it changes no logits.
_NO_FIELD = (*TRAINING, "balance")
# Fields that change no logits: bookkeeping, dropout rates (ours is model.dropout),
# other heads.
_HARMLESS = re.compile(
    "architectures|model_type|transformers_version|(torch_)?dtype|_name_or_path|use_cache|auto_map|"
    "((bos|eos|pad|unk|sep|cls|mask|decoder_start)_)?token_id|initializer_range|max_position_embeddings|"
    "original_max_position_embeddings|n_ctx|(attention|hidden)_dropout|(resid|embd|attn)_pdrop|pretraining_tp|"
    "_?attn_implementation|cache_implementation|id2label|label2id|num_labels|problem_type|"
    "task_specific_params|summary_.*|output_.*|return_dict|use_return_dict|gradient_checkpointing|"
    "chunk_size_feed_forward|reorder_and_upcast_attn|tokenizer_class|is_llama_config|transformers\\.js_config|"
    "torchscript|router_(aux_loss_coef|jitter_noise)|boi_token_index|eoi_token_index|image_token_index|mm_tokens_per_image|vision_config"
)
# Fields that change none where they are false, null or empty.
_OFF = re.compile(
    "is_(encoder_)?decoder|tie_encoder_decoder|add_cross_attention|cross_attention_hidden_size|pruned_heads|"
    "use_mrope|rope_interleaved|quantization_config"
)
_CARRIED = re.compile(
    "(bos|eos|pad)_token_id|max_position_embeddings|initializer_range|.*dropout|.*_pdrop|"
    "router_(aux_loss_coef|jitter_noise)"
)
# Their config and tensors have Llama's names, and they compute something else.
_UNLIKE = {
    "gemma": "its norms scale by 1 + weight, and its embeddings by the root of their size"
}
_UNLIKE |= dict.fromkeys(
    ("cohere", "ernie4_5", "glm", "glm4", "gptj", "helium"),
    "it rotates pairs of dims, not halves of a head",
)


def read_config(folder: Path | str) -> dict[str, Any]:
    """Returns a folder's config.json; of a multimodal Gemma 3 its text part.

    Raises:
      ConfigError: there is none, or it is no JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        config = read_json(path, dict)
    except FileNotFoundError:
        raise ConfigError(_absence(folder)) from None
    except Malformed as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if config.get("model_type") == "gemma3" and isinstance(
        config.get("text_config"), dict
    ):
        return {k: v for k, v in config.items() if k != "text_config"} | config[
            "text_config"
        ]
    return config


def _absence(folder: Path | str) -> str:
    """Explains where no config.json is; a name of a hub is recognised."""
    if _HUB_NAME.fullmatch(str(folder)) and not Path(folder).exists():
        owner = Path(folder).parts[0]
        # of the hub; "models" is where folders lie
        name = "OWNER/MODEL" if owner == "models" else folder
        return (
            f"{folder}: no such folder here; if it is a model of the Hugging Face hub, nothing is downloaded "
            f"unasked: hf download {name} --local-dir models/{Path(folder).name}, then give that folder"
        )
    return f"{folder}: no {CONFIG} there; give a folder that save_pretrained wrote"


def derive(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a config.json, and the values of the transformer that it
    describes.

    An architecture that has no table is read as Llama's.

    Raises:
      ConfigError: a field for each fault: missing, not understood, or with a value that
        is not built.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind), LLAMA)
    source = Source(config)
    values = dict[str, Any]()
    for rule in family.rules:
        values |= rule.read(source, values)
    faults = source.close(
        lambda key, value: (
            _HARMLESS.fullmatch(key) or (not value and _OFF.fullmatch(key))
        )
    )
    if not isinstance(kind, str | None):
        faults.append(f"model_type={kind!r}: a name is required")
    if family.model_type != kind:
        if "auto_map" in config:
            faults.append(
                f"auto_map={config['auto_map']!r}: code of the folder, never run"
            )
        if str(kind) in _UNLIKE:
            faults.append(f"model_type={kind!r}: {_UNLIKE[str(kind)]}")
    if not faults:
        faults = schema.faults(TransformerConfig(**values), "model.")
    if faults and family.model_type != kind:
        known = (
            f"there are {', '.join(FAMILIES)}, and what has Llama's fields and tensors"
        )
        faults.insert(
            0,
            f"model_type={kind!r} is not known:{suggest(str(kind), FAMILIES)} {known}",
        )
    if faults:
        raise ConfigError(f"{CONFIG}: {fault}" for fault in faults)
    return family, canonical_values(values)


def fields_of(
    values: Mapping[str, Any], origin: Mapping[str, Any] | None = None
) -> tuple[Family, dict[str, Any]]:
    """Returns the family that can express a transformer's values, and its config.json.

    Each family writes what it can and reads it back: it fits if nothing has changed.

    Args:
      origin: the config.json that the model came with: its family is tried first, and
        what it says of special tokens and dropout stays. Without one no token is
        special: classes' defaults may not exist.

    Raises:
      ConfigError: none fits; the values in which the nearest one differs.
    """
    wanted = canonical_values(values)
    origin = origin or {}
    # of each family that does not fit
    differences: dict[str, tuple[bool, Sequence[str]]] = {}
    carried = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    carried |= {
        name: value for name, value in origin.items() if _CARRIED.fullmatch(name)
    }
    for family in sorted(
        FAMILIES.values(), key=lambda f: f.model_type != origin.get("model_type")
    ):
        fields = carried | {
            "architectures": [family.architecture],
            "model_type": family.model_type,
        }
        for rule in family.rules:
            fields |= rule.write(wanted)
        try:
            legal = True
            faults = tuple(differing_values(wanted, derive(fields)[1]))
        except ConfigError as error:
            legal = False
            faults = error.faults
        if not faults:
            return family, fields
        differences[family.model_type] = not legal, faults
    nearest = min(
        differences, key=lambda kind: (differences[kind][0], len(differences[kind][1]))
    )
    known = f"none of {', '.join(FAMILIES)} has these values; the nearest, {nearest}, differs:"
    raise ConfigError([known, *differences[nearest][1]])


def canonical_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that logits depend on, those without effect at their
    defaults.
    """
    v = {
        name: value
        for name, value in (DEFAULTS | dict(values)).items()
        if name not in _NO_FIELD
    }
    idle: list[str] = []
    kinds = spread(v["layer_pattern"], v["num_layers"])
    if not v["window"]:
        kinds = ["global" if kind == "local" else kind for kind in kinds]
    v["layer_pattern"] = shortest_period(kinds)
    v["attention_scale"] = v["attention_scale"] or v["head_dim"] ** -0.5
    if v["num_experts"]:
        v["expert_d_ff"] = v["expert_d_ff"] or v["d_ff"]
        first, pattern = pattern_of(kinds_of(v))
        if pattern:
            v["first_dense_layers"] = first
            v["feed_forward_pattern"] = pattern
    if v["expert_groups"] == v["expert_top_groups"]:
        idle += ["expert_groups", "expert_top_groups"]
    if "local" not in kinds:
        idle += ["window", "rope_theta_local"]
    config = rotary.RotaryConfig(**{name: v[name] for name in STRETCH})
    if config.stretches:
        read = ("rope_factor", "rope_scaling", *rotary.READ[config.rope_scaling])
        idle += [name for name in STRETCH if name not in read]
    else:
        idle += STRETCH
        if v["rope_theta_local"] == v["rope_theta"]:
            idle.append("rope_theta_local")
    turns = [*STRETCH, "rope_theta", "rope_theta_local", "rotary_fraction"]
    idle += turns if v["positions"] == "learned" else ["max_positions"]
    return v | {name: DEFAULTS[name] for name in idle}
