"""The weights that a run starts from: which source a config names, and its refusal."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import jaxdist
from jaxdist import interop
from jaxdist.config import ConfigError, trees
from jaxdist.trainer import (
    cli,
    exit_code,
    initial_weights,
    run_config,
    training,
    validation,
)
from jaxdist.trainer.weight_source import (
    ImpliedConfig,
    LoadedWeights,
    OpenedWeights,
    Target,
)
from support.huggingface import SMOLLM
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("shared_steps")

FOREIGN = {
    "init.from_huggingface": {"init.from_huggingface": str(SMOLLM)},
    "lora.from_peft": {"lora.from_peft": "there", "lora.rank": 2},
}


def config_with(values: dict) -> run_config.RunConfig:
    config = run_config.default_config()
    config.update_from_flattened_dict(values)
    return run_config.from_config(config)


def assert_says_what_to_pass(text: str, key: str, place: str) -> None:
    assert text.startswith(f"{key}={place} cannot be read")
    assert "Pass weight_sources=jaxdist.interop.WEIGHT_SOURCES." in text


def test_each_key_has_one_source():
    sources = (*initial_weights.CORE_SOURCES, *interop.WEIGHT_SOURCES)
    assert sorted(source.key for source in sources) == sorted(
        initial_weights.weight_keys()
    )


@pytest.mark.parametrize("key", FOREIGN)
def test_a_command_without_the_source_refuses_the_key(key, capsys):
    flags = [f"--config.{name}={value}" for name, value in FOREIGN[key].items()]
    words = ["--config", "quickstart", *flags]
    parser = cli.ConfigParser("test", None)
    assert exit_code.exit_code(lambda: cli.parse(parser, words)) == 78
    (line,) = capsys.readouterr().err.splitlines()
    place = str(FOREIGN[key][key])
    assert_says_what_to_pass(line.removeprefix("error: "), key, place)


@pytest.mark.parametrize("key", FOREIGN)
def test_a_run_without_the_source_is_refused_before_it_begins(key, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError) as error:
        training.train(config_with(FOREIGN[key]), folder)
    (fault,) = error.value.faults
    assert_says_what_to_pass(fault, key, FOREIGN[key][key])
    assert not folder.exists()


def test_fit_refuses_weights_of_other_formats(tmp_path):
    class Linear(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.kernel = nnx.Param(rngs.normal((2,)))

        def loss(self, batch, key):
            return (batch["x"] @ self.kernel[...]).sum(), jnp.float32(1)

    module = Linear(rngs=nnx.Rngs(0))
    batches = {"x": np.ones((8, 2), np.float32)}
    settings = {"init.from_huggingface": str(SMOLLM)}
    with pytest.raises(ConfigError, match="fit trains the model that you give"):
        jaxdist.fit(module, optax.sgd(0.1), batches, steps=1, settings=settings)


class Constant:
    """A source that a program of its own might have: all weights are one number."""

    key = "init.from_huggingface"
    implies_config = True

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        return ImpliedConfig({"d_model": 16}, config.data.tokenizer)

    def open(self, target: Target) -> OpenedWeights:
        value = float(target.config.init.from_huggingface)

        def load() -> LoadedWeights:
            values = {
                path: jax.device_put(np.full(x.shape, value, x.dtype), x.sharding)
                for path, x in target.parameters.items()
            }
            return LoadedWeights(values, note=f"all weights are {value}")

        return OpenedWeights(value, load)


def test_a_source_gives_config_and_weights(tmp_path, capsys):
    config = run_config.default_config()
    sizes = {
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 8,
        "model.d_ff": 32,
        "mesh.fsdp": 8,
    }
    config.update_from_flattened_dict(sizes | {"init.from_huggingface": "0.5"})
    sources = initial_weights.chosen_sources(config, [Constant()])
    assert config.model.d_model != 16
    initial_weights.apply_config(config, sources)
    run = run_config.from_config(config)
    assert run.model["d_model"] == 16
    composition = validation.validate(run, jax.devices(), with_data=False)
    built = composition.build_step()
    state = initial_weights.init_from_sources(run, built, tmp_path, sources).state
    assert "all weights are 0.5" in capsys.readouterr().out
    parameters = trees.flatten_names(state.trainable)
    assert len(parameters) > 5
    for path, x in parameters.items():
        assert (np.asarray(x) == 0.5).all(), path


def test_a_disagreeing_key_is_refused():
    config = run_config.default_config()
    config.update_from_flattened_dict({"init.from_huggingface": "0.5"})
    config.model.d_model = 32
    with pytest.raises(ConfigError, match=r"model.d_model=32, there 16 \(init.from_h"):
        initial_weights.apply_config(config, [Constant()], {"model.d_model"})


def test_the_core_parses_and_trains_without_interop():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import jaxdist.trainer.cli, jaxdist.trainer.training, sys; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(ROOT),
    )
    wing = ("jaxdist.interop", "jaxdist.inference", "jaxdist.evaluation")
    loaded = [name for name in done.stdout.split() if name.startswith("jaxdist.")]
    assert "jaxdist.trainer.from_run" in loaded
    assert not [name for name in loaded if name.startswith(wing)]
