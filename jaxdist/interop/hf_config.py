"""Converts Hugging Face's config.json to the transformer's config, and back.

Every field must be understood or known to have no effect on logits. Others are faults.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import ConfigError, schema, suggest
from jaxdist.interop import block_scales
from jaxdist.interop.config_rules import Source, shortest_period, spread
from jaxdist.interop.expert_rules import kinds_of, pattern_of
from jaxdist.interop.families import CLASSIFIER, FAMILIES, LLAMA, Family, family_of
from jaxdist.interop.latent_rules import KIND as LATENT
from jaxdist.models import rotary
from jaxdist.models.model_values import (
    DEFAULTS,
    GROUPS,
    STRETCH,
    TRAINING,
    differing_values,
)
from jaxdist.models.transformer_config import TransformerConfig
from jaxdist.storage.untrusted import Malformed, read_json

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Model keys that have no field in config.json. They change no logits.
_NO_FIELD = (*TRAINING, "balance")
# Fields that change no logits: bookkeeping, dropout rates (a run sets model.dropout),
# and other heads.
_HARMLESS = re.compile(
    "architectures|model_type|transformers_version|(torch_)?dtype|_name_or_path|use_cache|auto_map|"
    "((bos|eos|pad|unk|sep|cls|mask|decoder_start)_)?token_id|initializer_range|max_position_embeddings|"
    "original_max_position_embeddings|n_ctx|(attention|hidden)_dropout|(resid|embd|attn)_pdrop|pretraining_tp|"
    "_?attn_implementation|cache_implementation|id2label|label2id|num_labels|problem_type|"
    "task_specific_params|summary_.*|output_.*|return_dict|use_return_dict|gradient_checkpointing|"
    "chunk_size_feed_forward|reorder_and_upcast_attn|tokenizer_class|is_llama_config|transformers\\.js_config|"
    "torchscript|router_(aux_loss_coef|jitter_noise)|boi_token_index|eoi_token_index|image_token_index|mm_tokens_per_image|vision_config|"
    "multimodal_projector_bias|projector_hidden_act|spatial_merge_size|vision_feature_layer|residual_dropout"
)
# Fields that change no logits if they are false, null or empty.
_OFF = re.compile(
    "is_(encoder_)?decoder|tie_encoder_decoder|add_cross_attention|cross_attention_hidden_size|pruned_heads|"
    "use_mrope|rope_interleaved|quantization_config"
)
# Fields that an export copies from the config.json that the model came with.
_CARRIED = re.compile(
    "(bos|eos|pad)_token_id|max_position_embeddings|initializer_range|.*dropout|.*_pdrop|"
    "router_(aux_loss_coef|jitter_noise)"
)
# Fields of a reward model, whose score is its only label.
_ONE_LABEL: dict[str, Any] = {
    "num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}
# Multimodal models, whose text model is in text_config.
_MULTIMODAL = ("gemma3", "mistral3")
# Families whose config and tensors have Llama's names, but which compute other logits.
_UNLIKE_LLAMA = {
    "gemma": "its norms scale by 1 + weight, and its embeddings by the root of their size"
}
_UNLIKE_LLAMA |= dict.fromkeys(
    ("cohere", "ernie4_5", "glm", "glm4", "gptj", "helium"),
    "it rotates pairs of dims, not halves of a head",
)


def read_config(folder: Path | str) -> dict[str, Any]:
    """Reads the config.json of a folder.

    For a multimodal Gemma 3 or Mistral 3, the fields of its text model replace those of
    the whole. Only whether embeddings are tied is decided by the whole, as in
    transformers 5.

    Raises:
      ConfigError: there is no config.json, or it is no JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        config = read_json(path, dict)
    except FileNotFoundError:
        raise ConfigError(_absence(folder)) from None
    except Malformed as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    text_config = config.get("text_config")
    if config.get("model_type") in _MULTIMODAL and isinstance(text_config, dict):
        del config["text_config"]
        tied = config.get("tie_word_embeddings")
        config |= text_config
        if tied is not None:
            config["tie_word_embeddings"] = tied
    return config


def _absence(folder: Path | str) -> str:
    """Explains that config.json is missing; recognises names of models on the hub."""
    if _HUB_NAME.fullmatch(str(folder)) and not Path(folder).exists():
        owner = Path(folder).parts[0]
        # "models/NAME" is a local path and not a name on the hub
        name = "OWNER/MODEL" if owner == "models" else folder
        return (
            f"{folder}: no such folder. jaxdist downloads no models. For a model of the Hugging Face hub, "
            f"run hf download {name} --local-dir models/{Path(folder).name}, then give that folder"
        )
    return f"{folder}: no {CONFIG} there; give a folder that save_pretrained wrote"


