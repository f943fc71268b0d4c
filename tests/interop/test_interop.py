"""Import and export of folders that transformers wrote, without transformers.

The folders are in tests/data/huggingface.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdist import interop
from jaxdist.config import ConfigError, trees
from jaxdist.interop.hf_reader import INDEX, SINGLE
from jaxdist.models.transformer import TransformerConfig
from support.huggingface import (
    EXPERT_MESH,
    EXPERTS,
    FAMILIES,
    FOLDERS,
    MESH,
    compare,
    load_all,
    logits,
    opened,
)

WINDOW = 5  # of the folders' sliding layers


def test_there_is_a_folder_of_every_family():
    kinds = {
        json.loads((FOLDERS / name / "config.json").read_text())["model_type"]
        for name in FAMILIES
    }
    # smollm is a llama
    assert kinds == set(interop.FAMILIES)
    assert len(FAMILIES) > len(kinds)
    assert any((FOLDERS / name / INDEX).is_file() for name in FAMILIES)
    assert np.load(FOLDERS / "mistral" / "tokens.npy").shape[1] > WINDOW


@pytest.fixture(scope="module")
def imported():
    """Returns a function that imports a family on one device, once."""
    made = {}
    return lambda name: made.get(name) or made.setdefault(name, compare(FOLDERS / name))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(imported, name):
    difference, tensors, parameters = imported(name)
    assert difference <= 1e-5
    stored = load_all(FOLDERS / name)
    assert tensors.bytes_read == sum(x.nbytes for x in stored.values()) > 10_000
    assert all(x.dtype == jnp.float32 for x in parameters.values())


SHARDED_TOO = ("gpt2", "gemma3")  # the others: tests/interop/test_transformers.py


@pytest.mark.parametrize(
    "name",
    [
        n if n in SHARDED_TOO else pytest.param(n, marks=pytest.mark.slow)
        for n in FAMILIES
    ],
)
def test_logits_on_data_2_fsdp_2_tensor_2(name):
    difference, _, parameters = compare(FOLDERS / name, MESH)
    assert difference <= 1e-5
    placed = [x.sharding for x in parameters.values()]
    assert all(len(where.device_set) == 8 for where in placed)
    assert sum(not where.is_fully_replicated for where in placed) >= 7


FIRST = [
    EXPERTS[0],
    *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS[1:]),
]


@pytest.mark.parametrize("name", FIRST)
def test_logits_on_expert_2_fsdp_2_tensor_2(name):
    """Experts' kernels are split by all three axes, and each byte is read once."""
    difference, tensors, parameters = compare(FOLDERS / name, EXPERT_MESH)
    assert difference <= 1e-5
    assert tensors.bytes_read == sum(
        x.nbytes for x in load_all(FOLDERS / name).values()
    )
    for path in ("gate", "up", "down"):
        assert parameters[f"blocks/mlp/{path}"].ndim == 4
        assert tuple(
            sorted(str(x) for x in parameters[f"blocks/mlp/{path}"].sharding.spec[1:])
        ) == (
            "expert",
            "fsdp",
            "tensor",
        )


@pytest.mark.parametrize("name", FIRST)
def test_merged_experts_are_read_too(name, tmp_path, imported):
    """transformers 5 can write the experts of a layer as one tensor."""
    shutil.copyfile(FOLDERS / name / "config.json", tmp_path / "config.json")
    before = load_all(FOLDERS / name)
    merged = {
        key: x
        for key, x in before.items()
        if ".experts." not in key and "_moe.gate" not in key
    }
    experts = json.loads((tmp_path / "config.json").read_text())
    count = experts.get("num_local_experts") or experts["num_experts"]
    block, kernels = (
        ("block_sparse_moe", "w1 w3 w2")
        if name == "mixtral"
        else ("mlp", "gate_proj up_proj down_proj")
    )
    for layer in {*range(experts["num_hidden_layers"])} - {
        *experts.get("mlp_only_layers", ())
    }:
        start = f"model.layers.{layer}."
        gate, up, down = (
            [
                before[f"{start}{block}.experts.{i}.{kernel}.weight"]
                for i in range(count)
            ]
            for kernel in kernels.split()
        )
        merged[f"{start}mlp.gate.weight"] = before[f"{start}{block}.gate.weight"]
        merged[f"{start}mlp.experts.gate_up_proj"] = np.concatenate(
            [np.stack(gate), np.stack(up)], 1
        )
        merged[f"{start}mlp.experts.down_proj"] = np.stack(down)
    save(merged, tmp_path / SINGLE)
    at = opened(tmp_path)
    for path, x in at.tensors.load(at.wanted).items():
        np.testing.assert_array_equal(x, imported(name)[2][path], err_msg=path)
    at = opened(tmp_path, EXPERT_MESH)
    at.tensors.load(at.wanted)
    assert at.tensors.bytes_read == sum(x.nbytes for x in merged.values())
    del merged["model.layers.1.mlp.experts.down_proj"]
    save(merged, tmp_path / SINGLE)
    with pytest.raises(
        ConfigError, match="missing tensors: model.layers.1.mlp.experts.down_proj$"
    ):
        opened(tmp_path)


