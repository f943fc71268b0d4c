"""The FLOP formula that MFU rests on, against the programs of the real model."""

import dataclasses
import inspect

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxdist.config import files
from jaxdist.planner import targets
from jaxdist.planner.work import Work
from jaxdist.protocols.objective import NextToken
from jaxdist.telemetry.flops import (
    hlo_flops,
    is_uncounted,
    jaxpr_flops,
)
from jaxdist.trainer import (
    compose,
    model_flops,
    run_config,
    step_lines,
    validation,
)
from support.flops_formula import transformer_flops_per_token
from support.objectives import Preference, SumObjective, composition_for
from support.runs import run_of


@pytest.fixture(scope="module", params=[True, False], ids=["swiglu", "gelu"])
def run(request) -> run_config.RunConfig:
    config = run_config.default_config()
    config.remat.policy = "none"
    config.model.update(
        num_layers=2,
        d_model=64,
        d_ff=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=128,
        gated=request.param,
        loss_chunk=64,
        activation="silu" if request.param else "gelu",
    )
    config.batch.update(sequence_length=256, global_size=4)
    return run_config.from_config(config)


def test_the_formula_lies_where_the_forward_program_says(run):
    spec = validation.validate(run, jax.devices()[:1]).spec
    batch = compose.batch_shapes(run, 4)

    def loss(trainable, batch):
        return spec.assemble(trainable, spec.model_state).loss(batch, None).sum

    counted = jaxpr_flops(jax.make_jaxpr(loss)(spec.trainable, batch))
    measured = 3 * counted / (4 * 256)
    formula = model_flops.model_flops(run, spec)
    assert formula["causal"] < formula["full"]
    # Attention skips most, not all, of what a causal mask hides: between the two
    # conventions.
    assert formula["causal"] <= measured <= formula["full"]
    matmuls = 2 * formula["causal"] - formula["full"]  # what both conventions share
    attention = formula["full"] - matmuls
    assert measured - matmuls == pytest.approx(5 / 8 * attention, rel=1e-6), (
        "4 causal blocks"
    )


def test_the_compiled_step_does_the_model_flops_and_what_attention_recomputes(run):
    devices = jax.devices()[:1]
    composition = validation.validate(run, devices)
    built = composition.build_step(devices)
    here = SingleDeviceSharding(devices[0])
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        for name, x in compose.batch_shapes(run, 4).items()
    }
    traced = built.step.trace(built.abstract_state, batch)
    counted = hlo_flops(traced.lower().compile().as_text())
    formula = model_flops.model_flops(run, composition.spec)
    matmuls = 2 * formula["causal"] - formula["full"]
    attention = formula["full"] - matmuls
    # Scores are computed again in the backward pass: 7 products for attention's 6, on
    # 5/8 of the map.
    expected = matmuls + attention * 5 / 8 * 7 / 6
    assert counted / (4 * 256) == pytest.approx(expected, rel=0.01)
    # The numerator of a run's HFU is counted before it compiles, and sees what is
    # computed again.
    assert jaxpr_flops(traced.jaxpr) == pytest.approx(counted, rel=0.01)
    assert not is_uncounted(traced.jaxpr)
    full = compose.with_overrides(run, {"remat.policy": "full"})
    built = validation.validate(full, devices).build_step(devices)
    again = jaxpr_flops(built.step.trace(built.abstract_state, batch).jaxpr)
    assert 1.1 * counted < again < 4 / 3 * counted, (
        "all but the head's forward products, twice"
    )


def test_a_frozen_module_counts_a_forward_pass(run):
    """Of what a step does, too: its program, with the module and without."""
    run = compose.with_overrides(run, {"data.packing": "documents"})
    batch = compose.batch_shapes(run)
    tokens = 4 * 256
    counted = []
    compositions = [
        composition_for(run, objective, 1)
        for objective in (SumObjective(), Preference())
    ]
    for composition in compositions:
        built = composition.build_step(jax.devices()[:1])
        traced = built.step.trace(built.abstract_state, built.abstract_batch(batch))
        counted.append(jaxpr_flops(traced.jaxpr) / tokens)
    alone, both = [model_flops.model_flops(run, c.spec) for c in compositions]
    for convention, needed in both.items():
        assert needed == pytest.approx(alone[convention] * 4 / 3, rel=1e-12)
    assert model_flops.policy_flops(run, compositions[1].spec) == alone
    matmuls = (2 * alone["causal"] - alone["full"]) / 3
    attention = (alone["full"] / 3 - matmuls) * 5 / 8  # four causal blocks
    assert counted[1] - counted[0] == pytest.approx(matmuls + attention, rel=0.01)
    # the throughput's numerator, and the planner's products
    meter = model_flops.throughput(
        compositions[1], compositions[1].mesh(jax.devices()[:1])
    )
    assert meter.causal_flops_per_token == both["causal"]
    target = targets.parse("h100:1")
    works = [Work(composition, target) for composition in compositions]
    more = works[1].matmuls_s("none", 1) - works[0].matmuls_s("none", 1)
    assert more == pytest.approx(tokens * alone["causal"] / 3 / works[0].peak, rel=1e-6)
    assert works[1].in_modules == compositions[1].spec.parameter_count
    counts = step_lines.counts(compositions[1])
    assert counts.endswith(f"; {works[1].in_modules:,} in frozen modules (reference)")


