"""Experts shared out over devices: the numbers of one device, whatever the load and the
layout.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.ops.experts import experts, explain, route
from jaxdist.ops.experts import mixture as mixture_module
from jaxdist.ops.experts.mixture import DOWN_NAMES, INPUT_NAMES
from jaxdist.parallel import execution
from jaxdist.telemetry import hlo
from support.experts import rules_and_mesh
from support.models import FAST_COMPILE, worst
from support.programs import buffer_shapes, collectives

B, S, D, F, E, K = 8, 48, 16, 24, 16, 4
VALUES, GRADIENTS = 1e-6, 2e-6  # relative to the largest
NAMES = {
    "router": ("d_model", None),
    "gate": INPUT_NAMES,
    "up": INPUT_NAMES,
    "down": DOWN_NAMES,
}
LOADS = ("even", "skewed")


class Case(NamedTuple):
    """A layout and the options of `experts`."""

    sizes: dict
    options: dict = {}
    in_rounds: bool = True  # whether rows go by rounds: then a skewed load takes more
    zero: int = 3


CASES = {
    "expert": Case({"expert": 8}),
    "fsdp x expert x tensor": Case(
        {"fsdp": 2, "expert": 2, "tensor": 2}, {"exchange": "rounds"}
    ),
    "gather": Case(
        {"fsdp": 2, "expert": 2, "tensor": 2}, {"exchange": "gather"}, in_rounds=False
    ),
}
MORE = {
    "expert x data": Case({"expert": 4, "data": 2}),
    "fsdp x data": Case({"fsdp": 4, "data": 2}, in_rounds=False),
    "expert x context x fsdp": Case(
        {"fsdp": 2, "expert": 2, "context": 2}, {"exchange": "rounds"}
    ),
    "zero 1": Case({"fsdp": 2, "expert": 4}, zero=1),
    "gather over 8": Case({"expert": 8}, {"exchange": "gather"}, in_rounds=False),
    "gather with context": Case(
        {"expert": 4, "context": 2}, {"exchange": "gather"}, in_rounds=False
    ),
    "slack": Case({"expert": 4, "data": 2}, {"exchange": "rounds", "slack": 2.0}),
    "capacity": Case(
        {"fsdp": 2, "expert": 2, "context": 2},
        {"capacity_factor": 1.0},
        in_rounds=False,
    ),
}


@lru_cache
def arrays() -> tuple[dict, np.ndarray, dict]:
    """Returns the parameters, x, and for each load what is added to the router's logits
    of each sample.

    With a skewed load all tokens go to a quarter of the experts.
    """
    random = np.random.default_rng(7)
    dims = {"router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    parameters = {
        name: random.normal(size=size) * size[-2] ** -0.5 for name, size in dims.items()
    }
    parameters = {name: a.astype(np.float32) for name, a in parameters.items()}
    even = np.zeros((B, 1, E), np.float32)
    loads = {"even": even, "skewed": even - 50 * (np.arange(E) >= E // 4)}
    loads["mixed"] = np.where(
        np.arange(B)[:, None, None] < B // 2, even, loads["skewed"]
    )
    x = random.normal(size=(B, S, D)).astype(np.float32)
    return (
        parameters,
        x,
        {name: load.astype(np.float32) for name, load in loads.items()},
    )


def mixture(values: dict, x, load, **options):
    """Returns a loss, and the output, as a model has them."""
    p = {name: nnx.Param(value, logical=NAMES[name]) for name, value in values.items()}
    routing = route(jnp.tensordot(x, p["router"][...], 1) + load, K)
    arguments = p["gate"], p["up"], p["down"], jax.nn.silu
    out = experts(x, routing.ids, routing.weights, *arguments, **options)
    return jnp.sum(out.x**2) / 2, out


def grad(values, x, load, **options):
    return jax.value_and_grad(mixture, argnums=(0, 1), has_aux=True)(
        values, x, load, **options
    )


@lru_cache
def on_one_device(load: str, **options):
    values, x, loads = arrays()
    return jax.device_get(
        jax.jit(lambda *a: grad(*a, **options))(values, x, loads[load])
    )


@lru_cache
def program(name: str):
    """Returns the compiled gradient on a layout, and a function that places its
    arguments.
    """
    case = (CASES | MORE)[name]
    rules, mesh = rules_and_mesh(zero=case.zero, **case.sizes)

    def inside(values, x, load):
        with execution.activate(mesh, rules):
            return grad(values, x, load, **case.options)

    def placed(values, x, load):
        specs = {n: rules.stored(NAMES[n], v.shape) for n, v in values.items()}
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        spec = rules.activation(("batch", "sequence", None), x.shape)
        return (
            jax.device_put(values, where),
            jax.device_put(x, NamedSharding(mesh, spec)),
            load,
        )

    values, x, loads = arrays()
    return jax.jit(inside).lower(*placed(values, x, loads["even"])).compile(
        FAST_COMPILE
    ), placed


def check(name: str, load: str, built=None) -> None:
    case, (values, x, loads) = (CASES | MORE)[name], arrays()
    capacity = {k: v for k, v in case.options.items() if k == "capacity_factor"}
    (loss, one), gradients = on_one_device(load, **capacity)
    compiled, placed = built or program(name)
    (own_loss, out), own_gradients = jax.device_get(
        compiled(*placed(values, x, loads[load]))
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))
    assert worst((own_loss, out.x), (loss, one.x)) < VALUES
    assert worst(own_gradients, gradients) < GRADIENTS
    np.testing.assert_array_equal(out.stats.load, one.stats.load)
    assert (one.stats.load[E // 4 :].sum() == 0) == (load == "skewed")
    assert one.stats.load.sum() == B * S * K
    assert out.stats.dropped == one.stats.dropped
    assert (out.stats.dropped > 0) == ("capacity_factor" in case.options)
    rounds = out.stats.rounds / out.stats.exchanges
    if case.in_rounds:
        assert 1 <= rounds <= 2 if load == "even" else rounds >= 2


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", CASES)
def test_every_layout_has_the_numbers_of_one_device(name, load):
    check(name, load)


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_have_the_numbers_of_one_device(name, load):
    check(name, load)


@pytest.mark.parametrize(
    "name", ["expert", pytest.param("gather", marks=pytest.mark.slow)]
)
def test_many_rows_take_several_rounds_and_have_the_same_numbers(name, monkeypatch):
    monkeypatch.setattr(mixture_module, "ROWS", 16)
    monkeypatch.setattr(mixture_module, "ROWS_OF_EXPERT", 1)
    built = program.__wrapped__(name)
    assert "even_load_trips_4" in built[0].as_text()
    for load in LOADS:
        check(name, load, built)


def test_rounds_of_many_rows_have_enough_of_each_expert():
    even_trips = mixture_module.even_trips
    assert [even_trips(1.25 * rows, 1) for rows in (1, 52_428, 98_304, 10**7)] == [
        1,
        1,
        2,
        4,
    ]
    assert [even_trips(1.25 * 98_304, experts) for experts in (2, 8, 16)] == [2, 1, 1]


# --- regions --------------------------------------------------------------------------


def in_region(axis: str, **sizes):
    """Returns the gradient for which devices of a manual axis have each their own
    samples, and sum once.
    """
    rules, mesh = rules_and_mesh(**sizes)

    def own(values, *samples):
        (loss, out), (of_values, of_x) = grad(values, *samples)
        summed = jax.tree.map(
            lambda a: jax.lax.psum(a, axis), (loss, out.stats.load, of_values)
        )
        return summed, (out.x, of_x)

    def inside(*arguments):
        with execution.activate(mesh, rules):
            specs = {"in_specs": (P(), P(axis), P(axis)), "out_specs": (P(), P(axis))}
            return execution.region(own, (axis,), **specs)(*arguments)

    return jax.jit(inside)


@pytest.mark.parametrize(
    ("axis", "sizes"),
    [
        ("data", {"data": 2, "expert": 2, "fsdp": 2}),
        ("pipeline", {"pipeline": 2, "expert": 4}),
    ],
    ids=["sums once a step", "stages"],
)
def test_in_a_region(axis, sizes):
    """Half of the devices have an even load, half a skewed one: all go round
    as often.
    """
    values, x, loads = arrays()
    (_, one), (one_of_values, one_of_x) = on_one_device("mixed")
    compiled = (
        in_region(axis, **sizes).lower(values, x, loads["mixed"]).compile(FAST_COMPILE)
    )
    (_, load, of_values), (out, of_x) = jax.device_get(
        compiled(values, x, loads["mixed"])
    )
    assert worst(out, one.x) < VALUES
    assert worst((of_values, of_x), (one_of_values, one_of_x)) < GRADIENTS
    np.testing.assert_array_equal(load, one.stats.load)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["rounds", "gather"])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_bfloat16_on_split_experts_and_kernels(exchange, reduce):
    """Sums over devices round differently, and no more: the routing is that of one
    device.
    """
    values, x, loads = arrays()
    arguments = values, x.astype(jnp.bfloat16), loads["even"]
    (_, one), gradients = jax.device_get(jax.jit(grad)(*arguments))
    rules, mesh = rules_and_mesh(fsdp=2, expert=2, tensor=2)

    def inside(*arguments):
        with execution.activate(mesh, rules, compute="bfloat16", reduce=reduce):
            return grad(*arguments, exchange=exchange)

    compiled = jax.jit(inside).lower(*arguments).compile(FAST_COMPILE)
    (_, out), own_gradients = jax.device_get(compiled(*arguments))
    assert out.x.dtype == jnp.bfloat16
    assert out.stats.load.dtype == np.float32
    np.testing.assert_array_equal(out.stats.load, one.stats.load)
    pairs = zip(
        *map(jax.tree.leaves, ((out.x, own_gradients), (one.x, gradients))), strict=True
    )
    for ours, reference in pairs:
        ours, reference = (np.asarray(a, np.float64) for a in (ours, reference))
        assert np.linalg.norm(ours - reference) < 1e-2 * np.linalg.norm(reference)


# --- samples that the axes do not divide ----------------------------------------------


def test_devices_that_have_the_same_tokens():
    """Decoding one sequence on a mesh: nobody's part of the batch is counted twice."""
    values, x, loads = arrays()
    arguments = values, x[:1], loads["even"][:1]
    (loss, one), gradients = jax.device_get(jax.jit(grad)(*arguments))
    rules, mesh = rules_and_mesh(fsdp=2, expert=4)
    with execution.activate(mesh, rules):
        (own_loss, out), own_gradients = jax.device_get(jax.jit(grad)(*arguments))
    assert worst((own_loss, out.x), (loss, one.x)) < VALUES
    assert worst(own_gradients, gradients) < GRADIENTS
    np.testing.assert_array_equal(out.stats.load, one.stats.load)