def written(parameters, name, target, **options):
    """Exports parameters of a family's folder; returns config.json and the tensors."""
    _, values = interop.derive(interop.read_config(FOLDERS / name))
    kind = interop.read_config(FOLDERS / name)["model_type"]
    family, fields = interop.fields_of(values, {"model_type": kind})
    shapes = {path: x.shape for path, x in parameters.items()}
    options = {"dtype": "float32", "max_shard_bytes": 10_000} | options
    size = interop.export(
        target, family, fields, shapes, lambda p: np.asarray(parameters[p]), **options
    )
    fields = json.loads((target / "config.json").read_text())
    assert fields["model_type"] == kind
    assert interop.derive(fields)[1] == values
    tensors = load_all(target)
    assert size == sum(x.nbytes for x in tensors.values())
    return fields, tensors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_tensor_that_is_not_finite_is_refused_by_its_name(tmp_path, dtype):
    folder = shutil.copytree(FOLDERS / "mistral", tmp_path / "folder")
    stored = {name: x.astype(dtype) for name, x in load_all(folder).items()}
    layers = [name for name in stored if "down_proj" in name]
    stored[layers[1]].flat[-1], stored["model.norm.weight"].flat[0] = np.nan, -np.inf
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, folder / SINGLE)
    at = opened(folder)
    with pytest.raises(ConfigError) as refused:
        at.tensors.load(at.wanted)
    (fault,) = refused.value.faults
    assert f"NaN or infinite values: {layers[1]}, model.norm.weight;" in fault


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_what_was_read(imported, tmp_path, name):
    before = load_all(FOLDERS / name)
    fields, after = written(imported(name)[2], name, tmp_path)
    assert (
        fields["architectures"] == interop.read_config(FOLDERS / name)["architectures"]
    )
    assert after.keys() == before.keys()
    for key in before:
        np.testing.assert_array_equal(
            before[key].astype(np.float32), after[key], err_msg=key
        )
    index = json.loads((tmp_path / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    for file in tmp_path.glob("model-*.safetensors"):
        assert all(index["weight_map"][key] == file.name for key in load_file(file))
        assert file.stat().st_size < 13_000 or len(load_file(file)) == 1


def test_bfloat16_files_come_back_bit_for_bit(imported, tmp_path):
    before = load_all(FOLDERS / "qwen2")
    assert {str(x.dtype) for x in before.values()} == {"bfloat16"}
    fields, after = written(
        imported("qwen2")[2], "qwen2", tmp_path, dtype="bfloat16", max_shard_bytes=10**9
    )
    assert (tmp_path / SINGLE).is_file()
    assert not (tmp_path / INDEX).exists()
    assert fields["torch_dtype"] == "bfloat16"
    for key in before:
        assert before[key].tobytes() == after[key].tobytes()
        assert after[key].dtype == before[key].dtype
    glm = imported("glm4_moe")[2]
    _, after = written(glm, "glm4_moe", tmp_path / "glm", dtype="bfloat16")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = load_all(FOLDERS / "glm4_moe")
    assert after[name].tobytes() == stored[name].tobytes()  # in float32
    assert str(after["model.norm.weight"].dtype) == "bfloat16"


# --- reading shards -------------------------------------------------------------------


def test_each_shard_is_read_once_and_nothing_else():
    """Replicas over data are not read again, and fused tensors are cut."""
    for name in ("phi3", "gpt2"):
        at = opened(FOLDERS / name, MESH)
        assert at.mesh.shape["data"] == 2
        whole = load_all(FOLDERS / name)
        loaded = at.tensors.load(at.wanted)
        assert at.tensors.bytes_read == sum(x.nbytes for x in whole.values())
        alone = {
            p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here())
            for p, x in at.wanted.items()
        }
        for path, x in (
            interop.Tensors(FOLDERS / name, at.tensors.family).load(alone).items()
        ):
            np.testing.assert_array_equal(x, loaded[path], err_msg=path)


def here():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_a_shard_may_cut_any_dim():
    """The file merges heads and head size, so a cut of the second is many ranges."""
    at = opened(FOLDERS / "gemma2")
    tensors, wanted = at.tensors, at.wanted
    whole = tensors.load(wanted)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    cuts = {
        "blocks/attention/query": ("c", "a", None, "b"),
        "blocks/attention/out": (None, None, ("a", "b"), "c"),
    }
    for path, cut in cuts.items():
        where = jax.sharding.NamedSharding(mesh, jax.P(*cut))
        x = whole[path]
        if x.shape[0] % 2 and cut[0]:
            where = jax.sharding.NamedSharding(mesh, jax.P(None, *cut[1:]))
        part = wanted | {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)}
        tensors.bytes_read = 0
        found = tensors.load(part)[path]
        assert found.sharding == where
        assert not where.is_fully_replicated
        np.testing.assert_array_equal(found, x)
        assert tensors.bytes_read == sum(x.nbytes for x in whole.values())


