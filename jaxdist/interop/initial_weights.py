"""Hugging Face folders and PEFT adapters as sources of a run's initial weights.

Weights are read directly into the shards of the run's arrays. Each process reads the
shards of its own devices.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxdist.config import ConfigError, trees
from jaxdist.data import load_tokenizer
from jaxdist.data.sources.source import TokenSource
from jaxdist.data.sources.table import SOURCES
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.interop import peft
from jaxdist.interop.families import family_of
from jaxdist.interop.hf_config import derive, read_config
from jaxdist.interop.hf_reader import Tensors, open_weights
from jaxdist.models import registry
from jaxdist.models.model_values import POSITIONS, differing_values
from jaxdist.models.multi_token import belongs_to_modules
from jaxdist.trainer.weight_source import (
    ImpliedConfig,
    LoadedWeights,
    OpenedWeights,
    Target,
    WeightSource,
)


class HuggingFaceFolder:
    """A folder with config.json and safetensors."""

    key: ClassVar[str] = "init.from_huggingface"
    implies_config: ClassVar[bool] = True

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        """Reads config.json and finds a tokenizer; see `WeightSource.config_of`."""
        folder = Path(config.init.from_huggingface).expanduser()
        family, values = derive(read_config(folder))
        model = {"target": registry.DEFAULT_TARGET} | values
        if values["num_experts"] and "model.balance" not in set_keys:
            balance = config.model.get("balance", "bias")
            if balance == "bias" and not family.has_choice_bias:
                balance = "batch"  # an export has no tensor for these biases
            if family.has_choice_bias:
                balance = "bias"
            model["balance"] = balance
        tokenizer = _tokenizer_of(folder, config, values["vocab_size"], set_keys)
        return ImpliedConfig(model, tokenizer)

    def open(self, target: Target) -> OpenedWeights:
        """Opens the tensors and checks their shapes; see `WeightSource.open`."""
        folder = Path(target.config.init.from_huggingface).expanduser()
        wanted = wanted_arrays(folder, target)
        shapes = {path: x.shape for path, x in wanted.items()}
        tensors = open_weights(folder, target.config.model_options, shapes)
        return OpenedWeights(tensors.sizes(), partial(_load, target, tensors, wanted))


def wanted_arrays(folder: Path, target: Target) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes the arrays to read from a folder, by path.

    These are the parameters, and the model state that the folder's family has tensors
    for.
    """
    family, _ = derive(read_config(folder))
    model_state = trees.flatten_names(target.abstract.model_state)
    return _in_folder(target) | family.choice_biases(model_state)


def _in_folder(target: Target) -> dict[str, jax.ShapeDtypeStruct]:
    """Selects the parameters that a folder has: all but those of further tokens."""
    return {
        path: x for path, x in target.parameters.items() if not belongs_to_modules(path)
    }


def _tokenizer_of(
    folder: Path, config: ConfigDict, vocab_size: int, set_keys: Collection[str]
) -> str:
    """Chooses data.tokenizer for the folder's model: its own tokenizer, if it has one.

    Raises:
      ConfigError: it has none, and the run's data need one other than bytes.
    """
    file = folder / TOKENIZER_FILE
    if file.is_file():
        return str(file)
    tokenizer: str = config.data.tokenizer
    holds_ids = isinstance(SOURCES.get(config.data.source), TokenSource)
    if holds_ids or "data.tokenizer" in set_keys:
        return tokenizer
    if vocab_size != load_tokenizer("bytes").vocab_size:
        raise ConfigError(
            f"init.from_huggingface={folder}: no {TOKENIZER_FILE} there; let transformers write one "
            f"(AutoTokenizer.from_pretrained(...).save_pretrained(...)), or set data.tokenizer"
        )
    return tokenizer


def _load(
    target: Target, tensors: Tensors, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> LoadedWeights:
    """Reads the arrays one at a time, quantised kernels one layer at a time."""
    fields = read_config(tensors.folder)
    kind = fields.get("model_type")
    notes = []
    if tensors.note:
        notes.append(tensors.note)
    if family_of(kind) is None:
        notes.append(
            f"{tensors.folder}: {kind!r} is not known, and read as a llama: compare its logits"
        )
    length = target.config.batch.sequence_length
    notes += _length_warnings(length, target.config.model_options, fields)
    if any(belongs_to_modules(path) for path in target.parameters):
        notes.append(
            "model.multi_token: the folder has no such modules; they are random"
        )
    values = tensors.load(wanted, target.store, target.stored_by_layer)
    return LoadedWeights(values, note="\n".join(notes), small_files=tensors.folder)


def _length_warnings(
    length: int, options: Mapping[str, Any], fields: Mapping[str, Any]
) -> Iterator[str]:
    """Warns of sequences that are longer than those the weights were trained on.

    Rotary positions have no table that ends, so the validation accepts any length. A run
    whose positions are not those of the folder stretches them on purpose.

    Args:
      length: tokens of a sequence of the run.
      options: values of the run's model.*.
      fields: the folder's config.json.
    """
    longest = fields.get("max_position_embeddings")
    if options["positions"] != "rotary" or not isinstance(longest, int):
        return
    _, values = derive(fields)
    theirs = {name: values[name] for name in POSITIONS}
    if differing_values(options, theirs) or length <= longest:
        return
    yield (
        f"warning: batch.sequence_length={length}: the model was made for sequences of at most "
        f"{longest} tokens (max_position_embeddings). Shorten the sequence, or stretch the "
        f"positions with model.rope_scaling and model.rope_factor."
    )


class PeftAdapter:
    """An adapter that PEFT wrote, for the model of `init.from_huggingface`."""

    key: ClassVar[str] = "lora.from_peft"
    implies_config: ClassVar[bool] = False

    def config_of(self, config: ConfigDict, set_keys: Collection[str]) -> ImpliedConfig:
        """Raises NotImplementedError: the base model's source implies the config."""
        raise NotImplementedError

    def open(self, target: Target) -> OpenedWeights:
        """Reads A and B, and kernels beside them, which are small.

        See `WeightSource.open`.
        """
        config = target.config
        family, _ = derive(read_config(Path(config.init.from_huggingface).expanduser()))
        trained = target.trained_with_adapters
        shapes = {path: x.shape for path, x in trained.items()}
        factors = peft.read(config.lora.from_peft, family, config.lora, shapes)
        folder = Path(config.lora.from_peft).expanduser()
        size = (folder / peft.WEIGHTS).stat().st_size
        return OpenedWeights(size, partial(_place, target, factors))


def _place(target: Target, factors: dict[str, np.ndarray]) -> LoadedWeights:
    """Puts A and B, and kernels beside them, on the devices.

    They have the run's dtypes and shardings.
    """
    trained = target.trained_with_adapters

    def placed(path: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        assert x.sharding is not None
        value = factors[path].astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, value.__getitem__)

    return LoadedWeights({path: placed(path, trained[path]) for path in factors})


WEIGHT_SOURCES: tuple[WeightSource, ...] = (HuggingFaceFolder(), PeftAdapter())
