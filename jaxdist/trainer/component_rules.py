"""Rules between the config groups of a run that do not depend on the devices."""

import math
from collections.abc import Iterator

from jaxdist.config import is_text, schema
from jaxdist.models import registry
from jaxdist.objectives.config import objective_faults
from jaxdist.optim.config import warmup_faults
from jaxdist.step.update import offload_obstacle
from jaxdist.trainer.run_config import AUTO, RunConfig
from jaxdist.trainer.teacher_model import teacher_faults

# largest number of elements: more than any machine holds, and its bytes fit 64 bits
LARGEST = 2**48
_OF_64_BITS = ("seed", "data.validation_tokens")  # keys that may exceed 32 bits


def component_faults(config: RunConfig) -> Iterator[str]:
    """Yields values of different config groups that do not fit together."""
    train = config.train
    length = config.batch.sequence_length
    longest = getattr(config.model_config, "max_length", None)
    learned = ""
    if "max_positions" in config.model:
        learned = " (learned positions: raise model.max_positions)"
    if config.offload.optimizer:
        obstacle = offload_obstacle(config.optimizer)
        if obstacle:
            yield obstacle
    sample_tokens = 0 if train.sample_tokens == AUTO else train.sample_tokens
    if sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt is empty; give the sample a text to continue"
    if not is_text(train.sample_prompt):
        yield f"train.sample_prompt={train.sample_prompt!r} is not UTF-8 text; give another"
    prompt = len(train.sample_prompt.encode(errors="replace"))
    if sample_tokens and longest and longest < prompt + sample_tokens:
        yield (
            f"train.sample_tokens={sample_tokens} and its prompt are longer than the model's longest "
            f"sequence, {longest}{learned}; lower it"
        )
    if longest and longest < length:
        yield (
            f"batch.sequence_length={length} exceeds the model's longest sequence, {longest}{learned}; "
            f"shorten the sequence"
        )
    if not train.eval_every:
        need_evaluations = {
            "checkpoint.keep_best": config.checkpoint.keep_best,
            "train.patience": train.patience,
        }
        keys = [f"{key}={value}" for key, value in need_evaluations.items() if value]
        if keys:
            yield (
                f"{', '.join(keys)}: evaluations decide, and train.eval_every=0 makes "
                f"none; set it"
            )
    if not train.epochs:  # else the steps are known once the data is open
        yield from warmup_faults(config.optimizer, train.steps)
    further = getattr(config.model_config, "multi_token", None)
    if config.lora.rank and further is not None and further.depth:
        yield (
            f"model.multi_token.depth={further.depth}: lora.rank={config.lora.rank} "
            f"leaves the weights of these modules as they are, and so they learn "
            f"nothing; set model.multi_token.depth=0, or lora.rank=0"
        )
    if config.lora.from_peft and not config.init.from_huggingface:
        yield "lora.from_peft needs the model that it adapts; set init.from_huggingface"


def model_faults(config: RunConfig) -> list[str]:
    """Lists faults that keep models from being described: options, patterns, sizes."""
    faults = registry.option_faults(config.model_class, config.model_options)
    # These groups have patterns, which choose parameters of the model.
    for part in ("lora", "optimizer", "sharding"):
        faults += schema.faults(getattr(config, part), f"{part}.")
    # An objective may need parts that the model lacks.
    faults += objective_faults(
        config.objective,
        data_format=config.data.format,
        has_adapters=config.lora.rank > 0,
        head=config.model.get("head"),
    )
    return [*faults, *_size_faults(config), *teacher_faults(config)]


def _size_faults(config: RunConfig) -> Iterator[str]:
    """Yields sizes that overflow the integers of jax or of its compiler.

    Such an overflow would end the process.
    """
    flat = schema.flatten(schema.to_config_dict(config))
    unchecked: tuple[str, ...] = _OF_64_BITS
    if not config.model["target"].startswith("jaxdist."):
        unchecked += ("model.",)  # the options of a user's model may mean anything
    counts = {
        path: number
        for path, number in flat.items()
        if type(number) is int and not path.startswith(unchecked)
    }
    too_large = [path for path, number in counts.items() if abs(number) >= 2**31]
    for path in too_large:
        yield f"{path}: got {counts[path]}, required less than 2**31 = {2**31}; lower it"
    if too_large:
        return
    sizes = ["batch.global_size", "batch.sequence_length"]
    options = [path for path in counts if path.startswith("model.")]
    if options:
        sizes.append(max(options, key=counts.__getitem__))
    if math.prod(counts[path] for path in sizes) >= LARGEST:
        product = " x ".join(f"{path}={counts[path]}" for path in sizes)
        yield f"{product}: no array is so large; lower them"
