"""`init.from_run`: a run that begins with another run's weights, on any mesh, and no
code of that run.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import train as train_command
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError, list_steps
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.checkpoint.state_dict import to_canonical
from jaxdist.config import ConfigError, trees
from jaxdist.trainer import (
    cli,
    initial_weights,
    source_run,
    step_work,
    validation,
)
from jaxdist.trainer.run_config import RunConfig
from jaxdist.trainer.workdir import _branch_command, workdir_lock
from support import weight_sources
from support.checkpoints import flip, save_and_wait
from support.runs import TINY, final_arrays, refused, run_of, start_group

pytestmark = pytest.mark.usefixtures("shared_steps")

STEPS = 4  # of the source; with checkpoints after 2 and 4
OWN = """
from pathlib import Path
from flax import nnx
import jax, jax.numpy as jnp
Path(__file__).with_name("imported").touch()

class Bigrams(nnx.Module):
    def __init__(self, vocab_size: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, vocab_size)))

    def loss(self, batch, key):
        scores = jax.nn.log_softmax(self.table[...][batch["tokens"]])
        picked = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
        return -(picked * batch["weights"]).sum(), batch["weights"].sum()
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat in thin hats then thinks of the inn " * 60)
    return file


def words(text: Path, **changes) -> list[str]:
    settings = TINY | {
        "data.source": "text",
        "data.path": text,
        "data.cache_dir": text.parent / "cache",
        "optimizer.name": "adamw",
        "optimizer.warmup_steps": 1,
        "train.steps": STEPS,
        "train.sample_tokens": 0,
        "batch.sequence_length": 16,
        "checkpoint.every_steps": 2,
        # of a pipeline it more than doubles the program, and nothing here is about it
        "model.dropout": 0.0,
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    flags = [
        f"--config.{key}={value}"
        for key, value in settings.items()
        if value is not None
    ]
    return ["--config", "quickstart", *flags]


# left out
SHAPE = dict.fromkeys(
    key.replace(".", "__") for key in TINY if key.startswith("model.")
)


def train(text: Path, workdir: Path, **changes) -> None:
    assert train_command.main([*words(text, **changes), "--workdir", str(workdir)]) == 0


def parsed(text: Path, workdir: Path, **changes) -> RunConfig:
    parser = cli.ConfigParser("train", None)
    parser.add_argument("--workdir")
    return cli.parse(parser, [*words(text, **changes), "--workdir", str(workdir)])[1]


def first_state(config: RunConfig, folder: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a run's first state, by the names of a checkpoint, layers
    flat.
    """
    devices = jax.devices()
    composition = validation.validate(config, devices)
    built = composition.build_step(devices)
    sources = initial_weights.chosen_sources(config)
    first = initial_weights.init_from_sources(config, built, folder, sources).state
    state = built.views.flat(first)
    for array, where in zip(
        jax.tree.leaves(state), jax.tree.leaves(built.views.abstract), strict=True
    ):
        assert (array.shape, array.dtype, array.sharding) == (
            where.shape,
            where.dtype,
            where.sharding,
        )
    return jax.device_get(to_canonical(state))


def assert_taken(
    found: dict, source: dict, kind: str = "trainable", as_: str = "trainable"
) -> None:
    names = [name for name in source if name.startswith(f"{kind}/")]
    assert len(names) > 10
    for name in names:
        ours = found[as_ + name.removeprefix(kind)]
        assert ours.tobytes() == source[name].astype(ours.dtype).tobytes(), name


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.fixture(scope="module")
def old(text, tmp_path_factory) -> Path:
    """Returns the workdir of a run with a moving average, in layers cut up by a
    pipeline.
    """
    workdir = tmp_path_factory.mktemp("runs") / "old"
    train(
        text,
        workdir,
        train__ema_decay=0.5,
        mesh__fsdp=2,
        mesh__pipeline=2,
        pipeline__microbatches=2,
    )
    # 1: the beginning of its decay
    assert list_steps(workdir / "checkpoints") == [1, 2, 4]
    return workdir


@pytest.mark.slow
def test_a_branch_keeps_the_data_and_the_rate_that_the_run_was_trained_with(old, text):
    """The config's learning rate, 0.01, is high for trained weights of another kind."""
    trained_with = source_run.locate(f"{old}@2").trained_with
    assert trained_with["data.path"] == str(text)
    assert trained_with["optimizer.learning_rate"] == 0.01
    branch = [*words(text, **SHAPE), f"--config.init.from_run={old}"]
    assert weight_sources.parsed(branch).optimizer.learning_rate == 0.01
    with pytest.raises(ConfigError, match="optimizer.name=muon is for random weights"):
        weight_sources.parsed([word for word in branch if "optimizer.name" not in word])


def test_the_weights_are_those_of_the_step_on_another_mesh(old, text, tmp_path):
    before = files_of(old)
    source, earlier = final_arrays(old, 4), final_arrays(old, 2)
    assert any(
        not np.array_equal(source[n], earlier[n])
        for n in source
        if n.startswith("ema/")
    )
    here = {"init__from_run": old, "mesh__tensor": 2, "mesh__data": 4, **SHAPE}
    config = parsed(text, tmp_path / "new", **here)
    assert config.model["d_model"] == TINY["model.d_model"]
    assert config.model["num_layers"] == 2
    found = first_state(config, tmp_path)
    assert_taken(found, source, "ema")  # the moving average, where there is one
    assert found["step"] == 0
    assert not any(name.startswith("ema/") for name in found)
    assert (
        found["opt_state/optimizer/count"]
        == 0
        == found["opt_state/optimizer/mu/embedding"].max()
    )
    at = parsed(
        text, tmp_path / "new", **here | {"init__from_run": f"{old}/checkpoints@2"}
    )
    assert_taken(first_state(at, tmp_path), earlier, "ema")
    bf16 = parsed(text, tmp_path / "new", **here, precision__params="bfloat16")
    assert_taken(first_state(bf16, tmp_path), source, "ema")
    assert files_of(old) == before


def test_with_the_optimizer_its_state_the_raw_weights_and_the_average_go_on(
    old, text, tmp_path
):
    source = final_arrays(old, 4)
    config = parsed(
        text,
        tmp_path / "new",
        init__from_run=old,
        init__optimizer=True,
        train__ema_decay=0.9,
    )
    found = first_state(config, tmp_path)
    assert_taken(found, source)
    assert_taken(found, source, "ema", "ema")
    assert_taken(found, source, "opt_state", "opt_state")
    assert found["step"] == 0
    muon = parsed(
        text,
        tmp_path / "new",
        init__from_run=old,
        init__optimizer=True,
        optimizer__name="muon",
    )
    with pytest.raises(ConfigError, match="leave out init.optimizer"):
        first_state(muon, tmp_path)


def test_a_new_run_needs_the_source_once(old, text, tmp_path):
    source, new = tmp_path / "source", tmp_path / "new"
    shutil.copytree(old, source)
    on = {"init__from_run": source, **SHAPE}
    train(text, new, **on, train__steps=2, optimizer__schedule="constant")
    assert json.loads((new / "config.json").read_text())["model"]["d_model"] == 32
    # exports would look for a config.json in it
    assert not (new / "huggingface").exists()
    shutil.rmtree(source)
    train(text, new, **on, train__steps=4, optimizer__schedule="constant")
    assert list_steps(new / "checkpoints") == [2, 4]


@pytest.mark.slow
def test_a_trained_tokenizer_comes_along(text, tmp_path):
    pytest.importorskip("tokenizers", reason="extra text")
    old, new = tmp_path / "old", tmp_path / "new"
    train(text, old, data__tokenizer="bpe:270", model__vocab_size=270, train__steps=2)
    train(text, new, **SHAPE, init__from_run=old, train__steps=2)
    assert (new / "tokenizer.json").read_bytes() == (
        old / "tokenizer.json"
    ).read_bytes()
    (old / "tokenizer.json").unlink()
    lost = refused_lines(words(text, **SHAPE, init__from_run=old), tmp_path / "lost")
    assert "bpe:270" in lost
    assert "set data.tokenizer" in lost


def refused_lines(arguments: list[str], workdir: Path) -> str:
    with pytest.raises(ConfigError) as error:
        train_command.main([*arguments, "--workdir", str(workdir)])
    assert not (workdir / "checkpoints").exists() or not list_steps(
        workdir / "checkpoints"
    )
    return "\n".join(error.value.faults)


def test_what_cannot_be_is_refused_with_the_cure(old, text, tmp_path, capsys):
    new = tmp_path / "new"

    def fault(**changes) -> str:
        return refused_lines(words(text, **{"init__from_run": old} | changes), new)

    assert f"model.d_model=64, there 32 (init.from_run={old})" in fault(
        model__d_model=64
    )
    assert "leave one of them out" in fault(init__from_huggingface="there")
    assert "set init.from_run" in fault(init__from_run="", init__optimizer=True)
    assert "no such folder" in fault(init__from_run=tmp_path / "nowhere")
    assert "there is no checkpoint of step 3" in fault(init__from_run=f"{old}@3")
    assert "2, 4" in fault(init__from_run=f"{old}@3")
    assert "no checkpoint" in fault(init__from_run=text.parent)
    for own in (old, f"{old}/checkpoints", f"{old}@2"):
        (line,) = refused(
            capsys, *words(text, init__from_run=own), "--workdir", str(old)
        )
        assert "the run's own folder" in line
        assert "another --workdir" in line
    assert "the run's own folder" in fault(checkpoint__folder=old / "checkpoints")


@pytest.mark.parametrize(
    "name", ["~nobody-here/run", "x" * 5000, "run@" + "9" * 5000, "a\0b", "@3", "run@³"]
)
def test_a_name_that_no_folder_has_is_one_line(text, tmp_path, name):
    (line,) = refused_lines(
        words(text, **SHAPE, init__from_run=name), tmp_path
    ).splitlines()
    assert line.startswith("init.from_run=")


@pytest.mark.slow
def test_two_processes_begin_with_a_run_that_is_training_still(old, text, tmp_path):
    new = [
        sys.executable,
        "-m",
        "jaxdist.train",
        *words(text, **SHAPE, init__from_run=old, mesh__fsdp=2),
    ]
    with workdir_lock(old):
        before = files_of(old)
        started = start_group(
            [*new, "--workdir", str(tmp_path / "new")], 2, 1, stderr=subprocess.STDOUT
        )
        said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert said[0].count("the moving average of the weights of step 4") == 1
    assert list_steps(tmp_path / "new/checkpoints") == [1, 2, 4]
    assert files_of(old) == before


def test_arrays_that_differ_are_named_at_once(old, text, tmp_path):
    """A config made in Python: nothing has taken over the model's values."""
    config = parsed(text, tmp_path / "new", model__d_ff=96, model__num_layers=4)
    config = RunConfig(**vars(config) | {"init": type(config.init)(from_run=str(old))})
    with pytest.raises(ConfigError) as error:
        first_state(config, tmp_path)
    told = "\n".join(error.value.faults)
    assert "model.d_ff=96, there 64" in told
    assert "model.num_layers=4, there 2" in told
    assert "blocks/mlp/up: float32[2,32,64] there, float32[4,32,96] here" in told


def test_positions_may_be_stretched_for_longer_sequences(old, text, tmp_path, capsys):
    kinds = {
        "model__rope_scaling": "yarn",
        "model__rope_factor": 4,
        "model__rope_original_positions": 16,
    }
    config = parsed(
        text, tmp_path / "new", init__from_run=old, **kinds, batch__sequence_length=64
    )
    assert config.model["rope_scaling"] == "yarn"
    assert config.model["d_model"] == 32
    assert_taken(first_state(config, tmp_path), final_arrays(old, 4), "ema")
    assert (
        "step 4, with other positions: model.rope_factor=4.0, there 1.0, "
        in capsys.readouterr().out
    )


def test_a_damaged_step_is_passed_over_and_stays(old, text, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(old, source)
    largest = max(
        (source / "checkpoints/4/state").rglob("*"),
        key=lambda path: path.stat().st_size,
    )
    flip(largest, 99)
    # says the model, too, before the arrays are read
    file = source / "checkpoints/4/metadata/metadata"
    file.write_text(re.sub(r'("rope_theta": ?)1', r"\g<1>2", file.read_text()))
    assert file.read_text() != (old / "checkpoints/4/metadata/metadata").read_text()
    before = files_of(source)
    config = parsed(text, tmp_path / "new", init__from_run=source)
    assert config.model["rope_theta"] == 10000
    assert_taken(first_state(config, tmp_path), final_arrays(old, 2), "ema")
    with pytest.raises(
        CheckpointError, match="(?s)init.from_run=.*has changed since it was sealed"
    ):
        parsed(text, tmp_path / "new", init__from_run=f"{source}@4")
    assert files_of(source) == before


@pytest.fixture(scope="module")
def base(text, tmp_path_factory) -> Path:
    """Returns the workdir of a run of two steps on all devices."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    train(text, workdir, train__steps=2)
    return workdir


@pytest.mark.slow
def test_adapters_on_a_base_run_and_on_adapters(base, text, tmp_path):
    tuned = tmp_path / "tuned"
    source = final_arrays(base, 2)
    lora = {
        "lora__rank": 4,
        "lora__alpha": 8.0,
        "optimizer__learning_rate": 0.1,
        **SHAPE,
    }
    on = parsed(text, tuned, init__from_run=base, **lora)
    found = first_state(on, tmp_path)
    assert (
        found["frozen/blocks/mlp/up/base"].tobytes()
        == source["trainable/blocks/mlp/up"].tobytes()
    )
    assert (
        found["frozen/embedding"].tobytes() == source["trainable/embedding"].tobytes()
    )
    assert not found["trainable/blocks/mlp/up/lora_b"].any()
    train(text, tuned, init__from_run=base, **lora, train__steps=2)
    adapters = final_arrays(tuned, 2)
    again = first_state(
        parsed(text, tmp_path / "more", init__from_run=tuned, **lora), tmp_path
    )
    assert adapters["trainable/blocks/mlp/up/lora_b"].any()
    assert_taken(again, adapters)
    assert_taken(again, adapters, "frozen", "frozen")
    other = parsed(
        text, tmp_path / "more", init__from_run=tuned, **lora | {"lora__alpha": 4.0}
    )
    with pytest.raises(ConfigError, match=r"lora.alpha=4.0, there 8.0"):
        first_state(other, tmp_path)
    merged = parsed(text, tmp_path / "more", init__from_run=tuned, **SHAPE)
    with pytest.raises(ConfigError, match="jaxdist convert") as error:
        first_state(merged, tmp_path)
    assert "lora.rank=4" in str(error.value)


@pytest.mark.slow
def test_a_quantised_base_is_made_of_a_base_run(base, text, tmp_path):
    pytest.importorskip("qwix", reason="extra lora")
    on = parsed(
        text,
        tmp_path / "new",
        init__from_run=base,
        **SHAPE,
        lora__rank=4,
        lora__base="int8",
    )
    found = first_state(on, tmp_path)
    restored = (
        found["frozen/blocks/mlp/up/codes"]
        * found["frozen/blocks/mlp/up/scales"][:, None]
    )
    kernel = final_arrays(base, 2)["trainable/blocks/mlp/up"]
    np.testing.assert_allclose(restored, kernel, atol=np.abs(kernel).max() / 100)


def test_code_of_another_run_is_not_imported(text, tmp_path):
    """Its `model.target` counts where it is the installed package's, or this
    run's own.
    """
    code, old = tmp_path / "own.py", tmp_path / "old"
    code.write_text(OWN)
    own = {
        "model__target": f"{code}:Bigrams",
        "model__vocab_size": 256,
        **SHAPE,
        "train__steps": 2,
    }
    train(text, old, **own)
    source, mark = final_arrays(old, 2), tmp_path / "imported"
    mark.unlink()
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
    lines = refused_lines(words(text, **SHAPE, init__from_run=old), tmp_path / "new")
    assert f"--config.model.target={code}:Bigrams" in lines
    assert not mark.exists()
    same = parsed(
        text, tmp_path / "new", **own | {"model__vocab_size": None}, init__from_run=old
    )
    assert same.model["vocab_size"] == 256
    moved = code.rename(tmp_path / "elsewhere.py")
    there = own | {"model__target": f"{moved}:Bigrams"}
    found = first_state(
        parsed(text, tmp_path / "new", **there, init__from_run=old), tmp_path
    )
    assert found["trainable/table"].tobytes() == source["trainable/table"].tobytes()
    larger = parsed(
        text, tmp_path / "new", **there | {"model__vocab_size": 300}, init__from_run=old
    )
    with pytest.raises(
        ConfigError, match=r"table: float32\[256,256\] there, float32\[300,300\] here"
    ):
        first_state(larger, tmp_path)


def test_a_branch_of_a_branch_with_another_optimizer_takes_no_state(tmp_path):
    run = run_of("quickstart", **{"init.from_run": "runs/a", "init.optimizer": True})
    for changed, flag in (
        ({"optimizer.name": "lion"}, "--config.init.optimizer=false"),
        ({"optimizer.b1": 0.8}, "--config.init.optimizer=true"),
    ):
        command = _branch_command(tmp_path, "runs/b@2", changed, run)
        assert flag in shlex.split(command)


# --- jaxdist.fit ----------------------------------------------------------------------


class Net(nnx.Module):
    """A list of layers, and running statistics."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        layers = [
            nnx.Linear(4, width, use_bias=False, rngs=rngs),
            nnx.Linear(width, 2, rngs=rngs),
        ]
        self.layers = nnx.List(layers)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def loss(self, batch, key):
        scores = self.layers[1](nnx.relu(self.norm(self.layers[0](batch["x"]))))
        return optax.softmax_cross_entropy_with_integer_labels(
            scores, batch["y"]
        ).mean()


def batches(step: int) -> dict:
    x = np.random.default_rng(step).normal(size=(16, 4)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) > 0).astype(np.int32)}


