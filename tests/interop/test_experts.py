"""Hugging Face folders with experts: round trips by commands, and what files lack."""

import json

import numpy as np
import pytest

from jaxdist import evaluate, interop, train
from jaxdist.config import ConfigError, trees
from jaxdist.evaluation import loading
from jaxdist.inference.decoding import SamplingConfig
from support.huggingface import EXPERTS, FOLDERS, load_all, run_convert
from support.weight_sources import parsed

NAMES = [
    EXPERTS[0],
    *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS[1:]),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_workdir_computes_the_same_and_goes_back(name, tmp_path):
    work, back, source = tmp_path / "work", tmp_path / "back", FOLDERS / name
    assert run_convert(source, work, "jaxdist") == 0
    run = loading.load_run(work)
    model = run.config.model
    (state,) = trees.flatten_names(run.state.model_state).values()
    dense = model["first_dense_layers"]
    assert state.shape == (
        3 - dense,
        model["num_experts"],
    )
    assert dense == (name in ("qwen3_moe", "qwen2_moe", "glm4_moe"))
    if name == "glm4_moe":  # its folders hold biases
        assert model["balance"] == "bias"
        bias = load_all(source)["model.layers.2.mlp.gate.e_score_correction_bias"]
        np.testing.assert_array_equal(state[1], bias)
        assert np.ptp(bias) > 0.1
    else:
        assert model["balance"] == "batch"
        np.testing.assert_allclose(state, 1 / model["num_experts"])
    tokens, expected = np.load(source / "tokens.npy"), np.load(source / "logits.npy")
    greedy = SamplingConfig(temperature=0.0, end_tokens=(10**6,))
    found = run._continue_rows(
        list(tokens), range(len(tokens)), sampling=greedy, max_tokens=1, seed=0
    )
    assert [int(one.tokens[0]) for one in found] == expected[:, -1].argmax(-1).tolist()
    dtype = {"float32": "float32", "bfloat16": "bfloat16"}[
        str(load_all(source)["model.norm.weight"].dtype)
    ]
    assert (
        run_convert(
            work, back, "huggingface", "--dtype", dtype, "--max-shard-gb", "0.000005"
        )
        == 0
    )
    before, after = load_all(source), load_all(back)
    assert before.keys() == after.keys()
    assert len(list(back.glob("*.safetensors"))) > 3
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    old, new = (
        json.loads((folder / "config.json").read_text()) for folder in (source, back)
    )
    assert interop.derive(old) == interop.derive(new)
    same = {
        "architectures",
        "intermediate_size",
        "moe_intermediate_size",
        "router_aux_loss_coef",
    }
    assert all(old.get(key) == new.get(key) for key in same)


def test_biases_of_a_folder_need_their_balance(tmp_path):
    """Another balance would send tokens to other experts."""
    glm = FOLDERS / "glm4_moe"
    found = parsed(flags(tmp_path, init__from_huggingface=glm)).model
    assert found["balance"] == "bias"
    values = interop.derive(interop.read_config(glm))[1] | {"balance": "batch"}
    with pytest.raises(ConfigError) as refused:
        interop.open_weights(glm, values, {})
    (fault,) = refused.value.faults
    assert "biases choose the experts of Glm4MoeForCausalLM" in fault
    assert "set model.balance=bias" in fault


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["bias", "none"])
def test_biases_are_trained_and_written_in_float32(balance, tmp_path, monkeypatch):
    """A run without biases writes zeros, since files of this family have them."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    run, out = tmp_path / "run", tmp_path / "out"
    glm = FOLDERS / "glm4_moe"
    given = {"init__from_huggingface": glm, "data__validation_path": ""}
    if balance == "none":
        values = interop.derive(interop.read_config(glm))[1] | {"balance": "none"}
        given |= {f"model__{name}": _flag(value) for name, value in values.items()}
        given["init__from_huggingface"] = ""
    assert train.main([*flags(tmp_path, **given), "--workdir", str(run)]) == 0
    with pytest.raises(ConfigError, match="Glm4MoeForCausalLM has a tensor for"):
        run_convert(run, tmp_path / "no", "huggingface", "--drop-choice-bias")
    assert run_convert(run, out, "huggingface", "--dtype", "bfloat16") == 0
    before, after = load_all(glm), load_all(out)
    assert before.keys() == after.keys()
    for name in before:
        is_bias = name.endswith("e_score_correction_bias")
        assert str(after[name].dtype) == ("float32" if is_bias else "bfloat16")
        if is_bias and balance == "bias":  # two updates of 1e-3 each, less their mean
            moved = np.abs(after[name] - before[name]).max()
            assert 1e-4 < moved < 4e-3
        if is_bias and balance == "none":
            assert not after[name].any()


def _flag(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def flags(folder, **changes):
    tokens = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 32, 4000).astype(np.uint16).tofile(tokens)
    given = {
        "init.from_huggingface": FOLDERS / "mixtral",
        "data.source": "bin",
        "data.path": tokens,
        "train.steps": 2,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.max_minutes": 0,
        "train.sample_tokens": 0,
        "batch.sequence_length": 16,
        "batch.global_size": 8,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 1,
        "mesh.data": -1,
        "mesh.expert": 2,
    }
    given |= {key.replace("__", "."): value for key, value in changes.items()}
    return [
        "--config",
        "quickstart",
        *(f"--config.{key}={value}" for key, value in given.items()),
    ]


def test_the_load_is_kept_even_by_what_files_have_a_place_for(tmp_path):
    def resolved(**changes):
        return parsed(flags(tmp_path, **changes)).model

    assert resolved()["balance"] == "batch"
    for chosen in ("bias", "sequence", "none"):
        assert resolved(model__balance=chosen)["balance"] == chosen
    chosen = resolved(
        model__balance_weight=0.5, model__router_z_loss=1e-3, model__capacity_factor=2.0
    )
    assert [
        chosen[key] for key in ("balance_weight", "router_z_loss", "capacity_factor")
    ] == [0.5, 1e-3, 2.0]
    with pytest.raises(ConfigError, match="model.experts_per_token=1, there 2"):
        resolved(model__experts_per_token=1)


@pytest.mark.slow
def test_a_bias_of_the_choice_is_left_out_only_when_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    run = tmp_path / "run"
    chosen = flags(
        tmp_path, model__balance="bias", data__validation_path=tmp_path / "tokens.bin"
    )
    assert train.main([*chosen, "--workdir", str(run)]) == 0
    with pytest.raises(ConfigError) as refused:
        run_convert(run, tmp_path / "out", "huggingface")
    (fault,) = refused.value.faults
    assert "blocks/mlp/choice_bias: " in fault
    assert "model.balance=batch" in fault
    assert not (tmp_path / "out").exists()
    assert run_convert(run, tmp_path / "out", "huggingface", "--drop-choice-bias") == 0
    before, after = load_all(FOLDERS / "mixtral"), load_all(tmp_path / "out")
    assert before.keys() == after.keys()
    moved = {key: np.abs(before[key] - after[key]).max() for key in before}
    assert min(moved.values()) > 0
    assert max(moved.values()) < 0.1
    assert evaluate.main(["--workdir", str(run)]) == 0
