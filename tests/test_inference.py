"""A run taken from its workdir: which weights, on which devices, and the two commands."""

import dataclasses
import json
import math
import os
import random

import jax
import numpy as np
import pytest

from jaxdist import evaluate, generate, inference, loop
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import ConfigError
from jaxdist.decoding import SamplingConfig
from jaxdist.mesh import MeshConfig
from jaxdist.recipe import default_config, from_config

STEPS = 4
TOP = SamplingConfig(temperature=0.7, top_k=40)


def tiny_config(folder):
    """Returns a run that averages its weights, on eight devices, with text of its own."""
    words = "the cat sat on a mat while two dogs ran past old trees".split()
    for name, seed in (("train", 0), ("held", 1)):
        text = " ".join(random.Random(seed).choices(words, k=600))
        (folder / f"{name}.txt").write_text(text)
    config = default_config()
    config.update_from_flattened_dict(
        {
            "train.steps": STEPS, "train.eval_every": STEPS, "train.ema_decay": 0.5,
            "batch.global_size": 8, "batch.sequence_length": 32, "batch.accumulation": 2,
            "mesh.fsdp": 2, "mesh.tensor": 2,
            "model.num_layers": 1, "model.d_model": 16, "model.d_ff": 32,
            "model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 8,
            "optimizer.warmup_steps": 1, "optimizer.learning_rate": 0.02,
            "data.source": "text", "data.path": str(folder / "train.txt"),
            "data.validation_path": str(folder / "held.txt"),
            "data.cache_dir": str(folder / "cache"),
        }
    )  # fmt: skip
    return from_config(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the workdir of a finished run and its last state."""
    assert jax.device_count() == 8
    folder = tmp_path_factory.mktemp("run")
    state = loop.run(tiny_config(folder), folder / "workdir")
    return folder / "workdir", state


@pytest.fixture(scope="module")
def here(trained):
    return inference.load_run(trained[0])


@pytest.fixture(scope="module")
def alone(trained):
    return inference.load_run(trained[0], devices=jax.devices()[:1])


def test_the_average_is_read_and_nothing_else(trained, here, alone):
    state = trained[1]
    average, weights = (jax.tree.leaves(jax.device_get(t)) for t in (state.ema, state.trainable))
    assert any((a != w).any() for a, w in zip(average, weights, strict=True))
    for run in (here, alone):
        found = jax.tree.leaves(run.state.trainable)
        for a, b in zip(average, found, strict=True):
            np.testing.assert_array_equal(a, b)
        assert run.state.opt_state is None and run.state.ema is None
        assert int(run.state.step) == STEPS
    assert here.mesh.shape["fsdp"] == here.mesh.shape["tensor"] == 2 and alone.mesh.size == 1
    leaves = jax.tree.leaves(here.state.trainable)
    where = jax.tree.leaves(here.built.shardings.trainable)
    assert all(x.sharding == s for x, s in zip(leaves, where, strict=True))
    assert not all(s.is_fully_replicated for s in where)


def test_the_held_out_loss_is_that_of_the_run(trained, here, alone):
    rows = [json.loads(line) for line in (trained[0] / "metrics.jsonl").open()]
    logged = next(row for row in rows if "eval_loss" in row)
    seen = []
    for run in (here, alone):
        found = run.evaluate(watch=lambda *batch: seen.append(batch))
        assert found.loss == pytest.approx(logged["eval_loss"], rel=1e-6)
        assert found.tokens == logged["eval_tokens"] > 1000
        assert found.step == logged["step"] == STEPS
        assert found.perplexity == pytest.approx(math.exp(found.loss))
        assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))  # a token is a byte
    assert seen[-1][0] == seen[-1][1] > 1
    assert alone.evaluate(validation_tokens=100).tokens == 100


def test_any_mesh_writes_the_same_text(here, alone):
    prompts = ["the cat ", "é on"]
    options = dict(max_tokens=12, sampling=TOP, seed=5, num_samples=5)  # more rows than a batch
    found = alone.generate(prompts, **options)
    assert [len(samples) for samples in found] == [5, 5]
    texts = [[sample.text for sample in samples] for samples in found]
    assert all(text.startswith(p) for p, some in zip(prompts, texts, strict=True) for text in some)
    assert len({tuple(s.tokens) for samples in found for s in samples}) == 10
    assert all(sample.tokens.size == 12 and not sample.ended for some in found for sample in some)
    assert [[s.text for s in some] for some in here.generate(prompts, **options)] == texts


def test_a_mesh_may_be_chosen_and_unfit_ones_are_replaced(trained):
    config = tiny_config(trained[0].parent)
    eight, two = jax.devices(), jax.devices()[:2]
    config = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    assert inference._fitted(config, eight, None)[0].mesh == config.mesh
    fitted = inference._fitted(config, two, None)[0]
    assert fitted.mesh == MeshConfig(data=1, fsdp=2)
    assert (fitted.batch.global_size, fitted.batch.accumulation) == (4, 1)
    odd = dataclasses.replace(config, model={**config.model, "d_model": 15})
    assert inference._fitted(odd, two, None)[0].mesh == MeshConfig()
    with pytest.raises(ConfigError, match="mesh"):
        inference.load_run(trained[0], mesh=MeshConfig(tensor=3))


@pytest.fixture
def command(monkeypatch, capsys):
    """Returns a function: the exit code, standard output and standard error of a command."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # commands add to it: put back after

    def run(main, *arguments: object):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_generate_prints_the_text(trained, here, command):
    flags = ("--workdir", trained[0], "--prompt", "a cat", "--max-tokens", 8, "--temperature", 0)
    code, out, err = command(generate.main, *flags)
    greedy = SamplingConfig(temperature=0.0)
    assert (code, out) == (
        0,
        here.generate(["a cat"], max_tokens=8, sampling=greedy)[0][0].text + "\n",
    )
    assert f"step {STEPS}" in err


def test_evaluate_prints_json(trained, command):
    code, out, _ = command(evaluate.main, "--workdir", trained[0], "--json", "--step", STEPS)
    found = json.loads(out)
    assert code == 0 and found["step"] == STEPS and found["tokens"] > 1000
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    strange = inference.HeldOut(1, math.nan, 2, math.inf, None, None)
    assert json.loads(evaluate._as_json(strange))["perplexity"] is None
    assert "perplexity inf" in evaluate._as_text(strange)


def test_what_cannot_be_is_told_with_its_exit_code(trained, tmp_path, command):
    code, _, err = command(generate.main, "--workdir", trained[0], "--prompt", "a", "--step", 3)
    assert code == 77 and "there is no checkpoint of step 3" in err
    (tmp_path / "config.json").write_text((trained[0] / "config.json").read_text())
    assert command(evaluate.main, "--workdir", tmp_path)[0] == 77
    for arguments, text in (
        (("--workdir", tmp_path / "none", "--prompt", "a"), "no run there"),
        (("--workdir", trained[0]), "--prompt"),
        (("--workdir", trained[0], "--prompt", "a", "--top-p", 2), "top_p=2.0"),
        (("--workdir", trained[0], "--prompt", ""), "empty"),
        (("--workdir", trained[0], "--prompt", "a", "--num-samples", 0), "num_samples=0"),
    ):
        with pytest.raises(ConfigError, match=text):
            command(generate.main, *arguments)


def test_a_damaged_checkpoint_is_passed_over(trained, here, tmp_path):
    config = dataclasses.replace(here.config.checkpoint, asynchronous=False)
    (tmp_path / "config.json").write_text((trained[0] / "config.json").read_text())
    with CheckpointStore(tmp_path / "checkpoints", config) as store:
        state = trained[1]
        for step in (1, 2):
            store.save(step, state, {})
        assert all(saved.ok for saved in store.poll())
    for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    lines = []
    inference.load_run(tmp_path, log=lines.append)
    assert "checkpoint 2 cannot be used" in lines[0]
