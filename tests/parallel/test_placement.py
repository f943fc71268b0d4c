"""Warnings of the placement: mesh axes and names of dims that split nothing."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxdist.parallel import placement, sharding
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig, MeshShape
from jaxdist.protocols.model_spec import describe


class Unnamed(nnx.Module):
    """A kernel and a vector without names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 8, rngs=rngs)


class Vectors(nnx.Module):
    """Vectors, which no axis splits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(8), logical=("d_model",))


class Named(nnx.Module):
    """A kernel whose second dim tensor splits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(jnp.zeros((4, 8)), logical=("d_model", "d_ff"))


class Annotated(nnx.Module):
    """A kernel with names of another library, given by flax's annotations."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "mlp"))
        self.up = nnx.Linear(4, 8, kernel_init=init, use_bias=False, rngs=rngs)


def warnings(
    model: type[nnx.Module],
    zero: int = 3,
    sequence_parallel: bool = False,
    **sizes: int,
) -> list[str]:
    shape = MeshShape(dict.fromkeys(AXES, 1) | sizes, dict.fromkeys(AXES, 1))
    config = MeshConfig(zero=zero, sequence_parallel=sequence_parallel, **sizes)
    rules = sharding.build_rules(config, shape)
    placements = placement.place(describe(model).all_parameters(), rules)
    return placement.warnings(placements, rules)


def test_tensor_without_names_is_told_and_what_to_name():
    (line,) = warnings(Unnamed, tensor=2)
    assert line.startswith("mesh.tensor=2 splits no parameter, so 2 devices")
    assert "named vocab, heads, kv_heads, d_ff: name them in the model" in line
    assert "sharding.rules" in line
    assert "set mesh.tensor=1, and mesh.fsdp or mesh.data to 2 times" in line


def test_fsdp_that_divides_no_matrix_only_splits_the_batch():
    (line,) = warnings(Vectors, fsdp=2)
    assert line.startswith("mesh.fsdp=2 splits no parameter, because")
    (line,) = warnings(Unnamed, fsdp=3)  # 3 divides neither 4 nor 8
    assert line.startswith("mesh.fsdp=3")


@pytest.mark.parametrize(
    ("model", "zero", "sizes"),
    [
        (Unnamed, 3, {"data": 8}),
        (Unnamed, 3, {"fsdp": 4}),
        (Unnamed, 1, {"fsdp": 4}),  # the optimizer's state alone
        (Unnamed, 0, {"fsdp": 4}),  # nothing, as the user asked
        (Vectors, 0, {"fsdp": 2}),
        (Vectors, 3, {"context": 2}),  # it splits the sequence
        (Named, 3, {"tensor": 2, "fsdp": 2}),
    ],
)
def test_axes_with_work_are_not_told(model, zero, sizes):
    assert warnings(model, zero, **sizes) == []


def test_sequence_parallel_without_tensor_is_told():
    (line,) = warnings(Named, sequence_parallel=True, fsdp=2)
    assert line.startswith(
        "mesh.sequence_parallel=true has no effect with mesh.tensor=1"
    )
    assert warnings(Named, sequence_parallel=True, tensor=2) == []


def test_names_of_another_library_are_told_once():
    lines = warnings(Annotated, fsdp=2)
    assert lines == [
        "names of dims that split nothing: embed (of up/kernel), mlp (of "
        "up/kernel). Name these dims by sharding.rules"
    ]
    assert warnings(Annotated) == []  # on one device nothing is split
