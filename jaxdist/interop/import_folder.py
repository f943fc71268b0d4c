"""Reads a Hugging Face folder for a new workdir: config, tokenizer and weights."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import schema, trees
from jaxdist.data import tokenizer_config
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.interop import hf_config, hf_reader
from jaxdist.interop.families import Family, family_of
from jaxdist.interop.hf_writer import KEPT
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import NO_OPT_STATE, State

# largest batch.sequence_length of a converted workdir, and its value if the model has
# no limit
MAX_SEQUENCE_LENGTH = 1024
# keys of a reward model's run
_REWARD = {
    "objective.name": "reward",
    "data.format": "preferences",
    "data.packing": "documents",
}
_BYTE_VOCABULARY = 256  # vocab_size of a model whose tokens are bytes


@dataclass(frozen=True)
class Folder:
    """A Hugging Face folder with config.json and safetensors."""

    path: Path
    dtype: str  # dtype of the workdir's weights
    fields: dict[str, Any]  # fields of config.json
    family: Family
    values: dict[str, Any]  # values of model.*
    notes: list[str] = field(default_factory=list)  # of tensors that were not read

    def copy_tokenizer(self, workdir: Path) -> bool:
        """Copies the folder's small files into a workdir.

        Returns:
          Whether there is a tokenizer among them.
        """
        tokenizer_config.copy_small_files(self.path, workdir / KEPT)
        tokenizer = workdir / KEPT / TOKENIZER_FILE
        if not tokenizer.is_file():
            return False
        shutil.copyfile(tokenizer, workdir / TOKENIZER_FILE)
        tokenizer_config.write(workdir, tokenizer_config.read(self.path))
        return True

    def config_values(self, tokenizer: Path, *, has_tokenizer: bool) -> dict[str, Any]:
        """Makes the config keys that the folder decides, with their values.

        Args:
          tokenizer: path of the workdir's tokenizer, which need not exist yet.
          has_tokenizer: whether the folder has a tokenizer.
        """
        values = self.values
        longest = values["max_positions"] or self.fields.get(
            "max_position_embeddings", MAX_SEQUENCE_LENGTH
        )
        options = schema.flatten(values)
        config = {f"model.{name}": value for name, value in options.items()}
        if values["num_experts"]:
            has_bias = self.family.has_choice_bias
            config["model.balance"] = "bias" if has_bias else "batch"
        config["precision.params"] = self.dtype
        config["precision.compute"] = self.dtype
        config["batch.sequence_length"] = min(longest, MAX_SEQUENCE_LENGTH)
        if values["head"] == "score":
            config |= _REWARD
        if has_tokenizer or not self._may_read_bytes:
            config["data.tokenizer"] = str(tokenizer)
        return config

    @property
    def _may_read_bytes(self) -> bool:
        return bool(self.values["vocab_size"] == _BYTE_VOCABULARY)

    def read_state(self, spec: ModelSpec, device: jax.Device) -> State:
        """Reads the weights onto a device, as the state of step 0 without an optimizer.

        Args:
          spec: the model that `config_values` describe.
          device: the device for all arrays.

        Raises:
          ConfigError: the folder's tensors are not those of the model.
        """
        sharding = jax.sharding.SingleDeviceSharding(device)
        parameters = {
            path: jax.ShapeDtypeStruct(x.shape, self.dtype, sharding=sharding)
            for path, x in trees.flatten_names(spec.trainable).items()
        }
        state_paths = trees.flatten_names(spec.model_state)
        biases = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for path, x in self.family.choice_biases(state_paths).items()
        }
        wanted = parameters | biases
        shapes = {path: x.shape for path, x in wanted.items()}
        tensors = hf_reader.open_weights(self.path, self.values, shapes)
        self.notes.append(tensors.note)
        arrays = tensors.load(wanted)
        model_state = {}
        if spec.model_state:
            model_state = jax.jit(lambda: spec.init_params(jax.random.key(0))[1])()
        model_state = trees.flatten_names(model_state)
        model_state |= {path: arrays.pop(path) for path in biases}
        return State(
            step=jnp.int32(0),
            trainable=trees.unflatten_names(arrays),
            frozen={},
            model_state=trees.unflatten_names(model_state),
            opt_state=NO_OPT_STATE,
            ema=None,
        )

    def summary(self, spec: ModelSpec, *, has_tokenizer: bool) -> str:
        """Describes in one line the model that was read."""
        architecture = self.family.architecture_for(self.values["head"])
        text = f"{spec.parameter_count:,} parameters, read as {architecture}"
        kind = self.fields.get("model_type")
        if family_of(kind) is None:
            text += f" ({kind!r} is not known: compare its logits)"
        if not has_tokenizer and not self._may_read_bytes:
            text += f"; it has no {TOKENIZER_FILE}: put one there for text"
        return "\n".join([text, *filter(None, self.notes)])


def open_folder(path: Path, dtype: str) -> Folder:
    """Reads the config of a Hugging Face folder.

    Args:
      path: the folder.
      dtype: dtype of the workdir's weights.

    Raises:
      ConfigError: config.json cannot be read, or describes a model that jaxdist cannot
        build.
    """
    fields = hf_config.read_config(path)
    family, values = hf_config.derive(fields)
    return Folder(path, dtype, fields, family, values)
