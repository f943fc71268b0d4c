"""`python -m jaxdist.convert --from A --to B --format huggingface|jaxdist`: a model in
the other form.

huggingface: of a workdir, a folder for `from_pretrained`. jaxdist: of such a folder, a
workdir with config.json and checkpoints/0 (weights alone) for generate and evaluate; to
train, give its path to train --config.init.from_huggingface instead. On the CPU, in one
process.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import interop
from jaxdist.config import ConfigError, Parser, trees
from jaxdist.data import tokenizer_config
from jaxdist.data.tokenizer import TOKENIZER_FILE
from jaxdist.interop import peft
from jaxdist.models import lora, registry
from jaxdist.step.state import State
from jaxdist.storage import atomic
from jaxdist.trainer import (
    build,
    config_json,
    exit_code,
    run_config,
    save_weights,
    validation,
    workdir,
)

# tokens of a converted workdir's sequences, where the model can take more
LONGEST = 1024


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = _parser().parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    target = flags.target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(
            f"--to {target}: something is there; give a folder that is empty or not there yet"
        )
    convert = _to_huggingface if flags.format == "huggingface" else _to_workdir
    with atomic.replacing(target) as partial:
        partial.mkdir(parents=True)
        summary = convert(flags, partial)
    print(f"{target}: {summary}")
    return 0


def _to_huggingface(flags: argparse.Namespace, target: Path) -> str:
    stored, kept = (
        config_json.read(flags.source / workdir.CONFIG),
        flags.source / interop.KEPT,
    )
    if (model := config_json.target_of(stored)) != registry.DEFAULT_TARGET:
        raise ConfigError(f"model.target={model!r}: required {registry.DEFAULT_TARGET}")
    config = config_json.resolve(stored, flags.source)
    if flags.adapters and not config.lora.rank:
        raise ConfigError(
            f"--adapters: {flags.source} was trained without adapters; leave the flag out"
        )
    origin: dict[str, Any] = interop.read_config(kept) if kept.is_dir() else {}
    if not origin and config.model["positions"] == "rotary":
        origin["max_position_embeddings"] = config.batch.sequence_length
    family, fields = interop.fields_of(config.model_options, origin)
    spec = build.model_spec(config)
    weights = interop.CheckpointWeights(
        workdir.checkpoints_folder(flags.source, config), flags.step
    )
    if not flags.drop_choice_bias:
        weights.check_choices(family)
    shapes, read = lora.unadapted(spec.abstract_model, weights.shapes, weights.read)
    if flags.adapters:
        of_experts = [
            path
            for path, (_, names) in spec.named_trainable().items()
            if "experts" in names
        ]
        if of_experts:
            raise ConfigError(
                f"--adapters: {of_experts[0]} is of experts, and PEFT's adapters of linear layers have no "
                f"place for it; leave the flag out, and the adapters are merged into the model"
            )
        factors = {
            path: weights.read(path) for path in trees.flatten_names(spec.trainable)
        }
        base, dtype = config.init.from_huggingface, "float32"
        written = peft.write(target, family, config.lora, factors, shapes, base=base)
    else:
        tokenizer_config.copy_small_files(kept, target)
        trained_tokenizer = flags.source / TOKENIZER_FILE
        if trained_tokenizer.is_file() and not (target / TOKENIZER_FILE).is_file():
            fields |= interop.copy_own_tokenizer(trained_tokenizer, target)
        if config.data.format == "chat":
            interop.write_chat_files(tokenizer_config.read(flags.source), target)
        dtype, most = (
            flags.dtype or config.precision.params,
            round(flags.max_shard_gb * 1e9),
        )
        written = interop.export(
            target, family, fields, shapes, read, dtype=dtype, max_shard_bytes=most
        )
    weights.close()
    what = ", the adapters for" if flags.adapters else " as"
    return (
        f"step {weights.step}{what} {family.architecture}, {written:,} bytes of {dtype}"
    )


def _to_workdir(flags: argparse.Namespace, target: Path) -> str:
    fields = interop.read_config(flags.source)
    family, values = interop.derive(fields)
    config, dtype = run_config.default_config(), flags.dtype or "float32"
    tokenizer_config.copy_small_files(flags.source, target / interop.KEPT)
    tokenizer = target / interop.KEPT / TOKENIZER_FILE
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, target / TOKENIZER_FILE)
        tokenizer_config.write(target, tokenizer_config.read(flags.source))
    longest = values["max_positions"] or fields.get("max_position_embeddings", LONGEST)
    changes: dict[str, object] = {
        f"model.{name}": value for name, value in values.items()
    }
    changes |= {"precision.params": dtype, "precision.compute": dtype}
    if values["num_experts"]:
        changes["model.balance"] = "batch"
    changes["batch.sequence_length"] = min(longest, LONGEST)
    # else its tokens may be bytes
    if tokenizer.is_file() or values["vocab_size"] != 256:
        changes["data.tokenizer"] = str(flags.target.resolve() / TOKENIZER_FILE)
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(changes)
    run, device = run_config.from_config(config), jax.devices()[0]
    _, _, spec = validation.validate(run, [device], with_data=False)
    where = jax.sharding.SingleDeviceSharding(device)
    wanted = {
        path: jax.ShapeDtypeStruct(x.shape, dtype, sharding=where)
        for path, x in trees.flatten_names(spec.trainable).items()
    }
    tensors = interop.open_weights(
        flags.source, values, {path: x.shape for path, x in wanted.items()}
    )
    start = (
        jax.jit(lambda: spec.init_params(jax.random.key(0))[1])()
        if spec.model_state
        else {}
    )
    state = State(
        jnp.int32(0), trees.unflatten_names(tensors.load(wanted)), {}, start, None, None
    )
    save_weights.write(run, state, target, {"converted_from": str(flags.source)})
    read_as = ""
    if fields.get("model_type") not in interop.FAMILIES:
        read_as = f" ({fields.get('model_type')!r} is not known: compare its logits)"
    if not tokenizer.is_file() and values["vocab_size"] != 256:
        read_as += f"; it has no {TOKENIZER_FILE}: put one there for text"
    return (
        f"{spec.parameter_count:,} parameters, read as {family.architecture}{read_as}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxdist convert", description=__doc__)
    add = parser.add_argument
    add("--from", dest="source", required=True, type=Path, help="folder to read")
    add(
        "--to",
        dest="target",
        required=True,
        type=Path,
        help="folder to write: empty, or not there yet",
    )
    add(
        "--format",
        required=True,
        choices=("huggingface", "jaxdist"),
        help="the form of what is written",
    )
    add(
        "--adapters",
        action="store_true",
        help="huggingface, of a run with lora: write them as PEFT does",
    )
    unbiased = "huggingface: leave out biases by which a run chooses experts, though tokens go elsewhere then"
    add("--drop-choice-bias", action="store_true", help=unbiased)
    add(
        "--step",
        type=int,
        help="of a workdir: checkpoint to read (default: the newest)",
    )
    dtypes = ("float32", "bfloat16")
    add(
        "--dtype",
        choices=dtypes,
        help="of what is written (default: that of a workdir; else float32)",
    )
    add(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="of a safetensors file, in 1e9 bytes (default: 5)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
