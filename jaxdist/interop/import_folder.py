"""A Hugging Face folder as a workdir: the config that it implies, tokenizer, state."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import trees
from jaxdist.data import tokenizer_config
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.interop import hf_config, hf_reader
from jaxdist.interop.families import FAMILIES, Family
from jaxdist.interop.hf_writer import KEPT
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.state import State

# tokens of a converted workdir's sequences, where the model can take more
LONGEST = 1024
_BYTES = 256  # vocabulary of a model whose tokens are bytes


@dataclass(frozen=True)
class Folder:
    """A Hugging Face folder with config.json and safetensors."""

    path: Path
    dtype: str  # that the workdir stores its weights in
    fields: dict[str, Any]  # of its config.json
    family: Family
    values: dict[str, Any]  # of model.*

    def copy_tokenizer(self, workdir: Path) -> bool:
        """Copies its small files into a workdir; tells whether a tokenizer is there."""
        tokenizer_config.copy_small_files(self.path, workdir / KEPT)
        tokenizer = workdir / KEPT / TOKENIZER_FILE
        if not tokenizer.is_file():
            return False
        shutil.copyfile(tokenizer, workdir / TOKENIZER_FILE)
        tokenizer_config.write(workdir, tokenizer_config.read(self.path))
        return True

    def config_values(self, tokenizer: Path, *, has_tokenizer: bool) -> dict[str, Any]:
        """Lists the keys of a run's config that its model decides, with their values.

        Args:
          tokenizer: where the workdir's tokenizer is or will be.
          has_tokenizer: whether the folder has one.
        """
        values = self.values
        longest = values["max_positions"] or self.fields.get(
            "max_position_embeddings", LONGEST
        )
        changes = {f"model.{name}": value for name, value in values.items()}
        if values["num_experts"]:
            changes["model.balance"] = "batch"
        changes["precision.params"] = self.dtype
        changes["precision.compute"] = self.dtype
        changes["batch.sequence_length"] = min(longest, LONGEST)
        # else its tokens may be bytes
        if has_tokenizer or values["vocab_size"] != _BYTES:
            changes["data.tokenizer"] = str(tokenizer)
        return changes

    def read_state(self, spec: ModelSpec, device: jax.Device) -> State:
        """Reads the weights onto a device: the state of step 0, without an optimizer's.

        Args:
          spec: of the model that `config_values` describe.
          device: takes all arrays.

        Raises:
          ConfigError: its tensors are not those of the model.
        """
        where = jax.sharding.SingleDeviceSharding(device)
        wanted = {
            path: jax.ShapeDtypeStruct(x.shape, self.dtype, sharding=where)
            for path, x in trees.flatten_names(spec.trainable).items()
        }
        shapes = {path: x.shape for path, x in wanted.items()}
        tensors = hf_reader.open_weights(self.path, self.values, shapes)
        model_state = {}
        if spec.model_state:
            model_state = jax.jit(lambda: spec.init_params(jax.random.key(0))[1])()
        trainable = trees.unflatten_names(tensors.load(wanted))
        return State(jnp.int32(0), trainable, {}, model_state, None, None)

    def summary(self, spec: ModelSpec, *, has_tokenizer: bool) -> str:
        """Tells what was read, in one line."""
        architecture = self.family.architecture
        text = f"{spec.parameter_count:,} parameters, read as {architecture}"
        kind = self.fields.get("model_type")
        if kind not in FAMILIES:
            text += f" ({kind!r} is not known: compare its logits)"
        if not has_tokenizer and self.values["vocab_size"] != _BYTES:
            text += f"; it has no {TOKENIZER_FILE}: put one there for text"
        return text


def open_folder(path: Path, dtype: str) -> Folder:
    """Reads the config of a Hugging Face folder.

    Args:
      path: the folder.
      dtype: that its weights will be stored in.

    Raises:
      ConfigError: it cannot be read, or holds no model like ours.
    """
    fields = hf_config.read_config(path)
    family, values = hf_config.derive(fields)
    return Folder(path, dtype, fields, family, values)
