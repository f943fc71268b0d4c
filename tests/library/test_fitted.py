"""What `fit` leaves: a folder that is read again by the same model function, metrics of
the model's own.
"""

import json
import os
import re
import signal
import textwrap

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import evaluate, generate
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError, list_steps
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError
from jaxdist.step.evaluation import evaluate as evaluate_batches
from jaxdist.trainer import exit_code
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("shared_steps")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
HELD = {"x": X[:32], "y": Y[:32]}
ONE = {"devices": jax.devices()[:1]}


class Net(nnx.Module):
    """A model with a further term, stats, and metrics of its own."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.hidden, self.output = (
            nnx.Linear(4, width, rngs=rngs),
            nnx.Linear(width, 2, rngs=rngs),
        )
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return self.output(nnx.relu(self.hidden(x)))

    def loss(self, batch, key):
        logits = self(batch["x"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        aux = {"weight": 1e-3 * jnp.square(logits).sum()}
        return (
            each.sum(),
            len(each),
            aux,
            {"positive": batch["y"].sum(), "by_class": logits.sum(0)},
        )

    def update(self, stats):
        self.seen[...] += stats["positive"]

    def metrics(self, batch):
        """Returns accuracy, a sum; and how often class 1 is found, by a count of its
        own.
        """
        right, ones = self(batch["x"]).argmax(-1) == batch["y"], batch["y"] == 1
        return {"accuracy": right.sum(), "recall": ((right & ones).sum(), ones.sum())}


def make(rngs: nnx.Rngs) -> Net:
    return Net(rngs=rngs)


def batches(step: int) -> dict:
    rows = np.random.default_rng(step).integers(0, len(X), 16)
    return {"x": X[rows], "y": Y[rows]}


def fit(data=batches, steps=6, *, model=make, optimizer=None, settings=None, **options):
    settings = {"train.log_every": 1, "checkpoint.every_steps": 3} | (settings or {})
    return jaxdist.fit(
        model,
        optimizer or optax.adamw(1e-2),
        data,
        steps=steps,
        settings=settings,
        **options,
    )


def weights(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(folder=tmp_path_factory.mktemp("runs") / "run", validation=HELD)


# --- the folder is a workdir like any other -------------------------------------------


def test_a_folder_is_read_again_by_the_same_model_function(run):
    loaded = jaxdist.load_run(run.folder, model=make, log=lambda _: None, **ONE)
    again = loaded.spec.assemble(*loaded.state.model_arrays)
    for a, b in zip(weights(again), weights(run.model), strict=True):
        np.testing.assert_array_equal(a, b)
    first = run.metrics.evaluation[-1]
    for found in (run.evaluate(), run.evaluate(HELD), loaded.evaluate(HELD)):
        assert found.step == 6
        assert found.tokens == first["eval_tokens"] == 32
        assert found.loss == pytest.approx(first["eval_loss"], rel=1e-6)
        assert found.metrics["accuracy"] == pytest.approx(
            first["eval_accuracy"], rel=1e-6
        )
    with pytest.raises(
        ConfigError, match="data were given to jaxdist.fit; give some here"
    ):
        loaded.evaluate()
    with pytest.raises(ConfigError, match="Net has no decode method"):
        loaded.generate_tokens([[1]])
    with pytest.raises(ConfigError, match=r"load_run\(folder, model=...\)"):
        jaxdist.load_run(run.folder, **ONE)


def test_the_commands_read_it_given_a_name_of_the_function(run, tmp_path, capsys):
    source = tmp_path / "mine.py"
    source.write_text("from test_fitted_model import make\n")
    (tmp_path / "test_fitted_model.py").write_text(
        textwrap.dedent("""
            from flax import nnx
            class Net(nnx.Module):
                def __init__(self, *, rngs):
                    self.hidden, self.output = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
                    self.seen = nnx.Variable(self.output.bias[0] * 0)
                def loss(self, batch, key):
                    return (self.output(self.hidden(batch["x"])) ** 2).mean()
            def make(rngs):
                return Net(rngs=rngs)
        """)
    )
    np.savez(tmp_path / "held.npz", **HELD)
    flags = ["--workdir", str(run.folder), f"--config.model.target={source}:make"]
    assert evaluate.main([*flags, "--data", str(tmp_path / "held.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 32
    assert exit_code.exit_code(lambda: evaluate.main(flags)) == 78
    assert "--data" in capsys.readouterr().err
    assert exit_code.exit_code(lambda: generate.main([*flags, "--prompt", "a"])) == 78
    assert "no decode method" in capsys.readouterr().err


def test_saved_weights_are_a_workdir_of_their_own(run, tmp_path):
    plain = fit(steps=2, settings={"train.ema_decay": 0.5})  # a temporary folder
    folder = plain.save(tmp_path / "saved")
    loaded = jaxdist.load_run(folder, model=make, log=lambda _: None, **ONE)
    for a, b in zip(
        weights(loaded.spec.assemble(*loaded.state.model_arrays)),
        weights(plain.model),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert loaded.evaluate(HELD).loss == pytest.approx(
        plain.evaluate(HELD).loss, rel=1e-6
    )
    begun = fit(steps=1, settings={"init.from_run": str(folder)}, **ONE)
    assert begun.step == 1
    with pytest.raises(ConfigError, match="something is there"):
        plain.save(run.folder)
    with pytest.raises(CheckpointError, match="not that of a run in training"):
        fit(folder=folder, settings={"train.ema_decay": 0.0}, steps=2, mesh=None)


def test_another_width_is_one_line(run):
    wide = "the model is another than that of the run in .*hidden/bias: float32.8. there, float32.9. here"
    with pytest.raises(ConfigError, match=wide) as caught:
        fit(
            folder=run.folder,
            model=lambda rngs: Net(9, rngs=rngs),
            steps=7,
            validation=HELD,
        )
    assert len(caught.value.faults) == 1
    assert "in another folder" in str(caught.value)
    with pytest.raises(
        ConfigError, match="model: the run in .* has another; .*hidden/bias"
    ):
        jaxdist.load_run(run.folder, model=lambda rngs: Net(9, rngs=rngs), **ONE)


# --- the stop button ------------------------------------------------------------------


def test_the_stop_button_says_what_happened(tmp_path, capsys):
    def pressed(step: int) -> dict:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return batches(step)

    run = fit(pressed, 20, folder=tmp_path / "run", **ONE)
    assert 0 < run.step < 20
    assert run.stopped.startswith(
        f"stopped after step {run.step} of 20 by an interrupt"
    )
    assert str(tmp_path) in run.stopped
    assert repr(run).startswith(f"Fitted(stopped after step {run.step} of 20,")
    assert run.stopped in capsys.readouterr().out.splitlines()
    without = fit(pressed, 20, **ONE)
    assert without.stopped in capsys.readouterr().out.splitlines()
    assert "starts over" in without.stopped


def test_a_hook_or_the_clock_that_ends_a_run_is_named(tmp_path, capsys):
    run = fit(steps=5, settings={"train.max_minutes": 1e-9}, folder=tmp_path, **ONE)
    assert run.step < 5
    assert (
        run.stopped
        == f"stopped after step {run.step} of 5: the time limit is reached (train.max_minutes=1e-09)"
    )
    assert run.stopped in capsys.readouterr().out
    assert repr(run).startswith(f"Fitted(stopped after step {run.step}")


# --- metrics --------------------------------------------------------------------------


def test_the_models_own_figures_are_in_the_rows_and_on_the_terminal(run, capsys):
    (row,) = [row for row in run.metrics.evaluation if row["step"] == 6]
    logits = jax.jit(lambda model, x: model(x))(run.model, HELD["x"])
    right = np.asarray(logits.argmax(-1)) == HELD["y"]
    assert row["eval_accuracy"] == pytest.approx(right.mean())
    assert row["eval_recall"] == pytest.approx(right[HELD["y"] == 1].mean())
    assert row["eval_aux/weight"] == pytest.approx(
        1e-3 * float(jnp.square(logits).sum()) / 32, rel=1e-4
    )
    for step, row in enumerate(run.metrics.train):
        batch = batches(step)
        assert row["stats/positive"] == batch["y"].sum()
        assert (
            row["stats/by_class/min"]
            <= row["stats/by_class/mean"]
            <= row["stats/by_class/max"]
        )
    assert run.model.seen[...] == sum(batches(step)["y"].sum() for step in range(6))
    fit(steps=2, validation=HELD, **ONE)
    said = capsys.readouterr().out
    assert "aux/weight " in said
    assert "eval accuracy " in said
    assert "eval aux/weight " in said
    assert "samples/s " in said
    assert "eval samples 32" in said
    assert "tokens" not in said
    info = json.loads((run.folder / "run.json").read_text())
    assert info["unit"] == "samples"
    page = (run.folder / "report.html").read_text()
    assert "Samples per second" in page
    assert "samples seen" in page
    assert "Tokens per second" not in page
    assert "tokens seen" not in page


def test_a_rate_that_optax_tells_is_logged(run):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    told = fit(steps=3, optimizer=optax.inject_hyperparams(optax.sgd)(schedule), **ONE)
    assert [row["learning_rate"] for row in told.metrics.train] == pytest.approx(
        [0.1, 0.09, 0.08]
    )
    assert not any("learning_rate" in row for row in run.metrics.train)


def test_metrics_add_up_over_batches_of_any_size():
    sums = [
        (2.0, 2.0, {"a": (1.0, 2.0), "b": (3.0, 0.0)}),
        (4.0, 6.0, {"a": (5.0, 6.0), "b": (0.0, 0.0)}),
    ]
    found = evaluate_batches(lambda _, batch: sums[batch], None, range(2))
    assert found.row["eval_a"] == 0.75
    assert found.loss == 0.75
    assert np.isnan(found.metrics["b"])


WRONG = {
    "required: metrics.self, batch.": lambda self, batch, key: {},
    "metrics.batch. returned float32.16, 2.": lambda self, batch: self(batch["x"]),
    "metrics.batch. returned .a: float32.16, 2..": lambda self, batch: {
        "a": self(batch["x"])
    },
    "returned loss, which evaluations have": lambda self, batch: {
        "loss": self(batch["x"]).sum()
    },
    "Wrong: metrics.batch. failed .*the batch has no 'z'": lambda self, batch: {
        "a": batch["z"].sum()
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_metrics_that_are_none_are_refused_before_anything_compiles(text, monkeypatch):
    wrong = type("Wrong", (Net,), {"metrics": WRONG[text]})
    monkeypatch.setattr("jaxdist.trainer.step_work.compile_step", None)
    with pytest.raises(ConfigError, match=text):
        fit(model=lambda rngs: wrong(rngs=rngs), **ONE)


# --- the best evaluation --------------------------------------------------------------


def flipping(step: int) -> dict:
    """Learns for six steps, and then unlearns."""
    batch = batches(step)
    return batch if step < 6 else {"x": batch["x"], "y": 1 - batch["y"]}


BEST = {"checkpoint.keep_last": 1, "checkpoint.every_steps": 1, "train.eval_every": 1}


def test_the_best_checkpoint_is_kept_and_read(tmp_path):
    options = dict(
        folder=tmp_path / "run", validation=HELD, optimizer=optax.adamw(0.05), **ONE
    )
    settings = BEST | {"checkpoint.keep_best": "eval_loss"}
    fit(flipping, 9, settings=settings, **options)
    run = fit(flipping, 12, settings=settings, **options)  # resumed: it is still known
    best = min(run.metrics.evaluation, key=lambda row: row["eval_loss"])
    assert 3 < best["step"] < 9
    assert list_steps(run.folder / "checkpoints") == [
        best["step"],
        12,
    ]
    loaded = jaxdist.load_run(
        run.folder, model=make, step="best", log=lambda _: None, **ONE
    )
    found = loaded.evaluate(HELD)
    assert found.step == best["step"]
    assert found.loss == pytest.approx(best["eval_loss"])
    plain = fit(steps=1, folder=tmp_path / "none", **ONE)
    with pytest.raises(ConfigError, match="no checkpoint in .* records it"):
        jaxdist.load_run(plain.folder, model=make, step="best", **ONE)


def test_a_run_that_gets_no_better_stops(tmp_path, capsys):
    options = dict(
        folder=tmp_path / "run", validation=HELD, optimizer=optax.adamw(0.05), **ONE
    )
    settings = BEST | {"checkpoint.keep_best": "eval_accuracy:max", "train.patience": 3}
    run = fit(flipping, 30, settings=settings, **options)
    accuracies = [row["eval_accuracy"] for row in run.metrics.evaluation]
    best = int(np.argmax(accuracies)) + 1
    assert run.step == best + 3 < 30
    assert (
        f"eval_accuracy has been no better than {max(accuracies):.6g} (step {best})"
        in run.stopped
    )
    again = fit(flipping, 30, settings=settings, **options)
    # it stays where it stopped
    assert again.step == run.step
    assert again.stopped == run.stopped
    reason = run.stopped.partition(": ")[2]
    assert f"{reason}. To continue, raise train.patience.\n" in capsys.readouterr().out
    assert (
        fit(flipping, 30, settings=settings | {"train.patience": 5}, **options).step
        == best + 5
    )


def test_a_best_that_was_not_saved_leaves_the_one_before(tmp_path):
    config = CheckpointConfig(keep_last=1, asynchronous=False)
    with CheckpointManager(tmp_path, config) as store:
        # that of 4 never came
        for step, best in ((1, 1), (2, None), (3, 4), (5, None)):
            if best:
                store.best.append(best)
            store.save(step, {"step": jnp.int32(step), "x": jnp.zeros(3)}, {})
        assert store.steps() == [1, 5]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            "keep_best=eval_acuracy: .*Did you mean eval_accuracy",
            {"checkpoint.keep_best": "eval_acuracy"},
        ),
        ("required a field of evaluation rows", {"checkpoint.keep_best": "loss"}),
        (
            "train.patience=2: evaluations decide",
            {"train.patience": 2, "train.eval_every": 0},
        ),
    ],
)
def test_a_figure_that_is_none_is_refused(text, settings):
    with pytest.raises(ConfigError, match=text):
        fit(validation=HELD, settings=settings, **ONE)


# --- what is refused ------------------------------------------------------------------


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(x)


class Module:
    """A stand-in for equinox's, which the default tests do not have."""

    __module__ = "equinox._module"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Linen,
            "model: Linen is a flax linen module, and jaxdist takes flax NNX; .* nnx.bridge.ToNNX",
        ),
        (Linen(), "Linen is a flax linen module"),
        (lambda rngs: Linen(), "Linen is a flax linen module"),
        (
            type("MLP", (Module,), {})(),
            "MLP is an equinox module, and .*; hold its arrays in nnx.Param",
        ),
        (lambda rngs: 3, "the function made 3; required an nnx.Module"),
    ],
)
def test_a_module_of_another_library_is_told_the_way(model, text):
    with pytest.raises(ConfigError, match=text) as caught:
        fit(model=model, **ONE)
    page = (ROOT / "docs/how-to/own-model-details.md").read_text()
    assert (
        "required" in text
        or "docs/how-to/own-model-details.md, Modules of other libraries"
        in str(caught.value)
    )
    assert "## Modules of other libraries" in page
    assert "nnx.bridge.ToNNX(" in page


