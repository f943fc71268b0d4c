"""Scaled rotary positions: tables, config.json, and the logits of transformers."""

import importlib
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import interop
from jaxdist.models.model_values import differing_values, without_changes
from jaxdist.models.rotary import rotary_frequencies
from jaxdist.models.transformer import TransformerConfig
from jaxdist.step.step_config import StepConfig
from support.huggingface import MESH, compare
from support.models import ONE, TINY, Layout, batch_of, fresh, model_of, step_of
from support.paths import DATA

# made by make.py beside it
CASES = json.loads((DATA / "rotary/frequencies.json").read_text())
LISTS = {
    "rope_short_factor": (1.0, 1.5, 1.5, 2.0),
    "rope_long_factor": (1.0, 2.0, 5.0, 9.0),
}
SEVEN = {"rope_factor": 7.0, "rope_original_positions": 8}
KINDS = {
    "yarn": SEVEN | {"rope_scaling": "yarn"},
    "yarn by hand": SEVEN
    | {
        "rope_scaling": "yarn",
        "rope_truncate": False,
        "rope_attention_factor": 1.2,
        "rope_beta_fast": 8.0,
        "rope_beta_slow": 0.5,
    },
    "longrope": SEVEN | LISTS | {"rope_scaling": "longrope"},
    "longrope by hand": LISTS
    | {
        "rope_scaling": "longrope",
        "rope_original_positions": 8,
        "rope_attention_factor": 1.3,
    },
    "dynamic": SEVEN | {"rope_scaling": "dynamic"},
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name):
    case = CASES[name]
    family, values = interop.derive(case["config"])
    config = TransformerConfig(**values)
    assert family.model_type == case["config"]["model_type"]
    assert config.stretches
    found = rotary_frequencies(
        config.rotary_dims, config.rope_theta, case["length"], config
    )
    np.testing.assert_allclose(
        found.frequencies, np.float32(case["frequencies"]), rtol=1e-6
    )
    assert found.scale == pytest.approx(case["scale"], rel=1e-12)
    plain = rotary_frequencies(config.rotary_dims, config.rope_theta).frequencies
    assert "up to" in name or np.abs(found.frequencies / plain - 1).max() > 0.1
    again, fields = interop.fields_of(values, case["config"])
    assert again is family
    assert interop.derive(fields)[1] == values


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_in_both_spellings(name):
    values = interop.canonical_values({"head_dim": 8, "rope_theta": 5e4, **KINDS[name]})
    family, fields = interop.fields_of(values)
    assert family.model_type == "llama"
    assert interop.derive(fields)[1] == values
    rope, theta = fields.pop("rope_scaling"), fields.pop("rope_theta")
    new = fields | {"rope_parameters": rope | {"rope_theta": theta}}
    assert interop.derive(new)[1] == values
    old = fields | {
        "rope_theta": theta,
        "rope_scaling": rope | {"type": rope["rope_type"]},
    }
    del old["rope_scaling"]["rope_type"]
    assert interop.derive(old)[1] == values


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_decoding_has_the_positions_of_its_cache(name):
    """Keys are rotated before the length of the text is known."""
    config = replace(TINY, head_dim=8, **KINDS[name])
    model, tokens = model_of(config), batch_of(config)["tokens"][:, :16]
    positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    graph, parameters = nnx.split(model)

    @jax.jit
    def both(parameters, tokens):
        model = nnx.merge(graph, parameters)
        cache, parts = model.init_cache(len(tokens), 16), []
        for part in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
            logits, cache = model.decode(part, cache)
            parts.append(logits)
        return jnp.concatenate(parts, 1), model.forward(
            {"tokens": tokens, "positions": positions}
        )

    decoded, whole = both(parameters, tokens)
    np.testing.assert_allclose(decoded, whole, atol=2e-5)
    other = nnx.merge(
        nnx.split(model_of(replace(config, rope_factor=1.0, rope_scaling="llama3")))[0],
        parameters,
    )
    plain = other.forward({"tokens": tokens, "positions": positions})
    assert np.abs(np.asarray(plain) - np.asarray(whole)).max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_a_tiny_variant_is_stretched_alike(name):
    few = KINDS[name] | {key: LISTS[key] * 4 for key in LISTS if key in KINDS[name]}
    config = TransformerConfig(head_dim=32, **few)
    tiny = replace(config, **config.tiny(64))
    assert not [*config.faults()]
    assert not [*tiny.faults()]
    assert tiny.stretches
    assert tiny.rope_scaling == config.rope_scaling
    assert tiny.rope_original_positions < 64


