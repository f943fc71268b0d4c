"""`jaxdist.fit`: the caller's model, optimizer and data through the loop of `train`;
notebook and docs.
"""

import functools
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.config import ConfigError
from jaxdist.data.dataset import SourceError
from jaxdist.data.user_batches import open_user_batches
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.telemetry.metrics import read_events
from jaxdist.trainer import training
from jaxdist.trainer.loop import TrainingStopped
from support.paths import ROOT

MESH = {"fsdp": 2, "tensor": 2}  # and data 2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
EVERY = {"train.log_every": 1, "checkpoint.every_steps": 4}


class Net(nnx.Module):
    """A user's model: a list of layers, and running statistics."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(4, width, use_bias=False, rngs=rngs),
                nnx.Linear(width, 2, rngs=rngs),
            ]
        )  # a bias before the norm would have no gradient but rounding, which Adam blows up
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))

    def loss(self, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(
            self(batch["x"]), batch["y"]
        ).mean()


def batches(step: int) -> dict:
    rows = np.random.default_rng(step).integers(0, len(X), 16)
    return {"x": X[rows], "y": Y[rows]}


def fit(
    data=batches,
    steps=8,
    *,
    model=None,
    mesh=MESH,
    settings=EVERY,
    optimizer=None,
    **options,
):
    model, optimizer = (
        model or (lambda rngs: Net(rngs=rngs)),
        optimizer or optax.adamw(1e-2),
    )
    return jaxdist.fit(
        model, optimizer, data, steps=steps, mesh=mesh, settings=settings, **options
    )


def values(run) -> list[np.ndarray]:
    return [
        np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(run.model)))
    ]


called = nnx.jit(lambda model, *args: model(*args))


def losses(run) -> list[float]:
    return [row["loss"] for row in run.metrics.train]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a run that nothing has stopped."""
    assert jax.device_count() == 8
    held = {"x": X[:16], "y": Y[:16]}
    return fit(folder=tmp_path_factory.mktemp("runs") / "whole", validation=held)


