"""Hugging Face folders (tests/data/huggingface) for tests: opened, compared,
converted.
"""

import random
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from jaxdist import convert, interop
from jaxdist.config import trees
from jaxdist.interop import initial_weights
from jaxdist.parallel import execution, sharding
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep
from jaxdist.trainer import compose, run_config, validation
from jaxdist.trainer.weight_source import Target
from support.paths import DATA
from support.weight_sources import apply_weight_source

FOLDERS = DATA / "huggingface"
FP8 = "deepseek_v3_fp8"  # weights in 8-bit floats; its tests: test_block_scales.py
FAMILIES = sorted(
    path.name
    for path in FOLDERS.iterdir()
    if (path / "config.json").is_file() and path.name != FP8
)
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
EXPERTS = ("mixtral", "olmoe", "qwen3_moe", "qwen2_moe", "glm4_moe")  # families
EXPERT_MESH = {"mesh.data": 1, "mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


class Opened(NamedTuple):
    """A folder made ready to be read, by one device or by eight."""

    spec: ModelSpec
    rules: sharding.Rules
    mesh: Mesh
    built: TrainStep
    tensors: interop.Tensors
    target: Target
    wanted: dict  # what of them is wanted where


def opened(folder, changes=None, devices=8):
    """Returns the folder opened for the first `devices` devices, or for one without
    changes.
    """
    config = run_config.default_config()
    own = {
        "init.from_huggingface": str(folder),
        "batch.global_size": 8,
        "batch.sequence_length": 16,
    }
    config.update_from_flattened_dict(own | (changes or {}))
    apply_weight_source(config, ("data.tokenizer",))
    run = run_config.from_config(config)
    devices = jax.devices()[: devices if changes else 1]
    composition = validation.validate(run, devices)
    built = composition.build_step(devices)
    target = Target(run, built.views.abstract)
    wanted = initial_weights.wanted_arrays(folder, target)
    tensors = interop.open_weights(
        folder, run.model_options, {p: x.shape for p, x in wanted.items()}
    )
    return Opened(
        composition.spec, composition.rules, built.mesh, built, tensors, target, wanted
    )


def first_state(spec):
    """Returns the model state of a new model: what keeps the load of experts even."""
    return (
        jax.jit(lambda: spec.init_params(jax.random.key(0))[1])()
        if spec.model_state
        else {}
    )


def with_biases(model_state, arrays):
    """Moves what a folder holds of the model state there; returns it and the rest."""
    model_state = trees.flatten_names(model_state)
    arrays = dict(trees.flatten_names(arrays))
    model_state |= {path: arrays.pop(path) for path in model_state.keys() & arrays}
    return trees.unflatten_names(model_state), trees.unflatten_names(arrays)


def logits(at, trainable, tokens, frozen=None):
    """Returns float32 logits [B, S, V] of a batch of tokens."""
    model_state, trainable = with_biases(first_state(at.spec), trainable)

    def forward(trainable, frozen, tokens):
        positions = jnp.broadcast_to(
            jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
        )
        with execution.activate(at.mesh, at.rules):
            model = at.spec.assemble(trainable, model_state, frozen)
            return model.forward({"tokens": tokens, "positions": positions})

    with jax.default_matmul_precision("highest"):
        return np.asarray(
            jax.jit(forward)(trainable, frozen or {}, jnp.asarray(tokens, jnp.int32))
        )


def compare(folder, changes=None):
    """Returns the largest difference of logits from those of transformers, and the
    tensors read.
    """
    at = opened(folder, changes)
    parameters = at.tensors.load(at.wanted)
    tokens, expected = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    rows = 8 // len(tokens) if changes else 1
    found = logits(at, trees.unflatten_names(parameters), np.tile(tokens, (rows, 1)))
    assert np.abs(expected).max() > 1, "logits that say nothing"
    assert expected.std() > 0.2, "logits that say nothing"
    return np.abs(found - np.tile(expected, (rows, 1, 1))).max(), at.tensors, parameters


def with_state(spec, arrays):
    """Returns the parameters and the model state of a folder's arrays."""
    names = trees.flatten_names(spec.model_state)
    state = trees.flatten_names(first_state(spec))
    state |= {path: x for path, x in arrays.items() if path in names}
    trainable = {path: x for path, x in arrays.items() if path not in names}
    return trees.unflatten_names(trainable), trees.unflatten_names(state)


def load_all(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}


SMOLLM = FOLDERS / "smollm"  # tied, bfloat16, with a tokenizer


def run_convert(source, target, kind, *more):
    flags = ["--from", source, "--to", target, "--format", kind, *more]
    return convert.main([str(flag) for flag in flags])


@pytest.fixture(scope="module", name="text")
def text_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "cat", "in", "thin", "hats", "then", "thinks", "of", "the", "inn"]
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=900)))
    return folder / "text.txt"


def flags(text, folder=SMOLLM, **changes):
    given = {
        "init.from_huggingface": folder,
        "data.source": "text",
        "data.path": text,
        "train.steps": 2,
        "train.eval_every": 0,
        "train.max_minutes": 0,
        "train.log_every": 1,
        "train.ema_decay": 0.5,
        "train.sample_tokens": 0,
        "batch.sequence_length": 16,
        "batch.global_size": 8,
        "data.cache_dir": Path(text).parent / "cache",
        "optimizer.warmup_steps": 1,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 0.01,  # tiny models learn in 2 steps
    }
    given |= {key.replace("__", "."): value for key, value in changes.items()}
    return [
        "--config",
        "quickstart",
        *(f"--config.{key}={value}" for key, value in given.items()),
    ]


def shapes_of(tree):
    return {path: x.shape for path, x in trees.flatten_names(tree).items()}


def loaded(folder):
    """Returns spec and parameters of a Hugging Face folder."""
    config = run_config.default_config()
    config.update_from_flattened_dict({"init.from_huggingface": str(folder)})
    apply_weight_source(config, ("data.tokenizer",))
    run = run_config.from_config(config)
    spec = compose.model_spec(run)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = shapes_of(spec.trainable)
    wanted = {
        path: jax.ShapeDtypeStruct(dims, jnp.float32, sharding=here)
        for path, dims in shapes.items()
    }
    tensors = interop.open_weights(folder, run.model_options, shapes)
    return spec, trees.unflatten_names(tensors.load(wanted))


def logits_of(spec, trainable, frozen, tokens):
    """Returns float32 logits on one device."""
    trainable, frozen = jax.device_get((trainable, frozen))
    positions = np.broadcast_to(
        np.arange(tokens.shape[1], dtype=np.int32)[None], tokens.shape
    )
    batch = {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "positions": jnp.asarray(positions),
    }
    state = first_state(spec)
    with jax.default_matmul_precision("highest"):
        return np.asarray(
            jax.jit(lambda t, f: spec.assemble(t, state, f).forward(batch))(
                trainable, frozen
            )
        )