def test_a_base_or_stretch_that_was_forgotten_is_no_change():
    theirs = {"rope_theta": 1e6, "rope_factor": 4.0, "rope_scaling": "yarn", "d_ff": 48}
    ours = {"rope_theta": 1e4, "rope_factor": 1.0, "rope_scaling": "llama3", "d_ff": 48}
    told = differing_values(ours, without_changes(theirs, ours))
    assert sorted(told) == [
        "model.rope_factor=1.0, there 4.0",
        "model.rope_theta=10000.0, there 1000000.0",
    ]
    chosen = ours | {"rope_theta": 5e6, "rope_factor": 16.0}
    assert differing_values(chosen, without_changes(theirs, chosen)) == []


@pytest.mark.slow
def test_sequences_split_over_devices_have_the_tables_of_whole_ones():
    """A part of a long sequence must not be scaled like a short sequence."""
    config = replace(
        TINY, head_dim=8, **KINDS["longrope"] | {"rope_original_positions": 16}
    )
    losses = []
    for layout in (ONE, Layout(4, context=4)):
        built, batch = step_of(layout, config, StepConfig()), batch_of(config, 4, 32)
        batch = jax.device_put(batch, built.batch_shardings(batch))
        losses.append(float(built.inspect(fresh(built), batch)[1]["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def _folder(name, folder):
    """Writes a random transformers model with scaled positions, its tokens and logits."""
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folders = importlib.import_module("support.transformers_folders")
    make = folders.make
    values = interop.canonical_values({"head_dim": 8, "rope_theta": 5e4, **KINDS[name]})
    rope = interop.fields_of(values)[1]["rope_scaling"]
    kind = {"longrope": "phi3", "yarn": "qwen2"}.get(name, "llama")
    lengths = {"max_position_embeddings": 8 if name == "dynamic" else 56}
    lengths |= {"original_max_position_embeddings": 8} if kind == "phi3" else {}
    sizes = make.SIZES | {"hidden_size": 32} | lengths
    config = transformers.AutoConfig.for_model(
        kind, **sizes, rope_parameters=rope | {"rope_theta": 5e4}
    )
    model = make.build(config)
    tokens = np.random.default_rng(1).integers(0, 32, (2, 20))
    np.save(folder / "tokens.npy", tokens.astype(np.int32))
    np.save(folder / "logits.npy", make.logits_of(model, tokens))
    model.save_pretrained(folder)
    return folders


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_transformers(name, tmp_path):
    """Below and beyond the original length, also after an export."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    folders = _folder(name, source)
    assert (
        interop.derive(interop.read_config(source))[1]["rope_scaling"]
        == KINDS[name]["rope_scaling"]
    )
    difference, _, parameters = compare(source)
    assert difference <= 1e-5
    if name == "longrope":
        assert compare(source, MESH)[0] <= 1e-5
    model = folders.reloaded(source, target, parameters)
    tokens = np.load(source / "tokens.npy")
    logits_of = folders.make.logits_of
    np.testing.assert_allclose(
        logits_of(model, tokens), np.load(source / "logits.npy"), atol=1e-6
    )
    np.save(source / "tokens.npy", tokens[:, :7])
    np.save(source / "logits.npy", logits_of(model, tokens[:, :7]))
    assert compare(source)[0] <= 1e-5