# --- what the program does ------------------------------------------------------------


def test_rows_cross_by_all_to_all_and_nothing_else_does():
    compiled, _ = program("expert")
    module = hlo.parse(compiled.as_text())
    kinds = (
        "all-to-all",
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "collective-permute",
    )
    moved = [(kind, shape) for _, kind, _, shape in collectives(module, kinds)]
    rows = [shape for kind, shape in moved if kind == "all-to-all" and shape[-1] == D]
    # 2 forward and 3 backward; CPU's has a result for each device
    assert len(rows) in (5, 5 * 8)
    # The router is held in shards over expert, as all is that is no expert's; nothing
    # else is gathered.
    assert {shape for kind, shape in moved if kind == "all-gather"} <= {(D, E)}
    assert not [shape for kind, shape in moved if kind == "collective-permute"]
    assert "ragged-dot" not in compiled.as_text()
    assert compiled.as_text().count(" sort(") == 1
    tokens, whole = B * S // 8, B * S
    assert not [
        shape for shape in buffer_shapes(module) if whole in shape or whole * K in shape
    ]
    assert (
        max(np.prod(shape) for shape in buffer_shapes(module) if D in shape)
        < 2.5 * tokens * K * D
    )


def test_what_computes_is_said():
    lines = explain(64, 8)
    assert lines[0].startswith("experts: matmuls by blocks: ")
    assert "no exchange" in lines[1]
    rules, mesh = rules_and_mesh(expert=8)
    with execution.activate(mesh, rules):
        assert explain(64, 2)[1].startswith(
            "experts: exchange by rounds over expert 8: rows for 2 experts"
        )
        assert explain(64, 2, exchange="gather")[1].endswith(
            "gather over expert 8: set by hand"
        )
        assert "no exchange" in explain(60, 2)[1]
    rules, mesh = rules_and_mesh(expert=2)
    with execution.activate(mesh, rules):
        assert "exchange by gather over expert 2" in explain(64, 8)[1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"exchange": "ring"}, "exchange='ring'; choose auto, rounds or gather"),
        ({"slack": 0.5}, "slack=0.5"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        (
            {"down": np.zeros((E, D, F), np.float32)},
            r"required: \[B, S, D\], \[E, D, F\], \[E, F, D\]",
        ),
        (
            {"ids_BSk": np.zeros((B, S, 1), np.int32)},
            r"ids \(8, 48, 1\), weights \(8, 48, 4\)",
        ),
    ],
)
def test_what_does_not_fit(changes, match):
    values, x, _ = arrays()
    ids, weights = np.zeros((B, S, K), np.int32), np.ones((B, S, K), np.float32)
    arguments = {
        "x_BSD": x,
        "ids_BSk": ids,
        "weights_BSk": weights,
        "activation": jax.nn.silu,
    }
    arguments |= {name: values[name] for name in ("gate", "up", "down")} | changes
    with pytest.raises(ValueError, match=match):
        experts(**arguments)
