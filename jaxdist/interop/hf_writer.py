"""Writes a Hugging Face folder from a checkpoint: tensors, config and tokenizer.

The host holds one parameter at a time, with all its layers. The tensors of its layers
are spread over the files, so all files are memory-mapped and filled in that order. The
largest parameter of Llama 70B is a sixth of the model.
"""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxdist.checkpoint import fingerprint, folders, integrity, manager
from jaxdist.checkpoint.folders import CheckpointError, StepDeleted
from jaxdist.config import ConfigError
from jaxdist.data import tokenizer_config
from jaxdist.interop import hf_config
from jaxdist.interop.families import Family, Shapes, Stored, TensorPart
from jaxdist.interop.hf_reader import INDEX, SINGLE, stored_shapes, unmapped
from jaxdist.models.multi_token import belongs_to_modules
from jaxdist.storage.untrusted import Malformed, of_kind, read_json

KEPT = tokenizer_config.HUGGINGFACE
_GENERATION = "generation_config.json"
_DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}


class CheckpointWeights:
    """The weights of a checkpoint, checked and read one parameter at a time.

    If the run keeps a moving average of its weights, these are the average.

    Args:
      folder: the folder of the run's checkpoints.
      step: the step to read; None: the newest usable one.

    Raises:
      CheckpointError: there is no usable checkpoint.
    """

    def __init__(self, folder: Path, step: int | None = None) -> None:
        folder = folders.as_path(folder)
        reasons = dict[int, str]()
        run = integrity.identity(folder, create=False)
        candidates: Iterable[int]
        if step is None:
            candidates = folders.newest_first(folder, folders.all_steps)
        else:
            candidates = [step]
        for candidate in candidates:
            try:
                self.manifest = integrity.check(folder, candidate, run=run)
                self.step = candidate
                self._path = folder / str(candidate)
                self._arrays = folders.read_step(folder, candidate).arrays
                break
            except (CheckpointError, OSError) as error:
                reasons[candidate] = str(error)
        else:
            message = f"no usable checkpoint in {folder}"
            if reasons:
                tried = [f"step {step}: {reason}" for step, reason in reasons.items()]
                message += f": {'; '.join(tried)}"
            raise CheckpointError(message, reasons)
        has_average = any(name.startswith("ema/") for name in self._arrays)
        self._parameters = self._named("ema" if has_average else "trainable")
        self._parameters |= self._named("frozen")
        self._model_state = self._named("model_state")
        self.shapes = {
            path: self._arrays[name].shape for path, name in self._parameters.items()
        }
        self._backend = manager.preload().OrbaxBackend(timeout_s=600)

    def _named(self, group: str) -> dict[str, str]:
        """Maps the paths of a group's arrays to their names in the checkpoint.

        Modules of multi-token prediction are left out.
        """
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): name
            for name in self._arrays
            if name.startswith(prefix)
            and not belongs_to_modules(name.removeprefix(prefix))
        }

    def check_choices(self, family: Family) -> None:
        """Checks that the family can express how experts are chosen.

        Families without a tensor for the biases of the choice can, if a layer's biases
        are equal.

        Raises:
          ConfigError: biases differ, and the family has no tensor for them.
          CheckpointError: the biases differ from what was saved.
        """
        if family.has_choice_bias:
            return
        for path in self._model_state:
            if not path.endswith("/choice_bias"):
                continue
            bias = self.read(path)
            spread = float(np.ptp(bias, -1).max())
            if spread > 0:
                raise ConfigError(
                    f"{path}: biases that differ by up to {spread:.3g} (model.balance=bias) choose the "
                    f"experts of this run, and {family.architecture} has no tensor for them: tokens would go "
                    "elsewhere. Train with model.balance=batch, or leave them out: --drop-choice-bias"
                )

    def choice_biases(self, family: Family) -> dict[str, np.ndarray]:
        """Reads the biases that choose experts, by path, if the family stores them.

        They are zeros in a run that has none.

        Raises:
          StepDeleted: the run has deleted the step meanwhile.
          CheckpointError: they differ from what was saved.
        """
        if not family.has_choice_bias:
            return {}
        saved = family.choice_biases(self._model_state)
        biases = {}
        for path, shape in self.shapes.items():
            start, _, name = path.rpartition("/")
            if name != "router":
                continue
            bias_path = f"{start}/choice_bias"
            num_layers, _, num_experts = shape
            biases[bias_path] = np.zeros((num_layers, num_experts), np.float32)
            if bias_path in saved:
                biases[bias_path] = self.read(bias_path)
        return biases

    def read(self, path: str) -> np.ndarray:
        """Reads a parameter, or model state, to the host.

        Raises:
          StepDeleted: the run has deleted the step meanwhile.
          CheckpointError: it differs from what was saved.
        """
        name = (self._parameters | self._model_state)[path]
        cpu = jax.local_devices(backend="cpu")[0]
        stored = self._arrays[name]
        abstract = jax.ShapeDtypeStruct(
            stored.shape,
            stored.dtype,
            sharding=jax.sharding.SingleDeviceSharding(cpu),
        )
        try:
            arrays = self._backend.read(self._path, {name: abstract})
        except Exception as error:  # Orbax and TensorStore raise many types
            if not folders.is_deleted(self._path.parent, self.step):
                raise
            raise StepDeleted(
                f"step {self.step} was deleted while it was read, as its run is training; run this again, "
                f"or give --step of one that checkpoint.keep_every keeps"
            ) from error
        if fingerprint.of(arrays)[name] != self.manifest.fingerprints.get(name):
            raise CheckpointError(
                f"step {self.step}: {name} is not what was saved, by fingerprint"
            )
        return np.asarray(arrays[name])

    def close(self) -> None:
        """Closes the checkpoint."""
        self._backend.close()


