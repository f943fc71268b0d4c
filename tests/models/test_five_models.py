"""Five models of others train on data 2 x fsdp 2 x tensor 2 with the losses of one
device.
"""

from functools import cache

import jax
import numpy as np
import pytest

from jaxdist.config import ConfigError, schema
from jaxdist.data import open_dataset
from jaxdist.trainer import compose, run_config, validation
from jaxdist.verification.runner import verify_layouts
from support.models import FAST_COMPILE

OTHERS = "tests/support/third_party_models.py"
STEPS = 6
VIT = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4}
MODELS = {  # target, source of data, options of the model
    "convolutional network": (f"{OTHERS}:ConvNet", "digits", {}),
    "mixer": (f"{OTHERS}:Mixer", "digits", {"depth": 1}),
    "vision transformer": ("jaxdist.models.vision:VisionTransformer", "digits", VIT),
    "masked encoder": (f"{OTHERS}:MaskedEncoder", "text", {"depth": 1}),
    "recurrent network": (f"{OTHERS}:Recurrent", "text", {}),
}
ONE = {"mesh.data": 1}
EIGHT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)  # targets are paths from there


@cache
def run_of(name: str, folder: str) -> run_config.RunConfig:
    """Returns a run of one of the models, in float32."""
    target, source, options = MODELS[name]
    config = run_config.default_config(target)
    config.data.source, config.batch.global_size, config.batch.sequence_length = (
        source,
        16,
        24,
    )
    if source == "text":
        config.data.path, config.data.cache_dir = OTHERS, folder
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 3e-3, 2
    config.model.update(options)
    return run_config.from_config(config)


def losses(run: run_config.RunConfig, num_devices: int) -> tuple[list[float], set[int]]:
    """Returns the losses of some steps on real data, and how many pieces parameters lie
    in.
    """
    devices = jax.devices()[:num_devices]
    with jax.default_matmul_precision("highest"):
        composition = validation.validate(run, devices)
        built = composition.build_step(devices)
        size = run.batch.global_size
        dataset = open_dataset(
            run.data, sequence_length=run.batch.sequence_length, log=lambda _: None
        )
        where = built.batch_shardings(dataset.train_batch(0, size))
        batches = [
            jax.device_put(dataset.train_batch(number, size), where)
            for number in range(2)
        ]
        state = built.init.lower().compile(FAST_COMPILE)()
        step = built.step.lower(state, batches[0]).compile(FAST_COMPILE)
        found = []
        for number in range(STEPS):
            state, metrics = step(state, batches[number % 2])
            found.append(float(metrics["loss"]))
    pieces = {
        len({str(s.index) for s in x.addressable_shards})
        for x in jax.tree.leaves(state.trainable)
    }
    return found, pieces


@pytest.mark.parametrize(
    "name",
    [
        "convolutional network",
        pytest.param("mixer", marks=pytest.mark.slow),
        "recurrent network",
        pytest.param("vision transformer", marks=pytest.mark.slow),
        pytest.param("masked encoder", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_device(name, tmp_path_factory):
    assert len(jax.devices()) == 8
    run = run_of(name, str(tmp_path_factory.getbasetemp()))
    one, whole = losses(compose.with_overrides(run, ONE), 1)
    eight, split = losses(compose.with_overrides(run, EIGHT), 8)
    assert whole == {1}
    assert max(split) >= 2
    assert one[4] < one[2] < one[0]
    assert one[5] < one[3] < one[1]
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_batch_statistics_are_refused_where_they_would_be_of_a_part(tmp_path):
    run = run_of("convolutional network", str(tmp_path))
    with pytest.raises(ConfigError, match="accumulation"):
        validation.validate(
            compose.with_overrides(run, {"batch.accumulation": 2}), jax.devices()[:1]
        )
    with pytest.raises(ConfigError, match="pipeline"):
        validation.validate(
            compose.with_overrides(run, {"mesh.pipeline": 2}), jax.devices()[:2]
        )
    mixer = run_of("mixer", str(tmp_path))
    validation.validate(
        compose.with_overrides(mixer, {"batch.accumulation": 2}), jax.devices()[:1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_verify_proves_them(name, tmp_path):
    """All layouts but those that the model refuses, with the reason."""
    run = run_of(name, str(tmp_path))
    report = verify_layouts(run, jax.devices(), precisions=("float32",))
    assert report.passed, schema.flatten(report.to_json())
    names = {result.layout for result in report.layouts}
    assert {"data 8", "fsdp 8", "data 2 x fsdp 2 x tensor 2"} <= names
    refused = {"convolutional network": {"fsdp 8, accumulation 4"}}.get(name, set())
    assert refused <= set(report.skipped)
    assert ("pipeline 2 x data 4" in names) == (name == "vision transformer")
