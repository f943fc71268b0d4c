"""Writes a run's checkpoint as a Hugging Face folder, or its adapters for PEFT."""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.checkpoint.folders import StepDeleted
from jaxdist.config import ConfigError, trees
from jaxdist.data import tokenizer_config
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.interop import hf_config, hf_writer, peft
from jaxdist.interop.families import Family
from jaxdist.interop.hf_writer import KEPT, CheckpointWeights
from jaxdist.models import lora
from jaxdist.models.lora import LoraConfig
from jaxdist.protocols.model_spec import ModelSpec

_MOST_TRIES = 5  # exports of a live run that deletes the steps while they are read


@dataclass(frozen=True)
class Source:
    """The run to export, and the settings that the export needs."""

    workdir: Path
    checkpoints: Path
    spec: ModelSpec
    model_options: Mapping[str, Any]  # values of model.*
    lora: LoraConfig
    base_model: str  # folder that the adapters' base model was read from; "" = none
    params_dtype: str  # precision.params
    sequence_length: int  # batch.sequence_length
    has_chats: bool  # whether the run was trained on chats


@dataclass(frozen=True)
class ExportOptions:
    """Options of `jaxdist convert --format huggingface`."""

    step: int | None = None  # step of the checkpoint to read; None = the newest
    adapters: bool = False  # whether to write the adapters alone, as a PEFT folder
    drop_choice_bias: bool = False  # whether to omit the biases that choose experts
    dtype: str | None = None  # dtype of the written weights; None = that of the run
    max_shard_bytes: int = 5_000_000_000  # largest safetensors file


def export_folder(source: Source, target: Path, options: ExportOptions) -> str:
    """Writes the weights of a run as a folder for `from_pretrained`.

    The run may be training. If it deletes the newest step while that is read, the
    export begins again with the step that is the newest then.

    Args:
      source: the run.
      target: an empty folder.
      options: options of the export.

    Returns:
      A line that describes the written weights.

    Raises:
      ConfigError: no Hugging Face architecture can express the run's model, or adapters
        are wanted and the run has none.
      CheckpointError: there is no usable checkpoint.
      StepDeleted: the run has deleted the step that `options` name, or step after step.
    """
    tries = _MOST_TRIES if options.step is None else 1
    for _ in range(tries - 1):
        with contextlib.suppress(StepDeleted):
            return _export(source, target, options)
        _empty(target)
    return _export(source, target, options)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _export(source: Source, target: Path, options: ExportOptions) -> str:
    """Writes the folder from one step; see `export_folder`."""
    if options.adapters and not source.lora.rank:
        raise ConfigError(
            f"--adapters: {source.workdir} was trained without adapters. "
            "Leave out --adapters."
        )
    kept = source.workdir / KEPT
    origin: dict[str, Any] = hf_config.read_config(kept) if kept.is_dir() else {}
    if not origin and source.model_options["positions"] == "rotary":
        origin["max_position_embeddings"] = source.sequence_length
    family, fields = hf_config.fields_of(source.model_options, origin)
    weights = CheckpointWeights(source.checkpoints, options.step)
    with contextlib.closing(weights):
        return _write(source, target, options, weights, family, fields)


def _write(
    source: Source,
    target: Path,
    options: ExportOptions,
    weights: CheckpointWeights,
    family: Family,
    fields: dict[str, Any],
) -> str:
    """Writes the weights of a step; returns a line that describes them."""
    if options.drop_choice_bias and family.has_choice_bias:
        raise ConfigError(
            f"--drop-choice-bias: {family.architecture} has a tensor for these biases. "
            "Leave out --drop-choice-bias."
        )
    if not options.drop_choice_bias:
        weights.check_choices(family)
    shapes, read = lora.unadapted(
        source.spec.abstract_model, weights.shapes, weights.read
    )
    scores = source.model_options["head"] == "score"
    if options.adapters:
        dtype = "float32"
        num_bytes = _write_adapters(source, target, family, weights, shapes)
        contents = ", the adapters for"
    else:
        dtype = options.dtype or source.params_dtype
        fields |= _write_tokenizer(source, target)
        if scores and fields["pad_token_id"] is None:
            fields["pad_token_id"] = _padding(source, fields)
        biases = weights.choice_biases(family)
        num_bytes = hf_writer.export(
            target,
            family,
            fields,
            {**shapes, **{path: x.shape for path, x in biases.items()}},
            lambda path: biases[path] if path in biases else read(path),
            dtype=dtype,
            max_shard_bytes=options.max_shard_bytes,
        )
        contents = " as"
    return (
        f"step {weights.step}{contents} {fields['architectures'][0]}, "
        f"{num_bytes:,} bytes of {dtype}"
    )


def _write_adapters(
    source: Source,
    target: Path,
    family: Family,
    weights: CheckpointWeights,
    shapes: Mapping[str, tuple[int, ...]],
) -> int:
    """Writes a run's adapters as a PEFT folder; returns the number of bytes."""
    for path, (_, names) in source.spec.named_trainable().items():
        if "experts" in names:
            raise ConfigError(
                f"--adapters: {path} adapts experts, which PEFT's files cannot hold. "
                "Leave out --adapters to merge the adapters into the model."
            )
    factors = {
        path: weights.read(path) for path in trees.flatten_names(source.spec.trainable)
    }
    return peft.write(
        target, family, source.lora, factors, shapes, base=source.base_model
    )


def _padding(source: Source, fields: Mapping[str, Any]) -> int:
    """Chooses the id that pads texts of a reward model without one.

    transformers reads the score at the last token that is no padding. So it is the
    lowest id that ends no text.
    """
    ends = {fields["eos_token_id"], *tokenizer_config.read(source.workdir).end_ids}
    return min(token for token in range(len(ends) + 1) if token not in ends)


def _write_tokenizer(source: Source, target: Path) -> dict[str, Any]:
    """Copies the run's tokenizer and chat files; returns fields for config.json."""
    fields: dict[str, Any] = {}
    tokenizer_config.copy_small_files(source.workdir / KEPT, target)
    trained_tokenizer = source.workdir / TOKENIZER_FILE
    if trained_tokenizer.is_file() and not (target / TOKENIZER_FILE).is_file():
        fields = hf_writer.copy_own_tokenizer(trained_tokenizer, target)
    if source.has_chats:
        hf_writer.write_chat_files(tokenizer_config.read(source.workdir), target)
    return fields