def export(
    target: Path,
    family: Family,
    fields: Mapping[str, Any],
    shapes: Shapes,
    read: Callable[[str], np.ndarray],
    *,
    dtype: str,
    max_shard_bytes: int,
) -> int:
    """Writes weights and config.json for `from_pretrained`.

    Args:
      target: the folder to write to.
      family: the architecture to write.
      fields: the fields of config.json, from `hf_config.fields_of`.
      shapes: the shapes of the parameters, by path.
      read: reads a parameter, given its path.
      dtype: "float32" or "bfloat16".
      max_shard_bytes: largest safetensors file.

    Returns:
      The number of bytes of all tensors.

    Raises:
      ConfigError: the family has no tensor for a parameter.
    """
    faults = unmapped(family, shapes)
    if faults:
        raise ConfigError(faults)
    target.mkdir(parents=True, exist_ok=True)
    tensor_shapes = stored_shapes(family, shapes)
    dtypes = dict.fromkeys(tensor_shapes, dtype)
    for stored in family.present(shapes):
        if stored.is_choice_bias:
            dtypes |= dict.fromkeys(stored.all_names(shapes), "float32")
    tensors, num_bytes = _create_files(target, tensor_shapes, dtypes, max_shard_bytes)
    for stored in family.present(shapes):
        for part in stored.parts:
            _write_part(stored, part, read(part.path), shapes, tensors)
    _write_json(target / hf_config.CONFIG, dict(fields) | {"torch_dtype": dtype})
    return num_bytes


def _write_part(
    stored: Stored,
    part: TensorPart,
    value: np.ndarray,
    shapes: Shapes,
    tensors: Mapping[str, np.ndarray],
) -> None:
    """Copies a parameter into its part of the mapped tensors of all layers."""
    shape = part.stored_shape(shapes[part.path])
    start = stored.offset(part, shapes)
    order = [part.dims.index(dim) for dim in "".join(part.stored_dims)]
    before = (slice(None),) * stored.axis
    place = (*before, slice(start, start + shape[stored.axis]))
    ranges = [(0, size) for size in shapes[part.path]]
    for position, name in stored.names(ranges).items():
        values = part.in_file_order(value[position])
        tensors[name][place] = values.transpose(order).reshape(shape)


