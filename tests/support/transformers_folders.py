"""Folders that transformers writes now, of random models. Needs torch and
transformers.
"""

import importlib.util
import zlib

import numpy as np
import torch
import transformers

from jaxdist import interop
from support.huggingface import FOLDERS

_spec = importlib.util.spec_from_file_location("make", FOLDERS / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
BIGGER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4}
LENGTH = 20
NAMES = sorted(make.configs())


def made(name, folder, *, flip=False, dtype=torch.float32, shard="1GB"):
    """Writes a random model of a family; returns it. With `flip`, tied where it is not,
    or untied.
    """
    config = make.configs(**BIGGER)[name]
    if flip:
        config.tie_word_embeddings = not config.tie_word_embeddings
    model = make.build(config, seed=zlib.crc32(name.encode()) % 100, dtype=dtype)
    assert all(p.std() > 0.1 for p in model.parameters()), "all weights are random"
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, LENGTH))
    np.save(folder / "tokens.npy", tokens.astype(np.int32))
    np.save(folder / "logits.npy", make.logits_of(model, tokens))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.float()


def reloaded(folder, target, parameters, dtype="float32"):
    """Exports imported parameters; returns what transformers makes of the folder."""
    config = interop.read_config(folder)
    family, fields = interop.fields_of(
        interop.derive(config)[1], {"model_type": config["model_type"]}
    )
    shapes = {path: x.shape for path, x in parameters.items()}
    interop.export(
        target,
        family,
        fields,
        shapes,
        lambda path: np.asarray(parameters[path]),
        dtype=dtype,
        max_shard_bytes=20_000,
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True, dtype=torch.float32
    )
    assert {key: list(value) for key, value in info.items() if value} == {}, info
    return model.eval()
