"""States, meshes and folders of checkpoints for tests, and every kind of damage."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from jaxdist.checkpoint import folders, integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.step.state import State
from support.runs import train


def mesh_of(rows: int, columns: int) -> Mesh:
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("fsdp", "tensor"))


def shardings_on(mesh: Mesh, state: Any) -> Any:
    """Return both axes on matrices, fsdp on one dim of 2-D leaves, the rest
    replicated.
    """
    specs = {3: P(None, "fsdp", "tensor"), 2: P("fsdp", None)}
    return jax.tree.map(lambda x: NamedSharding(mesh, specs.get(x.ndim, P())), state)


def optimizer(name: str) -> optax.GradientTransformation:
    if name == "adamw":
        return optax.adamw(optax.linear_schedule(1e-3, 0.0, 10))
    dims = {"blocks": MuonDimensionNumbers(1, 2), "embed": None, "norm": None}
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dims)


def make_state(
    mesh: Mesh, *, tx: str = "adamw", seed: int = 0, width: int = 8
) -> State:
    """Return a state of random leaves in all dtypes that checkpoints must carry."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    params = {
        "blocks": jnp.zeros((2, width, width)),
        "embed": jnp.zeros((16, width), jnp.bfloat16),
        "norm": jnp.zeros(width),
    }
    state = State(
        step=jnp.int32(0),
        trainable=params,
        frozen={"table": jnp.zeros((8, 3), jnp.uint32)},
        model_state={},
        opt_state=optimizer(tx).init(params),
        ema=None,
    )

    def filled(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(next(keys), x.shape, x.dtype)
        return jax.random.bits(next(keys), x.shape, jnp.uint32).astype(x.dtype)

    state = jax.tree.map(filled, state)._replace(step=jnp.int32(seed))
    return jax.device_put(state, shardings_on(mesh, state))


def abstract_on(mesh: Mesh, state: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        shardings_on(mesh, state),
    )


def assert_bitwise(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_and_wait(store: CheckpointManager, step: int, state: Any, **metadata: Any):
    store.save(step, state, metadata)
    store.wait()
    (result,) = store.poll()
    return result


def names(folder: Path) -> list[str]:
    """Return what is in a folder of checkpoints, but for the run's identity and the
    lock.
    """
    found = sorted(path.name for path in folder.iterdir())
    return [name for name in found if name not in (integrity.IDENTITY, folders.LOCK)]


def saved(folder: Path, steps: range | list[int], **config: Any) -> dict[int, State]:
    """Save a different state for each step and return them."""
    states = {step: make_state(mesh_of(4, 2), seed=step) for step in steps}
    with CheckpointManager(
        folder, CheckpointConfig(**{"keep_last": 9, **config})
    ) as store:
        for step, state in states.items():
            assert save_and_wait(store, step, state, data=step).ok
    return states


def flip(file: Path, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    file.write_bytes(raw)


def a_data_file(step: Path) -> Path:
    return max(
        (step / "state").rglob("*"), key=lambda p: p.is_file() * p.stat().st_size
    )


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def link(file: Path) -> None:
    shutil.move(file, file.parent.parent.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent.parent.parent / "elsewhere")


DAMAGE = {
    "a bit of data": (
        lambda step: flip(a_data_file(step), 99),
        "has changed since it was sealed",
    ),
    "a bit of metadata": (
        lambda step: flip(step / "metadata" / "metadata", 99),
        "metadata/metadata has",
    ),
    "truncated": (lambda step: truncate(a_data_file(step)), "bytes, "),
    "truncated to nothing": (
        lambda step: a_data_file(step).write_bytes(b""),
        "has 0 bytes",
    ),
    "a missing file": (lambda step: a_data_file(step).unlink(), "is missing"),
    "a missing side file": (
        lambda step: (step / "state" / "_sharding").unlink(),
        "_sharding is missing",
    ),
    "a planted file": (
        lambda step: (step / "state" / "d" / "x").write_text("?"),
        "x is not part of it",
    ),
    "a linked file": (lambda step: link(a_data_file(step)), "has -1 bytes"),
    "no manifest": (
        lambda step: (step / "manifest.json").unlink(),
        "manifest.json is missing",
    ),
    "a manifest nested deep": (
        lambda step: (step / "manifest.json").write_text("[" * 100_000),
        "nested deeper than",
    ),
    "an empty folder": (
        lambda step: (shutil.rmtree(step), step.mkdir()),
        "manifest.json is missing",
    ),
    "no state": (lambda step: shutil.rmtree(step / "state"), "is missing; "),
    "no metadata": (
        lambda step: shutil.rmtree(step / "metadata"),
        "metadata/metadata is missing",
    ),
    "an older step in its place": (
        lambda step: (shutil.rmtree(step), shutil.copytree(step.parent / "1", step)),
        "it is the checkpoint of step 1",
    ),
}


@pytest.fixture(scope="module", name="straight")
def straight_fixture(tmp_path_factory) -> Path:
    """Returns the workdir of a run of 28 steps with checkpoints 14, 21 and 28."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    train(workdir, train__steps=28, optimizer__schedule="constant")
    assert folders.list_steps(workdir / "checkpoints") == [14, 21, 28]
    return workdir
