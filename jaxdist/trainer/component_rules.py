"""The rules between a run's components that hold on any devices."""

import math
from collections.abc import Iterator

from jaxdist.config import is_text, schema
from jaxdist.models import registry
from jaxdist.optim.config import warmup_faults
from jaxdist.step.update import offload_obstacle
from jaxdist.trainer.run_config import RunConfig

# elements: more than any machine has, few enough to count bytes in 64 bits
LARGEST = 2**48
_OF_64_BITS = ("seed", "data.validation_tokens")


def component_faults(run: RunConfig) -> Iterator[str]:
    """Yields which values of different components do not go together."""
    train = run.train
    length = run.batch.sequence_length
    longest = getattr(run.model_config, "max_length", None)
    learned = ""
    if "max_positions" in run.model:
        learned = " (learned positions: raise model.max_positions)"
    if run.offload.optimizer:
        obstacle = offload_obstacle(run.optimizer)
        if obstacle:
            yield obstacle
    if train.sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt is empty; give the sample something to go on from"
    if not is_text(train.sample_prompt):
        yield f"train.sample_prompt={train.sample_prompt!r} is not UTF-8 text; give another"
    prompt = len(train.sample_prompt.encode(errors="replace"))
    if train.sample_tokens and longest and longest < prompt + train.sample_tokens:
        yield (
            f"train.sample_tokens={train.sample_tokens} and its prompt are longer than the model's longest "
            f"sequence, {longest}{learned}; lower it"
        )
    if longest and longest < length:
        yield (
            f"batch.sequence_length={length} exceeds the model's longest sequence, {longest}{learned}; "
            f"shorten the sequence"
        )
    by_evaluations = {
        "checkpoint.keep_best": run.checkpoint.keep_best,
        "train.patience": train.patience,
    }
    if not train.eval_every and any(by_evaluations.values()):
        keys = ", ".join(
            f"{key}={value}" for key, value in by_evaluations.items() if value
        )
        yield f"{keys}: evaluations decide, and train.eval_every=0 makes none; set it"
    yield from warmup_faults(run.optimizer, train.steps)
    if run.lora.from_peft and not run.init.from_huggingface:
        yield "lora.from_peft needs the model that it adapts; set init.from_huggingface"


def model_faults(run: RunConfig) -> list[str]:
    """Lists why no spec can be made of a run's model: its options, patterns, sizes."""
    faults = registry.option_faults(run.model_class, run.model_options)
    for part in ("lora", "optimizer"):  # their patterns choose parameters
        faults += schema.faults(getattr(run, part), f"{part}.")
    return [*faults, *_size_faults(run)]


def _size_faults(run: RunConfig) -> Iterator[str]:
    """Yields what would overflow the integers of jax or of its compiler, which ends the
    process.
    """
    flat = schema.flatten(schema.to_config_dict(run))
    left_out: tuple[str, ...] = _OF_64_BITS
    if not run.model["target"].startswith("jaxdist."):
        left_out += ("model.",)  # only the model knows what its options mean
    counts = {
        path: number
        for path, number in flat.items()
        if type(number) is int and not path.startswith(left_out)
    }
    wrong = [path for path, number in counts.items() if abs(number) >= 2**31]
    for path in wrong:
        yield f"{path}: got {counts[path]}, required less than 2**31 = {2**31}; lower it"
    if wrong:
        return
    sizes = ["batch.global_size", "batch.sequence_length"]
    options = [path for path in counts if path.startswith("model.")]
    if options:
        sizes.append(max(options, key=counts.__getitem__))
    if math.prod(counts[path] for path in sizes) >= LARGEST:
        product = " x ".join(f"{path}={counts[path]}" for path in sizes)
        yield f"{product}: no array is so large; lower them"