def _create_files(
    target: Path, shapes: Shapes, dtypes: Mapping[str, str], max_shard_bytes: int
) -> tuple[dict[str, np.ndarray], int]:
    """Creates safetensors files of zeros, and their index if there are several.

    Args:
      target: the folder.
      shapes: shape of each tensor, by name.
      dtypes: "float32" or "bfloat16" for each tensor.
      max_shard_bytes: largest file.

    Returns:
      A memory-mapped array for each tensor, and the number of bytes of all tensors.
    """
    sizes = {
        name: math.prod(shapes[name]) * _DTYPES[dtypes[name]][1].itemsize
        for name in sorted(shapes, key=_by_number)
    }
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > max_shard_bytes:
            shards.append({})
        shards[-1][name] = size
    tensors: dict[str, np.ndarray] = {}
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors |= _create_file(target / file, shard, shapes, dtypes)
        file_of |= dict.fromkeys(shard, file)
    total = sum(sizes.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        _write_json(target / INDEX, index)
    return tensors, total


def _create_file(
    file: Path, sizes: Mapping[str, int], shapes: Shapes, dtypes: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Creates one safetensors file of zeros.

    Args:
      file: the file to create.
      sizes: bytes of each tensor, by name.
      shapes: shape of each tensor, by name.
      dtypes: "float32" or "bfloat16" for each tensor.

    Returns:
      A memory-mapped array for each tensor.
    """
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, end in ends.items():
        header[name] = {
            "dtype": _DTYPES[dtypes[name]][0],
            "shape": shapes[name],
            "data_offsets": [end - sizes[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    data_start = 8 + len(text)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    num_bytes = data_start + sum(sizes.values())
    data = np.memmap(file, np.uint8, "r+", shape=(num_bytes,))
    tensors = {}
    for name, end in ends.items():
        part = data[data_start + end - sizes[name] : data_start + end]
        tensors[name] = part.view(_DTYPES[dtypes[name]][1]).reshape(shapes[name])
    return tensors


def _by_number(name: str) -> list[int | str]:
    """Makes a sort key that puts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def copy_own_tokenizer(file: Path, target: Path) -> dict[str, int]:
    """Copies a run's tokenizer.json so that transformers can load it.

    Args:
      file: tokenizer.json in the run's workdir.
      target: the folder to write to.

    Returns:
      Fields for config.json: the id that ends a text, if there is one.

    Raises:
      ConfigError: the file cannot be read.
    """
    special_tokens = _special_tokens(file)
    shutil.copyfile(file, target / file.name)
    roles: dict[str, str] = {}
    if len(special_tokens) == 1:
        roles["eos_token"] = special_tokens[0]["content"]
    roles |= tokenizer_config.read(file.parent).special
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"} | roles
    _write_json(target / tokenizer_config.FILE, fields)
    for token in special_tokens:
        if token["content"] == roles.get("eos_token"):
            return {"eos_token_id": token["id"]}
    return {}


def write_chat_files(config: tokenizer_config.TokenizerConfig, target: Path) -> None:
    """Writes a run's chat template and its end ids where transformers reads them."""
    if config.chat_template:
        (target / tokenizer_config.TEMPLATE).write_text(
            config.chat_template, encoding="utf-8"
        )
    if config.end_ids:
        file = target / _GENERATION
        fields = read_json(file, dict) if file.is_file() else {}
        _write_json(file, fields | {"eos_token_id": sorted(config.end_ids)})


def _special_tokens(file: Path) -> list[dict[str, Any]]:
    """Reads the special tokens of a tokenizer.json, each with "id" and "content"."""
    special = []
    try:
        tokens = read_json(file, dict).get("added_tokens", [])
        for token in of_kind(tokens, list, "added_tokens"):
            if of_kind(token, dict, "an added token").get("special"):
                of_kind(token.get("id"), int, "an id")
                of_kind(token.get("content"), str, "a content")
                special.append(token)
    except (FileNotFoundError, Malformed) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return special


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
