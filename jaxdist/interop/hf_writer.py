"""A Hugging Face folder from a checkpoint: sharded safetensors, index, config and
tokenizer files.

One of our parameters, the stack of its layers, is in memory at a time; files are
mapped, and filled in whatever order that brings. So the host needs the largest
parameter (of Llama 70B a sixth of the model), beside what the kernel keeps of files and
can drop.
"""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxdist.checkpoint import files as folders
from jaxdist.checkpoint import fingerprint, manager, manifest
from jaxdist.checkpoint.files import CheckpointError
from jaxdist.config import ConfigError
from jaxdist.data import tokenizer_config
from jaxdist.interop import hf_config
from jaxdist.interop.families import Family, Shapes
from jaxdist.interop.hf_reader import INDEX, SINGLE, stored_shapes, unmapped
from jaxdist.storage.untrusted import Malformed, of_kind, read_json

KEPT = tokenizer_config.HUGGINGFACE
_GENERATION = "generation_config.json"
_DTYPES = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}


class CheckpointWeights:
    """The weights of a checkpoint, checked against its manifest and read one parameter
    at a time.
    """

    def __init__(self, folder: Path, step: int | None = None) -> None:
        """Chooses `step`, or the newest one that is sound; of a run that has one, the
        moving average.

        Raises:
          CheckpointError: there is none.
        """
        folder = folders.as_path(folder)
        reasons = dict[int, str]()
        run = manifest.identity(folder, create=False)
        listed = folders.newest_first(folder, folders.all_steps)
        for number in listed if step is None else [step]:
            try:
                self.manifest = manifest.check(folder, number, run=run)
                self.step = number
                self._path = folder / str(number)
                self._arrays = folders.read_step(folder, number).arrays
                break
            except (CheckpointError, OSError) as error:
                reasons[number] = str(error)
        else:
            tried = "; ".join(
                f"step {number}: {reason}" for number, reason in reasons.items()
            )
            raise CheckpointError(
                f"no usable checkpoint in {folder}{tried and ': '}{tried}", reasons
            )
        groups = (
            "ema/" if any(n.startswith("ema/") for n in self._arrays) else "trainable/",
            "frozen/",
        )
        self._names = {
            n.partition("/")[2]: n for n in self._arrays if n.startswith(groups)
        }
        self._state = {
            n.partition("/")[2]: n for n in self._arrays if n.startswith("model_state/")
        }
        self.shapes = {
            path: self._arrays[name].shape for path, name in self._names.items()
        }
        self._backend = manager.preload().OrbaxBackend(timeout_s=600)

    def check_choices(self, family: Family) -> None:
        """Checks that experts are chosen without the biases that the family has no
        tensor for.

        Raises:
          ConfigError: they make a difference.
          CheckpointError: they are not what was saved.
        """
        known = {part.path for stored in family.tensors for part in stored.parts}
        for path in self._state.keys() - known:
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

    def read(self, path: str) -> np.ndarray:
        """Returns a parameter, or model state, on the host.

        Raises:
          CheckpointError: it is not what was saved.
        """
        name = (self._names | self._state)[path]
        cpu = jax.local_devices(backend="cpu")[0]
        stored = self._arrays[name]
        host = jax.sharding.SingleDeviceSharding(cpu)
        wanted = {name: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=host)}
        try:
            arrays = self._backend.read(self._path, wanted)
        except Exception as error:
            # of Orbax and TensorStore: they raise many types for what is not there
            if not folders.is_deleted(self._path.parent, self.step):
                raise
            raise CheckpointError(
                f"step {self.step} was deleted while it was read, as its run is training; run this again, "
                f"or give --step of one that checkpoint.keep_every keeps"
            ) from error
        if fingerprint.of(arrays)[name] != self.manifest.fingerprints.get(name):
            raise CheckpointError(
                f"step {self.step}: {name} is not what was saved, by fingerprint"
            )
        return np.asarray(arrays[name])

    def close(self) -> None:
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
    """Writes weights and config.json for `from_pretrained`; returns the bytes of the
    tensors.

    Args:
      fields: config.json as `hf_config.fields_of` made it.
      shapes: of our parameters, by path; `read` gives each of them.
      dtype: "float32" or "bfloat16".

    Raises:
      ConfigError: parameters for which the family has no tensor.
    """
    faults = unmapped(family, shapes)
    if faults:
        raise ConfigError(faults)
    target.mkdir(parents=True, exist_ok=True)
    views, total = _create_files(
        target, stored_shapes(family, shapes), dtype, max_shard_bytes
    )
    for stored, part in [
        (tensor, part) for tensor in family.present(shapes) for part in tensor.parts
    ]:
        value = read(part.path)
        shape = part.stored_shape(shapes[part.path])
        start = stored.offset(part, shapes)
        order = [part.ours.index(x) for x in "".join(part.theirs)]
        place = (slice(None),) * stored.axis + (
            slice(start, start + shape[stored.axis]),
        )
        for at, name in stored.names((0, size) for size in shapes[part.path]).items():
            views[name][place] = value[at].transpose(order).reshape(shape)
    _write_json(target / hf_config.CONFIG, dict(fields) | {"torch_dtype": dtype})
    return total


