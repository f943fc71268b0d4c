"""Pipelined runs from outside: checkpoints that know no pipeline, and refusals with a
cure.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import pytest

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import read_step
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.optim.config import OptimizerConfig
from jaxdist.parallel.pipeline.schedules import table as schedules
from support.models import FAST_COMPILE, bitwise_equal, fresh
from support.pipelines import MODEL, SEVEN, Case, batch_for, build
from support.runs import overrides, refused

ADAMW = OptimizerConfig(learning_rate=0.01, warmup_steps=1)

# --- checkpoints ----------------------------------------------------------------------

WAYS = {
    "one": Case(stages=1, fsdp=2),
    "two": Case(2, 4),
    "four": Case(4, 4),
    "chunks": Case(4, 4, 2, "interleaved"),
}


@lru_cache
def built_and_compiled(way: str, model=MODEL):
    """Returns the built step of a layout, its batch on its devices, and the compiled
    step.
    """
    case = WAYS[way]._replace(model=model)
    built = build(case, optimizer=ADAMW)
    batch = jax.device_put(batch_for(case), built.batch_shardings(batch_for(case)))
    return (
        built,
        batch,
        built.step.lower(built.abstract_state, batch).compile(FAST_COMPILE),
    )


def steps(way: str, state, count: int, model=MODEL):
    """Returns the state after so many steps, and their losses."""
    _, batch, step = built_and_compiled(way, model)
    losses = []
    for _ in range(count):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def saved(folder, way: str, model=MODEL):
    """Returns the losses of two steps, after which the run is saved as the loop does
    it.
    """
    built = built_and_compiled(way, model)[0]
    state, losses = steps(way, fresh(built), 2, model)
    with CheckpointManager(folder, CheckpointConfig(asynchronous=False)) as store:
        store.save(2, built.views.flat(state), {})
        store.wait()
        assert all(result.error is None for result in store.poll())
    return losses


def resumed(folder, way: str, model=MODEL):
    """Returns the restored flat state as numpy arrays, and the losses of two more
    steps.
    """
    built = built_and_compiled(way, model)[0]
    with CheckpointManager(folder, CheckpointConfig(), mode="read") as store:
        restored = store.restore(built.views.abstract).state
    host = jax.device_get(restored)
    return host, steps(way, built.views.by_stage(restored), 2, model)[1]


def check_resume(tmp_path, writers, readers, model):
    """Asserts that any layout goes on from any layout's checkpoint as if nothing had
    happened.
    """
    state = built_and_compiled("one", model)[0].init()
    wanted = steps("one", state, 4, model)[1]
    assert abs(wanted[3] / wanted[0] - 1) > 1e-2  # the steps do something
    stored = {}
    for writer in writers:
        folder = tmp_path / writer
        assert saved(folder, writer, model) == pytest.approx(wanted[:2], rel=1e-5)
        stored[writer] = read_step(folder, 2).arrays
        found = {reader: resumed(folder, reader, model) for reader in readers}
        first, *others = [host for host, _ in found.values()]
        assert all(bitwise_equal(first, host) for host in others)
        for reader, (_, losses) in found.items():
            assert losses == pytest.approx(wanted[2:], rel=1e-5), (writer, reader)
    plain = stored["one"]
    assert any(
        np.prod(info.shape) > 1 and info.shape[0] == model.num_layers
        for info in plain.values()
    )
    # names, shapes and dtypes
    assert all(arrays == plain for arrays in stored.values())


def test_a_checkpoint_knows_no_pipeline(tmp_path):
    check_resume(tmp_path, ("one", "chunks"), ("one", "chunks"), MODEL)


@pytest.mark.slow
def test_a_checkpoint_of_eight_layers_knows_no_pipeline(tmp_path):
    check_resume(tmp_path, ("one", "chunks"), ("one", "two", "chunks"), MODEL)


@pytest.mark.slow
def test_a_checkpoint_of_seven_layers_knows_no_pipeline(tmp_path):
    check_resume(
        tmp_path,
        ("one", "four"),
        ("one", "two", "four"),
        replace(SEVEN, tie_embeddings=True),
    )


# --- bad input ------------------------------------------------------------------------

FOUR = ("mesh.pipeline=4", "model.num_layers=8", "batch.global_size=32")
CASES = {
    "batch": (
        ["pipeline.microbatches=3"],
        ["batch.global_size=32 is not divisible", "microbatches 3"],
    ),
    "groups": (
        [
            "pipeline.schedule=interleaved",
            "pipeline.chunks=2",
            "pipeline.microbatches=2",
        ],
        ["pipeline.microbatches is 2", "groups of 4", "set it to 4"],
    ),
    "stages": (
        ["model.num_layers=3"],
        ["mesh.pipeline=4", "3 layers", "lower one of them"],
    ),
    "patterns": (
        [
            "mesh.pipeline=8",
            "model.num_layers=12",
            "model.layer_pattern=local,global",
            "model.window=8",
        ],
        [
            "= 8 places for 12 layers whose pattern repeats every 2",
            "here 2 layers",
            "lower one of them",
        ],
    ),
    "chunks": (
        ["pipeline.chunks=2"],
        ["pipeline.chunks is 2 and 1f1b has one chunk", "schedule=interleaved"],
    ),
    "no such schedule": (
        ["pipeline.schedule=zb"],
        ["pipeline.schedule is 'zb'", "interleaved"],
    ),
    "remat": (
        ["pipeline.remat=some"],
        ["pipeline.remat='some'", "none, full, layers, dots"],
    ),
    "no file": (["pipeline.schedule=absent.json"], ["absent.json"]),
}


def faults_of(capsys, tmp_path, *settings: str) -> list[str]:
    workdir = tmp_path / "run"
    arguments = [
        "--config",
        "quickstart",
        "--workdir",
        str(workdir),
        *overrides(*FOUR, *settings),
    ]
    found = refused(capsys, *arguments)
    assert not workdir.exists()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_that_cannot_be_is_refused_with_its_cure(case, capsys, tmp_path):
    settings, fragments = CASES[case]
    faults = faults_of(capsys, tmp_path, *settings)
    assert len(faults) == 1, faults
    for fragment in fragments:
        assert fragment in faults[0]


def test_an_invalid_schedule_file_is_refused_in_the_checker_s_words(capsys, tmp_path):
    table = schedules.build_schedule("1f1b", 4, 8)
    # the second stage starts before its input can be there
    table.table[0, 1] = table.table[1, 1]
    table.table[1, 1] = -1
    path = tmp_path / "early.json"
    schedules.write_schedule(table, path)
    words = schedules.check(table)
    assert words
    faults = faults_of(
        capsys, tmp_path, "pipeline.microbatches=8", f"pipeline.schedule={path}"
    )
    assert faults == [f"{path}: {line}" for line in words]


def test_a_model_without_stages_is_refused(capsys, tmp_path, monkeypatch):
    (tmp_path / "stageless.py").write_text(
        "import jax.numpy as jnp\n"
        "from flax import nnx\n"
        "class Flat(nnx.Module):\n"
        "    def __init__(self, *, vocab_size: int = 256, rngs: nnx.Rngs):\n"
        "        self.table = nnx.Param(jnp.zeros((vocab_size, 8)))\n"
        "    def loss(self, batch, key):\n"
        "        return self.table[...].sum()\n"
        "def get_config():\n"
        "    from jaxdist import default_config\n"
        "    return default_config('stageless:Flat')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    workdir = ["--workdir", str(tmp_path / "run")]
    faults = refused(
        capsys,
        "--config",
        str(tmp_path / "stageless.py"),
        *workdir,
        "--config.mesh.pipeline=4",
    )
    assert any(
        "stageless:Flat has no stages (embed, blocks, head)" in fault
        for fault in faults
    ), faults
