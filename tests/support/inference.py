"""A small finished run, taken from its workdir for inference: fixtures."""

import os
import random

import jax
import pytest

from jaxdist import library
from jaxdist.evaluation import loading
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.trainer.run_config import default_config, from_config

STEPS = 4
TOP = SamplingConfig(temperature=0.7, top_k=40)

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "two",
    "dogs",
    "ran",
    "past",
    "old",
    "trees",
]


def tiny_config(folder):
    """Returns a run that averages its weights, on eight devices, with text of
    its own.
    """
    for name, seed in (("train", 0), ("held", 1)):
        text = " ".join(random.Random(seed).choices(WORDS, k=600))
        (folder / f"{name}.txt").write_text(text)
    config = default_config()
    config.update_from_flattened_dict(
        {
            "train.steps": STEPS,
            "train.eval_every": STEPS,
            "train.sample_tokens": 0,
            "train.ema_decay": 0.5,
            "batch.global_size": 8,
            "batch.sequence_length": 32,
            "batch.accumulation": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "model.num_layers": 1,
            "model.d_model": 16,
            "model.d_ff": 32,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.head_dim": 8,
            "optimizer.warmup_steps": 1,
            "optimizer.learning_rate": 0.02,
            "data.source": "text",
            "data.path": str(folder / "train.txt"),
            "data.validation_path": str(folder / "held.txt"),
            "data.cache_dir": str(folder / "cache"),
        }
    )
    return from_config(config)


@pytest.fixture(scope="module", name="trained")
def trained_fixture(tmp_path_factory):
    """Returns the workdir of a finished run and its last state."""
    assert jax.device_count() == 8
    folder = tmp_path_factory.mktemp("run")
    state = library.run(tiny_config(folder), folder / "workdir")
    return folder / "workdir", state


@pytest.fixture(scope="module", name="here")
def here_fixture(trained):
    return loading.load_run(trained[0])


@pytest.fixture(scope="module", name="alone")
def alone_fixture(trained):
    return loading.load_run(trained[0], devices=jax.devices()[:1])


@pytest.fixture(name="command")
def command_fixture(monkeypatch, capsys):
    """Returns a function: the exit code, standard output and standard error of a
    command.
    """
    # commands add to it: put back after
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])

    def run(main, *arguments: object):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
