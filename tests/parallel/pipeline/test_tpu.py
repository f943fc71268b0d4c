"""Pipelined steps compiled by libtpu for chips that are not here: memory, kernels,
collectives.

A child process compiles cases (libtpu writes to fd 2 and reads its environment at
import) and prints a JSON line per case; one does all small ones.
"""

import json
import re
import sys

import pytest

from support.compilers import compiled_apart

pytest.importorskip(
    "libtpu", reason="ahead-of-time TPU compiles need libtpu: pip install jax[tpu]"
)

QUICK = {
    "topology": "v5e:2x4",
    "fsdp": 2,
    "sequence": 256,
    "sequences": 2,
    "model": {
        "num_layers": 8,
        "d_model": 256,
        "d_ff": 256,
        "vocab_size": 512,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 128,
    },
}
LARGE = {
    "topology": "v5e:4x4",
    "fsdp": 4,
    "sequence": 1024,
    "sequences": 8,
    "model": {
        "num_layers": 8,
        "d_model": 1024,
        "d_ff": 4096,
        "vocab_size": 32768,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
}
STAGES = 4
# by default the gradients alone; test_program.py has the memory on CPU devices
SMALL = ("quick 1f1b 8", "quick 1f1b 32")


def _compile(name: str) -> dict:
    """Returns what the compiler made of a case; runs in the child.

    A name is "size schedule microbatches", and fields of PipelineConfig as
    "field=value"; with "inspect" at the end it is the step that gives its gradients,
    too.
    """
    import jax
    from jax.experimental import topologies

    from jaxdist.models.transformer import Transformer, TransformerConfig
    from jaxdist.optim.config import OptimizerConfig
    from jaxdist.optim.schedules import build_schedule
    from jaxdist.parallel import mesh as meshes
    from jaxdist.parallel import sharding
    from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
    from jaxdist.protocols.model_spec import describe
    from jaxdist.step.step_config import StepConfig
    from jaxdist.step.train_step import build_train_step
    from support.programs import stage_dependent_predicates

    size, schedule, number, *settings = name.split()
    given, microbatches = {"quick": QUICK, "large": LARGE}[size], int(number)
    inspects, fields = (
        "inspect" in settings,
        dict(s.split("=") for s in settings if "=" in s),
    )
    more = {
        field: value == "true" if field == "gather_once" else value
        for field, value in fields.items()
    }
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=given["topology"]
    ).devices
    config = meshes.MeshConfig(pipeline=STAGES, data=1, fsdp=given["fsdp"])
    mesh = meshes.build_mesh(config, devices)
    shared = more.get("edges", "sharded") == "sharded"
    rules = sharding.build_rules(
        config, meshes.resolve_mesh(config, mesh.size), vocab_over_stages=shared
    )
    model = TransformerConfig(**given["model"])
    chunks = 2 if schedule == "interleaved" else 1
    staging = Staging(
        PipelineConfig(schedule, microbatches, chunks, **more), model.num_layers, STAGES
    )
    optimizer = OptimizerConfig(warmup_steps=1)
    batch = given["sequences"] * microbatches
    built = build_train_step(
        describe(lambda rngs: Transformer(model, rngs=rngs)),
        optimizer,
        build_schedule(optimizer, 1000, batch),
        mesh,
        rules,
        StepConfig(compute="bfloat16", remat="full", staging=staging),
    )
    dims = (batch, given["sequence"])
    example = {
        name: jax.ShapeDtypeStruct(dims, "float32" if name == "weights" else "int32")
        for name in ("tokens", "targets", "weights", "positions")
    } | {"sample": jax.ShapeDtypeStruct(dims[:1], "int32")}
    traced = (built.inspect if inspects else built.step).trace(
        built.abstract_state, built.abstract_batch(example)
    )
    reads, conditionals, _ = stage_dependent_predicates(traced.jaxpr.jaxpr)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    kernels = re.findall(r"%splash_mha_(fwd|dq|dkv)\S* = .*tpu_custom_call", text)
    same = None
    if inspects:
        pairs = zip(
            jax.tree.leaves(compiled.output_shardings[2]),
            jax.tree.leaves(built.abstract_state.trainable),
            strict=True,
        )
        same = [
            where.is_equivalent_to(leaf.sharding, leaf.ndim) for where, leaf in pairs
        ]
    return {
        "gradients_lie_as_parameters": same,
        "stage_reads": reads,
        "conditionals": conditionals,
        "kernels": {k: kernels.count(k) for k in ("fwd", "dq", "dkv")},
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def result(name: str) -> dict:
    return results(*(SMALL if name in SMALL else (name,)))[name]


def results(*names: str) -> dict[str, dict]:
    return compiled_apart(__file__, *names, timeout=1200)


def growth(size: str, schedule: str) -> float:
    """Returns temporary memory with 32 microbatches over that with 8."""
    few, many = (
        result(f"{size} {schedule} {microbatches}") for microbatches in (8, 32)
    )
    for found in (few, many):
        # Attention is the kernel, on each device's own rows: once in a loop over ticks
        # with F, and in one with B once more, as a stage's recomputation is not
        # computed again.
        assert found["kernels"]["dq"] == found["kernels"]["dkv"] > 0
        assert found["kernels"]["fwd"] == 2 * found["kernels"]["dq"]
        # the state is donated
        assert found["alias_bytes"] > 0.99 * few["argument_bytes"]
    return many["temp_bytes"] / few["temp_bytes"]


@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches():
    assert growth("quick", "1f1b") <= 1.02


@pytest.mark.slow
def test_on_tpu_gradients_lie_as_parameters_and_no_predicate_depends_on_the_stage():
    found = result("quick interleaved 8 inspect")
    assert len(found["gradients_lie_as_parameters"]) > 8
    assert all(found["gradients_lie_as_parameters"])
    # else the child has failed
    assert found["stage_reads"] > 0
    assert found["conditionals"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_memory_of_a_large_stage_does_not_grow_with_microbatches(schedule):
    assert growth("large", schedule) <= 1.02


@pytest.mark.slow
def test_memory_of_gpipe_does_grow():
    assert growth("large", "gpipe") > 1.1


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps({"case": case} | _compile(case)), flush=True)