@pytest.mark.parametrize(
    ("base", "close"),
    [("none", 1e-5), pytest.param("int8", 0.15, marks=pytest.mark.slow)],
)
def test_adapters_stand_on_the_weights_and_change_nothing_at_first(base, close):
    """LoRA stores a kernel as `base`, QLoRA as codes and scales."""
    if base != "none":
        pytest.importorskip("qwix")
    folder = FOLDERS / "gpt2"
    at = opened(folder, {"lora.rank": 2, "lora.base": base}, devices=1)
    state = at.built.init(at.tensors.load(at.wanted))
    frozen = trees.flatten_names(state.frozen)
    assert ("blocks/mlp/up/base" if base == "none" else "blocks/mlp/up/codes") in frozen
    tokens, expected = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    found = logits(at, state.trainable, tokens, state.frozen)
    assert np.abs(found - expected).max() <= close


# --- config.json ----------------------------------------------------------------------

COMMON = {
    "architectures": ["X"],
    "transformers_version": "4.40.0",
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
# Fields as published folders have them, in the spelling of their time, and values that
# they must give.
PUBLISHED = {
    "Llama 2": (
        {
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "pretraining_tp": 1,
            "rope_scaling": None,
        },
        {
            "num_kv_heads": 8,
            "head_dim": 8,
            "rope_theta": 10000.0,
            "tie_embeddings": False,
            "norm_eps": 1e-5,
        },
    ),
    "Llama 3.2": (
        {
            "model_type": "llama",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        {
            "rope_theta": 500000.0,
            "rope_factor": 32.0,
            "rope_original_positions": 8192,
            "head_dim": 16,
            "rope_scaling": "llama3",
            "tie_embeddings": True,
        },
    ),
    "linear": (
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": "linear", "rope_factor": 4.0},
    ),
    "Mistral 0.1": (
        {
            "model_type": "mistral",
            "num_key_value_heads": 2,
            "sliding_window": 1024,
            "rms_norm_eps": 1e-5,
        },
        {"window": 1024, "layer_pattern": ("local",), "num_kv_heads": 2},
    ),
    "Mistral 0.3": (
        {
            "model_type": "mistral",
            "num_key_value_heads": 2,
            "sliding_window": None,
            "rope_theta": 1e6,
        },
        {"window": 0, "layer_pattern": ("global",), "rope_theta": 1e6},
    ),
    "Qwen 2.5": (
        {
            "model_type": "qwen2",
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 21,
            "tie_word_embeddings": True,
            "use_mrope": None,
        },
        {
            "bias": "qkv",
            "window": 0,
            "layer_pattern": ("global",),
            "tie_embeddings": True,
        },
    ),
    "Qwen 3": (
        {
            "model_type": "qwen3",
            "head_dim": 32,
            "attention_bias": False,
            "use_sliding_window": False,
        },
        {"qk_norm": "head", "head_dim": 32, "bias": "none"},
    ),
    "Gemma 2": (
        {
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 144,
            "sliding_window": 512,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 16,
            "num_key_value_heads": 4,
        },
        {
            "attention_scale": 1 / 12,
            "embedding_scale": 8.0,
            "attention_softcap": 50.0,
            "window": 512,
            "layer_pattern": ("local", "global"),
            "norm": "rms_plus_one",
            "norm_position": "both",
            "activation": "gelu",
            "logit_softcap": 30.0,
            "tie_embeddings": True,
        },
    ),
    "Gemma 3 text": (
        {
            "model_type": "gemma3_text",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 8,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "head_dim": 16,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "query_pre_attn_scalar": 256,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": None,
        },
        {
            "layer_pattern": ("local",) * 5 + ("global",),
            "rope_theta": 1e6,
            "rope_theta_local": 1e4,
            "qk_norm": "head",
            "attention_softcap": 0.0,
            "num_kv_heads": 1,
        },
    ),
    "Phi 3": (
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "auto_map": {"AutoConfig": "x.Y"},
            "rope_scaling": None,
        },
        {"window": 2047, "layer_pattern": ("local",), "rotary_fraction": 1.0},
    ),
    "OLMo 2": (
        {"model_type": "olmo2", "attention_bias": False, "rope_theta": 500000},
        {"norm_position": "post", "qk_norm": "projection", "norm_eps": 1e-5},
    ),
    "Mixtral": (
        {
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "rope_theta": 1e6,
            "sliding_window": None,
            "attention_dropout": 0.0,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
            "tie_word_embeddings": False,
        },
        {
            "num_experts": 8,
            "experts_per_token": 2,
            "expert_d_ff": 160,
            "normalise_top_k": True,
            "rope_theta": 1e6,
            "window": 0,
            "num_kv_heads": 2,
        },
    ),
    "Qwen 3 MoE": (
        {
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "head_dim": 16,
            "max_window_layers": 48,
            "use_sliding_window": False,
            "sliding_window": None,
            "rope_scaling": None,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "attention_bias": False,
        },
        {
            "num_experts": 128,
            "experts_per_token": 8,
            "expert_d_ff": 24,
            "d_ff": 160,
            "qk_norm": "head",
            "normalise_top_k": True,
            "head_dim": 16,
            "num_kv_heads": 4,
            "window": 0,
            "norm_eps": 1e-6,
        },
    ),
    "OLMoE": (
        {
            "model_type": "olmoe",
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "clip_qkv": None,
            "attention_bias": False,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
        },
        {
            "num_experts": 64,
            "experts_per_token": 8,
            "expert_d_ff": 160,
            "normalise_top_k": False,
            "qk_norm": "projection",
            "num_kv_heads": 8,
            "norm_eps": 1e-5,
        },
    ),
    "OLMo 3": (
        {
            "model_type": "olmo3",
            "num_hidden_layers": 8,
            "attention_bias": False,
            "rope_theta": 500000,
            "sliding_window": 4096,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "rms_norm_eps": 1e-6,
        },
        {
            "layer_pattern": ("local", "local", "local", "global"),
            "window": 4096,
            "rope_theta": 5e5,
            "rope_theta_local": 5e5,  # no scaling there
            "rope_scaling": "yarn",
            "rope_factor": 8.0,
            "rope_attention_factor": 1.2079441541679836,
            "norm_position": "post",
            "qk_norm": "projection",
            "norm_eps": 1e-6,
        },
    ),
    "SmolLM3": (
        {
            "model_type": "smollm3",
            "num_key_value_heads": 4,
            "rope_theta": 5000000.0,
            "rope_scaling": None,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["full_attention"] * 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": None,
            "pretraining_tp": 2,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {
            "layer_pattern": ("global", "global", "global", "nope"),
            "window": 0,
            "rope_theta": 5e6,
            "tie_embeddings": True,
        },
    ),
    "SmolLM3 with windows": (
        {
            "model_type": "smollm3",
            "no_rope_layer_interval": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_sliding_window": True,
            "sliding_window": 128,
        },
        {
            "layer_pattern": ("local", "nope"),
            "window": 128,
            "rope_theta": 2e6,
        },
    ),
    "Seed-OSS": (
        {
            "model_type": "seed_oss",
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
            "pretraining_tp": 1,
        },
        {"bias": "qkv", "head_dim": 128, "rope_theta": 1e7, "norm_eps": 1e-6},
    ),
    "Seed-OSS with all biases": (
        {"model_type": "seed_oss", "attention_out_bias": True},
        {"bias": "attention", "num_kv_heads": 8, "head_dim": 128},
    ),
    "Ministral 3": (
        {
            "model_type": "ministral3",
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "max_position_embeddings": 262144,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            "rope_query_growth": 0.1,
            "rope_original_positions": 16384,
            "rope_scaling": "yarn",
            "rope_factor": 16.0,
            "rope_theta": 1e6,
            "rope_attention_factor": 1.0,
            "head_dim": 128,
        },
    ),
    "Ministral 3 by defaults": (
        {"model_type": "ministral3"},
        {"rope_query_growth": 0.1, "rope_factor": 16.0, "num_kv_heads": 8},
    ),
    "Phi-4": (
        {
            "model_type": "phi3",
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 16384,
            "max_position_embeddings": 16384,
            "rope_theta": 250000,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"rope_theta": 250000.0, "window": 0, "rotary_fraction": 1.0},
    ),
    "Phi-4 mini": (
        {
            "model_type": "phi3",
            "num_key_value_heads": 2,
            "hidden_size": 128,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
            },
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
        {"rotary_fraction": 0.75, "rope_scaling": "longrope", "tie_embeddings": True},
    ),
    "Qwen 2 MoE": (
        {
            "model_type": "qwen2_moe",
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "num_key_value_heads": 8,
            "max_window_layers": 21,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
        },
        {
            "num_experts": 60,
            "experts_per_token": 4,
            "expert_d_ff": 32,
            "num_shared_experts": 4,
            "shared_expert_gate": True,
            "normalise_top_k": False,
            "bias": "qkv",
            "window": 0,
        },
    ),
    "Qwen 2 MoE with windows": (
        {
            "model_type": "qwen2_moe",
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_key_value_heads": 8,
        },
        {"window": 64, "layer_pattern": ("local", "global"), "num_experts": 60},
    ),
    "GLM-4.5": (
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        {
            "bias": "qkv",
            "qk_norm": "head",
            "rotary_fraction": 0.5,
            "rope_theta": 1e6,
            "first_dense_layers": 3,
            "num_experts": 160,
            "num_shared_experts": 1,
            "shared_expert_gate": False,
            "route_scale": 2.5,
            "scores": "sigmoid",
            "expert_groups": 0,
        },
    ),
    "GLM-4.5 Air": (
        {"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True},
        {"qk_norm": "none", "bias": "qkv", "rotary_fraction": 0.5, "num_kv_heads": 8},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    own, expected = PUBLISHED[name]
    family, values = interop.derive(COMMON | SIZES | own)
    assert family.model_type == own["model_type"]
    found = {
        key: pytest.approx(values[key])
        if isinstance(values[key], float)
        else values[key]
        for key in expected
    }
    assert found == expected
    again, fields = interop.fields_of(values, own)
    assert again is family
    assert interop.derive(fields)[1] == values


def test_gpt2_as_it_was_first_published():
    fields = {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "resid_pdrop": 0.1,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {}},
        "layer_norm_epsilon": 1e-05,
    }
    values = interop.derive(fields)[1]
    assert (values["d_ff"], values["head_dim"], values["max_positions"]) == (
        3072,
        64,
        1024,
    )
    assert values["tie_embeddings"]
    assert values["positions"] == "learned"
    assert values["bias"] == "all"


def test_the_text_part_of_a_multimodal_gemma(tmp_path):
    """Its config is nested and omits defaults; its tensors have another prefix."""
    source = FOLDERS / "gemma3"
    text = interop.read_config(source)
    whole = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"x": 1},
        "boi_token_index": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert interop.derive(interop.read_config(tmp_path)) == interop.derive(text)
    assert interop.derive({"model_type": "gemma3_text"})[1]["vocab_size"] == 262_208
    for old in ("language_model.model.", "model.language_model."):
        names = {}
        for file in source.glob("*.safetensors"):
            shutil.copyfile(file, tmp_path / file.name)
        for file in tmp_path.glob("*.safetensors"):
            data = load_file(file)
            renamed = {key.replace("model.", old, 1): x for key, x in data.items()}
            if not names:
                renamed["vision_tower.x.weight"] = np.zeros(3, np.float32)
            save(renamed, file)
            names |= dict.fromkeys(renamed, file.name)
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
        (tmp_path / "tokens.npy").write_bytes((source / "tokens.npy").read_bytes())
        (tmp_path / "logits.npy").write_bytes((source / "logits.npy").read_bytes())
    assert compare(tmp_path)[0] <= 1e-5


def test_the_text_part_of_a_multimodal_mistral(tmp_path):
    """Ministral 3 is published so. The whole decides whether embeddings are tied."""
    source = FOLDERS / "ministral3"
    text = interop.read_config(source)
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text | {"tie_word_embeddings": True},
        "tie_word_embeddings": False,
        "vision_config": {"x": 1},
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert interop.derive(interop.read_config(tmp_path)) == interop.derive(text)
    renamed = {f"language_model.{key}": x for key, x in load_all(source).items()}
    for name in ("vision_tower.x.weight", "multi_modal_projector.norm.weight"):
        renamed[name] = np.zeros(3, np.float32)
    save(renamed, tmp_path / SINGLE)
    for name in ("tokens.npy", "logits.npy"):
        shutil.copyfile(source / name, tmp_path / name)
    assert compare(tmp_path)[0] <= 1e-5


def test_layers_that_predict_further_tokens_are_not_read(tmp_path, imported):
    """GLM-4.5 has one behind its last layer; other layers must be known."""
    source = FOLDERS / "glm4_moe"
    stored = load_all(source)
    extra = {name: x for name, x in stored.items() if ".layers.2." in name}
    extra = {name.replace(".2.", ".3.", 1): x for name, x in extra.items()}
    extra["model.layers.3.eh_proj.weight"] = np.zeros((16, 32), np.float32)
    fields = interop.read_config(source) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save(stored | extra, tmp_path / SINGLE)
    at = opened(tmp_path)
    for path, x in at.tensors.load(at.wanted).items():
        np.testing.assert_array_equal(x, imported("glm4_moe")[2][path], err_msg=path)
    written_fields = interop.fields_of(interop.derive(fields)[1], fields)[1]
    assert written_fields["num_nextn_predict_layers"] == 0
    one = {"model.layers.1.eh_proj.weight": np.zeros(3, np.float32)}
    save(stored | one, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match="unexpected tensors: model.layers.1.eh_proj"):
        opened(tmp_path)


def save(tensors, file):
    save_file(tensors, file, metadata={"format": "pt"})


LLAMA = COMMON | SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5}
REFUSED = {
    "rope": (
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0, "beta": 1}},
        "rope_type='proportional': not built; there are default, linear, llama3, dynamic, yarn, longrope",
    ),
    "yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "x"}},
        "rope_scaling.mscale='x': a number > 0 is required",
    ),
    "yarn backwards": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 1,
                "beta_slow": 2,
            }
        },
        "needs 0 < beta_slow <= beta_fast",
    ),
    "longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 0.0],
            }
        },
        "rope_parameters.long_factor=[1.0, 0.0]: a list of numbers > 0 is required",
    ),
    "short longrope": (
        {
            "rope_scaling": {
                "type": "su",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 3,
            }
        },
        "model.rope_long_factor has 3 numbers: model.rope_scaling=longrope needs 4, one for each frequency",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic"}},
        "rope_scaling.factor is missing",
    ),
    "yarn of Phi": (
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 1024,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "yarn", "factor": 2.0},
        },
        "rope_scaling.rope_type='yarn': not built; there are default, longrope",
    ),
    "part of rope": (
        {"rope_scaling": {"rope_type": "linear"}},
        "rope_scaling.factor is missing",
    ),
    "field in rope": (
        {"rope_parameters": {"rope_type": "default", "wat": 1}},
        "rope_parameters.wat=1: this field",
    ),
    "unknown field": (
        {"residual_multiplier": 0.22},
        "residual_multiplier=0.22: this field is not understood",
    ),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias=True: not supported; required False"),
    "quantised": (
        {"quantization_config": {"bits": 4}},
        "quantization_config={'bits': 4}: this field",
    ),
    "activation": (
        {"hidden_act": "relu2"},
        "hidden_act='relu2': not built; there are silu",
    ),
    "type": ({"hidden_size": "64"}, "hidden_size='64': a whole number is required"),
    "partial": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5: not built for this architecture",
    ),
    "own code": (
        {"model_type": "mine", "auto_map": {}},
        "auto_map={}: code of the folder, never run",
    ),
    "unknown": (
        {"model_type": "granite", "logits_scaling": 8.0},
        "logits_scaling=8.0: this field",
    ),
    "look-alike": ({"model_type": "helium"}, "model_type='helium': it rotates pairs"),
    "type of types": (
        {"model_type": ["llama"]},
        "model_type=['llama']: a name is required",
    ),
    "endless layers": (
        {"num_hidden_layers": 10**20},
        "at most 100,000 layers are supported",
    ),
    "no kv heads": (
        {"num_key_value_heads": 0},
        "num_key_value_heads=0: a whole number > 0 is required",
    ),
    "no head": ({"head_dim": 0}, "head_dim=0: a whole number > 0 is required"),
    "rope of OLMo 3": (
        {
            "model_type": "olmo3",
            "rope_parameters": {"full_attention": {"rope_type": "spiral"}},
        },
        "rope_parameters.full_attention.rope_type='spiral': not built; there are",
    ),
    "local rope of OLMo 3": (
        {
            "model_type": "olmo3",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0}
            },
        },
        "rope_parameters.sliding_attention.rope_type='linear': not built; required",
    ),
    "base of OLMo 3": (
        {"model_type": "olmo3", "rope_theta": 1e6},
        "rope_theta=1000000.0: versions of transformers differ in local layers",
    ),
    "positions of SmolLM3": (
        {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        "no_rope_layers=[1, 0]: required 0 or 1 for each of 4 layers",
    ),
    "windows of SmolLM3": (
        {
            "model_type": "smollm3",
            "use_sliding_window": True,
            "sliding_window": 8,
        },
        "layer 3 has neither rotary positions nor full attention",
    ),
    "unused windows of SmolLM3": (
        {
            "model_type": "smollm3",
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 4,
        },
        "sliding layers need use_sliding_window=true",
    ),
    "biases of Seed-OSS": (
        {
            "model_type": "seed_oss",
            "attention_bias": False,
            "attention_out_bias": True,
        },
        "attention_out_bias=True: not supported with attention_bias=false",
    ),
    "growth of Ministral 3": (
        {
            "model_type": "ministral3",
            "rope_parameters": {"original_max_position_embeddings": 64},
        },
        "rope_parameters.llama_4_scaling_beta is missing",
    ),
    "parts of Phi-4": (
        {"model_type": "phi3", "full_attn_mod": 2},
        "full_attn_mod=2: not supported; required 1",
    ),
    "not legal here": (
        {"num_key_value_heads": 3},
        "model.num_kv_heads=3 does not divide",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_named(name):
    assert interop.derive(LLAMA)[0].model_type == "llama"
    changes, text = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        interop.derive(LLAMA | changes)
    assert any(text in fault for fault in raised.value.faults), raised.value.faults
    assert len(raised.value.faults) == 1 or changes.get("model_type"), (
        raised.value.faults
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_with_any_other_value_is_refused_or_read(name):
    """A value that is read can be written and read again. None gives a traceback."""
    config, refusals = interop.read_config(FOLDERS / name), 0
    for key in config:
        for value in (
            None,
            "x",
            [],
            [[]],
            {},
            {"rope_type": []},
            -1,
            0,
            0.5,
            True,
            float("nan"),
            "absent",
        ):
            changed = config | {key: value}
            if value == "absent":
                del changed[key]
            try:
                _, values = interop.derive(changed)
            except ConfigError as error:
                refusals += 1
                assert all(fault.startswith("config.json: ") for fault in error.faults)
                continue
            assert interop.derive(interop.fields_of(values, changed)[1])[1] == values, (
                key,
                value,
            )
    assert refusals > 60


REFUSED_EXPERTS = {
    "all dense": (
        "qwen3_moe",
        {"mlp_only_layers": [0, 1, 2]},
        "mlp_only_layers=[0, 1, 2]: required layers with",
    ),
    "never sparse": (
        "qwen3_moe",
        {"mlp_only_layers": [], "decoder_sparse_step": 4},
        "decoder_sparse_step=4: requ",
    ),
    "no layer": (
        "qwen3_moe",
        {"mlp_only_layers": "0"},
        "mlp_only_layers='0': a list of layers is required",
    ),
    "windows": (
        "qwen3_moe",
        {"max_window_layers": 2},
        "max_window_layers=2: versions of transformers differ",
    ),
    "clipped": (
        "olmoe",
        {"clip_qkv": 8.0},
        "clip_qkv=8.0: not supported; required None",
    ),
    "heads": (
        "olmoe",
        {"head_dim": 8},
        "head_dim=8: required hidden_size / num_attention_heads = 4",
    ),
    "shared": (
        "olmoe",
        {"shared_expert_intermediate_size": 8},
        "shared_expert_intermediate_size=8: this field",
    ),
    "shared, in part": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 12},
        "shared_expert_intermediate_size=12: a multiple of moe_intermediate_size=8",
    ),
    "windows of unknown layers": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
        "use_sliding_window=True: versions of transformers differ",
    ),
    "groups": (
        "glm4_moe",
        {"n_group": 3},
        "model.expert_groups=3 for model.num_experts=8: groups are equal",
    ),
    "no layer with experts": (
        "glm4_moe",
        {"first_k_dense_replace": 3},
        "model.first_dense_layers=3 of model.num_layers=3 leaves no layer",
    ),
    "scores": (
        "glm4_moe",
        {"scoring_func": "softmax"},
        "scoring_func='softmax': this field is not understood",
    ),
    "too many a token": (
        "mixtral",
        {"num_experts_per_tok": 5},
        "model.experts_per_token=5 of model.num_exp",
    ),
    "none": (
        "mixtral",
        {"num_local_experts": 0},
        "num_local_experts=0: a whole number > 0 is required",
    ),
    "endless": (
        "mixtral",
        {"num_local_experts": 10**9},
        "at most 1,000,000 of all layers are supported",
    ),
    "two counts": (
        "olmoe",
        {"num_local_experts": 5},
        "num_local_experts=5: num_experts is 4; leave out",
    ),
}