def test_a_wrapped_linen_module_trains_as_the_page_says():
    page = (
        (ROOT / "docs/how-to/own-model-details.md")
        .read_text()
        .partition("## Modules of other libraries")[2]
    )
    names: dict = {}
    pattern = r"(?:```|<!-- setup: )python\n(.*?)(?:```|-->)"
    for block in re.findall(pattern, page, re.DOTALL):
        exec(block, names)
    found = fit(
        model=names["FromLinen"],
        steps=20,
        mesh={"fsdp": 8},
        optimizer=optax.adam(0.03),
    )
    losses = [row["loss"] for row in found.metrics.train]
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


def test_too_few_rows_of_validation_are_named(capsys):
    with pytest.raises(
        ConfigError, match="validation: 10 samples, and a batch has 16; .* batch_size"
    ):
        fit(validation={"x": X[:10], "y": Y[:10]}, **ONE)
    fit(steps=1, validation={"x": X[:20], "y": Y[:20]}, **ONE)
    assert (
        "validation: the last 4 of 20 samples are no whole batch of 16"
        in capsys.readouterr().out
    )


# --- iterators ------------------------------------------------------------------------


class Counting:
    """Batches that follow from a state, as a data loader's; a resumed run reads none of
    them again.
    """

    def __init__(self):
        self.at, self.read = 0, []

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        self.read.append(self.at - 1)
        return batches(self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_an_iterator_with_a_state_is_saved_and_restored(run, tmp_path, capsys):
    fit(Counting(), 3, folder=tmp_path / "run")
    capsys.readouterr()
    source = Counting()
    again = fit(source, folder=tmp_path / "run")
    assert [row["loss"] for row in again.metrics.train] == [
        row["loss"] for row in run.metrics.train
    ]
    # the first for its shapes; the rest was read ahead
    assert source.read[:4] == [0, 3, 4, 5]
    assert (
        "continues from its own state at the batch after 3 updates"
        in capsys.readouterr().out
    )
    plain = [batches(step) for step in range(8)]
    fit(plain, 3, folder=tmp_path / "plain", **ONE)
    fit(plain, 4, folder=tmp_path / "plain", **ONE)
    assert "its first 2 batches are passed over" in capsys.readouterr().out
