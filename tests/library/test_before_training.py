"""What `fit` does before it trains: the dry run, the proof of layouts, the length."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from examples.staged_module import Model as Staged
from jaxdist import library
from jaxdist.config import ConfigError
from jaxdist.data.config import DataConfig
from jaxdist.hardware import host
from jaxdist.models.transformer import Transformer
from jaxdist.planner import dry_run
from jaxdist.protocols.model_spec import describe
from jaxdist.trainer import fine_tuning, run_config, user_model
from jaxdist.verification import cases
from support.objectives import MODEL, Preference, SumObjective, batch_of_pairs

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
DATA = {"x": X, "y": Y}
TWO = {"devices": jax.devices()[:2]}


class Net(nnx.Module):
    """A model that is nothing but NaN where its scale is zero."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(width, 2, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.array(2.0))

    def each(self, batch):
        logits = jnp.log(self.scale) * self.output(nnx.relu(self.hidden(batch["x"])))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def loss(self, batch, key):
        return self.each(batch).mean()


class Squared(Net):
    """A loss that depends on the parts that a batch is cut into."""

    def loss(self, batch, key):
        return jnp.square(self.each(batch).mean())


def make(rngs: nnx.Rngs) -> Net:
    return Net(rngs=rngs)


def fit(data=DATA, *, model=make, optimizer=None, **options):
    if not {"steps", "epochs"} & options.keys():
        options["steps"] = 4
    return jaxdist.fit(
        model,
        optimizer or optax.adam(1e-2),
        data,
        batch_size=None if callable(data) else 16,
        **options,
    )


@pytest.fixture
def untrained(monkeypatch):
    """Fails a test in which something trains."""
    monkeypatch.setattr("jaxdist.trainer.training.train", None)


# --- the dry run ----------------------------------------------------------------------