@pytest.mark.parametrize("name", REFUSED_EXPERTS)
def test_experts_that_are_not_built_are_named(name):
    kind, changes, text = REFUSED_EXPERTS[name]
    with pytest.raises(ConfigError) as raised:
        interop.derive(interop.read_config(FOLDERS / kind) | changes)
    (fault,) = raised.value.faults
    assert text in fault


@pytest.mark.parametrize(
    ("step", "dense", "first", "pattern"),
    [
        (1, [], 0, "s"),
        (2, [], 0, "ds"),
        (1, [0, 1], 2, "s"),
        (3, [], 0, "dds"),
        (2, [0, 1], 2, "ds"),
        (1, [0, 4, 8], 0, "dsss"),
        (1, [5], 0, "sssssdssssss"),
        (1, [0, 3, 6, 9, 11], 1, "ssdssdssdsd"),
    ],
)
def test_dense_layers_between_are_a_pattern(step, dense, first, pattern):
    """As in transformers, layers that are not listed have experts at each step."""
    named = {
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
        "num_hidden_layers": 12,
    }
    fields = interop.read_config(FOLDERS / "qwen3_moe") | named
    values = interop.derive(fields)[1]
    kinds = {"d": "dense", "s": "sparse"}
    assert values["first_dense_layers"] == first
    assert values["feed_forward_pattern"] == tuple(kinds[letter] for letter in pattern)
    sparse = [i for i in range(12) if i not in dense and (i + 1) % step == 0]
    assert list(TransformerConfig(**values).sparse_layers) == sparse
    assert interop.derive(interop.fields_of(values, fields)[1])[1] == values


