"""What compiled steps move and hold: collectives and buffers of the HLO, bytes per
device.

The programs are the train steps themselves, compiled for eight emulated devices. On CPU
XLA makes no reduce-scatter: a gradient is summed by an all-reduce in the loop and cut
up in place.
"""

import math
import os
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist.models.attention import Attention
from jaxdist.models.feed_forward import FeedForward
from jaxdist.parallel import execution
from jaxdist.protocols.model import BlockInfo
from jaxdist.step.step_config import StepConfig
from jaxdist.telemetry import hlo
from support.models import (
    DEEP,
    FAST_COMPILE,
    FSDP,
    ONE,
    QUICK,
    Layout,
    Program,
    program_of,
    rules_and_mesh,
    spec_of,
)
from support.paths import TESTS
from support.programs import buffer_shapes, collectives, loop_bodies, reachable

B, S = 8, 128
LAYER_KERNELS = {(64, 176), (176, 64), (64, 8, 12), (8, 12, 64), (64, 4, 12)}


def deep(remat: str = "dots", layout: Layout = FSDP) -> Program:
    return program_of(layout, DEEP, StepConfig(remat=remat), B, S)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim > 1)


# --- tensor parallelism: one sum a block and direction (Megatron-LM, arXiv:1909.08053)


def block_program(part: type, model, *, backward: bool) -> hlo.Module:
    """Returns the program of a block, or of its gradients alone, with tensor = 4."""
    rules, mesh = rules_and_mesh(Layout(4, tensor=4))
    graph, parameters = nnx.split(nnx.eval_shape(lambda: part(model, nnx.Rngs(0))))

    def abstract(variable):
        spec = rules.stored(variable.get_metadata()["logical"], variable.shape)
        leaf = jax.ShapeDtypeStruct(
            variable.shape, variable.dtype, sharding=NamedSharding(mesh, spec)
        )
        return variable.replace(leaf)

    parameters = jax.tree.map(
        abstract, parameters, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    x = jax.ShapeDtypeStruct((B, S, model.d_model), np.float32)

    def forward(parameters, x):
        angles = np.zeros((B, S, 1, model.head_dim // 2), np.float32)
        context = BlockInfo(None, 0, {"rotary_cos": angles, "rotary_sin": angles})
        block = nnx.merge(graph, parameters)
        x = execution.shard(x, "batch", "sequence", None)
        return execution.shard(block(x, context).x, "batch", "residual", None)

    def program(parameters, x, dy):
        with execution.activate(mesh, rules):
            y, pull = jax.vjp(forward, parameters, x)
            return pull(dy) if backward else y

    return hlo.parse(
        jax.jit(program).lower(parameters, x, x).compile(FAST_COMPILE).as_text()
    )


WIDE = replace(DEEP, d_model=64, num_heads=8, num_kv_heads=8)
BLOCKS = {
    "mlp": (FeedForward, WIDE, 0),
    "attention": (Attention, WIDE, 0),
    "gqa": (Attention, replace(WIDE, num_kv_heads=4), 0),
    # Two scales of head_dim elements are shared by all heads: their gradients are sums
    # over tensor.
    "qk_norm": (
        Attention,
        replace(WIDE, num_kv_heads=4, qk_norm="head"),
        2 * WIDE.head_dim,
    ),
    "biases": (FeedForward, replace(WIDE, gated=False, bias="all"), 0),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_under_tensor_parallelism_sums_once_each_way(name, backward):
    part, model, small = BLOCKS[name]
    module = block_program(part, model, backward=backward)
    assert not module.computations.get("while")
    assert model.num_heads % 4 == 0
    kinds = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    assert not collectives(module, kinds)  # nothing else moves
    summed = [math.prod(shape) for _, _, _, shape in collectives(module)]
    assert summed.count(B * S * model.d_model) == 1
    assert sum(summed) == B * S * model.d_model + (small if backward else 0)


def test_fewer_kv_heads_than_tensor_cost_their_own_size_more():
    model = replace(WIDE, num_kv_heads=2)
    summed = [
        math.prod(s)
        for *_, s in collectives(block_program(Attention, model, backward=True))
    ]
    keys_and_values = 2 * B * S * model.num_kv_heads * model.head_dim
    assert (
        B * S * model.d_model
        <= sum(summed)
        <= B * S * model.d_model
        + keys_and_values
        + 2 * math.prod((model.d_model, model.num_kv_heads, model.head_dim))
    )


# --- fsdp: one layer at a time --------------------------------------------------------


def gathers(module: hlo.Module) -> dict[str, Counter]:
    """Returns {loop body, or "" outside loops: (dtype, shape) of each gathered
    array}.
    """
    inside = {
        name: body for body in loop_bodies(module) for name in reachable(module, body)
    }
    found: dict[str, Counter] = {}
    for name, _, dtype, shape in collectives(module, ("all-gather",)):
        found.setdefault(inside.get(name, ""), Counter())[dtype, squeezed(shape)] += 1
    return found


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_fsdp_gathers_one_layer_at_a_time_and_keeps_none(remat):
    module = deep(remat).module
    layers, found = DEEP.num_layers, gathers(module)
    stacked = {(layers, *kernel) for kernel in LAYER_KERNELS}
    shapes = buffer_shapes(module)
    # shards at rest
    assert {(layers, 8, 176), (layers, 176, 8), (layers, 8, 4, 12)} <= shapes
    assert not stacked & shapes
    assert not stacked & set(map(squeezed, shapes))
    outside = found.pop("")
    # the head; no table
    assert set(outside) == {("f32", (DEEP.d_model, DEEP.vocab_size))}
    trips = loop_bodies(module)
    assert len(found) == 2
    assert all(trips[body] == layers for body in found)
    # each kernel once: query, key, value, out, gate, up, down
    for gathered in found.values():
        assert {shape for _, shape in gathered} == LAYER_KERNELS
        assert sum(gathered.values()) == 7


UNCACHED = """
    import sys
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from support.models import DEEP, FSDP, MIXED, TINY, Layout, program_of, rules_and_mesh
    from jaxdist.step.step_config import StepConfig
    from dataclasses import replace

    def mark(text):
        print(text, file=sys.stderr, flush=True)

    mark("# provoked")
    _, mesh = rules_and_mesh(MIXED)
    def put(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    def awkward(x):
        return put(put(x, ("data", "fsdp", "tensor"), None, None) * 2, None, "tensor", "data")
    jax.jit(awkward).lower(np.ones((8, 8, 8), np.float32)).compile()
    mark("# ours")
    program_of(FSDP, DEEP, StepConfig(compute="bfloat16"))
    few = replace(TINY, num_heads=8)
    for layout in (MIXED, MIXED._replace(zero=1), Layout(8, tensor=8),
                   Layout(8, fsdp=2, tensor=4, sequence_parallel=True)):
        program_of(layout, few, StepConfig(accumulation=2 if layout == MIXED else 1))
    mark("# done")
"""


@pytest.fixture(scope="session")
def uncached(tmp_path_factory) -> tuple[str, Path]:
    """Returns what XLA printed while compiling afresh, and the folder of partitioned
    programs.
    """
    folder = tmp_path_factory.mktemp("partitioned")
    # cached: it says nothing
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    environment["XLA_FLAGS"] += (
        f" --xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*step.*"
        " --xla_dump_hlo_pass_re=spmd-partitioning"
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNCACHED)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "# done" in done.stderr, done.stderr[-3000:]
    return done.stderr, folder


@pytest.mark.slow
def test_the_partitioner_never_copies_whole_arrays_for_want_of_a_plan(uncached):
    provoked, ours = uncached[0].split("# ours")
    assert "nvoluntary full rematerialization" in provoked
    assert "nvoluntary full rematerialization" not in ours, ours[:3000]


@pytest.mark.slow
def test_bfloat16_kernels_are_gathered_as_such_and_gradients_summed_in_float32(
    uncached,
):
    # Right after partitioning: later on, CPU turns bfloat16 collectives into float32
    # ones.
    first = min(uncached[1].glob("*after_spmd-partitioning*"))
    module = hlo.parse(first.read_text())
    gathered = [
        (dtype, squeezed(shape))
        for _, _, dtype, shape in collectives(module, ("all-gather",))
    ]
    assert {shape for _, shape in gathered} == LAYER_KERNELS | {
        (DEEP.d_model, DEEP.vocab_size)
    }
    assert {dtype for dtype, _ in gathered} == {"bf16"}
    summed = collectives(module)
    assert {dtype for _, _, dtype, _ in summed} == {"f32"}
    kernels = Counter(
        x.size // DEEP.num_layers
        for path, (x, names) in spec_of(DEEP).named_parameters().items()
        if "blocks" in path and len(names) > 1
    )
    assert kernels.total() == 7
    assert kernels <= Counter(math.prod(shape) for *_, shape in summed)


# --- bytes per device -----------------------------------------------------------------


def state_bytes(layout: Layout, model) -> int:
    """Returns bytes of float32 parameters and AdamW's moments per device: the formula
    of docs.
    """
    parameters = spec_of(model).named_parameters().values()
    vectors = sum(x.size for x, names in parameters if len(names) == 1)
    matrices = sum(x.size for x, names in parameters) - vectors
    shards = layout.fsdp
    kept = {0: 12, 1: 4 + 8 / shards, 2: 4 + 8 / shards, 3: 12 / shards}[layout.zero]
    return round(matrices * kept + 12 * vectors)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_stages_hold_what_the_formula_says(zero):
    layout = FSDP._replace(zero=zero)
    program = deep(layout=layout)
    batch = 4 * (4 * B * S + B) // 8
    counters = program.memory.argument_size_in_bytes - state_bytes(layout, DEEP) - batch
    assert 0 < counters <= 64  # step and the like


def test_gradients_are_sharded_from_stage_2_on():
    temporary = [
        deep(layout=FSDP._replace(zero=z)).memory.temp_size_in_bytes for z in (0, 1, 2)
    ]
    gradients = 4 * spec_of(DEEP).parameter_count
    assert temporary[1] - temporary[2] > 0.6 * gradients * 7 / 8, (temporary, gradients)


@pytest.mark.parametrize(
    "layout", [FSDP, FSDP._replace(zero=1), FSDP._replace(zero=0)], ids=str
)
def test_the_whole_state_is_donated(layout):
    program = deep(layout=layout)
    leaves = jax.tree.leaves(program.step.abstract_state)
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves
    )
    assert held > 0.9 * state_bytes(layout, DEEP)
    assert program.memory.alias_size_in_bytes == held


# MB of temporaries per device; hand-written JAX measured at the same shape
QUICK_LIMITS = {
    "fsdp 8, full": (Layout(8, fsdp=8), "full", 22),
    "fsdp 8, none": (Layout(8, fsdp=8), "none", 62),
    "tensor 4 x fsdp 2, full": (Layout(8, fsdp=2, tensor=4), "full", 27),
    "one device, dots": (ONE, "dots", 175),
}


# the others hold what is sharded and what is computed again
@pytest.mark.parametrize(
    "name",
    [
        "fsdp 8, full",
        pytest.param("fsdp 8, none", marks=pytest.mark.slow),
        "tensor 4 x fsdp 2, full",
        pytest.param("one device, dots", marks=pytest.mark.slow),
    ],
)
def test_layouts_hold_no_more_than_measured(name):
    layout, remat, limit = QUICK_LIMITS[name]
    program = program_of(layout, QUICK, StepConfig(remat=remat), 8, 256)
    arguments = program.memory.argument_size_in_bytes
    parameters = spec_of(QUICK).parameter_count
    assert (
        12 * parameters / layout.devices
        <= arguments
        < 12.8 * parameters / layout.devices
    )
    assert program.memory.temp_size_in_bytes / 1e6 <= 1.1 * limit


# --- rematerialisation ----------------------------------------------------------------

PARTLY = "save:mlp_gate,mlp_up"
POLICIES = ("none", "dots", PARTLY, "full")


def dots_of_the_backward_loop(module: hlo.Module) -> int:
    """Returns the matrix products in the body of the loop that goes backward through
    the layers.
    """
    counts = [
        sum(
            instruction.opcode == "dot"
            for name in reachable(module, body)
            for instruction in module.computations[name].values()
        )
        for body, trips in loop_bodies(module).items()
        if trips == DEEP.num_layers
    ]
    assert len(counts) == 2
    return max(counts)


def test_policies_recompute_what_their_names_say():
    counts = {
        policy: dots_of_the_backward_loop(deep(policy).module) for policy in POLICIES
    }
    blocks = 2  # attention goes through 128 positions in blocks of 64 queries
    # Two products per kernel (its gradient, its input's), five per attention block.
    assert counts["none"] == 2 * 7 + 5 * blocks
    assert counts["dots"] == counts["none"]
    # Again all kernels but the last (nothing reads `down`'s output), and attention,
    # whose scores serve both directions.
    assert counts["full"] == counts["none"] + 6 + blocks
    assert counts[PARTLY] == counts["full"] - 2


def test_policies_hold_what_their_names_say():
    held = {policy: deep(policy).memory.temp_size_in_bytes for policy in POLICIES}
    assert held["none"] > held["dots"] > held[PARTLY] > held["full"]
    saved = 2 * DEEP.num_layers * (B // 8) * S * DEEP.d_ff * 4
    assert held[PARTLY] - held["full"] == pytest.approx(saved, rel=0.2)