def test_a_dry_run_says_whether_a_run_fits_and_writes_nothing(
    untrained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(host, "memory_bytes", lambda: 2**30)
    folder = tmp_path / "run"
    report = fit(folder=folder, dry_run=True, mesh={"fsdp": 2}, **TWO)
    assert not folder.exists()
    assert not capsys.readouterr().out
    assert report.fits
    assert report.needed_bytes < report.available_bytes == 2**29  # one of two
    assert report.needed_bytes < report.compiled_bytes
    # two matmuls forward, and their gradients but that of the input
    assert report.step_flops == 2 * 16 * (2 * (4 * 8 + 8 * 2) + 8 * 2)
    text = str(report)
    assert "mesh: fsdp 2 (2 x cpu)" in text
    assert "costs: Net declares none" in text
    assert "data, before training" not in text
    assert "FLOPs of a step, on all devices: 3.58k" in text
    assert text not in repr(report)
    # Adam's moments are counted, which are two of each parameter and a count
    plain = fit(dry_run=True, optimizer=optax.sgd(1e-2), mesh={"fsdp": 2}, **TWO)
    assert report.needed_bytes == plain.needed_bytes + 2 * (4 * 48 // 2 + 4) + 4


def test_a_run_that_is_too_large_does_not_fit(untrained, monkeypatch):
    monkeypatch.setattr(host, "memory_bytes", lambda: 2**10)
    report = fit(dry_run=True, **TWO)
    assert report.fits is False
    assert "DOES NOT FIT: a device needs " in report.text
    assert not report.refusal

    def refuse(*_):
        raise dry_run.StepTooLarge("the step does not fit: 9 bytes too many")

    monkeypatch.setattr(host, "memory_bytes", lambda: 2**30)
    monkeypatch.setattr(dry_run, "compile_step", refuse)
    report = fit(dry_run=True, **TWO)
    assert report.fits is False
    assert report.compiled_bytes is None
    assert report.refusal == "the step does not fit: 9 bytes too many"
    assert report.refusal in report.text


def test_faults_are_those_of_a_run(untrained, tmp_path):
    with pytest.raises(ConfigError, match="mesh"):
        fit(dry_run=True, mesh={"fsdp": 3}, **TWO)
    with pytest.raises(ConfigError, match="is a link that leads out"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
        fit(dry_run=True, folder=tmp_path / "run", **TWO)


# --- the proof of layouts -------------------------------------------------------------


def test_a_model_is_proved_on_layouts_and_then_trained(capsys):
    # a module, whose own values are the first ones: with zeros it gives NaN
    run = fit(model=Net(rngs=nnx.Rngs(0)), verify="fsdp 2, zero 1", **TWO)
    said = capsys.readouterr().out
    assert said.index("all 2 rows equal one device") < said.index("step 1/4")
    rows = [line for line in said.splitlines() if line.startswith("fsdp 2, zero 1")]
    assert [line.split()[4] for line in rows] == ["float32", "bfloat16"]
    assert float(rows[0].split()[6]) > 0  # two programs
    assert run.stopped == "finished"


def test_a_layout_that_differs_stops_the_run_with_the_table(untrained, tmp_path):
    def batches(step):  # its batch has fewer samples than the layouts need
        return {"x": X[:6], "y": Y[:6]}

    for data in (DATA, batches):
        with pytest.raises(ConfigError, match="depends on the layout") as caught:
            fit(
                data,
                model=lambda rngs: Squared(rngs=rngs),
                verify="fsdp 2, accumulation",
                folder=tmp_path / "run",
                **TWO,
            )
        lines = str(caught.value).splitlines()
        assert lines[1].startswith("layout  ")
        assert "NOT EQUAL, worst gradient: " in lines[2]
        assert lines[-1] == "2 of 2 rows are NOT equal to one device"
        assert not (tmp_path / "run").exists()


def test_what_cannot_be_verified_is_refused(untrained, monkeypatch):
    with pytest.raises(ConfigError, match="verify: there is one device, and layouts"):
        fit(verify=True, devices=jax.devices()[:1])
    with pytest.raises(
        ConfigError, match="has 'fspd' in its name; layouts here: data 2; fsdp 2"
    ):
        fit(verify="fspd", **TWO)
    with pytest.raises(ConfigError, match="mesh"):
        fit(verify=True, mesh={"fsdp": 3}, **TWO)
    monkeypatch.setattr(cases, "LARGEST_AS_IS", 10)
    with pytest.raises(ConfigError, match="Net has 49 parameters .* at most 10 param"):
        fit(verify=True, **TWO)
    monkeypatch.setattr(library, "jax", SimpleNamespace(process_count=lambda: 2))
    with pytest.raises(ConfigError, match="there are 2 processes"):
        library._verify(None, jax.devices(), None, "")


def build_staged(rngs: nnx.Rngs) -> Staged:
    return Staged(num_layers=2, width=16, heads=2, rngs=rngs)


TOKENS = RANDOM.integers(0, 256, (16, 9)).astype(np.int32)
TEXT = {
    "tokens": TOKENS[:, :-1],
    "targets": TOKENS[:, 1:],
    "weights": np.ones((16, 8), np.float32),
}


def test_a_staged_model_of_the_caller_has_pipelines(monkeypatch):
    config = user_model.config_of_fit(
        {"model.name": "Staged", "data.path": "tokens=int32[8]"},
        {},
        evaluates=False,
        saves=False,
    )
    layouts = cases.layouts_for(config, 8, describe(build_staged))
    assert {"pipeline 2 x data 4", "pipeline 4 x data 2, 2 chunks"} <= layouts.keys()
    # its number of layers is no key of the config
    assert not any(
        key.startswith("model.") for layout in layouts.values() for key in layout
    )
    plain = cases.layouts_for(config, 8, describe(make))
    assert not any("pipeline" in name for name in plain)


@pytest.mark.slow
def test_a_staged_model_of_the_caller_is_proved_in_a_pipeline(capsys):
    fit(TEXT, model=build_staged, verify="pipeline", **TWO)
    assert "all 2 rows equal one device" in capsys.readouterr().out


# --- the length -----------------------------------------------------------------------


def test_epochs_count_the_samples_of_arrays(tmp_path):
    options = {"folder": tmp_path, "validation": DATA, "devices": jax.devices()[:1]}
    run = fit(epochs=1.5, **options)
    assert run.step == 5  # of 4.5
    assert run.stopped == "finished"
    stored = json.loads((tmp_path / "config.json").read_text())["train"]
    assert (stored["steps"], stored["epochs"]) == (5, 0.0)
    assert len(run.metrics.evaluation) == 5
    assert fit(epochs=2, **options).step == 6


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("steps=4 and epochs=2: both say", {"steps": 4, "epochs": 2}),
        ("steps or epochs: fit needs one", {"steps": None}),
        ("epochs=0: must be a positive number", {"epochs": 0}),
        ("epochs=-1: must be a positive number", {"epochs": -1}),
        (
            "epochs=2: the number of samples is known of a dict of arrays alone",
            {"epochs": 2, "data": lambda step: DATA},
        ),
        (
            "settings: train.epochs is what an argument of fit says",
            {"settings": {"train.epochs": 2.0}},
        ),
    ],
)
def test_a_length_that_is_none_is_refused(fault, options):
    with pytest.raises(ConfigError, match=fault):
        fit(**options)


def test_a_value_for_random_weights_is_always_one_that_the_caller_of_fit_set():
    """So `fit` needs no rule of trainer/fine_tuning.py: its data is never a default."""
    run = run_config.RunConfig(
        data=DataConfig(source="given", path="x=float32[4]"),
        init=run_config.InitConfig(from_run="runs/other"),
    )
    assert run.optimizer == jaxdist.OptimizerConfig()
    fine_tuning.check(run, set_keys=(), trained_with={})
    high = dataclasses.replace(
        run, optimizer=jaxdist.OptimizerConfig(name="muon", learning_rate=0.01)
    )
    with pytest.raises(ConfigError) as caught:
        fine_tuning.check(high, set_keys=(), trained_with={})
    assert len(caught.value.faults) == 2


# --- the objective --------------------------------------------------------------------

SMALL = dataclasses.replace(MODEL, num_layers=2)


def make_policy(rngs: nnx.Rngs) -> Transformer:
    return Transformer(SMALL, rngs=rngs)


PAIRS = {name: x for name, x in batch_of_pairs().items() if name != "sample"}


class Plain(SumObjective):
    """Its options, if it had some, would not be told."""


@dataclasses.dataclass(frozen=True)
class Linked(SumObjective):
    """It has a function, which each process writes in its own way."""

    link: object = jax.nn.softplus


GIVEN = {"objective": Preference(), "modules": {"reference": make_policy}}
ONE = {"devices": jax.devices()[:1]}


def prefer(model=make_policy, steps=1, **options):
    return fit(PAIRS, model=model, steps=steps, **options)


def reference_of(run) -> jax.Array:
    return run.outcome.state.modules["reference"]["embedding"]


@pytest.mark.slow
def test_an_objective_trains_a_policy_against_its_frozen_module(tmp_path):
    run = prefer(folder=tmp_path, **GIVEN, **ONE)
    # The reference has the policy's first values, so a pair's loss is log 2.
    assert run.metrics.train[0]["loss"] == pytest.approx(np.log(2), rel=1e-4)
    assert np.abs(reference_of(run) - run.model.embedding[...]).max() > 1e-4
    options = {"model": make_policy, "log": lambda line: None}
    loaded = jaxdist.load_run(tmp_path, **options, **GIVEN, **TWO)
    loss = loaded.evaluate(PAIRS).loss
    assert 0 < loss < np.log(2) - 0.1
    alone = jaxdist.load_run(tmp_path, **options, **ONE)
    with pytest.raises(
        ConfigError, match=r"was trained for Preference\(\), and was loaded"
    ):
        alone.evaluate(PAIRS)
    with pytest.raises(
        ConfigError, match=r"SumObjective\(\), and the run was trained for P"
    ):
        jaxdist.load_run(tmp_path, **options, objective=SumObjective())
    with pytest.raises(ConfigError, match="model.name: .* for Preference"):
        prefer(steps=2, folder=tmp_path, **ONE)


@pytest.mark.slow
def test_a_frozen_module_with_values_of_its_own(tmp_path):
    run = prefer(**GIVEN, **TWO, mesh={"fsdp": 2})
    own = {"objective": Preference(), "modules": {"reference": run.model}}
    begun = prefer(run.model, folder=tmp_path / "run", **own, **ONE)
    embedding = np.asarray(run.model.embedding[...])
    np.testing.assert_array_equal(reference_of(begun), embedding)
    # The checkpoint has the reference: its values need not be given again.
    again = prefer(steps=2, folder=tmp_path / "run", **GIVEN, **ONE)
    np.testing.assert_array_equal(reference_of(again), embedding)
    assert again.evaluate(PAIRS).loss < np.log(2) - 0.1
    # The policy's weights are those of the run, and the reference's are its own.
    other = Transformer(SMALL, rngs=nnx.Rngs(9))
    settings = {"init.from_run": str(tmp_path / "run")}
    own = {"objective": Preference(), "modules": {"reference": other}}
    mixed = prefer(settings=settings, **own, **ONE)
    np.testing.assert_array_equal(reference_of(mixed), other.embedding[...])
    near = np.abs(mixed.model.embedding[...] - again.model.embedding[...]).max()
    assert near < 0.02 < np.abs(mixed.model.embedding[...] - other.embedding[...]).max()


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("modules: reference would not be read", {"modules": {"reference": make}}),
        ("objective: 3; required an object of a subclass", {"objective": 3}),
        ("Plain is no frozen dataclass", {"objective": Plain(), "model": make_policy}),
        (
            "has a field that is written as an address",
            {"objective": Linked(), "model": make_policy},
        ),
        (
            "frozen module 'reference' is missing",
            {"objective": Preference(), "model": make_policy},
        ),
        (
            "frozen module 'teacher' is unknown",
            {
                "objective": Preference(),
                "model": make_policy,
                "modules": {"reference": make_policy, "teacher": make_policy},
            },
        ),
        (
            "Net needs embed, a stack of blocks, and head",
            {"objective": Preference(), "modules": {"reference": make_policy}},
        ),
        (
            "modules: reference is a function, and the model is a module with values",
            {
                "objective": Preference(),
                "model": Transformer(SMALL, rngs=nnx.Rngs(0)),
                "modules": {"reference": make_policy},
            },
        ),
    ],
)
def test_an_objective_that_cannot_be_is_refused(untrained, fault, options):
    with pytest.raises(ConfigError, match=fault):
        fit(**options, dry_run=True)