def test_all_faults_come_at_once():
    wrong = LLAMA | {"mlp_bias": True, "wat": 1, "rope_scaling": {"rope_type": "wat"}}
    del wrong["vocab_size"]
    with pytest.raises(ConfigError) as raised:
        interop.derive(wrong)
    assert len(raised.value.faults) == 4
    assert "vocab_size is missing" in raised.value.faults[0]


def test_an_unknown_architecture_with_llamas_fields_is_read_as_llamas():
    family, values = interop.derive(LLAMA | {"model_type": "new_one"})
    assert family.model_type == "llama"
    assert values == interop.derive(LLAMA)[1]


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"bias": "qkv"}, "qwen2"),
        ({"bias": "attention"}, "llama"),
        ({"window": 8, "layer_pattern": ("local",)}, "mistral"),
        (
            {"window": 8, "layer_pattern": ("global", "local"), "qk_norm": "head"},
            "qwen3",
        ),
        ({"rotary_fraction": 0.5}, "phi3"),
        ({"norm_position": "post", "qk_norm": "projection"}, "olmo2"),
        # no matter for logits
        ({"dropout": 0.3, "z_loss": 1e-4, "init_std": 0.5}, "llama"),
        ({"rope_low_factor": 3.0, "max_positions": 77}, "llama"),  # without effect
        (
            {"num_experts": 8, "d_ff": 100, "expert_d_ff": 60, "balance": "none"},
            "mixtral",
        ),
        (
            {
                "num_experts": 8,
                "qk_norm": "head",
                "normalise_top_k": False,
                "expert_d_ff": 60,
            },
            "qwen3_moe",
        ),
        ({"num_experts": 8, "qk_norm": "projection", "router_z_loss": 1e-3}, "olmoe"),
        (
            {
                "layer_pattern": ("local", "global"),
                "window": 8,
                "norm_position": "post",
                "qk_norm": "projection",
            },
            "olmo3",
        ),
        ({"layer_pattern": ("global", "nope")}, "smollm3"),
        ({"rope_query_growth": 0.2}, "ministral3"),
        (
            {
                "num_experts": 8,
                "num_shared_experts": 2,
                "shared_expert_gate": True,
                "bias": "qkv",
            },
            "qwen2_moe",
        ),
        (
            {
                "num_experts": 8,
                "num_shared_experts": 1,
                "scores": "sigmoid",
                "route_scale": 2.0,
            },
            "glm4_moe",
        ),
    ],
)
def test_the_family_that_can_express_the_values_is_chosen(changes, family):
    assert interop.fields_of(changes)[0].model_type == family


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gated": False}, "model.gated=False, there True"),
        ({"norm": "layer", "gated": False, "activation": "relu"}, "nearest, "),
        ({"embedding_scale": 2.0}, "model.embedding_scale=2.0, there 1.0"),
        ({"logit_softcap": 30.0}, "model.logit_softcap=30.0"),
        (
            {"num_experts": 8, "num_shared_experts": 1},
            "model.num_shared_experts=1, there 0",
        ),
        (
            {"num_experts": 8, "scores": "sigmoid"},
            "model.scores='sigmoid', there 'softmax'",
        ),
    ],
)
def test_values_that_no_family_has_are_named(changes, text):
    with pytest.raises(ConfigError, match="none of llama") as raised:
        interop.fields_of(changes)
    assert any(text in fault for fault in raised.value.faults), raised.value.faults