def test_it_is_the_loop_that_a_caller_would_write(whole):
    start = Net(rngs=nnx.Rngs(7))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(start)))
    run = fit(model=start, steps=4, settings={"train.log_every": 1})
    after = nnx.to_pure_dict(nnx.state(start))
    # the caller's own stays as it is
    jax.tree.map(np.testing.assert_array_equal, before, after)
    model, optimizer = nnx.clone(start), optax.adamw(1e-2)
    model.train()
    update = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, update, batch):
        loss, gradients = nnx.value_and_grad(lambda m: m.loss(batch, None))(model)
        update.update(model, gradients)
        return loss

    found = [float(train_step(model, update, batches(step))) for step in range(4)]
    assert losses(run) == pytest.approx(found, rel=1e-5)
    expected = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    # two kernels, a bias, and the norm's four
    assert len(expected) == len(values(run)) == 7
    for a, b in zip(values(run), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    kernel = run.model.layers[0].kernel.get_value()
    assert len(kernel.sharding.device_set) == 8
    assert not kernel.is_fully_replicated
    assert run.model.norm.use_running_average
    assert called(run.model, X).shape == (48, 2)
    # optax keeps it to itself
    assert not any("learning_rate" in row for row in run.metrics.train)
    # a temporary folder goes with what fit returned
    assert not list(run.folder.glob("checkpoints/[0-9]*"))
    folder = run.folder
    del run
    gc.collect()
    assert not folder.exists()


def test_a_workdir_is_that_of_train(whole):
    names = {path.name for path in whole.folder.iterdir()}
    assert {
        "config.json",
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints",
        "report.html",
    } <= names
    events = [event["event"] for event in read_events(whole.folder)]
    assert events[0] == "start"
    assert events[-1] == "stop"
    assert "save" in events
    assert whole.step == 8
    assert whole.stopped == "finished"
    assert [row["step"] for row in whole.metrics.train] == list(range(1, 9))
    config = json.loads((whole.folder / "config.json").read_text())
    assert config["data"]["path"] == "x=float32[4] y=int32[]"
    assert config["optimizer"]["name"] == "given"
    assert config["model"]["name"].endswith("test_fit.Net")
    (scored,) = [row for row in whole.metrics.evaluation if row["step"] == 8]
    expected = nnx.jit(lambda model, batch: model.loss(batch, None))(
        whole.model, {"x": X[:16], "y": Y[:16]}
    )
    assert scored["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert scored["eval_tokens"] == 16
    with pytest.raises(ConfigError, match="was passed to jaxdist.fit"):
        jaxdist.load_run(whole.folder)


def kept(step: int, data=batches) -> dict:
    """Signals the process once, as a notebook's stop button does, while a batch is read
    ahead.
    """
    if step == 5 and not kept.done:
        kept.done = True
        os.kill(os.getpid(), signal.SIGINT)
    return data(step)


def test_a_save_that_cannot_start_is_tried_once_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    settings = {"checkpoint.every_steps": 5, "checkpoint.patience_s": 0.0}
    with pytest.raises(TrainingStopped, match="last checkpoint could not be written"):
        fit(folder=tmp_path, steps=10, settings=settings)
    saves = [
        event["step"] for event in read_events(tmp_path) if event["event"] == "save"
    ]
    assert saves == [5, 10, 10]  # when due, and at the end once more


def test_an_optimizer_with_weakly_typed_state_trains():
    start, update = optax.sgd(1e-2).init, optax.sgd(1e-2).update

    def scaled(updates, state, parameters=None):
        updates, inner = update(updates, state[1], parameters)
        return updates, (state[0] * jnp.float32(1), inner)

    weak = optax.GradientTransformation(lambda p: (jnp.asarray(1.0), start(p)), scaled)
    assert weak.init({})[0].weak_type
    assert fit(optimizer=weak, steps=4).step == 4


def test_stop_and_go_on_from_every_form_of_data(whole, tmp_path):
    kept.done = False
    first = fit(kept, folder=tmp_path / "function")
    assert kept.done
    assert 0 < first.step < 8
    assert first.stopped.startswith(f"stopped after step {first.step}")
    # the fixture's own function: the same batches
    second = fit(folder=tmp_path / "function")
    assert second.step == 8
    assert losses(second) == losses(whole)
    for a, b in zip(values(second), values(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "preempted" in [
        event["event"] for event in read_events(tmp_path / "function")
    ]
    alone = {"devices": jax.devices()[:1], "mesh": None}
    seen, rows = [], {"x": X, "y": Y}
    straight = fit(rows, batch_size=16, **alone)
    given = [
        {name: value for name, value in read.items() if name != "sample"}
        for read in rows_of(rows, 3)
    ]
    fit(given, steps=2, folder=tmp_path / "iterable", **alone)
    again = fit(given, folder=tmp_path / "iterable", **alone)  # begun anew after three
    assert again.step == 8
    assert losses(again)[:3] == losses(straight)[:3]
    # another epoch, whose order differs
    assert losses(again)[3:] != losses(straight)[3:]
    fit(rows, batch_size=16, steps=3, folder=tmp_path / "arrays", **alone)
    look = jaxdist.every(
        2,
        lambda view: seen.append((view.step, view.metrics["loss"].item())),
        at_end=True,
    )
    # on eight devices
    onward = fit(rows, batch_size=16, folder=tmp_path / "arrays", hooks=[look])
    assert seen == [(step, losses(onward)[step - 1]) for step in (4, 6, 8)]
    assert losses(onward)[:3] == losses(straight)[:3]
    assert losses(onward) == pytest.approx(losses(straight), rel=1e-5)
    # finished: at once
    assert fit(rows, batch_size=16, folder=tmp_path / "arrays", **alone).step == 8


def test_a_finished_fit_compiles_no_step_and_names_the_arguments_of_fit(
    tmp_path, capsys
):
    options = {
        "steps": 4,
        "mesh": None,
        "devices": jax.devices()[:1],
        "settings": {"checkpoint.every_steps": 2},
        "folder": tmp_path / "run",
    }
    first = fit(**options)
    assert "compiled the step" in capsys.readouterr().out
    again = fit(**options)
    said = capsys.readouterr().out
    for a, b in zip(values(again), values(first), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "the step in" not in said
    assert "compiling" not in said
    assert (
        "is finished at step 4. To continue, raise fit's steps, as in steps=8, or its "
        "epochs; for a new run, give another folder."
    ) in said
    assert "--" not in said

    # An older checkpoint has steps to train.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4" / "state")
    repaired = fit(**options)
    assert "compiled the step" in capsys.readouterr().out
    assert repaired.step == 4
    for a, b in zip(values(repaired), values(first), strict=True):
        np.testing.assert_array_equal(a, b)


def rows_of(arrays: dict, steps: int) -> list[dict]:
    dataset, size = open_user_batches(arrays, size=16)
    return [dataset.train_batch(step, size) for step in range(steps)]


def test_arrays_are_read_once_an_epoch_in_an_order_of_their_own():
    rows = {"number": np.arange(48), "image": np.arange(48, dtype=np.uint8)[:, None]}
    dataset, size = open_user_batches(rows, size=12, seed=1)
    read = [dataset.train_batch(step, size) for step in range(8)]
    epochs = [
        np.concatenate([batch["number"] for batch in read[i : i + 4]]) for i in (0, 4)
    ]
    assert all(sorted(epoch.tolist()) == list(range(48)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist() != sorted(epochs[1].tolist())
    np.testing.assert_array_equal(read[1]["sample"], np.arange(12, 24))
    assert read[0]["number"].dtype == np.int32
    np.testing.assert_allclose(
        read[0]["image"][:, 0], read[0]["number"] / 255, rtol=1e-6
    )
    part = dataset.train_batch(3, size, np.array([2, 5]))
    np.testing.assert_array_equal(part["number"], read[3]["number"][[2, 5]])
    other, _ = open_user_batches(rows, size=12, seed=2)
    assert other.fingerprint == dataset.fingerprint
    assert other.train_batch(0, size)["number"].tolist() != read[0]["number"].tolist()
    changed, _ = open_user_batches(rows | {"number": np.arange(48) + 1}, size=12)
    assert changed.fingerprint != dataset.fingerprint


def test_iterators_pass_over_what_was_had_and_do_not_go_back():
    made = []

    def counting():
        for i in range(6):
            made.append(i)
            yield {"x": np.full(2, i)}

    dataset, size = open_user_batches(counting())
    assert size == 2
    assert dataset.train_batch(4, 2)["x"].tolist() == [4, 4]
    assert made == [0, 1, 2, 3, 4]
    # the first is kept, for its shapes
    assert dataset.train_batch(0, 2)["x"].tolist() == [0, 0]
    with pytest.raises(SourceError, match="cannot go back"):
        dataset.train_batch(2, 2)
    dataset, _ = open_user_batches(counting())
    with pytest.raises(SourceError, match="ended after 6 batches"):
        dataset.train_batch(6, 2)
    dataset, _ = open_user_batches([{"x": np.full(2, i)} for i in range(3)])
    assert [int(dataset.train_batch(step, 2)["x"][0]) for step in (1, 2, 3, 7, 5)] == [
        1,
        2,
        0,
        1,
        2,
    ]
    dataset, _ = open_user_batches(lambda step: {"x": np.zeros(2 + step)})
    with pytest.raises(SourceError, match="one after 1 updates has 3 x"):
        dataset.train_batch(1, 2)


@pytest.mark.slow
def test_a_models_own_cache_writes(whole):
    config = TransformerConfig(
        vocab_size=32,
        num_layers=1,
        d_model=16,
        d_ff=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        init_std=0.4,
    )
    tokens = RANDOM.integers(0, 32, (16, 9)).astype(np.int32)
    text = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((16, 8)),
        "positions": np.tile(np.arange(8), (16, 1)),
    }
    optimizer = jaxdist.OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
    model, two = (
        functools.partial(Transformer, config),
        {"mesh": {"tensor": 2}, "devices": jax.devices()[:2]},
    )
    settings = {"train.log_every": 1}
    run = fit(
        text,
        3,
        model=model,
        optimizer=optimizer,
        batch_size=16,
        settings=settings,
        **two,
    )
    assert all(row["learning_rate"] > 0 for row in run.metrics.train)
    (found,) = run.generate(
        [[1, 2, 3]], max_tokens=4, sampling=SamplingConfig(temperature=0.0)
    )
    batch = {
        "tokens": jnp.asarray([[1, 2, 3, *found.tokens]]),
        "positions": jnp.arange(7)[None],
    }
    logits = nnx.jit(lambda model, batch: model.forward(batch))(run.model, batch)[0]
    assert found.tokens.tolist() == logits[2:6].argmax(-1).tolist()
    with pytest.raises(ConfigError, match="Net has no init_cache and decode"):
        whole.generate([[1]], max_tokens=1)


def test_what_cannot_be_is_said_before_anything_compiles(whole, monkeypatch):
    held = {"folder": whole.folder}
    wide = {"x": np.array([2**40]), "y": np.array([1])}
    wrong = [
        ("one N >= 1", {"data": {"x": X, "y": Y[1:]}}),
        ("y has dtype", {"data": {"x": X, "y": np.array(["a"] * 48)}}),
        ("x exceeds int32", {"data": wide}),
        ("required a dict of arrays", {"data": 3}),
        ("the first: list; required a dict", {"data": lambda step: [X]}),
        ("ended after 0 batches", {"data": []}),
        ("batch_size=8: the batches have 16 samples", {"batch_size": 8}),
        ("validation: a sample has", {"validation": {"x": X}}),
        (
            "nearest legal sizes: 8 or 16",
            {"data": {"x": X, "y": Y}, "batch_size": 10, "mesh": {"fsdp": 8}},
        ),
        ("Did you mean mesh.fsdp", {"mesh": {"fspd": 2}}),
        ("3", {"mesh": {"fsdp": 3}}),
        ("required a transformation of optax", {"optimizer": nnx.Optimizer}),
        ("required an nnx.Module, or a function", {"model": "Net"}),
        ("no method `loss`", {"model": lambda rngs: nnx.Linear(4, 2, rngs=rngs)}),
        ("the batch has no 'x'", {"data": {"z": X}}),
        ("an argument of fit", {"settings": {"train.steps": 3}}),
        ("no such field", {"settings": {"train.log_evry": 3}}),
        (
            "mesh.tp: no such field. There are mesh.pipeline, mesh.data, mesh.fsdp, "
            "mesh.expert, mesh.context, mesh.tensor",
            {"mesh": {"tp": 2}},
        ),
        (
            "batch.accumulation=2: Net.loss changes its state",
            {"settings": {"batch.accumulation": 2}},
        ),
        ("model.name: the run", dict(model=lambda rngs: Wider(rngs=rngs), **held)),
        ("seed: the run", dict(seed=1, **held)),
        (
            "data.path: the run",
            dict(data={"z": X, "x": X, "y": Y}, batch_size=16, **held),
        ),
        ("the data has changed", dict(data=lambda step: batches(step + 1), **held)),
    ]
    compiled = []
    monkeypatch.setattr(
        "jaxdist.trainer.step_work.compile_step", lambda *_: compiled.append(1)
    )
    for text, options in wrong:
        with pytest.raises(ConfigError, match=re.escape(text)):
            fit(**options)
    assert len(compiled) <= 1  # only the last one reads a checkpoint to know


class Wider(Net):
    """Another model, of the same parameters."""


def test_one_run_at_a_time_in_a_folder(whole):
    found = []

    def meanwhile(step: int) -> dict:
        if step == 8 and not found:
            try:
                fit(steps=9, folder=whole.folder)
            except ConfigError as error:
                found.append(str(error))
        return batches(step)

    run = fit(meanwhile, steps=9, folder=whole.folder)
    assert run.step == 9
    assert "in use by process" in found[0]


def test_it_runs_in_a_thread_that_gets_no_signals(whole):
    found = []
    alone = {"devices": jax.devices()[:1], "mesh": None}
    thread = threading.Thread(target=lambda: found.append(fit(steps=4, **alone)))
    thread.start()
    thread.join()
    assert losses(found[0]) == pytest.approx(losses(whole)[:4], rel=1e-5)


def asked_to_leave(step: int) -> dict:
    if step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return batches(step)


def test_a_signal_for_the_process_ends_a_script_with_75(tmp_path):
    with pytest.raises(
        SystemExit, match="stopped after step .*, saved; run again"
    ) as left:
        fit(asked_to_leave, folder=tmp_path / "run")
    assert left.value.code == 75
    assert isinstance(left.value, training.Interrupted)
    assert read_events(tmp_path / "run")[-1]["event"] == "preempted"
    assert fit(folder=tmp_path / "run").step == 8


def test_a_run_that_ends_with_skipped_updates_has_failed(tmp_path):
    def sick(step: int) -> dict:
        return (
            batches(step)
            if step < 6
            else {"x": np.full((16, 4), np.nan, np.float32), "y": Y[:16]}
        )

    for _ in range(2):  # also where it has nothing left to do
        with pytest.raises(
            TrainingStopped,
            match="the last 2 updates were skipped.* step 7 on",
        ):
            fit(sick, folder=tmp_path / "run")
    (stop,) = [
        event for event in read_events(tmp_path / "run") if event["event"] == "stop"
    ]
    assert stop["reason"] == "nonfinite"
    assert stop["step"] == 8


def blocks_of(page: str) -> list[str]:
    """Lists the Python of a page in docs/how-to, with its hidden set-up."""
    return re.findall(
        r"(?:```|<!-- setup: )python\n(.*?)(?:```|-->)",
        (ROOT / f"docs/how-to/{page}.md").read_text(),
        re.DOTALL,
    )


AT_STEP = """
import os, signal
def given(step):
    if step == 20 and os.environ["JAXDIST_PROCESS_ID"] == "1":
        FAULT
    return dict(x=x[:64], y=y[:64])
"""


@pytest.fixture
def launched_script(tmp_path):
    """Returns what runs the docs' script in two processes, with a fault in one: its
    end, its seconds.
    """
    blocks = blocks_of("library-runs")
    (joined,) = [block for block in blocks if "jaxdist.join()" in block]
    joined = joined.replace("dict(x=x, y=y)", "given")
    assert "given, steps=200" in joined
    flags = ["--processes", "2", "--devices-per-process", "2", "--max-restarts", "0"]
    command = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        *flags,
        "--",
        sys.executable,
        "script.py",
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}

    def launch(
        fault: str = "pass", join: str = "jaxdist.join()"
    ) -> tuple[subprocess.CompletedProcess, float]:
        code = [
            blocks[0],
            AT_STEP.replace("FAULT", fault),
            joined.replace("jaxdist.join()", join),
        ]
        (tmp_path / "script.py").write_text(
            "\n".join([*code, 'print("came to", run.step)'])
        )
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done, time.monotonic() - began

    return launch


def test_a_script_that_does_not_join_its_processes_is_refused_with_78(tmp_path):
    """Started as `launch` starts each of its processes."""
    blocks = blocks_of("library-runs")
    (joined,) = [block for block in blocks if "jaxdist.join()" in block]
    without_join = joined.replace("jaxdist.join()", "pass")
    (tmp_path / "script.py").write_text(f"{blocks[0]}\n{without_join}")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "JAXDIST_NUM_PROCESSES": "2",
            "JAXDIST_PROCESS_ID": "1",
            "JAXDIST_COORDINATOR": "127.0.0.1:9",  # nobody listens
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "one of 2 processes of jaxdist launch, but not joined" in done.stderr
    assert done.returncode == 78, done.stderr
    assert not (tmp_path / "runs").exists()


def stopped_script(launched_script) -> None:
    """Launches a script, one of whose processes is told to stop."""
    done, _ = launched_script("os.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == 75, done.stdout
    assert "came to" not in done.stdout
    assert "[0] devices 4\n" in done.stdout
    assert "[1] devices 4\n" in done.stdout


@pytest.mark.slow
def test_a_script_joins_its_processes_and_ends_as_train_does(launched_script, tmp_path):
    stopped_script(launched_script)
    events = read_events(tmp_path / "runs" / "joined")
    assert [e["event"] for e in events if e["event"] == "preempted"]


@pytest.mark.slow
def test_a_script_that_joins_its_processes_resumes(launched_script, tmp_path):
    stopped_script(launched_script)
    done, _ = launched_script()
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("came to 200\n") == 2
    events = read_events(tmp_path / "runs" / "joined")
    assert [e["event"] for e in events if e["event"] in ("preempted", "restore")] == [
        "preempted",
        "restore",
    ]


RAISES = "from jaxdist.checkpoint.folders import CheckpointError; raise CheckpointError('mine')"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param("raise jaxdist.ConfigError('mine')", 78, marks=pytest.mark.slow),
        pytest.param("import sys; sys.exit('mine')", 1, marks=pytest.mark.slow),
        pytest.param(RAISES, 77, marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_one_process_does_not_wait_for_the_others(
    launched_script, fault, code
):
    done, seconds = launched_script(fault)
    assert "mine" in done.stdout
    assert done.returncode == code, done.stdout
    assert seconds < 115


OWN = "signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))"
KILL = "os.kill(os.getpid(), signal.SIGTERM)"
LATER = f"signal.signal(signal.SIGUSR2, lambda *_: ({OWN}, {KILL}))"


@pytest.mark.parametrize(
    ("fault", "join"),
    [
        pytest.param(KILL, f"{OWN}; jaxdist.join()", marks=pytest.mark.slow),
        pytest.param("pass", f"{OWN}; jaxdist.join(); {KILL}", marks=pytest.mark.slow),
        # Set by the main thread during the run, and needed before the next step could
        # notice.
        pytest.param(
            KILL.replace("TERM", "USR2"),
            f"{LATER}; jaxdist.join()",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_scripts_own_handler_is_called_and_the_run_stops(
    launched_script, fault, join
):
    done, _ = launched_script(fault, join)
    assert done.returncode == 75, done.stdout
    assert "came to" not in done.stdout, done.stdout
    assert "heard" in done.stdout, done.stdout
    if fault == "pass":  # it came before the first step
        assert "nothing is unsaved" in done.stdout, done.stdout


# --- what is shown --------------------------------------------------------------------


def run_script(code: str, folder: Path) -> str:
    """Returns what a script printed; a stand-in for matplotlib notes what it was to
    draw.
    """
    stand_in = folder / "matplotlib" / "pyplot.py"
    stand_in.parent.mkdir()
    stand_in.parent.joinpath("__init__.py").touch()
    stand_in.write_text(
        "xlabel = ylabel = lambda text: None\nshow = lambda: print('shown')\n"
        "def plot(x, y):\n    print('plotted', len(x), len(y), y[0], y[-1])\n"
    )
    (folder / "script.py").write_text(code)
    environ = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = json.loads((ROOT / "examples" / "jaxdist_in_colab.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells
    )
    install, *others = ["".join(cell["source"]) for cell in cells]
    assert cells[0]["metadata"]["tags"] == ["install"]
    assert install.endswith("%pip install -q {SOURCE}")
    assert install.startswith('SOURCE = ".."')
    others = [
        re.sub(r"\n(\S[^=\n]*)\Z", r"\nprint(\1)", cell) if _shows(cell) else cell
        for cell in others
    ]
    script = "\n\n".join(others)
    assert "width=96" in script
    said = run_script(script.replace("width=96", "width=32"), tmp_path)  # in less time
    plotted = re.search(r"plotted 60 60 (\S+) (\S+)\nshown", said)
    assert plotted
    assert float(plotted[2]) < 0.75 * float(plotted[1])
    assert re.search(r"P\(.*'fsdp'.*\) 8\n", said)
    assert "died: the power is gone" in said
    assert "resumed after step 30" in said
    assert "largest difference of a loss: 0.0" in said
    assert said.rstrip().splitlines()[-1]
    assert "    def get" in said.split("largest difference")[1]


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel_and_its_stop_button_works(tmp_path):
    """As a user runs it, cell by cell; the cell that trains is stopped once, and run
    again.
    """
    nbclient = pytest.importorskip(
        "nbclient", reason="nbclient and ipykernel are not installed"
    )
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "jaxdist_in_colab.ipynb", as_version=4)
    first = next(
        i for i, cell in enumerate(notebook.cells) if "steps=60" in cell.source
    )
    stopped = nbformat.from_dict(dict(notebook.cells[first]))
    stopped.source = (
        stopped.source.replace("    batches,\n", "    pressed,\n")
        + "\nprint('after', run)"
    )
    press = "if step == 20:\n        os.kill(os.getpid(), 2)"  # as the button does
    pressed = f"def pressed(step):\n    {press}\n    return batches(step)"
    notebook.cells.insert(first, stopped)
    notebook.cells.insert(first, nbformat.v4.new_code_cell(pressed))
    notebook.cells = [
        cell for cell in notebook.cells if cell.metadata.get("tags") != ["install"]
    ]
    os.environ["PYTHONPATH"], before = str(ROOT), os.environ.get("PYTHONPATH", "")
    try:
        nbclient.NotebookClient(
            notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
        ).execute()
    finally:
        os.environ["PYTHONPATH"] = before
    said = [
        "\n".join(
            out.get("text", "") + out.get("data", {}).get("text/plain", "")
            for out in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    at = next(
        i for i, text in enumerate(said) if "after Fitted(stopped after step" in text
    )
    assert re.search(
        r"^stopped after step (\d+) of 60 by an interrupt; saved in runs/notebook",
        said[at],
        re.M,
    )
    assert "resumed after step" in said[at + 1]
    assert "Fitted(step 60, loss" in said[at + 1]
    assert any("largest difference of a loss: 0.0" in text for text in said)


def _shows(cell: str) -> bool:
    """Returns whether a cell ends in an expression, which a notebook shows."""
    last = cell.splitlines()[-1]
    return bool(re.match(r"(?!print)[a-z]", last)) and "=" not in last.split("(")[0]


@pytest.mark.parametrize(
    "page",
    ["library", pytest.param("library-runs", marks=pytest.mark.slow), "evaluate"],
)
def test_the_snippets_of_the_docs_run(page, tmp_path):
    ending = {"library": 'print("accuracy", accuracy)', "evaluate": "print(judge)"}
    said = run_script("\n".join([*blocks_of(page), ending.get(page, "")]), tmp_path)
    if page != "library":
        return
    text = (ROOT / "docs/how-to/library.md").read_text()
    assert len(blocks_of(page)) >= 5
    assert float(re.search(r"accuracy (\S+)", said)[1]) > 0.9
    assert re.search(r"```text\n(batches: .*?)\n```", text)[1] in said
    assert "Fitted(step 40, loss" in said
    arguments = set(re.findall(r"^\| `(\w+)`|, `(\w+)` \|", text, re.M))
    assert {"model", "optimizer", "batches", "steps"} <= {
        name for pair in arguments for name in pair
    }