def _create_files(
    target: Path, shapes: Shapes, dtype: str, max_shard_bytes: int
) -> tuple[dict[str, np.ndarray], int]:
    """Creates files of zeros and their index; returns a mapped array for each tensor,
    and all their bytes.
    """
    code, kind = _DTYPES[dtype]
    sizes = {
        name: math.prod(shapes[name]) * kind.itemsize
        for name in sorted(shapes, key=_by_number)
    }
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > max_shard_bytes:
            shards.append({})
        shards[-1][name] = size
    views = {}
    index = {}
    for number, shard in enumerate(shards, 1):
        file = (
            SINGLE
            if len(shards) == 1
            else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        ends = dict(zip(shard, itertools.accumulate(shard.values()), strict=True))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}} | {
            name: {
                "dtype": code,
                "shape": shapes[name],
                "data_offsets": [end - shard[name], end],
            }
            for name, end in ends.items()
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        first = 8 + len(text)
        (target / file).write_bytes(len(text).to_bytes(8, "little") + text)
        data = np.memmap(
            target / file, np.uint8, "r+", shape=(first + sum(shard.values()),)
        )
        for name, end in ends.items():
            part = data[first + end - shard[name] : first + end]
            views[name] = part.view(kind).reshape(shapes[name])
            index[name] = file
    total = sum(sizes.values())
    if len(shards) > 1:
        _write_json(
            target / INDEX, {"metadata": {"total_size": total}, "weight_map": index}
        )
    return views, total


def _by_number(name: str) -> list:
    """Returns a key that sorts layer 10 behind layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def copy_own_tokenizer(file: Path, target: Path) -> dict[str, int]:
    """Copies a tokenizer.json of ours so that transformers can load it; returns fields
    for config.json.

    Raises:
      ConfigError: it cannot be read.
    """
    special = _special_tokens(file)
    named = tokenizer_config.read(file.parent).special
    shutil.copyfile(file, target / file.name)
    fields: dict[str, str] = (
        {"eos_token": special[0]["content"]} if len(special) == 1 else {}
    )
    fields |= named
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | fields
    _write_json(target / tokenizer_config.FILE, about)
    ends = [
        token["id"] for token in special if token["content"] == fields.get("eos_token")
    ]
    return {"eos_token_id": ends[0]} if ends else {}


def write_chat_files(config: tokenizer_config.TokenizerConfig, target: Path) -> None:
    """Writes a run's chat template and the ids that end its texts where transformers
    looks for them.
    """
    if config.chat_template:
        (target / tokenizer_config.TEMPLATE).write_text(
            config.chat_template, encoding="utf-8"
        )
    if config.end_ids:
        file = target / _GENERATION
        fields = read_json(file, dict) if file.is_file() else {}
        _write_json(file, fields | {"eos_token_id": sorted(config.end_ids)})


def _special_tokens(file: Path) -> list[dict[str, Any]]:
    try:
        added = of_kind(
            read_json(file, dict).get("added_tokens", []), list, "added_tokens"
        )
        special = [
            token
            for token in added
            if of_kind(token, dict, "an added token").get("special")
        ]
        for token in special:
            of_kind(token.get("id"), int, "an id")
            of_kind(token.get("content"), str, "a content")
        return special
    except (FileNotFoundError, Malformed) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