def fit(
    folder: Path,
    data=batches,
    steps=8,
    *,
    model=Net,
    mesh=None,
    optimizer=None,
    batch_size=None,
    **settings,
):
    settings = {"train.log_every": 1, "checkpoint.every_steps": 4} | {
        key.replace("__", "."): value for key, value in settings.items()
    }
    mesh, optimizer = mesh or {"fsdp": 2, "tensor": 2}, optimizer or optax.adamw(1e-2)
    return jaxdist.fit(
        model,
        optimizer,
        data,
        steps=steps,
        mesh=mesh,
        folder=folder,
        batch_size=batch_size,
        settings=settings,
    )


def values(run) -> dict[str, np.ndarray]:
    return jax.device_get(trees.flatten_names(nnx.to_pure_dict(nnx.state(run.model))))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("fit") / "whole")


def test_a_branch_with_the_optimizer_is_the_source_going_on(whole, tmp_path):
    def later(step: int) -> dict:
        return batches(step + 4)

    source = f"{whole.folder}@4"
    branch = fit(
        tmp_path / "branch", later, 4, init__from_run=source, init__optimizer=True
    )
    expected = values(whole)
    assert len(expected) == 7
    for name, value in values(branch).items():
        np.testing.assert_array_equal(value, expected[name], name)
    other = fit(
        tmp_path / "other",
        later,
        4,
        mesh={},
        init__from_run=source,
        init__optimizer=True,
    )
    alone = fit(tmp_path / "alone", later, 4, init__from_run=source)
    for name, value in values(other).items():
        np.testing.assert_allclose(
            value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert any(
        not np.allclose(value, expected[name], rtol=1e-4)
        for name, value in values(alone).items()
    )


@pytest.mark.parametrize(
    "kind",
    [
        # a function of the step: by the tests around this one
        pytest.param("function", marks=pytest.mark.slow),
        # places in arrays are functions of the step, too
        pytest.param("arrays", marks=pytest.mark.slow),
        "iterator",
    ],
)
def test_a_branch_at_the_source_s_data_is_the_source_going_on(kind, tmp_path):
    def data():
        if kind == "function":
            return batches
        if kind == "arrays":
            return {
                name: np.concatenate([batches(step)[name] for step in range(10)])
                for name in ("x", "y")
            }
        return map(batches, range(100))

    options = {"batch_size": 16} if kind == "arrays" else {}
    whole = fit(tmp_path / "whole", data(), **options)
    branching = options | {
        "init__from_run": f"{whole.folder}@4",
        "init__optimizer": True,
        "init__data_position": True,
    }
    fit(tmp_path / "branch", data(), 2, **branching)
    branch = fit(tmp_path / "branch", data(), 4, **branching)
    expected = values(whole)
    for name, value in values(branch).items():
        np.testing.assert_array_equal(value, expected[name], name)
    again = fit(
        tmp_path / "again",
        data(),
        2,
        **options,
        init__from_run=f"{branch.folder}@2",
        init__optimizer=True,
        init__data_position=True,
    )
    for name, value in values(again).items():
        np.testing.assert_array_equal(value, expected[name], name)


def test_the_source_s_batches_are_no_rollback_of_the_branch(whole, tmp_path):
    def broken(step: int) -> dict:
        batch = batches(step)
        if step == 5:
            batch["x"][:] = np.nan
        return batch

    branch = fit(
        tmp_path / "branch",
        broken,
        4,
        init__from_run=f"{whole.folder}@4",
        init__data_position=True,
        checkpoint__every_steps=1,
        optimizer__nonfinite_limit=0,
        health__nonfinite="rollback",
        health__max_rollbacks=1,
    )
    skipped = json.loads((branch.folder / "skipped.json").read_text())
    assert skipped["windows"] == [[0, 4], [5, 6]]


def test_a_branch_leaves_out_what_its_source_threw_out_since_its_checkpoint(tmp_path):
    def broken(step: int) -> dict:
        read.append(step)
        batch = batches(step)
        if step == 5:
            batch["x"][:] = np.nan
        return batch

    read: list[int] = []
    source = fit(
        tmp_path / "source",
        broken,
        6,
        checkpoint__every_steps=4,
        checkpoint__save_at_end=False,
        optimizer__nonfinite_limit=0,
        health__nonfinite="rollback",
    )
    skipped = source.folder / "skipped.json"
    assert json.loads(skipped.read_text())["windows"] == [[4, 6]]
    branching = {"init__from_run": str(source.folder), "init__data_position": True}
    read.clear()
    fit(tmp_path / "branch", broken, 2, **branching)
    assert not {1, 2, 3, 4, 5}.intersection(read)
    assert {6, 7}.issubset(read)
    skipped.write_text("[]")
    with pytest.raises(ConfigError, match=r"skipped\.json is damaged"):
        fit(tmp_path / "other", broken, 2, **branching)
    # Without the file, the checkpoint alone says what was thrown out.
    skipped.unlink()
    read.clear()
    fit(tmp_path / "third", broken, 1, **branching)
    assert 4 in read


def test_a_position_in_other_data_is_refused_before_anything_compiles(
    old, text, tmp_path, capsys, monkeypatch
):
    compiled = []
    monkeypatch.setattr(step_work, "compile_step", compiled.append)
    others = {"seed": 1, "batch__global_size": 16, "data__packing": "documents"}
    branch = words(text, init__from_run=old, init__data_position=True, **others)
    lines = refused(capsys, *branch, "--workdir", str(tmp_path / "new"))
    seed, size, data = (line.removeprefix("error: ") for line in lines)
    assert seed.startswith(f"init.data_position: seed=1, in {old} 0; set seed=0")
    assert size.startswith("init.data_position: batch.global_size=16, in ")
    assert "(data.packing='documents' and 'window'); give the same" in data
    (line,) = refused(
        capsys, *words(text, init__data_position=True), "--workdir", str(tmp_path / "a")
    )
    assert "set init.from_run" in line
    assert not compiled


def test_a_made_module_takes_the_values_of_the_run(whole, tmp_path):
    still = optax.sgd(0.0)
    made, source = Net(rngs=nnx.Rngs(9)), str(whole.folder)
    run = fit(
        tmp_path / "made", steps=1, model=made, optimizer=still, init__from_run=source
    )
    for name, value in values(run).items():
        if "mean" not in name and "var" not in name:
            np.testing.assert_array_equal(value, values(whole)[name], name)
    with pytest.raises(
        ConfigError,
        match=r"layers/0/kernel: float32\[4,16\] there, float32\[4,8\] here",
    ):
        wider = lambda rngs: Net(8, rngs=rngs)  # noqa: E731
        fit(tmp_path / "wider", steps=1, model=wider, init__from_run=source)
    with pytest.raises(ConfigError, match="the run's own folder"):
        fit(whole.folder, steps=9, init__from_run=source)
    assert jnp.isfinite(run.metrics.train[0]["loss"])


def test_weights_that_are_not_finite_are_refused(whole, tmp_path):
    arrays = final_arrays(whole.folder, 8)
    arrays["trainable/layers/0/kernel"] = arrays[
        "trainable/layers/0/kernel"
    ] * np.float32(np.nan)
    bare = tmp_path / "bare"  # checkpoints alone, without a config
    with CheckpointManager(bare, CheckpointConfig()) as store:
        assert save_and_wait(
            store, 8, trees.unflatten_names(jax.tree.map(jnp.asarray, arrays))
        ).ok
    with pytest.raises(
        ConfigError,
        match="NaN or infinite values in trainable/layers/0/kernel; name an",
    ):
        fit(tmp_path / "new", init__from_run=str(bare))
