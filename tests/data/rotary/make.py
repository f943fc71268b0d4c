"""Writes frequencies.json beside this file: stretched rotary frequencies, as
transformers computes them.

    python tests/data/rotary/make.py    # needs torch and transformers; made with
    5.23.0, torch 2.15.0

Each case has config.json's own fields, a length in tokens, and what ROPE_INIT_FUNCTIONS
gives for both.
"""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = {
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
SHORT = [1.0 + 0.05 * i for i in range(16)]
LONG = [1.0 + i**1.5 for i in range(16)]
QWEN_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 4096,
}
OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 24.0,
    "beta_slow": 1.5,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EDGE_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 6,
    "attention_factor": 1.5,
}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
NUMBERED = LONGROPE | {
    "rope_type": "longrope",
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
}
PHI = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
PARTIAL = {key: LONGROPE[key][:12] for key in ("short_factor", "long_factor")} | {
    "type": "longrope"
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
# name -> model_type, fields of config.json, tokens
CASES = {
    "yarn, Qwen": ("qwen2", {"rope_theta": 1e6, "rope_scaling": QWEN_YARN}, 64),
    "yarn, DeepSeek": ("llama", {"rope_theta": 1e4, "rope_scaling": DEEPSEEK_YARN}, 64),
    "yarn, bounds between dims": (
        "llama",
        {"rope_theta": 1.5e5, "rope_scaling": OSS_YARN},
        64,
    ),
    "yarn, shorter than a turn": (
        "llama",
        {"rope_theta": 1e4, "rope_scaling": EDGE_YARN},
        64,
    ),
    "yarn, factor by lengths": (
        "llama",
        {
            "max_position_embeddings": 8192,
            "rope_parameters": QWEN_YARN
            | {"rope_theta": 5e4, "factor": None}
            | {"original_max_position_embeddings": 2048},
        },
        64,
    ),
    "longrope, up to the original length": (
        "phi3",
        PHI | {"rope_scaling": LONGROPE},
        4096,
    ),
    "longrope, beyond it": ("phi3", PHI | {"rope_scaling": LONGROPE}, 4097),
    "longrope, a part of the head": (
        "phi3",
        PHI
        | {"rope_scaling": PARTIAL, "partial_rotary_factor": 0.75, "rope_theta": 5e4},
        8192,
    ),
    "longrope, its own factor": (
        "llama",
        {"rope_parameters": NUMBERED | {"rope_theta": 1e4}},
        2000,
    ),
    "longrope, its own attention factor": (
        "llama",
        {"rope_parameters": NUMBERED | {"rope_theta": 1e4, "attention_factor": 1.25}},
        1000,
    ),
    "dynamic, up to the original length": (
        "llama",
        {"max_position_embeddings": 2048, "rope_theta": 1e4, "rope_scaling": DYNAMIC},
        2048,
    ),
    "dynamic, beyond it": (
        "llama",
        {"max_position_embeddings": 2048, "rope_theta": 1e4, "rope_scaling": DYNAMIC},
        5000,
    ),
    "dynamic, far beyond it": (
        "qwen3",
        {
            "max_position_embeddings": 512,
            "head_dim": 32,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        65536,
    ),
}


def main() -> None:
    cases = {}
    for name, (kind, own, length) in CASES.items():
        fields = SIZES | json.loads(json.dumps(own))
        config = transformers.AutoConfig.for_model(
            kind, **json.loads(json.dumps(fields))
        )
        compute = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        frequencies, scale = compute(config, "cpu", seq_len=length)
        cases[name] = {
            "config": {"model_type": kind, **fields},
            "length": length,
            "frequencies": frequencies.tolist(),
            "scale": scale,
        }
    text = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()
    )
    (Path(__file__).parent / "frequencies.json").write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