# --- folders that are not right -------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Returns a copy of the llama folder, which has several files."""
    return Path(shutil.copytree(FOLDERS / "llama", tmp_path / "llama"))


@pytest.fixture(scope="module")
def shapes(imported):
    """Returns the shapes of the llama folder's parameters."""
    return {path: x.shape for path, x in imported("llama")[2].items()}


def refused(folder, shapes, *texts):
    _, values = interop.derive(interop.read_config(FOLDERS / "llama"))
    with pytest.raises(ConfigError) as raised:
        interop.open_weights(folder, values, shapes)
    for text in texts:
        assert any(text in fault for fault in raised.value.faults), raised.value.faults
    return raised.value.faults


def test_damaged_folders_are_refused(folder, shapes):
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    data = files[0].read_bytes()
    files[0].write_bytes(data[:-8])
    files[1].rename(folder / "away")
    refused(folder, shapes, files[0].name, files[1].name)
    files[0].write_bytes(b"\xff" * 64)
    refused(folder, shapes, files[0].name)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../other.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, shapes, "names files outside the folder")
    for text, said in {
        "{": "cannot be read",
        "[" * 100_000: "nested deeper than",
        "{}": "weight_map is NoneType; required: dict",
        '{"weight_map": {"lm_head.weight": 1}}': "the file of lm_head.weight is int; required: str",
        '{"weight_map": {"lm_head.weight": "\\u0000"}}': "embedded null byte",
        '{"weight_map": {"lm_head.weight": ""}}': "no regular file",
    }.items():
        (folder / INDEX).write_text(text)
        refused(folder, shapes, said)
    (folder / "config.json").write_text('{"a":' * 100_000)
    refused(folder, shapes, "config.json cannot be read: nested deeper than")