@pytest.mark.parametrize(("base", "params"), [("nf4", "float32"), ("none", "bfloat16")])
def test_parameters_are_counted_as_they_are_not_as_they_are_stored(base, params):
    """The bytes are those that are stored."""
    plain = run_of("quickstart")
    whole = compose.model_spec(plain).parameter_count
    adapted = compose.with_overrides(
        plain, {"lora.rank": 4, "lora.base": base, "precision.params": params}
    )
    composition = validation.validate(adapted, jax.devices()[:1], with_data=False)
    spec = composition.spec
    trained = spec.trainable_count
    assert (spec.parameter_count < whole) == (base == "nf4")
    assert model_flops.total_parameters(adapted, spec) == whole + trained
    assert model_flops.active_parameters(adapted, spec) == whole + trained
    counts = step_lines.counts(composition)
    assert f"of {whole + trained:,} parameters" in counts
    assert "active for a token" not in counts
    size = 2 if params == "bfloat16" else 4
    assert f"adapters {size * trained:,} bytes" in counts
    if base == "none":
        assert f"base {size * whole:,} bytes" in counts


def test_a_module_that_declares_nothing_is_counted_from_its_program(run, monkeypatch):
    module = compose.model_spec(run).all_frozen()
    declared = model_flops.module_flops(run, module, NextToken())
    monkeypatch.setattr(model_flops, "module_costs", lambda run, module: [])
    counted = model_flops.module_flops(run, module, NextToken())
    assert counted["causal"] == counted["full"]
    assert declared["causal"] < counted["causal"] < declared["full"]


def test_a_local_layer_counts_the_tokens_it_sees():
    config = run_config.default_config()
    config.model.update(
        num_layers=3,
        d_model=64,
        d_ff=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=128,
        loss_chunk=64,
    )
    config.batch.update(sequence_length=256, global_size=4)
    # FLOPs of a seen token, forward and backward
    length, window, unit = 256, 64, 12 * 4 * 16

    def count(**changes) -> tuple[dict[str, float], float]:
        config.model.update(**changes)
        run = run_config.from_config(config)
        spec = validation.validate(run, jax.devices()[:1]).spec

        def loss(trainable, batch):
            return spec.assemble(trainable, spec.model_state).loss(batch, None).sum

        jaxpr = jax.make_jaxpr(loss)(spec.trainable, compose.batch_shapes(run, 4))
        return model_flops.model_flops(run, spec), 3 * jaxpr_flops(jaxpr) / (4 * length)

    everywhere, program = count()
    windowed, windowed_program = count(layer_pattern=("local", "global"), window=window)
    # Of three layers two are local. Exactly, a token sees min(i + 1, window) tokens,
    # itself included.
    seen = sum(min(i + 0.5, window) for i in range(length)) / length
    assert windowed["full"] == everywhere["full"]
    saved = everywhere["causal"] - windowed["causal"]
    assert saved == pytest.approx(2 * unit * (length / 2 - seen), rel=1e-3)
    # In four blocks of queries the program computes 5/8 of the map; with a window these
    # columns.
    columns = (64 + 3 * (64 + window - 1)) / 4
    assert program - windowed_program == pytest.approx(
        2 * unit * (5 / 8 * length - columns), rel=1e-6
    )
    assert windowed["causal"] < windowed_program < everywhere["causal"]
    assert count(window=length)[0] == everywhere  # a window that hides nothing


@pytest.mark.parametrize("convention", ["causal", "full"])
def test_the_config_s_hook_is_the_formula(run, convention):
    names = (
        inspect.signature(transformer_flops_per_token).parameters.keys()
        & run.model.keys()
    )
    assert len(names) == 11
    sizes = {name: run.model[name] for name in names}
    formula = transformer_flops_per_token(
        **sizes, sequence_length=256, convention=convention
    )
    assert run.model_config.flops_per_token(256, convention) == formula


def test_a_tiny_variant_is_legal_for_each_packaged_model():
    for name in ("gpt2_124m", "llama3_8b", "quickstart"):
        run = run_config.from_config(files.load(name, folders=files.packaged_folders()))
        tiny = dataclasses.replace(run.model_config, **run.model_config.tiny(32))
        assert not list(tiny.faults())
        assert (tiny.max_length or 32) >= 32
        assert all(getattr(tiny, size) % 8 == 0 for size in tiny.tensor_parallel_dims)