def derive(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Derives the transformer's config from a config.json.

    An architecture without a table is read as Llama.

    Args:
      config: the fields of config.json.

    Returns:
      The family, and the fields of TransformerConfig that logits depend on.

    Raises:
      ConfigError: fields are missing, not understood, or have unsupported values.
    """
    kind = config.get("model_type")
    known_family = family_of(kind)
    family = known_family or LLAMA
    is_known = known_family is not None
    source = Source(config)
    values = dict[str, Any]()
    for rule in family.rules:
        values |= rule.read(source, values)
    faults = source.close(harmless=_is_harmless)
    quantization = config.get("quantization_config")
    if block_scales.is_fp8(quantization):
        faults += block_scales.config_faults(quantization)
    if is_classifier(config):
        values["head"] = "score"
        faults += _label_faults(config)
    if not isinstance(kind, str | None):
        faults.append(f"model_type={kind!r}: a name is required")
    if not is_known:
        if "auto_map" in config:
            faults.append(
                f"auto_map={config['auto_map']!r}: code of the folder, never run"
            )
        if str(kind) in _UNLIKE_LLAMA:
            faults.append(f"model_type={kind!r}: {_UNLIKE_LLAMA[str(kind)]}")
    if not faults:
        faults = schema.faults(_config_of(values), "model.")
    if faults and not is_known:
        hint = suggest(str(kind), FAMILIES)
        known = (
            f"there are {', '.join(FAMILIES)}, and what has Llama's fields and tensors"
        )
        faults.insert(0, f"model_type={kind!r} is not known:{hint} {known}")
    if faults:
        raise ConfigError(f"{CONFIG}: {fault}" for fault in faults)
    return family, canonical_values(values)


def _config_of(values: Mapping[str, Any]) -> TransformerConfig:
    """Makes the transformer's config of values, whose groups are mappings."""
    groups = {
        name: replace(default, **values[name])
        for name, default in GROUPS.items()
        if name in values
    }
    return TransformerConfig(**{**values, **groups})


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Checks whether a config.json is that of a model for sequence classification."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list):
        return False
    return any(str(name).endswith(CLASSIFIER) for name in architectures)


def _label_faults(config: Mapping[str, Any]) -> list[str]:
    """Checks that a classifier has one label, as a reward model."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 1)
    if count == 1:
        return []
    return [f"num_labels={count!r}: not supported; a reward model has 1"]


def _is_harmless(key: str, value: Any) -> bool:
    """Checks whether a field changes no logits."""
    if _HARMLESS.fullmatch(key):
        return True
    if key == "quantization_config" and block_scales.is_fp8(value):
        return True
    return not value and _OFF.fullmatch(key) is not None


def fields_of(
    values: Mapping[str, Any], origin: Mapping[str, Any] | None = None
) -> tuple[Family, dict[str, Any]]:
    """Finds the family that can express a transformer's config, and its config.json.

    Each family writes the values as fields and reads them back. It fits if no value has
    changed.

    Args:
      values: the model's config, as fields of TransformerConfig.
      origin: the config.json that the model came with. Its family is tried first, and
        its special tokens and dropout rates are kept. None: no token is special.

    Returns:
      The family, and the fields of config.json.

    Raises:
      ConfigError: no family fits. The message names the values in which the nearest
        family differs.
    """
    expected = canonical_values(values)
    origin = origin or {}
    # null, since the defaults of Hugging Face's classes may be ids that do not exist
    carried = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    carried |= {
        name: value for name, value in origin.items() if _CARRIED.fullmatch(name)
    }
    misfits: list[_Misfit] = []
    for family in sorted(
        FAMILIES.values(), key=lambda f: f.model_type != origin.get("model_type")
    ):
        architecture = family.architecture_for(expected["head"])
        fields = carried | {
            "architectures": [architecture or family.architecture],
            "model_type": family.model_type,
        }
        if expected["head"] == "score":
            fields |= _ONE_LABEL
        for rule in family.rules:
            fields |= rule.write(expected)
        try:
            _, written_values = derive(fields)
        except ConfigError as error:
            misfits.append(_Misfit(family, is_valid=False, faults=error.faults))
            continue
        if not architecture:
            written_values.pop("head")
        faults = tuple(differing_values(expected, written_values))
        if not faults and not architecture:
            raise ConfigError(
                f"model.head={expected['head']}: transformers has no class of "
                f"{family.model_type} for sequence classification. Read the "
                f"scores with jaxdist.load_run(WORKDIR).logits(ids)"
            )
        if not faults:
            return family, fields
        misfits.append(_Misfit(family, is_valid=True, faults=faults))
    nearest = min(misfits, key=lambda misfit: (not misfit.is_valid, len(misfit.faults)))
    summary = (
        f"none of {', '.join(FAMILIES)} has these values; "
        f"the nearest, {nearest.family.model_type}, differs:"
    )
    raise ConfigError([summary, *nearest.faults])


class _Misfit(NamedTuple):
    """A family that cannot express a config."""

    family: Family
    is_valid: bool  # whether the fields that it wrote can be read
    faults: Sequence[str]


def canonical_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces a model's config to the values that logits depend on.

    Two configs with equal logits become equal: values without effect are set to their
    defaults.

    Args:
      values: fields of TransformerConfig; absent ones have their defaults.
    """
    groups = {
        name: vars(default) | dict(values.get(name, {}))
        for name, default in GROUPS.items()
    }
    all_values = DEFAULTS | dict(values) | groups
    v = {name: value for name, value in all_values.items() if name not in _NO_FIELD}
    idle: list[str] = []  # names of values without effect
    kinds = spread(v["layer_pattern"], v["num_layers"])
    if not v["window"]:
        kinds = ["global" if kind == "local" else kind for kind in kinds]
    v["layer_pattern"] = shortest_period(kinds)
    head_dim = v["head_dim"]
    if set(kinds) == {LATENT}:
        head_dim = v[LATENT]["nope_dim"] + v[LATENT]["rope_dim"]
        idle += ["head_dim", "num_kv_heads"]
    if LATENT not in kinds:
        v[LATENT] = vars(GROUPS[LATENT])
    v["attention_scale"] = v["attention_scale"] or head_dim**-0.5
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
    read = config.read_names
    idle += [name for name in STRETCH if name not in read]
    if not config.stretches and v["rope_theta_local"] == v["rope_theta"]:
        idle.append("rope_theta_local")
    rotates = v["positions"] == "rotary" and {*kinds} != {"nope"}
    if not rotates:
        idle += [*STRETCH, "rope_theta", "rope_theta_local", "rotary_fraction"]
    if v["positions"] == "rotary":
        idle.append("max_positions")
    return v | {name: DEFAULTS[name] for name in idle}