def test_missing_unexpected_and_misshapen_tensors_are_listed(folder, shapes):
    tensors = load_all(folder)
    for file in folder.glob("model*"):
        file.unlink()
    assert tensors.pop("model.layers.1.mlp.up_proj.weight").shape == (24, 16)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(4, np.float32)
    # of old files
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["model.norm.weight"] = np.ones(8, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    save(tensors, folder / SINGLE)
    faults = refused(
        folder,
        shapes,
        "missing tensors: model.layers.1.mlp.up_proj.weight",
        "unexpected tensors: model.layers.0.self_attn.q_norm.weight",
        "model.norm.weight has shape (8,), config.json makes it (16,)",
        "lm_head.weight is I8; required F32",
    )
    assert len(faults) == 4


def test_pickled_weights_are_never_read(folder, shapes):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(folder, shapes, "pickled weights, which are never read")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, shapes, "no model.safetensors")
    (folder / "config.json").unlink()
    refused(folder, shapes, "no config.json there")
    refused(
        "some-lab/small-7b",
        shapes,
        "hf download some-lab/small-7b --local-dir models/small-7b",
    )
    refused(
        "models/small-7b", shapes, "hf download OWNER/MODEL --local-dir models/small-7b"
    )


def test_another_model_than_the_configs_is_refused(shapes):
    _, values = interop.derive(interop.read_config(FOLDERS / "llama"))
    with pytest.raises(
        ConfigError,
        match="holds another model than the config: model.d_ff=48, there 24",
    ):
        interop.open_weights(FOLDERS / "llama", values | {"d_ff": 48}, shapes)
