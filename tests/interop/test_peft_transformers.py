"""Adapters against PEFT: each side reads the other's files and gives the same logits.

tests/models/test_lora.py reads stored PEFT folders (tests/data/peft) without PEFT.
"""

import warnings

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from jaxdist import interop  # noqa: E402
from jaxdist.config import ConfigError, trees  # noqa: E402
from jaxdist.interop import peft as ours  # noqa: E402
from jaxdist.models import lora  # noqa: E402
from jaxdist.models.lora import LoraConfig  # noqa: E402
from jaxdist.protocols.model_spec import describe  # noqa: E402
from support.huggingface import EXPERTS, loaded, logits_of, shapes_of  # noqa: E402
from support.transformers_folders import NAMES, made, make  # noqa: E402

RANK, ALPHA = 4, 10
# PEFT's own choice of layers, and ours of the same kernels.
CHOICES = {
    name: (["q_proj", "v_proj", "down_proj"], ("query", "value", "down"))
    for name in NAMES
}
CHOICES |= dict.fromkeys(
    EXPERTS, (["q_proj", "v_proj", "o_proj"], ("query", "value", "out"))
)
CHOICES["gpt2"] = (["c_attn", "mlp.c_fc"], ("query", "key", "value", "up"))
CHOICES["phi3"] = ("all-linear", (".*",))


def theirs(base, folder):
    """Returns PEFT's model of the base with the adapter; no tensor may be missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*")
        model = peft.PeftModel.from_pretrained(base, folder).eval()
    stored = peft.utils.load_peft_weights(folder)
    wanted = peft.get_peft_model_state_dict(model)
    assert stored.keys() == wanted.keys()
    assert len(stored) > 0
    assert all(torch.equal(stored[key], wanted[key]) for key in stored)
    return model


# the last one: with dense layers between
READ = [name for name in NAMES if name != "qwen3_moe"]
# in how their layers are called or put together
UNLIKE = ("llama", "gemma2", "gpt2", "phi3")


@pytest.mark.parametrize(
    "name",
    [
        name if name in UNLIKE else pytest.param(name, marks=pytest.mark.slow)
        for name in READ
    ],
)
def test_peft_in_and_out(name, tmp_path):
    folder, there, here = (tmp_path / part for part in ("base", "there", "here"))
    folder.mkdir()
    base = made(name, folder)
    targets, kernels = CHOICES[name]
    about = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=targets,
        fan_in_fan_out=name == "gpt2",
    )
    model = peft.get_peft_model(base, about).eval()
    torch.manual_seed(1)
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(there)
    tokens, before = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    logits = make.logits_of(model, tokens)
    assert np.abs(logits - before).max() > 0.01, "the adapter does something"

    plain, parameters = loaded(folder)
    config = LoraConfig(rank=RANK, alpha=ALPHA, targets=kernels)
    family = interop.FAMILIES[base.config.model_type]
    spec = describe(lora.adapted(plain.first_arrays.build, config))
    factors = ours.read(there, family, config, shapes_of(spec.trainable))
    trainable, _, frozen = jax.jit(spec.init_params)(
        jax.random.key(0), trees.flatten_names(parameters) | factors
    )
    np.testing.assert_allclose(
        logits_of(spec, trainable, frozen, tokens), logits, atol=1e-5
    )

    # Others of ours, as training would leave them: where a layer is several kernels,
    # each has its own A.
    keys = iter(jax.random.split(jax.random.key(1), 99))
    trainable = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), trainable
    )
    trained = {
        path: np.asarray(x) for path, x in trees.flatten_names(trainable).items()
    }
    ours.write(here, family, config, trained, shapes_of(parameters), base=str(folder))
    fresh = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    adapted = theirs(fresh, here)
    expected = logits_of(spec, trainable, frozen, tokens)
    assert np.abs(expected - logits).max() > 0.01
    np.testing.assert_allclose(make.logits_of(adapted, tokens), expected, atol=1e-5)
    merged = make.logits_of(adapted.merge_and_unload(), tokens)
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_adapters_of_unequal_layers_are_not_read(tmp_path):
    base = made("qwen3_moe", tmp_path)
    peft.get_peft_model(
        base, peft.LoraConfig(r=RANK, target_modules=["q_proj"])
    ).save_pretrained(tmp_path / "a")
    config = LoraConfig(rank=RANK, alpha=ALPHA, targets=("query",))
    spec = describe(lora.adapted(loaded(tmp_path)[0].first_arrays.build, config))
    with pytest.raises(
        ConfigError, match="with dense layers between those with experts are not read"
    ):
        ours.read(
            tmp_path / "a",
            interop.FAMILIES["qwen3_moe"],
            config,
            shapes_of(spec.trainable),
        )
