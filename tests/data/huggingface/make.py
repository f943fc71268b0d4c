"""Writes the folders beside this file with `transformers`: tiny models of every family,
and their logits.

    python tests/data/huggingface/make.py [NAME ...]    # default: all

All weights are random, norms and biases too: a table that forgets one shows.
`logits.npy` are those of `tokens.npy`, in float32, by transformers; sequences are
longer than the sliding windows.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
SHARD, LARGER = "8KB", {"mixtral": "20KB"}  # of a file, where a folder has several
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def configs(**changes):
    """Returns {name: config}, one for each family and for what differs in how folders
    look.
    """
    t, sizes = transformers, SIZES | changes
    depth = {
        name: sizes[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")
    }
    gemma = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 24}
    return {
        "llama": t.LlamaConfig(**sizes, rope_parameters=LLAMA3, attention_bias=True),
        "smollm": t.LlamaConfig(
            **sizes | {"vocab_size": 260}, tie_word_embeddings=True
        ),
        "mistral": t.MistralConfig(**sizes, sliding_window=5),
        "qwen2": t.Qwen2Config(
            **sizes, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "qwen3": t.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True),
        "gemma2": t.Gemma2Config(
            **sizes, **gemma, attn_logit_softcapping=2.0, final_logit_softcapping=4.0
        ),
        "gemma3": t.Gemma3TextConfig(
            **sizes,
            **gemma,
            sliding_window_pattern=2,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        "gpt2": t.GPT2Config(
            n_embd=sizes["hidden_size"],
            n_layer=sizes["num_hidden_layers"] - 1,
            n_head=4,
            n_positions=32,
            **depth,
        ),
        "phi3": t.Phi3Config(
            **sizes | {"hidden_size": 2 * sizes["hidden_size"]},
            sliding_window=5,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        "olmo2": t.Olmo2Config(**sizes),
        "mixtral": t.MixtralConfig(**sizes, num_local_experts=4),
        "qwen3_moe": t.Qwen3MoeConfig(
            **sizes,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=12,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            head_dim=8,
            use_sliding_window=True,
            sliding_window=5,
        ),
        "olmoe": t.OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2),
        "olmo3": t.Olmo3Config(
            **sizes,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"]
            * (sizes["num_hidden_layers"] // 2)
            + ["sliding_attention"] * (sizes["num_hidden_layers"] % 2),
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8,
            },
        ),
        "smollm3": t.SmolLM3Config(
            **sizes,
            no_rope_layers=[1, 0] * (sizes["num_hidden_layers"] // 2)
            + [1] * (sizes["num_hidden_layers"] % 2),
            rope_theta=50.0,
        ),
        "seed_oss": t.SeedOssConfig(**sizes, head_dim=8),
        "ministral3": t.Ministral3Config(
            **sizes,
            head_dim=8,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        "phi4": t.Phi3Config(
            **sizes | {"hidden_size": 2 * sizes["hidden_size"]},
            rope_theta=250_000.0,
            max_position_embeddings=16_384,
            original_max_position_embeddings=16_384,
            sliding_window=None,
        ),
        "qwen2_moe": t.Qwen2MoeConfig(
            **sizes,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=16,
            mlp_only_layers=[0],
        ),
        "glm4_moe": t.Glm4MoeConfig(
            **sizes,
            head_dim=8,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            num_mtp_layers=0,
        ),
        **deepseek(sizes),
    }


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.75,
    "original_max_position_embeddings": 8,
}
FP8 = "deepseek_v3_fp8"
FP8_BLOCK = [4, 4]  # transformers needs blocks that divide the dims


def deepseek(sizes):
    """Returns the configs of latent attention: two dense and two sparse layers."""
    t = transformers
    own = sizes | {
        "num_hidden_layers": 4,
        "num_key_value_heads": sizes["num_attention_heads"],
        "max_position_embeddings": 32,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 2,
    }
    v3 = own | {"q_lora_rank": 12, "n_group": 4, "topk_group": 2}
    yarn = {"rope_parameters": YARN}
    return {
        "deepseek_v3": t.DeepseekV3Config(**v3, **yarn),
        "moonlight": t.DeepseekV3Config(
            **own, q_lora_rank=None, n_group=1, topk_group=1, rms_norm_eps=1e-5
        ),
        "deepseek_v2": t.DeepseekV2Config(**own, q_lora_rank=None, **yarn),
        FP8: t.DeepseekV3Config(**v3),
        # the large DeepSeek-V2
        "deepseek_v2_groups": t.DeepseekV2Config(
            **own,
            n_group=4,
            topk_group=2,
            q_lora_rank=12,
            topk_method="group_limited_greedy",
            routed_scaling_factor=4.0,
        ),
    }


BF16 = ("smollm", "qwen2", "phi3", "olmoe", "seed_oss", "phi4", "qwen2_moe")
BF16 += ("deepseek_v2",)
SHARDED = ("llama", "gemma3", "mixtral")


def build(config, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Returns a model in which every weight is random, rounded to `dtype` and kept in
    float32.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25 if parameter.ndim > 1 else 0.5)
            parameter.copy_(parameter.to(dtype).float())
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.uniform_(0, 0.5)
    return model


def quantise(folder: Path) -> None:
    """Converts the matrices of a folder's layers to 8-bit floats and scales of blocks.

    Also writes the values that transformers makes of them.
    """
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, x in list(tensors.items()):
        if x.ndim != 2 or ".layers." not in name or ".gate." in name:
            continue
        rows, columns = (n // size for n, size in zip(x.shape, FP8_BLOCK, strict=True))
        blocks = x.reshape(rows, FP8_BLOCK[0], columns, FP8_BLOCK[1])
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = codes.reshape(x.shape)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": FP8_BLOCK,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def dequantised(folder: Path):
    """Returns transformers' model of a folder in 8-bit floats; writes its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    plain = folder / "plain"
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(plain)
    from safetensors.numpy import load_file

    np.savez(folder / "dequantised.npz", **load_file(plain / "model.safetensors"))
    shutil.rmtree(plain)
    return model


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def continued(model, tokens: np.ndarray, count: int) -> np.ndarray:
    """Returns the most likely next tokens of each row, [B, count]; none ends a row."""
    with torch.no_grad():
        ids = torch.tensor(tokens)
        for _ in range(count):
            last = model(ids).logits[:, -1]
            ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
    return ids[:, -count:].numpy()


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer with a few merges and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for seed, (name, config) in enumerate(configs().items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        dtype = torch.bfloat16 if name in BF16 else torch.float32
        model = build(config, seed, dtype)
        tokens = np.random.default_rng(seed).integers(
            0, config.vocab_size, (1 if name == "smollm" else 2, 12)
        )
        size = LARGER.get(name, SHARD) if name in SHARDED else "1GB"
        logits = logits_of(model, tokens)
        model.to(dtype).save_pretrained(folder, max_shard_size=size)
        if name == FP8:
            quantise(folder)
            logits = logits_of(dequantised(folder), tokens)
        np.save(folder / "tokens.npy", tokens.astype(np.int32))
        np.save(folder / "logits.npy", logits)
        if name in deepseek(SIZES) and name != FP8:
            generated = continued(model.float(), tokens, 8)
            np.save(folder / "generated.npy", generated.astype(np.int32))
        if name == "smollm":
            write_tokenizer(folder)


if __name__ == "__main__":
    main()
