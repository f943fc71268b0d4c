"""Converts a run to a Hugging Face folder, or such a folder to a workdir.

`--format huggingface` writes a folder for `from_pretrained`. `--format jaxdist` writes a
workdir with config.json and checkpoints/0 (weights only), for generate and evaluate. To
train such a model, set train --config.init.from_huggingface instead. The command runs on
the CPU, in one process. Example: `jaxdist convert --from runs/chat --to chat-hf --format
huggingface`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxdist.config import ConfigError
from jaxdist.config.command_line import Parser
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.interop.export_folder import ExportOptions, Source, export_folder
from jaxdist.interop.import_folder import open_folder
from jaxdist.models import registry
from jaxdist.storage import atomic
from jaxdist.trainer import (
    compose,
    exit_code,
    run_config,
    save_weights,
    validation,
    workdir,
)

_MAX_SHARD_GB = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    flags = _parser().parse_args(arguments)
    faults = list(_flag_faults(flags))
    if faults:
        raise ConfigError(faults)
    jax.config.update("jax_platforms", "cpu")
    target = flags.target
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty_folder:
        raise ConfigError(
            f"--to {target}: something is there; "
            "give a folder that is empty or does not exist"
        )
    with atomic.replacing(target) as partial:
        partial.mkdir(parents=True)
        if flags.format == "huggingface":
            summary = _to_huggingface(flags, partial)
        else:
            summary = _to_workdir(flags, partial)
    print(f"{target}: {summary}")
    return 0


def _flag_faults(flags: argparse.Namespace) -> Iterator[str]:
    """Yields flags that the chosen conversion does not read."""
    if flags.format == "jaxdist":
        for_huggingface = {
            "--adapters": flags.adapters,
            "--drop-choice-bias": flags.drop_choice_bias,
            "--step": flags.step is not None,
            "--max-shard-gb": flags.max_shard_gb is not None,
        }
        for flag, is_given in for_huggingface.items():
            if is_given:
                yield f"{flag}: only --format huggingface reads it. Leave it out."
    elif flags.adapters:
        if flags.dtype:
            yield (
                f"--dtype {flags.dtype} with --adapters: adapters are always written as "
                f"float32. Leave out --dtype."
            )
        if flags.max_shard_gb is not None:
            yield (
                f"--max-shard-gb {flags.max_shard_gb:g} with --adapters: adapters are "
                f"one file. Leave out --max-shard-gb."
            )


def _to_huggingface(flags: argparse.Namespace, target: Path) -> str:
    """Writes a run's weights as a Hugging Face folder; returns a summary."""
    stored = workdir.read_stored(flags.source / workdir.CONFIG)
    model = workdir.target_of(stored)
    if model != registry.DEFAULT_TARGET:
        raise ConfigError(f"model.target={model!r}: required {registry.DEFAULT_TARGET}")
    config = workdir.resolve(stored, flags.source)
    source = Source(
        workdir=flags.source,
        checkpoints=workdir.checkpoints_folder(flags.source, config),
        spec=compose.model_spec(config),
        model_options=config.model_options,
        lora=config.lora,
        base_model=config.init.from_huggingface,
        params_dtype=config.precision.params,
        sequence_length=config.batch.sequence_length,
        has_chats=config.data.uses_template,
    )
    max_shard_gb = flags.max_shard_gb
    if max_shard_gb is None:
        max_shard_gb = _MAX_SHARD_GB
    options = ExportOptions(
        step=flags.step,
        adapters=flags.adapters,
        drop_choice_bias=flags.drop_choice_bias,
        dtype=flags.dtype,
        max_shard_bytes=round(max_shard_gb * 1e9),
    )
    return export_folder(source, target, options)


def _to_workdir(flags: argparse.Namespace, target: Path) -> str:
    """Writes a Hugging Face folder as a workdir; returns a summary."""
    folder = open_folder(flags.source, flags.dtype or "float32")
    has_tokenizer = folder.copy_tokenizer(target)
    values = folder.config_values(
        flags.target.resolve() / TOKENIZER_FILE, has_tokenizer=has_tokenizer
    )
    config = run_config.default_config()
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(values)
    run = run_config.from_config(config)
    device = jax.devices()[0]
    spec = validation.validate(run, [device], with_data=False).spec
    state = folder.read_state(spec, device)
    save_weights.write(run, state, target, {"converted_from": str(flags.source)})
    return folder.summary(spec, has_tokenizer=has_tokenizer)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxdist convert", description=__doc__)
    add = parser.add_argument
    add("--from", dest="source", required=True, type=Path, help="folder to read")
    add(
        "--to",
        dest="target",
        required=True,
        type=Path,
        help="folder to write; it must be empty or not exist",
    )
    add(
        "--format",
        required=True,
        choices=("huggingface", "jaxdist"),
        help="format to write",
    )
    add(
        "--adapters",
        action="store_true",
        help="huggingface: write the LoRA adapters alone, as a PEFT folder "
        "(default: adapters are merged into the weights)",
    )
    add(
        "--drop-choice-bias",
        action="store_true",
        help="huggingface: omit the biases that choose experts, which other formats "
        "lack; some tokens then go to other experts",
    )
    add(
        "--step",
        type=int,
        help="huggingface: step of the checkpoint to read (default: the newest)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the written weights "
        "(default: huggingface: that of the run; jaxdist: float32); not with --adapters, "
        "which are float32",
    )
    add(
        "--max-shard-gb",
        type=float,
        metavar="GB",
        help="huggingface: largest safetensors file, in 1e9 bytes "
        f"(default: {_MAX_SHARD_GB:g})",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
