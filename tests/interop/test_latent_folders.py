"""Folders of DeepSeek-V2, DeepSeek-V3, Moonlight and Kimi-K2: what only they have."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdist import interop
from jaxdist.config import ConfigError, exit_code_of, trees
from jaxdist.evaluation import loading
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.interop.families import TensorPart
from jaxdist.interop.hf_reader import SINGLE
from jaxdist.models import experts
from jaxdist.ops.experts import route
from support.huggingface import (
    EXPERT_MESH,
    FOLDERS,
    FP8,
    compare,
    load_all,
    logits,
    opened,
    run_convert,
)

V3 = FOLDERS / "deepseek_v3"
NAMES = ("deepseek_v3", "moonlight", "deepseek_v2", "deepseek_v2_groups")

# --- config.json ----------------------------------------------------------------------

# Fields of published folders.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MOONLIGHT = DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "quantization_config": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2_LITE = MOONLIGHT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "norm_topk_prob": False,
    "num_nextn_predict_layers": None,
    "rms_norm_eps": 1e-06,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"]
    | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
PUBLISHED = {
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        {
            "attention_scale": 192**-0.5 * (0.1 * np.log(40) + 1) ** 2,
            "rope_attention_factor": 1.0,
            "expert_groups": 8,
            "expert_top_groups": 4,
            "first_dense_layers": 3,
            "route_scale": 2.5,
            "scores": "sigmoid",
        },
    ),
    "Moonlight": (
        MOONLIGHT,
        {
            "attention_scale": 192**-0.5,
            "rope_theta": 50000.0,
            "expert_groups": 0,
            "num_shared_experts": 2,
            "norm_eps": 1e-5,
        },
    ),
    "Kimi-K2": (KIMI_K2, {"num_experts": 384, "rope_factor": 32.0, "num_heads": 64}),
    "DeepSeek-V2-Lite": (
        V2_LITE,
        {
            "scores": "softmax",
            "normalise_top_k": False,
            "attention_scale": 192**-0.5 * (0.0707 * np.log(40) + 1) ** 2,
        },
    ),
    "DeepSeek-V2": (
        V2,
        {
            "scores": "softmax",
            "normalise_top_k": False,
            "route_scale": 16.0,
            "expert_groups": 8,
            "expert_top_groups": 3,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_written(name):
    config, expected = PUBLISHED[name]
    family, values = interop.derive(config)
    for key, value in expected.items():
        assert values[key] == (
            pytest.approx(value) if isinstance(value, float) else value
        )
    sizes = values["latent"]
    assert sizes["query_rank"] == (config["q_lora_rank"] or 0)
    assert (sizes["kv_rank"], sizes["nope_dim"], sizes["rope_dim"]) == (512, 128, 64)
    again, fields = interop.fields_of(values, config)
    assert again is family
    assert interop.derive(fields)[1] == values
    assert fields["model_type"] == family.model_type
    if family.model_type == "deepseek_v3":
        assert fields["num_nextn_predict_layers"] == 0
    assert fields["topk_method"] == config["topk_method"]
    assert "quantization_config" not in fields
    scaling = config["rope_scaling"] or {}
    for key in ("mscale", "mscale_all_dim"):  # what other readers need
        assert (fields["rope_scaling"] or {}).get(key) == scaling.get(key)


REFUSED = {
    "halves": ({"rope_interleave": False}, "rope_interleave=False: not supported"),
    "frequency": ({"moe_layer_freq": 2}, "moe_layer_freq=2: not supported; required 1"),
    "scores": ({"scoring_func": "softmax"}, "scoring_func='softmax': not supported"),
    "choice": ({"topk_method": "greedy"}, "topk_method='greedy': not supported"),
    "heads": (
        {"num_key_value_heads": 2},
        "num_key_value_heads=2: required num_attention_heads = 4",
    ),
    "head size": ({"qk_head_dim": 64}, "qk_head_dim=64: required qk_nope_head_dim + "),
    "all dense": (
        {"first_k_dense_replace": 4},
        "first_k_dense_replace=4: required layers with experts among the 4 layers",
    ),
    "bias": ({"attention_bias": True}, "attention_bias=True: not supported"),
    "rotary": (
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_type='longrope': not built; there are default, linear",
    ),
    "unknown rotary": (
        {"rope_scaling": {"type": "wat", "factor": 2}},
        "rope_type='wat': not built",
    ),
    "no rank": ({"kv_lora_rank": 0}, "kv_lora_rank=0: a whole number > 0 is required"),
    "rank": ({"q_lora_rank": "12"}, "q_lora_rank='12': a whole number is required"),
    "endless": ({"n_routed_experts": 10**9}, "at most 1,000,000 of all layers are"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_one_line(name):
    changes, text = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        interop.derive(interop.read_config(V3) | changes)
    (fault,) = raised.value.faults
    assert text in fault
    assert exit_code_of(raised.value) == 78


REFUSED_V2 = {
    "choice": ({"topk_method": "noaux_tc"}, "topk_method='noaux_tc': not supported"),
    "no groups": (
        {"topk_method": "group_limited_greedy", "n_group": 4},
        "topk_method='group_limited_greedy': required n_group and topk_group",
    ),
    "sum": ({"norm_topk_prob": True}, "norm_topk_prob=True: not supported"),
    "unequal": (
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
        "model.expert_groups=3 for model.num_experts=8: groups are equal",
    ),
}


@pytest.mark.parametrize("name", REFUSED_V2)
def test_choices_that_deepseek_v2_does_not_have(name):
    changes, text = REFUSED_V2[name]
    with pytest.raises(ConfigError) as raised:
        interop.derive(interop.read_config(FOLDERS / "deepseek_v2") | changes)
    (fault,) = raised.value.faults
    assert text in fault


def test_greedy_choice_ignores_groups_as_transformers_does():
    config = interop.read_config(FOLDERS / "deepseek_v2")
    _, values = interop.derive(config | {"n_group": 4, "topk_group": 2})
    assert values == interop.derive(config)[1]


def test_a_group_is_as_good_as_its_best_expert(monkeypatch):
    """The folder tells it from ranks by two experts, and from no groups."""
    folder = FOLDERS / "deepseek_v2_groups"
    assert compare(folder)[0] <= 1e-5
    for change in ({"group_experts": 2}, {"groups": 0, "top_groups": 0}):
        with monkeypatch.context() as patch:
            patch.setattr(
                experts,
                "route",
                lambda *arguments, change=change, **options: route(
                    *arguments, **options | change
                ),
            )
            assert compare(folder)[0] > 0.1


# --- tensors --------------------------------------------------------------------------


def test_pairs_become_halves_and_come_back():
    part = TensorPart("x", 0, "DHN", ("HN", "D"), num_paired=6)
    assert part.places(8).tolist() == [0, 1, 2, 4, 6, 3, 5, 7]
    x = np.arange(16).reshape(2, 8)
    stored = part.in_file_order(x)
    assert stored[0].tolist() == [0, 1, 2, 5, 3, 6, 4, 7]
    np.testing.assert_array_equal(stored[:, part.places(8)], x)


def test_shards_may_cut_between_pairs():
    """Each device has a part of the rotated rows, which are apart in the file."""
    at = opened(V3)
    whole = at.tensors.load(at.wanted)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    cuts = {
        "blocks/attention/query_up": jax.P(None, "b", None, "a"),
        "blocks/attention/rope_key": jax.P(None, "b", "a"),
        "first_blocks/attention/rope_key": jax.P(None, None, "a"),
    }
    for path, cut in cuts.items():
        where = jax.sharding.NamedSharding(mesh, cut)
        x = whole[path]
        part = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        found = at.tensors.load(at.wanted | {path: part})[path]
        assert not found.sharding.is_fully_replicated
        np.testing.assert_array_equal(found, x)
    rows = load_all(V3)["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"]
    np.testing.assert_array_equal(
        whole["blocks/attention/rope_key"][0].T, rows[8:][[0, 2, 1, 3]]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, FP8])
def test_logits_on_expert_2_fsdp_2_tensor_2(name):
    difference, _, parameters = compare(FOLDERS / name, EXPERT_MESH)
    assert difference <= 1e-5
    placed = [x.sharding for x in parameters.values()]
    assert sum(not where.is_fully_replicated for where in placed) >= 7


def test_biases_choose_the_experts():
    at = opened(V3)
    arrays = at.tensors.load(at.wanted)
    (path,) = [path for path in arrays if path.endswith("/choice_bias")]
    assert np.asarray(arrays[path]).min() > 0
    tokens, expected = np.load(V3 / "tokens.npy"), np.load(V3 / "logits.npy")
    without = arrays | {path: 0 * arrays[path]}
    found = logits(at, trees.unflatten_names(without), tokens)
    assert np.abs(found - expected).max() > 0.1


def test_eight_bit_weights_are_those_of_transformers():
    folder = FOLDERS / FP8
    difference, _, parameters = compare(folder)
    assert difference <= 1e-5
    config = interop.read_config(folder)
    family, _ = interop.derive(config)
    expected = np.load(folder / "dequantised.npz")
    shapes = {path: x.shape for path, x in parameters.items()}
    names = {
        name: (stored, part, position)
        for stored in family.present(shapes)
        for part in stored.parts
        for position, name in stored.names([(0, n) for n in shapes[part.path]]).items()
        if len(stored.parts) == 1
    }
    assert len(names) > 90
    for name, (_, part, position) in names.items():
        value = part.in_file_order(np.asarray(parameters[part.path])[position])
        order = [part.dims.index(dim) for dim in "".join(part.stored_dims)]
        stored = value.transpose(order).reshape(expected[name].shape)
        assert stored.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize(
    "name",
    [
        NAMES[0],
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:]),
    ],
)
def test_a_workdir_continues_as_transformers_does_and_goes_back(name, tmp_path):
    work, back, source = tmp_path / "work", tmp_path / "back", FOLDERS / name
    assert run_convert(source, work, "jaxdist") == 0
    run = loading.load_run(work)
    has_bias = "v2" not in name
    assert run.config.model["balance"] == ("bias" if has_bias else "batch")
    tokens = np.load(source / "tokens.npy")
    expected = np.load(source / "generated.npy")
    greedy = SamplingConfig(temperature=0.0, end_tokens=(10**6,))
    found = run._continue_rows(
        list(tokens),
        range(len(tokens)),
        sampling=greedy,
        max_tokens=expected.shape[1],
        seed=0,
    )
    assert [list(map(int, one.tokens)) for one in found] == expected.tolist()
    before = load_all(source)
    dtype = str(before["model.norm.weight"].dtype)
    assert run_convert(work, back, "huggingface", "--dtype", dtype) == 0
    after = load_all(back)
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    old, new = (
        json.loads((folder / "config.json").read_text()) for folder in (source, back)
    )
    assert interop.derive(old) == interop.derive(new)


# --- folders that are not right -------------------------------------------------------


def copied(target, tensors=None, **fields):
    """Copies the folder of DeepSeek-V3 with other tensors (None: left out)."""
    shutil.copytree(V3, target)
    kept = load_all(V3) | (tensors or {})
    save_file({k: x for k, x in kept.items() if x is not None}, target / SINGLE)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


def test_a_layer_that_predicts_further_tokens_is_not_read(tmp_path, capsys):
    further = {
        "model.layers.4.eh_proj.weight": np.ones((16, 32), np.float32),
        "model.layers.4.shared_head.norm.weight": np.ones(16, np.float32),
    }
    folder = copied(tmp_path / "folder", further)
    at = opened(folder)
    assert "layer 4 is not read; it predicts further tokens" in at.tensors.note
    assert compare(folder)[0] <= 1e-5
    assert run_convert(folder, tmp_path / "work", "jaxdist") == 0
    assert capsys.readouterr().out.count("layer 4 is not read") == 1
    assert run_convert(tmp_path / "work", tmp_path / "out", "huggingface") == 0
    assert interop.read_config(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert not any("layers.4." in name for name in load_all(tmp_path / "out"))
    assert opened(V3).tensors.note == ""


BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"
BAD = {
    "ranks": (
        {},
        {"kv_lora_rank": 12},
        "kv_a_layernorm.weight has shape (8,), config.json makes it (12,); 11 more",
    ),
    "query": (
        {},
        {"q_lora_rank": None},
        "missing tensors: model.layers.0.self_attn.q_proj.weight",
    ),
    "bias": ({BIAS: None}, {}, f"missing tensors: {BIAS}"),
    "unknown rotary": (
        {},
        {"rope_parameters": {"rope_type": "wat"}},
        "rope_type='wat': not built",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_folders_that_are_not_right_are_refused(name, tmp_path):
    tensors, fields, text = BAD[name]
    folder = copied(tmp_path / "folder", tensors, **fields)
    with pytest.raises(ConfigError) as raised:
        run_convert(folder, tmp_path / "work", "jaxdist")
    assert text in raised.value.faults[0]
    # ranks that a folder has or lacks are missing tensors and unexpected ones
    assert len(raised.value.faults) == (2 if name == "query" else 1)
    assert exit_code_of(raised.value) == 78
    assert not (tmp_path / "work").exists()
