"""Stacks of matrices that are divided among devices, and Muon on them."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.optimizers import build_optimizer
from jaxdist.parallel import execution
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.execution import map_parts
from jaxdist.parallel.mesh import MeshConfig, MeshShape, build_mesh, resolve_mesh
from jaxdist.parallel.sharding import Rules
from jaxdist.step.update import _map_matrices

KERNEL = ("d_model", "d_ff")


def rules(dcn: str = "", **sizes: int) -> Rules:
    ones = dict.fromkeys(AXES, 1)
    across = {dcn: sizes[dcn]} if dcn else {}
    return Rules(MeshShape(ones | sizes, ones | across))


@pytest.mark.parametrize(
    ("sizes", "names", "dims", "expected"),
    [
        pytest.param({}, KERNEL, (6, 4, 4), P(None, None, None), id="one device"),
        pytest.param(
            {"fsdp": 4}, KERNEL, (6, 4, 4), P("fsdp", None, None), id="uneven layers"
        ),
        pytest.param(
            {"fsdp": 4}, KERNEL, (1, 4, 4), P(None, "fsdp", None), id="one matrix"
        ),
        pytest.param(
            {"fsdp": 8},
            ("experts", *KERNEL),
            (26, 16, 4, 4),
            P(None, "fsdp", None, None),
            id="experts divide, layers do not",
        ),
        pytest.param(
            {"data": 2, "fsdp": 4, "expert": 2},
            ("experts", *KERNEL),
            (3, 16, 4, 4),
            P(None, ("expert", "fsdp", "data"), None, None),
            id="experts stay on their devices",
        ),
        pytest.param(
            {"pipeline": 2, "fsdp": 2, "tensor": 2},
            ("chunks", "stages", "layers", *KERNEL),
            (1, 2, 4, 4, 4),
            P(None, "pipeline", ("fsdp", "tensor"), None, None),
            id="layers stay in their stage",
        ),
        pytest.param(
            {"data": 8},
            KERNEL,
            (3, 4, 4),
            P(None, None, None),
            id="devices that replicate do not pad most of a stack",
        ),
        pytest.param(
            {"data": 4}, KERNEL, (6, 4, 4), P("data", None, None), id="but a part of it"
        ),
        pytest.param(
            {"dcn": "data", "data": 2, "fsdp": 2},
            KERNEL,
            (4, 4, 4),
            P("fsdp", None, None),
            id="slices compute the same",
        ),
    ],
)
def test_axes_that_divide_a_stack(sizes, names, dims, expected):
    layout = rules(**sizes)
    first, *_, last = layout.way_to_whole_matrices(names, dims, 2)
    assert first == layout.state(names, dims)
    assert last == expected


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_a_function_gets_each_matrix_once_wherever_parts_lie(parts):
    stack = jnp.arange(4 * 6 * 2 * 3, dtype=jnp.float32).reshape(4, 6, 2, 3)
    expected = jax.vmap(jax.vmap(jnp.cumsum))(stack.reshape(4, 6, -1))
    ours = map_parts(
        lambda matrix: jnp.cumsum(matrix.reshape(-1)).reshape(matrix.shape),
        stack,
        parts,
    )
    np.testing.assert_array_equal(ours, expected.reshape(stack.shape))


def test_a_loop_goes_over_large_matrices(monkeypatch):
    monkeypatch.setattr(execution, "_NUMBERS_AT_ONCE", 2 * 3)
    stack = jax.ShapeDtypeStruct((5, 4, 2, 3), jnp.float32)
    text = str(jax.make_jaxpr(lambda x: map_parts(jnp.sin, x, (1, 2)))(stack))
    # 10 turns, each with one matrix of each of two parts
    assert "length=10" in text
    assert "f32[1,1,2,2,3] = sin" in text


# --- Muon -----------------------------------------------------------------------------

SHAPES = {"dense": (6, 16, 24), "experts": (6, 8, 16, 24), "heads": (6, 16, 4, 8)}
NAMES = {
    "dense": KERNEL,
    "experts": ("experts", *KERNEL),
    "heads": ("d_model", "heads", "head_dim"),
}
MESHES = {
    "fsdp": MeshConfig(data=1, fsdp=8),
    "data": MeshConfig(data=4, fsdp=2, zero=1),
    "all": MeshConfig(data=1, fsdp=2, expert=2, tensor=2),
    "context": MeshConfig(data=2, fsdp=1, context=4),
}


@pytest.fixture(scope="module")
def gradients() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def muon() -> optax.GradientTransformation:
    abstract = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()
    }
    config = OptimizerConfig(name="muon", weight_decay=0.0, muon_update_rms=0.2)
    return build_optimizer(
        config, lambda _: 1.0, abstract, NAMES, map_matrices=_map_matrices
    )


@pytest.mark.parametrize("layout", MESHES)
def test_muon_moves_matrices_and_sums_nothing(layout, gradients):
    config = MESHES[layout]
    shape = resolve_mesh(config, 8)
    mesh, layout_rules = build_mesh(config), replace(Rules(shape), zero=config.zero)
    where = {
        name: NamedSharding(mesh, layout_rules.state(NAMES[name], dims))
        for name, dims in SHAPES.items()
    }
    transform = muon()

    def update(gradients):
        # the second update, so that there is a momentum
        _, state = transform.update(gradients, transform.init(gradients), gradients)
        half = jax.tree.map(lambda g: g / 2 + jnp.flip(g, -1), gradients)
        return transform.update(half, state, gradients)[0]

    expected = jax.jit(update)(gradients)

    def sharded(gradients):
        with execution.activate(mesh, layout_rules):
            return update(gradients)

    compiled = (
        jax.jit(sharded, in_shardings=(where,), out_shardings=where)
        .lower(gradients)
        .compile()
    )
    found = compiled(jax.device_put(gradients, where))
    for name in SHAPES:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
        )
    assert not re.search(r" (all-reduce|reduce-scatter)\(", compiled.as_text())


def test_a_device_computes_its_share_of_the_products(gradients):
    config = MESHES["fsdp"]
    mesh, layout_rules = build_mesh(config), Rules(resolve_mesh(config, 8))
    abstract = {"experts": gradients["experts"]}
    names = {"experts": NAMES["experts"]}
    transform = build_optimizer(
        OptimizerConfig(name="muon", weight_decay=0.0),
        lambda _: 1.0,
        abstract,
        names,
        map_matrices=_map_matrices,
    )

    def update(gradients):
        return transform.update(gradients, transform.init(gradients), gradients)[0]

    def sharded(gradients):
        with execution.activate(mesh, layout_rules):
            return update(gradients)

    spec = layout_rules.state(names["experts"], SHAPES["experts"])
    where = {"experts": NamedSharding(mesh, spec)}
    lowered = jax.jit(sharded, in_shardings=(where,), out_shardings=where).lower(
        abstract
    )
    text = lowered.compile().as_text()
    # of 6 layers and 8 experts, a device has 6 layers and 1 expert
    assert "all-to-all" in text
    assert "f32[6,8,16,24]" not in text
    assert "all-gather" not in text
